"""Training a small part on a frozen model: options, the loop, checkpoints, and what is reported.

Everything random is a function of (seed, step), so a run that was interrupted goes on with the same
bits. A step takes some conversations of like length, adds the losses of all depths, weighted
0.8^(k-1), and makes one AdamW update. What counts is measured on prompts that are never trained:
how often draft k is the model's own next token, given that drafts 1 to k-1 were. Knows no command
line and no kind of part (`draft_head.py` and its neighbours are kinds).
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import OptionError, TrainingError
from ..model.families import Family, Shape
from ..trained.files import TrainedPart
from . import checkpoints
from .candidates import Candidates
from .head_net import Batch, Drafted, Ends
from .states import States

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
        for name in ("epochs", "learning_rate", "batch_tokens", "ahead", "save_every"):
            if not getattr(self, name) > 0:
                value = getattr(self, name)
                raise OptionError(f"{name}={value} would train nothing; choose more than 0")
        if not 0 < self.share <= 1 or self.noise < 0 or self.measured < 1 or self.others < 0:
            raise OptionError(
                f"share={self.share}, noise={self.noise}, measured={self.measured}, "
                f"others={self.others}: a share is above 0 and up to 1, noise and others are 0 or "
                "more, and 1 conversation or more is measured"
            )
        if self.precision not in ("float32", "bfloat16"):
            raise OptionError(f"precision={self.precision!r} is not known; use float32 or bfloat16")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise OptionError(f"max_minutes={self.max_minutes} leaves no time; give more than 0")


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

    kind: ClassVar[str]
    net: nn.Module

    def __init__(self, model: FrozenModel, options: PartOptions) -> None:
        self.options, self.device = options, model.vocabulary.device
        self.ends = Ends(model.network, model.family, model.shape, model.vocabulary)

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
                f"{self.settings()}; ask for its settings"
            )
        state = {name: part.tensors[name].float() for name in self.net.state_dict()}
        self.net.load_state_dict(state)

    def candidates(self, batch: Batch, generator: torch.Generator | None) -> Candidates | None:
        """The tokens that the loss is taken over; None is all of them."""
        others = self.options.others
        return self.ends.candidates(batch, others, generator) if generator and others else None

    def noise(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform noise for normalised states."""
        drawn = 2 * torch.rand(states.shape, generator=generator) - 1
        return self.options.noise * drawn.to(self.device)

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
        """The layers whose states are needed, for a model of that shape."""

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
    states: States,
    folder: Path,
    options: PartOptions,
    identity: dict[str, Any],
    observer: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Run, bool]:
    """Train until done or until the time is up. Returns what was done, and whether it was all."""
    order = _Order(states, options)
    steps = math.ceil(options.epochs * order.per_epoch)
    optimizer = _optimizer(trained.net, options)
    run = _resume(folder, identity, trained.net, optimizer)
    deadline = time.monotonic() + 60 * options.max_minutes if options.max_minutes else math.inf
    recent: list[float] = []
    while run.step < steps:
        start = time.perf_counter()
        numbers = order[run.step]
        loss = _step(trained, states.batch(numbers), optimizer, run.step, steps, options)
        run.step += 1
        run.tokens += (tokens := sum(states.lengths()[number] for number in numbers))
        seconds = time.perf_counter() - start
        run.seconds += seconds
        recent.append(loss)
        late = time.monotonic() > deadline
        acceptance: tuple[float, ...] = ()
        if run.step % options.save_every == 0 or run.step == steps or late:
            acceptance = measure(trained, states, options)
            mean = sum(recent) / len(recent)
            run.log.append({"step": run.step, "loss": mean, "acceptance": list(acceptance)})
            recent = []
            _save(folder, identity, trained.net, optimizer, run)
        observer(Progress(run.step, steps, loss, tokens / seconds, acceptance))
        if late:
            break
    return run, run.step >= steps


def measure(trained: SmallPart, states: States, options: PartOptions) -> tuple[float, ...]:
    """By depth: the share of drafts that are the text's own next token, if those before were."""
    numbers = states.held_out[: options.measured]
    tried, right = torch.zeros(()), torch.zeros(())
    trained.net.eval()
    with torch.no_grad():
        for batch in _packed(numbers, states.lengths(), options.batch_tokens):
            drafted = trained.drafted(states.batch(batch), None, True)
            tried, right = tried + drafted.tried.cpu(), right + drafted.right.cpu()
    trained.net.train()
    return tuple((right / tried.clamp(min=1)).tolist())


# ------------------------------------------------------------------------------------------- a step


def _step(
    trained: SmallPart,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    step: int,
    steps: int,
    options: PartOptions,
) -> float:
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
            f"step {step + 1}: the loss is {value}, its gradient {float(size)}, which would spoil "
            "the weights. Go on from the last checkpoint, which is as it was, with a smaller "
            "learning rate in another folder"
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


def _epoch_batches(states: States, options: PartOptions, epoch: int) -> list[list[int]]:
    """All trained conversations in batches of like length, in an order of this epoch's own."""
    if not states.trained or not states.held_out:
        raise TrainingError(
            f"{len(states.trained)} conversations to train and {len(states.held_out)} to measure "
            "on are too few; give more text"
        )
    generator = torch.Generator().manual_seed(options.seed * 7919 + epoch)
    shuffled = torch.randperm(len(states.trained), generator=generator).tolist()
    order = [states.trained[index] for index in shuffled]
    lengths, batches = states.lengths(), []
    for first in range(0, len(order), 256):
        pool = sorted(order[first : first + 256], key=lambda number: lengths[number])
        batches += list(_packed(pool, lengths, options.batch_tokens))
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _packed(numbers: Sequence[int], lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """In this order, as many together as stay below `limit` tokens with their padding."""
    batch: list[int] = []
    for number in numbers:
        longest = max(lengths[member] for member in [number, *batch])
        if batch and longest * (len(batch) + 1) > limit:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


class _Order:
    """Which conversations a step takes. All epochs have as many steps as the first."""

    def __init__(self, states: States, options: PartOptions) -> None:
        self._states, self._options = states, options
        self._epoch, self._batches = 0, _epoch_batches(states, options, 0)
        self.per_epoch = len(self._batches)

    def __getitem__(self, step: int) -> list[int]:
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, _epoch_batches(self._states, self._options, epoch)
        return self._batches[index % len(self._batches)]


# -------------------------------------------------------------------------------------- checkpoints


def _save(
    folder: Path,
    identity: dict[str, Any],
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Run,
) -> None:
    """Weights, moments and the log in one file, replaced whole."""
    tensors = {f"net.{name}": value for name, value in net.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"moment.{index}.{name}": value for name, value in moments.items()}
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    new = folder / "checkpoint.new"
    save_file(tensors, new, {"run": json.dumps(asdict(run)), "identity": json.dumps(identity)})
    new.replace(folder / "checkpoint.safetensors")


def _resume(
    folder: Path, identity: dict[str, Any], net: nn.Module, optimizer: torch.optim.Optimizer
) -> Run:
    """Go on from the folder's checkpoint, if there is one of this run."""
    path = folder / "checkpoint.safetensors"
    if not path.is_file():
        return Run()
    with safe_open(path, "pt") as file:
        facts = file.metadata()
        checkpoints.require_equal(json.loads(facts["identity"]), identity, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    weights = [name for name in tensors if name.startswith("net.")]
    net.load_state_dict({name.removeprefix("net."): tensors[name] for name in weights})
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("moment."):
            _, index, moment = name.split(".")
            state.setdefault(int(index), {})[moment] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return Run(**json.loads(facts["run"]))
