"""POST /v1/completions."""

import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.server.answers import Answer
from jaxserve.server.body import read_json_object
from jaxserve.server.calls import Call, make_envelope
from jaxserve.server.prompts import prepare_completion
from jaxserve.server.protocol import check_model, parse_completion
from jaxserve.server.responses import CompletionFormat
from jaxserve.server.state import STATE


async def handle_completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several, n times each; choice = prompt * n + j."""
    arrival = time.monotonic()
    state = request.app[STATE]
    backend = state.require_backend()
    body = await read_json_object(request, state.settings, state.executor)
    call = await state.in_thread(completion_call, body, backend.model, state.model_names)
    return await Answer(request, state, backend.client, call, arrival).run()


def completion_call(body: Mapping[str, Any], model: LoadedModel, names: tuple[str, ...]) -> Call:
    """Check and prepare a body; names: what the model is served as, the first is reported.

    Takes as long as tokenising. Raises ApiError or InvalidRequestError naming the field.
    """
    check_model(body, names)
    envelope = make_envelope("cmpl", names[0])
    parsed = parse_completion(body, model.sampling_defaults)
    prepared = prepare_completion(parsed, model, envelope.call_id)
    form = CompletionFormat(envelope, prepared.echoes, parsed.options.params.n)
    return Call(parsed.options, prepared, form, parsed.prompt_only)
