"""Loading an engine's programs: the smallest set first, the rest before service or beside it.

One mixed bucket serves everything: it has the most rows, and prompts are cut to its prefill size.
So an engine can answer as soon as that is loaded, rounding up to it, while the others come on a
thread of their own.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from jaxserve.core.buckets import Bucket, first_bucket, largest_bucket
from jaxserve.core.program_loader import ProgramLoader
from jaxserve.engine.runner import MakeInputs, Progress, Runner

log = logging.getLogger(__name__)


_PATIENCE = 0.5  # seconds that the first step may keep the other buckets waiting


class WarmUp:
    """Loads the buckets of one engine. `progress` may be called on several threads."""

    def __init__(
        self,
        runner: Runner,
        loader: ProgramLoader,
        table: Sequence[Bucket],
        make_inputs: MakeInputs,
        progress: Progress | None,
        host_tier: int = 0,
        load_more: Callable[[], None] | None = None,
    ) -> None:
        """host_tier: bytes of host memory that the engine keeps pages in. load_more: loads what
        comes after all shapes."""
        self._load_more = load_more
        self._runner = runner
        self._loader = loader
        self._table = table
        self._make_inputs = make_inputs
        self._progress = progress or _silent
        self._host_tier = host_tier
        self._stop = threading.Event()
        self._began = time.monotonic()

    def load_all(self) -> None:
        """Return once every bucket is loaded and XLA has run one of each kind."""
        self._load_smallest()
        self._load_rest(self._progress)
        self._tell_memory()
        for bucket in (self._table[0], first_bucket(self._table)):  # a first run sets XLA up
            self._runner.dispatch(bucket, *self._make_inputs(bucket)).result()

    def load_smallest(self) -> None:
        """Return once one bucket that serves everything is loaded; the rest follows."""
        self._load_smallest()
        self._tell_memory()
        # Not a daemon, unlike the engine's: XLA must not be cut off in the middle by an exit.
        threading.Thread(target=self._follow, name="jaxserve-warm-up", daemon=False).start()

    def close(self) -> None:
        """Stop loading after the programs at hand, which cannot be interrupted; do not wait."""
        self._stop.set()

    def _tell_memory(self) -> None:
        """The memory that the engine takes with what is loaded now, and whether it is there."""
        plan = self._runner.memory_plan(largest_bucket(self._runner.buckets), self._host_tier)
        self._progress("\n".join(["memory:", *plan.lines()]))
        if plan.warning is not None:
            log.warning("%s", plan.warning)

    def _load_smallest(self) -> None:
        programs = self._runner.load([first_bucket(self._table)], self._make_inputs, self._progress)
        self._loader.remember(programs)

    def _load_rest(self, progress: Progress | None) -> None:
        self._runner.load_helpers()
        rest = [bucket for bucket in self._table if bucket != first_bucket(self._table)]
        self._runner.load(rest, self._make_inputs, progress, self._stop, scoring=True)
        if self._load_more is not None and not self._stop.is_set():
            self._load_more()

    def _follow(self) -> None:
        # Who waits for the first answer should not share the cores with what makes later ones fast.
        self._runner.first_step.wait(_PATIENCE)
        if self._stop.is_set():
            return
        try:
            self._load_rest(None)  # lines in the middle of the first answers help nobody
        except Exception:  # out of memory, say: what is loaded goes on serving
            if not self._stop.is_set():
                log.exception("some shapes could not be loaded; steps are padded to larger ones")
            return
        if not self._stop.is_set():
            seconds = time.monotonic() - self._began
            self._tell_memory()
            self._progress(f"all {len(self._table)} shapes loaded after {seconds:.1f} s")


def _silent(text: str) -> None:
    del text
