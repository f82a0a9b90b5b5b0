"""What a row's grammar knows: a function of the text, whatever was asked before and whatever was
interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from selfspec import LLM, Grammar, SamplingParams
from selfspec.control.fixed import FixedLength
from selfspec.core import grammar as grammar_module
from selfspec.core.grammar import Allowed, Grammars
from selfspec.core.sampling import Sampler
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.engine.generation import Generation
from selfspec.engine.row import Request
from selfspec.testing import VOCABULARY, near_identity_model, tiny_tokenizer
from tests.test_grammar import END, PATTERN, SCHEMA


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_pretrained(near_identity_model(0.7), tokenizer=tiny_tokenizer())


def long_words() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens cross the borders of a grammar's parts, with more ids than words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ['{"', '":"', '","', '"}', "fir", "st", "ab", "abab", "cd!"]
    vocabulary = {token: index for index, token in enumerate(["<end>", *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


READERS: dict[str, Callable[[], Any]] = {"bytes": tiny_tokenizer, "words": long_words}
MORE = 5  # rows of a head beyond the tokenizer


@pytest.mark.parametrize("reader", READERS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=15)
def test_masks_are_a_function_of_the_text(reader: str, seed: int) -> None:
    """Questions in any order (drafts, branches, texts that the grammar does not have, the same
    again) against a grammar that was asked nothing else. What `follows` says is what masks say."""
    dice, tokenizer = random.Random(seed), READERS[reader]()
    end, size = tokenizer.eos_token_id, len(tokenizer) + MORE
    grammars = Grammars(tokenizer, size)
    asked = Grammar.json_schema(SCHEMA) if dice.random() < 0.5 else Grammar.regex(PATTERN)
    rules = grammars.allowed(asked, frozenset([end]))
    assert rules is not None
    texts: list[list[int]] = [[]]
    for _ in range(40):
        text = dice.choice(texts[-4:])[: dice.choice([None, None, 2])]
        mask = rules.after(text)
        fresh = grammars.allowed(asked, frozenset([end]))
        assert fresh is not None and mask.equal(fresh.after(text))
        assert not mask[-MORE:].any(), "no word of the tokenizer's"
        may = mask.nonzero().flatten().tolist()
        assert may, "a text always goes on or ends"
        token = dice.choice(may) if dice.random() < 0.8 else dice.randrange(size - MORE)
        told = rules.follows(text, token)
        assert told == bool(mask[token]) or (may == [end] and token == end)
        texts.append([*text, token])


def test_a_forced_text_is_written_as_the_tokenizer_would() -> None:
    """A guess that fits the text but not its tokens: the mask would refuse it, so drafting it is
    wasted. Every object begins with `{"`, which is a token that this tokenizer never writes."""
    tokenizer = long_words()
    end, single, both = tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(["{", '{"'])
    rules = Grammars(tokenizer, len(tokenizer)).allowed(
        Grammar.json_schema(SCHEMA), frozenset([end])
    )
    assert rules is not None
    assert rules.after([]).nonzero().flatten().tolist() == [single]
    assert rules.follows([], single) and not rules.follows([], both)


class Broken(BaseException):
    """Like Ctrl-C."""


def test_an_interruption_leaves_nothing_behind() -> None:
    """The matcher has taken a token and nobody has noted it: all that follows is one too far."""
    tokenizer = tiny_tokenizer()
    rules = Grammars(tokenizer, VOCABULARY).allowed(Grammar.regex("abcabcabc"), frozenset([2]))
    fresh = Grammars(tokenizer, VOCABULARY).allowed(Grammar.regex("abcabcabc"), frozenset([2]))
    assert rules is not None and fresh is not None
    text = tokenizer("abcab")["input_ids"]
    rules.after(text[:2])
    state = rules._state
    assert state is not None
    matcher = state.matcher

    class Interrupting:
        def __getattr__(self, name: str) -> Any:
            found = getattr(matcher, name)
            if name != "try_consume_tokens":
                return found

            def consume(tokens: Sequence[int]) -> int:
                found(tokens)
                raise Broken

            return consume

    state.matcher = Interrupting()
    with pytest.raises(Broken):
        rules.after(text)
    assert rules.after(text[:4]).equal(fresh.after(text[:4]))
    assert rules.after(text).equal(fresh.after(text))


def test_a_round_that_is_interrupted_counts_whole_or_not_at_all(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a mask is made, in a draft or in a verification: the next round begins with a
    grammar that has seen too much, or too little."""
    prompt = [5, 70, 81]

    def run() -> tuple[list[int], int]:
        rules = llm.grammars.allowed(Grammar.regex(PATTERN), frozenset([END]))
        sampler = Sampler(SamplingParams(), prompt_length=len(prompt), grammar=rules)
        how: dict[str, Any] = {"drafter": EarlyExit(layer=2), "controller": FixedLength(tokens=3)}
        generation = Generation(llm.model)
        row = generation.admit(Request(prompt, sampler, 40, frozenset([END]), **how))
        interrupted = 0
        while generation.rows:
            try:
                generation.step()
            except Broken:
                interrupted += 1
        return row.tokens, interrupted

    whole, _ = run()
    after, seen = Allowed.after, [0, 0]  # calls, and the one that raises

    def raising(rules: Allowed, written: Sequence[int]) -> Any:
        seen[0] += 1
        found = after(rules, written)
        if seen[0] == seen[1]:
            raise Broken
        return found

    monkeypatch.setattr(Allowed, "after", raising)
    places = 0
    for at in range(1, 40, 4):
        seen[:] = [0, at]
        tokens, interrupted = run()
        assert tokens == whole, at
        places += interrupted
    assert places > 3


def test_a_chain_is_asked_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting and verifying ask about the same places: a mask is made once for each."""
    made: list[int] = []
    bits = grammar_module._bits
    monkeypatch.setattr(grammar_module, "_bits", lambda matcher: (made.append(1), bits(matcher))[1])
    how: dict[str, Any] = {"draft": EarlyExit(layer=7), "control": "fixed"}
    found = llm.generate("x", grammar=Grammar.regex("[a-z]{30}"), **how)
    wrong = found.stats.drafted - found.stats.accepted
    assert len(made) <= len(found.tokens) + wrong + found.stats.rounds + 2


def test_rows_share_what_was_read_and_nothing_else(llm: LLM) -> None:
    """A grammar is compiled once for a model, and rows that follow it do not meet."""
    asked = Grammar.regex("[ab]{4}")
    first = llm.grammars.allowed(asked, frozenset([END]))
    second = llm.grammars.allowed(asked, frozenset([END]))
    assert isinstance(first, Allowed) and isinstance(second, Allowed)
    assert first._start is second._start
    text = tiny_tokenizer()("abab")["input_ids"]
    assert first.after(text).nonzero().flatten().tolist() == [END]
    assert second.after([]).sum() == 2
