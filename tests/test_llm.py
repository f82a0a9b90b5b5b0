"""Text in, text out: streams, stop strings, chat turns, threads."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from transformers import MaxLengthCriteria, NoRepeatNGramLogitsProcessor, StoppingCriteriaList
from transformers.generation.stopping_criteria import StoppingCriteria

from selfspec import LLM, OptionError, SamplingParams, ScriptedDrafter, Unavailable
from selfspec import llm as llm_module
from selfspec.engine.generation import Generation
from selfspec.testing import exit_agreement, near_identity_model, tiny_llm, tiny_model

PROMPT = "once upon a time"
LONG = {"max_new_tokens": 60, "eos": []}


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(seed=4)


def spoken(llm, **options):
    """A sampled text with printable stretches; a random model's greedy text is a loop of bytes."""
    letters = dict.fromkeys(llm.tokenizer("abcde fgh")["input_ids"], 100.0)
    return llm.generate(
        PROMPT,
        sampling=SamplingParams(temperature=1.5, seed=7, logit_bias=letters),
        **{**LONG, **options},
    )


def test_text_is_the_decoded_tokens(llm):
    """Text that drifts from the tokens it stands for."""
    result = llm.generate(PROMPT, **LONG)
    assert result.text == llm.tokenizer.decode(result.tokens, skip_special_tokens=True)


def test_a_list_in_gives_a_list_out_and_one_gives_one(llm):
    """A single prompt in a list that comes back bare, or token lists taken for prompts."""
    assert isinstance(llm.generate([PROMPT], **LONG), list)
    ids = llm.tokenizer(PROMPT)["input_ids"]
    assert (
        llm.generate(ids, **LONG).tokens
        == llm.generate([ids, PROMPT], **LONG)[1].tokens
        == llm.generate(PROMPT, **LONG).tokens
    )


def test_stream_equals_generate_and_pieces_are_whole(llm):
    """A piece that splits a character or shows what a stop string takes back."""
    expected = llm.generate(PROMPT, **LONG)
    stream = llm.stream(PROMPT, **LONG)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == expected.text == stream.result.text
    assert [token for piece in pieces for token in piece.tokens] == expected.tokens
    assert all("\ufffd" not in piece.text or "\ufffd" in expected.text for piece in pieces)


@pytest.mark.parametrize("draft_tokens", [0, 5])
@pytest.mark.parametrize(("start", "length"), [(10, 1), (11, 3), (17, 6), (0, 2)])
def test_stop_strings_cut_exactly(llm, draft_tokens, start, length):
    """Text after a stop string, a stop string that spans tokens and is missed, or one inside
    accepted drafts."""
    whole = spoken(llm)
    stop = whole.text[start : start + length]
    result = spoken(
        llm,
        stop=[stop, "never there"],
        draft=ScriptedDrafter([whole.tokens]),
        control_options={"tokens": draft_tokens},
    )
    assert result.finish_reason == "stop"
    assert result.text == whole.text[: whole.text.index(stop)]
    assert stop in llm.tokenizer.decode(result.tokens) and stop not in llm.tokenizer.decode(
        result.tokens[:-1]
    )


def test_stream_never_shows_part_of_a_stop_string(llm):
    """Shown text cannot be taken back."""
    whole = spoken(llm)
    stop = whole.text[20:26]
    letters = dict.fromkeys(llm.tokenizer("abcde fgh")["input_ids"], 100.0)
    stream = llm.stream(
        PROMPT,
        sampling=SamplingParams(temperature=1.5, seed=7, logit_bias=letters),
        stop=stop,
        **LONG,
    )
    assert "".join(piece.text for piece in stream) == whole.text[: whole.text.index(stop)]


def test_closing_a_stream_stops_the_work(llm, monkeypatch):
    """A generation that runs on unseen."""
    calls = []
    original = Generation.step
    monkeypatch.setattr(Generation, "step", lambda self: calls.append(1) or original(self))
    with llm.stream(PROMPT, draft=None, **LONG) as stream:
        next(stream)
        next(stream)
    seen = len(calls)
    assert list(stream) == [] and len(calls) == seen == 2
    with pytest.raises(OptionError, match="has not ended"):
        _ = stream.result


def test_two_streams_interleave(llm):
    """State shared between generations of one LLM."""
    expected = [llm.generate(prompt, **LONG).tokens for prompt in (PROMPT, "other")]
    streams, seen = [llm.stream(PROMPT, **LONG), llm.stream("other", **LONG)], [[], []]
    for _ in range(60):
        for stream, tokens in zip(streams, seen, strict=True):
            # none when drafts have brought it to its end sooner
            for piece in itertools.islice(stream, 1):
                tokens += piece.tokens
    assert seen == expected


def test_calls_from_several_threads_are_safe(llm):
    """Races on shared buffers. Four threads, each compared with its own single-threaded result."""
    prompts = [PROMPT, "other", "a third one", "4"]
    expected = [llm.generate(prompt, **LONG).tokens for prompt in prompts]
    found: list = [None] * 4

    def work(index):
        found[index] = [llm.generate(prompts[index], **LONG).tokens for _ in range(3)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[tokens] * 3 for tokens in expected]


def test_a_following_turn_reads_only_what_is_new(llm):
    """A conversation that is read again from the start each turn, or reused after it diverged."""
    first = [{"role": "user", "content": "hello there"}]
    answer = llm.chat(first, **LONG)
    assert answer.stats.cached_prompt_tokens == 0
    second = [
        *first,
        {"role": "assistant", "content": "something else"},
        {"role": "user", "content": "go on"},
    ]
    again = llm.chat(second, **LONG)
    shared = len(llm.encode_chat(first))
    assert again.stats.cached_prompt_tokens >= shared - 1
    assert again.tokens == tiny_llm(seed=4).chat(second, **LONG).tokens
    streamed = llm.stream_chat(second, **LONG)
    assert [t for piece in streamed for t in piece.tokens] == again.tokens


def test_hugging_face_processors_and_criteria_see_the_whole_row(llm):
    """Processors that see only the last token: an n-gram ban would not work. Compared with
    transformers' generate."""
    ids = llm.tokenizer(PROMPT)["input_ids"]
    model = tiny_model(seed=4)
    expected = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        no_repeat_ngram_size=2,
        repetition_penalty=1.2,
    )[0, len(ids) :].tolist()
    options = {
        "sampling": SamplingParams(repetition_penalty=1.2),
        "logits_processors": [NoRepeatNGramLogitsProcessor(2)],
        "eos": [],
    }
    plain = llm.generate(ids, max_new_tokens=40, **options)
    assert plain.tokens == expected
    drafted = llm.generate(ids, max_new_tokens=40, draft=ScriptedDrafter([expected], 3), **options)
    assert drafted.tokens == expected and drafted.stats.accepted > 0
    cut = llm.generate(
        ids,
        draft=ScriptedDrafter([expected]),
        stopping_criteria=[MaxLengthCriteria(len(ids) + 7)],
        **options,
    )
    assert cut.tokens == expected[:7] and cut.finish_reason == "stop"


def test_a_custom_criterion_stops_inside_a_draft(llm):
    """Overshooting a user's criterion, which transformers' assisted generation does."""
    expected = llm.generate(PROMPT, **LONG).tokens

    class At(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([bool(input_ids[0, -1] == expected[9])])

    result = llm.generate(
        PROMPT,
        draft=ScriptedDrafter([expected]),
        stopping_criteria=StoppingCriteriaList([At()]),
        **LONG,
    )
    assert (
        result.tokens == expected[: expected.index(expected[9]) + 1]
        and result.finish_reason == "stop"
    )


def test_without_a_tokenizer_token_ids_still_work():
    """A model without tokenizer must say what is missing, not fail inside."""
    llm = LLM.from_pretrained(tiny_model(seed=4))
    assert len(llm.generate([5, 6], max_new_tokens=3, eos=[]).tokens) == 3
    with pytest.raises(Unavailable, match="without a tokenizer"):
        llm.generate("text")
    with pytest.raises(OptionError, match="stop strings need a tokenizer"):
        llm.generate([5], stop="x")


def test_generation_config_is_honoured():
    """transformers applies a config's repetition penalty in greedy decoding, so equality with it
    needs the same."""
    model = tiny_model(seed=4)
    model.generation_config.repetition_penalty = 1.3
    model.generation_config.eos_token_id = [2, 77]
    ids = [5, 6, 7]
    expected = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, 3), max_new_tokens=30, do_sample=False
    )[0, 3:].tolist()
    assert LLM.from_pretrained(model).generate(ids, max_new_tokens=30).tokens == expected


@pytest.mark.parametrize("rate", [0.4, 0.8])
def test_near_identity_model_agrees_at_the_asked_rate(rate):
    """A builder that later measurements rest on."""
    model = near_identity_model(rate, seed=1)
    assert abs(exit_agreement(model, 2) - rate) < 0.12


def test_unknown_options_name_the_nearest(llm):
    """A misspelt option that is swallowed."""
    with pytest.raises(OptionError, match="did you mean 'max_new_tokens'"):
        llm.generate("a", max_new_token=5)
    with pytest.raises(OptionError, match=r"SamplingParams\(temperature=0.5\)"):
        llm.generate("a", temperature=0.5)


def test_long_answers_hand_memory_back(monkeypatch):
    """A process that keeps what an answer took, or short answers that wait for a walk through the
    heap which takes as long as they."""
    llm, calls = tiny_llm(seed=4), []
    monkeypatch.setattr(llm_module, "give_back", lambda: calls.append(1))
    llm.generate([5, 6, 7], max_new_tokens=llm_module.LONG - 1, eos=[])
    assert not calls
    llm.generate([[5, 6, 7], [5, 6]], max_new_tokens=llm_module.LONG // 2, eos=[])
    assert calls == [1]
