"""Files of all kinds, whole, and what chance makes of them: cut, flipped, with other values, other
tensors, or something that is no file in their place."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from selfspec import LLM
from selfspec.bench.schema import SuiteRun, read
from selfspec.core.text_rows import read_rows
from selfspec.testing import tiny_adapter, tiny_head, tiny_llm, tiny_lora, tiny_tokenizer
from selfspec.train.own_text import questions_from
from selfspec.trained.files import TrainedPart, signature
from tests.model.gguf_files import write as write_gguf

from .doors import PROMPT, SHORT, wrong

# what JSON can hold, and some that it should not
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 1.5, -0.5, 10**6, 10**12, 10**30, float("nan"), 1e308),
    *("", "x", "0", "float99", "../x", "/dev/zero", "\ud800", "x" * 10**5),
    *([], [0], [1, 2], [-1], ["x"], [[1]], [None], {}, {"x": 1}, [0] * 1000, float("inf")),
]
# what a GGUF file may say of counts, lengths, kinds and numbers
WORDS = [0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]
HEADER = {"magic": (0, 4), "version": (4, 4), "tensors": (8, 8), "values": (16, 8), "key": (24, 8)}
DTYPES = [torch.float64, torch.float16, torch.int64, torch.int8, torch.bool, torch.bfloat16]
Opened = Callable[[Path], object]


def numbers_of(llm: LLM) -> TrainedPart:
    """A tiny table of successors."""
    vocabulary = llm.model.shape.vocabulary
    tensors = {
        "tokens.keys": torch.tensor([3, 5]),
        "tokens.successors": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "tokens.chances": torch.tensor([[0.5, 0.2], [0.9, 0.0]]).half(),
        "pairs.keys": torch.tensor([3 * vocabulary + 5]),
        "pairs.successors": torch.tensor([[1]], dtype=torch.int32),
        "pairs.chances": torch.tensor([[0.5]]).half(),
    }
    return TrainedPart("successors", signature(llm.model), {"vocabulary": vocabulary}, tensors)


class Kinds:
    """Whole examples of every kind of file, in a folder, each with what opens it."""

    def __init__(self, root: Path) -> None:
        self.llm, self.root = tiny_llm(), root
        model = self.llm.model
        parts = {
            "draft-head": (tiny_head(model), "draft-head"),
            "exit-adapter": (tiny_adapter(model), "early-exit"),
            "draft-lora": (tiny_lora(model), "layer-skip"),
            "successors": (numbers_of(self.llm), "recycle"),
        }
        self.plain = self.llm.generate(PROMPT, **SHORT).tokens
        self.open: dict[str, Opened] = {}
        for kind, (part, drafter) in parts.items():
            part.save(root / kind)
            part.save(root / f"{kind}-8", eight_bits=True)
            for name in (kind, f"{kind}-8"):
                self.open[name] = lambda path, drafter=drafter: self._draft(path, drafter)
        tiny = tiny_tokenizer()
        from selfspec.testing import tiny_model

        tiny_model().save_pretrained(root / "model")
        tiny.save_pretrained(root / "model")
        self.open["model"] = self._load
        (root / "gguf").mkdir()
        write_gguf(root / "gguf" / "tiny.gguf", GGMLQuantizationType.Q8_0)
        self.open["gguf"] = lambda path: self._load(path / "tiny.gguf")
        (root / "rows").mkdir()
        rows = [{"prompt": "hello"}, {"messages": [{"role": "user", "content": "x"}]}]
        rows += [{"turns": ["a", "b"]}, {"instruction": "do", "input": "this"}, {"text": "words"}]
        (root / "rows" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        self.open["rows"] = lambda path: list(
            questions_from(self.llm, read_rows(path / "rows.jsonl"))
        )

    def add_result(self, result: dict[str, Any]) -> None:
        """A result of `selfspec bench`."""
        (self.root / "result").mkdir()
        (self.root / "result" / "result.json").write_text(json.dumps(result))
        self.open["result"] = lambda path: read(SuiteRun, path / "result.json")

    def _draft(self, path: Path, drafter: str) -> None:
        how: Any = {**SHORT, "draft": drafter, "draft_options": {"part": str(path)}}
        found = self.llm.generate(PROMPT, **how, control="fixed")
        assert found.tokens == self.plain, "another text was written"

    def _load(self, path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a file is expanded
            LLM.from_pretrained(path).generate(PROMPT, **SHORT)


def damaged(kinds: Kinds, kind: str, dice: random.Random, folder: Path) -> str:
    """Make a copy of that kind with one thing wrong; says what."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kinds.root / kind, folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = dice.choice(files)
    if path.suffix == ".json" and dice.random() < 0.75:
        return _other_value(path, dice)
    if path.suffix == ".jsonl" and dice.random() < 0.75:
        return _other_row(path, dice)
    if path.suffix == ".safetensors" and dice.random() < 0.75:
        return _other_tensor(path, dice)
    if path.suffix == ".gguf" and dice.random() < 0.75:
        return _other_word(path, dice)
    return _other_bytes(path, dice)


def _other_bytes(path: Path, dice: random.Random) -> str:
    data = path.read_bytes()
    at = dice.randrange(max(1, min(len(data), 2000)))
    kinds: dict[str, Callable[[], object]] = {
        "cut": lambda: path.write_bytes(data[:at]),
        "empty": lambda: path.write_bytes(b""),
        "flipped": lambda: (
            path.write_bytes(
                data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]
            )
            if data
            else None
        ),
        "longer": lambda: path.write_bytes(data + b"\0" * 7),
        "missing": lambda: path.unlink(),
        "noise": lambda: path.write_bytes(dice.randbytes(200)),
        "deep": lambda: path.write_text("[" * 100_000),
        "deeper": lambda: path.write_text('{"model_type":' + '{"a":' * 1000 + "1" + "}" * 1001),
        "folder": lambda: (path.unlink(), path.mkdir()),
        "pipe": lambda: (path.unlink(), os.mkfifo(path)),
        "device": lambda: (path.unlink(), path.symlink_to("/dev/zero")),
        "nowhere": lambda: (path.unlink(), path.symlink_to("/nonexistent")),
    }
    if path.suffix == ".jsonl":  # a user's own pipe (`<(zcat x.gz)`) is waited for on purpose
        del kinds["pipe"]
    what = dice.choice(sorted(kinds))
    kinds[what]()
    return f"{path.name} {what} at {at}"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values stand inside a JSON."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:3])
    for key, each in items:
        yield (*path, key)
        yield from places(each, (*path, key))


def _changed(value: Any, dice: random.Random) -> tuple[Any, str]:
    """The value with one thing inside it replaced, removed or added."""
    value = copy.deepcopy(value)
    where = dice.choice(list(places(value)) or [()])
    if not where:
        return dice.choice(VALUES), "all"
    inside = value
    for key in where[:-1]:
        inside = inside[key]
    name = ".".join(map(str, where))
    if dice.random() < 0.1:
        del inside[where[-1]]
        return value, f"{name} removed"
    if dice.random() < 0.05 and isinstance(inside, dict):
        inside["nobody knows this"] = 1
        return value, f"beside {name}"
    inside[where[-1]] = new = dice.choice(VALUES)
    return value, f"{name} = {str(new)[:30]!r}"


def _other_value(path: Path, dice: random.Random) -> str:
    value, what = _changed(json.loads(path.read_text(encoding="utf-8")), dice)
    path.write_text(json.dumps(value))
    return f"{path.name}: {what}"


def _other_row(path: Path, dice: random.Random) -> str:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    at = dice.randrange(len(rows))
    rows[at], what = _changed(rows[at], dice)
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"row {at}: {what}"


def _other_word(path: Path, dice: random.Random) -> str:
    """Another number in the head of a GGUF file: its own fields, or whatever stands behind the name
    of a value or of a tensor (the kind of value, its length, sizes of tensors, their kinds)."""
    data = bytearray(path.read_bytes())
    names = [b"qwen2.", b"tokenizer.", b"general.", b"blk.", b"token_embd.", b"output"]
    if dice.random() < 0.4:
        what = dice.choice(sorted(HEADER))
        at, size = HEADER[what]
    else:
        name = dice.choice(names)
        starts = [at for at in range(len(data)) if data.startswith(name, at)]
        at = dice.choice(starts)
        what, size = f"{name.decode()} at {at}", dice.choice([1, 4, 8])
        # the length of the name stands 8 before it, what the name is of behind it
        at += dice.choice([-8, *range(len(name), 60)])
    word = dice.choice(WORDS) % 2 ** (8 * size)
    data[at : at + size] = word.to_bytes(size, "little")
    path.write_bytes(data)
    return f"{path.name}: {what} = {word}"


def _other_tensor(path: Path, dice: random.Random) -> str:
    tensors = load_file(path)
    name = dice.choice(sorted(tensors))
    tensor = tensors[name].clone()
    kinds: dict[str, Callable[[], torch.Tensor | None]] = {
        "removed": lambda: None,
        "empty": lambda: tensor[:0].contiguous(),
        "longer": lambda: torch.cat([tensor, tensor]),
        "shorter": lambda: tensor[:-1].contiguous(),
        "flat": lambda: tensor.flatten(),
        "single": lambda: tensor.flatten()[0].clone(),
        "turned": lambda: tensor.T.contiguous() if tensor.dim() == 2 else tensor[None],
        "negative": lambda: -tensor.float() - 1,
        "doubled": lambda: tensor.flatten()[:1].expand(tensor.shape).contiguous(),
        "huge": lambda: torch.full(tensor.shape, 2**30).to(tensor.dtype),
        "nan": lambda: torch.full(tensor.shape, float("nan")),
        "inf": lambda: torch.full(tensor.shape, float("inf")),
        "dtype": lambda: tensor.to(dice.choice(DTYPES)),
    }
    what = dice.choice(sorted(kinds))
    made = kinds[what]()
    del tensors[name]
    if made is not None:
        tensors[name] = made
    if dice.random() < 0.05:
        tensors["nobody.knows.this"] = torch.ones(2)
    save_file(tensors, path)
    return f"{path.name}: {name} {what}"


def attempt_at(kinds: Kinds, kind: str, dice: random.Random, folder: Path) -> str | None:
    """Open one damaged file of a kind; says what is wrong with what came of it."""
    what = damaged(kinds, kind, dice, folder)
    problem = wrong(lambda: kinds.open[kind](folder), may_succeed=True)
    return problem and f"{kind}: {what}: {problem}"
