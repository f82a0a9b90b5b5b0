"""The small second model: it has the large one's vocabulary, fewer weights, and is trained on what
that one wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import sibling
from selfspec import LLM, OptionError
from selfspec.testing import tiny_model, tiny_tokenizer


def test_it_is_trained_and_drafts_for_the_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sibling of another vocabulary, which would be refused as a draft model after a quarter of
    an hour's training; or one that learned nothing."""
    large, data = tmp_path / "large", tmp_path / "own.jsonl"
    tiny_model("llama").save_pretrained(large)
    tiny_tokenizer().save_pretrained(large)
    lines = [{"text": "once upon a time there was a small model. " * 8}] * 40
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sibling, "HEAD_SIZE", 16)
    small, threads = tmp_path / "small", torch.get_num_threads()
    sibling.sibling(
        str(large), data=[data], folder=small, layers=2, steps=30, rate=1e-2, threads=threads
    )
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    vocabulary = AutoTokenizer.from_pretrained(large).vocab_size
    network = AutoModelForCausalLM.from_pretrained(small)
    assert network.config.vocab_size >= vocabulary and network.config.num_hidden_layers == 2
    assert said["perplexity"] < vocabulary / 10, "it has read the text"
    llm = LLM.from_pretrained(str(large))
    options = {"model": str(small)}
    drafted = llm.generate("once", max_new_tokens=12, draft="draft-model", draft_options=options)
    assert drafted.tokens == llm.generate("once", max_new_tokens=12, draft=None).tokens
    assert drafted.stats.drafted > 0


def test_what_cannot_be_made_smaller_is_named(tmp_path: Path) -> None:
    """A model whose sizes have other names fails in the middle of its training."""
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(OptionError, match="gpt2"):
        sibling.smaller(tmp_path / "gpt2", tmp_path / "to", 2)
