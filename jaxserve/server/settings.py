"""What an operator sets for the HTTP side, and the fixed limits that keep one client bounded."""

from dataclasses import dataclass

MAX_JSON_COST = 250_000  # of a body's values (see body.py): the parser holds the GIL for ~50 ms
MAX_PROMPTS = 1_024  # prompts of one completions call
MAX_CHOICES = 1_024  # prompts x n of one call
MAX_MESSAGES = 4_096
MAX_TOOLS = 128
MAX_LOGPROB_ENTRIES = 4_000_000  # choices x max_tokens x (logprobs + 1) of one call
MAX_STREAM_BACKLOG = 65_536  # tokens and logprobs a slow reader may be behind before it is dropped


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server.

    served_model_names: names clients may send as `model`; empty means the model's own name. The
    first is the one reported back. api_key guards every path under /v1.
    """

    served_model_names: tuple[str, ...] = ()
    api_key: str | None = None
    max_body_bytes: int = 16 << 20  # a request body above this is a 413
    max_concurrent_requests: int = 2_048  # HTTP calls in flight before 429
    body_timeout: float = 60.0  # seconds a client may take to send its body
    write_timeout: float = 60.0  # seconds a streaming client may refuse to read
    stall_timeout: float = 30.0  # seconds without progress before /health calls the engine hung
    log_requests: bool = False  # one access-log line per request
    text_workers: int = 2  # threads that tokenise, render templates and parse JSON
