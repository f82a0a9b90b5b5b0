"""Our guesses from the text and from trained successors, as a proposer of vLLM.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 5,
        "model": "selfspec.integrations.vllm_proposer.TextProposer"}'

What followed the longest earlier match of the text's end is drafted, as `ngram` does here. Where
nothing matches, a table of successors goes on, if one is named. vLLM verifies: no guess can change
its text. Options stand in its `additional_config`, under "selfspec". vLLM shows a proposer the
texts and nothing else, so what the model found likely is not learned from, as `recycle` does. Needs
no package of vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from ..core.contract import Budget
from ..core.options import with_options
from ..draft.from_text.ngram import LookingUp, NGram
from ..errors import OptionError
from ..trained.files import load_part, part_folder
from ..trained.successors import SUCCESSORS, Successors

OPTIONS = "selfspec"  # their name in vLLM's additional_config
_SIZES = {"layers": "num_hidden_layers", "width": "hidden_size", "vocabulary": "vocab_size"}


@dataclass(frozen=True)
class ProposerOptions:
    """What can be said about the guesses."""

    longest: int = 4
    """Most tokens to compare at the text's end."""
    shortest: int = 2
    """Fewest tokens that count as a match."""
    part: str | None = None
    """Folder or shipped name of trained successors, for where nothing matches. None: no guess."""
    least: float = 0.1
    """Successors end where the chance of all of them together falls below this."""


class TextProposer:
    """What vLLM makes one of, and asks after every step."""

    def __init__(self, vllm_config: Any) -> None:
        said = dict(vllm_config.additional_config or {}).get(OPTIONS, {})
        self._options = with_options(ProposerOptions, said, f"additional_config.{OPTIONS}")
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._longest_text: int = vllm_config.model_config.max_model_len
        options = self._options
        self._lookup = LookingUp(NGram(options.longest, options.shortest, branches=1))
        self._successors = _successors(options.part, vllm_config.model_config.hf_text_config)
        self._texts: dict[int, Any] = {}  # as they were last seen, by vLLM's row

    def load_model(self, *_: object, **__: object) -> None:
        """vLLM calls this. There is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """For each row the guesses after its text. Rows to which nothing came are still reading
        their prompts, and have none."""
        return [
            self._after(row, token_ids_cpu[row, : int(num_tokens_no_spec[row])]) if came else []
            for row, came in enumerate(sampled_token_ids)
        ]

    def _after(self, row: int, ids: Any) -> list[int]:
        """`ids`: the row's text, (n,)."""
        before = self._texts.get(row)
        if before is not None and not np.array_equal(before, ids[: len(before)]):
            self._lookup.drop(row)  # another request stands in this row now
        self._texts[row] = ids.copy()
        most = min(self._most, self._longest_text - len(ids))
        if most < 1:
            return []
        text: list[int] = ids.tolist()
        (draft,) = self._lookup.propose([row], [text], Budget([most]))
        return list(draft.guesses) or list(self._likely(text, most))

    def _likely(self, text: Sequence[int], most: int) -> Iterator[int]:
        """The likeliest path through the successors."""
        last, chance = tuple(text[-2:]), 1.0
        for _ in range(most if self._successors else 0):
            assert self._successors is not None
            known = self._successors.after(last) or self._successors.after(last[-1:])
            token, share = max(known, key=itemgetter(1), default=(0, 0.0))
            chance *= share
            if not share or chance < self._options.least:
                return
            yield token
            last = (last[-1], token)


def _successors(part: str | None, config: Any) -> Successors | None:
    """Those of a part for a model of these sizes. Whether it was trained on this very model is not
    looked at: with another one its guesses would be useless, and the text the same."""
    if part is None:
        return None
    found = load_part(part_folder(part))
    if found.kind != SUCCESSORS:
        raise OptionError(f"{part} is a part of kind {found.kind!r}; name one of {SUCCESSORS!r}")
    for ours, theirs in _SIZES.items():
        if found.base[ours] != getattr(config, theirs):
            raise OptionError(
                f"{part} was trained on another model: its {ours} was {found.base[ours]}, this "
                f"one's is {getattr(config, theirs)}; name a part of this model"
            )
    return Successors(found)
