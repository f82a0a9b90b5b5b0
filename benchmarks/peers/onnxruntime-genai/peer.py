"""onnxruntime-genai on the CPU, float32, on a model that its own builder makes of the Hugging Face
folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime_genai

from benchmarks.convert import converted


class Peer:
    packages = ("onnxruntime-genai", "onnxruntime")
    first: Any  # set by the host

    def load(self, folder: str, dtype: str, threads: int) -> None:
        if dtype != "float32":
            raise ValueError(f"dtype={dtype!r}: this peer is set up for float32")
        config = onnxruntime_genai.Config(str(converted(folder, "onnx", build)))
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


def build(source: Path, target: Path) -> None:
    """Its model builder, float32 for the CPU."""
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
            [*command, "-p", "fp32", "-e", "cpu", "-c", cache],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the model builder failed: {done.stderr.strip().splitlines()[-1:]}")
