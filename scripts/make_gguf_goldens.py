"""Makes tests/goldens/gguf/*.json: how transformers reads the GGUF files that jaxserve pulls.

    GOLDENS_PYTHON scripts/make_gguf_goldens.py smollm2=FILE.gguf gemma3-270m=FILE.gguf

runs in an environment with torch, transformers and gguf (see scripts/make_goldens). Kept are
the configuration and, of every float32 tensor, its shape, the SHA-256 of its bytes and a few
values: enough to compare names, layout and dequantisation with a program that shares no code.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "gguf"
CONFIG_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_bias",
    "sliding_window",
    "layer_types",
    "query_pre_attn_scalar",
    "hidden_activation",
    "hidden_act",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    values = tensor.detach().numpy()
    flat = values.reshape(-1)
    return {
        "shape": list(values.shape),
        "sha256": hashlib.sha256(values.tobytes()).hexdigest(),
        "some": [float(flat[i]) for i in (0, flat.size // 3, flat.size - 1)],
    }


def golden(path: Path) -> dict[str, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    config = model.config.to_dict()
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]  # the embedding under another name
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": {key: config[key] for key in CONFIG_KEYS if key in config},
        "tensors": {name: describe(tensor) for name, tensor in tensors.items()},
    }


def as_text(content: dict[str, Any]) -> str:
    """JSON with a line per tensor: a change of one shows as one line."""
    tensors = content["tensors"]
    lines = [f"  {json.dumps(name)}: {json.dumps(tensors[name])}" for name in tensors]
    head = json.dumps({key: content[key] for key in content if key != "tensors"}, indent=1)
    return head[:-2] + ',\n "tensors": {\n' + ",\n".join(lines) + "\n }\n}\n"


def main() -> None:
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        target = GOLDENS / f"{name}.json"
        target.write_text(as_text(golden(Path(path))))
        print(f"wrote {target.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
