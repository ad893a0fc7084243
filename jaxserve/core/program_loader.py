"""From a step function and the shapes of its arguments to a compiled program, traced at most once.

A warm start spends most of its time in Python: tracing and lowering. So a traced program is kept
(`ProgramStore`), as `jax.export` writes it, and a later start with the same model, shapes, source
and JAX goes straight from there to XLA, whose result JAX's own cache holds. Which programs a start
needed first is kept too, so that the next one loads them while the weights are still being read.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from jaxserve.core.compile_cache import compile_cache_folder
from jaxserve.core.program_store import ProgramStore
from jaxserve.core.stable_names import NoStableNameError, stable_name, surroundings
from pallas_kernels import native

log = logging.getLogger(__name__)

_THREADS = 2


@dataclass(frozen=True)
class Program:
    """A function on trees of arrays, for arguments of one shape.

    args: trees of arrays or of shapes; those numbered in `donated` are given away.
    result: a tree of anything, of the structure the function returns; shardings: the same tree of
    places.
    identity: whatever the function does, beside `args` and our source, depends on; None: unknown.
    keep: whether the trace may be stored (only programs of one device are).
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: range
    result: Any
    shardings: Any
    identity: Any
    keep: bool

    @property
    def leaves(self) -> list[jax.ShapeDtypeStruct]:
        """The arguments' arrays, one after the other, as shapes with their places."""
        return [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))
            for leaf in jax.tree.leaves(self.args)
        ]

    @property
    def donated_leaves(self) -> range:
        """Which of `leaves` are given away."""
        start = len(jax.tree.leaves(self.args[: self.donated.start]))
        given = self.args[self.donated.start : self.donated.stop]
        return range(start, start + len(jax.tree.leaves(given)))

    def on_leaves(self, *leaves: Any) -> list[Any]:
        """The function, from arrays to arrays."""
        args = jax.tree.unflatten(jax.tree.structure(self.args), leaves)
        results, structure = jax.tree.flatten(self.function(*args))
        assert structure == jax.tree.structure(self.result), f"{self.name} returns {structure}"
        return results

    def key(self) -> str:
        """What the trace is filed under. Raises NoStableNameError if the identity has no name."""
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in self.leaves]
        structure = str(jax.tree.structure(self.args))
        if " at 0x" in structure:
            raise NoStableNameError("an address in the structure of the arguments")
        facts = (
            (self.name, stable_name(self.identity), structure, shapes),
            (self.donated, str(jax.tree.structure(self.result)), surroundings()),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()


@dataclass(frozen=True)
class Lowered:
    """A program ready for XLA. results: shapes of the arrays it returns.

    kept: which leaves of the arguments it takes: each costs some microseconds in every call, and
    to sample only a few of a model's parameters are needed.
    """

    results: tuple[jax.ShapeDtypeStruct, ...]
    kept: tuple[int, ...]
    compile: Callable[[], jax.stages.Compiled]


_Loaded = tuple[Lowered, jax.stages.Compiled]


class Leaves(tuple[jax.Array, ...]):
    """The leaves of an argument that is the same in every call: taking a model's parameters apart
    costs more than the rest of a call."""


@dataclass(frozen=True)
class CompiledProgram:
    """Takes and returns trees, as the Program's function does; an argument may be Leaves."""

    compiled: jax.stages.Compiled
    kept: tuple[int, ...]
    structure: Any

    def __call__(self, *args: Any) -> Any:
        trees = [arg if isinstance(arg, Leaves) else jax.tree.leaves(arg) for arg in args]
        leaves = list(chain.from_iterable(trees))
        return jax.tree.unflatten(self.structure, self.compiled(*[leaves[i] for i in self.kept]))


class ProgramLoader:
    """Lowers programs, from the store where it can. Any thread may call it."""

    def __init__(self, store: ProgramStore | None = None, start: Any = None) -> None:
        """store: None keeps nothing. start: names this start (see `prefetch`), as `stable_name`
        takes it."""
        self._store = store
        self._start = start
        self._prefetched: Future[dict[str, Future[_Loaded | None]]] | None = None
        self._threads: ThreadPoolExecutor | None = None

    def prefetch(self) -> None:
        """Begin to load what a start of the same name needed first, on threads of its own."""
        if self._store is None:
            return
        store, pool = self._store, ThreadPoolExecutor(_THREADS, thread_name_prefix="prefetch")

        def begin() -> dict[str, Future[_Loaded | None]]:
            keys = store.load_keys(self._start_key())
            return {key: pool.submit(self._load, key) for key in keys}

        self._threads = pool
        self._prefetched = pool.submit(begin)
        self._prefetched.add_done_callback(lambda _: pool.shutdown(wait=False))

    def close(self) -> None:
        """End the threads of `prefetch`, after the programs at hand. May be called again."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def remember(self, programs: Sequence[Program]) -> None:
        """What a start of this name needs first."""
        keys = [key for key in map(self._key, programs) if key is not None]
        if self._store is not None and keys:
            self._store.save_keys(self._start_key(), keys)

    def lower(self, program: Program) -> Lowered:
        """The program for XLA: from the store, or traced now."""
        key = self._key(program)
        if key is None:
            lowered = jax.jit(
                program.on_leaves,
                donate_argnums=tuple(program.donated_leaves),
                out_shardings=jax.tree.leaves(program.shardings),
            ).lower(*program.leaves)
            results = tuple(_shape(info) for info in lowered.out_info)
            return Lowered(results, tuple(range(len(program.leaves))), lowered.compile)
        begun = None if self._prefetched is None else self._prefetched.result().pop(key, None)
        ready = None if begun is None else begun.result()
        if ready is not None:
            lowered, compiled = ready
            return Lowered(lowered.results, lowered.kept, lambda: compiled)
        return self._stored(key) or self._traced(program, key)

    def compile(self, program: Program) -> CompiledProgram:
        """Lower and compile."""
        return self.finish(program, self.lower(program))

    @staticmethod
    def finish(program: Program, lowered: Lowered) -> CompiledProgram:
        """Compile, or load from JAX's cache, what `lower` gave."""
        structure = jax.tree.structure(program.result)
        return CompiledProgram(lowered.compile(), lowered.kept, structure)

    def _key(self, program: Program) -> str | None:
        if self._store is None or not program.keep:
            return None
        try:
            return program.key()
        except NoStableNameError:
            return None

    def _start_key(self) -> str:
        facts = repr(("start", stable_name(self._start), surroundings()))
        return hashlib.sha256(facts.encode()).hexdigest()

    def _load(self, key: str) -> _Loaded | None:
        lowered = self._stored(key)
        return None if lowered is None else (lowered, lowered.compile())

    def _stored(self, key: str) -> Lowered | None:
        assert self._store is not None
        data = self._store.load(key)
        if data is None:
            return None
        try:
            first, last, module = data.split(b"\n", 2)
            return _lower_exported(
                export.deserialize(bytearray(module)), range(int(first), int(last))
            )
        except Exception as error:  # of a library that reads what another version wrote
            log.warning("a stored program cannot be read and is traced again: %s", error)
            return None

    def _traced(self, program: Program, key: str) -> Lowered:
        """Trace, keep the trace, and go on from it as from a stored one: both compile the same."""
        assert self._store is not None
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in program.leaves]
        exported = export.export(
            jax.jit(program.on_leaves),
            disabled_checks=[export.DisabledSafetyCheck.custom_call(name) for name in _targets()],
        )(*shapes)
        donated = program.donated_leaves
        module = bytes(exported.serialize())
        self._store.save(key, b"%d\n%d\n%b" % (donated.start, donated.stop, module))
        return _lower_exported(exported, donated)


def program_store() -> ProgramStore | None:
    """A store beside JAX's cache of compiled programs, if that is in use."""
    folder = compile_cache_folder()
    return None if folder is None else ProgramStore(folder / "traced")


def _lower_exported(exported: export.Exported, donated: range) -> Lowered:
    kept = exported.module_kept_var_idx
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]

    def call(*leaves: jax.Array) -> Any:
        given = dict(zip(kept, leaves, strict=True))
        return exported.call(
            *(
                given[i]
                if i in given
                else jnp.zeros(shape.shape, shape.dtype)  # which nobody reads
                for i, shape in enumerate(shapes)
            )
        )

    lowered = jax.jit(
        call, donate_argnums=tuple(at for at, i in enumerate(kept) if i in donated)
    ).lower(*(shapes[i] for i in kept))
    return Lowered(tuple(_shape(aval) for aval in exported.out_avals), kept, lowered.compile)


def _shape(info: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(info.shape, info.dtype)


def _targets() -> list[str]:
    """The foreign functions our kernels call: theirs to keep working, export need not refuse."""
    return [] if native.why_not() is not None else list(native.module().handlers())
