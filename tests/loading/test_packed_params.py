"""Parameters that stay packed stand for the numbers that the expanded ones are."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.loading.assemble import assemble, random_params
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.gguf_tensors import GGUFTensors
from jaxserve.loading.hub import resolve
from jaxserve.loading.load import load_model
from jaxserve.loading.tensor_source import ArraySource
from jaxserve.models.base import ModelDef, ParamSpec, WeightNames, matrix
from jaxserve.models.llama import MODEL
from jaxserve.models.registry import find_model
from pallas_kernels import native
from pallas_kernels.quantized_matmul import (
    QuantizedArray,
    StackedRows,
    matmul,
    take_rows,
)
from pallas_kernels.quantized_matmul.cases import Case
from tests.support.gguf_files import (
    Q,
    model_metadata,
    random_packed,
    to_gguf,
    tokenizer_metadata,
    write_gguf,
)
from tests.support.packed_arrays import expansion, random_array
from tests.support.tiny_checkpoints import LLAMA, tiny_tensors

Packed = QuantizedArray | StackedRows
LAYOUTS = ["rows"] + ["panels"] * (native.why_not() is None)
# The K types have blocks of 256, so rows are as long as that.
WIDE = LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 1,
}
BLOCK_TYPES = [
    Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.MXFP4,
]  # fmt: skip


expand = jax.jit(take_rows)


def is_packed(node: Any) -> bool:
    return isinstance(node, Packed)


def leaves(params: Any) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=is_packed)


def rows_of(packed: Packed) -> np.ndarray:
    """All rows, expanded by the oracle, or by whatever reads the layout."""
    if isinstance(packed, QuantizedArray) and packed.layout == "rows":
        return expansion(packed)
    return np.asarray(expand(packed, jnp.arange(packed.shape[0])))


def check_same(packed: Any, plain: Any, packable: int) -> None:
    """Every leaf equal; float32 rounds once or twice where a product is added to."""
    count = 0
    for got, want in zip(leaves(packed), jax.tree.leaves(plain), strict=True):
        if is_packed(got):
            count += 1
            assert got.shape == want.shape
            close = 1e-6 * np.abs(want).max()
            np.testing.assert_allclose(rows_of(got), want, rtol=1e-6, atol=close)
        else:
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want)
    assert count == packable


def write_toy(path: Path, types: dict[str, gguf.GGMLQuantizationType]) -> GGUFFile:
    """A llama whose matrices have the type of their name's last part, or of ""."""
    rng = np.random.default_rng(4)
    tensors = to_gguf(WIDE, tiny_tensors(WIDE))
    kinds = {}
    for name, tensor in tensors.items():
        kind = types.get(name.split(".")[-2], types.get("", Q.F32))
        if tensor.ndim == 2 and kind != Q.F32:
            kinds[name] = kind
            if kind not in (Q.F16, Q.BF16):
                tensors[name] = random_packed(tensor.shape, kind, rng)
    return GGUFFile(write_gguf(path, "llama", model_metadata(WIDE), tensors, kinds))


def assembled(file: GGUFFile, layout: str | None, dtype: str = "float32") -> Any:
    config = MODEL.config_from_hf(hf_config(file))
    return assemble(MODEL, config, GGUFTensors(file, 4, 2), dtype, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_every_block_type(kind: gguf.GGMLQuantizationType, layout: str, tmp_path: Path) -> None:
    file = write_toy(tmp_path / "m.gguf", {"": kind})
    packed = assembled(file, layout)
    check_same(packed, assembled(file, None), packable=6)
    kept = packed["layers"][0]["qkv"]
    assert (kept.format_name, kept.layout) == (kind.name.lower(), layout)
    assert isinstance(next(iter(kept.parts.values())), jax.Array)
    assert packed["embed"].nbytes < 1.1 * file.raw("token_embd.weight").nbytes * (288 / 272)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16], ids=lambda kind: kind.name)
def test_plain_types(kind: gguf.GGMLQuantizationType, dtype: str, tmp_path: Path) -> None:
    """16-bit numbers stay as they are; 32-bit ones become what the engine's type is."""
    file = write_toy(tmp_path / "m.gguf", {"": kind})
    packed = assembled(file, "rows", dtype)
    wanted = "bf16" if (kind, dtype) == (Q.F32, "bfloat16") else kind.name.lower()
    assert {leaf.format_name for leaf in leaves(packed) if is_packed(leaf)} == {wanted}
    assert packed["final_norm"].dtype == dtype
    exact = dtype if kind == Q.F32 else "float32"
    check_same(packed["layers"][0]["down"], assembled(file, None, exact)["layers"][0]["down"], 1)


def test_other_types_are_expanded_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_toy(tmp_path / "m.gguf", {"": Q.Q4_K, "ffn_down": Q.Q2_K, "output": Q.IQ4_NL})
    packed = assembled(file, "rows")
    layer = packed["layers"][0]
    assert [packed["unembed"].format_name, layer["down"].format_name] == ["f32", "f32"]
    check_same(packed, assembled(file, None), packable=6)
    assert sorted(record.message for record in caplog.records) == [
        f"{file.path}: there are no packed products for the type {kind}; its tensors ({name} ...) "
        "are expanded to float32 in memory"
        for kind, name in (("IQ4_NL", "output.weight"), ("Q2_K", "blk.0.ffn_down.weight"))
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_neighbours_of_one_format_are_joined(layout: str, tmp_path: Path) -> None:
    """As in the mixed files that Q4_K_M and the like are."""
    types = {"": Q.Q4_K, "attn_v": Q.Q6_K, "ffn_gate": Q.Q5_0}
    file = write_toy(tmp_path / "m.gguf", types)
    packed = assembled(file, layout)
    layer = packed["layers"][0]
    pieces = [(piece.format_name, piece.shape) for piece in layer["qkv"].pieces]
    assert pieces == [("q4_k", (384, 256)), ("q6_k", (128, 256))]
    assert [piece.format_name for piece in layer["gate_up"].pieces] == ["q5_0", "q4_k"]
    assert isinstance(layer["attention_out"], QuantizedArray)
    check_same(packed, assembled(file, None), packable=6)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_1, Q.BF16], ids=lambda kind: kind.name)
def test_permuted_queries_and_keys_come_back_as_packed_rows(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    """Rows are packed one by one, so the file's rows reordered are the packed original."""
    tensors = tiny_tensors(LLAMA)
    stored = to_gguf(LLAMA, tensors)
    kinds = {name: kind for name, tensor in stored.items() if tensor.ndim == 2}
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(LLAMA), stored, kinds)
    source = GGUFTensors(GGUFFile(path), 4, 2)
    for name in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{name}.weight"
        (part,) = source.load_packed(name).parts.values()
        assert np.asarray(part).tobytes() == gguf.quantize(tensors[name], kind).tobytes()


def test_a_tied_embedding_is_one_array(tmp_path: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    stored = to_gguf(config, tiny_tensors(config))
    kinds = {"token_embd.weight": Q.Q8_0}
    path = write_gguf(tmp_path / "m.gguf", "llama", model_metadata(config), stored, kinds)
    packed = assembled(GGUFFile(path), "rows")
    assert "unembed" not in packed
    assert packed["embed"].format_name == "q8_0"


class PackedSource(ArraySource):
    """Matrices that are packed already, under the names a, b ..."""

    def __init__(self, *matrices: QuantizedArray) -> None:
        super().__init__({}, "folder/x")
        self._packed = dict(zip("abcdef", matrices, strict=False))

    def names(self) -> Iterator[str]:
        return iter(self._packed)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._packed[name].shape

    def load_packed(self, name: str) -> QuantizedArray:
        return self._packed[name]


def one_matrix(rows: int, columns: int, names: str) -> ModelDef:
    return replace(
        MODEL,
        param_specs=lambda config: {"w": matrix((rows, columns), ("mlp", "embed"))},
        weight_names=lambda config: {"w": WeightNames(tuple(names))},
    )


def joined(*matrices: QuantizedArray, layout: str = "rows") -> Packed:
    rows = sum(piece.shape[0] for piece in matrices)
    model = one_matrix(rows, matrices[0].shape[1], "abcdef"[: len(matrices)])
    return assemble(model, None, PackedSource(*matrices), "float32", layout=layout)["w"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_join_with_their_scales_zeros_and_column_order(layout: str) -> None:
    case = Case("int4", 5, 64, 32, zeros=True, perm=True)
    first, second = random_array(case), random_array(replace(case, N=33), seed=1)
    second = replace(second, parts={**second.parts, "perm": first.parts["perm"]})
    other_order = random_array(case, seed=2)
    no_zeros = random_array(replace(case, zeros=False, perm=False), seed=3)
    bigger_groups = random_array(replace(case, group=64, zeros=False, perm=False), seed=4)
    all_five = (first, second, other_order, no_zeros, bigger_groups)
    packed = joined(*all_five, layout=layout)
    assert isinstance(packed, StackedRows)
    assert [piece.shape[0] for piece in packed.pieces] == [38, 5, 5, 5]
    want = np.concatenate([expansion(w) for w in all_five])
    np.testing.assert_allclose(rows_of(packed), want, rtol=1e-6, atol=1e-6)
    x = np.random.default_rng(5).normal(size=(3, 64)).astype(np.float32)
    products = jax.jit(matmul)(jnp.asarray(x), packed)
    np.testing.assert_allclose(products, x @ want.T, rtol=1e-4, atol=1e-4)


def test_the_first_matrix_is_left_as_it_was() -> None:
    first, second = (random_array(Case("int8", 2, 32, 32), seed) for seed in range(2))
    before = expansion(first)
    joined(first, second)
    np.testing.assert_array_equal(expansion(first), before)


def test_a_matrix_that_is_not_what_it_says_names_file_and_tensors() -> None:
    good = random_array(Case("q4_0", 2, 64))
    bad = replace(good, parts={"blocks": np.asarray(good.parts["blocks"])[:, :35]})
    with pytest.raises(ModelLoadError, match=r"folder/x: a, b: a q4_0 matrix \(2, 64\): blocks"):
        joined(good, bad)


def test_a_vector_is_no_matrix(tmp_path: Path) -> None:
    file = write_toy(tmp_path / "m.gguf", {})
    with pytest.raises(ModelLoadError, match=r"tensor 'output_norm.weight' has the shape \[256\]"):
        file.load_packed("output_norm.weight")
    with pytest.raises(ModelLoadError, match="no tensor 'x'"):
        file.load_packed("x")


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    file = write_toy(tmp_path / "m.gguf", {"": Q.Q4_0})
    with (tmp_path / "m.gguf").open("r+b") as stream:
        stream.truncate(5000)
    with pytest.raises(ModelLoadError, match=r"m\.gguf: tensor 'output\.weight' cannot be read"):
        file.load_packed("output.weight")


def test_parameters_that_are_not_packable_stay_plain() -> None:
    """Models of users, and of flax, that multiply with the arrays themselves."""
    spec = {"w": ParamSpec((4, 64), ("mlp", "embed"))}
    model = replace(one_matrix(4, 64, "w"), param_specs=lambda config: spec)
    source = ArraySource({"w": np.ones((4, 64), np.float32)})
    params = assemble(model, None, source, "float32", layout="rows")
    assert isinstance(params["w"], jax.Array)


def test_random_weights_are_packed_too() -> None:
    config = MODEL.config_from_hf(LLAMA)
    plain = random_params(MODEL, config, 3, "float32")
    check_same(random_params(MODEL, config, 3, "float32", "rows"), plain, packable=10)
    packed = random_params(MODEL, config, 3, "bfloat16", "rows", "int4")
    down = packed["layers"][1]["down"]
    assert (down.format_name, packed["embed"].format_name) == ("int4", "int8")
    step = np.abs(plain["layers"][1]["down"]).max() / 7
    assert np.abs(expansion(down) - plain["layers"][1]["down"]).max() < step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_model(layout: str, tmp_path: Path) -> None:
    stored = to_gguf(LLAMA, tiny_tensors(LLAMA))
    kinds = {name: Q.Q8_0 for name in stored if "ffn" in name and "norm" not in name}
    metadata = model_metadata(LLAMA) | tokenizer_metadata()
    path = str(write_gguf(tmp_path / "m.gguf", "llama", metadata, stored, kinds))
    told: list[str] = []
    packed = load_model(path, weight_layout=layout, progress=told.append).params
    check_same(packed, load_model(path).params, packable=10)
    assert told[-1].startswith("loaded weights packed: ")
    with pytest.raises(ModelLoadError, match="'int8' needs weights that stay packed"):
        load_model(path, quantization="int8")
    with pytest.raises(ModelLoadError, match=r"is packed already \(q8_0\)"):
        load_model(path, weight_layout=layout, quantization="int8")
    with pytest.raises(NotImplementedError, match="no layout 'tiles'; choose rows, panels"):
        load_model(path, weight_layout="tiles")


def test_load_model_packs_a_plain_file(tmp_path: Path) -> None:
    stored = to_gguf(LLAMA, tiny_tensors(LLAMA))
    metadata = model_metadata(LLAMA) | tokenizer_metadata()
    path = str(write_gguf(tmp_path / "m.gguf", "llama", metadata, stored))
    told: list[str] = []
    params = load_model(
        path, weight_layout="rows", quantization="int8", progress=told.append
    ).params
    formats = {leaf.format_name for leaf in leaves(params) if is_packed(leaf)}
    assert formats == {"int8"}
    assert told[-1].startswith("loaded weights packed as int8: ")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_the_models_that_pull_brings_are_their_float32_expansion(name: str) -> None:
    """Every matrix of the file, within a rounding, in the layout that is served from.

    Of tables that are longer than any other matrix, every 37th row is compared.
    """
    file = GGUFFile(resolve(name))
    hf = hf_config(file)
    source = GGUFTensors(file, hf["num_attention_heads"], hf["num_key_value_heads"])
    model = find_model(hf["architectures"][0])
    config = model.config_from_hf(hf)
    params = assemble(model, config, source, "float32", layout=LAYOUTS[-1])
    count = 0
    for leaf, names in zip(leaves(params), leaves(model.weight_names(config)), strict=True):
        row = 0
        for tensor in names.names if is_packed(leaf) else ():
            want = source.load(tensor)
            some = slice(None, None, 37 if len(want) > 8192 else 1)
            rows = jnp.arange(row, row + len(want))[some]
            np.testing.assert_allclose(expand(leaf, rows), want[some], rtol=1e-6, atol=1e-7)
            row += len(want)
            count += 1
    assert count == sum(len(file.shape(tensor)) == 2 for tensor in file.names())
