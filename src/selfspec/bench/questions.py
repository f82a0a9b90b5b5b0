"""Spec-Bench's questions, or those of a file like it, for what asks every task alike."""

from __future__ import annotations

from pathlib import Path

from .tasks import Item, read_task


def read_questions(path: Path, sample: int) -> list[Item]:
    """A fixed sample of each task."""
    return [item for asked in read_task(f"spec-bench={path}", sample) for item in asked.items]
