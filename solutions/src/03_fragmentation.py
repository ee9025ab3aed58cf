# %% [markdown]
# # Exercises of chapter 03: fragmentation
#
# Seven exercises, about 110 minutes. They can be done in any order; 3.1 is the one to keep time for.
#
# **How it goes.** Each exercise has a cell to fill in and, below it, a check. Replace the `raise`
# line by your code, run the cell, run the check. A check that passes prints numbers. One that
# fails shows the smallest case it found and says what the mistake looks like to it.
# `python -m minikv check 03` in a terminal checks the whole notebook.
#
# Run the setup cell and the two folded ones below it first. From then on each exercise stands by
# itself: its own cells, from its title to its check, are all it needs. Among them are folded ones,
# which JupyterLab shows as dots: they serve the check. Run them, too; read them only if you are
# curious.
#
# **Hints** come in three steps, each folded: a nudge, the rule that decides the matter, an
# outline of the code. Open as few as you need.
#
# **Words.** The pool is a row of *blocks*. An *extent* is a run of neighbouring blocks: its start and
# its number of blocks. A *free extent* goes as far as it can: left and right of it stands somebody's
# block or the pool's end. In this memory a request holds *one* extent from its start to its end.
#
# ```text
# block    0  1  2  3  4  5  6  7  8  9
#          A  A  .  .  .  B  C  C  .  .      free extents (2, 3) and (8, 2)
# ```
#
# | | takes its blocks from the front of |
# |---|---|
# | *first fit* | the free extent with the lowest start, of those that are long enough |
# | *best fit* | the shortest of those that are long enough; of several, the one with the lowest start |
# | *worst fit* | the longest; of several, the one with the lowest start |

# %% setup
import random
import re
from collections import Counter
from functools import partial
from itertools import groupby, permutations
from typing import NamedTuple

from minikv import LLM, KVCacheManager, Request, SamplingParams
from minikv.classroom.harness.bounds import Delegated, Endless, bounded
from minikv.classroom.harness.namespace import begin, ours
from minikv.classroom.harness.values import numbers, same, text
from minikv.classroom.harness.verdicts import ask, check, explain, once, told
from minikv.kv_cache.base import cdiv
from minikv.model.loader import load

tiny = load("tiny", dtype="float32", device="cpu")  # random; its text is noise
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
begin(
    globals(),
    forbidden={"minikv.kv_cache.": "the package's own allocator"},
    allowed=["minikv.kv_cache.base"],
)

# %% strip jupyter={"source_hidden": true}
@ours
class Strip:
    """The pool as a plain list of owners: slow, and hard to get wrong."""

    def __init__(self, num_blocks):
        self.owners, self.next = [None] * num_blocks, 0

    def free_extents(self):
        extents, start = [], 0
        for owner, run in groupby(self.owners):
            length = len(list(run))
            extents += [(start, length)] * (owner is None)
            start += length
        return extents

    def place(self, fit, num_blocks):
        """Where so many blocks would go; None: nowhere."""
        fitting = [(start, length) for start, length in self.free_extents() if length >= num_blocks]
        key = {"first": lambda e: e[0], "best": lambda e: (e[1], e[0]),
               "worst": lambda e: (-e[1], e[0]), "next": lambda e: (e[0] < self.next, e[0])}  # fmt: skip
        return min(fitting, key=key[fit])[0] if fitting else None

    def allocate(self, name, num_blocks, fit="first"):
        start = self.place(fit, num_blocks)
        if start is not None:
            self.put(name, start, num_blocks)
        return start

    def put(self, name, start, num_blocks):
        self.owners[start : start + num_blocks] = [name] * num_blocks
        self.next = start + num_blocks

    def free(self, name):
        self.owners = [None if owner == name else owner for owner in self.owners]

    def __str__(self):
        wide = max((len(str(owner)) for owner in self.owners if owner is not None), default=1)
        gap = " " if wide > 1 else ""
        return gap.join(f"{'.' if owner is None else owner!s:>{wide}}" for owner in self.owners)

# %% maps jupyter={"source_hidden": true}
@ours
def random_map(rng, num_blocks, most=4):
    """Owners of a pool's blocks: runs of up to `most` blocks, somebody's or nobody's."""
    owners, names = [], iter(NAMES * 9)
    while len(owners) < num_blocks:
        owners += [rng.choice([None, next(names)])] * rng.randint(1, most)
    return owners[:num_blocks]


@ours
def drawn(owners):
    strip = Strip(0)
    strip.owners = owners
    return str(strip)

# %% [markdown]
# ## Exercise 3.1: first fit in the engine
#
# *30 minutes, hard.*
#
# **Write a KV-cache manager that gives each request one extent by first fit, and takes it back.** It
# then serves a real model.
#
# What you inherit from `KVCacheManager`, and may use:
#
# | | |
# |---|---|
# | `self.tables` | request_id → block table, for every request that holds one |
# | `self.set_table(request, block_ids)` | notes the table of a request, and returns it. `range(3, 7)` is the table of the extent (3, 4) |
# | `self.drop_table(request)` | forgets the table and returns it; an empty one if there was none |
# | `self.block_size` | tokens in a block |
# | `request.request_id`, `request.max_kv_tokens` | its name; the tokens whose keys and values it may ever hold |
# | `cdiv(a, b)` | a / b, rounded up |
#
# - `allocate_slots(request, num_new_tokens)` is called before every step that the request is in. The
#   first time, give it the front of the free extent with the lowest start that is long enough for
#   `max_kv_tokens`, and return its table. (`num_new_tokens`, what this step needs, plays no part
#   here: the extent lasts for all of them.) Later it has its table: return that. If no free extent is
#   long enough, return `None` ("not now") and change nothing.
# - `free(request)` takes back the whole extent, however much of it was used. A request that holds
#   nothing may be freed as well; then nothing happens.
# - `self.free_extents` is your book: a pair (start, num_blocks) for each free extent, none of them
#   empty. Two free neighbours are one extent. The check reads it after every call.
#
# ```text
# block          0  1  2  3  4  5  6  7  8  9     free_extents
#                A  A  B  B  B  C  C  .  .  .     [(7, 3)]
# free(A)        .  .  B  B  B  C  C  .  .  .     [(0, 2), (7, 3)]
# free(C)        .  .  B  B  B  .  .  .  .  .     [(0, 2), (5, 5)]
# D, 3 blocks    .  .  B  B  B  D  D  D  .  .     [(0, 2), (8, 2)]
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# After <code>free</code> of an extent, which free extents can touch it? How many can that be?
# </details>
# <details><summary>Hint 2: the rule</summary>
# A freed extent [start, end) is joined with the free extent that ends at <code>start</code>, if there is
# one, and with the free extent that starts at <code>end</code>, if there is one. How long it is stands
# in its table; nothing else knows it as surely.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# allocate_slots:  the request has a table?  return it
#                  need <- max_kv_tokens in blocks, rounded up
#                  for each free extent, lowest start first:
#                      long enough?  cut need blocks off its front (drop it if nothing is left)
#                                    set the table, return it
#                  return None
#
# free:            table <- drop_table;  empty?  return
#                  start, end <- of the table
#                  for each free extent:   ends at start?   start <- its start
#                                          starts at end?   end <- its end
#                                          else keep it
#                  put (start, end - start) among the kept ones, in order
# ```
# </details>

# %% ex-3-1
class MyManager(KVCacheManager):
    """First fit: each request holds one extent, for all the tokens it may ever hold."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.free_extents = [(0, num_blocks)]  # (start, num_blocks) of each

    def allocate_slots(self, request, num_new_tokens):
        """The request's block table; None if no free extent is long enough now."""
        ### BEGIN SOLUTION
        table = self.tables.get(request.request_id)
        if table is not None:
            return table
        need = cdiv(request.max_kv_tokens, self.block_size)
        for i, (start, num_blocks) in enumerate(self.free_extents):
            if num_blocks >= need:
                rest = (start + need, num_blocks - need)
                self.free_extents[i : i + 1] = [rest] if num_blocks > need else []
                return self.set_table(request, range(start, start + need))
        return None
        ### END SOLUTION

    def free(self, request):
        """Takes the request's extent back and joins it with its free neighbours."""
        ### BEGIN SOLUTION
        table = self.drop_table(request)
        if not table:
            return
        start, end, others = table[0], table[-1] + 1, []
        for left, num_blocks in self.free_extents:
            if left + num_blocks == start:
                start = left
            elif left == end:
                end = left + num_blocks
            else:
                others.append((left, num_blocks))
        self.free_extents = sorted([*others, (start, end - start)])
        ### END SOLUTION

# %% [markdown]
# The check plays sequences of calls, small ones first, and compares each with a plain list of owners.
# Then it frees five extents in every order. Last, your manager serves the engine: the tokens must be
# those of the engine's own manager.

# %% cases-3-1 jupyter={"source_hidden": true}
@ours
def spelled(extents):
    return ", ".join(f"({start}, {length})" for start, length in extents) or "none"


@ours
def books_of(manager):
    """The learner's free_extents, in order of address, if they are extents of this pool at all."""
    said = "self.free_extents must hold a pair (start, num_blocks) for each free extent, not "
    try:
        pairs = [(start, length) for start, length in manager.free_extents]
        books = sorted((int(start), int(length)) for start, length in pairs)
        assert all(mine == (a, b) for mine, (a, b) in zip(books, sorted(pairs), strict=True))
    except (AttributeError, TypeError, ValueError, AssertionError):
        raise AssertionError(f"{said}{getattr(manager, 'free_extents', 'nothing')!r:.200}") from None
    for start, length in books:
        assert length > 0, f"({start}, {length}) in self.free_extents has no blocks: drop it."
        assert start >= 0 and start + length <= manager.num_blocks, (
            f"({start}, {length}) in self.free_extents ends outside the pool of {manager.num_blocks} blocks. The second "
            "number is how many blocks it has."
        )
    return books

# %% books-3-1-b jupyter={"source_hidden": true}
@ours
def judge_books(manager, strip, name, freed):
    """Compares free_extents with the strip, after a call for the request `name`.

    freed: the extent (start, num_blocks) that it held, if it has been freed.
    """
    books, wanted = books_of(manager), strip.free_extents()
    if books == wanted:
        return
    seen = f"Your free_extents: {spelled(books)}. The free extents are {spelled(wanted)}."
    listed = Counter(block for start, length in books for block in range(start, start + length))
    free = {block for block, owner in enumerate(strip.owners) if owner is None}
    twice = sorted(block for block, times in listed.items() if times > 1)
    lost, extra = sorted(free - set(listed)), sorted(set(listed) - free)
    if freed and lost == list(range(freed[0], sum(freed))):
        said = f"The blocks of {name} were not given back: none of them is listed."
    elif freed and twice and any(a <= c and c + d <= a + b for (a, b), (c, d) in permutations(books, 2)):
        said = f"Block {twice[0]} is listed twice: a neighbour that is joined must go from the list."
    elif freed and (lost or extra or twice):
        what = f"Lost now: {lost}" if lost else f"Listed too much: {extra or twice}"
        said = f"Freed at the wrong size: {name} held {freed[1]} blocks from {freed[0]} on. {what}."
    elif extra or twice:
        said = f"Block {(extra or twice)[0]} was given to {name}, but is still listed in free_extents."
    elif lost:
        said = f"Blocks {lost} belong to nobody and are not listed: the rest of an extent stays free."
    else:
        said = forgotten(books, name, *freed) if freed else "Two free neighbours are one extent."
    raise AssertionError(f"{said}\n{seen}")

# %% sides-3-1 jupyter={"source_hidden": true}
@ours
def forgotten(books, name, start, length):
    """Which side of the freed extent was not joined."""
    left = start > 0 and any(a == start for a, _ in books) and any(a + n == start for a, n in books)
    right = any(a + n == start + length for a, n in books) and any(a == start + length for a, _ in books)
    side = "neither neighbour" if left and right else "its left neighbour" if left else "its right neighbour"
    not_ = "" if left and right else "not "
    return (
        f"{name}'s extent was {not_}joined with {side}, which is free, too: two free neighbours are one "
        "extent, or the next long request is refused."
    )

# %% table-3-1 jupyter={"source_hidden": true}
@ours
def judge_table(manager, strip, request, got, num_new_tokens):
    """Whether allocate_slots gave a new request what first fit gives it."""
    name, size = request.request_id, manager.block_size
    need = cdiv(request.max_kv_tokens, size)
    start = strip.place("first", need)
    if got is None:
        assert start is None, (
            f"{name} was refused, but the free extent at block {start} is long enough for its {need} blocks."
        )
        assert name not in manager.tables, f"{name} was refused, but a table was set for it."
        return
    try:
        table = [int(block) for block in got]
    except (TypeError, ValueError):
        said = f"allocate_slots must return a table of block ids, not {got!r:.100}"
        raise AssertionError(said) from None
    assert table or start is not None, (
        f"{name} was given an empty table. Refuse with None, which means not now."
    )
    judge_blocks(manager, strip, request, table, num_new_tokens)

# %% blocks-3-1 jupyter={"source_hidden": true}
@ours
def judge_blocks(manager, strip, request, table, num_new_tokens):
    """Whether these blocks are what first fit gives."""
    name, size = request.request_id, manager.block_size
    need = cdiv(request.max_kv_tokens, size)
    start = strip.place("first", need)
    given = f"{name} needs {need} blocks and was given {text(table):.80}."
    assert manager.tables.get(name) is not None, f"Nothing stands in self.tables for {name}: call set_table."
    assert list(manager.tables[name]) == table, f"{given} In self.tables there is {manager.tables[name]!r:.80}."
    assert not table or 0 <= min(table) <= max(table) < manager.num_blocks, f"{given} Not all of them exist."
    taken = [block for block in table if strip.owners[block] is not None]
    assert not taken, f"{given} Block {taken[0]} is held already, by {strip.owners[taken[0]]}."
    judge_length(given, table, need, request, size, num_new_tokens)
    assert table == list(range(table[0], table[0] + need)), (
        f"{given} They are not neighbours: a request holds one extent, and the sum of the holes is none."
    )
    assert start is not None, f"{given} No free extent is that long."
    fits = [f"{fit} fit" for fit in ("best", "worst", "next") if strip.place(fit, need) == table[0]]
    said = f"{given} First fit takes the front of the free extent with the lowest start, at block {start}."
    if 0 < len(fits) < 3:
        said = f"{given} That is where {' or '.join(fits)} would put it; first fit takes block {start}."
    assert table[0] == start, said

# %% length-3-1 jupyter={"source_hidden": true}
@ours
def judge_length(given, table, need, request, size, num_new_tokens):
    """Names what a wrong number of blocks looks like; of two slips that fit, both."""
    tokens, blocks = request.max_kv_tokens, len(table)
    looks = {
        "max_kv_tokens leaves out the last token already, which is sampled and never run.":
            cdiv(tokens + 1, size),
        "Tokens that fill their blocks exactly need no further block.": tokens // size + 1,
        "That is enough for this step only; the extent has to last until the request's end.":
            cdiv(num_new_tokens, size),
        "Those are as many blocks as it has tokens.": tokens,
        "Its last block is partly full, but a block all the same.": tokens // size,
        "Those are blocks for its prompt alone.": cdiv(request.num_prompt_tokens, size),
    }  # fmt: skip
    if blocks != need:
        named = [said for said, wrong in looks.items() if wrong == blocks]
        said = " Or: ".join(named) if 0 < len(named) < 3 else "That is another number."
        raise AssertionError(f"{given} {said}")

# %% calls-3-1 jupyter={"source_hidden": true}
@ours
def judge_allocation(manager, held, request, num_new_tokens, table):
    """After allocate_slots. held: the table that the request had before."""
    name, strip = request.request_id, manager.watch_strip
    if held is None:
        judge_table(manager, strip, request, table, num_new_tokens)
        if table is None:
            assert books_of(manager) == strip.free_extents(), (
                f"{name} was refused; then nothing may change. Your free_extents: {spelled(manager.free_extents)}."
            )
        else:
            strip.put(name, int(table[0]), len(table))
    else:
        now = manager.tables.get(name, ())
        assert table is not None and list(table) == list(held) == list(now), (
            f"{name} holds an extent already, {held!r:.60}, and goes on in it; it was given "
            f"{table!r:.60}."
        )
    judge_books(manager, strip, name, None)


@ours
def judge_start(manager, held, num_blocks, block_size, returned):
    """After __init__."""
    assert books_of(manager) == [(0, num_blocks)], (
        f"At first all of the pool is one free extent, (start, num_blocks) = (0, {num_blocks}); yours: "
        f"{spelled(books_of(manager))}."
    )


@ours
def judge_release(manager, held, request, returned):
    """After free."""
    name, strip = request.request_id, manager.watch_strip
    strip.free(name)
    assert name not in manager.tables, f"{name} was freed, but its table is still in self.tables: drop_table."
    judge_books(manager, strip, name, held and (held[0], len(held)))

# %% calls-3-1-b jupyter={"source_hidden": true}
@ours
def calls_so_far(manager, before):
    calls = "; ".join(manager.watch_log[-10:]) or "none yet"
    size = getattr(manager, "block_size", 1)
    return f"Blocks of {size} tokens. Calls: {calls}\nThe pool before the last call: {before}"

# %% watch-3-1 jupyter={"source_hidden": true}
@ours
def watched(kind):
    """`kind`, a learner's manager, with every call compared with first fit on a strip."""
    assert isinstance(kind, type) and issubclass(kind, KVCacheManager), (
        "MyManager must stay a class that inherits from KVCacheManager."
    )

    class Watched(kind):
        def __init__(self, num_blocks, block_size):
            self.watch_strip, self.watch_log = Strip(num_blocks), []
            self.watch_refusals = []  # for each refusal: whether the sum of the free blocks was enough
            self.watch(judge_start, None, super().__init__, num_blocks, block_size)

        def watch(self, judge, held, function, *args):
            before = str(self.watch_strip)
            try:
                value = bounded(function, *args)
                judge(self, held, *args, value)
            except NotImplementedError:
                raise  # not yet done
            except (Exception, Endless, Delegated) as error:
                given = calls_so_far(self, before)
                raise AssertionError(told(function.__name__, error, given)) from None
            return value

        def allocate_slots(self, request, num_new_tokens):
            held, need = self.tables.get(request.request_id), cdiv(request.max_kv_tokens, self.block_size)
            what = f"allocate_slots({request.request_id}, {num_new_tokens})"
            self.watch_log.append(f"{what}, at most {request.max_kv_tokens} tokens")
            enough = self.watch_strip.owners.count(None) >= need
            table = self.watch(judge_allocation, held, super().allocate_slots, request, num_new_tokens)
            self.watch_refusals += [enough] * (table is None)
            return table

        def free(self, request):
            held = self.tables.get(request.request_id)
            self.watch_log.append(f"free({request.request_id})")
            return self.watch(judge_release, held, super().free, request)

    return Watched

# %% play-3-1 jupyter={"source_hidden": true}
@ours
def play(kind, num_blocks, block_size, moves):
    """A new manager after some moves: ("A", prompt tokens, max_tokens) comes, "A" leaves.

    Whoever comes computes its prompt and one more token; a request that is refused is forgotten.
    """
    manager, requests = kind(num_blocks, block_size), {}
    for move in moves:
        if isinstance(move, str):
            manager.free(requests.pop(move, None) or Request(move, num_prompt_tokens=1))
            continue
        name, num_prompt_tokens, max_tokens = move
        request = Request(name, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
        if manager.allocate_slots(request, num_prompt_tokens) is None:
            continue
        requests[name] = request
        request.num_computed_tokens = num_prompt_tokens
        request.append(0)
        if max_tokens > 1:
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
            request.append(0)
        manager.check()
    return manager

# %% play-3-1-b jupyter={"source_hidden": true}
@ours
def random_moves(rng, count, most_tokens):
    moves, running = [], []
    for i in range(count):
        while running and rng.random() < 0.45:
            moves.append(running.pop(rng.randrange(len(running))))
        name, prompt = f"{NAMES[i % 26]}{i // 26 or ''}", rng.randint(1, most_tokens // 2)
        moves.append((name, prompt, rng.randint(1, most_tokens // 2)))
        running.append(name)
    return moves


@ours
def run_engine(manager, lengths):
    """Output tokens of each request, from the real engine; lengths: (prompt, output tokens)."""
    llm = LLM(tiny, kv_cache_manager=manager, max_num_seqs=8, check_every_step=True)
    prompts = [[ord(NAMES[i]) + k for k in range(prompt)] for i, (prompt, _) in enumerate(lengths)]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], llm.metrics.steps

# %% moves-3-1 jupyter={"source_hidden": true}
@ours
def moves_3_1():
    """(num_blocks, block_size, moves), small ones first."""
    full = [("A", 1, 3), ("B", 2, 2), ("C", 1, 2)]  # 3, 3 and 2 slots: all of the pool
    for order in ("ACB", "CBA"):
        yield 8, 1, [*full, *order, ("D", 4, 5)]
    holes = [(name, 1, n) for name, n in zip("ABCDEFG", (3, 1, 2, 1, 4, 1, 3), strict=True)]
    yield 15, 1, [*holes, "A", "C", "E", "G", ("H", 1, 2)]  # free extents of 3, 2, 4 and 3
    yield 15, 1, [*holes, "A", "C", "E", "G", ("H", 2, 6), ("I", 1, 4)]  # H: none is that long
    yield 12, 1, [*holes[:5], "A", "C", ("H", 1, 1), "E", ("I", 1, 1), ("J", 1, 2)]
    # The same name comes again, longer and shorter, and leaves twice.
    yield 9, 2, [("A", 3, 4), ("B", 2, 3), "A", "A", ("A", 9, 4), "B", "A", ("A", 2, 3), ("B", 11, 2)]
    yield 7, 4, [("A", 4, 1), ("B", 4, 5), ("C", 8, 1), "B", ("D", 5, 4), ("E", 9, 4), "A", "C", "D"]
    yield 1, 4, [("A", 2, 2), "A", ("B", 5, 1), ("A", 1, 1), ("C", 1, 1), "A", "C"]


@ours
def more_moves_3_1():
    """[(num_blocks, block_size, [moves])]: drawn ones."""
    rng = random.Random(31)
    sizes = ((1, 8, 5), (2, 8, 5), (4, 12, 8), (4, 16, 16), (16, 40, 40), (8, 300, 20))
    for block_size, num_blocks, count in sizes:
        most = block_size * num_blocks // 2
        yield num_blocks, block_size, [["Z", *random_moves(rng, count, most)] for _ in range(6)]


@ours
def every_order(managed):
    """Five extents, freed in every order: then one that needs the whole pool."""
    come = [("A", 5, 4), ("B", 9, 8), ("C", 2, 3), ("D", 8, 13), ("E", 4, 1)]  # 2, 4, 1, 5 and 1 blocks
    for order in permutations("ABCDE"):
        manager = play(managed, 13, 4, [*come, *order, ("F", 30, 23)])
        assert list(manager.tables) == ["F"], (
            f"Freed in the order {order}, the pool is not one extent: F is refused."
        )

# %% check-3-1
@check
def exercise_3_1(MyManager):
    managed = watched(MyManager)
    for moves in moves_3_1():
        play(managed, *moves)
    for num_blocks, block_size, games in more_moves_3_1():
        played = [play(managed, num_blocks, block_size, moves) for moves in games]
        num_calls = sum(len(manager.watch_log) for manager in played)
        print(f"{num_blocks:3} blocks of {block_size:2} tokens: {num_calls:3} calls, "
              "each as with a list of owners")  # fmt: skip
    every_order(managed)
    print("5 extents freed in each of 120 orders: the largest free extent is the pool")
    lengths = [(9, 24), (20, 5), (3, 12), (14, 14), (6, 3)]
    lengths += [(30, 12), (5, 20), (11, 7), (22, 18), (2, 6)]
    manager = managed(24, 4)
    tokens, steps = run_engine(manager, lengths)
    assert tokens == once(run_engine, None, lengths)[0], (
        "Other tokens came out than under the engine's own manager."
    )
    whole = books_of(manager) == [(0, 24)]
    assert whole, "After the last request the pool is not one extent."
    refused = manager.watch_refusals
    print(f"engine: {len(lengths)} requests, {len(steps)} steps, "
          "tokens as under its own manager")  # fmt: skip
    print(f"  {len(refused)} refusals, "
          f"{sum(refused)} of them with enough free blocks in sum")  # fmt: skip

# %% [markdown]
# Now a model whose text you can read: in a cell of your own,
# `LLM("smollm2", kv_cache_manager=MyManager(96, 16), check_every_step=True).generate([...])`.

# %% on-smollm2 tags=["solution", "nbval-ignore-output"]
def on_smollm2(manager):
    questions = ["What is the capital of Italy?", "Name three colours."]
    questions.append("Why is the sky blue?")
    chats = [[{"role": "user", "content": question}] for question in questions]
    llm = LLM("smollm2", kv_cache_manager=manager, check_every_step=True)
    outputs = llm.generate(chats, SamplingParams(max_tokens=24), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


manager = MyManager(96, 16)
for answer in on_smollm2(manager):
    print(repr(answer))
print("free extents at the end:", manager.free_extents)

# %% [markdown]
# ## Exercise 3.2: the measures
#
# *15 minutes, easy.*
#
# **From a map of the pool, compute the five measures of its free memory.**
#
# `owners` has an entry for each block: the name of the request that holds it, or `None`. `num_needed`
# is how many blocks a waiting request needs, in one extent.
#
# | | |
# |---|---|
# | `free` | free blocks |
# | `largest` | blocks of the largest free extent; 0 if nothing is free |
# | `external` | external fragmentation: `1 - largest / free`; 0.0 if nothing is free |
# | `unusable` | free blocks in free extents that are too short for `num_needed` |
# | `histogram` | a dictionary: length → how many free extents are that long |
#
# ```text
# block    0  1  2  3  4  5  6  7  8  9
#          A  .  .  B  B  .  .  .  C  .       num_needed = 3
#
# free 6, largest 3, external 1 - 3/6 = 0.5, unusable 3, histogram {2: 1, 3: 1, 1: 1}
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# All five follow from one list: the lengths of the free extents. When does an extent end?
# </details>
# <details><summary>Hint 2: the rule</summary>
# A free extent ends where somebody's block begins, or where the pool ends. External fragmentation is a
# share of the free memory, not of the pool: how much of what is free does the best request miss?
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# lengths <- [];  run <- 0
# for each owner, and once more after the last:
#     nobody's block:   run += 1
#     else, if run > 0: append run to lengths;  run <- 0
# free, largest <- sum, maximum of lengths
# unusable <- sum of the lengths below num_needed
# histogram <- how often each length occurs
# ```
# </details>

# %% ex-3-2
def measure(owners, num_needed):
    """(free, largest, external, unusable, histogram) of a map of blocks."""
    ### BEGIN SOLUTION
    lengths = [len(list(run)) for owner, run in groupby(owners) if owner is None]
    free, largest = sum(lengths), max(lengths, default=0)
    external = 1 - largest / free if free else 0.0
    unusable = sum(length for length in lengths if length < num_needed)
    return free, largest, external, unusable, dict(Counter(lengths))
    ### END SOLUTION

# %% slips-3-2 jupyter={"source_hidden": true}
@ours
def slips_3_2(owners, need):
    """The usual slips, by part, each with its answer."""
    runs = [(owner, len(list(run))) for owner, run in groupby(owners)]
    lengths, held = ([n for owner, n in runs if (owner is None) == free] for free in (True, False))
    total, free, largest = len(owners), sum(lengths), max(lengths, default=0)
    kept = lengths[:-1] if owners[-1] is None else lengths
    joined = lengths
    if len(lengths) > 1 and owners[0] is owners[-1] is None:
        joined = [*lengths[1:-1], lengths[0] + lengths[-1]]
    end = "The free extent at the pool's end is missing: nobody's block comes after it to close it."
    whole = "Taken of the whole pool. External fragmentation is a share of what is free: 1 - largest / free."
    counts, ring = "Blocks were asked for, not the number of extents.", "A pool is no ring: its last block and its first are not neighbours."
    return {
        "free": {"Those are the blocks in use.": total - free, counts: len(lengths), end: sum(kept)},
        "largest": {"The sum of the free blocks is no extent: a request needs neighbours.": free,
                    end: max(kept, default=0), ring: max(joined, default=0),
                    "That is the longest extent in use.": max(held, default=0),
                    "That is the first free extent, not the longest.": (lengths or [0])[0],
                    "That is the last free extent, not the longest.": (lengths or [0])[-1]},
        "external": {whole: 1 - largest / total, whole + " ": (free - largest) / total,
                     "That is the share of the free memory that is in one piece; 1 less that was asked for.": largest / max(free, 1),
                     "That is a percentage; a share goes from 0 to 1.": 100 * (1 - largest / free) if free else 0,
                     "That is how full the pool is.": 1 - free / total, "That is the free share of the pool.": free / total},
        "unusable": {"A free extent of just num_needed blocks serves the request.": sum(n for n in lengths if n <= need),
                     "What a request would leave over of a long extent is not unusable: the extent serves it.":
                         sum(n if n < need else n % need for n in lengths),
                     counts: sum(n < need for n in lengths), end: sum(n for n in kept if n < need),
                     "Those are the usable ones.": sum(n for n in lengths if n >= need),
                     "Extents that are long enough serve the request, whatever becomes of the short ones.": free * (largest < need)},
        "histogram": {end: sorted(kept), ring: sorted(joined), "Extents in use are counted, too.": sorted(lengths + held),
                      "Those are the extents in use.": sorted(held),
                      "Each length for itself, without buckets: that rounds lengths to powers of two.":
                          sorted(1 << n.bit_length() - 1 for n in lengths),
                      "Each length appears once: how often it occurs is what a histogram says.": sorted(set(lengths))},
    }  # fmt: skip

# %% cases-3-2 jupyter={"source_hidden": true}
@ours
def five(value):
    """What measure() returned, as a dictionary; the histogram as a sorted list of lengths."""
    said = "measure must return (free, largest, external, unusable, histogram)"
    assert isinstance(value, tuple | list) and len(value) == 5, f"{said}, not {value!r:.100}"
    got = numbers(value[:4], ("free", "largest", "external", "unusable"), "measure")
    said = f"histogram must be a dictionary {{length: how many free extents are that long}}, not {value[4]!r:.100}"
    assert isinstance(value[4], dict), said
    parts = [part for pair in value[4].items() for part in pair]
    assert all(isinstance(part, int | float) and part == int(part) for part in parts), said
    counts = {int(length): int(times) for length, times in value[4].items()}
    assert not counts.get(0), f"Between two blocks in use lies no extent: {value[4]!r:.100} counts some of length 0."
    assert all(times == 0 or (length > 0 < times < 10_000) for length, times in counts.items()), said
    got["histogram"] = sorted(length for length, times in counts.items() for _ in range(times))
    return got

# %% maps-3-2 jupyter={"source_hidden": true}
@ours
def maps_3_2():
    """(owners, num_needed), small ones first; also nothing free, and all of it."""
    rng = random.Random(32)
    yield from [([None, None, "A"], 1), (["A", "B", "B"], 1), (["A", None], 2),
                ([None, "A", None, None], 2), ([None] * 5, 3), ([None, "A"] * 6, 2)]  # fmt: skip
    for n in (6, 8, 8, 10, 12, 16, 24, 40, 40):
        yield random_map(rng, n), rng.randint(2, 4)
    yield random_map(rng, 300, most=40), 21
    yield [None] * 5 + ["A"] + [None] * 5 + ["B", "B"] + [None] * 5, 9


@ours
def right_3_2(owners, need):
    """The five, from a strip; and the strip as text."""
    strip = Strip(0)
    strip.owners = owners
    lengths = [length for _, length in strip.free_extents()]
    free, largest = owners.count(None), max(lengths, default=0)
    unusable = free - sum(length for length in lengths if length >= need)
    external = (free - largest) / free if free else 0
    return (free, largest, external, unusable, sorted(lengths)), str(strip)

# %% check-3-2
@check
def exercise_3_2(measure):
    cases = []
    for owners, need in maps_3_2():
        wanted, drawn = right_3_2(owners, need)
        asked = f"{drawn}   num_needed = {need}"
        got = five(ask(measure, owners, need, asked=asked))
        wanted = dict(zip(got, wanted, strict=True))
        cases.append((asked, got, wanted, slips_3_2(owners, need)))
    explain(cases, alike=partial(same, tolerance=1e-6))
    for asked, got, *_ in cases[12:15]:
        print(asked)
        print(f"  free {got['free']:2.0f}, largest {got['largest']:.0f}, "
              f"external fragmentation {got['external']:4.0%}, "
              f"unusable {got['unusable']:.0f}; "
              f"free extents of {text(got['histogram'])}")  # fmt: skip

# %% [markdown]
# ## Exercise 3.3: the verdict
#
# *20 minutes, medium.*
#
# **From the books of a pool and a waiting request, say what is the matter, in a sentence that carries
# its evidence.**
#
# The books are a `State` (the next cell): what each request holds, and the allocator's list of free
# extents. Your function returns four things:
#
# - `free`: free blocks; `largest`: blocks of the largest free extent. (There is one at least.)
# - `verdict`: the first line of this table that is true.
#
# | verdict | true if | the sentence names |
# |---|---|---|
# | `"fits"` | a free extent is long enough | `num_needed`, `largest` |
# | `"fragmentation"` | the free extents together are long enough | `num_needed`, `free`, `largest` |
# | `"leak"` | the free extents and the lost blocks together are long enough | `num_needed`, `free`, lost |
# | `"too little memory"` | nothing of this is true | `num_needed`, `free` |
#
#   *Lost* are blocks that nobody holds and that no free extent lists.
# - `sentence`: one line for whoever is on call, in your own words, with the numbers of the third
#   column in digits. The check looks for the numbers; whether the words are good, you judge.
#
# ```text
# num_needed = 4
#
# block    0  1  2  3  4  5  6  7  8  9
#          A  A  a  .  .  B  B  .  .  .      held: A (0, 3), 2 of them live; B (5, 2), both live
#                                            free_extents (3, 2), (7, 3)
#
# (5, 3, "fragmentation", "4 blocks needed: 5 are free, but no free extent is longer than 3")
# ```
#
# Block 2 is A's: held for a token that is to come.
#
# <details><summary>Hint 1: a nudge</summary>
# Two of the four numbers stand in <code>free_extents</code> alone. For which one do you need
# <code>held</code>?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Every block is held, free or lost. What a request holds and does not use is held: internal waste, not
# free memory. The order of the table is the order of the questions.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# free, largest <- sum, maximum of the lengths in free_extents
# lost <- num_blocks - free - blocks held
# largest >= num_needed?        fits
# free >= num_needed?           fragmentation
# free + lost >= num_needed?    leak
# else                          too little memory
# ```
# </details>

# %% state
class Held(NamedTuple):
    """What one request holds. num_live_blocks: its blocks that hold K and V now."""

    name: str
    start: int
    num_blocks: int
    num_live_blocks: int


class State(NamedTuple):
    """A pool at one moment.

    held: list[Held].
    free_extents: the allocator's own list of (start, num_blocks); no two are neighbours.
    """

    num_blocks: int
    held: list
    free_extents: list

# %% ex-3-3
def diagnose(state, num_needed):
    """(free, largest, verdict, sentence) for who needs an extent of num_needed blocks."""
    ### BEGIN SOLUTION
    lengths = [num_blocks for _, num_blocks in state.free_extents]
    free, largest = sum(lengths), max(lengths)
    lost = state.num_blocks - free - sum(each.num_blocks for each in state.held)
    said = f"{num_needed} blocks needed"
    if largest >= num_needed:
        sentence = f"{said}, and a free extent has {largest}: it can start."
        return free, largest, "fits", sentence
    if free >= num_needed:
        sentence = f"{said}, {free} are free, but in pieces of {largest} at most."
        return free, largest, "fragmentation", sentence
    if free + lost >= num_needed:
        sentence = f"{said}, {free} are free; {lost} more are in nobody's books."
        return free, largest, "leak", sentence
    sentence = f"{said}, only {free} are free, in pieces or not."
    return free, largest, "too little memory", sentence
    ### END SOLUTION

# %% cases-3-3 jupyter={"source_hidden": true}
VERDICTS = ("fits", "fragmentation", "leak", "too little memory")


@ours
def random_state(rng, num_blocks, num_lost):
    """A state of a pool in which so many blocks are lost: the front parts of some free extents."""
    owners, held, free_extents, start = random_map(rng, num_blocks), [], [], 0
    for owner, run in groupby(owners):
        length = len(list(run))
        if owner is None:
            lost = min(num_lost, length)
            num_lost -= lost
            free_extents += [(start + lost, length - lost)] * (length > lost)
        else:
            held.append(Held(owner, start, length, rng.randint(1, length)))
        start += length
    return State(num_blocks, held, free_extents)


@ours
def facts_of(state, need):
    """(free, largest, lost, verdict), from a strip."""
    strip = Strip(state.num_blocks)
    strip.owners = ["lost"] * state.num_blocks
    for name, start, length, _ in state.held:
        strip.owners[start : start + length] = [name] * length
    for start, length in state.free_extents:
        strip.owners[start : start + length] = [None] * length
    free, lost = strip.owners.count(None), strip.owners.count("lost")
    enough = [strip.place("first", need) is not None, free >= need, free + lost >= need, True]
    return free, max((n for _, n in strip.free_extents()), default=0), lost, VERDICTS[enough.index(True)]

# %% drawn-3-3 jupyter={"source_hidden": true}
@ours
def told_state(state, need):
    """The state as text: who holds a block, `.` for free, `?` for a block that nobody lists."""
    owners = ["?"] * state.num_blocks
    for name, start, length, live in state.held:
        owners[start : start + length] = [name] * live + [name.lower()] * (length - live)
    for start, length in state.free_extents:
        owners[start : start + length] = ["."] * length
    return (f"{''.join(owners)}   needed: {need} blocks\nA small letter: held, and not live. A dot: free. "
            "?: in no extent, neither held nor free.")  # fmt: skip


@ours
def cases_3_3():
    """(state, num_needed): each verdict several times, small pools first; all facts differ."""
    rng, cases, seen = random.Random(33), [], Counter()
    for num_blocks in (12, 14, 16, 20, 24, 28, 32, 36):
        for _ in range(400):
            state, need = random_state(rng, num_blocks, rng.choice([0, 0, 3, 5])), rng.randint(2, num_blocks // 2)
            free, largest, lost, verdict = facts_of(state, need)
            edge = need in (free, largest, free + lost)  # just enough
            kind = verdict, min(lost, 1), edge
            distinct = edge or len({need, free, largest, lost, num_blocks}) == 5
            most = num_blocks // 12
            if distinct and state.held and len(state.free_extents) > 1 and seen[kind] < most:
                cases.append((state, need))
                seen[kind] += 1
    nobody = State(9, [], [(0, 2), (4, 3)]), State(30, [], [(3, 20)])
    return [*cases, (nobody[0], 7), (nobody[1], 25)]

# %% slips-3-3 jupyter={"source_hidden": true}
@ours
def slips_3_3(state):
    """The usual slips, by part, each with its answer."""
    lengths = [n for _, n in state.free_extents]
    held = sum(each.num_blocks for each in state.held)
    live = sum(each.num_live_blocks for each in state.held)
    inside = [each.num_blocks - each.num_live_blocks for each in state.held] or [0]
    mixed = (
        "Blocks inside somebody's extent that are not live are internal waste. They are not free: nobody "
        "else can have them."
    )
    unlisted = "Blocks that are in no extent at all are not free: the allocator does not know of them."
    return {
        "free": {mixed: state.num_blocks - live, mixed + " ": sum(inside), mixed + "  ": sum(lengths + inside),
                 unlisted: state.num_blocks - held, "That is the largest free extent.": max(lengths),
                 "Blocks were asked for, not the number of extents.": len(lengths)},
        "largest": {"The sum of the free extents is no extent.": sum(lengths), mixed: max(lengths + inside),
                    mixed + " ": max(inside),
                    "Largest is a number of blocks, not where the extent starts.": max(state.free_extents)[0],
                    "That is the first free extent, not the longest.": lengths[0],
                    "That is the last free extent, not the longest.": lengths[-1]},
    }  # fmt: skip

# %% verdicts-3-3 jupyter={"source_hidden": true}
@ours
def judge_verdict(got, need, facts, asked):
    """Names what a wrong verdict overlooks."""
    free, largest, lost, wanted = facts
    said = f"The verdict must be one of {', '.join(VERDICTS)}, not {got!r:.80}"
    assert isinstance(got, str) and got.strip().lower() in VERDICTS, f"{said}\n{asked}"
    got = got.strip().lower()
    if got == wanted:
        return
    whole = f"needed {need}, free {free}, largest free extent {largest}, lost {lost}"
    if wanted == "fits":
        said = "A free extent is long enough, up to the last block; nothing else matters to the request."
    elif wanted == "fragmentation" and got == "fits":
        said = "The sum of the free blocks is not enough: the request needs neighbours, and no free extent is that long."
    elif wanted == "fragmentation" and free == need and not lost:
        said = "Just as much is free as is needed; it lies in pieces that are too short."
    elif wanted == "fragmentation" and got == "leak":
        said = "Fragmentation is not a leak: the free blocks, which the allocator knows of, would do if they were neighbours."
    elif wanted == "fragmentation":
        said = "There is enough free memory; it lies in pieces that are too short."
    elif got in ("fits", "fragmentation"):
        said = "Fewer blocks are free than needed, so pushing the free extents together would not help."
    elif wanted == "leak":
        said = "With the blocks that are in no extent, neither held nor free, it would be enough: they leaked."
    else:
        said = f"No leak is to blame: {lost} blocks are in no extent, and with them it would still be too little."
    raise AssertionError(f"{said}\n{asked}\nYour verdict: {got}. Wanted: {wanted}; {whole}.")

# %% sentence-3-3 jupyter={"source_hidden": true}
@ours
def judge_sentence(sentence, need, facts, asked):
    """Whether the numbers that the verdict rests on stand in the sentence."""
    free, largest, lost, verdict = facts
    names = {"num_needed": need, "free": free, "largest": largest, "lost": lost}
    evidence = {"fits": ("num_needed", "largest"), "fragmentation": ("num_needed", "free", "largest"),
                "leak": ("num_needed", "free", "lost"), "too little memory": ("num_needed", "free")}[verdict]  # fmt: skip
    assert isinstance(sentence, str), f"The fourth part must be a sentence, a text, not {sentence!r:.80}"
    found = {float(n) for n in re.findall(r"\d+(?:\.\d+)?", sentence)}
    lacking = [f"{name} ({names[name]})" for name in evidence if names[name] not in found]
    assert not lacking, (
        f"The sentence lacks its evidence: it doesn't name {' and '.join(lacking)}.\n{asked}\n"
        f"The verdict is right: {verdict}. Your sentence: {sentence!r:.200}"
    )
    letters = sum(character.isalpha() for character in sentence)  # of any alphabet
    assert letters >= 4, f"Numbers alone are no sentence: {sentence!r:.200}"

# %% check-3-3
@check
def exercise_3_3(diagnose):
    cases, answers, counts = [], [], Counter()
    for state, need in once(cases_3_3):
        asked = told_state(state, need)
        value = ask(diagnose, state, need, asked=asked)
        assert isinstance(value, tuple | list) and len(value) == 4, (
            "diagnose must return four things, (free, largest, verdict, sentence), not "
            f"{value!r:.100}"
        )
        facts = facts_of(state, need)
        got = numbers(value[:2], ("free", "largest"), "diagnose, at first,")
        cases.append((asked, got, dict(zip(got, facts, strict=False)), slips_3_3(state)))
        answers.append((*value[2:], need, facts, asked))
    explain(cases)
    for verdict, _, need, facts, asked in answers:
        judge_verdict(verdict, need, facts, asked)
    for _, sentence, need, facts, asked in answers:
        judge_sentence(sentence, need, facts, asked)
        counts[facts[3]] += 1
    print("; ".join(f"{verdict}: {counts[verdict]} states" for verdict in VERDICTS))

# %% [markdown]
# Your sentences, once the check has passed: would you understand them at three in the morning?

# %% sentences-3-3 tags=["own-output"]
try:
    for state, need in cases_3_3()[:8]:
        print(ask(diagnose, state, need)[3])
except (AssertionError, NotImplementedError):
    print("(not yet right)")

# %% [markdown]
# ## Exercise 3.4: build the paradox
#
# *15 minutes, medium.*
#
# **Write a trace after which at least 40 of 100 blocks are free, and a request of 20 is refused.**
#
# The rules. The pool has 100 blocks, and at first all of them are free. Each operation is one of
#
# - `("allocate", name, num_blocks)`: 1 block or more, by first fit; it must succeed, and `name` must
#   not hold an extent already;
# - `("free", name)`: gives back the whole extent that `name` holds, which joins its free neighbours.
#
# Any trace that gets there is right. Make it short, if you like: each operation counts one.
#
# ```text
# a pool of 10, to show the notation:
#
# [("allocate", "A", 3), ("allocate", "B", 4), ("free", "A")]      ...BBBB...
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# How long may the longest free extent be? How many free extents does it take, then, to have 40 blocks?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Every free extent has 19 blocks at most, so there must be three or more, with somebody between each
# two. What is left at the pool's end is one of them, and costs no operation.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# allocate A, B, C, D so that less than 20 are left after D
# free A and C: B stands between them, D between C and the end
# choose the sizes: A, C and the end are below 20, and 40 or more together
# ```
# </details>

# %% ex-3-4
def paradox_trace():
    """A list of ("allocate", name, num_blocks) and ("free", name)."""
    ### BEGIN SOLUTION
    sizes = {"A": 19, "B": 22, "C": 19, "D": 21}
    fill = [("allocate", name, num_blocks) for name, num_blocks in sizes.items()]
    return [*fill, ("free", "A"), ("free", "C")]
    ### END SOLUTION

# %% cases-3-4 jupyter={"source_hidden": true}
@ours
def steps_of(value):
    """A trace, if it is one: [("allocate", name, num_blocks) or ("free", name)]."""
    said = 'A trace is a list of ("allocate", name, num_blocks) and ("free", name), not '
    assert isinstance(value, list | tuple) and value, f"{said}{value!r:.120}"
    for step in value:
        good = isinstance(step, list | tuple) and len(step) == {"allocate": 3, "free": 2}.get(step[0] if step else "")
        name, size = (step[1], step[-1] if len(step) == 3 else 1) if good else (None, 1)
        assert good and name is not None, f"{said}{step!r:.120}"
        number = isinstance(size, int | float) and size == int(size) > 0 and size is not True
        assert number, f"A number of blocks is 1, 2, 3, ...: not {step!r:.120}"
    # A name may be anything, a number, say; two lists that look alike are the same name.
    return [(step[0], name_in(step[1]), *map(int, step[2:])) for step in value]


@ours
def name_in(name):
    return name if isinstance(name, str) else f"{name!r:.20}"

# %% trace-3-4 jupyter={"source_hidden": true}
@ours
def run_trace(steps, num_blocks):
    """(strip, touched) after a trace under first fit; no block from `touched` on was ever taken."""
    strip, held, touched = Strip(num_blocks), set(), 0
    for i, (what, name, *size) in enumerate(steps):
        so_far = f"After {i} operations: {strip}"
        if what == "free":
            assert name in held, f"Operation {i + 1} frees {name}, which holds nothing.\n{so_far}"
            held.remove(name)
            strip.free(name)
            continue
        assert name not in held, f"Operation {i + 1}: {name} holds an extent already; take another name.\n{so_far}"
        assert strip.allocate(name, *size) is not None, (
            f"Operation {i + 1}, {name} with {size[0]} blocks, is itself refused: every allocation "
            "of the trace must succeed. The longest free extent has "
            f"{max((n for _, n in strip.free_extents()), default=0)}.\n{so_far}"
        )
        held.add(name)
        touched = max(touched, *(i + 1 for i, owner in enumerate(strip.owners) if owner is not None))
    return strip, touched

# %% judge-3-4 jupyter={"source_hidden": true}
@ours
def judge_trace(steps, num_blocks):
    """Whether the trace ends with 40% free and no room for 20%."""
    strip, touched = run_trace(steps, num_blocks)
    extents, need = strip.free_extents(), num_blocks // 5
    free = sum(n for _, n in extents)
    start, largest = max(extents, key=lambda e: e[1], default=(0, 0))
    seen = f"At the end {free} of {num_blocks} blocks are free, the longest free extent has {largest}.\n{strip}"
    sizes = {step[1]: step[2] for step in steps if step[0] == "allocate"}
    said = ""
    if largest >= need:
        said = "the request of 20 fits: the free extents must be shorter."
        if largest == need:
            said = "an extent of exactly 20 blocks is long enough for a request of 20."
        elif start + largest == num_blocks > touched:
            said = "the end of the pool, which nobody took, is a free extent, too, and what is freed beside it joins it."
        elif all(sizes[step[1]] < need for step in steps if step[0] == "free"):
            said = "neighbours that are both freed are one extent: somebody must stay between them."
    elif 5 * free < 2 * num_blocks:
        said = "the request is refused because the memory is full, not because it is in pieces: 40 blocks must be free."
    assert not said, f"No paradox yet: {said}\n{seen}"

# %% check-3-4
@check
def exercise_3_4(paradox_trace):
    judge_trace(steps_of(ask(paradox_trace)), 100)
    print("A right trace: 40 blocks or more are free, a request of 20 is refused. "
          "The shortest have 6 operations.")  # fmt: skip

# %% [markdown]
# How long is yours, and what does it leave?
#
# <details><summary>Why none has fewer than 6 operations</summary>
# An extent of 19 at most, three of them at least. One may be the pool's end. Each other one was freed by
# an operation of its own: two frees. Whom they free, and those who stay, one between the two and one
# before the end, were allocated: four allocations.
# </details>

# %% length-3-4 tags=["own-output"]
try:
    steps = steps_of(ask(paradox_trace))
    strip, _ = run_trace(steps, 100)
    print(f"yours: {len(steps)} operations; possible: 6; "
          f"free at the end: {strip.owners.count(None)} blocks of 100")  # fmt: skip
    print(f"{strip}\nfree extents: {strip.free_extents()}")
except (AssertionError, NotImplementedError):
    print("(not yet right)")

# %% [markdown]
# ## Exercise 3.5: which fit admits the queue?
#
# *25 minutes, medium.*
#
# **Replay a queue under first, best and worst fit, and say which of them admit all of it.**
#
# `queue` is a trace as in exercise 3.4: `("allocate", name, num_blocks)` and `("free", name)`, from an
# empty pool of `num_blocks` blocks. A fit *admits* the queue if each allocation finds a free extent
# that is long enough when its turn comes; nobody waits. What is freed joins its free neighbours.
# Ties go to the lowest start, and an extent is cut at its front (see the table at the top).
#
# Return the fits that admit it, as a list or set: a selection of `"first"`, `"best"`, `"worst"`.
#
# ```text
# pool of 8: A 3, B 1, C 2, D 2, free A, free C, E 2, F 3
#
#                 first fit   best fit   worst fit
# before E        ...B..DD    ...B..DD   ...B..DD
# E, 2 blocks     EE.B..DD    ...BEEDD   EE.B..DD
# F, 3 blocks     refused     FFFBEEDD   refused       so the answer is ["best"]
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# Only one line differs between the three. Which?
# </details>
# <details><summary>Hint 2: the rule</summary>
# The three differ in the order in which they look at the free extents: by start; by length, then start;
# by length from the longest, then start. The first that is long enough in that order is taken. No fit
# is best for every queue, so each has to be tried.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# for each fit:
#     owners <- nobody for each block
#     for each step of the queue:
#         free:      nobody owns the blocks of name
#         allocate:  extents <- runs of nobody's blocks that are long enough
#                    none?  this fit doesn't admit the queue
#                    chosen <- the first of them in the fit's order;  name owns its front
# ```
# </details>

# %% ex-3-5
def admitting_fits(queue, num_blocks):
    """The fits among "first", "best", "worst" that admit the whole queue."""
    ### BEGIN SOLUTION
    orders = {
        "first": lambda extent: extent[0],
        "best": lambda extent: (extent[1], extent[0]),
        "worst": lambda extent: (-extent[1], extent[0]),
    }

    def admits(order):
        owners = [None] * num_blocks
        for what, name, *size in queue:
            if what == "free":
                owners = [None if owner == name else owner for owner in owners]
                continue
            extents, start = [], 0
            for owner, run in groupby(owners):
                length = len(list(run))
                if owner is None and length >= size[0]:
                    extents.append((start, length))
                start += length
            if not extents:
                return False
            start, _ = min(extents, key=order)
            owners[start : start + size[0]] = [name] * size[0]
        return True

    return [fit for fit, order in orders.items() if admits(order)]
    ### END SOLUTION

# %% cases-3-5 jupyter={"source_hidden": true}
FITS = ("first", "best", "worst")


@ours
def rank(fit, last, ties, extent):
    start, length = extent
    return {"first": (start,), "best": (length, ties * start), "worst": (-length, ties * start),
            "next": (start < last, start)}[fit]  # fmt: skip


@ours
def faulty(queue, num_blocks, fit, *, join=("left", "right"), again=False, ties=1, spare=0, go_on=False):
    """Whether a fit admits the queue if its allocator has a fault.

    join: the sides on which a freed extent is joined; again: and what is joined, with its next one.
    ties: -1 takes the highest start of equals. spare: so many blocks must be left over of an extent.
    go_on: a refused allocation is left out, and forgotten.
    """
    free, held, last, admitted = [(0, num_blocks)], {}, 0, True
    for what, name, *size in queue:
        if what == "free" and name in held:
            (start, length), near = held.pop(name), True
            while near:
                left = [e for e in free if sum(e) == start and "left" in join]
                near = left + [e for e in free if e[0] == start + length and "right" in join]
                start -= sum(n for _, n in left)
                length += sum(n for _, n in near)
                free = [e for e in free if e not in near]
                near = near and again
            free.append((start, length))
        elif what == "allocate":
            fitting = sorted((e for e in free if e[1] >= size[0] + spare), key=partial(rank, fit, last, ties))
            admitted = bool(fitting)
            if fitting:
                start, length = fitting[0]
                held[name], last = (start, size[0]), start + size[0]
                free = [e for e in free if e != (start, length)] + [(last, length - size[0])] * (length > size[0])
            elif not go_on:
                return False
    return admitted

# %% slips-3-5 jupyter={"source_hidden": true}
@ours
def by_sum(queue, num_blocks):
    sizes, free = {}, num_blocks
    for what, name, *size in queue:
        free += sizes.pop(name, 0) if what == "free" else -size[0]
        sizes.update({name: size[0]} if what == "allocate" else {})
        if free < 0:
            return False
    return True


@ours
def slips_3_5(queue, num_blocks, wanted):
    """The usual slips: {what to say: the wrong answer}."""
    def those(**fault):
        return {fit for fit in FITS if faulty(queue, num_blocks, fit, **fault)}

    best = "Best fit is not best: it keeps long extents, and leaves splinters that nobody can use. Try each queue."
    left = "A freed extent was not joined with the free extent on its left."
    right = "A freed extent was not joined with the free extent on its right."
    exchanged = {{"best": "worst", "worst": "best"}.get(fit, fit) for fit in wanted}
    following = {"first"} & {"first"} if faulty(queue, num_blocks, "next") else set()
    total = set(FITS) if by_sum(queue, num_blocks) else set()
    return {
        "The sum of the free blocks is not enough: each allocation needs one extent, long enough.": total,
        best: {"best"}, best + " ": wanted | {"best"}, best + "  ": {"best"} if wanted else set(),
        best + "   ": wanted | {"best"} if wanted else set(), best + "    ": wanted | {"best"} if "first" in wanted else wanted,
        best + "     ": set(FITS) if wanted else set(),
        "A freed extent was not joined with its free neighbours.": those(join=()),
        left: those(join=("right",)), left + " ": those(join=("right",), again=True),
        right: those(join=("left",)), right + " ": those(join=("left",), again=True),
        "Best and worst fit are exchanged: best takes the shortest extent that is long enough.": exchanged,
        "That is next fit: first fit looks from the pool's start each time.": following | (wanted - {"first"}),
        "One refusal in the middle is enough: a fit that admits only the rest doesn't admit the queue.": those(go_on=True),
        "Of equally long extents the one with the lowest start is taken.": those(ties=-1),
        "An extent that is just as long as needed is long enough.": those(spare=1),
        "That is what each fit refuses; the fits that admit the queue were asked for.": set(FITS) - wanted,
    }  # fmt: skip

# %% judge-3-5 jupyter={"source_hidden": true}
@ours
def outcome(queue, num_blocks, fit):
    """(whether the fit admits it, a line about it)."""
    strip = Strip(num_blocks)
    for what, name, *size in queue:
        if what == "free":
            strip.free(name)
        elif strip.allocate(name, *size, fit) is None:
            return False, f"  {fit:5} fit  {strip}   {name}, {size[0]} blocks, is refused"
    return True, f"  {fit:5} fit  {strip}   admits all"


@ours
def spelled_queue(queue):
    return ", ".join(f"{step[1]} {step[2]}" if step[0] == "allocate" else f"free {step[1]}" for step in queue)

# %% judge-3-5-b jupyter={"source_hidden": true}
@ours
def judge_fits(tried):
    """tried: [(queue, num_blocks, what the learner's function returned)], smallest first."""
    cases = []
    for queue, num_blocks, got in tried:
        asked = f"Pool of {num_blocks} blocks: {spelled_queue(queue)}"
        said = f"admitting_fits must return a list or set of names out of {FITS}, not {got!r:.100}"
        listed = isinstance(got, list | tuple | set | dict) and all(fit in FITS for fit in got)
        assert listed, f"{said}\n{asked}"
        ends = {fit: outcome(queue, num_blocks, fit) for fit in FITS}
        wanted = {fit for fit in FITS if ends[fit][0]}
        lines = "\n".join(line for _, line in ends.values())
        cases.append((f"{asked}\n{lines}", set(got), wanted, slips_3_5(queue, num_blocks, wanted)))
    wrong = [case for case in cases if case[1] != case[2]]
    if not wrong:
        return [wanted for _, _, wanted, _ in cases]
    asked, got, wanted, slips = wrong[0]
    said = f"The fits are wrong for {len(wrong)} of {len(cases)} queues. The smallest of them:"
    named = {slip.strip(): 0 for slip in slips if all(case[1] == case[3][slip] for case in cases)}
    if 0 < len(named) < 3:
        said = "\nOr: ".join(named)
    yours = ", ".join(fit for fit in FITS if fit in got) or "none"
    raise AssertionError(f"{said}\n{asked}\nYour answer: {yours}.")

# %% random-queue jupyter={"source_hidden": true}
@ours
def random_queue(rng, num_blocks, length):
    """Allocations with frees between. Its last step is an allocation."""
    queue, running = [], []
    while len(queue) < length or queue[-1][0] == "free":
        if running and rng.random() < 0.45:
            queue.append(("free", running.pop(rng.randrange(len(running)))))
            continue
        name = NAMES[sum(step[0] == "allocate" for step in queue) % 26]
        queue.append(("allocate", name, rng.randint(1, num_blocks // 2)))
        running.append(name)
    return queue

# %% queues-3-5 jupyter={"source_hidden": true}
@ours
def gap_queue(rng, num_blocks, num_last):
    """Fills the pool, frees some of it, then allocates num_last more, with a free here and there."""
    names, queue, left = iter(NAMES), [], num_blocks
    while left > 0:
        size = min(left, rng.randint(1, num_blocks // 4))
        queue.append(("allocate", next(names), size))
        left -= size
    if rng.random() < 0.5:
        queue.pop()  # so that the end of the pool is free
    leaving = [("free", step[1]) for step in rng.sample(queue, len(queue))]
    now = rng.randint(1, len(leaving) - 1)
    queue += leaving[:now]
    for later in leaving[now:][:num_last] + [None] * (num_last - len(leaving[now:])):
        queue.append(("allocate", next(names), rng.randint(1, num_blocks // 3)))
        if later and rng.random() < 0.4:
            queue.append(later)
    return queue if queue[-1][0] == "allocate" else queue[:-1]


@ours
def long_queue(rng):
    """Names that come again, with other sizes, in a large pool."""
    queue, held = [], set()
    for _ in range(60):
        name = rng.choice("ABCDEFGH")
        queue.append(("free", name) if name in held else ("allocate", name, rng.randint(1, 190)))
        held ^= {name}
    return queue

# %% all-queues-3-5 jupyter={"source_hidden": true}
@ours
def cases_3_5():
    """(queue, num_blocks), short ones first: each set of fits admits some of the queues, and each fault
    changes the answer to some."""
    rng, cases, seen = random.Random(35), [], Counter()
    faults = [{"join": join} for join in ((), ("left",), ("right",))] + [{"ties": -1}, {"spare": 1}, {"go_on": True}]
    for make, num_blocks, length, tries in (
        (random_queue, 8, 4, 300), (random_queue, 8, 6, 300), (random_queue, 10, 8, 300),
        (gap_queue, 8, 3, 600), (gap_queue, 12, 4, 2000), (gap_queue, 20, 5, 1000),
    ):  # fmt: skip
        for _ in range(tries):
            queue = make(rng, num_blocks, length)
            wanted = frozenset(fit for fit in FITS if faulty(queue, num_blocks, fit))
            kind = wanted, by_sum(queue, num_blocks)
            new = seen[kind, num_blocks, length] < 2 and seen[kind] < 5
            caught = [i for i in range(len(faults)) if seen[i] < 3] if new or seen[3] < 3 else []
            caught = [i for i in caught if wanted != {fit for fit in FITS if faulty(queue, num_blocks, fit, **faults[i])}]
            if new or caught:
                cases.append((queue, num_blocks))
                seen.update([kind, (kind, num_blocks, length), *caught])
    again = [("allocate", "A", 3), ("allocate", "B", 2), ("free", "A"), ("allocate", "A", 4), ("free", "B"),
             ("allocate", "B", 5), ("free", "A"), ("free", "B")]  # fmt: skip
    cases += [([("allocate", "A", 9)], 9), (again, 9), (again, 11), (long_queue(rng), 1000)]
    return [*sorted(cases, key=lambda case: len(case[0])), ([], 5)]


@ours
def wins_3_5():
    rng, wins = random.Random(36), Counter()
    for _ in range(2000):
        queue = gap_queue(rng, 16, 3)
        wins.update(fit for fit in FITS if faulty(queue, 16, fit))
    return wins

# %% check-3-5
@check
def exercise_3_5(admitting_fits):
    tried = []
    for queue, n in once(cases_3_5):
        asked = f"Pool of {n} blocks: {spelled_queue(queue)}"
        tried.append((queue, n, ask(admitting_fits, queue, n, asked=asked)))
    counts = Counter()
    for wanted in judge_fits(tried):
        counts[", ".join(fit for fit in FITS if fit in wanted) or "none"] += 1
    for fits, times in sorted(counts.items()):
        print(f"{fits + ':':26}{times:2} of {len(tried)} queues")
    wins = once(wins_3_5)
    print(f"of 2,000 more queues first fit admits {wins['first']}, "
          f"best fit {wins['best']}, worst fit {wins['worst']}")  # fmt: skip

# %% [markdown]
# ## Exercise 3.6: when does compaction pay?
#
# *12 minutes, medium.*
#
# **Requests are blocked by fragmentation. How long must they wait without compaction for compaction to
# cost less?**
#
# *Compaction* slides all that is held together, so that the free memory is one extent. Here it copies
# all `live_bytes` within the GPU's memory, once. Counted are request-seconds: one for each second in
# which one request stands still.
#
# - **With compaction**, nobody goes on while it copies: neither the `num_running` running requests nor the
#   `num_blocked` blocked ones. Then all of them go on; the blocked ones fit.
# - **Without it**, the running requests lose nothing, and each blocked one stands still for `wait`
#   seconds, until enough has been freed.
#
# `bandwidth` is what the memory moves, in bytes per second: a byte read counts, and so does a byte
# written. The time to decide and to note the new tables is left out. Return two numbers in seconds:
#
# | | |
# |---|---|
# | `copying` | how long the copying takes |
# | `wait` | the wait at which both cost the same; if it is longer, compaction costs less |
#
# ```text
# live_bytes = 3e9, bandwidth = 1e12, num_running = 4, num_blocked = 1
#
# with compaction       # # # # #      5 requests stand still for 6 ms: 30 request-milliseconds
# without it            #              1 request stands still for as long as it waits
# ```
#
# So here the answer is `(0.006, 0.03)`.
#
# <details><summary>Hint 1: a nudge</summary>
# What happens to one byte that is moved? And who notices?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Each live byte is read and written. While that goes on, running and blocked requests stand still
# alike. At the wait asked for, both sides lose the same number of request-seconds.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# copying <- bytes moved / bandwidth
# (num_running + num_blocked) x copying = num_blocked x wait;  solve for wait
# ```
# </details>

# %% ex-3-6
def break_even(live_bytes, bandwidth, num_running, num_blocked):
    """(copying, wait), both in seconds; num_blocked is at least 1."""
    ### BEGIN SOLUTION
    copying = 2 * live_bytes / bandwidth
    return copying, copying * (num_running + num_blocked) / num_blocked
    ### END SOLUTION

# %% slips-3-6 jupyter={"source_hidden": true}
@ours
def slips_3_6(live_bytes, bandwidth, num_running, num_blocked):
    """The usual slips, by part, each with its answer."""
    one_way, copying = live_bytes / bandwidth, 2 * live_bytes / bandwidth
    stops = "Copying is counted once: each byte is read and written, so it crosses the bus twice."
    free = "Compaction is not free: while it copies, everybody stands still."
    alone = "Those are the blocked requests alone: the running ones stop while it copies."
    also = "The blocked requests wait while it copies, too."
    share = "All the blocked requests wait: the loss without compaction is their number times the wait."
    everybody = num_running + num_blocked
    return {
        "copying": {"Seconds were asked for; those are milliseconds.": 1000 * copying,
                    stops: one_way, free: 0,
                    "Copying was counted for each request; it is done once.": copying * everybody,
                    "Seconds were asked for; those are bytes.": 2 * live_bytes,
                    "Seconds are bytes over bytes per second; that is upside down.": bandwidth / live_bytes / 2},
        "wait": {free: 0, alone: copying, stops: one_way * everybody / num_blocked, stops + " ": one_way,
                 also: copying * num_running / num_blocked, share: copying * everybody,
                 also + " ": copying * num_running, share + " ": copying * (num_running + 1),
                 "A request's share of the loss is not what was asked for.": copying / everybody},
    }  # fmt: skip


@ours
def cases_3_6():
    """(live_bytes, bandwidth, num_running, num_blocked, copying, wait)"""
    rng = random.Random(37)
    for running, blocked in [(0, 1), (1, 1), (4, 1), (3, 2), (16, 1), (12, 5), (40, 3), (0, 7),
                             (2, 90), (300, 200)]:  # fmt: skip
        live, bandwidth = rng.randint(2, 60) * 1e8, rng.randint(2, 30) * 1e11
        copying = (live + live) / bandwidth  # read, written
        lost = (running + blocked) * copying
        yield live, bandwidth, running, blocked, copying, lost / blocked

# %% check-3-6
@check
def exercise_3_6(break_even):
    cases, parts = [], ("copying", "wait")
    for live, bandwidth, running, blocked, *wanted in cases_3_6():
        asked = (f"live_bytes = {live:.3g}, bandwidth = {bandwidth:.3g}, "
                 f"num_running = {running}, num_blocked = {blocked}\nStanding still "
                 f"while it copies: {running} + {blocked} requests.")  # fmt: skip
        value = ask(break_even, live, bandwidth, running, blocked, asked=asked)
        got = numbers(value, parts, "break_even")
        slips = slips_3_6(live, bandwidth, running, blocked)
        cases.append((asked, got, dict(zip(parts, wanted, strict=True)), slips))
    explain(cases, alike=partial(same, tolerance=1e-6))
    pools = [(12.9, 0, 1), (12.9, 16, 1), (12.9, 16, 4), (1.29, 16, 1)]
    for live, running, blocked in pools:
        value = ask(break_even, live * 1e9, 1.555e12, running, blocked)
        copying, wait = numbers(value, parts, "break_even").values()
        print(f"{live:5.2f} GB live at 1,555 GB/s: {1000 * copying:4.1f} ms; {running:2} "
              f"running, {blocked} blocked: it pays if the wait is over "
              f"{1000 * wait:3.0f} ms")  # fmt: skip

# %% [markdown]
# 12.9 GB and 1,555 GB/s: the KV pool beside OPT-13B on an A100-40G, and its memory. One compaction is
# cheap. What this sum leaves out is how long it lasts: how soon the next request is blocked, and
# everybody stands still once more.

# %% [markdown]
# ## Exercise 3.7: the wrong metric
#
# *5 minutes, medium.*
#
# **Why is free memory a misleading capacity metric here?** A dashboard shows "free KV memory: 45%", and
# requests are refused. Write four or five lines for the colleague who wants to alert on it: what it
# says, what it can't say, why, and what to show instead. A person reads this one; the check cannot.
#
# Test yourself before you hand it in. Which number stands behind each claim, and where would you read it?
#
# | if you claim that | then name |
# |---|---|
# | there was enough memory | free blocks, and blocks needed, at the same moment |
# | it was no leak | blocks held + blocks free, and blocks in the pool |
# | it was fragmentation | the largest free extent, beside both of the first line |
# | it is external, not internal | how much of the waste lies outside all extents, and how much inside |
# | another metric is better | its value at a refusal, and at an admission with the same free memory |
#
# A claim without a number is a guess. Your trace of exercise 3.4 and your sentences of 3.3 have numbers
# that you may use.

# %% [markdown] written-3-7 points=2
# "45% free" adds up pieces. A request of this memory needs one extent, so what it can get is the largest
# free extent, and the sum is only an upper bound of that. In the trace of exercise 3.4, 57 of 100 blocks
# are free and a request of 20 is refused: the largest free extent has 19. All 100 blocks are accounted
# for (43 held, 57 free), so nothing leaked; and the 57 lie outside all extents, so it is not internal
# waste.
# Show the largest free extent beside the need of the longest request that is to be admitted, and count
# refusals by need; alert when the first falls below the second. Free memory stays useful for one thing:
# when the sum itself is below the need, no compaction helps.
#
# **Rubric, 2 points.** One for *the cause*: a request needs one extent, so the largest free extent
# decides, not the sum; with numbers of one moment (free, needed, largest). One for *the remedy of the
# metric*: largest free extent against what must be admitted (or refusals by need), and what free memory
# still says (an upper bound, too little memory). Give no point for "memory leaks", "memory is wasted inside
# the requests", "best fit would solve it" or "fragmentation is bad" alone. Samples at three levels
# stand in `solutions/README.md`.
