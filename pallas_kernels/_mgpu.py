"""The one door to Mosaic GPU (`jax.experimental.pallas.mosaic_gpu`), for jax 0.11.2 and 0.12.

Kernels import Mosaic GPU from here alone, as `from pallas_kernels import _mgpu as mgpu`, so that
what differs between jax versions, and what jax's interpreter cannot do, is said once:

* `store` is new in 0.12, which refuses to write single bytes otherwise.
* The interpreter lacks `wgmma` with its left operand in registers and accumulators that start
  from a value. `kernel(..., interpret=True)` remembers that its body is being traced for the
  interpreter, and `wgmma` and `accumulate` then do the same sums another way. The kernels
  themselves do not know which of the two they are.
* `copy_gmem_to_smem` counts what it moves while `counting_bytes` is open, so that a test can say
  that a kernel reads nothing twice.

Nothing here needs a GPU: kernels lower for one, and compile for one, on any machine.
"""

import contextlib
import contextvars
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ACC = plgpu.ACC
Barrier = plgpu.Barrier
CompilerParams = plgpu.CompilerParams
Layout = plgpu.Layout
RefUnion = plgpu.RefUnion
SMEM = plgpu.SMEM
GMEM = plgpu.GMEM
barrier_arrive = plgpu.barrier_arrive
barrier_wait = plgpu.barrier_wait
broadcasted_iota = plgpu.broadcasted_iota
commit_smem = plgpu.commit_smem
copy_smem_to_gmem = plgpu.copy_smem_to_gmem
layout_cast = plgpu.layout_cast
set_max_registers = plgpu.set_max_registers
wait_smem_to_gmem = plgpu.wait_smem_to_gmem
wgmma_wait = plgpu.wgmma_wait
run_scoped = pl.run_scoped
when = pl.when
multiple_of = pl.multiple_of
ds = pl.ds

# Shared memory that one thread block of Hopper may use.
SHARED_MEMORY_BYTES = 227 * 1024

# Values that nobody wrote read as NaN, and a race is an error (printed on 0.11, raised on 0.12).
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

_HAS_STORE = jax.__version_info__ >= (0, 12)


@dataclass
class _Interpretation:
    """What the body that is being traced for the interpreter may use beside its own scratch."""

    thread_name: str | None
    spills: dict[tuple[tuple[int, ...], jnp.dtype], Any]  # shape, dtype: [num_threads, *shape]


class _SpillMissingError(Exception):
    """A register operand has no place in shared memory yet; args: shape, dtype."""


_INTERPRETATION: contextvars.ContextVar[_Interpretation | None] = contextvars.ContextVar(
    "interpretation", default=None
)


def kernel(
    body: Callable[..., None],
    *,
    interpret: bool = False,
    scratch_types: Sequence[Any] | Mapping[str, Any] = (),
    **options: Any,
) -> Callable[..., Any]:
    """`plgpu.kernel` of `body`; with `interpret` it runs on a CPU, with race detection.

    options: out_type, grid, grid_names, num_threads, thread_name, cluster, compiler_params and
    so on, as `plgpu.kernel` takes them.
    """
    if not interpret:
        return plgpu.kernel(body, scratch_types=scratch_types, **options)

    def call(*operands: Any) -> Any:
        needed: list[tuple[tuple[int, ...], jnp.dtype]] = []
        while True:  # the first tracing finds out what has to be spilled
            try:
                return _interpreted(body, scratch_types, needed, options)(*operands)
            except _SpillMissingError as missing:
                needed.append(missing.args)

    return call


def _interpreted(
    body: Callable[..., None],
    scratch_types: Sequence[Any] | Mapping[str, Any],
    needed: Sequence[tuple[tuple[int, ...], jnp.dtype]],
    options: dict[str, Any],
) -> Callable[..., Any]:
    positional = () if isinstance(scratch_types, Mapping) else tuple(scratch_types)
    named = dict(scratch_types) if isinstance(scratch_types, Mapping) else {}
    threads = options.get("num_threads") or 1
    spills = [SMEM((threads, *shape), dtype) for shape, dtype in needed]
    thread_name = options.get("thread_name")

    def traced(*refs: Any) -> None:
        own = refs[: len(refs) - len(named) - len(spills)]
        by_name = dict(zip(named, refs[len(own) :], strict=False))
        spilled = dict(zip(needed, refs[len(own) + len(named) :], strict=True))
        token = _INTERPRETATION.set(_Interpretation(thread_name, spilled))
        try:
            body(*own, **by_name)
        finally:
            _INTERPRETATION.reset(token)

    traced.__name__ = getattr(body, "__name__", "kernel")
    scratch = (*positional, *named.values(), *spills)
    return plgpu.kernel(traced, scratch_types=scratch, interpret=INTERPRET, **options)


def load(ref: Any, *, layout: Any = None, optimized: bool = True) -> jax.Array:
    """The whole of `ref` (slice it with `.at`) in registers, in `layout`."""
    return plgpu.load(ref, layout=layout, optimized=optimized)


def store(ref: Any, value: jax.Array) -> None:
    """Write registers to the whole of `ref` (slice it with `.at`), however narrow or far apart its
    elements lie: for the few bytes that TMA, with its 16-byte rows, cannot write."""
    if _HAS_STORE:
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def wgmma(acc: Any, a: Any, b: Any) -> None:
    """acc += a @ b, not awaited; a is a ref in shared memory or an array in registers."""
    interpretation = _INTERPRETATION.get()
    if interpretation is None or not isinstance(a, jax.Array):
        plgpu.wgmma(acc, a, b)
        return
    key = (a.shape, a.dtype)
    if key not in interpretation.spills:
        raise _SpillMissingError(*key)
    name = interpretation.thread_name
    spill = interpretation.spills[key].at[0 if name is None else lax.axis_index(name)]
    spill[...] = a
    commit_smem()
    plgpu.wgmma(acc, spill, b)


def accumulate(start: Any, multiply: Callable[[Any], None]) -> Any:
    """start plus what `multiply(acc_refs)` adds by `wgmma`, awaited.

    start is an array or a pytree of them, and acc_refs has its structure.
    """
    if _INTERPRETATION.get() is None:
        return pl.run_state(multiply)(jax.tree.map(ACC.init, start))
    starts, structure = jax.tree.flatten(start)

    def scope(*accs: Any) -> list[jax.Array]:
        multiply(jax.tree.unflatten(structure, accs))
        return [acc[...] for acc in accs]

    sums = pl.run_scoped(scope, *(ACC(x.shape, x.dtype) for x in starts))
    return jax.tree.unflatten(structure, [x + y for x, y in zip(starts, sums, strict=True)])


def multiplied(shape: tuple[int, int], multiply: Callable[[Any], None]) -> jax.Array:
    """What `multiply(acc_ref)` adds by `wgmma` to float32 zeros of this shape, awaited."""

    def scope(acc: Any) -> jax.Array:
        multiply(acc)
        return acc[...]

    return pl.run_scoped(scope, ACC(shape, jnp.float32))


@dataclass
class CopiedBytes:
    """Bytes that `copy_gmem_to_smem` moved, in all and by the name each copy was given."""

    total: int = 0
    by_name: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, size: int) -> None:
        with _COUNTER_LOCK:
            self.total += size
            self.by_name[name] = self.by_name.get(name, 0) + size


_COUNTER: CopiedBytes | None = None
_COUNTER_LOCK = threading.Lock()


@contextlib.contextmanager
def counting_bytes() -> Iterator[CopiedBytes]:
    """Count the bytes of every `copy_gmem_to_smem` that interpreted kernels run in this block.

    The kernels must be traced inside the block (call them outside jit, or with a fresh one), and
    the counts are final when the block ends.
    """
    global _COUNTER
    counter = CopiedBytes()
    with _COUNTER_LOCK:
        if _COUNTER is not None:
            raise RuntimeError("counting_bytes does not nest: close the outer one first")
        _COUNTER = counter
    try:
        yield counter
        jax.effects_barrier()
    finally:
        _COUNTER = None


def copy_gmem_to_smem(src: Any, dst: Any, barrier: Any, *, name: str = "", **options: Any) -> None:
    """Start one TMA copy of `src` to `dst` that arrives at `barrier`; `name` is for counting."""
    plgpu.copy_gmem_to_smem(src, dst, barrier, **options)
    if _INTERPRETATION.get() is not None and _COUNTER is not None:
        size = math.prod(dst.shape) * jax.dtypes.itemsize_bits(dst.dtype) // 8
        jax.debug.callback(functools.partial(_COUNTER.add, name, size))


def swizzle_transforms(columns: int, dtype: Any, span: int = 128, rows: int = 8) -> tuple[Any, ...]:
    """Transforms of a [..., n, columns] operand of TMA and wgmma in shared memory.

    The widest swizzle (128, 64 or 32 bytes) that divides a row, at most `span`; slices along
    columns must be multiples of it. Empty if a row is no multiple of 32 bytes or span is less.
    """
    dtype = jnp.dtype(dtype)
    bits = jax.dtypes.itemsize_bits(dtype)
    for swizzle in (128, 64, 32):
        if swizzle <= span and columns * bits % (swizzle * 8) == 0:
            tiling = plgpu.TilingTransform((rows, swizzle * 8 // bits))
            return tiling, plgpu.SwizzleTransform(swizzle)
    return ()


def fits_shared_memory(sizes: Sequence[int]) -> bool:
    """Whether buffers of these many bytes, each aligned to 1024, fit one thread block."""
    return sum(-(-size // 1024) * 1024 for size in sizes) <= SHARED_MEMORY_BYTES


def tiled_vector(warps: int, lanes: int) -> Any:
    """Layout of a vector in registers, any multiple of warps * lanes long, whose neighbours lie in
    neighbouring threads; the warpgroup's other threads hold copies."""
    tiles = ((warps * lanes,), (lanes,), (1,)) if warps > 1 else ((lanes,), (1,))
    spare_warps = (plgpu.Replicated(4 // warps),) if warps < 4 else ()
    spare_lanes = (plgpu.Replicated(32 // lanes),) if lanes < 32 else ()
    return Layout.TILED(
        plgpu.Tiling(tiles),
        warp_dims=((-3,) if warps > 1 else ()) + spare_warps,
        lane_dims=(-2, *spare_lanes),
        vector_dim=-1,
    )
