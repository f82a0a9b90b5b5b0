"""Measures tables whose tokens leave the layers early (SpecEE's): every row answers each question,
and the whole model says what it thinks of the answer. Memory is counted from tensors. Does not
print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.exits import behind
from benchmarks.paper.copies_run import held_bytes
from benchmarks.paper.inside import Inside, Values
from benchmarks.paper.quality import judge
from benchmarks.paper.result import PaperResult, key_of
from benchmarks.paper.specee import ADAINFER, SPECEE, TREES
from benchmarks.paper.table import PLAIN, PaperRow, PaperTable
from selfspec.bench.suite_run import fitted
from selfspec.bench.tasks import Asked
from selfspec.exits.part import find_predictors
from selfspec.lossy import AdaInfer, SpecEE

GUESSES = 8  # of a tree


class Leaving:
    """Such a table at work."""

    def __init__(self, table: PaperTable, inside: Inside, samples: Sequence[Asked]) -> None:
        self._table, self._inside, self._samples = table, inside, samples

    def measure(self, result: PaperResult) -> None:
        """All rows."""
        result.samples = [part.sample.name for part in self._samples]
        if self._table.measures == ("memory, MB",):
            result.values = self._memory()
            return
        for part in self._samples:
            rows = [row for row in self._table.rows if row.task == part.sample.task]
            for row in rows or [row for row in self._table.rows if row.task == "jsonl"]:
                result.values[key_of(row)] = self._answered(row, part, result)

    def _answered(self, row: PaperRow, part: Asked, result: PaperResult) -> dict[str, float]:
        """What a row's answers are worth."""
        llm, words = self._inside.llm, self._inside.words
        written, golds = dict[str, list[str]](), dict[str, Mapping[str, Any]]()
        agreed = tokens = passes = decoded = 0
        chance = seconds = layers = 0.0
        for item in part.items:
            self._inside.say(f"{item.id}: {row.name}")
            ids, _ = fitted(item, words.encode(item), words.context, result.new_tokens)
            made = self._made(row, ids, result.new_tokens)
            written[item.id], golds[item.id] = [words.decode(made.tokens)], item.gold or {}
            same, log = behind(llm, ids, made.tokens)
            agreed, chance, tokens = agreed + same, chance + log, tokens + len(made.tokens)
            passes, decoded = passes + made.stats.rounds, decoded + made.stats.decoded
            seconds += made.call.decode_seconds
            exits = getattr(made, "exits", None) or [llm.info.layers] * len(made.tokens)
            layers += sum(exits)
        found = {
            "layers": layers / tokens,
            "agreement": agreed / tokens,
            "perplexity": float(2.718281828459045 ** (-chance / tokens)),
            "kept a pass": decoded / max(1, passes),
            **judge(written, golds, self._table.measures),
        }
        return found | ({"tokens/s": decoded / seconds} if result.timed and seconds else {})

    def _made(self, row: PaperRow, ids: Sequence[int], most: int) -> Any:
        llm: Any = self._inside.llm
        call: dict[str, Any] = {"max_new_tokens": most, "eos": list(self._inside.words.eos)}
        if row.method == SPECEE:
            return SpecEE().generate(llm, list(ids), **call)
        if row.method == TREES:
            how = SpecEE(fill="state", tree=GUESSES)
            return how.generate(llm, list(ids), **call)
        if row.method == ADAINFER:
            return AdaInfer().generate(llm, list(ids), **call)
        draft = None if row.method == PLAIN else "recycle"
        return llm.generate(list(ids), draft=draft, **call)

    def _memory(self) -> Values:
        """Tensors held: weights, keys and values of so many tokens, predictors."""
        model = self._inside.llm.model
        weights, predictors = held_bytes(model), find_predictors(None, model).bytes
        shape, values = model.shape, Values()
        each = 2 * model.layers * shape.kv_heads * shape.head_size * model.dtype.itemsize
        for row in self._table.rows:
            held = weights + row.tokens * each + predictors * (row.method == SPECEE)
            values[key_of(row)] = {"memory, MB": held / 1e6}
        return values
