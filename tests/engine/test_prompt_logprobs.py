"""Logprobs of prompt tokens: whole, in place, and the same numbers however the prompt was run.

The oracles are what transformers gives (goldens) and, on the native kernels, equality.
"""

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.program_loader import Lowered, Program
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import Plan, Scheduled
from jaxserve.engine.prompt_logprobs import build_targets
from jaxserve.loading.loaded_model import LoadedModel
from tests.support.byte_model import VOCAB_SIZE, ByteTokenizer
from tests.support.paged_model import golden_model, load_golden
from tests.support.prompt_scores import (
    ASKS,
    MODELS,
    PAGE,
    PROMPTS,
    SILENT,
    asking,
    check_shape,
    engine,
    found,
    model,
    new_engine,
    numbers,
    plain,
)
from tests.support.shared_programs import SharedPrograms
from tests.support.tiny_engine import (
    AMPLE,
    SMALL,
    collect_stats,
    drive,
    random_prompts,
    request,
    tiny_engine,
)

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
