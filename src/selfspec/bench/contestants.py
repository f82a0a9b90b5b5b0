"""Who takes part: engines with methods, as they are written on the command line, checked before
anything is loaded.

Ours are drafters and controllers by name: `auto`, `ngram:longest=3@fixed:tokens=6`. A peer's are
what its class says under `methods`, each with the options that it takes:
`transformers/lookup:tokens=4`, `transformers/all`. Drafts a round (K) and the exit layer are filled
in where they were left open, so that a name says at which K an acceptance was measured. Loads no
peer.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.options import value_of
from ..draft.registry import resolve
from ..errors import OptionError, nearest
from .peers import PeerSpec, choose
from .schema import OURS, PLAIN, engine_of, method_of

DRAFTS = 4  # K where nothing is said: what our own `fixed` drafts by default


@dataclass(frozen=True)
class Contestant:
    """One engine with one method. `options` go to the peer's `generate`."""

    name: str
    engine: str
    method: str
    options: Mapping[str, Any]


def own_options(text: str) -> dict[str, Any]:
    """What `LLM.generate` is told for a method of ours,
    `name:option=value@controller:option=value`."""
    if text == PLAIN:
        return {"draft": None}
    draft, _, control = text.partition("@")
    name, settings = _named(draft)
    options: dict[str, Any] = {"draft": name, "draft_options": settings}
    if control:
        options["control"], options["control_options"] = _named(control)
    return options


def _named(text: str) -> tuple[str, dict[str, Any]]:
    name, _, rest = text.partition(":")
    pairs = (item.partition("=") for item in rest.split(",") if item)
    return name, {key: value_of(value) for key, _, value in pairs}


def drafts_at_most(method: str) -> int:
    """How much a method of ours with a fixed length drafts; 0 where it decides itself."""
    drafts = own_options(method).get("control_options", {}).get("tokens", 0)
    return drafts if isinstance(drafts, int) else 0


def contestants(
    methods: Sequence[str], peers: Sequence[str], known: Mapping[str, PeerSpec], layers: int
) -> list[Contestant]:
    """Our plain decoding, our methods, then the peers' as they were named; each once."""
    contestants = [_own(text) for text in (PLAIN, *methods)]
    for text in peers:
        engine, method = engine_of(text), method_of(text)
        (spec,) = choose([engine], known)
        if engine == OURS:
            contestants.append(_own(method or PLAIN))
        else:
            contestants += _of_peer(engine, method, methods_of(spec.folder / "peer.py"), layers)
    return list({contestant.name: contestant for contestant in contestants}.values())


def _own(text: str) -> Contestant:
    options = own_options(text)
    names = ("draft", "draft_options", "control", "control_options")
    resolve(*(options.get(name) for name in names))
    return Contestant(f"{OURS}/{text}", OURS, text, {"method": text})


def methods_of(file: Path) -> dict[str, tuple[str, ...]]:
    """What a peer's class says under `methods`: names with their options; only plain decoding where
    it says nothing."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "methods":
            said = ast.literal_eval(node.value)
            return {name: tuple(options) for name, options in said.items()}
    return {PLAIN: ()}


def _of_peer(
    engine: str, text: str, known: Mapping[str, tuple[str, ...]], layers: int
) -> list[Contestant]:
    if text == "all":
        return [each for name in known for each in _of_peer(engine, name, known, layers)]
    method, options = _named(text or next(iter(known)))
    if method not in known:
        raise OptionError(f"the peer {engine!r} has no method {method!r}; {nearest(method, known)}")
    takes = known[method]
    for name in options:
        if name not in takes:
            near = nearest(name, takes) if takes else "it has none"
            raise OptionError(f"{engine}/{method} has no option {name!r}; {near}")
    if "tokens" in takes:
        options.setdefault("tokens", DRAFTS)
    if "layer" in takes and "model" not in options:
        options.setdefault("layer", max(1, layers // 4))
    shown = {key: Path(value).name if key == "model" else value for key, value in options.items()}
    said = ",".join(f"{name}={value}" for name, value in shown.items())
    name = f"{engine}/{method}{':' + said if said else ''}"
    return [
        Contestant(name, engine, method, {} if method == PLAIN else {"method": method, **options})
    ]
