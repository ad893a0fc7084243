"""`jaxserve eval`: perplexity on a text file, and what packing or rounding changed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import engine_options as opt
from jaxserve.cli.terminal import say, with_clear_errors
from jaxserve.config import EngineConfig
from jaxserve.loading import hub

if TYPE_CHECKING:  # the real imports are in the command: `jaxserve --help` stays quick
    from jaxserve.loading.loaded_model import LoadedModel

_PANEL = "Evaluation"
FLOAT32 = "float32"  # --against: the same checkpoint, every weight a plain number

RequiredModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="A pulled model's name, a .gguf file or a folder.")
]
Text = Annotated[Path, typer.Option("--text", help="UTF-8 file to score.", rich_help_panel=_PANEL)]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        help="Also compare with this: float32 (the same checkpoint, expanded), or another model "
        "with the same tokenizer.",
        rich_help_panel=_PANEL,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=2, help="Score the text's first tokens only.", rich_help_panel=_PANEL),
]
Context = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of a window.", show_default="1024", rich_help_panel=_PANEL),
]
Stride = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens from window to window; each scores what the ones before did not.",
        show_default="half the context",
        rich_help_panel=_PANEL,
    ),
]
OutputJson = Annotated[
    Path | None, typer.Option("--json", help="Write the report here too.", rich_help_panel=_PANEL)
]


def register(app: typer.Typer) -> None:
    """Add the command `eval`."""
    app.command("eval")(with_clear_errors(eval_command))


def eval_command(
    model: RequiredModel,
    text: Text,
    against: Against = None,
    max_tokens: MaxTokens = None,
    context: Context = None,
    stride: Stride = None,
    output_json: OutputJson = None,
    dtype: opt.Dtype = opt.DEFAULTS.dtype,
    kv_cache_dtype: opt.KVCacheDtype = "auto",
    quantization: opt.Quantization = None,
    attention_backend: opt.AttentionBackend = opt.DEFAULTS.attention_backend,
    max_batch_tokens: opt.MaxBatchTokens = opt.DEFAULTS.max_batch_tokens,
    model_file: opt.ModelFile = None,
) -> None:
    """Print the perplexity of MODEL on a text, run through the engine's own steps.

    With --against float32 also the KL divergence from the unpacked model, and how often both
    choose the same word: what a packed format, a smaller type or an 8-bit cache costs.
    """
    from jaxserve.bench.report import save_json
    from jaxserve.eval.evaluation import read_text
    from jaxserve.eval.report import report_text

    config = EngineConfig(
        dtype=dtype,
        max_batch_tokens=max_batch_tokens,
        attention_backend=attention_backend,
        kv_cache_dtype=kv_cache_dtype,
    )
    options = opt.EngineOptions(model, config, model_file, quantization=quantization)
    contents = read_text(text)
    for name in {model, against or model} - {FLOAT32}:
        hub.resolve(name)
    report = {"model": model, "text": str(text)} | ({"against": against} if against else {})
    report |= _evaluate(
        options,
        contents,
        against,
        max_tokens=max_tokens,
        context=context,
        stride=stride,
    )
    typer.echo(report_text(report))
    if output_json is not None:
        save_json(report, output_json)
        say(f"written to {output_json}")


def _evaluate(
    options: opt.EngineOptions,
    contents: str,
    against: str | None,
    *,
    max_tokens: int | None,
    context: int | None,
    stride: int | None,
) -> dict[str, Any]:
    from jaxserve.bench.progress import progress_bar
    from jaxserve.core.compile_cache import use_compile_cache
    from jaxserve.eval.evaluation import context_and_stride, evaluate, tokenize
    from jaxserve.eval.peak_memory import peak_memory_bytes
    from jaxserve.loading.model_cache import home
    from jaxserve.loading.quantize_on_load import kept_layout

    use_compile_cache(home() / "compiled")
    config, quantization = options.config, options.quantization
    layout = kept_layout(config.attention_backend, quantization)
    served = _load(options.model, options, config.dtype, layout, quantization)
    context, stride = context_and_stride(served, context, stride)
    tokens = tokenize(contents, served, max_tokens)
    baseline = None
    if against is not None:
        name = options.model if against == FLOAT32 else against
        baseline = _load(name, options, "float32", None, None)
    report = evaluate(
        served, config, tokens,
        context=context, stride=stride, baseline=baseline, progress=progress_bar,
    )  # fmt: skip
    return report | {"peak_memory_bytes": peak_memory_bytes()}


def _load(
    name: str, options: opt.EngineOptions, dtype: str, layout: str | None, quantization: str | None
) -> "LoadedModel":
    from jaxserve.loading.load import load_model

    return load_model(
        name,
        dtype=dtype,
        model_file=str(options.model_file) if options.model_file else None,
        progress=say,
        weight_layout=layout,
        quantization=quantization,
    )
