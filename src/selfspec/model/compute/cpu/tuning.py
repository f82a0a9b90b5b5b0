"""How our kernels read weights on this machine: chosen by a short measurement, never a change of
bits.

How far ahead a weight is best asked for, and how many rows best share a read of it, differ between
processors. The choice lies as JSON beside the compiled kernels. Without that file, or with one that
cannot be read, it is measured again. Processes that do so at once replace each other's file whole.
What is slower by noise only is not chosen: another choice than `DEFAULT` has to win clearly.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from ....core.files import whole_file
from ....core.json_text import from_json
from ....core.schema import made
from . import large_pages
from .interface import ProductStruct, address, function

_log = logging.getLogger(__name__)
Choice = TypeVar("Choice", "Tuning", "FewBits")
INPUTS, OUTPUTS = 512, 65536  # 128 MiB of weights
OF_A_LAYER = 4096  # outputs of these that one product has: larger ones share them out otherwise
PARTS = 3  # so many of these are read in turns: caches may hold one, but not all of a model
PIECE = 12 * 1024  # bytes of a panel, that fit into a first cache together with what they multiply
MOST_SHARED = 24  # rows for which that is tried
GROUP, SCALE = 32, 4  # inputs of 8 bits that are rounded together; bytes of an output's scale
ROUNDS = 15
AGAIN = 7  # comparisons that a choice has to win once more
CLEARLY = 0.95  # of the default's time
NEARLY = 0.98  # the same where little is lost either way, and once more
SECONDS = 0.25  # of a comparison, after which no further round of it is begun


@dataclass(frozen=True)
class Tuning:
    """How the product of float32 weights reads them."""

    soon: int = 16
    """Steps ahead at which a weight is asked for into the first cache. 0: it is not."""
    later: int = 128
    """Steps ahead at which it is asked for into the second cache."""
    rows: int = 12
    """Rows that share a read of a weight at most; no more than registers hold."""
    inputs: int = 0
    """Inputs that more rows than that go through at a time. 0: all."""
    shared: int = 0
    """No more rows than this do."""
    quiet: bool = False
    """Whether a few rows ask for nothing, since the processor's own prefetcher does better."""

    def possible(self, most_rows: int) -> bool:
        """For kernels of which at most so many rows share a read."""
        numbers = self.soon, self.later, self.inputs, self.shared
        return min(numbers) >= 0 and 1 <= self.rows <= most_rows

    def __str__(self) -> str:
        ahead = f"{self.soon} and {self.later}" if self.soon else f"{self.later}"
        quiet = " (few rows: not at all)" if self.quiet else ""
        pieces = f", up to {self.shared} by {self.inputs} inputs at a time" if self.inputs else ""
        return f"asks {ahead} steps ahead{quiet}, {self.rows} rows share a read{pieces}"


@dataclass(frozen=True)
class FewBits:
    """The same of weights of few bits."""

    near: bool = True
    """Whether they are asked for into the first cache too, as those of float32 are. If not, they
    are asked for half as far ahead into the second."""
    quiet: bool = False
    """Whether a few rows ask for nothing."""

    def __str__(self) -> str:
        caches = "the first and the second cache" if self.near else "the second cache"
        return f"asks {caches} ahead" + " (few rows: not at all)" * self.quiet


def use(kernels: ctypes.CDLL, chosen: Tuning) -> None:
    """From now on the kernels read so."""
    ahead = chosen.soon, chosen.later
    kernels.tune(*ahead, chosen.rows, chosen.inputs, chosen.shared, chosen.quiet)


def use_for_few_bits(kernels: ctypes.CDLL, chosen: FewBits) -> None:
    """From now on the kernels of few bits read so."""
    kernels.tune(chosen.near, chosen.quiet)


@functools.cache
def tuning(kernels: ctypes.CDLL) -> Tuning:
    """What was chosen for these kernels, on this machine."""
    most_rows = int(kernels.most_rows())
    return _chosen(
        kernels, Tuning, lambda kept: kept.possible(most_rows), lambda: measured(kernels)
    )


@functools.cache
def for_few_bits(kernels: ctypes.CDLL, products: ctypes.CDLL) -> FewBits:
    """What was chosen for these kernels of few bits, on this machine. `products`: the library that
    multiplies by them."""
    near = tuning(products).soon > 0

    def measure() -> FewBits:
        return measured_in_few_bits(kernels, products, near)

    # another one is of before float32 was measured anew
    return _chosen(kernels, FewBits, lambda kept: kept.near == near, measure)


def measured(kernels: ctypes.CDLL) -> Tuning:
    """The best for reading weights from memory for few rows, then for as many as a full tile has
    and twice as many, then by pieces of panels or not for some more than a tile has, and for twice
    as many; then for one alone."""
    default = Tuning(rows=int(kernels.most_rows()))
    # All of them ask ahead: on some processors not to ask costs half of the speed for many rows.
    ahead = ((8, 32), (16, 64), (0, 128), (0, 32))
    reads = [default, *(replace(default, soon=soon, later=later) for soon, later in ahead)]
    parts = large_pages.empty([PARTS, OUTPUTS * INPUTS], torch.float32).fill_(1)
    turns = itertools.cycle(parts)

    def seconds(chosen: Tuning, *counts: int) -> float:
        return sum(_seconds(kernels, chosen, next(turns), rows) for rows in counts)

    best = _best(reads, lambda each: seconds(each, 1, 4, 6))
    smaller = {max(1, default.rows * part // 4) for part in (2, 3)}
    tiles = [best, *(replace(best, rows=rows) for rows in sorted(smaller))]
    best = _best(tiles, lambda each: seconds(each, default.rows, 2 * default.rows))
    some, twice = 4 * best.rows // 3, 2 * best.rows
    pieces = replace(best, inputs=PIECE // (4 * int(kernels.panel_width())), shared=some)
    best = _best([pieces, best], lambda each: seconds(each, best.rows + 1, some))
    more = replace(pieces, shared=max(MOST_SHARED, twice))
    best = _best([best, more], lambda each: seconds(each, twice), NEARLY)
    alone = [best, replace(best, quiet=True)]
    return _best(alone, lambda each: seconds(each, 1), NEARLY)


def measured_in_few_bits(kernels: ctypes.CDLL, products: ctypes.CDLL, near: bool) -> FewBits:
    """The better one for one row and for three, by weights of 8 bits."""
    outputs, rounds = 4 * OUTPUTS, "round_for_bytes_32"
    weights = large_pages.empty([outputs, INPUTS + SCALE], torch.uint8).fill_(1)
    product = ProductStruct(
        multiply=function(kernels, "multiply_int8"),
        prepare=function(kernels, rounds),
        prepared=INPUTS // GROUP * int(kernels[f"{rounds}_bytes"]()),
        weights=address(weights),
        outputs=outputs,
        inputs=INPUTS,
    )

    def seconds(each: FewBits) -> float:
        use_for_few_bits(kernels, each)
        return sum(_seconds_of(products, [product], rows) for rows in (1, 3))

    return _best([FewBits(near, quiet) for quiet in (False, True)], seconds)


def _seconds(kernels: ctypes.CDLL, chosen: Tuning, weights: torch.Tensor, rows: int) -> float:
    """By products of a layer's size, one after the other."""
    use(kernels, chosen)
    multiply = function(kernels, "multiply_float32")
    outputs = min(OF_A_LAYER, OUTPUTS)
    products = [
        ProductStruct(multiply=multiply, weights=address(part), outputs=outputs, inputs=INPUTS)
        for part in weights.split(outputs * INPUTS)
    ]
    return _seconds_of(kernels, products, rows)


def _seconds_of(kernels: ctypes.CDLL, products: Sequence[ProductStruct], rows: int) -> float:
    x, out = torch.ones(rows, products[0].inputs), torch.zeros(rows, products[0].outputs)
    threads = torch.get_num_threads()
    start = time.perf_counter()
    for product in products:
        kernels.linear(x.data_ptr(), rows, product, None, out.data_ptr(), threads)
    return time.perf_counter() - start


def _best(
    candidates: Sequence[Choice], seconds: Callable[[Choice], float], share: float = CLEARLY
) -> Choice:
    """The first, unless another takes less than this share in the median of rounds, in turns."""
    ratios: dict[Choice, list[float]] = {each: [] for each in candidates}
    end = time.perf_counter() + SECONDS
    seconds(candidates[0])  # warm-up
    for _ in range(ROUNDS):
        times = {each: seconds(each) for each in candidates}
        for each, took in times.items():
            ratios[each].append(took / times[candidates[0]])
        if time.perf_counter() > end:
            break
    fastest = min(candidates, key=lambda each: statistics.median(ratios[each]))
    if statistics.median(ratios[fastest]) >= share:
        return candidates[0]
    # once more, the two alone: the best of several is easily the luckiest
    again = [seconds(fastest) / seconds(candidates[0]) for _ in range(AGAIN)]
    return fastest if statistics.median(again) < NEARLY else candidates[0]


def _chosen(
    kernels: ctypes.CDLL,
    kind: type[Choice],
    fits: Callable[[Choice], bool],
    measure: Callable[[], Choice],
) -> Choice:
    """What lies beside the kernels, or what is measured and laid there."""
    path = Path(kernels._name).with_suffix(".json")
    kept = _kept(path, kind, fits)
    if kept is None:
        kept = measure()
        _keep(kept, path)
    return kept


def _kept(path: Path, kind: type[Choice], fits: Callable[[Choice], bool]) -> Choice | None:
    try:
        found = made(kind, from_json(path.read_text("utf-8")))
    except (OSError, ValueError):
        return None
    return found if fits(found) else None


def _keep(chosen: Tuning | FewBits, path: Path) -> None:
    """Written whole or not at all. Where nothing can be written, the next process measures."""
    try:
        with whole_file(path) as file:
            file.write(json.dumps(asdict(chosen)).encode())
    except OSError as error:
        _log.debug("How weights are read could not be kept in %s: %s", path, error)
