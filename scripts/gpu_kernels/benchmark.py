"""The timings of gpu_check, most important first, until its time is up."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from scripts.gpu_kernels import timed
from scripts.gpu_kernels.llama import LINEARS, Row, described, step_work
from scripts.gpu_kernels.peers import decode_peers, prefill_peers
from scripts.gpu_kernels.steps import decode_step
from scripts.gpu_kernels.timed import Timed
from scripts.gpu_kernels.timing import seconds_a_call

LAYERS = 32
_OTHER_DECODES = (
    (64, 8192, "int8"),
    (64, 1024, "bf16"),
    (16, 8192, "bf16"),
    (16, 8192, "fp8"),
    (1, 8192, "bf16"),
    (1, 1024, "bf16"),
)
Job = tuple[str, Callable[[], dict[str, Any]]]


def run_all(report: dict[str, Any], until: float) -> None:
    """Time everything; what fails or finds no time is told in report["left_out"]."""
    bandwidth = _bandwidth()
    report["machine"]["copy_bandwidth"] = bandwidth
    print(f"copy: {bandwidth / 1e12:.2f} TB/s", flush=True)
    for name, job in _jobs(bandwidth):
        if time.monotonic() > until:
            report["left_out"].append({"case": name, "why": "no time left"})
            continue
        try:
            result = job()
        except Exception as error:  # of XLA, torch or a peer: one case less
            report["left_out"].append(
                {"case": name, "why": f"{type(error).__name__}: {error}"[:300]}
            )
            print(f"left out: {name}: {str(error)[:100]}", flush=True)
            continue
        report["times"].append({"case": name, **result})
        print(f"{name}: {result}", flush=True)


def _bandwidth() -> float:
    work = timed.copy()
    return work.read_bytes / seconds_a_call(work.function, work.arguments)


def _jobs(bandwidth: float) -> Iterator[Job]:
    """Targets first, then peers, then the rest of the grid."""

    def ours(make: Callable[[], Timed]) -> Callable[[], dict[str, Any]]:
        return lambda: _time(make(), bandwidth)

    yield (
        "decode attention, batch 64, 8192 tokens, KV bf16",
        ours(lambda: timed.decode(64, 8192, "bf16")),
    )
    yield "prefill attention, 8192 tokens, KV bf16", ours(lambda: timed.prefill(8192, "bf16"))
    for batch in (1, 64):
        for weights in ("bf16", "int4"):
            yield f"decode step, batch {batch}, {weights}", _step(batch, weights, bandwidth)
    for rows in (1, 16):
        for weights in ("int4", "bf16"):
            for name, shape in LINEARS.items():
                yield (
                    f"{name}, {rows} rows, {weights}",
                    ours(lambda n=name, s=shape, r=rows, w=weights: timed.product(n, s, r, w)),
                )
    yield from _peers("decode attention, batch 64, 8192 tokens", decode_peers(64, 8192))
    yield from _peers("prefill attention, 8192 tokens", prefill_peers(8192))
    for batch, context, kv in _OTHER_DECODES:
        yield (
            f"decode attention, batch {batch}, {context} tokens, KV {kv}",
            ours(lambda b=batch, c=context, k=kv: timed.decode(b, c, k)),
        )
    yield "prefill attention, 8192 tokens, KV int8", ours(lambda: timed.prefill(8192, "int8"))
    yield "decode step, batch 64, fp8", _step(64, "fp8", bandwidth)
    for rows in (64, 256, 2048):
        for weights in ("int4", "fp8", "int8", "bf16"):
            for name in ("gate_up", "out"):
                yield (
                    f"{name}, {rows} rows, {weights}",
                    ours(lambda n=name, r=rows, w=weights: timed.product(n, LINEARS[n], r, w)),
                )


def _peers(case: str, peers: Mapping[str, Callable[[], float]]) -> Iterator[Job]:
    for name, run in peers.items():
        yield f"{case}, by {name}", lambda run=run: {"us": 1e6 * run(), "peer": True}


def _time(work: Timed, bandwidth: float) -> dict[str, Any]:
    """Microseconds a call, and shares of what was copied a second and of a trillion operations."""
    seconds = seconds_a_call(work.function, work.arguments) / work.calls
    return {
        "us": 1e6 * seconds,
        "share_of_copy": work.read_bytes / seconds / bandwidth,
        "teraflops": work.operations / seconds / 1e12,
    }


def _step(batch: int, weights: str, bandwidth: float) -> Callable[[], dict[str, Any]]:
    """A whole decode step at 1,024 tokens of context, its pool donated, of random weights."""

    def run() -> dict[str, Any]:
        context = 1024
        model = described(weights, LAYERS)
        step, arguments = decode_step(model, batch, context)
        params, pool, inputs = timed.random_like(arguments[0]), *jax.device_put(arguments[1:])
        compiled = jax.jit(step, donate_argnums=1).lower(params, pool, inputs).compile()
        for _ in range(3):
            tokens, pool = compiled(params, pool, inputs)
        jax.block_until_ready(tokens)
        calls = 30
        began = time.perf_counter()
        for _ in range(calls):
            tokens, pool = compiled(params, pool, inputs)
        jax.block_until_ready(tokens)
        seconds = (time.perf_counter() - began) / calls
        work = step_work(model, "bf16", [Row(1, context)] * batch, batch)
        limit = max(work.read_bytes / bandwidth, work.operations / 790e12)
        return {"us": 1e6 * seconds, "share_of_roofline": limit / seconds}

    return run
