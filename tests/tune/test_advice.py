"""A whole tuning of a tiny model: it ends in time, keeps a profile, and says what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.shrunken import tiny
from selfspec.cli import common
from selfspec.cli.app import app
from selfspec.errors import OptionError
from selfspec.llm import LLM
from selfspec.profile import Way, read_profile
from selfspec.testing import near_identity_model, tiny_tokenizer
from selfspec.tune import verdict
from selfspec.tune.run import TuneOptions, Tuning


def _llm() -> LLM:
    return LLM.from_pretrained(near_identity_model(0.8), tokenizer=tiny_tokenizer(), profile=None)


def test_a_tuning_times_its_best_candidates_and_keeps_those_that_pay() -> None:
    """Candidates that are predicted and never timed, ways slower than plain in a profile."""
    stages: list[str] = []
    options = TuneOptions(minutes=0.1, max_new_tokens=24)
    tuning = Tuning(
        _llm(), options, ["hello", "you", "there"], lambda stage, _: stages.append(stage)
    )
    profile = tuning.run()
    found = tuning.found
    assert {"hybrid", "auto"} <= {way.draft for way in found.ways}
    assert found.tried, "no skip set was looked at"
    assert {prediction.tokens for _, prediction in found.predicted} <= set(range(1, 9))
    assert all(way.measured and way.low is not None for way in found.ways)
    assert [way.measured for way in profile.ways] == sorted(
        (way.measured for way in found.ways if way.measured > 1), reverse=True
    )
    assert found.verdict and found.answer in ("helps", "does not", "undecided")
    assert stages[0] == "the model writes"


def test_ctrl_c_ends_the_search_and_what_was_found_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted search that loses everything."""
    from selfspec.tune import run

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(run, "grown", interrupted)
    tuning = Tuning(_llm(), TuneOptions(minutes=0.1, max_new_tokens=24), ["hello", "you"])
    assert tuning.run().verdict


@pytest.mark.filterwarnings("ignore:.*kernel 'floor'")
def test_a_model_that_runs_whole_is_advised_too() -> None:
    """Costs of layers that it does not have."""
    llm = LLM.from_pretrained(tiny("bloom"), tokenizer=tiny_tokenizer(), profile=None)
    tuning = Tuning(llm, TuneOptions(minutes=0.1, max_new_tokens=24), ["hello", "you"])
    assert tuning.run().verdict
    assert {way.draft for way in tuning.found.ways} == {"hybrid", "auto"}


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([(1.4, 1.2, 1.6)], "helps"),
        ([(1.4, 1.0, 1.6)], "undecided"),
        ([(0.9, 0.8, 1.0), (1.02, 1.0, 1.04)], "does not"),
        ([], "does not"),
    ],
    ids=["helps", "undecided", "slower", "nothing"],
)
def test_the_verdict_follows_the_interval(
    gains: list[tuple[float, float, float]], expected: str
) -> None:
    """A gain that noise explains and that is praised."""
    ways = [Way("ngram", measured=value, low=low, high=high) for value, low, high in gains]
    assert verdict.answer(ways) == expected
    said = verdict.words(ways, None, True, False)
    beginnings = {"helps": "Use ngram: 1.40", "undecided": "Undecided", "does not": "Do not use"}
    assert said.startswith(beginnings[expected] if gains else "Nothing could be timed")


def test_advise_says_it_as_json_and_tune_writes_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags that do not arrive, a profile that cannot be read back."""
    monkeypatch.setattr(common, "open_model", lambda name, how: _llm())
    monkeypatch.setattr("selfspec.cli.tune.ADVICE_MINUTES", 0.1)
    prompts = tmp_path / "asked.txt"
    prompts.write_text("hello\n\nyou\n")
    asked = ["--questions", str(prompts)]
    done = CliRunner().invoke(app, ["advise", "x", "--json", *asked])
    said = json.loads(done.stdout)
    assert said["answer"] in ("helps", "does not", "undecided") and said["ways"]
    out = tmp_path / "p.json"
    flags = ["--minutes", "0.1", "-n", "24", "--search", "none", "--out", str(out)]
    done = CliRunner().invoke(app, ["tune", "x", *flags, *asked])
    assert done.exit_code == 0, done.output
    assert read_profile(out).verdict in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "wrong",
    [{"minutes": 0.0}, {"max_new_tokens": 3}, {"search": "luck"}, {"study": "a.log"}],
    ids=["minutes", "tokens", "search", "study"],
)
def test_options_that_cannot_work_say_so(wrong: dict[str, Any]) -> None:
    """An error after minutes of work."""
    with pytest.raises(
        OptionError, match=next(iter(wrong)).replace("search", "there is no search")
    ):
        TuneOptions(**wrong)


def test_prompts_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    """A traceback for a folder, or silence for an empty file."""
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    for path in (tmp_path, empty):
        done = CliRunner().invoke(app, ["advise", "x", "--questions", str(path)])
        assert done.exit_code == 1
        assert "--questions" in done.output
