"""Streaming text, stop strings and stopping criteria, on small tokenizers of the two common kinds,
made here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from selfspec.core.text_stream import CriteriaCheck, StopStrings, TextStream
from selfspec.errors import OptionError

WORDS = [
    "a",
    "b",
    " a",
    " the",
    "the",
    ".",
    "stop",
    " st",
    "op",
    "per",
    "\n",
    "  ",
    " .",
    "n't",
    "\N{REPLACEMENT CHARACTER}",
    "é",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2 and SmolLM2: each token is some bytes, possibly a part of a character. Ids 0..255
    are the bytes."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = bytes_to_unicode()
    vocabulary = {alphabet[b]: b for b in range(256)}
    for piece in [*WORDS, "😀"]:
        vocabulary.setdefault(spell.pre_tokenize_str(piece)[0][0], len(vocabulary))
    vocabulary.setdefault(alphabet[0xF0] + alphabet[0x9F], len(vocabulary))  # half of an emoji
    # the other half, with more text behind it
    vocabulary.setdefault(alphabet[0x98] + alphabet[0x80] + "a", len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|end|>"
    )


def bytes_to_unicode() -> dict[int, str]:
    """How byte-level vocabularies spell bytes: printable Latin-1 as itself, the others from U+0100
    on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def sentencepiece_like(decoder: str) -> PreTrainedTokenizerFast:
    """Like Llama 1 and 2: words with a visible space, bytes for what is not in the vocabulary, a
    leading space stripped. Ids 3..258 are the bytes."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in [*WORDS, " ", "   ", ""]:  # a token without any text is rare but legal
        vocabulary.setdefault(piece.replace(" ", "▁"), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    if decoder == "strip":
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def ids_of(tokenizer: PreTrainedTokenizerFast, *names: str) -> list[int]:
    return [int(tokenizer.get_vocab()[name]) for name in names]


TOKENIZERS = {
    "byte-level": byte_level(),
    "strip": sentencepiece_like("strip"),
    "metaspace": sentencepiece_like("metaspace"),
}
STRIP_A, STRIP_EMPTY = ids_of(TOKENIZERS["strip"], "▁a", "")
FIRST_BYTE = {"byte-level": 0, "strip": 3, "metaspace": 3}


def decode(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int], skip: bool = True) -> str:
    text = tokenizer.decode(
        list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def spelled(kind: str, data: bytes) -> list[int]:
    return [FIRST_BYTE[kind] + b for b in data]


@st.composite
def token_lists(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Any ids, weighted towards words, whole characters as bytes, single bytes, and ids the
    tokenizer does not have."""
    kind = draw(st.sampled_from(sorted(TOKENIZERS)))
    first, size = FIRST_BYTE[kind], len(TOKENIZERS[kind])
    outside = [*range(first), *range(first + 256, size)]
    chunk = st.one_of(
        st.sampled_from(outside).map(lambda t: [t]),
        st.sampled_from(outside).map(lambda t: [t]),
        st.sampled_from([0x41, 0x80, 0x9F, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0xFF]).map(
            lambda b: [first + b]
        ),
        st.sampled_from(["é", "€", "😀", "👩\N{ZERO WIDTH JOINER}🚀"]).map(
            lambda c: spelled(kind, c.encode())
        ),
        st.just([size + 5]),
    )
    return kind, [token for part in draw(st.lists(chunk, max_size=60)) for token in part]


@settings(max_examples=400, deadline=None)
@given(token_lists(), st.booleans(), st.integers(1, 5))
@example(("strip", [1, 3 + 0xE2, 2, 3 + 0x82, 3 + 0xAC]), True, 1)
@example(("strip", [3 + 0xC3, 3 + 0xA9, 2, 3 + 0xC3]), True, 1)
@example(("strip", [STRIP_A, *[STRIP_EMPTY] * 60, STRIP_A, STRIP_A]), True, 1)
@example(("byte-level", [0xF0, 0x9F] * 60 + [0x98, 0x80]), True, 1)
@example(("byte-level", [0xE2, 0x82] + [0x80] * 70 + [0xAC, 0x41]), True, 2)
@example(("metaspace", [3 + 0xE2] * 50 + [300]), True, 1)
def test_pieces_join_to_the_decoded_text(
    case: tuple[str, list[int]], skip: bool, size: int
) -> None:
    """Catches lost, doubled or changed characters: broken UTF-8, runs of bytes, special tokens,
    stripped spaces, and the window moving on (lists are several windows long)."""
    kind, tokens = case
    tokenizer = TOKENIZERS[kind]
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    text = ""
    for i in range(0, len(tokens), size):
        text += stream.push(tokens[i : i + size])
        so_far = decode(tokenizer, tokens[: i + size], skip)
        assert text + stream.held() == so_far, (
            "what is held back is not the rest of the text so far"
        )
    assert text + stream.finish() == decode(tokenizer, tokens, skip)
    assert stream.finish() == ""


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["é", "€uro", "😀😀", "👩\N{ZERO WIDTH JOINER}🚀a"])
def test_pieces_never_split_a_character(kind: str, text: str) -> None:
    """Catches replacement characters in a stream of sound text whose characters come as one token
    per byte."""
    stream = TextStream(TOKENIZERS[kind])
    pieces = [stream.push([token]) for token in spelled(kind, text.encode())] + [stream.finish()]
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    """Catches a stream that holds everything back until the end (which would join to the right
    text)."""
    tokenizer = TOKENIZERS["byte-level"]
    stream = TextStream(tokenizer)
    the, half, other = ids_of(tokenizer, "Ġthe", "ðŁ", "ĺĢa")
    assert stream.push([the]) == " the"
    assert stream.push([half]) == ""
    assert stream.push([the]) == "\N{REPLACEMENT CHARACTER} the", (
        "an incomplete character that cannot become whole any more"
    )
    assert stream.push([half]) == ""
    assert stream.push([other]) == "😀a"
    assert stream.push([the, half]) == " the", "only the incomplete character is held back"
    assert stream.push([other]) == "😀a"
    llama = TOKENIZERS["strip"]
    (a,) = ids_of(llama, "▁a")
    stream = TextStream(llama)
    assert stream.push([1, a]) == "a"
    assert stream.push([a]) == " a"
    assert stream.push(spelled("strip", "é".encode())) == "", (
        "a further byte could still break this one"
    )
    assert stream.push([a]) == "é a"


def test_what_is_a_byte_is_not_known_from_another_tokenizer() -> None:
    """The same ids are bytes here and settle a text there: a broken character would be shown, or a
    whole one held back."""
    tokens = spelled("strip", "€".encode())
    pieces = {kind: [*map(TextStream(TOKENIZERS[kind]).push, ([t] for t in tokens))]
              for kind in ("byte-level", "strip")}  # fmt: skip
    assert pieces == {"byte-level": ["", "", bytes(tokens).decode()], "strip": ["", "", ""]}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("loop", ["words", "bytes"])
def test_a_push_costs_the_same_however_long_the_text_is(
    kind: str, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches decoding everything again with every token: counts the tokens given to the tokenizer,
    also for a model that is caught in a loop of broken bytes."""
    tokenizer = TOKENIZERS[kind]
    decoded: list[int] = []
    original = tokenizer.decode

    def counting(tokens: list[int], **options: Any) -> Any:
        decoded.append(len(tokens))
        return original(tokens, **options)

    monkeypatch.setattr(tokenizer, "decode", counting)
    (word,) = ids_of(tokenizer, "the")
    tokens = [word] * 600 if loop == "words" else [FIRST_BYTE[kind] + 0xF0] * 600 + [word]
    stream = TextStream(tokenizer)
    for token in tokens:
        stream.push([token])
    stream.finish()
    assert sum(decoded) < 50 * len(tokens)


def test_clean_up_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ' .' becoming '.', which would take back a space that a stream has already shown. The
    tokenizer asks for it."""
    tokenizer = TOKENIZERS["byte-level"]
    monkeypatch.setattr(tokenizer, "clean_up_tokenization_spaces", True)
    monkeypatch.setattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True
    )
    a, dot = ids_of(tokenizer, "a", "Ġ.")
    stream = TextStream(tokenizer)
    assert stream.push([a]) + stream.push([dot]) == "a ."
    assert tokenizer.decode([a, dot]) == "a.", (
        "the tokenizer of this test does not clean up, so the test could not fail"
    )


def test_special_tokens_can_be_shown() -> None:
    """Catches skip_special_tokens being ignored, and an added token that is not special being left
    out."""
    tokenizer = TOKENIZERS["byte-level"]
    end, tool, a = ids_of(tokenizer, "<|end|>", "<tool>", "a")
    assert TextStream(tokenizer, skip_special_tokens=False).push([a, end, tool]) == "a<|end|><tool>"
    assert TextStream(tokenizer).push([a, end, tool]) == "a<tool>"


# ------------------------------------------------------------------------------------- stop strings


def first_stop(observer: StopStrings, tokens: Sequence[int]) -> int | None:
    return next((i for i, token in enumerate(tokens) if observer.push(token)), None)


@settings(max_examples=300, deadline=None)
@given(
    token_lists(),
    st.lists(
        st.sampled_from(["stop", "the a", "é", "€", ".", "\n", "a a", "op", "ab", "😀a"]),
        min_size=1,
        max_size=3,
    ),
)
def test_stops_at_the_first_token_that_completes_a_stop_string(
    case: tuple[str, list[int]], stops: list[str]
) -> None:
    """Catches stop strings missed across token borders or inside a token, found late, or found
    where there are none."""
    kind, tokens = case
    tokenizer = TOKENIZERS[kind]
    texts = [decode(tokenizer, tokens[: i + 1]) for i in range(len(tokens))]
    expected = next(
        (i for i, text in enumerate(texts) if any(stop in text for stop in stops)), None
    )
    assert first_stop(StopStrings(tokenizer, stops), tokens) == expected


def test_stop_strings_across_and_inside_tokens() -> None:
    """Catches the two classical misses, spelled out: ' st' + 'op' + 'per' contains 'stop',
    completed by 'op'."""
    tokenizer = TOKENIZERS["byte-level"]
    st_, op, per, stop, a = ids_of(tokenizer, "Ġst", "op", "per", "stop", "a")
    assert first_stop(StopStrings(tokenizer, ["stop"]), [a, st_, op, per]) == 2
    assert first_stop(StopStrings(tokenizer, ["to"]), [a, stop, per]) == 1
    assert first_stop(StopStrings(tokenizer, ["ops"]), [a, stop, per]) is None
    assert first_stop(StopStrings(tokenizer, "stop"), [a, st_, op]) == 2, (
        "one string is not a list of characters"
    )
    long = StopStrings(tokenizer, ["a" * 200 + "b"])
    (b,) = ids_of(tokenizer, "b")
    assert first_stop(long, [a] * 199 + [b] + [a] * 200 + [b]) == 400


def test_a_stop_that_is_a_special_token() -> None:
    """Catches a stop such as '<|user|>' that never matches because the text leaves special tokens
    out."""
    tokenizer = TOKENIZERS["byte-level"]
    user, a = ids_of(tokenizer, "<|user|>", "a")
    for skip in (True, False):
        observer = StopStrings(tokenizer, ["<|user|>"], skip_special_tokens=skip)
        assert first_stop(observer, [a, user, a]) == 1
        assert observer.cut(decode(tokenizer, [a, user], skip)) == "a"


@pytest.mark.parametrize(
    ("stops", "text", "before"),
    [
        (["b"], "abcb", "a"),
        (["x", "c"], "abc", "ab"),
        (["bc", "c"], "abcd", "a"),
        (["abc", "b"], "abc", "a"),
        (["x"], "abc", "abc"),
        (["abc"], "abc", ""),
        ([], "abc", "abc"),
    ],
)
def test_cut(stops: list[str], text: str, before: str) -> None:
    """Catches a cut at the last stop, at the first in the list, behind the stop, or one that
    depends on the tokens' borders ('abc' and 'b': b is complete first, whether or not the text came
    in one token)."""
    assert StopStrings(TOKENIZERS["byte-level"], stops).cut(text) == before


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab.", max_size=30),
    st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_a_stream_never_shows_a_part_of_a_stop_string(text: str, stops: list[str]) -> None:
    """Catches characters shown that a later stop takes back, and more held back than needed: each
    held-back end must be the beginning of a stop, and none longer may be."""
    observer = StopStrings(TOKENIZERS["byte-level"], stops)
    whole = observer.cut(text)
    for end in range(len(text) + 1):
        so_far = text[:end]
        if observer.cut(so_far) != so_far:
            assert whole == observer.cut(so_far), "the cut moved when more text came"
            break
        held = observer.held_back(so_far)
        assert whole.startswith(so_far[: end - held])
        beginnings = [
            n
            for n in range(end + 1)
            if any(len(s) > n and s.startswith(so_far[end - n :]) for s in stops)
        ]
        assert held == max(beginnings)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [3]])
def test_bad_stop_strings(stops: list[Any]) -> None:
    """Catches the empty stop string, which every text contains."""
    with pytest.raises(OptionError, match=r"stop string .* leave it out"):
        StopStrings(TOKENIZERS["byte-level"], stops)


# ----------------------------------------------------------------------------------------- criteria


class Recorder(StoppingCriteria):
    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers = list(answers)
        self.seen: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        assert scores is None
        self.seen.append(input_ids.tolist())
        return self.answers.pop(0)


def test_criteria_see_the_whole_row_after_every_token() -> None:
    """Catches the prompt left out, a token seen late, or rows that are lost when the buffer
    grows."""
    recorder = Recorder([False] * 300)
    observer = CriteriaCheck([recorder], [7, 8])
    assert not any(observer.push(token) for token in range(300))
    assert recorder.seen == [[[7, 8, *range(n + 1)]] for n in range(300)]
    assert all(len(b[0]) == len(a[0]) + 1 for a, b in pairwise(recorder.seen))


@pytest.mark.parametrize("answer", [True, torch.tensor([True]), torch.tensor([[True]])])
def test_any_criterion_stops(answer: Any) -> None:
    """Catches an answer in one of the shapes that HF's criteria use being misread, and a second
    criterion never asked."""
    observer = CriteriaCheck(
        [Recorder([False, False]), Recorder([torch.tensor([False]), answer])], [1]
    )
    assert [observer.push(2), observer.push(3)] == [False, True]


def test_transformers_own_criteria() -> None:
    """Catches arguments that HF's criteria cannot work with."""
    tokenizer = TOKENIZERS["byte-level"]
    st_, op, a, end = ids_of(tokenizer, "Ġst", "op", "a", "<|end|>")

    def stops_at(*criteria: StoppingCriteria) -> int | None:
        observer = CriteriaCheck(StoppingCriteriaList(criteria), [a, a])
        return next(
            (i for i, token in enumerate([a, st_, op, a, end]) if observer.push(token)), None
        )

    assert stops_at(StopStringCriteria(tokenizer, "stop")) == 2
    assert stops_at(EosTokenCriteria(end)) == 4
    assert stops_at(MaxLengthCriteria(6)) == 3
    assert stops_at(MaxTimeCriteria(1e9)) is None
    assert stops_at(MaxTimeCriteria(1.0, initial_timestamp=0.0)) == 0
    assert (
        stops_at(EosTokenCriteria(end), MaxLengthCriteria(6), StopStringCriteria(tokenizer, "stop"))
        == 2
    )


def test_a_criterion_for_other_rows() -> None:
    """Catches an answer for several rows being read as one."""
    with pytest.raises(OptionError, match="stopping criterion Recorder answered with shape"):
        CriteriaCheck([Recorder([torch.tensor([True, False])])], [1]).push(2)
