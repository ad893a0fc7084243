"""POST /v1/completions."""

import time

from aiohttp import web

from jaxserve.server.answers import Answer, make_envelope
from jaxserve.server.body import read_json_object
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
    check_model(body, state.model_names)
    envelope = make_envelope("cmpl", state.model_names[0])
    call = await state.in_thread(parse_completion, body, backend.model.sampling_defaults)
    prepared = await state.in_thread(prepare_completion, call, backend.model, envelope.call_id)
    form = CompletionFormat(envelope, prepared.echoes, call.options.params.n)
    answer = Answer(request, state, backend.client, call.options, prepared, form, arrival)
    return await answer.run()
