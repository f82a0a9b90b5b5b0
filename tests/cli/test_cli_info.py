"""`selfspec info`: facts about the model, and arithmetic on what was measured. Nothing here judges
how fast anything is."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from selfspec import LLM
from selfspec.bench import meters
from selfspec.cli.info import Bound, exactness, explanation, passes, reads, stored
from selfspec.model.compute.cpu import few_bits, native, tuning
from selfspec.model.compute.cpu.tuning import FewBits, Tuning


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reads 2 GB a second by its best way."""
    monkeypatch.setattr(
        meters, "read_bandwidth", lambda size: {"slow way": [1e9, 1.2e9], "best way": [1.9e9, 2e9]}
    )


def test_the_table_tells_what_the_model_is(run: Any, llm: LLM) -> None:
    """Catches facts of another model or field: each line is compared with the model's own."""
    text = run("info", "demo").stdout
    lines = {line[:18].strip(): line[18:].strip() for line in text.splitlines()}
    assert lines["family"] == "llama"
    assert lines["layers"].startswith("4 (8 halves")
    assert lines["parameters"] == f"{llm.info.parameters / 1e6:.1f} million"
    assert lines["context"] == "512 tokens"
    assert lines["kernel"] == llm.info.kernel
    assert lines["weights"].startswith(llm.info.weights)
    assert lines["passes"].startswith("not in one call" if llm.info.alone else "one call")
    assert lines["bit-exact"].startswith("yes" if llm.info.row_stable else "no")
    assert lines["memory bandwidth"].startswith("2.0 GB/s")


def test_json_has_the_same_facts(run: Any, llm: LLM) -> None:
    """The floor is bytes over the best bandwidth; an average over ways that are bound by something
    else would flatter us."""
    facts = json.loads(run("info", "demo", "--json").stdout)
    assert {name: facts[name] for name in dataclasses.asdict(llm.info)} == dataclasses.asdict(
        llm.info
    )
    assert facts["halves"] == 8
    assert facts["bound"]["floor_seconds"] == pytest.approx(llm.info.weight_bytes / 2e9)
    assert facts["bound"]["products_seconds"] > 0


def test_what_bounds_the_speed_follows_from_the_numbers() -> None:
    """Products near the floor mean that memory decides; far above it, arithmetic does, and drafting
    helps less."""
    memory = explanation(Bound(bytes_per_token=10**9, bandwidth=2e10, products_seconds=0.055))
    arithmetic = explanation(Bound(bytes_per_token=10**9, bandwidth=2e10, products_seconds=0.2))
    assert "under 50.0 ms" in memory and "Reading the weights is what takes the time" in memory
    assert "4.0x" in arithmetic and "arithmetic" in arithmetic


def test_exactness_is_not_promised_where_it_does_not_hold(llm: LLM) -> None:
    """The promise must follow row_stable and nothing else."""
    stable = dataclasses.replace(llm.info, row_stable=True)
    assert exactness(stable).startswith("yes")
    assert exactness(dataclasses.replace(stable, row_stable=False, dtype="bfloat16")).startswith(
        "no: bfloat16"
    )


def test_what_is_not_in_one_call_is_said_with_the_reason(llm: LLM) -> None:
    """A slow model whose owner is not told why."""
    alone = ["MLP of layer 3 (an adapter beside its weights)", "layers 1 to 2 (experts)"]
    mixed = dataclasses.replace(llm.info, kernel="native", alone=alone)
    assert passes(mixed) == f"not in one call: {alone[0]}; {alone[1]}"
    assert passes(dataclasses.replace(mixed, alone=[])) == "one call to our kernels"


def test_how_weights_are_stored_is_told_apart_by_who_computes(llm: LLM) -> None:
    """torch's bfloat16 taken for a kind of weights that our kernels have."""
    theirs = dataclasses.replace(llm.info, kernel="plain", weights="bfloat16")
    assert stored(theirs) == "bfloat16, as torch stores them"
    ours = dataclasses.replace(llm.info, kernel="native", weights="float32")
    assert stored(ours) == "float32, packed for our kernels"


def test_how_weights_are_read_is_said_of_each_kind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights in few bits what was chosen for float32, or anything of torch's products."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(tuning, "tuning", lambda _: Tuning(0, 32, 6))
    monkeypatch.setattr(few_bits, "reading", lambda: FewBits(near=False, quiet=True))

    def said(kernel: str, weights: str) -> str:
        return reads(dataclasses.replace(llm.info, kernel=kernel, weights=weights))

    assert said("native", "float32") == "asks 32 steps ahead, 6 rows share a read"
    assert said("native", "int8") == "asks the second cache ahead (few rows: not at all)"
    assert said("torch", "float32") == said("torch", "int8") == ""
    assert str(FewBits()) == "asks the first and the second cache ahead"
