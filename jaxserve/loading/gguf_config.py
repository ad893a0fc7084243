"""The configuration of a GGUF file, in the terms of Hugging Face's config.json.

So a model reads one kind of configuration, wherever its weights come from. Values that GGUF leaves
to the program (the shared embedding, Gemma's pattern of layers) are spelled out.
"""

import math
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.loading.gguf_file import GGUFFile

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}

MAX_SIZE = 1 << 24  # of any dimension, vocabulary and context included
MAX_ROPE_FACTORS = 1 << 12
SMALLEST_NUMBER, LARGEST_NUMBER = 1e-30, 1e15  # any real one lies far inside; excludes NaN

# Gemma 3 facts that its GGUF files leave out (Gemma 3 report, arXiv:2503.19786, and config.json).
GEMMA3_LOCAL_ROPE_BASE = 10_000.0
GEMMA3_SLIDING_PATTERN = 6  # every sixth layer is global
GEMMA3_27B_LAYERS = 62  # the one size that scales queries by hidden_size / heads


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """config.json's keys for a GGUF file. ModelLoadError names file and metadata key.

    rope_freqs.weight becomes rope_scaling = {"rope_type": "factors", "factors": divisors}.
    """
    return _Reader(file).config()


class _Reader:
    """Typed access to `<architecture>.<key>` of the metadata."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{file.path}: general.architecture is {str(architecture)[:60]!r}; GGUF files can "
                f"be {', '.join(_ARCHITECTURES)}. Other models: convert to a safetensors folder "
                "and pass --model-file"
            )
        self.architecture = architecture

    def config(self) -> dict[str, Any]:
        """The keys all architectures share, then what each adds."""
        hidden_size = self.size("embedding_length")
        num_heads = self.size("attention.head_count")
        head_dim = self.size("attention.key_length", hidden_size // num_heads)
        num_layers = self._num_layers()
        self._refuse_what_is_not_computed(head_dim)
        config = {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_size": hidden_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.size("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "intermediate_size": self.size("feed_forward_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self.size("context_length"),
            "vocab_size": self._embedding_rows(),
            "tie_word_embeddings": "output.weight" not in self.file,
            "rope_theta": self.number("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": "blk.0.attn_q.bias" in self.file,
            "mlp_bias": "blk.0.ffn_gate.bias" in self.file,
        }
        if self.architecture == "gemma3":
            config |= self._gemma3(hidden_size, num_heads, head_dim, num_layers)
        elif self.architecture == "llama" and self.get("attention.sliding_window"):
            config["architectures"] = ["MistralForCausalLM"]
            config["sliding_window"] = self.size("attention.sliding_window")
        return config

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def fail(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file.path}: metadata {self.architecture}.{key} {problem}")

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number in [1, MAX_SIZE]; a list (one value a layer) if all are equal."""
        value = self.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, list):
            raise self.fail(key, "differs between layers, which is not supported")
        if value is None:
            value = default
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise self.fail(key, f"{_shown(value)}; want a whole number 1 to {MAX_SIZE}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. float32 metadata is read as the decimal that was written."""
        value = self.get(key)
        if value is None:
            value = default
        usable = isinstance(value, int | float) and not isinstance(value, bool)
        if not usable or not SMALLEST_NUMBER < value < LARGEST_NUMBER:
            raise self.fail(key, f"{_shown(value)}; want a number above 0")
        return float(str(np.float32(value)))

    def _num_layers(self) -> int:
        num_layers = self.size("block_count")
        layers = {name.split(".")[1] for name in self.file.names() if name.startswith("blk.")}
        if len(layers) != num_layers:
            raise self.fail(
                "block_count", f"is {num_layers}, but {len(layers)} blocks have tensors"
            )
        return num_layers

    def _embedding_rows(self) -> int:
        shape = self.file.shape("token_embd.weight")
        if len(shape) != 2:
            raise ModelLoadError(
                f"{self.file.path}: tensor 'token_embd.weight' is {list(shape)}; want a matrix"
            )
        return shape[0]

    def _refuse_what_is_not_computed(self, head_dim: int) -> None:
        if self.get("expert_count"):
            raise self.fail("expert_count", "is set: mixtures of experts are not supported")
        if self.size("attention.value_length", head_dim) != head_dim:
            raise self.fail("attention.value_length", f"differs from the key length {head_dim}")
        if self.size("rope.dimension_count", head_dim) != head_dim:
            raise self.fail(
                "rope.dimension_count", f"rotates a part of the {head_dim} of a head: not supported"
            )

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self.get("rope.scaling.type")
        if "rope_freqs.weight" in self.file:
            if kind not in (None, "none"):
                raise self.fail("rope.scaling.type", "is set beside the tensor rope_freqs.weight")
            if math.prod(self.file.shape("rope_freqs.weight")) > MAX_ROPE_FACTORS:
                raise ModelLoadError(
                    f"{self.file.path}: tensor 'rope_freqs.weight' has the shape "
                    f"{list(self.file.shape('rope_freqs.weight'))}; want a number per pair"
                )
            factors = self.file.load("rope_freqs.weight").reshape(-1)
            return {"rope_type": "factors", "factors": tuple(factors.tolist())}
        if kind is None and self.get("rope.scale_linear") is not None:  # files of 2023
            return {"rope_type": "linear", "factor": self.number("rope.scale_linear")}
        if kind in (None, "none"):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            return self._yarn()
        raise self.fail("rope.scaling.type", f"is {str(kind)[:40]!r}; known: none, linear, yarn")

    def _yarn(self) -> dict[str, Any]:
        """ggml multiplies its own attention factor, 1 + 0.1 ln(factor), by attn_factor."""
        factor = self.number("rope.scaling.factor")
        for key in ("yarn_ext_factor", "yarn_attn_factor", "yarn_log_multiplier"):
            if self.get(f"rope.scaling.{key}") is not None:
                raise self.fail(f"rope.scaling.{key}", "is set, which is not supported")
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.size("rope.scaling.original_context_length"),
        }
        for name in ("beta_fast", "beta_slow"):
            if self.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = self.number(f"rope.scaling.yarn_{name}")
        if self.get("rope.scaling.attn_factor") is not None:
            own = 1 + 0.1 * math.log(factor) if factor > 1 else 1.0
            scaling["attention_factor"] = own * self.number("rope.scaling.attn_factor")
        return scaling

    def _gemma3(
        self, hidden_size: int, num_heads: int, head_dim: int, num_layers: int
    ) -> dict[str, Any]:
        largest = num_layers == GEMMA3_27B_LAYERS
        return {
            "rope_theta": self.number("rope.freq_base", 1_000_000.0),
            "rope_local_base_freq": self.number("rope.freq_base_swa", GEMMA3_LOCAL_ROPE_BASE),
            "sliding_window": self.size("attention.sliding_window"),
            "layer_types": self._gemma3_layer_types(num_layers),
            "query_pre_attn_scalar": hidden_size // num_heads if largest else head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": self._optional_number("final_logit_softcapping"),
            "attn_logit_softcapping": self._optional_number("attn_logit_softcapping"),
        }

    def _gemma3_layer_types(self, num_layers: int) -> list[str]:
        """From a period, or from a list that is true where a layer is sliding."""
        pattern = self.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            if len(pattern) != num_layers or not all(isinstance(item, bool) for item in pattern):
                raise self.fail(
                    "attention.sliding_window_pattern", f"wants {num_layers} booleans, one a layer"
                )
            sliding = pattern
        else:
            period = self.size("attention.sliding_window_pattern", GEMMA3_SLIDING_PATTERN)
            sliding = [(layer + 1) % period != 0 for layer in range(num_layers)]
        return ["sliding_attention" if local else "full_attention" for local in sliding]

    def _optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)


def _shown(value: Any) -> str:
    return "is missing" if value is None else f"is {str(value)[:40]}"
