"""Parts of a pass from whole passes, and what a candidate's round costs by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from selfspec.model.from_transformers import from_transformers
from selfspec.testing import tiny_model
from selfspec.tune import candidates, rounds, steps
from selfspec.tune.candidates import Plain
from selfspec.tune.probe import Agreement
from selfspec.tune.rounds import Host
from selfspec.tune.steps import Line, Size, Steps

LAYERS = 4


def _made_up() -> Steps:
    """A pass of 1 token takes 0.5 + 4 * (1 + 2) = 12.5, its head 3."""
    return Steps(
        Line({"1": 2.0, "9": 4.0}),
        Line({"1": 1.0, "9": 1.8}),
        {"1": {"1": Line({"64": 0.0, "1088": 1.0})}, "3": {"1": Line({"64": 0.0, "1088": 0.5})}},
        Line({"1": 3.0, "9": 5.0}),
        0.5,
    )


def test_a_line_goes_on_behind_its_ends() -> None:
    """Sizes between, before and behind what was measured."""
    line = Line({"2": 4.0, "4": 6.0, "8": 14.0})
    assert [line(size) for size in (1, 2, 3, 6, 10)] == [3, 4, 5, 10, 18]
    assert Line({"4": 2.0})(2) == 1.0


def test_a_pass_is_the_sum_of_its_parts() -> None:
    """Rows, contexts and halves that are counted once too often or not at all."""
    parts = _made_up()
    assert parts.pass_seconds((4, 4), 1, 1, 64, 0) == pytest.approx(12.5)
    assert parts.pass_seconds((4, 4), 1, 1, 64, 1) == pytest.approx(15.5)
    assert parts.pass_seconds((4, 0), 1, 1, 576, 0) == pytest.approx(0.5 + 4 * 1.5)
    assert parts.pass_seconds((0, 2), 1, 5, 64, 0) == pytest.approx(0.5 + 2 * 3.0)
    alone = parts.pass_seconds((1, 0), 1, 3, 1088, 0)
    assert alone == pytest.approx(0.5 + 1.2 + 3)
    several = parts.pass_seconds((1, 0), 3, 3, 1088, 0)
    assert several == pytest.approx(0.5 + 1.8 + 3 * 1.5), "rows that share threads are not cheaper"
    assert parts.pass_seconds((1, 0), 2, 1, 1088, 0) == pytest.approx(0.5 + 1.1 + 2 * 0.75)
    more = parts.pass_seconds((1, 0), 6, 3, 1088, 0) - parts.attention(18)
    assert more == pytest.approx(0.5 + 6 * 1.5), "rows beyond those measured"


def test_parts_are_found_again_in_passes_made_of_them() -> None:
    """A fixed part that is counted in every half, or a look back that is not."""
    model: Any = type("Model", (), {"layers": LAYERS})()
    found = {}
    for count in (1, 8, 32):
        found[Size("mlp", 1, count, 64)] = 0.5 + LAYERS * (1 + count)
        found[Size("attention", 1, count, 64)] = 0.5 + LAYERS * (2 + count)
        found[Size("attention", 1, count, 512)] = 0.5 + LAYERS * (2 + count + 0.1 * count)
        found[Size("head", 1, count, 0)] = 3.0 * count
    for count in (1, 8):
        found[Size("attention", 2, count, 512)] = 0.5 + LAYERS * (2 + 2 * count + 2 * 0.05 * count)
    found[Size("both", 1, 1, 64)] = 0.5 + LAYERS * (2 + 3)
    found[Size("check", 2, 4, 512)] = 0.5 + LAYERS * (9 + 10 + 2 * 0.2)
    parts = steps._steps(model, found)
    assert parts.fixed == pytest.approx(0.5)
    assert parts.mlp(8) == pytest.approx(9)
    assert parts.attention(20) == pytest.approx(22)
    assert parts.errors == [pytest.approx(0, abs=1e-9)]


def test_times_that_other_work_spoiled_do_not_count() -> None:
    """A burst in one size that makes it dearer than a larger one, and a mean of bursts."""
    small, large = Size("mlp", 1, 1, 64), Size("mlp", 1, 8, 64)
    other = Size("attention", 1, 1, 64)
    times = {small: [9.0, 9.0, 9.0], large: [4.0, 4.1, 4.0, 30.0, 30.0], other: [7.0]}
    assert steps._settled(times) == {small: 4.0, large: 4.0, other: 7.0}


def test_an_exit_verifies_without_its_first_layers() -> None:
    """Layers that a draft ran and that are counted again, and a skip that saves nothing."""
    model, parts = from_transformers(tiny_model(), check=False), _made_up()
    plain = Plain(64, Host(0.0))
    early = candidates.exiting(model, parts, 3)
    # the draft: 3 layers and the head; then 3 layers for 1 token, 1 for 2, and 2 tokens' head
    expected = 0.5 + 9 + 3 + (0.5 + 9) + (0.5 + 2.25 + 1.1) + 3.25
    assert early.round_seconds(parts, LAYERS, 1, plain) == pytest.approx(expected)
    skipped = candidates.skipping(model, parts, (2,), (0, 3))
    assert (skipped.halves, skipped.shared) == ((3, 2), 0)
    assert skipped.way(3).draft_options == {"attention": [2], "mlp": [0, 3]}


def test_the_number_of_drafts_follows_from_what_is_kept() -> None:
    """Long chains where all is kept, longer ones than were looked at; short ones where the second
    draft never is."""
    model, parts = from_transformers(tiny_model(), check=False), _made_up()
    plain = Plain(64, Host(0.0))
    copy = candidates.copied(model, Steps(Line({"1": 0.1}), Line({"1": 0.1}), parts.looking,
                                          Line({"1": 0.1}), 0.0), "int8")  # fmt: skip
    always = Agreement(torch.ones(9, 8, dtype=torch.bool), torch.ones(9, 8), 72)
    once = torch.zeros(9, 8, dtype=torch.bool)
    once[:, 0] = True
    rare = Agreement(once, torch.ones(9, 8), 72)
    best = copy.predicted(always, parts, LAYERS, plain)
    assert best.tokens > 8 and best.acceptance == 1.0
    assert best.gain > 3
    assert copy.predicted(rare, parts, LAYERS, plain).tokens == 1


def test_parts_of_a_real_model_are_measured() -> None:
    """Caches too short for what is timed, rows that are not there, a model with a short context."""
    for context in (512, 96):
        model = from_transformers(tiny_model(max_position_embeddings=context), check=False)
        shares: list[float] = []
        parts = steps.measure(model, 0.2, shares.append)
        assert parts.head(8) > 0
        assert parts.pass_seconds((4, 4), 1, 1, 64, 1) > 0
        assert len(parts.errors) == len(steps.checks(model))
        assert shares[-1] <= 1


def test_the_hosts_share_is_found_again_by_rows_and_tokens() -> None:
    """A share that is counted once for all rows, or again for each token."""
    told = Host(1.0, 0.1, 0.01, 0.5, 0.2)
    over = {shape: told.round(*shape) for shape in rounds.SHAPES}
    drafts = {rows: told.drafting(rows) for rows in (1, rounds.MANY_ROWS)}
    found = rounds._fitted(over, drafts)
    assert found.round(3, 5) == pytest.approx(1.0 + 2 * 0.1 + 3 * 4 * 0.01)
    assert found.drafting(3) == pytest.approx(0.5 + 2 * 0.2)
    noisy = rounds._fitted(dict.fromkeys(rounds.SHAPES, -1.0), dict.fromkeys(drafts, -1.0))
    assert noisy == Host(0.0), "less than nothing"


def test_a_batch_drafts_and_verifies_in_every_row() -> None:
    """Rows that are counted in the pass and not in the draft, or the other way round."""
    model, parts = from_transformers(tiny_model(), check=False), _made_up()
    copy = candidates.copied(model, parts, "int8")
    batch = Plain(64, Host(0.1, 0.01, 0.0, 0.2, 0.02), rows=3)
    draft = parts.pass_seconds((4, 4), 3, 1, 64, 3) + 0.2 + 2 * 0.02
    verify = parts.pass_seconds((4, 4), 3, 3, 64, 9) + 0.1 + 2 * 0.01
    assert copy.round_seconds(parts, LAYERS, 2, batch) == pytest.approx(2 * draft + verify)
