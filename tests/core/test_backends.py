"""Which backend is chosen on which device, and what its kernels refuse."""

import re
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.backends import (
    choose_backend,
    default_page_size,
    make_ops,
    refusal,
    weight_layout,
    why_reference,
)
from jaxserve.core.kv_spec import KVGroup, KVSpec
from jaxserve.engine.backend_settings import settle_backend
from jaxserve.errors import InvalidRequestError
from jaxserve.loading.quantize_on_load import kept_layout, quantize_int8


@dataclass(frozen=True)
class Device:
    """Of a jax.Device, what choosing looks at."""

    platform: str
    device_kind: str = ""
    compute_capability: str = ""


HOPPER = Device("gpu", "NVIDIA H200", "9.0")
AMPERE = Device("gpu", "NVIDIA A100-SXM4-80GB", "8.0")
BLACKWELL = Device("gpu", "NVIDIA B200", "10.0")
CPU = Device("cpu", "cpu")
BF16 = EngineConfig(dtype="bfloat16")


def spec_of(head_dim: int = 64) -> KVSpec:
    return KVSpec((KVGroup("global", (0, 1), 2, head_dim),))


@pytest.fixture(autouse=True)
def _an_older_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPU hosts have it."""
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))


def test_a_jax_that_cannot_compile_the_kernels_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    assert choose_backend("auto", HOPPER) == "reference"
    assert "a version before 0.12" in why_reference(HOPPER)
    with pytest.raises(NotImplementedError, match=r"install jaxserve\[gpu\]"):
        choose_backend("mosaic_gpu", HOPPER)
    assert "compute capability 9.0" in why_reference(AMPERE)


def test_auto_takes_the_kernels_of_the_device() -> None:
    assert choose_backend("auto", HOPPER) == "mosaic_gpu"
    assert choose_backend("auto", AMPERE) == "reference"
    assert choose_backend("auto", BLACKWELL) == "reference"
    assert choose_backend("auto", CPU) in ("cpu", "reference")
    assert why_reference(HOPPER) is None
    assert "compute capability 9.0" in why_reference(AMPERE)
    assert "NVIDIA A100-SXM4-80GB has 8.0" in why_reference(AMPERE)


@pytest.mark.parametrize(
    ("backend", "device", "says"),
    [
        ("tpu", CPU, "choose auto, reference, cpu, mosaic_gpu, interpret"),
        ("mosaic_gpu", CPU, "it wants an NVIDIA Hopper GPU, and JAX runs on a CPU"),
        ("mosaic_gpu", AMPERE, "NVIDIA A100-SXM4-80GB has 8.0; it runs on XLA's kernels"),
        ("cpu", HOPPER, "cannot run here: JAX runs on NVIDIA H200"),
        ("interpret", HOPPER, "it runs on a CPU, and JAX on NVIDIA H200; choose mosaic_gpu"),
    ],
)
def test_what_cannot_run_says_what_would(backend: str, device: Device, says: str) -> None:
    with pytest.raises(NotImplementedError, match="attention backend") as caught:
        choose_backend(backend, device)
    assert says in str(caught.value)
    with pytest.raises(InvalidRequestError, match="attention backend"):
        settle_backend(EngineConfig(attention_backend=backend), spec_of(), device)


def test_page_sizes_and_layouts_belong_to_the_backend() -> None:
    names = ("reference", "cpu", "mosaic_gpu", "interpret")
    assert [default_page_size(name) for name in names] == [16, 16, 64, 64]
    assert weight_layout("interpret") == "gpu"
    assert weight_layout("reference") is None
    assert kept_layout("reference", "fp8") == "rows"
    with pytest.raises(InvalidRequestError, match="wants an NVIDIA Hopper GPU"):
        kept_layout("mosaic_gpu", None)


@pytest.mark.parametrize(
    ("spec", "dtype", "page_size", "says"),
    [
        (spec_of(72), jnp.bfloat16, 64, "head_dim of 72.* reference"),
        (spec_of(512), jnp.bfloat16, 64, "head_dim of 512.* up to 256"),
        (spec_of(), jnp.float32, 64, "float32.*--dtype bfloat16, or --attention-backend reference"),
        (spec_of(), jnp.bfloat16, 48, "page_size is 48; .* 16, 32, 64, 128"),
    ],
)
def test_what_the_kernels_do_not_take(
    spec: KVSpec, dtype: object, page_size: int, says: str
) -> None:
    text = refusal(spec, np.dtype(dtype), page_size, "interpret")
    assert text is not None
    assert re.search(says, text)
    config = replace(BF16, dtype=np.dtype(dtype).name, page_size=page_size)
    with pytest.raises(InvalidRequestError, match=says):
        settle_backend(replace(config, attention_backend="interpret"), spec, CPU)
    asked = settle_backend(config, spec, HOPPER)
    assert (asked.attention_backend, asked.page_size) == ("reference", page_size)


def test_what_the_kernels_take() -> None:
    for head_dim in (64, 80, 96, 128, 256):
        for page_size in (16, 32, 64, 128):
            text = refusal(spec_of(head_dim), np.dtype(jnp.bfloat16), page_size, "interpret")
            assert text is None


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_a_gpu_gets_the_reference_where_prefill_does_not_compile(head_dim: int) -> None:
    text = refusal(spec_of(head_dim), np.dtype(jnp.bfloat16), 64, "mosaic_gpu")
    settled = settle_backend(BF16, spec_of(head_dim), HOPPER).attention_backend
    if head_dim in (64, 128):
        assert (text, settled) == (None, "mosaic_gpu")
    else:
        assert text is not None
        assert f"head_dim of {head_dim}" in text
        assert settled == "reference"


def test_settled(caplog: pytest.LogCaptureFixture) -> None:
    settled = settle_backend(BF16, spec_of(), HOPPER)
    assert (settled.attention_backend, settled.page_size) == ("mosaic_gpu", 64)
    assert not caplog.records
    settled = settle_backend(replace(BF16, page_size=32), spec_of(), AMPERE)
    assert (settled.attention_backend, settled.page_size) == ("reference", 32)
    assert "attention runs on the reference" in caplog.text
    assert "NVIDIA A100-SXM4-80GB has 8.0" in caplog.text


def test_the_native_kernels_do_not_read_fp8() -> None:
    config = EngineConfig(kv_cache_dtype="fp8", dtype="float32")
    if choose_backend("auto") == "cpu":
        with pytest.raises(InvalidRequestError, match=r"choose int8.*or --attention-backend refer"):
            settle_backend(replace(config, attention_backend="cpu"), spec_of(), jax.devices()[0])
    settled = settle_backend(config, spec_of(), jax.devices()[0])
    assert settled.attention_backend == "reference"


def test_rows_of_a_packed_table_have_the_type_of_activations() -> None:
    table = quantize_int8(np.ones((4, 32), np.float32))
    tokens = np.array([1, 3])
    for name, dtype in {"reference": jnp.float32, "interpret": jnp.bfloat16}.items():
        assert make_ops(name, spec_of()).embed(table, tokens).dtype == dtype


def test_programs_for_a_gpu_can_be_made_elsewhere() -> None:
    ops = make_ops("mosaic_gpu", spec_of(), num_devices=2)
    assert ops.name == "mosaic_gpu"
    assert ops == make_ops("mosaic_gpu", spec_of(), num_devices=2)
    assert hash(ops) == hash(make_ops("mosaic_gpu", spec_of(), num_devices=2))
