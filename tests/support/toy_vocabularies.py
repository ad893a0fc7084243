"""Small vocabularies trained in the test by the libraries that define them, and our texts."""

import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

GOLDENS = Path(__file__).resolve().parent.parent / "goldens" / "tokenizer"
SPECIAL = ["<|bos|>", "<|eos|>", "<|im_start|>"]


@cache
def texts() -> tuple[str, ...]:
    """The 500 texts of scripts/make_tokenizer_goldens.py."""
    return tuple(json.loads((GOLDENS / "texts.json").read_text())["texts"])


def train_byte_level(
    pre_tokenizer: pre_tokenizers.PreTokenizer, vocab_size: int = 700, **model_options: Any
) -> tokenizers.Tokenizer:
    """A byte-level BPE as the `tokenizers` library trains it; ids 0 to 2 are SPECIAL."""
    backend = tokenizers.Tokenizer(models.BPE(**model_options))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts(), trainer)
    return backend


def gguf_of_byte_level(backend: tokenizers.Tokenizer, pre: str | None) -> dict[str, Any]:
    """The metadata a converter writes for it."""
    model = json.loads(backend.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    return {key: value for key, value in metadata.items() if value is not None}


@cache
def train_sentencepiece(model_type: str = "bpe", **options: Any) -> bytes:
    """A tokenizer.model as SentencePiece trains it, with Llama's settings unless told otherwise."""
    model = io.BytesIO()
    settings = {
        "vocab_size": 1000,
        "hard_vocab_limit": False,
        "byte_fallback": True,
        "split_digits": True,
        "add_dummy_prefix": True,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "allow_whitespace_only_pieces": True,
        "character_coverage": 0.98,
        "minloglevel": 2,
    }
    options["user_defined_symbols"] = list(options.get("user_defined_symbols", ()))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in texts() if text.strip()]),
        model_writer=model,
        model_type=model_type,
        **(settings | options),
    )
    return model.getvalue()


def gguf_of_sentencepiece(
    model: bytes, user_defined: Sequence[str] = (), **changes: Any
) -> dict[str, Any]:
    """The metadata a converter writes: user-defined pieces with real spaces, kinds, scores."""
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = oracle.vocab_size()
    pieces = [oracle.id_to_piece(token_id) for token_id in range(size)]
    kinds = [4 if pieces[i] in user_defined else _kind(oracle, i) for i in range(size)]
    pieces = [p.replace("▁", " ") if k == 4 else p for p, k in zip(pieces, kinds, strict=True)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [oracle.get_score(token_id) for token_id in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": oracle.bos_id(),
        "tokenizer.ggml.eos_token_id": oracle.eos_id(),
        "tokenizer.ggml.unknown_token_id": oracle.unk_id(),
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _kind(oracle: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    if oracle.is_unknown(token_id):
        return 2
    if oracle.is_control(token_id):
        return 3
    return 6 if oracle.is_byte(token_id) else 1
