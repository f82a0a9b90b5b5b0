"""`python -m tests.fuzz --minutes 60`: damaged files and values at doors by chance, until the time
is up. Says the seed first and each finding as it comes; ends with 1 if there was any."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from tests.long_runs import earlier, save

from .damage import Kinds, attempt_at
from .doors import NAMES, Doors, Target, lines, wrong
from .server import fuzzed_server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", type=Path, help="a JSON to add this run to")
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    dice, end = random.Random(asked.seed), time.monotonic() + 60 * asked.minutes
    targets, values = [Target.of(line) for line in lines("targets.txt")], lines("values.txt")
    tried, found = 0, list[str]()
    with tempfile.TemporaryDirectory() as folder, fuzzed_server() as server:
        kinds, doors = Kinds(Path(folder)), Doors()
        while time.monotonic() < end:
            tried += 1
            kind = dice.random()
            if kind < 0.25:
                problem = server.chance(dice)
            elif kind < 0.6:
                target, two = dice.choice(targets), dice.choices(values, k=2)
                # beside the values themselves, lists of two of them; a function is the user's own
                # code, and what it raises is the user's
                code = any(callable(eval(each, dict(NAMES))) for each in two)
                line = two[0] if code or dice.random() < 0.5 else f"[{', '.join(two)}]"
                value = eval(line, dict(NAMES))
                problem = wrong(lambda: doors.call(target, value), may_succeed=True)  # noqa: B023
                problem = problem and f"{target.door} {target.name}={line}: {problem}"
            else:
                where = Path(folder) / f"damaged-{tried}"
                problem = attempt_at(kinds, dice.choice(sorted(kinds.open)), dice, where)
            if problem is None and tried % 1000 == 0:
                problem = wrong(server.well, may_succeed=True)
            if problem:
                found.append(problem)
                print(problem, flush=True)
    print(f"{tried} attempts, {len(found)} findings")
    if asked.out:
        run = {"seed": asked.seed, "minutes": asked.minutes, "attempts": tried, "findings": found}
        save(asked.out, "fuzz", "tests.fuzz", {"runs": [*earlier(asked.out, "runs"), run]})
    return min(1, len(found))


if __name__ == "__main__":
    raise SystemExit(main())
