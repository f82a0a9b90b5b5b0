"""Training a small part on a frozen model: options, the loop, checkpoints, and what is reported.

Everything random is a function of (seed, step), so a run that was interrupted goes on with the same
bits. A step is some conversations of like length, the losses of all drafted depths, weighted
0.8^(k-1), one AdamW update. What decides is measured on prompts that are never trained: how often
draft k is the model's own next token, given that drafts 1 to k-1 were. Knows no command line; which
part it is, `draft_head.py` beside it knows.
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
from .head_net import Drafted
from .states import States

DEPTH_WEIGHT = 0.8


@dataclass(frozen=True)
class PartOptions:
    """How a part is trained."""

    epochs: float = 6.0
    """Passes over the training text."""
    learning_rate: float = 1e-3
    """Peak learning rate. It is reached after a warm-up of 3% of the steps and then falls to a
    hundredth as a cosine."""
    weight_decay: float = 0.05
    """Weight decay of AdamW; biases and norms have none."""
    batch_tokens: int = 2048
    """Tokens in a training step, padding included."""
    ahead: int = 3
    """How many drafts in a row a draft head is trained on, each fed with its own outputs."""
    share: float = 1.0
    """Share of the answers' tokens that are trained at a step, above 0 to 1, drawn anew each time:
    fewer make a step cheaper."""
    others: int = 2048
    """Take the loss over the tokens that matter in a batch and this many others, drawn at random. 0
    takes it over all, which is slower."""
    noise: float = 0.05
    """Random noise on the hidden states that a head or an adapter is trained on, uniform up to this
    share of their size, so that they are not learnt by heart."""
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
    """Stop at a checkpoint after this many minutes; the same command goes on from there. By default
    there is no limit."""

    def __post_init__(self) -> None:
        for name, least in (
            ("epochs", 0.0),
            ("learning_rate", 0.0),
            ("batch_tokens", 0),
            ("ahead", 0),
            ("save_every", 0),
        ):
            if not getattr(self, name) > least:
                raise OptionError(
                    f"{name}={getattr(self, name)} would train nothing; choose more than {least:g}"
                )
        if not 0 < self.share <= 1 or self.noise < 0 or self.measured < 1 or self.others < 0:
            raise OptionError(
                f"share={self.share}, noise={self.noise}, measured={self.measured}, "
                f"others={self.others}: use a share above 0 and up to 1, noise of 0 or more, "
                "measure on 1 conversation or more, and take 0 other tokens (all) or more"
            )
        if self.precision not in ("float32", "bfloat16"):
            raise OptionError(f"precision={self.precision!r} is not known; use float32 or bfloat16")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise OptionError(
                f"max_minutes={self.max_minutes} leaves no time; leave it out, or give some"
            )


class SmallPart(ABC):
    """A part under training: the weights, what a batch costs, and what is stored."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def net(self) -> nn.Module: ...

    @abstractmethod
    def drafted(
        self, batch: dict[str, Tensor], generator: torch.Generator | None, measure: bool
    ) -> Drafted:
        """Draft from a batch; with a generator as in training, without it as in use."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What a part stores."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """How it is built."""

    def begin_with(self, part: TrainedPart) -> None:
        """Start from an earlier part's weights. Its vocabulary need not be the same; how it is
        built has to be."""
        if part.kind != self.kind or dict(part.settings) != self.settings():
            raise OptionError(
                f"a {part.kind} with {dict(part.settings)} cannot begin a {self.kind} with "
                f"{self.settings()}; "
                "ask for its settings"
            )
        self.net.load_state_dict(
            {name: part.tensors[name].float() for name in self.net.state_dict()}
        )


class PartRecipe(Protocol):
    """What kind of part is trained."""

    @property
    def kind(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    def collectors(self, shape: Shape) -> tuple[int, ...]:
        """The layers whose states are needed, for a model of that shape."""

    def training(
        self,
        network: Any,
        family: Family,
        shape: Shape,
        vocabulary: Tensor,
        scale: float,
        options: PartOptions,
    ) -> SmallPart:
        """The part, ready to be trained on a frozen model. `scale`: how large the states are that
        enter the last layer."""


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
    """What a run has done so far; kept in its checkpoints."""

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
    """Train until done, or until the time is up; says what was done and whether that was all."""
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
            run.log.append(
                {
                    "step": run.step,
                    "loss": sum(recent) / len(recent),
                    "acceptance": list(acceptance),
                }
            )
            recent = []
            _save(folder, identity, trained.net, optimizer, run)
        observer(Progress(run.step, steps, loss, tokens / seconds, acceptance))
        if late:
            break
    return run, run.step >= steps


def measure(trained: SmallPart, states: States, options: PartOptions) -> tuple[float, ...]:
    """By depth: the share of drafts that are the text's own next token, among those whose
    predecessors were."""
    numbers = states.held_out[: options.measured]
    tried, right = torch.zeros(()), torch.zeros(())
    trained.net.eval()
    with torch.no_grad():
        for batch in _packed(numbers, states.lengths(), options.batch_tokens):
            found = trained.drafted(states.batch(batch), None, True)
            tried, right = tried + found.tried.cpu(), right + found.right.cpu()
    trained.net.train()
    return tuple((right / tried.clamp(min=1)).tolist())


# ------------------------------------------------------------------------------------------- a step


def _step(
    trained: SmallPart,
    batch: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    step: int,
    steps: int,
    options: PartOptions,
) -> float:
    for group in optimizer.param_groups:
        group["lr"] = options.learning_rate * _rate(step, steps)
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    found = trained.drafted(batch, generator, False)
    weights = torch.tensor(
        [DEPTH_WEIGHT**depth for depth in range(len(found.losses))], device=found.losses.device
    )
    loss = (weights * found.losses / found.counts.clamp(min=1)).sum() / weights.sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    size = nn.utils.clip_grad_norm_(trained.net.parameters(), 1.0)
    value = float(loss.detach())
    if not (math.isfinite(value) and math.isfinite(float(size))):
        raise TrainingError(
            f"step {step + 1}: the loss is {value}, its gradient {float(size)}, so training would "
            f"only spoil the weights. The "
            "last checkpoint is as it was; go on from it with a smaller learning rate in another "
            "folder"
        )
    optimizer.step()
    return value


def _rate(step: int, steps: int) -> float:
    """Share of the highest learning rate: up over 3% of the steps, down to 1% as a cosine."""
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


def precision(options: PartOptions, device: torch.device) -> AbstractContextManager[Any]:
    """Mixed precision, if it was asked for."""
    return torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bfloat16")


# ---------------------------------------------------------------------------------- which text when


def _epoch_batches(states: States, options: PartOptions, epoch: int) -> list[list[int]]:
    """All trained conversations in batches of like length, in an order of this epoch's own."""
    if not states.trained or not states.held_out:
        raise TrainingError(
            f"{len(states.trained)} conversations to train and {len(states.held_out)} to measure "
            f"on are too few; give more text"
        )
    generator = torch.Generator().manual_seed(options.seed * 7919 + epoch)
    order = [
        states.trained[i] for i in torch.randperm(len(states.trained), generator=generator).tolist()
    ]
    lengths, batches = states.lengths(), []
    for first in range(0, len(order), 256):
        pool = sorted(order[first : first + 256], key=lambda number: lengths[number])
        batches += list(_packed(pool, lengths, options.batch_tokens))
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _packed(numbers: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """In this order, as many together as stay below `most` tokens with their padding."""
    batch: list[int] = []
    for number in numbers:
        longest = max([lengths[number], *(lengths[each] for each in batch)])
        if batch and longest * (len(batch) + 1) > most:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


class _Order:
    """Which conversations a step takes. Epochs differ a little in how many batches they need; all
    count as long as the first."""

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
    tensors = {
        f"net.{name}": value.detach().cpu().contiguous() for name, value in net.state_dict().items()
    }
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {
            f"moment.{index}.{name}": value.detach().cpu().contiguous()
            for name, value in moments.items()
        }
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
    net.load_state_dict(
        {
            name.removeprefix("net."): value
            for name, value in tensors.items()
            if name.startswith("net.")
        }
    )
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("moment."):
            _, index, moment = name.split(".")
            state.setdefault(int(index), {})[moment] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return Run(**json.loads(facts["run"]))
