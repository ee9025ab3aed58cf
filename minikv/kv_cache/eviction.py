"""Which cached block to give up first: the block that nobody holds and somebody may ask for again.

Every order has the methods of the free queue (`FreeKVCacheBlockQueue`), which is itself the first
of them: blocks enter as their last holder leaves, in the order of `ordered_blocks`, go back to work
when they are found again, and are taken for something else from the front.

An order never decides what is right, only what is likely to be wanted: a block that is taken away
too soon is computed again.
"""

import heapq

from minikv.kv_cache.paged import FreeKVCacheBlockQueue


class LRU(FreeKVCacheBlockQueue):
    """Least recently used first; of one request's blocks the tail first, as it was freed so.

    vLLM's order. Whoever uses a block uses all that stand before it in its sequence, so no block
    goes before one that needs it: what is left can always be found."""


class _Heap:
    """Blocks by a rank, lowest first. Who leaves from the middle stays in the heap as a ghost,
    until it comes to the front or ghosts are the half."""

    def __init__(self):
        self._heap, self._entries = [], {}  # (rank, number, block), and that entry by block_id
        self._num_entered = 0

    def rank(self, block):
        raise NotImplementedError

    @property
    def num_free_blocks(self) -> int:
        return len(self._entries)

    def append_n(self, blocks) -> None:
        for block in blocks:
            if block.block_id in self._entries:
                raise ValueError(f"block {block.block_id} is in the free queue already")
            entry = self.rank(block), self._num_entered, block
            self._num_entered += 1
            self._entries[block.block_id] = entry
            heapq.heappush(self._heap, entry)

    def remove(self, block) -> None:
        if self._entries.pop(block.block_id, None) is None:
            raise ValueError(f"block {block.block_id} is not in the free queue")
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = sorted(self._entries.values(), key=lambda entry: entry[:2])

    def popleft_n(self, n) -> list:
        if not 0 <= n <= len(self._entries):
            raise ValueError(f"{n} blocks cannot be taken: {len(self._entries)} are free")
        taken = []
        while len(taken) < n:
            entry = heapq.heappop(self._heap)
            block = entry[-1]
            if self._entries.get(block.block_id) is entry:
                del self._entries[block.block_id]
                taken.append(block)
        return taken

    def get_all_free_blocks(self) -> list:
        return [entry[-1] for entry in sorted(self._entries.values(), key=lambda e: e[:2])]


class FIFO(_Heap):
    """Longest in the cache first, whether it is used or not. It forgets a header that everybody
    asks for as soon as one that nobody does, and the head of a sequence before its tail, which
    then cannot be found either."""

    def rank(self, block):
        return block.publication


class LFU(_Heap):
    """Least often found first; among equals the least recently used. What was popular once stays
    for long after."""

    def rank(self, block):
        return block.num_hits


class Pinned:
    """Least recently used first, and what was pinned last of all.

    pinned: the digests of blocks that are to stay. kept: those of them that nobody holds; others:
    the other cached blocks.
    """

    def __init__(self):
        self.pinned, self.kept, self.others = set(), LRU(), LRU()

    def _queue_of(self, block):
        return self.kept if block.key[0] in self.pinned else self.others

    @property
    def num_free_blocks(self) -> int:
        return self.others.num_free_blocks + self.kept.num_free_blocks

    def append_n(self, blocks) -> None:
        for block in blocks:
            self._queue_of(block).append(block)

    def remove(self, block) -> None:
        self._queue_of(block).remove(block)

    def popleft_n(self, n) -> list:
        if not 0 <= n <= self.num_free_blocks:
            raise ValueError(f"{n} blocks cannot be taken: {self.num_free_blocks} are free")
        num_others = min(n, self.others.num_free_blocks)
        return self.others.popleft_n(num_others) + self.kept.popleft_n(n - num_others)

    def get_all_free_blocks(self) -> list:
        return self.others.get_all_free_blocks() + self.kept.get_all_free_blocks()


EVICTION = {"lru": LRU, "fifo": FIFO, "lfu": LFU, "pinned": Pinned}
