"""The contract between the scheduler, which wants room for tokens, and whoever hands out blocks.

The pool is `num_blocks` blocks of `block_size` token slots. A request's block table lists the
blocks that hold its tokens, in order: token position p lies in slot
`table[p // block_size] * block_size + p % block_size`. A manager only accounts: it never sees a
tensor. Names follow vLLM's v1 KV-cache manager.
"""

from collections.abc import Sequence
from typing import NamedTuple

from minikv.request import require_int

BlockTable = Sequence[int]


class OutOfKVMemory(RuntimeError):
    """A request that can never be served from this pool."""


class InvariantBroken(RuntimeError):
    """The books of a KV-cache manager contradict each other."""


class BlockCopy(NamedTuple):
    """Copy num_blocks consecutive blocks. kind: `device` (pool to pool), `out` (pool to host) or
    `in` (host to pool)."""

    src: int
    dst: int
    num_blocks: int
    kind: str = "device"


class MemoryReport(NamedTuple):
    """Where the pool's token slots are; each slot is counted once, and they add up to the pool.

    live: hold keys and values of running requests.
    reserved: held for tokens that may still come.
    internal: held, but never to be used (a slab's rest beyond the request's longest possible
        length, the tail of a last block, a static batch's padding and finished rows).
    rounding: added by the allocator beyond what the policy asked for.
    cached: kept for reuse, owned by no running request.
    external: free, but in pieces too short for the next request.
    free: the rest.
    """

    live: int = 0
    reserved: int = 0
    internal: int = 0
    rounding: int = 0
    cached: int = 0
    external: int = 0
    free: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class KVCacheManager:
    """Base of every manager. A class of your own needs only `allocate_slots(request,
    num_new_tokens)` and `free(request)`, with `set_table` and `drop_table` for the tables; the
    rest is answered here from the tables. Arguments at their defaults are never passed.

    owner: the scheduler that it serves, once that has admitted a request.

    Raises ValueError where num_blocks or block_size is below 1.
    """

    owner = None

    def __new__(cls, *args, **options):
        self = super().__new__(cls)
        self._made_with = args, options  # for reset()
        return self

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = require_int("num_blocks", num_blocks, at_least=1)
        self.block_size = require_int("block_size", block_size, at_least=1)
        self.tables: dict[str, BlockTable] = {}  # by request_id: the only place where tables live
        self.requests = {}  # by request_id: those that hold a table

    # -- the tables -------------------------------------------------------------------------

    def set_table(self, request, block_ids: BlockTable) -> BlockTable:
        self.requests[request.request_id] = request
        self.tables[request.request_id] = block_ids
        return block_ids

    def drop_table(self, request) -> BlockTable:
        """Forgets the request's table and returns it; empty if it had none."""
        table = self.tables.pop(request.request_id, ())
        self.requests.pop(request.request_id, None)
        return table

    # -- what a manager answers -------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had, those that only a cache holds included."""
        return self.num_blocks - len({b for table in self.tables.values() for b in table})

    @property
    def max_slots_per_request(self) -> int:
        return self.num_blocks * self.block_size

    def fits_ever(self, request) -> bool:
        """Whether it could run to its longest possible end, alone in an empty pool."""
        return request.max_kv_tokens <= self.max_slots_per_request

    def get_num_cached_tokens(self, request) -> int:
        """Leading tokens whose keys and values are already in the pool: at most num_tokens - 1,
        since the last one must be run for its logits. Changes nothing; good until the manager
        next changes."""
        return 0

    def allocate_slots(
        self,
        request,
        num_new_tokens: int,
        *,
        num_cached_tokens: int = 0,
        must_fit_tokens: int = 0,
        keep_free_blocks: int = 0,
    ) -> BlockTable | None:
        """Makes room for num_new_tokens beyond request.num_computed_tokens and the hit.

        Tokens counted: those about to be computed in this step. A token sampled at its end is not
        among them; it gets its slot in the step that computes it.

        num_cached_tokens: adopt a hit of this many tokens, as get_num_cached_tokens found it.
        must_fit_tokens: refuse unless that many tokens of the request would fit (admission).
        keep_free_blocks: refuse if fewer blocks would stay free afterwards (watermark).

        Returns the block table; it is good to read once scheduling has ended, not before, since a
        later allocation of the same step may move it. Returns None for "not now": then nothing
        has changed.
        """
        raise NotImplementedError(f"{type(self).__name__}.allocate_slots")

    def free(self, request) -> None:
        """Takes back all that the request holds; does nothing for one without a table.

        The caller has set finish_reason (None: preempted), and num_computed_tokens is still true.
        """
        raise NotImplementedError(f"{type(self).__name__}.free")

    def cache_blocks(self, request) -> None:
        """After the forward pass: full blocks up to num_computed_tokens may now be shared."""

    def fork(self, parent, child) -> bool:
        """Lets child share the blocks that hold its num_computed_tokens tokens of parent. False:
        no; the child is queued and computes its prompt itself."""
        return False

    def swap_out(self, request) -> bool:
        """Moves its blocks to the host. False: no; it is freed and recomputed."""
        return False

    def reset_prefix_cache(self) -> bool:
        """Forgets what is cached for nobody in particular. False, and nothing changes, while a
        request holds blocks."""
        return not self.tables

    def compact(self) -> int:
        """Moves what is in use together. Returns the tokens moved; copies() has the copies."""
        return 0

    def copies(self) -> list[BlockCopy]:
        """Drains the copies to be done before this step's writes. All sources are read as they
        were before the step, then all destinations are written; no destination appears twice.
        What was drained counts as done: where a step fails, all is computed anew."""
        return []

    def reset(self) -> None:
        """Forgets everything: a manager made anew, by __init__ with the arguments that it was made
        with. Books that were cut short in the middle of a change, at any point, cannot be mended
        from themselves, least of all those of a class that is not known here.

        What is put on an instance later (an observer, a counter) stays. A class whose __init__
        is handed something that it fills, such as a free list of somebody else, replaces this."""
        args, options = self._made_with
        self.__init__(*args, **options)

    # -- what an observer reads ---------------------------------------------------------------

    def num_blocks_for(self, request, num_tokens: int) -> int:
        """Blocks that a request is given at once so that its first num_tokens tokens have slots,
        before an allocator rounds them up. What a refused request is measured against."""
        return cdiv(num_tokens, self.block_size)

    def free_extents(self) -> list:
        """Where a request has to lie in one piece: the free pieces, (start, num_blocks) each, in
        address order. [] where any free block will do, as it will here."""
        return []

    def num_rounding_slots(self, request_id) -> int:
        """Slots at the end of a table that an allocator added to what was asked for."""
        return 0

    def report(self, next_request=None) -> MemoryReport:
        """Where the slots are. next_request: measure `external` against what it needs."""
        B, slots = self.block_size, self.num_blocks * self.block_size
        live = reserved = internal = 0
        for request_id, table in self.tables.items():
            request, size = self.requests.get(request_id), len(table) * B
            if request is None:  # a table set by hand: whatever it holds is held
                reserved += size
                continue
            may_use = min(size, request.max_live_tokens)
            live += request.num_live_tokens
            reserved += may_use - request.num_live_tokens
            internal += size - may_use
        return MemoryReport(
            live=live,
            reserved=reserved,
            internal=internal,
            free=slots - live - reserved - internal,
        )

    def check(self) -> None:
        """Raises InvariantBroken if the books contradict each other. Tests call it every step.

        Here: every block of a table exists and stands in one table once, every table is long
        enough for the tokens computed, and the blocks in use and free add up to the pool. A
        manager that shares blocks has to say how often each is held, and replaces this.
        """
        owners = {}
        for request_id, table in self.tables.items():
            for block_id in table:
                if not 0 <= block_id < self.num_blocks:
                    raise InvariantBroken(
                        f"request {request_id!r} holds block {block_id}, but the pool has blocks "
                        f"0 to {self.num_blocks - 1}"
                    )
                if block_id in owners:
                    raise InvariantBroken(
                        f"block {block_id} is held twice: by {owners[block_id]!r} and "
                        f"{request_id!r}"
                    )
                owners[block_id] = request_id
        for request_id, request in self.requests.items():
            num_slots = len(self.tables.get(request_id, ())) * self.block_size
            if num_slots < request.num_computed_tokens:
                raise InvariantBroken(
                    f"request {request_id!r} has {request.num_computed_tokens} computed tokens in "
                    f"{num_slots} slots"
                )
        if len(owners) + self.num_free_blocks != self.num_blocks:
            raise InvariantBroken(
                f"{len(owners)} blocks in use and {self.num_free_blocks} free do not add up to "
                f"{self.num_blocks}"
            )
