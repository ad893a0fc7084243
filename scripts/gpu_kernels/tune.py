"""Search tiles of the GPU kernels on a GPU, and write the tables they are chosen from.

    scripts/tune_kernels [--ops decode prefill matmul] [--json FILE]

At most 24 configurations an op and shape are compiled and timed, round the table's own choice: its
neighbours along each axis. What beats the table by more than 2 percent is printed as the row to put
into the op's table, with the measured gain as its reason, and kept in FILE
(results/tuned_kernels.json). The tables are source: a person commits the row, or does not.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
MOST = 24  # configurations of a shape
_GAIN = 1.02


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ops = ["decode", "prefill", "matmul"]
    parser.add_argument("--ops", nargs="+", default=ops, choices=ops)
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "tuned_kernels.json")
    options = parser.parse_args()
    import jax

    from scripts.gpu_kernels.check import why_not

    problem = why_not(jax)
    if problem is not None:
        print(f"tune_kernels cannot run: {problem}", file=sys.stderr)
        return 2
    found = []
    for search in searches(options.ops):
        best = search.run()
        found.append(best)
        print(best, flush=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


@dataclasses.dataclass(frozen=True)
class Search:
    """One op and shape. time(tiles) -> seconds; axes: values of the tiles' fields to try."""

    op: str
    shape: str
    start: Any
    axes: dict[str, tuple[int, ...]]
    time: Callable[[Any], float]

    def run(self) -> dict[str, Any]:
        """Time the table's tiles and their neighbours; what does not compile is passed over."""
        seconds: dict[Any, float] = {}
        for tiles in configurations(self.start, self.axes):
            try:
                seconds[tiles] = self.time(tiles)
            except Exception as error:  # of the compilers: too much shared memory, registers
                print(f"  {tiles}: {str(error)[:100]}", file=sys.stderr)
        if self.start not in seconds:
            return {"op": self.op, "shape": self.shape, "why_not": "the table's tiles do not run"}
        best = min(seconds, key=lambda tiles: seconds[tiles])
        gain = seconds[self.start] / seconds[best]
        kept = self.start if gain < _GAIN else best
        return {
            "op": self.op,
            "shape": self.shape,
            "tiles": dataclasses.asdict(kept) | {"reason": f"{gain:.2f} x the row before it"},
            "us": 1e6 * seconds[kept],
            "tried": len(seconds),
        }


def configurations(start: Any, axes: dict[str, tuple[int, ...]]) -> Iterator[Any]:
    """`start`, then those that differ in one field, then in two: at most MOST in all."""
    changed = {start}
    yield start
    for number in (1, 2):
        for names in itertools.combinations(axes, number):
            for values in itertools.product(*(axes[name] for name in names)):
                try:
                    tiles = dataclasses.replace(start, **dict(zip(names, values, strict=True)))
                except ValueError:  # a combination that the kernel does not have
                    continue
                if tiles not in changed:
                    changed.add(tiles)
                    yield tiles
                if len(changed) == MOST:
                    return


def searches(ops: Iterable[str]) -> Iterator[Search]:
    """The shapes of Llama-3-8B."""
    makers = {"decode": _decodes, "prefill": _prefills, "matmul": _products}
    for op in ops:
        yield from makers[op]()


def _decodes() -> Iterator[Search]:
    from pallas_kernels.paged_attention.decode_tiles import decode_tile
    from scripts.gpu_kernels import timed
    from scripts.gpu_kernels.llama import HEAD_DIM

    axes = {"stages": (2, 3, 4, 6), "keys": (64, 128), "blocks": (1, 2, 3, 4),
            "min_keys": (256, 512, 1024)}  # fmt: skip
    for kv, bits in (("bf16", 16), ("int8", 8)):
        for batch, context in ((64, 8192), (1, 8192)):
            work = timed.decode(batch, context, kv)
            yield Search(
                "decode attention", work.case, decode_tile(HEAD_DIM, bits), axes,
                _attend(work, "decode_tiles", decode_rows=batch),
            )  # fmt: skip


def _prefills() -> Iterator[Search]:
    from pallas_kernels.paged_attention.prefill_tiles import prefill_tile
    from scripts.gpu_kernels import timed
    from scripts.gpu_kernels.llama import HEAD_DIM

    axes = {"keys": (64, 128), "stages": (2, 3), "compute_registers": (208, 224, 240)}
    for kv in ("bf16", "int8"):
        work = timed.prefill(8192, kv)
        yield Search(
            "prefill attention", work.case, prefill_tile(HEAD_DIM, kv == "int8"), axes,
            _attend(work, "prefill_tiles", decode_rows=0),
        )  # fmt: skip


def _attend(work: Any, name: str, *, decode_rows: int) -> Callable[[Any], float]:
    from scripts.gpu_kernels import timed
    from scripts.gpu_kernels.timing import seconds_a_call

    def seconds(tiles: Any) -> float:
        run = timed.attention(work.calls, decode_rows=decode_rows, tiles={name: tiles})
        return seconds_a_call(run, work.arguments) / work.calls

    return seconds


def _products() -> Iterator[Search]:
    from pallas_kernels.quantized_matmul.mosaic_gpu import matmul_gpu
    from pallas_kernels.quantized_matmul.tiles import choose_tiles
    from scripts.gpu_kernels import timed
    from scripts.gpu_kernels.llama import LINEARS
    from scripts.gpu_kernels.timing import seconds_a_call

    axes = {"block_k": (128, 256), "stages": (2, 3, 4, 6, 8), "block_n": (128, 256),
            "shared": (112 << 10, 224 << 10)}  # fmt: skip
    for weights in ("int4", "fp8"):
        for rows in (1, 16, 64, 256, 2048):
            N, K = LINEARS["gate_up"]
            work = timed.product("gate_up", (N, K), rows, weights)

            def seconds(tiles: Any, work: timed.Timed = work) -> float:
                def run(x: Any, matrices: Any) -> list[Any]:
                    return [matmul_gpu(x, w, out_dtype=x.dtype, tiles=tiles) for w in matrices]

                return seconds_a_call(run, work.arguments) / work.calls

            yield Search("matmul", work.case, choose_tiles(rows, N), axes, seconds)


if __name__ == "__main__":
    sys.exit(main())
