"""What a text left in a model's own cache, as a value that can go back to any earlier place.

transformers' caches differ: keys and values that can be cropped, windows that forget, recurrent
states that only go on. One that cannot be cropped is copied before it goes on, and tokens that were
kept since are read again, mostly in the same call as new ones. A model without a cache reads the
whole text in every call. How a model is called is found out by trying (floor.py). Does not know
what is read or why.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AGAIN = 8  # so many kept tokens are read again in the call that reads new ones
COPIES = 32  # of the past within one stretch of tokens that are read one by one
_NAMES = ("past_key_values", "cache_params", "state", "mems")
_CROPPED = ("DynamicLayer", "DummyLayer")  # by name: older versions of transformers have no dummies
_UNKNOWN = 1 << 60  # how much a past holds that was interrupted


@dataclass(frozen=True)
class Calling:
    """How a model is called with what it has read before."""

    model: PreTrainedModel
    name: str | None
    """The argument that takes the past. None: it has no cache, and reads whole texts."""
    begin: Callable[[], Any]
    """An empty past. One that is None is made by the model."""
    one_by_one: bool = False
    """Only a whole text, or one more token."""
    headless: bool = False
    """States come out that the model's head makes logits of, not logits: a prompt needs few."""

    @property
    def words(self) -> str:
        """In words, for `selfspec info`."""
        if self.name is None:
            return "it keeps no cache, so every pass reads the whole text"
        if self.one_by_one:
            return "its cache takes one token at a time, so verifying drafts saves nothing"
        past = self.begin()
        if past is not None and type(past) is DynamicCache and _can_be_cropped(past):
            return "its cache is cropped where drafts are rejected"
        return "its cache is copied, and tokens that are kept may be read twice"

    @property
    def called(self) -> nn.Module:
        """What runs: the model, or all of it but its head."""
        inner: nn.Module = self.model.base_model if self.headless else self.model
        return inner

    def __call__(self, past: Any, held: int, tokens: Sequence[int]) -> tuple[Tensor, Any]:
        """Logits or states of tokens that follow `held` others, (tokens, vocab or width), and the
        past with them."""
        called, device, always, placed = self._prepared
        inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens], device=device), **always}
        if self.name is not None:
            inputs[self.name] = past
        if placed and held:
            places = [[*range(held, held + len(tokens))]]
            inputs["position_ids"] = torch.tensor(places, device=device)
        out = called(**inputs)
        x: Tensor = (out.last_hidden_state if self.headless else out.logits)[0]
        if self.name is None:
            return x, None
        now = getattr(out, self.name, None)
        return x, past if now is None else now

    @functools.cached_property
    def _prepared(self) -> tuple[nn.Module, torch.device, dict[str, bool], bool]:
        """What is the same in every call: what runs and where, an argument, and whether positions
        are told."""
        accepted = _accepted(type(self.called).forward)
        always = {"use_cache": self.name is not None} if "use_cache" in accepted else {}
        return self.called, self.model.device, always, "position_ids" in accepted


@functools.cache
def _accepted(forward: Callable[..., Any]) -> frozenset[str]:
    """The arguments that a kind of model takes."""
    return frozenset(inspect.signature(forward).parameters)


def ways(model: PreTrainedModel) -> list[Calling]:
    """The ways in which a model might be called, the best first."""
    accepted = _accepted(type(model).forward)
    name = next((name for name in _NAMES if name in accepted), None)
    found: list[Calling] = []
    if name in ("past_key_values", "cache_params"):
        text = model.config.get_text_config(decoder=True)
        found += [
            Calling(model, name, DynamicCache),
            Calling(model, name, lambda: DynamicCache(config=text)),
        ]
    if name is not None:
        found.append(Calling(model, name, lambda: None))
    found += [Calling(each.model, each.name, each.begin, one_by_one=True) for each in found]
    return [*found, Calling(model, None, lambda: None)]


@dataclass
class Past:
    """One text, and what the model holds of it."""

    calling: Calling
    _text: list[int] = field(default_factory=list)
    _held: int = 0
    _now: Any = None
    _copies: dict[int, Any] = field(default_factory=dict)  # by the length of the text they hold
    again: int = 0
    """Tokens that the last call read once more."""

    def __post_init__(self) -> None:
        if self._now is None:
            self._now = self.calling.begin()

    def read(self, first: int, tokens: Sequence[int]) -> Tensor:
        """What is said of tokens that follow the first ones of the text, whatever did before."""
        assert first <= len(self._text), "a text goes on where it is known"
        cached = self.calling.name is not None
        if cached and first == self._held == len(self._text) and not self._copies:
            self.again = 0
            self._text += tokens
            return self._go_on(len(self._text))
        self._return_to(first)
        self._text[first:] = tokens
        self.again = first - self._held if cached else 0
        if first - self._held > AGAIN and cached:
            self._go_on(first)
        start = first - self._held
        return self._go_on(len(self._text))[start:]

    def _return_to(self, first: int) -> None:
        """Hold the first tokens of the text, or fewer of them."""
        if self.calling.name is None:
            self._held = 0
            return
        if self._held > first and _can_be_cropped(self._now):
            for layer in self._now.layers:  # one by one: an interruption leaves them different
                more = layer.get_seq_length() - first if isinstance(layer, DynamicLayer) else 0
                if more > 0:
                    layer.crop(-more)
            self._held = first
        places = [place for place in self._copies if place <= first]
        if self._held > first:
            self._held = max(places, default=0)
            kept = self._copies.get(self._held)
            self._now = self.calling.begin() if kept is None else _copied(kept)
        # whoever goes back within a call or a round goes back to here or behind it
        oldest = max(places, default=0)
        self._copies = {place: past for place, past in self._copies.items() if place == oldest}

    def _go_on(self, end: int) -> Tensor:
        """Read the text up to there. What is not cropped is copied on the way, but not for a single
        token: a call's first one is never taken back, unless it is interrupted."""
        new = self._text[self._held : end]
        single = self.calling.one_by_one and self._held > 0
        pieces = [[token] for token in new] if single else [new]
        logits = []
        for index, piece in enumerate(pieces):
            held = self._held
            if held and len(new) > 1 and len(pieces) - index <= COPIES:
                self._keep()
            self._held = _UNKNOWN  # if this is interrupted
            out, self._now = self.calling(self._now, held, piece)
            self._held = held + len(piece)
            logits.append(out)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def copy(self) -> Past:
        """Another one that holds the same."""
        held = _copied(self._now), dict(self._copies)
        return Past(self.calling, list(self._text), self._held, *held)

    def _keep(self) -> None:
        """A copy of what is held, unless there is one or none is needed."""
        if self._held not in self._copies and not _can_be_cropped(self._now):
            self._copies[self._held] = _copied(self._now)

    @property
    def bytes(self) -> int:
        """Of keys and values that it holds."""
        layers = getattr(self._now, "layers", ())
        held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        return sum(each.nbytes for each in held if isinstance(each, Tensor))


def _can_be_cropped(past: Any) -> bool:
    layers = getattr(past, "layers", None)
    if layers is None:
        return False
    return all(type(layer).__name__ in _CROPPED for layer in layers)


def _copied(past: Any) -> Any:
    """A copy that stays as it is. Keys and values of attention are replaced when more come, never
    written to, so that both may share them."""
    shared = [
        tensor
        for layer in getattr(past, "layers", ())
        if isinstance(layer, DynamicLayer)
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if isinstance(tensor, Tensor)
    ]
    return copy.deepcopy(past, {id(tensor): tensor for tensor in shared})
