"""dynamic-exit: tokens of a draft leave at different layers, no layer runs twice for any of them,
and what is written is the model's own."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from selfspec import LLM, OptionError, SamplingParams
from selfspec.control.fixed import FixedLength
from selfspec.core.contract import Budget
from selfspec.core.sampling import row_samplers
from selfspec.draft.base import Target
from selfspec.draft.entries import Known
from selfspec.draft.from_layers.dynamic_exit import DynamicExit
from selfspec.draft.from_models.draft_head import DraftHead
from selfspec.draft.naming import start_naming
from selfspec.draft.registry import make_drafter
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.exits.stairs import Stairs
from selfspec.lossy import SpecEE
from selfspec.model.compute.cache import KVCache
from selfspec.model.compute.cpu.choosing import likeliest
from selfspec.model.compute.hidden_states import StateCollector
from selfspec.model.copies import copy_in
from selfspec.testing import (
    near_identity_model,
    tiny_head,
    tiny_llm,
    tiny_predictors,
    tiny_tokenizer,
)
from selfspec.trained.files import TrainedPart
from sessions import begin

PROMPTS = [list(b"once upon a time, once upon"), [7, 9], list(b"aXb aXb aXb a")]
LAYERS = 8


@functools.cache
def llm() -> LLM:
    """Its later layers change little: exits are often right, and often wrong."""
    return LLM.from_pretrained(near_identity_model(0.6, seed=2), tokenizer=tiny_tokenizer())


def drafter(**options: Any) -> DynamicExit:
    part = tiny_predictors(llm().model, candidates=7, seed=3)
    return DynamicExit(**{"part": part, "schedule": "all", "threshold": 0.4, **options})


def at_work(drafts: int = 6, new: int = 40, **options: Any) -> Generation:
    how = {"drafter": drafter(**options), "controller": FixedLength(drafts)}
    samplers = row_samplers(None, PROMPTS, ())
    requests = [Request(*each, new, **how) for each in zip(PROMPTS, samplers, strict=True)]
    return Generation(llm().model, requests)


def test_no_layer_runs_twice_and_tokens_resume_where_they_left(monkeypatch: Any) -> None:
    """A token that is verified from layer 0, or from its neighbour's layer; one that is caught up
    and run again. Lucky if all leave at one layer, so that they differ is looked at."""
    plain = [r.tokens for r in llm().generate(PROMPTS, max_new_tokens=40, eos=[], draft=None)]
    generation = at_work()
    rows = list(generation.rows)
    seen = watched(generation, monkeypatch)
    for _ in generation:
        pass
    for row, prompt, expected in zip(rows, PROMPTS, plain, strict=True):
        assert row.tokens == [*prompt, *expected]
        nodes = len(prompt) + row.stats.decoded + row.stats.drafted - row.stats.accepted
        computed = generation.cache.computed[row.slot].tolist()
        assert computed == [nodes] * LAYERS, "a layer ran twice for a token, or not at all"
    assert all(layers == sorted(layers, reverse=True) for layers in seen)
    assert any(len({*layers}) > 1 for layers in seen), "all tokens left at one layer"
    assert sum(row.stats.accepted for row in rows) > 10


@pytest.mark.zeros
def test_stale_states_are_caught(monkeypatch: Any) -> None:
    """The negative control: without catching up, a deeper token reads entries that are not there,
    and either the cache complains or the text changes."""

    def alone(self: Stairs, rows: Any, start: int, stop: int) -> None:
        for row in rows:
            stair = self[row]
            for at, layer in enumerate(stair.layers[:-1]):
                if layer == start:
                    stair.layers[at] = stop  # says so, and does not run it
            first = stair.first + len(stair.layers) - 1
            for each in range(start, stop):
                self._cache._lengths[row][each] = max(first, self._cache._lengths[row][each])
        original(self, rows, start, stop)

    plain = [r.tokens for r in llm().generate(PROMPTS, max_new_tokens=40, eos=[], draft=None)]
    original = Stairs._run
    monkeypatch.setattr(Stairs, "_run", alone)
    generation = at_work()
    rows = list(generation.rows)
    for _ in generation:
        pass
    found = [row.tokens[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]
    assert found != plain, "nothing had to be caught up with, so nothing is shown"


def test_a_draft_ends_where_nothing_fires() -> None:
    """A stop rule that guesses all the same, or that throws away the layers that were run."""
    session: Any = begin(drafter(threshold=1 - 1e-9), llm().model, PROMPTS, read=True)
    drafts = session.propose([0, 1, 2], PROMPTS, Budget([5, 5, 5]))
    assert all(not draft.guesses for draft in drafts)
    ran = [draft.exits.layers for draft in drafts if draft.exits is not None]
    assert [7] in ran, "the last token's layers were run and are not handed on"
    for layers in ran:
        assert len(layers) == 1


def watched(generation: Generation, monkeypatch: Any) -> list[list[int]]:
    """The layers at which each draft's tokens stand, as drafts are made."""
    session: Any = generation._groups.all[0].session
    propose, seen = session.propose, list[list[int]]()

    def watching(*arguments: Any) -> Any:
        drafts = propose(*arguments)
        seen.extend(list(draft.exits.layers) for draft in drafts if draft.exits is not None)
        return drafts

    monkeypatch.setattr(session, "propose", watching)
    return seen


def test_one_layer_is_a_fixed_exit_with_a_stop_rule(monkeypatch: Any) -> None:
    """`layers` that are looked at beside those that were asked for."""
    generation = at_work(layers=(5,), threshold=1e-9)
    seen = watched(generation, monkeypatch)
    for _ in generation:
        pass
    assert {layer for layers in seen for layer in layers} == {5}
    assert generation.stats.drafted > 0 and max(map(len, seen)) > 1


def test_deepest_bounds_where_is_looked() -> None:
    """A share of the layers that is taken of the predictors, or not at all."""
    session: Any = begin(drafter(deepest=0.5), llm().model, PROMPTS, read=True)
    drafts = session.propose([0, 1, 2], PROMPTS, Budget([5, 5, 5]))
    assert max(layer for d in drafts if d.exits for layer in d.exits.layers) <= LAYERS // 2


def test_rows_do_not_change_each_others_drafts() -> None:
    """Where a row's token leaves depends on the rows beside it: drawn drafts would then change a
    seed's text."""
    rows = list(range(len(PROMPTS)))
    together: Any = begin(drafter(), llm().model, PROMPTS, read=True)
    found = together.propose(rows, PROMPTS, Budget([6] * 3))
    for row, prompt in enumerate(PROMPTS):
        alone: Any = begin(drafter(), llm().model, [prompt], read=True)
        own = alone.propose([0], [prompt], Budget([6]))[0]
        assert list(own.guesses) == list(found[row].guesses), f"row {row}"
        if own.exits is not None:
            assert list(own.exits.layers) == list(found[row].exits.layers)
            assert torch.equal(own.exits.states, found[row].exits.states)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a layer without a predictor": ({"layers": (9,)}, "no predictor after layer 9"),
    "no candidates": ({"candidates": "jacobi"}, "names no choice of next tokens"),
    "an unknown source": ({"candidates": "recycel"}, "recycle"),
    "a certain threshold": ({"threshold": 1.0}, "no chance that could be reached and missed"),
    "an unknown schedule": ({"schedule": "sometimes"}, "use all, offline, online, both"),
    "nothing to look at": ({"deepest": 0.05}, "leaves no layer"),
    "no share": ({"deepest": 0}, "no share of the layers"),
    "a pickle": ({"part": "predictors.pt"}, "pickled file"),
    "no such folder": ({"part": "nowhere"}, "is no part"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_explained(name: str) -> None:
    """An error from inside a tensor operation, or an option that is silently useless."""
    options, words = WRONG[name]
    with pytest.raises(OptionError, match=words):
        llm().generate(PROMPTS, max_new_tokens=4, draft=drafter(**options))


def test_without_predictors_the_way_to_them_is_named() -> None:
    """A model for which none come with the package."""
    with pytest.raises(OptionError, match="selfspec fit-exits MODEL"):
        llm().generate(PROMPTS, max_new_tokens=4, draft="dynamic-exit")


# --------------------------------------------------------------------------------------- candidates


@pytest.mark.parametrize("source", ["recycle", "ngram", "hybrid"])
def test_candidates_are_distinct_and_likeliest_first(source: str) -> None:
    """A token named twice, so that softmax counts it twice, or the unlikeliest first."""
    model = tiny_llm(seed=4).model
    text = [1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 2]
    session = start_naming(source, Target(model, model.new_cache(1)))
    session.admit(0, text, row_samplers(None, [text], ())[0])
    named = session.named([0], [text], 3)[0]
    assert set(named[:2]) == {3, 4} and named[0] == 4 and len({*named}) == len(named)


def test_a_copy_names_what_it_says_behind_every_text() -> None:
    """Entries of rejected tokens that a copy still reads, a row's text in another's slot, or a copy
    that writes into the model's cache. By hand: the copy reads each text from its beginning."""
    model = llm().model
    target = Target(model, model.new_cache(2))
    session, copy = start_naming("quantised", target), copy_in(model, "auto")
    for row, prompt in enumerate(PROMPTS[:2]):
        session.admit(row, prompt, row_samplers(None, [prompt], ())[0])
    texts = [PROMPTS[0], PROMPTS[1]]
    for grown in ([[5], [6]], [[5, 8, 9], [6, 7]], [[5, 8, 10, 11], [6]], [[4], [6, 3, 3]]):
        behind = [[*text, *more] for text, more in zip(texts, grown, strict=True)]
        found = session.named([0, 1], behind, 5)
        for text, named in zip(behind, found, strict=True):
            cache = copy.new_cache(1)
            logits = copy.forward(torch.tensor(text), cache, cache.layout([len(text)]))
            assert list(named) == likeliest(logits[-1:], 5)[0].tolist()
    assert int(target.cache.lengths.max()) == 0


@pytest.mark.parametrize("source", ["recycle", "ngram", "hybrid", "quantised"])
def test_any_of_them_names_for_exits(source: str) -> None:
    """A source that names nothing once tokens leave early, or that changes what is written."""
    call: dict[str, Any] = {"max_new_tokens": 30, "eos": []}
    plain = [r.tokens for r in llm().generate(PROMPTS, draft=None, **call)]
    found = llm().generate(PROMPTS, draft=drafter(candidates=source, threshold=0.3), **call)
    assert [r.tokens for r in found] == plain
    assert sum(r.stats.accepted for r in found) > 0
    lossy = SpecEE(drafter().part, schedule="all", threshold=0.4, candidates=source)
    results = lossy.generate(llm(), PROMPTS, **call)
    assert min(result.average_layers for result in results) < LAYERS


TAPS = {"of all layers": (1, 4, 7), "of those that drafts run": (0, 1), "of the last": (7,)}


@functools.cache
def head(taps: str = "of all layers") -> TrainedPart:
    """It says the few tokens that the model says most: others would name nothing that is right."""
    answers = llm().generate(PROMPTS, max_new_tokens=40, eos=[], draft=None)
    often = Counter(token for answer in answers for token in answer.tokens).most_common(8)
    said = sorted(token for token, _ in often)
    return tiny_head(llm().model, seed=5, layers=TAPS[taps], vocabulary=said)


def test_a_head_names_what_it_would_draft() -> None:
    """Candidates behind a text that is not the one asked for: entries of rejected guesses, a guess
    read twice or not at all, a row's output for another's. By hand: the chain that the head drafts
    is, step by step, the first of its candidates."""
    model, sessions = llm().model, list[Any]()
    for _ in range(2):
        sessions.append(session := begin(DraftHead(head()), model, PROMPTS))
        before, cache = [prompt[:-1] for prompt in PROMPTS], session.target.cache
        model.prefill(before, cache, collectors=session.collectors)
    drafting, naming = sessions
    drafts = drafting.propose([0, 1, 2], PROMPTS, Budget([4, 4, 4]))
    texts = [list(prompt) for prompt in PROMPTS]
    for at in range(4):
        rows = [0, 1, 2] if at < 3 else [2, 0]  # the others have left
        named = naming.named(rows, [texts[row] for row in rows], 5)
        for row, some in zip(rows, named, strict=True):
            assert some[0] == drafts[row].guesses[at] and len({*some}) == 5
            texts[row].append(some[0])
    other = [[*text, 3, 4] for text in PROMPTS]  # two tokens that nobody named for
    assert naming.named([0, 1, 2], other, 5) == [[], [], []]


@pytest.mark.parametrize("taps", TAPS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_head_reads_the_states_of_tokens_that_left(taps: str, temperature: float) -> None:
    """States of a token that left early which are another layer's, or missing: its head would begin
    anew in every round. They are compared with a pass of the whole text."""
    sampling = SamplingParams(temperature=temperature, seed=3) if temperature else None
    how = {
        "drafter": drafter(candidates="draft-head", head=head(taps), threshold=0.3),
        "controller": FixedLength(5),
    }
    samplers = row_samplers(sampling, PROMPTS, ())
    requests = [Request(*each, 40, **how) for each in zip(PROMPTS, samplers, strict=True)]
    generation = Generation(llm().model, requests)
    session: Any = generation._groups.all[0].session
    entries, seen = session._naming._entries, dict[int, list[Any]]()
    for row, known in entries._known.items():
        seen[row] = []
        add = known.add
        known.add = lambda first, states, row=row, add=add: (
            seen[row].append((first, states)),
            add(first, states),
        )
    rows = list(generation.rows)
    for _ in generation:
        pass
    model, layers = llm().model, TAPS[taps]
    assert sum(row.stats.accepted for row in rows) > 5
    for number, row in enumerate(rows):
        ids, taken = torch.tensor(row.tokens), StateCollector(layers)
        cache = model.new_cache(1)
        layout = cache.layout([len(ids)])
        model.run(model.embed(ids), model.full_plan, cache, layout, collectors=[taken])
        ((_, whole),) = taken.take()
        end = 0
        for first, states in seen[number]:
            assert first == end, "states of some tokens never came"
            end = first + len(states)
            torch.testing.assert_close(states, whole[first:end], rtol=1e-4, atol=1e-5)
        assert end >= len(ids) - 7


def test_a_head_names_for_exits_and_changes_no_text() -> None:
    """A source that names nothing once tokens leave early, or that changes what is written."""
    call: dict[str, Any] = {"max_new_tokens": 30, "eos": []}
    how = drafter(candidates="draft-head", head=head(), threshold=0.3)
    for sampling in (None, SamplingParams(temperature=0.9, seed=5)):
        drawn: dict[str, Any] = {"sampling": sampling}
        plain = [r.tokens for r in llm().generate(PROMPTS, draft=None, **drawn, **call)]
        found = llm().generate(PROMPTS, draft=how, **drawn, **call)
        assert [r.tokens for r in found] == plain
        assert sum(r.stats.drafted for r in found) > 0


@pytest.mark.parametrize("fill", ["caught-up", "state", "holes"])
def test_a_head_names_for_lossy_exits(fill: Any) -> None:
    """States of skipped layers which are not those that the token left with, those of layers that
    it ran which are others, or of another row; a head that names nothing once tokens leave."""
    first, last = 2, 5  # the taps are layers 1, 4 and 7
    seen: list[tuple[int, torch.Tensor]] = []
    add, taken = Known.add, drafter().part
    how = {"candidates": "draft-head", "head": head(), "layers": (first, last), "schedule": "all"}

    def adding(known: Known, begin: int, states: torch.Tensor) -> None:
        seen.append((begin, states))
        add(known, begin, states)

    call: dict[str, Any] = {"max_new_tokens": 30, "eos": []}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Known, "add", adding)
        result = SpecEE(taken, threshold=0.3, fill=fill, **how).generate(llm(), PROMPTS[0], **call)
    assert {first, last} & {*result.exits[1:]} and LAYERS in result.exits[1:]
    (_, prompt), *others = seen
    states = torch.cat([prompt, *(each for _, each in others)])
    assert [begin for begin, _ in others] == [len(PROMPTS[0]) + at for at in range(len(others))]
    for token, exit_layer in enumerate(result.exits[1:][: len(others)], len(PROMPTS[0])):
        low, middle, high = states[token]
        assert low.equal(middle) == (exit_layer == first)
        assert middle.equal(high) == (exit_layer < LAYERS)
    never = SpecEE(taken, threshold=0.999999, fill=fill, **how).generate(llm(), PROMPTS, **call)
    assert [each.tokens for each in never] == [
        each.tokens for each in llm().generate(PROMPTS, draft=None, **call)
    ]


def test_heads_that_cannot_name_are_refused() -> None:
    """A head beside a drafter that reads none, and trees, in which a head has no text to read."""
    part = drafter().part
    with pytest.raises(OptionError, match="read no head"):
        SpecEE(part, candidates="ngram", head=head()).generate(llm(), PROMPTS)
    with pytest.raises(OptionError, match=r"tree=4 .*'draft-head'.*tree=0"):
        SpecEE(part, candidates="draft-head", head=head(), fill="state", tree=4).generate(
            llm(), PROMPTS
        )


def test_only_drafters_with_entries_of_their_own_name_candidates() -> None:
    """A drafter that runs layers would write over the entries of the tokens that it names for."""
    model = tiny_llm(seed=4).model
    target = Target(model, KVCache((4, 1, 2, 16), 8, torch.float32, torch.device("cpu")))
    for name in ("early-exit", "layer-skip", "draft-model"):
        with pytest.raises(OptionError, match="names no choice of next tokens"):
            start_naming(name, target)


# ------------------------------------------------------------------------------ rows come and go


@pytest.mark.parametrize("seed", range(3))
def test_rows_come_and_go(seed: int) -> None:
    """A row that is given another's slot, and with it its stair, its exits or its candidates; rows
    beside it that are drafted for otherwise, or end in the middle."""
    dice, model = random.Random(seed), llm().model
    drafters = [drafter(), drafter(schedule="both"), make_drafter("recycle", {}), None]
    waiting = []
    for number in range(9):
        prompt = [dice.randrange(3, 250) for _ in range(dice.choice([2, 7, 20]))]
        sampling = SamplingParams(temperature=0.8, seed=number) if dice.random() < 0.5 else None
        how = drafters[dice.randrange(4)]
        new, stays = dice.randint(3, 30), dice.random() < 0.7
        (sampler,) = row_samplers(sampling, [prompt], ())
        controller = FixedLength(dice.randint(1, 6)) if how else None
        waiting.append((Request(prompt, sampler, new, drafter=how, controller=controller), stays))
    generation, live = Generation(model, rows=3), list[Any]()
    written: list[tuple[Request, list[int]]] = []
    while waiting or live:
        while waiting and len(live) < 3 and dice.random() < 0.6:
            request, stays = waiting.pop()
            live.append((generation.admit(request), stays, dice.randint(1, 6)))
        if not live:
            continue
        generation.step()
        for each in list(live):
            row, stays, rounds = each
            leaves = not stays and row in generation.rows and row.stats.rounds >= rounds
            if leaves:
                generation.retire(row)
            if leaves or row not in generation.rows:
                live.remove(each)
                written.append((row.request, row.tokens[len(row.request.prompt) :]))
    assert len(written) == 9
    for request, tokens in written:
        alone = Generation(model, [replace(request, drafter=None, controller=None)])
        (row,) = alone.rows
        for _ in alone:
            pass
        assert row.tokens[len(request.prompt) :][: len(tokens)] == tokens
