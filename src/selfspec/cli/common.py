"""What commands share: `open_model`, and how text, numbers and costs are written.

Tests replace `open_model` and run every command on a tiny random model. Knows no command.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ..core.garbage import unsearched

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.progress import TaskID

    from ..core.contract import Stats
    from ..llm import LLM
    from .flags import Typed
    from .options import DraftOptions, ModelOptions


def open_model(name: str, how: ModelOptions) -> LLM:
    """Load the model, the first step of commands that compute. Imports torch, not earlier."""
    if sys.stderr.isatty():
        stderr().print(f"loading {name} ...", style="dim", markup=False)
    with importing():
        from ..llm import LLM

    quiet_bars()
    return LLM.from_pretrained(name, **vars(how))


@contextmanager
def importing() -> Iterator[None]:
    """No search for garbage while torch is imported. It would take an eighth of the time, and what
    a module makes stays."""
    if "torch" in sys.modules:
        yield
        return
    with unsearched():
        try:
            yield
        finally:
            gc.freeze()


def quiet_bars() -> None:
    """No progress bars of transformers' in a log file: nobody watches them there."""
    if sys.stderr.isatty():
        return
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read at its import, if ever
    if "huggingface_hub" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()


def settings_from(
    sampling: Typed, max_new_tokens: int, stop: Sequence[str] | None, drafting: DraftOptions
) -> dict[str, Any]:
    """The library's keyword arguments for a generation, checked before a model is loaded."""
    with importing():
        from ..core.sampling import SamplingParams
        from ..draft.registry import resolve

    settings = drafting.settings()
    resolve(**settings)
    return {
        **settings,
        # None is what the model asks for
        "sampling": sampling.make(SamplingParams) if sampling.values else None,
        "max_new_tokens": max_new_tokens,
        "stop": stop,
    }


def has_chat_template(llm: LLM) -> bool:
    """Whether the model comes with a way to write down a conversation."""
    return llm.words is not None and bool(llm.words.chat_template)


def any_bytes() -> None:
    """Let standard input bring bytes that are no UTF-8 as far as where a prompt is checked."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def user(text: str) -> dict[str, str]:
    """One turn of a conversation."""
    return {"role": "user", "content": text}


def write(text: str) -> None:
    """Text as it comes, without waiting for the end of a line."""
    sys.stdout.write(text)
    sys.stdout.flush()


def stderr() -> Console:
    """A console on standard error, made anew in case that was redirected."""
    return Console(stderr=True, highlight=False)


def bar(head: str, **options: Any) -> Progress:
    """How far long work is, for somebody who watches: `head`, count, time left, a field `words`.

    `options` are those of `rich.progress.Progress`.
    """
    return Progress(
        TextColumn(head),
        MofNCompleteColumn(),
        BarColumn(20),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
        console=stderr(),
        disable=not sys.stderr.isatty(),
        **options,
    )


class StepBar:
    """How far training is: a bar for somebody who watches, lines for a file. It begins late, as
    what comes before shows its own progress."""

    def __enter__(self) -> StepBar:
        self._bar = bar("step")
        self._task: TaskID | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, step: int, steps: int) -> None:
        """So many of all steps are done, in an earlier run."""
        self._first, self._steps, self._start = step, steps, time.perf_counter()
        self._bar.start()
        self._task = self._bar.add_task("", total=steps, completed=step, words="")

    def at(self, step: int, words: str | None = None, line: bool = False) -> None:
        """Another step is done. `line`: this is worth a line in a file."""
        if self._task is None:
            return
        said: dict[str, Any] = {} if words is None else {"words": words}
        self._bar.update(self._task, completed=step, **said)
        if line and not sys.stderr.isatty():
            spent = time.perf_counter() - self._start
            left = spent / max(1, step - self._first) * (self._steps - step)
            text = f"step {step} of {self._steps}, {left:.0f} s left, {words}"
            stderr().print(text, soft_wrap=True)


def facts(title: str) -> Table:
    """An empty table of names on the left and facts on the right."""
    grid = Table(
        title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    return grid


def megabytes(count: float) -> str:
    """Bytes as people read them."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def print_stats(all_stats: Sequence[Stats]) -> None:
    """The cost of each generation on standard error, where it cannot get into a pipe."""
    for stats in all_stats:
        cached = f" ({stats.cached_prompt_tokens} cached)" if stats.cached_prompt_tokens else ""
        parts = [
            f"prompt {stats.prompt_tokens} tokens{cached} in {stats.prefill_seconds:.2f} s",
            f"{stats.new_tokens} new tokens at {stats.decode_tokens_per_second:.1f} tokens/s "
            f"({stats.tokens_per_second:.1f} with the prompt)",
            f"{stats.forward_passes} passes",
        ]
        if stats.drafted:
            kept = f"{stats.accepted} of {stats.drafted} drafts accepted"
            parts.append(f"{kept} ({stats.acceptance:.0%})")
        parts.append(f"peak {megabytes(stats.peak_memory_bytes)}")
        stderr().print(" · ".join(parts), style="dim", markup=False, soft_wrap=True)
