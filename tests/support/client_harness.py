"""An EngineClient on a scripted engine, and a sink that can be waited for."""

import queue
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from jaxserve.engine.client import EngineClient
from jaxserve.engine.outputs import GenerationRequest, OutputDelta
from jaxserve.sampling_params import SamplingParams
from tests.support.fake_engine import FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer

PIECES = ["<eos>", "A", "lice", "!", "\n", "why", "?", "O", " P", " Q", "x"]
EOS, A, LICE, BANG, NEWLINE, WHY, QUESTION, OH, P, Q, X = range(len(PIECES))
V = len(PIECES)
WAIT = 10.0  # seconds; nothing here takes more than a fraction of one


class Collector:
    """A sink that keeps every delta and can be waited for."""

    def __init__(self, num_choices: int = 1) -> None:
        self.num_choices = num_choices
        self.deltas: list[OutputDelta] = []
        self._queue: queue.SimpleQueue[OutputDelta] = queue.SimpleQueue()

    def __call__(self, delta: OutputDelta) -> None:
        self._queue.put(delta)

    def next(self) -> OutputDelta:
        delta = self._queue.get(timeout=WAIT)
        self.deltas.append(delta)
        return delta

    def wait(self) -> "Collector":
        """Until every choice has ended; more than one end per choice is an error."""
        while sum(d.finish_reason is not None for d in self.deltas) < self.num_choices:
            self.next()
        ended = [d.index for d in self.deltas if d.finish_reason is not None]
        assert sorted(ended) == list(range(self.num_choices))
        return self

    def assert_silent(self) -> None:
        assert self._queue.empty()

    def text(self, index: int = 0) -> str:
        return "".join(d.text for d in self.deltas if d.index == index)

    def ids(self, index: int = 0) -> list[int]:
        return [i for d in self.deltas if d.index == index for i in d.token_ids]

    def end(self, index: int = 0) -> OutputDelta:
        (last,) = [d for d in self.deltas if d.index == index and d.finish_reason]
        return last


@contextmanager
def running(engine: FakeEngine, *, max_inflight: int = 64, seed: int = 0) -> Iterator[EngineClient]:
    tokenizer = FakeTokenizer(PIECES, special=[EOS])
    client = EngineClient(
        engine,
        tokenizer,
        vocab_size=V,
        eos_token_ids=[EOS],
        seed=seed,
        max_inflight=max_inflight,
    )
    client.start()
    try:
        yield client
    finally:
        engine.step_gate.set()
        engine.warm_up_gate.set()
        client.shutdown()
    if engine.fail_at_step is None and engine.warm_up_error is None:
        assert engine.freed == Counter(request.request_id for request in engine.added)


def ask(client: EngineClient, request_id: str = "r", prompt=(A,), **params) -> Collector:
    request = GenerationRequest(request_id, tuple(prompt), SamplingParams(**params))
    sink = Collector(request.params.n)
    client.submit(request, sink)
    return sink


def eventually(condition) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.005)
