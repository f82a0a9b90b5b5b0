"""python -m tests.same_bits [--record]: compare with the record, or make it anew; see __init__."""

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


def compare() -> None:
    failed = False
    for variant in record.VARIANTS:
        if reason := record.why_not(variant):
            print(f"{variant}: skipped: {reason}")
            continue
        verdict = record.compare(record.finish(record.start(variant)), record.read(), variant)
        print(f"{variant}: {'FAILED' if verdict.failed else 'ok'}. {verdict}")
        failed |= verdict.failed
    sys.exit(failed)


match sys.argv[1:]:
    case ["--compute", turn, march]:
        compute(int(turn), march)
    case ["--record"]:
        record.make_anew()
    case []:
        compare()
    case _:
        sys.exit(f"{__doc__}\nunknown arguments: {' '.join(sys.argv[1:])}")
