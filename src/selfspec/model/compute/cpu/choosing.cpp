// The largest of many logits, row by row. Of equal ones the first; NaN is larger than any number,
// as it is for torch.

#include <algorithm>
#include <cstdint>

constexpr int64_t BLOCK = 256;  // logits that are looked at together

static inline bool larger(float a, float b) { return a > b || (a != a && b == b); }

typedef float Vector __attribute__((vector_size(64)));
typedef float Unaligned __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int64_t LANES = 16;

// The largest of a block without NaN. (Compilers do not make vectors of this by themselves.)
static inline float block_max(const float* x, int64_t count) {
    float most = x[0];
    int64_t i = 0;
    if (count >= LANES) {
        Vector best = *(const Unaligned*)x;
        for (i = LANES; i + LANES <= count; i += LANES) {
            Vector here = *(const Unaligned*)(x + i);
            best = here > best ? here : best;
        }
        for (int64_t lane = 0; lane < LANES; lane++) most = std::max(most, best[lane]);
    }
    for (; i < count; i++) most = std::max(most, x[i]);
    return most;
}

static inline bool has_nan(const float* x, int64_t count) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++) found |= x[i] != x[i];
    return found;
}

static inline bool taken(const int64_t* out, int64_t count, int64_t index) {
    return std::find(out, out + count, index) != out + count;
}

// The largest in [begin, end) that is not among the `k` that were found; -1 if all of them are.
static int64_t next_best(const float* x, int64_t begin, int64_t end, const int64_t* out,
                         int64_t k) {
    int64_t best = -1;
    for (int64_t i = begin; i < end; i++)
        if ((best < 0 || larger(x[i], x[best])) && !taken(out, k, i)) best = i;
    return best;
}

// The `count` largest of a row, largest first, as indices. `maxima`: a float for each block.
static void row_best(const float* x, int64_t size, int64_t count, int64_t* out, float* maxima) {
    int64_t blocks = has_nan(x, size) ? 0 : (size + BLOCK - 1) / BLOCK;
    for (int64_t b = 0; b < blocks; b++)
        maxima[b] = block_max(x + b * BLOCK, std::min(BLOCK, size - b * BLOCK));
    for (int64_t k = 0; k < count; k++) {
        int64_t block = std::max_element(maxima, maxima + blocks) - maxima;
        int64_t begin = block * BLOCK, end = std::min(size, begin + BLOCK);
        int64_t best = blocks ? next_best(x, begin, end, out, k) : -1;
        if (best < 0) best = next_best(x, 0, size, out, k);  // NaN, or nothing but -infinity left
        out[k] = best;
        if (blocks && k + 1 < count) {
            int64_t following = next_best(x, begin, end, out, k + 1);
            maxima[block] = following < 0 ? -__builtin_inff() : x[following];
        }
    }
}

extern "C" void largest(const float* x, int64_t rows, int64_t size, int64_t count, int64_t* out,
                        float* maxima) {
    for (int64_t r = 0; r < rows; r++) row_best(x + r * size, size, count, out + r * count, maxima);
}
