"""Prefix caching: a full block is found again by what it holds and all that stands before it.

Keys and values at a position depend on every token up to it. So a block's key is chained: a digest
of its parent's key and its own tokens, and equal keys mean an equal history. Names and parts are
those of vLLM's v1 core (`BlockHash`, `cached_block_hash_to_block`); two things go further. A hit is
compared, not believed: tokens, salt and the parent's publication, so that a collision of digests
costs a miss and never a wrong answer. And a publication has a number that is never used again, so
that "the parent" cannot be another block that took its place.
"""

from array import array
from hashlib import sha256

from minikv.kv_cache.base import InvariantBroken, cdiv
from minikv.kv_cache.eviction import EVICTION
from minikv.kv_cache.paged import BlockPool, KVCacheBlock, PagedKVCacheManager
from minikv.request import require_int


def contents(token_ids, block_size) -> list[bytes]:
    """The tokens of each block as bytes, four for a token."""
    try:
        data = array("I", token_ids).tobytes()
    except OverflowError:  # below 0, or beyond 32 bits: no vocabulary, but a test may
        blocks = range(0, len(token_ids), block_size)
        return [repr(token_ids[at : at + block_size]).encode() for at in blocks]
    width = block_size * array("I").itemsize
    return [data[at : at + width] for at in range(0, len(data), width)]


def digest(data: bytes) -> bytes:
    """The key of a block from its parent's key and its tokens: nobody finds two that are equal,
    whatever they put into their prompts (Python's own `hash` of integers is easily steered)."""
    return sha256(data).digest()


def block_names(request, block_size, start, stop) -> list:
    """Names for blocks start to stop of a request without tokens. A simulated request names its
    beginning: by the keys of a trace, or by prefix_id. What comes after that is like nobody else's.
    """
    named = [*request.block_hashes[start : min(stop, request.num_prompt_tokens // block_size)]]
    salt, prefix_id, start = request.cache_salt, request.prefix_id, start + len(named)
    num_shared = min(stop, request.prefix_len // block_size)
    named += [(salt, prefix_id, i) for i in range(start, num_shared)]
    return named + [(request, i) for i in range(max(start, num_shared), stop)]


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
    else.
    """

    def __init__(self, num_blocks, cached_free):
        super().__init__(num_blocks)
        self.cached_blocks, self.cached_free = {}, cached_free
        self.num_evictions, self.num_publications = 0, 0

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
        return blocks + evicted

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                (self.cached_free if block.key else self.free_block_queue).remove(block)
            block.ref_cnt += 1

    def queue_free(self, blocks):
        with_key = [block for block in blocks if block.key]
        if len(with_key) < len(blocks):
            self.free_block_queue.append_n([block for block in blocks if not block.key])
        self.cached_free.append_n(with_key)

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

    def check_index(self):
        """Whether what is found by a key is the block that has it."""
        published = {block.key[0]: block for block in self.blocks if block.key}
        if published != self.cached_blocks:
            wrong = sorted(
                block.block_id
                for block in {*published.values(), *self.cached_blocks.values()}
                if self.cached_blocks.get(block.key and block.key[0]) is not block
            )
            raise InvariantBroken(f"the map of keys and the keys of blocks {wrong} differ")


class PrefixCachingKVCacheManager(PagedKVCacheManager):
    """Paged blocks, of which the full ones are found again by whoever has the same beginning.

    A published block never changes: a forked tail that is written to is copied while others hold
    it, and unpublished where the writer is the last. Blocks that nobody holds stay findable until
    they are taken for something else. A whole prompt that is found is cut by a block, so that at
    least its last token is left to run.

    eviction: "lru" (the default), "fifo", "lfu", or a class with the methods of the free queue.
    max_pinned_blocks: how many blocks pin() may name at most.
    hash_fn: bytes -> bytes, for tests of collisions.

    num_evictions: cached blocks that were taken for something else.
    """

    def __init__(
        self,
        num_blocks,
        block_size,
        *,
        max_model_len=None,
        eviction="lru",
        max_pinned_blocks=0,
        hash_fn=digest,
    ):
        if isinstance(eviction, str) and eviction not in EVICTION:
            raise ValueError(f"eviction is {eviction!r}; known: {', '.join(EVICTION)}")
        self._order = EVICTION[eviction] if isinstance(eviction, str) else eviction
        super().__init__(num_blocks, block_size, max_model_len=max_model_len)
        self.max_pinned_blocks = require_int("max_pinned_blocks", max_pinned_blocks, at_least=0)
        self.hash_fn = hash_fn
        self._published = {}  # request_id -> (full blocks looked at, the last of them in the map)

    def _new_pool(self):
        return CachingBlockPool(self.num_blocks, self._order())

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

    # -- keys --------------------------------------------------------------------------------

    def block_keys(self, request, num_blocks):
        """At least the first num_blocks keys of the request; they are remembered on it, so that
        each is computed once, however often it is asked for. Tokens counted: known ones."""
        keys = request.block_keys
        if len(keys) < num_blocks:
            if request.token_ids is None:
                self._extend_without_tokens(request, keys, num_blocks)
            else:
                self._extend(request, keys, num_blocks)
        return keys

    def _extend(self, request, keys, num_blocks):
        B, hash_fn, start = self.block_size, self.hash_fn, len(keys)
        salt = None if keys else request.cache_salt  # in the first key, and so in all that follow
        parent = keys[-1][0] if keys else b"" if salt is None else repr(salt).encode()
        for content in contents(request.token_ids[start * B : num_blocks * B], B):
            parent = hash_fn(parent + content)
            keys.append((parent, content))
        if salt is not None and keys:
            keys[0] = keys[0][0], (keys[0][1], salt)

    def _extend_without_tokens(self, request, keys, num_blocks):
        names = block_names(request, self.block_size, len(keys), num_blocks)
        keys += [(name, None) for name in names]

    # -- looking up, and taking ----------------------------------------------------------------

    def find_longest_cache_hit(self, request, num_blocks):
        """The published blocks of its first num_blocks, up to the first that is not there."""
        found, parent, cached = [], 0, self.block_pool.cached_blocks
        for key in self.block_keys(request, num_blocks)[:num_blocks]:
            block = cached.get(key[0])
            if block is None or block.parent != parent or block.key != key:
                break
            found.append(block)
            parent = block.publication
        return found

    def get_num_cached_tokens(self, request):
        # The last known token must be run for its logits: it is never part of a hit.
        num_blocks = (request.num_tokens - 1) // self.block_size
        return len(self.find_longest_cache_hit(request, num_blocks)) * self.block_size

    def _admit_with_hit(self, request, num_tokens, num_cached_tokens, must_fit, keep_free):
        num_hit_blocks = num_cached_tokens // self.block_size
        hit = self.find_longest_cache_hit(request, num_hit_blocks)
        if len(hit) * self.block_size != num_cached_tokens or request.request_id in self.tables:
            raise ValueError(
                f"num_cached_tokens is {num_cached_tokens}, but {len(hit)} blocks of "
                f"{self.block_size} are found for request {request.request_id!r}"
            )
        num_new_blocks = cdiv(num_tokens, self.block_size) - len(hit)
        num_needed = max(num_new_blocks, cdiv(must_fit, self.block_size) - len(hit))
        num_idle = sum(block.ref_cnt == 0 for block in hit)  # free until now, and not from now on
        if num_needed + num_idle + keep_free > self.num_obtainable_blocks(request):
            return None
        self.block_pool.touch(hit)
        for block in hit:
            block.num_hits += 1
        hit_ids = [block.block_id for block in hit]
        new_ids = [block.block_id for block in self.block_pool.get_new_blocks(num_new_blocks)]
        self._published[request.request_id] = len(hit), hit[-1], hit[-1].publication
        return self.set_table(request, hit_ids + new_ids)

    def cache_blocks(self, request):
        # Tokens counted: those whose K and V are written. A block is full when all of its are.
        num_full_blocks = request.num_computed_tokens // self.block_size
        num_done, last, publication = self._published.get(request.request_id, (0, None, 0))
        if num_full_blocks <= num_done:
            return
        pool, table = self.block_pool, self.tables[request.request_id]
        keys = self.block_keys(request, num_full_blocks)
        if last is not None and (last.key is None or last.publication != publication):
            num_done = 0  # another's copy of our beginning was evicted: from now on it is ours
        parent = publication if num_done else 0
        for key, block_id in zip(
            keys[num_done:num_full_blocks], table[num_done:num_full_blocks], strict=True
        ):
            block = pool.cached_blocks.get(key[0])
            if block is None or block.parent != parent or block.key != key:
                if block is not None:
                    pool.unpublish(block)  # a collision, or its parent is gone: nobody finds it
                block = pool.blocks[block_id]
                if block.key is not None:
                    pool.unpublish(block)
                pool.publish(block, key, parent)
            parent = block.publication
        self._published[request.request_id] = num_full_blocks, block, parent

    def free(self, request):
        self._published.pop(request.request_id, None)
        super().free(request)

    def fork(self, parent, child):
        shared = super().fork(parent, child)
        if shared and child.token_ids is None and not child.block_keys:
            child.block_keys = parent.block_keys[: child.num_computed_tokens // self.block_size]
        return shared

    def _make_own(self, request, table, tail, new_blocks):
        if tail.ref_cnt == 1 and tail.key is not None:
            self.block_pool.unpublish(tail)
        super()._make_own(request, table, tail, new_blocks)

    def reset_prefix_cache(self) -> bool:
        """Forgets all that is cached. False, and nothing changes, while a request holds blocks."""
        if self.tables:
            return False
        for block in self.block_pool.cached_free.get_all_free_blocks():
            self.block_pool.unpublish(block)
        return True

    def check(self):
        """As above, and: a block is in the map of keys exactly if it has that key, and waits in
        the queue of cached blocks exactly if it has a key and no holder."""
        super().check()
        unknown = self._published.keys() - self.tables.keys()
        if unknown:
            raise InvariantBroken(
                f"published blocks are counted for {min(unknown)!r}, without table"
            )
