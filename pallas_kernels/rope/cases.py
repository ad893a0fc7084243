"""Named shapes [T, H, D] of the rotation, for tests and benchmarks."""

CASES = ((1, 1, 2), (1, 3, 24), (5, 9, 64), (3, 2, 80), (64, 4, 256), (2, 5, 6), (0, 2, 8))
