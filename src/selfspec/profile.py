"""A profile: which ways of drafting pay for one model on one machine. A small JSON.

`selfspec tune` writes it, and whoever loads the same model there finds it. It changes the speed,
never the text. A profile of another model is refused; another machine's is used with a warning.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .core.door import shown
from .core.files import is_there, write_whole
from .core.json_text import from_json
from .core.machine import Machine
from .core.schema import Unfit, made
from .core.user_cache import cache_root
from .draft.auto import Auto
from .draft.base import Drafter
from .draft.registry import make_drafter, resolve
from .errors import OptionError, nearest
from .model.layered import LayeredModel

SCHEMA = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
LOOKUP = "hybrid"
"""The drafter that is always tried, since it costs next to nothing."""
GENERAL = "general"
"""The task of a profile that is for no task."""


@dataclass(frozen=True)
class Way:
    """A way of drafting, as `LLM.generate` is told, and how fast it is over plain decoding."""

    draft: str
    draft_options: dict[str, Any] = field(default_factory=dict)
    control: str | None = None
    control_options: dict[str, Any] = field(default_factory=dict)
    predicted: float | None = None
    """By costs and probe, where it could be."""
    measured: float | None = None
    """Timed in turns with plain decoding."""
    low: float | None = None
    high: float | None = None
    """The measured one's 95% interval."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `LLM.generate`."""
        names = ("draft", "draft_options", "control", "control_options")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        said = f"{self.draft}{_listed(self.draft_options)}"
        return said + (f" @ {self.control}{_listed(self.control_options)}" if self.control else "")


def _plainest(ways: Sequence[Way]) -> Way:
    """Of one drafter's ways, the fastest first: the one with the fewest options among those that
    cannot be told from the fastest, since the others' may have paid by chance."""
    least = ways[0].low or ways[0].measured or 0.0
    level = [way for way in ways if way.high is None or way.high >= least]
    return min(level, key=lambda way: len(way.draft_options))


def _listed(options: Mapping[str, Any]) -> str:
    def written(value: Any) -> str:
        return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return f"({', '.join(f'{k}={written(v)}' for k, v in options.items())})" if options else ""


@dataclass(frozen=True)
class Profile:
    """What a tuning found. `ways` are those that beat plain decoding, the fastest first."""

    schema: int
    task: str
    name: str
    model: dict[str, Any]
    """What `trained.files.signature` says of it."""
    weights: str
    machine: Machine
    text: str
    """Digest of the text that was probed."""
    verdict: str
    ways: tuple[Way, ...] = ()
    questions: tuple[str, ...] = ()
    """Digests of the questions that it was made with: those are no test of it."""

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise Unfit(f"its schema is {self.schema}, and this selfspec reads {SCHEMA}")
        named(self.task)
        for way in self.ways:
            resolve(**way.options)

    @property
    def file(self) -> str:
        """Its name among others of the same model."""
        return file_of(self.task, self.weights)

    def drafter(self, **options: Any) -> Drafter:
        """`auto` whose candidates are the drafters that were found. A lookup is always the first,
        since it costs next to nothing. `options`: further ones of `auto`."""
        found: dict[str, list[Way]] = {LOOKUP: []}
        for way in self.ways:
            found.setdefault(way.draft, []).append(way)
        chosen = [_plainest(ways or [Way(LOOKUP)]) for ways in found.values()]
        made = [make_drafter(way.draft, way.draft_options) for way in chosen]
        named = [each for each in made if each is not None and not each.decides_how_much]
        return Auto(candidates=named, **options)

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")


def file_of(task: str, weights: str) -> str:
    """The name of a profile for a task and a kind of weights."""
    return f"{task}-{weights}.json"


def named(task: str) -> str:
    """A task's name, if it can be one: it becomes a file's, and is told from files by its form."""
    if not NAME.fullmatch(task) or task in ("auto", "none"):
        raise OptionError(
            f"{shown(task)} cannot name a task; use letters, digits, - and _, at most 40, such as "
            "chat, and neither auto nor none"
        )
    return task


def kept_in(model: Mapping[str, Any]) -> Path:
    """The folder of the user's cache for profiles of a model, by its signature."""
    sizes = "-".join(str(model[name]) for name in ("family", "layers", "width", "vocabulary"))
    return cache_root() / "profiles" / sizes


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """The profile in a file."""
    file = Path(path).expanduser()
    if not is_there(file):
        raise OptionError(
            f"there is no profile {shown(str(path))}; make one with selfspec tune MODEL --out FILE"
        )
    try:
        return made(Profile, from_json(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, OptionError) as error:
        raise OptionError(
            f"{path} is no profile ({error}); make it again with selfspec tune MODEL --out FILE"
        ) from error


def profile_for(
    model: LayeredModel, asked: str | os.PathLike[str] | None, machine: Machine, weights: str
) -> Profile | None:
    """The profile that was asked for: a file, a task's name, "none", or "auto": what a tuning here
    left for this model and kind of weights, if anything."""
    if asked is None or asked == "none":
        return None
    if asked != "auto":
        from .trained.files import signature, unlike

        if not isinstance(asked, str | os.PathLike):
            raise OptionError(
                f"profile={shown(asked)} is no profile; give a file, a task's name, auto or None"
            )
        if isinstance(asked, str) and NAME.fullmatch(asked) and not is_there(Path(asked)):
            asked = _of_task(asked, signature(model), weights)
        found = read_profile(asked)
        if difference := unlike(found.model, signature(model)):
            raise OptionError(
                f"profile {asked} is of another model ({difference}); make one for this model: "
                "selfspec tune MODEL"
            )
        if found.machine != machine:
            warnings.warn(
                f"profile {asked} was made on another machine ({found.machine}), and what pays "
                "there may not pay here; selfspec tune makes one for this",
                stacklevel=3,
            )
        return found
    return _kept(model, machine, weights)


def _of_task(task: str, model: Mapping[str, Any], weights: str) -> Path:
    """Where a tuning here left the profile of that name."""
    folder = kept_in(model)
    if is_there(file := folder / file_of(task, weights)):
        return file
    end = f"-{weights}.json"
    known = sorted(each.name.removesuffix(end) for each in folder.glob(f"*{end}"))
    others = nearest(task, known) if known else "there is none so far"
    raise OptionError(
        f"there is no profile {task!r} of this model in {weights} here ({others}); make it with "
        f"selfspec tune MODEL --task {task}=FILE, or name a file"
    )


def _kept(model: LayeredModel, machine: Machine, weights: str) -> Profile | None:
    root = cache_root() / "profiles"
    if not root.is_dir():  # nobody ever tuned here
        return None
    from .trained.files import signature, unlike

    own = signature(model)
    file = kept_in(own) / file_of(GENERAL, weights)
    if not is_there(file):
        return None
    try:
        found = read_profile(file)
    except OptionError as error:
        warnings.warn(f"{error}; going on without it", stacklevel=4)
        return None
    same = not unlike(found.model, own) and found.machine == machine
    return found if same else None
