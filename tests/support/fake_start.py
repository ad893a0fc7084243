"""What `start_engine` returns, around a FakeEngine: commands run without loading a model."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxserve.engine.client import EngineClient
from tests.support.byte_model import ByteModel
from tests.support.fake_engine import FakeEngine


@dataclass
class FakeStarted:
    """The attributes of StartedEngine."""

    client: EngineClient
    model: Any
    engine: Any
    phases: dict[str, float]


@dataclass
class FakeStart:
    """Stands in for `start_engine`. gate: while cleared, "loading" goes on."""

    script: Any
    model: Any = field(default_factory=ByteModel)
    error: Exception | None = None
    step_seconds: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    engines: list[FakeEngine] = field(default_factory=list)
    options: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def __call__(
        self, options: Any, say: Callable[[str], None], on_step: Any = None
    ) -> FakeStarted:
        self.options.append(options)
        say("loading the fake")
        self.gate.wait(20)
        if self.error is not None:
            raise self.error
        engine = FakeEngine(self.script, on_step=on_step, step_seconds=self.step_seconds)
        engine.page_size = 16  # type: ignore[attr-defined]
        self.engines.append(engine)
        client = EngineClient(
            engine,
            self.model.tokenizer,
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            max_inflight=64,
        )
        client.start()
        client.wait_ready(20)
        return FakeStarted(client, self.model, engine, {"load": 0.5, "warm_up": 1.0, "total": 1.5})

    def prompts(self) -> list[str]:
        """The texts of all prompts the engines were given."""
        requests = [request for engine in self.engines for request in engine.added]
        return [
            self.model.tokenizer.decode(r.prompt_token_ids, skip_special_tokens=False)
            for r in requests
        ]
