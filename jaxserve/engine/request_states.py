"""Requests forked, copied out of the engine and put back, between its steps.

Every method but `identity` is called from the engine's thread. The step in flight is committed
first, so what a caller gets is exact: every token it names was drawn, and all KV of it is there.
"""

import logging
import time
from dataclasses import dataclass, replace
from functools import cached_property

import jax

from jaxserve.core.kv_pool import shapes_of_pages
from jaxserve.engine.model_identity import ModelIdentity, model_identity
from jaxserve.engine.page_programs import PagesHandle
from jaxserve.engine.plan import Plan
from jaxserve.engine.request import Request
from jaxserve.engine.request_state import PageForm, RequestState, SavedPages
from jaxserve.engine.runner import Runner
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.step_loop import StepLoop
from jaxserve.errors import InvalidRequestError
from jaxserve.loading.loaded_model import LoadedModel
from jaxserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StateOnItsWay:
    """A request's state; its pages are still being fetched from the device."""

    state: RequestState
    num_computed: int
    first_pages: tuple[int, ...]
    handle: PagesHandle | None

    def result(self, form: PageForm) -> RequestState:
        """Wait for the pages. On any thread."""
        if self.handle is None:
            return self.state
        contents = self.handle.result()
        pages = SavedPages(form, self.num_computed, self.first_pages, contents)
        return replace(self.state, pages=pages)


class RequestStates:
    """Fork, copy out, put back, over one engine's scheduler, loop and runner."""

    def __init__(
        self, model: LoadedModel, scheduler: Scheduler, loop: StepLoop, runner: Runner, backend: str
    ) -> None:
        self._described = (model.model.name, model.config, model.vocab_size)
        self._scheduler = scheduler
        self._loop = loop
        self._runner = runner
        manager = scheduler.manager
        page = jax.tree.leaves(shapes_of_pages(runner.pool, 1))
        arrays = tuple((leaf.shape[1:], leaf.dtype.name) for leaf in page)
        self.form = PageForm(
            manager.page_size, arrays[0][1], backend, tuple(manager.windows), arrays
        )

    @cached_property
    def identity(self) -> ModelIdentity:
        """The model's; made when it is first needed. Any thread may ask."""
        return model_identity(*self._described, self._runner.params)

    def fork(
        self,
        parent_id: str,
        child_id: str,
        *,
        params: SamplingParams | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        at: int | None = None,
    ) -> Request:
        """Queue a copy of a waiting or running request, which shares its pages copy-on-write.

        The copy begins with the parent's output so far, or its first `at` tokens. None: as the
        parent's. Raises InvalidRequestError if the parent is unknown or has ended, if it has not
        `at` tokens or the copy may draw none; QueueFullError. Then nothing has changed.
        """
        parent = self._find(parent_id, "forked")
        drawn = len(parent.output_token_ids)
        if at is not None and at > drawn:
            raise InvalidRequestError(
                f"at is {at}, but the run has drawn {drawn} tokens so far; fork it there or "
                "earlier, or wait for more",
                "at",
            )
        child = Request(
            request_id=child_id,
            prompt_token_ids=parent.prompt_token_ids,
            params=params or parent.params,
            max_tokens=parent.max_tokens if max_tokens is None else max_tokens,
            seed=parent.seed if seed is None else seed,
            eos_token_ids=parent.eos_token_ids,
            choice=parent.choice,
            priority=parent.priority,
            arrival_time=time.monotonic(),
            output_token_ids=parent.output_token_ids[:at],
            cache_salt=parent.cache_salt,
            adapter_id=parent.adapter_id,
            deadline=parent.deadline,
        )
        self._scheduler.fork(parent_id, child)
        return child

    def copy_out(self, request_id: str) -> StateOnItsWay:
        """The state of a waiting or running request, which goes on. Its pages are read on the
        device now, and fetched by `result`. Raises InvalidRequestError if it has ended."""
        request = self._find(request_id, "saved")
        state = RequestState(
            request.prompt_token_ids,
            tuple(request.output_token_ids),
            request.params,
            request.seed,
            request.choice,
            request.priority,
            request.cache_salt,
        )
        if not request.num_computed:
            return StateOnItsWay(state, 0, (), None)
        num_pages = self._scheduler.manager.pages_for(request.num_computed)
        kept = [[page for page in pages[:num_pages] if page] for pages in request.pages]
        handle = self._runner.read_pages([page for pages in kept for page in pages])
        first_pages = tuple(num_pages - len(pages) for pages in kept)
        return StateOnItsWay(state, request.num_computed, first_pages, handle)

    def put_back(self, request: Request, pages: SavedPages | None) -> Request:
        """Queue a request whose output so far and pages come from elsewhere; returns it.

        The pages join the prefix cache, where its admission finds them. If the pool has no room
        for them now, or no cache, they are computed again. Raises as `Scheduler.add` does.
        """
        self._scheduler.add(request)
        if pages is not None:
            self._keep(request, pages)
        return request

    def _find(self, request_id: str, what: str) -> Request:
        """The request, with nothing in flight."""
        self._loop.drain()
        request = self._scheduler.find(request_id)
        if request is None:
            raise InvalidRequestError(
                f"a run that has ended cannot be {what}; start a new one with its prompt and "
                "output as the prompt",
                "run",
            )
        return request

    def _keep(self, request: Request, pages: SavedPages) -> None:
        """Write the pages into the pool and make them findable, as if their owner had left."""
        manager = self._scheduler.manager
        owner = replace(
            request,
            request_id=f"{request.request_id}-pages",
            output_token_ids=list(request.output_token_ids),
            page_hashes=[],
        )
        ids = manager.adopt(owner, pages.num_tokens, pages.first_pages)
        if ids is None:
            logger.info("no room for the saved pages of a request; it is computed again")
            return
        try:
            self._loop.move_pages(manager.take_transfers())  # what these pages held until now
            self._runner.write_pages(ids, pages.contents)
        except Exception as error:  # whatever XLA raises: the donated pool is lost
            manager.discard(owner)
            self._loop.recover(Plan(), error)
        else:
            manager.release(owner)
