"""Iteration-level scheduling (Orca: Yu et al., OSDI 2022): who computes how many tokens this step.

Running requests first, in the order they were admitted, then waiting ones in the order they came;
one budget of tokens per step. There are no phases: each request is given tokens until
num_computed_tokens has caught up with num_tokens. A prompt longer than the budget is computed in
chunks, over several steps.
"""

from collections import deque
from itertools import islice
from typing import NamedTuple

from minikv.kv_cache.base import InvariantBroken, OutOfKVMemory
from minikv.request import Request, require_int

MAX_FUTILE_PREEMPTIONS = 8
PAD_TOKEN_ID = 0  # any token will do: nobody reads what is computed from it
NOT_FINITE = "the model returned logits that are not finite (NaN or infinity)"


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
        self._ids = set()  # of all that have not ended, samples that wait for a prompt included
        self._futile = (None, 0, 0)  # request, its num_tokens, preemptions without a new token

    def add(self, request):
        """Queues a request. Raises OutOfKVMemory if it could not even run alone, and ValueError
        if it has ended already or its id is in use."""
        if request.finish_reason is not None:
            raise ValueError(
                f"request {request.request_id!r} has ended already ({request.finish_reason})"
            )
        ids = [request.request_id, *(child.request_id for child in request.children)]
        taken = self._ids.intersection(ids)
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
        self._ids.update(ids)
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
            self._require_no_table(request)
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

    def _require_no_table(self, request):
        if request.num_computed_tokens == 0 and request.request_id in self.manager.tables:
            raise InvariantBroken(
                f"request {request.request_id!r} has computed nothing, but the manager has a table "
                "by that id: is the manager used by another engine, or was the request not freed?"
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
        finished, cache_blocks = [], self.manager.cache_blocks
        for (request, num_new_tokens), token in zip(scheduled, tokens, strict=True):
            num_computed_tokens, num_tokens = request.num_computed_tokens, request.num_tokens
            try:
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
                reason = _emit(request, token, now, step)
            except BaseException:  # the step counts only as a whole: it is computed once more
                if request.num_tokens == num_tokens:
                    request.num_computed_tokens = num_computed_tokens
                raise
            if reason:
                finished.append((request, reason))
        return self._finish_all(finished, now)

    def restore(self, copies_lost=False):
        """After a step that was cut short: the manager's books are those of its tables, and nobody
        who waits and has computed nothing holds one. copies_lost: some were drained and will not
        be made, so that all that runs is computed again."""
        self.manager.restore()
        if copies_lost:
            self._forget_content()
        for request in self.waiting:
            holder = self.manager.requests.get(request.request_id)
            if holder is request and request.num_computed_tokens == 0:
                self.manager.free(request)

    def _forget_content(self):
        while self.running:
            self._preempt_last()

    def _finish_all(self, finished, now):
        """One that cannot be freed (a manager's fault) must not keep the others running."""
        ended, errors = [], []
        for request, reason in finished:
            try:
                ended += self.finish(request, reason, now)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
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
            self._ids.discard(each.request_id)
        self.manager.free(request)
        return ended

    def abort(self, request, now=None):
        """Ends a request at any time, even before its first step; returns all that ended."""
        return self.finish(request, "abort", now)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.waiting)


def _emit(request, token, now, step):
    """Appends a sampled token; returns why the request ends with it, or None if it does not.

    The rule is that of Request.came_to_its_end, written out: this runs once for every token.
    """
    request.append(token)
    if request.first_token_time is None:
        request.first_token_time = now
    runs = request.token_runs
    if runs and runs[-1][1] == step - 1:
        runs[-1][1] = step
    else:
        runs.append([step, step])
    if token in request.stop_token_ids:
        return "stop"
    if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
        return "length"
    return None


class PaddedRow(Request):
    """A request's row in a static batch: padding, its tokens, and after its end more padding.

    To the manager and the runner it is a request like any other, in which the padding is tokens:
    it has K and V, takes slots and is computed. `num_pad_tokens` is the padding before the prompt.
    """

    __slots__ = ("ended", "num_pad_tokens", "request")

    def __init__(self, request, num_pad_tokens, num_slots):
        """num_slots: what the row needs, the batch's longest prompt + longest output - 1."""
        num_prompt_tokens = num_pad_tokens + request.num_prompt_tokens
        super().__init__(
            request.request_id,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=num_slots + 1 - num_prompt_tokens,
            sampling_params=request.sampling_params,
            seed=request.seed,
            sample_index=request.sample_index,
        )
        self.request, self.num_pad_tokens = request, num_pad_tokens
        self.ended = None  # why the request ended, while the row goes on
        if request.token_ids is not None:
            self.token_ids = [PAD_TOKEN_ID] * num_pad_tokens + request.token_ids

    @property
    def num_output_tokens(self):
        return self.request.num_output_tokens

    @property
    def num_live_tokens(self):
        """Its request's own tokens that have K and V and may still be read: no padding."""
        return min(max(0, self.num_computed_tokens - self.num_pad_tokens), self.max_live_tokens)

    @property
    def max_live_tokens(self):
        r = self.request
        return r.max_kv_tokens if self.ended is None else r.num_tokens - 1


class StaticScheduler(Scheduler):
    """A batch enters together and leaves together, as before Orca: rows padded on the left to the
    longest prompt, computed until the longest answer is done. Finished rows go on being computed;
    their clients wait for the batch's end.

    max_num_batched_tokens still bounds a step: prompts are computed that many tokens (padding
    counted) at a time, and a batch never has more rows.

    rows: the running batch, in the order of `running`.
    """

    def __init__(self, manager, **limits):
        super().__init__(manager, **limits)
        self.rows: list[PaddedRow] = []

    def schedule(self):
        self.admitted = []
        if not self.rows:
            self._form_batch()
            if not self.rows:
                self._check_progress([])
        if all(row.ended for row in self.rows):  # whoever kept it going was taken out
            return [], []  # update() closes it
        row = self.rows[0]  # all rows stand at the same column
        num_left = row.num_prompt_tokens - row.num_computed_tokens
        share = self.max_num_batched_tokens // len(self.rows)
        num_new_tokens = max(1, min(num_left, share))
        return [ScheduledRequest(each, num_new_tokens) for each in self.rows], []

    def _form_batch(self):
        """The first in line, as many as there is room for: each needs what the longest needs."""
        most = min(self.max_num_seqs, self.max_num_batched_tokens, len(self.waiting))
        most_rows_of = {}  # slots per row -> rows of that length that were found to fit
        for size in range(most, 0, -1):
            batch = list(islice(self.waiting, size))
            if size == most:
                for request in batch:
                    self._require_no_table(request)
            longest = max(request.num_prompt_tokens for request in batch)
            num_slots = longest + max(request.max_tokens for request in batch) - 1
            if num_slots > self.manager.max_slots_per_request:
                continue  # one's long prompt and another's long answer: too long together
            if size > most_rows_of.get(num_slots, size):
                continue
            rows = [PaddedRow(r, longest - r.num_prompt_tokens, num_slots) for r in batch]
            held = []
            for row in rows:
                if self.manager.allocate_slots(row, num_slots) is None:
                    break
                held.append(row)
            if len(held) == size:
                self.rows, self.admitted = rows, batch
                self.running += [self.waiting.popleft() for _ in range(size)]
                return
            for row in held:
                self.manager.free(row)
            most_rows_of[num_slots] = len(held)

    def update(self, scheduled, tokens, now, step):
        ended = []
        for (row, num_new_tokens), token in zip(scheduled, tokens, strict=True):
            row.num_computed_tokens += num_new_tokens
            request = row.request
            request.num_computed_tokens = row.num_live_tokens
            if row.num_computed_tokens < row.num_tokens and token is not None:
                continue
            if row.ended is None and token is None:
                request.error = NOT_FINITE
                ended += self.finish(request, "error", now)
            elif row.ended is None:
                if request.children:
                    self._fan_out(request)
                row.append(token)
                row.ended = _emit(request, token, now, step)
            else:
                row.append(PAD_TOKEN_ID)
        if all(row.ended for row in self.rows):
            rows, self.rows = self.rows, []
            for row in rows:
                ended += self._end(row, row.ended, now)
        return ended

    def _fan_out(self, parent):
        """Samples 2 to n come in a later batch; those that were aborted don't."""
        alive = [child for child in parent.children if child.finish_reason is None]
        self.waiting.extendleft(reversed(alive))
        parent.children = []

    def finish(self, request, reason, now):
        """An abort or an error leaves the batch at once; whoever ends in another way waits in it
        for the others."""
        row = next((row for row in self.rows if row.request is request), None)
        if row is None:
            return super().finish(request, reason, now)
        if reason not in ("abort", "error"):
            row.ended = row.ended or reason
            return []
        self.rows.remove(row)
        return self._end(row, reason, now)

    def _forget_content(self):
        for row in self.rows:
            row.num_computed_tokens = row.request.num_computed_tokens = 0

    def _end(self, row, reason, now):
        row.finish_reason = reason
        self.manager.free(row)  # the row holds the blocks: the manager knows no other request
        return super().finish(row.request, reason, now)


BATCHING = {"continuous": Scheduler, "static": StaticScheduler}
