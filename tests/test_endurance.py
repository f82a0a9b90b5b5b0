"""Short runs of `tests/endurance`: commands that are killed, and memory after some requests.
Long ones are made by hand, and their results committed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from selfspec.testing import tiny_llm
from tests.endurance import memory, soak
from tests.endurance.commands import COMMANDS, prepare
from tests.endurance.kills import Command, Killer, differences
from tests.endurance.memory import Measured, Reading

ROOT = Path(__file__).resolve().parents[1]
OFTEN = ("train", "data", "demo", "tune")  # the others with --full: they take longer


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Killer:
    world = tmp_path_factory.mktemp("world")
    prepare(world)
    return Killer(world, tmp_path_factory.mktemp("work"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each.name)
def test_a_killed_command_goes_on_to_the_same_result(
    killer: Killer, command: Command, request: pytest.FixtureRequest
) -> None:
    """Answers that a resumed run loses, writes twice or in another order, and files that it
    mistakes for whole ones."""
    if command.name not in OFTEN and not request.config.getoption("--full"):
        pytest.skip("takes longer: --full")
    found = killer.killed(command, kills=2, seed=1, tell=lambda said: None)
    assert len(found.killed_at) == 2 and found.compared >= 1, "nothing was killed, or compared"
    assert not found.failures and not found.differences and not found.left_running


def test_what_differs_is_seen() -> None:
    """A comparison that sees only what both have."""
    assert differences({"a": "1", "b": "2"}, {"a": "1", "c": "2"}) == ["b", "c"]
    assert differences({"a": "1"}, {"a": "2"}) == ["a"] and not differences({"a": "1"}, {"a": "1"})


def test_memory_is_flat_after_the_first_requests() -> None:
    """A result, a session, a row or a text that every request leaves behind, in a process of its
    own. The last assertion shows that one small object a request would be seen. By an even clock:
    what passes take here would fill tables of times sooner or later."""
    code = (
        "from tests.endurance.memory import measured\n"
        "from tests.worlds import on_even_clock\n"
        "on_even_clock()\n"
        "found = measured('tiny', requests=300, turns=200, seed=0, every=25)\n"
        "print(found.as_dict()['grown'], max(each.kept_chats for each in found.turns))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "{'requests': [], 'turns': []} 1\n", done.stdout + done.stderr
    llm, kept = tiny_llm(), list[object]()
    leaking = memory.readings(llm, 200, lambda number: kept.append([number]), 50)
    assert Measured.growth(leaking), "a list a request is not seen"


def test_growth_of_each_kind_is_said() -> None:
    """Bytes of tensors that grow while the number of objects does not."""
    first = Reading(100, 1000, 10_000, 10_000, 1, 0)
    assert Measured.growth([first, Reading(200, 1001, 10_100, 10_000, 9**9, 2)]) == []
    for other in (
        Reading(200, 1100, 10_000, 10_000, 1, 0),
        Reading(200, 1000, 90_000, 10_000, 1, 0),
        Reading(200, 1000, 10_000, 20_000, 1, 0),
        Reading(200, 1000, 10_000, 10_000, 1, 3),
    ):
        assert len(Measured.growth([first, other])) == 1
    once = [Reading(100 * step, 1000 + 500 * (step > 2), 0, 0, 0, 0) for step in (1, 2, 3, 4)]
    assert Measured.growth(once) == []
    again = [Reading(100 * step, 1000 + 100 * step, 0, 0, 0, 0) for step in (1, 2, 3, 4)]
    assert Measured.growth(again) == ["objects grew by 300 in 300"]


def test_a_server_with_many_callers_loses_nothing() -> None:
    """Answers that are lost or differ, rows that are kept, nonsense that is taken or ends in a 5xx.
    The whole run is a result: 10,000 requests, 64 at once."""
    found = soak.soaked(requests=240, at_once=16, seed=1, readings=2)
    assert [said for said in found.bad if " grew by " not in said] == []  # too short to be flat
    assert found.requests == 240 and found.answered > 150 and found.left > 8
    assert found.statuses["400"] > 8 and found.compared > 20 and len(found.readings) == 2


def test_what_is_bad_of_a_soak_is_said() -> None:
    """A run that counts mistakes and calls itself good."""
    first = Reading(100, 1000, 10_000, 10_000, 1, 0)
    assert soak.Soaked(statuses={"200": 5, "404": 1}, readings=[first, first]).bad == []
    for wrong in (
        {"statuses": {"500": 1}}, {"lost": ["x"]}, {"wrong": ["x"]}, {"held": 1}, {"differing": 1},
        {"readings": [first, Reading(200, 1100, 10_000, 10_000, 1, 0)]},
    ):  # fmt: skip
        assert len(soak.Soaked(**{"readings": [first, first], **wrong}).bad) == 1


def test_the_committed_soak_is_whole() -> None:
    """A result that says less than the page promises."""
    found = json.loads((ROOT / "benchmarks/results/soak-amd-epyc.json").read_text("utf-8"))
    assert found["requests"] >= 10_000 and found["at_once"] == 64 and found["bad"] == []
    assert found["left"] > 400 and sum(found["statuses"].get(c, 0) for c in ("400", "404")) > 400
    refused = sum(found["statuses"].get(code, 0) for code in ("400", "404"))
    assert found["answered"] + found["left"] + refused == found["requests"], "one is lost"
    assert not any(code[0] == "5" for code in found["statuses"])
