"""A stand-in for a loaded model: one token per byte, a plain template, no parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.loading.chat_messages import TemplateHabits, normalize_messages
from tests.support.fake_tokenizer import FakeDetokenizer, FakeTokenizer

BOS = 256
EOS = 257
VOCAB_SIZE = 260


class ByteTokenizer(FakeTokenizer):
    """Token id b is the byte b; then <s> (BOS), </s> (EOS) and two ids of several bytes."""

    def __init__(self, add_bos: bool = True) -> None:
        pieces: list[bytes | str] = [bytes([value]) for value in range(256)]
        super().__init__(
            [*pieces, "<s>", "</s>", "<extra>", "héé"],
            special=(BOS, EOS),
            bos=BOS if add_bos else None,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens and self.bos is not None else []
        head, *rest = text.split("<s>")
        ids += head.encode()
        for part in rest:
            ids += [BOS, *part.encode()]
        return ids

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> FakeDetokenizer:
        return FakeDetokenizer(self, skip_special_tokens)


class LineTemplate:
    """ "<s>" and then a line per message and tool; content parts are joined."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        lines = [f"tool {tool['function']['name']}" for tool in tools or ()]
        lines += [f"{key}={value}" for key, value in (extra or {}).items()]
        for message in normalize_messages(messages, TemplateHabits()):
            if message["role"] == "forbidden":
                raise InvalidRequestError("the chat template refuses this role", "messages")
            lines.append(f"{message['role']}: {message['content']}")
        if add_generation_prompt:
            lines.append("assistant:")
        return "<s>" + "\n".join(lines)


@dataclass(frozen=True)
class ByteModel:
    """The attributes of LoadedModel that the server reads."""

    name: str = "fake"
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    chat_template: LineTemplate | None = field(default_factory=LineTemplate)
    vocab_size: int = VOCAB_SIZE
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = (EOS,)
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
