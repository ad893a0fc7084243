"""Engines of one model and equal shapes share their programs: making one takes no time then."""

from concurrent.futures import Future
from threading import Lock
from weakref import WeakSet

import jax

from jaxserve.core.program_loader import Lowered, Program, ProgramLoader
from jaxserve.core.stable_names import NoStableNameError

_INSTANCES: WeakSet["SharedPrograms"] = WeakSet()


class SharedPrograms(ProgramLoader):
    """Lowers and compiles every program once.

    One instance serves engines of the same model, backend, page size, devices and number of rows:
    what else tells their programs apart is the shapes of the arguments. by_identity: it serves all
    engines, and those programs that may be stored between starts are shared, by what they are then
    filed under.
    """

    def __init__(self, *, by_identity: bool = False) -> None:
        super().__init__()
        self._by_identity = by_identity
        self._lowered: dict[object, Lowered] = {}
        _INSTANCES.add(self)

    def forget(self) -> None:
        """Let go of every program; engines keep theirs."""
        self._lowered.clear()

    def lower(self, program: Program) -> Lowered:
        key = self._shared_key(program)
        if key is None:
            return super().lower(program)
        if key not in self._lowered:
            self._lowered[key] = _compiled_once(super().lower(program))
        return self._lowered[key]

    def _shared_key(self, program: Program) -> object:
        if not self._by_identity:
            leaves = tuple((leaf.shape, str(leaf.dtype)) for leaf in program.leaves)
            return program.name, str(jax.tree.structure(program.args)), leaves
        try:
            return program.key() if program.keep else None
        except NoStableNameError:
            return None


def _compiled_once(lowered: Lowered) -> Lowered:
    compiled: Future[jax.stages.Compiled] = Future()
    lock = Lock()

    def compile_once() -> jax.stages.Compiled:
        with lock:
            if not compiled.done():
                compiled.set_result(lowered.compile())
        return compiled.result()

    return Lowered(lowered.results, lowered.kept, compile_once)


def forget_programs() -> None:
    """Of all instances: most live as long as their modules do."""
    for instance in _INSTANCES:
        instance.forget()
