"""--model-file: the file is run, must end in MODEL, and failures say which file and why."""

import sys
from pathlib import Path

import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.user_file import load_model_file

GOOD = """
from dataclasses import dataclass
from jaxserve.models import llama

@dataclass(frozen=True)
class Extra:
    size: "int" = 3

MODEL = llama.MODEL
"""


def _write(folder: Path, text: str, name: str = "own_model.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_model_of_the_file_comes_back(tmp_path: Path) -> None:
    assert load_model_file(_write(tmp_path, GOOD)).name == "llama"
    assert load_model_file(str(tmp_path / "own_model.py")).name == "llama"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", ["no MODEL", "ModelDef"]),
        ("MODEL = 3", ["MODEL of type int", "ModelDef"]),
        ("import no_such_module", ["ModuleNotFoundError", "no_such_module"]),
        ("def f(:", ["SyntaxError"]),
        ("raise RuntimeError('no GPU here')", ["RuntimeError", "no GPU here"]),
    ],
)
def test_a_file_without_a_model_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ModelLoadError) as error:
        load_model_file(path)
    assert all(word in str(error.value) for word in [str(path), *words]), error.value


def test_a_failed_file_leaves_no_module_behind(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        load_model_file(_write(tmp_path, "1 / 0", "breaks_at_once.py"))
    assert not [name for name in sys.modules if "breaks_at_once" in name]


@pytest.mark.parametrize("name", ["missing.py", "model.txt", "."])
def test_what_is_no_python_file_is_refused(tmp_path: Path, name: str) -> None:
    if name == "model.txt":
        _write(tmp_path, GOOD, name)
    with pytest.raises(ModelLoadError, match=r"not found, or not a \.py file"):
        load_model_file(tmp_path / name)
