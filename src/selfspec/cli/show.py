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
    if console.no_color or not console.is_terminal:
        return lambda piece: common.write(marked(piece, llm.words))
    return lambda piece: console.print(coloured(piece, llm.words), end="")


def marked(piece: Piece, tokenizer: Any) -> str:
    """Without colours: accepted drafts as they are, rejected ones as [-struck out-]."""
    kept, refused, own = _parts(piece, tokenizer)
    return kept + (f"[-{refused}-]" if refused else "") + own


def coloured(piece: Piece, tokenizer: Any) -> Text:
    """Accepted drafts green, rejected ones red and struck through, the model's own tokens plain."""
    kept, refused, own = _parts(piece, tokenizer)
    return Text.assemble((kept, "green"), (refused, "red strike"), own)


def _parts(piece: Piece, tokenizer: Any) -> tuple[str, str, str]:
    """Accepted drafts, rejected ones, the model's own. Each kind is decoded alone, so a character
    of tokens of two kinds shows as replacement marks."""

    def text_of(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    kept, own = piece.tokens[: piece.accepted], piece.tokens[piece.accepted :]
    return text_of(kept), text_of(piece.rejected), text_of(own)
