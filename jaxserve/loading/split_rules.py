"""How byte-level vocabularies cut text before merging, by the name GGUF stores for it.

A GGUF file carries no pattern, only a name (`tokenizer.ggml.pre`). With the wrong pattern a model
still answers, from more and unfamiliar tokens, so a name that is not in this table is an error and
not a guess. Patterns are those of the families' own tokenizer.json files.
"""

import logging
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from jaxserve.errors import ModelLoadError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplitRule:
    """patterns cut the text one after the other; what lies between matches is a piece, too.

    whole_words_first: a piece that is a token is taken as it is, without merging.
    normalize_nfc: text is composed (Unicode NFC) first. adds_bos: default of a file without
    `add_bos_token`.
    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    normalize_nfc: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])


_ENGLISH_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGITS_THEN_GPT2 = (r"\p{N}", *_GPT2)
_LLAMA3 = (_ENGLISH_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _PUNCTUATION_AND_SPACE,)
_QWEN2 = (_ENGLISH_ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _PUNCTUATION_AND_SPACE,)

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_RULES = {
    "gpt-2": SplitRule(_GPT2),
    "phi-2": SplitRule(_GPT2),
    "mpt": SplitRule(_GPT2),
    "olmo": SplitRule(_GPT2),
    "smollm": SplitRule(_DIGITS_THEN_GPT2),
    "starcoder": SplitRule(_DIGITS_THEN_GPT2),
    "llama-bpe": SplitRule(_LLAMA3, whole_words_first=True, adds_bos=True),
    "llama3": SplitRule(_LLAMA3, whole_words_first=True, adds_bos=True),
    "llama-v3": SplitRule(_LLAMA3, whole_words_first=True, adds_bos=True),
    "qwen2": SplitRule(_QWEN2, normalize_nfc=True),
    "deepseek-r1-qwen": SplitRule(_QWEN2),
    "tekken": SplitRule(_TEKKEN, whole_words_first=True, adds_bos=True),
}


def split_rule(name: str | None) -> SplitRule:
    """The rule of a `tokenizer.ggml.pre` name; ModelLoadError if it is not known.

    Old files (before May 2024) name none or "default": they get GPT-2's rule and a warning.
    """
    if name is None or name == "default":
        logger.warning(
            "the GGUF file does not say how its vocabulary splits text (tokenizer.ggml.pre is %s); "
            "using GPT-2's rule. If the model is not GPT-2's kin, answers suffer: use a file "
            "converted since May 2024",
            "missing" if name is None else "'default'",
        )
        return _RULES["gpt-2"]
    if name not in _RULES:
        raise ModelLoadError(
            f"tokenizer.ggml.pre is {name[:60]!r}, and how it splits text is not known here; "
            f"known are {', '.join(sorted(_RULES))}. Load the model from its Hugging Face folder"
        )
    return _RULES[name]
