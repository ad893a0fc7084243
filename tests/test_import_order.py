"""The layers of the design import downwards only, and every module can be imported alone."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Lowest first. Layers on one line are neighbours: they do not import each other.
LAYERS = (
    ("jaxserve.errors",),
    ("jaxserve.sampling_params",),
    ("jaxserve.speculative_config",),
    ("jaxserve.config",),
    ("pallas_kernels",),
    ("jaxserve.core",),
    ("jaxserve.layers", "jaxserve.sampling"),
    ("jaxserve.models",),
    ("jaxserve.loading",),
    ("jaxserve.engine",),
    ("jaxserve.llm",),
    ("jaxserve.server", "jaxserve.bench", "jaxserve.eval", "jaxserve.planning"),
    ("jaxserve.batch",),
    ("jaxserve.cli",),
    ("jaxserve.__main__",),
    ("jaxserve",),  # the package itself hands out LLM and SamplingParams
)
HOST_ONLY = (
    "jaxserve.engine.request",
    "jaxserve.engine.kv_manager",
    "jaxserve.engine.scheduler",
    "jaxserve.engine.plan",
    "jaxserve.core.buckets",
    "jaxserve.core.kv_layout",
    "jaxserve.core.kv_spec",
)
NEVER = ("torch", "transformers", "checkpoints_tools", "tests", "pickle")

# Imports the third-party packages once, then each module alone in a fork of its own.
IMPORT_EACH_ALONE = """
import importlib, json, os, sys, traceback
for package in json.loads(sys.argv[1]):
    importlib.import_module(package)
failed = {}
for name in json.loads(sys.argv[2]):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-3000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    if said or status:
        failed[name] = said or f"ended with status {status}"
print(json.dumps(failed))
"""


def modules() -> dict[str, Path]:
    """Every module of the product: name -> file."""
    found = {}
    for package in ("jaxserve", "pallas_kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


def layer_of(module: str) -> tuple[int, str]:
    """(height, name) of the layer a module belongs to; the longest matching name wins."""
    matches = [
        (name, height)
        for height, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    name, height = max(matches, key=lambda match: len(match[0]))
    return height, name


def imports(source: str, known: set[str]) -> Iterator[str]:
    """Every module a source imports, wherever in it, by its full name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer: write the full name"
            base = node.module or ""
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in known else base


def violations(module: str, source: str, known: set[str]) -> list[str]:
    """The imports of `module` that the order forbids."""
    height, layer = layer_of(module)
    wrong = []
    for target in imports(source, known):
        package = target.partition(".")[0]
        if package in NEVER:
            wrong.append(f"{module} imports {target}: never in the product")
        elif package in ("jaxserve", "pallas_kernels"):
            target_height, target_layer = layer_of(target)
            if target_height >= height and target_layer != layer:
                wrong.append(f"{module} ({layer}) imports {target} ({target_layer})")
    return wrong


def test_layers_import_downwards_only():
    known = modules()
    wrong = [
        line
        for name, path in known.items()
        for line in violations(name, path.read_text(encoding="utf-8"), set(known))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("jaxserve.core.ops", "from jaxserve.engine.request import Request", 1),
        ("jaxserve.core.ops", "def f():\n    import jaxserve.models.base", 1),
        ("jaxserve.core.ops", "from jaxserve.core import kv_pool", 0),
        ("jaxserve.layers.mlp", "from jaxserve.sampling import masks", 1),
        ("jaxserve.server.app", "from jaxserve.bench import report", 1),
        ("jaxserve.eval.report", "from jaxserve.bench import progress", 1),
        ("jaxserve.engine.engine", "from jaxserve.models.base import ModelDef", 0),
        ("jaxserve.engine.engine", "from jaxserve import LLM", 1),
        ("pallas_kernels.x", "from jaxserve.core.step_batch import StepBatch", 1),
        ("jaxserve.models.llama", "import torch.nn", 1),
        ("jaxserve.config", "from jaxserve import errors", 0),
    ],
)
def test_the_check_sees_wrong_imports(module, source, wrong):
    assert len(violations(module, source, set(modules()))) == wrong


def test_every_module_can_be_imported_alone():
    """No module relies on another one having been imported before (no hidden cycles)."""
    names = [name for name in modules() if not name.endswith("__main__")]  # those run
    third_party = ["jax", "jax.numpy", "numpy", "flax.nnx", "aiohttp.web", "tokenizers", "gguf"]
    third_party += ["typer", "rich.progress", "jinja2.sandbox", "prometheus_client", "safetensors"]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH_ALONE, json.dumps(third_party), json.dumps(names)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert json.loads(done.stdout) == {}


def test_scheduler_allocator_and_request_bring_in_no_jax():
    code = (
        "import importlib, sys\n"
        f"for name in {HOST_ONLY!r}: importlib.import_module(name)\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib', 'flax')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
