"""How the pieces of a stream are written: as plain text, or with drafts in colour."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from . import common

if TYPE_CHECKING:
    from ..llm import LLM
    from ..results import Piece

Writer = Callable[["Piece"], None]


def writer(llm: LLM, drafts: bool) -> Writer:
    """What to do with each piece."""
    if not drafts:
        return lambda piece: common.write(piece.text)
    console = Console(highlight=False, soft_wrap=True)
    return lambda piece: console.print(coloured(piece, llm.words), end="")


def coloured(piece: Piece, tokenizer: Any) -> Text:
    """Accepted drafts green, rejected ones red and struck through, the model's own tokens plain.

    Each kind is decoded alone, so a character of tokens of two kinds shows as replacement marks.
    """

    def text_of(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    kept, own = piece.tokens[: piece.accepted], piece.tokens[piece.accepted :]
    return Text.assemble(
        (text_of(kept), "green"), (text_of(piece.rejected), "red strike"), text_of(own)
    )
