"""The loop: draft -> verify -> keep -> learn, as a generator of steps. Everything else consumes it.

A row's tokens are all in the cache but the last; a round runs that one and the drafts after it
through the full model, which chooses a token at each of them. Drafts are kept while they equal the
model's choices, then comes the model's own. With no drafts this is plain decoding, one token a
round. Rows come and go between rounds: `admit` gives a request a row, `retire` takes it back, and
prompts are read in chunks beside the rows that are decoding.

A round counts whole or not at all: whatever is raised inside it, rows and cache are those before it
or those after it, and sessions begin anew. Does not know tokenizers or text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain

import torch

from ..core.contract import Draft, RowStep, Stats, Step
from ..core.tree import Tree
from ..model.compute.cache import KVCache, RowSpan
from ..model.compute.cpu.choosing import likeliest_or_broken
from ..model.compute.cpu.rounds import Round
from ..model.compute.memory import work_too_large
from ..model.layered import PREFILL_CHUNK, LayeredModel, Scored
from .books import Books
from .group import NOTHING
from .groups import Groups
from .keeping import Block, Decided, by_likeliest, decide, places_of
from .plain import Gain, gains, suits
from .row import Request, Row, chunk_of
from .verifying import verified


class Generation:
    """Rows decoded together. Iterate over it to run it to the end, or take `step` after `step` and
    admit and retire rows in between.

    `rows`: for how many there is room at first. `lock` is held for one step at a time. `chunk`: the
    most prompt tokens that one step reads; it may be changed between steps.
    """

    def __init__(
        self,
        model: LayeredModel,
        requests: Sequence[Request] = (),
        *,
        cache: KVCache | None = None,
        rows: int = 1,
        lock: AbstractContextManager[object] | None = None,
        chunk: int = PREFILL_CHUNK,
    ) -> None:
        self._model, self._lock, self.chunk = model, lock or nullcontext(), chunk
        for request in requests:
            model.check_length(len(request.prompt))
        wanted = max((self._slots_wanted(request) for request in requests), default=1)
        self.cache = cache or model.new_cache(max(rows, len(requests)), wanted)
        self._admitted = 0
        self._groups = Groups(model, self.cache)
        self._decided: Sequence[Gain] = ()  # a round that counts and is being written down
        self._parts: dict[tuple[int, int], RowStep] = {}  # what no step has reported yet
        self._interrupted = False
        self._books = Books()
        self.rows: list[Row] = []
        for request in requests:
            self.admit(request, self.cache.length(self._free_slot()))

    def admit(
        self, request: Request, known: int = 0, slot: int | None = None, source: int | None = None
    ) -> Row:
        """Give a request a row, from the next step on.

        `slot`: a free row of the cache for it, the next free one if it is not named. `known`: so
        many of its tokens are in there, or, if that is named, in the row `source` of the cache.
        """
        prompt = len(request.prompt)
        self._model.check_length(prompt)
        with self._lock, torch.inference_mode():
            slot, known = self._free_slot() if slot is None else slot, min(known, prompt - 1)
            if source is not None and source != slot:
                self.cache.copy(source, slot, known)
            self.cache.rollback(slot, known)  # the last token is always read, for its logits
            known = min(known, self.cache.length(slot))  # recurrent layers may have to begin anew
            self.cache.settle(slot, known)
            self.cache.reserve(self._slots_wanted(request))
            row = Row(self._admitted, slot, request, self._model.shape.context, known)
            row.computed_before = int(self.cache.computed[slot].sum())
            self._groups.admit(row)
            self._admitted += 1
            self.rows.append(row)
        return row

    def retire(self, row: Row) -> None:
        """Let a row go, finished or not. Its slot may be another's at once."""
        with self._lock:
            self._retire(row)

    def _retire(self, row: Row) -> None:
        self._groups.drop(row)
        self.rows.remove(row)
        self._books.leave(row, self.cache)

    def _free_slot(self) -> int:
        """The first row of the cache that nobody has."""
        used = {row.slot for row in self.rows}
        free = next((slot for slot in range(self.cache.rows) if slot not in used), None)
        if free is None:
            free = self.cache.rows
            self.cache.reserve_rows(2 * free)
        return free

    def _slots_wanted(self, request: Request) -> int:
        prompt = len(request.prompt)
        room = min(request.max_new_tokens, self._model.shape.context - prompt)
        return prompt + min(room, 512)

    @property
    def stats(self) -> Stats:
        """Seconds and passes of all rows together, tokens of all rows added up."""
        return self._books.total(self.rows, self.cache)

    @property
    def culprits(self) -> Sequence[Row]:
        """After a step that raised: the rows whose drafter did. None: nobody knows."""
        return self._groups.culprits

    @property
    def progress(self) -> tuple[float, float, int]:
        """Seconds of reading prompts, of rounds, and how many rounds there were, so far."""
        return self._books.progress

    def __iter__(self) -> Iterator[Step]:
        """Run until no row is left. What a request's code raised is raised after its step."""
        while self.rows:
            step = self.step()
            if step.rows:
                yield step
            for part in step.rows:
                if part.error:
                    raise part.error

    def step(self) -> Step:
        """Read a chunk of prompts, and run a round or a streak of other rows. Who ends leaves."""
        with self._lock, _inference():
            if self._interrupted:
                self._recover()
            running = [row for row in self.rows if not row.ended]
            reading = [row for row in running if row.reading]
            decoding = [row for row in running if not row.reading]
            self._interrupted, self._groups.culprits = True, ()
            try:
                if reading:
                    self._read(reading)
                if decoding:
                    self._round(decoding, bool(reading))
                for row in [row for row in self.rows if row.ended]:
                    self._retire(row)
                step = Step(sorted(self._parts.values(), key=lambda part: part.row))
            except BaseException as error:
                self._recover()
                if not isinstance(error, torch.OutOfMemoryError):
                    raise
                self._model.free_idle()  # for whoever asks for less next
                cache = self.cache
                raise work_too_large(cache.rows, cache.bytes, self._model.device) from error
            self._parts = {}
            self._interrupted = False
            return step

    def _recover(self) -> None:
        """Rows and cache as they were before the step that was interrupted, or after it where it
        was decided already; then the next step reports it."""
        self._write_down()
        for row in self.rows:
            self.cache.rollback(row.slot, row.settled)
        self._groups.close()
        self._interrupted = False

    def _read(self, rows: Sequence[Row]) -> None:
        """One chunk of the prompts, and the first token of those that are read. Rows whose drafter
        looks on are read apart from the others."""
        model, observer = self._model, self._groups.observer_of(rows[0])
        alike = [row for row in rows if self._groups.observer_of(row) == observer]
        spans, begin = chunk_of(alike, self.chunk), time.perf_counter()
        pieces = [row.tokens[s.first : s.first + s.count] for row, s in spans.items()]
        x = model.embed(torch.tensor([*chain(*pieces)], device=model.device))
        layout = self.cache.layout_at(list(spans.values()))
        done = [row for row, s in spans.items() if s.first + s.count == len(row.tokens)]
        pieces_of = zip(spans, layout.pieces, strict=True)
        ends = [piece.stop - 1 for row, (_, piece) in pieces_of if row in done]
        x = model.read(x, self.cache, layout, ends, observer, self._groups.collectors)
        for row, span in spans.items():
            if row not in done:
                row.state = replace(row.state, settled=span.first + span.count)
                self.cache.settle(row.slot, row.settled)
        if read := [Block(row, Draft.chain(row.tokens)) for row in done]:
            self._keep(read, Scored(model.states(x), model.head(x)))
        self._books.prompts([*spans], time.perf_counter() - begin)

    def _round(self, rows: Sequence[Row], reading: bool) -> None:
        """Draft, verify, keep, learn. `reading`: prompts are read in the same step."""
        start, suit = time.perf_counter(), suits(rows)
        rest = self._groups.rest and not reading
        if not reading and (rounds := self._groups.streak(rows)):
            return self._write_streak(rows[0], rounds, start, rest)
        if suit and rest:
            return self._plain_round(rows, start)
        drafts = self._groups.draft(rows, sum(row.reading for row in self.rows))
        if suit and not any(draft.guesses or draft.exits for draft in drafts.values()):
            return self._plain_round(rows, start, drafts)
        begin = time.perf_counter()
        blocks = [Block(row, drafts[row]) for row in rows]
        scored = self._verify(blocks)
        if self._groups.all:
            self._model.wait()  # a controller compares what passes and drafts cost
        verify = time.perf_counter() - begin
        self._end(blocks, scored, self._keep(blocks, scored), start, verify)

    def _write_streak(self, row: Row, rounds: Sequence[Round], start: float, rest: bool) -> None:
        """Write these down as if each had just been run, up to the row's end. `rest`: nobody was
        asked, nor wants to hear of them now."""
        beside = time.perf_counter() - start - sum(each.seconds for each in rounds)
        for number, each in enumerate(rounds):
            begin = time.perf_counter() - each.seconds - beside / len(rounds)
            if not rest:
                self._groups.drafted(each.guessing, number)
            block, ranks = Block(row, Draft(Tree(each.tokens, each.parents))), self._groups.ranks
            decided = decide([block], scored := Scored(NOTHING, NOTHING, each.best), ranks)
            for decision in decided.rows:
                self.cache.passed(block.span, len(decision.path))
            self._take(decided)
            self._end([block], scored, decided, begin, each.passing, rest)
            if row.ended:
                return

    def _end(
        self,
        blocks: Sequence[Block],
        scored: Scored,
        decided: Decided,
        start: float,
        verify: float,
        rest: bool = False,
    ) -> None:
        """Count a round that was decided, and tell of it. `verify`: seconds of its pass."""
        for decision in decided.rows:
            decision.block.row.stats.count(decision.block.draft, decision.path, decision.kept)
        rows, scored = [block.row for block in blocks], scored._replace(best=decided.best)
        if rest:
            seconds = time.perf_counter() - start
            self._groups.passed_over(rows, scored, seconds, bool(decided.failed))
        elif self._groups.all:
            outcomes = {decision.block.row: decision.outcome for decision in decided.rows}
            self._groups.learn(outcomes, places_of(blocks), scored, start, verify)
        self._books.round(rows, start, self._groups.drafting, verify)

    def _plain_round(
        self, rows: Sequence[Row], start: float, drafts: Mapping[Row, Draft] | None = None
    ) -> None:
        """The same where no draft has guesses. None: nobody was asked, nor wants to hear of it
        now."""
        begin = time.perf_counter()
        likeliest_wins = rows[0].request.sampler.plain
        ranks = self._groups.ranks if likeliest_wins else 0
        layout = self.cache.layout_at([RowSpan(r.slot, len(r.tokens) - 1, 1) for r in rows])
        tokens = [row.tokens[-1] for row in rows]
        scored = self._model.scored(tokens, self.cache, layout, ranks, self._groups.collectors)
        best = scored.best
        if best is None and likeliest_wins:
            best = likeliest_or_broken(scored.logits, ranks).tolist()
        if self._groups.all:
            self._model.wait()
        verify = time.perf_counter() - begin
        self._decided, failed = gains(rows, scored.logits, best)  # from here on the round counts
        gained = self._decided
        self._write_down()
        for row, _, _ in gained:
            row.stats.new_tokens += 1
            row.stats.decoded += 1
            row.stats.verifications += 1
        self._report(failed)
        scored = scored._replace(best=best)
        if drafts is None:
            seconds = time.perf_counter() - start
            self._groups.passed_over(rows, scored, seconds, bool(failed))
        else:
            outcomes = {gain.row: gain.outcome(drafts[gain.row]) for gain in gained}
            places = {row: [place] for place, row in enumerate(rows)}
            self._groups.learn(outcomes, places, scored, start, verify)
        self._books.round(rows, start, self._groups.drafting, verify)

    def _verify(self, blocks: Sequence[Block]) -> Scored:
        """What the model makes of every node of every row."""
        drafts = [block.draft for block in blocks]
        chains = all(draft.tree.is_chain for draft in drafts)
        parents = None if chains else [draft.tree.parents for draft in drafts]
        layout = self.cache.layout_at([block.span for block in blocks], parents)
        ranks = self._groups.ranks if by_likeliest(blocks) else 0
        return verified(self._model, self.cache, layout, drafts, self._groups.collectors, ranks)

    def _keep(self, blocks: Sequence[Block], scored: Scored) -> Decided:
        """Keep what the model itself would have written."""
        decided = decide(blocks, scored, self._groups.ranks)
        for decision in decided.rows:
            span = decision.block.span
            if span.count > 1:
                self.cache.keep(span.row, span.first, decision.path)
        self._take(decided)
        return decided

    def _take(self, decided: Decided) -> None:
        self._decided = [decision.gain for decision in decided.rows]  # from here on it counts
        self._write_down()
        for decision in decided.rows:
            decision.block.row.stats.new_tokens += len(decision.kept)
        self._report(decided.failed)

    def _report(self, failed: Sequence[Row]) -> None:
        for row in failed:
            self._parts[row.index, 0] = RowStep(row.index, [], error=row.error)

    def _write_down(self) -> None:
        """Rows take over what was decided. If this is interrupted it is done again."""
        for row, state, step in self._decided:
            row.apply(state, step.tokens)
            self.cache.rollback(row.slot, state.settled)
            self.cache.settle(row.slot, state.settled)
            self._parts[row.index, state.length] = step
        self._decided = ()


def _inference() -> AbstractContextManager[object]:
    """Torch's inference mode, unless whoever calls has entered it for a whole text."""
    return nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode()
