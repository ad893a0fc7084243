"""GGUF tensors under Hugging Face's names and in Hugging Face's layout.

The converter to GGUF renames tensors and changes two kinds of them, which is undone here:
queries and keys of the `llama` architecture have the rows of each head reordered, so that the two
halves that RoPE rotates against each other alternate; and Gemma's norms have the 1, which
Gemma's own code adds to them when it runs, added already.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.loading.aligned_array import aligned_empty
from jaxserve.loading.gguf_file import GGUFFile
from pallas_kernels.quantized_matmul.array import QuantizedArray

_MODEL_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TWO_NORMS = {"post_attention_layernorm": "ffn_norm"}
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

# Tables a program computes for itself. rope_freqs is read by gguf_config instead.
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")

_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GGUFTensors:
    """A TensorSource over a GGUF file of a known architecture (see gguf_config).

    A tensor whose name has no counterpart keeps its own, so that it is reported, not lost.
    """

    def __init__(self, file: GGUFFile, num_heads: int, num_kv_heads: int) -> None:
        architecture = file.metadata.get("general.architecture")
        self.location = str(file.path)
        self._file = file
        self._gemma = architecture == "gemma3"
        self._heads_of_permuted: dict[str, int] = {}
        if architecture == "llama":
            self._heads_of_permuted = {"attn_q": num_heads, "attn_k": num_kv_heads}
        self._layer_names = _LAYER_NAMES | (_FOUR_NORMS if self._gemma else _TWO_NORMS)
        self._hf_layer_names = {gguf: hf for hf, gguf in self._layer_names.items()}
        self._gguf_names = {
            self._hf_name(name): name for name in file.names() if not _NOT_WEIGHTS.fullmatch(name)
        }

    def names(self) -> Iterable[str]:
        return self._gguf_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(self._gguf_names[name])

    def load(self, name: str) -> np.ndarray:
        gguf_name = self._gguf_names[name]
        values = self._file.load(gguf_name)
        order = self._row_order(gguf_name)
        if order is not None:
            return _reordered(values, order)
        if self._gemma and name.endswith("norm.weight"):
            values -= np.float32(1)
        return values

    def load_packed(self, name: str) -> QuantizedArray:
        """A matrix as the file has it; its rows are reordered whole, which loses nothing."""
        gguf_name = self._gguf_names[name]
        packed = self._file.load_packed(gguf_name)
        order = self._row_order(gguf_name)
        if order is None:
            return packed
        parts = {part: _reordered(np.asarray(rows), order) for part, rows in packed.parts.items()}
        return replace(packed, parts=parts)

    def packed_shape(self, name: str) -> QuantizedArray:
        return self._file.packed_shape(self._gguf_names[name])

    def label(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        layer = _HF_LAYER.fullmatch(name)
        if layer and layer[2] in self._layer_names:
            return f"blk.{layer[1]}.{self._layer_names[layer[2]]}.{layer[3]}"
        return f"{_MODEL_NAMES[stem]}.{kind}" if stem in _MODEL_NAMES else name

    def _hf_name(self, name: str) -> str:
        layer = _GGUF_LAYER.fullmatch(name)
        if layer and layer[2] in self._hf_layer_names:
            return f"model.layers.{layer[1]}.{self._hf_layer_names[layer[2]]}.{layer[3]}"
        stem, _, kind = name.rpartition(".")
        for hf_stem, gguf_stem in _MODEL_NAMES.items():
            if stem == gguf_stem:
                return f"{hf_stem}.{kind}"
        return name

    def _row_order(self, name: str) -> np.ndarray | None:
        """Which row of the file each row of the tensor is; None where they are as they should be.

        Rows of each head: [pair, half] -> [half, pair]. Biases are reordered like matrices.
        """
        layer = _GGUF_LAYER.fullmatch(name)
        heads = self._heads_of_permuted.get(layer[2]) if layer else None
        if heads is None:
            return None
        rows = self._file.shape(name)[0]
        if rows % (2 * heads):
            raise ModelLoadError(
                f"{self.location}: tensor {name!r} has {rows} rows, which {heads} heads of an even "
                "size cannot share"
            )
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _reordered(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """values[order], in an array as load() promises it."""
    out = aligned_empty(values.shape, values.dtype)
    out[...] = values[order]
    return out
