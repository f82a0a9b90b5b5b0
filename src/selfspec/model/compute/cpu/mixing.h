// The experts of a mixture at work (experts.h says which of them a token has).

#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"
#include "experts.h"
#include "product.h"
#include "recurrent.h"
#include "threads.h"
#include "vectors.h"

constexpr int PIECES = 3;  // of a product, for each thread

// What the threads of a call share of its experts' work.
struct Staging {
    Bytes which, weights, staged, first, second;
    int64_t slots = 0;
    // bytes of a staged row at most, and numbers of its products
    int64_t row = 0, wide = 0, width = 0;

    // Room for this mixture and for those that it was held for before.
    void hold(const experts::Mixture& mixture, int64_t tokens) {
        slots = std::max(slots, tokens * mixture.each());
        for (int64_t e = 0; e < mixture.all(); e++) {
            for (const Product* weight : {&mixture.into[e], &mixture.out[e]})
                row = std::max(row, (bytes(*weight) + 63) / 64 * 64);
            wide = std::max(wide, mixture.into[e].outputs);
        }
        width = std::max(width, mixture.width());
        which.hold(slots * 8);
        weights.hold(slots * 4);
        staged.hold(slots * row);
        first.hold(slots * wide * 4);
        second.hold(slots * width * 4);
    }
    static int64_t bytes(const Product& weight) {  // of one of its rows
        return weight.prepare ? weight.prepared : weight.inputs * 4;
    }
};

// The experts of one half at work: each runs once, with the rows of all tokens that have it. Every
// product's rows are staged beside one another, and a token's sum goes through its own experts, the
// best first, so a token's bits do not depend on what other tokens choose.
struct Experts {
    const experts::Mixture& mixture;
    const float *x, *logits;  // of each token: its numbers, and what the router gave
    int64_t read, stride;     // from one token to the next in both
    int64_t tokens, width;
    const float* residual;  // or null
    float* out;
    int64_t given;  // from one token to the next in both
    Staging& staging;

    void run(Items of_into, Items of_out, Meeting& meeting, Memory& memory) const {
        for (Share mine(tokens); mine.begin < mine.end; mine.begin++) choose(mine.begin, memory);
        meeting.wait();
        experts::Slots& slots = memory.slots;  // every thread sorts them for itself
        slots.sort(mixture, (const int64_t*)staging.which.at(), tokens);
        auto copy = [&](int64_t slot, float* to) {
            const float* from = x + slots.tokens[slot] * read;
            float weight = mixture.of_inputs ? staging.weights.floats()[slots.pairs[slot]] : 1.0f;
            std::transform(from, from + width, to, [&](float value) { return weight * value; });
        };
        multiply(mixture.into, copy, staging.first.floats(), staging.wide, of_into, meeting,
                 memory);
        auto activate = [&](int64_t slot, float* to) {
            int64_t expert = slots.experts[slot], size = mixture.out[expert].inputs;
            int64_t own = mixture.into[expert].outputs;
            const float* gate = staging.first.floats() + slots.place(slot, staging.wide, own);
            activate_some(gate, mixture.gated ? gate + size : nullptr, to, 0, size,
                          mixture.activation);
        };
        multiply(mixture.out, activate, staging.second.floats(), width, of_out, meeting, memory);
        add(slots);
        meeting.wait();
    }

   private:
    void choose(int64_t t, Memory& memory) const {
        int64_t room = (mixture.count + LANES) / LANES * LANES;
        memory.scores.hold(2 * room * 4);
        float* scores = memory.scores.floats();
        const float* given = logits + t * stride;
        auto sigmoid = [](float logit) { return 1.0f / (1.0f + recurrent::exponential(-logit)); };
        if (mixture.sigmoid) {
            std::transform(given, given + mixture.count, scores, sigmoid);
        } else {
            std::copy_n(given, mixture.count, scores);
            if (!mixture.margin) softmax(scores, mixture.count, 1, 0);
        }
        int64_t* which = (int64_t*)staging.which.at() + t * mixture.each();
        float* weights = staging.weights.floats() + t * mixture.each();
        experts::choose(mixture, scores, scores + room, which, weights);
        if (!mixture.shared) return;
        which[mixture.chosen] = mixture.count;
        weights[mixture.chosen] = mixture.weighed ? sigmoid(given[mixture.count]) : 1.0f;
    }

    // One product of every expert with its rows, which `row` writes. Complete at the end.
    template <class Row>
    void multiply(const Product* products, Row row, float* to, int64_t wide, Items items,
                  Meeting& meeting, Memory& memory) const {
        const experts::Slots& slots = memory.slots;
        for (Share mine(slots.total()); mine.begin < mine.end; mine.begin++) {
            const Product& weight = products[slots.experts[mine.begin]];
            char* place =
                staging.staged.at(slots.place(mine.begin, staging.row, Staging::bytes(weight)));
            if (!weight.prepare) {
                row(mine.begin, (float*)place);
                continue;
            }
            memory.scores.hold(weight.inputs * 4);
            row(mine.begin, memory.scores.floats());
            weight.prepare(&weight, memory.scores.floats(), 0, weight.inputs, place);
        }
        meeting.wait();
        int64_t active = slots.active.size(), threads = omp_get_num_threads();
        int64_t pieces = threads == 1 ? 1 : (threads * PIECES + active - 1) / active;
        items.share_out(active * pieces, [&](int64_t item) {
            int64_t expert = slots.active[item / pieces], begin = slots.begins[expert];
            const Product& weight = products[expert];
            weight.multiply(&weight, staging.staged.at(begin * staging.row), slots.rows(expert),
                            nullptr, to + begin * wide, item % pieces, pieces);
        });
        meeting.wait();
    }

    // This thread's share of what comes out: the residual, then what each expert gives.
    void add(const experts::Slots& slots) const {
        Share mine(tokens * width);
        for (int64_t begin = mine.begin, end; begin < mine.end; begin = end) {
            int64_t t = begin / width, first = begin % width;
            end = std::min(mine.end, (t + 1) * width);
            float* __restrict sums = out + t * given + first;
            if (!residual)
                std::fill_n(sums, end - begin, 0.0f);
            else if (residual != out)
                std::copy_n(residual + t * given + first, end - begin, sums);
            for (int64_t i = t * mixture.each(); i < (t + 1) * mixture.each(); i++) {
                const float* __restrict from =
                    staging.second.floats() + slots.of[i] * width + first;
                float weight = mixture.of_inputs ? 1.0f : staging.weights.floats()[i];
                for (int64_t c = 0; c < end - begin; c++) sums[c] += weight * from[c];
            }
        }
    }
};

// A mixture by itself: x (tokens, width) and what the router gave, to what all experts give.
extern "C" void mix(const experts::Mixture* mixture, const float* x, const float* logits,
                    int64_t stride, int64_t tokens, int64_t width, const float* residual,
                    float* out, int threads) {
    Staging staging;
    staging.hold(*mixture, tokens);
    Meeting meeting;
    Steps steps(2, threads);
    Experts all{*mixture, x, logits, width, stride, tokens, width, residual, out, width, staging};
#pragma omp parallel num_threads(threads)
    {
        Memory memory;
        all.run(steps[0], steps[1], meeting, memory);
    }
}
