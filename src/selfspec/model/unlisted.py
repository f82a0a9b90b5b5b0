"""Families outside the table: halves run by transformers' own modules, on our cache.

A layer's attention, MLP and norms are recognised by the names of its children. Names can mislead,
so logits are compared with the model's own at load. It is slower than our own block (one call for
each row), and a token's bits may depend on its neighbours. Does not know what attention and MLP do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import OptionError, SelfspecError
from .block import Block, Norms
from .compute.cache import KVCache, RowSpan, TokenLayout
from .compute.linear import Linear, ModuleLinear, PlainLinear
from .compute.ops import Ops, TorchOps, visible_mask
from .compute.windows import Window
from .families import unsupported
from .family import Family, Shape
from .operations import BY_TORCH, check_weights
from .weights import is_plain, module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARNING = (
    "models of type {0!r} are not in selfspec's table of families, so transformers' own modules "
    "run their layers (kernel 'modules'): slower, and a token's last bits may depend on what is "
    "computed beside it"
)
_THEIRS = "transformers' own module computes it"
_ATTENTION = ("self_attn", "attention", "attn")
_MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
# Where the norms of a layer can stand: before and after attention, before and after the MLP, and
# whether both halves read the layer's input.
_Places = tuple[str | None, str | None, str | None, str | None, bool]
_IN, _AFTER_ATTENTION = "input_layernorm", "post_attention_layernorm"
_BEFORE_MLP, _AFTER_MLP = "pre_feedforward_layernorm", "post_feedforward_layernorm"
_PLACES: tuple[_Places, ...] = (
    (_IN, None, _AFTER_ATTENTION, None, False),
    (_IN, None, _IN, None, True),
    (_IN, _AFTER_ATTENTION, _BEFORE_MLP, _AFTER_MLP, False),
    (_IN, "post_self_attn_layernorm", _AFTER_ATTENTION, "post_mlp_layernorm", False),
    (None, _AFTER_ATTENTION, None, _AFTER_MLP, False),
    ("attention_layernorm", None, "feedforward_layernorm", None, False),
    ("attention_norm", None, "ffn_norm", None, False),
    ("ln_1", None, "ln_2", None, False),
)
_NORMS = {tuple(sorted({name for name in places[:4] if name})): places for places in _PLACES}


def recognised(model: PreTrainedModel) -> Family:
    """Where the parts of a model outside the table are. Raises, naming what is not recognised."""
    config, base = model.config, model.base_model
    known = {"full_attention", "sliding_attention"}
    strange = set(getattr(config, "layer_types", None) or ()) - known
    lists = [name for name, child in base.named_children() if isinstance(child, nn.ModuleList)]
    children = [name for name, _ in base.named_children()]
    if strange:
        raise unsupported(config, f"their layers are of kind {', '.join(sorted(strange))}")
    if len(lists) != 1:
        raise unsupported(config, "they do not have one list of layers")
    behind = children[children.index(lists[0]) + 1 :]
    final_norms = [name for name in behind if "norm" in name or name == "ln_f"]
    if len(final_norms) != 1:
        raise unsupported(config, "they do not have one norm after the last layer")
    if type(model.get_input_embeddings()) is not nn.Embedding:
        raise unsupported(config, "their embedding does more than look up tokens")
    rotary = [name for name in children if "rotary" in name]
    prefix = model.base_model_prefix
    norms = _recognised_norms(config, getattr(base, lists[0]))
    before, after, mlp_before, mlp_after, parallel = norms
    return Family(
        layers=f"{prefix}.{lists[0]}",
        embedding=_path(model, model.get_input_embeddings()),
        rotary=f"{prefix}.{rotary[0]}" if rotary else None,
        final_norm=f"{prefix}.{final_norms[0]}",
        head=_path(model, model.get_output_embeddings()),
        attention_norm=before,
        attention_after=after,
        mlp_norm=mlp_before,
        mlp_after=mlp_after,
        parallel=parallel,
    )


def _recognised_norms(config: Any, layers: nn.ModuleList) -> _Places:
    """Where the norms of all layers stand, judged by what has weights in a layer."""

    def children(layer: nn.Module) -> tuple[str, ...]:
        pairs = layer.named_children()
        return tuple(sorted(name for name, part in pairs if "norm" in name or [*part.parameters()]))

    kinds = {children(layer) for layer in layers}
    names = kinds.pop()
    norms = tuple(name for name in names if name not in (*_ATTENTION, *_MLP))
    if kinds or norms not in _NORMS or len(names) != len(norms) + 2:
        parts = ", ".join(names)
        reason = f"a layer is made of {parts}, in which attention and MLP are not recognised"
        raise unsupported(config, reason)
    return _NORMS[norms]


def module_ops(kernel: str, config: Any, weights: str = "auto") -> Ops:
    """torch's operations for what lies around the modules."""
    check_weights(weights)
    if weights != "auto":
        who = f"models of type {config.model_type!r} are run by transformers' own modules"
        raise OptionError(BY_TORCH.format(weights, who, ""))
    if kernel not in ("auto", "modules"):
        raise OptionError(
            f"kernel {kernel!r} runs the families in the table, and models of type "
            f"{config.model_type!r} are not in it; use kernel='auto'"
        )
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        remedy = "load them with attn_implementation='sdpa' or 'eager'"
        raise unsupported(config, f"their attention is {attention!r}; {remedy}")
    return TorchOps("modules")


@contextmanager
def refusing(config: Any) -> Iterator[None]:
    """Refuse a model whose modules were recognised by name but cannot be called as expected."""
    try:
        yield
    except SelfspecError:
        raise
    except Exception as error:  # any model's own code
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        message = f"their modules cannot be called half by half ({reason})"
        raise unsupported(config, message) from error


def _path(model: nn.Module, wanted: nn.Module | None) -> str:
    path: str = next(path for path, child in model.named_modules() if child is wanted)
    return path


def module_blocks(model: PreTrainedModel, family: Family, shape: Shape) -> list[Block]:
    """The blocks of a recognised family."""
    rotary = None if family.rotary is None else module(model, family.rotary)
    names = (family.attention_norm, family.attention_after, family.mlp_norm, family.mlp_after)
    blocks = []
    for index, layer in enumerate(module(model, family.layers).children()):
        attention, mlp = (
            next(getattr(layer, name) for name in half if hasattr(layer, name))
            for half in (_ATTENTION, _MLP)
        )
        norms = Norms(*(None if name is None else module(layer, name) for name in names))
        core = ModuleAttention(attention, index, rotary, shape.windows[index])
        blocks.append(Block(core, ModuleMlp(mlp), norms, parallel=shape.parallel))
    return blocks


class ModuleMlp:
    """transformers' own MLP, whatever is in it."""

    def __init__(self, mlp: nn.Module) -> None:
        self._mlp = mlp
        self.linears = linears_of(mlp)

    def parts(self) -> str:
        return _THEIRS

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self._mlp(x[None])
        # some also return what their router chose
        y: Tensor = (out[0] if isinstance(out, tuple) else out).view(x.shape)
        return y if residual is None else residual + y


class ModuleAttention:
    """transformers' own attention, given our cache as if it were one of theirs, and a mask."""

    def __init__(
        self, attention: nn.Module, index: int, rotary: nn.Module | None, window: Window | None
    ) -> None:
        self._attention, self._index = attention, index
        self._rotary, self._window = rotary, window
        self.linears = linears_of(attention)

    def parts(self) -> str:
        return _THEIRS

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        if self._attention.training:
            raise OptionError(
                "the model is in training mode, and its own modules would apply dropout; call "
                "model.eval() first"
            )
        y = torch.cat([self._row(x, cache, layout, *each) for each in layout.pieces])
        return y if residual is None else residual + y

    def _row(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, span: RowSpan, piece: slice
    ) -> Tensor:
        slots = layout.slots[piece]
        length = int(slots.max()) + 1
        seen = visible_mask(layout, piece, self._window, cache.capacity)[:, :length]
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(~seen, torch.finfo(x.dtype).min)
        hidden, positions = x[piece][None], layout.positions[piece][None]
        shelf = _Shelf(cache, self._index, span.row, slots, length)
        options: dict[str, Any] = {}
        if self._rotary is not None:
            options["position_embeddings"] = self._rotary(hidden, positions)
        out = self._attention(
            hidden_states=hidden,
            attention_mask=mask[None, None],
            past_key_values=shelf,
            position_ids=positions,
            **options,
        )
        if not shelf.used:
            raise TypeError("its attention does not file its keys in past_key_values")
        y: Tensor = out[0][0]
        return y


@dataclass
class _Shelf:
    """One row and layer of our cache, with the one method that attention modules call."""

    cache: KVCache
    layer: int
    row: int
    slots: Tensor
    length: int
    used: bool = False

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values, (1, heads, tokens, size) each. Returns those of all tokens."""
        self.used = True
        return self._file(self.cache.keys, keys), self._file(self.cache.values, values)

    def _file(self, ours: Tensor, new: Tensor) -> Tensor:
        ours[self.layer, self.row].index_copy_(1, self.slots, new[0])
        return ours[self.layer, self.row, None, :, : self.length]


def linears_of(root: nn.Module) -> Sequence[Linear]:
    """The linears of a module, to count the weights that a pass reads."""
    linears = [child for child in root.modules() if isinstance(child, nn.Linear)]
    return [
        PlainLinear([linear.weight], [linear.bias])
        if is_plain(linear)
        else ModuleLinear(linear, linear.out_features, linear.in_features)
        for linear in linears
    ]
