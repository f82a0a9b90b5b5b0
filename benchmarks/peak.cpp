// Multiplications and additions on registers only, all threads at once: what arithmetic allows.

#include <cstdint>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int CHAINS = 12;  // more than a processor has under way at once, fewer than registers

typedef float Vector __attribute__((vector_size(LANES * 4)));

extern "C" int64_t operations_of_a_step() { return 2 * LANES * CHAINS; }

// `out` gets a number of each thread, so that nothing is left out.
extern "C" void multiply_and_add(int64_t steps, int threads, float* out) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        Vector sums[CHAINS], factor = Vector{} + 0.999f, added = Vector{} + 0.001f;
        for (int c = 0; c < CHAINS; c++) sums[c] = Vector{} + float(c);  // equal: merged
        for (int64_t step = 0; step < steps; step++)
            for (int c = 0; c < CHAINS; c++) sums[c] = sums[c] * factor + added;
        out[thread] = 0;
        for (int c = 0; c < CHAINS; c++) out[thread] += sums[c][0];
    }
}
