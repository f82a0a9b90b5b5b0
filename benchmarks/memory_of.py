"""What one process takes that loads a model and answers one prompt. Run by `scripts/bench memory`.

It imports `LLM` and nothing else, as a user's program would, so that no module of the benchmarks
hides what a load has to import, or counts as part of it. Linux only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from selfspec import LLM


def resident(line: str = "VmRSS") -> int:
    """Bytes that are resident now, or at most since `forget` (`VmHWM`)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{line}:")[1].split()[0]) * 1024


def forget() -> None:
    """From now on count the largest resident size anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def main(folder: str, weights: str, prompt: str, tokens: int, options: str) -> None:
    sizes = {"imported": resident()}
    forget()
    llm = LLM.from_pretrained(folder, weights=weights, profile=None)
    sizes |= {"loading": resident("VmHWM"), "loaded": resident()}
    forget()
    made = llm.generate(prompt, max_new_tokens=tokens, **json.loads(options))
    sizes |= {"answering": resident("VmHWM"), "answered": resident()}
    print(json.dumps({**sizes, "tokens": made.stats.new_tokens}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
