"""Training text: from files to blocks of token ids, with labels that say which tokens are trained.

A row (`text_rows.py` reads them) is `{"text": ...}`, `{"prompt": ..., "response": ...}` or
`{"messages": [{"role": ..., "content": ...}, ...]}`. A text file is one document. Of prompts and
conversations only the answers are trained. They are written with the model's chat template if it
has one, as in use. Tokens are held in memory, 4 bytes each. Knows no model.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..core import door
from ..core.template import ids_of, written
from ..core.text_rows import read_rows
from ..errors import TrainingError

IGNORED = -100  # transformers' label of a position that is not trained
Tokens = tuple[list[int], list[bool]]  # ids, and which of them are trained


@dataclass(frozen=True)
class DataOptions:
    """How files become blocks."""

    length: int = 512
    """Tokens in a block of text, which is what the model sees at once."""
    packing: bool = True
    """Fill each block with several examples. Without it a block has one, cut at its end."""
    held_out: float = 0.02
    """Share of the text to keep apart and measure on, between 0 and 1: at least one example."""
    text_column: str = "text"
    """Name of the column that holds plain text."""
    train_on_prompts: bool = False
    """Train on the prompts too, not only on the answers."""
    chat_template: bool = True
    """Write prompts and answers with the model's chat template, if it has one. Without it the
    answer follows the prompt directly."""
    seed: int = 0
    """Seed that says which examples are held out, and the order of the others."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise TrainingError(
                f"held_out={self.held_out} is outside 0 to 1; some text is needed to measure on"
            )
        if self.length < 8:
            raise TrainingError(f"length={self.length} is too short to learn from; use 8 or more")


class Blocks(Dataset[dict[str, Tensor]]):
    """Rows of equal length: `ids` (n, length), and in `trained` which of them have a loss."""

    def __init__(self, ids: Tensor, trained: Tensor) -> None:
        self.ids, self.trained = ids, trained

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index].long()
        return {"input_ids": ids, "labels": ids.masked_fill(~self.trained[index], IGNORED)}

    @property
    def tokens(self) -> int:
        """How many tokens are trained in one pass over them."""
        return int(self.trained[:, 1:].sum())


@dataclass(frozen=True)
class Data:
    """What a run trains on, and what it is measured on."""

    train: Blocks
    held_out: Blocks
    examples: int


def load_data(
    files: Sequence[str | Path], tokenizer: PreTrainedTokenizerBase, options: DataOptions
) -> Data:
    """Read, tokenize, hold some out, pack."""
    writer, sources = _Writer(tokenizer, options), ", ".join(map(str, files))
    examples = [
        piece
        for path in files
        for where, example in read_rows(path)
        for piece in writer.pieces(example, where)
    ]
    if len(examples) < 2:
        count = sum(len(ids) for ids, _ in examples)
        raise TrainingError(
            f"{sources}: {len(examples)} examples with {count} tokens, where at least 2 are needed "
            f"(one is to measure on). Give more text, or a smaller length than {options.length}"
        )
    random.Random(options.seed).shuffle(examples)
    apart = max(1, min(len(examples) - 1, round(len(examples) * options.held_out)))
    make = pack if options.packing else pad
    kept = make(examples[apart:], options.length, writer.end)
    held = make(examples[:apart], options.length, writer.end)
    for name, blocks in (("train on", kept), ("hold out", held)):
        if not blocks.tokens:
            raise TrainingError(
                f"{sources}: no token to {name}; the answers are empty, or beyond the "
                f"{options.length} tokens of a block. Give more text, or raise the length"
            )
    return Data(kept, held, len(examples))


# ------------------------------------------------------------------------------------------ writing


class _Writer:
    """Examples as tokens, the way the model will meet them."""

    def __init__(self, tokenizer: Any, options: DataOptions) -> None:
        self._tokenizer, self._options = tokenizer, options
        if tokenizer.eos_token_id is None:
            raise TrainingError(
                "the tokenizer has no end-of-sequence token to tell examples apart; set eos_token"
            )
        self.end: int = tokenizer.eos_token_id

    def pieces(self, example: dict[str, Any], where: str) -> Iterator[Tokens]:
        """The example's tokens. Longer text than a block comes in pieces, to hold some out."""
        column = self._options.text_column
        if isinstance(example.get("messages"), list):
            yield self._conversation(example["messages"], where)
        elif isinstance(example.get("prompt"), str) and isinstance(example.get("response"), str):
            yield self._answer(example["prompt"], example["response"], where)
        elif isinstance(example.get(column), str):
            ids = [*self._tokenizer(example[column])["input_ids"], self.end]
            size = self._options.length
            pieces = (ids[at : at + size] for at in range(0, len(ids), size))
            yield from ((piece, [True] * len(piece)) for piece in pieces)
        else:
            raise TrainingError(
                f"{where} has the columns {names(example)}, none of which can be trained on: it "
                f"needs {column!r}, or 'prompt' and 'response', as text, or 'messages' as a list. "
                "Name the text's column (text_column)"
            )

    def _answer(self, prompt: str, response: str, where: str) -> Tokens:
        if self._tokenizer.chat_template and self._options.chat_template:
            user = {"role": "user", "content": prompt}
            return self._conversation([user, {"role": "assistant", "content": response}], where)
        before = list(self._tokenizer(prompt)["input_ids"])
        after = [*self._bare(response), self.end]
        return before + after, [self._options.train_on_prompts] * len(before) + [True] * len(after)

    def _conversation(self, messages: list[Any], where: str) -> Tokens:
        if not self._tokenizer.chat_template:
            raise TrainingError(
                f"{where} is a conversation, and the model has no chat template; use 'text'"
            )
        door.messages(messages, where, TrainingError, parts=False)
        tokens: Tokens = ([], [])
        done = ""
        for index, message in enumerate(messages):
            answer = message.get("role") == "assistant"
            if answer:  # up to where the model would begin to write
                done = self._extend(tokens, done, messages[:index], where, "opening")
            part = "answer" if answer else "prompt"
            done = self._extend(tokens, done, messages[: index + 1], where, part)
        return tokens

    def _extend(self, tokens: Tokens, done: str, messages: list[Any], where: str, part: str) -> str:
        """Add what the template writes for these messages beyond what it wrote before."""
        if not messages:
            return done
        whole = written(self._tokenizer, messages, part == "opening", where, TrainingError)
        if not whole.startswith(done):
            raise TrainingError(
                f"{where}: the model's chat template rewrites earlier messages when later ones "
                "come, so the answers' tokens cannot be told. Give the conversation as 'text'"
            )
        more = self._bare(whole[len(done) :])
        tokens[0].extend(more)
        tokens[1].extend([part == "answer" or self._options.train_on_prompts] * len(more))
        return whole

    def _bare(self, text: str) -> list[int]:
        return ids_of(self._tokenizer, text)


def names(row: dict[str, Any]) -> str:
    """A row's columns, for an error."""
    return ", ".join(map(repr, row)) or "(none)"


# ------------------------------------------------------------------------------------------ packing


def pack(examples: Sequence[Tokens], length: int, filler: int) -> Blocks:
    """Blocks of several examples, in their order, each put where it fits best. Only what is longer
    than a block is cut. The rest of a block is filled with tokens that are not trained, and being
    last, they change nothing."""
    pieces = [
        (ids[at : at + length], flags[at : at + length])
        for ids, flags in examples
        for at in range(0, len(ids), length)
    ]
    blocks: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of blocks that are not full, in order: free tokens, number
    for index in sorted(range(len(pieces)), key=lambda index: -len(pieces[index][0])):
        size = len(pieces[index][0])
        at = bisect_left(room, (size, 0))
        free, block = room.pop(at) if at < len(room) else (length, len(blocks))
        if block == len(blocks):
            blocks.append([])
        blocks[block].append(index)
        if free > size:
            insort(room, (free - size, block))
    joined: list[Tokens] = []
    for block_pieces in ([pieces[index] for index in sorted(block)] for block in blocks):
        ids, flags = zip(*block_pieces, strict=True)
        joined.append((list(chain(*ids)), list(chain(*flags))))
    return pad(joined, length, filler)


def pad(examples: Sequence[Tokens], length: int, filler: int) -> Blocks:
    """One example a block, cut or filled up at its end."""
    kept = [(ids[:length], flags[:length]) for ids, flags in examples if ids]
    rows = [ids + [filler] * (length - len(ids)) for ids, _ in kept]
    trained = [flags + [False] * (length - len(flags)) for _, flags in kept]
    return Blocks(torch.tensor(rows, dtype=torch.int32), torch.tensor(trained, dtype=torch.bool))
