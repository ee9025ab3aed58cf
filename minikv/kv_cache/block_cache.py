"""Blocks that outlive their holders: the pool of paged.py, in which a block may have a key.

Published, a block is found by its key and never changes; freed, it waits in an order of eviction
until it is found again or taken for something else. vLLM's `block_pool.py`, with two queues.
"""

from minikv.kv_cache.base import InvariantBroken
from minikv.kv_cache.paged import BlockPool, KVCacheBlock, PagedKVCacheManager


class CachedBlock(KVCacheBlock):
    """A block that may be found again.

    key: (digest, content) while it is published, else None. content: its tokens as bytes and, in a
        first block, the salt; None for a block of a trace, whose keys are taken as they are.
    publication: the number of this publication. parent: that of the block before it; 0: none.
    num_hits: how often it was found.
    """

    __slots__ = ("key", "num_hits", "parent", "publication")

    def __init__(self, block_id):
        super().__init__(block_id)
        self.key, self.publication, self.parent, self.num_hits = None, 0, 0, 0


class CachingBlockPool(BlockPool):
    """Blocks held by nobody are in one of two queues: those without a key in free_block_queue, and
    those with one in `cached_free`, in the order of eviction. The first are taken first: nothing
    is lost with them.

    cached_blocks: published blocks by digest. num_evictions: published blocks taken for something
    else. num_unpublished: publications that ended, by that or otherwise.
    """

    def __init__(self, num_blocks, cached_free):
        super().__init__(num_blocks)
        self.cached_blocks, self.cached_free = {}, cached_free
        self.num_evictions = self.num_publications = self.num_unpublished = 0

    def new_block(self, block_id):
        return CachedBlock(block_id)

    @property
    def num_free_blocks(self):
        return self.free_block_queue.num_free_blocks + self.cached_free.num_free_blocks

    def get_new_blocks(self, num_blocks):
        if num_blocks <= self.free_block_queue.num_free_blocks:
            return super().get_new_blocks(num_blocks)
        if num_blocks > self.num_free_blocks:
            raise ValueError(
                f"{num_blocks} blocks cannot be taken: {self.num_free_blocks} are free"
            )
        blocks = super().get_new_blocks(self.free_block_queue.num_free_blocks)
        evicted = self.cached_free.popleft_n(num_blocks - len(blocks))
        self.forget(evicted)
        for block in evicted:
            block.ref_cnt = 1
        self.num_evictions += len(evicted)
        self.num_unpublished += len(evicted)
        return blocks + evicted

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                (self.cached_free if block.key else self.free_block_queue).remove(block)
            block.ref_cnt += 1

    def queue_free(self, blocks):
        without_key = [block for block in blocks if block.key is None]
        if without_key:
            self.free_block_queue.append_n(without_key)
            blocks = [block for block in blocks if block.key]
        self.cached_free.append_n(blocks)

    def get_all_free_blocks(self):
        return super().get_all_free_blocks() + self.cached_free.get_all_free_blocks()

    def publish(self, block, key, parent) -> None:
        """From now on it is found by this key, and its content does not change."""
        self.num_publications += 1
        block.key, block.parent, block.publication = key, parent, self.num_publications
        block.num_hits = 0
        self.cached_blocks[key[0]] = block

    def unpublish(self, block) -> None:
        """Nobody finds it any more; who holds it keeps it."""
        if block.ref_cnt == 0:
            self.cached_free.remove(block)
        self.forget([block])
        self.num_unpublished += 1
        if block.ref_cnt == 0:
            self.free_block_queue.append(block)

    def forget(self, blocks) -> None:
        """Takes blocks out of the index, and their keys away."""
        for block in blocks:
            del self.cached_blocks[block.key[0]]
            block.key = None

    def check(self, holders):
        super().check(holders)
        for block in self.cached_free.get_all_free_blocks():
            if block.key is None:
                raise InvariantBroken(f"{block} waits among the cached ones, but has no key")
        for block in self.free_block_queue.get_all_free_blocks():
            if block.key is not None:
                raise InvariantBroken(f"{block} has a key, but waits among those without")
        self.check_index()

    def check_index(self) -> None:
        """A block is found by a key exactly if it has that key."""
        published = {block.key[0]: block for block in self.blocks if block.key}
        if published != self.cached_blocks:
            wrong = sorted(
                block.block_id
                for block in {*published.values(), *self.cached_blocks.values()}
                if self.cached_blocks.get(block.key and block.key[0]) is not block
            )
            raise InvariantBroken(f"the map of keys and the keys of blocks {wrong} differ")


class CachingKVCacheManager(PagedKVCacheManager):
    """What managers have in common whose block_pool is a CachingBlockPool, however they find a
    block. num_evictions: cached blocks that were taken for something else."""

    @property
    def num_free_blocks(self):
        pool = self.block_pool
        return pool.free_block_queue.num_free_blocks + pool.cached_free.num_free_blocks

    @property
    def num_cached_free_blocks(self):
        return self.block_pool.cached_free.num_free_blocks

    @property
    def num_evictions(self):
        return self.block_pool.num_evictions

    def reset_prefix_cache(self) -> bool:
        """Forgets all that is cached. False, and nothing changes, while a request holds blocks."""
        if self.tables:
            return False
        for block in self.block_pool.cached_free.get_all_free_blocks():
            self.block_pool.unpublish(block)
        return True
