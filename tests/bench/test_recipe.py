"""The recipe's ablation: its arms are the paper's presets, its texts keep apart what is measured, a
tiny run goes through all stages and goes on, and the table says what the JSON says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from suite_world import PROVENANCE

from benchmarks.recipe import __main__ as command
from benchmarks.recipe.arms import BASE, Arm, RecipeOptions, all_arms, chosen_arms, names
from benchmarks.recipe.report import final_loss, markdown, picture, speed, summary
from benchmarks.recipe.result import ArmRun, RecipeRun
from benchmarks.recipe.run import folder_of_arm
from benchmarks.recipe.texts import HELD_OUT, TRAIN, make_texts, pieces, read_pieces, unseen
from benchmarks.task.data import examples, generator_hash
from benchmarks.task.result import Race
from selfspec import OptionError
from selfspec.bench.schema import read, write
from selfspec.train.presets import PRESETS

ROOT = Path(__file__).resolve().parents[2]
TINY = RecipeOptions(
    layers=4,
    width=32,
    heads=2,
    inner=48,
    vocabulary=300,
    batch=2,
    length=64,
    steps=4,
    task_steps=6,
    seeds=(0,),
    examples=300,
    held_out=4,
    exits=(1, 3),
    drafts=3,
    prompts=2,
    new_tokens=8,
    looks=2,
    look_blocks=2,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "pages.txt"
    words = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    file.write_text("".join(words)[:150_000], encoding="utf-8")
    return file


def test_recipes_are_the_presets_as_printed() -> None:
    """An arm that quietly had another curriculum or weight would be no ablation of the paper's."""
    task, scratch = Arm("task", "LD+EE").recipe(12), Arm("scratch", "LD+EE").recipe(12)
    assert task == PRESETS["task-1.5b"].recipe
    assert scratch == replace(PRESETS["scratch-1.5b"].recipe, rotation=11)
    assert Arm("scratch", "plain").recipe(12).dropout == 0
    assert Arm("scratch", "LD").recipe(12).exit_scale == 0
    assert Arm("scratch", "EE").recipe(12).dropout == 0
    constant, rising = Arm("scratch", "constant").recipe(12), Arm("scratch", "LD").recipe(12)
    means = [sum(each.dropout_rates(12, 5, 10)) / 12 for each in (constant, rising)]
    assert means[0] == pytest.approx(means[1]) and constant != rising


def test_arms_are_chosen_by_group_or_name() -> None:
    """A task arm needs the model that it begins with, and an unknown name must not train nothing
    for hours."""
    options = RecipeOptions()
    assert len(all_arms(options)) == 5 + 8 + 2
    assert names(chosen_arms("task/EE/1", options)) == [BASE, "task/EE/1"]
    assert len(chosen_arms("scratch", options)) == 5
    with pytest.raises(OptionError, match="scratch/LD"):
        chosen_arms("scratch/LDD", options)


def test_texts_keep_apart_what_is_measured(text: Path, tmp_path: Path) -> None:
    """Perplexity on text that was trained would flatter every arm."""
    make_texts([text], tmp_path, TINY)
    kept, held = read_pieces(tmp_path / TRAIN), read_pieces(tmp_path / HELD_OUT)
    assert len(kept) > 15 * len(held) > 0
    assert not set(kept) & set(held)
    assert sorted(kept + held) == sorted(pieces(text.read_text(encoding="utf-8")))
    with pytest.raises(OptionError, match="too few to train on"):
        short = tmp_path / "short.txt"
        short.write_text("a few words\n", encoding="utf-8")
        make_texts([short], tmp_path / "other", TINY)


def test_unseen_utterances_were_not_trained() -> None:
    """Of trained phrasings, yet never the same words."""
    trained = {each.utterance for each in examples("train", TINY.examples, known=True)}
    for part in ("train", "held_out"):
        found = unseen(part, TINY)
        assert len(found) == TINY.held_out
        assert not trained & {each.utterance for each in found}


def test_a_tiny_run_goes_through_all_stages_and_goes_on(text: Path, tmp_path: Path) -> None:
    """Every arm of two groups: trained, read meanwhile, measured; a second run finds all done, and
    one without the base's folder trains that again and nothing else."""
    make_texts([text], tmp_path, TINY)
    run = RecipeRun(PROVENANCE, TINY, "text", generator_hash(0))
    for arm in chosen_arms("scratch/EE,task/LD+EE/0", TINY):
        command._one(arm, run, tmp_path, None, 1, False)
    assert set(run.arms) == {BASE, "scratch/EE", "task/LD+EE/0"}
    looks = run.arms["scratch/EE"].looks
    assert [look["step"] for look in looks] == [2, 4]
    assert [score["layers"] for score in looks[0]["exits"]] == [1, 2, 3, 4]
    assert looks[0]["exits"] != looks[1]["exits"]
    assert all(0 < look["core_seconds_a_step"] < 60 for look in looks)
    assert [look["step"] for look in run.arms["task/LD+EE/0"].looks] == [3, 6]
    quality = run.arms["task/LD+EE/0"].quality
    assert quality["train"].of == quality["held_out"].of == TINY.held_out
    for arm in run.arms.values():
        assert set(arm.race) == {"plain", "E=1", "E=1 alone", "E=3", "E=3 alone"}
        assert arm.race["E=1"].identical and arm.race["E=1"].drafted
    file = tmp_path / "result.json"
    write(run, file)
    assert read(RecipeRun, file) == run
    before = dict(run.arms)
    command._one(Arm("task", "LD+EE"), run, tmp_path, None, 1, False)
    assert run.arms == before
    assert (folder_of_arm(tmp_path, Arm("scratch", "plain")) / "model.safetensors").exists()
    picture(run, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert "trained phrasings" in markdown(run)


def _arm(plain: list[float], draft: list[float]) -> ArmRun:
    races = {
        "plain": Race(plain, [10] * len(plain)),
        "E=3": Race(draft, [10] * len(draft), 100, 80),
        "E=3 alone": Race(draft, [10] * len(draft)),
    }
    exits = [{"layers": n, "loss": 1.0, "agreement": 0.5, "perplexity": 2.5} for n in (1, 2)]
    log = [{"step": n, "exit_2": float(n)} for n in range(1, 21)]
    facts = {"steps": 20, "tokens": 1000, "seconds": 60.0, "log": log}
    looks = [
        {"step": 5, "exits": exits},  # as of before it was noted
        {"step": 10, "exits": exits, "core_seconds_a_step": 9.0},
        {"step": 20, "exits": exits, "core_seconds_a_step": 6.0},
    ]
    return ArmRun(PROVENANCE, facts, looks, {}, races)


def test_the_table_says_what_the_json_says() -> None:
    """Speed is the ratio of mean times, not the mean of ratios: one slow text must count."""
    arm = _arm([1.0, 4.0], [1.0, 1.0])
    assert speed(arm.race, "E=3") == pytest.approx(2.5)
    assert final_loss(arm) == pytest.approx(19.5)
    run = RecipeRun(PROVENANCE, TINY, "t", "g", arms={"scratch/LD+EE": arm})
    shown = markdown(run)
    assert "| scratch/LD+EE | 80.0% |" in " ".join(shown.split())
    assert all(words in shown for words in ("2.50x", "77.4%", "1.76x"))
    assert "| 2.5 | " in " ".join(shown.split())  # 20 steps of 7.5 seconds of a core
    assert json.loads(json.dumps(summary(run)))["arms"]["scratch/LD+EE"]["speed"] == {"E=3": 2.5}


def test_results_of_two_experiments_are_not_mixed(tmp_path: Path) -> None:
    """A file of other steps must not be added to."""
    file = tmp_path / "recipe.json"
    write(RecipeRun(PROVENANCE, TINY, "t", "g"), file)
    other = RecipeRun(PROVENANCE, replace(TINY, steps=5), "t", "g")
    with pytest.raises(OptionError, match="two experiments"):
        command.with_earlier_arms(other, file)
