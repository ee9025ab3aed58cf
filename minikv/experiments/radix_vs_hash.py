"""Two indexes of one cache, on the same traffic (chapter 07): a map of chained hashes and a radix
tree. What each finds, what asking it costs, and what it takes to remember.

Time is left out of the traffic: each request ends before the next one comes, so only their order
counts. Prompts are computed in one step; an answer's tokens are appended one by one, as a decode
step does.
"""

import gc
import random
import tracemalloc
from dataclasses import asdict, dataclass
from itertools import islice
from time import process_time_ns

from minikv.experiments.hits import facts_of
from minikv.kv_cache.base import cdiv
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.kv_cache.radix import RadixKVCacheManager
from minikv.request import Request, require_int

INDEXES = {"hashes": PrefixCachingKVCacheManager, "tree": RadixKVCacheManager}
BLOCK_SIZES = (16, 1)
SHARES = (1.0, 0.25)  # of a pool that forgets nothing
HEADERS = (200, 312, 75)  # tokens of instructions before every chat of a kind
VOCAB_SIZE = 32_000


@dataclass(frozen=True)
class Turn:
    """What a request is made of. prompt: its arguments. answer: the tokens that it is to emit."""

    prompt: dict
    answer: tuple = ()

    def request(self, request_id):
        return Request(request_id, max_tokens=len(self.answer) + 1, **self.prompt)


@dataclass(frozen=True)
class Traffic:
    """turns, in order of arrival. num_slots: tokens of a pool that forgets nothing."""

    name: str
    turns: list
    num_slots: int


def chats(num_chats=60, num_turns=6, seed=0) -> Traffic:
    """Chats of num_turns turns under one of three headers. Each turn's prompt is all that was said
    before and a new message; turns of different chats come mixed. Made up: 5 to 80 tokens a
    message, 40 to 200 an answer, drawn evenly."""
    require_int("num_chats", num_chats, at_least=1)
    require_int("num_turns", num_turns, at_least=1)
    rnd = random.Random(seed)

    def tokens(low, high):
        return [rnd.randrange(VOCAB_SIZE) for _ in range(rnd.randint(low, high))]

    headers = [tokens(n, n) for n in HEADERS]
    said = [list(rnd.choice(headers)) for _ in range(num_chats)]
    order = [chat for chat in range(num_chats) for _ in range(num_turns)]
    rnd.shuffle(order)
    turns = []
    for chat in order:
        prompt, answer = said[chat] + tokens(5, 80), tokens(40, 200)
        turns.append(Turn({"prompt_token_ids": prompt}, tuple(answer)))
        said[chat] = prompt + answer
    longest = max(len(each) for each in said)
    rounding = len(turns) * max(BLOCK_SIZES)
    name = f"{num_chats} chats of {num_turns} turns"
    return Traffic(name, turns, sum(map(len, said)) + longest + rounding)


def traced(trace, num_requests=None) -> Traffic:
    """A trace that names its blocks (see minikv.workloads.traces), without its answers."""
    facts = facts_of(trace, trace.block_size, num_requests)
    turns = [
        Turn({"num_prompt_tokens": r.num_prompt_tokens, "block_hashes": r.block_hashes})
        for r in islice(trace, num_requests)
    ]
    num_slots = facts.blocks_for_all(trace.block_size) * trace.block_size
    return Traffic(f"{trace.format}, {len(turns):,} requests", turns, num_slots)


@dataclass
class Run:
    """What was counted. us_per_request: CPU time to ask, take, publish and give back, without the
    answer. us_per_output_token: the same for one token more. num_cached_tokens: kept when all have
    ended. index_bytes: memory for that; pool_bytes: that of the manager as made.
    """

    traffic: str
    index: str
    block_size: int
    num_slots: int
    prompt_tokens: int = 0
    hit_tokens: int = 0
    num_copied_blocks: int = 0
    num_evictions: int = 0
    us_per_request: float = 0.0
    us_per_output_token: float = 0.0
    index_bytes: int = 0
    pool_bytes: int = 0
    num_cached_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Percent of the prompts' tokens."""
        return 100 * self.hit_tokens / self.prompt_tokens

    @property
    def bytes_per_token(self) -> float:
        return self.index_bytes / self.num_cached_tokens if self.num_cached_tokens else 0.0


def replay(turns, manager, run, on_request=None) -> None:
    """Serves the turns one after another, and adds what is counted to run. on_request: called after
    each."""
    ns_requests = ns_tokens = num_tokens = 0
    for i, turn in enumerate(turns):
        request = turn.request(f"r{i}")
        start = process_time_ns()
        num_hit = manager.get_num_cached_tokens(request)
        extra = {"num_cached_tokens": num_hit} if num_hit else {}
        table = manager.allocate_slots(request, request.num_tokens - num_hit, **extra)
        copies = manager.copies()
        ns_requests += process_time_ns() - start
        run.prompt_tokens += request.num_prompt_tokens
        if on_request is not None:
            on_request()
        if table is None:  # longer than the pool
            continue
        run.hit_tokens += num_hit
        run.num_copied_blocks += len(copies)
        request.num_computed_tokens = request.num_tokens
        start = process_time_ns()
        manager.cache_blocks(request)
        middle = process_time_ns()
        for token in turn.answer:
            request.append(token)
            if manager.allocate_slots(request, 1) is None:
                break
            request.num_computed_tokens += 1
            manager.cache_blocks(request)
            num_tokens += 1
        end = process_time_ns()
        request.finish_reason = "length"
        manager.free(request)
        ns_requests += process_time_ns() - end + middle - start
        ns_tokens += end - middle
    run.num_evictions = manager.num_evictions
    run.num_cached_tokens = manager.num_cached_free_blocks * manager.block_size
    run.us_per_request = ns_requests / len(turns) / 1000
    run.us_per_output_token = ns_tokens / num_tokens / 1000 if num_tokens else 0.0


def served(traffic, index, block_size, num_slots, on_request=None) -> Run:
    """The traffic, once, through a new manager with this index and about num_slots slots."""
    num_blocks = cdiv(num_slots, block_size)
    run = Run(traffic.name, index, block_size, num_blocks * block_size)
    replay(traffic.turns, INDEXES[index](num_blocks, block_size), run, on_request)
    return run


def bytes_of(traffic, index, block_size, num_slots, on_request=None) -> tuple[int, int]:
    """(pool_bytes, index_bytes) of the same: in a replay of its own, since it takes time to keep
    account of memory."""
    tracemalloc.start()
    try:
        manager = INDEXES[index](cdiv(num_slots, block_size), block_size)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        replay(traffic.turns, manager, Run(traffic.name, index, block_size, 0), on_request)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return before, after - before


def compare(traffic, block_sizes=BLOCK_SIZES, *, rounds=3, on_request=None) -> list[Run]:
    """Both indexes, for every block size, in pools of SHARES of one that forgets nothing. Times are
    CPU time, the least of some rounds, which take turns."""
    cases = [
        (index, block_size, int(share * traffic.num_slots))
        for share in SHARES
        for block_size in block_sizes
        for index in INDEXES
    ]
    tried = [[served(traffic, *case, on_request) for case in cases] for _ in range(rounds)]
    found = []
    for case, runs in zip(cases, zip(*tried, strict=True), strict=True):
        best = min(runs, key=lambda run: run.us_per_request)
        best.us_per_output_token = min(run.us_per_output_token for run in runs)
        best.pool_bytes, best.index_bytes = bytes_of(traffic, *case, on_request)
        found.append(best)
    return found


def num_runs(block_sizes=BLOCK_SIZES, *, rounds=3) -> int:
    """How often compare() replays the traffic."""
    return len(SHARES) * len(block_sizes) * len(INDEXES) * (rounds + 1)


def print_result(runs) -> None:
    name = None
    for run in runs:
        if run.traffic != name:
            name = run.traffic
            print(f"\n{name}: {run.prompt_tokens:,} prompt tokens")
            print(
                f"{'index':8} {'block':>5} {'pool, tokens':>13} {'hit tokens':>11} {'hit %':>6} "
                f"{'copied':>7} {'evicted':>8} {'us/request':>10} {'us/token':>9} {'index MB':>9} "
                f"{'bytes/token':>11} {'blocks MB':>9}"
            )
        print(
            f"{run.index:8} {run.block_size:>5} {run.num_slots:>13,} {run.hit_tokens:>11,} "
            f"{run.hit_rate:>6.1f} {run.num_copied_blocks:>7,} {run.num_evictions:>8,} "
            f"{run.us_per_request:>10.1f} {run.us_per_output_token:>9.2f} "
            f"{run.index_bytes / 1e6:>9.2f} {run.bytes_per_token:>11.2f} "
            f"{run.pool_bytes / 1e6:>9.2f}"
        )


def as_json(runs) -> list[dict]:
    return [
        asdict(run) | {"hit_rate": run.hit_rate, "bytes_per_token": run.bytes_per_token}
        for run in runs
    ]
