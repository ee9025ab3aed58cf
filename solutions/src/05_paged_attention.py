# %% [markdown]
# # Exercises of chapter 05: paged attention
#
# Six exercises, about 80 minutes. They can be done in any order, but 5.3 is easier after 5.2; keep
# time for these two.
#
# **How it goes.** Each exercise has a cell to fill in and, below it, a check. Replace the `raise`
# line by your code, then run your cell and all cells down to the check's end. (The folded ones
# between them, shown as dots, are the check's own; read them only if you are curious.) A check that
# passes prints numbers. One that fails shows the smallest case it found, and names the mistake if
# it knows one that fits. The numbers that stand below a check already are what a right answer
# prints; yours appear when you run it. Much of what is asked stands in the chapter in the package's
# words: write it without looking, compare after. `python -m minikv check 05` in a terminal checks the
# whole notebook.
#
# Click on the heading of exercise 5.1 and choose *Run > Run All Above Selected Cell*. From then on
# each exercise stands by itself, except that 5.3 and 5.6 also use the folded cells of 5.1, solved or
# not.
#
# **Hints** come in three steps, each folded: a nudge, the rule that decides the matter, an
# outline of the code. Open as few as you need.
#
# **Words.** Each layer has a *pool*, one tensor for the keys and values of all requests, cut into
# *blocks* of `block_size` *slots*. A slot holds one token's key and value, for each kv head:
#
# ```text
# pool: [2, num_blocks + 1, num_kv_heads, block_size, head_dim]
#        |        |
#        |        the last block is padding: no request owns it
#        0: keys, 1: values
# ```
#
# The *block table* of a request lists its blocks in the order of its tokens, and may end with the
# padding block. `seq_len` counts the slots that hold the request's tokens. What lies in any other slot is
# left over from somebody else, or was never a number.
#
# **Attention of one query** over keys $k_0, k_1, \dots$ and values $v_0, v_1, \dots$: the scores are
# $s_j = \text{scaling} \cdot q \cdot k_j$, the weights are $e^{s_j}$ divided by the sum of all of them, and the
# output is the sum of the values with these weights. Query heads come in groups that share a kv head: with
# 4 query heads and 2 kv heads, heads 0 and 1 read kv head 0, heads 2 and 3 read kv head 1.

# %% setup
import math
import random
import sys
import weakref

import torch
from torch.overrides import TorchFunctionMode

from minikv import LLM, SamplingParams
from minikv.classroom.harness import ask, begin, check, examine, lent, ours
from minikv.classroom.harness.bounds import name_of
from minikv.classroom.harness.values import numbers, plain, same, text
from minikv.kv_cache.base import cdiv
from minikv.model.loader import load
from minikv.specs import ModelSpec, find_model

# a random model: instant, its text is noise
tiny = load("tiny", dtype="float32", device="cpu")
OWN = "the package's own attention"
begin(globals(), forbidden={"minikv.model.": OWN, "minikv.bench": OWN})

# %% shared jupyter={"source_hidden": true}
@ours
def tensor(value, shape, said):
    """`value`, a tensor or nested lists of this shape, as float32; else raises `said`."""
    try:
        found = torch.as_tensor(value).detach().float()
    except (TypeError, ValueError, RuntimeError):
        raise AssertionError(f"{said}, not {value!r:.80}") from None
    have, both = list(found.shape), ""
    if isinstance(value, tuple) and have == [2, *shape]:
        both = ": torch's max along an axis gives two, values and places; take its .values"
    assert have == list(shape), f"{said}, of shape {list(shape)}, not {have}{both}"
    return found

# %% [markdown]
# ## Exercise 5.1: attention through a block table
#
# *12 minutes, medium.*
#
# **Collect one request's keys and values through its block table, then compute attention for one query.**
#
# A request with 3 tokens, in blocks of 2; its table is [2, 0]. There is one head, and of each value two
# numbers:

# %% example-5-1
# K and V, 3 blocks and the padding block, 1 kv head, 2 slots, head_dim 2
example_pool = torch.full((2, 4, 1, 2, 2), 1e4, dtype=torch.float32)
# token 0: its key, its value; then tokens 1 and 2
example_pool[:, 2, 0, 0] = torch.tensor([[0.5, 1.0], [1.0, 2.0]])
example_pool[:, 2, 0, 1] = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
example_pool[:, 0, 0, 0] = torch.tensor([[0.0, 0.0], [5.0, 9.0]])
for block in range(3):
    print(f"values of block {block}:", example_pool[1, block, 0].tolist())

# %% [markdown]
# ```text
# block            0          1          2          3 (padding)
# slot          0     1    0     1    0     1    0     1
#              A2     .    .     .   A0    A1    .     .
#
# table [2, 0], seq_len 3:      A0 A1 | A2 .
# ```
#
# With a query of zeros every score is 0, so each of the 3 values has the same weight, and the output is their
# mean, [3, 5]. Had the slot behind A2 been read as well, it would be [2502.25, 2503.75].
# <!-- source: the cell above, by hand -->
#
# Unwritten slots hold 10,000 in this exercise; blocks of others hold ordinary numbers. A table may hold
# blocks ahead: more than the tokens fill, for tokens still to come. Torch's own attention may do the
# multiplying, if you like; collecting is yours.
#
# <details><summary>Hint 1: a nudge</summary>
# Index the pool's second axis with the whole table at once. Which axes do the slots of one head lie along now?
# </details>
# <details><summary>Hint 2: the rule</summary>
# After <code>pool[:, block_table]</code> the axes are K or V, block, kv head, slot, head_dim. Bring the kv
# head before the block; then block and slot become one axis in the order of the tokens, and the first
# seq_len of it are the request's.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# kv      <- pool[:, block_table], axes 1 and 2 swapped, axes 2 and 3 made one, cut at seq_len
# grouped <- query as [kv heads, query heads that share one, head_dim]
# weights <- softmax over the slots of (grouped @ keys, its last two axes swapped) * scaling
# output  <- weights @ values, as [query heads, head_dim]
# ```
# </details>

# %% ex-5-1
def gather_attention(query, pool, block_table, seq_len, scaling):
    """Attention of one query over the first seq_len slots of its table.

    query: [num_query_heads, head_dim], which is also the output's shape.
    pool: [2, num_blocks + 1, num_kv_heads, block_size, head_dim].
    block_table: a list of block ids.
    """
    ### BEGIN SOLUTION
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (grouped @ keys.mT * scaling).softmax(-1)
    return (weights @ values).reshape(query.shape)
    ### END SOLUTION

# %% pools-5-1 jupyter={"source_hidden": true}
@lent
def paged_input(seed, table, seq_len, block_size, num_kv_heads=1, per_kv=1, head_dim=2, num_padding=0, *, poison=1e4, offset=0.0, apart=False, spread=False):
    """(query, pool, block_table, seq_len, scaling). poison: what unwritten slots hold. offset: what every score is near,
    or those of each block. apart, spread: half of the query heads, of the slots have it with the other sign."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):  # eighths: sums of their products are exact in float32, in whatever order
        return (torch.randn(shape, generator=generator) * 8).round() / 8

    num_blocks = max(table) + 3
    pool = draw(2, num_blocks + 1, num_kv_heads, block_size, head_dim)  # blocks of others hold numbers
    query, scaling = draw(num_kv_heads * per_kv, head_dim), 0.5
    if offset:
        query[:, 0] = 64.0
        for block, near in zip(table, offset, strict=True) if isinstance(offset, tuple) else [(slice(None), offset)]:
            pool[0, block, ..., 0] = near / 32
    if apart:
        query[1::2, 0] *= -1
        pool[0, :, 1::2, :, 0] *= -1
    if spread:
        pool[0, :, :, 1::2, 0] *= -1
    pool[:, num_blocks] = poison
    for j in range(len(table) * block_size):
        if j >= seq_len:
            pool[:, table[j // block_size], :, j % block_size] = poison
    return query, pool, list(table) + [num_blocks] * num_padding, seq_len, scaling

# %% pools-5-1-b jupyter={"source_hidden": true}
@ours
def slots_of(pool, blocks):
    """K and V of these blocks, one after another: [2, num_kv_heads, slots, head_dim]."""
    return pool[:, blocks].transpose(1, 2).flatten(2, 3)


@ours
def attend(query, kv, scaling, weigh=lambda scores: scores.softmax(-1)):
    """query: [heads, head_dim]. kv: [2, kv_heads, slots, head_dim]. All scores at once."""
    keys, values = kv
    scores = query.view(len(keys), -1, query.shape[-1]) @ keys.mT * scaling
    return (weigh(scores) @ values).reshape(query.shape)


TAIL = "The slots behind seq_len hold what an earlier request left there: they were read as if they were tokens."
ORDER = "Blocks need not be neighbours, nor in order: "
SLEEPING = (  # said of exercises 5.1 and 5.3; the keys of slips_5_1
    ("behind", "The table may hold blocks ahead of the tokens: the request's blocks are counted from its front, not from its end."),
    ("ahead", TAIL + "    "), ("ahead, cut", TAIL + "     "),
    ("sorted", ORDER + "sorting the table moves the block that is only partly full, so that the wrong slots are cut off."),
    ("sorted ahead", ORDER + "sorting the table moves the block that is only partly full, so that the wrong slots are cut off. "),
    ("neighbours", ORDER + "each one is looked up in the table, not counted on from the first."),
    ("own", "The query's own token has been written as well: slot seq_len - 1 is read, too."),
    ("dropped", "The last block is read where it is only partly full, too: its first slots hold the request's last tokens."),
    ("swapped", "K and V are swapped: pool[0] holds the keys, pool[1] the values."),
    ("axis", "Softmax goes over the slots, for each query head by itself: here the weights of several heads add up to 1."),
    ("axis of a group", "Softmax goes over the slots, for each query head by itself: here the weights of several heads add up to 1. "),
    ("axis of kv heads", "Softmax goes over the slots, for each query head by itself: here the weights of several heads add up to 1.  "),
    ("keys", "Those are sums of keys. The values lie in pool[1]."),
    ("reshaped", "reshape does not swap axes: in the pool the heads stand between the blocks and their slots. Bring the heads to the front first."),
    ("interleaved", "Query heads that share a kv head are neighbours: with 4 query heads on 2 kv heads, 0 and 1 share the first."),
    ("first head", "Only the first kv head was read: each group of query heads has its own."),
    ("unscaled", "The scores are to be multiplied by scaling."),
    ("unscaled twice", "scaling was used twice."),
    ("own scaling", "Use the scaling that was given: a model may set it to something else than 1 / sqrt(head_dim)."),
    ("raw", "The weights have to add up to 1: divide by their sum."),
    ("measured", "The weights have to add up to 1: divide by their sum. "),
)  # fmt: skip

# %% pools-5-1-d jupyter={"source_hidden": true}
@ours
def slips_5_1(query, pool, table, seq_len, scaling):
    """The usual wrong outputs that both ways of reading share, by the keys of SLEEPING."""
    _, rows, num_kv_heads, block_size, head_dim = pool.shape
    need = cdiv(seq_len, block_size)
    own, kv = table[:need], slots_of(pool, table)[:, :, :seq_len]
    held = slots_of(pool, [block for block in table if block < rows - 1])  # those ahead as well
    wrong_kv = {
        "sorted": slots_of(pool, sorted(own))[:, :, :seq_len], "sorted ahead": slots_of(pool, sorted(table))[:, :, :seq_len],
        "ahead": held, "ahead, cut": held[:, :, : held.shape[2] - -seq_len % block_size], "behind": held[:, :, -need * block_size :][:, :, :seq_len],
        "neighbours": slots_of(pool, [min(own[0] + i, rows - 1) for i in range(need)])[:, :, :seq_len],
        "own": kv[:, :, : seq_len - 1], "keys": kv[[0, 0]], "swapped": kv[[1, 0]], "dropped": kv[:, :, : seq_len // block_size * block_size],
        "reshaped": pool[:, table].reshape(2, num_kv_heads, -1, head_dim)[:, :, :seq_len], "first head": kv[:, :1],
    }  # fmt: skip
    grouped = query.view(-1, num_kv_heads, head_dim).transpose(0, 1).reshape(query.shape)
    inter = attend(grouped, kv, scaling).view(num_kv_heads, -1, head_dim).transpose(0, 1).reshape(query.shape)
    found = {key: attend(query, wrong, scaling) for key, wrong in wrong_kv.items()} | {"interleaved": inter}
    found |= {"own scaling": attend(query, kv, head_dim**-0.5), "measured": attend(query, kv, scaling, lambda scores: (scores - scores.amax(-1, keepdim=True)).exp()), "unscaled": attend(query, kv, 1.0), "unscaled twice": attend(query, kv, scaling**2), "raw": attend(query, kv, scaling, torch.exp)}
    found |= {"axis": attend(query, kv, scaling, lambda scores: scores.flatten(0, 1).softmax(0).view(scores.shape)),
              "axis of a group": attend(query, kv, scaling, lambda scores: scores.softmax(1)), "axis of kv heads": attend(query, kv, scaling, lambda scores: scores.softmax(0))}  # fmt: skip
    return {said: found[key] for key, said in SLEEPING}

# %% pools-5-1-c jupyter={"source_hidden": true}
@ours
def case_5_1(value, query, pool, table, seq_len, scaling):
    """One query: what was asked, got, wanted, and the usual slips."""
    got = tensor(value, query.shape, "gather_attention must return a tensor")
    everything = slots_of(pool, table)
    own = everything[:, :, : cdiv(seq_len, pool.shape[3]) * pool.shape[3]]
    kept = torch.arange(everything.shape[2]) < seq_len
    wanted = attend(query, everything[:, :, :seq_len], scaling)
    asked = describe_5_1(query, pool, table, seq_len, scaling)
    return asked, {"output": got}, {"output": wanted}, {"output": {
        TAIL: attend(query, own, scaling), TAIL + " ": attend(query, everything, scaling),
        "A slot that is hidden after the softmax has taken its share of the sum already: cut it off before.": attend(
            query, everything, scaling, lambda scores: scores.softmax(-1) * kept),
        "A hidden score of 0 still weighs exp(0) = 1: a hidden slot must weigh 0.": attend(
            query, everything, scaling, lambda scores: (scores * kept).softmax(-1)),
        **slips_5_1(query, pool, table, seq_len, scaling),
    }}  # fmt: skip

# %% pools-5-1-e jupyter={"source_hidden": true}
@ours
def describe_5_1(query, pool, table, seq_len, scaling):
    _, rows, num_kv_heads, block_size, head_dim = pool.shape
    return (
        f"block_table = {table}, seq_len = {seq_len}, block_size = {block_size}, block {rows - 1} is padding; query heads: {len(query)}, "
        f"kv heads: {num_kv_heads}, head_dim = {head_dim}; unwritten slots hold {pool[0, -1, 0, 0, 0]:,.0f}"
    )


@ours
def inputs_5_1(**options):
    """(query, pool, block_table, seq_len, scaling), small ones first."""
    small = [([0], 1, 2), ([1], 2, 2), ([2, 1], 3, 2), ([1, 3], 3, 2), ([2, 0], 4, 2), ([4, 0, 2], 5, 2)]
    for seed, (table, seq_len, block_size) in enumerate(small):
        yield paged_input(seed, table, seq_len, block_size, **options)
    yield paged_input(7, [2, 0], 3, 2, num_padding=2, **options)
    yield paged_input(8, [2, 0], 3, 2, num_kv_heads=2, per_kv=2, **options)
    yield paged_input(9, [5, 1, 3], 6, 4, **options)  # a block held ahead, behind one that is partly full
    yield paged_input(27, [3, 6, 0, 2], 4, 2, num_padding=1, **options)
    yield paged_input(28, random.Random(28).sample(range(60), 37), 67, 2, 2, 2, **options)
    rng = random.Random(51)
    for seed in range(10, 26):
        block_size, num_blocks = rng.choice([1, 2, 4, 16]), rng.randint(1, 5)
        seq_len = rng.randint((num_blocks - 1) * block_size + 1, num_blocks * block_size)
        heads = rng.choice([(1, 3), (2, 2), (3, 1), (2, 4)])
        table = rng.sample(range(9), num_blocks + rng.choice([0, 0, 1, 3]))
        yield paged_input(seed, table, seq_len, block_size, *heads, rng.choice([4, 8]), rng.randint(0, 2), **options)

# %% engine-5-1 jupyter={"source_hidden": true}
@lent
def as_backend(attend_one):
    """An attention backend for the engine from the attention of one query. A chunk is so many queries,
    one after another, and the query at position p sees the slots 0 to p: its seq_len is p + 1."""

    def my_backend(query, pool, metadata, *, scaling, window=None, softcap=None):
        if window is not None or softcap is not None:
            raise ValueError("this backend knows no window and no softcap")
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        rows = []
        for i, seq_len in enumerate(seq_lens):
            table = metadata.block_tables[i].tolist()
            for row in range(starts[i], starts[i + 1]):
                position = seq_len - (starts[i + 1] - row)
                output = attend_one(query[row], pool, table, position + 1, scaling)
                if not isinstance(output, torch.Tensor):
                    output = plain(output)
                rows.append(torch.as_tensor(output, dtype=query.dtype))
        return torch.stack(rows)

    return my_backend


@ours
def run_engine(backend, lengths, block_size):
    """The real engine. lengths: (prompt, output) tokens. Output tokens of each."""
    llm = LLM(tiny, attention_backend=backend, block_size=block_size, num_gpu_blocks_override=160 // block_size,
              max_num_seqs=8, max_num_batched_tokens=16)  # fmt: skip
    prompts = [[65 + i + k for k in range(prompt)] for i, (prompt, _) in enumerate(lengths)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in lengths]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

# %% engine-5-1-b jupyter={"source_hidden": true}
@ours
def judge_engine(function):
    """The real engine, with this attention and with the package's: the same tokens, or AssertionError."""
    lengths = [(5, 9), (16, 6), (17, 6), (1, 12)]
    for B in (1, 4, 16):
        where = f"In the engine, with blocks of {B} and up to {cdiv(29, B)} of them, "
        try:
            tokens = run_engine(as_backend(function), lengths, B)
        except Exception as error:
            raise AssertionError(
                f"{where}your {name_of(function)} is wrong, though it was right in all cases above. The engine compares a new attention's "
                f"logits with the model's own before it starts; whatever it says of the model, it is your function that ran: {error}"
            ) from error
        assert tokens == run_engine("gather", lengths, B), f"{where}other tokens came out than with the package's own attention."
        print(f"engine, blocks of {B:2}: tokens as with the package's own attention")

# %% check-5-1
@check
def exercise_5_1(gather_attention):
    inputs = list(inputs_5_1())
    examine(gather_attention, inputs, case_5_1, describe_5_1)
    zeros = torch.zeros(1, 2)
    mean = ask(gather_attention, zeros, example_pool, [2, 0], 3, 0.5)
    mean = tensor(mean, (1, 2), "gather_attention must return a tensor")
    print(f"the example: {text(mean)}")
    num_longer = sum(len(args[2]) > 2 for args in inputs)
    longer = f"{num_longer} of them with a table of three blocks or more"
    print(f"{len(inputs)} queries right, {longer}")
    judge_engine(gather_attention)

# %% [markdown]
# The last lines came from a real engine, whose attention was yours: `LLM(..., attention_backend=function)`.
# (`as_backend`, above, calls it once for every token of a step.)
#
# What it cost: every key and value was copied before it was used, in every layer of every step. Exercise 5.5
# counts it; 5.2 and 5.3 do without.

# %% [markdown]
# ## Exercise 5.2: softmax in two pieces
#
# *25 minutes, hard.*
#
# **Keep three numbers of a block of scores, such that two blocks can be put together without their scores.**
#
# Softmax divides by a sum over all slots, so it seems to need all scores at once. It doesn't, and it must
# not take exp of a large score either:

# %% example-5-2
scores, values = torch.tensor([10_000.0, 9_999.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
print("exp:", scores.exp().tolist())
weights = (scores - scores.max()).exp().tolist()
print("exp(score - largest):", [round(weight, 4) for weight in weights])

# %% [markdown]
# Of a block a row keeps
#
# - `largest`: its largest score;
# - `total`: the sum of exp(score - largest) over the slots;
# - `mixed`: the sum of the values with the weights exp(score - largest).
#
# The row's output is `mixed / total`, once all blocks have been seen. Two blocks of one row:
#
# ```text
#                 block a     block b          both
# scores          1    3      2                1          3    2
# largest         3           2                3
# weights         e⁻²  1      1                e⁻²        1    e⁻¹
# total           1.135       1                1.503
# ```
#
# A hidden slot has the score -inf, and its weight is 0. All slots of a block may be hidden for a row. Then
# the block's state is `largest` -inf, `total` 0, `mixed` zeros, and putting it together with another
# changes nothing. But nothing can be measured against -inf, since (-inf) - (-inf) is NaN: in both
# functions, measure a row that has seen nothing against 0 instead. Rows (query heads, or queries)
# know nothing of each other.
#
# <details><summary>Hint 1: a nudge</summary>
# In the picture, what happened to block b's weight of 1? Which of the two blocks did not change, and when would
# it have been the other one?
# </details>
# <details><summary>Hint 2: the rule</summary>
# exp(score - new) = exp(score - old) * exp(old - new). So a block that was measured against old is measured
# against new after one multiplication, its total and its mixed alike. Where new is -inf nothing has
# been seen, and 0 will do for it.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# of_block:  largest   <- max over the slots
#            reference <- largest, but 0 where it is -inf
#            weights   <- exp(scores - reference)
#            total, mixed <- sum of weights over the slots, weights @ values
#
# merged:    largest   <- the larger of the two, row by row
#            reference <- largest, but 0 where it is -inf
#            for each:  shrink <- exp(its largest - reference)
#            total, mixed <- the sums of (its total * shrink), (its mixed * shrink)
# ```
# </details>

# %% ex-5-2
def of_block(scores, values):
    """(largest, total, mixed) of one block: [rows], [rows] and [rows, head_dim].

    scores: [rows, slots], -inf where hidden. values: [slots, head_dim].
    """
    ### BEGIN SOLUTION
    largest = scores.amax(-1)
    # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values
    ### END SOLUTION


def merged(one, other):
    """The same three of both blocks together, from those of each."""
    ### BEGIN SOLUTION
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * shrink + other[1] * shrink_other
    return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
    ### END SOLUTION

# %% states-5-2 jupyter={"source_hidden": true}
STATE = ("largest", "total", "mixed")


@ours
def state_of(scores, values):
    """(largest, total, mixed) of one block; -inf, 0 and zeros for a row that sees nothing."""
    largest = scores.amax(-1)
    weights = (scores - largest.nan_to_num(neginf=0.0)[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


@ours
def describe_block(scores, values):
    rows = (", ".join(f"{score:g}" for score in row) for row in scores.tolist())
    return f"scores = [{', '.join(f'[{row}]' for row in rows)}]"[:300]


@ours
def parts_of(value, rows, head_dim, name):
    said = f"{name} must return three tensors, (largest, total, mixed)"
    assert isinstance(value, tuple | list) and len(value) == 3, f"{said}, not {value!r:.80}"
    shapes = [(rows,), (rows,), (rows, head_dim)]
    return {part: tensor(got, shape, f"{name}: {part} must be a tensor") for part, got, shape in zip(STATE, value, shapes, strict=True)}


BLIND = "(-inf) - (-inf) is NaN: a row whose slots are all hidden has largest -inf, and needs something else to be measured against."

ROUNDED = (
    "Rounding: near 10,000 float32's steps are 0.001, so that a logarithm which holds largest as well loses the sum's digits. "
    "Keep largest apart from the sum."
)

# %% states-5-2-b jupyter={"source_hidden": true}
@ours
def case_block(value, scores, values):
    """One block: what was asked, got, wanted, and the usual slips."""
    got = parts_of(value, *scores.shape[:1], values.shape[1], "of_block")
    largest, total, mixed = wanted = state_of(scores, values)
    naive = (scores - largest[:, None]).exp()
    raw, finite = scores.exp(), largest.nan_to_num(neginf=0.0)
    per_block = "softmax normalised per block: how a block's total compares with another's is lost. Keep the sum, and divide once, at the end."
    plain_exp = "exp of a score near 10,000 is inf, near -10,000 it is 0: take the row's largest score off first."
    all_rows, overall = "Each row has its own largest score: the rows are different query heads.", scores.amax().expand_as(largest)
    shared = (scores - overall.nan_to_num(neginf=0.0)[:, None]).exp()
    asked = describe_block(scores, values)
    return asked, got, dict(zip(STATE, wanted, strict=True)), {
        "largest": {all_rows: overall, "A row that sees nothing keeps -inf: with 0 it would outweigh scores near -10,000.": finite, BLIND: largest * float("nan")},
        "total": {per_block: total / total, per_block + " ": torch.ones_like(total), plain_exp: raw.sum(-1), BLIND: naive.sum(-1), all_rows: shared.sum(-1),
                  ROUNDED: (scores.logsumexp(-1) - largest).exp(), ROUNDED + " ": (scores.logsumexp(-1) - finite).exp(),
                  "That counts slots. Each weighs exp(score - largest).": torch.full_like(total, scores.shape[1]),
                  "That is the sum of the scores, not of exp(score - largest).": (scores - largest[:, None]).sum(-1)},
        "mixed": {per_block: mixed / total[:, None], plain_exp: raw @ values, BLIND: naive @ values, all_rows: shared @ values,
                  "The values are weighted with exp(score - largest), not with the scores.": scores @ values},
    }  # fmt: skip

# %% states-5-2-f jupyter={"source_hidden": true}
@ours
def inputs_block():
    """(scores, values), small ones first."""
    hidden = -math.inf
    yield torch.tensor([[0.0]]), torch.tensor([[3.0]])
    yield torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    yield torch.tensor([[2.0, hidden]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    yield torch.tensor([[hidden, 2.0, 2.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 8.0]])
    yield torch.tensor([[1.0, 3.0], [2.0, 0.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    yield torch.tensor([[10_000.0, 9_999.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    yield torch.tensor([[-10_000.0, -9_998.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    yield torch.tensor([[hidden, hidden]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    yield torch.tensor([[2.0, 2.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    generator = torch.Generator().manual_seed(52)
    for rows, slots, base in ((1, 4, 0), (3, 4, 0), (2, 16, 9_990), (4, 8, -9_990), (3, 3, 0)):
        scores = (torch.randn(rows, slots, generator=generator) * 24).round() / 8 + base
        scores[torch.rand(rows, slots, generator=generator) < 0.3] = hidden
        scores[1:2] = hidden
        yield scores, torch.randn(slots, 4, generator=generator)

# %% states-5-2-c jupyter={"source_hidden": true}
@ours
def case_merged(value, one, other):
    """Two blocks: what was asked, got, wanted, and the usual slips."""
    got = parts_of(value, *one[2].shape, "merged")
    (la, ta, ma), (lb, tb, mb) = one, other
    largest = la.maximum(lb)
    base = largest.nan_to_num(neginf=0.0)
    fa, fb = (la - base).exp(), (lb - base).exp()
    na, nb = (la - largest).exp(), (lb - largest).exp()  # NaN where nobody has seen anything

    def put(a, b):
        return {"total": ta * a + tb * b, "mixed": ma * a[:, None] + mb * b[:, None]}

    wanted, one_ = {"largest": largest, **put(fa, fb)}, torch.ones_like(la)
    forgotten = "The max was forgotten when merging: the two sums are measured against different largest scores, so they cannot just be added."
    onesided = "Either block may have the larger score, so either side may have to shrink, never grow."
    reverse = "exp(new - old) makes the old sums grow. They have to shrink: exp(old - new)."
    once = "mixed was made with the same weights as total: it has to shrink by the same factor."
    per_block = "softmax normalised per block: the mean of two blocks' outputs is not the output of both. Divide once, at the end."
    slips = {forgotten: put(one_, one_), onesided: put((la - lb).exp(), one_), onesided + " ": put(one_, (lb - la).exp()), reverse: put(1 / fa, 1 / fb),
             **{onesided + " " * n: put(*pair) for n, pair in enumerate(((fa, one_), (one_, fb), (na, one_), (one_, nb)), 2)},
             BLIND: put(na, nb), "The first block is lost.": put(one_ * 0, one_), "The second block is lost.": put(one_, one_ * 0)}  # fmt: skip
    only_mixed = {per_block: (ma / ta[:, None] + mb / tb[:, None]) / 2, per_block + " ": wanted["mixed"] / wanted["total"][:, None],
                  per_block + "  ": ma / ta[:, None] + mb / tb[:, None]}  # fmt: skip
    asked = describe_merged(one, other)
    return asked, got, wanted, {
        "largest": {"The largest of both blocks was asked for, row by row.": lb, "The largest of both blocks was asked for, row by row. ": la,
                    "Largest scores do not add up: take the larger of the two.": la + lb},
        "total": {said: parts["total"] for said, parts in slips.items()} | {per_block: torch.full_like(ta, 2.0), per_block + " ": one_},
        # total is right here: what it did, mixed did not
        "mixed": {once if said == forgotten else said: parts["mixed"] for said, parts in slips.items()} | only_mixed,
    }  # fmt: skip

# %% states-5-2-d jupyter={"source_hidden": true}
@ours
def describe_merged(one, other):
    return "\n".join(f"{name} = ({', '.join(f'{part} {text(value)}' for part, value in zip(STATE, state, strict=True))})" for name, state in (("one", one), ("other", other)))


@ours
def inputs_merged():
    blocks = [(scores, values) for scores, values in inputs_block() if len(scores) == 1 and values.shape[1] == 2]
    # 0 to 2 are ordinary, 3 near 10,000, 4 near -10,000, 5 sees nothing
    pairs = [(0, 0), (0, 1), (1, 0), (0, 3), (3, 0), (3, 3), (4, 3), (3, 4), (4, 4), (0, 5), (5, 0), (4, 5), (5, 5), (1, 1), (2, 1)]
    yield from ((state_of(*blocks[a]), state_of(blocks[b][0], blocks[b][1] + 4)) for a, b in pairs)
    generator = torch.Generator().manual_seed(53)
    for rows, base in ((1, 0), (3, 0), (4, 9_000), (3, -9_000)):
        scores = (torch.randn(2, rows, 8, generator=generator) * 24).round() / 8 + base
        scores[torch.rand(2, rows, 8, generator=generator) < 0.5] = -math.inf
        scores[rows % 2, 0] = -math.inf
        values = torch.randn(2, 8, 4, generator=generator)
        yield state_of(scores[0], values[0]), state_of(scores[1], values[1])

# %% states-5-2-e jupyter={"source_hidden": true}
@ours
def show_in_two_pieces(of_block, merged):
    """Scores near 0, 10,000 and -10,000: softmax in two pieces beside softmax at once."""
    for base in (0, 10_000, -10_000):
        scores = torch.tensor([[1.0, 3.0, 2.0, -math.inf]]) + base
        values = torch.arange(8.0).view(4, 2)
        one, other = (
            tuple(parts_of(ask(of_block, scores[:, at], values[at]), 1, 2, "of_block").values())
            for at in (slice(2), slice(2, 4))
        )
        _, total, mixed = parts_of(ask(merged, one, other), 1, 2, "merged").values()
        mine, right = text(mixed / total[:, None]), text(scores.softmax(-1) @ values)
        total = f"total {total.item():.3f}"
        print(f"scores near {base:7,}: {total}, output {mine}, at once {right}")

# %% check-5-2
@check
def exercise_5_2(of_block, merged):
    inputs = list(inputs_block())
    examine(of_block, inputs, case_block, describe_block)
    num_blind = sum(bool((s == -math.inf).all(-1).any()) for s, _ in inputs)
    blind = f"{num_blind} with a row that sees nothing"
    print(f"of_block: {len(inputs)} blocks right, {blind}")
    inputs = list(inputs_merged())
    examine(merged, inputs, case_merged, describe_merged)
    print(f"merged: {len(inputs)} pairs right")
    show_in_two_pieces(of_block, merged)

# %% [markdown]
# `merged` may put blocks together in any order, and in any grouping. So a long context can be cut into parts
# that different processors read at the same time.

# %% [markdown]
# ## Exercise 5.3: a whole table, block by block
#
# *15 minutes, hard.*
#
# **Compute what 5.1 computes, reading each block where it lies, one at a time. Nothing is gathered.**
#
# ```text
# table [5, 1, 3], block_size 4, seq_len 10
#
#   block 5  A0 A1 A2 A3   ->  state of 4 slots
#   block 1  A4 A5 A6 A7   ->  state of 8
#   block 3  A8 A9  ?  ?   ->  state of 10  ->  output
# ```
#
# Two things are new. Unwritten slots may hold NaN, which no multiplication makes harmless:

# %% example-5-3
weights = torch.tensor([0.75, 0.25, 0.0])
values = torch.tensor([[1.0], [5.0], [math.nan]])
print("weight 0, NaN in the slot:", (weights @ values).item())
print("the slot cut off:         ", (weights[:2] @ values[:2]).item())

# %% [markdown]
# And query heads are grouped: those that share a kv head are rows of one product, so that a block's keys and
# values are read once for all of them. You may use your `of_block` and `merged` (kv head by kv head),
# or write the running sums anew, for all heads at once. The check watches what torch's operations make
# and how much of it is kept at a time: much more than a block is too much. What numpy does it cannot see, so
# stay with torch here.
#
# Scores may be far apart: from slot to slot, from block to block and from head to head.
#
# <details><summary>Hint 1: a nudge</summary>
# Start with one block, full, and one kv head. Then the second block. What do you have to keep of the first?
# </details>
# <details><summary>Hint 2: the rule</summary>
# After each block the state describes all slots so far, and only those: largest score, sum of exp(score -
# largest), sum of the values with these weights. The last block that is read has <code>seq_len - start</code>
# slots of the request; blocks behind it have none.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# grouped <- query as [kv heads, query heads that share one, head_dim], times scaling
# largest, total, mixed <- -inf, 0, zeros
# for start in 0, block_size, 2 * block_size, ... below seq_len:
#     keys, values <- of the block in the table at this place, its first seq_len - start slots
#     scores  <- grouped @ keys, its last two axes swapped
#     new     <- the larger of largest and the largest of scores, row by row
#     shrink  <- exp(largest - new);   weights <- exp(scores - new)
#     total   <- total * shrink + sum of weights
#     mixed   <- mixed * shrink + weights @ values
#     largest <- new
# output <- mixed / total, as [query heads, head_dim]
# ```
# </details>

# %% ex-5-3
def online_attention(query, pool, block_table, seq_len, scaling):
    """As gather_attention, one block at a time.

    query: [num_query_heads, head_dim], which is also the output's shape.
    pool: [2, num_blocks + 1, num_kv_heads, block_size, head_dim].
    """
    ### BEGIN SOLUTION
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        # The tail is cut off, not masked: 0 times NaN is NaN.
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)
    ### END SOLUTION

# %% whole-5-3 jupyter={"source_hidden": true}
@ours
def place(tensor):
    return tensor.untyped_storage().data_ptr()


@lent
class Watching(TorchFunctionMode):
    """Notes the largest tensor that any torch operation makes, and the most that is kept at a time: what is only
    a view of what was given is none. What numpy does cannot be seen, so that going there is noted."""

    def __init__(self, *given):
        super().__init__()
        self.given = {place(value) for value in given if isinstance(value, torch.Tensor)}
        self.largest, self.what, self.most, self.left, self.alive = 0, "", 0, "", {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        tracer = sys.gettrace()
        sys.settrace(None)  # bounded counts the instructions of the answer, not these
        try:
            value = function(*args, **(kwargs or {}))
            self.note(getattr(function, "__name__", str(function)), args, value)
        finally:
            sys.settrace(tracer)
        return value

    def note(self, name, args, value):
        if name in ("numpy", "__array__", "__dlpack__") or (name == "tolist" and args[0].numel() > 512):
            self.left = name
        for made in value if isinstance(value, tuple | list) else [value]:
            if isinstance(made, torch.Tensor) and place(made) not in self.given:
                if made.numel() > self.largest:
                    self.largest, self.what = made.numel(), name
                self.alive[id(made)] = weakref.ref(made)
        kept = [tensor for tensor in (ref() for ref in self.alive.values()) if tensor is not None]
        self.alive = {id(tensor): self.alive[id(tensor)] for tensor in kept}
        sizes = {place(tensor): tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept}
        self.most = max(self.most, sum(sizes.values()))

# %% whole-5-3-f jupyter={"source_hidden": true}
@ours
def judge_in_place(function):
    """70 blocks: no operation may make a tensor much larger than a block."""
    table = random.Random(530).sample(range(90), 72)  # two blocks ahead
    args = paged_input(530, table, 279, 4, 2, 2, 8, poison=math.nan)
    watching = Watching(*args)

    def watched(*args):
        with watching:
            return function(*args)

    watched.__name__ = name_of(function)
    asked = "a table of 72 blocks of 4 slots, seq_len = 279"
    value = ask(watched, *args, asked=asked)
    case = case_5_3(value, *args)
    assert same(case[1], case[2]), f"{asked}: the output is wrong, though shorter tables are right."
    block = 2 * 2 * 4 * 8
    only = "of the blocks before, only largest, total and mixed may stay."
    said = "takes the pool out of torch, where this check cannot see what is collected: stay with torch here."
    assert not watching.left, f"{watching.left} {said}"
    said = f"A block's K and V are {block}: read one block at a time; {only}"
    made = f"With 70 blocks, {watching.what} made a tensor of {watching.largest:,} numbers."
    assert watching.largest <= 4 * block, f"{made} {said}"
    kept = f"With 70 blocks, tensors of {watching.most:,} numbers together were kept at the same time"
    assert watching.most <= 4 * block, f"{kept}: {only}"

# %% whole-5-3-b jupyter={"source_hidden": true}
@ours
def blockwise(query, pool, table, seq_len, scaling, join):
    """The output of join(blocks), each block (largest, total, mixed), [kv_heads, per_kv, ...]; as many slips."""
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped, states = query.view(num_kv_heads, -1, head_dim) * scaling, []
    for i, block in enumerate(table[: cdiv(seq_len, block_size)]):
        keys, values = pool[:, block, :, : seq_len - i * block_size]
        scores = grouped @ keys.mT
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        states.append((largest, weights.sum(-1, keepdim=True), weights @ values))
    return join(states).reshape(query.shape)

# %% whole-5-3-c jupyter={"source_hidden": true}
@ours
def case_5_3(value, query, pool, table, seq_len, scaling):
    got = tensor(value, query.shape, "online_attention must return a tensor")
    args = query, pool, table, seq_len, scaling
    everything = slots_of(pool, table)
    own = everything[:, :, : cdiv(seq_len, pool.shape[3]) * pool.shape[3]]
    wanted = attend(query, everything[:, :, :seq_len], scaling)
    masked = wanted + 0 * own[1, 0, -1, -1]  # NaN where there is a tail of NaN
    nan_scores = attend(query, torch.stack([own[0], own[1].nan_to_num()]), scaling)
    raw = attend(query, everything[:, :, :seq_len], scaling, lambda s: s.exp() / s.exp().sum(-1, keepdim=True))
    per_block = "softmax normalised per block: the blocks' totals differ, so their outputs cannot just be added or averaged. Divide once, at the end."
    forgotten = "The max was forgotten when merging: a block's sums are measured against its own largest score, the next block's against another."
    asked = describe_5_3(query, pool, table, seq_len, scaling)
    return asked, {"output": got}, {"output": wanted}, {"output": {
        "exp of a score above 88 is inf, of one below -104 it is 0: take the largest score so far off first.": raw,
        TAIL: attend(query, own, scaling), TAIL + " ": attend(query, everything, scaling), TAIL + "  ": nan_scores,
        "The mask came after multiplying: the tail's weight is 0, but 0 x NaN is NaN. Slice the values as well.": masked,
        per_block: blockwise(*args, lambda states: sum(m / t for _, t, m in states)),
        per_block + " ": blockwise(*args, lambda states: sum(m / t for _, t, m in states) / len(states)),
        forgotten: blockwise(*args, lambda states: sum(m for *_, m in states) / sum(t for _, t, _ in states)),
        forgotten + " ": blockwise(*args, lambda states: running(states, mixed=0)), forgotten + "  ": blockwise(*args, lambda states: running(states, total=0)),
        forgotten + "   ": blockwise(*args, lambda states: running(states, 0, 0)),
        "exp(new - old) makes the old sums grow. They have to shrink: exp(old - new).": blockwise(*args, lambda states: running(states, -1, -1)),
        "Only the last block is left: what was kept of the others must be shrunk, not overwritten.": blockwise(*args, lambda states: states[-1][2] / states[-1][1]),
        "Only the first block was read.": blockwise(*args, lambda states: states[0][2] / states[0][1]),
        **{said: blockwise(*args, join) for said, join in joins_5_3().items()},
        "The last block is read where it is only partly full, too: its first slots hold the request's last tokens.   ": blockwise(
            *args, lambda states: running(states[: seq_len // pool.shape[3]] or [tuple(part * math.nan for part in states[0])])),
        **slips_5_1(*args),
    }}  # fmt: skip

# %% whole-5-3-d jupyter={"source_hidden": true}
@ours
def running(states, total=1, mixed=1, larger=None):
    """Running sums; each shrinks when a larger score comes (1), stays as it is (0) or grows (-1)."""
    largest, t, m = states[0]
    for new, t_new, m_new in states[1:]:
        both = (larger or torch.maximum)(largest, new)
        old, now = largest - both, (new - both).exp()
        t, m, largest = t * (old * total).exp() + t_new * now, m * (old * mixed).exp() + m_new * now, both
    return m / t


@ours
def begun(states, largest):
    """The same states after one that has seen nothing."""
    return [(torch.full_like(states[0][0], largest), *(part * 0 for part in states[0][1:])), *states]


HEADS = "Each query head has its own largest score: measured against that of another head, its weights may all be exp(-256) = 0."


@ours
def joins_5_3():
    """{what to say: a wrong way to join the blocks' states}"""
    return {
        "Scores are measured against the largest so far, not this block's: where it is lower, the older sums would grow, up to inf.": lambda states: running(states, larger=lambda old, new: new),
        "largest was never updated: after the first block a score may be far larger, and its exp is inf.": lambda states: running(states, larger=lambda old, new: old),
        "The larger of the two is kept, not the smaller: exp of a score far above it is inf.": lambda states: running(states, larger=torch.minimum),
        **{"largest starts at -inf, not at 0 or another number: scores far below it all weigh 0 against it." + " " * n:
           lambda states, start=start: running(begun(states, start)) for n, start in enumerate((0.0, -100.0, -1e3, -1e4))},
        HEADS: lambda states: running(begun(states, -math.inf), larger=lambda old, new: old.maximum(new).amax().expand_as(old)),
        HEADS + " ": lambda states: running(begun(states, -math.inf), larger=lambda old, new: old.maximum(new).amax(1, keepdim=True).expand_as(old)),
        HEADS + "  ": lambda states: running(begun(states, -math.inf), larger=lambda old, new: old.maximum(new).amax(0, keepdim=True).expand_as(old)),
    }  # fmt: skip

# %% whole-5-3-e jupyter={"source_hidden": true}
@ours
def describe_5_3(query, pool, table, seq_len, scaling):
    keys = slots_of(pool, table)[0, :, :seq_len]
    scores = query.view(len(keys), -1, query.shape[-1]) @ keys.mT * scaling
    blocks = [f"{part.min():.0f} to {part.max():.0f}" for part in scores.split(pool.shape[3], -1)]
    return f"{describe_5_1(query, pool, table, seq_len, scaling)}; scores, block by block: {', '.join(blocks)}"


@ours
def inputs_5_3():
    """As in 5.1, with 10,000 in unwritten slots; then NaN there; some scores too large for exp, or too small; then
    blocks whose scores lie far apart, and heads."""
    yield from inputs_5_1()
    for offset in (0.0, 128.0, -128.0, -300.0):
        yield paged_input(40, [1], 1, 2, poison=math.nan, offset=offset)
        yield paged_input(41, [2, 0], 3, 2, poison=math.nan, offset=offset)
        yield paged_input(42, [5, 1, 3], 11, 4, 2, 3, 4, 2, poison=math.nan, offset=offset)
    for offset in (-3_000.0, -30_000.0):  # one slot: the logarithm of a sum would lose digits there
        yield paged_input(48, [1], 1, 4, poison=math.nan, offset=offset)
    yield paged_input(46, [5, 1, 3], 6, 4, poison=math.nan)  # a block held ahead
    yield paged_input(49, [5, 1, 3], 11, 4, 2, 2, 4, 2, poison=math.nan, offset=128.0, spread=True)
    for offset in ((128.0, -128.0), (-128.0, 128.0)):
        yield paged_input(43, [2, 0], 3, 2, poison=math.nan, offset=offset)
        yield paged_input(44, [5, 1, 3], 11, 4, 2, 3, 4, 2, poison=math.nan, offset=(*offset, offset[0]))
    yield paged_input(45, [2, 0], 3, 2, 1, 2, poison=math.nan, offset=128.0, apart=True)
    yield paged_input(47, [5, 1, 3], 11, 4, 2, 2, 4, 2, poison=math.nan, offset=(128.0, -128.0, 128.0), apart=True)
    yield from inputs_5_1(poison=math.nan)

# %% check-5-3
@check
def exercise_5_3(online_attention):
    inputs = list(inputs_5_3())
    examine(online_attention, inputs, case_5_3, describe_5_3)
    num_nan = sum(bool(args[1].isnan().any()) for args in inputs)
    print(f"{len(inputs)} queries right, {num_nan} of them beside slots of NaN")
    judge_in_place(online_attention)
    print("70 blocks: never more than a few blocks' worth of numbers made, or kept")
    judge_engine(online_attention)

# %% [markdown]
# Now a model whose text you can read: in a cell of your own,
# `LLM("smollm2", dtype="float32", attention_backend=as_backend(online_attention)).generate([...])`.
# It is slow, since Python goes from block to block; a kernel does the same in one call.

# %% on-smollm2 tags=["solution", "nbval-ignore-output"]
def on_smollm2(backend):
    questions = ["What is the capital of France?", "Name three colours."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    llm = LLM("smollm2", dtype="float32", attention_backend=backend)
    params = SamplingParams(max_tokens=12, temperature=0)
    outputs = llm.generate(chats, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


answers = on_smollm2(as_backend(online_attention))
assert answers == on_smollm2("gather")
print(answers)

# %% [markdown]
# ## Exercise 5.4: a chunk's mask
#
# *12 minutes, medium, in two parts.*
#
# **Which of the gathered slots may each token of a chunk see?**
#
# A prompt of `num_tokens` tokens is computed in chunks. `num_computed_tokens` of it lie in the pool
# already; this step computes `num_new_tokens` more, and has written their keys and values. Blocks for the whole
# prompt stand in the table, perhaps some ahead, so that `num_slots` slots were gathered, whole blocks;
# slot j is the place of the token at position j. There is a row for each new token; `True` means that it may see the slot, and a token sees itself
# and all before it.
#
# ```text
# num_tokens = 7, num_computed_tokens = 2, num_new_tokens = 2, num_slots = 8 (blocks of 4)
#
# slot              0  1  2  3   4  5  6  7
# written           A0 A1 A2 A3  .  .  .  .      A4, A5 and A6 come in a later step
# token A2 sees     x  x  x  .   .  .  .  .
# token A3 sees     x  x  x  x   .  .  .  .
# ```
#
# **a.** Write the mask.
#
# <details><summary>Hint 1: a nudge</summary>
# At which position does the token of row 0 stand? And the one of row i?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Compare positions: the query of row i stands at <code>num_computed_tokens + i</code>, the key in slot j at j.
# What has not been written lies behind every query, so no second rule is needed for it. One of the
# four arguments is needed nowhere.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# position <- num_computed_tokens, num_computed_tokens + 1, ...   as a column of num_new_tokens
# slot     <- 0 .. num_slots - 1                                  as a row
# mask     <- slot <= position
# ```
# </details>

# %% ex-5-4
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    """[num_new_tokens, num_slots] of bool: True where a new token may see a slot."""
    ### BEGIN SOLUTION
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)
    return torch.arange(num_slots)[None] <= position[:, None]
    ### END SOLUTION

# %% masks-5-4 jupyter={"source_hidden": true}
@ours
def chunk_text(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window=None):
    more = "" if window is None else f", window = {window}"
    return f"num_tokens = {num_tokens}, num_computed_tokens = {num_computed_tokens}, num_new_tokens = {num_new_tokens}, num_slots = {num_slots}{more}"


@ours
def as_mask(value, new, num_slots, num_tokens, computed, name):
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(0)
    assert found.dim() == 2, f"{name} must return a table of True and False with {new} rows, not {value!r:.80}"
    assert found.dtype is torch.bool or found.eq(0).logical_or(found.eq(1)).all(), f"{name} must hold True and False, not {text(found)}: it is a mask, not a bias."
    have = list(found.shape)
    if have == [new, num_slots]:
        return found.bool()
    said = f"There is a row for each new token and a column for each gathered slot: shape [{new}, {num_slots}], not {have}."
    if have == [new, new]:
        said = f"The triangle of an empty cache: the {computed} computed tokens lie in the cache, and are seen. {said}"
    elif have == [new, num_tokens]:
        said = f"The prompt's length is not the length of what was gathered. {said}"
    elif have == [new, computed + new]:
        said = f"Gathered were whole blocks: the slots that hold nothing yet need their False. {said}"
    raise AssertionError(said)


UNWRITTEN = "The key length is what has been written, computed and new, not the whole prompt: later slots hold nothing of this request yet."
HALF = "A query's position counts from num_computed_tokens: in an empty cache row 0 would stand at position 0, here it does not."


@ours
def drawn_mask(function, num_tokens, computed, new, num_slots, *window):
    value = ask(function, num_tokens, computed, new, num_slots, *window)
    return text(as_mask(value, new, num_slots, num_tokens, computed, name_of(function))).strip("\n")

# %% masks-5-4-b jupyter={"source_hidden": true}
@ours
def case_5_4(value, num_tokens, computed, new, num_slots, window=None):
    """One chunk: what was asked, got, wanted, and the usual slips."""
    asked = chunk_text(num_tokens, computed, new, num_slots, window)
    got = as_mask(value, new, num_slots, num_tokens, computed, "chunk_mask" if window is None else "windowed_mask")
    slot, row = torch.arange(num_slots)[None], torch.arange(new)[:, None]
    position, written = computed + row, (slot < computed + new).expand(new, -1)
    end = num_tokens - new + row
    causal, inside = slot <= position, torch.ones(new, num_slots, dtype=torch.bool)
    base = {
        UNWRITTEN: (slot < num_tokens) & inside, UNWRITTEN + " ": slot <= end, HALF: slot <= row,
        UNWRITTEN + "  ": (slot <= position) | ((slot >= computed + new) & (slot < num_tokens)),
        "A token sees itself: its own key has been written before the scores are made.": slot < position,
        "A query sees up to its own position, not one further: row 0 stands at num_computed_tokens.": (slot <= position + 1) & written,
        "A query sees up to its own position, not one further: row 0 stands at num_computed_tokens. ": slot <= position + 1,
        "The tokens of a chunk must not see those behind them, although they are computed together.": written,
        "A row ends at its own position, counted from the front: counted back from the last slot, it depends on how many slots were gathered.": slot <= num_slots - new + row,
        "The slots behind the last token hold nothing of this request.": inside, "True means that the query may see the slot.": ~causal,
        "The chunk's tokens see each other, and what was computed before as well.": causal & (slot >= computed),
    }  # fmt: skip
    if window is None:
        return asked, {"mask": got}, {"mask": causal}, {"mask": base}
    first = position - window + 1
    seen = lambda first, last=position: (slot >= first) & (slot <= last)  # noqa: E731
    far = "A window of w slots counts the query's own: {}"
    below = "position - window + 1 may be negative, and a negative index counts from the end: near the beginning a window starts at 0."
    wrap = lambda first: causal & (slot >= torch.where(first < 0, (num_slots + first).clamp(min=0), first))  # noqa: E731
    slips = {
        below: wrap(first), below + " ": wrap(first - 1),
        far.format("one slot too many is seen."): seen(first - 1), far.format("one slot too few is seen."): seen(first + 1),
        "Each query has a window of its own, which ends with it: the first row's window is not the last row's.": seen((computed + new - window) * torch.ones_like(row)),
        "Each query has a window of its own, which ends with it: the last row's window is not the first row's.": seen((computed - window + 1) * torch.ones_like(row)),
        "The window slides: it holds the last slots that a query sees, not the first of the sequence.": causal & (slot < window),
        "A window hides what is too far back, and what lies ahead stays hidden, too.": (slot >= first) & written,
        "A window hides what is too far back, and what lies ahead stays hidden, too. ": (slot >= first) & inside,
        "A window hides what is too far back, and what lies ahead stays hidden, too.  ": (slot - position).abs() < window,
        "The window was not used.": causal, "Seen from the query, the window was counted within the chunk: earlier slots belong to it, too.": seen((row - window + 1).clamp(min=0) + computed),
        "The query's position counts from num_computed_tokens, for the window as well.": causal & (slot > row - window),
    }  # fmt: skip
    return asked, {"mask": got}, {"mask": seen(first)}, {"mask": slips | {said: mask & (slot >= first) for said, mask in base.items()}}

# %% masks-5-4-c jupyter={"source_hidden": true}
@ours
def inputs_5_4(windows=(None,)):
    """(num_tokens, num_computed_tokens, num_new_tokens, num_slots[, window]), small ones first."""
    small = [(3, 1, 1, 4), (2, 0, 1, 2), (5, 2, 2, 6), (7, 3, 3, 8), (4, 0, 4, 4), (9, 8, 1, 12), (9, 4, 5, 12), (6, 0, 3, 6)]
    rng = random.Random(54)
    for _ in range(24):
        num_tokens = rng.randint(2, 40)
        computed = rng.randint(0, num_tokens - 1)
        num_slots = cdiv(num_tokens, 4) * 4 + rng.choice([0, 0, 4, 8])  # blocks held ahead
        small.append((num_tokens, computed, rng.randint(1, num_tokens - computed), num_slots))
    small += [(300, 125, 4, 300), (2_600, 2_500, 2, 2_600)]
    for args in small:
        for window in windows:
            yield args if window is None else (*args, window)

# %% check-5-4
@check
def exercise_5_4(chunk_mask):
    inputs = list(inputs_5_4())
    examine(chunk_mask, inputs, case_5_4, chunk_text)
    print(f"{len(inputs)} masks right.")
    print("A prompt of 9 tokens, 4 computed, a chunk of 3, blocks of 4:")
    print(drawn_mask(chunk_mask, 9, 4, 3, 12))

# %% [markdown]
# **b.** In some models, or some of their layers, a query sees only the last `window` slots, its own among
# them: with a window of 1 it sees itself and nothing else.
#
# ```text
# the same chunk, window = 3
#
# slot              0  1  2  3   4  5  6  7
# token A2 sees     x  x  x  .   .  .  .  .
# token A3 sees     .  x  x  x   .  .  .  .
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# The picture's two rows see equally many slots. Where does each row's run of slots end, and where does it
# begin?
# </details>
# <details><summary>Hint 2: the rule</summary>
# The run ends with the query's position p and has at most <code>window</code> slots, so that the first is
# <code>p - window + 1</code>; near the beginning of the prompt there are fewer.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# mask <- (slot <= position) and (slot > position - window)
# ```
# </details>

# %% ex-5-4-b
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    """As chunk_mask, but a token sees at most the last `window` slots, its own too."""
    ### BEGIN SOLUTION
    position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot <= position) & (slot > position - window)
    ### END SOLUTION

# %% check-5-4-b
@check
def exercise_5_4_windowed(windowed_mask):
    inputs = list(inputs_5_4(windows=(1, 2, 3, 10, 50)))
    examine(windowed_mask, inputs, case_5_4, chunk_text)
    print(f"{len(inputs)} masks right. The same chunk, window 3:")
    print(drawn_mask(windowed_mask, 9, 4, 3, 12, 3))

# %% [markdown]
# ## Exercise 5.5: what a decode step reads
#
# *8 minutes, easy.*
#
# **Predict the bytes that one decode step moves.**
#
# Each request computes one token. `seq_lens` counts the slots that its query reads, that token's included.
#
# - `weights`: every weight of all layers, once.
# - `in_place`: keys and values, in all layers together, that a kernel reads where they lie. It stops at
#   `seq_len`, and a kv head is read once for all the query heads that share it.
# - `gathered`: the same with a gather. It copies whole blocks, those of each request up to its last token:
#   the pool is read and the copy written; then attention reads the copy.
# - `tables`: the step's block tables, each counted once, since one table serves all layers. A request's
#   table has an entry of 4 bytes for every block up to the one that holds its last token.
#
# The chapter's gather pads every row, and every table, to the longest request. Here nothing is padded:
# count as if each request were gathered by itself, with a table of its own length.
#
# One layer of one request, seq_len 6, block_size 4, 2 kv heads, head_dim 5, 4 bytes for each number:
#
# ```text
# one token      2 (K and V) * 2 * 5 * 4 =  80 bytes
# in place       6 * 80                  = 480
# gathered       8 * 80 * 3              = 1,920
# ```
#
# `spec` is a `ModelSpec`: `num_layers`, `num_query_heads`, `num_kv_heads`, `head_dim`, `num_parameters`,
# `dtype_bytes`.
#
# <details><summary>Hint 1: a nudge</summary>
# Which of the four numbers grow with the batch, and which with the contexts?
# </details>
# <details><summary>Hint 2: the rule</summary>
# In a decode step each weight serves all requests, and each key and value serves one. A block id means the
# same block in every layer's pool. The bytes of a token: K and V, layers, kv heads, head_dim, bytes.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# token    <- 2 * layers * kv heads * head_dim * bytes
# blocks   <- for each request seq_len / block_size, rounded up; added up
# weights  <- parameters * bytes
# in_place <- sum of seq_lens * token
# gathered <- 3 * blocks * block_size * token
# tables   <- 4 * blocks
# ```
# </details>

# %% ex-5-5
def step_bytes(spec, seq_lens, block_size):
    """(weights, in_place, gathered, tables), in bytes, of one decode step."""
    ### BEGIN SOLUTION
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    weights = spec.num_parameters * spec.dtype_bytes
    gathered = 3 * num_blocks * block_size * token
    return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
    ### END SOLUTION

# %% bytes-5-5 jupyter={"source_hidden": true}
READ = ("weights", "in_place", "gathered", "tables")


@ours
def spec_text(spec, seq_lens, block_size):
    heads = f"{spec.num_query_heads} query heads, {spec.num_kv_heads} kv heads, head_dim {spec.head_dim}, {spec.dtype}"
    return f"seq_lens = {seq_lens}, block_size = {block_size}; {spec.name}: {spec.num_layers} layers, {heads}, {spec.num_parameters:,} parameters"

# %% bytes-5-5-d jupyter={"source_hidden": true}
@ours
def slips_of_a_number(spec):
    """{what to say: factor}"""
    fixed = "Not every model takes {} bytes for a number: multiply by spec.dtype_bytes."
    return {
        "Numbers were counted, not bytes: spec.dtype_bytes says how many each takes.": 1 / spec.dtype_bytes,
        fixed.format(4): 4 / spec.dtype_bytes, fixed.format(2): 2 / spec.dtype_bytes,
    }  # fmt: skip


@ours
def slips_of_a_token(spec):
    """{what to say: factor}"""
    return {
        "K and V are both read: V's bytes were forgotten.": 0.5,
        "The query heads of a group share one reading of K and V: their kv head is not read again for each of them.":
            spec.num_query_heads // spec.num_kv_heads,
        "Every layer has K and V of its own: those are the bytes of one layer.": 1 / spec.num_layers,
        **slips_of_a_number(spec),
    }  # fmt: skip


@ours
def table_slips(spec, seq_lens, block_size, live, held):
    n = len(seq_lens)
    return {
        "One table serves all layers: a block id means the same block in each layer's pool.": 4 * held // block_size * spec.num_layers,
        "A table has an entry for each block, not for each token.": 4 * live, "A table has an entry for each block, not for each token. ": 4 * held,
        "Each request's last block has an entry, too, be it full or not.": 4 * sum(s // block_size for s in seq_lens),
        "Each request's last block has an entry, too, be it full or not. ": 4 * live / block_size,
        "No two requests share a block here: each has a last block of its own.": 4 * cdiv(live, block_size), "An entry takes 4 bytes.": held // block_size,
        "Each request reads its own table, not the longest of the batch: the padding of the chapter's tables is left out here.": 4 * n * cdiv(max(seq_lens), block_size)
    }  # fmt: skip

# %% bytes-5-5-c jupyter={"source_hidden": true}
@ours
def case_5_5(value, spec, seq_lens, block_size):
    asked, got = spec_text(spec, seq_lens, block_size), numbers(value, READ, "step_bytes")
    token, W, n = spec.kv_bytes_per_token, spec.parameter_bytes, len(seq_lens)
    live, held = sum(seq_lens), sum(cdiv(s, block_size) for s in seq_lens) * block_size
    common = slips_of_a_token(spec)
    last = "The step's own token is counted in seq_len: its K and V are written first and read with the others."
    twin = "Two requests of equal length are two: each reads a context of its own."
    longest = "Each request reads its own context, not the longest of the batch: the padding of the chapter's section 2 is left out here."
    full = "A full last block needs no further one, and seq_len holds the step's own token already."
    tokens = {
        last: (live - n, sum(cdiv(s - 1, block_size) for s in seq_lens) * block_size),
        full: (live + n, sum(cdiv(s + 1, block_size) for s in seq_lens) * block_size),
        twin: (sum(set(seq_lens)), sum(cdiv(s, block_size) for s in set(seq_lens)) * block_size),
        longest: (max(seq_lens) * n, cdiv(max(seq_lens), block_size) * block_size * n),
    }
    wanted = {"weights": W, "in_place": live * token, "gathered": 3 * held * token, "tables": 4 * held // block_size}
    slips = {
        "weights": {"The weights are read once for all requests of the step: that is what a batch is for.": W * n,
                    **{said: W * factor for said, factor in slips_of_a_number(spec).items()},
                    "num_parameters counts the weights of all layers already.": W * spec.num_layers},
        "in_place": {said: live * token * factor for said, factor in common.items()} | {said: pair[0] * token for said, pair in tokens.items()}
        | {full: math.nan, "seq_len holds the step's own token already: there is none to add.": (live + n) * token,
           "A kernel that reads in place stops at seq_len: the tail of the last block is not read.": held * token,
           "A decode step has one query for each request, but that query reads the whole context.": n * token,
           "Those are K and V alone: the weights have a number of their own.": live * token + W},
        "gathered": {said: 3 * held * token * factor for said, factor in common.items()} | {said: 3 * pair[1] * token for said, pair in tokens.items()}
        | {"Gather copies whole blocks: the tail of the last one is moved as well.": 3 * live * token,
           "The copy is written, too, and attention then reads it: pool read, copy written, copy read.": held * token,
           "After the copy is written attention reads it: pool read, copy written, copy read.": 2 * held * token,
           "Gather copies whole blocks: the tail of the last one is moved as well. ": 2 * live * token,
           "Gather copies whole blocks: the tail of the last one is moved as well.  ": live * token,
           "Gather copies the blocks of each request: they are counted one by one, not for all tokens in one.": 3 * cdiv(live, block_size) * block_size * token,
           "Each request's last block is copied, too, be it full or not.": 3 * sum(s // block_size for s in seq_lens) * block_size * token,
           "Pool read, copy written, copy read: those are three, not four.": 4 * held * token},
        "tables": table_slips(spec, seq_lens, block_size, live, held) | {full: 4 * sum(s // block_size + 1 for s in seq_lens), twin: 4 * tokens[twin][1] // block_size},
    }  # fmt: skip
    return asked, got, wanted, slips

# %% bytes-5-5-b jupyter={"source_hidden": true}
@ours
def inputs_5_5():
    """(spec, seq_lens, block_size), small ones first."""
    small = ModelSpec("a small model", 3, 4, 2, 5, 20, 100, 700, 64, "float32")
    yield from ((small, seq_lens, 4) for seq_lens in ([1], [4], [6], [3, 9], [8, 1, 5], [3, 3], [7, 2, 7]))
    rng = random.Random(55)
    for name in ("smollm2", "llama-3.1-8b", "opt-13b", "qwen3"):
        yield find_model(name), [rng.randint(1, 900) for _ in range(rng.randint(1, 9))], rng.choice([1, 16, 64])
    yield find_model("opt-13b"), [100_001, 32, 100_001, 7], 32

# %% check-5-5
@check
def exercise_5_5(step_bytes):
    examine(step_bytes, list(inputs_5_5()), case_5_5, spec_text)
    runs = [("smollm2", 1, 500), ("smollm2", 16, 500)]
    runs += [("llama-3.1-8b", 64, 4_000), ("opt-13b", 16, 2_000)]
    for name, batch, seq_len in runs:
        spec = find_model(name)
        read = ask(step_bytes, spec, [seq_len] * batch, 16)
        weights, in_place, gathered, tables = map(float, read)
        print(f"{spec.name:13}{batch:3} requests of {seq_len:5,}: "
              f"weights {weights / 1e9:5.2f} GB, in place {in_place / 1e9:5.2f}, "
              f"gathered {gathered / 1e9:6.2f}, "
              f"tables {tables / 1e3:4.0f} KB; gathering, the step moves "
              f"{(weights + gathered) / (weights + in_place):.2f}x")  # fmt: skip

# %% [markdown]
# These are bytes, not times: a cache may keep what was just copied, and a kernel may wait for other things. The
# chapter measures.

# %% [markdown]
# ## Exercise 5.6: the colleague who sorts
#
# *6 minutes, medium.*
#
# **A colleague's attention sorts the block table of a decode query first, "so that memory is read in order".
# The test, with `seq_len` of one, two and three full blocks, each with a table of just as many blocks, passes,
# whatever their order. In use the answers are noise. Why does the test pass, where does it break, and what else in an engine trusts the table's
# order?** Write five or six lines. A person reads this one; the check cannot.
#
# Test yourself before you hand it in, with your own function of exercise 5.1 and this input:

# %% try-5-6
heads = {"num_kv_heads": 2, "per_kv": 2, "head_dim": 8}
query, pool_5_6, table, _, scaling = paged_input(56, [5, 1, 3], 12, 4, **heads)
print("table", table, "sorted", sorted(table), "block_size", 4)

# %% [markdown]
# | if you claim that | then name |
# |---|---|
# | the order changes nothing | the largest difference between the outputs with `table` and `sorted(table)`, at `seq_len` 12 |
# | full blocks are enough | the same at `seq_len` 8, where the table already has its third block |
# | it is wrong | the same at `seq_len` 11, 10, 9, and which slots are read that should not be |
# | position plays no part, or does | where a key gets its position from, and when |
# | it would break elsewhere, too | the line that trusts the table's order: of a mask, of a write |
#
# A claim without a number, or without a place in the code, is a guess.

# %% tried-5-6 tags=["solution"]
def difference(seq_len):
    one, other = (
        gather_attention(query, pool_5_6, blocks, seq_len, scaling)
        for blocks in (table, sorted(table))
    )
    return float((one - other).abs().max())


for seq_len in (12, 11, 10, 9, 8):
    apart = difference(seq_len)
    print(f"seq_len {seq_len}:", "under 1e-5" if apart < 1e-5 else f"{apart:.2f}")

# %% [markdown] written-5-6 points=2
# A decode query sees all slots of its request, and attention is a sum over pairs of key and value: in whatever
# order the pairs come, the weights and the sum are the same, to rounding. The position isn't lost, since
# it was turned into the key (by the rotary embedding) before the key was written; where the key lies says
# nothing. So with full blocks the sorted table gives the same output: at seq_len 12 the difference is under 1e-5.
# It breaks where the place in the table is used. The slots behind seq_len are cut off from the last block of
# the table; sorted, that is another one, so that written slots are lost and unwritten ones read: the
# difference in the cell above at 11, 10 and 9. At 8 nothing is cut off within a
# block, but the table has a third block: sorted, that one is read, and block 5, with the first four tokens,
# is not (1.03). The test had tables of
# full blocks only, so nothing to cut off. One seq_len in block_size is like that, if no block is held ahead. Two more places trust the order: a mask (a chunk's, a
# window's) compares the place j with the query's position, and the next token's slot is looked up at
# position // block_size: with a sorted table both mean other tokens, and the write would destroy a key
# that is still needed.
#
# **Rubric, 2 points.** One for *why the test passes*: a sum over key-value pairs has no order, and the position
# is in the key, not in its place; with the difference at 12. One for *where it breaks*: the tail is cut from
# the wrong block (with numbers), or another place that trusts the order (mask of a chunk, window, write of the next
# token), explained. No point for "blocks must be in order", "attention needs the order of the words" or "the memory addresses are
# wrong". Samples at three levels stand in `solutions/README.md`.
