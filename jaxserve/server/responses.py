"""The JSON shapes of answers: one formatter per endpoint serves plain responses and stream chunks.

A plain response is the formatter applied to all of a choice's deltas merged into one, so that a
stream joined by the client equals it field by field.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.engine.outputs import Logprob, OutputDelta
from jaxserve.server.prompt_echo import (
    Entries,
    PromptEcho,
    completion_logprobs,
    echoed_logprobs,
    finite,
    prompt_logprobs_field,
)


@dataclass(frozen=True)
class Envelope:
    """What every response and chunk of one call repeats."""

    call_id: str
    created: int
    model: str


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
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs), None),
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
    """/v1/completions. Keeps how far each choice's text offsets have come, and logprobs of prompts,
    which all choices of a prompt show."""

    def __init__(self, envelope: Envelope, prompts: Sequence[PromptEcho], n: int) -> None:
        self._envelope = envelope
        self._prompts = prompts
        self._n = n
        self._offsets: dict[int, int] = {}
        self._entries: dict[int, Entries] = {}

    @property
    def shows_prompts_first(self) -> bool:
        """Whether every choice begins with logprobs of its prompt, which come with the first."""
        return any(prompt.shows_logprobs for prompt in self._prompts)

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
        number = index // self._n
        prompt = self._prompts[number]
        if delta.prompt_logprobs is not None:
            self._entries[number] = delta.prompt_logprobs.dicts()
        entries = self._entries.get(number)
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
            fields = completion_logprobs(delta.logprobs, offset)
            self._offsets[index] += sum(map(len, fields["tokens"]))
            if first and entries is not None and prompt.text_offsets is not None:
                echoed = echoed_logprobs(entries, prompt)
                fields = {name: echoed[name] + values for name, values in fields.items()}
            choice["logprobs"] = fields
        if first and prompt.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_field(entries, prompt.prompt_logprobs)
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

    @property
    def shows_prompts_first(self) -> bool:
        """As in CompletionFormat: here the answer as a whole shows them."""
        return False

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
        if self._prompt.prompt_logprobs is not None:
            response |= self._prompt_logprobs(wholes[0])
        if self._prompt.token_ids is not None:
            response["prompt_token_ids"] = list(self._prompt.token_ids)
        return response

    def choice_chunk(self, index: int, delta: OutputDelta) -> dict[str, Any]:
        """The chunk for what is new of one choice."""
        content = {"content": delta.text} if delta.text else {}
        chunk = self.chunk([{"index": index, "delta": content} | self._rest(delta)])
        if delta.prompt_logprobs is not None:
            chunk |= self._prompt_logprobs(delta)
        return chunk

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

    def _prompt_logprobs(self, delta: OutputDelta) -> dict[str, Any]:
        entries = None if delta.prompt_logprobs is None else delta.prompt_logprobs.dicts()
        num_top = self._prompt.prompt_logprobs or 0
        return {"prompt_logprobs": prompt_logprobs_field(entries, num_top)}

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


def _chat_logprob(entry: dict[int, Logprob], num_top: int) -> dict[str, Any]:
    drawn, *others = entry.values()
    # The drawn token comes first and is not repeated: with num_top others it is not one of the top.
    if len(others) < num_top:
        others = sorted([drawn, *others], key=lambda one: -one.logprob)
    return _token_fields(drawn) | {"top_logprobs": [_token_fields(one) for one in others]}


def _token_fields(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token
    return {"token": text, "logprob": finite(entry.logprob), "bytes": list(text.encode())}
