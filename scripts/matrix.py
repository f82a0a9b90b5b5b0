"""The test matrix: the ends of the version ranges that pyproject.toml allows, each in an
environment of its own under .matrix/.

    lowest   every dependency at its lower bound, the oldest Python
    pinned   the versions of constraints.txt, a Python in between
    newest   whatever pip finds newest, the newest Python, and the quantisation libraries that
             run on a CPU

Run as `scripts/test --matrix` (or with names of rows); each row ends with a line of the table in
docs/models.md. On Linux the package index has torch with CUDA only, 6 GB a row; a folder of CPU
wheels (PIP_FIND_LINKS) is used where there is one.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = {"lowest": "3.11", "pinned": "3.12", "newest": "3.13"}
EXTRAS = ("peft",)
TOOLS = ("pytest", "hypothesis")
QUANTISERS = ("torchao", "bitsandbytes", "optimum-quanto")
SHOWN = (
    "torch",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "accelerate",
    "gguf",
    "peft",
    "numpy",
)
TESTS = (  # what touches other packages; the rest of the suite is our own arithmetic
    "tests/model/test_conformance.py",
    "tests/model/test_loading.py",
    "tests/model/test_gguf.py",
    "tests/model/test_unlisted.py",
    "tests/model/test_adapters.py",
    "tests/model/test_quantised.py",
    "tests/test_engine.py",
    "tests/test_llm.py",
)


def requirements(row: str, project: dict) -> list[str]:
    """What pip is asked for: the dependencies as they stand, or each at its lower bound."""
    asked = [
        *project["dependencies"],
        *(each for name in EXTRAS for each in project["optional-dependencies"][name]),
    ]
    if row != "lowest":
        return [*asked, *TOOLS, *(QUANTISERS if row == "newest" else ())]
    return [re.sub(r">=([\w.]+).*", r"==\1", each) for each in asked] + [*TOOLS]


def python_for(row: str, given: str | None) -> str:
    """The interpreter: the one given, or the one of that version on the PATH or in pyenv."""
    version = PYTHONS[row]
    pyenv = sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(
            f"versions/{version}.*/bin/python"
        )
    )
    for candidate in [given] if given else [*map(str, pyenv), f"python{version}"]:
        found = shutil.which(candidate)
        if (
            found
            and subprocess.run(
                [found, "-c", "import venv, ensurepip"], capture_output=True
            ).returncode
            == 0
        ):
            return found
    raise SystemExit(
        f"row {row} wants Python {version} and found none that can make environments; name one: "
        f"--python PATH"
    )


def environment(row: str, given: str | None) -> Path:
    """An environment with what the row asks for; kept for the next run."""
    folder = ROOT / ".matrix" / row
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([python_for(row, given), "-m", "venv", "--clear", folder], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    constraints = ["-c", str(ROOT / "constraints.txt")] if row == "pinned" else []
    print(f"== {row}: installing into {folder} (up to 6 GB with a torch for CUDA) ...", flush=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*pip, *constraints, *requirements(row, project)], check=True)
    return python


def versions(python: Path) -> list[str]:
    """The versions that were tested, Python's first."""
    program = (
        "import sys, importlib.metadata as m; "
        f"print(sys.version.split()[0], *map(m.version, {SHOWN!r}))"
    )
    return subprocess.run(
        [python, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()


def run(row: str, given: str | None) -> tuple[bool, str]:
    """Whether a row passed, and its line of the table."""
    python = environment(row, given)
    tested = dict(zip(("python", *SHOWN), versions(python), strict=True))
    print(f"== {row}: testing with {', '.join(map(' '.join, tested.items()))}", flush=True)
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [python, "-m", "pytest", "-q", "-m", "not demo", "-p", "no:cacheprovider", *TESTS]
    process = subprocess.Popen(command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    passed = process.wait() == 0
    result = re.sub(r" in [\d.]+s.*", "", last.strip("= "))
    result = ", ".join(
        part for part in result.split(", ") if not re.search("warning|deselected", part)
    )
    return passed, f"| {row} | {' | '.join(tested.values())} | {result} | {datetime.date.today()} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/test --matrix",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"of {', '.join(PYTHONS)}; all when none is named"
    )
    parser.add_argument("--python", help="the interpreter to use, for one row")
    options = parser.parse_args(arguments)
    rows = options.rows or list(PYTHONS)
    if unknown := [row for row in rows if row not in PYTHONS]:
        parser.error(f"unknown row {unknown[0]!r}; there are {', '.join(PYTHONS)}")
    results = [run(row, options.python) for row in rows]
    print(f"\n| row | python | {' | '.join(SHOWN)} | result | date |\n|{'---|' * (len(SHOWN) + 4)}")
    print("\n".join(line for _, line in results))
    return 0 if all(passed for passed, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
