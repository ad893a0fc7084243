"""What the prefix cache has done, as numbers. Plain Python."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheStats:
    """Counts since the start, except cached_pages and host_pages, which are of now.

    queried_tokens: tokens of all admitted requests; hit_tokens: those of them whose KV was found
    (from another running request too). evicted_pages left the pool; stored_pages of them went to
    host memory; loaded_pages came back from there; copied_pages were copied on write.
    cached_pages: in the pool, findable, held by no request; host_pages: findable in host memory.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    stored_pages: int = 0
    loaded_pages: int = 0
    copied_pages: int = 0
    cached_pages: int = 0
    host_pages: int = 0


@dataclass(slots=True)
class CacheCounts:
    """The counts of `CacheStats`, while they grow."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0
    stored_pages: int = 0
    loaded_pages: int = 0
    copied_pages: int = 0

    def stats(self, cached_pages: int, host_pages: int) -> CacheStats:
        return CacheStats(
            self.queried_tokens,
            self.hit_tokens,
            self.evicted_pages,
            self.stored_pages,
            self.loaded_pages,
            self.copied_pages,
            cached_pages,
            host_pages,
        )
