"""Beam search: the outputs with the highest probability, searched for in parallel.

Each round extends every beam by its most likely next tokens (twice as many as there are beams),
and keeps the `beam_width` likeliest of all that did not end. One that ends, with an EOS id, is put
aside. Sequences are compared by

    score = sum of the tokens' log-probabilities / (number of output tokens ** length_penalty)

with the EOS counted, as transformers does; above 0 the penalty favours longer outputs. (vLLM
divides by the length of prompt and output together, so its scores of long prompts differ less.)
The search ends after max_tokens, or as soon as nothing that is still growing can get a better
score than the `beam_width` best that have ended: never for another reason, so the result is that
of the whole search (transformers' early_stopping="never").

A round is one request of one token per beam. Beams share their pages through the prefix cache:
only the newest token of each is computed, and what they have in common is kept once. With the
cache off the result is the same, and every round computes the whole of every beam.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

from jaxserve.engine.outputs import Logprob
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams, is_int

Candidates = dict[int, Logprob]


@dataclass(frozen=True)
class BeamSearchParams:
    """Names of vLLM. temperature is 0: nothing is drawn. ignore_eos: EOS is a token like others.

    Raises InvalidRequestError naming the field that is out of range.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        widest = MAX_LOGPROBS // 2
        if not is_int(self.beam_width) or not 1 <= self.beam_width <= widest:
            raise InvalidRequestError(
                f"beam_width is {str(self.beam_width)[:40]}; give a number from 1 to {widest}",
                "beam_width",
            )
        if self.temperature != 0:
            raise InvalidRequestError(
                f"temperature is {str(self.temperature)[:40]}; beam search draws nothing: leave "
                "it at 0, or use generate with n",
                "temperature",
            )
        penalty = self.length_penalty
        if (
            isinstance(penalty, bool)
            or not isinstance(penalty, int | float)
            or not (-10 <= penalty <= 10)
        ):
            raise InvalidRequestError(
                f"length_penalty is {str(penalty)[:40]}; give a number from -10 to 10",
                "length_penalty",
            )
        SamplingParams(max_tokens=self.max_tokens)  # checks it

    def one_step(self) -> SamplingParams:
        """Of the request that finds the next tokens of a beam."""
        return SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=2 * self.beam_width, ignore_eos=True
        )


@dataclass(frozen=True)
class BeamSearchSequence:
    """One result. tokens and text are those of prompt and output, as in vLLM; logprobs has an
    entry per output token. finish_reason: "stop" (the last token is an EOS), "length", "error"."""

    tokens: list[int]
    logprobs: list[Candidates]
    cum_logprob: float = 0.0
    score: float = 0.0
    text: str = ""
    finish_reason: str | None = None


@dataclass(frozen=True)
class BeamSearchOutput:
    """Of one prompt: at most beam_width sequences, the best one first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class _Beam:
    output: tuple[int, ...] = ()
    logprobs: tuple[Candidates, ...] = field(default=(), repr=False)
    cum_logprob: float = 0.0
    finish_reason: str | None = None


class BeamSearch:
    """The search of one prompt. Until `done`: compute the next tokens of every one of `prompts`,
    and `advance`."""

    def __init__(
        self, prompt: Sequence[int], params: BeamSearchParams, eos_token_ids: Iterable[int]
    ) -> None:
        self.prompt = tuple(prompt)
        self.params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._live = [_Beam()]
        self._ended: list[_Beam] = []

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The tokens of every beam that still grows, the prompt included."""
        return [self.prompt + beam.output for beam in self._live]

    @property
    def done(self) -> bool:
        if not self._live or len(self._live[0].output) == self.params.max_tokens:
            return True
        if len(self._ended) < self.params.beam_width:
            return False
        return max(map(self._best_to_come, self._live)) <= min(map(self.score, self._ended))

    def advance(self, candidates: Sequence[Candidates | None]) -> None:
        """Take the most likely next tokens of each beam, in order; None: it failed."""
        grown: list[_Beam] = []
        for beam, entries in zip(self._live, candidates, strict=True):
            if entries is None:
                self._ended.append(_Beam(beam.output, beam.logprobs, float("-inf"), "error"))
                continue
            for token, entry in entries.items():
                ends = token in self._eos
                longer = _Beam(
                    (*beam.output, token),
                    (*beam.logprobs, entries),
                    beam.cum_logprob + entry.logprob,
                    "stop" if ends else None,
                )
                (self._ended if ends else grown).append(longer)
        width = self.params.beam_width  # of equals, nlargest takes the first
        self._live = nlargest(width, grown, key=lambda beam: beam.cum_logprob)
        self._ended = nlargest(width, self._ended, key=self.score)

    def score(self, beam: _Beam) -> float:
        length = max(len(beam.output), 1)
        return beam.cum_logprob / length**self.params.length_penalty

    def _best_to_come(self, beam: _Beam) -> float:
        """No sequence that begins with this beam has a higher score: what is added lowers the sum,
        and only the length can make up for it."""
        shortest, longest = len(beam.output) + 1, self.params.max_tokens
        length = longest if self.params.length_penalty > 0 else shortest
        return beam.cum_logprob / length**self.params.length_penalty

    def results(self) -> list[BeamSearchSequence]:
        """The best sequences, ended or as far as they came; without text."""
        best = nlargest(self.params.beam_width, self._ended + self._live, key=self.score)
        return [
            BeamSearchSequence(
                [*self.prompt, *beam.output],
                list(beam.logprobs),
                beam.cum_logprob,
                self.score(beam),
                finish_reason=beam.finish_reason or "length",
            )
            for beam in best
        ]
