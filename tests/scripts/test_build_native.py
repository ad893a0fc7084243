"""When the native kernels are compiled again, and what happens where they cannot be."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def build_native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, for a toy repository that has a module."""
    path = ROOT / "scripts" / "build_native.py"
    spec = importlib.util.spec_from_file_location("build_native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "pallas_kernels")
    monkeypatch.setattr(module, "STAMP", tmp_path / "stamp.json")
    (tmp_path / "pallas_kernels" / "op").mkdir(parents=True)
    (tmp_path / "CMakeLists.txt").write_text("project(toy)")
    (tmp_path / "pallas_kernels" / "op" / "cpu.cc").write_text("int x;")
    (tmp_path / "pallas_kernels" / "_native.abi3.so").write_bytes(b"module")
    monkeypatch.delenv("CXX", raising=False)
    return module


def test_headers_are_those_that_jax_names(build_native):
    headers = build_native.xla_headers()
    assert headers == Path(jax.ffi.include_dir())
    major, minor = build_native.ffi_api(headers)
    assert (major, minor) >= (0, 4)


def test_every_source_counts(build_native, tmp_path):
    seen = {build_native.sources_digest()}
    for name, text in (
        ("CMakeLists.txt", "project(other)"),
        ("pallas_kernels/op/cpu.cc", "int y;"),
        ("pallas_kernels/op/cpu.h", ""),
        ("pallas_kernels/op/more.cmake", ""),
    ):
        (tmp_path / name).write_text(text)
        digest = build_native.sources_digest()
        assert digest not in seen, name
        seen.add(digest)


def test_a_module_serves_the_same_sources_and_newer_headers(build_native):
    stamp = build_native.Stamp("hash", "x86_64", (0, 4))
    assert stamp.serves(stamp)
    assert stamp.serves(build_native.Stamp("hash", "x86_64", (0, 5)))
    assert not stamp.serves(build_native.Stamp("hash", "x86_64", (0, 3)))
    assert not stamp.serves(build_native.Stamp("other", "x86_64", (0, 4)))
    assert not stamp.serves(build_native.Stamp("hash", "aarch64", (0, 4)))


def wanted_stamp(module: ModuleType) -> dict[str, object]:
    api = module.ffi_api(module.xla_headers())
    machine = module.platform.machine()
    return {"sources": module.sources_digest(), "machine": machine, "ffi_api": api}


def test_nothing_is_done_when_nothing_changed(build_native, monkeypatch, capsys):
    monkeypatch.setattr(build_native, "compile_module", lambda headers: pytest.fail("compiled"))
    build_native.STAMP.write_text(json.dumps(wanted_stamp(build_native)))
    build_native.main()
    assert capsys.readouterr().out == "[native] the CPU kernels are up to date\n"


@pytest.mark.parametrize("stamp", ["", "{", "[]", '{"sources": "x"}', None])
def test_without_a_compiler_no_module_of_other_sources_stays(
    build_native, monkeypatch, capsys, stamp
):
    if stamp is not None:
        build_native.STAMP.write_text(stamp)
    monkeypatch.setenv("PATH", "/nowhere")
    build_native.main()
    said = capsys.readouterr().out
    assert "there is no C++ compiler (install g++ or clang" in said
    assert "runs on the references" in said
    assert build_native.modules() == []


def test_a_build_that_fails_says_so_and_is_tried_again(build_native, monkeypatch, capsys):
    monkeypatch.setattr(build_native, "compiler", lambda: "c++")
    monkeypatch.setattr(build_native, "compile_module", lambda headers: "cpu.cc:1: error")
    for _ in range(2):
        build_native.main()
        said = capsys.readouterr().out
        assert "cpu.cc:1: error\n[native] building the CPU kernels failed" in said
        assert build_native.read_stamp() is None


def test_a_module_that_was_built_is_kept(build_native, monkeypatch, capsys):
    monkeypatch.setattr(build_native, "compiler", lambda: "c++")
    monkeypatch.setattr(build_native, "compile_module", lambda headers: None)
    build_native.main()
    assert "built pallas_kernels/_native.abi3.so" in capsys.readouterr().out
    build_native.main()
    assert "up to date" in capsys.readouterr().out
