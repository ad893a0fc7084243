"""The options of every command that runs an engine, under vLLM's names where it has one."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from jaxserve.cli.byte_size import parse_byte_size, show_byte_size
from jaxserve.config import DEFAULT_KV_MEMORY, MAX_THREADS, EngineConfig
from jaxserve.speculative_config import METHODS, SpeculativeConfig

_PANEL = "Engine"
DEFAULT_BODY_SIZE = 16 << 20


def _option(*names: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel=_PANEL)


def _byte_size(text: str | int) -> int:
    try:
        return parse_byte_size(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _size_option(*names: str, help: str, panel: str, shown_default: str) -> typer.models.OptionInfo:
    return typer.Option(
        *names,
        help=help,
        parser=_byte_size,
        metavar="SIZE",
        rich_help_panel=panel,
        show_default=shown_default,
    )


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A pulled model's name, a .gguf file or a folder.")
]
Dtype = Annotated[str, _option("--dtype", help="auto, float32 or bfloat16. auto: float32 on CPUs.")]
KVCacheDtype = Annotated[
    Literal["auto", "bf16", "int8", "fp8"],
    typer.Option(
        "--kv-cache-dtype",
        help="Type of the KV cache. int8 and fp8 take about half of bf16's memory and a quarter of "
        "float32's, with a scale per token and head. auto: as --dtype.",
        rich_help_panel=_PANEL,
    ),
]
Quantization = Annotated[
    Literal["int8", "int4", "fp8"] | None,
    typer.Option(
        "--quantization",
        help="Pack a plain checkpoint's matrices while loading. Checkpoints that are quantised "
        "already need no option.",
        show_default="as the checkpoint has them",
        rich_help_panel=_PANEL,
    ),
]
AttentionBackend = Annotated[
    str,
    typer.Option(
        "--attention-backend",
        metavar="NAME",
        help="Whose kernels run. mosaic_gpu: ours for Hopper GPUs; cpu: ours for CPUs; reference: "
        "XLA's, anywhere; interpret: mosaic_gpu on a CPU, very slowly. auto: the best there is.",
        rich_help_panel=_PANEL,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        max=MAX_THREADS,
        help="CPU threads to compute on.",
        show_default="one per core",
        rich_help_panel=_PANEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    _option("--max-model-len", help="Tokens of prompt and output. Default: the model's limit."),
]
MaxBatchRows = Annotated[
    int, _option("--max-batch-rows", "--max-num-seqs", help="Requests that run at once.")
]
MaxBatchTokens = Annotated[
    int,
    _option(
        "--max-batch-tokens",
        "--max-num-batched-tokens",
        help="Prompt tokens a step may carry; fewer: steadier streams.",
    ),
]
MaxQueue = Annotated[
    int,
    _option("--max-queue", "--max-num-queued-reqs", help="Waiting requests; above it: 429."),
]
KVMemory = Annotated[
    int | None,
    _size_option(
        "--kv-memory",
        "--kv-cache-memory-bytes",
        help="Memory of the KV pool, such as 1GiB or 512M.",
        panel=_PANEL,
        shown_default=f"{show_byte_size(DEFAULT_KV_MEMORY)} on a CPU, all that is left on a GPU",
    ),
]
GPUMemoryUtilization = Annotated[
    float,
    typer.Option(
        "--gpu-memory-utilization",
        help="Share of a GPU's memory to fill: weights, steps, and the KV pool with what is left.",
        rich_help_panel=_PANEL,
    ),
]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep the KV of earlier prompts and outputs; what begins alike is not computed again.",
        rich_help_panel=_PANEL,
    ),
]
KVHostMemory = Annotated[
    int,
    _size_option(
        "--kv-host-memory",
        help="Host memory for cached KV that the pool has no room for, such as 4GiB; 0: none.",
        panel=_PANEL,
        shown_default="0",
    ),
]
Scheduling = Annotated[
    Literal["fcfs", "priority", "prefix"],
    typer.Option(
        "--scheduling-policy",
        help="Who runs next. fcfs: first come. priority: lowest priority of a request first, then "
        "first come. prefix: longest cached prefix first, while nobody waits too long.",
        rich_help_panel=_PANEL,
    ),
]
Batching = Annotated[
    Literal["continuous", "static"],
    typer.Option(
        "--batching",
        help="static: a batch starts and ends as one; a baseline for benchmarks.",
        rich_help_panel=_PANEL,
    ),
]
MaxStall = Annotated[
    float,
    _option(
        "--max-stall",
        help="While streams run, decode steps that a step with prefill may take; 0: any number.",
    ),
]
PageSize = Annotated[
    int | None,
    typer.Option(
        "--page-size",
        "--block-size",
        help="Tokens of a KV page.",
        show_default="64 on Hopper GPUs, else 16",
        rich_help_panel=_PANEL,
    ),
]
Speculative = Annotated[
    SpeculativeConfig | None,
    typer.Option(
        "--speculative-config",
        parser=SpeculativeConfig.parse,
        metavar="JSON",
        help="Draft tokens and verify several at once; outputs stay the same. Such as "
        '\'{"method": "ngram", "num_speculative_tokens": 8}\', or '
        '\'{"method": "eagle3", "model": "FOLDER"}\'. Methods: ' + ", ".join(METHODS) + ".",
        show_default="off",
        rich_help_panel=_PANEL,
    ),
]
SpeculativeAudit = Annotated[
    float,
    typer.Option(
        "--speculative-audit",
        metavar="SHARE",
        help="Of the steps in which drafts held, the share to decode once more without drafts and "
        "compare; /metrics counts the tokens and the mismatches. Such as 0.01; 0: none.",
        rich_help_panel=_PANEL,
    ),
]
Seed = Annotated[int, _option("--seed", help="Root of the draws of requests without a seed.")]
ModelFile = Annotated[
    Path | None,
    typer.Option(
        "--model-file",
        exists=True,
        dir_okay=False,
        help="Python file that ends in MODEL, used instead of the built-in family.",
        rich_help_panel=_PANEL,
    ),
]
ChatTemplateFile = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        exists=True,
        dir_okay=False,
        help="Jinja file used instead of the model's own chat template.",
        rich_help_panel=_PANEL,
    ),
]
BodySize = Annotated[
    int,
    _size_option(
        "--max-body-size",
        help="Largest request body; above it: 413.",
        panel="Server",
        shown_default=show_byte_size(DEFAULT_BODY_SIZE),
    ),
]

DEFAULT_MODEL = "smollm2"
DEFAULTS = EngineConfig()


@dataclass(frozen=True)
class EngineOptions:
    """What to load and how to run it."""

    model: str
    config: EngineConfig
    model_file: Path | None = None
    chat_template: Path | None = None
    quantization: str | None = None
    threads: int | None = None


def engine_config(given: Mapping[str, Any]) -> EngineConfig:
    """The settings among a command's parameters, which have the names of EngineConfig's fields."""
    names = [field.name for field in fields(EngineConfig)]
    return EngineConfig(**{name: given[name] for name in names if name in given})
