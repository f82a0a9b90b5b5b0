// The likeliest tokens of logits that lie ready; a pass finds its own (kernels.cpp).

#include "choosing.h"

#include <omp.h>

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
