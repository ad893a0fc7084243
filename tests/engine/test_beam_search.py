"""Beam search: against all sequences there are, and over the pages of a real engine."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from jaxserve.engine.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence
from jaxserve.engine.outputs import Logprob, StepStats
from jaxserve.errors import InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from tests.support.byte_model import EOS as BYTE_EOS
from tests.support.tiny_engine import AMPLE, SMALL, random_prompts, tiny_model

EOS = 2
VOCAB = 3
LONGEST = 4
PROMPT = (0, 1)
SALTS = itertools.count()


def log_probabilities(tokens: Sequence[int]) -> list[float]:
    """A model: of the next token after these, any numbers that are the same every time."""
    weights = [random.Random(f"{tokens} {token}").uniform(0.05, 1) ** 2 for token in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def next_tokens(tokens: Sequence[int], most: int) -> dict[int, Logprob]:
    """The most likely ones, as an engine gives them."""
    found = log_probabilities(tokens)
    order = sorted(range(VOCAB), key=lambda token: -found[token])[:most]
    return {token: Logprob(found[token], rank, "") for rank, token in enumerate(order, 1)}


def search(params: BeamSearchParams, prompt: Sequence[int] = PROMPT) -> list[BeamSearchSequence]:
    beams = BeamSearch(prompt, params, [EOS])
    while not beams.done:
        beams.advance([next_tokens(tokens, 2 * params.beam_width) for tokens in beams.prompts])
    return beams.results()


def all_sequences(params: BeamSearchParams) -> list[tuple[float, list[int]]]:
    """Every output there is, with its score, the best one first."""
    scored = []
    for length in range(1, params.max_tokens + 1):
        for output in itertools.product(range(VOCAB), repeat=length):
            ended = [token == EOS and not params.ignore_eos for token in output]
            if any(ended[:-1]) or (length < params.max_tokens and not ended[-1]):
                continue
            total = sum(
                log_probabilities((*PROMPT, *output[:at]))[token] for at, token in enumerate(output)
            )
            scored.append((total / length**params.length_penalty, [*PROMPT, *output]))
    return sorted(scored, reverse=True)


@pytest.mark.parametrize("penalty", [-1.5, 0.0, 0.6, 1.0, 3.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_wide_search_finds_the_best_of_all_sequences(penalty: float, ignore_eos: bool) -> None:
    """Ten beams hold everything that three tokens can begin, so nothing is lost on the way."""
    longest = 3 if ignore_eos else LONGEST
    params = BeamSearchParams(10, longest, ignore_eos, length_penalty=penalty)
    found, every = search(params), all_sequences(params)
    assert [one.tokens for one in found] == [tokens for _, tokens in every[: len(found)]]
    assert len(found) == min(10, len(every))
    for one, (score, tokens) in zip(found, every, strict=False):
        assert one.score == pytest.approx(score, rel=1e-12)
        assert len(one.logprobs) == len(tokens) - len(PROMPT)
        ended = tokens[-1] == EOS and not ignore_eos
        assert one.finish_reason == ("stop" if ended else "length")


def narrow_by_hand(width: int, longest: int) -> list[list[int]]:
    """Beam search as in a textbook, to the last token, without an early end."""
    live: list[tuple[float, list[int]]] = [(0.0, list(PROMPT))]
    ended: list[tuple[float, list[int]]] = []
    for _ in range(longest):
        grown = []
        for total, tokens in live:
            for token, logprob in enumerate(log_probabilities(tuple(tokens))):
                grown.append((total + logprob, [*tokens, token]))
        ended += [one for one in grown if one[1][-1] == EOS]
        live = sorted((one for one in grown if one[1][-1] != EOS), reverse=True)[:width]
    scored = [(total / (len(tokens) - len(PROMPT)), tokens) for total, tokens in ended + live]
    return [tokens for _, tokens in sorted(scored, reverse=True)[:width]]


@pytest.mark.parametrize("width", [2, 3, 4])
def test_a_narrow_search_is_that_of_a_textbook_and_ends_as_early_as_it_may(width: int) -> None:
    params = BeamSearchParams(width, 12)
    assert [one.tokens for one in search(params)] == narrow_by_hand(width, 12)
    beams = BeamSearch(PROMPT, params, [EOS])
    rounds = 0
    while not beams.done:
        beams.advance([next_tokens(tokens, 2 * width) for tokens in beams.prompts])
        rounds += 1
    assert rounds <= 12


def test_an_early_end_loses_nothing() -> None:
    """Fifty more tokens of probability 1 could make up for one unlikely token, not for two."""
    sure = {EOS: Logprob(-0.2, 1, ""), 0: Logprob(-6.0, 2, "")}
    beams = BeamSearch(PROMPT, BeamSearchParams(1, 50), [EOS])
    beams.advance([sure])
    assert not beams.done
    beams.advance([sure])
    assert beams.done
    strict = BeamSearch(PROMPT, BeamSearchParams(1, 50, length_penalty=0.0), [EOS])
    strict.advance([sure])
    assert strict.done
    assert strict.results()[0].tokens == [*PROMPT, EOS]


def test_a_beam_whose_request_fails_is_told_and_the_others_go_on() -> None:
    beams = BeamSearch(PROMPT, BeamSearchParams(2, 2), [EOS])
    beams.advance([next_tokens(PROMPT, 4)])
    beams.advance([next_tokens(beams.prompts[0], 4), None][: len(beams.prompts)])
    assert beams.done
    assert "error" not in {one.finish_reason for one in beams.results()[:1]}
    lost = BeamSearch(PROMPT, BeamSearchParams(2, 2), [EOS])
    lost.advance([None])
    assert lost.done
    assert [one.finish_reason for one in lost.results()] == ["error"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 11}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
    ],
)
def test_settings_out_of_range(settings: dict, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | settings)
    assert caught.value.param == field


# ---------------------------------------------------------------------- over a real engine


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_model(scale=4.0), **{**SMALL, "num_pages": AMPLE}) as llm:
        yield llm


def by_generate(llm: LLM, prompt: list[int], params: BeamSearchParams) -> list[list[int]]:
    """The same search, each step a request of its own that shares nothing."""
    beams = BeamSearch(prompt, params, [BYTE_EOS])
    step = params.one_step()
    while not beams.done:
        outputs = [
            llm.generate(
                {"prompt_token_ids": list(tokens), "cache_salt": f"{next(SALTS)}"},
                step,
                use_tqdm=False,
            )
            for tokens in beams.prompts
        ]
        beams.advance([output.outputs[0].logprobs[0] for (output,) in outputs])
    return [one.tokens for one in beams.results()]


def test_beams_share_their_pages_and_change_nothing(llm: LLM) -> None:
    prompts = random_prompts(2, (41, 60), seed=2)
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.8)
    expected = [by_generate(llm, prompt, params) for prompt in prompts]
    stats: list[StepStats] = []
    llm.client._engine.observe(stats.append)  # type: ignore[attr-defined]
    found = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [[one.tokens for one in output.sequences] for output in found] == expected
    beams = 1 + 3 * 7
    computed = sum(step.step_tokens for step in stats)
    known = sum(map(len, prompts))
    assert known <= computed <= known + 2 * beams * 3, "beams were computed again"
    best = found[0].sequences[0]
    assert best.text == llm.get_tokenizer().decode(best.tokens)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (alone,) = llm.beam_search({"prompt_token_ids": prompts[0]}, BeamSearchParams(1, 8))
    (output,) = llm.generate({"prompt_token_ids": prompts[0]}, greedy, use_tqdm=False)
    assert alone.sequences[0].tokens == prompts[0] + output.outputs[0].token_ids


def test_prompts_that_cannot_be_searched_are_refused_first(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt 1: the prompt has 100 tokens"):
        llm.beam_search(
            [{"prompt_token_ids": [1]}, {"prompt_token_ids": [1] * 100}], BeamSearchParams(2, 100)
        )
