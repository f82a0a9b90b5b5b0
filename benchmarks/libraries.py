"""`scripts/bench libraries`: the same drafts on the same weights by other libraries and by ours.

Every contestant is a peer (a process of its own, timed from outside) with a method: plain decoding,
prompt lookup of n-grams up to 3, or drafting with the first E layers; always K drafts a round,
greedy. For each question all contestants take turns, once for 1 token and once for all; the
difference is decoding. What they wrote is compared with transformers' plain decoding. Does not know
how a peer works or how a table looks (`libraries_report.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import Model, Out, Show, grouped, made_by, result_path, run_command
from benchmarks.libraries_report import REFERENCE, Answer, LibrariesRun, markdown
from benchmarks.models import folder_of
from benchmarks.near_identity import near_identity_folder
from selfspec.bench.peers import Peer, PeerFailed, PeerSpec, choose, find_peers
from selfspec.bench.schema import OURS, read, write
from selfspec.bench.suite import first_difference
from selfspec.bench.suite_run import words_of
from selfspec.bench.tasks import Item, read_questions
from selfspec.cli.bench import progress_bar
from selfspec.errors import OptionError

PEERS = "transformers,selfspec,economize,flashspec"
METHODS = "plain,lookup"
WITHOUT_PLAIN = ("flashspec",)  # only decodes with a drafter
WARM_UP_TOKENS = 8
PACKAGES = ("torch", "transformers", "numpy")


class Contest:
    """One run: contestants, and what they are asked."""

    def __init__(
        self,
        run: LibrariesRun,
        folder: Path,
        eos: Sequence[int],
        out: Path,
        tick: Callable[[str], None],
    ) -> None:
        self._run, self._folder, self._eos, self._out, self._tick = run, folder, eos, out, tick
        self._expected: dict[int, list[int]] = {}

    def start(
        self, specs: Sequence[PeerSpec], threads: int, limit: float, stack: ExitStack
    ) -> dict[str, Peer]:
        """Those that could be started; the others have their reason in the run."""
        running = {}
        for spec in specs:
            try:
                spec.install()
                peer = Peer(spec, threads, limit)
                stack.callback(peer.close)
                peer.load(self._folder, "float32")
                self._run.provenance.versions.update(peer.versions)
                running[spec.name] = peer
            except PeerFailed as failure:
                for name, method in self._run.contestants:
                    if name == spec.name:
                        self._run.failures[f"{name} {method}"] = str(failure)
        return running

    def ask(
        self, peers: Mapping[str, Peer], number: int, question: Item, ids: Sequence[int]
    ) -> None:
        """One question to all, the reference first once, then in rotating order."""
        shift = number % len(self._run.contestants)
        order = [*self._run.contestants[shift:], *self._run.contestants[:shift]]
        order.sort(key=lambda one: one != REFERENCE)  # what is right has to be known first
        for name, method in order:
            key = f"{name} {method}"
            if key not in self._run.failures:
                try:
                    self._run.answers.append(self._answer(peers[name], method, number, ids))
                except PeerFailed as failure:
                    self._run.failures[key] = str(failure)
            self._tick(f"{question.id}: {key}")
        write(self._run, self._out)

    def _answer(self, peer: Peer, method: str, number: int, ids: Sequence[int]) -> Answer:
        options = told(peer.name, method, self._run.tokens, self._run.layer)
        if number == 0:
            peer.answer([ids], WARM_UP_TOKENS, self._eos, options)
        first = peer.answer([ids], 1, self._eos, options)
        whole = peer.answer([ids], self._run.new_tokens, self._eos, options)
        (made,) = whole.rows
        different = first_difference(made, self._expected.setdefault(number, made))
        return Answer(
            peer.name, method, number, len(ids), first.seconds, whole.seconds, len(made), different,
            whole.counts.get("drafted"), whole.counts.get("accepted"),
        )  # fmt: skip


def told(peer: str, method: str, tokens: int, layer: int) -> dict[str, Any]:
    """A method as a peer is told it. In ours, lookups are chains as theirs are."""
    if peer != OURS:
        return {"method": method, "tokens": tokens, "layer": layer}
    ours = {
        "plain": "plain",
        "auto": "auto",
        "lookup": f"ngram:longest=3,branches=1@fixed:tokens={tokens}",
        "early-exit": f"early-exit:layer={layer}@fixed:tokens={tokens}",
    }
    if method not in ours:
        raise PeerFailed(f"this peer has no method {method!r}")
    return {"method": ours[method]}


def contestants(peers: Sequence[str], methods: Sequence[str]) -> list[tuple[str, ...]]:
    """Every peer with every method that it has; the reference is always one of them."""
    pairs = [(peer, method) for method in methods for peer in peers]
    able = [(name, way) for name, way in pairs if way != "plain" or name not in WITHOUT_PLAIN]
    return [REFERENCE, *(pair for pair in able if pair != REFERENCE)]


@dataclass(frozen=True)
class Settings:
    """What is typed."""

    factor: Annotated[
        float,
        typer.Option(
            help="Below 1: a model whose exit is often right. How much of the later layers is left."
        ),
    ] = 1.0
    layer: Annotated[int, typer.Option(help="How many layers draft (E).")] = 8
    tokens: Annotated[int, typer.Option(help="Drafts a round (K).")] = 4
    peers: Annotated[str, typer.Option(help="Which peers, separated by commas.")] = PEERS
    methods: Annotated[str, typer.Option(help="Which methods, separated by commas.")] = METHODS
    sample: Annotated[int, typer.Option(help="Questions a task.")] = 2
    prompt: Annotated[int, typer.Option(help="Only so many of a prompt's last tokens.")] = 384
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens to generate, less where the model ends by itself.")
    ] = 64
    threads: Annotated[int, typer.Option(help="Threads for every peer.")] = 2
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which a silent peer is ended.")
    ] = 120.0


@grouped
def libraries(
    data: Annotated[
        Path | None, typer.Argument(help="Questions as JSONL, like Spec-Bench's question.jsonl.")
    ] = None,
    *,
    model: Model = "demo",
    settings: Settings,
    out: Out = None,
    show: Show = None,
) -> None:
    """Other libraries' prompt lookup and early exit next to ours: the same K, exit and weights.

    Example: scripts/bench libraries question.jsonl --sample 1 --methods lookup
    """
    if show is not None:
        typer.echo(markdown(read(LibrariesRun, show)))
        return
    if data is None:
        raise OptionError(
            "there are no questions to ask; give Spec-Bench's question.jsonl or a file like it"
        )
    asked, factor, layer = read_questions(data, settings.sample), settings.factor, settings.layer
    pairs = contestants(settings.peers.split(","), settings.methods.split(","))
    specs = choose([peer for peer, _ in pairs], find_peers())
    folder = folder_of(model)
    words = words_of(folder)
    weights = folder if factor == 1 else near_identity_folder(folder, layer, factor)
    provenance, name = made_by("libraries", settings.threads, PACKAGES), Path(model).name
    run = LibrariesRun(
        provenance, name, factor, layer, settings.tokens, settings.max_new_tokens, pairs
    )
    target = out or result_path("libraries" if factor == 1 else "libraries-near-identity")
    with progress_bar(len(asked) * len(pairs)) as (tick, say), ExitStack() as stack:
        contest = Contest(run, weights, words.eos, target, lambda text: (say(text), tick(""))[0])
        say("starting peers")
        running = contest.start(specs, settings.threads, settings.time_limit, stack)
        for number, question in enumerate(asked):
            contest.ask(running, number, question, words.encode(question)[-settings.prompt :])
    run.complete = True
    write(run, target)
    typer.echo(markdown(run))
    typer.echo(json.dumps({"file": target.name, "failures": run.failures}))


if __name__ == "__main__":
    run_command(libraries)
