"""The managers under test. A new one is one line in MANAGERS; every test over it then runs."""

from minikv.kv_cache.base import BlockCopy, KVCacheManager, cdiv
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.eviction import EVICTION
from minikv.kv_cache.extents import FITS
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.kv_cache.radix import RadixKVCacheManager


class MinimalManager(KVCacheManager):
    """What a learner writes in chapter 4, in the plainest way; its blocks lie scattered."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.free_ids = [*range(0, num_blocks, 2), *range(1, num_blocks, 2)]

    def allocate_slots(self, request, num_new_tokens):
        table = list(self.tables.get(request.request_id, ()))
        num_tokens = request.num_computed_tokens + num_new_tokens
        need = cdiv(num_tokens, self.block_size) - len(table)
        if need > len(self.free_ids):
            return None
        return self.set_table(request, table + [self.free_ids.pop() for _ in range(need)])

    def free(self, request):
        self.free_ids += self.drop_table(request)


class ByHandManager(KVCacheManager):
    """A learner who found neither set_table nor drop_table: only `self.tables`."""

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id, [])
        used = {b for each in self.tables.values() for b in each}
        free = [b for b in range(self.num_blocks) if b not in used]
        need = max(
            0, cdiv(request.num_computed_tokens + num_new_tokens, self.block_size) - len(table)
        )
        if need > len(free):
            return None
        self.tables[request.request_id] = table + free[:need]
        return self.tables[request.request_id]

    def free(self, request):
        self.tables.pop(request.request_id, None)


class RestlessManager(MinimalManager):
    """Legal, and as unpleasant as it gets: forks by copying, and moves blocks of everyone at any
    time, so that copies form chains and cycles and tables change after they were returned."""

    def __init__(self, num_blocks, block_size, rnd):
        super().__init__(num_blocks, block_size)
        self.rnd = rnd
        self.origin = {}  # block id -> where its content was at the last drain

    def allocate_slots(self, request, num_new_tokens):
        table = super().allocate_slots(request, num_new_tokens)
        if table is not None and self.rnd.random() < 0.5:
            self._shuffle()
            table = self.tables[request.request_id]
        return table

    def free(self, request):
        for block_id in self.tables.get(request.request_id, ()):
            self.origin.pop(block_id, None)  # nobody will read it
        super().free(request)

    def fork(self, parent, child):
        need = cdiv(child.num_computed_tokens, self.block_size)
        if need > len(self.free_ids):
            return False
        table = self.set_table(child, [self.free_ids.pop() for _ in range(need)])
        for src, dst in zip(self.tables[parent.request_id], table, strict=False):
            self.origin[dst] = self.origin.get(src, src)
        return True

    def copies(self):
        moves, self.origin = self.origin, {}
        return [BlockCopy(src, dst, 1) for dst, src in moves.items() if src != dst]

    def _shuffle(self):
        held = [b for table in self.tables.values() for b in table]
        places = self.rnd.sample(range(self.num_blocks), self.num_blocks)
        target = dict(zip(held, places, strict=False))
        self.free_ids = places[len(held) :]
        self.origin = {target[b]: self.origin.get(b, b) for b in held}
        self.tables = {key: [target[b] for b in table] for key, table in self.tables.items()}


class ScriptedManager:
    """Stands in front of a manager, writes down what it is asked, and says None where told to.

    refuse(manager, request): whether this allocate_slots is refused; `manager.num_allocates` and
        `manager.num_steps` count those before it.
    calls: ("allocate", request_id, num_new_tokens, keyword arguments) and
        ("free", request_id, finish_reason, num_computed_tokens), in order.
    """

    def __init__(self, inner, refuse=lambda manager, request: False):
        self.inner, self.refuse = inner, refuse
        self.num_allocates = self.num_steps = self.num_refused = 0
        self.calls = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def allocate_slots(self, request, num_new_tokens, **extra):
        self.calls.append(("allocate", request.request_id, num_new_tokens, extra))
        refused = self.refuse(self, request)
        self.num_allocates += 1
        self.num_refused += refused
        return None if refused else self.inner.allocate_slots(request, num_new_tokens, **extra)

    def free(self, request):
        self.calls.append(
            ("free", request.request_id, request.finish_reason, request.num_computed_tokens)
        )
        self.inner.free(request)

    def copies(self):  # drained once in each step that is run
        self.num_steps += 1
        return self.inner.copies()


def refuse_calls(*numbers):
    """None at these allocate_slots calls, counted from 0."""
    return lambda manager, request: manager.num_allocates in numbers


def refuse_steps(*numbers):
    """None for all of these steps, counted from 0."""
    return lambda manager, request: manager.num_steps in numbers


def refuse_always(manager, request):
    return True


def _contiguous(rnd, num_slabs, remainder=0):
    """A pool of num_slabs slabs and `remainder` blocks that no slab can be cut from."""
    block_size, slab_blocks = rnd.choice([1, 2, 3, 4]), rnd.randint(2, 8)
    return ContiguousKVCacheManager(
        num_slabs * slab_blocks + min(remainder, slab_blocks - 1),
        block_size,
        max_model_len=slab_blocks * block_size - rnd.randint(0, block_size - 1),
    )


class CompactingManager(ContiguousKVCacheManager):
    """Compacts at any time, also between two allocations of a step, and more than once in it."""

    def __init__(self, rnd, *args, **options):
        super().__init__(*args, **options)
        self.rnd = rnd

    def allocate_slots(self, request, num_new_tokens, **extra):
        table = super().allocate_slots(request, num_new_tokens, **extra)
        if table is None:  # then nothing has changed
            return None
        if self.rnd.random() < 0.3:
            self.compact()
        return self.tables[request.request_id]

    def copies(self):
        if self.rnd.random() < 0.3:
            self.compact()
        return super().copies()


def _extents(rnd, reserve, make=ContiguousKVCacheManager):
    """A tiny pool under any fit; a third of max_model_len may lie beyond it."""
    num_blocks, block_size = _size(rnd)
    max_model_len = rnd.randint(4, max(4, num_blocks * block_size * 3 // 2))
    fit = rnd.choice(list(FITS))
    return make(num_blocks, block_size, max_model_len=max_model_len, reserve=reserve, fit=fit)


def _compacting(rnd):
    reserve = rnd.choice(["pow2", "double", "exact", "grow", "grow"])
    return _extents(rnd, reserve, lambda *args, **options: CompactingManager(rnd, *args, **options))


def _prefix(rnd, **options):
    """A tiny pool, so that blocks are evicted; half of all prompts of a trace begin alike."""
    eviction = rnd.choice(list(EVICTION))
    return PrefixCachingKVCacheManager(
        rnd.randint(4, 20), rnd.choice([1, 1, 2, 3, 4]), eviction=eviction, **options
    )


def _size(rnd):
    """(num_blocks, block_size) of a tiny pool."""
    return rnd.randint(4, 16), rnd.choice([1, 1, 2, 3, 4])


def _refusing(rnd):
    """At chosen calls, not by chance forever: a long prompt in small chunks would never end."""
    chosen = rnd.sample(range(60), rnd.randint(1, 25))
    return ScriptedManager(MinimalManager(*_size(rnd)), refuse_calls(*chosen))


def _refusing_the_moved(rnd):
    """Who has just been moved gets no more room, and steps back before the copies are made."""

    def refuse(manager, request):
        return request.request_id in manager._origins and rnd.random() < 0.5

    return ScriptedManager(_compacting(rnd), refuse)


# name -> factory(random.Random) -> a manager with a tiny pool
MANAGERS = {
    "contiguous-max-1": lambda rnd: _contiguous(rnd, 1),
    "contiguous-max-2": lambda rnd: _contiguous(rnd, 2, remainder=1),
    "contiguous-max-many": lambda rnd: _contiguous(rnd, rnd.randint(3, 6), rnd.randint(0, 7)),
    "paged-1": lambda rnd: PagedKVCacheManager(rnd.randint(4, 24), 1),
    "paged-3": lambda rnd: PagedKVCacheManager(rnd.randint(2, 12), 3),
    "paged-16": lambda rnd: PagedKVCacheManager(rnd.randint(1, 4), 16),
    "prefix": lambda rnd: _prefix(rnd),
    "prefix-collisions": lambda rnd: _prefix(rnd, hash_fn=lambda data: b"the same"),
    "radix-1": lambda rnd: RadixKVCacheManager(rnd.randint(4, 24), 1),
    "radix-2": lambda rnd: RadixKVCacheManager(rnd.randint(4, 16), 2),
    "radix-4": lambda rnd: RadixKVCacheManager(rnd.randint(2, 10), rnd.choice([3, 4, 5])),
    "contiguous-pow2": lambda rnd: _extents(rnd, "pow2"),
    "contiguous-double": lambda rnd: _extents(rnd, "double"),
    "contiguous-exact": lambda rnd: _extents(rnd, "exact"),
    "contiguous-grow": lambda rnd: _extents(rnd, "grow"),
    "contiguous-compacting": _compacting,
    "minimal": lambda rnd: MinimalManager(*_size(rnd)),
    "by-hand": lambda rnd: ByHandManager(*_size(rnd)),
    "restless": lambda rnd: RestlessManager(*_size(rnd), rnd),
    "refusing": _refusing,
    "contiguous-refusing": _refusing_the_moved,
}
