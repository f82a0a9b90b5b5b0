"""How weights are stored: a kind of weights is one class and one kernel, and `weights=` is for our
kernels alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_passes import one_by_one, states_of

from selfspec import LLM
from selfspec.errors import OptionError, Unavailable
from selfspec.model import operations
from selfspec.model.compute.cpu.interface import function
from selfspec.model.compute.cpu.kinds import KINDS
from selfspec.model.compute.cpu.linear import PackedLinear
from selfspec.model.compute.cpu.native import NoNative, compiled
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import tiny_model

KERNEL = """
#include "product.h"

// Weights row by row, those of odd inputs with the other sign; so are the odd numbers of x.
extern "C" void prepare_mirrored(const Product* weight, const float* x, void* prepared) {
    for (int64_t k = 0; k < weight->inputs; k++) ((float*)prepared)[k] = k % 2 ? -x[k] : x[k];
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
        return function(kernels, "multiply_mirrored"), function(kernels, "prepare_mirrored")

    def rows(self, index):
        return torch.where(torch.arange(self.inputs) % 2 == 1, -1, 1) * self._packed[index]


@pytest.fixture(autouse=True)
def mirrored(monkeypatch, tmp_path_factory):
    """The toy is a kind like any other: one more line in the table."""
    path = tmp_path_factory.getbasetemp() / "mirrored.cpp"
    path.write_text(KERNEL)
    monkeypatch.setitem(globals(), "SOURCE", path)
    monkeypatch.setitem(KINDS, "mirrored", Mirrored)


@pytest.mark.parametrize("kind", ["float32", "mirrored"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_product_of_any_kind(kind, threads):
    """Rows prepared by nobody or twice, a bias or a residual that got lost, a part that two threads
    or none take."""
    generator = torch.Generator().manual_seed(0)
    weight, x, bias, residual = (
        torch.randn(shape, generator=generator) for shape in ((70, 52), (13, 52), (70,), (13, 70))
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        linear = KINDS[kind]([weight], [bias])
        assert torch.allclose(linear(x), F.linear(x, weight, bias), atol=1e-4)
        whole = linear(x, residual=residual)
        assert torch.allclose(whole, residual + F.linear(x, weight, bias), atol=1e-4)
        alone = [linear(x[i : i + 1], residual=residual[i : i + 1]) for i in range(13)]
        assert torch.equal(whole, torch.cat(alone))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(linear.rows(torch.tensor([69, 0, 3])), weight[[69, 0, 3]])
    assert linear.bytes == 70 * 52 * 4


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


def test_weights_of_a_family_that_runs_by_modules_are_a_conflict():
    """The same for transformers' own modules."""
    model = tiny_model("stablelm", num_key_value_heads=4)
    with pytest.raises(OptionError, match="'stablelm' are run by transformers' own modules"):
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
