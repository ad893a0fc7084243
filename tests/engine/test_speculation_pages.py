"""Speculation and everything around it: pages, cache, memory pressure, ends in the middle of it."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.engine.test_native_bits import packed_model
from tests.support.matrix import PLAIN, MatrixEngines, Setting, assert_same_tokens, covering, said
from tests.support.shared_programs import SharedPrograms
from tests.support.speculating import METHODS, ask, make, model, prompts, speculation
from tests.support.tiny_engine import (
    TIGHT,
    Run,
    collect_stats,
    drive,
    request,
    single_steps,
    take_in,
    tiny_engine,
    with_pages,
)

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
LOOP = tuple([5, 6, 7] * 6)
SOME = prompts()[1::6]


@pytest.fixture(scope="module")
def plain() -> Engine:
    return make()


@pytest.mark.parametrize("method", METHODS)
def test_rejected_drafts_leave_pages_and_cache_as_without_them(plain: Engine, method: str) -> None:
    """The same pages are cached, and found again, whole ones and the tail of each text."""
    plain.kv_manager.clear()
    engine = make(speculation(method, 3))
    for params in (GREEDY, SEEDED):
        runs = [drive(one, ask(params, SOME)) for one in (plain, engine)]
        assert runs[0].tokens == runs[1].tokens
        assert engine.kv_manager.stats.cached_pages == plain.kv_manager.stats.cached_pages
        texts = [(*prompt, *runs[0].tokens[f"r{i}"], 1, 2) for i, prompt in enumerate(SOME)]
        found = [[one.kv_manager.match(item) for item in ask(params, texts)]
                 for one in (plain, engine)]  # fmt: skip
        assert found[0] == found[1]
        assert min(found[0][i] - len(prompt) for i, prompt in enumerate(SOME)) >= 16
    stats = engine.speculation
    assert stats.num_drafted > stats.num_accepted


class AlwaysWrong:
    """Knows what each request will say, and drafts something else."""

    name = "wrong"

    def __init__(self, said: Mapping[str, list[int]]) -> None:
        self._said = said

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        drafts = []
        for item, limit in zip(requests, limits, strict=True):
            begun = len(item.output_token_ids)
            rest = self._said[item.request_id][begun : begun + limit]
            drafts.append([(token + 1) % 256 for token in rest])
        return drafts

    def observe(self, request: Request, drafted: Sequence[int], num_accepted: int) -> None:
        assert num_accepted == 0

    def forget(self, request_id: str) -> None:
        pass


def pages_of(engine: Engine) -> tuple[Any, ...]:
    """Which pages are free, kept and held, in the order of their next use."""
    allocator = engine.kv_manager._allocator
    running = [item.pages for item in engine.scheduler.running]
    state = allocator._free, allocator._idle, allocator._ref_counts, running
    return copy.deepcopy(state)


def numbers_of(engine: Engine) -> tuple[Any, ...]:
    """How many pages are free, kept and held, and by whom."""
    free, idle, _, running = pages_of(engine)
    return len(free), len(idle), [[len(pages) for pages in groups] for groups in running]


@pytest.mark.parametrize(("rows", "look"), [(1, pages_of), (3, numbers_of)], ids=["one", "three"])
def test_after_each_step_pages_are_as_if_wrong_drafts_had_never_been(
    rows: int, look: Callable[[Engine], tuple[Any, ...]]
) -> None:
    """Whole texts one after another, or side by side, where only which page is whose may differ."""
    engines = [
        single_steps(make(one, asynchronous=False)) for one in (None, speculation("ngram", 7))
    ]
    said_by_all = drive(make(), ask(GREEDY, SOME)).tokens
    engines[1]._loop._speculator._proposer = AlwaysWrong(said_by_all)
    for first in range(0, len(SOME) - rows + 1, rows):
        for engine in engines:
            for item in ask(GREEDY, SOME)[first : first + rows]:
                engine.add(item)
        while engines[0].has_work:
            assert engines[0].step() == engines[1].step()
            assert look(engines[0]) == look(engines[1])
            engines[1].check_integrity()
        assert not engines[1].has_work
    stats = engines[1].speculation
    assert stats.num_drafted > 5 * stats.num_drafts > 0
    assert stats.num_accepted == 0


def test_at_each_length_of_a_text_pages_are_those_of_plain_decoding() -> None:
    """With drafts of which some hold; plain decoding passes every length, speculation some."""
    states: list[dict[tuple[str, int], Any]] = []
    for speculative in (None, speculation("lookahead", 7)):
        engine = single_steps(make(speculative, asynchronous=False))
        seen: dict[tuple[str, int], Any] = {}
        for item in ask(GREEDY, SOME):
            engine.add(item)
            while engine.has_work:
                engine.step()
                seen[item.request_id, item.num_tokens] = pages_of(engine)
        states.append(seen)
    plain, speculated = states
    assert engine.speculation.num_accepted > 0
    assert len(speculated) < len(plain)
    for key, pages in speculated.items():
        assert pages == plain[key], key


def test_a_cached_text_goes_on_as_one_that_is_not(plain: Engine) -> None:
    """What drafts that held left in the cache is what plain decoding would have."""
    plain.kv_manager.clear()
    engine = make(speculation("lookahead", 3))
    first = drive(engine, ask(GREEDY, SOME))
    more = [(*prompt, *first.tokens[f"r{i}"][:15]) for i, prompt in enumerate(SOME)]
    again = drive(engine, ask(GREEDY, more))
    assert min(again.cached_tokens[f"r{i}"] - len(prompt) for i, prompt in enumerate(SOME)) >= 8
    fresh = make(prefix_cache=False)
    assert again.tokens == drive(fresh, ask(GREEDY, more)).tokens


def test_a_tight_pool_preempts_and_says_the_same(plain: Engine) -> None:
    expected = drive(plain, ask(SEEDED))
    for method in ("lookahead", "ngram"):
        engine = with_pages(make(speculation(method, 3)), TIGHT)
        run = drive(engine, ask(SEEDED))
        assert run.tokens == expected.tokens
        assert run.preemptions > 0
        assert engine.speculation.num_drafted > 0 or method == "ngram"  # nothing repeats, perhaps


def test_prompts_in_chunks_that_come_while_others_speculate(plain: Engine) -> None:
    expected = drive(plain, ask(GREEDY, SOME))
    engine = make(speculation("lookahead", 3), max_chunk=7)
    requests, run = ask(GREEDY, SOME), Run()
    while requests or engine.has_work:
        if requests:
            engine.add(requests.pop())
        for _ in range(3):
            step(engine, run)
    assert run.tokens == expected.tokens
    assert engine.speculation.num_accepted > 0
    assert engine.kv_manager.num_used == 0


# ---------------------------------------------------------------------- ends in the middle


def step(engine: Engine, run: Run) -> None:
    for event in engine.step():
        take_in(run, event)
    engine.check_integrity()


def until_drafts_are_in_flight(engine: Engine, run: Run, item: Request, least: int) -> None:
    """A step that verifies has been dispatched, and is not committed."""
    stats = collect_stats(engine)
    while True:
        assert engine.has_work
        step(engine, run)
        if stats[-1].bucket.startswith("verify") and len(item.output_token_ids) >= least:
            return


def finish(engine: Engine, run: Run) -> None:
    while engine.has_work:
        step(engine, run)
    assert engine.kv_manager.num_used == 0
    assert engine.runner.late_compiles == 0


@pytest.mark.parametrize("end", ["abort", "timeout", "preempt", "stop string"])
@pytest.mark.parametrize("least", [1, 6])
def test_an_end_while_drafts_are_in_flight(
    plain: Engine, end: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    company = SOME[2:4]
    expected = drive(plain, ask(GREEDY, [LOOP, *company])).tokens
    engine, run = make(speculation("lookahead", 3)), Run()
    item, *others = ask(GREEDY, [LOOP, *company])
    item.deadline = time.monotonic() + 3600
    for one in (item, *others):
        engine.add(one)
    until_drafts_are_in_flight(engine, run, item, least)
    said_by_then = list(item.output_token_ids)
    if end == "abort":
        engine.abort("r0")
    elif end == "timeout":
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 7200)
        monkeypatch.setattr("jaxserve.engine.step_report.time", later)
    elif end == "preempt":
        assert engine.scheduler.preempt("r0") is item
    else:
        engine.finish("r0", len(said_by_then) - 1)  # a stop string ended before the last token
        assert item.output_token_ids == said_by_then[:-1]
    finish(engine, run)
    assert [run.tokens[f"r{i}"] for i in (1, 2)] == [expected[f"r{i}"] for i in (1, 2)]
    if end == "preempt":
        assert run.tokens["r0"] == expected["r0"]
    else:
        assert run.tokens["r0"] == expected["r0"][: len(run.tokens["r0"])]
        assert len(run.tokens["r0"]) < len(expected["r0"])
        assert run.finish.get("r0") == {"abort": "abort", "timeout": "timeout"}.get(end)
    again = drive(engine, [request("again", LOOP, GREEDY)])  # on the pages it left
    assert again.tokens["again"] == expected["r0"]


def test_an_id_used_again_at_once_has_its_own_drafts(plain: Engine) -> None:
    expected = drive(plain, ask(GREEDY, SOME[:2])).tokens
    for method in METHODS:
        engine, run = make(speculation(method, 3)), Run()
        first = request("same", SOME[0], replace(GREEDY, max_tokens=100))
        engine.add(first)
        while len(first.output_token_ids) < 4:
            step(engine, run)
        engine.abort("same")
        run = Run()
        engine.add(request("same", SOME[1], GREEDY))
        while engine.has_work:
            for event in engine.step():
                if event.finish_reason != "abort":
                    take_in(run, event)
        assert run.tokens["same"] == expected["r1"]


# ---------------------------------------------------------------------- kinds of memory


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-int4", {"kv_cache_dtype": "int8"}),
        ("qwen3-int8", {}),
    ],
)
def test_quantised_keys_values_and_weights_bit_by_bit(name: str, options: dict[str, Any]) -> None:
    """On the native kernels a row's bits are its own, so logprobs are the same to the last one."""
    params = [replace(one, logprobs=3) for one in (GREEDY, SEEDED)]
    runs, programs = [], SharedPrograms()
    for speculative in (None, speculation("lookahead", 3)):
        engine = tiny_engine(
            packed_model(name),
            loader=programs,
            attention_backend="cpu",
            max_batch_tokens=16,
            speculative=speculative,
            **options,
        )
        runs.append([said(drive(engine, ask(one, SOME[:5]))) for one in params])
    assert runs[0] == runs[1]
    assert 0 < engine.speculation.num_accepted < engine.speculation.num_drafted


@pytest.fixture(scope="module")
def speculating() -> MatrixEngines:
    return MatrixEngines(model(), speculative=speculation("lookahead", 3))


@pytest.fixture(scope="module")
def not_speculating() -> MatrixEngines:
    return MatrixEngines(model())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "seeded-penalties"])
@pytest.mark.parametrize("setting", covering(2), ids=lambda cell: cell.name)
def test_the_shared_matrix(
    setting: Setting, kind: str, speculating: MatrixEngines, not_speculating: MatrixEngines
) -> None:
    params = replace(GREEDY, max_tokens=8, logprobs=2)
    if kind != "greedy":
        params = replace(
            params, temperature=1.0, top_k=40, seed=-3, frequency_penalty=0.7, logprobs=None
        )
    expected = not_speculating.run(PLAIN[setting.n], params)
    assert_same_tokens(expected, speculating.run(setting, params))
    assert speculating.engine(setting).speculation.num_drafted > 0
