"""`jaxserve chat` and `jaxserve generate` around a scripted engine."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxserve.cli import chat, engine_start
from jaxserve.cli.main import app
from jaxserve.loading.chat_template import ChatTemplate
from tests.support.byte_model import ByteModel, ByteTokenizer
from tests.support.fake_start import FakeStart


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> FakeStart:
    fake = FakeStart(list("Grüße!".encode()))
    monkeypatch.setattr(engine_start, "start_engine", fake)
    monkeypatch.setattr("jaxserve.loading.hub.resolve", lambda name: name)
    return fake


def test_one_message_prints_the_answer_alone(start: FakeStart) -> None:
    result = CliRunner().invoke(app, ["chat", "fake", "-m", "Hello", "--system", "Be kind"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "Grüße!\n"
    assert "loading the fake" in result.stderr
    assert start.prompts() == ["<s>system: Be kind\nuser: Hello\nassistant:"]


def test_conversation_keeps_history_until_cleared(start: FakeStart) -> None:
    typed = "one\n\ntwo\n/help\n/clear\nthree\n/exit\nnever\n"
    result = CliRunner().invoke(app, ["chat", "fake"], input=typed)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("Grüße!") == 3
    assert start.prompts() == [
        "<s>user: one\nassistant:",
        "<s>user: one\nassistant: Grüße!\nuser: two\nassistant:",
        "<s>user: three\nassistant:",
    ]


def test_end_of_input_leaves(start: FakeStart) -> None:
    result = CliRunner().invoke(app, ["chat", "fake"], input="one\n")
    assert result.exit_code == 0
    assert "Grüße!" in result.stdout


def test_too_long_conversation_is_told_and_goes_on(start: FakeStart) -> None:
    typed = f"{'x' * 5000}\nshort\n/exit\n"
    result = CliRunner().invoke(app, ["chat", "fake"], input=typed)
    assert result.exit_code == 0, result.output
    assert "5018 tokens" in result.stderr
    assert result.stdout.count("Grüße!") == 1
    assert start.prompts() == ["<s>user: short\nassistant:"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    start: FakeStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    start.script = list(b"abc" * 1000)
    start.step_seconds = 0.001
    printed: list[str] = []

    def echo(text: str = "", nl: bool = True, err: bool = False) -> None:
        if not err:
            printed.append(text)
        if text and not err and "".join(printed) == "abc":
            raise KeyboardInterrupt

    monkeypatch.setattr(chat.typer, "echo", echo)
    result = CliRunner().invoke(app, ["chat", "fake"], input="one\n/exit\n")
    assert result.exit_code == 0
    assert "".join(printed) == "abc"
    engine = start.engines[0]
    assert engine.num_open == 0
    assert list(engine.freed.values()) == [1]


def test_sampling_options_and_model_defaults_meet(start: FakeStart) -> None:
    start.model = replace(ByteModel(), sampling_defaults={"temperature": 0.25, "top_k": 7})
    arguments = ["chat", "fake", "-m", "x", "--top-k", "3", "--sampling-seed", "9"]
    assert CliRunner().invoke(app, [*arguments, "--max-tokens", "4"]).exit_code == 0
    params = start.engines[0].added[0].params
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.25, 3, 9, 4)


def test_base_model_is_refused_with_a_way_out(start: FakeStart) -> None:
    start.model = replace(ByteModel(), chat_template=None)
    result = CliRunner().invoke(app, ["chat", "fake", "-m", "x"])
    assert result.exit_code == 1
    assert "jaxserve generate" in result.output


def test_generate_streams_one_prompt(start: FakeStart) -> None:
    result = CliRunner().invoke(app, ["generate", "fake", "Hello", "--max-tokens", "4"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "Grü\n"
    assert start.prompts() == ["<s>Hello"]


def test_generate_runs_several_prompts_in_order(start: FakeStart) -> None:
    start.script = lambda request: list(f"[{len(request.prompt_token_ids)}]".encode())
    result = CliRunner().invoke(app, ["generate", "fake", "ab", "abcd", "-"], input="xyz")
    assert result.exit_code == 0, result.output
    assert result.stdout == "ab[3]\nabcd[5]\nxyz[4]\n"


def test_generate_stops_before_a_text(start: FakeStart) -> None:
    result = CliRunner().invoke(app, ["generate", "fake", "x", "--stop", "ße", "--stop", "zz"])
    assert result.stdout == "Grü\n"


def test_engine_options_reach_the_engine(start: FakeStart) -> None:
    arguments = ["generate", "fake", "x", "--kv-memory", "64MiB", "--max-model-len", "99"]
    CliRunner().invoke(app, [*arguments, "--dtype", "bfloat16", "--quantization", "int4"])
    config = start.options[0].config
    assert (config.kv_memory, config.max_model_len, config.dtype) == (64 << 20, 99, "bfloat16")
    assert start.options[0].quantization == "int4"


def test_chat_template_file_knows_the_special_tokens(tmp_path: Path) -> None:
    class NamedTokenizer(ByteTokenizer):
        bos_token, eos_token, unk_token, pad_token = "<s>", "</s>", None, None

    path = tmp_path / "template.jinja"
    path.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    template = engine_start.read_template(path, NamedTokenizer())  # type: ignore[arg-type]
    assert isinstance(template, ChatTemplate)
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi"
    path.write_text("{% for m in messages %}")
    with pytest.raises(engine_start.ModelLoadError, match=r"template\.jinja"):
        engine_start.read_template(path, NamedTokenizer())  # type: ignore[arg-type]
