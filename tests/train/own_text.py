"""A tiny model that can be learned in seconds, and text that it wrote, for the tests of small
parts."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

from selfspec import LLM
from selfspec.testing import tiny_model, tiny_tokenizer


def calm_model(folder: Path, family: str = "llama", share: float = 0.1) -> Path:
    """Its layers change little, so what it says depends on little else than the last token."""
    small = tiny_model(family, seed=4, tie_word_embeddings=False)
    for layer in small.model.layers:
        layer.self_attn.o_proj.weight.data *= share
        layer.mlp.down_proj.weight.data *= share
    small.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def with_text(folder: Path) -> Path:
    """The model's folder, with answers of its own in `own.jsonl`."""
    prompts = [[3 + 7 * n % 250, 5 + 3 * n % 250] for n in range(40)]
    answers = LLM.from_pretrained(folder).generate(prompts, max_new_tokens=24, eos=[], draft=None)
    lines = [
        json.dumps({"prompt_ids": p, "response_ids": a.tokens})
        for p, a in zip(prompts, answers, strict=True)
    ]
    (folder / "own.jsonl").write_text("\n".join(lines))
    return folder


def random_answers(folder: Path, count: int, tokens: int) -> list[dict[str, list[int]]]:
    """What the model in the folder says to random prompts, as rows to train on."""
    dice = random.Random(0)
    prompts = [[dice.randrange(3, 259) for _ in range(dice.randrange(2, 9))] for _ in range(count)]
    llm = LLM.from_pretrained(folder)
    answers = llm.generate(prompts, max_new_tokens=tokens, eos=[], draft=None)
    return [
        {"prompt_ids": prompt, "response_ids": answer.tokens}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def shown_command(folder: Path) -> str:
    """The command on a part's card, as a shell reads it."""
    card = (folder / "README.md").read_text()
    command = card[card.index("selfspec generate") :].split("\n\n")[0]
    return " ".join(shlex.split(command.replace("\\\n", " ")))
