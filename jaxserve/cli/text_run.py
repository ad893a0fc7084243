"""Run one request to its end and hand out its text as it comes."""

import itertools
import queue
from collections.abc import Iterator, Sequence

from jaxserve.engine.client import EngineClient
from jaxserve.engine.outputs import GenerationRequest, OutputDelta
from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.sampling_params import SamplingParams

_ids = itertools.count()


class TextRun:
    """A submitted request; iterate to get its text. Closing the iterator early aborts it."""

    def __init__(
        self, client: EngineClient, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        """Raises InvalidRequestError, QueueFullError or EngineDeadError."""
        self._client = client
        self._deltas: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()
        self._id = f"cli-{next(_ids)}"
        self.num_tokens = 0
        self.finish_reason: str | None = None
        client.submit(
            GenerationRequest(self._id, tuple(prompt_token_ids), params), self._deltas.put
        )

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, none empty. Raises EngineDeadError or InvalidRequestError on failure."""
        try:
            while self.finish_reason is None:
                delta = self._deltas.get()
                self.num_tokens += len(delta.token_ids)
                self.finish_reason = delta.finish_reason
                if delta.finish_reason == "error":
                    raise self._failure(delta.error or "the engine failed this request")
                if delta.text:
                    yield delta.text
        finally:
            if self.finish_reason is None:
                self._client.abort(self._id)

    def _failure(self, why: str) -> Exception:
        if not self._client.is_healthy(float("inf")):
            return EngineDeadError(why)
        return InvalidRequestError(why)
