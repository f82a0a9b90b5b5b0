// A product by panels: what all kinds do around the sums of a few rows with one panel of columns.

#pragma once

#include <algorithm>

#include "product.h"

// `sum(rows, first, panel, sums)` multiplies `rows` rows, from the first on, with a panel, into
// [rows][PANEL]. It is given at most `most`; more rows read the panel again, while it is near.
template <int PANEL, int MOST, class Sum>
static inline void by_panels(const Product* weight, int64_t rows, int64_t most,
                             const float* residual, float* out, int part, int parts, Sum sum) {
    int64_t outputs = weight->outputs, panels = (outputs + PANEL - 1) / PANEL;
    const float* bias = weight->bias;
    float sums[MOST * PANEL];
    for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; p++) {
        int64_t first = p * PANEL, columns = std::min<int64_t>(PANEL, outputs - first);
        for (int64_t r = 0; r < rows;) {
            int64_t left = rows - r;  // two even halves beat a full tile and a sliver
            int64_t half = left < 2 * most ? (left + 1) / 2 : most;
            int64_t take = left <= most ? left : half;
            sum(take, r, p, sums);
            for (int64_t i = 0; i < take; i++) {
                float* target = out + (r + i) * outputs + first;
                const float* from = residual ? residual + (r + i) * outputs + first : nullptr;
                for (int64_t c = 0; c < columns; c++) {
                    float value = sums[i * PANEL + c];
                    if (bias) value += bias[first + c];
                    if (from) value += from[c];
                    target[c] = value;
                }
            }
            r += take;
        }
    }
}
