// Norms and activations, row by row.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

// A norm of `size` numbers: RMS, or LayerNorm where `centred`. `stride` leads to the next group's
// weight; 0: all groups share one.
struct Norm {
    const float *weight, *bias;
    int64_t size, stride;
    float eps;
    int centred;
};

static inline void norm_row(const float* x, const Norm& norm, int64_t group, float* out) {
    int64_t size = norm.size, i = 0;
    const float* weight = norm.weight + group * norm.stride;
    float mean = 0;
    if (norm.centred) {
        Vector total = {};
        for (; i + LANES <= size; i += LANES) total += load(x + i);
        mean = sum_lanes(total);
        for (; i < size; i++) mean += x[i];
        mean /= size;
    }
    Vector squares = {};
    for (i = 0; i + LANES <= size; i += LANES)
        squares += (load(x + i) - mean) * (load(x + i) - mean);
    float sum = sum_lanes(squares);
    for (; i < size; i++) sum += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / std::sqrt(sum / size + norm.eps);
    if (norm.bias)
        for (int64_t j = 0; j < size; j++)
            out[j] = weight[j] * ((x[j] - mean) * scale) + norm.bias[j];
    else
        for (int64_t j = 0; j < size; j++) out[j] = weight[j] * ((x[j] - mean) * scale);
}

extern "C" void normalise(const float* x, int64_t rows, const Norm* norm, float* out, int threads) {
    int64_t size = norm->size;
#pragma omp parallel for num_threads(threads) if (rows * size > 65536)
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * size, *norm, 0, out + r * size);
}

enum Activation {
    SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, RELU2 = 4, CLAMPED_SWIGLU = 5, XIELU = 6
};
constexpr float STEEPNESS = 1.702f, LIMIT = 7.0f;  // of CLAMPED_SWIGLU

// x by sigmoid(z), for N vectors side by side.
template <int N>
static inline void times_sigmoid(Vector* x, Vector* z) {
    for (int i = 0; i < N; i++) z[i] = -z[i];
    exponentials<N>(z);
    for (int i = 0; i < N; i++) x[i] = x[i] / (1.0f + z[i]);
}

// `curve`: of XIELU above, below and beside zero, and where it ends to be bent.
static inline Vector activate(Vector x, int kind, const float* curve) {
    if (kind == XIELU) {
        Vector bent;
        for (int i = 0; i < LANES; i++) bent[i] = std::expm1(std::min(x[i], curve[3]));
        return (x > 0 ? curve[0] * x * x : (bent - x) * curve[1]) + curve[2] * x;
    }
    if (kind == RELU) return lanes_max(x, Vector{});
    if (kind == RELU2) return lanes_max(x, Vector{}) * lanes_max(x, Vector{});
    for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
    return x;
}

// act(x), or where there is `up` act(x) * up, of N vectors side by side.
template <int N>
static inline void activate(Vector* x, Vector* up, int kind, const float* curve) {
    Vector z[N];
    if (kind == SILU) {
        std::copy_n(x, N, z);
        times_sigmoid<N>(x, z);
    } else if (kind == GELU_TANH) {  // tanh(z / 2) = 2 * sigmoid(z) - 1
        for (int i = 0; i < N; i++)
            z[i] = 1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
        times_sigmoid<N>(x, z);
    } else if (kind == CLAMPED_SWIGLU) {
        for (int i = 0; i < N; i++) {
            x[i] = x[i] < LIMIT ? x[i] : splat(LIMIT);
            up[i] = lanes_max(up[i] < LIMIT ? up[i] : splat(LIMIT), splat(-LIMIT));
            z[i] = STEEPNESS * x[i];
            x[i] = (up[i] + 1.0f) * x[i];
        }
        return times_sigmoid<N>(x, z);
    } else {
        for (int i = 0; i < N; i++) x[i] = activate(x[i], kind, curve);
    }
    for (int i = 0; up && i < N; i++) x[i] *= up[i];
}

// Columns [begin, end) of out = act(gate) * up, or without `up` of out = act(gate).
static inline void activate_some(const float* gate, const float* up, float* out, int64_t begin,
                                 int64_t end, int kind, const float* curve = nullptr) {
    auto some = [&](auto many, const float* gate, const float* up, float* out) {
        Vector value[many], other[many];
        for (int i = 0; i < many; i++) {
            value[i] = load(gate + i * LANES);
            if (up) other[i] = load(up + i * LANES);
        }
        activate<many>(value, up ? other : nullptr, kind, curve);
        for (int i = 0; i < many; i++) store(out + i * LANES, value[i]);
    };
    by_many((end - begin) / LANES, [&](auto many, int64_t at) {
        int64_t i = begin + at * LANES;
        some(many, gate + i, up ? up + i : nullptr, out + i);
    });
    int64_t whole = (end - begin) / LANES * LANES, rest = end - begin - whole;
    if (rest == 0) return;
    float last[3][LANES] = {};
    std::copy_n(gate + begin + whole, rest, last[0]);
    if (up) std::copy_n(up + begin + whole, rest, last[1]);
    some(Number<1>(), last[0], up ? last[1] : nullptr, last[2]);
    std::copy_n(last[2], rest, out + begin + whole);
}

// out[r, :] = act(both[r, :size]) * both[r, size:]
extern "C" void gated(const float* both, int64_t rows, int64_t size, int kind, float* out,
                      int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const float* gate = both + r * 2 * size;
        activate_some(gate, gate + size, out + r * size, 0, size, kind);
    }
}

// x[r, :] = act(x[r, :])
extern "C" void activated(float* x, int64_t rows, int64_t size, int kind, const float* curve,
                          int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 16384)
    for (int64_t r = 0; r < rows; r++)
        activate_some(x + r * size, nullptr, x + r * size, 0, size, kind, curve);
}

// x = cap * tanh(x / cap)
extern "C" void soft_cap(float* x, int64_t count, float cap, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 16384)
    for (int64_t i = 0; i < count; i++) x[i] = cap * std::tanh(x[i] / cap);
}
