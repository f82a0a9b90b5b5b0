// What attention computes with: queries times keys, scores that become weights, and values by these.
// Every number is one chain of operations, however many queries or keys go side by side.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "vectors.h"

// Of two vectors the lanes that `from(lane)` names, those of the second counted on from LANES.
template <class From, int... LANE>
static inline Vector lanes_of(Vector a, Vector b, From from, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, from(LANE)...);
#else
    return __builtin_shuffle(a, b, IntVector{from(LANE)...});
#endif
}
template <class From>
static inline Vector lanes_of(Vector a, Vector b, From from) {
    return lanes_of(a, b, from, std::make_integer_sequence<int, LANES>());
}

// One level of the tree of sum_lanes on LANES vectors at once: the halves of two vectors are added
// into one.
template <int HALF>
static inline void fold(Vector* part) {
    auto low = [](int lane) { return (lane & HALF ? LANES : 0) + (lane & ~HALF); };
    auto high = [](int lane) { return (lane & HALF ? LANES : 0) + (lane | HALF); };
    for (int j = 0; j < HALF; j++)
        part[j] = lanes_of(part[j], part[j + HALF], low) + lanes_of(part[j], part[j + HALF], high);
    if constexpr (HALF > 1) fold<HALF / 2>(part);
}

// The products of one query with LANES keys; lane j holds what sum_lanes would give for key(j). As
// many keys as lanes, so that their sums are folded together and not one by one. If it ASKS, so
// many numbers from `next` on are asked for meanwhile.
template <bool ASKS = false, class Key>
static inline Vector score_keys(const float* query, Key key, int64_t size,
                                const float* next = nullptr) {
    Vector part[LANES];
    Vector q = load(query);
    auto ask = [&](int64_t at) {
        if (ASKS && at % LINE == 0) __builtin_prefetch(next + at, 0, 2);
    };
    for (int j = 0; j < LANES; j++) {
        ask(j * LANES);
        part[j] = q * load(key(j));
    }
    for (int64_t i = LANES; i < size; i += LANES) {
        q = load(query + i);
        for (int j = 0; j < LANES; j++) {
            ask((i + j) * LANES);
            part[j] += q * load(key(j) + i);
        }
    }
    fold<LANES / 2>(part);
    return part[0];
}

// heads that are no multiple of LANES
static inline float score_key(const float* query, const float* key, int64_t size) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += query[i] * key[i];
    return sum;
}

// queries that share what is read of keys and values: their sums fit into the registers
constexpr int TILE = LANES == 16 ? 6 : 3;

// Swaps rows and columns of LANES vectors, in quarters of ever smaller squares.
template <int HALF>
static inline void transpose(Vector* part) {
    auto low = [](int lane) { return lane & HALF ? lane - HALF + LANES : lane; };
    auto high = [](int lane) { return lane & HALF ? lane + LANES : lane + HALF; };
    for (int j = 0; j < LANES; j++) {
        if (j & HALF) continue;
        Vector upper = part[j], lower = part[j + HALF];
        part[j] = lanes_of(upper, lower, low);
        part[j + HALF] = lanes_of(upper, lower, high);
    }
    if constexpr (HALF > 1) transpose<HALF / 2>(part);
}

// The bits of a lane's number, mirrored: in this order the tree of sum_lanes meets the lanes.
static constexpr int mirrored(int lane) {
    int found = 0;
    for (int bit = 1; bit < LANES; bit *= 2) found += lane & bit ? LANES / 2 / bit : 0;
    return found;
}

constexpr int64_t AHEAD = 12 << 10;  // bytes of keys or values that are asked for before their use
// Keys or values of more bytes do not stay in the second cache while all queries of a batch use
// them. What comes next of them is asked for in equal steps, a line with every so many numbers of a
// query or values: all at once would wait for one another. With few lanes multiplying takes longer.
constexpr int64_t FAR = LANES == 16 ? 512 << 10 : INT64_MAX;

// Keys or values that a thread will read, stretch after stretch of memory. As many are asked for as
// are used meanwhile, and evenly: many at once would wait for one another, and whoever asks for
// them too.
class Ahead {
    struct Stretch {
        const float* first;
        int64_t rows;
    };
    std::vector<Stretch> stretches;
    int64_t columns, stride, row = 0;
    size_t at = 0;

   public:
    Ahead(int64_t columns, int64_t stride) : columns(columns), stride(stride) {}
    void add(const float* first, int64_t rows) {
        if (rows > 0) stretches.push_back({first, rows});
    }
    // The first of them. `asked`: somebody did.
    void begin(bool asked = false) {
        int64_t rows = AHEAD / (4 * columns);
        if (!asked) return ask(rows);
        take(rows);
    }
    // Where the next rows lie, for whoever asks for them line by line. Null: there are none.
    const float* take(int64_t rows) {
        if (at >= stretches.size()) return nullptr;
        const float* next = stretches[at].first + row * stride;
        row += rows;
        if (row >= stretches[at].rows) at++, row = 0;
        return next;
    }
    void ask(int64_t rows) {
        for (; rows > 0 && at < stretches.size(); rows--) {
            const float* next = stretches[at].first + row * stride;
#pragma GCC unroll 4
            for (int64_t i = 0; i < columns; i += LINE) __builtin_prefetch(next + i, 0, 2);
            if (++row == stretches[at].rows) at++, row = 0;
        }
    }
};

// The keys of a head once more, for many queries: panels of PANEL keys, so that a vector holds the
// same number of LANES keys and no sum has to be folded. A panel's numbers lie in the order in
// which they are used: [mirrored lane][size / LANES][PANEL].
class KeyPanels {
    Bytes room;
    const float* from = nullptr;
    int64_t blocks = 0;  // of LANES keys that are complete

   public:
    // Forgets what it holds, and makes room for heads of so many keys.
    void clear(int64_t most, int64_t size) {
        room.hold((most + PANEL) * size * 4);
        from = nullptr;
    }

    // The first `count` keys, or more. What lies behind them in the last panel is never looked at,
    // but it is multiplied: zeros, since numbers that are left there by chance may be so small that
    // some processors take a hundred times as long for each.
    const float* of(const float* keys, int64_t size, int64_t count) {
        if (keys != from) blocks = 0;
        from = keys;
        int64_t whole = std::max(blocks, count / LANES);
        for (; blocks * LANES < count; blocks++) {
            float* panel = room.floats() + blocks / WIDE * PANEL * size + blocks % WIDE * LANES;
            const float* key[LANES];
            for (int64_t l = 0; l < LANES; l++)
                key[l] = keys + std::min(blocks * LANES + l, count - 1) * size;
            for (int64_t i = 0; i < size; i += LANES, panel += PANEL) {
                Vector part[LANES];
                for (int l = 0; l < LANES; l++) part[l] = load(key[l] + i);
                transpose<LANES / 2>(part);
                bool last = blocks % WIDE == 0 && (blocks + 1) * LANES >= count;
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++) {
                    float* lane = panel + mirrored(l) * (size / LANES) * PANEL;
                    store(lane, part[l]);
                    if (last) store(lane + LANES, Vector{});
                }
            }
        }
        blocks = whole;
        return room.floats();
    }
};

// Numbers 0, LANES, 2 * LANES ... of ROWS queries times those of the keys of a panel. If it ASKS,
// half a line of `next` is asked for with each number.
template <int ROWS, bool ASKS>
static inline __attribute__((always_inline)) void score_lane(
    const float* const* queries, int64_t lane, const float* panel, int64_t size,
    Vector (*sums)[WIDE], const float* next) {
    for (int64_t i = lane; i < size; i += LANES, panel += PANEL, next += 8) {
        if (ASKS && i / LANES % 2 == 0) __builtin_prefetch(next, 0, 3);
        Vector key[WIDE];
        for (int c = 0; c < WIDE; c++) key[c] = load_once(panel + c * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) sums[r][c] += queries[r][i] * key[c];
    }
}

// The same of COUNT lanes, in the order in which the tree of sum_lanes adds them: from lane `n` of
// the mirrored ones on. With its SIZE known (else 0) the few steps of a lane are no loop.
template <int ROWS, int SIZE, bool ASKS, int COUNT>
static inline __attribute__((always_inline)) void score_lanes(
    const float* const* queries, int n, const float* panel, int64_t any_size,
    Vector (*sums)[WIDE], const float* next) {
    const int64_t size = SIZE ? SIZE : any_size;
    if constexpr (COUNT == 1) {
        score_lane<ROWS, ASKS>(queries, mirrored(n), panel, size, sums, next);
    } else {
        constexpr int HALF = COUNT / 2;
        const int64_t numbers = HALF * size / LANES;  // of each query, of half of the lanes
        Vector other[ROWS][WIDE] = {};
        score_lanes<ROWS, SIZE, ASKS, HALF>(queries, n, panel, size, sums, next);
        panel += numbers * PANEL, next += numbers * 8;
        score_lanes<ROWS, SIZE, ASKS, HALF>(queries, n + HALF, panel, size, other, next);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) sums[r][c] += other[r][c];
    }
}

// The products of ROWS queries with the keys of a panel, number by number as `score_keys` makes
// them. `next`: what is asked for meanwhile, as many lines as half of a query's numbers, or null.
template <int ROWS, int SIZE>
static inline void score_panel(const float* const* queries, const float* panel, int64_t size,
                               float scale, float* const* out, const float* next) {
    Vector sums[ROWS][WIDE] = {};
    if (next)
        score_lanes<ROWS, SIZE, true, LANES>(queries, 0, panel, size, sums, next);
    else
        score_lanes<ROWS, SIZE, false, LANES>(queries, 0, panel, size, sums, panel);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < WIDE; c++) store(out[r] + c * LANES, sums[r][c] * scale);
}

template <int ROWS>
static inline void score_some(int64_t rows, const float* const* queries, const float* panel,
                              int64_t size, float scale, float* const* out,
                              const float* next) {
    if (rows == ROWS) {
        if (size == 64) return score_panel<ROWS, 64>(queries, panel, size, scale, out, next);
        if (size == 128) return score_panel<ROWS, 128>(queries, panel, size, scale, out, next);
        return score_panel<ROWS, 0>(queries, panel, size, scale, out, next);
    }
    if constexpr (ROWS > 1) score_some<ROWS - 1>(rows, queries, panel, size, scale, out, next);
}

static inline float in_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Scores become weights that sum to 1, or with a sink to less. With a slope they first fall with
// the distance from the last one, which is the query's own, or `coarse` grow with their place,
// times `scale`, which scores have in them. `count` is rounded up to LANES by the caller's buffer.
static inline void softmax(float* scores, int64_t count, float scale, float cap, float slope = 0,
                           const float* sink = nullptr, bool coarse = false) {
    int64_t whole = count / LANES, vectors = (count + LANES - 1) / LANES;
    for (int64_t j = count; j < vectors * LANES; j++) scores[j] = -INFINITY;
    Vector most[MANY], lane, total = {};
    std::fill_n(most, MANY, splat(-INFINITY));
    for (int l = 0; l < LANES; l++) lane[l] = l;
    for (int64_t j = 0; j < count && (cap > 0 || slope != 0); j += LANES) {
        Vector score = load(scores + j);
        if (cap > 0)
            for (int l = 0; l < LANES; l++) score[l] = cap * std::tanh(score[l] / cap);
        if (slope != 0 && coarse)
            for (int l = 0; l < LANES; l++)
                score[l] += in_bfloat16(slope * in_bfloat16((float)(j + l))) * scale;
        else if (slope != 0)
            score += slope * (lane + (float)(j - (count - 1)));
        store(scores + j, score);
    }
    by_many(vectors, [&](auto many, int64_t at) {
        for (int i = 0; i < many; i++)
            most[i] = lanes_max(load(scores + (at + i) * LANES), most[i]);
    });
    float largest = sink ? *sink : -INFINITY;
    for (int i = 1; i < MANY; i++) most[0] = lanes_max(most[i], most[0]);
    for (int l = 0; l < LANES; l++) largest = std::max(largest, most[0][l]);
    by_many(whole, [&](auto many, int64_t at) {
        Vector weights[many];
        float* here = scores + at * LANES;
        for (int i = 0; i < many; i++) weights[i] = load(here + i * LANES) - largest;
        exponentials<many>(weights);
        for (int i = 0; i < many; i++) {
            store(here + i * LANES, weights[i]);
            total += weights[i];
        }
    });
    if (whole < vectors) {
        float* here = scores + whole * LANES;
        Vector weight = exponential(load(here) - largest);
        weight = lane < splat(count - whole * LANES) ? weight : Vector{};
        store(here, weight);
        total += weight;
    }
    float sum = sum_lanes(total);
    if (sink) sum += exponential(splat(*sink - largest))[0];
    float inverse = 1.0f / sum;
    by_many(vectors, [&](auto many, int64_t at) {
        float* here = scores + at * LANES;
        for (int i = 0; i < many; i++) store(here + i * LANES, load(here + i * LANES) * inverse);
    });
}

constexpr int SPAN = 4;  // vectors of one head that are summed together

// Values that are asked for while others are summed: one for every `step` of them, and 0 for none.
struct Ask {
    const float* first = nullptr;
    int64_t stride = 0, step = 0;
};

// out[r][begin:] += sum over j of weights[r][j] * value(j)[begin:], SPANS vectors at a time, as far
// as they go: they fit into registers, and a value is read once for all queries. The running sums
// rest in `out` between calls, which changes no bit. STEP is that of `ask`. Gives the first number
// that is left.
template <int ROWS, int SPANS, int STEP, class Value>
static inline int64_t weigh_spans(const float* const* weights, Value value, int64_t count,
                                  int64_t begin, int64_t size, float* const* out, Ask ask) {
    constexpr int PART = STEP ? SPANS * LANES / LINE / STEP : 0;  // lines that are asked for at once
    int64_t i = begin;
    for (; i + SPANS * LANES <= size; i += SPANS * LANES) {
        Vector total[ROWS][SPANS];
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < SPANS; c++) total[r][c] = load(out[r] + i + c * LANES);
        for (int64_t j = 0; j < count; j++) {
            for (int c = 0; c < SPANS; c++) {
                if constexpr (STEP > 0) {
                    const float* next = ask.first + j / STEP * ask.stride + i;
                    if (c < PART) __builtin_prefetch(next + (j % STEP * PART + c) * LINE, 0, 2);
                }
                Vector here = load_once(value(j) + i + c * LANES);
                for (int r = 0; r < ROWS; r++) total[r][c] += weights[r][j] * here;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < SPANS; c++) store(out[r] + i + c * LANES, total[r][c]);
    }
    return i;
}

template <int ROWS, class Value>
static inline void weigh_rows(const float* const* weights, Value value, int64_t count,
                              int64_t size, float* const* out, Ask ask) {
    auto spans = [&](auto step) {
        return weigh_spans<ROWS, SPAN, step>(weights, value, count, 0, size, out, ask);
    };
    int64_t i = ask.step == 0   ? spans(Number<0>())
                : ask.step == 1 ? spans(Number<1>())
                : ask.step == 2 ? spans(Number<2>())
                                : spans(Number<4>());
    i = weigh_spans<ROWS, SPAN / 2, 0>(weights, value, count, i, size, out, ask);
    i = weigh_spans<ROWS, 1, 0>(weights, value, count, i, size, out, ask);
    // numbers side by side, never one sum cut into vectors: that would change its bits
    for (int r = 0; r < ROWS && i < size; r++)
        for (int64_t j = 0; j < count; j++) {
            const float* __restrict here = value(j);
            float weight = weights[r][j], * __restrict total = out[r];
            for (int64_t at = i; at < size; at++) total[at] += weight * here[at];
        }
}

template <int ROWS, class Value>
static inline void weigh(int64_t rows, const float* const* weights, Value value, int64_t count,
                         int64_t size, float* const* out, Ask ask = {}) {
    if (rows == ROWS) return weigh_rows<ROWS>(weights, value, count, size, out, ask);
    if constexpr (ROWS > 1) weigh<ROWS - 1>(rows, weights, value, count, size, out, ask);
}
