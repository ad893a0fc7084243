"""Write the packed matrices of cases.py, and what they stand for, to a file for driver.cc.

Usage: write_cases.py FILE. Numbers are int64, little-endian as everything else: the count; then
of each case its name's length and name, [format, N, K, group, bytes of a row, scales, zero
points], the rows' bytes, the scales (float32), the zero points and the expansion (float64 [N, K],
columns in the order they are kept in).
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from pallas_kernels.quantized_matmul.cases import CASES, Case
from pallas_kernels.quantized_matmul.cpu import supports
from tests.support.packed_arrays import expansion, random_array

PARTS = {"dense": "values", "grouped": "codes", "blocks": "blocks"}


def write_case(file: BinaryIO, case: Case) -> None:
    w = random_array(replace(case, perm=False))
    codes = np.ascontiguousarray(w.parts[PARTS[w.format.kind]])
    scales = np.asarray(w.parts.get("scales", np.empty(0, np.float32)))
    zeros = np.asarray(w.parts.get("zeros", np.empty(0, np.uint8)))
    row_bytes = codes.nbytes // case.N
    name = case.name.encode()
    sizes = [case.N, case.K, case.group, row_bytes, scales.size, zeros.size]
    file.write(np.array([len(name)], "<i8").tobytes() + name)
    file.write(np.array([w.format.native_id, *sizes], "<i8").tobytes())
    for part in (codes, scales, zeros, expansion(w).astype("<f8")):
        file.write(part.tobytes())


def main() -> None:
    cases = [case for case in CASES if supports(random_array(case))]
    with Path(sys.argv[1]).open("wb") as file:
        file.write(np.array([len(cases)], "<i8").tobytes())
        for case in cases:
            write_case(file, case)
    print(f"{len(cases)} packed matrices")


if __name__ == "__main__":
    main()
