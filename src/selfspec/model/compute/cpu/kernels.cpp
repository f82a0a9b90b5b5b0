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
// What this file does not know: models, plans, Python. Built with -ffp-contract=fast, so that a*b+c
// is one rounding everywhere.

#include <algorithm>
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

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "panels.h"

#if defined(__AVX512F__)
constexpr int LANES = 16, WIDE = 2, MAX_ROWS = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, WIDE = 2, MAX_ROWS = 6;  // 12 of 16
#else
constexpr int LANES = 4, WIDE = 2, MAX_ROWS = 6;
#endif
constexpr int PANEL = LANES * WIDE;  // output columns that lie side by side in a packed weight

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

static inline Vector lanes_max(Vector a, Vector b) { return a > b ? a : b; }

// exp(x) by range reduction and a polynomial of degree 6, within 2 units in the last place; 0 below
// -87.
static inline Vector exponential(Vector x) {
    x = lanes_max(x, splat(-87.5f));
    x = x < splat(88.0f) ? x : splat(88.0f);
    Vector shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to the nearest integer
    Vector n = shifted - 12582912.0f;
    Vector r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vector p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    IntVector bits = (__builtin_convertvector(n, IntVector) + 127) << 23;
    Vector scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

// One of `parts` parts of [0, count), in whole units; by itself the part that belongs to this
// thread.
struct Share {
    int64_t begin, end;
    explicit Share(int64_t count, int64_t part = omp_get_thread_num(),
                   int64_t parts = omp_get_num_threads())
        : begin(count * part / parts), end(count * (part + 1) / parts) {}
};

// ---------------------------------------------------------------------------------------- products

// How many steps ahead a weight is asked for, and how many rows share a read of it at most. A panel
// is read once, front to back, and the processor's own prefetcher stops at each page of it: on an
// Intel Xeon 8 rows take 36 ms a pass without asking, 19 with it. Asking beyond the end is
// harmless. None of these changes a bit; tuning.py chooses them by a measurement.
static struct {
    int64_t soon = 16, later = 128;  // for the first cache, for the second
    int64_t rows = MAX_ROWS;
} tuned;

extern "C" void tune(int64_t soon, int64_t later, int64_t rows) {
    tuned = {soon, later, std::clamp<int64_t>(rows, 1, MAX_ROWS)};
}

extern "C" int64_t most_rows() { return MAX_ROWS; }

// One panel times ROWS rows. The weights of a step lie side by side, so the panel is one stream
// from memory, read once for all rows. The rows are read a number at a time: they are short and
// were just written, so they are near.
template <int ROWS>
static inline void tile(const float* x, int64_t inputs, const float* panel, float* sums) {
    Vector total[ROWS][WIDE] = {};
    const float *soon = panel + tuned.soon * PANEL, *later = panel + tuned.later * PANEL;
    for (int64_t k = 0; k < inputs; k++) {
        Vector weight[WIDE];
        for (int c = 0; c < WIDE; c++) {
            __builtin_prefetch(soon + k * PANEL + c * LANES, 0, 3);
            __builtin_prefetch(later + k * PANEL + c * LANES, 0, 2);
        }
        for (int c = 0; c < WIDE; c++) weight[c] = load(panel + k * PANEL + c * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) total[r][c] += x[r * inputs + k] * weight[c];
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < WIDE; c++) store(sums + r * PANEL + c * LANES, total[r][c]);
}

template <int ROWS>
static inline void tile_of(int64_t rows, const float* x, int64_t inputs, const float* panel,
                           float* sums) {
    if (rows == ROWS) return tile<ROWS>(x, inputs, panel, sums);
    if constexpr (ROWS > 1) tile_of<ROWS - 1>(rows, x, inputs, panel, sums);
}

extern "C" int64_t panel_width() { return PANEL; }

// Float32 weights, packed as [ceil(outputs / PANEL)][inputs][PANEL]. Nothing is prepared.
extern "C" void multiply_float32(const Product* weight, const void* rows_of_x, int64_t rows,
                                 const float* residual, float* out, int part, int parts) {
    const float *x = (const float*)rows_of_x, *pack = (const float*)weight->weights;
    int64_t inputs = weight->inputs;
    by_panels<PANEL, MAX_ROWS>(
        weight, rows, tuned.rows, residual, out, part, parts,
        [=](int64_t take, int64_t first, int64_t panel, float* sums) {
            const float* weights = pack + panel * PANEL * inputs;
            tile_of<MAX_ROWS>(take, x + first * inputs, inputs, weights, sums);
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

// This thread's rows as the weight's kind reads them, and where all of them lie. Unless it is x
// itself, the threads have to meet before they read it.
static const void* prepare(const Product& weight, const float* x, int64_t rows,
                           const Bytes& prepared) {
    if (!weight.prepare) return x;
    for (Share mine(rows); mine.begin < mine.end; mine.begin++)
        weight.prepare(&weight, x + mine.begin * weight.inputs,
                       prepared.at(mine.begin * weight.prepared));
    return prepared.at();
}

extern "C" void linear(const float* x, int64_t rows, const Product* weight, const float* residual,
                       float* out, int threads) {
    Bytes prepared(weight->prepare ? rows * weight->prepared : 0);
#pragma omp parallel num_threads(threads)
    {
        const void* read = prepare(*weight, x, rows, prepared);
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

enum Activation { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, RELU2 = 4 };

static inline Vector activate(Vector x, int kind) {
    if (kind == RELU) return lanes_max(x, Vector{});
    if (kind == RELU2) return lanes_max(x, Vector{}) * lanes_max(x, Vector{});
    if (kind == GELU) {
        for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
        return x;
    }
    // tanh(z / 2) = 2 * sigmoid(z) - 1
    Vector z = kind == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-z));
}

// Columns [begin, end) of out = act(gate) * up, or without `up` of out = act(gate).
static inline void activate_some(const float* gate, const float* up, float* out, int64_t begin,
                                 int64_t end, int kind) {
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) {
        Vector value = activate(load(gate + i), kind);
        store(out + i, up ? value * load(up + i) : value);
    }
    for (; i < end; i++) out[i] = activate(splat(gate[i]), kind)[0] * (up ? up[i] : 1.0f);
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
extern "C" void activated(float* x, int64_t rows, int64_t size, int kind, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > 16384)
    for (int64_t r = 0; r < rows; r++)
        activate_some(x + r * size, nullptr, x + r * size, 0, size, kind);
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

// What one attention is, beside its projections.
struct Heads {
    int64_t queries, keys, size;  // query heads, key heads, numbers of a head
    const Norm *query_norm, *key_norm;
    float scale, cap;

    int64_t width() const { return (queries + 2 * keys) * size; }
};

// Where the tokens of a call go.
struct Where {
    const int64_t *rows, *slots, *positions;
};

// Splits a token's projections into heads, norms and rotates them by position, leaves queries in
// place and files keys and values.
static void file_token(float* x, int64_t token, const Heads& heads, const Rope& rope,
                       const Where& where, const Layer& layer) {
    int64_t size = heads.size;
    norm_groups(x, heads.queries * size, heads.query_norm);
    norm_groups(x + heads.queries * size, heads.keys * size, heads.key_norm);
    if (rope.rotary) {
        int64_t at = where.positions[token] * (rope.rotary / 2);
        for (int64_t h = 0; h < heads.queries + heads.keys; h++)
            rotate(x + h * size, rope.cosines + at, rope.sines + at, rope.rotary);
    }
    int64_t at = where.rows[token] * layer.row_stride + where.slots[token] * size;
    for (int64_t h = 0; h < heads.keys; h++) {
        std::memcpy(layer.keys + at + h * layer.head_stride, x + (heads.queries + h) * size,
                    size * 4);
        std::memcpy(layer.values + at + h * layer.head_stride,
                    x + (heads.queries + heads.keys + h) * size, size * 4);
    }
}

extern "C" void rotate_and_store(float* qkv, int64_t tokens, const Heads* heads, const Rope* rope,
                                 const Where* where, const Layer* layer, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads->width() > 65536)
    for (int64_t t = 0; t < tokens; t++)
        file_token(qkv + t * heads->width(), t, *heads, *rope, *where, *layer);
}

// One level of the tree of sum_lanes on LANES vectors at once: the halves of two vectors are added
// into one.
template <int HALF>
static inline void fold(Vector* part) {
    IntVector low, high;
    for (int lane = 0; lane < LANES; lane++) {
        low[lane] = (lane & HALF ? LANES : 0) + (lane & ~HALF);
        high[lane] = low[lane] + HALF;
    }
    for (int j = 0; j < HALF; j++)
        part[j] = __builtin_shuffle(part[j], part[j + HALF], low) +
                  __builtin_shuffle(part[j], part[j + HALF], high);
    if constexpr (HALF > 1) fold<HALF / 2>(part);
}

// The products of one query with LANES keys; lane j holds what sum_lanes would give for key(j). As
// many keys as lanes, so that their sums are folded together and not one by one.
template <class Key>
static inline Vector score_keys(const float* query, Key key, int64_t size) {
    Vector part[LANES];
    Vector q = load(query);
    for (int j = 0; j < LANES; j++) part[j] = q * load(key(j));
    for (int64_t i = LANES; i < size; i += LANES) {
        q = load(query + i);
        for (int j = 0; j < LANES; j++) part[j] += q * load(key(j) + i);
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

constexpr int TILE = 3;  // queries that share what is read of keys and values

// Swaps rows and columns of LANES vectors, in quarters of ever smaller squares.
template <int HALF>
static inline void transpose(Vector* part) {
    IntVector low, high;
    for (int lane = 0; lane < LANES; lane++) {
        low[lane] = lane & HALF ? lane - HALF + LANES : lane;
        high[lane] = lane & HALF ? lane + LANES : lane + HALF;
    }
    for (int j = 0; j < LANES; j++) {
        if (j & HALF) continue;
        Vector upper = part[j], lower = part[j + HALF];
        part[j] = __builtin_shuffle(upper, lower, low);
        part[j + HALF] = __builtin_shuffle(upper, lower, high);
    }
    if constexpr (HALF > 1) transpose<HALF / 2>(part);
}

// The bits of a lane's number, mirrored: in this order the tree of sum_lanes meets the lanes.
static inline int mirrored(int lane) {
    int found = 0;
    for (int bit = 1; bit < LANES; bit *= 2) found += lane & bit ? LANES / 2 / bit : 0;
    return found;
}

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

    // The first `count` keys. What lies behind them in the last panel is never looked at.
    const float* of(const float* keys, int64_t size, int64_t count) {
        if (keys != from) blocks = 0;
        from = keys;
        for (; blocks * LANES < count; blocks++) {
            float* panel = room.floats() + blocks / WIDE * PANEL * size + blocks % WIDE * LANES;
            for (int64_t i = 0; i < size; i += LANES) {
                Vector part[LANES];
                for (int64_t l = 0; l < LANES; l++)
                    part[l] = load(keys + std::min(blocks * LANES + l, count - 1) * size + i);
                transpose<LANES / 2>(part);
                for (int l = 0; l < LANES; l++)
                    store(panel + (mirrored(l) * size + i) / LANES * PANEL, part[l]);
            }
        }
        blocks = count / LANES;
        return room.floats();
    }
};

// Numbers 0, LANES, 2 * LANES ... of ROWS queries times those of the keys of a panel.
template <int ROWS>
static inline void score_lane(const float* const* queries, int64_t lane, const float* panel,
                              int64_t size, Vector (*sums)[WIDE]) {
    for (int64_t i = lane; i < size; i += LANES, panel += PANEL) {
        Vector key[WIDE];
        for (int c = 0; c < WIDE; c++) key[c] = load_once(panel + c * LANES);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) sums[r][c] += queries[r][i] * key[c];
    }
}

// The products of ROWS queries with the keys of a panel, number by number as `score_keys` makes
// them: its lanes' sums come one after another here, in the order in which its tree adds them.
template <int ROWS>
static inline void score_panel(const float* const* queries, const float* panel, int64_t size,
                               float* const* out) {
    Vector waiting[LANES][ROWS][WIDE];  // sums of 2, 4, 8 ... lanes
    int level = 0;
    for (int n = 0; n < LANES; n += 2) {
        Vector sums[ROWS][WIDE] = {}, other[ROWS][WIDE] = {};
        const float* numbers = panel + n * size / LANES * PANEL;
        score_lane<ROWS>(queries, mirrored(n), numbers, size, sums);
        score_lane<ROWS>(queries, mirrored(n + 1), numbers + size / LANES * PANEL, size, other);
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < WIDE; c++) sums[r][c] += other[r][c];
        for (level = 0; n >> level & 2; level++)
            for (int r = 0; r < ROWS; r++)
                for (int c = 0; c < WIDE; c++) sums[r][c] += waiting[level][r][c];
        std::memcpy(waiting[level], sums, sizeof sums);
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < WIDE; c++) store(out[r] + c * LANES, waiting[level][r][c]);
}

template <int ROWS>
static inline void score_some(int64_t rows, const float* const* queries, const float* panel,
                              int64_t size, float* const* out) {
    if (rows == ROWS) return score_panel<ROWS>(queries, panel, size, out);
    if constexpr (ROWS > 1) score_some<ROWS - 1>(rows, queries, panel, size, out);
}

// Scores become weights that sum to 1. `count` is rounded up to LANES by the caller's buffer.
static inline void softmax(float* scores, int64_t count, float scale, float cap) {
    for (int64_t j = count; j % LANES; j++) scores[j] = -INFINITY;
    Vector most = splat(-INFINITY);
    for (int64_t j = 0; j < count; j += LANES) {
        Vector score = load(scores + j) * scale;
        if (cap > 0)
            for (int l = 0; l < LANES; l++) score[l] = cap * std::tanh(score[l] / cap);
        store(scores + j, score);
        most = lanes_max(score, most);
    }
    float largest = -INFINITY;
    for (int l = 0; l < LANES; l++) largest = std::max(largest, most[l]);
    Vector total = {};
    for (int64_t j = 0; j < count; j += LANES) {
        Vector weight = exponential(load(scores + j) - largest);
        if (j + LANES > count)
            for (int l = count - j; l < LANES; l++) weight[l] = 0;
        store(scores + j, weight);
        total += weight;
    }
    float inverse = 1.0f / sum_lanes(total);
    for (int64_t j = 0; j < count; j++) scores[j] *= inverse;
}

constexpr int SPAN = 4;             // vectors of one head that are summed together
constexpr int BLOCK = 4 * LANES;    // keys or values that stay near while a batch uses them
constexpr int MOST_TOKENS = 8;      // tokens of one row that are attended together
constexpr int MANY_QUERIES = 16;    // from so many on, panels of keys pay

// out[r][begin:] += sum over j of weights[r][j] * value(j)[begin:], SPANS vectors at a time, as far
// as they go: they fit into registers, and a value is read once for all queries. The running sums
// rest in `out` between calls, which changes no bit. Gives the first number that is left.
template <int ROWS, int SPANS, class Value>
static inline int64_t weigh_spans(const float* const* weights, Value value, int64_t count,
                                  int64_t begin, int64_t size, float* const* out) {
    int64_t i = begin;
    for (; i + SPANS * LANES <= size; i += SPANS * LANES) {
        Vector total[ROWS][SPANS];
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < SPANS; c++) total[r][c] = load(out[r] + i + c * LANES);
        for (int64_t j = 0; j < count; j++)
            for (int c = 0; c < SPANS; c++) {
                Vector here = load_once(value(j) + i + c * LANES);
                for (int r = 0; r < ROWS; r++) total[r][c] += weights[r][j] * here;
            }
        for (int r = 0; r < ROWS; r++)
            for (int c = 0; c < SPANS; c++) store(out[r] + i + c * LANES, total[r][c]);
    }
    return i;
}

template <int ROWS, class Value>
static inline void weigh_rows(const float* const* weights, Value value, int64_t count,
                              int64_t size, float* const* out) {
    int64_t i = weigh_spans<ROWS, SPAN>(weights, value, count, 0, size, out);
    i = weigh_spans<ROWS, 1>(weights, value, count, i, size, out);
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
                         int64_t size, float* const* out) {
    if (rows == ROWS) return weigh_rows<ROWS>(weights, value, count, size, out);
    if constexpr (ROWS > 1) weigh<ROWS - 1>(rows, weights, value, count, size, out);
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

// What a thread keeps while it attends.
struct Memory {
    Bytes scores;
    std::vector<Tile> tiles;
    KeyPanels panels;
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
    int64_t room;  // scores of one query

    const float* query(int64_t t, int64_t g) const {
        return queries + t * stride + g * layer->size;
    }
    float* of(int64_t t) const { return memory.scores.floats() + t * group * room; }
    int64_t slot(int64_t t, int64_t j) const {  // relative to the first slot seen
        int64_t run = sight->run(first + t), token = first + t;
        if (j < run) return j;
        return sight->extras[sight->first_extra[token] + j - run] - sight->starts[token];
    }
    int64_t count(int64_t t) const { return sight->run(first + t) + sight->listed(first + t); }

    // The queries in tiles, counted token by token. `out`: where the sums of the first token go.
    void cut_tiles(float* out, int64_t out_stride) {
        memory.tiles.clear();
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t g = 0; g < group; g++) {
                if ((t * group + g) % TILE == 0) memory.tiles.emplace_back();
                memory.tiles.back().add(query(t, g), of(t) + g * room,
                                        out + t * out_stride + g * layer->size,
                                        sight->run(first + t));
            }
    }

    void score() {
        int64_t size = layer->size, longest = 0;
        if (size % LANES) return score_slowly();
        for (int64_t t = 0; t < tokens; t++) longest = std::max(longest, sight->run(first + t));
        bool many = tokens * group >= MANY_QUERIES;
        if (many) score_panels(longest);
        for (int64_t j = 0; j + LANES <= longest && !many; j += LANES)
            for (int64_t t = 0; t < tokens; t++) {
                if (j + LANES > sight->run(first + t)) continue;
                auto key = [&](int64_t l) { return keys + (j + l) * size; };
                for (int64_t g = 0; g < group; g++)
                    store(of(t) + g * room + j, score_keys(query(t, g), key, size));
            }
        for (int64_t t = 0; t < tokens; t++) {  // what is left of the run, and the listed ones
            if (many && !sight->listed(first + t)) continue;
            for (int64_t j = sight->run(first + t) / LANES * LANES; j < count(t); j += LANES) {
                const float* rest[LANES];
                for (int64_t l = 0; l < LANES; l++)
                    rest[l] = keys + slot(t, std::min(j + l, count(t) - 1)) * size;
                auto key = [&](int64_t l) { return rest[l]; };
                for (int64_t g = 0; g < group; g++)
                    store(of(t) + g * room + j, score_keys(query(t, g), key, size));
            }
        }
    }

    // Of all queries with the keys of the longest run; what a query does not see is written over,
    // or not looked at.
    void score_panels(int64_t longest) {
        int64_t size = layer->size;
        const float* panels = memory.panels.of(keys, size, longest);
        for (int64_t j = 0; j < longest; j += PANEL)
            for (const Tile& tile : memory.tiles) {
                float* out[TILE];
                for (int64_t r = 0; r < tile.rows; r++) out[r] = tile.scores[r] + j;
                score_some<TILE>(tile.rows, tile.queries, panels + j * size, size, out);
            }
    }

    void score_slowly() {
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t g = 0; g < group; g++)
                for (int64_t j = 0; j < count(t); j++)
                    of(t)[g * room + j] = score_key(query(t, g), keys + slot(t, j) * layer->size,
                                                    layer->size);
    }

    void sum(float* out, int64_t out_stride) {
        int64_t size = layer->size, longest = 0;
        for (int64_t t = 0; t < tokens; t++) {
            longest = std::max(longest, sight->run(first + t));
            std::fill_n(out + t * out_stride, group * size, 0.0f);
        }
        for (int64_t j = 0; j < longest; j += BLOCK)
            for (const Tile& tile : memory.tiles) sum_block(tile, j);
        for (int64_t t = 0; t < tokens; t++) {
            int64_t run = sight->run(first + t);
            auto value = [&](int64_t l) { return values + slot(t, run + l) * size; };
            for (int64_t g = 0; g < group && count(t) > run; g++) {
                const float* weights = of(t) + g * room + run;
                float* target = out + t * out_stride + g * size;
                weigh<1>(1, &weights, value, count(t) - run, size, &target);
            }
        }
    }

    // The values from j on that all queries of a tile see, then those that only some see.
    void sum_block(const Tile& tile, int64_t j) {
        const float* weights[TILE];
        for (int64_t r = 0; r < tile.rows; r++) weights[r] = tile.scores[r] + j;
        auto value = [&](int64_t l) { return values + (j + l) * layer->size; };
        int64_t common = std::clamp<int64_t>(tile.least - j, 0, BLOCK);
        weigh<TILE>(tile.rows, weights, value, common, layer->size, tile.out);
        for (int64_t r = 0; r < tile.rows; r++) {
            int64_t own = std::clamp<int64_t>(tile.runs[r] - j, 0, BLOCK);
            auto later = [&](int64_t l) { return value(common + l); };
            const float* rest = weights[r] + common;
            if (own > common)
                weigh<1>(1, &rest, later, own - common, layer->size, &tile.out[r]);
        }
    }
};

// How the attention of one call is cut into items of work, which threads take as they come.
struct Pieces {
    std::vector<int64_t> begins;  // the first token of each batch, and one past the last token
    int64_t most = 0, work = 0;   // keys that one query sees at most; multiplications, about
    int64_t together;             // tokens of a batch at most
    int64_t cuts;                 // pieces of the query heads that share keys

    Pieces(const Sight& sight, int64_t tokens, const Heads& heads, int64_t threads) {
        // leave work for every thread
        together = std::clamp<int64_t>(tokens * heads.keys / (3 * threads), 1, MOST_TOKENS);
        for (int64_t t = 0; t < tokens; t++) {
            if (t == 0 || t - begins.back() == together || !sight.together(t - 1, t))
                begins.push_back(t);
            most = std::max(most, sight.run(t) + sight.listed(t));
            work += sight.run(t) * heads.queries * heads.size;
        }
        begins.push_back(tokens);
        cuts = batches() * heads.keys < 3 * threads ? heads.queries / heads.keys : 1;
    }
    int64_t batches() const { return begins.size() - 1; }
    // scores of one query
    int64_t room() const { return (most + LANES - 1) / LANES * LANES + LANES; }
};

// Each query's attention over the keys that it sees, as far as this thread comes to it; `next` is
// the first item that nobody has taken.
static void attend_some(const float* qkv, const Heads& heads, const Layer& layer,
                        const Sight& sight, const Pieces& pieces,
                        std::atomic<int64_t>& next, Memory& memory, float* out) {
    int64_t size = heads.size, shared = heads.queries / heads.keys;
    int64_t batches = pieces.batches(), room = pieces.room();
    memory.scores.hold(pieces.together * shared * room * 4);
    memory.panels.clear(pieces.together * shared < MANY_QUERIES ? 0 : pieces.most, size);
    int64_t items = batches * heads.keys * pieces.cuts;
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
        int64_t cut = item % pieces.cuts, batch_index = item / pieces.cuts % batches,
                head = item / pieces.cuts / batches;
        int64_t first = pieces.begins[batch_index], many = pieces.begins[batch_index + 1] - first;
        int64_t query = head * shared + shared * cut / pieces.cuts,
                group = shared * (cut + 1) / pieces.cuts - shared * cut / pieces.cuts;
        int64_t at = sight.rows[first] * layer.row_stride + head * layer.head_stride +
                     sight.starts[first] * size;
        Batch batch{qkv + first * heads.width() + query * size, heads.width(), group,
                    layer.keys + at, layer.values + at,
                    &layer, &sight, first, many, memory, room};
        float* target = out + (first * heads.queries + query) * size;
        batch.cut_tiles(target, heads.queries * size);
        batch.score();
        for (int64_t t = 0; t < many; t++)
            for (int64_t g = 0; g < group; g++)
                softmax(batch.of(t) + g * room, batch.count(t), heads.scale, heads.cap);
        batch.sum(target, heads.queries * size);
    }
}

extern "C" void attend(const float* qkv, int64_t tokens, const Heads* heads, const Layer* layer,
                       const Sight* sight, float* out, int threads) {
    Pieces pieces(*sight, tokens, *heads, threads);
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads) if (pieces.work > 40000)
    {
        Memory memory;
        attend_some(qkv, *heads, *layer, *sight, pieces, next, memory, out);
    }
}

// ------------------------------------------------------------------------------------ whole passes

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

// Half of a layer: norm, product, attention or activation, product, norm, scale, and added to the
// stream.
struct Half {
    int64_t layer, attention;     // which; 1: attention, 0: MLP
    int64_t parallel;             // 1: the MLP reads what entered the layer
    const Norm *before, *after;   // null: none
    Product into, out;
    // of attention, like the next two: which of the call's ropes and sights it uses
    Heads heads;
    int64_t rope, sight;
    int64_t activation, gated;    // of an MLP
    float scale;
};

// A cache: what one layer of it is.
struct Cache {
    float *keys, *values;
    int64_t layer_stride, row_stride, head_stride;

    Layer layer(int64_t index, int64_t size) const {
        return {keys + index * layer_stride, values + index * layer_stride, row_stride,
                head_stride, size};
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
};

// Numbers between the steps of a half; too short-lived to be cleared first.
struct Room {
    std::unique_ptr<float[]> entered, normed, first, second;
    Bytes prepared;

    static int64_t widest_row(const Half* halves, const int64_t* chosen, int64_t count) {
        int64_t bytes = 0;
        for (int64_t i = 0; i < count; i++)
            for (const Product* weight : {&halves[chosen[i]].into, &halves[chosen[i]].out})
                if (weight->prepare) bytes = std::max(bytes, weight->prepared);
        return bytes;
    }

    Room(const Half* halves, const int64_t* chosen, int64_t count, const Call& call)
        : prepared(call.tokens * widest_row(halves, chosen, count)) {
        int64_t into = 0, out = 0;
        for (int64_t i = 0; i < count; i++) {
            into = std::max(into, halves[chosen[i]].into.outputs);
            out = std::max(out, halves[chosen[i]].out.inputs);
        }
        for (auto [part, size] : {std::pair{&entered, call.width}, {&normed, call.width},
                                  {&first, into}, {&second, out}})
            part->reset(new float[call.tokens * size]);
    }
};

static void norm_rows(const float* x, const Norm& norm, const Call& call, float* out) {
    for (Share rows(call.tokens); rows.begin < rows.end; rows.begin++)
        norm_row(x + rows.begin * call.width, norm, 0, out + rows.begin * call.width);
}

// Items that nobody has taken yet, of each step of a half whose work is taken in pieces.
struct Next {
    std::atomic<int64_t> into, attention, out;
};

constexpr int PIECES = 3;  // of a product, for each thread

// A product, piece by piece as this thread comes to it: one whose core is wanted elsewhere takes
// fewer, and the others do not wait for it. Its inputs are complete; its outputs are when the
// threads have met again.
static void multiply(const Product& weight, const float* x, const float* residual, float* out,
                     const Call& call, const Room& room, Meeting& meeting,
                     std::atomic<int64_t>& next) {
    const void* read = prepare(weight, x, call.tokens, room.prepared);
    if (weight.prepare) meeting.wait();
    int pieces = omp_get_num_threads() == 1 ? 1 : omp_get_num_threads() * PIECES;
    for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;)
        weight.multiply(&weight, read, call.tokens, residual, out, piece, pieces);
}

// What stands between the two products of a half; gives where its result lies.
static float* between(const Half& half, const Call& call, Room& room, Meeting& meeting,
                      std::atomic<int64_t>& next, Memory& memory) {
    float *first = room.first.get(), *second = room.second.get();
    if (half.attention) {
        Layer layer = call.cache.layer(half.layer, half.heads.size);
        for (Share mine(call.tokens); mine.begin < mine.end; mine.begin++)
            file_token(first + mine.begin * half.heads.width(), mine.begin, half.heads,
                       call.ropes[half.rope], call.where, layer);
        Pieces pieces(call.sights[half.sight], call.tokens, half.heads, omp_get_num_threads());
        meeting.wait();
        attend_some(first, half.heads, layer, call.sights[half.sight], pieces, next, memory,
                    second);
        return second;
    }
    int64_t size = half.out.inputs;
    Share vectors((size + LANES - 1) / LANES);
    int64_t begin = vectors.begin * LANES, end = std::min(vectors.end * LANES, size);
    for (int64_t t = 0; t < call.tokens; t++) {
        float* gate = first + t * half.into.outputs;
        activate_some(gate, half.gated ? gate + size : nullptr, second + t * size, begin, end,
                      half.activation);
    }
    return second;
}

static void run_half(const Half& half, const Call& call, float* x, Room& room, Meeting& meeting,
                     Next& next, Memory& memory) {
    const float* read = half.parallel && !half.attention ? room.entered.get() : x;
    if (half.before) {
        norm_rows(read, *half.before, call, room.normed.get());
        if (!half.into.prepare) meeting.wait();  // else each thread prepares the rows it normed
        read = room.normed.get();
    }
    multiply(half.into, read, nullptr, room.first.get(), call, room, meeting, next.into);
    meeting.wait();
    const float* result = between(half, call, room, meeting, next.attention, memory);
    meeting.wait();
    bool plain = !half.after && half.scale == 1;
    float* added = plain ? x : room.normed.get();
    multiply(half.out, result, plain ? x : nullptr, added, call, room, meeting, next.out);
    meeting.wait();
    if (plain) return;
    if (half.after) norm_rows(added, *half.after, call, added);
    for (Share rows(call.tokens); rows.begin < rows.end; rows.begin++)
        for (int64_t i = rows.begin * call.width; i < (rows.begin + 1) * call.width; i++)
            x[i] += added[i] * half.scale;
    meeting.wait();
}

// Carries the stream x, (tokens, width), through the chosen halves.
extern "C" void run_halves(float* x, const Half* halves, const int64_t* chosen, int64_t count,
                           const Call* call, int threads) {
    Room room(halves, chosen, count, *call);
    Meeting meeting;
    std::vector<Next> next(count);
#pragma omp parallel num_threads(threads)
    {
        Memory memory;
        for (int64_t i = 0; i < count; i++) {
            const Half& half = halves[chosen[i]];
            if (half.parallel && (i == 0 || halves[chosen[i - 1]].layer != half.layer)) {
                Share rows(call->tokens);
                const float* from = i == 0 ? call->entered : x;
                std::copy(from + rows.begin * call->width, from + rows.end * call->width,
                          room.entered.get() + rows.begin * call->width);
                meeting.wait();
            }
            run_half(half, *call, x, room, meeting, next[i], memory);
        }
    }
}
