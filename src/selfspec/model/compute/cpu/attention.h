// The attention of a call. It first lists the keys that a query sees and then works on that list, so
// masked, padded and rejected entries cannot leave a trace.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "experts.h"
#include "heads.h"
#include "scores.h"
#include "threads.h"
#include "vectors.h"

constexpr int BLOCK = 4 * LANES;  // keys or values that stay near while a batch uses them
constexpr int FEW_ITEMS = 4;      // of a thread, from which on an odd one matters little
constexpr int MOST_TOKENS = 8;    // tokens of one row that are attended together
constexpr int LONG_RUN = 512;     // keys of a head from which on threads share what is left over
// from so many on, panels of keys pay: with few lanes folding their sums costs little
constexpr int MANY_QUERIES = LANES == 16 ? TILE : 9;

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
