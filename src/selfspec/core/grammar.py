"""What a text may be: any JSON object, a JSON schema, a regular expression or a Lark grammar.

`Grammar` is what users say, a plain value. `Grammars` reads it for one tokenizer, with llguidance.
`Allowed` tells a sampler which tokens may follow what a row has written so far. That is a function
of these tokens: what it remembers saves time and is never needed, so a draft, a branch of a tree or
a round that was interrupted leaves nothing to take back. Knows no models and no drafts.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import OptionError, Unavailable
from .door import shown

_REMEMBERED = 64  # masks of a row: more than a round asks for
_COMPILED = 64  # grammars of a tokenizer
_END = "<|the end of the grammar|>"  # a token of llguidance's alone: ends of texts are ours
_KINDS = {"schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


@dataclass(frozen=True)
class Grammar:
    """What a text may be. Made by `json`, `json_schema`, `regex` or `lark`."""

    kind: Literal["schema", "regex", "lark"]
    text: str

    @classmethod
    def json(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Grammar:
        """JSON that fits a schema. White space between its parts is free, unless the schema says
        `"x-guidance": {"whitespace_flexible": False}`."""
        try:
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(
                f"the JSON schema {shown(schema)} is no JSON ({error}); give a dict as json.load "
                "makes it"
            ) from error
        return cls("schema", text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches whole. Syntax: Rust's, without look-around."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text of a context-free grammar, in llguidance's variant of Lark's syntax."""
        return cls("lark", text)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise OptionError(f"the {self.words} {shown(self.text)} is no text; give a string")

    @property
    def words(self) -> str:
        """What it is, for an error."""
        return _KINDS[self.kind]


Asked = Grammar | Mapping[str, Any] | Sequence[Grammar | Mapping[str, Any] | None] | None


def grammars(value: Any, rows: int) -> list[Grammar | None]:
    """What users pass for some rows: one for all of them, or a list with one for each. A dict is a
    JSON schema."""
    if isinstance(value, list | tuple):
        if len(value) != rows:
            counts = f"{len(value)} grammars for {rows} prompts"
            raise OptionError(f"{counts}: give one for all of them, or one for each.")
        return [_grammar(each) for each in value]
    return [_grammar(value)] * rows


def _grammar(value: Any) -> Grammar | None:
    if value is None or isinstance(value, Grammar):
        return value
    if isinstance(value, Mapping):
        return Grammar.json_schema(value)
    raise OptionError(
        f"grammar={shown(value)} is no grammar; use a dict (a JSON schema), Grammar.json(), "
        "Grammar.regex(...), Grammar.lark(...), or None"
    )


class Grammars:
    """Reads grammars for the tokens of a tokenizer, which is read when it is first needed."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._start = lru_cache(_COMPILED)(self._compile)

    def allowed(self, grammar: Grammar | None, ends: frozenset[int]) -> Allowed | None:
        """What a grammar allows one row to write. `ends`: tokens that end its text."""
        if grammar is None:
            return None
        if not ends:
            raise OptionError(
                "a grammar needs a token that ends the text, and there is none: eos is empty, or "
                "the model names none; give eos=[...] its id"
            )
        start = self._start(grammar)
        return Allowed(start, ends, self._vocabulary, self._words.eos_token)

    @cached_property
    def _library(self) -> Any:
        try:
            return importlib.import_module("llguidance")
        except ImportError as error:
            raise Unavailable(
                "grammars are read with `llguidance`, which is not installed: "
                "pip install 'selfspec[grammar]'"
            ) from error

    @cached_property
    def _words(self) -> Any:
        """The tokenizer as llguidance has it."""
        library, name = self._library, type(self._tokenizer).__name__
        if self._tokenizer is None:
            raise Unavailable(
                "the model was loaded without a tokenizer, so a grammar cannot know what its "
                "tokens say; pass tokenizer=..."
            )
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not hasattr(backend, "to_str"):
            raise Unavailable(
                f"the tokenizer {name} has no tokenizer.json, from which llguidance reads tokens; "
                "load a fast tokenizer for this model, or leave the grammar out"
            )
        text, end = _with_end(backend)
        try:
            return library.LLTokenizer(text, eos_token=end)
        except Exception as error:
            raise Unavailable(
                f"llguidance cannot read the tokenizer {name} ({error}), so no grammar works with "
                "this model; leave the grammar out"
            ) from error

    def _compile(self, grammar: Grammar) -> Any:
        """llguidance's matcher at the beginning of a text."""
        words, matcher = self._words, self._library.LLMatcher
        make = {
            "schema": matcher.grammar_from_json_schema,
            "regex": matcher.grammar_from_regex,
            "lark": matcher.grammar_from_lark,
        }[grammar.kind]
        wrong, messages = False, list[str]()
        try:
            source = make(grammar.text)
            wrong, messages = matcher.validate_grammar_with_warnings(source, words)
        except ValueError as error:
            wrong, messages = True, [str(error)]
        if wrong:
            raise _unfit(grammar, " ".join(" ".join(messages).split()))
        start = matcher(words, source, log_level=0)
        if start.is_error():
            raise _unfit(grammar, start.get_error())
        if not start.is_accepting() and not _bits(start)[: words.eos_token].any():
            raise _unfit(grammar, "no text fits it")
        return start


def _unfit(grammar: Grammar, reason: str) -> OptionError:
    return OptionError(
        f"the {grammar.words} {shown(grammar.text)} cannot be used: {reason[:500]}. Correct it, or "
        "leave it out"
    )


def _with_end(backend: Any) -> tuple[str, int]:
    """A tokenizer's JSON with one more token, and that token's id. Where a grammar ends it asks for
    that one, which no text can hold. Which of the model's own tokens end a text is a row's affair.
    """
    rules = json.loads(backend.to_str())
    rules["truncation"] = rules["padding"] = None
    end = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    rules["added_tokens"].append({"id": end, "content": _END, "special": True, **flags})
    return json.dumps(rules), end


class Allowed:
    """Which tokens may follow what a row has written. `words`: so many have text; behind them, the
    head may have rows that stand for nothing."""

    def __init__(self, start: Any, ends: frozenset[int], vocabulary: int, words: int) -> None:
        self._start, self._vocabulary, self._words = start, vocabulary, min(words, vocabulary)
        self._ends = frozenset(token for token in ends if token < vocabulary)
        self._state: _State | None = None

    def after(self, written: Sequence[int]) -> Tensor:
        """True for each token that may come next, (vocabulary,) on the CPU. After what the grammar
        does not have, only the text's end."""
        state = self._taken()
        mask = state.mask(list(written), self._vocabulary, self._words, self._ends)
        self._state = state
        return mask

    def follows(self, written: Sequence[int], token: int) -> bool:
        """Whether one token may come next. Cheaper than all of them."""
        state = self._taken()
        fits = state.reach(list(written)) and (
            state.matcher.is_accepting() if token in self._ends else _fits(state.matcher, token)
        )
        self._state = state
        return bool(fits)

    def _taken(self) -> _State:
        """What is remembered. It is put back after use, so an interruption leaves nothing."""
        state, self._state = self._state, None
        return state or _State(self._start.deep_copy())


class _State:
    """A matcher, the tokens that it has been given, and masks by how many of these they follow."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self._written: list[int] = []
        self._masks: dict[int, Tensor] = {}

    def mask(self, written: list[int], vocabulary: int, words: int, ends: frozenset[int]) -> Tensor:
        place = len(written)
        if self._written[:place] != written or place not in self._masks:
            fits = self.reach(written)
            mask = torch.zeros(vocabulary, dtype=torch.bool)
            if fits:
                mask[:words] = torch.from_numpy(_bits(self.matcher)[:words])
            mask[list(ends)] = not fits or self.matcher.is_accepting()
            self._check()
            if not fits:
                return mask
            self._masks[place] = mask
            self._masks.pop(place - _REMEMBERED, None)
        return self._masks[place]

    def reach(self, written: list[int]) -> bool:
        """Bring the matcher to a text. False: the grammar does not have it."""
        shared = _shared(self._written, written)
        if back := len(self._written) - shared:
            self.matcher.rollback(back)
            del self._written[shared:]
            for place in [place for place in self._masks if place > shared]:
                del self._masks[place]
        new = written[shared:]
        taken = self.matcher.try_consume_tokens(new) if new else 0
        self._written += new[:taken]
        self._check()
        return taken == len(new)

    def _check(self) -> None:
        if self.matcher.is_error():
            reason = " ".join(self.matcher.get_error().split())[:300]
            raise OptionError(
                f"the grammar cannot be followed any further: {reason}. Make it simpler"
            )


def _shared(a: list[int], b: list[int]) -> int:
    """How many tokens two texts share at their beginning. Mostly one goes on where the other
    ends."""
    least = min(len(a), len(b))
    if a[:least] == b[:least]:
        return least
    return next(index for index in range(least) if a[index] != b[index])


def _fits(matcher: Any, token: int) -> bool:
    """What the mask says of one token. Where a grammar leaves no choice of text, llguidance's mask
    has only the token that the tokenizer itself would write next."""
    forced = matcher.compute_ff_tokens()
    return bool(token == forced[0] if forced else matcher.validate_tokens([token]) == 1)


def _bits(matcher: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little").astype(np.bool_)
