"""Prefix caching: a full block is found again by what it holds and all that stands before it.

Keys and values at a position depend on every token up to it. So a block's key is chained: a digest
of its parent's key and its own tokens, and equal keys mean an equal history. Names and parts are
those of vLLM's v1 core (`BlockHash`, `cached_block_hash_to_block`); two things go further. A hit is
compared, not believed: tokens, salt and the parent's publication, so that a collision of digests
costs a miss and never a wrong answer. And a publication has a number that is never used again, so
that "the parent" cannot be another block that took its place. The books of the blocks themselves
are in `block_cache.py`, the order in which they are given up in `eviction.py`.
"""

import struct
from array import array
from hashlib import blake2b

from minikv.kv_cache.base import InvariantBroken, cdiv
from minikv.kv_cache.block_cache import CachingBlockPool, CachingKVCacheManager
from minikv.kv_cache.eviction import EVICTION, Pinned
from minikv.request import require_int

ORDER_METHODS = ("append_n", "get_all_free_blocks", "num_free_blocks", "popleft_n", "remove")


def contents(token_ids, block_size) -> tuple[bytes, ...]:
    """The tokens of each full block as bytes, four for a token."""
    num_blocks = len(token_ids) // block_size
    try:
        data = array("I", token_ids)
    except OverflowError:  # below 0, or beyond 32 bits: no vocabulary, but a test may
        if len(token_ids) > block_size:
            starts = range(0, num_blocks * block_size, block_size)
            blocks = (token_ids[at : at + block_size] for at in starts)
            return sum((contents(block, block_size) for block in blocks), ())
        text = " ".join(str(int(token)) for token in token_ids).encode()
        return (text.ljust(4 * block_size + 1),) * num_blocks  # longer than any of the others
    return struct.unpack_from(f"{block_size * data.itemsize}s" * num_blocks, data)


_EMPTY = blake2b(digest_size=32)


def digest(data: bytes) -> bytes:
    """The key of a block from its parent's key and its tokens: nobody finds two that are equal,
    whatever they put into their prompts (Python's own `hash` of integers is easily steered)."""
    state = _EMPTY.copy()  # for as little as a block, quicker than a new one by a quarter
    state.update(data)
    return state.digest()


def block_names(request, block_size, start, stop) -> list:
    """Names for blocks start to stop of a request without tokens. It names its beginning, by the
    keys of a trace or by prefix_id; what comes after that is like nobody else's."""
    salt, prefix_id = request.cache_salt, request.prefix_id
    named = [*request.block_hashes[start : min(stop, request.num_prompt_tokens // block_size)]]
    if salt is not None:
        named = [(salt, name) for name in named]
    start += len(named)
    num_shared = min(stop, request.prefix_len // block_size)
    named += [(salt, prefix_id, i) for i in range(start, num_shared)]
    return named + [(request, i) for i in range(max(start, num_shared), stop)]


class PrefixCachingKVCacheManager(CachingKVCacheManager):
    """Paged blocks, of which the full ones are found again by whoever has the same beginning.

    A published block never changes: a forked tail that is written to is copied while others hold
    it, and unpublished where the writer is the last. Blocks that nobody holds stay findable until
    they are taken for something else. A whole prompt that is found is cut by a block, so that at
    least its last token is left to run.

    eviction: "lru" (the default), "fifo", "lfu", "pinned" (see pin), or a class with the methods of
        the free queue.
    max_pinned_blocks: how many blocks pin() may name at most; by default a quarter of the pool.
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
        max_pinned_blocks=None,
        hash_fn=digest,
    ):
        if isinstance(eviction, str) and eviction not in EVICTION:
            raise ValueError(f"eviction is {eviction!r}; known: {', '.join(EVICTION)}")
        self._order = EVICTION[eviction] if isinstance(eviction, str) else eviction
        if not callable(self._order):
            raise TypeError(f"eviction must be a name or a class, not {eviction!r}")
        self._pins = getattr(self, "_pins", set())  # they outlive a reset()
        super().__init__(num_blocks, block_size, max_model_len=max_model_len)
        if max_pinned_blocks is None:
            max_pinned_blocks = self.num_blocks // 4
        self.max_pinned_blocks = require_int("max_pinned_blocks", max_pinned_blocks, at_least=0)
        self.hash_fn, self._keys_made_with = hash_fn, (self.block_size, hash_fn)
        self._published = {}  # request_id -> (full blocks looked at, the last of them in the map)
        self._last_found = None, 0, []  # the last question's request, num_unpublished, and answer

    def _new_pool(self):
        order = self._order()
        if missing := [name for name in ORDER_METHODS if not hasattr(order, name)]:
            raise TypeError(f"eviction made {order!r}, which lacks {', '.join(missing)}")
        if order.num_free_blocks:
            raise ValueError(f"eviction made {order!r}, which holds blocks already: make a new one")
        if isinstance(order, Pinned):
            order.pinned = self._pins
        return CachingBlockPool(self.num_blocks, order)

    # -- keys --------------------------------------------------------------------------------

    def block_keys(self, request, num_blocks):
        """The keys of the request's first num_blocks full blocks, or of more; they are remembered
        on it, so that each is computed once, however often it is asked for. Tokens counted: known
        ones."""
        if request.keys_made_with != self._keys_made_with:
            request.block_keys, request.keys_made_with = [], self._keys_made_with
        keys = request.block_keys
        num_blocks = min(num_blocks, request.num_tokens // self.block_size)  # full ones only
        if len(keys) < num_blocks:
            if request.token_ids is None:
                names = block_names(request, self.block_size, len(keys), num_blocks)
                keys += [(name, None) for name in names]
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
        hit = self.find_longest_cache_hit(request, num_blocks)
        self._last_found = request, self.block_pool.num_unpublished, hit
        return len(hit) * self.block_size

    def _find_again(self, request, num_blocks):
        """Admission follows the question, whose answer holds unless a publication has ended."""
        last_request, num_unpublished, hit = self._last_found
        still_holds = num_unpublished == self.block_pool.num_unpublished
        if last_request is request and still_holds and num_blocks <= len(hit):
            return hit[:num_blocks]
        return self.find_longest_cache_hit(request, num_blocks)

    def _admit_with_hit(self, request, num_tokens, num_cached_tokens, must_fit, keep_free):
        hit = self._find_again(request, num_cached_tokens // self.block_size)
        if len(hit) * self.block_size != num_cached_tokens or request.request_id in self.tables:
            raise ValueError(
                f"num_cached_tokens is {num_cached_tokens}, but {len(hit)} blocks of "
                f"{self.block_size} are found for request {request.request_id!r}"
            )
        num_new_blocks = cdiv(num_tokens, self.block_size) - len(hit)
        num_needed = max(num_new_blocks, cdiv(must_fit, self.block_size) - len(hit))
        if num_needed + keep_free > self.num_obtainable_blocks(request, hit):
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
        cached, blocks = pool.cached_blocks, pool.blocks
        keys = self.block_keys(request, num_full_blocks)
        if last is not None and (last.key is None or last.publication != publication):
            num_done = 0  # another's copy of our beginning was evicted: from now on it is ours
        parent = publication if num_done else 0
        for key, block_id in zip(
            keys[num_done:num_full_blocks], table[num_done:num_full_blocks], strict=True
        ):
            block = cached.get(key[0])
            if block is None or block.parent != parent or block.key != key:
                if block is not None:
                    pool.unpublish(block)  # a collision, or its parent is gone: nobody finds it
                block = blocks[block_id]
                if block.key is not None:
                    pool.unpublish(block)
                pool.publish(block, key, parent)
            parent = block.publication
        self._published[request.request_id] = num_full_blocks, block, parent

    def free(self, request):
        self._published.pop(request.request_id, None)
        super().free(request)
        if request.finish_reason is not None:  # else the keys would live as long as whoever keeps
            request.block_keys = []  # ended requests, and those of a trace keep the request alive

    def fork(self, parent, child):
        shared = super().fork(parent, child)
        if shared and child.token_ids is None and not child.block_keys:
            num_blocks = child.num_computed_tokens // self.block_size
            child.block_keys = self.block_keys(parent, num_blocks)[:num_blocks]
            child.keys_made_with = self._keys_made_with
        return shared

    def _make_own(self, request, table, tail, new_blocks):
        if tail.ref_cnt == 1 and tail.key is not None:
            self.block_pool.unpublish(tail)
        super()._make_own(request, table, tail, new_blocks)

    # -- pins ----------------------------------------------------------------------------------

    def pin(self, request) -> int:
        """Keeps the full blocks of the request's prompt, whenever they are computed, from whoever
        would evict them, and returns their number. The request itself need never be served.

        Kept blocks yield when nothing else can run: to a request that alone holds blocks.
        Raises ValueError without eviction="pinned", and beyond max_pinned_blocks."""
        return self._set_pins(self._pins | self._digests(request))

    def unpin(self, request) -> int:
        """Its blocks, even those that another pinned prompt begins with, are cached as any other.
        Returns the number of blocks still pinned."""
        return self._set_pins(self._pins - self._digests(request))

    def _digests(self, request):
        num_blocks = request.num_prompt_tokens // self.block_size
        return {key[0] for key in self.block_keys(request, num_blocks)[:num_blocks]}

    def _set_pins(self, digests):
        order = self.block_pool.cached_free
        if not isinstance(order, Pinned):
            raise ValueError(
                f"eviction by {type(order).__name__} keeps no pins: make the manager with "
                'eviction="pinned"'
            )
        if len(digests) > self.max_pinned_blocks:
            raise ValueError(
                f"{len(digests)} blocks would be pinned, but max_pinned_blocks is "
                f"{self.max_pinned_blocks} of the pool's {self.num_blocks}"
            )
        waiting = order.get_all_free_blocks()
        for block in waiting:
            order.remove(block)
        self._pins = order.pinned = digests
        order.append_n(waiting)
        return len(digests)

    def num_obtainable_blocks(self, request, hit=()):
        order = self.block_pool.cached_free
        num_free = self.num_free_blocks - [block.ref_cnt for block in hit].count(0)
        if not isinstance(order, Pinned) or not self.tables.keys() - {request.request_id}:
            return num_free
        num_hit = sum(block.ref_cnt == 0 and block.key[0] in order.pinned for block in hit)
        return num_free - (order.kept.num_free_blocks - num_hit)

    def check(self):
        """As above, and: a block is in the map of keys exactly if it has that key, and waits in
        the queue of cached blocks exactly if it has a key and no holder."""
        super().check()
        unknown = self._published.keys() - self.tables.keys()
        if unknown:
            raise InvariantBroken(
                f"published blocks are counted for {min(unknown)!r}, without table"
            )
