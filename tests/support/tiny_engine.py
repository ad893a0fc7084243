"""Real engines over tiny random models, and a way to run requests that checks everything."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.core.program_loader import ProgramLoader
from jaxserve.engine.engine import Engine
from jaxserve.engine.outputs import StepStats
from jaxserve.engine.page_needs import longest_alone
from jaxserve.engine.request import Request, TokenEvent
from jaxserve.loading.assemble import random_params
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.models.registry import find_model
from jaxserve.sampling_params import SamplingParams
from tests.support.byte_model import EOS, VOCAB_SIZE, ByteTokenizer, LineTemplate
from tests.support.shared_programs import SharedPrograms

MAX_MODEL_LEN = 256
SMALL = {"max_batch_rows": 4, "max_batch_tokens": 64, "page_size": 4, "max_model_len": 128}
AMPLE, TIGHT = 200, 34  # pages; TIGHT holds one request of the longest, and makes four preempt
MAX_STEPS = 2_000
_PROGRAMS = SharedPrograms(by_identity=True)


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a two-layer Llama over bytes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **overrides,
    }


def tiny_model(seed: int = 0, *, scale: float = 8.0, **overrides: Any) -> LoadedModel:
    """Random float32 weights; `scale` spreads the logits so that greedy margins are wide."""
    hf = tiny_config(**overrides)
    model = find_model(hf["architectures"][0])
    config = model.config_from_hf(hf)
    params = random_params(model, config, seed, "float32")
    params = jax.tree.map(lambda leaf: leaf * scale if leaf.ndim == 2 else leaf, params)
    return LoadedModel(
        name="tiny",
        model=model,
        config=config,
        params=params,
        tokenizer=ByteTokenizer(),  # type: ignore[arg-type]
        chat_template=LineTemplate(),  # type: ignore[arg-type]
        eos_token_ids=(EOS,),
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
    )


def tiny_engine(
    model: LoadedModel | None = None,
    *,
    max_chunk: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    asynchronous: bool = True,
    loader: ProgramLoader | None = None,
    pages: int | None = None,
    **settings: Any,
) -> Engine:
    """A warm engine on SMALL settings. pages: what it may use of its pool (see `with_pages`)."""
    config = EngineConfig(**{**SMALL, "num_pages": AMPLE, **settings})
    engine = Engine(
        model or tiny_model(),
        config,
        max_chunk=max_chunk,
        devices=devices,
        asynchronous=asynchronous,
        loader=loader or _PROGRAMS,
    )
    engine.warm_up()
    return engine if pages is None else with_pages(engine, pages)


def with_pages(engine: Engine, pages: int) -> Engine:
    """The engine, which has run nothing yet, in a pool of so many pages as far as anybody sees: the
    arrays keep their size, and with it the programs."""
    manager = engine.kv_manager
    longest = longest_alone(pages - 1, manager.page_size, manager.windows, manager.max_chunk)
    assert pages <= manager.num_pages
    assert engine.max_model_len <= longest + 1, "such a pool has other programs: set num_pages"
    manager.num_pages, manager.capacity_tokens = pages, longest
    manager._start_empty()
    return engine


def single_steps(engine: Engine) -> Engine:
    """The engine, with one decode step in each dispatch: for tests that stop it in the middle."""
    engine.scheduler.limits = replace(engine.scheduler.limits, max_burst=1)
    return engine


@dataclass
class Run:
    """What came of some requests. margins: logprob gap of first and second choice, per token.

    had_to_wait: some request waited while another ran, or was sent back to the queue.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    margins: dict[str, list[float]] = field(default_factory=dict)
    finish: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    events: list[TokenEvent] = field(default_factory=list)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    had_to_wait: bool = False


def request(
    name: str, prompt: Sequence[int], params: SamplingParams, *, choice: int = 0, seed: int = 0
) -> Request:
    """A request that ignores nothing: EOS ends it unless params.ignore_eos."""
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=params,
        max_tokens=params.max_tokens or MAX_MODEL_LEN,
        seed=params.seed if params.seed is not None else seed,
        eos_token_ids=(EOS,),
        choice=choice,
    )


def drive(
    engine: Engine,
    requests: Sequence[Request],
    *,
    together: bool = True,
    interpreted: bool = False,
) -> Run:
    """Run requests to their end, all at once or one after another, checking after every step.

    interpreted: kernels are, and their interpreter compiles what it meets.
    """
    run = Run()
    batches = [list(requests)] if together else [[item] for item in requests]
    for batch in batches:
        for item in batch:
            run.tokens[item.request_id] = []
            run.margins[item.request_id] = []
            engine.add(item)
        for _ in range(MAX_STEPS):
            if not engine.has_work:
                break
            for event in engine.step():
                take_in(run, event)
            engine.check_integrity()
            run.had_to_wait |= engine.scheduler.num_running > 0 < engine.scheduler.num_waiting
        assert not engine.has_work, "the engine did not finish its work"
    run.preemptions = sum(item.num_preemptions for item in requests)
    run.cached_tokens = {item.request_id: item.num_cached_tokens for item in requests}
    assert engine.kv_manager.num_used == 0, "pages leaked"
    assert engine.runner.late_compiles == 0 or interpreted
    return run


def take_in(run: Run, event: TokenEvent) -> None:
    """Add an event to a run."""
    name = event.request_id
    run.events.append(event)
    run.tokens.setdefault(name, []).extend(event.token_ids)
    for logprobs in event.logprobs or ():
        if len(logprobs.top) >= 2:
            run.margins.setdefault(name, []).append(logprobs.top[0][1] - logprobs.top[1][1])
    if event.finish_reason is not None:
        assert name not in run.finish, f"{name} finished twice"
        run.finish[name] = event.finish_reason
    if event.error is not None:
        run.errors[name] = event.error


def random_prompts(count: int, lengths: tuple[int, int], seed: int = 0) -> list[list[int]]:
    """Prompts of random bytes."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 256, int(rng.integers(*lengths, endpoint=True))).tolist()
        for _ in range(count)
    ]


def collect_stats(engine: Engine) -> list[StepStats]:
    """From now on, every step's StepStats."""
    stats: list[StepStats] = []
    engine.observe(stats.append)
    return stats
