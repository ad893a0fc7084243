"""`jaxserve plan`: what a model needs and how fast it can be on a device, without the device."""

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve.cli import engine_options as opt
from jaxserve.cli.terminal import say, with_clear_errors
from jaxserve.errors import InvalidRequestError

if TYPE_CHECKING:  # the real imports are in the command: `jaxserve --help` stays quick
    from jaxserve.planning.serving_plan import ServingPlan

_PANEL = "Plan"

RequiredModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A pulled model's name, a .gguf file, a folder, or a config.json alone.",
    ),
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device", help="h200, h100, a100, l4, or cpu: this machine.", rich_help_panel=_PANEL
    ),
]
Context = Annotated[
    int,
    typer.Option(
        min=1, help="Tokens of context of the sequences in the roofline.", rich_help_panel=_PANEL
    ),
]
Estimate = Annotated[
    bool,
    typer.Option(
        "--estimate",
        help="Compile nothing and measure nothing: quicker, and the size of a step is an estimate.",
        rich_help_panel=_PANEL,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print numbers for scripts.", rich_help_panel=_PANEL)
]


def register(app: typer.Typer) -> None:
    """Add the command `plan`."""
    app.command("plan")(with_clear_errors(plan_command))


def plan_command(
    model: RequiredModel,
    device: DeviceName = "cpu",
    context: Context = 1024,
    estimate: Estimate = False,
    as_json: Json = False,
    dtype: opt.Dtype = opt.DEFAULTS.dtype,
    kv_cache_dtype: opt.KVCacheDtype = "auto",
    quantization: opt.Quantization = None,
    threads: opt.Threads = None,
    max_model_len: opt.MaxModelLen = None,
    max_batch_rows: opt.MaxBatchRows = opt.DEFAULTS.max_batch_rows,
    max_batch_tokens: opt.MaxBatchTokens = opt.DEFAULTS.max_batch_tokens,
    gpu_memory_utilization: opt.GPUMemoryUtilization = opt.DEFAULTS.gpu_memory_utilization,
    kv_memory: opt.KVMemory = opt.DEFAULTS.kv_memory,
    kv_host_memory: opt.KVHostMemory = opt.DEFAULTS.kv_host_memory,
    prefix_cache: opt.PrefixCache = opt.DEFAULTS.prefix_cache,
    page_size: opt.PageSize = opt.DEFAULTS.page_size,
    speculative: opt.Speculative = None,
    model_file: opt.ModelFile = None,
) -> None:
    """Print what MODEL needs and how fast it can be on a device, from its headers alone.

    Bytes of weights and KV cache, pages, the largest batch for each context length, the steps
    that are compiled, and the roofline, each with its arithmetic. No weight is loaded. With the
    GPU extra installed, --device h200 compiles the largest step and shows its exact memory.
    """
    given = dict(locals())
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported: no GPU is needed
    from jaxserve.core.threads import use_threads
    from jaxserve.planning.devices import DEVICE_NAMES

    if device not in DEVICE_NAMES:
        raise InvalidRequestError(
            f"device is {device[:40]!r}; choose {', '.join(DEVICE_NAMES)}", "device"
        )
    use_threads(threads)
    config = opt.engine_config(given | {"dtype": _dtype(dtype, device)})
    from jaxserve.planning.plan_model import plan_model

    plan = plan_model(
        model,
        device,
        config,
        context=context,
        quantization=quantization,
        model_file=None if model_file is None else str(model_file),
        estimate=estimate,
        say=say,
    )
    if as_json:
        from jaxserve.planning.plan_text import plan_report

        typer.echo(json.dumps(plan_report(plan), indent=2))
    else:
        _print(plan)


def _dtype(dtype: str, device: str) -> str:
    """What auto means there."""
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


def _print(plan: "ServingPlan") -> None:
    """Tables on a terminal, plain columns into a pipe."""
    from rich.console import Console

    from jaxserve.planning.plan_text import plain_text

    console = Console()
    if not console.is_terminal:
        typer.echo(plain_text(plan))
        return
    from jaxserve.cli.plan_tables import print_tables

    print_tables(console, plan)
