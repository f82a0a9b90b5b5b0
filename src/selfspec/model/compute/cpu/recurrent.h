// Recurrent halves of layers on a CPU, float32: a short convolution and the states behind it
// (recurrence.py has the equations). It keeps the promise of kernels.cpp: every number is one chain
// of operations over one token after the other, in a fixed order, so a row's bits depend on that
// row alone, however its text is cut into calls. A part of the heads, or of the channels, needs
// nothing of the others but what enters. Knows no threads.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace recurrent {

enum Finish { TIMES_GATE = 0, NORM_THEN_GATE = 1, GATE_THEN_NORM = 2, TIMES_SILU = 3 };

struct Recurrence {
    int64_t index;  // which of a call's memories is its own
    int64_t channels, taps, heads, key, value, key_heads;
    int64_t activated, twice, delta, values_first, finish;
    const float *weight, *bias, *decay, *shift, *straight, *norm;
    int64_t norm_size, norm_width;
    float eps, low, high;
    int64_t selective;  // 1: each channel has a state, and steps of its own (selective.h)

    int64_t outputs() const { return heads ? heads * value : channels; }
    int64_t entry() const { return channels + heads + (selective ? key : heads); }
    int64_t keys() const { return key_heads * key; }
    int64_t gate() const { return channels * (twice ? 2 : 1); }  // its first column
    int64_t first_of(int which) const {  // of q, k, v within c
        if (values_first) return which == 2 ? 0 : heads * value + (which == 1 ? 0 : keys());
        return which * keys();
    }
    // Whether what a part of the heads gives can be finished without the others.
    bool by_head() const {
        return finish == TIMES_GATE || finish == TIMES_SILU || (heads && norm_size == value);
    }
};

// Tokens of one row, from one of its states to another.
struct Passage {
    int64_t token;  // the first one's place in the call; -1: their entries are kept already
    int64_t row, first, count;
    int64_t source, target;  // a source of -1: the state before the first token
};

// What one recurrent layer keeps of all rows, and what happens to it in a call.
struct Kept {
    float *entries, *states;  // rows x slots x entry, rows x 2 x (heads, key, value)
    int64_t* places;          // rows x 2: up to which token a state goes; -1: nobody knows
    int64_t slots;
    const Passage* passages;
    int64_t count;

    float* entry(const Recurrence& how, int64_t row, int64_t place) const {
        return entries + (row * slots + place % slots) * how.entry();
    }
    float* state(const Recurrence& how, int64_t row, int64_t which) const {
        return states + (row * 2 + which) * how.heads * how.key * how.value;
    }
    // What is written to counts as unknown until it is whole.
    void begin() const {
        for (int64_t i = 0; i < count; i++)
            places[passages[i].row * 2 + passages[i].target] = -1;
    }
    void end() const {
        for (int64_t i = 0; i < count; i++)
            places[passages[i].row * 2 + passages[i].target] =
                passages[i].first + passages[i].count;
    }
};

// The columns of a call's tokens, and where what they give goes.
struct Columns {
    const float* y;
    int64_t stride;
    float* out;
    int64_t out_stride;
};

constexpr int64_t BLOCK = 32, UNIT = 16;

typedef float Vector __attribute__((vector_size(UNIT * 4)));
typedef float Unaligned __attribute__((vector_size(UNIT * 4), aligned(4), may_alias));

// A whole vector, or `some` numbers of one.
template <bool WHOLE>
static inline Vector load(const float* p, int64_t some) {
    if (WHOLE) return *(const Unaligned*)p;
    Vector v = {};
    std::memcpy(&v, p, some * sizeof(float));
    return v;
}
template <bool WHOLE>
static inline void store(float* p, Vector v, int64_t some) {
    if (WHOLE)
        *(Unaligned*)p = v;
    else
        std::memcpy(p, &v, some * sizeof(float));
}

// e^x within two of the last bits, in operations that any compiler turns into vectors.
static inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float n = std::nearbyintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}
static inline float silu(float x) { return x / (1.0f + exponential(-x)); }
static inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Each head's decay and rate at one token, from the columns behind its gate.
static void rates(const Recurrence& how, const float* y, int64_t begin, int64_t end,
                  float* decays) {
    const float *steps = y + how.gate() + how.outputs(), *gates = steps + how.heads;
    float* rate = decays + how.heads;
    for (int64_t h = begin; h < end; h++) {
        float step = softplus(steps[h] + how.shift[h]);
        if (!how.delta) step = std::min(std::max(step, how.low), how.high);
        decays[h] = std::exp(how.decay[h] * step);
        rate[h] = how.delta ? how.high / (1.0f + std::exp(-gates[h])) : step;
    }
}

// What enters the convolution at one token, in channels [begin, end).
static void enter(const Recurrence& how, const float* y, int64_t begin, int64_t end, float* u) {
    if (!how.twice) return (void)std::memcpy(u + begin, y + begin, (end - begin) * sizeof(float));
    for (int64_t c = begin; c < end; c++) u[c] = y[c] * y[how.channels + c];
}

// `kept`: what entered at the tokens that are seen, the own one last.
static void convolve(const Recurrence& how, const float* const* kept, int64_t begin, int64_t end,
                     float* out) {
    for (int64_t c = begin; c < end; c++) out[c] = how.bias ? how.bias[c] : 0.0f;
    for (int64_t tap = 0; tap < how.taps; tap++) {
        const float *w = how.weight + tap * how.channels, *u = kept[tap];
        for (int64_t c = begin; c < end; c++) out[c] += w[c] * u[c];
    }
    if (how.activated)
        for (int64_t c = begin; c < end; c++) out[c] = silu(out[c]);
}

static void to_length_one(float* x, int64_t size, float scale) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += x[i] * x[i];
    scale /= std::sqrt(sum + 1e-6f);
    for (int64_t i = 0; i < size; i++) x[i] *= scale;
}

// A decay of 1 that the compiler does not see, so that it rounds old * decay + k * change alike.
static volatile float unchanged = 1.0f;

// Columns of one head's state through one token, from where it was, N vectors at a time, whose sums
// stay in registers. The loops go through `before` and `state` at one place at a time, so they may
// be one. `width`: from one row of the state to the next.
template <int N, bool WHOLE = true>
static inline void go_on_columns(bool delta, int64_t key, int64_t width, const float* before,
                                 float* state, const float* q, const float* k, const float* v,
                                 float decay, float rate, float* o, int64_t some = UNIT) {
    Vector change[N] = {}, sum[N] = {};
    if (delta) {
        for (int64_t i = 0; i < key; i++) {
            for (int n = 0; n < N; n++) {
                Vector now = load<WHOLE>(before + i * width + n * UNIT, some) * decay;
                store<WHOLE>(state + i * width + n * UNIT, now, some);
                change[n] += now * k[i];
            }
        }
        before = state;
        for (int n = 0; n < N; n++) {
            change[n] = (load<WHOLE>(v + n * UNIT, some) - change[n]) * rate;
        }
        decay = unchanged;
    } else {
        for (int n = 0; n < N; n++) change[n] = load<WHOLE>(v + n * UNIT, some) * rate;
    }
    for (int64_t i = 0; i < key; i++) {
        for (int n = 0; n < N; n++) {
            Vector old = load<WHOLE>(before + i * width + n * UNIT, some);
            Vector now = old * decay + change[n] * k[i];
            store<WHOLE>(state + i * width + n * UNIT, now, some);
            sum[n] += now * q[i];
        }
    }
    for (int n = 0; n < N; n++) store<WHOLE>(o + n * UNIT, sum[n], some);
}

// One head's state through one token, from where it was. o may not be v.
static void go_on(const Recurrence& how, const float* before, float* state, const float* q,
                  const float* k, const float* v, float decay, float rate, float* o) {
    int64_t value = how.value, j = 0;
    for (; j + 4 * UNIT <= value; j += 4 * UNIT)
        go_on_columns<4>(how.delta, how.key, value, before + j, state + j, q, k, v + j, decay,
                         rate, o + j);
    for (; j + 2 * UNIT <= value; j += 2 * UNIT)
        go_on_columns<2>(how.delta, how.key, value, before + j, state + j, q, k, v + j, decay,
                         rate, o + j);
    for (; j + UNIT <= value; j += UNIT)
        go_on_columns<1>(how.delta, how.key, value, before + j, state + j, q, k, v + j, decay,
                         rate, o + j);
    if (j < value)
        go_on_columns<1, false>(how.delta, how.key, value, before + j, state + j, q, k, v + j,
                                decay, rate, o + j, value - j);
}

// What the product behind it reads: columns [begin, end) of o and the gate as one, in place of o.
// They are whole groups of those that are normed together.
__attribute__((noinline)) static void finish(const Recurrence& how, float* o, const float* gate,
                                             int64_t begin, int64_t end) {
    if (how.finish == TIMES_GATE) {
        for (int64_t j = begin; j < end; j++) o[j] *= gate[j];
        return;
    }
    if (how.finish == GATE_THEN_NORM || how.finish == TIMES_SILU)
        for (int64_t j = begin; j < end; j++) o[j] *= silu(gate[j]);
    if (how.finish == TIMES_SILU) return;
    for (int64_t at = begin; at < end; at += how.norm_size) {
        const float* weight = how.norm + at % how.norm_width;
        float *x = o + at, sum = 0;
        for (int64_t j = 0; j < how.norm_size; j++) sum += x[j] * x[j];
        float scale = 1.0f / std::sqrt(sum / how.norm_size + how.eps);
        for (int64_t j = 0; j < how.norm_size; j++) x[j] *= scale * weight[j];
    }
    if (how.finish == NORM_THEN_GATE)
        for (int64_t j = begin; j < end; j++) o[j] *= silu(gate[j]);
}

// What a part of the heads, or of the channels where there are none, makes of a call's passages.
class Part {
    const Recurrence& how;
    const Kept& kept;
    const Columns& columns;
    int64_t begin, end;  // heads or channels
    std::vector<float>& room;
    std::vector<const float*> seen;  // what entered at each token, those before a block first
    float *c, *entering, *zeros, *unwanted;

    // Room for blocks of so many tokens.
    void hold(int64_t tokens) {
        size_t all = (2 * tokens + 1) * how.channels + how.value;
        if (room.size() < all) room.resize(all);
        c = room.data();
        entering = c + tokens * how.channels;
        zeros = entering + tokens * how.channels;
        unwanted = zeros + how.channels;
        std::memset(zeros, 0, how.channels * sizeof(float));
    }

    // Each range of channels [from, to) that the part reads.
    template <class Do>
    void each_range(Do act) const {
        if (!how.heads) return act(begin, end);
        int64_t shared = how.heads / how.key_heads;
        int64_t low = begin / shared, high = (end - 1) / shared + 1;
        for (int which = 0; which < 2; which++)
            act(how.first_of(which) + low * how.key, how.first_of(which) + high * how.key);
        act(how.first_of(2) + begin * how.value, how.first_of(2) + end * how.value);
    }

    const float* own(const Passage& passage, int64_t t) const {
        return columns.y + (passage.token + t) * columns.stride;
    }

    // Looks up what entered at tokens [from, from + count) of a passage and at those before them.
    void look_up(const Passage& passage, int64_t from, int64_t count) {
        seen.clear();
        for (int64_t t = from - how.taps + 1; t < from + count; t++) {
            int64_t place = passage.first + t;
            if (place < 0) {
                seen.push_back(zeros);
            } else if (t < 0 || passage.token < 0) {
                seen.push_back(kept.entry(how, passage.row, place));
            } else if (!how.twice) {
                seen.push_back(own(passage, t));
            } else {
                float* u = entering + (t - from + how.taps - 1) * how.channels;
                each_range([&](int64_t a, int64_t b) { enter(how, own(passage, t), a, b, u); });
                seen.push_back(u);
            }
        }
    }

    // One head through tokens [from, from + count), from where its state was.
    void through_head(const Passage& passage, int64_t h, int64_t from, int64_t count) {
        int64_t shared = h / (how.heads / how.key_heads), size = how.key * how.value;
        float* state = kept.state(how, passage.row, passage.target) + h * size;
        const float* before = state;
        if (from == 0 && passage.source < 0)
            std::memset(state, 0, size * sizeof(float));
        else if (from == 0)
            before = kept.state(how, passage.row, passage.source) + h * size;
        for (int64_t t = from; t < from + count; t++, before = state) {
            const float* here = c + (t - from) * how.channels;
            const float* rate = kept.entry(how, passage.row, passage.first + t) + how.channels + h;
            const float* v = here + how.first_of(2) + h * how.value;
            bool wanted = passage.token >= 0;
            float* o = unwanted;
            if (wanted) o = columns.out + (passage.token + t) * columns.out_stride + h * how.value;
            go_on(how, before, state, here + how.first_of(0) + shared * how.key,
                  here + how.first_of(1) + shared * how.key, v, rate[0], rate[how.heads], o);
            if (how.straight && wanted)
                for (int64_t j = 0; j < how.value; j++) o[j] += how.straight[h] * v[j];
        }
    }

    void through_heads(const Passage& passage, int64_t from, int64_t count) {
        for (int64_t t = 0; t < count; t++) {
            float* here = c + t * how.channels;
            each_range([&](int64_t a, int64_t b) { convolve(how, &seen[t], a, b, here); });
            int64_t shared = how.heads / how.key_heads;
            for (int64_t g = begin / shared; how.delta && g <= (end - 1) / shared; g++) {
                to_length_one(here + how.first_of(0) + g * how.key, how.key,
                              1.0f / std::sqrt((float)how.key));
                to_length_one(here + how.first_of(1) + g * how.key, how.key, 1.0f);
            }
            if (passage.token >= 0)
                rates(how, own(passage, from + t), begin, end,
                      kept.entry(how, passage.row, passage.first + from + t) + how.channels);
        }
        for (int64_t h = begin; h < end; h++) through_head(passage, h, from, count);
    }

   public:
    Part(const Recurrence& how, const Kept& kept, const Columns& columns, int64_t part,
         int64_t parts, std::vector<float>& room)
        : how(how), kept(kept), columns(columns), room(room) {
        int64_t unit = how.heads ? 1 : UNIT, all = how.heads ? how.heads : how.channels;
        int64_t units = (all + unit - 1) / unit;
        begin = units * part / parts * unit;
        end = std::min(units * (part + 1) / parts * unit, all);
    }

    __attribute__((noinline)) void run() {
        if (begin >= end) return;
        for (int64_t i = 0; i < kept.count; i++) {
            const Passage& passage = kept.passages[i];
            if (!how.heads && passage.token < 0) continue;
            hold(std::min(BLOCK, passage.count) + how.taps - 1);
            for (int64_t from = 0; from < passage.count; from += BLOCK)
                through_block(passage, from, std::min(BLOCK, passage.count - from));
        }
    }

   private:
    void through_block(const Passage& passage, int64_t from, int64_t count) {
        look_up(passage, from, count);
        if (how.heads) through_heads(passage, from, count);
        for (int64_t t = from; t < from + count && passage.token >= 0; t++) {
            float* o = columns.out + (passage.token + t) * columns.out_stride;
            if (!how.heads) convolve(how, &seen[t - from], begin, end, o);
            int64_t size = how.heads ? how.value : 1;
            if (how.by_head())
                finish(how, o, own(passage, t) + how.gate(), begin * size, end * size);
        }
    }
};

// A part of each passage's new tokens, of which the last are kept.
template <class Do>
static void each_kept(const Kept& kept, int64_t part, int64_t parts, Do act) {
    for (int64_t i = 0; i < kept.count; i++) {
        const Passage& passage = kept.passages[i];
        if (passage.token < 0) continue;
        int64_t from = std::max<int64_t>(0, passage.count - kept.slots);
        int64_t count = passage.count - from;
        for (int64_t t = from + count * part / parts; t < from + count * (part + 1) / parts; t++)
            act(passage, t);
    }
}

// Keeps what entered at a part of each passage's tokens. Nobody may still read what was there.
static void keep(const Recurrence& how, const Kept& kept, const Columns& columns, int64_t part,
                 int64_t parts) {
    each_kept(kept, part, parts, [&](const Passage& passage, int64_t t) {
        enter(how, columns.y + (passage.token + t) * columns.stride, 0, how.channels,
              kept.entry(how, passage.row, passage.first + t));
    });
}

// x * sigmoid(gate), both `width` wide.
static inline void times_sigmoid(float* x, const float* gate, int64_t width) {
    for (int64_t j = 0; j < width; j++) x[j] /= 1.0f + exponential(-gate[j]);
}

}  // namespace recurrent
