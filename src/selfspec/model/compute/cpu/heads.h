// Queries, keys and values of a token: how a projection is split into heads, normed and turned by
// position, and where a cache keeps them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "norms.h"

// Where one layer's keys and values lie: rows x heads x slots x size.
struct Layer {
    float *keys, *values;
    int64_t row_stride, head_stride, size;
};

static inline void rotate(float* x, const float* cosine, const float* sine, int64_t rotary) {
    for (int64_t i = 0, half = rotary / 2; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

// A norm over all of `x`, in groups of its size: heads, or one whole projection.
static inline void norm_groups(float* x, int64_t count, const Norm* norm) {
    if (norm)
        for (int64_t group = 0; group * norm->size < count; group++)
            norm_row(x + group * norm->size, *norm, group, x + group * norm->size);
}

// Angles by position. `rotary` 0: nothing is rotated, and the tables are not read.
struct Rope {
    const float *cosines, *sines;
    int64_t rotary;
};

// Queries at position p are multiplied by 1 + rate * log(1 + floor((p + first) / every)). `rate` 0:
// they stay as they are.
struct Temperature {
    int64_t every, first;
    float rate;

    float at(int64_t position) const {
        return 1.0f + rate * std::log(1.0f + (float)((position + first) / every));
    }
};

// What one attention is, beside its projections.
struct Heads {
    int64_t queries, keys, size;  // query heads, key heads, numbers of a head
    const Norm *query_norm, *key_norm, *value_norm;
    float scale, cap, clamp;  // the last one of queries, keys and values; 0: none
    const float* sinks;   // of each query head a score whose share gives nothing, or null
    const float* slopes;  // of each query head, by which scores fall with a key's distance, or null
    Temperature temperature;
    int64_t norms_behind;  // 1: norms of queries and keys come behind the rotation
    int64_t coarse;        // 1: slopes are of a key's position, in bfloat16, and scaled like scores
    int64_t borrowed;      // 1: there are queries only; another layer has filed keys and values

    int64_t kept() const { return borrowed ? 0 : keys; }
    int64_t width() const { return (queries + 2 * kept()) * size; }
};

// Where the tokens of a call go.
struct Where {
    const int64_t *rows, *slots, *positions;
};

// Splits a token's projections into heads, norms, clamps and rotates them by position, leaves
// queries in place and files keys and values.
static void file_token(float* x, int64_t token, const Heads& heads, const Rope& rope,
                       const Where& where, const Layer& layer) {
    int64_t size = heads.size, keys = heads.kept();
    norm_groups(x + (heads.queries + keys) * size, keys * size, heads.value_norm);
    auto norms = [&] {
        norm_groups(x, heads.queries * size, heads.query_norm);
        norm_groups(x + heads.queries * size, keys * size, heads.key_norm);
    };
    if (!heads.norms_behind) norms();
    if (heads.clamp > 0)
        for (int64_t i = 0; i < heads.width(); i++)
            x[i] = std::clamp(x[i], -heads.clamp, heads.clamp);
    if (rope.rotary) {
        int64_t at = where.positions[token] * (rope.rotary / 2);
        for (int64_t h = 0; h < heads.queries + keys; h++)
            rotate(x + h * size, rope.cosines + at, rope.sines + at, rope.rotary);
    }
    if (heads.norms_behind) norms();
    if (heads.temperature.rate != 0) {
        float warmth = heads.temperature.at(where.positions[token]);
        for (int64_t i = 0; i < heads.queries * size; i++) x[i] *= warmth;
    }
    int64_t at = where.rows[token] * layer.row_stride + where.slots[token] * size;
    for (int64_t h = 0; h < keys; h++) {
        std::memcpy(layer.keys + at + h * layer.head_stride, x + (heads.queries + h) * size,
                    size * 4);
        std::memcpy(layer.values + at + h * layer.head_stride,
                    x + (heads.queries + keys + h) * size, size * 4);
    }
}

extern "C" void rotate_and_store(float* qkv, int64_t tokens, const Heads* heads, const Rope* rope,
                                 const Where* where, const Layer* layer, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads->width() > 65536)
    for (int64_t t = 0; t < tokens; t++)
        file_token(qkv + t * heads->width(), t, *heads, *rope, *where, *layer);
}
