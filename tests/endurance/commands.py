"""The commands that are killed, on a tiny model, and what of their results has to be the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from selfspec.cli.app import app
from selfspec.model.load import demo
from selfspec.profile import Way
from selfspec.testing import tiny_model, tiny_tokenizer
from selfspec.tune import run, steps
from selfspec.tune.rounds import Host
from selfspec.tune.run import Tuning
from selfspec.tune.timing import Trials
from tests.model.gguf_files import write as write_gguf

from .kills import Command, Contents

SCALE = 3.0  # of the end token's weights: the model ends its texts now and then
TIMES = {"seconds", "date", "wall_seconds", "sittings", "first_seconds", "tokens_per_second"}
TIMES |= {"load_seconds", "pipe_seconds", "first_answer_seconds", "peak_memory_bytes", "joules"}
TIMES |= {"draft_seconds", "verify_seconds", "host_seconds", "train_runtime", "uncommitted_changes"}


def prepare(world: Path) -> None:
    """What the commands read: a model, prompts, text, and a tiny stand-in for the demo's wheel."""
    model = tiny_model(num_hidden_layers=3)
    model.get_output_embeddings().weight.data[2] *= SCALE
    model.save_pretrained(world / "model")
    tiny_tokenizer().save_pretrained(world / "model")
    _write_rows(world / "prompts.jsonl", [{"prompt": f"tell me of {n}"} for n in range(12)])
    words = ["a", "small", "boat", "went", "far", "out", "and", "never", "came", "back"]
    texts = [" ".join(words[n % 5 :: 1 + n % 3]) + f" {n}" for n in range(60)]
    _write_rows(world / "text.jsonl", [{"text": text} for text in texts])
    own = [
        {"prompt_ids": [*f"say {n}".encode()], "response_ids": [*text.encode()]}
        for n, text in enumerate(texts)
    ]
    _write_rows(world / "own.jsonl", own)
    write_gguf(world / "tiny.gguf", architecture="llama")
    with zipfile.ZipFile(world / demo.WHEEL, "w") as archive:
        archive.write(world / "tiny.gguf", demo.GGUF)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _typed(*words: str) -> Callable[[Path, Path], None]:
    """A command line, {world} and {out} filled in."""
    return _Typed(words)


class _Typed:
    """A command line that a process can be given."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def __call__(self, world: Path, folder: Path) -> None:
        words = [word.format(world=world, out=folder) for word in self.words]
        app(words)


# ------------------------------------------------------------------------------ what is compared


def without_times(value: Any) -> Any:
    """A JSON less what no two runs have in common."""
    if isinstance(value, Mapping):
        return {name: without_times(each) for name, each in value.items() if name not in TIMES}
    if isinstance(value, list):
        return [without_times(each) for each in value]
    return value


def files(folder: Path) -> dict[str, str]:
    """Digests of a result's files: JSON without times, all else byte for byte. Left out are what
    may be deleted (checkpoints, states) and what names a time in words."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name.startswith(("checkpoint", "states/")) or name == "README.md":
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            data = json.dumps(without_times(json.loads(data)), sort_keys=True).encode()
        found[name] = hashlib.sha256(data).hexdigest()
    return found


def demo_files(folder: Path) -> Contents:
    """The demo model's folder, the note of what was checked aside, and what lies beside it."""
    made = folder / demo.NAME
    record = json.loads((made / demo.RECORD).read_text(encoding="utf-8"))
    for name, digest in record["sha256"].items():
        assert demo.sha256(made / name) == digest, f"{name} is not what was recorded"
    beside = [path.name for path in folder.iterdir() if path.suffix != ".lock"]
    inside = {path.name: path.read_bytes() for path in made.iterdir() if path.name != demo.CHECKED}
    found = {name: hashlib.sha256(data).hexdigest() for name, data in inside.items()}
    return {**found, "beside": str(sorted(beside))}


def convert(world: Path, folder: Path) -> None:
    """The demo's conversion, of a tiny model in the real one's place."""
    os.environ["SELFSPEC_CACHE"] = str(folder)
    wheel = world / demo.WHEEL
    demo.WHEEL_SHA256, demo.GGUF_SHA256 = demo.sha256(wheel), demo.sha256(world / "tiny.gguf")
    demo.demo_folder(progress=False, fetch=lambda work: Path(shutil.copy(wheel, work)))


SETS = 24  # that the killed search looks at
LINE = {"1": 1e-4, "128": 1e-3}


def tune(world: Path, folder: Path) -> None:
    """The search for halves to leave out. Predictions are of costs, which no two runs have in
    common, so these are given; and the ways that are found are timed only once."""
    line = steps.Line(LINE)
    costs = steps.Steps(line, line, {"1": {"1": line}}, line, 1e-3)
    run.costs_of = lambda *a, **k: (costs, False)  # type: ignore[assignment]
    run.host_of = lambda *a, **k: Host(1e-4)  # type: ignore[assignment]
    Tuning._time = _timed_once  # type: ignore[method-assign]
    app([
        "tune", f"{world}/model", "--threads", "1", "--search", "tpe", "--trials", str(SETS),
        "--study", f"{folder}/study.log", "--out", f"{folder}/profile.json",
    ])  # fmt: skip


def _timed_once(self: Tuning, ways: Sequence[Way]) -> Trials:
    trials = Trials(self._llm, self._timed[:1], 16)
    trials.turn(ways)
    return trials


def sets(folder: Path) -> Contents:
    """What the study looked at, in order, and the profile less what was timed."""
    storage = JournalStorage(JournalFileBackend(f"{folder}/study.log"))
    study = optuna.load_study(study_name="skips", storage=storage)
    ended = [trial for trial in study.trials if trial.state.is_finished()]
    seen = [(trial.params, trial.values) for trial in ended if trial.state.name != "FAIL"]
    profile = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    kept = {name: profile[name] for name in ("schema", "task", "model", "weights", "text")}
    assert len(seen) == SETS, f"{len(seen)} sets"
    return {"sets": json.dumps(seen), "profile": json.dumps(kept, sort_keys=True)}


TRAIN = ("train", "{world}/model", "--out", "{out}", "--threads", "1", "--no-plot")
COMMANDS = [
    Command(
        "train",
        _typed(
            *TRAIN, "--data", "{world}/text.jsonl", "--steps", "12", "--save-every", "2",
            "--log-every", "2", "--batch", "2", "--length", "32", "--score-blocks", "4",
        ),
        files,
    ),
    Command(
        "train-draft-head",
        _typed(
            *TRAIN, "--recipe", "draft-head", "--data", "{world}/own.jsonl", "--save-every", "2",
            "--epochs", "3", "--batch-tokens", "256", "--vocabulary", "64", "--held-out", "0.2",
        ),
        files,
    ),
    Command(
        "data",
        _typed(
            "data", "{world}/model", "--prompts", "{world}/prompts.jsonl", "--made-up", "12",
            "--out", "{out}/own.jsonl", "--max-new-tokens", "24", "--batch", "4", "--samples", "2",
            "--temperature", "0.8",
        ),
        files,
    ),
    Command(
        "bench",
        _typed(
            "bench", "{world}/model", "--task", "jsonl={world}/prompts.jsonl", "--sample", "4",
            "--max-new-tokens", "32", "--rounds", "2", "--threads", "1",
            "--methods", "ngram@fixed:tokens=4 early-exit:layer=1@fixed:tokens=3",
            "--out", "{out}/bench.json",
        ),
        files,
    ),
    Command("demo", convert, demo_files),
    Command("tune", tune, sets),
]  # fmt: skip
