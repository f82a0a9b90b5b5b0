"""What `deploy/` promises: metrics that the server has, flags that the command knows, files that
their readers take. What needs the server's own modules is skipped where they are not installed."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
ROOT = DEPLOY.parent


def unit() -> configparser.ConfigParser:
    class Names(configparser.ConfigParser):
        def optionxform(self, optionstr: str) -> str:
            return optionstr

    found = Names(interpolation=None, strict=False)
    found.read(DEPLOY / "selfspec.service")
    return found


def dockerfile() -> list[list[str]]:
    """Its instructions as words, lines that go on joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    return [line.split(None, 1) for line in lines if line.strip()]


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    return found


def queries() -> list[str]:
    return [target["expr"] for panel in board()["panels"] for target in panel["targets"]]


def test_the_board_is_one_that_grafana_takes() -> None:
    """Panels on top of each other, a query of nothing, brackets that do not close."""
    panels = board()["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["id"] for panel in panels})
    for query in queries():
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
        assert "selfspec:" in query


def test_the_board_shows_what_the_server_measures() -> None:
    """A metric that was renamed: the panel stays empty, and nobody is told."""
    metrics = pytest.importorskip("selfspec.serve.metrics")
    pytest.importorskip("prometheus_client")
    server = metrics.Metrics()
    server.watch(running=lambda: 0, waiting=lambda: 0, cache=lambda: 0.0)
    known = set()
    for family in server.registry.collect():
        ending = {"counter": ["_total"], "histogram": ["_bucket"]}.get(family.type, [""])
        known |= {family.name + each for each in ending}
    shown = {name for query in queries() for name in re.findall(r"selfspec:\w+", query)}
    assert shown <= known, shown - known
    assert known <= shown, f"nobody sees {known - shown}"


def flags(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def test_the_commands_exist() -> None:
    """A flag that was renamed: the container ends as soon as it starts."""
    pytest.importorskip("selfspec.cli.serve")
    from typer.testing import CliRunner

    from selfspec.cli.app import app

    told = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300"}).stdout
    entry = next(json.loads(rest) for word, rest in dockerfile() if word == "ENTRYPOINT")
    start = shlex.split(unit()["Service"]["ExecStart"])
    for command in (entry, start):
        assert Path(command[0]).name == "selfspec" and command[1] == "serve"
        assert flags(command)
        for flag in flags(command):
            assert flag in told, f"selfspec serve has no {flag}"


def test_the_dockerfile_copies_what_is_there() -> None:
    """A file that was moved, an extra that no longer exists, a server that runs as root or listens
    where nobody outside the container can reach it."""
    steps = dockerfile()
    for rest in (rest for word, rest in steps if word == "COPY"):
        assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    install = next(rest for _, rest in steps if "pip install" in rest)
    wanted = re.findall(r"\.\[([\w,-]+)\]", install)[0].split(",")
    there = set(project["optional-dependencies"]) | ({"serve"} if not _has_server() else set())
    assert set(wanted) <= there
    words = [word for word, _ in steps]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert '"--host", "0.0.0.0"' in next(rest for word, rest in steps if word == "ENTRYPOINT")


def _has_server() -> bool:
    return (ROOT / "src" / "selfspec" / "serve" / "app.py").exists()


def test_the_unit_waits_for_what_runs(tmp_path: Path) -> None:
    """systemd that kills a server which is still finishing requests, or a line it cannot read."""
    service = unit()["Service"]
    drain = re.findall(r"--drain-seconds (\d+)", service["ExecStart"])[0]
    assert int(service["TimeoutStopSec"]) > int(drain)
    assert "--host 127.0.0.1" in service["ExecStart"], "a proxy faces the net, not this server"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("the rest needs systemd-analyze")
    text = (DEPLOY / "selfspec.service").read_text(encoding="utf-8")
    copy = tmp_path / "selfspec.service"
    copy.write_text(text.replace("/opt/selfspec/bin/selfspec", sys.executable), encoding="utf-8")
    run = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "selfspec.service" not in run.stderr, run.stderr
