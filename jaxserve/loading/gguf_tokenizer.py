"""The tokenizer of a GGUF file, rebuilt from its metadata.

GGUF stores a vocabulary, token kinds, merges or scores, and the names of two or three conventions
(keys `tokenizer.ggml.*` of the specification in the ggml repository, docs/gguf.md). The aim is the
ids that the model's own Hugging Face tokenizer gives.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from jaxserve.errors import ModelLoadError
from jaxserve.loading.sentencepiece_backend import SPACE, sentencepiece_backend
from jaxserve.loading.sentencepiece_model import SentencePieceVocabulary
from jaxserve.loading.split_rules import split_rule
from jaxserve.loading.token_kinds import TokenKind
from jaxserve.loading.tokenizer import Tokenizer

_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_LLAMA_IDS = {"unk": 0, "bos": 1, "eos": 2}  # of files of model "llama" that do not say
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer; ModelLoadError names the metadata key that is missing or wrong."""
    builders: dict[str, Callable[[_Vocabulary], tuple[tokenizers.Tokenizer, bool]]] = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
    }
    model = metadata.get("tokenizer.ggml.model")
    if model not in builders:
        raise ModelLoadError(
            f"tokenizer.ggml.model is {str(model)[:60]!r}; supported are {', '.join(builders)}"
        )
    vocabulary = _Vocabulary(metadata)
    backend, adds_bos = builders[model](vocabulary)
    named = vocabulary.named_ids()
    prefix = _affix(metadata, named, "bos", adds_bos)
    suffix = _affix(metadata, named, "eos", False)
    return Tokenizer(backend, named=named, prefix_ids=prefix, suffix_ids=suffix)


class _Vocabulary:
    """The checked lists of one file: tokens, kinds, scores and merges."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.tokens = self.strings("tokens")
        kinds = metadata.get("tokenizer.ggml.token_type")
        if kinds is not None and (not isinstance(kinds, list) or len(kinds) != len(self.tokens)):
            raise ModelLoadError(
                f"tokenizer.ggml.token_type must be a list of {len(self.tokens)} kinds, one a token"
            )
        self.kinds: list[int] = [TokenKind.NORMAL] * len(self.tokens) if kinds is None else kinds
        self._drop_padding()

    def strings(self, key: str) -> list[str]:
        values = self.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or not values or not isinstance(values[0], str):
            raise ModelLoadError(f"tokenizer.ggml.{key} is missing or not a list of strings")
        return values

    def named_ids(self) -> dict[str, int]:
        """Ids of the tokens with a role, those the file names."""
        named = {}
        defaults = _LLAMA_IDS if self.metadata["tokenizer.ggml.model"] == "llama" else {}
        for role, key in _ROLES.items():
            token_id = self.metadata.get(f"tokenizer.ggml.{key}_token_id", defaults.get(role))
            if token_id is None:
                continue
            if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
                raise ModelLoadError(
                    f"tokenizer.ggml.{key}_token_id is {str(token_id)[:40]}, but there are "
                    f"{len(self.tokens)} tokens"
                )
            named[role] = token_id
        return named

    def ids(self) -> dict[str, int]:
        """Token to id; of a token listed twice the first id counts."""
        last_to_first = range(len(self.tokens) - 1, -1, -1)
        return dict(zip(reversed(self.tokens), last_to_first, strict=True))

    def of_kind(self, kind: TokenKind) -> list[str]:
        return [t for t, k in zip(self.tokens, self.kinds, strict=True) if k == kind]

    def special_tokens(self) -> list[AddedToken]:
        """Control tokens and the ones with a role: matched whole in a text, not decoded."""
        contents = dict.fromkeys(self.of_kind(TokenKind.CONTROL))
        contents |= dict.fromkeys(self.tokens[i] for i in self.named_ids().values())
        return [AddedToken(c, special=True, normalized=False) for c in contents if c]

    def _drop_padding(self) -> None:
        """Converters fill the vocabulary up to the rows of the embedding with unused tokens."""
        size = len(self.tokens)
        while size and self.kinds[size - 1] == TokenKind.UNUSED:
            size -= 1
        self.tokens, self.kinds = self.tokens[:size], self.kinds[:size]


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's scheme: text as bytes, each spelled as a printable character, merged by rank."""
    pre = vocabulary.metadata.get("tokenizer.ggml.pre")
    rule = split_rule(pre if pre is None else str(pre))
    merges = [tuple(merge.split(" ")) for merge in vocabulary.strings("merges")]
    try:
        model = models.BPE(
            vocab=vocabulary.ids(), merges=merges, ignore_merges=rule.whole_words_first
        )
    except Exception as error:
        raise ModelLoadError(
            f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {str(error)[:200]}"
        ) from error
    backend = tokenizers.Tokenizer(model)
    if rule.normalize_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(vocabulary.special_tokens())
    user_defined = vocabulary.of_kind(TokenKind.USER_DEFINED)
    backend.add_tokens([AddedToken(t, normalized=False) for t in user_defined if t])
    return backend, rule.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Llama's scheme: SentencePiece BPE, described by the score of every piece."""
    scores = vocabulary.metadata.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) < len(vocabulary.tokens)
        or not isinstance(scores[0], float)
    ):
        raise ModelLoadError(
            f"tokenizer.ggml.scores must be a list of {len(vocabulary.tokens)} numbers, one a token"
        )
    pieces = [
        token.replace(" ", SPACE) if kind == TokenKind.USER_DEFINED else token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    kinds = vocabulary.kinds
    if "tokenizer.ggml.token_type" not in vocabulary.metadata:
        kinds = [TokenKind.BYTE if _BYTE_PIECE.fullmatch(p) else TokenKind.NORMAL for p in pieces]
    described = SentencePieceVocabulary(
        pieces,
        scores[: len(pieces)],
        kinds,
        vocabulary.named_ids().get("unk"),
        byte_fallback=TokenKind.BYTE in kinds,
        add_dummy_prefix=bool(vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True)),
    )
    family = str(vocabulary.metadata.get("general.architecture", ""))
    backend = sentencepiece_backend(described, merge_space_runs=family.startswith("gemma"))
    backend.add_special_tokens(vocabulary.special_tokens())
    return backend, True


def _affix(
    metadata: Mapping[str, Any], named: Mapping[str, int], role: str, default: bool
) -> list[int]:
    """The BOS or EOS that this vocabulary puts around a text, if any."""
    wanted = metadata.get(f"tokenizer.ggml.add_{role}_token", default)
    return [named[role]] if wanted and role in named else []
