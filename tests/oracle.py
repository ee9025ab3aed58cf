"""The content oracle: an engine without a model, in which a wrong read changes the output.

Each slot of the fake pool records the hash of the token history up to it, as real keys and values
depend on all tokens before them. The next token is derived from what is read back through the
block table. So two engines agree on the output exactly if every position was written where it is
read, whatever was moved, shared or recomputed in between.

The hash is our own arithmetic: the same in every process, whatever PYTHONHASHSEED is.
"""

from minikv.core import EngineCore
from minikv.scheduler import Scheduler

VOCAB = 5  # few enough that prompts share prefixes and stop tokens are met
MASK = (1 << 64) - 1
EMPTY = 0x243F6A8885A308D3
PADDING = "padding"  # no number: hashing it fails


class OracleError(AssertionError):
    """The scheduler or the manager broke the contract."""


def expect(condition, message):
    if not condition:
        raise OracleError(message)


def mix(state, value):
    """One step of a 64-bit hash; the order of the values matters."""
    state = ((state ^ (value + 1)) * 0x9E3779B97F4A7C15) & MASK
    return state ^ (state >> 29)


def history(token_ids):
    """Per position, the hash of all tokens up to and including it."""
    state, records = EMPTY, []
    for token in token_ids:
        state = mix(state, token)
        records.append(state)
    return records


def records_of(request, end):
    """What the slots of its first `end` tokens should hold. A static batch's padding is written
    too, but the tokens after it don't depend on it."""
    num_pad_tokens = min(end, request.num_pad_tokens)
    return [PADDING] * num_pad_tokens + history(request.token_ids[num_pad_tokens:end])


def next_token(records, sample_index=0):
    """What the fake model samples after reading `records`, one per known token."""
    state = mix(EMPTY, sample_index)
    for record in records:
        state = mix(state, -1 if record is None else record)
    return (state >> 32) % VOCAB


def reference(prompt, max_tokens, *, sample_index=0, stop_token_ids=()):
    """Prompt and output of one request alone, without any cache."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(history(token_ids), sample_index))
        if token_ids[-1] in stop_token_ids:
            break
    return token_ids


class FakeClock:
    """Stands still, except where the runner computes and the loop waits."""

    def __init__(self, t=0.0):
        self.t = t
        self.waits = []  # (from, to) of each advance_to

    def now(self):
        return self.t

    def advance_to(self, t):
        expect(t > self.t, f"at {self.t}, a wait until {t} would never end")
        self.waits.append((self.t, t))
        self.t = t


class OracleRunner:
    """A Runner for EngineCore.

    clock, step_time: a step takes this long on that clock.
    has_bad_logits(request): None instead of a token, as for logits that are not finite.
    cut_short(when): called at each point of a step where it may raise, as an interrupt would:
        "before the copies", "before the writes", "before the reads", "at the end".
    strict: raise at the first wrong read. Without it the wrong read only changes the output, which
        shows that comparing outputs is enough.
    steps: per step, [(request_id, num_new_tokens), ...] as scheduled.
    num_moved: blocks copied so far, per kind.
    """

    def __init__(self, manager, clock=None, *, step_time=1.0, has_bad_logits=None, strict=True):
        self.manager, self.clock, self.step_time = manager, clock, step_time
        self.has_bad_logits = has_bad_logits or (lambda request: False)
        self.strict = strict
        self.cut_short = lambda when: None
        self.pool = [None] * (manager.num_blocks * manager.block_size)
        self.host = {}  # block id -> records, for blocks that were swapped out
        self.steps = []
        self.num_moved = {"device": 0, "out": 0, "in": 0}

    def run(self, scheduled, copies):
        self.steps.append([(request.request_id, n) for request, n in scheduled])
        self.cut_short("before the copies")
        self._copy(copies)
        self.cut_short("before the writes")
        # All writes come before all reads, as in a layer of the model: a block given to two
        # requests in one step is overwritten before the first of them reads it.
        self._write(scheduled)
        self.cut_short("before the reads")
        tokens = [self._read(request, n) for request, n in scheduled]
        self.cut_short("at the end")
        if self.clock is not None:
            self.clock.t += self.step_time
        return tokens

    def _copy(self, copies):
        B, moved, written = self.manager.block_size, [], set()
        for src, dst, num_blocks, kind in copies:
            expect(kind in self.num_moved, f"unknown kind of copy {kind!r}")
            expect(num_blocks >= 1, f"a copy of {num_blocks} blocks")
            for s, d in zip(
                range(src, src + num_blocks), range(dst, dst + num_blocks), strict=True
            ):
                place = ("host" if kind == "out" else "pool", d)
                expect(place not in written, f"two copies into {place}")
                written.add(place)
                if kind != "out":
                    self._check_id(d, "a copy's destination")
                if kind == "in":
                    expect(s in self.host, f"host block {s} was never written")
                    moved.append((place, self.host[s]))
                else:
                    self._check_id(s, "a copy's source")
                    moved.append((place, self.pool[s * B : s * B + B]))
                self.num_moved[kind] += 1
        for (where, block_id), records in moved:
            if where == "host":
                self.host[block_id] = records
            else:
                self.pool[block_id * B : block_id * B + B] = records

    def _write(self, scheduled):
        num_owners = {}
        for table in self.manager.tables.values():
            for block_id in table:
                num_owners[block_id] = num_owners.get(block_id, 0) + 1
        written, requests = set(), set()
        for request, num_new_tokens in scheduled:
            name = request.request_id
            expect(num_new_tokens >= 1, f"{name!r} is scheduled for {num_new_tokens} tokens")
            expect(name not in requests, f"{name!r} is scheduled twice")
            expect(request.finish_reason is None, f"{name!r} is scheduled, but it has ended")
            requests.add(name)
            start, end = request.num_computed_tokens, request.num_computed_tokens + num_new_tokens
            expect(end <= request.num_tokens, f"{name!r} computes tokens that it does not know")
            records = records_of(request, end)
            for position in range(start, end):
                block_id, slot = self._slot(request, position)
                expect(slot not in written, f"slot {slot} is written twice in one step")
                expect(num_owners[block_id] == 1, f"{name!r} writes to block {block_id}: shared")
                written.add(slot)
                self.pool[slot] = records[position]

    def _read(self, request, num_new_tokens):
        end = request.num_computed_tokens + num_new_tokens
        start = min(request.num_pad_tokens, end)
        read = [self.pool[self._slot(request, position)[1]] for position in range(start, end)]
        if self.strict:
            pairs = enumerate(zip(read, records_of(request, end)[start:], strict=True), start)
            wrong = [position for position, (a, b) in pairs if a != b]
            expect(not wrong, f"{request!r} reads wrong content at positions {wrong}")
        if self.has_bad_logits(request):
            return None
        return next_token(read, request.sample_index)

    def _slot(self, request, position):
        """(block id, slot) of a token position, through the request's table as it is now."""
        table, B = self.manager.tables.get(request.request_id), self.manager.block_size
        expect(table is not None, f"{request!r} runs without a block table")
        expect(
            position < len(table) * B,
            f"{request!r} needs position {position}, but its table has {len(table)} blocks of {B}",
        )
        block_id = table[position // B]
        self._check_id(block_id, f"the table of {request.request_id!r}")
        return block_id, block_id * B + position % B

    def _check_id(self, block_id, what):
        limit = self.manager.num_blocks
        expect(0 <= block_id < limit, f"{what} names block {block_id} of 0 to {limit - 1}")


def engine(
    manager,
    *,
    scheduler=Scheduler,
    step_time=1.0,
    has_bad_logits=None,
    report_every=0,
    **limits,
):
    """The loop over an oracle runner and a fake clock; limits go to the scheduler's class."""
    clock = FakeClock()
    runner = OracleRunner(manager, clock, step_time=step_time, has_bad_logits=has_bad_logits)
    return EngineCore(scheduler(manager, **limits), runner, clock, report_every=report_every)


def reference_of(request):
    """The reference output of a request, from its prompt."""
    return reference(
        request.token_ids[: request.num_prompt_tokens],
        request.max_tokens,
        sample_index=request.sample_index,
        stop_token_ids=request.stop_token_ids,
    )
