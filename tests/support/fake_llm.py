"""LLMs over a scripted engine and a tokenizer known by heart: what a `make` fixture gives."""

from collections.abc import Callable, Iterator

import pytest

from jaxserve.engine.request import Request
from jaxserve.llm import LLM
from jaxserve.loading.chat_template import ChatTemplate
from jaxserve.loading.loaded_model import LoadedModel
from tests.support.fake_engine import FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer

EOS, BOS, USER, BOT = 0, 1, 2, 3
PIECES = ["</s>", "<s>", "[user]", "[assistant]", *"abcdefgh !"]
V = len(PIECES)
A = PIECES.index("a")


# BOS first, as in models whose template and tokenizer both bring one.
TEMPLATE = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{{ '!' * ((tools or []) | length + (bangs or 0)) }}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    {"bos_token": "<s>"},
)


def model(*, bos: bool = True, template: bool = True, **defaults) -> LoadedModel:
    return LoadedModel(
        name="fake",
        model=None,
        config=None,
        params=None,
        tokenizer=FakeTokenizer(PIECES, special=[EOS, BOS, USER, BOT], bos=BOS if bos else None),
        chat_template=TEMPLATE if template else None,
        eos_token_ids=(EOS,),
        vocab_size=V,
        max_model_len=64,
        sampling_defaults=defaults,
    )


def echo(request: Request) -> list[int]:
    """The engine's script: the prompt without its first token, and then EOS."""
    return [*request.prompt_token_ids[1:], EOS]


MakeLLM = Callable[..., tuple[LLM, FakeEngine]]


def make_llms(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    """make(loaded=..., script=..., engine options) -> (LLM, its FakeEngine)."""
    made: list[tuple[LLM, FakeEngine]] = []

    def make_one(loaded=None, script=echo, config=None, **options) -> tuple[LLM, FakeEngine]:
        engine = FakeEngine(script, max_model_len=64, **options)
        monkeypatch.setattr("jaxserve.llm.Engine", lambda *args, **options: engine)
        llm = LLM(loaded or model(), **(config or {}))
        made.append((llm, engine))
        return made[-1]

    yield make_one
    for llm, engine in made:
        engine.step_gate.set()
        llm.close()
        assert engine.num_open == 0 or engine.fail_at_step
