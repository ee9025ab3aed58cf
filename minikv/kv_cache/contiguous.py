"""One extent of consecutive blocks per request: what a request is given at once, and what happens
when it outgrows that.

This is how caches were held before paging (Kwon et al. 2023, section 3.1): simple, fast to index,
and paid for with memory that is reserved and not used, with free memory in pieces that are too
short, or with copies that keep an extent in one piece.
"""

from minikv.kv_cache.base import BlockCopy, InvariantBroken, KVCacheManager, MemoryReport, cdiv
from minikv.kv_cache.extents import make_allocator
from minikv.request import require_int

RESERVE_POLICIES = ("max", "pow2", "double", "exact", "grow")


class ContiguousKVCacheManager(KVCacheManager):
    """reserve: how many slots a request gets when it is admitted.

    "max": max_model_len, wherever it will end (FasterTransformer's and Orca's way). All extents
        have one size; under first fit they are slabs at fixed places.
    "pow2": its prompt and the smallest power of two that is at least max_tokens (Orca (Pow2) of
        Kwon et al. 2023, section 6.1). The slot of the last sampled token, which is never
        written, is counted, as in the paper.
    "exact": prompt + max_tokens - 1, all that it can ever need. An oracle where every request
        runs to its max_tokens, as with ignore_eos (Orca (Oracle)).
    "double": its known tokens. When it outgrows its extent, twice as much.
    "grow": the tokens about to be computed, block by block.

    "double" and "grow" know no length. "double" takes the whole known prompt even where only a
    chunk of it is computed now: the rest is sure to come, and would be the first thing to move.
    An extent that is outgrown is extended in place where the blocks behind it are free; else the
    request is relocated. What a policy asks for is cut to max_slots_per_request, so that each
    request fits which needs no more than that. ("max", "pow2" and "double" may still ask for more
    than a request will need.)

    fit: which free extent is taken, see minikv.kv_cache.extents.
    allocator: the free extents. A table is all that the allocator gave, its rounding included.
    num_relocations: requests moved because they outgrew their place. num_moved_blocks: blocks
    that copies() told to copy so far, for relocation or compaction.

    Raises ValueError for an unknown reserve or fit, and, with "max", for a pool that cannot hold
    max_model_len tokens in one extent.
    """

    def __init__(self, num_blocks, block_size, *, max_model_len, reserve="max", fit="first"):
        super().__init__(num_blocks, block_size)
        if reserve not in RESERVE_POLICIES:
            raise ValueError(f"reserve is {reserve!r}; known: {', '.join(RESERVE_POLICIES)}")
        self.reserve, self.fit = reserve, fit
        self.max_model_len = require_int("max_model_len", max_model_len, at_least=1)
        self.allocator = make_allocator(fit, self.num_blocks)
        slab_blocks, largest = (
            cdiv(self.max_model_len, block_size),
            self.allocator.largest_when_empty,
        )
        if reserve == "max" and slab_blocks > largest:
            limit = f"{self.num_blocks} blocks"
            if largest < self.num_blocks:
                limit += f", and {fit} fit gives {largest} of them at most"
            raise ValueError(
                f"max_model_len {max_model_len} needs a slab of {slab_blocks} blocks of "
                f"{block_size} tokens, but the pool has only {limit}"
            )
        self._most_blocks = min(slab_blocks, largest)  # of one request
        self._most_slots = min(self.max_model_len, largest * self.block_size)
        self._asked = {}  # request_id -> blocks that the policy asked for; the table may have more
        # request_id -> (start, num_blocks): where its content lies until the copies are made, and
        # in how many blocks. Only of those that moved since copies() was drained.
        self._origins = {}
        self.num_relocations = self.num_moved_blocks = 0

    @property
    def num_free_blocks(self):
        return self.allocator.num_free_blocks

    @property
    def max_slots_per_request(self):
        return self._most_slots

    def fits_ever(self, request):
        return request.max_kv_tokens <= self._most_slots

    # -- room for a request -------------------------------------------------------------------

    def num_blocks_for(self, request, num_tokens) -> int:
        """Blocks that the policy takes for a request whose first num_tokens tokens must have slots
        now, before the allocator's rounding. "double" looks at what the request holds already."""
        num_slots = num_tokens
        if self.reserve == "max":
            num_slots = self.max_model_len
        elif self.reserve == "pow2":
            num_slots = request.num_prompt_tokens + (1 << (request.max_tokens - 1).bit_length())
        elif self.reserve == "exact":
            num_slots = request.max_kv_tokens
        elif self.reserve == "double":
            num_held_slots = len(self.tables.get(request.request_id, ())) * self.block_size
            num_slots = 2 * num_held_slots or request.num_tokens
        return max(
            min(cdiv(num_slots, self.block_size), self._most_blocks),
            cdiv(num_tokens, self.block_size),
        )

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
        if num_tokens > self._most_slots or must_fit_tokens > self._most_slots:
            self._refuse(request, max(num_tokens, must_fit_tokens))
        table = self.tables.get(request.request_id, ())
        num_slots = len(table) * self.block_size
        if num_tokens <= num_slots and must_fit_tokens <= num_slots:
            return table
        round_up, num_held_blocks = self.allocator.round_up, len(table)
        num_asked_blocks = self.num_blocks_for(request, num_tokens)
        num_blocks = must_fit_blocks = round_up(num_asked_blocks)
        if must_fit_tokens > num_tokens:
            must_fit_blocks = round_up(self.num_blocks_for(request, must_fit_tokens))
        if must_fit_blocks - num_held_blocks + keep_free_blocks > self.num_free_blocks:
            return None
        start = self._place(request, table, num_blocks, must_fit_blocks)
        if start is None:
            return None
        self._asked[request.request_id] = num_asked_blocks
        return self.set_table(request, range(start, start + num_blocks))

    def _refuse(self, request, num_tokens):
        limit = f"max_model_len is {self.max_model_len}"
        if self._most_slots < self.max_model_len:
            limit = f"one request gets {self._most_slots} of the pool's slots at most"
        raise ValueError(f"request {request.request_id!r} wants {num_tokens} slots, but {limit}")

    def _place(self, request, table, num_blocks, must_fit_blocks):
        """Where the request's num_blocks blocks start; None: no extent is long enough."""
        allocator, num_held_blocks = self.allocator, len(table)
        if not num_held_blocks:
            if must_fit_blocks > allocator.largest_free_extent:
                return None
            return allocator.allocate(num_blocks)
        if must_fit_blocks == num_blocks and allocator.extend(
            table.start, num_held_blocks, num_blocks - num_held_blocks
        ):
            return table.start
        # Its own room counts, since all copies are read before any is written.
        allocator.free(table.start, num_held_blocks)
        start = None
        if must_fit_blocks <= allocator.largest_free_extent:
            start = allocator.allocate(num_blocks)
        if start is None:
            allocator.allocate_at(table.start, num_held_blocks)
            return None
        self._moves(request, table)
        self.num_relocations += 1
        return start

    def _moves(self, request, table):
        """The request leaves `table`. Its content lies where it lay when copies() was drained: a
        second move before that adds no copy, and changes none but its destination."""
        if request.num_computed_tokens:
            num_blocks = cdiv(request.num_computed_tokens, self.block_size)
            self._origins.setdefault(request.request_id, (table.start, num_blocks))

    def free(self, request):
        table = self.drop_table(request)
        if table:
            self.allocator.free(table.start, len(table))
            self._asked.pop(request.request_id, None)
            self._origins.pop(request.request_id, None)  # nobody will read it

    # -- moving ---------------------------------------------------------------------------------

    def compact(self):
        """Slides all extents to the start of the pool, in the order in which they lie; a buddy
        allocator's by size, the largest first, as it could place no other order without holes."""
        tables, moved = self.tables, {}
        order = sorted(tables, key=lambda request_id: tables[request_id].start)
        if self.fit == "buddy":
            order.sort(key=lambda request_id: -len(tables[request_id]))
        allocator = make_allocator(self.fit, self.num_blocks)
        start = num_moved_tokens = 0
        for request_id in order:
            table, request = tables[request_id], self.requests[request_id]
            allocator.allocate_at(start, len(table))
            if start != table.start:
                self._moves(request, table)  # no copy, as long as the table is the old one
                moved[request_id] = range(start, start + len(table))
                num_moved_tokens += request.num_computed_tokens
            start += len(table)
        # All at once: an interrupt before this changes nothing.
        self.tables, self.allocator = tables | moved, allocator
        return num_moved_tokens

    def copies(self):
        copies = []
        for request_id, (src, num_blocks) in self._origins.items():
            dst = self.tables[request_id].start
            if dst != src:  # there and back again
                copies.append(BlockCopy(src, dst, num_blocks))
                self.num_moved_blocks += num_blocks
        self._origins.clear()
        return copies

    # -- the books ------------------------------------------------------------------------------

    def free_extents(self):
        return self.allocator.extents()

    def num_rounding_slots(self, request_id) -> int:
        """The last slots of its table, which the allocator added to what the policy asked for, as
        far as no token has reached them."""
        B, request = self.block_size, self.requests[request_id]
        num_asked_slots = max(self._asked[request_id] * B, request.num_computed_tokens)
        return len(self.tables[request_id]) * B - num_asked_slots

    def report(self, next_request=None):
        """The report knows max_tokens, whatever the policy knows: slots that the longest possible
        answer reaches are `reserved`, those beyond it `internal`.

        rounding: what the allocator added, as far as no token has reached it.
        external: free extents that are too short for the next request's extent; with "max", where
            all extents have one size, also the rest of each that no slab can be cut from.
        """
        B = self.block_size
        live = reserved = internal = rounding = 0
        for request_id, table in self.tables.items():
            request = self.requests[request_id]
            num_rounding_slots = self.num_rounding_slots(request_id)
            num_asked_slots = len(table) * B - num_rounding_slots
            may_use = min(num_asked_slots, request.max_live_tokens)
            live += request.num_live_tokens
            reserved += may_use - request.num_live_tokens
            internal += num_asked_slots - may_use
            rounding += num_rounding_slots
        free, external = self.num_free_blocks * B, 0
        if next_request is not None:
            num_blocks = self.num_blocks_for(next_request, next_request.num_tokens)
            num_blocks = self.allocator.round_up(num_blocks)
            for extent in self.allocator.extents():
                if extent.num_blocks < num_blocks:
                    external += extent.num_blocks * B
                elif self.reserve == "max":
                    external += extent.num_blocks % num_blocks * B
        return MemoryReport(
            live=live,
            reserved=reserved,
            internal=internal,
            rounding=rounding,
            external=external,
            free=free - external,
        )

    def check(self):
        """Also: every table is one extent of the size that the allocator gives for what was asked,
        extents in use and free ones make up the pool, and only who has content is copied."""
        super().check()
        self.allocator.check()
        for request_id, table in self.tables.items():
            num_blocks = self.allocator.round_up(self._asked.get(request_id, 1))
            if not isinstance(table, range) or table != range(
                table.start, table.start + num_blocks
            ):
                raise InvariantBroken(
                    f"the extent of {request_id!r} is {table}, but should be {num_blocks} "
                    "consecutive blocks"
                )
        used = [(table.start, len(table)) for table in self.tables.values()]
        extents, end = sorted([*used, *self.allocator.extents()]), 0
        for start, num_blocks in extents:
            if start != end:
                raise InvariantBroken(f"extents overlap or are lost at block {end}: {extents}")
            end += num_blocks
        if self._asked.keys() != self.tables.keys() or end != self.num_blocks:
            raise InvariantBroken(f"extents of nobody, or none at block {end}: {extents}")
        for request_id, (_, num_blocks) in self._origins.items():
            if num_blocks > len(self.tables.get(request_id, ())):
                raise InvariantBroken(
                    f"{num_blocks} blocks of {request_id!r} are to be copied, but it holds "
                    f"{self.tables.get(request_id)}"
                )
