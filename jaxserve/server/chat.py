"""POST /v1/chat/completions."""

import time

from aiohttp import web

from jaxserve.server.answers import Answer, make_envelope
from jaxserve.server.body import read_json_object
from jaxserve.server.prompts import prepare_chat
from jaxserve.server.protocol import check_model, parse_chat
from jaxserve.server.responses import ChatFormat
from jaxserve.server.state import STATE


async def handle_chat(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, n times."""
    arrival = time.monotonic()
    state = request.app[STATE]
    backend = state.require_backend()
    body = await read_json_object(request, state.settings, state.executor)
    check_model(body, state.model_names)
    envelope = make_envelope("chatcmpl", state.model_names[0])
    call = await state.in_thread(parse_chat, body, backend.model.sampling_defaults)
    prepared = await state.in_thread(prepare_chat, call, backend.model, envelope.call_id)
    params = call.options.params
    form = ChatFormat(envelope, prepared.echoes[0], params.n, params.logprobs or 0)
    answer = Answer(request, state, backend.client, call.options, prepared, form, arrival)
    return await answer.run()
