"""The Python API with a scripted engine: shapes, order, refusals, interrupts, lazy imports."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import jaxserve
from jaxserve.core.backends import weight_layout
from jaxserve.errors import EngineDeadError, InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling_params import SamplingParams
from tests.support.fake_llm import BOS, BOT, EOS, USER, A, MakeLLM, V, make_llms, model


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    yield from make_llms(monkeypatch)


def test_generate_has_vllms_shapes(make):
    llm, _ = make()
    (output,) = llm.generate("abc", SamplingParams(logprobs=1), use_tqdm=False)
    assert output.prompt == "abc"
    assert output.prompt_token_ids == [BOS, A, A + 1, A + 2]
    assert output.prompt_logprobs is None
    assert output.finished
    assert output.num_cached_tokens == 0
    assert output.metrics.arrival_time <= output.metrics.first_token_time
    assert output.metrics.first_token_time <= output.metrics.finished_time
    (choice,) = output.outputs
    assert (choice.index, choice.text) == (0, "abc")
    assert choice.token_ids == [A, A + 1, A + 2, EOS]
    assert (choice.finish_reason, choice.stop_reason, choice.error) == ("stop", None, None)
    assert choice.cumulative_logprob == pytest.approx(-4.0)
    assert [next(iter(entries)) for entries in choice.logprobs] == choice.token_ids
    assert choice.logprobs[0][A].decoded_token == "a"


def test_every_form_of_prompt(make):
    llm, _ = make()
    prompts = [
        "ab",
        {"prompt": "ab"},
        {"prompt_token_ids": [BOS, A, A + 1]},
        {"prompt_token_ids": np.array([BOS, A, A + 1]), "prompt": "shown"},
    ]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == ["ab"] * 4
    assert [o.prompt for o in outputs] == ["ab", "ab", None, "shown"]
    assert [o.prompt_token_ids for o in outputs] == [[BOS, A, A + 1]] * 4
    (alone,) = llm.generate(prompts[2], use_tqdm=False)
    assert alone.outputs[0].text == "ab"
    assert alone.outputs[0].logprobs is None
    assert alone.outputs[0].cumulative_logprob is None
    assert len({o.request_id for o in [*outputs, alone]}) == 5


def test_any_number_of_prompts_in_order_within_the_bounds(make):
    llm, engine = make(config={"max_batch_rows": 2, "max_queue": 4})
    words = ["abcdefgh"[: 1 + i % 8] for i in range(100)]
    outputs = llm.generate(words, SamplingParams(n=2), use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == words
    assert [[c.index for c in o.outputs] for o in outputs] == [[0, 1]] * 100
    assert 2 < engine.max_open <= 6
    assert llm.generate([], use_tqdm=False) == []


def test_params_one_for_all_or_one_each(make):
    llm, engine = make()
    each = [SamplingParams(max_tokens=k) for k in (1, 2)]
    outputs = llm.generate(["abc", "abc"], each, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == ["a", "ab"]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length"]
    with pytest.raises(InvalidRequestError, match="2 sampling_params for 1 prompts"):
        llm.generate(["abc"], each)
    llm.generate("abcdefgh" * 4, use_tqdm=False)
    assert engine.added[-1].max_tokens == 16  # vLLM's default


def test_defaults_of_the_model_apply_when_no_params_are_given(make):
    llm, engine = make(model(temperature=0.25, top_k=5))
    llm.generate("ab", use_tqdm=False)
    assert (engine.added[-1].params.temperature, engine.added[-1].params.top_k) == (0.25, 5)
    llm.generate("ab", SamplingParams(), use_tqdm=False)
    assert engine.added[-1].params.temperature == 1.0


def test_the_same_root_seed_gives_the_same_seeds(make):
    def seeds(root: int) -> list[int]:
        llm, engine = make(config={"seed": root})
        llm.generate(["a", "b", "c"], use_tqdm=False)
        return [request.seed for request in engine.added]

    assert seeds(3) == seeds(3)
    assert seeds(3) != seeds(4)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1, True]}, "True"),
        ({"prompt_token_ids": [-1]}, f"token id -1;.*{V} ids"),
        ({"prompt_token_ids": [1, V + 7]}, f"token id {V + 7};.*{V} ids"),
        ({"prompt_token_ids": [5279552648203111001]}, f"{V} ids"),
        ({"prompt_token_ids": "abc"}, "not a list"),
        ({"prompt": 5}, "int, not text"),
        ({}, "prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"),
        ([1, 2], 'give a text, or token ids as {"prompt_token_ids"'),
        (None, "NoneType"),
    ],
)
def test_b06_a_bad_prompt_among_many_stops_before_anything_starts(make, bad, words):
    llm, engine = make()
    with pytest.raises(InvalidRequestError, match=f"^prompt 1: .*{words}"):
        llm.generate(["a", bad, "b"], use_tqdm=False)
    assert engine.added == []
    assert llm.generate("ab", use_tqdm=False)[0].outputs[0].text == "ab"


def test_b06_empty_text_is_bos_alone_or_refused(make):
    llm, _ = make(script=[A, EOS])
    (output,) = llm.generate("", use_tqdm=False)
    assert (output.prompt_token_ids, output.outputs[0].text) == ([BOS], "a")
    without_bos, _ = make(model(bos=False))
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        without_bos.generate("", use_tqdm=False)


def test_b14_over_long_prompts_are_refused_with_both_numbers(make):
    llm, engine = make()
    for count, max_tokens in [(64, None), (65, None), (63, 2), (10, 64)]:
        with pytest.raises(InvalidRequestError, match=rf"{count}.*64"):
            llm.generate(
                {"prompt_token_ids": [A] * count}, SamplingParams(max_tokens=max_tokens), False
            )
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [A] * 59}, params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert output.outputs[0].finish_reason == "length"
    assert len(engine.added) == 1


def test_b03_stop_strings_offline(make):
    llm, _ = make()
    (output,) = llm.generate("abcdef", SamplingParams(stop=["cd"]), use_tqdm=False)
    choice = output.outputs[0]
    assert (choice.text, choice.stop_reason) == ("ab", "cd")
    assert choice.token_ids == [A, A + 1, A + 2, A + 3]


def test_n_above_what_can_be_open_is_refused(make):
    llm, _ = make(config={"max_batch_rows": 1, "max_queue": 2})
    with pytest.raises(InvalidRequestError, match="n is 4, but at most 3"):
        llm.generate("a", SamplingParams(n=4))


def test_b04_chat_has_one_bos(make):
    llm, engine = make()
    (output,) = llm.chat([{"role": "user", "content": "ab"}], use_tqdm=False)
    assert output.prompt == "<s>[user]ab[assistant]"
    assert output.prompt_token_ids == [BOS, USER, A, A + 1, BOT]
    assert engine.added[0].prompt_token_ids.count(BOS) == 1


def test_chat_takes_lists_of_conversations_and_template_options(make):
    llm, _ = make()
    one = [{"role": "user", "content": "a"}]
    two = [*one, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    outputs = llm.chat(
        [one, two],
        SamplingParams(max_tokens=1),
        use_tqdm=False,
        add_generation_prompt=False,
        tools=[{"type": "function"}],
        chat_template_kwargs={"bangs": 1},
    )
    assert [o.prompt for o in outputs] == ["<s>[user]a!!", "<s>[user]a[assistant]b[user]c!!"]


def test_chat_refusals(make):
    llm, engine = make()
    for messages in ([], "hello", {"role": "user"}):
        with pytest.raises(InvalidRequestError, match="messages is"):
            llm.chat(messages)
    with pytest.raises(InvalidRequestError, match="conversation 1: messages is a int"):
        llm.chat([[{"role": "user", "content": "a"}], 5])
    base, _ = make(model(template=False))
    with pytest.raises(InvalidRequestError, match="no chat template"):
        base.chat([{"role": "user", "content": "a"}])
    assert engine.added == []


def test_ctrl_c_aborts_cleanly(make):
    llm, engine = make(script=[A], step_seconds=0.002)
    params = SamplingParams(max_tokens=60, ignore_eos=True)

    def interrupt() -> None:
        while engine.num_steps < 5:
            time.sleep(0.002)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 200, params, use_tqdm=False)
    thread.join()
    assert engine.num_open == 0
    assert llm.generate("a", use_tqdm=False)[0].outputs[0].text == "a"


def test_dead_engine_raises_and_names_the_cause(make):
    llm, _ = make(script=[A], fail_at_step=3)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        llm.generate(["a"] * 3, SamplingParams(ignore_eos=True), use_tqdm=False)
    with pytest.raises(EngineDeadError):
        llm.generate("a", use_tqdm=False)


def test_failed_warm_up_ends_the_constructor(make):
    with pytest.raises(EngineDeadError, match="no room"):
        make(warm_up_error=MemoryError("no room"))


def test_threads_take_turns(make):
    llm, _ = make(config={"max_batch_rows": 1, "max_queue": 1})
    texts: dict[str, list[str]] = {}

    def work(word: str) -> None:
        outputs = llm.generate([word] * 10, use_tqdm=False)
        texts[word] = [o.outputs[0].text for o in outputs]

    threads = [threading.Thread(target=work, args=(word,)) for word in ("a", "bc", "def")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert texts == {word: [word] * 10 for word in ("a", "bc", "def")}


def test_closing(make):
    before = set(threading.enumerate())
    llm, _ = make()
    with llm as entered:
        assert entered.generate("a", use_tqdm=False)[0].outputs[0].text == "a"
        assert "jaxserve-engine" in {t.name for t in set(threading.enumerate()) - before}
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a")
    llm.close()
    assert not set(threading.enumerate()) - before
    assert llm.get_tokenizer().decode([A]) == "a"


def test_unknown_arguments_name_the_known_ones(make):
    with pytest.raises(TypeError, match=r"no argument 'gpu_memory'.*max_model_len"):
        LLM(model(), gpu_memory=1)
    with pytest.raises(InvalidRequestError, match="max_batch_rows"):
        LLM(model(), max_batch_rows=0)


@pytest.mark.parametrize(
    ("backend", "quantization", "layout"),
    [
        ("reference", None, None),
        ("reference", "int8", "rows"),
        ("auto", None, weight_layout("auto")),
    ],
)
def test_a_name_is_loaded_as_asked_for(make, monkeypatch, caplog, backend, quantization, layout):
    caplog.set_level("INFO", "jaxserve")
    asked = []

    def load(name: str, progress: Callable[[str], None], **options: Any) -> LoadedModel:
        progress(f"loaded {name}")
        asked.append((name, options))
        return model()

    monkeypatch.setattr("jaxserve.llm.load_model", load)
    config = {"dtype": "float32", "attention_backend": backend, "quantization": quantization}
    llm, _ = make("some-model", config=config)
    options = {"dtype": "float32", "quantization": quantization, "weight_layout": layout}
    assert asked == [("some-model", options)]
    assert llm.model.name == "fake"
    assert [r.message for r in caplog.records] == ["loaded some-model", "warming up"]


def test_a_loaded_model_cannot_be_quantised():
    with pytest.raises(TypeError, match="give a name or path"):
        LLM(model(), quantization="int8")


def test_progress_goes_to_stderr(make, capfd):
    llm, _ = make(script=[A], step_seconds=0.01)
    llm.generate(["a"] * 3, SamplingParams(max_tokens=30, ignore_eos=True))
    out, err = capfd.readouterr()
    assert out == ""
    assert "3/3" in err
    assert "tok/s" in err
    llm.generate("a", use_tqdm=False)
    assert capfd.readouterr() == ("", "")


def test_import_stays_light():
    """`import jaxserve` loads neither JAX nor the engine; the names arrive when used."""
    code = (
        "import sys, jaxserve\n"
        "heavy = {'jax', 'numpy', 'tokenizers', 'jaxserve.llm', 'jaxserve.engine.engine'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert {'LLM', 'SamplingParams', 'EngineConfig'} <= set(dir(jaxserve))\n"
        "from jaxserve import EngineConfig, SamplingParams\n"
        "assert SamplingParams().max_tokens == 16\n"
        "assert 'jax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert jaxserve.LLM is LLM
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = jaxserve.Nothing
