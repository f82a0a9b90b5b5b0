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
// Here are the passes: one half of a layer after the other, and what stands at both ends of a model.
// What they compute with is in the headers, from vectors.h and threads.h to float32.h (products),
// attention.h and mixing.h (experts); a function that Python calls stands beside what it is for.
//
// What none of them knows: models, plans, Python. Built so that a*b+c is one rounding everywhere
// (ONE_ROUNDING in native.py).

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include <omp.h>

#include "attention.h"
#include "choosing.h"
#include "experts.h"
#include "float32.h"
#include "heads.h"
#include "mixing.h"
#include "norms.h"
#include "recurrent.h"
#include "selective.h"
#include "threads.h"
#include "vectors.h"

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
