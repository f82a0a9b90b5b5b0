"""Many answers of a model of Llama's family, written on a card: text for a draft head and a table.

    python -m benchmarks.card_text --prompts prompts.jsonl --out own.jsonl --minutes 3

`selfspec data` writes some hundred rows at a time and looks at each token. Here thousands of rows
write at once, each in its own slot of one cache; a step is a CUDA graph, and the host looks every
16 steps only, when it fills slots that are free. Answers are what `selfspec data` writes, without
their text. What was likely at every place is known by the way, so a table of successors is counted
at once. Runs on a CPU too, step by step, to try it. Knows no drafts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from benchmarks.command import Model, run_command
from benchmarks.models import folder_of
from selfspec.core.text_rows import read_rows
from selfspec.errors import OptionError
from selfspec.model.from_transformers import from_transformers
from selfspec.model.load.loading import load
from selfspec.train.parts import packed
from selfspec.train.successors import CountOptions, Seen, count
from selfspec.trained.files import TrainedPart, signature
from selfspec.trained.successors import SUCCESSORS

LOOKS = 16  # steps between two looks of the host
TOP = 8  # likeliest tokens that are kept of every place
PREFILLED = 65_536  # tokens of prompts, padding included, that are read in one pass
GRAIN = 128  # how contexts are rounded up


class Decoder:
    """Llama's layers, in bfloat16, over a cache with a slot for each row."""

    def __init__(self, folder: Path, rows: int, length: int, device: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config: Any = AutoConfig.from_pretrained(folder)
        if config.model_type != "llama":
            raise OptionError(
                f"{folder} is a model of type {config.model_type!r}, and this writes with llama's "
                "layers only; selfspec data writes with every model"
            )
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        network = network.to(device)
        ends = config.eos_token_id
        self.eps, self.ends = config.rms_norm_eps, {*(ends if isinstance(ends, list) else [ends])}
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = config.head_dim
        self.embedding: Tensor
        self.embedding, self.norm = network.model.embed_tokens.weight, network.model.norm.weight
        self.output = network.lm_head.weight
        self.layers = []
        for layer in network.model.layers:
            ours, mlp = layer.self_attn, layer.mlp
            read = torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight])
            both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            self.layers.append(
                (norms[0], read, ours.o_proj.weight, norms[1], both, mlp.down_proj.weight)
            )
        powers = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
        angles = torch.arange(length)[:, None] * config.rope_parameters["rope_theta"] ** -powers
        angles = torch.cat([angles, angles], dim=-1)
        self.cosine, self.sine = (x.to(device, dtype) for x in (angles.cos(), angles.sin()))
        shape = (len(self.layers), rows, self.kv_heads, length, self.size)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))

    def read(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Prompts, padded behind, (n, longest), into their slots: what comes out of the layers."""
        count, longest = tokens.shape
        x, turn = self.embedding[tokens], self._turn(torch.arange(longest, device=tokens.device))
        for index, (first, read, out, second, both, down) in enumerate(self.layers):
            q, k, v = (part.transpose(1, 2) for part in self._read(x, first, read, turn))
            self.keys[index, slots, :, :longest] = k
            self.values[index, slots, :, :longest] = v
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + F.linear(mixed.transpose(1, 2).reshape(count, longest, -1), out)
            x = x + self._mlp(x, second, both, down)
        return x

    def step(self, tokens: Tensor, at: Tensor, bound: int) -> Tensor:
        """One token of every row, (rows,), each at its place `at`, all below `bound`."""
        x, rows = self.embedding[tokens], torch.arange(len(tokens), device=tokens.device)
        beyond = torch.arange(bound, device=at.device) > at[:, None]
        mask = torch.zeros_like(beyond, dtype=x.dtype).masked_fill_(beyond, -torch.inf)
        mask, turn = mask[:, None, None], self._turn(at)
        for index, (first, read, out, second, both, down) in enumerate(self.layers):
            q, k, v = self._read(x, first, read, turn)
            self.keys[index, rows, :, at] = k
            self.values[index, rows, :, at] = v
            keys, values = self.keys[index, :, :, :bound], self.values[index, :, :, :bound]
            grouped = q.view(len(x), self.kv_heads, -1, self.size)
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            x = x + F.linear(mixed.reshape(len(x), -1), out)
            x = x + self._mlp(x, second, both, down)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Of some states, in float32."""
        return F.linear(self._normed(x, self.norm), self.output).float()

    def _turn(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of places."""
        return self.cosine[at][..., None, :], self.sine[at][..., None, :]

    def _read(
        self, x: Tensor, norm: Tensor, read: Tensor, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        mixed = F.linear(self._normed(x, norm), read).unflatten(-1, (-1, self.size))
        turned, v = mixed.split((self.heads + self.kv_heads, self.kv_heads), dim=-2)
        a, b = turned.chunk(2, dim=-1)
        turned = turned * turn[0] + torch.cat([-b, a], dim=-1) * turn[1]
        q, k = turned.split((self.heads, self.kv_heads), dim=-2)
        return q, k, v

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _mlp(self, x: Tensor, norm: Tensor, both: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(self._normed(x, norm), both).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)


@dataclass
class Answer:
    """A prompt under way, and what was written to it."""

    prompt: list[int]
    temperature: float
    written: list[int] = field(default_factory=list)
    ids: list[np.ndarray[Any, Any]] = field(default_factory=list)
    chances: list[np.ndarray[Any, Any]] = field(default_factory=list)


class Rows:
    """All slots, and the tokens that they are at. One step of all is recorded for each bound."""

    def __init__(self, decoder: Decoder, rows: int, device: str) -> None:
        self.decoder, self.device = decoder, device
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self.at = torch.zeros(rows, dtype=torch.long, device=device)
        self.heat = torch.zeros(rows, 1, device=device)
        self.best = torch.zeros(rows, TOP, dtype=torch.int32, device=device)
        self.chances = torch.zeros(rows, TOP, dtype=torch.float16, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def begin(self, slots: Tensor, tokens: Tensor, lengths: Tensor, heat: Tensor) -> None:
        """Read prompts into free slots and choose the first token of each."""
        x = self.decoder.read(tokens, slots)
        last = x[torch.arange(len(x), device=x.device), lengths - 1]
        self.heat[slots] = heat
        chosen, best, chances = self._choose(self.decoder.logits(last), heat)
        self.tokens[slots], self.at[slots] = chosen, lengths
        self.best[slots], self.chances[slots] = best, chances

    def go(self, bound: int) -> tuple[Tensor, Tensor, Tensor]:
        """Some steps: the tokens that were chosen, (steps, rows), and what was likely there."""
        told = []
        for _ in range(LOOKS):
            told.append((self.tokens.clone(), self.best.clone(), self.chances.clone()))
            if self.device == "cuda":
                self._graph(bound).replay()
            else:
                self._step(bound)
        tokens, best, chances = (torch.stack(parts).cpu() for parts in zip(*told, strict=True))
        return tokens, best, chances

    def _step(self, bound: int) -> None:
        x = self.decoder.step(self.tokens, self.at, bound)
        chosen, best, chances = self._choose(self.decoder.logits(x), self.heat)
        self.tokens.copy_(chosen)
        self.best.copy_(best)
        self.chances.copy_(chances)
        self.at.add_(1).clamp_(max=self.decoder.keys.shape[3] - 1)

    def _choose(self, logits: Tensor, heat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A token drawn from the likeliest ones at the row's temperature (0: the likeliest), and
        the likeliest with their probabilities."""
        found = logits.topk(TOP)
        chances = (found.values - logits.logsumexp(-1, keepdim=True)).exp()
        noise = torch.rand_like(found.values).clamp_(min=1e-9).log_().neg_().log_().neg_()
        drawn = (found.values + heat * noise).argmax(-1, keepdim=True)
        return found.indices.gather(1, drawn)[:, 0], found.indices.int(), chances.half()

    def _graph(self, bound: int) -> torch.cuda.CUDAGraph:
        if bound not in self._graphs:
            kept = [x.clone() for x in (self.tokens, self.at, self.best, self.chances)]
            self._step(bound)  # once before it is recorded, as libraries set themselves up
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(bound)
            self._pool = graph.pool()
            for x, old in zip((self.tokens, self.at, self.best, self.chances), kept, strict=True):
                x.copy_(old)
            self._graphs[bound] = graph
        return self._graphs[bound]


@dataclass
class Writer:
    """Hands out prompts to slots that are free, and collects what was written."""

    rows: Rows
    longest: int
    slots: list[Answer | None]
    lengths: np.ndarray[Any, Any]
    """How many tokens each slot holds."""

    def answers(self, prompts: Iterator[Answer]) -> Iterator[Answer]:
        """The answers, as they end."""
        more = True
        while more or any(self.slots):
            free = [slot for slot, answer in enumerate(self.slots) if answer is None]
            if more and len(free) >= max(1, len(self.slots) // 16):
                more = self._fill(free, prompts)
            if any(self.slots):
                yield from self._go()

    def _fill(self, free: Sequence[int], prompts: Iterator[Answer]) -> bool:
        """Give the free slots a prompt each; whether there may be more of them."""
        filled = list(zip(free, prompts, strict=False))
        lengths = [len(answer.prompt) for _, answer in filled]
        for together in packed(range(len(filled)), lengths, PREFILLED):
            self._read([filled[index] for index in together])
        return len(filled) == len(free)

    def _read(self, taken: Sequence[tuple[int, Answer]]) -> None:
        lengths = [len(answer.prompt) for _, answer in taken]
        tokens = torch.zeros(len(taken), max(lengths), dtype=torch.long)
        for row, (slot, answer) in enumerate(taken):
            tokens[row, : len(answer.prompt)] = torch.tensor(answer.prompt)
            self.slots[slot], self.lengths[slot] = answer, len(answer.prompt)
        heat = torch.tensor([[answer.temperature] for _, answer in taken])
        slots = torch.tensor([slot for slot, _ in taken])
        parts = (slots, tokens, torch.tensor(lengths), heat)
        self.rows.begin(*(part.to(self.rows.device) for part in parts))

    def _go(self) -> Iterator[Answer]:
        decoder = self.rows.decoder
        used = np.array([answer is not None for answer in self.slots])
        bound = int(self.lengths[used].max()) + LOOKS
        bound = min(decoder.keys.shape[3], -(-bound // GRAIN) * GRAIN)
        tokens, best, chances = (part.numpy() for part in self.rows.go(bound))
        self.lengths += LOOKS
        for slot, answer in enumerate(self.slots):
            if answer is None:
                continue
            column = tokens[: self.longest - len(answer.written), slot].tolist()
            ended = [at for at, token in enumerate(column) if token in decoder.ends]
            stop = ended[0] + 1 if ended else len(column)
            answer.written += column[:stop]
            answer.ids.append(best[:stop, slot])
            answer.chances.append(chances[:stop, slot])
            if ended or len(answer.written) >= self.longest:
                self.slots[slot] = None
                yield answer


def prompts_of(
    folder: Path, files: Sequence[Path], temperatures: Sequence[float], longest: int, once: int
) -> list[Answer]:
    """All prompts as the model reads them, each at every temperature, those of more than `once`
    tokens at the first one only. Half of them the shortest first, then half the longest first, so
    that rows beside each other are alike and a run that is stopped has some of each."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = [str(row["prompt"]) for file in files for _, row in read_rows(file)]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row}], tokenize=False, add_generation_prompt=True
        )
        for row in dict.fromkeys(rows)
    ]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = sorted((prompt for prompt in ids if len(prompt) <= longest), key=len)
    answers = [
        Answer(prompt, heat)
        for prompt in ids
        for heat in temperatures[: 1 if len(prompt) > once else None]
    ]
    return answers[0::2] + answers[1::2][::-1]


def card_text(
    prompts: Annotated[list[Path], typer.Option(help="Rows with a prompt each.")],
    out: Annotated[Path, typer.Option(help="Answers, as selfspec data writes them.")],
    table: Annotated[Path | None, typer.Option(help="A folder for a table of successors.")] = None,
    model: Model = "demo",
    rows: Annotated[int, typer.Option(help="Rows that write at the same time.")] = 2048,
    temperatures: Annotated[str, typer.Option(help="One answer at each.")] = "0,0.7",
    new_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 256,
    longest_prompt: Annotated[int, typer.Option(help="Longer ones are left out.")] = 1024,
    once: Annotated[int, typer.Option(help="Longer ones get one answer, the first.")] = 400,
    minutes: Annotated[float, typer.Option(help="Begin no new answer after that.")] = 60.0,
    take: Annotated[int, typer.Option(help="Only every n-th of them, to try it.")] = 1,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it.")] = "cuda",
) -> None:
    """Write answers to many prompts on a card.

    Example: python -m benchmarks.card_text --prompts prompts.jsonl --out own.jsonl
    """
    began = time.monotonic()
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            "torch sees no card here; --device cpu tries it on a few prompts, and selfspec data is "
            "faster on a CPU"
        )
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for each new shape
    folder = folder_of(model)
    heats = [float(heat) for heat in temperatures.split(",")]
    todo = prompts_of(folder, prompts, heats, longest_prompt, once)[::take]
    length = -(-(longest_prompt + new_tokens + LOOKS) // GRAIN) * GRAIN
    print(f"{len(todo)} answers to write, {time.monotonic() - began:.0f} s so far", flush=True)
    tokens, last, done = 0, began, 0
    seen: list[Seen] = []

    def in_time() -> Iterator[Answer]:
        for answer in todo:
            if time.monotonic() - began > 60 * minutes:
                return
            yield answer

    with torch.inference_mode(), out.open("w", encoding="utf-8") as file:
        decoder = Decoder(folder, rows, length, device)
        writer = Writer(
            Rows(decoder, rows, device), new_tokens, [None] * rows, np.zeros(rows, dtype=np.int64)
        )
        for answer in writer.answers(in_time()):
            row = {"prompt_ids": answer.prompt, "response_ids": answer.written}
            file.write(json.dumps({**row, "temperature": answer.temperature}) + "\n")
            if table is not None:
                seen.append(places(answer))
            tokens, done = tokens + len(answer.written), done + 1
            if time.monotonic() - last > 10:
                last = time.monotonic()
                print(f"{done} answers, {tokens:,} tokens, {last - began:.0f} s", flush=True)
    print(f"{done} answers, {tokens:,} tokens, {time.monotonic() - began:.0f} s", flush=True)
    if table is not None:
        save_table(seen, folder, table)


def places(answer: Answer) -> Seen:
    """What was likely at the places of an answer."""
    text = np.array([*answer.prompt[-3:], *answer.written])
    likely = np.concatenate(answer.ids), np.concatenate(answer.chances)
    return Seen(text[:-3], text[1:-2], text[2:-1], *likely)


def save_table(seen: Sequence[Seen], model: Path, folder: Path) -> None:
    """Count successors, and save them as a part of the model."""
    layered = from_transformers(load(str(model), dtype="float32").model)
    vocabulary = layered.shape.vocabulary
    columns = zip(*((s.earlier, s.before, s.last, s.tokens, s.chances) for s in seen), strict=True)
    earlier, before, last, tokens, chances = (np.concatenate(column) for column in columns)
    whole = Seen(earlier, before, last, tokens.astype(np.int64), chances.astype(np.float64))
    options = CountOptions()
    facts = {"kind": SUCCESSORS, "tokens": len(last), "options": vars(options)}
    tensors = count(whole, vocabulary, options)
    settings = {"vocabulary": vocabulary}
    TrainedPart(SUCCESSORS, signature(layered), settings, tensors, facts).save(folder)


if __name__ == "__main__":
    run_command(card_text)
