"""`model.generate(**inputs, custom_generate=selfspec.transformers(...))`: our engine inside
transformers' `generate`.

transformers prepares everything as for its own decoding (generation config, logits processors,
stopping criteria, lengths) and then calls us instead of its loop. The user's model is read, never
changed. What our engine cannot do the same way (beams, scores, a cache that goes on, processors
with a memory) is an error that says so. Does not know families, drafters or kernels.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

_WARPERS: dict[
    type, str
] = {  # in transformers' order, which is ours too: our own faster code runs these
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
_WITH_MEMORY = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
_OURS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_SAMPLED = 8  # values of each weight that are looked at to notice a change


def transformers(
    draft: str | Drafter | None = "auto",
    draft_options: Mapping[str, Any] | None = None,
    control: str | Controller | None = None,
    control_options: Mapping[str, Any] | None = None,
    streamer: BaseStreamer | None = None,
) -> Decoding:
    """What to pass as `custom_generate` to a transformers model's own `generate`: the same tokens,
    sooner.

    Greedy tokens are those of `generate`. Sampled ones follow the same distribution, with seeds
    drawn from torch's generator: `torch.manual_seed` makes them repeatable, but they are other
    draws than transformers'. Drafters and controllers as for `LLM.generate`. A streamer may be
    given here or to `generate`. Instead of `stop_strings`, for which transformers does not hand on
    the tokenizer, pass `stopping_criteria=[StopStringCriteria(tokenizer, [...])]`. `stats` of what
    this returns are those of its last call.
    """
    return Decoding(*resolve(draft, draft_options, control, control_options), streamer)


@dataclass
class Decoding:
    """Made by `selfspec.transformers`; called by `generate` in place of its own loop."""

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
        """Continue the rows of `input_ids`; what comes back is what `generate` returns."""
        passed = _passed_to_generate()
        given: BaseStreamer | None = passed.get("streamer")
        streamer = self.streamer if given is None else given
        _refuse_config(generation_config, logits_processor)
        _refuse_call(passed, model_kwargs, streamer, len(input_ids))
        pads = _padding(
            input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        )
        requests = [
            _request(
                row,
                _Place(index, len(pads), tuple(row[:pad])),
                logits_processor,
                stopping_criteria,
                generation_config,
                (self.drafter, self.control),
            )
            for index, (row, pad) in enumerate(zip(input_ids.tolist(), pads, strict=True))
        ]
        filler = _filler(requests, generation_config)
        live = _live(model)
        generation = Generation(live.model, requests, lock=live.lock)
        rows = list(generation.rows)
        if streamer is not None and given is None:
            streamer.put(input_ids.cpu())  # `generate` shows the prompt to the one it was given
        _run(generation, streamer)
        self.stats = generation.stats
        return _returned(input_ids, rows, filler, generation_config)


def _run(generation: Generation, streamer: BaseStreamer | None) -> None:
    for step in generation:
        if streamer is not None:
            for token in step.rows[0].tokens:
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()


def _passed_to_generate() -> Mapping[str, Any]:
    """What the user gave to `generate` and it does not hand on to a callable: streamer,
    assistant_model, the bare kwargs.

    Read from the calling function by the names of its public parameters. An ignored streamer would
    let its reader wait forever, an ignored cache would stay empty.
    """
    here = inspect.currentframe()
    caller = here.f_back.f_back if here and here.f_back else None
    return caller.f_locals if caller is not None and caller.f_code.co_name == "generate" else {}


# -------------------------------------------------------------------------------- what we cannot do


def _refuse_config(config: GenerationConfig, processors: Sequence[LogitsProcessor]) -> None:
    mode = config.get_generation_mode()
    if mode is GenerationMode.ASSISTED_GENERATION:
        raise OptionError(
            "assisted generation was asked for (prompt_lookup_num_tokens, assistant_early_exit or "
            "use_mtp), which would "
            "be ignored; leave that option out and choose the drafter here: "
            "selfspec.transformers(draft=...)"
        )
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise OptionError(
            f"the generation config (num_beams={config.num_beams}) asks for {mode.value}, and "
            f"selfspec decodes greedily or "
            "samples, one sequence a row; set num_beams=1, or leave out custom_generate"
        )
    wanted = [name for name in _OUTPUTS if getattr(config, name)]
    if config.return_dict_in_generate and wanted:
        raise OptionError(
            f"{wanted[0]}=True, but verified drafts keep tokens only; leave it out, or leave out "
            f"custom_generate"
        )
    for processor in processors:
        if isinstance(processor, _WITH_MEMORY):
            raise OptionError(
                f"{type(processor).__name__} remembers the steps it has seen, and would remember "
                f"rejected drafts too; leave out "
                "its option, or leave out custom_generate"
            )


def _refuse_call(
    passed: Mapping[str, Any],
    model_kwargs: Mapping[str, Any],
    streamer: BaseStreamer | None,
    rows: int,
) -> None:
    if passed.get("assistant_model") is not None:
        raise OptionError(
            "assistant_model was passed, which custom_generate would ignore; use "
            "selfspec.transformers(draft='draft-model', draft_options={'model': ...})"
        )
    unknown = [
        name for name, value in model_kwargs.items() if name not in _OURS and value is not None
    ]
    if unknown:
        raise OptionError(
            f"model input {unknown[0]!r} would be ignored: it is neither input_ids nor "
            f"attention_mask; leave it out"
        )
    cache = model_kwargs.get("past_key_values")
    if passed.get("kwargs", {}).get("past_key_values") is not None or (
        cache is not None and cache.get_seq_length() > 0
    ):
        raise OptionError(
            "past_key_values was passed; selfspec keeps a cache of its own and would leave that "
            "one empty; pass all of input_ids"
        )
    if streamer is not None and rows > 1:
        raise OptionError(
            f"a streamer takes one row, and there are {rows}; generate them one by one, or leave "
            f"out the streamer"
        )


def _padding(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[int]:
    """How many pad tokens stand before each row. Everything else a mask could say is refused."""
    rows, length = input_ids.shape
    if mask is not None and mask.shape != input_ids.shape:
        raise OptionError(
            f"attention_mask has shape {tuple(mask.shape)} and input_ids "
            f"{tuple(input_ids.shape)}; make them equal"
        )
    seen = [[1] * length] * rows if mask is None else mask.long().tolist()
    pads = [row.index(1) if 1 in row else length for row in seen]
    for index, (row, pad) in enumerate(zip(seen, pads, strict=True)):
        if pad == length or any(value != 1 for value in row[pad:]):
            raise OptionError(
                f"attention_mask of row {index} is not zeros and then ones; selfspec reads rows "
                f"padded on the left: "
                "set padding_side='left' in the tokenizer"
            )
        if positions is not None and positions.expand(rows, -1)[index, pad:].tolist() != list(
            range(length - pad)
        ):
            raise OptionError(
                f"position_ids of row {index} do not count from 0 at its first token; leave them "
                f"out"
            )
    return pads


# ---------------------------------------------------------------------- transformers' words in ours


def _request(
    row: Sequence[int],
    place: _Place,
    processors: Sequence[LogitsProcessor],
    criteria: Sequence[StoppingCriteria],
    config: GenerationConfig,
    drafting: tuple[Drafter | None, Controller | None],
) -> Request:
    """One row. Processors and criteria see what `generate` would show them, padding included."""
    eos = [
        token
        for each in criteria
        if type(each) is EosTokenCriteria
        for token in each.eos_token_id.tolist()
    ]
    limits = [each.max_length for each in criteria if type(each) is MaxLengthCriteria]
    others = [each for each in criteria if type(each) not in (EosTokenCriteria, MaxLengthCriteria)]
    prompt = row[len(place.padding) :]
    return Request(
        prompt=prompt,
        sampler=_sampler(processors, bool(config.do_sample), place, len(prompt)),
        max_new_tokens=min(limits, default=config.max_length) - len(row),
        eos=frozenset(eos),
        stop_checks=[CriteriaCheck(others, row)] if others else [],
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
    """A processor called for one row, shown a batch: some count rows, and lengths with the padding,
    as `generate` has them."""

    def __init__(self, processor: LogitsProcessor, place: _Place) -> None:
        self._processor, self._place = processor, place

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = self._place
        ids = torch.cat([input_ids.new_tensor([place.padding]), input_ids], dim=1).repeat(
            place.rows, 1
        )
        result: Tensor = self._processor(ids, scores.repeat(place.rows, 1))
        return result[place.row : place.row + 1]


def _sampler(
    processors: Sequence[LogitsProcessor], sampled: bool, place: _Place, prompt_length: int
) -> Sampler:
    """transformers' processors as a sampler: those our own code knows at its ends as options, the
    rest as they are."""
    rest = list(processors)
    options: dict[str, Any] = {}
    if sampled:
        options = {"temperature": 1.0, **_take_warpers(rest)}
    if (
        rest
        and type(rest[0]) is RepetitionPenaltyLogitsProcessor
        and _spares_padding_only(rest[0], place)
    ):
        options["repetition_penalty"] = rest.pop(0).penalty  # type: ignore[attr-defined]
    alone = place.rows == 1 and not place.padding
    seed = int(torch.randint(0, 2**62, ())) if sampled else 0
    return Sampler(
        SamplingParams(**options),
        seed,
        rest if alone else [_InBatch(each, place) for each in rest],
        prompt_length,
    )


def _take_warpers(processors: list[LogitsProcessor]) -> dict[str, Any]:
    """Options for the last processors of the list, which are taken off it, as long as they stand in
    our order."""
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


def _spares_padding_only(penalty: RepetitionPenaltyLogitsProcessor, place: _Place) -> bool:
    spared = penalty.prompt_ignore_length
    return spared is None or (
        isinstance(spared, Tensor) and int(spared[place.row]) == len(place.padding)
    )


def _filler(requests: Sequence[Request], config: GenerationConfig) -> int:
    """What stands after the end of a row that is shorter than others."""
    eos = min(requests[0].eos, default=None) if config.pad_token_id is None else None
    if (
        config.pad_token_id is None
        and eos is None
        and len(requests) > 1
        and requests[0].stop_checks
    ):
        raise OptionError(
            f"{len(requests)} rows may end at different lengths, and there is neither a "
            f"pad_token_id nor an eos_token_id to fill "
            "them up with; pass pad_token_id=..."
        )
    return int(config.pad_token_id if config.pad_token_id is not None else eos or 0)


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
            f"generation ended at {limit} tokens, the model's context, before max_length was "
            f"reached",
            stacklevel=4,
        )
    sequences = torch.cat(
        [input_ids, torch.tensor(filled, dtype=input_ids.dtype, device=input_ids.device)], dim=1
    )
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


# ends with the user's model
_known: WeakKeyDictionary[PreTrainedModel, _Live] = WeakKeyDictionary()
_known_lock = threading.Lock()


def _live(model: PreTrainedModel) -> _Live:
    """The model by layers, made once and again whenever its weights have changed."""
    weights = _weights(model)
    with _known_lock:
        found = _known.get(model)
        if found is None or found.weights != weights:
            _refuse_model(model)
            found = _known[model] = _Live(from_transformers(model), weights)
        return found


def _weights(model: PreTrainedModel) -> list[tuple[int, int, tuple[float, ...]]]:
    """Where each weight lies, how often it was written to, and a few of its values: writing through
    `.data`, as adapters do when they are merged, is not counted."""
    marks = []
    for weight in (plain for parameter in model.parameters() for plain in plain_tensors(parameter)):
        flat = weight.detach().reshape(-1)
        few = flat[:: max(1, flat.numel() // _SAMPLED)].tolist()
        marks.append(
            (weight.data_ptr(), -1 if weight.is_inference() else weight._version, tuple(few))
        )
    return marks


def _refuse_model(model: PreTrainedModel) -> None:
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModel(
            f"the model's weights are on {', '.join(devices)}; selfspec runs a model that is on one"
        )
    foreign = next(
        (each for each in model.modules() if type(each).__module__.partition(".")[0] == "peft"),
        None,
    )
    if foreign is not None:
        raise UnsupportedModel(
            f"the model holds {type(foreign).__name__} of peft, which can be switched on and off "
            f"unseen; merge it first "
            "(merge_and_unload())"
        )
