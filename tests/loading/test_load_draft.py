"""Draft folders: told apart by their tensors, read whole, refused with a sentence."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.loading.drafts import LoadedDraft, load_draft
from pallas_kernels.quantized_matmul import QuantizedArray, StackedRows
from tests.support.draft_checkpoints import (
    BLOCKS,
    DRAFT_VOCABULARY,
    HEADS,
    LAYER,
    TARGET,
    draft_words,
    eagle3_tensors,
    eagle_tensors,
    layer_shapes,
    medusa_tensors,
    random_tensors,
    write_folder,
)

EAGLE3_CONFIG = LAYER | {"draft_vocab_size": DRAFT_VOCABULARY}
MTP_PREFIX = f"model.layers.{TARGET.num_layers}."


@dataclass(frozen=True)
class TargetConfig:
    """What a family's config says of its sizes."""

    hidden_size: int = TARGET.hidden_size
    num_layers: int = TARGET.num_layers
    vocab_size: int = TARGET.vocab_size


def load(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], **options: Any
) -> LoadedDraft:
    return load_draft(str(write_folder(folder, config, tensors)), TargetConfig(), **options)


def test_eagle(tmp_path: Path) -> None:
    """The published config does not say whether fc has a bias; embeddings are the target's."""
    tensors = eagle_tensors()
    table = {"embed_tokens.weight": np.zeros((96, 32), np.float32)}
    draft = load(tmp_path / "heads", LAYER, tensors | table)
    assert (draft.draft.name, draft.name, draft.vocab_size) == ("eagle", "heads", 96)
    np.testing.assert_array_equal(draft.params["fc"], tensors["fc.weight"])
    np.testing.assert_array_equal(draft.params["fc_bias"], tensors["fc.bias"])
    parts = [tensors[f"layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    np.testing.assert_array_equal(draft.params["layers"][0]["qkv"], np.concatenate(parts))
    without = load(tmp_path / "without", LAYER, eagle_tensors(fc_bias=False))
    assert "fc_bias" not in without.params


def test_eagle3(tmp_path: Path) -> None:
    draft = load(tmp_path, EAGLE3_CONFIG, eagle3_tensors())
    assert (draft.draft.name, draft.vocab_size) == ("eagle3", DRAFT_VOCABULARY)
    assert draft.params["d2t"].dtype == np.int32
    words = np.arange(DRAFT_VOCABULARY) + np.asarray(draft.params["d2t"])
    np.testing.assert_array_equal(words, draft_words())


def test_eagle3_with_the_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    tensors = {k: v for k, v in eagle3_tensors().items() if k not in ("d2t", "t2d")}
    with pytest.raises(ModelLoadError, match="no tensor d2t, which says what the 40 words"):
        load(tmp_path / "few", EAGLE3_CONFIG, tensors)
    tensors["lm_head.weight"] = np.zeros((96, 32), np.float32)
    draft = load(tmp_path / "all", LAYER, tensors)
    assert not np.asarray(draft.params["d2t"]).any()


@pytest.mark.parametrize("unembed", [True, False])
def test_medusa(tmp_path: Path, unembed: bool) -> None:
    """Published configs name more heads than their files hold: the files count."""
    draft = load(tmp_path, {"medusa_num_heads": 5}, medusa_tensors(unembed=unembed))
    assert draft.draft.name == "medusa"
    assert (draft.config.num_heads, draft.config.num_blocks) == (HEADS, BLOCKS)
    assert draft.config.shared_unembed == (not unembed)
    assert ("unembed" in draft.params["heads"][0]) == unembed


def test_mtp_module_of_the_targets_own_folder(tmp_path: Path) -> None:
    """It lies behind the last layer; the rest of the folder, and its copies of tables, are not
    read."""
    norms = ("enorm", "hnorm", "input_layernorm", "shared_head.norm")
    shapes = layer_shapes() | {f"{norm}.weight": (32,) for norm in norms}
    shapes |= {"eh_proj.weight": (32, 64), "shared_head.head.weight": (96, 32)}
    shapes |= {"embed_tokens.weight": (96, 32)}
    own = {MTP_PREFIX + name: values for name, values in random_tensors(shapes, 1).items()}
    others = {"model.layers.0.mlp.up_proj.weight": np.zeros((48, 32), np.float32)}
    config = LAYER | {"num_hidden_layers": 6, "num_nextn_predict_layers": 1}
    draft = load(tmp_path, config, own | others)
    assert draft.draft.name == "mtp"
    np.testing.assert_array_equal(draft.params["join"], own[MTP_PREFIX + "eh_proj.weight"])


def test_weights_stay_packed_and_are_packed_on_demand(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, EAGLE3_CONFIG, eagle3_tensors())
    draft = load_draft(str(folder), TargetConfig(), weight_layout="rows", quantization="int8")
    assert isinstance(draft.params["fc"], QuantizedArray | StackedRows)
    assert isinstance(draft.params["layer"]["qkv"], QuantizedArray | StackedRows)
    np.testing.assert_array_equal(
        np.arange(DRAFT_VOCABULARY) + np.asarray(draft.params["d2t"]), draft_words()
    )


def _changed(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    tensors: dict[str, Any] = eagle3_tensors() | changes
    return {name: values for name, values in tensors.items() if values is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (_changed(**{"norm.weight": None}), r"1 missing: norm\.weight"),
        (_changed(more=np.zeros(3, np.float32)), "1 not wanted by the model: more"),
        (
            _changed(**{"fc.weight": np.zeros((32, 64), np.float32)}),
            r"fc\.weight \[32, 64\] for fc \[32, 96\]",
        ),
        (_changed(d2t=np.full(40, 60)), "d2t makes draft word 36 the target's 96, whose"),
        (_changed(d2t=np.full(40, -1)), "d2t makes draft word 0 the target's -1"),
        (_changed(d2t=np.zeros(40, np.float32)), r"d2t is float32 \[40\]; want whole numbers"),
        (_changed(d2t=np.zeros(39, np.int64)), r"d2t \[39\] for d2t \[40\]"),
        ({"x.weight": np.zeros((2, 2), np.float32)}, r"no draft of a known kind: .* x\.weight"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message) as error:
        load(tmp_path, EAGLE3_CONFIG, tensors)
    assert str(tmp_path) in str(error.value)


def test_the_draft_of_another_target(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, EAGLE3_CONFIG, eagle3_tensors())
    with pytest.raises(ModelLoadError, match="hidden_size of the draft is 32, the target's is 64"):
        load_draft(str(folder), TargetConfig(hidden_size=64))


def test_a_file_is_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"a draft is a folder with config\.json"):
        load_draft(str(path), TargetConfig())
