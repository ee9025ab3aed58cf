"""The buddy system: blocks of powers of two, which halve and join again.

What it rounds up it wastes; what it saves is looking for neighbours, since a block's only partner
is known from its address.
"""

from sortedcontainers import SortedList

from minikv.kv_cache.base import InvariantBroken
from minikv.kv_cache.extent_base import Extent, ExtentAllocator


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
