"""The options that commands share, each with its one help text. Knows no command, no model.

A command that takes a group as a parameter, under `@grouped`, has its fields as options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from ..core.options import value_of
from ..errors import OptionError
from .flags import Flags, Typed, parameters_of, typed

MODEL_HELP = "'demo' (built in), a folder, or a hub name: HuggingFaceTB/SmolLM2-360M-Instruct."
GOES_ON = "An interrupted run goes on with what is there."

_limit = functools.partial(typer.Option, rich_help_panel="Limits")
output = functools.partial(typer.Option, rich_help_panel="Output")
run = functools.partial(typer.Option, rich_help_panel="Run")
_KEYWORD = inspect.Parameter.KEYWORD_ONLY

Model = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL")]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="CPU threads. Without it torch decides.", rich_help_panel="Model"
    ),
]
DataFiles = Annotated[
    list[str],
    typer.Option(
        "--data",
        help="Text to read: JSONL ('text', 'prompt' and 'response', or 'messages'), a text file, a "
        "folder saved by `datasets`, hf:NAME or hf:NAME#CONFIG@SPLIT. Repeatable.",
        rich_help_panel="Data",
    ),
]
MaxNewTokens = Annotated[
    int, _limit("--max-new-tokens", "-n", min=1, help="Write at most this many new tokens.")
]
Stop = Annotated[
    list[str] | None, _limit("--stop", help="Stop before the model writes this text. Repeatable.")
]
JsonSchema = Annotated[
    Path | None,
    _limit("--json-schema", help="Write JSON that fits the schema in this file (llguidance)."),
]
Regex = Annotated[
    str | None, _limit("--regex", help="Write text that this regular expression matches whole.")
]
ShowStats = Annotated[
    bool, output("--stats", help="Print tokens, seconds and memory, on standard error.")
]
AsJson = Annotated[
    bool, output("--json", help="Print JSON instead, one object a line, with everything there is.")
]
Show = Annotated[
    Path | None, output("--show", help="Measure nothing: print the tables of this JSON.")
]
Plot = Annotated[bool, output(help="Draw the result beside its JSON, as PNG (needs matplotlib).")]
Png = Annotated[Path | None, output("--png", help="Draw into this file (needs matplotlib).")]


@dataclass(frozen=True)
class ModelOptions:
    """How to load a model."""

    dtype: str = "auto"
    """Number format to compute in: auto, float32, bfloat16, float16."""
    device: str = "auto"
    """Where the model runs: auto, cpu, cuda or cuda:N."""
    threads: int | None = None
    """CPU threads. Without it torch decides."""
    kernel: str = "auto"
    """Who computes: auto, native (our own kernels: float32 on a CPU), mkl, plain or static
    (torch)."""
    weights: str = "auto"
    """How our own kernels store weights: float32, bfloat16, int8, int4, or stored (as a GGUF, GPTQ,
    AWQ or torchao file has them; the demo's own too). auto: stored for such files, else float32."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    token: str | None = None
    """Token for gated hub models."""
    adapter: str = "auto"
    """PEFT adapters: auto, merge, or live (beside the weights)."""
    long_context: bool = False
    """Run longrope models as if all texts were long."""
    trust_remote_code: bool = False
    """Let the model's repository run its code here."""
    profile: str = "auto"
    """What to begin drafting with: a file that selfspec tune wrote, the name of a task that it was
    told here, none, or auto: what it left here for this model."""


@dataclass(frozen=True)
class DraftOptions:
    """How to draft: it changes the speed, never the text."""

    draft: str = "auto"
    """The drafter, by name (selfspec drafters lists them). 'auto' learns which one pays here,
    'none' is plain decoding."""
    draft_option: Sequence[str] = ()
    """An option of the drafter as NAME=VALUE, e.g. layer=10."""
    control: str | None = None
    """The controller, by name (selfspec drafters lists them). It decides how much to draft."""
    control_option: Sequence[str] = ()
    """An option of the controller as NAME=VALUE, e.g. tokens=6."""
    show_drafts: bool = False
    """Colour the text: accepted drafts green, rejected ones red, the model's own tokens plain.
    Without colours rejected ones stand [-like this-]."""

    def settings(self) -> dict[str, Any]:
        """The library's keyword arguments; names are checked there."""
        return {
            "draft": self.draft,
            "draft_options": _pairs(self.draft_option, "--draft-option"),
            "control": self.control,
            "control_options": _pairs(self.control_option, "--control-option"),
        }


def _pairs(texts: Iterable[str], flag: str) -> dict[str, Any]:
    """NAME=VALUE as a mapping."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionError(
                f"{flag} {text!r} is not NAME=VALUE, so it names no option; write {flag} tokens=6"
            )
        options[name.replace("-", "_")] = value_of(value)
    return options


Loading = Annotated[ModelOptions, Flags("cli.options:ModelOptions", "Model")]
Sampling = Annotated[
    Typed, Flags("core.sampling:SamplingParams", "Sampling", without=("logit_bias",))
]
Drafting = Annotated[DraftOptions, Flags("cli.options:DraftOptions", "Drafting")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that stands for a group of options replaced by those options.

    A group is `Annotated[kind, Flags(...), ...]`, with the flags of one or more classes. The
    command gets a `Typed`, or what was typed as `kind`.
    """
    signature = inspect.signature(command, eval_str=True)
    parameters = [inspect.Parameter("context", _KEYWORD, annotation=typer.Context)]
    groups: dict[str, list[Flags]] = {}
    for name, parameter in signature.parameters.items():
        notes = getattr(parameter.annotation, "__metadata__", ())
        if flags := [note for note in notes if isinstance(note, Flags)]:
            groups[name] = flags
        parameters += parameters_of(flags) or [parameter.replace(kind=_KEYWORD)]

    @functools.wraps(command)
    def flat(context: typer.Context, **values: Any) -> None:
        for name, flags in groups.items():
            fields = {field for group in flags for field in group.fields}
            own = {field: values.pop(field) for field in fields}
            given = {field: value for field, value in own.items() if _given(field, context)}
            kind, found = get_args(signature.parameters[name].annotation)[0], typed(given, flags)
            values[name] = found if kind is Typed else found.make(kind)
        command(**values)

    # what typer reads
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {option.name: option.annotation for option in parameters}
    return flat


def _given(name: str, context: typer.Context) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
