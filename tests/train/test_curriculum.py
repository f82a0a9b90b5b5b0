"""The recipe's numbers against tables worked out by hand from the paper's formulas."""

from __future__ import annotations

import pytest

from selfspec import OptionError
from selfspec.train.curriculum import (
    depth_rates,
    exit_scales,
    exit_weights,
    gradual,
    rotational,
    time_scale,
)
from selfspec.train.presets import PRESETS, preset
from selfspec.train.recipe import Recipe

THIRDS = [0.0, 0.2599210, 0.5874011, 1.0]  # 2^(l/3) - 1
QUARTERS = [0.0, 0.1892071, 0.4142136, 0.6817928, 1.0]  # 2^(t/4) - 1


def on(flags: list[bool]) -> list[int]:
    return [index for index, flag in enumerate(flags) if flag]


def test_dropout_rises_with_depth() -> None:
    """L in place of L - 1, or layers counted from 1: the first layer would be dropped, or the last
    one not at the full rate."""
    assert depth_rates(4) == pytest.approx(THIRDS, abs=1e-6)
    assert Recipe(dropout=0.2).dropout_rates(4, 0, 10) == pytest.approx(
        [0.2 * rate for rate in THIRDS], abs=1e-6
    )
    assert depth_rates(1) == [0.0], "the only layer is the first and is never dropped"


def test_constant_dropout_has_the_same_mean() -> None:
    """A comparison of shapes at different means would say nothing about the shape (the paper's Fig.
    12)."""
    assert depth_rates(4, "constant") == pytest.approx([sum(THIRDS) / 4] * 4, abs=1e-6)


def test_dropout_rises_over_time_only_from_scratch() -> None:
    """T in place of T - 1, or the curriculum for scratch used in fine-tuning, where the paper has
    none."""
    assert [time_scale(step, 5, "exponential") for step in range(5)] == pytest.approx(
        QUARTERS, abs=1e-6
    )
    assert [time_scale(step, 5, "constant") for step in range(5)] == [1.0] * 5
    assert time_scale(9, 5, "exponential") == 1.0, (
        "a run that goes on beyond its plan stays at the full rate"
    )
    assert Recipe(dropout=0.1, dropout_time="exponential").dropout_rates(4, 2, 5)[
        3
    ] == pytest.approx(0.1 * QUARTERS[2], abs=1e-6)


def test_scales_of_the_exits() -> None:
    """e(l) by hand for L = 4, e_scale = 0.5: 0.5 times 0, 1, 1+2, and 3 + 0.5 (1+2) for the last;
    an off-by-one in either sum."""
    assert exit_scales(4, 0.5) == [0.0, 0.5, 1.5, 4.5]
    assert exit_scales(5, 1.0) == [0.0, 1.0, 3.0, 6.0, 4 + 6.0]
    assert exit_scales(4, 0.0) == [0.0, 0.0, 0.0, 3.0]


def test_weights_are_normalised_over_the_exits_that_are_on() -> None:
    """Weights normalised over all exits would shrink the loss when few are on."""
    scales = exit_scales(4, 0.5)
    assert exit_weights(scales, [True, False, True, True]) == pytest.approx([0.0, 0.0, 0.25, 0.75])
    assert exit_weights(scales, [False, True, False, True]) == pytest.approx([0.0, 0.1, 0.0, 0.9])
    assert exit_weights(scales, [True] * 4) == pytest.approx([0.0, 1 / 13, 3 / 13, 9 / 13])


def test_rotation() -> None:
    """Each early exit once in R steps, moving by one each step, the last layer always; a rotation
    by R would stand still."""
    assert [on(rotational(6, step, 3)) for step in range(4)] == [
        [0, 3, 5],
        [1, 4, 5],
        [2, 5],
        [0, 3, 5],
    ]
    for layers, dilation in [(32, 8), (40, 39), (24, 23), (5, 2), (4, 1)]:
        steps = [on(rotational(layers, step, dilation)) for step in range(dilation)]
        assert all(layers - 1 in step for step in steps)
        assert sorted(layer for step in steps for layer in step if layer < layers - 1) == list(
            range(layers - 1)
        )
        assert max(
            len([layer for layer in step if layer % dilation == index])
            for index, step in enumerate(steps)
        ) <= -(-layers // dilation)


def test_gradual() -> None:
    """From the last layer down, one more every T / 2L steps (here 2), all on from the middle; the
    other direction, or T / L."""
    expected = {
        0: [3],
        1: [3],
        2: [2, 3],
        3: [2, 3],
        4: [1, 2, 3],
        6: [0, 1, 2, 3],
        15: [0, 1, 2, 3],
    }
    assert {step: on(gradual(4, step, 16)) for step in expected} == expected
    assert on(gradual(4, 0, 1)) == [3], "a single step trains the last layer"
    assert on(gradual(3, 1, 7)) == [2] and on(gradual(3, 2, 7)) == [1, 2], (
        "T / 2L = 7/6 is not rounded down"
    )


def test_a_recipe_puts_them_together() -> None:
    """Exits without weight must not be computed: they would cost a head each and change nothing."""
    recipe = Recipe(exit_scale=0.5, rotation=2)
    assert recipe.exit_weights(4, 0, 10) == pytest.approx({2: 0.25, 3: 0.75})
    assert recipe.exit_weights(4, 1, 10) == pytest.approx({1: 0.1, 3: 0.9})
    assert recipe.variant("LD").exit_weights(4, 1, 10) == {3: 1.0}
    assert Recipe(curriculum="all", exit_scale=0.5).exit_weights(4, 1, 10) == pytest.approx(
        {1: 1 / 13, 2: 3 / 13, 3: 9 / 13}
    )
    assert on(Recipe().exits_on(8, 5, 10)) == [1, 5, 7], "by default two early exits a step"


def test_chosen_exits() -> None:
    """Exits counted from 0 where the option counts layers, a rotation that goes through all layers
    and leaves steps empty, a gradual curriculum that starts with the shallowest."""
    turns = Recipe(exits=(4, 2, 6), exit_scale=1.0, rotation=3)
    assert [on(turns.exits_on(8, step, 9)) for step in range(4)] == [[1, 7], [3, 7], [5, 7], [1, 7]]
    assert [
        on(Recipe(exits=(2, 4, 6), curriculum="gradual").exits_on(8, step, 8))
        for step in (0, 1, 2, 3)
    ] == [[7], [5, 7], [3, 5, 7], [1, 3, 5, 7]]
    whole = Recipe(exits=(2, 4), curriculum="all").exit_weights(8, 0, 1)
    assert whole == pytest.approx({1: 1 / 35, 3: 6 / 35, 7: 28 / 35}), (
        "the paper's scales 1, 6 and 7 + 21"
    )


def test_even_weights() -> None:
    """Early exits that outweigh the last layer, or that still weigh by depth."""
    even = Recipe(exits=(2, 4, 6), curriculum="all", weighting="even", exit_scale=0.5)
    assert even.exit_weights(8, 0, 1) == pytest.approx({1: 0.2, 3: 0.2, 5: 0.2, 7: 0.4})
    assert even.variant("LD").exit_weights(8, 0, 1) == {7: 1.0}


def test_variants() -> None:
    """An ablation that leaves the other half on."""
    recipe = Recipe(dropout=0.3, exit_scale=0.7)
    seen = {
        name: (recipe.variant(name).dropout, recipe.variant(name).exit_scale)
        for name in ("LD+EE", "LD", "EE", "plain")
    }
    assert seen == {"LD+EE": (0.3, 0.7), "LD": (0.3, 0.0), "EE": (0.0, 0.7), "plain": (0.0, 0.0)}
    assert recipe.variant("plain").dropout_rates(4, 1, 5) == [0.0] * 4


def test_presets_are_the_papers_table() -> None:
    """A number that slipped into the neighbouring row."""
    seen = {
        name: (
            e.recipe.dropout,
            e.recipe.exit_scale,
            e.recipe.rotation,
            e.rate,
            e.batch,
            e.steps,
            e.devices,
        )
        for name, e in PRESETS.items()
    }
    assert seen == {
        "continual-7b": (0.1, 0.2, 8, 3e-5, 4, 50_000, 64),
        "continual-13b": (0.1, 0.1, 39, 2e-5, 4, 50_000, 64),
        "scratch-1.5b": (0.1, 0.2, 23, 8e-4, 4, 50_000, 32),
        "scratch-7b": (0.2, 0.2, 31, 8e-4, 4, 50_000, 32),
        "code-7b": (0.1, 1.0, 16, 1e-4, 4, 10_000, 32),
        "task-1.5b": (0.2, 1.0, None, 1e-4, 32, 5_800, 8),
    }
    scratch = {name for name, e in PRESETS.items() if e.recipe.dropout_time == "exponential"}
    assert scratch == {"scratch-1.5b", "scratch-7b"}
    assert {name for name, e in PRESETS.items() if e.recipe.curriculum == "gradual"} == {
        "task-1.5b"
    }
    assert (preset("scratch-1.5b").rate_plain, preset("scratch-7b").rate_plain) == (4e-4, 3e-4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dropout": 1.5}, "outside 0 to 1"),
        ({"dropout": 1.0}, "never be trained"),
        ({"exit_scale": -0.1}, "outside 0 to 1"),
        ({"share": 0.0}, "no position"),
        ({"rotation": 0}, "not a number of steps"),
        ({"curriculum": "rotationl"}, "did you mean 'rotational'"),
        ({"dropout_depth": "linear"}, "known: constant, exponential"),
        ({"weighting": "evn"}, "did you mean 'even'"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object], words: str) -> None:
    """A value outside the recipe's range trains something else without a word."""
    with pytest.raises(OptionError, match=words):
        Recipe(**wrong)  # type: ignore[arg-type]


def test_a_recipe_is_checked_against_the_model() -> None:
    """A rotation longer than the model has steps without any early exit; one layer has no exit at
    all."""
    with pytest.raises(OptionError, match="rotation=9 is more than the model's 8 layers"):
        Recipe(rotation=9).check(8)
    for exits, words in [
        ((8,), "exit 8 is not inside"),
        ((0, 2), "exit 0 is not inside"),
        ((2, 2), "names an exit twice"),
    ]:
        with pytest.raises(OptionError, match=words):
            Recipe(exits=exits).check(8)
    with pytest.raises(OptionError, match="rotation=3 is more than the 2 chosen exits"):
        Recipe(exits=(2, 4), rotation=3).check(8)
    with pytest.raises(OptionError, match="1 layer"):
        Recipe().check(1)
    Recipe().variant("plain").check(1)
    with pytest.raises(OptionError, match="did you mean 'code-7b'"):
        preset("code-7")
    with pytest.raises(OptionError, match="variant 'LDEE'"):
        Recipe().variant("LDEE")
