"""The shared test matrix of design section 7: nothing in it may change what the model says.

Axes are added here as the features come; a test of any feature runs over `settings()` and compares
with `assert_same_tokens`, which knows the margin rule.
"""

import itertools
from dataclasses import dataclass

from tests.support.tiny_engine import Run

MARGIN = 1e-4  # on XLA alone, greedy ids may differ where the two best choices are closer than this


@dataclass(frozen=True)
class Setting:
    """One cell. chunk: tokens of a prefill chunk, or None for whole prompts; n: choices each."""

    chunk: int | None
    tight_pool: bool
    batched: bool
    n: int

    @property
    def name(self) -> str:
        pool = "tight" if self.tight_pool else "ample"
        return f"chunk={self.chunk}-{pool}-{'batched' if self.batched else 'alone'}-n={self.n}"


def settings() -> list[Setting]:
    """All cells."""
    return [
        Setting(*cell)
        for cell in itertools.product((None, 16, 7), (False, True), (False, True), (1, 4))
    ]


def assert_same_tokens(expected: Run, got: Run, *, most_close_calls: int = 0) -> None:
    """Greedy runs must agree wherever the margin is above MARGIN; the rest are counted.

    After a close call the two texts differ, so that request's comparison ends there. Runs without
    margins (sampled) must agree entirely.
    """
    assert expected.tokens.keys() == got.tokens.keys()
    close_calls = 0
    for name, ids in expected.tokens.items():
        if got.tokens[name] == ids:
            continue
        pairs = enumerate(zip(ids, got.tokens[name], strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(got.tokens[name])))
        margins = expected.margins.get(name, [])
        assert at < len(margins), f"{name}: {got.tokens[name]} instead of {ids}"
        assert margins[at] <= MARGIN, f"{name}: token {at} differs at margin {margins[at]:.2e}"
        close_calls += 1
    assert close_calls <= most_close_calls, f"{close_calls} requests parted at close calls"
