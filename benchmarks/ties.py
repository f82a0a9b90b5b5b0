"""Half precision and GPUs, where drafts may turn a near-tie: how often do texts part, and were the
two tokens nearly tied there?

The same prompts are continued by plain decoding, one by one, and by each way of drafting. Where a
text first differs the model reads the common text once more, and the gap between the logits of the
two tokens is taken. Within a few roundings of the dtype it is a near-tie; beyond that it is a bug,
and `Ties.wrong` lists it. After a first difference texts go on from different words and are not
compared any further. Does not know how a draft is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from selfspec.bench.suite import first_difference
from selfspec.llm import LLM

# How far apart two logits may be and still change places, as a share of the largest: a few
# roundings of the dtype's 8, 11 or 24
# bits that a pass adds up.
NEAR = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-5}
Ways = Mapping[str, Mapping[str, Any]]  # a name -> options of `LLM.generate`


@dataclass(frozen=True)
class Parting:
    """Where a text first differs from plain decoding's."""

    prompt: int
    at: int  # the index of the new token
    plain: int
    other: int
    gap: float  # between the logits of these two tokens
    share: float  # of the largest logit there


@dataclass
class Ties:
    """One way of decoding next to plain decoding."""

    name: str
    near: float
    texts: int = 0
    tokens: int = 0  # compared, that is up to a first difference
    partings: list[Parting] = field(default_factory=list)

    @property
    def match_rate(self) -> float:
        """The share of texts that are those of plain decoding to the end."""
        return 1 - len(self.partings) / self.texts if self.texts else 1.0

    @property
    def wrong(self) -> list[Parting]:
        """First differences that are no near-ties."""
        return [
            each for each in self.partings if not each.share <= self.near
        ]  # a NaN is no near-tie

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        return {**asdict(self), "match_rate": self.match_rate, "wrong": len(self.wrong)}


def find_ties(
    llm: LLM,
    prompts: Sequence[list[int]],
    new_tokens: int,
    ways: Ways,
    rows: int = 4,
    tick: Callable[[str], None] | None = None,
) -> list[Ties]:
    """Compare each way with plain decoding, alone and `rows` texts at a time; so also plain
    decoding in a batch."""
    expected = [
        _continued(llm, [prompt], new_tokens, {"draft": None}, tick)[0] for prompt in prompts
    ]
    found = []
    for name, options in {"plain": {"draft": None}, **ways}.items():
        for size in (1, rows):
            if size == 1 and name == "plain":
                continue
            ties = Ties(f"{name}, {size} at a time" if size > 1 else name, NEAR[llm.model.dtype])
            for first in range(0, len(prompts), size):
                texts = _continued(llm, prompts[first : first + size], new_tokens, options, tick)
                for index, tokens in enumerate(texts, start=first):
                    _compare(llm, ties, index, prompts[index], expected[index], tokens)
            found.append(ties)
    return found


def _continued(
    llm: LLM,
    prompts: Sequence[list[int]],
    new_tokens: int,
    options: Mapping[str, Any],
    tick: Callable[[str], None] | None,
) -> list[list[int]]:
    results = llm.generate(list(prompts), max_new_tokens=new_tokens, eos=[], **options)
    if tick is not None:
        tick("")
    return [result.tokens for result in results]


def _compare(
    llm: LLM, ties: Ties, index: int, prompt: list[int], plain: Sequence[int], other: Sequence[int]
) -> None:
    at = first_difference(other, plain)
    ties.texts += 1
    ties.tokens += len(plain) if at is None else at + 1
    if at is not None:
        text = [*prompt, *plain[:at]]
        with torch.inference_mode():
            logits = llm.model.prefill([text], llm.model.new_cache(1, len(text)))[0].float()
        gap = float((logits[plain[at]] - logits[other[at]]).abs())
        ties.partings.append(
            Parting(index, at, plain[at], other[at], gap, gap / float(logits.abs().max()))
        )


def sentence(ties: Ties) -> str:
    """One way's result for a person."""
    same = ties.texts - len(ties.partings)
    words = f"{ties.name}: {same} of {ties.texts} texts are plain decoding's"
    words += f" ({ties.tokens} tokens compared)"
    if ties.partings:
        widest = sorted(each.share for each in ties.partings)[-5:]
        shares = ", ".join(f"{share:.2%}" for share in widest)
        words += f"; first differences between tokens whose logits are {shares} of the largest"
        words += " apart"
    if ties.wrong:
        words += f"; {len(ties.wrong)} of them NO near-tie (limit {ties.near:.2%}): a bug, please"
        words += " report it"
    return words
