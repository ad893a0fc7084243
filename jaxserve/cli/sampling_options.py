"""The sampling options of `chat` and `generate`; what is left out comes from the model."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from jaxserve.sampling_params import SamplingParams

_PANEL = "Sampling"


def _option(*names: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(*names, help=help, rich_help_panel=_PANEL)


MaxTokens = Annotated[
    int | None,
    _option("--max-tokens", help="Longest output; without a number, to the end of the context."),
]
Temperature = Annotated[float | None, _option("--temperature", help="0: greedy.")]
TopP = Annotated[float | None, _option("--top-p", help="Keep the likeliest that sum to this.")]
TopK = Annotated[int | None, _option("--top-k", help="Keep this many likeliest; 0: all.")]
MinP = Annotated[
    float | None, _option("--min-p", help="Drop what is below this share of the best.")
]
RepetitionPenalty = Annotated[float | None, _option("--repetition-penalty", help="1: off.")]
Seed = Annotated[
    int | None, _option("--sampling-seed", help="The same seed gives the same output again.")
]
Stop = Annotated[list[str] | None, _option("--stop", help="End before this text; repeatable.")]


def make_params(defaults: Mapping[str, float | int], given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from the options given, over the model's defaults.

    Raises InvalidRequestError naming the value that is out of range.
    """
    values: dict[str, Any] = {**defaults, "max_tokens": None}
    values.update((name, value) for name, value in given.items() if value is not None)
    return SamplingParams(**values)
