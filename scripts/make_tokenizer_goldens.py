"""Makes tests/goldens/tokenizer/*.json: 500 texts and the ids transformers gives for them.

    GOLDENS_PYTHON scripts/make_tokenizer_goldens.py smollm2=FILE.gguf gemma3-270m=FILE.gguf

runs in an environment with transformers and gguf (see scripts/make_goldens). Texts are drawn from
a fixed seed out of sentences, code and scripts of many languages, with spaces and newlines where
tokenizers differ.

transformers rebuilds SmolLM2's tokenizer from GGUF without its first step, cutting out single
digits, which the checkpoint's tokenizer.json and llama.cpp ("smollm") both have. It is put back
here; of the 500 texts it matters to those with several spaces in front of a digit.
"""

import json
import random
import sys
from pathlib import Path

import transformers
from tokenizers import pre_tokenizers

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "tokenizer"
NUM_TEXTS = 500

FIXED = (
    "12345 don't\n\n  x é 谁",
    "  hi",
    "   leading",
    "trailing   ",
    "a  5",
    "\t\tx\t",
    "\n\n\nfoo",
    " \n ",
    "<0x0A>",
    "<table><tr>x</tr>",
    "▁▁ a▁b",
    "\x00\x01",
    "DON'T don't we'LL",
    "ﬁ½²Ⅷ⅞",
    "e\u0301 é",
    "\r\n\r\n",
    "x\u3000y\xa0z",
    "\u200b",
    "👩\u200d👩\u200d👧 family",
    "🏳️\u200d🌈🇩🇪",
    "[multimodal]",
    "<unused5>",
    "def f(x):\n        return  x**2  # ok\n",
    "\ufeffBOM",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<start_of_turn>user\n",
    "a<eos>b",
    "1,234.56 + 7e-3 = ?",
    "$x_{i}^{2}$",
    "",
    "a" + " " * 40 + "b",
    "\n\n\n\nfoo",
)

PHRASES = (
    "The quick brown fox jumps over the lazy dog.",
    "I'm sure they've said we'd better not.",
    "In 2024 there were 1234567 cats (and 89 dogs).",
    'for i in range(10):\n\tprint(f"{i:>3}")',
    "SELECT * FROM t WHERE a != 'b' -- why?",
    '<div class="x">&nbsp;</div>',
    "https://example.org/a_b?c=1&d=%20",
    "Größenänderung für Straßenfußgänger",
    "Él está aquí, ¿y tú? ¡Olé!",
    "Ça coûte 12 € à Noël",
    "Zażółć gęślą jaźń",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "مرحبا بالعالم، كيف الحال؟",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "你好，世界。谁知道吗？",
    "こんにちは、世界！カタカナ",
    "안녕하세요 세계",
    "Xin chào thế giới",
    "ሰላም ልዑል",
    "ꙮ 𓀀 𝔘𝔫𝔦 🤖",
    "😀😃😄 :-) ¯\\_(ツ)_/¯",
    '{"key": [1, 2.5, null], "é": "\\u00e9"}',
    "#include <vector>\nint main() { return 0; }",
    "| a | b |\n|---|---|\n",
    "CamelCaseIdentifier snake_case_name kebab-case",
    "aaaaaaaaaaaaaaaaaaaaaaaa",
    "x = y  +  z;  // two spaces",
    "\\frac{a}{b} \\times 10^{-6}",
    "H₂O → CO₂ ≤ ∞ ≠ ½",
    "supercalifragilisticexpialidocious",
)

GLUE = [" ", "  ", "   ", "\n", "\n\n", "\t", " \n", "\n  ", "", ", ", " 7 ", "  42  ", "-"]


def texts() -> list[str]:
    rng = random.Random(20250131)
    result = list(FIXED)
    while len(result) < NUM_TEXTS:
        text = ""
        for _ in range(rng.randint(1, 3)):
            phrase = rng.choice(PHRASES)
            start = rng.randrange(len(phrase))
            text += rng.choice(GLUE) + phrase[start : start + rng.randint(1, 40)]
        if rng.random() < 0.15:
            points = [*range(32, 127), *range(0xA0, 0x250), *range(0x4E00, 0x4E80), 0x1F600]
            text += "".join(chr(rng.choice(points)) for _ in range(rng.randint(1, 8)))
        result.append(text + rng.choice(["", "", " ", "  ", "\n"]))
    return result[:NUM_TEXTS]


def main() -> None:
    GOLDENS.mkdir(parents=True, exist_ok=True)
    corpus = texts()
    dump(GOLDENS / "texts.json", {"texts": corpus})
    for argument in sys.argv[1:]:
        name, _, file = argument.partition("=")
        path = Path(file)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        if name == "smollm2":
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            )
        ids = [tokenizer(text).input_ids for text in corpus]
        decoded = [tokenizer.decode(i, skip_special_tokens=True) for i in ids]
        differing = {n: d for n, (d, t) in enumerate(zip(decoded, corpus, strict=True)) if d != t}
        golden = {"transformers": transformers.__version__, "ids": ids, "decoded": differing}
        dump(GOLDENS / f"{name}.json", golden)


def dump(path: Path, value: dict[str, object]) -> None:
    """One line per text, so that changes can be read."""
    parts = []
    for key, entry in value.items():
        if isinstance(entry, list):
            lines = ",\n".join(json.dumps(e, separators=(",", ":")) for e in entry)
            parts.append(f'"{key}":[\n{lines}\n]')
        else:
            parts.append(f'"{key}":{json.dumps(entry)}')
    path.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    main()
