"""What a user sets for a whole engine. One frozen dataclass, one line of reason per field."""

from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError

MAX_ROWS_LIMIT = 1024
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
    page_size: int = 16  # tokens per KV page
    kv_memory: int = 1 << 30  # bytes for the KV pool
    kv_cache_dtype: str = "auto"  # auto: as dtype; int8: a quarter of float32's memory and reads
    num_pages: int | None = None  # overrides kv_memory (tests, exact experiments)
    attention_backend: str = "auto"
    seed: int = 0  # root of the draws of requests that carry no seed

    def __post_init__(self) -> None:
        _check_range("max_batch_rows", self.max_batch_rows, 1, MAX_ROWS_LIMIT)
        _check_range("max_batch_tokens", self.max_batch_tokens, 16, 1 << 20)
        _check_range("max_queue", self.max_queue, 1, 1 << 20)
        _check_range("page_size", self.page_size, 1, 1024)
        _check_range("kv_memory", self.kv_memory, 1 << 12, 1 << 50)
        if self.max_model_len is not None:
            _check_range("max_model_len", self.max_model_len, 2, 1 << 24)
        if self.num_pages is not None:
            _check_range("num_pages", self.num_pages, 2, 1 << 30)
        if self.kv_cache_dtype not in ("auto", "int8"):
            raise InvalidRequestError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; choose auto or int8", "kv_cache_dtype"
            )
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise InvalidRequestError(
                f"dtype is {self.dtype!r}; choose auto, float32 or bfloat16", "dtype"
            )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value!r}; give a whole number {low} to {high}", name)
