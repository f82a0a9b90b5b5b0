// Two lookups that guess one tree together: what followed the text's end before, and what the model
// found likeliest after its last tokens. Every source says how many times likelier it makes a
// token, what they say is multiplied, and the tree grows from its likeliest guesses.
//
// The same, number by number, is said in Python (draft/voting.py and the drafters `ngram` and
// `recycle`), where all reasons and constants stand. It is here too because a round asks some
// hundred small questions, and between two passes that read all of a model Python finds none of
// what it needs for them near: they took 4% of a round in 8 bits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <list>
#include <unordered_map>
#include <utility>
#include <vector>

#include "halves.h"

typedef int32_t Token;
constexpr int MOST_FACTORS = 8, MOST_SUCCESSORS = 8, MOST_CONTEXT = 8, SIZES = 3;

// Python rounds twice: no compiler may join this with a sum.
__attribute__((noinline)) static double times(double a, double b) { return a * b; }

struct Factors {
    int64_t count;
    double of[MOST_FACTORS];

    double at(int64_t index) const { return of[std::min(index, count - 1)]; }
};

// Contexts of one size that were counted once: sorted keys, and of each `width` tokens with their
// chances, 0 where there are fewer. Both take 16 bits, or where `wide` 32.
struct Counted {
    int64_t count, width, wide;
    const int64_t* keys;
    const void *tokens, *chances;

    Token token(int64_t at) const {
        return wide ? ((const Token*)tokens)[at] : ((const uint16_t*)tokens)[at];
    }
    double chance(int64_t at) const {
        return wide ? ((const float*)chances)[at] : from_half(((const uint16_t*)chances)[at]);
    }
    int64_t find(int64_t key) const {
        const int64_t* found = std::lower_bound(keys, keys + count, key);
        return found < keys + count && *found == key ? found - keys : -1;
    }
};

struct Rules {
    int64_t shortest, longest, branches, look_back;  // of matches
    Factors matched, followed;
    int64_t successors, paired, kept;  // of what the model said
    Factors pair, single;
    int64_t vocabulary;  // of what was counted
    Counted counted[SIZES];
    double factors[2], powers[2], surest;  // after one token, after several
    double start, doubt, teaches, least;  // of votes
    int64_t reach;
};

// Last tokens of a text, or of one that goes on with guesses.
struct Context {
    int64_t count = 0;
    Token of[MOST_CONTEXT];

    Token last() const { return of[count - 1]; }
    const Token* end() const { return of + count; }
    Context with(Token token, int64_t reach) const {
        Context next;
        next.count = std::min(count, reach - 1);
        std::copy(end() - next.count, end(), next.of);
        next.of[next.count++] = token;
        return next;
    }
};

// What all say together, in the order in which tokens were named.
struct Odds {
    double start;
    std::vector<std::pair<Token, double>> of;

    void vote(Token token, double factor) {
        for (auto& each : of)
            if (each.first == token) {
                each.second *= factor;
                return;
            }
        of.emplace_back(token, start * factor);
    }
};

// Where each n-gram of a text was followed: the latest place by the bucket that the n-gram falls
// into, and of each place the one before. What shares a bucket by chance is told apart by the text.
class Matches {
    const Rules& rules;
    std::vector<Token> text;
    struct Size {
        std::vector<int32_t> latest, earlier;
    };
    std::vector<Size> sizes;
    size_t buckets = 256;

    size_t bucket(const Token* end, int64_t size) const {
        uint64_t mixed = size;
        for (int64_t i = size; i > 0; i--)
            mixed = (mixed ^ (uint32_t)end[-i]) * 0x9e3779b97f4a7c15u;
        return mixed >> 32 & (buckets - 1);
    }
    Size& of(int64_t size) { return sizes[size - rules.shortest]; }

    void clear() {
        sizes.assign(rules.longest - rules.shortest + 1, {});
        for (Size& size : sizes) size.latest.assign(buckets, -1);
    }
    void push(int64_t place) {
        for (int64_t size = rules.shortest; size <= std::min(rules.longest, place); size++) {
            int32_t& latest = of(size).latest[bucket(&text[place], size)];
            of(size).earlier.push_back(latest);
            latest = place;
        }
    }
    void pop(int64_t place) {
        for (int64_t size = rules.shortest; size <= std::min(rules.longest, place); size++) {
            of(size).latest[bucket(&text[place], size)] = of(size).earlier.back();
            of(size).earlier.pop_back();
        }
    }
    // How many tokens before a place are also the context's last, as far as factors go.
    int64_t matched(int64_t place, int64_t size, const Context& context) const {
        int64_t most = std::min({rules.matched.count, place, context.count});
        while (size < most && text[place - size - 1] == context.end()[-size - 1]) size++;
        return size;
    }

   public:
    explicit Matches(const Rules& rules) : rules(rules) { clear(); }

    // The text is what it was up to `from`, and then these.
    void enter(int64_t from, const Token* tokens, int64_t count) {
        int64_t same = from, length = text.size();
        while (same < std::min(length, from + count) && text[same] == tokens[same - from]) same++;
        while (length > same) pop(--length);
        text.resize(same);
        text.insert(text.end(), tokens + same - from, tokens + count);
        if (text.size() > buckets) {
            while (text.size() > buckets) buckets *= 4;
            clear(), same = 0;
        }
        for (; same < (int64_t)text.size(); same++) push(same);
    }

    Context context() const {
        Context found;
        found.count = std::min<int64_t>(rules.reach, text.size());
        std::copy(text.end() - found.count, text.end(), found.of);
        return found;
    }

    void vote(const Context& context, Odds& odds) {
        struct Found {
            Token token;
            int64_t matched, times;
        };
        std::vector<Found> all;
        int64_t size = std::min(rules.longest, context.count);
        for (; size >= rules.shortest; size--) {
            const Token* gram = context.end() - size;
            int32_t place = of(size).latest[bucket(context.end(), size)];
            for (int64_t looked = 0; place >= 0 && looked < rules.look_back;
                 place = of(size).earlier[place - size]) {
                if (!std::equal(gram, context.end(), &text[place - size])) continue;
                looked++;
                auto known = std::find_if(all.begin(), all.end(), [&](const Found& each) {
                    return each.token == text[place];
                });
                if (known != all.end())
                    known->times += size == 1;
                else if ((int64_t)all.size() < rules.branches)
                    all.push_back({text[place],
                                   size == rules.longest ? matched(place, size, context) : size,
                                   size == 1});
            }
        }
        for (const Found& each : all) {
            double factor = rules.matched.at(each.matched - 1) * rules.followed.at(each.times);
            odds.vote(each.token, factor);
        }
    }
};

// The model's likeliest tokens after a token and after a pair of them, as it said them last.
class Said {
    const Rules& rules;
    struct Next {
        int64_t count = 0;
        Token of[MOST_SUCCESSORS];

        bool has(Token token) const { return std::find(of, of + count, token) < of + count; }
    };
    typedef std::list<std::pair<int64_t, Next>> ByAge;
    std::unordered_map<Token, Next> singles;
    ByAge by_age;  // pairs, `kept` at most
    std::unordered_map<int64_t, ByAge::iterator> pairs;

    static int64_t pair(Token first, Token second) {
        return (int64_t)first << 32 | (uint32_t)second;
    }

    void put(int64_t key, const Next& next) {
        auto found = pairs.find(key);
        if (found != pairs.end()) by_age.erase(found->second);
        by_age.emplace_back(key, next);
        pairs[key] = std::prev(by_age.end());
        if ((int64_t)pairs.size() > rules.kept) {
            pairs.erase(by_age.front().first);
            by_age.pop_front();
        }
    }
    void vote(const Next& next, const Factors& factors, Odds& odds) const {
        for (int64_t i = 0; i < std::min(next.count, factors.count); i++)
            odds.vote(next.of[i], factors.of[i]);
    }
    // What was counted after so many last tokens; gives whether there was any.
    bool vote_counted(const Context& context, int64_t size, Odds& odds) const {
        const Counted& counted = rules.counted[size - 1];
        int64_t key = 0;
        for (int64_t i = size; i > 0; i--) key = key * rules.vocabulary + context.end()[-i];
        int64_t at = counted.find(key);
        bool any = false;
        int64_t first = at * counted.width;
        for (int64_t i = first; at >= 0 && i < first + counted.width; i++) {
            double chance = counted.chance(i);
            if (!(chance > 0)) continue;
            double odd = chance / (1 - std::min(chance, rules.surest));
            double factor = rules.factors[size > 1] * std::pow(odd, rules.powers[size > 1]);
            odds.vote(counted.token(i), factor);
            any = true;
        }
        return any;
    }

   public:
    explicit Said(const Rules& rules) : rules(rules) {}

    // A prompt: what followed what, the latest first.
    void read(const Token* text, int64_t count) {
        for (int64_t size = 1; size <= 1 + rules.paired; size++) {
            std::vector<std::pair<int64_t, Next>> all;  // by their last places, from the end
            std::unordered_map<int64_t, size_t> where;
            for (int64_t at = count - 1; at >= size; at--) {
                int64_t key = size == 1 ? text[at - 1] : pair(text[at - 2], text[at - 1]);
                auto [found, added] = where.try_emplace(key, all.size());
                if (added) all.push_back({key, {}});
                Next& next = all[found->second].second;
                if (next.count < rules.successors && !next.has(text[at]))
                    next.of[next.count++] = text[at];
            }
            for (auto each = all.rbegin(); each != all.rend(); each++)
                if (size == 1)
                    singles[each->first] = each->second;
                else
                    put(each->first, each->second);
        }
    }

    // What the model said after a context of one or two tokens, the likeliest of `count` first.
    void learn(int64_t before, Token last, const Token* likeliest, int64_t count) {
        Next next;
        next.count = std::min(count, rules.successors);
        std::copy_n(likeliest, next.count, next.of);
        singles[last] = next;
        if (rules.paired && before >= 0) put(pair(before, last), next);
    }

    void vote(const Context& context, Odds& odds) const {
        if (rules.paired && context.count > 1) {
            auto found = pairs.find(pair(context.end()[-2], context.last()));
            if (found != pairs.end()) vote(found->second->second, rules.pair, odds);
        }
        auto found = singles.find(context.last());
        if (found != singles.end()) vote(found->second, rules.single, odds);
        int64_t size = rules.paired ? std::min<int64_t>(SIZES, context.count) : 1;
        while (size > 1 && !vote_counted(context, size, odds)) size--;  // the longest alone
        vote_counted(context, 1, odds);
    }

    // Whether the model has said what follows a pair; true if it is not asked.
    bool heard(Token first, Token second) const {
        return !rules.paired || pairs.count(pair(first, second));
    }
};

// One row: its text, and what the model said of it.
struct Row {
    Rules rules;
    Matches matches{rules};
    Said said{rules};
    explicit Row(const Rules& rules) : rules(rules) {}
    Row(const Row&) = delete;

    // `tell(token, chance)` for each token that may well follow a context.
    template <class Tell>
    void following(const Context& context, Tell tell) {
        Odds odds{rules.start, {}};
        matches.vote(context, odds);
        said.vote(context, odds);
        double most = 0;
        for (auto& each : odds.of) most = std::max(most, each.second);
        double every = 1 + times(rules.doubt, most);
        for (auto& each : odds.of) every += each.second;
        for (auto& [token, odd] : odds.of) {
            if (odd < rules.least * every) continue;
            double chance = odd / every;
            if (!said.heard(context.last(), token))
                chance *= 1 + times(rules.teaches, 1 - chance);
            tell(token, chance);
        }
    }
};

extern "C" void* begin(const Rules* rules) { return new Row(*rules); }
extern "C" void end(void* row) { delete (Row*)row; }

// The text is what it was up to `from`, and then these.
extern "C" void enter(void* row, int64_t from, const Token* tokens, int64_t count) {
    ((Row*)row)->matches.enter(from, tokens, count);
}

extern "C" void read(void* row, const Token* prompt, int64_t count) {
    ((Row*)row)->said.read(prompt, count);
}

// A tree that was verified, tokens and then parents, of which the model found `each` tokens
// likeliest behind every node. `before`: the token before the root, -1 if there is none.
extern "C" void learn(void* row, int64_t before, const Token* tokens, int64_t nodes,
                      const Token* likeliest, int64_t each) {
    const Token* parents = tokens + nodes;
    for (int64_t node = 0; node < nodes; node++)
        ((Row*)row)->said.learn(node ? tokens[parents[node]] : before, tokens[node],
                                likeliest + node * each, each);
}

// At most so many guesses at what follows the text, those whose path is likeliest first, and none
// whose path is less likely than `least`. By the number of guesses, `floors`: the chance that the
// next one has to have, and `lowest`: what none behind it can do without; null: none has to. Gives
// how many there are; their parents are nodes, 0 the text's last token.
extern "C" int64_t guess(void* any_row, int64_t most, double least, const double* floors,
                         const double* lowest, int32_t* parents, Token* tokens, double* chances) {
    Row& row = *(Row*)any_row;
    struct Waiting {
        double loss;
        int64_t parent;
        Token token;
        Context context;
    };
    std::vector<Waiting> found;  // the likeliest first, as many as there is room for
    Context context = row.matches.context();
    double chance = 1;
    for (int64_t node = 0, room = most; room > 0;) {
        bool beaten = (int64_t)found.size() >= room && -chance >= found[room - 1].loss;
        if (!beaten && !(lowest && chance <= lowest[node]))
            row.following(context, [&](Token token, double share) {
                double loss = -chance * share;
                bool full = (int64_t)found.size() >= room;
                if (-loss < least || (full && loss >= found.back().loss)) return;
                auto behind = std::upper_bound(
                    found.begin(), found.end(), loss,
                    [](double loss, const Waiting& each) { return loss < each.loss; });
                found.insert(behind, {loss, node, token, context.with(token, row.rules.reach)});
                if ((int64_t)found.size() > room) found.resize(room);
            });
        if (found.empty()) return node;
        Waiting next = found.front();
        found.erase(found.begin());
        if (floors && -next.loss <= floors[node]) return node;
        tokens[node] = next.token, parents[node] = next.parent, chances[node] = -next.loss;
        chance = -next.loss, context = next.context;
        node++, room--;
    }
    return most;
}
