// A mixture of experts: which experts each token has, and which rows belong to one expert. A
// token's choice and its weights depend on its own scores alone. Knows no threads.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "product.h"

namespace experts {

struct Mixture {
    int64_t count, chosen;       // experts to choose from, and how many a token chooses
    int64_t shared, weighed;     // 1: every token has one more; 1: it is weighed by a sigmoid
    const Product *into, *out;   // of each expert, the shared one last
    const Product* narrow;       // makes what experts read, then what is shared; or null
    const float* favour;         // added to each score where experts are chosen, or null
    const float* shares;         // what each expert's weight is multiplied with, or null
    int64_t sigmoid;             // scores are sigmoids, not a softmax
    int64_t of_inputs;           // weights are of what experts read, not of what they give
    int64_t normalised;          // weights are divided by their sum and `least`
    int64_t groups, kept, best;  // only so many groups are open, by the sum of their best scores
    float margin;                // not 0: weights are shares among scores that are so near
    float least, scale;
    int64_t activation, gated;

    int64_t all() const { return count + shared; }
    int64_t each() const { return chosen + shared; }  // experts of a token
    int64_t width() const { return into->inputs; }    // what an expert reads of one
};

// The places of the `most` largest numbers, the largest first, and of equal ones the first.
static inline void largest(const float* numbers, int64_t count, int64_t most, int64_t* found) {
    for (int64_t i = 0, held = 0; i < count; i++) {
        int64_t at = held;
        while (at > 0 && numbers[i] > numbers[found[at - 1]]) at--;
        if (at == most) continue;
        held = std::min(held + 1, most);
        std::copy_backward(found + at, found + held - 1, found + held);
        found[at] = i;
    }
}

// Scores that choose: with what favours experts, and without the groups that are not open.
static inline void favour(const Mixture& mixture, float* scores) {
    for (int64_t e = 0; e < mixture.count && mixture.favour; e++) scores[e] += mixture.favour[e];
    if (mixture.kept == mixture.groups) return;
    int64_t size = mixture.count / mixture.groups;
    std::vector<float> sums(mixture.groups);
    std::vector<int64_t> order(std::max(mixture.groups, mixture.best));
    for (int64_t g = 0; g < mixture.groups; g++) {
        largest(scores + g * size, size, mixture.best, order.data());
        for (int64_t i = 0; i < mixture.best; i++) sums[g] += scores[g * size + order[i]];
    }
    largest(sums.data(), mixture.groups, mixture.kept, order.data());
    std::vector<bool> open(mixture.groups);
    for (int64_t i = 0; i < mixture.kept; i++) open[order[i]] = true;
    for (int64_t e = 0; e < mixture.count; e++)
        if (!open[e / size]) scores[e] = -std::numeric_limits<float>::infinity();
}

// The same with a margin, of the router's numbers as they are: each chosen expert's share among
// those that are near and were not chosen before.
static inline void choose_near(const Mixture& mixture, const float* scores, float* left,
                               int64_t* which, float* weights) {
    for (int64_t i = 0; i < mixture.chosen; i++) {
        largest(left, mixture.count, 1, which + i);
        float best = left[which[i]], total = 0;
        for (int64_t e = 0; e < mixture.count; e++) {
            float gap = (best - scores[e]) / std::max(std::fabs(scores[e]), best);
            if (!(gap > mixture.margin)) total += std::exp(left[e] - best);
        }
        weights[i] = mixture.scale / total;
        left[which[i]] = -std::numeric_limits<float>::infinity();
    }
}

// A token's experts, the best first, and their weights: `chosen` of both. `scores`: of all experts;
// `choosing`: room for as many.
static inline void choose(const Mixture& mixture, const float* scores, float* choosing,
                          int64_t* which, float* weights) {
    std::copy_n(scores, mixture.count, choosing);
    if (mixture.margin) return choose_near(mixture, scores, choosing, which, weights);
    favour(mixture, choosing);
    largest(choosing, mixture.count, mixture.chosen, which);
    float total = mixture.least;
    for (int64_t i = 0; i < mixture.chosen; i++) total += scores[which[i]];
    for (int64_t i = 0; i < mixture.chosen; i++) {
        weights[i] = scores[which[i]];
        if (mixture.normalised) weights[i] /= total;
        if (mixture.shares) weights[i] *= mixture.shares[which[i]];
        weights[i] *= mixture.scale;
    }
}

// Each pair of a token and one of its experts has a slot. Those of one expert lie side by side, and
// in them its tokens in their order.
struct Slots {
    std::vector<int64_t> begins;           // of each expert
    std::vector<int64_t> active;           // experts that some token has
    std::vector<int64_t> tokens, experts, pairs;  // of each slot
    std::vector<int64_t> of;                      // slots of each token's experts

    void sort(const Mixture& mixture, const int64_t* which, int64_t count) {
        int64_t each = mixture.each(), total = count * each;
        begins.assign(mixture.all() + 1, 0);
        for (int64_t i = 0; i < total; i++) begins[which[i] + 1]++;
        active.clear();
        for (int64_t e = 0; e < mixture.all(); e++) {
            if (begins[e + 1]) active.push_back(e);
            begins[e + 1] += begins[e];
        }
        std::vector<int64_t> next(begins.begin(), begins.end() - 1);
        for (auto* part : {&tokens, &experts, &pairs, &of}) part->resize(total);
        for (int64_t i = 0; i < total; i++) {
            int64_t slot = of[i] = next[which[i]]++;
            tokens[slot] = i / each;
            experts[slot] = which[i];
            pairs[slot] = i;
        }
    }
    int64_t rows(int64_t expert) const { return begins[expert + 1] - begins[expert]; }
    int64_t total() const { return tokens.size(); }
    // Where a slot lies: rows of a group have its own stride, and groups one that suits all.
    int64_t place(int64_t slot, int64_t stride, int64_t own) const {
        int64_t begin = begins[experts[slot]];
        return begin * stride + (slot - begin) * own;
    }
};

}  // namespace experts
