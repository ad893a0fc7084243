"""A checked call and its answer, without the transport: HTTP and `jaxserve batch` share it."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.engine.outputs import OutputDelta
from jaxserve.server.errors import timed_out
from jaxserve.server.prompts import PreparedCall
from jaxserve.server.protocol import CallOptions
from jaxserve.server.responses import AnswerFormat, Envelope, merge_deltas, usage_fields


@dataclass(frozen=True)
class Call:
    """Ready to run: `prepared.requests` go to the engine, `form` shapes what comes back.

    prompt_only: nothing of the output is shown (max_tokens 0).
    """

    options: CallOptions
    prepared: PreparedCall
    form: AnswerFormat
    prompt_only: bool = False

    @property
    def num_choices(self) -> int:
        """Prompts x n; choice = prompt * n + j."""
        return len(self.prepared.requests) * self.options.params.n

    def response(self, parts: Sequence[Sequence[OutputDelta]]) -> dict[str, Any]:
        """The plain response; parts[i] are the deltas of choice i, to the last.

        Raises ApiError 408 if the call's timeout passed before any token.
        """
        wholes = [merge_deltas(deltas) for deltas in parts]
        raise_if_only_timed_out(wholes)
        wholes = [self.shown(whole) for whole in wholes]
        num_tokens = sum(len(whole.token_ids) for whole in wholes)
        cached = [whole.num_cached_tokens for whole in wholes]
        return self.form.response(wholes, self.usage(num_tokens, cached))

    @property
    def asks_for_prompt_logprobs(self) -> bool:
        """Whether the answer has them."""
        return self.options.params.prompt_logprobs is not None

    def shown(self, delta: OutputDelta) -> OutputDelta:
        """What of a delta goes into the answer."""
        if not self.prompt_only or not delta.token_ids:
            return delta
        logprobs = None if delta.logprobs is None else ()
        reason = delta.finish_reason and "length"
        return replace(
            delta, text="", token_ids=(), logprobs=logprobs, finish_reason=reason, stop_reason=None
        )

    def usage(self, num_tokens: int, cached: Sequence[int]) -> dict[str, Any]:
        """The usage object of all choices; cached[i] is what choice i found in the prefix cache."""
        # Of each prompt its first choice: the others find what that one has computed.
        first_choices = cached[:: self.options.params.n]
        return usage_fields(self.prepared.num_prompt_tokens, num_tokens, sum(first_choices))


def raise_if_only_timed_out(deltas: Sequence[OutputDelta]) -> None:
    """An answer without a single token is none: the caller hears why."""
    if any(delta.finish_reason == "timeout" for delta in deltas) and not any(
        delta.token_ids for delta in deltas
    ):
        raise timed_out()


def make_envelope(prefix: str, model: str) -> Envelope:
    """A fresh id, and the time as clients expect it (wall clock, seconds)."""
    return Envelope(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)
