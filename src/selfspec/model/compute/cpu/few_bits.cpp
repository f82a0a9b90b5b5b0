// Products with weights of few bits: 8 bits, 4 bits, and bfloat16. Compiled like kernels.cpp, whose
// promises they keep: a row's bits depend on that row alone, in every variant of the processor.
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

#include "product.h"

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_ROWS = 12;
#elif defined(__AVX2__)
constexpr int LANES = 8, MAX_ROWS = 6;
#else
constexpr int LANES = 4, MAX_ROWS = 6;
#endif
constexpr int WIDE = 2, PANEL = LANES * WIDE;  // as in kernels.cpp: columns that lie side by side
constexpr int GROUP = 32;                      // numbers of x that share a scale

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));

template <class T>
static inline T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
static inline Vector splat(float s) { return Vector{} + s; }
static inline Ints splat(int32_t s) { return Ints{} + s; }

// A panel is one stream from memory; these ask for it ahead, for the first cache and the second.
static inline void ahead(const uint8_t* at, int64_t bytes, int64_t soon, int64_t later) {
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(at + soon + i, 0, 3);
        __builtin_prefetch(at + later + i, 0, 2);
    }
}

// total + the sums of four products in each lane: bytes without a sign times bytes with one.
static inline Ints dot(Ints total, Ints weights, Ints x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)weights, (__m256i)x);
#else
    // Bytes in pairs of 16 bits, the even ones and the odd ones; the instruction that takes bytes
    // at once would saturate.
    Shorts w = (Shorts)weights, s = (Shorts)x, even = w & 255, odd = (w >> 8) & 255;
    Shorts x_even = (s << 8) >> 8, x_odd = s >> 8;
#if defined(__AVX512BW__)
    return total + (Ints)_mm512_madd_epi16((__m512i)even, (__m512i)x_even) +
           (Ints)_mm512_madd_epi16((__m512i)odd, (__m512i)x_odd);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return total + (Ints)_mm256_madd_epi16((__m256i)even, (__m256i)x_even) +
           (Ints)_mm256_madd_epi16((__m256i)odd, (__m256i)x_odd);
#else
    for (int lane = 0; lane < LANES; lane++)
        for (int half = 0; half < 2; half++)
            total[lane] += even[2 * lane + half] * x_even[2 * lane + half] +
                           odd[2 * lane + half] * x_odd[2 * lane + half];
    return total;
#endif
#endif
}

// ------------------------------------------------------------------------------- the rows of x

static inline int64_t groups_of(int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

// A row of x in 8 bits, as the integer products read it. Numbers beyond the last are zeros.
struct Row {
    int8_t* numbers;  // [groups][32]
    float* scales;    // what a group's numbers are multiples of
    int32_t* shifts;  // -128 times the sum of a group's numbers
    float* sums;      // a group's sum, scaled

    Row(const void* prepared, int64_t groups)
        : numbers((int8_t*)prepared), scales((float*)(numbers + groups * GROUP)),
          shifts((int32_t*)(scales + groups)), sums((float*)(shifts + groups)) {}
};

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

extern "C" void round_row(const Product* weight, const float* x, void* prepared) {
    int64_t groups = groups_of(weight->inputs);
    Row row(prepared, groups);
    for (int64_t g = 0; g < groups; g++) {
        float numbers[GROUP] = {}, largest = 0;
        int64_t count = std::min<int64_t>(GROUP, weight->inputs - g * GROUP);
        std::memcpy(numbers, x + g * GROUP, 4 * count);
        for (int i = 0; i < GROUP; i++) largest = std::max(largest, std::fabs(numbers[i]));
        float inverse = largest > 0 ? 127.0f / largest : 0.0f, scale = largest / 127.0f;
        int32_t whole[GROUP], sum = 0;
        for (int i = 0; i < GROUP; i += LANES) {
            Ints some = rounded(load<Vector>(numbers + i) * inverse);
            std::memcpy(whole + i, &some, sizeof some);
        }
        for (int i = 0; i < GROUP; i++) {
            row.numbers[g * GROUP + i] = (int8_t)whole[i];
            sum += whole[i];
        }
        row.scales[g] = scale;
        row.shifts[g] = -128 * sum;
        row.sums[g] = scale * sum;
    }
}

// ---------------------------------------------------------------------------- kinds of weights

// 8 bits: a panel is [group][8][column][4 inputs] bytes w + 128, then a scale for each column.
struct EightBits {
    static int64_t panel_bytes(int64_t inputs) {
        return groups_of(inputs) * GROUP * PANEL + 4 * PANEL;
    }

    template <int ROWS>
    static void tile(const char* x, int64_t stride, int64_t inputs, const uint8_t* panel,
                     float* sums) {
        int64_t groups = groups_of(inputs);
        Vector total[ROWS][WIDE] = {};
        for (int64_t g = 0; g < groups; g++, panel += GROUP * PANEL) {
            ahead(panel, GROUP * PANEL, 2 * GROUP * PANEL, 12 * GROUP * PANEL);
            Ints whole[ROWS][WIDE];
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < WIDE; c++)
                    whole[r][c] = splat(Row(x + r * stride, groups).shifts[g]);
            for (int k = 0; k < GROUP / 4; k++) {
                Ints weight[WIDE];
                for (int c = 0; c < WIDE; c++)
                    weight[c] = load<Ints>(panel + (k * WIDE + c) * LANES * 4);
                for (int r = 0; r < ROWS; r++) {
                    const int8_t* four = Row(x + r * stride, groups).numbers + g * GROUP + 4 * k;
                    Ints number = splat(load<int32_t>(four));
                    for (int c = 0; c < WIDE; c++)
                        whole[r][c] = dot(whole[r][c], weight[c], number);
                }
            }
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < WIDE; c++)
                    total[r][c] += __builtin_convertvector(whole[r][c], Vector) *
                                   splat(Row(x + r * stride, groups).scales[g]);
        }
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) {
                Vector scaled = total[r][c] * load<Vector>(panel + c * LANES * 4);
                std::memcpy(sums + r * PANEL + c * LANES, &scaled, sizeof scaled);
            }
    }
};

static inline Vector from_halves(const uint8_t* at) {
#if defined(__AVX512F__)
    return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif defined(__F16C__)
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#else
    Vector out;
    for (int i = 0; i < LANES; i++) {
        uint16_t half = load<uint16_t>(at + 2 * i);
        uint32_t size = half & 0x7fff, moved = (size << 13) + (112u << 23);  // another exponent
        float value = size < 0x400 ? size * 0x1p-24f : load<float>(&moved);
        out[i] = half & 0x8000 ? -value : value;
    }
    return out;
#endif
}

// 4 bits: a panel is [group] of [4][column][4] bytes, whose low halves are the numbers of the first
// four of eight inputs and whose high halves those of the other four; then a scale and a minimum for
// each column, both of 16 bits. A weight is minimum + number * scale.
struct FourBits {
    static constexpr int64_t BYTES = PANEL * (GROUP / 2 + 4);  // of a group

    static int64_t panel_bytes(int64_t inputs) { return groups_of(inputs) * BYTES; }

    template <int ROWS>
    static void tile(const char* x, int64_t stride, int64_t inputs, const uint8_t* panel,
                     float* sums) {
        int64_t groups = groups_of(inputs);
        Vector total[ROWS][WIDE] = {};
        for (int64_t g = 0; g < groups; g++, panel += BYTES) {
            ahead(panel, BYTES, 3 * BYTES, 20 * BYTES);
            Ints whole[ROWS][WIDE] = {};
            for (int k = 0; k < GROUP / 8; k++) {
                Ints low[WIDE], high[WIDE];
                for (int c = 0; c < WIDE; c++) {
                    Ints both = load<Ints>(panel + (k * WIDE + c) * LANES * 4);
                    low[c] = both & 0x0f0f0f0f;
                    high[c] = (both >> 4) & 0x0f0f0f0f;
                }
                for (int r = 0; r < ROWS; r++) {
                    const int8_t* eight = Row(x + r * stride, groups).numbers + g * GROUP + 8 * k;
                    Ints first = splat(load<int32_t>(eight));
                    Ints second = splat(load<int32_t>(eight + 4));
                    for (int c = 0; c < WIDE; c++)
                        whole[r][c] = dot(dot(whole[r][c], low[c], first), high[c], second);
                }
            }
            Vector scale[WIDE], minimum[WIDE];
            for (int c = 0; c < WIDE; c++) {
                const uint8_t* at = panel + GROUP / 2 * PANEL + c * LANES * 2;
                scale[c] = from_halves(at), minimum[c] = from_halves(at + 2 * PANEL);
            }
            for (int r = 0; r < ROWS; r++) {
                Row row(x + r * stride, groups);
                for (int c = 0; c < WIDE; c++) {
                    Vector scaled = scale[c] * splat(row.scales[g]);
                    total[r][c] += __builtin_convertvector(whole[r][c], Vector) * scaled;
                    total[r][c] += minimum[c] * splat(row.sums[g]);
                }
            }
        }
        for (int r = 0; r < ROWS; r++) std::memcpy(sums + r * PANEL, total[r], sizeof total[r]);
    }
};

// bfloat16: a panel is [input][LANES][2]; a pair is a column of the first vector and one of the
// second. The row is read as it is.
struct HalfFloats {
    static int64_t panel_bytes(int64_t inputs) { return 2 * inputs * PANEL; }

    template <int ROWS>
    static void tile(const char* x, int64_t stride, int64_t inputs, const uint8_t* panel,
                     float* sums) {
        Vector total[ROWS][WIDE] = {};
        for (int64_t k = 0; k < inputs; k++, panel += 2 * PANEL) {
            ahead(panel, 2 * PANEL, 16 * 2 * PANEL, 128 * 2 * PANEL);
            Words both = load<Words>(panel);
            Vector weight[WIDE] = {(Vector)(both << 16), (Vector)(both & 0xffff0000u)};
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < WIDE; c++)
                    total[r][c] += load<float>(x + r * stride + 4 * k) * weight[c];
        }
        for (int r = 0; r < ROWS; r++) std::memcpy(sums + r * PANEL, total[r], sizeof total[r]);
    }
};

// ------------------------------------------------------------------------------------ a product

template <class Kind, int ROWS>
static inline void tile_of(int64_t rows, const char* x, int64_t stride, int64_t inputs,
                           const uint8_t* panel, float* sums) {
    if (rows == ROWS) return Kind::template tile<ROWS>(x, stride, inputs, panel, sums);
    if constexpr (ROWS > 1) tile_of<Kind, ROWS - 1>(rows, x, stride, inputs, panel, sums);
}

template <class Kind>
static void multiply(const Product* weight, const void* x, int64_t rows, const float* residual,
                     float* out, int part, int parts) {
    int64_t outputs = weight->outputs, inputs = weight->inputs;
    int64_t stride = weight->prepare ? weight->prepared : 4 * inputs;
    int64_t panels = (outputs + PANEL - 1) / PANEL, bytes = Kind::panel_bytes(inputs);
    float sums[MAX_ROWS * PANEL];
    for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; p++) {
        int64_t first = p * PANEL, columns = std::min<int64_t>(PANEL, outputs - first);
        for (int64_t r = 0; r < rows;) {
            int64_t left = rows - r;  // two even halves beat a full tile and a sliver
            int64_t half = left < 2 * MAX_ROWS ? (left + 1) / 2 : MAX_ROWS;
            int64_t take = left <= MAX_ROWS ? left : half;
            tile_of<Kind, MAX_ROWS>(take, (const char*)x + r * stride, stride, inputs,
                                    (const uint8_t*)weight->weights + p * bytes, sums);
            for (int64_t i = 0; i < take; i++) {
                float* target = out + (r + i) * outputs + first;
                const float* from = residual ? residual + (r + i) * outputs + first : nullptr;
                for (int64_t c = 0; c < columns; c++) {
                    float value = sums[i * PANEL + c];
                    if (weight->bias) value += weight->bias[first + c];
                    if (from) value += from[c];
                    target[c] = value;
                }
            }
            r += take;
        }
    }
}

extern "C" int64_t panel_width() { return PANEL; }

extern "C" void multiply_int8(const Product* weight, const void* x, int64_t rows,
                              const float* residual, float* out, int part, int parts) {
    multiply<EightBits>(weight, x, rows, residual, out, part, parts);
}

extern "C" void multiply_int4(const Product* weight, const void* x, int64_t rows,
                              const float* residual, float* out, int part, int parts) {
    multiply<FourBits>(weight, x, rows, residual, out, part, parts);
}

extern "C" void multiply_bfloat16(const Product* weight, const void* x, int64_t rows,
                                  const float* residual, float* out, int part, int parts) {
    multiply<HalfFloats>(weight, x, rows, residual, out, part, parts);
}
