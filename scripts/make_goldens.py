"""Runs transformers in float32 on tiny random checkpoints and writes tests/goldens/*.json, and
what its RoPE rules give at real sizes to tests/goldens/rope/rules.json.

Started by scripts/make_goldens in an environment with torch. A golden holds a config, a seed and
what came out; the weights are drawn again from the seed by the tests (jaxserve.loading.random_init,
loaded here by path, since this environment has no jax). Seeds are tried in turn until the margin
between first and second choice is wide at every greedy step, so that ids must agree exactly.
"""

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
NEW_TOKENS = 24
MIN_MARGIN = 2e-3
VOCAB = 101

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 24,
    "sliding_window": 9,
}

# Both generations of config.json appear: rope_scaling beside rope_theta, and rope_parameters.
CASES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied-biases": LLAMA
    | {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu",
        "num_key_value_heads": 6,
    },
    "llama-linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-dynamic": LLAMA
    | {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 48},
    "llama-yarn": LLAMA
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "llama-yarn-mscale": {key: LLAMA[key] for key in LLAMA if not key.startswith("rope_")}
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "truncate": False,
        }
    },
    "llama-llama3": LLAMA
    | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral-window": MISTRAL | {"sliding_window": 12},
    "qwen2": QWEN2 | {"use_sliding_window": False, "tie_word_embeddings": True},
    "qwen2-layered-window": QWEN2
    | {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    "qwen3": QWEN3 | {"attention_bias": False},
    "gemma3": GEMMA3
    | {"sliding_window_pattern": 2, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0},
    "gemma3-scaled": GEMMA3
    | {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "final_logit_softcapping": 8.0,
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}

# (parameters, head_dim, max_position_embeddings, lengths at which the frequencies are wanted)
ROPE_CASES: dict[str, tuple[dict[str, Any], int, int, list[int]]] = {
    "default": ({"rope_type": "default", "rope_theta": 100000.0}, 64, 8192, [8192]),
    "linear": ({"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, 256, 131072, [131072]),
    "dynamic": (
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        128, 2048, [1, 2048, 2049, 3000, 4096],
    ),
    "llama3": (
        {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
        64, 131072, [131072],
    ),
    "yarn": (
        {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
        128, 131072, [131072],
    ),
    "yarn-everything": (
        {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 24.0,
            "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        64, 163840, [163840],
    ),
    "yarn-attention-factor": (
        {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "attention_factor": 0.9,
            "original_max_position_embeddings": 4096,
        },
        64, 8192, [8192],
    ),
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or list(CASES)
    unknown = [name for name in wanted if name not in CASES]
    if unknown:
        sys.exit(f"make_goldens: no case {unknown}; cases are {', '.join(CASES)}")
    (GOLDENS / "rope").mkdir(parents=True, exist_ok=True)
    write(GOLDENS / "rope" / "rules.json", rope_rules())
    for name in wanted:
        golden = make_golden(name, CASES[name])
        print(f"{name}: seed {golden['seed']}, margin {golden['min_margin']:.4f}")
        write(GOLDENS / f"{name}.json", golden)


def write(path: Path, golden: dict[str, Any]) -> None:
    golden["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")


def rope_rules() -> dict[str, Any]:
    """For every rule, the frequencies at each length and the scaling of cosine and sine."""
    rules = {}
    for name, (parameters, head_dim, max_position, lengths) in ROPE_CASES.items():
        config = transformers.LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rope_parameters=dict(parameters),
        )
        rule = ROPE_INIT_FUNCTIONS.get(
            parameters["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters
        )
        inv_freq = {}
        for length in lengths:
            frequencies, scaling = rule(config, device="cpu", seq_len=length)
            inv_freq[str(length)] = frequencies.tolist()
        rules[name] = {
            "parameters": parameters,
            "head_dim": head_dim,
            "max_position_embeddings": max_position,
            "inv_freq": inv_freq,
            "attention_scaling": scaling,
        }
    return {"rules": rules}


def make_golden(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The first seed whose greedy ids are all decided by a wide margin, and what it gives."""
    for seed in range(100):
        golden = run(name, config, seed)
        if golden["min_margin"] >= MIN_MARGIN:
            return golden
    raise SystemExit(f"make_goldens: {name}: no seed below 100 gives margins above {MIN_MARGIN}")


def run(name: str, config: dict[str, Any], seed: int) -> dict[str, Any]:
    model = build(config)
    shapes = checkpoint_shapes(model)
    center = 0.0 if config["model_type"].startswith("gemma") else 1.0
    tensors = random_init().random_tensors(shapes, seed, center)
    state = {key: torch.from_numpy(value) for key, value in tensors.items()}
    missing, surplus = model.load_state_dict(state, strict=False)
    assert not surplus, surplus
    assert set(missing) <= {"lm_head.weight"}, missing
    prompt = np.random.Generator(np.random.PCG64(seed)).integers(0, VOCAB, 40).tolist()
    logits, ids, margins = greedy(model, prompt)
    last = len(prompt) + NEW_TOKENS - 1
    kept = (0, 7, 19, len(prompt) - 1, len(prompt) + NEW_TOKENS // 2, last)
    return {
        "name": name,
        "config": config,
        "seed": seed,
        "norm_center": center,
        "shapes": {key: list(shape) for key, shape in shapes.items()},
        "prompt": prompt,
        "ids": ids,
        "min_margin": min(margins),
        "logits": {str(at): [float(f"{x:.7g}") for x in logits[at].tolist()] for at in kept},
    }


def build(config: dict[str, Any]) -> Any:
    """The transformers model of a config.json, in float32, on plain attention."""
    config_class = type(transformers.AutoConfig.for_model(config["model_type"]))
    parsed = config_class.from_dict(copy.deepcopy(config))
    parsed._attn_implementation = "eager"
    model_class = getattr(transformers, config["architectures"][0])
    return model_class(parsed).to(torch.float32).eval()


def checkpoint_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """What a saved checkpoint would hold: a tied output matrix is not in it."""
    tied = model.config.tie_word_embeddings
    return {
        key: tuple(value.shape)
        for key, value in model.state_dict().items()
        if not (tied and key == "lm_head.weight")
    }


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> tuple[np.ndarray, list[int], list[float]]:
    """Logits of every position, the greedy ids, and the margin of each. Fed with a cache."""
    out = model(torch.tensor([prompt]), use_cache=True)
    rows = [out.logits[0].numpy()]
    ids: list[int] = []
    margins: list[float] = []
    while True:
        last = rows[-1][-1]
        second, first = np.sort(last)[-2:]
        margins.append(float(first - second))
        ids.append(int(last.argmax()))
        out = model(torch.tensor([[ids[-1]]]), cache=out.past_key_values, use_cache=True)
        rows.append(out.logits[0].numpy())
        if len(ids) == NEW_TOKENS:
            return np.concatenate(rows), ids, margins


def random_init() -> ModuleType:
    path = ROOT / "jaxserve" / "loading" / "random_init.py"
    spec = importlib.util.spec_from_file_location("random_init", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
