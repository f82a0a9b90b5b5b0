"""llama.cpp through the wheel xllamacpp, on an F32 file with an F32 key/value cache, so that only like precisions are compared.

Its completion call takes ids and answers with text; our conversion names token 17 "<17>", so the text is the ids.
"""

from __future__ import annotations

import re

import xllamacpp

from selfspec.bench.convert import converted, write_gguf

CONTEXT = 4096


class Peer:
    packages = ("xllamacpp",)

    def load(self, folder: str, dtype: str, threads: int) -> None:
        if dtype != "float32":
            raise ValueError(f"dtype={dtype!r}: this peer is set up for float32")
        params = xllamacpp.CommonParams()
        params.model.path = str(converted(folder, "gguf", write_gguf))
        params.n_ctx = CONTEXT
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_prompt, params.cache_ram_mib = False, 0  # every prompt is computed, as at the other peers
        params.verbosity = 0
        self.server = xllamacpp.Server(params)

    def generate(self, ids: list[int], max_new_tokens: int, eos: list[int]) -> list[int]:
        request = {
            "prompt": ids,
            "n_predict": max_new_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "stop": [f"<{i}>" for i in eos],
        }
        reply = self.server.handle_completions(request)
        if "choices" not in reply:
            raise RuntimeError(str(reply)[:300])
        tokens = [int(word) for word in re.findall(r"<(\d+)>", reply["choices"][0]["text"])]
        # a stop word is cut off the text; with several there is no telling which it was, so any of them stands for all
        return tokens if reply["choices"][0]["finish_reason"] == "length" else [*tokens, *eos[:1]]
