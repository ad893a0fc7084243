"""Parameters from tensors: all of them, in the right places, or one error that names the rest."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file

from jaxserve.core.backends import make_ops
from jaxserve.errors import ModelLoadError
from jaxserve.loading import assemble as assemble_module
from jaxserve.loading.aligned_array import aligned_copy, aligned_empty
from jaxserve.loading.assemble import assemble, random_params
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.gguf_tensors import GGUFTensors
from jaxserve.loading.random_init import random_tensors, standard_noise
from jaxserve.loading.safetensors_file import SafetensorsFolder
from jaxserve.loading.tensor_source import ArraySource, TensorSource
from jaxserve.models.base import Config, ModelDef, Params, ParamSpec, WeightNames
from jaxserve.models.llama import MODEL
from jaxserve.models.registry import find_model
from tests.support.gguf_files import Q, model_metadata, to_gguf, write_gguf
from tests.support.paged_model import load_golden, params_of_tensors
from tests.support.tiny_checkpoints import LLAMA, tiny_tensors

TIED = LLAMA | {"tie_word_embeddings": True}


def refusal(source: TensorSource, model: ModelDef = MODEL, hf: dict[str, Any] = LLAMA) -> str:
    with pytest.raises(ModelLoadError) as caught:
        assemble(model, model.config_from_hf(hf), source, "float32")
    return str(caught.value)


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases", "qwen2", "qwen3", "gemma3-scaled"])
def test_every_tensor_lands_where_it_belongs(name: str) -> None:
    golden = load_golden(name)
    model = find_model(golden["config"]["architectures"][0])
    config = model.config_from_hf(golden["config"])
    shapes = {name: tuple(shape) for name, shape in golden["shapes"].items()}
    tensors = random_tensors(shapes, golden["seed"], golden["norm_center"])
    params = assemble(model, config, ArraySource(tensors), "float32")
    expected = params_of_tensors(model, config, tensors)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, want)


def test_missing_surplus_and_misshaped_tensors_are_one_error() -> None:
    tensors = tiny_tensors(LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.sinks"] = np.ones(4, np.float32)
    tensors["model.layers.0.mlp.down_proj.weight"] = np.ones((64, 95), np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.ones((33, 64), np.float32)
    assert refusal(ArraySource(tensors, "folder/x")) == (
        "folder/x: the tensors do not fit the model. "
        "2 missing: model.layers.1.mlp.up_proj.weight; model.norm.weight. "
        "1 not wanted by the model: model.layers.0.self_attn.sinks. "
        "2 of another shape: model.layers.0.mlp.down_proj.weight [64, 95] for layers.0.down "
        "[64, 96]; model.layers.0.self_attn.q_proj.weight [64, 64], "
        "model.layers.0.self_attn.k_proj.weight [33, 64], "
        "model.layers.0.self_attn.v_proj.weight [32, 64] for layers.0.qkv [128, 64]."
    )


def test_parts_that_cannot_be_joined() -> None:
    for wrong in (np.ones((32, 63), np.float32), np.ones((), np.float32)):
        tensors = tiny_tensors(LLAMA) | {"model.layers.0.self_attn.v_proj.weight": wrong}
        assert "1 of another shape" in refusal(ArraySource(tensors))


def test_a_long_list_is_cut_and_counted_in_reading_order() -> None:
    many = {f"model.layers.{i}.extra": np.ones(1, np.float32) for i in range(5_000)}
    text = refusal(ArraySource(tiny_tensors(LLAMA) | many))
    assert len(text) < 1000
    assert "5000 not wanted by the model: model.layers.0.extra; model.layers.1.extra;" in text
    assert text.endswith("model.layers.11.extra; and 4988 more.")


def test_errors_use_the_names_of_the_file(tmp_path: Path) -> None:
    tensors = to_gguf(LLAMA, tiny_tensors(LLAMA))
    del tensors["blk.1.attn_q.weight"]
    tensors["blk.0.attn_sinks.weight"] = np.ones(4, np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(LLAMA), tensors)
    text = refusal(GGUFTensors(GGUFFile(path), 4, 2))
    assert text.startswith(f"{path}: the tensors do not fit the model. ")
    assert "1 missing: blk.1.attn_q.weight." in text
    assert "1 not wanted by the model: blk.0.attn_sinks.weight." in text


def test_stored_rotary_tables_are_left_out_knowingly() -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    config = MODEL.config_from_hf(LLAMA)
    assemble(MODEL, config, ArraySource(tiny_tensors(LLAMA) | extra), "float32")
    near_miss = {"model.layers.0.rotary_emb.scale": np.ones(1, np.float32)}
    assert "rotary_emb.scale" in refusal(ArraySource(tiny_tensors(LLAMA) | near_miss))


def hidden_and_logits(model: ModelDef, config: Config, params: Params) -> tuple[Any, Any]:
    """Some hidden rows [3, E] and the model's logits of them."""
    hidden = standard_noise("hidden", (3, config.hidden_size))
    ops = make_ops("reference", model.kv_spec(config))
    return hidden, np.asarray(model.unembed(config, params, jnp.asarray(hidden), ops))


def check_logits(model: ModelDef, hf: dict[str, Any], source: TensorSource, rows: Any) -> None:
    """The logits must be hidden @ rows.T."""
    config = model.config_from_hf(hf)
    params = assemble(model, config, source, "float32")
    hidden, logits = hidden_and_logits(model, config, params)
    np.testing.assert_allclose(logits, hidden @ rows.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.Q8_0, Q.Q4_1], ids=lambda kind: kind.name)
def test_b22_gguf_without_output_weight_uses_the_embedding(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    tensors = tiny_tensors(TIED)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", model_metadata(TIED), to_gguf(TIED, tensors),
        {"token_embd.weight": kind},
    )  # fmt: skip
    file = GGUFFile(path)
    rows = file.load("token_embd.weight")
    np.testing.assert_allclose(rows, tensors["model.embed_tokens.weight"], atol=0.05)
    check_logits(MODEL, hf_config(file), GGUFTensors(file, 4, 2), rows)


def test_b22_gguf_with_output_weight_uses_it(tmp_path: Path) -> None:
    tensors = tiny_tensors(LLAMA)
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(LLAMA), to_gguf(LLAMA, tensors))
    file = GGUFFile(path)
    assert hf_config(file)["tie_word_embeddings"] is False
    check_logits(MODEL, hf_config(file), GGUFTensors(file, 4, 2), tensors["lm_head.weight"])


@pytest.mark.parametrize("with_head", [False, True])
def test_b22_safetensors_tied_uses_the_embedding(with_head: bool, tmp_path: Path) -> None:
    tensors = tiny_tensors(TIED)
    if with_head:
        tensors["lm_head.weight"] = tiny_tensors(LLAMA)["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    check_logits(MODEL, TIED, SafetensorsFolder(tmp_path), rows)


def test_b22_safetensors_untied_without_head_is_an_error(tmp_path: Path) -> None:
    save_file(tiny_tensors(TIED), tmp_path / "model.safetensors")
    assert "1 missing: lm_head.weight." in refusal(SafetensorsFolder(tmp_path))
    save_file(tiny_tensors(LLAMA), tmp_path / "model.safetensors")
    rows = tiny_tensors(LLAMA)["lm_head.weight"]
    check_logits(MODEL, LLAMA, SafetensorsFolder(tmp_path), rows)


def two_leaves(**changes: Any) -> ModelDef:
    """A model of a matrix in the engine's type and a vector pinned to float32."""
    specs = {
        "w": ParamSpec((4, 3), ("embed", None)),
        "scale": ParamSpec((3,), (None,), "ones", "float32"),
        "bias": ParamSpec((3,), (None,), "zeros"),
    }
    names = {"w": WeightNames(("top", "low")), "scale": WeightNames(("scale",))}
    names["bias"] = WeightNames(("bias",))
    fields = {"param_specs": lambda config: specs, "weight_names": lambda config: names}
    return replace(MODEL, name="two", **(fields | changes))


def test_dtypes_and_rows_of_joined_tensors() -> None:
    tensors = {
        "top": np.full((1, 3), 1.001, np.float32),
        "low": np.full((3, 3), 2.0, np.float32),
        "scale": np.full(3, 1.001, np.float32),
        "bias": np.full(3, 1.001, np.float32),
    }
    params = assemble(two_leaves(), None, ArraySource(tensors), "bfloat16")
    assert params["w"].dtype == params["bias"].dtype == jnp.bfloat16
    assert params["scale"].dtype == jnp.float32
    np.testing.assert_array_equal(params["w"].astype(np.float32)[:, 0], [1.0, 2, 2, 2])
    np.testing.assert_array_equal(params["scale"], tensors["scale"])


def test_random_params_follow_the_specs() -> None:
    model = two_leaves()
    params = random_params(model, None, 3, "float32")
    np.testing.assert_array_equal(params["scale"], np.ones(3))
    np.testing.assert_array_equal(params["bias"], np.zeros(3))
    np.testing.assert_array_equal(params["w"], np.float32(0.02) * standard_noise("3:w", (4, 3)))
    again = random_params(model, None, 3, "float32")
    other = random_params(model, None, 4, "float32")
    np.testing.assert_array_equal(params["w"], again["w"])
    assert (np.asarray(params["w"]) != np.asarray(other["w"])).all()
    assert random_params(model, None, 3, "bfloat16")["w"].dtype == jnp.bfloat16


def test_random_params_of_a_family_differ_between_layers() -> None:
    config = MODEL.config_from_hf(LLAMA)
    params = random_params(MODEL, config, 0, "float32")
    specs = jax.tree.leaves(
        MODEL.param_specs(config), is_leaf=lambda node: isinstance(node, ParamSpec)
    )
    assert [leaf.shape for leaf in jax.tree.leaves(params)] == [spec.shape for spec in specs]
    first, second = (np.asarray(layer["qkv"]) for layer in params["layers"])
    assert (first != second).mean() > 0.9


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"w": WeightNames(("a",))}, "different trees"),
        ({"w": WeightNames(()), "scale": WeightNames(("b",)), "bias": WeightNames(("c",))},
         "w needs a ParamSpec in param_specs and a WeightNames"),
        ({"w": "a", "scale": WeightNames(("b",)), "bias": WeightNames(("c",))}, "w needs"),
    ],
)  # fmt: skip
def test_a_model_file_with_wrong_names(names: Any, problem: str) -> None:
    model = two_leaves(weight_names=lambda config: names)
    with pytest.raises(ModelLoadError, match=problem):
        assemble(model, None, ArraySource({}), "float32")


def test_an_unreadable_tensor_stops_the_loading() -> None:
    class Unreadable(ArraySource):
        def load(self, name: str) -> np.ndarray:
            if name.endswith("up_proj.weight"):
                raise ModelLoadError(f"x: tensor {name!r} is damaged")
            return super().load(name)

    assert re.fullmatch("x: tensor '.*' is damaged", refusal(Unreadable(tiny_tensors(LLAMA))))


def test_progress_counts_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble_module, "_PROGRESS_SECONDS", -1.0)
    told: list[str] = []
    config = MODEL.config_from_hf(LLAMA)
    assemble(MODEL, config, ArraySource(tiny_tensors(LLAMA)), "float32", told.append)
    percent = [
        int(re.fullmatch(r"weights: (\d+) % read, 0 MB in memory", text)[1]) for text in told
    ]  # type: ignore[index]
    assert percent == sorted(percent)
    assert 80 < percent[-1] <= 100


def test_jax_takes_aligned_arrays_over_without_a_copy() -> None:
    """What keeps the peak of loading at the weights themselves; see aligned_array."""
    host = aligned_empty((1000, 33), np.float32)
    host[...] = 1
    assert jax.device_put(host).unsafe_buffer_pointer() == host.ctypes.data
    copied = aligned_copy(host[:, ::2], np.float16)
    assert copied.shape == (1000, 17)
    assert copied.flags.c_contiguous
    assert copied.ctypes.data % 64 == 0
