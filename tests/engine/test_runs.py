"""Runs of the Python API: forked branches, saved requests and what may be asked of them when."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.engine.run import Run
from jaxserve.errors import EngineDeadError, InvalidRequestError, QueueFullError
from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from tests.support.tiny_engine import AMPLE, SMALL, random_prompts, tiny_model

WAIT = 60.0
PROMPTS = random_prompts(4, (10, 40), seed=5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=70, ignore_eos=True, seed=11)
PENALISED = SamplingParams(
    temperature=0.8,
    max_tokens=70,
    ignore_eos=True,
    seed=12,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
)
ALL = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}


def make_llm(**settings: Any) -> LLM:
    return LLM(tiny_model(), **{**SMALL, "num_pages": AMPLE, **settings})


class SlowSteps:
    """Steps that leave a test the time to do things meanwhile."""

    def __init__(self, llm: LLM) -> None:
        engine = llm.client._engine
        self.step, engine.step = engine.step, self

    def __call__(self) -> list:
        time.sleep(0.01)
        return self.step()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm(max_queue=12) as llm:
        SlowSteps(llm)
        yield llm


def prompt(ids: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": ids}


def whole(llm: LLM, ids: list[int], params: SamplingParams) -> list[int]:
    """What an uninterrupted request of its own draws."""
    (output,) = llm.generate([prompt(ids)], params, use_tqdm=False)
    return output.outputs[0].token_ids


def test_a_run_is_what_generate_gives(llm: LLM) -> None:
    expected = whole(llm, PROMPTS[0], SEEDED)
    run = llm.start(prompt(PROMPTS[0]), SEEDED)
    deltas = list(run)
    assert [token for delta in deltas for token in delta.token_ids] == expected
    assert run.wait(WAIT).token_ids == expected
    assert run.text == "".join(delta.text for delta in deltas)
    assert run.prompt_token_ids == tuple(PROMPTS[0])
    assert (run.finished, run.finish_reason, run.error) == (True, "length", None)
    assert run.num_inherited == 0
    assert list(run) == deltas, "an iteration begins with the first delta"


@pytest.mark.parametrize("params", ALL.values(), ids=ALL.keys())
def test_a_branch_is_an_independent_run(llm: LLM, params: SamplingParams) -> None:
    """Forked anywhere, it goes on as the whole request does."""
    expected = whole(llm, PROMPTS[1], params)
    run = llm.start(prompt(PROMPTS[1]), params).wait_for_tokens(9, WAIT)
    copy, early = run.fork(), run.fork(at=4)
    assert copy.token_ids[: copy.num_inherited] == expected[: copy.num_inherited]
    assert copy.num_inherited >= 9
    assert early.num_inherited == 4
    assert early.token_ids[:4] == expected[:4]
    for each in (run, copy, early):
        assert each.wait(WAIT).token_ids == expected
        assert each.finish_reason == "length"
    assert copy.text == early.text == run.text


def test_a_branch_with_another_seed_or_other_params(llm: LLM) -> None:
    """It equals a request whose prompt is prompt and output so far: draws depend on positions."""
    run = llm.start(prompt(PROMPTS[2]), SEEDED).wait_for_tokens(9, WAIT)
    other = run.fork(seed=99, at=6)
    greedy = run.fork(GREEDY, at=8)
    shorter = run.fork(SamplingParams(max_tokens=9, seed=99, ignore_eos=True), at=6)
    begun = PROMPTS[2] + run.token_ids
    for branch, params, at in ((other, SEEDED, 6), (greedy, GREEDY, 8)):
        alone = replace(params, max_tokens=70 - at, seed=99)
        assert branch.wait(WAIT).token_ids[:at] == run.token_ids[:at]
        assert branch.token_ids[at:] == whole(llm, begun[: len(PROMPTS[2]) + at], alone)
    assert other.token_ids != run.wait(WAIT).token_ids
    assert shorter.wait(WAIT).token_ids == other.token_ids[:9]
    assert shorter.finish_reason == "length"


def test_branches_of_branches_and_their_logprobs(llm: LLM) -> None:
    params = replace(PENALISED, logprobs=2)
    run = llm.start(prompt(PROMPTS[3]), params).wait_for_tokens(12, WAIT)
    first = run.fork(at=8)
    second = first.fork(at=5)
    assert first.logprobs is not None
    for branch in (run, first, second):
        branch.wait(WAIT)
        assert branch.token_ids == run.token_ids
        drawn = branch.token_ids[branch.num_inherited :]
        assert [next(iter(entries)) for entries in branch.logprobs] == drawn
        assert sum(len(delta.token_ids) for delta in branch) == len(run.token_ids)
    own = [[entries[token].logprob for token in entries] for entries in run.logprobs]
    for branch in (first, second):
        theirs = [[entries[token].logprob for token in entries] for entries in branch.logprobs]
        for got, want in zip(theirs, own[branch.num_inherited :], strict=True):
            assert got == pytest.approx(want, abs=1e-4)
    assert GREEDY.logprobs is None
    assert llm.start("a", replace(GREEDY, max_tokens=1)).wait(WAIT).logprobs is None


def test_a_stop_string_that_began_before_the_fork(llm: LLM) -> None:
    """What of a stop string was inherited counts; it is held back from the branch's text too."""
    run = llm.start(prompt(PROMPTS[0]), SEEDED).wait(WAIT)
    text = llm.get_tokenizer().decode(run.token_ids[:14])
    at = next(i for i in range(6, 13) if run.token_ids[i] < 128 and run.token_ids[i + 1] < 128)
    stop = bytes(run.token_ids[at : at + 2]).decode()
    params = replace(SEEDED, stop=[stop])
    expected = llm.start(prompt(PROMPTS[0]), params).wait(WAIT)
    assert expected.finish_reason == "stop"
    again = llm.start(prompt(PROMPTS[0]), SEEDED).wait_for_tokens(at + 1, WAIT)
    branch = again.fork(params, at=min(at + 1, len(expected.token_ids) - 1))
    assert branch.wait(WAIT).token_ids == expected.token_ids
    assert branch.text == expected.text
    assert text.startswith(expected.text)
    assert (branch.finish_reason, branch.stop_reason) == ("stop", stop)
    again.abort()


def test_waiting_runs_are_forked_and_saved_and_ended_ones_are_not(llm: LLM, tmp_path) -> None:
    company = [llm.start(prompt(PROMPTS[i]), replace(SEEDED, seed=i)) for i in range(4)]
    waiting = llm.start(prompt(PROMPTS[0]), SEEDED)  # there are four rows
    fork = waiting.fork()
    assert waiting.save(tmp_path / "waiting") == 0
    loaded = llm.load(tmp_path / "waiting")
    for run in (waiting, fork, loaded):
        assert (run.num_inherited, run.token_ids) == (0, [])
    for run in company:
        run.abort()
    for run in (waiting, fork, loaded):
        assert run.wait(WAIT).token_ids == waiting.wait(WAIT).token_ids
    assert len(waiting.token_ids) == 70
    assert {run.wait(WAIT).finish_reason for run in company} == {"abort"}
    for run in (waiting, company[0]):
        with pytest.raises(InvalidRequestError, match="has ended cannot be forked"):
            run.fork()
        with pytest.raises(InvalidRequestError, match="has ended cannot be saved"):
            run.save(tmp_path / "ended")
    assert not (tmp_path / "ended").exists()
    run.abort()  # nothing happens


def test_a_saved_run_goes_on_beside_the_one_it_was(llm: LLM, tmp_path) -> None:
    run = llm.start(prompt(PROMPTS[1]), PENALISED).wait_for_tokens(5, WAIT)
    saved = run.save(tmp_path / "run")
    loaded = llm.load(tmp_path / "run")
    assert loaded.num_inherited == saved >= 5
    assert loaded.params == PENALISED
    assert loaded.prompt_token_ids == tuple(PROMPTS[1])
    assert loaded.wait(WAIT).token_ids == run.wait(WAIT).token_ids
    assert loaded.text == run.text
    with make_llm(max_model_len=60) as other:
        with pytest.raises(InvalidRequestError, match=r"at most|room for"):
            other.load(tmp_path / "run")
        assert other.client.num_inflight == 0


def test_what_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="n is 2; a run is one choice"):
        llm.start("a", SamplingParams(n=2))
    with llm.start(prompt(PROMPTS[0]), GREEDY).wait_for_tokens(3, WAIT) as run:
        refused = [
            ({"at": 69}, "tokens so far"),
            ({"at": -1}, "at is -1"),
            ({"at": True}, "at is True"),
            ({"seed": 1.5}, "seed is 1.5"),
            ({"params": SamplingParams(n=2)}, "n is 2"),
            ({"params": SamplingParams(max_tokens=2), "at": 3}, "ask for more tokens"),
            ({"params": SamplingParams(max_tokens=120)}, "context length"),
            ({"params": SamplingParams(logit_bias={999: 1.0})}, "token id 999"),
        ]
        for arguments, message in refused:
            with pytest.raises(InvalidRequestError, match=message):
                run.fork(**arguments)
        branches = []
        with pytest.raises(QueueFullError):
            branches += [run.fork() for _ in range(20)]
    assert run.wait(WAIT).finish_reason == "abort"
    assert llm.start(prompt(PROMPTS[0]), GREEDY).wait(WAIT).finish_reason == "length"


def test_threads_fork_one_run_at_once(llm: LLM) -> None:
    run = llm.start(prompt(PROMPTS[1]), SEEDED).wait_for_tokens(3, WAIT)
    branches: list[Run] = []
    threads = [
        threading.Thread(target=lambda: branches.append(run.fork(at=2).wait(WAIT)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({branch.request_id for branch in branches}) == 6
    assert [branch.token_ids for branch in branches] == [run.wait(WAIT).token_ids] * 6


def test_an_engine_that_is_gone_answers_nobody(tmp_path) -> None:
    llm = make_llm()
    SlowSteps(llm)
    run = llm.start(prompt(PROMPTS[0]), GREEDY).wait_for_tokens(2, WAIT)
    client = llm.client
    errors = []

    def fork_until_it_ends() -> None:
        try:
            while True:
                run.fork(at=1)
                time.sleep(0.05)
        except (EngineDeadError, InvalidRequestError, QueueFullError) as error:
            errors.append(error)

    thread = threading.Thread(target=fork_until_it_ends)
    thread.start()
    time.sleep(0.1)
    llm.close()
    thread.join(WAIT)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert run.finished
    for ask in (run.fork, lambda: run.save(tmp_path / "x")):
        with pytest.raises(EngineDeadError, match="shut down"):
            ask()
    assert client.num_inflight == 0
