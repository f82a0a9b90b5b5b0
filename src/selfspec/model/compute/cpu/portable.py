"""Packed weights output by output, as a file keeps them for any processor, and back.

Processors pack panels of different widths, but a column has the same bytes in each: packing and
this only change their order. Does not know files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .few_bits import SOURCE
from .native import compiled

PORTABLE = ("int8", "int4", "bfloat16")
# of a column: stretches of so many bytes in units of so many, again and again. None: one stretch
_STRETCHES = {"int8": ((None, 4),), "int4": ((16, 4), (4, 2))}


def to_rows(kind: str, panels: Tensor, outputs: int, width: int | None = None) -> Tensor:
    """(panels, bytes) -> (outputs, bytes) uint8."""
    width = width or int(compiled(SOURCE).panel_width())
    if kind == "bfloat16":
        units = panels.view(torch.int16).unflatten(1, (-1, width // 2, 2)).permute(0, 3, 2, 1)
        rows: Tensor = units.flatten(0, 2)[:outputs].contiguous().view(torch.uint8)
        return rows
    stretches, around = _stretches(kind, panels.shape[1] // width)
    pieces, at = [], 0
    groups = panels.unflatten(1, (-1, around * width))  # (panels, groups, bytes)
    for size, unit in stretches:
        part = groups[:, :, at : at + size * width].unflatten(2, (-1, width, unit))
        pieces.append(part.permute(0, 3, 1, 2, 4).flatten(3))  # (panels, width, groups, size)
        at += size * width
    return torch.cat(pieces, dim=3).flatten(2).flatten(0, 1)[:outputs].contiguous()


def to_panels(kind: str, rows: Tensor, width: int | None = None) -> Tensor:
    """(outputs, bytes) uint8 -> (panels, bytes). `width`: of a panel, None for this processor's."""
    width = width or int(compiled(SOURCE).panel_width())
    fill = -len(rows) % width
    if fill:  # columns that nobody reads
        rows = torch.cat([rows, rows[-1:].expand(fill, -1)])
    if kind == "bfloat16":
        units = rows.view(torch.int16).unflatten(0, (-1, 2, width // 2)).permute(0, 3, 2, 1)
        panels: Tensor = units.flatten(1).contiguous().view(torch.uint8)
        return panels
    stretches, around = _stretches(kind, rows.shape[1])
    columns = rows.view(-1, width, rows.shape[1] // around, around)
    pieces, at = [], 0
    for size, unit in stretches:
        part = columns[..., at : at + size].unflatten(3, (-1, unit))
        pieces.append(part.permute(0, 2, 3, 1, 4).flatten(2))  # (panels, groups, size * width)
        at += size
    return torch.cat(pieces, dim=2).flatten(1)


def _stretches(kind: str, column: int) -> tuple[list[tuple[int, int]], int]:
    """The stretches of a column's bytes, and how many bytes they are before they come again."""
    found = [(size or column, unit) for size, unit in _STRETCHES[kind]]
    return found, sum(size for size, _ in found)
