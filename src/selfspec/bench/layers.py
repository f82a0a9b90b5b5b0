"""What every layer would say: the token each exit would name at each position of a text, where that
settles, and how little each half changes the residual stream.

Exit N is the model's own last norm and head after the first N layers. A position's token is *first
named* by the earliest exit that names what the whole model names, and *settles* at the earliest
from which on no exit names anything else. Cosine similarity is that of the residual stream before
and after a half, averaged over the positions of the text (ASD's ACS). Source: LayerSkip, section
2.1 and Figure 2; Draft on the Fly, section 3.1. Knows no drafting, no terminal and no HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import OptionError
from ..model.compute.plan import LayerPlan

if TYPE_CHECKING:
    from ..llm import LLM
    from ..model.layered import LayeredModel

SCHEMA_VERSION = 1
POSITIONS = 64  # of which logits exist at a time
VISIBLE = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"})


@dataclass(frozen=True)
class Position:
    """One token of the text and what each exit says comes after it."""

    index: int
    token: str  # the token that was read
    following: str | None  # the one that really comes next; None at the end
    written: bool  # whether the model wrote it, that is whether it is not of the prompt
    choices: tuple[int, ...]  # token ids that exits 1 to L name
    guesses: tuple[str, ...]  # the same as text
    chances: tuple[float, ...]  # each exit's probability of its own guess
    first: int  # the earliest exit that names the last one's token
    settles: int  # the earliest from which on all do

    @property
    def runs(self) -> list[tuple[str, int, int]]:
        """Guesses that stayed the same over several exits: (guess, from exit, to exit)."""
        spans: list[tuple[str, int, int]] = []
        for layer, guess in enumerate(self.guesses, start=1):
            if spans and spans[-1][0] == guess:
                spans[-1] = (guess, spans[-1][1], layer)
            else:
                spans.append((guess, layer, layer))
        return spans


@dataclass(frozen=True)
class LayerView:
    """Everything `selfspec inspect` shows."""

    model: str
    layers: int
    tokens: int  # of the whole text, of which the positions are the last
    prompt_tokens: int
    positions: tuple[Position, ...]
    # cosine similarity around each layer's halves, over the whole text
    attention: tuple[float, ...]
    mlp: tuple[float, ...]
    kind: str = "inspect"
    schema_version: int = SCHEMA_VERSION

    def settled_by(self, layer: int) -> float:
        """Share of positions whose token no longer changes after that many layers."""
        return fmean(position.settles <= layer for position in self.positions)

    def agreement(self, layer: int) -> float:
        """Share of positions at which this exit names the whole model's token: the chance of a
        single draft."""
        return fmean(
            position.choices[layer - 1] == position.choices[-1] for position in self.positions
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def look(llm: LLM, prompt: str | Sequence[int], last: int = 40, new_tokens: int = 0) -> LayerView:
    """Read a prompt, let the model go on for `new_tokens`, and look at the last `last` positions
    layer by layer.

    The text before those positions is read too, and counts in the cosine similarities.
    """
    if last < 1 or new_tokens < 0:
        raise OptionError(
            f"last={last}, new_tokens={new_tokens}: there is nothing to look at; use last >= 1 and "
            "new_tokens >= 0"
        )
    text = ids = llm.encode(prompt)
    llm.model.check_length(len(ids))
    if new_tokens:
        text = [*ids, *llm.generate(ids, max_new_tokens=new_tokens, draft=None).tokens]
    similar = Similarities(llm.model.layers)
    choices, chances = _read(llm.model, text, min(last, len(text)), similar)
    start = len(text) - choices.shape[1]
    shown = tuple(
        _position(llm, text, start + index, len(ids), named.tolist(), sure.tolist())
        for index, (named, sure) in enumerate(zip(choices.T, chances.T, strict=True))
    )
    name, cosines = Path(llm.info.name).name, (similar.means(True), similar.means(False))
    return LayerView(name, llm.model.layers, len(text), len(ids), shown, *cosines)


class Similarities:
    """A watch of a pass: mean cosine similarity of the residual stream before and after every
    half."""

    def __init__(self, layers: int) -> None:
        halves = [(layer, half) for layer in range(layers) for half in (True, False)]
        self._sums, self._counts = dict.fromkeys(halves, 0.0), dict.fromkeys(halves, 0)

    def __call__(self, layer: int, attention: bool, before: Tensor, after: Tensor) -> None:
        cosines = F.cosine_similarity(before.float(), after.float(), dim=-1)
        self._sums[layer, attention] += float(cosines.sum())
        self._counts[layer, attention] += len(before)

    def means(self, attention: bool) -> tuple[float, ...]:
        """One a layer, of its attention or of its MLP half."""
        totals = ((key, total) for key, total in self._sums.items() if key[1] == attention)
        return tuple(total / self._counts[key] for key, total in totals)


@torch.inference_mode()
def _read(
    model: LayeredModel, text: Sequence[int], last: int, similar: Similarities
) -> tuple[Tensor, Tensor]:
    """Each exit's choice and its probability, (layers, last)."""
    cache = model.new_cache(1, len(text))
    if len(text) > last:
        model.prefill([text[:-last]], cache, similar)
    place = cache.layout([last])
    x = model.embed(torch.tensor(text[-last:], device=model.device))
    choices, chances = [], []
    for layer in range(model.layers):
        x = model.run(x, LayerPlan(layer, layer + 1), cache, place, similar)
        best = [model.head(some).float().softmax(-1).max(-1) for some in x.split(POSITIONS)]
        choices.append(torch.cat([each.indices for each in best]).cpu())
        chances.append(torch.cat([each.values for each in best]).cpu())
    return torch.stack(choices), torch.stack(chances)


def _position(
    llm: LLM,
    text: Sequence[int],
    index: int,
    prompt_tokens: int,
    choices: Sequence[int],
    chances: Sequence[float],
) -> Position:
    same = [choice == choices[-1] for choice in choices]
    settles = max((exit for exit, agrees in enumerate(same, start=1) if not agrees), default=0) + 1
    return Position(
        index=index,
        token=visible_mask(llm, text[index]),
        following=visible_mask(llm, text[index + 1]) if index + 1 < len(text) else None,
        written=index >= prompt_tokens,
        choices=tuple(choices),
        guesses=tuple(visible_mask(llm, choice) for choice in choices),
        chances=tuple(round(chance, 4) for chance in chances),
        first=same.index(True) + 1,
        settles=settles,
    )


def visible_mask(llm: LLM, token: int) -> str:
    """A token as text of its own, with blanks, line ends and control characters to be seen; its
    number where it has no text."""
    text = "" if llm.tokenizer is None else str(llm.tokenizer.decode([token])).translate(VISIBLE)
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown) or f"<{token}>"
