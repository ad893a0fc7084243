"""The allocator against a plain model of it, and the errors that reveal a caller's bug."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jaxserve.engine.page_allocator import PageAllocator


def test_page_zero_is_never_handed_out():
    allocator = PageAllocator(num_pages=5, page_size=16)
    assert sorted(allocator.allocate(4) or []) == [1, 2, 3, 4]
    assert (allocator.num_free, allocator.num_used) == (0, 4)


def test_all_or_nothing():
    allocator = PageAllocator(num_pages=5, page_size=16)
    held = allocator.allocate(3)
    assert allocator.allocate(2) is None
    assert allocator.num_free == 1
    assert allocator.allocate(0) == []
    assert held is not None
    allocator.release(held)
    assert allocator.num_free == 4


def test_a_page_that_is_kept_waits_until_it_is_shared_or_freed():
    allocator = PageAllocator(num_pages=5, page_size=16)
    pages = allocator.allocate(3)
    assert pages is not None
    first, second, third = pages
    allocator.keep(first)
    allocator.keep(third)
    allocator.release([third, second, first])
    assert (allocator.num_free, allocator.num_idle, allocator.num_used) == (2, 2, 0)
    allocator.share([first])
    assert allocator.ref_count(first) == 1
    allocator.release([first])
    allocator.touch(third)
    assert allocator.free_oldest_idle() == first
    allocator.drop(third)
    assert allocator.num_free == 4


def test_a_page_that_is_not_kept_any_more_is_free_after_its_last_reference():
    allocator = PageAllocator(num_pages=3, page_size=4)
    pages = allocator.allocate(1)
    assert pages is not None
    allocator.keep(pages[0])
    allocator.drop(pages[0])
    assert allocator.num_used == 1
    allocator.release(pages)
    assert (allocator.num_free, allocator.num_idle) == (2, 0)


def test_a_free_page_cannot_be_kept():
    with pytest.raises(AssertionError, match="nobody"):
        PageAllocator(num_pages=3, page_size=4).keep(1)


def test_double_free_raises():
    allocator = PageAllocator(num_pages=3, page_size=4)
    pages = allocator.allocate(1)
    assert pages is not None
    allocator.release(pages)
    with pytest.raises(AssertionError, match="free already"):
        allocator.release(pages)


def test_page_zero_cannot_be_released_or_shared():
    allocator = PageAllocator(num_pages=3, page_size=4)
    with pytest.raises(AssertionError):
        allocator.release([0])
    with pytest.raises(AssertionError):
        allocator.share([0])


def test_sharing_a_free_page_raises():
    with pytest.raises(AssertionError, match="cannot be shared"):
        PageAllocator(num_pages=3, page_size=4).share([1])


@pytest.mark.parametrize("sizes", [(1, 16), (2, 0)])
def test_impossible_pools_are_refused(sizes: tuple[int, int]):
    with pytest.raises(ValueError, match="page 0 is reserved"):
        PageAllocator(*sizes)


def test_check_integrity_notices_damage():
    allocator = PageAllocator(num_pages=4, page_size=4)
    allocator.allocate(1)
    allocator.check_integrity()
    allocator._free.append(1)
    with pytest.raises(AssertionError):
        allocator.check_integrity()


class AllocatorMachine(RuleBasedStateMachine):
    """Owners take, share and drop pages; references and kept pages in plain sets are the model."""

    @initialize(num_pages=st.integers(2, 20))
    def create(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages, page_size=4)
        self.owners: list[list[int]] = []
        self.kept: set[int] = set()
        self.idle: list[int] = []  # oldest first

    def an_owner(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.owners) - 1))

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        free = self.allocator.num_free
        pages = self.allocator.allocate(count)
        if count > free:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert not set(pages) & (set(self.references()) | set(self.idle))
        self.owners.append(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = list(self.owners[self.an_owner(data)])
        self.allocator.share(pages)
        self.owners.append(pages)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def share_idle(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.idle))
        self.allocator.share([page])
        self.idle.remove(page)
        self.owners.append([page])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.owners.pop(self.an_owner(data))
        self.allocator.release(pages)
        held = self.references()
        self.idle += [page for page in pages if page in self.kept and not held[page]]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        for page in self.owners[self.an_owner(data)]:
            self.allocator.keep(page)
            self.kept.add(page)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.allocator.drop(page)
        self.kept.remove(page)
        if page in self.idle:
            self.idle.remove(page)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.idle))
        self.allocator.touch(page)
        self.idle.remove(page)
        self.idle.append(page)

    @precondition(lambda self: self.idle)
    @rule()
    def free_oldest_idle(self) -> None:
        page = self.allocator.free_oldest_idle()
        assert page == self.idle.pop(0)
        self.kept.remove(page)

    def references(self) -> Counter[int]:
        return Counter(page for pages in self.owners for page in pages)

    @invariant()
    def model_agrees(self) -> None:
        self.allocator.check_integrity()
        references = self.references()
        assert all(
            self.allocator.ref_count(page) == references[page] for page in range(self.num_pages)
        )
        assert list(self.allocator.idle_order()) == self.idle
        assert self.allocator.num_used == len(references)
        assert self.allocator.num_free == self.num_pages - 1 - len(references) - len(self.idle)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
