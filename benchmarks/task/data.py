"""A text-to-structure task like TOPv2, generated: utterances, and their intents and slots as a
bracketed tree.

    wake me up at 7 am on monday
    [IN:CREATE_ALARM [SL:DATE_TIME 7 am ] [SL:DATE_TIME on monday ] ]

Structures are "decoupled": only the words of slots are repeated. The held-out part has phrasings
*and* slot values that training never sees. Everything is a function of the grammar and a seed;
`generator_hash` names both. Source of the format: Chen et al. 2020 (TOPv2), on which LayerSkip's
task experiment was run. The intents, slots and their nesting follow TOPv2's. All phrasings and all
lists are our own. Knows no model.

The grammar is four text files:

- `templates.txt`: for each intent its phrasings in training. `{SLOT=class}` is a slot filled from a
  class of `entities.txt`, `{class}` words that mean nothing for the structure.
- `held_out.txt`: other phrasings, written the same way. The models are tested on these.
- `entities.txt`: for each class the values to train with and, after the bar, others that are held
  out. A value may be made of other classes (`{number} am`) and may be a structure of its own:
  `GET_CONTACT: ...` nests that intent. Names and titles are composed, so that there are too many to
  learn by heart: what is not in the lists has to be copied. For the same reason two of three
  training values of a class marked `~` are `{novel}`: any word, or one that nobody has heard.
  Classes without a bar belong to both parts, or to the training part alone where only its values
  name them.
- `words.txt`: the five thousand "any words". GSM8K's questions, self-instruct's and WikiText-2 use
  them at least twice, and the rest of the grammar does not.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec.errors import OptionError

PARTS = ("train", "held_out")
PROMPT = "{}\n"  # what the model reads of an utterance
GRAMMAR = Path(__file__).parent
OPENED = 0.4  # share of the training utterances that begin with words that mean nothing
_HOLE = re.compile(r"\{(?:([A-Z_]+)=)?([a-z_]+)\}")
_NESTED = re.compile(r"([A-Z_]+): (.*)")


@dataclass(frozen=True)
class Example:
    """An utterance, the structure it stands for, and that structure's outermost intent."""

    utterance: str
    structure: str
    intent: str

    @property
    def prompt(self) -> str:
        """What the model is given; it answers with the structure."""
        return PROMPT.format(self.utterance)


class Grammar:
    """One part's phrasings and values, and how an example is made of them. `known`: without the
    values that hold any words or made-up ones, so nothing has to be copied that was never seen."""

    def __init__(self, part: str, known: bool = False) -> None:
        self.values, self.phrasings = entities(part), templates(part)
        if known:
            self.values = {
                kind: [value for value in values if "{novel}" not in value] or values
                for kind, values in self.values.items()
            }
        self.opened = part == PARTS[0]

    def example(self, rng: random.Random) -> Example:
        """Intents are equally likely, and so are the phrasings of each."""
        intent = rng.choice(list(self.phrasings))
        opener = "{opener} " if self.opened and rng.random() < OPENED else ""
        words, slots = self._expand(opener + rng.choice(self.phrasings[intent]), rng)
        return Example(words, _tree(intent, slots), intent)

    def _expand(self, text: str, rng: random.Random) -> tuple[str, list[str]]:
        """The words of a phrasing, and the slots in it, as structures."""
        slots: list[str] = []

        def fill(hole: re.Match[str]) -> str:
            slot, kind = hole.groups()
            words, structure, inner = self._value(kind, rng)
            slots.extend([f"[SL:{slot} {structure} ]"] if slot else inner)
            return words

        return _HOLE.sub(fill, text), slots

    def _value(self, kind: str, rng: random.Random) -> tuple[str, str, list[str]]:
        """A value's words, what stands for it inside a slot, and the slots inside it."""
        chosen = rng.choice(self.values[kind])
        nested = _NESTED.fullmatch(chosen)
        words, slots = self._expand(nested[2] if nested else chosen, rng)
        return words, _tree(nested[1], slots) if nested else words, slots


def _tree(intent: str, slots: Sequence[str]) -> str:
    return " ".join([f"[IN:{intent}", *slots, "]"])


def templates(part: str) -> dict[str, list[str]]:
    """Of each intent the part's phrasings."""
    found: dict[str, list[str]] = {}
    name = "templates" if part == PARTS[0] else "held_out"
    for line in _text(name).splitlines():
        if line.startswith("IN "):
            phrasings = found.setdefault(line[3:], [])
        elif line and not line.startswith("#"):
            phrasings.append(line)
    return found


def entities(part: str) -> dict[str, list[str]]:
    """Of each class the part's values; of a class marked `~` twice as many novel ones, for
    training."""
    found = {"word": _text("words").split()}
    for line in _text("entities").strip().replace("\n  ", " ").splitlines():
        kind, _, rest = line.partition(": ")
        lists = [half.strip().split("; ") for half in rest.split(" | ")]
        values = lists[min(PARTS.index(part), len(lists) - 1)]
        novel = ["{novel}"] * (2 * len(values)) if kind.endswith("~") and part == PARTS[0] else []
        found[kind.rstrip("~")] = values + novel
    return found


def examples(part: str, count: int, seed: int = 0, known: bool = False) -> list[Example]:
    """That many examples with different utterances, the same ones for the same seed."""
    grammar, rng = Grammar(part, known), random.Random(f"{part}/{seed}")
    seen: dict[str, Example] = {}
    for _ in range(20 * count):
        found = grammar.example(rng)
        seen.setdefault(found.utterance, found)
        if len(seen) == count:
            return list(seen.values())
    raise OptionError(
        f"the grammar made {len(seen)} different utterances in {20 * count} draws, {count} were "
        "asked for; ask for fewer"
    )


def write_examples(path: Path, made: Sequence[Example]) -> None:
    """As `selfspec train` reads them."""
    lines = (json.dumps({"prompt": each.prompt, "response": each.structure}) for each in made)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def generator_hash(seed: int) -> str:
    """Of the sources of this file, the phrasings and the values, and of the seed."""
    digest = hashlib.blake2b(digest_size=8)
    for source in _sources():
        digest.update(source.read_bytes())
    digest.update(str(seed).encode())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    yield Path(__file__)
    yield from sorted(GRAMMAR.glob("*.txt"))


def _text(name: str) -> str:
    return (GRAMMAR / f"{name}.txt").read_text(encoding="utf-8")
