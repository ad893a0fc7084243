"""A request between two steps, apart from the engine it ran in: what is saved and loaded.

What it drew depends on its tokens, its parameters, its seed and its choice, and on positions; all
else (token counts for penalties, detokenised text, what of a stop string has appeared) follows
from the tokens. So a request goes on from its state as if it had never been interrupted. The KV of
its tokens is kept too, because computing it again takes time; it changes no token.
"""

from dataclasses import dataclass, field

from jaxserve.engine.holding import first_seen_page
from jaxserve.engine.page_programs import PageContents
from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True)
class PageForm:
    """What must be equal for pages of one engine to mean the same in another.

    dtype: of the numbers in it; backend: whose layout the arrays have; windows: of each table
    group; arrays: (shape of a page, dtype) of each array of the pool.
    """

    page_size: int
    dtype: str
    backend: str
    windows: tuple[int | None, ...]
    arrays: tuple[tuple[tuple[int, ...], str], ...]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens in one table group."""
        return -(-num_tokens // self.page_size)

    def first_seen(self, num_tokens: int, window: int | None) -> int:
        """The first page that the query after `num_tokens` tokens sees."""
        return first_seen_page(num_tokens, window, self.page_size)


@dataclass(frozen=True)
class SavedPages:
    """KV of a request's first num_tokens tokens.

    first_pages: per table group, the first page that is kept; those before it have left the
    window. contents: the pages of group 0, in order, then those of group 1 ..., for each array of
    the pool: [pages, page_size, ...].
    """

    form: PageForm
    num_tokens: int
    first_pages: tuple[int, ...]
    contents: PageContents


def count_pages(form: PageForm, num_tokens: int, first_pages: tuple[int, ...]) -> int:
    """Pages that are kept of so many tokens, over all table groups."""
    pages = form.pages_for(num_tokens)
    return sum(pages - first for first in first_pages)


@dataclass(frozen=True)
class RequestState:
    """A request that has not ended. params.max_tokens None: up to the context of who loads it.

    pages None: nothing of it was computed, or its pages cannot be used where it was loaded.
    """

    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    choice: int = 0
    priority: int = 0
    cache_salt: str = ""
    pages: SavedPages | None = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)
