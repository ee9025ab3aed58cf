"""Who was refused room, and what the pool looked like at that moment."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """A request that was refused when it first reached the head of the queue.

    Shares are of the pool's blocks. needed_share: what the manager's policy asks for to admit it,
    before an allocator rounds it up. largest_extent_share: the longest run of free blocks that can
    be had; where any free block will do (paging), all of them.
    """

    request_id: str
    time_s: float
    free_share: float
    largest_extent_share: float
    needed_share: float

    @property
    def had_enough_in_sum(self) -> bool:
        """Free memory would have sufficed, had it been in one piece: fragmentation."""
        return self.needed_share <= self.free_share


class RefusalRecorder:
    """Stands in front of a core's `allocate_slots` and notes refusals; it decides nothing.

    Counted is a waiting request's first attempt only: not those that follow while it stays at the
    head of the queue, not the growth of running requests, and not the return of a preempted one.

    refusals: a Refusal each, in order. detach() takes the recorder away again.
    """

    def __init__(self, core):
        self.refusals: list[Refusal] = []
        self.manager, self._clock, self._refused = core.manager, core.clock, set()
        allocate_slots = core.manager.allocate_slots

        def recorded(request, num_new_tokens, **extra):
            table = allocate_slots(request, num_new_tokens, **extra)
            # first_scheduled_time: who has it runs, or has run before it was preempted
            if table is None and request.first_scheduled_time is None and self._attached:
                self._note(request, num_new_tokens)
            return table

        # Another recorder may stand here already, and another may come in front.
        self._before, self._recorded = vars(core.manager).get("allocate_slots"), recorded
        self._attached = True
        core.manager.allocate_slots = recorded

    def detach(self):
        self._attached = False
        if vars(self.manager).get("allocate_slots") is self._recorded:
            del self.manager.allocate_slots
            if self._before is not None:
                self.manager.allocate_slots = self._before

    def _note(self, request, num_new_tokens):
        if request.request_id in self._refused:
            return
        self._refused.add(request.request_id)
        m = self.manager
        largest, needed = m.num_free_blocks, -(-num_new_tokens // m.block_size)
        if hasattr(m, "allocator"):
            largest = m.allocator.largest_free_extent
            needed = m.num_blocks_for(request, request.num_computed_tokens + num_new_tokens)
        self.refusals.append(
            Refusal(
                request.request_id,
                self._clock.now(),
                m.num_free_blocks / m.num_blocks,
                largest / m.num_blocks,
                needed / m.num_blocks,
            )
        )


def with_much_free(refusals, free_share=0.4, needed_share=1.0):
    """The refusals of the paradox: at least free_share of the pool free, more than the request
    needs, and a need of at most needed_share."""
    return [
        each
        for each in refusals
        if each.had_enough_in_sum
        and each.free_share >= free_share
        and each.needed_share <= needed_share
    ]
