"""The floor: models run whole by their own forward. The same text with any drafts, whatever cache a
model has, and a clear word where layers are asked for."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from benchmarks.shrunken import tiny
from selfspec import LLM, SamplingParams
from selfspec.draft.auto import Auto
from selfspec.draft.base import Target
from selfspec.engine.generation import Generation
from selfspec.engine.group import Group
from selfspec.engine.row import Request
from selfspec.errors import OptionError, UnsupportedModel
from selfspec.model import pasts
from selfspec.model.compute.cache import RowSpan
from selfspec.model.families import FAMILIES
from selfspec.model.floor import floor_model
from selfspec.model.from_transformers import from_transformers
from selfspec.model.pasts import Past, ways
from selfspec.testing import tiny_model, tiny_tokenizer

# a cache that is cropped, one that is copied, one that takes single tokens, none at all
KINDS = {
    "xglm": "cropped",
    "mamba2": "copied",
    "mamba": "one token at a time",
    "openai-gpt": "no cache",
}


@pytest.fixture(scope="module", autouse=True)
def nobody_described_them():
    """The families here as if the table did not have them, so that it may."""
    with pytest.MonkeyPatch.context() as patch:
        for family in KINDS:
            patch.delitem(FAMILIES, family, raising=False)
        yield


TEXT = torch.randint(3, 259, (60,), generator=torch.Generator().manual_seed(0)).tolist()
NEW = 20


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """A model of transformers' and an LLM made of it."""
    model = tiny(request.param)
    with pytest.warns(UserWarning, match=f"{request.param}.*kernel 'floor'.*because") as said:
        llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    assert len(said) == 1, "one warning names the path"
    assert any(KINDS[request.param] in words for words in llm.info.alone)
    return model, llm


def expected_of(model, prompt, new=NEW):
    """What transformers writes."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("draft", [None, "ngram", "recycle", "jacobi", "hybrid", "auto"])
def test_text_is_that_of_generate_with_any_drafts_in_a_batch(pair, draft):
    """States of rejected drafts that stay, rows that share a cache, trees read as chains."""
    model, llm = pair
    prompts = [TEXT[:25] + TEXT[:12], TEXT[30:39]]
    expected = [expected_of(model, prompt) for prompt in prompts]
    results = llm.generate(prompts, max_new_tokens=NEW, eos=[], draft=draft)
    assert [result.tokens for result in results] == expected
    if draft not in (None, "auto"):
        drafted, accepted = (
            sum(getattr(each.stats, name) for each in results) for name in ("drafted", "accepted")
        )
        assert drafted > accepted, "nothing was rejected, so nothing was rolled back"


def test_sampled_text_is_the_same_with_drafts_and_in_a_stream(pair):
    """Random numbers that depend on what was drafted or on how a text was read."""
    _, llm = pair
    how = {"max_new_tokens": NEW, "eos": [], "sampling": SamplingParams(temperature=1.0, seed=3)}
    plain = llm.generate(TEXT[:20], draft=None, **how)
    assert llm.generate(TEXT[:20], draft="hybrid", **how).tokens == plain.tokens
    streamed = [token for piece in llm.stream(TEXT[:20], **how) for token in piece.tokens]
    assert streamed == plain.tokens


def test_a_chat_goes_on_where_it_stood(pair):
    """A kept cache that holds another text than it says."""
    model, llm = pair
    first = {"role": "user", "content": "one two three"}
    answer = llm.chat([first], max_new_tokens=8, eos=[])
    turns = [first, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "x"}]
    again = llm.chat(turns, max_new_tokens=8, eos=[])
    assert again.tokens == expected_of(model, llm.encode_chat(turns), 8)
    assert again.stats.cached_prompt_tokens > 0


@pytest.mark.parametrize(
    "draft", ["early-exit", "dynamic-exit", "layer-skip", "cosine", "kv-subset", "quantised"]
)
def test_what_runs_single_layers_says_so(pair, draft):
    """An exit out of one layer, or numbers of layers that the user never sees."""
    _, llm = pair
    with pytest.raises(OptionError, match=r"single layers.*run whole.*draft with 'auto'"):
        llm.generate(TEXT[:9], max_new_tokens=4, draft=draft)


def test_a_call_that_is_interrupted_leaves_no_trace(pair):
    """Half of the layers know a token, and the next round builds on that."""
    model, llm = pair
    expected = expected_of(model, TEXT[:20])
    calls = 0

    def interrupted(*_):
        nonlocal calls
        calls += 1
        if calls in (3, 6):
            raise KeyboardInterrupt

    parts = [child for child in model.modules() if isinstance(child, torch.nn.ModuleList)]
    layers = max(parts, key=lambda each: sum(p.numel() for p in each.parameters()))
    generation = Generation(llm.model, [Request(TEXT[:20], _greedy(llm), NEW)])
    row = generation.rows[0]
    hook = layers[2].register_forward_pre_hook(interrupted)
    try:
        while generation.rows:
            try:
                generation.step()
            except KeyboardInterrupt:
                continue
    finally:
        hook.remove()
    assert row.tokens[20:] == expected and calls > 6


def _greedy(llm):
    from selfspec.core.sampling import row_samplers

    return row_samplers(SamplingParams(), [TEXT[:20]], [])[0]


def test_a_way_that_leaves_traces_is_not_taken(monkeypatch):
    """A rollback that does nothing would be seen by nobody but the probe."""
    model = tiny("xglm")
    words = floor_of(model).alone
    assert "cropped" in str(words)
    monkeypatch.setattr(pasts, "_can_be_cropped", lambda past: False)
    monkeypatch.setattr(pasts, "_copied", lambda past: past)  # shared, so it goes on with the text
    assert "no cache" in str(floor_of(model).alone)


def floor_of(model):
    """The model on the floor, without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return floor_model(model, "a test asks for it")


def test_a_model_that_looks_ahead_is_refused():
    """An encoder reads a text as a whole, and every token would change with the next."""
    model = tiny_model("bert", is_decoder=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(UnsupportedModel, match="look ahead"):
            from_transformers(model)


def test_what_a_models_own_code_raises_refuses_it(monkeypatch):
    """A stray RuntimeError out of a model's insides."""
    model = tiny("xglm")

    def broken(*_, **__):
        raise RuntimeError("it never worked")

    monkeypatch.setattr(model.model.layers[0].fc1, "forward", broken)
    with pytest.raises(UnsupportedModel, match=r"'xglm'.*RuntimeError.*it never worked"):
        from_transformers(model)


def test_a_text_read_in_any_pieces_and_returns_is_the_same():
    """Copies that are thrown away too early, or read again from the wrong place."""
    model = tiny("mamba2")
    whole = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    calling = next(each for each in ways(model) if "copied" in each.words)
    past = Past(calling)
    past.read(0, TEXT[:20])
    for first, count in ((20, 5), (22, 5), (22, 9), (24, 3), (24, 20), (43, 4), (10, 40)):
        out = past.read(first, TEXT[first : first + count])
        assert torch.allclose(out, whole[first : first + count], atol=1e-4), (first, count)


def test_training_mode_and_weights_are_refused():
    """Dropout in what is called the model's own text, and an option that would do nothing."""
    model = tiny("xglm")
    ours = floor_of(model)
    model.train()
    with pytest.raises(OptionError, match=r"training mode.*model\.eval\(\)"):
        ours.prefill([TEXT[:5]], ours.new_cache(1, 8))
    with pytest.raises(OptionError, match="weights 'int8'"):
        from_transformers(tiny("xglm"), weights="int8")


def test_single_tokens_are_read_without_a_copy(monkeypatch):
    """A copy of all states before every token of plain text, which is a quarter of a small step."""
    made = []
    own = pasts._copied
    monkeypatch.setattr(pasts, "_copied", lambda past: made.append(past) or own(past))
    past = Past(next(each for each in ways(tiny("mamba2")) if "copied" in each.words))
    past.read(0, TEXT[:10])
    for place in range(10, 16):
        past.read(place, TEXT[place : place + 1])
    assert not made
    past.read(16, TEXT[16:20])
    assert len(made) == 1, "what follows the first of them may be rejected"
    past.read(17, TEXT[17:18])
    assert len(made) == 2 and past.again == 1, "back to the copy, which stays as it is"
    past.read(18, TEXT[18:20])
    assert past.again == 0


def test_a_row_goes_on_from_a_copy_of_another_ones_text(pair):
    """A system prompt that two requests share, of which the second row's model knows nothing."""
    model, llm = pair
    whole = model(input_ids=torch.tensor([TEXT[:30]]), use_cache=False).logits[0]
    ours = llm.model
    cache = ours.new_cache(2, 64)
    ours.prefill([TEXT[:20]], cache)
    cache.copy(0, 1, 15)
    ours.forward(torch.tensor(TEXT[40:45]), cache, cache.layout_at([RowSpan(1, 15, 5)]))
    for row, first in ((0, 18), (1, 15)):  # back behind what either has read
        layout = cache.layout_at([RowSpan(row, first, 30 - first)])
        found = ours.forward(torch.tensor(TEXT[first:30]), cache, layout)
        assert torch.allclose(found, whole[first:], atol=1e-4), row


def test_single_tokens_say_what_the_whole_text_does(pair):
    """A shorter way for the next token that forgets what was read before it."""
    model, llm = pair
    whole = model(input_ids=torch.tensor([TEXT[:30]]), use_cache=False).logits[0]
    ours, cache = llm.model, llm.model.new_cache(1, 64)
    for begin, end in ((0, 12), *((at, at + 1) for at in range(12, 20)), (20, 24), (22, 23)):
        layout = cache.layout_at([RowSpan(0, begin, end - begin)])
        said = ours.scored(TEXT[begin:end], cache, layout).logits
        assert torch.allclose(said, whole[begin:end], atol=1e-4), begin
        cache.rollback(0, min(end, 22))


def test_auto_leaves_a_model_alone_that_reads_drafts_one_by_one(pair):
    """Looks at what can never pay, since every guess costs a pass."""
    _, llm = pair
    found = llm.generate([9, 8, 7] * 10, max_new_tokens=40, eos=[], draft=Auto(["ngram"]))
    one_by_one = any("one token at a time" in words for words in llm.info.alone)
    assert llm.model.one_by_one == one_by_one
    assert not (one_by_one and found.stats.drafted)


@pytest.mark.parametrize(("seconds", "drafts"), [((1.0, 9.0, 9.0), False), ((1.0, 1.0, 1.0), True)])
def test_auto_knows_from_the_load_what_passes_cost(pair, seconds, drafts):
    """A first look that takes as long as ten steps, in every short text."""
    _, llm = pair
    assert [tokens for tokens, _ in llm.model.pass_seconds] == [1, 2, 5]
    measured = tuple(zip((1, 2, 5), seconds, strict=True))
    told = replace(llm.model, pass_seconds=measured, one_by_one=False)
    session = Auto().start(Target(told, told.new_cache(1, 64)))
    session.admit(0, TEXT[:9], _greedy(llm))
    session.about([0])
    assert (session.budget([50]).tokens[0] > 0) == drafts


def test_tokens_that_are_read_again_count_as_others_of_the_pass(pair, monkeypatch):
    """A plain round behind a rejected draft takes several tokens' time, and would be what plain
    decoding is thought to cost."""
    model, llm = pair
    besides, own = [], Group.learn
    monkeypatch.setattr(
        Group, "learn", lambda self, *told: besides.append(told[5]) or own(self, *told)
    )
    found = llm.generate(TEXT[:25] + TEXT[:12], max_new_tokens=NEW, eos=[], draft="hybrid")
    assert found.stats.drafted > found.stats.accepted
    assert any(besides) == (model.config.model_type == "mamba2")
