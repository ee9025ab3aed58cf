"""The KV pool at one moment, as plain data: a snapshot of the block tables, and what each slot is.

A snapshot is taken from a running engine; reports and figures are functions of it alone.
"""

from typing import NamedTuple

# What a slot is, in the words of MemoryReport (kv_cache/base.py).
LIVE, RESERVED, INTERNAL, FREE = "live", "reserved", "internal", "free"


class PoolSnapshot(NamedTuple):
    """What each request held at the end of a step. All tuples and dicts are copies.

    tables: request_id -> block ids (a range, where the manager's table is one). num_live:
    request_id -> tokens whose keys and values lie in the pool. max_live: request_id -> slots that
    it can come to use of those it holds.
    """

    step: int
    num_blocks: int
    block_size: int
    tables: dict
    num_live: dict
    max_live: dict


class Slots(NamedTuple):
    """What a figure drew: for every slot of the pool its state, and who holds it (or None)."""

    states: tuple
    owners: tuple

    def count(self, state, owner=None) -> int:
        pairs = zip(self.states, self.owners, strict=True)
        return sum(s == state and owner in (None, o) for s, o in pairs)

    @property
    def requests(self) -> list:
        """Those that hold slots, in the order of their first one."""
        return list(dict.fromkeys(o for o in self.owners if o is not None))


def snapshot(engine, step=None) -> PoolSnapshot:
    """The pool of an LLM or an EngineCore (anything with .manager and .metrics), as it is now.

    step: what to call this moment; the engine's own count of steps, unless given.
    """
    step = len(engine.metrics.steps) if step is None else step
    return snapshot_of(engine.manager, step)


def snapshot_of(manager, step) -> PoolSnapshot:
    """The pool of a manager that may have no engine."""
    num_live, max_live = {}, {}
    tables = {
        request_id: table if isinstance(table, range) else tuple(table)
        for request_id, table in manager.tables.items()
    }
    for request_id, table in tables.items():
        request, size = manager.requests.get(request_id), len(table) * manager.block_size
        # A table that was set by hand has no request: all of it counts as reserved.
        num_live[request_id] = request.num_computed_tokens if request else 0
        max_live[request_id] = min(size, request.max_kv_tokens) if request else size
    return PoolSnapshot(step, manager.num_blocks, manager.block_size, tables, num_live, max_live)


def slots_of(snap) -> Slots:
    """Every slot's state. A block that stands in several tables counts for the first of them."""
    num_slots = snap.num_blocks * snap.block_size
    states, owners = [FREE] * num_slots, [None] * num_slots
    for request_id, table in snap.tables.items():
        live, most = snap.num_live[request_id], snap.max_live[request_id]
        for position in range(len(table) * snap.block_size):
            block, offset = divmod(position, snap.block_size)
            slot = table[block] * snap.block_size + offset
            state = LIVE if position < live else RESERVED if position < most else INTERNAL
            if owners[slot] is None or (state == LIVE and states[slot] != LIVE):
                states[slot], owners[slot] = state, request_id
    return Slots(tuple(states), tuple(owners))
