"""What the engine says, as OpenAI's objects: whole answers, and chunks of a stream.

A chunk's `finish_reason` is null but in the last one of a choice, log-probabilities end with the
text that is shown, and usage counts what was kept. Knows neither HTTP nor the engine's thread.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..core.contract import Stats
from ..core.logprobs import TokenLogprob
from ..core.text_stream import TextStream
from .asked import Asked
from .calls import Calls
from .job import Event
from .schemas import ChatRequest
from .words import token_bytes, token_text

_LEAST = -9999.0  # what stands for minus infinity, which JSON does not have
_FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class Spelled:
    """A choice's tokens with where their text begins, so that none is reported behind a stop."""

    def __init__(self, words: Any) -> None:
        self._words = words
        self._stream = TextStream(words) if words else None
        self._length = 0
        self._held: list[tuple[int, TokenLogprob]] = []

    def push(self, new: Sequence[TokenLogprob]) -> None:
        for each in new:
            self._held.append((self._begin(each.token), each))

    def _begin(self, token: int) -> int:
        """Where a token's text begins. One that adds none belongs to the character before it."""
        if self._stream is None:
            return 0
        before = self._length + len(self._stream.held())
        self._length += len(self._stream.push([token]))
        after = self._length + len(self._stream.held())
        return before if after > before else max(0, after - 1)

    def skip(self, tokens: Sequence[int]) -> None:
        """Tokens that came before, and are not reported."""
        for token in tokens:
            self._begin(token)

    def ready(self, shown: int, ended: bool, cut: bool) -> list[tuple[int, TokenLogprob]]:
        """Those whose text is shown by now. `cut`: at a stop string, so that no more will be."""
        count = sum(at < shown for at, _ in self._held)
        if ended and not cut:
            count = len(self._held)
        found, self._held = self._held[:count], [] if ended else self._held[count:]
        return found


class Taken(NamedTuple):
    """What an event adds to what a caller may see."""

    words: str
    calls: list[dict[str, Any]]
    logprobs: list[tuple[int, TokenLogprob]]


class Choice:
    """One answer on its way."""

    def __init__(self, index: int, asked: Asked, words: Any) -> None:
        self.index, self._words = index, words
        self._chat = isinstance(asked.body, ChatRequest)
        self._logprobs = asked.requests[index].logprobs
        self._offset = len(asked.echoes[index])
        self._spelled = Spelled(words)
        self._more = bool(asked.body.selfspec and asked.body.selfspec.stats)
        self._shown = 0
        self.text = asked.echoes[index]
        self._calls = Calls(asked.tools) if asked.tools.choice != "none" else None
        self._called: list[dict[str, Any]] = []
        self.finish: str | None = None
        self.stats: Stats | None = None
        self.logprobs: list[tuple[int, TokenLogprob]] = []
        self._echo, self._seed = self.text, asked.requests[index].sampler.seed
        if asked.given:
            self._spelled.skip(asked.given)
            self._shown = len(asked.shown)
            self._read(Event(asked.shown))

    def take(self, event: Event) -> Taken:
        """Note what came, and say what of it may be shown now."""
        self._shown += len(event.text)
        self._spelled.push(event.logprobs)
        if event.finish:
            self.finish, self.stats = _FINISH[event.finish], event.stats
        found = self._spelled.ready(self._shown, event.finish is not None, event.finish == "stop")
        self.logprobs += found
        return Taken(*self._read(event), found)

    def _read(self, event: Event) -> tuple[str, list[dict[str, Any]]]:
        """What an event adds to the answer: words, and calls that are complete."""
        if self._calls is None:
            self.text += event.text
            return event.text, []
        parts = [self._calls.push(event.text)]
        if event.finish:
            parts.append(self._calls.finish())
        words, first = "".join(part.content for part in parts), len(self._called)
        for call in (call for part in parts for call in part.calls):
            name = f"call_{uuid.uuid4().hex[:24]}"
            self._called.append(call.as_dict(name, len(self._called)))
        self.text += words
        if event.finish == "eos" and self._called:
            self.finish = "tool_calls"
        return words, self._called[first:]

    def whole(self) -> dict[str, Any]:
        """The finished choice."""
        content: dict[str, Any] = {"text": self.text}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": self.text}
            message["refusal"] = None
            if self._called:
                message["content"] = self.text or None
                message["tool_calls"] = [_without_index(call) for call in self._called]
            content = {"message": message}
        logprobs = self._spelled_out(self.logprobs)
        made = {"index": self.index, **content, "logprobs": logprobs, "finish_reason": self.finish}
        if self._more and self.stats:
            made["selfspec"] = figures(self.stats)
        return made

    def opening(self) -> Iterator[dict[str, Any]]:
        """What a stream begins with: the role, or the text that is echoed."""
        if self._chat or self._echo or self._more:
            first = {"role": "assistant", "content": ""} if self._chat else self._echo
            piece = self._piece(first)
            if self._more:
                piece["selfspec"] = {"seed": self._seed}
            yield piece

    def pieces(self, event: Event) -> Iterator[dict[str, Any]]:
        """What an event adds to a stream. Its end is a piece of its own, without text."""
        words, calls, logprobs = self.take(event)
        if words or calls or logprobs or (self._more and event.tokens):
            delta: dict[str, Any] = {"content": words} if words or not calls else {}
            if calls:
                delta["tool_calls"] = calls
            piece = self._piece(delta if self._chat else words, logprobs)
            if self._more:
                piece["selfspec"] = self._drafted(event)
            yield piece
        if self.finish:
            last = self._piece({} if self._chat else "")
            last["finish_reason"] = self.finish
            if self._more and self.stats:
                last["selfspec"] = {"stats": figures(self.stats)}
            yield last

    def _piece(
        self, content: Any, logprobs: Sequence[tuple[int, TokenLogprob]] = ()
    ) -> dict[str, Any]:
        return {
            "index": self.index,
            "delta" if self._chat else "text": content,
            "logprobs": self._spelled_out(logprobs) if logprobs else None,
            "finish_reason": None,
        }

    def _drafted(self, event: Event) -> dict[str, Any]:
        """Which of the new tokens were drafts: the first `accepted` ones."""
        step = event.step
        assert step is not None
        return {
            "tokens": [token_text(self._words, each) for each in step.tokens],
            "ids": list(step.tokens),
            "accepted": step.accepted,
            "rejected": [token_text(self._words, each) for each in step.rejected],
        }

    def _spelled_out(self, found: Sequence[tuple[int, TokenLogprob]]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        if self._chat:
            return {"content": [self._chat_entry(each) for _, each in found], "refusal": None}
        return {
            "tokens": [token_text(self._words, each.token) for _, each in found],
            "token_logprobs": [_finite(each.logprob) for _, each in found],
            "top_logprobs": [
                {
                    token_text(self._words, token): _finite(value)
                    for token, value in each.top.items()
                }
                for _, each in found
            ],
            "text_offset": [self._offset + at for at, _ in found],
        }

    def _chat_entry(self, each: TokenLogprob) -> dict[str, Any]:
        return {
            **self._named(each.token, each.logprob),
            "top_logprobs": [self._named(token, value) for token, value in each.top.items()],
        }

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._words, token),
            "logprob": _finite(logprob),
            "bytes": list(token_bytes(self._words, token)),
        }


class Answer:
    """All choices of a request, and what goes around them."""

    def __init__(self, asked: Asked, words: Any, name: str) -> None:
        self._asked = asked
        self._chat = isinstance(asked.body, ChatRequest)
        self.id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": name}
        self.choices = [Choice(index, asked, words) for index in range(len(asked.requests))]

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens. What was computed for nothing (drafts, a text behind a stop) does not count."""
        stats = [choice.stats for choice in self.choices if choice.stats]
        written = sum(each.new_tokens for each in stats) + len(self._asked.given)
        cached = sum(each.cached_prompt_tokens for each in stats[:: self._asked.body.n or 1])
        prompt = self._asked.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def whole(self) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        return {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": [choice.whole() for choice in self.choices],
            "usage": self.usage,
        }

    def opening(self) -> Iterator[dict[str, Any]]:
        for choice in self.choices:
            yield from map(self._chunk, choice.opening())

    def chunks(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """What an event of one choice adds to the stream."""
        yield from map(self._chunk, self.choices[index].pieces(event))

    def closing(self) -> Iterator[dict[str, Any]]:
        """The chunk with the usage, if it was asked for."""
        if self._with_usage:
            yield {**self._frame, "choices": [], "usage": self.usage}

    @property
    def _frame(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind}

    @property
    def _with_usage(self) -> bool:
        options = self._asked.body.stream_options
        return options is not None and options.include_usage

    def _chunk(self, piece: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._with_usage else {}
        return {**self._frame, "choices": [piece], **usage}


def figures(stats: Stats) -> dict[str, Any]:
    """What drafts did for one answer."""
    return {
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_by_position": [round(each, 4) for each in stats.acceptance_by_position],
        "rounds": stats.rounds,
        "tokens_per_verification": round(stats.tokens_per_verification, 4),
        "prefill_seconds": round(stats.prefill_seconds, 6),
        "decode_seconds": round(stats.decode_seconds, 6),
        "draft_seconds": round(stats.draft_seconds, 6),
        "verify_seconds": round(stats.verify_seconds, 6),
    }


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a whole answer, whose place says its number."""
    return {name: value for name, value in call.items() if name != "index"}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST
