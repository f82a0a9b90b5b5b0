"""From tokens to text while they are being made: streams, stop strings, stopping criteria.

Knows no models, no sampling and no engine: tokens are pushed in, text and the word "stop" come out.
Everything is decoded with `clean_up_tokenization_spaces=False`, because a clean-up rewrites text
that a stream has already shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from ..errors import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, StoppingCriteria

    from .contract import RowStep

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how vocabularies with byte fallback spell a byte
# At most this many tokens are decoded again with each new one, but for an open character or run.
_WINDOW = 16
_TAIL = 8  # what is kept of a full window ...
# ... if it decodes to this many: no character has more bytes, and a stripped first space is past
_TAIL_CHARACTERS = 4
# Of each tokenizer the tokens that were seen, and whether it is a byte: asking takes as long as all
# else that a token costs here.
_SEEN: WeakKeyDictionary[object, dict[int, bool]] = WeakKeyDictionary()


class TextStream:
    """Incremental detokeniser: all pieces and `finish`, joined, are `tokenizer.decode` of all.

    A piece is text that no later token can change. Held back are an incomplete character
    (byte-level vocabularies) and an open run of byte tokens (byte fallback: one wrong byte later on
    turns the whole run into replacement characters).
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        added = tokenizer.added_tokens_decoder.items() if skip_special_tokens else ()
        self._special = frozenset(token for token, entry in added if entry.special)
        self._is_byte = _SEEN.setdefault(tokenizer, {})
        self._window: list[int] = []  # the last tokens with text, as many as decoding needs
        self._settled = 0  # how many of them come before an open run of bytes
        self._text = ""  # what those decode to
        self._shown = 0  # how much of that has been returned

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain; may be empty."""
        before = self._settled
        for token in tokens:
            self._take(token)
        if self._settled == before:
            return ""
        self._text = self._decode(self._window[: self._settled])
        # an incomplete character decodes to one broken one
        stable = len(self._text) - self._text.endswith(_BROKEN)
        piece = self._text[self._shown : stable]
        self._shown += len(piece)
        self._shorten()
        return piece

    def held(self) -> str:
        """The text beyond the returned pieces. A later token may still change it."""
        text = self._text if self._settled == len(self._window) else self._decode(self._window)
        return text[self._shown :]

    def finish(self) -> str:
        """The rest of the text, when no token will follow."""
        rest = self.held()
        self._window, self._settled, self._text, self._shown = [], 0, "", 0
        return rest

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(tokens), skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)  # a list only for a batch
        return text

    def _take(self, token: int) -> None:
        """Leave out tokens without text, as decoding does: a run of bytes goes on across them."""
        if token in self._special:
            return
        is_byte = self._is_byte.get(token)
        if is_byte is None:
            name = self._tokenizer.convert_ids_to_tokens(token)
            if not isinstance(name, str):
                return
            is_byte = self._is_byte[token] = bool(_BYTE.fullmatch(name))
        self._window.append(token)
        if not is_byte:
            self._settled = len(self._window)

    def _shorten(self) -> None:
        """Forget all but the last few tokens. How the text goes on depends on these only, so
        positions are counted from its end."""
        if self._settled <= _WINDOW or self._settled < len(self._window):
            return
        text = self._decode(self._window[-_TAIL:])
        if len(text) >= _TAIL_CHARACTERS:
            self._shown = len(text) - (len(self._text) - self._shown)
            self._window = self._window[-_TAIL:]
            self._settled, self._text = len(self._window), text


class StopStrings:
    """Watches one row's decoded output for the first of some strings, across token borders.

    The first is the one that is complete first (of those complete at once, the one that begins
    first), so the result does not depend on how the text was cut into tokens. A stop that is the
    name of a special token also stops at that token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: str | Sequence[str],
        skip_special_tokens: bool = True,
    ) -> None:
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        unchecked: tuple[object, ...] = self.stops
        for stop in unchecked:
            if not isinstance(stop, str) or not stop:
                raise OptionError(
                    f"stop string {stop!r} is empty or no text, so it stops nothing: leave it out."
                )
        self._tokens = frozenset(
            i for i, entry in tokenizer.added_tokens_decoder.items() if entry.content in self.stops
        )
        self._stream = TextStream(tokenizer, skip_special_tokens)
        self._longest = max(map(len, self.stops), default=1)
        self._recent = ""  # the end of the text, as much as may belong to a stop string
        self._found = False

    def push(self, token: int) -> bool:
        """True once the output up to this token contains a stop string."""
        self._recent += self._stream.push([token])
        so_far = self._recent + self._stream.held()
        hit = token in self._tokens or any(stop in so_far for stop in self.stops)
        self._found = self._found or hit
        self._recent = self._recent[max(0, len(self._recent) - self._longest + 1) :]
        return self._found

    def cut(self, text: str) -> str:
        """The text before the first stop string; all of it if there is none."""
        ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        return text[: min(ends)[1]] if ends else text

    def held_back(self, text: str) -> int:
        """How many characters at the end of a text may begin a stop string: not to be shown."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0


class CriteriaCheck:
    """Asks transformers' stopping criteria after every token, with the whole row's ids (1, length).

    `scores` is None, as in `generate` without `output_scores`. Criteria may keep a state: they see
    each token once, in order.
    """

    def __init__(self, criteria: Sequence[StoppingCriteria], prompt: Sequence[int]) -> None:
        self._criteria = tuple(criteria)
        self._length = len(prompt)
        self._ids = torch.zeros(1, len(prompt) + 64, dtype=torch.long)
        self._ids[0, : self._length] = torch.tensor(prompt, dtype=torch.long)

    def push(self, token: int) -> bool:
        """True at the first criterion that says stop."""
        if self._length == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], dim=1)
        self._ids[0, self._length] = token
        self._length += 1
        ids = self._ids[:, : self._length]
        return any(_verdict(criterion, ids) for criterion in self._criteria)


def _verdict(criterion: StoppingCriteria, ids: torch.Tensor) -> bool:
    answer: object = criterion(ids, None)
    if isinstance(answer, torch.Tensor) and answer.numel() != 1:
        name, shape = type(criterion).__name__, tuple(answer.shape)
        raise OptionError(
            f"stopping criterion {name} answered with shape {shape}: it must give one truth value."
        )
    return bool(answer)


class RowText:
    """One row's text as it grows: decoded, cut at stop strings, held back before a possible one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stops: Sequence[str]) -> None:
        if stops and tokenizer is None:
            raise OptionError(
                "stop strings need a tokenizer; pass tokenizer=..., or stop at token ids with eos="
            )
        self._stream = TextStream(tokenizer) if tokenizer else None
        self._stops = StopStrings(tokenizer, stops) if stops and tokenizer else None
        self.text = ""
        self._shown = 0

    @property
    def stop_checks(self) -> list[StopStrings]:
        return [self._stops] if self._stops else []

    def push(self, step: RowStep) -> str:
        """The text that this step makes certain."""
        if self._stream:
            self.text += self._stream.push(step.tokens)
            if step.finish_reason:
                self.text += self._stream.finish()
        if self._stops and step.finish_reason:
            self.text = self._stops.cut(self.text)
        certain = len(self.text)
        if self._stops and not step.finish_reason:
            certain -= self._stops.held_back(self.text)
        piece = self.text[self._shown : certain]
        self._shown = max(self._shown, certain)
        return piece
