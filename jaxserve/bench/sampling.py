"""How a benchmark's tokens are drawn. Every report states it: speed without it says little."""

from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class BenchSampling:
    """Sampling settings of all requests; None means that the field is not sent."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self.params(max_tokens=1)  # raises InvalidRequestError for values out of range

    def fields(self) -> dict[str, Any]:
        """As fields of a request's JSON body; ignore_eos only when set: not every server has it."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if not self.ignore_eos:
            del given["ignore_eos"]
        return given

    def params(self, max_tokens: int) -> SamplingParams:
        """For the Python API."""
        return SamplingParams(max_tokens=max_tokens, **self.fields())

    def describe(self) -> str:
        kind = "greedy" if self.temperature == 0 else "random"
        given = ", ".join(f"{name} {value}" for name, value in self.fields().items())
        return f"{kind} ({given}{'' if self.ignore_eos else ', stops at EOS'})"
