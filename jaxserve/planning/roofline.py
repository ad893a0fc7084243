"""The least time a step can take: bytes over bandwidth, operations over matrix rate.

One decode step reads every weight and every live key and value once; prefill multiplies every
token by every matrix. Real steps take longer, so these are limits, not forecasts (Williams et al.,
"Roofline", doi:10.1145/1498765.1498785). Plain Python: no jax.
"""

from dataclasses import dataclass

from jaxserve.core.kv_spec import KVSpec


@dataclass(frozen=True)
class DecodeStep:
    """A step that draws one token for each of `batch` sequences.

    read_bytes: weights and live KV. seconds: of what binds, "memory" or "compute"; None where the
    device's speed is not known.
    """

    batch: int
    read_bytes: int
    operations: int
    seconds: float | None
    bound: str = "memory"

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.seconds is None else self.batch / self.seconds


def kv_bytes(spec: KVSpec, num_tokens: int, itemsize: int) -> int:
    """Live bytes of keys and values of a sequence: windowed layers keep what their window sees."""
    scale = 4 if itemsize == 1 else 0
    return sum(
        2
        * len(group.layers)
        * group.num_kv_heads
        * (group.head_dim * itemsize + scale)
        * min(num_tokens, group.window or num_tokens)
        for group in spec.groups
    )


def decode_step(
    batch: int,
    weight_bytes: int,
    kv_bytes_per_sequence: int,
    bandwidth: float | None,
    *,
    operations_per_token: int = 0,
    matrix_rate: float | None = None,
) -> DecodeStep:
    """The limit of one step; without a matrix rate, that of memory alone."""
    read_bytes = weight_bytes + batch * kv_bytes_per_sequence
    operations = batch * operations_per_token
    if bandwidth is None:
        return DecodeStep(batch, read_bytes, operations, None)
    seconds = read_bytes / bandwidth
    computing = operations / matrix_rate if matrix_rate else 0.0
    if computing > seconds:
        return DecodeStep(batch, read_bytes, operations, computing, "compute")
    return DecodeStep(batch, read_bytes, operations, seconds)


def prefill_rate(operations_per_token: int, matrix_rate: float | None) -> float | None:
    """Prompt tokens per second, None if the rate is not known.

    Attention's own operations, which grow with the context, come on top.
    """
    return None if matrix_rate is None else matrix_rate / operations_per_token
