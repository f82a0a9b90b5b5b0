// The likeliest tokens of logits that lie ready (a pass finds its own, kernels.cpp), and the token
// that is drawn of them.

#include "choosing.h"

#include <omp.h>

#include <limits>

extern "C" void largest(const float* x, int64_t rows, int64_t size, int64_t count, int64_t* out,
                        int mark, int threads) {
    int64_t blocks = choosing::blocks_of(size);
#pragma omp parallel num_threads(threads) if (rows > 1)
    {
        std::vector<float> maxima(blocks);
#pragma omp for
        for (int64_t r = 0; r < rows; r++) {
            bool odd = choosing::block_maxima(x + r * size, size, 0, blocks, maxima.data());
            choosing::row_largest(x + r * size, size, count, out + r * count, odd, maxima.data(),
                                  mark);
        }
    }
}

namespace drawing {

constexpr int64_t BLOCK = 64;  // tokens that share the time of their first, as coupling.py has it

// 64 bits for a counter: splitmix64 with the key as its seed.
static inline uint64_t word(uint64_t key, uint64_t counter) {
    uint64_t x = (counter + 1) * 0x9E3779B97F4A7C15u + key;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline double exponential(uint64_t word) {
    return -std::log1p(-((double)(word >> 12) + 0.5) * 0x1p-52);
}

// The two highest scores, and whose the first one is.
struct Best {
    double first = -std::numeric_limits<double>::infinity(), second = first;
    int64_t token = -1;

    void look(double score, int64_t index) {
        if (score > first) {
            second = first;
            first = score;
            token = index;
        } else if (score > second) {
            second = score;
        }
    }
};

}  // namespace drawing

// The token that arrives first, as `earliest` of coupling.py finds it. -1 where rounding might
// decide, which is another one there, and where there is a NaN or the largest is not finite.
extern "C" int64_t drawn(const float* x, int64_t size, uint64_t key) {
    using namespace drawing;
    constexpr double CLOSE = 1e-9;
    int64_t blocks = (size + BLOCK - 1) / BLOCK;
    static thread_local std::vector<double> firsts;  // when the first of each block arrives
    static thread_local std::vector<double> highest;  // no token of the block has a higher score
    firsts.resize(blocks);
    highest.resize(blocks);
    Best best;
    bool broken = false;
    for (int64_t b = 0; b < blocks; b++) {
        const float* here = x + b * BLOCK;
        int64_t count = std::min(BLOCK, size - b * BLOCK);
        float most;
        broken |= choosing::block_maxima(here, count, 0, 1, &most) || most == INFINITY;
        uint64_t chosen = word(key, ~(uint64_t)b);
        firsts[b] = exponential(chosen) / BLOCK;
        double gain = std::log(firsts[b]);
        highest[b] = most - gain;
        int64_t holder = chosen % BLOCK;
        if (holder < count) best.look(here[holder] - gain, b * BLOCK + holder);
    }
    if (broken) return -1;
    for (int64_t b = 0; b < blocks; b++) {
        if (highest[b] < best.second) continue;
        int64_t end = std::min(size, (b + 1) * BLOCK);
        int64_t holder = b * BLOCK + word(key, ~(uint64_t)b) % BLOCK;
        double most = -std::log(firsts[b]);  // that the first's time adds to a score of its block
        for (int64_t i = b * BLOCK; i < end; i++) {
            if (i == holder || x[i] + most < best.second) continue;
            best.look(x[i] - std::log(firsts[b] + exponential(word(key, i))), i);
        }
    }
    bool close = best.first - best.second < CLOSE * (1 + std::abs(best.first));
    return close || best.token < 0 ? -1 : best.token;
}
