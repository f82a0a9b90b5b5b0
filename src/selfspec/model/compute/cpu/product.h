// What a pass and a kind of weights know of each other. A kind is three functions of this form, or
// two, and a class in Python that packs weights for them (see kinds.py).
//
// The first two must keep the promises of kernels.cpp: what is written for a row depends on that
// row alone, and neither on how many rows there are nor on how many threads.

#pragma once

#include <cstdint>

struct Product;

// A thread's part of out[r, :] = residual[r, :] + bias + x[r, :] . weight: together, `parts` parts
// write every number of `out` once. `x`: the rows as `prepare` left them. `residual` may be null,
// and may be `out` itself.
typedef void Multiply(const Product* weight, const void* x, int64_t rows, const float* residual,
                      float* out, int part, int parts);

// Numbers [begin, end) of one row of `inputs` in the form that `multiply` reads: rounded to fewer
// bits, for example. It is done once for all parts. `prepared` is the row's place, its bytes not
// yet written. Numbers may be rounded in groups of TOGETHER, from the row's first on, so `begin` is
// a multiple of that, and `end` too unless the row ends there.
constexpr int64_t TOGETHER = 32;
typedef void Prepare(const Product* weight, const float* x, int64_t begin, int64_t end,
                     void* prepared);

// One row of the weights themselves, `inputs` numbers: how a tied head serves as the embedding.
typedef void Read(const Product* weight, int64_t row, float* out);

struct Product {
    Multiply* multiply;
    Prepare* prepare;     // null: `multiply` reads x as it is, floats row by row
    Read* read;
    int64_t prepared;     // bytes of a prepared row; the first lies at a multiple of 64
    const void* weights;  // as the kind packs them
    const float* bias;    // null: none
    int64_t outputs, inputs;
};
