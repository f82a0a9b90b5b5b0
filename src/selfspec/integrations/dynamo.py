"""Our engine as a worker of NVIDIA Dynamo: `python -m selfspec.integrations.dynamo MODEL`.

Dynamo's frontend reads text and writes it, its workers see token ids. With `--discovery-backend
file` workers and frontend find each other through a folder, and no further server is needed:

    python -m selfspec.integrations.dynamo ./model &      # as many as you like
    python -m dynamo.frontend --discovery-backend file --event-plane zmq --migration-limit 3

A worker that dies hands its requests on: Dynamo sends the prompt with the tokens that were given,
and lowers the limits by their number. Here such a request goes on with the very text. Its seed
comes from the request's id, which stays. Where the answer began, which penalties and grammars count
from, is in a note that the first worker left in a folder which all of them see.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, WorkerConfig
from dynamo.common.backend.engine import LlmRegistration
from dynamo.common.backend.run import run
from dynamo.common.utils.token_ids import token_ids_to_list

from ..core.files import write_whole
from ..core.sampling import Sampler, SamplingParams
from ..core.text_stream import RowText
from ..engine.row import Request
from ..errors import OptionError
from ..llm import LLM
from ..serve.asked import drafting, options_of
from ..serve.job import Event, Job
from ..serve.schemas import SelfspecFields
from ..serve.settings import DRAFTS, Limits
from ..serve.worker import Worker, warm_up

_FINISH = {"eos": "eos", "stop": "stop", "length": "length", "context": "length"}
_REFUSED = ("best_of", "use_beam_search", "guided_decoding")  # what nothing here would do


class Notes:
    """Where each request's answer began, in a folder that all workers see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, request: str, length: int) -> int:
        """The length of the prompt proper: this one, or that of an earlier worker."""
        note = self._of(request)
        if note.is_file():
            return min(length, int(note.read_text(encoding="utf-8")))
        write_whole(note, str(length))
        return length

    def end(self, request: str) -> None:
        self._of(request).unlink(missing_ok=True)

    def _of(self, request: str) -> Path:
        return self._folder / hashlib.sha256(request.encode()).hexdigest()[:32]


def seed_of(request: str) -> int:
    """A seed for a request that names none: the same at every worker."""
    return int.from_bytes(hashlib.sha256(request.encode()).digest()[:8], "big") >> 1


def request_of(
    worker: Worker, asked: Mapping[str, Any], name: str, began: int, draft: str
) -> Request:
    """What the engine is asked: `began` of the token ids are the prompt, the others were given."""
    llm, tokens = worker.llm, token_ids_to_list(asked["token_ids"])
    given = tokens[began:]
    stops, how = asked.get("stop_conditions") or {}, asked.get("sampling_options") or {}
    for field in _REFUSED:
        if how.get(field):
            raise OptionError(f"{field} is not done by this engine; leave it out")
    if (how.get("n") or 1) != 1:
        raise OptionError("n is more than 1, and a worker gives one answer; ask several times")
    eos = _ends(llm, asked, stops)
    most, logprobs = stops.get("max_tokens"), (asked.get("output_options") or {}).get("logprobs")
    most = llm.model.shape.context - len(tokens) if most is None else most
    drafter, controller = made = drafting(worker, SelfspecFields(), draft)
    sampling = _sampling(how, stops, len(given), name)
    options = options_of(made, sampling, most, stops.get("stop") or None, sorted(eos), logprobs)
    (request,), _ = llm.prepared([tokens], options)
    for token in given:
        for check in request.stop_checks:
            check.push(token)
    sampler = Sampler(request.sampler.params, None, (), began, eos)
    return Request(
        tokens, sampler, request.max_new_tokens, eos, request.stop_checks, logprobs, drafter,
        controller,
    )  # fmt: skip


def _ends(llm: LLM, asked: Mapping[str, Any], stops: Mapping[str, Any]) -> frozenset[int]:
    """Tokens to end at."""
    own = [*(asked.get("eos_token_ids") or llm.eos), *(stops.get("stop_token_ids_hidden") or ())]
    named = stops.get("stop_token_ids") or ()
    return frozenset([*(() if stops.get("ignore_eos") else own), *named])


def _sampling(
    how: Mapping[str, Any], stops: Mapping[str, Any], given: int, name: str
) -> SamplingParams:
    """Dynamo's defaults are OpenAI's: temperature 1."""
    least = stops.get("min_tokens") or 0
    options: dict[str, Any] = {
        "temperature": 1.0 if how.get("temperature") is None else how["temperature"],
        "min_new_tokens": least + given if least else 0,
        "repetition_penalty": how.get("repetition_penalty") or 1.0,
        "presence_penalty": how.get("presence_penalty") or 0.0,
        "frequency_penalty": how.get("frequency_penalty") or 0.0,
    }
    if options["temperature"]:
        seed = how.get("seed")
        options |= {
            "top_p": how.get("top_p") or 1.0, "top_k": max(0, how.get("top_k") or 0),
            "min_p": how.get("min_p") or 0.0,
            "seed": seed_of(name) if seed is None else seed % 2**63,
        }  # fmt: skip
    return SamplingParams(**options)


class SelfspecEngine(LLMEngine):  # type: ignore[misc]  # it ships no types
    """A worker of `selfspec serve` behind Dynamo's own wires."""

    def __init__(self, model: str, name: str, limits: Limits, draft: str, notes: Path) -> None:
        self._model, self._name, self._limits, self._draft = model, name, limits, draft
        self._notes = Notes(notes)
        self._worker: Worker | None = None
        self._jobs: dict[str, Job] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[SelfspecEngine, WorkerConfig]:
        asked = _parser().parse_args(argv)
        limits = Limits(rows=asked.rows, context=asked.context, queue=asked.queue)
        name = asked.served_name or asked.model
        engine = cls(asked.model, name, limits, asked.draft, Path(asked.notes))
        config = WorkerConfig(
            namespace=asked.namespace, component="selfspec", model_name=asked.model,
            served_model_name=name, discovery_backend=asked.discovery_backend,
            request_plane=asked.request_plane, event_plane=asked.event_plane,
            enable_kv_routing=False,
        )  # fmt: skip
        return engine, config

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model. Requests come once this returns."""
        llm = await asyncio.to_thread(LLM.from_pretrained, self._model)
        self._worker = Worker(llm, self._limits)
        await asyncio.to_thread(warm_up, llm, self._draft)
        self._worker.start()
        limits = LlmRegistration(
            context_length=self._worker.context, max_num_seqs=self._limits.rows
        )
        return EngineConfig(model=self._model, served_model_name=self._name, llm=limits)

    async def generate(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        """Tokens as they come."""
        worker, name = self._worker, context.id()
        assert worker is not None
        began = self._notes.begin(name, len(token_ids_to_list(request["token_ids"])))
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            asked = request_of(worker, request, name, began, self._draft)
            job = self._jobs[name] = Job(asked, RowText(None, ()), hear)  # the frontend writes text
            worker.submit(job)
            async for chunk in _chunks(events, began, len(asked.prompt) - began):
                yield chunk
        finally:
            if name in self._jobs:
                worker.leave(self._jobs.pop(name))
            self._notes.end(name)

    async def abort(self, context: Any) -> None:
        if self._worker is not None and (job := self._jobs.get(context.id())):
            self._worker.leave(job)

    async def cleanup(self) -> None:
        if self._worker is not None:
            await asyncio.to_thread(self._worker.stop, self._limits.drain_seconds)


async def _chunks(
    events: asyncio.Queue[Event], prompt: int, given: int
) -> AsyncIterator[dict[str, Any]]:
    written = given
    while True:
        event = await events.get()
        if event.error:
            raise event.error
        written += len(event.tokens)
        if event.tokens or event.finish:
            chunk: dict[str, Any] = {"token_ids": event.tokens, "index": 0}
            if event.logprobs:
                chunk["log_probs"] = [each.logprob for each in event.logprobs]
            if event.finish:
                total = {"prompt_tokens": prompt, "completion_tokens": written}
                chunk["finish_reason"] = _FINISH[event.finish]
                chunk["completion_usage"] = total | {"total_tokens": prompt + written}
            yield chunk
        if event.last:
            return


def _parser() -> argparse.ArgumentParser:
    folder = os.environ.get("DYN_FILE_KV") or str(Path(tempfile.gettempdir()) / "dynamo_store_kv")
    parser = argparse.ArgumentParser(prog="python -m selfspec.integrations.dynamo")
    parser.add_argument("model", help="a model folder, which the frontend reads its tokenizer from")
    parser.add_argument("--served-name", help="what requests call it")
    parser.add_argument("--draft", default="auto", choices=DRAFTS)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--queue", type=int, default=64)
    parser.add_argument("--context", type=int)
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--discovery-backend", default="file")
    parser.add_argument("--request-plane", default="tcp")
    parser.add_argument("--event-plane", default="zmq")
    parser.add_argument(
        "--notes", default=f"{folder}-selfspec",
        help="a folder that all workers see: where answers began",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    run(SelfspecEngine)
