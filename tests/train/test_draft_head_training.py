"""Training a draft head: the loss is the one written down, runs resume bit by bit, and what cannot
be trained says why."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_text import calm_model, random_answers
from transformers import AutoModelForCausalLM

from selfspec import LLM
from selfspec.draft.from_models.draft_head import DraftHead
from selfspec.errors import DataError, OptionError, ResourceError, TrainingError
from selfspec.model.families import family_of
from selfspec.model.shaping import shape_of
from selfspec.testing import tiny_model
from selfspec.train import parts, states
from selfspec.train.draft_head import HeadRecipe, HeadTraining, likeliest
from selfspec.train.head_net import Candidates, Roots, attend, begins
from selfspec.train.part_run import Observer, PartReport, train_small_part
from selfspec.train.parts import FrozenModel, PartOptions
from selfspec.train.states import StateOptions, States, read_conversations
from selfspec.trained.files import load_part

RECIPE = HeadRecipe(layers=(1, 3), vocabulary=120)
QUICK = PartOptions(epochs=4, batch_tokens=400, save_every=4, measured=8, ahead=2, others=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    """What the model wrote."""
    return written(model / "own.jsonl", random_answers(model, 40, 24))


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def trained(
    model: Path, text: Path, out: Path, options: PartOptions = QUICK, **more: Any
) -> PartReport:
    return train_small_part(
        str(model), [text], out, recipe=RECIPE, options=options, held_out=0.2, plot=False, **more
    )


@pytest.fixture(scope="module")
def whole(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption."""
    out = tmp_path_factory.mktemp("whole")
    trained(model, text, out)
    return out


# ----------------------------------------------------------------------------------------- the loss


def training(model: Path, whole: Path, **options: Any) -> tuple[HeadTraining, States]:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)
    shape = shape_of(network.config, family_of(network.config))  # type: ignore[arg-type]
    kept = States(whole / "states")
    vocabulary = likeliest(kept.frequencies(shape.vocabulary), RECIPE.vocabulary)
    frozen = FrozenModel(network, family_of(network.config), shape, vocabulary, 1.0)  # type: ignore[arg-type]
    return HeadTraining(frozen, RECIPE, replace(QUICK, **options)), kept


def test_loss_is_cross_entropy_to_the_models_own_distribution(model: Path, whole: Path) -> None:
    """A target one token early or late, a depth that reads another token, mass outside the
    vocabulary that teaches something."""
    head, kept = training(model, whole, others=0, noise=0.0)
    batch = kept.batch(kept.trained[:3])
    batch["states"] = batch["states"].float()
    found = head.drafted(batch, torch.Generator(), False)
    logged: list[torch.Tensor] = []
    logits = head.ends.logits
    head.ends.logits = lambda x, some=None: logged.append(logits(x, some)) or logged[-1]  # type: ignore[method-assign,func-returns-value,assignment]
    head.drafted(batch, None, False)
    roots = Roots.at(begins(batch))
    where = {int(token): place for place, token in enumerate(head.ends.vocabulary)}
    for depth in (1, 2):
        expected, count = 0.0, 0
        for root, (row, token) in enumerate(
            zip(roots.rows.tolist(), roots.tokens.tolist(), strict=True)
        ):
            at = token + depth
            if at < batch["tokens"].shape[1] and batch["chances"][row, at].sum() > 0:
                count += 1
                log_q = logged[depth - 1][root].double().log_softmax(-1)
                for name, chance in zip(
                    batch["ids"][row, at].tolist(), batch["chances"][row, at].tolist(), strict=True
                ):
                    expected -= (
                        chance * float(log_q[where[name]].detach()) if name in where else 0.0
                    )
        assert int(found.counts[depth - 1]) == count > 20
        assert float(found.losses[depth - 1].detach()) == pytest.approx(expected, rel=1e-5)


def test_roots_are_where_drafting_begins(model: Path, whole: Path) -> None:
    """The first draft follows the first token of the answer; a root later, or in the prompt, trains
    what is never asked for."""
    _, kept = training(model, whole)
    number = kept.trained[0]
    _, first, stop, begin = kept.where[number]
    roots = Roots.at(begins(kept.batch([number])))
    assert roots.tokens.tolist() == list(range(begin - 1, stop - first - 2))


def test_a_depth_sees_its_own_root_only() -> None:
    """Drafts of other roots leaking into the softmax, or the first depth's future: compared with
    attention written out."""
    torch.manual_seed(0)
    q, known = (
        torch.randn(1, 5, 4, 8),
        [(torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)) for _ in range(3)],
    )
    found = attend(q, known)
    for token in range(5):
        for head in range(4):
            keys = torch.cat(
                [
                    known[0][0][0, : token + 1, head // 2],
                    *(k[0, token : token + 1, head // 2] for k, _ in known[1:]),
                ]
            )
            values = torch.cat(
                [
                    known[0][1][0, : token + 1, head // 2],
                    *(v[0, token : token + 1, head // 2] for _, v in known[1:]),
                ]
            )
            weights = (keys @ q[0, token, head] * 8**-0.5).softmax(-1)
            torch.testing.assert_close(found[0, token, head], weights @ values)
    alone = attend(q, known[:1])
    torch.testing.assert_close(alone[0, 0, 1], known[0][1][0, 0, 0])


def test_candidates_stand_for_the_vocabulary(model: Path, whole: Path) -> None:
    """Drawn tokens that count once instead of for all that were not drawn: the head would learn
    that the rest hardly exists. On average over the draws the sum of exponentials is the whole
    one."""
    head, kept = training(model, whole)
    batch = kept.batch(kept.trained[:1])
    batch["chances"] = batch["chances"] * (batch["chances"] > 0.2)
    logits = torch.randn(len(head.ends.vocabulary), generator=torch.Generator().manual_seed(1))
    sums = []
    for seed in range(300):
        found = head.ends.candidates(batch, 12, torch.Generator().manual_seed(seed))
        assert found is not None and len(found.some) < len(logits)
        assert (found.index[found.some] == torch.arange(len(found.some))).all()
        sums.append(float((logits[found.some] + found.counted).exp().sum()))
    assert sum(sums) / len(sums) == pytest.approx(float(logits.exp().sum()), rel=0.05)


def test_a_loss_over_candidates_is_the_loss(model: Path, whole: Path) -> None:
    """Targets looked up at the wrong candidate, or drawn tokens that are not counted for the
    others: all tokens as candidates, in another order, give the exact loss, and counted twice each
    they add log 2 for each unit of probability."""
    head, kept = training(model, whole, others=0, noise=0.0)
    batch, size = kept.batch(kept.trained[:2]), len(head.ends.vocabulary)
    batch["states"] = batch["states"].float()
    some = torch.randperm(size, generator=torch.Generator().manual_seed(3))
    index = torch.empty(size, dtype=torch.long)
    index[some] = torch.arange(size)

    def losses(candidates: Candidates | None) -> torch.Tensor:
        with torch.no_grad():
            return head.net(head.ends, batch, Roots.at(begins(batch)), 2, candidates).losses

    exact = losses(None)
    torch.testing.assert_close(
        losses(Candidates(some, index, torch.zeros(size))), exact, rtol=1e-4, atol=1e-3
    )
    twice = losses(Candidates(some, index, torch.full((size,), math.log(2.0)))) - exact
    roots = Roots.at(begins(batch))
    for depth in (1, 2):
        known = head.ends.index[roots.take(batch["ids"], depth).long()] >= 0
        inside = roots.tokens + depth < batch["tokens"].shape[1]
        mass = float((roots.take(batch["chances"], depth).float() * known * inside[:, None]).sum())
        assert float(twice[depth - 1]) == pytest.approx(mass * math.log(2.0), rel=1e-3)


# --------------------------------------------------------------------------------------- whole runs


def test_it_learns_and_drafts_what_it_measured(
    model: Path, text: Path, whole: Path, tmp_path: Path
) -> None:
    """Training that moves nothing, or a part that drafts otherwise than it was measured."""
    report = trained(
        model, text, tmp_path, replace(QUICK, epochs=40, learning_rate=3e-3, save_every=1000)
    )
    first = json.loads((whole / "training.json").read_text())["log"][0]["loss"]
    assert report.done and report.log[-1]["loss"] < 0.8 * first
    llm, kept = LLM.from_pretrained(model), States(tmp_path / "states")
    held = [
        kept.batch([number])["tokens"][0].tolist() for number in kept.held_out[: QUICK.measured]
    ]
    begins = [kept.where[number][3] for number in kept.held_out[: QUICK.measured]]
    right = tried = 0
    for tokens, begin in zip(held, begins, strict=True):
        # a draft after every token of the answer, as it was measured
        for end in range(begin + 1, len(tokens) - 1):
            found = llm.generate(
                tokens[: end - 1],
                max_new_tokens=3,
                eos=[],
                draft=DraftHead(tmp_path),
                control="fixed",
                control_options={"tokens": 1},
            )
            tried, right = tried + 1, right + found.stats.accepted_at[0]
    assert right / tried == pytest.approx(report.acceptance[0], abs=0.03)


def test_interrupted_runs_end_with_the_same_bits(
    model: Path, text: Path, whole: Path, tmp_path: Path
) -> None:
    """Moments, order, noise or learning rate that start over after an interruption."""

    def stop(progress: Any) -> None:
        if progress.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(model, text, tmp_path, observer=Observer(training=stop))
    assert trained(model, text, tmp_path).done
    ours, theirs = load_part(tmp_path), load_part(whole)
    for name, tensor in theirs.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name


def test_a_run_ends_when_its_time_is_up(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of a few minutes that is killed from outside because it went on, or stopped without
    its checkpoint or its part."""
    report = trained(
        model, text, tmp_path, replace(QUICK, epochs=5000, save_every=100_000, max_minutes=0.01)
    )
    assert not report.done and 0 < report.step < 4000 and len(report.acceptance) == 4
    assert load_part(tmp_path).facts["done"] is False
    report = trained(
        model, text, tmp_path, replace(QUICK, epochs=5000, save_every=100_000, max_minutes=0.012)
    )
    assert [line["step"] for line in report.log] == sorted(
        {line["step"] for line in report.log}
    ) and len(report.log) == 2
    monkeypatch.setattr(states, "SHARD_TOKENS", 200)
    report = trained(model, text, tmp_path / "states first", replace(QUICK, max_minutes=1e-6))
    assert (
        not report.done
        and report.step == 0
        and len(States(tmp_path / "states first" / "states").where) < 40
    )


def test_a_run_goes_on_only_with_what_it_began_with(model: Path, text: Path, whole: Path) -> None:
    """Two runs mixed into one: another rate, or states of other layers."""
    with pytest.raises(TrainingError, match=r"belongs to another run.*learning_rate"):
        trained(model, text, whole, replace(QUICK, learning_rate=0.5))
    with pytest.raises(TrainingError, match="holds states kept with"):
        train_small_part(
            str(model),
            [text],
            whole,
            recipe=HeadRecipe(layers=(0, 2)),
            options=QUICK,
            held_out=0.2,
            plot=False,
        )


def test_a_part_can_begin_another(model: Path, text: Path, whole: Path, tmp_path: Path) -> None:
    """`start_from` that is ignored: a second run on more text would begin from nothing."""
    begun = trained(
        model,
        text,
        tmp_path / "a",
        replace(QUICK, epochs=0.5, save_every=1),
        start_from=whole,
        states=whole / "states",
    )
    assert (
        begun.log[0]["loss"] < json.loads((whole / "training.json").read_text())["log"][0]["loss"]
    )
    with pytest.raises(OptionError, match="cannot begin"):
        train_small_part(
            str(model),
            [text],
            tmp_path / "b",
            recipe=HeadRecipe(layers=(1,)),
            options=QUICK,
            held_out=0.2,
            plot=False,
            start_from=whole,
        )


def test_a_loss_that_is_no_number_stops_before_the_step(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights full of NaN in a checkpoint that was good an hour ago."""
    drafted, calls = HeadTraining.drafted, iter(range(100))

    def breaking(self: HeadTraining, *args: Any) -> Any:
        found = drafted(self, *args)
        return (
            found if args[2] or next(calls) < 6 else replace(found, losses=found.losses * torch.nan)
        )

    monkeypatch.setattr(HeadTraining, "drafted", breaking)
    with pytest.raises(TrainingError, match="step 7: the loss is nan"):
        trained(model, text, tmp_path)
    monkeypatch.undo()
    assert trained(model, text, tmp_path).done


# ---------------------------------------------------------------------------------- text and states


def test_more_text_adds_states_and_keeps_the_rest(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has grown: what is there is not computed again, what was held out stays so, and a
    shard that a killed process left half written is done again."""
    monkeypatch.setattr(states, "SHARD_TOKENS", 200)
    lines = [json.loads(line) for line in text.read_text().splitlines()]
    part = written(tmp_path / "part.jsonl", lines[:20])
    trained(model, part, tmp_path / "a", states=tmp_path / "states")
    before, held = States(tmp_path / "states"), {}
    for number in before.held_out:
        held[before.where[number]] = True
    (tmp_path / "states" / ".shard-00009.0123abcd.new").mkdir()
    read: list[int] = []
    more = [*lines, lines[0]]
    trained(
        model,
        written(part, more),
        tmp_path / "b",
        states=tmp_path / "states",
        observer=Observer(reading=lambda tokens, _: read.append(tokens)),
    )
    after = States(tmp_path / "states")
    assert len(after.where) == len(lines) and after.where[: len(before.where)] == before.where
    assert read[-1] <= after.tokens - before.tokens
    assert {after.where[number] for number in after.held_out} >= set(held)
    assert not (tmp_path / "states" / ".shard-00009.0123abcd.new").exists()


def test_states_are_the_models_own(model: Path, whole: Path) -> None:
    """Rows mixed up in a batch, a head at the wrong token, a tap after another layer: each number
    against a pass of its own."""
    llm, kept = LLM.from_pretrained(model), States(whole / "states")
    for number in kept.trained[:3]:
        batch = kept.batch([number])
        tokens, cache = batch["tokens"][0].long(), llm.model.new_cache(1)
        seen: dict[int, torch.Tensor] = {}

        def observer(
            layer: int, attention: bool, before: torch.Tensor, after: torch.Tensor, seen: Any = seen
        ) -> None:
            seen[layer] = after

        place = cache.layout([len(tokens)])
        with torch.inference_mode():
            x = llm.model.run(llm.model.embed(tokens), llm.model.full_plan, cache, place, observer)
        for index, layer in enumerate(RECIPE.layers):
            expected = seen[layer] * torch.rsqrt(seen[layer].pow(2).mean(-1, keepdim=True) + 1e-5)
            torch.testing.assert_close(
                batch["states"][0, :, index].float(), expected, atol=2e-3, rtol=2e-3
            )
        p, begin = llm.model.head(x).softmax(-1), kept.where[number][3]
        for at in range(len(tokens)):
            best = p[at].topk(StateOptions(()).top)
            answered = begin <= at < len(tokens) - 1
            torch.testing.assert_close(
                batch["chances"][0, at].float(), best.values * answered, atol=1e-3, rtol=1e-3
            )
            assert not answered or batch["ids"][0, at, 0] == best.indices[0]


def test_states_of_a_model_in_eight_bits(
    model: Path, text: Path, whole: Path, tmp_path: Path
) -> None:
    """`weights` that is ignored, or states of two kinds of weights in one folder."""
    trained(model, text, tmp_path / "a", weights="int8")
    exact, rounded = States(whole / "states"), States(tmp_path / "a" / "states")
    for number in exact.trained[:3]:
        one, other = (states.batch([number])["states"].float() for states in (exact, rounded))
        distance = float((one - other).norm() / one.norm())
        assert 0.001 < distance < 0.2, "8 bits are near, and not the same"
    with pytest.raises(TrainingError, match="holds states kept with"):
        trained(model, text, tmp_path / "b", weights="float32", states=tmp_path / "a" / "states")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"text": "nobody's"}, "no 'prompt_ids' and 'response_ids'.*selfspec data"),
        ({"prompt_ids": [1], "response_ids": [5, 999, 3, 4]}, "token 999, the model has 259"),
    ],
)
def test_text_that_is_not_the_models_is_refused(line: Any, words: str, tmp_path: Path) -> None:
    """Other people's text, or another tokenizer's ids: the run would train for hours on
    nonsense."""
    path = written(tmp_path / "own.jsonl", [{"prompt_ids": [1], "response_ids": [5, 6, 7]}, line])
    with pytest.raises(TrainingError, match=words):
        list(read_conversations([path], StateOptions((1,)), 259))


def test_a_line_that_is_no_object_is_refused(tmp_path: Path) -> None:
    """A file of another kind, of which nothing would be read."""
    path = written(
        tmp_path / "own.jsonl", [{"prompt_ids": [1], "response_ids": [5, 6, 7]}, "no line"]
    )
    with pytest.raises(DataError, match=r"own\.jsonl:2 is a JSON str"):
        list(read_conversations([path], StateOptions((1,)), 259))


def test_too_little_text(model: Path, tmp_path: Path) -> None:
    """A division by zero far from its cause."""
    path = written(tmp_path / "own.jsonl", [{"prompt_ids": [1], "response_ids": [5, 6, 7]}])
    with pytest.raises(TrainingError, match="too few"):
        trained(model, path, tmp_path / "out")
    with pytest.raises(DataError, match="there is no file"):
        trained(model, tmp_path / "nothing.jsonl", tmp_path / "out")
    with pytest.raises(DataError, match="no data was named"):
        train_small_part(str(model), [], tmp_path / "out")


def test_a_full_disk_is_said_before_it_is_full(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard cut off in the middle, and an OSError about it."""
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with pytest.raises(ResourceError, match="nearly full"):
        trained(model, text, tmp_path)


def test_a_model_folder_is_not_written_over(model: Path, text: Path) -> None:
    """A part's files among a model's."""
    with pytest.raises(OptionError, match="holds a model"):
        trained(model, text, model)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PartOptions(epochs=0), "epochs=0"),
        (lambda: PartOptions(share=0), "share=0"),
        (lambda: PartOptions(precision="half"), "precision='half'"),
        (lambda: PartOptions(max_minutes=0), "max_minutes=0"),
        (lambda: StateOptions((1,), held_out=0), "held_out=0"),
        (lambda: HeadRecipe(layers=(9,)).state_layers(shape()), "layers 0 to 3"),
        (lambda: HeadRecipe(start="first").state_layers(shape()), "last-layer or random"),
    ],
)
def test_settings_outside_their_limits(make: Any, words: str) -> None:
    """A value that would fail late or train nothing."""
    with pytest.raises(OptionError, match=words):
        make()


def shape() -> Any:
    config = tiny_model().config
    return shape_of(config, family_of(config))  # type: ignore[arg-type]


def test_the_learning_rate_rises_and_falls() -> None:
    """A schedule that never reaches its peak, or ends high."""
    rates = [parts._rate(step, 200) for step in range(200)]
    assert max(rates) == rates[5] == 1.0 and rates[0] == pytest.approx(1 / 6) and rates[-1] < 0.02
