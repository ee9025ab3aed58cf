# %% [markdown]
# # 02 Many requests
#
# Chapter 01 ended with a reason to serve many requests at once: a step reads the weights once,
# however many rows it computes. This chapter does that, first in the obvious way, as a padded
# batch, and counts what it wastes: rows that nobody reads, and memory that nobody fills. Then the
# batch learns to change at every step, and the wasted rows are gone. The wasted memory is not. A
# simulator shows how much it is over an hour of traffic, and who has to wait for it.
#
# What it adds to `minikv`:
#
# | file | what it is |
# |---|---|
# | `kv_cache/contiguous.py` | a slab of slots for each request |
# | `scheduler.py` | who is computed in the next step: static batches, then iteration by iteration |
# | `core.py` | the one loop: schedule, run, update |
# | `simulator/`, `workloads/` | the same loop without tensors, and traffic to play on it |
# | `metrics.py` | how long people wait |
#
# **Predict, run, explain**, as before.

# %% imports
import time
from math import ceil

import numpy as np
import torch

import minikv.viz as viz
from minikv import LLM, ContiguousKVCacheManager, KVCacheManager, Request, SamplingParams, show
from minikv.model.loader import load
from minikv.scheduler import Scheduler
from minikv.static_batching import StaticScheduler
from minikv.viz import batch, gantt

_ = torch.set_grad_enabled(False)

# %% load
loaded = load("smollm2", dtype="float32", device="cpu")
model, tokenizer, spec = loaded
START = tokenizer.bos_token_id


def text(token_id):
    return "<SOS>" if token_id == START else tokenizer.decode([token_id])


A = [START, *tokenizer(" I think this movie is better").input_ids]
B = [START, *tokenizer(" I really like").input_ids]
for ids in (A, B):
    print(len(ids), [text(i) for i in ids])

# %% [markdown]
# ## 1. Two requests, one batch
#
# These two go with us through the section. We want the next token of both, from one pass. A model
# takes a tensor of token ids, one row per request.

# %% ragged tags=["raises-exception"]
torch.tensor([A, B])

# %% [markdown]
# A tensor is a rectangle. So the shorter row is filled up with **padding**, tokens that mean
# nothing. But on which side?
#
# > **Predict.** We want the logits after the last token of each row. What goes wrong for B with
# > padding on the right? And on the left, if we do nothing else about it?

# %% four-ways
PAD, n, k = tokenizer.pad_token_id, len(A), len(A) - len(B)
left, right = [PAD] * k + B, B + [PAD] * k
see_all, hide = [1] * n, [0] * k + [1] * len(B)
columns, positions = list(range(n)), [0] * k + list(range(len(B)))
alone = model(torch.tensor([B]), use_cache=False).logits[0, -1]


def last_logits(row_b, mask_b, positions_b):
    masks, where = torch.tensor([see_all, mask_b]), torch.tensor([columns, positions_b])
    ids = torch.tensor([A, row_b])
    return model(ids, attention_mask=masks, position_ids=where, use_cache=False).logits[1, -1]


for name, logits in {
    "right, nothing else": last_logits(right, see_all, columns),
    "left, nothing else": last_logits(left, see_all, columns),
    "left, own positions": last_logits(left, see_all, positions),
    "left, mask": last_logits(left, hide, columns),
    "left, mask, own positions": last_logits(left, hide, positions),
}.items():
    print(f"{name:26} off by {(logits - alone).abs().max():2.0f} from B alone")

# %% [markdown]
# On the right, the last column of B is padding: we asked what follows three pads. On the left the
# last column is right for both rows. Yet a pad is a token like any other: it gets K and V, and B's
# tokens read them. The **mask** forbids it. With it, B is what it is alone.
#
# The fourth line may surprise you: with positions counted by columns, off by three, nothing
# changes. This model encodes positions as rotations (chapter 01), and only the distance between
# two tokens enters a score. A model with a learned vector per position would be off. And there is
# a limit that counts: the longest position that a model was made for. So positions start at 0
# after the pads.
#
# > **Predict.** In the mask of row B, 7 × 7, what stands in the three rows of the pads? (Careful:
# > the softmax over nothing is a division of zero by zero.)
#
# And where do the K and V of a row go? Into a **slab**: consecutive slots, enough for the longest
# sequence that is allowed. Whoever hands out slots is a *KV-cache manager*. It needs two methods,
# and answers with a **block table**: the blocks that hold the request's tokens, in order. One
# table serves all layers, since every layer has a pool of the same shape.

# %% slabs
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
# The engine takes such a class as it is. We give it a small pool in slabs of twelve slots, and
# `batching="static"`, which pads and masks as we did. We are not the pool's only users. Six others
# hold slabs, of whom two have just left; a third leaves after our first step.

# %% engine
def others_in(manager):
    "Other people's requests: they hold slabs, and are not run here."
    others = [Request(f"other {i}", num_prompt_tokens=9, max_tokens=3) for i in range(6)]
    for other in others:
        manager.allocate_slots(other, 9)
    manager.free(others[1])
    manager.free(others[4])
    return others


pool = {"block_size": 4, "num_gpu_blocks_override": 24, "max_model_len": 12}
llm = LLM(loaded, batching="static", kv_cache_manager=Slabs, **pool)
others = others_in(llm.manager)
llm.add_request(A, SamplingParams(max_tokens=3, ignore_eos=True), "A")
llm.add_request(B, SamplingParams(max_tokens=6, ignore_eos=True), "B")
llm.step()
llm.manager.free(others[3])
for name, table in llm.manager.tables.items():
    print(f"{name:7} {table}, slots {table[0] * 4} to {table[-1] * 4 + 3}")

# %% mask
bias = llm.runner.last_step.groups[0].bias(8, None, torch.float32)  # 0 where a query may look
for token_id, row in zip(left, bias[1, 0, 0], strict=True):
    print(f"{text(token_id) if token_id != PAD else '<pad>':8}", *("#" if x == 0 else "." for x in row[:7]))

# %% [markdown]
# Row B of the engine's own mask: a triangle in the corner, for B's tokens. Each pad sees itself,
# so that its softmax has something to sum over; nobody else sees it.
#
# > **Predict.** The two rows stand one below the other in the batch. And in memory?
#
# This is the picture to keep from this chapter. On the left the batch, as the model sees it: a
# rectangle. On the right the pool, as it lies in memory, one slab per row of the drawing. A line
# leads from every token to the slot that holds its K and V. All of it is read from block tables.

# %% padded-batch
card, drawn = batch.batch_memory(viz.snapshot(llm), batch.rows_of(llm, text))
assert drawn.slots("A") == list(range(12, 19)) and drawn.slots("B") == list(range(48, 55))
assert drawn.slots("B", "pad") == [48, 49, 50]
card

# %% [markdown]
# Look at three things.
#
# - **Neighbours in the batch are no neighbours in memory.** Another request's slab and a hole lie
#   between theirs. Whoever leaves makes a hole, and whoever comes takes the first that there is.
# - **Pads are real.** Three slots of B hold keys and values that were computed and written, and
#   that mean nothing. They are held until the batch ends.
# - **A slab is larger than its row.** Striped slots are reserved: a token may come. Dotted ones
#   are internal waste: A asked for three tokens, and the slab was cut for more. (Padding may still
#   be written there, as you will see; it serves nobody.)
#
# The next cell does the same with the scheduler and the package's own manager
# (`ContiguousKVCacheManager`: our class, and the checks that it needs) alone. There are no tensors
# in it, since neither of them has ever seen one. With a running kernel, drag the lengths and the
# step, and point at a token: its line and its slot light up.
#
# > **Predict.** Five steps in, A has long ended. What is in its row?

# %% explorer
ANSWER_A, ANSWER_B = (tokenizer(t).input_ids for t in (" than the previous", " to do. I'm a"))


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
    return batch.batch_memory(viz.snapshot(scheduler, step), batch.rows_of(scheduler, text))


batch.batch_explorer(lay_out, step=(5, 1, 5), tokens_in_A=(7, 1, 7), tokens_in_B=(4, 1, 4))

# %% [markdown]
# More padding, now at the end. A rectangle has to stay one, so A's row goes on until B has ended:
# computed, written, read by nobody. A's slab is held as long, though nothing more can come of it.
# (The token that A sampled last is never fed, as chapter 01 showed. A pad has its slot.)
#
# > **Predict.** Over the whole batch, how many tokens does the engine compute, and how many of
# > them did somebody need?

# %% count-static
while llm.has_unfinished_requests():
    outputs = llm.step()
computed = [step.num_tokens for step in llm.metrics.steps]
needed = (len(A) + 3 - 1) + (len(B) + 6 - 1)
assert sum(computed) == 2 * (len(A) + 6 - 1)
print("computed in each step:", computed, "together", sum(computed))
print("needed:", needed, "wasted:", sum(computed) - needed, "given to users:", 3 + 6)
for output in outputs:
    print(output.request_id, repr(output.outputs[0].text))

# %% [markdown]
# Every row becomes as long as the longest prompt and the longest answer together. So padding costs
# more than memory: each pad passes through all layers, like any token. And when someone quotes
# tokens per second, ask which tokens. Computed, needed, and given to users are three numbers, from
# one batch.
#
# ## 2. Change the batch at every step
#
# Twelve requests, and a batch with four places, the rows that one step computes. How many tokens
# each answer has is known only afterwards; we know it here in order to count.

# %% twelve
NAMES, PLACES = "ABCDEFGHIJKL", 4
num_output = dict(zip(NAMES, [4, 20, 6, 3, 12, 5, 9, 16, 2, 8, 10, 4], strict=True))
words = tokenizer(" Some people say that the sea was never as calm as on that day").input_ids
prompts = {name: [START, *words[: 3 + 2 * (i % 4)]] for i, name in enumerate(NAMES)}
print({name: len(ids) for name, ids in prompts.items()}, "prompt tokens")

# %% [markdown]
# > **Predict.** A request with n tokens of output takes n steps: the first computes the prompt and
# > samples the first token. How many steps do three static batches of four take? And what is the
# > fewest that any order could take with four places?

# %% predict-steps
lengths = list(num_output.values())
print("static:", [max(lengths[i : i + PLACES]) for i in range(0, 12, PLACES)])
print("never fewer than", max(ceil(sum(lengths) / PLACES), max(lengths)))

# %% [markdown]
# A static batch takes as long as its longest answer. Why should the others wait? A step knows
# nothing of the step before but the K and V in the pool. So a request may leave as soon as *it*
# has ended, and the next in line may take its place in the very next step. That is
# **iteration-level scheduling** (Orca: Yu et al., OSDI 2022), today mostly called continuous
# batching. It takes no new machinery, only a loop that asks its scheduler anew before every step:

# %% show-loop
from minikv.core import EngineCore

show(EngineCore.step)

# %% [markdown]
# Both ways run this loop, with the same model and the same kernels, and differ in what
# `schedule()` answers. A recorder between the loop and the model notes the answer.

# %% both
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


served = [serve(batching) for batching in ("static", "continuous") * 2]  # twice, for the clock below
static_steps, steps = served[0][1], served[1][1]
answers = served[0][2]
assert all(each[2] == answers for each in served)
print("the same", sum(map(len, answers.values())), "tokens, request by request")

# %% gantt
card, runs = gantt.gantt({"static": static_steps, "iteration-level": steps}, PLACES)
assert [run.num_steps for run in runs.values()] == [len(static_steps), len(steps)]
card

# %% [markdown]
# Find F in both. In the static chart it waits until B has ended, and after its own last token it
# still occupies a place. In the other chart it takes over A's place, next to B and C in the middle
# of their answers. Its prompt is computed in the same pass as their single tokens. There is no
# rectangle and no padding: the engine lays all tokens of a step in one line, and each request
# reads through its own table.
#
# So continuous batching is *not a bigger static batch*. The batch has four places in both. What
# changed is when a place may change hands: a newcomer waits for any place, not for the end of the
# batch.

# %% count-both tags=["nbval-check-output"]
for title, run in runs.items():
    total = PLACES * run.num_steps
    print(f"{title:16} {run.num_steps} steps, {total} places: {run.count('finished')} for ended answers, "
          f"{run.count(None)} empty, {run.utilisation:.0%} useful")
wasted = [sum(e.num_tokens - e.num_useful for step in run for e in step) for run in (static_steps, steps)]
print("tokens computed for nobody:", *wasted)

# %% [markdown]
# What stays empty is the end, where nobody waits any more: nine places, which is why it takes 27
# steps and not 25. In steady traffic there is no end. (The
# tokens computed for nobody are more than the places, since pads before the prompts count too.)
#
# > **Predict.** If every step took equally long, how many times as fast would the second run be?
# > Will the clock of this machine agree?

# %% bound
bound = runs["static"].num_steps / runs["iteration-level"].num_steps
print(f"{bound:.2f} times as fast, if a step is a step")

# %% wall-clock tags=["nbval-ignore-output"]
def durations(*cores):
    "Seconds of each step. Of runs with the same steps the faster: other work can only add time."
    return np.min([[step.end - step.start for step in c.metrics.steps] for c in cores], axis=0)


static_times = durations(served[0][0], served[2][0])
times = durations(served[1][0], served[3][0])
print(f"measured: {static_times.sum():.2f} s and {times.sum():.2f} s, {static_times.sum() / times.sum():.2f} times as fast")
print(f"a step: {static_times.mean() * 1e3:.0f} ms and {times.mean() * 1e3:.0f} ms")

# %% [markdown]
# The ratio of the step counts is the gain where a step takes equally long with few rows and with
# many, as it nearly does while reading the weights sets the pace. Where rows cost time, as on a
# CPU, rows left out save a little more, and a prompt that joins makes the step longer for its
# neighbours. The two may cancel. The step counts are facts; seconds from two runs on a machine with other things to do
# are an impression. Much larger factors have been published. They come from answers that differ
# more in length, and from comparing more than one change at a time.
#
# ## 3. The same loop without tensors
#
# To see an hour of traffic we would have to wait an hour, with a GPU that we may not have. But
# look at the loop again. Scheduler and manager never see a tensor, and the model appears in one
# line, where it is asked to `run`. Something else can answer:

# %% show-runner
from minikv.simulator import SimulatedRunner, Simulation, StepTime

show(SimulatedRunner.run)

# %% [markdown]
# It samples nothing but zeros, and moves a virtual clock by the time that a step would have taken.
# Every *decision* is still made by the engine's own code. Our twelve requests once more, to check:

# %% same-decisions
from minikv.specs import GPU, GPUS


def simulate(step_time, requests, scheduler=Scheduler, places=PLACES):
    manager = ContiguousKVCacheManager(4096, 16, max_model_len=64)
    simulation = Simulation(scheduler(manager, max_num_seqs=places), step_time)
    simulation.recorder = gantt.record(simulation.core)
    return simulation.run(requests)


def the_twelve():
    return [Request(n, num_prompt_tokens=len(prompts[n]), max_tokens=num_output[n]) for n in NAMES]


a100 = GPUS["A100 40GB SXM"]
anything = StepTime(spec, a100)  # decisions do not depend on it here: all requests come at once
assert simulate(anything, the_twelve()).recorder.steps == steps
assert simulate(anything, the_twelve(), StaticScheduler).recorder.steps == static_steps
print("the same decisions in each of", len(steps), "and", len(static_steps), "steps")

# %% [markdown]
# What is made up is the duration of a step. `StepTime` is chapter 01's roofline: the larger of the
# times for compute and for memory, plus an overhead. For this machine we measure the two roofs,
# and fit two overheads, one per step and one per request in it, to the iteration-level run from
# above.

# %% roofs
def best(function, repeat):
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


square, big = torch.randn(1024, 1024), torch.ones(1 << 26)
peak = 2 * 1024**3 / best(lambda: square @ square, 20)
bandwidth = big.nbytes / best(lambda: big.sum(), 8)


# %% fit tags=["nbval-ignore-output"]
here = GPU("this machine", 8, bandwidth, peak, "measured above")
roofs = {"compute_efficiency": 1.0, "memory_efficiency": 1.0}
bare = simulate(StepTime(spec, here, overhead_s=0.0, **roofs), the_twelve())
rows = np.array([[1.0, step.num_seqs] for step in bare.core.metrics.steps])
fit = np.linalg.lstsq(rows, times - durations(bare.core), rcond=None)[0].clip(0)
calibrated = StepTime(spec, here, overhead_s=fit[0], overhead_per_request_s=fit[1], **roofs)
print(f"{bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s")
print(f"overheads: {fit[0] * 1e3:.0f} ms per step, {fit[1] * 1e3:.1f} ms per request")

# %% [markdown]
# A fit proves nothing on what it was fitted to. So we predict runs that it has not seen: other
# lengths, drawn from a seed, and then another number of places.
#
# > **Predict.** Which of the two will be further off?

# %% predict-runs tags=["nbval-ignore-output"]
def engine_and_simulator(seed, places, count=6):
    "Seconds that the engine takes (two runs, as above) and that the simulator says."
    sizes = np.random.default_rng(seed).integers(3, 13, count).tolist()
    cores = []
    for _ in range(2):
        slabs = {"kv_cache_manager": ContiguousKVCacheManager, "max_model_len": 64}
        engine = LLM(loaded, max_num_seqs=places, **slabs)
        for size in sizes:
            engine.add_request([START] * size, SamplingParams(max_tokens=size, ignore_eos=True))
        while engine.has_unfinished_requests():
            engine.step()
        cores.append(engine.core)
    requests = [Request(str(i), num_prompt_tokens=s, max_tokens=s) for i, s in enumerate(sizes)]
    return durations(*cores).sum(), durations(simulate(calibrated, requests, places=places).core).sum()


for what, seed, places in (("another seed", 1, 4), ("another batch size", 2, 6)):
    measured, predicted = engine_and_simulator(seed, places)
    print(f"{what}: measured {measured:.2f} s, predicted {predicted:.2f} s, error {predicted / measured - 1:+.0%}")

# %% [markdown]
# A few percent on a quiet machine, and tens of percent on a busy one: two overheads are a coarse
# picture of a CPU. So keep two kinds of answer apart. What the simulator says about *who runs
# when* is exact, as long as the arrivals meet the same steps. What it says about seconds is as
# good as the lines above.
#
# ## 4. Where the memory goes
#
# Now a real server: OPT-13B in 16-bit numbers on an A100 with 40 GB, a pair from the paper that
# made this course's subject (Kwon et al. 2023). Its traffic is `sharegpt`: lengths with that data
# set's means.
# <!-- source: section 6.1 and Figure 11 of the paper -->

# %% server
from minikv.simulator import num_blocks_on
from minikv.specs import MODELS

opt = MODELS["OPT-13B"]
num_blocks = num_blocks_on(a100, opt, 16)  # 9/10 of the memory, less the weights, in blocks of 16 slots
print(f"{opt.parameter_bytes / 1e9:.1f} GB of weights, {opt.kv_bytes_per_token:,} bytes per token")
print(f"a pool of {num_blocks * 16:,} slots; slabs for {opt.max_model_len:,} tokens: {num_blocks * 16 // opt.max_model_len} fit")

# %% [markdown]
# Six requests at once. That is all that this GPU serves, however short they are.
#
# > **Predict.** An average request has 161 prompt tokens and 338 of output. Which part of the
# > slabs holds K and V, on average over time? (Halfway through an answer is a good guess.)
# > <!-- source: Kwon et al. 2023, Fig. 11, rounded -->

# %% traffic
from minikv.workloads import sharegpt


def server(scheduler=Scheduler, report_every=0):
    manager = ContiguousKVCacheManager(num_blocks, 16, max_model_len=opt.max_model_len)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    return Simulation(scheduler(manager, **limits), StepTime(opt, a100), report_every=report_every)


def hour_of(rate):
    return sharegpt(rate).requests(duration_s=3600, seed=0)


requests = hour_of(0.6)
prompt_tokens = np.array([r.num_prompt_tokens for r in requests])
output_tokens = np.array([r.max_tokens for r in requests])
print(f"{len(requests):,} requests; on average {prompt_tokens.mean():.0f} prompt and {output_tokens.mean():.0f} output tokens")

# %% simulate-hour tags=["nbval-ignore-output"]
start = time.perf_counter()
busy = server(report_every=50).run(requests)
elapsed = time.perf_counter() - start
print(f"{busy.clock.now():,.0f} s of traffic, {len(busy.core.metrics.steps):,} steps, in {elapsed:.1f} s")

# %% pool-over-time
moments = [(busy.core.metrics.steps[step].end, report) for step, report in busy.core.metrics.reports]
quarter = [(t, report) for t, report in moments if t < 900]
card, shares = gantt.pool_over_time(*zip(*quarter, strict=True), title="A quarter of an hour in six slabs")
assert len(shares["live"]) == len(quarter)
card

# %% waste tags=["nbval-check-output"]
held = {name: np.mean([getattr(r, name) for _, r in moments]) for name in ("live", "reserved", "internal")}
for name, num_slots in held.items():
    print(f"{name:9} {num_slots:6,.0f} slots, {num_slots / sum(held.values()):.0%} of what is held")
longer = np.average(prompt_tokens + output_tokens / 2, weights=output_tokens)
print(f"by hand, half an answer: {(prompt_tokens.mean() + output_tokens.mean() / 2) / opt.max_model_len:.0%}")
print(f"by hand, weighted by how long each stays: {longer / opt.max_model_len:.0%}")

# %% [markdown]
# Of five slots that are held, four hold nothing. *Reserved* ones will be filled later; this
# simulation knows how long each answer becomes. *Internal* ones never will. The second estimate by
# hand is the better one: a long answer stays longer, so a look at a random moment finds it more
# often.
#
# > **Predict.** A dashboard shows how much of the pool is in use. What does it show here?

# %% denominators
print(f"live ÷ held: {held['live'] / sum(held.values()):.0%}, live ÷ pool: {held['live'] / (num_blocks * 16):.0%}, "
      f"held ÷ pool: {sum(held.values()) / (num_blocks * 16):.0%}")

# %% [markdown]
# All three are called utilisation. The last is the dashboard's, and it looks healthy. Before you
# believe such a number, ask for its numerator and its denominator.
#
# ## 5. What people wait for
#
# Users see no slots. They see the time to the first token (**TTFT**), the pace after it (**TPOT**:
# time per output token, averaged over a request; **ITL**: every single gap), and the time to the
# end (`e2el`). A mean hides those who waited longest, so one looks at percentiles: one request in
# a hundred is above `p99`.

# %% percentiles
summary = busy.summary()
print("milliseconds      p50      p90      p99")
for name in ("queue_time", "ttft", "tpot", "itl", "e2el"):
    print(f"{name:12}", *(f"{summary[f'p{p}_{name}_ms']:8,.0f}" for p in (50, 90, 99)))

# %% [markdown]
# Whoever runs gets a token every 27 ms or so. Nearly all of the wait for the first token is the
# queue's. Before we ask why, a check that the numbers of every server should pass.
#
# > **Predict.** Requests come at some rate, and each stays for some time. How many are there at
# > once, on average?

# %% little
rate = len(requests) / busy.clock.now()
stay = np.mean([r.finish_time - r.arrival_time for r in requests])
# Counted apart: one more at each arrival, one less at each end, weighted by how long it stays so.
events = [(r.arrival_time, 1) for r in requests] + [(r.finish_time, -1) for r in requests]
when, changes = map(np.array, zip(*sorted(events), strict=True))
counted = (changes.cumsum()[:-1] * np.diff(when)).sum() / busy.clock.now()
print(f"{rate:.3f} requests/s × {stay:.1f} s = {rate * stay:.1f}; counted: {counted:.1f} waiting or running")

# %% [markdown]
# **Little's law**: number = rate × stay, in whatever order requests are served and whatever their
# lengths. It gives the server's limit, too. At most six are in slabs, and how long each stays
# there we know:

# %% capacity
in_slab = np.mean([r.finish_time - r.first_scheduled_time for r in requests])
capacity = 6 / in_slab
print(f"{in_slab:.2f} s in a slab: 6 slabs serve at most {capacity:.2f} requests/s")

# %% [markdown]
# > **Predict.** We raise the rate to that limit. Does the wait grow evenly?

# %% sweep
rates = (0.3, 0.45, 0.6, 0.65)
loads = {rate: (busy if rate == 0.6 else server().run(hour_of(rate))).summary() for rate in rates}
print("requests/s   median TTFT, s   p99, s   running")
for rate, s in loads.items():
    print(f"{rate:10} {s['p50_ttft_ms'] / 1e3:16.1f} {s['p99_ttft_ms'] / 1e3:8.1f} {s['mean_num_seqs']:9.1f}")

# %% queueing
points = {
    name: [(rate, s[f"{name}_ttft_ms"] / 1e3) for rate, s in loads.items()]
    for name in ("p99", "p50")
}
card, drawn_curves = gantt.curves(
    points, title="Waiting for the first token", xlabel="requests per second", ylabel="seconds",
    mark=(capacity, "six slabs' limit"),
)
assert drawn_curves["p50"][-1][0] == rates[-1]
card

# %% [markdown]
# Not at all evenly. At half the limit hardly anyone waits. Close to it the queue grows steeply,
# though on average requests hardly come faster than they can be served: they come at random, now
# and then several close together, and a server without slack takes long to work that off. The unlucky feel it long before the median does.
#
# > **Predict.** What does static batching make of the quietest of these hours?

# %% static-hour
padded = server(StaticScheduler)
s = padded.run(hour_of(0.3)).summary()
computed = sum(step.num_tokens for step in padded.core.metrics.steps)
needed = sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in padded.requests)
print(f"static, 0.3 requests/s: median TTFT {s['p50_ttft_ms'] / 1e3:.0f} s, p99 {s['p99_ttft_ms'] / 1e3:.0f} s")
print(f"iteration-level:        median TTFT {loads[0.3]['p50_ttft_ms'] / 1e3:.2f} s")
print(f"{1 - needed / computed:.0%} of the tokens that the static batches compute are read by nobody")

# %% [markdown]
# It cannot keep up with half of what six slabs could serve: the wait grows until the hour ends.
# Each batch lasts as long as its
# longest answer, and whoever arrives a moment too late waits for its end.
#
# Now the halves of the chapter meet. What limits this server is a number of slabs, and slabs are
# mostly empty. If each request held just the slots that it fills:

# %% if-exact
mean_live = held["live"] / summary["mean_num_seqs"]
print(f"a running request fills {mean_live:.0f} slots on average")
print(f"{num_blocks * 16 / mean_live:.0f} such requests would fit, not 6")

# %% [markdown]
# ## What this does not show
#
# - The GPU's step time is a roofline with round efficiencies (`StepTime(opt, a100).describe()`
#   prints what it assumes), not a measurement. All seconds of sections 4 and 5 depend on it.
# - `sharegpt` has the published means, and a shape that is our guess. Real traffic has days and
#   nights, and prompts that begin alike.
# - It was one hour, from one seed. Near the limit another seed gives quite another p99: try one.
# - With more requests in the pool, a step reads more K and V, so thirty at once are less than five
#   times as fast.
# - Equal slabs leave no holes that are too short. Slabs that fit their requests do: the next
#   chapter.
#
# ## What you have now
#
# - A padded batch is a rectangle to the model and scattered slabs in memory. Mask and positions
#   make it right; nothing makes its padding free.
# - Iteration-level scheduling lets requests enter and leave at any step. The ratio of the step
#   counts says what that can gain.
# - The simulator is the engine's own loop, with a clock in place of the model.
# - A slab for the longest possible sequence is mostly empty. The number of slabs, not arithmetic,
#   limits how many run, and near that limit people wait.
#
# The exercises: `python -m minikv start 02`. The modules of `minikv` so far:

# %% lines-so-far tags=["nbval-ignore-output"]
parts = ("request", "specs", "metrics", "kv_cache/base", "kv_cache/contiguous", "scheduler", "workloads", "core", "simulator", "model/loader", "model/tiny")
for part in viz.lines_of_minikv(parts):
    print(f"{part.name:23} {part.num_lines:4} lines  {part.about}")
