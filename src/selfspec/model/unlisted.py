"""Families outside the table: halves run by transformers' own sub-modules, on our cache.

A layer is recognised by the names of its children. They tell the attention, the MLP and where the
norms stand. The names may lie, so whoever uses this compares logits with the model's own first. It
is slower than our own block (one call for each row), and a token's bits may depend on its
neighbours. Knows nothing of what attention and MLP do inside.
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
from .families import Family, Shape, unsupported
from .operations import BY_TORCH, check_weights
from .weights import is_plain, module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARNING = (
    "models of type {0!r} are not in selfspec's table of families, so their layers are run by "
    "transformers' own modules: slower, and a token's last bits may depend on what is computed "
    "beside it (kernel 'modules')"
)
_THEIRS = "transformers' own module computes it"
_ATTENTION = ("self_attn", "attention", "attn")
_MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
# The norms of a layer, by name -> where they stand: before and after attention, before and after
# the MLP, and whether both halves read what enters the layer.
_NORMS = {
    ("input_layernorm", "post_attention_layernorm"): (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
        False,
    ),
    ("attention_layernorm", "feedforward_layernorm"): (
        "attention_layernorm",
        None,
        "feedforward_layernorm",
        None,
        False,
    ),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
        "post_self_attn_layernorm",
    ): (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
        False,
    ),
    ("ln_1", "ln_2"): ("ln_1", None, "ln_2", None, False),
    ("attention_norm", "ffn_norm"): ("attention_norm", None, "ffn_norm", None, False),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
        "pre_feedforward_layernorm",
    ): (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
        False,
    ),
    ("post_attention_layernorm", "post_feedforward_layernorm"): (
        None,
        "post_attention_layernorm",
        None,
        "post_feedforward_layernorm",
        False,
    ),
    ("input_layernorm",): ("input_layernorm", None, "input_layernorm", None, True),
}


def recognised(model: PreTrainedModel) -> Family:
    """Where everything is in a model that the table does not know, by names. An error says what is
    missing."""
    config, base = model.config, model.base_model
    strange = set(getattr(config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    lists = [name for name, child in base.named_children() if isinstance(child, nn.ModuleList)]
    children = [name for name, _ in base.named_children()]
    if strange:
        raise unsupported(config, f"their layers are of kind {', '.join(sorted(strange))}")
    if len(lists) != 1:
        raise unsupported(config, "they do not have one list of layers")
    behind = children[children.index(lists[0]) + 1 :]
    last_norms = [name for name in behind if "norm" in name or name == "ln_f"]
    if len(last_norms) != 1:
        raise unsupported(config, "they do not have one norm after the last layer")
    if type(model.get_input_embeddings()) is not nn.Embedding:
        raise unsupported(config, "their embedding does more than look up")
    rotary = [name for name in children if "rotary" in name]
    prefix = model.base_model_prefix
    before, after, mlp_before, mlp_after, parallel = _recognised_layers(
        model, getattr(base, lists[0])
    )
    return Family(
        layers=f"{prefix}.{lists[0]}",
        embedding=_path(model, model.get_input_embeddings()),
        rotary=f"{prefix}.{rotary[0]}" if rotary else None,
        final_norm=f"{prefix}.{last_norms[0]}",
        head=_path(model, model.get_output_embeddings()),
        attention_norm=before,
        attention_after=after,
        mlp_norm=mlp_before,
        mlp_after=mlp_after,
        parallel=parallel,
    )


def _recognised_layers(
    model: PreTrainedModel, layers: nn.ModuleList
) -> tuple[str | None, str | None, str | None, str | None, bool]:
    """Where the norms of all layers stand."""
    made_of = {_children_of(layer) for layer in layers}
    names = made_of.pop()
    norms = tuple(name for name in names if name not in (*_ATTENTION, *_MLP))
    if made_of or norms not in _NORMS or len(names) != len(norms) + 2:
        raise unsupported(
            model.config,
            f"a layer of theirs is made of {', '.join(names)}, in which no attention half and MLP "
            f"half are recognised",
        )
    return _NORMS[norms]


def _children_of(layer: nn.Module) -> tuple[str, ...]:
    """The names of a layer's norms and of all else in it that has weights."""
    children = layer.named_children()
    return tuple(
        sorted(name for name, child in children if "norm" in name or [*child.parameters()])
    )


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
    if config._attn_implementation not in ("sdpa", "eager"):
        raise unsupported(
            config,
            f"their attention is {config._attn_implementation!r}; load them with "
            f"attn_implementation='sdpa' or 'eager'",
        )
    return TorchOps("modules")


@contextmanager
def refusing(config: Any) -> Iterator[None]:
    """Modules that were recognised by name but want to be called otherwise: the model is refused,
    with the reason."""
    try:
        yield
    except SelfspecError:
        raise
    except (TypeError, AttributeError, ValueError, RuntimeError, KeyError, IndexError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise unsupported(
            config, f"their modules cannot be called half by half ({reason})"
        ) from error


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
            next(getattr(layer, name) for name in names_of_half if hasattr(layer, name))
            for names_of_half in (_ATTENTION, _MLP)
        )
        norms = Norms(*(None if name is None else module(layer, name) for name in names))
        core = ModuleAttention(attention, index, rotary, shape.windows[index])
        blocks.append(Block(core, ModuleMlp(mlp), norms, parallel=shape.parallel))
    return blocks


class ModuleMlp:
    """transformers' own MLP, whatever is in it."""

    def __init__(self, mlp: nn.Module) -> None:
        self._mlp = mlp
        self.linears = _linears(mlp)

    def parts(self) -> str:
        return _THEIRS

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = self._mlp(x[None])
        # some also return what their router chose
        y: Tensor = (out[0] if isinstance(out, tuple) else out).view(x.shape)
        return y if residual is None else residual + y


class ModuleAttention:
    """transformers' own attention. It is shown our cache as if it were one of theirs, and a mask
    that says what is seen."""

    def __init__(
        self, attention: nn.Module, index: int, rotary: nn.Module | None, window: int | None
    ) -> None:
        self._attention, self._index, self._rotary = attention, index, rotary
        self._window = window
        self.linears = _linears(attention)

    def parts(self) -> str:
        return _THEIRS

    def __call__(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, residual: Tensor | None = None
    ) -> Tensor:
        if self._attention.training:
            raise OptionError(
                "the model is in training mode, and its own modules would drop at random; call "
                "model.eval() first"
            )
        pieces, first = [], 0
        for span in layout.spans:
            pieces.append(self._row(x, cache, layout, span, slice(first, first + span.count)))
            first += span.count
        y = torch.cat(pieces)
        return y if residual is None else residual + y

    def _row(
        self, x: Tensor, cache: KVCache, layout: TokenLayout, span: RowSpan, piece: slice
    ) -> Tensor:
        seen = visible_mask(layout, piece, self._window, cache.capacity)[
            :, : int(layout.slots[piece].max()) + 1
        ]
        hidden, positions = x[piece][None], layout.positions[piece][None]
        shelf = _Shelf(cache, self._index, span.row, layout.slots[piece], seen.shape[1])
        options: dict[str, Any] = (
            {} if self._rotary is None else {"position_embeddings": self._rotary(hidden, positions)}
        )
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill(
            ~seen, torch.finfo(x.dtype).min
        )
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
    """One row of one layer of our cache, as attention modules know a cache: they hand in new keys
    and values and are given all of them."""

    cache: KVCache
    layer: int
    row: int
    slots: Tensor
    length: int
    used: bool = False

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """(1, heads, tokens, size) each -> the same of everything up to the last of them."""
        self.used = True
        return self._file(self.cache.keys, keys), self._file(self.cache.values, values)

    def _file(self, ours: Tensor, new: Tensor) -> Tensor:
        ours[self.layer, self.row].index_copy_(1, self.slots, new[0])
        return ours[self.layer, self.row, None, :, : self.length]


def _linears(root: nn.Module) -> Sequence[Linear]:
    """The products inside, for counting what a pass reads."""
    linears = [child for child in root.modules() if isinstance(child, nn.Linear)]
    return [
        PlainLinear([linear.weight], [linear.bias])
        if is_plain(linear)
        else ModuleLinear(linear, linear.out_features, linear.in_features)
        for linear in linears
    ]
