# %% [markdown]
# # 03 Fragmentation
#
# A request waits. It needs a third of the pool, and two fifths of the pool are free. This chapter
# is the investigation. It adds to `minikv`:
#
# | file | what it is |
# |---|---|
# | `kv_cache/extents.py` | which free extent is cut, and how fragmented the rest is |
# | `kv_cache/extent_base.py`, `kv_cache/extent_tree.py` | what each of them promises; the tree that makes them fast |
# | `kv_cache/buddy.py` | the same in powers of two |
# | `kv_cache/contiguous.py` | grows: five ways to reserve, relocation, compaction |
#
# **Predict, run, explain**, as before.

# %% imports
import time
from functools import partial

import numpy as np

import minikv.viz as viz
from minikv import LLM, ContiguousKVCacheManager, Request, SamplingParams, show
from minikv.experiments import FIG2_PAPER, NUM_SLOTS, fig2_run, lab_run, paper_manager
from minikv.kv_cache.extents import external_fragmentation, make_allocator
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation, StepTime
from minikv.specs import GPUS, MODELS
from minikv.static_batching import StaticScheduler
from minikv.viz import MemoryRecorder, batch, enough_in_sum, gantt
from minikv.workloads import alpaca, shared_header, sharegpt

# %% [markdown]
# ## The case
#
# A service with long and short prompts: nineteen in twenty are short questions, each behind the same
# 200 tokens of instructions; one in twenty is a document. <!-- source: minikv.workloads.shared_header -->
#
# Each request gets **one extent**, a run of neighbouring slots. How long? Five ways to `reserve`:
#
# | | at admission |
# |---|---|
# | `max` | the longest that is allowed, `max_model_len` |
# | `pow2` | the prompt, and the answer's limit rounded up to a power of two |
# | `exact` | all that it will need. No server knows that; it is the best one could hope for |
# | `double`, `grow` | what is known now; later twice as much, or block by block |
#
# We begin with `exact`.

# %% service
traffic = shared_header(rate=2.0)
step_time = StepTime(MODELS["Vicuna 13B v1.5 16K"], GPUS["H100 SXM"])


def extents(reserve="exact", fit="first", block_size=1, max_model_len=8192, of=ContiguousKVCacheManager):
    num_blocks = NUM_SLOTS // block_size
    return of(num_blocks, block_size, max_model_len=max_model_len, reserve=reserve, fit=fit)


needs = np.array([r.max_kv_tokens for r in traffic.requests(duration_s=3600, seed=0)])
print(f"a pool of {NUM_SLOTS:,} slots, {NUM_SLOTS * step_time.model.kv_bytes_per_token / 1e9:.1f} GB")
print(f"{len(needs):,} requests in an hour; slots needed: median {np.median(needs):,.0f}, "
      f"one in twenty {np.percentile(needs, 95):,.0f}, at most {needs.max():,}")

# %% [markdown]
# The simulator of chapter 02 plays it, the engine's own loop without tensors. A recorder writes down
# what the memory looked like: every second, and whenever a request is refused at its **first
# attempt**, when it first stands at the head of the queue.

# %% hour
def serve(manager, traffic=traffic, step_time=step_time, seconds=3600, every_s=1.0, seed=0):
    "First come, first served, until the time is up."
    scheduler = Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=2560)
    run = Simulation(scheduler, step_time)
    recorder = MemoryRecorder(run.core, every_s=every_s, max_rows=10_000)
    requests = traffic.requests(duration_s=seconds, seed=seed)
    run.run(requests, on_step=recorder, until_s=seconds)
    run.memory = recorder.recording
    return run


hour = serve(extents())
refusals = hour.memory.refusals
much_free = [r for r in refusals if enough_in_sum(r) and r.free_slots >= 0.4 * NUM_SLOTS]
print(f"{len(refusals):,} requests refused at their first attempt, {len(much_free)} of them "
      "with 40% free and more than they need")

# %% [markdown]
# This is the one of them that waited longest.

# %% the-refusal
by_id = {r.request_id: r for r in hour.requests}


def wait_of(refusal):
    return by_id[refusal.waiting[0].request_id].first_scheduled_time - refusal.time_s


case = max(much_free, key=wait_of)
NAME = case.waiting[0].request_id
card, drawn = viz.memory_map(case)
assert drawn["gap"][1] < drawn["needed"] <= drawn["free"]
print(f"{case.free_slots / NUM_SLOTS:.0%} is free, the largest gap is {case.largest_free_slots / NUM_SLOTS:.0%}, "
      f"{NAME} needs {drawn['needed'] / NUM_SLOTS:.0%}. It waits {wait_of(case):.1f} s.")
card

# %% [markdown]
# Four explanations, as one would hear them in the meeting:
#
# | | what it would mean |
# |---|---|
# | **a leak** | some slots belong to nobody any more |
# | **too little memory** | buy more |
# | **fragmentation** | there is enough, in pieces that are too short |
# | **a slow kernel** | requests stay too long |
#
# > **Predict.** You may have a favourite. What would you measure to *refute* it?
#
# ## 1. By hand, in ten cells
#
# Ten cells, and five requests that need two each. Whoever comes takes the first gap that is long
# enough: **first fit**.

# %% by-hand
def first_fit(pool, name, size):
    start = pool.find("." * size)
    return pool[:start] + name * size + pool[start + size :] if start >= 0 else None


pool = "." * 10
for name in "ABCDE":
    pool = first_fit(pool, name, 2)
print(pool)
pool = pool.replace("B", ".").replace("D", ".")
print(pool, "B and D have left:", pool.count("."), "cells are free")
print("F needs 3:", first_fit(pool, "F", 3))

# %% [markdown]
# Why must three cells lie side by side? Nothing in attention asks for it. It is how the cache was
# stored: token *i* stands at start + *i*. What F lacks is not memory but **adjacency**.
#
# > **Predict.** The next to leave is one of A, C and E. Whose leaving lets F in?

# %% who-leaves
for name in "ACE":
    print(name, "leaves:", first_fit(pool.replace(name, "."), "F", 3))

# %% [markdown]
# Anyone's: each has a gap beside it, and the two become one. An allocator has to see that, on both
# sides; it is called **coalescing**.
#
# The same in the engine: ten blocks of four slots, and the loop decides. B and D want the shortest
# answers. All five hold two blocks.

# %% engine-ten
core = Simulation(Scheduler(ContiguousKVCacheManager(10, 4, max_model_len=40, reserve="exact")), step_time).core
for name, prompt, output in (("A", 4, 4), ("B", 7, 2), ("C", 3, 6), ("D", 7, 2), ("E", 2, 7)):
    core.submit(Request(name, num_prompt_tokens=prompt, max_tokens=output))
core.step()
core.step()
core.submit(Request("F", num_prompt_tokens=9, max_tokens=4))
core.step()
before = viz.moment(core)
card, drawn = viz.memory_map(before)
assert (drawn["free"], drawn["needed"], drawn["gap"]) == (16, 12, (8, 8))
card

# %% [markdown]
# The measure: **external fragmentation**, the share of the *free* memory outside of the largest gap.
# (External: between extents. Chapter 02's waste was internal: inside of them.)

# %% measure
print(f"here: {external_fragmentation(core.manager.allocator.extents()):.0%}")
show(external_fragmentation)

# %% after
while "F" not in core.manager.tables:
    core.step()
card, drawn = viz.memory_maps([("F waits", before), ("F runs", viz.moment(core))])
assert drawn[0]["request"] == "F" and drawn[1]["request"] is None
card

# %% [markdown]
# F had not waited for *memory*, but for somebody to move out next door.
#
# ## 2. An hour of traffic
#
# The minute around the case. Each band is a request, as long as it holds its
# slots; the waiting document is in colour. Marks above are refusals, black where the sum was enough.

# %% minute
minute = hour.memory.between(570, 625)
card, strip = viz.memory_strip(minute, title="55 seconds", highlight=[NAME])
assert len(strip.refused) == len(minute.refusals) and NAME in strip.names
card

# %% [markdown]
# > **Predict.** While the document waits, others end, and nobody who came later may overtake it.
# > What happens to the free memory, and to the largest gap?

# %% two-lines
card, drawn = viz.free_vs_largest(minute, title="The same seconds: free memory, and the largest piece of it")
assert all(largest <= free for free, largest in zip(drawn["free"], drawn["largest"], strict=True))
print(f"at most {max(drawn['free']):.0%} is free in this minute")
card

# %% [markdown]
# The free memory climbs, the largest gap does not follow. The upper line promises room to the marks
# between the two, and the lower one denies it. (A mark has its own moment, the lines are up to a
# second old: hence the filled ones below both.) Near the right end most of the pool is free, and
# still the next document waits. (`viz.memory_player(minute)` plays it.) The whole hour, smoothed:

# %% whole-hour
moments = hour.memory.moments
times, free, largest, running = (
    np.array([getattr(m, name) for m in moments])
    for name in ("time_s", "free_slots", "largest_free_slots", "num_running")
)
needed = np.array([m.waiting[0].needed_slots if m.waiting else 0 for m in moments])
card, drawn = viz.free_vs_largest(hour.memory, min_free_share=0.4, title="The whole hour")
assert sum(enough for _, _, enough in drawn["refused"]) == len(much_free)
print(f"on average {free.mean() / NUM_SLOTS:.0%} is free, {largest.mean() / NUM_SLOTS:.0%} in one piece")
card

# %% [markdown]
# Now the damage.
#
# > **Predict.** Sort those moments by how much is free. With more free memory, are more tokens
# > made per second, or fewer?

# %% damage
steps = hour.core.metrics.steps
made = np.interp(times, [step.end for step in steps], np.cumsum([step.num_seqs for step in steps]))
tokens_per_s = np.append(np.diff(made) / np.diff(times), np.nan)  # from each look to the next
waits = needed > largest
enough_free = waits & (needed <= free)
print(f"somebody waits {waits.mean():.0%} of the time, though the sum is enough {enough_free.mean():.0%}")
print("free        of the time   running   tokens/s")
tenths = np.minimum(10 * free // NUM_SLOTS, 5)  # half and more is one class
for low in range(6):
    here = waits & (tenths == low)
    print(f"{low / 10:4.0%} and up {here.mean():10.0%} {running[here].mean():10.1f} "
          f"{np.nanmean(tokens_per_s[here]):10.0f}")

# %% [markdown]
# Fewer: with half the pool free and a queue at the door, the batch is at its smallest. That is the
# paradox in one table.
#
# Now the suspects. **A leak** is memory that stays lost. So we stop the traffic, let everybody finish,
# and look.

# %% leak
hour.core.manager.check()  # raises unless every slot has one owner or is free
summary = hour.summary()
hour.core.run()
print("after the last request has left, the free extents are", hour.core.manager.allocator.extents())
assert hour.core.manager.allocator.largest_free_extent == NUM_SLOTS

# %% [markdown]
# One gap, the whole pool. A leak does not heal; fragmentation does, as soon as nobody is there. (A
# restart "repairs" both: hence the confusion.) **Too little memory?**

# %% too-little
enough = [r for r in refusals if enough_in_sum(r)]
shares = np.array([r.free_slots for r in enough]) / NUM_SLOTS
print(f"refused: {len(refusals):,}; the sum was enough for {len(enough):,}, "
      f"too little for {len(refusals) - len(enough):,}")
print(f"free when the sum was enough: median {np.median(shares):.0%}, largest {shares.max():.0%}")

# %% [markdown]
# In the smaller part memory was short; in the larger there was enough. Cases like ours are rare, says
# the median: the ordinary refusal is a question that finds a tenth of the pool free, in crumbs.
#
# **A slow kernel?** It would show between the tokens of those who run.

# %% kernel
print("ms              p50      p99")
for name in ("itl", "queue_time", "ttft"):
    print(f"{name:10} {summary[f'p50_{name}_ms']:8,.0f} {summary[f'p99_{name}_ms']:8,.0f}")

# %% [markdown]
# Whoever runs gets tokens at an even pace; nearly all of the wait is spent in the queue. (On a server
# these three lines are the check; our step times are a model.) So we also make the kernels impossibly
# good, and ask what else it takes:
#
# > **Predict.** Which of these end the refusals with 40% free: better kernels; half the traffic;
# > chats instead of documents; a slab of the maximal length for everyone; `pow2`?
#
# *Enough*: refusals of those whose need was at most the sum. *Median*, *most*: the share that was
# free then; *≥ 40%*: how often as much. *Running*: mean batch. *TTFT*: median time to first token.

# %% when
ideal = StepTime(step_time.model, step_time.gpu, compute_efficiency=1.0, memory_efficiency=1.0, overhead_s=0.0)
for_20_minutes = partial(serve, seconds=1200, every_s=5)
chat = sharegpt(rate=3.0)
twenty = {
    "as it was": for_20_minutes(extents()),
    "perfect kernels": for_20_minutes(extents(), step_time=ideal),
    "half the traffic": for_20_minutes(extents(), shared_header(rate=1.0)),
    "chats, 3/s": for_20_minutes(extents(max_model_len=2048), chat),
    "chats, slabs": for_20_minutes(extents("max", max_model_len=2048), chat),
    "pow2": for_20_minutes(extents("pow2")),
}

# %% when-table
def row(name, run):
    refused = run.memory.refusals
    shares = [r.free_slots / NUM_SLOTS for r in refused if enough_in_sum(r)]
    s, p50, most = run.summary(), np.median(shares or [0]), max(shares, default=0)
    print(f"{name:17}{len(refused):8}{len(shares):8}{p50:8.0%}{most:6.0%}{sum(x >= 0.4 for x in shares):7}"
          f"{s['mean_num_seqs']:9.1f}{s['output_throughput']:10,.0f}{s['p50_ttft_ms'] / 1e3:9.1f}")


HEAD = f"{'20 minutes':17} refused  enough  median  most  ≥ 40%  running  tokens/s  TTFT, s"
print(HEAD)
for name, run in twenty.items():
    row(name, run)
print("slabs leave", NUM_SLOTS % 2048, "slots over, which is less than one slab")

# %% [markdown]
# - Kernels that nobody can build empty the pool sooner, as less traffic would: a ninth of the
#   refusals, no wait at the median. But cases like ours remain. The exposure shrinks; the mechanism
#   stays.
# - With half the traffic hardly anyone is refused; a *long* request still can be, in a pool that is
#   mostly free.
# - Chats are all short beside the pool. Each finds some gap before much has gathered.
# - Slabs of one length leave no gap that is too short, except the remainder at the end. They pay
#   inside instead, and serve the fewest.
# - `pow2` has extents of different lengths too, only longer ones: more refusals, a longer wait.
#
# So it takes extents of **different lengths**, that end in **another order** than they came, and
# requests that need much of the pool. *On the board: the leak is out; the
# kernel explains load, not gaps.*
#
# ## 3. Which waste is which
#
# | | the slots are | cured by |
# |---|---|---|
# | **reserved** | held for tokens that will come | reserving later |
# | **internal** | held, and never used | knowing the length |
# | **rounding** | the allocator's own addition | another allocator |
# | **external** | nobody's, in pieces too short for the next | adjacency, or doing without it |
#
# Here are all four, in a minute of the server that made them famous: OPT-13B on an A100, chats,
# and a buddy allocator, which hands out powers of two (Kwon et al. 2023).

# %% strips
a100 = StepTime(MODELS["OPT-13B"], GPUS["A100 40GB SXM"])
recordings = []
for policy in ("max", "pow2", "exact"):
    run = serve(paper_manager(policy), sharegpt(rate=2.0), a100, seconds=180, every_s=0.25)
    recordings.append((f"reserve {policy!r}, buddy", run.memory.between(120, 180)))
card, strips = viz.memory_strips(recordings)
assert [strip.refused != [] for strip in strips] == [True] * 3
card

# %% [markdown]
# Their Figure 2 says how much each kind takes on average. We rebuild it with the same loop.
#
# > **Predict.** For `max`, in percent of the pool: how much holds K and V?

# %% figure-2
print("percent of the pool; in brackets Kwon et al. 2023, Figure 2")
print(f"{'':18}{'tokens':>14}{'reserved':>14}{'internal':>14}{'external':>14}")
measured = {}
for policy in ("max", "pow2", "exact", "first_fit_exact"):
    measured[policy] = fig2_run(policy, duration_s=1200, warmup_s=300, report_every=40)
    paper = {name: f"({value:.1f})" for name, value in FIG2_PAPER.get(policy, {}).items()}
    shares = measured[policy].shares
    print(f"{policy:18}" + "".join(f"{x:7.1f} {paper.get(name, ''):>6}" for name, x in shares.items()))
print(f"of exact's external: {measured['exact'].report.rounding / NUM_SLOTS:.0%} of the pool is the buddy's rounding")

# %% [markdown]
# All within four points, though we guessed the traffic's shape (`python -m minikv simulate fig2` plays
# whole hours). The column "external" has the paper's meaning, all that no request
# holds *and* the buddy's rounding, which is most of it; neither our table's nor section 1's, which
# divides by the free memory.
#
# The row `first_fit_exact` is ours: the same oracle with first fit. Its "external" is simply what is
# free, and the most that compaction could win.
#
# ## 4. First, best, next, worst fit, buddy
#
# If gaps are the trouble, choose better which gap to cut? Three gaps, of five, three and six
# blocks, and a request for three:

# %% choices
def three_gaps(fit):
    allocator = make_allocator(fit, 20)
    for at in (5, 10, 18):
        allocator.allocate_at(at, 2)
    return allocator


for fit in ("first", "best", "worst"):
    allocator = three_gaps(fit)
    start = allocator.allocate(3)
    print(f"{fit:6} takes block {start:2}; left: {[e.num_blocks for e in allocator.extents()]}")

# %% [markdown]
# Best is the shortest that is long enough, worst the longest. Next fit is first fit that goes on where
# it last stopped.
#
# > **Predict.** Which refuses the fewest requests? Which has the shortest wait?

# %% fits
print(HEAD)
fits = {"first": twenty["as it was"]}
for fit in ("best", "next", "worst", "buddy"):
    fits[fit] = for_20_minutes(extents(fit=fit))
for fit, run in fits.items():
    row(f"{fit} fit", run)

# %% [markdown]
# The first four make the same number of tokens, within two percent. In three other seeds first, best
# and next fit change places; only worst fit is refused most in all: it cuts up the very gaps that a
# document would need. <!-- source: the same cell with seeds 1, 2 and 3 -->
#
# Buddy is last by far: it rounds up, so fewer run at once.
#
# **A law behind it.** There is a rule for how many gaps there are.
#
# > **Predict.** Sixty requests hold extents. About how many gaps lie between them?

# %% knuth
many = serve(extents(max_model_len=2048), alpaca(rate=60.0), seconds=180)  # short questions, very many


def gaps_and_extents(memory):
    settled = [m for m in memory.moments if m.time_s > 60]
    return np.mean([(len(m.owners), len(m.free)) for m in settled], axis=0)


print("             extents   gaps   gaps ÷ extents")
runs = {name: twenty[name] for name in ("half the traffic", "chats, 3/s", "chats, slabs")}
for name, run in {"the service": hour, **runs, "short questions": many}.items():
    held, gaps = gaps_and_extents(run.memory)
    print(f"{name:16} {held:4.1f} {gaps:6.1f} {gaps / held:10.2f}")

# %% [markdown]
# Half as many: Knuth's **fifty-percent rule** (TAOCP vol. 1, section 2.5). The reason is short.
# Whoever leaves makes one gap more if both neighbours are in use, and one less if both are free.
# Whoever comes takes the front of a gap and leaves the rest, and changes nothing. In balance a
# neighbour is as often free as in use. Each extent has one right neighbour, a gap half the time, and
# each gap (but one at the very front) is the right neighbour of one extent: one gap for two extents.
#
# Look at the two that break it, and say why before you read on.
#
# With few requests the one gap behind all of them counts for much. And slabs have one length: a
# newcomer fills a gap to the brim, no rest stays, and the rule's premise is gone. (Among very many
# short requests equal lengths are common, too.)
#
# So no fit will save us. *On the board: fragmentation, and no cheap way out.*
#
# ## 5. Growing in place
#
# `exact` knows the future. Who does not can begin small and **grow**, a block at a time: in place if
# the next block is free, else the request is *relocated*: it gives its place back, takes a gap that
# is now long enough (it may overlap the old place), and K and V are copied, read before written.

# %% price-of-a-move
per_token = a100.model.kv_bytes_per_token
bandwidth = a100.gpu.bandwidth
print(f"{per_token:,} bytes per token, read and written at {bandwidth / 1e12:.3f} TB/s: "
      f"1,000 tokens move in {2 * 1000 * per_token / bandwidth * 1e3:.1f} ms")

# %% [markdown]
# A step takes thirty. That looks harmless. The paper's server again, with more chats than it can
# easily bear.
#
# > **Predict.** A chat has about 500 tokens. With blocks of 16, how often does it move before it
# > ends? With blocks of 1? <!-- source: Kwon et al. 2023, Fig. 11, rounded -->

# %% growth
def token_gaps(run):
    times = run.core.metrics.token_times
    pairs = [(times(r)[1:], np.diff(times(r))) for r in run.requests if r.num_output_tokens > 1]
    return [np.concatenate(part) for part in zip(*pairs, strict=True)]


def growth_row(name, run):
    manager, s, ms = run.core.manager, run.summary(), 1e3 * token_gaps(run)[1]
    num_moved_tokens = manager.num_moved_blocks * manager.block_size
    copying = 2 * num_moved_tokens * run.runner.step_time.s_per_kv_token / run.clock.now()
    computed = sum(step.num_tokens for step in run.core.metrics.steps)
    again = max(0, computed / sum(r.num_tokens for r in run.requests if r.num_output_tokens) - 1)
    print(f"{name:20}{manager.num_relocations / len(run.requests):6.0f}{copying:9.1%}{s['num_preemptions']:11,}"
          f"{again:8.0%}{s['p50_ttft_ms'] / 1e3:9.1f}{np.median(ms):8.0f}{np.percentile(ms, 99):6.0f}{ms.max():8,.0f}")


def asked(load, seed=0):
    requests = load["traffic"].requests(duration_s=load["seconds"], seed=seed)
    return sum(r.max_tokens for r in requests) / load["seconds"]


chats = {"traffic": sharegpt(rate=1.75), "step_time": a100, "seconds": 600, "every_s": 0.5}
grown = {"exact": serve(extents(max_model_len=2048), **chats)}
for size in (1, 4, 16):
    grown[f"grow, blocks of {size}"] = serve(extents("grow", "first", size, 2048), **chats)
print(f"{'ten minutes':20} moves  copying  preempted   again  TTFT, s  ITL, ms  p99     max")
for name, run in grown.items():
    growth_row(name, run)
    pause = {r: max(np.diff(run.core.metrics.token_times(r)), default=0) for r in run.requests}
    assert name == "exact" or max(pause, key=pause.get).num_preemptions > 0  # whose was the longest

# %% [markdown]
# Read it in three steps. *Moves* are per request: with small blocks dozens, with blocks of 16 still a
# dozen. Each growth needs the next block, and there often stands a neighbour. (Not always, or blocks
# of 1 would move for every token: whoever moved grows in place while the gap behind him lasts.)
# *Copying*, though, takes a few percent at most. What hurts is *preempted*: who finds no
# gap for his grown self sends the request admitted last back to the queue, to be computed *again*. (That
# is what the longest pauses between two tokens are.)
#
# And growing gains: hardly any wait for the first token, where `exact` holds slots for tokens that
# come much later. Is that growing, or this seed? The same rate, another seed:

# %% another-seed
print(f"{'ten minutes':20} moves  copying  preempted   again  TTFT, s  ITL, ms  p99     max")
growth_row("exact", serve(extents(max_model_len=2048), **chats, seed=2))
growth_row("grow, blocks of 16", serve(extents("grow", "first", 16, 2048), **chats, seed=2))
print(f"asked: {asked(chats):.0f} tokens/s in seed 0, {asked(chats, seed=2):.0f} in seed 2")

# %% [markdown]
# Ten minutes at a fixed rate are not a fixed load. Ask for more than the server can make, and
# growing waits, too, and computes much again besides. Back to seed 0:

# %% one-that-moves
run = grown["grow, blocks of 16"]
mover = max((r for r in run.requests if 300 < r.arrival_time < 320), key=lambda r: r.num_output_tokens)
part = run.memory.between(mover.first_scheduled_time - 1, mover.finish_time + 1)
card, strip = viz.memory_strip(part, title=f"{mover.request_id} grows", highlight=[mover.request_id])
starts = [r.start_slot for m in part.moments for r in m.runs if r.owner == mover.request_id and r.state == "live"]
print(f"seen at {len(set(starts))} places in {len(starts)} looks")
assert len(set(starts)) > 1
card

# %% [markdown]
# Where the new place overlaps the old, the band only steps down.
#
# > **Predict.** The gaps between tokens, the slowest in a hundred of each half minute: when does
# > growing hurt, always or in bursts?

# %% latency-over-time
def p99_by_time(run, width=30):
    when, gap = token_gaps(run)
    return [(t, 1e3 * np.percentile(gap[(when >= t) & (when < t + width)], 99)) for t in range(60, 600, width)]


series = {name: p99_by_time(grown[name]) for name in ("exact", "grow, blocks of 1", "grow, blocks of 16")}
card, drawn = gantt.curves(
    series, title="Time between tokens, p99 of each half minute", xlabel="seconds", ylabel="ms"
)
by_pause = [t for t, _ in sorted(drawn["grow, blocks of 16"], key=lambda point: point[1])]
for name, half_minutes in (("calmest", by_pause[:3]), ("worst", by_pause[-3:])):
    seen = [m.free_slots for t in half_minutes for m in run.memory.between(t, t + 30).moments]
    print(f"blocks of 16, the {name} three: {np.mean(seen) / NUM_SLOTS:.0%} of the pool is free on average, "
          f"{min(seen) / NUM_SLOTS:.0%} at least")
card

# %% [markdown]
# In bursts, when the pool is nearly full for a moment. Even then it is not quite full: on average
# a quarter is *free*, and neighbours stand in the way.
#
# Moves are real. A small random model, on tensors, in a pool so tight that requests move and step back:

# %% real-moves
def answers(reserve):
    manager = partial(ContiguousKVCacheManager, reserve=reserve)
    pool = {"block_size": 2, "num_gpu_blocks_override": 40, "max_model_len": 64}
    llm = LLM("tiny", dtype="float32", kv_cache_manager=manager, **pool)
    prompts = [[5 * i + j + 1 for j in range(3 + 2 * i)] for i in range(6)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=14, ignore_eos=True), use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    return tokens, llm.manager.num_moved_blocks, llm.core.scheduler.num_preemptions


slab, grow = answers("max"), answers("grow")
assert slab[0] == grow[0]
print("the same", sum(map(len, grow[0])), "tokens;", grow[1], "blocks were copied,", grow[2], "requests preempted")

# %% [markdown]
# ## 6. Compaction
#
# If adjacency is what is missing, make some: slide all extents together, and all gaps are one. Why
# does hardly any server do it? The paper calls it "impractical due to the massive KV cache" (section
# 3.1), and it is often repeated.
#
# > **Predict.** What does it cost at most, on the paper's A100? The pool has 12.9 GB; memory moves
# > 1.555 TB/s. Compare it with one decode step.

# %% price
pool_bytes = NUM_SLOTS * per_token
print(f"the whole pool, read and written once: {2 * pool_bytes / bandwidth * 1e3:.1f} ms")
weights = a100.model.parameter_bytes
print(f"a decode step reads {weights / 1e9:.1f} GB of weights: {weights / bandwidth * 1e3:.1f} ms, and K and V")

# %% [markdown]
# One decode step. Is a copy in pieces as fast as that? We move the extents of our case, on this
# machine, in slots of 16 KB.

# %% measure-copy tags=["nbval-ignore-output"]
old, new = (np.ones((NUM_SLOTS, 4096), np.float32) for _ in range(2))
pieces = [(run.start_slot, run.num_slots) for run in case.runs if run.owner]


def best(copy):
    start = [time.perf_counter()]
    for _ in range(5):
        copy()
        start.append(time.perf_counter())
    return min(np.diff(start))


def slide():
    end = 0
    for at, size in pieces:
        new[end : end + size] = old[at : at + size]
        end += size


whole, slid = best(lambda: np.copyto(new, old)), best(slide)
held = sum(size for _, size in pieces) / NUM_SLOTS
print(f"the pool in one go: {whole * 1e3:.0f} ms; its held {held:.0%}, in {len(pieces)} pieces: "
      f"predicted {held * whole * 1e3:.0f} ms, measured {slid * 1e3:.0f} ms")
del old, new

# %% [markdown]
# Large pieces cost what their bytes cost. In the manager only addresses change; the runner gets a list
# of copies:

# %% show-compact
show(ContiguousKVCacheManager.compact)

# %% [markdown]
# Now let it run: when a request is refused though the sum is enough, compact, and ask again. The
# copies are charged to the step.

# %% compacting
class Compacting(ContiguousKVCacheManager):
    num_compactions = num_moved_tokens = 0

    def allocate_slots(self, request, num_new_tokens, **more):
        table = super().allocate_slots(request, num_new_tokens, **more)
        held = len(self.tables.get(request.request_id, ()))
        wanted = self.num_blocks_for(request, request.num_computed_tokens + num_new_tokens)
        if table is None and wanted - held <= self.num_free_blocks:
            self.num_compactions += 1
            self.num_moved_tokens += self.compact()
            table = super().allocate_slots(request, num_new_tokens, **more)
        return table


# %% compacted-hour
packed = serve(extents(of=Compacting), every_s=60)
count = packed.core.manager.num_compactions
tokens = packed.core.manager.num_moved_tokens / count
pause = 2 * step_time.s_per_kv_token * tokens
print(f"{count:,} compactions, one every {3600 / count:.0f} s; each moves {tokens:,.0f} tokens in {pause * 1e3:.1f} ms")
print(f"together {pause * count:.1f} s of an hour, {pause * count / 3600:.2%}")
print("                  p50 TTFT  p99 TTFT  p50 ITL  p99 ITL  tokens/s")
for name, s in (("as it was", summary), ("with compaction", packed.summary())):
    print(f"{name:16} {s['p50_ttft_ms'] / 1e3:7.2f} s {s['p99_ttft_ms'] / 1e3:7.0f} s"
          f" {s['p50_itl_ms']:5.1f} ms {s['p99_itl_ms']:5.1f} ms {s['output_throughput']:9.0f}")

# %% [markdown]
# A fraction of a percent of the time, pauses of a quarter of a step, and the wait for the first token
# falls from many seconds to hardly anything, at the median. *That is the conviction.* Same memory,
# same kernels, same traffic; only the gaps are gone. And the massive KV cache was no obstacle.
#
# So what is wrong with it? `exact` knows the future. We try it on those who do not.
#
# > **Predict.** `pow2`, which rounds the answer up. Then `grow`; and `grow` with a brake: nobody is
# > admitted into the last tenth of the pool. Five minutes of chats, 2/s, in four seeds. Whom does
# > compaction help in all four?

# %% brake
def braked(manager_class):
    class Braked(manager_class):
        def allocate_slots(self, request, num_new_tokens, **more):
            if self.tables and request.request_id not in self.tables:  # a newcomer, and not alone
                more["keep_free_blocks"] = self.num_blocks // 10
            return super().allocate_slots(request, num_new_tokens, **more)

    return Braked


# %% undone
load = {"traffic": sharegpt(rate=2.0), "step_time": a100, "seconds": 300, "every_s": 60}
growing, plain = {"reserve": "grow", "block_size": 16}, (ContiguousKVCacheManager, Compacting)
ways = {
    "exact": ({}, plain),
    "pow2": ({"reserve": "pow2"}, plain),
    "grow": (growing, plain),
    "grow, brake": (growing, [braked(of) for of in plain]),
}
found = {name: [[serve(extents(of=of, max_model_len=2048, **how), **load, seed=seed).summary() for seed in range(4)]
                for of in classes] for name, (how, classes) in ways.items()}  # fmt: skip
print(f"{'seed':13}{0:13}{1:16}{2:16}{3:16}")
print(f"{'asks tokens/s':13}" + "".join(f"{asked(load, seed):{16 if seed else 13}.0f}" for seed in range(4)))
shown = {"tokens/s": "output_throughput", "preempted": "num_preemptions", "p50 TTFT, ms": "p50_ttft_ms"}
for title, key in shown.items():
    print(f"\n{title}: without → with compaction")
    for name, runs in found.items():
        pairs = [f"{a[key]:8,.0f} → {b[key]:<6,.0f}" for a, b in zip(*runs, strict=True)]
        print(f"{name:12}" + "".join(pairs).rstrip())

# %% [markdown]
# In all four: `exact` and `pow2` make more tokens and wait less. With the brake, compaction takes
# away nine preemptions in ten or more.
#
# `grow` alone is a gamble: seeds 1 and 3 lose tokens, seed 2 gains most of all. *One seed would have
# misled us*: in seed 0 compaction looks perfect, brake or none. It asks for the least. Where more is
# asked, the gaps had been a brake of their own: compacted, the pool can take in newcomers until no
# slot is free, and nobody can grow. Each compaction then buys room for a few tokens, and growth
# undoes it at once. In runs of ten minutes all four seeds lose. <!-- source: the same cell with seconds=600: 632, 579, 564, 595 tokens/s without, 536, 496, 445, 512 with -->
#
# So our runs *acquit compaction* where lengths are known, or admission is careful (chapter 06). What
# speaks against it is not its price:
#
# - It reaches external waste only: in section 3, at most that of `first_fit_exact`. What `max`
#   wastes, by far the most, lies inside.
# - It treats the symptom. If a request did not have to lie in one piece, there would be nothing to
#   slide or to relocate, and two requests could even share a piece: the paper's second reason, and the
#   better one.
#
# (No run of ours shows the engineering: every kernel, every GPU of a group and every prepared launch
# must learn of the new addresses at once.)
#
# ## 7. The padded batch of chapter 02, in this memory
#
# A row of a padded batch needs the *longest* prompt and the *longest* answer. A and B again, and a
# pool with gaps of 11, 10 and 5.
#
# > **Predict.** A needs 7 + 3 - 1 slots, B 4 + 6 - 1. How long is each row of the padded batch? And
# > do the 26 slots suffice for two?

# %% padded
WORDS = ["<SOS>", " I", " think", " this", " movie", " is", " better", " really", " like"]
A, B = [0, 1, 2, 3, 4, 5, 6], [0, 1, 7, 8]


def pool_with_gaps(*lengths):
    manager = ContiguousKVCacheManager(sum(lengths) + 4 * len(lengths), 1, max_model_len=64, reserve="exact")
    sizes = [size for length in lengths for size in (length, 4)]
    requests = [Request(f"other {i}", num_prompt_tokens=n, max_tokens=1) for i, n in enumerate(sizes)]
    for request in requests:
        manager.allocate_slots(request, request.num_prompt_tokens)
        request.num_computed_tokens = request.num_prompt_tokens
    for request in requests[::2]:
        manager.free(request)
    return manager


def started(scheduler):
    scheduler.add(Request("A", A, max_tokens=3))
    scheduler.add(Request("B", B, max_tokens=6))
    scheduled, _ = scheduler.schedule()
    return scheduler, [request.request_id for request, _ in scheduled]


for kind in (Scheduler, StaticScheduler):
    scheduler, who = started(kind(pool_with_gaps(11, 10, 5)))
    print(f"{kind.__name__:16} {scheduler.manager.num_free_blocks:2} slots stay free; starts {who}")

# %% padded-need
row_slots = len(A) + 6 - 1
print(f"alone {len(A) + 3 - 1} and {len(B) + 6 - 1} slots; as rows {row_slots} each")
print(f"{2 * row_slots} of {11 + 10 + 5} free slots; the largest gap has 11")

# %% [markdown]
# So no two rows fit. Padding does not only fill memory: it makes every request as hard to place as
# the longest. Given room:

# %% padded-picture
scheduler, who = started(StaticScheduler(pool_with_gaps(13, 6, 14)))
scheduler.update([(row, row.num_prompt_tokens) for row in scheduler.rows], [0, 0], now=0.0, step=0)
card, drawn = batch.batch_memory(viz.snapshot(scheduler, 1), batch.rows_of(scheduler, WORDS.__getitem__))
assert len(drawn.slots("B", "pad")) == len(A) - len(B)
card

# %% [markdown]
# B's row passes over a gap of six in which its prompt had room, and takes its pads along.
#
# ## 8. The verdict
#
# Free memory was the wrong number. First, who is refused?

# %% by-need
refused_need = np.array([r.waiting[0].needed_slots for r in refusals])
with_enough = np.array([enough_in_sum(r) for r in refusals])
print("slots needed    requests   refused            though the sum was enough")
for low, high in ((0, 500), (500, 1000), (1000, 2000), (2000, 4000), (4000, 8000)):
    all_of_it, here = ((n >= low) & (n < high) for n in (needs, refused_need))
    share = here.sum() / all_of_it.sum()
    print(f"{low:5,} to {high:5,} {all_of_it.sum():8,} {here.sum():9} ({share:3.0%}) {(here & with_enough).sum():12}")

# %% [markdown]
# An average hides it: the long ones are nearly always refused, though mostly for want of memory: the
# sum was enough for 30 in the last row. Most who were refused despite enough are short questions,
# since most requests are.
#
# > **Predict.** An alarm shall ring while somebody waits for memory. "Less than a tenth is free": how
# > much of the waiting does it notice?

# %% alarms
alarms = {
    "free < 10% of the pool": free < 0.1 * NUM_SLOTS,
    "free < 30% of the pool": free < 0.3 * NUM_SLOTS,
    "largest gap < 95% of the needs": largest < np.percentile(needs, 95),
    "largest gap < longest need": largest < needs.max(),
    "largest gap < need of the next": largest < needed,
}
print("alarm                            rings   of the waiting seen   of the rings right")
for name, rings in alarms.items():
    both = (rings & waits).sum()
    print(f"{name:31} {rings.mean():6.0%} {both / waits.sum():16.0%} {both / rings.sum():21.0%}")

# %% [markdown]
# - **Free memory** is asleep most of the time that people wait. Raise its threshold, and it still is
#   for a third of it.
# - **The largest gap against the longest need** rings nearly always: useless at night, but true as a
#   *capacity* statement. This service can hardly ever admit its longest request at once. Plan by it.
# - **The largest gap against the need of the next in line** is right by construction: it is the
#   refusal itself. So count *refusals*, by need, and log three numbers with each: needed, free,
#   largest. Free below needed: buy memory. Largest below needed: that is fragmentation.
#
# *On the board: fragmentation, convicted; too little memory, an accomplice.*
#
# **Break it yourself.** Can you find settings with more than half the pool free at a refusal? A fit
# that is better at one rate, and worse at another?

# %% lab
viz.fragmentation_lab(lab_run)

# %% [markdown]
# ## What this does not show
#
# - Step times and copies are a model (`step_time.describe()` prints it). The allocator is real; all
#   seconds are as good as the model.
# - The pool is an A100's and the pace an H100's, to keep up with the traffic, which is made up. Chats show far less, as you saw.
# - Nearly everything was one seed, and one misled us. `python -m minikv simulate paradox` plays the
#   case in more.
# - First come, first served: a scheduler that lets short requests overtake would fill the gaps, and
#   let documents starve: chapter 06.
# - A copy at full bandwidth assumes large pieces and an idle GPU. We measured one on a CPU only.
#
# ## What you have now
#
# - Memory that must be contiguous runs out of *adjacency* before it runs out of slots.
# - Reserved, internal, rounding, external: four wastes, four cures.
# - No fit avoids gaps: about one for two extents, whatever you do.
# - Moving is cheap. Compaction helps whoever reserved his room or admits with care. Growing fails
#   when everyone is let in and no one can grow; compaction cures gaps, not that.
# - A fixed rate is not a fixed load: look at several seeds.
# - Watch refusals by need; plan with the largest gap.
#
# The exercises: `python -m minikv start 03`. The modules of `minikv` so far:

# %% lines-so-far tags=["nbval-ignore-output"]
parts = ("request", "specs", "metrics", "kv_cache/base", "kv_cache/extent_base", "kv_cache/extent_tree",
         "kv_cache/extents", "kv_cache/buddy", "kv_cache/contiguous", "scheduler", "workloads", "core",
         "simulator", "model/loader", "model/tiny")  # fmt: skip
for part in viz.lines_of_minikv(parts):
    print(f"{part.name:23} {part.num_lines:4} lines  {part.about}")
