# %% [markdown]
# # 05 Paged attention
#
# Since chapter 04 a request's keys and values lie in blocks, anywhere in the pool.
# Attention, as chapter 01 wrote it, needs them side by side. There are two ways out.
#
# - We copy the blocks into a row once more, and then multiply. This is easily made right,
#   so we do it first, and count what it copies.
# - We compute the softmax without ever having all scores at once. Then each block is read
#   where it lies.
#
# You do both by hand. Then you read two kernels that do the second one fast: a C++ file
# for the CPU, and a Triton kernel for GPUs.
#
# What the chapter adds to `minikv`:
#
# | file | what it is |
# |---|---|
# | `model/attention.py`, `model/runner.py` | the hook in transformers' models; one step on tensors |
# | `model/backends.py` | several ways to read through tables, behind one function |
# | `model/kernels/gather.py`, `online.py` | copy, then multiply; block by block |
# | `model/kernels/cpu.cpp`, `triton_paged.py` | in place, fast |
#
# **Predict, run, explain**, as before. If this machine has a CUDA GPU, the chapter runs
# on it.

# %% imports
import torch

import minikv.viz as viz
from minikv import LLM, Request, SamplingParams, show
from minikv.classroom.show import beside, excerpt
from minikv.model.backends import AttentionMetadata
from minikv.model.kernels import gather, online
from minikv.model.loader import load

_ = torch.set_grad_enabled(False)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# %% load
loaded = load("smollm2", dtype="float32", device=DEVICE)
model, tokenizer, spec = loaded
START = tokenizer.bos_token_id


def text(token_id):
    return "<SOS>" if token_id == START else tokenizer.decode([token_id])


A = [START, *tokenizer(" I think this movie is better").input_ids]
B = [START, *tokenizer(" I really like").input_ids]
prompts = {"A": A, "B": B}
print("A and B of chapters 02 and 04:", len(A), "and", len(B), "tokens, in float32")

# %% [markdown]
# First we need to know what is right. We run chapter 01's loop, with K and V in dense
# tensors that transformers keeps. From it we take the tokens, and the logits that decided
# each of them. We compare everything that follows with these.

# %% dense
from transformers import DynamicCache


def dense(ids, num_new):
    ids, new, cache, rows = list(ids), list(ids), DynamicCache(config=model.config), []
    for _ in range(num_new):
        logits = model(torch.tensor([new], device=DEVICE), cache=cache).logits[0, -1]
        rows.append(logits)
        new = [int(logits.argmax())]
        ids += new
    return ids, torch.stack(rows)


reference = {name: dense(ids, 6) for name, ids in prompts.items()}
for name, (ids, _) in reference.items():
    print(name, repr("".join(map(text, ids))))

# %% [markdown]
# ## 1. What attention is given
#
# We take chapter 04's busy pool once more: 24 blocks of 4 slots, with eight other
# requests in it, of which two have left. The engine serves A and B in this pool. (From
# here on the model belongs to the engine.)

# %% busy-pool
def others_in(manager):
    "Other requests, grown in turns; two have left. They are not run here."
    others = [Request(f"other {i}", num_prompt_tokens=9, max_tokens=3) for i in range(8)]
    for num_tokens in (4, 8, 9):
        for other in others:
            manager.allocate_slots(other, num_tokens - other.num_computed_tokens)
            other.num_computed_tokens = num_tokens
    manager.free(others[1])
    manager.free(others[4])


# %% engine
def engine(backend):
    pool = {"block_size": 4, "num_gpu_blocks_override": 24, "max_model_len": 16}
    llm = LLM(loaded, kv_cache_manager="paged", attention_backend=backend, **pool)
    others_in(llm.manager)
    for name, ids in prompts.items():
        llm.add_request(ids, SamplingParams(max_tokens=6, ignore_eos=True), name)
    return llm


llm = engine("gather")
for _ in range(3):
    llm.step()
snap = viz.snapshot(llm)
for name in prompts:
    print(name, "blocks", list(snap.tables[name]), "slots written:", snap.num_live[name])

# %% [markdown]
# transformers lets a program replace the function that every attention layer calls. Our
# function gets the new queries, keys and values of the step. It does two things:

# %% show-hook
excerpt("model/attention.py", "# First write", "return mixed[None], None")

# %% [markdown]
# First it writes the new keys and values into their slots, with the slot mapping of
# chapter 04. Then it leaves the reading to a **backend**. There are several backends,
# functions with the same arguments. (`window` comes in section 5. `softcap` squeezes the
# scores between two bounds, in models that were made with it. Our model has neither.) We
# record what the backend gets in one decode step, and what it answers.
#
# > **Predict.** The model has 30 layers. How many sets of block tables does the step
# > bring along?

# %% capture
def capture(llm):
    "One more step: what the backend is given in each layer, and what it answers."
    calls, attend = [], llm.runner.attend

    def recording(query, pool, metadata, **options):
        answer = attend(query, pool, metadata, **options)
        calls.append((query.clone(), pool, metadata, options, answer))
        return answer

    llm.runner.attend = recording
    llm.step()
    llm.runner.attend = attend
    return calls


# %% captured
calls = capture(llm)
num_pools = len({pool.data_ptr() for _, pool, *_ in calls})
num_tables = len({id(metadata) for _, _, metadata, *_ in calls})
print(len(calls), "layers,", num_pools, "pools,", num_tables, "set of tables")
query, pool, metadata, options, answer = calls[0]
print("query", tuple(query.shape), " pool", tuple(pool.shape))
for name in ("block_tables", "seq_lens", "query_start_loc"):
    print(f"{name:15}", getattr(metadata, name).tolist())

# %% [markdown]
# One set of tables serves all layers. It is a common belief that each layer needs a block
# table of its own. Each layer has a *pool* of its own, but all pools have the same shape,
# and a token lies in the same slot of each.
#
# The dimensions of `query` are the tokens of the step, the query heads, and `head_dim`.
# Those of `pool` are K and V, the blocks, the kv heads, the slots of a block, and
# `head_dim`. The pool has one block more than the manager knows. That is block 24. It
# fills up the shorter table, since a tensor is a rectangle.
#
# `seq_lens` counts the slots that are *written*, including the slot of this step's token.
# `query_start_loc` says where the rows of each request begin in the query.
#
# ## 2. Gather: side by side once more
#
# We index the pool with a table, and the blocks come out in the table's order. Then we
# join blocks and slots into one dimension, and cut off what is not written. The rest is
# chapter 01.

# %% gather-by-hand
def gathered(pool, table, seq_len):
    "[2 (K, V), kv heads, seq_len, head_dim], side by side, in order."
    blocks = pool[:, table]  # [2, blocks, kv heads, block_size, head_dim]: a copy
    return blocks.transpose(1, 2).flatten(2, 3)[:, :, :seq_len]


def attend_dense(q, keys, values):
    "One query over n tokens. q [9, 64]; keys and values [3, n, 64]."
    scores = q.view(3, 3, 64) @ keys.mT * 64**-0.5  # [kv heads, query heads of each, n]
    return (scores.softmax(-1) @ values).reshape(9, 64)


# %% gather-compare
table, seq_len = metadata.block_tables[0].tolist(), int(metadata.seq_lens[0])
copied_k, copied_v = gathered(pool, table, seq_len)
by_hand = attend_dense(query[0], copied_k, copied_v)
assert torch.allclose(by_hand, answer[0], rtol=0, atol=1e-5)
print("keys", tuple(copied_k.shape), "from blocks", table)
print("the result equals the engine's answer, to rounding")

# %% [markdown]
# > **Predict.** We move every block of the pool to a random other place, and change the
# > table to match. By how much does the answer change?

# %% order
new_place = torch.randperm(pool.shape[1], generator=torch.Generator().manual_seed(5))
moved = torch.empty_like(pool)
moved[:, new_place.to(DEVICE)] = pool
moved_table = new_place[table].tolist()
after = attend_dense(query[0], *gathered(moved, moved_table, seq_len))
assert torch.equal(after, by_hand)
print("table", table, "->", moved_table, ": the same bits")

# %% [markdown]
# It does not change by one bit. The blocks need not lie in order. Only the table is in
# order.
#
# Now comes the checkpoint. The whole engine runs from the prompts to the last token, and
# we compare it with the dense loop. In every later section a faster way to read has to
# pass the same comparison.

# %% recorded
def record_logits(llm):
    "Collects the rows of logits that the engine computes, by request."
    rows, forward = {name: [] for name in prompts}, llm.runner.forward

    def recording(packed):
        logits = forward(packed)
        for (request, _), row in zip(packed, logits, strict=True):
            rows[request.request_id].append(row.clone())
        return logits

    llm.runner.forward = recording
    return rows


# %% checkpoint
def compare(backend):
    "Runs A and B to the end: tokens equal, logits within 1e-4 of the dense ones."
    llm, answers = engine(backend), {}
    rows = record_logits(llm)
    while llm.has_unfinished_requests():
        for output in llm.step():
            answers[output.request_id] = output.outputs[0].token_ids
    for name, (ids, logits) in reference.items():
        assert answers[name] == ids[len(prompts[name]) :], name
        assert torch.allclose(torch.stack(rows[name]), logits, rtol=0, atol=1e-4), name
    num_tokens = sum(map(len, answers.values()))
    print(f"{backend}: the same {num_tokens} tokens, logits equal to 1e-4")


compare("gather")

# %% [markdown]
# This picture shows what gather copied in our step. It is drawn from the tables:

# %% gather-map
snap, labels = viz.snapshot(llm), viz.labels_of(llm, text)
card, blocks = viz.gather_map(snap, {name: labels[name] for name in prompts})
assert [b.block_id for b in blocks if b.request_id == "A"] == table
assert [b.num_written for b in blocks] == [4, 4, 2, 4, 3, 0]
card

# %% [markdown]
# Chapter 02's rectangle is back. One product serves both requests, so both copies are as
# long as the longer table. The rest of the shorter one is padding. Gather also copies the
# unwritten slots in the last block of each request.
#
# > **Predict.** How many slots hold K and V of A and B, and how many slots does gather
# > copy? How many bytes are that, in all layers?

# %% bytes-gather
bytes_per_slot = 2 * spec.num_kv_heads * spec.head_dim * 4  # of one layer, float32
predicted = spec.num_layers * len(blocks) * 4 * bytes_per_slot
[group] = gather.query_groups(metadata, pool)  # the backend's own list of rows to copy
copied = spec.num_layers * group.gather_rows.numel() * 4 * spec.head_dim * 4
assert copied == predicted
print("written:", int(metadata.seq_lens.sum()), "slots; copied:", len(blocks) * 4)
print(f"predicted {predicted:,} bytes, copied {copied:,}, in every step")

# %% [markdown]
# These numbers are small, but a server has more requests, and longer ones. We compute the
# same for sixteen requests in a decode step. First all have the same length. Then there
# is one long conversation among short ones:

# %% ragged
layers_bytes = bytes_per_slot * spec.num_layers
for contexts in ([1024] * 16, [4096] + [128] * 15):
    written = sum(contexts) * layers_bytes
    copied = len(contexts) * max(contexts) * layers_bytes
    print(f"contexts {contexts[0]} and 15 × {contexts[1]}:",
          f"written {written / 1e9:.2f} GB, copied {copied / 1e9:.2f} GB,",
          f"{copied / written:.1f} times as much")

# %% [markdown]
# One long request makes all copies long. (An engine could put requests of similar length
# into one group. It would then have more products, and smaller ones.) And a copied byte
# costs more than a byte that is only read: it is read, written, and read again by the
# product.
#
# How much time is that? We measure the decode attention of one layer, for sixteen
# requests of equal length, with blocks in random order. The parts run in turns, so that a
# slow moment of the machine hits all of them alike. We print only ratios.

# %% a-step
def scattered_tables(contexts, block_size, scattered, dice):
    "A table per request, of blocks in random order or in a row; number of blocks."
    counts = [-(-n // block_size) for n in contexts]
    order = torch.randperm(sum(counts), generator=dice)
    ids = (order if scattered else order.sort().values).int().split(counts)
    tables = torch.full((len(contexts), max(counts)), sum(counts), dtype=torch.int32)
    for row, table in zip(tables, ids, strict=True):
        row[: len(table)] = table
    return tables, sum(counts)


# %% a-step-pool
def a_step(contexts, block_size=16, scattered=True):
    "One layer's pool with noise in it, and a decode step over its blocks."
    dice, n = torch.Generator().manual_seed(0), len(contexts)
    tables, num_blocks = scattered_tables(contexts, block_size, scattered, dice)
    step = AttentionMetadata(
        block_tables=tables.to(DEVICE),
        query_start_loc=torch.arange(n + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        first_visible=None,  # no padding slots
        max_query_len=1,
        max_seq_len=max(contexts),
    )
    pool = torch.randn(2, num_blocks + 1, 3, block_size, 64, generator=dice)
    query = torch.randn(n, 9, 64, generator=dice)
    return query.to(DEVICE), pool.to(DEVICE), step


# %% seconds-of
import time


def seconds_of(run):
    start = time.perf_counter()
    run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


# %% in-turns
def in_turns(parts, rounds=15):
    "The best time of each part, in seconds. The first turn only warms up."
    turns = [[seconds_of(run) for run in parts.values()] for _ in range(rounds + 1)]
    return dict(zip(parts, map(min, zip(*turns[1:], strict=True)), strict=True))


# %% gather-parts
q, kv, step = a_step([1024] * 16)
scaling = 64**-0.5
[rows] = [g.gather_rows for g in gather.query_groups(step, kv)]
copy = kv.view(-1, 16 * 64)[rows].view(2, 48, 1024, 64)


def make_copy():
    torch.index_select(kv.view(-1, 16 * 64), 0, rows, out=copy.view(-1, 16 * 64))


def products():
    scores = q.view(48, 3, 64) @ copy[0].mT * scaling
    return scores.softmax(-1) @ copy[1]


# %% time-gather tags=["nbval-ignore-output"]
times = in_turns({
    "gather attention": lambda: gather.attend(q, kv, step, scaling=scaling),
    "its products alone, on a copy made before": products,
    "its copy alone": make_copy,
})
for name, t in times.items():
    print(f"{t / times['gather attention']:4.0%} of the time: {name}")

# %% [markdown]
# On the machine that built this page the copy is a good part of the work. It is made anew
# in every layer of every step. Still, gather has its place: it is plain torch, it runs
# everywhere, and it tells us what is right. It is *equal* to the dense cache. It is not
# *free*.
#
# ## 3. Softmax in pieces
#
# Why does attention copy at all? Softmax divides by the sum over **all** scores. And
# first it subtracts the largest of all scores, so that no exponential overflows. So it
# seems to need the whole row.
#
# We use a tiny example in this section: one query, and seven keys in two blocks of four.
# The last slot is not written. The values are plain numbers.

# %% tiny
scores = [[2.0, 0.0, 1.0, 1.0], [4.0, 1.0, 3.0]]
values = [[10.0, 20.0, 30.0, 40.0], [50.0, 60.0, 70.0]]
flat, worth = (torch.tensor(x[0] + x[1], dtype=torch.float64) for x in (scores, values))
whole = float(flat.softmax(0) @ worth)
print(f"all seven at once: {whole:.4f}")

# %% why-subtract
from math import inf

big = flat.float() * 1000
print("exp of scores × 1000:", big.exp().tolist()[:5])
print("their softmax would contain inf / inf =", inf / inf)
print("minus the largest first:", (big - big.max()).exp().tolist()[:5])

# %% [markdown]
# So softmax subtracts the largest score. The quotient stays the same, and no exponential
# is above 1.
#
# Now we look at one block alone. Three numbers sum it up: its *largest* score; the *sum*
# of the exponentials, each relative to the largest; and *mixed*, the sum of the values,
# each weighted with its exponential.

# %% one-block
from math import exp


def one_block(scores, values):
    largest = max(scores)
    weights = [exp(score - largest) for score in scores]
    mixed = sum(w * v for w, v in zip(weights, values, strict=True))
    return largest, sum(weights), mixed


# %% two-blocks
first, second = map(one_block, scores, values)
for name, (largest, total, mixed) in (("block 0", first), ("block 1", second)):
    print(f"{name}: largest {largest:.0f}, sum {total:.3f}, mixed {mixed:.2f}; "
          f"alone it would answer {mixed / total:.2f}")

# %% [markdown]
# > **Predict.** How do two such triples make one? Programs in practice have tried two
# > ways: the mean of the two answers, or the sum of the sums and the sum of the mixtures.
# > Which of them is right?

# %% two-wrong
averaged = (first[2] / first[1] + second[2] / second[1]) / 2
added = (first[2] + second[2]) / (first[1] + second[1])
print(f"softmax per block, then the mean: {averaged:.4f}")
print(f"sums and mixtures added:          {added:.4f}")
print(f"all at once:                      {whole:.4f}")

# %% [markdown]
# Neither is right. The first way gives both blocks the same say, though most of the
# weight is in block 1. The second way adds numbers in different units: those of block 0
# are relative to its largest score, 2, and those of block 1 to its own, 4. Both ways give
# a plausible number, and no error.
#
# The repair brings both blocks to the same unit. A number that is relative to `old`
# becomes relative to `new` when it is multiplied by exp(old − new).

# %% merge
def merge(a, b):
    largest = max(a[0], b[0])
    shrink_a, shrink_b = exp(a[0] - largest), exp(b[0] - largest)
    return largest, a[1] * shrink_a + b[1] * shrink_b, a[2] * shrink_a + b[2] * shrink_b


largest, total, mixed = merge(first, second)
assert abs(mixed / total - whole) < 1e-12
print(f"largest {largest:.0f}, sum {total:.3f}, mixed {mixed:.2f}: {mixed / total:.4f}")

# %% [markdown]
# The result is the same as all at once, and we did not keep any score of block 0. This is
# **online softmax** (Milakov and Gimelshein 2018), the idea inside FlashAttention (Dao et
# al. 2022). The division comes once, at the end.
#
# > **Predict.** We cut the same scores into blocks of two. After which block does the
# > earlier sum shrink?
#
# The picture is a player: click it, then press the arrow keys.

# %% online-player
twos, tens = ([row[i : i + 2].tolist() for i in range(0, 7, 2)] for row in (flat, worth))
last = viz.softmax_states(twos, tens)[-1]
assert abs(last.mixed / last.total - whole) < 1e-12
viz.softmax_player(twos, values=tens, title="The same seven scores, in blocks of two")

# %% [markdown]
# The sum shrinks after block 2, which brings the largest score. The bars before it get
# lower, and keep their proportions.
#
# > **Predict.** Does it matter in which order the blocks are merged?

# %% many-blocks
from itertools import permutations

pieces = [one_block([s], [v]) for s, v in zip(flat.tolist(), worth.tolist(), strict=True)]
answers = []
for so_far, *others in permutations(pieces):
    for piece in others:
        so_far = merge(so_far, piece)
    answers.append(so_far[2] / so_far[1])
assert max(abs(x - whole) for x in answers) < 1e-12
print(f"{len(answers):,} orders of seven blocks of one slot: all {whole:.4f}")

# %% [markdown]
# The order does not matter, except for rounding. So different programs can each take a
# part of a table, and their results can be merged at the end.
#
# Two traps are left. A mask may hide a **whole block**. Its largest score is then minus
# infinity. And a slot that was never written may hold anything, even **NaN**.

# %% traps
from math import nan

print("a block all hidden: exp(-inf - (-inf)) =", exp(-inf - (-inf)))
print("relative to 0 instead: exp(-inf - 0) =", exp(-inf - 0))
print("an unwritten slot with weight 0: 0 × NaN =", 0.0 * nan)

# %% [markdown]
# A NaN that enters a sum stays in it. So where nothing in a block is visible, its numbers
# are taken relative to 0. Then all its weights are 0, and the block adds nothing. And an
# unwritten slot must be left *out*: a weight of 0 does not protect from what is in it.
#
# The package's version takes care of both. It works on tensors, and its rows are queries.

# %% show-online
show(online.OnlineSoftmax.add_block)

# %% hidden-block
softmax = online.OnlineSoftmax(torch.ones(1, 1).double())  # scores are the keys
hidden = ([9.0] * 4, [1.0] * 4, False)
for s, v, seen in (hidden, (scores[0], values[0], True), (scores[1], values[1], True)):
    s, v = (torch.tensor(x, dtype=torch.float64)[:, None] for x in (s, v))
    softmax.add_block(s, v, torch.full((1, len(s)), seen))
    print(f"{'seen' if seen else 'hidden':6}  largest {softmax.largest.item():4}, "
          f"sum {softmax.total.item():.3f}")
assert abs(softmax.result().item() - whole) < 1e-12
print(f"answer {softmax.result().item():.4f}")

# %% [markdown]
# ## 4. The table, walked in place
#
# Now we use real keys. Nothing is copied here: `pool[:, block_id, :, :n]` is a view of
# the written slots of one block.

# %% walk
q_heads = query[0].view(3, 3, 64) * options["scaling"]  # kv heads, queries of each, 64


def walk(block_ids, first_index=0):
    softmax = online.OnlineSoftmax(q_heads)
    for index, block_id in enumerate(block_ids, first_index):
        n = min(4, seq_len - 4 * index)  # the tail is cut off
        visible = torch.ones(3, n, dtype=torch.bool, device=DEVICE)
        softmax.add_block(*pool[:, block_id, :, :n], visible)
    return softmax


# %% walk-compare
walked = walk(table).result().reshape(9, 64)
exact = attend_dense(*(x.double() for x in (query[0], copied_k, copied_v)))
for name, got in (("gather", by_hand), ("online", walked)):
    assert (got - exact).norm() < 1e-5 * exact.norm()
    print(f"{name}: equal to float64, to 1e-5 of its norm")

# %% [markdown]
# `kernels/online.py` is this loop, for all requests of a step, and for chunks of prompts.
# It has to pass the checkpoint:

# %% checkpoint-online
compare("online")

# %% [markdown]
# By hand, in section 2, we cut off the tail. The package's gather cannot do that. It
# multiplies the whole rectangle, and gives weight 0 to the slots that are not written.
#
# > **Predict.** We fill all slots that no token has written with NaN, as a recycled block
# > might hold it. What do the two backends answer? And with 10,000 instead of NaN?

# %% unwritten
written = torch.zeros(pool.shape[1], 4, dtype=torch.bool)
seq_lens = metadata.seq_lens.tolist()
for row, n in zip(metadata.block_tables.tolist(), seq_lens, strict=True):
    for position in range(n):
        written[row[position // 4], position % 4] = True
unwritten = ~written.to(DEVICE)[None, :, None, :, None]

# %% poison
for poison, backend in ((nan, gather), (nan, online), (1e4, gather), (1e4, online)):
    poisoned = pool.masked_fill(unwritten, poison)
    with torch.inference_mode():  # gather's buffers were made in this mode
        got = backend.attend(query, poisoned, metadata, **options)
    same = torch.allclose(got, answer, rtol=0, atol=1e-5)
    verdict = "the same" if same else "NaN" if got.isnan().any() else "wrong"
    name = backend.__name__.split(".")[-1]
    print(f"{poison:7} in unwritten slots, {name}: {verdict}")

# %% [markdown]
# With weight 0 any number is harmless, but NaN is not. So for gather's sake the engine
# fills its pool with zeros at the start, and it cleans the blocks of a request whose
# values overflowed. A backend that cuts off the tail needs neither.
#
# ## 5. Which slots a query may read
#
# A decode step has one query per request, and this query reads all that is written. A
# long prompt is computed in chunks, over several steps (chapter 06). A chunk has several
# queries, on top of what earlier chunks wrote. We give the engine A's seven tokens, and
# allow four tokens in a step.
#
# The package's gather puts requests that one product can serve into a group. The `bias`
# of the group is added to the scores. It is 0 where a query may read a slot (printed as
# `#`), and minus infinity elsewhere.
#
# > **Predict.** How long is the key sequence in the first of these steps: 4, or 7?

# %% chunks
pool_of_six = {"kv_cache_manager": "paged", "block_size": 4, "num_gpu_blocks_override": 6}
four = {"max_num_seqs": 1, "max_num_batched_tokens": 4}  # tokens in a step, at most
chunked = LLM(loaded, attention_backend="gather", **pool_of_six, **four, max_model_len=16)
chunked.add_request(A, SamplingParams(max_tokens=2, ignore_eos=True), "A")
chunk_calls = [capture(chunked)[0] for _ in range(2)]


def visible_slots(group, num_slots, window=None):
    "One row per query: True where it may read."
    return group.bias(num_slots, window, torch.float32)[0, 0, 0] == 0


# %% chunks-shown
for _, kv_pool, step_of, *_ in chunk_calls:
    [group] = gather.query_groups(step_of, kv_pool)
    num_slots = group.num_blocks * 4
    print("queries", group.positions[0].tolist(), "key length", int(step_of.seq_lens[0]),
          "of", num_slots, "slots")
    for row in visible_slots(group, num_slots).tolist():
        print("   ", *("#" if seen else "." for seen in row))

# %% [markdown]
# The key length is four, then seven. It is **what has been written**, this chunk
# included. Row *i* of a chunk that starts at position *s* reads positions 0 to *s* + *i*.
#
# A common slip takes the length of the whole prompt in the first step already. What
# happens then?

# %% wrong-length
q_chunk, kv_pool, step_of, options_of, right = chunk_calls[0]
two_blocks = [*step_of.block_tables[0].tolist(), 5]
slip = AttentionMetadata(
    block_tables=step_of.block_tables.new_tensor([two_blocks]),
    query_start_loc=step_of.query_start_loc,
    seq_lens=step_of.seq_lens.new_tensor([7]),
    first_visible=None,
    max_query_len=4,
    max_seq_len=7,
)
fresh = kv_pool.clone()
fresh[:, 5] = 0  # the next block, as it is before a token is written to it

# %% wrong-length-shown
got = gather.attend(q_chunk, fresh, slip, **options_of)
[group] = gather.query_groups(slip, fresh)
for row, seen in enumerate(visible_slots(group, 8).sum(-1).tolist()):
    same = torch.allclose(got[row], right[row], atol=1e-5)
    print(f"token {row}: {'the same' if same else 'another answer'}, "
          f"reads positions 0 to {seen - 1}, not 0 to {row}")

# %% [markdown]
# Every query reads too far. It reads tokens that come after it, and slots that hold
# nothing yet. A key of zeros has score 0, and a score of 0 is not "no score". Again there
# is no error, only another answer.
#
# In some models a query looks back only over a **sliding window** of `w` positions. For
# the mask this is one more condition. For a kernel that reads in place it is also a
# saving, as it need not read a block that no query of the step sees.

# %% window
_, kv_pool, step_of, *_ = chunk_calls[1]
[group] = gather.query_groups(step_of, kv_pool)
print("the second chunk, window 3:")
for row in visible_slots(group, 8, window=3).tolist():
    print("   ", *("#" if seen else "." for seen in row))

# %% window-blocks
position, w, size = 4095, 128, 16
num_blocks = position // size - (position - w + 1) // size + 1
print("a decode at position", position, "with window", w, "and blocks of", size)
print("reads", num_blocks, "of", position // size + 1, "blocks")

# %% [markdown]
# The request still holds the blocks before the window. Our manager gives none back while
# the request runs. (Engines for such models do.)
#
# ## 6. A kernel that reads in place
#
# The online backend is right, and far too slow for work. It is a Python loop over every
# block of every request. `kernels/cpu.cpp` is the same loop in C++. Its unit of work is
# one request and one kv head. The heart of it is the walk through the table:

# %% show-walk
excerpt("model/kernels/cpu.cpp", "const int run_end", "use(t, row);")

# %% [markdown]
# - `base + table[index] * block_stride` is the lookup. The kernel makes it once per
#   block, not once per token. Up to `run_end`, the slots lie side by side.
# - `ahead` points into the *next* block. A processor guesses that memory will be read on
#   in order, and at the end of a block the guess is wrong. But the kernel knows the
#   table, so it asks for the next block early.
# - `use` does the arithmetic on one row: a score from a key, or a value times its weight.
#
# The kernel works in *tiles*, pieces of up to 64 slots. From tile to tile it does what
# section 3 did. It shrinks the sums so far only if the new tile brought a larger score.
# <!-- source: TILE in cpu.cpp -->

# %% show-shrink
start, end = "if (largest > s.largest[r]) {", "s.total[r] += fold<SUM>(sum);"
excerpt("model/kernels/cpu.cpp", start, end)

# %% [markdown]
# The file is compiled once, by the C++ compiler of this machine. Without a compiler, and
# on a GPU, the engine takes another backend, and says why.

# %% backends tags=["nbval-ignore-output"]
from minikv.model.backends import BACKENDS, choose_backend, why_not

for name in BACKENDS:
    print(f"{name:7}", why_not(name, DEVICE, torch.float32) or "can run here")
fast, attend_fast = choose_backend(DEVICE, torch.float32)
print("the engine's choice:", fast)
compare(fast)

# %% [markdown]
# Now we time the same sixteen requests as in section 2.
#
# > **Predict.** How does reading in place compare with gather? And what does the *table*
# > cost? To find out, we run the same kernel over scattered blocks, over consecutive
# > blocks, as in a slab of chapter 02, and over one block per request, so that there is
# > nothing to look up.

# %% in-place-parts
steps = {
    "scattered blocks of 16": a_step([1024] * 16),
    "consecutive blocks of 16": a_step([1024] * 16, scattered=False),
    "one block per request": a_step([1024] * 16, block_size=1024),
}
side_by_side = copy.view(2, 16, 3, 1024, 64)


def torchs_own():
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q[:, :, None], *side_by_side, enable_gqa=True)


# %% time-in-place tags=["nbval-ignore-output"]
parts = {f"{fast}, {name}": lambda s=s: attend_fast(*s, scaling=scaling)
         for name, s in steps.items()}
times = in_turns({
    "gather, scattered blocks of 16": lambda: gather.attend(q, kv, step, scaling=scaling),
    **parts,
    "torch's own, K and V side by side": torchs_own,
})
for name, t in times.items():
    print(f"{t / next(iter(times.values())):5.2f} of gather's time: {name}")

# %% cost-of-the-table tags=["nbval-ignore-output"]
scattered, consecutive, single = (times[name] for name in parts)
print(f"the time of {fast} over scattered blocks of 16:")
print(f"{scattered / consecutive - 1:+.0%} against consecutive blocks")
print(f"{scattered / single - 1:+.0%} against one block per request")

# %% [markdown]
# These are two questions, and they must be kept apart.
#
# *What does it save not to copy?* The second line of the table answers this. (Where the
# engine's choice is gather itself, it says nothing.)
#
# *What does indirection cost this kernel?* The last two lines answer this. On the CPU
# that built this page they move from run to run, and they are small beside what not
# copying saves. The reason is the hints: they make the table cheap. Compiled without the
# line that gives them, the kernel took 0.74 to 0.82 ms for eight such requests in
# scattered blocks, instead of 0.39 to 0.43 ms.
# <!-- source: cpu.cpp with and without its __builtin_prefetch, 3 runs in turns, best of 60 each, an AMD EPYC with two cores -->
#
# The line of torch's own attention concerns a question of chapter 01: why did attention
# on a cache side by side take longer than its bytes explain? For a single query the
# kernel matters as much as the layout.
#
# The paper measured a real cost on its GPU. Its kernel's attention took 20 to 26% longer
# than that of FasterTransformer, which reads K and V side by side. The paper names the
# causes: looking up the table, extra branches, and lengths that vary. Its engine was
# faster nevertheless, because only attention is affected, and far more requests fit. The
# paper's percentages cannot be compared with ours. It had another machine, another
# kernel, and another rival.
# <!-- source: Kwon et al. 2023, section 7.1 and Fig. 18a -->
#
# ## 7. The Triton kernel, line by line
#
# On a GPU the backend is `kernels/triton_paged.py`. Triton is Python that is compiled for
# GPUs. Many *programs* run at once, numbered by `tl.program_id`, and each works on whole
# tiles. We print it beside `online.py`, which you know. (The cells print text. The
# chapter does not need Triton.) Where the two differ, the GPU is the reason:
#
# - `online.py` walks block by block. The kernel walks in **tiles** of its own size, and
#   looks up the block of every slot. A tile may span several blocks, or be a part of one.
#   Neighbouring slots ask for the same entry, and that is one access to memory.
# - The kernel cannot cut off a tail, since its shapes are fixed when it is compiled. It
#   loads with a **mask**. What is masked comes as 0, whatever lies there.
# - The kernel uses `exp2` instead of `exp`, since the hardware has powers of two. As
#   `e^x = 2^(x · log2 e)`, the factor `log2 e` is put once into the scale of the scores,
#   `score_scale`.
#
# First, what comes before the loop:

# %% beside
beside("model/kernels/online.py", "model/kernels/triton_paged.py", [
    ("whose work: one request and kv head",
     "for i, seq_len in enumerate(seq_lens)", "kv_head, num_kv_heads = tl.program_id(1)"),
    ("rows: query heads that share a kv head",
     "grouped = query.reshape(num_tokens", ("row = tl.arange(0, ROWS)", "row % PER_KV")),
    ("each query's own position",
     "last = torch.arange(seq_len", "position = context_len + nth_query"),
    ("a window's first slot",
     "first = first.maximum(last", "visible_from = tl.maximum(position - (WINDOW"),
    ("nothing seen yet", ("self.largest = query.new_full", "self.mixed ="),
     ("row_max = tl.full", "mixed = tl.zeros")),
])

# %% [markdown]
# Then the loop, and the division at its end:

# %% beside-loop
beside("model/kernels/online.py", "model/kernels/triton_paged.py", [
    ("the loop", "for index, block_id in enumerate(table):",
     ("for tile_start in range", "slot = tile_start")),
    ("written slots only", "start, end = index * block_size", "in_reach = slot < end"),
    ("the table", "table = metadata.block_tables[i", ("block_id = tl.load(", ")")),
    ("read K and V", "keys, values = pool[:, block_id",
     ("kv_at = block_id.to(tl.int64)", "v = tl.load(values")),
    ("scores", "scores = self.query @ keys.mT", "scores = tl.dot(q"),
    ("the mask", "scores = scores.masked_fill(~visible",
     ("visible = (slot[None", "scores = tl.where(visible")),
    ("the largest so far", ("largest = self.largest.maximum", "reference = "),
     ("new_max = tl.maximum", "shift = tl.where")),
    ("to the new unit", "shrink = torch.exp(", "rescale = tl.exp2(row_max"),
    ("weights", "weights = torch.exp(", "weights = tl.exp2(scores"),
    ("sums", ("self.total = self.total * shrink", "self.mixed = self.mixed * shrink"),
     ("row_sum = row_sum * rescale", "mixed += tl.dot")),
    ("divide once", "return self.mixed / self.total", "mixed = mixed / row_sum"),
])

# %% [markdown]
# One more difference is not in these rows. With a program per request and kv head, a GPU
# is busy only if there are many of them. For few and long requests a table is **split**
# among several programs, and their results are merged. This is section 3's merge. We try
# it with two parts of A's table:

# %% split
halves = walk(table[:1]), walk(table[1:], first_index=1)
largest = halves[0].largest.maximum(halves[1].largest)
shares = [(h.largest - largest).exp() for h in halves]
total = sum(h.total * share for h, share in zip(halves, shares, strict=True))
mixed = sum(h.mixed * share[..., None] for h, share in zip(halves, shares, strict=True))
assert torch.allclose((mixed / total[..., None]).reshape(9, 64), walked, atol=1e-6)
print("two programs, one answer: equal to rounding")

# %% [markdown]
# Is the kernel fast? `python -m minikv bench kernel` compares it on a GPU with the
# bandwidth of a plain copy. `make test-gpu` tests there that it gives the same answers.
# On a machine without a GPU both say `not run`.
#
# ## 8. Why the block size matters to a kernel
#
# Chapter 04 chose the block size by the tail. For a kernel three other things count: how
# many bytes lie side by side, how often it must look up, and what it loads for nothing.
#
# > **Predict.** Take 1,024 tokens, and blocks of 1 to 256. Which of the three columns
# > would worry you?

# %% block-size-table
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
print("block size,   in a run,   lookups per       mean tail,")
print("tokens        bytes       1024 tokens       slots")
for size in SIZES:
    print(f"{size:6}{size * spec.head_dim * 4:16,}{1024 // size:12}{(size - 1) / 2:18}")

# %% [markdown]
# A *run* is what lies side by side: the slots of one head in one block. A processor that
# reads ahead has hardly begun when a short run ends and the next lookup is due. And the
# hints of our kernel reach only into the next block.
#
# We measure both backends. In the figure each line has its own unit, the time at its own
# best block size. So the lines do not say which backend is faster. (Section 6 did.)

# %% sweep tags=["nbval-ignore-output"]
steps = {size: a_step([1024] * 8, size) for size in SIZES}
sweep = {}
for name, attend in {fast: attend_fast, "gather": gather.attend}.items():
    best = in_turns({size: lambda s=s, attend=attend: attend(*s, scaling=scaling)
                     for size, s in steps.items()}, rounds=15)
    sweep[name] = [(i, t / min(best.values())) for i, t in enumerate(best.values())]
    print(f"{name:7}", "  ".join(f"{SIZES[i]}: {ratio:.2f}" for i, ratio in sweep[name]))

# %% sweep-figure tags=["nbval-ignore-output"]
from minikv.viz.gantt import curves

card, drawn = curves(
    sweep,
    title="One decode step's attention, each line relative to its own best",
    xlabel="block size, tokens",
    ylabel="time / the line's shortest time",
)
card.axes[0].set_xticks(range(len(SIZES)), map(str, SIZES))
card.axes[0].get_legend().set_loc("upper right")
assert all(len(points) == len(SIZES) for points in drawn.values())
card

# %% [markdown]
# On the machine that built this page, short runs and many lookups slow down the kernel,
# most of all at one or two slots. Between 64 and 256 its line may rise again a little,
# since it gives no useful hints inside a large block. The tail costs nothing in this
# figure, as 1,024 tokens fill every block. A kernel in place would skip it in any case.
# Gather copies it, and likes longer blocks.
# <!-- source: cpu.cpp without its __builtin_prefetch, as in section 6: 0.74, 0.56 and 0.48 ms at 64, 128 and 256; with it 0.34, 0.43 and 0.43 -->
#
# So a kernel in place wants blocks that are not tiny, and gains little from larger ones.
# Memory speaks against large blocks, because of the tail and of sharing. The paper comes
# to the same conclusion on its GPU: blocks of 16 are large enough to read well and small
# enough to waste little.
# <!-- source: Kwon et al. 2023, section 7.2 and Fig. 18b -->
#
# ## 9. The bytes of a decode step
#
# Now you can say beforehand what a decode step reads. It reads every weight once. In each
# layer it reads the K and V of all written slots, with those of the new token. And it
# reads the tables.
#
# > **Predict.** How many bytes do A and B need in their step of section 1, for weights,
# > for K and V in place, and for table entries?

# %% predict-bytes
slots = int(metadata.seq_lens.sum())
entries = sum(-(-n // 4) for n in metadata.seq_lens.tolist())
kv_bytes = slots * spec.kv_bytes_per_token
print(f"weights {spec.parameter_bytes:>13,} bytes")
print(f"K and V {kv_bytes:>13,} bytes = {slots} slots × {spec.kv_bytes_per_token:,}")
print(f"tables  {entries * 4:>13,} bytes = {entries} entries × 4, for all layers")

# %% [markdown]
# This was arithmetic. For K and V we also count. We put a counter into the online
# backend, and repeat the step:

# %% count-bytes
counted, add_block = [], online.OnlineSoftmax.add_block


def counting(self, keys, values, *rest):
    counted.append(keys.nbytes + values.nbytes)
    return add_block(self, keys, values, *rest)


watched = engine("online")
for _ in range(3):
    watched.step()
online.OnlineSoftmax.add_block = counting
watched.step()
online.OnlineSoftmax.add_block = add_block

# %% counted-bytes
assert sum(counted) == kv_bytes
print(f"{len(counted)} blocks in {spec.num_layers} layers: {sum(counted):,} bytes")

# %% [markdown]
# For K and V, prediction and count agree to the byte. (One of the six table entries of
# section 1 is padding, and is not read.) Two short requests read almost only weights.
# When does the cache take over?

# %% takeover
even = spec.parameter_bytes // spec.kv_bytes_per_token
print(f"{even:,} slots of K and V weigh as much as the weights: "
      f"16 requests of {even // 16} tokens each")

# %% [markdown]
# That is far more than A and B, and little for a server. Beyond it, most of what a step
# reads is K and V. Its speed then depends on whether each byte is read once, or is read,
# written and read again.
#
# ## What this does not show
#
# - We saw **no GPU**, if this machine has none. All ratios are those of one machine, of
#   one layer, at one shape, and on a busy machine they wander. The paper's percentages
#   are those of its own GPU.
# - We timed attention alone. What a whole step gains depends on the share that attention
#   has in it, and so on context and batch. Chapter 08 measures that.
# - The timed pools held noise, in random order, freshly made. A pool that has served for
#   hours is scattered in its own way.
# - The equalities are those of two prompts in `float32`. The tests compare every backend
#   with float64 on random batches, in `bf16` too. There answers may differ, since every
#   number is rounded to two or three digits.
#   <!-- source: bfloat16 has 8 bits of significand, 2 to 3 decimal digits -->
#
# ## What you have now
#
# - One table serves all layers. Blocks may lie anywhere, in any order. Only the table is
#   in order.
# - Gather is equal to the dense cache, and it is not free. In every layer of every step
#   it copies the tails too, and each table as if it were as long as the longest.
# - Softmax needs no whole row. It needs the largest score, the sum, the mixture, and
#   exp(old − new) when the largest changes. A softmax per block is wrong, and so is
#   adding sums that have different units.
# - Unwritten slots are cut off, or masked when they are *loaded*. A weight of 0 does not
#   stop NaN.
# - The key length is what has been written, not the length of the whole prompt.
# - A kernel in place reads each K and V once. Its blocks should not be tiny.
#
# For the exercises, run `python -m minikv start 05`. These are the modules of `minikv` so
# far. (The C++ is not counted.)

# %% lines-so-far tags=["nbval-ignore-output"]
cache = ("base", "extent_base", "extent_tree", "extents", "buddy", "contiguous", "paged")
parts = ["request", "specs", "metrics", *(f"kv_cache/{name}" for name in cache)]
parts += ["scheduler", "workloads", "core", "simulator", "model", "engine"]
print(*viz.lines_of_minikv(parts), sep="\n")
