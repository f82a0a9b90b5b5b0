// Vectors as wide as the processor's: sums over their lanes, exponentials, memory that suits them.

#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, WIDE = 2, MAX_ROWS = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, WIDE = 2, MAX_ROWS = 6;  // 12 of 16
#else
constexpr int LANES = 4, WIDE = 2, MAX_ROWS = 6;
#endif
constexpr int PANEL = LANES * WIDE;  // output columns that lie side by side in a packed weight
constexpr int LINE = 16;             // numbers that memory gives at once

template <int VALUE>
using Number = std::integral_constant<int, VALUE>;  // of which a template can be made
typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVector __attribute__((vector_size(LANES * 4)));
typedef float Unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline Vector load(const float* p) { return *(const Unaligned*)p; }
static inline void store(float* p, Vector v) { *(Unaligned*)p = v; }

// Loaded once for several uses: a compiler may otherwise read memory again at each of them, and
// then loads, not multiplications, are what takes the time.
static inline Vector load_once(const float* p) {
    Vector v = load(p);
#if defined(__x86_64__)
    __asm__("" : "+v"(v));
#endif
    return v;
}
static inline Vector splat(float s) { return Vector{} + s; }

static inline float sum_lanes(Vector v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// Lane by lane a > b ? a : b, and a < b ? a : b: one instruction where a compiler writes two.
#if defined(__AVX512F__)
static inline Vector lanes_max(Vector a, Vector b) {
    return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
}
static inline Vector lanes_min(Vector a, Vector b) {
    return (Vector)_mm512_min_ps((__m512)a, (__m512)b);
}
#elif defined(__AVX2__)
static inline Vector lanes_max(Vector a, Vector b) {
    return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
}
static inline Vector lanes_min(Vector a, Vector b) {
    return (Vector)_mm256_min_ps((__m256)a, (__m256)b);
}
#else
static inline Vector lanes_max(Vector a, Vector b) { return a > b ? a : b; }
static inline Vector lanes_min(Vector a, Vector b) { return a < b ? a : b; }
#endif

// p * 2^n, where 2^n is a normal number.
static inline Vector times_power(Vector p, Vector n) {
#if defined(__AVX512F__)
    return (Vector)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    IntVector bits = (__builtin_convertvector(n, IntVector) + 127) << 23;
    Vector power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
#endif
}

// exp(x) of N vectors by range reduction and a polynomial of degree 6, within 2 units in the last
// place; 0 below -87. All of them step by step, since one alone waits for its own results.
template <int N>
static inline void exponentials(Vector* x) {
    Vector n[N], r[N], p[N];
    for (int i = 0; i < N; i++) x[i] = lanes_min(lanes_max(x[i], splat(-87.5f)), splat(88.0f));
    // adding 1.5 * 2^23 rounds to the nearest integer
    for (int i = 0; i < N; i++) n[i] = x[i] * 1.44269504f + 12582912.0f;
    for (int i = 0; i < N; i++) n[i] = n[i] - 12582912.0f;
    for (int i = 0; i < N; i++) r[i] = x[i] - n[i] * 0.693359375f;
    for (int i = 0; i < N; i++) r[i] = r[i] + n[i] * 2.12194440e-4f;
    for (int i = 0; i < N; i++) p[i] = 1.9875691500e-4f * r[i] + 1.3981999507e-3f;
    for (float next : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        for (int i = 0; i < N; i++) p[i] = p[i] * r[i] + next;
    for (int i = 0; i < N; i++) p[i] = p[i] * r[i] * r[i] + r[i] + 1.0f;
    for (int i = 0; i < N; i++) x[i] = times_power(p[i], n[i]);
}

static inline Vector exponential(Vector x) {
    exponentials<1>(&x);
    return x;
}

constexpr int MANY = 6;  // vectors that are worked on side by side: no result is waited for

// `some(n, at)` for `count` vectors, n of them from `at` on; n is a constant.
template <class Some>
static inline void by_many(int64_t count, Some some) {
    int64_t at = 0;
    for (; at + MANY <= count; at += MANY) some(Number<MANY>(), at);
    for (; at < count; at++) some(Number<1>(), at);
}

// Memory for any use, aligned for every vector; too short-lived to be cleared first.
class Bytes {
    struct alignas(64) Line {
        char bytes[64];
    };
    std::unique_ptr<Line[]> lines;
    int64_t held = 0;

   public:
    explicit Bytes(int64_t bytes = 0) { hold(bytes); }
    // Room for so many; what was there is kept only if they fit already.
    void hold(int64_t bytes) {
        if (bytes <= held) return;
        lines.reset(new Line[(bytes + 63) / 64]);
        held = bytes;
    }
    char* at(int64_t byte = 0) const { return (char*)lines.get() + byte; }
    float* floats() const { return (float*)lines.get(); }
};
