"""Where a model comes from: the demo, a folder, a hub name or a live model. transformers loads it;
we look first.

Everything that can be known without reading weights is checked before them: the kind of model,
remote code, truncated or missing files, memory. Afterwards the loading report is checked, because
transformers fills missing weights with random numbers and only warns. It does not know families
(families.py) nor how a model is run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from selfspec.errors import (
    BrokenCheckpoint,
    ModelError,
    OptionError,
    ResourceError,
    Unavailable,
    UnsupportedModel,
    nearest,
)

from ..compute.memory import weights_too_large
from . import peft_folder, quantised
from .checkpoint import (
    AGAIN,
    quiet_transformers,
    read_header,
    read_json,
    require_memory,
    weight_files,
)
from .source import Source, cached_folder, first_line, locate, refuse_revision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
_MAPS = ("balanced", "balanced_low_0", "sequential")  # of accelerate

_ONLY = "selfspec runs decoder-only causal language models."
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


@dataclass(frozen=True)
class Loaded:
    """A model ready to be run. `owned`: we loaded it, so its weights may be repacked and released;
    never a user's live model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    owned: bool


def load(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | Mapping[str, object] = "auto",
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    adapter: str = "auto",
) -> Loaded:
    """A model and its tokenizer (None when it has none), from "demo", a folder, a GGUF file, a hub
    name or a live model. A PEFT adapter's folder or name gives its base model with the adapter
    merged into the weights, or live beside them (`adapter`).

    dtype "auto" is float32 on the CPU (exact, and few CPUs are fast at less) and the checkpoint's
    own on a GPU.
    """
    kind, target = _dtype(dtype), _device(device)
    peft_folder.check_mode(adapter)
    if (inner := peft_folder.inside(model)) is not None:
        model = inner
    if isinstance(model, PreTrainedModel):
        refuse_revision(revision, "a live model")
        peft_folder.refuse_mode(
            adapter,
            "merge",
            "a live model is left as it is; merge it yourself (merge_and_unload())",
        )
        return _live(
            model,
            kind,
            None if device == "auto" else target,
            _tokenizer(tokenizer, token, trust_remote_code),
        )
    source = locate(model, revision, token, trust_remote_code)
    found = _tokenizer(tokenizer, token, trust_remote_code)
    if (source.folder / peft_folder.CONFIG).is_file():
        name, revision = peft_folder.base_of(source.folder)
        source.fetch_weights(peft_folder.WEIGHTS)
        base = load(
            name,
            revision=revision,
            token=token,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            device=device,
            tokenizer=found or _read_tokenizer(source),
        )
        live = adapter == "live" or (
            adapter == "auto" and quantised.method_of(base.model.config) is not None
        )
        return replace(
            base,
            model=peft_folder.adapted(base.model, source.folder, source.name, live),
            name=source.name,
        )
    for mode in ("merge", "live"):
        peft_folder.refuse_mode(adapter, mode, f"{source.name} is no PEFT adapter")
    config = _read_config(source)
    _refuse_kind(config, config.architectures or [], source.name)
    quantised.require_library(config, source.name)
    if kind is None and target.type == "cpu":
        kind = torch.float32
    # whose size only its files tell
    if source.hub is not None and quantised.method_of(config) is None:
        require_memory(estimate_bytes(config, kind, trust_remote_code), target, source.name)
    source.fetch_weights()
    require_memory(estimate_bytes(source.folder, kind), target, source.name)
    loaded = _load_weights(source, config, kind, target)
    return Loaded(
        loaded, _read_tokenizer(source) if found is None else found, source.name, owned=True
    )


def estimate_bytes(
    source: Path | PreTrainedConfig, dtype: torch.dtype | None, trust_remote_code: bool = False
) -> int:
    """Memory that loading takes at its peak: all weights in `dtype` (None: as stored) and the
    largest once more, being converted.

    A folder is judged by the headers of its safetensors files (which are checked on the way), a
    configuration by a model without storage made from it.
    """
    if isinstance(source, Path):
        stored = [tensor for file in weight_files(source) for tensor in read_header(file).values()]
        return sum(tensor.bytes_as(dtype) for tensor in stored) + max(
            (tensor.nbytes for tensor in stored), default=0
        )
    kind = dtype or DTYPES.get(str(source.dtype).removeprefix("torch."), torch.float32)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        empty = auto.from_config(source, trust_remote_code=trust_remote_code)
        empty.tie_weights()  # which older versions of transformers do not do on this device
    sizes: list[int] = [parameter.numel() * kind.itemsize for parameter in empty.parameters()]
    return sum(sizes) + max(sizes, default=0)


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """None is "auto"."""
    if dtype == "auto":
        return None
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype) and dtype in DTYPES.values():
        return dtype
    raise OptionError(
        f"dtype={str(dtype)!r} is not known; {nearest(str(dtype), ['auto', *DTYPES])}"
    )


def _device(device: str | torch.device | Mapping[str, object]) -> torch.device:
    # A map to one place is that place.
    if isinstance(device, Mapping) and len(places := set(device.values())) == 1:
        place = places.pop()
        device = f"cuda:{place}" if isinstance(place, int) else str(place)
    if isinstance(device, Mapping) or device in (*_MAPS, "disk"):
        raise OptionError(
            f"device={device!r} spreads a model over several places or keeps it on disk, and "
            f"selfspec runs a model that is whole "
            "on one: each round would wait for weights on their way. Use device='cpu' or 'cuda', "
            "and a smaller dtype, quantised "
            "weights or a smaller model if it does not fit"
        )
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise OptionError(
            f"device={str(device)!r} is not known; {nearest(str(device), DEVICES)}"
        ) from error
    if parsed.type not in ("cpu", "cuda"):
        raise OptionError(
            f"device={str(device)!r} is not supported; selfspec runs on "
            f"{' and '.join(DEVICES[1:])}."
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if parsed.type == "cuda" and (parsed.index or 0) >= count:
        raise OptionError(
            f"device={str(device)!r}: torch sees {count} CUDA devices here, so nothing can be put "
            f"there. Use device='cpu'."
        )
    return parsed


def _read_config(source: Source) -> PreTrainedConfig:
    """The configuration, unless it is broken, of an unknown type or needs code that nobody
    trusted."""
    folder, name = source.folder, source.name
    raw = read_json(folder / "config.json")
    kind = raw.get("model_type")
    if not source.trust and "auto_map" in raw and kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{name} comes with Python code of its own (model type {kind!r}), which could do "
            f"anything and is not run unasked. "
            "If you have read it and trust it, pass trust_remote_code=True; or use a copy of a "
            "type that transformers knows."
        )
    if "auto_map" not in raw and kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{name} has model type {kind!r}, which transformers {transformers.__version__} does "
            f"not know. {_ONLY} "
            "A newer transformers may know it."
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=source.trust)
    except ImportError as error:
        raise Unavailable(
            f"{name} needs a package that is not installed: {first_line(error)}"
        ) from error
    except (OSError, ValueError, TypeError, hub_errors.StrictDataclassError) as error:
        raise BrokenCheckpoint(
            f"{folder / 'config.json'} is not accepted by transformers: {first_line(error)}"
        ) from error
    assert isinstance(config, PreTrainedConfig)
    return config


def _refuse_kind(config: PreTrainedConfig, classes: list[str], name: str) -> None:
    """Everything but a decoder-only causal language model, by its configuration and the classes it
    was saved as."""
    facts, kind = config.to_dict(), config.model_type
    if facts.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{name} is an encoder-decoder model ({kind}). {_ONLY}")
    if config.get_text_config() is not config:
        raise UnsupportedModel(
            f"{name} is a multimodal model ({kind}), which selfspec does not run yet. {_ONLY}"
        )
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not facts.get("is_decoder"):
        raise UnsupportedModel(f"{name} is an encoder ({kind}). {_ONLY}")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if causal is None and "AutoModelForCausalLM" not in (facts.get("auto_map") or {}):
        raise UnsupportedModel(
            f"{name} is a {kind} model, for which transformers has no causal language model. "
            f"{_ONLY}"
        )
    if classes and not any(
        cls == causal or cls.endswith(("ForCausalLM", "LMHeadModel")) for cls in classes
    ):
        raise UnsupportedModel(
            f"{name} was saved as {', '.join(classes)}, without a language-model head that "
            f"predicts the next token. {_ONLY}"
        )


def _load_weights(
    source: Source, config: PreTrainedConfig, kind: torch.dtype | None, target: torch.device
) -> PreTrainedModel:
    name = source.name
    auto: Any = AutoModelForCausalLM
    try:
        with quiet_transformers(bars=True):
            model, report = auto.from_pretrained(
                source.folder,
                config=config,
                dtype=kind or "auto",
                device_map=None if target.type == "cpu" else {"": target},
                use_safetensors=True,
                **attention_option(config),
                trust_remote_code=source.trust,
                ignore_mismatched_sizes=True,  # reported, and refused below
                output_loading_info=True,
            )
    except ImportError as error:
        raise Unavailable(
            f"{name} needs a package that is not installed: {first_line(error)}"
        ) from error
    except torch.OutOfMemoryError as error:
        raise weights_too_large(name, None, kind, target) from error
    except MemoryError as error:
        raise ResourceError(
            f"{name} ran out of memory on {target} while loading: {first_line(error)}. Use a "
            f"smaller dtype."
        ) from error
    except SafetensorError as error:
        raise BrokenCheckpoint(
            f"the weights of {name} cannot be read: {first_line(error)}. {AGAIN}"
        ) from error
    except (
        TypeError
    ) as error:  # a config that versions of transformers without checks of their own have let pass
        raise BrokenCheckpoint(
            f"{source.folder / 'config.json'} is not accepted by transformers: {first_line(error)}"
        ) from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"transformers cannot load {name}: {first_line(error)}") from error
    _check_report(report, name)
    model.eval().requires_grad_(False)
    assert isinstance(model, PreTrainedModel)
    return model


def attention_option(config: PreTrainedConfig) -> dict[str, str]:
    """What transformers must be told to compute attention scores as the config says: SDPA knows
    neither soft caps (Gemma 2) nor, once, scales of GPT-2's own; older versions of transformers
    choose it all the same, and leave them out."""
    facts = config.to_dict()
    capped = config.model_type == "gemma2" and facts.get("attn_logit_softcapping")
    scaled = facts.get("scale_attn_by_inverse_layer_idx") or not facts.get(
        "scale_attn_weights", True
    )
    return {"attn_implementation": "eager"} if capped or scaled else {}


def _check_report(report: dict[str, Any], name: str) -> None:
    """Every weight of the model must come from the checkpoint, and every weight of the checkpoint
    must go into the model."""
    mismatched = [
        f"{key} {tuple(found)} instead of {tuple(wanted)}"
        for key, found, wanted in report["mismatched_keys"]
    ]
    for keys, what, consequence in (
        (report["missing_keys"], "lacks", "transformers would fill them with random numbers"),
        (
            mismatched,
            "has, in another shape than its config.json says,",
            "transformers would fill them with random numbers",
        ),
        (
            report["unexpected_keys"],
            "has, without a place in the model of its config.json,",
            "the model would run without them",
        ),
    ):
        if keys:
            first = ", ".join(sorted(keys)[:3])
            raise BrokenCheckpoint(
                f"{name} {what} {len(keys)} weights, first {first}; {consequence}. {AGAIN}"
            )


def _tokenizer(
    given: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    token: str | bool | None,
    trust: bool,
) -> PreTrainedTokenizerBase | None:
    """The tokenizer a caller asked for, by name or as an object."""
    if given is None or isinstance(given, PreTrainedTokenizerBase):
        return given
    source = locate(given, None, token, trust)
    found = _read_tokenizer(source)
    if found is None:
        raise OptionError(
            f"tokenizer={str(given)!r}: {source.folder} holds none of "
            f"{', '.join(_TOKENIZER_FILES)}."
        )
    return found


def _read_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    """A folder's tokenizer, None if it has none: such a model still runs on token ids."""
    if not any((source.folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        with quiet_transformers(bars=True):
            found = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=source.trust)
    except ImportError as error:
        raise Unavailable(
            f"the tokenizer of {source.name} needs a package that is not installed: "
            f"{first_line(error)}"
        ) from error
    except Exception as error:
        raise BrokenCheckpoint(
            f"the tokenizer in {source.folder} cannot be read: {first_line(error)}. {AGAIN}"
        ) from error
    assert isinstance(found, PreTrainedTokenizerBase)
    return found


def _live(
    model: PreTrainedModel,
    kind: torch.dtype | None,
    target: torch.device | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Loaded:
    """A user's own model: looked at, never changed."""
    name = model.name_or_path or type(model).__name__
    # the class is there to be asked, below; a user may have derived it
    _refuse_kind(model.config, [], name)
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{type(model).__name__} has no language-model head. {_ONLY}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        where = ", ".join(sorted(map(str, devices)))
        where += " (offloaded, or never loaded)" if "meta" in where else ""
        raise UnsupportedModel(
            f"the weights of {name} are on {where}; selfspec runs a model that is whole on one "
            f"device. Load it with one: "
            "device_map='cpu' or 'cuda'."
        )
    here = devices.pop()
    if kind is not None and kind != model.dtype:
        raise OptionError(
            f"dtype={kind} contradicts the model, which is {model.dtype} and is left as it is. "
            f"Convert it with model.to()."
        )
    if target is not None and (target.type != here.type or target.index not in (None, here.index)):
        raise OptionError(
            f"device='{target}' contradicts the model, which is on {here} and is left as it is. "
            f"Move it with model.to()."
        )
    return Loaded(
        model,
        _local_tokenizer(model.name_or_path) if tokenizer is None else tokenizer,
        name,
        owned=False,
    )


def _local_tokenizer(name: str | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer that belongs to a live model, if its folder or the hub's cache has it; nothing
    is downloaded."""
    if not name:
        return None
    folder = Path(name) if Path(name).is_dir() else cached_folder(name)
    return None if folder is None else _read_tokenizer(Source(name, folder, trust=False))
