"""The drafters that guess from text alone: ngram, recycle, jacobi, and hybrid, which combines any
two."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selfspec import OptionError, SamplingParams
from selfspec.control.fixed import FixedLength
from selfspec.core.contract import Budget, Draft, ExitStates, Outcome, RowOutcome
from selfspec.core.sampling import row_samplers
from selfspec.draft.base import Drafter, DraftSession
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_text import recycle
from selfspec.draft.from_text.jacobi import Jacobi
from selfspec.draft.from_text.ngram import NGram
from selfspec.draft.from_text.recycle import TokenRecycling
from selfspec.draft.hybrid import Hybrid
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.testing import tiny_llm
from sessions import NOTHING, begin, grown, guesses, parents, told

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
def model(llm):
    """Nothing of it is used by what guesses from text."""
    return llm.model


def guess(drafter, model, text, most=4):
    (draft,) = begin(drafter, model, [[5, 6, 7]]).propose([0], [text], Budget([most]))
    return draft


def listed(session, rows, texts, most):
    """What a session guesses: the tokens of each row's draft."""
    return guesses(session.propose(rows, texts, Budget(most)))


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
        assert results[0].call.drafted > 0, "nothing was drafted, so nothing was tested"
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
                drafts = propose(rows, texts, budget)
                seen.append((drafts, budget, [text[-1] for text in texts]))
                return drafts

            drafting.propose = watched
            return drafting

    for turn in range(3):  # noqa: B007  (the spy reads it)
        llm.generate(PROMPTS, max_new_tokens=25, eos=[], draft=Spy(), control_options={"tokens": 6})
    assert seen
    for drafts, budget, last in seen:
        for draft, most, root in zip(drafts, budget.tokens, last, strict=True):
            tree = draft.tree
            assert len(draft.guesses) == len(tree) - 1 <= most
            assert all(0 <= token < llm.model.shape.vocabulary for token in draft.guesses)
            assert tree.tokens[0] == root and tree.parents[0] == -1
            assert all(0 <= tree.parents[node] < node for node in range(1, len(tree)))
            assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree), (
                "two equal guesses after the same text"
            )


@pytest.mark.parametrize("name", ["ngram", "recycle", "hybrid", "hybrid exit"])
def test_cache_is_that_of_a_fresh_prefill(llm, name):
    """Entries of rejected branches kept, or layers not run for a row whose drafter left no
    states."""
    samplers = row_samplers(None, PROMPTS, ())
    requests = [
        Request(prompt, sampler, limit, drafter=DRAFTERS[name], controller=FixedLength(5))
        for prompt, sampler, limit in zip(PROMPTS, samplers, (30, 45, 38), strict=True)
    ]
    generation = Generation(llm.model, requests)
    rows = list(generation.rows)  # those that end leave
    for _ in generation:
        for row in rows:
            known = row.tokens[:-1]
            assert generation.cache.length(row.slot) == len(known)
    assert generation.stats.accepted > 0, "every draft was wrong, so no path was kept"
    for row in rows:
        fresh = llm.model.new_cache(1, len(row.tokens))
        llm.model.prefill([row.tokens[:-1]], fresh)
        held = slice(0, len(row.tokens) - 1)
        for ours, theirs in (
            (generation.cache.keys, fresh.keys),
            (generation.cache.values, fresh.values),
        ):
            assert torch.equal(ours[:, row.slot, :, held], theirs[:, 0, :, held])


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
    asked, noted = [], []

    class Spy(Drafter, DraftSession):
        name = "spy"

        def start(self, target):
            return self

        def propose(self, rows, texts, budget):
            asked.append({row: list(text) for row, text in zip(rows, texts, strict=True)})
            pairs = zip(texts, budget.tokens, strict=True)
            return [Draft.chain(text, [1] * most) for text, most in pairs]

        def observe(self, outcome):
            noted.append({of.row: list(of.text[: -len(of.kept)]) for of in outcome.rows})
            for of in outcome.rows:
                assert list(of.text[-len(of.kept) :]) == list(of.kept)

    expected = [result.tokens for result in llm.generate(PROMPTS, max_new_tokens=40, eos=[])]
    llm.generate(
        PROMPTS, max_new_tokens=40, eos=[expected[0][8]], draft=Spy(), control_options={"tokens": 2}
    )
    assert asked and asked == noted[: len(asked)]
    assert len({frozenset(rows) for rows in noted}) > 1, "all rows ended together"


# -------------------------------------------------------------------------------------------- ngram


def test_ngram_prefers_the_longest_match_and_then_the_latest(model):
    """A later but shorter match that wins, the first instead of the latest place, an off-by-one in
    what followed."""
    text, other = [1, 2, 3, 4, 9, 3, 5, 6, 1, 2, 3], [3, 4, 9, 3, 5, 6, 7, 3]
    assert guess(NGram(branches=1), model, text, 2).guesses == [4, 9]
    assert guess(NGram(branches=1), model, other, 2).guesses == [5, 6]
    assert guess(NGram(branches=1, shortest=2), model, other, 2).guesses == []
    assert guess(NGram(branches=1, longest=1), model, text, 2).guesses == [5, 6]


def test_ngram_finds_nothing_where_there_is_nothing(model):
    """A text's end that matches itself, which would draft rubbish or fail."""
    for text in ([7], [7, 8], [1, 2, 3, 4]):
        draft = guess(NGram(), model, text, 5)
        assert draft.guesses == [] and draft.tree.is_chain and draft.tree.tokens == text[-1:]


def test_ngram_goes_on_where_a_repetition_reaches_the_end(model):
    """A draft cut short in loops, which is where lookups pay most."""
    chain = NGram(branches=1)
    assert guess(chain, model, [9, 1, 2, 3, 1, 2, 3], 8).guesses == [1, 2, 3, 1, 2, 3, 1, 2]
    assert guess(chain, model, [9, 4, 4], 5).guesses == [4, 4, 4, 4, 4]


def test_ngram_drafts_different_continuations_as_a_tree(model):
    """Branches with equal first tokens, branches beyond the number that was asked for, the
    likeliest not first."""
    text = [3, 4, 9, 3, 5, 9, 3, 6, 9, 3, 5, 9, 2, 3]

    def firsts(tree):
        return [tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == 0]

    three, two = (guess(NGram(branches=branches), model, text, 7) for branches in (3, 2))
    assert firsts(three.tree) == [5, 6, 4] and len(three.guesses) == 7
    assert firsts(two.tree) == [5, 6]


def test_ngram_stops_where_it_becomes_unlikely(model):
    """`least` ignored, or applied to the token's own chance instead of that of the whole way to
    it."""
    text = [3, 4, 9, 8, 2, 3]
    # 0.27, then 0.27 * 0.52 = 0.14, then 0.09
    assert guess(NGram(least=0.13), model, text, 8).guesses == [4, 9]
    assert guess(NGram(least=0.28), model, text, 8).guesses == []


def test_ngram_index_grows_with_the_text(model):
    """Tokens entered twice or not at all between rounds, or a row that sees another row's text."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 4, (120,), generator=generator).tolist()
    other = [token + 10 for token in text]
    grown = begin(NGram(), model, [[5, 6, 7], [8]])
    end = 3
    while end < len(text):
        theirs, ours = grown.propose([1, 0], [other[:end], text[:end]], Budget([4, 6]))
        assert ours == guess(NGram(), model, text[:end], 6)
        assert min(theirs.guesses, default=10) >= 10
        end += 1 + end % 4


def test_ngram_forgets_a_row_that_was_dropped(model):
    """A row's number goes to another text: guesses from the text that had it before."""
    session = begin(NGram(), model, [[5, 6, 7]])
    assert listed(session, [0], [[1, 2, 3, 1, 2]], [2]) == [[3, 1]]
    session.drop(0)
    session.admit(0, [1, 2], row_samplers(None, [[1]], ())[0])
    assert listed(session, [0], [[8, 9, 4, 1, 2]], [2]) == [[]]


# ------------------------------------------------------------------------------------------ recycle


def test_recycle_begins_with_the_prompts_bigrams(model):
    """An empty table in the first round, a bigram read backwards, the older successor before the
    latest one."""
    session = begin(TokenRecycling(pairs=False), model, [[5, 6, 5, 7, 8], [5, 9]])
    drafts = session.propose([0, 1], [[5, 6, 5, 7, 8, 5], [5, 9, 5]], Budget([3, 3]))
    assert guesses(drafts) == [[7, 8, 6], [9]] and parents(drafts) == [[0, 1, 0], [0]]


texts = st.lists(st.integers(0, 5), max_size=40)


@given(texts, texts, st.integers(1, 7), st.booleans())
def test_recycle_reads_a_prompt_as_if_token_by_token(first, then, successors, pairs):
    """Successors in another order, or more of them than are kept; contexts of another age, so that
    a full table forgets the wrong ones; or what a kept table knew before."""
    options = TokenRecycling(successors=successors, pairs=pairs)
    table, tokens, after_pairs = recycle._Table(options), dict[int, list](), dict[tuple, list]()
    for text in (first, then):
        table.read(text)
        for at in range(1, len(text)):
            known = tokens.get(text[at - 1], [])
            tokens[text[at - 1]] = [text[at], *(t for t in known if t != text[at])][:successors]
        for at in range(2, len(text)) if pairs else ():
            known = after_pairs.pop(pair := (text[at - 2], text[at - 1]), [])
            after_pairs[pair] = [text[at], *(t for t in known if t != text[at])][:successors]
    assert table._tokens == {token: tuple(known) for token, known in tokens.items()}
    expected = [(pair, tuple(known)) for pair, known in after_pairs.items()]
    assert list(table._pairs.items()) == expected


def test_recycle_learns_from_every_verified_token(model):
    """Logits taken from the wrong row or node; rejected drafts not learnt from; a tree's node
    learnt after the node before it in the list instead of its parent."""
    session = begin(TokenRecycling(successors=2), model, [[5, 6, 7], [8]])
    drafts = [grown(7, [10, 11, 12], [0, 0, 2]), grown(9, [20], [0])]
    texts = [[5, 6, 7, 50], [8, 9, 60]]  # 50 and 60 were kept
    # after 7, 10, 11, 12 (after 11); 9, 20
    best = [[50, 51], [30, 31], [32, 33], [34, 35], [60, 61], [36, 37]]
    rows = [
        RowOutcome(row, text, draft, [0], text[-1:], [])
        for row, (text, draft) in enumerate(zip(texts, drafts, strict=True))
    ]
    session.observe(told(rows, best, model.shape.vocabulary))

    def after(row, *context):
        return listed(session, [row], [list(context)], [2])[0]

    assert after(0, 6, 7) == [50, 51] and after(0, 1, 7) == [50, 51], (
        "the kept text's last token, after its own and any other"
    )
    assert (
        after(0, 7, 10) == [30, 31] and after(0, 7, 11) == [32, 33] and after(0, 11, 12) == [34, 35]
    )
    assert after(1, 8, 9) == [60, 61] and after(1, 9, 20) == [36, 37]
    assert after(1, 7, 10) == [] and after(0, 8, 9) == [], "rows have tables of their own"
    assert set(session._tables[0]._pairs) == {(5, 6), (6, 7), (7, 10), (7, 11), (11, 12)}, (
        "each after its parent"
    )


def plain_round(session, model, context, best):
    """A session is told that nothing was drafted after `context`, and what was likeliest there."""
    row = RowOutcome(0, [*context, 9], Draft.chain(context), [0], [9], [])
    session.observe(told([row], [best], model.shape.vocabulary))


def test_recycle_trusts_pairs_first_and_follows_the_likeliest_path(model):
    """A pair's successors overwritten by another pair with the same last token; a tree not in the
    order of its chances."""
    pairs = begin(TokenRecycling(successors=2), model, [[1]])
    published = begin(TokenRecycling(successors=2, pairs=False), model, [[1]])
    for context, best in [([2, 3], [40, 41]), ([9, 3], [42, 43]), ([3, 40], [44, 45])]:
        plain_round(pairs, model, context, best)
        plain_round(published, model, context, best)
    drafts = pairs.propose([0], [[2, 3]], Budget([4]))
    # 0.66, 0.66 * 0.66, 0.10, 0.66 * 0.10
    assert guesses(drafts) == [[40, 44, 41, 45]] and parents(drafts) == [[0, 1, 0, 1]]
    assert listed(published, [0], [[2, 3]], [2]) == [[42, 43]]


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


@pytest.mark.parametrize("rounds", [0, 3, recycle.UNTOLD, recycle.UNTOLD + 3])
def test_recycle_hears_late_what_it_would_have_heard(model, rounds):
    """A row that nobody asked for a while: its prompt read over what the model said since, rounds
    lost or out of order."""
    asked, waiting = (begin(TokenRecycling(), model, [[5, 6, 7, 5]]) for _ in range(2))
    for number in range(rounds):
        listed(asked, [0], [[5, 6]], [4])
        for session in (asked, waiting):
            plain_round(session, model, [5, 6 + number % 2], [number, 1, 2, 3, 4, 8, 9])
    for end in ([5, 6], [5, 7], [6, 7], [7, 5]):
        assert listed(waiting, [0], [end], [6]) == listed(asked, [0], [end], [6]) != [[]]


def test_recycle_table_does_not_grow_for_ever(model, monkeypatch):
    """A kept table that eats the memory of a server; or one that forgets the newest."""
    monkeypatch.setattr(recycle, "PAIRS_KEPT", 10)
    session = begin(TokenRecycling(), model, [[1]])
    for token in range(100):
        plain_round(session, model, [token, token + 1], [token + 2, 0, 1, 2, 3, 4, 5][:7])
    assert sorted(session._tables[0]._pairs) == [(token, token + 1) for token in range(90, 100)]


def test_recycle_begins_a_row_anew_unless_its_table_is_kept(model):
    """A row's number goes to another text: the table of the text that had it before, or none."""
    for kept, expected in ((False, [[]]), (True, [[60, 61]])):
        session = begin(TokenRecycling(successors=2, keep_table=kept), model, [[1]])
        plain_round(session, model, [2, 3], [60, 61])
        session.drop(0)
        session.admit(0, [4, 5, 6], row_samplers(None, [[1]], ())[0])
        assert listed(session, [0], [[4, 5]], [1]) == [[6]], "its prompt was read"
        assert listed(session, [0], [[2, 3]], [2]) == expected


# ------------------------------------------------------------------------------------------- jacobi


def test_jacobi_guesses_what_the_model_said_after_the_wrong_guesses(model):
    """Guesses shifted by one place, or taken from positions that were accepted. Or kept for another
    text that has the row's number next."""
    session = begin(Jacobi(fill="last"), model, [[5], [8]])
    drafts = session.propose([0, 1], [[5], [8]], Budget([4, 2]))
    assert guesses(drafts) == [[5, 5, 5, 5], [8, 8]]
    # row 0: the model says 5, 6 (not 5), 70, 71, 72 after each; its first guess is kept, and 6 is
    # its own token
    rows = [
        RowOutcome(0, [5, 5, 6], drafts[0], [0, 1], [5, 6], [5, 6, 70, 71, 72]),
        RowOutcome(1, [8, 1], drafts[1], [0], [1], [1, 80, 81]),
    ]
    session.observe(told(rows, [[0]] * 8, model.shape.vocabulary))
    assert listed(session, [0, 1], [[5, 5, 6], [8, 1]], [4, 4]) == [[70, 71, 72, 6], [80, 81, 1, 1]]
    session.drop(1)
    session.admit(1, [3], row_samplers(None, [[1]], ())[0])
    assert listed(session, [1], [[3]], [2]) == [[3, 3]]


def test_jacobi_follows_the_first_branch_of_a_tree(model):
    """In a hybrid the round's draft may be a tree: choices of another branch, or of a node that is
    not below the kept text."""
    session = begin(Jacobi(), model, [[5]])
    # 1 and 2 follow the text; 3 and 4 follow 2, which is kept; 5 follows 3
    draft = grown(5, [10, 20, 30, 40, 50], [0, 0, 2, 2, 3])
    row = RowOutcome(0, [5, 20, 7], draft, [0, 2], [20, 7], [20, 61, 7, 63, 64, 65])
    session.observe(told([row], [[0]] * 6, model.shape.vocabulary))
    assert listed(session, [0], [[5, 20, 7]], [2]) == [[63, 65]]


def test_jacobi_converges_where_a_text_does_not_depend_on_guesses(llm):
    """The iteration itself: guesses never taken up again would leave acceptance at that of its
    first guesses."""
    drafting_wins = llm.generate(
        PROMPTS, max_new_tokens=60, eos=[], draft=Jacobi(), control_options={"tokens": 8}
    )[0].call

    class Forgetful(Jacobi):
        def start(self, target):
            drafting = super().start(target)
            drafting.observe = lambda outcome: None
            return drafting

    forgets = llm.generate(
        PROMPTS, max_new_tokens=60, eos=[], draft=Forgetful(), control_options={"tokens": 8}
    )[0].call
    assert drafting_wins.accepted > forgets.accepted


# ------------------------------------------------------------------------------------------- hybrid


class Fixed(Drafter, DraftSession):
    """Drafts a fixed thing for each row; remembers what it was asked and told. `families`: of each
    row the parents of its guesses, if it is no chain."""

    name = "fixed-guess"

    def __init__(self, guesses, families=None, **parts):
        self.guesses, self.families, self.parts = guesses, families or {}, parts
        self.asked, self.told, self.rows = [], [], {}

    def start(self, target):
        return self

    def admit(self, row, prompt, sampler, ends=frozenset()):
        self.rows[row] = list(prompt)

    def drop(self, row):
        del self.rows[row]

    def propose(self, rows, texts, budget):
        self.asked.append((list(rows), list(budget.tokens)))
        return [
            grown(
                text[-1],
                self.guesses[row][:most],
                self.families.get(row, range(len(self.guesses[row])))[:most],
            )
            if not self.parts or not self.guesses[row]
            else replace(Draft.chain(text, self.guesses[row][:most]), **self.parts)
            for row, text, most in zip(rows, texts, budget.tokens, strict=True)
        ]

    def observe(self, outcome):
        self.told.append(outcome)


def exits(layer, states):
    return ExitStates([layer] * len(states), states)


def test_hybrid_asks_the_second_only_for_rows_without_a_guess(model):
    """Rows mixed up between the two, a second drafter that runs for nothing, or one that learns
    from half of the rounds. Or one that is not told of a row."""
    first, then = Fixed([[], [3, 4], []]), Fixed([[5, 6], [7], [8]])
    session = begin(Hybrid(first, then), model, [[1], [1, 1], [1]])
    assert first.rows == then.rows == {0: [1], 1: [1, 1], 2: [1]}
    drafts = session.propose([0, 1, 2], [[1], [1], [1]], Budget([2, 3, 0]))
    assert guesses(drafts) == [[5, 6], [3, 4], []]
    assert all(draft.tree.is_chain and draft.probs is None for draft in drafts)
    assert then.asked == [([0], [2])]
    assert listed(session, [1], [[1]], [3]) == [[3, 4]] and len(then.asked) == 1
    outcome = Outcome([], NOTHING, NOTHING)
    session.observe(outcome)
    assert len(first.told) == len(then.told) == 1
    assert first.told[0] is then.told[0] is outcome
    session.drop(1)
    assert first.rows == then.rows == {0: [1], 2: [1]}


def test_hybrid_merges_both_into_one_tree(model):
    """Equal guesses verified twice, a second tree hung on the wrong node, the budget overrun, the
    second's guesses before the first's.
    """
    first = Fixed([[3, 4], [9]])
    then = Fixed([[3, 5, 6], [7]], {0: [0, 1, 0]})
    session = begin(Hybrid(first, then, merge=True), model, [[1], [1]])
    drafts = session.propose([0, 1], [[1], [1]], Budget([4, 1]))
    assert guesses(drafts) == [[3, 4, 5, 6], [9]]
    assert parents(drafts) == [[0, 1, 1, 0], [0]]
    assert then.asked == [([0], [4])]


def test_hybrid_of_two_lookups_fills_one_tree(model):
    """Room that stays empty, equal guesses twice, and guesses of one of them alone."""
    prompt = [1, 2, 3, 8, 1, 2, 4, 9, 1, 2]
    session = begin(Hybrid(), model, [prompt])
    for most in (1, 2, 4, 6):
        (draft,) = session.propose([0], [prompt], Budget([most]))
        nodes = list(zip(draft.tree.parents, draft.tree.tokens, strict=True))
        assert len(nodes) == most + 1 == len(set(nodes))
    plain_round(session, model, [1, 2], [7, 5, 6])
    (draft,) = session.propose([0], [prompt], Budget([40]))
    assert {3, 4} <= first_of(draft), "the text's"
    assert {5, 6, 7} <= first_of(draft), "and the model's"


def first_of(draft):
    """The tokens that a draft guesses to come next."""
    return {draft.tree.tokens[node] for node, under in enumerate(draft.tree.parents) if under == 0}


def test_hybrid_hands_on_exit_states_with_their_own_rows(model):
    """States given to the wrong row, to another drafter's tree, or to a merged tree, whose nodes
    they would not fit."""
    states = torch.ones(2, 64)
    first = Fixed([[3, 4], []], {0: [0, 0]})
    then = Fixed([[], [5, 6]], exits=exits(2, states))
    session = begin(Hybrid(first, then, merge=False), model, [[1], [1]])
    drafts = session.propose([0, 1], [[1], [1]], Budget([2, 2]))
    assert guesses(drafts) == [[3, 4], [5, 6]] and parents(drafts) == [[0, 0], [0, 1]]
    assert drafts[0].exits is None
    assert drafts[1].exits.layers == [2, 2] and drafts[1].exits.states is states
    merged = begin(
        Hybrid(Fixed([[3], [4]]), Fixed([[5], [6]], exits=exits(2, states)), merge=True),
        model,
        [[1], [1]],
    )
    drafts = merged.propose([0, 1], [[1], [1]], Budget([2, 2]))
    assert guesses(drafts) == [[3, 5], [4, 6]] and parents(drafts) == [[0, 0], [0, 0]]
    assert [draft.exits for draft in drafts] == [None, None]


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
        results = llm.generate(PROMPTS, max_new_tokens=30, eos=[], **options)
        calls.append([result.stats.layer_tokens for result in results])
        assert results[0].call.layer_tokens == sum(calls[-1])
    assert calls[0] == calls[1]


def test_hybrid_shows_the_prefill_to_both(model):
    """A drafter that measures during the prefill and is never shown it."""
    seen = []
    parts = [Fixed([[]]), Fixed([[]])]
    for name, part in zip("ab", parts, strict=True):
        part.observer = lambda *half, name=name: seen.append((name, *half))
    begin(Hybrid(*parts), model, [[1]]).observer(1, True, "before", "after")
    assert seen == [("a", 1, True, "before", "after"), ("b", 1, True, "before", "after")]
    assert begin(Hybrid(Fixed([[]]), parts[1]), model, [[1]]).observer is parts[1].observer
    assert begin(Hybrid(Fixed([[]]), Fixed([[]])), model, [[1]]).observer is None


def test_hybrid_makes_its_parts_fit():
    """A lookup that always finds something, so that the second is never asked; a user's own options
    overruled."""
    assert Hybrid()._parts == (NGram(), TokenRecycling())
    assert Hybrid(then="early-exit", merge=True)._parts[0] == NGram(least=0.15)
    assert Hybrid(then="early-exit")._parts[0] == NGram(shortest=2)
    assert Hybrid(first_options={"longest": 3})._parts[0] == NGram(longest=3)


# ------------------------------------------------------------------------------------------ refused


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


def test_hybrid_refuses_sampled_drafts(model):
    """Tokens chosen outright verified as if they had been drawn: the output's distribution would be
    wrong. So would the other way round."""
    drawn = Fixed([[5]], probs=[None, torch.ones(259) / 259])
    for parts in ((Fixed([[]]), drawn), (drawn, Fixed([[]]))):
        session = begin(Hybrid(*parts, merge=True), model, [[1]])
        with pytest.raises(OptionError, match="sample=False"):
            session.propose([0], [[1]], Budget([2]))
    session = begin(Hybrid(Fixed([[]]), drawn, merge=False), model, [[1]])
    with pytest.raises(OptionError, match="sample=False"):
        session.propose([0], [[1]], Budget([1]))
