"""Training a draft-LoRA: it drafts as it was measured, and the model it stands beside stays what it
was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from own_text import calm_model, shown_command, with_text

from selfspec import LLM
from selfspec.draft.from_layers.layer_skip import LayerSkip
from selfspec.errors import OptionError, UnsupportedModel
from selfspec.model.families import family_of
from selfspec.model.shaping import shape_of
from selfspec.testing import tiny_llm, tiny_lora, tiny_model, tiny_tokenizer
from selfspec.train.draft_lora import LoraRecipe
from selfspec.train.part_run import train_small_part
from selfspec.train.parts import PartOptions
from selfspec.train.states import States
from selfspec.trained.files import load_part
from selfspec.trained.lora import lora_view


@pytest.mark.parametrize(
    ("family", "rank"), [("llama", 8), ("qwen3", 8), ("llama", 0), ("qwen2", 0)]
)
def test_it_learns_and_drafts_what_it_measured(family: str, rank: int, tmp_path: Path) -> None:
    """Training that moves nothing; matrices put beside another linear, in another order of a fused
    product or twice; a skipped half that ran in training; a linear without its bias."""
    model = with_text(calm_model(tmp_path / "model", family, 0.3))
    report = train_small_part(
        str(model),
        [model / "own.jsonl"],
        tmp_path / "out",
        recipe=LoraRecipe(skip_attention=(1,), skip_mlp=(1, 2), vocabulary=259, rank=rank),
        options=PartOptions(
            epochs=20,
            batch_tokens=400,
            save_every=10,
            measured=8,
            learning_rate=1e-2 if rank else 1e-3,
        ),
        held_out=0.2,
        plot=False,
    )
    assert report.log[-1]["loss"] < 0.95 * report.log[0]["loss"]
    llm, kept, tried, right = LLM.from_pretrained(model), States(tmp_path / "out" / "states"), 0, 0
    for number in kept.held_out[:8]:
        tokens, begin = kept.batch([number])["tokens"][0].tolist(), kept.where[number][3]
        # a draft after every token of the answer, as it was measured
        for end in range(begin + 1, len(tokens)):
            call: dict[str, Any] = {
                "control": "fixed",
                "control_options": {"tokens": 1},
                "draft": LayerSkip(part=tmp_path / "out"),
            }
            found = llm.generate(tokens[: end - 1], max_new_tokens=3, eos=[], **call)
            tried, right = tried + 1, right + found.stats.accepted_at[0]
    assert right / tried == pytest.approx(report.acceptance[0], abs=0.03)
    assert load_part(tmp_path / "out").settings == {"attention": [1], "mlp": [1, 2], "rank": rank}
    assert "--draft layer-skip --draft-option part=out" in shown_command(tmp_path / "out")


def test_the_model_stays_what_it_was() -> None:
    """A view that shares more than the weights: matrices that stay on while the model verifies."""
    llm = tiny_llm(seed=4)
    tokens = torch.tensor([5, 6, 7])

    def logits(model: Any) -> torch.Tensor:
        cache = model.new_cache(1, 8)
        found: torch.Tensor = model.forward(tokens, cache, cache.layout([3]))
        return found

    before = logits(llm.model)
    view = lora_view(tiny_lora(llm.model, attention=(), mlp=()), llm.model)
    assert not torch.allclose(logits(view), before, atol=1e-2)
    assert torch.equal(logits(llm.model), before)
    merged, part = tiny_model(seed=4), tiny_lora(llm.model, attention=(), mlp=())
    for (
        name,
        linear,
        # beside the right linear, at the right place of a fused one
    ) in merged.model.layers.named_modules():
        stored = f"layers/{name.replace('.', '/')}"
        if f"{stored}.a" in part.tensors:
            linear.weight.data += part.tensors[f"{stored}.b"] @ part.tensors[f"{stored}.a"]
    torch.testing.assert_close(
        logits(view), logits(LLM.from_pretrained(merged).model), atol=1e-3, rtol=1e-3
    )
    assert view.blocks[0].linears[0].base is llm.model.blocks[0].linears[0]  # type: ignore[attr-defined]


def test_what_is_skipped_by_default() -> None:
    """Everything or nothing skipped, the first layer among it, or another number of layers than the
    share says."""
    config = tiny_model(num_hidden_layers=12).config
    shape = shape_of(config, family_of(config))  # type: ignore[arg-type]
    attention, mlp = LoraRecipe().skipped(shape)
    assert attention == mlp == tuple(sorted(set(attention))) and len(attention) == 6
    assert attention[0] > 0 and attention[-1] < 11
    assert LoraRecipe(skip_mlp=(3,)).skipped(shape) == ((), (3,))
    for wrong in (
        {"skip_mlp": (12,)},
        {"skip_share": 0.01},
        {"skip_attention": tuple(range(12)), "skip_mlp": tuple(range(12))},
    ):
        with pytest.raises(OptionError, match="cannot be skipped in a model of 12 layers"):
            LoraRecipe(**wrong).skipped(shape)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="rank=-1"):
        LoraRecipe(rank=-1)


def test_families_whose_linears_are_stored_otherwise_are_refused(tmp_path: Path) -> None:
    """Matrices that would stand beside the wrong outputs, silently."""
    tiny_model("gpt_neox").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    lines = [
        json.dumps({"prompt_ids": [5, n], "response_ids": [7, 8, n, 9, 10, 11]})
        for n in range(3, 60)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    with pytest.raises(UnsupportedModel, match="cannot be trained for a gpt_neox model"):
        train_small_part(
            str(tmp_path / "model"),
            [tmp_path / "own.jsonl"],
            tmp_path / "out",
            recipe=LoraRecipe(),
            plot=False,
        )


@pytest.mark.parametrize(
    "options", [{"strategy": "first"}, {"mlp": (1,)}, {"vocabulary": 9}, {"profile": "x.json"}]
)
def test_what_a_part_says_itself_is_not_said_again(options: dict[str, Any]) -> None:
    """An option that would be ignored beside a part."""
    with pytest.raises(OptionError, match=r"leave out"):
        LayerSkip(part="folder", **options)
