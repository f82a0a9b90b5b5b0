"""Loading a model with transformers: the demo, a folder, a hub name or a live model.

What can be known without reading weights is checked first: the kind of model, remote code,
truncated or missing files, memory. The loading report is checked afterwards, because transformers
fills missing weights with random numbers and only warns. It does not know families (families.py)
nor how a model is run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
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
    UnsupportedModel,
)

from ..compute.memory import weights_too_large
from . import peft_folder, quantised
from .checkpoint import (
    AGAIN,
    QUANTISED,
    bytes_while_loading,
    first_line,
    quiet_transformers,
    read_json,
    require_memory,
    require_promised,
)
from .config import checked
from .gguf_stored import stored_bytes, stored_model
from .packed_folder import Packing, packed_model, packing_of
from .placement import DTYPES, parse_device, parse_dtype
from .source import Source, cached_folder, locate, refuse_revision
from .text_part import NOTE, auto_class, is_wrapper, text_part, writes
from .tokenizer import asked_tokenizer, needs_package, read_tokenizer

_ONLY = "selfspec runs decoder-only causal language models."
_LEFT_AS_IT_IS = "a live model is left as it is, so merge it yourself (merge_and_unload())"


@dataclass(frozen=True)
class Loaded:
    """A model ready to be run. `owned`: not a user's live model, so weights may be repacked.
    `folder`: of a model that is what this folder holds and nothing else."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    owned: bool
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    """What is to be said of how its weights are stored."""


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
    weights: str | None = None,
) -> Loaded:
    """A model and its tokenizer, if it has one.

    `model` is "demo", a folder, a GGUF file, a hub name or a live model. For a PEFT adapter its
    base model is loaded, with the adapter merged into the weights or live beside them (`adapter`).
    dtype "auto" is float32 on the CPU (exact) and the checkpoint's own on a GPU. `weights`: how our
    kernels are to store the weights, if they run the model; None: they do not.
    """
    kind, target = parse_dtype(dtype), parse_device(device)
    peft_folder.require_mode(adapter)
    model = peft_folder.inside(model) or model  # a live PEFT model's own
    if isinstance(model, PreTrainedModel):
        refuse_revision(revision, "a live model")
        peft_folder.refuse_mode(adapter, "merge", _LEFT_AS_IT_IS)
        asked = asked_tokenizer(tokenizer, token, trust_remote_code)
        return _live(model, kind, None if device == "auto" else target, asked)
    source = locate(model, revision, token, trust_remote_code, weights)
    asked = asked_tokenizer(tokenizer, token, trust_remote_code)
    if (source.folder / peft_folder.CONFIG).is_file():
        name, revision = peft_folder.base_of(source.folder)
        source.fetch_weights(peft_folder.WEIGHTS)
        how: dict[str, Any] = {"token": token, "trust_remote_code": trust_remote_code}
        own = asked or read_tokenizer(source)
        base = load(name, revision=revision, dtype=dtype, device=device, tokenizer=own, **how)
        plain = quantised.method_of(base.model.config) is None
        live = adapter == "live" or (adapter == "auto" and not plain)
        adapted = peft_folder.adapted(base.model, source.folder, source.name, live)
        return replace(base, model=adapted, name=source.name, folder=None)
    for mode in ("merge", "live"):
        peft_folder.refuse_mode(adapter, mode, f"{source.name} is no PEFT adapter")
    config = _read_config(source)
    _refuse_kind(config, config.architectures or [], source.name)
    asked = asked or read_tokenizer(source)
    kept = _kept_in_few_bits(source, config, asked, weights)
    if isinstance(kept, Loaded):
        return kept
    quantised.require_library(config, source.name, kept)
    if kind is None and target.type == "cpu":
        kind = torch.float32
    # the size of quantised weights is known from their files only
    if source.hub is not None and quantised.method_of(config) is None:
        require_memory(estimate_bytes(config, kind, trust_remote_code), target, source.name)
    source.fetch_weights()
    require_memory(estimate_bytes(source.folder, kind), target, source.name)
    _require_promised(source, config)
    read = _load_weights(source, config, kind, target)
    notes = [*source.notes, *([f"quantised linears run as modules: {kept}"] if kept else [])]
    notes += _of_wrapper(config)
    return Loaded(text_part(read), asked, source.name, True, source.folder, tuple(notes))


def _of_wrapper(config: PreTrainedConfig) -> list[str]:
    return [NOTE.format(config.model_type)] if is_wrapper(config) else []


def _refuse_quantised(source: Source) -> None:
    if (source.folder / QUANTISED).is_file():
        raise UnsupportedModel(
            f"{source.name} is a folder that `selfspec quantise` wrote: LLM.from_pretrained runs "
            "it, but there is no transformers model in it to train, adapt or draft with. Use the "
            "original model for that."
        )


def _kept_in_few_bits(
    source: Source,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    weights: str | None,
) -> Loaded | str:
    """A model whose matrices stay in few bits, as they are stored; or why that cannot be, "" if
    nobody stored them so or asked for it."""
    options, cpu = attention_option(config), torch.device("cpu")
    if source.blocks:
        require_memory(stored_bytes(source.folder), cpu, source.name)
        model = stored_model(source.folder, config, options)
        return Loaded(model, tokenizer, source.name, True, source.folder)
    packing = None if weights in (None, "float32") else packing_of(config)
    if not isinstance(packing, Packing):
        return packing or ""
    source.fetch_weights()
    require_memory(estimate_bytes(source.folder, torch.float32), cpu, source.name)
    packed = packed_model(source.folder, config, packing, options)
    return packed if isinstance(packed, str) else Loaded(packed, tokenizer, source.name, True)


def estimate_bytes(
    source: Path | PreTrainedConfig, dtype: torch.dtype | None, trust_remote_code: bool = False
) -> int:
    """The peak memory of loading: all weights in `dtype` (None: as stored), and the largest twice.

    The largest counts twice because it is converted. A folder is judged by the headers of its
    safetensors files, which are checked on the way, and a configuration by an empty model.
    """
    if isinstance(source, Path):
        return bytes_while_loading(source, dtype)
    kind = dtype or DTYPES.get(str(source.dtype).removeprefix("torch."), torch.float32)
    sizes = [count * kind.itemsize for count in _sizes_of(source, trust_remote_code)]
    return sum(sizes) + max(sizes, default=0)


def _sizes_of(config: PreTrainedConfig, trust_remote_code: bool) -> list[int]:
    """How many numbers each weight of a configuration has, by an empty model."""
    auto = auto_class(config)
    with torch.device("meta"):
        empty = auto.from_config(config, trust_remote_code=trust_remote_code)
        empty.tie_weights()  # older versions of transformers do not on this device
    return [parameter.numel() for parameter in empty.parameters()]


def _require_promised(source: Source, config: PreTrainedConfig) -> None:
    """Raise if the configuration is of a far larger model than the folder holds."""
    if quantised.method_of(config) is not None:  # stored in other shapes
        return

    def promised() -> int:
        try:
            return sum(_sizes_of(config, source.trust))
        except Exception as error:  # whatever it is: see `_read_config`
            raise _bad_config(source.folder, error) from error

    path = source.folder / "config.json"
    require_promised(source.folder, checked(read_json(path), path).layers, promised)


def _read_config(source: Source) -> PreTrainedConfig:
    """The configuration. Raises if it is broken, of an unknown type or needs untrusted code."""
    _refuse_quantised(source)
    folder, name = source.folder, source.name
    raw = read_json(folder / "config.json")
    kind = checked(raw, folder / "config.json").model_type
    if not source.trust and "auto_map" in raw and kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{name} comes with Python code of its own (model type {kind!r}), which could do "
            "anything and is not run unasked. If you have read it and trust it, pass "
            "trust_remote_code=True. Or use a copy of a type that transformers knows."
        )
    if "auto_map" not in raw and kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"{name} has model type {kind!r}, which transformers {transformers.__version__} does "
            f"not know. {_ONLY} A newer transformers may know it."
        )
    refuse_assistant(kind or "", name)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=source.trust)
    except ImportError as error:
        raise needs_package(name, error) from error
    except Exception as error:  # whatever it is: the file is another's, and so is its reader
        raise _bad_config(folder, error) from error
    assert isinstance(config, PreTrainedConfig)
    return config


def refuse_assistant(kind: str, name: str) -> None:
    """Raise for a model that only drafts for another one."""
    if kind.endswith("_assistant"):
        raise UnsupportedModel(
            f"{name} is a {kind}: it drafts for another model, whose keys and values it reads, and "
            "writes no text by itself. Load the model that it was made for, which selfspec drafts "
            "for by other means."
        )


def _refuse_kind(config: PreTrainedConfig, classes: list[str], name: str) -> None:
    """Raise unless the config and the saved classes are of a decoder-only causal language model."""
    facts, kind = config.to_dict(), config.model_type
    refuse_assistant(kind, name)
    if facts.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{name} is an encoder-decoder model ({kind}). {_ONLY}")
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not facts.get("is_decoder"):
        raise UnsupportedModel(f"{name} is an encoder ({kind}). {_ONLY}")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    eyes = is_wrapper(config)
    if not writes(kind) and "AutoModelForCausalLM" not in (facts.get("auto_map") or {}):
        raise UnsupportedModel(
            f"{name} is a {kind} model: transformers has no causal language model of its type. "
            f"{_ONLY}"
        )
    endings = ("ForCausalLM", "LMHeadModel", *(("ForConditionalGeneration",) if eyes else ()))
    if classes and not any(cls == causal or cls.endswith(endings) for cls in classes):
        raise UnsupportedModel(
            f"{name} was saved as {', '.join(classes)}, without a head that predicts the next "
            f"token. {_ONLY}"
        )


def _load_weights(
    source: Source, config: PreTrainedConfig, kind: torch.dtype | None, target: torch.device
) -> PreTrainedModel:
    name = source.name
    auto = auto_class(config)
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
                ignore_mismatched_sizes=True,  # they are reported, and refused below
                output_loading_info=True,
            )
    except ImportError as error:
        raise needs_package(name, error) from error
    except torch.OutOfMemoryError as error:
        raise weights_too_large(name, None, kind, target) from error
    except MemoryError as error:
        raise ResourceError(
            f"{name} ran out of memory on {target} while loading: {first_line(error)}. Use a "
            "smaller dtype."
        ) from error
    except SafetensorError as error:
        raise BrokenCheckpoint(
            f"the weights of {name} cannot be read: {first_line(error)}. {AGAIN}"
        ) from error
    except TypeError as error:  # from a config that older versions of transformers do not check
        raise _bad_config(source.folder, error) from error
    except Exception as error:  # whatever it is: see `_read_config`
        raise ModelError(f"transformers cannot load {name}: {first_line(error)}") from error
    _check_report(report, name)
    model.eval().requires_grad_(False)
    assert isinstance(model, PreTrainedModel)
    return model


def _bad_config(folder: Path, error: Exception) -> BrokenCheckpoint:
    path = folder / "config.json"
    return BrokenCheckpoint(f"{path} is not accepted by transformers: {first_line(error)}")


def attention_option(config: PreTrainedConfig) -> dict[str, str]:
    """What transformers must be told to compute attention scores as the config says.

    SDPA does not know Gemma 2's soft caps, nor did it always know GPT-2's own scales. Older
    versions of transformers choose it all the same and leave them out.
    """
    facts = config.to_dict()
    capped = config.model_type == "gemma2" and facts.get("attn_logit_softcapping")
    unscaled = not facts.get("scale_attn_weights", True)
    scaled = facts.get("scale_attn_by_inverse_layer_idx") or unscaled
    return {"attn_implementation": "eager"} if capped or scaled else {}


def _check_report(report: dict[str, Any], name: str) -> None:
    """Raise unless the weights of the model and of the checkpoint are the same."""
    mismatched = [
        f"{key} {tuple(stored)} instead of {tuple(wanted)}"
        for key, stored, wanted in report["mismatched_keys"]
    ]
    shape = "has, in another shape than its config.json says,"
    no_place = "has, without a place in the model of its config.json,"
    random = "transformers would fill them with random numbers"
    for keys, what, consequence in (
        (report["missing_keys"], "lacks", random),
        (mismatched, shape, random),
        (report["unexpected_keys"], no_place, "the model would run without them"),
    ):
        if keys:
            first = ", ".join(sorted(keys)[:3])
            raise BrokenCheckpoint(
                f"{name} {what} {len(keys)} weights, first {first}: {consequence}. {AGAIN}"
            )


def _live(
    model: PreTrainedModel,
    kind: torch.dtype | None,
    target: torch.device | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Loaded:
    """A user's own model, which is checked but not changed."""
    name = model.name_or_path or type(model).__name__
    _refuse_kind(model.config, [], name)  # no classes: the model itself is asked for its head
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{type(model).__name__} has no language-model head. {_ONLY}")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        where = ", ".join(sorted(map(str, devices)))
        where += " (offloaded, or never loaded)" if "meta" in where else ""
        raise UnsupportedModel(
            f"the weights of {name} are on {where}, and selfspec needs the model whole on one "
            "device. Load it with device_map='cpu' or 'cuda'."
        )
    here = devices.pop()
    if kind is not None and kind != model.dtype:
        raise OptionError(
            f"dtype={kind} contradicts the model, which is {model.dtype} and is left as it is. "
            "Convert it with model.to()."
        )
    if target is not None and (target.type != here.type or target.index not in (None, here.index)):
        raise OptionError(
            f"device='{target}' contradicts the model, which is on {here} and is left as it is. "
            "Move it with model.to()."
        )
    if tokenizer is None and (path := model.name_or_path):
        folder = Path(path) if Path(path).is_dir() else cached_folder(path)
        if folder is not None:
            tokenizer = read_tokenizer(Source(path, folder, trust=False))
    notes = tuple(_of_wrapper(model.config))
    return Loaded(text_part(model), tokenizer, name, owned=False, notes=notes)
