"""Hit rate against capacity, on a trace that names its prompts' blocks (chapter 07).

The engine's own prefix cache is asked, no model of one. Time is left out: each request ends before
the next one comes, as if computing took no time, so no block is in use when a request looks its
prompt up, and only the order of requests counts. Answers are left out, too: a trace has no keys for
what was generated.
"""

import math
import time
from dataclasses import asdict, dataclass
from itertools import islice

from minikv.kv_cache.base import cdiv
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.request import require_int
from minikv.workloads.traces import open_trace

# Without "pinned": a trace names no prefix that somebody would pin.
POLICIES = ("lru", "fifo", "lfu")

CAPACITIES = (100_000, 1_000_000, 2_000_000, 5_000_000, 10_000_000, 50_000_000, math.inf)
FIG9_CAPACITIES = (10**4, 10**5, 10**6, 2 * 10**6, 4 * 10**6, 5 * 10**6, 8 * 10**6)
FIG9_CAPACITIES += (10**7, 5 * 10**7, 10**8, 5 * 10**8, 10**9)
SHOWN = 0.1  # points between two policies that are worth a line
NEARLY_ALL = 0.99  # of the hits with infinite capacity


@dataclass(frozen=True)
class PublishedTrace:
    """A trace of Qin et al., FAST'25 ("Mooncake"). cache_ratio: its Table 2, in percent, rounded
    there. fig9: its Fig. 9 at FIG9_CAPACITIES, in percent, read off the curve in the file. Neither
    says whether tokens or blocks are counted, or of what size. (Table 1 of the authors' earlier
    report, 51% at infinite capacity, is of another trace.)"""

    name: str
    num_requests: int
    mean_prompt_tokens: int
    cache_ratio: float
    fig9: tuple[float, ...]


MOONCAKE_PAPER = (
    PublishedTrace(
        "Conversation",
        12_031,
        12_035,
        40.0,
        (4.5, 7.3, 8.7, 12.0, 21.5, 24.7, 30.0, 32.6, 39.8, 40.1, 40.1, 40.1),
    ),
    PublishedTrace(
        "Tool&Agent",
        23_608,
        8_596,
        59.0,
        (17.3, 36.3, 38.6, 41.4, 48.4, 50.5, 54.4, 56.1, 59.5, 59.5, 59.5, 59.5),
    ),
    PublishedTrace(
        "Synthetic",
        3_993,
        15_325,
        66.0,
        (0.0, 1.2, 14.6, 23.5, 38.0, 43.5, 54.5, 58.9, 65.8, 65.8, 65.8, 65.8),
    ),
)


@dataclass
class HitCounts:
    """Hits of a run, and what could have been hit: the prompts' full blocks, all their tokens.
    num_refused: requests longer than the pool. What they ask for counts as missed."""

    num_requests: int = 0
    num_refused: int = 0
    hit_blocks: int = 0
    full_blocks: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def block_rate(self) -> float:
        """Percent of the prompts' full blocks."""
        return 100 * self.hit_blocks / self.full_blocks if self.full_blocks else 0.0

    @property
    def token_rate(self) -> float:
        """Percent of the prompts' tokens, those of partly filled last blocks included."""
        return 100 * self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass
class TraceFacts:
    """What stands in a trace, before any cache. longest: a prompt's tokens at most."""

    num_requests: int = 0
    prompt_tokens: int = 0
    full_blocks: int = 0
    different_blocks: int = 0
    longest: int = 0

    @property
    def published(self) -> PublishedTrace | None:
        """The paper's trace that this one is, told by its size."""
        if not self.num_requests:
            return None
        size = self.num_requests, int(self.prompt_tokens / self.num_requests)
        fits = [p for p in MOONCAKE_PAPER if (p.num_requests, p.mean_prompt_tokens) == size]
        return fits[0] if fits else None

    def blocks_for_all(self, block_size) -> int:
        """Blocks enough to forget nothing: every different one, and a longest prompt to work in."""
        return self.different_blocks + cdiv(self.longest, block_size)


def facts_of(requests, block_size, num_requests=None) -> TraceFacts:
    facts, different = TraceFacts(), set()
    for request in islice(requests, num_requests):
        facts.num_requests += 1
        facts.prompt_tokens += request.num_prompt_tokens
        facts.full_blocks += request.num_prompt_tokens // block_size
        facts.longest = max(facts.longest, request.num_prompt_tokens)
        different.update(request.block_hashes)
    facts.different_blocks = len(different)
    return facts


def hits_run(requests, manager, on_request=None) -> HitCounts:
    """Each request's prompt looked up in manager, computed in one step and freed, in this order.

    requests: new ones, with block_hashes for blocks of manager.block_size. on_request: called
    after each.
    """
    counts = HitCounts()
    for request in requests:
        num_tokens = request.num_prompt_tokens
        counts.num_requests += 1
        counts.prompt_tokens += num_tokens
        counts.full_blocks += num_tokens // manager.block_size
        num_hit = manager.get_num_cached_tokens(request)
        room = manager.allocate_slots(request, num_tokens - num_hit, num_cached_tokens=num_hit)
        if room is None:
            counts.num_refused += 1
        else:
            counts.hit_tokens += num_hit
            counts.hit_blocks += num_hit // manager.block_size
            request.num_computed_tokens = num_tokens
            manager.cache_blocks(request)
            request.finish_reason = "length"
            manager.free(request)
        if on_request is not None:
            on_request()
    return counts


def coarser(requests, block_size):
    """The same requests for blocks of 2 * block_size: a key names all before it, so every second
    one is the key of a block twice as large."""
    for request in requests:
        hashes = request.block_hashes[: request.num_prompt_tokens // block_size]
        request.block_hashes = hashes[1::2]
        yield request


def measure(trace, facts, capacities, policies, *, num_requests=None, on_request=None) -> dict:
    """Every policy at every capacity (tokens, or inf); the trace is read anew for each.

    With infinite capacity, where no policy has a say, blocks of twice the size are tried as well.

    Returns {trace, facts, block_size, published, rows, twice, requests_per_s}; a row is {policy,
    capacity_tokens, num_blocks, block_rate, token_rate, fig9} and the counts. twice: the percent of
    tokens hit in blocks of twice the size; None where capacity is never infinite.
    """
    block_size, all_blocks = trace.block_size, facts.blocks_for_all(trace.block_size)
    published, rows, twice, start = facts.published, [], None, time.perf_counter()
    for capacity in capacities:
        num_blocks = all_blocks if capacity == math.inf else capacity // block_size
        for policy in policies:
            # A larger pool than one that forgets nothing would only take memory here.
            made = min(num_blocks, all_blocks)
            manager = PrefixCachingKVCacheManager(made, block_size, eviction=policy)
            counts = hits_run(islice(trace, num_requests), manager, on_request)
            rows.append(
                {
                    "policy": policy,
                    "capacity_tokens": "inf" if capacity == math.inf else capacity,
                    "num_blocks": num_blocks,
                    "block_rate": counts.block_rate,
                    "token_rate": counts.token_rate,
                    "fig9": _fig9(published, capacity),
                    **asdict(counts),
                }
            )
    if math.inf in capacities:
        manager = PrefixCachingKVCacheManager(all_blocks, 2 * block_size)
        requests = coarser(islice(trace, num_requests), block_size)
        twice = hits_run(requests, manager, on_request).token_rate
    seconds = time.perf_counter() - start
    return {
        "trace": str(trace.path),
        "block_size": block_size,
        "facts": asdict(facts),
        "published": asdict(published) if published else None,
        "rows": rows,
        "twice": twice,
        "requests_per_s": num_runs(capacities, policies) * facts.num_requests / seconds,
    }


def num_runs(capacities, policies) -> int:
    return len(capacities) * len(policies) + (math.inf in capacities)


def _fig9(published, capacity):
    if published is None:
        return None
    if capacity == math.inf:
        return published.fig9[-1]
    return dict(zip(FIG9_CAPACITIES, published.fig9, strict=True)).get(capacity)


def open_for_hits(path, *, strict=False, report=None):
    """The trace in this file; raises ValueError for one that does not name its blocks."""
    options = {} if report is None else {"report": report}
    trace = open_trace(path, strict=strict, **options)
    if trace.block_size is None:
        raise ValueError(
            f"{path} has the format {trace.format}, with lengths alone: which prompts begin alike "
            "it does not say, so no hit rate can be found"
        )
    return trace


def check(capacities, policies, block_size):
    """Raises ValueError for what cannot be measured, before anything is."""
    for capacity in capacities:
        if capacity != math.inf:
            require_int("--capacity-tokens", capacity, at_least=block_size)
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        raise ValueError(f"--policy is {unknown[0]!r}; known: {', '.join(POLICIES)}")


# -- what is printed ------------------------------------------------------------------------------


def setting(trace, facts) -> str:
    mean = facts.prompt_tokens / facts.num_requests
    return (
        f"{trace.summary()}\n"
        f"{facts.prompt_tokens:,} prompt tokens, {mean:,.0f} a request; {facts.full_blocks:,} full "
        f"blocks of {trace.block_size}, {facts.different_blocks:,} of them different.\n"
        "Each request ends before the next one comes, as if computing took no time; its answer is "
        "left out.\n"
    )


def print_result(result):
    policies = list(dict.fromkeys(row["policy"] for row in result["rows"]))
    capacities = list(dict.fromkeys(row["capacity_tokens"] for row in result["rows"]))
    table = {(row["capacity_tokens"], row["policy"]): row for row in result["rows"]}
    published = result["published"]
    print("Hit blocks, percent of the prompts' full blocks (in brackets: hit tokens, percent of")
    print("all prompt tokens):\n")
    paper = f"{'paper, Fig. 9':>16}" if published else ""
    heads = "".join(f" {policy:>15}" for policy in policies)
    print(f"{'capacity, tokens':>16} {'blocks':>9}{heads}{paper}{'refused':>10}")
    for capacity in capacities:
        rows = [table[capacity, policy] for policy in policies]
        cells = "".join(f" {_cell(row):>15}" for row in rows)
        shown = capacity if capacity == "inf" else f"{capacity:,}"
        if published:
            cells += f"{'' if rows[0]['fig9'] is None else format(rows[0]['fig9'], '.1f'):>16}"
        print(f"{shown:>16} {rows[0]['num_blocks']:>9,}{cells}{rows[0]['num_refused']:>10,}")
    if any(row["num_refused"] for row in result["rows"]):
        print("\nrefused: requests longer than the pool; what they ask for counts as missed.")
    print()
    for line in conclusions(result):
        print(line)
    print(f"\n{result['requests_per_s']:,.0f} requests/s, the reading of the trace included.")


def _cell(row):
    return f"{row['block_rate']:.1f} ({row['token_rate']:.1f})"


def conclusions(result) -> list[str]:
    """What these rows say, each with its numbers: nothing that another run could contradict."""
    rows, lines = result["rows"], []
    infinite = [row for row in rows if row["capacity_tokens"] == "inf"]
    if infinite and result["published"]:
        lines += _beside_the_paper(infinite[0], result)
    for row in infinite[:1]:
        enough = [r for r in rows if r["policy"] == row["policy"] and r is not row]
        enough = [r for r in enough if r["hit_blocks"] >= NEARLY_ALL * row["hit_blocks"]]
        if enough:
            least = min(enough, key=lambda r: r["num_blocks"])
            lines.append(
                f"{least['capacity_tokens']:,} tokens are the least of these capacities at which "
                f"{row['policy']} has {NEARLY_ALL:.0%} of the hits that infinite capacity has."
            )
    for capacity in dict.fromkeys(row["capacity_tokens"] for row in rows):
        here = sorted((r for r in rows if r["capacity_tokens"] == capacity), key=_hits)
        worst, best = here[0], here[-1]
        if capacity != "inf" and best["block_rate"] - worst["block_rate"] >= SHOWN:
            lines.append(
                f"At {capacity:,} tokens {best['policy']} finds most, {worst['policy']} least: "
                f"{best['block_rate'] - worst['block_rate']:.1f} points apart."
            )
    return lines


def _hits(row):
    return row["hit_blocks"]


def _beside_the_paper(row, result):
    """At infinite capacity, which no policy changes."""
    paper, tokens, twice = result["published"], row["token_rate"], result["twice"]
    ratio, curve, B = paper["cache_ratio"], paper["fig9"][-1], result["block_size"]
    finest = tokens + (tokens - twice)
    return [
        f"The paper's {paper['name']} trace (FAST'25). With infinite capacity its Table 2 has a "
        f"cache ratio of {ratio:.0f}%. Here {row['block_rate']:.1f}% of full blocks are hit, "
        f"{row['block_rate'] - ratio:+.1f} points from it, and {tokens:.1f}% of tokens, "
        f"{tokens - ratio:+.1f}.",
        f"Block size: with blocks of {2 * B:,}, {twice:.1f}% of tokens are hit. What is lost where "
        f"prompts part inside a block grows with the block, so with the smallest it would be about "
        f"{tokens:.1f} + ({tokens:.1f} - {twice:.1f}) = {finest:.1f}%. The paper's Fig. 9 ends at "
        f"{curve:.1f}%; it does not say what it counts.",
    ]
