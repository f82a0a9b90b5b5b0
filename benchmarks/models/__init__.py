"""Models that benchmarks take by a short name, beside `demo`: adapters that are kept here.

An adapter is a few megabytes. It is merged into its base once, and the result kept in the user's
cache as an ordinary folder, so that every engine loads the same weights. Trained parts that lie
beside the adapter come along, so that selfspec finds them as the model's own. Such a folder has no
chat template where its card says that the model was trained without one: its prompts are then read
as they are. Does not know what is measured.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path

from benchmarks.convert import converted
from selfspec.bench.suite_run import folder_of as folder_anywhere
from selfspec.model.load.checkpoint import quiet_transformers
from selfspec.model.load.loading import load
from selfspec.model.load.peft_folder import CONFIG, WEIGHTS, base_of
from selfspec.trained.files import DESCRIPTION, TENSORS

HERE = Path(__file__).parent
FACTS = "model.json"  # beside the adapter: how it was made, and what it is worth
ASKED = "questions.jsonl"  # beside it too: what it is asked


def known() -> list[str]:
    """The short names."""
    return sorted(path.parent.name for path in HERE.glob(f"*/{CONFIG}"))


def folder_of(model: str) -> Path:
    """The folder of a model: one of ours by its short name, or what selfspec finds."""
    return merged(HERE / model) if model in known() else folder_anywhere(model)


def beside(model: str, name: str) -> Path | None:
    """What lies beside one of our models, if it is there."""
    path = HERE / model / name
    return path if path.exists() else None


def questions_of(model: str) -> list[str]:
    """The questions that lie beside one of our models; none for others."""
    path = beside(model, ASKED)
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    return [json.loads(line)["prompt"] for line in lines]


def located(model: str) -> str:
    """The model as selfspec's own harness takes it."""
    return str(folder_of(model)) if model in known() else model


def merged(adapter: Path) -> Path:
    """An adapter and its base as one folder, made at first use."""
    base, _ = base_of(adapter)
    digest = hashlib.sha256()
    parts = (folder / name for folder in parts_of(adapter) for name in (DESCRIPTION, TENSORS))
    for path in (*(adapter / name for name in (CONFIG, WEIGHTS, FACTS)), *parts):
        digest.update(path.read_bytes())
    kind = f"{adapter.name}-{digest.hexdigest()[:16]}"

    def write(_: Path, target: Path) -> None:
        write_merged(adapter, target / adapter.name)

    return converted(folder_anywhere(base), kind, write) / adapter.name


def parts_of(adapter: Path) -> list[Path]:
    """The folders of trained parts beside an adapter."""
    return sorted(path.parent for path in adapter.glob(f"*/{DESCRIPTION}"))


def write_merged(adapter: Path, target: Path) -> None:
    """Float32 weights with what the adapter adds to them, the tokenizer and trained parts."""
    with quiet_transformers(bars=False), warnings.catch_warnings(action="ignore"):
        found = load(str(adapter), adapter="merge", dtype="float32", device="cpu")
        found.model.save_pretrained(target)
    facts = json.loads((adapter / FACTS).read_text(encoding="utf-8"))
    assert found.tokenizer is not None, "the base was loaded with one"
    if not facts["chat_template"]:
        found.tokenizer.chat_template = None
    found.tokenizer.save_pretrained(target)
    for part in parts_of(adapter):
        shutil.copytree(part, target / part.name)
