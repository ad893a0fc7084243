"""Chat templates: any legal conversation is rendered as Jinja renders it, or refused as a 400."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import pre_tokenizers

from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.loading.chat_template import ChatTemplate, template_from_folder, template_from_gguf
from jaxserve.loading.tokenizer import Tokenizer
from tests.support.chat_templates import (
    CHATML,
    GEMMA,
    LLAMA3,
    MISTRAL,
    SPECIAL_TOKENS,
    TEMPLATES,
    reference,
)
from tests.support.toy_vocabularies import train_byte_level

USER = {"role": "user", "content": "hi"}
ARGUMENTS = {"city": "Zürich", "days": 3}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "abc123def", "type": "function", "function": function}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


RESULT = {"role": "tool", "tool_call_id": "abc123def", "name": "weather", "content": "22 °C"}
ANSWERED = {"role": "assistant", "content": "", "tool_calls": [call(ARGUMENTS)]}

# Name -> (as a client sends it, as a template must see it). Parts become text further down.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "one user": ([USER], [USER]),
    "system": ([{"role": "system", "content": "Be brief."}, USER],) * 2,
    "three turns": ([USER, {"role": "assistant", "content": " yes "}, USER],) * 2,
    "text parts": ([{"role": "user", "content": parts("a ", "b")}],) * 2,
    "system in parts": ([{"role": "system", "content": parts("Be brief.")}, USER],) * 2,
    "null content": (
        [USER, ANSWERED | {"content": None, "tool_calls": [call(json.dumps(ARGUMENTS))]}, RESULT],
        [USER, ANSWERED, RESULT],
    ),
    "missing content": (
        [USER, {"role": "assistant", "tool_calls": [call(ARGUMENTS)]}, RESULT],
        [USER, {"role": "assistant", "tool_calls": [call(ARGUMENTS)], "content": ""}, RESULT],
    ),
    "empty arguments": (
        [USER, ANSWERED | {"tool_calls": [call("")]}, RESULT],
        [USER, ANSWERED | {"tool_calls": [call({})]}, RESULT],
    ),
    "no tool calls": (
        [USER, {"role": "assistant", "content": "yes", "tool_calls": []}, USER],
        [USER, {"role": "assistant", "content": "yes"}, USER],
    ),
    "developer": (
        [{"role": "developer", "content": "Be brief."}, USER],
        [{"role": "system", "content": "Be brief."}, USER],
    ),
    "odd characters": ([{"role": "user", "content": "<b>&'\"é谁\n{{ x }}</b>"}],) * 2,
    "two users": ([USER, USER],) * 2,
}


def as_template_sees(messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Only the Gemma-like template reads parts."""
    if name == "gemma":
        return messages
    return [
        m | {"content": "\n".join(p["text"] for p in m["content"])}
        if isinstance(m["content"], list)
        else m
        for m in messages
    ]


@pytest.mark.parametrize("name", list(TEMPLATES))
@pytest.mark.parametrize("case", list(CONVERSATIONS))
def test_b30_legal_messages_render_as_in_jinja_or_are_refused(case: str, name: str) -> None:
    sent, seen = CONVERSATIONS[case]
    before = json.dumps(sent)
    template = ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS)
    expected, refusal = "", ""
    try:
        expected = reference(TEMPLATES[name], as_template_sees(seen, name))
    except jinja2.TemplateError as error:
        refusal = str(error)
    if refusal:
        with pytest.raises(InvalidRequestError) as raised:
            template.render(sent)
        assert refusal in str(raised.value)
    else:
        assert template.render(sent) == expected
    assert json.dumps(sent) == before


def test_b30_the_matrix_holds_refusals_and_answers() -> None:
    """Which of the 48 are refused, and with what text, is the templates' own business."""
    refused = {
        ("mistral", "system"): "Only user, assistant and tool roles are supported!",
        ("mistral", "two users"): "roles must alternate user/assistant",
        ("gemma", "two users"): "roles must alternate user/assistant",
    }
    for (name, case), text in refused.items():
        with pytest.raises(InvalidRequestError, match=text) as raised:
            ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS).render(CONVERSATIONS[case][0])
        assert raised.value.param == "messages"


TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {}}}]


@pytest.mark.parametrize("source", [LLAMA3, MISTRAL])
def test_tools_reach_the_template(source: str) -> None:
    template = ChatTemplate(source, SPECIAL_TOKENS)
    assert template.render([USER], tools=TOOLS) == reference(source, [USER], tools=TOOLS)
    assert template.render([USER], tools=[]) == reference(source, [USER])
    assert "<é>" in template.render([USER], tools=TOOLS)


def test_generation_prompt_and_extra_variables() -> None:
    template = ChatTemplate(CHATML + "{{ mood }}", SPECIAL_TOKENS)
    text = template.render([USER], add_generation_prompt=False, extra={"mood": "!"})
    assert text.endswith("hi<|im_end|>\n!")
    with pytest.raises(InvalidRequestError, match="may not set messages, tools"):
        template.render([USER], extra={"messages": [], "tools": None, "mood": 1})


def test_documents_are_none_unless_given() -> None:
    template = ChatTemplate("{{ documents }}")
    assert template.render([USER]) == "None"
    assert template.render([USER], extra={"documents": ["d"]}) == "['d']"


PASTED = """{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}
{{ '```json\n' + c.function.arguments + '\n```' }}{% endfor %}{% else %}{{ m.content }}\
{% endif %}{% endfor %}"""


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS, ensure_ascii=False)])
def test_b30_a_template_that_pastes_arguments_gets_text(arguments: Any) -> None:
    text = ChatTemplate(PASTED).render([USER, ANSWERED | {"tool_calls": [call(arguments)]}])
    assert json.dumps(ARGUMENTS, ensure_ascii=False) in text


def test_parts_are_made_for_a_template_that_reads_nothing_else() -> None:
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert ChatTemplate(source).render([USER]) == "[hi]"


def test_a_template_that_prints_its_parts_raw_gets_text() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    message = {"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert ChatTemplate(source).render([message, refusal]) == "a\nbno"


def test_the_developer_role_stays_where_it_is_known() -> None:
    source = "{# developer #}{{ messages[0].role }}"
    assert ChatTemplate(source).render([{"role": "developer", "content": ""}]) == "developer"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 1, "content": "hi"}], "messages[0].role"),
        ([USER, {"role": "user", "content": 3}], "messages[1].content"),
        ([USER | {"content": {"text": "x"}}], "messages[0].content"),
        ([USER | {"content": [3]}], "messages[0].content[0]"),
        ([USER | {"content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([USER | {"content": [*parts("a"), {"type": "image_url"}]}], "messages[0].content[1]"),
        ([USER | {"tool_calls": "x"}], "messages[0].tool_calls"),
        ([USER | {"tool_calls": ["x"]}], "messages[0].tool_calls[0]"),
        ([USER | {"tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0]"),
        (
            [USER | {"tool_calls": [call("{'a': 1}")]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([USER | {"tool_calls": [call("[1]")]}], "messages[0].tool_calls[0].function.arguments"),
        (
            [USER | {"tool_calls": [call("[" * 10**5)]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_illegal_messages_are_refused_by_name(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        ChatTemplate(LLAMA3, SPECIAL_TOKENS).render(messages)
    assert raised.value.param == param
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 1 / (messages|length - 1) }}", "ZeroDivisionError"),
        ("{{ messages[0].a.b }}", "UndefinedError"),
        ("{{ nothing() }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ().__class__.__base__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include 'file' %}", "TypeError"),
        ("{{ raise_exception('no: ' + 'x' * 5000) }}", "refuses this conversation: no: x"),
    ],
)
def test_b30_whatever_goes_wrong_in_a_template_is_a_400(source: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text) as raised:
        ChatTemplate(source).render([USER])
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% nosuchtag %}", "{{" + "(" * 10**4])
def test_a_template_that_does_not_compile_cannot_be_loaded(source: str) -> None:
    with pytest.raises(ModelLoadError, match="does not compile") as raised:
        ChatTemplate(source)
    assert len(str(raised.value)) < 400


def test_a_template_has_a_limit() -> None:
    with pytest.raises(ModelLoadError, match="the limit is 1048576"):
        ChatTemplate("x" * (2**20 + 1))


def test_the_generation_tag_and_loop_controls_are_known() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert ChatTemplate(source).render([USER] * 5) == "hihi"


def tokenizer() -> Tokenizer:
    backend = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    return Tokenizer(backend, named={"bos": 0, "eos": 1})


def test_a_gguf_files_template_and_special_tokens() -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}"
    template = template_from_gguf({"tokenizer.chat_template": source}, tokenizer())
    assert template is not None
    assert template.source == source
    assert template.render([USER]) == "<|bos|>|<|eos|>|False"


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    assert template_from_gguf({}, tokenizer()) is None
    assert template_from_folder(tmp_path, tokenizer()) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert template_from_folder(tmp_path, tokenizer()) is None


def test_requests_with_tools_get_their_own_template() -> None:
    metadata = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    template = template_from_gguf(metadata, tokenizer())
    assert template is not None
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=TOOLS) == "tools"
    with pytest.raises(ModelLoadError, match=r"chat_template\.tool_use is not a text"):
        template_from_gguf(metadata | {"tokenizer.chat_template.tool_use": 1}, tokenizer())


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


@pytest.mark.parametrize(
    ("files", "plain", "with_tools"),
    [
        ({"tokenizer_config.json": {"chat_template": "config"}}, "config", "config"),
        ({"chat_template.json": {"chat_template": "processor"}}, "processor", "processor"),
        ({"tokenizer_config.json": {"chat_template": NAMED}}, "plain", "tools"),
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, "tools", "tools"),
        (
            {"chat_template.jinja": "jinja", "tokenizer_config.json": {"chat_template": "config"}},
            "jinja",
            "jinja",
        ),
        (
            {"chat_template.jinja": "jinja", "additional_chat_templates/tool_use.jinja": "more"},
            "jinja",
            "more",
        ),
    ],
)
def test_where_a_folder_keeps_its_template(
    tmp_path: Path, files: dict[str, Any], plain: str, with_tools: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = template_from_folder(tmp_path, tokenizer())
    assert template is not None
    assert template.render([USER]) == plain
    assert template.render([USER], tools=TOOLS) == with_tools


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"{", "cannot be read as JSON"),
        ("tokenizer_config.json", b'{"chat_template": [1]}', "neither a text nor a list"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "neither a text nor a list"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
        ("chat_template.jinja", b"x" * (2**22 + 1), "longer than the limit"),
    ],
)
def test_damaged_template_files_are_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        template_from_folder(tmp_path, tokenizer())


def test_gemma_like_template_sees_parts_as_parts() -> None:
    template = ChatTemplate(GEMMA, SPECIAL_TOKENS)
    message = {"role": "user", "content": parts(" a ", " b ")}
    assert "<start_of_turn>user\nab<end_of_turn>" in template.render([message])
