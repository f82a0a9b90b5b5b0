"""One run of the plain benchmark: our engine next to every peer, the cost card, and what verifying
n tokens costs.

Puts the parts together: peers are started and take turns, and what is measured is saved after every
round. Does not know how a peer works, how a ratio is made, how a table looks, or what was typed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.command import Tokenize, made_by
from benchmarks.plain.card import CARD_CONTEXT, cost_card, verify_curve
from benchmarks.plain.results import PeerRow, PlainRun
from selfspec.bench.peers import Peer, PeerFailed, PeerSpec
from selfspec.bench.prompts import prompt_ids
from selfspec.bench.schema import write
from selfspec.bench.suite import first_difference
from selfspec.bench.timing import Contestant, Timings, interleave
from selfspec.errors import OptionError

REFERENCE = "transformers"
PACKAGES = ("torch", "transformers", "numpy")
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
        """Fill in a row's comparison: all its versions against the reference's first."""
        expected, mine = self.written.get(reference), self.written.get(row.peer)
        if expected is None or mine is None:
            return
        differences = [
            index for tokens in mine if (index := first_difference(tokens, expected[0])) is not None
        ]
        row.first_difference = min(differences, default=None)
        row.identical = not differences


class PlainBenchmark:
    """One run. `out` gets the finished result; until then it is in `partial`, so an old result is
    never half replaced."""

    def __init__(
        self, run: PlainRun, options: PlainOptions, folder: Path, out: Path, tick: Tick, say: Tick
    ) -> None:
        self.run, self.options, self.folder, self.out = run, options, folder, out
        self.tick, self.say = tick, say

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

    def peers(self, specs: Sequence[PeerSpec], tokenize: Tokenize) -> None:
        """All peers at all prompt lengths. They stay loaded beside each other, so that they can
        take turns."""
        with ExitStack() as open_peers:
            started = {spec.name: self._start(spec, open_peers) for spec in specs}
            running = {name: peer for name, peer in started.items() if peer is not None}
            for length in self.options.prompt_tokens:
                self._at_length(running, prompt_ids(tokenize, length))

    def _start(self, spec: PeerSpec, stack: ExitStack) -> Peer | None:
        self.say(f"starting {spec.name}")
        try:
            spec.install()
            peer = Peer(spec, self.options.threads, self.options.time_limit)
            stack.callback(peer.close)
            peer.load(self.folder, self.options.dtype)
        except PeerFailed as failure:
            for length in self.options.prompt_tokens:
                row = PeerRow(spec.name, length, self.options.new_tokens, failure=str(failure))
                self.run.peers.append(row)
            self.keep()
            return None
        self.run.provenance.versions.update(peer.versions)
        return peer

    def _at_length(self, running: Mapping[str, Peer], prompt: list[int]) -> None:
        new_tokens, tokens = self.options.new_tokens, Tokens()
        rows = {name: PeerRow(name, len(prompt), new_tokens) for name in running}
        self.run.peers.extend(rows.values())
        contestants = {
            f"{name}/{count}": _turn(peer, prompt, count, tokens)
            for name, peer in running.items()
            for count in (1, new_tokens)
        }
        self.say(f"{len(prompt)} prompt tokens")

        def on_round(timings: Timings) -> None:
            for name, row in rows.items():
                row.first, row.full = (
                    list(timings.seconds[f"{name}/{count}"]) for count in (1, new_tokens)
                )
                # in the order in which they happened: the first failure explains the ones after it
                failures = timings.failures.items()
                mine = (text for key, text in failures if key.rpartition("/")[0] == name)
                row.failure = next(mine, None)
                tokens.judge(row, self.run.reference)
            self.keep()

        if contestants:
            interleave(contestants, self.options.rounds, on_turn=self.tick, on_round=on_round)

    def engine(self, tokenize: Tokenize) -> None:
        """The cost card and the verify curve, in this process, when no peer is left in memory."""
        from selfspec import LLM

        self.say("loading our engine")
        llm = LLM.from_pretrained(
            str(self.folder), dtype=self.options.dtype, threads=self.options.threads
        )
        contexts, counts = self.options.verify_contexts, self.options.verify_tokens
        rounds = self.options.verify_rounds
        ids = prompt_ids(tokenize, max(*contexts, CARD_CONTEXT) + max(counts))
        self.say("cost card")
        self.run.cost = cost_card(llm.model, ids, rounds, self.tick)
        self.keep()
        self.say("verifying n tokens")
        for points in verify_curve(llm.model, ids, contexts, counts, rounds, self.tick):
            self.run.verify.extend(points)
            self.keep()


def _turn(peer: Peer, prompt: list[int], count: int, tokens: Tokens) -> Contestant:
    def turn() -> float:
        time.sleep(SETTLE_SECONDS)
        reply = peer.answer([prompt], count)
        if count > 1:
            tokens.add(peer.name, reply.rows[0])
        return reply.seconds

    return turn


def turns(options: PlainOptions, peers: int, engine: bool) -> int:
    """How many turns a run takes, for the progress bar."""
    ours = options.verify_rounds + 2
    points = len(options.verify_contexts) * len(options.verify_tokens)
    of_peers = len(options.prompt_tokens) * peers * 2 * (options.rounds + 1)
    return of_peers + ((2 + points) * ours if engine else 0)


def new_run(model: str, options: PlainOptions) -> PlainRun:
    """An empty run with its provenance."""
    provenance = made_by("plain", options.threads, PACKAGES)
    return PlainRun(provenance, model, options.dtype, REFERENCE, options.rounds)
