"""Damaged GGUF files are refused in one sentence that names the file: no crash, hang or guess."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType

from jaxserve.errors import ModelLoadError
from jaxserve.loading.gguf_file import GGUFFile
from tests.support.gguf_files import (
    Q,
    model_metadata,
    raw_entry,
    raw_gguf,
    raw_string,
    raw_tensor,
    to_gguf,
    tokenizer_metadata,
    write_gguf,
)
from tests.support.tiny_checkpoints import LLAMA, tiny_tensors

ROOT = Path(__file__).resolve().parent.parent.parent


def refusal(path: Path, content: bytes) -> str:
    """The error text for a file of this content; it must name the file."""
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "damaged.gguf"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny Llama, with tokenizer, quantised and plain tensors."""
    tensors = to_gguf(LLAMA, tiny_tensors(LLAMA))
    types = {name: Q.Q8_0 for name, tensor in tensors.items() if tensor.ndim == 2}
    metadata = model_metadata(LLAMA) | tokenizer_metadata()
    return write_gguf(
        tmp_path_factory.mktemp("good") / "good.gguf", "llama", metadata, tensors, types
    )


def header_size(path: Path) -> int:
    return int(gguf.GGUFReader(path).data_offset)


def test_b20_cut_at_ten_offsets(good: Path, path: Path) -> None:
    whole = good.read_bytes()
    in_header = [0, 3, 4, 12, 23, 40, header_size(good) // 2, header_size(good) - 40]
    in_data = [header_size(good) + 100, len(whole) - 1]
    for length in in_header + in_data:
        text = refusal(path, whole[:length])
        assert any(part in text for part in ("ends at", "end of the file", "cannot be read"))
        if length in in_data:
            assert "tensor '" in text


def test_b20_a_million_dimensions(path: Path) -> None:
    dims = raw_string("big") + struct.pack("<I", 10**6)
    assert "'big' has 1000000 dimensions" in refusal(path, raw_gguf(tensors=[dims]))


def test_b20_dimensions_whose_product_wraps_to_a_small_number(path: Path) -> None:
    # 2**32 * 2**32 * 4 is 0 in 64 bits, (2**63 + 4) * 2 is 8: both fit any file if they wrap.
    for dims in ([2**32, 2**32, 4], [2**63 + 4, 2], [2**64 - 1, 2**64 - 1]):
        content = raw_gguf(tensors=[raw_tensor("w", dims, Q.F32, 0)], data=bytes(64))
        assert "tensor 'w'" in refusal(path, content)


def test_b20_string_of_two_to_the_63_bytes(path: Path) -> None:
    entry = raw_string("general.name") + struct.pack("<IQ", GGUFValueType.STRING, 2**63)
    assert f"'general.name' has a string of {2**63} bytes" in refusal(path, raw_gguf([entry]))
    assert "string of" in refusal(path, raw_gguf([struct.pack("<Q", 2**63)]))
    named = struct.pack("<Q", 2**64 - 1) + b"x"
    assert "tensor 1 of 1" in refusal(path, raw_gguf(tensors=[named]))
    inner = struct.pack("<IQ", GGUFValueType.STRING, 2) + raw_string("a") + struct.pack("<Q", 2**63)
    entry = raw_entry("tokens", GGUFValueType.ARRAY, inner)
    assert "'tokens': string 1 of 2" in refusal(path, raw_gguf([entry]))


@pytest.mark.parametrize(
    ("offset", "problem"),
    [(32, "the file ends at"), (2**40, "the file ends at"), (2**64 - 32, "the file ends at"),
     (4, "not at a multiple of 32")],
)  # fmt: skip
def test_b20_offset_past_the_end_or_unaligned(path: Path, offset: int, problem: str) -> None:
    text = refusal(path, raw_gguf(tensors=[raw_tensor("w", [8], Q.F32, offset)], data=bytes(32)))
    assert "tensor 'w'" in text
    assert problem in text


def test_b20_big_endian_is_refused_with_the_way_out(path: Path) -> None:
    assert "gguf-convert-endian" in refusal(path, raw_gguf(order=">"))
    array = np.ones((2, 32), np.float32)
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("w", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "gguf-convert-endian" in refusal(path, path.read_bytes())


def shard_files(folder: Path, numbers: list[int], count: int) -> list[Path]:
    """Files of a split checkpoint; file number i of the name holds split.no numbers[i - 1]."""
    return [
        write_gguf(
            folder / f"m-{index:05d}-of-{count:05d}.gguf",
            "llama",
            {"split.no": number, "split.count": count, "split.tensors.count": len(numbers)},
            {f"w{number}": np.full(32, number, np.float32)},
        )
        for index, number in enumerate(numbers, 1)
    ]


def test_b20_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = shard_files(tmp_path, [0, 1], 2)
    paths[0].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00001-of-00002\.gguf.*part 1 of 2"):
        GGUFFile(paths[1])
    paths = shard_files(tmp_path, [0, 1, 2], 3)
    paths[1].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00003\.gguf.*part 2 of 3"):
        GGUFFile(paths[0])


def test_b20_shards_are_ordered_by_split_no(tmp_path: Path) -> None:
    paths = shard_files(tmp_path, [2, 0, 1], 3)
    for path in paths:  # any of them opens the whole
        file = GGUFFile(path)
        assert file.names() == ("w0", "w1", "w2")
        assert file.metadata["split.no"] == 0
        assert [file.load(name)[0] for name in file.names()] == [0, 1, 2]


def test_shards_that_do_not_belong_together(tmp_path: Path) -> None:
    twice = shard_files(tmp_path, [0, 0], 2)
    with pytest.raises(ModelLoadError, match=r"split\.no is 0; each file .* own number"):
        GGUFFile(twice[0])
    renamed = shard_files(tmp_path, [0, 1], 2)[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ModelLoadError, match="one of 2 files"):
        GGUFFile(renamed)
    for path in shard_files(tmp_path, [0, 1, 2], 3)[:2]:
        path.rename(path.with_name(path.name.replace("of-00003", "of-00002")))
    with pytest.raises(ModelLoadError, match="one of 3 files"):
        GGUFFile(tmp_path / "m-00001-of-00002.gguf")


def test_a_tensor_in_two_shards_and_a_wrong_total(tmp_path: Path) -> None:
    for index in (1, 2):
        write_gguf(
            tmp_path / f"m-{index:05d}-of-00002.gguf", "llama",
            {"split.no": index - 1, "split.count": 2, "split.tensors.count": 2},
            {"same": np.ones(32, np.float32)},
        )  # fmt: skip
    with pytest.raises(ModelLoadError, match="tensor 'same' is also in"):
        GGUFFile(tmp_path / "m-00001-of-00002.gguf")
    path = write_gguf(
        tmp_path / "one.gguf", "llama", {"split.tensors.count": 5}, {"w": np.ones(32, np.float32)}
    )
    with pytest.raises(ModelLoadError, match=r"split\.tensors\.count is 5.*hold 1 tensors"):
        GGUFFile(path)


ALIGNMENT = "general.alignment"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (raw_gguf(magic=b"GGML"), "starts with b'GGML'"),
        (raw_gguf(version=1), "version is 1"),
        (raw_gguf(version=4), "version is 4"),
        (raw_gguf(num_tensors=2**63), "tensors, the limit"),
        (raw_gguf(num_entries=2**63), "metadata keys, the limit"),
        (raw_gguf([raw_entry("k", 99, b"")]), "unknown value type 99"),
        (raw_gguf([raw_entry("k", GGUFValueType.ARRAY, struct.pack("<IQ", 9, 1))]), "of arrays"),
        (raw_gguf([raw_entry("k", GGUFValueType.ARRAY, struct.pack("<IQ", 4, 2**62))]), "elements"),
        (raw_gguf([raw_entry("k", GGUFValueType.ARRAY, struct.pack("<IQ", 4, 9000))]), "ends at"),
        (raw_gguf([raw_entry("k", GGUFValueType.STRING, raw_string(b"\xff"))]), "not UTF-8"),
        (raw_gguf([raw_entry("k", GGUFValueType.UINT8, b"1")] * 2), "'k' is there twice"),
        (raw_gguf([raw_entry(ALIGNMENT, GGUFValueType.UINT32, bytes(4))]), "alignment is 0"),
        (raw_gguf([raw_entry(ALIGNMENT, GGUFValueType.UINT32, b"\x30\0\0\0")]), "power of two"),
        (raw_gguf([raw_entry(ALIGNMENT, GGUFValueType.STRING, raw_string("32"))]), "alignment is"),
        (raw_gguf(tensors=[raw_tensor("w", [32], Q.F32, 0)] * 2, data=bytes(128)), "twice"),
        (raw_gguf(tensors=[raw_tensor("w", [], Q.F32, 0)]), "0 dimensions"),
        (raw_gguf(tensors=[raw_tensor("w", [4, 0], Q.F32, 0)]), "empty"),
        (raw_gguf(tensors=[raw_tensor("w", [4], 77, 0)], data=bytes(64)), "unknown type 77"),
        (raw_gguf(tensors=[raw_tensor("w", [33], Q.Q8_0, 0)], data=bytes(99)), "whole blocks"),
        (
            raw_gguf(
                tensors=[raw_tensor("a", [16], Q.F32, 0), raw_tensor("b", [8], Q.F32, 32)],
                data=bytes(64),
            ),
            "'a' and 'b' overlap",
        ),
    ],
)  # fmt: skip
def test_damaged_headers(path: Path, content: bytes, problem: str) -> None:
    assert problem in refusal(path, content)


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="there is no such file"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        GGUFFile(tmp_path)
    refusal(tmp_path / "text.gguf", b"version https://git-lfs.github.com/spec/v1\n" * 10)


READ_MUTANTS = """
import json, sys, time
from jaxserve.errors import ModelLoadError
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_file import GGUFFile
from jaxserve.loading.gguf_tensors import GGUFTensors

def read(path):
    file = GGUFFile(path)
    config = hf_config(file)
    source = GGUFTensors(file, config["num_attention_heads"], config["num_key_value_heads"])
    for name in source.names():
        source.load(name)

loaded, refused, slowest = 0, 0, 0.0
for path in sys.argv[1:]:
    start = time.perf_counter()
    try:
        read(path)
        loaded += 1
    except ModelLoadError as error:
        assert path in str(error) and len(str(error)) < 1000, str(error)[:2000]
        refused += 1
    slowest = max(slowest, time.perf_counter() - start)
# Not ru_maxrss: that one also counts what the process was before it became this program.
status = open('/proc/self/status').read()
peak = int(status.split('VmHWM:')[1].split()[0]) / 1024
print(json.dumps({"loaded": loaded, "refused": refused, "slowest": slowest, "peak_mb": peak}))
"""


def mutant(whole: bytes, header: int, rng: np.random.Generator) -> bytes:
    """The file with one to three changes to its header."""
    content = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, header))
        kind = rng.integers(0, 4)
        if kind == 0:
            content[at] = rng.integers(0, 256)
        elif kind == 1:
            extreme = (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
            content[at : at + 8] = struct.pack("<Q", extreme[rng.integers(0, len(extreme))])
        elif kind == 2:
            del content[at : at + int(rng.integers(1, 9))]
        else:
            content[at:at] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(content)


@pytest.mark.slow
def test_b20_two_hundred_mutants_in_a_process_of_their_own(good: Path, tmp_path: Path) -> None:
    whole, header = good.read_bytes(), header_size(good)
    rng = np.random.default_rng(20)
    paths = []
    for index in range(200):
        paths.append(tmp_path / f"mutant-{index}.gguf")
        # Most of the header is vocabulary; half of the mutants get their damage elsewhere.
        reach = header if index % 2 else 700
        paths[-1].write_bytes(mutant(whole, reach, rng))
    result = subprocess.run(
        [sys.executable, "-c", READ_MUTANTS, *map(str, paths)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout)
    assert report["loaded"] + report["refused"] == 200
    assert report["refused"] > 100
    assert report["slowest"] < 5
    assert report["peak_mb"] < 500
