"""`selfspec sweep`: how a model's speed depends on what its drafts are made of, always paired with
plain decoding.

Three parts. *grid*: speedup by exit layer E and drafts a round K (the picture of Hugging Face's
blog). *skips*: speedup by how many halves the draft leaves out, those first that matter least by
cosine similarity or by measured damage, with the adaptive controller (Draft & Verify, Figure 4).
*gamma*: the adaptive controller's threshold round by round, from prompt to prompt (Figure 5). Plain
decoding stands at both ends of every group of turns, so that a drift of the machine cancels. A file
that was interrupted is gone on with; a kill loses one group. Knows no tables and no pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..control.adaptive import Adaptive, AdaptiveThreshold
from ..control.base import Controller, ControlSession
from ..errors import OptionError, nearest
from ..model.compute.plan import LayerPlan
from .layers import Similarities
from .schema import read_result, write_json
from .sweep_report import skip_speeds

if TYPE_CHECKING:
    from ..core.contract import Outcome, RoundTime
    from ..llm import LLM

SWEEP_SCHEMA = 1
PARTS = ("grid", "skips", "gamma")
RANKINGS = ("cosine", "damage")
PLAIN = "plain"
DAMAGE_TOKENS = 192  # of each prompt, on which the damage of leaving out a half is measured
Half = tuple[int, bool]  # (layer, whether it is the attention half)


@dataclass(frozen=True)
class SweepOptions:
    """What to measure. Empty lists are filled in from the model's depth."""

    parts: tuple[str, ...] = PARTS
    """Which parts, in this order."""
    exits: tuple[int, ...] = ()
    """Exit layers of the grid."""
    drafts: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    """Drafts a round in the grid."""
    skips: tuple[int, ...] = ()
    """Numbers of halves that the draft leaves out."""
    by: str = "cosine"
    """What says which halves matter least: cosine or damage."""
    new_tokens: int = 64
    """Tokens of each turn."""
    rounds: int = 1
    """How often everything is measured."""

    def filled(self, layers: int) -> SweepOptions:
        """Checked, and with lists for a model of that depth."""
        for part in self.parts:
            if part not in PARTS:
                raise OptionError(f"there is no part {part!r} of a sweep; {nearest(part, PARTS)}")
        if self.by not in RANKINGS:
            raise OptionError(
                f"halves cannot be ranked by {self.by!r}; {nearest(self.by, RANKINGS)}"
            )
        if self.new_tokens < 2 or self.rounds < 1:
            raise OptionError(
                f"new_tokens={self.new_tokens}, rounds={self.rounds}: nothing would be timed; use "
                f"at least 2 and 1"
            )
        exits = self.exits or tuple(
            sorted({max(1, round(layers * share / 8)) for share in range(1, 8)} - {layers})
        )
        skips = self.skips or tuple(
            sorted({max(1, round(2 * layers * share / 16)) for share in range(1, 11)})
        )
        _inside("--exits", exits, 1, layers - 1)
        _inside("--skips", skips, 1, 2 * layers - 1)
        _inside("--drafts", self.drafts, 1, 64)
        return SweepOptions(
            self.parts, exits, self.drafts, skips, self.by, self.new_tokens, self.rounds
        )


def _inside(name: str, values: Sequence[int], least: int, most: int) -> None:
    outside = [value for value in values if not least <= value <= most]
    if outside or not values:
        raise OptionError(
            f"{name} {','.join(map(str, values)) or '(empty)'}: give numbers from {least} to "
            f"{most} for this model"
        )


@dataclass(frozen=True)
class Prompt:
    """One prompt as it is asked."""

    name: str
    ids: tuple[int, ...]


@dataclass
class Sweep:
    """Everything that was measured, as it is written."""

    provenance: dict[str, Any]
    model: str
    kernel: str
    dtype: str
    layers: int
    options: dict[str, Any]
    prompts: dict[str, int]  # names, and how many tokens they have
    turns: list[dict[str, Any]] = field(default_factory=list)
    done: list[str] = field(default_factory=list)  # groups that were measured to the end
    ranking: list[dict[str, Any]] = field(
        default_factory=list
    )  # halves, those first that matter least
    gamma: list[dict[str, Any]] = field(default_factory=list)  # one entry a round
    complete: bool = False
    kind: str = "sweep"
    schema_version: int = SWEEP_SCHEMA


@dataclass(frozen=True)
class Group:
    """Turns that are compared with one another: plain decoding at both ends, `settings` in
    between."""

    part: str
    prompt: Prompt
    round: int
    settings: tuple[
        tuple[int, int], ...
    ]  # grid: (exit, drafts); skips and gamma: (halves left out, most drafts)

    @property
    def key(self) -> str:
        first = "" if self.part == "gamma" else f"/{self.settings[0][0]}"
        return f"{self.part}/{self.prompt.name}/{self.round}{first}"


def groups(options: SweepOptions, prompts: Sequence[Prompt]) -> Iterator[Group]:
    """Everything there is to measure, in order. What gamma drafts with is known once skips were
    measured: 0 stands for it."""
    most = Adaptive().tokens
    for part in options.parts:
        for number in range(options.rounds):
            for prompt in prompts:
                if part == "grid":
                    for layer in options.exits:
                        yield Group(
                            part,
                            prompt,
                            number,
                            tuple((layer, drafts) for drafts in options.drafts),
                        )
                elif part == "skips":
                    for first in range(0, len(options.skips), 4):
                        yield Group(
                            part,
                            prompt,
                            number,
                            tuple((count, most) for count in options.skips[first : first + 4]),
                        )
                else:
                    yield Group(part, prompt, number, ((0, most),))


def load_sweep(path: Path) -> dict[str, Any]:
    """Read a result; another file is an error that says so."""
    return read_result(path, "sweep", SWEEP_SCHEMA, "selfspec sweep MODEL", "a sweep's result")


def gone_on_with(fresh: Sweep, path: Path) -> Sweep:
    """What an earlier sitting of the same sweep left, or `fresh`. A file of another sweep is never
    written over."""
    if not path.exists():
        return fresh
    found = load_sweep(path)
    ours = asdict(fresh)
    for key in ("model", "kernel", "dtype", "layers", "options", "prompts"):
        if found[key] != json.loads(json.dumps(ours[key])):
            raise OptionError(
                f"{path.name} is of another sweep: its {key} is {found[key]!r}, asked for is "
                f"{ours[key]!r}. "
                "Name another file with --out, or write over it with --fresh."
            )
    if (
        found["provenance"]["cpu"] != fresh.provenance["cpu"]
        or found["provenance"]["threads"] != fresh.provenance["threads"]
    ):
        raise OptionError(
            f"{path.name} was begun on another machine or thread count; name another file with "
            f"--out, or use --fresh"
        )
    return Sweep(**found)


class Sweeping:
    """A sweep at work: `left` says what is still to be measured, `measure` does one group and
    saves."""

    def __init__(
        self, llm: LLM, run: Sweep, options: SweepOptions, prompts: Sequence[Prompt], out: Path
    ) -> None:
        self._llm, self.run, self._options, self._prompts, self._out = (
            llm,
            run,
            options,
            prompts,
            out,
        )
        self._controller = Followed()
        llm.generate(
            list(prompts[0].ids)[:64], max_new_tokens=8, draft=None, eos=[]
        )  # the first pass pays for its pages

    @property
    def left(self) -> list[Group]:
        return [
            group
            for group in groups(self._options, self._prompts)
            if group.key not in self.run.done
        ]

    def measure(self, group: Group, say: Callable[[str], None]) -> None:
        """All turns of a group; saved when it is done."""
        if group.part != "grid" and not self.run.ranking:
            say("which halves matter least")
            self.run.ranking = rank(
                self._llm, [prompt.ids for prompt in self._prompts], self._options.by
            )
        settings = (
            [(best_skip(self.run), most) for _, most in group.settings]
            if group.part == "gamma"
            else group.settings
        )
        found, expected = [self._turn(group, PLAIN, 0, 0, None)], self._tokens
        for first, drafts in settings:
            say(f"{group.part} {group.prompt.name}: {first}, {drafts} drafts")
            found.append(self._turn(group, group.part, first, drafts, expected))
        found.append(self._turn(group, PLAIN, 0, 0, expected))
        self.run.turns += found
        self.run.done.append(group.key)
        self.run.complete = not self.left
        write_json(asdict(self.run), self._out)

    def _turn(
        self, group: Group, kind: str, first: int, drafts: int, expected: list[int] | None
    ) -> dict[str, Any]:
        wishes: dict[str, Any] = {"draft": None}
        if kind == "grid":
            wishes = {"draft": "early-exit", "draft_options": {"layer": first}}
            wishes |= {"control": "fixed", "control_options": {"tokens": drafts}}
        elif kind != PLAIN:
            attention, mlp = left_out(self.run.ranking, first)
            self._controller.rounds.clear()
            wishes = {"draft": "layer-skip", "draft_options": {"attention": attention, "mlp": mlp}}
            wishes["control"] = self._controller if kind == "gamma" else Adaptive()
        result = self._llm.generate(
            list(group.prompt.ids), max_new_tokens=self._options.new_tokens, eos=[], **wishes
        )
        if kind == "gamma":
            self.run.gamma += [
                {"prompt": group.prompt.name, **each} for each in self._controller.rounds
            ]
        self._tokens = result.tokens
        stats = result.stats
        return {
            "group": group.key,
            "part": group.part,
            "prompt": group.prompt.name,
            "kind": kind,
            "first": first,
            "drafts": drafts,
            "decoded": stats.decoded,
            "seconds": stats.decode_seconds,
            "verifications": stats.verifications,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "identical": expected is None or result.tokens == expected,
        }


class Followed(Controller):
    """The adaptive controller, which goes on from prompt to prompt with what it learned, as in
    Figure 5, and is written down."""

    name = "adaptive"

    def __init__(self) -> None:
        self.rounds: list[dict[str, Any]] = []
        self._work = FollowedThreshold(self.rounds)

    def start(self) -> ControlSession:
        return self._work


class FollowedThreshold(AdaptiveThreshold):
    """At work."""

    def __init__(self, rounds: list[dict[str, Any]]) -> None:
        super().__init__(Adaptive())
        self._rounds = rounds

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        before = self.threshold
        super().learn(outcome, time)
        self._rounds.append(
            {"threshold": before, "drafted": outcome.drafted, "accepted": outcome.accepted}
        )


def rank(llm: LLM, prompts: Sequence[Sequence[int]], by: str) -> list[dict[str, Any]]:
    """All halves but the last layer's, those first that matter least, by mean cosine similarity or
    by damage.

    Damage: how far (Kullback-Leibler divergence, mean over positions) the next token's distribution
    moves when this half alone is left out.
    """
    layers = llm.model.layers
    halves: list[Half] = [
        (layer, attention) for layer in range(layers) for attention in (True, False)
    ]
    if by == "cosine":
        similar = Similarities(layers)
        for ids in prompts:
            llm.model.prefill([list(ids)], llm.model.new_cache(1, len(ids)), similar)
        similarity = {True: similar.means(True), False: similar.means(False)}
        scores = {half: 1 - similarity[half[1]][half[0]] for half in halves}
    else:
        scores = _damages(llm, prompts, halves)
    ordered = sorted(halves, key=lambda half: scores[half])
    return [
        {"layer": layer, "attention": attention, "score": scores[layer, attention]}
        for layer, attention in ordered
    ]


@torch.inference_mode()
def _damages(
    llm: LLM, prompts: Sequence[Sequence[int]], halves: Sequence[Half]
) -> dict[Half, float]:
    model, found = llm.model, dict.fromkeys(halves, 0.0)

    def logs(ids: Sequence[int], plan: LayerPlan) -> torch.Tensor:
        cache = model.new_cache(1, len(ids))
        tokens = torch.tensor(list(ids), device=model.device)
        return model.forward(tokens, cache, cache.layout([len(ids)]), plan).float().log_softmax(-1)

    for prompt in prompts:
        ids = prompt[-DAMAGE_TOKENS:]
        whole = logs(ids, model.full_plan)
        for layer, attention in halves:
            skipped = ([layer], []) if attention else ([], [layer])
            without = logs(ids, LayerPlan.skipping(model.layers, *skipped))
            found[layer, attention] += float(
                (whole.exp() * (whole - without)).sum(-1).mean()
            ) / len(prompts)
    return found


def left_out(
    ranking: Sequence[dict[str, Any]], count: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers whose attention and whose MLP are left out when `count` halves are."""
    chosen = ranking[:count]
    attention = tuple(sorted(half["layer"] for half in chosen if half["attention"]))
    return attention, tuple(sorted(half["layer"] for half in chosen if not half["attention"]))


def best_skip(run: Sweep) -> int:
    """The number of halves with the highest measured speed; a quarter of all halves where none was
    measured."""
    speeds = skip_speeds(asdict(run))
    return max(speeds, key=lambda cell: cell.speedup).first if speeds else max(1, run.layers // 2)
