"""The floor: any causal model of transformers', run whole by its own forward on its own cache.

To the engine it is a `LayeredModel` of one layer: states come out, or logits where a model does
more to them than its head. Rows are read one after another. Drafts come from the text or from
another network, as chains. Layers cannot be run one by one, and nothing is promised about bits.
Which calls a model takes is found out by trying them on the probe, with a draft that is rejected in
the middle. Does not know families.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import OptionError, SelfCheckFailed, SelfspecError, UnsupportedModel
from .block import Block, Norms
from .compute.cache import KVCache, RowSpan, TokenLayout
from .compute.cpu.choosing import likeliest_or_broken
from .compute.linear import Linear
from .compute.ops import TorchOps
from .compute.plan import LayerPlan
from .embedding import Embedding
from .family import Scales, Shape
from .layered import LayeredModel
from .operations import BY_TORCH, check_weights
from .passes import WholePass
from .pasts import Calling, Past, ways
from .probing import probe
from .recording import EagerSteps
from .self_check import SelfCheck
from .shaping import context_of, switch_length
from .unlisted import linears_of
from .weights import linear_weights_of, parameter_count, product

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARNING = (
    "this {0} model is run whole by transformers' own forward (kernel 'floor'), because {1}. "
    "Drafts come from its text or from another model, single layers cannot be run, and a token's "
    "last bits may depend on what is computed beside it"
)
_WHOLE = "transformers' own forward runs the whole model, and {0}"
TIMED = (1, 2, 5)  # tokens of passes


def floor_model(model: PreTrainedModel, reason: str, weights: str = "auto") -> LayeredModel:
    """The model as one layer. `reason`: why it is not run by layers, for the warning. Raises
    UnsupportedModel if its own forward cannot go on, or go back, in a text."""
    config: Any = model.config
    _check_weights(weights, config.model_type)
    with _refusing(config.model_type):
        training = [each for each in model.modules() if each.training]
        model.eval()
        try:
            calling, vocabulary = _way(model)
            calling, head = _with_head(model, calling, vocabulary)
            seconds = _pass_seconds(calling, vocabulary)
        finally:
            for each in training:
                each.training = True
    warnings.warn(WARNING.format(config.model_type, reason), stacklevel=2)
    alone = _WHOLE.format(calling.words)
    norms = Norms(None, None, None, None)
    return LayeredModel(
        shape=_shape(config, vocabulary),
        dtype=model.dtype,
        device=model.device,
        ops=TorchOps("floor"),
        embedding=Embedding(torch.arange(vocabulary, device=model.device), 1.0),
        positions=None,
        ropes=(),
        blocks=(Block(WholeModel(calling, alone), Nothing(alone), norms),),
        final_norm=_as_it_is,
        head_product=head,
        steps=FloorSteps(calling, model.dtype, model.device),
        parameters=parameter_count(model),
        one_by_one=calling.one_by_one,
        pass_seconds=seconds,
    )


def _check_weights(weights: str, kind: str) -> None:
    check_weights(weights)
    if weights != "auto":
        who = f"models of type {kind!r} are run whole by transformers' own forward"
        raise OptionError(BY_TORCH.format(weights, who, ""))


@contextmanager
def _refusing(kind: str) -> Iterator[None]:
    """Whatever a model's own code raises while it is tried refuses it, with the reason."""
    try:
        yield
    except SelfspecError:
        raise
    except Exception as error:  # any model's own code
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UnsupportedModel(
            f"models of type {kind!r} are not supported: their own forward raises "
            f"{type(error).__name__} on a probe prompt ({reason}). Generate with transformers, or "
            "report it."
        ) from error


def _way(model: PreTrainedModel) -> tuple[Calling, int]:
    """How the model is called, and how many tokens it scores."""
    tokens = probe(_shape(model.config, _entries(model)), model.device)
    own = SelfCheck(model, tokens)
    failures: list[str] = []
    for calling in ways(model):
        try:
            own.compare(_reading(calling, tokens.tolist()))
        except SelfCheckFailed as failed:
            failures.append(str(failed).partition(",")[0])
        except Exception as error:  # noqa: BLE001  (any model's own code: the next way is tried)
            failures.append(f"{type(error).__name__}: {error}".partition("\n")[0])
        else:
            return calling, own.vocabulary
    raise UnsupportedModel(
        f"models of type {model.config.model_type!r} are not supported: read in pieces they say "
        f"something else than read at once, even without a cache ({failures[-1]}). They may look "
        "ahead in the text, as encoders do. Generate with transformers."
    )


@torch.inference_mode()
def _reading(calling: Calling, tokens: Sequence[int]) -> Tensor:
    """The probe's logits, read in pieces, with a rejected draft and with a draft kept in part."""
    past, half = Past(calling), len(tokens) // 2
    pieces = [past.read(0, tokens[:half])]
    past.read(half, tokens[:5])
    wrong = [*tokens[half : half + 3], *tokens[:2]]
    pieces.append(past.read(half, wrong)[:3])
    pieces.append(past.read(half + 3, tokens[half + 3 : half + 4]))
    pieces.append(past.read(half + 4, tokens[half + 4 :]))
    return torch.cat(pieces)


def _with_head(model: PreTrainedModel, calling: Calling, vocabulary: int) -> tuple[Calling, Linear]:
    """The way without the head, and the head, if that gives the model's logits. Some models do more
    to them."""
    whole = calling, Logits(vocabulary)
    output: Any = model.get_output_embeddings()
    if model.base_model is model or not isinstance(output, nn.Linear):
        return whole
    tokens = probe(_shape(model.config, vocabulary), model.device).tolist()
    split = replace(calling, headless=True)
    head = product([linear_weights_of(output, "language-model head")], TorchOps("floor"))
    try:
        ours, own = head(_reading(split, tokens)), _reading(calling, tokens)
        same = ours.shape == own.shape and torch.allclose(ours, own, rtol=1e-3, atol=1e-3)
    except Exception:  # noqa: BLE001  (any model's own code: it is called whole then)
        return whole
    return (split, head) if same else whole


@torch.inference_mode()
def _pass_seconds(calling: Calling, vocabulary: int) -> list[tuple[int, float]]:
    """What passes over a few tokens take: with some models several cost several times as much, and
    who drafts should not have to find that out in a text. The least of two times each."""
    tokens = probe(_shape(calling.model.config, vocabulary), calling.model.device).tolist()
    past, at, taken = Past(calling), len(tokens) // 2, dict[int, list[float]]()
    past.read(0, tokens[:at])
    for size in (1, *TIMED, *TIMED):  # the first one warms up
        begin = time.perf_counter()
        past.read(at, tokens[:size])
        taken.setdefault(size, []).append(time.perf_counter() - begin)
        at += size
    return [(size, min(taken[size])) for size in TIMED]


def _entries(model: PreTrainedModel) -> int:
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def _shape(config: Any, vocabulary: int) -> Shape:
    text = config.get_text_config(decoder=True)
    # where frequencies change, transformers reads the whole text again (shaping.py)
    return Shape(
        family=config.model_type,
        layers=1,
        width=getattr(text, "hidden_size", None) or 0,
        heads=1,
        kv_heads=1,
        head_size=0,
        vocabulary=vocabulary,
        context=switch_length(text) or context_of(text),
        activation="none",
        windows=(None,),
        ropes=(None,),
        scales=Scales(),
        parallel=False,
    )


def _as_it_is(x: Tensor) -> Tensor:
    return x


class WholeCache(KVCache):
    """What the model holds of each row's text. Slots are counted here, and nothing is in them."""

    def __init__(self, calling: Calling, rows: int, capacity: int, dtype: torch.dtype) -> None:
        super().__init__((1, rows, 1, 0), capacity, dtype, calling.model.device)
        self._calling = calling
        self._pasts: dict[int, Past] = {}

    def past(self, row: int) -> Past:
        """What is held of a row."""
        return self._pasts.setdefault(row, Past(self._calling))

    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        self._pasts[target] = self.past(source).copy()

    def read(self, span: RowSpan, tokens: Sequence[int]) -> Tensor:
        """What the model says of a row's tokens."""
        past = self.past(span.row)
        said = past.read(span.first, tokens)
        self.again += past.again
        return said

    @property
    def bytes(self) -> int:
        return sum(past.bytes for past in self._pasts.values())


class FloorSteps(EagerSteps):
    """Calls run as the model's own forward makes them, on its own caches."""

    def __init__(self, calling: Calling, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device, "transformers' own forward runs the whole model")
        self._calling = calling

    def new_cache(self, shape: Shape, rows: int, capacity: int) -> KVCache:
        return WholeCache(self._calling, rows, capacity, self._dtype)

    def at_once(self, head: Linear) -> WholePass:
        return partial(self._pass, head)

    def _pass(
        self,
        head: Linear,
        tokens: Sequence[int],
        plan: LayerPlan,
        cache: KVCache,
        layout: TokenLayout,
        ranks: int,
        of_tokens: Tensor | None = None,
        collected: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor, list[list[int]], Sequence[Tensor]]:
        assert not collected, "who reads states of layers asks for a model with layers"
        states = read(self._calling, tokens, cache, layout)
        logits = head(states)
        best: list[list[int]] = likeliest_or_broken(logits, ranks).tolist() if ranks else []
        return states, logits, best, ()


def read(calling: Calling, tokens: Sequence[int], cache: KVCache, layout: TokenLayout) -> Tensor:
    """What the model says of the layout's tokens, row by row."""
    if calling.model.training:
        raise OptionError(
            "the model is in training mode, and its own forward would apply dropout; call "
            "model.eval() first"
        )
    assert isinstance(cache, WholeCache) and layout.ancestors is None
    cache.again = 0
    if len(layout.spans) == 1:
        return cache.read(layout.spans[0], tokens)
    return torch.cat([cache.read(span, tokens[piece]) for span, piece in layout.pieces])


class WholeModel:
    """All of the model in the place of one layer's attention: tokens in, states or logits out."""

    def __init__(self, calling: Calling, alone: str) -> None:
        self._calling, self._alone = calling, alone
        self.linears = linears_of(calling.called)

    def parts(self) -> str:
        return self._alone

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        return read(self._calling, x.tolist(), cache, layout)


class Nothing:
    """In the place of a layer's MLP: what comes in goes out."""

    linears: Sequence[Linear] = ()

    def __init__(self, alone: str) -> None:
        self._alone = alone

    def parts(self) -> str:
        return self._alone

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x


class Logits(Linear):
    """In the place of a head: the states are logits already."""

    readable = False

    def __init__(self, vocabulary: int) -> None:
        self.outputs = self.inputs = vocabulary
        self.bias = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x

    @property
    def bytes(self) -> int:
        return 0
