"""llama.cpp's own HTTP server, of the wheel xllamacpp: one GGUF file in float32, with a float32
cache, `--slots` requests at once of up to `--context` tokens each. Runs until it is ended."""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    for name in ("port", "slots", "context", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    asked = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_gpu_layers = asked.model, asked.port, 0
    params.n_parallel, params.n_ctx = asked.slots, asked.slots * asked.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked.threads
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.n_threads_http = asked.slots + 4
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
