"""From logits to a token: the only place with temperature, penalties and the filters.

One pipeline makes every distribution: the draft's, the target's, the residual's and the bonus
token's. Its order is that of transformers' `generate`: logit bias, repetition, presence and
frequency penalties, ends that come too early, the user's logits processors, the grammar, then
(when sampling) temperature, top-k, top-p, min-p. Rows are processed one by one, so a row's bits do
not depend on its neighbours. Knows no models, caches or tokenizers, nor which of its tokens will be
kept.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ModelError, OptionError, SelfspecError, nearest
from .coupling import earliest, quickly
from .door import shown
from .filters import counted, min_p, top_k, top_p
from .grammar import Allowed
from .randomness import PLAIN, key

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LogitsProcessor

_SEEDS = 1 << 63  # seeds fit into a signed 64-bit integer of any file format
_LARGEST = 1e6  # of what logits are multiplied or divided by, and
_LARGEST_BIAS = 1e30  # of what is added: beyond these they overflow
_MIN_TEMPERATURE = 1e-5  # below it, dividing the logits would overflow before it changed anything


@dataclass(frozen=True)
class SamplingParams:
    """How one row's tokens are chosen. The defaults are greedy decoding with nothing changed."""

    temperature: float = 0.0
    """How varied the text is: logits are divided by it before sampling. 0 is greedy decoding, which
    always takes the likeliest token."""
    top_k: int = 0
    """Sample only from this many of the likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample only from the likeliest tokens that together have this probability; 1 is off."""
    min_p: float = 0.0
    """Drop tokens whose probability is below this share of the likeliest one's; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that are already in the prompt or
    the output: above 1 they become rarer, 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that is already in the output (the prompt does
    not count); 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is already in the output (the prompt does
    not count); 0 is off."""
    min_new_tokens: int = 0
    """Before so many new tokens none can end the text, though stop strings can; 0 is off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of these token ids before anything else."""
    seed: int | None = None
    """Seed of the sampling: the same seed draws the same tokens again. Without one each generation
    draws its own and reports it."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_seed(self.seed)
        # our own copy: a frozen value stays what it was
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.greedy:
            _check_greedy(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """From named values such as those of a request body."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise OptionError(f"unknown sampling option {name!r}: {nearest(name, known)}")
        values = dict(options)
        if isinstance(bias := values.get("logit_bias"), Mapping):  # JSON has strings as keys
            values["logit_bias"] = {
                int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in bias.items()
            }
        return cls(**values)


# option: lowest and highest value, whether the lowest itself is allowed, how to switch it off
_RANGES: dict[str, tuple[float, float, bool, str]] = {
    "temperature": (0.0, _LARGEST, True, "0 is greedy decoding, 1 changes nothing"),
    "top_k": (0, math.inf, True, "0 switches it off"),
    "top_p": (0.0, 1.0, False, "1 switches it off"),
    "min_p": (0.0, 1.0, True, "0 switches it off"),
    "repetition_penalty": (1 / _LARGEST, _LARGEST, True, "1 switches it off"),
    "presence_penalty": (-2.0, 2.0, True, "0 switches it off"),
    "frequency_penalty": (-2.0, 2.0, True, "0 switches it off"),
    "min_new_tokens": (0, math.inf, True, "0 switches it off"),
}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_numbers(params: SamplingParams) -> None:
    values = vars(params)
    for name, (low, high, closed, remedy) in _RANGES.items():
        value = values[name]
        if not _is_number(value):
            raise OptionError(f"{name}={shown(value)} is not a finite number: give one ({remedy}).")
        if not (low < value <= high or (closed and value == low)):
            limits = f"{'at least' if closed else 'above'} {low:g}"
            limits += f" and at most {high:g}" if math.isfinite(high) else ""
            raise OptionError(
                f"{name}={shown(value)} is out of range: it must be {limits} ({remedy})."
            )
    for name in ("top_k", "min_new_tokens"):
        if not _is_integer(values[name]):
            raise OptionError(
                f"{name}={values[name]!r} is not a whole number: it counts tokens (0 switches it "
                "off)."
            )
    if 0 < params.temperature < _MIN_TEMPERATURE:
        reason = f"is below {_MIN_TEMPERATURE:g}, where the divided logits overflow"
        raise OptionError(
            f"temperature={params.temperature!r} {reason}: use temperature=0 for greedy decoding."
        )


def _check_seed(seed: object) -> None:
    if seed is None or (isinstance(seed, int) and _is_integer(seed) and 0 <= seed < _SEEDS):
        return
    raise OptionError(
        f"seed={shown(seed)} is not a whole number from 0 to 2**63 - 1: give one, or None to draw "
        "one."
    )


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise OptionError(
            f"logit_bias={shown(bias)} is not a mapping: give it as {{token id: number to add}}."
        )
    for token, value in bias.items():
        if not _is_integer(token) or token < 0:
            raise OptionError(
                f"logit_bias has the key {shown(token)}, no token id: use whole numbers from 0 up."
            )
        if not _is_number(value) or abs(value) > _LARGEST_BIAS:
            raise OptionError(
                f"logit_bias[{token}]={shown(value)} is not a number that a logit can hold: -1000 "
                "bans a token."
            )
    return dict(bias)


def _check_greedy(params: SamplingParams) -> None:
    """Greedy decoding would ignore these silently. Whoever set them expects sampling."""
    defaults = {f.name: f.default for f in fields(params)}
    ignored = [
        name for name in ("top_k", "top_p", "min_p", "seed") if vars(params)[name] != defaults[name]
    ]
    if ignored:
        shown = ", ".join(f"{name}={vars(params)[name]!r}" for name in ignored)
        remedy = f"set a temperature above 0 to sample, or leave out {', '.join(ignored)}"
        raise OptionError(f"temperature=0 is greedy decoding, which ignores {shown}: {remedy}.")


class Sampler:
    """Chooses the tokens of one row. It never changes, so it may be asked about any position.

    `seed` wins over `params.seed`. With neither, one is drawn from the operating system.
    `prompt_length` says where the output begins, for what looks at the output only, the grammar
    too, and `ends` which tokens `min_new_tokens` keeps away.
    Processors must be functions of what they are given: they also see drafts that are rejected
    later, and may see a position twice.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int | None = None,
        processors: Sequence[LogitsProcessor] = (),
        prompt_length: int = 0,
        ends: Iterable[int] = (),
        grammar: Allowed | None = None,
    ) -> None:
        _check_seed(seed)
        chosen = params.seed if seed is None else seed
        self.params = params
        self.seed: int = secrets.randbelow(_SEEDS) if chosen is None else chosen
        self.processors = tuple(processors)
        self.prompt_length = prompt_length
        self.grammar = grammar
        self._bias_tokens = torch.tensor([*params.logit_bias], dtype=torch.long)
        self._bias_values = torch.tensor([*params.logit_bias.values()], dtype=torch.float32)
        penalties = (
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        self._ends = torch.tensor(sorted(ends) if params.min_new_tokens else [], dtype=torch.long)
        ends_wait = bool(len(self._ends))
        self._edits = bool(
            penalties or params.logit_bias or self.processors or grammar or ends_wait
        )

    @property
    def plain(self) -> bool:
        """True if a token is the argmax of the model's logits, of many rows at once if wanted."""
        return self.params.greedy and not self._edits

    def process(self, logits: Tensor, contexts: Sequence[Sequence[int]]) -> Tensor:
        """Processed logits in float32; -inf where a token was filtered out.

        Row i of `logits` (n, vocab) predicts the token after contexts[i], the full ids with prompt
        and drafts. The input is never modified, but returned where nothing is to be done.
        """
        if self.plain:
            return logits.float()
        rows = []
        for row, context in zip(logits, self._needed(contexts), strict=False):
            indices, values = self._kept(row, context)
            if indices is not None:
                nothing = torch.full_like(row, -math.inf, dtype=torch.float32)
                values = nothing.scatter_(0, indices, values)
            rows.append(values)
        return torch.stack(rows) if rows else logits.float()

    def probabilities(self, logits: Tensor, contexts: Sequence[Sequence[int]]) -> Tensor:
        """The distribution of each token, (n, vocab) float32: a point mass when greedy."""
        result = torch.zeros_like(logits, dtype=torch.float32)
        for out, row, context in zip(result, logits, self._needed(contexts), strict=False):
            indices, probabilities = self._distribution(row, context)
            out.copy_(probabilities) if indices is None else out.scatter_(0, indices, probabilities)
        return result

    def choose(
        self, logits: Tensor, contexts: Sequence[Sequence[int]], positions: Sequence[int]
    ) -> Tensor:
        """The token of each row, (n,) long, which will stand at positions[i] (prompt included)."""
        if self.plain:
            return logits.argmax(-1)
        tokens = []
        for row, context, position in zip(logits, self._needed(contexts), positions, strict=False):
            tokens += self.first(row, context, key(self.seed, position, PLAIN))
        return torch.tensor(tokens, dtype=torch.long, device=logits.device)

    def first(self, row: Tensor, context: Sequence[int], times: int, count: int = 1) -> list[int]:
        """The likeliest token, or the `count` that arrive first by the times of this key."""
        indices, values = self._kept(row, context)
        if not self.params.greedy and (found := quickly(values, indices, times, count)):
            return found
        if not values.amax().isfinite():
            raise self._nothing_left(row)
        if self.params.greedy:
            return [int(values.argmax())]
        place = earliest(values, indices, times, count)
        return place if indices is None else indices[place].tolist()

    def _needed(self, contexts: Sequence[Sequence[int]]) -> Iterable[Sequence[int]]:
        """The contexts, or nothing where no penalty reads them: making them may cost time."""
        return contexts if self._edits else repeat(())

    def _distribution(self, row: Tensor, context: Sequence[int]) -> tuple[Tensor | None, Tensor]:
        """One row's token ids, ascending (None: all of them), and their probabilities."""
        indices, values = self._kept(row, context)
        if self.params.greedy:
            indices = values.argmax(-1, keepdim=True)
            values = values[indices]
        probabilities = values.softmax(-1)
        if probabilities[0].isnan():  # one NaN or +inf, or -inf alone, makes all of them NaN
            raise self._nothing_left(row)
        return indices, probabilities

    def _kept(self, row: Tensor, context: Sequence[int]) -> tuple[Tensor | None, Tensor]:
        """What the filters keep of a row: token ids, ascending (None: all), and their logits."""
        params = self.params
        values = self._edited(row, context) if self._edits else row.float()
        if params.greedy:
            return None, values
        indices: Tensor | None = None
        if params.top_k:
            indices, values = top_k(values, params.top_k, params.temperature)
        elif params.temperature != 1:
            values = values / params.temperature
        for option, off, narrow in ((params.top_p, 1.0, top_p), (params.min_p, 0.0, min_p)):
            kept = narrow(values, option) if option != off else None
            if kept is not None:
                indices, values = kept if indices is None else indices[kept], values[kept]
        return indices, values

    def _edited(self, row: Tensor, context: Sequence[int]) -> Tensor:
        """Bias, penalties and processors, on a copy: a processor may write into its input."""
        params = self.params
        scores = row.to(torch.float32, copy=True)
        if params.logit_bias:
            self._add_bias(scores)
        ids = torch.tensor(context, dtype=torch.long, device=row.device)
        if params.repetition_penalty != 1:
            seen, _ = counted(ids, len(scores))
            score, penalty = scores[seen], params.repetition_penalty
            scores[seen] = torch.where(score < 0, score * penalty, score / penalty)
        if params.presence_penalty or params.frequency_penalty:
            seen, counts = counted(ids[self.prompt_length :], len(scores))
            scores[seen] -= params.presence_penalty
            scores[seen] -= params.frequency_penalty * counts
        allowed = self.grammar.after(context[self.prompt_length :]) if self.grammar else None
        early = len(ids) - self.prompt_length < params.min_new_tokens
        if early and (allowed is None or allowed.sum() > allowed[self._ends].sum()):
            scores[self._ends.to(scores.device)] = -math.inf  # unless a grammar ends here
        for processor in self.processors:
            scores = _processed(processor, ids, scores)
        if allowed is not None:
            scores.masked_fill_(~allowed.to(scores.device), -math.inf)
        return scores

    def _add_bias(self, scores: Tensor) -> None:
        highest, last = int(self._bias_tokens.max()), len(scores) - 1
        if highest > last:
            raise OptionError(
                f"logit_bias names token {highest}, but the vocabulary ends at {last}: drop it."
            )
        scores[self._bias_tokens.to(scores.device)] += self._bias_values.to(scores.device)

    def _nothing_left(self, row: Tensor) -> SelfspecError:
        if row.isnan().any() or not row.amax().isfinite():
            return not_finite()
        kinds = [type(p).__name__ for p in self.processors] + ["the grammar"] * bool(self.grammar)
        names = ", ".join(kinds) or "logit_bias"
        return OptionError(
            f"no token is left to choose from after {names}: let one token keep a finite score."
        )


def not_finite() -> ModelError:
    """The error of a model whose logits hold NaN or are infinite."""
    reason = "its weights are broken or its dtype is too narrow; try dtype='float32'"
    return ModelError(f"the model's logits are not finite, so no token can be chosen: {reason}.")


def _processed(processor: LogitsProcessor, ids: Tensor, scores: Tensor) -> Tensor:
    result: Tensor = processor(ids[None], scores[None])
    if result.shape != (1, len(scores)):
        raise OptionError(
            f"logits processor {type(processor).__name__} made scores of shape "
            f"{tuple(result.shape)} out of (1, {len(scores)}): it must keep the shape."
        )
    return result[0].float()


def row_samplers(
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    prompts: Sequence[Sequence[int]],
    processors: Sequence[LogitsProcessor] = (),
    ends: Iterable[int] = (),
    grammars: Sequence[Allowed | None] | None = None,
) -> list[Sampler]:
    """A sampler for each prompt. One SamplingParams serves all rows, row i with seed + i, so that
    the row alone with that seed gives the same tokens. None is greedy decoding. `grammars`: one for
    each, or None."""
    if sampling is None or isinstance(sampling, SamplingParams):
        params = sampling or SamplingParams()
        first = secrets.randbelow(_SEEDS) if params.seed is None else params.seed
        seeded: list[tuple[SamplingParams, int | None]] = [
            (params, (first + i) % _SEEDS) for i in range(len(prompts))
        ]
    else:
        if not isinstance(sampling, Sequence):
            raise OptionError(
                f"sampling={shown(sampling)} is neither SamplingParams nor a list of them; use "
                "SamplingParams(...), or None for greedy decoding"
            )
        if len(sampling) != len(prompts):
            counts = f"sampling has {len(sampling)} entries for {len(prompts)} prompts"
            raise OptionError(f"{counts}; give one for all, one for each, or None for greedy")
        for params in sampling:
            if not isinstance(params, SamplingParams):
                raise OptionError(
                    f"sampling holds {shown(params)}, which is no SamplingParams: use "
                    "SamplingParams.from_options(...)."
                )
        seeded = [(params, None) for params in sampling]
    return [
        Sampler(params, seed, processors, len(prompt), ends, grammar)
        for (params, seed), prompt, grammar in zip(
            seeded, prompts, grammars or [None] * len(prompts), strict=True
        )
    ]
