"""Small GGUF files, written as the converters write them: with the gguf package, its own names.

Nothing here comes from jaxserve.loading, so that a test compares two ways of thinking.
"""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

Q = GGMLQuantizationType

ARCHITECTURES = {
    "LlamaForCausalLM": (gguf.MODEL_ARCH.LLAMA, "llama"),
    "Qwen2ForCausalLM": (gguf.MODEL_ARCH.QWEN2, "qwen2"),
    "Qwen3ForCausalLM": (gguf.MODEL_ARCH.QWEN3, "qwen3"),
    "Gemma3ForCausalLM": (gguf.MODEL_ARCH.GEMMA3, "gemma3"),
}


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """A file of these tensors; those named in `types` are quantised (bytes, uint8, are taken as
    quantised already), the others keep their type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, _value_type(value))
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            packed = array if array.dtype == np.uint8 else gguf.quantize(array, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _value_type(value: Any) -> GGUFValueType:
    by_type = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    return by_type[type(value)]


def model_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that the converter derives from a config.json (without the tokenizer)."""
    _, prefix = ARCHITECTURES[config["architectures"][0]]
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if prefix == "llama":
        values["rope.dimension_count"] = config["head_dim"]
    if prefix == "gemma3":
        values["attention.sliding_window"] = config["sliding_window"]
    return {f"{prefix}.{key}": value for key, value in values.items()}


def to_gguf(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face tensors under GGUF's names and in GGUF's layout."""
    arch, prefix = ARCHITECTURES[config["architectures"][0]]
    name_map = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    result = {}
    for name, tensor in tensors.items():
        if prefix == "llama" and "q_proj" in name:
            tensor = permute(tensor, config["num_attention_heads"])
        if prefix == "llama" and "k_proj" in name:
            tensor = permute(tensor, config["num_key_value_heads"])
        if prefix == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        result[name_map.get_name(name, (".weight", ".bias"))] = tensor
    return result


def permute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order of the rows of Q and K: row i of a head's first half, then row i of
    its second half, for every i."""
    rows = tensor.shape[0] // heads
    order = [
        head * rows + half * (rows // 2) + pair
        for head in range(heads)
        for pair in range(rows // 2)
        for half in range(2)
    ]
    return tensor[order]


def random_packed(
    shape: tuple[int, int], kind: GGMLQuantizationType, rng: np.random.Generator
) -> np.ndarray:
    """Bytes of a matrix of this type, which the gguf package need not be able to quantise to, with
    scales of a layer's size: uint8 [rows, bytes]."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = shape[0] * shape[1] // block_size
    blocks = rng.integers(0, 256, (count, block_bytes), np.uint8)
    for offset in _HALVES[kind]:
        halves = rng.normal(scale=0.02, size=(count, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    if kind == Q.MXFP4:
        blocks[:, 0] = rng.integers(118, 126, count)
    return blocks.reshape(shape[0], -1)


# Where a block has float16 numbers: its scale, and its offset or the scale of its minima.
_HALVES = {
    Q.Q4_0: (0,), Q.Q4_1: (0, 2), Q.Q5_0: (0,), Q.Q5_1: (0, 2), Q.Q8_0: (0,), Q.MXFP4: (),
    Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,), Q.Q2_K: (80, 82), Q.IQ4_NL: (0,),
}  # fmt: skip


def tokenizer_metadata() -> dict[str, Any]:
    """A byte-level tokenizer of 259 ids: 256 bytes, one merge, <|endoftext|>, <|im_end|>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(rest)}
    tokens = [letters[byte] for byte in range(256)] + ["ab", "<|endoftext|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.add_bos_token": False,
    }


def raw_string(text: str | bytes) -> bytes:
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def raw_entry(key: str, kind: GGUFValueType, value: bytes) -> bytes:
    """A metadata entry from its encoded value."""
    return raw_string(key) + struct.pack("<I", kind) + value


def raw_tensor(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor description; dims in the file's order, columns first."""
    encoded = struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", dim) for dim in dims)
    return raw_string(name) + encoded + struct.pack("<IQ", kind, offset)


def raw_gguf(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    order: str = "<",
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    """A file from parts, however wrong: what no writer would write."""
    counts = struct.pack(
        f"{order}IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    header = magic + counts + b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data
