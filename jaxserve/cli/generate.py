"""`jaxserve generate`: complete prompts on the command line, without a server."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve.cli import engine_options as opt
from jaxserve.cli import sampling_options as sampling
from jaxserve.cli.terminal import say, with_clear_errors
from jaxserve.config import EngineConfig
from jaxserve.loading import hub
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.cli.engine_start import StartedEngine

Prompts = Annotated[
    list[str],
    typer.Argument(metavar="PROMPT...", help="Texts to continue; - reads one from stdin."),
]
RequiredModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="A pulled model's name, a .gguf file or a folder.")
]


def register(app: typer.Typer) -> None:
    """Add the command `generate`."""
    app.command("generate")(with_clear_errors(generate_command))


def generate_command(
    model: RequiredModel,
    prompts: Prompts,
    max_tokens: sampling.MaxTokens = 128,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    repetition_penalty: sampling.RepetitionPenalty = None,
    sampling_seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    dtype: opt.Dtype = opt.DEFAULTS.dtype,
    quantization: opt.Quantization = None,
    threads: opt.Threads = None,
    max_model_len: opt.MaxModelLen = None,
    kv_memory: opt.KVMemory = opt.DEFAULTS.kv_memory,
    kv_cache_dtype: opt.KVCacheDtype = "auto",
    attention_backend: opt.AttentionBackend = opt.DEFAULTS.attention_backend,
    model_file: opt.ModelFile = None,
) -> None:
    """Continue each PROMPT and print the text as it comes (no chat template).

    Several prompts run as one batch; their outputs are printed one after the other, each after
    its prompt.
    """
    config = EngineConfig(
        dtype=dtype,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        kv_cache_dtype=kv_cache_dtype,
        attention_backend=attention_backend,
    )
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": sampling_seed,
        "stop": stop,
    }
    sampling.make_params({}, given)  # what is mistyped is told before a model is loaded
    hub.resolve(model)
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]

    from jaxserve.cli.engine_start import start_engine

    options = opt.EngineOptions(
        model, config, model_file, quantization=quantization, threads=threads
    )
    started = start_engine(options, say)
    try:
        params = sampling.make_params(started.model.sampling_defaults, given)
        _print_outputs(started, texts, params)
    finally:
        started.client.shutdown()


def _print_outputs(started: "StartedEngine", texts: list[str], params: SamplingParams) -> None:
    """Run all, and print one after the other what comes."""
    from jaxserve.cli.text_run import TextRun

    tokenizer = started.model.tokenizer
    runs = [TextRun(started.client, tokenizer.encode(text), params) for text in texts]
    for text, run in zip(texts, runs, strict=True):
        if len(texts) > 1:
            typer.echo(text, nl=False)
        for piece in run:
            typer.echo(piece, nl=False)
        typer.echo()
