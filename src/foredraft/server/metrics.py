"""Prometheus metrics: vLLM's names and formulas under our prefix, then what only we know."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foredraft.engine.engine import Engine
from foredraft.engine.loop import StepTimes
from foredraft.engine.request import Request
from foredraft.server.levels import Levels
from foredraft.server.runner import Labels, Wait
from foredraft.types import StepRecord

PREFIX = "foredraft:"
LATENCY = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0)
STEP = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
BY = ("drafter", "tenant_class")


class Metrics:
    """Counts what the engine does; an :class:`~foredraft.server.runner.Observer`.

    Args:
        engine: Whose queue and cache the gauges show.
        model: Label ``model_name`` of everything.
        version: Of the package.
    """

    def __init__(self, engine: Engine, model: str, version: str) -> None:
        self.registry = CollectorRegistry()
        self.engine = engine
        self.model = model
        self._counters()
        self._histograms()
        self._gauges(version)

    # --- definitions

    def _counters(self) -> None:
        self.drafts = self._counter("spec_decode_num_drafts", "Steps that verified a draft.", BY)
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.", BY)
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted tokens, bonus excluded.", BY)
        self.accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft.", (*BY, "position")
        )
        self.plain_steps = self._counter("plain_steps_by_choice", "Steps that k=auto decoded without a draft.", BY)
        self.steps = self._counter("request_steps", "Steps of requests, with and without a draft.", BY)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.", BY)
        self.generated = self._counter("generation_tokens", "Tokens written.", BY)
        self.cached = self._counter("prefix_cache_hits", "Prompt tokens that were in the cache.", BY)
        self.finished_by = self._counter("request_success", "Finished requests.", (*BY, "finished_reason"))
        self.events = self._counter("events", "Events: full queue, slow reader, engine error.", ("kind",))
        self.responses = self._counter("http_responses", "Answers by route and status.", ("path", "status"))

    def _histograms(self) -> None:
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", BY, LATENCY)
        self.itl = self._histogram("inter_token_latency_seconds", "Between deliveries of one request.", BY, LATENCY)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", BY, LATENCY)
        self.queue = self._histogram("request_queue_time_seconds", "Waiting for a slot.", BY, LATENCY)
        self.prefill = self._histogram("request_prefill_time_seconds", "From slot to first token.", BY, LATENCY)
        self.decode = self._histogram("request_decode_time_seconds", "From first to last token.", BY, LATENCY)
        self.k = self._histogram("spec_decode_k", "Drafted tokens of a step.", BY, (*range(0, 9), 12, 16, 24, 32, 64))
        self.step_seconds = self._histogram("step_seconds", "Time of steps by part.", ("part",), STEP)
        self.step_rows = self._histogram("step_rows", "Rows of a pass.", (), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512))

    def _gauges(self, version: str) -> None:
        levels, watch = Levels(self.engine), self.engine.watch
        self._gauge("num_requests_running", "Requests with a slot.", lambda: levels.running)
        self._gauge("num_requests_waiting", "Requests without one.", lambda: levels.waiting)
        self._gauge("cache_slots_in_use", "Slots, idle prefixes included.", lambda: levels.slots)
        self._gauge("cache_slots_idle", "Slots that only hold a prefix.", lambda: levels.idle)
        self._gauge("cache_bytes_in_use", "Bytes of the KV cache.", lambda: levels.bytes)
        self._gauge(
            "speculation_fallback",
            "1 where drafting does not pay at present, 0 where it does; NaN where that is not known.",
            lambda: float("nan") if watch.pays is None else float(not watch.pays),
        )
        self._gauge(
            "speculation_speedup",
            "Tokens a second over plain decoding's, last 32 steps; NaN where that is not known.",
            lambda: float("nan") if watch.speedup is None else watch.speedup,
        )
        info = Gauge(
            PREFIX + "info", "Version and drafters.", ("model_name", "version", "drafter"), registry=self.registry
        )
        for drafter in self.engine.drafters or ("none",):
            info.labels(self.model, version, drafter).set(1)

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(PREFIX + name, text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, text, ("model_name", *labels), buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str, value: object) -> None:
        gauge = Gauge(PREFIX + name, text, ("model_name",), registry=self.registry)
        gauge.labels(self.model).set_function(value)  # type: ignore[arg-type]

    # --- what is told

    def step(self, times: StepTimes, engine: Engine) -> None:
        for part, seconds in (("total", times.total), ("target", times.target), ("draft", times.draft)):
            self.step_seconds.labels(self.model, part).observe(seconds)
        self.step_rows.labels(self.model).observe(times.rows)

    def advanced(self, labels: Labels, request: Request, tokens: int, steps: Sequence[StepRecord], wait: Wait) -> None:
        by = (self.model, labels.drafter, labels.tenant_class)
        self.generated.labels(*by).inc(tokens)
        (self.ttft if wait.first else self.itl).labels(*by).observe(wait.seconds)
        self.steps.labels(*by).inc(len(steps))
        for step in steps:
            self.k.labels(*by).observe(step.drafted)
            if step.drafted:
                self.drafts.labels(*by).inc()
                self.draft_tokens.labels(*by).inc(step.drafted)
                self.accepted.labels(*by).inc(step.accepted)
                for position in range(step.accepted):
                    self.accepted_at.labels(*by, position).inc()

    def finished(self, labels: Labels, request: Request) -> None:
        by = (self.model, labels.drafter, labels.tenant_class)
        result = request.result(0.0)
        self.finished_by.labels(*by, result.finish_reason).inc()
        self.prompt_tokens.labels(*by).inc(result.usage.prompt_tokens)
        self.cached.labels(*by).inc(result.usage.cached_tokens)
        self.plain_steps.labels(*by).inc(result.plain_steps)
        if request.admitted_at is not None:
            self.queue.labels(*by).observe(result.timings.queue_s)
        if request.first_token_at is not None:
            self.prefill.labels(*by).observe(result.timings.prefill_s)
            self.decode.labels(*by).observe(result.timings.decode_s)
            self.e2e.labels(*by).observe(
                sum((result.timings.queue_s, result.timings.prefill_s, result.timings.decode_s))
            )

    def event(self, kind: str, message: str, request_id: str = "") -> None:
        self.events.labels(self.model, kind).inc()

    def answered(self, path: str, status: int) -> None:
        """Counts one HTTP answer."""
        self.responses.labels(self.model, path, str(status)).inc()

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)
