// Few rows by one state, for many states at once, where each state has rows of its own: no matrix
// product, since no two share a matrix, but one call.

#include <cstdint>

static inline float product(const float* a, const float* b, int64_t width) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += a[i] * b[i];
    return sum;
}

// out (states, each) = rows[whose[state]] (each, width) . x[state] (width). Every number is summed
// alone, so its bits depend neither on what is beside it nor on the threads.
extern "C" void own_rows(const float* rows, const float* x, const int64_t* whose, int64_t states,
                         int64_t each, int64_t width, float* out, int threads) {
    constexpr int64_t MUCH = 1 << 19;  // products from which on a second thread is worth waking
#pragma omp parallel for num_threads(threads) if (states * each * width >= MUCH)
    for (int64_t i = 0; i < states * each; i++) {
        int64_t state = i / each, row = whose[state] * each + i % each;
        out[i] = product(rows + row * width, x + state * width, width);
    }
}
