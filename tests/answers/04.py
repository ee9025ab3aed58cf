# ruff: noqa: F811, F821
# Kept answers to the exercises of chapter 04; `python -m minikv check --audit 04` runs them.

# %% ex-4-1 no delegate: the package turns tables into slots inside the runner only

# %% ex-4-1 right: all slots of the table, then a slice
def slot_mapping(block_table, block_size, num_computed_tokens, num_new_tokens, width):
    slots = [b * block_size + i for b in block_table for i in range(block_size)]
    chunk = slots[num_computed_tokens:][:num_new_tokens]
    return (*chunk, *[-1] * (width - len(chunk)))


# %% ex-4-1 right: place by place, with divmod
def slot_mapping(block_table, block_size, num_computed_tokens, num_new_tokens, width):
    for i in range(width):
        place, offset = divmod(num_computed_tokens + i, block_size)
        yield block_table[place] * block_size + offset if i < num_new_tokens else -1


# %% ex-4-1 wrong: chunk from position 0
# says: begins at position num_computed_tokens
def slot_mapping(table, B, computed, new, width):
    return [table[p // B] * B + p % B for p in range(new)] + [-1] * (width - new)


# %% ex-4-1 wrong: blocks taken for neighbours
# says: not counted on from the table's first
def slot_mapping(table, B, computed, new, width):
    return [table[0] * B + p for p in range(computed, computed + new)] + [-1] * (width - new)


# %% ex-4-1 wrong: blocks must be in order
# says: sorting it mixes them up
def slot_mapping(table, B, computed, new, width):
    table = sorted(table)
    chunk = range(computed, computed + new)
    return [table[p // B] * B + p % B for p in chunk] + [-1] * (width - new)


# %% ex-4-1 wrong: positions for slots
# says: only the table knows
def slot_mapping(table, B, computed, new, width):
    return [*range(computed, computed + new)] + [-1] * (width - new)


# %% ex-4-1 wrong: a block's id for its first slot
# says: block b begins at slot b * block_size
def slot_mapping(table, B, computed, new, width):
    chunk = range(computed, computed + new)
    return [table[p // B] + p % B for p in chunk] + [-1] * (width - new)


# %% ex-4-1 wrong: positions from 1
# says: the next position is n, not n + 1
def slot_mapping(table, B, computed, new, width):
    chunk = range(computed + 1, computed + new + 1)
    return [table[p // B] * B + p % B for p in chunk] + [-1] * (width - new)


# %% ex-4-1 wrong: offset within the chunk
# says: not from the place in the chunk
def slot_mapping(table, B, computed, new, width):
    chunk = enumerate(range(computed, computed + new))
    return [table[p // B] * B + i % B for i, p in chunk] + [-1] * (width - new)


# %% ex-4-1 wrong: padding goes on counting
# says: A place of padding holds no token
def slot_mapping(table, B, computed, new, width):
    return [table[p // B] * B + p % B for p in range(computed, computed + width)]


# %% ex-4-1 wrong: padding in slot 0
# says: A place of padding holds no token
def slot_mapping(table, B, computed, new, width):
    chunk = range(computed, computed + new)
    return [table[p // B] * B + p % B for p in chunk] + [0] * (width - new)


# %% ex-4-1 wrong: padding left out
# says: the padding is missing
def slot_mapping(table, B, computed, new, width):
    return [table[p // B] * B + p % B for p in range(computed, computed + new)]


# %% ex-4-1 wrong: padding in front
# says: not before them
def slot_mapping(table, B, computed, new, width):
    chunk = range(computed, computed + new)
    return [-1] * (width - new) + [table[p // B] * B + p % B for p in chunk]


# %% ex-4-1 wrong: the arguments are used up
# says: changed what it was given
def slot_mapping(table, B, computed, new, width):
    slots = [table[p // B] * B + p % B for p in range(computed, computed + new)]
    table.clear()
    return slots + [-1] * (width - new)


# %% ex-4-1 wrong: the check's own count is called
# says: hands the work to the check
def slot_mapping(table, B, computed, new, width):
    return case_4_1([-1], table, B, computed, new, width)[2]["slots"]


# %% ex-4-2 right: the free blocks are read from the tables, no book is kept
class MyManager(KVCacheManager):
    def allocate_slots(self, request, num_new_tokens):
        table = list(self.tables.get(request.request_id, ()))
        held = {block for each in self.tables.values() for block in each}
        free = [block for block in range(self.num_blocks) if block not in held]
        num_tokens = request.num_computed_tokens + num_new_tokens
        while len(table) * self.block_size < num_tokens:
            if not free:
                return None
            table.append(free.pop())
        return self.set_table(request, table)

    def free(self, request):
        self.drop_table(request)


# %% ex-4-2 right: a set of free blocks, tables that grow in place
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.unused = set(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens, **options):
        last = request.num_computed_tokens + num_new_tokens - 1
        held = self.tables.get(request.request_id)
        more = last // self.block_size + 1 - len(held or ())
        if more > len(self.unused):
            return None
        if held is None:
            held = self.set_table(request, [])
        held.extend(self.unused.pop() for _ in range(more))
        return held

    def free(self, request):
        self.unused |= set(self.drop_table(request))


# %% ex-4-2 right: keeps a block count of its own, gives blocks back tail first
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.stack = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = [*self.tables.get(request.request_id, [])]
        room = len(table) * self.block_size - request.num_computed_tokens
        more = cdiv(max(0, num_new_tokens - room), self.block_size)
        if more <= len(self.stack):
            cut = len(self.stack) - more
            table, self.stack = table + self.stack[cut:], self.stack[:cut]
            return self.set_table(request, table)

    def free(self, request):
        self.stack += reversed(self.drop_table(request))


# %% ex-4-2 delegates: the package's own paged manager
# says: hands the work to the package
class MyManager(PagedKVCacheManager):
    pass


# %% ex-4-2 wrong: a block at num_tokens % B == 0
# says: num_tokens % block_size == 0 is the wrong moment
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        more = int(request.num_tokens % self.block_size == 0)
        if not table:
            more = cdiv(num_new_tokens, self.block_size)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: the sampled token gets a slot now
# says: or n // block_size + 1 was taken
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens + 1, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: blocks for the longest answer
# says: are a reservation
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        more = cdiv(request.max_kv_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: all of the prompt at its first chunk
# says: num_tokens counts tokens that this step does not compute
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        more = cdiv(request.num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: new blocks for every step
# says: has room left, which comes first
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        more = cdiv(num_new_tokens, self.block_size)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: a block for each token
# says: as many blocks as tokens
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        more = num_new_tokens
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: rounded down
# says: partly full is a block all the same
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = num_tokens // self.block_size - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: blocks must be in order: the table is sorted
# says: must stay where they are
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        table = sorted(table + [self.ids.pop() for _ in range(more)])
        return self.set_table(request, table)

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: blocks must be neighbours
# says: they need not be neighbours
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        start = table[0] if table else min(self.ids, default=0)
        new = list(range(start + len(table), start + len(table) + more))
        if not set(new) <= set(self.ids):
            return None
        self.ids = [block for block in self.ids if block not in new]
        return self.set_table(request, table + new)

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: a refusal keeps what it has popped
# says: An earlier refusal kept some
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        new = []
        for _ in range(more):
            if not self.ids:
                return None
            new.append(self.ids.pop())
        return self.set_table(request, table + new)

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: a refusal leaves half a table
# says: A refusal must change nothing, but
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        table = self.set_table(request, list(table))
        for _ in range(more):
            if not self.ids:
                return None
            table.append(self.ids.pop())
        return table

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: freed blocks never come back
# says: Freed blocks have to be given out again
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.drop_table(request)


# %% ex-4-2 wrong: only the first block comes back
# says: Freed blocks have to be given out again
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)[:1]


# %% ex-4-2 wrong: the table is kept after free
# says: its table is still in self.tables
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.tables.get(request.request_id, [])


# %% ex-4-2 wrong: blocks are given back twice
# says: Was it taken, or given back, twice
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += 2 * list(self.drop_table(request))


# %% ex-4-2 wrong: the last free block is never given
# says: The last free block can be taken as well
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more >= len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: refused unless the longest answer fits
# says: what comes later may find room later
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if cdiv(request.max_kv_tokens, self.block_size) - len(table) > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: blocks counted from 1
# says: There is no block
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(1, num_blocks + 1))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: free of a request without a table
# says: free ended in KeyError
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.tables[request.request_id]
        self.drop_table(request)


# %% ex-4-2 wrong: the table dropped by hand
# says: drop_table forgets both
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.tables.pop(request.request_id, ())


# %% ex-4-2 wrong: a count of blocks of its own, kept over free
# says: it holds nothing now
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids, self.held = list(range(num_blocks)), Counter()

    def allocate_slots(self, request, num_new_tokens):
        name = request.request_id
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - self.held[name]
        if more > len(self.ids):
            return None
        self.held[name] += more
        new = [self.ids.pop() for _ in range(more)]
        return self.set_table(request, self.tables.get(name, []) + new)

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: set_table forgotten
# says: call set_table
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return table + [self.ids.pop() for _ in range(more)]

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: no blocks are ever taken out
# says: Was it taken, or given back, twice
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + self.ids[:more])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: a copy of its own goes back at each free
# says: Was it taken, or given back, twice
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids, self.own = list(range(num_blocks)), {}

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        table = table + [self.ids.pop() for _ in range(more)]
        self.own[request.request_id] = table
        return self.set_table(request, table)

    def free(self, request):
        self.drop_table(request)
        self.ids += self.own.get(request.request_id, [])


# %% ex-4-2 wrong: None where nothing new is needed
# says: needs no new block, and was refused
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more == 0 or more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: return forgotten
# says: has the table [7] now: is its `return` missing
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: only a `return None`
# says: None means refused: is a `return` missing
class MyManager(KVCacheManager):
    def allocate_slots(self, request, num_new_tokens):
        return None

    def free(self, request):
        self.drop_table(request)


# %% ex-4-2 wrong: only the new blocks are returned
# says: return all of that
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        new = [self.ids.pop() for _ in range(more)]
        self.set_table(request, table + new)
        return new

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: only the new blocks are noted
# says: new blocks come behind those
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: new blocks in front
# says: must stay where they are
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, [self.ids.pop() for _ in range(more)] + table)

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: new blocks must be neighbours of each other
# says: they need not be neighbours
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        for start in sorted(self.ids):
            new = list(range(start, start + more))
            if set(new) <= set(self.ids):
                self.ids = [block for block in self.ids if block not in new]
                return self.set_table(request, table + new)
        return self.set_table(request, table) if more == 0 else None

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: whether enough are free is not asked
# says: find that out before taking any
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-2 wrong: x // B + 1 blocks
# says: or n // block_size + 1 was taken
class MyManager(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ids = list(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = (num_tokens // self.block_size + 1) - len(table)
        if more > len(self.ids):
            return None
        return self.set_table(request, table + [self.ids.pop() for _ in range(more)])

    def free(self, request):
        self.ids += self.drop_table(request)


# %% ex-4-3 right: token by token
def held_after_generation(batch, B, layers, size):
    blocks = unused = 0
    for prompt, output in batch:
        room = 0
        for _ in range(prompt + output - 1):
            if room == 0:
                blocks, room = blocks + 1, B
            room -= 1
        unused += room
    return [blocks, unused, unused * layers * size]


# %% ex-4-3 right: the rest modulo the block size
def held_after_generation(batch, B, layers, size):
    unused = sum(-(p + o - 1) % B for p, o in batch)
    num_blocks = (sum(p + o - 1 for p, o in batch) + unused) // B
    return num_blocks, unused, float(unused * size * layers)


# %% ex-4-3 wrong: the last token holds a slot
# says: The last token sampled is never computed
def held_after_generation(batch, B, layers, size):
    written = [p + o for p, o in batch]
    blocks = sum(cdiv(n, B) for n in written)
    unused = blocks * B - sum(written)
    return blocks, unused, unused * layers * size


# %% ex-4-3 wrong: x // B + 1 blocks
# says: one block too many where n tokens fill
def held_after_generation(batch, B, layers, size):
    written = [p + o - 1 for p, o in batch]
    blocks = sum(n // B + 1 for n in written)
    unused = blocks * B - sum(written)
    return blocks, unused, unused * layers * size


# %% ex-4-3 wrong: the check's own count is called
# says: hands the work to the check
def held_after_generation(batch, B, layers, size):
    return list(case_4_3((0, 0, 0), batch, B, layers, size)[2].values())


# %% ex-4-3 wrong: a table per layer
# says: one table for all layers
def held_after_generation(batch, B, layers, size):
    written = [p + o - 1 for p, o in batch]
    blocks = layers * sum(cdiv(n, B) for n in written)
    unused = blocks * B - sum(written)
    return blocks, unused, unused * layers * size


# %% ex-4-3 wrong: a table per layer, in blocks alone
# says: one table for all layers
def held_after_generation(batch, B, layers, size):
    written = [p + o - 1 for p, o in batch]
    blocks = sum(cdiv(n, B) for n in written)
    unused = blocks * B - sum(written)
    return layers * blocks, unused, unused * layers * size


# %% ex-4-3 wrong: the prompt alone
# says: What was generated was computed as well
def held_after_generation(batch, B, layers, size):
    written = [p for p, o in batch]
    blocks = sum(cdiv(n, B) for n in written)
    unused = blocks * B - sum(written)
    return blocks, unused, unused * layers * size


# %% ex-4-3 wrong: rounded down
# says: partly full is held all the same
def held_after_generation(batch, B, layers, size):
    written = [p + o - 1 for p, o in batch]
    blocks = sum(n // B for n in written)
    unused = blocks * B - sum(written)
    return blocks, unused, unused * layers * size


# %% ex-4-3 wrong: blocks shared at their ends
# says: each has a last block of its own
def held_after_generation(batch, B, layers, size):
    written = [p + o - 1 for p, o in batch]
    blocks = cdiv(sum(written), B)
    unused = blocks * B - sum(written)
    return blocks, unused, unused * layers * size


# %% ex-4-3 wrong: paging removes all waste
# says: Paging does not remove all waste
def held_after_generation(batch, B, layers, size):
    written = [p + o - 1 for p, o in batch]
    blocks = sum(cdiv(n, B) for n in written)
    unused = 0
    return blocks, unused, unused * layers * size


# %% ex-4-3 wrong: half a block by rule of thumb
# says: here it was to be counted
def held_after_generation(batch, B, layers, size):
    written = [p + o - 1 for p, o in batch]
    blocks = sum(cdiv(n, B) for n in written)
    unused = len(batch) * B / 2
    return blocks, unused, unused * layers * size


# %% ex-4-3 wrong: a full block counted as empty
# says: exactly full leaves no slot unused
def held_after_generation(batch, B, layers, size):
    written = [p + o - 1 for p, o in batch]
    blocks = sum(cdiv(n, B) for n in written)
    unused = sum(B - n % B for n in written)
    return blocks, unused, unused * layers * size


# %% ex-4-3 wrong: the bytes of one layer
# says: in every layer, not in one
def held_after_generation(batch, B, layers, size):
    written = [p + o - 1 for p, o in batch]
    blocks = sum(cdiv(n, B) for n in written)
    unused = blocks * B - sum(written)
    return blocks, unused, unused * size


# %% ex-4-3 wrong: K and V counted twice
# says: nothing is to be doubled
def held_after_generation(batch, B, layers, size):
    written = [p + o - 1 for p, o in batch]
    blocks = sum(cdiv(n, B) for n in written)
    unused = blocks * B - sum(written)
    return blocks, unused, 2 * unused * layers * size


# %% ex-4-3 delegates: the package's manager, asked to count
# says: hands the work to the package
def held_after_generation(batch, B, layers, size):
    manager = PagedKVCacheManager(10_000, B)
    for i, (p, o) in enumerate(batch):
        manager.allocate_slots(Request(str(i), num_prompt_tokens=p + o), p + o - 1)
    blocks = 10_000 - manager.num_free_blocks
    unused = blocks * B - sum(p + o - 1 for p, o in batch)
    return blocks, unused, unused * layers * size


# %% ex-4-4 no delegate: the suspect rule stands in the notebook; the package has no such bug


# %% ex-4-4 right: two triples
def failing_cases():
    return (1, 4, 2), (2, 5, 3)


# %% ex-4-4 right: an array
def failing_cases():
    import numpy as np

    return np.array([[1, 4, 2], [2, 5, 3]])


# %% ex-4-4 right: lists, by the pattern of replays
def failing_cases():
    found = {}
    for B in range(1, 6):
        for prompt in range(1, 12):
            for chunk in range(1, 12):
                for _, computed, _, held, need in replay(suspect_rule, B, prompt, chunk):
                    if held < need:
                        found.setdefault(computed % B > 0, [B, prompt, chunk])
                        break
    return [found[False], found[True]]


# %% ex-4-4 wrong: a prompt in one chunk
# says: All of the prompt is computed in step 1
def failing_cases():
    return (1, 4, 4), (2, 5, 3)


# %% ex-4-4 wrong: one token a step
# says: One token a step needs one block
def failing_cases():
    return (1, 4, 2), (2, 5, 1)


# %% ex-4-4 wrong: the second chunk is one token
# says: There every token has its slot
def failing_cases():
    return (1, 3, 2), (2, 5, 3)


# %% ex-4-4 wrong: the second chunk just fits
# says: There every token has its slot
def failing_cases():
    return (1, 4, 2), (2, 4, 3)


# %% ex-4-4 wrong: right but larger, at a boundary
# says: Is there a smaller case
def failing_cases():
    return (2, 7, 4), (2, 5, 3)


# %% ex-4-4 wrong: right but larger, inside
# says: Is there a smaller case
def failing_cases():
    return (1, 4, 2), (4, 6, 3)


# %% ex-4-4 wrong: the two swapped
# says: but of the other kind
def failing_cases():
    return (2, 5, 3), (1, 4, 2)


# %% ex-4-4 wrong: one triple only
# says: must return (at_boundary, inside)
def failing_cases():
    return (1, 4, 2)


# %% ex-4-4 wrong: a block of no tokens
# says: three whole numbers from 1
def failing_cases():
    return (0, 1, 1), (2, 5, 3)


# %% ex-4-4 wrong: the check is asked for the smallest
# says: hands the work to the check
def failing_cases():
    return smallest("at_boundary"), smallest("inside")


# %% ex-4-4-b no delegate: the package has the rule only inside its allocate_slots


# %% ex-4-4-b right: what does not fit into the room left
def mended_rule(computed, new, num_tokens, held, B):
    room = held * B - computed
    return cdiv(max(0, new - room), B)


# %% ex-4-4-b right: a loop
def mended_rule(computed, new, num_tokens, held, B):
    more = 0
    while (held + more) * B < computed + new:
        more += 1
    return more


# %% ex-4-4-b right: the right moment, position by position
def mended_rule(computed, new, num_tokens, held, B):
    return sum(position % B == 0 for position in range(computed, computed + new))


# %% ex-4-4-b wrong: as it was
# says: is the rule as it was found
def mended_rule(computed, new, num_tokens, held, B):
    if held == 0:
        return cdiv(new, B)
    return int(computed % B == 0)


# %% ex-4-4-b wrong: num_tokens % B == 0
# says: num_tokens % block_size == 0 is the wrong moment
def mended_rule(computed, new, num_tokens, held, B):
    if held == 0:
        return cdiv(new, B)
    return int(num_tokens % B == 0)


# %% ex-4-4-b wrong: (num_tokens - 1) % B == 0
# says: not while a prompt comes in chunks
def mended_rule(computed, new, num_tokens, held, B):
    if held == 0:
        return cdiv(new, B)
    return int((num_tokens - 1) % B == 0)


# %% ex-4-4-b wrong: only the boundary is mended
# says: first fills that block
def mended_rule(computed, new, num_tokens, held, B):
    return cdiv(new, B) if computed % B == 0 else 0


# %% ex-4-4-b wrong: whole blocks of new tokens
# says: first fills that block
def mended_rule(computed, new, num_tokens, held, B):
    return cdiv(new, B) if computed % B == 0 else new // B


# %% ex-4-4-b wrong: one block for what crosses
# says: first fills that block
def mended_rule(computed, new, num_tokens, held, B):
    if computed % B == 0:
        return cdiv(new, B)
    return int(computed % B + new > B)


# %% ex-4-4-b wrong: x // B + 1
# says: or n // block_size + 1 was taken
def mended_rule(computed, new, num_tokens, held, B):
    return (computed + new) // B + 1 - held


# %% ex-4-4-b wrong: a float from numpy
# says: must return an int
def mended_rule(computed, new, num_tokens, held, B):
    import numpy as np

    return np.ceil((computed + new) / B) - held


# %% ex-4-4-b wrong: the check's own count is called
# says: hands the work to the check
def mended_rule(computed, new, num_tokens, held, B):
    return case_4_4(0, computed, new, num_tokens, held, B)[2]["number of new blocks"]


# %% ex-4-4-b wrong: % B == 1
# says: blocks of one token never come
def mended_rule(computed, new, num_tokens, held, B):
    if held == 0:
        return cdiv(new, B)
    return int(num_tokens % B == 1)


# %% ex-4-4-b wrong: one block at most
# says: can cross a boundary, or several
def mended_rule(computed, new, num_tokens, held, B):
    return int(computed % B == 0)


# %% ex-4-4-b wrong: one block at most, from the room
# says: can cross a boundary, or several
def mended_rule(computed, new, num_tokens, held, B):
    return int(computed + new > held * B)


# %% ex-4-4-b wrong: num_tokens for the tokens computed
# says: counts the whole prompt
def mended_rule(computed, new, num_tokens, held, B):
    return cdiv(num_tokens, B) - held


# %% ex-4-4-b wrong: the sampled token needs a slot now
# says: or n // block_size + 1 was taken
def mended_rule(computed, new, num_tokens, held, B):
    return cdiv(computed + new + 1, B) - held


# %% ex-4-4-b wrong: those held are taken again
# says: those held already
def mended_rule(computed, new, num_tokens, held, B):
    return cdiv(computed + new, B)


# %% ex-4-4-b wrong: the room left is forgotten
# says: new tokens go there first
def mended_rule(computed, new, num_tokens, held, B):
    return cdiv(new, B)


# %% ex-4-4-b wrong: rounded down
# says: partly full is a block all the same
def mended_rule(computed, new, num_tokens, held, B):
    return (computed + new) // B - held


# %% ex-4-5 right: a counter of all places
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 right: sorted lists and sets
def check_books(books):
    tables = books.tables.values()
    everywhere = [*set().union(*tables), *books.free, *books.cached_free]
    if sorted(everywhere) != list(range(books.num_blocks)):
        raise InvariantBroken(f"not every block in one place: {sorted(everywhere)}")
    times = [sum(b in table for table in tables) for b in range(books.num_blocks)]
    if times != books.ref_cnt:
        raise InvariantBroken(f"ref_cnt {books.ref_cnt} does not fit the tables {books.tables}")
    for name, table in books.tables.items():
        need = cdiv(books.num_computed_tokens[name], books.block_size)
        if len(table) != len(set(table)) or need > len(table):
            raise InvariantBroken(f"the table of {name} is {table}")


# %% ex-4-5 wrong: everything passes
# says: takes a block when num_tokens % block_size == 0
def check_books(books):
    return None


# %% ex-4-5 wrong: slots are not compared with tokens
# says: takes a block when num_tokens % block_size == 0
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: the sampled token needs a slot now
# says: the token just sampled needs no slot yet
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size <= books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: blocks must be neighbours
# says: no neighbours and not in order
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
        if list(table) != list(range(table[0], table[0] + len(table))):
            raise InvariantBroken(f"{name}: not neighbours")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: the free list must be in order
# says: a free list that is not in order
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    if books.free != sorted(books.free) and not any(len(t) > 1 for t in books.tables.values()):
        raise InvariantBroken("free is out of order")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: a block belongs to one request
# says: two tables that share a block
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] > 1:
            raise InvariantBroken(f"block {block} is held twice")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt")


# %% ex-4-5 wrong: freed means erased: cached blocks are a leak
# says: freed is not erased
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        if (named[block] > 0) + books.free.count(block) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: lost blocks are not looked for
# says: loses the tail of a table on free
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) > 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: counts that add up
# says: so that the counts add up
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    if len(named) + len(books.free) + len(books.cached_free) != books.num_blocks:
        raise InvariantBroken("the counts do not add up")
    for block in range(books.num_blocks):
        if books.ref_cnt[block] and block in (*books.free, *books.cached_free):
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: sets hide what is listed twice
# says: gives a block back twice
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = block in books.free, block in books.cached_free
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: free lists against ref_cnt, not against tables
# says: frees a shared block with its first holder
def check_books(books):
    free = Counter([*books.free, *books.cached_free])
    for name, table in books.tables.items():
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        named = any(block in table for table in books.tables.values())
        if free[block] > 1 or (not named and free[block] != 1):
            raise InvariantBroken(f"block {block}: not in one place")


# %% ex-4-5 wrong: the list of cached blocks is never read against the tables
# says: leaves it in `cached_free`
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        lost = not (free or cached or named[block])
        if free + (named[block] > 0) > 1 or free + cached > 1 or lost:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: ref_cnt is only compared with zero
# says: does not count a second holder
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if (named[block] > 0) != (books.ref_cnt[block] > 0):
            raise InvariantBroken(f"block {block}: ref_cnt")


# %% ex-4-5 wrong: ref_cnt too high is let pass
# says: does not count a holder down
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] > books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt")


# %% ex-4-5 wrong: ref_cnt of blocks in use alone
# says: forgets to set its ref_cnt to 0
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] and named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt")


# %% ex-4-5 wrong: a block twice in one table
# says: gives the same block to a request twice
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(0 <= block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: block ids are not looked at
# says: the pool does not have, 5
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: block ids below 0
# says: the pool does not have, -1
def check_books(books):
    named = Counter(block for table in books.tables.values() for block in table)
    for name, table in books.tables.items():
        if not all(block < books.num_blocks for block in table):
            raise InvariantBroken(f"{name}: no such block")
        if len(set(table)) < len(table):
            raise InvariantBroken(f"{name}: a block twice")
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block in range(books.num_blocks):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + (named[block] > 0) != 1:
            raise InvariantBroken(f"block {block}: not in one place")
        if named[block] != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: ref_cnt {books.ref_cnt[block]}")


# %% ex-4-5 wrong: block -1 is the last of a list
# says: Python takes for the last of a list
def check_books(books):
    names = [[] for _ in range(books.num_blocks)]
    for name, table in books.tables.items():
        for block in table:
            if block >= books.num_blocks or name in names[block]:
                raise InvariantBroken(f"{name}: no such block, or twice")
            names[block].append(name)
        if len(table) * books.block_size < books.num_computed_tokens[name]:
            raise InvariantBroken(f"{name}: too few slots")
    for block, holders in enumerate(names):
        free, cached = books.free.count(block), books.cached_free.count(block)
        if free + cached + bool(holders) != 1 or len(holders) != books.ref_cnt[block]:
            raise InvariantBroken(f"block {block}: {holders}, {free}, {cached}")


# %% ex-4-5 wrong: returns instead of raising
# says: must raise InvariantBroken, or return nothing
def check_books(books):
    return all(len(table) for table in books.tables.values())


# %% ex-4-5 delegates: the package's own check
# says: hands the work to the package
def check_books(books):
    from minikv.kv_cache.paged import BlockPool

    pool = BlockPool(books.num_blocks)
    pool.get_new_blocks(len(books.tables))
    pool.check({})
