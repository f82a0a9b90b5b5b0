"""llama.cpp through the wheel xllamacpp, on an F32 file with an F32 key/value cache, so that only
like precisions are compared; with weights of few bits on a file of its own blocks, its cache as it
comes.

Its completion call takes ids and answers with text; our conversion names token 17 "<17>", so the
text is the ids. A GGUF file is taken as it is: `read` asks for ids only. With the weights "stored"
its blocks are put into a file with such names.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import xllamacpp

from benchmarks.convert import converted, reword_gguf, write_gguf

WORD = re.compile(r"<(\d+)>")
CONTEXT = 8192
LONGEST_NGRAM = 3
BLOCKS = {"int8": ("Q8_0", "Q8_0"), "int4": ("Q4_0", "Q8_0")}  # of matrices, of embedding and head


class Peer:
    packages = ("xllamacpp",)
    methods = {  # noqa: RUF012  (read from the source, without importing it)
        "plain": (),
        "ngram": ("tokens",),
    }
    first: Any  # set by the host

    def load(self, folder: str, dtype: str, threads: int, weights: str = "auto") -> None:
        if dtype != "float32" or weights not in ("auto", "stored", *BLOCKS):
            raise ValueError(f"{dtype}, {weights}: this peer is set up for float32, int8 and int4")
        self.path, self.precision = model_of(folder, weights)
        self.threads, self.exact = threads, weights == "auto"
        self.servers: dict[tuple[str, int], xllamacpp.Server] = {}
        self.server("plain", 0)

    def server(self, method: str, tokens: int) -> xllamacpp.Server:
        """Drafting is said when a server starts: each way has its own, on the same mapped file."""
        if (method, tokens) not in self.servers:
            self.servers[method, tokens] = xllamacpp.Server(self.params(method, tokens))
        return self.servers[method, tokens]

    def params(self, method: str, tokens: int) -> xllamacpp.CommonParams:
        params = xllamacpp.CommonParams()
        params.model.path = self.path
        params.n_ctx = CONTEXT
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.threads
        if self.exact:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_prompt, params.cache_ram_mib = (
            False,
            0,
        )  # every prompt is computed, as at the other peers
        params.verbosity = 0
        if method == "ngram":  # the last match of exactly so many tokens, and what followed it
            params.speculative.types = [
                xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE
            ]
            params.speculative.ngram_simple.size_n = LONGEST_NGRAM
            params.speculative.ngram_simple.size_m = tokens
        return params

    def generate(
        self,
        ids: list[int],
        max_new_tokens: int,
        eos: list[int],
        method: str = "plain",
        tokens: int = 0,
    ) -> list[int]:
        request = {
            "prompt": ids,
            "n_predict": max_new_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "stop": [f"<{i}>" for i in eos],
            "stream": True,
        }
        pieces: list[dict[str, Any]] = []
        self.server(method, tokens).handle_completions(
            request, lambda piece: self.hear(piece, pieces)
        )
        failed = [piece for piece in pieces if "choices" not in piece]
        if failed or not pieces:
            raise RuntimeError(str(failed)[:300] or "no answer")
        timings = pieces[-1].get("timings", {})
        self.counts = {
            "drafted": timings.get("draft_n", 0),
            "accepted": timings.get("draft_n_accepted", 0),
        }
        made = [int(word) for piece in pieces for word in WORD.findall(piece["choices"][0]["text"])]
        # a stop word is cut off the text; with several there is no telling which it was, so any of
        # them stands for all
        ended = pieces[-1]["choices"][0]["finish_reason"]
        return made if ended == "length" else [*made, *eos[:1]]

    def read(self, ids: list[int]) -> tuple[float, list[int]]:
        """The summed loss of all ids but the first, and what was likeliest in their places.

        A completion of one token each: a bias makes it the text's, and the log-probabilities that
        come with it are those before the bias. The key/value cache is kept in between.
        """
        loss, said = 0.0, []
        for end in range(1, len(ids)):
            request = {
                "prompt": ids[:end],
                "n_predict": 1,
                "temperature": 0,
                "logprobs": 1,
                "logit_bias": [[ids[end], 1e6]],
                "cache_prompt": True,
                "id_slot": 0,
            }
            pieces: list[dict[str, Any]] = []
            self.server("plain", 0).handle_completions(request, pieces.append)
            if "choices" not in pieces[-1]:
                raise RuntimeError(str(pieces)[:300])
            (token,) = pieces[-1]["choices"][0]["logprobs"]["content"]
            if token["id"] != ids[end]:
                raise RuntimeError(f"asked about token {ids[end]}, it spoke of {token['id']}")
            loss -= token["logprob"]
            said.append(int(token["top_logprobs"][0]["id"]))
        return loss, said

    def hear(self, piece: dict[str, Any], pieces: list[dict[str, Any]]) -> None:
        if not pieces:
            self.first(len(WORD.findall(str(piece))) or 1)
        pieces.append(piece)


def model_of(folder: str, weights: str) -> tuple[str, str]:
    """The file to run, and what it is."""
    if weights == "stored":
        words = str(converted(folder, "gguf-stored", reword_gguf))
        return words, "the file's own blocks; activations Q8; f16"
    if folder.endswith(".gguf"):
        return folder, "float32"
    if weights == "auto":
        return str(converted(folder, "gguf", write_gguf)), "float32"
    kind, head = BLOCKS[weights]
    write = partial(write_gguf, kind=kind, head=head)
    said = kind if kind == head else f"{kind}, head {head}"
    return str(converted(folder, f"gguf-{kind}-{head}", write)), f"{said}; activations Q8; f16"
