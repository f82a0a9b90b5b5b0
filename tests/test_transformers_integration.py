"""`model.generate(custom_generate=selfspec.transformers(...))` against `model.generate`: same
tokens, same stops."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from threading import Thread

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import selfspec
from selfspec import OptionError, ScriptedDrafter, UnsupportedModel
from selfspec.integrations import transformers as integration
from selfspec.testing import tiny_model, tiny_tokenizer

PROMPT = torch.tensor([list(b"once upon a time")])
RAGGED = [b"once upon a time", b"the", b"a longer prompt than the other two"]


@pytest.fixture(scope="module")
def model():
    return tiny_model(seed=4)


def padded(prompts=RAGGED):
    """Rows of one length, filled up with pad tokens on the left, and their mask."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(each)) + list(each) for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def both(model, decoding=None, **call):
    """What transformers returns, and what it returns with us inside."""
    call = {"max_new_tokens": 24, "do_sample": False, "input_ids": PROMPT, **call}
    return model.generate(**call), model.generate(
        **call, custom_generate=decoding or selfspec.transformers("early-exit")
    )


def state(model):
    """Everything about a model that a call must not change."""
    return (
        {name: value.clone() for name, value in model.state_dict().items()},
        model.config.to_dict(),
        model.generation_config.to_dict(),
        [module.training for module in model.modules()],
        [weight.requires_grad for weight in model.parameters()],
        [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()],
    )


class Every(LogitsProcessor):
    """Depends on the length of the ids and on the row's place in the batch, and writes into what it
    is given."""

    def __call__(self, input_ids, scores):
        scores[:, (input_ids.shape[1] * 7) % scores.shape[1] :: 5] -= 3
        for row in range(len(scores)):
            scores[row, row::11] -= 2
        return scores


class NewTokens(StoppingCriteria):
    """Stops each row after a number of tokens, the padded prompt included."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


CONFIGS = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.4},
    "no repeats": {"no_repeat_ngram_size": 2},
    "repetition and bias": {"repetition_penalty": 1.2, "sequence_bias": {(5,): -4.0, (30,): 2.0}},
    "lengths": {
        "min_new_tokens": 9,
        "max_new_tokens": 30,
        "eos_token_id": [56, 54, 83, 97, 101, 103],
    },
    "min length": {
        "min_length": 42,
        "max_length": 60,
        "eos_token_id": list(range(40, 120)),
        "max_new_tokens": None,
    },
    "several ends": {"eos_token_id": [83, 99, 144], "pad_token_id": 3},
    "suppressed": {
        "suppress_tokens": [54, 186],
        "begin_suppress_tokens": [56],
        "bad_words_ids": [[100], [99, 41]],
    },
    "forced end": {"forced_eos_token_id": 9},
    "processor": {"logits_processor": [Every()]},
    "processor and penalty": {"logits_processor": [Every()], "repetition_penalty": 1.3},
    "criterion": {"stopping_criteria": [NewTokens(38), MaxTimeCriteria(60.0)]},
    "allowed": {
        "prefix_allowed_tokens_fn": lambda row, ids: [5 + row, 20, 33, 60 + len(ids) % 7, 90 + row]
    },
    "padding token": {"pad_token_id": 7, "eos_token_id": [83]},
}


@pytest.mark.parametrize(
    "decoding", [None, lambda: selfspec.transformers()], ids=["drafted", "plain"]
)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_tokens_are_those_of_generate(model, rows, config, decoding):
    """Options of the generation config that are dropped, or that see a row without its padding or
    its place in the batch."""
    inputs = {"input_ids": PROMPT} if rows == 1 else padded()
    theirs, ours = both(model, decoding and decoding(), **inputs, **CONFIGS[config])
    assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    if config != "plain":
        assert not torch.equal(
            theirs, model.generate(**inputs, max_new_tokens=24, do_sample=False)
        ), "the option changed nothing"


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_other_families(family):
    """Padding that a window or a rotary embedding counts."""
    theirs, ours = both(
        tiny_model(family, 4, **({"sliding_window": 12} if family == "mistral" else {})), **padded()
    )
    assert torch.equal(ours, theirs)


def test_half_precision_runs():
    """A model that is not float32: other kernels, ids of the same shape."""
    theirs, ours = both(tiny_model(seed=4).bfloat16(), max_new_tokens=4)
    assert ours.shape == theirs.shape


def test_a_right_draft_saves_passes_and_is_counted(model):
    """A drafter that is never asked, and statistics that nobody can read."""
    script = model.generate(PROMPT, max_new_tokens=24, do_sample=False)[
        0, PROMPT.shape[1] :
    ].tolist()
    decoding = selfspec.transformers(ScriptedDrafter([script]), control_options={"tokens": 5})
    theirs, ours = both(model, decoding)
    assert torch.equal(ours, theirs)
    assert decoding.stats.new_tokens == len(script) and decoding.stats.tokens_per_verification > 4


def test_sampling_follows_the_distribution_of_generate(model):
    """Filters that are applied twice, in another order, or not at all. 1,000 draws of one token
    each; a wrong top-k must fail."""
    options = {
        "do_sample": True,
        "temperature": 1.7,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "max_new_tokens": 1,
    }
    many = PROMPT[:, :3].repeat(1000, 1)
    torch.manual_seed(0)
    theirs = Counter(model.generate(many, **options)[:, -1].tolist())

    def distance(**changes):
        found = model.generate(
            many, **{**options, **changes}, custom_generate=selfspec.transformers("early-exit")
        )
        ours = Counter(found[:, -1].tolist())
        return sum(abs(ours[token] - theirs[token]) for token in ours | theirs) / 2000

    assert len(theirs) > 3 and distance() < 0.09 < distance(top_k=4), (
        "total variation between 1,000 draws each"
    )


def test_manual_seed_repeats_a_sample_and_drafts_do_not_change_it(model):
    """A seed from the operating system, which no user could repeat."""
    options = {
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.95,
        "max_new_tokens": 20,
        "num_return_sequences": 2,
    }
    found = []
    for draft in ("early-exit", "early-exit", None):
        torch.manual_seed(5)
        found.append(
            model.generate(PROMPT, **options, custom_generate=selfspec.transformers(draft))
        )
    other = model.generate(PROMPT, **options, custom_generate=selfspec.transformers())
    assert (
        torch.equal(found[0], found[1])
        and torch.equal(found[0], found[2])
        and not torch.equal(found[0], other)
    )
    assert not torch.equal(found[0][0], found[0][1]), "two sequences with the same randomness"


def test_a_user_filter_beside_the_config_is_kept(model):
    """With two top-k filters, the one that stands out of order must not be taken for the config's
    own."""
    options = {
        "do_sample": True,
        "temperature": 0.01,
        "logits_processor": [TopKLogitsWarper(1)],
        "top_k": 50,
    }
    theirs, ours = both(model, **options)
    assert torch.equal(ours, theirs), "near temperature 0 both are greedy"
    torch.manual_seed(0)
    hot = model.generate(
        PROMPT,
        **{**options, "temperature": 50.0},
        max_new_tokens=20,
        custom_generate=selfspec.transformers(),
    )
    assert torch.equal(hot[:, : theirs.shape[1]], theirs[:, : hot.shape[1]])


def test_return_dict(model):
    """A caller that reads `.sequences`."""
    theirs, ours = both(model, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, theirs.sequences)


def test_stop_strings_end_inside_a_draft(model):
    """Accepted tokens after a criterion said stop."""
    tokenizer = tiny_tokenizer()
    full = model.generate(PROMPT, max_new_tokens=24, do_sample=False)[0].tolist()
    decoding = selfspec.transformers(
        ScriptedDrafter([full[PROMPT.shape[1] :]]), control_options={"tokens": 7}
    )
    stops = [
        text for text in map(tokenizer.decode, full[PROMPT.shape[1] + 1 : -1]) if text.isascii()
    ]
    assert len(stops) > 3
    for stop in stops:
        theirs, ours = both(
            model, decoding, stopping_criteria=[StopStringCriteria(tokenizer, [stop])]
        )
        assert torch.equal(ours, theirs) and len(ours[0]) < len(full)


@pytest.mark.parametrize("where", ["here", "generate"])
def test_streamers_see_what_transformers_shows_them(model, where):
    """A streamer that transformers does not hand on: no text, and a reader that waits forever."""
    shown = {}
    for name in ("theirs", "ours"):
        seen = shown[name] = []
        streamer = TextStreamer(tiny_tokenizer(), skip_prompt=True)
        streamer.on_finalized_text = lambda text, stream_end=False, seen=seen: seen.append(
            (text, stream_end)
        )
        custom = {}
        if name == "ours":
            custom = {
                "custom_generate": selfspec.transformers(
                    "early-exit", streamer=streamer if where == "here" else None
                )
            }
        given = {"streamer": streamer} if name == "theirs" or where == "generate" else {}
        model.generate(PROMPT, max_new_tokens=16, do_sample=False, **given, **custom)
    assert (
        "".join(text for text, _ in shown["ours"])
        == "".join(text for text, _ in shown["theirs"])
        != ""
    )
    assert shown["ours"][-1][1], "the end was not announced"


def test_an_iterator_streamer_ends(model):
    """The reader's side of the same fault, as a program would meet it."""
    streamer = TextIteratorStreamer(tiny_tokenizer(), skip_prompt=True, timeout=20)
    call = {
        "max_new_tokens": 8,
        "streamer": streamer,
        "custom_generate": selfspec.transformers("early-exit"),
    }
    thread = Thread(target=lambda: model.generate(PROMPT, **call))
    thread.start()
    assert "".join(streamer)
    thread.join()


@pytest.mark.parametrize("training", [False, True])
def test_the_model_stays_as_it_was(training):
    """Weights taken apart, a training flag cleared, a hook left behind, gradients switched off."""
    model = tiny_model(seed=4).requires_grad_(True).train(training)
    model.model.layers[1].eval()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    before = state(model)
    model.generate(PROMPT, max_new_tokens=6, custom_generate=selfspec.transformers("early-exit"))
    after = state(model)
    assert before[0].keys() == after[0].keys() and all(
        torch.equal(before[0][key], after[0][key]) for key in before[0]
    )
    assert before[1:] == after[1:]
    loss = model(input_ids=PROMPT, labels=PROMPT).loss
    loss.backward()
    assert model.lm_head.weight.grad is not None, "a tensor of inference mode was left in the model"


@pytest.mark.parametrize("write", ["optimizer", "data", "pointer", "loading"])
def test_changed_weights_are_noticed(write):
    """Yesterday's packed weights: the text of a model that no longer exists."""
    model, other = tiny_model(seed=4), tiny_model(seed=5)
    first, _ = both(model)
    weight = model.model.layers[1].mlp.down_proj.weight
    with torch.no_grad():
        if write == "optimizer":
            weight.mul_(-2)
        elif write == "data":  # as peft merges an adapter; not counted by torch
            weight.data += 0.5 * torch.randn_like(weight)
        elif write == "pointer":
            weight.data = other.model.layers[1].mlp.down_proj.weight.data
        else:
            model.load_state_dict(other.state_dict())
    theirs, ours = both(model)
    assert not torch.equal(theirs, first) and torch.equal(ours, theirs)


def test_a_model_is_taken_apart_once_and_let_go(monkeypatch):
    """Packing at every call, or a cache that keeps every model alive."""
    made = []
    original = integration.from_transformers
    monkeypatch.setattr(
        integration, "from_transformers", lambda *a, **k: made.append(1) or original(*a, **k)
    )
    model = tiny_model(seed=6)
    for _ in range(3):
        model.generate(PROMPT, max_new_tokens=3, custom_generate=selfspec.transformers())
    assert len(made) == 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_the_context_ends_a_row_aloud():
    """Silence about text that transformers would have gone on with, beyond what the model was made
    for."""
    model = tiny_model(seed=4, max_position_embeddings=40)
    with pytest.warns(UserWarning, match=r"ended at 40 tokens, the model's context"):
        found = model.generate(
            PROMPT, max_new_tokens=60, custom_generate=selfspec.transformers("early-exit")
        )
    assert found.shape[1] == 40


class Lenient(BaseStreamer):
    """Takes what transformers' own refuse."""

    def put(self, value):
        pass

    def end(self):
        pass


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"prompt_lookup_num_tokens": 3}, r"selfspec.transformers\(draft="),
        ({"assistant_early_exit": 2}, "another way to draft"),
        ({"assistant_model": tiny_model(seed=1)}, "draft-model"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
        (
            {"return_dict_in_generate": True, "output_hidden_states": True},
            "output_hidden_states=True",
        ),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor remembers"),
        ({"past_key_values": DynamicCache()}, "past_key_values was passed"),
        ({"position_ids": torch.arange(3, 19)[None]}, "position_ids of row 0"),
        ({"attention_mask": torch.tensor([[1] * 15 + [0]])}, "padding_side='left'"),
        ({"attention_mask": torch.tensor([[1, 0] + [1] * 14])}, "padding_side='left'"),
        ({"input_ids": PROMPT.repeat(2, 1), "streamer": Lenient()}, "a streamer takes one row"),
        ({"inputs_embeds": torch.zeros(1, 16, 64), "input_ids": None}, "inputs_embeds"),
        (
            {
                "input_ids": PROMPT.repeat(2, 1),
                "stopping_criteria": [NewTokens(20)],
                "eos_token_id": None,
                "pad_token_id": None,
            },
            "pad_token_id",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(call, words):
    """An option that is ignored in silence. The model comes back usable."""
    model = tiny_model(seed=4)
    model.generation_config.eos_token_id = None
    if "pad_token_id" in call:
        model.generation_config.pad_token_id = model.config.pad_token_id = None
    options = {"input_ids": PROMPT, "max_new_tokens": 4, "do_sample": False, **call}
    with pytest.raises(OptionError, match=words):
        model.generate(**options, custom_generate=selfspec.transformers("early-exit"))
    assert torch.equal(*both(model))


def test_an_adapter_must_be_merged_first(model):
    """An adapter that is switched on after the weights were read: its text would be the bare
    model's."""

    class Adapter(torch.nn.Linear):
        pass

    Adapter.__module__ = "peft.tuners.lora.layer"
    adapted = tiny_model(seed=4)
    adapted.model.layers[0].mlp.adapter = Adapter(2, 2)
    with pytest.raises(UnsupportedModel, match=r"Adapter of peft.*merge_and_unload"):
        adapted.generate(PROMPT, max_new_tokens=3, custom_generate=selfspec.transformers())


def test_names_are_checked_at_once():
    """A typing mistake that shows only after the model was packed."""
    with pytest.raises(OptionError, match="did you mean 'early-exit'"):
        selfspec.transformers("early-exti")
    with pytest.raises(OptionError, match=r"no option 'layers'.*did you mean 'layer'"):
        selfspec.transformers("early-exit", {"layers": 2})


def test_the_early_exit_of_huggingface_is_ours(model) -> None:
    """`assistant_early_exit=`, as Hugging Face's blog has it: refused, ignored, or with a length
    and a threshold that are not what was asked for."""
    decoding = selfspec.transformers()
    call = {"max_new_tokens": 24, "do_sample": False, "input_ids": PROMPT}
    expected = model.generate(**call)
    found = model.generate(**call, assistant_early_exit=2, custom_generate=decoding)
    assert torch.equal(expected, found)
    assert decoding.stats is not None and decoding.stats.drafted > 0
    model.generation_config.num_assistant_tokens = 3
    model.generation_config.assistant_confidence_threshold = 0.0
    try:
        model.generate(**call, assistant_early_exit=2, custom_generate=decoding)
    finally:
        model.generation_config.num_assistant_tokens = None
        model.generation_config.assistant_confidence_threshold = None
    assert len(decoding.stats.drafted_at) <= 3 and decoding.stats.drafted > 24
