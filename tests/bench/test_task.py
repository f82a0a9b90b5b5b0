"""The task experiment: what the generator makes, the stages on a tiny model, and the table from
numbers known by heart."""

from __future__ import annotations

import copy
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from suite_world import PROVENANCE

from benchmarks.task import data as task_data
from benchmarks.task import run as bench_task
from benchmarks.task.__main__ import chosen_stages
from benchmarks.task.data import (
    PARTS,
    Example,
    Grammar,
    entities,
    examples,
    generator_hash,
    templates,
    write_examples,
)
from benchmarks.task.report import markdown, summary
from benchmarks.task.result import TaskOptions, TaskRun
from benchmarks.task.run import (
    blocks_of,
    contestants,
    exact_matches,
    judge,
    race,
    task_tokens,
    text_of,
)
from selfspec import LLM, OptionError
from selfspec.bench.schema import made, read
from selfspec.testing import tiny_model, tiny_tokenizer

ALONE = {
    "one",
    "ten",
    "word",
    "novel",
    "made",
    "syllable",
    "onset",
    "vowel",
    "coda",
    "opener",
}  # classes that only training values name
CLOSED = {
    "half",
    "unitspan",
    "mine",
}  # classes that are small in English: am, pm; minutes, hours, seconds; my, her, our


# --------------------------------------------------------------------------------------- generator


def test_one_example_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots in another order than the words, a nested intent that is flattened, words outside slots
    that are repeated."""
    grammar = Grammar("train")
    grammar.phrasings = {"SEND": ["tell {TO=who} {soon} that {WHAT=news}"]}
    grammar.values = {
        "who": ["GET_CONTACT: {OF=mine} {KIND=kin}"],
        "mine": ["my"],
        "kin": ["mom"],
        "soon": ["please"],
        "news": ["it rains {when}"],
        "when": ["today"],
    }
    made = grammar.example(random.Random(0))
    assert made.utterance == "tell my mom please that it rains today"
    assert (
        made.structure == "[IN:SEND [SL:TO [IN:GET_CONTACT [SL:OF my ] [SL:KIND mom ] ] ] "
        "[SL:WHAT it rains today ] ]"
    )
    assert made.intent == "SEND"


@pytest.mark.parametrize("part", PARTS)
def test_the_grammar_is_whole(part: str) -> None:
    """A class that does not exist, a slot without a name, an intent that one part lacks; found only
    when it is drawn."""
    values, phrasings = entities(part), templates(part)
    texts = [text for several in (*values.values(), *phrasings.values()) for text in several]
    named = {
        hole[1] for text in texts for hole in re.findall(r"\{(?:([A-Z_]+)=)?([a-z_]+)\}", text)
    }
    assert named <= set(values), named - set(values)
    assert not [
        text
        for text in texts
        if "{" in re.sub(r"\{(?:[A-Z_]+=)?[a-z_]+\}", "", text) or "  " in text
    ]
    assert (
        len(phrasings) == 28
        and len({name.split(":")[0] for name in texts if re.match("[A-Z_]+: ", name)}) == 3
    )
    assert all(len(several) >= 3 for several in phrasings.values())


def test_the_held_out_part_is_other() -> None:
    """A phrasing or a value that training has seen, which makes a memory look like
    understanding."""
    for intent, held in templates("held_out").items():
        assert not set(held) & set(templates("train")[intent])
    ours, theirs = entities("train"), entities("held_out")
    common = {kind: values for kind, values in theirs.items() if kind not in ALONE}
    named = set(re.findall(r"[{=]([a-z_]+)}", f"{common} {templates('held_out')}"))
    assert not named & ALONE
    leaves = {
        kind: {value for value in values if "{" not in value} for kind, values in common.items()
    }
    for kind in set(leaves) - CLOSED:
        assert not leaves[kind] & set(ours[kind]), kind
    heard = {word for values in leaves.values() for value in values for word in value.split()}
    assert not heard & set(ours["word"]), "a word that was to be copied unseen"
    assert not {each.utterance for each in examples("train", 3000)} & {
        each.utterance for each in examples("held_out", 2000)
    }


def test_known_values_are_those_of_the_lists() -> None:
    """Made-up words in what a small model is to learn without copying; a class left empty."""
    assert all(Grammar("train", known=True).values.values())
    values = entities("train")
    for kind in ("word", "made", "syllable", "onset", "vowel", "coda"):
        del values[kind]
    texts = [text for some in (*values.values(), *templates("train").values()) for text in some]
    listed = {word for text in texts for word in re.sub(r"\{.*?\}", " ", text).split()}
    strange = [
        sum(not set(each.utterance.split()) <= listed for each in examples("train", 300, 0, known))
        for known in (True, False)
    ]
    assert strange[0] < 60 and strange[1] > 200  # clock times and genitives are in no list


def test_structures_are_balanced_and_of_the_utterance() -> None:
    """A bracket that is not closed, or words in a slot that nobody said: the model could only guess
    them."""
    for each in examples("train", 300) + examples("held_out", 300):
        assert each.structure.count("[") == each.structure.split(" ").count("]")
        assert each.structure.startswith(f"[IN:{each.intent} ") and each.structure.endswith("]")
        for leaf in re.findall(r"\[SL:[A-Z_]+ ([^\[\]]+) \]", each.structure):
            assert leaf in each.utterance
    assert len({each.structure for each in examples("train", 300)}) > 280


def test_the_same_seed_makes_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Data that depend on the process (hash order), or a hash that does not see a changed grammar
    or seed."""
    assert examples("train", 50, 3) == examples("train", 50, 3) != examples("train", 50, 4)
    assert examples("train", 80, 3)[:50] == examples("train", 50, 3)
    assert examples("held_out", 1)[0].utterance == "skip the songs by amy"
    before = generator_hash(0)
    assert before != generator_hash(1)
    changed = tmp_path / "source.py"
    changed.write_text("other phrasings", encoding="utf-8")
    monkeypatch.setattr(task_data, "_sources", lambda: iter([changed]))
    assert generator_hash(0) != before


def test_more_than_the_grammar_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for ever for one more utterance that does not exist."""
    monkeypatch.setattr(
        Grammar, "example", lambda self, rng: Example("the only one", "[IN:X ]", "X")
    )
    with pytest.raises(OptionError, match="1 different utterances in 60 draws, 3 were asked for"):
        examples("train", 3)


# ------------------------------------------------------------------------------------------ stages


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Its first layers are nearly all of it, so that drafts are kept."""
    model = tiny_model(seed=4)
    for layer in model.model.layers[2:]:
        layer.self_attn.o_proj.weight.data *= 0.05
        layer.mlp.down_proj.weight.data *= 0.05
    return LLM.from_pretrained(model, tokenizer=tiny_tokenizer())


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_task, "MOST_TOKENS", 8)


def test_exact_match_counts_whole_answers() -> None:
    """A prefix, another case or a space too many counted as right."""
    right = Example("u", "[IN:X [SL:A b ] ]", "X")
    answers = ["[IN:X [SL:A b ] ]", "[IN:X [SL:A b ] ", "[IN:X [SL:A B ] ]", "[IN:X [SL:A b ] ] ]"]
    assert exact_matches((right, answer) for answer in answers) == 1


def test_a_model_is_judged_on_its_own_answers(llm: LLM) -> None:
    """Answers given to the wrong utterances after sorting, prompts counted as answers, exits judged
    as the whole model."""
    made = examples("held_out", 5)
    own = {
        each.prompt: llm.generate(each.prompt, draft=None, max_new_tokens=8).text.strip()
        for each in made
    }
    taught = [Example(each.utterance, own[each.prompt], each.intent) for each in made]
    found = judge(llm, taught, TaskOptions(exits=(1, 2), lossy=3), lambda: None)
    assert (found.exact, found.of) == (5, 5), "the model's own answers are what it answers"
    assert found.lossy["1"][1] == 3 and found.lossy["1"][0] <= 3
    wrong = [Example(each.utterance, own[each.prompt] + "x", each.intent) for each in made]
    assert judge(llm, wrong, TaskOptions(exits=(1,), lossy=1), lambda: None).exact == 0
    assert [score["layers"] for score in found.exits] == [1, 2, llm.info.layers]
    blocks = blocks_of(llm.tokenizer, taught)
    assert int(blocks.trained.sum()) == sum(
        len(llm.tokenizer(each.structure)["input_ids"]) + 1 for each in taught
    )  # type: ignore[misc]


def test_a_draft_scores_what_structures_have_and_utterances_lack(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words of values among the draft's tokens, which it would take for words of the utterance;
    brackets or the end left out."""
    monkeypatch.setattr(bench_task, "RARE", 3)
    made = [
        Example(words, structure, "X")
        for words, structure in [("a b", "[a]"), ("c a", "[a]"), ("e", "[z]"), ("f", "[q]")]
    ]
    write_examples(tmp_path / "train.jsonl", [*made, Example("g", "[q]", "X")])
    tokenizer: Any = llm.tokenizer
    assert task_tokens(llm, tmp_path / "train.jsonl") == sorted(
        [*tokenizer("[]q")["input_ids"], tokenizer.eos_token_id]
    )


def test_all_ways_race_on_the_same_utterances(llm: LLM, tmp_path: Path) -> None:
    """A draft vocabulary without the task's tokens, K that is not what was asked for, a warm-up
    that is counted, or a way that writes something else and is called the same."""
    write_examples(tmp_path / "train.jsonl", examples("train", 80))
    tokens = task_tokens(llm, tmp_path / "train.jsonl")
    assert set(llm.tokenizer("[]_:GET")["input_ids"]) <= set(tokens) < set(range(259))  # type: ignore[misc]
    ways = contestants(llm, tokens, TaskOptions(exits=(2,), drafts=3, other_drafts=(1,)))
    prompts = [list(b"set an alarm"), list(b"play jazz")]
    found = race(ways, prompts)
    assert set(found) == {
        "plain",
        "E=2",
        "E=2, no reuse",
        "E=2, whole vocabulary",
        "E=2 alone",
        "E=2, K=1",
    }
    assert all(len(entry.seconds) == len(entry.decoded) == 2 for entry in found.values())
    whole = found[
        "E=2, whole vocabulary"
    ]  # a model that learned nothing writes tokens that no structure has
    assert found["plain"].drafted == 0 < whole.accepted <= whole.drafted
    assert all(entry.identical for name, entry in found.items() if name != "E=2 alone")
    assert found["E=2"].drafted == found["E=2, no reuse"].drafted
    assert found["E=2, K=1"].drafted < found["E=2"].drafted
    rounds = llm.generate(
        prompts[0],
        draft="early-exit",
        draft_options={"layer": 2},
        control="fixed",
        max_new_tokens=8,
    )
    other = race({"plain": ways["plain"], "other": lambda prompt: rounds}, prompts)
    assert not other["other"].identical


def test_stages_have_names() -> None:
    """A misspelt stage that is left out in silence."""
    assert chosen_stages("speed,train") == ["train", "speed"]
    with pytest.raises(OptionError, match="'sped' is not known; did you mean 'speed'"):
        chosen_stages("train,sped")


# ------------------------------------------------------------------------------------------- table

DATA: dict[str, Any] = {
    "provenance": asdict(PROVENANCE),
    "model": "m",
    "generator": "abc",
    "vocabulary": 700,
    "options": {"exits": [2], "drafts": 7, "other_drafts": [3], "seed": 0},
    "training": {
        "recipe": {
            "steps": 3,
            "tokens": 1200,
            "log": [{"exit_2": 0.5, "exit_10": 0.25, "loss": 0.7}],
        }
    },
    "quality": {
        "recipe": {
            "exact": 9,
            "of": 10,
            "lossy": {"2": [1, 4]},
            "exits": [
                {"layers": 2, "agreement": 0.5, "perplexity": 3.0},
                {"layers": 10, "agreement": 1.0, "perplexity": 1.5},
            ],
        }
    },
    "race": {
        "plain": {
            "seconds": [0.4, 0.2, 0.0],
            "decoded": [20, 10, 0],
            "drafted": 0,
            "accepted": 0,
            "identical": True,
        },
        "E=2": {
            "seconds": [0.2, 0.1, 0.0],
            "decoded": [20, 10, 0],
            "drafted": 50,
            "accepted": 38,
            "identical": True,
        },
        "E=2, K=3": {
            "seconds": [0.25, 0.125, 0.0],
            "decoded": [20, 10, 0],
            "drafted": 40,
            "accepted": 34,
            "identical": True,
        },
        "E=2 alone": {
            "seconds": [0.1, 0.1, 0.0],
            "decoded": [20, 20, 0],
            "drafted": 0,
            "accepted": 0,
            "identical": False,
        },
    },
}


RUN: TaskRun = made(TaskRun, DATA)


def test_the_tables() -> None:
    """A speed turned upside down, an answer that ended with its first token as an infinite speed,
    lossy rows called equal."""
    text = markdown(RUN)
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.split("speed (accepted/drafted)")[0].splitlines()
        if "|" in line
    }
    assert rows["E=2"] == ["10.0", "2.00 (2.00-2.00)", "76.0%", "yes"]
    assert rows["plain"][:2] == ["20.0", "1.00 (1.00-1.00)"] and rows["plain"][2] == "-"
    assert rows["E=2 alone"][-1] == "not checked: lossy"
    assert re.search(
        r"\| +K=3 \| +K=7 \|\n.*\n\| E=2 +\| 1\.60 \(85\.0%\) \| 2\.00 \(76\.0%\) \|", text
    ), "more drafts on the left"
    assert (
        "90.0% of 10" in text
        and "25.0% of 4" in text
        and "generator abc" in text
        and "0.2500" in text
    )
    facts = summary(RUN)
    assert (
        facts["exact"] == {"recipe": 0.9}
        and facts["acceptance"] == {"E=2": 0.76, "E=2, K=3": 0.85}
        and facts["identical"] is True
    )
    assert facts["speed"]["E=2"] == 2.0
    short = replace(RUN, training={"recipe": {"steps": 3, "tokens": 1200, "log": []}})
    assert "1,200" in markdown(short), "a run that was too short for a log line"
    lost = copy.deepcopy(RUN)
    lost.race["E=2"].identical = False
    assert "NO" in markdown(lost) and summary(lost)["identical"] is False


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Tables made of something else."""
    other = tmp_path / "other.json"
    other.write_text('{"kind": "spec", "schema_version": 1}', encoding="utf-8")
    with pytest.raises(OptionError, match=r"other\.json holds"):
        read(TaskRun, other)
    with pytest.raises(OptionError, match="no result file"):
        read(TaskRun, tmp_path / "none.json")


def test_the_held_out_text_is_what_the_model_would_write() -> None:
    """Catches a text without end tokens, whose every structure would be followed by a surprise."""
    made = [Example("wake me", "[IN:A ]", "A"), Example("call bo", "[IN:B ]", "B")]
    assert text_of(made, "<end>") == "wake me\n[IN:A ]<end>call bo\n[IN:B ]<end>"
