"""A request's state in one file: arrays as safetensors, everything else as JSON in its header.

    prompt_token_ids, output_token_ids   int32 [tokens]
    kv.0, kv.1 ...                       the kept pages in each array of the pool

The header's `__metadata__` says {"format": "jaxserve request", "version": "1", "state": JSON}: the
parameters, seed, choice, priority and salt, the model's identity, what the pages are, and digests
of the arrays. No code, no pickle. Nothing is believed: sizes are checked before anything is read,
and the pages are read only if the engine has room for exactly such pages.

A file of another model is refused. Pages of another form (page size, type, backend) are left out
with a warning, and are then computed again from the tokens; so are those of a model that is stored
differently, because then nobody can tell whether it is the same.
"""

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.engine.model_identity import ModelIdentity
from jaxserve.engine.request_state import PageForm, RequestState, SavedPages, count_pages
from jaxserve.errors import InvalidRequestError
from jaxserve.loading.safetensors_file import NUMPY_TYPES
from jaxserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FORMAT = "jaxserve request"
VERSION = "1"
_MAX_HEADER = 1 << 20
_TYPES = NUMPY_TYPES | {"F8_E4M3": ml_dtypes.float8_e4m3fn}  # elsewhere read as bytes
_TYPE_NAMES = {np.dtype(dtype).name: name for name, dtype in _TYPES.items()}
_STATE_KEYS = {"params", "seed", "choice", "priority", "cache_salt", "model", "pages", "digest"}


def write_state(path: Path, state: RequestState, model: ModelIdentity) -> None:
    """Write the file whole, or not at all: an old one of this name stays until then.

    Raises OSError.
    """
    tokens, contents = _tokens(state), _contents(state.pages)
    arrays = tokens | contents
    pages = state.pages
    described = {
        "params": _params_json(state.params),
        "seed": state.seed,
        "choice": state.choice,
        "priority": state.priority,
        "cache_salt": state.cache_salt,
        "model": asdict(model),
        "pages": None
        if pages is None
        else {
            "form": asdict(pages.form),
            "num_tokens": pages.num_tokens,
            "first_pages": pages.first_pages,
            "digest": _digest(contents),
        },
        "digest": _digest(tokens),
    }
    metadata = {"format": FORMAT, "version": VERSION, "state": json.dumps(described)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        dtype = _TYPE_NAMES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                file.write(_bytes(array))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_state(path: Path, model: ModelIdentity, form: PageForm, max_tokens: int) -> RequestState:
    """The state in a file, for an engine that serves `model`, whose pages have this `form`, and
    whose requests have at most max_tokens tokens.

    Raises InvalidRequestError if the file is missing, damaged, of another version or model, or
    too long.
    """
    file = _StateFile(path)
    described = file.described
    compared = model.compare(_identity(file, described["model"]))
    if compared == "other":
        raise file.error(
            "was saved with another model; load it into the one it came from "
            f"(architecture {str(described['model']['architecture'])[:80]})"
        )
    prompt = file.tokens("prompt_token_ids", max_tokens)
    output = file.tokens("output_token_ids", max_tokens - len(prompt))
    pages = None
    if described["pages"] is not None:
        num_tokens, first_pages = _extent(file, described["pages"], len(prompt) + len(output), form)
        reason = f"the model is {compared}" if compared != "same" else ""
        reason = reason or _form_differences(described["pages"], form)
        if reason:
            logger.warning(
                "the KV in %s cannot be used here (%s); it is computed again from the tokens",
                path,
                reason,
            )
        else:
            contents = file.contents(form, count_pages(form, num_tokens, first_pages))
            pages = SavedPages(form, num_tokens, first_pages, contents)
            file.check_digest(_contents(pages), described["pages"].get("digest"))
    state = RequestState(
        tuple(prompt.tolist()),
        tuple(output.tolist()),
        _params(file, described["params"]),
        file.integer("seed", -(2**63), 2**63 - 1),
        file.integer("choice", 0, 2**16),
        file.integer("priority", -(2**63), 2**63 - 1),
        str(described["cache_salt"]),
        pages,
    )
    file.check_digest(_tokens(state), described["digest"])
    return state


@dataclass(frozen=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _StateFile:
    """A file's header, checked, and its arrays, read one by one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > _MAX_HEADER:
                    raise self.error(f"has a header of {size} bytes; no saved run has")
                header = json.loads(file.read(size))
            with safe_open(path, framework="numpy"):  # lengths, offsets, coverage of the file
                pass
        except FileNotFoundError:
            raise InvalidRequestError(f"{path}: there is no such file", "path") from None
        except InvalidRequestError:
            raise
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise self.error(f"is no saved run, or damaged: {str(error)[:200]}") from error
        metadata = header.pop("__metadata__", None) or {}
        if metadata.get("format") != FORMAT:
            raise self.error("is a safetensors file, but no saved run")
        if metadata.get("version") != VERSION:
            raise self.error(
                f"has version {str(metadata.get('version'))[:20]} and this program reads "
                f"{VERSION}; use the jaxserve that wrote it"
            )
        self._arrays = {
            name: _Stored(
                at["dtype"], tuple(at["shape"]), *(8 + size + end for end in at["data_offsets"])
            )
            for name, at in header.items()
        }
        self.described: dict[str, Any] = self._described(metadata)

    def error(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(f"{self.path} {what}", "path")

    def _described(self, metadata: dict[str, str]) -> dict[str, Any]:
        try:
            described = json.loads(metadata["state"])
        except (KeyError, ValueError, RecursionError):
            described = None
        if not isinstance(described, dict) or set(described) != _STATE_KEYS:
            raise self.error("is damaged: it does not say what the run is")
        return described

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.described[name]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(f"is damaged: {name} is no number it can be")
        return value

    def tokens(self, name: str, most: int) -> np.ndarray:
        """Token ids [n] int32, at most `most`."""
        stored = self._arrays.get(name)
        if stored is None or stored.dtype != "I32" or len(stored.shape) != 1:
            raise self.error(f"is damaged: it has no {name}")
        if stored.shape[0] > most:
            raise self.error(f"has {stored.shape[0]} {name} and there is room for {most} here")
        return self._read(stored)

    def contents(self, form: PageForm, num_pages: int) -> tuple[np.ndarray, ...]:
        """The pages in each array of the pool."""
        names = [f"kv.{index}" for index in range(len(form.arrays))]
        for name, (shape, dtype) in zip(names, form.arrays, strict=True):
            stored = self._arrays.get(name)
            expected = (_TYPE_NAMES.get(dtype), (num_pages, *shape))
            if stored is None or (stored.dtype, stored.shape) != expected:
                raise self.error(f"is damaged: {name} is not {num_pages} pages")
        if len(self._arrays) != len(names) + 2:  # the tokens
            raise self.error("is damaged: it has arrays that no saved run has")
        return tuple(self._read(self._arrays[name]) for name in names)

    def check_digest(self, arrays: dict[str, np.ndarray], digest: Any) -> None:
        if _digest(arrays) != digest:
            raise self.error("is damaged: its arrays are not those that were written")

    def _read(self, stored: _Stored) -> np.ndarray:
        array = np.empty(stored.shape, _TYPES[stored.dtype])
        with self.path.open("rb") as file:
            file.seek(stored.start)
            if file.readinto(_bytes(array)) != stored.end - stored.start:
                raise self.error("has become shorter while it was read")
        return array


def _tokens(state: RequestState) -> dict[str, np.ndarray]:
    return {
        "prompt_token_ids": np.array(state.prompt_token_ids, np.int32),
        "output_token_ids": np.array(state.output_token_ids, np.int32),
    }


def _contents(pages: SavedPages | None) -> dict[str, np.ndarray]:
    contents = () if pages is None else pages.contents
    return {f"kv.{index}": np.ascontiguousarray(array) for index, array in enumerate(contents)}


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays.values():
        digest.update(_bytes(array))
    return digest.hexdigest()


def _params_json(params: SamplingParams) -> dict[str, Any]:
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return values | {"logit_bias": dict(params.logit_bias)}


def _params(file: _StateFile, values: Any) -> SamplingParams:
    known = {field.name for field in fields(SamplingParams)}
    if not isinstance(values, dict) or set(values) - known:
        raise file.error("is damaged: its sampling parameters are not known here")
    return SamplingParams(**values)  # checks every value


def _identity(file: _StateFile, values: Any) -> ModelIdentity:
    names = {field.name for field in fields(ModelIdentity)}
    if not isinstance(values, dict) or set(values) != names:
        raise file.error("is damaged: it does not say which model it is of")
    return ModelIdentity(**{name: str(value) for name, value in values.items()})


def _form_differences(pages: dict[str, Any], form: PageForm) -> str:
    """What of the pages' form is not that of this engine; empty: they can be used."""
    ours = json.loads(json.dumps(asdict(form)))
    theirs = pages["form"] if isinstance(pages["form"], dict) else {}
    return ", ".join(f"another {name}" for name in ours if theirs.get(name) != ours[name])


def _extent(
    file: _StateFile, pages: Any, num_tokens: int, form: PageForm
) -> tuple[int, tuple[int, ...]]:
    """(tokens whose KV is kept, first page per group), checked as far as `form` is theirs."""
    try:
        computed, first_pages = pages["num_tokens"], tuple(pages["first_pages"])
        differs = bool(_form_differences(pages, form))
    except (KeyError, TypeError):
        raise file.error("is damaged: it does not say which pages it has") from None
    numbers = all(type(number) is int for number in (computed, *first_pages))
    if not numbers or not 0 < computed < num_tokens:
        raise file.error("is damaged: it has KV of tokens that it does not have")
    if not differs:
        most = [form.first_seen(computed, window) for window in form.windows]
        if len(first_pages) != len(most) or not all(
            0 <= first <= limit for first, limit in zip(first_pages, most, strict=True)
        ):
            raise file.error("is damaged: pages are missing")
    return computed, first_pages
