"""onnxruntime-genai on the CPU, float32 or with weights of few bits, on a model that its own
builder makes of the Hugging Face folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai

from benchmarks.convert import converted, loss_of

GROUPS = ["accuracy_level=4", "block_size=32"]  # 4: activations in 8 bits
BUILT = {
    "auto": ["fp32"],
    "int8": ["int8", *GROUPS],
    "int4": ["int4", "algo_config=rtn_last", *GROUPS],
}
PRECISION = {
    "auto": "float32",
    "int8": "int8 in 32s; activations int8 in 32s; float32",
    "int4": "4 bits in 32s, head int8; activations int8 in 32s; float32",
}


class Peer:
    packages = ("onnxruntime-genai", "onnxruntime")
    first: Any  # set by the host

    def load(self, folder: str, dtype: str, threads: int, weights: str = "auto") -> None:
        if dtype != "float32" or weights not in BUILT:
            raise ValueError(f"{dtype}, {weights}: this peer is set up for float32, int8 and int4")
        self.precision = PRECISION[weights]
        kind = "onnx" if weights == "auto" else f"onnx-{weights}"
        write = partial(build, weights=weights)
        config = onnxruntime_genai.Config(str(converted(folder, kind, write)))
        # its own thread count would be the machine's
        options = f'{{"intra_op_num_threads": {threads}, "inter_op_num_threads": 1}}'
        config.overlay(f'{{"model": {{"decoder": {{"session_options": {options}}}}}}}')
        self.model = onnxruntime_genai.Model(config)

    def generate(self, ids: list[int], max_new_tokens: int, eos: list[int]) -> list[int]:
        params = onnxruntime_genai.GeneratorParams(self.model)
        params.set_search_options(max_length=len(ids) + max_new_tokens, do_sample=False)
        generator = onnxruntime_genai.Generator(self.model, params)
        generator.append_tokens(ids)
        tokens: list[int] = []
        while len(tokens) < max_new_tokens and not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            if len(tokens) == 1:
                self.first(1)
            if tokens[-1] in eos:
                break
        # too few where the model's own end token is not among `eos`: the harness says so
        return tokens

    def read(self, ids: list[int]) -> tuple[float, list[int]]:
        """The summed loss of all ids but the first, and what was likeliest in their places."""
        params = onnxruntime_genai.GeneratorParams(self.model)
        params.set_search_options(max_length=len(ids), do_sample=False)
        generator = onnxruntime_genai.Generator(self.model, params)
        generator.append_tokens(ids[:-1])
        logits = np.asarray(generator.get_output("logits"))[0]
        if len(logits) != len(ids) - 1:
            raise RuntimeError(f"it shows logits of {len(logits)} of {len(ids) - 1} tokens")
        return loss_of(logits, ids[1:])


def build(source: Path, target: Path, weights: str) -> None:
    """Its model builder, for the CPU."""
    precision, *extra = BUILT[weights]
    with tempfile.TemporaryDirectory() as cache:
        command = [
            sys.executable,
            "-m",
            "onnxruntime_genai.models.builder",
            "-i",
            str(source),
            "-o",
            str(target),
        ]
        done = subprocess.run(
            [
                *[*command, "-p", precision, "-e", "cpu", "-c", cache],
                *(["--extra_options", *extra] if extra else []),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the model builder failed: {done.stderr.strip().splitlines()[-1:]}")
