"""How often a candidate's drafts would be kept, from parallel passes over text of the model's own.

The model's keys and values of a text are filed once. A probe then reads the text again by the
candidate's plan, cut into chains: each token sees the model's own entries before its chain began,
and the candidate's entries from there on. That is what a draft of that depth would have seen. What
the candidate says after each token is compared with what the model said there. Nothing is
generated, so a probe costs one pass of the candidate.

Where real drafts begin depends on what became of the draft before: one place behind its first miss.
If a chain began at every place, that walk can be followed through the text for any number of
drafts, and the drafts kept on it are those that decoding would keep. Does not know what drafting
costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ..model.compute.cache import KVCache, RowSpan, TokenLayout
from ..model.compute.call import HalfObserver
from ..model.compute.cpu.choosing import likeliest
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel

DEEPEST = 8  # drafts of a chain that are looked at
TOGETHER = 256  # tokens whose logits are computed at a time


@dataclass(frozen=True)
class Text:
    """A prompt with the model's own continuation, of which drafts are made."""

    ids: Sequence[int]
    prompt: int
    """How many of the ids are the prompt's."""


@dataclass(frozen=True)
class Agreement:
    """What became of chains that were drafted all over some texts: a row for each chain, a column
    for each depth."""

    right: Tensor  # (chains, deepest) bool: the candidate said there what the model said
    sure: Tensor  # (chains, deepest) its probability of what it said
    drafts: int
    """How many tokens were drafted."""
    walks: tuple[Tensor, ...] = ()
    """Of each text, the chains (rows of the others) that begin at its places, one after another.
    Empty unless a chain began at every place."""

    @property
    def kept(self) -> Tensor:
        """Whether each draft would be kept: it and all before it are right."""
        return self.right.int().cumprod(1).bool()

    def rounds(self, tokens: int) -> list[int]:
        """Drafts kept in each round of decoding with so many drafts a round: of the rounds that the
        walks come to, or of all chains where there are no walks."""
        counts: list[int] = self.kept[:, :tokens].sum(1).tolist()
        if not self.walks:
            return counts
        found = []
        for walk in self.walks:
            chains, at = walk.tolist(), 0
            while at < len(chains):
                found.append(counts[chains[at]])
                at += found[-1] + 1
        return found

    def expected(self, tokens: int) -> float:
        """Drafts kept in a round with so many, in the mean. Behind the deepest that was looked at,
        each is kept as often as that one, given those before."""
        deepest = self.right.shape[1]
        found = self.rounds(tokens)
        mean = sum(found) / len(found)
        if tokens <= deepest:
            return mean
        whole = found.count(deepest)
        share = whole / max(1, whole + found.count(deepest - 1))
        more = sum(share**further for further in range(1, tokens - deepest + 1))
        return mean + whole / len(found) * more

    def acceptance(self, tokens: int) -> float:
        """Kept over drafted."""
        return self.expected(tokens) / tokens

    @property
    def by_depth(self) -> list[float]:
        """Of the drafts behind kept ones only, the share that is right."""
        before = torch.cat([torch.ones(len(self.right), 1, dtype=torch.bool), self.kept[:, :-1]], 1)
        tried, kept = before.sum(0).tolist(), self.kept.sum(0).tolist()
        return [hits / count for hits, count in zip(kept, tried, strict=True) if count]


class Probe:
    """Texts as the model knows them, to be drafted by candidates."""

    def __init__(self, model: LayeredModel, texts: Sequence[Text], deepest: int = DEEPEST) -> None:
        self._model, self._deepest = model, deepest
        self._texts = [text for text in texts if len(text.ids) - text.prompt > deepest]
        assert self._texts, "the texts are too short to be drafted"
        longest = max(len(text.ids) for text in self._texts)
        self._cache = model.new_cache(len(self._texts), 2 * longest)
        self._alike = [0.0] * (2 * model.layers)
        self._said = [self._read(row, text.ids) for row, text in enumerate(self._texts)]

    @property
    def tokens(self) -> int:
        """Of the model's own, all texts together."""
        return sum(len(text.ids) - text.prompt for text in self._texts)

    @property
    def cosines(self) -> list[float]:
        """Of the stream before and after each half, attention halves first, summed over all
        texts: the more alike, the likelier the half can be left out (Draft on the Fly)."""
        return self._alike

    def _watch(self, layer: int, attention: bool, before: Tensor, after: Tensor) -> None:
        alike = cosine_similarity(before.float(), after.float(), dim=-1).sum()
        self._alike[layer + (0 if attention else self._model.layers)] += float(alike)

    @torch.inference_mode()
    def _read(self, row: int, ids: Sequence[int]) -> Tensor:
        """File a text's keys and values; what the model says after each of its tokens."""
        said = []
        for first in range(0, len(ids), TOGETHER):
            piece = ids[first : first + TOGETHER]
            layout = self._cache.layout_at([RowSpan(row, first, len(piece))])
            plan = self._model.full_plan
            said.append(_choices(self._model, plan, self._cache, layout, piece, self._watch)[0])
        return torch.cat(said)

    @torch.inference_mode()
    def agreement(
        self, model: LayeredModel, plan: LayerPlan, phases: Sequence[int] = (0,), texts: int = 0
    ) -> Agreement:
        """Chains drafted by a plan of a view of the model. `phases`: where the first chain of a
        text begins; with `everywhere` one begins at every token. `texts`: look at the first so many
        only; 0 is all."""
        right, sure, walks, count = [], [], [], 0
        for row, text in enumerate(self._texts[: texts or None]):
            chain_at: dict[int, int] = {}
            for phase in phases:
                # reading the prompt says the first new token, and drafting begins with that one
                begins = range(text.prompt + phase, len(text.ids) - self._deepest, self._deepest)
                if not begins:
                    continue
                layout, at = self._chains(row, begins, len(text.ids))
                tokens = [text.ids[place] for place in at]
                said, chances = _choices(model, plan, self._cache, layout, tokens)
                self._cache.rollback(row, len(text.ids))
                right.append((said == self._said[row][at]).view(-1, self._deepest))
                sure.append(chances.view(-1, self._deepest))
                chain_at |= {begin: count + index for index, begin in enumerate(begins)}
                count += len(begins)
            walks.append(torch.tensor([chain_at[begin] for begin in sorted(chain_at)]))
        hits = torch.cat(right)
        whole = len(set(phases)) == self._deepest
        return Agreement(hits, torch.cat(sure), hits.numel(), tuple(walks) if whole else ())

    @property
    def everywhere(self) -> range:
        """The phases with which a chain begins at every place."""
        return range(self._deepest)

    def _chains(self, row: int, begins: Sequence[int], first: int) -> tuple[TokenLayout, list[int]]:
        """A call of many chains, filed behind the text, and the places in the text that they read.
        A chain sees the text before it and itself."""
        at = [begin + depth for begin in begins for depth in range(self._deepest)]
        slots = list(range(first, first + len(at)))
        ancestors = [
            tuple(slots[index - index % self._deepest : index + 1]) for index in range(len(at))
        ]
        stops = [begin for begin in begins for _ in range(self._deepest)]
        self._cache.reserve(first + len(at))
        layout = TokenLayout(
            (RowSpan(row, first, len(at)),),
            torch.full((len(at),), row),
            torch.tensor(slots),
            torch.tensor(at),
            torch.tensor(stops),
            tuple(ancestors),
        )
        return layout, at


def _choices(
    model: LayeredModel,
    plan: LayerPlan,
    cache: KVCache,
    layout: TokenLayout,
    tokens: Sequence[int],
    observer: HalfObserver | None = None,
) -> tuple[Tensor, Tensor]:
    """The likeliest token after each, and its probability."""
    x = model.embed(torch.tensor(list(tokens), device=model.device))
    x = model.run(x, plan, cache, layout, observer)
    said, sure = [], []
    for piece in x.split(TOGETHER):
        logits = model.head(piece)
        best = likeliest(logits)[:, 0]
        said.append(best)
        sure.append((logits.gather(1, best[:, None])[:, 0] - logits.float().logsumexp(1)).exp())
    return torch.cat(said).cpu(), torch.cat(sure).cpu()
