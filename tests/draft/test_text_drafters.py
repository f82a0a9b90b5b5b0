"""The drafters that guess from text alone: ngram, recycle, jacobi, and hybrid, which combines any
two."""

from __future__ import annotations

import pytest
import torch
from selfspec.draft.guess_tree import GuessTree, draft_of

from selfspec import OptionError, SamplingParams
from selfspec.control.fixed import FixedLength
from selfspec.core.contract import Budget, Draft, ExitState, Outcome, Request
from selfspec.core.sampling import row_samplers
from selfspec.draft.base import Drafter, DraftSession, Target
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_text import recycle
from selfspec.draft.from_text.jacobi import Jacobi
from selfspec.draft.from_text.ngram import NGram
from selfspec.draft.from_text.recycle import TokenRecycling
from selfspec.draft.hybrid import Hybrid
from selfspec.engine.generation import Generation
from selfspec.testing import tiny_llm

PROMPTS = [
    list(b"once upon a time, once upon a hill"),
    list(b"the"),
    list(b"a longer prompt, to be read with the other two prompts"),
]
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, seed=3)
PENALISED = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1)
DRAFTERS = {
    "ngram": NGram(),
    "ngram chain": NGram(branches=1),
    "recycle": TokenRecycling(),
    "recycle single": TokenRecycling(pairs=False, successors=2),
    "recycle kept": TokenRecycling(keep_table=True),
    "jacobi": Jacobi(),
    "jacobi last": Jacobi(fill="last"),
    "hybrid": Hybrid(),
    "hybrid in turn": Hybrid(merge=False),
    "hybrid exit": Hybrid(then="early-exit", then_options={"layer": 2}),
    "hybrid exit merged": Hybrid(then="early-exit", merge=True),
}


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(seed=4)


@pytest.fixture
def target(llm):
    """Two rows; nothing of the model is used by what guesses from text."""
    return make_scene(llm, [[5, 6, 7], [8]])


def make_scene(llm, prompts):
    return Target(
        llm.model, llm.model.new_cache(len(prompts), 64), prompts, row_samplers(None, prompts, ())
    )


def guess(drafter, target, text, most=4):
    return drafter.start(target).propose([0], [text], Budget([most]))


def outcome(target, draft, texts, kept, best, accepted=None, choices=None):
    """`best[i]`: the likeliest tokens after token i of what was verified, in order; all other
    logits are lower."""
    logits = torch.zeros(len(best), target.model.shape.vocabulary)
    for row, tokens in zip(logits, best, strict=True):
        row[torch.tensor(tokens)] = torch.arange(len(tokens), 0, -1.0)
    return Outcome(
        draft,
        accepted or [[] for _ in kept],
        kept,
        choices or [],
        logits,
        logits,
        list(range(len(kept))),
        texts,
    )


# -------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    "sampling", [None, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_do_not_change_what_is_written(llm, name, sampling):
    """A tree, a resume state or a row mixed up so that the wrong thing is verified; three ragged
    rows that end at different times.
    """
    options = {"max_new_tokens": 60, "eos": [], "sampling": sampling}
    expected = [result.tokens for result in llm.generate(PROMPTS, **options)]
    eos = [expected[1][20]]
    for tokens in (1, 3, 12):
        results = llm.generate(
            PROMPTS, **options, draft=DRAFTERS[name], control_options={"tokens": tokens}
        )
        assert [result.tokens for result in results] == expected
        assert results[0].stats.drafted > 0, "nothing was drafted, so nothing was tested"
    ended = llm.generate(
        PROMPTS, **{**options, "eos": eos}, draft=DRAFTERS[name], control_options={"tokens": 5}
    )
    for result, full in zip(ended, expected, strict=True):
        stop = full.index(eos[0]) + 1 if eos[0] in full else len(full)
        assert result.tokens == full[:stop]


@pytest.mark.parametrize("name", DRAFTERS)
def test_budgets_and_vocabulary_are_kept(llm, name):
    """A row without budget that drafts, a tree larger than its budget, a token that the model does
    not have, equal siblings."""
    seen = []

    class Spy(Drafter):
        name = "spy"

        def start(self, target):
            drafting = DRAFTERS[name].start(target)
            propose = drafting.propose

            def watched(rows, texts, budget):
                budget = Budget(
                    [
                        0 if row == turn % 3 else most
                        for row, most in zip(rows, budget.tokens, strict=True)
                    ],
                    0.99,
                )
                draft = propose(rows, texts, budget)
                seen.append((draft, budget))
                return draft

            drafting.propose = watched
            return drafting

    for turn in range(3):  # noqa: B007  (the spy reads it)
        llm.generate(PROMPTS, max_new_tokens=25, eos=[], draft=Spy(), control_options={"tokens": 6})
    assert seen
    for draft, budget in seen:
        assert all(
            len(tokens) <= most for tokens, most in zip(draft.tokens, budget.tokens, strict=True)
        )
        assert all(
            0 <= token < llm.model.shape.vocabulary for tokens in draft.tokens for token in tokens
        )
        for tokens, parents in zip(
            draft.tokens, draft.parents or [], strict=draft.parents is not None
        ):
            assert all(-1 <= parent < index for index, parent in enumerate(parents))
            assert len(set(zip(parents, tokens, strict=True))) == len(tokens), (
                "two equal guesses after the same text"
            )


@pytest.mark.parametrize("name", ["ngram", "recycle", "hybrid", "hybrid exit"])
def test_cache_is_that_of_a_fresh_prefill(llm, name):
    """Entries of rejected branches kept, or layers not run for a row whose drafter left no
    states."""
    samplers = row_samplers(None, PROMPTS, ())
    requests = [
        Request(prompt, sampler, limit)
        for prompt, sampler, limit in zip(PROMPTS, samplers, (30, 45, 38), strict=True)
    ]
    generation = Generation(llm.model, requests, DRAFTERS[name], FixedLength(5))
    for _ in generation:
        for row in generation.rows:
            known = row.tokens[:-1]
            assert generation.cache.length(row.index) == len(known)
    assert generation.stats.accepted > 0, "every draft was wrong, so no path was kept"
    for row in generation.rows:
        fresh = llm.model.new_cache(1, len(row.tokens))
        llm.model.prefill([row.tokens[:-1]], fresh)
        held = slice(0, len(row.tokens) - 1)
        for ours, theirs in (
            (generation.cache.keys, fresh.keys),
            (generation.cache.values, fresh.values),
        ):
            assert torch.equal(ours[:, row.index, :, held], theirs[:, 0, :, held])


def test_trees_stay_inside_the_context():
    """Slots beyond the context: a tree has more nodes than its depth, all of which need room."""
    llm = tiny_llm(seed=4, max_position_embeddings=64)
    expected = llm.generate(PROMPTS[0], max_new_tokens=100, eos=[])
    for drafter in (NGram(), TokenRecycling(), Hybrid(), Jacobi()):
        result = llm.generate(
            PROMPTS[0], max_new_tokens=100, eos=[], draft=drafter, control_options={"tokens": 12}
        )
        assert result.tokens == expected.tokens and result.finish_reason == "context"


def test_outcomes_name_their_rows_and_texts(llm):
    """Drafters that learn by row would learn the wrong row's successors once another row has
    ended."""
    asked, told = [], []

    class Spy(Drafter, DraftSession):
        name = "spy"

        def start(self, target):
            return self

        def propose(self, rows, texts, budget):
            asked.append({row: list(text) for row, text in zip(rows, texts, strict=True)})
            return Draft([[1] * most for most in budget.tokens])

        def observe(self, outcome):
            pairs = zip(outcome.rows, outcome.texts, outcome.kept, strict=True)
            told.append({row: list(text[: len(text) - len(kept)]) for row, text, kept in pairs})

    expected = [result.tokens for result in llm.generate(PROMPTS, max_new_tokens=40, eos=[])]
    llm.generate(
        PROMPTS, max_new_tokens=40, eos=[expected[0][8]], draft=Spy(), control_options={"tokens": 2}
    )
    assert asked and asked == told[: len(asked)]
    assert len({frozenset(rows) for rows in told}) > 1, "all rows ended together"


# -------------------------------------------------------------------------------------------- ngram


def test_ngram_prefers_the_longest_match_and_then_the_latest(target):
    """A later but shorter match that wins, the first instead of the latest place, an off-by-one in
    what followed."""
    chain = NGram(branches=1)
    assert guess(chain, target, [1, 2, 3, 4, 9, 3, 5, 6, 1, 2, 3], 2).tokens == [[4, 9]]
    assert guess(chain, target, [3, 4, 9, 3, 5, 6, 7, 3], 2).tokens == [[5, 6]]
    assert guess(NGram(branches=1, shortest=2), target, [3, 4, 9, 3, 5, 6, 7, 3], 2).tokens == [[]]
    assert guess(
        NGram(branches=1, longest=1), target, [1, 2, 3, 4, 9, 3, 5, 6, 1, 2, 3], 2
    ).tokens == [[5, 6]]


def test_ngram_finds_nothing_where_there_is_nothing(target):
    """A text's end that matches itself, which would draft rubbish or fail."""
    for text in ([7], [7, 8], [1, 2, 3, 4]):
        draft = guess(NGram(), target, text, 5)
        assert draft.tokens == [[]] and draft.parents is None


def test_ngram_goes_on_where_a_repetition_reaches_the_end(target):
    """A draft cut short in loops, which is where lookups pay most."""
    assert guess(NGram(branches=1), target, [9, 1, 2, 3, 1, 2, 3], 8).tokens == [
        [1, 2, 3, 1, 2, 3, 1, 2]
    ]
    assert guess(NGram(branches=1), target, [9, 4, 4], 5).tokens == [[4, 4, 4, 4, 4]]


def test_ngram_drafts_different_continuations_as_a_tree(target):
    """Branches with equal first tokens, branches beyond the number that was asked for, the
    likeliest not first."""
    text = [3, 4, 9, 3, 5, 9, 3, 6, 9, 3, 5, 9, 2, 3]
    draft = guess(NGram(branches=3), target, text, 7)
    roots = [
        token
        for token, parent in zip(draft.tokens[0], draft.parents[0], strict=True)
        if parent == -1
    ]
    assert roots == [5, 6, 4] and len(draft.tokens[0]) == 7
    two = guess(NGram(branches=2), target, text, 7)
    assert [
        token for token, parent in zip(two.tokens[0], two.parents[0], strict=True) if parent == -1
    ] == [5, 6]


def test_ngram_stops_where_it_becomes_unlikely(target):
    """`least` ignored, or applied to the token's own chance instead of that of the whole way to
    it."""
    text = [3, 4, 9, 8, 2, 3]
    # 0.27, then 0.27 * 0.52 = 0.14, then 0.09
    assert guess(NGram(least=0.13), target, text, 8).tokens == [[4, 9]]
    assert guess(NGram(least=0.28), target, text, 8).tokens == [[]]


def test_ngram_index_grows_with_the_text(target):
    """Tokens entered twice or not at all between rounds, or a row that sees another row's text."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 4, (120,), generator=generator).tolist()
    other = [token + 10 for token in text]
    grown = NGram().start(target)
    end = 3
    while end < len(text):
        ours = grown.propose([1, 0], [other[:end], text[:end]], Budget([4, 6]))
        theirs = guess(NGram(), target, text[:end], 6)
        assert ours.tokens[1] == theirs.tokens[0] and min(ours.tokens[0], default=10) >= 10
        end += 1 + end % 4


# ------------------------------------------------------------------------------------------ recycle


@pytest.mark.parametrize("size", [5, 259, 49152, 49152 + 77])
def test_likeliest_tokens_are_those_of_topk(size):
    """A block, or the rest after the last whole block, that is never looked at."""
    logits = torch.randn(6, size, generator=torch.Generator().manual_seed(size))
    logits[0, -1], logits[1, 0] = 9.0, 9.0
    assert torch.equal(recycle._likeliest(logits, 7), logits.topk(min(7, size)).indices)


def test_recycle_begins_with_the_prompts_bigrams(target):
    """An empty table in the first round, a bigram read backwards, the older successor before the
    latest one."""
    drafting = TokenRecycling(pairs=False).start(
        make_scene(scene_llm := tiny_llm(), [[5, 6, 5, 7, 8], [5, 9]])
    )
    assert scene_llm.model.shape.vocabulary > 9
    draft = drafting.propose([0, 1], [[5, 6, 5, 7, 8, 5], [5, 9, 5]], Budget([3, 3]))
    assert draft.tokens == [[7, 8, 6], [9]] and draft.parents == [[-1, 0, -1], [-1]]


def test_recycle_learns_from_every_verified_token(target):
    """Logits taken from the wrong row or node; rejected drafts not learnt from; a tree's node
    learnt after the node before it in the list instead of its parent."""
    drafting = TokenRecycling(successors=2).start(target)
    draft = Draft([[10, 11, 12], [20]], parents=[[-1, -1, 1], [-1]])
    texts = [[5, 6, 7, 50], [8, 9, 60]]  # 50 and 60 were kept
    # after 7, 10, 11, 12 (after 11); 9, 20
    best = [
        [50, 51],
        [30, 31],
        [32, 33],
        [34, 35],
        [60, 61],
        [36, 37],
    ]
    drafting.observe(outcome(target, draft, texts, [[50], [60]], best))

    def after(row, *context):
        return drafting.propose([row], [list(context)], Budget([2])).tokens[0]

    assert after(0, 6, 7) == [50, 51] and after(0, 1, 7) == [50, 51], (
        "the kept text's last token, after its own and any other"
    )
    assert (
        after(0, 7, 10) == [30, 31] and after(0, 7, 11) == [32, 33] and after(0, 11, 12) == [34, 35]
    )
    assert after(1, 8, 9) == [60, 61] and after(1, 9, 20) == [36, 37]
    assert after(1, 7, 10) == [] and after(0, 8, 9) == [], "rows have tables of their own"


def test_recycle_trusts_pairs_first_and_follows_the_likeliest_path(target):
    """A pair's successors overwritten by another pair with the same last token; a tree not in the
    order of its chances."""
    drafting = TokenRecycling(successors=2).start(make_scene(tiny_llm(), [[1]]))
    rounds = [([2, 3], [40, 41]), ([9, 3], [42, 43]), ([3, 40], [44, 45])]
    for context, best in rounds:
        drafting.observe(outcome(target, Draft([[]]), [[*context, 99]], [[99]], [best]))
    draft = drafting.propose([0], [[2, 3]], Budget([4]))
    # 0.66, 0.66 * 0.66, 0.10, 0.66 * 0.10
    assert draft.tokens == [[40, 44, 41, 45]] and draft.parents == [[-1, 0, -1, 0]]
    published = TokenRecycling(successors=2, pairs=False).start(make_scene(tiny_llm(), [[1]]))
    for context, best in rounds:
        published.observe(outcome(target, Draft([[]]), [[*context, 99]], [[99]], [best]))
    assert published.propose([0], [[2, 3]], Budget([2])).tokens == [[42, 43]]


def test_recycle_keeps_its_table_only_if_told_to(llm):
    """A benchmark that counts a warm table as a cold one; a table used with another model, whose
    tokens may not exist there."""
    kept = TokenRecycling(keep_table=True)
    assert kept.learns_across_requests and Hybrid(then=kept).learns_across_requests
    assert not TokenRecycling().learns_across_requests and not Hybrid().learns_across_requests
    options = {"max_new_tokens": 40, "eos": [], "control_options": {"tokens": 4}}
    first, again = (llm.generate(PROMPTS[2], **options, draft=kept).stats for _ in range(2))
    assert again.rounds < first.rounds
    assert (
        len(
            {
                llm.generate(PROMPTS[2], **options, draft=TokenRecycling()).stats.rounds
                for _ in range(2)
            }
        )
        == 1
    )
    narrow = tiny_llm(seed=1, vocab_size=130)
    narrow.generate([5, 6, 7], **options, draft=kept)
    assert len(kept._tables) == 2


def test_recycle_table_does_not_grow_for_ever(target, monkeypatch):
    """A kept table that eats the memory of a server; or one that forgets the newest."""
    monkeypatch.setattr(recycle, "PAIRS_KEPT", 10)
    drafting = TokenRecycling().start(make_scene(tiny_llm(), [[1]]))
    for token in range(100):
        drafting.observe(
            outcome(
                target,
                Draft([[]]),
                [[token, token + 1, 9]],
                [[9]],
                [[token + 2, 0, 1, 2, 3, 4, 5][:7]],
            )
        )
    pairs = [context for context in drafting._tables[0]._known if len(context) == 2]
    assert sorted(pairs) == [(token, token + 1) for token in range(90, 100)]


# ------------------------------------------------------------------------------------------- jacobi


def test_jacobi_guesses_what_the_model_said_after_the_wrong_guesses(target):
    """Guesses shifted by one place, or taken from positions that were accepted."""
    drafting = Jacobi(fill="last").start(target)
    assert drafting.propose([0, 1], [[5], [8]], Budget([4, 2])).tokens == [[5, 5, 5, 5], [8, 8]]
    draft = Draft([[5, 5, 5, 5], [8, 8]])
    # row 0: the model says 5, 6 (not 5), 70, 71, 72 after each; its first guess is kept, and 6 is
    # its own token
    told = outcome(
        target,
        draft,
        [[5, 5, 6], [8, 1]],
        [[5, 6], [1]],
        [[0]] * 8,
        [[0], []],
        [[5, 6, 70, 71, 72], [1, 80, 81]],
    )
    drafting.observe(told)
    assert drafting.propose([0, 1], [[5, 5, 6], [8, 1]], Budget([4, 4])).tokens == [
        [70, 71, 72, 6],
        [80, 81, 1, 1],
    ]


def test_jacobi_converges_where_a_text_does_not_depend_on_guesses(llm):
    """The iteration itself: guesses never taken up again would leave acceptance at that of its
    first guesses."""
    drafting_wins = llm.generate(
        PROMPTS, max_new_tokens=60, eos=[], draft=Jacobi(), control_options={"tokens": 8}
    )[0].stats

    class Forgetful(Jacobi):
        def start(self, target):
            drafting = super().start(target)
            drafting.observe = lambda outcome: None
            return drafting

    forgets = llm.generate(
        PROMPTS, max_new_tokens=60, eos=[], draft=Forgetful(), control_options={"tokens": 8}
    )[0].stats
    assert drafting_wins.accepted > forgets.accepted


# ------------------------------------------------------------------------------------------- hybrid


class Fixed(Drafter, DraftSession):
    """Drafts a fixed thing for each row; remembers what it was asked and told."""

    name = "fixed-guess"

    def __init__(self, guesses, **parts):
        self.guesses, self.parts, self.asked, self.told = guesses, parts, [], []

    def start(self, target):
        return self

    def propose(self, rows, texts, budget):
        self.asked.append((list(rows), list(budget.tokens)))
        picked = [self.guesses[row][:most] for row, most in zip(rows, budget.tokens, strict=True)]
        families = self.parts.get("parents")
        families = families and [
            families[row][:most] for row, most in zip(rows, budget.tokens, strict=True)
        ]
        return Draft(picked, **{**self.parts, "parents": families})

    def observe(self, outcome):
        self.told.append(outcome)


def test_hybrid_asks_the_second_only_for_rows_without_a_guess(target):
    """Rows mixed up between the two, a second drafter that runs for nothing, or one that learns
    from half of the rounds."""
    first, then = Fixed([[], [3, 4], []]), Fixed([[5, 6], [7], [8]])
    drafting = Hybrid(first, then).start(target)
    draft = drafting.propose([0, 1, 2], [[1], [1], [1]], Budget([2, 3, 0]))
    assert draft.tokens == [[5, 6], [3, 4], []] and draft.parents is None and draft.probs is None
    assert then.asked == [([0], [2])]
    assert drafting.propose([1], [[1]], Budget([3])).tokens == [[3, 4]] and len(then.asked) == 1
    told = outcome(target, draft, [], [], [])
    drafting.observe(told)
    assert first.told == then.told == [told]


def test_hybrid_merges_both_into_one_tree(target):
    """Equal guesses verified twice, a second tree hung on the wrong node, the budget overrun, the
    second's guesses before the first's.
    """
    first = Fixed([[3, 4], [9]])
    then = Fixed([[3, 5, 6], [7]], parents=[[-1, 0, -1], [-1]])
    drafting = Hybrid(first, then, merge=True).start(target)
    draft = drafting.propose([0, 1], [[1], [1]], Budget([4, 1]))
    assert draft.tokens == [[3, 4, 5, 6], [9]] and draft.parents == [[-1, 0, 0, -1], [-1]]
    assert then.asked == [([0], [4])]


def test_hybrid_hands_on_exit_states_for_chains_only(target):
    """States given to the wrong row, or to a tree, which is verified from the first layer."""
    states = torch.ones(2, 64)
    first = Fixed([[3, 4], []], parents=[[-1, -1], []])
    then = Fixed([[], [5, 6]], resume=ExitState(2, [states]))
    draft = (
        Hybrid(first, then, merge=False).start(target).propose([0, 1], [[1], [1]], Budget([2, 2]))
    )
    assert draft.tokens == [[3], [5, 6]] and draft.parents is None
    assert draft.resume.layer == 2 and [len(state) for state in draft.resume.states] == [0, 2]
    merged = Hybrid(
        Fixed([[3], [4]]), Fixed([[5], [6]], resume=ExitState(2, [states, states])), merge=True
    ).start(target)
    draft = merged.propose([0, 1], [[1], [1]], Budget([2, 2]))
    assert draft.resume is None and draft.parents == [[-1, -1], [-1, -1]]


def test_hybrid_with_early_exit_runs_each_layer_once(llm):
    """Exit-state reuse lost behind a lookup: the first layers would be computed twice for rows that
    the exit drafted."""
    calls = []
    run = {
        "draft": Hybrid(first=Fixed([[]] * 3), then=EarlyExit(2)),
        "control_options": {"tokens": 3},
    }
    alone = {"draft": EarlyExit(2), "control_options": {"tokens": 3}}
    for options in (run, alone):
        calls.append(
            llm.generate(PROMPTS, max_new_tokens=30, eos=[], **options)[0].stats.layer_tokens
        )
    assert calls[0] == calls[1]


def test_hybrid_shows_the_prefill_to_both(target):
    """A drafter that measures during the prefill and is never shown it."""
    seen = []
    parts = [Fixed([[]]), Fixed([[]])]
    for name, part in zip("ab", parts, strict=True):
        part.observer = lambda *half, name=name: seen.append((name, *half))
    Hybrid(*parts).start(target).observer(1, True, "before", "after")
    assert seen == [("a", 1, True, "before", "after"), ("b", 1, True, "before", "after")]
    assert Hybrid(Fixed([[]]), parts[1]).start(target).observer is parts[1].observer
    assert Hybrid(Fixed([[]]), Fixed([[]])).start(target).observer is None


def test_hybrid_makes_its_parts_fit():
    """A lookup that always finds something, so that the second is never asked; a user's own options
    overruled."""
    assert Hybrid()._parts == (NGram(least=0.15), TokenRecycling())
    assert Hybrid(then="early-exit")._parts[0] == NGram(shortest=2)
    assert Hybrid(first_options={"longest": 3})._parts[0] == NGram(longest=3)


# -------------------------------------------------------------------------------------------- trees


def test_trees_merge_prefixes_and_know_their_trunk():
    """Equal guesses counted twice, a full tree that grows, children added under a node that found
    no room."""
    tree = GuessTree(3)
    assert [tree.add(-1, 5), tree.add(0, 6), tree.add(-1, 5), tree.add(-1, 6)] == [0, 1, 0, 2]
    assert tree.full and tree.add(2, 5) is None and tree.add(0, 6) == 1
    assert not tree.is_chain and tree.trunk() == [5, 6]
    tree.merge([5, 8, 9, 6], [-1, 0, 1, 0])
    assert tree.tokens == [5, 6, 6] and tree.parents == [-1, 0, -1]
    chain = GuessTree(2, [1, 2], [-1, 0])
    assert (
        chain.is_chain
        and draft_of([chain]).parents is None
        and draft_of([chain, tree]).parents == [[-1, 0], [-1, 0, -1]]
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NGram(longest=2, shortest=3), "shortest=3 and longest=2"),
        (lambda: NGram(shortest=0), "1 <= shortest"),
        (lambda: NGram(branches=0), "1 for a chain"),
        (lambda: NGram(least=1.0), "below 1"),
        (lambda: TokenRecycling(successors=0), "outside 1 to 7"),
        (lambda: Jacobi(fill="lost"), "last"),
        (lambda: Hybrid(first="ngrams"), "ngram"),
        (lambda: Hybrid(then="none"), "nothing to combine"),
        (lambda: Hybrid(first_options={"longst": 3}), "longest"),
    ],
)
def test_bad_options_are_explained(make, words):
    """An option that is ignored, or fails in the middle of a request."""
    with pytest.raises(OptionError, match=words):
        make()


def test_hybrid_refuses_sampled_drafts(target):
    """Tokens chosen outright verified as if they had been drawn: the output's distribution would be
    wrong."""
    drafting = Hybrid(
        Fixed([[]]), Fixed([[5]], probs=[torch.ones(1, 259) / 259]), merge=False
    ).start(target)
    with pytest.raises(OptionError, match="sample=False"):
        drafting.propose([0], [[1]], Budget([1]))
