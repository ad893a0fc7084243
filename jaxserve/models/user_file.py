"""A model from the user's own Python file, named by them on the command line.

This runs that file, as `python file.py` would: it is the researcher's code, given on purpose. Code
that lies in a checkpoint is never run.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from jaxserve.errors import ModelLoadError
from jaxserve.models.base import ModelDef


def load_model_file(path: str | Path) -> ModelDef:
    """The ModelDef that the file ends in as MODEL.

    Raises ModelLoadError if the file is missing, fails to run, or has no such MODEL.
    """
    model = getattr(import_model_file(path), "MODEL", None)
    if not isinstance(model, ModelDef):
        got = "no MODEL" if model is None else f"MODEL of type {type(model).__name__}"
        raise ModelLoadError(
            f"{path}: got {got}; want the file to end in MODEL = ModelDef(...) "
            "from jaxserve.models.base, or MODEL = from_nnx(...)"
        )
    return model


def import_model_file(path: str | Path) -> ModuleType:
    """Run the file and return its module. Raises ModelLoadError, with the cause attached."""
    file = Path(path)
    if not file.is_file() or file.suffix != ".py":
        raise ModelLoadError(f"model file {path}: not found, or not a .py file")
    name = f"jaxserve_model_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModelLoadError(f"model file {path}: Python cannot import it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while the file runs
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ModelLoadError(f"model file {path}: {type(error).__name__}: {error}") from error
    return module
