"""The header of one GGUF file, read with every number checked before it is used.

GGUF is specified in the ggml repository, docs/gguf.md: magic, version, counts, key-value pairs,
tensor descriptions, then the tensor data. The `gguf` package knows the types and the block formats
and is used for both, but its reader trusts the file: it believes any length, and makes several
numpy objects per array element (28 s and 700 MB for a vocabulary of 262,144). So this walk decides
what a file says; sizes are Python ints, which do not wrap, and nothing is allocated
for a length that the file does not back with bytes.
"""

import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

from jaxserve.errors import ModelLoadError

SUPPORTED_VERSIONS = (2, 3)

# Far above every known checkpoint, low enough that a damaged file costs neither time nor memory.
MAX_KEYS = 1 << 12
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1 << 12
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ELEMENTS = 1 << 22  # of all arrays of a file together
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. shape is in numpy order (rows first), start counts from byte 0."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """metadata: plain Python values, arrays as lists. tensors: in the file's order."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(data: memoryview, file_name: str) -> GGUFHeader:
    """Walk the header of a whole GGUF file; ModelLoadError names the file and key or tensor."""
    cursor = _Cursor(data, file_name)
    num_tensors, num_keys = _read_prelude(cursor)
    metadata = _read_metadata(cursor, num_keys)
    infos = _read_tensor_infos(cursor, num_tensors)
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT:
        cursor.fail(f"general.alignment is {str(alignment)[:40]}, not 1 to {MAX_ALIGNMENT}")
    if alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}, not a power of two")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: _place_tensor(cursor, name, shape, type_, data_start, offset, alignment)
        for name, (shape, type_, offset) in infos.items()
    }
    _check_overlaps(cursor, tensors)
    return GGUFHeader(metadata, tensors)


class _Cursor:
    """A position in the file that never reads past its end."""

    def __init__(self, data: memoryview, file_name: str) -> None:
        self.data = data
        self.file_name = file_name
        self.offset = 0
        self.where = "the header"  # what is being read, for error texts
        self.array_elements_left = MAX_ARRAY_ELEMENTS

    def fail(self, problem: str) -> NoReturn:
        raise ModelLoadError(f"{self.file_name}: damaged or unsupported GGUF file: {problem}")

    def take(self, num_bytes: int) -> memoryview:
        end = self.offset + num_bytes
        if end > len(self.data):
            self.fail(
                f"{self.where} needs {num_bytes} bytes at offset {self.offset}, but the file ends "
                f"at {len(self.data)}; download it again"
            )
        taken = self.data[self.offset : end]
        self.offset = end
        return taken

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def uint32(self) -> int:
        return int(self.unpack("I")[0])

    def uint64(self) -> int:
        return int(self.unpack("Q")[0])

    def string(self, limit: int) -> str:
        length = self.uint64()
        if length > limit:
            self.fail(f"{self.where} has a string of {length} bytes, the limit is {limit}")
        raw = bytes(self.take(length))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{self.where} has a string that is not UTF-8")


def _read_prelude(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and counts -> (number of tensors, number of metadata keys)."""
    magic = bytes(cursor.take(4))
    if magic != struct.pack("<I", GGUF_MAGIC):
        cursor.fail(f"it starts with {magic!r}, not with b'GGUF'")
    version = cursor.uint32()
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in SUPPORTED_VERSIONS and swapped in SUPPORTED_VERSIONS:
        cursor.fail(
            "it is big-endian, and only little-endian files can be read; convert it with "
            "`gguf-convert-endian FILE little` of the gguf package"
        )
    if version not in SUPPORTED_VERSIONS:
        cursor.fail(f"its version is {version}, this reader knows 2 and 3; convert it again")
    num_tensors, num_keys = cursor.uint64(), cursor.uint64()
    if num_tensors > MAX_TENSORS:
        cursor.fail(f"it announces {num_tensors} tensors, the limit is {MAX_TENSORS}")
    if num_keys > MAX_KEYS:
        cursor.fail(f"it announces {num_keys} metadata keys, the limit is {MAX_KEYS}")
    return num_tensors, num_keys


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        cursor.where = f"metadata key {index + 1} of {num_keys}"
        key = cursor.string(MAX_NAME_BYTES)
        if key in metadata:
            cursor.fail(f"metadata key {_shown(key)} is there twice")
        cursor.where = f"metadata key {_shown(key)}"
        metadata[key] = _read_value(cursor, _value_type(cursor))
    return metadata


def _value_type(cursor: _Cursor) -> GGUFValueType:
    code = cursor.uint32()
    try:
        return GGUFValueType(code)
    except ValueError:
        cursor.fail(f"{cursor.where} has the unknown value type {code}")


def _read_value(cursor: _Cursor, value_type: GGUFValueType) -> Any:
    if value_type == GGUFValueType.STRING:
        return cursor.string(MAX_STRING_BYTES)
    if value_type != GGUFValueType.ARRAY:
        return cursor.unpack(_SCALARS[value_type])[0]
    element_type, count = _value_type(cursor), cursor.uint64()
    if element_type == GGUFValueType.ARRAY:
        cursor.fail(f"{cursor.where} is an array of arrays, which no known checkpoint uses")
    if count > cursor.array_elements_left:
        cursor.fail(
            f"{cursor.where} has {count} elements; all arrays together may have "
            f"{MAX_ARRAY_ELEMENTS}"
        )
    cursor.array_elements_left -= count
    if element_type == GGUFValueType.STRING:
        return _read_strings(cursor, count)
    return list(cursor.unpack(_SCALARS[element_type], count))


def _read_strings(cursor: _Cursor, count: int) -> list[str]:
    """Vocabularies have 10^5 of these, so the loop works on bytes and checks inline."""
    data, offset, size = cursor.data, cursor.offset, len(cursor.data)
    length_at: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    try:
        for _ in range(count):
            end = offset + 8 + (length_at(data, offset)[0] if offset + 8 <= size else size)
            if end > size:
                cursor.fail(
                    f"{cursor.where}: string {len(strings)} of {count} at offset {offset} reaches "
                    f"past the end of the file at {size}; download it again"
                )
            strings.append(str(data[offset + 8 : end], "utf-8"))
            offset = end
    except UnicodeDecodeError:
        cursor.fail(f"{cursor.where}: string {len(strings)} of {count} is not UTF-8")
    cursor.offset = offset
    return strings


def _read_tensor_infos(
    cursor: _Cursor, num_tensors: int
) -> dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]]:
    infos = {}
    for index in range(num_tensors):
        cursor.where = f"the description of tensor {index + 1} of {num_tensors}"
        name = cursor.string(MAX_NAME_BYTES)
        if name in infos:
            cursor.fail(f"tensor {_shown(name)} is there twice")
        cursor.where = f"the description of tensor {_shown(name)}"
        num_dims = cursor.uint32()
        if not 1 <= num_dims <= MAX_DIMS:
            cursor.fail(f"tensor {_shown(name)} has {num_dims} dimensions, not 1 to {MAX_DIMS}")
        dims = cursor.unpack("Q", num_dims)
        type_code, offset = cursor.uint32(), cursor.uint64()
        try:
            tensor_type = GGMLQuantizationType(type_code)
        except ValueError:
            cursor.fail(
                f"tensor {_shown(name)} has the unknown type {type_code}; "
                "a newer gguf package may know it"
            )
        infos[name] = (tuple(reversed(dims)), tensor_type, offset)
    return infos


def _place_tensor(
    cursor: _Cursor,
    name: str,
    shape: tuple[int, ...],
    tensor_type: GGMLQuantizationType,
    data_start: int,
    offset: int,
    alignment: int,
) -> TensorInfo:
    """Check that a tensor's bytes lie in the file, whatever its dimensions multiply to."""
    num_elements = 1
    for dim in shape:
        num_elements *= dim
    block_elements, block_bytes = GGML_QUANT_SIZES[tensor_type]
    tensor = f"tensor {_shown(name)} {list(shape)} of type {tensor_type.name}"
    if num_elements == 0:
        cursor.fail(f"{tensor} is empty")
    if shape[-1] % block_elements:
        cursor.fail(f"{tensor} has rows that are not whole blocks of {block_elements}")
    num_bytes = num_elements // block_elements * block_bytes
    if offset % alignment:
        cursor.fail(f"{tensor} starts at {offset}, not at a multiple of {alignment}")
    start = data_start + offset
    if start + num_bytes > len(cursor.data):
        cursor.fail(
            f"{tensor} takes {num_bytes} bytes from offset {start}, but the file ends at "
            f"{len(cursor.data)}; download it again"
        )
    return TensorInfo(shape, tensor_type, start, num_bytes)


def _check_overlaps(cursor: _Cursor, tensors: dict[str, TensorInfo]) -> None:
    in_order = sorted(tensors.items(), key=lambda item: item[1].start)
    for (name, info), (next_name, next_info) in itertools.pairwise(in_order):
        if info.start + info.num_bytes > next_info.start:
            cursor.fail(f"tensors {_shown(name)} and {_shown(next_name)} overlap")


def _shown(name: str) -> str:
    """A name from the file, quoted and cut, safe to print."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
