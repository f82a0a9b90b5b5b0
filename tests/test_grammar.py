"""Grammars: what is written fits, drafts change nothing about it, and nothing has to be taken back.

Tiny random models write nonsense, so whatever fits a grammar here fits because of the grammar.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from selfspec import LLM, Grammar, OptionError, SamplingParams, ScriptedDrafter, Unavailable
from selfspec.core.grammar import Grammars
from selfspec.draft.base import Drafter
from selfspec.draft.from_layers.early_exit import EarlyExit
from selfspec.draft.from_models.draft_head import DraftHead
from selfspec.testing import VOCABULARY, near_identity_model, tiny_head, tiny_llm, tiny_tokenizer

END = 2
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["first", "second", "third"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = "(ab|cd){2,4}!"
CHOICE = Grammar.lark('start: "yes" | "no" ", " /[a-z]{1,3}/')
GRAMMARS: dict[str, Any] = {
    "schema": SCHEMA,
    "regex": Grammar.regex(PATTERN),
    "lark": CHOICE,
    "free": None,
}
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = near_identity_model(0.7)
    return LLM.from_pretrained(model, tokenizer=tiny_tokenizer())


def fits(name: str, text: str) -> bool:
    """Whether a whole text is what the grammar asks for, by somebody else's reading."""
    if name == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    pattern = {"regex": PATTERN, "lark": "yes|no, [a-z]{1,3}", "free": "(?s:.*)"}[name]
    return re.fullmatch(pattern, text) is not None


def drafters(llm: LLM) -> dict[str, Any]:
    """Chains and trees, of layers, heads, copies and text."""
    head = tiny_head(llm.model)
    return {
        "ngram": {"draft": "ngram", "control": "fixed"},
        "recycle": {"draft": "recycle", "control": "fixed", "control_options": {"tokens": 8}},
        "hybrid": {"draft": "hybrid", "control": "fixed", "control_options": {"tokens": 8}},
        "jacobi": {"draft": "jacobi", "control": "fixed"},
        "early-exit": {"draft": EarlyExit(layer=2), "control": "fixed"},
        "layer-skip": {"draft": "layer-skip", "control": "fixed"},
        "quantised": {"draft": "quantised", "control": "fixed"},
        "draft-head": {"draft": DraftHead(head, width=3), "control": "fixed"},
        "auto": {"draft": "auto"},
    }


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_nothing_of_what_a_grammar_lets_through(
    llm: LLM, sampling: SamplingParams | None
) -> None:
    """A mask at the wrong place of a draft, of a branch or of a neighbour: another text, or one
    that does not fit. All grammars run together, and each as if it were alone."""
    options: dict[str, Any] = {"max_new_tokens": 90, "sampling": sampling}
    prompts = ["a list: [1, 2, 1, 2", "ab ab cd ab", "yes or no, yes or", "once upon a time"]
    if sampling:
        options["sampling"] = [SAMPLED] * len(prompts)
    asked = list(GRAMMARS.values())
    plain = llm.generate(prompts, grammar=asked, draft=None, **options)
    for name, result in zip(GRAMMARS, plain, strict=True):
        assert fits(name, result.text), result.text
        assert (result.finish_reason == "eos" and result.tokens[-1] == END) or name == "free"
    alone = [
        llm.generate(prompt, grammar=each, draft=None, **{**options, "sampling": sampling})
        for prompt, each in zip(prompts, asked, strict=True)
    ]
    assert [each.tokens for each in alone] == [each.tokens for each in plain]
    for name, how in drafters(llm).items():
        found = llm.generate(prompts, grammar=asked, **how, **options)
        assert [each.tokens for each in found] == [each.tokens for each in plain], name
        kept = sum(each.stats.accepted for each in found[:3])
        assert kept or name in ("auto", "layer-skip", "draft-head"), f"{name} was kept nowhere"


def test_drawn_drafts_fit_too(llm: LLM) -> None:
    """Rejection under a grammar: what is drawn instead of a rejected draft has to fit as well."""
    drawn = {"draft": EarlyExit(layer=2, sample=True), "control": "fixed"}
    for name, asked in GRAMMARS.items():
        for seed in range(4):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            found = llm.generate("x", grammar=asked, sampling=sampling, max_new_tokens=90, **drawn)
            assert fits(name, found.text), found.text


def test_guesses_that_a_grammar_forbids_are_not_verified(llm: LLM) -> None:
    """A guess that cannot be kept costs its share of a pass. The rest of the draft stays: both
    branches that fit, and nothing behind the grammar's end."""
    asked = Grammar.regex("abcd")
    right = tiny_tokenizer()("abcd")["input_ids"]
    wrong = [right[0], right[1], right[0], right[1], END, END]
    for script, drafted in (([*right, END, 5, 5], 4), (wrong, 2)):
        scripted = ScriptedDrafter([script])
        found = llm.generate(
            "x", grammar=asked, draft=scripted, control="fixed", control_options={"tokens": 6}
        )
        assert found.text == "abcd" and found.tokens[-1] == END
        assert found.stats.drafted == drafted, script
        assert found.stats.accepted == drafted


def test_streams_and_chats_take_a_grammar(llm: LLM) -> None:
    """The other doors: an option that only `generate` knows."""
    turn = [{"role": "user", "content": "Hi"}]
    with llm.stream("x", grammar=SCHEMA, max_new_tokens=90) as pieces:
        text = "".join(piece.text for piece in pieces)
    assert fits("schema", text)
    assert fits("regex", llm.chat(turn, grammar=Grammar.regex(PATTERN)).text)
    assert fits("lark", "".join(p.text for p in llm.stream_chat(turn, grammar=CHOICE)))


def test_the_text_ends_where_its_grammar_does_and_not_before(llm: LLM) -> None:
    """The end is banned inside, forced behind, and any of the row's own ends will do."""
    assert llm.generate("x", grammar=Grammar.regex("a{7}")).text == "aaaaaaa"
    stubborn = SamplingParams(logit_bias={END: 1000.0})
    eager = SamplingParams(logit_bias={END: -1000.0})
    for sampling in (stubborn, eager):
        found = llm.generate("x", grammar=Grammar.regex("ab*c"), sampling=sampling)
        assert re.fullmatch("ab*c", found.text)
    other = llm.generate("x", grammar=Grammar.regex("a{3}"), eos=[0, 1])
    assert other.text == "aaa" and other.tokens[-1] in (0, 1)
    short = llm.generate("x", grammar=Grammar.regex("a{9}"), max_new_tokens=4)
    assert short.finish_reason == "length"


BAD: dict[str, tuple[Any, str]] = {
    "type": ({"type": "objectt"}, "JSON schema .*objectt"),
    "keyword": ({"not": {}}, "JSON schema .*Unimplemented keys"),
    "unsatisfiable": (
        {"type": "integer", "minimum": 3, "maximum": 1}, "JSON schema .*minimum .3. is greater"
    ),
    "no json": ({"enum": [object()]}, "JSON schema .* is no JSON"),
    "regex": (Grammar.regex("(a"), "regular expression '.a' cannot be used.*unclosed group"),
    "look-around": (Grammar.regex("(?=a)b"), "regular expression .*look-around"),
    "nothing fits": (Grammar.regex(r"[^\s\S]"), "regular expression .*"),
    "lark": (Grammar.lark("start: foo"), "Lark grammar .*unknown name"),
    "empty": (Grammar.lark(""), "Lark grammar .*Empty grammar"),
    "text": ("[a-z]", "is no grammar; use a dict"),
    "too few": ([None, None], "2 grammars for 1 prompts"),
    "one of a list": ([3], "grammar=3 is no grammar"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_grammar_that_cannot_be_used_says_why(llm: LLM, name: str) -> None:
    """A mistake in a schema that shows up as a traceback, in mid text, or never."""
    asked, words = BAD[name]
    with pytest.raises(OptionError, match=words):
        llm.generate(["x"], grammar=asked)


def test_only_text_is_a_pattern() -> None:
    """A compiled pattern, or bytes, that would become something else."""
    with pytest.raises(OptionError, match=r"regular expression .* is no text"):
        Grammar.regex(re.compile("a"))  # type: ignore[arg-type]


def test_a_text_that_could_not_end_is_refused(llm: LLM) -> None:
    """eos=[]: a row whose grammar has ended would have nothing left to choose from."""
    with pytest.raises(OptionError, match="needs a token that ends the text"):
        llm.generate("x", grammar=SCHEMA, eos=[])


def test_a_processor_that_leaves_nothing_is_named(llm: LLM) -> None:
    """Bias and grammar that forbid everything together: the error names both."""
    token = tiny_tokenizer()("a")["input_ids"][0]

    def ban(ids: Any, scores: Any) -> Any:
        scores[:, token] = -float("inf")
        return scores

    with pytest.raises(OptionError, match=r"no token is left .* after function, the grammar"):
        llm.generate("x", grammar=Grammar.regex("a+"), logits_processors=[ban])


def test_without_a_tokenizer_or_the_library_the_error_says_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grammars need to know what tokens say."""
    bare = tiny_llm()
    bare.tokenizer = None
    with pytest.raises(Unavailable, match="without a tokenizer"):
        bare.generate([5], grammar=SCHEMA, eos=[END])
    odd = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    for tokenizer in (PreTrainedTokenizerFast(tokenizer_object=odd), object()):
        reader = Grammars(tokenizer, 3)
        with pytest.raises(Unavailable, match=type(tokenizer).__name__):
            reader.allowed(Grammar.json(), frozenset([2]))

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unavailable, match=r"pip install 'selfspec.grammar.'"):
        Grammars(tiny_tokenizer(), VOCABULARY).allowed(Grammar.json(), frozenset([2]))


def test_an_object_of_drafter_keeps_its_own_rules(llm: LLM) -> None:
    """Drafters of layers choose with the row's own sampler, so nothing of theirs is cut."""
    drafter: Drafter = EarlyExit(layer=2)
    found = llm.generate("x", grammar=SCHEMA, draft=drafter, control="fixed", max_new_tokens=60)
    assert found.stats.drafted > found.stats.accepted > 0


@pytest.mark.demo
def test_the_demo_answers_by_a_schema(demo_path: Path) -> None:
    """The real tokenizer and a real answer, drafted and plain. Its tokenizer comes without
    transformers (`Words`) once the model was loaded before."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "country": {"type": "string", "maxLength": 30},
            "inhabitants": {"type": "integer", "minimum": 0},
        },
        "required": ["city", "country", "inhabitants"],
        "additionalProperties": False,
    }
    demo_llm = LLM.from_pretrained(demo_path)
    turn = [{"role": "user", "content": "Name a city as JSON: city, country, inhabitants."}]
    drafted = demo_llm.chat(turn, grammar=schema, max_new_tokens=80)
    plain = demo_llm.chat(turn, grammar=schema, max_new_tokens=80, draft=None)
    assert drafted.tokens == plain.tokens
    assert drafted.finish_reason == "eos"
    jsonschema.validate(json.loads(drafted.text), schema)
