"""The shared test matrix of design section 7: nothing in it may change what the model says.

Axes are added here as the features come; a test of any feature runs over `settings()`, or over
`covering()` where those are too many, and compares with `assert_same_tokens`, which knows the
margin rule, or for equal numbers.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from jaxserve.core.kv_layout import kv_layout
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling_params import SamplingParams
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import AMPLE, SMALL, Run, drive, request, tiny_engine

MARGIN = 1e-4  # on XLA alone, greedy ids may differ where the two best choices are closer than this
HOST_MEMORY = 1 << 16  # bytes: some dozens of pages, fewer than the prompts fill
MAX_TOKENS = 8
LONGEST = 44  # tokens of the longest prompt
AXES: Mapping[str, tuple[Any, ...]] = {
    "cache": ("off", "on", "host"),  # host: evicted pages are kept in host memory
    "chunk": (None, 16, 7),
    "tight_pool": (False, True),
    "asynchronous": (False, True),
    "batched": (False, True),
    "n": (1, 4),
}


@dataclass(frozen=True)
class Setting:
    """One cell. chunk: tokens of a prefill chunk, or None for whole prompts; n: choices each."""

    cache: str
    chunk: int | None
    tight_pool: bool
    asynchronous: bool
    batched: bool
    n: int

    @property
    def name(self) -> str:
        pool = "tight" if self.tight_pool else "ample"
        loop = "async" if self.asynchronous else "sync"
        company = "batched" if self.batched else "alone"
        return f"{self.cache}-chunk={self.chunk}-{pool}-{loop}-{company}-n={self.n}"


# Every request alone, whole, with room, and nothing shared or under way at the same time.
PLAIN = {
    n: Setting("off", None, tight_pool=False, asynchronous=False, batched=False, n=n)
    for n in AXES["n"]
}


@cache
def settings() -> tuple[Setting, ...]:
    """All cells."""
    return tuple(Setting(*cell) for cell in itertools.product(*AXES.values()))


@cache
def without_host_memory() -> tuple[Setting, ...]:
    """All cells of the cache on and off."""
    return tuple(cell for cell in settings() if cell.cache != "host")


@cache
def covering(strength: int) -> tuple[Setting, ...]:
    """Cells in which any values of any `strength` axes meet: the greedy choice, always the same."""
    open_sets = set().union(*(_meetings(cell, strength) for cell in settings()))
    chosen = []
    while open_sets:
        best = max(settings(), key=lambda cell: len(open_sets & _meetings(cell, strength)))
        open_sets -= _meetings(best, strength)
        chosen.append(best)
    return tuple(chosen)


@cache
def _meetings(cell: Setting, strength: int) -> frozenset:
    return frozenset(itertools.combinations(vars(cell).items(), strength))


def matrix_prompts() -> list[list[int]]:
    """Prompts that share what a cache could get wrong.

    Of pages of 4 tokens: one of whole pages, two that have nothing in common with it, one that
    ends with a page of it, its repetition, and one that leaves it inside a page.
    """
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, LONGEST).tolist()
    other = rng.integers(0, 256, 30).tolist()
    return [base, other, [65], base[:16], base, [*base[:38], 7, 8, 9]]


def matrix_requests(params: SamplingParams, n: int) -> list[Request]:
    """n choices of every prompt, as users' requests become them; named prompt-choice."""
    requests = []
    for i, prompt in enumerate(matrix_prompts()):
        for choice in range(n):
            item = request(f"{i}-{choice}", prompt, params, choice=choice)
            item.leader_id = f"{i}-0" if choice else None
            requests.append(item)
    return requests


class MatrixEngines:
    """The engines of one model, made when a cell needs one; options: further settings.

    stored_pages, loaded_pages: to and from host memory, in all cells so far.
    """

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        self._model = model
        self._options = options
        self._programs = SharedPrograms()
        self._engines: dict[tuple[object, ...], Engine] = {}
        self.stored_pages = self.loaded_pages = self.preemptions = 0

    def run(self, setting: Setting, params: SamplingParams) -> Run:
        """Run the requests of a cell on an engine that has cached nothing yet."""
        engine = self.engine(setting)
        engine.kv_manager.clear()
        before = engine.kv_manager.stats
        run = drive(engine, matrix_requests(params, setting.n), together=setting.batched)
        stats = engine.kv_manager.stats
        self.stored_pages += stats.stored_pages - before.stored_pages
        self.loaded_pages += stats.loaded_pages - before.loaded_pages
        self.preemptions += run.preemptions
        assert set(run.finish) == set(run.tokens), "a request did not end"
        if setting.tight_pool and setting.batched:
            assert run.had_to_wait, "the tight pool should have made somebody wait"
        if setting.cache != "off" and not setting.tight_pool:
            repeated, parting = run.cached_tokens["4-0"], run.cached_tokens["5-0"]
            assert (repeated, parting) == (LONGEST - 1, 38), "the cache was not used"
        return run

    def engine(self, setting: Setting) -> Engine:
        key = (setting.cache, setting.chunk, setting.tight_pool, setting.asynchronous)
        if key not in self._engines:
            self._engines[key] = self._make(setting)
        return self._engines[key]

    def _make(self, setting: Setting) -> Engine:
        engine = tiny_engine(
            self._model,
            max_chunk=setting.chunk,
            asynchronous=setting.asynchronous,
            loader=self._programs,
            num_pages=self._pages(setting.tight_pool),
            prefix_cache=setting.cache != "off",
            kv_host_memory=HOST_MEMORY if setting.cache == "host" else 0,
            **self._options,
        )
        # By what it measures of such a model, the engine might keep no pages in host memory.
        engine.scheduler.step_times.swap_is_cheaper = lambda *_: True  # type: ignore[method-assign]
        return engine

    def _pages(self, tight: bool) -> int:
        """Of a pool with room for everybody, or for one and a half of the longest requests."""
        if not tight:
            return AMPLE
        groups = kv_layout(self._model.model.kv_spec(self._model.config)).num_tables
        longest = -(-(LONGEST + MAX_TOKENS) // SMALL["page_size"])
        return 1 + (3 * longest * groups + 1) // 2


def assert_same_tokens(expected: Run, got: Run, *, most_close_calls: int = 0) -> None:
    """Greedy runs must agree wherever the margin is above MARGIN; the rest are counted.

    After a close call the two texts differ, so that request's comparison ends there. Runs without
    margins (sampled) must agree entirely.
    """
    assert expected.tokens.keys() == got.tokens.keys()
    close_calls = 0
    for name, ids in expected.tokens.items():
        if got.tokens[name] == ids:
            continue
        pairs = enumerate(zip(ids, got.tokens[name], strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(got.tokens[name])))
        margins = expected.margins.get(name, [])
        assert at < len(margins), f"{name}: {got.tokens[name]} instead of {ids}"
        assert margins[at] <= MARGIN, f"{name}: token {at} differs at margin {margins[at]:.2e}"
        close_calls += 1
    assert close_calls <= most_close_calls, f"{close_calls} requests parted at close calls"


def said(run: Run) -> dict[str, list]:
    """Every token of every request with all its logprobs, as they came."""
    said: dict[str, list] = {}
    for event in run.events:
        said.setdefault(event.request_id, []).extend(
            (lp.logprob, lp.top) for lp in event.logprobs or ()
        )
    return said
