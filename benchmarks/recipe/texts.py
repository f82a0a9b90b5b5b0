"""Texts of the ablation: free text in pieces, a share of them kept apart, a vocabulary made of
them, and the folder that new models take configuration and tokenizer from. Knows no training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from benchmarks.recipe.arms import RecipeOptions
from benchmarks.task.data import Example, examples, write_examples
from selfspec.errors import OptionError

END = "<|end|>"
PIECE = 2000  # characters of free text, at least, in a piece; it ends at a line's end
APART = 20  # one piece in so many is held out
TRAIN, HELD_OUT, TASK_TRAIN, SHAPE = "text.jsonl", "held-out.jsonl", "task.jsonl", "shape"


def pieces(text: str) -> Iterator[str]:
    """Whole lines, until a piece is long enough."""
    kept: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        kept.append(line)
        size += len(line)
        if size >= PIECE:
            yield "".join(kept)
            kept, size = [], 0
    if kept:
        yield "".join(kept)


def digest(files: Sequence[Path]) -> str:
    """Of the texts, in their order."""
    found = hashlib.blake2b(digest_size=8)
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def make_texts(files: Sequence[Path], folder: Path, options: RecipeOptions) -> None:
    """Everything that arms read, unless it is there."""
    if (folder / SHAPE / "config.json").exists():
        return
    made = [piece for file in files for piece in pieces(file.read_text(encoding="utf-8"))]
    if len(made) < 2 * APART:
        raise OptionError(
            f"--text: {sum(map(len, made)):,} characters are too few to train on and to measure "
            f"with; give at least {2 * APART * PIECE:,}, such as WikiText-2 and Tiny Shakespeare"
        )
    folder.mkdir(parents=True, exist_ok=True)
    held = made[APART - 1 :: APART]
    kept = [piece for index, piece in enumerate(made, 1) if index % APART]
    _write(folder / TRAIN, kept)
    _write(folder / HELD_OUT, held)
    utterances = examples("train", options.examples, known=True)
    write_examples(folder / TASK_TRAIN, utterances)
    words = [*kept, *(each.prompt + each.structure for each in utterances[:20_000])]
    _make_shape(folder / SHAPE, words, options)


def unseen(part: str, options: RecipeOptions) -> list[Example]:
    """Utterances that are in no training text: of trained phrasings ("train", with other draws), or
    of others ("held_out")."""
    if part == "held_out":
        return examples(part, options.held_out, known=True)
    trained = {each.utterance for each in examples("train", options.examples, known=True)}
    drawn = examples("train", 4 * options.held_out, seed=1, known=True)
    found = [each for each in drawn if each.utterance not in trained]
    return found[: options.held_out]


def read_pieces(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def _write(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _make_shape(folder: Path, texts: Sequence[str], options: RecipeOptions) -> None:
    """A folder with tokenizer and configuration, and no weights. The configuration comes last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.save_pretrained(folder)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=4 * options.length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.eos_token_id,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
