"""`jaxserve audit-speculation`: is what speculation says what the model would have said?"""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import engine_options as opt
from jaxserve.cli.terminal import say, with_clear_errors
from jaxserve.errors import InvalidRequestError
from jaxserve.loading import hub
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculative_config import SpeculativeConfig

if TYPE_CHECKING:  # the real imports are in the command: `jaxserve --help` stays quick
    from jaxserve.eval.output_comparison import Generates, MakeLLM
    from jaxserve.eval.speculation_audit import Check

_PANEL = "Audit"
DEFAULT_SPECULATION = '{"method": "ngram", "adaptive": false}'

OptionalModel = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A pulled model's name, a .gguf file or a folder; none: the toy alone.",
    ),
]
Speculation = Annotated[
    str,
    typer.Option(
        "--speculative-config", help="What to audit on MODEL, as JSON.", rich_help_panel=_PANEL
    ),
]
Draws = Annotated[
    int, typer.Option(min=1000, help="Outputs of the toy for each test.", rich_help_panel=_PANEL)
]
Samples = Annotated[
    int,
    typer.Option(min=10, help="Outputs of MODEL for each prompt.", rich_help_panel=_PANEL),
]
Tokens = Annotated[
    int, typer.Option(min=1, max=64, help="Tokens of each output.", rich_help_panel=_PANEL)
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        help="Text to continue; repeatable.",
        show_default="three short ones",
        rich_help_panel=_PANEL,
    ),
]
Temperature = Annotated[float, typer.Option(help="Of MODEL's outputs.", rich_help_panel=_PANEL)]
OutputJson = Annotated[
    Path | None, typer.Option("--json", help="Write the report here too.", rich_help_panel=_PANEL)
]


def register(app: typer.Typer) -> None:
    """Add the command `audit-speculation`."""
    app.command("audit-speculation")(with_clear_errors(audit_command))


def audit_command(
    model: OptionalModel = None,
    speculative_config: Speculation = DEFAULT_SPECULATION,
    draws: Draws = 20_000,
    samples: Samples = 300,
    tokens: Tokens = 4,
    prompt: Prompts = None,
    temperature: Temperature = 1.0,
    output_json: OutputJson = None,
    dtype: opt.Dtype = opt.DEFAULTS.dtype,
    quantization: opt.Quantization = None,
    threads: opt.Threads = None,
) -> None:
    """Audit speculative decoding; exit code 1 if anything is not as without it.

    First on a toy of four words, all of whose outputs are listed: the probabilities that rounds of
    drafts give them must be the target's, exactly, and draws of the compiled step must follow them.
    Then, with MODEL, outputs with speculation and without are compared by a chi-square test.
    """
    from jaxserve.bench.report import save_json
    from jaxserve.core.compile_cache import use_compile_cache
    from jaxserve.core.threads import use_threads
    from jaxserve.eval.speculation_audit import exact_checks, sampled_checks
    from jaxserve.loading.model_cache import home

    SpeculativeConfig.parse(speculative_config)  # what is mistyped is told before anything runs
    params = SamplingParams(temperature=temperature, max_tokens=tokens)
    if model is not None:
        hub.resolve(model)
    use_threads(threads)
    use_compile_cache(home() / "compiled")
    checks = _print_checks("toy, exactly", exact_checks())
    checks += _print_checks(f"toy, {draws} outputs each", sampled_checks(draws))
    if model is not None:
        from jaxserve.eval.output_comparison import PROMPTS, compare_outputs

        options = {"dtype": dtype, "quantization": quantization}
        compared = compare_outputs(
            _maker(model, json.loads(speculative_config), options),
            prompt or PROMPTS,
            params,
            samples=samples,
            say=say,
        )
        checks += _print_checks(model, compared)
    if output_json is not None:
        save_json({"checks": [check._asdict() for check in checks]}, output_json)
        say(f"written to {output_json}")
    failed = [check.name for check in checks if not check.passed]
    if failed:
        raise InvalidRequestError(
            f"{len(failed)} of {len(checks)} checks failed ({failed[0]}); do not serve with this "
            "speculation"
        )


def _print_checks(title: str, checks: "list[Check]") -> "list[Check]":
    typer.echo(title)
    for check in checks:
        mark = "ok  " if check.passed else "FAIL"
        typer.echo(f"  {mark} {check.name:<42}{check.value:>12.3g}   (limit {check.limit:.3g})")
    return checks


def _maker(model: str, speculative_config: Any, options: dict[str, Any]) -> "MakeLLM":
    from jaxserve.llm import LLM

    def make(seed: int, speculate: bool) -> "AbstractContextManager[Generates]":
        extra = {"speculative_config": speculative_config} if speculate else {}
        return LLM(model, seed=seed, **options, **extra)

    return make
