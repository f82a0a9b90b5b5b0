"""`selfspec generate`: prompts in, text out. Does not know how text is made, only how it is asked
for and shown."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError, PromptError
from . import common, options, show

if TYPE_CHECKING:
    from ..llm import LLM
    from ..results import Result


@dataclass(frozen=True)
class Job:
    """What was asked for: the prompts, whether they are turns of a conversation, and the library's
    own keyword arguments."""

    prompts: Sequence[str]
    chat: bool
    settings: dict[str, Any]
    write: show.Writer


@options.grouped
def generate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help=f"One word is a prompt for the demo model. Of several the first is the model: "
            f"{options.MODEL_HELP} '-' as a prompt reads standard input.",
        ),
    ],
    sampling: options.Sampling,
    drafting: options.Drafting,
    model: options.ModelOptions,
    max_new_tokens: options.MaxNewTokens = 256,
    stop: options.Stop = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Use the model's chat template (the default where it has one), or not.",
        ),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream/--no-stream",
            help="Print the text as it comes, or all of it at the end.",
            rich_help_panel="Output",
        ),
    ] = True,
    stats: options.ShowStats = False,
    as_json: options.AsJson = False,
) -> None:
    """Write text after a prompt, or an answer to it where the model has a chat template.

    The text goes to standard output as it comes. Several prompts run as one batch and are printed
    when all are done.

    Example:  selfspec generate demo "Why is the sky blue?" --max-new-tokens 64 --stats
    """
    name, prompts = split_words(words)
    if drafting.show_drafts and (as_json or not stream or len(prompts) > 1):
        raise OptionError(
            "--show-drafts colours one answer as it comes, so it would do nothing with --json, "
            "--no-stream or several prompts; leave one of them out"
        )
    texts = [read_prompt(prompt) for prompt in prompts]
    settings = common.settings_from(sampling, max_new_tokens, stop, drafting)
    llm = common.open_model(name, model)
    job = Job(
        texts,
        common.has_chat_template(llm) if chat is None else chat,
        settings,
        show.writer(llm, drafting.show_drafts),
    )
    results = run(llm, job, stream=stream and not as_json, as_json=as_json)
    if stats:
        common.print_stats([results[0].call])  # a batch has one cost


def split_words(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The model and the prompts: a word alone is a prompt, unless it can only be a model."""
    if len(words) > 1:
        if " " in words[0] and not os.path.isdir(words[0]):
            raise OptionError(
                f"{words[0]!r} is not a model: with several words the first names the model and "
                "the others are prompts. Put 'demo' before the prompts to run them on the demo "
                "model."
            )
        return words[0], words[1:]
    if words[0] == "demo" or os.path.isdir(words[0]):
        raise PromptError(
            f"{words[0]!r} is a model and there is no prompt for it. Give one: selfspec generate "
            f"{words[0]} 'Hello'"
        )
    return "demo", words


def read_prompt(prompt: str) -> str:
    """`-` means standard input, less the line end that editors and `echo` put last."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text:
        raise PromptError(
            f"the prompt {'on standard input ' if prompt == '-' else ''}is empty: there is nothing "
            "to go on from"
        )
    return text


def run(llm: LLM, job: Job, *, stream: bool, as_json: bool) -> list[Result]:
    """Generate and show."""
    if stream and len(job.prompts) == 1:
        return [stream_one(llm, job)]
    results = generate_all(llm, job)
    for number, (prompt, result) in enumerate(zip(job.prompts, results, strict=True), start=1):
        if as_json:
            typer.echo(json.dumps(as_dict(prompt, result), ensure_ascii=False))
            continue
        if len(results) > 1:
            typer.echo(f"{'' if number == 1 else chr(10)}[{number}] {prompt}")
        typer.echo(result.text)
    return results


def stream_one(llm: LLM, job: Job) -> Result:
    """Write the pieces as they come; leaving early, by Ctrl-C or a closed pipe, stops the work."""
    prompt = job.prompts[0]
    pieces = (
        llm.stream_chat([common.user(prompt)], **job.settings)
        if job.chat
        else llm.stream(prompt, **job.settings)
    )
    with closing(pieces):
        for piece in pieces:
            job.write(piece)
    common.write("\n")
    return pieces.result


def generate_all(llm: LLM, job: Job) -> list[Result]:
    """All prompts in one batch; a single one takes the plain road, so that it is the same call as
    in Python."""
    if len(job.prompts) == 1:
        prompt = job.prompts[0]
        return [
            llm.chat([common.user(prompt)], **job.settings)
            if job.chat
            else llm.generate(prompt, **job.settings)
        ]
    if not job.chat:
        return llm.generate(list(job.prompts), **job.settings)
    return llm.generate(
        [llm.encode_chat([common.user(prompt)]) for prompt in job.prompts], **job.settings
    )


def as_dict(prompt: str, result: Result) -> dict[str, Any]:
    """Everything about a result that JSON can hold."""
    return {
        "prompt": prompt,
        "text": result.text,
        "tokens": list(result.tokens),
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "stats": {**asdict(result.stats), "tokens_per_second": result.stats.tokens_per_second},
    }
