"""Joules of answers, by who gave them, where the machine counts any. Does not know who that is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from selfspec.bench.html import Table
from selfspec.bench.meters import EnergyMeter


@dataclass
class Spent:
    """Of whole answers, their prompts included."""

    joules: float = 0.0
    seconds: float = 0.0


@dataclass
class Metering:
    """The answers of one question, which are written down together."""

    meter: EnergyMeter
    taken: dict[str, Spent] = field(default_factory=dict)

    def of(self, name: str, answer: Callable[..., Any], *prompt: Any, **options: Any) -> Any:
        """What `answer` gives; its joules are kept under that name."""
        begin = time.perf_counter()
        self.meter.start()
        given = answer(*prompt, **options)
        joules = self.meter.read()
        if joules is not None:
            self.taken[name] = Spent(joules, time.perf_counter() - begin)
        return given

    def book(self, spent: dict[str, Spent]) -> None:
        """Add all of it to a run's."""
        for name, new in self.taken.items():
            before = spent.get(name, Spent())
            spent[name] = Spent(before.joules + new.joules, before.seconds + new.seconds)


def energy_table(spent: Mapping[str, Spent], tokens: Mapping[str, int]) -> Table:
    """Joules a token and watts. `tokens`: how many each wrote."""
    rows = [
        [name, f"{each.joules / tokens[name]:.3g}", f"{each.joules / each.seconds:.3g}"]
        for name, each in spent.items()
    ]
    return Table(["energy, prompts included", "joules a token", "watts"], rows)
