# %% [markdown]
# # 04 Paged blocks
#
# Chapter 03 ended with a pool that had room and could not give it away: what was free lay in
# pieces, and a request's slots had to lie side by side. This chapter drops that demand. The pool
# is cut into blocks of one size, any free one will do, and a table per request remembers which. It
# is the oldest trick of operating systems, and it is the whole idea of PagedAttention (Kwon et al.,
# SOSP 2023).
#
# You build pool, table and the way from a token to its slot by hand; then the traffic of chapter 03
# runs again, with a surprise in section 4.
#
# What it adds to `minikv`:
#
# | file | what it is |
# |---|---|
# | `kv_cache/paged.py` | blocks, their free queue, the pool, and the manager that from now on is the default |
#
# **Predict, run, explain**, as before.

# %% imports
import time
from collections import deque

import numpy as np

import minikv.viz as viz
from minikv import LLM, ContiguousKVCacheManager, PagedKVCacheManager, Request, SamplingParams, show
from minikv.kv_cache.paged import BlockPool, FreeKVCacheBlockQueue
from minikv.model.loader import load
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation, StepTime
from minikv.experiments import (
    FIG13_MODELS,
    FIG13_PAPER,
    FIG13_WORKLOADS,
    NUM_SLOTS,
    fig2_run,
    paper_run,
    paper_step_time,
)
from minikv.specs import GPUS, MODELS
from minikv.viz import MemoryRecorder, batch, gantt
from minikv.viz.memory import enough_in_sum
from minikv.workloads import shared_header, sharegpt

# %% load
loaded = load("smollm2", dtype="float32", device="cpu")
model, tokenizer, spec = loaded
START = tokenizer.bos_token_id


def text(token_id):
    return "<SOS>" if token_id == START else tokenizer.decode([token_id])


A = [START, *tokenizer(" I think this movie is better").input_ids]
B = [START, *tokenizer(" I really like").input_ids]
print("A and B of chapter 02 again:", len(A), "and", len(B), "tokens")

# %% [markdown]
# ## 1. An old idea
#
# Sixty years ago programs shared a computer's memory as our requests share the pool, each in one piece,
# with the same gaps between them. The cure was **paging**. A program sees addresses without gaps, in
# **pages**; the memory is cut into **frames** of the same size; a **page table** says which frame
# holds which page.
#
# | operating system | KV cache |
# |---|---|
# | process | request |
# | page: a piece of what the program sees | logical block: `block_size` tokens of a sequence, in order |
# | page frame: a piece of the memory | block of the pool: `block_size` slots in every layer |
# | page table | block table |
# | address = page number, offset | position = logical block, offset |
# | page fault: a page without a frame is touched | allocation: the next token's logical block has no block yet |
# | swapping a process out | preemption: its blocks are given away, its tokens are kept |
#
# > **Predict.** Where does the analogy end? (Who translates the addresses? Who touches which page,
# > and when?)
#
# - **Nobody translates in hardware.** No chip looks at a block table. The attention kernel reads it
#   itself, entry by entry; chapter 05 is about what that costs. Nothing protects a request's blocks
#   from another, either: a wrong entry is not a crash, it is a wrong answer.
# - **No fault ever comes as a surprise.** The scheduler knows before a step which tokens it will
#   compute, so blocks are taken beforehand, and a request without room does not run.
# - **There is no working set.** A program may touch a few of its pages for a long time. A request
#   reads *all* its blocks at every step, so half of them are worth nothing. Preemption takes all or
#   none.
# - **What is lost can be made again.** K and V follow from the tokens. No operating system can
#   recompute a page.
#
# And a table is small: one for a request, not one for each layer, since all layers use the same
# slots of their own pools.

# %% entry-size
block_bytes, entry_bytes = 16 * spec.kv_bytes_per_token, np.dtype(np.int32).itemsize
print(f"a block of 16 tokens holds {block_bytes:,} bytes, in {spec.num_layers} layers; its table entry, an int32, {entry_bytes}")

# %% [markdown]
# ## 2. A pool by hand
#
# Eight blocks of four slots. All the books that paging needs are a queue of free blocks and a list
# per request. As contents we write letters into the slots, where a real pool has keys and values.

# %% by-hand
SIZE = 4
slots = ["."] * 8 * SIZE
free, tables = deque(range(8)), {}


def slot_of(name, position):
    return tables[name][position // SIZE] * SIZE + position % SIZE


def write(name, position, content):
    "Makes room for the token at this position, if need be, and writes it."
    table = tables.setdefault(name, [])
    if position == len(table) * SIZE:  # beyond the last block
        table.append(free.popleft())
    slots[slot_of(name, position)] = content


def picture():
    return " ".join("".join(slots[i : i + SIZE]) for i in range(0, len(slots), SIZE))


# %% [markdown]
# Two requests write in turns: `a`, `b`, … are tokens of the first, `1`, `2`, … of the second.
#
# > **Predict.** After six tokens each, which blocks stand in the two tables?

# %% write-in-turns
for position in range(6):
    write("A", position, "abcdef"[position])
    write("B", position, "123456"[position])
print(tables, "free:", list(free))
print(picture())

# %% [markdown]
# Whoever crosses a block's border takes the next free block, so their blocks alternate. Each
# request still sees one sequence: *position* `p` lies in slot `table[p // 4] * 4 + p % 4`. That is
# the whole translation, **slot mapping** in vLLM's words.

# %% slot-mapping
mapping = [slot_of("A", p) for p in range(6)]
print("A's slots:", mapping, "read in order:", "".join(slots[i] for i in mapping))

# %% [markdown]
# > **Predict.** A ends, its blocks are freed, and C comes with five tokens. What is left of A in the
# > pool when C has written the first of them?

# %% free-by-hand
free.extend(reversed(tables.pop("A")))  # the tail first, so that a beginning lasts longest: chapter 07
print("free:", list(free))
print(picture(), " A has been freed")
for position in range(5):
    write("C", position, "VWXYZ"[position])
print(picture(), " C has written")

# %% [markdown]
# Everything. **Freed is not erased**: only the books change, and freed blocks wait at the queue's
# end until they are taken again, so C has not even touched them. Two things follow. What has been
# written to a slot in some earlier life may still stand there, so no request may read beyond its own
# last token. And a block that waits could be given back to someone who wants exactly its contents:
# that is chapter 07.
#
# For that day the package's free queue is no deque but a doubly linked list through the blocks: it
# can give up a block *from its middle* without looking for it.

# %% show-remove
show(FreeKVCacheBlockQueue.remove)

# %% block-pool
pool = BlockPool(6)
first, second = pool.get_new_blocks(2)
pool.touch([second])  # somebody else's table names it, too
print(first, second, "free:", [b.block_id for b in pool.free_block_queue.get_all_free_blocks()])
pool.free_blocks([second, first])
print(first, second, "free:", [b.block_id for b in pool.free_block_queue.get_all_free_blocks()])

# %% [markdown]
# `ref_cnt` counts the tables that name a block. In this chapter it is 1 or 0; the second block shows
# what more will mean. It is freed when the last one lets go.
#
# ### When is a block taken?
#
# Here it is easy to go wrong. Three requests with prompts of 3, 4 and 5 tokens: one less than a block,
# a whole one, one more. Each step computes all tokens that have no K and V yet, and samples one.
#
# > **Predict.** How many blocks does each hold after its prompt? And which steps take another?

# %% boundary
def three_prompts():
    scheduler = Scheduler(PagedKVCacheManager(8, SIZE))
    for name, length in (("short", 3), ("full", 4), ("over", 5)):
        scheduler.add(Request(name, A[:length], max_tokens=6))
    return scheduler


def one_step(scheduler, step=0):
    scheduled, _ = scheduler.schedule()
    sampled = [A[r.num_tokens % 7] for r, _ in scheduled]  # some word of A: no model runs here
    scheduler.update(scheduled, sampled, now=0.0, step=step)
    return [r for r, _ in scheduled]


scheduler = three_prompts()
manager = scheduler.manager
print("step  " + "   ".join(f"{name:>5}: known computed blocks" for name in ("short", "full", "over")))
for step in range(4):
    running = one_step(scheduler, step)
    print(f"{step:4}  " + "   ".join(
        f"{'':6}{r.num_tokens:6}{r.num_computed_tokens:9}{len(manager.tables[r.request_id]):7}" for r in running))

# %% [markdown]
# `full`, whose prompt is exactly one block, knows five tokens after it and holds *one* block. The fifth is the one just sampled. It has no K and V: the next step computes it, and only
# then needs its slot.

# %% boundary-picture
scheduler = three_prompts()
one_step(scheduler)
card, arrows = viz.block_table_map(
    viz.snapshot(scheduler, 0), viz.labels_of(scheduler, text), title="After the prompts: the dashed token has been sampled"
)
assert [(a.request_id, a.num_live) for a in arrows] == [("short", 3), ("full", 4), ("over", 4), ("over", 1)]
card

# %% [markdown]
# So the question is asked of *computed* tokens: does what this step writes reach beyond the table?
# A rule that comes to mind sooner asks something else, "is `num_tokens` a multiple of the block size", where
# `num_tokens` counts the sampled one:

# %% wrong-rule
for prompt in (3, 4, 5):
    blocks = -(-prompt // SIZE)
    for known in range(prompt + 1, prompt + 5):  # each step computes the token sampled before it
        blocks += known % SIZE == 0
        needed = -(-known // SIZE)
        if blocks != needed:
            print(f"prompt of {prompt}: to write token {known - 1} takes {needed} blocks, the rule has {blocks}")

# %% [markdown]
# Elsewhere it is right, and so it may pass a test. It holds a block too early; or, after a prompt that
# fills its blocks, one too few for *B* − 1 of every *B* tokens. The package's rule, with what is counted
# beside it (the three keywords stay at zero until chapters 06 and 07):

# %% show-allocate
show(PagedKVCacheManager.allocate_slots)

# %% [markdown]
# ## 3. One token's way
#
# Now a busier pool. Others have grown in it, taking turns; two of them have left. A and B take what
# they left.

# %% busy-pool
def others_in(manager, *leaving):
    "Other people's requests fill the pool in turns, and some leave. They are not run here."
    others = [Request(f"other {i}", num_prompt_tokens=9, max_tokens=3) for i in range(manager.num_blocks // 3)]
    for num_tokens in (4, 8, 9):
        for other in others:
            manager.allocate_slots(other, num_tokens - other.num_computed_tokens)
            other.num_computed_tokens = num_tokens
    for i in leaving:
        manager.free(others[i])
    return others


scheduler = Scheduler(PagedKVCacheManager(12, 4))
others_in(scheduler.manager, 1, 3)
scheduler.add(Request("A", A, max_tokens=5))
scheduler.add(Request("B", B, max_tokens=6))
ANSWERS = {"A": tokenizer(" than the previous one").input_ids, "B": tokenizer(" to do. I'm").input_ids}
for step in range(3):
    scheduled, _ = scheduler.schedule()
    scheduler.update(scheduled, [ANSWERS[r.request_id][step] for r, _ in scheduled], now=0.0, step=step)
snap, labels = viz.snapshot(scheduler, 3), viz.labels_of(scheduler, text)
print({name: scheduler.manager.tables[name] for name in "AB"})

# %% [markdown]
# > **Predict.** Block size 4. In which slot is token 6 of A? And token 8?
#
# The **translation board**: with a running kernel, play it or drag the slider, and watch the row of
# slots fill. Position, logical block, row of the table, block of the pool, slot.

# %% board
viz.translation_player(snap, "A", labels["A"])

# %% board-check
for position in (3, 4, 6, 8):
    print(viz.translate(snap, "A", position))
assert viz.translate(snap, "A", 6).slot == scheduler.manager.tables["A"][1] * 4 + 2

# %% [markdown]
# Within a block, neighbours stay neighbours. From token 3 to token 4 the slot jumps, and *backwards*:
# block numbers need not ascend, and nothing in the engine may assume it. Both tables at once:

# %% tables
card, arrows = viz.block_table_map(snap, {name: labels[name] for name in "AB"}, title="Two tables, one pool")
assert [a.block_id for a in arrows] == [9, 5, 7, 1, 11]
card

# %% [markdown]
# Chapter 02's picture once more, the padded batch on the left, the memory on the right: now the engine
# runs its two rows with the real model, through block tables.

# %% padded-rows
llm = LLM(loaded, batching="static", kv_cache_manager=PagedKVCacheManager, block_size=4,
          num_gpu_blocks_override=24, max_model_len=12)  # fmt: skip
others = others_in(llm.manager, 1, 4)
llm.add_request(A, SamplingParams(max_tokens=3, ignore_eos=True), "A")
llm.add_request(B, SamplingParams(max_tokens=6, ignore_eos=True), "B")
llm.step()
llm.manager.free(others[3])
card, drawn = batch.batch_memory(viz.snapshot(llm), batch.rows_of(llm, text))
assert drawn.slots("A") == [68, 69, 70, 71, 36, 37, 38] and drawn.slots("B", "pad") == [80, 81, 82]
card

# %% [markdown]
# In chapter 02 each row lay in one piece. Now its blocks are apart, and a later one may come first. (The
# empty ones are held already: a static batch claims its whole rectangle.) Another request has just left
# three holes; for whoever comes next they are as good as three in a row.
#
# The padding is still there. It comes from the rectangle, not from the memory, and iteration-level
# scheduling has no rectangle.
#
# Does the model notice? The engine reads K and V through the table in any case; a slab's table just
# has consecutive entries.
#
# > **Predict.** Same prompts, greedy, in `float32`: contiguous against blocks of 1, 4, 16 and 64.
# > How many of the answers differ?

# %% identical
prompts = ["The sea was calm on that day", "My favourite", "Once upon a time, in a small village", "2 + 2 ="]
sixteen = SamplingParams(max_tokens=16, ignore_eos=True)


def answers(manager, block_size):
    llm = LLM(loaded, kv_cache_manager=manager, block_size=block_size, max_model_len=64, check_every_step=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, sixteen, use_tqdm=False)]


reference = answers(ContiguousKVCacheManager, 16)
for block_size in (1, 4, 16, 64):
    same = answers(PagedKVCacheManager, block_size) == reference
    print(f"blocks of {block_size:2}: {'the same' if same else 'other'} {sum(map(len, reference))} tokens")

# %% [markdown]
# None. Softmax and sum do not ask where a key lies, as long as each comes with its position.
#
# ## 4. The same traffic as in chapter 03
#
# Its service, its pool, its pace: questions and documents at two a second, the steps of an H100, the
# same seed, the first twenty minutes of its hour. (Its table of twenty minutes drew other requests, so
# the numbers differ.) Chapter 03 gave each request one extent of exactly
# what it would need. We change one thing: each claims as much, in blocks, wherever they lie.

# %% service
service, h100 = shared_header(rate=2.0), StepTime(MODELS["Vicuna 13B v1.5 16K"], GPUS["H100 SXM"])


def serve(manager, traffic=service, step_time=h100, seconds=1200):
    "As in chapter 03: first come, first served, until the time is up."
    run = Simulation(Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=2560), step_time)
    recorder = MemoryRecorder(run.core, every_s=1.0, max_rows=10_000)
    requests = traffic.requests(duration_s=3600, seed=0)
    run.run(requests, on_step=recorder, until_s=seconds)
    run.memory, run.of = recorder.recording, {r.request_id: r for r in requests}
    return run


class ClaimAll(PagedKVCacheManager):
    "Takes at once all the blocks that the request will ever need, as `exact` does."

    def num_blocks_for(self, request, num_tokens):  # what a refused request is measured against
        return -(-request.max_kv_tokens // self.block_size)

    def allocate_slots(self, request, num_new_tokens, **extra):
        if request.request_id not in self.tables:
            num_new_tokens = request.max_kv_tokens - request.num_computed_tokens
        return super().allocate_slots(request, num_new_tokens, **extra)


def exact_extents(max_model_len=8192, of=ContiguousKVCacheManager):
    return of(NUM_SLOTS, 1, max_model_len=max_model_len, reserve="exact", fit="first")


extents, claimed = serve(exact_extents()), serve(ClaimAll(NUM_SLOTS // 16, 16))
print(f"{extents.memory.num_slots:,} slots in extents, {claimed.memory.num_slots:,} in {NUM_SLOTS // 16} blocks of 16")

# %% [markdown]
# > **Predict.** In twenty minutes, how many requests are refused in each, and how many of those
# > though the free slots were enough in sum? Then the median wait.

# %% refusals
def row(name, run):
    refused, s = run.memory.refusals, run.summary()
    print(f"{name:18}{len(refused):8}{sum(map(enough_in_sum, refused)):8}{s['mean_num_seqs']:9.1f}{s['output_throughput']:10,.0f}"
          f"{s['p50_ttft_ms'] / 1e3:10.2f}{s['p99_ttft_ms'] / 1e3:8.1f}{s['p99_itl_ms']:13.0f}{run.core.scheduler.num_preemptions:11,}")


HEAD = f"{'':18} refused  enough  running  tokens/s   TTFT, s     p99  ITL p99, ms  preempted"
print(HEAD)
row("extents", extents)
row("same, blocks", claimed)
assert not any(map(enough_in_sum, claimed.memory.refusals))
documents = sum(r.waiting[0].request_id.startswith("document") for r in claimed.memory.refusals)
step_ms = 1e3 * np.median([step.end - step.start for step in claimed.core.metrics.steps])
print(f"blocks: {documents} of those refused are documents; median TTFT {claimed.summary()['p50_ttft_ms']:.0f} ms, median step {step_ms:.0f} ms")

# %% [markdown]
# *Refused with enough free in sum*: **zero**, and it cannot be anything else. The largest piece that
# blocks can make of free memory is all of it. Those still refused found too little, and they are
# nearly as many: a document takes a third of the pool, and the questions behind it wait. But now a wait
# ends as soon as there is enough, and the median falls from ten seconds to two steps.
#
# But chapter 03 had *acquitted* another cure. Compaction beside it:

# %% compacted
class Compacting(ContiguousKVCacheManager):
    "Chapter 03's: where only the gaps are in the way, all extents are slid together."

    def allocate_slots(self, request, num_new_tokens, **more):
        table = super().allocate_slots(request, num_new_tokens, **more)
        if table is None and self.num_blocks_for(request, num_new_tokens) <= self.num_free_blocks:
            self.compact()
            table = super().allocate_slots(request, num_new_tokens, **more)
        return table


print(HEAD)
row("extents, compacted", serve(exact_extents(of=Compacting)))
row("same, blocks", claimed)

# %% [markdown]
# While lengths are known, compaction is as good (its copies cost nothing here; chapter 03 has their
# price). What blocks add: no address ever changes, a request grows wherever a block is free, and two
# can share one.
#
# And chapter 03's case, the document that waited longest with much of the pool free?

# %% the-case
much = [r for r in extents.memory.refusals if enough_in_sum(r) and r.free_slots >= 0.4 * NUM_SLOTS]


def wait(run, refusal):
    return run.of[refusal.waiting[0].request_id].first_scheduled_time - refusal.time_s


case = max(much, key=lambda refusal: wait(extents, refusal))
[(NAME, needed)] = case.waiting
print(f"{NAME} needs {needed:,} slots. {case.free_slots:,} were free, {case.largest_free_slots:,} in one piece: it waits {wait(extents, case):.1f} s")
request = claimed.of[NAME]
print(f"with blocks it comes at {request.arrival_time:.2f} s and starts at {request.first_scheduled_time:.2f} s")

# %% strips
start, end = 570, 625  # as in chapter 03
parts = [(title, run.memory.between(start, end)) for title, run in
         (("one extent each, exactly what it needs", extents), ("as many slots, in blocks of 16", claimed))]  # fmt: skip
card, drawn = viz.memory_strips(parts, highlight=[NAME])
assert any(enough for _, _, enough in drawn[0].refused) and not any(enough for _, _, enough in drawn[1].refused)
card

# %% [markdown]
# The document is in colour. Above it is one large piece, and waits for a gap of that size. Below it is
# a rain of lines all over the pool, and starts when it comes. **Everything is scattered, and nobody
# needs it together**. No black mark stands above the lower strip.
#
# The whole twenty minutes with one slider (without a kernel: four moments):

# %% player
viz.memory_player([("extents", extents.memory), ("blocks", claimed.memory)])

# %% [markdown]
# ### Blocks on demand
#
# But so far we knew how long every answer becomes. Paging's second gift is that we need not: a block
# is taken when a token needs it, and nothing is reserved beyond it. That is the package's manager. First on the
# paper's server: OPT-13B, an A100, chats.
#
# > **Predict.** Extents, as many slots in blocks, blocks on demand: the median wait of each?

# %% chats
a100 = StepTime(MODELS["OPT-13B"], GPUS["A100 40GB SXM"])
print(HEAD)
for name, manager in (
    ("extents", exact_extents(2048)),
    ("same, blocks", ClaimAll(NUM_SLOTS // 16, 16)),
    ("on demand", PagedKVCacheManager(NUM_SLOTS // 16, 16)),
):
    row(name, serve(manager, sharegpt(rate=2.0), a100, seconds=600))

# %% [markdown]
# Dropping adjacency more than halves the wait. (More are refused: one is counted at its first attempt,
# and more get that far.) Not reserving ends the wait: the slots that a chat will fill
# in the end serve others until then. And the winner is the only one that does not know the future.
#
# > **Predict.** And the service with its documents?

# %% on-demand
demand = serve(PagedKVCacheManager(NUM_SLOTS // 16, 16))
print(HEAD)
for name, run in (("extents", extents), ("same, blocks", claimed), ("on demand", demand)):
    row(name, run)
computed = sum(step.num_tokens for step in demand.core.metrics.steps)
useful = sum(r.num_computed_tokens if r.finish_reason is None else r.num_tokens - 1 for r in demand.requests)
print(f"on demand computes {computed / useful:.1f} times the tokens that it needs")

# %% [markdown]
# The surprise. As many tokens per second (no more were asked for), more requests at once, and a *worse*
# service than when each claimed its blocks beforehand: see both p99. Everyone is let in while there is a block; all of them grow; and when the last block is
# gone, one has to step back (**preemption**): its blocks are taken, and all its tokens computed again
# later. With documents of thousands of tokens, this machine mostly computes what it had computed
# before.
#
# So be exact about what paging cures. Memory in pieces: gone. **Letting in more than will fit** is
# another question, of admission; chapter 03's growing extents failed in the same way. Chapter 06 is
# about it.
#
# ## 5. What is still wasted
#
# A request's last block is rarely full: the **tail**. With block size *B* a tail is at most *B* − 1
# slots, at most one tail per request, however long it is.
#
# > **Predict.** On average over time, which part of a block is empty in the tail? And for `sharegpt`,
# > with blocks of 16, what share of the held slots is used?

# %% tails
def tails(block_size):
    "Chats, below the limit: empty slots of each last block, looked at every tenth step."
    seen = []

    def look(core):
        if len(core.metrics.steps) % 10 == 0:
            for name, table in core.manager.tables.items():
                live = core.manager.requests[name].num_computed_tokens
                seen.append((live, len(table) * block_size - live, len(table)))

    manager = PagedKVCacheManager(NUM_SLOTS // block_size, block_size)
    Simulation(Scheduler(manager, max_num_seqs=256), a100).run(
        sharegpt(rate=1.5).requests(duration_s=400, seed=0), on_step=look)  # fmt: skip
    return np.array(seen)


SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
waste = {size: tails(size) for size in SIZES}
print("block size   tail, mean     most   in blocks   used of held   table entries")
for size, seen in waste.items():
    live, tail, entries = seen.mean(axis=0)
    assert seen[:, 1].max() <= size - 1
    print(f"{size:10}{tail:13.1f}{seen[:, 1].max():9}{tail / size:12.2f}{live / (live + tail):15.1%}{entries:16.1f}")

# %% utilisation
def share(tail):  # percent of the held slots, if each request had so many empty ones
    return 100 * tail / (waste[1][:, 0].mean() + tail)


points = {
    "at most: B − 1 empty slots": [(size, share(size - 1)) for size in SIZES],
    "measured": [(size, 100 * seen[:, 1].sum() / seen[:, :2].sum()) for size, seen in waste.items()],
}
card, drawn = gantt.curves(points, title="Empty slots of those that are held", xlabel="block size", ylabel="percent", powers_of_two=True)
assert all(abs(measured - share((size - 1) / 2)) < 0.5 for size, measured in drawn["measured"])  # half a block
card

# %% [markdown]
# Half a block, a little less: a tail has 0 to *B* − 1 empty slots, none of them likelier than another,
# which makes (*B* − 1) / 2. It comes once per request, so blocks of 16 waste less than two percent. Chapter 02's
# slabs wasted four slots of five, in such traffic.
#
# Why not blocks of 1, then? Nothing would be wasted. But each entry of the table must be read, block
# by block, by the kernel, which likes long runs of memory (chapter 05); and a table of hundreds of
# entries per request is handed to the GPU at every step. Large blocks have a price beside the tail:
# only whole blocks can be shared (chapter 07). 16 is vLLM's default, and the course's.
# <!-- source: vLLM's documentation, block_size -->
#
# ## 6. How many run at once
#
# Fewer wasted slots mean more requests in the same memory. The paper's Figure 13 counts them, for OPT-13B and the pool of
# its Figure 2, 15,700 slots. Ten minutes of it here, and with two models of the step's time.
# <!-- source: Kwon et al. 2023, Fig. 2; NUM_SLOTS in minikv.experiments -->
#
# > **Predict.** `max` runs seven (chapter 02's smaller pool had six slabs). And paged?

# %% figure-13
runs = {
    (policy, name): paper_run(policy, duration_s=600, warmup_s=200, step_time=paper_step_time(**overhead))
    for policy in ("max", "pow2", "exact", "paged")
    for name, overhead in FIG13_MODELS.items()
}
print("ShareGPT at 2 requests/s   paper   roofline   + 0.30 ms per request")
for policy, paper in FIG13_PAPER["sharegpt"].items():
    print(f"{policy:24}{paper:8.2f}" + "".join(f"{runs[policy, name].mean_batched:11.2f}" for name in FIG13_MODELS))

# %% which-limit
print("waiting when the ten minutes end: roofline, + 0.30 ms")
for policy in ("max", "pow2", "exact", "paged"):
    waiting = [len(runs[policy, name].simulation.core.scheduler.waiting) for name in FIG13_MODELS]
    print(f"{policy:24}{waiting[0]:18}{waiting[1]:11}")

# %% [markdown]
# The first three do not depend on the model: their queues grow without end, so memory sets the
# number. Paged has no queue left. It serves all who come, and how many are there at once is Little's
# law, rate times stay: with steps twice as long there would be more.
#
# So read the last line with care. The roofline gives far fewer than the paper. With 0.30 ms more for
# each request in a step it comes close, and these 0.30 ms *were chosen to make it so*. **A fit is not
# evidence.** What would be: that the same number, with no new choice, meets something else that the
# paper measured. The other half of Figure 13 is Alpaca, 30 short requests a second:
# <!-- source: Kwon et al. 2023, Fig. 13; FIG13_MODELS in minikv.experiments -->

# %% alpaca
for name, overhead in FIG13_MODELS.items():
    run = paper_run("paged", workload=FIG13_WORKLOADS["alpaca"], duration_s=300, warmup_s=100, step_time=paper_step_time(**overhead))
    print(f"{name:32} {run.mean_batched:6.1f}   paper: {FIG13_PAPER['alpaca']['paged']}")

# %% [markdown]
# It does, within a tenth. That makes 0.30 ms of work per request and step plausible for an engine of
# that time, and proves nothing about an A100. `python -m minikv simulate fig13` plays both
# workloads under all policies for an hour.
#
# And the paper's Figure 2, which has 96.3% of vLLM's KV memory filled with tokens? Two shares of ours:
# <!-- source: Kwon et al. 2023, Fig. 2 -->

# %% figure-2
report = fig2_run("paged", duration_s=600, warmup_s=200).report
held = report.live + report.reserved + report.internal
print(f"tokens: {report.live / report.total:.1%} of the pool, {report.live / held:.1%} of what is held; {report.free / report.total:.1%} of the pool is free")
assert abs(held + report.free - report.total) < 1e-6 * report.total

# %% [markdown]
# How full the *pool* is depends on the step times. The share of what is *held* hardly does, and only that
# can stand beside the paper's.

# %% [markdown]
# ## 7. `check()`: say what must be true
#
# A manager's faults don't crash. A block in two tables means that one request overwrites another's
# past, and the answer is fluent nonsense, perhaps, some time later. So every manager of this course
# can say what must be true of its books at any moment, its **invariants**, and check them:

# %% show-check
show(PagedKVCacheManager.check)

# %% [markdown]
# A check that never fails checks nothing, so we break each invariant on purpose. First, two tables name
# one block.

# %% books
def good_books():
    manager = PagedKVCacheManager(8, 4)
    for name, num_tokens in (("A", 7), ("B", 4)):
        request = Request(name, num_prompt_tokens=num_tokens, max_tokens=4)
        manager.allocate_slots(request, num_tokens)
        request.num_computed_tokens = num_tokens
    manager.check()
    return manager


good = good_books()
print(good.tables, good.num_free_blocks, "free")

# %% two-owners tags=["raises-exception"]
shared = good_books()
shared.tables["B"][0] = 1
shared.check()

# %% [markdown]
# The message names the block, what the books say, and who holds it. Now the others, caught only to
# print them all.

# %% break-tables
def forgotten(m):
    m.tables["A"].pop()  # not freed


def twice(m):
    m.tables["B"].append(m.tables["B"][-1])


def beyond_the_pool(m):
    m.tables["B"].append(8)


def too_short(m):
    m.requests["B"].num_computed_tokens += 1  # computed without asking for a slot


def no_owner(m):
    del m.requests["B"]


def show_broken(*faults):
    for fault in faults:
        broken = good_books()
        fault(broken)
        try:
            broken.check()
        except RuntimeError as error:
            print(f"{fault.__name__:17} {error}")
        else:
            raise AssertionError(f"{fault.__name__} went unnoticed")


show_broken(forgotten, twice, beyond_the_pool, too_short, no_owner)

# %% break-the-pool
def freed_while_held(m):
    m.block_pool.free_blocks([m.block_pool.blocks[0]])


def freed_early(m):
    m.block_pool.free_block_queue.append(m.block_pool.blocks[0])  # its count was not touched


def never_freed(m):
    [block_id] = m.drop_table(m.requests["B"])
    m.block_pool.blocks[block_id].ref_cnt = 0


def miscounted(m):
    m.block_pool.free_block_queue.num_free_blocks += 1


def torn(m):
    queue = m.block_pool.free_block_queue
    queue.head.next_free_block.next_free_block.prev_free_block = queue.head


show_broken(freed_while_held, freed_early, never_freed, miscounted, torn)

# %% [markdown]
# Is there a fault that no such check can see? We swap two entries of a table while it is in use: first
# two full blocks, then a full one and the tail.
#
# > **Predict.** Which of them does `check()` notice? Which changes the answer?

# %% blind-spot
def answer(swap=None):
    llm = LLM(loaded, block_size=4, num_gpu_blocks_override=24, max_model_len=40, check_every_step=True)
    llm.add_request(prompts[2], SamplingParams(max_tokens=10, ignore_eos=True), "A")
    for step in range(10):
        [output] = llm.step()
        if swap and step == 4:
            table, (i, j) = llm.manager.tables["A"], swap
            table[i], table[j] = table[j], table[i]
    return output.outputs[0].text


print("as it was           ", repr(answer()))
print("two full blocks     ", repr(answer((0, 1))))
print("a full one, the tail", repr(answer((0, -1))))

# %% [markdown]
# Every step was checked, and every check passed. The first swap is harmless, even: a key was turned by
# its position *before* it was stored (chapter 01), and a decode step sums over all keys in whatever
# order they come. With the tail in front, it reads slots that were never written, and its next tokens
# are written over its first: it destroys its own past. Books say who holds what, never what stands in it.
#
# So this engine's tests go one step further: a runner whose slots record which history wrote them, and
# whose next token depends on what it reads back (`tests/oracle.py`). While you write a manager, run it
# with `check_every_step=True`; before you trust it, compare answers.
#
# ## 8. What paging does not fix
#
# **One request is not faster.** It takes the same steps, and each reads the same K and V.
#
# > **Predict.** One request alone, 24 tokens: the ratio of the times?

# %% one-request tags=["nbval-ignore-output"]
def alone(manager):
    llm = LLM(loaded, kv_cache_manager=manager, max_model_len=64)
    start = time.perf_counter()
    llm.generate(prompts[0], SamplingParams(max_tokens=24, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - start, len(llm.metrics.steps)


times = {cls.__name__: [alone(cls) for _ in range(2)] for cls in (ContiguousKVCacheManager, PagedKVCacheManager)}
for name, runs_of in times.items():
    print(f"{name:26} {runs_of[0][1]} steps, {min(t for t, _ in runs_of):.2f} s")

# %% [markdown]
# The same but for noise. What paging buys is *company*: more requests in a step that takes about as
# long.
#
# **The tail block** stays, as measured. It is the price of one size for all.
#
# **The pool can still run out**, now at any step, since every request may want one block more. Two
# requests in eight blocks of four; together they will need nine.
#
# > **Predict.** What happens when no block is left? And what is lost?

# %% run-out
tight = LLM(loaded, block_size=4, num_gpu_blocks_override=8, max_model_len=24, check_every_step=True)
for name, prompt in zip("AB", prompts[:2], strict=True):
    tight.add_request(prompt, SamplingParams(max_tokens=14, ignore_eos=True), name)
snapshots, texts = [], {}
while tight.has_unfinished_requests():
    for output in tight.step():
        texts[output.request_id] = output.outputs[0].token_ids
    snapshots.append(viz.snapshot(tight))
card, drawn = viz.pool_over_steps(snapshots, title="Eight blocks for two requests")
assert tight.scheduler.num_preemptions == 1
print("after one preemption, the same tokens as before:", [texts[n] == reference[i][:14] for i, n in enumerate("AB")])
card

# %% [markdown]
# B wants a fourth block when there is none, and as it came last, it is B who steps back. Its three are
# free again; its *tokens* are kept, so no output is lost. It now needs four at once, so it waits until A
# has ended, computes all its tokens again in one pass, and goes on. It pays with time. Whom to preempt, whom not to let in, and whether to move
# blocks to the host instead: chapter 06.
#
# ## What this does not show
#
# - Seconds in sections 4 to 6 are a step-time model's. That no request is refused for want of a gap is
#   not: it follows from the tables.
# - Reading through a table costs something, which the simulator leaves out. Chapter 05 measures it.
# - `ClaimAll` and `exact` know each answer's length, which nobody does. They are there to change one
#   thing at a time.
# - One seed, one hour or less. The traffic is made up as in chapter 03.
# - The identical answers are those of four prompts in `float32`. The engine's tests ask many more.
#
# ## What you have now
#
# - Blocks of one size and a table: any free block will do, so *free* means *usable*, exactly.
# - Slot = `table[p // B] * B + p % B`. A block is taken when a step *computes* beyond the last one; the
#   token just sampled has no slot yet.
# - At most *B* − 1 slots per request are wasted, half a block on average.
# - Freed is not erased, order in the pool means nothing, one table serves all layers.
# - `check()` proves the books; only answers prove the contents.
# - Paging serves more at once. It does not make one faster, and it does not decide whom to let in.
#
# The exercises: `python -m minikv start 04`. The modules of `minikv` so far:

# %% lines-so-far tags=["nbval-ignore-output"]
parts = ("request", "specs", "metrics", "kv_cache/base", "kv_cache/extent_base", "kv_cache/extent_tree", "kv_cache/extents", "kv_cache/buddy",
         "kv_cache/contiguous", "kv_cache/paged", "scheduler", "workloads", "core", "simulator", "model/loader", "model/tiny")  # fmt: skip
for part in viz.lines_of_minikv(parts):
    print(f"{part.name:23} {part.num_lines:4} lines  {part.about}")
