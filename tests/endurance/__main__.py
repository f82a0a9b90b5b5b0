"""`python -m tests.endurance kills` and `python -m tests.endurance memory`: the long runs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from selfspec.bench.peer_host import package_versions
from selfspec.bench.provenance import CHECKOUT, cpu_name, gather, slug
from selfspec.core.files import write_whole

RESULTS = CHECKOUT / "benchmarks" / "results"


def main() -> int:
    """Do what was typed, write the result, and end with 1 if it is not good."""
    parser = argparse.ArgumentParser(prog="python -m tests.endurance", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kills = kinds.add_parser("kills", help="kill commands at random moments")
    kills.add_argument("--kills", type=int, default=50, help="of each command")
    kills.add_argument("--only", default="", help="commands whose names contain this")
    kills.add_argument("--seed", type=int, default=0)
    memory = kinds.add_parser("memory", help="memory after thousands of requests")
    memory.add_argument("--model", default="tiny", help="tiny, or a model as LLM takes it")
    memory.add_argument("--requests", type=int, default=5000)
    memory.add_argument("--turns", type=int, default=2000, help="of chats")
    memory.add_argument("--seed", type=int, default=0)
    for each in (kills, memory):
        each.add_argument("--out", type=Path, help="the JSON to write")
    asked = parser.parse_args()
    facts, good, name = (_kills if asked.kind == "kills" else _memory)(asked)
    versions = package_versions(("torch", "transformers"))
    made = gather(shlex.join(["python", "-m", "tests.endurance", *sys.argv[1:]]), 1, versions)
    out = asked.out or RESULTS / f"{name}-{slug(cpu_name())}.json"
    result = {"kind": asked.kind, "provenance": vars(made), **facts}
    write_whole(out, json.dumps(result, indent=1) + "\n")
    print(f"Written: {out.name}", flush=True)
    return 0 if good else 1


def _kills(asked: argparse.Namespace) -> tuple[dict[str, Any], bool, str]:
    from .commands import COMMANDS, prepare
    from .kills import Killer

    found: dict[str, Any] = {}
    if asked.out and asked.out.is_file():  # commands that were killed before
        earlier = json.loads(asked.out.read_text(encoding="utf-8"))["commands"]
        found = {each["command"]: each for each in earlier}
    with tempfile.TemporaryDirectory(prefix="selfspec-kills-") as folder:
        world = Path(folder) / "world"
        world.mkdir()
        prepare(world)
        killer = Killer(world, Path(folder) / "work")
        for command in COMMANDS:
            if asked.only in command.name:
                done = killer.killed(command, asked.kills, asked.seed).as_dict()
                found[command.name] = done
                print(json.dumps(done), flush=True)
    bad = ("differences", "failures", "left_running")
    good = not any(each[name] for each in found.values() for name in bad)
    return {"commands": list(found.values())}, good, "kills"


def _memory(asked: argparse.Namespace) -> tuple[dict[str, Any], bool, str]:
    from .memory import measured

    found = measured(asked.model, asked.requests, asked.turns, asked.seed)
    name = "memory" if asked.model == "tiny" else f"memory-{slug(Path(asked.model).name)}"
    return found.as_dict(), found.flat, name


if __name__ == "__main__":
    raise SystemExit(main())
