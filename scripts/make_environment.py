"""Make or refresh a virtual environment of this repository; run by scripts/quickstart and test.

Usage: make_environment.py FOLDER [--extra NAME]... [--jax VERSION] [--sm90a]

With --sm90a the environment can also compile for Hopper GPUs, on a machine that has none: jax of
the version that GPU hosts run, its CUDA plugin, and the compilers, without the CUDA libraries.

A stamp in the environment says what it was installed from (a hash of pyproject.toml, the Python
version, the extras, a pinned jax), so a second run takes no time. The native kernels are compiled
into the tree by build_native.py, which has a stamp of its own and is asked every time: their
sources change without pyproject.toml. Standard library only: it runs before anything is installed.
"""

import argparse
import fcntl
import hashlib
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "jaxserve-stamp.json"
OLDEST = (3, 12)
# Needed by the editable install and by build_native.py; here and not in the build's own isolated
# environment, which would install jaxlib a second time for its headers.
BUILD_TOOLS = ("scikit-build-core>=0.11", "cmake>=3.26", "ninja>=1.11")
# What compiling for a Hopper GPU takes: the plugin of exactly this jax, ptxas and libNVVM. Without
# their dependencies, the CUDA libraries, which only running needs (gigabytes).
SM90A_JAX = "0.11.2"
SM90A_WHEELS = (
    f"jax-cuda13-plugin=={SM90A_JAX}",
    f"jax-cuda13-pjrt=={SM90A_JAX}",
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-nvdisasm==13.2.51",  # Mosaic lists its machine code with it, and complains without
)
# The native module is built into the tree instead, so that it follows the sources.
EDITABLE = {"wheel.cmake": "false", "wheel.py-api": "py3", "editable.mode": "inplace"}


@dataclass(frozen=True)
class Stamp:
    """What an environment was installed from."""

    pyproject: str
    python: str
    extras: tuple[str, ...]
    jax: str
    sm90a: tuple[str, ...] = ()  # the wheels that compile for Hopper, where they were asked for

    def serves(self, wanted: "Stamp") -> bool:
        """Whether an environment with this stamp has everything `wanted` asks for."""
        same = (self.pyproject, self.python, self.jax, self.sm90a)
        return same == (wanted.pyproject, wanted.python, wanted.jax, wanted.sm90a) and set(
            self.extras
        ) >= set(wanted.extras)


def say(text: str) -> None:
    print(f"[environment] {text}", flush=True)


def read_stamp(folder: Path) -> Stamp | None:
    try:
        fields = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        lists = {name: tuple(fields.get(name, ())) for name in ("extras", "sm90a")}
        return Stamp(**{**fields, **lists})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def environment_version(folder: Path) -> str | None:
    """The Python version of the environment, or None when there is none that can be used."""
    python = folder / "bin" / "python"
    code = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    version = done.stdout.strip()
    return version if tuple(int(part) for part in version.split(".")) >= OLDEST else None


def has_pip(folder: Path) -> bool:
    command = [str(folder / "bin" / "python"), "-m", "pip", "--version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def create(folder: Path) -> None:
    """Make the environment, with pip, from the interpreter that runs this file."""
    version = ".".join(map(str, sys.version_info[:3]))
    say(f"making {folder} with Python {version} ({sys.executable})")
    command = [sys.executable, "-m", "venv", "--clear", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split())[-300:]
        sys.exit(f"making the environment failed: {reason}")


def ensure_pip(folder: Path) -> None:
    """Environments made by uv have no pip, which `jaxserve pull` needs."""
    if not has_pip(folder):
        say("adding pip")
        command = [str(folder / "bin" / "python"), "-m", "ensurepip", "--default-pip"]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            create(folder)


def has_native_sources() -> bool:
    return (ROOT / "CMakeLists.txt").exists()


def install(folder: Path, wanted: Stamp) -> None:
    """Install the repository, editable, with its dependencies."""
    extras = f"[{','.join(wanted.extras)}]" if wanted.extras else ""
    pinned = [f"jax=={wanted.jax}"] if wanted.jax else []
    say(f"installing jaxserve{extras} {' '.join(pinned)} (the first time takes a minute or two)")
    if has_native_sources():
        pip_install(folder, list(BUILD_TOOLS))
    settings = [f"--config-settings={name}={value}" for name, value in EDITABLE.items()]
    editable = ["--no-build-isolation", *settings, "--editable", f"{ROOT}{extras}"]
    pip_install(folder, [*editable, *pinned])
    if wanted.sm90a:
        say("adding the compilers for Hopper GPUs (200 MB)")
        pip_install(folder, ["--no-deps", *wanted.sm90a])


def pip_install(folder: Path, what: list[str]) -> None:
    """pip install, showing the lines that tell how far it is. Exits when pip fails."""
    python = str(folder / "bin" / "python")
    command = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--progress-bar", "off", *what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(("Collecting", "Downloading", "Installing", "Successfully")):
                print(f"  {line.partition(' (from')[0].rstrip()[:160]}", flush=True)
    if process.returncode != 0:
        sys.exit("pip could not install jaxserve; its message is above. Correct it and run again")


def build_native(folder: Path) -> None:
    """Compile the native kernels, if their sources have changed. Does without when it cannot."""
    if has_native_sources():
        command = [str(folder / "bin" / "python"), str(ROOT / "scripts" / "build_native.py")]
        if subprocess.run(command, check=False).returncode != 0:
            sys.exit("building the native kernels ended unexpectedly; its message is above")


def make(folder: Path, extras: tuple[str, ...], jax: str, *, sm90a: bool = False) -> None:
    """Bring `folder` up to date with pyproject.toml; does nothing when it is."""
    wheels = SM90A_WHEELS if sm90a else ()
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp, version = read_stamp(folder), environment_version(folder)
    wanted = Stamp(digest, version or "", tuple(sorted(extras)), jax, wheels)
    if stamp is not None and stamp.serves(wanted) and has_pip(folder):
        say(f"{folder.name} is up to date (Python {version})")
        return
    if version is None:
        create(folder)
    ensure_pip(folder)
    kept = set(stamp.extras) if stamp is not None and version is not None else set()
    python = environment_version(folder) or ""
    wanted = Stamp(digest, python, tuple(sorted({*extras, *kept})), jax, wheels)
    install(folder, wanted)
    (folder / STAMP).write_text(json.dumps(asdict(wanted)) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="the environment's folder, relative to the repository")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml")
    parser.add_argument("--jax", default="", help="pin this version of jax")
    parser.add_argument("--sm90a", action="store_true", help="can compile for Hopper GPUs")
    options = parser.parse_args()
    if options.sm90a and options.jax not in ("", SM90A_JAX):
        parser.error(f"--sm90a comes with jax {SM90A_JAX}; leave --jax {options.jax} out")
    jax = SM90A_JAX if options.sm90a else options.jax
    with Path(__file__).open(encoding="utf-8") as lock:  # two scripts started at once take turns
        fcntl.flock(lock, fcntl.LOCK_EX)
        make(ROOT / options.folder, tuple(options.extra), jax, sm90a=options.sm90a)
        build_native(ROOT / options.folder)


if __name__ == "__main__":
    main()
