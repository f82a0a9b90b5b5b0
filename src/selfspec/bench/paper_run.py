"""Measures a paper's table on the model at hand: speeds through the harness, one suite result a
task, and what else it needs.

Unverified early exits, samples for pass@k, exits' perplexity and accuracy, and similarities of
halves are computed in this process, by the same engine. What was measured is kept: the same command
goes on. Does not print.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import OptionError, nearest
from .layers import Similarities
from .paper import COSINES, EXITS, LOSSY, OWN, PLAIN, PaperRow, PaperTable, exit_of
from .provenance import gather, package_versions
from .quality import judge
from .suite_run import PACKAGES, Prepared, Wishes, folder_of, prepare, words_of
from .suite_schema import OURS, Score, SuiteRun, save_suite
from .suite_stats import Row, rows
from .tasks import Item, read_task

if TYPE_CHECKING:
    from torch import Tensor

    from ..llm import LLM

PAPER_SCHEMA = 1
TEXT, CHOICES = "text", "choices"
TEXT_TOKENS = 1024  # of a text, for similarities
STEPS = 24  # single tokens, for the time of a half
Sit = Callable[[Prepared], None]
Say = Callable[[str], None]


@dataclass
class PaperResult:
    """Our figures for a table, by row and column; what `paper_report.py` reads."""

    table: str
    model: str
    layers: int
    provenance: dict[str, Any]
    new_tokens: int
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    """Files with the raw seconds."""
    notes: list[str] = field(default_factory=list)
    kind: str = "paper"
    schema_version: int = PAPER_SCHEMA


def key_of(row: PaperRow) -> str:
    """A row's name in the result."""
    return f"{row.task}: {row.name}"


def sources_of(table: PaperTable, given: Sequence[str]) -> dict[str, str]:
    """For each task of the table that is asked: how it is asked, NAME or NAME=PATH. All of them if
    nothing is given."""
    wanted = [task for task in table.tasks if task != "-"]
    local = {OWN, TEXT, CHOICES}
    if not given:
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
            known = [_asked_as(task) for task in wanted]
            raise OptionError(
                f"{table.name} does not ask the task {name!r}; {nearest(name, known)}"
            )
        found |= dict.fromkeys(fitting, text)
    return found


def _asked_as(task: str) -> str:
    return "spec-bench" if task == "conversation" else task


class Measuring:
    """One table at work."""

    def __init__(
        self,
        table: PaperTable,
        wishes: Wishes,
        draft: str | None,
        command: str,
        out: Path,
        say: Say,
    ) -> None:
        self._table, self._wishes, self._draft, self._command, self._out, self._say = (
            table,
            wishes,
            draft,
            command,
            out,
            say,
        )
        self._sources = sources_of(table, wishes.tasks)
        self._folder = folder_of(wishes.model)
        self._layers = words_of(self._folder).layers
        self._loaded: LLM | None = None
        versions = {"selfspec": __version__, **package_versions(PACKAGES)}
        provenance = asdict(gather(command, wishes.threads, versions))
        self.result = PaperResult(
            table.name, self._folder.name, self._layers, provenance, wishes.new_tokens
        )

    def measure(self, sit: Sit) -> PaperResult:
        """Everything the table asks; `sit` runs a prepared suite behind a progress bar."""
        if self._table.kind == EXITS:
            self._exits()
        elif self._table.kind == COSINES:
            self._cosines()
        else:
            for task, text in self._sources.items():
                self._task(task, text, sit)
        return self.result

    @property
    def llm(self) -> Any:
        """The model (an `LLM`) in this process, for what the harness does not time."""
        if self._loaded is None:
            from ..llm import LLM

            self._say(f"loading {self._folder.name}")
            wishes = self._wishes
            self._loaded = LLM.from_pretrained(
                self._folder, dtype=wishes.dtype, device=wishes.device, threads=wishes.threads
            )
        return self._loaded

    # ---------------------------------------------------------------------------------------- speed

    def _task(self, task: str, text: str, sit: Sit) -> None:
        mine = [row for row in self._table.rows if row.task == task]
        methods = [self._table.method_of(row, self._layers, self._draft) for row in mine]
        named = [method for method in methods if method not in (None, PLAIN, LOSSY)]
        table = self._table
        wishes = replace(
            self._wishes, tasks=[text], methods=list(dict.fromkeys(map(str, named))), peers=(),
            temperature=table.temperature, top_p=table.top_p,
        )  # fmt: skip
        prepared = prepare(
            wishes, self._command, self._out.with_name(f"{self._out.stem}-{task}.json")
        )
        sit(prepared)
        self.result.runs.append(prepared.out.name)
        asked = task if task != OWN else prepared.run.plan.samples[0].task
        items = [
            each
            for part in read_task(
                text, wishes.sample, wishes.skip_bad, wishes.contexts, wishes.chat
            )
            for each in part.items
        ]
        golds = {item.id: item for item in items if item.task == asked}
        self._score(prepared, asked, golds)
        for row in mine:
            if row.method == LOSSY:
                self._lossy(prepared, asked, golds, exit_of(row, self._layers))
        if table.samples > 1:
            self._samples(prepared, asked, golds, named)
        save_suite(prepared.run, prepared.out)
        for row, method in zip(mine, methods, strict=True):
            name = (
                f"{LOSSY}/{exit_of(row, self._layers)}"
                if row.method == LOSSY
                else f"{OURS}/{method}"
            )
            if method is not None:
                self.result.values[key_of(row)] = _values(prepared.run, name, asked)

    def _score(self, prepared: Prepared, task: str, golds: dict[str, Item]) -> None:
        """Quality of what each contestant wrote: the reference's text, or its own where that
        differs."""
        run = prepared.run
        texts = {answer.question: answer.text for answer in run.answers if answer.task == task}
        for name in run.plan.contestants:
            own = {
                each.question: each.text
                for turn in run.turns
                if turn.contestant == name
                for each in turn.differences
            }
            written = {question: [own.get(question, text)] for question, text in texts.items()}
            self._judge(run, name, task, written, golds)

    def _judge(
        self,
        run: SuiteRun,
        name: str,
        task: str,
        written: dict[str, list[str]],
        golds: dict[str, Item],
    ) -> None:
        missing = [each for each in self._table.measures if not _score_of(run, name, task, each)]
        if written and missing:
            self._say(f"judging {name}")
            values = judge(
                written, {question: golds[question].gold for question in written}, missing
            )
            run.scores += [
                Score(name, task, measure, value, len(written)) for measure, value in values.items()
            ]

    def _lossy(self, prepared: Prepared, task: str, golds: dict[str, Item], layer: int) -> None:
        """What the first layers write alone, and how fast."""
        from ..lossy import early_exit_generate

        run, name = prepared.run, f"{LOSSY}/{layer}"
        if _score_of(run, name, task, "tokens/s"):
            return
        written, decoded, seconds = {}, 0, 0.0
        for prompt in prepared.prompts:
            if prompt.id in golds:
                self._say(f"{prompt.id}: the first {layer} layers alone")
                asked = {
                    "max_new_tokens": run.plan.new_tokens,
                    "eos": list(prepared.words.eos),
                    "draft": None,
                }
                made = early_exit_generate(self.llm, list(prompt.ids), layer, **asked)
                written[prompt.id] = [prepared.words.decode(made.tokens)]
                decoded, seconds = decoded + made.stats.decoded, seconds + made.stats.decode_seconds
        self._judge(run, name, task, written, golds)
        if decoded:
            run.scores.append(Score(name, task, "tokens/s", decoded / seconds, len(written)))

    def _samples(
        self, prepared: Prepared, task: str, golds: dict[str, Item], methods: Sequence[Any]
    ) -> None:
        """Several answers a question, drawn with a method of the table; they count for plain
        decoding, which writes the same."""
        from ..core.sampling import SamplingParams
        from .contestants import own_options

        run, table = prepared.run, self._table
        names = [f"{OURS}/{PLAIN}", *(f"{OURS}/{method}" for method in methods)]
        if _score_of(run, names[0], task, "pass@10"):
            return
        options = own_options(methods[0]) if methods else own_options(PLAIN)
        written: dict[str, list[str]] = {}
        for prompt in prepared.prompts:
            self._say(f"{prompt.id}: {table.samples} samples")
            for seed in range(table.samples):
                sampling = SamplingParams(
                    temperature=table.temperature, top_p=table.top_p, seed=run.plan.seed + seed
                )
                made = self.llm.generate(
                    list(prompt.ids),
                    max_new_tokens=run.plan.new_tokens,
                    eos=list(prepared.words.eos),
                    sampling=sampling,
                    **options,
                )
                written.setdefault(prompt.id, []).append(prepared.words.decode(made.tokens))
        run.scores = [score for score in run.scores if not score.metric.startswith("pass@")]
        for name in names:
            self._judge(run, name, task, written, golds)

    # -------------------------------------------------------------------------------- exits, halves

    def _exits(self) -> None:
        """Perplexity of texts, accuracy of choices and of open answers, at the last and the middle
        exit."""
        exits = {"last": self._layers, "middle": max(1, self._layers // 2)}
        for task, text in self._sources.items():
            path = Path(text.partition("=")[2])
            self._say(f"{task}: {path.name or 'from the hub'}")
            if task == TEXT:
                self._note(f"perplexity of {path.name}", self._perplexities(path, exits))
            elif task == CHOICES:
                from .quality_exits import choose_by_exit, read_choices

                found = {
                    each.layers: each
                    for each in choose_by_exit(
                        self.llm, read_choices(path), sorted(set(exits.values()))
                    )
                }
                row = next(
                    (row for row in self._table.rows if row.name.lower() == path.stem.lower()), None
                )
                values = {column: 100 * found[layer].accuracy for column, layer in exits.items()}
                self._note(key_of(row) if row else f"accuracy of {path.name}, %", values)
            else:
                row = next(row for row in self._table.rows if row.task == task)
                self._note(
                    key_of(row),
                    {column: self._open_answers(text, layer) for column, layer in exits.items()},
                )

    def _note(self, name: str, values: dict[str, float]) -> None:
        self.result.values[name] = values

    def _perplexities(self, path: Path, exits: dict[str, int]) -> dict[str, float]:
        from ..train.data import DataOptions, load_data
        from ..train.evaluate import evaluate_exits

        if self.llm.tokenizer is None:
            raise OptionError(
                f"{self._folder.name} has no tokenizer, so {path.name} cannot be read; add its "
                f"files to the folder"
            )
        length = min(512, self.llm.info.context)
        blocks = load_data(
            [path], self.llm.tokenizer, DataOptions(length=length, held_out=0.5)
        ).held_out
        found = {
            each.layers: each.perplexity
            for each in evaluate_exits(self.llm.model, blocks, sorted(set(exits.values())))
        }
        return {column: found[layer] for column, layer in exits.items()}

    def _open_answers(self, text: str, layer: int) -> float:
        """Accuracy (or pass@1) of what an exit writes to a task, in percent."""
        from ..lossy import early_exit_generate

        words, wishes = words_of(self._folder), self._wishes
        (asked,) = read_task(text, wishes.sample, wishes.skip_bad, wishes.contexts, wishes.chat)
        written = {}
        for item in asked.items:
            self._say(f"{item.id}: {layer} layers")
            ids = words.encode(item)[-(words.context - wishes.new_tokens) :]
            options = {"max_new_tokens": wishes.new_tokens, "eos": list(words.eos), "draft": None}
            whole = layer == self._layers
            made = (
                self.llm.generate(ids, **options)
                if whole
                else early_exit_generate(self.llm, ids, layer, **options)
            )
            written[item.id] = [words.decode(made.tokens)]
        return 100 * next(
            iter(
                judge(
                    written, {item.id: item.gold for item in asked.items}, ("pass@1", "accuracy")
                ).values()
            )
        )

    def _cosines(self) -> None:
        """Statistics over layers of the similarity around each half, and the mean time of one for a
        single token."""
        path = Path(self._sources[TEXT].partition("=")[2])
        from .sources import read_text

        ids = list(words_of(self._folder).tokenizer(read_text(path)[: 12 * TEXT_TOKENS]).input_ids)
        ids = ids[: min(TEXT_TOKENS, self.llm.info.context - STEPS)]
        model, similar = self.llm.model, Similarities(self._layers)
        model.check_length(len(ids))
        cache = model.new_cache(1, len(ids) + STEPS)
        model.prefill([ids], cache, similar)
        clock = HalfClock()
        import torch

        for token in ids[:STEPS]:
            place = cache.layout([1])
            clock.start()
            model.run(
                model.embed(torch.tensor([token], device=model.device)),
                model.full_plan,
                cache,
                place,
                clock,
            )
        statistics: dict[str, Callable[[Sequence[float]], float]]
        statistics = {
            "minimum ACS": min,
            "maximum ACS": max,
            "mean ACS": fmean,
            "median ACS": median,
        }
        for half, column in ((True, "attention"), (False, "MLP")):
            for name, of in statistics.items():
                self.result.values.setdefault(f"{TEXT}: {name}", {})[column] = of(
                    similar.means(half)
                )
            self.result.values.setdefault(f"{TEXT}: mean time, ms", {})[column] = 1000 * fmean(
                clock.seconds[half]
            )


class HalfClock:
    """A watch of passes: seconds of every half."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._since = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def __call__(self, layer: int, attention: bool, before: Tensor, after: Tensor) -> None:
        self.seconds[attention].append(time.perf_counter() - self._since)
        self._since = time.perf_counter()


def _score_of(run: SuiteRun, name: str, task: str, metric: str) -> list[Score]:
    return [
        score
        for score in run.scores
        if (score.contestant, score.task, score.metric) == (name, task, metric)
    ]


def _values(run: SuiteRun, name: str, task: str) -> dict[str, float]:
    """Every figure that there is for a contestant: the harness's, and its scores."""
    found = {
        score.metric: score.value
        for score in run.scores
        if (score.contestant, score.task) == (name, task)
    }
    row = next((row for row in rows(run, 1, task) if row.contestant == name), None)
    if row is not None:
        found |= {measure: value for measure, value in _harness(row).items() if value is not None}
    if "tokens/s" in found:
        found["ms/token"] = 1000 / found["tokens/s"]
    return found


def _harness(row: Row) -> dict[str, float | None]:
    speed = None if row.over_plain is None else row.over_plain
    return {
        "tokens/s": row.tokens_per_second,
        "speedup": None if speed is None else speed.value,
        "speedup low": None if speed is None else speed.low,
        "speedup high": None if speed is None else speed.high,
        "accepted": row.acceptance,
        "draft share": row.draft_share,
        "verify share": row.verify_share,
    }
