"""Steps of fixed shapes, recorded and replayed. There is no GPU here: `tape.py` records as strictly
as a CUDA graph does."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from tape import TapeRecorder, TapeRecording, recording

from selfspec.core.sampling import Sampler, SamplingParams
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.errors import OptionError
from selfspec.llm import LLM
from selfspec.model.compute import rope
from selfspec.model.compute.cache import RowSpan
from selfspec.model.compute.cuda import steps as capture
from selfspec.model.compute.cuda import storage
from selfspec.model.compute.hidden_states import StateCollector
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.families import FAMILIES
from selfspec.model.from_transformers import from_transformers
from selfspec.model.probing import check_recordings
from selfspec.testing import tiny_model

PROMPTS = [[10, 11, 12, 10, 11, 12, 10], [40, 41], [90, 91, 92, 93, 94, 90, 91, 92]]
DRAFTS = {
    "early-exit": {},
    "layer-skip": {},
    "hybrid": {},  # trees
    # sees a list of slots, so it is no step
    "kv-subset": {"recent": 2, "blocks": 1, "block_size": 2},
    "draft-model": {},
    "cosine": {},
}


def static(family: str = "llama", **changes) -> LLM:
    return LLM(
        from_transformers(tiny_model(family, seed=4, **changes), kernel="static", check=False),
        None,
        "tiny",
    )


def recorded(family: str = "llama", **changes) -> tuple[LLM, TapeRecorder]:
    llm = static(family, **changes)
    return llm, recording(llm.model)


def written(llm: LLM, prompts=PROMPTS, tokens: int = 14, **options) -> list[list[int]]:
    results = llm.generate(prompts, max_new_tokens=tokens, eos=[], **{"draft": None, **options})
    return [result.tokens for result in results]


@pytest.fixture(scope="module")
def expected():
    """What our kernels write, by family."""
    return {
        family: written(
            LLM(from_transformers(tiny_model(family, seed=4), check=False), None, "tiny")
        )
        for family in ("llama", "gemma2", "qwen3")
    }


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_replayed_steps_write_what_the_kernels_write(family, expected):
    """Something that changes from step to step baked into a recording: a mask, a position, a
    length, a slot. Or a recorded step that reads back, which is an error on the tape as on a
    GPU."""
    llm, recorder = recorded(family)
    assert written(llm) == expected[family]
    assert recorder.replays > 10 and not llm.model.steps.runner.reason


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_by_replayed_steps_change_nothing(name, expected):
    """Recordings that are taken for each other (draft and verification, first layers and last,
    chains and trees), or outputs read after another replay wrote over them."""
    llm, recorder = recorded()
    options = {
        "draft": name,
        "draft_options": DRAFTS[name],
        "control": "fixed",
        "control_options": {"tokens": 4},
    }
    assert written(llm, **options) == expected["llama"]
    assert recorder.replays > 10


def test_the_next_generation_replays_what_the_last_recorded(expected):
    """Storages that are made anew each time: nothing would ever be replayed, or worse, on memory
    that is gone."""
    llm, recorder = recorded()
    for _ in range(2):  # a step is recorded in its second run
        written(llm)
    made = len(recorder.made)
    assert written(llm) == expected["llama"]
    assert len(recorder.made) == made


def test_a_cache_that_grows_is_recorded_anew():
    """A recording that goes on writing where the cache lay before it grew, or reads a rotary table
    that moved."""
    prompt = [list(range(10, 200)) * 2]
    changes = {"max_position_embeddings": 3000}
    expected = written(
        LLM(from_transformers(tiny_model(seed=4, **changes), check=False), None, "tiny"), prompt, 20
    )
    llm, recorder = recorded(**changes)
    request = Request(prompt[0], Sampler(SamplingParams()), 20)
    cache = llm.model.new_cache(1, len(prompt[0]) + 2)
    numbers, slots = {cache.storage.number}, cache.capacity
    generation, tokens = Generation(llm.model, [request], cache=cache), []
    for step in generation:
        tokens += step.rows[0].tokens
        if len(tokens) in (6, 12):
            cache.reserve(cache.capacity + 1)
            numbers.add(cache.storage.number)
    assert len(numbers) == 3 and cache.capacity > slots and recorder.replays
    assert [tokens] == expected


def test_a_context_that_grows_is_another_step():
    """A text that outgrows the part of the cache that a recording looks at: its last tokens would
    no longer be seen."""
    prompt = [[10 + index % 200 for index in range(250)]]
    expected = written(
        LLM(from_transformers(tiny_model(seed=4), check=False), None, "tiny"), prompt
    )
    llm, recorder = recorded()
    assert written(llm, prompt) == expected and recorder.replays > 6


def test_rotary_tables_are_long_enough_for_a_recorded_step(monkeypatch):
    """A table that grows while a recorded step goes on reading the short one of then."""
    prompt = [[10 + index % 200 for index in range(90)]]
    expected = written(
        LLM(from_transformers(tiny_model(seed=4), check=False), None, "tiny"), prompt
    )
    monkeypatch.setattr(rope, "CHUNK", 100)
    llm, recorder = recorded()
    assert written(llm, prompt) == expected and recorder.replays > 6


def test_a_storage_comes_back_clean():
    """What one generation left behind, a NaN above all, reaching the next: masked, it is still
    multiplied with zero."""
    llm = static()
    once = written(llm)
    for each in [*llm.model.steps.pool._idle, *llm.model.steps.pool._returned]:
        each.keys.fill_(torch.nan)
        each.values.fill_(torch.nan)
    assert written(llm) == once


def test_padding_leaves_no_trace():
    """Padding that computes with what the last call left in the buffers, and writes it where it is
    read: behind a context that takes in the spare slot, a masked NaN is still multiplied with
    zero."""
    model = static().model
    once = []
    for poison in (False, True):
        cache = model.new_cache(3, 500)
        model.prefill([list(range(3, 259)) + PROMPTS[0], *PROMPTS[1:]], cache)
        if poison:
            for inputs in model.steps.runner._inputs.values():
                inputs.x.fill_(torch.nan)
        place = cache.layout([3, 0, 5])
        once.append(model.forward(torch.arange(8), cache, place))
        once.append(model.forward(torch.arange(3), cache, cache.layout([1, 1, 1])))
    assert torch.equal(once[0], once[2]) and torch.equal(once[1], once[3])


def test_rows_in_any_order():
    """Tokens taken to fill the grid in order because they are as many as it has places."""
    model, found = static().model, []
    for order in ([0, 1], [1, 0]):
        cache = model.new_cache(2, 64)
        model.prefill(PROMPTS[:2], cache)
        place = cache.layout_at([RowSpan(row, cache.length(row), 2) for row in order])
        logits = model.forward(
            torch.tensor([token for row in order for token in (50 + row, 60 + row)]), cache, place
        )
        found.append(dict(zip(order, logits.split(2), strict=True)))
    assert all(torch.equal(found[0][row], found[1][row]) for row in (0, 1))


def test_the_storage_used_last_is_taken_first():
    """Storages taken in turn, so that each generation finds the one on which nothing is recorded
    yet."""
    model = static().model
    first, second = model.new_cache(2, 64), model.new_cache(2, 64)
    number = second.storage.number
    del first
    del second
    for _ in range(3):
        cache = model.new_cache(2, 64)
        assert cache.storage.number == number
        del cache


def test_storages_beyond_the_few_are_let_go_with_their_steps(monkeypatch):
    """Memory of every shape that ever was, kept for good; or recordings that outlive the memory
    they write to."""
    monkeypatch.setattr(storage, "IDLE", 1)
    llm, recorder = recorded()
    for rows in (1, 2, 3, 1):
        written(llm, PROMPTS[:rows], 6)
    assert any(each.released for each in recorder.made)
    owners = {key[0] for key in llm.model.steps.runner._steps if len(key) == 3}
    alive = {each.number for each in [*llm.model.steps.pool._idle, *llm.model.steps.pool._returned]}
    assert owners <= alive, "steps of storages that are gone"
    assert written(llm, PROMPTS[:2], 6) == written(static(), PROMPTS[:2], 6)


def test_too_many_steps_replace_the_oldest(monkeypatch, expected):
    """Recordings that pile up until the device is full; or one that is replayed after it was let
    go."""
    monkeypatch.setattr(capture, "MAX_STEPS", 2)
    llm, recorder = recorded()
    options = {"draft": "hybrid", "control": "fixed", "control_options": {"tokens": 4}}
    assert written(llm, **options) == expected["llama"]
    assert len(recorder.made) > 2 and llm.model.steps.runner.recorded <= 2


def test_what_cannot_be_recorded_still_runs(monkeypatch, expected):
    """A failure to record that ends the user's generation, or that nobody hears of."""
    llm, recorder = recorded()
    monkeypatch.setattr(
        recorder, "record", partial(fail, "CUDA error: operation not permitted\nmore")
    )
    with pytest.warns(UserWarning, match="CUDA graphs are off.*operation not permitted"):
        assert written(llm) == expected["llama"]
    assert llm.info.recorded == "no: recording a step failed: CUDA error: operation not permitted"


def test_replays_that_differ_are_noticed_at_load(monkeypatch, expected):
    """A card or a driver on which replays are not what was recorded: nobody would know why the text
    is nonsense."""
    llm, recorder = recorded()
    check_recordings(llm.model)
    assert not llm.model.steps.runner.reason and recorder.replays
    original = TapeRecording.replay

    def wrong(made: TapeRecording) -> None:
        original(made)
        made.out[0].mul_(1.1)

    monkeypatch.setattr(TapeRecording, "replay", wrong)
    with pytest.warns(UserWarning, match="replayed steps gave logits that differ by"):
        check_recordings(llm.model)
    assert written(llm) == expected["llama"] and llm.info.recorded.startswith("no: replayed steps")


def fail(message: str, *_: object) -> None:
    raise RuntimeError(message)


def test_the_tape_is_strict(monkeypatch):
    """The negative control of this file: reading back while recording must fail, and a value kept
    from before must be seen."""
    recorder = TapeRecorder()
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(lambda: (x * x.max().item(),))
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(lambda: (x + torch.tensor([1.0, 2.0, 3.0]),))
    kept: dict[str, torch.Tensor] = {}
    made = recorder.record(lambda: (kept.setdefault("double", 2 * x) + x,))
    x.fill_(10)
    made.replay()
    assert made.out[0].tolist() == [12, 12, 12], "the doubled x of then, the x of now"


def test_several_threads_take_turns(expected):
    """Buffers that two threads fill at once."""
    llm, _ = recorded()
    found: dict[int, list[list[int]]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: written(llm)})) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), expected["llama"])


def test_a_mixture_of_experts_is_not_recorded():
    """A host decision inside a step: refused by name, avoided by default, and said."""
    model = tiny_model("mixtral")
    with pytest.raises(OptionError, match="mixture of experts"):
        from_transformers(model, kernel="static")
    assert (
        from_transformers(model, check=False).steps.status
        == "no: there is nothing to record on a CPU"
    )


def test_a_plan_is_part_of_a_steps_name():
    """A draft's layers replayed where all were asked for; or a storage that is not the last one:
    nothing is recorded there."""
    model = static().model
    recorder = recording(model)
    x = model.embed(torch.tensor([5]))
    outs = {}
    for plan in (LayerPlan(0, 2), LayerPlan(0, 4), LayerPlan(0, 2)):
        for _ in range(3):
            cache = model.new_cache(1, 64)
            outs.setdefault(plan, []).append(model.run(x, plan, cache, cache.layout([1])))
            del cache
    assert len(recorder.made) == 2
    assert all(torch.allclose(out, each[0], atol=1e-6) for each in outs.values() for out in each)
    assert not torch.allclose(outs[LayerPlan(0, 2)][0], outs[LayerPlan(0, 4)][0], atol=1e-2)


def test_taps_hold_what_left_their_layers():
    """States of another call, or none, where a drafter taps layers: a replayed step has to hand
    them out as well, each time anew, and a step without taps is another step."""
    model = tiny_model(seed=4)
    found = {}
    for name in ("kernels", "replayed"):
        layered = from_transformers(
            model, kernel="auto" if name == "kernels" else "static", check=False
        )
        if name == "replayed":
            recording(layered)
        collector, cache, found[name] = StateCollector([1, 3]), layered.new_cache(2, 64), []
        for number in range(5):
            x = layered.embed(torch.tensor([5 + number, 9, 7]))
            layered.run(x, layered.full_plan, cache, cache.layout([2, 1]), collectors=[collector])
            # does not reach the second tap
            layered.run(x[:2], LayerPlan(0, 3), cache, cache.layout([1, 1]), collectors=[collector])
            layered.run(x, layered.full_plan, cache, cache.layout([2, 1]))  # what nobody taps
            cache.rollback(0, 3 * number), cache.rollback(1, 2 * number)
        found[name] = collector.take()
        assert [len(place) for place, _ in found[name]] == [3] * 5
    for (_, ours), (_, replayed) in zip(*found.values(), strict=True):
        assert ours.shape == (3, 2, 64) and torch.allclose(ours, replayed, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt2"])
@pytest.mark.parametrize("name", [None, *DRAFTS])
def test_on_a_gpu_graphs_write_what_eager_steps_write(family, name):
    """The same with real graphs, in float32: the plain kernel, steps that just run, and steps that
    are replayed."""
    model = tiny_model(family, seed=4).to("cuda")
    options = (
        {} if name is None else {"draft": name, "draft_options": DRAFTS[name], "control": "fixed"}
    )
    plain = written(LLM(from_transformers(model, kernel="plain"), None, "tiny"))
    llm = LLM(from_transformers(model), None, "tiny")
    assert llm.model.ops.kernel == "static"
    assert [written(llm, **options) for _ in range(2)] == [plain] * 2
    assert llm.model.steps.runner.recorded > 0 and not llm.model.steps.runner.reason


@pytest.mark.gpu
def test_on_a_gpu_other_streams_wait():
    """Threads with streams of their own that overtake each other in shared buffers."""
    llm = LLM(from_transformers(tiny_model(seed=4).to("cuda")), None, "tiny")
    alone, found = written(llm), {}

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[number] = written(llm)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), alone)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*modules")
@pytest.mark.parametrize("family", ["mixtral", "stablelm"])
def test_on_a_gpu_what_is_not_recorded_runs(family, monkeypatch):
    """Families whose steps cannot be recorded: places and masks made on the host have to follow the
    model to its device."""
    if family == "stablelm":  # as if nobody had described it, so that its modules run
        monkeypatch.delitem(FAMILIES, family)
    model = tiny_model(family, seed=4)
    here = written(LLM(from_transformers(model), None, "tiny"), tokens=12)
    llm = LLM(from_transformers(model.to("cuda")), None, "tiny")
    assert written(llm, tokens=12, draft="hybrid") == here
    assert llm.info.recorded.startswith("no: ")
