"""What a request may say, as pydantic models of our own. What is in them is used, and what is not
is answered with its name; a few fields that clients send by habit are ignored on purpose.

Knows no model: what depends on one (lengths, token ids) is checked in `asked`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ..control.registry import controller_names
from ..errors import nearest
from .settings import DRAFTS

MOST_LOGPROBS = 20
_STOPS = 16  # strings of one request

# Fields that have no meaning here and whose absence nobody would notice in the answer.
IGNORED = frozenset(
    {
        "include_reasoning", "metadata", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "reasoning_effort", "safety_identifier", "separate_reasoning",
        "service_tier", "store", "stream_reasoning", "user", "verbosity",
    }
)  # fmt: skip

Stop = Annotated[str, Field(min_length=1, max_length=256)]
Token = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _only(value: bool) -> AfterValidator:
    """One of the two; `Literal` would take 0 for false."""

    def checked(asked: bool) -> bool:
        if asked is not value:
            raise ValueError(f"it is always {str(value).lower()} here; leave it out")
        return asked

    return AfterValidator(checked)


Yes = Annotated[bool, _only(True), WithJsonSchema({"type": "boolean", "const": True})]
No = Annotated[bool, _only(False), WithJsonSchema({"type": "boolean", "const": False})]


class Fields(BaseModel):
    """Strict: a number in quotes is no number, and a field that is not there is an error."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class SelfspecFields(Fields):
    """How to draft. It changes the speed, never the text."""

    draft: str | None = None
    """The drafter; "none" is plain decoding. Without it, the server's."""
    control: str | None = None
    """The controller, for drafters that do not decide themselves how much to draft."""
    most: Annotated[int, Field(ge=1, le=64)] | None = None
    """Most tokens to draft in one round."""
    stats: bool = False
    """Report what drafts did, in a field `selfspec` of the answer and of every chunk."""
    resume: Annotated[list[Token], Field(min_length=1)] | None = None
    """Tokens of the answer that another server has given: go on behind them."""

    @field_validator("draft")
    @classmethod
    def _known_draft(cls, name: str | None) -> str | None:
        return _among(name, DRAFTS, "drafter")

    @field_validator("control")
    @classmethod
    def _known_control(cls, name: str | None) -> str | None:
        return _among(name, controller_names(), "controller")


def _among(name: str | None, names: Any, what: str) -> str | None:
    if name is not None and name not in names:
        raise ValueError(f"there is no {what} {name!r} for requests; {nearest(name, names)}")
    return name


class StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # ignored: nothing is obfuscated


def _habits(schema: dict[str, Any]) -> None:
    """The description names what is ignored as well: it is no mistake to send it."""
    said = "Ignored: nothing here depends on it."
    schema["properties"] |= {name: {"description": said} for name in sorted(IGNORED)}


class Asking(Fields):
    """What both kinds of requests have in common."""

    model_config = ConfigDict(json_schema_extra=_habits)

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=_STOPS)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=256)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    selfspec: SelfspecFields | None = None
    response_format: dict[str, Any] | None = None
    # vllm-router writes these into every request. Taken is the one value that is so here anyway.
    no_stop_trim: No | None = None
    return_hidden_states: No | None = None
    skip_special_tokens: Yes | None = None

    ignored: ClassVar[frozenset[str]] = IGNORED

    @model_validator(mode="before")
    @classmethod
    def _without_habits(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: value for name, value in values.items() if name not in cls.ignored}

    @model_validator(mode="after")
    def _streams(self) -> Asking:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belong to a stream; leave them out, or set stream")
        return self


class Part(Fields):
    """A part of a message's content. Text only: there is no model here that reads anything else."""

    type: Annotated[str, Field(json_schema_extra={"enum": ["text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("type") not in ("text", "refusal"):
            raise ValueError(
                f"content of type {str(values.get('type'))[:40]!r} cannot be read: this server "
                "reads text"
            )
        return values

    @property
    def words(self) -> str:
        return self.text or self.refusal or ""


class Message(Fields):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None  # what OpenAI's answers carry, sent back by clients
    audio: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        said = (self.content, self.refusal, self.tool_calls, self.function_call)
        if all(each is None for each in said):
            raise ValueError(
                f"this message of role {self.role!r} has no content; give it some text"
            )
        return self

    @property
    def words(self) -> str:
        """The text of the content."""
        if isinstance(self.content, list):
            return "".join(part.words for part in self.content)
        return self.content or self.refusal or ""


class ChatRequest(Asking):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    continue_final_message: No | None = None

    @model_validator(mode="after")
    def _asks_for_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true beside it")
        return self


class CompletionRequest(Asking):
    """The body of /v1/completions."""

    prompt: str | list[Token] | list[str] | list[list[Token]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _takes_all(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not done here: all answers are handed out")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not done here: prompts are not scored")
        return self


class TokenizeRequest(Fields):
    """The body of /tokenize: text, or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": [name], "properties": {name: {"type": kind}}}
                for name, kind in (("prompt", "string"), ("messages", "array"))
            ]
        }
    )

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of them")
        return self


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[Token]


BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
