# %% [markdown]
# # Exercises of chapter 04: paged blocks
#
# Six exercises, about 95 minutes. They can be done in any order; 4.2 and 4.5 are the ones to keep time
# for.
#
# **How it goes.** Each exercise has a cell to fill in and, below it, a check. Replace the `raise`
# line by your code, then run your cell and all cells down to the check's end. (The folded ones
# between them, shown as dots, are the check's own; read them only if you are curious.) A check that
# passes prints numbers. One that fails shows the smallest case it found, and names the mistake if
# it knows one that fits. The numbers that stand below a check already are what a right answer
# prints; yours appear when you run it. `python -m minikv check 04` in a terminal checks the whole
# notebook.
#
# Click on the heading of exercise 4.1 and choose *Run > Run All Above Selected Cell*. From then on
# each exercise stands by itself.
#
# **Hints** come in three steps, each folded: a nudge, the rule that decides the matter, an
# outline of the code. Open as few as you need.
#
# **Words.** The pool is cut into *blocks*, numbered from 0. Each has `block_size` *slots*, and a slot
# holds the keys and values of one token, in all layers. Block `b` has the slots from
# `b * block_size` on. The *block table* of a request lists its blocks in the order of its tokens; any
# block may stand anywhere in it.
#
# ```text
# block           0              1              2              3
# slot       0  1  2  3     4  5  6  7     8  9 10 11    12 13 14 15
#           A4 A5  .  .     .  .  .  .    A0 A1 A2 A3     .  .  .  .
#
# A has 6 tokens, A0 to A5, in blocks of 4. Its table is [2, 0].
# ```
#
# **Two counters** say where a request stands. `num_tokens` counts its known tokens: the prompt and what
# has been sampled. `num_computed_tokens` counts those whose keys and values lie in the pool. A step
# computes `num_new_tokens` more, from position `num_computed_tokens` on. The token that is sampled
# at a step's end is known, but not computed: the next step computes it, if there is one.

# %% setup
import copy
import math
import random
from collections import Counter, deque  # noqa: F401  (Counter may be of use to you)
from typing import NamedTuple

from minikv import (
    LLM,
    ContiguousKVCacheManager,
    KVCacheManager,
    PagedKVCacheManager,
    Request,
    SamplingParams,
)
from minikv.classroom.harness import ask, begin, check, examine, lent, ours, told
from minikv.classroom.harness.bounds import Delegated, Endless, bounded
from minikv.classroom.harness.values import list_of_numbers
from minikv.kv_cache.base import InvariantBroken, cdiv
from minikv.model.loader import load

# a random model: instant, its text is noise
tiny = load("tiny", dtype="float32", device="cpu")
begin(
    globals(),
    forbidden={"minikv.kv_cache.": "the package's own manager"},
    allowed=["minikv.kv_cache.base"],
)

# %% engine jupyter={"source_hidden": true}
EARLY = "The token sampled at the end of this step needs no slot now: the next step computes it."
FILLED = (
    "(Or n // block_size + 1 was taken for n / block_size, rounded up: one too many where n fills "
    "its blocks.)"
)


@ours
def slabs():
    """Chapter 02's manager, with room enough: a slab for each request, its tokens side by side."""
    return ContiguousKVCacheManager(1024, 1, max_model_len=64)


@ours
def run_engine(manager, lengths):
    """The real engine. lengths: (prompt, output) tokens. Output tokens of each, and preemptions."""
    llm = LLM(tiny, kv_cache_manager=manager, max_num_seqs=8, max_num_batched_tokens=16, check_every_step=True)
    prompts = [[65 + i + k for k in range(prompt)] for i, (prompt, _) in enumerate(lengths)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], sum(o.metrics[0].num_preemptions for o in outputs)

# %% [markdown]
# ## Exercise 4.1: slot mapping
#
# *8 minutes, easy.*
#
# **Where does each token of a step lie in the pool?**
#
# A step computes `num_new_tokens` tokens of a request, from position `num_computed_tokens` on; positions
# count from 0. Return the slot of each, in order. The request is a row of a batch that is `width` places
# wide. The places behind its tokens are padding: they hold no token, so they get `-1`, which says "write
# nothing". The list has `width` entries. A table may hold blocks ahead of the tokens, and a row may
# have no token in this step at all.
#
# ```text
# block_table = [7, 2, 5], block_size = 4, num_computed_tokens = 6, num_new_tokens = 4, width = 6
#
# position            6    7    8    9    .    .
# place in the table  1    1    2    2              position // block_size
# block               2    2    5    5              what the table has there
# place in the block  2    3    0    1              position % block_size
# slot               10   11   20   21   -1   -1
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# Follow position 8 through the picture with a finger. What would change if the table were [7, 2, 0]?
# </details>
# <details><summary>Hint 2: the rule</summary>
# The table turns a place in the sequence of blocks into a block of the pool. Nothing else moves: the
# place within the block is the same before and after.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# for each position from num_computed_tokens on, num_new_tokens of them:
#     block <- block_table[position // block_size]
#     slot  <- the block's first slot + position % block_size
# then -1 until there are width entries
# ```
# </details>

# %% ex-4-1
def slot_mapping(block_table, block_size, num_computed_tokens, num_new_tokens, width):
    """A list of width slots: one for each of the step's tokens, then -1 as padding."""
    ### BEGIN SOLUTION
    slots = []
    for position in range(num_computed_tokens, num_computed_tokens + num_new_tokens):
        block = block_table[position // block_size]
        slots.append(block * block_size + position % block_size)
    return slots + [-1] * (width - num_new_tokens)
    ### END SOLUTION

# %% slots-4-1 jupyter={"source_hidden": true}
@ours
def case_4_1(value, table, block_size, computed, new, width):
    """One row of a step: what was asked, got, wanted, and the usual slips."""
    B, padding, end = block_size, [-1] * (width - new), [*table, *[table[-1]] * 9]  # beyond the table: as its last
    last = table[-len({p // B for p in range(computed, computed + new)}) :]  # were no block held ahead
    asked = f"block_table = {table}, block_size = {B}, num_computed_tokens = {computed}, num_new_tokens = {new}, width = {width}"
    got = list_of_numbers(value, f"slot_mapping must return a list of {width} slots")
    here = range(computed, computed + new)

    def read(positions, table=end):
        return [table[p // B] * B + p % B for p in positions]

    pad = "A place of padding holds no token, so it has no slot: -1, or it overwrites what lies there."
    order = "Blocks need not be neighbours, nor in order: "
    ends = "A chunk may go over the end of its first block, and of further ones: each position has its own place in the table."
    return asked, {"slots": got}, {"slots": read(here) + padding}, {"slots": {
        "The chunk begins at position num_computed_tokens; what lies before it is in the pool already.": read(range(new)) + padding,
        order + "each position is looked up in its own block, not counted on from the table's first.": [table[0] * B + p for p in here] + padding,
        order + "the table stands in the order of the tokens, and sorting it mixes them up.": read(here, sorted(table)) + padding,
        "Those are positions. Where a position lies in the pool, only the table knows.": [*here, *padding],
        "A block id counts blocks, and a slot counts tokens: block b begins at slot b * block_size.": [end[p // B] + p % B for p in here] + padding,
        "Positions count from 0: with n computed tokens the next position is n, not n + 1.": read(range(computed + 1, computed + new + 1)) + padding,
        "The table may hold blocks ahead of the tokens: the chunk's blocks are counted from its front, not from its end.":
            [last[p // B - computed // B] * B + p % B for p in here] + padding,
        ends: [table[computed // B] * B + p % B for p in here] + padding,
        ends + " ": [table[computed // B] * B + computed % B + i for i in range(new)] + padding,
        "The place in the table is position // block_size: it counts from the request's first token, not from the chunk's.": [end[i // B] * B + p % B for i, p in enumerate(here)] + padding,
        "The place inside a block follows from the position, not from the place in the chunk.": [end[p // B] * B + i % B for i, p in enumerate(here)] + padding,
        pad: read(range(computed, computed + width)), pad + " ": read(here) + [0] * len(padding), pad + "  ": read(here) + (read(here) or [0])[-1:] * len(padding),
        "One slot or -1 for each of the row's places was asked for: the padding is missing.": read(here),
        "The padding stands behind the tokens here, not before them.": padding + read(here),
    }}  # fmt: skip

# %% slots-4-1-b jupyter={"source_hidden": true}
@ours
def inputs_4_1():
    """(table, block_size, num_computed_tokens, num_new_tokens, width), small ones first."""
    yield from [([2], 4, 0, 1, 1), ([1], 4, 1, 2, 2), ([1], 4, 0, 1, 3), ([3, 1], 2, 2, 1, 2), ([2, 0], 4, 3, 3, 5)]
    yield from [([7, 2, 5], 4, 0, 2, 2), ([5, 3], 4, 2, 0, 2)]  # a block held ahead; a row without tokens
    rng = random.Random(41)
    for block_size in (1, 2, 3, 4, 8, 16):
        for _ in range(6):
            num_blocks = rng.randint(1, 5)
            table = rng.sample(range(12), num_blocks)
            known = rng.randint((num_blocks - 1) * block_size + 1, num_blocks * block_size)
            new = rng.choice([1, known, rng.randint(1, known)])  # a decode step, a whole prompt, a chunk
            ahead = rng.sample(range(12, 20), rng.choice([0, 0, 1, 3]))
            yield table + ahead, block_size, known - new, new, new + rng.choice([0, 0, 1, 4])
    yield [5_000, 70_000, 80, 4_097], 16, 14, 40, 42  # a pool of many gigabytes

# %% check-4-1
@check
def exercise_4_1(slot_mapping):
    inputs = list(inputs_4_1())
    examine(slot_mapping, inputs, case_4_1)
    num_single = sum(new == 1 for *_, new, _ in inputs)
    num_padded = sum(width > new for *_, new, width in inputs)
    kinds = f"{num_single} of one token, {num_padded} with padding"
    print(f"{len(inputs)} rows right: {kinds}")
    for table in ([7, 2, 5], [7, 2, 0]):
        print(f"the table {table}: slots {list(ask(slot_mapping, table, 4, 6, 4, 6))}")

# %% [markdown]
# Another block for the same tokens is another number in the table, and nothing else. That is why a
# block may be any block.

# %% [markdown]
# ## Exercise 4.2: a paged manager in the engine
#
# *30 minutes, hard.*
#
# **Write a KV-cache manager that gives a request blocks as it grows, and takes them back.** It then
# serves a real model.
#
# What you inherit from `KVCacheManager`, and may use:
#
# | | |
# |---|---|
# | `self.tables` | request_id → block table, for every request that holds one |
# | `self.set_table(request, block_ids)` | notes the table of a request, and returns it |
# | `self.drop_table(request)` | forgets the table and returns it; an empty one if there was none |
# | `self.num_blocks`, `self.block_size` | blocks in the pool; tokens in a block |
# | `request.request_id`, `request.num_computed_tokens` | its name; its tokens whose keys and values lie in the pool |
# | `cdiv(a, b)` | a / b, rounded up |
#
# - `allocate_slots(request, num_new_tokens)` is called before every step that the request is in. The
#   step computes `num_new_tokens` tokens beyond `num_computed_tokens`: a whole prompt, a chunk of one, or
#   one token. Each of them needs a slot. Take as many blocks as that needs, no more, add them at the
#   table's end, and return the table. If there are too few free blocks, return `None`, not an empty
#   list: it means "not now". Then nothing may have changed.
# - `free(request)` takes all its blocks back. A request that holds nothing may be freed as well; then
#   nothing happens.
# - Any free block will do. `__init__` lists the free ones; keep them otherwise if you like. What stands in
#   `minikv/kv_cache/paged.py` (`BlockPool`, the free queue, the manager) is what you rebuild: don't call it.
#
# ```text
# block_size = 4          num_computed_tokens   num_new_tokens   slots needed   table
# A, a prompt of 3                          0                3              3   [0]
# A, its first token                        3                1              4   [0]        the block is full now
# B, a prompt of 5                          0                5              5   [1, 2]
# A, its second token                       4                1              5   [0, 3]     not neighbours
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# How many tokens of the request have keys and values after this step? Is the token that the step
# samples one of them?
# </details>
# <details><summary>Hint 2: the rule</summary>
# After the step, num_computed_tokens + num_new_tokens tokens lie in the pool. Blocks that the request
# holds stay where they are in its table. First find out whether enough are free, then take.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# allocate_slots:  table <- what the request holds, or an empty list
#                  more <- blocks for (computed + new) tokens, rounded up, less those in the table
#                  more than are free?  return None
#                  take so many from the free blocks; set the table with them at its end; return it
#
# free:            table <- drop_table;  put its blocks among the free ones
# ```
# </details>

# %% ex-4-2
class MyManager(KVCacheManager):
    """Takes blocks when tokens to be computed need them, gives them back at the end."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.free_block_ids = deque(range(num_blocks))

    def allocate_slots(self, request, num_new_tokens):
        ### BEGIN SOLUTION
        table = self.tables.get(request.request_id, [])
        # Tokens counted: those in the pool after this step. The one it samples is not.
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = cdiv(num_tokens, self.block_size) - len(table)
        if more > len(self.free_block_ids):
            return None
        new = [self.free_block_ids.popleft() for _ in range(more)]
        return self.set_table(request, table + new)
        ### END SOLUTION

    def free(self, request):
        ### BEGIN SOLUTION
        self.free_block_ids.extend(self.drop_table(request))
        ### END SOLUTION

# %% watch-4-2 jupyter={"source_hidden": true}
@ours
def judge_tables(manager, request, num_new_tokens, before, got):
    """After allocate_slots. before: all tables as they were."""
    name, B, old = request.request_id, manager.block_size, before.get(request.request_id, [])
    num_tokens = request.num_computed_tokens + num_new_tokens
    more = max(len(old), cdiv(num_tokens, B)) - len(old)
    now = tables_of(manager)
    in_use = {block: owner for owner, table in before.items() for block in table}
    free = manager.watch_size - len(in_use)
    if more > free and got is not None and (not hasattr(got, "__len__") or list(got) in ([], old)):
        raise AssertionError(f"{name} needs {more} more blocks, and {free} are free. Say \"not now\" with None, not with {got!r:.80}.")
    if got is None:
        assert now == before or more > free, (
            f"allocate_slots returned None, but {name} has the table {now.get(name)} now: is its `return` missing?"
        )
        assert now == before, (
            f"A refusal must change nothing, but {name}, refused, has the table {now.get(name)}; before: {old or 'none'}."
        )
        assert more > free, refused(manager, request, old, more, free)
        manager.watch_refused += 1
        return
    table = list_of_block_ids(got)
    given = f"{name} has {request.num_computed_tokens} computed tokens, computes {num_new_tokens} more, and got the table {table}."
    noted = now.pop(name, None)
    assert noted in (None, table) or table[: len(noted)] == noted, f"{given} In self.tables stands {noted}: return all of that."
    assert noted == table, f"{given} In self.tables stands {noted}: call set_table."
    assert name in manager.requests, f"{given} The table is noted, but not the request, which the engine needs: set_table does both."
    before.pop(name, None)
    assert now == before, f"{given} Another request's table was changed: {now}; before: {before}."
    assert set(old) <= set(table), f"{given} Its tokens lie in {old}: new blocks come behind those, not in their place."
    assert table[: len(old)] == old, f"{given} Its tokens lie in {old}: those blocks must stay where they are in the table."
    judge_length(manager, request, num_new_tokens, old, table, given)
    for block in table[len(old) :]:
        assert 0 <= block < manager.watch_size, f"{given} There is no block {block}: the pool has 0 to {manager.watch_size - 1}."
        assert table.count(block) == 1, f"{given} Block {block} stands in it twice. Was it taken, or given back, twice?"
        assert block not in in_use, f"{given} Block {block} is held by {in_use.get(block)}. Was it taken, or given back, twice?"

# %% watch-4-2-b jupyter={"source_hidden": true}
@ours
def refused(manager, request, old, more, free):
    """Why a refusal was wrong: by what happened before it."""
    if more == 0:
        return f"{request.request_id} needs no new block, and was refused: return its table as it is."
    unused = set(range(manager.watch_size)).difference(*tables_of(manager).values())
    starts = [old[-1] + 1] if old and more < free else unused
    neighbours = any(unused.issuperset(range(block, block + more)) for block in starts)
    said = f"{request.request_id} needs {more} more blocks and was refused, but {free} are held by nobody."
    if not neighbours:
        return f"{said} Any free blocks will do; they need not be neighbours."
    if manager.watch_refused:
        return f"{said} An earlier refusal kept some of them? A refusal must change nothing."
    if manager.watch_gone:
        return f"{said} Freed blocks have to be given out again."
    if more == free:
        return f"{said} The last free block can be taken as well."
    if cdiv(request.max_kv_tokens, manager.block_size) - len(old) > free:
        return f"{said} Room for this step's tokens is all that is asked for; what comes later may find room later."
    if len(manager.watch_log) == 1:
        return f"{said} It is the first request, in an empty pool. None means refused: is a `return` missing?"
    return said


@ours
def too_few_free(manager, request, num_new_tokens, before):
    """Whether so many tokens need more blocks than the tables before the call left free."""
    num_blocks = cdiv(request.num_computed_tokens + num_new_tokens, manager.block_size)
    num_held = len(before.get(request.request_id, ()))
    return num_blocks - num_held > manager.watch_size - sum(map(len, before.values()))

# %% watch-4-2-d jupyter={"source_hidden": true}
@ours
def slips_4_2(B, computed, new, num_tokens, longest, held):
    """{what to say: how many blocks the table would have then}"""
    moment = "{} % block_size == 0 is the wrong moment."
    return {
        moment.format("num_tokens"): held + (num_tokens % B == 0) if held else None,
        moment.format("num_computed_tokens"): held + (computed % B == 0) if held else None,
        "One block is not always enough: a chunk may need several.": held + min(1, max(0, cdiv(computed + new, B) - held)) if held else None,
        "The last block that it holds has room left, which comes first.": held + cdiv(new, B),
        f"{EARLY} {FILLED}": cdiv(computed + new + 1, B),
        "Blocks for tokens that may come later are a reservation, as in chapter 02.": cdiv(longest, B),
        "num_tokens counts tokens that this step does not compute.": cdiv(num_tokens, B),
        "Those are as many blocks as tokens; a block has room for several.": held + new,
        "A last block that is partly full is a block all the same.": (computed + new) // B,
        "The last token of the step needs a slot, too.": cdiv(computed + new - 1, B),
    }  # fmt: skip


@ours
def judge_length(manager, request, new, old, table, given):
    B, computed, have = manager.block_size, request.num_computed_tokens, len(table)
    need = max(len(old), cdiv(computed + new, B))
    slips = slips_4_2(B, computed, new, request.num_tokens, request.max_kv_tokens, len(old))
    excluded = manager.watch_excluded  # slips that would have given other tables before, in any play
    excluded.update(said for said, length in slips.items() if length is not None and max(length, len(old)) != have)
    if have == need:
        return
    sooner = "so this block is taken too early: a block is needed when a token about to be computed lies beyond the last one"
    why = f"{computed + new} tokens need {need} blocks of {B}"
    what = f"{why}: a token about to be computed has no slot." if have < need else f"{why}, {sooner}."
    left = [said for said, length in slips.items() if said not in excluded and length is not None]
    if request.request_id in manager.watch_gone and not old:
        left = [f"{request.request_id} was freed before and comes back, as after a preemption: it holds nothing now."]
    said = "\nOr: ".join(left) if len(left) in (1, 2) else "Another number of blocks was asked for."
    raise AssertionError(f"{said}\n{given} {what}")

# %% watch-4-2-c jupyter={"source_hidden": true}
@ours
def list_of_block_ids(value):
    try:
        return [block.__index__() for block in value]
    except (TypeError, AttributeError):
        raise AssertionError(f"allocate_slots must return a table, a list of block ids, not {value!r:.80}") from None


@ours
def tables_of(manager):
    """All tables, block ids as plain numbers."""
    return {name: list_of_block_ids(table) for name, table in getattr(manager, "tables", {}).items()}


@ours
def watch(manager, name, function, judge, *args):
    """function(*args), a learner's method; then judge(its value, tables before)."""
    before = tables_of(manager)
    calls = "; ".join(manager.watch_log[-8:]) or "none"
    given = f"Calls: {calls}\nTables before the last: {before}"
    try:
        value = bounded(function, *args)
        if name != "__init__":
            said = "self.num_blocks and self.block_size say how large the pool is: keep what "
            pool = manager.num_blocks, manager.block_size
            assert pool == manager.watch_pool, f"{said}changes under another name."
        judge(value, before)
    except NotImplementedError:
        raise  # not yet done
    except AssertionError as error:
        raise AssertionError(f"{error}\n{given}") from None
    except (Exception, Endless, Delegated, SystemExit) as error:
        if name == "free" and args[0].request_id not in before:
            given = f"{args[0].request_id} holds no table. Then free does nothing.\n{given}"
        if name == "allocate_slots" and too_few_free(manager, *args, before):
            early = "Fewer blocks are free than it needs: find that out before taking any"
            given = f"{early}, and return None.\n{given}"
        raise AssertionError(told(name, error, given)) from None
    return value

# %% watch-4-2-f jupyter={"source_hidden": true}
@ours
def watched(kind):
    """`kind`, a learner's manager, with every call judged."""
    right_kind = isinstance(kind, type) and issubclass(kind, KVCacheManager)
    assert right_kind, "MyManager must be a class that inherits from KVCacheManager."

    class Watched(kind):
        watch_excluded = set()  # noqa: RUF012  (meant to be shared)

        def __init__(self, num_blocks, block_size):
            self.watch_log, self.watch_refused, self.watch_gone = [], 0, set()
            self.watch_pool = self.watch_size, _ = num_blocks, block_size
            watch(self, "__init__", super().__init__, lambda *_: None, *self.watch_pool)
            said = "__init__ has to call super().__init__(num_blocks, block_size) first."
            assert hasattr(self, "tables"), said
            hidden = {"allocate_slots", "free", "set_table", "drop_table"} & vars(self).keys()
            said = "and hides the method of this name: choose another one."
            assert not hidden, f"__init__ gives self.{min(hidden)} a value, {said}"

        def allocate_slots(self, request, num_new_tokens):
            def judge(got, before):
                judge_tables(self, request, num_new_tokens, before, got)

            self.watch_log.append(f"allocate_slots({request.request_id}, {num_new_tokens})")
            allocate = super().allocate_slots
            return watch(self, "allocate_slots", allocate, judge, request, num_new_tokens)

        def free(self, request):
            def judge(got, before):
                judge_free(self, request, before)

            self.watch_log.append(f"free({request.request_id})")
            watch(self, "free", super().free, judge, request)
            self.watch_gone.add(request.request_id)

    return Watched

# %% play-4-2 jupyter={"source_hidden": true}
@ours
def play(kind, num_blocks, block_size, moves, max_tokens=4):
    """A new manager after some moves: ("A", 5) comes with a prompt of 5 tokens, or computes so many
    more; ("A", 3, 5) computes 3 of its prompt's 5; "A" leaves; "-A" is preempted, with all that it
    knows. check() after each."""
    manager, requests = kind(num_blocks, block_size), {}
    for move in moves:
        if isinstance(move, str) and move[0] == "-":
            manager.free(requests[move[1:]])
            requests[move[1:]].num_computed_tokens = 0
        elif isinstance(move, str):
            manager.free(requests.pop(move, None) or Request(move, num_prompt_tokens=1))
        else:
            name, new, prompt = (*move, move[1])[:3]
            request = requests.setdefault(name, Request(name, num_prompt_tokens=prompt, max_tokens=max_tokens))
            if manager.allocate_slots(request, new) is not None:
                request.num_computed_tokens += new
                if request.num_computed_tokens == request.num_tokens:
                    request.append(0)  # sampled, not computed
        try:
            manager.check()
        except InvariantBroken as error:
            raise AssertionError(f"check() says: {error}\nCalls: {'; '.join(manager.watch_log[-8:])}") from None
    return manager

# %% play-4-2-b jupyter={"source_hidden": true}
@ours
def judge_free(manager, request, before):
    """After free. before: all tables as they were."""
    name = request.request_id
    assert name not in manager.tables, f"{name} was freed, but its table is still in self.tables: drop_table."
    assert name not in manager.requests, f"{name}'s table is gone, but the request is still noted: drop_table forgets both."
    before.pop(name, None)
    now = tables_of(manager)
    assert now == before, f"free({name}) changed another request's table: {now}; before: {before}."


@ours
def two_at_a_time(kind):
    one, other = kind(4, 2), kind(4, 2)
    first = (one, "A", 0, 3), (other, "A", 0, 3), (one, "B", 0, 1), (other, "B", 0, 2)
    for manager, name, computed, new in (*first, (one, "A", 3, 1), (other, "A", 3, 2)):
        request = Request(name, num_prompt_tokens=computed + new, max_tokens=1)
        request.num_computed_tokens = computed
        try:
            manager.allocate_slots(request, new)
        except AssertionError as error:
            said = "Two managers are in use here, each with a pool of its own."
            raise AssertionError(f"{said}\n{error}") from None


@ours
def random_moves(rng, count, most):
    """Requests come with whole prompts or chunks of them, grow, and leave."""
    moves, running = [], []
    for i in range(count):
        name, prompt = f"R{i}", rng.randint(1, most)
        moves.append((name, rng.choice([prompt, rng.randint(1, prompt)]), prompt))
        running.append(name)
        moves += [(rng.choice(running), 1) for _ in range(rng.randint(0, 4))]
        while running and rng.random() < 0.45:
            moves.append(running.pop(rng.randrange(len(running))))
    return moves

# %% plays-4-2 jupyter={"source_hidden": true}
@ours
def small_plays(managed):
    """The smallest moves first, so that slips are told apart."""
    for first in ([("A", 3)], [("A", 2), ("A", 1)], [("A", 5)]):
        play(managed, 8, 4, first, max_tokens=12)
    for B in (4, 2, 1):
        for prompt in [B, *[B - 1] * (B > 1), B + 1]:
            moves = [("A", prompt), *[("A", 1)] * (B + 2)]
            manager = play(managed, 8, B, moves, max_tokens=8)
            num_blocks = len(manager.tables["A"])
            print(f"blocks of {B}: a prompt of {prompt} and {B + 2} tokens more: {num_blocks} blocks")
    moves = [("A", 3, 7), ("A", 4), ("B", 2), *(("A", 1), ("B", 1)) * 2, ("A", 1), ("B", 1)]
    play(managed, 8, 2, moves)
    play(managed, 4, 2, [("A", 7), ("A", 1)])  # all of the pool
    moves = [("A", 3), ("B", 3), "A", "Z", ("C", 4), "C", "B", ("D", 4), "D", ("E", 8)]
    play(managed, 4, 2, moves)
    play(managed, 4, 2, [("A", 7), "A", ("A", 5), ("A", 1)])  # another one of this name
    moves = [("A", 3), ("A", 1), ("A", 1), "-A", ("B", 1), "B", ("A", 6), "-A", ("A", 2), ("A", 5)]
    play(managed, 4, 2, moves)  # comes back
    play(managed, 8, 1, [("A", 2, 8), ("B", 1), ("A", 6)])  # a chunk that needs many blocks
    moves = [("A", 4), ("B", 4), ("C", 4), ("D", 4), "A", "C", ("E", 8)]
    play(managed, 8, 2, moves)  # no four neighbours
    play(managed, 4, 2, [("A", 4), "A", "A", ("B", 4), ("C", 4), ("D", 4)])  # freed twice
    play(managed, 4, 2, [("A", 4), ("B", 6), ("B", 3), ("C", 5), "A", ("D", 8)])
    moves = [("A", 4), ("B", 5), ("B", 6), ("A", 1), ("B", 2), "A", ("D", 9), ("D", 5), "B", "D", ("E", 8)]
    for _ in range(2):
        play(managed, 4, 2, moves)
    two_at_a_time(managed)

# %% check-4-2
@check
def exercise_4_2(MyManager):
    managed, rng = watched(MyManager), random.Random(42)
    small_plays(managed)
    for B, num_blocks in ((1, 8), (2, 8), (4, 12), (16, 20)):
        most = B * num_blocks
        plays = [random_moves(rng, 9, most // 2) for _ in range(5)]
        logs = [play(managed, num_blocks, B, moves, max_tokens=most) for moves in plays]
        num_calls = sum(len(m.watch_log) for m in logs)
        num_refused = sum(m.watch_refused for m in logs)
        seen = f"{num_calls:3} calls, {num_refused:2} refused"
        print(f"{num_blocks:2} blocks of {B:2}: {seen}")

# %% check-4-2-b
@check
def exercise_4_2_in_the_engine(MyManager):
    managed = watched(MyManager)
    lengths = [(3, 9), (4, 9), (5, 9), (15, 6), (16, 6), (17, 6), (1, 20), (30, 2)]
    expected, _ = run_engine(slabs(), lengths)
    for B in (1, 2, 4, 16):
        manager = managed(64 // B, B)
        tokens, num_preemptions = run_engine(manager, lengths)
        said = f"With blocks of {B} other tokens came out than under slabs."
        assert tokens == expected, said
        assert not manager.tables, f"At the end {list(manager.tables)} still hold blocks."
        # Nothing was lost:
        manager.allocate_slots(Request("all", num_prompt_tokens=64), 64)
        refused = f"{manager.watch_refused:2} refusals, {num_preemptions:2} preemptions"
        print(f"{64 // B:2} blocks of {B:2}: tokens as under slabs; {refused}")

# %% [markdown]
# Now a model whose text you can read: in a cell of your own,
# `LLM("smollm2", kv_cache_manager=MyManager(96, 16), check_every_step=True).generate([...])`.

# %% on-smollm2 tags=["solution", "nbval-ignore-output"]
def on_smollm2(manager):
    questions = ["What is the capital of Italy?", "Name three colours."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    llm = LLM("smollm2", kv_cache_manager=manager, check_every_step=True)
    outputs = llm.generate(chats, SamplingParams(max_tokens=24), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


for answer in on_smollm2(MyManager(96, 16)):
    print(repr(answer))

# %% [markdown]
# ## Exercise 4.3: what a batch holds at its end
#
# *7 minutes, easy.*
#
# **How many blocks do these requests hold, and how much of them is unused?**
#
# All requests of `batch` have just sampled their last token, and none has been freed. Each is a pair
# (prompt tokens, output tokens). Blocks were taken as needed, as in exercise 4.2; nothing is shared. The
# model has `num_layers` layers, and one token's keys and values in one layer take
# `bytes_per_token_and_layer` bytes (K and V together). Return three numbers:
#
# | | |
# |---|---|
# | `num_blocks` | blocks of the pool that the requests hold, together |
# | `unused_slots` | slots in those blocks that hold no token |
# | `unused_bytes` | what those slots take, in all layers |
#
# ```text
# a prompt of 3 (p) and 3 output tokens (a b c), blocks of 4, 10 layers, 100 bytes
#
# [p p p a][b . . .]       c was sampled last
#
# num_blocks = 2, unused_slots = 3, unused_bytes = 3 * 10 * 100 = 3000
# ```
#
# Before you write it, guess: from blocks of 4 to blocks of 16, what happens to the unused slots?
#
# <details><summary>Hint 1: a nudge</summary>
# Which token in the picture lies in no slot? Will it ever?
# </details>
# <details><summary>Hint 2: the rule</summary>
# A request of p + o tokens has computed p + o - 1. Each request rounds up to whole blocks for itself. A
# block spans all layers: layer 7 reads the same table as layer 0.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# for each request:   written <- prompt + output - 1
#                     blocks  <- written / block_size, rounded up
#                     unused  <- blocks * block_size - written
# add them up;  bytes <- unused slots * layers * bytes
# ```
# </details>

# %% ex-4-3
def held_after_generation(batch, block_size, num_layers, bytes_per_token_and_layer):
    """(num_blocks, unused_slots, unused_bytes) when all have sampled their last token."""
    ### BEGIN SOLUTION
    written = [num_prompt + num_output - 1 for num_prompt, num_output in batch]
    num_blocks = sum(cdiv(num_tokens, block_size) for num_tokens in written)
    unused_slots = num_blocks * block_size - sum(written)
    return num_blocks, unused_slots, unused_slots * num_layers * bytes_per_token_and_layer
    ### END SOLUTION

# %% slips-4-3 jupyter={"source_hidden": true}
@ours
def case_4_3(value, batch, block_size, num_layers, layer_bytes):
    """One batch: what was asked, got, wanted, and the usual slips."""
    B, part = block_size, ("num_blocks", "unused_slots", "unused_bytes")
    asked = f"batch = {batch}, block_size = {B}, num_layers = {num_layers}, bytes_per_token_and_layer = {layer_bytes}"
    said = f"held_after_generation must return 3 numbers, ({', '.join(part)})"
    got = list_of_numbers(value, said)
    assert len(got) == 3, f"{said}, not {value!r:.80}"
    written = [prompt + output - 1 for prompt, output in batch]

    def counted(tokens):
        return sum(cdiv(n, B) for n in tokens)

    held, live = counted(written), sum(written)
    unused, last = held * B - live, "The last token sampled is never computed, so it holds no slot."
    full = "n // block_size + 1 is one block too many where n tokens fill their blocks exactly."
    twin = "Requests of equal lengths are several all the same: each holds blocks of its own."
    none = "Paging does not remove all waste: the rest of each request's last block stays unused."
    half = "Half a block for each request is what it comes to on average; here it was to be counted."
    layers = "There is one table for all layers: a block has room for a token's keys and values in each of them."
    return asked, dict(zip(part, got, strict=True)), dict(zip(part, (held, unused, unused * num_layers * layer_bytes), strict=True)), {
        "num_blocks": {full: counted(n + 1 for n in written) if got[1] == sum(B - n % B for n in written) else math.nan,
                       last: math.nan if got[1] == sum(B - n % B for n in written) else counted(n + 1 for n in written), layers: held * num_layers,
                       "What was generated was computed as well, but for the last token.": counted(p for p, _ in batch),
                       "A last block that is partly full is held all the same.": sum(n // B for n in written),
                       "No two of these requests share a block: each has a last block of its own.": cdiv(live, B),
                       twin: counted(p + o - 1 for p, o in set(batch)), twin + " ": counted(set(written)), twin + "  ": counted(p + o - 1 for p, o in dict(batch).items()),
                       "Those are slots in use; blocks were asked for.": live, "Those are slots; blocks were asked for.": held * B},
        "unused_slots": {last: unused - len(batch), none: 0, half: len(batch) * B / 2, half + " ": len(batch) * (B - 1) / 2,
                         "A block that is exactly full leaves no slot unused.": sum(B - n % B for n in written),
                         layers: unused * num_layers, "Those are the slots in use.": live, "Those are all slots held.": held * B},
        "unused_bytes": {none: 0, "A slot holds a token's keys and values in every layer, not in one.": unused * layer_bytes,
                         "The bytes of K and V together are given: nothing is to be doubled.": 2 * unused * num_layers * layer_bytes,
                         "Those are the bytes in use.": live * num_layers * layer_bytes},
    }  # fmt: skip

# %% slips-4-3-b jupyter={"source_hidden": true}
@ours
def inputs_4_3():
    """(batch, block_size, num_layers, bytes), small ones first: single requests, then batches."""
    singles = [([(3, 2)], 4), ([(4, 1)], 4), ([(4, 2)], 4), ([(1, 1)], 1), ([(2, 5)], 4)]
    pairs = [([(3, 2), (5, 3)], 4), ([(1, 1), (2, 1), (5, 9)], 2), ([(3, 2), (3, 2)], 4), ([(3, 2), (3, 4), (2, 3)], 4)]
    yield from ((batch, B, 3, 100) for batch, B in singles + pairs)
    rng = random.Random(43)
    for B in (1, 8, 16, 32):
        yield [(rng.randint(1, 200), rng.randint(1, 80)) for _ in range(rng.randint(2, 7))], B, rng.choice([2, 24, 30]), 768
    yield [(70_001, 100), (90_001, 8), (70_001, 100)], 4096, 80, 8192  # bytes beyond 32 bits

# %% check-4-3
@check
def exercise_4_3(held_after_generation):
    examine(held_after_generation, list(inputs_4_3()), case_4_3)
    rng = random.Random(3)
    batch = [(rng.randint(20, 600), rng.randint(20, 400)) for _ in range(40)]
    for B in (4, 16, 64):
        found = ask(held_after_generation, batch, B, 30, 768)
        num_blocks, unused, num_bytes = map(int, found)
        held = f"{num_blocks:5,} blocks hold {num_blocks * B:6,} slots"
        share = f"{100 * unused / (num_blocks * B):4.1f}%, {unused / 40:4.1f} a request"
        share += f"; {num_bytes / 1e6:5.1f} MB"
        print(f"blocks of {B:2}: {held}, {unused:5,} unused: {share}")

# %% [markdown]
# A request never wastes more than `block_size - 1` slots. If any length is as likely as another, it is half
# of that on average, 1.5, 7.5 and 31.5 slots here. Smaller blocks waste less and make longer tables;
# chapter 05 meets what else they cost.

# %% [markdown]
# ## Exercise 4.4: find the bug
#
# *12 minutes, medium.*
#
# **This rule decides how many blocks a paged manager takes before a step. Find where it fails, then
# mend it.** All around it is right: `Ruled` takes as many blocks as the rule says.

# %% suspect-4-4
def suspect_rule(
    num_computed_tokens, num_new_tokens, num_tokens, num_held_blocks, block_size
):
    """How many blocks to take before a step computes num_new_tokens tokens."""
    if num_held_blocks == 0:  # the request is new
        return cdiv(num_new_tokens, block_size)
    # Where the blocks held are full, take one more:
    return int(num_computed_tokens % block_size == 0)


class Ruled(PagedKVCacheManager):
    """Takes as many blocks as `rule` says."""

    rule = staticmethod(suspect_rule)

    def allocate_slots(self, request, num_new_tokens):
        table = list(self.tables.get(request.request_id, ()))
        counts = request.num_computed_tokens, num_new_tokens, request.num_tokens
        num_new_blocks = self.rule(*counts, len(table), self.block_size)
        if num_new_blocks > self.num_free_blocks:
            return None
        blocks = self.block_pool.get_new_blocks(num_new_blocks)
        return self.set_table(request, table + [block.block_id for block in blocks])

# %% [markdown]
# It has served for weeks: prompts of 3, 4 and 8 tokens, blocks of 4.

# %% served-4-4
lengths = [(3, 9), (4, 9), (8, 9)]
same_tokens = run_engine(Ruled(20, 4), lengths) == run_engine(slabs(), lengths)
print("tokens as under chapter 02's slabs:", same_tokens)

# %% [markdown]
# Then longer prompts came. A step of this engine computes 16 tokens at most, so they go in as *chunks*, one
# a step. A request is alone here. Its prompt comes in chunks of `num_chunk_tokens`, the last one may be
# shorter; each later step computes the token that was sampled last.
#
# ```text
# block_size = 4, a prompt of 6, chunks of 4
#
# step  num_computed_tokens  num_new_tokens  blocks held  blocks needed
#    1                    0               4            1              1
#    2                    4               2            2              2      4 % 4 is 0: one more
#    3                    6               1            2              2
#    4                    7               1            2              2
#    5                    8               1            3              3      8 % 4 is 0: one more
# ```
#
# **a.** Some requests get too few blocks: a token about to be computed has no slot. Find the
# smallest two as `(block_size, num_prompt_tokens, num_chunk_tokens)`: smallest block size first, then the
# shortest prompt, then the smallest chunk. What counts is the request's first step that fails. Paper is
# enough; code is allowed.
#
# - `at_boundary`: that step begins where a block begins.
# - `inside`: that step begins inside a block.
#
# <details><summary>Hint 1: a nudge</summary>
# How many blocks does the rule take at most, once the request holds some? How many can a chunk need?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Step 1 is always right, and so is a step of one token. So look for a second chunk of at least two tokens.
# With blocks of one token, every step begins where a block begins.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# for block_size 1, 2, 3, ...:  for prompt 1, 2, 3, ...:  for chunk 1, 2, 3, ...:
#     held <- 0;  computed <- 0
#     for each step of the prompt:
#         held <- held + what the rule says
#         held < (computed + new) / block_size, rounded up?  is computed a multiple of block_size?
# ```
# </details>

# %% ex-4-4
def failing_cases():
    """(at_boundary, inside), each (block_size, num_prompt_tokens, num_chunk_tokens)."""
    ### BEGIN SOLUTION
    found = {}
    for block_size in range(1, 5):
        for num_prompt_tokens in range(1, 3 * block_size + 3):
            for num_chunk_tokens in range(1, num_prompt_tokens + 1):
                held = computed = 0
                while computed < num_prompt_tokens:
                    new = min(num_chunk_tokens, num_prompt_tokens - computed)
                    counts = computed, new, num_prompt_tokens, held, block_size
                    held += suspect_rule(*counts)
                    if held < cdiv(computed + new, block_size):
                        case = block_size, num_prompt_tokens, num_chunk_tokens
                        found.setdefault(computed % block_size == 0, case)
                        break
                    computed += new
    return found[True], found[False]
    ### END SOLUTION

# %% replay-4-4 jupyter={"source_hidden": true}
@lent
def replay(rule, block_size, prompt, chunk):
    """A request alone, its prompt in chunks, then two tokens more: (step, computed before it, new,
    blocks held, blocks needed) of each step."""
    held = computed = 0
    num_tokens, rows = prompt, []
    while num_tokens < prompt + 3:
        new = min(chunk, num_tokens - computed)
        held += rule(computed, new, num_tokens, held, block_size)
        rows.append((len(rows) + 1, computed, new, held, cdiv(computed + new, block_size)))
        computed += new
        num_tokens += computed == num_tokens
    return rows


@ours
def drawn(rows):
    lines = [f"{step:>4} {computed:>19} {new:>14} {held:>11} {need:>13}" for step, computed, new, held, need in rows]
    return "\n".join(["step num_computed_tokens num_new_tokens blocks held blocks needed", *lines])


@ours
def first_failure(block_size, prompt, chunk):
    """The first row of the suspect's replay with a token that has no slot, or None."""
    return next((row for row in replay(suspect_rule, block_size, prompt, chunk) if row[3] < row[4]), None)

# %% replay-4-4-b jupyter={"source_hidden": true}
@ours
def judge_failing(name, value):
    """Whether `value`, (block_size, prompt tokens, chunk tokens), is the smallest failure of this kind."""
    said = f"{name} must be three whole numbers from 1 to 1,000, (block_size, num_prompt_tokens, num_chunk_tokens)"
    found = list_of_numbers(value, said)
    assert len(found) == 3 and all(n == int(n) and 0 < n <= 1000 for n in found), f"{said}, not {value!r:.80}"
    B, prompt, chunk = map(int, found)
    failure, rows = first_failure(B, prompt, chunk), replay(suspect_rule, B, prompt, chunk)
    shown = f"Replayed, {name}: blocks of {B}, a prompt of {prompt} tokens, chunks of {chunk}\n{drawn(rows[: failure[0] if failure else 6])}"
    if failure is None:
        what = "There every token has its slot."
        if chunk >= prompt:
            what = "All of the prompt is computed in step 1, and the tokens after it one by one: for that the rule is right."
        elif chunk == 1:
            what = "One token a step needs one block at most, and gets it: for that the rule is right."
        raise AssertionError(f"{what}\n{shown}")
    where = "inside" if failure[1] % B else "at_boundary"
    assert where == name, f"The rule fails there, but of the other kind: step {failure[0]} begins at position {failure[1]}.\n{shown}"
    assert (B, prompt, chunk) == smallest(name), (
        f"The rule does fail there. Is there a smaller case? Smaller block size first, then prompt, then chunk.\n{shown}"
    )


@ours
def smallest(name):
    """The smallest (block_size, prompt, chunk) at which the suspect fails so."""
    tried = ((B, prompt, chunk) for B in range(1, 5) for prompt in range(1, 9) for chunk in range(1, 9))
    failures = ((case, first_failure(*case)) for case in tried)
    return next(case for case, row in failures if row and (row[1] % case[0] > 0) == (name == "inside"))

# %% check-4-4
@check
def exercise_4_4(failing_cases):
    value = ask(failing_cases)
    said = "failing_cases must return (at_boundary, inside), each of three numbers"
    right_kind = isinstance(value, list | tuple) and len(value) == 2
    assert right_kind, f"{said}, not {value!r:.100}"
    for name, case in zip(("at_boundary", "inside"), value, strict=True):
        judge_failing(name, case)
    for name, case in zip(("at_boundary", "inside"), value, strict=True):
        B, prompt, chunk = map(int, case)
        print(f"{name}: blocks of {B}, a prompt of {prompt}, chunks of {chunk}")
        print(drawn(replay(suspect_rule, B, prompt, chunk)[:2]))

# %% [markdown]
# What the engine says to a prompt of 23, which comes as 16 and 7:

# %% refused-4-4
try:
    run_engine(Ruled(20, 4), [(23, 9)])
except InvariantBroken as error:
    print("InvariantBroken:", error)

# %% [markdown]
# **b.** Mend it. The mended rule must hold for any step: a whole prompt, a chunk of one, a sampled token. It
# returns an int.

# %% ex-4-4-b
def mended_rule(
    num_computed_tokens, num_new_tokens, num_tokens, num_held_blocks, block_size
):
    """How many blocks to take before a step computes num_new_tokens tokens."""
    ### BEGIN SOLUTION
    return cdiv(num_computed_tokens + num_new_tokens, block_size) - num_held_blocks
    ### END SOLUTION

# %% cases-4-4 jupyter={"source_hidden": true}
@ours
def case_4_4(value, computed, new, num_tokens, held, block_size):
    """One step: what was asked, got, wanted, and the usual slips."""
    B, after = block_size, computed + new
    asked = f"num_computed_tokens = {computed}, num_new_tokens = {new}, num_tokens = {num_tokens}, num_held_blocks = {held}, block_size = {B}"
    assert hasattr(value, "__index__"), f"mended_rule must return an int, a number of blocks, not {value!r:.80}"
    got = int(value)
    before = "num_tokens - 1 tokens lie in the pool before a sampled token is computed, not while a prompt comes in chunks."
    apart = "A chunk that begins inside a block first fills that block. What is left over may need new ones, several of them."
    one = "A step may compute many tokens: a chunk that begins inside a block can cross a boundary, or several."
    slips = {
        "That is the rule as it was found.": cdiv(new, B) if held == 0 else int(computed % B == 0),
        "num_tokens % block_size == 0 is the wrong moment.": cdiv(new, B) if held == 0 else int(num_tokens % B == 0),
        "With num_tokens % block_size == 1 blocks of one token never come (n % 1 is 0), and a chunk gets one block for many.":
            cdiv(new, B) if held == 0 else int(num_tokens % B == 1),
        before: cdiv(new, B) if held == 0 else int((num_tokens - 1) % B == 0), before + " ": int((num_tokens - 1) % B == 0),
        one: int(after > held * B), one + " ": int(computed % B == 0), **{one + " " * n: min(n, cdiv(after, B) - held) if held else cdiv(after, B) for n in (2, 3)},
        apart: cdiv(new, B) if computed % B == 0 else 0, apart + " ": cdiv(new, B) if computed % B == 0 else new // B,
        apart + "  ": cdiv(new, B) if computed % B == 0 else int(computed % B + new > B),
        "num_tokens counts the whole prompt, also what this step does not compute.": cdiv(num_tokens, B) - held,
        f"{EARLY} {FILLED}": cdiv(after + 1, B) - held,
        "So many blocks are needed in all; those held already are not taken again.": cdiv(after, B),
        "The last block held may have room: new tokens go there first.": cdiv(new, B),
        "A last block that is partly full is a block all the same.": after // B - held,
        "A last block that is partly full is a block all the same. ": max(0, after // B - held),
    }  # fmt: skip
    return asked, {"number of new blocks": got}, {"number of new blocks": cdiv(after, B) - held}, {"number of new blocks": slips}

# %% cases-4-4-b jupyter={"source_hidden": true}
@ours
def inputs_4_4():
    """Steps of requests alone, in chunks and whole, small block sizes first."""
    for B, prompt, chunk in [(4, 4, 4), (1, 1, 1), (2, 2, 2), (2, 1, 1), (2, 9, 5), (4, 5, 5), (4, 12, 12), (4, 13, 3), (4, 13, 9), (4, 30, 9), (1, 5, 2), (1, 10, 9), (1, 13, 4), (16, 40, 25), (2, 90, 41)]:
        computed = held = 0
        num_tokens = prompt
        for _ in range(2 * B + 3):
            new = min(chunk, num_tokens - computed)
            yield computed, new, num_tokens, held, B
            computed += new
            held = cdiv(computed, B)
            num_tokens += computed == num_tokens


@ours
def judge_mended_engine(mended_rule):
    Mended = type("Mended", (Ruled,), {"rule": staticmethod(mended_rule)})
    lengths = [(3, 9), (4, 9), (5, 9), (8, 9), (16, 3), (33, 6)]
    expected, _ = run_engine(slabs(), lengths)
    for B in (1, 2, 4, 16):
        try:
            tokens, _ = run_engine(Mended(128 // B, B), lengths)
        except Exception as error:
            said = f"the rule ends in {type(error).__name__}: {error}"
            raise AssertionError(f"In the engine, with blocks of {B}, {said}") from error
        assert tokens == expected, f"With blocks of {B} other tokens came out than under slabs."

# %% check-4-4-b
@check
def exercise_4_4_mended(mended_rule):
    inputs = list(inputs_4_4())
    examine(mended_rule, inputs, case_4_4)
    num_many = sum(new > 1 for _, new, *_ in inputs)
    print(f"{len(inputs)} steps right, {num_many} of them with more than one token")
    judge_mended_engine(mended_rule)
    print("engine, blocks of 1, 2, 4 and 16: tokens as under slabs")

# %% [markdown]
# The mended rule needs no case for a new request, and it doesn't ask for `num_tokens`. The suspect asked
# *when* a block is needed, which is enough for one token at a time. *How many slots must there be after this
# step?* is a question that any step can answer.

# %% [markdown]
# ## Exercise 4.5: an invariant checker
#
# *30 minutes, hard.*
#
# **Write the check that catches a broken manager before it gives a wrong answer.** A manager's books are
# given as plain data:

# %% books-4-5-b
class Books(NamedTuple):
    """A paged manager's books at one moment.

    tables: name -> block ids, in the order of the tokens.
    num_computed_tokens: name -> tokens.
    ref_cnt: for each block of the pool, how many tables name it.
    free: ids of blocks that nobody holds and nobody wants.
    cached_free: ids of blocks that nobody holds, whose content is kept for reuse.
    """

    num_blocks: int
    block_size: int
    tables: dict
    num_computed_tokens: dict
    ref_cnt: list
    free: list
    cached_free: list


Books(5, 2, {"A": [3, 1], "B": [3, 0]}, {"A": 3, "B": 4}, [1, 1, 0, 2, 0], [4], [2])

# %% [markdown]
# ```text
# block       0         1         2            3         4
#             B         A         cached_free  A and B   free
# ref_cnt     1         1         0            2         0
# ```
#
# `check_books(books)` raises `InvariantBroken("...")` where the books contradict each other, with a
# message that helps to find the fault, and returns nothing where they don't. Right books keep four
# rules:
#
# 1. Every block that a table, `free` or `cached_free` names exists: its id is one of 0 to
#    `num_blocks - 1`.
# 2. Every block of the pool is in exactly one place, once: it is named by tables, or it stands in
#    `free`, or in `cached_free`. Several tables may share it, but no table names it twice.
# 3. `ref_cnt` of a block is the number of tables that name it.
# 4. Every request with computed tokens has a table, with a slot for each of them.
#
# Whatever keeps them must pass: blocks in any order; a block that several requests share; a free block
# that is kept for reuse; a last block that is exactly full; a table that holds blocks ahead. Sharing
# and reuse come in chapter 07; here they are numbers in lists.
#
# How can each rule be broken? Think of it before you open a hint: a real manager has made each of the
# mistakes that the check tries, and some cancel out in a sum.
#
# <details><summary>Hint 1: a nudge</summary>
# Pick a block. Where may it be? How many of these places may it be in at once, and how often in each?
# </details>
# <details><summary>Hint 2: the rule</summary>
# A sum, a set or a sorted list hides what one block or one request does wrong: look at each of them by
# itself. And look both ways: at what the lists name (does the pool have it?), and at what the pool has
# (do the lists name it?).
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# for each id in any table, in free, in cached_free:  exists?
# names <- an empty list for each block of the pool
# for each table:    for each block:  not in this table before?  then note the request there
# for each request with computed tokens:  slots of its table (0 without one) < tokens?  broken
# for each block:    places <- (1 if it has names) + times in free + times in cached_free;  must be 1
#                    number of names = ref_cnt?
# ```
# </details>

# %% ex-4-5
def check_books(books):
    """Raises InvariantBroken where the books contradict each other."""
    ### BEGIN SOLUTION
    holders = {block: [] for block in range(books.num_blocks)}
    lists = {"free": books.free, "cached_free": books.cached_free}
    for name, blocks in (*books.tables.items(), *lists.items()):
        for block in blocks:
            if block not in holders:
                raise InvariantBroken(f"{name} names block {block}, which the pool lacks")
    for name, table in books.tables.items():
        for block in table:
            if name in holders[block]:
                raise InvariantBroken(f"{name} names block {block} twice")
            holders[block].append(name)
    for name, num_tokens in books.num_computed_tokens.items():
        num_slots = len(books.tables.get(name, ())) * books.block_size
        if num_slots < num_tokens:
            raise InvariantBroken(f"{name}: {num_tokens} tokens in {num_slots} slots")
    for block, names in holders.items():
        num_listed = books.free.count(block) + books.cached_free.count(block)
        if bool(names) + num_listed != 1:
            raise InvariantBroken(f"block {block}: in {names}, {num_listed}x in lists")
        if len(names) != books.ref_cnt[block]:
            raise InvariantBroken(
                f"block {block}: ref_cnt is {books.ref_cnt[block]}, but {names} name it"
            )
    ### END SOLUTION

# %% books-4-5 jupyter={"source_hidden": true}
@ours
class Keeper:
    """A right manager on plain data: blocks are shared, and kept for reuse when freed."""

    def __init__(self, num_blocks, block_size, rng):
        self.block_size, self.rng, self.tables, self.num_computed_tokens = block_size, rng, {}, {}
        self.free, self.cached_free = rng.sample(range(num_blocks), num_blocks), []
        self.ref_cnt = [0] * num_blocks

    def take(self):
        return self.share((self.free or self.cached_free).pop(0))

    def share(self, block):
        self.ref_cnt[block] += 1
        return block

    def let_go(self, block):
        self.ref_cnt[block] -= 1
        if self.ref_cnt[block] == 0:
            self.rng.choice([self.free, self.cached_free]).append(block)

    def start(self, name, num_tokens, parent=None):
        full = self.num_computed_tokens.get(parent, 0) // self.block_size
        hit = self.tables.get(parent, [])[: min(full, (num_tokens - 1) // self.block_size)]
        self.tables[name] = [self.share(block) for block in hit]
        self.grow(name, num_tokens)

    def grow(self, name, num_tokens):
        known = self.num_computed_tokens[name] = self.num_computed_tokens.get(name, 0) + num_tokens
        while len(self.tables[name]) * self.block_size < known:
            self.tables[name].append(self.take())

    def leave(self, name):
        del self.num_computed_tokens[name]
        for block in reversed(self.tables.pop(name)):
            self.let_go(block)

# %% broken-4-5 jupyter={"source_hidden": true}
ALONE = Books(5, 2, {"A": [3, 1]}, {"A": 3}, [0, 1, 0, 1, 0], [4, 0], [2])
PAIR = Books(
    5, 2, {"A": [3, 1], "B": [3, 0]}, {"A": 3, "B": 4}, [1, 1, 0, 2, 0], [4], [2]
)
TWO = Books(5, 2, {"A": [0, 1, 2], "B": [3]}, {"A": 5, "B": 2}, [1, 1, 1, 1, 0], [4], [])


@ours
def put(books, block, place):
    """books with one block more in `free` or `cached_free`."""
    return books._replace(**{place: [*getattr(books, place), block]})


@ours
def broken_books():
    """(what the manager does wrong, the smallest books that show it). Each breaks one rule."""
    yield from broken_slots()
    yield from broken_places()
    yield from broken_counts()
    yield from broken_ids()


@ours
def broken_slots():
    early = "takes a block when num_tokens % block_size == 0: a computed token has no slot"
    yield early, ALONE._replace(num_computed_tokens={"A": 5})
    one = "gives one request a slot too few, while another holds blocks ahead"
    yield one, TWO._replace(num_computed_tokens={"A": 1, "B": 3})
    yield one, TWO._replace(tables={"A": [3], "B": [0, 1, 2]}, num_computed_tokens={"A": 3, "B": 1})
    lost = "drops the table of a request that goes on: its computed tokens have no slot"
    yield lost, ALONE._replace(num_computed_tokens={"A": 3, "B": 1})

# %% broken-4-5-b jupyter={"source_hidden": true}
@ours
def broken_places():
    yield "loses the tail of a table on free: the block is in no table and in no list", ALONE._replace(free=[4])
    yield "loses the last block of the pool", ALONE._replace(free=[0])
    yield "drops a cached block instead of keeping it in a list", ALONE._replace(cached_free=[])
    yield "gives a block back twice: it stands in `free` twice", put(ALONE, 4, "free")
    yield "keeps a block for reuse twice: it stands in `cached_free` twice", put(ALONE, 2, "cached_free")
    yield "gives a block back to both lists: to `free` and to `cached_free`", put(ALONE, 2, "free")
    yield "loses one block and lists another twice, so that the counts add up", ALONE._replace(free=[4, 4])
    yield "frees a shared block with its first holder: B still reads it", put(
        PAIR._replace(tables={"B": [3, 0]}, num_computed_tokens={"B": 4}, ref_cnt=[1, 0, 0, 1, 0]), 3, "free")._replace(cached_free=[2, 1])  # fmt: skip
    yield "hands out a cached block and leaves it in `cached_free`", put(ALONE, 1, "cached_free")
    twice = "gives the same block to a request twice"
    for count in (2, 1):
        yield twice, ALONE._replace(tables={"A": [3, 3]}, ref_cnt=[0, 0, 0, count, 0], free=[4, 0, 1])
    for first, second in (([3, 0, 3], [1]), ([1], [3, 0, 3])):
        yield twice, TWO._replace(tables={"A": first, "B": second}, num_computed_tokens={"A": 1, "B": 1},
                                  ref_cnt=[1, 1, 0, 2, 0], free=[4, 2])  # fmt: skip

# %% broken-4-5-c jupyter={"source_hidden": true}
@ours
def broken_counts():
    yield "does not count a second holder: ref_cnt is too low", PAIR._replace(ref_cnt=[1, 1, 0, 1, 0])
    yield "does not count a third holder: ref_cnt is too low", Books(
        4, 2, {"A": [1], "B": [1, 0], "C": [1]}, {"A": 2, "B": 3, "C": 2}, [1, 2, 0, 0], [3], [2])  # fmt: skip
    yield "counts the second holder at another block, so that the sum is right", PAIR._replace(ref_cnt=[2, 1, 0, 1, 0])
    yield "does not count a holder down when it leaves: ref_cnt is too high", ALONE._replace(ref_cnt=[0, 1, 0, 2, 0])
    forgets = "frees a block and forgets to set its ref_cnt to 0"
    yield forgets, ALONE._replace(ref_cnt=[0, 1, 0, 1, 1])
    yield forgets, ALONE._replace(ref_cnt=[1, 1, 0, 1, 0])
    yield forgets, ALONE._replace(ref_cnt=[0, 1, 1, 1, 0])


@ours
def broken_ids():
    yield "gives out block -1, which Python takes for the last of a list", Books(3, 2, {"A": [0, -1]}, {"A": 3}, [1, 0, 1], [1], [])
    for block in (5, -1):
        yield f"gives out a block that the pool does not have, {block}", ALONE._replace(tables={"A": [3, 1, block]})
        yield f"lists block {block} in `free`, which is none of the pool's", put(ALONE, block, "free")
        yield f"lists block {block} in `cached_free`, which is none of the pool's", put(ALONE, block, "cached_free")
    yield "gives out a block that the pool does not have, 9, to the first of two", PAIR._replace(
        tables={"A": [3, 1, 9], "B": [3, 0]})  # fmt: skip

# %% right-4-5 jupyter={"source_hidden": true}
@ours
def right_books():
    """(what is right about it though it may look wrong, books)."""
    yield "an empty pool", Books(3, 2, {}, {}, [0, 0, 0], [0, 1, 2], [])
    yield "one request", Books(3, 2, {"A": [0, 1]}, {"A": 3}, [1, 1, 0], [2], [])
    yield "a last block that is exactly full: the token just sampled needs no slot yet", Books(3, 2, {"A": [0, 1]}, {"A": 4}, [1, 1, 0], [2], [])
    yield "blocks that are no neighbours and not in order", Books(4, 2, {"A": [3, 0, 2]}, {"A": 5}, [1, 0, 1, 1], [1], [])
    yield "a free list that is not in order", Books(4, 2, {"A": [0]}, {"A": 1}, [1, 0, 0, 0], [3, 1, 2], [])
    yield "two tables that share a block, whose ref_cnt is 2", Books(4, 2, {"A": [0, 1], "B": [0, 2]}, {"A": 3, "B": 4}, [2, 1, 1, 0], [3], [])
    yield "freed is not erased: a block that nobody holds, kept in `cached_free` for reuse", Books(4, 2, {"A": [1]}, {"A": 2}, [0, 1, 0, 0], [3, 2], [0])
    yield "three tables that share two blocks", Books(
        6, 1, {"A": [4, 1], "B": [4, 1, 0], "C": [4, 1, 3]}, {"A": 2, "B": 3, "C": 3}, [1, 3, 0, 1, 3, 0], [5], [2])  # fmt: skip
    yield "a pool without a free block", Books(2, 1, {"A": [1], "B": [0]}, {"A": 1, "B": 1}, [1, 1], [], [])
    yield "a request admitted, nothing computed yet", Books(2, 2, {"A": [1]}, {"A": 0}, [0, 1], [0], [])
    yield "a table that holds blocks ahead", Books(4, 2, {"A": [2, 0, 3]}, {"A": 1}, [1, 0, 1, 1], [1], [])
    yield "requests in another order than their tables", TWO._replace(num_computed_tokens={"B": 2, "A": 6})
    ids = list(range(700, 400, -1))  # ids that Python makes anew each time: `is` does not compare them
    yield "a large pool", Books(
        701, 16, {"A": ids}, {"A": 4_800}, [*[0] * 401, *[1] * 300], list(range(350)), list(range(350, 401)))  # fmt: skip


@ours
def traffic(rng, num_blocks, block_size, count):
    """The books of a right manager after each move of some random traffic."""
    keeper = Keeper(num_blocks, block_size, rng)
    for i in range(count):
        names, new = list(keeper.tables), rng.randint(1, 3 * block_size)
        move = rng.choice(["start", "start", "grow", "leave"]) if names else "start"
        if move == "leave":
            keeper.leave(rng.choice(names))
        elif len(keeper.free) + len(keeper.cached_free) <= cdiv(new, block_size):
            continue
        elif move == "grow":
            keeper.grow(rng.choice(names), new)
        else:
            keeper.start(f"R{i}", new + block_size, rng.choice([None, *names]))
        parts = keeper.tables, keeper.num_computed_tokens, keeper.ref_cnt
        lists = keeper.free, keeper.cached_free
        yield Books(num_blocks, block_size, *copy.deepcopy((*parts, *lists)))

# %% spoilt-4-5 jupyter={"source_hidden": true}
@ours
def spoilt(books, rng):
    """(what is wrong, books) of right books in which one thing was changed."""
    counts, ids = list(books.ref_cnt), range(books.num_blocks)
    one, other = rng.sample(ids, 2)
    if counts[one] != counts[other]:
        counts[one], counts[other] = counts[other], counts[one]
        yield f"swaps the ref_cnt of {one} and {other}", books._replace(ref_cnt=counts)
    counts = [n + (i == one) * rng.choice([-1, 1]) for i, n in enumerate(books.ref_cnt)]
    yield f"counts block {one} wrong", books._replace(ref_cnt=counts)
    place = rng.choice(["free", "cached_free"])
    yield f"lists block {one} once more", put(books, one, place)
    unknown = rng.choice([-1, -books.num_blocks, books.num_blocks, 10 * books.num_blocks])
    yield f"lists block {unknown}", put(books, unknown, place)
    if getattr(books, place):
        yield "loses a listed block", books._replace(**{place: getattr(books, place)[1:]})
    for name in rng.sample(list(books.tables), min(1, len(books.tables))):
        table = books.tables[name]
        many = {**books.num_computed_tokens, name: len(table) * books.block_size + 1}
        yield f"gives {name} a slot too few", books._replace(num_computed_tokens=many)
        for bad, what in ((table[0], "twice"), (unknown, "which the pool lacks")):
            tables = {**books.tables, name: [*table, bad]}
            yield f"gives {name} block {bad}, {what}", books._replace(tables=tables)
        tables = {other: held for other, held in books.tables.items() if other != name}
        yield f"forgets the table of {name}", books._replace(tables=tables)

# %% verdict-4-5 jupyter={"source_hidden": true}
@ours
def objection(check_books, books):
    """What the learner's checker has against the books; None if it has nothing."""
    before, shown = copy.deepcopy(books), f"The books: {books}"
    try:
        value = bounded(check_books, books)
    except InvariantBroken as error:
        assert str(error).strip(), f"InvariantBroken needs a message: which block or request, and what is wrong?\n{shown}"
        return str(error)
    except NotImplementedError:
        raise  # not yet done
    except (Exception, Endless, Delegated) as error:
        more = "Do all names and ids have an entry where they are looked up?\n" if isinstance(error, LookupError) else ""
        if isinstance(error, AssertionError | ValueError | RuntimeError) and str(error):
            more = "If this is what it says of broken books: it has to raise InvariantBroken.\n"
        raise AssertionError(told("check_books", error, more + shown)) from None
    assert value is None, f"check_books must raise InvariantBroken, or return nothing; it returned {value!r:.80}."
    assert books == before, f"check_books changed the books: work on a copy.\nThey were {before}"
    return None

# %% verdict-4-5-b jupyter={"source_hidden": true}
@ours
def judge_checker(check_books):
    """Right books pass, broken ones don't; the small ones first. How many of each there were."""

    def passes(books, what):
        said = objection(check_books, books)
        right = f"False alarm. These books are right ({what}), but check_books says: {said}"
        assert said is None, f"{right}\nThe books: {books}"

    def fails(books, what):
        missed = f"Missed. The manager {what}. check_books finds nothing wrong."
        assert objection(check_books, books), f"{missed}\nThe books: {books}"

    small_right, small_broken = list(right_books()), list(broken_books())
    for what, books in small_right:
        passes(books, what)
    for what, books in small_broken:
        fails(books, what)
    num_right, num_broken, rng = 0, 0, random.Random(45)
    for num_blocks, block_size in ((6, 1), (9, 2), (12, 4), (30, 4)):
        for books in traffic(rng, num_blocks, block_size, 40):
            passes(books, "of right traffic")
            num_right += 1
            for what, bad in spoilt(books, rng):
                fails(bad, what)
                num_broken += 1
    return len(small_right), num_right, len(small_broken), num_broken

# %% check-4-5
@check
def exercise_4_5(check_books):
    right, right_traffic, broken, broken_traffic = judge_checker(check_books)
    print(f"right books pass: {right} small, {right_traffic} of random traffic")
    print(f"broken ones are caught: {broken} small, {broken_traffic} of random traffic")

# %% [markdown]
# Your own messages, once the check has passed: would they help you at three in the morning?

# %% messages-4-5 tags=["own-output"]
try:
    for what, books in broken_books():
        print(f"{what.split(':')[0]}\n    {objection(check_books, books)}")
except Exception:
    print("(not yet right)")

# %% [markdown]
# ## Exercise 4.6: what does paging fix?
#
# *6 minutes, medium.*
#
# **What does paging fix, and what doesn't it?** A colleague has read that paging "removes all waste and
# makes inference faster". Write five or six lines: what it fixes, by which mechanism, and two things that it
# does not fix. A person reads this one; the check only sees whether a sentence (20 letters or more) stands there.
#
# Test yourself before you hand it in. Which number stands behind each claim, and where would you read it?
#
# | if you claim that | then name |
# |---|---|
# | fragmentation is gone | what a request needs that chapter 03's requests needed more of; refusals with enough free memory, before and after |
# | waste is left | unused slots for a request, at most and on average, for a block size (exercise 4.3) |
# | more requests run at once | how many, before and after, in the same memory |
# | it is faster | whose time: of one request alone, or of all together? In a run with how many requests? |
# | the pool can still run out | a refusal or preemption of exercise 4.2, and what was free at that moment |
#
# A claim without a number is a guess.

# %% [markdown] written-4-6 points=2
# Paging fixes external fragmentation and reservation. A request needs free blocks, any of them, not an
# extent: the table says where they are. So a request is refused only when there are too few free blocks
# in sum, never "57 free and 20 refused" as in exercise 3.4. And blocks are taken when tokens need them, so
# nothing is held for an answer that may never come. What is left is the rest of each last block: at most
# block_size - 1 slots for a request, about half a block on average (exercise 4.3, blocks of 16: some 7 slots
# for a request, under 2% of what is held).
# It doesn't fix: the size of the pool (in exercise 4.2 requests were still refused and preempted, with
# too few blocks free); the speed of one request, whose step reads the same bytes as before, now through
# a table. More requests fit at once, so all together get more tokens per second when they queue for memory;
# with one request there is no queue, and nothing to gain.
#
# **Rubric, 2 points.** One for *what is fixed, by what*: any free block serves, through the table (external),
# and blocks come as tokens come (reservation); with a number. One for *what is not*: at least two of the
# tail of the last block (with its bound), the pool's end, and one request's speed; a gain in speed is named
# only as throughput through larger batches. No point for "removes all waste", "makes attention
# faster", "blocks are neighbours, so reading is fast" or "memory grows". Samples at three levels stand in
# `solutions/README.md`.
