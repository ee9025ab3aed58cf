"""Iteration-level scheduling (Orca: Yu et al., OSDI 2022): who computes how many tokens this step.

Running requests first, in the order they were admitted, then waiting ones in the order they came;
one budget of tokens per step. There are no phases: each request is given tokens until
num_computed_tokens has caught up with num_tokens. A prompt longer than the budget is computed in
chunks, over several steps.
"""

from collections import deque
from typing import NamedTuple

from minikv.kv_cache.base import OutOfKVMemory
from minikv.request import require_int

MAX_FUTILE_PREEMPTIONS = 8


class ScheduledRequest(NamedTuple):
    """num_new_tokens >= 1 tokens to compute, the first at position request.num_computed_tokens."""

    request: object
    num_new_tokens: int


class Scheduler:
    """max_num_seqs: requests that run at once. max_num_batched_tokens: tokens computed per step.

    waiting, running: the two queues. admitted: the requests that left `waiting` in the last
    schedule(). num_preemptions: how often a running request had to step back.

    Raises ValueError where a limit is below 1.
    """

    def __init__(self, manager, *, max_num_seqs=16, max_num_batched_tokens=512):
        self.manager = manager
        self.max_num_seqs = require_int("max_num_seqs", max_num_seqs, at_least=1)
        self.max_num_batched_tokens = require_int(
            "max_num_batched_tokens", max_num_batched_tokens, at_least=1
        )
        self.waiting, self.running, self.admitted = deque(), [], []
        self.num_preemptions = 0
        self._futile = (None, 0, 0)  # request, its num_tokens, preemptions without a new token

    def add(self, request):
        """Queues a request. Raises OutOfKVMemory if it could not even run alone."""
        if not self.manager.fits_ever(request):
            m = self.manager
            raise OutOfKVMemory(
                f"request {request.request_id!r} may need {request.max_kv_tokens} slots "
                f"({request.num_prompt_tokens} prompt tokens + max_tokens {request.max_tokens} "
                f"- 1), which never fit in a pool of {m.num_blocks * m.block_size} slots "
                f"({m.num_blocks} blocks of {m.block_size}) under {type(m).__name__}"
            )
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
        while i < len(running) and budget > 0:
            request = running[i]
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while self.manager.allocate_slots(request, num_new_tokens) is None:
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
            if request.num_computed_tokens == 0:
                num_cached_tokens = self.manager.get_num_cached_tokens(request)
                if num_cached_tokens:
                    extra["num_cached_tokens"] = num_cached_tokens
            else:  # it was swapped out: its tokens come back as they were
                num_cached_tokens = 0
            num_known = request.num_computed_tokens + num_cached_tokens
            num_new_tokens = min(request.num_tokens - num_known, budget)
            if self.manager.allocate_slots(request, num_new_tokens, **extra) is None:
                break
            self.running.append(self.waiting.popleft())
            self.admitted.append(request)
            request.num_computed_tokens = num_known
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = num_cached_tokens
            scheduled.append(ScheduledRequest(request, num_new_tokens))
            budget -= num_new_tokens

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
        if self.running or not self.waiting:
            return
        request, m = self.waiting[0], self.manager
        if preempted:
            seen = (request, request.num_tokens)
            count = self._futile[2] + 1 if self._futile[:2] == seen else 1
            self._futile = (*seen, count)
            if count < MAX_FUTILE_PREEMPTIONS:
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
        finished = []
        for (request, num_new_tokens), token in zip(scheduled, tokens, strict=True):
            request.num_computed_tokens += num_new_tokens
            if token is None:
                request.error = "the model returned logits that are not finite (NaN or infinity)"
                finished.append((request, "error"))
                continue
            self.manager.cache_blocks(request)
            if request.num_computed_tokens < request.num_tokens:
                continue
            if request.children:
                self._fan_out(request)
            request.append(token)
            if request.first_token_time is None:
                request.first_token_time = now
            runs = request.token_runs
            if runs and runs[-1][1] == step - 1:
                runs[-1][1] = step
            else:
                runs.append([step, step])
            if token in request.stop_token_ids:
                finished.append((request, "stop"))
            elif request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
                finished.append((request, "length"))
        out = []
        for request, reason in finished:
            out += self.finish(request, reason, now)
        return out

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

    def finish(self, request, reason, now):
        """Ends a request wherever it stands, and gives its blocks back. Returns all that ended:
        samples that wait for its prompt (an abort or an error came first) end with it."""
        if request.finish_reason is not None:
            return []
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        ended = [r for r in (request, *request.children) if r.finish_reason is None]
        request.children = []
        for each in ended:
            each.finish_reason, each.finish_time, each.error = reason, now, request.error
        self.manager.free(request)
        return ended

    def abort(self, request, now=None):
        """Ends a request at any time, even before its first step; returns all that ended."""
        return self.finish(request, "abort", now)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.waiting)
