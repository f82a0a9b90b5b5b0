"""LLM: a model with its tokenizer. generate, stream, chat: text in, text out, over the engine's
steps.

Knows tokenizers, stop strings, chat templates and caches kept between turns; does not know how
tokens are drafted or verified.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import torch

from .control.base import Controller
from .core.contract import Request
from .core.sampling import SamplingParams, TokenLogprob, row_samplers
from .core.text_stream import CriteriaCheck, RowText
from .draft.auto import resolve
from .draft.base import Drafter
from .engine.chat_cache import Turns
from .engine.generation import Generation
from .errors import OptionError, PromptError, Unavailable, nearest
from .model.compute.memory import weights_too_large
from .model.layered import LayeredModel
from .model.load.loading import load
from .model.operations import check_weights
from .results import ModelInfo, Piece, Result

if TYPE_CHECKING:
    from transformers import (
        LogitsProcessor,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        StoppingCriteria,
    )

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class Options(TypedDict, total=False):
    """What `generate`, `stream`, `chat` and `stream_chat` can be told; `LLM.generate` explains
    each."""

    sampling: SamplingParams | Sequence[SamplingParams] | None
    max_new_tokens: int
    stop: str | Sequence[str] | None
    eos: Sequence[int] | None
    draft: str | Drafter | None
    draft_options: Mapping[str, Any]
    control: str | Controller | None
    control_options: Mapping[str, Any]
    logprobs: int | None
    logits_processors: Sequence[LogitsProcessor]
    stopping_criteria: Sequence[StoppingCriteria]


class Stream:
    """Pieces of text as they are made. Iterate; `close()` (or leaving a `with`) stops the work;
    `result` is there at the end, or, after closing early, tells what was made until then is gone:
    it raises."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._pieces = run.pieces()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating. Nothing is computed after this."""
        self._pieces.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def result(self) -> Result:
        """The whole result, once the stream is exhausted."""
        if self._run.results is None:
            raise OptionError(
                "the stream has not ended, so it has no result yet; iterate to its end first"
            )
        return self._run.results[0]


class LLM:
    """A Hugging Face model, run by layers. Made by `from_pretrained`.

    Calls from several threads are safe: steps of different calls take turns on the model, each on a
    cache of its own.
    """

    def __init__(
        self,
        model: LayeredModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        generation_config: Any = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._name = name
        self._lock = threading.RLock()
        self._turns = Turns()
        self._eos = _eos_tokens(generation_config, tokenizer)
        penalty = getattr(generation_config, "repetition_penalty", None)
        self._default_sampling = SamplingParams(repetition_penalty=penalty or 1.0)

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
    ) -> LLM:
        """Load a model.

        `model`: "demo" (SmolLM2-135M-Instruct, fetched once), a local folder, a name on the Hugging
        Face hub, or a live model, which is left untouched. A PEFT adapter is loaded with its base;
        `adapter` says how: "merge" (into the weights), "live" (beside them, see
        `without_adapters`), or "auto": merged, but live where weights are quantised. `dtype` "auto"
        is float32 on a CPU, where output is bit-identical however it is computed, and the
        checkpoint's own on a GPU. `device` may be a device map that names one device for all.
        `threads` sets torch's thread count, which is one for the whole process.
        `long_context`: for longrope models, all texts by the frequencies of long ones.

        `kernel` says who computes: "auto", or one to insist on. "native": our own kernels, float32
        on a CPU. "mkl", "plain": torch. "static": torch by steps of a fixed shape, which a GPU
        records. `weights` says how our own kernels store weights: "auto", or "float32" to insist
        on it. Where torch computes, weights are stored in `dtype`. `selfspec info` shows both.
        """
        check_weights(weights)
        if threads is not None:
            if threads < 1:
                raise OptionError(f"threads={threads} cannot compute anything; use 1 or more")
            torch.set_num_threads(threads)
        loaded = load(
            model,
            revision=revision,
            token=token,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            device=device,
            tokenizer=tokenizer,
            adapter=adapter,
        )
        target, parameters = loaded.model.device, loaded.model.num_parameters()
        try:
            layered = LayeredModel(
                loaded.model,
                owned=loaded.owned,
                kernel=kernel,
                weights=weights,
                long_context=long_context,
            )
        except torch.OutOfMemoryError as error:
            raise weights_too_large(loaded.name, parameters, loaded.model.dtype, target) from error
        return cls(layered, loaded.tokenizer, loaded.name, loaded.model.generation_config)

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
            weight_bytes=model.weight_bytes,
            kernel=model.ops.kernel,
            weights=model.ops.weights or dtype,
            alone=model.alone,
            modules=list(model.product_modules),
            row_stable=model.row_stable,
            dtype=dtype,
            device=str(model.device),
            threads=torch.get_num_threads(),
            recorded=model.recorded,
        )

    def without_adapters(self) -> LLM:
        """The same model without its live adapters, on the same weights; both can be used at the
        same time."""
        other = copy(self)
        other.model, other._turns = self.model.without_adapters, Turns()
        return other

    # ----------------------------------------------------------------------------------- generating

    @overload
    def generate(self, prompts: str | list[int], **options: Unpack[Options]) -> Result: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], **options: Unpack[Options]
    ) -> list[Result]: ...
    def generate(self, prompts: Any, **options: Unpack[Options]) -> Any:
        """Continue a prompt (a string or a list of token ids), or each of a list of prompts; a list
        in, a list out.

        Options, the same for `stream`, `chat` and `stream_chat`:

        - `sampling`: a `SamplingParams`, or one for each prompt; None is greedy, with the
          repetition penalty that the model's own generation config asks for. With a seed, prompt i
          of a list uses seed + i.
        - `max_new_tokens` (256); `stop`: strings to stop before; `eos`: ids to stop at instead of
          the model's own, [] for none.
        - `draft`: a drafter or its name; "auto" (the default) learns which one pays; None is plain
          decoding. `draft_options`: the options of a named one.
        - `control`: how many tokens to draft a round: a controller or its name; `control_options`:
          its options if it was named.
        - `logprobs`: report each token's log-probability and those of this many alternatives.
        - `logits_processors`, `stopping_criteria`: Hugging Face's, called with each row's full ids
          for every token.
        """
        single = _is_one(prompts)
        results = self._start([prompts] if single else list(prompts), options).finish()
        return results[0] if single else results

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Continue one prompt, piece by piece; options as for `generate`. Text that could become a
        stop string is held back."""
        if not _is_one(prompt):
            raise OptionError(
                "a stream has one prompt; call stream once for each, they may be interleaved"
            )
        return Stream(self._start([prompt], options))

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Result:
        """Answer a conversation ({"role": ..., "content": ...} messages) through the model's chat
        template.

        What a following turn shares with an earlier one is not computed again.
        """
        return self._start_chat(messages, options).finish()[0]

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Stream:
        """Answer a conversation, piece by piece."""
        return Stream(self._start_chat(messages, options))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation as token ids, ready for the answer."""
        tokenizer = self._need_tokenizer("a conversation")
        if not tokenizer.chat_template:
            raise OptionError(
                f"{self._name} has no chat template, so it cannot chat; use generate with a "
                f"prompt of your own"
            )
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _start_chat(self, messages: Sequence[Message], options: Options) -> _Run:
        return self._start([self.encode_chat(messages)], options, self._turns)

    def _start(
        self, prompts: Sequence[Prompt], options: Options, turns: Turns | None = None
    ) -> _Run:
        _check_names(options)
        if not prompts:
            raise PromptError("the list of prompts is empty; give at least one prompt")
        ids = [self._encode(prompt) for prompt in prompts]
        stop, criteria = options.get("stop") or (), options.get("stopping_criteria") or ()
        texts = [
            RowText(self.tokenizer, [stop] if isinstance(stop, str) else list(stop)) for _ in ids
        ]
        samplers = row_samplers(
            options.get("sampling") or self._default_sampling,
            ids,
            options.get("logits_processors") or (),
        )
        eos = options.get("eos")
        requests = [
            Request(
                prompt=prompt,
                sampler=sampler,
                max_new_tokens=options.get("max_new_tokens", 256),
                eos=self._eos if eos is None else frozenset(eos),
                stop_checks=[
                    *text.stop_checks,
                    *([CriteriaCheck(criteria, prompt)] if criteria else []),
                ],
                logprobs=options.get("logprobs"),
            )
            for prompt, sampler, text in zip(ids, samplers, texts, strict=True)
        ]
        wishes = (
            options.get("draft", "auto"),
            options.get("draft_options"),
            options.get("control"),
            options.get("control_options"),
        )
        drafter, controller = resolve(*wishes)
        return _Run(self, requests, texts, drafter, controller, turns)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self._need_tokenizer("a text prompt")(prompt)["input_ids"])
        outside = [token for token in prompt if not 0 <= token < self.model.shape.vocabulary]
        if outside:
            raise PromptError(
                f"token {outside[0]} is outside the model's vocabulary of "
                f"{self.model.shape.vocabulary}; "
                "was it made with another tokenizer?"
            )
        return list(prompt)

    def _need_tokenizer(self, purpose: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise Unavailable(
                f"{self._name} was loaded without a tokenizer, so {purpose} cannot be read; pass "
                f"tokenizer=..., or token ids"
            )
        return self.tokenizer


def _check_names(options: Mapping[str, Any]) -> None:
    """An unknown option is an error, never swallowed."""
    for name in options:
        if name in SamplingParams.__dataclass_fields__:
            raise OptionError(
                f"{name!r} is a sampling parameter; pass "
                f"sampling=SamplingParams({name}={options[name]!r})"
            )
        if name not in Options.__annotations__:
            raise OptionError(
                f"there is no option {name!r}; {nearest(name, Options.__annotations__)}"
            )


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _eos_tokens(
    generation_config: Any, tokenizer: PreTrainedTokenizerBase | None
) -> frozenset[int]:
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


class _Run:
    """One call at work: the engine's steps turned into text and results."""

    def __init__(
        self,
        llm: LLM,
        requests: Sequence[Request],
        texts: Sequence[RowText],
        drafter: Drafter | None,
        controller: Controller | None,
        turns: Turns | None,
    ) -> None:
        self._requests, self._texts, self._turns = requests, texts, turns
        cache = turns.take(requests[0].prompt) if turns else None
        self._generation = Generation(
            llm.model,
            requests,
            drafter,
            controller.start() if controller else None,
            cache=cache,
            lock=llm._lock,
        )
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in requests]
        self.results: list[Result] | None = None

    def pieces(self) -> Generator[Piece, None, None]:
        """The first row's text as it comes; results at the end."""
        try:
            for step in self._generation:
                piece = Piece("", [])
                for part in step.rows:
                    text = self._texts[part.row].push(part)
                    self._logprobs[part.row] += part.logprobs
                    if part.row == 0:
                        piece = Piece(text, list(part.tokens), part.accepted, list(part.rejected))
                yield piece
            self.results = [self._result(row) for row in range(len(self._requests))]
        finally:
            if self._turns:
                row = self._generation.rows[0]
                self._turns.give(row.tokens[: row.settled], self._generation.cache)

    def finish(self) -> list[Result]:
        for _ in self.pieces():
            pass
        assert self.results is not None
        return self.results

    def _result(self, index: int) -> Result:
        row, request = self._generation.rows[index], self._requests[index]
        self._generation.stats.peak_memory_bytes = _peak_memory(self._generation.cache.keys.device)
        assert row.finish is not None
        return Result(
            text=self._texts[index].text,
            tokens=row.tokens[len(request.prompt) :],
            finish_reason=row.finish,
            stats=self._generation.stats,
            logprobs=self._logprobs[index] if request.logprobs is not None else None,
            seed=None if request.sampler.params.greedy else request.sampler.seed,
        )


def _peak_memory(device: torch.device) -> int:
    """The most memory that was in use so far: the device's on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
