"""Models that benchmarks take by a short name: an adapter is kept, merged once, and found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from suite_world import PROVENANCE

import benchmarks.models
import benchmarks.task.run
from benchmarks.models import FACTS, folder_of, known, located
from benchmarks.models.keep import keep
from benchmarks.task.__main__ import run_stages
from benchmarks.task.result import TaskOptions, TaskRun
from selfspec import LLM, OptionError
from selfspec.model.from_transformers import from_transformers
from selfspec.model.load.loading import load
from selfspec.model.load.peft_folder import CONFIG, WEIGHTS
from selfspec.testing import tiny_model, tiny_predictors, tiny_tokenizer
from selfspec.trained.files import shipped_part

peft = pytest.importorskip("peft")

TEXT = torch.arange(40)[None] + 5
SETTINGS = {"recipe.exits": [2], "max_steps": 20}


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A base with a chat template, a checkpoint of an adapter, and the logits that peft computes
    with it."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(benchmarks.models, "HERE", tmp_path / "models")
    base, tokenizer = tiny_model("llama"), tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lora = peft.LoraConfig(
            r=4, init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM"
        )
        adapted = peft.get_peft_model(base, lora).eval()
    checkpoint = tmp_path / "checkpoint-20"
    adapted.save_pretrained(checkpoint)
    state = {"global_step": 20, "log_history": [{"loss": 0.5, "step": 20}, {"train_runtime": 9}]}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    (checkpoint / "selfspec.json").write_text(json.dumps(SETTINGS))
    with torch.inference_mode():
        return checkpoint, adapted(input_ids=TEXT).logits


def test_a_kept_adapter_is_found_merged(trained: tuple[Path, Any], tmp_path: Path) -> None:
    """The base alone, an adapter that was not rounded as it is kept, a chat template that training
    never saw, facts of another step, or weights that are merged anew at each start."""
    checkpoint, expected = trained
    keep(checkpoint, tmp_path / "models" / "small", str(tmp_path / "base"), chat=False)
    assert known() == ["small"] and located("small") == str(folder_of("small"))
    facts = json.loads((tmp_path / "models/small" / FACTS).read_text())
    assert (facts["steps"], facts["settings"], facts["last"]["loss"]) == (20, SETTINGS, 0.5)
    folder = folder_of("small")
    assert folder.name == "small" and not (folder / CONFIG).exists()
    kept, whole = tmp_path / "models/small" / WEIGHTS, checkpoint / WEIGHTS
    assert kept.stat().st_size < 0.7 * whole.stat().st_size
    found = load(folder)
    with torch.inference_mode():
        logits = found.model(input_ids=TEXT).logits
    base = load(tmp_path / "base")
    with torch.inference_mode():
        plain = base.model(input_ids=TEXT).logits
    assert torch.allclose(logits, expected, atol=0.02)
    assert not torch.allclose(plain, expected, atol=0.02), "the adapter adds nothing"
    assert found.tokenizer is not None and found.tokenizer.chat_template is None
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert (folder_of("small") / "model.safetensors").stat().st_mtime_ns == written
    part = tiny_predictors(from_transformers(found.model, check=False), candidates=3)
    part.save(tmp_path / "models" / "small" / "exits")
    llm = LLM.from_pretrained(folder_of("small"))
    assert shipped_part("exit-predictors", llm.model) is not None, "parts beside it are left behind"
    keep(checkpoint, tmp_path / "models" / "small", str(tmp_path / "base"), chat=True)
    chatting = load(folder_of("small")).tokenizer
    assert chatting is not None and chatting.chat_template, "an older merge was found"


def test_other_models_are_found_as_ever(trained: tuple[Path, Any], tmp_path: Path) -> None:
    """A folder that is looked for among the short names only, or a checkpoint without an
    adapter that becomes a broken model."""
    assert folder_of(str(tmp_path / "base")) == tmp_path / "base"
    assert located(str(tmp_path / "base")) == str(tmp_path / "base")
    with pytest.raises(OptionError, match="no adapter to keep"):
        keep(tmp_path / "base", tmp_path / "models" / "small", "demo", chat=False)
    assert known() == []


def test_a_model_of_the_task_is_measured_as_it_is(
    trained: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained models looked for in the folder of data, where there are none, or one model measured
    under two names."""
    monkeypatch.setattr(benchmarks.task.run, "MOST_TOKENS", 8)
    run = TaskRun(PROVENANCE, "tiny", TaskOptions(held_out=4, exits=(2,), lossy=2), "abc")
    run_stages(["quality"], tmp_path / "base", tmp_path / "none", run, lambda: None, as_is=True)
    assert set(run.quality) == {"recipe"} and run.quality["recipe"].of == 4
    assert not (tmp_path / "none").exists()
