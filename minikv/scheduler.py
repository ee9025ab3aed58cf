"""Iteration-level scheduling (Orca: Yu et al., OSDI 2022): who computes how many tokens this step.

Running requests first, in the order they were admitted, then waiting ones in the order they came;
one budget of tokens per step. There are no phases: each request is given tokens until
num_computed_tokens has caught up with num_tokens. A prompt longer than the budget is computed in
chunks, over several steps.
"""

import functools
from collections import deque
from typing import NamedTuple

from minikv.kv_cache.base import InvariantBroken, OutOfKVMemory
from minikv.request import require_int

MAX_FUTILE_PREEMPTIONS = 8
NOT_FINITE = "the model returned logits that are not finite (NaN or infinity)"


class ScheduledRequest(NamedTuple):
    """num_new_tokens >= 1 tokens to compute, the first at position request.num_computed_tokens."""

    request: object
    num_new_tokens: int


def whole(method):
    """Decorates a method of whatever can recover(): cut short at any point, by an error or an
    interrupt, it leaves books that hold; where the recovery is cut short too, from the next such
    call on."""

    @functools.wraps(method)
    def whole_or_recovered(self, *args, **options):
        scheduler = getattr(self, "scheduler", self)
        if scheduler.must_recover:
            self.recover()
        try:
            return method(self, *args, **options)
        except BaseException:
            scheduler.must_recover = True
            self.recover()
            raise

    return whole_or_recovered


class Scheduler:
    """max_num_seqs: requests that run at once. max_num_batched_tokens: tokens computed per step.

    requests: by request_id, all that have not ended, in the order in which they came; samples that
    wait for a prompt among them. waiting, running: the two queues. admitted: those that left
    `waiting` in the last schedule(). num_preemptions: how often a running request had to step back.
    num_ended: requests that have. must_recover: whether a recovery was cut short, and is to be made
    again. refusal_observers: called with (request, num_new_tokens) when one
    that waits gets no room.

    Raises ValueError where a limit is below 1.
    """

    def __init__(self, manager, *, max_num_seqs=16, max_num_batched_tokens=512):
        self.manager = manager
        self.max_num_seqs = require_int("max_num_seqs", max_num_seqs, at_least=1)
        self.max_num_batched_tokens = require_int(
            "max_num_batched_tokens", max_num_batched_tokens, at_least=1
        )
        self.requests = {}
        self.waiting, self.running, self.admitted = deque(), [], []
        self.num_preemptions, self.must_recover = 0, False
        self.refusal_observers = []  # each is called with (request, num_new_tokens)
        self.num_ended, self._last_update = 0, 0.0  # a time
        self._stuck, self._num_futile = None, 0  # (request, its num_tokens), preemptions at that

    def add(self, request):
        """Queues a request. Raises OutOfKVMemory if it could not even run alone, and ValueError
        if it has ended already or its id is in use."""
        if request.finish_reason is not None:
            raise ValueError(
                f"request {request.request_id!r} has ended already ({request.finish_reason})"
            )
        samples = {each.request_id: each for each in (request, *request.children)}
        taken = self.requests.keys() & samples
        if taken:
            raise ValueError(f"request_id {min(taken)!r} is taken by a request that still runs")
        if not self.manager.fits_ever(request):
            m = self.manager
            raise OutOfKVMemory(
                f"request {request.request_id!r} may need {request.max_kv_tokens} slots "
                f"({request.num_prompt_tokens} prompt tokens + max_tokens {request.max_tokens} "
                f"- 1), which never fit: {type(m).__name__} gives one request at most "
                f"{m.max_slots_per_request} of the pool's {m.num_blocks * m.block_size} slots "
                f"({m.num_blocks} blocks of {m.block_size})"
            )
        self._enqueue(request, samples)

    @whole
    def _enqueue(self, request, samples):
        self.requests.update(samples)
        self.waiting.append(request)

    def schedule(self):
        """Returns (list[ScheduledRequest], list of preempted requests).

        Block tables are read from the manager after it returns: a later allocation may move an
        earlier request. Raises OutOfKVMemory when nothing runs and the first in line still gets
        no room, or when one request alone is preempted again and again: the manager is at fault
        then, and waiting would never end.
        """
        budget, scheduled, preempted, i = self.max_num_batched_tokens, [], [], 0
        running, self.admitted = self.running, []
        allocate_slots = self.manager.allocate_slots
        while i < len(running) and budget > 0:
            request = running[i]
            num_new_tokens = request.num_tokens - request.num_computed_tokens
            if num_new_tokens > budget:
                num_new_tokens = budget
            if num_new_tokens < 1:
                raise InvariantBroken(f"{request} runs, but has no token left to compute")
            while allocate_slots(request, num_new_tokens) is None:
                victim = self._preempt_last()
                preempted.append(victim)
                if victim is request:
                    break
            else:
                scheduled.append(ScheduledRequest(request, num_new_tokens))
                budget -= num_new_tokens
                i += 1
        if not preempted:  # whoever stepped back has the first claim on room
            self._admit(scheduled, budget)
        if not scheduled:
            self._check_progress(preempted)
        return scheduled, preempted

    def _admit(self, scheduled, budget):
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request, extra = self.waiting[0], {}
            self.require_own_books(request)
            if request.num_computed_tokens == 0:
                num_cached_tokens = self.manager.get_num_cached_tokens(request)
                if num_cached_tokens:
                    extra["num_cached_tokens"] = num_cached_tokens
            else:  # it was swapped out: its tokens come back as they were
                num_cached_tokens = 0
            num_known = request.num_computed_tokens + num_cached_tokens
            num_new_tokens = min(request.num_tokens - num_known, budget)
            if self.manager.allocate_slots(request, num_new_tokens, **extra) is None:
                self._refused(request, num_new_tokens)
                break
            self.running.append(self.waiting.popleft())
            self.admitted.append(request)
            request.num_computed_tokens = num_known
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_cached_tokens
            scheduled.append(ScheduledRequest(request, num_new_tokens))
            budget -= num_new_tokens

    def _refused(self, request, num_new_tokens):
        for observer in list(self.refusal_observers):
            observer(request, num_new_tokens)

    def require_own_books(self, request):
        """Before a request is given its first blocks: the manager is ours alone, and knows nothing
        of it. Raises InvariantBroken."""
        m = self.manager
        if m.owner is not self and m.owner is not None and m.tables:
            raise InvariantBroken(
                f"the manager serves another engine, which holds {len(m.tables)} tables in it: "
                "give each engine a manager of its own"
            )
        if m.owner is not self:
            m.reset_prefix_cache()  # what is cached lies in another's pool
            m.owner = self
        if request.num_computed_tokens == 0 and request.request_id in m.tables:
            raise InvariantBroken(
                f"request {request.request_id!r} has computed nothing, but the manager has a table "
                "by that id: was it not freed?"
            )

    def _preempt_last(self):
        """By recomputation: its tokens are kept, their keys and values are not."""
        victim = self.running.pop()
        self.manager.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _check_progress(self, preempted):
        if not self.waiting:
            return
        request, m = self.waiting[0], self.manager
        if preempted:
            if (request, request.num_tokens) != self._stuck:
                self._stuck, self._num_futile = (request, request.num_tokens), 0
            self._num_futile += 1
            if self._num_futile < MAX_FUTILE_PREEMPTIONS:
                return
        raise OutOfKVMemory(
            f"request {request.request_id!r} gets no room though nothing else runs: "
            f"{request.num_tokens} tokens, {m.num_free_blocks} of {m.num_blocks} blocks of "
            f"{m.block_size} free. {type(m).__name__}.fits_ever said that it fits"
        )

    def update(self, scheduled, tokens, now, step):
        """After the forward pass of `scheduled`. Returns the requests that finished.

        tokens[i]: the token sampled for scheduled[i]; it counts only if all known tokens are
        computed now (not in the middle of a prompt). None: its logits were not finite, and the
        request ends with an error. now: the time; step: the number of this step.
        """
        finished, cache_blocks = [], self.manager.cache_blocks
        self._last_update = now
        for (request, num_new_tokens), token in zip(scheduled, tokens, strict=True):
            request.num_computed_tokens += num_new_tokens
            if token is None:
                request.error = NOT_FINITE
                finished.append((request, "error"))
                continue
            cache_blocks(request)
            if request.num_computed_tokens < request.num_tokens:
                continue
            if request.children:
                self._fan_out(request)
            reason = emit(request, token, now, step)
            if reason:
                finished.append((request, reason))
        ended = []
        for request, reason in finished:
            ended += self.finish(request, reason, now)
        return ended

    def _fan_out(self, parent):
        """Samples 2 to n start once the prompt is computed. Each shares all of it but the last
        token, which it runs itself for its own logits; or it queues, where nothing is shared."""
        for child in reversed(parent.children):
            if child.finish_reason is not None:  # aborted while it waited here
                continue
            child.num_computed_tokens = parent.num_prompt_tokens - 1
            child.num_cached_tokens = child.num_computed_tokens
            room = len(self.running) < self.max_num_seqs and child.num_computed_tokens > 0
            if room and self.manager.fork(parent, child):
                child.first_scheduled_time = parent.first_scheduled_time
                self.running.append(child)
            else:
                child.num_computed_tokens, child.num_cached_tokens = 0, -1
                self.waiting.appendleft(child)
        parent.children = []

    @whole
    def finish(self, request, reason, now):
        """Ends a request wherever it stands, and gives its blocks back. Returns all that ended:
        samples that wait for its prompt (an abort or an error came first) end with it. Nothing
        ends that has ended already, or was never added."""
        if not self.is_unfinished(request):
            return []
        ended = self._mark(request, reason, now)
        self.manager.free(request)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._forget(request)
        return ended

    def _mark(self, request, reason, now):
        """finish_reason comes last: who has one ends, whatever happens next."""
        ended = [r for r in (request, *request.children) if r.finish_reason is None]
        for each in ended:
            each.error, each.finish_time, each.finish_reason = request.error, now, reason
        return ended

    def _forget(self, request):
        for each in (*request.children, request):
            if self.requests.get(each.request_id) is each:  # its id may be another's by now
                del self.requests[each.request_id]
                self.num_ended += 1
        request.children = []

    def is_unfinished(self, request) -> bool:
        """Whether it was added and has not ended."""
        return self.requests.get(request.request_id) is request

    def abort(self, request, now=None):
        """Ends a request at any time, even before its first step; returns all that ended."""
        return self.finish(request, "abort", now)

    def recover(self):
        """After any exception: books that hold, whatever was cut short, and wherever.

        It may be cut short itself, and made again. Tokens are the truth. Counts are set from
        them, whoever had come to its end is ended, and the others wait in the order in which they
        came, to be computed again: that is the price, as the manager forgets everything.
        """
        if self.manager.owner is self:
            self.manager.reset()
        self.running, self.waiting, self.admitted = [], deque(), []
        for request in list(self.requests.values()):
            was_computed = request.num_computed_tokens > 0
            request.recount()
            reason = request.finish_reason or request.came_to_its_end
            reason = "error" if request.error else reason
            if reason:
                self._mark(request, reason, self._last_update)
                self._forget(request)
            elif was_computed:
                request.num_preemptions += 1
                self.num_preemptions += 1
        inside = {child for request in self.requests.values() for child in request.children}
        self.waiting.extend(r for r in self.requests.values() if r not in inside)
        self.must_recover = False

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.waiting or self.must_recover)


def emit(request, token, now, step):
    """Appends a sampled token; returns why the request ends with it, or None if it does not.

    The rule is that of Request.came_to_its_end, written out: this runs once for every token.
    """
    if request.first_token_time is None:
        request.first_token_time = now
    runs = request.token_runs
    if runs and runs[-1][1] == step - 1:
        runs[-1][1] = step
    else:
        runs.append([step, step])
    request.append(token)  # last: cut short before it, there was no token
    if token in request.stop_token_ids:
        return "stop"
    if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
        return "length"
    return None
