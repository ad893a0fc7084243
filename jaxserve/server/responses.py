"""The JSON shapes of answers: one formatter per endpoint serves plain responses and stream chunks.

A plain response is the formatter applied to all of a choice's deltas merged into one, so that a
stream joined by the client equals it field by field.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.engine.outputs import Logprob, OutputDelta

LOGPROB_FLOOR = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


@dataclass(frozen=True)
class Envelope:
    """What every response and chunk of one call repeats."""

    call_id: str
    created: int
    model: str


@dataclass(frozen=True)
class PromptEcho:
    """What of one prompt goes into its choices: its text (echo) and ids (return_token_ids)."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """One delta that says what several in a row of the same choice say."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=logprobs,
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),
    )


def usage_fields(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The usage object; the prompt counts once however many choices it has."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class CompletionFormat:
    """/v1/completions. Keeps per choice how far its text offsets have come."""

    def __init__(self, envelope: Envelope, prompts: Sequence[PromptEcho], n: int) -> None:
        self._envelope = envelope
        self._prompts = prompts
        self._n = n
        self._offsets: dict[int, int] = {}

    def openings(self) -> list[dict[str, Any]]:
        """Chunks to send before any token: none here."""
        return []

    def response(self, wholes: Sequence[OutputDelta], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain response; wholes[i] is all of choice i."""
        choices = [self._choice(index, whole) for index, whole in enumerate(wholes)]
        return self.chunk(choices) | {"usage": usage}

    def choice_chunk(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        """The chunk for what is new of one choice."""
        return self.chunk([self._choice(index, delta)])

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk around choices (none: the one that carries usage)."""
        return {
            "id": self._envelope.call_id,
            "object": "text_completion",
            "created": self._envelope.created,
            "model": self._envelope.model,
            "choices": choices,
        }

    def _choice(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        prompt = self._prompts[index // self._n]
        first = index not in self._offsets
        offset = self._offsets.setdefault(index, len(prompt.text))
        choice: dict[str, Any] = {
            "index": index,
            "text": prompt.text + delta.text if first else delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if delta.logprobs is not None:
            choice["logprobs"] = _completion_logprobs(delta, offset)
            self._offsets[index] += sum(len(_token_text(entry)) for entry in delta.logprobs)
        if prompt.token_ids is not None:
            choice["token_ids"] = list(delta.token_ids)
            if first:
                choice["prompt_token_ids"] = list(prompt.token_ids)
        return choice


class ChatFormat:
    """/v1/chat/completions: message in the plain response, deltas in the stream."""

    def __init__(self, envelope: Envelope, prompt: PromptEcho, n: int, num_top: int) -> None:
        self._envelope = envelope
        self._prompt = prompt
        self._n = n
        self._num_top = num_top

    def openings(self) -> list[dict[str, Any]]:
        """The first chunk of every choice names the role."""
        chunks = []
        for index in range(self._n):
            delta = {"role": "assistant", "content": ""}
            rest = {"logprobs": None, "finish_reason": None, "stop_reason": None}
            chunks.append(self.chunk([{"index": index, "delta": delta} | rest]))
        if self._prompt.token_ids is not None:
            chunks[0]["prompt_token_ids"] = list(self._prompt.token_ids)
        return chunks

    def response(self, wholes: Sequence[OutputDelta], usage: dict[str, Any]) -> dict[str, Any]:
        """The plain response; wholes[i] is all of choice i."""
        choices = []
        for index, whole in enumerate(wholes):
            message = {"role": "assistant", "content": whole.text, "refusal": None}
            choices.append({"index": index, "message": message} | self._rest(whole))
        response = self._around(choices, "chat.completion") | {"usage": usage}
        if self._prompt.token_ids is not None:
            response["prompt_token_ids"] = list(self._prompt.token_ids)
        return response

    def choice_chunk(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        """The chunk for what is new of one choice."""
        content = {"content": delta.text} if delta.text else {}
        return self.chunk([{"index": index, "delta": content} | self._rest(delta)])

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk around choices (none: the one that carries usage)."""
        return self._around(choices, "chat.completion.chunk")

    def _around(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        return {
            "id": self._envelope.call_id,
            "object": kind,
            "created": self._envelope.created,
            "model": self._envelope.model,
            "choices": choices,
        }

    def _rest(self, delta: OutputDelta) -> dict[str, Any]:
        rest: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if delta.logprobs is not None:
            content = [_chat_logprob(entry, self._num_top) for entry in delta.logprobs]
            rest["logprobs"] = {"content": content, "refusal": None}
        if self._prompt.token_ids is not None:
            rest["token_ids"] = list(delta.token_ids)
        return rest


AnswerFormat = CompletionFormat | ChatFormat


def _completion_logprobs(delta: OutputDelta, offset: int) -> dict[str, list[Any]]:
    fields: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for entry in delta.logprobs or ():
        drawn = next(iter(entry.values()))
        top: dict[str, float] = {}
        for candidate in entry.values():  # two ids may share a text: the first, likelier, stays
            top.setdefault(candidate.decoded_token, _finite(candidate.logprob))
        fields["tokens"].append(drawn.decoded_token)
        fields["token_logprobs"].append(_finite(drawn.logprob))
        fields["top_logprobs"].append(top)
        fields["text_offset"].append(offset)
        offset += len(drawn.decoded_token)
    return fields


def _token_text(entry: dict[int, Logprob]) -> str:
    return next(iter(entry.values())).decoded_token


def _chat_logprob(entry: dict[int, Logprob], num_top: int) -> dict[str, Any]:
    drawn, *others = entry.values()
    # The drawn token comes first and is not repeated: with num_top others it is not one of the top.
    if len(others) < num_top:
        others = sorted([drawn, *others], key=lambda one: -one.logprob)
    return _token_fields(drawn) | {"top_logprobs": [_token_fields(one) for one in others]}


def _token_fields(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token
    return {"token": text, "logprob": _finite(entry.logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR)
