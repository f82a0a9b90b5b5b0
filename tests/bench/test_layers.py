"""What every layer would say: guesses, where they settle, similarities, the page and the
picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from statistics import fmean

import pytest
import torch

from selfspec import LLM
from selfspec.bench.layers import LayerView, look, visible_mask
from selfspec.bench.layers_report import layers_page, pictures, summary
from selfspec.errors import OptionError, PromptError, Unavailable
from selfspec.lossy import early_exit_generate
from selfspec.testing import tiny_llm, tiny_model, tiny_tokenizer

TEXT = "a text of some words <b>&"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


@pytest.fixture(scope="module")
def silent() -> LLM:
    """A model whose layers from the second on add nothing: every exit from 1 on must name the same
    tokens."""
    model = tiny_model()
    for layer in model.model.layers[1:]:
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.data.zero_()
    return LLM.from_pretrained(model, tokenizer=tiny_tokenizer())


def test_guesses_are_those_of_a_model_cut_off_there(llm: LLM) -> None:
    """An exit that misses the last norm, is off by one layer, or reads the wrong position, names
    other tokens than the shallow model writes, and the last one others than the whole model
    writes.
    """
    view = look(llm, TEXT)
    ids = list(llm.tokenizer(TEXT)["input_ids"])
    for at in (3, len(ids) - 1):
        for layer in range(1, view.layers):
            expected = early_exit_generate(
                llm, ids[: at + 1], layer, max_new_tokens=1, eos=[]
            ).tokens
            assert [view.positions[at].choices[layer - 1]] == expected, (at, layer)
        assert [view.positions[at].choices[-1]] == llm.generate(
            ids[: at + 1], max_new_tokens=1, eos=[], draft=None
        ).tokens


def test_layers_that_add_nothing_settle_nothing_and_are_similar(silent: LLM) -> None:
    """Counting layers from 0, or similarity of the wrong half, would show here: all is settled at
    exit 1, and cosines are 1."""
    view = look(silent, TEXT)
    assert {(p.first, p.settles) for p in view.positions} == {(1, 1)}
    assert view.attention[1:] == pytest.approx([1.0] * 3) and view.mlp[1:] == pytest.approx(
        [1.0] * 3
    )
    assert view.attention[0] < 0.999 and view.mlp[0] < 0.999
    assert {each.settles for each in view.positions} == {1} and view.settled_by(
        1
    ) == view.agreement(1) == 1


def test_first_named_is_not_settled() -> None:
    """A guess that was right, was dropped and came back: first and settles must tell the two
    apart."""
    position = look(tiny_llm(), "abc").positions[0]
    flickering = dataclasses.replace(position, guesses=("x", "y", "y", "x"))
    assert flickering.runs == [("x", 1, 1), ("y", 2, 3), ("x", 4, 4)]


@pytest.mark.parametrize("last", [1, 7])
def test_a_long_text_shows_its_end_and_counts_all(llm: LLM, last: int) -> None:
    """The part before the shown positions is read too: else the guesses lack context, and the
    similarities a part of the text."""
    whole, end = look(llm, TEXT, last=1000), look(llm, TEXT, last=last)
    assert end.positions == whole.positions[-last:]
    assert end.attention == pytest.approx(whole.attention) and end.mlp == pytest.approx(whole.mlp)


def test_what_the_model_wrote_is_looked_at_too(llm: LLM) -> None:
    """Written tokens are marked, and each is what the position before it named in the end."""
    view = look(llm, TEXT, new_tokens=5)
    written = [p.written for p in view.positions]
    assert written == [False] * len(TEXT) + [True] * (
        view.tokens - len(TEXT)
    ) and view.tokens > len(TEXT)
    for position in view.positions[len(TEXT) - 1 : -1]:
        assert position.following == position.guesses[-1]


def test_bad_input(llm: LLM) -> None:
    """An empty prompt, no positions, and a model without a tokenizer are errors that say so."""
    with pytest.raises(PromptError, match="empty"):
        look(llm, "")
    with pytest.raises(OptionError, match="last=0"):
        look(llm, TEXT, last=0)
    with pytest.raises(Unavailable, match="without a tokenizer"):
        look(LLM(llm.model, None, "bare"), TEXT)
    assert look(LLM(llm.model, None, "bare"), [5, 6]).positions[0].token == "<5>"


def test_blanks_can_be_seen(llm: LLM) -> None:
    """A column of empty cells would look like missing values, and a control character would do what
    it says."""
    assert visible_mask(llm, llm.tokenizer("\x1b")["input_ids"][0]) == r"\x1b"
    assert [visible_mask(llm, token) for token in llm.tokenizer("a \n")["input_ids"]] == [
        "a",
        "·",
        "⏎",
    ]


def test_the_page_shows_every_guess_and_escapes_it(llm: LLM) -> None:
    """A token such as <b> must be shown, not obeyed; nothing may be fetched or run."""
    view = look(llm, TEXT)
    page = layers_page(view)
    assert (
        page.count("<tr><th>") == view.layers + 5
    )  # a row an exit, where it settles, two halves, two heads
    assert "&lt;" in page and "&amp;" in page and "<b>" not in page
    assert "http" not in page and "<script" not in page
    assert f"{fmean(each.settles for each in view.positions):.1f} of {view.layers}" in summary(view)


def test_the_picture_and_json_are_written(llm: LLM, tmp_path: Path) -> None:
    """Cells with a dollar would be read as a formula by matplotlib and fail."""
    from selfspec.bench.pictures import draw

    view = look(llm, "$x_{$ $", last=4)
    draw("$x_{", pictures(view), tmp_path / "view.png")
    assert (tmp_path / "view.png").read_bytes().startswith(b"\x89PNG")
    again = json.loads(json.dumps(view.as_dict()))
    assert (again["kind"], again["layers"], len(again["positions"])) == ("inspect", 4, 4)
    assert isinstance(view, LayerView) and torch.tensor(again["attention"]).shape == (4,)
