// Rounds of one row, several in one call: lookups guess a tree, or nobody guesses, the model reads
// it, what equals the model's own tokens is kept, and the lookups learn. Between two passes that
// read all of a model the processor's caches hold nothing of Python, and fetching it for a round
// takes longer than all that it does there.
//
// What a round is, is said in Python (engine/generation.py), which runs all other rounds and writes
// down these ones afterwards. Knows neither models nor lookups: it is given their functions.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

typedef int32_t Token;

// A row of lookups (lookups.cpp), and by which rules it guesses here. All zero if nobody does.
struct Guessing {
    void* row;
    void (*enter)(void*, int64_t, const Token*, int64_t);
    int64_t (*guess)(void*, int64_t, double, const double*, const double*, int32_t*, Token*,
                     double*);
    void (*learn)(void*, int64_t, const Token*, int64_t, const Token*, int64_t);
    int64_t most;                           // guesses of a round; 0: nobody guesses
    double least;                           // likely
    const double *floors, *lowest, *costs;  // of a price; null: no guess costs anything

    // How many of the first of some guesses bring most beyond what they cost.
    int64_t worthy(const double* chances, int64_t count) const {
        if (!costs) return count;
        int64_t best = 0;
        double highest = 0, gained = 0;
        for (int64_t more = 1; more <= count; more++) {
            gained += chances[more - 1];
            if (gained - costs[more] > highest) best = more, highest = gained - costs[more];
        }
        return best;
    }
};

// A pass of the whole model (kernels.cpp) over one row, which reads what it is told from these
// places. There is room for a root and the most guesses in each.
struct Passing {
    int64_t (*run_model)(const int64_t*, const void*, const void*, const int64_t*, int64_t,
                         const void*, const void*, int);
    const void *ends, *halves;
    const int64_t* numbers;  // of the halves
    int64_t count;
    int64_t* call;  // its first number: how many tokens
    const void* given;
    int64_t threads;
    int64_t *slots, *positions, *stops;
    int64_t *first_extra, *extras;  // (most + 2), and room for each node's path
    const int64_t* best;
    int64_t ranks;
};

// Where a row's keys and values lie, and what moves them (moving.cpp).
struct Moving {
    void (*move)(char*, char*, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                 const int64_t*, int64_t);
    char *keys, *values;
    int64_t layers, layer_stride, heads, head_stride, slot;
};

// The row's text from its token `first` on, with room behind it.
struct Text {
    Token* tokens;
    int64_t first, length, known;  // the lookups know its first so many tokens
    int64_t room;                  // tokens that may still come
    int64_t slots;                 // of keys and values; there are angles for as many
    const int64_t* ends;           // tokens that end it
    int64_t end_count;

    Token& at(int64_t place) { return tokens[place - first]; }
    bool ends_at(int64_t token) const {
        for (int64_t i = 0; i < end_count; i++)
            if (ends[i] == token) return true;
        return false;
    }
};

// What became of each round: nodes, and by node its token, its parent and the model's likeliest
// tokens behind it; seconds of guessing and of the pass. `width` nodes have room.
struct Told {
    int64_t width;
    int64_t *nodes, *tokens, *parents, *best;
    double* seconds;
};

static double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// At most so many rounds, none of which begins after so many seconds. Ends behind a token that ends
// the text, and before a round that has no room or a token that is none. Gives how many there were.
extern "C" int64_t rounds(const Guessing* guessing, const Passing* passing, const Moving* moving,
                          Text* text, const Told* told, int64_t most_rounds, double seconds) {
    int64_t most = guessing->most, ranks = passing->ranks;
    std::vector<int32_t> parents(most), tree(2 * (most + 1));
    std::vector<Token> guesses(most), likeliest((most + 1) * ranks);
    std::vector<double> chances(most);
    std::vector<int64_t> depths(most + 1), path;
    double start = now();
    for (int64_t round = 0; round < most_rounds; round++) {
        double begin = now();
        int64_t first = text->length - 1;
        if (round && begin - start > seconds) return round;
        int64_t wanted = std::min(most, text->room - 1);
        if ((most && wanted < 1) || first + wanted + 1 > text->slots) return round;

        int64_t nodes = 1;
        if (most) {
            guessing->enter(guessing->row, text->known, &text->at(text->known),
                            text->length - text->known);
            text->known = text->length;
            int64_t found = guessing->guess(guessing->row, wanted, guessing->least,
                                            guessing->floors, guessing->lowest, parents.data(),
                                            guesses.data(), chances.data());
            nodes += guessing->worthy(chances.data(), found);
        }
        double guessed = now();

        int64_t* tokens = told->tokens + round * told->width;
        int64_t* above = told->parents + round * told->width;
        int64_t extra = 0;
        for (int64_t node = 0; node < nodes; node++) {
            tokens[node] = node ? guesses[node - 1] : text->at(first);
            above[node] = node ? parents[node - 1] : -1;
            depths[node] = node ? depths[above[node]] + 1 : 0;
            passing->slots[node] = first + node;
            passing->positions[node] = first + depths[node];
            passing->stops[node] = first;
            passing->first_extra[node] = extra;
            extra += depths[node] + 1;
            for (int64_t at = extra, each = node; each >= 0; each = above[each])
                passing->extras[--at] = first + each;
        }
        passing->first_extra[nodes] = extra;
        *passing->call = nodes;
        if (passing->run_model(tokens, passing->ends, passing->halves, passing->numbers,
                               passing->count, passing->call, passing->given,
                               passing->threads) >= 0)
            return round;
        double passed = now();

        const int64_t* best = passing->best;
        path.assign(1, 0);
        for (int64_t node = 1; node < nodes; node++)
            if (above[node] == path.back() && tokens[node] == best[path.back() * ranks])
                path.push_back(node);
        int64_t kept = path.size();
        if (path.back() >= kept) {
            std::vector<int64_t> from;
            for (int64_t node : path) from.push_back(first + node);
            moving->move(moving->keys, moving->values, moving->layers, moving->layer_stride,
                         moving->heads, moving->head_stride, moving->slot, first, from.data(),
                         kept);
        }
        for (int64_t node = 0; node < nodes; node++)
            tree[node] = tokens[node], tree[nodes + node] = above[node];
        for (int64_t i = 0; i < nodes * ranks; i++) {
            likeliest[i] = best[i];
            told->best[round * told->width * ranks + i] = best[i];
        }
        if (most)
            guessing->learn(guessing->row, first ? text->at(first - 1) : -1, tree.data(), nodes,
                            likeliest.data(), ranks);
        bool ended = false;
        for (int64_t node : path) {
            Token token = best[node * ranks];
            text->at(text->length++) = token;
            ended = ended || text->ends_at(token);
        }
        text->room -= kept;
        told->nodes[round] = nodes;
        told->seconds[2 * round] = guessed - begin;
        told->seconds[2 * round + 1] = passed - guessed;
        if (ended || text->room <= 0) return round + 1;
    }
    return most_rounds;
}
