"""Candidates' features and what predictors make of them, next to the whole head and to torch's own
modules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from selfspec.errors import OptionError
from selfspec.exits.features import CandidateRows, features_of, need_rows, shares_of
from selfspec.exits.part import Predictors
from selfspec.exits.rules import Counts, Predicted, chance_and_lead
from selfspec.exits.schedule import Looks, Schedule
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.testing import tiny_model, tiny_predictors

# a capped head, a scaled one, one with a bias
FAMILIES = ["llama", "gemma2", "cohere", "phi"]
NAMED = [[7, 200, 31], [5, 6, 9], [250]]


def model_of(family: str, **options: Any) -> LayeredModel:
    return from_transformers(tiny_model(family, seed=4), check=False, **options)


def states(model: LayeredModel, texts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(texts, model.shape.width, generator=generator)


@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_have_the_heads_logits(family: str) -> None:
    """Rows of another token, a norm left out, a bias, scale or cap that the head has and we lack.
    Lucky if all logits were alike, so their spread is looked at."""
    model = model_of(family)
    x = states(model, 3)
    whole = model.head(x)
    rows = CandidateRows(model, NAMED, 3)
    found = rows.logits([0, 1, 2], x)
    for text, named in enumerate(NAMED):
        expected = whole[text, named]
        assert torch.allclose(found[text, : len(named)], expected, atol=1e-4), f"text {text}"
    assert whole.std() > 0.1
    assert found[2, 1:].tolist() == [-math.inf] * 2, "an empty place has no logit"
    some = rows.logits([2, 0], x[[2, 0]])
    assert torch.equal(some, found[[2, 0]]), "a text's numbers depend on the texts beside it"
    assert rows.names(0, 200) and not rows.names(1, 200) and not rows.names(2, -5)


def test_features_are_logits_shares_and_their_change() -> None:
    """A softmax over another dimension, a change with the sign turned, an empty place that is
    infinite and makes every predictor answer NaN."""
    logits = torch.tensor([[2.0, 1.0, -math.inf], [0.0, 0.0, 3.0], [-math.inf] * 3])
    shares = shares_of(logits)
    e = math.e
    assert torch.allclose(shares[0], torch.tensor([e / (e + 1), 1 / (e + 1), 0.0]))
    assert shares[2].tolist() == [0, 0, 0], "a text without candidates"
    before = torch.full((3, 3), 0.25)
    features = features_of(logits, shares, before)
    assert features.shape == (3, 9) and bool(features.isfinite().all())
    assert features[0, :3].tolist() == [2, 1, 1], "an empty place has the lowest logit"
    assert torch.equal(features[:, 3:6], shares)
    assert torch.equal(features[:, 6:], shares - before)
    assert features_of(logits, shares, None)[:, 6:].abs().sum() == 0, "nothing changed yet"


def test_change_is_since_the_last_look() -> None:
    """Shares of the layer before that were never computed, of another text, or of the first look
    for ever. The schedule may leave layers out, so looks are not one layer apart."""
    model = model_of("llama")
    found = Predictors(tiny_predictors(model, candidates=3), model)
    judge: Any = Predicted(model, found, 0.5).judge(NAMED[:2], Counts())
    rows = CandidateRows(model, NAMED[:2], 3)
    looks = [
        ([0, 1], states(model, 2, 1)),
        ([1], states(model, 1, 2)),
        ([0, 1], states(model, 2, 3)),
    ]
    last: dict[int, torch.Tensor] = {}
    for texts, x in looks:
        features = judge.features(texts, x)
        shares = shares_of(rows.logits(texts, x))
        for at, text in enumerate(texts):
            change = shares[at] - last.get(text, shares[at])
            assert torch.allclose(features[at, 6:], change, atol=1e-6), f"text {text}"
            last[text] = shares[at]
    assert features[:, 6:].abs().max() > 0.01, "nothing changed, so nothing is shown"


def test_scores_are_the_networks() -> None:
    """Another layer's weights, no bias, no ReLU; bits that depend on the texts beside one."""
    model = model_of("llama")
    part = tiny_predictors(model, layers=[1, 3])
    found = Predictors(part, model)
    features = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    for place, layer in enumerate((1, 3)):
        net = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))
        net[0].weight.data = part.tensors["first.weight"][place].T
        net[0].bias.data = part.tensors["first.bias"][place]
        net[2].weight.data = part.tensors["second.weight"][place][None]
        net[2].bias.data = part.tensors["second.bias"][place : place + 1]
        scores = found.score(layer, features)
        assert torch.allclose(scores, net(features)[:, 0], atol=1e-5)
        for at in range(5):
            assert torch.equal(found.score(layer, features[at : at + 1]), scores[at : at + 1])


def test_a_token_leaves_where_the_heads_best_is_a_candidate() -> None:
    """An exit that is not checked by the whole head: its best token is none of the candidates, and
    the text would get a word that nobody expected; or one that is checked and never let go."""
    model = model_of("llama")
    found = Predictors(tiny_predictors(model, candidates=2), model)
    x = states(model, 3)
    best = model.head(x).argmax(-1).tolist()
    named = [[best[0], 3], [t for t in (3, 4, 5) if t != best[1]][:2], [9, best[2]]]
    counts = Counts()
    judge: Any = Predicted(model, found, 1e-12).judge(named, counts)  # every predictor fires
    left = judge.look(2, [0, 1, 2], x)
    assert set(left) == {0, 2}
    assert torch.equal(left[2], model.head(x[2:3]))
    assert (counts.looks, counts.fired, counts.left) == (3, 3, 2)
    shy: Any = Predicted(model, found, 1 - 1e-12).judge(named, Counts())
    assert shy.look(2, [0, 1, 2], x) == {} and shy.counts.fired == 0


def test_adainfers_features() -> None:
    """The second best's chance in place of the lead."""
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf]])
    assert torch.allclose(chance_and_lead(logits), torch.tensor([[0.75, 0.5]]))


def test_a_head_whose_rows_cannot_be_read_is_explained() -> None:
    """NotImplementedError from deep inside, in the middle of a text."""
    model = model_of("llama")
    head: Any = type("Closed", (), {"readable": False})()
    closed = model.view(head=head)
    with pytest.raises(OptionError, match="rows cannot be read out of this model's head"):
        need_rows(closed)


# ----------------------------------------------------------------------------------------- schedule

LAYERS = [2, 4, 6, 8, 10, 12]
EXITS = [0.0, 0.05, 0.1, 0.4, 0.25, 0.2]


def test_offline_keeps_the_fewest_layers_that_hold_the_share() -> None:
    """The rarest layers kept in place of the most frequent, or one too many."""
    assert Schedule(offline=0.4).frequent(LAYERS, EXITS) == {8}
    assert Schedule(offline=0.41).frequent(LAYERS, EXITS) == {8, 10}
    assert Schedule(offline=1.0).frequent(LAYERS, EXITS) == {4, 6, 8, 10, 12}
    assert Schedule().frequent(LAYERS, [0.0] * 6) == set(LAYERS), "nothing to go by"


def test_online_looks_near_the_last_exits() -> None:
    """Exits that are never forgotten, forgotten at once, or whose neighbours are left out."""
    schedule = Schedule("online", last=2, near=2)
    looks = Looks(schedule, LAYERS, frozenset({4}))
    assert looks.next() == LAYERS, "a text without exits is looked at everywhere"
    looks.left(8)
    assert looks.next() == [6, 8, 10]
    looks.left(3)
    assert looks.next() == [2, 4, 6, 8, 10]
    looks.left(3)
    assert looks.next() == [2, 4], "the exit before the last two still counts"


@pytest.mark.parametrize(
    ("level", "expected"),
    [("all", LAYERS), ("offline", [4, 12]), ("online", [8, 10]), ("both", [4, 8, 10, 12])],
)
def test_the_levels(level: Any, expected: list[int]) -> None:
    """A union that is an intersection, or a level that is another's."""
    looks = Looks(Schedule(level, near=1), LAYERS, frozenset({4, 12}))
    looks.left(9)
    assert looks.next() == expected


@pytest.mark.parametrize(
    "options", [{"level": "some"}, {"offline": 0}, {"offline": 1.5}, {"last": 0}, {"near": -1}]
)
def test_a_schedule_of_nothing_is_refused(options: dict[str, Any]) -> None:
    """Values under which no layer would ever be looked at."""
    with pytest.raises(OptionError):
        Schedule(**options)


def test_a_look_is_read_once_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is read for every row, or to find out what the host knows already: on a card
    each of them waits for the card. One read says who fires, and one what the head says of them."""
    model, reads = model_of("llama"), list[str]()
    part = tiny_predictors(model, candidates=3, seed=1)
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(torch.Tensor, name)

        def reading(tensor: Any, name: str = name, original: Any = original) -> Any:
            reads.append(name)
            return original(tensor)

        monkeypatch.setattr(torch.Tensor, name, reading)
    found, x = Predictors(part, model), states(model, 3)
    best = [[int(token)] for token in model.head(x).argmax(-1)]
    # chances that all predictors reach, and that none does; a text with empty places beside others
    for threshold, named, expected in [
        (1e-9, [[*best[0], 3, 4], [*best[1]], [5, 6, 9]], 2),
        (1 - 1e-9, NAMED, 1),
    ]:
        counts = Counts()
        judge = Predicted(model, found, threshold).judge(named, counts)
        reads.clear()
        left = judge.look(found.layers[0], [0, 1, 2], x)
        assert reads == ["tolist"] * expected
        assert sorted(left) == ([0, 1] if expected == 2 else []) and counts.looks == 3
