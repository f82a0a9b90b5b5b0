"""Values at the doors of the API: what is tried, and what may come of it."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from selfspec import LLM, SamplingParams
from selfspec.errors import SelfspecError
from selfspec.testing import tiny_llm, tiny_model, tiny_tokenizer

HERE = Path(__file__).parent
SECONDS = 5
PROMPT = [104, 105, 32, 104]
SHORT: dict[str, Any] = {"max_new_tokens": 3, "eos": [], "draft": None}


class Bad:
    """An object whose repr raises."""

    def __repr__(self) -> str:
        raise ZeroDivisionError

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class Endless(Sequence[int]):
    """A list that says it is long. Whoever reads all of it is slow to say no."""

    def __len__(self) -> int:
        return 10**5

    def __getitem__(self, index: Any) -> Any:
        return 1.5


NAMES: dict[str, Any] = {
    **{"math": math, "np": np, "torch": torch, "Path": Path, "Bad": Bad, "Endless": Endless}
}


def lines(name: str) -> list[str]:
    """The cases of a file."""
    text = (HERE / name).read_text(encoding="utf-8").splitlines()
    return [line for line in text if line.strip() and not line.startswith("#")]


class TooLong(BaseException):
    """A call worked for more than five seconds, or never came back."""


@contextmanager
def in_time(seconds: float = SECONDS) -> Iterator[None]:
    """What takes longer fails: so many seconds of the processor, which other work on the machine
    does not lengthen, or six times as many by the clock."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"longer than {seconds} s")

    timers = (
        (signal.ITIMER_PROF, signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, 6 * seconds),
    )
    before = [signal.signal(sent, stop) for _, sent, _ in timers]
    for timer, _, after in timers:
        signal.setitimer(timer, after)
    try:
        yield
    finally:
        for (timer, sent, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(sent, handler)


# --------------------------------------------------------------------------------- conditions


def whole(v: Any) -> bool:
    return isinstance(v, int | np.integer) and not isinstance(v, bool | np.bool_)


def number(v: Any) -> bool:
    return whole(v) or (isinstance(v, float | np.floating) and math.isfinite(v))


def text(v: Any) -> bool:
    return (isinstance(v, str) and v.isprintable()) or v == "\0"


def texts(v: Any) -> bool:
    return isinstance(v, list | tuple | range) and all(map(text, v))


def ids(v: Any) -> bool:
    if isinstance(v, np.ndarray | torch.Tensor):
        return v.ndim == 1 and ("int" in str(v.dtype) or len(v) == 0)
    return isinstance(v, list | tuple | range) and all(map(whole, v))


def several(v: Any) -> bool:
    return isinstance(v, list | tuple) and all(ids(each) or text(each) for each in v)


def conversation(v: Any) -> bool:
    return bool(v == [{"role": "user", "content": "hello"}])


CONDITIONS = {
    **{"whole": whole, "number": number, "text": text, "texts": texts, "ids": ids},
    **{"several": several, "conversation": conversation, "torch": torch, "np": np, "maybe": True},
}


@dataclass(frozen=True)
class Target:
    """A line of targets.txt."""

    door: str
    name: str
    condition: str

    @classmethod
    def of(cls, line: str) -> Target:
        return cls(*(part.strip() for part in line.split("|", 2)))

    def takes(self, value: Any) -> bool:
        try:
            with np.errstate(all="ignore"):
                return bool(eval(self.condition, {**CONDITIONS, "v": value}))
        except (TypeError, ValueError, RuntimeError, ZeroDivisionError):  # it cannot be compared
            return False


class Doors:
    """A tiny model, and the calls that values are passed to."""

    def __init__(self) -> None:
        self.llm = tiny_llm(max_position_embeddings=64)
        self.model = tiny_model(max_position_embeddings=64)

    def call(self, target: Target, value: Any) -> object:
        """Pass the value there."""
        door, given = target.door, {target.name: value}
        special: Mapping[str, Callable[[], object]] = {
            "generate": lambda: self._generate(given),
            "stream": lambda: list(self.llm.stream(**{**SHORT, **given})),
            "chat": lambda: self.llm.chat(**{**SHORT, **given}),
            "sampling": lambda: self._generate({"sampling": _params(given)}),
            "fixed": lambda: self._generate(_controlled("fixed", given)),
            "confidence": lambda: self._generate(_controlled("confidence", given)),
            "load": lambda: self._load(given),
        }
        if door in special:
            return special[door]()
        return self._generate({"draft": door, "draft_options": given})

    def _load(self, given: Mapping[str, Any]) -> object:
        threads = torch.get_num_threads()
        try:
            return LLM.from_pretrained(
                **{"model": self.model, "tokenizer": tiny_tokenizer(), **given}
            )
        finally:
            torch.set_num_threads(threads)

    def _generate(self, given: Mapping[str, Any]) -> object:
        return self.llm.generate(**{"prompts": PROMPT, **SHORT, **given})


def _params(given: Mapping[str, Any]) -> SamplingParams:
    greedy = {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"}
    base = {} if greedy & set(given) else {"temperature": 1.0}
    return SamplingParams(**{**base, **given})


def _controlled(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    return {"draft": "ngram", "control": name, "control_options": given}


def wrong(attempt: Callable[[], object], may_succeed: bool) -> str | None:
    """What is wrong with what came of an attempt, or None. A machine with other work may stand
    still, so what takes too long is tried once more."""
    said = _wrong(attempt, may_succeed)
    return _wrong(attempt, may_succeed) if said and said.startswith("hangs") else said


def _wrong(attempt: Callable[[], object], may_succeed: bool) -> str | None:
    try:
        with in_time():
            attempt()
    except SelfspecError as error:
        said = str(error)
        said.encode()  # it can be printed
        return None if len(said) > 20 else f"says next to nothing: {said!r}"
    except TooLong as error:
        return f"hangs: {error}"
    except BaseException as error:  # noqa: BLE001  (this is what is looked for)
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None if may_succeed else "was taken without a word"
