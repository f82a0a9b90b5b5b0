"""Plain decoding on a card: a model of a known shape with random weights, made there, next to what
the card's memory allows.

One step has to read every weight and all keys and values once; that over the measured speed of
copying is its floor. A step is the whole of it: place, embedding, layers, head, the choice, and the
one read by the host. `recorded` replays steps, `eager` runs the same functions kernel by kernel.
Needs torch and transformers and no network. Times are taken between two synchronisations, in turns.
Peers come last: they make the weights once more, as transformers' own model. Does not know how a
step is recorded.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ties import find_ties
from selfspec.bench.schema import Result
from selfspec.bench.timing import Contestant, interleave
from selfspec.core.contract import Stats
from selfspec.draft.scripted import ScriptedDrafter
from selfspec.errors import OptionError, ResourceError, nearest
from selfspec.llm import LLM
from selfspec.model.from_transformers import from_transformers
from selfspec.model.layered import LayeredModel
from selfspec.model.load.placement import DTYPES
from selfspec.model.measuring import weight_bytes

_7B: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _7B,
    "llama-3-8b": {
        **_7B, "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    },
}  # fmt: skip
Say = Callable[[str], None]


@dataclass(frozen=True)
class GpuOptions:
    """What to measure."""

    shape: str = "llama-2-7b"
    device: str = "cuda"
    dtype: str = "bfloat16"
    batches: Sequence[int] = (1, 4, 16)
    contexts: Sequence[int] = (128, 2048)
    verify_tokens: Sequence[int] = tuple(range(1, 9))
    rounds: int = 7
    steps: int = 16  # of one turn
    new_tokens: int = 64  # of a generation
    peers: bool = True
    minutes: float = 9.0

    def check(self) -> None:
        """Refuse what cannot be measured, before a model is made."""
        if self.shape not in SHAPES:
            raise OptionError(f"shape {self.shape!r} is unknown; {nearest(self.shape, SHAPES)}")
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype={self.dtype!r} is not known; {nearest(self.dtype, DTYPES)}")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise OptionError(
                f"device={self.device!r}: torch sees no CUDA device here. Use --device cpu --shape "
                "tiny to try it."
            )
        context = SHAPES[self.shape]["max_position_embeddings"]
        needed = max(self.contexts) + max(self.new_tokens, 64)
        if needed > context:
            raise OptionError(
                f"The run needs {needed} positions and {self.shape} has {context}. Lower "
                "--contexts."
            )
        least = min(*self.batches, *self.contexts, *self.verify_tokens, self.rounds, self.steps)
        if least < 1 or self.new_tokens < 2:
            raise OptionError(
                "batches, contexts, rounds and steps start at 1, new tokens at 2: nothing would be "
                "measured."
            )


@dataclass
class GpuRun(Result):
    """Everything that was measured; lists of seconds are one number a round."""

    kind = "gpu"
    measured_by = "scripts/bench plain --device cuda"

    options: dict[str, Any]
    card: str
    memory_bytes: int
    parameters: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0  # of one token
    recorded: str = ""
    copy_bandwidth: list[float] = field(default_factory=list)  # bytes a second, read and written
    steps: list[dict[str, Any]] = field(default_factory=list)
    verify: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def make_model(options: GpuOptions) -> Any:
    """transformers' model of that shape with random weights, made on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPES[options.shape], tie_word_embeddings=False, rms_norm_eps=1e-5)
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[options.dtype])
    return model.eval().requires_grad_(False)


def synchronise(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, size: int, repetitions: int = 9) -> list[float]:
    """Bytes a second, read and written, of copying a buffer of that size."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = []
    for _ in range(repetitions + 2):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        synchronise(device)
        found.append(8 * size / (time.perf_counter() - start))
    return found[2:]


class Standing:
    """A batch with `context` tokens a row in its cache, ready to go on from there again and
    again."""

    def __init__(self, model: LayeredModel, batch: int, context: int, room: int) -> None:
        self.model, self.batch, self.context = model, batch, context
        self.cache = model.new_cache(batch, context + room)
        chance = torch.Generator().manual_seed(batch * context)
        self.prompts = torch.randint(
            0, model.shape.vocabulary, (batch, context), generator=chance
        ).tolist()
        model.prefill(self.prompts, self.cache)
        self.following = torch.randint(
            0, model.shape.vocabulary, (batch, room), generator=chance
        ).to(model.device)

    def pass_over(self, tokens: int) -> list[int]:
        """One pass over so many tokens a row, with the model's choices, read by the host."""
        place = self.cache.layout([tokens] * self.batch)
        logits = self.model.forward(self.following[:, :tokens].flatten(), self.cache, place)
        chosen: list[int] = logits.argmax(-1).tolist()
        for row in range(self.batch):
            self.cache.rollback(row, self.context)
        return chosen

    def written(self, tokens: int) -> list[list[int]]:
        """What greedy decoding writes from here, step by step."""
        last, found = self.following[:, 0], []
        for _ in range(tokens):
            last = self.model.forward(last, self.cache, self.cache.layout([1] * self.batch)).argmax(
                -1
            )
            found.append(last.tolist())
        for row in range(self.batch):
            self.cache.rollback(row, self.context)
        return found

    def turn(self, tokens: int, steps: int, recorded: bool = True) -> Contestant:
        """Seconds of one pass: the mean of a turn."""

        def run() -> float:
            synchronise(self.model.device)
            start = time.perf_counter()
            for _ in range(steps):
                self.pass_over(tokens)
            synchronise(self.model.device)
            return (time.perf_counter() - start) / steps

        def eager() -> float:
            with self.model.steps.eagerly():
                return run()

        return run if recorded else eager


class GpuBenchmark:
    """One run. `keep` is called after every part with what there is."""

    def __init__(
        self, run: GpuRun, options: GpuOptions, keep: Callable[[GpuRun], None], say: Say
    ) -> None:
        self.run, self.options, self._keep, self._say = run, options, keep, say
        self.device = torch.device(options.device)
        self._end = time.monotonic() + 60 * options.minutes

    def measure(self) -> None:
        """All parts, until the time is up."""
        size = 2**30 if self.device.type == "cuda" else 2**26
        self.run.copy_bandwidth = copy_bandwidth(self.device, size)
        self._ours()
        gc.collect()  # the card has room for one model
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.options.peers:
            self._part("transformers", self._peers)
        self.run.complete = not any(note.startswith("left out") for note in self.run.notes)

    def _ours(self) -> None:
        self._say(f"making {self.options.shape}")
        model = from_transformers(make_model(self.options), owned=True, kernel="static")
        self.run.parameters, self.run.weight_bytes = model.parameters, weight_bytes(model)
        shape = model.shape
        self.run.kv_bytes = (
            2 * shape.layers * shape.kv_heads * shape.head_size * model.dtype.itemsize
        )
        for batch in self.options.batches:
            for context in self.options.contexts:
                self._part(
                    f"steps, batch {batch}, context {context}",
                    partial(self._cell, model, batch, context),
                )
        for batch in self.options.batches[:2]:
            self._part(f"rounds, batch {batch}", partial(self._rounds, model, batch))
        self.run.recorded = model.steps.status

    def _part(self, name: str, work: Callable[[], None]) -> None:
        if time.monotonic() > self._end:
            self.run.notes.append(f"left out, the time was up: {name}")
            return
        self._say(name)
        try:
            work()
        except (ResourceError, torch.OutOfMemoryError) as error:
            self.run.notes.append(f"{name}: {next(iter(str(error).splitlines()), 'out of memory')}")
        self._keep(self.run)

    def _cell(self, model: LayeredModel, batch: int, context: int) -> None:
        options = self.options
        standing = Standing(model, batch, context, 64)
        tokens = min(32, options.new_tokens)
        recorded = [standing.written(tokens) for _ in range(2)][1]
        with model.steps.eagerly():
            eager = standing.written(tokens)
        turns = {
            name: standing.turn(1, options.steps, name == "recorded")
            for name in ("recorded", "eager")
        }
        seconds = interleave(turns, options.rounds, warmup=2).seconds
        self.run.steps.append(
            {"batch": batch, "context": context, **seconds, "same_tokens": recorded == eager}
        )
        self._keep(self.run)
        passes = {
            str(count): standing.turn(count, options.steps) for count in options.verify_tokens
        }
        for count, each in interleave(
            passes, max(2, options.rounds // 2), warmup=2
        ).seconds.items():
            self.run.verify.append(
                {"batch": batch, "context": context, "tokens": int(count), "seconds": each}
            )

    def _rounds(self, model: LayeredModel, batch: int) -> None:
        """Whole generations: plain, with a script that is right three times in four, and with an
        early exit, which is hardly ever right on random weights and so shows what a round costs."""
        llm, count = LLM(model, None, self.options.shape), self.options.new_tokens
        prompts = Standing(model, batch, min(self.options.contexts), 1).prompts
        script = [
            result.tokens
            for result in llm.generate(prompts, max_new_tokens=count, eos=[], draft=None)
        ]
        fixed = {"control": "fixed", "control_options": {"tokens": 4}}
        ways: dict[str, dict[str, Any]] = {
            "plain": {"draft": None},
            "scripted": {"draft": ScriptedDrafter(script, wrong_every=4), **fixed},
            "early-exit": {"draft": "early-exit", **fixed},
        }
        stats: dict[str, Stats] = {}

        def turn(name: str) -> Contestant:
            def run() -> float:
                made = llm.generate(prompts, max_new_tokens=count, eos=[], **ways[name])
                stats[name] = made[0].call
                return stats[name].decode_seconds

            return run

        seconds = interleave(
            {name: turn(name) for name in ways}, max(2, self.options.rounds // 2), warmup=2
        ).seconds
        drafted = {name: way for name, way in ways.items() if name == "early-exit"}
        ties = {
            each.name: each.as_dict()
            for each in find_ties(llm, prompts, count, drafted, rows=max(2, batch))
        }
        for name, each in seconds.items():
            counts = stats[name]
            made: dict[str, Any] = {"tokens": counts.decoded, "rounds": counts.rounds}
            made["tokens_per_verification"] = counts.tokens_per_verification
            self.run.rounds.append({"batch": batch, "way": name, "seconds": each, **made})
        self.run.rounds[-1]["ties"] = ties

    def _peers(self) -> None:
        """transformers' own `generate` on the same shape, one row: its dynamic cache, and its
        static cache, which it compiles on a card. Seconds a token after the first, a call's own
        cost cancelled."""
        model, count = make_model(self.options), self.options.new_tokens
        ids = torch.randint(
            0, model.config.vocab_size, (1, min(self.options.contexts)), device=self.device
        )
        for name, cache in (
            ("transformers", "dynamic"),
            ("transformers, static cache, compiled", "static"),
        ):
            self._say(name)
            row: dict[str, Any] = {"peer": name, "batch": 1, "context": ids.shape[1]}
            self.run.peers.append(row)
            try:
                turns = {str(n): _peer_turn(model, ids, n, cache) for n in (1, count)}
                found = interleave(turns, max(2, self.options.rounds // 2), warmup=2)
            except (RuntimeError, OSError, ImportError, ValueError, TypeError) as error:
                row["failure"] = next(iter(str(error).splitlines()), type(error).__name__)[:300]
                continue
            row["seconds"] = [
                (b - a) / (count - 1)
                for a, b in zip(found.of("1"), found.of(str(count)), strict=True)
            ]


def _peer_turn(model: Any, ids: Tensor, count: int, cache: str) -> Contestant:
    options = {
        "max_new_tokens": count,
        "min_new_tokens": count,
        "do_sample": False,
        "pad_token_id": 0,
    }

    def run() -> float:
        synchronise(ids.device)
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), cache_implementation=cache, **options
        )
        synchronise(ids.device)
        return time.perf_counter() - start

    return run
