"""POST /v1/chat/completions."""

import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.server.answers import Answer
from jaxserve.server.body import read_json_object
from jaxserve.server.calls import Call, make_envelope
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
    call = await state.in_thread(chat_call, body, backend.model, state.model_names)
    return await Answer(request, state, backend.client, call, arrival).run()


def chat_call(body: Mapping[str, Any], model: LoadedModel, names: tuple[str, ...]) -> Call:
    """Check and prepare a body; names: what the model is served as, the first is reported.

    Takes as long as rendering and tokenising. Raises ApiError or InvalidRequestError.
    """
    check_model(body, names)
    envelope = make_envelope("chatcmpl", names[0])
    parsed = parse_chat(body, model.sampling_defaults)
    prepared = prepare_chat(parsed, model, envelope.call_id)
    params = parsed.options.params
    form = ChatFormat(envelope, prepared.echoes[0], params.n, params.logprobs or 0)
    return Call(parsed.options, prepared, form)
