"""Checkpoints with quantised weights: which library each needs, checked before a weight is read.

transformers and that library load them. Their linears stay modules (`ModuleLinear` in linear.py).
Does not know how they multiply.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedConfig

from ...errors import Unavailable

_NEEDS = {  # quant_method -> what is imported, and the packages to install
    "aqlm": (("aqlm",), "aqlm"),
    "auto-round": (("auto_round",), "auto-round"),
    "awq": (("gptqmodel",), "gptqmodel"),
    "bitsandbytes": (("bitsandbytes",), "bitsandbytes"),
    "compressed-tensors": (("compressed_tensors",), "compressed-tensors"),
    "gptq": (("optimum", "gptqmodel"), "optimum gptqmodel"),
    "hqq": (("hqq",), "hqq"),
    "quanto": (("optimum", "optimum.quanto"), "optimum-quanto"),
    "torchao": (("torchao",), "torchao"),
}


def settings_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """What a config says of how its weights are quantised. None: they are not."""
    settings: Any = config.to_dict().get("quantization_config")
    if not settings:
        return None
    facts: dict[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    return facts


def method_of(config: PreTrainedConfig) -> str | None:
    """How a model's weights are quantised, in the words of its config. None: they are not."""
    facts = settings_of(config)
    if facts is None:
        return None
    method = facts.get("quant_method", "bitsandbytes")  # the default of transformers too
    return str(getattr(method, "value", method))


def require_library(config: PreTrainedConfig, name: str, why: str = "") -> None:
    """Raise if the library that reads a checkpoint's quantised weights is not installed. `why`:
    what keeps our own kernels from running them."""
    method = method_of(config)
    modules, packages = _NEEDS.get(method or "", ((), ""))
    # a package stands before its submodule, for which find_spec would import it
    if not all(find_spec(module) for module in modules):
        ours = f"; our own kernels cannot run them: {why}" if why else ""
        raise Unavailable(
            f"the weights of {name} are quantised ({method}), and the library that reads them is "
            f"not installed{ours}. Run `pip install {packages}`, or use a copy that is not "
            "quantised."
        )
