"""Measures a table of copies in this process: rows whose copy has a kernel take turns on each
question, masked copies come after each other and are counted only. A copy that drafts has keys and
values of its own (`draft-model`).

What was counted is kept after every answer, and the same command goes on. Does not print.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.copies import Norms, copy_of, input_norms, is_mask
from benchmarks.paper.inside import TEXT, Inside
from benchmarks.paper.result import CopyTurn, PaperResult, key_of
from benchmarks.paper.table import OWN, PLAIN, PaperRow, PaperTable
from selfspec.bench.contestants import own_options
from selfspec.bench.sources import read_text
from selfspec.bench.suite_run import fitted
from selfspec.bench.suite_stats import interval
from selfspec.bench.tasks import Asked, read_task
from selfspec.draft.from_models.draft_model import DraftModel
from selfspec.model.layered import LayeredModel

CALIBRATION = 8192  # tokens
COPY = "copy"  # the drafter of rows in which the copy drafts for the model


def asked(table: PaperTable, sources: Mapping[str, str], wishes: Any) -> list[Asked]:
    """What the table's rows ask: one sample a task."""
    found = []
    for task in (task for task in table.tasks if task in sources):
        parts = read_task(
            sources[task], wishes.sample, wishes.skip_bad, wishes.contexts, wishes.chat
        )
        found += [part for part in parts if task == OWN or part.sample.task == task]
    return found


class Copies:
    """A table of copies at work."""

    def __init__(
        self,
        table: PaperTable,
        inside: Inside,
        sources: Mapping[str, str],
        draft: str | None,
        samples: Sequence[Asked],
        save: Callable[[PaperResult], None],
    ) -> None:
        self._table, self._inside, self._draft, self._save = table, inside, draft, save
        self._sources, self._samples = sources, samples
        self._norms: Norms | None = None

    def measure(self, result: PaperResult) -> None:
        """All that is missing."""
        masks = dict.fromkeys(row.copy for row in self._table.rows if is_mask(row.copy))
        self._turns(result, [row for row in self._table.rows if not is_mask(row.copy)])
        for mask in masks:
            self._turns(result, [row for row in self._table.rows if row.copy == mask])

    def _turns(self, result: PaperResult, rows: Sequence[PaperRow]) -> None:
        """Rows that take turns on each question."""
        count = sum(len(part.items) for part in self._samples)
        if all(len(result.turns.get(key_of(row), ())) == count for row in rows):
            return
        model, copies = self._inside.llm.model, dict[str, LayeredModel]()
        for name in dict.fromkeys(row.copy for row in rows):
            self._inside.say(f"making the copy {name!r}")
            copies[name] = copy_of(model, name, self._norms_for(name)) if name else model
        for row in rows:
            held = held_bytes(copies[row.copy], *([model] if _drafts(row) else []))
            result.values.setdefault(key_of(row), {})["memory, MB"] = held / 1e6
        for item in [item for part in self._samples for item in part.items]:
            for row in rows:
                turns = result.turns.setdefault(key_of(row), [])
                if item.id not in {turn.question for turn in turns}:
                    self._inside.say(f"{item.id}: {row.name}")
                    timed = result.timed and not is_mask(row.copy)
                    turns.append(self._turn(row, copies[row.copy], item, timed))
                    self._figures(result)
                    self._save(result)

    def _turn(self, row: PaperRow, copy: LayeredModel, item: Any, timed: bool) -> CopyTurn:
        inside, limit = self._inside, self._inside.wishes.new_tokens
        method = self._table.method_of(row, inside.words.layers, self._draft)
        options = own_options(str(method))
        if _drafts(row):
            llm = inside.llm
            options |= {"draft": DraftModel(model=copy), "draft_options": None}
        else:
            llm = inside.llm.view(copy)
        ids, _ = fitted(item, inside.words.encode(item), inside.words.context, limit)
        made = llm.generate(ids, max_new_tokens=limit, eos=list(inside.words.eos), **options).stats
        seconds = made.decode_seconds if timed else None
        return CopyTurn(
            item.id, made.drafted, made.accepted, made.verifications, made.decoded, seconds
        )

    def _norms_for(self, name: str) -> Norms | None:
        if not name.startswith("wanda"):
            return None
        if self._norms is None:
            self._inside.say("reading the calibration text")
            text = read_text(Path(self._sources[TEXT].partition("=")[2]))
            ids = self._inside.words.tokenizer(text, add_special_tokens=False).input_ids
            self._norms = input_norms(self._inside.llm.model, ids[:CALIBRATION])
        return self._norms

    def _figures(self, result: PaperResult) -> None:
        plain = {row.copy: key_of(row) for row in self._table.rows if row.method == PLAIN}
        for row in self._table.rows:
            turns = result.turns.get(key_of(row), [])
            base = result.turns.get(plain.get("" if _drafts(row) else row.copy, ""), [])
            result.values.setdefault(key_of(row), {}).update(figures(turns, base))


def _drafts(row: PaperRow) -> bool:
    """Whether the row's copy drafts for the model; otherwise it is the model."""
    return str(row.method).partition("@")[0] == COPY


def held_bytes(*models: LayeredModel) -> int:
    """Of all their products, shared ones once."""
    linears = {id(linear): linear for model in models for linear in model.linears}
    return sum(linear.bytes for linear in linears.values())


def figures(turns: Sequence[CopyTurn], plain: Sequence[CopyTurn]) -> dict[str, float]:
    """What turns say, next to those of plain decoding of the same weights."""
    found: dict[str, float] = {}
    drafted, rounds = sum(turn.drafted for turn in turns), sum(turn.verifications for turn in turns)
    decoded = sum(turn.decoded for turn in turns)
    if drafted:
        found["accepted"] = sum(turn.accepted for turn in turns) / drafted
    if rounds:
        found["tokens a round"] = decoded / rounds
    own, base = _costs(turns), _costs(plain)
    if own:
        found["ms/token"] = 1000 * sum(own.values()) / len(own)
    speed = interval([[(base[name], own[name]) for name in own if name in base]])
    if speed is not None:
        found |= {"speedup": speed.value, "speedup low": speed.low, "speedup high": speed.high}
    return found


def _costs(turns: Sequence[CopyTurn]) -> dict[str, float]:
    """Seconds of a token, by question."""
    timed = [turn for turn in turns if turn.seconds is not None and turn.decoded]
    return {turn.question: (turn.seconds or 0.0) / turn.decoded for turn in timed}
