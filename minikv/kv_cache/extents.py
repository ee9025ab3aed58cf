"""Which free extent to cut: first, best, next and worst fit; and how fragmented the rest is.

These four join neighbours that are free (coalescing; Knuth, TAOCP vol. 1, section 2.5) and differ
in `_choose`, and in what they keep for it: next fit a cursor, best and worst fit the free extents
in order of their size. The buddy system, beside them in FITS, is in a file of its own. The
measures at the end say how far apart free memory and usable memory are.
"""

from itertools import pairwise

from sortedcontainers import SortedList

from minikv.kv_cache.base import InvariantBroken
from minikv.kv_cache.buddy import Buddy
from minikv.kv_cache.extent_base import Extent, ExtentAllocator
from minikv.kv_cache.extent_tree import ExtentTree


class CoalescingAllocator(ExtentAllocator):
    """Free neighbours are always one extent, and blocks are taken from the front of it. A fit
    says which. What was taken may be given back in parts, in any order."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self._tree = ExtentTree(self.num_blocks)
        self._resize(self.num_blocks - 1, 0, self.num_blocks)

    def _choose(self, num_blocks) -> int | None:
        """The last block of the extent to cut num_blocks from; None: none is long enough."""
        raise NotImplementedError(f"{type(self).__name__}._choose")

    def _resize(self, last, old_size, new_size):
        """The extent whose last block is `last` had old_size blocks, and now has new_size. All
        changes go through here; 0 means that there was, or will be, none."""
        self._tree.set_size(last, new_size)

    def allocate(self, num_blocks):
        num_blocks = self._size("num_blocks", num_blocks)
        last = self._choose(num_blocks)
        if last is None:
            return None
        size = self._tree.size_at(last)
        self._resize(last, size, size - num_blocks)
        self.num_free_blocks -= num_blocks
        return last + 1 - size

    def allocate_at(self, start, num_blocks):
        start, num_blocks = self._blocks(start, num_blocks)
        last = self._tree.first(1, start)
        if last is None or last + 1 < start + num_blocks:
            return False
        size = self._tree.size_at(last)
        before = start - (last + 1 - size)  # free blocks of this extent that stay in front
        if before < 0:
            return False
        self._resize(last, size, size - num_blocks - before)
        if before:
            self._resize(start - 1, 0, before)
        self.num_free_blocks -= num_blocks
        return True

    def free(self, start, num_blocks):
        start, num_blocks = self._blocks(start, num_blocks)
        last, behind = self._free_behind(start, num_blocks)
        before = self._tree.size_at(start - 1) if start else 0
        if before:
            self._resize(start - 1, before, 0)
        self._resize(last, behind, before + num_blocks + behind)
        self.num_free_blocks += num_blocks

    def extend(self, start, num_blocks, num_more):
        start, num_blocks = self._blocks(start, num_blocks)
        num_more = self._size("num_more", num_more)
        last, behind = self._free_behind(start, num_blocks)
        if behind < num_more:
            return False
        self._resize(last, behind, behind - num_more)
        self.num_free_blocks -= num_more
        return True

    def _free_behind(self, start, num_blocks):
        """(last block, blocks) of the free extent right behind these blocks, (their own last
        block, 0) if there is none. Raises ValueError if one of them is free itself."""
        end = start + num_blocks
        last = self._tree.first(1, start)
        if last is None:
            return end - 1, 0
        size = self._tree.size_at(last)
        if last + 1 - size < end:
            raise ValueError(
                f"blocks {start} to {end - 1} are not all in use: blocks {last + 1 - size} to "
                f"{last} are free"
            )
        return (last, size) if last + 1 - size == end else (end - 1, 0)

    @property
    def largest_free_extent(self):
        return self._tree.largest

    def extents(self):
        return [Extent(*extent) for extent in self._tree.extents()]

    def check(self):
        """Also: no two free neighbours, and the tree agrees with its leaves."""
        super().check()
        self._tree.check()
        extents = self.extents()
        for one, two in pairwise(extents):
            if one.start + one.num_blocks == two.start:
                raise InvariantBroken(f"{one} and {two} are neighbours, but not one extent")


class FirstFit(CoalescingAllocator):
    """The first extent, in address order, that is long enough."""

    def _choose(self, num_blocks):
        return self._tree.first(num_blocks)


class NextFit(CoalescingAllocator):
    """First fit that goes on where the last allocation ended, and once around (Knuth's roving
    pointer). An extent that has grown over that place counts as still ahead, all of it."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self._cursor = 0  # the block behind the last allocation

    def _choose(self, num_blocks):
        last = self._tree.first(num_blocks, self._cursor)
        return self._tree.first(num_blocks) if last is None else last

    def allocate(self, num_blocks):
        start = super().allocate(num_blocks)
        if start is not None:
            self._cursor = (start + num_blocks) % self.num_blocks
        return start


class SizeOrderedAllocator(CoalescingAllocator):
    """Keeps (size, start) of the free extents sorted as well."""

    def __init__(self, num_blocks):
        self._by_size = SortedList()
        super().__init__(num_blocks)

    def _resize(self, last, old_size, new_size):
        super()._resize(last, old_size, new_size)
        if old_size:
            self._by_size.remove((old_size, last + 1 - old_size))
        if new_size:
            self._by_size.add((new_size, last + 1 - new_size))

    def _first_of_at_least(self, num_blocks):
        size, start = self._by_size[self._by_size.bisect_left((num_blocks, 0))]
        return start + size - 1

    def check(self):
        """Also: the order by size holds the same extents as the order by address."""
        super().check()
        expected = sorted((size, start) for start, size in self.extents())
        if list(self._by_size) != expected:
            raise InvariantBroken(f"by size: {list(self._by_size)}, by address: {expected}")


class BestFit(SizeOrderedAllocator):
    """The smallest extent that is long enough; of equals the one at the lowest address."""

    def _choose(self, num_blocks):
        if num_blocks > self._tree.largest:
            return None
        return self._first_of_at_least(num_blocks)


class WorstFit(SizeOrderedAllocator):
    """The largest extent; of equals the one at the lowest address."""

    def _choose(self, num_blocks):
        if num_blocks > self._tree.largest:
            return None
        return self._first_of_at_least(self._tree.largest)


FITS = {"first": FirstFit, "best": BestFit, "next": NextFit, "worst": WorstFit, "buddy": Buddy}


def make_allocator(fit: str, num_blocks: int) -> ExtentAllocator:
    """An empty pool under the fit of that name. Raises ValueError for an unknown one."""
    if fit not in FITS:
        raise ValueError(f"fit is {fit!r}; known: {', '.join(FITS)}")
    return FITS[fit](num_blocks)


# -- measures: of a list of free extents, in blocks ------------------------------------------------


def num_free(extents) -> int:
    """Free blocks in sum: what a pool's usual gauge shows."""
    return sum(extent.num_blocks for extent in extents)


def largest_extent(extents) -> int:
    """Blocks of the longest free extent: the longest request that can start. 0 if none is free."""
    return max((extent.num_blocks for extent in extents), default=0)


def external_fragmentation(extents) -> float:
    """1 - largest free extent / free blocks: the share of free memory that the longest request
    which can still start cannot use. Relative to what is free, not to the pool. 0.0 where all that
    is free is one extent, and where nothing is free."""
    free = num_free(extents)
    return 1 - largest_extent(extents) / free if free else 0.0


def extent_histogram(extents) -> dict[int, int]:
    """How many free extents have which length, by powers of two: {1: extents of 1 block, 2: of
    2 to 3, 4: of 4 to 7, ...}, up to the longest, empty buckets too. Empty if nothing is free."""
    counts = {1 << i: 0 for i in range(largest_extent(extents).bit_length())}
    for extent in extents:
        counts[1 << extent.num_blocks.bit_length() - 1] += 1
    return counts


def unusable(extents, num_blocks: int) -> int:
    """Free blocks in extents too short for a request of num_blocks blocks. (Buddy: give the size
    that round_up returns.)"""
    return sum(extent.num_blocks for extent in extents if extent.num_blocks < num_blocks)
