"""Logprobs of prompt tokens: whole, in place, and the same numbers however the prompt was run.

The oracles are what transformers gives (goldens) and, on the native kernels, equality.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.program_loader import Lowered, Program
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.prompt_logprobs import build_targets
from jaxserve.engine.request import PromptLogprobs, Request
from jaxserve.loading.assemble import random_params
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling_params import SamplingParams
from tests.support.byte_model import VOCAB_SIZE, ByteTokenizer
from tests.support.paged_model import golden_model, load_golden
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import (
    AMPLE,
    SMALL,
    Run,
    collect_stats,
    drive,
    random_prompts,
    request,
    tiny_engine,
    tiny_model,
)

PAGE = SMALL["page_size"]
ASKS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
SILENT = replace(ASKS, prompt_logprobs=None)
SIZES = {"hidden_size": 64, "intermediate_size": 96}
WINDOWED = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "sliding_window": 6,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
MODELS = {"llama": SIZES, "gemma3": {**SIZES, **WINDOWED}}
PROMPTS = random_prompts(5, (2, 60), seed=3)


@cache
def model(name: str) -> LoadedModel:
    """Its matrices lie as the native kernels want them: otherwise XLA would multiply."""
    loaded = tiny_model(**MODELS[name])
    params = random_params(loaded.model, loaded.config, 0, "float32", "panels")
    return replace(loaded, params=params)


@cache
def programs(name: str, backend: str) -> SharedPrograms:
    return SharedPrograms()


def new_engine(name: str = "llama", backend: str = "cpu", **settings: object) -> Engine:
    return tiny_engine(
        model(name), loader=programs(name, backend), attention_backend=backend, **settings
    )


@cache
def engine(
    name: str = "llama",
    backend: str = "cpu",
    chunk: int | None = None,
    prefix_cache: bool = True,
) -> Engine:
    return new_engine(name, backend, max_chunk=chunk, prefix_cache=prefix_cache)


def asking(prompts: Sequence[Sequence[int]] = PROMPTS, **changes: object) -> list[Request]:
    params = replace(ASKS, **changes)
    return [request(str(i), prompt, params) for i, prompt in enumerate(prompts)]


def found(run: Run) -> dict[str, PromptLogprobs]:
    """What came, once for each request and with its first token."""
    first: dict[str, PromptLogprobs] = {}
    seen: set[str] = set()
    for event in run.events:
        name = event.request_id
        if event.prompt_logprobs is not None:
            assert name not in seen, "it comes with the first token and only once"
            assert len(event.token_ids) == 1
            first[name] = event.prompt_logprobs
        seen.add(name)
    return first


def numbers(got: PromptLogprobs) -> list[list]:
    fields = (got.token_ids, got.logprobs, got.ranks, got.top_ids, got.top_logprobs)
    return [field.tolist() for field in fields]


def check_shape(prompt: Sequence[int], got: PromptLogprobs, num_top: int) -> None:
    """One entry for each token but the first, the token itself in it, ranks and tops fitting."""
    assert got.token_ids.tolist() == list(prompt[1:])
    assert got.top_ids.shape == got.top_logprobs.shape == (len(prompt) - 1, num_top)
    assert (got.logprobs <= 0).all()
    assert (got.ranks >= 1).all()
    for i, rank in enumerate(got.ranks):
        if rank <= num_top:
            assert got.top_ids[i, rank - 1] == got.token_ids[i]
            assert got.top_logprobs[i, rank - 1] == got.logprobs[i]


# ---------------------------------------------------------------- what they are


def golden_engine(name: str, chunk: int | None) -> tuple[dict, Engine]:
    golden = load_golden(name)
    made = golden_model(golden)
    loaded = LoadedModel(
        name=name,
        model=made.model,
        config=made.config,
        params=made.params,
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        chat_template=None,
        eos_token_ids=(),
        vocab_size=golden["config"]["vocab_size"],
        max_model_len=96,
    )
    return golden, tiny_engine(loaded, max_chunk=chunk, max_model_len=96)


@pytest.mark.parametrize(("name", "chunk"), [("llama", 7), ("gemma3", None), ("gemma3", 7)])
def test_they_are_those_of_transformers(name: str, chunk: int | None) -> None:
    golden, engine = golden_engine(name, chunk)
    prompt = golden["prompt"]
    got = found(drive(engine, asking([prompt], prompt_logprobs=20)))["0"]
    check_shape(prompt, got, 20)
    inside = [int(at) for at in golden["logits"] if int(at) < len(prompt) - 1]
    assert len(inside) >= 3
    for at in inside:
        logits = np.array(golden["logits"][str(at)], np.float64)
        want = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        np.testing.assert_allclose(got.logprobs[at], want[prompt[at + 1]], atol=1e-4)
        np.testing.assert_allclose(got.top_logprobs[at], np.sort(want)[::-1][:20], atol=1e-4)
        np.testing.assert_allclose(want[got.top_ids[at]], got.top_logprobs[at], atol=1e-4)
        assert got.ranks[at] == 1 + (want > want[prompt[at + 1]]).sum()


def test_they_go_on_where_the_prompt_of_an_output_ends() -> None:
    """A text scored as a prompt has the logprobs it had when it was drawn."""
    made = engine()
    drawn = drive(made, [request("a", PROMPTS[0], replace(SILENT, max_tokens=9, logprobs=2))])
    text = [*PROMPTS[0], *drawn.tokens["a"]]
    scored = found(drive(made, asking([text])))["0"]
    raw = [entry for event in drawn.events for entry in event.logprobs or ()]
    tail = slice(len(PROMPTS[0]) - 1, None)
    assert scored.logprobs[tail].tolist() == [entry.logprob for entry in raw]
    assert scored.ranks[tail].tolist() == [entry.rank for entry in raw]
    assert scored.top_ids[tail].tolist() == [[i for i, _ in entry.top] for entry in raw]


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_as_many_alternatives_as_were_asked_for(num_top: int) -> None:
    run = drive(engine("llama", "reference"), asking(prompt_logprobs=num_top))
    for i, prompt in enumerate(PROMPTS):
        check_shape(prompt, found(run)[str(i)], num_top)


def test_a_prompt_of_one_token_has_none() -> None:
    got = found(drive(engine("llama", "reference"), asking([[65]])))["0"]
    assert len(got) == 0
    assert got.top_ids.shape == (0, 2)


def test_nobody_asked_nothing_comes_and_tokens_do_not_depend_on_it() -> None:
    made = engine()
    silent = [request(str(i), prompt, SILENT) for i, prompt in enumerate(PROMPTS)]
    without = drive(made, silent)
    assert found(without) == {}
    assert drive(made, asking()).tokens == without.tokens


# ---------------------------------------------------------------- however it was run


@cache
def plain(name: str, backend: str) -> list[list[list]]:
    run = drive(engine(name, backend, prefix_cache=False), asking(), together=False)
    return [numbers(found(run)[str(i)]) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("chunk", "prefix_cache", "together"),
    list(itertools.product((None, 16, 7), (False, True), (False, True))),
)
def test_b10_native_numbers_are_equal(
    name: str, chunk: int | None, prefix_cache: bool, together: bool
) -> None:
    made = engine(name, "cpu", chunk, prefix_cache)
    for _ in range(2):  # the second time everything is cached
        run = drive(made, asking(), together=together)
        assert [numbers(found(run)[str(i)]) for i in range(len(PROMPTS))] == plain(name, "cpu")


def test_larger_buckets_and_several_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.sampling.logprobs.MAX_LOGITS_BYTES", 4 * VOCAB_SIZE * 9)
    made = tiny_engine(model("llama"), attention_backend="cpu", max_batch_tokens=150)
    stats = collect_stats(made)
    run = drive(made, asking())
    assert {s.bucket for s in stats} >= {"mixed4+150"}
    assert [numbers(found(run)[str(i)]) for i in range(len(PROMPTS))] == plain("llama", "cpu")


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("chunk", [None, PAGE, 7])
@pytest.mark.parametrize("name", MODELS)
def test_b10_cache_and_chunks_neither_shorten_nor_shift(
    name: str, chunk: int | None, prefix_cache: bool
) -> None:
    prompt = random_prompts(1, (3 * PAGE + 1, 3 * PAGE + 1), seed=9)[0]
    want = found(drive(engine(name, "reference", None, False), asking([prompt])))["0"]
    made = engine(name, "reference", chunk, prefix_cache)
    for _ in range(2):
        got = found(drive(made, asking([prompt], prompt_logprobs=1)))["0"]
        check_shape(prompt, got, 1)
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
        np.testing.assert_array_equal(got.ranks, want.ranks)


def test_who_asks_takes_no_hit_and_leaves_one_behind() -> None:
    made = new_engine()
    prompt = PROMPTS[0] * 2
    drive(made, [request("first", prompt, SILENT)])
    asks, silent = asking([prompt])[0], request("silent", prompt, SILENT)
    drive(made, [asks])
    assert asks.num_cached_tokens == 0
    made.kv_manager.clear()
    drive(made, asking([prompt]))
    drive(made, [silent])
    assert silent.num_cached_tokens > len(prompt) - PAGE - 1


def test_several_choices_share_one_reading_of_the_prompt() -> None:
    made = engine()
    choices = [request(f"c-{i}", PROMPTS[1], ASKS, choice=i) for i in range(4)]
    for item in choices[1:]:
        item.leader_id = "c-0"
    stats = collect_stats(made)
    run = drive(made, choices)
    assert {name: numbers(got) for name, got in found(run).items()} == {
        "c-0": plain("llama", "cpu")[1]
    }
    assert sum(s.step_tokens for s in stats) < 2 * len(PROMPTS[1]) + 4 * ASKS.max_tokens


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_preempted_inside_the_prompt(steps: int, asynchronous: bool, prefix_cache: bool) -> None:
    made = new_engine(max_chunk=7, prefix_cache=prefix_cache, asynchronous=asynchronous)
    requests = asking()
    for item in requests:
        made.add(item)
    run = Run()
    for count in itertools.count():
        if not made.has_work:
            break
        if count == steps:
            for item in requests:
                made.scheduler.preempt(item.request_id)
        run.events += made.step()
        made.check_integrity()
    assert sum(item.num_preemptions for item in requests) >= 2
    got = found(run)
    assert [numbers(got[str(i)]) for i in range(len(PROMPTS))] == plain("llama", "cpu")


def test_what_is_known_when_preempted_is_not_computed_again() -> None:
    made = new_engine(max_chunk=8, asynchronous=False)
    item = asking([PROMPTS[0][:1] * 40])[0]
    made.add(item)
    made.step()
    made.step()
    assert item.num_prompt_logprobs == 16
    made.scheduler.preempt("0")
    assert item.max_shared == 16
    made.step()
    assert item.num_computed == 24
    run = Run()
    while made.has_work:
        run.events += made.step()
    check_shape(item.prompt_token_ids, found(run)["0"], 2)


@pytest.mark.parametrize("how", ["preempt_all", "tight"])
def test_a_lost_pool_and_a_tight_one(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = AMPLE if how == "preempt_all" else 34
    made = new_engine(max_chunk=7, num_pages=pages)
    params = replace(ASKS, max_tokens=40)
    requests = [request(str(i), prompt, params) for i, prompt in enumerate(PROMPTS)]
    if how == "preempt_all":
        dispatch, calls = made.runner.dispatch, itertools.count()

        def failing(*args: object) -> object:
            if next(calls) == 3:
                raise RuntimeError("the device is gone")
            return dispatch(*args)

        monkeypatch.setattr(made.runner, "dispatch", failing)
    run = drive(made, requests)
    assert run.preemptions > 0
    got = found(run)
    assert [numbers(got[str(i)]) for i in range(len(PROMPTS))] == plain("llama", "cpu")


def test_b10_aborted_inside_the_prompt_sends_nothing() -> None:
    made = engine("llama", "cpu", 7)
    one, other = asking([PROMPTS[0] * 2, PROMPTS[1]])
    made.add(one)
    made.add(other)
    events = [*made.step(), *made.step()]
    assert one.num_prompt_logprobs > 0
    made.abort("0")
    run = Run()
    while made.has_work:
        run.events += made.step()
    run.events[:0] = events
    assert [e for e in run.events if e.request_id == "0"][-1].finish_reason == "abort"
    assert list(found(run)) == ["1"]
    assert numbers(found(run)["1"]) == plain("llama", "cpu")[1]
    assert made.kv_manager.num_used == 0


def test_a_prompt_that_makes_nan_fails_alone() -> None:
    loaded = tiny_model()
    params = {**loaded.params, "embed": loaded.params["embed"].at[200].set(np.nan)}
    made = tiny_engine(replace(loaded, params=params), max_chunk=7)
    bad, good = asking([[*range(10, 40), 200, 50, 60], PROMPTS[1]])
    run = drive(made, [bad, good])
    assert run.finish == {"0": "error", "1": "length"}
    assert list(found(run)) == ["1"]


# ---------------------------------------------------------------- programs


def test_only_steps_that_need_it_compute_it_and_nothing_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = engine("llama", "cpu", 7)
    dispatch, targets = made.runner.dispatch, []

    def noted(*args: object) -> object:
        targets.append(args[3])
        return dispatch(*args)

    monkeypatch.setattr(made.runner, "dispatch", noted)
    drive(made, [request("silent", PROMPTS[0], SILENT)])
    assert targets
    assert all(one is None for one in targets)
    targets.clear()
    drive(made, asking([PROMPTS[0]]))  # which asserts that nothing compiled
    wanted = [one for one in targets if one is not None]
    assert len(wanted) == -(-(len(PROMPTS[0]) - 1) // 7)
    assert sum(int((one >= 0).sum()) for one in wanted) == len(PROMPTS[0]) - 1


class GatedScores(SharedPrograms):
    """Has everything at once, but score programs only when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def lower(self, program: Program) -> Lowered:
        if program.name == "score":
            self.gate.wait()
        return super().lower(program)


def test_the_first_who_asks_waits_for_the_program() -> None:
    loader = GatedScores()
    config = EngineConfig(**SMALL, num_pages=AMPLE, attention_backend="cpu")
    made = Engine(model("llama"), config, loader=loader)
    made.warm_up(wait_for_all=False)
    silent = [request(str(i), prompt, SILENT) for i, prompt in enumerate(PROMPTS)]
    assert found(drive(made, silent)) == {}
    threading.Timer(0.3, loader.gate.set).start()
    run = drive(made, asking())  # which asserts that nothing compiled
    assert loader.gate.is_set()
    assert [numbers(found(run)[str(i)]) for i in range(len(PROMPTS))] == plain("llama", "cpu")
    made.close()


def test_targets_lie_behind_their_tokens() -> None:
    asks = asking([list(range(10, 20))])[0]
    silent = request("silent", list(range(50, 60)), SILENT)
    plan = Plan(prefill=(Scheduled(silent, 0, 3, False), Scheduled(asks, 4, 6, True)))
    targets = build_targets(plan, 16)
    assert targets is not None
    assert targets.tolist() == [-1] * 3 + [15, 16, 17, 18, 19] + [-1] * 8
    asks.num_prompt_logprobs = 7
    targets = build_targets(plan, 16)
    assert targets is not None
    assert targets.tolist() == [-1] * 6 + [18, 19] + [-1] * 8
    asks.num_prompt_logprobs = 9
    assert build_targets(plan, 16) is None
