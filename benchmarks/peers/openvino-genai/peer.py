"""OpenVINO GenAI on the CPU, float32 with a float32 cache, on a model that optimum-intel exports
from the Hugging Face folder.

Plain decoding, and its prompt lookup at so many drafts a round.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.convert import converted

LONGEST_NGRAM = 3
EXPORT = """
import sys
from optimum.exporters.openvino import main_export
main_export(sys.argv[1], sys.argv[2], task="text-generation-with-past", convert_tokenizer=False)
"""


class Peer:
    packages = ("openvino-genai", "openvino", "optimum-intel")
    methods = {  # noqa: RUF012  (read from the source, without importing it)
        "plain": (),
        "lookup": ("tokens",),
    }
    first: Any  # set by the host

    def load(self, folder: str, dtype: str, threads: int) -> None:
        if dtype != "float32":
            raise ValueError(f"dtype={dtype!r}: this peer is set up for float32")
        self.path, self.threads = str(converted(folder, "openvino", export)), threads
        self.pipelines: dict[str, Any] = {}
        self.pipeline("plain")

    def pipeline(self, method: str) -> Any:
        """Drafting is said when a pipeline is made: each way has its own."""
        if method not in self.pipelines:
            exact = {
                "INFERENCE_PRECISION_HINT": "f32",
                "KV_CACHE_PRECISION": "f32",
                "INFERENCE_NUM_THREADS": self.threads,
            }
            drafting = {"prompt_lookup": True} if method == "lookup" else {}
            self.pipelines[method] = openvino_genai.LLMPipeline(
                self.path, "CPU", **exact, **drafting
            )
        return self.pipelines[method]

    def generate(
        self,
        ids: list[int],
        max_new_tokens: int,
        eos: list[int],
        method: str = "plain",
        tokens: int = 0,
    ) -> list[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = max_new_tokens, False
        if eos:
            config.eos_token_id, config.stop_token_ids = eos[0], set(eos)
        else:
            config.ignore_eos = True
        if method == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = tokens, LONGEST_NGRAM
        prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(ids)), dtype=np.int64))
        heard = First(self.first)
        answer = self.pipeline(method).generate(
            openvino_genai.TokenizedInputs(prompt, mask), config, heard
        )
        return [int(token) for token in answer.tokens[0]]


class First(openvino_genai.StreamerBase):
    """Says when the first tokens are there."""

    def __init__(self, say: Any) -> None:
        super().__init__()
        self.say, self.said = say, False

    def write(self, tokens: Any) -> Any:
        if not self.said:
            self.say(len(tokens) if isinstance(tokens, list) else 1)
            self.said = True
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        return


def export(source: Path, target: Path) -> None:
    """In a process of its own: the exporter brings torch and an older transformers, which decoding
    must not carry along."""
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, str(source), str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the exporter failed: {done.stderr.strip().splitlines()[-1:]}")
