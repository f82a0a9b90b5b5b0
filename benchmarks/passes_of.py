"""Passes of one checkout's code, in a process that stays: for each line with a number of tokens the
seconds of one pass. Run by `scripts/bench checkouts`, which puts that checkout's package first.
"""

from __future__ import annotations

import sys

from selfspec import LLM
from selfspec.bench.costs import Passes
from selfspec.bench.prompts import prompt_ids


def main(folder: str, weights: str, behind: int, longest: int, threads: int) -> None:
    llm = LLM.from_pretrained(folder, weights=weights, threads=threads, profile=None)
    passes = Passes(llm.model, prompt_ids(llm.encode, behind + longest), behind, longest)
    for tokens in map(int, sys.stdin):
        passes.run(tokens)  # the others' turns left nothing of this one's in the caches
        print(passes.contestant(tokens)(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
