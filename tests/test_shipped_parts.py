"""The parts that come with the package: small enough, whole, and for the model that they name."""

from __future__ import annotations

import pytest

from selfspec import LLM
from selfspec.lossy import SpecEE
from selfspec.trained.files import SHIPPED, load_part, shipped_part, shipped_parts
from selfspec.trained.successors import SUCCESSORS, trained_successors


@pytest.fixture(scope="module")
def demo_llm(demo_path):
    return LLM.from_pretrained(demo_path)


def test_they_are_small_and_can_be_read():
    """A part that was committed broken, of another schema, or so large that every install pays for
    it."""
    assert shipped_parts()
    for folder in shipped_parts():
        part = load_part(folder)
        assert part.facts["tokens"] > 0 and (folder / "README.md").is_file()
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 10_000_000


@pytest.mark.demo
def test_the_demo_model_finds_its_successors(demo_llm):
    """A part whose model is not recognised any more is silently never used."""
    part = shipped_part(SUCCESSORS, demo_llm.model)
    assert part is not None
    known = trained_successors(None, demo_llm.model)
    assert known is not None and trained_successors("none", demo_llm.model) is None
    context = demo_llm.tokenizer(" in order")["input_ids"]
    token, chance = known.after(context)[0]
    assert demo_llm.tokenizer.decode([token]) == " to" and chance > 0.5


@pytest.mark.demo
@pytest.mark.parametrize("draft", ["recycle", "hybrid"])
def test_they_change_no_token_and_keep_more_drafts(demo_llm, draft):
    """A table that is read by the wrong key guesses nothing; one that is verified wrongly speaks
    for the model."""
    prompt = demo_llm.encode_chat(
        [{"role": "user", "content": "Explain how a bicycle stays upright."}]
    )
    options = {"max_new_tokens": 48, "control": "fixed", "control_options": {"tokens": 7}}
    plain = demo_llm.generate(prompt, max_new_tokens=48, draft=None)
    without = demo_llm.generate(prompt, draft="recycle", draft_options={"part": "none"}, **options)
    found = demo_llm.generate(prompt, draft=draft, **options)
    assert found.tokens == without.tokens == plain.tokens
    assert found.stats.accepted > without.stats.accepted


@pytest.mark.demo
def test_the_demo_model_finds_its_exit_predictors(demo_llm):
    """Predictors that are not recognised any more, or that change the text they draft for."""
    prompt = demo_llm.encode_chat([{"role": "user", "content": "Name three colours."}])
    call = {"max_new_tokens": 12, "eos": []}
    plain = demo_llm.generate(prompt, draft=None, **call)
    options = {"control": "fixed", "control_options": {"tokens": 3}}
    found = demo_llm.generate(prompt, draft="dynamic-exit", **options, **call)
    assert found.tokens == plain.tokens
    lossy = SpecEE().generate(demo_llm, prompt, **call)
    assert lossy.lossy and lossy.looking.looks > 0


@pytest.mark.demo
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_the_demo_model_finds_its_draft_head(demo_path, weights):
    """A head that is not recognised in 8 bits, whose rows are mixed up when they are read from
    their eight bits, or that changes the text."""
    llm = LLM.from_pretrained(demo_path, weights=weights)
    part = shipped_part("draft-head", llm.model)
    assert part is not None and len(part.tensors["vocabulary"]) == 16_384
    prompt = llm.encode_chat([{"role": "user", "content": "How do I keep tomatoes fresh?"}])
    call = {"max_new_tokens": 64, "eos": []}
    plain = llm.generate(prompt, draft=None, **call)
    options = {"control": "fixed", "control_options": {"tokens": 2}}
    found = llm.generate(prompt, draft="draft-head", **options, **call)
    assert found.tokens == plain.tokens
    assert found.stats.accepted_at[0] > 0.3 * found.stats.drafted_at[0]
