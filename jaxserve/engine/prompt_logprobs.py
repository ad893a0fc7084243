"""Log-probabilities of prompt tokens: what a step is asked for, and what comes back. numpy only.

The hidden state of a prompt's token i says how likely token i + 1 was, so a prompt of P tokens has
P - 1 of them, of its tokens 1 to P - 1. They come chunk by chunk and are kept on the request until
its first token is drawn. Who asks for them has every prompt token run: KV that exists already is
used only as far as the numbers are known (`Request.max_shared`), which after a preemption they are.
"""

from collections.abc import Sequence

import numpy as np

from jaxserve.core.step_batch import Logprobs
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.request import PromptLogprobs, Request


def build_targets(plan: Plan, size: int) -> np.ndarray | None:
    """int32 [size], for each of the step's prefill tokens the token that follows it, where its
    logprob is wanted and unknown, else -1; None if none is. size: the bucket's prefill tokens."""
    wanted = [_wanted(item) for item in plan.prefill]
    if not any(wanted):
        return None
    targets = np.full(size, -1, np.int32)
    at = 0
    for item, positions in zip(plan.prefill, wanted, strict=True):
        if positions:
            first = at + positions.start - item.start
            ids = item.request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
            targets[first : first + len(positions)] = ids
        at += item.num_tokens
    return targets


def found_in(plan: Plan, scores: Logprobs) -> list[tuple[Scheduled, PromptLogprobs]]:
    """What a step, whose targets were those of this plan, has brought of each of its prompts.

    By what is known of them now: call it before the step is committed and after the one before
    was. scores: leading axis [prefill tokens], as numpy.
    """
    found = []
    at = 0
    for item in plan.prefill:
        positions = _wanted(item)
        if positions:
            first = at + positions.start - item.start
            found.append((item, _part(item.request, positions, first, scores)))
        at += item.num_tokens
    return found


def keep(request: Request, part: PromptLogprobs) -> None:
    """Add what was found to what is known of the request's prompt."""
    request.prompt_logprobs.append(part)
    request.num_prompt_logprobs += len(part)


def take(request: Request) -> PromptLogprobs | None:
    """All of the prompt of a request that has drawn its first token; None if nobody asked."""
    num_top = request.params.prompt_logprobs
    if num_top is None or request.leader_id is not None:
        return None
    assert request.num_prompt_logprobs == len(request.prompt_token_ids) - 1
    parts, request.prompt_logprobs = request.prompt_logprobs, []
    return _joined(parts, num_top)


def _wanted(item: Scheduled) -> range:
    """Positions in the request whose successor's logprob this item brings and nobody has yet."""
    request = item.request
    if not request.wants_prompt_logprobs:
        return range(0)
    last = min(item.start + item.num_tokens, len(request.prompt_token_ids) - 1)
    return range(max(item.start, request.num_prompt_logprobs), last)


def _part(request: Request, positions: range, first: int, scores: Logprobs) -> PromptLogprobs:
    rows = slice(first, first + len(positions))
    num_top = request.params.prompt_logprobs
    ids = request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
    return PromptLogprobs(  # copies: a chunk's whole arrays are not kept for one prompt
        np.array(ids, np.int32),
        np.array(scores.token_logprob[rows]),
        np.array(scores.token_rank[rows]),
        np.array(scores.top_ids[rows, :num_top]),
        np.array(scores.top_logprobs[rows, :num_top]),
    )


def _joined(parts: Sequence[PromptLogprobs], num_top: int) -> PromptLogprobs:
    """Parts one after the other; there may be none."""
    if not parts:
        none = np.zeros(0, np.int32)
        top = np.zeros((0, num_top), np.int32)
        return PromptLogprobs(none, none.astype(np.float32), none, top, top.astype(np.float32))
    return PromptLogprobs(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )
