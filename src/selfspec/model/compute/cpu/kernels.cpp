// Kernels for few rows on a CPU, their numbers float32. Compiled once on the user's machine by
// native.py, called through ctypes.
//
// Three promises, and everything here is shaped by them:
//   1. A row's bits depend on that row alone. Every output number is one chain of operations in a
//      fixed order, whatever runs beside it: tiles differ in how many chains they interleave, never
//      in a chain. Attention first lists the keys that a query sees and then works on that list, so
//      masked, padded and rejected entries cannot leave a trace.
//   2. One row costs what reading the weights costs, and a dozen rows cost about the same: each
//      weight is loaded once and used for up to MAX_ROWS rows from registers.
//   3. A pass is one call: threads meet between its steps by spinning, since sleeping and waking
//      cost more than most steps.
//
// What this file does not know: models, plans, Python. Built so that a*b+c is one rounding
// everywhere (ONE_ROUNDING in native.py).

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <omp.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "choosing.h"
#include "experts.h"
#include "panels.h"
#include "recurrent.h"
#include "rows_avx2.h"
#include "selective.h"

#if defined(__AVX512F__)
constexpr int LANES = 16, WIDE = 2, MAX_ROWS = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, WIDE = 2, MAX_ROWS = 6;  // 12 of 16
#else
constexpr int LANES = 4, WIDE = 2, MAX_ROWS = 6;
#endif
constexpr int PANEL = LANES * WIDE;  // output columns that lie side by side in a packed weight
constexpr int LINE = 16;             // numbers that memory gives at once

template <int VALUE>
using Number = std::integral_constant<int, VALUE>;  // of which a template can be made
typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVector __attribute__((vector_size(LANES * 4)));
typedef float Unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline Vector load(const float* p) { return *(const Unaligned*)p; }
static inline void store(float* p, Vector v) { *(Unaligned*)p = v; }

// Loaded once for several uses: a compiler may otherwise read memory again at each of them, and
// then loads, not multiplications, are what takes the time.
static inline Vector load_once(const float* p) {
    Vector v = load(p);
#if defined(__x86_64__)
    __asm__("" : "+v"(v));
#endif
    return v;
}
static inline Vector splat(float s) { return Vector{} + s; }

static inline float sum_lanes(Vector v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// Lane by lane a > b ? a : b, and a < b ? a : b: one instruction where a compiler writes two.
#if defined(__AVX512F__)
static inline Vector lanes_max(Vector a, Vector b) {
    return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
}
static inline Vector lanes_min(Vector a, Vector b) {
    return (Vector)_mm512_min_ps((__m512)a, (__m512)b);
}
#elif defined(__AVX2__)
static inline Vector lanes_max(Vector a, Vector b) {
    return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
}
static inline Vector lanes_min(Vector a, Vector b) {
    return (Vector)_mm256_min_ps((__m256)a, (__m256)b);
}
#else
static inline Vector lanes_max(Vector a, Vector b) { return a > b ? a : b; }
static inline Vector lanes_min(Vector a, Vector b) { return a < b ? a : b; }
#endif

// p * 2^n, where 2^n is a normal number.
static inline Vector times_power(Vector p, Vector n) {
#if defined(__AVX512F__)
    return (Vector)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    IntVector bits = (__builtin_convertvector(n, IntVector) + 127) << 23;
    Vector power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
#endif
}

// exp(x) of N vectors by range reduction and a polynomial of degree 6, within 2 units in the last
// place; 0 below -87. All of them step by step, since one alone waits for its own results.
template <int N>
static inline void exponentials(Vector* x) {
    Vector n[N], r[N], p[N];
    for (int i = 0; i < N; i++) x[i] = lanes_min(lanes_max(x[i], splat(-87.5f)), splat(88.0f));
    // adding 1.5 * 2^23 rounds to the nearest integer
    for (int i = 0; i < N; i++) n[i] = x[i] * 1.44269504f + 12582912.0f;
    for (int i = 0; i < N; i++) n[i] = n[i] - 12582912.0f;
    for (int i = 0; i < N; i++) r[i] = x[i] - n[i] * 0.693359375f;
    for (int i = 0; i < N; i++) r[i] = r[i] + n[i] * 2.12194440e-4f;
    for (int i = 0; i < N; i++) p[i] = 1.9875691500e-4f * r[i] + 1.3981999507e-3f;
    for (float next : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        for (int i = 0; i < N; i++) p[i] = p[i] * r[i] + next;
    for (int i = 0; i < N; i++) p[i] = p[i] * r[i] * r[i] + r[i] + 1.0f;
    for (int i = 0; i < N; i++) x[i] = times_power(p[i], n[i]);
}

static inline Vector exponential(Vector x) {
    exponentials<1>(&x);
    return x;
}

constexpr int MANY = 6;  // vectors that are worked on side by side: no result is waited for

// `some(n, at)` for `count` vectors, n of them from `at` on; n is a constant.
template <class Some>
static inline void by_many(int64_t count, Some some) {
    int64_t at = 0;
    for (; at + MANY <= count; at += MANY) some(Number<MANY>(), at);
    for (; at < count; at++) some(Number<1>(), at);
}

// One of `parts` parts of [0, count), in whole units; by itself the part that belongs to this
// thread.
struct Share {
    int64_t begin, end;
    explicit Share(int64_t count, int64_t part = omp_get_thread_num(),
                   int64_t parts = omp_get_num_threads())
        : begin(count * part / parts), end(count * (part + 1) / parts) {}
};

// ---------------------------------------------------------------------- threads that work together

constexpr int SPINS = 10000;  // about a fifth of a millisecond

// Where the threads of a call wait for one another. Who comes early spins. After a while it sleeps:
// the thread that it waits for may be waiting for this very core.
class Meeting {
    std::atomic<int> arrived{0}, held{0}, asleep{0};

#if defined(__linux__)
    void sleep(int now) {
        asleep++;
        while (held == now) syscall(SYS_futex, &held, FUTEX_WAIT_PRIVATE, now, nullptr);
        asleep--;
    }
    void wake() {
        if (asleep) syscall(SYS_futex, &held, FUTEX_WAKE_PRIVATE, INT_MAX);
    }
#else
    void sleep(int now) {
        while (held == now) std::this_thread::yield();
    }
    void wake() {}
#endif

   public:
    void wait() {
        int now = held.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == omp_get_num_threads()) {
            arrived.store(0, std::memory_order_relaxed);
            held = now + 1;
            return wake();
        }
        for (int spins = 0; spins < SPINS; spins++) {
            if (held.load(std::memory_order_acquire) != now) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        sleep(now);
    }
};

// What a step of a pass is cut into. Each thread has an equal share and takes it front to back, so
// that it reads memory in order. Then it helps the others: one whose core is wanted elsewhere takes
// fewer, and nobody waits for it.
class Items {
    std::atomic<int>* taken;  // of each thread's share
    int64_t stride;           // from one thread's number to the next one's

   public:
    Items(std::atomic<int>* taken, int64_t stride) : taken(taken), stride(stride) {}

    template <class Work>
    void share_out(int64_t count, Work work) {
        int own = omp_get_thread_num(), threads = omp_get_num_threads();
        for (int i = 0; i < threads; i++) {
            int owner = (own + i) % threads;
            Share share(count, owner, threads);
            std::atomic<int>& next = taken[owner * stride];
            while (share.begin + next.load(std::memory_order_relaxed) < share.end) {
                int64_t item = share.begin + next.fetch_add(1, std::memory_order_relaxed);
                if (item < share.end) work(item);
            }
        }
    }
};

// Room for the `Items` of some steps.
class Steps {
    int64_t stride;  // a thread's numbers lie apart from the others'
    std::vector<std::atomic<int>> taken;

   public:
    Steps(int64_t steps, int threads)
        : stride((steps + 15) / 16 * 16), taken(stride * std::max(threads, 1)) {}
    Items operator[](int64_t step) { return Items(taken.data() + step, stride); }
};

// ---------------------------------------------------------------------------------------- products

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

// Memory for any use, aligned for every vector; too short-lived to be cleared first.
class Bytes {
    struct alignas(64) Line {
        char bytes[64];
    };
    std::unique_ptr<Line[]> lines;
    int64_t held = 0;

   public:
    explicit Bytes(int64_t bytes = 0) { hold(bytes); }
    // Room for so many; what was there is kept only if they fit already.
    void hold(int64_t bytes) {
        if (bytes <= held) return;
        lines.reset(new Line[(bytes + 63) / 64]);
        held = bytes;
    }
    char* at(int64_t byte = 0) const { return (char*)lines.get() + byte; }
    float* floats() const { return (float*)lines.get(); }
};

// Some rows as the weight's kind reads them, and where all of them lie. Unless that is x itself, or
// each thread prepares all, the threads have to meet before they read it.
static const void* prepare(const Product& weight, const float* x, Share rows,
                           const Bytes& prepared) {
    if (!weight.prepare) return x;
    for (; rows.begin < rows.end; rows.begin++)
        weight.prepare(&weight, x + rows.begin * weight.inputs, 0, weight.inputs,
                       prepared.at(rows.begin * weight.prepared));
    return prepared.at();
}

extern "C" void linear(const float* x, int64_t rows, const Product* weight, const float* residual,
                       float* out, int threads) {
    Bytes prepared(weight->prepare ? rows * weight->prepared : 0);
#pragma omp parallel num_threads(threads)
    {
        const void* read = prepare(*weight, x, Share(rows), prepared);
        if (weight->prepare) {
#pragma omp barrier
        }
        weight->multiply(weight, read, rows, residual, out, omp_get_thread_num(),
                         omp_get_num_threads());
    }
}

// ------------------------------------------------------------------------------ norms, activations

// A norm of `size` numbers: RMS, or LayerNorm where `centred`. `stride` leads to the next group's
// weight; 0: all groups share one.
struct Norm {
    const float *weight, *bias;
    int64_t size, stride;
    float eps;
    int centred;
};

static inline void norm_row(const float* x, const Norm& norm, int64_t group, float* out) {
    int64_t size = norm.size, i = 0;
    const float* weight = norm.weight + group * norm.stride;
    float mean = 0;
    if (norm.centred) {
        Vector total = {};
        for (; i + LANES <= size; i += LANES) total += load(x + i);
        mean = sum_lanes(total);
        for (; i < size; i++) mean += x[i];
        mean /= size;
    }
    Vector squares = {};
    for (i = 0; i + LANES <= size; i += LANES)
        squares += (load(x + i) - mean) * (load(x + i) - mean);
    float sum = sum_lanes(squares);
    for (; i < size; i++) sum += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / std::sqrt(sum / size + norm.eps);
    if (norm.bias)
        for (int64_t j = 0; j < size; j++)
            out[j] = weight[j] * ((x[j] - mean) * scale) + norm.bias[j];
    else
        for (int64_t j = 0; j < size; j++) out[j] = weight[j] * ((x[j] - mean) * scale);
}

extern "C" void normalise(const float* x, int64_t rows, const Norm* norm, float* out, int threads) {
    int64_t size = norm->size;
#pragma omp parallel for num_threads(threads) if (rows * size > 65536)
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * size, *norm, 0, out + r * size);
}

enum Activation {
    SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, RELU2 = 4, CLAMPED_SWIGLU = 5, XIELU = 6
};
constexpr float STEEPNESS = 1.702f, LIMIT = 7.0f;  // of CLAMPED_SWIGLU

// x by sigmoid(z), for N vectors side by side.
template <int N>
static inline void times_sigmoid(Vector* x, Vector* z) {
    for (int i = 0; i < N; i++) z[i] = -z[i];
    exponentials<N>(z);
    for (int i = 0; i < N; i++) x[i] = x[i] / (1.0f + z[i]);
}

// `curve`: of XIELU above, below and beside zero, and where it ends to be bent.
static inline Vector activate(Vector x, int kind, const float* curve) {
    if (kind == XIELU) {
        Vector bent;
        for (int i = 0; i < LANES; i++) bent[i] = std::expm1(std::min(x[i], curve[3]));
        return (x > 0 ? curve[0] * x * x : (bent - x) * curve[1]) + curve[2] * x;
    }
    if (kind == RELU) return lanes_max(x, Vector{});
    if (kind == RELU2) return lanes_max(x, Vector{}) * lanes_max(x, Vector{});
    for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
    return x;
}

// act(x), or where there is `up` act(x) * up, of N vectors side by side.
template <int N>
static inline void activate(Vector* x, Vector* up, int kind, const float* curve) {
    Vector z[N];
    if (kind == SILU) {
        std::copy_n(x, N, z);
        times_sigmoid<N>(x, z);
    } else if (kind == GELU_TANH) {  // tanh(z / 2) = 2 * sigmoid(z) - 1
        for (int i = 0; i < N; i++)
            z[i] = 1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
        times_sigmoid<N>(x, z);
    } else if (kind == CLAMPED_SWIGLU) {
        for (int i = 0; i < N; i++) {
            x[i] = x[i] < LIMIT ? x[i] : splat(LIMIT);
            up[i] = lanes_max(up[i] < LIMIT ? up[i] : splat(LIMIT), splat(-LIMIT));
            z[i] = STEEPNESS * x[i];
            x[i] = (up[i] + 1.0f) * x[i];
        }
        return times_sigmoid<N>(x, z);
    } else {
        for (int i = 0; i < N; i++) x[i] = activate(x[i], kind, curve);
    }
    for (int i = 0; up && i < N; i++) x[i] *= up[i];
}

// Columns [begin, end) of out = act(gate) * up, or without `up` of out = act(gate).
static inline void activate_some(const float* gate, const float* up, float* out, int64_t begin,
                                 int64_t end, int kind, const float* curve = nullptr) {
    auto some = [&](auto many, const float* gate, const float* up, float* out) {
        Vector value[many], other[many];
        for (int i = 0; i < many; i++) {
            value[i] = load(gate + i * LANES);
            if (up) other[i] = load(up + i * LANES);
        }
        activate<many>(value, up ? other : nullptr, kind, curve);
        for (int i = 0; i < many; i++) store(out + i * LANES, value[i]);
    };
    by_many((end - begin) / LANES, [&](auto many, int64_t at) {
        int64_t i = begin + at * LANES;
        some(many, gate + i, up ? up + i : nullptr, out + i);
    });
    int64_t whole = (end - begin) / LANES * LANES, rest = end - begin - whole;
    if (rest == 0) return;
    float last[3][LANES] = {};
    std::copy_n(gate + begin + whole, rest, last[0]);
    if (up) std::copy_n(up + begin + whole, rest, last[1]);
    some(Number<1>(), last[0], up ? last[1] : nullptr, last[2]);
    std::copy_n(last[2], rest, out + begin + whole);
}

// out[r, :] = act(both[r, :size]) * both[r, size:]
extern "C" void gated(const float* both, int64_t rows, int64_t size, int kind, float* out,
                      int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 16384)
    for (int64_t r = 0; r < rows; r++) {
        const float* gate = both + r * 2 * size;
        activate_some(gate, gate + size, out + r * size, 0, size, kind);
    }
}

// x[r, :] = act(x[r, :])
extern "C" void activated(float* x, int64_t rows, int64_t size, int kind, const float* curve,
                          int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 16384)
    for (int64_t r = 0; r < rows; r++)
        activate_some(x + r * size, nullptr, x + r * size, 0, size, kind, curve);
}

// x = cap * tanh(x / cap)
extern "C" void soft_cap(float* x, int64_t count, float cap, int threads) {
#pragma omp parallel for num_threads(threads) if (count > 16384)
    for (int64_t i = 0; i < count; i++) x[i] = cap * std::tanh(x[i] / cap);
}

// --------------------------------------------------------------------------------------- attention

// Where one layer's keys and values lie: rows x heads x slots x size.
struct Layer {
    float *keys, *values;
    int64_t row_stride, head_stride, size;
};

static inline void rotate(float* x, const float* cosine, const float* sine, int64_t rotary) {
    for (int64_t i = 0, half = rotary / 2; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i] + a * sine[i];
    }
}

// A norm over all of `x`, in groups of its size: heads, or one whole projection.
static inline void norm_groups(float* x, int64_t count, const Norm* norm) {
    if (norm)
        for (int64_t group = 0; group * norm->size < count; group++)
            norm_row(x + group * norm->size, *norm, group, x + group * norm->size);
}

// Angles by position. `rotary` 0: nothing is rotated, and the tables are not read.
struct Rope {
    const float *cosines, *sines;
    int64_t rotary;
};

// Queries at position p are multiplied by 1 + rate * log(1 + floor((p + first) / every)). `rate` 0:
// they stay as they are.
struct Temperature {
    int64_t every, first;
    float rate;

    float at(int64_t position) const {
        return 1.0f + rate * std::log(1.0f + (float)((position + first) / every));
    }
};

// What one attention is, beside its projections.
struct Heads {
    int64_t queries, keys, size;  // query heads, key heads, numbers of a head
    const Norm *query_norm, *key_norm, *value_norm;
    float scale, cap, clamp;  // the last one of queries, keys and values; 0: none
    const float* sinks;   // of each query head a score whose share gives nothing, or null
    const float* slopes;  // of each query head, by which scores fall with a key's distance, or null
    Temperature temperature;
    int64_t norms_behind;  // 1: norms of queries and keys come behind the rotation
    int64_t coarse;        // 1: slopes are of a key's position, in bfloat16, and scaled like scores
    int64_t borrowed;      // 1: there are queries only; another layer has filed keys and values

    int64_t kept() const { return borrowed ? 0 : keys; }
    int64_t width() const { return (queries + 2 * kept()) * size; }
};

// Where the tokens of a call go.
struct Where {
    const int64_t *rows, *slots, *positions;
};

// Splits a token's projections into heads, norms, clamps and rotates them by position, leaves
// queries in place and files keys and values.
static void file_token(float* x, int64_t token, const Heads& heads, const Rope& rope,
                       const Where& where, const Layer& layer) {
    int64_t size = heads.size, keys = heads.kept();
    norm_groups(x + (heads.queries + keys) * size, keys * size, heads.value_norm);
    auto norms = [&] {
        norm_groups(x, heads.queries * size, heads.query_norm);
        norm_groups(x + heads.queries * size, keys * size, heads.key_norm);
    };
    if (!heads.norms_behind) norms();
    if (heads.clamp > 0)
        for (int64_t i = 0; i < heads.width(); i++)
            x[i] = std::clamp(x[i], -heads.clamp, heads.clamp);
    if (rope.rotary) {
        int64_t at = where.positions[token] * (rope.rotary / 2);
        for (int64_t h = 0; h < heads.queries + keys; h++)
            rotate(x + h * size, rope.cosines + at, rope.sines + at, rope.rotary);
    }
    if (heads.norms_behind) norms();
    if (heads.temperature.rate != 0) {
        float warmth = heads.temperature.at(where.positions[token]);
        for (int64_t i = 0; i < heads.queries * size; i++) x[i] *= warmth;
    }
    int64_t at = where.rows[token] * layer.row_stride + where.slots[token] * size;
    for (int64_t h = 0; h < keys; h++) {
        std::memcpy(layer.keys + at + h * layer.head_stride, x + (heads.queries + h) * size,
                    size * 4);
        std::memcpy(layer.values + at + h * layer.head_stride,
                    x + (heads.queries + keys + h) * size, size * 4);
    }
}

extern "C" void rotate_and_store(float* qkv, int64_t tokens, const Heads* heads, const Rope* rope,
                                 const Where* where, const Layer* layer, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads->width() > 65536)
    for (int64_t t = 0; t < tokens; t++)
        file_token(qkv + t * heads->width(), t, *heads, *rope, *where, *layer);
}

// Of two vectors the lanes that `from(lane)` names, those of the second counted on from LANES.
template <class From, int... LANE>
static inline Vector lanes_of(Vector a, Vector b, From from, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, from(LANE)...);
#else
    return __builtin_shuffle(a, b, IntVector{from(LANE)...});
#endif
}
template <class From>
static inline Vector lanes_of(Vector a, Vector b, From from) {
    return lanes_of(a, b, from, std::make_integer_sequence<int, LANES>());
}

// One level of the tree of sum_lanes on LANES vectors at once: the halves of two vectors are added
// into one.
template <int HALF>
static inline void fold(Vector* part) {
    auto low = [](int lane) { return (lane & HALF ? LANES : 0) + (lane & ~HALF); };
    auto high = [](int lane) { return (lane & HALF ? LANES : 0) + (lane | HALF); };
    for (int j = 0; j < HALF; j++)
        part[j] = lanes_of(part[j], part[j + HALF], low) + lanes_of(part[j], part[j + HALF], high);
    if constexpr (HALF > 1) fold<HALF / 2>(part);
}

// The products of one query with LANES keys; lane j holds what sum_lanes would give for key(j). As
// many keys as lanes, so that their sums are folded together and not one by one. If it ASKS, so
// many numbers from `next` on are asked for meanwhile.
template <bool ASKS = false, class Key>
static inline Vector score_keys(const float* query, Key key, int64_t size,
                                const float* next = nullptr) {
    Vector part[LANES];
    Vector q = load(query);
    auto ask = [&](int64_t at) {
        if (ASKS && at % LINE == 0) __builtin_prefetch(next + at, 0, 2);
    };
    for (int j = 0; j < LANES; j++) {
        ask(j * LANES);
        part[j] = q * load(key(j));
    }
    for (int64_t i = LANES; i < size; i += LANES) {
        q = load(query + i);
        for (int j = 0; j < LANES; j++) {
            ask((i + j) * LANES);
            part[j] += q * load(key(j) + i);
        }
    }
    fold<LANES / 2>(part);
    return part[0];
}

// heads that are no multiple of LANES
static inline float score_key(const float* query, const float* key, int64_t size) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += query[i] * key[i];
    return sum;
}

// queries that share what is read of keys and values: their sums fit into the registers
constexpr int TILE = LANES == 16 ? 6 : 3;

// Swaps rows and columns of LANES vectors, in quarters of ever smaller squares.
template <int HALF>
static inline void transpose(Vector* part) {
    auto low = [](int lane) { return lane & HALF ? lane - HALF + LANES : lane; };
    auto high = [](int lane) { return lane & HALF ? lane + LANES : lane + HALF; };
    for (int j = 0; j < LANES; j++) {
        if (j & HALF) continue;
        Vector upper = part[j], lower = part[j + HALF];
        part[j] = lanes_of(upper, lower, low);
        part[j + HALF] = lanes_of(upper, lower, high);
    }
    if constexpr (HALF > 1) transpose<HALF / 2>(part);
}

// The bits of a lane's number, mirrored: in this order the tree of sum_lanes meets the lanes.
static constexpr int mirrored(int lane) {
    int found = 0;
    for (int bit = 1; bit < LANES; bit *= 2) found += lane & bit ? LANES / 2 / bit : 0;
    return found;
}

constexpr int64_t AHEAD = 12 << 10;  // bytes of keys or values that are asked for before their use
// Keys or values of more bytes do not stay in the second cache while all queries of a batch use
// them. What comes next of them is asked for in equal steps, a line with every so many numbers of a
// query or values: all at once would wait for one another. With few lanes multiplying takes longer.
constexpr int64_t FAR = LANES == 16 ? 512 << 10 : INT64_MAX;

// Keys or values that a thread will read, stretch after stretch of memory. As many are asked for as
// are used meanwhile, and evenly: many at once would wait for one another, and whoever asks for
// them too.
class Ahead {
    struct Stretch {
        const float* first;
        int64_t rows;
    };
    std::vector<Stretch> stretches;
    int64_t columns, stride, row = 0;
    size_t at = 0;

   public:
    Ahead(int64_t columns, int64_t stride) : columns(columns), stride(stride) {}
    void add(const float* first, int64_t rows) {
        if (rows > 0) stretches.push_back({first, rows});
    }
    // The first of them. `asked`: somebody did.
    void begin(bool asked = false) {
        int64_t rows = AHEAD / (4 * columns);
        if (!asked) return ask(rows);
        take(rows);
    }
    // Where the next rows lie, for whoever asks for them line by line. Null: there are none.
    const float* take(int64_t rows) {
        if (at >= stretches.size()) return nullptr;
        const float* next = stretches[at].first + row * stride;
        row += rows;
        if (row >= stretches[at].rows) at++, row = 0;
        return next;
    }
    void ask(int64_t rows) {
        for (; rows > 0 && at < stretches.size(); rows--) {
            const float* next = stretches[at].first + row * stride;
#pragma GCC unroll 4
            for (int64_t i = 0; i < columns; i += LINE) __builtin_prefetch(next + i, 0, 2);
            if (++row == stretches[at].rows) at++, row = 0;
        }
    }
};

// The keys of a head once more, for many queries: panels of PANEL keys, so that a vector holds the
// same number of LANES keys and no sum has to be folded. A panel's numbers lie in the order in
// which they are used: [mirrored lane][size / LANES][PANEL].
class KeyPanels {
    Bytes room;
    const float* from = nullptr;
    int64_t blocks = 0;  // of LANES keys that are complete

   public:
    // Forgets what it holds, and makes room for heads of so many keys.
    void clear(int64_t most, int64_t size) {
        room.hold((most + PANEL) * size * 4);
        from = nullptr;
    }

    // The first `count` keys, or more. What lies behind them in the last panel is never looked at,
    // but it is multiplied: zeros, since numbers that are left there by chance may be so small that
    // some processors take a hundred times as long for each.
    const float* of(const float* keys, int64_t size, int64_t count) {
        if (keys != from) blocks = 0;
        from = keys;
        int64_t whole = std::max(blocks, count / LANES);
        for (; blocks * LANES < count; blocks++) {
            float* panel = room.floats() + blocks / WIDE * PANEL * size + blocks % WIDE * LANES;
            const float* key[LANES];
            for (int64_t l = 0; l < LANES; l++)
                key[l] = keys + std::min(blocks * LANES + l, count - 1) * size;
            for (int64_t i = 0; i < size; i += LANES, panel += PANEL) {
                Vector part[LANES];
                for (int l = 0; l < LANES; l++) part[l] = load(key[l] + i);
                transpose<LANES / 2>(part);
                bool last = blocks % WIDE == 0 && (blocks + 1) * LANES >= count;
#pragma GCC unroll 16
                for (int l = 0; l < LANES; l++) {
                    float* lane = panel + mirrored(l) * (size / LANES) * PANEL;
                    store(lane, part[l]);
                    if (last) store(lane + LANES, Vector{});
                }
            }
        }
        blocks = whole;
        return room.floats();
    }
};

// Numbers 0, LANES, 2 * LANES ... of ROWS queries times those of the keys of a panel. If it ASKS,
// half a line of `next` is asked for with each number.
template <int ROWS, bool ASKS>
static inline __attribute__((always_inline)) void score_lane(
    const float* const* queries, int64_t lane, const float* panel, int64_t size,
    Vector (*sums)[WIDE], const float* next) {
    for (int64_t i = lane; i < size; i += LANES, panel += PANEL, next += 8) {
        if (ASKS && i / LANES % 2 == 0) __builtin_prefetch(next, 0, 3);
        Vector key[WIDE];
        for (int c = 0; c < WIDE; c++) key[c] = load_once(panel + c * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) sums[r][c] += queries[r][i] * key[c];
    }
}

// The same of COUNT lanes, in the order in which the tree of sum_lanes adds them: from lane `n` of
// the mirrored ones on. With its SIZE known (else 0) the few steps of a lane are no loop.
template <int ROWS, int SIZE, bool ASKS, int COUNT>
static inline __attribute__((always_inline)) void score_lanes(
    const float* const* queries, int n, const float* panel, int64_t any_size,
    Vector (*sums)[WIDE], const float* next) {
    const int64_t size = SIZE ? SIZE : any_size;
    if constexpr (COUNT == 1) {
        score_lane<ROWS, ASKS>(queries, mirrored(n), panel, size, sums, next);
    } else {
        constexpr int HALF = COUNT / 2;
        const int64_t numbers = HALF * size / LANES;  // of each query, of half of the lanes
        Vector other[ROWS][WIDE] = {};
        score_lanes<ROWS, SIZE, ASKS, HALF>(queries, n, panel, size, sums, next);
        panel += numbers * PANEL, next += numbers * 8;
        score_lanes<ROWS, SIZE, ASKS, HALF>(queries, n + HALF, panel, size, other, next);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) sums[r][c] += other[r][c];
    }
}

// The products of ROWS queries with the keys of a panel, number by number as `score_keys` makes
// them. `next`: what is asked for meanwhile, as many lines as half of a query's numbers, or null.
template <int ROWS, int SIZE>
static inline void score_panel(const float* const* queries, const float* panel, int64_t size,
                               float scale, float* const* out, const float* next) {
    Vector sums[ROWS][WIDE] = {};
    if (next)
        score_lanes<ROWS, SIZE, true, LANES>(queries, 0, panel, size, sums, next);
    else
        score_lanes<ROWS, SIZE, false, LANES>(queries, 0, panel, size, sums, panel);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < WIDE; c++) store(out[r] + c * LANES, sums[r][c] * scale);
}

template <int ROWS>
static inline void score_some(int64_t rows, const float* const* queries, const float* panel,
                              int64_t size, float scale, float* const* out,
                              const float* next) {
    if (rows == ROWS) {
        if (size == 64) return score_panel<ROWS, 64>(queries, panel, size, scale, out, next);
        if (size == 128) return score_panel<ROWS, 128>(queries, panel, size, scale, out, next);
        return score_panel<ROWS, 0>(queries, panel, size, scale, out, next);
    }
    if constexpr (ROWS > 1) score_some<ROWS - 1>(rows, queries, panel, size, scale, out, next);
}

static inline float in_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Scores become weights that sum to 1, or with a sink to less. With a slope they first fall with
// the distance from the last one, which is the query's own, or `coarse` grow with their place,
// times `scale`, which scores have in them. `count` is rounded up to LANES by the caller's buffer.
static inline void softmax(float* scores, int64_t count, float scale, float cap, float slope = 0,
                           const float* sink = nullptr, bool coarse = false) {
    int64_t whole = count / LANES, vectors = (count + LANES - 1) / LANES;
    for (int64_t j = count; j < vectors * LANES; j++) scores[j] = -INFINITY;
    Vector most[MANY], lane, total = {};
    std::fill_n(most, MANY, splat(-INFINITY));
    for (int l = 0; l < LANES; l++) lane[l] = l;
    for (int64_t j = 0; j < count && (cap > 0 || slope != 0); j += LANES) {
        Vector score = load(scores + j);
        if (cap > 0)
            for (int l = 0; l < LANES; l++) score[l] = cap * std::tanh(score[l] / cap);
        if (slope != 0 && coarse)
            for (int l = 0; l < LANES; l++)
                score[l] += in_bfloat16(slope * in_bfloat16((float)(j + l))) * scale;
        else if (slope != 0)
            score += slope * (lane + (float)(j - (count - 1)));
        store(scores + j, score);
    }
    by_many(vectors, [&](auto many, int64_t at) {
        for (int i = 0; i < many; i++)
            most[i] = lanes_max(load(scores + (at + i) * LANES), most[i]);
    });
    float largest = sink ? *sink : -INFINITY;
    for (int i = 1; i < MANY; i++) most[0] = lanes_max(most[i], most[0]);
    for (int l = 0; l < LANES; l++) largest = std::max(largest, most[0][l]);
    by_many(whole, [&](auto many, int64_t at) {
        Vector weights[many];
        float* here = scores + at * LANES;
        for (int i = 0; i < many; i++) weights[i] = load(here + i * LANES) - largest;
        exponentials<many>(weights);
        for (int i = 0; i < many; i++) {
            store(here + i * LANES, weights[i]);
            total += weights[i];
        }
    });
    if (whole < vectors) {
        float* here = scores + whole * LANES;
        Vector weight = exponential(load(here) - largest);
        weight = lane < splat(count - whole * LANES) ? weight : Vector{};
        store(here, weight);
        total += weight;
    }
    float sum = sum_lanes(total);
    if (sink) sum += exponential(splat(*sink - largest))[0];
    float inverse = 1.0f / sum;
    by_many(vectors, [&](auto many, int64_t at) {
        float* here = scores + at * LANES;
        for (int i = 0; i < many; i++) store(here + i * LANES, load(here + i * LANES) * inverse);
    });
}

constexpr int SPAN = 4;             // vectors of one head that are summed together
constexpr int BLOCK = 4 * LANES;    // keys or values that stay near while a batch uses them
constexpr int FEW_ITEMS = 4;        // of a thread, from which on an odd one matters little
constexpr int MOST_TOKENS = 8;      // tokens of one row that are attended together
constexpr int LONG_RUN = 512;       // keys of a head from which on threads share what is left over
// from so many on, panels of keys pay: with few lanes folding their sums costs little
constexpr int MANY_QUERIES = LANES == 16 ? TILE : 9;

// Values that are asked for while others are summed: one for every `step` of them, and 0 for none.
struct Ask {
    const float* first = nullptr;
    int64_t stride = 0, step = 0;
};

// out[r][begin:] += sum over j of weights[r][j] * value(j)[begin:], SPANS vectors at a time, as far
// as they go: they fit into registers, and a value is read once for all queries. The running sums
// rest in `out` between calls, which changes no bit. STEP is that of `ask`. Gives the first number
// that is left.
template <int ROWS, int SPANS, int STEP, class Value>
static inline int64_t weigh_spans(const float* const* weights, Value value, int64_t count,
                                  int64_t begin, int64_t size, float* const* out, Ask ask) {
    constexpr int PART = STEP ? SPANS * LANES / LINE / STEP : 0;  // lines that are asked for at once
    int64_t i = begin;
    for (; i + SPANS * LANES <= size; i += SPANS * LANES) {
        Vector total[ROWS][SPANS];
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < SPANS; c++) total[r][c] = load(out[r] + i + c * LANES);
        for (int64_t j = 0; j < count; j++) {
            for (int c = 0; c < SPANS; c++) {
                if constexpr (STEP > 0) {
                    const float* next = ask.first + j / STEP * ask.stride + i;
                    if (c < PART) __builtin_prefetch(next + (j % STEP * PART + c) * LINE, 0, 2);
                }
                Vector here = load_once(value(j) + i + c * LANES);
                for (int r = 0; r < ROWS; r++) total[r][c] += weights[r][j] * here;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < SPANS; c++) store(out[r] + i + c * LANES, total[r][c]);
    }
    return i;
}

template <int ROWS, class Value>
static inline void weigh_rows(const float* const* weights, Value value, int64_t count,
                              int64_t size, float* const* out, Ask ask) {
    auto spans = [&](auto step) {
        return weigh_spans<ROWS, SPAN, step>(weights, value, count, 0, size, out, ask);
    };
    int64_t i = ask.step == 0   ? spans(Number<0>())
                : ask.step == 1 ? spans(Number<1>())
                : ask.step == 2 ? spans(Number<2>())
                                : spans(Number<4>());
    i = weigh_spans<ROWS, SPAN / 2, 0>(weights, value, count, i, size, out, ask);
    i = weigh_spans<ROWS, 1, 0>(weights, value, count, i, size, out, ask);
    // numbers side by side, never one sum cut into vectors: that would change its bits
    for (int r = 0; r < ROWS && i < size; r++)
        for (int64_t j = 0; j < count; j++) {
            const float* __restrict here = value(j);
            float weight = weights[r][j], * __restrict total = out[r];
            for (int64_t at = i; at < size; at++) total[at] += weight * here[at];
        }
}

template <int ROWS, class Value>
static inline void weigh(int64_t rows, const float* const* weights, Value value, int64_t count,
                         int64_t size, float* const* out, Ask ask = {}) {
    if (rows == ROWS) return weigh_rows<ROWS>(weights, value, count, size, out, ask);
    if constexpr (ROWS > 1) weigh<ROWS - 1>(rows, weights, value, count, size, out, ask);
}

// What each query of a call sees: slots [start, stop) of its row and then the listed ones (a tree's
// ancestors), in that order.
struct Sight {
    const int64_t *rows, *starts, *stops, *first_extra, *extras;  // the last two null for chains

    int64_t run(int64_t token) const { return std::max<int64_t>(0, stops[token] - starts[token]); }
    int64_t listed(int64_t token) const {
        return extras ? first_extra[token + 1] - first_extra[token] : 0;
    }
    bool together(int64_t a, int64_t b) const {
        return rows[a] == rows[b] && starts[a] == starts[b];
    }
};

// Some queries of a batch: where they, their scores and their sums lie, and how many keys of the
// run each sees.
struct Tile {
    int64_t rows = 0, least = INT64_MAX, runs[TILE];
    const float* queries[TILE];
    float *scores[TILE], *out[TILE];

    void add(const float* query, float* its_scores, float* its_out, int64_t run) {
        queries[rows] = query;
        scores[rows] = its_scores;
        out[rows] = its_out;
        runs[rows++] = run;
        least = std::min(least, run);
    }
};

// What a thread keeps for itself.
struct Memory {
    Bytes scores, rows, prepared;
    KeyPanels panels;
    std::vector<float> recurrence;
    experts::Slots slots;
};

// Some tokens of one row that begin to see at the same slot, with the queries of one group of
// heads. Keys and values are gone through in blocks, and every block is used by all tokens while it
// is near; each token's numbers come in the order of its own list.
struct Batch {
    const float* queries;
    int64_t stride, group;
    const float *keys, *values;  // of the first slot seen
    const Layer* layer;
    const Sight* sight;
    int64_t first, tokens;
    Memory& memory;
    float* scores;
    int64_t room;   // scores of one query
    float* target;  // of the first token
    int64_t head;   // the group's first
    float scale;    // of scores
    std::vector<Tile> tiles = {};

    const float* query(int64_t t, int64_t g) const {
        return queries + t * stride + g * layer->size;
    }
    float* of(int64_t t, int64_t g) const { return scores + (t * group + g) * room; }
    int64_t slot(int64_t t, int64_t j) const {  // relative to the first slot seen
        int64_t run = sight->run(first + t), token = first + t;
        if (j < run) return j;
        return sight->extras[sight->first_extra[token] + j - run] - sight->starts[token];
    }
    int64_t run(int64_t t) const { return sight->run(first + t); }
    int64_t count(int64_t t) const { return run(t) + sight->listed(first + t); }
    int64_t longest() const {
        int64_t found = 0;
        for (int64_t t = 0; t < tokens; t++) found = std::max(found, run(t));
        return found;
    }
    bool many() const { return tokens * group >= MANY_QUERIES; }
    bool far(int64_t keys) const { return keys * layer->size * 4 > FAR; }  // or so many values

    // The queries in tiles, counted token by token.
    void cut_tiles(int64_t out_stride) {
        tiles.clear();
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t g = 0; g < group; g++) {
                if ((t * group + g) % TILE == 0) tiles.emplace_back();
                tiles.back().add(query(t, g), of(t, g), target + t * out_stride + g * layer->size,
                                 run(t));
            }
    }

    // Of the keys [begin, end) of the runs, whole vectors at a time; `begin` is a multiple of
    // PANEL. What a query does not see is written over by `score_rest`, or not looked at.
    void score(int64_t begin, int64_t end, Ahead* ahead) {
        if (layer->size % LANES || begin >= end) return;
        if (many()) return score_panels(begin, end, ahead);
        int64_t size = layer->size;
        for (int64_t j = begin; j < end; j += LANES) {
            const float* next = ahead ? ahead->take(LANES) : nullptr;
            for (int64_t t = 0; t < tokens; t++) {
                if (j + LANES > run(t)) continue;
                auto key = [&](int64_t l) { return keys + (j + l) * size; };
                for (int64_t g = 0; g < group; g++) {
                    const float* asked = std::exchange(next, nullptr);
                    Vector sums = asked ? score_keys<true>(query(t, g), key, size, asked)
                                        : score_keys(query(t, g), key, size);
                    store(of(t, g) + j, sums * scale);
                }
            }
        }
    }

    void score_panels(int64_t begin, int64_t end, Ahead* ahead) {
        int64_t size = layer->size, each = (PANEL + tiles.size() - 1) / tiles.size();
        bool asks = far(end - begin);
        for (int64_t j = 0; j < end - begin; j += PANEL) {
            int64_t some = std::min(j + PANEL, end - begin);
            const float* panel = memory.panels.of(keys + begin * size, size, some) + j * size;
            const float* next = asks ? panel + PANEL * size : nullptr;
            for (const Tile& tile : tiles) {
                float* out[TILE];
                for (int64_t r = 0; r < tile.rows; r++) out[r] = tile.scores[r] + begin + j;
                score_some<TILE>(tile.rows, tile.queries, panel, size, scale, out, next);
                if (asks) next += size / 2 * 16;
                if (ahead) ahead->ask(each);
            }
        }
    }

    // Of one query with what is left of its run, and with the listed keys.
    void score_rest(int64_t t, int64_t g) {
        int64_t size = layer->size;
        if (size % LANES) {
            for (int64_t j = 0; j < count(t); j++)
                of(t, g)[j] = scale * score_key(query(t, g), keys + slot(t, j) * size, size);
            return;
        }
        if (many() && count(t) == run(t)) return;
        for (int64_t j = run(t) / LANES * LANES; j < count(t); j += LANES) {
            const float* rest[LANES];
            for (int64_t l = 0; l < LANES; l++)
                rest[l] = keys + slot(t, std::min(j + l, count(t) - 1)) * size;
            auto key = [&](int64_t l) { return rest[l]; };
            store(of(t, g) + j, score_keys(query(t, g), key, size) * scale);
        }
    }

    // The sums of columns [begin, begin + columns) of the values: first nothing, then those of the
    // runs, block by block, then the listed ones.
    void clear(int64_t out_stride, int64_t begin, int64_t columns) const {
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t g = 0; g < group; g++)
                std::fill_n(target + t * out_stride + g * layer->size + begin, columns, 0.0f);
    }
    // Of one block. All tiles together ask for as many values from `next` on.
    void sum_tiles(int64_t j, int64_t block, int64_t begin, int64_t columns,
                   const float* next) const {
        constexpr int64_t LINES = SPAN * LANES / LINE;  // of a value, in one go
        if (!next && far(longest())) next = values + begin + (j + block) * layer->size;
        int64_t count = tiles.size(), step = count < LINES ? std::min<int64_t>(count, 2) : LINES;
        int64_t asked = 0;
        for (const Tile& tile : tiles) {
            Ask ask;
            if (next && asked < step)
                ask = {next + asked++ * (block / step) * layer->size, layer->size, step};
            sum_block(tile, j, block, begin, columns, ask);
        }
    }
    void sum_listed(int64_t out_stride, int64_t begin, int64_t columns) const {
        int64_t size = layer->size;
        for (int64_t t = 0; t < tokens; t++) {
            auto value = [&](int64_t l) { return values + slot(t, run(t) + l) * size + begin; };
            for (int64_t g = 0; g < group && count(t) > run(t); g++) {
                const float* weights = of(t, g) + run(t);
                float* out = target + t * out_stride + g * size + begin;
                weigh<1>(1, &weights, value, count(t) - run(t), columns, &out);
            }
        }
    }

    // The values from j on that all queries of a tile see, then those that only some see.
    void sum_block(const Tile& tile, int64_t j, int64_t block, int64_t begin, int64_t columns,
                   Ask ask) const {
        const float* weights[TILE];
        float* out[TILE];
        for (int64_t r = 0; r < tile.rows; r++) {
            weights[r] = tile.scores[r] + j;
            out[r] = tile.out[r] + begin;
        }
        int64_t stride = layer->size;
        const float* from = values + j * stride + begin;
        auto value = [from, stride](int64_t l) { return from + l * stride; };
        int64_t common = std::clamp<int64_t>(tile.least - j, 0, block);
        weigh<TILE>(tile.rows, weights, value, common, columns, out, ask);
        for (int64_t r = 0; r < tile.rows; r++) {
            int64_t own = std::clamp<int64_t>(tile.runs[r] - j, 0, block);
            auto after = [=](int64_t l) { return value(common + l); };
            const float* rest = weights[r] + common;
            if (own > common) weigh<1>(1, &rest, after, own - common, columns, &out[r]);
        }
    }
};

// How the attention of one call is cut into items of work: a head's keys and values, and some
// tokens of one row that look at them together.
struct Pieces {
    struct Item {
        int64_t head, first, tokens;
        bool far;  // its keys and values are not near yet, from the item before
    };
    std::vector<Item> items;     // in the order in which threads take them
    int64_t whole;               // so many of them first; the others are what is left over
    int64_t together = 0;        // tokens of an item at most
    int64_t most = 0, work = 0;  // keys that one query sees at most; multiplications, about
    bool shared;                 // whether threads share the keys and values of each that is left

    Pieces(const Sight& sight, int64_t tokens, const Heads& heads, int64_t threads) {
        std::vector<int64_t> begins = cut(sight, tokens);
        int64_t batches = begins.size() - 1, count = batches * heads.keys;
        // few items that do not come out even would leave threads idle
        int64_t left = count >= FEW_ITEMS * threads ? 0 : count % threads;
        whole = count - left;
        // behind a short text threads take longer to tell each other of scores than one for a head
        bool worth = tokens * heads.keys < threads || (tokens == 1 && sight.run(0) >= LONG_RUN);
        shared = left > 0 && heads.size % LANES == 0 && worth;
        for (int64_t item = 0; item < count; item++) {
            int64_t at = item % batches, first = begins[at], some = begins[at + 1] - first;
            bool near = at > 0 && sight.rows[first] == sight.rows[begins[at - 1]];
            bool alone = item < whole || shared;
            int64_t parts = alone ? 1 : std::min(some, (threads + left - 1) / left);
            for (int64_t part = 0; part < parts; part++) {
                Share mine(some, part, parts);
                together = std::max(together, mine.end - mine.begin);
                items.push_back({item / batches, first + mine.begin, mine.end - mine.begin,
                                 !near || item >= whole});
            }
        }
        for (int64_t t = 0; t < tokens; t++) {
            most = std::max(most, sight.run(t) + sight.listed(t));
            work += sight.run(t) * heads.queries * heads.size;
        }
    }
    // The first token of each batch, and one past the last token. What goes together is cut evenly.
    static std::vector<int64_t> cut(const Sight& sight, int64_t tokens) {
        std::vector<int64_t> begins;
        for (int64_t t = 0, end = 0; t < tokens; t = end) {
            while (end < tokens && (end == t || sight.together(end - 1, end))) end++;
            int64_t parts = (end - t + MOST_TOKENS - 1) / MOST_TOKENS;
            for (int64_t part = 0; part < parts; part++)
                begins.push_back(t + Share(end - t, part, parts).begin);
        }
        begins.push_back(tokens);
        return begins;
    }
    // scores of one query
    int64_t room() const { return (most + LANES - 1) / LANES * LANES + LANES; }
    // Bytes of the scores that threads share.
    int64_t shared_bytes(const Heads& heads) const {
        int64_t tokens = 0;
        for (size_t i = whole; i < items.size(); i++) tokens += items[i].tokens;
        return shared ? tokens * heads.queries / heads.keys * room() * 4 : 0;
    }
};

// One attention: what it reads, and where its result goes, each token's queries * size.
struct Attention {
    const float* qkv;
    const Heads& heads;
    const Layer& layer;
    const Sight& sight;
    const Pieces& pieces;
    float* out;
    int64_t stride, width;  // from one token to the next, of what it reads and of its result

    int64_t group() const { return heads.queries / heads.keys; }

    // Where the keys and values of an item begin.
    int64_t place(const Pieces::Item& item) const {
        return sight.rows[item.first] * layer.row_stride + item.head * layer.head_stride +
               sight.starts[item.first] * heads.size;
    }

    Batch batch(const Pieces::Item& item, float* scores, Memory& memory) const {
        int64_t first = item.first, size = heads.size, query = item.head * group();
        int64_t at = place(item);
        Batch found{qkv + first * stride + query * size, stride, group(),
                    layer.keys + at, layer.values + at, &layer, &sight, first,
                    item.tokens, memory, scores, pieces.room(),
                    out + first * width + query * size, query, heads.scale};
        found.cut_tiles(width);
        return found;
    }

    // Each item by one thread, but for those that all threads share.
    void apart(Items whole, Items parts, Memory& memory) const {
        memory.scores.hold(pieces.together * group() * pieces.room() * 4);
        int64_t asked = -1;  // the item whose first keys were asked for
        auto attend = [&](int64_t i, int64_t then) {
            const Pieces::Item& item = pieces.items[i];
            Batch some = batch(item, memory.scores.floats(), memory);
            Ahead lines(heads.size, heads.size);
            if (item.far) {
                lines.add(some.keys, some.longest());
                lines.add(some.values, some.longest());
                if (then < (int64_t)pieces.items.size() && pieces.items[then].far) {
                    const Pieces::Item& next = pieces.items[then];
                    lines.add(layer.keys + place(next), sight.run(next.first));
                }
                lines.begin(asked == i);
                asked = then;
            }
            Ahead* ahead = item.far ? &lines : nullptr;
            some.score(0, some.longest(), ahead);
            for (int64_t t = 0; t < some.tokens; t++)
                for (int64_t g = 0; g < group(); g++) finish(some, t, g);
            sum(some, 0, heads.size, ahead);
        };
        // the item after the last whole one is this thread's part, if no other thread takes it
        int64_t count = pieces.items.size(), left = pieces.shared ? 0 : count - pieces.whole;
        int64_t own = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t end = Share(pieces.whole, own, threads).end;
        int64_t part = count - left + Share(left, own, threads).begin;
        whole.share_out(pieces.whole, [&](int64_t i) {
            attend(i, i + 1 < end ? i + 1 : part);
        });
        parts.share_out(left, [&](int64_t i) {
            attend(pieces.whole + i, pieces.whole + i + 1);
        });
    }

    void finish(Batch& some, int64_t t, int64_t g) const {
        some.score_rest(t, g);
        int64_t head = some.head + g;
        softmax(some.of(t, g), some.count(t), heads.scale, heads.cap,
                heads.slopes ? heads.slopes[head] : 0, heads.sinks ? heads.sinks + head : nullptr,
                heads.coarse);
    }

    // Columns of the values of a batch.
    void sum(const Batch& some, int64_t begin, int64_t columns, Ahead* ahead) const {
        some.clear(width, begin, columns);
        int64_t end = some.longest(), step = ahead ? BLOCK / 2 : BLOCK;  // less is asked for in vain
        for (int64_t j = 0; j < end; j += step) {
            int64_t block = std::min(step, end - j);
            some.sum_tiles(j, block, begin, columns, ahead ? ahead->take(block) : nullptr);
        }
        some.sum_listed(width, begin, columns);
    }

    // Few batches are left over: threads share the keys of all, then their queries, then the columns
    // of their values, so that each of them reads as much memory as the others. `scores`: of all
    // these queries.
    void together(Items of_keys, Items of_columns, Meeting& meeting, float* scores,
                  Memory& memory) const {
        int64_t threads = omp_get_num_threads(), size = heads.size;
        std::vector<Batch> all;
        all.reserve(pieces.items.size() - pieces.whole);
        int64_t longest = 0, vectors = size / LANES, parts = std::min(threads, vectors);
        Share columns(vectors, omp_get_thread_num() % parts, parts);
        Ahead values((columns.end - columns.begin) * LANES, size);
        for (size_t i = pieces.whole; i < pieces.items.size(); i++) {
            Batch& some = all.emplace_back(batch(pieces.items[i], scores, memory));
            scores += some.tokens * group() * pieces.room();
            longest = std::max(longest, some.longest());
            values.add(some.values + columns.begin * LANES, some.longest());
        }
        int64_t panels = (longest + PANEL - 1) / PANEL;
        of_keys.share_out(threads, [&](int64_t item) {
            Share mine(panels, item, threads);
            Ahead keys(size, size);
            auto end = [&](const Batch& each) {
                return std::min(mine.end * PANEL, each.longest());
            };
            for (const Batch& each : all)
                keys.add(each.keys + mine.begin * PANEL * size, end(each) - mine.begin * PANEL);
            keys.begin();
            for (Batch& each : all) each.score(mine.begin * PANEL, end(each), &keys);
        });
        values.begin();
        meeting.wait();
        int64_t query = 0;
        for (Batch& each : all)
            for (int64_t t = 0; t < each.tokens; t++)
                for (int64_t g = 0; g < group(); g++)
                    if (query++ % threads == omp_get_thread_num()) finish(each, t, g);
        meeting.wait();
        of_columns.share_out(parts, [&](int64_t item) {
            Share mine(vectors, item, parts);
            for (const Batch& each : all)
                sum(each, mine.begin * LANES, (mine.end - mine.begin) * LANES, &values);
        });
    }

    // Each query's attention over the keys that it sees, by all threads. `scores`: room for
    // `shared_bytes`.
    void run(Steps& steps, int64_t step, Meeting& meeting, float* scores, Memory& memory) const {
        bool many = pieces.together * group() >= MANY_QUERIES;
        memory.panels.clear(many ? pieces.most : 0, heads.size);
        if (pieces.whole || !pieces.shared) apart(steps[step], steps[step + 1], memory);
        if (pieces.shared) together(steps[step + 1], steps[step + 2], meeting, scores, memory);
    }
};

extern "C" void attend(const float* qkv, int64_t tokens, const Heads* heads, const Layer* layer,
                       const Sight* sight, float* out, int threads) {
    Pieces pieces(*sight, tokens, *heads, threads);
    Bytes scores(pieces.shared_bytes(*heads));
    Steps steps(3, threads);
    Meeting meeting;
    Attention attention{qkv, *heads, *layer, *sight, pieces, out, heads->width(),
                        heads->queries * heads->size};
#pragma omp parallel num_threads(threads) if (pieces.work > 40000)
    {
        Memory memory;
        attention.run(steps, 0, meeting, scores.floats(), memory);
    }
}

// ----------------------------------------------------------------------------------------- experts

constexpr int PIECES = 3;  // of a product, for each thread

// What the threads of a call share of its experts' work.
struct Staging {
    Bytes which, weights, staged, first, second;
    int64_t slots = 0;
    // bytes of a staged row at most, and numbers of its products
    int64_t row = 0, wide = 0, width = 0;

    // Room for this mixture and for those that it was held for before.
    void hold(const experts::Mixture& mixture, int64_t tokens) {
        slots = std::max(slots, tokens * mixture.each());
        for (int64_t e = 0; e < mixture.all(); e++) {
            for (const Product* weight : {&mixture.into[e], &mixture.out[e]})
                row = std::max(row, (bytes(*weight) + 63) / 64 * 64);
            wide = std::max(wide, mixture.into[e].outputs);
        }
        width = std::max(width, mixture.width());
        which.hold(slots * 8);
        weights.hold(slots * 4);
        staged.hold(slots * row);
        first.hold(slots * wide * 4);
        second.hold(slots * width * 4);
    }
    static int64_t bytes(const Product& weight) {  // of one of its rows
        return weight.prepare ? weight.prepared : weight.inputs * 4;
    }
};

// The experts of one half at work: each runs once, with the rows of all tokens that have it. Every
// product's rows are staged beside one another, and a token's sum goes through its own experts, the
// best first, so a token's bits do not depend on what other tokens choose.
struct Experts {
    const experts::Mixture& mixture;
    const float *x, *logits;  // of each token: its numbers, and what the router gave
    int64_t read, stride;     // from one token to the next in both
    int64_t tokens, width;
    const float* residual;  // or null
    float* out;
    int64_t given;  // from one token to the next in both
    Staging& staging;

    void run(Items of_into, Items of_out, Meeting& meeting, Memory& memory) const {
        for (Share mine(tokens); mine.begin < mine.end; mine.begin++) choose(mine.begin, memory);
        meeting.wait();
        experts::Slots& slots = memory.slots;  // every thread sorts them for itself
        slots.sort(mixture, (const int64_t*)staging.which.at(), tokens);
        auto copy = [&](int64_t slot, float* to) {
            const float* from = x + slots.tokens[slot] * read;
            float weight = mixture.of_inputs ? staging.weights.floats()[slots.pairs[slot]] : 1.0f;
            std::transform(from, from + width, to, [&](float value) { return weight * value; });
        };
        multiply(mixture.into, copy, staging.first.floats(), staging.wide, of_into, meeting,
                 memory);
        auto activate = [&](int64_t slot, float* to) {
            int64_t expert = slots.experts[slot], size = mixture.out[expert].inputs;
            int64_t own = mixture.into[expert].outputs;
            const float* gate = staging.first.floats() + slots.place(slot, staging.wide, own);
            activate_some(gate, mixture.gated ? gate + size : nullptr, to, 0, size,
                          mixture.activation);
        };
        multiply(mixture.out, activate, staging.second.floats(), width, of_out, meeting, memory);
        add(slots);
        meeting.wait();
    }

   private:
    void choose(int64_t t, Memory& memory) const {
        int64_t room = (mixture.count + LANES) / LANES * LANES;
        memory.scores.hold(2 * room * 4);
        float* scores = memory.scores.floats();
        const float* given = logits + t * stride;
        auto sigmoid = [](float logit) { return 1.0f / (1.0f + recurrent::exponential(-logit)); };
        if (mixture.sigmoid) {
            std::transform(given, given + mixture.count, scores, sigmoid);
        } else {
            std::copy_n(given, mixture.count, scores);
            if (!mixture.margin) softmax(scores, mixture.count, 1, 0);
        }
        int64_t* which = (int64_t*)staging.which.at() + t * mixture.each();
        float* weights = staging.weights.floats() + t * mixture.each();
        experts::choose(mixture, scores, scores + room, which, weights);
        if (!mixture.shared) return;
        which[mixture.chosen] = mixture.count;
        weights[mixture.chosen] = mixture.weighed ? sigmoid(given[mixture.count]) : 1.0f;
    }

    // One product of every expert with its rows, which `row` writes. Complete at the end.
    template <class Row>
    void multiply(const Product* products, Row row, float* to, int64_t wide, Items items,
                  Meeting& meeting, Memory& memory) const {
        const experts::Slots& slots = memory.slots;
        for (Share mine(slots.total()); mine.begin < mine.end; mine.begin++) {
            const Product& weight = products[slots.experts[mine.begin]];
            char* place =
                staging.staged.at(slots.place(mine.begin, staging.row, Staging::bytes(weight)));
            if (!weight.prepare) {
                row(mine.begin, (float*)place);
                continue;
            }
            memory.scores.hold(weight.inputs * 4);
            row(mine.begin, memory.scores.floats());
            weight.prepare(&weight, memory.scores.floats(), 0, weight.inputs, place);
        }
        meeting.wait();
        int64_t active = slots.active.size(), threads = omp_get_num_threads();
        int64_t pieces = threads == 1 ? 1 : (threads * PIECES + active - 1) / active;
        items.share_out(active * pieces, [&](int64_t item) {
            int64_t expert = slots.active[item / pieces], begin = slots.begins[expert];
            const Product& weight = products[expert];
            weight.multiply(&weight, staging.staged.at(begin * staging.row), slots.rows(expert),
                            nullptr, to + begin * wide, item % pieces, pieces);
        });
        meeting.wait();
    }

    // This thread's share of what comes out: the residual, then what each expert gives.
    void add(const experts::Slots& slots) const {
        Share mine(tokens * width);
        for (int64_t begin = mine.begin, end; begin < mine.end; begin = end) {
            int64_t t = begin / width, first = begin % width;
            end = std::min(mine.end, (t + 1) * width);
            float* __restrict sums = out + t * given + first;
            if (!residual)
                std::fill_n(sums, end - begin, 0.0f);
            else if (residual != out)
                std::copy_n(residual + t * given + first, end - begin, sums);
            for (int64_t i = t * mixture.each(); i < (t + 1) * mixture.each(); i++) {
                const float* __restrict from =
                    staging.second.floats() + slots.of[i] * width + first;
                float weight = mixture.of_inputs ? 1.0f : staging.weights.floats()[i];
                for (int64_t c = 0; c < end - begin; c++) sums[c] += weight * from[c];
            }
        }
    }
};

// A mixture by itself: x (tokens, width) and what the router gave, to what all experts give.
extern "C" void mix(const experts::Mixture* mixture, const float* x, const float* logits,
                    int64_t stride, int64_t tokens, int64_t width, const float* residual,
                    float* out, int threads) {
    Staging staging;
    staging.hold(*mixture, tokens);
    Meeting meeting;
    Steps steps(2, threads);
    Experts all{*mixture, x, logits, width, stride, tokens, width, residual, out, width, staging};
#pragma omp parallel num_threads(threads)
    {
        Memory memory;
        all.run(steps[0], steps[1], meeting, memory);
    }
}

// ------------------------------------------------------------------------------------ whole passes

// Latent attention: what unfolds queries, keys and values from what the first product gives, which
// is queries or the numbers that they come from, the numbers that keys and values come from, and
// a rotated key for all heads.
struct Latent {
    const Product *queries, *rest;    // queries null: they come as they are
    const Norm *query_norm, *norm;    // of what the two products read
    int64_t rotary, plain, value;     // numbers of a key that rotate, and do not; of a value

    int64_t key() const { return rotary + plain; }
};

// Products between a convolution and the states behind it: of what left it to the few numbers that
// steps come from, keys and queries; and of these few to the steps.
struct Selective {
    const Product *into, *steps;
    const Norm *norm, *key_norm, *query_norm;  // of the three, or null
};

// Half of a layer: norm, product, attention, recurrence or activation, product, norm, scale, added
// to the stream, and the stream scaled. A mixture's first product is its router, and its last one
// widens what its experts give, or is not there.
struct Half {
    int64_t layer, attention;     // which; 1: it has heads
    int64_t parallel;             // 1: the MLP reads what entered the layer
    const Norm *before, *inner, *after;  // the second of what the last product reads; null: none
    Product into, out;
    // of attention, like the next two: which of the call's ropes and sights it uses
    Heads heads;
    int64_t rope, sight;
    const recurrent::Recurrence* recurrence;  // or null, like the mixture
    const experts::Mixture* mixture;
    const Selective* selective;  // of a recurrence that is
    const Latent* latent;  // makes queries, keys and values of what the first product gives
    int64_t activation;           // of an MLP
    int64_t gated;                // an MLP; or of attention: gates lie behind queries, keys, values
    float scale, stream;
    const float* curve;           // of an activation that has one
    int64_t given;                // of an MLP: its second factor are its token's numbers from this
                                  // one on; -1: it is its own
    int64_t held;                 // 1: what it adds is held, and the part behind it adds that too
    const Norm* reads;            // of what experts read, if it is not what their router reads
    const Norm* last;             // of the sum with what was held
    const Half* then;             // the next part of the same half, or null

    bool mlp() const { return !attention && !recurrence; }
};

// The parts of some halves, one after the other.
template <class Do>
static void each_part(const Half* halves, const int64_t* chosen, int64_t count, Do act) {
    for (int64_t i = 0; i < count; i++)
        for (const Half* half = &halves[chosen[i]]; half; half = half->then) act(*half);
}
static int64_t parts_of(const Half* halves, const int64_t* chosen, int64_t count) {
    int64_t parts = 0;
    each_part(halves, chosen, count, [&](const Half&) { parts++; });
    return parts;
}

// A cache: what one layer of it is, with heads of its own size.
struct Cache {
    float *keys, *values;
    int64_t layer_stride, row_stride, slots;

    Layer layer(int64_t index, int64_t size) const {
        return {keys + index * layer_stride, values + index * layer_stride, row_stride,
                slots * size, size};
    }
};

// What all halves of a call share.
struct Call {
    int64_t tokens, width;
    Where where;
    const Rope* ropes;
    const Sight* sights;
    Cache cache;
    const float* entered;  // what entered the layer of the first half
    const recurrent::Kept* kept;  // of each recurrent layer
    const float* of_tokens;       // what layers read of the tokens themselves, or null
    int64_t of_token;             // so many numbers of each
};

// Where the numbers of a call's latent attention lie, one kind after the other.
struct Unfolding {
    float *asked, *few, *queries, *rest, *qkv, *seen;
    int64_t total = 0;

    Unfolding(const Half& half, const Call& call, float* room) {
        const Latent& latent = *half.latent;
        int64_t heads = half.heads.queries, size = half.heads.size;
        auto take = [&](int64_t columns) {
            total += call.tokens * columns;
            return room ? room + total - call.tokens * columns : nullptr;
        };
        asked = take(latent.queries ? latent.queries->inputs : 0);
        few = take(latent.rest->inputs);
        queries = take(latent.queries ? heads * latent.key() : 0);
        rest = take(heads * (latent.plain + latent.value));
        qkv = take(half.heads.width());
        seen = take(heads * size);
    }
};

// The same of what is selective.
struct Choosing {
    int64_t width, few, keys;  // of what the first product gives: all of it, and its parts
    float *x, *given, *read, *steps;
    int64_t total;

    Choosing(const Half& half, const Call& call, float* room) {
        const recurrent::Recurrence& how = *half.recurrence;
        width = half.selective->into->outputs;
        few = half.selective->steps->inputs;
        keys = how.key;
        x = room;
        given = x + call.tokens * how.channels;
        read = given + call.tokens * width;
        steps = read + call.tokens * few;
        total = call.tokens * (2 * how.channels + width + few);
    }
    recurrent::Chosen chosen() const {
        return {x, steps, given + few, given + few + keys, width};
    }
};

// Numbers between the steps of a half; too short-lived to be cleared first.
struct Room {
    struct Places {
        Bytes first, second;      // outputs of a half's first product, inputs of its last one
        Bytes entering, leaving;  // rows as other products read them, and as the last one does
    };
    static constexpr int64_t FEW_TOKENS = 64;

    Bytes entered, normed, scores, unfolded, held, read;
    bool apart;
    Places places[2];
    Staging staging;
    std::vector<Pieces> pieces;
    std::vector<int> pieces_of;  // of each part of the chosen halves
    const Half* last = nullptr;

    // All products but the last.
    static std::array<const Product*, 6> entered_by(const Half& half) {
        const Latent* latent = half.latent;
        const Selective* selective = half.selective;
        return {&half.into,
                narrow(half),
                latent ? latent->queries : nullptr,
                latent ? latent->rest : nullptr,
                selective ? selective->into : nullptr,
                selective ? selective->steps : nullptr};
    }
    static const Product* narrow(const Half& half) {
        return half.mixture ? half.mixture->narrow : nullptr;
    }

    // Of few tokens attentions have other places than the rest: so a line is written by the same
    // thread in every layer, and does not come from another's cache, which may be far away.
    Places& of(const Half& half) { return places[apart && half.mlp()]; }

    // Most attentions of a call are cut alike.
    void cut(const Half& half, const Call& call, int threads) {
        auto alike = [&](const Half* other) {
            return other->sight == half.sight && other->heads.queries == half.heads.queries &&
                   other->heads.keys == half.heads.keys && other->heads.size == half.heads.size;
        };
        if (half.attention && (!last || !alike(last))) {
            pieces.emplace_back(call.sights[half.sight], call.tokens, half.heads, threads);
            scores.hold(pieces.back().shared_bytes(half.heads));
            last = &half;
        }
        pieces_of.push_back((int)pieces.size() - 1);
    }

    // `others`: products that the call multiplies by as well.
    Room(const Half* halves, const int64_t* chosen, int64_t count, const Call& call, int threads,
         std::initializer_list<const Product*> others = {})
        : entered(call.tokens * call.width * 4),
          normed(call.tokens * call.width * 4),
          apart(call.tokens <= FEW_TOKENS) {
        auto hold = [&](Bytes& rows, const Product* weight) {
            if (weight && weight->prepare) rows.hold(call.tokens * weight->prepared);
        };
        each_part(halves, chosen, count, [&](const Half& half) {
            const Product* more = narrow(half);
            Places& at = of(half);
            at.first.hold(call.tokens * (half.into.outputs + (more ? more->outputs : 0)) * 4);
            at.second.hold(call.tokens * half.out.inputs * 4);
            for (const Product* weight : entered_by(half)) hold(at.entering, weight);
            hold(at.leaving, &half.out);
            cut(half, call, threads);
            if (half.latent) unfolded.hold(Unfolding(half, call, nullptr).total * 4);
            if (half.selective) unfolded.hold(Choosing(half, call, nullptr).total * 4);
            if (half.mixture) staging.hold(*half.mixture, call.tokens);
            if (half.held) held.hold(call.tokens * call.width * 4);
            if (half.reads) read.hold(call.tokens * call.width * 4);
        });
        for (const Product* weight : others) hold(places[0].entering, weight);
    }
};

static void norm_rows(const float* x, const Norm& norm, int64_t width, Share rows, float* out) {
    for (; rows.begin < rows.end; rows.begin++)
        norm_row(x + rows.begin * width, norm, 0, out + rows.begin * width);
}

// A few rows are normed and prepared by every thread for itself, and a call's only row is activated
// so too: that takes less than to wait for one another, and to fetch what another prepared.
static bool few(const Call& call) { return call.tokens <= 4; }
static bool alone(const Call& call) { return call.tokens == 1; }

// Of a long prompt each thread takes rows of its own through norms, products and activations, so
// that they stay in its own cache from one step to the next; it reads all weights for them. With
// fewer rows that would be too much to read, and threads cut the columns.
static bool by_rows(const Call& call, const Product& weight) {
    int64_t own = weight.prepare ? 32 : 128;  // for each thread; weights of few bits read fast
    return call.tokens >= own * omp_get_num_threads();
}

// The rows of x normed, for a product. Unless each thread has its own, or prepares only those that
// it normed, they are complete when the threads have met.
static const float* normed(const float* x, const Norm& norm, const Call& call, const Product& into,
                           Room& room, Meeting& meeting, Memory& memory) {
    if (few(call)) {
        memory.rows.hold(call.tokens * call.width * 4);
        norm_rows(x, norm, call.width, Share(call.tokens, 0, 1), memory.rows.floats());
        return memory.rows.floats();
    }
    norm_rows(x, norm, call.width, Share(call.tokens), room.normed.floats());
    if (!into.prepare) meeting.wait();
    return room.normed.floats();
}

// of a half, in items
enum {
    INTO = 0, ATTENTION = 1, EXPERTS = 1, OUT = 4, RECURRENCE = 5, QUERIES = 5, NARROW = 5,
    REST = 6, STEPS = 7
};

// A product. Its inputs are complete, or where `x` is null prepared already; its outputs are
// complete when the threads have met again. `twofold`: each thread takes what lies in the middle of
// both halves of the outputs, which the next step reads together.
static void multiply(const Product& weight, const float* x, const float* residual, float* out,
                     const Call& call, const Bytes& prepared, Meeting& meeting, Items items,
                     Memory& memory, bool twofold = false) {
    const void* read = x;
    if (!x) {
        read = prepared.at();
    } else if (weight.prepare && few(call)) {
        memory.prepared.hold(call.tokens * weight.prepared);
        read = prepare(weight, x, Share(call.tokens, 0, 1), memory.prepared);
    } else if (weight.prepare) {
        read = prepare(weight, x, Share(call.tokens), prepared);
        meeting.wait();
    }
    int threads = omp_get_num_threads(), of_half = (PIECES + 1) / 2;
    if (by_rows(call, weight)) {
        int64_t row = weight.prepare ? weight.prepared : weight.inputs * 4;
        return items.share_out(threads * PIECES, [&](int64_t item) {
            Share mine(call.tokens, item / PIECES, threads);
            int64_t first = mine.begin * weight.outputs;
            weight.multiply(&weight, (const char*)read + mine.begin * row, mine.end - mine.begin,
                            residual ? residual + first : nullptr, out + first, item % PIECES,
                            PIECES);
        });
    }
    int pieces = threads == 1 ? 1 : threads * (twofold ? 2 * of_half : PIECES);
    items.share_out(pieces, [&](int64_t item) {
        int64_t owner = item / (2 * of_half), half = item / of_half % 2;
        int64_t piece = half * threads * of_half + owner * of_half + item % of_half;
        weight.multiply(&weight, read, call.tokens, residual, out,
                        twofold && threads > 1 ? piece : item, pieces);
    });
}

// The attention of a half: columns of what was projected to columns of `seen`, complete when the
// threads have met again.
static void attend_half(const Half& half, const Call& call, Room& room, Meeting& meeting,
                        Steps& steps, int64_t step, Memory& memory, float* first, int64_t stride,
                        float* seen, int64_t width) {
    Layer layer = call.cache.layer(half.layer, half.heads.size);
    for (Share mine(call.tokens); mine.begin < mine.end; mine.begin++)
        file_token(first + mine.begin * stride, mine.begin, half.heads, call.ropes[half.rope],
                   call.where, layer);
    meeting.wait();
    Attention attention{first, half.heads, layer, call.sights[half.sight],
                        room.pieces[room.pieces_of[step / STEPS]], seen, stride, width};
    attention.run(steps, step + ATTENTION, meeting, room.scores.floats(), memory);
}

// One token's queries, keys and values. Rotated numbers come first, and zeros fill heads up.
static void unfold(const Half& half, const float* asked, const float* turned, const float* rest,
                   float* qkv) {
    const Latent& latent = *half.latent;
    int64_t heads = half.heads.queries, size = half.heads.size, key = latent.key();
    std::fill_n(qkv, 3 * heads * size, 0.0f);
    for (int64_t h = 0; h < heads; h++, asked += key, rest += latent.plain + latent.value) {
        std::copy_n(asked, key, qkv + h * size);
        float* to = qkv + (heads + h) * size;
        std::copy_n(turned, latent.rotary, to);
        std::copy_n(rest, latent.plain, to + latent.rotary);
        std::copy_n(rest + latent.plain, latent.value, qkv + (2 * heads + h) * size);
    }
}

// Latent attention: columns of `first` to columns of `second`, complete.
static void attend_latent(const Half& half, const Call& call, Room& room, Meeting& meeting,
                          Steps& steps, int64_t step, Memory& memory) {
    const Latent& latent = *half.latent;
    Unfolding at(half, call, room.unfolded.floats());
    const Product *queries = latent.queries, *rest = latent.rest;
    int64_t heads = half.heads.queries, size = half.heads.size, stride = half.into.outputs;
    int64_t asked = queries ? queries->inputs : heads * latent.key(), few = rest->inputs;
    Room::Places& places = room.of(half);
    const float* first = places.first.floats();
    for (Share mine(call.tokens); mine.begin < mine.end; mine.begin++) {
        int64_t t = mine.begin;
        if (queries) norm_row(first + t * stride, *latent.query_norm, 0, at.asked + t * asked);
        norm_row(first + t * stride + asked, *latent.norm, 0, at.few + t * few);
    }
    meeting.wait();
    if (queries) {
        multiply(*queries, at.asked, nullptr, at.queries, call, places.entering, meeting,
                 steps[step + QUERIES], memory);
        meeting.wait();
    }
    multiply(*rest, at.few, nullptr, at.rest, call, places.entering, meeting, steps[step + REST],
             memory);
    meeting.wait();
    for (Share mine(call.tokens); mine.begin < mine.end; mine.begin++) {
        int64_t t = mine.begin;
        const float* own = first + t * stride;
        unfold(half, queries ? at.queries + t * queries->outputs : own, own + asked + few,
               at.rest + t * rest->outputs, at.qkv + t * half.heads.width());
    }  // attention files the tokens of the same share
    attend_half(half, call, room, meeting, steps, step, memory, at.qkv, half.heads.width(),
                at.seen, heads * size);
    meeting.wait();
    for (Share mine(call.tokens); mine.begin < mine.end; mine.begin++)
        for (int64_t h = 0; h < heads; h++)
            std::copy_n(at.seen + (mine.begin * heads + h) * size, latent.value,
                        places.second.floats() + (mine.begin * heads + h) * latent.value);
    meeting.wait();
}

// What is selective: columns of `first` to columns of `second`, complete.
static void look_back_choosing(const Half& half, const Call& call, Room& room, Meeting& meeting,
                               Steps& steps, int64_t step, Memory& memory) {
    const recurrent::Recurrence& how = *half.recurrence;
    const recurrent::Kept& kept = call.kept[how.index];
    const Selective& selective = *half.selective;
    Choosing at(half, call, room.unfolded.floats());
    recurrent::Chosen chosen = at.chosen();
    Room::Places& places = room.of(half);
    recurrent::Columns columns{places.first.floats(), half.into.outputs, places.second.floats(),
                               half.out.inputs};
    Share units((how.channels + LANES - 1) / LANES);
    int64_t begin = units.begin * LANES, end = std::min(units.end * LANES, how.channels);
    recurrent::convolve_new(how, kept, columns, chosen, begin, end);
    meeting.wait();
    multiply(*selective.into, at.x, nullptr, at.given, call, places.entering, meeting,
             steps[step + ATTENTION], memory);
    meeting.wait();
    for (Share mine(call.tokens); mine.begin < mine.end; mine.begin++) {
        float *given = at.given + mine.begin * at.width, *read = at.read + mine.begin * at.few;
        if (selective.norm)
            norm_row(given, *selective.norm, 0, read);
        else
            std::copy_n(given, at.few, read);
        float *key = given + at.few, *query = key + at.keys;
        if (selective.key_norm) norm_row(key, *selective.key_norm, 0, key);
        if (selective.query_norm) norm_row(query, *selective.query_norm, 0, query);
    }
    meeting.wait();
    multiply(*selective.steps, at.read, nullptr, at.steps, call, places.entering, meeting,
             steps[step + ATTENTION + 1], memory);
    meeting.wait();
    recurrent::select(how, kept, columns, chosen, begin, end);
    meeting.wait();
    recurrent::keep_chosen(how, kept, columns, chosen, omp_get_thread_num(),
                           omp_get_num_threads());
}

// What each token's columns of `first` give in `second`, complete: attention and what is recurrent.
static float* look_back(const Half& half, const Call& call, Room& room, Meeting& meeting,
                        Steps& steps, int64_t step, Memory& memory) {
    Room::Places& places = room.of(half);
    float *first = places.first.floats(), *second = places.second.floats();
    int64_t stride = half.into.outputs, width = half.out.inputs, threads = omp_get_num_threads();
    int64_t attended = half.attention ? half.heads.queries * half.heads.size : 0;
    int64_t gates = half.attention ? half.heads.width() : 0;
    int64_t own = gates + (half.gated ? attended : 0);  // the first column of the recurrence
    const recurrent::Recurrence* how = half.recurrence;
    recurrent::Columns columns{first + own, stride, second + attended, width};
    if (how) {
        int64_t parts = threads == 1 ? 1 : threads * PIECES;
        steps[step + RECURRENCE].share_out(parts, [&](int64_t part) {
            recurrent::Part(*how, call.kept[how->index], columns, part, parts, memory.recurrence)
                .run();
        });
    }
    if (half.attention)
        attend_half(half, call, room, meeting, steps, step, memory, first, stride, second, width);
    meeting.wait();
    if (how)
        recurrent::keep(*how, call.kept[how->index], columns, omp_get_thread_num(), threads);
    bool left = how && !how->by_head();
    if (!half.gated && !left) return second;
    auto finish = [&](int64_t t, float* out) {
        const float* from = first + t * stride;
        if (half.gated) recurrent::times_sigmoid(out, from + gates, attended);
        if (left)
            recurrent::finish(*how, out + attended, from + own + how->gate(), 0, how->outputs());
    };
    if (alone(call)) {
        memory.rows.hold(width * 4);
        std::copy_n(second, width, memory.rows.floats());
        finish(0, memory.rows.floats());
        return memory.rows.floats();
    }
    for (Share mine(call.tokens); mine.begin < mine.end; mine.begin++)
        finish(mine.begin, second + mine.begin * width);
    meeting.wait();
    return second;
}

// The rows of what a half's last product reads, normed; gives where they lie, complete.
static float* normed_within(const Half& half, const Call& call, float* rows, Meeting& meeting,
                            Memory& memory) {
    int64_t width = half.out.inputs;
    if (!half.inner) return rows;
    if (alone(call)) {
        memory.rows.hold(width * 4);
        norm_row(rows, *half.inner, 0, memory.rows.floats());
        return memory.rows.floats();
    }
    for (Share mine(call.tokens); mine.begin < mine.end; mine.begin++) {
        float* row = rows + mine.begin * width;
        norm_row(row, *half.inner, 0, row);
    }
    meeting.wait();
    return rows;
}

// What stands between the two products of a half; gives where its result lies, complete, or null:
// it is prepared for the second product already.
static float* between(const Half& half, const Call& call, Room& room, Meeting& meeting,
                      Steps& steps, int64_t step, Memory& memory) {
    Room::Places& places = room.of(half);
    if (half.latent) {
        attend_latent(half, call, room, meeting, steps, step, memory);
        return places.second.floats();
    }
    if (half.selective) {
        look_back_choosing(half, call, room, meeting, steps, step, memory);
        return places.second.floats();
    }
    if (!half.mlp()) return look_back(half, call, room, meeting, steps, step, memory);
    float *first = places.first.floats(), *second = places.second.floats();
    int64_t size = half.out.inputs;
    auto activate = [&](int64_t t, int64_t begin, int64_t end, float* out) {
        const float *gate = first + t * half.into.outputs, *up = half.gated ? gate + size : nullptr;
        if (half.given >= 0) up = call.of_tokens + t * call.of_token + half.given;
        activate_some(gate, up, out, begin, end, half.activation, half.curve);
    };
    if (alone(call)) {
        memory.rows.hold(size * 4);
        activate(0, 0, size, memory.rows.floats());
        return memory.rows.floats();
    }
    bool own = by_rows(call, half.out);
    int64_t groups = (size + TOGETHER - 1) / TOGETHER;
    Share rows = own ? Share(call.tokens) : Share(call.tokens, 0, 1);
    Share columns = own ? Share(groups, 0, 1) : Share(groups);
    int64_t begin = columns.begin * TOGETHER, end = std::min(columns.end * TOGETHER, size);
    bool ready = half.out.prepare && !half.inner;
    for (int64_t t = rows.begin; t < rows.end; t++) {
        activate(t, begin, end, second + t * size);
        if (ready)
            half.out.prepare(&half.out, second + t * size, begin, end,
                             places.leaving.at(t * half.out.prepared));
    }
    meeting.wait();
    return ready ? nullptr : second;
}

// The experts of a half, from the numbers `read` and what the router gave to what is `added`.
static void mix_half(const Half& half, const Call& call, const float* read, const float* residual,
                     float* added, Room& room, Meeting& meeting, Steps& steps, int64_t step,
                     Memory& memory) {
    const experts::Mixture& mixture = *half.mixture;
    int64_t scores = half.into.outputs, width = mixture.width();
    Room::Places& places = room.of(half);
    float *logits = places.first.floats(), *second = places.second.floats();
    auto run = [&](const float* x, int64_t stride, const float* residual, float* out,
                   int64_t given) {
        Experts all{mixture, x, logits, stride, scores, call.tokens, width, residual, out, given,
                    room.staging};
        all.run(steps[step + EXPERTS], steps[step + EXPERTS + 1], meeting, memory);
    };
    if (!mixture.narrow) return run(read, call.width, residual, added, call.width);
    float* narrow = logits + call.tokens * scores;
    int64_t columns = mixture.narrow->outputs, out = half.out.inputs;
    multiply(*mixture.narrow, read, nullptr, narrow, call, places.entering, meeting,
             steps[step + NARROW], memory);
    meeting.wait();
    for (Share mine(call.tokens); mine.begin < mine.end; mine.begin++) {
        const float* shared = narrow + mine.begin * columns + width;
        activate_some(shared, mixture.gated ? shared + out - width : nullptr,
                      second + mine.begin * out + width, 0, out - width, mixture.activation);
    }
    run(narrow, columns, nullptr, second, out);
    multiply(half.out, second, residual, added, call, places.leaving, meeting, steps[step + OUT],
             memory);
    meeting.wait();
}

static void run_half(const Half& half, const Call& call, float* x, Room& room, Meeting& meeting,
                     Steps& steps, int64_t step, Memory& memory) {
    const float* read = half.parallel && half.mlp() ? room.entered.floats() : x;
    if (half.before) read = normed(read, *half.before, call, half.into, room, meeting, memory);
    Room::Places& places = room.of(half);
    multiply(half.into, read, nullptr, places.first.floats(), call, places.entering, meeting,
             steps[step + INTO], memory, half.mlp() && half.gated);
    meeting.wait();
    bool plain = !half.after && !half.last && !half.held && half.scale == 1 && half.stream == 1;
    float* added = plain ? x : half.held ? room.held.floats() : room.normed.floats();
    if (half.mixture) {
        if (half.reads) {
            norm_rows(x, *half.reads, call.width, Share(call.tokens), room.read.floats());
            read = room.read.floats();
            meeting.wait();
        }
        mix_half(half, call, read, plain ? x : nullptr, added, room, meeting, steps, step, memory);
    } else {
        float* result = between(half, call, room, meeting, steps, step, memory);
        result = normed_within(half, call, result, meeting, memory);
        multiply(half.out, result, plain ? x : nullptr, added, call, places.leaving, meeting,
                 steps[step + OUT], memory);
        meeting.wait();
    }
    if (plain) return;
    if (half.after) norm_rows(added, *half.after, call.width, Share(call.tokens), added);
    for (Share rows(half.held ? 0 : call.tokens); rows.begin < rows.end; rows.begin++) {
        int64_t begin = rows.begin * call.width, end = begin + call.width;
        if (half.last) {
            for (int64_t i = begin; i < end; i++) added[i] += room.held.floats()[i];
            norm_row(added + begin, *half.last, 0, added + begin);
        }
        for (int64_t i = begin; i < end; i++) {
            x[i] += added[i] * half.scale;
            x[i] *= half.stream;
        }
    }
    meeting.wait();
}

// Copies this thread's part of the stream.
static void copy_rows(const float* from, const Call& call, float* to) {
    Share rows(call.tokens);
    std::copy(from + rows.begin * call.width, from + rows.end * call.width,
              to + rows.begin * call.width);
}

// The stream behind some of the chosen halves, by their places in order: (count, tokens, width).
struct Taps {
    int64_t count;
    const int64_t* behind;
    float* states;
};

// Carries the stream x, (tokens, width), through the chosen halves: this thread's part. A half ends
// when all threads are done with it, and changes x only after they have met again.
static void carry(float* x, const Half* halves, const int64_t* chosen, int64_t count,
                  const Call& call, const Taps& taps, Room& room, Meeting& meeting, Steps& steps,
                  Memory& memory) {
    int64_t step = 0, tap = 0;
    for (int64_t i = 0; i < count; i++) {
        const Half& half = halves[chosen[i]];
        if (half.parallel && (i == 0 || halves[chosen[i - 1]].layer != half.layer)) {
            copy_rows(i == 0 ? call.entered : x, call, room.entered.floats());
            meeting.wait();
        }
        if (half.into.multiply)
            for (const Half* part = &half; part; part = part->then, step += STEPS)
                run_half(*part, call, x, room, meeting, steps, step, memory);
        else  // the model has no such half
            step += STEPS;
        if (tap < taps.count && taps.behind[tap] == i)
            copy_rows(x, call, taps.states + tap++ * call.tokens * call.width);
    }
}

// What the recurrent layers among some halves keep counts as unknown from one to the other.
struct Keeping {
    const Half* halves;
    const int64_t* chosen;
    int64_t count;
    const Call& call;

    template <class Do>
    void each(Do act) const {
        for (int64_t i = 0; i < count; i++)
            if (auto how = halves[chosen[i]].recurrence) act(call.kept[how->index]);
    }
    void begin() const {
        each([](const recurrent::Kept& kept) { kept.begin(); });
    }
    void end() const {
        each([](const recurrent::Kept& kept) { kept.end(); });
    }
};

extern "C" void run_halves(float* x, const Half* halves, const int64_t* chosen, int64_t count,
                           const Call* call, int threads) {
    Room room(halves, chosen, count, *call, threads);
    Meeting meeting;
    Steps steps(parts_of(halves, chosen, count) * STEPS, threads);
    Keeping keeping{halves, chosen, count, *call};
    keeping.begin();
#pragma omp parallel num_threads(threads)
    {
        Memory memory;
        carry(x, halves, chosen, count, *call, {}, room, meeting, steps, memory);
    }
    keeping.end();
}

// One recurrence by itself: from the columns of its tokens to what they give.
extern "C" void recur(const recurrent::Recurrence* how, const recurrent::Kept* kept,
                      const float* y, int64_t stride, float* out, int threads) {
    recurrent::Columns columns{y, stride, out, how->outputs()};
    kept->begin();
#pragma omp parallel num_threads(threads)
    {
        Memory memory;
        int part = omp_get_thread_num(), parts = omp_get_num_threads();
        recurrent::Part(*how, *kept, columns, part, parts, memory.recurrence).run();
#pragma omp barrier
        recurrent::keep(*how, *kept, columns, part, parts);
        for (int64_t i = 0; i < kept->count && !how->by_head(); i++)
            for (Share mine(kept->passages[i].token < 0 ? 0 : kept->passages[i].count);
                 mine.begin < mine.end; mine.begin++) {
                int64_t t = kept->passages[i].token + mine.begin;
                recurrent::finish(*how, out + t * columns.out_stride, y + t * stride + how->gate(),
                                  0, how->outputs());
            }
    }
    kept->end();
}

// The two parts of a selective one, between which are its products.
extern "C" void recur_convolve(const recurrent::Recurrence* how, const recurrent::Kept* kept,
                               const float* y, int64_t stride, float* x) {
    recurrent::Columns columns{y, stride, nullptr, 0};
    recurrent::Chosen chosen{x, nullptr, nullptr, nullptr, 0};
    recurrent::convolve_new(*how, *kept, columns, chosen, 0, how->channels);
}

extern "C" void recur_select(const recurrent::Recurrence* how, const recurrent::Kept* kept,
                             const float* y, int64_t stride, const recurrent::Chosen* chosen,
                             float* out) {
    recurrent::Columns columns{y, stride, out, how->outputs()};
    kept->begin();
    recurrent::select(*how, *kept, columns, *chosen, 0, how->channels);
    recurrent::keep_chosen(*how, *kept, columns, *chosen, 0, 1);
    kept->end();
}

// x * sigmoid(gate), the gate as wide as x or one number a row.
extern "C" void times_sigmoid(float* x, const float* gate, int64_t rows, int64_t width,
                              int64_t stride, int64_t gates) {
    for (int64_t r = 0; r < rows; r++, x += width, gate += stride) {
        if (gates > 1) {
            recurrent::times_sigmoid(x, gate, width);
            continue;
        }
        float share = 1.0f / (1.0f + recurrent::exponential(-gate[0]));
        for (int64_t j = 0; j < width; j++) x[j] *= share;
    }
}

// How a guess enters a small part: its embedding and what came out before it, both of unit size,
// through a product each.
struct Entry {
    const Product *embedded, *before;
    const Norm* unit;
};

// What stands at both ends of a model.
struct Ends {
    const Product* table;  // whose rows are the embedding, or null:
    const float* rows;     // the embedding itself
    int64_t tokens;        // of the vocabulary
    const Norm* norm;
    const Product* head;
    const Entry* entry;        // null: embeddings enter as they are
    float scale, logits, cap;  // of the embedding and of logits; a soft cap of these, or 0
};

// What a whole pass gives: the last states (tokens, width), logits (tokens, vocabulary), and the
// `count` likeliest tokens of each, -1 first where the best logit is not finite.
struct Given {
    float *states, *logits;
    int64_t* best;
    int64_t count;
    Taps taps;
    const float* before;  // what came out before each token, for an entry
};

static void embed(const Ends& ends, const int64_t* ids, const Call& call, float* x) {
    for (Share mine(call.tokens); mine.begin < mine.end; mine.begin++) {
        float* to = x + mine.begin * call.width;
        if (ends.table)
            ends.table->read(ends.table, ids[mine.begin], to);
        else
            std::copy_n(ends.rows + ids[mine.begin] * call.width, call.width, to);
        if (ends.scale != 1)
            for (int64_t i = 0; i < call.width; i++) to[i] *= ends.scale;
    }
}

static void enter(const Ends& ends, const int64_t* ids, const Given& given, const Call& call,
                  Room& room, Meeting& meeting, Steps& steps, int64_t step, Memory& memory) {
    const Entry& entry = *ends.entry;
    embed(ends, ids, call, room.entered.floats());
    meeting.wait();
    const float* read = room.entered.floats();
    for (const Product* product : {entry.embedded, entry.before}) {
        bool first = product == entry.embedded;
        const float* x = normed(read, *entry.unit, call, *product, room, meeting, memory);
        multiply(*product, x, first ? nullptr : given.states, given.states, call,
                 room.places[0].entering, meeting, steps[step++], memory);
        meeting.wait();
        read = given.before;
    }
}

// What a model does to its logits.
static void change(const Ends& ends, float* logits, int64_t count) {
    Share mine(count);
    for (int64_t i = mine.begin; i < mine.end && ends.logits != 1; i++) logits[i] *= ends.logits;
    for (int64_t i = mine.begin; i < mine.end && ends.cap > 0; i++)
        logits[i] = ends.cap * std::tanh(logits[i] / ends.cap);
}

// The likeliest tokens of each row, whose blocks the threads look through together.
static void choose(const Given& given, int64_t rows, int64_t size, std::vector<float>& maxima,
                   std::vector<std::atomic<bool>>& odd, Meeting& meeting) {
    int64_t blocks = choosing::blocks_of(size);
    Share mine(blocks);
    for (int64_t r = 0; r < rows; r++)
        if (choosing::block_maxima(given.logits + r * size, size, mine.begin, mine.end,
                                   maxima.data() + r * blocks))
            odd[r] = true;
    meeting.wait();
    for (Share some(rows); some.begin < some.end; some.begin++) {
        int64_t r = some.begin;
        choosing::row_largest(given.logits + r * size, size, given.count,
                              given.best + r * given.count, odd[r],
                              maxima.data() + r * blocks, true);
    }
}

// All of a model in one call: embeds `ids`, runs the halves, and scores what comes out. Gives the
// place of the first id that is none of the vocabulary; then nothing is done. -1: there is none.
extern "C" int64_t run_model(const int64_t* ids, const Ends* ends, const Half* halves,
                             const int64_t* chosen, int64_t count, const Call* call,
                             const Given* given, int threads) {
    for (int64_t t = 0; t < call->tokens; t++)
        if (ids[t] < 0 || ids[t] >= ends->tokens) return t;
    const Entry* entry = ends->entry;
    Room room(halves, chosen, count, *call, threads,
              {ends->head, entry ? entry->embedded : nullptr, entry ? entry->before : nullptr});
    Meeting meeting;
    int64_t parts = parts_of(halves, chosen, count) * STEPS;
    Steps steps(parts + 3, threads);
    int64_t rows = call->tokens, size = ends->head->outputs;
    std::vector<float> maxima(rows * choosing::blocks_of(size));
    std::vector<std::atomic<bool>> odd(rows);
    Keeping keeping{halves, chosen, count, *call};
    keeping.begin();
#pragma omp parallel num_threads(threads)
    {
        Memory memory;
        if (entry) {
            enter(*ends, ids, *given, *call, room, meeting, steps, parts + 1, memory);
        } else {
            embed(*ends, ids, *call, given->states);
            meeting.wait();
        }
        carry(given->states, halves, chosen, count, *call, given->taps, room, meeting, steps,
              memory);
        const Product& head = *ends->head;
        const float* x =
            normed(given->states, *ends->norm, *call, head, room, meeting, memory);
        multiply(head, x, nullptr, given->logits, *call, room.places[0].entering, meeting,
                 steps[parts], memory);
        meeting.wait();
        if (ends->logits != 1 || ends->cap > 0) {
            change(*ends, given->logits, rows * size);
            meeting.wait();
        }
        if (given->count) choose(*given, rows, size, maxima, odd, meeting);
    }
    keeping.end();
    return -1;
}
