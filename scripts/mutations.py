"""Breaks important lines one at a time and sees whether a test notices. `mutations.txt` lists them.

    scripts/mutate                    all of them (under two hours), into benchmarks/results
    scripts/mutate --only cache-      those whose names contain that
    scripts/mutate --list

Works on a copy, so the checkout stays as it is. A run that is interrupted goes on. Ends with 1 if
a mistake survives that has no reason beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "scripts" / "mutations.txt"
RESULT = ROOT / "benchmarks" / "results" / "mutations.json"
COPIED = (
    "src",
    "tests",
    "docs",
    "examples",
    "scripts",
    "benchmarks",
    "pyproject.toml",
    "README.md",
)
SECONDS = 240  # for the tests of one mistake; more is a hang, which is noticed too


@dataclass
class Mutation:
    """A paragraph of the list."""

    name: str
    file: str
    tests: list[str]
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    why: str = ""

    def applied(self, source: str) -> str:
        """The source with the mistake."""
        old, new = "\n".join(self.old), "\n".join(self.new)
        if source.count(old) != 1:
            found = source.count(old)
            raise SystemExit(f"{self.name}: {old!r} stands {found} times in {self.file}, not once")
        return source.replace(old, new)


def mutations() -> list[Mutation]:
    """All paragraphs."""
    found: list[Mutation] = []
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        mark, text = line[:2], line[2:]
        if mark == "- ":
            found[-1].old.append(text)
        elif mark == "+ ":
            found[-1].new.append(text)
        elif mark == "? ":
            found[-1].why = text
        else:
            name, file, tests = (part.strip() for part in line.split("|"))
            found.append(Mutation(name, f"src/selfspec/{file}", tests.split()))
    return found


def verdict(copy: Path, tests: list[str]) -> str:
    """What the tests say of the copy as it is."""
    files = [f"tests/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy / "src"), str(copy)])}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"SELFSPEC_CACHE": str(copy / "cache")}
    try:
        done = subprocess.run(
            [*command, "-m", "not demo and not gpu"],
            **{"cwd": copy, "env": environment, "capture_output": True, "text": True},
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "noticed: it hangs"
    if done.returncode == 0:
        return "survives"
    last = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    what = last[0] if last else f"pytest ended with {done.returncode}"
    return f"noticed: {what[:160]}" if done.returncode in (1, 2) else f"unclear: {what[:160]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--out", type=Path, default=RESULT, help="the JSON to write or go on with")
    asked = parser.parse_args()
    chosen = [each for each in mutations() if asked.only in each.name]
    for each in chosen:
        each.applied((ROOT / each.file).read_text(encoding="utf-8"))
    if asked.list:
        print("\n".join(f"{each.name:28} {each.file}" for each in chosen))
        return 0
    results = json.loads(asked.out.read_text()) if asked.out.is_file() else {"mutations": {}}
    known = results["mutations"]
    with tempfile.TemporaryDirectory(prefix="selfspec-mutate-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(ROOT / name, copy / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, copy / name)
        for each in chosen:
            if each.name in known and known[each.name]["old"] == each.old:
                continue
            path = copy / each.file
            source, begin = path.read_text(encoding="utf-8"), time.monotonic()
            path.write_text(each.applied(source), encoding="utf-8")
            said = verdict(copy, each.tests)
            path.write_text(source, encoding="utf-8")
            if said == "survives" and each.why:
                said = "survives, as it may"
            seconds = round(time.monotonic() - begin)
            known[each.name] = {**asdict(each), "verdict": said, "seconds": seconds}
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{each.name:28} {said} ({seconds} s)", flush=True)
    bad = [each.name for each in chosen if not known[each.name]["verdict"].startswith("noticed")]
    left = [name for name in bad if known[name]["verdict"] != "survives, as it may"]
    print(f"{len(chosen)} mistakes, {len(chosen) - len(bad)} noticed; without a reason: {left}")
    return min(1, len(left))


if __name__ == "__main__":
    sys.exit(main())
