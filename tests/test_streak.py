"""Rounds that kernels run by themselves are those that the engine would have run, one by one, and
what they write is what the model would have written alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

import selfspec
from selfspec import LLM, SamplingParams
from selfspec.control.fixed import FixedLength
from selfspec.core.contract import RowStep
from selfspec.core.price import Price
from selfspec.core.sampling import row_samplers
from selfspec.draft.hybrid import Hybrid
from selfspec.engine import generation as engine
from selfspec.engine import groups, streak
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.model.compute import cache
from selfspec.model.layered import LayeredModel
from selfspec.testing import near_identity_model, tiny_llm, tiny_tokenizer
from selfspec.tune.rounds import TIMED, Rounds


@functools.cache
def repeating() -> Any:
    """A model that repeats itself, so that lookups are right now and then."""
    return near_identity_model(0.7)


PROMPT = [5, 9, 31, 7, 5, 9, 31, 7, 40, 5, 9]
NEW = 60
PLAIN: dict[str, Any] = {"drafter": None, "controller": None}


@pytest.fixture(scope="module", params=["float32", "int8", "int4"])
def model(request: pytest.FixtureRequest) -> LayeredModel:
    llm = LLM.from_pretrained(repeating(), weights=request.param)
    if llm.model.ops.kernel != "native":
        pytest.skip("no C++ compiler found (g++ or clang++)")
    return llm.model


@pytest.fixture(autouse=True)
def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow a machine is."""
    monkeypatch.setattr(streak, "SECONDS", 1e9)


def request(model: LayeredModel, **changes: Any) -> Request:
    options: dict[str, Any] = {
        "prompt": PROMPT,
        "sampler": row_samplers(SamplingParams(), [PROMPT], [])[0],
        "max_new_tokens": NEW,
        "drafter": Hybrid(),
        "controller": FixedLength(6),
    }
    return Request(**{**options, **changes})


def steps_of(generation: Generation) -> Iterator[Sequence[RowStep]]:
    while generation.rows:
        if rows := generation.step().rows:
            yield rows


def run(model: LayeredModel, **changes: Any) -> tuple[list[RowStep], Generation]:
    """What each round added, and the generation at its end."""
    generation = Generation(model, [request(model, **changes)])
    return [part for rows in steps_of(generation) for part in rows], generation


def seen(parts: Sequence[RowStep]) -> list[tuple[object, ...]]:
    """All that whoever asked sees of them."""
    return [(list(p.tokens), p.accepted, list(p.rejected), p.finish_reason) for p in parts]


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the engine runs every round itself."""
    monkeypatch.setattr(groups, "streak", lambda *_: ())


def counts(generation: Generation) -> dict[str, Any]:
    """All that was counted but time."""
    return {k: v for k, v in vars(generation.stats).items() if not k.endswith("seconds")}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"controller": FixedLength(1)},
        {"controller": FixedLength(30)},
        {"max_new_tokens": 7},
        {"max_new_tokens": 200},
        {"prompt": [3]},
        {"drafter": Hybrid(first_options={"least": 0.3})},
        PLAIN,
    ],
    ids=str,
)
def test_rounds_are_those_of_the_engine(
    model: LayeredModel, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tree, another path, lookups that learned otherwise or twice, entries of the cache
    that lie elsewhere; a text that goes beyond its room, its cache or the known angles."""
    ours, at_once = run(model, **changes)
    alone(monkeypatch)
    theirs, one_by_one = run(model, **changes)
    assert seen(ours) == seen(theirs)
    assert counts(at_once) == counts(one_by_one)
    known = len(PROMPT) + min(NEW, 30)
    for mine, other in zip(at_once.cache.room, one_by_one.cache.room, strict=True):
        if changes == {}:
            assert torch.equal(mine[:, 0, :, :known], other[:, 0, :, :known])
    plain, _ = run(model, **{**changes, **PLAIN})
    assert [t for part in ours for t in part.tokens] == [t for part in plain for t in part.tokens]


def test_a_cache_that_grows_is_found(model: LayeredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values where they were before they moved, or no streak any more."""
    plain, _ = run(model, **PLAIN, max_new_tokens=200)
    monkeypatch.setattr(Generation, "_slots_wanted", lambda self, request: len(request.prompt))
    monkeypatch.setattr(cache, "CHUNK", 64)
    generation = Generation(model, [request(model, max_new_tokens=200)])
    steps = [(rows, generation.cache.capacity) for rows in steps_of(generation)]
    ours = [part for rows, _ in steps for part in rows]
    assert max(len(rows) for rows, slots in steps if slots == steps[-1][1] > steps[0][1]) > 2
    assert [t for part in ours for t in part.tokens] == [t for part in plain for t in part.tokens]


def test_several_come_at_once(model: LayeredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that still run one by one, or so long together that nobody sees a word meanwhile."""
    rounds = [len(rows) for rows in steps_of(Generation(model, [request(model)]))]
    assert max(rounds) == 1 + FixedLength.stands
    monkeypatch.setattr(streak, "SECONDS", 0.0)
    rounds = [len(rows) for rows in steps_of(Generation(model, [request(model)]))]
    assert max(rounds) == 1


def test_plain_rounds_come_at_once(model: LayeredModel) -> None:
    """Plain decoding that pays for Python between any two of its passes."""
    rounds = [len(rows) for rows in steps_of(Generation(model, [request(model, **PLAIN)]))]
    assert max(rounds) == streak.PLAIN


@pytest.mark.parametrize("changes", [{}, PLAIN], ids=["drafts", "plain"])
def test_nothing_comes_behind_an_end(
    model: LayeredModel, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens behind the one that ends the text, or passes after it."""
    own, ran = streak.run_rounds, []
    monkeypatch.setattr(streak, "run_rounds", lambda *given: ran.append(own(*given)) or ran[-1])
    ours, _ = run(model, **changes)
    written = [token for part in ours for token in part.tokens]
    for place in (1, 9, 20):
        end = written[place]
        ran.clear()
        short, generation = run(model, eos=frozenset([end]), **changes)
        tokens = [token for part in short for token in part.tokens]
        assert tokens == written[: written.index(end) + 1]
        assert short[-1].finish_reason == "eos"
        rounds = len(short) - 1  # the first token is the prompt's
        assert sum(map(len, ran)) <= generation.stats.rounds == rounds


class StopAfter:
    """Stops, or raises, at the token of this number."""

    def __init__(self, number: int, error: bool) -> None:
        self.left, self.error = number, error

    def push(self, token: int) -> bool:
        self.left -= 1
        if self.left == 0 and self.error:
            raise ValueError("no more")
        return self.left == 0


@pytest.mark.parametrize("changes", [{}, PLAIN], ids=["drafts", "plain"])
@pytest.mark.parametrize("error", [False, True])
def test_a_stop_in_the_middle_is_seen(
    model: LayeredModel, error: bool, changes: dict[str, Any]
) -> None:
    """A user's own stop that is asked too late, or of tokens that come behind it."""
    ours, _ = run(model, **changes)
    written = [token for part in ours for token in part.tokens]
    for number in (2, 11, 23):
        short, _ = run(model, stop_checks=[StopAfter(number, error)], **changes)
        tokens = [token for part in short for token in part.tokens]
        assert tokens == written[: len(tokens)]
        if error:
            assert len(tokens) < number and isinstance(short[-1].error, ValueError)
        else:
            assert len(tokens) == number and short[-1].finish_reason == "stop"


@pytest.mark.parametrize("changes", [{}, PLAIN], ids=["drafts", "plain"])
def test_an_interruption_leaves_no_trace(
    model: LayeredModel, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that kernels have run and nobody wrote down, or some of them."""
    expected, _ = run(model, **changes)
    calls = 0

    def interrupted(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def called(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            found = own(*given)
            if calls % 5 == 3:
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(owner, name, called)

    interrupted(streak, "run_rounds")
    interrupted(engine, "decide")
    generation = Generation(model, [request(model, **changes)])
    row = generation.rows[0]
    while generation.rows:
        try:
            generation.step()
        except KeyboardInterrupt:
            continue
    assert row.tokens[len(PROMPT) :] == [token for part in expected for token in part.tokens]
    assert calls > 10


@pytest.mark.parametrize(
    "changes",
    [
        {"sampler": row_samplers(SamplingParams(temperature=1.0, seed=3), [PROMPT], [])[0]},
        {"logprobs": 2},
        {"drafter": Hybrid(then="ngram")},
        {"controller": FixedLength(0)},
    ],
    ids=["drawn", "logprobs", "python", "nothing"],
)
def test_other_rounds_are_the_engine_s(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that choose the likeliest token where one is drawn, or that nobody asked."""
    model = LLM.from_pretrained(repeating()).model
    monkeypatch.setattr(streak, "run_rounds", lambda *_: pytest.fail("kernels ran rounds"))
    run(model, **changes)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "lfm2", "gpt2"])
def test_other_models_are_the_engine_s(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, states and embeddings of positions of which these kernels know nothing."""
    llm = tiny_llm(family, **({"sliding_window": 8} if family == "mistral" else {}))
    monkeypatch.setattr(streak, "run_rounds", lambda *_: pytest.fail("kernels ran rounds"))
    run(llm.model, prompt=PROMPT)


def test_rows_beside_each_other_are_the_engine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row that goes on by itself while another waits; and not when it is alone again."""
    model = LLM.from_pretrained(repeating()).model
    if model.ops.kernel != "native":
        pytest.skip("no C++ compiler found (g++ or clang++)")
    requests = [request(model), request(model, prompt=[40, 3, 2], max_new_tokens=9)]
    both = Generation(model, requests)
    sizes = [(len(both.rows), len(rows)) for rows in steps_of(both)]
    assert all(parts <= 2 for rows, parts in sizes if rows == 2)
    assert any(parts > 2 for rows, parts in sizes if rows < 2)


def test_broken_logits_are_the_engine_s_to_tell(model: LayeredModel) -> None:
    """A text that goes on with the number that stands for no token."""
    llm = LLM.from_pretrained(repeating())
    generation = Generation(llm.model, [request(llm.model)])
    generation.step()
    values = generation.cache.values
    values[:, :, :, : len(PROMPT)] = float("nan")
    with pytest.raises(Exception, match="finite"):
        list(generation)


def test_a_price_is_weighed_as_in_python(model: LayeredModel) -> None:
    """Guesses that are not worth their price, or too few of those that are."""

    class Priced(FixedLength):
        def budget(self, rooms: Sequence[int], beside: int = 0) -> Any:
            found = super().budget(rooms, beside)
            costs = [0.0, 0.05, 0.3, 0.35, 0.8, 0.9, 1.1]
            return type(found)(found.tokens, price=Price(costs))

    controller = Priced(6)
    with pytest.MonkeyPatch.context() as patch:
        ours, _ = run(model, controller=controller)
        alone(patch)
        theirs, _ = run(model, controller=controller)
    assert seen(ours) == seen(theirs)
    sizes = {part.accepted + len(part.rejected) for part in ours}
    assert len(sizes) > 2, "all drafts were of one size"


def test_whoever_looks_at_steps_sees_all_of_their_rounds() -> None:
    """Tokens of a step's first round alone: in transformers' streamers, in the tuner's rounds, in
    the server's counts."""
    llm = LLM.from_pretrained(repeating(), tokenizer=tiny_tokenizer())
    if llm.model.ops.kernel != "native":
        pytest.skip("no C++ compiler found (g++ or clang++)")
    shown: list[int] = []

    class Streamer(BaseStreamer):  # type: ignore[misc]
        def put(self, value: torch.Tensor) -> None:
            shown.extend(value.reshape(-1).tolist())

        def end(self) -> None:
            shown.append(-1)

    drafting = selfspec.transformers(Hybrid(), control=FixedLength(6))
    model, ids = repeating(), torch.tensor([PROMPT])
    given = {"custom_generate": drafting, "streamer": Streamer(), "do_sample": False}
    out = model.generate(ids, max_new_tokens=NEW, eos_token_id=None, **given)
    assert shown == [*out[0].tolist(), -1]

    taken = Rounds(llm.model, 1, 40, Hybrid(), 3).run()
    assert len(taken) == TIMED and all(each.all > each.draft >= 0 for each in taken)
    assert len(set(taken)) == 1, "rounds of a step share its time"
