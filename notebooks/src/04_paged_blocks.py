# %% [markdown]
# # 04 Paged blocks
#
# Chapter 03 ended with a pool that had room and could not give it away. The free slots
# lay in pieces, and the slots of one request had to lie side by side. This chapter drops
# that demand. The pool is cut into blocks of one size. A request takes any free blocks,
# and a table per request remembers which ones, and in which order. Operating systems have
# done this for a long time, and it is the whole idea of PagedAttention (Kwon et al., SOSP
# 2023).
#
# You build the pool, the table and the way from a token to its slot by hand. Then the
# traffic of chapter 03 runs again. Section 4 holds a surprise.
#
# What the chapter adds to `minikv`:
#
# | file | what it is |
# |---|---|
# | `kv_cache/paged.py` | blocks, their free queue, the pool, and the manager that takes them |
#
# **Predict, run, explain**, as before.

# %% imports
import time
from collections import deque

import numpy as np

import minikv.viz as viz
from minikv import LLM, Request, SamplingParams, Scheduler, show
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.paged import BlockPool, PagedKVCacheManager
from minikv.model.loader import load
from minikv.viz import batch

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
# Early computers gave each program one piece of memory, as chapter 03 gave each request
# one piece of the pool. They had the same gaps. The cure was **paging**. A program sees
# addresses without gaps, in **pages**. The memory is cut into **frames** of the same
# size. A **page table** says which frame holds which page.
#
# | operating system | KV cache |
# |---|---|
# | process | request |
# | page: a piece of what the program sees | logical block: `block_size` tokens of a sequence, in order |
# | page frame: a piece of the memory | block of the pool: `block_size` slots in every layer |
# | page table | block table |
# | address = page number, offset | position = logical block, offset |
# | page fault: the program touches a page that has no frame | allocation: the next token's logical block has no block yet |
# | swapping a process out | preemption: the request's blocks are given away, its tokens are kept |
#
# > **Predict.** Where does the analogy end? Think of what translates the addresses, and
# > of when each page is touched.
#
# - **No hardware translates.** No chip looks at a block table. The attention kernel reads
#   it itself, entry by entry. Chapter 05 is about what that costs. Nothing protects the
#   blocks of one request from another, either. A wrong entry does not crash the program.
#   It gives a wrong answer.
# - **No fault comes as a surprise.** The scheduler knows before a step which tokens the
#   step will compute. So it takes the blocks beforehand, and a request without room does
#   not run.
# - **There is no working set.** A program may use a few of its pages for a long time. A
#   request reads *all* its blocks at every step, so a part of them is of no use.
#   Preemption takes all of a request's blocks or none.
# - **What is lost can be made again.** K and V follow from the tokens. No operating
#   system can compute a lost page.
#
# A table is small. Each request has one, not one per layer, because every layer has a
# pool of the same shape and a token lies in the same slot of each.

# %% entry-size
block_bytes, entry_bytes = 16 * spec.kv_bytes_per_token, np.dtype(np.int32).itemsize
print(f"a block of 16 tokens: {block_bytes:,} bytes in {spec.num_layers} layers")
print(f"its entry in the table, an int32: {entry_bytes} bytes")

# %% [markdown]
# ## 2. A pool by hand
#
# We take eight blocks of four slots. Paging needs two things beside them: a queue of free
# blocks, and a list of blocks per request. A real pool has keys and values in its slots.
# Ours has letters.

# %% by-hand
SIZE = 4
slots = ["."] * 8 * SIZE
free, tables = deque(range(8)), {}


def slot_of(name, position):
    return tables[name][position // SIZE] * SIZE + position % SIZE


# %% by-hand-write
def write(name, position, content):
    "Makes room for the token at this position, if need be, and writes it."
    table = tables.setdefault(name, [])
    if position == len(table) * SIZE:  # beyond the last block
        table.append(free.popleft())
    slots[slot_of(name, position)] = content


def picture():
    return " ".join("".join(slots[i : i + SIZE]) for i in range(0, len(slots), SIZE))


# %% [markdown]
# Two requests write in turns. The letters `a`, `b`, … are tokens of A, the digits `1`,
# `2`, … are tokens of B.
#
# > **Predict.** After six tokens each, which blocks stand in the two tables?

# %% write-in-turns
for position in range(6):
    write("A", position, "abcdef"[position])
    write("B", position, "123456"[position])
print(tables, "free:", list(free))
print(picture())

# %% [markdown]
# A request that crosses the border of its last block takes the next free block. Here both
# do so in turns, so their blocks alternate. Each request still sees one sequence: the
# token at *position* `p` lies in slot `table[p // 4] * 4 + p % 4`. vLLM calls this
# translation **slot mapping**.

# %% slot-mapping
mapping = [slot_of("A", p) for p in range(6)]
print("A's slots:", mapping, "read in order:", "".join(slots[i] for i in mapping))

# %% [markdown]
# > **Predict.** A ends and its blocks are freed. Then C comes with five tokens. When C
# > has written them, what is left of A in the pool?

# %% free-by-hand
free.extend(reversed(tables.pop("A")))  # last block first: chapter 07 says why
print("free:", list(free))
print(picture(), " A has been freed")
for position in range(5):
    write("C", position, "VWXYZ"[position])
print(picture(), " C has written")

# %% [markdown]
# All of it is left. **Freed is not erased**: only the queue and the tables change. A
# freed block goes to the end of the queue and waits there, so C has taken other blocks.
# Two things follow.
#
# - A slot may still hold what a request wrote long ago. So no request may read beyond its
#   own last token.
# - A block that waits in the queue still has its contents. It could be given to a request
#   that needs exactly these. That is chapter 07.
#
# `BlockPool` puts blocks and queue together. Each block has a counter, `ref_cnt`: how
# many tables name it. `touch` says that one more table names a block. `free_blocks` says
# that one less does. (The queue is a doubly linked list through the blocks, as chapter 07
# has to take blocks out of its middle.)

# %% block-pool
pool = BlockPool(6)


def free_ids():
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


first, second = pool.get_new_blocks(2)
pool.touch([second])  # a second table names it
print(first, second, "free:", free_ids())
pool.free_blocks([second, first])
print(first, second, "free:", free_ids())

# %% [markdown]
# A block is free when its counter reaches 0. In this chapter each block has one table at
# most, so the counter is 1 or 0. The second block above shows the case that chapter 07
# needs: two tables named it, one has let go, and it is still in use.
#
# ### When is a block taken?
#
# We add three requests whose prompts have 3, 4 and 5 tokens: one less than a block,
# exactly a block, and one more. Each step computes all tokens that have no K and V yet,
# and samples one new token.
#
# > **Predict.** How many blocks does each request hold after its prompt? Which of the
# > next steps take another block?

# %% boundary
def three_prompts():
    scheduler = Scheduler(PagedKVCacheManager(8, SIZE))
    for name, length in (("short", 3), ("full", 4), ("over", 5)):
        scheduler.add(Request(name, A[:length], max_tokens=6))
    return scheduler


# %% boundary-step
def one_step(scheduler, step=0):
    scheduled, _ = scheduler.schedule()
    sampled = [A[r.num_tokens % 7] for r, _ in scheduled]  # no model runs here
    scheduler.update(scheduled, sampled, now=0.0, step=step)
    return [r for r, _ in scheduled]


scheduler = three_prompts()

# %% boundary-table
print("of each request: tokens known, tokens computed, blocks held")
for step in range(4):
    row = f"step {step}"
    for r in one_step(scheduler, step):
        held = len(scheduler.manager.tables[r.request_id])
        row += f"   {r.request_id}: {r.num_tokens:2}{r.num_computed_tokens:3}{held:3}"
    print(row)

# %% [markdown]
# Look at `full`. Its prompt is exactly one block. After step 0 it knows five tokens and
# holds *one* block. The fifth token is the one that has just been sampled. It has no K
# and V yet. The next step computes them, and only then does the token need a slot. The
# picture shows the same moment:

# %% boundary-picture
scheduler = three_prompts()
one_step(scheduler)
card, arrows = viz.block_table_map(
    viz.snapshot(scheduler, 0),
    viz.labels_of(scheduler, text),
    title="After the prompts: the dashed token has been sampled",
)
assert [a.num_live for a in arrows] == [3, 4, 4, 1]
card

# %% [markdown]
# So the question concerns *computed* tokens: will this step write beyond the last block
# of the table? There is a rule that comes to mind sooner: "take a block when `num_tokens`
# is a multiple of the block size". But `num_tokens` counts the sampled token, too. We
# compare the rule with what is needed, and print the steps in which the two differ:

# %% wrong-rule
print("blocks that writing a token needs, and blocks that a request has by the rule:")
for prompt in (3, 4, 5):
    blocks = -(-prompt // SIZE)
    for known in range(prompt + 1, prompt + 5):  # a step computes the token before it
        blocks, needed = blocks + (known % SIZE == 0), -(-known // SIZE)
        if blocks != needed:
            print(f"prompt of {prompt}: token {known - 1} needs {needed}, has {blocks}")

# %% [markdown]
# After a prompt of 3 or 5 tokens the rule takes a block one step too early. After a
# prompt of 4, which fills its block, the rule has one block too few in three of four
# steps. In all other steps the rule is right, so a test can easily miss the fault.
#
# Here is the package's rule. (Its three keyword arguments stay at zero until chapters 06
# and 07.)

# %% show-allocate
show(PagedKVCacheManager.allocate_slots)

# %% [markdown]
# ## 3. One token's way
#
# Now we take a busier pool. Four other requests have grown in it, in turns, and two of
# them have left. A and B take the blocks that they left.

# %% busy-pool
def others_in(manager, *leaving):
    "Other requests fill the pool in turns, and some leave. They are not run here."
    others = [
        Request(f"other {i}", num_prompt_tokens=9, max_tokens=3)
        for i in range(manager.num_blocks // 3)
    ]
    for num_tokens in (4, 8, 9):
        for other in others:
            manager.allocate_slots(other, num_tokens - other.num_computed_tokens)
            other.num_computed_tokens = num_tokens
    for i in leaving:
        manager.free(others[i])
    return others


# %% busy-pool-steps
scheduler = Scheduler(PagedKVCacheManager(12, 4))
others_in(scheduler.manager, 1, 3)
scheduler.add(Request("A", A, max_tokens=5))
scheduler.add(Request("B", B, max_tokens=6))
says = {"A": " than the previous one", "B": " to do. I'm"}  # no model runs here
answers_of = {name: tokenizer(words).input_ids for name, words in says.items()}
for step in range(3):
    scheduled, _ = scheduler.schedule()
    sampled = [answers_of[r.request_id][step] for r, _ in scheduled]
    scheduler.update(scheduled, sampled, now=0.0, step=step)
snap, labels = viz.snapshot(scheduler, 3), viz.labels_of(scheduler, text)
print({name: scheduler.manager.tables[name] for name in "AB"})

# %% [markdown]
# > **Predict.** The block size is 4. In which slot is token 6 of A? And token 8?
#
# The **translation board** is a player. Click it, press the arrow keys, and watch the row
# of slots fill.

# %% board
viz.translation_player(snap, "A", labels["A"])

# %% board-check
for position in (3, 4, 6, 8):
    print(viz.translate(snap, "A", position))
assert viz.translate(snap, "A", 6).slot == scheduler.manager.tables["A"][1] * 4 + 2

# %% [markdown]
# Within a block, neighbours stay neighbours. From token 3 to token 4 the slot jumps, and
# it jumps *backwards*. Block numbers need not ascend, and nothing in the engine may
# assume that they do. Here are both tables at once:

# %% tables
pair = {name: labels[name] for name in "AB"}
card, arrows = viz.block_table_map(snap, pair, title="Two tables, one pool")
assert [a.block_id for a in arrows] == [9, 5, 7, 1, 11]
card

# %% [markdown]
# We draw chapter 02's picture of a padded batch and its memory once more. This time the
# engine finds the slots of the two rows through block tables.

# %% padded-rows
llm = LLM(
    loaded,
    batching="static",
    kv_cache_manager=PagedKVCacheManager,
    block_size=4,
    num_gpu_blocks_override=24,
    max_model_len=12,
)
others = others_in(llm.manager, 1, 4)
llm.add_request(A, SamplingParams(max_tokens=3, ignore_eos=True), "A")
llm.add_request(B, SamplingParams(max_tokens=6, ignore_eos=True), "B")
llm.step()
llm.manager.free(others[3])  # a third one leaves

# %% padded-picture
card, drawn = batch.batch_memory(viz.snapshot(llm), batch.rows_of(llm, text))
assert drawn.slots("A") == [68, 69, 70, 71, 36, 37, 38]
assert drawn.slots("B", "pad") == [80, 81, 82]
card

# %% [markdown]
# In chapter 02 each row lay in one piece. Now its blocks lie apart, and a later block may
# come first in memory. (A and B hold some empty blocks, because a static batch takes the
# slots of its whole rectangle at once.) Another request has just left three holes. For
# the next request, three holes are as good as three blocks in a row.
#
# The padding is still there. It comes from the rectangle, not from the memory.
# Iteration-level scheduling has no rectangle, so from here on we use it again.
#
# Does the model notice where its K and V lie? The engine always reads through the table.
# The table of a slab merely has consecutive entries.
#
# > **Predict.** We ask four prompts, greedily, in `float32`: once with contiguous slots,
# > then with blocks of 1, 4, 16 and 64. How many of the answers differ?

# %% identical
prompts = [
    "The sea was calm on that day",
    "My favourite",
    "Once upon a time, in a small village",
    "2 + 2 =",
]
fourteen = SamplingParams(max_tokens=14, ignore_eos=True)


def answers(manager, block_size):
    llm = LLM(loaded, kv_cache_manager=manager, block_size=block_size, max_model_len=64)
    outputs = llm.generate(prompts, fourteen, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


# %% identical-compare
reference = answers(ContiguousKVCacheManager, 16)
num_tokens = sum(map(len, reference))
for block_size in (1, 4, 16, 64):
    same = answers(PagedKVCacheManager, block_size) == reference
    print(f"blocks of {block_size:2}: {num_tokens} tokens, the same: {same}")

# %% [markdown]
# None differs. Softmax and sum do not ask where a key lies. Each key only has to come
# with its position.
#
# ## 4. The same traffic as in chapter 03
#
# Chapter 03's service had many short questions and a few long documents, two requests a
# second. We play the first twenty minutes of its hour: the same pool, the same step times
# of an H100, the same seed. (Chapter 03's tables of twenty minutes drew requests of their
# own, so their numbers differ from these.)

# %% service
from minikv.experiments import NUM_SLOTS
from minikv.simulator import Simulation, StepTime
from minikv.specs import GPUS, MODELS
from minikv.workloads import alpaca, shared_header, sharegpt

service = shared_header(rate=2.0)
h100 = StepTime(MODELS["Vicuna 13B v1.5 16K"], GPUS["H100 SXM"])

# %% serve
def serve(manager, traffic=service, step_time=h100, seconds=1200):
    "As in chapter 03: first come, first served, until the time is up."
    scheduler = Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=2560)
    run = Simulation(scheduler, step_time)
    recorder = viz.MemoryRecorder(run.core, every_s=1.0, max_rows=10_000)
    requests = traffic.requests(duration_s=3600, seed=0)
    run.run(requests, on_step=recorder, until_s=seconds)
    run.memory, run.of = recorder.recording, {r.request_id: r for r in requests}
    return run


# %% [markdown]
# Chapter 03 gave each request one extent of exactly the slots that it would need. We
# change one thing. Each request claims as many slots, and claims them as early, but in
# blocks, wherever these lie.

# %% claim-all
class ClaimAll(PagedKVCacheManager):
    "Takes at once all the blocks that a request will ever need, as `exact` does."

    def num_blocks_for(self, request, num_tokens):
        return -(-request.max_kv_tokens // self.block_size)

    def allocate_slots(self, request, num_new_tokens, **extra):
        if request.request_id not in self.tables:
            num_new_tokens = request.max_kv_tokens - request.num_computed_tokens
        return super().allocate_slots(request, num_new_tokens, **extra)


# %% both-runs
def exact_extents(max_model_len=8192, of=ContiguousKVCacheManager):
    return of(NUM_SLOTS, 1, max_model_len=max_model_len, reserve="exact", fit="first")


extents, claimed = serve(exact_extents()), serve(ClaimAll(NUM_SLOTS // 16, 16))
print(f"{extents.memory.num_slots:,} slots in extents, "
      f"{claimed.memory.num_slots:,} in {NUM_SLOTS // 16} blocks of 16")

# %% [markdown]
# We look at these columns, for each run:
#
# | column | what it counts |
# |---|---|
# | refused | requests that found no room at their first attempt, at the head of the queue |
# | enough | those of them for which the free slots were enough in sum |
# | running | requests in a step, mean |
# | TTFT p50, p99 | time to the first token: median, and 99th percentile |
# | ITL p99 | time between two tokens of a request: 99th percentile |
# | preempted | how often a running request had to give its blocks away |

# %% show-row
def enough(refusal):
    return refusal.waiting[0].needed_slots <= refusal.free_slots


def show_row(name, run):
    refused, s = run.memory.refusals, run.summary()
    print(f"{name:18}{len(refused):8}{sum(map(enough, refused)):8}"
          f"{s['mean_num_seqs']:9.1f}{s['output_throughput']:10,.0f}"
          f"{s['p50_ttft_ms'] / 1e3:10.2f}{s['p99_ttft_ms'] / 1e3:8.1f}"
          f"{s['p99_itl_ms']:9.0f}{run.core.scheduler.num_preemptions:11,}")


HEAD = f"""{'':46}TTFT, s          ITL, ms
{'':19}refused  enough  running  tokens/s     p50     p99      p99  preempted"""

# %% [markdown]
# > **Predict.** How many requests are refused in each run? For how many of those were the
# > free slots enough in sum? And how do the median waits compare?

# %% refusals
print(HEAD)
show_row("extents", extents)
show_row("same, blocks", claimed)

# %% refusals-why
def is_document(request):
    return request.request_id.startswith("document")


waiting = [r.waiting[0] for r in claimed.memory.refusals]
needs = [r.max_kv_tokens / NUM_SLOTS for r in claimed.requests if is_document(r)]
steps = [step.end - step.start for step in claimed.core.metrics.steps]
assert not any(map(enough, claimed.memory.refusals))
print(f"refused with blocks: {sum(map(is_document, waiting))} documents, "
      f"{len(waiting) - sum(map(is_document, waiting))} questions")
print(f"a document needs {np.median(needs):.0%} of the pool (median)")
print(f"with blocks, the median TTFT is {claimed.summary()['p50_ttft_ms']:.0f} ms; "
      f"the median step takes {1e3 * np.median(steps):.0f} ms")

# %% [markdown]
# With blocks, the column *enough* is **zero**, and it cannot be anything else. Any free
# blocks will do, so free memory is always usable memory.
#
# Nearly as many requests are still refused as before. They found too few free slots in
# sum: one document takes a large part of the pool, and the questions behind it wait. But
# such a wait ends as soon as there is enough. The median wait for the first token falls
# from many seconds to about two steps.
#
# Chapter 03 had *acquitted* another cure, compaction. We put it beside the two:

# %% compacted
class Compacting(ContiguousKVCacheManager):
    "Chapter 03's: where only the gaps are in the way, all extents are slid together."

    def allocate_slots(self, request, num_new_tokens, **more):
        table = super().allocate_slots(request, num_new_tokens, **more)
        num_blocks = self.num_blocks_for(request, num_new_tokens)
        if table is None and num_blocks <= self.num_free_blocks:
            self.compact()
            table = super().allocate_slots(request, num_new_tokens, **more)
        return table


# %% compacted-row
compacted = serve(exact_extents(of=Compacting))
print(HEAD)
show_row("extents, compacted", compacted)
show_row("same, blocks", claimed)
copying = compacted.runner.seconds_in_copies / compacted.clock.now()
print(f"compaction's copies are charged to the steps: {copying:.2%} of the time")

# %% [markdown]
# While lengths are known, compaction does as well, and its copies take little time.
# Blocks add three things. No address ever changes. A request grows wherever a block is
# free. And two requests can share a block.
#
# Now the case of chapter 03. Some requests were refused while at least 40% of the pool
# was free and enough in sum. We take the one of them that waited longest:

# %% the-case
def wait(run, refusal):
    return run.of[refusal.waiting[0].request_id].first_scheduled_time - refusal.time_s


refusals = extents.memory.refusals
much = [r for r in refusals if enough(r) and r.free_slots >= 0.4 * NUM_SLOTS]
print(f"refused with 40% free and enough: {len(much)} requests")
case = max(much, key=lambda refusal: wait(extents, refusal))
[(NAME, needed)] = case.waiting
print(f"{NAME} needs {needed:,} slots. {case.free_slots:,} were free, "
      f"{case.largest_free_slots:,} in one piece. It waited {wait(extents, case):.1f} s.")
request = claimed.of[NAME]
print(f"With blocks it comes at {request.arrival_time:.2f} s "
      f"and starts at {request.first_scheduled_time:.2f} s.")

# %% strips
start, end = 570, 625  # as in chapter 03
parts = [
    ("one extent each, exactly what it needs", extents.memory.between(start, end)),
    ("as many slots, in blocks of 16", claimed.memory.between(start, end)),
]
card, drawn = viz.memory_strips(parts, highlight=[NAME])
assert any(was_enough for *_, was_enough in drawn[0].refused)
assert not any(was_enough for *_, was_enough in drawn[1].refused)
card

# %% [markdown]
# The document is in colour. In the upper strip it is one large piece, and it has to wait
# for a gap of that size. In the lower strip it is many thin lines all over the pool, and
# it starts when it comes. **Its blocks are scattered, and nothing needs them together.**
# The marks above a strip are refusals. A black mark means that the sum was enough, and
# the lower strip has none.
#
# This player shows the whole twenty minutes:

# %% player
both = [("extents", extents.memory), ("blocks", claimed.memory)]
viz.memory_player(both, count=13)  # every 100 seconds

# %% [markdown]
# ### Blocks on demand
#
# Until here we knew how long every answer becomes. Paging has a second gift: we need not
# know it. A block is taken when a token needs it, and nothing is reserved beyond it. The
# package's manager works like this. We try it first on the paper's server: OPT-13B on an
# A100, with chats.
#
# > **Predict.** We compare extents, the same number of slots in blocks, and blocks on
# > demand. What is the median wait of each?

# %% chats
a100 = StepTime(MODELS["OPT-13B"], GPUS["A100 40GB SXM"])
ways = {
    "extents": exact_extents(2048),
    "same, blocks": ClaimAll(NUM_SLOTS // 16, 16),
    "on demand": PagedKVCacheManager(NUM_SLOTS // 16, 16),
}
print(HEAD)
for name, manager in ways.items():
    show_row(name, serve(manager, sharegpt(rate=2.0), a100, seconds=600))

# %% [markdown]
# Giving up adjacency shortens the wait a lot. (More requests are refused with blocks than
# with extents, because more of them reach the head of the queue at all.)
#
# Giving up the reservation ends the wait. The slots that a chat will fill in the end
# serve others until then. And the winner is the only one of the three that does not know
# the future.
#
# > **Predict.** What happens on the service with its documents?

# %% on-demand
demand = serve(PagedKVCacheManager(NUM_SLOTS // 16, 16))
print(HEAD)
for name, run in (("extents", extents), ("same, blocks", claimed), ("on demand", demand)):
    show_row(name, run)

# %% on-demand-again
def useful(request):
    if request.finish_reason is None:
        return request.num_computed_tokens
    return request.num_tokens - 1  # the last token is never computed


computed = sum(step.num_tokens for step in demand.core.metrics.steps)
ratio = computed / sum(map(useful, demand.requests))
print(f"on demand computes {ratio:.1f} times the tokens that it needs")

# %% [markdown]
# This is the surprise. Blocks on demand make as many tokens per second as the others.
# (The traffic asked for no more.) More requests run at once. Yet the service is *worse*
# than with blocks claimed beforehand: compare the two columns p99.
#
# The scheduler admits every request while there is a block for it. All of them grow. When
# the last block is gone, one request has to step back: this is **preemption**. Its blocks
# are taken away, and later all its tokens are computed again. With documents of thousands
# of tokens, this server spends most of its work on tokens that it had computed before.
#
# So be exact about what paging cures. It ends the loss by memory in pieces. **Admitting
# more than will fit** is another problem. Chapter 03's growing extents failed in the same
# way. Chapter 06 is about it.
#
# ## 5. What is still wasted
#
# A request's last block is rarely full. We call its empty slots the **tail**. With block
# size *B*, a tail has at most *B* − 1 slots, and a request has at most one tail, however
# long it is.
#
# > **Predict.** On average over time, which part of the last block is empty? And with
# > `sharegpt` and blocks of 16, which share of the held slots is used?

# %% tails
def tails(block_size):
    "Of chats, at every tenth step: slots written, tail slots, blocks in the table."
    seen = []

    def look(core):
        if len(core.metrics.steps) % 10 == 0:
            for name, table in core.manager.tables.items():
                live = core.manager.requests[name].num_computed_tokens
                seen.append((live, len(table) * block_size - live, len(table)))

    manager = PagedKVCacheManager(NUM_SLOTS // block_size, block_size)
    run = Simulation(Scheduler(manager, max_num_seqs=256), a100)
    run.run(sharegpt(rate=1.5).requests(duration_s=400, seed=0), on_step=look)
    return np.array(seen)


# %% tails-table
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
waste = {size: tails(size) for size in SIZES}
print("block size,   tail, slots     tail, blocks   used of held   table, entries")
print("tokens        mean    most    mean           slots          mean")
for size, seen in waste.items():
    live, tail, entries = seen.mean(axis=0)
    assert seen[:, 1].max() <= size - 1
    print(f"{size:6}{tail:12.1f}{seen[:, 1].max():8}{tail / size:12.2f}"
          f"{live / (live + tail):16.1%}{entries:16.1f}")

# %% utilisation
def share(tail):  # percent of the held slots, if each request had so many empty ones
    return 100 * tail / (waste[1][:, 0].mean() + tail)


measured = [(n, 100 * s[:, 1].sum() / s[:, :2].sum()) for n, s in waste.items()]
points = {
    "at most: B − 1 empty slots": [(size, share(size - 1)) for size in SIZES],
    "measured": measured,
}
assert all(abs(y - share((size - 1) / 2)) < 0.5 for size, y in measured)  # half a block

# %% utilisation-figure
from minikv.viz.gantt import curves

card, drawn = curves(
    points,
    title="Empty slots among those that are held",
    xlabel="block size, tokens",
    ylabel="percent of held slots",
    powers_of_two=True,
)
assert drawn["measured"] == measured
card

# %% [markdown]
# The tail is half a block, or a little less. A tail has 0 to *B* − 1 empty slots. None of
# these counts is likelier than another, so the mean is (*B* − 1) / 2. Each request has
# one tail, so with blocks of 16 nearly all held slots are used. The slabs of chapter 02
# left most of theirs empty.
#
# Why not take blocks of 1? They waste nothing. But the kernel has to read each entry of
# the table, and it likes long runs of memory (chapter 05). And the GPU gets the whole
# table at every step: with blocks of 1 it has hundreds of entries per request. Large
# blocks have a price, too, beside the tail: only whole blocks can be shared (chapter 07).
# vLLM's default is 16, and so is the course's.
# <!-- source: vLLM's documentation, block_size -->
#
# ## 6. How many run at once
#
# With fewer wasted slots, more requests fit in the same memory. The paper's Figure 13
# counts how many. Its server is OPT-13B, with the pool of its Figure 2, 15,700 slots. We
# play ten minutes of it.
# <!-- source: Kwon et al. 2023, Fig. 2; NUM_SLOTS in minikv.experiments -->
#
# We use two models of a step's time. The *roofline* counts arithmetic and memory traffic,
# and nothing else. The other model adds 0.30 ms for each request in a step.
# <!-- source: FIG13_MODELS in minikv.experiments -->
#
# > **Predict.** With `max`, each request holds 2,048 slots. How many requests run at
# > once? And how many with paged blocks? <!-- source: the longest sequence of OPT-13B -->

# %% figure-13
from minikv.experiments import FIG13_MODELS, FIG13_PAPER, paper_run, paper_step_time

runs = {}
for policy in ("max", "pow2", "exact", "paged"):
    for name, overhead in FIG13_MODELS.items():
        runs[policy, name] = paper_run(policy, duration_s=600, warmup_s=200,
                                       step_time=paper_step_time(**overhead))

# %% figure-13-table
print("ShareGPT, 2 requests/s. Requests in a step, mean:")
print(f"{'':8}{'paper':>8}{'roofline':>12}{'with 0.30 ms per request':>28}")
for policy, paper in FIG13_PAPER["sharegpt"].items():
    roofline, more = (runs[policy, name].mean_batched for name in FIG13_MODELS)
    print(f"{policy:8}{paper:8.2f}{roofline:12.2f}{more:28.2f}")

# %% which-limit
print("Requests that wait when the ten minutes end:")
print(f"{'':16}{'roofline':>12}{'with 0.30 ms per request':>28}")
for policy in FIG13_PAPER["sharegpt"]:
    cores = (runs[policy, name].simulation.core for name in FIG13_MODELS)
    roofline, more = (len(core.scheduler.waiting) for core in cores)
    print(f"{policy:16}{roofline:12}{more:28}")

# %% [markdown]
# The first three rows hardly depend on the model of the step's time. Their queues grow
# without end, so memory sets the number. The paged run has no queue left: it serves all
# requests that come. How many are there at once then follows Little's law: it is the rate
# of arrival times the time that each request stays. If steps took twice as long, there
# would be more.
#
# So read the last line of the first table with care. The roofline gives far fewer
# requests than the paper. With 0.30 ms more per request it comes close. But these 0.30 ms
# *were chosen to make it so*. **A fit is not evidence.** It would be evidence if the same
# number met something else that the paper measured. The other half of Figure 13 is
# Alpaca: short questions, 30 requests a second.
# <!-- source: Kwon et al. 2023, Fig. 13; FIG13_MODELS in minikv.experiments -->

# %% alpaca
paper = FIG13_PAPER["alpaca"]["paged"]
print(f"Alpaca, 30 requests/s, paged. Requests in a step, mean; the paper has {paper}:")
for name, overhead in FIG13_MODELS.items():
    how = {"duration_s": 300, "warmup_s": 100, "step_time": paper_step_time(**overhead)}
    run = paper_run("paged", workload=alpaca(rate=30.0), **how)
    off = run.mean_batched / paper - 1
    print(f"{name:32}{run.mean_batched:7.1f}, {off:+.0%} from the paper")

# %% [markdown]
# It does come close. That makes 0.30 ms of work per request and step plausible for an
# engine of that time. It proves nothing about an A100. `python -m minikv simulate fig13`
# plays both workloads under all policies for an hour.
#
# The paper's Figure 2 says that tokens fill 96.3% of vLLM's KV memory. We compute two
# shares:
# <!-- source: Kwon et al. 2023, Fig. 2 -->

# %% figure-2
from minikv.experiments import fig2_run

report = fig2_run("paged", duration_s=600, warmup_s=200).report
held = report.live + report.reserved + report.internal
print(f"tokens fill {report.live / report.total:.1%} of the pool")
print(f"tokens fill {report.live / held:.1%} of the slots that are held")
print(f"{report.free / report.total:.1%} of the pool is free")

# %% [markdown]
# The first share depends on the step times, and the second hardly does. So only the
# second can stand beside the paper's.
#
# ## 7. `check()`: say what must be true
#
# A manager's faults do not crash. If a block stands in two tables, one request overwrites
# the other one's past. The answer may then be fluent nonsense, and it may come much
# later. So every manager of this course can say what must be true of its tables and
# counters at any moment. These are its **invariants**. `check()` tests them:

# %% show-check
show(PagedKVCacheManager.check)

# %% [markdown]
# A check that cannot fail checks nothing. So we break each invariant on purpose. First,
# two tables name the same block.

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
# For the other faults we catch the error, so that one cell can print them all. First,
# faults in the tables:

# %% show-broken
def show_broken(faults):
    for name, fault in faults.items():
        broken = good_books()
        fault(broken)
        try:
            broken.check()
        except RuntimeError as error:
            print(f"{name + ':':22}{error}")
        else:
            raise AssertionError(f"{name} went unnoticed")


# %% break-tables
show_broken({
    "forgotten, not freed": lambda m: m.tables["A"].pop(),
    "named twice": lambda m: m.tables["B"].append(m.tables["B"][-1]),
    "beyond the pool": lambda m: m.tables["B"].append(8),
    "no slot for a token": lambda m: setattr(m.requests["B"], "num_computed_tokens", 5),
    "no owner": lambda m: m.requests.pop("B"),
})

# %% [markdown]
# Then faults in the pool:

# %% break-the-pool
def freed_early(m):
    m.block_pool.free_block_queue.append(m.block_pool.blocks[0])  # ref_cnt is still 1


def never_freed(m):
    [block_id] = m.drop_table(m.requests["B"])
    m.block_pool.blocks[block_id].ref_cnt = 0


def miscounted(m):
    m.block_pool.free_block_queue.num_free_blocks += 1


def torn(m):
    queue = m.block_pool.free_block_queue
    queue.head.next_free_block.next_free_block.prev_free_block = queue.head


# %% break-the-pool-show
show_broken({
    "freed while held": lambda m: m.block_pool.free_blocks([m.block_pool.blocks[0]]),
    "in the queue, in use": freed_early,
    "never freed": never_freed,
    "miscounted": miscounted,
    "a torn queue": torn,
})

# %% [markdown]
# Is there a fault that no such check can see? We swap two entries of a table while it is
# in use. The first time we swap two full blocks. The second time we swap a full block and
# the tail. With `check_every_step=True` the engine calls `check()` after every step.
#
# > **Predict.** Which of the swaps does `check()` notice? Which of them changes the
# > answer?

# %% blind-spot
def answer(swap=None):
    limits = {"block_size": 4, "max_model_len": 40, "check_every_step": True}
    llm = LLM(loaded, kv_cache_manager="paged", **limits)
    llm.add_request(prompts[2], SamplingParams(max_tokens=10, ignore_eos=True), "A")
    for step in range(10):
        [output] = llm.step()
        if swap and step == 4:
            table, (i, j) = llm.manager.tables["A"], swap
            table[i], table[j] = table[j], table[i]
    return output.outputs[0].text


print("no swap              ", repr(answer()))
print("two full blocks      ", repr(answer((0, 1))))
print("a full block and tail", repr(answer((0, -1))))

# %% [markdown]
# `check()` ran after every step, and it never failed. The first swap does no harm. A key
# is turned by its position *before* it is stored (chapter 01), and a decode step sums
# over all keys, in whatever order they come.
#
# The second swap changes the answer. The tail now stands in front, so the request reads
# slots that were never written. Its next tokens are written over its first ones, so it
# destroys its own past. Tables say which request holds a block, not what stands in it.
#
# So the tests of this engine go one step further. Their runner notes in each slot which
# history wrote it, and its next token depends on what it reads back (`tests/oracle.py`).
# While you write a manager, run it with `check_every_step=True`. Before you trust it,
# compare answers.
#
# ## 8. What paging does not fix
#
# **One request is not faster.** It takes the same steps, and each step reads the same K
# and V.
#
# > **Predict.** One request runs alone, for 12 tokens, with slabs and then with blocks.
# > What is the ratio of the times?

# %% one-request tags=["nbval-ignore-output"]
def alone(manager):
    llm = LLM(loaded, kv_cache_manager=manager, max_model_len=64)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts[0], params, use_tqdm=False)
    return time.perf_counter() - start, len(llm.metrics.steps)


for manager in (ContiguousKVCacheManager, PagedKVCacheManager):
    (first_s, num_steps), (second_s, _) = alone(manager), alone(manager)
    print(f"{manager.__name__:26} {num_steps} steps, {min(first_s, second_s):.2f} s")

# %% [markdown]
# The times are the same, but for noise. Paging buys *company*: more requests in a step
# that takes about as long.
#
# **The tail stays**, as measured in section 5. It is the price of one block size for all.
#
# **The pool can still run out.** Now it can run out at any step, because every request
# may want one more block. We put two requests into eight blocks of four.
#
# > **Predict.** What happens when no block is left? What is lost?

# %% run-out
eight = {"block_size": 4, "num_gpu_blocks_override": 8, "max_model_len": 24}
tight = LLM(loaded, kv_cache_manager="paged", **eight)
for name, prompt in zip("AB", prompts[:2], strict=True):
    tight.add_request(prompt, fourteen, name)
needs = [-(-request.max_kv_tokens // 4) for request in tight.scheduler.waiting]
print("blocks needed at the end:", needs, "together", sum(needs))
snapshots, tokens = [], {}
while tight.has_unfinished_requests():
    for output in tight.step():
        tokens[output.request_id] = output.outputs[0].token_ids
    snapshots.append(viz.snapshot(tight))

# %% run-out-picture
card, drawn = viz.pool_over_steps(snapshots, title="Eight blocks for two requests")
as_before = [tokens[name] == reference[i] for i, name in enumerate("AB")]
print(f"preemptions: {tight.scheduler.num_preemptions}; as in section 3: {as_before}")
card

# %% [markdown]
# B wants one more block when there is none. B came last, so B is the request that steps
# back. Its blocks are free again, and its *tokens* are kept, so no output is lost. Now B
# needs all its blocks at once, so it waits until A has ended. Then one step computes all
# its tokens again, and B goes on. B pays with time. Which request to preempt, which not
# to admit, and whether to move blocks to the host's memory instead, is the subject of
# chapter 06.
#
# ## What this does not show
#
# - The seconds in sections 4 to 6 come from a step-time model. But it does not take a
#   model to see that no request is refused for want of a gap: this follows from the
#   tables.
# - Reading through a table costs something, and the simulator leaves it out. Chapter 05
#   measures it.
# - `ClaimAll` and `exact` know the length of each answer, and no server does. We use them
#   to change one thing at a time.
# - We used one seed, and twenty minutes of traffic or less. The traffic is made up, as in
#   chapter 03.
# - The identical answers are those of four prompts in `float32`. The engine's tests ask
#   many more.
#
# ## What you have now
#
# - A pool of blocks of one size, and a table per request. Any free block will do, so
#   *free* means *usable*.
# - Slot = `table[p // B] * B + p % B`. A block is taken when a step *computes* beyond the
#   last one. The token that has just been sampled has no slot yet.
# - A request wastes at most *B* − 1 slots, and about half a block on average.
# - Freed is not erased. Order in the pool means nothing. One table serves all layers.
# - `check()` proves the tables and counters. Only answers prove the contents.
# - Paging serves more requests at once. It makes none of them faster, and it does not
#   decide which to admit.
#
# For the exercises, run `python -m minikv start 04`. These are the modules of `minikv` so
# far:

# %% lines-so-far tags=["nbval-ignore-output"]
cache = ("base", "extent_base", "extent_tree", "extents", "buddy", "contiguous", "paged")
parts = ["request", "specs", "metrics", *(f"kv_cache/{name}" for name in cache)]
parts += ["scheduler", "workloads", "core", "simulator", "model/loader", "model/tiny"]
print(*viz.lines_of_minikv(parts), sep="\n")
