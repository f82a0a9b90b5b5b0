"""`selfspec generate`: prompts in, text out. Knows how text is asked for and shown, not made."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.json_text import from_json
from ..core.options import MAX_NEW_TOKENS
from ..core.text_rows import read_lines
from ..errors import OptionError, PromptError
from . import common, options, show

if TYPE_CHECKING:
    from ..core.grammar import Grammar
    from ..llm import LLM
    from ..results import Result


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
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
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
    settings["grammar"] = grammar_from(json_schema, regex)
    llm = common.open_model(name, model)
    chat = common.has_chat_template(llm) if chat is None else chat
    if stream and not as_json and len(texts) == 1:
        write = show.writer(llm, drafting.show_drafts)
        result = stream_one(llm, texts[0], chat, write, settings)
    else:
        results = generate_all(llm, texts, chat, settings)
        print_all(texts, results, as_json)
        result = results[0]
    if stats:
        common.print_stats([result.call])  # a batch has one cost


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


def grammar_from(schema: Path | None, pattern: str | None) -> Grammar | None:
    """What the text may be, from a file or a pattern."""
    from ..core.grammar import Grammar

    if schema is not None and pattern is not None:
        raise OptionError("--json-schema and --regex cannot both hold; leave one of them out")
    if schema is None:
        return None if pattern is None else Grammar.regex(pattern)
    try:
        asked = from_json("".join(read_lines(schema)))
    except ValueError as error:
        raise OptionError(
            f"--json-schema: {schema} is not JSON ({error}); write a schema such as "
            '{"type": "object"}'
        ) from error
    if not isinstance(asked, dict):
        raise OptionError(f"--json-schema: {schema} holds no object, as a schema is; write one")
    return Grammar.json_schema(asked)


def read_prompt(prompt: str) -> str:
    """`-` means standard input, less the line end that editors and `echo` put last."""
    common.any_bytes()
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text:
        where = "on standard input " if prompt == "-" else ""
        raise PromptError(f"the prompt {where}is empty, so nothing can follow; write some text")
    return text


def stream_one(
    llm: LLM, prompt: str, chat: bool, write: show.Writer, settings: dict[str, Any]
) -> Result:
    """Write the pieces as they come; leaving early, by Ctrl-C or a closed pipe, stops the work."""
    if chat:
        pieces = llm.stream_chat([common.user(prompt)], **settings)
    else:
        pieces = llm.stream(prompt, **settings)
    with closing(pieces):
        for piece in pieces:
            write(piece)
    common.write("\n")
    return pieces.result


def generate_all(
    llm: LLM, prompts: Sequence[str], chat: bool, settings: dict[str, Any]
) -> list[Result]:
    """All prompts in one batch."""
    if not chat:
        return llm.generate(list(prompts), **settings)
    turns = [[common.user(prompt)] for prompt in prompts]
    if len(turns) == 1:
        return [llm.chat(turns[0], **settings)]
    return llm.generate([llm.encode_chat(turn) for turn in turns], **settings)


def print_all(prompts: Sequence[str], results: Sequence[Result], as_json: bool) -> None:
    """Each result, under its prompt if there are several."""
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True), start=1):
        if as_json:
            typer.echo(json.dumps(as_dict(prompt, result), ensure_ascii=False))
            continue
        if len(results) > 1:
            typer.echo(f"{'' if number == 1 else chr(10)}[{number}] {prompt}")
        typer.echo(result.text)


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
