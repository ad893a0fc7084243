"""The GPU product of packed weights with activations, for Hopper: one kernel for every format.

It makes out^T [N, M] = w [N, K] x^T [K, M]: the weights are the tensor cores' left operand, widened
in registers, so that few activations fill a tile of 8 columns instead of 64. A thread block makes
[block_n, block_m] of one of `splits` pieces of K (their float32 sums are added in a fixed order
outside), two warpgroups sharing the activations' tile. A ring of `stages` steps is filled by bulk
copies, which the first warpgroup starts as soon as both have done with a step.

Shared memory, a stage: block_m * block_k activations, block_n * block_k codes, and a row of
block_n entries of each scale for each group; beside it block_m * 128 results. Bytes from memory:
codes and scales once for every block_m rows of activations; activations once for every block_n
outputs, all but the first time out of the L2 cache.

Where the scales go (`Plan.scales`):
"end"      one scale to an output row: onto the finished sum.
"sums"     each group has a sum of its own, which is multiplied and added up in float32. Weights
           stay whole numbers, so nothing is rounded; a group's minimum meets the sum of the
           group's activations.
"weights"  onto the weights, which are rounded to bfloat16 once: fewer operations than the above
           where there are more columns of activations than inputs to a group.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mgpu as mgpu
from pallas_kernels.quantized_matmul.gpu_codes import by_row, factors, numbers
from pallas_kernels.quantized_matmul.mosaic_plan import WARPGROUPS, Operand, Plan, operands

_WGMMA = mgpu.Layout.WGMMA
_OUT_TRANSFORMS = {4: 32, 2: 64}  # columns of a tile of results, by bytes


def packed_product(plan: Plan, *, interpret: bool) -> Callable[..., jax.Array]:
    """A function of the operands' arrays: [splits, M, N] of out_dtype. Weights' arrays have an
    axis of experts first; with `plan.grouped` a table int32 [M / block_m] of experts comes before
    all others, tiles of -1 being left alone."""
    taken = operands(plan)
    tiles, stages = plan.tiles, plan.stages
    if stages < 2:
        raise ValueError(f"{tiles} do not fit {tiles.shared} bytes for {plan.spec.format_name}")
    scratch = {
        operand.name: mgpu.SMEM(
            operand.shape if operand.whole else (stages, *operand.shape),
            operand.dtype,
            transforms=_transforms(operand),
        )
        for operand in taken
    }
    itemsize = jnp.dtype(plan.out_dtype).itemsize
    scratch["results"] = mgpu.SMEM(
        (WARPGROUPS, tiles.block_m, 64), plan.out_dtype,
        transforms=mgpu.swizzle_transforms(_OUT_TRANSFORMS[itemsize], plan.out_dtype),
    )  # fmt: skip
    moving = sum(not operand.whole for operand in taken)
    scratch["filled"] = mgpu.Barrier(num_arrivals=moving, num_barriers=stages)
    scratch["emptied"] = mgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
    scratch["whole_filled"] = mgpu.Barrier(num_arrivals=max(1, len(taken) - moving))

    def quantized_matmul(*refs: Any, **shared: Any) -> None:
        table, arrays = (refs[0], refs[1:-1]) if plan.grouped else (None, refs[:-1])
        step = _Block(plan, taken, arrays, refs[-1], shared, stages)
        m = lax.axis_index("m")
        if table is None:
            step.run(jnp.int32(0))
            return
        expert = table[m]
        mgpu.when(expert >= 0)(lambda: step.run(expert))

    return mgpu.kernel(
        quantized_matmul,
        out_type=jax.ShapeDtypeStruct((plan.splits, plan.M, plan.N), plan.out_dtype),
        scratch_types=scratch,
        grid=(plan.splits, plan.N // tiles.block_n, plan.M // tiles.block_m),
        grid_names=("split", "n", "m"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        interpret=interpret,
    )


def _transforms(operand: Operand) -> tuple[Any, ...]:
    return mgpu.swizzle_transforms(operand.tile, operand.dtype) if operand.tile else ()


class _Block:
    """One thread block's work: what is known when the kernel is traced, and how it is done."""

    def __init__(
        self, plan: Plan, taken: tuple[Operand, ...], arrays: tuple[Any, ...], out: Any,
        shared: Mapping[str, Any], stages: int,
    ) -> None:  # fmt: skip
        self.plan, self.taken, self.arrays, self.out = plan, taken, arrays, out
        self.shared, self.stages = shared, stages
        self.whole = {operand.name for operand in taken if operand.whole}
        self.spans = {name: part.span for name, part in plan.spec.parts.items()}
        self.heights = plan.tiles.block_n // (64 * WARPGROUPS)  # tiles of 64 rows to a warpgroup
        self.warpgroup = lax.axis_index("warpgroup")
        self.m = lax.axis_index("m") * plan.tiles.block_m
        self.n = lax.axis_index("n") * plan.tiles.block_n
        self.split = lax.axis_index("split")
        steps = plan.K // plan.tiles.block_k
        most = -(-steps // plan.splits)
        self.first = self.split * most
        self.count = jnp.minimum(jnp.int32(most), steps - self.first)

    def run(self, expert: Any) -> None:
        self.expert = expert

        @mgpu.when(self.warpgroup == 0)
        def _() -> None:
            for operand, array in zip(self.taken, self.arrays, strict=True):
                if operand.whole:
                    self._copy(
                        operand,
                        array,
                        jnp.int32(0),
                        self.shared[operand.name],
                        "whole_filled",
                        None,
                    )
            for i in range(self.stages):
                mgpu.when(i < self.count)(lambda i=i: self._fill(jnp.int32(i)))

        if self.whole:
            mgpu.barrier_wait(self.shared["whole_filled"])
        by_group = self.plan.scales == "sums"
        sums = self._add_up_groups() if by_group else self._add_up()
        for height, value in enumerate(sums):
            self._store(height, value)

    def _fill(self, i: Any) -> None:
        slot = lax.rem(i, jnp.int32(self.stages))
        for operand, array in zip(self.taken, self.arrays, strict=True):
            if not operand.whole:
                target = self.shared[operand.name].at[slot]
                self._copy(operand, array, self.first + i, target, "filled", slot)

    def _copy(
        self, operand: Operand, array: Any, step: Any, target: Any, barrier: str, slot: Any
    ) -> None:
        starts = {"m": self.m, "n": self.n}
        where: list[Any] = [self.expert] if operand.axes[0] == "expert" else []
        for axis, size in zip(operand.axes[len(where) :], operand.shape, strict=True):
            start = self._first_entry(step, axis) if isinstance(axis, int) else starts[axis]
            where.append(mgpu.ds(start, size))
        arrived = self.shared[barrier]
        mgpu.copy_gmem_to_smem(
            array.at[tuple(where)], target, arrived if slot is None else arrived.at[slot],
            name=operand.name,
        )  # fmt: skip

    def _first_entry(self, step: Any, span: int) -> Any:
        """Of a step, in an array with `span` inputs to an entry."""
        block_k = self.plan.tiles.block_k
        if block_k % span:
            return lax.div(step * block_k, span)
        return step * (block_k // span)  # from a quotient, no compiler sees whole tiles

    def _steps(self, body: Callable[[Any, Any], Any], start: Any) -> Any:
        """fori_loop of body(slot, carry) over this block's steps, refilling the ring."""
        stages = jnp.int32(self.stages)

        def step(i: Any, carry: Any) -> Any:
            slot = lax.rem(i, stages)
            mgpu.barrier_wait(self.shared["filled"].at[slot])
            carry = body(slot, carry)

            @mgpu.when(i + stages < self.count)
            def _() -> None:
                mgpu.commit_smem()  # what was read before what the copy engine writes
                mgpu.barrier_arrive(self.shared["emptied"].at[slot])

            # One step late, when the other warpgroup is likely to be done with it too.
            previous = i - 1

            @mgpu.when((self.warpgroup == 0) & (i > 0) & (previous + stages < self.count))
            def _() -> None:
                mgpu.barrier_wait(self.shared["emptied"].at[lax.rem(previous, stages)])
                self._fill(previous + stages)

            return carry

        return lax.fori_loop(0, self.count, step, start)

    def _rows(self, height: int) -> Any:
        return mgpu.ds((self.warpgroup * self.heights + height) * 64, 64)

    def _vector(self, slot: Any, height: int) -> Callable[[str, int], jax.Array]:
        def vector(name: str, column: int) -> jax.Array:
            ref = self.shared[name]
            if name in self.whole:
                entry = ref.at[0, self._rows(height)]
            else:
                entry = ref.at[slot, column // self.spans[name], self._rows(height)]
            return mgpu.load(entry, layout=_WGMMA.reduce(1)).astype(jnp.float32)

        return vector

    def _multiply(self, slot: Any, height: int) -> Callable[[Any, int, bool], None]:
        """multiply(acc, column, scaled): acc [64, block_m] += weights x^T for `width` inputs."""
        spec, width = self.plan.spec, self.plan.width
        codes = self.shared["codes"].at[slot, self._rows(height)]
        x = self.shared["x"].at[slot]
        if self.plan.eight_bit:
            return lambda acc, column, _: mgpu.wgmma(
                acc, codes.at[:, mgpu.ds(column, width)], x.at[:, mgpu.ds(column, width)].T
            )
        vector = self._vector(slot, height)
        high = self.shared["high"].at[slot, self._rows(height)] if spec.high_bits else None
        values = numbers(spec, codes, high, vector)

        def multiply(acc: Any, column: int, scaled: bool) -> None:
            weights = values(column, width)
            if scaled:
                scale, bias = factors(spec, vector, column)
                exact = weights.astype(jnp.float32) * by_row(scale, weights.shape)
                if bias is not None:
                    exact = exact + by_row(bias, weights.shape)
                weights = exact.astype(jnp.bfloat16)
            mgpu.wgmma(acc, weights, x.at[:, mgpu.ds(column, width)].T)

        return multiply

    def _columns(self) -> range:
        return range(0, self.plan.tiles.block_k, self.plan.width)

    def _add_up(self) -> list[jax.Array]:
        """One running sum per 64 rows; scales are in the weights, or come at the end."""
        plan = self.plan
        scaled = plan.scales == "weights"

        def scope(*accs: Any) -> list[jax.Array]:
            def body(slot: Any, carry: Any) -> Any:
                for height, acc in enumerate(accs):
                    multiply = self._multiply(slot, height)
                    for column in self._columns():
                        multiply(acc, column, scaled)
                mgpu.wgmma_wait(0)
                return carry

            self._steps(body, None)
            return [acc[...] for acc in accs]

        sums = mgpu.run_scoped(scope, *[self._accumulator()] * self.heights)
        if scaled:
            return sums
        return [
            value.astype(jnp.float32) * by_row(self._vector(0, height)("scales", 0), value.shape)
            for height, value in enumerate(sums)
        ]

    def _accumulator(self) -> Any:
        integers = self.plan.x_dtype == jnp.int8
        dtype = jnp.int32 if integers else jnp.float32
        return mgpu.ACC((64, self.plan.tiles.block_m), dtype)

    def _add_up_groups(self) -> list[jax.Array]:
        """A sum per group, several at once on their way, scaled and added in float32."""
        block_m = self.plan.tiles.block_m
        at_once = max(1, 64 // block_m)

        def body(slot: Any, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            grown = []
            for height, total in enumerate(totals):
                multiply = self._multiply(slot, height)
                columns = list(self._columns())
                while columns:
                    some, columns = columns[:at_once], columns[at_once:]

                    def scope(*accs: Any, some: Any = some, multiply: Any = multiply) -> Any:
                        for acc, column in zip(accs, some, strict=True):
                            multiply(acc, column, False)
                        mgpu.wgmma_wait(0)
                        return [acc[...] for acc in accs]

                    sums = mgpu.run_scoped(scope, *[self._accumulator()] * len(some))
                    for column, value in zip(some, sums, strict=True):
                        total = self._add_group(slot, height, column, total, value)
                grown.append(total)
            return tuple(grown)

        zero = mgpu.layout_cast(jnp.zeros((64, block_m), jnp.float32), _WGMMA)
        return list(self._steps(body, (zero,) * self.heights))

    def _add_group(
        self, slot: Any, height: int, column: int, total: jax.Array, value: jax.Array
    ) -> jax.Array:
        vector = self._vector(slot, height)
        scale, bias = factors(self.plan.spec, vector, column)
        total = total + value.astype(jnp.float32) * by_row(scale, value.shape)
        if bias is None:
            return total
        group = column // self.plan.spec.group
        x_sums = mgpu.load(self.shared["x_sums"].at[slot, group], layout=_WGMMA.reduce(0))
        across = lax.broadcast_in_dim(x_sums, value.shape, [1])
        return total + by_row(bias, value.shape) * across

    def _store(self, height: int, value: jax.Array) -> None:
        results = self.shared["results"].at[self.warpgroup]
        value = value.astype(self.plan.out_dtype)
        results.T[...] = mgpu.layout_cast(value, mgpu.Layout.WGMMA_TRANSPOSED)
        mgpu.commit_smem()
        first = (self.warpgroup * self.heights + height) * 64
        target = self.out.at[
            self.split, mgpu.ds(self.m, self.plan.tiles.block_m), mgpu.ds(self.n + first, 64)
        ]
        mgpu.copy_smem_to_gmem(results, target)
        mgpu.wait_smem_to_gmem(0)
