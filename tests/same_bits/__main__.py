"""Compare with the record, or make it anew; __init__.py says how and when."""

from __future__ import annotations

import json
import sys

from . import record


def compute(turn: int, march: str) -> None:
    """One variant, in this process; its JSON is the last line that is printed."""
    import torch
    import transformers

    from . import cases, hands

    hands.compile_for(march)
    found = cases.computed(turn)
    cpu = record.cpu()
    made = {
        "maker": cpu.get("vendor_id", "unknown"),
        "processor": cpu.get("model name", "unknown"),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "compiler": hands.compiler(),
    }
    print(json.dumps({"made": made, **found}))


def compare(variants: list[str]) -> None:
    reasons = {variant: record.why_not(variant) for variant in variants}
    able = [variant for variant, reason in reasons.items() if not reason]
    processes = {variant: record.start(variant) for variant in able}
    failed = False
    for variant, reason in reasons.items():
        if reason:
            print(f"{variant}: skipped: {reason}")
            continue
        verdict = record.compare(record.finish(processes[variant]), record.read(), variant)
        print(f"{variant}: {'FAILED' if verdict.failed else 'ok'}. {verdict}")
        failed |= verdict.failed
    sys.exit(failed)


match sys.argv[1:]:
    case ["--compute", turn, march]:
        compute(int(turn), march)
    case ["--record"]:
        record.make_anew()
    case names if set(names) <= record.VARIANTS.keys():
        compare(names or list(record.VARIANTS))
    case other:
        known = ", ".join(record.VARIANTS)
        sys.exit(f"{' '.join(other)}: give --record, some of {known}, or nothing for all of these")
