// Mamba-1: a state for every channel, whose places decay by steps that two products make of what
// left the convolution (selective.py has the equations). What recurrent.h promises holds here: each
// number is one chain of operations over one token after the other. Knows no threads, and no
// products: who calls runs them between the two parts.

#pragma once

#include "recurrent.h"

namespace recurrent {

// Of each token of a call: what left the convolution, each channel's step before its softplus and
// then behind it, and the keys and queries that all channels share.
struct Chosen {
    float *x, *steps;        // tokens x channels
    const float *keys, *queries;
    int64_t stride;  // from one token to the next in the last two
};

static const float* seen_at(const Recurrence& how, const Kept& kept, const Columns& columns,
                            const Passage& passage, int64_t t, const float* zeros) {
    if (passage.first + t < 0) return zeros;
    if (t < 0 || passage.token < 0) return kept.entry(how, passage.row, passage.first + t);
    return columns.y + (passage.token + t) * columns.stride;
}

// Channels [begin, end) of what leaves the convolution at one token of a passage.
static void convolve_at(const Recurrence& how, const Kept& kept, const Columns& columns,
                        const Passage& passage, int64_t t, const std::vector<float>& zeros,
                        std::vector<const float*>& seen, int64_t begin, int64_t end, float* x) {
    seen.clear();
    for (int64_t at = t - how.taps + 1; at <= t; at++)
        seen.push_back(seen_at(how, kept, columns, passage, at, zeros.data()));
    convolve(how, seen.data(), begin, end, x);
}

// The same at all new tokens.
static void convolve_new(const Recurrence& how, const Kept& kept, const Columns& columns,
                         const Chosen& chosen, int64_t begin, int64_t end) {
    std::vector<float> zeros(how.channels);
    std::vector<const float*> seen;
    for (int64_t i = 0; i < kept.count; i++) {
        const Passage& passage = kept.passages[i];
        for (int64_t t = 0; t < passage.count && passage.token >= 0; t++)
            convolve_at(how, kept, columns, passage, t, zeros, seen, begin, end,
                        chosen.x + (passage.token + t) * how.channels);
    }
}

// One channel's state through one token; gives q's sum over it. `key`: as many numbers as it has.
static inline float go_on_channel(int64_t key, float* state, const float* decay, float step,
                                  float x, const float* k, const float* q) {
    float sums[UNIT] = {}, total = 0;
    for (int64_t i = 0; i < key; i += UNIT) {
        int64_t some = std::min(UNIT, key - i);
        float decays[UNIT];
        for (int64_t j = 0; j < some; j++) decays[j] = exponential(step * decay[i + j]);
        for (int64_t j = 0; j < some; j++) {
            state[i + j] = state[i + j] * decays[j] + step * k[i + j] * x;
            sums[j] += state[i + j] * q[i + j];
        }
    }
    for (int64_t j = 0; j < UNIT; j++) total += sums[j];
    return total;
}

// Channels [begin, end) of all passages: what is wanted, finished, and states that have gone on.
static void select(const Recurrence& how, const Kept& kept, const Columns& columns,
                   const Chosen& chosen, int64_t begin, int64_t end) {
    std::vector<float> zeros(how.channels), again(how.channels);
    std::vector<const float*> seen;
    for (int64_t i = 0; i < kept.count; i++) {
        const Passage& passage = kept.passages[i];
        float* state = kept.state(how, passage.row, passage.target);
        if (passage.source < 0)
            std::fill(state + begin * how.key, state + end * how.key, 0.0f);
        else if (passage.source != passage.target)
            std::copy_n(kept.state(how, passage.row, passage.source) + begin * how.key,
                        (end - begin) * how.key, state + begin * how.key);
        for (int64_t t = 0; t < passage.count; t++) {
            bool wanted = passage.token >= 0;
            int64_t token = passage.token + t;
            const float* entry = kept.entry(how, passage.row, passage.first + t) + how.channels;
            float* steps = chosen.steps + token * how.channels;
            const float* x = chosen.x + token * how.channels;
            const float* k = wanted ? chosen.keys + token * chosen.stride : entry + how.heads;
            const float* q = wanted ? chosen.queries + token * chosen.stride : k;
            float* o = columns.out + token * columns.out_stride;
            if (!wanted) {
                convolve_at(how, kept, columns, passage, t, zeros, seen, begin, end, again.data());
                x = again.data();
            }
            for (int64_t h = begin; h < end; h++) {
                float step = wanted ? steps[h] = softplus(steps[h]) : entry[h];
                float sum = go_on_channel(how.key, state + h * how.key, how.decay + h * how.key,
                                          step, x[h], k, q);
                if (wanted) o[h] = sum + how.straight[h] * x[h];
            }
            if (wanted)
                finish(how, o, columns.y + token * columns.stride + how.gate(), begin, end);
        }
    }
}

// Keeps what entered, the steps and the keys of a part of each passage's tokens. Nobody may still
// read what was there.
static void keep_chosen(const Recurrence& how, const Kept& kept, const Columns& columns,
                        const Chosen& chosen, int64_t part, int64_t parts) {
    keep(how, kept, columns, part, parts);
    each_kept(kept, part, parts, [&](const Passage& passage, int64_t t) {
        float* entry = kept.entry(how, passage.row, passage.first + t) + how.channels;
        int64_t token = passage.token + t;
        std::copy_n(chosen.steps + token * how.channels, how.heads, entry);
        std::copy_n(chosen.keys + token * chosen.stride, how.key, entry + how.heads);
    });
}

}  // namespace recurrent
