"""`selfspec sweep`: how a model's speed depends on what its drafts are made of, always paired with
plain decoding.

Three parts. *grid*: speedup by exit layer E and drafts a round K (the picture of Hugging Face's
blog). *skips*: speedup by how many halves the draft leaves out, those first that matter least by
cosine similarity or by measured damage, with the adaptive controller (Draft & Verify, Figure 4).
*gamma*: the adaptive controller's threshold round by round, from prompt to prompt (Figure 5). Plain
decoding stands at both ends of every group of turns, so that a drift of the machine cancels. A kill
loses one group. Knows no tables and no pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..control.adaptive import Adaptive, AdaptiveThreshold
from ..control.base import Controller, ControlSession
from ..model.compute.plan import LayerPlan
from .layers import Similarities
from .prompts import Prompt
from .schema import PLAIN, write
from .sweep_result import Half, Sweep, SweepOptions, SweepTurn, Threshold, best, speeds

if TYPE_CHECKING:
    from ..core.contract import Outcome, RoundTime
    from ..llm import LLM

DAMAGE_TOKENS = 192  # of each prompt, on which the damage of leaving out a half is measured
HEAD_SHARE = 0.2  # of a pass, for the estimate
Settings = tuple[tuple[int, int], ...]  # grid: (exit, drafts); else (halves left out, most drafts)


@dataclass(frozen=True)
class Group:
    """Turns that are compared with one another: plain at both ends, `settings` in between."""

    part: str
    prompt: Prompt
    round: int
    settings: Settings

    @property
    def key(self) -> str:
        first = "" if self.part == "gamma" else f"/{self.settings[0][0]}"
        return f"{self.part}/{self.prompt.id}/{self.round}{first}"


def groups(options: SweepOptions, prompts: Sequence[Prompt]) -> Iterator[Group]:
    """Everything there is to measure, in order. What gamma drafts with is known once skips were
    measured: 0 stands for it."""
    most = Adaptive().tokens
    halves = [options.skips[first : first + 4] for first in range(0, len(options.skips), 4)]
    settings: dict[str, list[Settings]] = {
        "grid": [tuple((layer, count) for count in options.drafts) for layer in options.exits],
        "skips": [tuple((count, most) for count in some) for some in halves],
        "gamma": [((0, most),)],
    }
    for part in options.parts:
        for number in range(options.rounds):
            for prompt in prompts:
                yield from (Group(part, prompt, number, each) for each in settings[part])


class Sweeping:
    """A sweep at work: `left` says what is still to be measured, `measure` does one group."""

    def __init__(self, llm: LLM, run: Sweep, prompts: Sequence[Prompt], out: Path) -> None:
        self._llm, self.run, self._prompts, self._out = llm, run, prompts, out
        self._controller = Followed()
        warm = list(prompts[0].ids)[:64]  # the first pass pays for its pages
        llm.generate(warm, max_new_tokens=8, draft=None, eos=[])

    @property
    def left(self) -> list[Group]:
        every = groups(self.run.options, self._prompts)
        return [group for group in every if group.key not in self.run.done]

    def measure(self, group: Group, say: Callable[[str], None]) -> None:
        """All turns of a group; saved when it is done."""
        run = self.run
        if group.part != "grid" and not run.ranking:
            say("which halves matter least")
            run.ranking = rank(self._llm, [prompt.ids for prompt in self._prompts], run.options.by)
        turns, expected = [self._turn(group, PLAIN, 0, 0, None)], self._tokens
        for first, drafts in group.settings:
            first = best_skip(run) if group.part == "gamma" else first
            say(f"{group.part} {group.prompt.id}: {first}, {drafts} drafts")
            turns.append(self._turn(group, group.part, first, drafts, expected))
        turns.append(self._turn(group, PLAIN, 0, 0, expected))
        run.turns += turns
        run.done.append(group.key)
        run.complete = not self.left
        write(run, self._out)

    def _turn(
        self, group: Group, kind: str, first: int, drafts: int, expected: list[int] | None
    ) -> SweepTurn:
        wishes: dict[str, Any] = {"draft": None}
        if kind == "grid":
            wishes = {"draft": "early-exit", "draft_options": {"layer": first}}
            wishes |= {"control": "fixed", "control_options": {"tokens": drafts}}
        elif kind != PLAIN:
            attention, mlp = left_out(self.run.ranking, first)
            self._controller.rounds.clear()
            wishes = {"draft": "layer-skip", "draft_options": {"attention": attention, "mlp": mlp}}
            wishes["control"] = self._controller if kind == "gamma" else Adaptive()
        asked, name = list(group.prompt.ids), group.prompt.id
        result = self._llm.generate(
            asked, max_new_tokens=self.run.options.new_tokens, eos=[], **wishes
        )
        if kind == "gamma":
            self.run.gamma += [Threshold(name, *each) for each in self._controller.rounds]
        self._tokens, stats = result.tokens, result.stats
        return SweepTurn(
            group.key, group.part, name, kind, first, drafts, stats.decoded, stats.decode_seconds,
            stats.verifications, stats.drafted, stats.accepted,
            expected is None or result.tokens == expected,
        )  # fmt: skip


class Followed(Controller, AdaptiveThreshold):
    """The adaptive controller, which goes on from prompt to prompt with what it learned, as in
    Figure 5, and is written down: threshold, drafted and accepted of each round."""

    name = "adaptive"

    def __init__(self) -> None:
        AdaptiveThreshold.__init__(self, Adaptive())
        self.rounds: list[tuple[float, int, int]] = []

    def start(self) -> ControlSession:
        return self

    def learn(self, outcome: Outcome, time: RoundTime) -> None:
        before = self.threshold
        super().learn(outcome, time)
        self.rounds.append((before, outcome.drafted, outcome.accepted))


def rank(llm: LLM, prompts: Sequence[Sequence[int]], by: str) -> list[Half]:
    """All halves, those first that matter least, by mean cosine similarity or by damage.

    Damage: how far (Kullback-Leibler divergence, mean over positions) the next token's distribution
    moves when this half alone is left out.
    """
    layers = llm.model.layers
    if by == "cosine":
        similar = Similarities(layers)
        for ids in prompts:
            llm.model.prefill([list(ids)], llm.model.new_cache(1, len(ids)), similar)
        means = {half: similar.means(half) for half in (True, False)}
        halves = [
            Half(n, half, 1 - means[half][n]) for n in range(layers) for half in (True, False)
        ]
    else:
        halves = _damages(llm, prompts)
    lent = llm.model.shape.borrowers  # layers whose attention others need
    free = [half for half in halves if not (half.attention and half.layer in lent)]
    return sorted(free, key=lambda half: half.score)


@torch.inference_mode()
def _damages(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Half]:
    model = llm.model
    scores = {(layer, half): 0.0 for layer in range(model.layers) for half in (True, False)}

    def logs(ids: Sequence[int], plan: LayerPlan) -> torch.Tensor:
        cache = model.new_cache(1, len(ids))
        tokens = torch.tensor(list(ids), device=model.device)
        return model.forward(tokens, cache, cache.layout([len(ids)]), plan).float().log_softmax(-1)

    for prompt in prompts:
        ids = prompt[-DAMAGE_TOKENS:]
        whole = logs(ids, model.full_plan)
        for layer, attention in scores:
            if attention and layer in model.shape.borrowers:
                continue
            skipped = ([layer], []) if attention else ([], [layer])
            without = logs(ids, LayerPlan.skipping(model.layers, *skipped))
            moved = float((whole.exp() * (whole - without)).sum(-1).mean())
            scores[layer, attention] += moved / len(prompts)
    return [Half(*half, score) for half, score in scores.items()]


def left_out(ranking: Sequence[Half], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The layers whose attention and whose MLP are left out when `count` halves are."""
    chosen = sorted(ranking[:count], key=lambda half: half.layer)
    attention = tuple(half.layer for half in chosen if half.attention)
    return attention, tuple(half.layer for half in chosen if not half.attention)


def best_skip(run: Sweep) -> int:
    """The number of halves with the highest speed; a quarter of all where none was measured."""
    cells = speeds(run, "skips")
    return best(cells).first if cells else max(1, run.layers // 2)


def steps_of(cost: float, drafts: int, acceptance: float) -> float:
    """Steps a token of a round of drafts at `cost` steps each, if each is kept with this chance."""
    tokens = sum(acceptance**place for place in range(drafts + 1))
    return (drafts * cost + 1 + 0.03 * drafts) / tokens


def estimate(
    settings: Sequence[tuple[str, int, int]],
    layers: int,
    step: float,
    new_tokens: int,
    chances: Sequence[float],
) -> float:
    """Seconds that turns will take: (kind, first, drafts) each; `chances[E]` is the acceptance of
    exit E, as far as known."""
    steps = 0.0
    for kind, first, drafts in settings:
        if kind == PLAIN:
            steps += 1.0
        elif kind == "grid":
            steps += steps_of(
                HEAD_SHARE + (1 - HEAD_SHARE) * first / layers, drafts, chances[first]
            )
        else:  # the controller stops early where little is kept
            cost = 1 - (1 - HEAD_SHARE) * (first or layers // 2) / (2 * layers)
            steps += steps_of(cost, 3, 0.6)
    return steps * step * new_tokens
