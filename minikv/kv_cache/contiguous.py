"""One slab of consecutive blocks per request, reserved in full when the request is admitted.

This is how FasterTransformer and Orca held their caches (Kwon et al. 2023, section 3.1): simple,
fast to index, and paid for with memory that is reserved for tokens that mostly never come.
"""

import heapq

from minikv.kv_cache.base import InvariantBroken, KVCacheManager, cdiv
from minikv.request import require_int

RESERVE_POLICIES = ("max",)


class ContiguousKVCacheManager(KVCacheManager):
    """reserve="max": every request gets room for max_model_len tokens, wherever it will end.

    All slabs have one size, so the pool is cut at fixed places and the lowest free one is taken.
    The pool's remainder, shorter than a slab, is never used.

    Raises ValueError for an unknown policy, or when not even one slab fits in the pool.
    """

    def __init__(self, num_blocks, block_size, *, max_model_len, reserve="max"):
        super().__init__(num_blocks, block_size)
        if reserve not in RESERVE_POLICIES:
            raise ValueError(f"reserve is {reserve!r}; known: {', '.join(RESERVE_POLICIES)}")
        self.reserve = reserve
        self.max_model_len = require_int("max_model_len", max_model_len, at_least=1)
        self.slab_blocks = cdiv(self.max_model_len, self.block_size)
        if self.slab_blocks > self.num_blocks:
            raise ValueError(
                f"max_model_len {max_model_len} needs a slab of {self.slab_blocks} blocks of "
                f"{block_size} tokens, but the pool has only {self.num_blocks} blocks"
            )
        last_start = self.num_blocks - self.slab_blocks
        self._free_starts = list(range(0, last_start + 1, self.slab_blocks))  # a heap

    @property
    def num_free_blocks(self):
        return self.num_blocks - len(self.tables) * self.slab_blocks

    @property
    def max_slots_per_request(self):
        return self.max_model_len

    def fits_ever(self, request):
        return request.max_kv_tokens <= self.max_model_len

    def allocate_slots(
        self,
        request,
        num_new_tokens,
        *,
        num_cached_tokens=0,
        must_fit_tokens=0,
        keep_free_blocks=0,
    ):
        num_tokens = request.num_computed_tokens + num_new_tokens  # those with K and V after it
        if num_tokens > self.max_model_len or must_fit_tokens > self.max_model_len:
            raise ValueError(
                f"request {request.request_id!r} wants {max(num_tokens, must_fit_tokens)} slots, "
                f"but max_model_len is {self.max_model_len}"
            )
        table = self.tables.get(request.request_id)
        if table is not None:
            return table
        # The remainder is shorter than a slab, so a free slab's worth of blocks is a free slab.
        if self.num_free_blocks - self.slab_blocks < keep_free_blocks:
            return None
        start = heapq.heappop(self._free_starts)
        return self.set_table(request, range(start, start + self.slab_blocks))

    def free(self, request):
        table = self.drop_table(request)
        if table:
            heapq.heappush(self._free_starts, table[0])

    def report(self, next_request=None):
        """`external` is the free memory that no slab can be cut from: the pool's remainder."""
        report = super().report(next_request)
        if next_request is None:
            return report
        external = report.free - len(self._free_starts) * self.slab_blocks * self.block_size
        return report._replace(external=external, free=report.free - external)

    def check(self):
        super().check()
        slabs = sorted([table[0] for table in self.tables.values()] + self._free_starts)
        if slabs != list(range(0, self.slab_blocks * len(slabs), self.slab_blocks)):
            raise InvariantBroken(f"slabs overlap or are lost: they start at blocks {slabs}")
        if len(slabs) != self.num_blocks // self.slab_blocks:
            raise InvariantBroken(
                f"{len(slabs)} slabs, but {self.num_blocks // self.slab_blocks} fit in the pool"
            )
        for request_id, table in self.tables.items():
            if table != range(table[0], table[0] + self.slab_blocks):
                raise InvariantBroken(f"the slab of {request_id!r} is {table}")
