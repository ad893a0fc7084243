"""Named shapes of the norm, for tests and benchmarks: sizes that divide nothing among them."""

CASES = ((1, 1), (3, 15), (1, 16), (2, 17), (5, 576), (16, 640), (7, 1000), (512, 576), (0, 64))
