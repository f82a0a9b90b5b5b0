"""Training a small part on a frozen model: options, the loop, checkpoints, and what is reported.

Everything random is a function of (seed, step), so a run that was interrupted goes on with the same
bits. A step takes some conversations of like length and adds the losses of all depths, weighted
0.8^(k-1). Knows no kind of part (`draft_head.py` and its neighbours are kinds).
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..core.files import whole_path, writing
from ..errors import OptionError, ResourceError, TrainingError
from ..model.family import Family, Shape
from ..trained.files import TrainedPart
from . import checkpoints
from .candidates import Candidates
from .head_net import Batch, Drafted, Ends
from .states import Text

DEPTH_WEIGHT = 0.8


@dataclass(frozen=True)
class PartOptions:
    """How a part is trained."""

    epochs: float = 6.0
    """Passes over the training text."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached after 3% of the steps. It then falls to 1% as a cosine."""
    weight_decay: float = 0.05
    """Weight decay of AdamW; biases and norms have none."""
    batch_tokens: int = 2048
    """Tokens in a training step, padding included."""
    ahead: int = 3
    """How many drafts in a row a draft head is trained on, each fed with its own outputs."""
    share: float = 1.0
    """Share of the answers' tokens that are trained at a step, above 0 to 1. Fewer are cheaper."""
    of_text: float = 1.0
    """Share of the conversations that are trained at all, above 0 to 1: what does more text bring?
    Measured is on the same ones."""
    others: int = 2048
    """Take the loss over a batch's likely tokens and this many others. 0 takes all (slower)."""
    noise: float = 0.05
    """Random noise on the states that are trained on, up to this share of their size, so that they
    are not learnt by heart."""
    seed: int = 0
    """Seed of the order of the text, of random noise or dropped layers, and of new weights."""
    precision: str = "float32"
    """Number format of the computation: float32, or bfloat16 for mixed precision, about twice as
    fast where the processor has it. Weights stay float32."""
    save_every: int = 200
    """Steps between checkpoints; at each, acceptance is measured."""
    measured: int = 64
    """Measure acceptance on at most this many held-out conversations."""
    max_minutes: float | None = None
    """Stop at a checkpoint after this many minutes; the same command goes on. By default never."""

    def __post_init__(self) -> None:
        for name in (
            *("epochs", "learning_rate", "batch_tokens", "ahead", "share", "of_text"),
            *("save_every", "measured", "max_minutes"),
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"{name}={value} would train nothing; choose more than 0")
        if max(self.share, self.of_text) > 1 or self.noise < 0 or self.others < 0:
            raise OptionError(
                f"share={self.share}, of_text={self.of_text}, noise={self.noise}, "
                f"others={self.others}: a share is at most 1, noise and others are 0 or more"
            )
        if self.precision not in ("float32", "bfloat16"):
            raise OptionError(f"precision={self.precision!r} is not known; use float32 or bfloat16")


@dataclass(frozen=True)
class FrozenModel:
    """The model that a part is trained for."""

    network: Any
    family: Family
    shape: Shape
    vocabulary: Tensor  # ids of the tokens that the part can say
    scale: float  # how large the states are that enter the last layer


class SmallPart(ABC):
    """A part under training: the weights, what a batch costs, and what is stored."""

    net: nn.Module

    def __init__(self, model: FrozenModel, recipe: Any, options: PartOptions) -> None:
        self.kind, self.options, self.device = recipe.kind, options, model.vocabulary.device
        self.ends = Ends(model.network, model.family, model.shape, model.vocabulary)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(options.seed)
            self.net = self.build(model, recipe).to(self.device)

    @abstractmethod
    def build(self, model: FrozenModel, recipe: Any) -> nn.Module:
        """The weights to be trained, as they are at first."""

    @abstractmethod
    def drafted(self, batch: Batch, generator: torch.Generator | None, measure: bool) -> Drafted:
        """Draft from a batch, as in training with a generator, as in use without it."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """How it is built."""

    def tensors(self) -> dict[str, Tensor]:
        """What a part stores, in half precision."""
        state = self.net.state_dict().items()
        stored = {name: value.detach().cpu().half() for name, value in state}
        return {**stored, "vocabulary": self.ends.vocabulary.cpu().int()}

    def begin_with(self, part: TrainedPart) -> None:
        """Start from an earlier part, which is built alike but may say other tokens."""
        if part.kind != self.kind or dict(part.settings) != self.settings():
            raise OptionError(
                f"a {part.kind} with {dict(part.settings)} cannot begin a {self.kind} with "
                f"{self.settings()}; use the settings of the first"
            )
        state = {name: part.tensors[name].float() for name in self.net.state_dict()}
        self.net.load_state_dict(state)

    def candidates(self, batch: Batch, generator: torch.Generator | None) -> Candidates | None:
        """The tokens that the loss is taken over; None is all of them."""
        others = self.options.others
        return self.ends.candidates(batch, others, generator) if generator and others else None

    def noise(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform noise for normalised states, drawn where they are: it is as large as they."""
        if self.device.type != "cpu":
            generator = torch.Generator(self.device).manual_seed(generator.initial_seed())
        drawn = 2 * torch.rand(states.shape, generator=generator, device=self.device) - 1
        return self.options.noise * drawn

    def some(self, places: Tensor, generator: torch.Generator | None) -> Tensor:
        """Of a mask of places the random share that is trained at a step."""
        if generator is None or self.options.share == 1:
            return places
        drawn = torch.rand(places.shape, generator=generator) < self.options.share
        return places & drawn.to(self.device)

    def precision(self) -> AbstractContextManager[Any]:
        """Mixed precision, if it was asked for."""
        mixed = self.options.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=mixed)


class PartRecipe(Protocol):
    """What kind of part is trained."""

    @property
    def kind(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    def state_layers(self, shape: Shape) -> tuple[int, ...]:
        """The layers whose states are read, in a model of that shape."""

    def training(self, model: FrozenModel, options: PartOptions) -> SmallPart:
        """The part, ready to be trained."""


@dataclass(frozen=True)
class Progress:
    """Told after every step."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    acceptance: tuple[float, ...] = ()
    """By depth, where it was just measured."""


@dataclass
class Run:
    """What a run has done so far, as its checkpoints say."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)


def train_part(
    trained: SmallPart,
    states: Text,
    folder: Path,
    identity: dict[str, Any],
    deadline: float = math.inf,
    observer: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Run, bool]:
    """Train until done, or until the first step that ends after the deadline (of
    `time.monotonic`). Returns what was done, and whether it was all."""
    options, lengths = trained.options, states.lengths()
    epoch_batches = lru_cache(maxsize=1)(partial(_epoch_batches, states, options))
    per_epoch = len(epoch_batches(0))  # of every epoch
    steps = math.ceil(options.epochs * per_epoch)
    optimizer = _optimizer(trained.net, options)
    checkpoint = _Checkpoint(folder / "checkpoint.safetensors", identity, trained.net, optimizer)
    run = checkpoint.resume()
    recent: list[float] = []
    late = False
    while run.step < steps and not late:
        start = time.perf_counter()
        epoch, index = divmod(run.step, per_epoch)
        batches = epoch_batches(epoch)
        numbers = batches[index % len(batches)]
        loss = _step(trained, states.batch(numbers), optimizer, run.step, steps)
        seconds = time.perf_counter() - start
        run.step += 1
        run.tokens += (tokens := sum(lengths[number] for number in numbers))
        run.seconds += seconds
        recent.append(loss)
        late = time.monotonic() > deadline
        acceptance: tuple[float, ...] = ()
        if run.step % options.save_every == 0 or run.step == steps or late:
            acceptance = measure(trained, states)
            mean = sum(recent) / len(recent)
            run.log.append({"step": run.step, "loss": mean, "acceptance": list(acceptance)})
            recent = []
            checkpoint.save(run)
        observer(Progress(run.step, steps, loss, tokens / seconds, acceptance))
    return run, run.step >= steps


def measure(trained: SmallPart, states: Text) -> tuple[float, ...]:
    """By depth: the share of drafts that are the text's own next token, if those before were."""
    numbers = states.held_out[: trained.options.measured]
    tried, right = torch.zeros(()), torch.zeros(())
    trained.net.eval()
    with torch.no_grad():
        for batch in packed(numbers, states.lengths(), trained.options.batch_tokens):
            drafted = trained.drafted(states.batch(batch), None, True)
            tried, right = tried + drafted.tried.cpu(), right + drafted.right.cpu()
    trained.net.train()
    return tuple((right / tried.clamp(min=1)).tolist())


# ------------------------------------------------------------------------------------------- a step


def _step(
    trained: SmallPart, batch: Batch, optimizer: torch.optim.Optimizer, step: int, steps: int
) -> float:
    options = trained.options
    for group in optimizer.param_groups:
        group["lr"] = options.learning_rate * _rate(step, steps)
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    drafted = trained.drafted(batch, generator, False)
    weights = torch.tensor([DEPTH_WEIGHT**depth for depth in range(len(drafted.losses))])
    weights = weights.to(drafted.losses.device)
    loss = (weights * drafted.losses / drafted.counts.clamp(min=1)).sum() / weights.sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    size = nn.utils.clip_grad_norm_(trained.net.parameters(), 1.0)
    value = float(loss.detach())
    if not (math.isfinite(value) and math.isfinite(float(size))):
        raise TrainingError(
            f"step {step + 1}: the loss is {value} and its gradient {float(size)}, so training "
            "stopped before taking it. Train into another folder with a smaller learning rate"
        )
    optimizer.step()
    return value


def _rate(step: int, steps: int) -> float:
    """Share of the peak learning rate: up over 3% of the steps, down to 1% as a cosine."""
    warm = max(1, round(0.03 * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _optimizer(net: nn.Module, options: PartOptions) -> torch.optim.AdamW:
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))


# ---------------------------------------------------------------------------------- which text when


def _epoch_batches(states: Text, options: PartOptions, epoch: int) -> list[list[int]]:
    """All trained conversations in batches of like length, in an order of this epoch's own."""
    if not states.trained or not states.held_out:
        raise TrainingError(
            f"{len(states.trained)} conversations to train and {len(states.held_out)} to measure "
            "are too few; give more text"
        )
    generator = torch.Generator().manual_seed(options.seed * 7919 + epoch)
    shuffled = torch.randperm(len(states.trained), generator=generator).tolist()
    order = [states.trained[index] for index in shuffled]
    lengths, batches = states.lengths(), []
    beside = max(256, options.batch_tokens // 8)  # of which those of like length are together
    for first in range(0, len(order), beside):
        pool = sorted(order[first : first + beside], key=lambda number: lengths[number])
        batches += list(packed(pool, lengths, options.batch_tokens))
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def packed(numbers: Sequence[int], lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """In this order, as many together as stay below `limit` tokens with their padding."""
    batch: list[int] = []
    longest = 0
    for number in numbers:
        longest = max(longest, lengths[number])
        if batch and longest * (len(batch) + 1) > limit:
            yield batch
            batch, longest = [], lengths[number]
        batch.append(number)
    if batch:
        yield batch


# -------------------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class _Checkpoint:
    """Weights, moments and the log in one file, replaced whole. `identity` says what run it is."""

    path: Path
    identity: dict[str, Any]
    net: nn.Module
    optimizer: torch.optim.Optimizer

    def save(self, run: Run) -> None:
        tensors = {f"net.{name}": value for name, value in self.net.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"moment.{index}.{name}": value for name, value in moments.items()}
        tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        facts = {"run": json.dumps(asdict(run)), "identity": json.dumps(self.identity)}
        try:
            with writing(self.path), whole_path(self.path, durable=True) as new:
                save_file(tensors, new, facts)
        except SafetensorError as error:
            raise ResourceError(
                f"the checkpoint {self.path} cannot be written ({error}); the one before it is as "
                "it was. Make room, and run the same command again"
            ) from error

    def resume(self) -> Run:
        """Go on from the file, if it is there and of this run."""
        if not self.path.is_file():
            return Run()
        with safe_open(self.path, "pt") as file:
            facts = file.metadata()
            checkpoints.require_equal(json.loads(facts["identity"]), self.identity, self.path)
            names = file.keys()  # it is no mapping
            tensors = {name: file.get_tensor(name) for name in names}
        weights = [name for name in tensors if name.startswith("net.")]
        self.net.load_state_dict({name.removeprefix("net."): tensors[name] for name in weights})
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("moment."):
                _, index, moment = name.split(".")
                state.setdefault(int(index), {})[moment] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        return Run(**json.loads(facts["run"]))
