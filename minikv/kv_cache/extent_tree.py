"""Free extents in address order, with the largest one of every region at hand.

Address order and size at once is in no library: a sorted list of addresses has to be walked to find
one that is long enough. Here a binary tree stands over the blocks of the pool, in one flat list:
node 1 is the root, node i has the children 2 i and 2 i + 1, and the leaves are the blocks. Each
node keeps the size of the largest extent filed beneath it, so a search goes down only where it
will find (a segment tree; the idea is that of Stephenson's Fast Fits, 1983, on a Cartesian tree).
"""

from minikv.kv_cache.base import InvariantBroken


class ExtentTree:
    """Extents over num_blocks blocks, each filed under its last block.

    Under the last, not the first: blocks are taken from the front of an extent and given back in
    front of one, and neither moves its leaf. The caller sees to it that extents do not overlap.
    Memory is O(num_blocks), a search or a change O(log num_blocks).
    """

    def __init__(self, num_blocks: int):
        self._num_leaves = 1 << (num_blocks - 1).bit_length()
        self._largest = [0] * (2 * self._num_leaves)

    @property
    def largest(self) -> int:
        """Blocks of the largest extent; 0 if there is none."""
        return self._largest[1]

    def size_at(self, last: int) -> int:
        """Blocks of the extent whose last block is `last` (a block of the pool); 0 if none is."""
        return self._largest[self._num_leaves + last]

    def set_size(self, last: int, num_blocks: int) -> None:
        """The extent whose last block is `last` now has num_blocks blocks; 0 removes it."""
        largest = self._largest
        node = self._num_leaves + last
        largest[node] = num_blocks
        while node > 1:
            here, beside = largest[node], largest[node ^ 1]
            if beside > here:
                here = beside
            node >>= 1
            if largest[node] == here:
                return  # nothing changes further up
            largest[node] = here

    def first(self, num_blocks: int, from_block: int = 0) -> int | None:
        """The last block of the first extent, in address order, that has at least num_blocks
        blocks and does not end before from_block (a block of the pool); None if there is none."""
        largest, num_leaves = self._largest, self._num_leaves
        node = num_leaves + from_block if from_block else 1
        while largest[node] < num_blocks:
            while node & 1:  # a right child, or the root: all beneath its parent lies behind us
                node >>= 1
            if not node:
                return None
            node += 1
        while node < num_leaves:
            node += node
            if largest[node] < num_blocks:
                node += 1
        return node - num_leaves

    def extents(self) -> list[tuple[int, int]]:
        """(first block, blocks) of every extent, in address order. O(log num_blocks) each."""
        found, end = [], 0
        while end < self._num_leaves and (last := self.first(1, end)) is not None:
            end, size = last + 1, self.size_at(last)
            found.append((end - size, size))
        return found

    def check(self) -> None:
        """Raises InvariantBroken where a node is not the larger of its children."""
        for node in range(1, self._num_leaves):
            expected = max(self._largest[2 * node : 2 * node + 2])
            if self._largest[node] != expected:
                raise InvariantBroken(
                    f"node {node} of the tree says that the largest extent beneath it has "
                    f"{self._largest[node]} blocks; it has {expected}"
                )
