"""JSON files of a checkpoint: bounded, and never a traceback."""

import json
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelLoadError


def read_json_object(path: Path, max_bytes: int = 1 << 20) -> dict[str, Any]:
    """The object in a file. ModelLoadError if it is absent, too long, not JSON or no object."""
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise ModelLoadError(f"{path}: longer than the limit of {max_bytes} bytes")
        value = json.loads(raw)
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: there is no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{path}: cannot be read as JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value
