"""Samples for exit predictors: what a model says of candidates after every layer, as it writes.

The model answers prompts greedily. Each token it reads runs layer by layer, all layers, so the text
is its own; at every layer the candidates' logits are kept, and what the whole head says there. A
sample is a token. Batches of prompts are files, so a run that is stopped goes on. Does not know
what is fitted to the samples.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..core.files import write_whole
from ..core.sampling import Sampler, SamplingParams
from ..draft.base import Drafter, DraftSession, Target, Texts
from ..errors import DataError, OptionError
from ..exits.first_look import SOURCE, Named, rows_of
from ..exits.rules import chance_and_lead
from ..llm import LLM
from ..lossy.session import Said, WholeTokenSession
from ..model.compute.cache import RowSpan
from ..model.compute.cpu.choosing import likeliest
from ..model.compute.plan import LayerPlan
from ..model.partial_head import head_over
from ..model.stretch import run_stretch
from ..trained.files import signature, unlike
from .own_text import Question

# of each sample, beside the candidates' logits (exits, count): which candidate is the best token of
# all there (-1: none is), whether that is the answer, AdaInfer's features, and which candidate is
# the answer (-1: none is)
FIELDS = ("logits", "top", "same", "lead", "answer", "text")


@dataclass(frozen=True)
class SampleOptions:
    """What samples are taken of."""

    candidates: int = 4
    """How many candidates a predictor looks at."""
    source: str = "recycle"
    """Who names them: recycle, ngram, hybrid, quantised or draft-head; or first-look, the model
    itself at the first layer that is looked at."""
    head: str = ""
    """Folder of the head that names them, with draft-head; '' is what selfspec ships."""
    pool: tuple[int, ...] = ()
    """With first-look: the token ids to choose from beside the prompt's, such as those that a
    task's answers are made of."""
    first: int = 1
    """Look after this number of layers at first, such as the first exit that was trained."""
    samples: int = 16000
    """How many tokens to take samples of. Each gives one for every layer."""
    batch: int = 16
    """How many prompts are answered together."""
    max_new_tokens: int = 128
    """Write at most this many new tokens for an answer."""

    def __post_init__(self) -> None:
        for name in ("candidates", "samples", "batch", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} leaves nothing; use 1 or more")
        if (self.source == SOURCE) != bool(self.pool):
            raise OptionError(
                f"source={self.source!r} and a pool of {len(self.pool)} tokens: first-look needs "
                "some to choose from, and nobody else takes any; give both or neither"
            )
        if self.pool and len(self.pool) < self.candidates:
            raise OptionError(
                f"candidates={self.candidates} cannot be chosen from {len(self.pool)} tokens; "
                "give more tokens"
            )
        if self.first < 1:
            raise OptionError(f"first={self.first} is no number of layers; use 1 or more")
        if self.max_new_tokens < 2:
            raise OptionError("max_new_tokens=1 is said by the prompt's pass alone; use 2 or more")


Samples = Mapping[str, Tensor]


@dataclass
class Collected:
    """How far collecting is."""

    samples: int = 0
    found: int = 0  # of them, those of earlier runs
    seconds: float = 0.0
    stopped: bool = False  # the time was up before there were enough
    keys: set[str] = field(default_factory=set)  # of the prompts that were answered
    made_up: int = 0  # how many prompts were made up so far


@dataclass(frozen=True, eq=False)
class _Watch(Drafter):
    """Runs every token layer by layer and puts down what it sees."""

    name: ClassVar[str] = "watch"
    decides_how_much: ClassVar[bool] = True
    options: SampleOptions
    seen: list[dict[str, Tensor]]

    def start(self, target: Target) -> DraftSession:
        return _Watching(target, self)


class _Watching(WholeTokenSession):
    def __init__(self, target: Target, watch: _Watch) -> None:
        options, model = watch.options, target.model
        ids = torch.tensor(options.pool, device=model.device)
        pool = head_over(model, ids) if options.pool else None
        head = options.head or None
        super().__init__(target, options.source, options.candidates, pool, head)
        self._watch = watch
        self._texts: dict[int, int] = {}
        self._admitted = 0

    def admit(
        self, row: int, prompt: Sequence[int], sampler: Sampler, ends: frozenset[int] = frozenset()
    ) -> None:
        super().admit(row, prompt, sampler, ends)
        self._texts[row] = self._admitted
        self._admitted += 1

    def said(self, rows: Sequence[int], texts: Texts, x: Tensor, named: Sequence[Named]) -> Said:
        model, cache = self._target.model, self._target.cache
        spans = [RowSpan(row, len(text) - 1, 1) for row, text in zip(rows, texts, strict=True)]
        layout, every = cache.layout_at(spans), range(len(rows))
        options = self._watch.options
        candidates = rows_of(model, named, options.candidates)
        logits, tops, leads = list[Tensor](), list[Tensor](), list[Tensor]()
        below = dict[int, Tensor]()
        for layer in range(model.layers):
            x, left = run_stretch(model, x, LayerPlan(layer, layer + 1), cache, layout, self._taps)
            below |= left
            if options.first <= layer + 1 < model.layers:
                whole = model.head(x)
                logits.append(candidates.logits(every, x))
                tops.append(likeliest(whole)[:, 0])
                leads.append(chance_and_lead(whole))
        word = model.head(x)
        answer, top = likeliest(word)[:, 0], torch.stack(tops, 1)  # (rows,), (rows, exits)
        self._watch.seen.append(
            {
                "logits": torch.stack(logits, 1),
                "top": _rank(candidates.tokens[:, None], top),
                "same": top == answer[:, None],
                "lead": torch.stack(leads, 1),
                "answer": _rank(candidates.tokens, answer),
                "text": torch.tensor([self._texts[row] for row in rows], dtype=torch.int32),
            }
        )
        return Said(x, word, below)


def _rank(candidates: Tensor, tokens: Tensor) -> Tensor:
    """Which of the candidates (..., count) a token is; -1 if it is none."""
    equal = candidates == tokens[..., None]
    return torch.where(equal.any(-1), equal.int().argmax(-1), -1).to(torch.int8)


# --------------------------------------------------------------------------------------- collecting


def collect(
    llm: LLM,
    questions: Callable[[Collected], Iterable[Question]],
    folder: Path,
    options: SampleOptions,
    *,
    max_seconds: float | None = None,
    tell: Callable[[Collected], None] | None = None,
) -> Collected:
    """Answer questions until there are enough samples in the folder. `questions` is told what was
    answered before, so that it need not make that up again."""
    begin, done = time.perf_counter(), _resume(llm, folder, options)
    waiting = _unanswered(questions(done), done, llm)
    while done.samples < options.samples:
        if max_seconds is not None and time.perf_counter() - begin > max_seconds:
            done.stopped = True
            break
        batch = [question for _, question in zip(range(options.batch), waiting, strict=False)]
        if not batch:
            break
        _answer(llm, batch, folder, options, done)
        done.seconds = time.perf_counter() - begin
        if tell:
            tell(done)
    return done


def _unanswered(questions: Iterable[Question], done: Collected, llm: LLM) -> Iterator[Question]:
    for question in questions:
        if question.key not in done.keys and len(question.ids) + 2 < llm.info.context:
            yield question


def _answer(
    llm: LLM, batch: Sequence[Question], folder: Path, options: SampleOptions, done: Collected
) -> None:
    watch = _Watch(options, [])
    prompts = [list(question.ids) for question in batch]
    llm.generate(
        prompts, draft=watch, sampling=SamplingParams(), max_new_tokens=options.max_new_tokens
    )
    if not watch.seen:  # every answer was a single token
        done.keys.update(question.key for question in batch)
        return
    tensors = {name: torch.cat([each[name] for each in watch.seen]) for name in FIELDS}
    done.keys.update(question.key for question in batch)
    own = [question.number + 1 for question in batch if question.source.startswith("made up")]
    done.made_up = max([done.made_up, *own])
    described = {
        "base": signature(llm.model),
        "candidates": options.candidates,
        "source": options.source,
        "first": options.first,
        "keys": [question.key for question in batch],
        "made_up": done.made_up,
    }
    path = folder / f"{len(list(folder.glob('*.safetensors'))):05d}.safetensors"
    write_whole(path, save(tensors, {"selfspec": json.dumps(described)}))
    done.samples += len(tensors["text"])


def _resume(llm: LLM, folder: Path, options: SampleOptions) -> Collected:
    """What earlier runs left."""
    done, own = Collected(), signature(llm.model)
    for path in sorted(folder.glob("*.safetensors")):
        described, count = _described(path)
        for name in ("candidates", "source", "first"):
            if described[name] != getattr(options, name):
                raise DataError(
                    f"{path} has samples with {name}={described[name]!r}, and "
                    f"{getattr(options, name)!r} is asked for; name another folder (--out), or "
                    "leave that as it was"
                )
        if difference := unlike(described["base"], own):
            raise DataError(
                f"{path} has samples of another model ({difference}); name another folder (--out)"
            )
        done.keys.update(described["keys"])
        done.made_up = max(done.made_up, described["made_up"])
        done.samples += count
    done.found = done.samples
    return done


def _described(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of its samples, and how many there are."""
    try:
        with safe_open(path, "pt") as file:
            said: dict[str, Any] = json.loads((file.metadata() or {})["selfspec"])
            count = file.get_slice("answer").get_shape()[0]
        said["base"], said["keys"], said["made_up"], said["candidates"], said["source"]
        said.setdefault("first", 1)  # older files begin there
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise DataError(
            f"{path} holds no samples that were taken here ({error}); remove it, and they are "
            "taken again"
        ) from error
    return said, count


def load_samples(folder: Path) -> Samples:
    """All samples of a folder. Texts are numbered over all files."""
    pieces: dict[str, list[Tensor]] = {name: [] for name in FIELDS}
    texts = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in FIELDS:
                tensor = file.get_tensor(name)
                pieces[name].append(tensor + texts if name == "text" else tensor)
        texts = int(pieces["text"][-1].max()) + 1
    if not texts:
        raise DataError(f"{folder} holds no samples; run selfspec fit-exits with prompts first")
    return {name: torch.cat(some) for name, some in pieces.items()}
