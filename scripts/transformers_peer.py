"""The transformers side of scripts/bench_vs_transformers.py; runs in an environment with torch.

Reads one JSON command a line on stdin and answers with one JSON line on stdout:
  {"load": "path of a GGUF file"}                          -> versions, threads
  {"prompts": [[ids], ...], "new_tokens": n, "batch": b}   -> seconds, the output ids
batch true: one `generate` call for all prompts (equal lengths, so nothing is padded in fact);
false: one call per prompt, one after another. Greedy, EOS ignored, everything else default.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import torch
import transformers


def load(path: str) -> Any:
    """The model in float32, dequantised by transformers from the GGUF file."""
    file = Path(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    )
    model.eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """One `generate` call; returns the new ids of each prompt."""
    ids = torch.tensor(prompts)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )
    return [row[ids.shape[1] :].tolist() for row in out]


def run(model: Any, command: dict[str, Any]) -> dict[str, Any]:
    prompts, new_tokens = command["prompts"], command["new_tokens"]
    start = time.perf_counter()
    if command["batch"]:
        outputs = generate(model, prompts, new_tokens)
    else:
        outputs = [generate(model, [prompt], new_tokens)[0] for prompt in prompts]
    return {"seconds": time.perf_counter() - start, "outputs": outputs}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print goes to stderr
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = None
    for line in sys.stdin:
        command = json.loads(line)
        if "load" in command:
            model = load(command["load"])
            answer: dict[str, Any] = {
                "python": sys.version.split()[0],
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "threads": torch.get_num_threads(),
                "attention": model.config._attn_implementation,
                "dtype": str(model.dtype),
            }
        else:
            answer = run(model, command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
