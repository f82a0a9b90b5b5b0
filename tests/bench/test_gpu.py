"""`scripts/bench plain --device cuda`, on a CPU with a tiny shape: everything but the card."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.command import run_command
from benchmarks.plain import gpu as gpu_module
from benchmarks.plain.__main__ import plain, tables_of
from benchmarks.plain.gpu import GpuOptions, GpuRun, Standing
from benchmarks.plain.gpu_report import floor_seconds, markdown, measure, summary
from selfspec.bench.schema import read, write
from selfspec.errors import OptionError, ResourceError
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_model

OPTIONS = GpuOptions(
    "tiny",
    "cpu",
    batches=(1, 2),
    contexts=(8, 12),
    verify_tokens=(1, 3),
    rounds=1,
    steps=1,
    new_tokens=4,
    peers=False,
)


original_bandwidth = gpu_module.copy_bandwidth


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_module, "copy_bandwidth", lambda device, size: [1e9, 2e9])
        yield


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> GpuRun:
    target = tmp_path_factory.mktemp("gpu") / "gpu.json"
    assert measure(OPTIONS, target, quiet) == target and not list(
        target.parent.glob("*.partial.json")
    )
    return read(GpuRun, target)


def test_every_cell_is_measured(result: GpuRun) -> None:
    """A cell that is left out, or labelled as another."""
    cells = [(batch, context) for batch in (1, 2) for context in (8, 12)]
    assert [(each["batch"], each["context"]) for each in result.steps] == cells
    assert [(each["batch"], each["context"], each["tokens"]) for each in result.verify] == [
        (*cell, tokens) for cell in cells for tokens in (1, 3)
    ]
    assert [(each["batch"], each["way"]) for each in result.rounds] == [
        (batch, way) for batch in (1, 2) for way in ("plain", "scripted", "early-exit")
    ]
    assert all(
        each["same_tokens"] and min(each["recorded"] + each["eager"]) > 0 for each in result.steps
    )
    assert result.complete and not result.notes and result.card and result.kind == "gpu"


def test_drafts_that_are_right_save_rounds(result: GpuRun) -> None:
    """A scripted drafter whose script belongs to other prompts: its rounds would say nothing."""
    ways = {(each["batch"], each["way"]): each for each in result.rounds}
    for batch in (1, 2):
        assert ways[batch, "plain"]["tokens_per_verification"] == 1
        assert ways[batch, "scripted"]["tokens_per_verification"] > 1
        assert ways[batch, "plain"]["tokens"] == ways[batch, "scripted"]["tokens"] == 3 * batch
        assert all(not ties["wrong"] for ties in ways[batch, "early-exit"]["ties"].values())


def test_the_floor_is_what_must_be_read(result: GpuRun) -> None:
    """Bytes counted for one row, for keys alone, or over the slowest copy: shares above 100%, or
    flattering ones."""
    config = gpu_module.SHAPES["tiny"]
    weights = 2 * (
        259 * 64 + 4 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * config["intermediate_size"])
    )
    assert result.weight_bytes == weights and result.kv_bytes == 2 * 4 * 32 * 2
    assert floor_seconds(result, 2, 12) == pytest.approx((weights + 2 * 13 * 512) / 2e9)
    slow = [2 * floor_seconds(result, 1, 8)]
    fast = replace(result, steps=[{**result.steps[0], "recorded": slow}])
    assert summary(fast)["share_of_floor"] == {"1x8": 0.5}


def test_tables_come_from_the_file(result: GpuRun, tmp_path: Path) -> None:
    """A result that cannot be shown again, or a difference in tokens that the table hides."""
    write(result, tmp_path / "gpu.json")
    shown = tables_of(tmp_path / "gpu.json")
    assert (
        shown.strip() == markdown(result).strip() and "verify(3)" in shown and "early-exit" in shown
    )
    assert "NO" not in shown
    steps = [{**result.steps[0], "same_tokens": False}]
    changed = replace(result, steps=steps, notes=["left out"])
    assert (
        "NO" in markdown(changed)
        and markdown(changed).endswith("left out")
        and not summary(changed)["same_tokens"]
    )


def test_recordings_that_change_tokens_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The negative control of `same_tokens`: eager steps that are not those which were recorded."""
    standing = Standing.written
    monkeypatch.setattr(
        Standing,
        "written",
        lambda self, tokens: [*standing(self, tokens), [int(self.model.steps.runner.paused)]],
    )
    options = replace(OPTIONS, batches=(1,), contexts=(8,), verify_tokens=(1,))
    assert not read(GpuRun, measure(options, tmp_path / "gpu.json", quiet)).steps[0]["same_tokens"]


def test_what_does_not_fit_is_noted_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One cell too large for the card that takes the others with it; or time that runs out without
    a word."""
    whole = gpu_module.GpuBenchmark._cell

    def cell(self: Any, model: LayeredModel, batch: int, context: int) -> None:
        if (batch, context) == (1, 12):
            raise ResourceError("keys and values take 99 GB")
        whole(self, model, batch, context)

    monkeypatch.setattr(gpu_module.GpuBenchmark, "_cell", cell)
    result = read(GpuRun, measure(replace(OPTIONS, batches=(1,)), tmp_path / "gpu.json", quiet))
    assert (
        result.notes == ["steps, batch 1, context 12: keys and values take 99 GB"]
        and len(result.steps) == 1
    )
    late = read(GpuRun, measure(replace(OPTIONS, minutes=-1), tmp_path / "late.json", quiet))
    assert (
        not late.steps
        and not late.complete
        and "the time was up: rounds, batch 2" in late.notes[-1]
    )
    assert markdown(late)


def test_peers_run_or_say_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose failure ends the run, or one that is timed with its prefill."""
    from transformers import LlamaForCausalLM

    original = LlamaForCausalLM.generate

    def generate(self: Any, *arguments: Any, **options: Any) -> Any:
        if options["cache_implementation"] == "static":
            raise RuntimeError("no compiler\nand more")
        return original(self, *arguments, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    options = replace(OPTIONS, peers=True, minutes=1, batches=(1,), contexts=(8,))
    first, second = read(GpuRun, measure(options, tmp_path / "gpu.json", quiet)).peers
    assert len(first["seconds"]) == 2 and "failure" not in first
    assert second["failure"] == "no compiler"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": "llama-2-7"}, "did you mean 'llama-2-7b'"),
        ({"dtype": "int8"}, "dtype='int8' is not known"),
        ({"contexts": (500,)}, "needs 564 positions and tiny has 512"),
        ({"batches": (0,)}, "start at 1"),
        ({"new_tokens": 1}, "start at 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(change: dict[str, Any], message: str) -> None:
    """Minutes spent on making a model before the mistake is noticed."""
    with pytest.raises(OptionError, match=message):
        replace(OPTIONS, **change).check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's own error about drivers, after a model was made on the CPU."""
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        run_command(plain)
    assert ended.value.code == 1 and "Use --device cpu --shape tiny" in capsys.readouterr().err


def test_copying_counts_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bandwidth of bytes read only, which makes every share twice as good."""
    ticks = iter(range(100))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))  # of that module alone
    monkeypatch.setattr(gpu_module, "time", clock)
    assert original_bandwidth(torch.device("cpu"), 1000, 3) == [4 * 2 * 1000.0] * 3


def test_eagerly_means_without_recordings() -> None:
    """The comparison of a thing with itself."""
    model = from_transformers(tiny_model(), kernel="static", check=False)
    assert not model.steps.runner.paused
    with model.steps.eagerly():
        assert model.steps.runner.paused
    assert not model.steps.runner.paused


@pytest.mark.gpu
def test_on_a_card_steps_are_recorded_and_change_nothing(tmp_path: Path) -> None:
    """The whole benchmark with real graphs, at a size that takes seconds."""
    options = replace(OPTIONS, device="cuda", contexts=(8, 300), steps=4, new_tokens=16, peers=True)
    result = read(GpuRun, measure(options, tmp_path / "gpu.json", quiet))
    assert summary(result)["same_tokens"] and result.recorded.startswith("yes") and result.complete
