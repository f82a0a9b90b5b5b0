"""`python -m tests.endurance kills`, `memory`, `calls`, `ctrl-c` and `soak`: the long runs."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from selfspec.bench.provenance import CHECKOUT, slug
from tests.long_runs import default_path, earlier, save

BAD = ("differences", "failures", "left_running")  # of a command that was killed


def main() -> int:
    """Do what was typed, write the result, and end with 1 if it is not good."""
    parser = argparse.ArgumentParser(prog="python -m tests.endurance", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kills = kinds.add_parser("kills", help="kill commands at random moments")
    kills.add_argument("--kills", type=int, default=50, help="of each command")
    kills.add_argument("--only", default="", help="commands whose names contain this")
    memory = kinds.add_parser("memory", help="memory after thousands of requests")
    memory.add_argument("--model", default="tiny", help="tiny, or a model as LLM takes it")
    memory.add_argument("--requests", type=int, default=5000)
    memory.add_argument("--turns", type=int, default=2000, help="of chats")
    calls = kinds.add_parser("calls", help="make every call of a round raise")
    signals = kinds.add_parser("ctrl-c", help="interrupt requests at random times")
    signals.add_argument("--times", type=int, default=2000, help="that come before the end")
    signals.add_argument("--minutes", type=float, default=60, help="stop then")
    soak = kinds.add_parser("soak", help="a server with many callers, for long")
    soak.add_argument("--requests", type=int, default=10000)
    soak.add_argument("--pieces", type=int, default=4, help="servers, one after the other")
    soak.add_argument("--at-once", type=int, default=64)
    for each in (kills, memory, calls, signals, soak):
        each.add_argument("--seed", type=int, default=0)
        each.add_argument("--out", type=Path, help="the JSON to write, or to go on with")
    asked = parser.parse_args()
    runs = {"kills": _kills, "memory": _memory, "calls": _calls, "ctrl-c": _ctrl_c, "soak": _soak}
    return runs[asked.kind](asked)


def _kills(asked: argparse.Namespace) -> int:
    from .commands import COMMANDS, prepare
    from .kills import Killer

    out = asked.out or default_path("kills")
    found: dict[str, Any] = {each["command"]: each for each in earlier(out, "commands")}
    with tempfile.TemporaryDirectory(prefix="selfspec-kills-") as folder:
        world = Path(folder) / "world"
        world.mkdir()
        prepare(world)
        killer = Killer(world, Path(folder) / "work")
        for command in COMMANDS:
            if asked.only in command.name:
                done = killer.killed(command, asked.kills, asked.seed).as_dict()
                found[command.name] = done
                save(out, "kills", "tests.endurance", {"commands": list(found.values())})
    return int(any(each[name] for each in found.values() for name in BAD))


def _memory(asked: argparse.Namespace) -> int:
    from .memory import measured

    found = measured(asked.model, asked.requests, asked.turns, asked.seed)
    kind = "memory" if asked.model == "tiny" else f"memory-{slug(Path(asked.model).name)}"
    save(asked.out or default_path(kind), "memory", "tests.endurance", found.as_dict())
    return int(not found.flat)


def _soak(asked: argparse.Namespace) -> int:
    """In pieces: each is a server of its own, and a run that was ended goes on with the next."""
    from .soak import soaked, total

    out = asked.out or default_path("soak")
    pieces = earlier(out, "pieces")
    for seed in range(asked.seed + len(pieces), asked.seed + asked.pieces):
        found = soaked(asked.requests // asked.pieces, asked.at_once, seed)
        pieces.append(found.as_dict())
        save(out, "soak", "tests.endurance", {**total(pieces), "pieces": pieces})
        print(found.bad or f"{found.answered} answered, nothing bad")
    return int(any(piece["bad"] for piece in pieces))


def _calls(asked: argparse.Namespace) -> int:
    """Each drafter in each kind of call; a run that was ended goes on with the next."""
    sys.path.insert(0, str(CHECKOUT / "tests"))  # as pytest does
    from test_interrupted_anywhere import WAYS

    out = asked.out or default_path("calls")
    done: list[dict[str, Any]] = earlier(out, "ways")
    for way in WAYS[len(done) :]:
        calls, wrong = way.count(), list[str]()
        for at in range(calls):
            try:
                way.check(at)
            except AssertionError as error:
                wrong.append(str(error)[:300])
        done.append({**vars(way), "calls": calls, "wrong": wrong})
        total = {
            "calls": sum(each["calls"] for each in done),
            "wrong": sum(len(each["wrong"]) for each in done),
            "complete": len(done) == len(WAYS),
        }
        save(out, "calls", "tests.endurance", {**total, "ways": done})
    return min(1, total["wrong"])


def _ctrl_c(asked: argparse.Namespace) -> int:
    """In pieces: each begins where the one before ended. Those that came too late do not count."""
    sys.path.insert(0, str(CHECKOUT / "tests"))  # as pytest does
    from test_interrupted_anywhere import check_one_ctrl_c

    out = asked.out or default_path("ctrl-c")
    pieces = earlier(out, "pieces")
    first = sum(piece["times"] for piece in pieces)
    left = asked.times - sum(piece["interrupted"] for piece in pieces)
    end = time.monotonic() + 60 * asked.minutes
    dice, wrong = random.Random(f"{asked.seed} {first}"), list[str]()
    turn, interrupted = first, 0
    while interrupted < left and time.monotonic() < end:
        try:
            interrupted += check_one_ctrl_c(turn, dice)
        except AssertionError as error:
            wrong.append(f"{turn}: {str(error)[:300]}")
        turn += 1
    piece = {"first": first, "times": turn - first, "interrupted": interrupted}
    pieces.append({**piece, "seed": asked.seed, "wrong": wrong})
    total = {
        "times": turn,
        "interrupted": sum(piece["interrupted"] for piece in pieces),
        "wrong": sum(len(piece["wrong"]) for piece in pieces),
    }
    save(out, "ctrl-c", "tests.endurance", {**total, "pieces": pieces})
    print(total)
    return min(1, total["wrong"])


if __name__ == "__main__":
    raise SystemExit(main())
