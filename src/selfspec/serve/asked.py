"""From a request's body to what the engine is asked for. Knows the model's words, no HTTP."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..call import Options
from ..control.base import Controller
from ..core import door
from ..core.grammar import Grammar
from ..core.sampling import SamplingParams
from ..core.text_stream import RowText
from ..draft.base import Drafter
from ..draft.registry import DEFAULT as AUTO
from ..draft.registry import make_drafter, resolve
from ..engine.row import Request
from ..errors import OptionError, PromptError, Unavailable
from ..profile import Profile
from .problems import Problem
from .resuming import FIELD, resumed
from .schemas import Asking, ChatRequest, CompletionRequest, Message, SelfspecFields
from .tools import ToolUse, for_template, format_of, grammar_of, grammar_of_format, tool_use

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .worker import Worker

NO_TOOLS = ToolUse()
SHORT = 16  # new tokens of a completion that does not say how many, as OpenAI has it


@dataclass(frozen=True)
class Asked:
    """The answers that a request wants, each with the text in front of it (echo)."""

    requests: Sequence[Request]
    texts: Sequence[RowText]
    echoes: Sequence[str]
    body: Asking
    tools: ToolUse
    given: Sequence[int] = ()
    """Tokens of the one answer that came from another server."""
    shown: str = ""
    """Their text, as far as it was certain."""

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once however many answers it gets."""
        prompts = [len(each.prompt) for each in self.requests[:: self.body.n or 1]]
        return sum(prompts) - len(self.given)


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for a chat template. `developer` is the newer name of `system`."""
    return for_template([_turn(each) for each in messages])


def _turn(message: Message) -> dict[str, Any]:
    role = {"developer": "system"}.get(message.role, message.role)
    turn: dict[str, Any] = {"role": role, "content": message.words}
    for name in ("name", "tool_calls", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    return turn


def chat(worker: Worker, body: ChatRequest, draft: str) -> Asked:
    """What a conversation asks for."""
    try:
        tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    except OptionError as error:  # which begins with the field's name
        param = "tool_choice" if str(error).startswith("tool_choice") else "tools"
        raise Problem(str(error), param=param) from error
    with _at("messages"):
        ids = worker.llm.encode_chat(conversation(body.messages), tools=tools.for_template)
    most = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _asked(worker, body, [ids], most, logprobs, draft, [""], tools)


def completion(worker: Worker, body: CompletionRequest, draft: str) -> Asked:
    """What a text, or several, asks for."""
    with _at("prompt"):
        ids = [worker.llm.encode(each) for each in _prompts(body.prompt)]
    echoes = [""] * len(ids)
    if body.echo:
        echoes = [_echo(worker, each, tokens) for each, tokens in _pairs(body, ids)]
    return _asked(worker, body, ids, body.max_tokens or SHORT, body.logprobs, draft, echoes)


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise PromptError("the prompt is empty; give at least one token")
    return list(prompt)


def _pairs(body: CompletionRequest, ids: Sequence[list[int]]) -> list[tuple[Any, list[int]]]:
    return list(zip(_prompts(body.prompt), ids, strict=True))


def ids_of(worker: Worker, text: str, special: bool = True) -> list[int]:
    """Text as token ids. `special`: with those that the tokenizer puts around a text."""
    words = worker.llm.words
    if special or words is None:
        return worker.llm.encode(text)
    return list(words(door.text(text, "the prompt"), add_special_tokens=False)["input_ids"])


def text_of(worker: Worker, tokens: Sequence[int]) -> str:
    """What token ids say."""
    _known(worker, tokens, "tokens")
    words = worker.llm.words
    if words is None:
        raise Unavailable("the model was loaded without a tokenizer, so there is no text")
    text: str = words.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def _echo(worker: Worker, prompt: Any, tokens: Sequence[int]) -> str:
    """A prompt as it is echoed: as it came, or what its tokens say."""
    return prompt if isinstance(prompt, str) else text_of(worker, tokens)


def _asked(
    worker: Worker,
    body: Asking,
    prompts: Sequence[list[int]],
    most: int | None,
    logprobs: int | None,
    draft: str,
    echoes: Sequence[str],
    tools: ToolUse = NO_TOOLS,
) -> Asked:
    count = body.n or 1
    grammar = _grammar(worker, body, tools)
    if len(prompts) * count > worker.limits.choices:
        raise Problem(
            f"{len(prompts)} prompts with n={count} are {len(prompts) * count} answers, and one "
            f"request may have {worker.limits.choices}; send several requests",
            param="n",
        )
    requests: list[Request] = []
    texts: list[RowText] = []
    for ids in prompts:
        options = _options(worker, body, _room(worker, ids, most), logprobs, draft)
        options["grammar"] = grammar
        with _at("response_format" if body.response_format else "tools"):
            made, text = worker.llm.prepared([ids] * count, options)
        requests += made
        texts += text
    for request in requests:
        worker.check(request)
    echoed = [each for each in echoes for _ in range(count)]
    given = body.selfspec.resume if body.selfspec else None
    if given is None:
        return Asked(requests, texts, echoed, body, tools)
    if len(requests) > 1:
        said = f"{FIELD} goes on with one answer, and {len(requests)} are asked for; ask for one"
        raise Problem(said, param=FIELD)
    _known(worker, given, FIELD)
    request, shown = resumed(requests[0], texts[0], given)
    return Asked([request], texts, echoed, body, tools, given, shown)


def _grammar(worker: Worker, body: Asking, tools: ToolUse) -> Grammar | None:
    """What the answer has to be: a call where one is required, else what its format says."""
    with _at("response_format"):
        found = grammar_of_format(body.response_format)
    if not tools.forced:
        return found
    words = worker.llm.words
    return grammar_of(tools, format_of(str(words.chat_template) if words else None))


def _room(worker: Worker, prompt: Sequence[int], most: int | None) -> int:
    """How many tokens may come, which is all that there is room for if nobody says."""
    if not prompt:
        raise Problem("the prompt is empty; give at least one token", param="prompt")
    room = worker.context - len(prompt)
    if room < 1:
        raise Problem(
            f"the prompt has {len(prompt)} tokens and the context of this server is "
            f"{worker.context}, so nothing could be added; shorten the prompt",
            code="context_length_exceeded",
        )
    return room if most is None else most


def _options(worker: Worker, body: Asking, most: int, logprobs: int | None, draft: str) -> Options:
    made = drafting(worker, body.selfspec or SelfspecFields(), draft)
    return options_of(made, _sampling(worker, body), most, body.stop, _ends(worker, body), logprobs)


def options_of(
    made: tuple[Drafter | None, Controller | None],
    sampling: SamplingParams,
    most: int,
    stop: str | Sequence[str] | None,
    ends: Sequence[int] | None,
    logprobs: int | None,
) -> Options:
    """What the engine is asked by a drafter and a controller that are made."""
    return Options(
        sampling=sampling,
        max_new_tokens=most,
        stop=stop,
        eos=ends,
        draft=made[0],
        draft_options=None,
        control=made[1],
        control_options=None,
        logprobs=logprobs,
        logits_processors=(),
        stopping_criteria=(),
        grammar=None,
    )


def _sampling(worker: Worker, body: Asking) -> SamplingParams:
    """OpenAI's defaults: temperature 1. At temperature 0 what only sampling knows is left out, as
    clients send it by habit."""
    penalty = worker.llm.default_sampling.repetition_penalty
    if body.repetition_penalty is not None:
        penalty = body.repetition_penalty
    options: dict[str, Any] = {
        "repetition_penalty": penalty,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "min_new_tokens": body.min_tokens or 0,
        "logit_bias": _bias(worker, body),
        "temperature": 1.0 if body.temperature is None else body.temperature,
    }
    if options["temperature"]:
        options |= {
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_k": max(0, body.top_k or 0),
            "min_p": body.min_p or 0.0,
            "seed": None if body.seed is None else body.seed % 2**63,
        }
    with _at("temperature"):  # all others are within their limits by now
        return SamplingParams(**options)


def _bias(worker: Worker, body: Asking) -> dict[int, float]:
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    _known(worker, bias, "logit_bias")
    return bias


def _ends(worker: Worker, body: Asking) -> list[int] | None:
    """Tokens to stop at. None: the model's own."""
    if not body.ignore_eos and not body.stop_token_ids:
        return None
    _known(worker, body.stop_token_ids or [], "stop_token_ids")
    return [*(() if body.ignore_eos else worker.llm.eos), *(body.stop_token_ids or [])]


def _known(worker: Worker, tokens: Any, param: str) -> None:
    vocabulary = worker.llm.model.shape.vocabulary
    for token in tokens:
        if token >= vocabulary:
            raise Problem(
                f"{param} names token {token}, and the vocabulary ends at {vocabulary - 1}; leave "
                "it out",
                param=param,
            )


def drafting(
    worker: Worker, how: SelfspecFields, default: str
) -> tuple[Drafter | None, Controller | None]:
    """Who drafts, and how much. Where a tuning has left a profile, "auto" begins with that."""
    name, profile, model = how.draft or default, worker.llm.profile, worker.llm.model
    with _at("selfspec"):
        found = _resolved(name, how.control, how.most)
    if name != AUTO or profile is None:
        return found
    own = {} if how.most is None else {"most": how.most}
    return model.once((Profile, profile.text, how.most), lambda: profile.drafter(**own)), None


@functools.lru_cache(maxsize=256)
def _resolved(
    draft: str, control: str | None, most: int | None
) -> tuple[Drafter | None, Controller | None]:
    """The same objects for the same words: rows of equal ones draft together, and `auto` goes on
    with what it has learned."""
    own = {"most": most} if draft == "auto" and most is not None else {}
    drafter = make_drafter(draft, own)
    if drafter is None or drafter.decides_how_much:
        return resolve(drafter, None, control, None)
    name = control or "cost-aware"
    field = "most" if name == "cost-aware" else "tokens"
    return resolve(drafter, None, name, {} if most is None else {field: most})


@contextmanager
def _at(param: str) -> Iterator[None]:
    """Errors of the library are about this field."""
    try:
        yield
    except (OptionError, PromptError) as error:
        raise Problem(str(error), param=param) from error
