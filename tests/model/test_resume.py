"""A pass whose tokens resume at different layers gives the bits of a pass of everything: the draft
part runs the first layers of some tokens, verification the rest, and nothing is run twice.

The reference is the whole model on another cache, which never saw a draft.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selfspec import LLM
from selfspec.control.fixed import FixedLength
from selfspec.core.contract import Budget, Draft, ExitStates
from selfspec.core.sampling import row_samplers
from selfspec.core.tree import Tree
from selfspec.draft.base import Drafter, DraftSession, Target
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.engine.verifying import verified
from selfspec.model.compute.cache import KVCache, RowSpan, TokenLayout
from selfspec.model.compute.hidden_states import StateCollector
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_model

LAYERS = 5
# windows, learned positions, experts; keys of other layers, and numbers of tokens that go along
_BORROWED = {
    "layer_types": [*["sliding_attention", "full_attention", "sliding_attention"] * 2][:5],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 24,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "gemma2": {"sliding_window": 6},
    "gpt2": {},
    "qwen3_moe": {},
    "gemma4_text": {**_BORROWED, "attention_k_eq_v": False},
    "gemma3n_text": {**_BORROWED, "activation_sparsity_pattern": [0.5, 0.0, 0.7, 0.5, 0.0]},
}
ROWS = [1, 3, 0]  # of a cache of four, in the order in which they are verified
KNOWN = [11, 3, 6]  # tokens of each that the cache holds

pytestmark = pytest.mark.zeros


@functools.cache
def model_of(family: str) -> LayeredModel:
    changes = {"num_hidden_layers": LAYERS, **FAMILIES[family]}
    return from_transformers(tiny_model(family, seed=4, **changes), check=False)


def text_of(row: int, length: int) -> list[int]:
    return [(5 + 31 * row + 7 * place * place) % 250 for place in range(length)]


def begun(model: LayeredModel) -> KVCache:
    """A cache that holds the known tokens of every row."""
    cache = model.new_cache(4, 32)
    prompts = [[9, 9] for _ in range(4)]
    for row, known in zip(ROWS, KNOWN, strict=True):
        prompts[row] = text_of(row, known)
    model.prefill(prompts, cache)
    return cache


@dataclass(frozen=True)
class Case:
    """Of each row: its tree, and of the tree's first nodes how many layers were run."""

    trees: Sequence[Tree]
    layers: Sequence[Sequence[int]]
    together: bool = True
    """Whether the draft runs a layer's tokens in one call, else token by token."""

    def layout(self, cache: KVCache) -> TokenLayout:
        shapes = zip(ROWS, KNOWN, self.trees, strict=True)
        spans = [RowSpan(row, known, len(tree)) for row, known, tree in shapes]
        chains = all(tree.is_chain for tree in self.trees)
        return cache.layout_at(spans, None if chains else [tree.parents for tree in self.trees])

    @property
    def tokens(self) -> list[int]:
        return [token for tree in self.trees for token in tree.tokens]

    @property
    def done(self) -> list[int]:
        """Of each token: how many layers the draft ran."""
        rows = zip(self.trees, self.layers, strict=True)
        return [layer for tree, some in rows for layer in (*some, *[0] * (len(tree) - len(some)))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A child was run through no more layers than what it follows, and no layer's entries have
    holes: nodes further back were never run further."""
    trees, layers = [], []
    chains = draw(st.booleans())
    for row in range(len(ROWS)):
        guesses = draw(st.integers(0, 5))
        parents = [node if chains else draw(st.integers(0, node)) for node in range(guesses)]
        tokens = draw(st.lists(st.integers(0, 250), min_size=guesses, max_size=guesses))
        trees.append(Tree([100 + row, *tokens], [-1, *parents]))
        known = st.lists(st.integers(1, LAYERS), max_size=guesses + 1)
        layers.append(sorted(draw(known), reverse=True))
    return Case(trees, layers, draw(st.booleans()))


def drafted(model: LayeredModel, cache: KVCache, case: Case) -> list[Draft]:
    """Run what the case says and leave its states behind."""
    layout, done = case.layout(cache), case.done
    x = model.embed(torch.tensor(case.tokens))
    if case.together:
        steps = [
            ([token for token, layers in enumerate(done) if layers > layer], layer, layer + 1)
            for layer in range(max(done))
        ]
    else:
        steps = [([token], 0, layers) for token, layers in enumerate(done) if layers]
    for tokens, start, stop in steps:
        x[tokens] = model.run(x[tokens], LayerPlan(start, stop), cache, layout.select(tokens))
    pieces = x.split([len(tree) for tree in case.trees])
    return [
        Draft(tree, exits=ExitStates(layers, piece[: len(layers)]) if layers else None)
        for tree, layers, piece in zip(case.trees, case.layers, pieces, strict=True)
    ]


def check(model: LayeredModel, case: Case) -> None:
    """Both ways, and everything that could differ between them."""
    watched = [(LAYERS - 1,), (0,), (1, 3), (2, 3)]
    resumed, whole = begun(model), begun(model)
    ours, theirs = ([StateCollector(each) for each in watched] for _ in range(2))
    before = resumed.computed.copy()
    with torch.inference_mode():
        drafts = drafted(model, resumed, case)
        layout = case.layout(resumed)
        found = verified(model, resumed, layout, drafts, ours, 1).states
        x = model.embed(torch.tensor(case.tokens))
        x = model.run(x, model.full_plan, whole, case.layout(whole), collectors=theirs)
        expected = model.states(x)
    assert torch.equal(found, expected), "the last layer's states"
    ran = np.zeros_like(before)
    for row, tree in zip(ROWS, case.trees, strict=True):
        ran[row] = len(tree)
    assert (resumed.computed - before == ran).all(), "a token was run twice, or not at all"
    assert (resumed.lengths == whole.lengths).all(), "what a layer knows of a row"
    for row, known, tree in zip(ROWS, KNOWN, case.trees, strict=True):
        held = slice(0, known + len(tree))
        for one, other in ((resumed.keys, whole.keys), (resumed.values, whole.values)):
            assert torch.equal(one[:, row, :, held], other[:, row, :, held]), "what was written"
    for our, their in zip(ours, theirs, strict=True):
        (_, seen), passes = their.take()[0], our.take()
        if min(our.layers) >= max(case.done) - 1:
            assert len(passes) == 1, "all of these layers' states were there"
        for where, states in passes:
            rows = set(where.rows.tolist())
            whole_rows = torch.tensor([row in rows for row in layout.rows.tolist()])
            assert torch.equal(where.slots, layout.slots[whole_rows]), "a part of a row's tokens"
            assert torch.equal(states, seen[whole_rows]), f"states that left {our.layers}"


EXAMPLES = {
    "nothing was run": Case([Tree.chain(1, [2, 3]), Tree.chain(4), Tree.chain(5, [6])], [[]] * 3),
    "a chain but its last": Case(
        [Tree.chain(1, [2, 3, 4]), Tree.chain(5), Tree.chain(6, [7])], [[2, 2, 2], [], []]
    ),
    "chains of different depths": Case(
        [Tree.chain(1, [2, 3, 4]), Tree.chain(5, [6, 7]), Tree.chain(8, [9])],
        [[4, 2, 2, 1], [1], [3, 3]],
        together=False,
    ),
    "a tree beside chains": Case(
        [Tree([1, 2, 3, 4, 5], [-1, 0, 0, 1, 2]), Tree.chain(6, [7]), Tree.chain(8)],
        [[3, 3, 2, 1], [2], [4]],
    ),
    "all was run": Case([Tree.chain(1, [2]), Tree([3, 4, 5], [-1, 0, 0]), Tree.chain(6)], [
        [LAYERS] * 2, [LAYERS] * 3, [LAYERS]
    ]),
    "a row was run whole, another not at all": Case(
        [Tree.chain(1, [2, 3]), Tree([4, 5, 6], [-1, 0, 0]), Tree.chain(7)],
        [[LAYERS] * 3, [], [1]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_resumed_tokens_give_the_full_passs_bits(name: str, family: str) -> None:
    """A token joined a layer too early or too late, the states of another token, a tree's guess
    that sees its sibling, entries of a layer that was not run. Lucky if no token resumes, so these
    do."""
    check(model_of(family), EXAMPLES[name])


@settings(max_examples=40)
@given(cases())
def test_any_tokens_may_resume_anywhere(case: Case) -> None:
    """The same for shapes that nobody thought of."""
    check(model_of("llama"), case)


@settings(max_examples=15)
@given(cases())
def test_any_tokens_may_resume_anywhere_within_windows(case: Case) -> None:
    """A window that goes by slot where tokens of one row resume at different layers."""
    check(model_of("mistral"), case)


# ------------------------------------------------------------------------------- parts of a layout


def test_a_row_goes_on_where_its_last_layer_is() -> None:
    """A prompt that was interrupted between two layers, gone on with where the first of them is."""
    model, text = model_of("llama"), text_of(0, 11)
    whole, torn = model.new_cache(1, 16), model.new_cache(1, 16)
    model.prefill([text], whole)
    with torch.inference_mode():
        x = model.embed(torch.tensor(text[:6]))
        model.run(x, LayerPlan(0, 2), torn, torn.layout([6]))
    assert torn.length(0) == 0 and torn.lengths.max() == 6
    model.prefill([text], torn)
    assert torn.length(0) == 11
    assert torch.equal(torn.keys[..., :11, :], whole.keys[..., :11, :])


def test_a_selection_is_where_its_tokens_were() -> None:
    """Tokens of a part that go to other slots, positions or rows than in the whole; spans joined
    across rows or gaps, so that a layer counts entries that it does not hold."""
    spans = [RowSpan(1, 11, 4), RowSpan(3, 15, 2), RowSpan(3, 20, 1)]
    whole = TokenLayout.chains(spans)
    part = whole.select([1, 2, 4, 5, 6])
    # row 3's slots 15 and 16 are one span; 15 does not go on from row 1's 13
    assert part.spans == (RowSpan(1, 12, 2), RowSpan(3, 15, 2), RowSpan(3, 20, 1))
    for name in ("rows", "slots", "positions", "stops"):
        assert getattr(part, name).tolist() == [
            getattr(whole, name).tolist()[token] for token in (1, 2, 4, 5, 6)
        ]
    assert part.ancestors is None and len(part) == 5
    beside = TokenLayout.chains([RowSpan(0, 5, 2), RowSpan(1, 7, 1)]).select([1, 2])
    assert beside.spans == (RowSpan(0, 6, 1), RowSpan(1, 7, 1)), "7 follows 6 in another row"
    assert whole.select([0, 2, 3]).spans == (RowSpan(1, 11, 1), RowSpan(1, 13, 2))


@pytest.mark.parametrize("window", [None, 2])
def test_a_selection_sees_what_its_tokens_saw(window: int | None) -> None:
    """Ancestors of another token, or what was worked out for the whole used for the part."""
    whole = TokenLayout.trees([RowSpan(0, 4, 4), RowSpan(2, 9, 3)], [[-1, 0, 0, 1], [-1, 0, 1]])
    whole.visible(window)
    some = [0, 3, 5, 6]
    part = whole.select(some)
    assert part.spans == (RowSpan(0, 4, 1), RowSpan(0, 7, 1), RowSpan(2, 10, 2))
    assert part.ancestors == ((4,), (4, 5, 7), (9, 10), (9, 10, 11))
    assert seen(part, window) == [seen(whole, window)[token] for token in some]


def test_a_branch_longer_than_the_window_is_read_as_a_chain_is() -> None:
    """Ancestors that a window has left behind, seen all the same."""
    model, text = model_of("mistral"), text_of(0, 14)
    x = model.embed(torch.tensor(text[3:]))
    states = []
    for parents in (None, [[*range(-1, 10)]]):
        cache = model.new_cache(1, 16)
        with torch.inference_mode():
            model.prefill([text[:3]], cache)
            states.append(model.run(x, model.full_plan, cache, cache.layout([11], parents)))
    assert torch.equal(*states)


def seen(layout: TokenLayout, window: int | None) -> list[tuple[int, int, list[int]]]:
    """Of each token: the slots that it sees."""
    view = layout.visible(window)
    assert view.first_extra is not None and view.extras is not None
    firsts, extras = view.first_extra.tolist(), view.extras.tolist()
    return [
        (int(view.starts[token]), int(view.stops[token]), extras[firsts[token] : firsts[token + 1]])
        for token in range(len(layout))
    ]


# -------------------------------------------------------------------------------------- in the loop


@dataclass(frozen=True)
class Uneven(Drafter):
    """Knows what will be written. At each depth it guesses something wrong and then that, and runs
    the first guesses through many layers, later ones through fewer, the last through none."""

    name = "uneven"
    script: Sequence[Sequence[int]] = ()

    def start(self, target: Target) -> DraftSession:
        return _Running(self, target)


class _Running(DraftSession):
    def __init__(self, options: Uneven, target: Target) -> None:
        self._options, self._target = options, target
        self._begins: dict[int, int] = {}

    def admit(self, row: int, prompt: Sequence[int], *_: Any) -> None:
        self._begins[row] = len(prompt)

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        asked = zip(rows, texts, budget.tokens, strict=True)
        return [self._one(row, text, most) for row, text, most in asked]

    def _one(self, row: int, text: Sequence[int], most: int) -> Draft:
        tokens, parents, here = [text[-1]], [-1], 0
        for guess in self._options.script[row][len(text) - self._begins[row] :]:
            tokens += [(guess + 1) % 250, guess]
            parents += [here, here]
            here = len(tokens) - 1
        tree = Tree(tokens[: most + 1], parents[: most + 1])
        layers = [max(1, LAYERS - node // 2) for node in range(len(tree) - 1)]
        model, cache = self._target.model, self._target.cache
        layout = cache.layout_at([RowSpan(row, len(text) - 1, len(tree))], [tree.parents])
        x = model.embed(torch.tensor(list(tree.tokens)))
        for node, stop in enumerate(layers):
            part = layout.select([node])
            x[[node]] = model.run(x[[node]], LayerPlan(0, stop), cache, part)
        if not layers:
            return Draft(tree)
        return Draft(tree, exits=ExitStates(layers, x[: len(layers)]))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_that_resume_differently_write_what_they_write_alone(family: str) -> None:
    """In one pass: trees whose tokens resume at many layers, chains that resume at one, chains and
    rows that do not. Entries of a kept branch that are another's, or a token that a layer runs
    twice. Lucky if nothing is kept or everything."""
    model = model_of(family)
    prompts = [text_of(row, length) for row, length in enumerate((9, 4, 13, 6))]
    llm = LLM(model, None, "tiny")
    plain = [
        result.tokens for result in llm.generate(prompts, max_new_tokens=24, eos=[], draft=None)
    ]
    drafters = [Uneven(plain), EarlyExit(2), None, EarlyExit(3, reuse=False)]
    requests = [
        Request(
            prompt, sampler, 24, drafter=drafter, controller=FixedLength(7) if drafter else None
        )
        for prompt, sampler, drafter in zip(
            prompts, row_samplers(None, prompts), drafters, strict=True
        )
    ]
    at_work = Generation(model, requests)
    rows = list(at_work.rows)
    for _ in at_work:
        for row in rows:
            assert at_work.cache.length(row.slot) == len(row.tokens) - 1
    for row, prompt, expected in zip(rows, prompts, plain, strict=True):
        assert row.tokens == [*prompt, *expected], f"row {row.index}"
        own = row.stats
        once = len(prompt) + own.decoded + own.drafted - own.accepted
        twice = own.drafted if row.index == 3 else 0
        assert at_work.cache.computed[row.slot].tolist() == [once + twice] * 3 + [once] * 2
        fresh = model.new_cache(1, len(row.tokens))
        model.prefill([row.tokens[:-1]], fresh)
        held = slice(0, len(row.tokens) - 1)
        for ours, theirs in (
            (at_work.cache.keys, fresh.keys),
            (at_work.cache.values, fresh.values),
        ):
            assert torch.equal(ours[:, row.slot, :, held], theirs[:, 0, :, held])
    assert 0 < rows[0].stats.accepted < rows[0].stats.drafted
