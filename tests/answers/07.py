# ruff: noqa: B905, E402, F811, F821
# Kept answers to the exercises of chapter 07; `python -m minikv check --audit 07` runs them.


# %% ex-7-1 right: all that stands before, as a tuple
def block_keys(token_ids, block_size, cache_salt):
    count = len(token_ids) // block_size
    return [(cache_salt, tuple(token_ids[: (i + 1) * block_size])) for i in range(count)]


# %% ex-7-1 right: a chain of sha256
import hashlib


def block_keys(token_ids, block_size, cache_salt):
    keys, parent = [], repr(cache_salt).encode()
    for i in range(len(token_ids) // block_size):
        block = token_ids[i * block_size : (i + 1) * block_size]
        parent = hashlib.sha256(parent + repr(list(block)).encode()).digest()
        keys.append(parent)
    return keys


# %% ex-7-1 right: a running sha256, as hex, from a generator
import hashlib


def block_keys(tokens, B, salt):
    chain = hashlib.sha256(b"" if salt is None else salt.encode() + b"|")
    for end in range(B, len(tokens) + 1, B):
        chain.update(b"".join(n.to_bytes(4, "little") for n in tokens[end - B : end]))
        yield chain.hexdigest()


# %% ex-7-1 right: Python's own hash, and the salt in every key
def block_keys(token_ids, block_size, cache_salt):
    keys = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        own = tuple(token_ids[end - block_size : end])
        keys.append(hash((keys[-1] if keys else None, own, cache_salt)))
    return keys


# %% ex-7-1 right: an object with __call__, numpy bytes
import numpy as np


class Keys:
    def __call__(self, token_ids, block_size, cache_salt):
        data = np.asarray(token_ids, dtype=np.int64)
        ends = range(block_size, len(data) + 1, block_size)
        return [(cache_salt, data[:end].tobytes()) for end in ends]


block_keys = Keys()


# %% ex-7-1 wrong: a key of the block's own tokens (position-blind)
# says: after another beginning the same tokens have other keys and values
# from: all that stands before, as a tuple
# - token_ids[: (i + 1) * block_size]
# + token_ids[i * block_size : (i + 1) * block_size]


# %% ex-7-1 wrong: position-blind, without the salt
# says: after another beginning the same tokens have other keys and values
def block_keys(tokens, B, salt):
    return [tuple(tokens[i * B : i * B + B]) for i in range(len(tokens) // B)]


# %% ex-7-1 wrong: position-blind, a salt on the first block
# says: after another beginning the same tokens have other keys and values
def block_keys(tokens, B, salt):
    keys = [tuple(tokens[i * B : i * B + B]) for i in range(len(tokens) // B)]
    return [(salt, key) if i == 0 else (None, key) for i, key in enumerate(keys)]


# %% ex-7-1 wrong: own tokens and their position
# says: equal position are not enough either
def block_keys(tokens, B, salt):
    return [(salt, i, *tokens[i * B : i * B + B]) for i in range(len(tokens) // B)]


# %% ex-7-1 wrong: the parent's tokens, not the parent's key
# says: One block back is not far enough
def block_keys(tokens, B, salt):
    at = range(0, len(tokens) - B + 1, B)
    return [(salt, *tokens[max(0, i - B) : i], "|", *tokens[i : i + B]) for i in at]


# %% ex-7-1 wrong: no salt
# says: The salt is in no key
# from: all that stands before, as a tuple
# - (cache_salt, tuple(token_ids[: (i + 1) * block_size]))
# + tuple(token_ids[: (i + 1) * block_size])


# %% ex-7-1 wrong: a salt on some blocks only: the first
# says: The salt is in some of the keys only
def block_keys(tokens, B, salt):
    keys = [tuple(tokens[: i * B + B]) for i in range(len(tokens) // B)]
    return [(salt, *keys[0]), *keys[1:]] if keys and salt else keys


# %% ex-7-1 wrong: a salt on some blocks only: all but the first
# says: The salt is in some of the keys only
def block_keys(tokens, B, salt):
    keys = [tuple(tokens[: i * B + B]) for i in range(len(tokens) // B)]
    return [key if i == 0 else (salt, key) for i, key in enumerate(keys)]


# %% ex-7-1 wrong: a salt on some blocks only: the last
# says: The salt is in some of the keys only
def block_keys(tokens, B, salt):
    keys = [tuple(tokens[: i * B + B]) for i in range(len(tokens) // B)]
    return [*keys[:-1], *((salt, key) for key in keys[-1:])]


# %% ex-7-1 wrong: a chain that adds up
# says: The order counts, of tokens and of blocks
def block_keys(tokens, B, salt):
    keys, parent = [], (salt,)
    for i in range(len(tokens) // B):
        parent = (*parent, sum(tokens[i * B : i * B + B]))
        keys.append(parent)
    return keys


# %% ex-7-1 wrong: sets of tokens
# says: The order counts, of tokens and of blocks
def block_keys(tokens, B, salt):
    return [
        (salt, *(frozenset(tokens[j : j + B]) for j in range(0, i * B + B, B)))
        for i in range(len(tokens) // B)
    ]


# %% ex-7-1 wrong: an xor of the blocks' hashes
# says: The order counts, of tokens and of blocks
def block_keys(tokens, B, salt):
    keys, parent = [], hash(salt)
    for i in range(len(tokens) // B):
        parent ^= hash((B, *tokens[i * B : i * B + B]))
        keys.append(parent)
    return keys


# %% ex-7-1 wrong: digits written one after the other
# says: make the same text
def block_keys(tokens, B, salt):
    ends = range(B, len(tokens) + 1, B)
    return [f"{salt}/" + "".join(map(str, tokens[:end])) for end in ends]


# %% ex-7-1 wrong: two bytes for a token
# says: Token ids go beyond 65,535
def block_keys(tokens, B, salt):
    import numpy as np

    data = np.asarray(tokens).astype(np.uint16)
    return [(salt, data[:end].tobytes()) for end in range(B, len(data) + 1, B)]


# %% ex-7-1 wrong: one byte for a token
# says: ended in ValueError
def block_keys(tokens, B, salt):
    return [(salt, bytes(tokens[:end])) for end in range(B, len(tokens) + 1, B)]


# %% ex-7-1 wrong: the key of what stands before
# says: has to contain the block's own tokens
def block_keys(tokens, B, salt):
    return [(salt, *tokens[: i * B]) for i in range(len(tokens) // B)]


# %% ex-7-1 wrong: the whole prompt in every key
# says: must not depend on what comes after its block
def block_keys(tokens, B, salt):
    return [(salt, i, *tokens) for i in range(len(tokens) // B)]


# %% ex-7-1 wrong: a new object each time
# says: must get the same keys
def block_keys(tokens, B, salt):
    return [object() for _ in range(len(tokens) // B)]


# %% ex-7-1 wrong: the tail gets a key, too
# says: a tail that is not full will be written to
def block_keys(tokens, B, salt):
    return [(salt, *tokens[: i + B]) for i in range(0, len(tokens), B)]


# %% ex-7-1 wrong: ends a block too early
# says: Does the loop end a block too early
def block_keys(tokens, B, salt):
    return [(salt, *tokens[:end]) for end in range(B, len(tokens), B)]


# %% ex-7-1 wrong: one key for all
# says: One key for each full block was asked for
def block_keys(tokens, B, salt):
    return [(salt, *tokens)] * 3


# %% ex-7-1 wrong: lists as keys
# says: A dictionary does not take this as a key
def block_keys(tokens, B, salt):
    return [[salt, *tokens[:end]] for end in range(B, len(tokens) + 1, B)]


# %% ex-7-1 wrong: not a list
# says: must return a list of keys, not
def block_keys(tokens, B, salt):
    return len(tokens) // B


# %% ex-7-1 wrong: a global chain that never begins anew
# says: must get the same keys
chain = [0]


def block_keys(tokens, B, salt):
    keys = []
    for i in range(len(tokens) // B):
        chain[0] = hash((chain[0], salt, *tokens[i * B : i * B + B]))
        keys.append(chain[0])
    return keys


# %% ex-7-1 wrong: the check's own keys
# says: hands the work to the check
def block_keys(tokens, B, salt):
    return right_keys(tokens, B, salt)


# %% ex-7-1 delegates: the package's manager
# says: hands the work to the package's own manager
def block_keys(tokens, B, salt):
    manager = PrefixCachingKVCacheManager(8, B)
    request = Request("r", tokens, cache_salt=salt)
    return [key for key, _ in manager.block_keys(request, len(tokens) // B)]


# %% ex-7-1-b right: takewhile
from itertools import takewhile


def find_longest_hit(keys, cached):
    return [cached[key] for key in takewhile(cached.__contains__, keys)]


# %% ex-7-1-b right: get and None
def find_longest_hit(keys, cached):
    for key in keys:
        block = cached.get(key)
        if block is None:
            return
        yield block


# %% ex-7-1-b right: with an index
def find_longest_hit(keys, cached):
    i = 0
    while i < len(keys) and keys[i] in cached:
        i += 1
    return tuple(cached[key] for key in keys[:i])


# %% ex-7-1-b wrong: every key that is there
# says: A hit ends at the first block that is not there
def find_longest_hit(keys, cached):
    return [cached[key] for key in keys if key in cached]


# %% ex-7-1-b wrong: the last key is there, so all are
# says: A hit ends at the first block that is not there
def find_longest_hit(keys, cached):
    if keys and keys[-1] in cached:
        return [cached[key] for key in keys if key in cached]
    found = []
    for key in keys:
        if key not in cached:
            break
        found.append(cached[key])
    return found


# %% ex-7-1-b wrong: block 0 taken for nothing
# says: Block 0 is a block
def find_longest_hit(keys, cached):
    found = []
    for key in keys:
        if not cached.get(key):
            break
        found.append(cached[key])
    return found


# %% ex-7-1-b wrong: all or nothing
# says: not all of it has to be there
def find_longest_hit(keys, cached):
    return [cached[k] for k in keys] if all(k in cached for k in keys) else []


# %% ex-7-1-b wrong: a block is left over for the last token
# says: How much of it is usable is exercise 7.4
def find_longest_hit(keys, cached):
    found = []
    for key in keys[:-1]:
        if key not in cached:
            break
        found.append(cached[key])
    return found


# %% ex-7-1-b wrong: the missing one is in it
# says: it is not part of it
def find_longest_hit(keys, cached):
    found = []
    for key in keys:
        found.append(cached.get(key, -1))
        if key not in cached:
            break
    return found


# %% ex-7-1-b wrong: a missing key is looked up
# says: ended in KeyError
def find_longest_hit(keys, cached):
    return [cached[key] for key in keys]


# %% ex-7-1-b wrong: keys instead of blocks
# says: those are keys
def find_longest_hit(keys, cached):
    from itertools import takewhile

    return list(takewhile(lambda key: key in cached, keys))


# %% ex-7-1-b wrong: how many
# says: must return a list of block ids
def find_longest_hit(keys, cached):
    n = 0
    for key in keys:
        if key not in cached:
            break
        n += 1
    return n


# %% ex-7-1-b wrong: the last block only
# says: the hit is all of the beginning
def find_longest_hit(keys, cached):
    found = []
    for key in keys:
        if key not in cached:
            break
        found = [cached[key]]
    return found


# %% ex-7-1-b wrong: takes what it finds out of the map
# says: changed what it was given
def find_longest_hit(keys, cached):
    found = []
    for key in keys:
        if key not in cached:
            break
        found.append(cached.pop(key))
    return found


# %% ex-7-1-b wrong: blocks in the order of their ids
# says: Block ids stand in the order of the tokens
def find_longest_hit(keys, cached):
    found = []
    for key in keys:
        if key not in cached:
            break
        found.append(cached[key])
    return sorted(found)


# %% ex-7-1-b no delegate: the package looks up its own blocks, never a map of keys


# %% ex-7-2 right: names of one's own, tables that are changed in place
class MyForks(Counted):
    def fork(self, parent, child):
        B, n = self.block_size, child.num_computed_tokens
        mine = [self.tables[parent.request_id][i // B] for i in range(0, n, B)]
        self.set_table(child, mine)
        for block in mine:
            self.hold(block)
        return len(mine) > 0 or n == 0

    def allocate_slots(self, request, num_new_tokens):
        B, start = self.block_size, request.num_computed_tokens
        table = self.tables.get(request.request_id, [])
        last = (start + num_new_tokens - 1) // B
        tail = table[start // B] if start // B < len(table) else None
        others = tail is not None and self.ref_cnt[tail] > 1
        if max(0, last + 1 - len(table)) + others > len(self.free_block_ids):
            return None
        if request.request_id not in self.tables:
            self.set_table(request, table)
        while len(table) <= last:
            table.append(self.take())
        if others:
            table[start // B] = self.take()
            self.let_go(tail)
            self.pending.append(BlockCopy(tail, table[start // B], 1))
        return table


# %% ex-7-2 right: an assembly of small methods
class MyForks(Counted):
    def blocks_for(self, tokens):
        return -(-tokens // self.block_size)

    def fork(self, parent, child):
        for block in self.set_table(
            child,
            self.tables[parent.request_id][: self.blocks_for(child.num_computed_tokens)],
        ):
            self.hold(block)
        return True

    def copied(self, block):
        new = self.take()
        self.pending += [BlockCopy(block, new, 1)]
        self.let_go(block)
        return new

    def allocate_slots(self, request, num_new_tokens, **more):
        old = list(self.tables.get(request.request_id, ()))
        place = request.num_computed_tokens // self.block_size
        before, tail, after = old[:place], old[place : place + 1], old[place + 1 :]
        shared = [block for block in tail if self.ref_cnt[block] > 1]
        need = self.blocks_for(request.num_computed_tokens + num_new_tokens) - len(old)
        if len(shared) + max(need, 0) <= len(self.free_block_ids):
            tail = [self.copied(block) for block in shared] or tail
            return self.set_table(
                request, before + tail + after + [self.take() for _ in range(need)]
            )


# %% ex-7-2 right: tables that are tuples
class MyForks(Counted):
    def fork(self, parent, child):
        num_blocks = cdiv(child.num_computed_tokens, self.block_size)
        table = tuple(self.tables[parent.request_id])[:num_blocks]
        for block_id in table:
            self.ref_cnt[block_id] += 1
        self.set_table(child, table)
        return True

    def allocate_slots(self, request, num_new_tokens):
        B, free = self.block_size, len(self.free_block_ids)
        table = tuple(self.tables.get(request.request_id, ()))
        place, offset = divmod(request.num_computed_tokens, B)
        shared = table[place : place + 1]
        if shared and self.ref_cnt[shared[0]] == 1:
            shared = ()
        num_slots = place * B + offset + num_new_tokens
        need = max(len(table), -(-num_slots // B)) - len(table)
        if need + len(shared) > free:
            return None
        for block_id in shared:
            dst = self.take()
            self.pending.append(BlockCopy(src=block_id, dst=dst, num_blocks=1))
            table = (*table[:place], dst, *table[place + 1 :])
            self.let_go(block_id)
        return self.set_table(request, table + tuple(self.take() for _ in range(need)))


# %% ex-7-2 wrong: copies are noted, and thrown away
# says: A reads [None, None, 'A2']
# -     def fork(self, parent, child):
# +     def copies(self):
# +         self.pending = []
# +         return []
# +
# +     def fork(self, parent, child):


# %% ex-7-2 wrong: everything is copied at the fork
# says: Nothing is copied at a fork
class MyForks(Counted):
    def fork(self, parent, child):
        num_blocks = cdiv(child.num_computed_tokens, self.block_size)
        if num_blocks > len(self.free_block_ids):
            return False
        table = []
        for block in self.tables[parent.request_id][:num_blocks]:
            table.append(self.take())
            self.pending.append(BlockCopy(block, table[-1], 1))
        self.set_table(child, table)
        return True

    def allocate_slots(self, request, num_new_tokens):
        table = list(self.tables.get(request.request_id, ()))
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = max(0, cdiv(num_tokens, self.block_size) - len(table))
        if more > len(self.free_block_ids):
            return None
        return self.set_table(request, table + [self.take() for _ in range(more)])


# %% ex-7-2 wrong: the tail is copied at the fork
# says: Nothing is copied at a fork
# -         for block_id in table:
# +         if child.num_computed_tokens % self.block_size:
# +             own = self.take()
# +             self.pending.append(BlockCopy(table[-1], own, 1))
# +             table[-1] = own
# +         for block_id in table:


# %% ex-7-2 wrong: a shared block is written in place
# says: A block that others hold is not written to
# -  and self.ref_cnt[table[place]] > 1
# +  and False


# %% ex-7-2 wrong: a copy for the child only
# says: A block that others hold is not written to
# -         table = list(self.tables.get(request.request_id, ()))
# +         table = list(self.tables.get(request.request_id, ()))
# +         first = not table or request.request_id == "A"
# -  and self.ref_cnt[table[place]] > 1
# +  and self.ref_cnt[table[place]] > 1 and not first


# %% ex-7-2 wrong: all shared blocks are copied at the first write
# says: Only the block that is written to is copied
class MyForks(Counted):
    def fork(self, parent, child):
        num_blocks = cdiv(child.num_computed_tokens, self.block_size)
        table = list(self.tables[parent.request_id][:num_blocks])
        for block_id in table:
            self.hold(block_id)
        self.set_table(child, table)
        return True

    def allocate_slots(self, request, num_new_tokens):
        table = list(self.tables.get(request.request_id, ()))
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = max(0, cdiv(num_tokens, self.block_size) - len(table))
        place = request.num_computed_tokens // self.block_size
        shared = []
        if place < len(table):
            shared = [i for i, b in enumerate(table) if self.ref_cnt[b] > 1]
        if more + len(shared) > len(self.free_block_ids):
            return None
        for i in shared:
            own = self.take()
            self.pending.append(BlockCopy(table[i], own, 1))
            self.let_go(table[i])
            table[i] = own
        return self.set_table(request, table + [self.take() for _ in range(more)])


# %% ex-7-2 wrong: the last holder copies as well
# says: its last holder writes in place
# -     def fork(self, parent, child):
# +     def __init__(self, num_blocks, block_size):
# +         super().__init__(num_blocks, block_size)
# +         self.forked = set()
# +
# +     def fork(self, parent, child):
# -         self.set_table(child, table)
# +         self.forked.add(table[-1])
# +         self.set_table(child, table)
# -  and self.ref_cnt[table[place]] > 1
# +  and table[place] in self.forked


# %% ex-7-2 wrong: a full last block is copied as well
# says: The next token begins a block of its own
# -         place = request.num_computed_tokens // self.block_size
# +         place = max(0, request.num_computed_tokens - 1) // self.block_size


# %% ex-7-2 wrong: a new block without a copy
# says: without a copy the tokens that lay in the old one are lost
# -             self.pending.append(BlockCopy(table[place], own, 1))
# +


# %% ex-7-2 wrong: a copy without a new block in the table
# says: The table still names block
# -             self.pending.append(BlockCopy(table[place], own, 1))
# -             self.let_go(table[place])
# -             table[place] = own
# +             self.pending.append(BlockCopy(table[place], own, 1))
# +             self.let_go(table[place])


# %% ex-7-2 wrong: src and dst swapped
# says: The copy goes the wrong way
# - BlockCopy(table[place], own, 1)
# + BlockCopy(own, table[place], 1)


# %% ex-7-2 wrong: two blocks are copied
# says: One block is to be copied
# - BlockCopy(table[place], own, 1)
# + BlockCopy(table[place], own, 2)


# %% ex-7-2 wrong: the old block is not let go
# says: let_go of the old one
# -             self.let_go(table[place])
# +


# %% ex-7-2 wrong: one list for both
# says: Both tables are one and the same list
class MyForks(Counted):
    def fork(self, parent, child):
        table = self.tables[parent.request_id]
        for block_id in table:
            self.hold(block_id)
        self.set_table(child, table)
        return True

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = max(0, cdiv(num_tokens, self.block_size) - len(table))
        if more > len(self.free_block_ids):
            return None
        table += [self.take() for _ in range(more)]
        return self.set_table(request, table)


# %% ex-7-2 wrong: all blocks of the parent
# says: those of the parent's later tokens are not its
# - list(self.tables[parent.request_id][:num_blocks])
# + list(self.tables[parent.request_id])


# %% ex-7-2 wrong: full blocks only
# says: The tail is shared as well
# - num_blocks = cdiv(child.num_computed_tokens, self.block_size)
# + num_blocks = child.num_computed_tokens // self.block_size


# %% ex-7-2 wrong: nobody counts the child
# says: Each block of a fork has one holder more
# -             self.hold(block_id)
# +             pass


# %% ex-7-2 wrong: the copy's block is not counted
# says: The copy needs a free block, too
# - more + shared > len(self.free_block_ids)
# + more > len(self.free_block_ids)


# %% ex-7-2 wrong: a block for a copy is always kept back
# says: Wrongly refused
# - more + shared > len(self.free_block_ids)
# + more + 1 > len(self.free_block_ids)


# %% ex-7-2 wrong: copies first, then finds out that no room is left
# says: A refusal must change nothing
# -         if more + shared > len(self.free_block_ids):
# -             return None
# -         if shared:
# +         if shared and self.free_block_ids:
# -             table[place] = own
# +             table[place] = own
# +         if more > len(self.free_block_ids) or (shared and table[place] != own):
# +             return None


# %% ex-7-2 wrong: an empty list for "not now"
# says: Say "not now" with None
# -             return None
# +             return []


# %% ex-7-2 wrong: fork returns nothing
# says: fork returned None
# -         return True
# +


# %% ex-7-2 wrong: a fork without a table
# says: has no table after the fork
# -         self.set_table(child, table)
# +


# %% ex-7-2 delegates: the package's paged manager
# says: hands the work to the package's own manager
class MyForks(Counted):
    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.other = PagedKVCacheManager(num_blocks, block_size)

    def fork(self, parent, child):
        return self.other.fork(parent, child)

    def allocate_slots(self, request, num_new_tokens):
        return self.set_table(request, self.other.allocate_slots(request, num_new_tokens))


# %% ex-7-3 right: lists found by name
class MyPool:
    def __init__(self, num_blocks):
        self.ref_cnt = [0] * num_blocks
        self.key_of = {}
        self.cached = {}
        self.free = deque(range(num_blocks))
        self.cached_free = deque()

    def publish(self, block_id, key):
        self.key_of[block_id], self.cached[key] = key, block_id

    def let_go(self, block_id):
        if not self.ref_cnt[block_id]:
            raise ValueError(block_id)
        self.ref_cnt[block_id] -= 1
        if not self.ref_cnt[block_id]:
            if self.key_of.get(block_id) is None:
                self.free.append(block_id)
            else:
                self.cached_free.append(block_id)

    def hold(self, block_id):
        for waiting in (self.free, self.cached_free):
            if block_id in waiting:
                waiting.remove(block_id)
        self.ref_cnt[block_id] += 1

    def take(self):
        for waiting in (self.free, self.cached_free):
            if waiting:
                block_id = waiting.popleft()
                key = self.key_of.pop(block_id, None)
                self.cached.pop(key, None)
                self.ref_cnt[block_id] += 1
                return block_id


# %% ex-7-3 right: plain lists, take by hold
class MyPool:
    def __init__(self, num_blocks):
        self.ref_cnt = [0] * num_blocks
        self.key_of, self.cached = {}, {}
        self.free, self.cached_free = list(range(num_blocks)), []

    def publish(self, block_id, key):
        self.key_of[block_id], self.cached[key] = key, block_id

    def _waiting(self, block_id):
        return self.cached_free if block_id in self.key_of else self.free

    def let_go(self, block_id):
        if self.ref_cnt[block_id] < 1:
            raise ValueError(f"block {block_id} is held by nobody")
        self.ref_cnt[block_id] -= 1
        if self.ref_cnt[block_id] < 1:
            self._waiting(block_id).append(block_id)

    def hold(self, block_id):
        if self.ref_cnt[block_id] < 1:
            self._waiting(block_id).remove(block_id)
        self.ref_cnt[block_id] += 1

    def take(self):
        waiting = self.free + self.cached_free
        if not waiting:
            return None
        self.hold(waiting[0])
        if waiting[0] in self.key_of:
            del self.cached[self.key_of.pop(waiting[0])]
        return waiting[0]


# %% ex-7-3 wrong: reference count 0 means gone
# says: ref_cnt 0 does not mean gone
# -         if self.ref_cnt[block_id] == 0:
# -             waits = self.cached_free if block_id in self.key_of else self.free
# -             waits.append(block_id)
# +         if self.ref_cnt[block_id] == 0:
# +             self.cached.pop(self.key_of.pop(block_id, None), None)
# +             self.free.append(block_id)


# %% ex-7-3 wrong: forgets how to find it when the last holder leaves
# says: ref_cnt 0 does not mean gone
# -             waits.append(block_id)
# +             waits.append(block_id)
# +             self.cached.pop(self.key_of.get(block_id), None)


# %% ex-7-3 wrong: all freed blocks in one list
# says: A block with a key waits in cached_free
# -             waits = self.cached_free if block_id in self.key_of else self.free
# -             waits.append(block_id)
# +             self.free.append(block_id)


# %% ex-7-3 wrong: freed with the first holder
# says: waits nowhere before the last of them has left
# -         self.ref_cnt[block_id] -= 1
# -         if self.ref_cnt[block_id] == 0:
# -             waits = self.cached_free if block_id in self.key_of else self.free
# -             waits.append(block_id)
# +         self.ref_cnt[block_id] -= 1
# +         waits = self.cached_free if block_id in self.key_of else self.free
# +         if block_id not in waits:
# +             waits.append(block_id)


# %% ex-7-3 wrong: found again, it waits on
# says: A block that is held waits in no list
# -             waits.remove(block_id)
# +             pass


# %% ex-7-3 wrong: the old key still finds a block that was taken
# says: its old key still finds it
# -         if block_id in self.key_of:
# -             del self.cached[self.key_of.pop(block_id)]
# +


# %% ex-7-3 wrong: the key is undone on one side only
# says: key_of and cached say the same
# - del self.cached[self.key_of.pop(block_id)]
# + self.key_of.pop(block_id)


# %% ex-7-3 wrong: cached blocks are taken first
# says: Blocks without a key are taken before those with one
# - (self.free or self.cached_free).popleft()
# + (self.cached_free or self.free).popleft()


# %% ex-7-3 wrong: the newest goes first
# says: what was let go longest ago goes first
# - (self.free or self.cached_free).popleft()
# + (self.free or self.cached_free).pop()


# %% ex-7-3 wrong: cached blocks are put in front
# says: what was let go longest ago goes first
# -             waits.append(block_id)
# +             waits.appendleft(block_id)


# %% ex-7-3 wrong: cached blocks are never taken
# says: but a block is left
# -         if not self.free and not self.cached_free:
# +         if not self.free:


# %% ex-7-3 wrong: no block is left
# says: No block is left
# -         if not self.free and not self.cached_free:
# -             return None
# +


# %% ex-7-3 wrong: nobody counts who holds it
# says: ref_cnt is wrong: it counts the holders
# -         self.ref_cnt[block_id] += 1
# +         self.ref_cnt[block_id] = 1


# %% ex-7-3 wrong: let go twice
# says: Nobody holds block
# -         if self.ref_cnt[block_id] == 0:
# -             raise ValueError(f"nobody holds block {block_id}")
# +


# %% ex-7-3 wrong: counts down, then complains
# says: A refused let_go must change nothing
# -         if self.ref_cnt[block_id] == 0:
# -             raise ValueError(f"nobody holds block {block_id}")
# -         self.ref_cnt[block_id] -= 1
# +         self.ref_cnt[block_id] -= 1
# +         if self.ref_cnt[block_id] < 0:
# +             raise ValueError(f"nobody holds block {block_id}")


# %% ex-7-3 wrong: a block that nobody holds is lost
# says: in none of them it is lost
# -             waits.append(block_id)
# +             pass


# %% ex-7-3 wrong: publish was emptied
# says: publish was given
# -         self.key_of[block_id], self.cached[key] = key, block_id
# +         pass


# %% ex-7-3 delegates: the package's pool
# says: hands the work to the package's own manager
# -         if not self.free and not self.cached_free:
# +         PagedKVCacheManager(2, 2).block_pool.get_new_blocks(1)
# +         if not self.free and not self.cached_free:


# %% ex-7-3-b right: places first, then maps from both sides
def check_pool(pool, tables):
    def broken(text):
        raise InvariantBroken(text)

    num = len(pool.ref_cnt)
    place = [[] for _ in range(num)]
    held = [0] * num
    for table in tables.values():
        for block in table:
            held[block] += 1
    for block in pool.free:
        place[block].append("free")
    for block in pool.cached_free:
        place[block].append("cached_free")
    for block in range(num):
        if held[block] != pool.ref_cnt[block]:
            broken(f"{block} is held {held[block]} times, counted {pool.ref_cnt[block]}")
        if held[block]:
            want = []
        elif block in pool.key_of:
            want = ["cached_free"]
        else:
            want = ["free"]
        if place[block] != want:
            broken(f"{block} waits in {place[block]}, should be {want}")
    for block, key in pool.key_of.items():
        if key not in pool.cached or pool.cached[key] != block:
            broken(f"{key} does not find {block}")
    for key, block in pool.cached.items():
        if block not in pool.key_of or pool.key_of[block] != key:
            broken(f"{block} is found by {key}, which is not its key")


# %% ex-7-3-b right: as sorted lists
def check_pool(pool, tables):
    counts = Counter(block for table in tables.values() for block in table)
    ids = range(len(pool.ref_cnt))
    idle = [i for i in ids if not counts[i]]
    rules = {
        "ref_cnt": [counts[i] for i in ids] == list(pool.ref_cnt),
        "free": sorted(pool.free) == [i for i in idle if i not in pool.key_of],
        "cached_free": sorted(pool.cached_free) == [i for i in idle if i in pool.key_of],
        "maps": sorted((i, str(k)) for i, k in pool.key_of.items())
        == sorted((i, str(k)) for k, i in pool.cached.items()),
    }
    for name, holds in rules.items():
        if not holds:
            raise InvariantBroken(f"{name} is wrong")


# %% ex-7-3-b wrong: finds nothing
# says: does not count a second holder
def check_pool(pool, tables):
    pass


# %% ex-7-3-b wrong: complains always
# says: (an empty pool)
def check_pool(pool, tables):
    raise InvariantBroken("something is wrong")


# %% ex-7-3-b wrong: a key without holders is reported (reference count 0 means gone)
# says: ref_cnt 0 is not gone
# -     turned =
# +     if any(pool.ref_cnt[block_id] == 0 for block_id in pool.key_of):
# +         raise InvariantBroken("a key of a block that nobody holds")
# +     turned =


# %% ex-7-3-b wrong: shared blocks are reported
# says: two tables that share a block
# -         if len(names) != count:
# +         if len(names) != count or count > 1:


# %% ex-7-3-b wrong: a block in use must have no key
# says: a block in use that has a key
# -         if len(names) != count:
# +         if len(names) != count or (count and block_id in pool.key_of):


# %% ex-7-3-b wrong: the sum of the counts
# says: so that the sum is right
# -         if len(names) != count:
# +         if sum(map(len, tables.values())) != sum(pool.ref_cnt):


# %% ex-7-3-b wrong: only counts that are too low
# says: ref_cnt is too high
# - len(names) != count
# + len(names) > count


# %% ex-7-3-b wrong: how often it waits is not asked
# says: lists a block in free twice
# -         waits = pool.free.count(block_id), pool.cached_free.count(block_id)
# +         waits = int(block_id in pool.free), int(block_id in pool.cached_free)


# %% ex-7-3-b wrong: lost blocks are not looked for
# says: is in no table and waits in no list
# -         if waits != ((0, 0) if names else free):
# +         if any(waits) and waits != ((0, 0) if names else free):


# %% ex-7-3-b wrong: either list will do
# says: puts a block with a key among those without
# -         if waits != ((0, 0) if names else free):
# +         if sum(waits) != (not names):


# %% ex-7-3-b wrong: a block in use may wait
# says: lists a block in use as free
# -         if waits != ((0, 0) if names else free):
# +         if not names and waits != free:


# %% ex-7-3-b wrong: the maps are not compared
# says: forgets the key on one side
# -     if pool.cached != turned or len(turned) != len(pool.key_of):
# +     if False:


# %% ex-7-3-b wrong: the map of keys is looked at from one side
# says: forgets the key on the other side
# -     if pool.cached != turned or len(turned) != len(pool.key_of):
# +     if any(pool.cached.get(key) != block for key, block in turned.items()):


# %% ex-7-3-b wrong: as many keys on one side as on the other
# says: maps a key to another block
# -     if pool.cached != turned or len(turned) != len(pool.key_of):
# +     if len(pool.cached) != len(pool.key_of):


# %% ex-7-3-b wrong: turned round, two equal keys are one
# says: gives two blocks the same key
# -     if pool.cached != turned or len(turned) != len(pool.key_of):
# +     named = {key: pool.key_of.get(i) == key for key, i in pool.cached.items()}
# +     if named != dict.fromkeys(turned, True):


# %% ex-7-3-b wrong: returns False
# says: must raise InvariantBroken, or return nothing
def check_pool(pool, tables):
    counts = Counter(block for table in tables.values() for block in table)
    return all(counts[i] == n for i, n in enumerate(pool.ref_cnt))


# %% ex-7-3-b wrong: an assert
# says: it has to raise InvariantBroken
def check_pool(pool, tables):
    counts = Counter(block for table in tables.values() for block in table)
    for i, n in enumerate(pool.ref_cnt):
        assert counts[i] == n, f"block {i}"


# %% ex-7-3-b wrong: no message
# says: InvariantBroken needs a message
def check_pool(pool, tables):
    counts = Counter(block for table in tables.values() for block in table)
    for i, n in enumerate(pool.ref_cnt):
        if counts[i] != n:
            raise InvariantBroken


# %% ex-7-3-b delegates: the package's check
# says: hands the work to the package's own manager
def check_pool(pool, tables):
    manager = PagedKVCacheManager(len(pool.ref_cnt), 1)
    manager.tables.update(tables)
    manager.check()


# %% ex-7-4 right: min of tokens, rounded down
def admit(num_tokens, ref_cnts, block_size):
    cached = min(len(ref_cnts) * block_size, num_tokens - 1)
    cached -= cached % block_size
    used = ref_cnts[: cached // block_size]
    held_already = sum(count > 0 for count in used)
    return cached, num_tokens - cached, -(-num_tokens // block_size) - held_already


# %% ex-7-4 right: one block off if the whole prompt was found
def admit(num_tokens, ref_cnts, block_size):
    used = list(ref_cnts)
    if len(used) * block_size == num_tokens:
        used.pop()
    new = num_tokens - len(used) * block_size
    blocks = (new + block_size - 1) // block_size + sum(not count for count in used)
    return [len(used) * block_size, new, blocks]


# %% ex-7-4 wrong: a whole-prompt hit with nothing left to run
# says: Nothing is left to run
# - min(len(ref_cnts), (num_tokens - 1) // block_size)
# + len(ref_cnts)


# %% ex-7-4 wrong: a token less, in the middle of a block
# says: a hit ends where a block ends
def admit(n, ref_cnts, B):
    cached = min(len(ref_cnts) * B, n - 1)
    return cached, n - cached, cdiv(n, B) - cached // B + ref_cnts[: cached // B].count(0)


# %% ex-7-4 wrong: a block less, always
# says: A block's length is not always lost
# - min(len(ref_cnts), (num_tokens - 1) // block_size)
# + max(0, len(ref_cnts) - 1)


# %% ex-7-4 wrong: as if everything had been found
# says: Only what was found can be used
# - min(len(ref_cnts), (num_tokens - 1) // block_size)
# + (num_tokens - 1) // block_size


# %% ex-7-4 wrong: a whole hit is given up
# says: is cut by one block, not given up
# -     num_cached_tokens =
# +     if len(ref_cnts) * block_size == num_tokens:
# +         num_usable = 0
# +     num_cached_tokens =


# %% ex-7-4 wrong: blocks that nobody holds are not used (reference count 0 means gone)
# says: What nobody holds can be used as well
# - min(len(ref_cnts), (num_tokens - 1) // block_size)
# + min(len(ref_cnts) - ref_cnts.count(0), (num_tokens - 1) // block_size)


# %% ex-7-4 wrong: one token to run, cached ones in whole blocks
# says: not only the last one
# - num_tokens - num_cached_tokens, num_blocks_taken
# + 1, num_blocks_taken


# %% ex-7-4 wrong: all tokens run
# says: that is what a hit is for
# - num_tokens - num_cached_tokens, num_blocks_taken
# + num_tokens, num_blocks_taken


# %% ex-7-4 wrong: cached and free blocks cost nothing
# says: one block less is free
# -     num_blocks_taken += ref_cnts[:num_usable].count(0)
# +


# %% ex-7-4 wrong: found blocks are taken anew
# says: Found blocks are not taken anew
# -     num_blocks_taken += ref_cnts[:num_usable].count(0)
# +     num_blocks_taken = cdiv(num_tokens, block_size)


# %% ex-7-4 wrong: shared blocks are paid for as well
# says: A block that others hold already costs nothing more
# - ref_cnts[:num_usable].count(0)
# + num_usable - ref_cnts[:num_usable].count(0)


# %% ex-7-4 wrong: the block that is cut off is paid for
# says: a new one is taken in its place
# - ref_cnts[:num_usable].count(0)
# + ref_cnts.count(0)


# %% ex-7-4 wrong: the cut block is not replaced
# says: has to be replaced
# - cdiv(num_tokens, block_size) - num_usable
# + cdiv(num_tokens, block_size) - len(ref_cnts)


# %% ex-7-4 wrong: full blocks only
# says: A last block that is partly full is a block all the same
# - cdiv(num_tokens, block_size) - num_usable
# + num_tokens // block_size - num_usable


# %% ex-7-4 wrong: a block more where the last is full
# says: one block too many where n tokens fill their blocks exactly
# - cdiv(num_tokens, block_size) - num_usable
# + num_tokens // block_size + 1 - num_usable


# %% ex-7-4 wrong: blocks for tokens
# says: Those are blocks; tokens were asked for
# -     return num_cached_tokens,
# +     return num_usable,


# %% ex-7-4 wrong: two numbers
# says: must return 3 numbers
def admit(num_tokens, ref_cnts, block_size):
    return 0, num_tokens


# %% ex-7-4 delegates: the package's manager
# says: hands the work to the package's own manager
def admit(n, ref_cnts, B):
    manager = PrefixCachingKVCacheManager(cdiv(n, B), B)
    hit = manager.get_num_cached_tokens(Request("r", num_prompt_tokens=n))
    return hit, n - hit, cdiv(n, B)


# %% ex-7-5 right: by a time for each block
def eviction_order(events):
    holders, freed, tables = {}, {}, {}
    for now, (kind, name, what) in enumerate(events):
        if kind == "start":
            tables[name] = what
            for block in what:
                holders.setdefault(block, set()).add(name)
                freed.pop(block, None)
        else:
            for place, block in enumerate(tables[name]):
                holders[block].discard(name)
                if not holders[block]:
                    freed[block] = (place < what, now, -place)
    return sorted(freed, key=freed.get)


# %% ex-7-5 right: an ordered dictionary, blocks without a key in front
from collections import OrderedDict


def eviction_order(events):
    waiting = OrderedDict()  # block -> whether it has a key
    tables, running = {}, Counter()
    for kind, name, what in events:
        if kind == "start":
            tables[name] = list(what)
            running.update(what)
            for block in what:
                waiting.pop(block, None)
        if kind == "end":
            table = tables[name]
            running.subtract(table)
            for i in range(len(table) - 1, -1, -1):
                if not running[table[i]]:
                    waiting[table[i]] = i < what
    yield from (block for block, key in waiting.items() if not key)
    yield from (block for block, key in waiting.items() if key)


# %% ex-7-5 wrong: heads before tails
# says: Tails go before heads
# - reversed(list(enumerate(tables.pop(name))))
# + enumerate(tables.pop(name))


# %% ex-7-5 wrong: one queue for all
# says: Blocks without a key go first
# - (with_key if place < what else without_key).append(block_id)
# + with_key.append(block_id)


# %% ex-7-5 wrong: those with a key go first
# says: Blocks without a key go first
# - return without_key + with_key
# + return with_key + without_key


# %% ex-7-5 wrong: only those with a key
# says: Blocks without a key are free as well
# - return without_key + with_key
# + return with_key


# %% ex-7-5 wrong: found again, it keeps its place
# says: it leaves the queue, and enters at its end
# -                 if block_id in with_key:
# -                     with_key.remove(block_id)
# +
# -             if holders[block_id] == 0:
# +             if holders[block_id] == 0 and block_id not in with_key:
# - return without_key + with_key
# + return [b for b in without_key + with_key if not holders[b]]


# %% ex-7-5 wrong: by its first holder
# says: with its last holder, not with its first
# -             if holders[block_id] == 0:
# +             if block_id not in with_key + without_key:
# - return without_key + with_key
# + return [b for b in without_key + with_key if not holders[b]]


# %% ex-7-5 wrong: what others hold is free
# says: A block that a running request holds is not free
# -             if holders[block_id] == 0:
# +             if block_id not in with_key + without_key:


# %% ex-7-5 wrong: newest first
# says: Least recently used goes first
# - return without_key + with_key
# + return without_key[::-1] + with_key[::-1]


# %% ex-7-5 wrong: by id
# says: not of the ids
# - return without_key + with_key
# + return sorted(without_key + with_key)


# %% ex-7-5 wrong: a set
# says: order is wrong in
# - return without_key + with_key
# + return list(set(with_key)) + list(set(without_key))[:1]


# %% ex-7-5 wrong: found again, it is listed twice
# says: has one twice
# -                     with_key.remove(block_id)
# +                     pass


# %% ex-7-5 wrong: events used up
# says: changed what it was given
def eviction_order(events):
    order = []
    while events:
        kind, _, what = events.pop(0)
        if kind == "start":
            order += what
    return order


# %% ex-7-5 wrong: the check's own order
# says: hands the work to the check
def eviction_order(events):
    return order_7_5(events)


# %% ex-7-5 delegates: the package's queue
# says: hands the work to the package's own manager
def eviction_order(events):
    pool = PagedKVCacheManager(100, 1).block_pool
    return [block.block_id for block in pool.get_all_free_blocks()]


# %% ex-7-6 right: literal numbers
def predicted():
    hits_4 = [0, 24, 28, 0, 36, 8]
    hits_16 = [0, 16, 16, 0, 32, 0]
    prompt_steps = [2, 1, 1, 3, 1, 1]
    answer_steps = [7, 7, 7, 7, 7, 7]
    return hits_4, hits_16, prompt_steps, answer_steps


# %% ex-7-6 right: with tokens, in a dictionary of keys
def predicted():
    header, p, q, r = "h" * 26, "p" * 6, "q" * 9, "r" * 10
    answer = "abcdefgh"
    prompts = [header + p, header + q, header + p, "t" + header + p]
    prompts += [header + p + answer + r, header[:12]]

    def hits(B):
        seen, found = set(), []
        for i, prompt in enumerate(prompts):
            text = prompt + (answer if prompt == header + p else f"{i}" * 8)
            n = 0
            while (n + 1) * B <= len(prompt) - 1 and prompt[: (n + 1) * B] in seen:
                n += 1
            found.append(n * B)
            seen |= {text[:end] for end in range(B, len(text), B)}
        return found

    left = [len(prompt) - hit for prompt, hit in zip(prompts, hits(4))]
    return [hits(4), hits(16), [-(-n // 16) for n in left], [8 - 1] * 6]


# %% ex-7-6 wrong: whole-prompt hit with nothing left to run
# says: a hit is at least one token less than the prompt
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [0, 24, 32, 0, 36, 12]


# %% ex-7-6 wrong: sharing speeds up decode
# says: A hit saves prefill, not decode
# from: literal numbers
# - answer_steps = [7, 7, 7, 7, 7, 7]
# + answer_steps = [7, 3, 2, 7, 3, 3]


# %% ex-7-6 wrong: sharing speeds up decode, and a step for the first token
# says: A hit saves prefill, not decode
# from: literal numbers
# - answer_steps = [7, 7, 7, 7, 7, 7]
# + answer_steps = [8, 7, 7, 8, 7, 7]


# %% ex-7-6 wrong: common tokens, not cut to blocks
# says: A hit is made of whole blocks
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [0, 26, 31, 0, 39, 11]


# %% ex-7-6 wrong: rounded up to blocks
# says: A hit is made of whole blocks
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [0, 28, 28, 0, 40, 8]


# %% ex-7-6 wrong: only the prompt before counts
# says: Any earlier prompt counts
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [0, 24, 24, 0, 0, 8]


# %% ex-7-6 wrong: the timestamp does no harm (position-blind)
# says: A token in front moves all that follows
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [0, 24, 28, 24, 36, 8]


# %% ex-7-6 wrong: answers are not cached
# says: Answers are cached, too
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [0, 24, 28, 0, 32, 8]


# %% ex-7-6 wrong: the token just sampled has keys and values
# says: was sampled, but never computed
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [0, 24, 28, 0, 40, 8]


# %% ex-7-6 wrong: only the header is found
# says: prompt 5 begins with all of prompt 1
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [0, 24, 28, 0, 24, 8]


# %% ex-7-6 wrong: a prefix shorter than a block hits
# says: shorter than a block never hits
# from: literal numbers
# - hits_16 = [0, 16, 16, 0, 32, 0]
# + hits_16 = [0, 16, 16, 0, 32, 11]


# %% ex-7-6 wrong: the first prompt finds itself
# says: Nothing was computed before the first prompt
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [28, 24, 28, 0, 36, 8]


# %% ex-7-6 wrong: blocks for tokens
# says: Those are blocks; tokens were asked for
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [0, 6, 7, 0, 9, 2]


# %% ex-7-6 wrong: a block less, always
# says: One block more is found
# from: literal numbers
# - hits_4 = [0, 24, 28, 0, 36, 8]
# + hits_4 = [0, 20, 28, 0, 32, 4]


# %% ex-7-6 wrong: prompt steps as without a cache
# says: That is without the hit
# from: literal numbers
# - prompt_steps = [2, 1, 1, 3, 1, 1]
# + prompt_steps = [2, 3, 2, 3, 4, 1]


# %% ex-7-6 wrong: prompt steps rounded down
# says: is a step all the same
# from: literal numbers
# - prompt_steps = [2, 1, 1, 3, 1, 1]
# + prompt_steps = [2, 0, 0, 2, 0, 0]


# %% ex-7-6 wrong: the first answer token takes a step of its own
# says: comes with the prompt's last step
# from: literal numbers
# - answer_steps = [7, 7, 7, 7, 7, 7]
# + answer_steps = [8, 8, 8, 8, 8, 8]


# %% ex-7-6 wrong: two lists
# says: must return four lists
def predicted():
    return [0, 24, 28, 0, 36, 8], [0, 16, 16, 0, 32, 0]


# %% ex-7-6 delegates: the package's manager counts
# says: hands the work to the package's own manager
def predicted():
    manager = PrefixCachingKVCacheManager(100, 4)
    hits = []
    for n in (32, 35, 32, 33, 50, 12):
        request = Request("r", num_prompt_tokens=n)
        hits.append(manager.get_num_cached_tokens(request))
    return hits, hits, [1] * 6, [7] * 6
