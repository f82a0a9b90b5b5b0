"""Drafts that are drawn leave the distribution alone: every drafter that can draw, every
controller, chains and trees, by chi-square over many texts of a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from chances import Law, chi_square, law_of_texts
from selfspec import LLM, SamplingParams
from selfspec.control.base import Controller
from selfspec.control.registry import make_controller
from selfspec.core.contract import Budget, Draft, Outcome
from selfspec.core.guessing import drawn
from selfspec.core.randomness import DRAFT, invert, uniform
from selfspec.core.sampling import Sampler
from selfspec.draft import chain
from selfspec.draft.auto import Auto, AutoSession, Past
from selfspec.draft.base import Drafter, DraftSession, JoinedSession, Target, Texts
from selfspec.draft.from_layers.cosine import Cosine
from selfspec.draft.from_layers.dynamic_exit import DynamicExit
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_layers.kv_subset import KVSubset
from selfspec.draft.from_layers.layer_skip import LayerSkip
from selfspec.draft.from_layers.quantised import Quantised
from selfspec.draft.from_models import draft_head
from selfspec.draft.from_models.draft_head import DraftHead
from selfspec.draft.from_models.draft_model import DraftModel
from selfspec.draft.registry import make_drafter
from selfspec.errors import OptionError
from selfspec.testing import tiny_head, tiny_model, tiny_predictors

SAMPLING = SamplingParams(temperature=2.5, top_k=2, seed=11)
PROMPT = [3]
LENGTH = 5
TEXTS = 150  # of each drafter with each controller
CRITICAL = 73.0  # chi-square of 31 degrees of freedom is above once in 30,000 times
VOCABULARY = 24


@dataclass(frozen=True)
class Peeking(Drafter):
    """Looks at the guesses that were discarded for the next place, and lets only those rows draft
    for which it likes what it saw. A controller could do so, if it were told its rows."""

    name: ClassVar[str] = "peeking"
    inner: Drafter

    def start(self, target: Target) -> DraftSession:
        return _Peeking(self.inner.start(target))


class _Peeking(JoinedSession):
    def __init__(self, inner: DraftSession) -> None:
        super().__init__([inner])
        self._inner = inner
        self._dislikes: set[int] = set()

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        pairs = zip(rows, budget.tokens, strict=True)
        most = [0 if row in self._dislikes else tokens for row, tokens in pairs]
        return self._inner.propose(rows, texts, replace(budget, tokens=most))

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        for row in outcome.rows:
            tree, after = row.draft.tree, len(row.path) + 1
            pairs = zip(tree.tokens, tree.depths, strict=True)
            seen = [token for token, depth in pairs if depth == after]
            self._dislikes.discard(row.row)
            if seen and seen[0] < VOCABULARY // 2:
                self._dislikes.add(row.row)


def small(seed: int = 4, layers: int = 4) -> Any:
    """A model whose later layers change little: its parts are often right and often wrong."""
    model = tiny_model(
        "llama", seed, tie_word_embeddings=False, vocab_size=VOCABULARY, num_hidden_layers=layers,
        hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight *= 0.4
        layer.mlp.down_proj.weight *= 0.4
    return model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_pretrained(small())


@pytest.fixture(scope="module")
def law(llm: LLM) -> Law:
    return law_of_texts(llm, PROMPT, SAMPLING, LENGTH)


def drafter(name: str, llm: LLM) -> Drafter:
    if name == "draft-model":
        return DraftModel(LLM.from_pretrained(small(seed=4, layers=3)), sample=True)
    if name.startswith("draft-head"):
        part = tiny_head(llm.model, vocabulary=range(VOCABULARY))
        return DraftHead(part, width=3 if "tree" in name else 1, sample=True)
    return {
        "early-exit": EarlyExit(layer=2, sample=True),
        "layer-skip": LayerSkip(attention=(1, 3), mlp=(2,), sample=True),
        "cosine": Cosine(threshold=0.9, keep_last=1, sample=True),
        "kv-subset": KVSubset(sink=0, recent=1, blocks=0, block_size=1, sample=True),
        "quantised": Quantised("int4", sample=True),
        "quantised, tree": Quantised("int4", unsure=0.9, sample=True),
        "early-exit of a copy": EarlyExit(layer=2, weights="int4", sample=True),
        "dynamic-exit": DynamicExit(
            tiny_predictors(llm.model, candidates=7), threshold=0.2, sample=True
        ),
    }[name]


DRAWING = (
    "early-exit", "layer-skip", "cosine", "kv-subset", "quantised", "draft-model", "draft-head",
    "draft-head, tree", "quantised, tree", "early-exit of a copy",
    "dynamic-exit",
)  # fmt: skip
CONTROLLERS: dict[str, Controller] = {
    "fixed": make_controller("fixed", {"tokens": 3}),
    "confidence": make_controller("confidence", {"tokens": 3, "threshold": 0.4}),
    "adaptive": make_controller("adaptive", {"tokens": 3}),
    "cost-aware": make_controller("cost-aware", {"most": 3}),
}


def texts_of(
    llm: LLM, draft: Drafter, control: Controller, count: int, sampling: SamplingParams = SAMPLING
) -> tuple[list[list[int]], float]:
    """Texts of one call, each with a seed of its own, and the share of drafts that was kept."""
    results = llm.generate(
        [PROMPT] * count, sampling=sampling, max_new_tokens=LENGTH, eos=[], draft=draft,
        control=control,
    )  # fmt: skip
    return [each.tokens for each in results], results[0].call.acceptance


@pytest.fixture(scope="module")
def found(llm: LLM) -> dict[tuple[str, str], tuple[list[list[int]], float]]:
    """Some texts of every drafter with every controller: 6,000 in all."""
    made = {}
    for name in DRAWING:
        draft = drafter(name, llm)
        for control in (*CONTROLLERS, "peeking"):
            peeks = control == "peeking"
            asked = Peeking(draft) if peeks else draft
            by = CONTROLLERS["fixed" if peeks else control]
            sampling = replace(SAMPLING, seed=1000 * len(made))
            made[name, control] = texts_of(llm, asked, by, TEXTS, sampling)
    return made


@pytest.mark.parametrize("pooled", [*DRAWING, *CONTROLLERS, "peeking", "all"])
def test_drawn_drafts_leave_the_distribution_alone(
    found: dict[tuple[str, str], tuple[list[list[int]], float]], law: Law, pooled: str
) -> None:
    """A q that is not what a token was drawn from, a number used twice, a sibling out of order, a
    length that follows from what is still to be drawn."""
    assert len(law) == 32
    ours = {pair: each for pair, each in found.items() if pooled in (*pair, "all")}
    texts = [text for texts, _ in ours.values() for text in texts]
    assert len(texts) >= 5 * TEXTS
    assert (chi := chi_square(texts, law)) < CRITICAL, f"chi-square {chi:.0f} of {len(texts)} texts"
    for pair, (_, acceptance) in ours.items():
        if pair[1] != "cost-aware":  # which goes by the clock, and may find that nothing pays
            assert 0.02 < acceptance < 0.99, f"{pair}: {acceptance}, so nothing was tested"


def by_one_number_for_all_rounds(
    sampler: Sampler, row: Tensor, context: Sequence[int], *_: int
) -> list[tuple[int, Tensor]]:
    q = sampler.probabilities(row[None], [context])[0]
    return [(invert(q, uniform(sampler.seed, len(context), DRAFT)), q)]


def at_another_temperature(sampler: Sampler, row: Tensor, *rest: Any) -> list[tuple[int, Tensor]]:
    pairs = zip(drawn(sampler, 4 * row, *rest), drawn(sampler, row, *rest), strict=True)
    return [(token, q) for (token, _), (_, q) in pairs]


@pytest.mark.parametrize("wrong", [by_one_number_for_all_rounds, at_another_temperature])
def test_wrong_draws_are_caught(
    llm: LLM, law: Law, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative controls: a test that passes them too would prove nothing. A number that serves
    a position in every round was a fault of ours, which only a peeking one can show."""
    monkeypatch.setattr(chain, "drawn", wrong)
    draft = Peeking(drafter("early-exit", llm))
    texts, _ = texts_of(llm, draft, CONTROLLERS["fixed"], 1500)
    assert chi_square(texts, law) > CRITICAL


def as_if_with_replacement(*args: Any) -> list[tuple[int, Tensor]]:
    found = drawn(*args)
    return [(token, found[0][1]) for token, _ in found]


def test_siblings_are_drawn_without_replacement(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second sibling that is tested as if it could have been the first. Among three tokens all
    drafts meet the model's own choices, so that siblings decide much."""
    others = {token: -1000.0 for token in range(VOCABULARY) if token not in (5, 11, 17)}
    sampling = SamplingParams(temperature=0.6, seed=11, logit_bias=others)
    expected = law_of_texts(llm, PROMPT, sampling, LENGTH)
    draft, by = drafter("draft-head, tree", llm), CONTROLLERS["fixed"]
    right, acceptance = texts_of(llm, draft, by, 1000, sampling)
    monkeypatch.setattr(draft_head, "drawn", as_if_with_replacement)
    wrong, _ = texts_of(llm, draft, by, 1000, sampling)
    assert 0.2 < acceptance < 0.8
    assert len(expected) == 243
    assert chi_square(right, expected) < 1.6 * sum(1000 * p >= 2 for p in expected.values())
    assert chi_square(wrong, expected) > 2 * sum(1000 * p >= 2 for p in expected.values())


@dataclass(frozen=True)
class Repeating(Drafter):
    """Guesses the last token again, outright."""

    name: ClassVar[str] = "repeating"

    def start(self, target: Target) -> DraftSession:
        return _Repeating()


class _Repeating(DraftSession):
    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        pairs = zip(texts, budget.tokens, strict=True)
        return [Draft.chain(text, [text[-1]] * most) for text, most in pairs]


@dataclass(frozen=True)
class Seeing(Auto):
    """Outright drafts in every other round show what the model itself would write behind a
    discarded guess. In the rounds between, rows for which it is liked go on with the model's own
    numbers, the others with drawn drafts."""

    def start(self, target: Target) -> AutoSession:
        at_work = super().start(target)
        return _Seeing(at_work._arms, at_work._most, Past())


class _Seeing(AutoSession):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._turn, self._likes = 0, set[int]()

    def _choose(self, rows: int, most: int, beside: int) -> tuple[Any, int]:
        self._turn += 1
        return (self._arms[self._turn % 2], min(most, 2)) if most else (None, 0)

    def propose(self, rows: Sequence[int], texts: Texts, budget: Budget) -> Sequence[Draft]:
        if self._chosen is self._arms[0]:
            pairs = zip(rows, budget.tokens, strict=True)
            budget = Budget([0 if row in self._likes else tokens for row, tokens in pairs])
        return super().propose(rows, texts, budget)

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        for row in outcome.rows:
            node = len(row.path)
            if node < len(row.draft.tree):
                liked = row.choices[node] == 5
                (self._likes.add if liked else self._likes.discard)(row.row)


def test_auto_draws_nothing_where_drafts_were_compared(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that draws beside one that chooses outright: who looks at discarded drafts could
    decide by the model's own next draw whether it counts. Without the rule the law is another."""
    others = {token: -1000.0 for token in range(VOCABULARY) if token not in (5, 11, 17)}
    sampling = SamplingParams(temperature=2.5, seed=11, logit_bias=others)
    options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 4, "eos": []}
    draft = Seeing([EarlyExit(2, sample=True), Repeating()])
    results = llm.generate([PROMPT] * 1500, draft=draft, **options)
    assert 0 < results[0].call.accepted < results[0].call.drafted
    ruled = [each.tokens for each in results]
    monkeypatch.setattr(AutoSession, "_one_coupling", lambda self, row, text, draft: draft)
    mixed = [each.tokens for each in llm.generate([PROMPT] * 1500, draft=draft, **options)]
    expected = sum(p for text, p in law_of_texts(llm, PROMPT, sampling, 4).items() if text[2] == 5)
    off = [sum(text[2] == 5 for text in texts) / 1500 - expected for texts in (ruled, mixed)]
    doubt = 4 * (expected * (1 - expected) / 1500) ** 0.5
    assert abs(off[0]) < doubt < off[1], f"{off} beside {doubt}"


@pytest.mark.parametrize("name", ["ngram", "recycle", "jacobi", "hybrid"])
def test_drafters_without_probabilities_cannot_draw(name: str) -> None:
    """An option that is ignored, or an error that names no way out."""
    with pytest.raises(OptionError, match=r"sample=True would draw nothing; .* early-exit"):
        make_drafter(name, {"sample": True})
