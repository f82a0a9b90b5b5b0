"""`selfspec drafters`, and how drafters are asked for and shown on the command line."""

from __future__ import annotations

import json
from dataclasses import make_dataclass
from typing import Any

import pytest

from selfspec import LLM, Piece
from selfspec.cli import drafters, show
from selfspec.control.registry import controller_names
from selfspec.draft.registry import drafter_names, make_drafter


def test_everything_that_can_be_asked_for_is_listed(run: Any) -> None:
    """Without the list nobody can know the names; catches one that is left out."""
    lines = run("drafters").stdout.splitlines()
    listed = {line.split()[0] for line in lines if line.strip()}
    assert {"auto", *drafter_names(), *controller_names()} <= listed
    assert "`script[i]`" in run("drafters").stdout, "brackets were taken for colours"


@pytest.mark.parametrize("name", ["auto", *drafter_names(), *controller_names()])
def test_every_option_is_explained(run: Any, name: str) -> None:
    """Catches a field without the docstring line that is its help, and a class that says nothing of
    itself."""
    drafting, controlling = drafters.known()
    kind = {**drafting, **controlling}[name]
    assert drafters.first_line(kind) and not drafters.first_line(kind).startswith(
        f"{kind.__name__}("
    )
    found = drafters.options_of(kind)
    assert [each.name for each in found if not each.help] == []
    shown = run("drafters", name).stdout
    assert all(each.name in shown for each in found)


def test_an_unknown_name_is_answered_with_the_nearest(run: Any) -> None:
    """A wrong name must not be a traceback."""
    result = run("drafters", "erly-exit")
    assert result.exit_code == 1 and "did you mean 'early-exit'" in result.stderr


def test_a_class_without_source_has_no_help() -> None:
    """A drafter that was typed in at a prompt has no file to read the docstrings from."""
    kind = make_dataclass("Typed", [("size", int, 1)], namespace={"__module__": "nowhere"})
    assert [each.help for each in drafters.options_of(kind)] == [""]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--draft", "early-exit", "--draft-option", "layer=ten"],
            "layer='ten' is not a whole number",
        ),
        (
            ["--draft", "early-exit", "--draft-option", "vocabulary=true"],
            "vocabulary=True is not a whole number",
        ),
        (
            ["--draft", "early-exit", "--draft-option", "reuse=no"],
            "reuse='no' is not true or false",
        ),
        (
            ["--draft", "layer-skip", "--draft-option", "attention=3"],
            "attention=3 is not a list of whole numbers",
        ),
        (
            ["--draft", "cosine", "--draft-option", "threshold=high"],
            "threshold='high' is not a finite number",
        ),
        (
            ["--draft", "ngram", "--control-option", "tokens=2.5"],
            "tokens=2.5 is not a whole number",
        ),
        (["--draft", "none", "--control", "fixed"], "control='fixed' would be ignored"),
        (["--control-option", "tokens=3"], "control_options={'tokens': 3} would be ignored"),
        (["--show-drafts", "--json"], "--show-drafts"),
        (["--show-drafts", "--no-stream"], "--show-drafts"),
    ],
)
def test_wrong_values_are_messages_before_a_model_is_loaded(
    run: Any, opened: list[Any], words: list[str], message: str
) -> None:
    """Each of these was a traceback out of the middle of a generation, or did nothing without
    saying so."""
    result = run("generate", "demo", "hello", *words)
    assert result.exit_code == 1 and message in " ".join(result.stderr.split())
    assert not opened, "a model was loaded to find that out"


def test_right_values_are_understood(run: Any) -> None:
    """A check of kinds that refuses what is right: lists, numbers, and none where a default is
    None."""
    options = ["attention=[1, 2]", "mlp=[2]", "profile=null"]
    words = [word for option in options for word in ("--draft-option", option)]
    result = run(
        "generate",
        "demo",
        "hello",
        "-n",
        "4",
        "--draft",
        "layer-skip",
        *words,
        "--control-option",
        "tokens=2",
    )
    assert result.exit_code == 0, result.stderr
    assert make_drafter("layer-skip", {"attention": [1, 2]}) == make_drafter(
        "layer-skip", {"attention": (1, 2)}
    )


def test_colours_say_what_became_of_each_token(llm: LLM) -> None:
    """The model's own tokens were green too: the style of the first part was that of the whole
    line."""
    piece = Piece("", tokens=list(b"abc"), accepted=2, rejected=list(b"xy"))
    text = show.coloured(piece, llm.tokenizer)
    assert llm.tokenizer is not None
    decode = llm.tokenizer.decode
    parts = [
        (decode(list(b"ab")), "green"),
        (decode(list(b"xy")), "red strike"),
        (decode(list(b"c")), ""),
    ]
    styles = dict.fromkeys(range(len(text)), "")
    for span in text.spans:
        styles.update(dict.fromkeys(range(span.start, span.end), str(span.style)))
    expected = [style for part, style in parts for _ in part]
    assert text.plain == "".join(part for part, _ in parts)
    assert str(text.style) == "" and list(styles.values()) == expected


def test_a_seed_is_reported_where_there_was_one(run: Any) -> None:
    """Greedy decoding reported a random seed, which looks as if it had been used."""
    greedy = json.loads(run("generate", "demo", "hello", "-n", "3", "--json").stdout)
    sampled = json.loads(
        run("generate", "demo", "hello", "-n", "3", "--json", "-t", "0.8", "--seed", "5").stdout
    )
    assert greedy["seed"] is None and sampled["seed"] == 5
