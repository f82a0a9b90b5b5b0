"""Measures a paper's table on the model at hand: speeds through the harness, one suite result a
task, and what else it needs.

Unverified early exits, samples for pass@k, exits' perplexity and accuracy, and similarities of
halves are computed in this process (`inside.py`). What was measured is kept: the same command goes
on. Does not print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.models import folder_of
from benchmarks.paper.copies_run import Copies, asked
from benchmarks.paper.inside import CHOICES, TEXT, Inside, Say
from benchmarks.paper.leaving import Leaving
from benchmarks.paper.quality import check_answers, judge
from benchmarks.paper.result import PaperResult, key_of
from benchmarks.paper.table import (
    COPIES,
    COSINES,
    EXITS,
    LEAVING,
    LOSSY,
    OWN,
    PLAIN,
    SUMMARIES,
    TIMED,
    TRAINED,
    PaperTable,
    exit_of,
)
from benchmarks.paper.trained_run import Trained
from selfspec import __version__
from selfspec.bench.contestants import own_options
from selfspec.bench.peer_host import package_versions
from selfspec.bench.provenance import gather
from selfspec.bench.schema import OURS, Score, SuiteRun, continued, write
from selfspec.bench.suite import Suite
from selfspec.bench.suite_run import PACKAGES, Wishes, prepare
from selfspec.bench.suite_stats import Row, rows
from selfspec.bench.tasks import Item, read_task
from selfspec.core.sampling import SamplingParams
from selfspec.errors import OptionError, nearest

Sit = Callable[[Suite], None]
Texts = dict[str, list[str]]  # of each question: what was written, once or several times
Golds = dict[str, Item]


def sources_of(table: PaperTable, given: Sequence[str]) -> dict[str, str]:
    """For each task of the table that is asked: how it is asked, NAME or NAME=PATH. All of them if
    nothing is given."""
    wanted = [task for task in table.tasks if task != "-"]
    wanted += [TEXT] if any(row.copy.startswith("wanda") for row in table.rows) else []
    local = {OWN, TEXT, CHOICES}
    if not given and wanted:
        if table.kind != "speed" or set(wanted) <= local:
            need = " ".join(f"--task {_asked_as(task)}=FILE" for task in wanted)
            raise OptionError(
                f"{table.name} needs files of yours; give {need}, or those of them that you have"
            )
        return {task: _asked_as(task) for task in wanted if task not in local}
    found: dict[str, str] = {}
    for text in given:
        name = text.partition("=")[0]
        fitting = [task for task in wanted if _asked_as(task) == name]
        if not fitting:
            near = nearest(name, [_asked_as(task) for task in wanted])
            raise OptionError(f"{table.name} does not ask the task {name!r}; {near}")
        found |= dict.fromkeys(fitting, text)
    if lacking := [
        task for task in wanted if table.kind in (COPIES, TRAINED) and task not in found
    ]:
        need = " ".join(f"--task {_asked_as(task)}=FILE" for task in lacking)
        raise OptionError(f"{table.name} also needs {need}: without it rows would stay empty")
    return found


def _asked_as(task: str) -> str:
    return "spec-bench" if task in ("conversation", SUMMARIES) else task


def counted(table: PaperTable) -> list[str]:
    """Its columns that a busy machine does not disturb."""
    return [measure for measure in table.measures if measure not in TIMED]


class Measuring:
    """One table at work. `draft`: what drafts instead of the table's drafter."""

    def __init__(
        self,
        table: PaperTable,
        wishes: Wishes,
        draft: str | None,
        command: str,
        out: Path,
        say: Say,
        timed: bool = True,
    ) -> None:
        if not timed and not counted(table):
            raise OptionError(
                f"{table.name} is a table of times, so --untimed would leave nothing of it; give "
                "it a quiet machine"
            )
        if draft and table.kind == TRAINED:
            raise OptionError(
                f"{table.name} trains its own drafts, so --methods {draft!r} would draft in no row "
                "of it; leave it out"
            )
        self._table, self._wishes, self._draft = table, wishes, draft
        self._command, self._out, self._say = command, out, say
        self._sources = sources_of(table, wishes.task)
        self._inside = Inside(folder_of(wishes.model), wishes, say)
        self._layers, name = self._inside.words.layers, self._inside.folder.name
        versions = {"selfspec": __version__, **package_versions(PACKAGES)}
        provenance = gather(command, wishes.threads, versions)
        self.result = PaperResult(
            provenance, table.name, name, self._layers, wishes.new_tokens, draft=draft or "",
            timed=timed,
        )  # fmt: skip

    def measure(self, sit: Sit) -> PaperResult:
        """Everything the table asks; `sit` runs a prepared suite behind a progress bar."""
        if self._table.kind == EXITS:
            self.result.values = self._inside.exits(self._table, self._sources)
        elif self._table.kind == COSINES:
            found = self._inside.halves(Path(self._sources[TEXT].partition("=")[2]))
            if not self.result.timed:
                found = {row: values for row, values in found.items() if "time" not in row}
            self.result.values = found
        elif self._table.kind == LEAVING:
            samples = asked(self._table, self._sources, self._wishes)
            Leaving(self._table, self._inside, samples).measure(self.result)
        elif self._table.kind in (COPIES, TRAINED):
            self._turns()
        else:
            for task, text in self._sources.items():
                self._task(task, text, sit)
        self.result.complete = True
        return self.result

    def _turns(self) -> None:
        """Rows that take turns on each question, in this process."""
        samples = asked(self._table, self._sources, self._wishes)
        self.result.samples = [part.sample.name for part in samples]
        if not self._wishes.fresh:
            self.result = continued(self.result, self._out, PaperResult.plan)
        how = self._table, self._inside

        def save(result: PaperResult) -> None:
            write(result, self._out)

        if self._table.kind == COPIES:
            Copies(*how, self._sources, self._draft, samples, save).measure(self.result)
            return
        source, kept = self._sources[SUMMARIES], self._out.with_suffix("")
        Trained(*how, source, samples, kept, save).measure(self.result)

    def _task(self, task: str, text: str, sit: Sit) -> None:
        table, wishes = self._table, self._wishes
        mine = [row for row in table.rows if row.task == task]
        methods = [table.method_of(row, self._layers, self._draft) for row in mine]
        named = [method for method in methods if method not in (None, PLAIN, LOSSY)]
        asking = replace(
            wishes, task=[text], methods=tuple(dict.fromkeys(map(str, named))), peers=(),
            temperature=table.temperature, top_p=table.top_p,
        )  # fmt: skip
        out = self._out.with_name(f"{self._out.stem}-{task}.json")
        parts = read_task(text, wishes.sample, wishes.skip_bad, wishes.contexts, wishes.chat)
        items = [item for part in parts for item in part.items]
        if task not in ("conversation", SUMMARIES):  # Spec-Bench's have no answers
            check_answers(text, {item.id: item.gold for item in items}, table.measures)
        prepared = prepare(asking, self._command, out)
        sit(prepared)
        self.result.runs += [out.name] if self.result.timed else []
        asked = task if task != OWN else prepared.run.plan.samples[0].task
        golds = {item.id: item for item in items if item.task == asked}
        self._score(prepared.run, asked, golds)
        for row in mine:
            if row.method == LOSSY:
                self._lossy(prepared, asked, golds, exit_of(row, self._layers))
        if table.samples > 1:
            self._samples(prepared, asked, golds, named)
        write(prepared.run, out)
        for row, method in zip(mine, methods, strict=True):
            lossy = f"{LOSSY}/{exit_of(row, self._layers)}" if row.method == LOSSY else ""
            if method is not None:
                values = _values(prepared.run, lossy or f"{OURS}/{method}", asked)
                if not self.result.timed:
                    values = {name: values[name] for name in counted(table) if name in values}
                self.result.values[key_of(row)] = values

    def _score(self, run: SuiteRun, task: str, golds: Golds) -> None:
        """Quality of what each contestant wrote: the reference's text, or its own where that
        differs."""
        texts = {answer.question: answer.text for answer in run.answers if answer.task == task}
        for name in run.plan.contestants:
            turns = [turn for turn in run.turns if turn.contestant == name]
            own = {each.question: each.text for turn in turns for each in turn.differences}
            written = {question: [own.get(question, text)] for question, text in texts.items()}
            self._judge(run, name, task, written, golds)

    def _judge(self, run: SuiteRun, name: str, task: str, written: Texts, golds: Golds) -> None:
        missing = [each for each in self._table.measures if not _score_of(run, name, task, each)]
        if written and missing:
            self._say(f"judging {name}")
            wanted = {question: golds[question].gold for question in written}
            for measure, value in judge(written, wanted, missing).items():
                run.scores.append(Score(name, task, measure, value, len(written)))

    def _lossy(self, prepared: Suite, task: str, golds: Golds, layer: int) -> None:
        """What the first layers write alone, and how fast."""
        run, name = prepared.run, f"{LOSSY}/{layer}"
        if _score_of(run, name, task, "tokens/s"):
            return
        written: Texts = {}
        decoded, seconds = 0, 0.0
        for prompt in prepared.prompts:
            if prompt.id in golds:
                self._say(f"{prompt.id}: the first {layer} layers alone")
                made = self._inside.written(list(prompt.ids), layer, run.plan.new_tokens)
                written[prompt.id] = [prepared.decode(made.tokens)]
                decoded, seconds = decoded + made.stats.decoded, seconds + made.stats.decode_seconds
        self._judge(run, name, task, written, golds)
        if decoded:
            run.scores.append(Score(name, task, "tokens/s", decoded / seconds, len(written)))

    def _samples(self, prepared: Suite, task: str, golds: Golds, methods: Sequence[Any]) -> None:
        """Several answers a question, drawn with a method of the table; they count for plain
        decoding, which writes the same."""
        run, table, llm = prepared.run, self._table, self._inside.llm
        names = [f"{OURS}/{PLAIN}", *(f"{OURS}/{method}" for method in methods)]
        if _score_of(run, names[0], task, "pass@10"):
            return
        options = own_options(methods[0] if methods else PLAIN)
        options |= {"max_new_tokens": run.plan.new_tokens, "eos": list(prepared.eos)}
        written: Texts = {}
        for prompt in prepared.prompts:
            self._say(f"{prompt.id}: {table.samples} samples")
            for number in range(table.samples):
                seed = run.plan.seed + number
                drawn = SamplingParams(temperature=table.temperature, top_p=table.top_p, seed=seed)
                made = llm.generate(list(prompt.ids), sampling=drawn, **options)
                written.setdefault(prompt.id, []).append(prepared.decode(made.tokens))
        run.scores = [score for score in run.scores if not score.metric.startswith("pass@")]
        for name in names:
            self._judge(run, name, task, written, golds)


def _score_of(run: SuiteRun, name: str, task: str, metric: str) -> list[Score]:
    wanted = (name, task, metric)
    return [each for each in run.scores if (each.contestant, each.task, each.metric) == wanted]


def _values(run: SuiteRun, name: str, task: str) -> dict[str, float]:
    """Every figure that there is for a contestant: the harness's, and its scores."""
    scores = [each for each in run.scores if (each.contestant, each.task) == (name, task)]
    found = {score.metric: score.value for score in scores}
    row = next((row for row in rows(run, 1, task) if row.contestant == name), None)
    if row is not None:
        found |= {measure: value for measure, value in _harness(row).items() if value is not None}
    if "tokens/s" in found:
        found["ms/token"] = 1000 / found["tokens/s"]
    return found


def _harness(row: Row) -> dict[str, float | None]:
    speed = row.over_plain
    return {
        "tokens/s": row.tokens_per_second,
        "speedup": None if speed is None else speed.value,
        "speedup low": None if speed is None else speed.low,
        "speedup high": None if speed is None else speed.high,
        "accepted": row.acceptance,
        "draft share": row.draft_share,
        "verify share": row.verify_share,
    }
