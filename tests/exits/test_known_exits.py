"""A model whose every token settles after a known number of layers: predictors find these layers,
and drafts that leave there need fewer layers than any fixed exit."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import LLM, OptionError
from selfspec.draft.auto import Auto
from selfspec.draft.from_layers import dynamic_exit
from selfspec.draft.from_layers.dynamic_exit import DynamicExit
from selfspec.lossy import SpecEE
from selfspec.model.compute.cache import KVCache
from selfspec.model.compute.plan import LayerPlan
from selfspec.testing import settling_model, tiny_tokenizer
from selfspec.train.exit_fitting import FitOptions
from selfspec.train.exit_samples import SampleOptions
from selfspec.train.fit_exits import ExitReport, fit_exits
from selfspec.train.own_text import Question
from selfspec.tune.options import Setting, TuneOptions
from selfspec.tune.run import Tuning

LAYERS, DEPTHS = 12, (3, 5, 8)
CALL: dict[str, Any] = {"max_new_tokens": 60, "eos": []}


@functools.cache
def llm() -> LLM:
    return LLM.from_pretrained(settling_model(DEPTHS, LAYERS), tokenizer=tiny_tokenizer())


def prompts(first: int, count: int) -> list[list[int]]:
    dice = random.Random(0)
    made = [[dice.randrange(3, 250) for _ in range(6)] for _ in range(first + count)]
    return made[first:]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: Any) -> tuple[Path, ExitReport]:
    folder = tmp_path_factory.mktemp("exits")
    asked = [Question("", ids, "known", number) for number, ids in enumerate(prompts(0, 40))]
    taking = SampleOptions(samples=1500, batch=8, max_new_tokens=60)
    options = FitOptions(hidden=64, epochs=15)
    return folder, fit_exits(llm(), lambda _: asked, folder, taking, options)


def test_the_construction_holds() -> None:
    """A model that settles elsewhere than it says would make the tests below mean nothing."""
    model, (prompt,) = llm().model, prompts(0, 1)
    text = [*prompt, *llm().generate(prompt, draft=None, **CALL).tokens]
    cache = model.new_cache(1)
    x, layout, said = model.embed(torch.tensor(text)), cache.layout([len(text)]), []
    for layer in range(LAYERS):
        x = model.run(x, LayerPlan(layer, layer + 1), cache, layout)
        said.append(model.head(x).argmax(-1))
    stays = (torch.stack(said) == said[-1]).flip(0).int().cumprod(0).sum(0)
    settles = [LAYERS - each + 1 for each in stays.tolist()]
    assert settles == [DEPTHS[token % len(DEPTHS)] for token in text]
    assert {*settles} == {*DEPTHS}


def test_predictors_save_what_the_oracle_saves(fitted: tuple[Path, ExitReport]) -> None:
    """Predictors of a layer beside it, features of another layer than they were fitted to, or exits
    whose next token reads other keys: less is saved, or the text is not the model's. Lucky where
    all tokens leave at one layer, so where they leave is looked at."""
    folder, report = fitted
    asked = prompts(40, 8)
    plain = [result.tokens for result in llm().generate(asked, draft=None, **CALL)]
    found = SpecEE(folder, schedule="all").generate(llm(), asked, **CALL)
    same = [
        a == b for r, p in zip(found, plain, strict=True) for a, b in zip(r.tokens, p, strict=True)
    ]
    exits = [layer for result in found for layer in result.exits[1:]]
    oracle = report.summary["oracle_layers"]
    assert oracle < LAYERS - 4 and {*DEPTHS} <= {*exits}
    assert (LAYERS - sum(exits) / len(exits)) / (LAYERS - oracle) >= 0.8
    assert sum(same) / len(same) >= 0.99


def test_a_schedule_asks_less_and_saves_nearly_as_much(fitted: tuple[Path, ExitReport]) -> None:
    """A schedule that looks everywhere, or nowhere near the exits."""
    asked = prompts(40, 8)
    everywhere, both = (
        SpecEE(fitted[0], schedule=level).generate(llm(), asked, **CALL)
        for level in ("all", "both")  # type: ignore[arg-type]
    )
    layers = [sum(r.average_layers for r in some) / len(some) for some in (everywhere, both)]
    assert both[0].looking.looks < everywhere[0].looking.looks
    assert layers[1] < layers[0] + 0.5


def test_paths_of_trees_leave_where_they_settle(fitted: tuple[Path, ExitReport]) -> None:
    """Trees that run to the end because some guess nobody follows does, or words that are kept
    before their path has settled."""
    asked = prompts(40, 4)
    plain = [result.tokens for result in llm().generate(asked, draft=None, **CALL)]
    how = SpecEE(fitted[0], schedule="all", fill="state", tree=4)
    found = how.generate(llm(), asked, **CALL)
    same = [
        a == b for r, p in zip(found, plain, strict=True) for a, b in zip(r.tokens, p, strict=True)
    ]
    assert sum(same) / len(same) >= 0.99
    assert sum(result.average_layers for result in found) / len(found) < LAYERS - 2
    assert sum(result.stats.accepted for result in found) > 20


@pytest.mark.parametrize("drafts", [3, 5])
def test_dynamic_exits_need_fewer_layers_than_fixed_ones(
    fitted: tuple[Path, ExitReport], drafts: int, monkeypatch: Any
) -> None:
    """A layer that runs twice for a token, tokens that all go as deep as the deepest, or
    verification that begins below where a token left."""
    read, advance = [0], KVCache.advance

    def counted(self: KVCache, layout: Any, layers: tuple[int, ...]) -> None:
        read[0] += len(layers)
        advance(self, layout, layers)

    monkeypatch.setattr(KVCache, "advance", counted)

    def layers_a_token(draft: str, options: dict[str, Any]) -> float:
        decoded, read[0] = 0, 0
        for prompt, expected in zip(asked, plain, strict=True):
            result = llm().generate(
                prompt, draft=draft, draft_options=options, control="fixed",
                control_options={"tokens": drafts}, **call,
            )  # fmt: skip
            assert result.tokens == expected
            decoded += result.stats.decoded
        return (read[0] - LAYERS * len(asked)) / decoded

    asked, call = prompts(40, 4), {**CALL, "max_new_tokens": 120}
    plain = [result.tokens for result in llm().generate(asked, draft=None, **call)]
    # between two depths an exit costs more and knows nothing more
    fixed = [layers_a_token("early-exit", {"layer": layer}) for layer in DEPTHS]
    dynamic = layers_a_token("dynamic-exit", {"part": fitted[0]})
    assert dynamic <= 0.9 * min(fixed), (dynamic, fixed)


def test_the_tuner_times_exits_by_predictors(
    fitted: tuple[Path, ExitReport], tmp_path: Path
) -> None:
    """Predictors that are given and never timed, a way that a profile cannot hold, or predictors of
    another model that fail in the middle of a turn."""
    tuning = Tuning(
        llm(),
        TuneOptions(minutes=0.1, max_new_tokens=24, search="none"),
        ["hello", "you", "there"],
        setting=Setting(drafters="exits", predictors=str(fitted[0])),
    )
    profile = tuning.run()
    (way,) = (way for way in tuning.found.ways if way.draft == "dynamic-exit")
    assert way.measured and way.draft_options == {"part": str(fitted[0])}
    profile.write(tmp_path / "profile.json")
    other = Tuning(
        LLM.from_pretrained(settling_model(DEPTHS, LAYERS, seed=1), tokenizer=tiny_tokenizer()),
        TuneOptions(minutes=0.1, max_new_tokens=24, search="none"),
        setting=Setting(drafters="exits", predictors=str(fitted[0])),
    )
    with pytest.raises(OptionError, match="another model"):
        other.run()


def test_auto_takes_exits_by_predictors_as_one_of_its_ways(
    fitted: tuple[Path, ExitReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate of auto that is left out silently, or that changes the text."""
    asked = prompts(40, 2)
    plain = [result.tokens for result in llm().generate(asked, draft=None, **CALL)]
    drafter, asked_for = Auto(candidates=[DynamicExit(part=fitted[0])]), list[Sequence[int]]()
    propose = dynamic_exit._Drafting.propose

    def heard(session: Any, rows: Sequence[int], texts: Any, budget: Any) -> Any:
        asked_for.append(rows)
        return propose(session, rows, texts, budget)

    monkeypatch.setattr(dynamic_exit._Drafting, "propose", heard)
    found = llm().generate(asked, draft=drafter, **CALL)
    assert [result.tokens for result in found] == plain
    assert asked_for, "nobody asked it for a draft"
