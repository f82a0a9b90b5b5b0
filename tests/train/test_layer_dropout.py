"""Layer dropout on transformers' own layers: dropped samples skip the layer, the others notice
nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runs import trainable
from torch import nn

from selfspec import UnsupportedModel
from selfspec.model.families import FAMILIES, family_of
from selfspec.model.weights import module
from selfspec.testing import tiny_model
from selfspec.train.layer_dropout import LayerDropout, draw_keep
from selfspec.train.supported import PROVEN

ROWS, LENGTH = 4, 12


def states(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


def layers_of(model: Any) -> Any:
    return module(model, FAMILIES[model.config.model_type].layers)


def skipping(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None, skipped: list[int]
) -> torch.Tensor:
    """The reference: the model with these layers replaced by nothing at all."""

    class Nothing(nn.Module):
        def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return hidden_states

    layers = layers_of(model)
    whole = list(layers)
    try:
        for index in skipped:
            layers[index] = Nothing()
        return states(model, ids, mask)
    finally:
        for index, layer in enumerate(whole):
            layers[index] = layer


CASES = [
    *((family, True, "eager") for family in PROVEN),
    *((family, True, "sdpa") for family in PROVEN if family != "gemma2"),
]


@pytest.mark.parametrize(
    ("family", "padded", "attention"), [*CASES, ("llama", False, "sdpa"), ("gpt2", False, "eager")]
)
def test_each_sample_runs_its_own_layers(family: str, padded: bool, attention: str) -> None:
    """Rows put back in another order, a mask or positions left whole, a row that still passes
    through the layer."""
    model = trainable(family, seed=3)
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 250, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    if padded:  # different for each row, so that a mask of the wrong rows shows
        for row in range(ROWS):
            mask[row, :row] = 0
    keep = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    dropout = LayerDropout(list(layers_of(model)))
    with dropout.installed():
        dropout.set(keep)
        found = states(model, ids, mask if padded else None)
    for row in range(ROWS):
        skipped = [layer for layer in range(4) if not keep[layer, row]]
        alone = skipping(
            model, ids[row : row + 1], mask[row : row + 1] if padded else None, skipped
        )
        seen = mask[row].bool()
        assert torch.allclose(found[row, seen], alone[0, seen], atol=1e-5), (
            f"row {row}, without layers {skipped}"
        )


def test_gradients_follow_the_samples() -> None:
    """A copy that cuts the graph: the rows that ran, and those that were put by, both have to carry
    their gradients."""
    model = tiny_model(seed=3).double().requires_grad_(True)
    ids = torch.randint(3, 250, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    dropout = LayerDropout(list(model.model.layers))
    with dropout.installed():
        dropout.set(torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1]], dtype=torch.bool))
        states(model, ids).square().sum().backward()
    found = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    (
        skipping(model, ids[:1], None, [3]).square().sum()
        + skipping(model, ids[1:], None, [1]).square().sum()
    ).backward()
    for name, gradient in found.items():
        assert torch.allclose(gradient, module(model, name).grad, rtol=1e-9, atol=1e-9), name  # type: ignore[arg-type]
    assert any("layers.1" in name for name in found) and any("layers.3" in name for name in found)


def test_the_model_is_as_it_was_afterwards() -> None:
    """A wrapper left behind would be called, and dropped by, in whatever the model is used for
    next; also after an error."""
    model = tiny_model(seed=3)
    layers = list(model.model.layers)
    ids = torch.tensor([[5, 6, 7]])
    before = states(model, ids)
    mine = layers[1].forward
    layers[1].forward = mine  # somebody else's wrapper stays
    dropout = LayerDropout(layers)
    with pytest.raises(RuntimeError, match="stop here"), dropout.installed():
        dropout.set(torch.zeros(4, 1, dtype=torch.bool))
        raise RuntimeError("stop here")
    assert [("forward" in vars(layer)) for layer in layers] == [False, True, False, False]
    assert layers[1].forward is mine
    assert torch.equal(states(model, ids), before)
    assert family_of(model.config) is not None


def test_masks_are_counted_not_consumed() -> None:
    """A mask that depends on what was drawn before would differ after a resume, on another rank, or
    in a recomputed layer."""
    rates = [0.0, 0.2, 0.5, 1.0]
    first = draw_keep(rates, 8, seed=1, step=3, micro=0)
    torch.rand(10)
    assert torch.equal(first, draw_keep(rates, 8, seed=1, step=3, micro=0))
    others = [
        draw_keep(rates, 8, seed=s, step=t, micro=m)
        for s, t, m in [(2, 3, 0), (1, 4, 0), (1, 3, 1)]
    ]
    assert all(not torch.equal(first, other) for other in others)
    assert first[0].all() and not first[3].any(), "rate 0 never drops, rate 1 always"


def test_masks_have_their_rates() -> None:
    """Layers that share one draw, or rates used as the chance of staying. 4 standard deviations,
    fixed seeds."""
    kept = torch.stack(
        [draw_keep([0.1, 0.6], 50, seed=0, step=step, micro=0) for step in range(40)]
    ).double()
    for layer, rate in enumerate([0.1, 0.6]):
        assert abs(1 - kept[:, layer].mean() - rate) < 4 * (rate * (1 - rate) / 2000) ** 0.5
    both = (kept[:, 0] * kept[:, 1]).mean() - kept[:, 0].mean() * kept[:, 1].mean()
    assert abs(both) < 4 * 0.25 / 2000**0.5, "the layers are dropped independently of each other"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 2])}, "cu_seq_lens_q"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"attention_mask": object()}, "sdpa"),
    ],
)
def test_what_cannot_be_cut_is_refused(given: dict[str, object], words: str) -> None:
    """An unknown argument handed on whole would give rows the positions or masks of other
    samples."""

    class Layer(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
            return hidden_states

    layer = Layer()
    dropout = LayerDropout([layer])
    with dropout.installed():
        dropout.set(torch.tensor([[True, False]]))
        with pytest.raises(UnsupportedModel, match=words):
            layer(torch.zeros(2, 3, 4), **given)
