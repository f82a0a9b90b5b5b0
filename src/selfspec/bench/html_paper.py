"""The page of a paper's table: its columns beside ours, what cannot be compared, and how ours was
measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .html import facts, heading, page, paragraph, table
from .paper import find_table
from .paper_report import cells


def paper_page(result: Mapping[str, Any]) -> str:
    """The whole file."""
    spec, where = find_table(result["table"]), result["provenance"]
    header, lines = cells(spec, result)
    subtitle = f"{spec.paper}, {spec.name}; ours: {result['model']}, up to {result['new_tokens']} new tokens, {where['cpu']}"
    body = [table(header, lines)]
    apart = ([f"Not in the source: {spec.missing}"] if spec.missing else []) + list(spec.apart)
    body += [heading("What cannot be compared"), *(paragraph(each) for each in apart)]
    pairs = {
        "Command": where["command"],
        "Raw seconds": ", ".join(result["runs"]) or "none: nothing was timed",
        "Commit": (where["commit"] or "unknown")[:12],
        "Date": where["date"],
        "Versions": ", ".join(
            f"{name} {version}" for name, version in sorted(where["versions"].items())
        ),
    }
    return page(spec.title, subtitle, [*body, heading("How ours was measured"), facts(pairs)])
