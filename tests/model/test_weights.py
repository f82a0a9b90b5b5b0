"""How weights are stored: a kind of weights is one class and one kernel, and `weights=` is for our
kernels alone."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_passes import one_by_one, states_of
from torch import nn

from selfspec import LLM
from selfspec.errors import OptionError, Unavailable
from selfspec.model import operations
from selfspec.model.compute.cpu import few_bits, native
from selfspec.model.compute.cpu.few_bits import BFloat16, Int4, Int8, in_sixteen_steps
from selfspec.model.compute.cpu.interface import function
from selfspec.model.compute.cpu.kinds import KINDS
from selfspec.model.compute.cpu.linear import Float32, PackedLinear
from selfspec.model.compute.cpu.native import NoNative, compiled
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.families import FAMILIES
from selfspec.model.from_transformers import from_transformers
from selfspec.model.weights import release
from selfspec.testing import tiny_model

KERNEL = """
#include "product.h"

// Weights row by row, those of odd inputs with the other sign; so are the odd numbers of x.
extern "C" void prepare_mirrored(const Product*, const float* x, int64_t begin, int64_t end,
                                 void* prepared) {
    for (int64_t k = begin; k < end; k++) ((float*)prepared)[k] = k % 2 ? -x[k] : x[k];
}

extern "C" void read_mirrored(const Product* weight, int64_t row, float* out) {
    const float* packed = (const float*)weight->weights + row * weight->inputs;
    for (int64_t k = 0; k < weight->inputs; k++) out[k] = k % 2 ? -packed[k] : packed[k];
}

extern "C" void multiply_mirrored(const Product* weight, const void* x, int64_t rows,
                                  const float* residual, float* out, int part, int parts) {
    int64_t outputs = weight->outputs, inputs = weight->inputs;
    for (int64_t c = outputs * part / parts; c < outputs * (part + 1) / parts; c++)
        for (int64_t r = 0; r < rows; r++) {
            const float* from = (const float*)((const char*)x + r * weight->prepared);
            const float* packed = (const float*)weight->weights + c * inputs;
            float sum = weight->bias ? weight->bias[c] : 0;
            for (int64_t k = 0; k < inputs; k++) sum += from[k] * packed[k];
            out[r * outputs + c] = residual ? residual[r * outputs + c] + sum : sum;
        }
}
"""
SOURCE = Path()


class Mirrored(PackedLinear):
    """A toy kind: the class that goes with the kernel above."""

    def pack(self, weight):
        self.prepared = 64 * -(-4 * self.inputs // 64)
        return torch.where(torch.arange(self.inputs) % 2 == 1, -weight, weight).contiguous()

    @staticmethod
    def functions():
        kernels = compiled(SOURCE)
        return [function(kernels, f"{what}_mirrored") for what in ("multiply", "prepare", "read")]


@pytest.fixture(autouse=True)
def mirrored(monkeypatch, tmp_path_factory):
    """The toy is a kind like any other: one more line in the table."""
    path = tmp_path_factory.getbasetemp() / "mirrored.cpp"
    path.write_text(KERNEL)
    monkeypatch.setitem(globals(), "SOURCE", path)
    monkeypatch.setitem(KINDS, "mirrored", Mirrored)


def rounded(x):
    """Rows as the integer products see them: 8 bits in groups of 32."""
    groups = F.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale).round() * scale).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("kind", ["float32", "mirrored", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_product_of_any_kind(kind, threads):
    """Rows prepared by nobody or twice, a bias or a residual that got lost, a part that two threads
    or none take; weights that are read back otherwise than they are multiplied with."""
    generator = torch.Generator().manual_seed(0)
    weight, x, bias, residual = (
        torch.randn(shape, generator=generator) for shape in ((70, 52), (13, 52), (70,), (13, 70))
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        linear = KINDS[kind]([weight], [bias])
        seen, read = linear.rows(torch.arange(70)), rounded(x) if kind.startswith("int") else x
        expected = F.linear(read, seen, bias)
        assert torch.allclose(linear(x), expected, atol=1e-4)
        whole = linear(x, residual=residual)
        assert torch.allclose(whole, residual + expected, atol=1e-4)
        alone = [linear(x[i : i + 1], residual=residual[i : i + 1]) for i in range(13)]
        assert torch.equal(whole, torch.cat(alone))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(linear.rows(torch.tensor([69, 0, 3])), seen[[69, 0, 3]])
    for wrong in (70, -1):  # memory beyond the weights, read as if it were some
        with pytest.raises(IndexError, match=f"row {wrong} .* 70"):
            linear.rows(torch.tensor([0, wrong]))
    bits = {"bfloat16": 2**-8, "int8": 1 / 254, "int4": 1 / 30}.get(kind, 0.0)
    spread = weight.abs() if kind == "bfloat16" else weight.max() - weight.min()
    assert ((seen - weight).abs() <= 1.01 * bits * spread).all()
    if not bits:
        assert linear.bytes == 70 * 52 * 4


def test_bfloat16_weights_give_the_bits_of_float32():
    """Sums in another order, or inputs that are rounded too."""
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(shape, generator=generator) for shape in ((70, 52), (13, 52)))
    weight = weight.bfloat16().float()
    assert torch.equal(BFloat16([weight], [None])(x), Float32([weight], [None])(x))


MACHINES = {"avx512": "avx512f", "avx512vnni": "avx512_vnni", "avx2": "avx2", "plain": ""}
MARCH = {
    "avx512": "x86-64-v4", "avx512vnni": "cascadelake", "avx2": "x86-64-v3", "plain": "x86-64"
}  # fmt: skip


@pytest.mark.parametrize("kind", [Int8, Int4])
@pytest.mark.parametrize("machine", MACHINES)
def test_integer_products_are_the_same_numbers_on_every_processor(machine, kind, monkeypatch):
    """An instruction that saturates, a variant that lays weights out for another one. Inputs are
    extreme: whole groups of largest numbers."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if MACHINES[machine] not in flags or "x86" not in platform.machine():
        pytest.skip(f"this processor has no {MACHINES[machine]}")
    generator = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(shape, generator=generator) for shape in ((40, 96), (14, 96)))
    weight[:, 32:64], x[:, 32:64] = weight[:, 32:64].sign(), x[:, 32:64].sign()
    weight[3], x[2] = 1.0, 1.0
    here = kind([weight], [None])
    march = tuple(f"-march={MARCH[machine]}" if "march" in f else f for f in native.FLAGS)
    monkeypatch.setattr(native, "FLAGS", march)
    monkeypatch.setattr(few_bits, "compiled", native.compiled.__wrapped__)
    there = kind([weight], [None])
    assert torch.equal(here.rows(torch.arange(40)), there.rows(torch.arange(40)))
    expected, found = here(x), there(x)
    # without fused multiplication and addition each group is rounded once more
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(found, expected) or machine == "plain"


def test_four_bits_find_a_grid_and_fit_what_lies_on_none():
    """Weights that were born in 4 bits rounded anew; a fit that is worse than steps over the whole
    range; groups that are mixed up where only some of them are on a grid."""
    generator = torch.Generator().manual_seed(3)
    born = torch.randint(0, 16, (20, 32), generator=generator).float()
    born[:, 0], born[:, 31] = 0, 15
    scale = (torch.rand(20, 1, generator=generator) + 0.01).half().float()
    on_grid = scale * born - (7 * scale).half().float()
    free = torch.randn(20, 32, generator=generator)
    numbers, steps, least = in_sixteen_steps(torch.stack([on_grid, free], 1).flatten(0, 1))
    fitted = (numbers * steps + least).view(20, 2, 32)
    assert torch.equal(numbers.view(20, 2, 32)[:, 0], born)
    assert torch.allclose(fitted[:, 0], on_grid, rtol=0, atol=1e-6)
    low, high = free.aminmax(dim=1, keepdim=True)
    whole = ((free - low) * 15 / (high - low)).round() * (high - low) / 15 + low
    error, before = ((each - free).square().sum(1) for each in (fitted[:, 1], whole))
    assert (error <= before * 1.001).all() and error.sum() < 0.9 * before.sum()
    assert numbers.min() == 0 and numbers.max() == 15


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3"])
def test_models_of_few_bits(kind, family):
    """Halves that are run otherwise alone than together, a head or an embedding of other weights
    than the model's, rows that depend on their neighbours."""
    hf = tiny_model(family)
    model = from_transformers(hf, weights=kind)
    assert model.row_stable and model.alone == [] and model.ops.weights == kind
    with torch.inference_mode():
        for plan in (LayerPlan(0, 4), LayerPlan.skipping(4, attention=[1], mlp=[1, 2])):
            together, alone = states_of(model, plan), states_of(one_by_one(model), plan)
            assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    tokens = torch.arange(3, 40)
    plain = from_transformers(hf)
    ours, theirs = (
        each.forward(tokens, cache, cache.layout([37]))
        for each in (model, plain)
        for cache in [each.new_cache(1, 64)]
    )
    near = {"bfloat16": 0.02, "int8": 0.05, "int4": 0.5}[kind]
    assert (ours - theirs).norm() < near * theirs.norm()


def test_the_head_of_a_4_bit_model_has_8_bits():
    """The layer that suffers most from rounding rounded like all others."""
    model = from_transformers(tiny_model(), weights="int4")
    assert isinstance(model.head_product, Int8)
    assert all(isinstance(linear, Int4) for linear in model.linears[:-1])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_kind_of_weights_is_one_class_and_one_kernel(family, tied):
    """A place that knows float32 panels by itself: it would refuse the kind, leave it out of the
    one call, or compute nonsense, which the check at load finds."""
    hf = tiny_model(family, tie_word_embeddings=tied)
    model = from_transformers(hf, kernel="native", weights="mirrored")
    assert model.ops.weights == "mirrored" and model.alone == [] and model.row_stable
    assert all(isinstance(linear, Mirrored) for linear in model.linears)
    tokens = torch.arange(3, 40)
    cache = model.new_cache(1, 64)
    with torch.inference_mode():
        expected = hf(tokens[None]).logits[0]
    assert torch.allclose(model.forward(tokens, cache, cache.layout([37])), expected, atol=2e-4)
    for plan in (LayerPlan(0, 4), LayerPlan.skipping(4, attention=[1], mlp=[1, 2])):
        together, alone = states_of(model, plan), states_of(one_by_one(model), plan)
        assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_drafts_of_any_kind_change_nothing():
    """A kind whose rows depend on their neighbours, or whose head cannot be cut for drafting."""
    llm = LLM(from_transformers(tiny_model(), weights="mirrored"), None, "tiny")
    prompt = [*b"once upon a time, once upon"]
    options = {"max_new_tokens": 30, "eos": []}
    plain = llm.generate(prompt, draft=None, **options)
    exits = {"draft": "early-exit", "draft_options": {"layer": 2, "vocabulary": 64}}
    drafted = llm.generate(prompt, **exits, **options)
    assert drafted.tokens == plain.tokens and drafted.stats.drafted > 0
    assert llm.info.weights == "mirrored" and llm.info.kernel == "native"


@pytest.mark.parametrize(
    ("kernel", "dtype", "device", "words"),
    [
        ("plain", "float32", "cpu", "kernel 'plain' leaves products in float32 on cpu to torch"),
        ("plain", "bfloat16", "cpu", "'plain' leaves products in bfloat16"),
        ("auto", "bfloat16", "cpu", "'auto' leaves products in bfloat16"),
        ("auto", "float32", "cuda", "float32 on cuda to torch"),
        ("static", "float32", "cpu", "'static' leaves"),
        ("mkl", "float32", "cpu", "'mkl' leaves"),
    ],
)
def test_weights_where_our_kernels_do_not_run_are_a_conflict(kernel, dtype, device, words):
    """An option that is accepted and changes nothing."""
    where = getattr(torch, dtype), torch.device(device)
    with pytest.raises(OptionError, match=words) as error:
        operations.operations_for(kernel, *where, weights="float32")
    assert "leave it at 'auto', or use kernel='auto' with dtype='float32'" in str(error.value)
    operations.operations_for(kernel, *where, weights="auto")


def test_info_says_how_torch_stores_what_it_computes_with():
    """A kind of ours told of weights that torch holds."""
    model = from_transformers(tiny_model().to(torch.bfloat16), kernel="plain", check=False)
    info = LLM(model, None, "tiny").info
    assert (info.kernel, info.weights) == ("plain", "bfloat16")
    assert info.alone == ["every half (torch multiplies)"]


def test_weights_of_a_family_that_runs_by_modules_are_a_conflict(monkeypatch):
    """The same for transformers' own modules."""
    monkeypatch.delitem(FAMILIES, "apertus")
    model = tiny_model("apertus")
    with pytest.raises(OptionError, match="'apertus' are run by transformers' own modules"):
        from_transformers(model, weights="float32")


def test_an_unknown_kind_is_refused_before_anything_is_loaded(monkeypatch):
    """Minutes of loading for an answer that was known."""
    monkeypatch.setattr(
        "selfspec.model.load.loading.load", lambda *_, **__: pytest.fail("it was loaded")
    )
    with pytest.raises(OptionError, match="weights 'flaot32' is unknown; did you mean 'float32'"):
        LLM.from_pretrained("demo", weights="flaot32")


def test_weights_asked_for_where_there_is_no_compiler(monkeypatch):
    """A silent fallback to torch, whose weights are stored otherwise."""

    def missing(weights):
        raise NoNative("no C++ compiler found")

    monkeypatch.setattr(operations, "NativeOps", missing)
    where = torch.float32, torch.device("cpu")
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler found; install g\\+\\+"):
        operations.operations_for("auto", *where, weights="float32")
    assert operations.operations_for("auto", *where).weights is None


def test_released_weights_stay_on_their_device():
    """A model on a card that says it is on the CPU once its weights were packed: what follows it
    there, such as a probe's tokens, lies elsewhere than the weights."""
    weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    release(weight)
    assert weight.device.type == "meta" and not weight.numel()
