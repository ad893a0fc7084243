"""What a compiled program needs beside its arguments, by XLA's own analysis."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class ProgramMemory:
    """temporaries: bytes held while it runs; results: bytes of outputs that are not written into
    donated arguments."""

    temporaries: int
    results: int


def program_memory(compiled: jax.stages.Compiled) -> ProgramMemory | None:
    """Of a program that need not run here; None where the backend has no analysis."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    results = max(0, found.output_size_in_bytes - found.alias_size_in_bytes)
    return ProgramMemory(found.temp_size_in_bytes, results)


def step_temporaries(programs: Iterable[ProgramMemory]) -> int:
    """The most that a step of these programs holds: they run one after the other, and what one
    returns is kept until the last has run."""
    programs = tuple(programs)
    peak = max((program.temporaries for program in programs), default=0)
    return peak + sum(program.results for program in programs)


def tree_bytes(tree: object) -> int:
    """Bytes of all arrays, or shapes, of a tree."""
    return sum(
        math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree)
    )
