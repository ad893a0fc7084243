"""Wheels, as pip builds them from a clone: with native kernels, and without a compiler.

The native one is compiled without optimisation, which takes seconds instead of a minute.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("pyproject.toml", "CMakeLists.txt", "README.md", ".gitignore")
PACKAGES = ("jaxserve", "pallas_kernels", "checkpoints_tools")
ASK = """
import sys
sys.path.insert(0, sys.argv[1])
# The editable install's finder would look in the tree before it looks at sys.path.
sys.meta_path = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
import jaxserve, pallas_kernels
assert all(m.__file__.startswith(sys.argv[1]) for m in (jaxserve, pallas_kernels)), sys.path
import numpy as np
from pallas_kernels import native
from pallas_kernels.quantized_matmul import QuantizedArray, matmul, repack
print(native.why_not())
if native.why_not() is None:
    w = QuantizedArray({"values": np.full((33, 64), 0.5, np.float32)}, "f32", (33, 64))
    print(native.isa(), float(matmul(np.ones((2, 64)), repack(w, "panels")).sum()))
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files of the repository that a build needs; the real one stays as it is."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, folder / name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pallas_kernels" / "_native.stale.so").write_bytes(b"of the developer's tree")
    return folder


def build(clone: Path, *settings: str, **environment: str) -> Path:
    """The wheel of a clone."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += [f"--config-settings={setting}" for setting in settings]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*command, "--wheel-dir", clone.parent, clone],
        env=os.environ | {"PATH": path} | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = clone.parent.glob("*.whl")
    return wheel


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def ask(wheel: Path) -> list[str]:
    """What a process says that takes its packages from the wheel."""
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_wheel_with_native_kernels(clone: Path) -> None:
    wheel = build(clone, "cmake.build-type=Debug")
    assert wheel.name.startswith("jaxserve-0.1.0-cp312-abi3-"), wheel.name
    assert "pallas_kernels/_native.abi3.so" in names(wheel)
    assert not {name for name in names(wheel) if name.endswith((".cc", ".h", ".cmake", "stale.so"))}
    why_not, product = ask(wheel)
    assert why_not == "None"
    assert product.split() in (["avx512", "2112.0"], ["avx2", "2112.0"], ["baseline", "2112.0"])


@pytest.mark.slow
def test_a_wheel_without_a_compiler(clone: Path) -> None:
    wheel = build(clone, CXX="/bin/false")
    assert wheel.name == "jaxserve-0.1.0-py3-none-any.whl"
    assert not {name for name in names(wheel) if name.endswith((".cc", ".h", ".so"))}
    (why_not,) = ask(wheel)
    assert "the native CPU kernels are not built for" in why_not
    assert "install a C++ compiler" in why_not
