# %% [markdown]
# # Exercises of chapter 02: many requests
#
# Six exercises, about 95 minutes. They can be done in any order; 2.4 is the one to keep time for.
#
# **How it goes.** Each exercise has a cell to fill in and, below it, a check. Replace the `raise`
# line by your code, run the cell, run the check. A check that passes prints numbers. One that
# fails shows the smallest case it found and says what the mistake looks like to it.
# `python -m minikv check 02` in a terminal checks the whole notebook.
#
# Run the setup cell and the folded one below it first. From then on each exercise stands by itself:
# its own cells, from its title to its check, are all it needs. Among them are folded ones, which
# JupyterLab shows as dots: they serve the check. Run them, too; read them only if you are curious.
#
# **Hints** come in three steps, each folded: a nudge, the rule that decides the matter, an
# outline of the code. Open as few as you need.
#
# **Words.** A *step* is one forward pass of the model. A *row* is one request's place in it: a step
# computes at most `max_num_seqs` rows. A *slot* holds K and V of one token; a *slab* is a run
# of slots that one request holds from its start to its end.
#
# | | who is computed |
# |---|---|
# | *static batching* | a batch starts together, and its rows are computed until the longest answer is done; then they all leave, and the next batch starts |
# | *iteration-level*, or *continuous*, *batching* | decided anew before every step: whoever has all its tokens leaves, and whoever waits may take the free row |
#
# Under both, the step that runs a whole prompt (*prefill*) also samples the first output token. Each
# later step runs the newest token and samples the next. The last output token is never run.

# %% setup
import heapq
import math
import random
from collections import deque
from functools import partial
from itertools import combinations
from typing import NamedTuple

from minikv import LLM, Request, SamplingParams
from minikv.classroom.harness.bounds import Delegated, Endless, bounded
from minikv.classroom.harness.namespace import begin, lent, ours
from minikv.classroom.harness.values import list_of_numbers, numbers, same, text
from minikv.classroom.harness.verdicts import ask, check, explain, once, told
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.model.loader import load
from minikv.scheduler import ScheduledRequest, Scheduler
from minikv.static_batching import StaticScheduler

tiny = load("tiny", dtype="float32", device="cpu")  # random; its text is noise
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
begin(globals())

# %% serve jupyter={"source_hidden": true}
@ours
def serve(kind, pairs, max_num_seqs, last_step=10**9):
    """Serves (arrival step, output tokens) pairs under a scheduler of the package, `kind`.

    Returns (requests, chart): token_runs and finish_time of the requests are in steps; the chart
    lists (name, step) for each row that was computed up to last_step.
    """
    manager = ContiguousKVCacheManager(max_num_seqs, 64, max_model_len=64)
    scheduler = kind(manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=64 * max_num_seqs)
    requests = [
        Request(NAMES[i], num_prompt_tokens=2, max_tokens=n, arrival_time=arrival)
        for i, (arrival, n) in enumerate(pairs)
    ]
    queue, chart, step = deque(requests), [], 0
    while (queue or scheduler.has_unfinished_requests) and step <= last_step:
        ready = [request for request in queue if request.arrival_time <= step]
        if kind is StaticScheduler:  # a batch is handed over when it is complete and may start
            batch = list(queue)[:max_num_seqs]
            may_start = batch == ready[: len(batch)] and not scheduler.has_unfinished_requests
            ready = batch if may_start else []
        for _ in ready:
            scheduler.add(queue.popleft())
        scheduled, _ = scheduler.schedule()
        chart += [(entry.request.request_id, step) for entry in scheduled]
        scheduler.update(scheduled, [0] * len(scheduled), step, step)
        step += 1
    return requests, chart

# %% [markdown]
# ## Exercise 2.1: what padding costs, and how to pad less
#
# *20 minutes, easy.*
#
# **A static batch is padded on the left. Say how many slots its padding holds, how many tokens are
# run for it, and how many slots are read for it.**
#
# The model is given a rectangle: every row is as long as the longest prompt. The prefill runs the
# whole rectangle and keeps K and V of all of it. A decode step runs one new token in each row. Its
# attention reads the row's slots from the first to the newest; only then a mask sets the scores of
# the padding aside. Here every request of the batch gets the same number of output tokens.
#
# ```text
#                                     . padding   # prompt   o output
# slot    0  1  2  3  4   5  6  7
# row 0   .  .  .  #  #   o  o  o     prompts of 2, 5 and 3 tokens, 4 output tokens each
# row 1   #  #  #  #  #   o  o  o
# row 2   .  .  #  #  #   o  o  o     the 4th output token is sampled, but never run
#         └─ prefill ─┘   1  2  3     3 decode steps
# ```
#
# In this picture 5 slots hold padding; of the 15 tokens that the prefill runs, 5 are padding; and
# each of the 3 decode steps reads those 5 slots. So `padding_costs([2, 5, 3], 4)` is `(5, 5, 15)`.
#
# <details><summary>Hint 1: a nudge</summary>
# How many pads stand in one row? And what happens to a pad in the prefill, then in one decode step?
# </details>
# <details><summary>Hint 2: the rule</summary>
# A row has <code>longest - its own length</code> pads. A pad is run once, in the prefill, like any
# token; its slot stays, and every decode step reads it. A mask undoes neither.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# pads   <- rows x longest - all prompt tokens
# steps  <- output tokens, less the one that the prefill samples
# return pads held, pads run, pads x steps read
# ```
# </details>

# %% ex-2-1
def padding_costs(prompt_lens, num_output_tokens):
    """(slots held, tokens run, slots read in all decode steps), each for padding alone.

    prompt_lens: tokens of each prompt in the batch.
    num_output_tokens: of each request, at least 1.
    """
    ### BEGIN SOLUTION
    longest = max(prompt_lens)
    num_pads = sum(longest - num_tokens for num_tokens in prompt_lens)
    num_decode_steps = num_output_tokens - 1
    return num_pads, num_pads, num_pads * num_decode_steps
    ### END SOLUTION

# %% [markdown]
# The check runs the batch in the engine, then every request alone, and subtracts: what the batch
# costs more is what its padding costs.

# %% cases-2-1 jupyter={"source_hidden": true}
@ours
def counted_costs(prompt_lens, num_output_tokens):
    """[slots written, tokens run, slots read by decode steps] of one static batch, by the engine."""
    rows, longest = len(prompt_lens), max(prompt_lens)
    llm = LLM(tiny, batching="static", block_size=1, max_num_seqs=rows,
              max_model_len=longest + num_output_tokens, max_num_batched_tokens=rows * longest,
              kv_cache_manager=ContiguousKVCacheManager)  # fmt: skip
    for num_tokens in prompt_lens:
        llm.add_request([7] * num_tokens, SamplingParams(max_tokens=num_output_tokens, ignore_eos=True))
    llm.step()
    batch, read = list(llm.scheduler.rows), 0
    slots = rows * longest
    while llm.has_unfinished_requests():
        llm.step()
        slots = sum(row.num_computed_tokens for row in batch)
        groups = llm.runner.last_step.groups
        read += sum(group.num_seqs * group.num_blocks for group in groups)
    return [slots, sum(step.num_tokens for step in llm.metrics.steps), read]


@ours
def batches_2_1():
    """(prompt lengths, output tokens), smallest first: repeats, equal ones, one row, a long one."""
    rng = random.Random(21)
    for rows, n in [(2, 1), (2, 2), (1, 3), (2, 5), (3, 4), (4, 3), (6, 7)]:
        lens = [rng.randint(1, 3 * rows) for _ in range(rows)]
        if rows == 2:
            lens[n > 2] = lens[n <= 2] + rng.randint(1, 3)
        elif rows > 2 and lens[-1] == max(lens):
            lens.reverse()
        yield lens, n
    yield from [([3, 3, 7, 3], 3), ([5, 5, 5], 4), ([2, 7, 7], 2), ([1, 60, 2, 2, 60], 9)]
    yield [3, 1], 40


@ours
def more_in_a_batch(lens, n):
    """What the batch costs more than every request alone: what its padding costs."""
    batch, alone = counted_costs(lens, n), [counted_costs([num_tokens], n) for num_tokens in lens]
    return [cost - sum(costs) for cost, *costs in zip(batch, *alone, strict=True)]

# %% slips-2-1 jupyter={"source_hidden": true}
@ours
def slips_2_1(prompt_lens, num_output_tokens, pads):
    """The usual slips, by part, each with its answer."""
    steps, square = num_output_tokens - 1, len(prompt_lens) * max(prompt_lens)
    area = "That is the whole rectangle; only its padding is asked for."
    real = "Those are the prompts' own tokens; their padding is asked for."
    one = "That is the padding of one row, the shortest; every row has its own."
    widest = max(prompt_lens) - min(prompt_lens)
    only = "Padding costs more than memory: the prefill runs the whole rectangle, pads included."
    mask = "A mask comes after the reading: every decode step reads the slots of the padding, too."
    once = "Padding is read in every decode step, not once."
    late = "A step too many: the prefill samples the first output token."
    again = "A pad is run once, in the prefill; after that its K and V are in its slot."
    return {
        "slots": {area: square, real: sum(prompt_lens), one: widest, again: pads * num_output_tokens},
        "run": {only: 0, again: pads * num_output_tokens, area: square, again + " ": pads * steps,
                real: sum(prompt_lens), one: widest},
        "read": {mask: 0, late: pads * num_output_tokens, once: pads, area: square * steps,
                 "K and V of one slot are one slot.": 2 * pads * steps,
                 "One step is missing.": pads * (steps - 1)},
    }  # fmt: skip

# %% check-2-1
@check
def exercise_2_1(padding_costs):
    cases, parts = [], ("slots", "run", "read")
    for lens, n in batches_2_1():
        picture = "\n".join(f"  {'.' * (max(lens) - k)}{'#' * k}" for k in lens)
        asked = f"Prompts of {lens} tokens, {n} output tokens each:\n{picture}"
        got = numbers(ask(padding_costs, lens, n, asked=asked), parts, "padding_costs")
        wanted = dict(zip(parts, once(more_in_a_batch, lens, n), strict=True))
        cases.append((asked, got, wanted, slips_2_1(lens, n, int(wanted["slots"]))))
    explain(cases)
    for lens, prompts in (
        ([161] * 15 + [2000], "15 prompts of 161 tokens, one of 2,000"),
        ([161] * 16, "16 prompts of 161 tokens"),
    ):
        costs = numbers(ask(padding_costs, lens, 338), parts, "padding_costs")
        slots, run, read = costs.values()
        print(f"{prompts}, 338 output tokens each: {slots:,.0f} slots held, "
              f"{run:,.0f} tokens run, {read:,.0f} slots read for padding")  # fmt: skip

# %% [markdown]
# **Second part: pad less.** Nobody says which requests must share a batch.
#
# **Put the requests into full batches of `batch_size` so that all batches together hold as few pads
# as possible.** Each batch is padded to its own longest prompt. The number of requests is a multiple
# of `batch_size`. Return a list of batches; a batch is a list of indices into `prompt_lens`. Any
# grouping with the fewest pads is right, in any order.
#
# ```text
# prompt_lens = [2, 5, 1, 5], batch_size = 2
#
# [[0, 1], [2, 3]]   . . . # #    . . . . #    7 pads
#                    # # # # #    # # # # #
#
# [[0, 2], [1, 3]]   # #          # # # # #    1 pad, and no grouping has fewer
#                    . #          # # # # #
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# What does one very long prompt do to its batch? With whom should it share?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Only the longest of a batch counts: the sum of these maxima is to be small. If a short and a long
# prompt change places so that like stands with like, no maximum grows.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# order <- indices, by length
# cut order into pieces of batch_size
# ```
# </details>

# %% ex-2-1-b
def make_batches(prompt_lens, batch_size):
    """Batches of `batch_size` indices each, with the fewest pads in all."""
    ### BEGIN SOLUTION
    order = sorted(range(len(prompt_lens)), key=lambda i: prompt_lens[i])
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    ### END SOLUTION

# %% cases-2-1-b jupyter={"source_hidden": true}
@ours
def count_pads(lens, batches):
    return sum(max(lens[i] for i in batch) - lens[k] for batch in batches for k in batch)


@ours
def fewest_pads(lens, size):
    """By trying every grouping into batches of `size`."""
    if not lens:
        return 0
    first, rest = lens[0], lens[1:]
    best = math.inf
    for chosen in combinations(range(len(rest)), size - 1):
        batch = [first, *(rest[i] for i in chosen)]
        others = [length for i, length in enumerate(rest) if i not in chosen]
        pads = size * max(batch) - sum(batch)
        best = min(best, pads + fewest_pads(others, size))
    return best

# %% form-2-1-b jupyter={"source_hidden": true}
@ours
def batches_of(value, lens, size):
    """The learner's batches, if they are batches at all."""
    asked = f"prompt_lens = {lens}, batch_size = {size}. You returned {value!r:.200}"
    said = "make_batches must return a list of lists of indices."
    good = isinstance(value, list | tuple) and all(isinstance(b, list | tuple) for b in value)
    batches = [[*batch] for batch in value] if good else [[None]]
    whole = all(isinstance(i, int) and not isinstance(i, bool) for b in batches for i in b)
    assert whole, f"{said}\n{asked}"
    flat = sorted(i for batch in batches for i in batch)
    if flat != list(range(len(lens))):
        twice = sorted({i for i in flat if flat.count(i) > 1})
        lost = [i for i in range(len(lens)) if i not in flat]
        said = f"Each index must stand in one batch. Missing: {lost}; there twice: {twice}."
        if flat == sorted(lens):
            said = "Those are lengths. Indices into prompt_lens are asked for: two may be as long."
        raise AssertionError(f"{said}\n{asked}")
    sizes = {len(batch) for batch in batches}
    said = f"A batch has {size} rows; one of yours has {max(sizes)} requests."
    if max(sizes) <= size:
        said = "Every batch must be full: half-empty ones pad less, but each takes steps of its own."
    assert sizes == {size}, f"{said}\n{asked}"
    return batches

# %% judge-2-1-b jupyter={"source_hidden": true}
@ours
def dealt_out(order, count):
    """By turns: each of `count` batches gets one of the shortest, then one of the next, ..."""
    return [i for first in range(count) for i in order[first::count]]


@ours
def alike(tried, regroup):
    """Whether all answers hold the same lengths together as regroup(indices by length, batches)."""
    for lens, size, batches in tried:
        order = regroup(sorted(range(len(lens)), key=lambda i: lens[i]), len(batches))
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        mine, theirs = (sorted(sorted(lens[i] for i in g) for g in found) for found in (batches, groups))
        if mine != theirs:
            return False
    return True


@ours
def judge_batches(tried):
    """tried: [(prompt_lens, batch_size, batches)], smallest first."""
    for lens, size, batches in tried:
        pads, fewest = count_pads(lens, batches), fewest_pads(lens, size)
        if pads == fewest:
            continue
        said = "There is a grouping with fewer pads: look for a long prompt that shares its batch with short ones."
        if alike(tried, lambda order, count: sorted(order)):
            said = "The requests were batched in the order they came; a long one pads its neighbours."
        elif alike(tried, dealt_out):
            said = "Long and short were mixed evenly. That balances the batches, but each is padded to its longest."
        rows = [[f"  {'.' * (max(lens[i] for i in batch) - lens[i])}{'#' * lens[i]}" for i in batch] for batch in batches]
        drawn = "\n\n".join("\n".join(batch) for batch in rows)
        raise AssertionError(
            f"{said}\nprompt_lens = {lens}, batch_size = {size}. You returned {batches}: {pads} pads, "
            f"{fewest} are enough.\n{drawn}"
        )

# %% groups-2-1-b jupyter={"source_hidden": true}
@ours
def groups_2_1():
    """(prompt lengths, batch size), smallest first."""
    rng = random.Random(22)
    yield from [([3, 9, 2, 8], 2), ([9, 1, 8, 1], 2)]
    for count, size in [(3, 1), (4, 4), (6, 2), (6, 3), (9, 3), (12, 4)]:
        yield [rng.randint(2, 2 * count) for _ in range(count)], size
    yield from [([5, 5, 5, 5], 2), ([7, 2, 7, 2, 7, 2], 3), ([10, 9, 60, 8, 11, 59], 2)]

# %% check-2-1-b
@check
def exercise_2_1_b(make_batches):
    tried = []
    for lens, size in groups_2_1():
        asked = f"prompt_lens = {lens}, batch_size = {size}"
        batches = batches_of(ask(make_batches, lens, size, asked=asked), lens, size)
        tried.append((lens, size, batches))
    judge_batches(tried)
    for lens, size, batches in tried:
        pads = count_pads(lens, batches)
        in_order = [[*range(i, i + size)] for i in range(0, len(lens), size)]
        came = count_pads(lens, in_order)
        print(f"requests: {len(lens):2}, batches of {size}: {pads:2} of padding, "
              f"{came:2} as they came")  # fmt: skip

# %% [markdown]
# ## Exercise 2.2: who leaves when
#
# *20 minutes, medium.*
#
# **For each request, say at which step it leaves: under static and under iteration-level batching.**
#
# `requests` is a list of pairs (arrival step, output tokens), in order of arrival: a request that
# arrives at step 4 can be computed in step 4 at the earliest. Any prompt fits into one step. A step
# that a request is in gives it one output token, beginning with the prefill. *It leaves at* step s
# means: s is the last step that its row is taken. In step s + 1 the row is free.
#
# - **Static.** The requests are cut into batches of `max_num_seqs` in order of arrival; the last
#   batch may be smaller. A batch starts when all of its requests have arrived and the batch before
#   it has left. All of it leaves with its longest answer.
# - **Iteration-level.** Before each step, whoever waits takes a free row, first come first served.
#   A request leaves with its own last token.
#
# ```text
# requests = [(0, 3), (0, 1), (1, 2)], max_num_seqs = 2
#
#          static, step 0 1 2 3 4    iteration-level, step 0 1 2
# A, 3 tokens           # # #                        A     # # #
# B, 1 token            # - -                        B     #
# C, 2 tokens             . . # #                    C       # #
#
# # gets a token   - done, but its row is still taken   . waits
# ```
#
# So here the answer is `([2, 2, 4], [2, 0, 2])`.
#
# <details><summary>Hint 1: a nudge</summary>
# A request that starts at step s and gets n tokens: in which step does it get the last one? Try
# n = 1.
# </details>
# <details><summary>Hint 2: the rule</summary>
# Static: a batch starts at <code>max(last arrival in it, end of the batch before + 1)</code> and
# takes as many steps as its longest answer has tokens. Iteration-level: a request starts at
# <code>max(its arrival, first step with a free row)</code> and takes as many steps as its own.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# static:  for each batch:
#              start <- the later of: last arrival, step after the end of the batch before
#              all leave at start + longest - 1
# other:   step <- 0;  until everybody has left:
#              let in who has arrived, in order, while fewer than max_num_seqs run
#              give each one a token; those who have all of theirs leave at this step
#              step <- step + 1
# ```
# </details>

# %% ex-2-2
def leaving_steps(requests, max_num_seqs):
    """(static, iteration_level): two lists, the step at which each request leaves."""
    ### BEGIN SOLUTION
    static, end = [], -1
    for first in range(0, len(requests), max_num_seqs):
        batch = requests[first : first + max_num_seqs]
        start = max(end + 1, max(arrival for arrival, _ in batch))
        end = start + max(num_tokens for _, num_tokens in batch) - 1
        static += [end] * len(batch)

    iteration_level = [None] * len(requests)
    left = {}  # request that runs -> tokens still to come
    waiting, step = deque(range(len(requests))), 0
    while waiting or left:
        while waiting and len(left) < max_num_seqs and requests[waiting[0]][0] <= step:
            i = waiting.popleft()
            left[i] = requests[i][1]
        for i in list(left):
            left[i] -= 1
            if left[i] == 0:
                iteration_level[i] = step
                del left[i]
        step += 1
    return static, iteration_level
    ### END SOLUTION

# %% [markdown]
# The check lets the package's two schedulers decide, step by step, without a model.

# %% wrong-ways-2-2 jupyter={"source_hidden": true}
@ours
def batchwise(pairs, rows, *, gap=1, extra=0, full=True, own=False):
    """Leaving steps in batches. gap: from one's end to the next one's start. full: wait until it is.
    own: leave with the own last token, not with the batch."""
    leave, end = [], -gap
    while len(leave) < len(pairs):
        rest = pairs[len(leave) : len(leave) + rows]
        start = max(end + gap, (rest if full else rest[:1])[-1][0])
        batch = rest if full else [pair for pair in rest if pair[0] <= start]
        end = start + max(n for _, n in batch) - 1 + extra
        leave += [start + n - 1 if own else end for _, n in batch]
    return leave


@ours
def rowwise(pairs, rows, *, gap=1, extra=0):
    """Leaving steps if a row is taken anew `gap` steps after the step at which it was left."""
    free, leave = [0] * rows, []
    for arrival, n in pairs:
        leave.append(max(arrival, heapq.heappop(free)) + n - 1 + extra)
        heapq.heappush(free, leave[-1] + gap)
    return leave

# %% slips-2-2 jupyter={"source_hidden": true}
@ours
def slips_2_2(pairs, rows):
    """The usual slips, by part, each with its answer."""
    static, other, many = batchwise(pairs, rows), rowwise(pairs, rows), len(pairs)
    prefill = "A step too many: the prefill samples the first token, so n tokens take n steps."
    zero = ("All one step late. Steps count from 0: who arrives at step s may start in it, and "
            "leaves at s + n - 1.")  # fmt: skip
    soon = "A row that is taken in step s is free in step s + 1, not earlier."
    big = "A bigger static batch is not what is meant: there are max_num_seqs rows, and each is free again as soon as its request leaves."
    batch_end = "The new request did not have to wait for the end of the batch: one free row is enough."
    return {
        "static": {
            "Static: a finished row stays in its batch until the longest is done.":
                batchwise(pairs, rows, own=True),
            "Static: here a batch waits until all of its requests have arrived.":
                batchwise(pairs, rows, full=False),
            "Static: that list is the iteration-level one; the rows of a static batch are not taken "
            "anew before all of it has left.": other,
            "Static: a batch waits until the one before it has left.":
                [p[0] + p[1] - 1 for p in [(max(a for a, _ in pairs[i // rows * rows :][:rows]),
                 max(n for _, n in pairs[i // rows * rows :][:rows])) for i in range(many)]],
            prefill: batchwise(pairs, rows, extra=1), soon: batchwise(pairs, rows, gap=0),
            zero: [step + 1 for step in static],
        },
        "iteration_level": {
            batch_end: batchwise(pairs, rows, full=False, own=True), batch_end + " ": static,
            batch_end + "  ": batchwise(pairs, rows, own=True),
            batch_end + "   ": batchwise(pairs, rows, full=False),
            big: batchwise(pairs, many), big + " ": batchwise(pairs, many, own=True),
            "There are max_num_seqs rows; who finds them all taken must wait.":
                [arrival + n - 1 for arrival, n in pairs],
            "Nobody is computed before it arrives.": rowwise([(0, n) for _, n in pairs], rows),
            prefill: rowwise(pairs, rows, extra=1), soon: rowwise(pairs, rows, gap=0),
            zero: [step + 1 for step in other],
        },
    }  # fmt: skip

# %% cases-2-2 jupyter={"source_hidden": true}
@ours
def drawing(requests):
    """A line for each request, a column for each step."""
    lines = [f"  step {' ' * 4}{''.join(str(s % 10) for s in range(1 + max(r.finish_time for r in requests)))}"]
    for r in requests:
        start, last = r.token_runs[0][0], r.token_runs[-1][1]
        row = " " * r.arrival_time + "." * (start - r.arrival_time)
        row += "#" * (last - start + 1) + "-" * (r.finish_time - last)
        lines.append(f"  {r.request_id} {row:>{len(row) + 7}}")
    return "\n".join(lines)


@ours
def queues_2_2():
    """(requests, max_num_seqs): small first; waits, gaps, rows left empty, a late first request."""
    rng = random.Random(23)
    for count, rows, gap, arrival in [
        (2, 1, 0, 0), (3, 2, 0, 0), (3, 2, 2, 0), (4, 2, 1, 0), (5, 2, 1, 0), (3, 5, 1, 2), (7, 3, 2, 0),
        (12, 4, 1, 0), (9, 3, 6, 4), (4, 1, 9, 1), (24, 3, 1, 0), (10, 2, 0, 3),
    ]:  # fmt: skip
        pairs = []
        for _ in range(count):
            pairs.append((arrival, rng.randint(1, 3 + count // 2)))
            arrival += rng.randint(0, gap)
        yield pairs, rows


@ours
def two_lists(value, pairs):
    said = "leaving_steps must return two lists of steps, (static, iteration_level)"
    assert isinstance(value, list | tuple) and len(value) == 2, f"{said}, not {value!r:.100}"
    lists = [list_of_numbers(steps, said) for steps in value]
    assert {len(steps) for steps in lists} == {len(pairs)}, (
        f"One step for each request: there are {len(pairs)}, you returned {value!r:.100}"
    )
    return dict(zip(("static", "iteration_level"), lists, strict=True))

# %% check-2-2
@check
def exercise_2_2(leaving_steps):
    cases = []
    for pairs, rows in queues_2_2():
        kinds = StaticScheduler, Scheduler
        static, other = (serve(kind, pairs, rows)[0] for kind in kinds)
        asked = (f"requests = {pairs}, max_num_seqs = {rows}\n static\n{drawing(static)}"
                 f"\n iteration-level\n{drawing(other)}")  # fmt: skip
        got = two_lists(ask(leaving_steps, pairs, rows, asked=asked), pairs)
        wanted = {"static": [r.finish_time for r in static],
                  "iteration_level": [r.finish_time for r in other]}  # fmt: skip
        cases.append((asked, got, wanted, slips_2_2(pairs, rows)))
    explain(cases)
    for _, got, _, _ in cases[2:]:
        static, other = (max(got[part]) + 1 for part in got)
        last, other_last = (got[part][-1] for part in got)
        print(f"{len(got['static']):2} requests: {static:2.0f} steps static, "
              f"{other:2.0f} iteration-level; the last leaves at "
              f"{last:.0f} and {other_last:.0f}")  # fmt: skip

# %% [markdown]
# ## Exercise 2.3: where the slots are
#
# *10 minutes, easy.*
#
# **From a list of running requests, account for every slot of a pool that is handed out in slabs.**
#
# Each running request holds one slab of `slab_slots` slots, whatever it will need. You look back at
# a moment of a run that is over, so you know what the scheduler did not: how many tokens each
# answer was going to have. The four counts add up to the pool:
#
# | | slots that |
# |---|---|
# | `live` | hold K and V of a token now |
# | `reserved` | will hold K and V of a token later, before their request ends |
# | `internal` | are part of somebody's slab and will never be used |
# | `free` | belong to no slab |
#
# ```text
# Running(num_prompt_tokens=3, num_output_tokens=2, max_tokens=9, final_output_tokens=5), slab of 10
#
# slot     0  1  2  3  4  5  6  7  8  9
#          P  P  P  o  +  +  +  .  .  .     live 4, reserved 3, internal 3
# ```
#
# The second output token has just been sampled: it has no K and V yet. The fifth, the last, is
# sampled and never run.
#
# <details><summary>Hint 1: a nudge</summary>
# Do one request by hand, as in the picture. How many slots will it have used at its end?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Of any number of known tokens, the newest has no K and V. So a request holds K and V of
# <code>num_prompt_tokens + num_output_tokens - 1</code> tokens now, and at its end of
# <code>num_prompt_tokens + final_output_tokens - 1</code>. <code>max_tokens</code> is a limit; what
# it allows and what happens are two things.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# for each request:
#     now    <- prompt + output so far - 1
#     at end <- prompt + final output - 1
#     live += now;  reserved += at end - now;  internal += slab - at end
# free <- pool - slabs held
# ```
# </details>

# %% running
class Running(NamedTuple):
    """A running request.

    num_output_tokens: sampled so far, at least 1, the newest included.
    max_tokens: what its sender allowed.
    final_output_tokens: what it was to have in the end.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    final_output_tokens: int

# %% ex-2-3
def account(running, slab_slots, pool_slots):
    """(live, reserved, internal, free) in slots; they add up to pool_slots.

    running: list[Running].
    """
    ### BEGIN SOLUTION
    live = reserved = internal = 0
    for request in running:
        now = request.num_prompt_tokens + request.num_output_tokens - 1
        at_end = request.num_prompt_tokens + request.final_output_tokens - 1
        live += now
        reserved += at_end - now
        internal += slab_slots - at_end
    return live, reserved, internal, pool_slots - len(running) * slab_slots
    ### END SOLUTION

# %% [markdown]
# The check gives the requests to the package's own slab manager, runs them to that moment, and then
# to their end, to see which slots were used.

# %% cases-2-3 jupyter={"source_hidden": true}
@ours
def go_on(manager, request, num_output_tokens):
    """Steps of one request, without a model, until it has that many output tokens."""
    while request.num_output_tokens < num_output_tokens:
        num_new_tokens = request.num_tokens - request.num_computed_tokens
        manager.allocate_slots(request, num_new_tokens)
        request.num_computed_tokens += num_new_tokens
        request.append(0)


@ours
def counted_slots(running, slab_slots, pool_slots):
    """[live, reserved, internal, free]: the manager's report now, and again at everybody's end."""
    manager = ContiguousKVCacheManager(pool_slots, 1, max_model_len=slab_slots)
    requests = [
        Request(NAMES[i], num_prompt_tokens=r.num_prompt_tokens, max_tokens=r.max_tokens)
        for i, r in enumerate(running)
    ]
    for request, r in zip(requests, running, strict=True):
        go_on(manager, request, r.num_output_tokens)
    now = manager.report()
    for request, r in zip(requests, running, strict=True):
        go_on(manager, request, r.final_output_tokens)
    used = manager.report().live
    return [now.live, used - now.live, pool_slots - now.free - used, now.free]

# %% moments-2-3 jupyter={"source_hidden": true}
@ours
def moments_2_3():
    """(running, slab_slots, pool_slots): also who gets all that was allowed, and a full pool."""
    rng = random.Random(24)
    for count in (1, 1, 1, 2, 3, 5, 8, 15):
        running, slab = [], rng.randint(12, 24)
        for i in range(count):
            prompt, most = rng.randint(1, slab // 3), rng.randint(4, slab // 2)
            final = most if i % 4 == 2 else rng.randint(2, most - 1)
            out = final - 1 if i % 5 == 3 else rng.randint(1, final - 1)
            running.append(Running(prompt, out, most, final))
        yield running, slab, slab * (count + rng.randint(0, 2)) + rng.randint(1, slab - 1)
    yield [Running(3, 1, 4, 4)], 9, 20
    yield [Running(3, 2, 9, 5)] * 2, 12, 40
    yield [Running(6, 1, 6, 6), Running(6, 5, 6, 6), Running(1, 1, 11, 2)], 12, 36
    yield [Running(700, 200, 1000, 300), Running(1, 1, 2, 2)], 2000, 10_001

# %% slips-2-3 jupyter={"source_hidden": true}
@ours
def slips_2_3(running, slab, pool):
    """The usual slips, by part, each with its answer."""
    count, P, out, most, final = len(running), *(sum(column) for column in zip(*running, strict=True))
    live = P + out - count
    sampled = "The token just sampled has no K and V yet: it takes its slot in the next step."
    limit = "max_tokens is what was allowed. Looking back, you know how long the answer was going to be."
    last = "The last output token is sampled and never run: it never takes a slot."
    return {
        "live": {sampled: P + out, "Output tokens hold K and V as well as the prompt's.": P,
                 "Slots that will be used later are not live yet.": P + final - count,
                 "A slab is not live as a whole.": count * slab},
        "reserved": {limit: most - out, last: final - out + count, limit + " ": most - out + count,
                     "Not all of a slab's rest will be used: what never is, is internal.": count * slab - live,
                     "Reserved slots are those still to be used; live ones are counted already.": P + final - count,
                     "That leaves out what is still to come.": 0,
                     "That is the internal count: the order is live, reserved, internal, free.":
                     count * slab - P - final + count},
        "internal": {last: count * slab - P - final, limit: count * slab - P - most + count,
                     "Live slots were counted as internal, too.": count * slab,
                     "Free slots belong to no slab; internal ones are inside somebody's.":
                         pool - (P + final - count),
                     "What will be used later is reserved, not internal.": count * slab - live,
                     limit + " ": count * slab - P - most},
        "free": {"A slab is taken whole: what is left in it is free to nobody else.": pool - live,
                 "Reserved slots are taken, too.": pool - (P + final - count),
                 "The slabs were left out.": pool, "Slots are counted here, not slabs.": pool // slab - count},
    }  # fmt: skip

# %% check-2-3
@check
def exercise_2_3(account):
    cases, parts = [], ("live", "reserved", "internal", "free")
    for running, slab, pool in moments_2_3():
        listed = "\n".join(f"  {request}" for request in running)
        asked = f"Slabs of {slab} slots in a pool of {pool}:\n{listed}"
        got = numbers(ask(account, running, slab, pool, asked=asked), parts, "account")
        wanted = dict(zip(parts, once(counted_slots, running, slab, pool), strict=True))
        total = sum(got.values())
        if total != pool:
            asked += f"\nYour four counts add up to {text(total)}, the pool has {pool}."
        cases.append((asked, got, wanted, slips_2_3(running, slab, pool)))
    explain(cases)
    for _, got, _, _ in cases:
        total = sum(got.values())
        shares = (f"{part} {n:3.0f} ({n / total:4.0%})" for part, n in got.items())
        print(f"{total:3.0f} slots: {', '.join(shares)}")

# %% [markdown]
# ## Exercise 2.4: your scheduler in the engine
#
# *30 minutes, hard.*
#
# **Write `schedule()`: before each step, decide who computes how many tokens in it.** Your class then
# drives the real engine.
#
# The policy, the simplest that decides anew before every step:
#
# 1. Every running request computes the one token that it sampled last.
# 2. Then requests are let in from the waiting line, first come first served. The first in line comes
#    in if a row is free, if its *whole* prompt still fits into this step's token budget, and if the
#    manager has slots for it. If it can't come in, nobody behind it overtakes it.
#
# What you inherit from `Scheduler`, and may use:
#
# | | |
# |---|---|
# | `self.running` | a list of the requests that hold rows; empty at first. Whom you let in, you append |
# | `self.waiting` | a `deque` of the others, in order of arrival. Whom you let in, you take out: `popleft()` |
# | `self.max_num_seqs` | rows in a step, at most |
# | `self.max_num_batched_tokens` | tokens in a step, at most, those of running requests and of prompts together |
# | `self.manager.allocate_slots(request, n)` | takes room for `n` more tokens of the request. `None`: there is none now, nothing has changed. A running request has its slab and needs to ask no more |
# | `request.num_tokens` | tokens known; of a waiting request: its prompt |
#
# Return two things: a list of `ScheduledRequest(request, num_new_tokens)`, in any order, and a list
# of requests that must step back, always empty here. When the step has run, the engine calls
# `update()`, which you inherit: it counts computed tokens, appends the sampled ones, and removes from
# `running` whoever is done.
#
# ```text
# max_num_seqs = 2, max_num_batched_tokens = 6; prompts of A 4, B 3 and C 5 tokens;
# output tokens: A 3, B 2, C 1
#
# step 0   A:4          B's prompt would make 7 tokens
# step 1   A:1  B:3
# step 2   A:1  B:1     no free row for C; A and B get their last tokens
# step 3   C:5
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# One loop over those who run, then one over those who wait. What does each of them use up?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Three things limit who comes in: rows, budget, slots. Ask for slots last: once
# <code>allocate_slots</code> has given a slab, its request must run. The first "no" ends the step's
# admissions.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# budget <- max_num_batched_tokens
# for each running request:   schedule 1 token; budget -= 1
# while somebody waits and a row is free:
#     first in line: its prompt is over the budget?  stop
#     allocate slots for the prompt: None?  stop
#     move it from waiting to running; schedule its whole prompt; budget -= its tokens
# return what was scheduled, []
# ```
# </details>

# %% ex-2-4
class MyScheduler(Scheduler):
    def schedule(self):
        """Returns (list[ScheduledRequest], []): who computes how many tokens now."""
        ### BEGIN SOLUTION
        scheduled = [ScheduledRequest(request, 1) for request in self.running]
        budget = self.max_num_batched_tokens - len(scheduled)
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if request.num_tokens > budget:
                break
            if self.manager.allocate_slots(request, request.num_tokens) is None:
                break
            self.running.append(self.waiting.popleft())
            scheduled.append(ScheduledRequest(request, request.num_tokens))
            budget -= request.num_tokens
        return scheduled, []
        ### END SOLUTION

# %% [markdown]
# The check works out the policy on paper, then runs the engine on your scheduler and compares every
# step: who runs, how many tokens, how many steps. The tokens alone would prove little: the same ones
# come out if requests run one at a time.

# %% plan jupyter={"source_hidden": true}
@ours
def on_paper(lengths, rows, budget, slabs):
    """The policy, by numbers alone: for each step {name: tokens}. lengths: (prompt, output tokens)."""
    waiting = deque((NAMES[i], *each) for i, each in enumerate(lengths))
    left, steps = {}, []
    while waiting or left:
        step = dict.fromkeys(left, 1)
        while waiting and len(step) < min(rows, slabs):
            name, prompt, output = waiting[0]
            if sum(step.values()) + prompt > budget:
                break
            waiting.popleft()
            step[name], left[name] = prompt, output
        left = {name: n - 1 for name, n in left.items() if n > 1}
        steps.append(step)
    return steps


@ours
def line(step):
    return "  ".join(f"{name}:{n}" for name, n in step.items()) or "nobody"


@lent
class Listening(ContiguousKVCacheManager):
    """Remembers how many slots were asked for, last, for each request."""

    def allocate_slots(self, request, num_new_tokens, **options):
        self.asked = getattr(self, "asked", {}) | {request.request_id: num_new_tokens}
        return super().allocate_slots(request, num_new_tokens, **options)

# %% judge-2-4 jupyter={"source_hidden": true}
@ours
def entries_of(result):
    """{request: tokens} of what schedule() returned, if its form is right."""
    said = "schedule() must return two things, a list of ScheduledRequest and an empty list"
    assert result is not None, "schedule() returned None: is its `return` missing?"
    assert isinstance(result, tuple | list) and len(result) == 2, f"{said}, not {result!r:.120}"
    scheduled, preempted = result
    assert isinstance(scheduled, list | tuple), f"{said}, not {result!r:.120}"
    assert all(isinstance(entry, ScheduledRequest) for entry in scheduled), (
        f"{said}. In the first there is {scheduled!r:.120}"
    )
    assert isinstance(preempted, list | tuple | set | deque), f"{said}; the second is {preempted!r:.80}"
    assert not preempted, "Nobody has to step back under this policy: the second list is empty."
    names = [entry.request.request_id for entry in scheduled]
    assert len(set(names)) == len(names), (
        f"A request is scheduled twice in one step: {', '.join(names)}. A newcomer computes its prompt, "
        "and no more."
    )
    return {entry.request: entry.num_new_tokens for entry in scheduled}


@ours
def judge_running(got, before, counters):
    """What concerns requests that ran already."""
    for request, (num_tokens, num_computed) in counters.items():
        assert (request.num_tokens, request.num_computed_tokens) == (num_tokens, num_computed), (
            "schedule() only decides: update() appends tokens and counts them, after the step."
        )
    for request in before:
        name = request.request_id
        assert request in got, (
            f"{name} runs, but computes nothing in this step. Every running request goes on in every "
            "step, also while others come in."
        )
        assert got[request] == 1, (
            f"{name} runs and has one token to compute, the one it sampled last; you gave it "
            f"{got[request]}. The K and V of the others are in its slab."
        )

# %% judge-2-4-b jupyter={"source_hidden": true}
@ours
def judge_new(got, before, line_of, wanted, limits):
    """What concerns the requests let in; line_of: those who waited, in order."""
    (rows, budget, _), new = limits, [request for request in got if request not in before]
    names = [request.request_id for request in new]
    for request in new:
        assert request in line_of, (
            f"{request!r} neither runs nor waits: schedule those in self.running and self.waiting."
        )
        prompt = request.num_tokens
        assert got[request] >= prompt, (
            f"The prompt of {request.request_id} was cut: {got[request]} of its {prompt} tokens. Here a "
            "prompt runs whole or not at all; cutting it is what the package's scheduler does."
        )
        assert got[request] == prompt, f"{request.request_id} has {prompt} tokens, no more."
    used = sum(got.values())
    assert len(got) <= rows, (
        f"{len(got)} rows in a step that has {rows}. Deciding anew before every step is not a bigger "
        "batch: a newcomer takes a row that is free."
    )
    assert used <= budget, (
        f"{used} tokens in a step whose budget is {budget}: tokens of running requests and of all "
        "prompts count together."
    )
    over = sorted(set(names) - {request.request_id for request in line_of[: len(names)]})
    assert not over, (
        f"{over[0]} overtook: first come first served, and if the first in line can't come in, nobody "
        "behind it does."
    )
    could = [name for name in wanted if name not in {request.request_id for request in before}]
    if len(new) < len(could):
        late = could[len(new)]
        said = f"{late} could have come in: a row is free, its prompt fits, there are slots. "
        if sum(wanted.values()) == budget and late == could[-1]:
            said += "It fills the budget exactly, which is allowed, up to the last token."
        elif new or not before:
            said += f"Let in were {len(new)}, not {len(could)}; all who fit come in, in the same step."
        else:
            said += "Nobody came in while others run; a new request need not wait for the end of the batch."
        raise AssertionError(said)

# %% judge-2-4-c jupyter={"source_hidden": true}
@ours
def judge_state(scheduler, got, waited, limits):
    """What schedule() left behind in the scheduler and the manager; waited: the line before it."""
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == limits[:2], (
        "The limits hold for every step and must stay as they are: count down in a variable of your own."
    )
    for request in got:
        name = request.request_id
        assert name in scheduler.manager.tables, (
            f"{name} was scheduled without slots: allocate_slots was not called for it, or its None "
            f"was ignored, which means not now. (Slabs in this pool: {limits[2]}.)"
        )
        asked = scheduler.manager.asked.get(name)
        assert request.num_computed_tokens or asked == request.num_tokens, (
            f"Slots for {asked} tokens were asked for {name}, whose prompt has {request.num_tokens}. A slab "
            "hides the difference; other managers hand out what was asked for."
        )
        assert request in scheduler.running, (
            f"{name} was scheduled, but is not in self.running: append whom you let in."
        )
        assert request not in scheduler.waiting, (
            f"{name} was let in, but still stands in self.waiting: take it out with popleft()."
        )
    assert len(scheduler.running) == len(set(scheduler.running)), "A request is in self.running twice."
    left = [request for request in waited if request not in got]
    lost = [request.request_id for request in left if request not in scheduler.waiting]
    assert not lost, f"{lost[0]} is gone: it did not come in, so it must stay in self.waiting."
    assert list(scheduler.waiting) == left, "Those who still wait must keep their order in the line."
    for request in scheduler.running:
        assert request in got, f"{request.request_id} is in self.running, but was not scheduled."
    idle = sorted(set(scheduler.manager.tables) - {request.request_id for request in got})
    assert not idle, (
        f"A slab was taken for {idle[0]}, which does not run: ask for slots last, when rows and "
        "budget allow it."
    )

# %% watch-2-4 jupyter={"source_hidden": true}
@ours
def watched(kind, plan, limits, asked):
    """`kind`, a learner's Scheduler, with every step compared with the plan."""
    assert isinstance(kind, type) and issubclass(kind, Scheduler), (
        "MyScheduler must stay a class that inherits from Scheduler."
    )

    class Watched(kind):
        done = 0

        def schedule(self):
            running, waiting = list(self.running), list(self.waiting)
            counters = {r: (r.num_tokens, r.num_computed_tokens) for r in running + waiting}
            wanted, got = (plan[self.done] if self.done < len(plan) else {}), None
            try:
                result = bounded(super().schedule)
                got = entries_of(result)
                judge_running(got, running, counters)
                judge_new(got, running, waiting, wanted, limits)
                judge_state(self, got, waiting, limits)
                assert {r.request_id: n for r, n in got.items()} == wanted, "That is another step."
            except NotImplementedError:
                raise  # not yet done
            except (Exception, Endless, Delegated) as error:
                said = what_happened(error, asked, plan, self.done, got)
                raise AssertionError(said) from None
            self.done += 1
            return result

    Watched.__name__ = kind.__name__
    return Watched

# %% told-2-4 jupyter={"source_hidden": true}
@ours
def what_happened(error, asked, plan, step, got):
    """The message: what is wrong, and the steps up to here beside the plan."""
    said = told("schedule()", error)
    if isinstance(error, Endless):
        said += " Does each turn of its loop take somebody out of the waiting line, or stop?"
    elif isinstance(error, RuntimeError) and "mutated during iteration" in str(error):
        said += (
            "\nA `for` over self.waiting can't go on once somebody is taken out: use "
            "`while self.waiting:` and look at self.waiting[0]."
        )
    lines = [f"  step {i}   {line(plan[i])}" for i in range(min(step, len(plan)))]
    here = line(plan[step]) if step < len(plan) else "nobody: all are done"
    lines += [f"  step {step}   should be  {here}"]
    if got is not None:
        yours = {request.request_id: n for request, n in got.items()}
        lines += [f"           yours      {line(yours)}"]
    return "\n".join((said, asked, *lines))

# %% games-2-4 jupyter={"source_hidden": true}
@ours
def run_engine(scheduler, lengths, rows, budget, slabs):
    """(output tokens of each request, number of steps) of the real engine."""
    slab = max(prompt + output for prompt, output in lengths)
    llm = LLM(tiny, scheduler=scheduler, max_num_seqs=rows, max_num_batched_tokens=budget, block_size=1,
              kv_cache_manager=Listening, max_model_len=slab,
              num_gpu_blocks_override=slab * slabs)  # fmt: skip
    for name, (prompt, output) in zip(NAMES, lengths, strict=False):
        prompt_token_ids = [ord(name) + k for k in range(prompt)]
        llm.add_request(prompt_token_ids, SamplingParams(max_tokens=output, ignore_eos=True), name)
    outputs = {}
    while llm.has_unfinished_requests():
        for result in llm.step():
            outputs[result.request_id] = result.outputs[0].token_ids
    return outputs, len(llm.metrics.steps)


@ours
def run_watched(kind, game, asked):
    """run_engine; what ends outside schedule(), in __init__ or update(), is told as well."""
    try:
        return run_engine(kind, *game)
    except (AssertionError, NotImplementedError):
        raise
    except Exception as error:
        raise AssertionError(told("MyScheduler", error, asked)) from None

# %% games-2-4-b jupyter={"source_hidden": true}
@ours
def games_2_4():
    """(lengths, rows, budget, slabs), small ones first."""
    rng = random.Random(25)
    games = [([(2, 1)], 1, 4, 1), ([(2, 2), (3, 1)], 2, 6, 2), ([(2, 2), (3, 1)], 2, 5, 2),
             ([(4, 3), (3, 2), (5, 1)], 2, 6, 2), ([(2, 4), (2, 1), (2, 2), (1, 2)], 2, 8, 2),
             ([(5, 3), (4, 2), (1, 2)], 3, 6, 3), ([(1, 4), (2, 2), (1, 3), (2, 2)], 4, 12, 2),
             ([(1, 1)] * 5, 3, 3, 3), ([(6, 2), (6, 2), (6, 2)], 3, 6, 3),
             ([(1, 2)] * 8, 7, 9, 8),
             ([(3, 30), (2, 2), (9, 3), (1, 1), (1, 1)], 3, 10, 3)]  # fmt: skip
    for count in (6, 9, 14, 22):
        budget = rng.randint(9, 14)
        lengths = [(rng.randint(1, 8), rng.randint(1, 9)) for _ in range(count)]
        games.append((lengths, rng.randint(3, 5), budget, rng.randint(3, 6)))
    return games

# %% check-2-4
@check
def exercise_2_4(MyScheduler):
    for lengths, rows, budget, slabs in games_2_4():
        plan = on_paper(lengths, rows, budget, slabs)
        listed = ", ".join(f"{NAMES[i]} {p} + {n}" for i, (p, n) in enumerate(lengths))
        asked = (f"Rows: {rows}; budget: {budget} tokens; slabs in the pool: {slabs}.\n"
                 f"Prompt + output tokens: {listed}.")  # fmt: skip
        kind = watched(MyScheduler, plan, (rows, budget, slabs), asked)
        outputs, steps = run_watched(kind, (lengths, rows, budget, slabs), asked)
        assert steps == len(plan), f"{steps} steps; {len(plan)} are needed.\n{asked}"
        alone, many = once(run_engine, Scheduler, lengths, 1, budget, slabs)
        said = f"Other tokens came out than for each request alone.\n{asked}"
        assert outputs == alone, said
        busiest = max(len(step) for step in plan)
        print(f"requests: {len(lengths):2}, steps: {steps:2}, most rows: {busiest}; "
              f"one at a time {many:2}, equal tokens")  # fmt: skip

# %% [markdown]
# ## Exercise 2.5: reading a Gantt chart
#
# *12 minutes, medium.*
#
# **From the chart of a run, compute the wasted row-steps, the utilisation and the throughput.**
#
# `chart` is a list of pairs `(request, step)`, in any order: one for each row that a step computed.
# The first pair of a request is its prefill and gives its first token. Each further pair gives one
# token more, until it has the `output_lens[request]` tokens that were asked for. If its row is
# computed after that, nobody gets anything. A recording may end before a request does.
#
# The run goes from step 0 to the last step in the chart. Each of its steps offers `max_num_seqs` rows
# and takes `seconds_per_step`, filled or not. A *row-step* is one row in one step.
#
# | | |
# |---|---|
# | `wasted` | row-steps offered in which no token came out that was asked for: rows that went on after their end, and empty rows |
# | `utilisation` | the share of the row-steps offered that did give such a token |
# | `throughput` | such tokens per second |
#
# ```text
# max_num_seqs = 2, seconds_per_step = 0.5, output_lens = {"A": 3, "B": 1, "C": 2}
#
#  step   0 1 2 3 4
#         A A A C C       chart: ("A", 0), ("B", 0), ("A", 1), ("B", 1), ...
#         B b b _ _       b: computed after its end    _: empty
#
# 10 row-steps, 6 tokens, 2.5 seconds:   wasted 4, utilisation 0.6, throughput 2.4
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# How many of a request's pairs gave a token? Neither the number of pairs nor what was asked for is
# always the answer.
# </details>
# <details><summary>Hint 2: the rule</summary>
# Useful row-steps of a request: the smaller of its pairs and its <code>output_lens</code>. Both
# counts and the share are taken over the same rectangle, rows times steps.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# steps    <- last step + 1
# offered  <- max_num_seqs x steps
# useful   <- sum over requests of min(pairs, tokens asked for)
# return offered - useful, useful / offered, useful / (steps x seconds)
# ```
# </details>

# %% ex-2-5
def read_chart(chart, output_lens, max_num_seqs, seconds_per_step):
    """(wasted row-steps, utilisation, throughput in tokens per second) of one run."""
    ### BEGIN SOLUTION
    num_rows = dict.fromkeys(output_lens, 0)
    for request, _ in chart:
        num_rows[request] += 1
    useful = sum(min(num_rows[request], output_lens[request]) for request in output_lens)
    num_steps = 1 + max(step for _, step in chart)
    offered = max_num_seqs * num_steps
    return offered - useful, useful / offered, useful / (num_steps * seconds_per_step)
    ### END SOLUTION

# %% cases-2-5 jupyter={"source_hidden": true}
@ours
def tabulate(chart, rows):
    """The chart as text: a line for each step."""
    lines = []
    for step in range(1 + max(step for _, step in chart)):
        names = sorted(name for name, at in chart if at == step)
        lines.append(f"  step {step:2}  {' '.join(names + ['_'] * (rows - len(names)))}")
    return "\n".join(lines[:12] + ["  ..."] * (len(lines) > 12))


@ours
def runs_2_5():
    """(chart, output_lens, max_num_seqs, seconds, requests): static and iteration-level by turns.

    Some have a row that is empty throughout, some begin late, some end before their requests do.
    """
    rng = random.Random(26)
    for count, rows, empty, gap, last_step, arrival in [
        (3, 2, 0, 0, 99, 0), (3, 2, 0, 1, 99, 0), (4, 2, 1, 4, 7, 0), (6, 3, 0, 1, 99, 2),
        (9, 3, 0, 5, 30, 0), (12, 4, 0, 1, 9, 0), (20, 5, 2, 2, 99, 0), (1, 1, 0, 0, 99, 0),
        (2, 2, 3, 1, 99, 0),
    ]:  # fmt: skip
        first = arrival
        for kind in (StaticScheduler, Scheduler):
            arrival, pairs = first, []
            for _ in range(count):
                pairs.append((arrival, rng.randint(1, 3 + count // 2)))
                arrival += rng.randint(0, gap)
            requests, chart = serve(kind, pairs, rows, last_step)
            rng.shuffle(chart)
            lens = dict(zip(NAMES, [n for _, n in pairs], strict=False))
            yield chart, lens, rows + empty, rng.choice([0.02, 0.25, 0.5]), requests


@ours
def right_2_5(chart, rows, seconds, requests):
    """The three numbers, from the scheduler's own record; and the useful row-steps."""
    useful = sum(b - a + 1 for request in requests for a, b in request.token_runs)
    steps = 1 + max(step for _, step in chart)
    return rows * steps - useful, useful / (rows * steps), useful / (steps * seconds), useful

# %% texts-2-5 jupyter={"source_hidden": true}
MIXED = (
    "Numerator and denominator do not match: both must count row-steps of the same "
    "rectangle, rows offered times steps."
)
PADS_COUNTED = (
    "Throughput was counted with pads: a row computed after its request's end gives nobody "
    "a token."
)
STILL_TO_COME = (
    "The recording ends before some requests do: tokens that are still to come were counted."
)
IDLE_STEPS = (
    "Steps in which nothing ran take time, too: the run goes from step 0 to the last one."
)
FROM_0 = "Steps count from 0: the last step is s, so there were s + 1."
FIRST_PAIR = "A request's first pair, its prefill, gives a token, too."
ROWS_OFFERED = (
    "max_num_seqs rows are offered in every step, also where no step takes all of them."
)
ONLY_LATE = (
    "Those are only the rows that went on after their end; empty rows are wasted, too."
)
ONLY_EMPTY = (
    "Those are only the empty rows; rows that went on after their end gave nothing either."
)
NOT_YET_USED = (
    "A row that is computed is not yet used: those that went on after their end gave nothing."
)

# %% slips-2-5 jupyter={"source_hidden": true}
@ours
def slips_2_5(chart, output_lens, rows, seconds, useful):
    """The usual slips, by part, each with its answer."""
    computed, asked_for, names = len(chart), sum(output_lens.values()), len(output_lens)
    steps, busy = 1 + max(step for _, step in chart), len({step for _, step in chart})
    offered, taken = rows * steps, steps * min(rows, names)
    started = len({name for name, _ in chart})
    busiest = steps * max(sum(at == step for _, at in chart) for _, step in chart)
    return {
        "wasted": {
            ONLY_LATE: computed - useful, ONLY_EMPTY: offered - computed,
            STILL_TO_COME: offered - asked_for, IDLE_STEPS: rows * busy - useful,
            FROM_0: offered - rows - useful, FIRST_PAIR: offered - useful + started,
            ROWS_OFFERED: busiest - useful, ROWS_OFFERED + " ": taken - useful,
            "Those are the useful row-steps; the others were asked for.": useful,
        },
        "utilisation": {
            MIXED: useful / computed, MIXED + " ": useful / (names * steps),
            MIXED + "  ": useful / steps, MIXED + "   ": computed / (steps * names),
            STILL_TO_COME: asked_for / offered, IDLE_STEPS: useful / (rows * busy),
            ROWS_OFFERED: useful / busiest, ROWS_OFFERED + " ": useful / taken,
            NOT_YET_USED: computed / offered,
            "That is the share that was wasted; the other one was asked for.":
                1 - useful / offered,
            "That is a percentage; a share goes from 0 to 1.": 100 * useful / offered,
        },
        "throughput": {
            PADS_COUNTED: computed / (steps * seconds),
            PADS_COUNTED + " ": offered / (steps * seconds),
            STILL_TO_COME: asked_for / (steps * seconds), IDLE_STEPS: useful / (busy * seconds),
            "Tokens per second were asked for, not per step.": useful / steps,
            "Time passes per step, not per row: all rows of a step share it.":
                useful / (offered * seconds),
            "Time passes per step, not per row: rows of a step share it.":
                useful / (computed * seconds),
        },
    }  # fmt: skip

# %% check-2-5
@check
def exercise_2_5(read_chart):
    cases, parts = [], ("wasted", "utilisation", "throughput")
    for chart, lens, rows, seconds, requests in runs_2_5():
        asked = (f"max_num_seqs = {rows}, seconds_per_step = {seconds}, "
                 f"output_lens = {lens}\n{tabulate(chart, rows)}")  # fmt: skip
        value = ask(read_chart, chart, lens, rows, seconds, asked=asked)
        *wanted, useful = right_2_5(chart, rows, seconds, requests)
        wanted = dict(zip(parts, wanted, strict=True))
        slips = slips_2_5(chart, lens, rows, seconds, useful)
        cases.append((asked, numbers(value, parts, "read_chart"), wanted, slips))
    explain(cases, alike=partial(same, tolerance=1e-6))
    for (_, static, _, _), (_, other, _, _) in zip(cases[::2], cases[1::2], strict=True):
        print(f"static: {static['wasted']:3.0f} wasted, {static['utilisation']:4.0%}, "
              f"{static['throughput']:6.2f} tokens/s; iteration-level: "
              f"{other['wasted']:3.0f} wasted, {other['utilisation']:4.0%}")  # fmt: skip

# %% [markdown]
# ## Exercise 2.6: in three lines
#
# *4 minutes, easy.*
#
# **Why does continuous batching help less when all outputs are equally long?** Write three lines for a
# colleague who expects "up to 20 times faster" from it. Say what it saves, when there is nothing of
# that to save, and what is left of the gain. A person reads this one; the check cannot.

# %% [markdown] written-2-6 points=2
# A static batch runs as long as its longest answer; what continuous batching saves are the row-steps
# of answers that are done earlier, by giving their rows to whoever waits.
# If all answers are equally long, all rows of a batch end in the same step: no row is idle, and both
# need the same number of steps.
# What is left is a shorter wait for a request that arrives while a batch runs and a row is empty, and
# no padding of prompts; a step itself is not faster.
#
# **Rubric, 2 points.** One for *what is saved*: rows of a batch that have finished (or were never
# filled) and are computed, or held, until the longest is done. One for *the limit*: with equal
# lengths nobody finishes early, so the numbers of steps are equal; the gain is bounded by steps static
# over steps continuous, that is by the spread of the lengths. What is left (arrivals in the middle of
# a batch, padding) is welcome and not needed. Give no point for "it uses a bigger batch", "it makes a
# step faster" or "it saves memory" alone. Samples at three levels stand in `solutions/README.md`.
