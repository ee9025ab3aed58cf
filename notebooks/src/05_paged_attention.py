# %% [markdown]
# # 05 Paged attention
#
# Since chapter 04 a request's keys and values lie in blocks, anywhere in the pool. Attention, as
# chapter 01 wrote it, wants them side by side. There are two ways out. One is to put them side by
# side once more: copy the blocks into a row, then multiply. That is easily made right, so we do it
# first, and count what it copies. The other is to compute a softmax without ever having all scores
# at once, so that each block is read where it lies.
#
# You do both by hand, then read two kernels that do the second one fast: a C++ file for the CPU, and a
# Triton kernel for GPUs, beside the readable version of the same loop.
#
# What it adds to `minikv`:
#
# | file | what it is |
# |---|---|
# | `model/attention.py`, `model/runner.py` | the hook in transformers' models; one step on tensors |
# | `model/backends.py` | several ways to read through tables, behind one function |
# | `model/kernels/gather.py`, `online.py` | copy, then multiply; block by block |
# | `model/kernels/cpu.cpp`, `triton_paged.py` | in place, fast |
#
# **Predict, run, explain**, as before. Where this machine has a CUDA GPU, the chapter runs on it.

# %% imports
import time
from itertools import permutations
from math import exp, inf, nan

import torch
from transformers import DynamicCache

import minikv.viz as viz
from minikv import LLM, Request, SamplingParams, show
from minikv.classroom.show import beside, excerpt
from minikv.model.backends import BACKENDS, AttentionMetadata, choose_backend, why_not
from minikv.model.kernels import gather, online
from minikv.model.loader import load
from minikv.viz import gantt

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
# First what is right. Chapter 01's loop, with K and V in dense tensors that transformers keeps: its
# tokens, and the logits that decided each. Everything that follows is compared with these.

# %% dense
def dense(ids, num_new):
    ids, new, cache, rows = list(ids), list(ids), DynamicCache(config=model.config), []
    for _ in range(num_new):
        logits = model(torch.tensor([new], device=DEVICE), cache=cache).logits[0, -1]
        ids.append(int(logits.argmax()))
        rows.append(logits)
        new = ids[-1:]
    return ids, torch.stack(rows)


reference = {name: dense(ids, 6) for name, ids in prompts.items()}
for name, (ids, _) in reference.items():
    print(name, repr("".join(map(text, ids))))

# %% [markdown]
# ## 1. What attention is given
#
# Chapter 04's busy pool once more: 24 blocks of 4 slots, eight others in it, two of whom have left.
# (The model belongs to the engine from here on.)

# %% engine
def others_in(manager):
    "Other people's requests, grown in turns; two have left. They are not run here."
    others = [Request(f"other {i}", num_prompt_tokens=9, max_tokens=3) for i in range(8)]
    for num_tokens in (4, 8, 9):
        for other in others:
            manager.allocate_slots(other, num_tokens - other.num_computed_tokens)
            other.num_computed_tokens = num_tokens
    manager.free(others[1])
    manager.free(others[4])


def engine(backend):
    llm = LLM(loaded, attention_backend=backend, block_size=4, num_gpu_blocks_override=24, max_model_len=16)
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
# transformers lets a program replace the function that every attention layer calls. Ours gets the
# step's new queries, keys and values, and does two things:

# %% show-hook
excerpt("model/attention.py", "# First write", "return mixed[None], None")

# %% [markdown]
# Writing is the slot mapping of chapter 04. Reading is left to a **backend**, one of several functions
# with the same arguments. (`window` comes in section 5. `softcap` squeezes scores between two bounds, in
# models made with it; ours has neither.) We look over its shoulder for one decode step.
#
# > **Predict.** The model has 30 layers. How many block tables does the step bring along?

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


calls = capture(llm)
print(len(calls), "layers,", len({c[1].data_ptr() for c in calls}), "pools,", len({id(c[2]) for c in calls}), "set of tables")
query, pool, metadata, options, answer = calls[0]
print("query", tuple(query.shape), " pool", tuple(pool.shape))
for name in ("block_tables", "seq_lens", "query_start_loc"):
    print(f"{name:15}", getattr(metadata, name).tolist())

# %% [markdown]
# One set of tables. *A block table per layer* is a common belief: each layer has a pool of its own,
# all have the same shape, and a token lies in the same slot of each.
#
# `pool` is keys and values, blocks, kv heads, slots of a block, `head_dim`. It has one block more than
# the manager knows: number 24 pads the shorter table, since a tensor is a rectangle.
# `seq_lens` counts the slots that are *written*, this step's token included; `query_start_loc` says
# which rows of the query are whose.
#
# ## 2. Gather: side by side once more
#
# Index the pool with a table, and the blocks come out in the table's order. Flatten blocks and slots,
# cut off what is not written, and it is chapter 01 again.

# %% gather-by-hand
def gathered(pool, table, seq_len):
    "[2 (K, V), kv heads, seq_len, head_dim], side by side, in order."
    blocks = pool[:, table]  # [2, blocks, kv heads, block_size, head_dim]: a copy
    return blocks.transpose(1, 2).flatten(2, 3)[:, :, :seq_len]


def attend_dense(q, keys, values):
    "One query over n tokens. q [9, 64]; keys and values [3, n, 64]."
    scores = q.view(3, 3, 64) @ keys.mT * 64**-0.5  # [kv heads, query heads of each, n]
    return (scores.softmax(-1) @ values).reshape(9, 64)


table, seq_len = metadata.block_tables[0].tolist(), int(metadata.seq_lens[0])
copied_k, copied_v = gathered(pool, table, seq_len)
by_hand = attend_dense(query[0], copied_k, copied_v)
assert torch.allclose(by_hand, answer[0], rtol=0, atol=1e-5)
print("keys", tuple(copied_k.shape), "from blocks", table, "- equal to the engine's answer, to rounding")

# %% [markdown]
# > **Predict.** We move every block of the pool to another place, at random, and change the table to
# > match. By how much does the answer change?

# %% order
new_place = torch.randperm(pool.shape[1], generator=torch.Generator().manual_seed(5))
moved = torch.empty_like(pool)
moved[:, new_place.to(DEVICE)] = pool
moved_table = new_place[table].tolist()
assert torch.equal(attend_dense(query[0], *gathered(moved, moved_table, seq_len)), by_hand)
print("table", table, "->", moved_table, ": the same bits")

# %% [markdown]
# Not by one bit. *Blocks must be in order* is true of the table and of nothing else.
#
# Now the checkpoint. The whole engine, from the prompts to the last token, beside the dense loop. In
# every later section a faster way to read has to pass this same comparison.

# %% checkpoint
def compare(backend):
    "Runs A and B to the end: tokens equal, logits within 1e-4 of the dense ones."
    llm, rows, answers = engine(backend), {"A": [], "B": []}, {}
    forward = llm.runner.forward

    def recording(packed):
        logits = forward(packed)
        for (request, _), row in zip(packed, logits, strict=True):
            rows[request.request_id].append(row.clone())
        return logits

    llm.runner.forward = recording
    while llm.has_unfinished_requests():
        answers |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
    for name, (ids, logits) in reference.items():
        assert answers[name] == ids[len(prompts[name]) :], name
        assert torch.allclose(torch.stack(rows[name]), logits, rtol=0, atol=1e-4), name
    print(f"{backend}: the same {sum(map(len, answers.values()))} tokens, logits equal to 1e-4")


compare("gather")

# %% [markdown]
# The picture of what was copied in our step, read from the tables:

# %% gather-map
snap = viz.snapshot(llm)
card, blocks = viz.gather_map(snap, {name: viz.labels_of(llm, text)[name] for name in prompts})
assert [b.block_id for b in blocks if b.request_id == "A"] == table
assert [b.num_written for b in blocks] == [4, 4, 2, 4, 3, 0]
card

# %% [markdown]
# Chapter 02's rectangle is back. One product serves both requests, so their copies have one length,
# that of the longer table, and the rest is padding. The tails of the last blocks are copied too.
#
# > **Predict.** How many slots hold K and V here, and how many does gather copy? In all layers, how
# > many bytes?

# %% bytes-gather
bytes_per_slot = 2 * spec.num_kv_heads * spec.head_dim * 4  # K and V of one layer, float32
predicted = spec.num_layers * len(blocks) * 4 * bytes_per_slot
[group] = gather.query_groups(metadata, pool)  # the backend's own list of rows to copy
copied = spec.num_layers * group.gather_rows.numel() * 4 * spec.head_dim * 4
assert copied == predicted
print("written:", int(metadata.seq_lens.sum()), "slots; copied:", len(blocks) * 4)
print(f"predicted {predicted:,} bytes, copied {copied:,}, in every step")

# %% [markdown]
# Small numbers, but the rule scales. Sixteen decoding requests, first of equal length, then one long
# conversation among short ones:

# %% ragged
for contexts in ([1024] * 16, [4096] + [128] * 15):
    written = sum(contexts) * bytes_per_slot * spec.num_layers
    copied = len(contexts) * max(contexts) * bytes_per_slot * spec.num_layers
    print(f"contexts {contexts[0]} and 15 × {contexts[1]}: written {written / 1e9:.2f} GB, copied {copied / 1e9:.2f} GB, "
          f"{copied / written:.1f} times")

# %% [markdown]
# One long request makes everybody's copy long. (An engine could make groups of like lengths; it would
# have more and smaller products.) And a copied byte costs more than one read: it is read, written, and
# read again by the product.
#
# What is that in time? One layer's decode attention, sixteen requests of equal length, blocks in random
# order. The parts run in turns, so that a slow moment of the machine hits all alike, and only
# ratios are printed.

# %% a-step
def a_step(contexts, block_size=16, scattered=True):
    "One layer's pool with noise in it, and a decode step over its blocks."
    dice = torch.Generator().manual_seed(0)
    counts = [-(-n // block_size) for n in contexts]
    order = torch.randperm(sum(counts), generator=dice)
    ids = (order if scattered else order.sort().values).int().split(counts)
    tables = torch.full((len(contexts), max(counts)), sum(counts), dtype=torch.int32)
    for row, table in zip(tables, ids, strict=True):
        row[: len(table)] = table
    pool = torch.randn(2, sum(counts) + 1, 3, block_size, 64, generator=dice)
    query = torch.randn(len(contexts), 9, 64, generator=dice)
    step = AttentionMetadata(
        tables.to(DEVICE), torch.arange(len(contexts) + 1, dtype=torch.int32, device=DEVICE),
        torch.tensor(contexts, dtype=torch.int32, device=DEVICE), first_visible=None,  # no padding slots
        max_query_len=1, max_seq_len=max(contexts))  # fmt: skip
    return query.to(DEVICE), pool.to(DEVICE), step


# %% in-turns
def in_turns(parts, rounds=15):
    "The best time of each, in seconds; they take turns."
    best = dict.fromkeys(parts, inf)
    for turn in range(rounds + 1):
        for name, run in parts.items():
            start = time.perf_counter()
            run()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            if turn > 0:  # the first only warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


# %% time-gather tags=["nbval-ignore-output"]
q, kv, step = a_step([1024] * 16)
scaling = 64**-0.5
[rows] = [g.gather_rows for g in gather.query_groups(step, kv)]
copy = kv.view(-1, 16 * 64)[rows].view(2, 48, 1024, 64)


def products():
    scores = q.view(48, 3, 64) @ copy[0].mT * scaling
    return scores.softmax(-1) @ copy[1]


times = in_turns({
    "gather attention": lambda: gather.attend(q, kv, step, scaling=scaling),
    "its products alone, on a copy made before": products,
    "its copy alone": lambda: torch.index_select(kv.view(-1, 16 * 64), 0, rows, out=copy.view(-1, 16 * 64)),
})  # fmt: skip
for name, t in times.items():
    print(f"{t / times['gather attention']:4.0%}  {name}")

# %% [markdown]
# The copy is a good part of the work on the machine that built this page, and it is made anew in every
# layer of every step. So gather has its place: it is plain torch, runs everywhere, and says what is right.
# *Equal* it is; *free* it is not.
#
# ## 3. Softmax in pieces
#
# Why copy at all? Because softmax divides by the sum over **all** scores, and, so as not to overflow,
# subtracts the largest of all first. It seems to need the whole row. A tiny example will go with us: one
# query, seven keys in two blocks of four, the last slot unwritten. Values are plain numbers.

# %% tiny
scores = [[2.0, 0.0, 1.0, 1.0], [4.0, 1.0, 3.0]]
values = [[10.0, 20.0, 30.0, 40.0], [50.0, 60.0, 70.0]]
flat, worth = (torch.tensor(x[0] + x[1], dtype=torch.float64) for x in (scores, values))
whole = float(flat.softmax(0) @ worth)
print(f"all seven at once: {whole:.4f}")
big = flat.float() * 1000
print("exp of scores × 1000:", big.exp().tolist()[:5], "-> their softmax would be inf / inf =", inf / inf)
print("minus the largest first:", (big - big.max()).exp().tolist()[:5])

# %% [markdown]
# That is why the largest is subtracted: it changes nothing in the quotient, and no exponential is
# above 1. Now one block alone. Three numbers sum it up: its largest score, the sum of the exponentials
# relative to that, and the values weighted with the same.

# %% one-block
def one_block(scores, values):
    largest = max(scores)
    weights = [exp(score - largest) for score in scores]
    mixed = sum(w * v for w, v in zip(weights, values, strict=True))
    return largest, sum(weights), mixed


first, second = map(one_block, scores, values)
for name, (largest, total, mixed) in (("block 0", first), ("block 1", second)):
    print(f"{name}: largest {largest:.0f}, sum {total:.3f}, mixed {mixed:.2f}; alone it would answer {mixed / total:.2f}")

# %% [markdown]
# > **Predict.** How do two such triples make one? Two attempts that one sees in practice: average the
# > two answers; or add sums and mixtures. Which is right?

# %% two-wrong
print(f"softmax per block, then the mean: {(first[2] / first[1] + second[2] / second[1]) / 2:.4f}")
print(f"sums and mixtures added:          {(first[2] + second[2]) / (first[1] + second[1]):.4f}")
print(f"all at once:                      {whole:.4f}")

# %% [markdown]
# Neither. The first gives both blocks the same say, though nearly all the weight is in block 1. The
# second adds numbers in different units: block 0 measured by its largest score, 2, block 1 by its own, 4.
# Both give a plausible mixture, and no error.
#
# The repair is to bring both to one measure: whatever was relative to `old` becomes relative to `new`
# when it is multiplied by exp(old − new).

# %% merge
def merge(a, b):
    largest = max(a[0], b[0])
    shrink_a, shrink_b = exp(a[0] - largest), exp(b[0] - largest)
    return largest, a[1] * shrink_a + b[1] * shrink_b, a[2] * shrink_a + b[2] * shrink_b


largest, total, mixed = merge(first, second)
assert abs(mixed / total - whole) < 1e-12
print(f"largest {largest:.0f}, sum {total:.3f}, mixed {mixed:.2f}: {mixed / total:.4f}")

# %% [markdown]
# The same, and no score of block 0 had to be kept. This is **online softmax** (Milakov and Gimelshein
# 2018), the idea inside FlashAttention (Dao et al. 2022). Divide once, at the end.

# %% online-figure
card, states = viz.online_softmax(
    scores, values=values, title="Block 1 brings a larger score: what block 0 summed up shrinks")  # fmt: skip
for state, triple in zip(states, (first, (largest, total, mixed)), strict=True):
    assert max(abs(x - y) for x, y in zip((state.largest, state.total, state.mixed), triple, strict=True)) < 1e-12
card

# %% [markdown]
# In the lower row the bars of block 0 keep their proportions and lose their height.
#
# > **Predict.** With many blocks: does the order matter in which they are merged?

# %% many-blocks
pieces = [one_block([s], [v]) for s, v in zip(flat.tolist(), worth.tolist(), strict=True)]
answers = []
for order in permutations(pieces):
    so_far = order[0]
    for piece in order[1:]:
        so_far = merge(so_far, piece)
    answers.append(so_far[2] / so_far[1])
assert max(abs(x - whole) for x in answers) < 1e-12
print(f"{len(answers):,} orders of seven blocks of one slot: all {whole:.4f}")

# %% [markdown]
# To rounding, it does not. So different programs may each take a part of a long table, and merge at the
# end; we come back to that.
#
# Two traps are left. A mask may hide a **whole block**: its largest score is then minus infinity. And a
# slot that was never written may hold anything, **NaN** too.

# %% traps
print("all hidden: exp(-inf - (-inf)) =", exp(-inf - (-inf)), "- and a NaN in a sum stays")
print("all hidden, measured by 0: exp(-inf - 0) =", exp(-inf - 0))
print("an unwritten slot, weight 0: 0 × NaN =", 0.0 * nan)

# %% [markdown]
# So a block in which nothing is visible is measured by 0 instead; all its weights are 0 then, and it
# adds nothing. And a slot must be left *out*: a weight of 0 does not protect from what is in it. The
# package's version has both, and works on tensors; rows are queries.

# %% show-online
show(online.OnlineSoftmax.add_block)

# %% hidden-block
softmax = online.OnlineSoftmax(torch.ones(1, 1, dtype=torch.float64))  # a query of 1: scores are keys
for s, v, seen in (([9.0] * 4, [1.0] * 4, False), (scores[0], values[0], True), (scores[1], values[1], True)):
    s, v = (torch.tensor(x, dtype=torch.float64)[:, None] for x in (s, v))
    softmax.add_block(s, v, torch.full((1, len(s)), seen))
    print(f"{'seen' if seen else 'hidden':6}  largest {softmax.largest.item():4}, sum {softmax.total.item():.3f}")
assert abs(softmax.result().item() - whole) < 1e-12
print(f"answer {softmax.result().item():.4f}")

# %% [markdown]
# ## 4. The table, walked in place
#
# Now with real keys. Nothing is copied: `pool[:, block_id, :, :n]` is a view of one block's written
# slots.

# %% walk
q_heads = query[0].view(3, 3, 64) * options["scaling"]  # kv head, its query heads, head_dim
softmax = online.OnlineSoftmax(q_heads)
for index, block_id in enumerate(table):
    n = min(4, seq_len - 4 * index)  # the tail is cut off
    k, v = pool[:, block_id, :, :n]
    softmax.add_block(k, v, torch.ones(3, n, dtype=torch.bool, device=DEVICE))
walked = softmax.result().reshape(9, 64)

exact = attend_dense(*(x.double() for x in (query[0], copied_k, copied_v)))
for name, got in (("gather", by_hand), ("online", walked)):
    assert (got - exact).norm() < 1e-5 * exact.norm()
    print(f"{name}: equal to float64, to 1e-5 of its norm")

# %% [markdown]
# `kernels/online.py` is this loop for all requests of a step, and for chunks of prompts. The checkpoint:

# %% checkpoint-online
compare("online")

# %% [markdown]
# By hand, section 2 cut off the tail. The package's gather cannot: it multiplies the whole rectangle, and
# gives unwritten slots the weight 0.
#
# > **Predict.** We fill every slot that no token has written with NaN, as a recycled block might hold.
# > What do the two backends answer? And with 10,000 instead of NaN?

# %% poison
written = torch.zeros(pool.shape[1], 4, dtype=torch.bool)
for row, n in zip(metadata.block_tables.tolist(), metadata.seq_lens.tolist(), strict=True):
    for position in range(n):
        written[row[position // 4], position % 4] = True
unwritten = ~written.to(DEVICE)[None, :, None, :, None]
for poison, backend in ((nan, gather), (nan, online), (1e4, gather), (1e4, online)):
    with torch.inference_mode():  # the engine made gather's buffers in this mode; only in it are they writable
        got = backend.attend(query, pool.masked_fill(unwritten, poison), metadata, **options)
    verdict = "the same" if torch.allclose(got, answer, rtol=0, atol=1e-5) else "NaN" if got.isnan().any() else "wrong"
    print(f"{poison:7} in unwritten slots, {backend.__name__.split('.')[-1]}: {verdict}")

# %% [markdown]
# With weight 0 any number is harmless, and NaN is not; so the engine zeroes its pool at the start, and
# cleans the blocks of a request whose values overflowed.
# Whoever cuts off the tail need not care.
#
# ## 5. Who may look where
#
# A decode step is one row, and sees all that is written. A chunk of a prompt is several rows, on top of
# what earlier chunks wrote. A's seven tokens, at most four in a step:
#
# The package's gather puts requests that one product can serve in a group; the group's `bias` is added to
# the scores: 0 where a query may look (`#`), minus infinity elsewhere.
#
# > **Predict.** How long is the key sequence in the first of these steps: 4, or 7?

# %% chunks
chunked = LLM(loaded, attention_backend="gather", block_size=4, num_gpu_blocks_override=6, max_model_len=16,
              max_num_seqs=1, max_num_batched_tokens=4)  # fmt: skip
chunked.add_request(A, SamplingParams(max_tokens=2, ignore_eos=True), "A")
chunk_calls = [capture(chunked)[0] for _ in range(2)]
for _, kv_pool, step_of, _, _ in chunk_calls:
    [group] = gather.query_groups(step_of, kv_pool)
    print("queries", group.positions[0].tolist(), "key length", int(step_of.seq_lens[0]), "of", group.num_blocks * 4, "slots")
    for row in group.bias(group.num_blocks * 4, None, torch.float32)[0, 0, 0].tolist():
        print("   ", *("#" if x == 0 else "." for x in row))

# %% [markdown]
# Four, then seven: the key length is **what has been written**, this chunk included. The mask is a
# triangle whose corner hangs at the context: row *i* of a chunk that starts at position *s* sees
# positions 0 to *s* + *i*.
#
# A common slip takes the length of the whole prompt in the first step already. The triangle then hangs
# in the wrong place. What happens?

# %% wrong-length
q_chunk, kv_pool, step_of, options_of, right = chunk_calls[0]
slip = AttentionMetadata(step_of.block_tables.new_tensor([[*step_of.block_tables[0].tolist(), 5]]),
                         step_of.query_start_loc, step_of.seq_lens.new_tensor([7]), first_visible=None,
                         max_query_len=4, max_seq_len=7)  # fmt: skip
fresh = kv_pool.clone()
fresh[:, 5] = 0  # the next block, as it is before anyone writes to it
got = gather.attend(q_chunk, fresh, slip, **options_of)
[group] = gather.query_groups(slip, fresh)
for row, bias in enumerate(group.bias(8, None, torch.float32)[0, 0, 0].tolist()):
    same = torch.allclose(got[row], right[row], atol=1e-5)
    print(f"token {row}: {'the same' if same else 'another answer'}, sees positions 0 to {bias.count(0) - 1}, not 0 to {row}")

# %% [markdown]
# Every row looks too far: at tokens that come after it, and at slots that hold nothing yet. A zero key
# has score 0, which is not "no score". Again there is no error, only another answer.
#
# Some models look back only so far: a **sliding window** of `w` positions. It is one more condition,
# and for a kernel that reads in place also a saving: blocks that no row sees are not read at all.

# %% window
_, kv_pool, step_of, _, _ = chunk_calls[1]
[group] = gather.query_groups(step_of, kv_pool)
print("the second chunk, window 3:")
for row in group.bias(8, 3, torch.float32)[0, 0, 0].tolist():
    print("   ", *("#" if x == 0 else "." for x in row))
position, w, size = 4095, 128, 16
print("a decode at position", position, "with window", w, "needs", position // size - (position - w + 1) // size + 1,
      "of", position // size + 1, "blocks")  # fmt: skip

# %% [markdown]
# The blocks before the window are still held, though: our manager gives none back while the request
# runs. (Engines for such models free them.)
#
# ## 6. A kernel that reads in place
#
# The online backend is right, and far too slow for work: a Python loop over every block of every
# request. `kernels/cpu.cpp` is the same loop in C++. Its unit of work is one request and one kv head.
# Here is the heart: the walk through the table.

# %% show-walk
excerpt("model/kernels/cpu.cpp", "const int run_end", "use(t, row);")

# %% [markdown]
# `base + table[index] * block_stride` is the lookup: once per block, not once per token. Up to `run_end`,
# where the block or the tile ends, slots lie side by side. `ahead` points into the *next* block: a
# processor guesses by itself that memory will be read on in order, and at a block's end that guess is
# wrong. So the kernel, which knows the table, asks early. `use` is the arithmetic on one row: a score
# from a key, or a value times its weight.
#
# It goes by tiles of up to 64 slots, and between tiles it is section 3: what was summed up so far shrinks
# only if the tile brought a larger score.
# <!-- source: TILE in cpu.cpp -->

# %% show-shrink
excerpt("model/kernels/cpu.cpp", "if (largest > s.largest[r]) {", "s.total[r] += fold<SUM>(sum);")

# %% [markdown]
# The file is compiled once, by whatever C++ compiler this machine has. Where there is none, or on a
# GPU, the engine takes another backend and says why.

# %% backends tags=["nbval-ignore-output"]
for name in BACKENDS:
    print(f"{name:7}", why_not(name, DEVICE, torch.float32) or "can run here")
fast, attend_fast = choose_backend(DEVICE, torch.float32)
print("the engine's choice:", fast)
compare(fast)

# %% [markdown]
# > **Predict.** The same sixteen requests as in section 2. How does reading in place compare with
# > gather? And what does the *table* cost? The same kernel, over scattered blocks; over consecutive ones,
# > as in a slab of chapter 02; and with each request in one block, so that there is nothing to look up.

# %% time-in-place tags=["nbval-ignore-output"]
steps = {
    "scattered blocks of 16": a_step([1024] * 16),
    "consecutive blocks of 16": a_step([1024] * 16, scattered=False),
    "one block per request": a_step([1024] * 16, block_size=1024),
}
parts = {f"{fast}, {name}": lambda s=s: attend_fast(*s, scaling=scaling) for name, s in steps.items()}
side_by_side, sdpa = copy.view(2, 16, 3, 1024, 64), torch.nn.functional.scaled_dot_product_attention
parts["torch's own, K and V side by side"] = lambda: sdpa(q[:, :, None], *side_by_side, enable_gqa=True)
times = in_turns({"gather, scattered blocks": lambda: gather.attend(q, kv, step, scaling=scaling), **parts})
base, paged, *others = times.values()
for name, t in times.items():
    print(f"{t / base:5.2f} of gather's time: {name}")
print(f"on this machine scattered blocks cost {fast}: {paged / others[0] - 1:+.0%} over consecutive ones, "
      f"{paged / others[1] - 1:+.0%} over a single one")

# %% [markdown]
# Two different questions; keep them apart. The second line over the first is what *not copying* saves.
# (Where the engine's choice is gather itself, it says nothing.) The second over the third and fourth is
# what *indirection* costs this kernel. On the CPU that built this page consecutive blocks are read
# faster, but one large block, with nothing to look up, is not, and often even *slower*: inside of it the
# kernel gives no useful hints, since `ahead` looks into the next block only. It is the hints that make the
# table cheap. Compiled without that one line, the kernel took 0.74 to 0.82 ms for eight such requests in
# scattered blocks, instead of 0.39 to 0.43 ms.
# <!-- source: cpu.cpp with and without its __builtin_prefetch, 3 runs in turns, best of 60 each, an AMD EPYC with two cores -->
#
# The line of torch's own attention belongs to a question of chapter 01, why attention on a cache side by
# side took longer than its bytes explain: for a single query the kernel matters as much as the layout.
#
# On its GPU the paper measured a real cost: its kernel's attention took 20 to 26% longer than
# FasterTransformer's, which reads K and V side by side. It names the causes: looking up the table,
# extra branches, lengths that vary. And it won end to end nevertheless: only attention is affected, and
# far more requests fit. These percentages and ours do not compare: another machine, another kernel,
# another rival.
# <!-- source: Kwon et al. 2023, section 7.1 and Fig. 18a -->
#
# ## 7. The Triton kernel, line by line
#
# On a GPU the backend is `kernels/triton_paged.py`. Triton is Python that is compiled for GPUs: many
# *programs* run at once, numbered by `tl.program_id`, and each works on whole tiles. Below it stands
# beside `online.py`, which you know. (Read as text: the chapter does not need Triton.) Where they differ,
# the GPU is the reason:
#
# - `online.py` walks block by block. The kernel walks in **tiles** of its own size, and every slot looks
#   up its block: a tile may span several blocks, or be a part of one. Neighbours ask for the same entry,
#   which is one access to memory.
# - It cannot cut off a tail, since shapes are fixed when it is compiled. It loads with a **mask**, and
#   what is masked comes as 0, not as what lies there.
# - `exp2` instead of `exp`: the hardware has powers of two. As e^x = 2^(x · log2 e), the factor log2 e is
#   put into the scale of the scores, `score_scale`, once.

# %% beside
beside("model/kernels/online.py", "model/kernels/triton_paged.py", [
    ("whose work: one request and kv head", "for i, seq_len in enumerate(seq_lens):", "kv_head, num_kv_heads = tl.program_id(1)"),
    ("rows: query heads that share a kv head", "grouped = query.reshape(num_tokens", ("row = tl.arange(0, ROWS)", "row % PER_KV")),
    ("each query's own position", "last = torch.arange(seq_len", "position = context_len + nth_query"),
    ("a window's first slot", "first = first.maximum(last", "visible_from = tl.maximum(position - (WINDOW"),
    ("nothing seen yet", ("self.largest = query.new_full", "self.mixed ="), ("row_max = tl.full", "mixed = tl.zeros")),
    ("the loop", "for index, block_id in enumerate(table):", ("for tile_start in range", "slot = tile_start")),
    ("written slots only", "start, end = index * block_size", "in_reach = slot < end"),
    ("the table", "table = metadata.block_tables[i", ("block_id = tl.load(", ")")),
    ("read K and V", "keys, values = pool[:, block_id", ("kv_at = block_id.to(tl.int64)", "v = tl.load(values")),
    ("scores", "scores = self.query @ keys.mT", "scores = tl.dot(q"),
    ("the mask", "scores = scores.masked_fill(~visible", ("visible = (slot[None", "scores = tl.where(visible")),
    ("the largest so far", ("largest = self.largest.maximum", "reference = "), ("new_max = tl.maximum", "shift = tl.where")),
    ("to the new measure", "shrink = torch.exp(", "rescale = tl.exp2(row_max"),
    ("weights", "weights = torch.exp(", "weights = tl.exp2(scores"),
    ("sums", ("self.total = self.total * shrink", "self.mixed = self.mixed * shrink"), ("row_sum = row_sum * rescale", "mixed += tl.dot")),
    ("divide once", "return self.mixed / self.total", "mixed = mixed / row_sum"),
])  # fmt: skip

# %% [markdown]
# One more difference is not in the rows. A program per request and kv head keeps a GPU busy only if there
# are many. With few and long requests a table is **split** among programs, and their results are merged.
#
# That is section 3's merge: two parts of A's table, each on its own.

# %% split
def half(block_ids, first_index):
    softmax = online.OnlineSoftmax(q_heads)
    for index, block_id in enumerate(block_ids, first_index):
        n = min(4, seq_len - 4 * index)
        softmax.add_block(*pool[:, block_id, :, :n], torch.ones(3, n, dtype=torch.bool, device=DEVICE))
    return softmax


halves = half(table[:1], 0), half(table[1:], 1)
largest = halves[0].largest.maximum(halves[1].largest)
shares = [(h.largest - largest).exp() for h in halves]
total = sum(h.total * share for h, share in zip(halves, shares, strict=True))
mixed = sum(h.mixed * share[..., None] for h, share in zip(halves, shares, strict=True))
assert torch.allclose((mixed / total[..., None]).reshape(9, 64), walked, atol=1e-6)
print("two programs, one answer: equal to rounding")

# %% [markdown]
# Is it fast? `python -m minikv bench kernel` measures it on a GPU against the bandwidth of a plain copy,
# and `make test-gpu` proves it equal there. On a machine without one both say `not run`.
#
# ## 8. Why the block size matters to a kernel
#
# Chapter 04 chose a block size by the tail. A kernel sees three other things: how many bytes lie side by
# side, how often it must look up, and what it loads for nothing.
#
# > **Predict.** For 1,024 tokens, blocks of 1 to 256: which of the columns would worry you?

# %% block-size-table
print("block size   bytes in a run   lookups   mean tail")
for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
    print(f"{size:10}{size * spec.head_dim * 4:17,}{1024 // size:10}{(size - 1) / 2:12}")

# %% [markdown]
# A run is one head's slots of one block: the pool keeps a head's rows together. But a processor
# that reads ahead has hardly begun when a short run ends and the next lookup is due, and our kernel's hints
# reach no further than the next block. In the figure each line has its own unit, the time at its best block
# size: the lines do not say who is faster (section 6 did).

# %% sweep tags=["nbval-ignore-output"]
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
steps = {size: a_step([1024] * 8, size) for size in SIZES}
sweep = {}
for name, attend in {fast: attend_fast, "gather": gather.attend}.items():
    runs = {size: lambda s=s, attend=attend: attend(*s, scaling=scaling) for size, s in steps.items()}
    best = in_turns(runs, rounds=10)
    sweep[name] = [(i, best[size] / min(best.values())) for i, size in enumerate(SIZES)]
    print(f"{name:7}", "  ".join(f"{size}: {best[size] / min(best.values()):.2f}" for size in SIZES))
card, drawn = gantt.curves(
    sweep, title="One decode step's attention, each line relative to its own best", xlabel="block size",
    ylabel="time / the line's shortest")  # fmt: skip
card.axes[0].set_xticks(range(len(SIZES)), map(str, SIZES))
card.axes[0].get_legend().set_loc("upper right")
assert all(len(points) == len(SIZES) for points in drawn.values())
card

# %% [markdown]
# By columns, on the machine that built this page: short runs and many lookups worry the kernel, most at
# one or two slots. At 128 and 256 it slows down again, though much less: inside a large block it gives no
# useful hints (compiled without any, it does not slow down there). The tail cost nothing here, as 1,024
# tokens fill every block; a kernel in place skips it. Gather copies it, and likes longer blocks.
# <!-- source: cpu.cpp without its __builtin_prefetch, as in section 6: 0.74, 0.56 and 0.48 ms at 64, 128 and 256; with it 0.34, 0.43 and 0.43 -->
#
# So a kernel in place wants blocks that are not tiny, and asks for little above that. What speaks against
# large ones is memory: the tail, and sharing. The paper comes to the same on its GPU: 16 is large enough
# to read well and small enough to waste little.
# <!-- source: Kwon et al. 2023, section 7.2 and Fig. 18b -->
#
# ## 9. The bytes of a decode step
#
# Now you can say beforehand what a decode step reads: every weight once; in each layer the K and V of all
# written slots, the new token's included; and the tables.
#
# > **Predict.** A and B in their step of section 1, in bytes: weights, K and V in place, table entries.
# > Then we count the K and V; the other two stay arithmetic.

# %% predict-bytes
slots = int(metadata.seq_lens.sum())
entries = sum(-(-n // 4) for n in metadata.seq_lens.tolist())
print(f"weights {spec.parameter_bytes:>13,}")
print(f"K and V {slots * spec.kv_bytes_per_token:>13,} = {slots} slots × {spec.kv_bytes_per_token:,}")
print(f"tables  {entries * 4:>13,} = {entries} entries × 4, however many layers there are")

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
assert sum(counted) == slots * spec.kv_bytes_per_token
print(f"counted in {len(counted)} blocks of {spec.num_layers} layers: {sum(counted):,} bytes")

# %% [markdown]
# For K and V, predicted and counted agree to the byte. (Of section 1's six table entries one pads, and is
# not read.) Two short requests read almost only weights. When does the cache take over?

# %% takeover
even = spec.parameter_bytes // spec.kv_bytes_per_token
print(f"{even:,} slots of K and V weigh as much as the weights: 16 requests of {even // 16} tokens each")

# %% [markdown]
# Far more than A and B, and little for a server. Beyond that, most of what a step reads is K and V, and
# whether each byte is read once, or read, written and read again, decides its speed.
#
# ## What this does not show
#
# - **No GPU**, if this machine has none. All ratios are one machine's, of one layer at one shape, and on a
#   busy machine they wander. The paper's percentages are its own GPU's.
# - Attention alone was timed. What a whole step gains depends on the share that attention has in it, and
#   so on context and batch: chapter 08.
# - The timed pools held noise, in random order, freshly made. A pool that served for hours is scattered in
#   its own way.
# - The equalities are those of two prompts in `float32`. The tests compare every backend with float64 on
#   random batches, in `bf16` too, where answers may differ: sums are then rounded to three digits.
#   <!-- source: bfloat16 has 8 bits of significand, 2 to 3 decimal digits -->
#
# ## What you have now
#
# - One table serves all layers. Blocks may lie anywhere, in any order; the table is what is in order.
# - Gather is equal to the dense cache and not free: it copies tails, and each table as long as the
#   longest, in every layer of every step.
# - Softmax needs no whole row: largest, sum, mixture, and exp(old − new) when the largest changes.
#   Never a softmax per block; never sums added in two measures.
# - Unwritten slots are cut off or masked at the *load*. A weight of 0 does not stop NaN.
# - The key length is what has been written, not the whole prompt.
# - A kernel in place reads each K and V once. Its blocks should not be tiny.
#
# The exercises: `python -m minikv start 05`. The modules of `minikv` so far (and, not counted, the C++):

# %% lines-so-far tags=["nbval-ignore-output"]
parts = ("request", "specs", "metrics", "kv_cache/base", "kv_cache/extent_base", "kv_cache/extent_tree", "kv_cache/extents", "kv_cache/buddy",
         "kv_cache/contiguous", "kv_cache/paged", "scheduler", "workloads", "core", "simulator", "model", "engine")  # fmt: skip
for part in viz.lines_of_minikv(parts):
    print(f"{part.name:23} {part.num_lines:4} lines  {part.about}")
