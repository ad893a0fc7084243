"""What a user may set per request, with the names and defaults of vLLM's SamplingParams.

Validation happens here, once, for the HTTP server, the Python API and the batch runner alike.
Checks that need a model (token ids against the vocabulary, lengths against the context) are in
`check_against_model`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1_000
MAX_STOP_TOKEN_IDS = 48  # with up to 16 EOS ids of the model they fill SamplingBatch.suppress_ids
MAX_LOGIT_BIAS = 512
MAX_DRAFTS = 32  # of a request in a step
_INT64 = 2**63


@dataclass(frozen=True)
class SamplingParams:
    """How to draw the output of one request.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 switch the filter off; top_p 0
    keeps the most likely token only. max_tokens None means "up to the context length".
    Ties at a filter's threshold are all kept, so a result never depends on the order of ties.
    logprobs, prompt_logprobs: for each output or prompt token its own raw log-probability and those
    of so many of the most likely tokens; None: none at all.
    num_speculative_tokens: most drafts of it that a step may verify; None, or more than the engine
    speculates with: as many as that. No output depends on it.

    Raises InvalidRequestError naming the field when a value is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, None)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -_INT64, _INT64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; "
                "lower min_tokens or raise max_tokens",
                "min_tokens",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.num_speculative_tokens is not None:
            _check_int("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_DRAFTS)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, normalised to a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def uses_penalties(self) -> bool:
        """Whether the sampler needs the token counts of this request."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def check_against_model(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for token ids outside `[0, vocab_size)`."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token id {token}; the model has 0 to {vocab_size - 1}",
                        name,
                    )


def is_int(value: Any) -> bool:
    """Whether `value` is a whole number; Python's bools do not count (JSON true is not an id)."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: Any, low: int, high: int | None) -> None:
    if not is_int(value) or value < low or (high is not None and value > high):
        limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise InvalidRequestError(f"{name} is {_show(value)}; give a whole number {limit}", name)


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} is {_show(value)}; give a number from {low:g} to {high:g}", name
        )


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if stops is None:
        return ()
    if not isinstance(stops, Sequence) or len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop must be a string or a list of at most {MAX_STOP_STRINGS} strings", "stop"
        )
    for text in stops:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"stop holds {_show(text)}; every stop must be a string of 1 to "
                f"{MAX_STOP_STRING_CHARS} characters (an empty one would match at once)",
                "stop",
            )
    return tuple(stops)


def _stop_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if isinstance(ids, str) or not isinstance(ids, Sequence) or len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids must be a list of at most {MAX_STOP_TOKEN_IDS} token ids",
            "stop_token_ids",
        )
    for token in ids:
        _check_int("stop_token_ids", token, 0, None)
    return tuple(ids)


def _logit_bias(bias: Any) -> dict[int, float]:
    if bias is None:
        return {}
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias must be an object of at most {MAX_LOGIT_BIAS} token ids", "logit_bias"
        )
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if not is_int(token) or token < 0:
            raise InvalidRequestError(
                f"logit_bias has the key {_show(key)}; keys are token ids", "logit_bias"
            )
        _check_number("logit_bias", value, -100.0, 100.0)
        checked[token] = float(value)
    return checked


def _show(value: Any) -> str:
    """A short form of a user's value: errors never echo long input."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
