"""`scripts/bench versus`: the same drafts on the same weights by other libraries and by ours.

Every contestant is a peer (a process of its own, timed from outside) with a method: plain decoding,
prompt lookup of n-grams up to 3, or drafting with the first E layers; always K drafts a round,
greedy. For each question all contestants take turns, once for 1 token and once for all; the
difference is decoding. What they wrote is compared with transformers' plain decoding. Does not know
how a peer works or how a table looks (`versus_report.py`).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import OptionError
from .damped import damped_folder
from .peers import Peer, PeerFailed, PeerSpec, choose, find_peers
from .plain import model_folder, progress_bar, run_command
from .plain_run import PACKAGES, first_difference
from .provenance import CHECKOUT, cpu_name, gather, package_versions, slug
from .questions import read_questions
from .schema import write_json
from .tasks import Item
from .versus_report import REFERENCE, VERSUS_SCHEMA, load_versus, markdown

PEERS = "transformers,selfspec,economize,flashspec"
METHODS = "plain,lookup"
WITHOUT_PLAIN = ("flashspec",)  # only decodes with a drafter
WARM_UP_TOKENS = 8


@dataclass
class Answer:
    """One contestant's answer to one question: seconds for 1 token and for all of them."""

    peer: str
    method: str
    question: int
    prompt_tokens: int
    first: float
    full: float
    made: int
    difference: int | None = None  # index of the first token that is not the reference's
    drafted: int | None = None  # as the peer says; shown, not used
    accepted: int | None = None


@dataclass
class VersusRun:
    """Everything that was measured."""

    provenance: dict[str, Any]
    model: str
    factor: float
    layer: int
    tokens: int
    new_tokens: int
    contestants: list[tuple[str, str]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # "peer method" to the reason
    complete: bool = False
    kind: str = "versus"
    schema_version: int = VERSUS_SCHEMA


class Contest:
    """One run: contestants, and what they are asked."""

    def __init__(
        self,
        run: VersusRun,
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
                self._run.provenance["versions"].update(peer.versions)
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
        write_json(asdict(self._run), self._out)

    def _answer(self, peer: Peer, method: str, number: int, ids: Sequence[int]) -> Answer:
        options = {"method": method, "tokens": self._run.tokens, "layer": self._run.layer}
        if number == 0:
            peer.generate(ids, WARM_UP_TOKENS, self._eos, options)
        _, first = peer.generate(ids, 1, self._eos, options)
        made, full = peer.generate(ids, self._run.new_tokens, self._eos, options)
        expected = self._expected.setdefault(number, made)
        counts = peer.counts or {}
        return Answer(
            peer.name, method, number, len(ids), first, full, len(made), first_difference(made, expected),
            counts.get("drafted"), counts.get("accepted"),
        )  # fmt: skip


def contestants(peers: Sequence[str], methods: Sequence[str]) -> list[tuple[str, str]]:
    """Every peer with every method that it has; the reference is always one of them."""
    pairs = [
        (peer, method)
        for method in methods
        for peer in peers
        if method != "plain" or peer not in WITHOUT_PLAIN
    ]
    return [REFERENCE, *(pair for pair in pairs if pair != REFERENCE)]


def versus(
    data: Annotated[
        Path | None, typer.Argument(help="Questions as JSONL, like Spec-Bench's question.jsonl.")
    ] = None,
    model: Annotated[str, typer.Option(help="'demo' or a model folder.")] = "demo",
    factor: Annotated[
        float,
        typer.Option(
            help="Below 1: a damped model, whose exit is often right. How much of the later "
            "layers is left in."
        ),
    ] = 1.0,
    layer: Annotated[int, typer.Option(help="How many layers draft (E).")] = 8,
    tokens: Annotated[int, typer.Option(help="Drafts a round (K).")] = 4,
    peers: Annotated[str, typer.Option(help="Which peers, separated by commas.")] = PEERS,
    methods: Annotated[str, typer.Option(help="Which methods, separated by commas.")] = METHODS,
    sample: Annotated[int, typer.Option(help="Questions a task.")] = 2,
    prompt: Annotated[int, typer.Option(help="Only so many of a prompt's last tokens.")] = 384,
    new_tokens: Annotated[
        int, typer.Option(help="Tokens to generate, less where the model ends by itself.")
    ] = 64,
    threads: Annotated[int, typer.Option(help="Threads for every peer.")] = 2,
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which a silent peer is ended.")
    ] = 120.0,
    out: Annotated[Path | None, typer.Option(help="The JSON to write.")] = None,
    show: Annotated[
        Path | None, typer.Option(help="Measure nothing: print the tables of this JSON.")
    ] = None,
) -> None:
    """Other libraries' prompt lookup and early exit next to ours: the same K, the same exit, the
    same weights.

    Example: scripts/bench versus question.jsonl --sample 1 --methods lookup
    """
    if show is not None:
        typer.echo(markdown(load_versus(show)))
        return
    if data is None:
        raise OptionError(
            "there are no questions to ask; give Spec-Bench's question.jsonl or a file like it"
        )
    asked = read_questions(data, sample)
    pairs = contestants(peers.split(","), methods.split(","))
    specs = choose([peer for peer, _ in pairs], find_peers())
    folder = model_folder(model)
    weights = folder if factor == 1 else damped_folder(folder, layer, factor)
    encode, eos = chat_encoder(folder)
    command = shlex.join(
        [
            "scripts/bench",
            "versus",
            data.name,
            *[word for word in sys.argv[1:] if word != str(data)],
        ]
    )
    provenance = asdict(gather(command, threads, package_versions([*PACKAGES, "selfspec"])))
    run = VersusRun(provenance, Path(model).name, factor, layer, tokens, new_tokens, pairs)
    target = (
        out
        or CHECKOUT
        / "benchmarks"
        / "results"
        / f"versus{'' if factor == 1 else '-damped'}-{slug(cpu_name())}.json"
    )
    with progress_bar(len(asked) * len(pairs)) as (tick, say), ExitStack() as stack:
        contest = Contest(run, weights, eos, target, lambda text: (say(text), tick(""))[0])
        say("starting peers")
        running = contest.start(specs, threads, time_limit, stack)
        for number, question in enumerate(asked):
            contest.ask(running, number, question, encode(question.text)[-prompt:])
    run.complete = True
    write_json(asdict(run), target)
    typer.echo(markdown(asdict(run)))
    typer.echo(json.dumps({"file": target.name, "failures": run.failures}))


def chat_encoder(folder: Path) -> tuple[Callable[[str], list[int]], list[int]]:
    """A question as the ids of a conversation, and the ids that end an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer(chat, add_special_tokens=False).input_ids)

    return encode, [tokenizer.eos_token_id]


if __name__ == "__main__":
    run_command(versus)
