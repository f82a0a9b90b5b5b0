"""The options that commands share, each with its one help text, in groups. Knows no command and
imports nothing of the library.

A group is a dataclass; a command that takes one as a parameter, under `@grouped`, has its fields as
options. Sampling options are None when not given, so that `SamplingParams` alone knows the defaults
and sees contradictions.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from ..errors import OptionError

MODEL_HELP = (
    "'demo' (built in), a folder, or a hub name such as HuggingFaceTB/SmolLM2-360M-Instruct."
)

_option = functools.partial(typer.Option, show_default=True)
_model = functools.partial(_option, rich_help_panel="Model")
_sampling = functools.partial(_option, rich_help_panel="Sampling")
_draft = functools.partial(_option, rich_help_panel="Drafting")
_limit = functools.partial(_option, rich_help_panel="Limits")
_output = functools.partial(_option, rich_help_panel="Output")

Model = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
Threads = Annotated[
    int | None, _model("--threads", min=1, help="CPU threads; torch decides when not given.")
]
MaxNewTokens = Annotated[
    int, _limit("--max-new-tokens", "-n", min=1, help="Write at most this many tokens.")
]
Stop = Annotated[
    list[str] | None,
    _limit("--stop", help="Stop before this text; give it again for more of them."),
]
ShowStats = Annotated[
    bool, _output("--stats", help="Tokens, seconds and memory, on standard error.")
]
AsJson = Annotated[bool, _output("--json", help="Everything as JSON instead, one object a line.")]


@dataclass(frozen=True)
class ModelOptions:
    """How to load a model."""

    dtype: Annotated[str, _model("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, _model("--device", help="auto, cpu, cuda or cuda:N.")] = "auto"
    threads: Threads = None
    kernel: Annotated[
        str,
        _model(
            "--kernel",
            help="Who computes: auto, native (our own kernels: float32 on a CPU), mkl, plain or "
            "static (torch).",
        ),
    ] = "auto"
    weights: Annotated[
        str, _model("--weights", help="How our own kernels store weights: auto or float32.")
    ] = "auto"
    revision: Annotated[
        str | None, _model("--revision", help="Branch, tag or commit of a hub model.")
    ] = None
    token: Annotated[str | None, _model("--token", help="Access token for a gated hub model.")] = (
        None
    )
    adapter: Annotated[
        str,
        _model(
            "--adapter",
            help="How a PEFT adapter is loaded: auto, merge or live (beside the weights).",
        ),
    ] = "auto"
    long_context: Annotated[
        bool,
        _model(
            "--long-context",
            help="Longrope models: texts beyond the length where their frequencies change.",
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        _model(
            "--trust-remote-code", help="Let the model's repository run its own Python code here."
        ),
    ] = False


@dataclass(frozen=True)
class SamplingOptions:
    """What becomes a `SamplingParams`: the same names."""

    temperature: Annotated[
        float | None,
        _sampling("--temperature", "-t", help="0 (the default) is greedy; higher is more varied."),
    ] = None
    top_k: Annotated[int | None, _sampling("--top-k", help="Only the K likeliest tokens.")] = None
    top_p: Annotated[
        float | None, _sampling("--top-p", help="Only the likeliest tokens that add up to P.")
    ] = None
    min_p: Annotated[
        float | None,
        _sampling("--min-p", help="Only tokens at least P times as likely as the likeliest."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling(
            "--repetition-penalty",
            help="Above 1: tokens seen before, in the prompt too, get rarer.",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        _sampling("--presence-penalty", help="Taken once from every token already written."),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _sampling("--frequency-penalty", help="Taken for each time a token was already written."),
    ] = None
    seed: Annotated[
        int | None, _sampling("--seed", help="The same seed samples the same tokens again.")
    ] = None

    def given(self) -> dict[str, float | int]:
        """Only those that were given."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }


@dataclass(frozen=True)
class DraftOptions:
    """How to draft: it changes the speed, never the text."""

    draft: Annotated[
        str,
        _draft(
            "--draft",
            "-d",
            help="A drafter by name (see selfspec drafters); 'auto' learns which pays, 'none' is "
            "plain.",
        ),
    ] = "auto"
    draft_option: Annotated[
        list[str] | None,
        _draft(
            "--draft-option",
            metavar="NAME=VALUE",
            help="An option of the drafter, e.g. layer=10; repeatable.",
        ),
    ] = None
    control: Annotated[
        str | None,
        _draft(
            "--control",
            help="What decides how many tokens to draft, by name (see selfspec drafters).",
        ),
    ] = None
    control_option: Annotated[
        list[str] | None,
        _draft(
            "--control-option",
            metavar="NAME=VALUE",
            help="An option of it, e.g. tokens=6; repeatable.",
        ),
    ] = None
    show_drafts: Annotated[
        bool,
        _draft(
            "--show-drafts",
            help="Colour the text: accepted drafts green, rejected ones red and struck, the "
            "model's own plain.",
        ),
    ] = False

    def settings(self) -> dict[str, Any]:
        """The library's keyword arguments; names are checked there."""
        return {
            "draft": self.draft,
            "draft_options": _pairs(self.draft_option, "--draft-option"),
            "control": self.control,
            "control_options": _pairs(self.control_option, "--control-option"),
        }


def _pairs(texts: list[str] | None, flag: str) -> dict[str, Any]:
    """NAME=VALUE as a mapping: values are read as JSON where they are JSON (numbers, true, lists),
    else as text."""
    found: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionError(
                f"{flag} {text!r} is not NAME=VALUE, so it names no option; write e.g. {flag} "
                f"tokens=6"
            )
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[name.replace("-", "_")] = value
    return found


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a group of options replaced by those options."""
    signature = inspect.signature(command, eval_str=True)
    annotations = {name: each.annotation for name, each in signature.parameters.items()}
    groups: dict[str, Any] = {
        name: kind for name, kind in annotations.items() if dataclasses.is_dataclass(kind)
    }

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(
                **{field.name: values.pop(field.name) for field in dataclasses.fields(group)}
            )
        command(**values)

    parameters: list[inspect.Parameter] = []
    for name, each in signature.parameters.items():
        parameters += (
            _expanded(groups[name])
            if name in groups
            else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        )
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


def _expanded(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
