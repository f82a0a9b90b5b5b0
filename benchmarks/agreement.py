"""`scripts/bench agreement`: how often is a first draft kept under sampling, next to what the two
distributions allow? On a real model.

Each row drafts one token a round. At every place p (the model's) and q (the draft's) are recorded
as the row's own sampler makes them, after temperature and filters. Drawn drafts can be kept with
1 - TV(p, q), which is what rejection sampling reaches. Drafts chosen outright share the target's
numbers: the coupling's exact chance stands beside them, the least that it promises, (1 - TV) /
(1 + TV), and what inverting both distributions in token order would give. More texts are written
until what was kept can differ from what was allowed by little. Times are not taken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor

from benchmarks.command import Model, Out, Show, made_by, result_path, run_command, tokenizer_of
from benchmarks.models import folder_of
from selfspec.bench.prompts import prompt_ids
from selfspec.bench.schema import write_json
from selfspec.control.fixed import FixedLength
from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.draft.base import Drafter
from selfspec.draft.registry import make_drafter
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.llm import LLM

Row = dict[str, float]
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "layer-skip": ("layer-skip", {}),
    "early-exit 8": ("early-exit", {"layer": 8}),
    "early-exit 26": ("early-exit", {"layer": 26}),
    "quantised": ("quantised", {"first": "none"}),
}


def overlap(p: Tensor, q: Tensor) -> float:
    """1 - TV: the share that both distributions, (vocab,), have in common."""
    return float(torch.minimum(p.double(), q.double()).sum())


def by_coupling(p: Tensor, q: Tensor) -> float:
    """How often two races with the same waiting times have the same winner: the sum over i of
    1 / sum_j max(p_j / p_i, q_j / q_i)."""
    p, q = p.double(), q.double()
    p, q = p / p.sum(), q / q.sum()
    both = ((p > 0) & (q > 0)).nonzero().flatten()
    order = both[(p[both] / q[both]).argsort(descending=True, stable=True)]
    lost = 1 - float(p[both].sum())  # tokens that only p has: their ratio is above all others
    above = p[order].cumsum(0) + lost  # of p, up to i and i included; below it q counts
    below = (1 - float(q[both].sum())) + q[order].sum() - q[order].cumsum(0)
    return float((1 / (above / p[order] + below / q[order])).sum())


def by_inversion(p: Tensor, q: Tensor) -> float:
    """How often one number, inverted through both in token order, gives the same token."""
    ends = [each.double().cumsum(0) / each.double().sum() for each in (p, q)]
    begins = [
        end - each.double() / each.double().sum() for end, each in zip(ends, (p, q), strict=True)
    ]
    return float((torch.minimum(*ends) - torch.maximum(*begins)).clamp(min=0).sum())


class Recording(Sampler):
    """Keeps what the pairs of distributions allow. A draft of one token is asked of one row of
    logits, its verification of two."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        super().__init__(params, seed)
        self._q: Tensor | None = None
        self.allowed: list[tuple[float, float, float]] = []

    def probabilities(self, logits: Tensor, contexts: Sequence[Sequence[int]]) -> Tensor:
        found = super().probabilities(logits, contexts)
        if len(found) == 1:
            self._q = found[0]
        elif self._q is not None:
            p, q = found[0], self._q
            self.allowed.append((overlap(p, q), by_coupling(p, q), by_inversion(p, q)))
        return found

    def choose(
        self, logits: Tensor, contexts: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> Tensor:
        self.probabilities(logits, contexts)
        return super().choose(logits, contexts, positions)


def measure(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    temperature: float,
    tokens: int,
    before: Row | None = None,
) -> Row:
    """Each prompt is continued once more: drafts that were kept, and what was allowed where they
    were made, as sums to which those of `before` are added."""
    seeds = range(int((before or {}).get("texts", 0)), 10**9)
    samplers = [
        Recording(SamplingParams(temperature=temperature), seed)
        for seed, _ in zip(seeds, prompts, strict=False)
    ]
    requests = [
        Request(prompt, sampler, tokens, drafter=drafter, controller=FixedLength(1))
        for prompt, sampler in zip(prompts, samplers, strict=True)
    ]
    generation = Generation(llm.model, requests)
    for _ in generation:
        continue
    allowed = torch.tensor([each for sampler in samplers for each in sampler.allowed]).double()
    stats = generation.stats
    assert stats.drafted == len(allowed), "every draft has its two distributions"
    overlap, chance = allowed[:, 0], allowed[:, 0 if getattr(drafter, "sample", False) else 1]
    names = ("overlap", "coupling", "inversion")
    found = {
        "texts": len(prompts),
        "drafts": stats.drafted,
        "accepted": stats.accepted,
        **dict(zip(names, allowed.sum(0).tolist(), strict=True)),
        "least": float((overlap / (2 - overlap)).sum()),
        "variance": float((chance * (1 - chance)).sum()),
    }
    return {name: value + (before or {}).get(name, 0) for name, value in found.items()}


def error(row: Row) -> float:
    """The standard error of kept less allowed: a draft that is kept with chance a adds a (1 - a)
    to the variance of the sum."""
    return float(row["variance"] ** 0.5 / row["drafts"])


def report(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of both ways to draft."""
    lines = [
        "| drafter | temperature | drawn: kept | 1 - TV "
        "| outright: kept | by the coupling | at least | by inversion |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        drawn, outright = row["drawn"], row["outright"]
        shares = [drawn["overlap"] / drawn["drafts"]]
        shares += [
            outright[name] / outright["drafts"] for name in ("coupling", "least", "inversion")
        ]
        over, *others = (f"{share:.3f}" for share in shares)
        cells = [row["drafter"], f"{row['temperature']:g}", _kept(drawn), over, _kept(outright)]
        lines.append(f"| {' | '.join([*cells, *others])} |")
    return lines


def _kept(row: Row) -> str:
    return f"{row['accepted'] / row['drafts']:.3f} ± {error(row):.3f}"


def agreement(
    model: Model = "demo",
    rows: Annotated[int, typer.Option(help="How many texts.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 60,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that continue each of them.")] = 200,
    temperatures: Annotated[str, typer.Option(help="Separated by commas.")] = "0.2,0.6,1",
    drafters: Annotated[
        str, typer.Option(help=f"Separated by commas: {', '.join(DRAFTERS)}.")
    ] = "layer-skip,early-exit 8,early-exit 26",
    most_error: Annotated[
        float, typer.Option(help="More texts until the standard error of a share is below this.")
    ] = 0.005,
    out: Out = None,
    show: Show = None,
) -> None:
    """Compare how often first drafts are kept under sampling with what p and q allow. A run that
    was stopped goes on with the same command.

    Example: scripts/bench agreement --rows 2 --max-new-tokens 40 --temperatures 1 --most-error 0.1
    """
    if show is not None:
        typer.echo("\n".join(report(_read(show)["rows"])))
        return
    folder = folder_of(model)
    llm = LLM.from_pretrained(folder)
    ids = prompt_ids(tokenizer_of(folder), rows * length)
    prompts = [ids[row * length : (row + 1) * length] for row in range(rows)]
    target = out or result_path("agreement")
    provenance = vars(made_by("agreement", llm.info.threads))
    facts = {
        "kind": "agreement",
        "model": model,
        "kernel": llm.info.kernel,
        "provenance": provenance,
    }
    found = begun(target, provenance) or [
        {"drafter": name, "temperature": float(each), "drawn": {}, "outright": {}}
        for name in drafters.split(",")
        for each in temperatures.split(",")
    ]
    for row in track(found, transient=True):
        kind, options = DRAFTERS[row["drafter"]]
        for way, sample in (("drawn", True), ("outright", False)):
            drafter = make_drafter(kind, {**options, "sample": sample})
            assert drafter is not None
            while not row[way] or error(row[way]) > most_error:
                row[way] = measure(
                    llm, prompts, drafter, row["temperature"], max_new_tokens, row[way]
                )
                row["commit"] = provenance["commit"]  # the last that added to it
                write_json({**facts, "complete": False, "rows": found}, target)
    write_json({**facts, "complete": True, "rows": found}, target)
    typer.echo("\n".join(report(found)))
    typer.echo(json.dumps({"file": target.name}))


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def begun(target: Path, provenance: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an unfinished file that the same command left; each says of which commit it is,
    since a long run goes on over several."""
    if not target.exists():
        return []
    before = _read(target)
    same = before["provenance"]["command"] == provenance["command"]
    return list(before["rows"]) if same and not before.get("complete", True) else []


if __name__ == "__main__":
    run_command(agreement)
