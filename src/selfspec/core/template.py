"""A conversation as text, by a tokenizer's chat template. A template is a program of the model's
author: whatever it raises is a reason why this conversation cannot be written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import PromptError, SelfspecError


def written(
    tokenizer: Any,
    messages: Sequence[Any],
    opening: bool,
    what: str = "the conversation",
    error: type[SelfspecError] = PromptError,
    tools: Sequence[Any] | None = None,
) -> str:
    """The text of the messages. `opening`: followed by how an answer begins. `tools`: what the
    template tells the model of functions that it may call."""
    more = {"tools": list(tools)} if tools else {}
    try:
        text = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=opening, tokenize=False, **more
        )
    except Exception as refused:
        reason = " ".join(str(refused).split())[:300] or type(refused).__name__
        raise error(
            f"the model's chat template refuses {what}: {reason}. Change the messages as it says, "
            "or write the prompt yourself (generate)"
        ) from refused
    if not isinstance(text, str):
        raise error(
            f"the model's chat template made {type(text).__name__} of {what} and no text; write "
            "the prompt yourself (generate)"
        )
    return text


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """What a template wrote as token ids: special tokens are in the text already."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
