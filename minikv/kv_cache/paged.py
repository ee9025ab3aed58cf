"""Paged blocks: a request's tokens lie in any free blocks of the pool, found through its table.

The idea is the operating system's (Kwon et al., SOSP 2023, section 4): blocks of one size, a table
per request, and so no free memory that is too short for anyone. The parts and their names are
those of vLLM's v1 core: `block_pool.py`, `kv_cache_utils.py`, `kv_cache_manager.py`.
"""

from minikv.kv_cache.base import BlockCopy, InvariantBroken, KVCacheManager, MemoryReport, cdiv
from minikv.request import require_int


class KVCacheBlock:
    """The books of one block of the pool; its keys and values lie in the pool's tensors.

    block_id: its place in the pool. ref_cnt: how many tables name it; 0 while it is free.
    prev_free_block, next_free_block: its neighbours in the free queue; both None outside it.
    """

    __slots__ = ("block_id", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id):
        self.block_id, self.ref_cnt = block_id, 0
        self.prev_free_block = self.next_free_block = None

    def __repr__(self):
        return f"KVCacheBlock({self.block_id}, ref_cnt {self.ref_cnt})"


class FreeKVCacheBlockQueue:
    """The free blocks, in the order in which they will be taken: a doubly linked list through the
    blocks themselves.

    Links inside the blocks are what makes removal from the middle cheap: a block that is wanted
    again while it waits is unlinked from its two neighbours, and nobody searches for it. Every
    operation costs O(1) per block given or taken. Two sentinels stand at the ends, so that no
    block is ever the first or the last.

    num_free_blocks: blocks in the queue.

    Raises ValueError, naming the block, for one that is in the queue already (append), or is not
    (remove), and when more are taken than there are; that block, or that call, changes nothing.
    """

    def __init__(self, blocks=()):
        self.num_free_blocks = 0
        self.head, self.tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self.head.next_free_block, self.tail.prev_free_block = self.tail, self.head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n) -> list[KVCacheBlock]:
        """Takes the first n blocks out: their links are undone, the queue's are mended once."""
        if not 0 <= n <= self.num_free_blocks:
            raise ValueError(f"{n} blocks cannot be taken: {self.num_free_blocks} are free")
        taken, block = [], self.head.next_free_block
        for _ in range(n):
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        self.head.next_free_block, block.prev_free_block = block, self.head
        self.num_free_blocks -= n
        return taken

    def append(self, block) -> None:
        self.append_n([block])

    def append_n(self, blocks) -> None:
        """Puts blocks at the end, the first of them first. An error leaves those before it in."""
        last, n = self.tail.prev_free_block, 0
        try:
            for block in blocks:
                if block.prev_free_block is not None:
                    raise ValueError(f"block {block.block_id} is in the free queue already")
                block.prev_free_block, last.next_free_block = last, block
                last = block
                n += 1
        finally:
            last.next_free_block, self.tail.prev_free_block = self.tail, last
            self.num_free_blocks += n

    def remove(self, block) -> None:
        """Takes a block out, wherever it stands."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:  # a sentinel has one neighbour
            raise ValueError(f"block {block.block_id} is not in the free queue")
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """In order. O(free blocks): for figures and tests. Raises InvariantBroken where the list
        does not read the same in both directions, or ends too soon or too late."""
        found, block, n = [], self.head, self.num_free_blocks
        while block is not self.tail:
            following = block.next_free_block
            if following is None or following.prev_free_block is not block:
                raise InvariantBroken(
                    f"the free queue is torn: the next of {block} is {following}, whose previous "
                    f"is {following and following.prev_free_block}"
                )
            block = following
            found.append(block)
            if len(found) > n + 1:  # blocks and the tail
                raise InvariantBroken(f"num_free_blocks is {n}, but the free queue is longer")
        if len(found) <= n:
            raise InvariantBroken(
                f"num_free_blocks is {n}, but the free queue has {len(found) - 1} blocks"
            )
        return found[:-1]


class BlockPool:
    """All blocks, and how many tables hold each.

    A block held by nobody (ref_cnt 0) is in the free queue. One that several tables name goes
    back when the last of them lets go.

    blocks: by block_id. free_block_queue: those that can be taken, the longest free first.
    """

    def __init__(self, num_blocks):
        self.blocks = [self.new_block(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)

    def new_block(self, block_id) -> KVCacheBlock:
        return KVCacheBlock(block_id)

    @property
    def num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_new_blocks(self, num_blocks) -> list[KVCacheBlock]:
        """Takes blocks out of the free queue, for one holder. Raises ValueError if it has fewer;
        then nothing has changed."""
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks) -> None:
        """One more holder for each; a block that waits in the free queue leaves it."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks) -> None:
        """One holder less for each. Those held by nobody now are free, and will be taken again in
        this order. Raises ValueError for one that nobody holds; then nothing has changed."""
        unheld = []
        for i, block in enumerate(ordered_blocks):
            if block.ref_cnt == 0:
                for each in ordered_blocks[:i]:
                    each.ref_cnt += 1
                raise ValueError(f"block {block.block_id} is freed, but nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                unheld.append(block)
        self.queue_free(unheld)

    def queue_free(self, blocks) -> None:
        """Blocks that nobody holds any more wait to be taken again, in this order."""
        self.free_block_queue.append_n(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """In the order in which they will be taken. O(free blocks)."""
        return self.free_block_queue.get_all_free_blocks()

    def check(self, holders) -> None:
        """holders: block_id -> the names of those who hold it. Raises InvariantBroken if a block
        is not exactly as free as that, or if the queue is torn."""
        free = self.get_all_free_blocks()
        for block in free:
            if self.blocks[block.block_id : block.block_id + 1] != [block]:
                raise InvariantBroken(f"the free queue has {block}, which is not of this pool")
        free_ids = {block.block_id for block in free}
        for block_id, block in enumerate(self.blocks):
            names = holders.get(block_id, [])
            if block.ref_cnt != len(names):
                raise InvariantBroken(
                    f"block {block_id} has ref_cnt {block.ref_cnt}, but {len(names)} tables name "
                    f"it: {names}"
                )
            if names and block_id in free_ids:
                raise InvariantBroken(f"block {block_id} is free, but in the tables of {names}")
            if not names and block_id not in free_ids:
                raise InvariantBroken(f"block {block_id} is lost: in no table, and not free")


class PagedKVCacheManager(KVCacheManager):
    """A block is taken when the tokens about to be computed reach beyond the last one, and no
    sooner: nothing is reserved, and what is wasted is the rest of each request's last block.

    Samples of one prompt share its blocks (chapter 7): fork() gives the child its parent's blocks,
    and a last block that is only partly the child's is copied by whoever writes to it first.

    max_model_len: slots of one request at most; None for all of the pool. Tables are lists of
    block ids that grow in place.
    """

    def __init__(self, num_blocks, block_size, *, max_model_len=None):
        super().__init__(num_blocks, block_size)
        if max_model_len is None:
            max_model_len = self.num_blocks * self.block_size
        self.max_model_len = require_int("max_model_len", max_model_len, at_least=1)
        self.block_pool = self._new_pool()
        self._forked_tails = set()  # block ids that a fork has shared in the middle of a block
        self._origins = {}  # block_id -> where its content was when copies() was last drained

    def _new_pool(self):
        return BlockPool(self.num_blocks)

    @property
    def num_free_blocks(self):
        return self.block_pool.free_block_queue.num_free_blocks

    @property
    def max_slots_per_request(self):
        return min(self.num_blocks * self.block_size, self.max_model_len)

    def allocate_slots(
        self,
        request,
        num_new_tokens,
        *,
        num_cached_tokens=0,
        must_fit_tokens=0,
        keep_free_blocks=0,
    ):
        table = self.tables.get(request.request_id, ())
        # Tokens counted: those with K and V after this step. The one sampled at its end is not.
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_slots = len(table) * self.block_size
        if num_tokens <= num_slots and must_fit_tokens <= num_slots and not self._forked_tails:
            return table  # most decode steps end here
        if num_cached_tokens:
            return self._admit_with_hit(
                request,
                num_tokens + num_cached_tokens,
                num_cached_tokens,
                must_fit_tokens,
                keep_free_blocks,
            )
        tail = self._forked_tail(request, table)  # a block that it may have to copy first
        num_copies = int(tail is not None and tail.ref_cnt > 1)
        num_new_blocks = max(0, cdiv(num_tokens, self.block_size) - len(table)) + num_copies
        must_fit_blocks = cdiv(must_fit_tokens, self.block_size) - len(table) + num_copies
        num_needed = max(num_new_blocks, must_fit_blocks)
        if num_needed + keep_free_blocks > self.num_obtainable_blocks(request):
            return None
        blocks = self.block_pool.get_new_blocks(num_new_blocks)
        if not table:
            table = self.set_table(request, [])
        if tail is not None:
            self._make_own(request, table, tail, blocks)
        table += [block.block_id for block in blocks]
        return table

    def num_obtainable_blocks(self, request):
        """Free blocks that this request may take now."""
        return self.num_free_blocks

    def _admit_with_hit(self, request, num_tokens, num_cached_tokens, must_fit, keep_free):
        raise ValueError(f"num_cached_tokens is {num_cached_tokens}, but nothing is cached")

    # -- forks and copy-on-write (the paper's section 4.4) -----------------------------------

    def fork(self, parent, child):
        """The child names the blocks that hold its num_computed_tokens first tokens, one holder
        more for each. Nothing is copied now: a tail that both will write to is copied by the first
        of them, in allocate_slots, and the last holder writes in place.

        Raises ValueError where the child holds a table already, or counts more computed tokens
        than its parent."""
        of_parent = self.tables.get(parent.request_id)
        if of_parent is None:
            return False
        if child.request_id in self.tables:
            raise ValueError(f"request {child.request_id!r} has a table: it cannot be a fork")
        if child.num_computed_tokens > parent.num_computed_tokens:
            raise ValueError(
                f"request {child.request_id!r} counts {child.num_computed_tokens} computed tokens, "
                f"but its parent has {parent.num_computed_tokens}"
            )
        table = list(of_parent[: cdiv(child.num_computed_tokens, self.block_size)])
        self.block_pool.touch([self.block_pool.blocks[block_id] for block_id in table])
        if child.num_computed_tokens % self.block_size:
            self._forked_tails.add(table[-1])
        self.set_table(child, table)
        return True

    def _forked_tail(self, request, table):
        """The block that the first new token goes to, if a fork has shared it; else None."""
        place = request.num_computed_tokens // self.block_size
        if self._forked_tails and place < len(table) and table[place] in self._forked_tails:
            return self.block_pool.blocks[table[place]]
        return None

    def _make_own(self, request, table, tail, new_blocks):
        """Copy-on-write: while others hold the tail, a new block takes its place in the table."""
        if tail.ref_cnt > 1:
            own = new_blocks.pop()
            self._origins[own.block_id] = self._origins.get(tail.block_id, tail.block_id)
            table[table.index(tail.block_id)] = own.block_id
            self.block_pool.free_blocks([tail])
        else:
            self._forked_tails.discard(tail.block_id)

    def copies(self):
        origins, self._origins = self._origins, {}
        return [BlockCopy(src, dst, 1) for dst, src in origins.items()]

    def free(self, request):
        """Tail first: once blocks are shared (chapter 7), the head of a sequence is what others
        most likely have in common with it, and the free queue should keep it longest."""
        of_pool = self.block_pool.blocks
        blocks = [of_pool[block_id] for block_id in self.drop_table(request)]
        self.block_pool.free_blocks(blocks[::-1])
        if self._origins or self._forked_tails:
            unheld = {block.block_id for block in blocks if not block.ref_cnt}
            self._forked_tails -= unheld
            for block_id in unheld & self._origins.keys():
                del self._origins[block_id]  # nobody will read the copy

    # -- what an observer reads ----------------------------------------------------------------

    def report(self, next_request=None):
        """A slot that several requests share is counted once: live where any of them wrote it."""
        B = self.block_size
        written, usable = {}, {}  # of the blocks that a request has not filled: slots of each
        for request_id, request in self.requests.items():
            table = self.tables[request_id]
            for place in range(request.num_live_tokens // B, len(table)):
                block_id, start = table[place], place * B
                live = min(B, max(0, request.num_live_tokens - start))
                may_use = min(B, max(live, request.max_live_tokens - start))
                written[block_id] = max(written.get(block_id, 0), live)
                usable[block_id] = max(usable.get(block_id, 0), may_use)
        shared = self._forked_tails & written.keys()
        if shared:  # until one of them writes: another holder may have filled it
            for request_id, request in self.requests.items():
                for block_id in self.tables[request_id][: request.num_live_tokens // B]:
                    if block_id in shared:
                        written[block_id] = usable[block_id] = B
        num_in_use = self.num_blocks - self.num_free_blocks
        reserved = sum(usable.values()) - sum(written.values())
        internal = len(usable) * B - sum(usable.values())
        cached = self.num_cached_free_blocks * B
        return MemoryReport(
            live=num_in_use * B - reserved - internal,
            reserved=reserved,
            internal=internal,
            cached=cached,
            free=self.num_free_blocks * B - cached,
        )

    @property
    def num_cached_free_blocks(self):
        """Free blocks whose content could be found again."""
        return 0

    def check(self):
        """The invariants: a table's blocks exist, are not repeated, and are enough for the tokens
        computed; each block is either free or as often held as tables name it; the free queue
        reads the same in both directions, and its length is what num_free_blocks says."""
        holders = {}
        for request_id, table in self.tables.items():
            for block_id in table:
                if not 0 <= block_id < self.num_blocks:
                    raise InvariantBroken(
                        f"request {request_id!r} holds block {block_id}, but the pool has blocks "
                        f"0 to {self.num_blocks - 1}"
                    )
                names = holders.setdefault(block_id, [])
                if names[-1:] == [request_id]:
                    raise InvariantBroken(f"request {request_id!r} holds block {block_id} twice")
                names.append(request_id)
        for request_id in self.tables.keys() - self.requests.keys():
            raise InvariantBroken(f"the table of {request_id!r} belongs to no request")
        for request_id, request in self.requests.items():
            num_slots = len(self.tables.get(request_id, ())) * self.block_size
            if num_slots < request.num_computed_tokens:
                raise InvariantBroken(
                    f"request {request_id!r} has {request.num_computed_tokens} computed tokens in "
                    f"{num_slots} slots"
                )
        self.block_pool.check(holders)
