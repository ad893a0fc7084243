"""Writes tests/eval/perplexity_by_transformers.json: what torch and transformers say of a text.

Runs in the environment that scripts/make_goldens makes, with `gguf` installed too, on the files
that `jaxserve pull` fetched:

    .venv-goldens/bin/python scripts/make_goldens_eval.py smollm2=FILE.gguf gemma3-270m=FILE.gguf

The windows are those of transformers' guide to perplexity of models with a fixed context, written
down here once more; where the tokenizer adds a BOS, every window begins with it.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "examples/eval_text.txt"
OUT = ROOT / "tests/eval/perplexity_by_transformers.json"
CHARACTERS = 1400
WINDOWS = [(512, 256), (64, 32), (64, 50)]  # context, stride


def load(path: Path) -> tuple[Any, Any]:
    """Model, in float32, and tokenizer of a GGUF file."""
    source = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), **source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), dtype=torch.float32, **source
    )
    return model.eval(), tokenizer


@torch.inference_mode()
def negative_logprobs(
    model: Any, ids: list[int], bos: list[int], context: int, stride: int
) -> list[float]:
    """Of every token but those that no window has anything in front of."""
    found: list[float] = []
    previous_end = 0 if bos else 1
    room = context - len(bos)
    for begin in range(0, len(ids), stride):
        end = min(begin + room, len(ids))
        window = torch.tensor(bos + ids[begin:end])
        logprobs = model(window[None]).logits[0].double().log_softmax(-1)
        own = -logprobs[:-1].gather(1, window[1:, None])[:, 0]
        found += own[len(own) - (end - previous_end) :].tolist()
        previous_end = end
        if end == len(ids):
            return found
    raise AssertionError("the last window reaches the end")


def golden(path: Path, text: str) -> dict[str, Any]:
    model, tokenizer = load(path)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    with_bos = tokenizer(text).input_ids
    bos = with_bos[: len(with_bos) - len(ids)]
    runs = []
    for context, stride in WINDOWS:
        nats = negative_logprobs(model, ids, bos, context, stride)
        num_bytes = len(text.encode()) - (0 if bos else len(tokenizer.decode(ids[:1]).encode()))
        runs.append(
            {
                "context": context,
                "stride": stride,
                "num_scored_tokens": len(nats),
                "perplexity": math.exp(sum(nats) / len(nats)),
                "bits_per_byte": sum(nats) / math.log(2) / num_bytes,
                "first_nats": nats[:8],
                "last_nats": nats[-8:],
            }
        )
    return {"num_tokens": len(ids), "bos": bos, "runs": runs}


def main() -> None:
    text = TEXT.read_text(encoding="utf-8")[:CHARACTERS]
    models = dict(argument.split("=", 1) for argument in sys.argv[1:])
    goldens = {name: golden(Path(path), text) for name, path in models.items()}
    OUT.write_text(json.dumps({"text": text, "models": goldens}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
