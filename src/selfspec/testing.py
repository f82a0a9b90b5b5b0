"""Public builders for tests and experiments: tiny random models, a tokenizer, known acceptance.

Nothing here is downloaded, and no figure about speed comes from here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from .llm import LLM
from .model.compute.plan import LayerPlan
from .model.families import FAMILIES
from .model.from_transformers import from_transformers
from .model.layered import LayeredModel
from .model.load.loading import attention_option
from .model.tiny_configs import PECULIAR_CONFIGS
from .train.exit_adapter import AdapterNet
from .train.head_net import HeadNet
from .trained.blocks import BlockSize
from .trained.files import TrainedPart, signature
from .trained.lora import stored_name

SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = len(SPECIALS) + 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,  # large enough that a random model has opinions
}
_ROUND = 10  # tokens through which a settling model's text goes
_FAVOURS = ("expert_bias", "correction_bias")


def families() -> list[str]:
    """Every family that selfspec knows."""
    return sorted(FAMILIES)


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny random model of a family as transformers makes it; `changes` go to its config."""
    options = {**_SMALL, **PECULIAR_CONFIGS.get(family, {}), **changes}
    computed = vars(CONFIG_MAPPING[family])  # Falcon's size of a head follows from others
    config = AutoConfig.for_model(
        family, **{k: v for k, v in options.items() if not isinstance(computed.get(k), property)}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, **attention_option(config)
        )
        for name, parameter in model.named_parameters():
            # norms and biases start as constants, which would hide mistakes
            if "norm" in name or parameter.dim() == 1 or name.endswith(("bias", *_FAVOURS)):
                parameter.data += 0.2 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith((*_FAVOURS, "layer_scalar")):  # of 0 or 1
                buffer += 0.2 * torch.randn_like(buffer)
    model.eval().requires_grad_(False)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, with a chat template; fits `tiny_model`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_llm(family: str = "llama", seed: int = 0, **changes: Any) -> LLM:
    """A tiny random model with the byte tokenizer, ready to generate (nonsense)."""
    return LLM.from_pretrained(tiny_model(family, seed, **changes), tokenizer=tiny_tokenizer())


def tiny_head(
    model: LayeredModel,
    seed: int = 0,
    vocabulary: Sequence[int] = (),
    layers: Sequence[int] = (0, 1),
) -> TrainedPart:
    """A random draft head for a tiny model. It can say these tokens, or every third."""
    size = _small_block(model)
    net = functools.partial(HeadNet, size, len(layers), model.shape.context)
    settings = {"layers": list(layers), "block": size.as_dict()}
    return _random_part(model, "draft-head", net, settings, seed, vocabulary)


def tiny_adapter(
    model: LayeredModel, exit_layer: int = 2, seed: int = 0, vocabulary: Sequence[int] = ()
) -> TrainedPart:
    """A random exit adapter of two blocks for a tiny model. It can say these, or every third."""
    size = _small_block(model)
    net = functools.partial(AdapterNet, size, 2, model.shape.context)
    settings = {"exit": exit_layer, "blocks": 2, "block": size.as_dict()}
    return _random_part(model, "exit-adapter", net, settings, seed, vocabulary)


def tiny_lora(
    model: LayeredModel, seed: int = 0, attention: Sequence[int] = (1,), mlp: Sequence[int] = (1, 2)
) -> TrainedPart:
    """A random draft-LoRA of rank 2 for a tiny model of Llama's kind. It can say everything."""
    family, shape = FAMILIES[model.shape.family], model.shape
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    every = [family.qkv, (family.out,), family.gate_up, (family.down,)]
    for index, block in enumerate(model.blocks):
        skipped = [index in attention] * 2 + [index in mlp] * 2
        for linear, names, skip in zip(block.linears, every, skipped, strict=True):
            if skip:
                continue
            qkv = [shape.heads, shape.kv_heads, shape.kv_heads]
            shares = qkv if len(names) == 3 else [1] * len(names)
            for name, share in zip(names, shares, strict=True):
                stored, outputs = stored_name(index, name), linear.outputs * share // sum(shares)
                a = torch.randn(2, linear.inputs, generator=generator) * linear.inputs**-0.5
                b = torch.randn(outputs, 2, generator=generator)
                tensors |= {f"{stored}.a": a, f"{stored}.b": 0.1 * b}
    tensors["vocabulary"] = torch.arange(shape.vocabulary, dtype=torch.int32)
    settings = {"attention": list(attention), "mlp": list(mlp), "rank": 2}
    return TrainedPart("draft-lora", signature(model), settings, tensors)


def tiny_predictors(
    model: LayeredModel,
    seed: int = 0,
    candidates: int = 4,
    source: str = "recycle",
    layers: Sequence[int] = (),
    tokens: Sequence[int] = (),
) -> TrainedPart:
    """Random exit predictors for a tiny model, after all its layers but the last or after these.
    They fire about every other time. `tokens`: with the source first-look, what it chooses from."""
    chosen = list(layers) or list(range(1, model.layers))
    generator, hidden = torch.Generator().manual_seed(seed), 8
    shapes = {
        "first.weight": (len(chosen), 3 * candidates, hidden),
        "first.bias": (len(chosen), hidden),
        "second.weight": (len(chosen), hidden),
        "second.bias": (len(chosen),),
        "svm.weight": (len(chosen), 2),
        "svm.bias": (len(chosen),),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if tokens:
        tensors["vocabulary"] = torch.tensor(list(tokens), dtype=torch.int32)
    settings = {
        "candidates": candidates,
        "source": source,
        "hidden": hidden,
        "layers": chosen,
        "exits": [1 / len(chosen)] * len(chosen),
    }
    return TrainedPart("exit-predictors", signature(model), settings, tensors)


def _small_block(model: LayeredModel) -> BlockSize:
    shape = model.shape
    return BlockSize(shape.width, shape.heads, shape.kv_heads, shape.head_size, 96)


def _random_part(
    model: LayeredModel,
    kind: str,
    net: Callable[[], torch.nn.Module],
    settings: dict[str, Any],
    seed: int,
    vocabulary: Sequence[int],
) -> TrainedPart:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = net().state_dict()
        tensors = {name: value + 0.2 * torch.randn_like(value) for name, value in state.items()}
    tokens = sorted(set(vocabulary)) or range(0, model.shape.vocabulary, 3)
    tensors["vocabulary"] = torch.tensor(tokens, dtype=torch.int32)
    return TrainedPart(kind, signature(model), settings, tensors)


def near_identity_model(
    acceptance: float, exit_layer: int = 2, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A random Llama whose exit at `exit_layer` agrees with the whole model on about this share of
    its own greedy tokens. How little the later layers change is found by bisection."""
    options = {"tie_word_embeddings": False, "num_hidden_layers": 8, **changes}
    model = tiny_model("llama", seed, **options)
    late = [
        weight
        for layer in model.model.layers[exit_layer:]
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)
    ]
    originals = [weight.clone() for weight in late]
    low, high = 0.0, 1.0
    for _ in range(9):
        middle = (low + high) / 2
        for parameter, original in zip(late, originals, strict=True):
            parameter.data = original * middle
        if exit_agreement(model, exit_layer) > acceptance:
            low = middle
        else:
            high = middle
    return model


def exit_agreement(
    model: PreTrainedModel,
    exit_layer: int,
    tokens: int = 160,
    prompts: Sequence[int] = (5, 50, 120, 200),
) -> float:
    """The share of the model's greedy tokens that the exit after these layers names first too."""
    layered = from_transformers(model, check=False)
    agreed = 0
    for prompt in prompts:
        llm = LLM(layered, None, "near-identity")
        new = llm.generate([prompt], max_new_tokens=tokens, eos=[]).tokens
        text = torch.tensor([prompt, *new[:-1]])
        cache = layered.new_cache(1, len(text))
        plan, layout = LayerPlan(0, exit_layer), cache.layout([len(text)])
        early = layered.head(layered.run(layered.embed(text), plan, cache, layout))
        agreed += int((early.argmax(-1) == torch.tensor(new)).sum())
    return agreed / (tokens * len(prompts))


def settling_model(depths: Sequence[int], layers: int = 12, seed: int = 0) -> PreTrainedModel:
    """A Llama whose answer to each token is there after a known number of layers: token t's after
    `depths[t % len(depths)]`. Before that a wrong token is likeliest. Greedy text goes round and
    round through some tokens, and what attention adds changes no answer."""
    answers = VOCABULARY  # the first number of a state that the head reads
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))
    rounds = torch.cat([some.roll(-1) for some in order.split(_ROUND)])
    follows = torch.empty_like(order).scatter_(0, order, rounds)
    model = tiny_model(
        seed=seed, hidden_size=2 * VOCABULARY + 26, intermediate_size=VOCABULARY + 13,
        num_hidden_layers=layers, tie_word_embeddings=False,
    )  # fmt: skip
    tokens = torch.arange(VOCABULARY)
    inner, (embedding, head) = model.model, (model.model.embed_tokens, model.lm_head)
    for weight in (embedding.weight, head.weight, *(each.weight for each in _norms(inner))):
        weight.fill_(1.0 if weight.dim() == 1 else 0.0)
    embedding.weight[tokens, tokens] = 1.0
    embedding.weight[tokens, answers + follows.roll(1)] = 0.6  # what is said too early
    head.weight[tokens, answers + tokens] = 1.0
    for number, layer in enumerate(inner.layers, start=1):
        layer.self_attn.o_proj.weight *= 0.002
        mine = torch.tensor([depths[token % len(depths)] == number for token in tokens.tolist()])
        for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
            weight.zero_()
            weight[tokens[mine], tokens[mine]] = 0.5
        layer.mlp.down_proj.weight.zero_()
        layer.mlp.down_proj.weight[answers + follows[mine], tokens[mine]] = 0.02
    return model


def _norms(inner: Any) -> list[Any]:
    """Of all halves, and the last one."""
    halves = [(each.input_layernorm, each.post_attention_layernorm) for each in inner.layers]
    return [inner.norm, *(norm for pair in halves for norm in pair)]
