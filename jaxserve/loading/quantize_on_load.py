"""`--quantization int8|int4|fp8`: plain matrices become packed ones while they are loaded.

Only rounding, without calibration data: int8 and fp8 (e4m3, arXiv:2209.05433) have one scale per
output row; int4 has a scale and a zero point per group of 32 inputs. Embedding and unembedding keep
int8 under the others too: every logit and every token's first vector goes through them.
"""

from collections.abc import Iterable, Iterator

import ml_dtypes
import numpy as np

from jaxserve.core.backends import weight_layout
from jaxserve.errors import InvalidRequestError, ModelLoadError
from jaxserve.loading.packed_codes import grouped_shape, pack_nibbles
from jaxserve.loading.tensor_source import TensorSource
from pallas_kernels.quantized_matmul.array import QuantizedArray

SCHEMES = ("int8", "int4", "fp8")
INT4_GROUP = 32
_LARGEST_FP8 = 448

_WEIGHTS_AT_ONCE = 1 << 18  # bounds what the rounding needs beside the matrix
_TRIED_SHARES = (1.0, 1.05, 0.95, 0.9)  # of a group's range; more gain less than a hundredth
_KEPT_INT8 = ("model.embed_tokens.weight", "lm_head.weight")


def kept_layout(backend: str, scheme: str | None) -> str | None:
    """The layout to load weights in: the backend's, and "rows" where it has none but is asked to.

    backend: EngineConfig.attention_backend. scheme: None leaves the checkpoint as it is.
    Raises InvalidRequestError for a backend that cannot run here.
    """
    try:
        return weight_layout(backend) or (None if scheme is None else "rows")
    except NotImplementedError as error:
        raise InvalidRequestError(str(error), "attention_backend") from None


class QuantizingSource:
    """A TensorSource whose load_packed() quantises the plain matrices of `source`.

    Matrices that `source` keeps packed are refused: rounding them again would lose twice. load()
    gives the numbers of `source` as they are, for parameters that a model cannot take packed.
    """

    def __init__(self, source: TensorSource, scheme: str) -> None:
        if scheme not in SCHEMES:
            raise ModelLoadError(f"quantization is {scheme[:40]!r}; choose {', '.join(SCHEMES)}")
        self.location = source.location
        self._source = source
        self._scheme = scheme

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def load(self, name: str) -> np.ndarray:
        return self._source.load(name)

    def load_packed(self, name: str) -> QuantizedArray:
        kept = self._source.load_packed(name)
        self._check_dense(name, kept)
        values = np.asarray(kept.parts["values"])
        if not all(np.isfinite(values[piece]).all() for piece in _pieces(*values.shape)):
            raise ModelLoadError(f"{self.location}: {self.label(name)} holds infinity or NaN")
        if self._keeps_int8(name, values.shape[1]):
            return quantize_int8(values)
        return quantize_fp8(values) if self._scheme == "fp8" else quantize_int4(values)

    def packed_shape(self, name: str) -> QuantizedArray:
        kept = self._source.packed_shape(name)
        self._check_dense(name, kept)
        if self._keeps_int8(name, kept.shape[1]):
            return grouped_shape("int8", kept.shape, kept.shape[1], has_zeros=False)
        if self._scheme == "fp8":
            return grouped_shape("fp8", kept.shape, kept.shape[1], has_zeros=False)
        return grouped_shape("int4", kept.shape, INT4_GROUP)

    def label(self, name: str) -> str:
        return self._source.label(name)

    def _keeps_int8(self, name: str, inputs: int) -> bool:
        if self._scheme == "int8" or name in _KEPT_INT8:
            return True
        return self._scheme == "int4" and inputs % INT4_GROUP != 0

    def _check_dense(self, name: str, kept: QuantizedArray) -> None:
        if kept.format.kind != "dense":
            raise ModelLoadError(
                f"{self.location}: {self.label(name)} is packed already ({kept.format_name}); "
                "leave out --quantization"
            )


def quantize_int8(values: np.ndarray) -> QuantizedArray:
    """[N, K] of any float type in int8: symmetric, one scale per row, its largest weight / 127."""
    N, K = values.shape
    codes = np.empty((N, K), np.int8)
    scales = np.empty((N, 1), np.float32)
    for piece in _pieces(N, K):
        rows = values[piece].astype(np.float32)
        scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        codes[piece] = np.rint(rows / np.where(scale == 0, 1, scale))
        scales[piece] = scale
    return QuantizedArray({"codes": codes, "scales": scales}, "int8", (N, K), K)


def quantize_fp8(values: np.ndarray) -> QuantizedArray:
    """[N, K] of any float type in e4m3: one scale per row, its largest weight / 448."""
    N, K = values.shape
    codes = np.empty((N, K), np.uint8)
    scales = np.empty((N, 1), np.float32)
    for piece in _pieces(N, K):
        rows = values[piece].astype(np.float32)
        scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(_LARGEST_FP8)
        steps = np.clip(rows / _divisor(scale), -_LARGEST_FP8, _LARGEST_FP8)  # past it: NaN
        codes[piece] = steps.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        scales[piece] = scale
    return QuantizedArray({"codes": codes, "scales": scales}, "fp8", (N, K), K)


def quantize_int4(values: np.ndarray) -> QuantizedArray:
    """[N, K] of any float type in int4, groups of 32 inputs with a scale and a zero point.

    Of a few ranges, the smallest to the largest weight and near ones, each group gets the one with
    the least squared error: 3 to 4 % less of it on Gemma 3 270M. Zero is always exact.
    """
    N, K = values.shape
    G = K // INT4_GROUP
    codes = np.empty((N, K // 2), np.uint8)
    scales = np.empty((N, G), np.float32)
    zeros = np.empty((N, G), np.uint8)
    for piece in _pieces(N, K):
        groups = values[piece].astype(np.float32).reshape(-1, INT4_GROUP)
        code, scale, zero = _best_range(np.ascontiguousarray(groups.T))
        codes[piece] = pack_nibbles(code.astype(np.uint8).T.reshape(-1, K))
        scales[piece] = scale.reshape(-1, G)
        zeros[piece] = zero.reshape(-1, G)
    parts = {"codes": codes, "scales": scales, "zeros": zeros}
    return QuantizedArray(parts, "int4", (N, K), INT4_GROUP)


def _best_range(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [32, R], scales and zero points [R] of groups [32, R]; all are float32.

    The long axis is the inner one, where numpy is several times faster.
    """
    low, high = np.minimum(groups.min(axis=0), 0), np.maximum(groups.max(axis=0), 0)
    least = np.full(low.shape, np.inf, np.float32)
    scale, zero = np.zeros_like(low), np.zeros_like(low)
    for share in _TRIED_SHARES:
        tried = (high - low) * np.float32(share / 15)
        at = np.rint(-low * np.float32(share) / _divisor(tried))
        error = _squared_error(groups, tried, at)
        better = error < least
        for kept, new in ((least, error), (scale, tried), (zero, at)):
            np.copyto(kept, new, where=better)
    return _codes(groups, scale, zero), scale, zero


def _codes(groups: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Codes 0..15; what is outside the range gets the nearest end."""
    codes = groups / _divisor(scale)
    np.rint(codes, out=codes)
    codes += zero
    return np.clip(codes, 0, 15, out=codes)


def _squared_error(groups: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    error = _codes(groups, scale, zero)
    error -= zero
    error *= scale
    error -= groups
    error *= error
    return error.sum(axis=0)


def _divisor(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, np.float32(1), scale)


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _WEIGHTS_AT_ONCE // columns)
    for start in range(0, rows, step):
        yield slice(start, start + step)
