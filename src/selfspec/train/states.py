"""What the model computes on its own text, kept on disk: states after some layers, and the
distribution at every answered token.

A frozen model's states never change, so they are computed once and read many times. They come in
shards of some ten thousand tokens, each written whole or not at all. A run that is killed, or given
more text later, goes on with what is missing. Input: rows with `prompt_ids` and `response_ids`, as
`selfspec data` writes them. Numbers are kept in float16, states RMS-normalised. Knows nothing of
what is trained on them.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.files import clear_left_over, whole_path, write_whole, writing
from ..core.text_rows import Row, read_rows
from ..errors import OptionError, ResourceError, TrainingError
from ..model.compute.cache import RowSpan
from ..model.compute.hidden_states import StateCollector
from ..model.layered import LayeredModel
from ..trained.blocks import unit
from ..trained.files import unlike
from .checkpoints import make_folder

SHARD_TOKENS = 20_000
PASS_TOKENS = 1024  # on a CPU; a card takes a shard at once
SCHEMA = 1
ARRAYS = ("tokens", "states", "ids", "chances")  # of a shard


@dataclass(frozen=True)
class StateOptions:
    """What is kept of each token."""

    layers: tuple[int, ...]
    """Keep the states after these layers."""
    length: int = 768
    """Conversations are cut after this many tokens."""
    top: int = 24
    """How many of the likeliest tokens are kept with their probabilities."""
    held_out: float = 0.03
    """Share of the text to keep apart and measure on, between 0 and 1."""
    weights: str = "float32"
    """How the model's weights are stored while its states are computed: int8 is about twice as fast
    on a CPU, and right for text that the model wrote in 8 bits."""

    def __post_init__(self) -> None:
        if self.length < 16 or self.top < 1 or not 0 < self.held_out < 1:
            raise OptionError(
                f"length={self.length}, top={self.top}, held_out={self.held_out}: use a length of "
                "16 or more, a top of 1 or more, and a share between 0 and 1"
            )


@dataclass(frozen=True)
class Conversation:
    """A prompt and what the model wrote after it."""

    tokens: tuple[int, ...]
    begin: int  # where the answer begins

    @property
    def name(self) -> str:
        return _digest(self.tokens)

    def held_out(self, share: float) -> bool:
        """By its prompt: two answers to it are on one side, and more text changes nothing."""
        return int(_digest(self.tokens[: self.begin]), 16) % 10_000 < share * 10_000


def read_conversations(
    files: Sequence[str | Path], options: StateOptions, vocabulary: int
) -> Iterator[Conversation]:
    """The rows of some sources that are of use, each text once."""
    seen: set[str] = set()
    for where, row in chain.from_iterable(map(read_rows, files)):
        conversation = _conversation(row, where, options.length, vocabulary)
        if conversation and conversation.name not in seen:
            seen.add(conversation.name)
            yield conversation


def _conversation(row: Row, where: str, length: int, vocabulary: int) -> Conversation | None:
    """One row; None if it is too short to draft in it."""
    try:
        prompt = [int(token) for token in row["prompt_ids"]]
        answer = [int(token) for token in row["response_ids"]]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{where} has no 'prompt_ids' and 'response_ids' ({type(error).__name__}: {error}). "
            "Write text with them by: selfspec data MODEL --prompts FILES"
        ) from error
    tokens = tuple((prompt + answer)[:length])
    outside = [token for token in tokens if not 0 <= token < vocabulary]
    if outside:
        raise TrainingError(
            f"{where} has token {outside[0]}, the model has {vocabulary}: another model wrote it"
        )
    return Conversation(tokens, len(prompt)) if prompt and len(tokens) - len(prompt) >= 3 else None


class Span(NamedTuple):
    """Where a conversation lies."""

    shard: int
    first: int
    stop: int
    begin: int  # of the answer, counted from `first`


class Text(ABC):
    """Conversations by number, some of them held out, and what the model computes on them."""

    def __init__(self) -> None:
        self.where: list[Span] = []
        self.held_out: list[int] = []
        self.trained: list[int] = []
        self.names: set[str] = set()

    def add(self, name: str, span: Span, held_out: bool) -> None:
        """The next conversation."""
        (self.held_out if held_out else self.trained).append(len(self.where))
        self.where.append(span)
        self.names.add(name)

    def train_only(self, share: float) -> None:
        """Of the conversations that are trained so many, from all of the text."""
        count = math.ceil(share * len(self.trained))
        self.trained = [self.trained[at * len(self.trained) // count] for at in range(count)]

    def lengths(self) -> list[int]:
        return [span.stop - span.first for span in self.where]

    @property
    def tokens(self) -> int:
        return sum(self.lengths())

    @abstractmethod
    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Some conversations, padded behind: tokens (n, longest), states (n, longest, layers,
        width), ids and chances (n, longest, top). Chances are 0 where nothing is answered."""

    @abstractmethod
    def frequencies(self, vocabulary: int) -> Tensor:
        """(vocabulary,): how often each token was likely in the answers that are trained."""


class States(Text):
    """What is kept: shards in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._shards: list[dict[str, Any]] = []
        for index, shard in enumerate(_shards(folder)):
            self._shards.append(
                {name: np.load(shard / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
            )
            facts = json.loads((shard / "shard.json").read_text(encoding="utf-8"))
            first = 0
            for name, count, begin, held in facts["conversations"]:
                self.add(name, Span(index, first, first + count, begin), held)
                first += count

    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        spans = [self.where[number] for number in numbers]
        longest = max(span.stop - span.first for span in spans)
        batch: dict[str, Tensor] = {}
        for name in ARRAYS:
            first = self._shards[0][name]
            array = np.zeros((len(numbers), longest, *first.shape[1:]), dtype=first.dtype)
            for row, span in enumerate(spans):
                values = self._shards[span.shard][name][span.first : span.stop]
                array[row, : len(values)] = values
            batch[name] = torch.from_numpy(array)
        return batch

    def frequencies(self, vocabulary: int) -> Tensor:
        total = np.zeros(vocabulary)
        for span in (self.where[number] for number in self.trained):
            shard, at = self._shards[span.shard], slice(span.first, span.stop)
            ids = shard["ids"][at].reshape(-1)
            chances = shard["chances"][at].reshape(-1).astype(np.float64)
            total += np.bincount(ids, weights=chances, minlength=vocabulary)
        return torch.from_numpy(total)


def kept_options(folder: Path) -> StateOptions | None:
    """How the states in a folder were kept, if there are any."""
    about = folder / "states.json"
    if not about.is_file():
        return None
    options = json.loads(about.read_text(encoding="utf-8"))["options"]
    return StateOptions(**{**options, "layers": tuple(options["layers"])})


def gather(
    model: LayeredModel,
    base: dict[str, Any],
    files: Sequence[str | Path],
    folder: Path,
    options: StateOptions,
    go_on: Callable[[int], bool] = lambda tokens: True,
) -> bool:
    """Compute what is missing of these files. `base` is the model's signature. After every shard
    `go_on(tokens so far)` is asked. Returns whether everything is there."""
    _prepare(folder, base, options)
    done, names = 0, States(folder).names
    shard: list[Conversation] = []
    for conversation in read_conversations(files, options, model.shape.vocabulary):
        if conversation.name in names:
            continue
        shard.append(conversation)
        if (count := sum(len(member.tokens) for member in shard)) >= SHARD_TOKENS:
            _write_shard(model, shard, folder, options)
            shard, done = [], done + count
            if not go_on(done):
                return False
    if shard:
        _write_shard(model, shard, folder, options)
    return True


def _prepare(folder: Path, base: dict[str, Any], options: StateOptions) -> None:
    """Make the folder, or raise if what is in it is of another model or was kept otherwise."""
    make_folder(folder)
    about = folder / "states.json"
    if about.is_file():
        kept = json.loads(about.read_text(encoding="utf-8"))
        other = unlike(kept["base"], base)
        if other or kept["schema"] != SCHEMA or kept_options(folder) != options:
            raise TrainingError(
                f"{folder} holds states kept with {kept['options']}, now {asdict(options)} are "
                f"asked for{'; of another model: ' + other if other else ''}. Repeat the earlier "
                "settings, or train into another folder"
            )
    else:
        write_whole(about, json.dumps({"schema": SCHEMA, "options": asdict(options), "base": base}))
    clear_left_over(folder)


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-?????"))


def _write_shard(
    model: LayeredModel, shard: Sequence[Conversation], folder: Path, options: StateOptions
) -> None:
    tokens = np.array([*chain.from_iterable(member.tokens for member in shard)], dtype=np.int32)
    needed = len(tokens) * (2 * len(options.layers) * model.shape.width + 6 * options.top + 4)
    if needed * 1.2 > shutil.disk_usage(folder).free:
        raise ResourceError(
            f"{folder} is nearly full: the next states need {needed / 1e6:.0f} MB. Make room"
        )
    most = PASS_TOKENS if model.device.type == "cpu" else SHARD_TOKENS
    pieces = [_computed(model, group, options) for group in _groups(shard, most)]
    computed = [np.concatenate(arrays) for arrays in zip(*pieces, strict=True)]
    target = folder / f"shard-{len(_shards(folder)):05}"
    share = options.held_out
    facts = [[text.name, len(text.tokens), text.begin, text.held_out(share)] for text in shard]
    with writing(target), whole_path(target, durable=True) as new:
        new.mkdir()
        for name, array in zip(ARRAYS, (tokens, *computed), strict=True):
            np.save(new / f"{name}.npy", array)
        (new / "shard.json").write_text(json.dumps({"conversations": facts}), encoding="utf-8")


def _groups(shard: Sequence[Conversation], most: int) -> Iterator[list[Conversation]]:
    """Conversations that are computed in one pass, of at most so many tokens if there are two."""
    group: list[Conversation] = []
    for text in shard:
        if group and sum(len(member.tokens) for member in [*group, text]) > most:
            yield group
            group = []
        group.append(text)
    yield group


@torch.inference_mode()
def _computed(
    model: LayeredModel, group: Sequence[Conversation], options: StateOptions
) -> list[np.ndarray[Any, Any]]:
    """Of the tokens of all conversations: states, likeliest next tokens, their probabilities."""
    lengths = [len(text.tokens) for text in group]
    collector, cache = StateCollector(options.layers), model.new_cache(len(group), max(lengths))
    layout = cache.layout_at([RowSpan(row, 0, length) for row, length in enumerate(lengths)])
    ids_in = [*chain.from_iterable(text.tokens for text in group)]
    x = model.embed(torch.tensor(ids_in, device=model.device))
    x = model.run(x, model.full_plan, cache, layout, collectors=[collector])
    if taken := collector.take():
        states = unit(taken[0][1].float()).half()
    else:
        states = x.new_empty(len(x), 0, x.shape[1], dtype=torch.float16)
    # the answer's tokens but its last: those whose next one is known to be the model's own
    answered = torch.tensor(
        [
            text.begin <= at < len(text.tokens) - 1
            for text in group
            for at in range(len(text.tokens))
        ]
    )
    ids = torch.zeros(len(x), options.top, dtype=torch.int32, device=model.device)
    chances = torch.zeros(len(x), options.top, dtype=torch.float16, device=model.device)
    for piece in answered.nonzero()[:, 0].to(model.device).split(256):
        best = model.head(x[piece]).float().softmax(-1).topk(options.top)
        ids[piece], chances[piece] = best.indices.int(), best.values.half()
    return [values.cpu().numpy() for values in (states, ids, chances)]


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(np.array(tokens, dtype=np.int64).tobytes(), digest_size=8).hexdigest()
