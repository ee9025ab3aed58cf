"""The contract of whoever hands out extents: runs of consecutive blocks, cut from a pool.

A request that must lie in one piece needs one free extent that is long enough; that enough blocks
are free in sum does not help it.
"""

from typing import NamedTuple

from minikv.kv_cache.base import InvariantBroken
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
