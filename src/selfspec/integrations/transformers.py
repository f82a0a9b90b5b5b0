"""Our engine inside transformers' `generate`, as its `custom_generate`.

`model.generate(**inputs, custom_generate=selfspec.transformers(...))`: transformers prepares
everything as for its own decoding (generation config, logits processors, stopping criteria,
lengths) and calls us instead of its loop. The user's model is read, never changed. What our engine
cannot do the same way is an error that says so: beams, scores, a cache that goes on, processors
with a memory. Does not know families, drafters or kernels.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..control.base import Controller
from ..core.contract import Stats
from ..core.sampling import Sampler, SamplingParams
from ..core.text_stream import CriteriaCheck
from ..draft.base import Drafter
from ..draft.registry import resolve
from ..engine.generation import Generation
from ..engine.row import Request, Row
from ..errors import OptionError, UnsupportedModel
from ..model.compute.linear import plain_tensors
from ..model.from_transformers import from_transformers
from ..model.layered import LayeredModel
from .assisted import asked_for, check_assisted

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

# in transformers' order, which is ours too: our own faster code runs these
_WARPERS: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_WITH_MEMORY = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
_OURS = {"attention_mask", "position_ids", "past_key_values", "use_cache"}
_OURS |= {"logits_to_keep", "cache_position"}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_SAMPLED = 8  # values of each weight that are looked at to notice a change


def transformers(
    draft: str | Drafter | None = "auto",
    draft_options: Mapping[str, Any] | None = None,
    control: str | Controller | None = None,
    control_options: Mapping[str, Any] | None = None,
    streamer: BaseStreamer | None = None,
) -> Decoding:
    """What to pass as `custom_generate` to a transformers model's `generate`: same tokens, sooner.

    Greedy tokens are those of `generate`. Sampled ones follow the same distribution. Their seeds
    come from torch's generator, so `torch.manual_seed` makes them repeatable, but they are other
    draws than transformers'. Drafters and controllers as for `LLM.generate`. A streamer may be
    given here or to `generate`. Instead of `stop_strings`, whose tokenizer transformers does not
    hand on, pass `stopping_criteria=[StopStringCriteria(tokenizer, [...])]`. The `stats` of what
    this returns are those of its last call.
    """
    return Decoding(*resolve(draft, draft_options, control, control_options), streamer)


@dataclass
class Decoding:
    """Made by `selfspec.transformers`. `generate` calls it in place of its own loop."""

    drafter: Drafter | None
    control: Controller | None
    streamer: BaseStreamer | None = None
    stats: Stats | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: Sequence[LogitsProcessor],
        stopping_criteria: Sequence[StoppingCriteria],
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Continue the rows of `input_ids`, and return what `generate` returns."""
        passed = _passed_to_generate()
        given: BaseStreamer | None = passed.get("streamer")
        streamer = self.streamer if given is None else given
        _refuse_config(generation_config, logits_processor)
        _refuse_call(passed, model_kwargs, streamer, len(input_ids))
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        pads = _padding(input_ids, mask, positions)
        requests = [
            _request(
                row,
                _Place(index, len(pads), tuple(row[:pad])),
                logits_processor,
                stopping_criteria,
                generation_config,
                asked_for(generation_config, self.drafter, self.control),
            )
            for index, (row, pad) in enumerate(zip(input_ids.tolist(), pads, strict=True))
        ]
        filler = _filler(requests, generation_config)
        live = _live(model)
        generation = Generation(live.model, requests, lock=live.lock)
        rows = list(generation.rows)
        if streamer is not None and given is None:
            streamer.put(input_ids.cpu())  # `generate` shows the prompt to the one it was given
        for step in generation:
            if streamer is not None:
                for token in chain.from_iterable(part.tokens for part in step.rows):
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        self.stats = generation.stats
        return _returned(input_ids, rows, filler, generation_config)


def _passed_to_generate() -> Mapping[str, Any]:
    """What the user gave to `generate` but a callable does not get, such as the streamer.

    Read from the calling function, by the names of its public parameters. An ignored streamer would
    let its reader wait forever, an ignored cache would stay empty.
    """
    here = inspect.currentframe()
    caller = here.f_back.f_back if here and here.f_back else None
    return caller.f_locals if caller is not None and caller.f_code.co_name == "generate" else {}


# -------------------------------------------------------------------------------- what we cannot do


def _refuse_config(config: GenerationConfig, processors: Sequence[LogitsProcessor]) -> None:
    mode = config.get_generation_mode()
    if mode is GenerationMode.ASSISTED_GENERATION:
        check_assisted(config)
    elif mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise OptionError(
            f"the generation config (num_beams={config.num_beams}) asks for {mode.value}, and "
            "selfspec only decodes greedily or samples, one sequence a row; set num_beams=1"
        )
    wanted = [name for name in _OUTPUTS if getattr(config, name)]
    if config.return_dict_in_generate and wanted:
        raise OptionError(
            f"{wanted[0]}=True cannot be met, as verified drafts keep tokens only; leave it out"
        )
    for processor in processors:
        if isinstance(processor, _WITH_MEMORY):
            raise OptionError(
                f"{type(processor).__name__} remembers the steps it has seen, rejected drafts too, "
                "so the text would change; leave out its option, or custom_generate"
            )


def _refuse_call(
    passed: Mapping[str, Any],
    model_kwargs: Mapping[str, Any],
    streamer: BaseStreamer | None,
    rows: int,
) -> None:
    if passed.get("assistant_model") is not None:
        raise OptionError(
            "assistant_model would be ignored by custom_generate; use "
            "selfspec.transformers(draft='draft-model', draft_options={'model': ...})"
        )
    inputs = [name for name, value in model_kwargs.items() if value is not None]
    unknown = [name for name in inputs if name not in _OURS]
    if unknown:
        raise OptionError(
            f"model input {unknown[0]!r} would be ignored: only input_ids and attention_mask are "
            "read; leave it out"
        )
    given, cache = passed.get("kwargs", {}), model_kwargs.get("past_key_values")
    filled = cache is not None and cache.get_seq_length() > 0
    if filled or given.get("past_key_values") is not None:
        raise OptionError(
            "past_key_values was passed and would stay empty; leave it out and pass all input_ids"
        )
    if streamer is not None and rows > 1:
        raise OptionError(f"a streamer takes one row, not {rows}; generate them one by one")


def _padding(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[int]:
    """How many pad tokens stand before each row. All else that a mask could say is refused."""
    rows, length = input_ids.shape
    if mask is not None and mask.shape != input_ids.shape:
        raise OptionError(
            f"attention_mask {tuple(mask.shape)} has to be as large as input_ids {(rows, length)}"
        )
    masks = [[1] * length] * rows if mask is None else mask.long().tolist()
    pads = [row.index(1) if 1 in row else length for row in masks]
    for index, (row, pad) in enumerate(zip(masks, pads, strict=True)):
        if pad == length or any(value != 1 for value in row[pad:]):
            raise OptionError(
                f"attention_mask of row {index} is not zeros and then ones, as rows padded on the "
                "left are: set padding_side='left' in the tokenizer"
            )
        counted = list(range(length - pad))
        if positions is not None and positions.expand(rows, -1)[index, pad:].tolist() != counted:
            raise OptionError(
                f"position_ids of row {index} do not count from 0 at its first token; drop them"
            )
    return pads


def _request(
    row: Sequence[int],
    place: _Place,
    processors: Sequence[LogitsProcessor],
    criteria: Sequence[StoppingCriteria],
    config: GenerationConfig,
    drafting: tuple[Drafter | None, Controller | None],
) -> Request:
    """One row. Processors and criteria see what `generate` would show them, padding included."""
    ends = [criterion for criterion in criteria if type(criterion) is EosTokenCriteria]
    limits = [check.max_length for check in criteria if type(check) is MaxLengthCriteria]
    own = [check for check in criteria if type(check) not in (EosTokenCriteria, MaxLengthCriteria)]
    prompt = row[len(place.padding) :]
    return Request(
        prompt=prompt,
        sampler=_sampler(processors, bool(config.do_sample), place, len(prompt)),
        max_new_tokens=min(limits, default=config.max_length) - len(row),
        eos=frozenset(token for end in ends for token in end.eos_token_id.tolist()),
        stop_checks=[CriteriaCheck(own, row)] if own else [],
        drafter=drafting[0],
        controller=drafting[1],
    )


@dataclass(frozen=True)
class _Place:
    """Where a row stands in the batch."""

    row: int
    rows: int
    padding: tuple[int, ...]


class _InBatch(LogitsProcessor):
    """A processor called for one row but shown a batch, as some count rows, and lengths with the
    padding, as `generate` has them."""

    def __init__(self, processor: LogitsProcessor, place: _Place) -> None:
        self._processor, self._place = processor, place

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = self._place
        ids = torch.cat([input_ids.new_tensor([place.padding]), input_ids], dim=1)
        ids = ids.repeat(place.rows, 1)
        result: Tensor = self._processor(ids, scores.repeat(place.rows, 1))
        return result[place.row : place.row + 1]


def _sampler(
    processors: Sequence[LogitsProcessor], sampled: bool, place: _Place, prompt_length: int
) -> Sampler:
    """transformers' processors as a sampler. Those at their ends that our own code knows become
    options, the rest stay as they are."""
    rest = list(processors)
    options: dict[str, Any] = {"temperature": 1.0, **_take_warpers(rest)} if sampled else {}
    penalty = rest[0] if rest else None
    if type(penalty) is RepetitionPenaltyLogitsProcessor:
        spared = penalty.prompt_ignore_length
        padding = len(place.padding)
        if spared is None or (isinstance(spared, Tensor) and int(spared[place.row]) == padding):
            options["repetition_penalty"] = penalty.penalty
            rest.pop(0)
    if place.rows > 1 or place.padding:
        rest = [_InBatch(processor, place) for processor in rest]
    seed = int(torch.randint(0, 2**62, ())) if sampled else 0
    return Sampler(SamplingParams(**options), seed, rest, prompt_length)


def _take_warpers(processors: list[LogitsProcessor]) -> dict[str, Any]:
    """Take processors off the list's end, as options, while they stand in our order."""
    order, options = list(_WARPERS), dict[str, Any]()
    while processors and type(processors[-1]) in order:
        last = processors[-1]
        value = vars(last)[_WARPERS[type(last)]]
        # top_p=0 means the likeliest token; ours cannot say that
        if value == 0 or vars(last).get("min_tokens_to_keep", 1) != 1:
            break
        options[_WARPERS[type(last)]] = value
        order = order[: order.index(type(last))]
        processors.pop()
    return options


def _filler(requests: Sequence[Request], config: GenerationConfig) -> int:
    """What stands after the end of a row that is shorter than the longest."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    eos = min(requests[0].eos, default=None)
    if eos is None and len(requests) > 1 and requests[0].stop_checks:
        raise OptionError(
            f"{len(requests)} rows may end at different lengths, and there is no token to fill "
            "them up with; pass pad_token_id=..."
        )
    return int(eos or 0)


def _returned(
    input_ids: Tensor, rows: Sequence[Row], filler: int, config: GenerationConfig
) -> Tensor | GenerateDecoderOnlyOutput:
    """Prompts and new tokens as one tensor, filled up on the right."""
    new = [row.tokens[len(row.request.prompt) :] for row in rows]
    longest = max(map(len, new))
    filled = [tokens + [filler] * (longest - len(tokens)) for tokens in new]
    if any(row.finish == "context" for row in rows):
        limit = max(len(row.tokens) for row in rows)
        warnings.warn(
            f"generation ended at {limit} tokens, the model's context, before max_length",
            stacklevel=4,
        )
    added = torch.tensor(filled, dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat([input_ids, added], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- the user's model, by layers


@dataclass(frozen=True)
class _Live:
    """A user's model as ours, and what its weights looked like then."""

    model: LayeredModel
    weights: Sequence[tuple[int, int, tuple[float, ...]]]
    lock: threading.RLock = field(default_factory=threading.RLock)


_live_models: WeakKeyDictionary[PreTrainedModel, _Live] = WeakKeyDictionary()
_live_models_lock = threading.Lock()


def _live(model: PreTrainedModel) -> _Live:
    """The model by layers, made once, and anew whenever its weights have changed."""
    weights = _weights(model)
    with _live_models_lock:
        live = _live_models.get(model)
        if live is None or live.weights != weights:
            _refuse_model(model)
            live = _live_models[model] = _Live(from_transformers(model), weights)
        return live


def _weights(model: PreTrainedModel) -> list[tuple[int, int, tuple[float, ...]]]:
    """Where each weight lies, how often it was written to, and a few of its values: torch does not
    count writing through `.data`, as adapters do when they are merged."""
    marks = []
    for weight in (plain for parameter in model.parameters() for plain in plain_tensors(parameter)):
        flat = weight.detach().reshape(-1)
        values = tuple(flat[:: max(1, flat.numel() // _SAMPLED)].tolist())
        version = -1 if weight.is_inference() else weight._version
        marks.append((weight.data_ptr(), version, values))
    return marks


def _refuse_model(model: PreTrainedModel) -> None:
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModel(
            f"the model's weights are on {', '.join(devices)}; move all of them to one device"
        )
    for module in model.modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise UnsupportedModel(
                f"the model holds {type(module).__name__} of peft, which can be switched on and "
                "off unseen; merge it first (merge_and_unload())"
            )
