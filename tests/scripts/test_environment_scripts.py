"""The start scripts: which interpreter they find, and when they make or refresh an environment.

They run here on a copy of the scripts with a toy project that needs nothing from an index.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BACKEND = '''
"""A build backend that needs nothing: one editable wheel without code."""
import zipfile

FILES = {
    "METADATA": "Metadata-Version: 2.1\\nName: toy\\nVersion: 1.0\\nProvides-Extra: test\\n",
    "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "RECORD": "",
}

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for file, content in FILES.items():
            wheel.writestr(f"toy-1.0.dist-info/{file}", content)
    return name

build_wheel = build_editable
'''
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A toy repository, in a folder with a space in its name, with the real scripts."""
    root = tmp_path / "a clone"
    (root / "scripts").mkdir(parents=True)
    for name in ("find_python", "make_environment.py"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts" / name)
    (root / "backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(PYPROJECT)
    return root


def find_python(root: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [root / "scripts" / "find_python"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd="/", check=False
    )


def fake_python(folder: Path, name: str, version: tuple[int, int]) -> Path:
    """A `python` that claims a version: the real one, with sys.version_info replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(
        "#!/bin/sh\n"
        f"code=\"import sys; sys.version_info = {version!r}; sys.executable = '$0'\n$2\"\n"
        f'exec "{sys.executable}" -c "$code"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH folder with what the script itself needs, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "dirname"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def test_a_new_enough_interpreter_on_the_path_is_taken(repository, tools):
    fake_python(tools, "python3", (3, 11))
    wanted = fake_python(tools, "python3.13", (3, 13))
    found = find_python(repository, PATH=str(tools), HOME="/nowhere")
    assert (found.returncode, found.stdout.strip()) == (0, str(wanted))


def test_an_old_python3_is_passed_over_for_pyenvs(repository, tools, tmp_path):
    fake_python(tools, "python3", (3, 11))
    home = tmp_path / "home"
    fake_python(home / ".pyenv" / "versions" / "3.11.7" / "bin", "python3", (3, 11))
    wanted = fake_python(home / ".pyenv" / "versions" / "3.12.1" / "bin", "python3", (3, 12))
    found = find_python(repository, PATH=str(tools), HOME=str(home))
    assert (found.returncode, found.stdout.strip()) == (0, str(wanted))


def test_a_shim_that_fails_is_passed_over(repository, tools, tmp_path):
    (tools / "python3.12").write_text("#!/bin/sh\necho 'pyenv: not found' >&2\nexit 127\n")
    (tools / "python3.12").chmod(0o755)
    wanted = fake_python(tmp_path / "root" / "versions" / "3.14.0" / "bin", "python3", (3, 14))
    found = find_python(
        repository, PATH=str(tools), HOME="/nowhere", PYENV_ROOT=str(tmp_path / "root")
    )
    assert (found.returncode, found.stdout.strip()) == (0, str(wanted))


def test_uvs_interpreter(repository, tools, tmp_path):
    wanted = fake_python(tmp_path / "uv", "python3.12", (3, 12))
    (tools / "uv").write_text(f'#!/bin/sh\necho "{wanted}"\n')
    (tools / "uv").chmod(0o755)
    found = find_python(repository, PATH=str(tools), HOME="/nowhere")
    assert (found.returncode, found.stdout.strip()) == (0, str(wanted))


def test_without_an_interpreter_one_line_says_what_to_install(repository, tools):
    fake_python(tools, "python3", (3, 11))
    found = find_python(repository, PATH=str(tools), HOME="/nowhere")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.count("\n") == 1
    assert "3.12" in found.stderr
    (tools / "uv").write_text("#!/bin/sh\nexit 2\n")
    (tools / "uv").chmod(0o755)
    found = find_python(repository, PATH=str(tools), HOME="/nowhere")
    assert found.stderr == "no Python 3.12 or newer found; type: uv python install 3.12\n"


def test_a_chosen_interpreter_must_do(repository, tools):
    old = fake_python(tools, "python3.11", (3, 11))
    new = fake_python(tools, "my-python", (3, 12))
    good = find_python(repository, PATH=str(tools), HOME="/", JAXSERVE_PYTHON=str(new))
    assert (good.returncode, good.stdout.strip()) == (0, str(new))
    bad = find_python(repository, PATH=str(tools), HOME="/", JAXSERVE_PYTHON=str(old))
    assert bad.returncode == 1
    assert "unset or correct it" in bad.stderr


def make(root: Path, *arguments: str) -> str:
    """Run make_environment.py on .venv; returns what it said."""
    offline = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    offline |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, root / "scripts" / "make_environment.py", ".venv", *arguments],
        capture_output=True,
        text=True,
        env=offline,
        cwd="/",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_environment_is_completed_kept_and_refreshed(repository):
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", repository / ".venv"], check=True
    )
    said = make(repository)
    assert "adding pip" in said
    assert "making" not in said
    assert "up to date" in make(repository)
    assert "installing jaxserve[test]" in make(repository, "--extra", "test")
    assert "up to date" in make(repository), "an extra more is no reason to install again"
    (repository / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    assert "installing jaxserve[test]" in make(repository), "extras are kept"


@pytest.fixture
def make_environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_environment", ROOT / "scripts" / "make_environment.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_stamps(make_environment, tmp_path):
    stamp = make_environment.Stamp("hash", "3.12.1", ("test",), "")
    for change, serves in {
        "same": True,
        "fewer extras": True,
        "more extras": False,
        "pyproject": False,
        "python": False,
        "jax": False,
        "sm90a": False,
    }.items():
        wanted = {
            "same": stamp,
            "fewer extras": make_environment.Stamp("hash", "3.12.1", (), ""),
            "more extras": make_environment.Stamp("hash", "3.12.1", ("gpu", "test"), ""),
            "pyproject": make_environment.Stamp("other", "3.12.1", ("test",), ""),
            "python": make_environment.Stamp("hash", "3.12.2", ("test",), ""),
            "jax": make_environment.Stamp("hash", "3.12.1", ("test",), "0.11.2"),
            "sm90a": make_environment.Stamp("hash", "3.12.1", ("test",), "", ("nvcc==13",)),
        }[change]
        assert stamp.serves(wanted) is serves, change
    for damaged in ("", "{", "[]", '{"extras": 3}', '{"extras": [], "x": 1}'):
        (tmp_path / "jaxserve-stamp.json").write_text(damaged)
        assert make_environment.read_stamp(tmp_path) is None
    assert make_environment.environment_version(tmp_path) is None


@pytest.mark.parametrize("broken", ["missing", "dangling", "old"])
def test_an_environment_that_cannot_be_used_is_made_anew(
    make_environment, tmp_path, monkeypatch, broken
):
    folder = tmp_path / ".venv"
    if broken == "dangling":
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to("/no/such/python")
    elif broken == "old":
        fake_python(folder / "bin", "python", (3, 11))
    done = []

    def create(where: Path) -> None:
        where.mkdir(exist_ok=True)
        done.append("create")

    monkeypatch.setattr(make_environment, "create", create)
    monkeypatch.setattr(make_environment, "ensure_pip", lambda f: done.append("pip"))
    monkeypatch.setattr(make_environment, "install", lambda f, wanted: done.append(wanted.extras))
    make_environment.make(folder, ("test",), "")
    assert done == ["create", "pip", ("test",)]
    assert make_environment.read_stamp(folder) is not None
    done.clear()
    make_environment.make(folder, ("test",), "0.11.2", sm90a=True)
    stamp = make_environment.read_stamp(folder)
    assert stamp.sm90a == make_environment.SM90A_WHEELS
    assert all("==" in wheel for wheel in stamp.sm90a)
