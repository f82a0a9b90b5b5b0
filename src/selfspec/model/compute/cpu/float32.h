// Products with float32 weights, which are packed in panels of columns.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "panels.h"
#include "product.h"
#include "rows_avx2.h"
#include "threads.h"
#include "vectors.h"

// How many steps ahead a weight is asked for, and how many rows share a read of it at most. A panel
// is read once, front to back, and the processor's own prefetcher stops at each page of it: on an
// Intel Xeon 8 rows take 36 ms a pass without asking, 19 with it. Asking beyond the end is
// harmless. But a Zen 4's own prefetcher is better where pages are large and rows are few:
// one row of 269 MB takes 5.7 ms without asking, 7.2 with it. On a Zen 3 4 rows of 134 MB take
// 3.3 ms if only the second cache is asked for, 4.3 with both. On a newer Xeon one row of 538 MB
// takes 18.1 ms if a page is asked for ahead, 8 and 32 steps, and 20.3 with 16 and 128. None of
// these changes a bit; tuning.py chooses them by a measurement.
static struct {
    int64_t soon = 16, later = 128;  // for the first cache (0: not at all), for the second
    Most most{MAX_ROWS, 0, 0};       // of a tile
    bool quiet = false;              // a tile of FEW_ROWS asks for nothing
} tuned;

constexpr int KEPT = 16;  // panels whose sums are written together
constexpr int FEW_ROWS = LANES == 16 ? 4 : 2;  // short vectors wait at three and four

extern "C" void tune(int64_t soon, int64_t later, int64_t rows, int64_t inputs, int64_t shared,
                     int64_t quiet) {
    rows = std::clamp<int64_t>(rows, 1, MAX_ROWS);
    shared = std::min<int64_t>(shared, KEPT * MAX_ROWS);  // of so many rows sums are kept
    tuned = {soon, later, {rows, inputs, shared}, quiet != 0};
}

extern "C" int64_t most_rows() { return MAX_ROWS; }

constexpr int STRIDE = 2;  // steps that ask for memory together
constexpr int LINES = std::max(STRIDE * PANEL * 4 / 64, 1);  // of the caches, in as many steps
constexpr int64_t SOON_IN_PIECES = 6;  // steps: what lies farther ahead is of a later turn

// How many steps ahead a tile asks for the first cache (0: not at all). Tiles that share a panel
// find it in the second one, so with AVX2, where every instruction counts, they ask for nothing:
// beside another thread of the same core they have half of the instructions. A piece of a panel is
// in the first cache once a tile has used it.
static inline int64_t soon_of(const PanelTile& tile, int64_t inputs) {
    if (tile.count == 1) return tuned.soon;
    if (LANES <= 8) return 0;
    if (tile.inputs.end - tile.inputs.begin == inputs) return tuned.soon;
    return tile.index ? 0 : std::min(tuned.soon, SOON_IN_PIECES);
}

// `count` numbers of some rows, which are `stride` apart. `first`: no sums are added to.
struct Inputs {
    const float* x;
    int64_t stride, count;
    bool first;
};

// ROWS rows times some inputs of a panel, from where `panel` leads to, added to `sums` unless they
// are the first. The weights of a step lie side by side, so the panel is one stream from memory,
// read once for all rows. The rows are read a number at a time: they are short and were just
// written, so they are near. `ahead`: steps at which weights are asked for the first cache.
template <int ROWS, bool ASKS>
static inline void tile(const Inputs& of, const float* panel, int64_t ahead, const Later& later,
                        float* sums) {
    Vector total[ROWS][WIDE] = {};
    if (!of.first)
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) total[r][c] = load(sums + r * PANEL + c * LANES);
    const float* x = of.x;
    const int64_t stride = of.stride;
    auto go_on = [&](auto steps) {
#pragma GCC unroll 2
        for (int step = 0; step < steps; step++, x++, panel += PANEL) {
            Vector weight[WIDE];
            for (int c = 0; c < WIDE; c++) weight[c] = load_once(panel + c * LANES);
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < WIDE; c++) total[r][c] += x[r * stride] * weight[c];
        }
    };
    const char *soon = (const char*)(panel + ahead * PANEL), *next = later.from;
    int64_t left = of.count;
    for (; left >= STRIDE; left -= STRIDE, soon += LINES * 64, next += STRIDE * later.step) {
        if (ASKS && ahead)
            for (int i = 0; i < LINES; i++) __builtin_prefetch(soon + i * 64, 0, 3);
        if (ASKS)
            for (int i = 0; i < (LINES + 1) / 2; i++) __builtin_prefetch(next + i * 64, 0, 2);
        if (ASKS && later.alone)  // several tiles ask for less each
            for (int i = (LINES + 1) / 2; i < LINES; i++) __builtin_prefetch(next + i * 64, 0, 2);
        go_on(Number<STRIDE>());
    }
    for (; left > 0; left--) go_on(Number<1>());
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < WIDE; c++) store(sums + r * PANEL + c * LANES, total[r][c]);
}

#if defined(HAS_ROWS_BY_PANEL)
// The same of a tile that shares its panel with others, where multiplying is what takes the time.
// `later` was just written, part by part: to copy it is to wait until all stores before have ended.
template <int ROWS>
static inline void shared_tile(const Inputs& of, const float* panel, const Later& later,
                               float* sums) {
    int64_t taken = rows_by_panel<ROWS, false>((const char*)of.x, 4 * of.stride, panel, of.count,
                                               of.first, later.from, later.step, sums);
    if (taken == of.count) return;
    Later rest = later;
    rest.from += taken * later.step;
    tile<ROWS, true>({of.x + taken, of.stride, of.count - taken, of.first && !taken},
                     panel + taken * PANEL, 0, rest, sums);
}
#endif

template <int ROWS, bool ASKS>
static inline void tile_of(int64_t rows, const Inputs& of, const float* panel, int64_t ahead,
                           const Later& later, float* sums) {
#if defined(HAS_ROWS_BY_PANEL)
    if (rows == ROWS && ASKS && !later.alone) return shared_tile<ROWS>(of, panel, later, sums);
#endif
    if (rows == ROWS) return tile<ROWS, ASKS>(of, panel, ahead, later, sums);
    if constexpr (ROWS > 1) tile_of<ROWS - 1, ASKS>(rows, of, panel, ahead, later, sums);
}

// The same for many rows: BROAD_ROWS of them with a panel and half of its neighbour. A number of x
// serves three vectors then, and fewer have to be loaded: 12 for 27 multiplications instead of 14
// for 24. Three panels are two such pairs: `whole` and `half` lead to what a pair reads, and `swap`
// says that the half comes first. `later`: as above, a line with each STRIDE steps.
constexpr bool BROAD = LANES == 16;  // 27 accumulators of 32 registers
constexpr int BROAD_WIDE = 3, BROAD_ROWS = 9, BROAD_PANEL = BROAD_WIDE * LANES;
constexpr int64_t BROAD_SOON = 40 * PANEL;  // numbers ahead, asked for the first cache
constexpr int64_t MANY_ROWS = 64;           // from which on this pays

template <int ROWS>
static inline void broad_tile(const float* x, int64_t inputs, const float* whole, const float* half,
                              bool swap, const Later& later, float* sums) {
    Vector total[ROWS][BROAD_WIDE] = {};
    const char* next = later.from;
#pragma GCC unroll 2
    for (int64_t i = 0; i < inputs; i++, x++, whole += PANEL, half += PANEL) {
        if (i % STRIDE == 0) {
            __builtin_prefetch(next, 0, 2);
            next += STRIDE * later.step;
        }
        for (int c = 0; c < WIDE; c++) __builtin_prefetch(whole + BROAD_SOON + c * LANES, 0, 3);
        __builtin_prefetch(half + BROAD_SOON, 0, 3);
        Vector weight[BROAD_WIDE];
        for (int c = 0; c < WIDE; c++) weight[c] = load_once(whole + c * LANES);
        weight[WIDE] = load_once(half);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < BROAD_WIDE; c++) total[r][c] += x[r * inputs] * weight[c];
    }
    float *of_whole = sums + (swap ? LANES : 0), *of_half = sums + (swap ? 0 : PANEL);
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < WIDE; c++) store(of_whole + r * BROAD_PANEL + c * LANES, total[r][c]);
        store(of_half + r * BROAD_PANEL, total[r][WIDE]);
    }
}

template <int ROWS>
static inline void broad_tile_of(int64_t rows, const float* x, int64_t inputs, const float* whole,
                                 const float* half, bool swap, const Later& later, float* sums) {
    if (rows == ROWS) return broad_tile<ROWS>(x, inputs, whole, half, swap, later, sums);
    if constexpr (ROWS > 1)
        broad_tile_of<ROWS - 1>(rows, x, inputs, whole, half, swap, later, sums);
}

// What tiles multiply. If these go through pieces of panels, each piece's numbers of all rows are
// laid side by side first, for all panels that are gone through together: rows of a model whose
// width is a power of two would push one another out of the first cache.
class RowsByPieces {
public:
    RowsByPieces(const float* x, int64_t rows, int64_t inputs)
        : x(x), rows(rows), inputs(inputs),
          near(tuned.most.in_pieces(rows) ? rows * std::min(tuned.most.inputs, inputs) : 0) {}

    Inputs of(const PanelTile& tile) {
        auto [begin, end] = tile.inputs;
        int64_t count = end - begin;
        if (near.empty()) return {x + tile.first * inputs + begin, inputs, count, !begin};
        if (begin != laid)
            for (int64_t r = 0; r < rows; r++)
                std::memcpy(&near[r * count], x + r * inputs + begin, count * 4);
        laid = begin;
        return {&near[tile.first * count], count, count, !begin};
    }

private:
    const float* x;
    int64_t rows, inputs, laid = -1;
    std::vector<float> near;
};

extern "C" int64_t panel_width() { return PANEL; }

// Float32 weights, packed as [ceil(outputs / PANEL)][inputs][PANEL]. Nothing is prepared.
extern "C" void multiply_float32(const Product* weight, const void* rows_of_x, int64_t rows,
                                 const float* residual, float* out, int part, int parts) {
    const float *x = (const float*)rows_of_x, *pack = (const float*)weight->weights;
    int64_t inputs = weight->inputs, panel_size = PANEL * inputs;
    int64_t broad = 0;  // so many columns by broad tiles
    if (BROAD && rows >= MANY_ROWS) {
        broad = weight->outputs / (2 * BROAD_PANEL) * (2 * BROAD_PANEL);
        by_panels<BROAD_PANEL, BROAD_ROWS, 1>(
            weight, {0, broad}, rows, {BROAD_ROWS, 0, 0}, residual, out, part, parts,
            [=](const PanelTile& tile, float* sums) {
                const float* three = pack + tile.panel / 2 * 3 * panel_size;
                bool second = tile.panel % 2;
                const float* whole = second ? three + 2 * panel_size : three;
                const float* half = three + panel_size + (second ? LANES : 0);
                const float* next = three + (second ? 3 : 2) * panel_size;
                Later later(tile, next, 4 * BROAD_PANEL * inputs, next, inputs, 0);
                broad_tile_of<BROAD_ROWS>(tile.rows, x + tile.first * inputs, inputs, whole, half,
                                          second, later, sums);
            });
    }
    RowsByPieces numbers(x, rows, inputs);
    by_panels<PANEL, MAX_ROWS, KEPT>(
        weight, {broad, weight->outputs}, rows, tuned.most, residual, out, part, parts,
        [=, &numbers](const PanelTile& tile, float* sums) {
            auto place = [=](int64_t panel, int64_t input) {
                return pack + (panel * inputs + input) * PANEL;
            };
            const float* here = place(tile.panel, tile.inputs.begin);
            int64_t steps = tile.inputs.end - tile.inputs.begin, step = 4 * PANEL;
            Later later(tile, here, steps * step, place(tile.next_panel, tile.next_input), steps,
                        tuned.later * step);
            auto some = tuned.quiet && rows <= FEW_ROWS ? tile_of<FEW_ROWS, false>
                                                        : tile_of<MAX_ROWS, true>;
            some(tile.rows, numbers.of(tile), here, soon_of(tile, inputs), later, sums);
        });
}

extern "C" void read_float32(const Product* weight, int64_t row, float* out) {
    const float* pack = (const float*)weight->weights + row / PANEL * PANEL * weight->inputs;
    for (int64_t k = 0; k < weight->inputs; k++) out[k] = pack[k * PANEL + row % PANEL];
}

// Some rows of the weights; gives the first number that names none, in whose case nothing is read.
extern "C" int64_t read_rows(const Product* weight, const int64_t* chosen, int64_t count,
                             float* out, int threads) {
    for (int64_t i = 0; i < count; i++)
        if (chosen[i] < 0 || chosen[i] >= weight->outputs) return i;
#pragma omp parallel for num_threads(threads) if (count > 64)
    for (int64_t i = 0; i < count; i++)
        weight->read(weight, chosen[i], out + i * weight->inputs);
    return -1;
}
