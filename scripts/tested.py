"""Runs pytest again and again, each time in a process forked from this one, which has imported
what all tests import. For `mutations.py`. Knows nothing of selfspec: it has to be read anew.

A line of input is a list: a file for what is said, then pytest's arguments. It is answered with
the process, and with its exit code when it has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from collections.abc import Sequence

IMPORTED = (
    *("gguf", "hypothesis", "numpy", "psutil", "pytest", "safetensors.torch", "torch"),
    *("transformers", "transformers.generation", "transformers.models.llama.modeling_llama"),
)
MEMORY = 10 << 30  # bytes of one run's data


def main() -> None:
    """Until the input ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        said, *arguments = json.loads(line)
        child = os.fork()
        if not child:
            _test(said, arguments)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _test(said: str, arguments: Sequence[str]) -> None:
    """In the forked process, which ends here."""
    code = 3
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # a mistake may ask for all
        log = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1), os.dup2(log, 2)
        import pytest

        code = int(pytest.main(list(arguments)))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
