"""Join the chunks of a stream into the plain response they stand for."""

from typing import Any


def merge_completion(events: list[Any]) -> dict[str, Any]:
    """The /v1/completions response that a whole stream equals."""
    merged, chunks = _start(events, "text_completion")
    for index, parts in _by_choice(chunks).items():
        choice = {"index": index, "text": "".join(part["text"] for part in parts)}
        if "prompt_token_ids" in parts[0]:
            choice["prompt_token_ids"] = parts[0]["prompt_token_ids"]
        if "prompt_logprobs" in parts[0]:
            choice["prompt_logprobs"] = parts[0]["prompt_logprobs"]
        assert not any("prompt_logprobs" in part for part in parts[1:])
        logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        joined = None
        if logprobs:
            joined = {key: [x for one in logprobs for x in one[key]] for key in logprobs[0]}
        merged["choices"].append(choice | {"logprobs": joined} | _rest(parts))
    return merged


def merge_chat(events: list[Any]) -> dict[str, Any]:
    """The /v1/chat/completions response that a whole stream equals."""
    merged, chunks = _start(events, "chat.completion.chunk")
    merged["object"] = "chat.completion"
    if "prompt_token_ids" in chunks[0]:
        merged["prompt_token_ids"] = chunks[0]["prompt_token_ids"]
    of_prompt = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    assert len(of_prompt) <= 1
    if of_prompt:
        merged["prompt_logprobs"] = of_prompt[0]
    for index, parts in _by_choice(chunks).items():
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in parts[1:])
        content = "".join(part["delta"].get("content", "") for part in parts)
        message = {"role": "assistant", "content": content, "refusal": None}
        logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
        joined = None
        if logprobs:
            joined = {"content": [x for one in logprobs for x in one["content"]], "refusal": None}
        choice = {"index": index, "message": message, "logprobs": joined}
        merged["choices"].append(choice | _rest(parts))
    return merged


def without_identity(response: dict[str, Any]) -> dict[str, Any]:
    """The response less what differs between any two calls."""
    return {key: value for key, value in response.items() if key not in ("id", "created")}


def _start(events: list[Any], kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {chunk["object"] for chunk in chunks} == {kind}
    for key in ("id", "created", "model"):
        assert len({chunk[key] for chunk in chunks}) == 1, key
    first = chunks[0]
    merged: dict[str, Any] = {key: first[key] for key in ("id", "object", "created", "model")}
    merged["choices"] = []
    if not chunks[-1]["choices"]:
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        merged["usage"] = chunks[-1]["usage"]
    else:
        assert all("usage" not in chunk for chunk in chunks)
    return merged, chunks


def _by_choice(chunks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    parts: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return dict(sorted(parts.items()))


def _rest(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What only the last chunk of a choice says, and the ids if they were asked for."""
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["finish_reason"] is not None
    rest = {key: parts[-1][key] for key in ("finish_reason", "stop_reason")}
    if "token_ids" in parts[-1]:
        rest["token_ids"] = [token for part in parts for token in part.get("token_ids", ())]
    return rest
