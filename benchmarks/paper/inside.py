"""What a paper's table asks of a model that the harness cannot time or compare: what its exits say,
and what its halves change. Computed in this process, by our engine. Does not print."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.choices import choose_by_exit, read_choices
from benchmarks.paper.quality import judge
from benchmarks.paper.result import key_of
from benchmarks.paper.table import PaperTable
from selfspec.bench.layers import Similarities
from selfspec.bench.sources import read_text
from selfspec.bench.suite_run import Wishes, Words, words_of
from selfspec.bench.tasks import read_task
from selfspec.errors import OptionError
from selfspec.llm import LLM
from selfspec.lossy import early_exit_generate
from selfspec.train.data import DataOptions, load_data
from selfspec.train.evaluate import evaluate_exits

TEXT, CHOICES = "text", "choices"
TEXT_TOKENS = 1024  # of a text, for similarities
STEPS = 24  # single tokens, for the time of a half
Say = Callable[[str], None]
Values = dict[str, dict[str, float]]  # of each row: our figures by column


class Inside:
    """The model in this process, loaded when it is first needed."""

    def __init__(self, folder: Path, wishes: Wishes, say: Say) -> None:
        self.folder, self.wishes, self.say = folder, wishes, say
        self.words: Words = words_of(folder)
        self._llm: LLM | None = None

    @property
    def llm(self) -> LLM:
        if self._llm is None:
            self.say(f"loading {self.folder.name}")
            how = {name: getattr(self.wishes, name) for name in ("dtype", "device", "threads")}
            self._llm = LLM.from_pretrained(self.folder, **how)
        return self._llm

    def written(self, ids: list[int], layer: int, new_tokens: int) -> Any:
        """What the first `layer` layers write alone; all of them are the model."""
        asked: dict[str, Any] = {"max_new_tokens": new_tokens, "eos": list(self.words.eos)}
        if layer == self.words.layers:
            return self.llm.generate(ids, draft=None, **asked)
        whole: Any = self.llm
        return early_exit_generate(whole, ids, layer, draft=None, **asked)

    def exits(self, table: PaperTable, sources: dict[str, str]) -> Values:
        """Perplexity of texts, accuracy of choices and of open answers, at the last and the middle
        exit."""
        layers, values = self.words.layers, {}
        exits = {"last": layers, "middle": max(1, layers // 2)}
        for task, text in sources.items():
            path = Path(text.partition("=")[2])
            self.say(f"{task}: {path.name or 'from the hub'}")
            if task == TEXT:
                name, found = f"perplexity of {path.name}", self._perplexities(path, exits)
            elif task == CHOICES:
                named = [row for row in table.rows if row.name.lower() == path.stem.lower()]
                name = key_of(named[0]) if named else f"accuracy of {path.name}, %"
                found = self._choices(path, exits)
            else:
                name = key_of(next(row for row in table.rows if row.task == task))
                found = {column: self._answers(text, layer) for column, layer in exits.items()}
            values[name] = found
        return values

    def _perplexities(self, path: Path, exits: dict[str, int]) -> dict[str, float]:
        if self.llm.tokenizer is None:
            raise OptionError(
                f"{self.folder.name} has no tokenizer, so {path.name} cannot be read; add its "
                "files "
                "to the folder"
            )
        options = DataOptions(length=min(512, self.llm.info.context), held_out=0.5)
        blocks = load_data([path], self.llm.tokenizer, options).held_out
        scores = evaluate_exits(self.llm.model, blocks, sorted(set(exits.values())))
        found = {score.layers: score.perplexity for score in scores}
        return {column: found[layer] for column, layer in exits.items()}

    def _choices(self, path: Path, exits: dict[str, int]) -> dict[str, float]:
        scores = choose_by_exit(self.llm, read_choices(path), sorted(set(exits.values())))
        found = {score.layers: score.accuracy for score in scores}
        return {column: 100 * found[layer] for column, layer in exits.items()}

    def _answers(self, text: str, layer: int) -> float:
        """Accuracy (or pass@1) of what an exit writes to a task, in percent."""
        wishes, words = self.wishes, self.words
        (asked,) = read_task(text, wishes.sample, wishes.skip_bad, wishes.contexts, wishes.chat)
        texts = {}
        for item in asked.items:
            self.say(f"{item.id}: {layer} layers")
            ids = words.encode(item)[-(words.context - wishes.new_tokens) :]
            texts[item.id] = [words.decode(self.written(ids, layer, wishes.new_tokens).tokens)]
        golds = {item.id: item.gold for item in asked.items}
        return 100 * next(iter(judge(texts, golds, ("pass@1", "accuracy")).values()))

    def halves(self, path: Path) -> Values:
        """Statistics over layers of the similarity around each half, and the mean time of one for a
        single token."""
        model = self.llm.model
        ids = list(self.words.tokenizer(read_text(path)[: 12 * TEXT_TOKENS]).input_ids)
        ids = ids[: min(TEXT_TOKENS, self.llm.info.context - STEPS)]
        model.check_length(len(ids))
        cache, clock = model.new_cache(1, len(ids) + STEPS), HalfClock()
        similar = Similarities(model.layers)
        model.prefill([ids], cache, similar)
        for token in ids[:STEPS]:
            place, x = cache.layout([1]), model.embed(torch.tensor([token], device=model.device))
            clock.start()
            model.run(x, model.full_plan, cache, place, clock)
        statistics: dict[str, Callable[[Sequence[float]], float]]
        statistics = {"minimum": min, "maximum": max, "mean": fmean, "median": median}
        values: Values = {}
        for half, column in ((True, "attention"), (False, "MLP")):
            for name, of in statistics.items():
                row = values.setdefault(f"{TEXT}: {name} ACS", {})
                row[column] = of(similar.means(half))
            row = values.setdefault(f"{TEXT}: mean time, ms", {})
            row[column] = 1000 * fmean(clock.seconds[half])
        return values


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
