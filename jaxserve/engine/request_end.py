"""When a token ends its request."""

from collections.abc import Sequence

from jaxserve.engine.request import Request


def finish_reason(request: Request, token: int, longest: int) -> tuple[str | None, int | None]:
    """Why the newest token, already part of the output, ends the request, if it does:
    (finish_reason, stop_reason).

    longest: tokens of prompt and output that it may have.
    """
    params = request.params
    num_output = len(request.output_token_ids)
    is_eos = token in request.eos_token_ids and not params.ignore_eos
    if (is_eos or token in params.stop_token_ids) and num_output > params.min_tokens:
        return "stop", None if is_eos else token
    if num_output + len(request.prompt_token_ids) >= longest:
        return "length", None
    return None, None


def take_tokens(
    request: Request, drawn: Sequence[int], longest: int
) -> tuple[tuple[int, ...], str | None, int | None]:
    """Append drawn tokens up to the one that ends the request, if one does: those appended,
    and finish_reason and stop_reason."""
    for count, token in enumerate(drawn, 1):
        request.output_token_ids.append(token)
        reason, stop_reason = finish_reason(request, token, longest)
        if reason is not None:
            return tuple(drawn[:count]), reason, stop_reason
    return tuple(drawn), None, None
