"""One line of a batch: from its bytes to engine requests, and from what they gave to its result.

What fails, fails for this line alone. A line that is no request (bad JSON, no custom_id, an unknown
url) has an `error`; one whose request is refused or fails has the `response` that the server would
have sent, with its status code.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.batch.errors import LineError
from jaxserve.batch.input_file import MAX_LINE_BYTES, InputLine
from jaxserve.batch.results_file import custom_id_key, result_id
from jaxserve.engine.client import EngineClient
from jaxserve.engine.outputs import GenerationRequest, OutputDelta
from jaxserve.errors import EngineDeadError
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.server.body import parse_json_object
from jaxserve.server.calls import Call
from jaxserve.server.chat import chat_call
from jaxserve.server.completions import completion_call
from jaxserve.server.errors import ApiError, as_api_error, generation_failed
from jaxserve.server.fields import bad_field, get_bool
from jaxserve.server.streaming import encode_json

MAX_CUSTOM_ID = 512  # characters

CALLS: dict[str, Callable[[dict[str, Any], LoadedModel, tuple[str, ...]], Call]] = {
    "/v1/completions": completion_call,
    "/v1/chat/completions": chat_call,
}


class LineJob:
    """A job of an OfflineBatch. Without a call it has failed before the engine heard of it."""

    def __init__(
        self,
        line: InputLine,
        custom_id: str | None,
        outcome: Call | LineError | ApiError,
    ) -> None:
        self.number = line.number
        self._digest = line.digest
        self._custom_id = custom_id
        self._outcome = outcome
        self.requests: Sequence[GenerationRequest] = ()
        self._parts: list[list[OutputDelta]] = []
        self._first_choice: dict[str, int] = {}
        if isinstance(outcome, Call):
            self.requests = outcome.prepared.requests
            self._parts = [[] for _ in range(outcome.num_choices)]
            n = outcome.options.params.n
            self._first_choice = {r.request_id: i * n for i, r in enumerate(self.requests)}

    def add(self, delta: OutputDelta) -> None:
        """Take a delta of one of the requests."""
        self._parts[self._first_choice[delta.request_id] + delta.index].append(delta)

    def result(self) -> tuple[bytes, bool]:
        """The line of the results, and whether the request has failed.

        Raises EngineDeadError if the engine was shut down before it had ended.
        """
        if any(delta.finish_reason == "abort" for part in self._parts for delta in part):
            raise EngineDeadError("the engine was shut down")
        try:
            status, body = self._response()
            return self._line({"status_code": status, "body": body}, None), status != 200
        except LineError as error:
            fields = {"code": error.code, "message": f"line {self.number}: {error}"}
            return self._line(None, fields), True
        except Exception as error:  # a bug of ours fails this line and not the others
            failure = as_api_error(error)
            return self._line({"status_code": failure.status, "body": failure.body()}, None), True

    def _response(self) -> tuple[int, dict[str, Any]]:
        if not isinstance(self._outcome, Call):
            raise self._outcome
        for part in self._parts:
            if part[-1].finish_reason == "error":
                raise generation_failed(part[-1].error)
        return 200, self._outcome.response(self._parts)

    def _line(self, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
        name = result_id(self.number, self._digest)
        if response is not None:
            response = {"request_id": name.replace("batch_req", "req")} | response
        record = {"id": name, "custom_id": self._custom_id, "response": response, "error": error}
        return encode_json(record).encode() + b"\n"


@dataclass(frozen=True)
class LineReader:
    """Makes jobs of lines.

    names: what `model` may be, the first is reported. seed: with a line's number it gives the
    seeds of requests that bring none, so that a line's draws do not depend on what ran before.
    """

    client: EngineClient
    model: LoadedModel
    names: tuple[str, ...]
    seed: int

    def job(self, line: InputLine, seen: set[int]) -> LineJob:
        """The job of a line; `seen`: the keys of the custom_ids before it, gets its own."""
        custom_id: str | None = None
        try:
            fields = _parse(line)
            custom_id = _custom_id(fields)
            key = custom_id_key(custom_id)
            if key in seen:
                raise LineError(
                    "duplicate_custom_id", "an earlier line has the same custom_id; it is answered"
                )
            seen.add(key)
            return LineJob(line, custom_id, self._call(line.number, fields))
        except LineError as error:
            return LineJob(line, custom_id, error)
        except Exception as error:  # what the server answers with a 4xx, or a bug of ours
            return LineJob(line, custom_id, as_api_error(error))

    def _call(self, number: int, fields: dict[str, Any]) -> Call:
        method, url, body = fields.get("method"), fields.get("url"), fields.get("body")
        if method != "POST":
            raise LineError("invalid_method", 'method must be "POST"')
        if not isinstance(url, str) or url not in CALLS:
            raise LineError("invalid_url", f"url must be one of {', '.join(CALLS)}")
        if not isinstance(body, dict):
            raise LineError("invalid_body", "body must be an object: the request itself")
        if get_bool(body, "stream"):
            raise bad_field(
                "stream", "a batch cannot stream; leave stream out", "unsupported_value"
            )
        call = CALLS[url](body, self.model, self.names)
        for request in call.prepared.requests:
            self.client.check(request.prompt_token_ids, request.params)
        requests = [
            self._seeded(number, index, request)
            for index, request in enumerate(call.prepared.requests)
        ]
        return replace(call, prepared=replace(call.prepared, requests=tuple(requests)))

    def _seeded(self, number: int, index: int, request: GenerationRequest) -> GenerationRequest:
        if request.params.seed is not None:
            return request
        key = f"{self.seed}/{number}/{index}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 1
        return replace(request, params=replace(request.params, seed=seed))


def _parse(line: InputLine) -> dict[str, Any]:
    if line.data is None:
        raise LineError("line_too_large", f"more than {MAX_LINE_BYTES} bytes")
    try:
        return parse_json_object(line.data)
    except ApiError as error:
        raise LineError(error.code or "invalid_json", error.message) from None


def _custom_id(fields: dict[str, Any]) -> str:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise LineError(
            "invalid_custom_id", f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
        )
    try:
        custom_id.encode()
    except UnicodeEncodeError:
        raise LineError("invalid_custom_id", "custom_id holds half a surrogate pair") from None
    return custom_id
