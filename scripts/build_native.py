"""Compile the native CPU kernels into the tree, if their sources have changed.

Run by make_environment.py with the environment's own Python: an editable install takes its code
from the tree, so the module belongs there too (pallas_kernels/_native.abi3.so, ignored by git).
Wheels are built from the same CMakeLists.txt by `pip`, see pyproject.toml. Standard library only.

One module in the tree serves every environment of it. XLA loads a module that was built for the
API of its own jaxlib or an older one, so a module that is too new for this environment is built
again with this environment's headers (seconds: the kernels themselves do not see them).
"""

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "native"
STAMP = BUILD / "stamp.json"
PACKAGE = ROOT / "pallas_kernels"
WITHOUT = "everything runs on the references, several times slower"


@dataclass(frozen=True)
class Stamp:
    """What a module was built from. ffi_api: of XLA's headers, as (major, minor)."""

    sources: str
    machine: str
    ffi_api: tuple[int, int]

    def serves(self, wanted: "Stamp") -> bool:
        same = (self.sources, self.machine) == (wanted.sources, wanted.machine)
        return same and self.ffi_api <= wanted.ffi_api


def say(text: str) -> None:
    print(f"[native] {text}", flush=True)


def sources_digest() -> str:
    """A hash of everything that is compiled and of how it is compiled."""
    files = [path for kind in ("*.cc", "*.h", "*.cmake") for path in PACKAGE.rglob(kind)]
    digest = hashlib.sha256()
    for path in [ROOT / "CMakeLists.txt", *sorted(files)]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def xla_headers() -> Path | None:
    """The folder that `jax.ffi.include_dir()` gives, found without importing jax."""
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib is None or jaxlib.origin is None:
        return None
    return Path(jaxlib.origin).parent / "include"


def ffi_api(headers: Path) -> tuple[int, int]:
    text = (headers / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return int(numbers["MAJOR"]), int(numbers["MINOR"])


def read_stamp() -> Stamp | None:
    """The stamp of the module in the tree; None when there is no module, or no telling of what."""
    if not modules():
        return None
    try:
        fields = json.loads(STAMP.read_text(encoding="utf-8"))
        return Stamp(**{**fields, "ffi_api": tuple(fields["ffi_api"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def modules() -> list[Path]:
    """The compiled module in the tree, if there is one."""
    return sorted(PACKAGE.glob("_native*.so"))


def compiler() -> str | None:
    """The C++ compiler that CMake will take: $CXX, or the first of the usual names."""
    chosen = os.environ.get("CXX", "").split()
    names = chosen[:1] or ["c++", "g++", "clang++"]
    return next((name for name in names if shutil.which(name)), None)


def tool(name: str) -> str | None:
    """A build tool of this environment, else of the system."""
    own = Path(sys.executable).parent / name
    return str(own) if own.exists() else shutil.which(name)


def run(command: list[str], *, show: bool) -> str | None:
    """Run a command; returns None when it went well, else the end of what it said.

    show: print the steps of a build as they are done.
    """
    end: list[str] = []
    environment = {**os.environ, "NINJA_STATUS": "[%f of %t] "}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            end = [*end[-39:], line.rstrip()]
            if show and line.startswith("["):
                number, _, what = line.partition("] ")
                print(f"  {number}] {'/'.join(what.split('/')[-2:]).strip()[:80]}", flush=True)
    return None if process.returncode == 0 else "\n".join(end)


def compile_module(headers: Path) -> str | None:
    """Configure, build in BUILD, put the module in the tree; returns what went wrong, or None."""
    cmake, ninja = tool("cmake"), tool("ninja")
    if cmake is None or ninja is None:
        return "there is no cmake or no ninja: pip install cmake ninja"
    configure = [cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD)]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DXLA_INCLUDE={headers}"]
    problem = run(configure, show=False)
    if problem is not None and (BUILD / "CMakeCache.txt").exists():
        shutil.rmtree(BUILD)  # made for another compiler, perhaps, or before the clone was moved
        problem = run(configure, show=False)
    problem = problem or run([cmake, "--build", str(BUILD), "--parallel"], show=True)
    prefix = BUILD / "install"
    problem = problem or run(
        [cmake, "--install", str(BUILD), "--prefix", str(prefix), "--strip"], show=False
    )
    if problem is None:
        for built in (prefix / PACKAGE.name).glob("_native*"):
            # Replaced as a whole: a process that runs has the old file mapped.
            shutil.copy2(built, PACKAGE / f".{built.name}")
            (PACKAGE / f".{built.name}").replace(PACKAGE / built.name)
    return problem


def give_up(reason: str) -> None:
    """Say why there is no module, and leave none of other sources behind."""
    for path in modules():
        path.unlink()
    say(f"{reason}; without native CPU kernels {WITHOUT}")


def main() -> None:
    headers = xla_headers()
    if headers is None:
        sys.exit("jaxlib is not installed for this Python; run scripts/make_environment.py")
    wanted = Stamp(sources_digest(), platform.machine(), ffi_api(headers))
    stamp = read_stamp()
    if stamp is not None and stamp.serves(wanted):
        say("the CPU kernels are up to date")
        return
    if compiler() is None:
        give_up("there is no C++ compiler (install g++ or clang and run this again)")
        return
    say("building the native CPU kernels, the first time about a minute")
    STAMP.unlink(missing_ok=True)
    problem = compile_module(headers)
    if problem is not None:
        print(problem, flush=True)
        give_up("building the CPU kernels failed, see above")
        return
    STAMP.write_text(json.dumps(asdict(wanted)) + "\n", encoding="utf-8")
    say(f"built {modules()[0].relative_to(ROOT)}")


if __name__ == "__main__":
    main()
