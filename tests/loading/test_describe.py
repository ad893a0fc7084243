"""What headers say a model takes is what loading it takes, array by array."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import ModelLoadError, PullError
from jaxserve.loading.assemble import assemble, random_params
from jaxserve.loading.describe import describe_model
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.gguf_tensors import GGUFTensors
from jaxserve.loading.hf_quantization import open_quantized
from jaxserve.loading.quantize_on_load import QuantizingSource
from jaxserve.models.llama import MODEL
from pallas_kernels import native
from tests.support import quantized_checkpoints as make
from tests.support.gguf_files import Q, model_metadata, to_gguf, tokenizer_metadata, write_gguf
from tests.support.packed_ways import WAYS
from tests.support.tiny_checkpoints import LLAMA, tiny_tensors

LAYOUTS = ["rows"] + ["panels"] * (native.why_not() is None)
CONFIG = MODEL.config_from_hf(LLAMA)
Q_TYPES = {"attn_q": Q.Q4_0, "attn_k": Q.Q8_0, "ffn_down": Q.Q5_1, "token_embd": Q.F16}


def shapes(params: Any) -> tuple[Any, list[tuple[tuple[int, ...], str]]]:
    """Structure and shape of every array of a tree."""
    leaves, structure = jax.tree.flatten(params)
    return structure, [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves]


def write_config(folder: Path, settings: Any = None) -> None:
    config = LLAMA if settings is None else LLAMA | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("way", WAYS)
def test_packed_folders(way: str, layout: str | None, tmp_path: Path) -> None:
    settings, maker = WAYS[way]
    stored, _ = make.packed_checkpoint(
        tiny_tensors(LLAMA), partial(maker, np.random.default_rng(3))
    )
    save_file(dict(stored), tmp_path / "model.safetensors")
    write_config(tmp_path, settings)
    source = open_quantized(tmp_path, LLAMA | {"quantization_config": settings})
    loaded = assemble(MODEL, CONFIG, source, "bfloat16", layout=layout)
    described = describe_model(str(tmp_path), dtype="bfloat16", weight_layout=layout)
    assert shapes(described.params) == shapes(loaded)
    assert described.source == f"config.json and headers of {tmp_path.name}"


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_files(layout: str | None, dtype: str, tmp_path: Path) -> None:
    tensors = to_gguf(LLAMA, tiny_tensors(LLAMA))
    types = {name: kind for name in tensors for part, kind in Q_TYPES.items() if part in name}
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", model_metadata(LLAMA) | tokenizer_metadata(), tensors, types)
    file = GGUFFile(path)
    config = hf_config(file)
    loaded = assemble(
        MODEL, MODEL.config_from_hf(config), GGUFTensors(file, 4, 2), dtype, layout=layout
    )
    described = describe_model(str(path), dtype=dtype, weight_layout=layout)
    assert shapes(described.params) == shapes(loaded)
    assert (described.name, described.vocab_size, described.max_model_len) == ("tiny", 272, 128)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_while_loading(quantization: str, layout: str, tmp_path: Path) -> None:
    save_file(tiny_tensors(LLAMA), tmp_path / "model.safetensors")
    write_config(tmp_path)
    source = QuantizingSource(open_quantized(tmp_path, LLAMA), quantization)
    loaded = assemble(MODEL, CONFIG, source, "float32", layout=layout)
    described = describe_model(
        str(tmp_path), dtype="float32", weight_layout=layout, quantization=quantization
    )
    assert shapes(described.params) == shapes(loaded)


@pytest.mark.parametrize(("layout", "quantization"), [(None, None), ("rows", "int4")])
def test_a_config_alone_is_a_model_drawn_at_random(
    layout: str | None, quantization: str | None, tmp_path: Path
) -> None:
    write_config(tmp_path)
    drawn = random_params(MODEL, CONFIG, 0, "bfloat16", layout, quantization)
    for path in (tmp_path, tmp_path / "config.json"):
        described = describe_model(
            str(path), dtype="bfloat16", weight_layout=layout, quantization=quantization
        )
        assert shapes(described.params) == shapes(drawn)
        assert described.source == "config.json alone, weights drawn at random"


def test_packed_already_is_not_packed_again(tmp_path: Path) -> None:
    tensors = to_gguf(LLAMA, tiny_tensors(LLAMA))
    types = {name: gguf.GGMLQuantizationType.Q8_0 for name in tensors if "ffn" in name}
    types = {name: kind for name, kind in types.items() if "norm" not in name}
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "llama", model_metadata(LLAMA) | tokenizer_metadata(), tensors, types)
    with pytest.raises(ModelLoadError, match=r"packed already \(q8_0\); leave out --quantization"):
        describe_model(str(path), dtype="float32", weight_layout="rows", quantization="int8")


def test_errors_say_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(PullError, match="is no file or folder here"):
        describe_model(str(tmp_path / "absent"), dtype="float32")
    with pytest.raises(ModelLoadError, match=r"config\.json: there is no such file"):
        describe_model(str(tmp_path), dtype="float32")
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"want a \.gguf file, a folder with config\.json"):
        describe_model(str(tmp_path / "weights.bin"), dtype="float32")
    write_config(tmp_path)
    with pytest.raises(ModelLoadError, match="a pickle, which can run any code"):
        describe_model(str(tmp_path), dtype="float32")
