"""Questions as ids, and prompts of exact lengths for timing: ordinary English (`prompt.txt`), so
that a model answers it as it would answer a user.

Does not know models; it is given a function that turns text into ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT = Path(__file__).with_name("prompt.txt").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Prompt:
    """A question as ids."""

    task: str
    id: str
    ids: Sequence[int]


def prompt_ids(tokenize: Callable[[str], Sequence[int]], length: int) -> list[int]:
    """The first `length` ids of the text, which starts over as often as is needed."""
    once = list(tokenize(TEXT))
    assert once, "the tokenizer made nothing of the text"
    return (once * (length // len(once) + 1))[:length]
