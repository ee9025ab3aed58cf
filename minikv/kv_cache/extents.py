"""Extents, runs of consecutive blocks, handed out from a pool: which free one to cut is the fit.

A request that must lie in one piece needs one free extent that is long enough; that enough blocks
are free in sum does not help it. First, best, next and worst fit join neighbours that are free
(coalescing, Knuth, TAOCP vol. 1, section 2.5); the buddy system joins halves of one block only.
The measures at the end say how far apart free memory and usable memory are.
"""

from itertools import pairwise
from typing import NamedTuple

from sortedcontainers import SortedList

from minikv.kv_cache.base import InvariantBroken
from minikv.kv_cache.extent_tree import ExtentTree
from minikv.request import require_int


class Extent(NamedTuple):
    """A free run: blocks start to start + num_blocks - 1."""

    start: int
    num_blocks: int


class ExtentAllocator:
    """The contract of all fits. All sizes are in blocks, and at least 1.

    It knows which blocks are free, not whose the others are: that is the manager's business. What
    is refused (None, False, an error) changes nothing. Raises TypeError for what is no whole
    number, ValueError for a size below 1 and for blocks outside the pool.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = require_int("num_blocks", num_blocks, at_least=1)
        self.num_free_blocks = self.num_blocks

    def allocate(self, num_blocks: int) -> int | None:
        """Takes num_blocks consecutive blocks and returns the first; None: no free extent is long
        enough, however much is free in sum."""
        raise NotImplementedError(f"{type(self).__name__}.allocate")

    def allocate_at(self, start: int, num_blocks: int) -> bool:
        """Takes exactly these blocks. False: some of them are in use."""
        raise NotImplementedError(f"{type(self).__name__}.allocate_at")

    def free(self, start: int, num_blocks: int) -> None:
        """Gives back what was taken, with all that it was extended by.

        Raises ValueError, naming the blocks, if some of them are free already.
        """
        raise NotImplementedError(f"{type(self).__name__}.free")

    def extend(self, start: int, num_blocks: int, num_more: int) -> bool:
        """Lets an extent in use grow in place, by the num_more blocks right behind it. False:
        they are not all free. Raises ValueError if the extent itself is not in use."""
        raise NotImplementedError(f"{type(self).__name__}.extend")

    def round_up(self, num_blocks: int) -> int:
        """Blocks that allocate(num_blocks) really takes."""
        return require_int("num_blocks", num_blocks, at_least=1)

    @property
    def largest_free_extent(self) -> int:
        """Blocks of the longest extent that can be allocated now; 0 if nothing is free."""
        raise NotImplementedError(f"{type(self).__name__}.largest_free_extent")

    @property
    def largest_when_empty(self) -> int:
        """Blocks of the longest extent that can be allocated when nothing is in use."""
        return self.num_blocks

    def extents(self) -> list[Extent]:
        """The free extents in address order. O(num_blocks)."""
        raise NotImplementedError(f"{type(self).__name__}.extents")

    def check(self) -> None:
        """Raises InvariantBroken if the books contradict each other. O(num_blocks).

        Here: free extents lie in the pool, do not overlap, and add up to num_free_blocks.
        """
        end, total = 0, 0
        for extent in self.extents():
            if extent.num_blocks < 1 or extent.start < end:
                raise InvariantBroken(f"{extent} is empty, or begins before block {end}")
            end = extent.start + extent.num_blocks
            total += extent.num_blocks
        if end > self.num_blocks:
            raise InvariantBroken(f"a free extent ends at {end}, the pool at {self.num_blocks}")
        if total != self.num_free_blocks:
            raise InvariantBroken(
                f"the free extents have {total} blocks, but {self.num_free_blocks} are counted"
            )

    def _size(self, name, num_blocks):
        if type(num_blocks) is int and num_blocks > 0:  # the usual case, at a third of the price
            return num_blocks
        return require_int(name, num_blocks, at_least=1)

    def _blocks(self, start, num_blocks):
        """The arguments again, as whole numbers, if they are blocks of the pool."""
        if type(start) is not int or start < 0:
            start = require_int("start", start, at_least=0)
        num_blocks = self._size("num_blocks", num_blocks)
        if start + num_blocks > self.num_blocks:
            raise ValueError(
                f"blocks {start} to {start + num_blocks - 1} are not all in the pool, which has "
                f"blocks 0 to {self.num_blocks - 1}"
            )
        return start, num_blocks


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


class Buddy(ExtentAllocator):
    """Binary buddies (Knowlton 1965; Knuth, TAOCP vol. 1, section 2.5): sizes are powers of two.

    A pool of any size is cut into arenas, descending powers of two. A request takes the smallest
    free block that holds it, of equals the one at the lowest address, halved until it fits: the
    lower half is kept, the upper one is free. A freed block is joined with its buddy, the other
    half of what both were cut from, as long as that is free as well; other neighbours stay apart.

    A block of size s starts at a multiple of s, so its buddy is at start ^ s. No block is joined
    across arenas: what follows an arena is smaller than it.

    Sizes given to free and extend are those asked for; they are rounded up as allocate did.
    """

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self._free = {}  # start -> size
        self._by_size = SortedList()  # the same as (size, start)
        self._used = {}  # start -> size
        start = 0
        while start < self.num_blocks:
            size = 1 << (self.num_blocks - start).bit_length() - 1
            self._put(start, size)
            start += size

    def _put(self, start, size):
        self._free[start] = size
        self._by_size.add((size, start))

    def _remove(self, start, size):
        del self._free[start]
        self._by_size.remove((size, start))

    def round_up(self, num_blocks):
        """The next power of two."""
        return 1 << (self._size("num_blocks", num_blocks) - 1).bit_length()

    def allocate(self, num_blocks):
        size = self.round_up(num_blocks)
        if size > self.largest_free_extent:
            return None
        larger, start = self._by_size[self._by_size.bisect_left((size, 0))]
        self._cut(start, larger, start, size)
        return start

    def allocate_at(self, start, num_blocks):
        """False as well where no block of the rounded size can start."""
        start, num_blocks = self._blocks(start, num_blocks)
        size = larger = self.round_up(num_blocks)
        while larger <= self.largest_free_extent:
            from_start = start & -larger  # where a block of this size would hold `start`
            if self._free.get(from_start) == larger:
                if start % size:
                    return False
                self._cut(from_start, larger, start, size)
                return True
            larger *= 2
        return False

    def _cut(self, from_start, larger, start, size):
        """Takes the block (start, size) out of the free one that holds it, and halves that."""
        self._remove(from_start, larger)
        while larger > size:
            larger //= 2
            if start & larger:
                self._put(from_start, larger)
                from_start += larger
            else:
                self._put(from_start + larger, larger)
        self._used[start] = size
        self.num_free_blocks -= size

    def free(self, start, num_blocks):
        start, size = self._in_use(start, num_blocks)
        del self._used[start]
        self.num_free_blocks += size
        while self._free.get(start ^ size) == size:
            self._remove(start ^ size, size)
            start &= ~size
            size *= 2
        self._put(start, size)

    def extend(self, start, num_blocks, num_more):
        """Also true, at no cost, where the rounding already covers it. Else the block has to be a
        lower half whose upper one is free as a whole, as often as it must double."""
        start, size = self._in_use(start, num_blocks)
        wanted = self.round_up(num_blocks + self._size("num_more", num_more))
        larger = size
        while larger < wanted:
            if self._free.get(start ^ larger) != larger or start & larger:
                return False
            larger *= 2
        while size < wanted:
            self._remove(start + size, size)
            self.num_free_blocks -= size
            size *= 2
        self._used[start] = size
        return True

    def _in_use(self, start, num_blocks):
        """The block's start and its size as allocated, if it is in use."""
        start, num_blocks = self._blocks(start, num_blocks)
        size = self.round_up(num_blocks)
        if self._used.get(start) != size:
            raise ValueError(
                f"blocks {start} to {start + num_blocks - 1} are not in use as one block of "
                f"{size}; in use there: {self._used.get(start, 0)}"
            )
        return start, size

    @property
    def largest_free_extent(self):
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def largest_when_empty(self):
        """The first arena."""
        return 1 << self.num_blocks.bit_length() - 1

    def extents(self):
        """The free blocks; two of them may be neighbours without being buddies."""
        return [Extent(*block) for block in sorted(self._free.items())]

    def check(self):
        """Also: free and used blocks are aligned powers of two that make up the pool, no two
        buddies are both free, and both indexes hold the same."""
        super().check()
        blocks, end = sorted([*self._free.items(), *self._used.items()]), 0
        for start, size in blocks:
            if start != end or size & (size - 1) or start % size:
                raise InvariantBroken(f"block ({start}, {size}) is no buddy that begins at {end}")
            end = start + size
        if end != self.num_blocks:
            raise InvariantBroken(f"the blocks end at {end}, the pool at {self.num_blocks}")
        for start, size in self._free.items():
            if self._free.get(start ^ size) == size:
                raise InvariantBroken(f"block ({start}, {size}) and its buddy are both free")
        if list(self._by_size) != sorted((size, start) for start, size in self._free.items()):
            raise InvariantBroken(f"by size: {list(self._by_size)}, by address: {self._free}")


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
