"""What selfspec computes is what was recorded, bit for bit, in every variant of the kernels.

A change that keeps every promise we test (drafts equal plain decoding, blocks equal steps) and yet
changes what plain decoding computes. `same_bits/__init__.py` says how it is recorded.
"""

from __future__ import annotations

import copy
import subprocess
import warnings
from collections.abc import Generator
from typing import Any

import pytest

from same_bits import cases, hands, record


@pytest.fixture(scope="module")
def processes() -> Generator[dict[str, subprocess.Popen[str]], None, None]:
    """All variants at once: each has one thread, and most of its time goes into Python."""
    able = [variant for variant in record.VARIANTS if not record.why_not(variant)]
    started = {variant: record.start(variant) for variant in able if hands.compiler()}
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("variant", record.VARIANTS)
def test_bits_and_texts_are_those_of_the_record(
    variant: str, processes: dict[str, subprocess.Popen[str]]
) -> None:
    """A sum in another order, a seed at another position, a penalty counted twice."""
    if reason := record.why_not(variant):
        pytest.skip(reason)
    if not hands.compiler():
        pytest.skip("no C++ compiler found (g++ or clang++)")
    verdict = record.compare(record.finish(processes[variant]), record.read(), variant)
    assert not verdict.failed, f"{variant}: {verdict}"
    if verdict.bits:
        warnings.warn(f"{variant}: {verdict}", stacklevel=1)


def test_the_record_holds_every_drafter_model_and_variant() -> None:
    """A drafter that was added without being recorded; a record that was cut short."""
    recorded = record.read()["variants"]
    assert {tried.draft[0] for tried in cases.DRAFTERS.values()} == hands.built_in_drafters()
    assert recorded.keys() == record.VARIANTS.keys()
    assert all(models.keys() == cases.MODELS.keys() for models in recorded.values())
    assert len(cases.MODELS) == 10


# ---------------------------------------------------------------------- the comparison can fail


def found_here(**made: str) -> dict[str, Any]:
    """What a process would say that found just what was recorded."""
    recorded = copy.deepcopy(record.read())
    made = {**recorded["made"], **made}
    return {"made": made, "models": recorded["variants"]["avx2"], "strays": [], "idle": []}


def verdict(found: dict[str, Any]) -> record.Verdict:
    return record.compare(found, record.read(), "avx2")


def test_equal_digests_pass() -> None:
    """A comparison that fails on what is equal."""
    assert not verdict(found_here()).failed
    assert not verdict(found_here(maker="AuthenticAMD")).failed


@pytest.mark.parametrize("part", ["logits", "logprobs", "texts", "texts of drawn drafts"])
def test_another_digest_is_seen(part: str) -> None:
    """A comparison that looks at half of the record, or takes texts for bits."""
    found = found_here()
    digests = found["models"]["gemma2, soft caps"][part]
    digests[next(iter(digests))] = "0"
    here = verdict(found)
    assert here.failed
    assert ("TEXTS differ" in str(here), "BITS of" in str(here)) == (
        "texts" in part,
        "texts" not in part,
    )
    found["made"]["torch"] = "0.1"
    elsewhere = verdict(found)
    assert elsewhere.failed == ("texts" in part)
    assert "torch 0.1" in str(elsewhere) and "gemma2, soft caps" in str(elsewhere)


def test_missing_digests_and_faults_are_seen() -> None:
    """A model that is no longer computed; a drafter that changes texts, or drafts nothing."""
    found = found_here()
    del found["models"]["gpt2"]
    assert verdict(found).failed
    for fault in ("strays", "idle"):
        assert verdict({**found_here(maker="another"), fault: ["ngram"]}).failed
