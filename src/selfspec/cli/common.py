"""What commands share: the one seam through which a model is opened, and how text, numbers and
costs are written.

`open_model` is the seam: tests replace it and run every command on a tiny random model. Knows no
command.
"""

from __future__ import annotations

import sys
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..core.contract import Stats
    from ..llm import LLM
    from .flags import Typed
    from .options import DraftOptions, ModelOptions


def open_model(name: str, how: ModelOptions) -> LLM:
    """Load the model. The first line of every command that computes; importing torch happens here
    and not earlier."""
    if sys.stderr.isatty():
        stderr().print(f"loading {name} ...", style="dim", markup=False)
    from ..llm import LLM

    quiet_bars()

    return LLM.from_pretrained(
        name,
        revision=how.revision,
        token=how.token,
        trust_remote_code=how.trust_remote_code,
        dtype=how.dtype,
        device=how.device,
        threads=how.threads,
        kernel=how.kernel,
        weights=how.weights,
        adapter=how.adapter,
        long_context=how.long_context,
    )


def quiet_bars() -> None:
    """No progress bars of transformers' in a log file: a bar is for somebody who watches."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def settings_from(
    sampling: Typed, max_new_tokens: int, stop: Sequence[str] | None, drafting: DraftOptions
) -> dict[str, Any]:
    """The library's keyword arguments for a generation; everything here is checked before a model
    is loaded."""
    from ..core.sampling import SamplingParams
    from ..draft.registry import resolve

    settings = drafting.settings()
    resolve(**settings)
    return {
        **settings,
        # without any, the library takes what the model asks for
        "sampling": sampling.make(SamplingParams) if sampling.values else None,
        "max_new_tokens": max_new_tokens,
        "stop": stop,
    }


def has_chat_template(llm: LLM) -> bool:
    """Whether the model comes with a way to write down a conversation."""
    tokenizer: Any = llm.tokenizer  # its type does not promise the attribute
    return tokenizer is not None and bool(tokenizer.chat_template)


def user(text: str) -> dict[str, str]:
    """One turn of a conversation."""
    return {"role": "user", "content": text}


def write(text: str) -> None:
    """Text as it comes, without waiting for the end of a line."""
    sys.stdout.write(text)
    sys.stdout.flush()


def stderr() -> Console:
    """A console on standard error; made anew so that a test or a shell that redirects it is
    obeyed."""
    return Console(stderr=True, highlight=False)


def bar(head: str, words: str) -> Progress:
    """How far long work is, for somebody who watches: `head`, done of all, time left, then the
    task's field `words`."""
    return Progress(
        TextColumn(head),
        MofNCompleteColumn(),
        BarColumn(20),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn(f"{{task.fields[{words}]}}"),
        console=stderr(),
        disable=not sys.stderr.isatty(),
    )


def stats_line(stats: Stats) -> str:
    """What a generation cost, in one line."""
    parts = [
        f"prompt {stats.prompt_tokens} tokens"
        + (f" ({stats.cached_prompt_tokens} cached)" if stats.cached_prompt_tokens else ""),
        f"in {stats.prefill_seconds:.2f} s",
        f"· {stats.new_tokens} new tokens at {stats.decode_tokens_per_second:.1f} tokens/s",
        f"({stats.tokens_per_second:.1f} with the prompt)",
        f"· {stats.forward_passes} passes",
    ]
    if stats.drafted:
        parts.append(
            f"· {stats.accepted} of {stats.drafted} drafts accepted ({stats.acceptance:.0%})"
        )
    parts.append(f"· peak {megabytes(stats.peak_memory_bytes)}")
    return " ".join(parts)


def megabytes(count: float) -> str:
    """Bytes as people read them."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def print_stats(all_stats: Sequence[Stats]) -> None:
    """The cost of each generation on standard error, where it cannot get into a pipe."""
    for stats in all_stats:
        stderr().print(stats_line(stats), style="dim", markup=False, soft_wrap=True)
