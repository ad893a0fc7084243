"""What is read out of the compilers, on a kernel that fits and on one that cannot."""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxserve.planning.compiled_kernels import compile_for_h200
from pallas_kernels import _mgpu as mgpu
from tests.support.sm90a import compile_sm90a, lower_cuda

ROWS = 64
REDUCTION_SCRATCH = 2048  # bytes, Mosaic's own


def softmax_kernel(columns: int) -> tuple[Callable[[jax.Array], jax.Array], jax.ShapeDtypeStruct]:
    """exp(x - max x) of rows [64, columns]: columns / 2 registers of a thread live at once."""
    shape = jax.ShapeDtypeStruct((ROWS, columns), jnp.float32)

    def body(x_ref, out_ref, tile, barrier):
        mgpu.copy_gmem_to_smem(x_ref, tile, barrier)
        mgpu.barrier_wait(barrier)
        x = mgpu.layout_cast(tile[...], mgpu.Layout.WGMMA)
        tile[...] = jnp.exp(x - lax.broadcast_in_dim(x.max(axis=1), x.shape, [0]))
        mgpu.commit_smem()
        mgpu.copy_smem_to_gmem(tile, out_ref)
        mgpu.wait_smem_to_gmem(0)

    scratch = [mgpu.SMEM(shape.shape, jnp.float32), mgpu.Barrier()]
    body.__name__ = f"softmax{columns}"
    return mgpu.kernel(body, out_type=shape, scratch_types=scratch), shape


def test_lowering_wants_no_gpu_and_no_plugin():
    kernel, shape = softmax_kernel(64)
    assert "mosaic_gpu" in lower_cuda(kernel, shape).as_text()


@pytest.mark.sm90a
def test_registers_and_shared_memory_are_read(monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", "/somewhere")
    kernel, shape = softmax_kernel(64)

    def twice(x: jax.Array) -> jax.Array:
        return kernel(jnp.sin(kernel(x)))

    report = compile_sm90a(twice, shape)
    for compiled in report.kernels:
        assert compiled.name == "softmax64"
        assert compiled.target == "sm_90a"
        assert 32 < compiled.registers < 100
        assert 0 <= compiled.shared_memory - ROWS * 64 * 4 <= REDUCTION_SCRATCH
        assert compiled.spills == 0
    assert report.kernels
    assert report.compiled.memory_analysis().argument_size_in_bytes == ROWS * 64 * 4
    assert os.environ["MOSAIC_GPU_DUMP_TO"] == "/somewhere"


@pytest.mark.sm90a
def test_spills_are_found():
    kernel, shape = softmax_kernel(640)
    (compiled,) = compile_for_h200(kernel, shape).spilling
    assert compiled.spills > 0
    assert 0 <= compiled.shared_memory - ROWS * 640 * 4 <= REDUCTION_SCRATCH
    with pytest.raises(AssertionError, match=r"registers are spilled.*softmax640"):
        compile_sm90a(kernel, shape)


@pytest.mark.sm90a
def test_too_much_shared_memory_does_not_compile():
    kernel, shape = softmax_kernel(1024)
    with pytest.raises(Exception, match=r"(?i)shared memory|smem"):
        compile_for_h200(kernel, shape)
