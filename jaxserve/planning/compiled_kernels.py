"""What the compilers say about the GPU kernels of a program: registers, spills, shared memory.

Mosaic hands every kernel to ptxas itself and leaves what ptxas says in the folder that its variable
MOSAIC_GPU_DUMP_TO names. It is read here, so a kernel that does not fit is found on a machine
without a GPU. Kernels that XLA makes itself are XLA's business.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxserve.core.mesh import replicated
from jaxserve.planning.h200 import H200, h200_mesh

_DUMP = "MOSAIC_GPU_DUMP_TO"
_NAME = re.compile(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?' for '(sm_\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"smem_scratch_bytes=(\d+)")


@dataclass(frozen=True)
class CompiledKernel:
    """One Mosaic kernel. registers: of a thread, at its start; shared_memory: bytes of a thread
    block, without its barriers; spills: bytes written to and read from memory for want of
    registers."""

    name: str
    target: str
    registers: int
    shared_memory: int
    spills: int


@dataclass(frozen=True)
class Report:
    """A program compiled for an H200, and the Mosaic kernels in it, in the order of compilation."""

    compiled: jax.stages.Compiled
    kernels: tuple[CompiledKernel, ...]

    @property
    def spilling(self) -> tuple[CompiledKernel, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.spills)


def compile_for_h200(f: Callable[..., Any], *avals: Any) -> Report:
    """f compiled for one H200, for arguments of these shapes (arrays or ShapeDtypeStructs).

    Raises RuntimeError, as XLA does, for what does not compile: an instruction the GPU lacks, too
    much shared memory. Spills of Mosaic's kernels are in the report.
    """
    mesh = h200_mesh()
    place = replicated(mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), avals)

    def compile_it() -> jax.stages.Compiled:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(f).trace(*shapes).lower().compile()

    return report_of(compile_it)


def report_of(compile_it: Callable[[], jax.stages.Compiled]) -> Report:
    """What `compile_it`, which traces, lowers and compiles, brings, with the kernels it made."""
    with _dumped() as folder:
        compiled = compile_it()
        kernels = tuple(_kernel(path) for path in sorted(folder.glob("*.ptxas"), key=_number))
    return Report(compiled, kernels)


def lower_for_h200(f: Callable[..., Any], *avals: Any) -> jax.stages.Lowered:
    """f lowered for an NVIDIA GPU of Hopper's kind; wants no plugin and compiles nothing."""
    mesh = AbstractMesh((), (), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(f).trace(*avals).lower(lowering_platforms=("cuda",))


@contextmanager
def _dumped() -> Iterator[Path]:
    """A folder that Mosaic writes about its kernels to, while it exists."""
    before = os.environ.get(_DUMP)
    with tempfile.TemporaryDirectory(prefix="mosaic-kernels-") as folder:
        os.environ[_DUMP] = folder
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ[_DUMP]
            else:
                os.environ[_DUMP] = before


def _number(path: Path) -> int:
    """Mosaic numbers a process's kernels: decode_3.ptxas."""
    return int(path.stem.rpartition("_")[2])


def _kernel(path: Path) -> CompiledKernel:
    text = path.read_text(encoding="utf-8")
    resources = path.with_suffix(".resources.txt").read_text(encoding="utf-8")
    name, spills = _NAME.search(text), _SPILLS.search(text)
    registers, shared = _REGISTERS.search(text), _SHARED.search(resources)
    if name is None or spills is None or registers is None or shared is None:
        raise RuntimeError(f"ptxas says something else than expected about a kernel: {text[:500]}")
    return CompiledKernel(
        name=name[1],
        target=name[2],
        registers=int(registers[1]),
        shared_memory=int(shared[1]),
        spills=int(spills[1]) + int(spills[2]),
    )
