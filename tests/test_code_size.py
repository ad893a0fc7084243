"""Files stay below 400 lines and functions below 60, so that one fits in a head.

GPU kernels may be longer: a kernel cut into pieces is harder to follow, not easier.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("jaxserve", "pallas_kernels", "checkpoints_tools", "scripts", "examples", "tests")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
KERNELS = "mosaic"  # in the name of a file of pallas_kernels


def python_files() -> list[Path]:
    """Every Python file of the repository, kernels and caches apart."""
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if is_python(path) and not (folder == "pallas_kernels" and KERNELS in path.name)
    ]


def is_python(path: Path) -> bool:
    """By its suffix, or by the first line of a script without one."""
    if path.suffix or not path.is_file():
        return path.suffix == ".py"
    with path.open("rb") as file:
        return b"python" in file.readline(200)


def long_functions(source: str) -> Iterator[str]:
    """Functions of more than MAX_FUNCTION_LINES lines, signature included, as "name (lines)"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.name} ({lines} lines)"


def test_files_are_short():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in python_files()
        if (lines := path.read_text(encoding="utf-8").count("\n")) > MAX_FILE_LINES
    }
    assert long == {}, f"split these files; the limit is {MAX_FILE_LINES} lines"


def test_functions_are_short():
    long = [
        f"{path.relative_to(ROOT)}: {function}"
        for path in python_files()
        for function in long_functions(path.read_text(encoding="utf-8"))
    ]
    assert long == [], f"split these functions; the limit is {MAX_FUNCTION_LINES} lines"


def test_the_check_sees_long_functions():
    body = "\n".join("    x = 1" for _ in range(MAX_FUNCTION_LINES - 1))
    assert list(long_functions(f"def fits():\n{body}\n")) == []
    too_long = f"class C:\n  async def f(self):\n{body}\n    x = 2\n"
    assert list(long_functions(too_long)) == ["f (61 lines)"]


def test_the_check_sees_the_repository():
    names = {str(path.relative_to(ROOT)) for path in python_files()}
    assert {"jaxserve/errors.py", "tests/test_code_size.py", "scripts/first_answer.py"} < names
