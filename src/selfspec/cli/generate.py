"""`selfspec generate`: prompts in, text out. Knows how text is asked for and shown, not made."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.options import MAX_NEW_TOKENS
from ..errors import OptionError, PromptError
from . import common, options, show

if TYPE_CHECKING:
    from ..llm import LLM
    from ..results import Result


@dataclass(frozen=True)
class Job:
    """The prompts, whether they are turns of a conversation, and the library's arguments."""

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
            help="One word is a prompt for the demo model. Of several the first is the model: "
            f"{options.MODEL_HELP} '-' as a prompt reads standard input.",
        ),
    ],
    sampling: options.Sampling,
    drafting: options.Drafting,
    model: options.Loading,
    max_new_tokens: options.MaxNewTokens = MAX_NEW_TOKENS,
    stop: options.Stop = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Use the chat template, or not. By default if there is one."
        ),
    ] = None,
    stream: Annotated[
        bool,
        options.output("--stream/--no-stream", help="Print text as it comes, or all at the end."),
    ] = True,
    stats: options.ShowStats = False,
    as_json: options.AsJson = False,
) -> None:
    """Write text after a prompt, or an answer to it where the model has a chat template.

    Text goes to standard output as it comes. Several prompts run as a batch, printed at the end.

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
    chat = common.has_chat_template(llm) if chat is None else chat
    job = Job(texts, chat, settings, show.writer(llm, drafting.show_drafts))
    results = run(llm, job, stream=stream and not as_json, as_json=as_json)
    if stats:
        common.print_stats([results[0].call])  # a batch has one cost


def split_words(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The model and the prompts: a word alone is a prompt, unless it can only be a model."""
    if len(words) > 1:
        if " " in words[0] and not os.path.isdir(words[0]):
            raise OptionError(
                f"{words[0]!r} is not a model, and of several words the first has to be one; put "
                "'demo' before the prompts to run them on the demo model"
            )
        return words[0], words[1:]
    if words[0] == "demo" or os.path.isdir(words[0]):
        remedy = f"write selfspec generate {words[0]} 'Hello'"
        raise PromptError(f"{words[0]!r} is a model and there is no prompt for it; {remedy}")
    return "demo", words


def read_prompt(prompt: str) -> str:
    """`-` means standard input, less the line end that editors and `echo` put last."""
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text:
        where = "on standard input " if prompt == "-" else ""
        raise PromptError(f"the prompt {where}is empty, so nothing can follow; write some text")
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
    if job.chat:
        pieces = llm.stream_chat([common.user(prompt)], **job.settings)
    else:
        pieces = llm.stream(prompt, **job.settings)
    with closing(pieces):
        for piece in pieces:
            job.write(piece)
    common.write("\n")
    return pieces.result


def generate_all(llm: LLM, job: Job) -> list[Result]:
    """All prompts in one batch."""
    if not job.chat:
        return llm.generate(list(job.prompts), **job.settings)
    turns = [[common.user(prompt)] for prompt in job.prompts]
    if len(turns) == 1:
        return [llm.chat(turns[0], **job.settings)]
    return llm.generate([llm.encode_chat(turn) for turn in turns], **job.settings)


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
