"""A call of `generate`, `stream` or `chat`: its options, and its work, in which the engine's steps
become text and results.

Knows no models, drafters or chat templates.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch

from .control.base import Controller
from .core import door
from .core.contract import RowStep, Stats
from .core.grammar import Asked, Grammars, grammars
from .core.logprobs import TokenLogprob
from .core.sampling import SamplingParams, row_samplers
from .core.text_stream import CriteriaCheck, RowText
from .draft.base import Drafter
from .draft.registry import resolve
from .engine.chat_cache import ChatCaches
from .engine.generation import Generation
from .engine.row import Request, Row
from .errors import Busy, OptionError, nearest
from .results import Piece, Result

if TYPE_CHECKING:
    from transformers import LogitsProcessor, StoppingCriteria


class Options(TypedDict, total=False):
    """Options of `generate`, `stream`, `chat` and `stream_chat`. `LLM.generate` explains them."""

    sampling: SamplingParams | Sequence[SamplingParams] | None
    max_new_tokens: int
    stop: str | Sequence[str] | None
    eos: Sequence[int] | None
    draft: str | Drafter | None
    draft_options: Mapping[str, Any] | None
    control: str | Controller | None
    control_options: Mapping[str, Any] | None
    logprobs: int | None
    logits_processors: Sequence[LogitsProcessor]
    stopping_criteria: Sequence[StoppingCriteria]
    grammar: Asked


def options_among(given: Mapping[str, Any]) -> Options:
    """The options among a method's local names. An unknown one is an error, never swallowed."""
    for name, value in given["unknown"].items():
        if name in SamplingParams.__dataclass_fields__:
            raise OptionError(
                f"{name!r} is a sampling parameter; pass sampling=SamplingParams({name}={value!r})"
            )
        raise OptionError(f"there is no option {name!r}; {nearest(name, Options.__annotations__)}")
    return cast(Options, {name: given[name] for name in Options.__annotations__})


@dataclass(frozen=True)
class Defaults:
    """What a model brings: what reads and writes text, where its texts end, how it is sampled if
    nobody says, and its grammars."""

    words: Any
    eos: frozenset[int]
    sampling: SamplingParams
    grammars: Grammars


def requests_of(
    ids: Sequence[list[int]], options: Options, own: Defaults, vocabulary: int
) -> tuple[list[Request], list[RowText]]:
    """What these options ask of the engine for these prompts, and where each one's new text is
    gathered."""
    stop = door.stops(options["stop"])
    criteria = door.callables("stopping_criteria", options["stopping_criteria"])
    processors = door.callables("logits_processors", options["logits_processors"])
    texts = [RowText(own.words, stop) for _ in ids]
    ends = door.ends(options["eos"], vocabulary)
    eos = own.eos if ends is None else ends
    sampling = options["sampling"]
    samplers = row_samplers(
        own.sampling if sampling is None else sampling,
        ids,
        cast("Sequence[LogitsProcessor]", processors),
        eos,
        [own.grammars.allowed(each, eos) for each in grammars(options["grammar"], len(ids))],
    )
    drafting, controlling = options["draft_options"], options["control_options"]
    drafter, controller = resolve(options["draft"], drafting, options["control"], controlling)
    new = door.whole("max_new_tokens", options["max_new_tokens"], 1, "ask for at least 1")
    logprobs = options["logprobs"]
    if logprobs is not None:
        logprobs = door.whole("logprobs", logprobs, 0, "0 reports the tokens' own only")
    requests = [
        Request(
            prompt=prompt,
            sampler=sampler,
            max_new_tokens=new,
            eos=eos,
            stop_checks=[
                *text.stop_checks,
                *([CriteriaCheck(cast(Any, criteria), prompt)] if criteria else []),
            ],
            logprobs=logprobs,
            drafter=drafter,
            controller=controller,
        )
        for prompt, sampler, text in zip(ids, samplers, texts, strict=True)
    ]
    return requests, texts


class Call:
    """All requests of one call, admitted at once and run to their ends."""

    def __init__(
        self,
        generation: Generation,
        requests: Sequence[Request],
        texts: Sequence[RowText],
        chats: ChatCaches | None,
    ) -> None:
        self._generation, self._texts, self._chats = generation, texts, chats
        cached = generation.cache.length(0) if chats else 0
        self._rows = [generation.admit(request, cached) for request in requests]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in requests]
        self.results: list[Result] | None = None

    def pieces(self) -> Generator[Piece, None, None]:
        """Every row's text as it comes; results at the end."""
        try:
            for step in self._generation:
                for new in step.rows:
                    text = self._texts[new.row].push(new)
                    self._logprobs[new.row] += new.logprobs
                    yield Piece(text, list(new.tokens), new.accepted, list(new.rejected), new.row)
            self.results = self._found()
        finally:
            self._give_back()

    @torch.inference_mode()
    def finish(self) -> list[Result]:
        """The same for whoever waits for the end: texts are made then, each at once."""
        try:
            for step in self._generation:
                for new in step.rows:
                    self._logprobs[new.row] += new.logprobs
            for row in self._rows:
                written = row.tokens[len(row.request.prompt) :]
                self._texts[row.index].push(RowStep(row.index, written, finish_reason=row.finish))
            self.results = self._found()
        finally:
            self._give_back()
        return self.results

    def _give_back(self) -> None:
        """The cache of a conversation waits for its next turn."""
        if self._chats:
            row = self._rows[0]
            self._chats.give(row.tokens[: row.settled], self._generation.cache)

    def _found(self) -> list[Result]:
        stats = replace(self._generation.stats, peak_memory_bytes=self._peak_memory())
        return [self._result(row, stats) for row in self._rows]

    def _result(self, row: Row, stats: Stats) -> Result:
        request = row.request
        assert row.finish is not None
        row.stats.peak_memory_bytes = stats.peak_memory_bytes
        return Result(
            text=self._texts[row.index].text,
            tokens=row.tokens[len(request.prompt) :],
            finish_reason=row.finish,
            stats=row.stats,
            call=stats,
            logprobs=self._logprobs[row.index] if request.logprobs is not None else None,
            seed=None if request.sampler.params.greedy else request.sampler.seed,
        )

    def _peak_memory(self) -> int:
        """The most memory in use so far: a GPU's, or on a CPU the process's."""
        if self._generation.cache.keys.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._generation.cache.keys.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Stream:
    """Pieces of text as they are made. `close()`, or leaving a `with`, stops the work. `result` is
    there once the stream has ended by itself."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._pieces = call.pieces()
        self._reading = threading.RLock()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        with self._alone():
            return next(self._pieces)

    def close(self) -> None:
        """Stop generating. Nothing is computed after this."""
        with self._alone():
            self._pieces.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One reader at a time: a piece is handed out once, so two would each get some of it."""
        if not self._reading.acquire(blocking=False):
            raise Busy(
                "another thread is reading this stream, and each piece is handed out once; read "
                "it in one thread, or call stream once for each"
            )
        try:
            yield
        finally:
            self._reading.release()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def result(self) -> Result:
        """The whole result, once the stream is exhausted."""
        if self._call.results is None:
            raise OptionError("the stream has not ended, so it has no result; iterate to its end")
        return self._call.results[0]
