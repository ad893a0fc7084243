"""The allocator against a plain model of it, and the errors that reveal a caller's bug."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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


def test_capacity_excludes_the_reserved_page():
    allocator = PageAllocator(num_pages=50, page_size=16)
    assert allocator.capacity_tokens == 784
    assert [allocator.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


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


@pytest.mark.parametrize("sizes", [(1, 16, 1), (2, 0, 1), (2, 16, 0)])
def test_impossible_pools_are_refused(sizes: tuple[int, int, int]):
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
    """Owners take, share and drop pages; a Counter of references is the model."""

    @initialize(num_pages=st.integers(2, 20))
    def create(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages, page_size=4)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        free = self.allocator.num_free
        pages = self.allocator.allocate(count)
        if count > free:
            assert pages is None
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert not set(pages) & set(self.references())
        self.owners.append(pages)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            pages = list(data.draw(st.sampled_from(self.owners)))
            self.allocator.share(pages)
            self.owners.append(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owners:
            index = data.draw(st.integers(0, len(self.owners) - 1))
            self.allocator.release(self.owners.pop(index))

    def references(self) -> Counter[int]:
        return Counter(page for pages in self.owners for page in pages)

    @invariant()
    def model_agrees(self) -> None:
        self.allocator.check_integrity()
        references = self.references()
        assert all(
            self.allocator.ref_count(page) == references[page] for page in range(self.num_pages)
        )
        assert self.allocator.num_used == len(references)
        assert self.allocator.num_free == self.num_pages - 1 - len(references)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
