"""LLM: a model with its tokenizer. generate, stream, chat: text in, text out.

Knows tokenizers, stop strings, chat templates and caches kept between turns. Does not know how
tokens are drafted or verified.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch

from .call import Call, Defaults, Options, Stream, options_among, requests_of
from .control.base import Controller
from .core import door, template
from .core.grammar import Asked, Grammars
from .core.machine import this_machine
from .core.options import MAX_NEW_TOKENS
from .core.sampling import SamplingParams
from .core.text_stream import RowText
from .draft.base import Drafter
from .draft.registry import DEFAULT as AUTO
from .engine.chat_cache import ChatCaches
from .engine.generation import Generation
from .engine.row import Request
from .errors import OptionError, PromptError, Unavailable
from .model.compute.cpu.native import give_back
from .model.layered import LayeredModel
from .model.load.words import Words
from .model.measuring import product_modules, still_float32, weight_bytes
from .model.opening import lies_in, opened
from .model.operations import check_weights
from .profile import Profile, profile_for
from .results import ModelInfo, Result

if TYPE_CHECKING:
    from transformers import (
        LogitsProcessor,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        StoppingCriteria,
    )

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
LONG = 64  # tokens of an answer beside which handing memory back to the system takes no time


class LLM:
    """A Hugging Face model, run by layers. Made by `from_pretrained`.
    Calls from several threads are safe: their steps take turns on the model, each with its cache.
    """

    def __init__(
        self,
        model: LayeredModel,
        tokenizer: PreTrainedTokenizerBase | Words | None,
        name: str,
        generation_config: Any = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.profile: Profile | None = None
        """What a tuning found for this model here: what "auto" begins with."""
        self.words: Any = tokenizer
        """What reads and writes text: the tokenizer, or its stand-in that starts faster."""
        self.grammars = Grammars(tokenizer, model.shape.vocabulary)
        self._name = name
        self._notes = notes
        self._lock = threading.RLock()
        self._chats = ChatCaches()
        self.eos = door.own_ends(generation_config, tokenizer)
        """Tokens that end a text, by the model's own files."""
        penalty = getattr(generation_config, "repetition_penalty", None)
        self.default_sampling = SamplingParams(
            repetition_penalty=1.0 if penalty is None else penalty
        )

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel = "demo",
        *,
        revision: str | None = None,
        token: str | None = None,
        trust_remote_code: bool = False,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | Mapping[str, Any] = "auto",
        threads: int | None = None,
        kernel: str = "auto",
        weights: str = "auto",
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapter: str = "auto",
        long_context: bool = False,
        profile: str | Path | None = "auto",
    ) -> LLM:
        """Load a model.

        `model`: "demo" (SmolLM2-135M-Instruct, fetched once), a local folder, a name on the Hugging
        Face hub, or a live model, left untouched. A PEFT adapter is loaded with its base; `adapter`
        says how: "merge" (into the weights), "live" (beside them, see `without_adapters`), or
        "auto": merged, but live where weights are quantised. `dtype` "auto" is float32 on a CPU,
        where output is bit-identical however it is computed, and the checkpoint's own on a GPU.
        `device` may be a map that names one device for all. `threads`: torch's, for the whole
        process. `long_context`: longrope models read all texts by the frequencies of long ones.
        `profile`: a file of `selfspec tune`, a task's name it was told here, None, or "auto", what
        it left here for this model. `kernel` says who computes: "auto", or one to insist on.
        "native": our kernels, float32 on a CPU. "mkl", "plain": torch. "static": torch by steps
        that a GPU records. `weights` says how our kernels store weights: "float32", "bfloat16",
        "int8" or "int4", of which fewer bits change the model; or "stored": as a GGUF file or a
        GPTQ, AWQ or torchao checkpoint has them, as the demo's. "auto" is "stored" for such files,
        else float32. Where torch computes, weights are stored in `dtype`. See `selfspec info`.
        """
        for name, value in (("kernel", kernel), ("weights", weights), ("adapter", adapter)):
            door.word(name, value)
        for name, text in (("revision", revision), ("token", token)):
            door.word(name, "" if text is None else text)
        check_weights(weights)
        door.switch("trust_remote_code", trust_remote_code)
        door.switch("long_context", long_context)
        use_threads(threads)
        found = opened(
            model,
            revision=revision,
            token=token,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            device=device,
            tokenizer=tokenizer,
            adapter=adapter,
            kernel=kernel,
            weights=weights,
            long_context=long_context,
        )
        give_back()  # what reading and packing left: 15 MB for the demo
        lies_in(found.layered, model)
        llm = cls(found.layered, found.tokenizer, found.name, found.generation_config, found.notes)
        llm.profile = profile_for(llm.model, profile, this_machine(), llm.info.weights)
        return llm

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Transformers' tokenizer. None: the model came without."""
        found: PreTrainedTokenizerBase | None = self.words
        if isinstance(self.words, Words):  # transformers is imported now
            found = self.words.whole
        return found

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.words = tokenizer
        self.grammars = Grammars(tokenizer, self.model.shape.vocabulary)

    @property
    def info(self) -> ModelInfo:
        """What was loaded and how it runs here."""
        model, shape = self.model, self.model.shape
        dtype = str(model.dtype).removeprefix("torch.")
        return ModelInfo(
            name=self._name,
            family=shape.family,
            layers=shape.layers,
            parameters=model.parameters,
            context=shape.context,
            vocabulary=shape.vocabulary,
            weight_bytes=weight_bytes(model),
            kernel=model.ops.kernel,
            weights=model.ops.weights or dtype,
            notes=[*self._notes, *still_float32(model)],
            alone=model.alone,
            modules=list(product_modules(model)),
            row_stable=model.row_stable,
            dtype=dtype,
            device=str(model.device),
            threads=torch.get_num_threads(),
            recorded=model.steps.status,
        )

    def without_adapters(self) -> LLM:
        """The same model without its live adapters. Both can be used at the same time."""
        return self.view(self.model.without_adapters)

    def view(self, model: LayeredModel) -> LLM:
        """The same over another view of the model. Both take turns on their weights."""
        other = copy(self)
        other.model, other._chats = model, ChatCaches()
        return other

    @overload
    def generate(self, prompts: str | list[int], **options: Unpack[Options]) -> Result: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], **options: Unpack[Options]
    ) -> list[Result]: ...
    def generate(
        self,
        prompts: Any,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: str | Sequence[str] | None = None,
        eos: Sequence[int] | None = None,
        draft: str | Drafter | None = "auto",
        draft_options: Mapping[str, Any] | None = None,
        control: str | Controller | None = None,
        control_options: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        grammar: Asked = None,
        **unknown: Any,
    ) -> Any:
        """Continue a prompt (a string or a list of token ids), or each of a list of them.

        Options, the same for `stream`, `chat` and `stream_chat`:

        - `sampling`: a `SamplingParams`, or one for each prompt. None is greedy, with the
          repetition penalty that the model's own generation config asks for. With a seed, prompt i
          of a list uses seed + i.
        - `stop`: strings to stop before. `eos`: ids to stop at instead of the model's own, [] for
          none.
        - `draft`: a drafter or its name. "auto" learns which one pays, None is plain decoding.
          `draft_options`: the options of a named one.
        - `control`: a controller, which decides how much to draft, or its name.
          `control_options`: the options of a named one.
        - `logprobs`: report each token's log-probability and those of this many alternatives.
        - `logits_processors`, `stopping_criteria`: Hugging Face's, called with a row's full ids.
        - `grammar`: what the text may be and where it ends: a dict (a JSON schema), a `Grammar`, or
          a list with one for each prompt.
        """
        options = options_among(locals())
        asked, single = door.prompts(prompts)
        results = self._start(asked, options).finish()
        if sum(len(result.tokens) for result in results) >= LONG:
            give_back()  # its cache, and what else it took: up to 24 MB for the demo
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: str | Sequence[str] | None = None,
        eos: Sequence[int] | None = None,
        draft: str | Drafter | None = "auto",
        draft_options: Mapping[str, Any] | None = None,
        control: str | Controller | None = None,
        control_options: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        grammar: Asked = None,
        **unknown: Any,
    ) -> Stream:
        """Continue one prompt, piece by piece, with the options of `generate`. Text that could
        become a stop string is held back."""
        options = options_among(locals())
        asked, single = door.prompts(prompt)
        if not single:
            raise OptionError("a stream has one prompt; call stream for each, they may interleave")
        return Stream(self._start(asked, options))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: str | Sequence[str] | None = None,
        eos: Sequence[int] | None = None,
        draft: str | Drafter | None = "auto",
        draft_options: Mapping[str, Any] | None = None,
        control: str | Controller | None = None,
        control_options: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        grammar: Asked = None,
        **unknown: Any,
    ) -> Result:
        """Answer a conversation of {"role": ..., "content": ...} messages by the chat template.

        What a following turn shares with an earlier one is not computed again.
        """
        return self._start_chat(messages, options_among(locals())).finish()[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: str | Sequence[str] | None = None,
        eos: Sequence[int] | None = None,
        draft: str | Drafter | None = "auto",
        draft_options: Mapping[str, Any] | None = None,
        control: str | Controller | None = None,
        control_options: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        grammar: Asked = None,
        **unknown: Any,
    ) -> Stream:
        """Answer a conversation, piece by piece."""
        return Stream(self._start_chat(messages, options_among(locals())))

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> list[int]:
        """A conversation as token ids, ready for the answer. `tools`: for its template."""
        tokenizer = self._need_tokenizer("a conversation")
        if not tokenizer.chat_template:
            raise OptionError(
                f"{self._name} has no chat template, so it cannot chat; use generate with a prompt "
                "of your own"
            )
        text = template.written(tokenizer, door.messages(messages), opening=True, tools=tools)
        return self._known(template.ids_of(tokenizer, text))

    def _start_chat(self, messages: Sequence[Message], options: Options) -> Call:
        return self._start([self.encode_chat(messages)], options, self._chats)

    def _start(
        self, prompts: Sequence[Prompt], options: Options, chats: ChatCaches | None = None
    ) -> Call:
        requests, texts = self.prepared(prompts, options)
        cache = chats.take(requests[0].prompt) if chats else None
        generation = self.generation(cache=cache, rows=len(requests))
        return Call(generation, requests, texts, chats)

    def generation(self, **how: Any) -> Generation:
        """Rows of this model's, none so far. Its steps take turns with those of all calls."""
        return Generation(self.model, lock=self._lock, **how)

    def prepared(
        self, prompts: Sequence[Prompt], options: Options
    ) -> tuple[list[Request], list[RowText]]:
        """What these options ask of the engine, and where each prompt's new text is gathered."""
        own = Defaults(self.words, self.eos, self.default_sampling, self.grammars)
        ids = [self.encode(prompt) for prompt in prompts]
        asked = Options(**{**options, "draft": self._drafter(options)})
        return requests_of(ids, asked, own, self.model.shape.vocabulary)

    def _drafter(self, options: Options) -> str | Drafter | None:
        """Who drafts. Where a profile is known, "auto" without options begins with that."""
        asked = options["draft"]
        named = isinstance(asked, str) and asked == AUTO
        if not named or options["draft_options"] or self.profile is None:
            return asked
        return self.model.once((Profile, self.profile.text), self.profile.drafter)

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt as token ids. Ids stay what they are."""
        asked = door.prompt(prompt)
        if isinstance(asked, str):
            asked = list(self._need_tokenizer("a text prompt")(asked)["input_ids"])
        return self._known(asked)

    def _known(self, ids: list[int]) -> list[int]:
        """Token ids that the model has."""
        outside = [token for token in ids if not 0 <= token < self.model.shape.vocabulary]
        if outside:
            raise PromptError(
                f"token {outside[0]} is outside the model's vocabulary of "
                f"{self.model.shape.vocabulary}; was it made with another tokenizer?"
            )
        return ids

    def _need_tokenizer(self, purpose: str) -> Any:
        if self.words is None:
            raise Unavailable(
                f"{self._name} was loaded without a tokenizer, so {purpose} cannot be read; pass "
                "tokenizer=..., or token ids"
            )
        return self.words


def use_threads(threads: int | None) -> None:
    """Compute with so many threads, in the whole process. None changes nothing."""
    if threads is not None:
        remedy = "more would only wait for each other; leave it out, and torch decides"
        torch.set_num_threads(door.whole("threads", threads, 1, remedy, door.THREADS))
