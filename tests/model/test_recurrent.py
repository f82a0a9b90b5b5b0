"""Families with recurrent layers: the same text and the same bits, however a text is read, with any
drafts, after any history of rejections. What the conformance suite asks, where trees are chains."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from test_conformance import check_neighbours, layers_of, read
from test_passes import one_by_one
from variants import RECURRENT, build

from selfspec import LLM, SamplingParams
from selfspec.control.fixed import FixedLength
from selfspec.core.sampling import row_samplers
from selfspec.draft.from_layers.dynamic_exit import DynamicExit
from selfspec.draft.from_models.draft_model import DraftModel
from selfspec.draft.from_text.ngram import NGram
from selfspec.draft.scripted import ScriptedDrafter
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.errors import OptionError
from selfspec.lossy import Confidence
from selfspec.model.block import Block
from selfspec.model.compute.cache import RowSpan, TokenLayout
from selfspec.model.compute.cpu.fused import FusedHalves, FusedModel
from selfspec.model.compute.cpu.operations import NativeOps
from selfspec.model.compute.plan import LayerPlan
from selfspec.model.compute.recurrence import RecurrentSize
from selfspec.model.compute.recurrent_cache import LONGEST, REACH, Memory
from selfspec.model.cores import Recurrent
from selfspec.model.from_transformers import from_transformers
from selfspec.testing import tiny_predictors, tiny_tokenizer

TEXT = random.Random(0).choices(range(3, 259), k=150)  # longer than entries are kept
NEW = 24


@pytest.fixture(scope="module", params=RECURRENT)
def pair(request):
    """A Hugging Face model and ours, made from it."""
    model = build(request.param)
    return model, from_transformers(model)


def expected_of(model, prompt, new=NEW):
    """What transformers writes."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


def next_logits(model, cache, row=0):
    """What the model says of one more token behind what a row holds."""
    counts = [0] * row + [1] + [0] * (cache.rows - row - 1)
    return model.forward(torch.tensor([7]), cache, cache.layout(counts))


@pytest.mark.parametrize("kernel", ["native", "plain"])
def test_logits_are_those_of_transformers_with_each_kernel(pair, kernel):
    """A wrong order of a projection, an activation or a norm that is forgotten, a decay. With the
    delta rule transformers' own logits differ by 6e-4 between a text read at once and in steps."""
    model, _ = pair
    assert len(TEXT) > REACH
    ours = from_transformers(model, kernel=kernel, check=False)
    theirs = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    assert theirs.abs().max() > 1, "the probe model says nothing, so agreement would mean nothing"
    mine, _ = read(ours, TEXT, 60)
    gap = (mine - theirs).abs().max()
    assert torch.allclose(mine, theirs, atol=6e-4, rtol=1e-4), f"{kernel}: {gap}"


WITHOUT = {  # what is taken away from a recurrence
    "lfm2: the convolution's bias": ("lfm2", {"bias": None}),
    "qwen3_5: SiLU behind the convolution": ("qwen3_5", {"activated": False}),
    "qwen3_5: the norm comes first": ("qwen3_5", {"finish": "gate, then norm"}),
    "qwen3_5: q, k, v in this order": ("qwen3_5", {"values_first": True}),
    "granite: v added to o": ("granite-hybrid", {"straight": None}),
    "granite: norms of groups": ("granite-hybrid", {"norm_size": 128}),
    "granite: the gate comes first": ("granite-hybrid", {"finish": "norm, then gate"}),
    "jamba: norms of keys": ("jamba", {"key_norm": None}),
    "jamba: norms of queries": ("jamba", {"query_norm": None}),
    "jamba: norms of what steps come from": ("jamba", {"norm": None}),
    "mamba: x added to o": ("mamba", {"straight": 0.0}),
    "olmo: rates up to two": ("olmo-hybrid", {"limits": (0.0, 1.0)}),
    "granite: steps without a limit": ("granite-hybrid", {"limits": (0.0, 0.2)}),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_a_recurrence_does_matters_at_this_size(name):
    """A peculiarity that changes nothing in tiny models, so that the suite would not miss it."""
    variant, change = WITHOUT[name]
    ours = from_transformers(build(variant))
    blocks = []
    for block in ours.blocks:
        core = block._attention
        if isinstance(core, Recurrent):
            how = core.made.recurrence
            if change == {"straight": 0.0}:
                how = replace(how, straight=torch.zeros_like(how.straight))
            elif how.selective is not None:
                how = replace(how, selective=replace(how.selective, **change))
            else:
                how = replace(how, **change)
            core = replace(core, made=replace(core.made, recurrence=how))
        blocks.append(Block(core, block._mlp, block._norms, block._scale))
    whole, _ = read(ours, TEXT[:40])
    other, _ = read(ours.view(blocks=blocks), TEXT[:40])
    assert (whole - other).abs().max() > 0.05 * whole.abs().max()


def test_bits_do_not_depend_on_how_a_text_is_read(pair):
    """A state that goes on otherwise through many tokens than through one."""
    _, ours = pair
    assert ours.ops.kernel == "native" and ours.row_stable
    whole, _ = read(ours, TEXT)
    for size in (1, 2, 7, 33, 64, 97):
        pieces, _ = read(ours, TEXT, size)
        assert torch.equal(whole, pieces), f"logits differ when read {size} at a time"


def test_one_call_computes_what_single_halves_compute_on_any_number_of_threads(pair):
    """Threads that share heads and each know a part of them; a norm over heads of which some are
    not there yet; what entered, written down before everybody has read what was there."""
    _, ours = pair
    before = torch.get_num_threads()
    alone, _ = read(one_by_one(ours), TEXT, 33)
    expected, _ = read(ours, TEXT, 33)
    # one call rounds x + y * scale once, and a half alone rounds it twice
    scaled = ours.shape.scales.residual != 1
    assert torch.equal(alone, expected) or (scaled and torch.allclose(alone, expected, atol=1e-3))
    try:
        for threads in (2, 5):
            torch.set_num_threads(threads)
            for size in (1, 33, 150):
                found, _ = read(ours, TEXT, size)
                assert torch.equal(found, expected), f"{threads} threads, {size} at a time"
    finally:
        torch.set_num_threads(before)
    cache = ours.new_cache(1, 256)
    found = ours.scored(TEXT[:40], cache, cache.layout([40]), 1)
    assert torch.equal(found.logits, expected[:40])


def test_bits_do_not_depend_on_neighbours_in_a_ragged_batch(pair):
    """A state, or an entry of the convolution, that leaks into another row."""
    check_neighbours(pair[1], [TEXT[:50], TEXT[20:27], TEXT[5:130]])


def test_a_row_stands_after_any_number_of_accepted_tokens(pair):
    """States of rejected drafts that stay, or kept tokens that are counted twice. Drafts by the
    first layers run ahead, as those of an early exit do."""
    _, ours = pair
    chance, again = random.Random(1), 0
    for _ in range(3):
        cache, text = ours.new_cache(2, 64), TEXT[: chance.randint(1, 120)]
        ours.prefill([text, TEXT[:9]], cache)
        cache.settle(0, len(text))
        for _ in range(12):
            drafted = chance.choices(range(3, 259), k=chance.randint(1, 9))
            if chance.random() < 0.5:
                for at, token in enumerate(drafted):
                    place = TokenLayout.chains([RowSpan(0, len(text) + at, 1)])
                    ours.run(ours.embed(torch.tensor([token])), LayerPlan(0, 2), cache, place)
            place = TokenLayout.chains([RowSpan(0, len(text), len(drafted))])
            ours.forward(torch.tensor(drafted), cache, place)
            kept = chance.randint(0, len(drafted))
            again += 0 < kept < len(drafted)
            cache.rollback(0, len(text) + kept)
            text = text + drafted[:kept]
            cache.settle(0, len(text))
            assert cache.length(0) == len(text)
        fresh, _ = read(ours, [*text, 7])
        assert torch.equal(next_logits(ours, cache)[0], fresh[-1])
    assert again, "no draft was kept in part, so no entry was applied again"


def test_who_returns_too_far_begins_anew(pair):
    """A state that is taken for an earlier one."""
    _, ours = pair
    cache = ours.new_cache(1, 256)
    for begin in (0, 70):
        ours.forward(torch.tensor(TEXT[begin : begin + 70]), cache, cache.layout([70]))
        cache.settle(0, begin + 70)
    cache.rollback(0, 3)
    assert cache.length(0) == 0
    fresh, _ = read(ours, TEXT[:20])
    assert torch.equal(ours.prefill([TEXT[:20]], cache)[0], fresh[-1])


def test_a_copied_row_goes_on_as_its_source(pair):
    """A row that shares a state with another one instead of having its own."""
    _, ours = pair
    cache = ours.new_cache(2, 256)
    ours.prefill([TEXT[:40]], cache)
    cache.copy(0, 1, 40)
    fresh, _ = read(ours, [*TEXT[:40], 7])
    for row in (0, 1):
        assert torch.equal(next_logits(ours, cache, row)[0], fresh[-1])


def test_layers_in_pieces_equal_layers_in_one_go(pair):
    """Hidden state lost between two runs of one pass: what the reuse of exit states rests on."""
    _, ours = pair
    whole, _ = read(ours, TEXT)
    other = ours.new_cache(1, 256)
    layout = TokenLayout.chains([RowSpan(0, 0, len(TEXT))])
    x = ours.embed(torch.tensor(TEXT))
    for start, stop in ((0, 1), (1, 3), (3, 4)):
        x = ours.run(x, LayerPlan(start, stop), other, layout)
    assert torch.equal(ours.head(x), whole)


def test_early_exit_is_what_transformers_computes_with_fewer_layers(pair):
    """An exit that runs one layer too many. The reference is the same model, cut."""
    theirs, ours = pair
    layout = TokenLayout.chains([RowSpan(0, 0, len(TEXT))])
    x = ours.embed(torch.tensor(TEXT))
    x = ours.run(x, LayerPlan(0, 2), ours.new_cache(1, 256), layout)
    holder, name = layers_of(theirs)
    layers = getattr(holder, name)
    setattr(holder, name, layers[:2])
    try:
        expected = theirs(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    finally:
        setattr(holder, name, layers)
    assert torch.allclose(ours.head(x), expected, atol=6e-4, rtol=1e-4)


DRAFTS = (
    *(None, "ngram", "recycle", "jacobi", "hybrid", "early-exit", "layer-skip", "cosine"),
    *("quantised", "auto"),
)


@pytest.mark.parametrize("draft", DRAFTS)
def test_text_is_that_of_generate_with_every_drafter_in_a_batch(pair, draft):
    """A draft that leaves a trace in the states, or a neighbour's."""
    model, ours = pair
    llm = LLM(ours, None, "tiny")
    prompts = [TEXT[:25] + TEXT[:12], TEXT[30:39], TEXT[:110]]
    control = None if draft in (None, "auto") else FixedLength(4)
    results = llm.generate(prompts, max_new_tokens=NEW, eos=[], draft=draft, control=control)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == expected_of(model, prompt)
    if draft not in (None, "auto", "cosine"):  # cosine finds no halves alike in a random model
        assert sum(result.stats.drafted for result in results) > 0


@pytest.mark.parametrize("draft", ["hybrid", "early-exit", "layer-skip"])
def test_sampled_text_is_the_same_with_drafts(pair, draft):
    """Logits that differ in a last bit, once something was rejected."""
    _, ours = pair
    llm = LLM(ours, None, "tiny")
    how = {"max_new_tokens": NEW, "eos": [], "sampling": SamplingParams(temperature=1.0, seed=3)}
    plain = llm.generate(TEXT[:20] * 2, draft=None, **how)
    drafted = llm.generate(TEXT[:20] * 2, draft=draft, control=FixedLength(4), **how)
    assert drafted.tokens == plain.tokens
    if draft != "hybrid":  # whose guesses need a text that repeats itself, which not all do
        assert drafted.stats.drafted > drafted.stats.accepted, "nothing was rolled back"


def test_a_second_model_may_be_recurrent(pair):
    """A drafting model that forgets what it rejected, but not in its states."""
    model, ours = pair
    llm = LLM(ours, None, "tiny")
    found = llm.generate(TEXT[:30], max_new_tokens=NEW, eos=[], draft=DraftModel(ours))
    assert found.tokens == expected_of(model, TEXT[:30])
    assert found.stats.accepted == found.stats.drafted > 0, "it is the model itself"


def test_a_chat_goes_on_where_it_stood(pair):
    """A kept cache whose states belong to another text."""
    model, ours = pair
    llm = LLM(ours, tiny_tokenizer(), "tiny")
    first = {"role": "user", "content": "one two three"}
    answer = llm.chat([first], max_new_tokens=8, eos=[])
    turns = [first, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "x"}]
    again = llm.chat(turns, max_new_tokens=8, eos=[])
    assert again.tokens == expected_of(model, llm.encode_chat(turns), 8)


def test_a_round_that_is_interrupted_leaves_no_trace(pair, monkeypatch):
    """Half of the layers know a token, or a state was changed that counts as it was, or one that
    was not counts as if. Interruptions come before a call of a pass and behind it."""
    model, ours = pair
    expected, prompt = expected_of(model, TEXT[:40]), TEXT[:40]
    calls = 0
    names = (FusedHalves, "run"), (FusedModel, "__call__")
    whole = {(each, name): getattr(each, name) for each, name in names}
    whole[NativeOps, "go_on"] = NativeOps.go_on  # of halves that run alone

    def interrupted(name):
        def run(*given):
            nonlocal calls
            calls += 1
            if calls % 13 in (1, 8):
                raise KeyboardInterrupt
            found = whole[name](*given)
            if calls % 13 == 7:
                raise KeyboardInterrupt
            return found

        return run

    sampler = row_samplers(SamplingParams(), [prompt], [])[0]
    how = {"drafter": NGram(), "controller": FixedLength(4)}
    for name in whole:
        monkeypatch.setattr(*name, interrupted(name))
    # a view, whose calls are not bound yet
    generation = Generation(ours.view(), [Request(prompt, sampler, NEW, **how)], chunk=8)
    row = generation.rows[0]
    while generation.rows:
        with suppress(KeyboardInterrupt):
            generation.step()
    assert row.tokens[40:] == expected and calls > 8


def test_a_state_that_was_being_changed_is_not_taken_for_whole():
    """Drafts that go on in place, and an interruption between the change and its note."""
    memory = Memory(RecurrentSize(4, 3, heads=1, key=2, value=2), 1, torch.device("cpu"))
    first = list(memory.stretches(0, 0, 10, settled=0))
    assert [(each.source, each.again) for each in first] == [(-1, False)]
    drafting = next(memory.stretches(0, 10, 12, settled=0))
    assert drafting.source == drafting.target == first[0].target, "it goes on in place"
    again = list(memory.stretches(0, 10, 12, settled=0))
    assert [(each.first, each.end, each.again) for each in again] == [
        (0, 10, True),
        (10, 12, False),
    ]


def test_a_draft_is_no_longer_than_a_row_can_return(pair):
    """A rejected draft behind which nobody finds back."""
    model, ours = pair
    llm, prompt = LLM(ours, None, "tiny"), TEXT[:30]
    expected = expected_of(model, prompt, 130)
    script = ScriptedDrafter([expected], wrong_every=9)
    long = {"max_new_tokens": 130, "eos": [], "control": FixedLength(200)}
    found = llm.generate(prompt, draft=script, **long)
    assert found.tokens == expected
    assert 20 * found.stats.rounds < found.stats.drafted <= LONGEST * found.stats.rounds


def test_what_needs_keys_or_a_recording_says_so(pair):
    """A drafter of keys on layers that have none, steps that are replayed without their states."""
    model, ours = pair
    with pytest.raises(OptionError, match="'static' cannot run recurrent layers"):
        from_transformers(model, kernel="static")
    with pytest.raises(OptionError, match="recurrent layers have none"):
        LLM(ours, None, "tiny").generate(TEXT[:9], max_new_tokens=4, draft="kv-subset")


def test_tokens_that_leave_at_different_layers_keep_the_text(pair):
    """States that are further in some layers than in others when drafts are verified."""
    model, ours = pair
    llm = LLM(ours, tiny_tokenizer(), "tiny")
    part = tiny_predictors(ours, candidates=7)
    drafter = DynamicExit(part=part, schedule="all", threshold=0.3)
    how = {"max_new_tokens": 2 * NEW, "eos": []}
    prompts = [TEXT[:40], TEXT[50:90], TEXT[:110]]
    found = llm.generate(prompts, draft=drafter, control=FixedLength(4), **how)
    for prompt, result in zip(prompts, found, strict=True):
        assert result.tokens == expected_of(model, prompt, 2 * NEW)
    assert sum(result.stats.drafted for result in found) > 0
    lossy = Confidence(threshold=0.3, layers=(1, 2, 3))
    assert len(lossy.generate(llm, TEXT[:40], **how).tokens) == 2 * NEW
    with pytest.raises(OptionError, match="recurrent layers have none to leave out"):
        replace(lossy, fill="holes").generate(llm, TEXT[:40], **how)
