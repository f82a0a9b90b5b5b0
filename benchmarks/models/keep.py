"""A checkpoint of `selfspec train --lora` as a model of a few megabytes: its adapter in half
precision, and how it was trained. Does not know what for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.models import FACTS
from selfspec.core.machine import cpu_name
from selfspec.errors import OptionError
from selfspec.model.load.peft_folder import CONFIG, WEIGHTS


def keep(checkpoint: Path, folder: Path, base: str, chat: bool) -> None:
    """Write the adapter and its facts. What it adds is rounded to half precision, so the kept model
    is the one to be measured."""
    if not (checkpoint / WEIGHTS).is_file():
        raise OptionError(
            f"{checkpoint} has no {WEIGHTS}, so there is no adapter to keep; name a checkpoint of "
            "selfspec train --lora"
        )
    config, state, settings = (
        json.loads((checkpoint / name).read_text(encoding="utf-8"))
        for name in (CONFIG, "trainer_state.json", "selfspec.json")
    )
    config["base_model_name_or_path"] = base
    facts: dict[str, Any] = {
        "base": base,
        "chat_template": chat,
        "steps": state["global_step"],
        "settings": settings,
        "processor": cpu_name(),
        "last": [line for line in state["log_history"] if "loss" in line][-1],
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(checkpoint / WEIGHTS)
    half = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
    save_file(half, folder / WEIGHTS, metadata={"format": "pt"})
    for name, said in ((CONFIG, config), (FACTS, facts)):
        (folder / name).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
