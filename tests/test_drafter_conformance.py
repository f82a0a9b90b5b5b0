"""What every drafter owes: whatever it drafts, with any controller, alone or in a batch, what is
written stays the same.

A case is a drafter (with some options), a check, a model, a controller and a number of rows. Every
pair of these meets in some case; with `--full` every combination does. Drafters of other packages,
found through their entry point, run with their defaults.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from selfspec import LLM, SamplingParams, ScriptedDrafter
from selfspec.control.base import Controller, ControlSession
from selfspec.control.registry import controller_names, make_controller
from selfspec.core.contract import Budget, Draft, Outcome
from selfspec.core.sampling import Sampler, row_samplers
from selfspec.core.tree import Contexts, Tree
from selfspec.draft.auto import Auto, AutoSession
from selfspec.draft.base import Drafter, DraftSession, Target
from selfspec.draft.from_layers.cosine import Cosine
from selfspec.draft.from_layers.dynamic_exit import DynamicExit
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_layers.layer_skip import LayerSkip
from selfspec.draft.from_models.draft_head import DraftHead
from selfspec.draft.registry import BUILT_IN, drafter_names, make_drafter, resolve
from selfspec.engine import keeping
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request, Row, RowState
from selfspec.model.compute.cache import KVCache, TokenLayout
from selfspec.model.layered import LayeredModel
from selfspec.testing import (
    VOCABULARY,
    tiny_adapter,
    tiny_head,
    tiny_lora,
    tiny_model,
    tiny_predictors,
    tiny_tokenizer,
)
from selfspec.train.supported import PROVEN

NEW = 24
PROMPTS = [
    list(text)
    for text in (
        b"once upon a time, once upon",
        b"the",
        b"aXb aXb aXb a",
        b"a longer prompt, to be read with the others",
    )
]
SAMPLED = {"sampling": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=11)}
PENALISED = {
    "sampling": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
}
BOTH = {
    "sampling": SamplingParams(
        temperature=0.7, min_p=0.02, repetition_penalty=1.2, frequency_penalty=0.3, seed=2
    )
}
CHANGES: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 12}}


class World:
    """A tiny model, what it writes by itself, and what transformers says it writes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hf = alike() if name == "alike" else tiny_model(name, seed=4, **CHANGES.get(name, {}))
        self.llm = LLM.from_pretrained(self.hf, tokenizer=tiny_tokenizer())
        self._plain: dict[str, list[Any]] = {}

    def plain(self, rows: Sequence[int], **options: Any) -> list[Any]:
        """Results of plain decoding for some of the prompts, each remembered."""
        key = repr(options)
        if key not in self._plain:
            self._plain[key] = self.llm.generate(
                PROMPTS, **{"max_new_tokens": NEW, "eos": [], "draft": None, **options}
            )
        return [self._plain[key][row] for row in rows]

    @functools.cache  # noqa: B019  (worlds live as long as the tests)
    def reference(self, row: int) -> list[int]:
        prompt = torch.tensor([PROMPTS[row]])
        found = self.hf.generate(
            prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return found[0, prompt.shape[1] :].tolist()


def alike() -> Any:
    """A model whose later layers change little, so that parts of it agree with the whole: high
    acceptance."""
    model = tiny_model("llama", seed=4, tie_word_embeddings=False, num_hidden_layers=6)
    for layer in model.model.layers[1:]:
        layer.self_attn.o_proj.weight.data *= 0.1
        layer.mlp.down_proj.weight.data *= 0.1
    return model


@functools.cache
def world(name: str) -> World:
    return World(name)


# families that differ from these in a line have a suite of their own (test_listed_families.py)
WORLDS = [*PROVEN, "alike"]


# ----------------------------------------------------------------------------------------- drafters


@dataclass(frozen=True)
class ScriptedTree(Drafter):
    """A public fake's cousin: at every depth a wrong guess and then the right one, as a tree."""

    name = "scripted-tree"
    trees = True
    script: Sequence[Sequence[int]] = ()

    def start(self, target: Target) -> DraftSession:
        return _Tree(self.script, target.model.shape.vocabulary)


class _Tree(DraftSession):
    def __init__(self, script: Sequence[Sequence[int]], vocabulary: int) -> None:
        self._script, self._vocabulary = script, vocabulary
        self._begins: dict[int, int] = {}

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        self._begins[row] = len(prompt)

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        drafts = []
        for row, text, most in zip(rows, texts, budget.tokens, strict=True):
            tokens, parents, parent = [text[-1]], [-1], 0
            for guess in self._script[row][len(text) - self._begins[row] :]:
                tokens += [(guess + 1) % self._vocabulary, guess]
                parents += [parent, parent]
                parent = len(tokens) - 1
            drafts.append(Draft(Tree(tokens[: most + 1], parents[: most + 1])))
        return drafts


@dataclass(frozen=True)
class Restless(Auto):
    """Asks its candidates in turn, with plain rounds in between, whatever they cost: no clock
    decides what is tested."""

    def start(self, target: Target) -> AutoSession:
        at_work, turns = super().start(target), itertools.count()

        def choose(rows: int, most: int, beside: int) -> tuple[Any, int]:
            turn = next(turns)
            arm = [*at_work._arms, None][turn % (len(at_work._arms) + 1)]
            return (arm, min(1 + turn % 6, most)) if arm and most else (None, 0)

        at_work._choose = choose  # type: ignore[method-assign]
        return at_work


Make = Callable[[World, list[list[int]]], Drafter]


def named(name: str, **options: Any) -> Make:
    def make(here: World, script: list[list[int]]) -> Drafter:
        drafter, _ = resolve(name, options, None, None)
        assert drafter is not None
        return drafter

    return make


@functools.cache
def small_llm() -> LLM:
    return LLM.from_pretrained(
        tiny_model("llama", seed=9, num_hidden_layers=2), tokenizer=tiny_tokenizer()
    )


def head(here: World, script: list[list[int]], **options: Any) -> DraftHead:
    """A random head that says little else than what is right somewhere, so that some of its guesses
    are."""
    return DraftHead(
        tiny_head(
            here.llm.model, vocabulary=[1, 2, 3, 4, *(t for tokens in script for t in tokens)]
        ),
        **options,
    )


def skipping(here: World, script: list[list[int]]) -> Drafter:
    """Layers skipped by a random draft-LoRA; families whose linears are stored otherwise skip
    without one."""
    if here.name not in ("llama", "mistral", "qwen2", "qwen3", "alike"):
        return make_drafter("layer-skip", {"strategy": "middle"}) or LayerSkip()
    return LayerSkip(part=tiny_lora(here.llm.model))


def copied(name: str = "quantised", **options: Any) -> Make:
    """A copy in fewer bits. Models that torch runs cannot have one, and draft without."""

    def make(here: World, script: list[list[int]]) -> Drafter:
        ours = here.llm.model.ops.kernel == "native"
        made = make_drafter(name, options) if ours else make_drafter("ngram", {})
        assert made is not None
        return made

    return make


def leaving(**options: Any) -> Make:
    """Random predictors, which fire anywhere. The rows of a wholly foreign head cannot be read,
    and no exit can be looked for."""

    def make(here: World, script: list[list[int]]) -> Drafter:
        if not here.llm.model.head_product.readable:
            return EarlyExit(2)
        part = tiny_predictors(here.llm.model, candidates=7)
        return DynamicExit(**{"part": part, "schedule": "all", "threshold": 0.3, **options})

    return make


def doubted(name: str, **options: Any) -> Make:
    """A drafter whose drafts end where random predictors doubt them."""

    def make(here: World, script: list[list[int]]) -> Drafter:
        part = tiny_predictors(here.llm.model, candidates=5, seed=2)
        return named(name, sure=0.5, predictors=part, **options)(here, script)

    return make


# Of each drafter: the options it is tried with on these tiny models.
DRAFTERS: dict[str, list[Make]] = {
    "auto": [
        lambda here, script: Restless(["hybrid", EarlyExit(2), Cosine(0.5, keep_last=1)]),
        lambda here, script: Auto(
            [ScriptedTree(script), ScriptedDrafter(script, wrong_every=3)], most=5
        ),
        named("auto"),
        lambda here, script: Restless(["hybrid", head(here, script)]),
    ],
    "cosine": [
        named("cosine", threshold=0.5, keep_last=1),
        named("cosine"),
        named("cosine", threshold=2.0, every=2),
        doubted("cosine", threshold=0.5),
    ],
    "draft-head": [
        lambda here, script: head(here, script),
        lambda here, script: head(here, script, width=3),
        lambda here, script: head(here, script, sample=True),
        lambda here, script: named("hybrid", first="ngram", then=head(here, script, width=2))(
            here, script
        ),
    ],
    "draft-model": [
        named("draft-model"),
        lambda here, script: named("draft-model", model=small_llm())(here, script),
    ],
    "dynamic-exit": [
        leaving(),
        leaving(schedule="both", threshold=0.5),
        leaving(schedule="online", candidates="hybrid"),
        lambda here, script: leaving(candidates="draft-head", head=head(here, script).part)(
            here, script
        ),
        leaving(layers=(2,), threshold=0.01),
        leaving(sample=True),
    ],
    "early-exit": [
        named("early-exit"),
        named("early-exit", layer=3, vocabulary=120),
        named("early-exit", layer=2, reuse=False),
        named("early-exit", layer=2, sample=True),
        doubted("early-exit", layer=2, sample=True),
        copied("early-exit", layer=2, weights="int4"),
        lambda here, script: EarlyExit(
            part=tiny_adapter(here.llm.model, vocabulary=[1, 2, 3, *itertools.chain(*script)])
        ),
    ],
    "hybrid": [
        named("hybrid"),
        named("hybrid", first="ngram", then="early-exit"),
        named("hybrid", first="ngram", then="recycle", merge=False),
    ],
    "jacobi": [named("jacobi"), named("jacobi", fill="last")],
    "kv-subset": [
        named("kv-subset", sink=1, recent=2, blocks=1, block_size=2),
        named("kv-subset"),
        doubted("kv-subset", sink=1, recent=2, blocks=1, block_size=2),
    ],
    "layer-skip": [
        named("layer-skip"),
        named("layer-skip", attention=(1, 2), mlp=(2,)),
        named("layer-skip", strategy="last"),
        doubted("layer-skip", attention=(1,)),
        copied("layer-skip", weights="int8", mlp=(1,)),
        skipping,
    ],
    "ngram": [named("ngram"), named("ngram", branches=1, shortest=2)],
    "quantised": [
        copied(),
        copied(weights="int4", first="none"),
        copied(first="early-exit", guesses=3, sure=0.02),
        copied(weights="int4", first="recycle", guesses=20),
        copied(weights="int4", unsure=0.9, sure=0.01),
    ],
    "recycle": [named("recycle"), named("recycle", keep_table=True, pairs=False)],
    "scripted": [
        lambda here, script: ScriptedDrafter(script),
        lambda here, script: ScriptedDrafter(script, wrong_every=1),
        lambda here, script: ScriptedDrafter(script, wrong_every=3),
        lambda here, script: ScriptedTree(script),
    ],
}
MOST_OPTIONS = max(map(len, DRAFTERS.values()))
CONTROLLERS: dict[str, dict[str, Any]] = {
    # the threshold moves much, and often
    "adaptive": {"tokens": 6, "threshold": 0.2, "step": 0.2, "threshold_memory": 0.5},
    "confidence": {"tokens": 6, "threshold": 0.15},
    "cost-aware": {"most": 6},
    "fixed": {"tokens": 5},
}


def makers(name: str) -> list[Make]:
    return DRAFTERS[name] if name in DRAFTERS else [named(name)]


def test_every_built_in_drafter_is_here() -> None:
    """A drafter that was added without joining this suite, or removed and left in its table."""
    assert set(BUILT_IN) == set(DRAFTERS)


def test_every_controller_is_here() -> None:
    """A controller that is only tried with its defaults, under which these short texts never reach
    what it does."""
    assert set(controller_names()) == set(CONTROLLERS)


# ------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True)
class Case:
    """What a check is given."""

    make: Make
    world: World
    control: Controller | None  # None: the drafter brings its own
    rows: Sequence[int]  # which prompts

    @property
    def prompts(self) -> list[list[int]]:
        return [PROMPTS[row] for row in self.rows]

    def drafter(self, expected: Sequence[Any]) -> Drafter:
        return self.make(self.world, [result.tokens for result in expected])

    def keeps_seeds(self) -> bool:
        """Drafts that are drawn promise the distribution, not the seed's tokens."""
        return not getattr(self.drafter([]), "sample", False)

    def run(
        self,
        expected: Sequence[Any],
        control: Controller | None = None,
        llm: LLM | None = None,
        **options: Any,
    ) -> list[Any]:
        control = (control or self.control) if self.control else None
        call = {
            "max_new_tokens": NEW,
            "eos": [],
            "draft": self.drafter(expected),
            "control": control,
            **options,
        }
        return (llm or self.world.llm).generate(self.prompts, **call)


def same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.tokens == theirs.tokens, f"row {row} wrote other tokens than plain decoding"
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason), (
            f"row {row} ended differently"
        )


def check_greedy(case: Case) -> None:
    """Greedy tokens, those of plain decoding and those of transformers."""
    expected = case.world.plain(case.rows)
    same(case.run(expected), expected)
    for row, result in zip(case.rows, expected, strict=True):
        assert result.tokens == case.world.reference(row), (
            f"row {row}: plain decoding and model.generate disagree"
        )


def check_sampled(case: Case) -> None:
    """Sampled tokens of a seed."""
    if case.keeps_seeds():
        rows = range(len(PROMPTS)) if len(case.rows) > 1 else [0]  # row i has seed + i
        case = replace(case, rows=rows)
        expected = case.world.plain(rows, **SAMPLED)
        same(case.run(expected, **SAMPLED), expected)


def check_penalties(case: Case) -> None:
    """Penalties count kept tokens only, and drafts only on their own branch."""
    for options in (PENALISED, BOTH) if case.keeps_seeds() and len(case.rows) > 1 else (PENALISED,):
        expected = case.world.plain(case.rows, **options)
        same(case.run(expected, **options), expected)


def check_logprobs(case: Case) -> None:
    """Log-probabilities are those of plain decoding."""
    expected = case.world.plain(case.rows, logprobs=2)
    found = case.run(expected, logprobs=2)
    assert [result.logprobs for result in found] == [result.logprobs for result in expected]


def check_cache(case: Case) -> None:
    """After every round the cache holds what a fresh prefill of the kept text would, bit by bit, in
    every layer."""
    expected = case.world.plain(case.rows)
    model = case.world.llm.model
    fresh = model.new_cache(len(case.rows))
    model.prefill(
        [prompt + result.tokens for prompt, result in zip(case.prompts, expected, strict=True)],
        fresh,
    )
    limits = [NEW - 3 * index for index in range(len(case.rows))]
    samplers = row_samplers(None, case.prompts, ())
    drafting: dict[str, Any] = {"drafter": case.drafter(expected), "controller": case.control}
    requests = [
        Request(*each, **drafting) for each in zip(case.prompts, samplers, limits, strict=True)
    ]
    generation = Generation(model, requests)
    rows = list(generation.rows)  # those that ended are looked at too: no slot is used again
    for _ in generation:
        for row in rows:
            known = len(row.tokens) - 1
            assert generation.cache.lengths[row.slot].tolist() == [known] * model.layers, (
                "layers know more or less than was kept"
            )
            for ours, theirs in (
                (generation.cache.keys, fresh.keys),
                (generation.cache.values, fresh.values),
            ):
                assert torch.equal(ours[:, row.slot, :, :known], theirs[:, row.index, :, :known]), (
                    "the cache holds something else"
                )
    assert [len(row.tokens) - len(row.request.prompt) for row in rows] == limits


def check_eos(case: Case) -> None:
    """An end of sequence anywhere in a draft ends the row there."""
    expected = case.world.plain(case.rows)
    for at in (1, 4, 9):
        eos = sorted({result.tokens[at] for result in expected})
        same(case.run(expected, eos=eos), case.world.plain(case.rows, eos=eos))


def check_stops(case: Case) -> None:
    """A stop string that is complete inside a draft, across tokens."""
    expected = case.world.plain(case.rows)
    for at in (3, 8):
        stop = [
            text
            for result in expected
            if (text := case.world.llm.tokenizer.decode(result.tokens[at : at + 2]))
        ]
        same(case.run(expected, stop=stop), case.world.plain(case.rows, stop=stop))


def check_limits(case: Case) -> None:
    """max_new_tokens and the model's context, reached inside a draft."""
    expected = case.world.plain(case.rows)
    for limit in (1, 2, 4, 7):
        found = case.run(expected, max_new_tokens=limit)
        assert [result.tokens for result in found] == [result.tokens[:limit] for result in expected]
    model = case.world.llm.model
    shape = replace(model.shape, context=max(map(len, case.prompts)) + 6)
    short = case.world.llm.view(replace(model, shape=shape))
    found = case.run(expected, llm=short)
    for prompt, ours, theirs in zip(case.prompts, found, expected, strict=True):
        room = min(NEW, short.model.shape.context - len(prompt))
        assert ours.tokens == theirs.tokens[:room] and ours.finish_reason == (
            "length" if room == NEW else "context"
        )


@dataclass(frozen=True)
class Uneven(Controller, ControlSession):
    """A different budget for every row and round, 0 among them, with and without a threshold."""

    name = "uneven"
    threshold: float | None = None

    def start(self) -> ControlSession:
        rounds = itertools.count()
        uneven = copy.copy(self)
        object.__setattr__(uneven, "_rounds", rounds)
        return uneven

    def budget(self, rooms: Sequence[int], beside: int = 0) -> Budget:
        turn = next(self._rounds)  # type: ignore[attr-defined]
        return Budget(
            [min(room, (turn + 2 * index) % 6) for index, room in enumerate(rooms)], self.threshold
        )


def check_budgets(case: Case) -> None:
    """Budgets of 0 and 1, uneven ones, more than a draft can hold, and thresholds."""
    expected = case.world.plain(case.rows)
    controls = [make_controller("fixed", {"tokens": tokens}) for tokens in (0, 1, 40)]
    for control in (*controls, Uneven(), Uneven(0.3)):
        found = case.run(expected, control)
        same(found, expected)
        if control is controls[0] and case.control:
            assert found[0].call.drafted == 0 and found[0].call.rounds == NEW - 1, (
                "0 drafts are plain decoding"
            )


def check_streams(case: Case) -> None:
    """A stream is the same text in pieces; two of one drafter, interleaved, do not disturb each
    other."""
    rows = [case.rows[0], (case.rows[0] + 1) % len(PROMPTS)]
    expected = case.world.plain(rows)
    streams, shared = [], case.drafter(expected)
    for row, result in zip(rows, expected, strict=True):
        drafter = case.drafter([result]) if case.make in DRAFTERS["scripted"] else shared
        streams.append(
            case.world.llm.stream(
                PROMPTS[row], max_new_tokens=NEW, eos=[], draft=drafter, control=case.control
            )
        )
    pieces = [
        piece
        for turn in itertools.zip_longest(*streams)
        for piece in zip(range(2), turn, strict=True)
        if piece[1]
    ]
    for index, (stream, result) in enumerate(zip(streams, expected, strict=True)):
        assert "".join(piece.text for which, piece in pieces if which == index) == result.text
        same([stream.result], [result])


def check_neighbours(case: Case) -> None:
    """A row's tokens do not depend on the rows beside it."""
    options = SAMPLED if case.keeps_seeds() else {}
    rows = range(len(PROMPTS))
    expected = case.world.plain(rows, **options)
    together = replace(case, rows=rows).run(expected, **options)
    for row in case.rows:
        alone = dict(options)
        if options:
            alone["sampling"] = replace(SAMPLED["sampling"], seed=SAMPLED["sampling"].seed + row)
        same(replace(case, rows=[row]).run([expected[row]], **alone), [together[row]])


@dataclass(frozen=True)
class Failing(Drafter, DraftSession):
    """A drafter that fails after its work is half done."""

    name = "failing"
    inner: Any
    rounds: int
    where: str

    def start(self, target: Target) -> DraftSession:
        failing = copy.copy(self)
        object.__setattr__(failing, "inner", self.inner.start(target))
        object.__setattr__(failing, "_left", itertools.count(self.rounds, -1))
        return failing

    def admit(self, *arguments: Any) -> None:
        self.inner.admit(*arguments)

    def drop(self, row: int) -> None:
        self.inner.drop(row)

    def propose(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
    ) -> Sequence[Draft]:
        drafts: Sequence[Draft] = self.inner.propose(rows, texts, budget)
        self._fail("propose")
        return drafts

    def observe(self, outcome: Outcome) -> None:
        self._fail("observe")
        self.inner.observe(outcome)

    def _fail(self, where: str) -> None:
        if where == self.where and next(self._left) == 0:  # type: ignore[attr-defined]
            raise RuntimeError("the drafter failed")


def failing(drafter: Drafter, where: str) -> Drafter:
    """Fails in its third round; of auto, each candidate in its first, since nobody knows who will
    be asked again."""
    if isinstance(drafter, Auto):
        return Auto([Failing(candidate, 0, where) for candidate in drafter._drafters])
    return Failing(drafter, 2, where)


def check_failure(case: Case) -> None:
    """An exception in a drafter leaves model, cache and a request under way as they were."""
    expected = case.world.plain(case.rows)
    first = case.rows[0]
    under_way = case.world.llm.stream(
        PROMPTS[first],
        max_new_tokens=NEW,
        eos=[],
        draft=case.drafter(expected),
        control=case.control,
    )
    next(under_way)
    for where in ("propose", "observe"):
        with pytest.raises(RuntimeError, match="the drafter failed"):
            case.run(
                expected,
                make_controller("fixed", {"tokens": 3}),
                draft=failing(case.drafter(expected), where),
            )
    for _ in under_way:
        pass
    same([under_way.result], [expected[0]])
    same(case.world.llm.generate(case.prompts, max_new_tokens=NEW, eos=[], draft=None), expected)
    same(case.run(expected), expected)


def check_turns(case: Case) -> None:
    """A conversation goes on from the cache of its last turn."""
    llm = case.world.llm
    messages = [{"role": "user", "content": "once upon"}]
    for _ in range(2):
        prompt = llm.encode_chat(messages)
        expected = llm.generate(prompt, max_new_tokens=10, eos=[], draft=None)
        answer = llm.chat(
            messages,
            max_new_tokens=10,
            eos=[],
            draft=case.drafter([expected]),
            control=case.control,
        )
        same([answer], [expected])
        messages += [
            {"role": "assistant", "content": "aXb"},
            {"role": "user", "content": "aXb aXb"},
        ]


CHECKS: dict[str, Callable[[Case], None]] = {
    name.removeprefix("check_"): each
    for name, each in dict(globals()).items()
    if name.startswith("check_")
}


# -------------------------------------------------------------------------------------------- cases


def pairwise(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Few combinations in which every value of one axis meets every value of each other. The first
    two are multiplied out."""
    pairs = [(a, b) for a, b in itertools.combinations(range(len(axes)), 2)]
    missing = {(a, x, b, y) for a, b in pairs for x in axes[a] for y in axes[b]}
    found = []

    def met(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return {(a, row[a], b, row[b]) for a, b in pairs}

    for head in itertools.product(*axes[:2]):
        rows = [(*head, *tail) for tail in itertools.product(*axes[2:])]
        found.append(max(rows, key=lambda row: len(met(row) & missing)))
        missing -= met(found[-1])
    while missing:
        a, x, b, y = min(missing, key=repr)
        rows = [row for row in itertools.product(*axes) if row[a] == x and row[b] == y]
        found.append(max(rows, key=lambda row: len(met(row) & missing)))
        missing -= met(found[-1])
    return found


NAMES = drafter_names()
AXES: tuple[Sequence[Any], ...] = (
    NAMES,
    list(CHECKS),
    WORLDS,
    controller_names(),
    [1, 4],
    range(MOST_OPTIONS),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.name == "test_conformance":
        full = metafunc.config.getoption("--full")
        cases = list(itertools.product(*AXES)) if full else pairwise(AXES)
        cases = [case for case in cases if not full or case[5] < len(makers(case[0]))]
        metafunc.parametrize("choice", cases, ids=["-".join(map(str, case)) for case in cases])


def case_of(choice: tuple[Any, ...]) -> tuple[Callable[[Case], None], Case]:
    name, check, model, control, rows, options = choice
    several = makers(name)
    made = None if name == "auto" else make_controller(control, CONTROLLERS[control])
    index = (len(check) + options) % len(PROMPTS)
    return CHECKS[check], Case(
        several[options % len(several)], world(model), made, range(4) if rows == 4 else [index]
    )


def test_conformance(choice: tuple[Any, ...]) -> None:
    """The check named in the test's id, see its docstring."""
    check, case = case_of(choice)
    check(case)


def test_every_pair_is_covered() -> None:
    """A covering algorithm that forgets: a drafter that never meets a family, and nobody
    notices."""
    axes = (["a", "b", "c"], [1, 2], ["x", "y", "z", "w"], [True, False], range(3))
    cases = pairwise(axes)
    assert len(cases) < 3 * 2 * 4 * 2 * 3
    for a, b in itertools.combinations(range(len(axes)), 2):
        assert {(case[a], case[b]) for case in cases} == set(itertools.product(axes[a], axes[b]))


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_suite_sees_accepted_and_rejected_drafts(name: str) -> None:
    """A drafter that drafts nothing, or a suite in which nothing is ever rejected: both pass every
    check above."""
    drafted = accepted = 0
    for make, model in itertools.product(makers(name), WORLDS):
        case = Case(
            make,
            world(model),
            None if name == "auto" else make_controller("fixed", {"tokens": 5}),
            range(4),
        )
        stats = case.run(case.world.plain(case.rows))[0].call
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    assert 0 < accepted < drafted, f"{accepted} of {drafted} drafts were accepted"


# ----------------------------------------------------------------------------------- half precision

NEAR = 0.03  # of the largest logit: bfloat16 has 8 bits, and a few roundings add up
LONG = 32


@functools.cache
def half_world(family: str) -> tuple[LLM, list[list[int]]]:
    """A model in bfloat16, and what it writes by itself."""
    model = tiny_model(family, seed=4, tie_word_embeddings=False).to(torch.bfloat16)
    llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer(), dtype=torch.bfloat16)
    return llm, [
        result.tokens for result in llm.generate(PROMPTS, max_new_tokens=LONG, eos=[], draft=None)
    ]


def gaps_of(family: str, drafter: Drafter) -> list[float]:
    """Of each row: how far apart the logits of its token and plain decoding's are where they first
    differ, as a share of the largest logit; 0 if they are equal."""
    llm, expected = half_world(family)
    found = llm.generate(
        PROMPTS,
        max_new_tokens=LONG,
        eos=[],
        draft=drafter,
        control=make_controller("fixed", {"tokens": 5}),
    )
    gaps = [0.0] * len(PROMPTS)
    for row, (prompt, ours, theirs) in enumerate(zip(PROMPTS, found, expected, strict=True)):
        at = next((at for at in range(LONG) if ours.tokens[at] != theirs[at]), None)
        if at is not None:
            logits = llm.model.prefill([prompt + theirs[:at]], llm.model.new_cache(1))[0].float()
            gaps[row] = max(
                1e-9,
                float((logits[theirs[at]] - logits[ours.tokens[at]]).abs() / logits.abs().max()),
            )
    return gaps


HALF = ["early-exit", "hybrid", "kv-subset", "layer-skip"]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_differs_at_near_ties_only(family: str) -> None:
    """bfloat16, where shapes change the last bits: most rows are those of plain decoding, and where
    one first differs, the two tokens were nearly tied. A verifier that keeps what it should not,
    hidden behind "it is only rounding"."""
    script = half_world(family)[1]
    drafters = [
        make_drafter(
            name, {"recent": 2, "blocks": 1, "block_size": 2} if name == "kv-subset" else {}
        )
        for name in HALF
    ]
    gaps = [gap for each in [*drafters, ScriptedTree(script)] for gap in gaps_of(family, each)]
    assert gaps.count(0.0) >= 0.5 * len(gaps), f"match rate {gaps.count(0.0)} of {len(gaps)} rows"
    assert max(gaps) < NEAR, f"first differences that are no near-ties: {sorted(gaps)[-3:]}"


def test_rounding_that_depends_on_shape_makes_near_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a machine's kernels happen to be stable the test above compares equal rows only; here
    blocks round otherwise than single tokens do, and what differs must be found, and found to be
    small."""
    script = half_world("llama")[1]
    head, noise = (
        LayeredModel.head,
        0.01 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)),
    )
    monkeypatch.setattr(
        LayeredModel,
        "head",
        lambda model, x: head(model, x) * (1 + noise.to(x.dtype) * (len(x) > len(PROMPTS))),
    )
    gaps = gaps_of("llama", ScriptedDrafter(script))
    assert 0 < max(gaps) < NEAR


def test_what_is_no_near_tie_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the bound: a verifier that keeps every draft."""
    script = half_world("llama")[1]
    monkeypatch.setattr(keeping, "accepted_path", keep_everything)
    assert max(gaps_of("llama", ScriptedDrafter(script, wrong_every=3))) > NEAR


# ------------------------------------------------------------------------------- the suite can fail


def keep_everything(tree: Tree, choices: Sequence[int]) -> list[int]:
    path = [0]
    for node in range(1, len(tree)):
        if tree.parents[node] == path[-1]:
            path.append(node)
    return path


def see_everything(layout: TokenLayout) -> TokenLayout:
    """A tree whose branches see each other."""
    firsts = [span.first for span in layout.spans for _ in range(span.count)]
    slots = layout.slots.tolist()
    return replace(
        layout,
        ancestors=tuple(
            tuple(range(first, slot + 1)) for first, slot in zip(firsts, slots, strict=True)
        ),
    )


def keep_without_looking(row: Row, tokens: Sequence[int]) -> tuple[RowState, list[int]]:
    """Looks for the end of a sequence at the last token of a block only."""
    watched = row.request
    row.request = replace(watched, eos=frozenset())
    state, kept = original_after(row, tokens)
    row.request = watched
    return (replace(state, finish="eos") if kept[-1] in watched.eos else state), kept


original_after, original_trees = Row.after, TokenLayout.trees
THIRD, TREE = DRAFTERS["scripted"][2:]
BREAKS: dict[str, tuple[str, Make, Callable[[pytest.MonkeyPatch], None]]] = {
    "a verifier that keeps every draft": (
        "greedy",
        THIRD,
        lambda patch: patch.setattr(keeping, "accepted_path", keep_everything),
    ),
    "no rollback": (
        "cache",
        THIRD,
        lambda patch: patch.setattr(KVCache, "rollback", lambda *_: None),
    ),
    "an accepted path that is not moved": (
        "cache",
        TREE,
        lambda patch: patch.setattr(
            KVCache, "keep", lambda cache, row, first, path: cache.rollback(row, first + len(path))
        ),
    ),
    "branches that see each other": (
        "greedy",
        TREE,
        lambda patch: patch.setattr(
            TokenLayout,
            "trees",
            classmethod(lambda cls, *args: see_everything(original_trees(*args))),
        ),
    ),
    "an end of sequence that is overrun": (
        "eos",
        DRAFTERS["scripted"][0],
        lambda patch: patch.setattr(Row, "after", keep_without_looking),
    ),
    "penalties that do not see drafts": (
        "penalties",
        DRAFTERS["scripted"][0],
        lambda patch: patch.setattr(Contexts, "__getitem__", lambda contexts, node: contexts._text),
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_broken_engine_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a suite that passes on a broken verifier, mask or rollback proves
    nothing."""
    name, make, damage = BREAKS[fault]
    case = Case(make, world("llama"), make_controller("fixed", {"tokens": 5}), range(4))
    # what is right, before it is broken
    (case.world.reference(0), case.world.plain(case.rows, **PENALISED))
    CHECKS[name](case)
    damage(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[name](case)


def test_stale_exit_states_are_caught() -> None:
    """States are the one thing the engine takes from a drafter unseen; those of another token must
    show in the text."""

    @dataclass(frozen=True)
    class Stale(Drafter, DraftSession):
        name = "stale"
        inner: Any

        def start(self, target: Target) -> DraftSession:
            return Stale(self.inner.start(target))

        def admit(self, *arguments: Any) -> None:
            self.inner.admit(*arguments)

        def propose(
            self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget
        ) -> Sequence[Draft]:
            drafts = self.inner.propose(rows, texts, budget)
            return [
                replace(draft, exits=replace(draft.exits, states=draft.exits.states.flip(0)))
                if draft.exits
                else draft
                for draft in drafts
            ]

    case = Case(
        lambda *_: Stale(make_drafter("early-exit", {"layer": 2})),
        world("llama"),
        make_controller("fixed", {"tokens": 5}),
        range(4),
    )
    with pytest.raises(AssertionError, match="other tokens than plain decoding"):
        check_greedy(case)
