"""Text that the model writes itself, for a probe: to prompts of a file, or to built-in ones."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence

from ..errors import OptionError
from ..llm import LLM
from .probe import Text

BUILT_IN = (
    "Explain in a few sentences why the sky is blue and why sunsets are red.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Tell a short story about a lighthouse keeper who finds a letter.",
    "Repeat this list twice, exactly as it is: apples 3 kg, pears 2 kg, flour 1 kg, eggs 6.",
    "A train leaves at 9:40 and arrives at 12:25. How long is the journey? Think step by step.",
    "List ten animals that live in the sea, one a line.",
    "Summarise in two sentences: The committee met on Monday to discuss the new bridge. Its "
    "engineers warned that the old one will be closed in spring, and shop owners asked for a "
    "temporary crossing, which the mayor promised to look into before the end of the month.",
    "Write a polite letter that asks a landlord to repair a heating.",
    "What causes the tides, and why are there two of them a day?",
    "Rewrite this in the past tense, then in the future: The cook opens the kitchen at six.",
    "Write a shell command that counts the lines of all Python files in a folder, and explain it.",
    "Compare tea and coffee in a table with three rows.",
)
READ, ASKED = 12, 8
"""How many questions are read at most, and how many timed: what was tuned on is not what is timed.
More would take time and say little more."""


def chosen(asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of somebody's questions, those to read and those to time, in an order that mixes what stands
    together in a file; without any, the built-in ones."""
    if not asked:
        return list(BUILT_IN[:-ASKED]), list(BUILT_IN[-ASKED:])
    some = random.Random(0).sample(asked, min(len(asked), READ + ASKED))
    cut = max(1, min(ASKED, len(some) // 2))
    return some[:-cut] or some, some[-cut:]


def digest_of_question(text: str) -> str:
    """The same for the same question."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def prompts_of(llm: LLM, asked: Sequence[str]) -> list[list[int]]:
    """Questions as ids, through the chat template where there is one."""
    words = llm.words
    if words is None:
        raise OptionError(
            f"{llm.info.name} has no tokenizer to read prompts with; add its files to the folder"
        )
    if words.chat_template:
        return [llm.encode_chat([{"role": "user", "content": text}]) for text in asked]
    return [llm.encode(text) for text in asked]


def own_texts(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> list[Text]:
    """The model's own greedy continuations, so many tokens each."""
    room = llm.info.context - tokens
    fitting = [list(ids[-room:]) for ids in prompts]
    results = llm.generate(fitting, max_new_tokens=tokens, draft=None, eos=[])
    return [
        Text([*ids, *result.tokens], len(ids)) for ids, result in zip(fitting, results, strict=True)
    ]


def digest_of(texts: Sequence[Text]) -> str:
    """The same for the same ids."""
    return hashlib.sha256(json.dumps([list(text.ids) for text in texts]).encode()).hexdigest()[:16]
