"""Static batching, as before Orca: rows padded to one length enter and leave together."""

from itertools import islice

from minikv.request import Request
from minikv.scheduler import NOT_FINITE, ScheduledRequest, Scheduler, emit, whole

PAD_TOKEN_ID = 0  # any token will do: nobody reads what is computed from it


class PaddedRow(Request):
    """A request's row in a static batch: padding, its tokens, and after its end more padding.

    To the manager and the runner it is a request like any other, in which the padding is tokens:
    it has K and V, takes slots and is computed. `num_pad_tokens` is the padding before the prompt.
    """

    __slots__ = ("ended", "num_pad_tokens", "request")

    def __init__(self, request, num_pad_tokens, num_slots):
        """num_slots: what the row needs, the batch's longest prompt + longest output - 1."""
        num_prompt_tokens = num_pad_tokens + request.num_tokens  # all that is known by now
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
                    self.require_own_books(request)
            longest = max(request.num_tokens for request in batch)
            num_slots = longest + max(r.max_tokens - r.num_output_tokens for r in batch) - 1
            if num_slots > self.manager.max_slots_per_request:
                continue  # one's long prompt and another's long answer: too long together
            if size > most_rows_of.get(num_slots, size):
                continue
            rows = [PaddedRow(r, longest - r.num_tokens, num_slots) for r in batch]
            held = []
            for row in rows:
                if self.manager.allocate_slots(row, num_slots) is None:
                    self._refused(row, num_slots)
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
        ended, self._last_update = [], now
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
                row.ended = emit(request, token, now, step)
            else:
                row.append(PAD_TOKEN_ID)
        if all(row.ended for row in self.rows):
            for row in list(self.rows):
                ended += self._leave(row, row.ended, now)
        return ended

    def _fan_out(self, parent):
        """Samples 2 to n come in a later batch; those that were aborted don't."""
        alive = [child for child in parent.children if child.finish_reason is None]
        self.waiting.extendleft(reversed(alive))
        parent.children = []

    @whole
    def finish(self, request, reason, now):
        """An abort or an error leaves the batch at once; whoever ends in another way waits in it
        for the others."""
        row = next((row for row in self.rows if row.request is request), None)
        if row is None:
            return super().finish(request, reason, now)
        if reason not in ("abort", "error"):
            row.ended = row.ended or reason
            return []
        return self._leave(row, reason, now)

    def _leave(self, row, reason, now):
        row.finish_reason = reason
        self.manager.free(row)  # the row holds the blocks: the manager knows no other request
        ended = super().finish(row.request, reason, now)
        self.rows.remove(row)
        return ended

    def recover(self):
        """Rows are formed anew, and whoever waited for the batch's end waits no more."""
        for row in self.rows:
            if row.ended and row.request.finish_reason is None:
                self._mark(row.request, row.ended, self._last_update)
        self.rows = []
        super().recover()


BATCHING = {"continuous": Scheduler, "static": StaticScheduler}
