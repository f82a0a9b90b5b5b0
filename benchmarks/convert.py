"""Rewrite a Llama-family Hugging Face folder for engines that read other formats, so that all peers
run the same float32 numbers, or their own rounding of them.

Knows the two formats' traps (row order of q and k, tied heads, the rope key that transformers 5
renamed) and where converted models are kept. Does not know how a peer runs them. Imports no torch:
it works inside the peers' processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selfspec.errors import Unavailable, UnsupportedModel

Weights = npt.NDArray[np.float32]


def cache_folder() -> Path:
    """Where converted models live: below $SELFSPEC_CACHE, or below the user's ordinary cache
    folder."""
    return Path(os.environ.get("SELFSPEC_CACHE") or Path.home() / ".cache" / "selfspec") / "peers"


def fingerprint(source: Path) -> str:
    """Names a model by its configuration and by its weights' sizes and dates: another model or a
    newer one is converted anew."""
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    config = b"" if source.is_file() else (source / "config.json").read_bytes()
    seen = hashlib.sha256(config)
    for file in files:
        stat = file.stat()
        seen.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return seen.hexdigest()[:16]


def converted(folder: str | Path, kind: str, write: Callable[[Path, Path], None]) -> Path:
    """The converted form of a model, made with `write(source, target)` when it is not in the cache
    yet.

    It is written under a name of its own and renamed when complete, so an interrupted or a second
    conversion leaves no broken one.
    """
    source = Path(folder)
    target = cache_folder() / f"{kind}-{fingerprint(source)}"
    if target.exists():
        return target
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(source, partial)
        if not target.exists():  # another process may have been quicker; its copy is as good
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if partial.is_file():
            partial.unlink()
    return target


def loss_of(logits: Weights, wanted: Sequence[int]) -> tuple[float, list[int]]:
    """Of logits, those tokens' summed loss and the likeliest tokens: what a peer's `read`
    returns."""
    exact = logits.astype(np.float64)
    top = exact.max(axis=-1)
    total = top + np.log(np.exp(exact - top[:, None]).sum(axis=-1))
    loss = total - exact[np.arange(len(wanted)), list(wanted)]
    return float(loss.sum()), logits.argmax(axis=-1).tolist()


@dataclass(frozen=True)
class LlamaShape:
    """What the other formats want to be told of a Llama configuration."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    vocabulary: int
    epsilon: float
    rope_theta: float
    tied: bool

    @classmethod
    def read(cls, folder: Path) -> LlamaShape:
        """From config.json; refuses what the converters would write down wrongly instead of writing
        it."""
        config = json.loads((folder / "config.json").read_text())
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if (
            config.get("model_type") != "llama"
            or kind != "default"
            or config.get("attention_bias")
            or config.get("mlp_bias")
        ):
            raise UnsupportedModel(
                f"The benchmark's converters write Llama models with default RoPE and no biases, "
                "not model_type="
                f"{config.get('model_type')!r} with rope_type={kind!r}. Leave the converting "
                "peers out with --peers."
            )
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            context=config["max_position_embeddings"],
            vocabulary=config["vocab_size"],
            epsilon=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tied=bool(config.get("tie_word_embeddings")),
        )


def read_weights(folder: Path) -> Iterator[tuple[str, Weights]]:
    """Every tensor of a folder's safetensors files, as float32."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Unavailable(
            f"No *.safetensors in the model folder {folder.name!r}: nothing to convert. Save the "
            "model as safetensors."
        )
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                yield name, np.asarray(tensors.get_tensor(name), dtype=np.float32)


def interleave(weight: Weights, heads: int) -> Weights:
    """Row order of q and k for engines that rotate neighbouring pairs, where transformers rotates
    the two halves of a head."""
    head_dim = weight.shape[0] // heads
    halves = weight.reshape(heads, 2, head_dim // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face Llama tensor."""
    if name in TOP:
        return TOP[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    part = part.removesuffix(".weight")
    if not layer.isdigit() or part not in BLOCK:
        raise UnsupportedModel(
            f"The tensor {name!r} has no place in a Llama GGUF file. Leave the converting peers "
            "out with --peers."
        )
    return f"blk.{layer}.{BLOCK[part]}.weight"


def write_gguf(source: Path, target: Path, kind: str = "F32", head: str = "F32") -> None:
    """A GGUF file, matrices as this kind of block, the embedding (and the head) as `head`.

    The vocabulary is one made-up word a token, "<id>", under the tokenizer kind `rwkv`: the only
    kind whose end-of-text id has no default, so that llama.cpp neither stops nor suppresses a token
    that plain greedy decoding would have written. Ids go in and come out.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    shape = LlamaShape.read(source)
    writer = GGUFWriter(target, "llama")
    _write_shape(writer, shape)
    write_words(writer, shape.vocabulary)
    turns = {"self_attn.q_proj.weight": shape.heads, "self_attn.k_proj.weight": shape.kv_heads}
    for name, weight in read_weights(source):
        if name == "lm_head.weight" and shape.tied:
            continue  # llama.cpp reads the embedding for both when there is no output.weight
        heads = next((count for tail, count in turns.items() if name.endswith(tail)), None)
        weight = interleave(weight, heads) if heads else weight
        form = "F32" if weight.ndim < 2 else head if name in TOP else kind
        blocks = GGMLQuantizationType[form]
        writer.add_tensor(gguf_name(name), quantize(weight, blocks), raw_dtype=blocks)
    finish(writer)


def write_words(writer: Any, vocabulary: int) -> None:
    """The made-up words."""
    from gguf import TokenType

    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f"<{index}>" for index in range(vocabulary)])
    writer.add_token_types([TokenType.NORMAL] * vocabulary)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reword_gguf(source: Path, target: Path) -> None:
    """The very blocks of a Llama GGUF file under the made-up words of `write_gguf`."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    writer = GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama.") and field.types[0] != GGUFValueType.ARRAY:
            writer.add_key_value(field.name, field.contents(), field.types[0])
    write_words(writer, len(reader.fields["tokenizer.ggml.tokens"].data))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)


def unpack_gguf(source: Path, target: Path) -> None:
    """The same file with all its numbers in float32. Its words and its chat template stay, for a
    server that is asked in text."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        value = 0 if field.name == "general.file_type" else field.contents()  # 0: all F32
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    finish(writer)


def _write_shape(writer: Any, shape: LlamaShape) -> None:
    writer.add_name("peer copy")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(0)  # all F32


def write_ctranslate2(source: Path, target: Path) -> None:
    """A float32 CTranslate2 folder, by CTranslate2's own converter.

    It reads `rope_theta` from the top of config.json, where transformers 5 no longer writes it, and
    would silently take 10000; so it is shown a folder of links with the old key put back.
    """
    from ctranslate2.converters import TransformersConverter

    shape = LlamaShape.read(source)
    shown = target.with_name(f"{target.name}.source")
    shown.mkdir(parents=True)
    try:
        for file in source.iterdir():
            if file.is_file() and file.name != "config.json":
                (shown / file.name).symlink_to(file.resolve())
        config = json.loads((source / "config.json").read_text())
        config["rope_theta"] = shape.rope_theta
        (shown / "config.json").write_text(json.dumps(config))
        TransformersConverter(str(shown)).convert(str(target), quantization="float32", force=True)
    finally:
        shutil.rmtree(shown)
