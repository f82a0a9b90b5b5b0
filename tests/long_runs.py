"""What a long run by hand leaves in benchmarks/results: what it found, and where it was made."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfspec.bench.peer_host import package_versions
from selfspec.bench.provenance import CHECKOUT, cpu_name, gather, slug
from selfspec.core.files import write_whole


def default_path(kind: str) -> Path:
    """Among the committed results, named after this machine."""
    return CHECKOUT / "benchmarks" / "results" / f"{kind}-{slug(cpu_name())}.json"


def save(out: Path, kind: str, module: str, facts: Mapping[str, Any]) -> None:
    """Write a result whole."""
    versions = package_versions(("torch", "transformers"))
    made = gather(shlex.join(["python", "-m", module, *sys.argv[1:]]), 1, versions)
    result = {"kind": kind, "provenance": vars(made), **facts}
    write_whole(out, json.dumps(result, indent=1) + "\n")
    print(f"Written: {out.name}", flush=True)


def earlier(out: Path, name: str) -> list[Any]:
    """What earlier pieces of the same run left under a name."""
    if not out.is_file():
        return []
    found: list[Any] = json.loads(out.read_text(encoding="utf-8"))[name]
    return found
