"""`jaxserve batch`: a file of requests in OpenAI's batch format, answered line by line."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import engine_options as opt
from jaxserve.cli.terminal import say, set_up_logging, with_clear_errors
from jaxserve.config import EngineConfig
from jaxserve.loading import hub

if TYPE_CHECKING:
    from jaxserve.batch.input_file import InputFile
    from jaxserve.batch.results_file import ResultsFile
    from jaxserve.cli.engine_start import StartedEngine

# Choices read ahead and open at once: enough for every row to find its next request waiting.
LOOK_AHEAD_ROWS = 4
MIN_LOOK_AHEAD = 64

Input = Annotated[
    Path,
    typer.Argument(metavar="INPUT", exists=True, dir_okay=False, help="A line per request."),
]
Output = Annotated[
    Path, typer.Argument(metavar="OUTPUT", dir_okay=False, help="Gets a line per result.")
]
ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="A pulled model's name, a .gguf file or a folder.")
]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(help="Name that lines may give as model; may be repeated. Default: --model."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Empty OUTPUT first, whatever it holds.")
]


def register(app: typer.Typer) -> None:
    """Add the command `batch`."""
    app.command("batch")(with_clear_errors(batch_command))


def batch_command(
    input_file: Input,
    output_file: Output,
    model: ModelOption = opt.DEFAULT_MODEL,
    served_model_name: ServedModelName = None,
    overwrite: Overwrite = False,
    dtype: opt.Dtype = opt.DEFAULTS.dtype,
    quantization: opt.Quantization = None,
    threads: opt.Threads = None,
    max_model_len: opt.MaxModelLen = None,
    max_batch_rows: opt.MaxBatchRows = opt.DEFAULTS.max_batch_rows,
    max_batch_tokens: opt.MaxBatchTokens = opt.DEFAULTS.max_batch_tokens,
    kv_memory: opt.KVMemory = opt.DEFAULTS.kv_memory,
    gpu_memory_utilization: opt.GPUMemoryUtilization = opt.DEFAULTS.gpu_memory_utilization,
    kv_cache_dtype: opt.KVCacheDtype = "auto",
    attention_backend: opt.AttentionBackend = opt.DEFAULTS.attention_backend,
    kv_host_memory: opt.KVHostMemory = opt.DEFAULTS.kv_host_memory,
    prefix_cache: opt.PrefixCache = opt.DEFAULTS.prefix_cache,
    scheduling: opt.Scheduling = "priority",
    batching: opt.Batching = "continuous",
    page_size: opt.PageSize = opt.DEFAULTS.page_size,
    speculative: opt.Speculative = None,
    speculative_audit: opt.SpeculativeAudit = opt.DEFAULTS.speculative_audit,
    seed: opt.Seed = opt.DEFAULTS.seed,
    model_file: opt.ModelFile = None,
    chat_template: opt.ChatTemplateFile = None,
) -> None:
    """Answer every line of INPUT, and append its result to OUTPUT as soon as it is there.

    Both have OpenAI's batch format. The same command again goes on where the last run stopped,
    however it ended. Exit status: 0 all lines are answered, 1 some failed (their results say
    why) or the run could not go on, 2 wrong usage, 130 stopped by Ctrl-C.
    """
    config = opt.engine_config(locals() | {"max_stall": 0})  # nobody waits for single tokens
    set_up_logging()
    hub.resolve(model)
    options = opt.EngineOptions(model, config, model_file, chat_template, quantization, threads)
    from jaxserve.batch.errors import BatchFileError
    from jaxserve.batch.input_file import InputFile
    from jaxserve.batch.results_file import ResultsFile

    try:
        source = InputFile(input_file)
        results = ResultsFile(output_file, source, overwrite=overwrite)
    except BatchFileError as error:
        say(f"error: {error}")
        raise typer.Exit(2) from None
    with _terminable():
        _answer(source, results, options, tuple(served_model_name or (model,)))
    _report(source, results)


def _answer(
    source: "InputFile", results: "ResultsFile", options: opt.EngineOptions, names: tuple[str, ...]
) -> None:
    """Fill `results`, and close them."""
    from jaxserve.batch.errors import BatchFileError

    left = source.num_requests - results.num_done
    if results.num_done:
        say(f"{results.path} has {results.num_done} results; {left} lines are left")
    try:
        with results:
            if left:
                started = _start(options)
                try:
                    _run(source, results, started, names, options.config)
                finally:
                    started.client.shutdown()
    except BatchFileError as error:
        say(f"error: {error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        say(
            f"stopped: {results.path} has {results.num_done} of {source.num_requests} results; "
            "the same command again goes on from here"
        )
        raise


def _start(options: opt.EngineOptions) -> "StartedEngine":
    from jaxserve.cli.engine_start import start_engine

    try:
        return start_engine(options, say)
    except KeyboardInterrupt:
        say("stopped while loading; nothing was asked yet")
        sys.stderr.flush()
        os._exit(130)  # XLA may be compiling on another thread, and cannot be interrupted


def _run(
    source: "InputFile",
    results: "ResultsFile",
    started: "StartedEngine",
    names: tuple[str, ...],
    config: EngineConfig,
) -> None:
    from jaxserve.batch.line_job import LineReader
    from jaxserve.batch.run import run_batch, start_progress
    from jaxserve.engine.batch_display import batch_display

    reader = LineReader(started.client, started.model, names, config.seed)
    progress = start_progress(source, results)
    with batch_display("lines", progress) as tell:
        run_batch(
            source,
            results,
            reader,
            max_open=max(LOOK_AHEAD_ROWS * config.max_batch_rows, MIN_LOOK_AHEAD),
            progress=progress,
            tell=tell,
        )


def _report(source: "InputFile", results: "ResultsFile") -> None:
    answered = results.num_done - results.num_failed
    say(
        f"{answered} of {source.num_requests} lines answered, {results.num_failed} failed; "
        f"the results are in {results.path}"
    )
    if answered < source.num_requests:
        raise typer.Exit(1)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
