# %% [markdown]
# # 02 Many requests
#
# Chapter 01 ended with a reason to serve many requests at once: a step reads the weights once,
# however many rows it computes. This chapter serves them first in the obvious way, as a padded batch.
# It counts what such a batch wastes: rows that are computed and never read, and memory that is held
# and never filled. Then the batch learns to change at every step, and the wasted rows are gone. The
# wasted memory is not. A simulator shows how much it is over an hour of traffic, and how long requests
# wait because of it.
#
# What the chapter adds to `minikv`:
#
# | file | what it is |
# |---|---|
# | `kv_cache/contiguous.py` | a slab of slots for each request |
# | `scheduler.py`, `static_batching.py` | which requests the next step computes: iteration by iteration, or in static batches |
# | `core.py` | the one loop: schedule, run, update |
# | `simulator/`, `workloads/` | the same loop without tensors, and traffic to play on it |
# | `metrics.py` | how long people wait |
#
# **Predict, run, explain**, as before.

# %% imports
import numpy as np
import torch

import minikv.viz as viz
from minikv import LLM, ContiguousKVCacheManager, Request, SamplingParams, show
from minikv.model.loader import load

_ = torch.set_grad_enabled(False)

# %% load
loaded = load("smollm2", dtype="float32", device="cpu")
model, tokenizer, spec = loaded
START = tokenizer.bos_token_id


def text(token_id):
    return "<SOS>" if token_id == START else tokenizer.decode([token_id])


# %% two-prompts
A = [START, *tokenizer(" I think this movie is better").input_ids]
B = [START, *tokenizer(" I really like").input_ids]
for ids in (A, B):
    print(len(ids), "tokens:", [text(i) for i in ids])

# %% [markdown]
# ## 1. Two requests, one batch
#
# These two requests go with us through the section. We want the next token of both from one pass. A
# model takes a tensor of token ids, one row per request.

# %% ragged tags=["raises-exception"]
torch.tensor([A, B])

# %% [markdown]
# A tensor is a rectangle. So the shorter row has to be filled up with **padding**: tokens that mean
# nothing. But on which side?
#
# > **Predict.** We want the logits after the last token of each row. What goes wrong for B with
# > padding on the right? And with padding on the left, if we do nothing else about it?

# %% padded-rows
PAD, n, k = tokenizer.pad_token_id, len(A), len(A) - len(B)
left, right = [PAD] * k + B, B + [PAD] * k
see_all, hide = [1] * n, [0] * k + [1] * len(B)
columns, positions = list(range(n)), [0] * k + list(range(len(B)))


def last_logits(row_b, mask_b, positions_b):
    masks, where = torch.tensor([see_all, mask_b]), torch.tensor([columns, positions_b])
    ids = torch.tensor([A, row_b])
    both = model(ids, attention_mask=masks, position_ids=where, use_cache=False)
    return both.logits[1, -1]


# %% four-ways
alone = model(torch.tensor([B]), use_cache=False).logits[0, -1]
for name, logits in {
    "right, nothing else": last_logits(right, see_all, columns),
    "left, nothing else": last_logits(left, see_all, columns),
    "left, own positions": last_logits(left, see_all, positions),
    "left, mask": last_logits(left, hide, columns),
    "left, mask, own positions": last_logits(left, hide, positions),
}.items():
    print(f"{name:26} off by {(logits - alone).abs().max():2.0f} from B alone")

# %% [markdown]
# With padding on the right, the last column of B is a pad: we asked what follows three pads. On the
# left, the last column is the last token of both rows. Yet a pad is a token like any other. It gets K
# and V, and B's tokens read them. The **mask** forbids that. With the mask, the logits of B are what
# they are for B alone.
#
# The line "left, mask" may surprise you. The positions are counted by columns there, so each of B's
# tokens has a position that is too high by three, and nothing changes. This model encodes positions as
# rotations (chapter 01), and only the distance between two tokens enters a score. A model with a
# learned vector per position would be off. And every model has a longest position that it was made
# for. So positions should start at 0 after the pads.
#
# Where do the K and V of a row go? Into a **slab**: consecutive slots, enough for the longest sequence
# that is allowed. The part of an engine that hands out slots is its *KV-cache manager*. A manager needs
# two methods. Its answer is a **block table**: the blocks that hold the request's tokens, in order. One
# table serves all layers, since every layer has a pool of the same shape.

# %% slabs
from math import ceil

from minikv import KVCacheManager


class Slabs(KVCacheManager):
    "Equal slabs; the lowest free one is taken."

    def __init__(self, num_blocks, block_size, max_model_len):
        super().__init__(num_blocks, block_size)
        self.size = ceil(max_model_len / block_size)
        self.free_starts = list(range(0, num_blocks - self.size + 1, self.size))

    def allocate_slots(self, request, num_new_tokens):
        if request.request_id not in self.tables:
            if not self.free_starts:
                return None  # not now
            start = self.free_starts.pop(0)
            self.set_table(request, range(start, start + self.size))
        return self.tables[request.request_id]

    def free(self, request):
        table = self.drop_table(request)
        self.free_starts = sorted([*self.free_starts, *table[:1]])


# %% [markdown]
# The engine takes such a class as it is. We give it a small pool in slabs of twelve slots. With
# `batching="static"` it pads and masks as we did.
#
# A and B are not alone in the pool. Six other requests came first and hold slabs. Two of them have
# just left. A third one leaves after the first step of A and B.

# %% others
def others_in(manager):
    "Other people's requests: they hold slabs, and are not run here."
    others = [Request(f"other {i}", num_prompt_tokens=9, max_tokens=3) for i in range(6)]
    for other in others:
        manager.allocate_slots(other, 9)
    manager.free(others[1])
    manager.free(others[4])
    return others


# %% engine
pool = {"block_size": 4, "num_gpu_blocks_override": 24, "max_model_len": 12}
llm = LLM(loaded, batching="static", kv_cache_manager=Slabs, **pool)
others = others_in(llm.manager)
llm.add_request(A, SamplingParams(max_tokens=3, ignore_eos=True), "A")
llm.add_request(B, SamplingParams(max_tokens=6, ignore_eos=True), "B")
llm.step()
llm.manager.free(others[3])
for name, table in llm.manager.tables.items():
    print(f"{name:7} blocks {table}, slots {table[0] * 4} to {table[-1] * 4 + 3}")

# %% [markdown]
# > **Predict.** The mask of row B has 7 rows and 7 columns. What stands in the three rows of the
# > pads? (Careful: a softmax over nothing divides zero by zero.)

# %% mask
bias = llm.runner.last_step.groups[0].bias(8, None, torch.float32)  # 0: a query may look
for token_id, row in zip(left, bias[1, 0, 0], strict=True):
    name = text(token_id) if token_id != PAD else "<pad>"
    print(f"{name:8}", *("#" if x == 0 else "." for x in row[:7]))

# %% [markdown]
# This is the engine's own mask. B's tokens have a triangle in the corner. Each pad sees itself, so that
# its softmax has something to sum over. No other token sees a pad.
#
# > **Predict.** The two rows stand one below the other in the batch. How do they lie in memory?
#
# The next figure is the one to keep from this chapter. On the left is the batch as the model sees it: a
# rectangle. On the right is the pool as it lies in memory, one slab in each row of the drawing. A line
# leads from every token to the slot that holds its K and V. All of it is read from block tables.

# %% padded-batch
from minikv.viz import batch

card, drawn = batch.batch_memory(viz.snapshot(llm), batch.rows_of(llm, text))
assert drawn.slots("A") == list(range(12, 19)) and drawn.slots("B") == list(range(48, 55))
assert drawn.slots("B", "pad") == [48, 49, 50]
card

# %% [markdown]
# Look at three things.
#
# - **Neighbours in the batch are no neighbours in memory.** Between the slabs of A and B lie another
#   request's slab and a hole. A request that leaves makes a hole. A request that comes takes the first
#   hole there is.
# - **Pads are real.** Three slots of B hold keys and values that were computed and written, and that
#   mean nothing. They are held until the batch ends.
# - **A slab is larger than its row.** Striped slots are reserved for tokens that may still come. Dotted
#   slots are internal waste: A asked for three tokens, and its slab has room for more. (Padding may
#   still be written there, as you will see. Nothing ever reads it.)
#
# The next cell lays out the same batch with the scheduler and the package's own manager alone. That
# manager is `ContiguousKVCacheManager`: our class, and the checks that it needs. There are no tensors
# here, and neither of the two has ever seen one. With a running kernel, drag the lengths and the step.
# Point at a token, and its line and its slot light up.
#
# > **Predict.** Five steps in, A has long ended. What is in its row?

# %% lay-out
from minikv.static_batching import StaticScheduler

ANSWER_A = tokenizer(" than the previous").input_ids
ANSWER_B = tokenizer(" to do. I'm a").input_ids


def lay_out(step, tokens_in_A, tokens_in_B):
    manager = ContiguousKVCacheManager(24, 4, max_model_len=12)
    others, scheduler = others_in(manager), StaticScheduler(manager)
    scheduler.add(Request("A", A[:tokens_in_A], max_tokens=3))
    scheduler.add(Request("B", B[:tokens_in_B], max_tokens=6))
    for i in range(step):
        scheduled, _ = scheduler.schedule()
        sampled = [ANSWER_A[min(i, 2)], ANSWER_B[i]]
        scheduler.update(scheduled, sampled, now=0.0, step=i)
    manager.free(others[3])
    rows = batch.rows_of(scheduler, text)
    return batch.batch_memory(viz.snapshot(scheduler, step), rows)


# %% explorer
lengths = {"tokens_in_A": (7, 1, 7), "tokens_in_B": (4, 1, 4)}
batch.batch_explorer(lay_out, step=(5, 1, 5), **lengths)

# %% [markdown]
# There is more padding, now at the end. The batch has to stay a rectangle, so A's row goes on until B
# has ended. Its pads are computed and written, and never read. A's slab is held as long, though no
# token of A can come any more. (The token that A sampled last is never fed, as chapter 01 showed. A pad
# is fed in its place.)
#
# > **Predict.** Over the whole batch, how many tokens does the engine compute? And how many of them did
# > a request need?

# %% count-static
while llm.has_unfinished_requests():
    outputs = llm.step()
computed = [step.num_tokens for step in llm.metrics.steps]
needed = (len(A) + 3 - 1) + (len(B) + 6 - 1)
assert sum(computed) == 2 * (len(A) + 6 - 1)
print("tokens computed in each step:", computed, "together", sum(computed))
print("needed:", needed, "wasted:", sum(computed) - needed, "given to users:", 3 + 6)
for output in outputs:
    print(output.request_id, repr(output.outputs[0].text))

# %% [markdown]
# Every row becomes as long as the longest prompt and the longest answer together. So padding costs more
# than memory: each pad passes through all layers, like any token. When somebody quotes tokens per
# second, ask which tokens are meant. Computed, needed, and given to users are three different numbers
# from one batch.
#
# ## 2. Change the batch at every step
#
# Now there are twelve requests, and a batch with four **places**. A place is a row that a step computes.
# A server learns the length of an answer only when it ends. We fix the lengths here, so that we can
# count.

# %% twelve
NAMES, PLACES = "ABCDEFGHIJKL", 4
num_output = dict(zip(NAMES, [4, 20, 6, 3, 12, 5, 9, 16, 2, 8, 10, 4], strict=True))
sentence = " Some people say that the sea was never as calm as on that day"
words = tokenizer(sentence).input_ids
prompts = {name: [START, *words[: 3 + 2 * (i % 4)]] for i, name in enumerate(NAMES)}
print("prompt tokens:", {name: len(ids) for name, ids in prompts.items()})
print("output tokens:", num_output)

# %% [markdown]
# > **Predict.** A request with n tokens of output takes n steps: the first step computes the prompt and
# > samples the first token. How many steps do three static batches of four requests take? And with four
# > places, what is the fewest number of steps that any order could take?

# %% predict-steps
lengths = list(num_output.values())
print("static:", [max(lengths[i : i + PLACES]) for i in range(0, 12, PLACES)])
print("never fewer than", max(ceil(sum(lengths) / PLACES), max(lengths)))

# %% [markdown]
# A static batch takes as long as its longest answer. Why should the other requests wait? A step knows
# nothing of the step before it except the K and V in the pool. So a request may leave as soon as *it*
# has ended, and the next request in line may take its place in the very next step. This is
# **iteration-level scheduling** (Orca: Yu et al., OSDI 2022), today mostly called continuous batching.
# It needs no new machinery, only a loop that asks its scheduler again before every step:

# %% show-loop
from minikv.core import EngineCore

show(EngineCore.step)

# %% [markdown]
# Read it as a sentence: schedule, copy, run, record, update. There is nothing to copy in this chapter;
# chapter 03 moves requests. `check()` compares the manager's books with each other and is off unless
# you ask for it.
#
# What happens if a step is cut short, by an error or by Ctrl-C? The engine keeps the tokens of each
# request, forgets all K and V, and computes them again. That costs time, and it is always right.
#
# Both ways of batching run this loop, with the same model and the same kernels. They differ in what
# `schedule()` answers. We put a recorder between the loop and the model. It notes each answer.

# %% serve
from minikv.viz import gantt


def serve(batching):
    slabs = {"kv_cache_manager": ContiguousKVCacheManager, "max_model_len": 64}
    llm = LLM(loaded, batching=batching, max_num_seqs=PLACES, **slabs)
    recorder, answers = gantt.record(llm.core), {}
    for name, ids in prompts.items():
        params = SamplingParams(max_tokens=num_output[name], ignore_eos=True)
        llm.add_request(ids, params, name)
    while llm.has_unfinished_requests():
        for output in llm.step():
            answers[output.request_id] = output.outputs[0].token_ids
    return llm.core, recorder.steps, answers


# %% both
twice = ("static", "continuous") * 2  # for the clock, below
served = [serve(batching) for batching in twice]
static_steps, steps = served[0][1], served[1][1]
answers = served[0][2]
assert all(each[2] == answers for each in served)
print("the same", sum(map(len, answers.values())), "tokens, request by request")

# %% gantt
card, runs = gantt.gantt({"static": static_steps, "iteration-level": steps}, PLACES)
assert [run.num_steps for run in runs.values()] == [len(static_steps), len(steps)]
card

# %% [markdown]
# Find F in both charts. In the static chart F waits until B has ended. After its own last token F still
# occupies a place. In the other chart F takes over A's place, while B and C are in the middle of their
# answers. F's prompt is computed in the same pass as their single tokens. There is no rectangle, and so
# no padding: the engine lays all tokens of a step in one line, and each request reads through its own
# table.
#
# So continuous batching is *not a bigger static batch*. The batch has four places in both charts. What
# changed is when a place may change hands. A new request waits for any place, and no longer for the end
# of the whole batch.

# %% count-both tags=["nbval-check-output"]
for title, run in runs.items():
    total = PLACES * run.num_steps
    print(f"{title:16} {run.num_steps} steps, {total} places: "
          f"{run.count('finished')} for ended answers, {run.count(None)} empty, "
          f"{run.utilisation:.0%} useful")
for title, run in (("static", static_steps), ("iteration-level", steps)):
    wasted = sum(entry.num_tokens - entry.num_useful for step in run for entry in step)
    print(f"{title:16} {wasted} tokens computed and never read")

# %% [markdown]
# At the end, when no request waits any more, nine places stay empty. They are why it takes 27 steps and
# not 25. In steady traffic there is no end. (The wasted tokens of the static batches are more than
# their wasted places, since the pads before the prompts count too.)
#
# > **Predict.** If every step took equally long, how many times as fast would the second run be? Will
# > the clock of this machine agree?

# %% bound
bound = runs["static"].num_steps / runs["iteration-level"].num_steps
print(f"{bound:.2f} times as fast, if all steps take equally long")

# %% durations
def durations(*cores):
    "Seconds of each step, the fastest of several runs: other work can only add time."
    seconds = [[step.end - step.start for step in c.metrics.steps] for c in cores]
    return np.min(seconds, axis=0)


# %% wall-clock tags=["nbval-ignore-output"]
static_times = durations(served[0][0], served[2][0])
times = durations(served[1][0], served[3][0])
print(f"measured: {static_times.sum():.2f} s and {times.sum():.2f} s, "
      f"{static_times.sum() / times.sum():.2f} times as fast")
print(f"a step: {static_times.mean() * 1e3:.0f} ms and {times.mean() * 1e3:.0f} ms")

# %% [markdown]
# The ratio of the step counts is the gain where a step takes equally long with few rows and with many.
# A step nearly does while reading the weights takes most of its time. On a CPU each row costs time. Two
# things then move the ratio: rows that are left out save a little more, and a prompt that joins makes
# the step longer for the others in it. The two may cancel.
#
# The step counts are facts. Seconds from two runs on a machine with other things to do are an
# impression. Much larger factors have been published. They come from answers that differ more in
# length, and from comparing more than one change at a time.
#
# ## 3. The same loop without tensors
#
# To see an hour of traffic we would have to wait an hour, with a GPU that we may not have. But look at
# the loop again. Scheduler and manager never see a tensor. The model appears in one line, where the
# runner is asked to `run`. Another runner can answer:

# %% show-runner
from minikv.simulator import SimulatedRunner

show(SimulatedRunner.run)

# %% [markdown]
# This runner samples nothing but zeros, and moves a virtual clock by the time that a step would have
# taken. Every *decision* is still made by the engine's own code. We check that with our twelve
# requests:

# %% simulate
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation, StepTime


def simulate(step_time, requests, scheduler=Scheduler, places=PLACES):
    manager = ContiguousKVCacheManager(4096, 16, max_model_len=64)
    simulation = Simulation(scheduler(manager, max_num_seqs=places), step_time)
    simulation.recorder = gantt.record(simulation.core)
    return simulation.run(requests)


def the_twelve():
    sizes = {name: len(ids) for name, ids in prompts.items()}
    return [Request(name, num_prompt_tokens=sizes[name], max_tokens=num_output[name])
            for name in NAMES]


# %% same-decisions
from minikv.specs import GPUS

a100 = GPUS["A100 40GB SXM"]
anything = StepTime(spec, a100)  # all requests come at once: no decision depends on it
assert simulate(anything, the_twelve()).recorder.steps == steps
assert simulate(anything, the_twelve(), StaticScheduler).recorder.steps == static_steps
print("the same decisions in each of", len(steps), "and", len(static_steps), "steps")

# %% [markdown]
# What is made up is the duration of a step. `StepTime` is chapter 01's roofline: the larger of the time
# for compute and the time for memory, plus an overhead. For this machine we measure the two roofs. Two
# overheads, one per step and one per request in it, are fitted to the iteration-level run above.

# %% roofs
from timeit import repeat

square, big = torch.randn(1024, 1024), torch.ones(1 << 26)
peak = 2 * 1024**3 / min(repeat(lambda: square @ square, number=1, repeat=20))
bandwidth = big.nbytes / min(repeat(big.sum, number=1, repeat=8))

# %% fit tags=["nbval-ignore-output"]
from minikv.specs import GPU

here = GPU("this machine", 8, bandwidth, peak, "measured above")
roofs = {"compute_efficiency": 1.0, "memory_efficiency": 1.0}
bare = simulate(StepTime(spec, here, overhead_s=0.0, **roofs), the_twelve())
rows = np.array([[1.0, step.num_seqs] for step in bare.core.metrics.steps])
fit = np.linalg.lstsq(rows, times - durations(bare.core), rcond=None)[0].clip(0)
overheads = {"overhead_s": fit[0], "overhead_per_request_s": fit[1]}
calibrated = StepTime(spec, here, **overheads, **roofs)
print(f"{bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s")
print(f"overheads: {fit[0] * 1e3:.0f} ms per step, {fit[1] * 1e3:.1f} ms per request")

# %% [markdown]
# A fit proves nothing about the run that it was fitted to. So we predict two runs that it has not seen.
# The first has other lengths, drawn from a seed. The second has another number of places.
#
# > **Predict.** Which of the two predictions will be further off?

# %% engine-run
def engine_run(sizes, places):
    slabs = {"kv_cache_manager": ContiguousKVCacheManager, "max_model_len": 64}
    engine = LLM(loaded, max_num_seqs=places, **slabs)
    for size in sizes:
        params = SamplingParams(max_tokens=size, ignore_eos=True)
        engine.add_request([START] * size, params)
    while engine.has_unfinished_requests():
        engine.step()
    return engine.core


# %% predict-runs tags=["nbval-ignore-output"]
for what, seed, places in (("another seed", 1, 4), ("another batch size", 2, 6)):
    sizes = np.random.default_rng(seed).integers(3, 13, 6).tolist()
    measured = durations(*(engine_run(sizes, places) for _ in range(2))).sum()
    requests = [Request(str(i), num_prompt_tokens=s, max_tokens=s)
                for i, s in enumerate(sizes)]
    predicted = durations(simulate(calibrated, requests, places=places).core).sum()
    print(f"{what}: measured {measured:.2f} s, predicted {predicted:.2f} s, "
          f"error {predicted / measured - 1:+.0%}")

# %% [markdown]
# The errors differ from run to run, and are larger while the machine is busy with other things: two
# overheads are a coarse picture of a CPU. So keep two kinds of answer apart. What the simulator says
# about *which request runs when* is exact, as long as the arrivals meet the same steps. What it says
# about seconds is as good as the lines above.
#
# ## 4. Where the memory goes
#
# Now to a real server: OPT-13B in 16-bit numbers on an A100 with 40 GB. This pair is from the paper that
# made this course's subject (Kwon et al. 2023). The traffic is `sharegpt`: its lengths have the means of
# that data set. <!-- source: section 6.1 and Figure 11 of the paper -->

# %% server
from minikv.simulator import num_blocks_on
from minikv.specs import MODELS

opt = MODELS["OPT-13B"]
# 9/10 of the memory, less the weights, in blocks of 16 slots.
num_blocks = num_blocks_on(a100, opt, 16)
num_slots, slab = num_blocks * 16, opt.max_model_len
print(f"{opt.parameter_bytes / 1e9:.1f} GB of weights")
print(f"{opt.kv_bytes_per_token:,} bytes of K and V per token")
print(f"a pool of {num_slots:,} slots: {num_slots // slab} slabs for {slab:,} tokens fit")

# %% [markdown]
# This GPU serves six requests at once, and no more, however short they are.
#
# > **Predict.** An average request has 161 prompt tokens and 338 output tokens. Which part of the slabs
# > holds K and V, on average over time? (Halfway through an answer is a good guess.)
# > <!-- source: Kwon et al. 2023, Fig. 11, rounded -->

# %% traffic
from minikv.workloads import sharegpt


def hour_of(rate):
    return sharegpt(rate).requests(duration_s=3600, seed=0)


requests = hour_of(0.6)
prompt_tokens = np.array([r.num_prompt_tokens for r in requests])
output_tokens = np.array([r.max_tokens for r in requests])
print(f"{len(requests):,} requests; on average {prompt_tokens.mean():.0f} prompt tokens "
      f"and {output_tokens.mean():.0f} output tokens")

# %% the-server
def server(scheduler=Scheduler, report_every=0):
    manager = ContiguousKVCacheManager(num_blocks, 16, max_model_len=slab)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    step_time = StepTime(opt, a100)
    return Simulation(scheduler(manager, **limits), step_time, report_every=report_every)


# %% simulate-hour tags=["nbval-ignore-output"]
import time

start = time.perf_counter()
busy = server(report_every=50).run(requests)
elapsed = time.perf_counter() - start
print(f"{busy.clock.now():,.0f} s of traffic, {len(busy.core.metrics.steps):,} steps, "
      f"in {elapsed:.1f} s")

# %% pool-over-time
ends = [step.end for step in busy.core.metrics.steps]
moments = [(ends[step], report) for step, report in busy.core.metrics.reports]
quarter = [(t, report) for t, report in moments if t < 900]
title = "A quarter of an hour in six slabs"
card, shares = gantt.pool_over_time(*zip(*quarter, strict=True), title=title)
assert len(shares["live"]) == len(quarter)
card

# %% waste tags=["nbval-check-output"]
held = {name: np.mean([getattr(report, name) for _, report in moments])
        for name in ("live", "reserved", "internal")}
num_held = sum(held.values())
for name, num in held.items():
    print(f"{name:9} {num:6,.0f} slots, {num / num_held:.0%} of what is held")
print(f"{1 - held['live'] / num_held:.0%} of what is held has no K and V")

# %% by-hand tags=["nbval-check-output"]
half_way = prompt_tokens.mean() + output_tokens.mean() / 2
longer = np.average(prompt_tokens + output_tokens / 2, weights=output_tokens)
print(f"by hand, half an answer: {half_way / slab:.0%} of a slab is live")
print(f"by hand, weighted by how long each request stays: {longer / slab:.0%}")

# %% [markdown]
# Of the slots that are held, 79% hold nothing. *Reserved* slots will be filled later; this simulation
# knows how long each answer becomes. *Internal* slots will never be filled. The second estimate by hand
# is the better one. A long answer stays longer, so a look at a random moment finds it more often.
#
# > **Predict.** A dashboard shows how much of the pool is in use. What does it show here?

# %% denominators
print(f"live ÷ held: {held['live'] / num_held:.0%}")
print(f"live ÷ pool: {held['live'] / num_slots:.0%}")
print(f"held ÷ pool: {num_held / num_slots:.0%}")

# %% [markdown]
# All three are called utilisation. The last one is the dashboard's, and it looks healthy. Before you
# believe such a number, ask for its numerator and its denominator.
#
# ## 5. What people wait for
#
# Users do not see slots. They see how long an answer takes, and one measures it in parts:
#
# | name | what it is |
# |---|---|
# | `queue_time` | from the request's arrival until it first runs |
# | `ttft` | **time to the first token** |
# | `tpot` | **time per output token** after the first, averaged over a request |
# | `itl` | inter-token latency: every single gap between two tokens |
# | `e2el` | end to end: until the last token |
#
# A mean hides the requests that waited longest. So one looks at percentiles: one request in a hundred is
# above `p99`.

# %% percentiles
summary = busy.summary()
print("milliseconds      p50      p90      p99")
for name in ("queue_time", "ttft", "tpot", "itl", "e2el"):
    print(f"{name:12}", *(f"{summary[f'p{p}_{name}_ms']:8,.0f}" for p in (50, 90, 99)))

# %% [markdown]
# A running request gets a token every 27 ms or so. Nearly all of the wait for the first token is time
# in the queue. Before we ask why, here is a check that the numbers of every server should pass.
#
# > **Predict.** Requests come at some rate, and each stays for some time. How many are there at once, on
# > average?

# %% little
rate = len(requests) / busy.clock.now()
stay = np.mean([r.finish_time - r.arrival_time for r in requests])
# Counted apart: +1 at each arrival, -1 at each end, weighted by how long it stays so.
events = [(r.arrival_time, 1) for r in requests] + [(r.finish_time, -1) for r in requests]
when, changes = map(np.array, zip(*sorted(events), strict=True))
counted = (changes.cumsum()[:-1] * np.diff(when)).sum() / busy.clock.now()
print(f"{rate:.3f} requests/s × {stay:.1f} s = {rate * stay:.1f} requests")
print(f"counted: {counted:.1f} requests wait or run")

# %% [markdown]
# This is **Little's law**: number = rate × stay. It holds in whatever order requests are served and
# whatever their lengths are. It also gives the server's limit. At most six requests are in slabs, and
# we know how long each stays there:

# %% capacity
in_slab = np.mean([r.finish_time - r.first_scheduled_time for r in requests])
capacity = 6 / in_slab
print(f"{in_slab:.2f} s in a slab: 6 slabs serve at most {capacity:.2f} requests/s")

# %% [markdown]
# > **Predict.** We raise the rate to that limit. Does the wait grow evenly?

# %% sweep
rates = (0.3, 0.45, 0.6, 0.65)
hours = {r: busy if r == 0.6 else server().run(hour_of(r)) for r in rates}
loads = {rate: hour.summary() for rate, hour in hours.items()}
print("requests/s   TTFT p50, s   TTFT p99, s   running requests")
for rate, s in loads.items():
    p50, p99 = s["p50_ttft_ms"] / 1e3, s["p99_ttft_ms"] / 1e3
    print(f"{rate:10} {p50:13.1f} {p99:13.1f} {s['mean_num_seqs']:18.1f}")

# %% queueing
points = {
    name: [(rate, s[f"{name}_ttft_ms"] / 1e3) for rate, s in loads.items()]
    for name in ("p99", "p50")
}
labels = {"xlabel": "requests per second", "ylabel": "seconds"}
mark, title = (capacity, "six slabs' limit"), "Waiting for the first token"
card, drawn_curves = gantt.curves(points, title=title, mark=mark, **labels)
assert drawn_curves["p50"][-1][0] == rates[-1]
card

# %% [markdown]
# Not at all evenly. At half the limit hardly any request waits. Close to the limit the queue grows
# steeply, though on average requests hardly come faster than they can be served. They come at random,
# now and then several close together, and a server without slack takes long to work that off. The 99th
# percentile shows it long before the median does.
#
# > **Predict.** What does static batching make of the quietest of these hours?

# %% static-hour
padded = server(StaticScheduler)
s = padded.run(hour_of(0.3)).summary()
computed = sum(step.num_tokens for step in padded.core.metrics.steps)
needed = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in padded.requests)
print("TTFT, s, at 0.3 requests/s    p50      p99")
for name, each in (("static", s), ("iteration-level", loads[0.3])):
    print(f"{name:24} {each['p50_ttft_ms'] / 1e3:8.2f} {each['p99_ttft_ms'] / 1e3:8.2f}")
print(f"{1 - needed / computed:.0%} of the tokens in static batches are never read")

# %% [markdown]
# Static batching cannot keep up with half of what six slabs could serve. Each batch lasts as long as its
# longest answer, and a request that arrives a moment too late waits for its end.
#
# Now the halves of the chapter meet. The number of slabs limits this server, and slabs are mostly
# empty. What if each request held just the slots that it fills?

# %% if-exact
mean_live = held["live"] / summary["mean_num_seqs"]
print(f"a running request fills {mean_live:.0f} slots on average")
print(f"{num_slots / mean_live:.0f} such requests would fit, not 6")

# %% [markdown]
# ## What this does not show
#
# - The GPU's step time is a roofline with round efficiencies, not a measurement. (`StepTime(opt,
#   a100).describe()` prints what it assumes.) All seconds of sections 4 and 5 depend on it.
# - `sharegpt` has the published means, and a shape that is our guess. Real traffic has days and nights,
#   and prompts that begin alike.
# - It was one hour, from one seed. Near the limit another seed gives quite another p99: try one.
# - With more requests in the pool a step reads more K and V. So five times as many requests at once are
#   served less than five times as fast.
# - Equal slabs leave no holes that are too short. Slabs that fit their requests do: the next chapter.
#
# ## What you have now
#
# - A padded batch is a rectangle to the model and scattered slabs in memory. Mask and positions make it
#   right. Nothing makes its padding free.
# - Iteration-level scheduling lets requests enter and leave at any step. The ratio of the step counts
#   says what that can gain.
# - The simulator is the engine's own loop, with a clock in place of the model.
# - A slab for the longest possible sequence is mostly empty. The number of slabs limits how many
#   requests run, not arithmetic. Near that limit requests wait.
#
# The exercises: `python -m minikv start 02`. The modules of `minikv` so far:

# %% lines-so-far tags=["nbval-ignore-output"]
parts = ("request", "specs", "metrics", "kv_cache/base", "kv_cache/contiguous",
         "scheduler", "static_batching", "workloads", "core", "simulator",
         "model/loader", "model/tiny")
print(*viz.lines_of_minikv(parts), sep="\n")
