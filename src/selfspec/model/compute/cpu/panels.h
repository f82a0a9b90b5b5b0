// A product by panels: what all kinds do around the sums of a few rows with one panel of columns.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "product.h"

// Of a product's outputs or inputs.
struct Range {
    int64_t begin, end;
};

// Some rows with some inputs of a panel: `rows` of them from `first` on. `index`: of the `count`
// tiles that read these weights one after the other. After them come the panel `next_panel` and
// its inputs from `next_input` on.
struct PanelTile {
    int64_t rows, first, index, count, panel;
    Range inputs;
    int64_t next_panel, next_input;
};

// What a tile asks of memory while it reads, step by step. A tile alone asks for what it will read
// itself, `ahead` bytes later. Several share what comes after them, so that memory is as busy with
// the last of them as with the first.
struct Later {
    const char* from;
    int64_t step;  // bytes for each step
    bool alone;

    Later(const PanelTile& tile, const void* here, int64_t bytes, const void* next, int64_t steps,
          int64_t ahead)
        : step((bytes / steps + tile.count - 1) / tile.count), alone(tile.count == 1) {
        from = alone ? (const char*)here + ahead : (const char*)next + tile.index * step * steps;
    }
};

// What a tile has at most: so many rows, and where tiles share a panel and have no more than
// `shared` rows together, so many inputs (0: all), which all but the first find in the first cache.
// None of it changes a bit.
struct Most {
    int64_t rows, inputs, shared;

    bool in_pieces(int64_t count) const { return inputs && count > rows && count <= shared; }
};

// `sum(tile, sums)` multiplies a tile, and adds to [rows][PANEL] what its inputs give, if they are
// not the first. More rows than a tile has read the panel again, while it is near.
//
// Few rows keep the sums of several panels, KEPT of them if they fill a tile, and write them
// together. For to write a few columns of each row, every row in a page of its own, slows down what
// is read from memory next: 12 rows times 113 MB take 4.2 ms so on a Xeon, and 3.9 like this.
// Weights that come from a cache gain nothing, and have a KEPT of 1.
template <int PANEL, int MOST, int KEPT, class Sum>
static inline void by_panels(const Product* weight, Range of, int64_t rows, Most most,
                             const float* residual, float* out, int part, int parts, Sum sum) {
    int64_t inputs = weight->inputs, outputs = weight->outputs, before = of.begin / PANEL;
    int64_t panels = (of.end - of.begin + PANEL - 1) / PANEL;
    int64_t tiles = (rows + most.rows - 1) / most.rows;
    bool pieces = KEPT > 1 && most.in_pieces(rows);
    bool kept = pieces || (KEPT > 1 && tiles == 1);
    int64_t some = pieces ? most.inputs : inputs, together = kept ? KEPT * MOST / rows : 1;
    float sums[KEPT * MOST * PANEL];  // of each panel, row by row
    const float* bias = weight->bias;
    auto write = [&](int64_t from, int64_t count, int64_t begin, int64_t end) {
        for (int64_t i = 0; i < count; i++) {
            float *added = sums + i * PANEL, *row = out + (from + i) * outputs;
            const float* residual_row = residual ? residual + (from + i) * outputs : nullptr;
            for (int64_t p = begin; p < end; p++, added += count * PANEL) {
                int64_t first = of.begin + p * PANEL;
                auto finish = [&](auto columns) {
                    for (int64_t c = 0; c < columns && bias; c++) added[c] += bias[first + c];
                    for (int64_t c = 0; c < columns && residual_row; c++)
                        added[c] += residual_row[first + c];
                    std::memcpy(row + first, added, columns * 4);
                };
                if (first + PANEL <= of.end)
                    finish(std::integral_constant<int64_t, PANEL>());
                else
                    finish(of.end - first);
            }
        }
    };
    int64_t last = panels * (part + 1) / parts;
    for (int64_t p = panels * part / parts, end; p < last; p = end) {
        end = std::min(p + together, last);
        for (int64_t begin = 0, stop; begin < inputs; begin = stop) {
            stop = std::min(begin + some, inputs);
            for (int64_t i = p; i < end; i++) {
                bool more = i + 1 < end;
                int64_t next = more ? i + 1 : stop < inputs ? p : end;
                PanelTile tile{0, 0, 0, tiles, before + i, {begin, stop}, before + next,
                               more ? begin : stop % inputs};
                for (; tile.first < rows; tile.first += tile.rows, tile.index++) {
                    int64_t left = rows - tile.first;  // even halves beat a full tile and a sliver
                    int64_t half = left < 2 * most.rows ? (left + 1) / 2 : most.rows;
                    tile.rows = left <= most.rows ? left : half;
                    sum(tile, kept ? sums + ((i - p) * rows + tile.first) * PANEL : sums);
                    if (!kept) write(tile.first, tile.rows, i, i + 1);
                }
            }
        }
        if (kept) write(0, rows, p, end);
    }
}
