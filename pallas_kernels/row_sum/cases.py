"""Named shapes [R, N] of the sum, for tests and benchmarks."""

CASES = ((1, 1), (3, 63), (2, 65), (5, 4096), (1, 4097), (4, 49152), (2, 50257), (0, 10), (3, 0))
