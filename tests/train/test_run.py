"""Whole runs: the folder that comes out works everywhere, drafts better, and is never made over
what is not ours."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from selfspec import LLM, DataError, OptionError, TrainingError, Unavailable
from selfspec.testing import tiny_model, tiny_tokenizer
from selfspec.train import plots
from selfspec.train.data import DataOptions
from selfspec.train.lora import Lora, add_lora, merged
from selfspec.train.recipe import Recipe
from selfspec.train.run import REPORT, Report, TrainOptions, train

SHORT = DataOptions(length=64, held_out=0.1)
FEW = TrainOptions(steps=3, batch=4, score_blocks=2, plot=False)


def save_tiny(folder: Path, **changes: Any) -> str:
    tiny_model(seed=2, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Small weights, as a model before training has them."""
    return save_tiny(tmp_path_factory.mktemp("model"), initializer_range=0.02, num_hidden_layers=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sentences of a small grammar."""
    draw = random.Random(0)
    words = [
        ["ann", "bob", "cat", "dan"],
        ["sees", "likes", "finds"],
        ["a red cup", "the old tree", "one dog"],
    ]
    path = tmp_path_factory.mktemp("data") / "toy.jsonl"
    texts = [
        " ".join(" ".join(map(draw.choice, words)) + "." for _ in range(4)) for _ in range(150)
    ]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return [path]


def test_training_raises_acceptance(model: str, data: list[Path], tmp_path: Path) -> None:
    """The point of it all: after the recipe the first quarter of the model drafts what the whole
    model accepts, more than after the same training without it; and plain transformers reads the
    folder. A lucky pass: both models repeat one word; the texts rule that out."""
    accepted = {}
    for variant in ("plain", "LD+EE"):
        options = TrainOptions(
            steps=110, batch=8, learning_rate=4e-3, score_blocks=4, plot=False, save_every=1000
        )
        report = train(
            model,
            data,
            tmp_path / variant,
            recipe=Recipe().variant(variant),
            options=options,
            data=DataOptions(length=64),
        )
        llm = LLM.from_pretrained(tmp_path / variant)
        result = llm.generate(
            "ann sees",
            max_new_tokens=150,
            eos=[],
            draft="early-exit",
            draft_options={"layer": 2},
            control="fixed",
            control_options={"tokens": 3},
        )
        assert len(set(result.tokens)) > 8, result.text
        assert (
            result.tokens == llm.generate("ann sees", max_new_tokens=150, eos=[], draft=None).tokens
        )
        accepted[variant] = result.stats.acceptance, report.exits["after"][1].agreement
        assert report.exits["after"][-1].loss < report.exits["before"][-1].loss - 2
    ids = torch.tensor([llm.tokenizer("ann sees")["input_ids"]])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / variant).generate(
        ids, max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert theirs[0, ids.shape[1] :].tolist() == result.tokens[:20]
    assert accepted["LD+EE"][0] > accepted["plain"][0] + 0.1, accepted
    assert accepted["LD+EE"][1] > accepted["plain"][1] + 0.1, accepted


class Killed(Exception):
    """Ends a run as a kill would."""


class KillAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def test_the_same_command_goes_on(model: str, data: list[Path], tmp_path: Path) -> None:
    """A run killed between two checkpoints that starts anew, or goes on with another order of the
    data."""
    options = TrainOptions(steps=8, save_every=3, score_blocks=1, plot=False, log_every=1)
    train(model, data, tmp_path / "whole", options=options, data=SHORT)
    with pytest.raises(Killed):
        train(model, data, tmp_path / "cut", options=options, data=SHORT, callbacks=[KillAt(5)])
    (half := tmp_path / "cut" / "checkpoints" / "checkpoint-6").mkdir()  # killed while writing
    report = train(model, data, tmp_path / "cut", options=options, data=SHORT)
    assert (half / "selfspec.json").exists()
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert [line["step"] for line in report.log] == list(range(1, 9)), (
        "the log of the first part is kept"
    )
    with pytest.raises(TrainingError, match="max_steps was 8, is 9"):
        train(model, data, tmp_path / "cut", options=TrainOptions(steps=9, plot=False), data=SHORT)
    other = save_tiny(tmp_path / "other", num_hidden_layers=5)
    with pytest.raises(TrainingError, match="model was"):
        train(other, data, tmp_path / "cut", options=options, data=SHORT)


def test_the_report_is_json_and_can_be_drawn(model: str, data: list[Path], tmp_path: Path) -> None:
    """A report that lacks what a plot or a reader needs: settings, losses by exit, scores before
    and after."""
    pytest.importorskip("matplotlib")
    report = train(
        model,
        data,
        tmp_path,
        options=TrainOptions(steps=3, batch=2, log_every=1, score_blocks=1),
        data=SHORT,
    )
    facts = json.loads((tmp_path / REPORT).read_text())
    assert facts["recipe"]["exit_scale"] == 1.0 and facts["options"]["steps"] == facts["steps"] == 3
    assert [len(facts["exits"][when]) for when in ("before", "after")] == [8, 8]
    assert "exit_8" in facts["log"][0] and facts["tokens"] == pytest.approx(3 * 2 * 63, rel=0.05)
    assert (tmp_path / "training.png").stat().st_size > 10_000
    plots.plot_exits({"now": facts["exits"]["after"]}, tmp_path / "exits.png", "x")
    assert (tmp_path / "exits.png").stat().st_size > 5_000
    assert isinstance(report, Report) and report.folder == tmp_path


def test_from_scratch_starts_from_new_weights(model: str, data: list[Path], tmp_path: Path) -> None:
    """Weights of the folder that slip in although only its shape was asked for; another start for
    the same seed."""
    once, again = (
        train(
            model,
            data,
            tmp_path / str(i),
            options=TrainOptions(
                steps=1, plot=False, from_scratch=True, learning_rate=1e-9, score_blocks=1
            ),
            data=SHORT,
        )
        for i in range(2)
    )
    start = load_file(Path(model) / "model.safetensors")
    first, second = (load_file(report.folder / "model.safetensors") for report in (once, again))
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.allclose(first[name], start[name], atol=1e-3)
    assert torch.equal(first[name], second[name])
    assert once.model.endswith("(from scratch)")


def test_lora_is_merged_and_trains_nothing_else(
    model: str, data: list[Path], tmp_path: Path
) -> None:
    """A folder that only peft can read, embeddings or norms that were trained as well, a resumed
    adapter that starts at zero."""
    pytest.importorskip("peft")
    options = TrainOptions(
        steps=4, save_every=2, batch=2, learning_rate=1e-2, plot=False, score_blocks=0
    )
    small = Lora(rank=2, modules=("q_proj", "down_proj"))
    train(model, data, tmp_path / "whole", options=options, data=SHORT, lora=small)
    before, after = (
        load_file(Path(model) / "model.safetensors"),
        load_file(tmp_path / "whole" / "model.safetensors"),
    )
    assert sorted(before) == sorted(after)
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "down_proj"}
    LLM.from_pretrained(tmp_path / "whole")
    with pytest.raises(Killed):
        train(
            model,
            data,
            tmp_path / "cut",
            options=options,
            data=SHORT,
            lora=small,
            callbacks=[KillAt(3)],
        )
    train(model, data, tmp_path / "cut", options=options, data=SHORT, lora=small)
    cut = load_file(tmp_path / "cut" / "model.safetensors")
    assert all(torch.equal(after[name], cut[name]) for name in after)
    with pytest.raises(TrainingError, match="lora was"):
        train(model, data, tmp_path / "cut", options=options, data=SHORT)


def test_lora_on_weights_that_lie_on_their_side() -> None:
    """GPT-2's linears are of another class: none found to train, or merged without being turned."""
    pytest.importorskip("peft")
    model, ids = tiny_model("gpt2", seed=3).eval(), torch.tensor([[5, 6, 7, 8]])
    before = model(input_ids=ids).logits
    tuned = add_lora(model, Lora(rank=2))
    learned = {name: each for name, each in tuned.named_parameters() if each.requires_grad}
    assert len(learned) == 2 * 4 * 4, "two matrices beside each of four linears in four layers"
    for index, each in enumerate(learned.values()):
        each.data = torch.randn(each.shape, generator=torch.Generator().manual_seed(index)) * 0.3
    after = tuned(input_ids=ids).logits
    assert not torch.allclose(after, before, atol=1e-2)
    assert torch.allclose(merged(tuned)(input_ids=ids).logits, after, atol=1e-4)


def test_lora_on_modules_that_do_not_exist() -> None:
    """peft is content if one of several names fits; the head may not be one of them, all exits
    share it."""
    model = tiny_model()
    with pytest.raises(OptionError, match=r"LoRA on 'qproj': .* known: down_proj, gate_proj"):
        add_lora(model, Lora(modules=("q_proj", "qproj")))
    with pytest.raises(OptionError, match="LoRA on 'lm_head'"):
        add_lora(model, Lora(modules=("lm_head",)))
    with pytest.raises(OptionError, match="rank=0"):
        Lora(rank=0)


def test_missing_packages_are_named(
    model: str, data: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ImportError, or a plot that fails after hours of training instead of before."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unavailable, match=r"selfspec\[train\]"):
        train(model, data, tmp_path / "x", options=TrainOptions(steps=1))
    assert not (tmp_path / "x").exists()
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Unavailable, match=r"selfspec\[train\]"):
        add_lora(tiny_model(), Lora())


def test_nothing_is_overwritten(model: str, data: list[Path], tmp_path: Path) -> None:
    """Training into the folder of the model it starts from, or over a file."""
    kept = shutil.copytree(model, tmp_path / "copy")
    before = (kept / "model.safetensors").read_bytes()
    with pytest.raises(OptionError, match="would be overwritten"):
        train(model, data, kept, options=FEW)
    assert (kept / "model.safetensors").read_bytes() == before and not (
        kept / "checkpoints"
    ).exists()
    with pytest.raises(OptionError, match="is no folder"):
        train(model, data, kept / "config.json", options=FEW)


def test_settings_that_do_not_fit(model: str, data: list[Path], tmp_path: Path) -> None:
    """Each is found before anything is trained."""
    with pytest.raises(OptionError, match=r"length=4096 exceeds the context of .*, 512"):
        train(model, data, tmp_path / "a", options=FEW, data=DataOptions(length=4096))
    with pytest.raises(OptionError, match="rotation=9 is more than the model's 8 layers"):
        train(model, data, tmp_path / "b", options=FEW, data=SHORT, recipe=Recipe(rotation=9))
    small = save_tiny(tmp_path / "small", vocab_size=64)
    with pytest.raises(TrainingError, match="do not belong together"):
        train(small, data, tmp_path / "c", options=FEW, data=SHORT)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="is empty"):
        train(model, [tmp_path / "empty.jsonl"], tmp_path / "d", options=FEW)
    with pytest.raises(DataError, match=r"there is no file .*missing\.jsonl"):
        train(
            "a model that is not even looked for",
            [tmp_path / "missing.jsonl"],
            tmp_path / "e",
            options=FEW,
        )
    for name, value, words in [
        ("steps", 0, "steps=0"),
        ("epochs", 0, "epochs=0"),
        ("batch", 0, "batch=0"),
        ("learning_rate", 0, "change nothing"),
        ("precision", "bf16", "did you mean 'bfloat16'"),
    ]:
        with pytest.raises(OptionError, match=words):
            TrainOptions(**{name: value})  # type: ignore[arg-type]
