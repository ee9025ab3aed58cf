# ruff: noqa: B905, E402, E501, F811, F821
# Kept answers to the exercises of chapter 03; `python -m minikv check --audit 03` runs them.

# %% ex-3-1 right: lengths, a slice and a loop
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.free_extents = [(0, num_blocks)]

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id)
        if table is not None:
            return table
        need = cdiv(request.max_kv_tokens, self.block_size)
        for i, (start, length) in enumerate(self.free_extents):
            if length >= need:
                self.free_extents[i : i + 1] = (
                    [(start + need, length - need)] if length > need else []
                )
                return self.set_table(request, range(start, start + need))
        return None

    def free(self, request):
        table = self.drop_table(request)
        if not table:
            return
        start, end, others = table[0], table[-1] + 1, []
        for left, length in self.free_extents:
            if left + length == start:
                start = left
            elif left == end:
                end = left + length
            else:
                others.append((left, length))
        self.free_extents = sorted([*others, (start, end - start)])

# %% ex-3-1 right: a map of blocks, the free extents read from it
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.owners = [None] * num_blocks

    @property
    def free_extents(self):
        found, start = [], 0
        for owner, run in groupby(self.owners):
            length = len(list(run))
            if owner is None:
                found.append([start, length])
            start += length
        return found

    def allocate_slots(self, request, num_new_tokens):
        name = request.request_id
        if name not in self.tables:
            need = -(-request.max_kv_tokens // self.block_size)
            start = next((start for start, length in self.free_extents if length >= need), None)
            if start is None:
                return None
            self.owners[start : start + need] = [name] * need
            self.set_table(request, list(range(start, start + need)))
        return self.tables[name]

    def free(self, request):
        for block in self.drop_table(request):
            self.owners[block] = None

# %% ex-3-1 right: two dictionaries, by start and by end, listed in any order
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.by_start, self.by_end = {0: num_blocks}, {num_blocks: 0}

    @property
    def free_extents(self):
        return [(start, end - start) for end, start in reversed(self.by_end.items())]

    def allocate_slots(self, request, num_new_tokens, **options):
        if request.request_id in self.tables:
            return self.tables[request.request_id]
        need = cdiv(request.max_kv_tokens, self.block_size)
        starts = [start for start, end in self.by_start.items() if end - start >= need]
        if not starts:
            return None
        start = min(starts)
        end = self.by_start.pop(start)
        del self.by_end[end]
        if end > start + need:
            self.by_start[start + need], self.by_end[end] = end, start + need
        return self.set_table(request, range(start, start + need))

    def free(self, request):
        table = self.drop_table(request)
        if len(table):
            start, end = table[0], table[0] + len(table)
            if start in self.by_end:
                start = self.by_end.pop(start)
                del self.by_start[start]
            if end in self.by_start:
                end = self.by_start.pop(end)
                del self.by_end[end]
            self.by_start[start], self.by_end[end] = end, start

# %% ex-3-1 right: sorted and merged in one pass after each free
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.free_extents = [(0, num_blocks)]

    def allocate_slots(self, request, num_new_tokens):
        held = self.tables.get(request.request_id)
        if held:
            return held
        need = cdiv(request.max_kv_tokens, self.block_size)
        for extent in self.free_extents:
            if extent[1] >= need:
                self.free_extents.remove(extent)
                if extent[1] > need:
                    self.free_extents.append((extent[0] + need, extent[1] - need))
                    self.free_extents.sort()
                return self.set_table(request, range(extent[0], extent[0] + need))

    def free(self, request):
        held = self.drop_table(request)
        if held:
            merged = []
            for start, length in sorted([*self.free_extents, (held[0], len(held))]):
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((start, length))
            self.free_extents = merged

# %% ex-3-1 wrong: coalescing forgotten
# says: joined with neither neighbour
# from: lengths, a slice and a loop
# -             if left + length == start:
# -                 start = left
# -             elif left == end:
# -                 end = left + length
# -             else:
# -                 others.append((left, length))
# +             others.append((left, length))

# %% ex-3-1 wrong: joined on the right only
# says: not joined with its left neighbour
# from: lengths, a slice and a loop
# -             if left + length == start:
# -                 start = left
# -             elif left == end:
# +             if left == end:

# %% ex-3-1 wrong: joined on the left only
# says: not joined with its right neighbour
# from: lengths, a slice and a loop
# -                 start = left
# -             elif left == end:
# -                 end = left + length
# +                 start = left

# %% ex-3-1 wrong: stops at the first neighbour it finds
# says: not joined with its right neighbour
# from: lengths, a slice and a loop
# -             if left + length == start:
# +             if left + length == start and end - start == len(table):
# -             elif left == end:
# +             elif left == end and end - start == len(table):

# %% ex-3-1 wrong: the joined neighbour stays listed
# says: a neighbour that is joined must go
# from: lengths, a slice and a loop
# -         for left, length in self.free_extents:
# +         for left, length in self.free_extents:
# +             others.append((left, length))
# -                 end = left + length
# -             else:
# -                 others.append((left, length))
# +                 end = left + length

# %% ex-3-1 wrong: frees what was used, not what was held
# says: freed at the wrong size
# from: lengths, a slice and a loop
# -         start, end, others = table[0], table[-1] + 1, []
# +         start, end, others = (
# +             table[0],
# +             table[0] + cdiv(request.num_computed_tokens, self.block_size),
# +             [],
# +         )

# %% ex-3-1 wrong: frees tokens, not blocks
# says: freed at the wrong size
# from: lengths, a slice and a loop
# - table[-1] + 1
# + min(self.num_blocks, table[0] + request.max_kv_tokens)

# %% ex-3-1 wrong: frees one block too few
# says: freed at the wrong size
# from: lengths, a slice and a loop
# - table[-1] + 1
# + max(table[0] + 1, table[-1])

# %% ex-3-1 wrong: forgets to give the blocks back
# says: were not given back
# from: lengths, a slice and a loop
# -         table = self.drop_table(request)
# -         if not table:
# -             return
# -         start, end, others = table[0], table[-1] + 1, []
# -         for left, length in self.free_extents:
# -             if left + length == start:
# -                 start = left
# -             elif left == end:
# -                 end = left + length
# -             else:
# -                 others.append((left, length))
# -         self.free_extents = sorted([*others, (start, end - start)])
# +         self.drop_table(request)

# %% ex-3-1 wrong: free sum is enough
# says: are not neighbours
# from: lengths, a slice and a loop
# -         for i, (start, length) in enumerate(self.free_extents):
# -             if length >= need:
# -                 self.free_extents[i : i + 1] = (
# -                     [(start + need, length - need)] if length > need else []
# -                 )
# -                 return self.set_table(request, range(start, start + need))
# -         return None
# +         if sum(length for _, length in self.free_extents) < need:
# +             return None
# +         blocks = []
# +         while len(blocks) < need:
# +             start, length = self.free_extents.pop(0)
# +             part = min(length, need - len(blocks))
# +             blocks += range(start, start + part)
# +             if part < length:
# +                 self.free_extents.insert(0, (start + part, length - part))
# +         return self.set_table(request, blocks)

# %% ex-3-1 wrong: free sum is enough, and the blocks from the first hole on
# says: is held already
# from: lengths, a slice and a loop
# -             if length >= need:
# +             if sum(n for _, n in self.free_extents) >= need:

# %% ex-3-1 wrong: looks at the first extent only
# says: is long enough for its
# from: lengths, a slice and a loop
# -         for i, (start, length) in enumerate(self.free_extents):
# +         for i, (start, length) in enumerate(self.free_extents[:1]):

# %% ex-3-1 wrong: an extent that is just long enough is refused
# says: is long enough for its
# from: lengths, a slice and a loop
# -             if length >= need:
# +             if length > need:

# %% ex-3-1 wrong: best fit
# says: where best fit would put it
# from: lengths, a slice and a loop
# -         for i, (start, length) in enumerate(self.free_extents):
# +         for start, length in sorted(self.free_extents, key=lambda e: e[1]):
# +             i = self.free_extents.index((start, length))

# %% ex-3-1 wrong: worst fit
# says: where worst fit would put it
# from: lengths, a slice and a loop
# -         for i, (start, length) in enumerate(self.free_extents):
# +         for start, length in sorted(self.free_extents, key=lambda e: (-e[1], e[0])):
# +             i = self.free_extents.index((start, length))

# %% ex-3-1 wrong: from the back
# says: takes the front of the free extent with the lowest start
# from: lengths, a slice and a loop
# -                 self.free_extents[i : i + 1] = (
# -                     [(start + need, length - need)] if length > need else []
# -                 )
# -                 return self.set_table(request, range(start, start + need))
# +                 self.free_extents[i : i + 1] = [(start, length - need)] if length > need else []
# +                 return self.set_table(request, range(start + length - need, start + length))

# %% ex-3-1 wrong: the last extent first
# says: takes the front of the free extent with the lowest start
# from: lengths, a slice and a loop
# -         for i, (start, length) in enumerate(self.free_extents):
# +         for i in reversed(range(len(self.free_extents))):
# +             start, length = self.free_extents[i]

# %% ex-3-1 wrong: unsorted: what is freed is put in front
# says: takes the front of the free extent with the lowest start
# from: lengths, a slice and a loop
# - sorted([*others, (start, end - start)])
# + [(start, end - start), *others]

# %% ex-3-1 wrong: room for this step only
# says: enough for this step only
# from: lengths, a slice and a loop
# - request.max_kv_tokens
# + num_new_tokens

# %% ex-3-1 wrong: room for the last token, too
# says: leaves out the last token already
# from: lengths, a slice and a loop
# - request.max_kv_tokens
# + request.num_prompt_tokens + request.max_tokens

# %% ex-3-1 wrong: tokens taken for blocks
# says: as many blocks as it has tokens
# from: lengths, a slice and a loop
# - cdiv(request.max_kv_tokens, self.block_size)
# + request.max_kv_tokens

# %% ex-3-1 wrong: rounded down
# says: its last block is partly full
# from: lengths, a slice and a loop
# - cdiv(request.max_kv_tokens, self.block_size)
# + request.max_kv_tokens // self.block_size

# %% ex-3-1 wrong: a new extent in each step
# says: goes on in it
# from: lengths, a slice and a loop
# -     def allocate_slots(self, request, num_new_tokens):
# -         table = self.tables.get(request.request_id)
# -         if table is not None:
# -             return table
# +     def allocate_slots(self, request, num_new_tokens):

# %% ex-3-1 wrong: returns nothing for who has a table
# says: goes on in it
# from: lengths, a slice and a loop
# -             return table
# +             return None

# %% ex-3-1 wrong: the rest is lost
# says: the rest of an extent stays free
# from: lengths, a slice and a loop
# -                 self.free_extents[i : i + 1] = (
# -                     [(start + need, length - need)] if length > need else []
# -                 )
# +                 self.free_extents[i : i + 1] = []

# %% ex-3-1 wrong: what was given stays listed
# says: is still listed in free_extents
# from: lengths, a slice and a loop
# - i, (start, length) in enumerate(self.free_extents)
# + start, length in self.free_extents
# -             if length >= need:
# -                 self.free_extents[i : i + 1] = (
# -                     [(start + need, length - need)] if length > need else []
# -                 )
# +             if length >= need:

# %% ex-3-1 wrong: empty extents stay
# says: has no blocks: drop it
# from: lengths, a slice and a loop
# -                 self.free_extents[i : i + 1] = (
# -                     [(start + need, length - need)] if length > need else []
# -                 )
# +                 self.free_extents[i : i + 1] = [(start + need, length - need)]

# %% ex-3-1 wrong: no table is set
# says: call set_table
# from: lengths, a slice and a loop
# -                 return self.set_table(request, range(start, start + need))
# +                 return range(start, start + need)

# %% ex-3-1 wrong: the table is kept after free
# says: its table is still in self.tables
# from: lengths, a slice and a loop
# -         table = self.drop_table(request)
# +         table = self.tables.get(request.request_id)

# %% ex-3-1 wrong: breaks on who holds nothing
# says: free ended in IndexError
# from: lengths, a slice and a loop
# -         table = self.drop_table(request)
# -         if not table:
# -             return
# +         table = self.drop_table(request)

# %% ex-3-1 wrong: raises instead of None
# says: allocate_slots ended in MemoryError
# from: lengths, a slice and a loop
# - return None
# + raise MemoryError("no room")

# %% ex-3-1 wrong: drops what is too short, and refuses
# says: then nothing may change
# from: lengths, a slice and a loop
# -             if length >= need:
# +             if length < need and len(self.free_extents) == 1:
# +                 self.free_extents.clear()
# +             elif length >= need:

# %% ex-3-1 wrong: looks for ever
# says: does not end
# from: lengths, a slice and a loop
# -         return None
# +         while True:
# +             pass

# %% ex-3-1 wrong: extents by their ends
# says: at first all of the pool
# from: lengths, a slice and a loop
# -         self.free_extents = [(0, num_blocks)]
# +         self.free_extents = [(0, num_blocks - 1)]

# %% ex-3-1 wrong: start and end for start and number
# says: is how many blocks it has
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.free_extents = [(0, num_blocks)]

    def allocate_slots(self, request, num_new_tokens):
        if request.request_id in self.tables:
            return self.tables[request.request_id]
        need = cdiv(request.max_kv_tokens, self.block_size)
        for i, (start, end) in enumerate(self.free_extents):
            if end - start >= need:
                self.free_extents[i : i + 1] = [(start + need, end)] if end - start > need else []
                return self.set_table(request, range(start, start + need))
        return None

    def free(self, request):
        table = self.drop_table(request)
        if table:
            self.free_extents = sorted([*self.free_extents, (table[0], table[-1] + 1)])

# %% ex-3-1 wrong: no class
# says: must stay a class
def MyManager(num_blocks, block_size):
    return KVCacheManager(num_blocks, block_size)

# %% ex-3-1 delegates: the package's allocator
# says: own allocator
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        from minikv.kv_cache.extents import make_allocator

        super().__init__(num_blocks, block_size)
        self.allocator = make_allocator("first", num_blocks)

    @property
    def free_extents(self):
        return self.allocator.extents()

    def allocate_slots(self, request, num_new_tokens):
        if request.request_id not in self.tables:
            need = cdiv(request.max_kv_tokens, self.block_size)
            start = self.allocator.allocate(need)
            if start is None:
                return None
            self.set_table(request, range(start, start + need))
        return self.tables[request.request_id]

    def free(self, request):
        table = self.drop_table(request)
        if table:
            self.allocator.free(table[0], len(table))

# %% ex-3-1 delegates: the package's manager
# says: own allocator
from minikv.kv_cache.contiguous import ContiguousKVCacheManager


class MyManager(ContiguousKVCacheManager):
    def __init__(self, num_blocks, block_size):
        most = num_blocks * block_size
        super().__init__(num_blocks, block_size, max_model_len=most, reserve="exact", fit="first")

    @property
    def free_extents(self):
        return self.allocator.extents()

# %% ex-3-1 wrong: a block more, whatever is left over
# says: leaves out the last token already
# - cdiv(request.max_kv_tokens, self.block_size)
# + request.max_kv_tokens // self.block_size + 1

# %% ex-3-1 wrong: a refusal among many extents costs the last of them
# says: then nothing may change
# - return None
# + del self.free_extents[3:]
# +         return None

# %% ex-3-1 wrong: an empty table for a refusal
# says: refuse with None
# - return None
# + return []

# %% ex-3-1 right: free extents in an array
import numpy as np


class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.free_extents = np.array([[0, num_blocks]])

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id)
        if table is not None:
            return table
        need = -(-request.max_kv_tokens // self.block_size)
        for i, (start, n) in enumerate(self.free_extents):
            if n >= need:
                new = self.free_extents.copy()
                new[i] = start + need, n - need
                self.free_extents = new[new[:, 1] > 0]
                return self.set_table(request, range(int(start), int(start) + need))
        return None

    def free(self, request):
        table = self.drop_table(request)
        if not table:
            return
        blocks = sorted({*table, *(b for s, n in self.free_extents for b in range(s, s + n))})
        extents = []
        for block in blocks:
            if extents and sum(extents[-1]) == block:
                extents[-1][1] += 1
            else:
                extents.append([block, 1])
        self.free_extents = np.array(extents)

# %% ex-3-2 right: one loop with a sentinel
def measure(owners, num_needed):
    lengths, run = [], 0
    for owner in [*owners, "end"]:
        if owner is None:
            run += 1
        elif run:
            lengths.append(run)
            run = 0
    histogram = {}
    for length in lengths:
        histogram[length] = histogram.get(length, 0) + 1
    free = sum(lengths)
    external = 0 if free == 0 else (free - max(lengths)) / free
    return [
        free,
        max(lengths) if lengths else 0,
        external,
        sum(n for n in lengths if n < num_needed),
        histogram,
    ]

# %% ex-3-2 right: numpy, from the edges of the runs
def measure(owners, num_needed):
    import numpy as np

    free = np.array([0, *(owner is None for owner in owners), 0], dtype=int)
    edges = np.flatnonzero(np.diff(free))
    lengths = edges[1::2] - edges[::2]
    total, largest = lengths.sum(), lengths.max(initial=0)
    counts = np.bincount(lengths, minlength=1)
    return (
        total,
        largest,
        1 - largest / max(1, total) if total else 0.0,
        lengths[lengths < num_needed].sum(),
        dict(enumerate(counts)) | {0: np.int64(0)},
    )

# %% ex-3-2 right: as text, split at what is held; a Counter
def measure(owners, num_needed):
    text = "".join("." if owner is None else "#" for owner in owners)
    lengths = [len(piece) for piece in text.split("#") if piece]
    free, largest = sum(lengths), max([*lengths, 0])
    return (
        free,
        largest,
        1 - largest / (free or largest or 1) if free else 0,
        text.count(".") - sum(n for n in lengths if n >= num_needed),
        Counter(lengths),
    )

# %% ex-3-2 wrong: external fragmentation of the whole pool
# says: taken of the whole pool
# -     external = 1 - largest / free if free else 0.0
# -     unusable = sum(length for length in lengths if length < num_needed)
# +     external = 1 - largest / len(owners)
# +     unusable = sum(n for n in lengths if n < num_needed)

# %% ex-3-2 wrong: what is free and not in the largest extent, of the whole pool
# says: taken of the whole pool
# -     external = 1 - largest / free if free else 0.0
# -     unusable = sum(length for length in lengths if length < num_needed)
# +     external = (free - largest) / len(owners)
# +     unusable = sum(n for n in lengths if n < num_needed)

# %% ex-3-2 wrong: the largest extent is the sum
# says: the sum of the free blocks is no extent
# -     free, largest = sum(lengths), max(lengths, default=0)
# +     free, largest = sum(lengths), sum(lengths)
# - length for length in lengths if length
# + n for n in lengths if n

# %% ex-3-2 wrong: the last free extent is never closed
# says: the free extent at the pool's end is missing
def measure(owners, num_needed):
    lengths, run = [], 0
    for owner in owners:
        if owner is None:
            run += 1
        elif run:
            lengths.append(run)
            run = 0
    free, largest = sum(lengths), max(lengths, default=0)
    external = 1 - largest / free if free else 0.0
    return (
        free,
        largest,
        external,
        sum(n for n in lengths if n < num_needed),
        dict(Counter(lengths)),
    )

# %% ex-3-2 wrong: a block at the end is lost, but free counts it
# says: the free extent at the pool's end is missing
def measure(owners, num_needed):
    lengths, start = [], 0
    for block in range(1, len(owners)):
        if (owners[block] is None) != (owners[block - 1] is None):
            if owners[block - 1] is None:
                lengths.append(block - start)
            start = block
    free, largest = owners.count(None), max(lengths, default=0)
    external = 1 - largest / free if free else 0.0
    return (
        free,
        largest,
        external,
        sum(n for n in lengths if n < num_needed),
        dict(Counter(lengths)),
    )

# %% ex-3-2 wrong: the pool as a ring
# says: a pool is no ring
# -     lengths = [len(list(run)) for owner, run in groupby(owners) if owner is None]
# +     lengths = [len(list(run)) for owner, run in groupby(owners) if owner is None]
# +     if len(lengths) > 1 and owners[0] is None and owners[-1] is None:
# +         lengths[0] += lengths.pop()
# - length for length in lengths if length
# + n for n in lengths if n

# %% ex-3-2 wrong: an extent that is just enough is unusable
# says: just num_needed blocks serves
# - length for length in lengths if length <
# + n for n in lengths if n <=

# %% ex-3-2 wrong: what a request leaves over is unusable
# says: would leave over of a long extent
# - length for length in lengths if length < num_needed
# + n % num_needed if n >= num_needed else n for n in lengths

# %% ex-3-2 wrong: all or nothing
# says: whatever becomes of the short ones
# - sum(length for length in lengths if length < num_needed)
# + 0 if largest >= num_needed else free

# %% ex-3-2 wrong: unusable extents, not blocks
# says: blocks were asked for, not the number of extents
# - length for length in lengths if length < num_needed
# + n < num_needed for n in lengths

# %% ex-3-2 wrong: free is the number of extents
# says: blocks were asked for, not the number of extents
# -     free, largest = sum(lengths), max(lengths, default=0)
# +     free, largest = len(lengths), max(lengths, default=0)
# - length for length in lengths if length
# + n for n in lengths if n

# %% ex-3-2 wrong: the share in one piece
# says: share of the free memory that is in one piece
# -     external = 1 - largest / free if free else 0.0
# -     unusable = sum(length for length in lengths if length < num_needed)
# +     external = largest / free if free else 0.0
# +     unusable = sum(n for n in lengths if n < num_needed)

# %% ex-3-2 wrong: in percent
# says: that is a percentage
# -     external = 1 - largest / free if free else 0.0
# -     unusable = sum(length for length in lengths if length < num_needed)
# +     external = 100 - 100 * largest / free if free else 0.0
# +     unusable = sum(n for n in lengths if n < num_needed)

# %% ex-3-2 wrong: rounded
# says: don't round
# -     external = 1 - largest / free if free else 0.0
# -     unusable = sum(length for length in lengths if length < num_needed)
# +     external = round(1 - largest / free, 2) if free else 0.0
# +     unusable = sum(n for n in lengths if n < num_needed)

# %% ex-3-2 wrong: the first extent for the largest
# says: first free extent, not the longest
# - max(lengths, default=0)
# + lengths[0] if lengths else 0
# - length for length in lengths if length
# + n for n in lengths if n

# %% ex-3-2 wrong: each length once
# says: how often it occurs
# -     unusable = sum(length for length in lengths if length < num_needed)
# -     return free, largest, external, unusable, dict(Counter(lengths))
# +     unusable = sum(n for n in lengths if n < num_needed)
# +     return free, largest, external, unusable, dict.fromkeys(lengths, 1)

# %% ex-3-2 wrong: a histogram of what is held, too
# says: extents in use are counted, too
# -     unusable = sum(length for length in lengths if length < num_needed)
# -     return free, largest, external, unusable, dict(Counter(lengths))
# +     unusable = sum(n for n in lengths if n < num_needed)
# +     return (
# +         free,
# +         largest,
# +         external,
# +         unusable,
# +         dict(Counter(len(list(run)) for _, run in groupby(owners))),
# +     )

# %% ex-3-2 wrong: a histogram of who holds how much
# says: extents in use are counted, too
# -     unusable = sum(length for length in lengths if length < num_needed)
# -     return free, largest, external, unusable, dict(Counter(lengths))
# +     unusable = sum(n for n in lengths if n < num_needed)
# +     return (
# +         free,
# +         largest,
# +         external,
# +         unusable,
# +         {n: [len(list(r)) for _, r in groupby(owners)].count(n) for n in range(1, len(owners) + 1)},
# +     )

# %% ex-3-2 wrong: a list for a histogram
# says: histogram must be a dictionary
# -     unusable = sum(length for length in lengths if length < num_needed)
# -     return free, largest, external, unusable, dict(Counter(lengths))
# +     unusable = sum(n for n in lengths if n < num_needed)
# +     return free, largest, external, unusable, lengths

# %% ex-3-2 wrong: lengths by counts
# says: histogram is wrong in
# -     unusable = sum(length for length in lengths if length < num_needed)
# -     return free, largest, external, unusable, dict(Counter(lengths))
# +     unusable = sum(n for n in lengths if n < num_needed)
# +     return free, largest, external, unusable, {times: n for n, times in Counter(lengths).items()}

# %% ex-3-2 wrong: empty pieces of the text, too
# says: lies no extent
def measure(owners, num_needed):
    lengths = [len(piece) for piece in "".join("#" if o else "." for o in owners).split("#")]
    free, largest = sum(lengths), max(lengths)
    external = 1 - largest / free if free else 0.0
    unusable = sum(n for n in lengths if n < num_needed)
    return free, largest, external, unusable, {n: lengths.count(n) for n in lengths}

# %% ex-3-2 wrong: four things
# says: measure must return (free
# -     unusable = sum(length for length in lengths if length < num_needed)
# -     return free, largest, external, unusable, dict(Counter(lengths))
# +     unusable = sum(n for n in lengths if n < num_needed)
# +     return free, largest, external, unusable

# %% ex-3-2 wrong: fails where nothing is free
# says: ended in ZeroDivisionError
# -     external = 1 - largest / free if free else 0.0
# -     unusable = sum(length for length in lengths if length < num_needed)
# +     external = 1 - largest / free
# +     unusable = sum(n for n in lengths if n < num_needed)

# %% ex-3-2 wrong: prints
# says: returned None
# -     unusable = sum(length for length in lengths if length < num_needed)
# -     return free, largest, external, unusable, dict(Counter(lengths))
# +     unusable = sum(n for n in lengths if n < num_needed)
# +     print(free, largest, external, unusable, dict(Counter(lengths)))

# %% ex-3-2 wrong: takes blocks away from the map
# says: changed what it was given
def measure(owners, num_needed):
    lengths = []
    while owners:
        owner, run = owners.pop(0), 1
        while owners and owners[0] == owner:
            owners.pop(0)
            run += 1
        if owner is None:
            lengths.append(run)
    free, largest = sum(lengths), max(lengths, default=0)
    return free, largest, 1 - largest / (free or 1), 0, dict(Counter(lengths))

# %% ex-3-2 delegates: the package's measures
# says: own allocator
def measure(owners, num_needed):
    from minikv.kv_cache import extents as e

    found, start = [], 0
    for owner, run in groupby(owners):
        length = len(list(run))
        if owner is None:
            found.append(e.Extent(start, length))
        start += length
    fragmented, short = e.external_fragmentation(found), e.unusable(found, num_needed)
    lengths = Counter(extent.num_blocks for extent in found)
    return e.num_free(found), e.largest_extent(found), fragmented, short, dict(lengths)

# %% ex-3-2 wrong: no extent over 32 blocks
# says: free is wrong in
# - lengths = [len(list(run)) for owner, run in groupby(owners) if owner is None]
# + lengths = [min(len(list(run)), 32) for owner, run in groupby(owners) if owner is None]

# %% ex-3-3 right: all numbers in every sentence
def diagnose(state, num_needed):
    lengths = [num_blocks for _, num_blocks in state.free_extents]
    free, largest = sum(lengths), max(lengths)
    lost = state.num_blocks - free - sum(each.num_blocks for each in state.held)
    if largest >= num_needed:
        verdict = "fits"
    elif free >= num_needed:
        verdict = "fragmentation"
    elif free + lost >= num_needed:
        verdict = "leak"
    else:
        verdict = "too little memory"
    sentence = f"{verdict}: needed {num_needed}, free {free}, longest {largest}, lost {lost}"
    return free, largest, verdict, sentence

# %% ex-3-3 right: from a map of blocks, upper case, all numbers in one sentence
def diagnose(state, num_needed):
    owners = ["lost"] * state.num_blocks
    for each in state.held:
        for block in range(each.start, each.start + each.num_blocks):
            owners[block] = each.name
    for start, length in state.free_extents:
        owners[start : start + length] = [None] * length
    free, lost = owners.count(None), owners.count("lost")
    largest = max(len(list(run)) for owner, run in groupby(owners) if owner is None)
    questions = [largest >= num_needed, free >= num_needed, free + lost >= num_needed, True]
    verdict = ["FITS", "FRAGMENTATION", "LEAK", "TOO LITTLE MEMORY"][questions.index(True)]
    return (
        free,
        largest,
        verdict,
        (
            f"Wanted: one extent of {num_needed} blocks. Of {state.num_blocks} blocks {free} are "
            f"free, {largest} of them in one piece; {lost} are nobody's."
        ),
    )

# %% ex-3-3 right: a sentence for each verdict, with percentages as well
def diagnose(state, num_needed):
    sizes = sorted(length for _, length in state.free_extents)
    free, largest, held = sum(sizes), sizes[-1], sum(h.num_blocks for h in state.held)
    lost = state.num_blocks - held - free
    share = f"{free / state.num_blocks:.1%} of the pool"
    if num_needed <= largest:
        return [free, largest, "fits", f"It needs {num_needed}, the largest extent is {largest}."]
    if num_needed <= free:
        text = f"{free} blocks ({share}) would do for {num_needed}, not in pieces up to {largest}"
        return [free, largest, "fragmentation", text]
    if num_needed <= free + lost:
        return [
            free,
            largest,
            "leak",
            f"{lost} blocks leaked; with the {free} free it were {num_needed} or more",
        ]
    return [
        free,
        largest,
        "too little memory",
        f"{free} blocks ({share}) are less than {num_needed}",
    ]

# %% ex-3-3 wrong: free sum is enough
# says: the sum of the free blocks is not enough
# from: all numbers in every sentence
# -     if largest >= num_needed:
# +     if free >= num_needed:
# -     elif free >= num_needed:
# +     elif largest >= num_needed:

# %% ex-3-3 wrong: fragmentation is a leak
# says: fragmentation is not a leak
# from: all numbers in every sentence
# -         verdict = "fits"
# -     elif free >= num_needed:
# -         verdict = "fragmentation"
# +         verdict = "fits"

# %% ex-3-3 wrong: asks for a leak first
# says: matters to the request
# from: all numbers in every sentence
# -     if largest >= num_needed:
# +     if lost > 0:
# +         verdict = "leak"
# +     elif largest >= num_needed:

# %% ex-3-3 wrong: asks for a leak before it asks for fragmentation
# says: fragmentation is not a leak
# from: all numbers in every sentence
# -         verdict = "fits"
# +         verdict = "fits"
# +     elif lost:
# +         verdict = "leak"
# -         verdict = "fragmentation"
# -     elif free + lost >= num_needed:
# -         verdict = "leak"
# +         verdict = "fragmentation"

# %% ex-3-3 wrong: fragmentation is too little memory
# says: it lies in pieces
# from: all numbers in every sentence
# - "fragmentation"
# + "too little memory"

# %% ex-3-3 wrong: every refusal is fragmentation
# says: pushing the free extents together
# from: all numbers in every sentence
# - free >= num_needed
# + True

# %% ex-3-3 wrong: too little is a leak
# says: no leak is to blame
# from: all numbers in every sentence
# - free + lost >= num_needed
# + True

# %% ex-3-3 wrong: a leak is too little
# says: they leaked
# from: all numbers in every sentence
# - "leak"
# + "too little memory"

# %% ex-3-3 wrong: just enough does not fit
# says: matters to the request
# from: all numbers in every sentence
# -     if largest >= num_needed:
# +     if largest > num_needed:

# %% ex-3-3 wrong: just enough in sum is too little
# says: it lies in pieces
# from: all numbers in every sentence
# -     elif free >= num_needed:
# +     elif free > num_needed:

# %% ex-3-3 wrong: just enough with what leaked is too little
# says: they leaked
# from: all numbers in every sentence
# -     elif free + lost >= num_needed:
# +     elif free + lost > num_needed:

# %% ex-3-3 wrong: what is held and not live is free
# says: are internal waste
# from: all numbers in every sentence
# -     free, largest = sum(lengths), max(lengths)
# +     free, largest = (
# +         state.num_blocks - sum(each.num_live_blocks for each in state.held),
# +         max(lengths),
# +     )

# %% ex-3-3 wrong: the tails of extents are free extents
# says: are internal waste
# from: all numbers in every sentence
# -     lengths = [num_blocks for _, num_blocks in state.free_extents]
# +     lengths = [num_blocks for _, num_blocks in state.free_extents]
# +     lengths += [each.num_blocks - each.num_live_blocks for each in state.held]

# %% ex-3-3 wrong: free is what is not held
# says: the allocator does not know of them
# from: all numbers in every sentence
# -     free, largest = sum(lengths), max(lengths)
# -     lost = state.num_blocks - free - sum(each.num_blocks for each in state.held)
# +     free, largest = state.num_blocks - sum(each.num_blocks for each in state.held), max(lengths)
# +     lost = 0

# %% ex-3-3 wrong: largest is the sum
# says: the sum of the free extents is no extent
# from: all numbers in every sentence
# -     free, largest = sum(lengths), max(lengths)
# +     free, largest = sum(lengths), sum(lengths)

# %% ex-3-3 wrong: largest is the last
# says: last free extent, not the longest
# from: all numbers in every sentence
# - max(lengths)
# + lengths[-1]

# %% ex-3-3 wrong: largest is the highest start
# says: not where the extent starts
# from: all numbers in every sentence
# -     free, largest = sum(lengths), max(lengths)
# +     free, largest = sum(lengths), max(state.free_extents)[0]

# %% ex-3-3 wrong: a sentence without numbers
# says: lacks its evidence
# from: all numbers in every sentence
# - f"{verdict}: needed {num_needed}, free {free}, longest {largest}, lost {lost}"
# + f"The verdict is {verdict}, because the memory is in pieces"

# %% ex-3-3 wrong: the same sentence for all
# says: lacks its evidence
# from: all numbers in every sentence
# -     sentence = f"{verdict}: needed {num_needed}, free {free}, longest {largest}, lost {lost}"
# +     sentence = f"{verdict}: needed {num_needed}, free {free}"

# %% ex-3-3 wrong: the need is left out
# says: lacks its evidence
# from: all numbers in every sentence
# - needed {num_needed}, free
# + free

# %% ex-3-3 wrong: no words
# says: numbers alone are no sentence
# from: all numbers in every sentence
# -     sentence = f"{verdict}: needed {num_needed}, free {free}, longest {largest}, lost {lost}"
# +     sentence = f"{num_needed} {free} {largest} {lost}"

# %% ex-3-3 wrong: no text
# says: must be a sentence
# from: all numbers in every sentence
# - f"{verdict}: needed {num_needed}, free {free}, longest {largest}, lost {lost}"
# + (num_needed, free, largest)

# %% ex-3-3 wrong: another verdict
# says: must be one of
# from: all numbers in every sentence
# - "fragmentation"
# + "compaction needed"

# %% ex-3-3 wrong: three things
# says: must return four things
# from: all numbers in every sentence
# - verdict, sentence
# + sentence

# %% ex-3-3 wrong: joins the extents in place
# says: changed what it was given
# from: all numbers in every sentence
# - def diagnose(state, num_needed):
# + def diagnose(state, num_needed):
# +     state.free_extents.sort(key=lambda extent: -extent[1])

# %% ex-3-3 delegates: the package's allocator
# says: own allocator
# from: all numbers in every sentence
# -     lengths = [num_blocks for _, num_blocks in state.free_extents]
# -     free, largest = sum(lengths), max(lengths)
# +     from minikv.kv_cache.extents import make_allocator
# +
# +     allocator = make_allocator("first", state.num_blocks)
# +     for each in state.held:
# +         allocator.allocate_at(each.start, each.num_blocks)
# +     free, largest = allocator.num_free_blocks, allocator.largest_free_extent

# %% ex-3-3 right: in another alphabet
# - f"{said}, and a free extent has {largest}: it can start."
# + f"需要{num_needed}个块，最大的空闲区段有{largest}个块"
# - f"{said}, only {free} are free, in pieces or not."
# + f"Нужно {num_needed}, свободно {free}."

# %% ex-3-4 right: many small ones, every second leaves
def paradox_trace():
    trace = [("allocate", f"r{i}", 10) for i in range(10)]
    return trace + [("free", f"r{i}") for i in range(0, 10, 2)]

# %% ex-3-4 right: six operations, the end stays untouched, lists for tuples
def paradox_trace():
    return [
        ["allocate", "one", 14],
        ["allocate", "two", 1],
        ["allocate", "three", 14],
        ["allocate", "four", 59],
        ["free", "three"],
        ["free", "one"],
    ]

# %% ex-3-4 right: names used again, holes filled and opened anew
def paradox_trace():
    trace = []
    for size in (30, 5):
        trace += [("allocate", "A", size), ("allocate", "B", 1), ("free", "A")]
        trace += [
            ("allocate", "A", 13),
            ("allocate", "A2", 17),
            ("free", "A"),
            ("free", "A2"),
            ("free", "B"),
        ]
    for name, size in (
        ("x", 19),
        ("y", 1),
        ("z", 19),
        ("w", 1),
        ("v", 19),
        ("u", 1),
        ("t", 19),
        ("s", 21),
    ):
        trace.append(("allocate", name, size))
    trace += [("free", name) for name in ("x", "z", "v", "t")]
    return tuple(trace)

# %% ex-3-4 wrong: two long free extents, free sum is enough
# says: the free extents must be shorter
def paradox_trace():
    return [
        ("allocate", "A", 25),
        ("allocate", "B", 30),
        ("allocate", "C", 25),
        ("allocate", "D", 20),
        ("free", "A"),
        ("free", "C"),
    ]

# %% ex-3-4 wrong: the pool is full
# says: because the memory is full
def paradox_trace():
    return [
        ("allocate", "A", 50),
        ("allocate", "B", 35),
    ]

# %% ex-3-4 wrong: only 39 are free
# says: because the memory is full
def paradox_trace():
    return [
        ("allocate", "A", 19),
        ("allocate", "B", 30),
        ("allocate", "C", 19),
        ("allocate", "D", 31),
        ("free", "A"),
        ("free", "C"),
    ]

# %% ex-3-4 wrong: holes of exactly 20
# says: an extent of exactly 20
def paradox_trace():
    return [
        ("allocate", "A", 20),
        ("allocate", "B", 30),
        ("allocate", "C", 20),
        ("allocate", "D", 30),
        ("free", "A"),
        ("free", "C"),
    ]

# %% ex-3-4 wrong: the end of the pool is forgotten
# says: the end of the pool, which nobody took
def paradox_trace():
    return [
        ("allocate", "A", 15),
        ("allocate", "B", 10),
        ("allocate", "C", 15),
        ("allocate", "D", 10),
        ("free", "A"),
        ("free", "C"),
    ]

# %% ex-3-4 wrong: the last one that leaves joins the end
# says: the end of the pool, which nobody took
def paradox_trace():
    return [
        ("allocate", "A", 19),
        ("allocate", "B", 30),
        ("allocate", "C", 19),
        ("allocate", "D", 15),
        ("free", "A"),
        ("free", "D"),
    ]

# %% ex-3-4 wrong: neighbours leave, coalescing forgotten
# says: neighbours that are both freed
def paradox_trace():
    return [
        ("allocate", "A", 15),
        ("allocate", "B", 15),
        ("allocate", "C", 15),
        ("allocate", "D", 55),
        ("free", "A"),
        ("free", "B"),
        ("free", "C"),
    ]

# %% ex-3-4 wrong: an allocation of the trace is refused
# says: is itself refused
def paradox_trace():
    return [
        ("allocate", "A", 19),
        ("allocate", "B", 30),
        ("allocate", "C", 19),
        ("allocate", "D", 32),
        ("free", "A"),
        ("free", "C"),
        ("allocate", "E", 20),
    ]

# %% ex-3-4 wrong: more than the pool
# says: is itself refused
def paradox_trace():
    return [
        ("allocate", "A", 60),
        ("allocate", "B", 60),
    ]

# %% ex-3-4 wrong: the hole is filled again
# says: because the memory is full
def paradox_trace():
    return [
        ("allocate", "A", 19),
        ("allocate", "B", 30),
        ("allocate", "C", 19),
        ("allocate", "D", 32),
        ("free", "A"),
        ("allocate", "E", 19),
        ("free", "C"),
    ]

# %% ex-3-4 wrong: frees who was never there
# says: which holds nothing
def paradox_trace():
    return [
        ("allocate", "A", 19),
        ("allocate", "B", 30),
        ("free", "A"),
        ("free", "A"),
    ]

# %% ex-3-4 wrong: a name twice
# says: holds an extent already
def paradox_trace():
    return [
        ("allocate", "A", 19),
        ("allocate", "B", 30),
        ("allocate", "A", 19),
    ]

# %% ex-3-4 wrong: sizes of a fraction of the pool
# says: a number of blocks is 1, 2, 3
def paradox_trace():
    return [
        ("allocate", "A", 0.19),
        ("allocate", "B", 0.3),
    ]

# %% ex-3-4 wrong: nobody takes nothing
# says: a number of blocks is 1, 2, 3
def paradox_trace():
    return [("allocate", "A", 19), ("allocate", "B", -1)]

# %% ex-3-4 wrong: sizes only
# says: a trace is a list of
def paradox_trace():
    return [19, 22, 19, 21, -19, -19]

# %% ex-3-4 wrong: an empty trace
# says: a trace is a list of
def paradox_trace():
    return []

# %% ex-3-4 wrong: a part is freed
# says: a trace is a list of
def paradox_trace():
    return [("allocate", "A", 60), ("free", "A", 19)]

# %% ex-3-4 wrong: writes it as text
# says: a trace is a list of
def paradox_trace():
    return "A 19, B 22, C 19, D 21, free A, free C"

# %% ex-3-4 wrong: frees all
# says: the free extents must be shorter
def paradox_trace():
    return [
        ("allocate", "A", 25),
        ("allocate", "B", 75),
        ("free", "A"),
        ("free", "B"),
    ]

# %% ex-3-4 wrong: no return
# says: returned none
def paradox_trace():
    print([("allocate", "A", 19)])

# %% ex-3-4 no delegate: the package runs traces, it writes none

# %% ex-3-4 right: numpy's numbers
def paradox_trace():
    import numpy as np

    fill = [("allocate", name, n) for name, n in zip("ABCD", np.array([19, 22, 19, 21]))]
    return [*fill, ("free", "A"), ("free", "C")]

# %% ex-3-4 right: names that are numbers, torch's numbers
def paradox_trace():
    import torch

    fill = [("allocate", i, torch.tensor(10)) for i in range(10)]
    return fill + [("free", i) for i in range(0, 10, 2)]

# %% ex-3-5 right: lists of free extents
def admitting_fits(queue, num_blocks):
    orders = {
        "first": lambda e: e[0],
        "best": lambda e: (e[1], e[0]),
        "worst": lambda e: (-e[1], e[0]),
    }
    admitting = []
    for fit, order in orders.items():
        free, held, admitted = [(0, num_blocks)], {}, True
        for what, name, *size in queue:
            if what == "free":
                start, length = held.pop(name)
                for extent in list(free):
                    if sum(extent) == start:
                        free.remove(extent)
                        start, length = extent[0], extent[1] + length
                    elif extent[0] == start + length:
                        free.remove(extent)
                        length += extent[1]
                free.append((start, length))
                continue
            long = [extent for extent in free if extent[1] >= size[0]]
            if not long:
                admitted = False
                break
            start, length = min(long, key=order)
            free.remove((start, length))
            held[name] = (start, size[0])
            if length > size[0]:
                free.append((start + size[0], length - size[0]))
        if admitted:
            admitting.append(fit)
    return admitting

# %% ex-3-5 right: a free list, joined in one pass
def admitting_fits(queue, num_blocks):
    def admits(fit):
        free, held = [(0, num_blocks)], {}
        for step in queue:
            if step[0] == "free":
                merged = []
                for start, length in sorted([*free, held.pop(step[1])]):
                    if merged and sum(merged[-1]) == start:
                        merged[-1] = (merged[-1][0], merged[-1][1] + length)
                    else:
                        merged.append((start, length))
                free = merged
                continue
            long = sorted(extent for extent in free if extent[1] >= step[2])
            if not long:
                return False
            lengths = [length for _, length in long]
            which = {
                "first": 0,
                "best": lengths.index(min(lengths)),
                "worst": lengths.index(max(lengths)),
            }[fit]
            start, length = long[which]
            free.remove((start, length))
            held[step[1]] = (start, step[2])
            if length > step[2]:
                free.append((start + step[2], length - step[2]))
        return True

    return {fit for fit in ("worst", "best", "first") if admits(fit)}

# %% ex-3-5 right: recursion over bit masks
def admitting_fits(queue, num_blocks):
    def holes(mask):
        text = format(mask, f"0{num_blocks}b")[::-1]
        return [(m.start(), len(m[0])) for m in re.finditer("0+", text)]

    def run(i, mask, held, order):
        if i == len(queue):
            return True
        what, name, *size = queue[i]
        if what == "free":
            return run(i + 1, mask & ~held[name], held, order)
        long = sorted((h for h in holes(mask) if h[1] >= size[0]), key=order)
        if not long:
            return False
        bits = ((1 << size[0]) - 1) << long[0][0]
        return run(i + 1, mask | bits, held | {name: bits}, order)

    if run(0, 0, {}, lambda h: h[0]):
        yield "first"
    if run(0, 0, {}, lambda h: h[1]):
        yield "best"
    if run(0, 0, {}, lambda h: -h[1]):
        yield "worst"

# %% ex-3-5 wrong: best fit is best
# says: best fit is not best
def admitting_fits(queue, num_blocks):
    return ["best"]

# %% ex-3-5 wrong: what first fit admits, best fit admits
# says: best fit is not best
# from: lists of free extents
# -     return admitting
# +     return {*admitting, "best"} if "first" in admitting else admitting

# %% ex-3-5 wrong: best fit, where any does
# says: best fit is not best
# from: lists of free extents
# -     return admitting
# +     return ["best"] if admitting else []

# %% ex-3-5 wrong: best fit always, beside the others
# says: best fit is not best
# from: lists of free extents
# -     return admitting
# +     return {"best", *admitting}

# %% ex-3-5 wrong: free sum is enough
# says: the sum of the free blocks is not enough
def admitting_fits(queue, num_blocks):
    sizes, free = {}, num_blocks
    for what, name, *size in queue:
        if what == "free":
            free += sizes[name]
        else:
            free, sizes[name] = free - size[0], size[0]
            if free < 0:
                return []
    return ["first", "best", "worst"]

# %% ex-3-5 wrong: coalescing forgotten
# says: not joined with its free neighbours
# from: lists of free extents
# -                 for extent in list(free):
# +                 for extent in ():

# %% ex-3-5 wrong: coalescing forgotten on the left
# says: the free extent on its left
# from: lists of free extents
# -                 for extent in list(free):
# -                     if sum(extent) == start:
# -                         free.remove(extent)
# -                         start, length = extent[0], extent[1] + length
# -                     elif extent[0] == start + length:
# -                         free.remove(extent)
# -                         length += extent[1]
# +                 right = [extent for extent in free if extent[0] == start + length]
# +                 free = [extent for extent in free if extent not in right]
# +                 length += sum(n for _, n in right)

# %% ex-3-5 wrong: coalescing forgotten on the right
# says: the free extent on its right
# from: lists of free extents
# -                 for extent in list(free):
# -                     if sum(extent) == start:
# -                         free.remove(extent)
# -                         start, length = extent[0], extent[1] + length
# -                     elif extent[0] == start + length:
# -                         free.remove(extent)
# -                         length += extent[1]
# +                 left = [extent for extent in free if sum(extent) == start]
# +                 free = [extent for extent in free if extent not in left]
# +                 start, length = start - sum(n for _, n in left), length + sum(n for _, n in left)

# %% ex-3-5 wrong: coalescing forgotten on the left, again and again
# says: the free extent on its left
# from: lists of free extents
# -                 for extent in list(free):
# -                     if sum(extent) == start:
# -                         free.remove(extent)
# -                         start, length = extent[0], extent[1] + length
# -                     elif extent[0] == start + length:
# -                         free.remove(extent)
# -                         length += extent[1]
# +                 while near := [extent for extent in free if extent[0] == start + length]:
# +                     free.remove(near[0])
# +                     length += near[0][1]

# %% ex-3-5 wrong: coalescing forgotten on the right, again and again
# says: the free extent on its right
# from: lists of free extents
# -                 for extent in list(free):
# -                     if sum(extent) == start:
# -                         free.remove(extent)
# -                         start, length = extent[0], extent[1] + length
# -                     elif extent[0] == start + length:
# -                         free.remove(extent)
# -                         length += extent[1]
# +                 while near := [extent for extent in free if sum(extent) == start]:
# +                     free.remove(near[0])
# +                     start, length = near[0][0], near[0][1] + length

# %% ex-3-5 wrong: best and worst exchanged
# says: best and worst fit are exchanged
# from: lists of free extents
# -         "best": lambda e: (e[1], e[0]),
# -         "worst": lambda e: (-e[1], e[0]),
# +         "best": lambda e: (-e[1], e[0], 0),
# +         "worst": lambda e: (e[1], e[0]),

# %% ex-3-5 wrong: next fit
# says: that is next fit
# from: lists of free extents
# -         "first": lambda e: e[0],
# +         "first": lambda e: (e[0] < last, e[0]),
# - admitted = [(0, num_blocks)], {}, True
# + admitted, last = [(0, num_blocks)], {}, True, 0
# -             free.remove((start, length))
# +             free.remove((start, length))
# +             last = start + size[0]

# %% ex-3-5 wrong: a refused one is left out
# says: one refusal in the middle
# from: lists of free extents
# -                 start, length = held.pop(name)
# +                 start, length = held.pop(name, (0, 0))
# +                 if not length:
# +                     continue
# -                 break
# +                 continue
# +             admitted = True

# %% ex-3-5 wrong: ties to the highest start
# says: the one with the lowest start is taken
# from: lists of free extents
# -         "best": lambda e: (e[1], e[0]),
# -         "worst": lambda e: (-e[1], e[0]),
# +         "best": lambda e: (e[1], -e[0]),
# +         "worst": lambda e: (-e[1], -e[0]),

# %% ex-3-5 wrong: just long enough is too short
# says: just as long as needed is long enough
# from: lists of free extents
# -             long = [extent for extent in free if extent[1] >= size[0]]
# +             long = [extent for extent in free if extent[1] > size[0]]

# %% ex-3-5 wrong: the fits that refuse
# says: what each fit refuses
# from: lists of free extents
# -         if admitted:
# +         if not admitted:

# %% ex-3-5 wrong: all three, or none
# says: best fit is not best
# from: lists of free extents
# -     return admitting
# +     return list(orders) if admitting else []

# %% ex-3-5 wrong: freed at the wrong size: one block short
# says: the fits are wrong for
# from: lists of free extents
# -                 start, length = held.pop(name)
# +                 start, length = held.pop(name)
# +                 length = max(1, length - 1)

# %% ex-3-5 wrong: cut from the back
# says: the fits are wrong for
# from: lists of free extents
# -             held[name] = (start, size[0])
# +             held[name] = (start + length - size[0], size[0])
# - start + size[0]
# + start

# %% ex-3-5 wrong: takes the queue apart
# says: changed what it was given
# from: lists of free extents
# -             admitting.append(fit)
# +             admitting.append(fit)
# +     queue.pop()

# %% ex-3-5 wrong: one name
# says: must return a list or set
# from: lists of free extents
# -     return admitting
# +     return admitting[0] if admitting else "none"

# %% ex-3-5 wrong: true and false
# says: must return a list or set
# from: lists of free extents
# -     return admitting
# +     return [fit in admitting for fit in orders]

# %% ex-3-5 delegates: the package's allocators
# says: own allocator
def admitting_fits(queue, num_blocks):
    from minikv.kv_cache.extents import make_allocator

    found = []
    for fit in ("first", "best", "worst"):
        allocator, held = make_allocator(fit, num_blocks), {}
        for what, name, *size in queue:
            if what == "free":
                allocator.free(*held.pop(name))
                continue
            held[name] = allocator.allocate(*size), *size
            if held[name][0] is None:
                break
        else:
            found.append(fit)
    return found

# %% ex-3-5 wrong: a name is freed once
# says: the fits are wrong for
# - owners = [None] * num_blocks
# + owners, gone = [None] * num_blocks, set()
# - owners = [None if owner == name else owner for owner in owners]
# + owners = [None if o == name and name not in gone else o for o in owners]
# +                 gone.add(name)

# %% ex-3-6 right: both sides written out
def break_even(live_bytes, bandwidth, num_running, num_blocked):
    read = write = live_bytes / bandwidth
    copying = read + write
    lost_with_compaction = copying * num_running + copying * num_blocked
    return [copying, lost_with_compaction / num_blocked]

# %% ex-3-6 right: exact, with fractions
def break_even(live_bytes, bandwidth, num_running, num_blocked):
    from fractions import Fraction

    copying = 2 * Fraction(live_bytes) / Fraction(bandwidth)
    return copying, copying + copying * Fraction(num_running, num_blocked)

# %% ex-3-6 right: the wait by bisection
def break_even(live_bytes, bandwidth, num_running, num_blocked):
    copying = live_bytes / (bandwidth / 2)
    low, high = 0.0, 1e6
    for _ in range(200):
        wait = (low + high) / 2
        if num_blocked * wait < (num_running + num_blocked) * copying:
            low = wait
        else:
            high = wait
    return copying, high

# %% ex-3-6 wrong: compaction is free
# says: compaction is not free
def break_even(live_bytes, bandwidth, num_running, num_blocked):
    copying = 0.0
    return copying, 0.0

# %% ex-3-6 wrong: compaction takes time, and nobody waits for it
# says: compaction is not free
# - copying * (num_running + num_blocked) / num_blocked
# + 0.0

# %% ex-3-6 wrong: copying counted once
# says: copying is counted once
# - 2 * live_bytes
# + live_bytes

# %% ex-3-6 wrong: copying counted once, in the wait only
# says: copying is counted once
# -     return copying, copying * (num_running + num_blocked) / num_blocked
# +     return copying, live_bytes / bandwidth * (num_running + num_blocked) / num_blocked

# %% ex-3-6 wrong: only the blocked ones stop
# says: the running ones stop while it copies
# - copying * (num_running + num_blocked) / num_blocked
# + copying

# %% ex-3-6 wrong: only the running ones stop
# says: wait while it copies, too
# - (num_running + num_blocked)
# + num_running

# %% ex-3-6 wrong: one request is blocked
# says: all the blocked requests wait
# -     return copying, copying * (num_running + num_blocked) / num_blocked
# +     return copying, copying * (num_running + 1)

# %% ex-3-6 wrong: request-seconds for seconds
# says: all the blocked requests wait
# -     return copying, copying * (num_running + num_blocked) / num_blocked
# +     return copying, copying * (num_running + num_blocked)

# %% ex-3-6 wrong: the loss per request
# says: not what was asked for
# - * (num_running + num_blocked) / num_blocked
# + / (num_running + num_blocked)

# %% ex-3-6 wrong: bytes for seconds
# says: those are bytes
# - live_bytes / bandwidth
# + live_bytes

# %% ex-3-6 wrong: upside down
# says: that is upside down
# - 2 * live_bytes / bandwidth
# + bandwidth / (2 * live_bytes)

# %% ex-3-6 wrong: copied for each request
# says: it is done once
def break_even(live_bytes, bandwidth, num_running, num_blocked):
    copying = 2 * live_bytes / bandwidth * (num_running + num_blocked)
    return copying, copying / num_blocked

# %% ex-3-6 wrong: in milliseconds
# says: those are milliseconds
# -     copying = 2 * live_bytes / bandwidth
# +     copying = 2000 * live_bytes / bandwidth

# %% ex-3-6 wrong: rounded
# says: don't round
# - 2 * live_bytes / bandwidth
# + round(2 * live_bytes / bandwidth, 4)

# %% ex-3-6 wrong: the wait only
# says: must return 2 numbers
# -     return copying, copying * (num_running + num_blocked) / num_blocked
# +     return copying, copying * (num_running + num_blocked) / num_blocked, 0

# %% ex-3-6 wrong: written three times
# says: copying is wrong in
# -     copying = 2 * live_bytes / bandwidth
# +     copying = 3 * live_bytes / bandwidth

# %% ex-3-6 delegates: copies of the package's manager, each block once
# says: copying is counted once
# -     copying = 2 * live_bytes / bandwidth
# +     from minikv.kv_cache.base import BlockCopy
# +
# +     copies = [BlockCopy(num_blocked + i, i, 1) for i in range(num_running + 1)]
# +     bytes_per_block = live_bytes / sum(copy.num_blocks for copy in copies)
# +     copying = sum(copy.num_blocks * bytes_per_block for copy in copies) / bandwidth

# %% ex-3-6 wrong: no more than 64 running
# says: wait is wrong in
# - (num_running + num_blocked)
# + (min(num_running, 64) + num_blocked)
