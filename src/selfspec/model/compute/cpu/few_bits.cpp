// Products with weights of few bits: 8 bits, 4 bits, 8 bits in groups, and bfloat16. Compiled like
// kernels.cpp, whose promises they keep: a row's bits depend on that row alone, in every variant of
// the processor.
//
// With 8 and 4 bits the rows of x are rounded too, to 8 bits in groups of 32 numbers. A group's
// products are summed as integers, which no order can change; the groups' sums are scaled and added
// in float32, from the first group to the last. So each output is the same chain of roundings,
// whatever the processor calls its instructions. With bfloat16 nothing is rounded: the outputs are
// those of the float32 kernel with the same weights.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "halves.h"
#include "panels.h"
#include "rows_avx2.h"

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_ROWS = 8;
#elif defined(__AVX2__)
constexpr int LANES = 8, MAX_ROWS = 6;
#else
constexpr int LANES = 4, MAX_ROWS = 6;
#endif
constexpr int WIDE = 2, PANEL = LANES * WIDE;  // as in kernels.cpp: columns that lie side by side
constexpr int GROUP = TOGETHER;                // numbers of x that share a scale

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));        // a number of each lane
typedef int16_t Halves __attribute__((vector_size(LANES * 2)));  // the same in two bytes

template <class T>
static inline T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
static inline Vector splat(float s) { return s - Vector{}; }  // -0 stays what it is
static inline Ints splat(int32_t s) { return Ints{} + s; }

#define ALWAYS_INLINE __attribute__((always_inline))

// Whether a tile asks for what it will read next. If not, it asks half as far ahead for what comes
// later. And whether few rows ask for nothing, since the processor's own prefetcher does better.
// tuning.py chooses both. Every kind knows how many rows are few: FEW_ROWS. Several that do not fit
// into the first cache beside a panel are read from the second one with each panel, which is more
// than that prefetcher follows: measured with AVX2, and not yet with AVX-512, where few rows are
// few whatever their size.
static bool asks_soon = true, quiet = false;
constexpr int64_t NEAR = LANES == 16 ? INT64_MAX : 32768;

extern "C" void tune(int64_t soon_too, int64_t few_rows_are_quiet) {
    asks_soon = soon_too != 0, quiet = few_rows_are_quiet != 0;
}

// Whether a tile asks memory for anything, and whether it is alone or several share a panel: known
// when it is compiled, since to find out with each part of a step takes up to a quarter of all
// instructions.
enum class Asks { NOTHING, ALONE, SHARED };

// A panel is one stream from memory. A tile asks for what it will read next into the first cache,
// and for what comes later into the second: here for one of TURNS parts of the BYTES of a step. All
// at once would make the products behind it wait, on processors that keep few requests. Always
// inline: a call that only asks has no effect for a compiler, which then leaves it out.
template <Asks ASKS, int BYTES, int TURNS>
ALWAYS_INLINE static inline void ask(const uint8_t* soon, const Later& later, int64_t step,
                                     int turn) {
    if (ASKS == Asks::NOTHING) return;
    const char* next = later.from + step * later.step;
    if (asks_soon)
        for (int i = 64 * turn; i < BYTES; i += 64 * TURNS) __builtin_prefetch(soon + i, 0, 3);
    if (ASKS == Asks::ALONE)
        for (int i = 64 * turn; i < BYTES; i += 64 * TURNS) __builtin_prefetch(next + i, 0, 2);
    if (ASKS == Asks::SHARED)  // a part of `later.step`, half of BYTES or less
        for (int i = 0; i < BYTES / 2; i += 64 * TURNS)
            __builtin_prefetch(next + turn * (later.step / TURNS) + i / TURNS, 0, 2);
}

// What a processor multiplies and adds at once: four bytes of each lane, or two numbers of 16 bits.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define IN_FOURS
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define IN_PAIRS
#endif

#if defined(IN_PAIRS)
static inline Ints pair_sums(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}

// Bytes without a sign times bytes with one, two and two added. What exceeds 16 bits is cut off.
static inline Shorts pairs_of_bytes(Ints a, Ints b) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#else
    return (Shorts)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

// Four weights in each lane, and four numbers of x in all lanes, as `dot` takes them: made of the
// bytes of w + 128, and of what a row keeps its numbers as.
#if defined(IN_PAIRS)
// Two products of bytes may exceed 16 bits, so both are widened before. The first and the third of
// four are a pair, the other two another: so they lie in a row, and so shifts take weights apart.
typedef int16_t ForBytes;
struct Fours {
    Shorts first, second;
};
static inline Fours four_weights(Ints bytes) {
    typedef uint16_t Unsigned __attribute__((vector_size(LANES * 4)));
    return {(Shorts)bytes & 255, (Shorts)((Unsigned)bytes >> 8)};
}
static inline Fours four_numbers(const int16_t* at) {
    return {(Shorts)splat(load<int32_t>(at)), (Shorts)splat(load<int32_t>(at + 2))};
}
#else
typedef int8_t ForBytes;
typedef Ints Fours;
static inline Ints four_weights(Ints bytes) { return bytes; }
static inline Ints four_numbers(const int8_t* at) { return splat(load<int32_t>(at)); }
#endif

// total + the sums of four products in each lane. Where the total begins with -128 times the sum of
// all x (`RowGroup::shifts`), the 128 that were added to weights are undone.
static inline Ints dot(Ints total, const Fours& weights, const Fours& x) {
#if defined(IN_PAIRS)
    total += pair_sums(weights.first, x.first);
    return total + pair_sums(weights.second, x.second);
#elif defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, (__m512i)x);
#elif defined(IN_FOURS)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)weights, (__m256i)x);
#else
    Shorts w = (Shorts)weights, s = (Shorts)x, even = w & 255, odd = (w >> 8) & 255;
    Shorts x_even = (s << 8) >> 8, x_odd = s >> 8;
    for (int lane = 0; lane < LANES; lane++)
        for (int half = 0; half < 2; half++)
            total[lane] += even[2 * lane + half] * x_even[2 * lane + half] +
                           odd[2 * lane + half] * x_odd[2 * lane + half];
    return total;
#endif
}

// The same for weights of 4 bits, as they are. Two of their products fit into 16 bits, and so do
// all of a group's that belong there: 16 times 15 times 127.
#if defined(IN_PAIRS)
typedef Shorts SmallSums;
static inline SmallSums dot_small(SmallSums total, Ints weights, Ints x) {
    return total + pairs_of_bytes(weights, x);
}
static inline Ints widened(SmallSums total) { return pair_sums(total, Shorts{} + 1); }
#else
typedef Ints SmallSums;
static inline SmallSums dot_small(SmallSums total, Ints weights, Ints x) {
    return dot(total, weights, x);
}
static inline Ints widened(SmallSums total) { return total; }
#endif

// ------------------------------------------------------------------------------- the rows of x

static inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

// A row of x in 8 bits, as the integer products read it: group after group the numbers, what they
// are multiples of, and what belongs to each part. Numbers beyond the last are zeros. PART of them
// are summed together, for weights in groups of as many: all 32 of a group, or each half.
template <int PART_, class Number_>
struct RowGroup {
    typedef Number_ Number;
    static constexpr int PART = PART_, PARTS = GROUP / PART;
    Number numbers[GROUP];  // if of two bytes each four in the order 0, 2, 1, 3 (`four_numbers`)
    float scale;            // what the numbers are multiples of
    int32_t shifts[PARTS];  // -128 times the sum of a part's numbers
    float sums[PARTS];      // a part's sum, scaled
};

template <class Group>
static inline const Group& group_at(const char* place) {
    return *(const Group*)place;
}

// To the nearest integer, ties to even, in one rounding on every processor.
static inline Ints rounded(Vector v) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32((__m256)v);
#else
    Ints out;
    for (int lane = 0; lane < LANES; lane++) out[lane] = (int32_t)std::lrintf(v[lane]);
    return out;
#endif
}

static inline float largest_lane(Vector v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float largest = v[0];
    for (int lane = 1; lane < LANES; lane++) largest = std::max(largest, v[lane]);
    return largest;
#endif
}

static inline int32_t sum_lanes(Ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += v[lane];
    return sum;
#endif
}

// In two steps, for which compilers know instructions where they have none for both at once.
static inline void put(Ints whole, int8_t* numbers) {
    Bytes bytes = __builtin_convertvector(__builtin_convertvector(whole, Halves), Bytes);
    std::memcpy(numbers, &bytes, sizeof bytes);
}

static inline void put(Ints whole, int16_t* numbers) {
    Ints order;  // 0, 2, 1, 3
    for (int lane = 0; lane < LANES; lane++)
        order[lane] = lane / 4 * 4 + lane % 4 / 2 + lane % 2 * 2;
    Halves halves = __builtin_convertvector(__builtin_shuffle(whole, order), Halves);
    std::memcpy(numbers, &halves, sizeof halves);
}

// One group of a row. A NaN is no largest number.
template <class Group>
static inline void round_group(const float* numbers, Group& group) {
    constexpr int VECTORS = GROUP / LANES, PART = Group::PART;
    Vector some[VECTORS], most = {};
    for (int i = 0; i < VECTORS; i++) {
        some[i] = load<Vector>(numbers + i * LANES);
        Vector size = some[i] < 0 ? -some[i] : some[i];
        most = size > most ? size : most;
    }
    float largest = largest_lane(most);
    float inverse = largest > 0 ? 127.0f / largest : 0.0f, scale = largest / 127.0f;
    group.scale = scale;
    for (int part = 0; part < group.PARTS; part++) {
        Ints sums = {};
        for (int i = part * PART / LANES; i < (part + 1) * PART / LANES; i++) {
            Ints whole = rounded(some[i] * inverse);
            put(whole, group.numbers + i * LANES);
            sums += whole;
        }
        int32_t sum = sum_lanes(sums);
        group.shifts[part] = -128 * sum;
        group.sums[part] = scale * sum;
    }
}

template <class Group>
static void round_row(const float* x, int64_t begin, int64_t end, void* prepared) {
    auto* row = (Group*)prepared;
    int64_t whole = end / GROUP;
    for (int64_t g = begin / GROUP; g < whole; g++) round_group(x + g * GROUP, row[g]);
    if (whole * GROUP < end) {
        float numbers[GROUP] = {};
        std::memcpy(numbers, x + whole * GROUP, 4 * (end - whole * GROUP));
        round_group(numbers, row[whole]);
    }
}

// Rounds a row, and says how many bytes each group of it takes.
#define ROUNDED(name, ...)                                                                   \
    extern "C" void name(const Product*, const float* x, int64_t begin, int64_t end,         \
                         void* prepared) {                                                   \
        round_row<__VA_ARGS__>(x, begin, end, prepared);                                     \
    }                                                                                        \
    extern "C" int64_t name##_bytes() { return sizeof(__VA_ARGS__); }

ROUNDED(round_for_bytes_32, RowGroup<32, ForBytes>)
ROUNDED(round_for_bytes_16, RowGroup<16, ForBytes>)
ROUNDED(round_for_half_bytes, RowGroup<32, int8_t>)

// ---------------------------------------------------------------------------- kinds of weights

// How PART inputs of a panel lie in it, and their integer products with as many numbers of
// each row; x is at a group, and `part` is one of its parts. `ask` is called in TURNS.

// Bytes, [PART / 4][column][4 inputs]: those of w + 128, which the rows' shifts undo.
template <int PART_>
struct WholeBytes {
    typedef RowGroup<PART_, ForBytes> Row;
    static constexpr int PART = PART_, SIZE = PART;               // inputs, bytes of a column
    static constexpr int TURNS = PART / 4;
    static constexpr int SOON = 64 / PART, LATER = 12 * 32 / PART;  // parts ahead

    // An input of a column, of those in the part.
    static inline float at(const uint8_t* weights, int64_t column, int64_t input) {
        return (float)(weights[(input / 4 * PANEL + column) * 4 + input % 4] - 128);
    }

    template <int ROWS, class Ask>
    static inline void dots(const char* x, int64_t stride, int64_t part, const uint8_t* weights,
                            Ints (&whole)[ROWS][WIDE], Ask ask) {
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++)
                whole[r][c] = splat(group_at<Row>(x + r * stride).shifts[part]);
#pragma GCC unroll 8
        for (int k = 0; k < TURNS; k++) {
            ask(k);
            Fours weight[WIDE];
            for (int c = 0; c < WIDE; c++)
                weight[c] = four_weights(load<Ints>(weights + (k * WIDE + c) * LANES * 4));
            for (int r = 0; r < ROWS; r++) {
                auto* numbers = group_at<Row>(x + r * stride).numbers + part * PART;
                Fours number = four_numbers(numbers + 4 * k);
                for (int c = 0; c < WIDE; c++)
                    whole[r][c] = dot(whole[r][c], weight[c], number);
            }
        }
    }
};

// Half bytes, [4][column][4]: the low halves are the numbers of the first four of eight inputs, the
// high halves those of the other four.
struct HalfBytes {
    typedef RowGroup<GROUP, int8_t> Row;
    static constexpr int PART = GROUP, SIZE = GROUP / 2, TURNS = PART / 8;
    static constexpr int SOON = 3, LATER = 20;

    static inline float at(const uint8_t* weights, int64_t column, int64_t input) {
        uint8_t both = weights[(input / 8 * PANEL + column) * 4 + input % 4];
        return (float)(input / 4 % 2 ? both >> 4 : both & 15);
    }

    template <int ROWS, class Ask>
    static inline void dots(const char* x, int64_t stride, int64_t part, const uint8_t* weights,
                            Ints (&whole)[ROWS][WIDE], Ask ask) {
        SmallSums sums[ROWS][WIDE] = {};
#pragma GCC unroll 4
        for (int k = 0; k < TURNS; k++) {
            ask(k);
            Ints low[WIDE], high[WIDE];
            for (int c = 0; c < WIDE; c++) {
                Ints both = load<Ints>(weights + (k * WIDE + c) * LANES * 4);
                low[c] = both & 0x0f0f0f0f;
                high[c] = (both >> 4) & 0x0f0f0f0f;
            }
            for (int r = 0; r < ROWS; r++) {
                const int8_t* eight = group_at<Row>(x + r * stride).numbers + 8 * k;
                Ints first = splat(load<int32_t>(eight)), second = splat(load<int32_t>(eight + 4));
                for (int c = 0; c < WIDE; c++)
                    sums[r][c] = dot_small(dot_small(sums[r][c], low[c], first), high[c], second);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) whole[r][c] = widened(sums[r][c]);
    }
};

// A product that no compiler joins with the sum behind it, as it may where it sees both.
__attribute__((noinline)) static float times(float a, float b) { return a * b; }

// 8 bits and a scale for each column: a panel is bytes, part after part, and then the scales.
struct EightBits {
    typedef WholeBytes<GROUP> Numbers;
    typedef Numbers::Row Row;
    static constexpr int STEP = GROUP * PANEL, AHEAD = Numbers::LATER * STEP, KEPT = 1;
    static constexpr int FEW_ROWS = 4;

    static int64_t panel_bytes(int64_t inputs) {
        return groups_of(inputs) * GROUP * PANEL + 4 * PANEL;
    }

    static void read(const uint8_t* panel, int64_t column, int64_t inputs, float* out) {
        float scale = load<float>(panel + groups_of(inputs) * GROUP * PANEL + 4 * column);
        for (int64_t k = 0; k < inputs; k++)
            out[k] = WholeBytes<GROUP>::at(panel, column, k) * scale;
    }

    template <int ROWS, Asks ASKS>
    static void tile(const char* x, int64_t stride, int64_t inputs, const uint8_t* panel,
                     const Later& later, float* sums) {
        int64_t groups = groups_of(inputs);
        Vector total[ROWS][WIDE] = {};
        for (int64_t g = 0; g < groups; g++, panel += STEP, x += sizeof(Row)) {
            Ints whole[ROWS][WIDE];
            Numbers::dots(x, stride, 0, panel, whole, [&](int turn) ALWAYS_INLINE {
                ask<ASKS, STEP, Numbers::TURNS>(panel + Numbers::SOON * STEP, later, g, turn);
            });
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < WIDE; c++)
                    total[r][c] += __builtin_convertvector(whole[r][c], Vector) *
                                   splat(group_at<Row>(x + r * stride).scale);
        }
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) {
                Vector scaled = total[r][c] * load<Vector>(panel + c * LANES * 4);
                std::memcpy(sums + r * PANEL + c * LANES, &scaled, sizeof scaled);
            }
    }
};

static inline float from_half(const uint8_t* at) { return from_half(load<uint16_t>(at)); }

static inline Vector from_halves(const uint8_t* at) {
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__F16C__)
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#else
    Vector out;
    for (int i = 0; i < LANES; i++) out[i] = from_half(at + 2 * i);
    return out;
#endif
}

// Numbers with a scale and a minimum for each column and part, both of 16 bits: a panel is, part
// after part, the numbers, the scales, the minima. A weight is minimum + number * scale.
template <class Numbers>
struct Grouped {
    typedef typename Numbers::Row Row;
    static constexpr int PARTS = GROUP / Numbers::PART;       // of a group
    static constexpr int STEP = PANEL * (Numbers::SIZE + 4);  // bytes of a part
    static constexpr int AHEAD = Numbers::LATER * STEP, KEPT = 1;
    static constexpr int FEW_ROWS = Numbers::SIZE == Numbers::PART ? 4 : LANES == 16 ? 2 : 1;

    static int64_t panel_bytes(int64_t inputs) { return groups_of(inputs) * PARTS * STEP; }

    static void read(const uint8_t* panel, int64_t column, int64_t inputs, float* out) {
        for (int64_t k = 0; k < inputs; k++) {
            const uint8_t* part = panel + k / Numbers::PART * STEP;
            const uint8_t* scale = part + Numbers::SIZE * PANEL + 2 * column;
            float number = Numbers::at(part, column, k % Numbers::PART);
            out[k] = times(number, from_half(scale)) + from_half(scale + 2 * PANEL);
        }
    }

    template <int ROWS, Asks ASKS>
    static void tile(const char* x, int64_t stride, int64_t inputs, const uint8_t* panel,
                     const Later& later, float* sums) {
        int64_t groups = groups_of(inputs);
        Vector total[ROWS][WIDE] = {};
        for (int64_t at = 0; at < groups * PARTS; at++, panel += STEP) {
            Ints whole[ROWS][WIDE];
            int64_t part = at % PARTS;
            Numbers::dots(x, stride, part, panel, whole, [&](int turn) ALWAYS_INLINE {
                ask<ASKS, STEP, Numbers::TURNS>(panel + Numbers::SOON * STEP, later, at, turn);
            });
            Vector scale[WIDE], minimum[WIDE];
            for (int c = 0; c < WIDE; c++) {
                const uint8_t* from = panel + Numbers::SIZE * PANEL + c * LANES * 2;
                scale[c] = from_halves(from), minimum[c] = from_halves(from + 2 * PANEL);
            }
            for (int r = 0; r < ROWS; r++) {
                auto& group = group_at<Row>(x + r * stride);
                for (int c = 0; c < WIDE; c++) {
                    Vector scaled = scale[c] * splat(group.scale);
                    total[r][c] += __builtin_convertvector(whole[r][c], Vector) * scaled;
                    total[r][c] += minimum[c] * splat(group.sums[part]);
                }
            }
            if (part == PARTS - 1) x += sizeof(Row);
        }
        for (int r = 0; r < ROWS; r++) std::memcpy(sums + r * PANEL, total[r], sizeof total[r]);
    }
};

// bfloat16: a panel is [input][LANES][2]; a pair is a column of the first vector and one of the
// second. The row is read as it is.
struct HalfFloats {
    static constexpr int STEP = 2 * PANEL, AHEAD = 128 * STEP;  // bytes of an input
    static constexpr int KEPT = 16;
    static constexpr int FEW_ROWS = LANES == 16 ? 4 : 2;

    static int64_t panel_bytes(int64_t inputs) { return 2 * inputs * PANEL; }

    static void read(const uint8_t* panel, int64_t column, int64_t inputs, float* out) {
        for (int64_t k = 0; k < inputs; k++) {
            int64_t at = 2 * (k * LANES + column % LANES) + column / LANES;
            uint32_t word = (uint32_t)load<uint16_t>(panel + 2 * at) << 16;
            out[k] = load<float>(&word);
        }
    }

    template <int ROWS, Asks ASKS>
    static void tile(const char* x, int64_t stride, int64_t inputs, const uint8_t* panel,
                     const Later& later, float* sums) {
        Vector total[ROWS][WIDE] = {};
        int64_t k = 0;
#if defined(HAS_ROWS_BY_PANEL)
        if (ASKS == Asks::SHARED || (ASKS == Asks::ALONE && !asks_soon))
            k = rows_by_panel<ROWS, true>(x, stride, panel, inputs, true, later.from, later.step,
                                          sums);
        if (k) std::memcpy(total, sums, sizeof total);
        panel += k * STEP;
#endif
        for (; k < inputs; k++, panel += STEP) {
            ask<ASKS, STEP, 1>(panel + 16 * STEP, later, k, 0);
            Words both = load<Words>(panel);
            Vector weight[WIDE] = {(Vector)(both << 16), (Vector)(both & 0xffff0000u)};
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < WIDE; c++)
                    total[r][c] += load<float>(x + r * stride + 4 * k) * weight[c];
        }
        std::memcpy(sums, total, sizeof total);
    }
};

// ------------------------------------------------------------------------------------ a product

template <class Kind, int ROWS, Asks ASKS>
static inline void tile_of(int64_t rows, const char* x, int64_t stride, int64_t inputs,
                           const uint8_t* panel, const Later& later, float* sums) {
    if (rows == ROWS) return Kind::template tile<ROWS, ASKS>(x, stride, inputs, panel, later, sums);
    if constexpr (ROWS > 1)
        tile_of<Kind, ROWS - 1, ASKS>(rows, x, stride, inputs, panel, later, sums);
}

template <class Kind>
static void multiply(const Product* weight, const void* x, int64_t rows, const float* residual,
                     float* out, int part, int parts) {
    int64_t inputs = weight->inputs, bytes = Kind::panel_bytes(inputs);
    int64_t stride = weight->prepare ? weight->prepared : 4 * inputs;
    bool few = rows == 1 || (rows <= Kind::FEW_ROWS && bytes + rows * stride <= NEAR);
    by_panels<PANEL, MAX_ROWS, Kind::KEPT>(
        weight, {0, weight->outputs}, rows, {MAX_ROWS, 0, 0}, residual, out, part, parts,
        [=](const PanelTile& tile, float* sums) {
            const uint8_t* panel = (const uint8_t*)weight->weights + tile.panel * bytes;
            int64_t ahead = asks_soon ? Kind::AHEAD : Kind::AHEAD / 2;
            Later later(tile, panel, bytes, panel + bytes, bytes / Kind::STEP, ahead);
            auto some = quiet && few  ? tile_of<Kind, Kind::FEW_ROWS, Asks::NOTHING>
                        : later.alone ? tile_of<Kind, MAX_ROWS, Asks::ALONE>
                                      : tile_of<Kind, MAX_ROWS, Asks::SHARED>;
            some(tile.rows, (const char*)x + tile.first * stride, stride, inputs, panel, later,
                 sums);
        });
}

template <class Kind>
static void read(const Product* weight, int64_t row, float* out) {
    const uint8_t* weights = (const uint8_t*)weight->weights;
    int64_t inputs = weight->inputs;
    Kind::read(weights + row / PANEL * Kind::panel_bytes(inputs), row % PANEL, inputs, out);
}

extern "C" int64_t panel_width() { return PANEL; }

#define KIND(name, ...)                                                                      \
    extern "C" void multiply_##name(const Product* weight, const void* x, int64_t rows,      \
                                    const float* residual, float* out, int part,             \
                                    int parts) {                                             \
        multiply<__VA_ARGS__>(weight, x, rows, residual, out, part, parts);                  \
    }                                                                                        \
    extern "C" void read_##name(const Product* weight, int64_t row, float* out) {            \
        read<__VA_ARGS__>(weight, row, out);                                                 \
    }

KIND(int8, EightBits)
KIND(int4, Grouped<HalfBytes>)
KIND(bytes_32, Grouped<WholeBytes<32>>)
KIND(bytes_16, Grouped<WholeBytes<16>>)
KIND(bfloat16, HalfFloats)
