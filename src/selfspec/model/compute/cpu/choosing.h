// The largest of many logits, row by row. Of equal ones the first; NaN is larger than any number,
// as it is for torch.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace choosing {

constexpr int64_t BLOCK = 256;  // logits that are looked at together

// As wide as the processor's: of wider ones compilers choose number by number.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef float Unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline bool larger(float a, float b) { return a > b || (a != a && b == b); }

// Indices of the `count` largest of x that were looked at, in order; they come in rising order, so
// of equal ones the first is held.
struct Largest {
    const float* x;
    int64_t* held;
    int64_t count, known = 0;

    void look(int64_t index) {
        if (known == count && !larger(x[index], x[held[count - 1]])) return;
        int64_t at = known < count ? known++ : count - 1;
        for (; at > 0 && larger(x[index], x[held[at - 1]]); at--) held[at] = held[at - 1];
        held[at] = index;
    }
    void look(int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) look(i);
    }
};

static inline int64_t blocks_of(int64_t size) { return (size + BLOCK - 1) / BLOCK; }

// The largest of each of the blocks [first, last), and whether there is a NaN. (Compilers do not
// make vectors of it alone.)
static bool block_maxima(const float* x, int64_t size, int64_t first, int64_t last,
                         float* maxima) {
    Ints broken = {};
    bool odd = false;
    for (int64_t begin = first * BLOCK; begin < std::min(size, last * BLOCK); begin += BLOCK) {
        int64_t end = std::min(size, begin + BLOCK), i = begin;
        float most = x[begin];
        if (i + LANES <= end) {
            Vector best = *(const Unaligned*)(x + i);
            for (; i + LANES <= end; i += LANES) {
                Vector here = *(const Unaligned*)(x + i);
                broken |= here != here;
                best = here > best ? here : best;
            }
            for (int64_t lane = 0; lane < LANES; lane++) most = std::max(most, best[lane]);
        }
        for (; i < end; i++) {
            odd |= x[i] != x[i];
            most = std::max(most, x[i]);
        }
        maxima[begin / BLOCK] = most;
    }
    for (int64_t lane = 0; lane < LANES; lane++) odd |= broken[lane] != 0;
    return odd;
}

// The `count` largest, which lie in the `count` blocks with the largest maxima. `odd`: there is a
// NaN. `mark`: -1 stands first where the largest is not finite.
static void row_largest(const float* x, int64_t size, int64_t count, int64_t* out, bool odd,
                        const float* maxima, bool mark) {
    Largest best{x, out, count};
    if (odd) {
        best.look(0, size);
    } else {
        std::vector<int64_t> blocks(std::min(count, blocks_of(size)));
        Largest chosen{maxima, blocks.data(), (int64_t)blocks.size()};
        chosen.look(0, blocks_of(size));
        std::sort(blocks.begin(), blocks.end());
        for (int64_t block : blocks) best.look(block * BLOCK, std::min(size, (block + 1) * BLOCK));
    }
    if (mark && !std::isfinite(x[out[0]])) out[0] = -1;
}

}  // namespace choosing
