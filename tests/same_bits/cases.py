"""What is computed for the record: the models, the texts, the drafters, and the digests of it all.

Knows nothing of selfspec but the functions of `hands.py`, nor where the record is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import hands

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0, 9.5],
}
MODELS: dict[str, dict[str, Any]] = {  # what `hands.load` is told
    "llama, odd sizes": {
        "family": "llama", "seed": 1, "hidden_size": 52, "head_dim": 12, "intermediate_size": 70,
        "tie_word_embeddings": True, "attention_bias": True,
    },
    "llama, alike layers": {"family": "llama", "seed": 2, "late": 0.1, "num_hidden_layers": 6},
    "mistral, window": {"family": "mistral", "seed": 3, "sliding_window": 12},
    "qwen3_moe": {"family": "qwen3_moe", "seed": 4},
    "gemma2, soft caps": {"family": "gemma2", "seed": 5},
    "gemma3, two ropes": {"family": "gemma3_text", "seed": 6, "sliding_window": 7},
    "phi3, longrope": {
        "family": "phi3", "seed": 7, "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": 128,
    },
    "cohere2, parallel": {"family": "cohere2", "seed": 8},
    "gpt_neox": {"family": "gpt_neox", "seed": 9},
    "gpt2": {"family": "gpt2", "seed": 10},
}  # fmt: skip

NEW = 20
PROMPTS = [
    list(text)
    for text in (
        b"once upon a time, once upon",
        b"the",
        b"aXb aXb aXb a",
        b"more keys than a block holds, and more than any window: 0123456789 0123456789",
    )
]
ALONE, PAIR, BATCH = [0], [1, 3], [0, 1, 3]
_SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 11}
_PENALISED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
_BOTH = {
    "temperature": 0.7, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
    "seed": 2,
}  # fmt: skip
CALLS: dict[str, tuple[list[int], dict[str, Any]]] = {  # which prompts, how tokens are chosen
    "greedy batch": (BATCH, {}),
    "sampled batch": (PAIR, _SAMPLED),
    "greedy alone": (ALONE, {}),
    "penalised batch": (PAIR, _PENALISED),
    "sampled alone": (ALONE, _SAMPLED),
    "penalised and sampled batch": (PAIR, _BOTH),
}  # in this order no three neighbours are all greedy, see `_drafted`

FIXED: hands.Draft = ("fixed", {"tokens": 5})
SHY: hands.Draft = ("confidence", {"tokens": 5, "threshold": 0.15})
_HEAD: hands.Draft = ("draft-head", {})
_EXIT: hands.Draft = ("early-exit", {"layer": 2})


@dataclass(frozen=True)
class Tried:
    """A drafter as it is recorded."""

    draft: hands.Draft
    control: hands.Draft | None = FIXED
    draws: bool = False
    """Drafts are drawn, so under sampling its texts are its own."""


DRAFTERS: dict[str, Tried] = {
    "auto": Tried(
        ("auto", {"candidates": [("hybrid", {}), _EXIT, ("cosine", {"threshold": 0.5})]}), None
    ),
    "cosine": Tried(("cosine", {"threshold": 0.5, "keep_last": 1}), SHY),
    "draft-head": Tried(_HEAD),
    "draft-head, tree": Tried(("draft-head", {"width": 3})),
    "draft-head, drawn": Tried(("draft-head", {"sample": True}), draws=True),
    "draft-model": Tried(("draft-model", {})),
    "early-exit": Tried(_EXIT),
    "early-exit, drawn": Tried(("early-exit", {"layer": 2, "sample": True}), draws=True),
    "hybrid": Tried(("hybrid", {})),
    "jacobi": Tried(("jacobi", {})),
    "kv-subset": Tried(("kv-subset", {"sink": 1, "recent": 2, "blocks": 1, "block_size": 2})),
    "layer-skip": Tried(("layer-skip", {"attention": (1, 2), "mlp": (2,)}), SHY),
    "ngram": Tried(("ngram", {})),
    "quantised": Tried(("quantised", {"weights": "int4"})),
    "recycle": Tried(("recycle", {})),
    "scripted": Tried(("scripted", {"wrong_every": 3})),
    "quantised, drawn": Tried(("quantised", {"weights": "int4", "sample": True}), draws=True),
    "draft-head, drawn tree": Tried(("draft-head", {"width": 3, "sample": True}), draws=True),
    "dynamic-exit": Tried(("dynamic-exit", {})),
}


def computed(turn: int) -> dict[str, Any]:
    """Everything, as it stands in the record below a variant. `turn`: the variant's number.

    Drafters that write what plain decoding writes need no digests. Those that did not are named in
    `strays`, and in `idle` those of which never some drafts were kept and others were not."""
    found: dict[str, Any] = {}
    useful: set[str] = set()
    strays: list[str] = []
    for index, (name, wishes) in enumerate(MODELS.items()):
        llm = hands.load(**wishes)
        plain = {call: _written(llm, call, None, None) for call in CALLS}
        own: dict[str, str] = {}
        for title, call, written in _drafted(llm, plain, turn + index):
            if 0 < written.kept < written.drafted:
                useful.add(title)
            if DRAFTERS[title].draws and "sampled" in call:
                own[f"{title}: {call}"] = _text_digest(written)
            elif _content(written) != _content(plain[call]):
                strays.append(f"{name}: {title}: {call}")
        found[name] = {
            "logits": dict(_logits(llm)),
            "logprobs": {call: digest(written.logprobs) for call, written in plain.items()},
            "texts": {call: _text_digest(written) for call, written in plain.items()},
            "texts of drawn drafts": own,
        }
    return {"models": found, "idle": sorted(DRAFTERS.keys() - useful), "strays": strays}


def digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def _logits(llm: Any) -> Iterator[tuple[str, str]]:
    """A prompt, then the same tokens one by one and as a block, a tree, and rows of all lengths.

    The tree's longest path is longer than two of the windows."""
    more = list(b" and then 1234567890")
    parents = [-1, 0, 1, 0, 2, 4, 5, 1, 6, 8, 9, -1, 10, 12, 13, 11, 14, 16, 14, 15]
    alone = hands.Reading(llm, [PROMPTS[3]])
    yield "prefill", digest(alone.prefill())
    yield "steps", digest(b"".join(alone.read([[token]]) for token in more))
    alone.forget()
    yield "block", digest(alone.read([more]))
    alone.forget()
    yield "tree", digest(alone.read([more], [parents]))
    rows = hands.Reading(llm, PROMPTS)
    yield "prefill of rows", digest(rows.prefill())
    yield "ragged rows", digest(rows.read([more[:3], [], more, more[5:6]]))


def _drafted(
    llm: Any, plain: dict[str, hands.Written], turn: int
) -> Iterator[tuple[str, str, hands.Written]]:
    """Drafter, call, what was written. All calls of all drafters would take minutes: each drafter
    does one call on every model, and one more by turns. In three variants every drafter meets every
    model greedily and sampled, and every call."""
    script = [tokens for tokens, _ in plain["greedy batch"].texts]
    for index, (title, tried) in enumerate(DRAFTERS.items()):
        drafter = hands.drafter(llm, tried.draft, script)
        always = "sampled batch" if tried.draws else "greedy batch"
        others = [call for call in CALLS if call != always]
        for call in (always, others[(turn + index) % len(others)]):
            if title == "scripted":
                lines = [tokens for tokens, _ in plain[call].texts]
                drafter = hands.drafter(llm, tried.draft, lines)
            yield title, call, _written(llm, call, drafter, tried.control)


def _written(llm: Any, call: str, drafter: Any, control: hands.Draft | None) -> hands.Written:
    rows, sampling = CALLS[call]
    return hands.write(llm, [PROMPTS[row] for row in rows], NEW, sampling, drafter, control)


def _content(written: hands.Written) -> tuple[Any, bytes]:
    return written.texts, written.logprobs


def _text_digest(written: hands.Written) -> str:
    return digest(json.dumps(written.texts).encode())
