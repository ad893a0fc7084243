"""`jaxserve serve`: an OpenAI-compatible HTTP server around one model."""

import asyncio
import json
import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve.cli import engine_options as opt
from jaxserve.cli.terminal import say, set_up_logging, with_clear_errors
from jaxserve.loading import hub

if TYPE_CHECKING:  # imported when the command runs: `jaxserve --help` stays quick
    from jaxserve.server.metrics import ServerMetrics
    from jaxserve.server.settings import ServerSettings
    from jaxserve.server.state import Backend

_PANEL = "Server"

Host = Annotated[
    str, typer.Option(help="Address to listen on; 0.0.0.0 is everywhere.", rich_help_panel=_PANEL)
]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="0: any free port.", rich_help_panel=_PANEL)
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="JAXSERVE_API_KEY",
        show_envvar=True,
        help="Clients must send it as Authorization: Bearer KEY.",
        rich_help_panel=_PANEL,
    ),
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        help="Name that clients send as model; may be repeated. Default: MODEL.",
        rich_help_panel=_PANEL,
    ),
]
ShutdownTimeout = Annotated[
    float,
    typer.Option(
        min=0, help="Seconds that running requests get after SIGTERM.", rich_help_panel=_PANEL
    ),
]
LogRequests = Annotated[
    bool, typer.Option("--log-requests", help="One log line per request.", rich_help_panel=_PANEL)
]


def register(app: typer.Typer) -> None:
    """Add the command `serve`."""
    app.command("serve")(with_clear_errors(serve_command))


def serve_command(
    model: opt.Model = opt.DEFAULT_MODEL,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    served_model_name: ServedModelName = None,
    max_body_size: opt.BodySize = opt.DEFAULT_BODY_SIZE,
    shutdown_timeout: ShutdownTimeout = 5.0,
    log_requests: LogRequests = False,
    dtype: opt.Dtype = opt.DEFAULTS.dtype,
    quantization: opt.Quantization = None,
    threads: opt.Threads = None,
    max_model_len: opt.MaxModelLen = None,
    max_batch_rows: opt.MaxBatchRows = opt.DEFAULTS.max_batch_rows,
    max_batch_tokens: opt.MaxBatchTokens = opt.DEFAULTS.max_batch_tokens,
    max_queue: opt.MaxQueue = opt.DEFAULTS.max_queue,
    kv_memory: opt.KVMemory = opt.DEFAULTS.kv_memory,
    gpu_memory_utilization: opt.GPUMemoryUtilization = opt.DEFAULTS.gpu_memory_utilization,
    kv_cache_dtype: opt.KVCacheDtype = "auto",
    attention_backend: opt.AttentionBackend = opt.DEFAULTS.attention_backend,
    kv_host_memory: opt.KVHostMemory = opt.DEFAULTS.kv_host_memory,
    prefix_cache: opt.PrefixCache = opt.DEFAULTS.prefix_cache,
    scheduling: opt.Scheduling = "priority",
    max_stall: opt.MaxStall = opt.DEFAULTS.max_stall,
    batching: opt.Batching = "continuous",
    page_size: opt.PageSize = opt.DEFAULTS.page_size,
    speculative: opt.Speculative = None,
    speculative_audit: opt.SpeculativeAudit = opt.DEFAULTS.speculative_audit,
    seed: opt.Seed = opt.DEFAULTS.seed,
    model_file: opt.ModelFile = None,
    chat_template: opt.ChatTemplateFile = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API.

    Paths: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics, /version. The
    port opens at once and answers 503 until the model is ready.
    """
    config = opt.engine_config(locals())
    hub.resolve(model)  # a mistyped name fails before anything is imported or opened
    from jaxserve.server.settings import ServerSettings

    settings = ServerSettings(
        served_model_names=tuple(served_model_name or ()),
        api_key=api_key,
        max_body_bytes=max_body_size,
        log_requests=log_requests,
    )
    set_up_logging()
    if log_requests:
        logging.getLogger("jaxserve.access").setLevel(logging.INFO)
    options = opt.EngineOptions(model, config, model_file, chat_template, quantization, threads)
    _serve(options, settings, host, port, shutdown_timeout)


def _serve(
    options: opt.EngineOptions,
    settings: "ServerSettings",
    host: str,
    port: int,
    shutdown_timeout: float,
) -> None:
    from jaxserve.server.app import make_loading_app
    from jaxserve.server.lifecycle import CannotListenError, StillLoadingError, run_server
    from jaxserve.server.metrics import ServerMetrics

    name = (settings.served_model_names or (options.model,))[0]
    metrics = ServerMetrics(name)
    app = make_loading_app(settings, metrics, options.model)
    server = run_server(
        app,
        host,
        port,
        lambda: _load(options, metrics),
        shutdown_timeout=shutdown_timeout,
        on_listening=lambda url: say(f"listening on {url}; loading {options.model}"),
        on_ready=lambda url: _announce(url, name, settings.api_key),
    )
    try:
        asyncio.run(server)
    except CannotListenError as error:
        say(f"error: {error}")
        raise typer.Exit(1) from None
    except StillLoadingError:
        say("stopped while loading")
        sys.stderr.flush()
        os._exit(130)  # XLA may be compiling on another thread, and cannot be interrupted


def _load(options: opt.EngineOptions, metrics: "ServerMetrics") -> "Backend":
    from jaxserve.cli.engine_start import start_engine
    from jaxserve.server.state import Backend

    started = start_engine(options, say, metrics.on_step)
    for phase, seconds in started.phases.items():
        metrics.set_startup(phase, seconds)
    metrics.set_cache_config(
        {
            "page_size": started.engine.page_size,
            "capacity_tokens": started.engine.capacity_tokens,
            "max_model_len": started.model.max_model_len,
            "dtype": options.config.dtype,
            "kv_cache_dtype": options.config.kv_cache_dtype,
            "enable_prefix_caching": options.config.prefix_cache,
            "kv_host_memory": options.config.kv_host_memory,
        }
    )
    return Backend(started.client, started.model)


def _announce(url: str, name: str, api_key: str | None) -> None:
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    header = " -H 'Authorization: Bearer KEY'" if api_key else ""
    say(f"serving {name} at {url}/v1 (Ctrl-C stops it). Try:")
    say(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} \\")
    say(f"    -d '{body}'")
