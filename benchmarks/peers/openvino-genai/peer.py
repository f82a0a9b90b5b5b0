"""OpenVINO GenAI on the CPU, float32 with a float32 cache, on a model that optimum-intel exports
from the Hugging Face folder; with weights of few bits rounded by nncf, precisions as the engine
chooses them.

Plain decoding, and its prompt lookup at so many drafts a round.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.convert import converted, loss_of

LONGEST_NGRAM = 3
GROUP = 64  # weights that share a scale in 4 bits; nncf's 128 does not divide the demo's widths
EXPORT = """
import sys
from optimum.exporters.openvino import main_export
main_export(sys.argv[1], sys.argv[2], task="text-generation-with-past", convert_tokenizer=False)
"""
ROUND = """
import sys
import nncf
import openvino
model = openvino.Core().read_model(sys.argv[1] + "/openvino_model.xml")
kinds = {"int8": {"mode": nncf.CompressWeightsMode.INT8_SYM},
         "int4": {"mode": nncf.CompressWeightsMode.INT4_ASYM, "group_size": int(sys.argv[4])}}
model = nncf.compress_weights(model, **kinds[sys.argv[3]])
openvino.save_model(model, sys.argv[2] + "/openvino_model.xml")
"""
PRECISION = {
    "auto": "float32",
    "int8": "int8, a scale an output; activations and cache by default",
    "int4": f"4 bits with a minimum in {GROUP}s, head and embedding int8; activations and cache by "
    "default",
}


class Peer:
    packages = ("openvino-genai", "openvino", "optimum-intel")
    methods = {  # noqa: RUF012  (read from the source, without importing it)
        "plain": (),
        "lookup": ("tokens",),
    }
    first: Any  # set by the host

    def load(self, folder: str, dtype: str, threads: int, weights: str = "auto") -> None:
        if dtype != "float32" or weights not in PRECISION:
            raise ValueError(f"{dtype}, {weights}: this peer is set up for float32, int8 and int4")
        exact = converted(folder, "openvino", export)
        self.path, self.threads, self.precision = str(exact), threads, PRECISION[weights]
        self.settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if weights == "auto":
            self.settings |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        else:
            write = partial(rounded, exact=exact, weights=weights)
            self.path = str(converted(folder, f"openvino-{weights}", write))
        self.reader: Any = None
        self.pipelines: dict[str, Any] = {}
        self.pipeline("plain")

    def pipeline(self, method: str) -> Any:
        """Drafting is said when a pipeline is made: each way has its own."""
        if method not in self.pipelines:
            drafting = {"prompt_lookup": True} if method == "lookup" else {}
            self.pipelines[method] = openvino_genai.LLMPipeline(
                self.path, "CPU", **self.settings, **drafting
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

    def read(self, ids: list[int]) -> tuple[float, list[int]]:
        """The summed loss of all ids but the first, and what was likeliest in their places: by the
        model's file, since the pipeline shows no logits."""
        if self.reader is None:
            model = f"{self.path}/openvino_model.xml"
            compiled = openvino.Core().compile_model(model, "CPU", self.settings)
            self.reader = compiled.create_infer_request()
        self.reader.reset_state()
        places = np.arange(len(ids) - 1, dtype=np.int64)[None]
        given = {
            "input_ids": np.array([ids[:-1]], dtype=np.int64),
            "attention_mask": np.ones_like(places),
            "position_ids": places,
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        known = {name for port in self.reader.model_inputs for name in port.get_names()}
        self.reader.infer({name: value for name, value in given.items() if name in known})
        return loss_of(self.reader.get_tensor("logits").data[0], ids[1:])


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
    """The model with its weights as they are."""
    in_its_own_process("exporter", EXPORT, str(source), str(target))


def rounded(source: Path, target: Path, exact: Path, weights: str) -> None:
    """The exported model with rounded weights."""
    shutil.copytree(exact, target, ignore=shutil.ignore_patterns("openvino_model.*"))
    in_its_own_process("rounding", ROUND, str(exact), str(target), weights, str(GROUP))


def in_its_own_process(name: str, script: str, *told: str) -> None:
    """The exporter and nncf bring torch and an older transformers, which decoding must not carry
    along."""
    done = subprocess.run(
        [sys.executable, "-c", script, *told], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the {name} failed: {done.stderr.strip().splitlines()[-1:]}")
