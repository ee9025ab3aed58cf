"""The life of every block of a pool: in use, cached and free, taken again. Plain data, one look
after the other."""

from typing import NamedTuple

from minikv.observe.pool import FREE, LIVE

CACHED = "cached"  # free, but published: whoever has the same beginning finds it


class BlockState(NamedTuple):
    """One block at one look.

    state: LIVE, CACHED or FREE. holders: request ids whose tables name it. writer: whose tokens it
    holds, or None where it was never written. content: a number that is another one as soon as the
    block has been taken for something else. place: how many blocks are taken before it; None while
    it is in use.
    """

    state: str
    holders: tuple
    writer: str | None
    content: int
    place: int | None


class Look(NamedTuple):
    """All blocks, by block id, at a moment named `label`."""

    label: str
    blocks: tuple


class LifeRecorder:
    """Looks at the blocks of a paged or prefix-caching manager whenever it is called, and decides
    nothing.

    looks: what it has seen.
    """

    def __init__(self, manager):
        self.manager, self.looks = manager, []
        self._held = [(None, 0, ())] * manager.num_blocks  # publication, content, holders
        self._writers, self._num_contents = [None] * manager.num_blocks, 0

    def __call__(self, label):
        holders = [[] for _ in range(self.manager.num_blocks)]
        for name, table in self.manager.tables.items():
            for block_id in table:
                holders[block_id].append(name)
        pool = self.manager.block_pool
        places = {block.block_id: i for i, block in enumerate(pool.get_all_free_blocks())}
        look = Look(
            label,
            tuple(
                self._state(block, tuple(names), places)
                for block, names in zip(pool.blocks, holders, strict=True)
            ),
        )
        self.looks.append(look)
        return look

    def _state(self, block, holders, places):
        key = getattr(block, "key", None)
        publication = block.publication if key else None
        before, content, before_holders = self._held[block.block_id]
        stays = bool(set(holders) & set(before_holders))
        found = before is not None and publication == before
        if holders and not (stays or found):
            self._num_contents += 1
            content = self._num_contents
            self._writers[block.block_id] = holders[0]
        # A block that was freed without a key keeps its bytes, but nobody can ask for them.
        self._held[block.block_id] = publication, content, holders
        state = LIVE if holders else CACHED if key else FREE
        return BlockState(
            state, holders, self._writers[block.block_id], content, places.get(block.block_id)
        )
