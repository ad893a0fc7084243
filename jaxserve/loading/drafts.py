"""Draft checkpoints: EAGLE, EAGLE-3 and Medusa folders in their published layouts, MTP modules.

What a folder is shows in the names of its tensors, since the published config.json files do not
agree on a word for it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.loading.aligned_array import aligned_copy
from jaxserve.loading.assemble import Progress, assemble
from jaxserve.loading.hub import resolve
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.quantize_on_load import QuantizingSource
from jaxserve.loading.safetensors_file import SafetensorsFolder
from jaxserve.loading.tensor_source import TensorSource
from jaxserve.models.base import Config, Params
from jaxserve.models.drafts import medusa
from jaxserve.models.drafts.base import DraftTensors, FeatureDraft, TargetSizes, target_sizes
from jaxserve.models.drafts.eagle import EAGLE
from jaxserve.models.drafts.eagle3 import EAGLE3
from jaxserve.models.drafts.medusa import MEDUSA
from jaxserve.models.drafts.mtp import MTP
from pallas_kernels.quantized_matmul.array import QuantizedArray

_MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
_MEDUSA_UNEMBED = re.compile(r"\d+\.\d+\.weight")
# Tables that are the target's: they were not trained, or are copies of what the target has.
_TARGETS_OWN = ("embed_tokens.weight", "shared_head.head.weight")
_TO_TARGET, _IN_DRAFT = "d2t", "t2d"


@dataclass(frozen=True)
class LoadedDraft:
    """A draft for one target. draft: a FeatureDraft, or DraftTensors named "medusa", whose config
    is a MedusaConfig. vocab_size: words the draft can say."""

    name: str
    draft: FeatureDraft | DraftTensors
    config: Config
    params: Params
    vocab_size: int


def load_draft(
    name_or_path: str,
    target_config: Config,
    *,
    dtype: str = "float32",
    weight_layout: str | None = None,
    quantization: str | None = None,
    progress: Progress | None = None,
) -> LoadedDraft:
    """Load the draft of a folder, or of a pulled model, for a target of this configuration.

    dtype, weight_layout, quantization, progress: as in `load_model`. Raises ModelLoadError, which
    names file and tensor, for what is no draft, is another target's, or is damaged.
    """
    path = resolve(name_or_path)
    if not path.is_dir():
        raise ModelLoadError(
            f"{path}: a draft is a folder with config.json and .safetensors files; a GGUF model "
            "can only be a draft-model"
        )
    json_config = read_json_object(path / "config.json")
    folder = SafetensorsFolder(path)
    try:
        draft, config = _kind(json_config, folder, target_sizes(target_config))
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    vocab_size = getattr(config, "draft_vocab_size", target_config.vocab_size)
    prefix = getattr(config, "prefix", "")
    source: TensorSource = _DraftTensors(folder, prefix, draft.name, target_config.vocab_size)
    if quantization is not None:
        source = QuantizingSource(source, quantization)
    params = assemble(draft, config, source, dtype, progress, weight_layout)
    return LoadedDraft(path.name, draft, config, params, vocab_size)


def _kind(
    config: Mapping[str, Any], folder: SafetensorsFolder, target: TargetSizes
) -> tuple[FeatureDraft | DraftTensors, Config]:
    names = set(folder.names())
    if any(name.startswith("midlayer.") for name in names):
        return EAGLE3, EAGLE3.config_from_hf(config, target)
    if "fc.weight" in names:
        # The files say whether fc has a bias; old config.json files do not.
        return EAGLE, EAGLE.config_from_hf({**config, "bias": "fc.bias" in names}, target)
    if any(_MEDUSA_BLOCK.fullmatch(name) for name in names):
        shared = not any(_MEDUSA_UNEMBED.fullmatch(name) for name in names)
        return MEDUSA, medusa.config_from_hf({**config, **_medusa_sizes(names)}, target, shared)
    if f"model.layers.{target.num_layers}.eh_proj.weight" in names:
        return MTP, MTP.config_from_hf(config, target)
    some = ", ".join(sorted(names)[:3])[:120]
    raise ModelLoadError(
        f"no draft of a known kind: the tensors are {some} ...; want EAGLE's fc.weight, "
        "EAGLE-3's midlayer.*, Medusa's 0.0.linear.weight, or an MTP module's eh_proj behind the "
        "target's last layer. A smaller model of its own goes with the method draft-model"
    )


def _medusa_sizes(names: Iterable[str]) -> dict[str, int]:
    """Heads and blocks as the tensors have them: published files hold fewer heads than they say."""
    found = [match for name in names if (match := _MEDUSA_BLOCK.fullmatch(name))]
    return {
        "medusa_num_heads": 1 + max(int(match[1]) for match in found),
        "medusa_num_layers": 1 + max(int(match[2]) for match in found),
    }


class _DraftTensors:
    """The folder's weights whose names begin so, and EAGLE-3's d2t as the numbers it holds."""

    def __init__(
        self, folder: SafetensorsFolder, prefix: str, kind: str, target_vocab_size: int
    ) -> None:
        self.location = folder.location
        self._folder = folder
        left_out = {_IN_DRAFT, *(prefix + name for name in _TARGETS_OWN)}
        self._names = [
            name for name in folder.names() if name.startswith(prefix) and name not in left_out
        ]
        self._offsets = _offsets(folder, target_vocab_size) if kind == "eagle3" else None
        if self._offsets is not None and _TO_TARGET not in self._names:
            self._names.append(_TO_TARGET)

    def names(self) -> Iterable[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name == _TO_TARGET and self._offsets is not None:
            return self._offsets.shape
        return self._folder.shape(name)

    def load(self, name: str) -> np.ndarray:
        if name == _TO_TARGET and self._offsets is not None:
            return aligned_copy(self._offsets, np.float32)  # exact below 2**24, as ids are
        return self._folder.load(name)

    def load_packed(self, name: str) -> QuantizedArray:
        return self._folder.load_packed(name)

    def packed_shape(self, name: str) -> QuantizedArray:
        return self._folder.packed_shape(name)

    def label(self, name: str) -> str:
        return name


def _offsets(folder: SafetensorsFolder, target_vocab_size: int) -> np.ndarray:
    """d2t, checked to lead into the target's vocabulary; zeros if the draft has all of it."""
    if not folder.has(_TO_TARGET):
        rows = folder.shape("lm_head.weight")[0] if folder.has("lm_head.weight") else 0
        if rows != target_vocab_size:
            raise ModelLoadError(
                f"{folder.location}: no tensor d2t, which says what the {rows} words of lm_head "
                f"are among the target's {target_vocab_size}"
            )
        return np.zeros(rows, np.int64)
    offsets = folder.raw(_TO_TARGET)
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        raise ModelLoadError(
            f"{folder.location}: d2t is {offsets.dtype} {list(offsets.shape)}; want whole "
            "numbers, one for each word of the draft"
        )
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    wrong = np.flatnonzero((ids < 0) | (ids >= target_vocab_size))
    if wrong.size:
        raise ModelLoadError(
            f"{folder.location}: d2t makes draft word {wrong[0]} the target's {ids[wrong[0]]}, "
            f"whose vocabulary is 0 to {target_vocab_size - 1}"
        )
    return offsets
