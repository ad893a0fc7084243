"""Files of saved requests: what comes back, and what is refused."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from jaxserve.engine.model_identity import ModelIdentity
from jaxserve.engine.request_state import PageForm, RequestState, SavedPages
from jaxserve.engine.state_file import read_state, write_state
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams

MODEL = ModelIdentity("Toy", "c0", "s0", "w0")
PAGE = (4, 2, 3)
ARRAYS = ((PAGE, "float32"), (PAGE, "bfloat16"), (PAGE, "int8"))
FORM = PageForm(4, "float32", "reference", (None, 5), ARRAYS)
PARAMS = SamplingParams(
    temperature=0.7, logit_bias={3: -1.5, 70: 2.0}, stop=["end", "é\n"], stop_token_ids=[5], seed=-3
)


def make_state() -> RequestState:
    """13 tokens, 12 of them computed: pages 0-2 of the global group, 2 of the windowed one."""
    rng = np.random.default_rng(0)
    contents = tuple(
        rng.normal(0, 20, (4, *shape)).astype(ml_dtypes.bfloat16 if "b" in dtype else dtype)
        for shape, dtype in ARRAYS
    )
    return RequestState(
        tuple(range(10)),
        (7, 8, 9),
        PARAMS,
        2**62 + 1,
        3,
        -2,
        "sält",
        SavedPages(FORM, 12, (0, 2), contents),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_state(tmp_path / "run.safetensors", make_state(), MODEL)
    return tmp_path / "run.safetensors"


def read(path: Path, **changes: Any) -> RequestState:
    return read_state(path, **{"model": MODEL, "form": FORM, "max_tokens": 100} | changes)


def test_what_is_written_comes_back(path: Path) -> None:
    state, expected = read(path), make_state()
    assert replace(state, pages=None) == replace(expected, pages=None)
    assert state.pages is not None
    assert expected.pages is not None
    assert (state.pages.num_tokens, state.pages.first_pages) == (12, (0, 2))
    for got, want in zip(state.pages.contents, expected.pages.contents, strict=True):
        assert got.dtype == want.dtype
        assert got.tobytes() == want.tobytes()


def test_without_pages(tmp_path: Path) -> None:
    state = replace(make_state(), pages=None, output_token_ids=())
    write_state(tmp_path / "run", state, MODEL)
    assert read(tmp_path / "run") == state


def test_it_is_a_safetensors_file_and_replaces_an_older_one_whole(path: Path) -> None:
    with safe_open(path, framework="numpy") as file:
        assert file.metadata()["format"] == "jaxserve request"
        np.testing.assert_array_equal(file.get_tensor("output_token_ids"), [7, 8, 9])
    before = path.read_bytes()
    broken = replace(make_state(), seed=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        write_state(path, broken, MODEL)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (replace(FORM, page_size=8), "page_size"),
        (replace(FORM, dtype="int8"), "dtype"),
        (replace(FORM, backend="gpu"), "backend"),
        (replace(FORM, windows=(None, 6)), "windows"),
        (replace(FORM, arrays=ARRAYS[:2]), "arrays"),
    ],
)
def test_pages_of_another_form_are_left_out_with_a_warning(
    path: Path, form: PageForm, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(path, form=form) == replace(make_state(), pages=None)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"another {named}" in record.getMessage()


def test_another_model_is_refused_and_one_stored_differently_computes_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for other in ({"architecture": "Other"}, {"config": "c1"}, {"weights": "w1"}):
        with pytest.raises(InvalidRequestError, match="saved with another model"):
            read(path, model=replace(MODEL, **other))
    assert read(path, model=replace(MODEL, storage="s1", weights="w1")).pages is None
    assert "the model is stored differently" in caplog.text


def test_a_longer_one_than_fits_is_refused(path: Path) -> None:
    assert read(path, max_tokens=13).num_tokens == 13
    with pytest.raises(InvalidRequestError, match="3 output_token_ids and there is room for 2"):
        read(path, max_tokens=12)


def rewritten(path: Path, change: Any) -> Path:
    """The file with its header changed by `change(header, state)`, arrays as they were."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    state = json.loads(header["__metadata__"]["state"])
    change(header, state)
    if "state" in header.get("__metadata__", {}):
        header["__metadata__"]["state"] = json.dumps(state)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    return path


DAMAGE = {
    "format": (lambda h, s: h["__metadata__"].update(format="pt"), "no saved run"),
    "no metadata": (lambda h, s: h.pop("__metadata__"), "no saved run"),
    "version": (lambda h, s: h["__metadata__"].update(version="2"), "has version 2"),
    "no state": (lambda h, s: h["__metadata__"].pop("state"), "does not say what the run is"),
    "unknown key": (lambda h, s: s.update(code="import os"), "does not say what the run is"),
    "seed": (lambda h, s: s.update(seed=2**70), "seed is no number"),
    "choice": (lambda h, s: s.update(choice=True), "choice is no number"),
    "params": (lambda h, s: s["params"].update(temperature=-1), "temperature is -1"),
    "unknown param": (lambda h, s: s["params"].update(magic=1), "parameters are not known"),
    "model": (lambda h, s: s.update(model=[]), "which model it is of"),
    "no tokens": (lambda h, s: h.update(x=h.pop("prompt_token_ids")), "no prompt_token_ids"),
    "tokens' type": (lambda h, s: h["prompt_token_ids"].update(dtype="F32"), "no prompt_token_ids"),
    "more KV": (lambda h, s: s["pages"].update(num_tokens=13), "KV of tokens"),
    "fewer KV": (
        lambda h, s: s["pages"].update(num_tokens=4, first_pages=[0, 0]),
        "is not 2 pages",
    ),
    "negative": (lambda h, s: s["pages"].update(first_pages=[-1, 2]), "pages are missing"),
    "gap": (lambda h, s: s["pages"].update(first_pages=[1, 2]), "pages are missing"),
    "groups": (lambda h, s: s["pages"].update(first_pages=[0]), "pages are missing"),
    "no numbers": (lambda h, s: s["pages"].update(first_pages=["a", 2]), "KV of tokens"),
    "no pages": (lambda h, s: s.update(pages={}), "which pages it has"),
    "digest": (lambda h, s: s.update(digest="00"), "not those that were written"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_files_are_refused(path: Path, change: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        read(rewritten(path, change))
    assert len(str(caught.value)) < 600


def test_no_byte_can_be_lost_or_changed_unnoticed(path: Path) -> None:
    data = path.read_bytes()
    rng = np.random.default_rng(1)
    for cut in (0, 4, 8, 50, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(InvalidRequestError):
            read(path)
    start = 8 + int.from_bytes(data[:8], "little")
    for at in rng.integers(start, len(data), 20):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(InvalidRequestError, match="not those that were written"):
            read(path)
    path.write_bytes((2**40).to_bytes(8, "little") + data[8:])
    with pytest.raises(InvalidRequestError, match="header of 1099511627776 bytes"):
        read(path)
    with pytest.raises(InvalidRequestError, match="no such file"):
        read(path.with_name("nothing"))
    for at in rng.integers(8, start, 200):  # the header: anything but another exception
        path.write_bytes(data[:at] + bytes([int(rng.integers(256))]) + data[at + 1 :])
        try:
            read(path)
        except InvalidRequestError:
            continue
