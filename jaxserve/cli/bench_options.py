"""The options of `jaxserve bench`, with the names of `vllm bench`: one line each in a command."""

from pathlib import Path
from typing import Annotated

import typer

_LOAD, _PROMPTS, _SAMPLING, _REPORT = "Load", "Prompts", "Sampling", "Report"


def _option(*names: str, help: str, panel: str | None = None) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel=panel)


BaseUrl = Annotated[
    str | None, _option("--base-url", help="Server address; overrides --host and --port.")
]
Host = Annotated[str, _option("--host", help="Server host.")]
Port = Annotated[int, _option("--port", help="Server port.")]
Endpoint = Annotated[
    str, _option("--endpoint", help="/v1/completions, or /v1/chat/completions for chat.")
]
ServedModel = Annotated[
    str | None, _option("--model", help="Model name to ask for; default: the first one served.")
]
LocalModel = Annotated[str, _option("--model", help="A pulled model, or a path.")]

RequestRate = Annotated[
    float, _option("--request-rate", help="Requests per second; inf: all at once.", panel=_LOAD)
]
Burstiness = Annotated[
    float,
    _option("--burstiness", help="1: Poisson arrivals; less: bursts; more: even.", panel=_LOAD),
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Requests in flight at once; 1: one by one.", rich_help_panel=_LOAD),
]
RampUp = Annotated[
    str | None,
    _option("--ramp-up-strategy", help="linear or exponential change of the rate.", panel=_LOAD),
]
RampStart = Annotated[
    float | None, _option("--ramp-up-start-rps", help="Requests/s at the start.", panel=_LOAD)
]
RampEnd = Annotated[
    float | None, _option("--ramp-up-end-rps", help="Requests/s at the end.", panel=_LOAD)
]
NumWarmups = Annotated[
    int, typer.Option(min=0, help="Requests sent before, not counted.", rich_help_panel=_LOAD)
]
CompareSequential = Annotated[
    bool,
    _option(
        "--compare-sequential",
        help="Then send as many requests one after another and print the speedup.",
        panel=_LOAD,
    ),
]

DatasetName = Annotated[
    str, _option("--dataset-name", help="random, or sharegpt (a file).", panel=_PROMPTS)
]
DatasetPath = Annotated[
    Path | None,
    _option(
        "--dataset-path",
        help='JSON lines with "prompt", "messages" or ShareGPT\'s "conversations".',
        panel=_PROMPTS,
    ),
]
NumPrompts = Annotated[
    int, typer.Option(min=1, help="How many requests.", rich_help_panel=_PROMPTS)
]
InputLen = Annotated[
    int,
    typer.Option(
        "--random-input-len",
        "--input-len",
        min=1,
        help="Tokens of a random prompt.",
        rich_help_panel=_PROMPTS,
    ),
]
OutputLen = Annotated[
    int | None,
    typer.Option(
        "--random-output-len",
        "--output-len",
        min=1,
        help="Tokens to generate; default 128, or the file's max_tokens.",
        rich_help_panel=_PROMPTS,
    ),
]
RangeRatio = Annotated[
    float,
    typer.Option(
        "--random-range-ratio",
        min=0.0,
        max=1.0,
        help="Spread of both lengths: 0.2 draws from 80 % to 120 %.",
        rich_help_panel=_PROMPTS,
    ),
]
VocabSize = Annotated[
    int,
    typer.Option(
        "--random-vocab-size",
        min=2,
        help="Random token ids stay below this; lower it for a smaller vocabulary.",
        rich_help_panel=_PROMPTS,
    ),
]
Seed = Annotated[
    int, _option("--seed", help="Of the prompts and the arrival times.", panel=_PROMPTS)
]

Temperature = Annotated[float, _option("--temperature", help="0: greedy.", panel=_SAMPLING)]
TopP = Annotated[float | None, _option("--top-p", help="Nucleus.", panel=_SAMPLING)]
TopK = Annotated[int | None, _option("--top-k", help="Most likely tokens.", panel=_SAMPLING)]
MinP = Annotated[float | None, _option("--min-p", help="Share of the best.", panel=_SAMPLING)]
RepetitionPenalty = Annotated[
    float | None, _option("--repetition-penalty", help="1: off.", panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float | None, _option("--presence-penalty", help="0: off.", panel=_SAMPLING)
]
FrequencyPenalty = Annotated[
    float | None, _option("--frequency-penalty", help="0: off.", panel=_SAMPLING)
]
IgnoreEos = Annotated[
    bool, _option("--ignore-eos", help="Always generate the full length.", panel=_SAMPLING)
]

Goodput = Annotated[
    list[str] | None,
    _option("--goodput", help="Limits in ms, such as: ttft:200 tpot:50.", panel=_REPORT),
]
MoreGoodput = Annotated[
    list[str] | None, typer.Argument(metavar="[LIMIT]", help="More limits of --goodput.")
]
PercentileMetrics = Annotated[
    str, _option("--percentile-metrics", help="Of ttft,tpot,itl,e2el.", panel=_REPORT)
]
MetricPercentiles = Annotated[
    str, _option("--metric-percentiles", help="Such as 50,90,99.", panel=_REPORT)
]
SaveResult = Annotated[
    bool, _option("--save-result", help="Write the report as JSON.", panel=_REPORT)
]
ResultDir = Annotated[Path, _option("--result-dir", help="Folder for it.", panel=_REPORT)]
ResultFilename = Annotated[
    str | None, _option("--result-filename", help="Name of the file.", panel=_REPORT)
]
OutputJson = Annotated[
    Path | None, _option("--output-json", help="Write the report to this file.", panel=_REPORT)
]

MaxNumSeqs = Annotated[
    int | None,
    _option("--max-batch-rows", "--max-num-seqs", help="Requests the engine runs at once."),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts in the batch.")]
WarmupIterations = Annotated[int, _option("--num-iters-warmup", help="Batches not counted.")]
Iterations = Annotated[int, typer.Option("--num-iters", min=1, help="Batches timed.")]
