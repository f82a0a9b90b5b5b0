// A product by panels: what all kinds do around the sums of a few rows with one panel of columns.

#pragma once

#include <algorithm>
#include <cstring>

#include "product.h"

// Some rows with a panel: `rows` of them from `first` on. `index`: of the `count` tiles that read
// this panel one after the other.
struct PanelTile {
    int64_t rows, first, panel, index, count;
};

// What a tile asks of memory while it reads its panel, step by step. A tile alone asks for what it
// will read itself, `ahead` bytes later. Several share the panel behind theirs, so that memory is
// as busy with the last of them as with the first.
struct Later {
    const char* from;
    int64_t step;  // bytes for each step
    bool alone;

    Later(const PanelTile& tile, const void* panel, int64_t bytes, int64_t steps, int64_t ahead)
        : step((bytes / steps + tile.count - 1) / tile.count), alone(tile.count == 1) {
        from = (const char*)panel + (alone ? ahead : bytes + tile.index * step * steps);
    }
};

// Of a product's outputs; `begin` is where a panel begins.
struct Columns {
    int64_t begin, end;
};

// `sum(tile, sums)` multiplies a tile, into [rows][PANEL]. It is given at most `most` rows; more
// read the panel again, while it is near.
template <int PANEL, int MOST, class Sum>
static inline void by_panels(const Product* weight, Columns of, int64_t rows, int64_t most,
                             const float* residual, float* out, int part, int parts, Sum sum) {
    int64_t outputs = weight->outputs, panels = (of.end - of.begin + PANEL - 1) / PANEL;
    const float* bias = weight->bias;
    float sums[MOST * PANEL];
    for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; p++) {
        int64_t first = of.begin + p * PANEL, columns = std::min<int64_t>(PANEL, of.end - first);
        PanelTile tile{0, 0, first / PANEL, 0, (rows + most - 1) / most};
        for (; tile.first < rows; tile.first += tile.rows, tile.index++) {
            int64_t left = rows - tile.first;  // two even halves beat a full tile and a sliver
            int64_t half = left < 2 * most ? (left + 1) / 2 : most;
            tile.rows = left <= most ? left : half;
            sum(tile, sums);
            for (int64_t i = 0; i < tile.rows; i++) {
                int64_t at = (tile.first + i) * outputs + first;
                float* added = sums + i * PANEL;
                if (bias)
                    for (int64_t c = 0; c < columns; c++) added[c] += bias[first + c];
                if (residual)
                    for (int64_t c = 0; c < columns; c++) added[c] += residual[at + c];
                std::memcpy(out + at, added, columns * 4);
            }
        }
    }
}
