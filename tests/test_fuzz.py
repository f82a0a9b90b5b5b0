"""Bad input for every door, see `tests/fuzz`: 0 tracebacks, 0 signals, 0 hangs, 0 silent defaults.
The same every time; `python -m tests.fuzz` goes on by chance for as long as you say."""

from __future__ import annotations

import functools
import json
import random
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from selfspec.cli import common
from selfspec.cli.app import app
from selfspec.errors import PromptError
from selfspec.testing import tiny_llm
from tests.bench.suite_world import the_sample
from tests.fuzz.damage import Kinds, attempt_at
from tests.fuzz.doors import NAMES, Doors, Target, lines, wrong
from tests.fuzz.server import BODIES, FuzzedServer, fuzzed_server, json_values

TARGETS = [Target.of(line) for line in lines("targets.txt")]
VALUES = lines("values.txt")
EACH = {"model": 25, "gguf": 40}  # damaged files of a kind; a model takes longer to open
OTHERS = 60
COMMANDS = lines("commands.txt")
FIELDS = [Target.of(line) for line in lines("fields.txt")]


@pytest.fixture(scope="module")
def doors() -> Doors:
    return Doors()


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    made = Kinds(tmp_path_factory.mktemp("whole"))
    made.add_result(the_sample().as_dict())
    return made


def test_there_are_enough_cases() -> None:
    """Files that are not found, or cases that are lost."""
    files = sum(EACH.get(kind, OTHERS) for kind in ("model", "gguf", *"abcdefghij"))
    assert len(TARGETS) * len(VALUES) + len(COMMANDS) + files >= 1500


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.door}-{target.name}")
def test_every_value_at_every_door(doors: Doors, target: Target) -> None:
    """A traceback from inside, a call that does not end, or a value that is silently taken for
    another. What is allowed to succeed is said in targets.txt."""
    found = []
    for line in VALUES:
        value = eval(line, dict(NAMES))
        may = target.takes(value)
        if problem := wrong(functools.partial(doors.call, target, value), may):
            found.append(f"{target.door} {target.name}={line}: {problem}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "kind",
    [
        *("draft-head", "draft-head-8", "exit-adapter", "exit-adapter-8", "draft-lora"),
        *("draft-lora-8", "successors", "successors-8", "model", "gguf", "rows", "result"),
    ],
)
def test_damaged_files(kinds: Kinds, kind: str, tmp_path: Path) -> None:
    """Files of other people, by chance damaged in ways that nobody thought of. A part that is
    taken all the same must not change the text."""
    dice, found = random.Random(kind), []
    for number in range(EACH.get(kind, OTHERS)):
        # a folder for each, as what was read of a folder is remembered
        if problem := attempt_at(kinds, kind, dice, tmp_path / str(number)):
            found.append(problem)
    assert not found, "\n".join(found)


def test_whole_files_are_taken(kinds: Kinds) -> None:
    """Everything refused: then nothing above was tested."""
    for kind, opened in kinds.open.items():
        assert not (problem := wrong(lambda: opened(kinds.root / kind), True)), problem  # noqa: B023
        opened(kinds.root / kind)


@pytest.fixture
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(max_position_embeddings=96)
    monkeypatch.setattr(common, "open_model", lambda name, how: llm)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.usefixtures("one_model")
@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_line(line: str, tmp_path: Path) -> None:
    """A traceback, a hang, or an error without words."""
    words = shlex.split(line.format(tmp=tmp_path, model="demo"))
    results: list[Any] = []

    def attempt() -> None:
        results.append(CliRunner().invoke(app, words, input=b"\xff\xfe"))

    assert not (problem := wrong(attempt, may_succeed=True)), problem
    (result,) = results
    crash = result.exception
    assert crash is None or isinstance(crash, SystemExit), f"{line}: {crash!r}"
    assert result.exit_code in (0, 1, 2) and (result.exit_code == 0 or result.output)


@pytest.mark.usefixtures("one_model")
def test_a_chat_goes_on_after_what_it_cannot_read() -> None:
    """A conversation that ends with a traceback for one line that is no UTF-8, or that a template
    refuses."""
    talked = CliRunner().invoke(app, ["chat", "demo", "-n", "3"], input=b"\xff\xfe\nhello\n/quit\n")
    assert talked.exception is None and talked.exit_code == 0
    assert "UTF-8" in talked.output and talked.output.count("> ") == 3


@pytest.mark.usefixtures("one_model")
def test_standard_input_that_is_no_text() -> None:
    """UnicodeDecodeError."""
    asked = CliRunner().invoke(app, ["generate", "demo", "-", "--raw"], input=b"\xff\xfe")
    assert asked.exit_code == 1 and "UTF-8" in asked.output


@pytest.fixture(scope="module")
def server() -> Iterator[FuzzedServer]:
    with fuzzed_server() as made:
        yield made


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"{field.door}-{field.name}")
def test_every_value_in_every_field(server: FuzzedServer, field: Target) -> None:
    """A 500, a traceback in the place of an answer, a stream that never ends, or a value that is
    silently taken for another. What may be taken is said in fields.txt."""
    found = []
    for line in json_values():
        value = json.loads(json.dumps(eval(line, dict(NAMES))))
        may = field.takes(value)
        if problem := wrong(functools.partial(server.field, field, value), may):
            found.append(f"{field.door} {field.name}={line[:60]}: {problem}")
    assert not found, "\n".join(found)
    server.well()


@pytest.mark.parametrize("line", lines("requests.txt"))
def test_every_request(server: FuzzedServer, line: str) -> None:
    """Bytes that end the server, or that it waits for without end."""
    assert not (problem := server.line(line)), problem
    server.well()


def test_bodies_damaged_by_chance(server: FuzzedServer) -> None:
    """What nobody has written down."""
    dice = random.Random("bodies")
    found = [problem for _ in range(200) if (problem := server.chance(dice))]
    assert not found, "\n".join(found)
    server.well()


def test_what_a_good_server_does_is_taken(server: FuzzedServer) -> None:
    """Everything refused: then nothing above was tested."""
    for path, body in BODIES.items():
        server.ask(path, json.dumps(body).encode())
    broken = httpx.Response(500, headers={"x-request-id": "x"}, json={"error": "x"})
    with pytest.raises(AssertionError, match="500"):
        server.judge(broken)


def test_rows_that_are_no_text(tmp_path: Path) -> None:
    """Half of a pair, escaped in JSON, that fails when it is written an hour later."""
    from selfspec.core.text_rows import read_rows
    from selfspec.errors import DataError

    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "\ud800"}))
    with pytest.raises((DataError, PromptError)):
        list(read_rows(path))
