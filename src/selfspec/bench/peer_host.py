"""The peer's side of the protocol: run as `python -P peer_host.py PEER_FILE`, in the peer's own
environment.

Speaks JSON lines: {"load": folder, "dtype": "float32", "threads": 2} is answered {"ready": true,
"versions": {...}}, then {"generate": [ids], "max_new_tokens": n, "eos": [ids]} is answered
{"tokens": [ids]}; anything that goes wrong, {"error": "..."}. {"batch": [[ids], ...]} asks for
several rows at once, {"echo": x} for nothing, {"call": name, "arguments": {...}} for another method
of the peer. A request may carry "options", which become keyword arguments, and an answer "counts",
what the peer set as `self.counts`. A peer that calls `self.first(count)` when its first tokens are
there, lets the harness see when; `self.first(count, ago)` says it so many seconds later. A peer
file defines `class Peer` with `packages` (whose versions are worth recording), `load(folder, dtype,
threads)` and `generate(ids, max_new_tokens, eos) -> list[int]`: greedy, new tokens only, an end
token included. It may have `generate_batch(rows, ...) -> list[list[int]]`, `precision`, if that is
not the dtype it is told, and a `load` with `device` and with `weights`, the kinds of weights that
are no dtype ("int8", "int4", "stored"). With `read(ids) -> (loss, ids)` it says how likely it finds
a text: the summed loss of all ids but the first, and what was likeliest in their places.
Uses the standard library alone, since a peer's environment need not contain selfspec, and takes no
time: the harness does.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO


def open_peer(path: Path) -> Any:
    """The `Peer` that a peer file defines."""
    spec = importlib.util.spec_from_file_location("benchmark_peer", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Peer()


def answer(peer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Do what one line asks."""
    if "load" in request:
        load(peer, request)
        return {
            "ready": True,
            "versions": package_versions(peer.packages),
            "precision": getattr(peer, "precision", request["dtype"]),
        }
    if "echo" in request:
        return {"echo": request["echo"]}
    if "call" in request:
        return {"returned": members(peer)[request["call"]](peer, **request["arguments"])}
    peer.counts = None
    asked = (request["max_new_tokens"], request["eos"])
    if "batch" not in request:
        tokens = peer.generate(request["generate"], *asked, **request.get("options", {}))
        return {"tokens": [int(token) for token in tokens], "counts": peer.counts}
    if "generate_batch" not in members(peer):
        raise NotImplementedError("this peer takes one prompt at a time")
    rows = peer.generate_batch(request["batch"], *asked, **request.get("options", {}))
    return {"rows": [[int(token) for token in row] for row in rows], "counts": peer.counts}


def load(peer: Any, request: dict[str, Any]) -> None:
    """Tell the peer which model, and on which device and in which kind of weights if it can be
    told."""
    told = {name: request[name] for name in ("device", "weights") if name in request}
    takes = inspect.signature(peer.load).parameters
    if "device" in told and "device" not in takes:
        raise NotImplementedError(f"this peer runs on the CPU here, not on {told['device']}")
    if "weights" in told and "weights" not in takes:
        raise NotImplementedError(f"this peer's weights are of a dtype, not {told['weights']}")
    peer.load(request["load"], request["dtype"], request["threads"], **told)
    # as servers do: a search for garbage in all that was loaded takes a third of a second, and
    # falls on whoever is asked next
    gc.freeze()


def members(peer: Any) -> dict[str, Any]:
    """What the peer's class defines."""
    return {
        name: value for kind in reversed(type(peer).__mro__) for name, value in vars(kind).items()
    }


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed. One that merely lies on the path has no version."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def serve(path: Path, requests: TextIO, replies: TextIO) -> None:
    """Answer line by line until the harness closes its end. A failure is answered too: the harness
    decides what to make of it."""
    peer = None

    def first(count: int = 1, ago: float = 0.0) -> None:
        replies.write(json.dumps({"first": count, "ago": ago}) + "\n")
        replies.flush()

    for line in requests:
        try:
            if peer is None:
                peer = open_peer(path)
                peer.first = first
            reply = answer(peer, json.loads(line))
        except Exception as error:  # noqa: BLE001  (what foreign code raises is its result)
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to stderr and cannot be mistaken for an answer
    serve(Path(sys.argv[1]), sys.stdin, channel)
