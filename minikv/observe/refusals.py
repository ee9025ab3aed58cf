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
    """Hears of a core's refusals from its scheduler, and notes them; it decides nothing.

    Counted is a waiting request's first attempt only: not those that follow while it stays at the
    head of the queue, not the growth of running requests, and not the return of a preempted one.

    refusals: a Refusal each, in order. detach() takes the recorder away again.
    """

    def __init__(self, core):
        self.refusals: list[Refusal] = []
        self.manager, self._clock, self._refused = core.manager, core.clock, set()
        self._observers = core.scheduler.refusal_observers
        self._observers.append(self._on_refusal)

    def detach(self):
        if self._on_refusal in self._observers:
            self._observers.remove(self._on_refusal)

    def _on_refusal(self, request, num_new_tokens):
        # first_scheduled_time: who has it has run before, and was preempted
        if request.first_scheduled_time is None and request.request_id not in self._refused:
            self._refused.add(request.request_id)
            self._note(request, num_new_tokens)

    def _note(self, request, num_new_tokens):
        m = self.manager
        largest = max((blocks for _, blocks in m.free_extents()), default=m.num_free_blocks)
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
