"""Measures a table of trained drafts in this process: the model less most of its halves drafts, as
it is and trained on some of the model's own tokens. Draft & Verify's Table 9.

The model answers questions that are not asked later, halves are chosen by that text, and a draft is
trained for each row: small matrices beside the linears that run (`lora N`) or these linears
themselves (`whole N`), on the first N tokens that the model wrote. Everything is kept in a folder
beside the result, and the same command goes on. Does not print.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.aggressive import Surprise, aggressive
from benchmarks.paper.copies_run import figures
from benchmarks.paper.inside import Inside
from benchmarks.paper.result import CopyTurn, PaperResult, key_of
from benchmarks.paper.table import PLAIN, PaperRow, PaperTable
from selfspec.bench.contestants import own_options
from selfspec.bench.suite_run import fitted
from selfspec.bench.tasks import Asked, Item, read_task
from selfspec.core.files import write_whole
from selfspec.core.text_rows import read_rows
from selfspec.errors import OptionError
from selfspec.train.draft_lora import LoraRecipe
from selfspec.train.own_text import OwnText, Question, write
from selfspec.train.part_run import REPORT, Observer, train_small_part
from selfspec.train.parts import PartOptions, Progress
from selfspec.train.states import Conversation
from selfspec.tune.probe import Text

LONGEST = 256  # tokens of a question that is trained on, and of its answer
READ, READ_TOKENS = 3, 64  # answers to short questions by which halves are chosen, and of each
SHORT = 80  # tokens of such a question
HELD_OUT = 0.08  # of the trained text, to say how well the training went
OPTIONS = {
    "lora": PartOptions(epochs=2, batch_tokens=384, learning_rate=2e-3),
    "whole": PartOptions(epochs=2, batch_tokens=384, learning_rate=3e-4),
}
RANK = {"lora": 16, "whole": 0}


class Trained:
    """A table of trained drafts at work. `folder` keeps text, halves and drafts."""

    def __init__(
        self,
        table: PaperTable,
        inside: Inside,
        source: str,
        samples: Sequence[Asked],
        folder: Path,
        save: Callable[[PaperResult], None],
    ) -> None:
        self._table, self._inside, self._save, self._folder = table, inside, save, folder
        self._samples, self._source = samples, source

    def measure(self, result: PaperResult) -> None:
        """All that is missing."""
        self._folder.mkdir(parents=True, exist_ok=True)
        most = max(tokens_of(row) for row in self._table.rows)
        text = self._written(most)
        attention, mlp = self._halves(text)
        result.halves = {"attention": attention, "mlp": mlp}
        rows = sorted(self._table.rows, key=tokens_of)
        # who is timed takes turns with all others, who is counted need not wait for them
        for group in [rows] if result.timed else [[row] for row in rows]:
            for row in group:
                if row.copy:
                    first = self._train(row, text, attention, mlp)
                    result.values.setdefault(key_of(row), {})["first right"] = first
            self._turns(result, group)

    def _turns(self, result: PaperResult, rows: Sequence[PaperRow]) -> None:
        """Rows that take turns on each question."""
        for item in [item for part in self._samples for item in part.items]:
            for row in rows:
                turns = result.turns.setdefault(key_of(row), [])
                if item.id not in {turn.question for turn in turns}:
                    self._inside.say(f"{item.id}: {row.name}")
                    part = {"part": str(self._folder / name_of(row))}
                    draft = part if row.copy else result.halves
                    turns.append(self._turn(row, draft, item, result.timed))
                    self._figures(result)
                    self._save(result)

    # ------------------------------------------------------------------------------------- text

    def _written(self, most: int) -> Path:
        """The model's own answers, in order, with at least so many tokens."""
        out = self._folder / "own.jsonl"
        if _tokens(out) >= most:
            return out
        llm, options = self._inside.llm, OwnText(max_new_tokens=LONGEST, batch=8)
        questions = list(self._questions())
        for count in range(options.batch, len(questions) + options.batch, options.batch):
            write(llm, questions[:count], out, options)  # goes on where it was
            self._inside.say(f"the model has written {_tokens(out)} of {most} tokens")
            if _tokens(out) >= most:
                return out
        raise OptionError(
            f"the questions gave {_tokens(out)} tokens of the model's own, and {most} are to "
            "be trained on; give a file with more questions"
        )

    def _questions(self) -> Iterator[Question]:
        """Those of the file that are short and not asked by the table, mixed."""
        asked = {item.id for part in self._samples for item in part.items}
        others = [item for part in read_task(self._source) for item in part.items]
        random.Random(0).shuffle(others)
        for number, item in enumerate(others):
            ids = self._inside.words.encode(item)
            if item.id not in asked and len(ids) <= LONGEST:
                yield Question(item.text, ids, item.task, number)

    def _halves(self, text: Path) -> tuple[list[int], list[int]]:
        """What is left out, chosen once."""
        kept, layers = self._folder / "halves.json", self._inside.words.layers
        if not kept.is_file():
            rows = [row for _, row in read_rows(text)]
            short = [row for row in rows if len(row["prompt_ids"]) <= SHORT] or rows
            texts = [
                Text(
                    [*row["prompt_ids"], *row["response_ids"][:READ_TOKENS]], len(row["prompt_ids"])
                )
                for row in short[:READ]
            ]
            surprise = Surprise(self._inside.llm.model, texts)
            attention, mlp = aggressive(layers, surprise, self._inside.say)
            write_whole(kept, json.dumps({"attention": attention, "mlp": mlp}))
        found = json.loads(kept.read_text(encoding="utf-8"))
        return list(found["attention"]), list(found["mlp"])

    # --------------------------------------------------------------------------------- training

    def _train(
        self, row: PaperRow, text: Path, attention: Sequence[int], mlp: Sequence[int]
    ) -> float:
        """The row's draft, trained or found. Of its drafts on held-out text, each after the text
        itself, the share that is right."""
        how, count = row.copy.split()[0], tokens_of(row)
        part, say = self._folder / name_of(row), self._inside.say
        if not _is_done(part):
            self._trained(row.name, part, how, count, text, (tuple(attention), tuple(mlp)), say)
            (part / "checkpoint.safetensors").unlink()  # as large as three such drafts
        report = json.loads((part / REPORT).read_text(encoding="utf-8"))
        return float(report["acceptance"][0])

    def _trained(
        self, name: str, part: Path, how: str, count: int, text: Path,
        halves: tuple[tuple[int, ...], tuple[int, ...]], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        def told(progress: Progress) -> None:
            say(f"{name}: step {progress.step} of {progress.steps}, loss {progress.loss:.2f}")

        train_small_part(
            str(self._inside.folder),
            [first_tokens(text, count)],
            part,
            recipe=LoraRecipe(*halves, rank=RANK[how]),
            options=OPTIONS[how],
            length=2 * LONGEST,
            held_out=HELD_OUT,
            states=self._folder / f"states-{count}",
            plot=False,
            observer=Observer(training=told),
        )

    def _turn(self, row: PaperRow, draft: dict[str, Any], item: Item, timed: bool) -> CopyTurn:
        inside, limit = self._inside, self._inside.wishes.new_tokens
        options = own_options(str(row.method))
        if options["draft"] is not None:
            options["draft_options"] = draft
        ids, _ = fitted(item, inside.words.encode(item), inside.words.context, limit)
        eos = list(inside.words.eos)
        made = inside.llm.generate(ids, max_new_tokens=limit, eos=eos, **options).stats
        seconds = made.decode_seconds if timed else None
        return CopyTurn(
            item.id, made.drafted, made.accepted, made.verifications, made.decoded, seconds
        )

    def _figures(self, result: PaperResult) -> None:
        (plain,) = (row for row in self._table.rows if row.method == PLAIN)
        base = result.turns.get(key_of(plain), [])
        for row in self._table.rows:
            turns = result.turns.get(key_of(row), [])
            result.values.setdefault(key_of(row), {}).update(figures(turns, base))


def tokens_of(row: PaperRow) -> int:
    """How many tokens the row's draft is trained on."""
    return int(row.copy.split()[-1]) if row.copy else 0


def name_of(row: PaperRow) -> str:
    """The folder of the row's draft."""
    return row.copy.replace(" ", "-")


def first_tokens(text: Path, count: int) -> Path:
    """A file with the first answers of another, so many tokens of them, and with those that are
    held out: the same for any count."""
    out, kept, so_far = text.with_name(f"own-{count}.jsonl"), [], 0
    for _, row in read_rows(text):
        held = _is_held(row)
        if held or so_far < count:
            so_far += 0 if held else len(row["response_ids"])
            kept.append(json.dumps(row))
    write_whole(out, "\n".join(kept) + "\n")
    return out


def _is_held(row: dict[str, Any]) -> bool:
    """Whether training holds an answer out: that hangs on its question."""
    return Conversation(tuple(row["prompt_ids"]), len(row["prompt_ids"])).held_out(HELD_OUT)


def _tokens(text: Path) -> int:
    """That may be trained on."""
    there = text.is_file() and text.stat().st_size
    rows = (row for _, row in read_rows(text)) if there else ()
    return sum(len(row["response_ids"]) for row in rows if not _is_held(row))


def _is_done(part: Path) -> bool:
    report = part / REPORT
    return report.is_file() and json.loads(report.read_text(encoding="utf-8"))["done"]
