"""The recipe inside transformers' Trainer: resuming, ranks, micro-batches, numbers that are not,
checkpoints of other runs."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import RECIPE, blocks, run_plainly, trainable, trainer, weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import selfspec
from selfspec import OptionError, ResourceError, TrainingError
from selfspec.testing import tiny_model
from selfspec.train import checkpoints
from selfspec.train.exit_forward import ExitForward
from selfspec.train.recipe import Recipe
from selfspec.train.trainer import LayerSkipTrainer


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """50 steps against 50 that were stopped after 23 (within an epoch, in a ramp of dropout and of
    the curriculum): a step or a mask drawn from anything but the global step, or torch's generator
    not restored, and the weights differ."""
    whole = trainer(tmp_path / "whole", 50)
    whole.train()
    first = trainer(tmp_path / "cut", 50, save_steps=23)
    stop_after(first, 23)
    first.train()
    again = trainer(tmp_path / "cut", 50, save_steps=23)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 50
    assert not equal(weights(first), weights(again)), (
        "the second half changed nothing, so this compares nothing"
    )
    assert equal(weights(whole), weights(again))


def stop_after(run: LayerSkipTrainer, steps: int) -> None:
    """As a killed process would: nothing is done after the step's checkpoint."""
    original = run._save_checkpoint

    def save(*given: Any) -> None:
        original(*given)
        if run.state.global_step >= steps:
            run.control.should_training_stop = True

    run._save_checkpoint = save  # type: ignore[method-assign]


def test_micro_batches_equal_one_batch(tmp_path: Path) -> None:
    """Micro-batches averaged although they hold different numbers of trained tokens, or the same
    mask drawn for each of them."""
    recipe = Recipe(dropout=0.0, curriculum="all")
    one, four = (
        trainer(
            tmp_path / str(parts),
            6,
            recipe,
            tiny_model(seed=7).requires_grad_(True),
            optim="sgd",
            max_grad_norm=0.0,
            per_device_train_batch_size=4 // parts,
            gradient_accumulation_steps=parts,
        )
        for parts in (1, 4)
    )
    one.train()
    four.train()
    assert all(
        torch.allclose(a, b, atol=1e-5)
        for a, b in zip(weights(one).values(), weights(four).values(), strict=True)
    )
    masks = trainer(tmp_path / "masks", 1, RECIPE, gradient_accumulation_steps=2)
    seen = []
    draw = masks.recipe_forward.draw
    masks.recipe_forward.draw = lambda rows: seen.append(masks.recipe_forward.moment) or draw(rows)  # type: ignore[func-returns-value,method-assign]
    masks.train()
    assert [(moment.step, moment.micro) for moment in seen] == [(0, 0), (0, 1)]


def run_ranks(folder: Path, ranks: int, batch: int, steps: int) -> dict[str, torch.Tensor]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    source = os.pathsep.join(
        [str(Path(selfspec.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    shared = {
        **os.environ,
        "PYTHONPATH": source,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    script = [
        sys.executable,
        str(Path(__file__).with_name("runs.py")),
        str(folder),
        str(steps),
        str(batch),
    ]
    folder.mkdir()
    processes = [
        subprocess.Popen(
            script,
            env={**shared, "WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        _, words = process.communicate(timeout=240)
        assert process.returncode == 0, words[-3000:]
    return load_file(folder / "end.safetensors")


def test_two_ranks_equal_one_process_with_their_masks(tmp_path: Path) -> None:
    """Ranks that draw different masks, a loss divided by one rank's tokens, a layer that no rank's
    samples enter (dropout is high enough for that) and that DDP waits for. Two gloo processes of 2
    rows against one of 4 rows with the masks side by side."""
    two = run_ranks(tmp_path / "two", ranks=2, batch=2, steps=5)
    one = run_plainly(tmp_path / "one", steps=5, batch=4, tile=2)
    other = run_plainly(tmp_path / "other", steps=5, batch=4)
    assert all(torch.allclose(two[name], one[name], atol=2e-6, rtol=1e-4) for name in two)
    assert not all(torch.allclose(two[name], other[name], atol=2e-6, rtol=1e-4) for name in two), (
        "masks make no difference here"
    )


# -------------------------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_nan_stops_before_the_step(tmp_path: Path, what: str) -> None:
    """NaN weights in a checkpoint that then replaces the last good one; an error that does not say
    when it happened."""
    run = trainer(tmp_path, 12, save_steps=4)
    if what == "loss":
        loss = run.recipe_forward.loss
        run.recipe_forward.loss = lambda *given: (
            loss(*given) * (math.nan if run.state.global_step == 6 else 1)
        )  # type: ignore[method-assign]
    else:
        parameter = run.recipe_forward.model.model.norm.weight
        parameter.register_hook(lambda grad: grad * (math.inf if run.state.global_step == 6 else 1))
    with pytest.raises(
        TrainingError, match=rf"the {what} is (nan|inf) at step 7, .* checkpoint is .*checkpoint-4"
    ):
        run.train()
    assert all(torch.isfinite(value).all() for value in weights(run).values())
    assert checkpoints.latest(tmp_path) == tmp_path / "checkpoint-4"
    assert all(
        torch.isfinite(value).all()
        for value in load_file(tmp_path / "checkpoint-4" / "model.safetensors").values()
    )


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """A resumed run that silently follows other settings than its first half; the message has to
    name the difference."""
    run = trainer(tmp_path, 4, save_steps=2)
    stop_after(run, 2)
    run.train()
    with pytest.raises(TrainingError, match=r"recipe\.dropout was 0\.5, is 0\.2"):
        trainer(tmp_path, 4, Recipe(dropout=0.2)).train(resume_from_checkpoint=True)
    with pytest.raises(TrainingError, match="max_steps was 4, is 5"):
        trainer(tmp_path, 5).train(resume_from_checkpoint=True)
    other = LayerSkipTrainer(
        tiny_model().requires_grad_(True), run.args, RECIPE, identity={"model": "x"}
    )
    with pytest.raises(TrainingError, match="model was None, is 'x'"):
        other.train(resume_from_checkpoint=True)


def test_a_checkpoint_that_was_cut_off_is_not_used(tmp_path: Path) -> None:
    """Killed while writing: the half-written folder is the newest, and going on from it would fail
    or lose the optimizer."""
    run = trainer(tmp_path, 6, save_steps=2)
    stop_after(run, 4)
    run.train()
    (tmp_path / "checkpoint-4" / checkpoints.MARK).unlink()
    (tmp_path / "checkpoint-4" / "optimizer.pt").write_bytes(b"half")
    with pytest.raises(TrainingError, match=r"cut off while being written"):
        trainer(tmp_path, 6).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    steps = []
    again = trainer(tmp_path, 6)
    draw = again.recipe_forward.draw
    again.recipe_forward.draw = lambda rows: steps.append(again.state.global_step) or draw(rows)  # type: ignore[func-returns-value,method-assign]
    again.train(resume_from_checkpoint=True)
    assert steps == [2, 3, 4, 5]
    written = trainer(tmp_path, 6, save_steps=2)
    save = written._save_optimizer_and_scheduler
    marks = []
    written._save_optimizer_and_scheduler = lambda to: (
        marks.append((Path(to) / checkpoints.MARK).exists()) or save(to)
    )  # type: ignore[func-returns-value,method-assign]
    written.train()
    assert marks == [False] * 3, "a checkpoint that is being written over is called complete"


def test_a_full_disk_is_said_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare OSError from deep inside, or an earlier checkpoint that is deleted before the new one
    is whole."""
    run = trainer(tmp_path, 8, save_steps=2, save_total_limit=2)
    save = run._save_optimizer_and_scheduler

    def fails(folder: str) -> None:
        if run.state.global_step == 6:
            raise OSError(28, "No space left on device")
        save(folder)

    monkeypatch.setattr(run, "_save_optimizer_and_scheduler", fails)
    with pytest.raises(
        ResourceError, match=r"step 6 cannot be written .*No space left.*checkpoint-4 is complete"
    ):
        run.train()
    again = trainer(tmp_path, 8, save_steps=2, save_total_limit=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8


def test_room_is_looked_for_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of training, and then no room for the first checkpoint."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**6})())
    checkpoints.require_room(tmp_path, weights=10**5, trained=10**5)
    with pytest.raises(ResourceError, match=r"0\.0 GB free; 3 checkpoints .* need"):
        checkpoints.require_room(tmp_path, weights=2 * 10**5, trained=10**5)


def test_what_is_saved_is_an_ordinary_model_without_pickles_of_ours(tmp_path: Path) -> None:
    """Names of wrappers in the state, or a folder that plain transformers cannot read."""
    run = trainer(tmp_path, 2, save_steps=2)
    run.train()
    folder = tmp_path / "checkpoint-2"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert equal(weights(run), dict(loaded.state_dict()))
    assert not (folder / "training_args.bin").exists()
    assert json.loads((folder / checkpoints.MARK).read_text())["recipe.dropout"] == 0.5
    assert "forward" not in vars(run.recipe_forward.model)


def test_losses_by_exit_are_logged(tmp_path: Path) -> None:
    """Live losses that are weighted (and fall when the curriculum turns), of the wrong exit, or of
    all steps since the start."""
    run = trainer(tmp_path, 4, Recipe(dropout=0.0, rotation=2), logging_steps=2)
    seen: list[dict[int, float]] = []
    loss = run.recipe_forward.loss

    def watched(*given: Any) -> torch.Tensor:
        value = loss(*given)
        seen.append({layer: float(one) for layer, one in run.recipe_forward.sums.items()})
        return value

    run.recipe_forward.loss = watched  # type: ignore[method-assign]
    run.train()
    lines = [line for line in run.state.log_history if "loss" in line]
    assert [sorted(name for name in line if name.startswith("exit")) for line in lines] == [
        ["exit_2", "exit_3", "exit_4"]
    ] * 2
    assert lines[1]["exit_4"] == pytest.approx((seen[2][3] + seen[3][3]) / 2, rel=1e-5)
    assert lines[1]["exit_3"] == pytest.approx(seen[2][2], rel=1e-5)


def test_evaluation_alone_is_the_plain_loss(tmp_path: Path) -> None:
    """`evaluate` before or after `train` needs the forward too, and must not drop layers."""
    run = trainer(tmp_path, 2)
    found = run.evaluate(run.train_dataset)["eval_loss"]
    model = run.recipe_forward.model.eval()
    total = count = 0.0
    for row in range(len(run.train_dataset)):
        each = run.train_dataset[row]
        trained = int((each["labels"][1:] != -100).sum())
        total += (
            float(
                model(input_ids=each["input_ids"][None], labels=each["labels"][None]).loss.detach()
            )
            * trained
        )
        count += trained
    assert found == pytest.approx(total / count, rel=0.02), (
        "batches of different sizes are averaged, hence the tolerance"
    )
    assert "forward" not in vars(model)


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    """DataParallel copies the model, and the copies' layers would not obey."""
    run = trainer(tmp_path, 2)
    run.args._n_gpu = 2
    with pytest.raises(OptionError, match="torchrun --nproc_per_node 2"):
        LayerSkipTrainer(tiny_model(), run.args, RECIPE)


def test_a_finished_run_takes_no_further_step(tmp_path: Path) -> None:
    """A run that is resumed after its last checkpoint and trains one step more than was asked
    for: other weights than those of the run itself."""
    first = trainer(tmp_path, 4, save_steps=4)
    first.train()
    again = trainer(tmp_path, 4, save_steps=4)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert equal(weights(first), weights(again))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_learns_in_every_exit(family: str, tmp_path: Path) -> None:
    """Exits, routers or experts that nothing reaches through a router or a dropped layer."""
    model = trainable(family, seed=7).requires_grad_(True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = blocks().ids.long()

    def losses() -> dict[int, float]:
        forward = ExitForward(model.train(), Recipe(dropout=0.0, curriculum="all"))
        with forward.installed(), torch.no_grad():
            model(input_ids=ids, labels=ids)
        return {layer: float(value) for layer, value in forward.sums.items()}

    first = losses()
    trainer(tmp_path, 30, Recipe(dropout=0.3, curriculum="all"), model).train()
    last = losses()
    assert first.keys() == {1, 2, 3}
    assert all(last[layer] < 0.9 * first[layer] for layer in first), (first, last)
    for name, weight in model.state_dict().items():
        moved = (weight - before[name]).abs()
        if "experts" in name:  # each of them
            assert (moved.flatten(1).amax(1) > 0).all(), name
        elif "gate" in name or "router" in name:
            assert moved.max() > 0, name
