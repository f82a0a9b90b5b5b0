"""`scripts/bench load`, `waiting` and `exported` in small, and what their committed results say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from benchmarks import exported, load, load_servers, waiting
from selfspec import LLM, OptionError
from selfspec.bench.provenance import gather
from selfspec.bench.schema import read
from selfspec.bench.serving import Target
from selfspec.errors import Unavailable
from selfspec.testing import tiny_model, tiny_tokenizer

# it answers in a process of its own, after a while, and says when it was told to end
SERVER = """
import http.server, pathlib, signal, subprocess, sys, time
port, folder = sys.argv[1:]
def end(*_):
    pathlib.Path(folder, port).touch()
    sys.exit()
signal.signal(signal.SIGTERM, end)
time.sleep(1)
serve = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=%s, bind='127.0.0.1')"
subprocess.Popen([sys.executable, "-c", serve % port])
time.sleep(100)
"""
END = 2  # the demo's end token
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"


def test_servers_take_turns_and_a_file_is_added_to(client: httpx.Client, tmp_path: Path) -> None:
    """A server that always comes first, turns that are lost, failures that are no figures."""
    url, file = str(client.base_url), tmp_path / "load.json"
    plain = f"b={url}#" + json.dumps({"selfspec": {"draft": "none"}})
    how: dict[str, Any] = {"server": [f"a={url}", plain], "callers": "2", "requests": 1,
                           "words": 4, "max_tokens": 5, "precision": "float32"}  # fmt: skip
    load.load(**how, turns=1, out=file)
    load.load(**how, turns=1, out=file)
    run = read(load.LoadRun, file)
    assert [(each.server, each.turn) for each in run.turns] == [
        ("a", 0), ("b", 0), ("a", 2), ("b", 2),
    ] or [each.server for each in run.turns] == ["a", "b", "a", "b"]  # fmt: skip
    assert all(each.tokens == 10 and not each.failed for each in run.turns)
    assert "| 2       |" in load.markdown(run)
    with pytest.raises(OptionError, match="not NAME=URL"):
        load.server_of(url, 5)


def test_no_server_is_asked_the_same_question_twice(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that are found in a cache, so that whoever was asked second reads nothing."""
    heard: list[str] = []
    body = Target.body

    def hearing(target: Target, prompt: str) -> dict[str, Any]:
        heard.append(prompt)
        return body(target, prompt)

    monkeypatch.setattr(Target, "body", hearing)
    how: dict[str, Any] = {"server": [f"a={client.base_url}"], "callers": "1,2", "requests": 2,
                           "words": 4, "max_tokens": 3, "precision": "float32"}  # fmt: skip
    for _ in range(2):
        load.load(**how, turns=2, out=tmp_path / "load.json")
    assert len(set(heard)) == len(heard) == 4 * (2 + 2 + 2 + 4)


def test_servers_are_started_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is asked before it is ready, one that outlives its measurement, and one that
    does not come up and keeps its reason for itself."""
    monkeypatch.setattr(load_servers, "READY_SECONDS", 30.0)
    python = [sys.executable, "-c"]
    program = load_servers.Program([*python, SERVER, "PORT", str(tmp_path)], "/", "a server")
    with load_servers.running({"a": program, "b": program}) as urls:
        assert list(urls) == ["a", "b"] and len(set(urls.values())) == 2
        assert all(httpx.get(url).status_code == 200 for url in urls.values())
    assert len(list(tmp_path.iterdir())) == 2, "each was told to end"
    for url in urls.values():
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
    dying = load_servers.Program([*python, "raise SystemExit('out of luck')"], "/", "a server")
    with (
        pytest.raises(Unavailable, match="c did not start: out of luck"),
        load_servers.running({"c": dying}),
    ):
        pass


def test_only_one_of_our_servers_drafts() -> None:
    """Two servers that are the same, or a name that is not known."""
    drafts, plain = (load_servers.program_of(f"ours, {name}", 2) for name in ("drafts", "plain"))
    assert "--draft" not in drafts.command and "--draft none" in " ".join(plain.command)
    assert drafts.environment["OMP_NUM_THREADS"] == "2" and "none" in plain.about
    with pytest.raises(OptionError, match=r"no server 'llama'.*llama.cpp"):
        load_servers.program_of("llama", 2)
    with pytest.raises(OptionError, match="no server is named"):
        load.load(out=None)


def test_rounds_until_a_first_token_are_counted() -> None:
    """A count that leaves out the round in which the prompt came, or the one that gave the token,
    or counts one before or after; a run that times nothing."""
    rounds = [(0.0, 1.0), (1.0, 2.0), (2.0, 5.0), (5.0, 6.0), (6.0, 7.0)]
    assert waiting.first(40, rounds, sent=1.5, came=5.5) == waiting.First(40, 3, 4.0, 3.0)
    model = tiny_model("llama", max_position_embeddings=8192)
    llm = LLM.from_pretrained(model, tokenizer=tiny_tokenizer())
    run = waiting.WaitingRun(gather("test", 1, {}), "tiny", "float32", 6000, 10)
    waiting.measured(llm, run, seed=0)
    assert run.firsts and run.reading > 0
    assert all(each.rounds >= 1 and each.longest > 0 for each in run.firsts)
    assert "rounds to the first token" in waiting.markdown(run)


def test_the_wait_for_a_first_token_is_as_promised() -> None:
    """The committed run: at most 3 rounds, none longer than 5 plain ones."""
    for file in RESULTS.glob("waiting-*.json"):
        run = read(waiting.WaitingRun, file)
        assert run.complete and run.long == 4000 and len(run.firsts) >= 5
        assert max(each.rounds for each in run.firsts) <= 3 and run.longest <= 5


def test_the_committed_load_is_what_the_page_says() -> None:
    """Fewer servers or callers, answers of ours that failed, a server that is ahead of ours, or
    drafts that make it slower."""
    run = read(load.LoadRun, RESULTS / "load-amd-epyc-family-26-model-2.json")
    assert len(run.servers) == 4
    assert not any(each.failed for each in run.turns if each.server != "llama.cpp")
    for callers in (1, 4, 16, 64):
        drafts, *others = (
            median(e.rate for e in run.turns if (e.server, e.callers) == (name, callers))
            for name in load_servers.NAMES
        )
        assert drafts > max(others), callers


def test_exports_change_no_token_where_they_were_tried() -> None:
    """A draft that changes what its engine says."""
    tried = set()
    for file in RESULTS.glob("exported-*.json"):
        for name, own in json.loads(file.read_text("utf-8"))["engines"].items():
            tried.add(name)
            same = exported.agreement(own["plain"], own["with_draft"])
            assert same == own["draft_against_plain"]
            assert same["equal"] == same["answers"] >= 10, name
            assert own["counts"]["accepted"] > 0, "nothing was drafted"
    assert tried >= {"llama.cpp", "vllm", "vllm-proposer"}


def test_other_engines_say_what_ours_says() -> None:
    """An engine that reads other weights or another prompt, so that its drafts say nothing of
    ours. llama.cpp forbids the end token where the others go on behind it."""
    for file in RESULTS.glob("exported-*.json"):
        found = json.loads(file.read_text("utf-8"))
        for name, own in found["engines"].items():
            for mine, theirs in zip(found["ours"], own["plain"], strict=True):
                first = next((at for at in range(len(mine)) if mine[at] != theirs[at]), None)
                assert first is None or (name == "llama.cpp" and mine[first] == END), name


def test_agreement_sees_a_difference() -> None:
    """A comparison that finds everything equal."""
    assert exported.agreement([[1, 2, 3]], [[1, 2, 3]])["equal"] == 1
    found = exported.agreement([[1, 2, 3], [4]], [[1, 9, 3], [4]])
    assert (found["equal"], found["tokens"], found["before_a_difference"]) == (1, 4, 2)
