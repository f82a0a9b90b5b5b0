"""Figures for Prometheus, under the names that people know from vLLM, with `selfspec:` before them.

Knows neither HTTP nor the engine; whoever works tells it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..core.contract import RowStep, Stats
from .job import Job

PREFIX = "selfspec:"
_FIRST = (.005, .01, .02, .04, .08, .16, .32, .64, 1.25, 2.5, 5, 10, 20, 40, 80)  # fmt: skip
_BETWEEN = (.001, .0025, .005, .01, .02, .03, .05, .075, .1, .2, .4, .8, 2)  # fmt: skip
_WHOLE = (.05, .1, .2, .5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)  # fmt: skip
_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Metrics:
    """One server's figures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first = self._histogram("time_to_first_token_seconds", _FIRST)
        self.between = self._histogram("inter_token_latency_seconds", _BETWEEN)
        self.whole = self._histogram("e2e_request_latency_seconds", _WHOLE)
        self.waited = self._histogram("request_queue_time_seconds", _FIRST)
        self.prompts = self._histogram("request_prompt_tokens", _TOKENS)
        self.answers = self._histogram("request_generation_tokens", _TOKENS)
        self.read = self._counter("prompt_tokens", "Prompt tokens of requests that were begun.")
        self.cached = self._counter(
            "prefix_cache_hits", "Of those, tokens that another request had left in the cache."
        )
        self.written = self._counter("generation_tokens", "Tokens written.")
        self.done = self._counter(
            "request_success", "Requests by how they ended.", "finished_reason"
        )
        self.refused = self._counter("request_refused", "Requests refused because too many waited.")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts kept.")
        self.accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts kept, by place.", "position"
        )
        self.rounds = self._counter("spec_decode_num_drafts", "Rows times rounds with a draft.")
        self.http = self._counter(
            "http_requests", "Answers by route and status.", "route", "status"
        )

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        words = name.replace("_", " ").capitalize() + "."
        return Histogram(PREFIX + name, words, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, words, labels, registry=self.registry)

    def watch(
        self, running: Callable[[], int], waiting: Callable[[], int], cache: Callable[[], float]
    ) -> None:
        """Gauges, which are read when somebody asks."""
        for name, words, value in (
            ("num_requests_running", "Requests that have a row.", running),
            ("num_requests_waiting", "Requests that wait for a row.", waiting),
            ("kv_cache_usage_perc", "Share of the cache that running requests fill.", cache),
        ):
            Gauge(PREFIX + name, words, registry=self.registry).set_function(value)

    def admitted(self, job: Job) -> None:
        self.waited.observe(job.age)
        self.prompts.observe(len(job.request.prompt))
        self.read.inc(len(job.request.prompt))
        if job.row:
            self.cached.inc(job.row.stats.cached_prompt_tokens)

    def step(self, job: Job, parts: Sequence[RowStep]) -> None:
        """What rounds brought for one request. Tokens that came together share their wait."""
        now, tokens = time.monotonic(), sum(len(part.tokens) for part in parts)
        if not tokens:
            return
        if job.last is None:
            self.first.observe(now - job.arrived)
        else:
            for _ in range(tokens):
                self.between.observe((now - job.last) / tokens)
        job.last = now
        self.written.inc(tokens)
        for part in parts:
            drafted = part.accepted + len(part.rejected)
            self.drafted.inc(drafted)
            self.rounds.inc(bool(drafted))
            self.accepted.inc(part.accepted)
            for place in range(part.accepted):
                self.accepted_at.labels(place).inc()

    def ended(self, job: Job, stats: Stats | None, how: str) -> None:
        self.done.labels(how).inc()
        if stats is not None:
            self.whole.observe(job.age)
            self.answers.observe(stats.new_tokens)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)
