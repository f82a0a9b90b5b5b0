"""A whole training run: load, read, score the exits, train (or go on), save, score, report.

The output folder holds the model and its tokenizer, as transformers writes them, the report
(`training.json`, `training.png`), and `checkpoints/`, which may be deleted once the run is done.
Knows no command line.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    TrainerCallback,
    TrainingArguments,
)

from ..core.files import clear_left_over, writing
from ..core.text_rows import require
from ..errors import OptionError, TrainingError, Unavailable, UnsupportedModel, nearest
from ..model.from_transformers import from_transformers
from ..model.load.checkpoint import quiet_transformers
from ..model.load.loading import load
from ..model.load.source import locate
from ..model.shaping import shape_of
from . import checkpoints, plots
from .data import Blocks, DataOptions, load_data
from .evaluate import ExitScore, evaluate_exits
from .lora import Lora, add_lora, merged
from .recipe import Recipe
from .supported import trainable_family
from .trainer import LayerSkipTrainer

REPORT = "training.json"
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TrainOptions:
    """How long and how fast to train; the recipe and the data have settings of their own."""

    steps: int | None = None
    """Optimizer steps to take. By default as many as the epochs need."""
    epochs: float = 1.0
    """Passes over the training text."""
    batch: int = 4
    """Blocks of text on a device at a time."""
    accumulate: int = 1
    """Batches whose gradients make up one step."""
    learning_rate: float = 1e-4
    """Peak learning rate, reached after 5% of the steps. It then falls to 0 as a cosine."""
    weight_decay: float = 0.0
    """Weight decay of AdamW; biases and norms have none."""
    seed: int = 0
    """Seed of the order of the text, of random noise or dropped layers, and of new weights."""
    precision: str = "float32"
    """Number format of the computation: float32, bfloat16 or float16. Weights stay float32."""
    save_every: int = 200
    """Steps between checkpoints; the last two are kept."""
    log_every: int = 10
    """Steps between two reports of the loss."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass: less memory, more time."""
    from_scratch: bool = False
    """Take only the model's configuration and tokenizer, and start from new weights."""
    score_blocks: int = 16
    """Score the exits on at most this many held-out blocks; 0 scores none."""
    plot: bool = True
    """Draw training.png into the output folder (needs matplotlib)."""
    report_to: str = "none"
    """Send the logs to another place too, by transformers' name for it: tensorboard, wandb, ..."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "save_every", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value} has to be at least 1")
        for name in ("epochs", "learning_rate"):
            if not getattr(self, name) > 0:
                value = getattr(self, name)
                raise OptionError(f"{name}={value} would change nothing; use more than 0")
        if self.score_blocks < 0:
            raise OptionError(f"score_blocks={self.score_blocks} is below 0; 0 scores none")
        if self.precision not in PRECISIONS:
            hint = nearest(self.precision, PRECISIONS)
            raise OptionError(f"precision={self.precision!r} is not known; {hint}")
        if self.report_to == "tensorboard" and not importlib.util.find_spec("tensorboard"):
            raise Unavailable("report_to='tensorboard' needs it: pip install tensorboard")


@dataclass(frozen=True)
class Report:
    """What a run gave. `exits` has "before" and "after": the exits' scores on held-out text."""

    model: str
    folder: Path
    steps: int
    tokens: int  # trained in all steps
    seconds: float  # of this call, so after an interruption not of the whole run
    exits: dict[str, list[ExitScore]] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold. Paths stay out, so that the folder can be moved."""
        values = {name: value for name, value in vars(self).items() if name != "folder"}
        exits = {when: [score.as_dict() for score in kept] for when, kept in self.exits.items()}
        return {"schema": 1, **values, "exits": exits}


def train(
    model: str,
    files: Sequence[str | Path],
    out: str | os.PathLike[str],
    *,
    recipe: Recipe | None = None,
    options: TrainOptions | None = None,
    data: DataOptions | None = None,
    lora: Lora | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Report:
    """Train a model on files and leave it in a folder. Called again after an interruption, it goes
    on where it was."""
    recipe, options = recipe or Recipe(), options or TrainOptions()
    data_options = data or DataOptions()
    folder = _prepare(Path(out), files, options)
    network, tokenizer, name = _load(model, options)
    shape = shape_of(network.config, trainable_family(network.config))
    if data_options.length > shape.context:
        raise OptionError(
            f"length={data_options.length} exceeds the context of {name}, {shape.context} tokens"
        )
    blocks = load_data(files, tokenizer, data_options)
    if (highest := int(blocks.train.ids.max())) >= shape.vocabulary:
        raise TrainingError(
            f"the tokenizer made token {highest}, and {name} has a vocabulary of "
            f"{shape.vocabulary}: they do not belong together"
        )
    settings = {
        "recipe": asdict(recipe),
        "options": asdict(options),
        "data": asdict(data_options),
        "lora": None if lora is None else asdict(lora),
    }
    identity = {
        "model": checkpoints.fingerprint(network),
        "data": checkpoints.data_fingerprint(blocks.train.ids, blocks.train.trained),
        "lora": settings["lora"],
    }
    before = _score_before(network, blocks.held_out, folder, options.score_blocks, identity)
    torch.manual_seed(options.seed)  # LoRA's matrices are drawn
    tuned: Any = network if lora is None else add_lora(network, lora)
    given: dict[str, Any] = {"recipe": recipe, "identity": identity, "callbacks": list(callbacks)}
    trainer = _trainer(tuned, options, blocks.train, folder, processing_class=tokenizer, **given)
    if trainer.is_world_process_zero():
        checkpoints.clear_incomplete(trainer.folder)
    start = time.perf_counter()
    trainer.train(resume_from_checkpoint=True)
    seconds = time.perf_counter() - start
    final = merged(tuned).eval().requires_grad_(False)
    log = [line for line in trainer.state.log_history if "loss" in line]
    steps = trainer.state.max_steps
    per_block = blocks.train.tokens / len(blocks.train)
    tokens = round(per_block * options.batch * options.accumulate * _ranks() * steps)
    report = Report(name, folder, steps, tokens, seconds, before, log)
    if trainer.is_world_process_zero():
        report = _finish(report, final, tokenizer, blocks.held_out, options, settings)
    trainer.accelerator.end_training()  # ranks say goodbye to each other, else they abort at exit
    return report


def _prepare(out: Path, files: Sequence[str | Path], options: TrainOptions) -> Path:
    """The output folder, unless it holds something that is not ours. What would fail late and can
    be known now fails here."""
    require(files)
    if options.plot:
        plots.require_matplotlib()
    ours = (out / REPORT).exists() or (out / "checkpoints").is_dir()
    if (out / "config.json").exists() and not ours:
        raise OptionError(
            f"{out} holds another model, which would be overwritten; name another folder"
        )
    checkpoints.make_folder(out / "checkpoints")
    for folder in (out, out / "checkpoints"):
        clear_left_over(folder)
    return out


def _load(model: str, options: TrainOptions) -> tuple[PreTrainedModel, Any, str]:
    """Float32 weights that can be trained, the tokenizer, and a name."""
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    if options.from_scratch:
        source = locate(model, None, None, False)
        config = AutoConfig.from_pretrained(source.folder)
        trainable_family(config)
        torch.manual_seed(options.seed)
        auto: Any = AutoModelForCausalLM
        network = auto.from_config(config, dtype=torch.float32).to(device)
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
        return network, tokenizer, f"{source.name} (from scratch)"
    loaded = load(model, dtype="float32", device=device)
    trainable_family(loaded.model.config)
    if loaded.tokenizer is None:
        raise TrainingError(
            f"{loaded.name} has no tokenizer to read text with; add its files to the folder"
        )
    if not all(parameter.is_floating_point() for parameter in loaded.model.parameters()):
        raise UnsupportedModel(
            f"{loaded.name} has quantised weights, which have no gradients; train the original"
        )
    loaded.model.requires_grad_(True)
    return loaded.model, loaded.tokenizer, Path(loaded.name).name


def _trainer(
    model: Any, options: TrainOptions, train: Blocks, folder: Path, **given: Any
) -> LayerSkipTrainer:
    """The trainer with these options; `given` is what it takes beside them."""
    step_blocks = options.batch * options.accumulate * _ranks()
    steps = options.steps or math.ceil(options.epochs * len(train) / step_blocks)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()  # with LoRA nothing before the first layer is trained
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(0.05 * steps),
        weight_decay=options.weight_decay,
        seed=options.seed,
        data_seed=options.seed,
        bf16=options.precision == "bfloat16",
        fp16=options.precision == "float16",
        save_steps=options.save_every,
        save_total_limit=checkpoints.KEPT,
        logging_steps=options.log_every,
        report_to=options.report_to,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
    )
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    weights = sum(size for size, _ in sizes)
    trained = sum(size for size, has_gradient in sizes if has_gradient)
    checkpoints.require_room(folder, weights, trained)
    trainer = LayerSkipTrainer(model, arguments, train_dataset=train, **given)
    # it prints. Pass a callback to see the logs
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _score_before(
    model: PreTrainedModel, blocks: Blocks, folder: Path, most: int, identity: dict[str, Any]
) -> dict[str, list[ExitScore]]:
    """Scores of the untrained model. Kept, so that a resumed run need not measure them."""
    if not most or int(os.environ.get("RANK", "0")):
        return {}
    kept = folder / "checkpoints" / "before.json"
    text = checkpoints.data_fingerprint(blocks.ids, blocks.trained)
    key = [identity["model"], text, most]
    if kept.exists() and (earlier := json.loads(kept.read_text(encoding="utf-8")))["key"] == key:
        return {"before": [ExitScore(**score) for score in earlier["scores"]]}
    scores = evaluate_exits(from_transformers(model.eval()), blocks, most=most)
    checkpoints.write_json(kept, {"key": key, "scores": [asdict(score) for score in scores]})
    return {"before": scores}


def _finish(
    report: Report,
    model: PreTrainedModel,
    tokenizer: Any,
    held_out: Blocks,
    options: TrainOptions,
    settings: dict[str, Any],
) -> Report:
    """Save the model as an ordinary folder, score it, write the report and the plot."""
    with writing(report.folder), quiet_transformers(bars=False):
        try:
            model.save_pretrained(report.folder)
            tokenizer.save_pretrained(report.folder)
        except SafetensorError as error:
            raise OSError(str(error)) from error
    if options.score_blocks:
        layered = from_transformers(model)
        report.exits["after"] = evaluate_exits(layered, held_out, most=options.score_blocks)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    facts = {**report.as_dict(), **settings, "versions": versions}
    checkpoints.write_json(report.folder / REPORT, facts)
    if options.plot:
        plots.plot_training(facts, report.folder / "training.png")
    return report


def _ranks() -> int:
    """How many processes torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))
