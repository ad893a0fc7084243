"""Prometheus metrics under vLLM's names with the prefix `jaxserve:`, so that dashboards carry over.

Two sources feed them: `on_step`, called on the engine's thread after every step (some ten locked
additions, about 20 us), and a ChoiceTimer per choice, called on the event loop. Durations use the
monotonic clock of the moment a delta was published, not of when the loop came to it.
"""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jaxserve.engine.outputs import OutputDelta, StepStats
from jaxserve.engine.proposers.stats import SpeculationStats
from jaxserve.sampling_params import SamplingParams

_PREFIX = "jaxserve:"
_LATENCIES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
              20, 40, 80, 160)  # fmt: skip
_WAITS = (0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480)
_STEP_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_COUNTS = (1, 2, 5, 10, 20, 50, 100)


class ServerMetrics:
    """All metrics of one server in a registry of its own; every series carries `model_name`."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._make_engine_metrics()
        self._make_request_metrics()
        self._cache_config: Gauge | None = None
        self._startup = Gauge(
            _PREFIX + "startup_seconds",
            "Time a phase of the start-up took.",
            ["model_name", "phase"],
            registry=self.registry,
        )

    def _make_engine_metrics(self) -> None:
        self.running = self._gauge("num_requests_running", "Requests in the batch.")
        self.waiting = self._gauge("num_requests_waiting", "Requests waiting for a place.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Used part of the KV pages, 0 to 1.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens computed.")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens drawn.")
        self.preemptions = self._counter("num_preemptions", "Requests put back by a full pool.")
        self._make_cache_metrics()
        self._make_speculation_metrics()
        self._late_compiles_seen = 0
        self.late_compiles = self._counter(
            "late_compiles", "Programs compiled while serving; 0 in a healthy engine."
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Arrival at the engine to first step.", _WAITS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", _WAITS
        )
        self.step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of one step.", _STEP_TOKENS
        )
        self.step_host = self._histogram(
            "step_host_seconds", "Host time of one step.", _STEP_SECONDS
        )
        self.step_device = self._histogram(
            "step_device_seconds", "Device time of one step.", _STEP_SECONDS
        )

    def _make_cache_metrics(self) -> None:
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self.prefix_hits = self._counter("prefix_cache_hits", "Tokens the prefix cache had.")
        self.kv_waste = self._gauge(
            "kv_cache_waste_tokens", "Places in pages held by running requests without a token."
        )
        self.pages_cached = self._gauge(
            "kv_cache_cached_pages", "Pages that no request holds and the prefix cache can use."
        )
        self.pages_stored = self._counter("kv_offload_stored_pages", "Pages copied to host memory.")
        self.pages_loaded = self._counter(
            "kv_offload_loaded_pages", "Pages copied back from host memory."
        )
        self.idle_seconds = self._counter(
            "device_idle_seconds", "Time the device waited for its next step while there was work."
        )

    def _make_speculation_metrics(self) -> None:
        self.drafts = self._counter("spec_decode_num_drafts", "Rows of steps that had drafts.")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts that held.")
        self.emitted = self._counter(
            "spec_decode_num_emitted_tokens", "Tokens of decode rows, with drafts or without."
        )
        self.decode_rows = self._counter(
            "spec_decode_num_rows", "Decode rows run; emitted tokens per row is what a step yields."
        )
        self.audited = self._counter(
            "spec_decode_audited_tokens", "Tokens of steps with drafts that were decoded again."
        )
        self.mismatches = self._counter(
            "spec_decode_audit_mismatches", "Audited tokens that plain decoding draws otherwise."
        )
        self._accepted_at = Counter(
            _PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that held, by their place.",
            ["model_name", "position"],
            registry=self.registry,
        )

    def _make_request_metrics(self) -> None:
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _LATENCIES
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a choice.", _LATENCIES
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean per choice after its first.", _LATENCIES
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _WAITS)
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "First to last token.", _WAITS
        )
        self.request_prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS
        )
        self.request_generation = self._histogram(
            "request_generation_tokens", "Output tokens of a choice.", _TOKENS
        )
        self.params_n = self._histogram("request_params_n", "The parameter n.", _COUNTS)
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "The parameter max_tokens, resolved.", _TOKENS
        )
        self.rejections = self._counter("admission_rejections", "Requests refused with 429.")
        self._success = Counter(
            _PREFIX + "request_success",
            "Choices that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )

    def on_step(self, stats: StepStats) -> None:
        """Count one engine step (called on the engine's thread)."""
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.kv_usage.set(stats.pages_used / stats.pages_total if stats.pages_total else 0.0)
        self.prompt_tokens.inc(stats.prompt_tokens)
        self.generation_tokens.inc(stats.output_tokens)
        self._count_cache(stats)
        if stats.speculation is not None:
            self._count_speculation(stats.speculation)
        for seconds in stats.queue_seconds:
            self.queue_time.observe(seconds)
        for seconds in stats.prefill_seconds:
            self.prefill_time.observe(seconds)
        if stats.step_tokens:
            self.step_tokens.observe(stats.step_tokens)
            self.step_host.observe(stats.host_seconds)
            self.step_device.observe(stats.device_seconds)
        if stats.num_preemptions:
            self.preemptions.inc(stats.num_preemptions)
        if stats.late_compiles > self._late_compiles_seen:  # the engine reports its running total
            self.late_compiles.inc(stats.late_compiles - self._late_compiles_seen)
            self._late_compiles_seen = stats.late_compiles

    def _count_speculation(self, news: SpeculationStats) -> None:
        for counter, amount in (
            (self.drafts, news.num_drafts),
            (self.drafted, news.num_drafted),
            (self.accepted, news.num_accepted),
            (self.emitted, news.num_emitted),
            (self.decode_rows, news.num_rows),
            (self.audited, news.num_audited),
            (self.mismatches, news.num_audit_mismatches),
        ):
            if amount:
                counter.inc(amount)
        for position, amount in enumerate(news.num_accepted_per_position):
            if amount:
                self._accepted_at.labels(self._model, str(position)).inc(amount)

    def _count_cache(self, stats: StepStats) -> None:
        self.kv_waste.set(stats.kv_waste_tokens)
        self.pages_cached.set(stats.pages_cached)
        for counter, amount in (
            (self.prefix_queries, stats.prefix_queried_tokens),
            (self.prefix_hits, stats.prefix_hit_tokens),
            (self.pages_stored, stats.pages_stored),
            (self.pages_loaded, stats.pages_loaded),
            (self.idle_seconds, stats.device_idle_seconds),
        ):
            if amount:  # most steps have none of it, and a locked addition costs a microsecond
                counter.inc(amount)

    def on_request(self, params: SamplingParams) -> None:
        """Count the parameters of one accepted prompt."""
        self.params_n.observe(params.n)
        self.params_max_tokens.observe(params.max_tokens or 0)

    def on_finish(self, reason: str) -> None:
        """Count one choice that ended."""
        self._success.labels(self._model, reason).inc()

    def set_startup(self, phase: str, seconds: float) -> None:
        """Record how long a phase of the start-up took."""
        self._startup.labels(self._model, phase).set(seconds)

    def set_cache_config(self, config: Mapping[str, str | int | float]) -> None:
        """Publish the pool's configuration as the labels of a series with the value 1."""
        labels = {"model_name": self._model} | {key: str(value) for key, value in config.items()}
        if self._cache_config is None:
            self._cache_config = Gauge(
                _PREFIX + "cache_config_info",
                "The configuration of the KV pool.",
                list(labels),
                registry=self.registry,
            )
        self._cache_config.labels(**labels).set(1)

    def render(self) -> bytes:
        """The exposition text for GET /metrics."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        metric = Gauge(_PREFIX + name, text, ["model_name"], registry=self.registry)
        return metric.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(_PREFIX + name, text, ["model_name"], registry=self.registry)
        return metric.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(
            _PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry
        )
        return metric.labels(self._model)


class ChoiceTimer:
    """Watches the deltas of one choice and reports its latencies."""

    def __init__(self, metrics: ServerMetrics, arrival: float, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._num_prompt_tokens = num_prompt_tokens
        self._first: float | None = None
        self._last = arrival
        self._num_tokens = 0

    def on_delta(self, delta: OutputDelta, now: float) -> None:
        """Take one delta, published at `now` (time.monotonic)."""
        num_new = len(delta.token_ids)
        if num_new:
            if self._first is None:
                self._first = now
                self._metrics.ttft.observe(now - self._arrival)
            else:
                for _ in range(num_new):
                    self._metrics.itl.observe((now - self._last) / num_new)
            self._last = now
            self._num_tokens += num_new
        if delta.finish_reason is not None:
            self._finish(delta.finish_reason, now)

    def on_abort(self) -> None:
        """The choice was given up before its last delta."""
        self._metrics.on_finish("abort")

    def _finish(self, reason: str, now: float) -> None:
        metrics = self._metrics
        metrics.on_finish(reason)
        if reason in ("abort", "error", "timeout"):
            return
        metrics.e2e.observe(now - self._arrival)
        metrics.request_prompt.observe(self._num_prompt_tokens)
        metrics.request_generation.observe(self._num_tokens)
        if self._first is not None:
            metrics.decode_time.observe(self._last - self._first)
            if self._num_tokens > 1:
                metrics.tpot.observe((self._last - self._first) / (self._num_tokens - 1))
