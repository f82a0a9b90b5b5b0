"""A tree of guesses whose paths leave the layers early, each as one: SpecEE's hyper-tokens.

From the root to a leaf a path decides once: it may leave where all its tokens may, so at the
deepest of their layers (SpecEE, section 6). Predictors look at all nodes of all trees in one
grouped product. Where all of a path fire, the whole head checks them together, and what it says
of a node then is final. Once these words lead from the root to an end, the others are not waited
for: that is ours, and makes the path that is kept count, not the slowest of all. Nothing is
verified behind an exit. Does not know who guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..core.tree import Tree
from ..model.compute.cache import KVCache, RowSpan, TokenLayout
from ..model.compute.cpu.choosing import likeliest
from ..model.compute.plan import LayerPlan
from ..model.layered import LayeredModel
from .rules import PathJudge


@dataclass
class PathRow:
    """One row's tree on its way. Nodes are numbered over all rows from `begin` on."""

    row: int
    first: int
    """The slot of the root."""
    tree: Tree
    looks: frozenset[int]
    begin: int
    greedy: bool = True
    """Whether what the head says first is what will be kept, so that other paths may be left."""
    fired: set[int] = field(default_factory=set)
    said: dict[int, Tensor] = field(default_factory=dict)
    """What the head says of nodes that left, (1, vocabulary)."""
    words: dict[int, int] = field(default_factory=dict)
    """Its best token there."""
    layers: int = 0
    """How many layers the tree has run."""

    @cached_property
    def _nodes(self) -> dict[tuple[int, int], int]:
        """Nodes by parent and token."""
        pairs = zip(self.tree.parents, self.tree.tokens, strict=True)
        return {pair: node for node, pair in enumerate(pairs)}

    @cached_property
    def leaves(self) -> list[tuple[int, ...]]:
        """The paths, from the root to each leaf."""
        inner = set(self.tree.parents)
        return [path for path in self.tree.paths if path[-1] not in inner]

    @property
    def decided(self) -> bool:
        """Whether all paths have left, or the words lead from the root to an end."""
        if len(self.said) == len(self.tree):
            return True
        last = 0
        while self.greedy and last in self.words:
            following = self._nodes.get((last, self.words[last]))
            if following is None:
                return True
            last = following
        return False

    @property
    def open(self) -> list[int]:
        """The nodes that have not left. The others run beside them: that reads no weights, and
        leaves no gap between slots."""
        return [node for node in range(len(self.tree)) if node not in self.said]


def walk_paths(
    model: LayeredModel, cache: KVCache, rows: Sequence[PathRow], judge: PathJudge
) -> Tensor:
    """Run trees until the kept path of each is decided, or all layers are run. Each row then has
    `said` for all its nodes. Gives the nodes' states, (nodes, width)."""
    layout = _layout(cache, rows)
    tokens = [token for each in rows for token in each.tree.tokens]
    x = model.embed(torch.tensor(tokens, device=model.device))
    going, start = list(rows), 0
    for stop in sorted({layer for each in rows for layer in each.looks} | {model.layers}):
        if not going:
            break
        here = [each.begin + node for each in going for node in range(len(each.tree))]
        part = layout if len(going) == len(rows) else layout.select(here)
        x[here] = model.run(x[here], LayerPlan(start, stop), cache, part)
        for each in going:
            each.layers = stop
        if stop < model.layers:
            _look(stop, [each for each in going if stop in each.looks], x, judge)
            going = [each for each in going if not each.decided]
        start = stop
    _ask(model, rows, x)
    return x


def _layout(cache: KVCache, rows: Sequence[PathRow]) -> TokenLayout:
    """Where all nodes go."""
    spans = [RowSpan(each.row, each.first, len(each.tree)) for each in rows]
    return cache.layout_at(spans, [each.tree.parents for each in rows])


def _look(layer: int, rows: Sequence[PathRow], x: Tensor, judge: PathJudge) -> None:
    """One decision for each path that has not left."""
    asked = [
        (each, node) for each in rows for node in each.open
        if node not in each.fired and judge.may_look(each.begin + node)
    ]  # fmt: skip
    if not asked:
        return
    nodes = [each.begin + node for each, node in asked]
    for (each, node), fires in zip(asked, judge.fires(layer, nodes, x[nodes]), strict=True):
        if fires:
            each.fired.add(node)
    ready = [(each, path) for each in rows for path in each.leaves if each.fired >= {*path}]
    wanted = sorted(
        {each.begin + node for each, path in ready for node in path if node not in each.said}
    )
    checked = judge.check(wanted, x[wanted]) if wanted else {}
    for each, path in ready:
        new = [node for node in path if node not in each.said]
        wrong = [node for node in new if each.begin + node not in checked]
        each.fired.difference_update(wrong)  # they are looked at again
        if not wrong:
            _leave(each, {node: checked[each.begin + node] for node in new})


def _leave(row: PathRow, said: Mapping[int, Tensor]) -> None:
    row.said.update(said)
    for node, logits in said.items():
        row.words[node] = int(likeliest(logits)[0, 0])


def _ask(model: LayeredModel, rows: Sequence[PathRow], x: Tensor) -> None:
    """What the head says of those that did not leave, or that nobody follows any more: drafters
    learn from rejected guesses too."""
    left = [(each, node) for each in rows for node in each.open]
    if left:
        logits = model.head(x[[each.begin + node for each, node in left]])
        for (each, node), word in zip(left, logits.split(1), strict=True):
            each.said[node] = word


def fill_by_state(model: LayeredModel, cache: KVCache, rows: Sequence[PathRow], x: Tensor) -> None:
    """Keys and values in the layers that trees skipped, from the states that they left with."""
    layout = _layout(cache, rows)
    for layer in range(min(each.layers for each in rows), model.layers):
        some = [each for each in rows if each.layers <= layer]
        here = [each.begin + node for each in some for node in range(len(each.tree))]
        part = layout if len(some) == len(rows) else layout.select(here)
        model.run(x[here], LayerPlan(layer, layer + 1, skipped_mlp=frozenset({layer})), cache, part)
