"""What one process takes that loads a model and answers one prompt. Run by `scripts/bench memory`.

Of what is large it imports `LLM` and nothing else, as a user's program would, so that no module of
the benchmarks hides what a load has to import, or counts as part of it. Linux only.
"""

from __future__ import annotations

import json
import os
import sys

from selfspec import LLM
from selfspec.bench.meters import PeakMemory
from selfspec.errors import OptionError


def main(folder: str, weights: str, prompt: str, tokens: int, options: str) -> None:
    memory = PeakMemory(os.getpid())
    sizes = {"imported": memory.now()}
    memory.start()
    llm = LLM.from_pretrained(folder, weights=weights, profile=None)
    sizes |= {"loaded": memory.now(), "loading": memory.read()}
    memory.start()
    made = llm.generate(prompt, max_new_tokens=tokens, **json.loads(options))
    sizes |= {"answered": memory.now(), "answering": memory.read()}
    if None in sizes.values():
        raise OptionError("this system does not say how much memory a process takes; use Linux")
    print(json.dumps({**sizes, "tokens": made.stats.new_tokens}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
