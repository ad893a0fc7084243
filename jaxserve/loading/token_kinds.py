"""What a vocabulary entry is for: the numbers that SentencePiece and GGUF share."""

import enum


class TokenKind(enum.IntEnum):
    """`SentencePiece.Type` in sentencepiece_model.proto, `tokenizer.ggml.token_type` in GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6
