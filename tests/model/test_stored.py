"""Matrices in few bits as somebody else stored them: read by formula, multiplied as they are,
loaded from GGUF files and from GPTQ and AWQ folders without being expanded."""

from __future__ import annotations

import json
import platform
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from test_weights import MACHINES, MARCH, rounded

from selfspec import LLM
from selfspec.errors import BrokenCheckpoint, OptionError, Unavailable, UnsupportedModel
from selfspec.model.compute.cpu import few_bits, native
from selfspec.model.compute.cpu.few_bits import Stored
from selfspec.model.compute.cpu.operations import NativeOps
from selfspec.model.compute.grouped import Blocks, grouped, joined
from selfspec.model.copies import copy_in
from selfspec.model.from_transformers import from_transformers
from selfspec.model.load import gguf_blocks, gguf_file, quantised
from selfspec.testing import tiny_model
from tests.model.gguf_files import write

PROMPT = [5, 6, 7] * 6


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of this test's own, with the kernels of the common one."""
    common = native.cache_root() / "native"
    common.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(common)
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def some_blocks(kind: str) -> np.ndarray:
    """Rows of five blocks, all bits random but those of scales and minima."""
    rng = np.random.default_rng(0)
    _, size, _ = gguf_blocks.FORMATS[kind]
    raw = rng.integers(0, 256, (40, 5, size), dtype=np.uint8)
    places = {"Q6_K": [208], "Q8_0": [0], "Q4_0": [0], "Q5_0": [0]}.get(kind, [0, 2])
    for at in places:
        raw[:, :, at : at + 2] = rng.normal(size=(40, 5, 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(40, -1)


@pytest.mark.parametrize("kind", gguf_blocks.FORMATS)
def test_blocks_hold_the_numbers_that_gguf_reads_from_them(kind):
    """A nibble, a fifth bit or a scale of another group. As numbers they are equal to the last bit;
    packed, scales of K formats are rounded to 16 bits and all others still equal."""
    raw = some_blocks(kind)
    expected = torch.from_numpy(gguf.dequantize(raw, Kind[kind]))
    read = gguf_blocks.decoded(kind, torch.from_numpy(raw))
    assert torch.equal(read.float(), expected) and len(expected.unique()) > 100
    packed = Stored([read], [None]).rows(torch.arange(40))
    if kind.endswith("K"):
        most = read.scale.abs().repeat_interleave(read.group, 1) * 2 ** (read.bits - 1)
        least = 0 if read.minimum is None else read.minimum.abs().repeat_interleave(read.group, 1)
        assert not torch.equal(packed, expected)
        assert ((packed - expected).abs() <= 2**-11 * (2 * most + least) + 1e-6).all()
    else:
        assert torch.equal(packed, expected)


def random_groups(bits, group, inputs, with_minimum, outputs=70):
    """A matrix, and the same by its formula."""
    generator = torch.Generator().manual_seed(bits + group)
    lowest = 0 if with_minimum and bits < 8 else -(2 ** (bits - 1))
    shape = (outputs, -(-inputs // group))
    numbers = torch.randint(lowest, lowest + 2**bits, (outputs, inputs), generator=generator)
    scale, minimum = (torch.randn(shape, generator=generator).half().float() for _ in range(2))
    weight = numbers * scale.repeat_interleave(group, 1)[:, :inputs]
    if with_minimum:
        weight = weight + minimum.repeat_interleave(group, 1)[:, :inputs]
    given = minimum if with_minimum else None
    made = grouped(numbers.to(torch.int8), scale, given, group=group, bits=bits)
    return made, weight


CASES = [(4, 32, 96, True), (4, 32, 100, False), (4, 16, 96, True), (5, 64, 96, True),
         (6, 16, 52, True), (8, 32, 100, True), (8, 16, 96, False),
         (4, 200, 100, True)]  # fmt: skip


@pytest.mark.parametrize(("bits", "group", "inputs", "minimum"), CASES)
def test_products_of_groups(bits, group, inputs, minimum):
    """A minimum or a bias that got lost, halves of a group mixed up, groups that end early, a row
    that depends on its neighbours, rows cut out as other numbers."""
    made, weight = random_groups(bits, group, inputs, minimum)
    generator = torch.Generator().manual_seed(3)
    x, bias, residual = (
        torch.randn(shape, generator=generator) for shape in ((13, inputs), (70,), (13, 70))
    )
    assert torch.equal(made.float(), weight)
    ops = NativeOps("stored")
    linear = ops.linear([made], [bias])
    assert isinstance(linear, Stored)
    assert torch.equal(linear.rows(torch.tensor([69, 0, 3])), weight[[69, 0, 3]])
    whole = linear(x, residual=residual)
    expected = residual + F.linear(rounded(x), weight, bias)
    assert torch.allclose(whole, expected, atol=1e-5 * weight.abs().max().item() * inputs)
    alone = [linear(x[i : i + 1], residual=residual[i : i + 1]) for i in range(13)]
    assert torch.equal(whole, torch.cat(alone))
    some = torch.tensor([5, 66])
    assert torch.equal(ops.linear([linear.cut(some)], [bias[some]])(x), linear(x)[:, some])


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (6, 16)])
@pytest.mark.parametrize("machine", MACHINES)
def test_products_of_groups_are_the_same_numbers_on_every_processor(
    machine, bits, group, monkeypatch
):
    """An instruction that saturates, a variant that lays weights out for another one."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if MACHINES[machine] not in flags or "x86" not in platform.machine():
        pytest.skip(f"this processor has no {MACHINES[machine]}")
    made, _ = random_groups(bits, group, 96, True, outputs=40)
    x = torch.randn((14, 96), generator=torch.Generator().manual_seed(4))
    x[:, 32:64] = x[:, 32:64].sign()
    x[0], x[1] = 1, -1  # the largest sums that there are
    made.numbers[3] = 15 if bits == 4 else 2 ** (bits - 1) - 1
    made.numbers[5] = 0 if bits == 4 else -(2 ** (bits - 1))
    here = Stored([made], [None])
    march = tuple(f"-march={MARCH[machine]}" if "march" in f else f for f in native.FLAGS)
    monkeypatch.setattr(native, "FLAGS", march)
    monkeypatch.setattr(few_bits, "compiled", native.compiled.__wrapped__)
    there = Stored([made], [None])
    assert torch.equal(here.rows(torch.arange(40)), there.rows(torch.arange(40)))
    expected, found = here(x), there(x)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(found, expected) or machine == "plain"


def test_matrices_of_different_groups_become_one():
    """Scales of one that are used for the other, a minimum that one has and the other lacks, or a
    float32 copy where few bits would do."""
    pairs = [random_groups(*case) for case in ((4, 32, 96, False), (6, 16, 96, True))]
    order = torch.arange(140).flip(0)
    together = joined([made for made, _ in pairs], order)
    assert torch.equal(together.float(), torch.cat([weight for _, weight in pairs])[order])
    assert (together.bits, together.group) == (6, 16)
    floats = Blocks(70, 96, lambda begin, end: pairs[0][1][begin:end], "F16", "F16 in the file")
    linear = NativeOps("stored").linear([pairs[1][0], floats], [None, None])
    assert torch.equal(linear.rows(torch.arange(140))[70:], pairs[0][1])
    assert linear.floats == "F16 in the file"


# ------------------------------------------------------------------------------------- GGUF files


def never(*_, **__):
    raise AssertionError("the file was expanded to float32")


def logits(llm):
    cache = llm.model.new_cache(1, 64)
    return llm.model.forward(torch.tensor(PROMPT), cache, cache.layout([len(PROMPT)]))


MIXED = {"blk.0.attn_v": Kind.Q8_0, "blk.1.ffn_down": Kind.Q5_0, "output": Kind.Q8_0}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_runs_from_its_own_blocks(architecture, tied, tmp_path, monkeypatch):
    """Rows of queries left in the file's order, a bias or a norm lost, an embedding of other
    numbers, a second load that goes another way than the first."""
    path = tmp_path / "tiny.GGUF"
    monkeypatch.setattr(gguf_file, "convert_gguf", never)
    held = write(path, Kind.Q4_1, architecture, kinds=MIXED, tie_word_embeddings=tied)
    config = {"tie_word_embeddings": tied, "vocab_size": 261, "num_hidden_layers": 2}
    model = tiny_model(architecture, rms_norm_eps=1e-6, **config)
    model.load_state_dict(held, strict=not tied)
    model.tie_weights()
    llm = LLM.from_pretrained(path)
    assert (llm.info.weights, llm.info.kernel, llm.info.alone) == ("stored", "native", [])
    assert llm.info.row_stable and llm.info.parameters == model.num_parameters()
    assert llm.info.weight_bytes < 0.45 * LLM.from_pretrained(model).info.weight_bytes
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert (logits(llm) - expected).norm() < 0.05 * expected.norm()
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    assert torch.equal(llm.model.blocks[0].linears[0].rows(torch.arange(128)), torch.cat(parts))
    assert torch.equal(llm.model.embed(torch.arange(9)), model.model.embed_tokens.weight[:9])
    drafts = {"draft": "early-exit", "draft_options": {"layer": 1, "vocabulary": 64}}
    options = {"max_new_tokens": 12, "eos": []}
    tokens = llm.generate(PROMPT, draft=None, **options).tokens
    assert llm.generate(PROMPT, **drafts, **options).tokens == tokens
    monkeypatch.setattr("selfspec.model.load.loading.load", never)
    again = LLM.from_pretrained(path)
    assert torch.equal(logits(again), logits(llm)) and again.tokenizer.encode("a") == [67]


def test_other_kinds_of_weights_are_made_from_blocks(tmp_path, monkeypatch):
    """A float32 folder in the cache for weights that are rounded anyway; or float32 that is not
    what the file holds."""
    path = tmp_path / "tiny.gguf"
    held = write(path, Kind.Q8_0)
    with monkeypatch.context() as patched:
        patched.setattr(gguf_file, "convert_gguf", never)
        small = LLM.from_pretrained(path, weights="int8")
    with pytest.warns(UserWarning, match="expanded to float32 once"):
        whole = LLM.from_pretrained(path, weights="float32")
    assert (small.info.weights, whole.info.weights) == ("int8", "float32")
    assert torch.equal(whole.model.head_product.rows(torch.arange(9)), held["lm_head.weight"][:9])
    assert (logits(small) - logits(whole)).norm() < 0.05 * logits(whole).norm()


def test_a_format_without_a_kernel_is_expanded_and_said(tmp_path):
    """A silent fallback, or a refusal of what could be loaded before."""
    path = tmp_path / "tiny.gguf"
    write(path, kinds={"blk.0.ffn_up": Kind.TQ2_0}, hidden_size=256, num_attention_heads=16)
    words = r"no kernel here runs TQ2_0; there are some for Q8_0, Q4_0.* float32"
    with pytest.raises(UnsupportedModel, match=words):
        LLM.from_pretrained(path, weights="stored")
    with pytest.warns(UserWarning, match=words):
        llm = LLM.from_pretrained(path)
    assert llm.info.weights == "float32" and "TQ2_0" in llm.info.notes[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LLM.from_pretrained(path).info.notes == llm.info.notes


def test_matrices_of_floats_stay_float32_and_are_named(tmp_path):
    """A matrix that is rounded without being asked, or kept large without a word."""
    path = tmp_path / "tiny.gguf"
    write(path, Kind.Q8_0, kinds={"blk.0.ffn_up": Kind.F16, "blk.1.ffn_down": Kind.F16})
    info = LLM.from_pretrained(path).info
    assert info.weights == "stored" and info.notes == [
        "2 of 9 products in float32: F16 in the file"
    ]


def test_a_file_that_is_cut_short_or_too_new(tmp_path):
    """Half a matrix of zeros, or a stray error out of a reader."""
    path = tmp_path / "tiny.gguf"
    write(path, Kind.Q8_0)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 100])
    with pytest.raises(BrokenCheckpoint, match="truncated or corrupt"):
        LLM.from_pretrained(path)
    path.write_bytes(whole[:4] + (9).to_bytes(4, "little") + whole[8:])
    with pytest.raises(UnsupportedModel, match="GGUF of version 9, and selfspec reads 2 and 3"):
        LLM.from_pretrained(path)


def test_stored_weights_of_a_model_that_has_none():
    """An option that silently does something else."""
    with pytest.raises(OptionError, match="this model's weights are plain numbers"):
        from_transformers(tiny_model(), weights="stored")


def test_few_bits_on_a_gpu_name_the_libraries_that_can(tmp_path):
    """A refusal without a remedy."""
    from selfspec.model.operations import operations_for

    with pytest.raises(OptionError, match=r"torchao and bitsandbytes.*TorchAoConfig"):
        operations_for("auto", torch.float16, torch.device("cuda"), weights="int8")


def test_a_copy_in_4_bits_uses_the_blocks_that_have_4(tmp_path):
    """The same numbers held twice."""
    path = tmp_path / "tiny.gguf"
    write(path, Kind.Q8_0, kinds={"blk.0.ffn_down": Kind.Q4_0})
    model = LLM.from_pretrained(path).model
    copy = copy_in(model, "int4")
    same = [one is other for one, other in zip(model.linears, copy.linears, strict=True)]
    assert same == [False, False, False, True, False, False, False, False, True]
    assert copy_in(model, "auto") is copy, "a copy in 8 bits would be no smaller"


def test_the_demo_runs_from_its_own_file(tmp_path, monkeypatch):
    """A second download, or 538 MB of float32 made for nothing."""
    path = tmp_path / "own.gguf"
    write(path, Kind.Q4_1, "llama")
    monkeypatch.setattr("selfspec.model.load.source.demo_gguf", lambda: path)
    monkeypatch.setattr("selfspec.model.load.source.demo_folder", never)
    info = LLM.from_pretrained("demo", weights="stored").info
    assert (info.name, info.weights) == ("demo", "stored")


# --------------------------------------------------------------------------- GPTQ and AWQ folders


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """(n, numbers) -> (n, words), the lowest bits first."""
    words = numbers.long().unflatten(1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return (words.sum(-1) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)


def quantised_folder(folder: Path, method: str, bits: int = 4, group: int = 32, **settings):
    """A tiny Llama whose linears are stored by a library's formula, and the model that it is."""
    model = tiny_model(intermediate_size=96)
    generator = torch.Generator().manual_seed(5)
    tensors = {name: each for name, each in model.state_dict().items() if name != "lm_head.weight"}
    for name in [name for name in tensors if "_proj" in name]:
        outputs, inputs = tensors.pop(name).shape
        path, size = name.removesuffix(".weight"), group if group > 0 else inputs
        groups, most = -(-inputs // size), 2**bits
        numbers = torch.randint(0, most, (inputs, outputs), generator=generator)
        zeros = torch.randint(1, most - 1, (groups, outputs), generator=generator)
        scales = (torch.rand((groups, outputs), generator=generator) * 0.5 / most).half()
        places = torch.arange(inputs) // size
        weight = (numbers - zeros[places]) * scales[places].float()
        model.get_submodule(path).weight.data = weight.T.contiguous()
        if method == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            numbers, zeros = (
                x.unflatten(1, (-1, 8))[..., order].flatten(1) for x in (numbers, zeros)
            )
            words = packed(numbers, 4)
        else:
            words = packed(numbers.T, bits).T.contiguous()
            zeros = zeros - int(settings.get("checkpoint_format", "gptq") == "gptq")
            tensors[f"{path}.g_idx"] = places.int()
        tensors[f"{path}.qweight"], tensors[f"{path}.qzeros"] = words, packed(zeros, bits)
        tensors[f"{path}.scales"] = scales
    tensors["lm_head.weight"] = model.lm_head.weight.clone()
    model.save_pretrained(folder)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    facts = {"quant_method": method, "bits": bits, "group_size": group, **settings}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": facts}))
    return model


FOLDERS = [
    ("gptq", {}),
    ("gptq", {"group": -1}),
    ("gptq", {"bits": 8, "group": 16}),
    ("gptq", {"checkpoint_format": "gptq_v2"}),
    ("awq", {}),
    ("awq", {"group": 64, "version": "gemm"}),
]


@pytest.mark.parametrize(("method", "settings"), FOLDERS)
def test_folders_of_gptq_and_awq(method, settings, tmp_path, monkeypatch):
    """Numbers along the wrong axis, outputs in AWQ's order, a zero that is off by one; a library
    that is asked for although nobody needs it."""
    model = quantised_folder(tmp_path, method, **settings)
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    llm = LLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert (logits(llm) - expected).norm() < 0.02 * expected.norm()
    assert (llm.info.weights, llm.info.alone, llm.info.modules) == ("stored", [], [])
    # the head is no linear of the library's
    assert llm.info.notes == ["1 of 17 products in float32: stored as plain numbers"]
    product = llm.model.blocks[1].linears[1]
    weight = model.model.layers[1].self_attn.o_proj.weight
    exact = torch.equal(product.rows(torch.arange(len(weight))), weight)
    assert exact or (product.rows(torch.arange(len(weight))) - weight).abs().max() < 1e-3


def test_what_cannot_be_repacked_goes_through_the_library(tmp_path, monkeypatch):
    """Numbers multiplied by another group's scale, or a refusal without a reason."""
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    quantised_folder(tmp_path, "gptq", desc_act=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("g_idx"))
    changed = {**tensors, name: tensors[name].flip(0).contiguous()}
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(Unavailable, match=r"neighbouring inputs \(desc_act\).*pip install optimum"):
        LLM.from_pretrained(tmp_path)
    for method, settings, words in (
        ("gptq", {"checkpoint_format": "marlin"}, "its layout 'marlin' is not read here"),
        ("awq", {"version": "gemv"}, "its layout 'gemv' is not read here"),
        ("gptq", {"bits": 3}, "no kernel here runs gptq of 3 bits, but of 4 and 8"),
    ):
        facts = {"quant_method": method, "bits": 4, "group_size": 32, **settings}
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": facts}))
        with pytest.raises(Unavailable, match=words):
            LLM.from_pretrained(tmp_path)


def test_groups_that_fit_no_kernel_stay_float32(tmp_path):
    """A scale used for its neighbour's inputs, or a matrix that is expanded without a word."""
    model = quantised_folder(tmp_path, "gptq", group=24)
    llm = LLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert torch.allclose(logits(llm), expected, atol=1e-3)
    assert any("groups of 24 inputs are no multiple of 16" in note for note in llm.info.notes)


@pytest.mark.parametrize(("bits", "group"), [(8, 64), (4, 32)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_folders_of_torchao(bits, group, symmetric, tmp_path, monkeypatch):
    """Zeros with another sign, numbers of 4 bits that begin elsewhere; a library that is asked for
    although nobody needs it."""
    model, generator = tiny_model(intermediate_size=128), torch.Generator().manual_seed(6)
    model.save_pretrained(tmp_path)
    tensors, said = dict(model.state_dict()), {}
    for name in [name for name in tensors if "_proj" in name]:
        outputs, inputs = tensors.pop(name).shape
        lowest, shape = -(2 ** (bits - 1)), (outputs, inputs // group)
        numbers = torch.randint(lowest, -lowest, (outputs, inputs), generator=generator)
        zeros = torch.randint(lowest // 2, -lowest // 2, shape, generator=generator)
        zeros = zeros * 0 if symmetric else zeros
        scales = (torch.rand(shape, generator=generator) * 0.5 / -lowest).half().float()
        spread = [each.repeat_interleave(group, 1) for each in (zeros, scales)]
        path = name.removesuffix(".weight")
        model.get_submodule(path).weight.data = (numbers - spread[0]) * spread[1]
        tensors |= {
            f"{path}._weight_qdata": numbers.to(torch.int8),
            f"{path}._weight_scale": scales,
            f"{path}._weight_zero_point": zeros.to(torch.int8),
        }
        kind = "Int8Tensor" if bits == 8 else "IntxUnpackedToInt8Tensor"
        facts = {"block_size": [1, group], "act_quant_kwargs": None}
        facts |= {"target_dtype": {"_type": "torch.dtype", "_data": f"int{bits}"}}
        said[name] = json.dumps({"_type": kind, "_data": facts})
    save_file(tensors, tmp_path / "model.safetensors", metadata=said)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    llm = LLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert (logits(llm) - expected).norm() < 0.05 * expected.norm()
    assert llm.info.weights == "stored" and llm.info.modules == []
    weight = model.model.layers[1].self_attn.o_proj.weight
    rows = llm.model.blocks[1].linears[1].rows(torch.arange(len(weight)))
    assert (rows - weight).abs().max() <= 2**-11 * 16 * weight.abs().max() * (not symmetric)
    said[name] = json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": {}})
    save_file(tensors, tmp_path / "model.safetensors", metadata=said)
    with pytest.raises(Unavailable, match=r"Int4TilePackedTo4dTensor is not read here.*torchao"):
        LLM.from_pretrained(tmp_path)
