"""Named shapes [T, F] of the gate, for tests and benchmarks."""

CASES = ((1, 1), (1, 7), (2, 16), (3, 100), (5, 1536), (1, 2048), (64, 257), (0, 32))
