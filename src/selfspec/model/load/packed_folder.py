"""Folders that GPTQ, AWQ or torchao quantised, read from safetensors without these libraries.

torchao keeps whole numbers of 4 or 8 bits, a byte each, with scales and zeros. GPTQ and AWQ keep
`qweight`, `qzeros` and `scales`, their numbers in words of 32 bits. In all of them inputs stand in
groups, and weight = scale * (number - zero). GPTQ's words hold consecutive inputs, and its first
format stores each zero less one. AWQ's words hold eight outputs in an order of their own. What is
laid out otherwise goes through the library. Does not know kernels.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compute.grouped import Blocks, Grouped, fits, grouped
from ..compute.stored import StoredLinear
from .checkpoint import weight_files
from .empty import empty_model
from .quantised import settings_of

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each half byte of a word belongs to
TORCHAO = "torchao"
_TORCHAO = ("Int8Tensor", "IntxUnpackedToInt8Tensor")  # its plain groups
_FORMATS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_CLEAR = {"gptq": 1, "gptq_v2": 0, "gemm": 0}  # what is added to a stored zero


_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx", "bias"),
    *("_weight_qdata", "_weight_scale", "_weight_zero_point"),
)


@dataclass(frozen=True)
class Packing:
    """How the linears of a folder are packed."""

    form: str
    bits: int
    group: int
    """Inputs that share a scale; 0: all of them."""


def packing_of(config: Any) -> Packing | str | None:
    """How a folder's linears are packed, or why they cannot be read here. None: by no library whose
    layouts we know."""
    settings = settings_of(config) or {}
    method = str(settings.get("quant_method", ""))
    if method == TORCHAO:  # it says the rest of each linear
        return Packing(TORCHAO, 0, 0)
    if method not in _FORMATS:
        return None
    form = settings.get("checkpoint_format") if method == "gptq" else settings.get("version")
    form = str(form or _FORMATS[method][0]).lower()
    if form not in _FORMATS[method]:
        return f"its layout {form!r} is not read here, but {' and '.join(_FORMATS[method])} are"
    bits, widths = int(settings.get("bits") or 0), (4, 8) if method == "gptq" else (4,)
    if bits not in widths:
        ours = " and ".join(map(str, widths))
        return f"no kernel here runs {method} of {bits} bits, but of {ours}"
    return Packing(form, bits, max(int(settings.get("group_size") or 0), 0))


def unpacked(words: Tensor, bits: int) -> Tensor:
    """(n, words of 32 bits) -> (n, numbers) uint8, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: Tensor = words[..., None] >> shifts & 2**bits - 1
    return numbers.to(torch.uint8).flatten(1)


def packed_model(folder: Path, config: Any, packing: Packing, options: dict[str, Any]) -> Any:
    """transformers' model of a folder, the packed linears left as they are; or why that cannot be
    done."""
    plain = copy.deepcopy(config)
    del plain.quantization_config
    model = empty_model(plain, options)
    tensors, said = _tensors(folder)
    for path, part in list(model.named_modules()):
        held = {name: tensors[f"{path}.{name}"] for name in _PARTS if f"{path}.{name}" in tensors}
        if isinstance(part, nn.Linear) and held.keys() & {"qweight", "_weight_qdata"}:
            if packing.form == TORCHAO:
                blocks = _torchao_blocks(held, json.loads(said.get(f"{path}.weight", "{}")))
            else:
                blocks = _blocks(held, packing, part.in_features, part.out_features)
            if isinstance(blocks, str):
                return f"{path}: {blocks}"
            bias = held.get("bias")
            model.set_submodule(path, StoredLinear(blocks, None if bias is None else bias.float()))
            continue
        for name, _ in list(part.named_parameters(recurse=False)):
            full = f"{path}.{name}"
            if full in tensors:
                part.register_parameter(name, nn.Parameter(tensors[full].float()))
    model.tie_weights()
    if missing := [name for name, each in model.named_parameters() if each.is_meta]:
        return f"it has {missing[0]} under another name, or not at all"
    return model.eval().requires_grad_(False)


def _tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of a folder, mapped from its files, and what these say of them."""
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    said: dict[str, str] = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as held:
            said |= held.metadata() or {}
            tensors |= {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    return tensors, said


def _torchao_blocks(held: dict[str, Tensor], said: dict[str, Any]) -> Blocks | str:
    """One linear of torchao's, or why it cannot be read as groups: weight = scale * (number -
    zero), a byte with a sign for each number."""
    kind, facts = said.get("_type"), said.get("_data", {})
    if kind not in _TORCHAO:
        return f"its {kind} is not read here, but {' and '.join(_TORCHAO)}"
    if facts.get("act_quant_kwargs") or facts.get("activation_quantization"):
        return "it rounds what it multiplies with in its own way"
    numbers, scale = held["_weight_qdata"], held["_weight_scale"].float()
    outputs, inputs = numbers.shape
    rows, group = facts["block_size"]
    if rows != 1 or scale.dim() != 2 or not fits(group, inputs):
        return f"its groups are of {rows} outputs and {group} inputs"
    bits = 4 if facts.get("target_dtype", {}).get("_data") == "int4" else 8
    zero = held.get("_weight_zero_point", torch.zeros_like(scale)).float()

    def read(begin: int, end: int) -> Grouped:
        some = numbers[begin:end], scale[begin:end], zero[begin:end]
        if not zero.any():
            return grouped(*some[:2], None, group=group, bits=bits)
        up = 8 if bits == 4 else 0  # numbers beside a minimum begin at zero
        return grouped(some[0] + up, some[1], -(some[2] + up) * some[1], group=group, bits=bits)

    return Blocks(outputs, inputs, read, f"{kind} of {bits} bits")


def _blocks(held: dict[str, Tensor], packing: Packing, inputs: int, outputs: int) -> Blocks | str:
    """One linear, or why it cannot be read as groups."""
    group = packing.group or inputs
    if {"qweight", "qzeros", "scales"} - held.keys():
        return "it lacks zeros or scales"
    if "g_idx" in held and not torch.equal(held["g_idx"], torch.arange(inputs) // group):
        return "its groups are not of neighbouring inputs (desc_act)"
    zeros = unpacked(held["qzeros"], packing.bits)  # (groups, outputs)
    if packing.form == "gemm":
        zeros = _in_order(zeros)
    if zeros.shape != held["scales"].shape or zeros.shape[1] != outputs:
        return f"its zeros and scales are of shapes {zeros.shape} and {held['scales'].shape}"
    if packing.form == "gptq" and (zeros == 2**packing.bits - 1).any():
        return "a zero of its first format is stored as the largest number, which is ambiguous"
    read = partial(_rows, held["qweight"], held["scales"], zeros + _CLEAR[packing.form], packing)
    what = f"{packing.form} of {packing.bits} bits"
    if fits(group, inputs):
        return Blocks(outputs, inputs, partial(_grouped, read, group, packing.bits), what)
    why = f"groups of {group} inputs are no multiple of 16"
    return Blocks(outputs, inputs, partial(_floats, read, group), what, why)


def _rows(
    words: Tensor, scales: Tensor, zeros: Tensor, packing: Packing, begin: int, end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Some outputs' numbers, (outputs, inputs) uint8, with scales and zeros, (outputs, groups)."""
    if packing.form == "gemm":
        first = begin // 8
        numbers = _in_order(unpacked(words[:, first : -(-end // 8)], 4))
        numbers = numbers[:, begin - 8 * first : end - 8 * first].T
    else:
        numbers = unpacked(words[:, begin:end].T, packing.bits)
    scale, zero = (each[:, begin:end].T.float() for each in (scales, zeros))
    return numbers.contiguous(), scale.contiguous(), zero.contiguous()


def _grouped(read: Any, group: int, bits: int, begin: int, end: int) -> Grouped:
    numbers, scale, zero = read(begin, end)
    middle = 0 if bits == 4 else 128  # which brings 8 bits into those of a signed byte
    signed = (numbers ^ middle).view(torch.int8)
    return grouped(signed, scale, (middle - zero) * scale, group=group, bits=bits)


def _floats(read: Any, group: int, begin: int, end: int) -> Tensor:
    numbers, scale, zero = read(begin, end)
    scale, zero = (
        each.repeat_interleave(group, 1)[:, : numbers.shape[1]] for each in (scale, zero)
    )
    floats: Tensor = (numbers.float() - zero) * scale
    return floats


def _in_order(numbers: Tensor) -> Tensor:
    """AWQ's outputs, which come eight by eight in its own order, one after the other."""
    places = torch.tensor(AWQ_ORDER).argsort()
    eights: Tensor = numbers.unflatten(1, (-1, 8))
    return eights[:, :, places].flatten(1)
