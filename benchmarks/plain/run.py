"""One run of the plain benchmark: our engine next to every peer, the cost card, and what verifying
n tokens costs.

Puts the parts together: peers are started and take turns, and what is measured is saved after every
round, so that the same run can go on later. Does not know how a peer works, how a ratio is made,
how a table looks, or what was typed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.command import Tokenize, made_by
from benchmarks.plain.card import CARD_CONTEXT, CARD_TURNS, cost_card, verify_curve
from benchmarks.plain.entries import AUTO, Entry, source_of
from benchmarks.plain.results import PeerRow, PlainRun, Reading
from selfspec.bench.peers import Peer, PeerFailed
from selfspec.bench.prompts import prompt_ids
from selfspec.bench.schema import write
from selfspec.bench.suite import first_difference
from selfspec.bench.timing import Contestant, Timings, interleave
from selfspec.errors import OptionError

PACKAGES = ("torch", "transformers", "numpy")
WINDOW = 512  # tokens of a text that are read together
SETTLE_SECONDS = 0.05  # before each turn: threads of the peer that worked last may spin a moment
Tick = Callable[[str], None]


@dataclass(frozen=True)
class PlainOptions:
    """What to measure."""

    threads: int = 2
    rounds: int = 7
    new_tokens: int = 64
    prompt_tokens: Sequence[int] = (64, 512)
    verify_tokens: Sequence[int] = tuple(range(1, 17))
    verify_contexts: Sequence[int] = (64, 512, 2048)
    verify_rounds: int = 15
    time_limit: float = 300.0
    dtype: str = "float32"
    minutes: float | None = None
    """After so long nothing new is begun; the run goes on later."""

    def asked(self, contestants: Sequence[str]) -> dict[str, object]:
        """What makes another run the same, as a file holds it."""
        kept = {"contestants": list(contestants), **asdict(self)}
        del kept["time_limit"], kept["minutes"]
        found: dict[str, object] = json.loads(json.dumps(kept))
        return found

    def check(self) -> None:
        """Refuse what cannot be measured, before models are loaded."""
        if self.new_tokens < 2:
            raise OptionError(
                f"new_tokens={self.new_tokens}: there is no token after the first to time. Give at "
                "least 2."
            )
        for name in ("threads", "rounds", "verify_rounds", "time_limit"):
            if (value := getattr(self, name)) <= 0:
                raise OptionError(
                    f"{name}={value}: nothing would be measured. Give a number above 0."
                )
        for name in ("prompt_tokens", "verify_tokens", "verify_contexts"):
            if any(value < 1 for value in getattr(self, name)):
                raise OptionError(f"{name}={list(getattr(self, name))}: lengths start at 1.")


def quick(options: PlainOptions) -> PlainOptions:
    """The same in a minute or two: enough to see that everything works, not enough to quote."""
    return replace(
        options,
        rounds=2,
        new_tokens=32,
        verify_tokens=(1, 2, 4, 8),
        verify_contexts=(64, 512),
        verify_rounds=3,
    )


@dataclass
class Tokens:
    """Everything each peer wrote for one prompt: one version, if it is steady."""

    written: dict[str, list[list[int]]] = field(default_factory=dict)

    def add(self, peer: str, tokens: list[int]) -> None:
        """Remember what a peer wrote, unless it wrote the same before."""
        versions = self.written.setdefault(peer, [])
        if tokens not in versions:
            versions.append(tokens)

    def judge(self, row: PeerRow, reference: str) -> None:
        """Fill in a row's comparison: all its versions against the reference's first. What an
        earlier sitting found stays."""
        expected, mine = self.written.get(reference), self.written.get(row.peer)
        if expected is None or mine is None:
            return
        differences = [
            index for tokens in mine if (index := first_difference(tokens, expected[0])) is not None
        ]
        if row.first_difference is not None:
            differences.append(row.first_difference)
        row.first_difference = min(differences, default=None)
        row.identical = not differences


class Paused(Exception):
    """The minutes of this sitting are over; what was measured is kept."""


class PlainBenchmark:
    """One run. `out` gets the finished result; until then it is in `partial`, so an old result is
    never half replaced. `file`: the GGUF file of the model, for those that take it as it is."""

    def __init__(
        self,
        run: PlainRun,
        options: PlainOptions,
        folder: Path,
        out: Path,
        tick: Tick,
        say: Tick,
        file: Path | None = None,
    ) -> None:
        self.run, self.options, self.folder, self.out = run, options, folder, out
        self.tick, self.say, self.file = tick, say, file
        self._ends = time.monotonic() + 60 * (options.minutes or float("inf"))

    @property
    def partial(self) -> Path:
        return self.out.with_suffix(".partial.json")

    def keep(self) -> None:
        """Save what there is."""
        write(self.run, self.partial)

    def finish(self) -> None:
        """The result is whole: it takes its place."""
        self.run.complete = True
        write(self.run, self.out)
        self.partial.unlink(missing_ok=True)

    def _time_is_left(self) -> None:
        if time.monotonic() > self._ends:
            raise Paused

    def peers(self, entries: Sequence[Entry], tokenize: Tokenize, text: Sequence[int] = ()) -> None:
        """All peers at all prompt lengths, then on the text. They stay loaded beside each other, so
        that they can take turns."""
        rounds = {length: self._measured(length) for length in self.options.prompt_tokens}
        read = {reading.peer for reading in self.run.readings}
        unread = [entry for entry in entries if text and entry.name not in read]
        if min(rounds.values()) >= self.options.rounds and not unread:
            return
        with ExitStack() as stack:
            started = {entry.name: self._start(entry, stack) for entry in entries}
            running = {name: peer for name, peer in started.items() if peer is not None}
            for length, measured in rounds.items():
                if measured < self.options.rounds and running:
                    self._at_length(running, prompt_ids(tokenize, length), measured)
            if unread:
                self._read_all(running, [entry.name for entry in unread], text)

    def _measured(self, length: int) -> int:
        """How many rounds of a prompt length earlier sittings measured."""
        rows = (row for row in self.run.peers if row.prompt_tokens == length)
        return max((len(row.full) for row in rows), default=0)

    def _row(self, name: str, length: int) -> PeerRow:
        for row in self.run.peers:
            if (row.peer, row.prompt_tokens) == (name, length):
                return row
        self.run.peers.append(PeerRow(name, length, self.options.new_tokens))
        return self.run.peers[-1]

    def _start(self, entry: Entry, stack: ExitStack) -> Peer | None:
        self.say(f"starting {entry.name}")
        rows = [self._row(entry.name, length) for length in self.options.prompt_tokens]
        try:
            entry.spec.install()
            peer = Peer(entry.spec, self.options.threads, self.options.time_limit)
            stack.callback(peer.close)
            source = source_of(entry, self.folder, self.file)
            peer.load(source, self.options.dtype, weights=entry.weights)
        except PeerFailed as failure:
            for row in rows:
                row.failure = str(failure)
            self.keep()
            return None
        for row in rows:
            row.precision = peer.precision
        self.run.provenance.versions.update(peer.versions)
        return peer

    def _at_length(self, running: Mapping[str, Peer], prompt: list[int], measured: int) -> None:
        new_tokens, tokens = self.options.new_tokens, Tokens()
        rows = {name: self._row(name, len(prompt)) for name in running}
        before = {
            name: [
                [*row[:measured], *[None] * (measured - len(row))] for row in (it.first, it.full)
            ]
            for name, it in rows.items()
        }
        contestants = {
            f"{name}/{count}": _turn(peer, name, prompt, count, tokens)
            for name, peer in running.items()
            for count in (1, new_tokens)
        }
        self.say(f"{len(prompt)} prompt tokens")

        def on_round(timings: Timings) -> None:
            for name, row in rows.items():
                first, full = (timings.seconds[f"{name}/{count}"] for count in (1, new_tokens))
                row.first, row.full = before[name][0] + first, before[name][1] + full
                # in the order in which they happened: the first failure explains the ones after it
                failures = timings.failures.items()
                mine = (text for key, text in failures if key.rpartition("/")[0] == name)
                row.failure = next(mine, None)
                tokens.judge(row, self.run.reference)
            self.keep()
            if measured + len(full) < self.options.rounds:
                self._time_is_left()

        self._time_is_left()
        left = self.options.rounds - measured
        interleave(contestants, left, on_turn=self.tick, on_round=on_round, skipped=measured)

    def _read_all(
        self, running: Mapping[str, Peer], names: Sequence[str], text: Sequence[int]
    ) -> None:
        """What those of these names that can read make of the text, beside the reference."""
        windows = [text[at : at + WINDOW + 1] for at in range(0, len(text) - 1, WINDOW)]
        expected: list[list[int]] = []
        for name in dict.fromkeys([self.run.reference, *names]):
            if name not in running:
                continue
            self._time_is_left()
            self.say(f"{name} reads")
            reading, said = _read(name, running[name], windows)
            expected = said if name == self.run.reference else expected
            reading.same = sum(
                a == b
                for mine, theirs in zip(said, expected, strict=False)
                for a, b in zip(mine, theirs, strict=True)
            )
            if name in names:
                self.run.readings.append(reading)
                self.keep()

    def engine(self, entry: Entry, tokenize: Tokenize) -> None:
        """The cost card of one of ours, in this process, when no peer is left in memory; where
        weights are of the run's dtype also the verify curve."""
        from selfspec import LLM

        counts = self.options.verify_tokens
        known = {point.context for point in self.run.verify}
        curve = self.options.verify_contexts if entry.weights == AUTO else ()
        contexts = [context for context in curve if context not in known]
        if entry.name in self.run.costs and not contexts:
            return
        self._time_is_left()
        self.say(f"loading {entry.name}")
        llm = LLM.from_pretrained(
            source_of(entry, self.folder, self.file),
            dtype=self.options.dtype,
            weights=entry.weights,
            threads=self.options.threads,
        )
        rounds = self.options.verify_rounds
        ids = prompt_ids(tokenize, max([CARD_CONTEXT, *contexts]) + max(counts))
        if entry.name not in self.run.costs:
            self.say(f"cost card of {entry.name}")
            self.run.costs[entry.name] = cost_card(llm.model, ids, rounds, self.tick)
            self.keep()
        self.say("verifying n tokens")
        for points in verify_curve(llm.model, ids, contexts, counts, rounds, self.tick):
            self.run.verify.extend(points)
            self.keep()
            if points[0].context != contexts[-1]:
                self._time_is_left()


def _read(
    name: str, peer: Peer, windows: Sequence[Sequence[int]]
) -> tuple[Reading, list[list[int]]]:
    """A text, window by window: its loss, and what was likeliest at each place."""
    reading, said = Reading(name), []
    try:
        for ids in windows:
            loss, likeliest = peer.call("read", ids=list(ids))
            reading.tokens, reading.loss = reading.tokens + len(likeliest), reading.loss + loss
            said.append(likeliest)
    except PeerFailed as failure:
        reading.failure = str(failure)
    return reading, said


def _turn(peer: Peer, name: str, prompt: list[int], count: int, tokens: Tokens) -> Contestant:
    def turn() -> float:
        time.sleep(SETTLE_SECONDS)
        reply = peer.answer([prompt], count)
        if count > 1:
            tokens.add(name, reply.rows[0])
        return reply.seconds

    return turn


def turns(options: PlainOptions, peers: int, own: int = 0, curve: bool = False) -> int:
    """How many turns a run takes, for the progress bar."""
    points = len(options.verify_contexts) * len(options.verify_tokens) if curve else 0
    of_peers = len(options.prompt_tokens) * peers * 2 * (options.rounds + 1)
    return of_peers + (CARD_TURNS * own + points) * (options.verify_rounds + 2)


def new_run(model: str, options: PlainOptions, contestants: Sequence[str]) -> PlainRun:
    """An empty run with its provenance; the first contestant is the reference."""
    provenance = made_by("plain", options.threads, PACKAGES)
    run = PlainRun(provenance, model, options.dtype, contestants[0], options.rounds)
    run.asked = options.asked(contestants)
    return run
