"""What a user sets for a whole engine. One frozen dataclass, one line of reason per field."""

from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError
from jaxserve.speculative_config import SpeculativeConfig

MAX_ROWS_LIMIT = 1024
SCHEDULING_POLICIES = ("fcfs", "priority", "prefix")
DEFAULT_KV_MEMORY = 1 << 30  # where no GPU's memory is to be filled
BATCHING = ("continuous", "static")
ATTENTION_BACKENDS = ("auto", "reference", "cpu", "mosaic_gpu", "interpret")
KV_CACHE_DTYPES = ("auto", "bf16", "int8", "fp8")
MAX_THREADS = 1024  # that XLA may be told to compute on; a setting of the process, not of an engine


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. The defaults suit a laptop's CPU.

    Raises InvalidRequestError when a value is out of range or two of them contradict.
    """

    dtype: str = "auto"  # auto: float32 on CPU, bfloat16 on GPU
    max_model_len: int | None = None  # tokens of prompt + output; None: the model's own limit
    max_batch_rows: int = 16  # requests that run at once
    max_batch_tokens: int = 512  # prefill tokens a step may carry, so no stream waits longer
    max_queue: int = 1024  # waiting requests before 429
    page_size: int | None = None  # tokens per KV page; None: the backend's own, 64 or 16
    kv_memory: int | None = None  # bytes for the KV pool; None: 1 GiB, or what a GPU has left
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory to fill
    # auto: as dtype; int8 and fp8: half of bf16's memory and reads, a quarter of float32's
    kv_cache_dtype: str = "auto"
    prefix_cache: bool = True  # keep finished prompts' KV; what begins alike is not computed again
    kv_host_memory: int = 0  # bytes of host memory for KV that left the pool; 0: it is dropped
    scheduling: str = "priority"  # who waits shortest; priority: as requests ask, then fcfs
    # While streams run, decode steps that a step with prefill may take; 0: as many as it takes,
    # where results come whole and only throughput counts.
    max_stall: float = 2.5
    batching: str = "continuous"  # static: a batch ends as one; a baseline for benchmarks
    num_pages: int | None = None  # overrides kv_memory (tests, exact experiments)
    attention_backend: str = "auto"  # auto: the best this machine has (see core/backends.py)
    speculative: SpeculativeConfig | None = None  # drafts of what comes next, verified together
    # Of the steps in which drafts held, the share that plain decoding says again, to compare.
    speculative_audit: float = 0.0
    seed: int = 0  # root of the draws of requests that carry no seed

    def __post_init__(self) -> None:
        _check_range("max_batch_rows", self.max_batch_rows, 1, MAX_ROWS_LIMIT)
        _check_range("max_batch_tokens", self.max_batch_tokens, 16, 1 << 20)
        _check_range("max_queue", self.max_queue, 1, 1 << 20)
        if self.page_size is not None:
            _check_range("page_size", self.page_size, 1, 1024)
        if self.kv_memory is not None:
            _check_range("kv_memory", self.kv_memory, 1 << 12, 1 << 50)
        _check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        if self.max_model_len is not None:
            _check_range("max_model_len", self.max_model_len, 2, 1 << 24)
        if self.num_pages is not None:
            _check_range("num_pages", self.num_pages, 2, 1 << 30)
        _check_range("kv_host_memory", self.kv_host_memory, 0, 1 << 50)
        if not isinstance(self.prefix_cache, bool):
            raise InvalidRequestError(
                f"prefix_cache is {self.prefix_cache!r}; give True or False", "prefix_cache"
            )
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _check_choice("scheduling", self.scheduling, SCHEDULING_POLICIES)
        _check_choice("batching", self.batching, BATCHING)
        _check_stall(self.max_stall)
        _check_audit(self.speculative_audit, self.speculative)
        if self.kv_host_memory and not self.prefix_cache:
            raise InvalidRequestError(
                f"kv_host_memory is {self.kv_host_memory} bytes and prefix_cache is off; the host "
                "memory keeps cached prefixes: leave the cache on, or set kv_host_memory to 0",
                "kv_host_memory",
            )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value!r}; give a whole number {low} to {high}", name)


def _check_share(name: str, value: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= 1:
        raise InvalidRequestError(f"{name} is {value!r}; give a number above 0, at most 1", name)


def _check_audit(share: float, speculative: SpeculativeConfig | None) -> None:
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not 0 <= share <= 1:
        raise InvalidRequestError(
            f"speculative_audit is {share!r}; give a share from 0 (off) to 1", "speculative_audit"
        )
    if share and speculative is None:
        raise InvalidRequestError(
            f"speculative_audit is {share} and there is no speculation to audit; give "
            "speculative_config too, or set speculative_audit to 0",
            "speculative_audit",
        )


def _check_stall(value: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (value == 0 or 1 <= value <= 1e6):
        raise InvalidRequestError(
            f"max_stall is {value!r}; give a number from 1 to 1000000, or 0 for no limit",
            "max_stall",
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(choices[:-1]) + f" or {choices[-1]}"
        raise InvalidRequestError(f"{name} is {value!r}; choose {listed}", name)
