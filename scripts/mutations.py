"""Breaks important lines one at a time and sees whether a test notices. `mutations.txt` lists them.

    scripts/mutate                    all of them (under two hours), into benchmarks/results
    scripts/mutate --only cache-      those whose names contain that
    scripts/mutate --minutes 10       stop then; the same command goes on
    scripts/mutate --list

Works on a copy, so the checkout stays as it is. A run that is interrupted goes on. Ends with 1 if
a mistake survives that has no reason beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from selfspec.bench.provenance import gather, scrub
from selfspec.core.files import write_whole

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
SECONDS = 240  # for the tests of one mistake; more may be a hang, which is noticed too
OF_TIME = re.compile("time|second|slow|hang|late", re.I)  # failures that load can bring about


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


@dataclass(frozen=True)
class Done:
    """How tests ended."""

    code: int | None
    """None if they did not end."""
    said: str

    @property
    def failed(self) -> list[str]:
        """What pytest says of tests that failed."""
        lines = self.said.splitlines()
        return [line for line in lines if line.startswith(("FAILED tests", "ERROR tests"))]


class Tests:
    """Runs tests of a copy of the checkout, until the first that fails."""

    def __init__(self, copy: Path) -> None:
        self.copy = copy
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy / "src"), str(copy)])}
        environment |= {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"SELFSPEC_CACHE": str(copy / "cache")}
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "tested.py")],
            **{"cwd": copy, "env": environment, "bufsize": 0},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def close(self) -> None:
        """End what runs."""
        self._process.kill()
        self._process.wait()

    def run(self, tests: list[str]) -> Done:
        """These files, or this test."""
        said = self.copy / "said.txt"
        said.unlink(missing_ok=True)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not demo and not gpu"]
        given, answers = self._process.stdin, self._process.stdout
        assert given and answers
        given.write(json.dumps([str(said), *options, *tests]).encode() + b"\n")
        child = int(answers.readline())
        ended = False
        try:
            # Seconds of our own waiting: what stops both of us, a suspended machine or SIGSTOP,
            # counts for one at the most.
            for _ in range(SECONDS):
                if ended := bool(select.select([answers], [], [], 1)[0]):
                    break
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        code = int(answers.readline())
        return Done(code if ended else None, said.read_text(encoding="utf-8", errors="replace"))


def verdict(tests_of: Tests, mutation: Mutation) -> str:
    """What the tests say of one mistake. Those that fail or hang have to pass without it, and what
    ran out of time has to do so again."""
    tests = [f"tests/{test}" for test in mutation.tests]
    done = broken(tests_of, mutation, tests)
    if done.code == 0:
        return "survives, as it may" if mutation.why else "survives"
    if done.code is None or done.code < 0:
        whole, what = tests_of.run(tests), "it hangs" if done.code is None else "it crashes"
        return f"noticed: {what}" if whole.code == 0 else f"unclear: {what} without it as well"
    if not done.failed:
        return f"unclear: pytest ended with {done.code}"
    what = scrub(done.failed[0])[:160]
    test = done.failed[0].split(" ", 1)[1].split(" - ")[0]
    if tests_of.run([test]).code != 0:
        return f"unclear: fails without the mistake as well: {what}"
    if OF_TIME.search(what) and broken(tests_of, mutation, [test]).code == 0:
        return f"unclear: passes the second time: {what}"
    return f"noticed: {what}"


def broken(tests_of: Tests, mutation: Mutation, tests: list[str]) -> Done:
    """Tests with the mistake made."""
    path = tests_of.copy / mutation.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutation.applied(source), encoding="utf-8")
    try:
        return tests_of.run(tests)
    finally:
        path.write_text(source, encoding="utf-8")


@contextmanager
def copy_of_the_checkout() -> Iterator[Path]:
    """A folder in which lines can be broken."""
    with tempfile.TemporaryDirectory(prefix="selfspec-mutate-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "results")
                shutil.copytree(ROOT / name, copy / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, copy / name)
        yield copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--out", type=Path, default=RESULT, help="the JSON to write or go on with")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin none after these"
    )
    asked, start = parser.parse_args(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the tests that run end with us
    chosen = [each for each in mutations() if asked.only in each.name]
    for each in chosen:
        each.applied((ROOT / each.file).read_text(encoding="utf-8"))
    if asked.list:
        print("\n".join(f"{each.name:28} {each.file}" for each in chosen))
        return 0
    known = json.loads(asked.out.read_text())["mutations"] if asked.out.is_file() else {}
    with copy_of_the_checkout() as copy, closing(Tests(copy)) as tests_of:
        for each in chosen:
            if each.name in known and same(known[each.name], each):
                continue
            begin = time.monotonic()
            if begin - start > 60 * asked.minutes:
                print("the time is up")
                return 1
            said = verdict(tests_of, each)
            seconds = round(time.monotonic() - begin)
            known[each.name] = {**asdict(each), "verdict": said, "seconds": seconds}
            made = vars(gather(shlex.join(["scripts/mutate", *sys.argv[1:]]), 1, {}))
            result = {"kind": "mutations", "provenance": made, "mutations": known}
            write_whole(asked.out, json.dumps(result, indent=1) + "\n")
            print(f"{each.name:28} {said} ({seconds} s)", flush=True)
    bad = [each.name for each in chosen if not known[each.name]["verdict"].startswith("noticed")]
    left = [name for name in bad if known[name]["verdict"] != "survives, as it may"]
    print(f"{len(chosen)} mistakes, {len(chosen) - len(bad)} noticed; without a reason: {left}")
    return min(1, len(left))


def same(known: dict[str, object], mutation: Mutation) -> bool:
    """Whether that mistake was made already, with these tests."""
    said = str(known["verdict"])
    now = asdict(mutation)
    settled = said.startswith("noticed") or said == "survives, as it may"
    return settled and all(known[name] == now[name] for name in now)


if __name__ == "__main__":
    sys.exit(main())
