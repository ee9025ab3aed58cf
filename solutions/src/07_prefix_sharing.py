# %% [markdown]
# # Exercises of chapter 07: prefix sharing
#
# Six exercises and a written question, about 115 minutes. They can be done in any order;
# 7.2 and 7.3 are the ones to keep time for.
#
# **How it goes.** Each exercise has a cell to fill in and, below it, a check. Replace the
# `raise` line by your code, then run your cell and all cells down to the check's end. (The
# folded ones between them, shown as dots, are the check's own; read them only if you are
# curious.) A check that passes prints numbers. One that fails shows the smallest case it
# found, and names the mistake if it knows one that fits. The numbers that stand below a
# check already are what a right answer prints; yours appear when you run it.
# `python -m minikv check 07` in a terminal checks the whole notebook.
#
# Click on the heading of exercise 7.1 and choose *Run > Run All Above Selected Cell*. From
# then on each exercise stands by itself, except that 7.4 also needs the other cells of 7.1,
# solved or not.
#
# **Hints** come in three steps, each folded: a nudge, the rule that decides the matter, an
# outline of the code. Open as few as you need.
#
# **Words.** A block is *held* by every request whose table names it; `ref_cnt` counts
# these holders. A *full* block, whose slots all have keys and values, may be *published*:
# it gets a *key* by which it is found again, and from then on its content does not
# change. Tokens that are found instead of computed are a *hit*. A block that nobody holds
# is free; if it has a key, it can still be found, until it is taken for something else. A
# last block that is not full is called a *tail* here. (Chapter 04 called only its empty
# slots so.)
#
# ```text
# tokens      7 3 9 9 | 1 4 2 8 | 5 5              blocks of 4
#             full      full      a tail: no key
# ```

# %% setup
import copy
import random
from collections import Counter, deque

from minikv import (
    LLM,
    ContiguousKVCacheManager,
    KVCacheManager,
    PagedKVCacheManager,
    Request,
    SamplingParams,
)
from minikv.classroom.harness import ask, begin, check, examine, explain, lent, ours, told
from minikv.classroom.harness.bounds import Delegated, Endless, bounded
from minikv.classroom.harness.values import list_of_numbers, plain
from minikv.kv_cache.base import BlockCopy, InvariantBroken, cdiv
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.model.loader import load

# a random model: instant, its text is noise
tiny = load("tiny", dtype="float32", device="cpu")
begin(
    globals(),
    forbidden={"minikv.kv_cache.": "the package's own manager"},
    allowed=["minikv.kv_cache.base"],
)

# %% [markdown]
# ## Exercise 7.1: keys, and what they find
#
# *20 minutes, medium.*
#
# **a. Give every full block of a prompt a key.** Two blocks may share their content exactly
# if their keys are equal. Keys and values depend on all tokens up to their own, so equal
# tokens are not enough: everything before them must be equal as well.
#
# - Return a list with one key for each full block, in order. A tail that is not full gets
#   none.
# - A key may be anything that a dictionary takes as a key: a number, a tuple, bytes.
# - `cache_salt` is `None` or a string. Requests of different salts share nothing at all.
#   (Someone who measures how fast an answer starts could otherwise learn what others have
#   asked.)
#
# ```text
# block_size = 2, prompts that come one after the other, and what each finds:
#
# A   1 2 | 3 4             finds 0 blocks: it is the first
# B   1 2 | 3 9             finds 1 block: 1 2
# C   3 4 | 1 2             finds 0 blocks: both stand after something else
# D   1 2 | 3 4 | 5         finds 2 blocks
# E   1 2 | 3 4  salt "x"   finds 0 blocks
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# The key of A's second block: which other prompt of the picture could have the same one by
# mistake, if the key were made of the block's own tokens?
# </details>
# <details><summary>Hint 2: the rule</summary>
# A key stands for everything from the beginning of the prompt to the end of its block. If
# it is made of the key before it and its own tokens, that follows by itself, and so does a
# salt that is in the first key.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# parent <- cache_salt;  keys <- an empty list
# for each full block:   parent <- a digest (or simply a tuple) of (parent, the block's tokens)
#                        add parent to keys
# ```
# </details>

# %% ex-7-1
def block_keys(token_ids, block_size, cache_salt):
    """A list of keys, one for each full block."""
    ### BEGIN SOLUTION
    keys, parent = [], cache_salt
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = (parent, tuple(token_ids[end - block_size : end]))
        keys.append(parent)
    return keys
    ### END SOLUTION

# %% keys-7-1 jupyter={"source_hidden": true}
BLIND = "Equal tokens are not enough: after another beginning the same tokens have other keys and values."
AT_PLACE = "Equal tokens at an equal position are not enough either: their keys and values depend on all that stands before them."
WINDOW = "One block back is not far enough: a key stands for everything from the beginning of the prompt."
UNSALTED = "The salt is in no key: requests of different salts find each other's blocks."
SOME = "The salt is in some of the keys only: a block whose key lacks it is found under every salt. The chain has to begin with it."
ORDERLESS = "The order counts, of tokens and of blocks: a sum, an xor, a set or a sorted list forgets it."
GLUED = "Numbers that are only written one after the other run together: 1, 23 and 12, 3 make the same text."
NARROW = "Token ids go beyond 65,535: what is cut off makes different tokens equal."
BEFORE = "A key has to contain the block's own tokens, too, not only what stands before them."
WHOLE = "A key must not depend on what comes after its block: another prompt may go on differently."
FRESH = "The same prompt again must get the same keys; here nothing is ever found again."
WITHOUT_END = "The prompt's last full block is found by nobody. Does the loop end a block too early?"
TAIL_KEY = "Only full blocks get a key: a tail that is not full will be written to."


@ours
def key_slips():
    """(what to say, a wrong way to make keys)."""

    def each(key):
        return lambda tokens, B, salt: [key(tokens, end, B, salt) for end in range(B, len(tokens) + 1, B)]

    yield BLIND, each(lambda t, e, B, s: (s, *t[e - B : e]))
    yield BLIND, each(lambda t, e, B, s: (s if e == B else 0, *t[e - B : e]))
    yield BLIND, each(lambda t, e, B, s: (s if e == B else None, *t[e - B : e]))
    yield BLIND, each(lambda t, e, B, s: (*t[e - B : e],))
    yield AT_PLACE, each(lambda t, e, B, s: (s, e, *t[e - B : e]))
    yield AT_PLACE, each(lambda t, e, B, s: (s if e == B else 0, e, *t[e - B : e]))
    yield WINDOW, each(lambda t, e, B, s: (s, B, *t[max(0, e - 2 * B) : e]))
    yield WINDOW, each(lambda t, e, B, s: (s, e, *t[max(0, e - 2 * B) : e]))
    yield UNSALTED, each(lambda t, e, B, s: (*t[:e],))
    yield SOME, each(lambda t, e, B, s: (s if e == B else 0, *t[:e]))
    yield SOME, each(lambda t, e, B, s: (s if e > B else 0, *t[:e]))
    yield SOME, each(lambda t, e, B, s: (s if e + B > len(t) else 0, *t[:e]))

# %% keys-7-1-b jupyter={"source_hidden": true}
@ours
def more_key_slips():
    def each(key):
        return lambda tokens, B, salt: [key(tokens, end, B, salt) for end in range(B, len(tokens) + 1, B)]

    def chained(part):
        return each(lambda t, e, B, s: (s, *(part(t[at : at + B]) for at in range(0, e, B))))

    def odd(blocks):  # what an xor sees
        return [block for block, count in Counter(blocks).items() if count % 2]

    yield ORDERLESS, each(lambda t, e, B, s: (s, *sorted(t[:e])))
    yield ORDERLESS, each(lambda t, e, B, s: (s, e, sum(t[:e])))
    yield ORDERLESS, each(lambda t, e, B, s: (s, frozenset(t[:e])))
    yield ORDERLESS, each(lambda t, e, B, s: (s, *sorted(tuple(t[at : at + B]) for at in range(0, e, B))))
    yield ORDERLESS, each(lambda t, e, B, s: (s, frozenset(odd(tuple(t[at : at + B]) for at in range(0, e, B)))))
    yield ORDERLESS, chained(sum)
    yield ORDERLESS, chained(frozenset)
    yield ORDERLESS, chained(lambda tokens: tuple(sorted(tokens)))
    yield GLUED, each(lambda t, e, B, s: (s, "".join(map(str, t[:e]))))
    yield GLUED, chained(lambda tokens: "".join(map(str, tokens)))
    yield NARROW, each(lambda t, e, B, s: (s, *(n % 65536 for n in t[:e])))
    yield NARROW, each(lambda t, e, B, s: (s, *(n % 256 for n in t[:e])))
    yield BEFORE, each(lambda t, e, B, s: (s, *t[: e - B]))
    yield WHOLE, each(lambda t, e, B, s: (s, e, *t))
    yield FRESH, each(lambda t, e, B, s: object())

# %% keys-7-1-e jupyter={"source_hidden": true}
@ours
def right_keys(token_ids, block_size, cache_salt):
    ends = range(block_size, len(token_ids) + 1, block_size)
    return [(cache_salt, *token_ids[:end]) for end in ends]


@ours
def keys_of(block_keys, tokens, B, salt):
    """The learner's keys of one prompt, if they are keys."""
    asked = f"token_ids = {tokens}, block_size = {B}, cache_salt = {salt!r}"
    value = ask(block_keys, tokens, B, salt, asked=asked, raw=True)
    try:
        keys = [plain(key) if hasattr(key, "__index__") else key for key in value]
    except TypeError:
        raise AssertionError(f"block_keys must return a list of keys, not {value!r:.80}\n{asked}") from None
    for key in keys:
        try:
            hash(key)
        except TypeError as error:
            raise AssertionError(f"A dictionary does not take this as a key: {error}.\n{asked}") from None
    full, more = len(tokens) // B, f"{asked}\nYour keys: {len(keys)}; full blocks: {len(tokens) // B}."
    assert len(keys) != cdiv(len(tokens), B) or len(keys) == full, f"{TAIL_KEY}\n{more}"
    assert len(keys) != full - 1, f"{WITHOUT_END}\n{more}"
    assert len(keys) == full, f"One key for each full block was asked for.\n{more}"
    return keys

# %% keys-7-1-c jupyter={"source_hidden": true}
@ours
def found_blocks(make_keys, prompts, B):
    """How many blocks each of the prompts finds, which come one after the other, in a map of keys."""
    cached, found = set(), []
    for tokens, salt in prompts:
        keys = make_keys(tokens, B, salt)
        found.append(next((i for i, key in enumerate(keys) if key not in cached), len(keys)))
        cached.update(keys)
    return found


@ours
def small_prompts():
    for tokens in ([1, 2], [1], [1, 2, 3]):
        yield [(tokens, None)] * 2
    yield [([1, 2], None), ([3, 4], None)]
    yield [([1, 2, 3, 4], None), ([3, 4], None)]  # somewhere else
    yield [([1, 2, 3, 4], None), ([5, 6], None), ([5, 6, 3, 4], None)]  # after something else
    yield [([1, 2, 3, 4, 5, 6], None), ([7, 8, 3, 4], None), ([7, 8, 3, 4, 5, 6], None)]
    yield [([1, 2, 3, 4], None), ([1, 2, 3, 9], None), ([3, 4, 1, 2], None), ([1, 2, 3, 4, 5], None)]
    yield [([1, 2], "x"), ([1, 2], "y"), ([1, 2], None), ([1, 2], "x")]
    yield [([1, 2, 3, 4], "x"), ([1, 2], "y"), ([1, 2, 3, 4], "y"), ([1, 2, 3, 4], "x")]
    yield [([1, 2, 3, 4, 5, 6], "x"), ([1, 2, 3, 4, 7], None), ([1, 2, 3, 4, 5, 6], None)]
    yield [([1, 4], None), ([4, 1], None), ([2, 3], None), ([4, 1], None)]
    yield [([1, 23], None), ([12, 3], None), ([1, 23], None)]
    yield [([1, 2, 2, 3], None), ([2, 1, 3, 2], None), ([1, 2, 3, 2], None)]
    yield [([1, 2, 3, 4], None), ([3, 4], None), ([3, 4, 1, 2], None)]  # the same two blocks, turned round
    yield [([70_001, 5], None), ([113, 5], None), ([4_465, 5], None), ([70_001, 5], None)]


@ours
def random_prompts(rng, B, count):
    """Prompts of which many begin as an earlier one does."""
    prompts = []
    for _ in range(count):
        start = list(rng.choice(prompts)[0]) if prompts and rng.random() < 0.7 else []
        start = start[: rng.randint(0, len(start))]
        more = [rng.choice([0, 1, 2, 50_000]) for _ in range(rng.randint(0, 3 * B))]
        prompts.append((start + more or [0], rng.choice([None, None, "x", "y"])))
    return prompts

# %% keys-7-1-d jupyter={"source_hidden": true}
@ours
def judge_keys(block_keys):
    """Counts hits, not keys: a key that says too much or too little shows there. How many prompts."""
    rng = random.Random(71)
    inputs = [(prompts, 2) for prompts in small_prompts()]
    inputs += [(random_prompts(rng, B, 8), B) for B in (1, 2, 3, 4, 16) for _ in range(4)]
    slips, cases, failure = [*key_slips(), *more_key_slips()], [], None
    for prompts, B in inputs:
        shown = "\n".join(f"  {tokens}{f' salt {salt!r}' if salt else ''}" for tokens, salt in prompts)
        wrong = {said + " " * i: found_blocks(keys, prompts, B) for i, (said, keys) in enumerate(slips)}
        try:
            got = found_blocks(lambda *args: keys_of(block_keys, *args), prompts, B)
        except AssertionError as error:
            failure = error
            break
        asked = f"block_size = {B}; prompts, one after the other:\n{shown}"
        wanted = found_blocks(right_keys, prompts, B)
        cases.append((asked, {"blocks found": got}, {"blocks found": wanted}, {"blocks found": wrong}))
    explain(cases)
    if failure:
        raise failure
    return sum(len(prompts) for prompts, _ in inputs), sum(sum(case[2]["blocks found"]) for case in cases)

# %% check-7-1
@check
def exercise_7_1(block_keys):
    num_prompts, num_found = judge_keys(block_keys)
    print(f"{num_prompts} prompts right; they find {num_found} blocks in all")

# %% [markdown]
# **b. Find the longest beginning that is there.** `cached` maps the key of each published
# block to its block id. Given the keys of a prompt's full blocks, return the block ids of
# its longest beginning that is cached. Blocks can be taken away in any order, so there may
# be holes.
#
# ```text
# keys = ["p", "q", "r"], cached = {"p": 4, "r": 0, "z": 2}      returns [4]
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# "r" is there. What would the request have to do about the tokens of "q", if it used block
# 0 as well?
# </details>
# <details><summary>Hint 2: the rule</summary>
# A hit is a beginning: it ends at the first key that is not there. And 0 is a block id like
# any other.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# found <- an empty list
# for each key:   not in cached?  stop;   else add its block id to found
# ```
# </details>

# %% ex-7-1-b
def find_longest_hit(keys, cached):
    """Block ids of the longest beginning of keys that is in cached."""
    ### BEGIN SOLUTION
    found = []
    for key in keys:
        if key not in cached:
            break
        found.append(cached[key])
    return found
    ### END SOLUTION

# %% hits-7-1 jupyter={"source_hidden": true}
@ours
def right_hit(keys, cached):
    there = [key in cached for key in keys]
    return [cached[key] for key in keys[: [*there, False].index(False)]]


@ours
def case_7_1(value, keys, cached):
    asked = f"keys = {keys}, cached = {cached}"
    said = "find_longest_hit must return a list of block ids"
    assert not isinstance(value, int | float | str | dict), f"{said}, not {value!r:.80}\n{asked}"
    assert not set(value) & set(keys), f"Those are keys; their block ids were asked for.\n{asked}"
    got, right = list_of_numbers(value, said), right_hit(keys, cached)
    ids = [cached[key] for key in keys if key in cached]
    holes = "A hit ends at the first block that is not there: what lies behind the hole would be used without what stands before it."
    zero = "Block 0 is a block: don't ask whether the id is true, ask whether the key is there."
    first_false = [bool(cached.get(key)) for key in keys]
    last = "All that is found counts here. How much of it is usable is exercise 7.4."
    return asked, {"blocks": got}, {"blocks": right}, {"blocks": {
        holes: ids, holes + " ": ids if keys and keys[-1] in cached else right,
        holes + "  ": ids if keys and keys[0] in cached else [],
        zero: [cached[key] for key in keys[: [*first_false, False].index(False)]],
        "A part of the prompt is a hit, too: not all of it has to be there.": ids if len(ids) == len(keys) else [],
        last: right[:-1], last + " ": right[:-1] if len(right) == len(keys) else right,
        "The first missing block ends the hit; it is not part of it.": [*right, -1] if len(right) < len(keys) else right,
        "Block ids stand in the order of the tokens.": sorted(right),
        "Block ids stand in the order of the tokens. ": right[::-1],
        "That is one block; the hit is all of the beginning.": right[-1:],
        "That is one block; the hit is all of the beginning. ": right[:1],
    }}  # fmt: skip

# %% hits-7-1-b jupyter={"source_hidden": true}
@ours
def inputs_7_1_b():
    """(keys, cached), small ones first."""
    yield from [(["p"], {}), (["p"], {"p": 3}), ([], {"p": 3}), (["p", "q"], {"p": 3, "q": 1}), (["p", "q"], {"p": 3})]
    yield from [(["p", "q"], {"q": 3}), (["p", "q", "r"], {"p": 4, "r": 0, "z": 2}), (["p", "q"], {"p": 0, "q": 5})]
    rng = random.Random(72)
    for _ in range(30):
        keys = [f"k{i}" for i in range(rng.randint(1, 9))]
        there = [key for key in keys if rng.random() < rng.choice([0.5, 0.9, 1.0])]
        ids = rng.sample(range(20), len(there) + 2)
        yield keys, dict(zip([*there, "y", "z"], ids, strict=True))
    many = [f"k{i}" for i in range(900)]
    yield many, {key: 100_000 - i for i, key in enumerate(many) if i != 850}

# %% [markdown]
# Your two functions become part of this manager, which serves a real model. It compares
# what it finds, token by token, before it believes a key; so a wrong key can cost hits, but
# never make an answer wrong. `admit` is exercise 7.4.

# %% sharing-7-1
@lent
class Sharing(PagedKVCacheManager):
    """Paged blocks that are found again, by the functions that it is given."""

    def __init__(self, num_blocks, block_size, block_keys, find_longest_hit, admit):
        super().__init__(num_blocks, block_size)
        self.block_keys, self.admit = block_keys, admit
        self.find_longest_hit = find_longest_hit
        self.cached, self.known = {}, {}  # key -> block id -> (key, history)

    def keys_of(self, request):
        return self.block_keys(request.token_ids, self.block_size, request.cache_salt)

    def history(self, request, i):  # what the content of its block number i depends on
        return request.cache_salt, request.token_ids[: (i + 1) * self.block_size]

    def hit(self, request):
        found = list(self.find_longest_hit(self.keys_of(request), self.cached))
        for i, block_id in enumerate(found):
            if self.known[block_id][1] != self.history(request, i):
                found = found[:i]
                break
        counts = [self.block_pool.blocks[block_id].ref_cnt for block_id in found]
        return found, self.admit(request.num_tokens, counts, self.block_size)

    def get_num_cached_tokens(self, request):
        return self.hit(request)[1][0]

# %% [markdown]
# What it does with a hit, and how blocks are published and forgotten:

# %% sharing-7-1-b
@lent
class SharingManager(Sharing):
    def allocate_slots(self, request, num_new_tokens, *, num_cached_tokens=0):
        if num_cached_tokens:
            found, (_, _, num_blocks_taken) = self.hit(request)
            if num_blocks_taken > self.num_free_blocks:
                return None
            found = found[: num_cached_tokens // self.block_size]
            self.block_pool.touch([self.block_pool.blocks[i] for i in found])
            self.set_table(request, found)
        num_held = len(self.tables.get(request.request_id, ()))
        num_new_tokens += num_cached_tokens
        table = super().allocate_slots(request, num_new_tokens)
        for block_id in (table or [])[num_held:]:  # taken for something else
            key, _ = self.known.pop(block_id, (None, None))
            self.cached.pop(key, None)
        return table

    def cache_blocks(self, request):  # after the forward: full blocks can be found
        table, keys = self.tables[request.request_id], self.keys_of(request)
        for i in range(request.num_computed_tokens // self.block_size):
            if keys[i] not in self.cached:
                self.cached[keys[i]] = table[i]
                self.known[table[i]] = keys[i], self.history(request, i)

# %% engine-7-1 jupyter={"source_hidden": true}
@ours
def right_admit(num_tokens, ref_cnts, block_size):
    usable = ref_cnts[: (num_tokens - 1) // block_size]
    num_cached = len(usable) * block_size
    return num_cached, num_tokens - num_cached, cdiv(num_tokens, block_size) - len(usable) + usable.count(0)


@ours
def serve(manager, prompts, num_output=6, num_step=16):
    """The real engine, one prompt after the other: (answers, hit tokens, steps) of each."""
    llm = LLM(tiny, kv_cache_manager=manager, max_num_batched_tokens=num_step, check_every_step=True)
    params = SamplingParams(max_tokens=num_output, ignore_eos=True)
    answers, hits, steps = [], [], []
    for tokens, salt in prompts:
        before = len(llm.metrics.steps)
        (output,) = llm.generate([tokens], params, use_tqdm=False, cache_salt=salt)
        answers.append(output.outputs[0].token_ids)
        hits.append(output.num_cached_tokens)
        steps.append(len(llm.metrics.steps) - before)
    return answers, hits, steps


@ours
def asked_each_time(function, raw=False):
    """The learner's function for use inside the engine: judged as by `ask`."""
    return lambda *args: ask(function, *args, raw=raw)


@ours
def engine_prompts():
    header, other = list(range(60, 70)), list(range(90, 100))
    both = other + header
    return [([*header, 1, 2], None), ([*header, 3, 4, 5], None), (both, None), ([*both, 7], None),
            ([*header, 1, 2, 9], "x"), ([*header, 8], "x"), (header[:3], None)]  # fmt: skip

# %% check-7-1-b
@check
def exercise_7_1_in_the_engine(block_keys, find_longest_hit):
    inputs = list(inputs_7_1_b())
    examine(find_longest_hit, inputs, case_7_1)
    print(f"{len(inputs)} lookups right")
    prompts = engine_prompts()
    expected, _, _ = serve(PagedKVCacheManager(40, 4), prompts)
    right = SharingManager(40, 4, right_keys, right_hit, right_admit)
    mine = asked_each_time(block_keys, raw=True), asked_each_time(find_longest_hit)
    tokens, hits, _ = serve(SharingManager(40, 4, *mine, right_admit), prompts)
    assert tokens == expected, "In the engine other tokens came out than without sharing."
    _, wanted, _ = serve(right, prompts)
    shown = "The answers stay right, since a hit is compared; what a key costs is hits."
    assert hits == wanted, f"{shown}\nHit tokens: {hits}; expected: {wanted}"
    for (prompt, salt), hit in zip(prompts, hits, strict=True):
        print(f"{len(prompt):2} tokens, salt {salt}: {hit:2} of them found")
    print("tokens as without sharing")

# %% [markdown]
# What a position-blind key costs in this manager, where prompts swap their parts:

# %% blind-7-1
def blind_keys(token_ids, block_size, cache_salt):
    ends = range(block_size, len(token_ids) + 1, block_size)
    return [(cache_salt, *token_ids[end - block_size : end]) for end in ends]


part, other = list(range(8)), list(range(20, 28))
swapped = [(a + b + [9], None) for a, b in [(part, other), (other, part)] * 2]
for keys in (right_keys, blind_keys):
    answers, hits, _ = serve(SharingManager(40, 4, keys, right_hit, right_admit), swapped)
    first = [answer[0] for answer in answers]
    print(f"{keys.__name__:10}: hit tokens {hits}, answers begin with {first}")

# %% [markdown]
# The answers are the same. Only the hit count tells.

# %% [markdown]
# ## Exercise 7.2: copy-on-write
#
# *30 minutes, hard.*
#
# **Let samples of one prompt share its blocks, and copy a block only when it must be.**
# With `n=4` the engine computes a prompt once and then forks it three times. All four go on
# differently, from the middle of a block perhaps.
#
# What you inherit from `Counted`, below, and may use, beside what exercise 4.2 had (such
# as `self.tables`, which you read, and `self.set_table(request, table)`, which you call):
#
# | | |
# |---|---|
# | `self.free_block_ids` | the free blocks |
# | `self.take()` | takes one of them for one holder, and returns its id |
# | `self.hold(block_id)` | one holder more |
# | `self.let_go(block_id)` | one holder less; it is free again when none is left |
# | `self.ref_cnt[block_id]` | how many hold it |
# | `self.pending.append(BlockCopy(src, dst, 1))` | block `src` is copied to `dst` before this step writes |

# %% counted-7-2
@lent
class Counted(KVCacheManager):
    """A pool of blocks with reference counts."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.ref_cnt = [0] * num_blocks
        self.free_block_ids = deque(range(num_blocks))
        self.pending = []

    def take(self):
        block_id = self.free_block_ids.popleft()
        self.ref_cnt[block_id] = 1
        return block_id

    def hold(self, block_id):
        self.ref_cnt[block_id] += 1

    def let_go(self, block_id):
        self.ref_cnt[block_id] -= 1
        if self.ref_cnt[block_id] == 0:
            self.free_block_ids.append(block_id)

    def free(self, request):
        for block_id in self.drop_table(request):
            self.let_go(block_id)

    def copies(self):
        copies, self.pending = self.pending, []
        return copies

    def check(self):
        held = Counter(i for table in self.tables.values() for i in table)
        for block_id, count in enumerate(self.ref_cnt):
            if count != held[block_id]:
                said = f"ref_cnt {count}, but {held[block_id]} tables name it"
                raise InvariantBroken(f"block {block_id}: {said}")

# %% [markdown]
# - `fork(parent, child)` gives `child` a table: the blocks that hold its first
#   `child.num_computed_tokens` tokens, which are the parent's. Nothing is copied now. The
#   parent may have more tokens than that, and more blocks. Return `True`.
# - `allocate_slots(request, num_new_tokens)` makes room as in exercise 4.2. The first token
#   to be computed may go into a block that others hold. Then the request first needs a copy
#   of its own: a new block takes its place in the table, the copy is noted in
#   `self.pending`, and the old block has one holder less. If too few blocks are free for
#   all of it, return `None`; then nothing may have changed.
#
# ```text
# block_size = 4                             tables              ref_cnt of blocks 0 to 4
#
# A has computed 6 tokens                    A [0, 1]            1  1  0  0  0
# fork to B and C, 6 tokens each             A, B, C [0, 1]      3  3  0  0  0
# A computes 1 token: copy 1 -> 2            A [0, 2]            3  2  1  0  0
# B computes 1 token: copy 1 -> 3            B [0, 3]            3  1  1  1  0
# C computes 1 token: only C holds 1         C [0, 1]            3  1  1  1  0
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# Which block of the table will the next token be written to? Which of the blocks before it
# will ever be written to again?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Only the block at place num_computed_tokens // block_size can need a copy, and only if it
# is in the table already and ref_cnt is above 1. The copy needs a free block like any
# other: count it before taking any.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# fork:    table <- the parent's blocks for child.num_computed_tokens tokens, a new list
#          hold each;  set the child's table;  return True
#
# allocate_slots:
#          table <- a copy of what the request holds, or an empty list
#          more  <- blocks for (computed + new) tokens, rounded up, less those in the table
#          place <- computed // block_size;  shared <- the block there, if others hold it
#          more, and one for shared, are more than are free?  return None
#          shared?  take a block;  note the copy;  let go of shared;  put the new one there
#          take so many more blocks, add them at the end;  set the table;  return it
# ```
# </details>

# %% ex-7-2
class MyForks(Counted):
    """Forks share blocks; one that others hold is copied before it is written to."""

    def fork(self, parent, child):
        ### BEGIN SOLUTION
        num_blocks = cdiv(child.num_computed_tokens, self.block_size)
        table = list(self.tables[parent.request_id][:num_blocks])
        for block_id in table:
            self.hold(block_id)
        self.set_table(child, table)
        return True
        ### END SOLUTION

    def allocate_slots(self, request, num_new_tokens):
        ### BEGIN SOLUTION
        table = list(self.tables.get(request.request_id, ()))
        num_tokens = request.num_computed_tokens + num_new_tokens
        more = max(0, cdiv(num_tokens, self.block_size) - len(table))
        place = request.num_computed_tokens // self.block_size
        shared = place < len(table) and self.ref_cnt[table[place]] > 1
        if more + shared > len(self.free_block_ids):
            return None
        if shared:
            own = self.take()
            self.pending.append(BlockCopy(table[place], own, 1))
            self.let_go(table[place])
            table[place] = own
        table += [self.take() for _ in range(more)]
        return self.set_table(request, table)
        ### END SOLUTION

# %% judge-7-2 jupyter={"source_hidden": true}
AT_FORK = "Nothing is copied at a fork: the child names its parent's blocks, and whoever writes first copies."
IN_PLACE = "A block that others hold is not written to: what they read there would change."
EVERYTHING = "Only the block that is written to is copied: full blocks before it are never written to again."
LAST = "Nobody else holds this block any more: its last holder writes in place, without a copy."
UNTOUCHED = "The next token begins a block of its own; the last one is full, is only read, and stays shared."
LOST = "A new block holds nothing: without a copy the tokens that lay in the old one are lost."
TURNED = "The copy goes the wrong way: BlockCopy(src, dst, 1) copies src, which is shared, to dst, which is new."
STILL = "One that has left a block for its copy holds it no more: let_go of the old one."
ALIAS = "Both tables are one and the same list: what one request adds, the other has as well. Give the child a list of its own."
AHEAD = "The child shares the blocks that hold its own tokens, no more: those of the parent's later tokens are not its."
NO_TAIL = "The tail is shared as well, although it is not full: some of the child's tokens lie in it."
UNCOUNTED = "Each block of a fork has one holder more: hold() it."
NO_ROOM = "The copy needs a free block, too: count it before taking any, and return None if it is not there."


@ours
def books_of(m):
    """All that a manager has noted, as plain data."""
    tables = {name: [block.__index__() for block in table] for name, table in m.tables.items()}
    pending = [tuple(plain(list(c)))[: 2 if tuple(c)[2:] == (1, "device") else 4] for c in m.pending]
    return {"tables": tables, "ref_cnt": list(m.ref_cnt), "free": list(m.free_block_ids), "pending": pending}


@ours
def judge_counts(m, now, gone=None):
    """Whether ref_cnt and the free blocks fit the tables. gone: a block that a request has left."""
    held = Counter(block for table in now["tables"].values() for block in table)
    counts = now["ref_cnt"]
    if gone is not None:
        assert counts[gone] <= held[gone], f"{STILL}\nBlock {gone}: ref_cnt {counts[gone]}, in {held[gone]} tables."
    for block, count in enumerate(counts):
        more = f"Block {block}: ref_cnt {count}, but {held[block]} tables name it."
        assert count == held[block], f"{UNCOUNTED if count < held[block] else 'It has too many holders.'}\n{more}"
    free = sorted(set(range(m.num_blocks)) - set(held))
    assert sorted(now["free"]) == free, f"Free are {sorted(now['free'])}, but held by nobody are {free}."

# %% judge-7-2-b jupyter={"source_hidden": true}
@ours
def judge_fork(m, parent, child, got, before):
    now, name, of = books_of(m), child.request_id, parent.request_id
    assert got is not None, f"fork returned None: return True once {name} has its table."
    assert got, f"fork returned {got!r}: there is room for any fork, since nothing is taken."
    table, theirs = now["tables"].get(name), before["tables"][of]
    assert table is not None, f"{name} has no table after the fork: set_table(child, ...)."
    need = cdiv(child.num_computed_tokens, m.block_size)
    shown = f"{of} has {parent.num_computed_tokens} tokens in {theirs}; {name}, with {child.num_computed_tokens}, got {table}."
    assert now["pending"] == before["pending"] and set(table) <= set(theirs), f"{AT_FORK}\n{shown} Copies: {now['pending']}"
    one_list = isinstance(m.tables[name], list) and m.tables[name] is m.tables.get(of)
    assert not one_list, f"{ALIAS}\n{shown}"
    assert table != theirs[: child.num_computed_tokens // m.block_size] or len(table) == need, f"{NO_TAIL}\n{shown}"
    assert not (len(table) > need and table == theirs[: len(table)]), f"{AHEAD}\n{shown}"
    assert table == theirs[:need], f"The child's table lists the blocks of its tokens, {theirs[:need]}.\n{shown}"
    assert now["tables"].pop(name) and now["tables"] == before["tables"], f"A fork changes no other table.\n{shown}"
    judge_counts(m, books_of(m))


@ours
def judge_refusal(m, request, num_copies, more, before):
    now, free = books_of(m), len(before["free"])
    name = request.request_id
    changed = [part for part in now if sorted(now[part]) != sorted(before[part]) or (part == "tables" and now[part] != before[part])]
    assert num_copies + more > free or not changed, f"allocate_slots returned None, but {name} has a table: is its `return` missing?"
    assert not changed, f"A refusal must change nothing, but {' and '.join(changed)} changed."
    needs = f"{name} needs {more} more blocks and {num_copies} for a copy; {free} are free."
    if num_copies == 0 and free == more:
        needs += " No copy is needed here."
    assert num_copies + more > free, f"Wrongly refused. {needs}"

# %% judge-7-2-c jupyter={"source_hidden": true}
@ours
def judge_room(m, request, new, got, before):
    """After allocate_slots. before: the books as they were."""
    B, name, computed = m.block_size, request.request_id, request.num_computed_tokens
    old, place = before["tables"].get(name, []), computed // B
    tail = old[place] if place < len(old) else None
    readers = [other for other, table in before["tables"].items() if tail in table and other != name]
    more = max(len(old), cdiv(computed + new, B)) - len(old)
    if got is None:
        return judge_refusal(m, request, int(bool(readers)), more, before)
    now = books_of(m)
    room = len(got) > 0 or more + bool(readers) <= len(before["free"])
    assert room, f'{name} needs more blocks than are free. Say "not now" with None, not with {got!r}.'
    table, noted = [block.__index__() for block in got], now["tables"].get(name)
    copies = now["pending"][len(before["pending"]) :]
    shown = f"{name}, with {computed} tokens computed in {old}, computes {new} more and got {table}. Copies: {copies or 'none'}."
    assert table == noted, f"In self.tables stands {noted}: set_table, and return all of it.\n{shown}"
    others = {other: blocks for other, blocks in now["tables"].items() if other != name}
    assert others == {o: b for o, b in before["tables"].items() if o != name}, f"Another's table was changed.\n{shown}"
    assert more + bool(readers) <= len(before["free"]), f"{NO_ROOM}\n{shown}"
    moved = [at for at, block in enumerate(old) if table[at : at + 1] != [block]]
    if readers:
        judge_copy(m, name, old, place, table, moved, copies, readers, shown)
    else:
        why = UNTOUCHED if tail is None and old and old[-1] in (src for src, *_ in copies) else LAST
        assert not copies and not moved, f"{why}\n{shown}"
    need = f"{computed + new} tokens need {cdiv(computed + new, B)} blocks of {B}"
    assert len(table) == len(old) + more, f"{need}, besides those that it held already.\n{shown}"
    fresh = [block for at, block in enumerate(table) if old[at : at + 1] != [block]]
    assert len(set(fresh)) == len(fresh) and set(fresh) <= set(before["free"]), f"New blocks were free before.\n{shown}"
    judge_counts(m, now, tail if readers else None)

# %% judge-7-2-d jupyter={"source_hidden": true}
@ours
def judge_copy(m, name, old, place, table, moved, copies, readers, shown):
    """The block at `place` is written to, and `readers` hold it as well."""
    tail, also = old[place], f"Block {old[place]} is held by {' and '.join(readers)}, too."
    if place not in moved and not copies:
        raise AssertionError(f"{IN_PLACE} {also}\n{shown}")
    assert place in moved, f"The table still names block {tail}: the new one takes its place there.\n{shown}"
    assert len(moved) == 1 and len(copies) < 2, f"{EVERYTHING}\n{shown}"
    own = table[place]
    assert copies, f"{LOST}\n{shown}"
    assert copies != [(own, tail)], f"{TURNED}\n{shown}"
    assert copies == [(tail, own)], f"One block is to be copied, {tail} to {own}: BlockCopy({tail}, {own}, 1).\n{shown}"

# %% judge-7-2-e jupyter={"source_hidden": true}
@ours
def watched_forks(kind):
    """`kind`, a learner's manager, with every call judged."""
    right_kind = isinstance(kind, type) and issubclass(kind, Counted)
    assert right_kind, "MyForks must be a class that inherits from Counted."

    class Watched(kind):
        def watch(self, name, judge, call, *args):
            before = books_of(self)
            log = self.__dict__.setdefault("watch_log", [])
            log.append(f"{name}({', '.join(str(getattr(a, 'request_id', a)) for a in args)})")
            given = f"Calls: {'; '.join(log[-8:])}\nTables before the last: {before['tables']}; free: {before['free']}"
            try:
                value = bounded(call, *args)
                judge(self, *args, value, before)
            except NotImplementedError:
                raise  # not yet done
            except (Exception, Endless, Delegated) as error:
                if isinstance(error, IndexError) and not self.free_block_ids:
                    given = f"{NO_ROOM}\n{given}"
                raise AssertionError(told(name, error, given)) from None
            return value

        def fork(self, parent, child):
            return self.watch("fork", judge_fork, super().fork, parent, child)

        def allocate_slots(self, request, num_new_tokens):
            return self.watch("allocate_slots", judge_room, super().allocate_slots, request, num_new_tokens)

    return Watched

# %% play-7-2 jupyter={"source_hidden": true}
@ours
class Steps:
    """A pool in which each slot holds a name for its token, such as A3, and the requests on it."""

    def __init__(self, manager):
        self.manager, self.requests, self.known = manager, {}, {}
        self.slots = [None] * (manager.num_blocks * manager.block_size)
        self.num_copies = self.num_refused = 0

    def slot(self, name, position):
        B = self.manager.block_size
        return self.manager.tables[name][position // B] * B + position % B

    def fork(self, name, child, num_tokens):
        num_tokens = min(num_tokens, self.requests[name].num_computed_tokens)
        if num_tokens == 0:
            return
        request = Request(child, num_prompt_tokens=num_tokens + 1, max_tokens=99)
        request.num_computed_tokens = num_tokens
        self.manager.fork(self.requests[name], request)
        self.requests[child], self.known[child] = request, self.known[name][:num_tokens]

    def leave(self, name):
        if name in self.requests:
            self.manager.free(self.requests.pop(name))

    def step(self, moves):
        """Some requests compute together: room for all, then copies, then writes, then all read."""
        B, ran = self.manager.block_size, []
        for name, num_new in moves:
            request = self.requests.setdefault(name, Request(name, num_prompt_tokens=num_new, max_tokens=99))
            if self.manager.allocate_slots(request, num_new) is None:
                self.num_refused += 1
            else:
                ran.append((name, num_new))
        self.copy(B)
        for name, num_new in ran:
            self.write(name, num_new)
        self.read()

# %% play-7-2-b jupyter={"source_hidden": true}
@ours
class Oracle(Steps):
    def copy(self, B):
        copies = self.manager.copies()
        moved = [(dst, self.slots[src * B : src * B + B]) for src, dst, _, _ in copies]
        for dst, content in moved:
            self.slots[dst * B : dst * B + B] = content
        self.num_copies += len(copies)

    def write(self, name, num_new):
        known = self.known.setdefault(name, [])
        for _ in range(num_new):
            known.append(f"{name}{len(known)}")
            self.slots[self.slot(name, len(known) - 1)] = known[-1]
        self.requests[name].num_computed_tokens += num_new

    def read(self):
        for name, request in self.requests.items():
            wanted = self.known.get(name, [])[: request.num_computed_tokens]
            got = [self.slots[self.slot(name, i)] for i in range(len(wanted))]
            assert got == wanted, f"{name} reads {got}, but its tokens are {wanted}."
        self.manager.check()


@ours
def play_forks(kind, num_blocks, block_size, moves):
    """moves: ("A", "B", 6): B forks from A with 6 tokens; "A" leaves; a list of ("A", 5): A, perhaps new,
    computes 5 tokens, together with others."""
    oracle = Oracle(kind(num_blocks, block_size))
    for move in moves:
        if isinstance(move, str):
            oracle.leave(move)
        elif isinstance(move, list):
            oracle.step(move)
        else:
            oracle.fork(*move)
    return oracle

# %% play-7-2-c jupyter={"source_hidden": true}
@ours
def random_forks(rng, block_size, count):
    """Moves of some requests that start, fork, compute and leave."""
    moves, tokens = [], {}
    for i in range(count):
        name = f"R{i}"
        if tokens and rng.random() < 0.6:
            parent = rng.choice(list(tokens))
            tokens[name] = rng.randint(max(1, tokens[parent] - 2), tokens[parent])
            moves.append((parent, name, tokens[name]))
        else:
            tokens[name] = rng.randint(1, 3 * block_size)
            moves.append([(name, tokens[name])])
        for _ in range(rng.randint(1, 4)):
            step = [(each, rng.choice([1, 1, 2, block_size])) for each in rng.sample(list(tokens), rng.randint(1, len(tokens)))]
            moves.append(step)
            tokens.update({each: tokens[each] + new for each, new in step})
        if len(tokens) > 3:
            gone = rng.choice(list(tokens))
            del tokens[gone]
            moves.append(gone)
    return moves

# %% plays-7-2 jupyter={"source_hidden": true}
@ours
def small_forks():
    """(blocks, block_size, moves), the smallest first."""
    yield 8, 4, [[("A", 5)], [("A", 4)], "A", [("B", 1)]]
    yield 8, 4, [[("A", 4)], ("A", "B", 4)]
    yield 8, 4, [[("A", 6)], ("A", "B", 6)]
    yield 8, 4, [[("A", 2)], ("A", "B", 2), [("A", 1)], [("B", 1)], [("A", 1)]]
    yield 8, 4, [[("A", 6)], ("A", "B", 6), ("A", "C", 6), [("A", 1)], [("B", 1)], [("C", 1)]]
    yield 8, 4, [[("A", 4)], ("A", "B", 4), [("B", 1)], [("A", 1)]]  # full: nothing to copy
    yield 8, 4, [[("A", 9)], ("A", "B", 6), [("B", 1)], [("A", 1)], "A", [("B", 4)]]  # fewer than the parent has
    yield 8, 4, [[("A", 4)], ("A", "B", 3), [("A", 1), ("B", 1)], [("B", 5)]]  # as the engine forks
    yield 8, 4, [[("A", 6)], ("A", "B", 6), "A", [("B", 1)], "B", [("C", 9)]]  # the last holder
    yield 8, 4, [[("A", 6)], ("A", "B", 6), ("B", "C", 6), "B", [("C", 9)], [("A", 1)]]
    yield 4, 2, [[("A", 3)], ("A", "B", 3), [("A", 4)], [("B", 1)], "A", [("B", 3)]]
    yield 3, 2, [[("A", 3)], ("A", "B", 3), [("A", 2)], [("A", 1)], [("B", 1)], "A", [("B", 3)]]
    yield 2, 2, [[("A", 3)], ("A", "B", 3), [("A", 1)], [("B", 1)], "B", [("A", 1)]]
    yield 6, 1, [[("A", 2)], ("A", "B", 1), [("A", 1), ("B", 1)], ("B", "C", 2), [("B", 1), ("C", 1)]]


@ours
def slabs():
    """Chapter 02's manager, with room enough. It shares nothing: each sample computes its prompt."""
    return ContiguousKVCacheManager(1024, 1, max_model_len=64)


@ours
def run_samples(manager, lengths):
    """The real engine: 4 samples of each prompt. Their tokens, and the blocks in use at each step."""
    llm = LLM(tiny, kv_cache_manager=manager, max_num_seqs=8, max_num_batched_tokens=24, check_every_step=True)
    prompts = [[65 + i + k for k in range(prompt)] for i, (prompt, _) in enumerate(lengths)]
    params = [SamplingParams(n=4, temperature=1.0, seed=i, max_tokens=n, ignore_eos=True) for i, (_, n) in enumerate(lengths)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    used = [step.num_blocks_in_use for step in llm.metrics.steps]
    return [sample.token_ids for output in outputs for sample in output.outputs], used

# %% check-7-2
@check
def exercise_7_2(MyForks):
    managed, rng = watched_forks(MyForks), random.Random(72)
    plays = list(small_forks())
    for num_blocks, B, moves in plays:
        play_forks(managed, num_blocks, B, moves)
    print(f"{len(plays)} small plays right")
    for B, num_blocks in ((1, 40), (2, 24), (4, 18), (16, 12)):
        oracles = [
            play_forks(managed, num_blocks, B, random_forks(rng, B, 7)) for _ in range(5)
        ]
        num_copies = sum(oracle.num_copies for oracle in oracles)
        num_refused = sum(oracle.num_refused for oracle in oracles)
        print(f"blocks of {B:2}: {num_copies:2} copies, {num_refused:2} refusals")

# %% check-7-2-b
@check
def exercise_7_2_in_the_engine(MyForks):
    managed = watched_forks(MyForks)
    lengths = [(10, 9), (12, 5), (23, 4), (1, 3)]
    for B, num_blocks in ((4, 40), (16, 20), (4, 12)):
        expected, _ = run_samples(slabs(), lengths)
        manager = managed(num_blocks, B)
        tokens, used = run_samples(manager, lengths)
        said = f"With blocks of {B} other tokens came out than under slabs."
        assert tokens == expected, said
        lost = num_blocks - len(manager.free_block_ids)
        assert lost == 0, f"{lost} blocks are not free again at the end."
        most = f"at most {max(used)} in use"
        print(f"{num_blocks} blocks of {B:2}: tokens as under slabs; {most}")

# %% [markdown]
# Now a model whose text you can read: in a cell of your own, `LLM("smollm2",
# kv_cache_manager=MyForks(96, 16)).generate(..., SamplingParams(n=4, temperature=0.8))`.

# %% on-smollm2 tags=["solution", "nbval-ignore-output"]
def on_smollm2(manager):
    chat = [{"role": "user", "content": "Give my cat a name. Answer with one word."}]
    llm = LLM("smollm2", kv_cache_manager=manager, check_every_step=True)
    params = SamplingParams(n=4, temperature=0.7, seed=7, max_tokens=8)
    (output,) = llm.generate([chat], params, use_tqdm=False)
    return [sample.text for sample in output.outputs]


for answer in on_smollm2(MyForks(96, 16)):
    print(repr(answer))

# %% [markdown]
# ## Exercise 7.3: reference counts, and what 0 means
#
# *25 minutes, hard.*
#
# **a. Write the three moves of a pool whose blocks outlive their holders.** A block is in
# one of three places:
#
# | | ref_cnt | key | waits in |
# |---|---|---|---|
# | in use | 1 or more | perhaps | nowhere |
# | free | 0 | no | `free` |
# | cached and free | 0 | yes | `cached_free` |
#
# `key_of` maps a block's id to its key, and `cached` maps a key to the id of its block.
# `publish` is given, and fills both.
#
# - `let_go(block_id)`: one holder less. A block that nobody holds now waits, at the end of
#   the list where it belongs. Nobody may let go of a block that nobody holds: raise
#   `ValueError`, and change nothing.
# - `hold(block_id)`: one holder more, for a block in use or one that was found by its key.
#   It waits no more.
# - `take()`: a block for one holder, which will write other content into it. Blocks without
#   a key go first: nothing is lost with them. Then the first of `cached_free`, which from
#   now on nobody finds any more. Both lists give from their front. Return its id, or `None`
#   if no block is left.
#
# <details><summary>Hint 1: a nudge</summary>
# When the last holder leaves, are the block's keys and values still in the pool? Until
# when?
# </details>
# <details><summary>Hint 2: the rule</summary>
# ref_cnt says who holds a block, the key says whether it can be found: two different
# things. Letting go changes the first, and only take() the second. It has to be undone on
# both sides, in key_of and in cached.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# let_go:  ref_cnt is 0?  raise ValueError
#          count down;   0 now?  append it to cached_free if it has a key, else to free
# hold:    ref_cnt is 0?  remove it from the list in which it waits
#          count up
# take:    popleft from free, or else from cached_free, or else return None
#          a key?  delete it from key_of, and the key from cached
#          ref_cnt <- 1;  return it
# ```
# </details>

# %% ex-7-3
class MyPool:
    """Blocks, how often each is held, and the keys by which they are found."""
    def __init__(self, num_blocks):
        self.ref_cnt = [0] * num_blocks
        self.key_of = {}  # block id -> its key, of those that can be found
        self.cached = {}  # key -> block id: the same, the other way round
        self.free = deque(range(num_blocks))  # held by nobody, without a key
        self.cached_free = deque()  # held by nobody, with a key

    def publish(self, block_id, key):  # from now on it is found by this key
        self.key_of[block_id], self.cached[key] = key, block_id

    def let_go(self, block_id):
        ### BEGIN SOLUTION
        if self.ref_cnt[block_id] == 0:
            raise ValueError(f"nobody holds block {block_id}")
        self.ref_cnt[block_id] -= 1
        if self.ref_cnt[block_id] == 0:
            waits = self.cached_free if block_id in self.key_of else self.free
            waits.append(block_id)
        ### END SOLUTION

    def hold(self, block_id):
        ### BEGIN SOLUTION
        if self.ref_cnt[block_id] == 0:
            waits = self.cached_free if block_id in self.key_of else self.free
            waits.remove(block_id)
        self.ref_cnt[block_id] += 1
        ### END SOLUTION

    def take(self):
        ### BEGIN SOLUTION
        if not self.free and not self.cached_free:
            return None
        block_id = (self.free or self.cached_free).popleft()
        if block_id in self.key_of:
            del self.cached[self.key_of.pop(block_id)]
        self.ref_cnt[block_id] = 1
        return block_id
        ### END SOLUTION

# %% pool-7-3 jupyter={"source_hidden": true}
GONE = "ref_cnt 0 does not mean gone: nobody holds the block, but its content is there, and can be found until it is taken."
TOO_EARLY = "Others still hold this block: it waits nowhere before the last of them has left."
WRONG_LIST = "A block with a key waits in cached_free, one without in free: what can be found again is taken last."
STILL_WAITS = "A block that is held waits in no list: from there it would be handed out to somebody else."
GHOST = "The block was taken for other content, but its old key still finds it: what is found would be wrong."
HALF = "key_of and cached say the same, the one way round and the other: change both."
KEYLESS_FIRST = "Blocks without a key are taken before those with one: nothing is lost with them."
OLDEST = "Both lists give from their front and take at their end: what was let go longest ago goes first."
NONE_LEFT = "No block is left: take() returns None, and changes nothing."


@ours
def books_7_3(pool):
    names = ("ref_cnt", "key_of", "cached", "free", "cached_free")
    try:
        parts = [list(pool.ref_cnt), dict(pool.key_of), dict(pool.cached), list(pool.free), list(pool.cached_free)]
    except (AttributeError, TypeError, ValueError) as error:
        raise AssertionError(f"The five attributes stay what they are in __init__, but {error}") from None
    return dict(zip(names, plain(parts), strict=True))


@ours
def after(books, move, block):
    """The books as they must be after a move; for take, with the block that it takes."""
    books = copy.deepcopy(books)
    waits = books["cached_free" if block in books["key_of"] else "free"]
    if move == "let_go":
        books["ref_cnt"][block] -= 1
        if books["ref_cnt"][block] == 0:
            waits.append(block)
        return books
    if books["ref_cnt"][block] == 0:
        waits.remove(block)
    books["ref_cnt"][block] += 1
    if move == "take" and block in books["key_of"]:
        del books["cached"][books["key_of"].pop(block)]
    return books

# %% pool-7-3-b jupyter={"source_hidden": true}
@ours
def judge_move(before, move, block, now, wanted):
    """Raises, with the misconception that fits, unless `now` is `wanted`. All are books."""
    waiting, counts = now["free"] + now["cached_free"], now["ref_cnt"]
    had_key = block in before["key_of"]
    if move == "let_go" and counts[block] == wanted["ref_cnt"][block]:
        if counts[block] > 0:
            assert block not in waiting, TOO_EARLY
        elif had_key:
            assert block in now["key_of"] and before["key_of"][block] in now["cached"], GONE
            assert block not in now["free"], WRONG_LIST
        else:
            assert block not in now["cached_free"], WRONG_LIST
        if counts[block] == 0:
            assert block in waiting, "A block that nobody holds waits in a list: in none of them it is lost."
    if move == "hold":
        assert block not in waiting, STILL_WAITS
    if move == "take":
        assert block not in waiting, STILL_WAITS
        key = before["key_of"].get(block)
        if key is not None:
            found, named = key in now["cached"], block in now["key_of"]
            assert not (found and named), GHOST
            assert not (found or named), HALF
    assert counts == wanted["ref_cnt"], "ref_cnt is wrong: it counts the holders of each block."
    for part in ("free", "cached_free"):
        assert sorted(now[part]) == sorted(wanted[part]), f"The wrong blocks wait in {part}."
        assert now[part] == wanted[part], OLDEST
    lost = "Keys are made by publish and undone by take, by nothing else."
    assert now == wanted, lost

# %% pool-7-3-e jupyter={"source_hidden": true}
@ours
def judge_take(before, got):
    """Whether take() chose the right block."""
    free, cached = before["free"], before["cached_free"]
    if not free and not cached:
        assert got is None, f"{NONE_LEFT} It returned {got!r}."
        return
    assert got is not None, "take() returned None, but a block is left. Is its `return` missing?"
    assert hasattr(got, "__index__"), f"take() must return a block id, not {got!r:.80}."
    got = got.__index__()
    assert got in free + cached, f"take() returned block {got}, which somebody holds."
    assert not (free and got in cached), KEYLESS_FIRST
    assert got == (free or cached)[0], OLDEST

# %% pool-7-3-c jupyter={"source_hidden": true}
@ours
class Tried:
    """A learner's pool, with every move judged."""

    def __init__(self, kind, num_blocks):
        self.pool, self.log = ask(kind, num_blocks, raw=True), []

    def do(self, move, *args):
        before = books_7_3(self.pool)
        call = f"{move}({', '.join(map(repr, args))})"
        self.log.append(call)
        given = f"Moves: {'; '.join(self.log[-7:])}\nBefore the last: {before}"
        try:
            got = bounded(getattr(self.pool, move), *args)
            now = books_7_3(self.pool)
            given += f"\nAfter it:        {now}"
            if move == "publish":
                kept = now["cached"].get(args[1]) == args[0] and now["key_of"].get(args[0]) == args[1]
                assert kept, "publish was given: leave it as it is."
                return None
            if move == "take":
                judge_take(before, got)
                if got is None:
                    assert now == before, NONE_LEFT
                    return None
            block = args[0] if args else got.__index__()
            if move == "let_go" and before["ref_cnt"][block] == 0:
                raise AssertionError(f"Nobody holds block {block}: raise ValueError, and change nothing.")
            judge_move(before, move, block, now, after(before, move, block))
            return block
        except NotImplementedError:
            raise  # not yet done
        except (Exception, Endless, Delegated) as error:
            if move == "let_go" and isinstance(error, ValueError) and before["ref_cnt"][args[0]] == 0:
                assert books_7_3(self.pool) == before, f"A refused let_go must change nothing.\n{given}"
                return None
            if move == "take" and isinstance(error, IndexError) and not before["free"] + before["cached_free"]:
                given = f"{NONE_LEFT}\n{given}"
            raise AssertionError(told(move, error, given)) from None

# %% pool-7-3-d jupyter={"source_hidden": true}
@ours
def play_pool(kind, num_blocks, moves):
    """moves: "take"; ("let_go", 0), ("hold", 0), ("publish", 0, "p")."""
    tried = Tried(kind, num_blocks)
    for move in moves:
        tried.do(*((move,) if isinstance(move, str) else move))
    return tried


@ours
def small_moves():
    """(blocks, moves), the smallest first."""
    keep = ["take", ("publish", 0, "p"), ("let_go", 0)]
    yield 2, ["take", ("let_go", 0)]
    yield 2, ["take", ("hold", 0), ("let_go", 0), ("let_go", 0)]
    yield 2, keep
    yield 2, [*keep, ("hold", 0), ("hold", 0), ("let_go", 0), ("let_go", 0)]
    yield 2, [*keep, "take", "take", "take"]
    yield 1, ["take", "take"]
    yield 2, ["take", ("let_go", 0), ("let_go", 0)]
    yield 2, [*keep, ("let_go", 0), ("let_go", 1)]
    yield 3, ["take", "take", ("publish", 0, "p"), ("publish", 1, "q"), ("let_go", 1), ("let_go", 0), "take", "take", "take"]
    yield 3, ["take", "take", ("let_go", 1), ("let_go", 0), "take", "take", "take", "take"]
    yield 1, [*keep, "take", ("publish", 0, "q"), ("let_go", 0), ("hold", 0), ("let_go", 0), "take"]
    yield 1, [*keep, "take", ("let_go", 0), "take", ("publish", 0, "p"), ("let_go", 0)]
    yield 300, ["take"] * 300 + [("let_go", 299), ("hold", 280), ("let_go", 280), "take"]

# %% pool-7-3-f jupyter={"source_hidden": true}
@ours
def random_pool(kind, rng, num_blocks, count):
    """Random traffic on one pool; it ends with all blocks free. How many moves, keys found, keys lost."""
    tried, held, num_found, num_lost = Tried(kind, num_blocks), [], 0, 0
    for i in range(count):
        pool, move = tried.pool, rng.choice(["take", "take", "hold", "let_go", "let_go"])
        if move == "take":
            before = len(pool.cached)
            block = tried.do("take")
            num_lost += before - len(pool.cached)
            if block is not None:
                held.append(block)
                if rng.random() < 0.7:
                    tried.do("publish", block, f"k{i}")
        elif move == "hold" and pool.cached:
            held.append(tried.do("hold", rng.choice(sorted(pool.cached.values()))))
            num_found += 1
        elif move == "let_go" and held:
            tried.do("let_go", held.pop(rng.randrange(len(held))))
    for block in held:
        tried.do("let_go", block)
    return len(tried.log), num_found, num_lost

# %% check-7-3
@check
def exercise_7_3(MyPool):
    for num_blocks, moves in small_moves():
        play_pool(MyPool, num_blocks, moves)
    rng = random.Random(73)
    for num_blocks in (2, 5, 12):
        counts = [random_pool(MyPool, rng, num_blocks, 120) for _ in range(3)]
        num_moves, num_found, num_lost = map(sum, zip(*counts, strict=True))
        seen = f"{num_found:3} found by key, {num_lost:3} keys lost"
        print(f"{num_blocks:2} blocks: {num_moves} moves right; {seen}")

# %% [markdown]
# **b. Write the check that finds a pool whose books contradict each other.** Exercise 4.5
# did it for blocks without keys. `pool` has the five attributes of part a; `tables` maps
# the name of each request to its block ids. Raise `InvariantBroken("...")` where one of
# these rules is broken, with a message, and return nothing where none is:
#
# 1. `ref_cnt` of a block is the number of tables that name it.
# 2. A block that is held waits in no list. One that nobody holds waits in exactly one,
#    once: in `cached_free` if it has a key, else in `free`.
# 3. `key_of` and `cached` say the same: if one maps a block to a key, the other maps this
#    key to this block.
#
# All ids that occur are ids of the pool, and no table names a block twice.
#
# <details><summary>Hint 1: a nudge</summary>
# Two keys that both find block 3: which of the two maps shows it, and by what?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Look at each block by itself, and at the maps from both sides. A sum of counts, or a set
# of ids, hides what two faults do to each other.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# for each block:  names <- tables that name it;   their number is ref_cnt?
#                  in free <- how often;  in cached_free <- how often
#                  wanted: (0, 0) if it is held, (0, 1) if it has a key, else (1, 0)
# for each block, key in key_of:    cached maps the key to the block?
# for each key, block in cached:    key_of maps the block to the key?
# ```
# </details>

# %% ex-7-3-b
def check_pool(pool, tables):
    """Raises InvariantBroken where the books contradict each other."""
    ### BEGIN SOLUTION
    for block_id, count in enumerate(pool.ref_cnt):
        names = [name for name, table in tables.items() if block_id in table]
        if len(names) != count:
            said = f"ref_cnt {count}, held by {names}"
            raise InvariantBroken(f"block {block_id}: {said}")
        waits = pool.free.count(block_id), pool.cached_free.count(block_id)
        free = (0, 1) if block_id in pool.key_of else (1, 0)
        if waits != ((0, 0) if names else free):
            said = f"held by {names}, waits {waits} times"
            raise InvariantBroken(f"block {block_id}: {said}")
    turned = {key: block_id for block_id, key in pool.key_of.items()}
    if pool.cached != turned or len(turned) != len(pool.key_of):
        raise InvariantBroken(f"cached {pool.cached}, key_of {pool.key_of}")
    ### END SOLUTION

# %% books-7-3 jupyter={"source_hidden": true}
@ours
class Books:
    """A pool's five attributes, and nothing else; `tables` besides."""

    def __init__(self, ref_cnt, key_of, free, cached_free, tables, cached=None):
        self.ref_cnt, self.key_of, self.tables = list(ref_cnt), dict(key_of), tables
        self.cached = {key: block for block, key in key_of.items()} if cached is None else dict(cached)
        self.free, self.cached_free = deque(free), deque(cached_free)

    def but(self, **changes):
        parts = {name: changes.get(name, value) for name, value in copy.deepcopy(vars(self)).items()}
        if "key_of" in changes and "cached" not in changes:
            parts["cached"] = None
        return Books(**parts)

    def __repr__(self):
        shown = {name: list(value) if isinstance(value, deque) else value for name, value in vars(self).items()}
        return ", ".join(f"{name} = {value}" for name, value in shown.items())


@ours
def good_books():
    """(what is right about it though it may look wrong, books)."""
    yield "an empty pool", Books([0, 0], {}, [1, 0], [], {})
    yield "one block in use, without a key", Books([1, 0], {}, [1], [], {"A": [0]})
    yield "a block in use that has a key", Books([1, 0], {0: "p"}, [1], [], {"A": [0]})
    yield "a block that nobody holds and that can be found: ref_cnt 0 is not gone", Books([0, 0], {0: "p"}, [1], [0], {})
    yield "two tables that share a block", Books([1, 2, 1], {1: "p"}, [], [], {"A": [1, 0], "B": [1, 2]})
    yield "a key that is 0, of block 0", Books([0, 1], {0: 0}, [], [0], {"A": [1]})
    yield "a table without blocks", Books([0], {}, [0], [], {"A": []})
    yield "lists in any order", Books([0] * 6, {4: "p", 1: "q", 0: "r"}, [5, 2, 3], [1, 4, 0], {})
    ids = list(range(900, 400, -1))
    yield "a large pool", Books([0] * 401 + [1] * 500, {i: f"k{i}" for i in range(300, 700)}, range(300), range(300, 401), {"A": ids})


# %% books-7-3-b jupyter={"source_hidden": true}
@ours
def bad_books():
    """(what the pool does wrong, the smallest books that show it)."""
    one = Books([1, 0, 0, 0], {0: "p", 2: "q"}, [1, 3], [2], {"A": [0]})
    two = Books([1, 2, 1], {1: "p"}, [], [], {"A": [1, 0], "B": [1, 2]})
    yield "does not count a second holder: ref_cnt is too low", two.but(ref_cnt=[1, 1, 1])
    yield "counts the second holder at another block, so that the sum is right", two.but(ref_cnt=[2, 1, 1])
    yield "does not count a holder down when it leaves: ref_cnt is too high", one.but(ref_cnt=[2, 0, 0, 0])
    yield "frees a table and leaves ref_cnt at 1: the block is lost", one.but(ref_cnt=[1, 0, 0, 1], free=[1])
    yield "lists a block in use as free", one.but(free=[1, 3, 0])
    yield "lists a block in use, with a key, as cached and free", one.but(cached_free=[2, 0])
    yield "frees a shared block with its first holder", Books([0, 1, 1], {1: "p"}, [0], [1], {"B": [1, 2]})
    yield "loses a block: it is in no table and waits in no list", one.but(free=[1])
    yield "loses a cached block: it waits in no list", one.but(cached_free=[])
    yield "lists a block in free twice", one.but(free=[1, 3, 3])
    yield "lists a block in cached_free twice", one.but(cached_free=[2, 2])
    yield "loses one block and lists another twice, so that the number is right", one.but(free=[1, 1])
    yield "lists a block in both lists", one.but(free=[1, 3, 2])
    yield "puts a block with a key among those without", one.but(free=[1, 3, 2], cached_free=[])
    yield "puts a block without a key among those with one", one.but(free=[1], cached_free=[2, 3])
    yield "forgets the key on one side: key_of still has it", one.but(cached={"p": 0})
    yield "forgets the key of a block in use on one side: key_of still has it", one.but(cached={"q": 2})
    yield "forgets the key on the other side: cached still finds the block", Books(
        [1, 0, 0, 0], {0: "p"}, [1, 3, 2], [], {"A": [0]}, {"p": 0, "q": 2})  # fmt: skip
    yield "leaves the old key of a block that was published anew", one.but(cached={"p": 0, "q": 2, "old": 2})
    yield "maps a key to another block", one.but(cached={"p": 2, "q": 0})
    yield "gives two blocks the same key", one.but(key_of={0: "p", 2: "p"}, cached={"p": 0})
    yield "gives two blocks the same key", one.but(key_of={0: "p", 2: "p"}, cached={"p": 2})

# %% books-7-3-c jupyter={"source_hidden": true}
@ours
def spoilt(books, rng):
    """(what is wrong, books) of right books in which one thing was changed."""
    counts, block = list(books.ref_cnt), rng.randrange(len(books.ref_cnt))
    counts[block] += rng.choice([1, -1])
    yield f"counts block {block} wrong", books.but(ref_cnt=counts)
    for place in ("free", "cached_free"):
        listed = list(getattr(books, place))
        yield f"lists block {block} once more in {place}", books.but(**{place: [*listed, block]})
        if listed:
            yield f"loses block {listed[0]}, which waited in {place}", books.but(**{place: listed[1:]})
    for name in books.tables:
        yield f"forgets the table of {name}", books.but(tables={n: t for n, t in books.tables.items() if n != name})
        break
    for key, found in books.cached.items():
        yield f"forgets {key!r} in cached", books.but(cached={k: b for k, b in books.cached.items() if k != key})
        yield f"finds {found} by a second key", books.but(cached={**books.cached, "other": found})
        break


@ours
def complaint(check_pool, books):
    """What the learner's check has against the books; None if it has nothing."""
    before = repr(books)
    try:
        value = bounded(check_pool, books, books.tables)
    except InvariantBroken as error:
        assert str(error).strip(), f"InvariantBroken needs a message: which block, and what is wrong?\n{before}"
        return str(error)
    except NotImplementedError:
        raise  # not yet done
    except (Exception, Endless, Delegated) as error:
        more = ""
        if isinstance(error, AssertionError | ValueError | RuntimeError):
            more = "If this is what it says of broken books: it has to raise InvariantBroken.\n"
        raise AssertionError(told("check_pool", error, f"{more}The books: {before}")) from None
    assert value is None, f"check_pool must raise InvariantBroken, or return nothing; it returned {value!r:.80}."
    assert repr(books) == before, f"check_pool changed the books.\nThey were {before}"
    return None

# %% books-7-3-d jupyter={"source_hidden": true}
@ours
def passes(check_pool, what, books):
    said = complaint(check_pool, books)
    assert said is None, f"False alarm. These books are right ({what}), but check_pool says: {said}\nThe books: {books}"


@ours
def fails(check_pool, what, books):
    said = f"Missed. The pool {what}. check_pool finds nothing wrong.\nThe books: {books}"
    assert complaint(check_pool, books), said


@ours
def traffic(rng, num_blocks, count):
    """Right books of random traffic, made by plain moves on plain data."""
    books, tables = Books([0] * num_blocks, {}, range(num_blocks), [], {}), {}
    for i in range(count):
        move = rng.choice(["take", "take", "share", "leave"])
        if move == "leave" and tables:
            for block in tables.pop(rng.choice(list(tables))):
                books.ref_cnt[block] -= 1
                if books.ref_cnt[block] == 0:
                    (books.cached_free if block in books.key_of else books.free).append(block)
        elif move == "share" and books.cached:
            block = rng.choice(sorted(books.cached.values()))
            tables[f"R{i}"] = [block]
            if books.ref_cnt[block] == 0:
                books.cached_free.remove(block)
            books.ref_cnt[block] += 1
        elif move == "take" and (books.free or books.cached_free):
            block = (books.free or books.cached_free).popleft()
            books.cached.pop(books.key_of.pop(block, None), None)
            books.ref_cnt[block], tables[f"R{i}"] = 1, [block]
            if rng.random() < 0.7:
                books.key_of[block], books.cached[f"k{i}"] = f"k{i}", block
        yield books.but(tables=copy.deepcopy(tables))

# %% check-7-3-b
@check
def exercise_7_3_check(check_pool):
    good, bad, rng = list(good_books()), list(bad_books()), random.Random(74)
    for what, books in good:
        passes(check_pool, what, books)
    for what, books in bad:
        fails(check_pool, what, books)
    print(f"small books: {len(good)} right ones pass, {len(bad)} broken ones are caught")
    num_right = num_broken = 0
    for num_blocks in (2, 4, 9):
        for books in traffic(rng, num_blocks, 40):
            passes(check_pool, "of right traffic", books)
            num_right += 1
            for what, broken in spoilt(books, rng):
                fails(check_pool, what, broken)
                num_broken += 1
    print(f"random traffic: {num_right} pass, {num_broken} are caught")

# %% [markdown]
# ## Exercise 7.4: the longest usable hit
#
# *10 minutes, medium.*
#
# **How many tokens of a prompt are skipped, how many are run, and what does it cost the
# pool?**
#
# The lookup has found the blocks of a prompt's beginning. `num_tokens` counts all known
# tokens of the request; `ref_cnts` has the `ref_cnt` of each found block, in order. A
# request may have been preempted: then its known tokens include some that it sampled
# before, and nothing changes for you. Return three numbers:
#
# | | |
# |---|---|
# | `num_cached_tokens` | tokens that are used as found |
# | `num_new_tokens` | known tokens that are still to be run |
# | `num_blocks_taken` | by how many the free blocks become fewer, once all known tokens have a slot |
#
# At least one token has to be run, for the logits that the next token is sampled from. A
# published block does not change: whoever uses it writes nothing into it. A block that nobody
# holds is free, also if it can be found.
#
# ```text
# block_size = 4, 10 tokens, found: 2 blocks, ref_cnts = [1, 0]
#
# [found][found][new]      8 tokens cached, 2 to run
#                          taken: 1 new block, and the found one that was free until now: 2
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# 8 tokens, and both of their blocks are found. Where do the logits for the ninth token come
# from?
# </details>
# <details><summary>Hint 2: the rule</summary>
# At most num_tokens - 1 tokens are skipped, and they come in whole blocks: the block that
# the last token lies in is computed anew, in a block of the request's own, even if only
# that one token was missing.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# usable <- the smaller of: found blocks, (num_tokens - 1) // block_size
# cached <- usable * block_size
# taken  <- blocks for num_tokens, rounded up, less usable
#           and as many as there are zeros among the first so many of ref_cnts
# ```
# </details>

# %% ex-7-4
def admit(num_tokens, ref_cnts, block_size):
    """(num_cached_tokens, num_new_tokens, num_blocks_taken) of a request."""
    ### BEGIN SOLUTION
    num_usable = min(len(ref_cnts), (num_tokens - 1) // block_size)
    num_cached_tokens = num_usable * block_size
    num_blocks_taken = cdiv(num_tokens, block_size) - num_usable
    num_blocks_taken += ref_cnts[:num_usable].count(0)
    return num_cached_tokens, num_tokens - num_cached_tokens, num_blocks_taken
    ### END SOLUTION

# %% cases-7-4 jupyter={"source_hidden": true}
@ours
def case_7_4(value, n, ref_cnts, B):
    """One request that comes in: what was asked, got, wanted, and the usual slips."""
    names = ("num_cached_tokens", "num_new_tokens", "num_blocks_taken")
    asked = f"num_tokens = {n}, ref_cnts = {ref_cnts}, block_size = {B}"
    got = list_of_numbers(value, f"admit must return 3 numbers, ({', '.join(names)})", 3)
    found, (cached, new, taken) = len(ref_cnts), right_admit(n, ref_cnts, B)
    usable, idle = cached // B, ref_cnts[: cached // B].count(0)
    nothing = "Nothing is left to run: the next token is sampled from the last known token's logits, so at least this one has to be run."
    inside = "The last token would be written into a published block, which others may read: a hit ends where a block ends."
    full = "A block's length is not always lost: where the prompt goes on behind what was found, all of it is usable."
    where = "Those are blocks; tokens were asked for."
    beyond = "Only what was found can be used."
    own = "A block that nobody holds is free until now, also if it can be found: once it is used, one block less is free."
    sharer = "A block that others hold already costs nothing more: it was not free."
    anew = "Found blocks are not taken anew; they are shared."
    cut = "The found block that is not used costs nothing itself: a new one is taken in its place."
    slips = {
        "num_cached_tokens": {
            nothing: found * B, nothing + " ": min(found * B, n // B * B), inside: min(found * B, n - 1), beyond: (n - 1) // B * B,
            full: max(0, found - 1) * B, full + " ": max(0, min(found * B, (n - 1) // B * B - B)), where: usable,
            "A hit of the whole prompt is cut by one block, not given up.": 0 if found * B == n else found * B,
            "What others hold right now can be used as well: nobody writes to it.": B * min(usable, ref_cnts.count(0)),
            "What nobody holds can be used as well, until it is taken.": B * min(usable, found - ref_cnts.count(0))},
        "num_new_tokens": {
            nothing: n - found * B, "All known tokens that are not cached have to be run, not only the last one.": 1,
            "Cached tokens are skipped: that is what a hit is for.": n, where: cdiv(n, B) - usable},
        "num_blocks_taken": {
            own: cdiv(n, B) - usable, anew: cdiv(n, B), anew + " ": cdiv(n, B) + idle, sharer: cdiv(n, B) - idle, sharer + " ": cdiv(n, B) - usable + usable - idle,
            cut: cdiv(n, B) - usable + ref_cnts.count(0), cut + " ": cdiv(n, B) - found + ref_cnts.count(0),
            "The found block that is not used has to be replaced: a new one is taken.": cdiv(n, B) - found + idle,
            "A last block that is partly full is a block all the same.": n // B - usable + idle,
            "n // block_size + 1 is one block too many where n tokens fill their blocks exactly.": n // B + 1 - usable + idle},
    }  # fmt: skip
    return asked, dict(zip(names, got, strict=True)), {"num_cached_tokens": cached, "num_new_tokens": new, "num_blocks_taken": taken}, slips

# %% cases-7-4-b jupyter={"source_hidden": true}
@ours
def inputs_7_4():
    """(num_tokens, ref_cnts, block_size), small ones first."""
    yield from [(1, [], 4), (1, [2], 1), (4, [1], 4), (4, [0], 4), (5, [1], 4), (5, [0], 4), (8, [1, 1], 4), (8, [1, 0], 4)]
    yield from [(10, [1, 0], 4), (9, [], 4), (12, [2], 4), (12, [0, 0, 0], 4), (3, [1, 1, 0], 1), (13, [3, 2, 0], 4), (12, [1, 1], 4)]
    rng = random.Random(74)
    for _ in range(40):
        B, n = rng.choice([1, 2, 4, 16]), rng.randint(1, 70)
        found = rng.choice([n // B, n // B, rng.randint(0, n // B)])
        held = rng.randint(0, found)
        yield n, [rng.randint(1, 3) for _ in range(held)] + [0] * (found - held), B
    yield 128_000, [2] * 5_000 + [0] * 3_000, 16

# %% check-7-4
@check
def exercise_7_4(admit):
    inputs = list(inputs_7_4())
    examine(admit, inputs, case_7_4)
    whole = sum(len(found) * B == n for n, found, B in inputs)
    print(f"{len(inputs)} requests right, {whole} of them found whole")
    mine, prompt = asked_each_time(admit), list(range(60, 72))
    for B in (1, 4, 12, 16):
        manager = SharingManager(48 // B, B, right_keys, right_hit, mine)
        prompts = [(prompt, None)] * 2 + [([*prompt, 1], None)]
        tokens, hits, _ = serve(manager, prompts)
        assert tokens[0] == tokens[1], f"With blocks of {B} a hit changed the answer."
        print(f"blocks of {B:2}: 12 tokens, again, and one more: hit tokens {hits}")

# %% [markdown]
# With blocks of 1 the hit is a token less than everything. With blocks of 12 it is nothing
# less than the whole block: that one token costs 12. (vLLM does the same.) With 13 tokens,
# all 12 are used.
# <!-- source: vLLM, vllm/v1/core/kv_cache_manager.py, get_computed_blocks -->

# %% [markdown]
# ## Exercise 7.5: who goes first
#
# *12 minutes, medium.*
#
# **Requests have ended; now new ones need blocks. In which order are the free blocks
# taken?**
#
# `events` tells what happened, in order:
#
# - `("start", name, table)`: a request comes in with these blocks. Blocks that others
#   hold are shared. Blocks that waited, free but with a key, were found again. All others
#   occur here for the first time.
# - `("end", name, num_full_blocks)`: it ends. The first `num_full_blocks` of its table are
#   full and have a key; the rest has none.
#
# Return the ids of all blocks that are free now, in the order in which they will be taken.
# The order is the package's:
#
# 1. Blocks without a key go first, in the order in which they became free.
# 2. Then those with one, the least recently used first: a block was last used when its last
#    holder ended.
# 3. Of blocks that became free with the same request, the last of its table goes first.
#
# ```text
# A starts with [0, 1, 2], B with [0, 3]
# A ends, 2 of its blocks full        free: 2, then 1           B still holds 0
# B ends, 2 of its blocks full        free: 2, then 1, 3, 0
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# Someone comes whose prompt begins like A's. What is block 1 good for, if block 0 has been
# taken? And block 0, if block 1 has been taken?
# </details>
# <details><summary>Hint 2: the rule</summary>
# A hit is a beginning, so a tail without its head is worth nothing. Go through the events
# with a count of holders for each block; a block enters a queue when its count becomes 0,
# and leaves it when it is found again.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# without, with_key <- two empty lists;  tables, holders <- empty
# start:  note the table;  for each block:  one holder more;  out of with_key, if there
# end:    for each block of the table, from the last to the first:
#             one holder less;  none left?   add it to with_key if its place is < num_full_blocks
#                                            else to without
# return without, then with_key
# ```
# </details>

# %% ex-7-5
def eviction_order(events):
    """Ids of the free blocks, in the order in which they will be taken."""
    ### BEGIN SOLUTION
    without_key, with_key, tables, holders = [], [], {}, Counter()
    for kind, name, what in events:
        if kind == "start":
            tables[name] = what
            for block_id in what:
                holders[block_id] += 1
                if block_id in with_key:
                    with_key.remove(block_id)
            continue
        for place, block_id in reversed(list(enumerate(tables.pop(name)))):
            holders[block_id] -= 1
            if holders[block_id] == 0:
                (with_key if place < what else without_key).append(block_id)
    return without_key + with_key
    ### END SOLUTION

# %% orders-7-5 jupyter={"source_hidden": true}
@ours
def order_7_5(events, heads=False, keys="last", stay=False, early=False, held=False, newest=False):
    """The right order, or a wrong one. heads: the first block of a table first. keys: "last", "first" (with a key before
    those without), "mixed" (one queue), "only" (those with a key). stay: found again, a block keeps its place. early: it
    enters when its first holder ends, held: and is listed although others hold it. newest: last freed, first taken."""
    queues, tables, holders = ([], []), {}, Counter()
    for kind, name, what in events:
        if kind == "start":
            tables[name] = what
            for block in what:
                holders[block] += 1
                if block in queues[1] and not stay:
                    queues[1].remove(block)
            continue
        places = list(enumerate(tables.pop(name)))
        for place, block in places if heads else places[::-1]:
            holders[block] -= 1
            has_key = place < what
            if (holders[block] == 0 or early) and block not in queues[has_key]:
                queues[has_key].append(block)
            if keys == "mixed" and not has_key and block in queues[0]:
                queues[0].remove(block)
                queues[1].append(block)
    if newest:
        queues = queues[0][::-1], queues[1][::-1]
    order = {"first": queues[1] + queues[0], "only": queues[1]}.get(keys, queues[0] + queues[1])
    return [block for block in order if held or holders[block] == 0]

# %% orders-7-5-b jupyter={"source_hidden": true}
@ours
def case_7_5(value, events):
    """One course of events: what was asked, got, wanted, and the usual slips."""
    shown = "\n".join(f"  {name} {'starts with' if kind == 'start' else 'ends, full blocks:'} {what}" for kind, name, what in events)
    got = list_of_numbers(value, "eviction_order must return a list of block ids")
    assert len(set(got)) == len(got), f"A block is taken once; your order {list(map(int, got))} has one twice.\nevents:\n{shown}"
    heads = "Tails go before heads: without its head no tail can be found, while a head without its tail is still a hit."
    keyless = "Blocks without a key go first: nothing is lost with them."
    stay = "A block that was found again was used again: it leaves the queue, and enters at its end when its last holder ends."
    last = "A shared block becomes free with its last holder, not with its first: that is when it was used last."
    held = "A block that a running request holds is not free."
    newest = "Least recently used goes first: what became free last is most likely wanted again."
    return f"events:\n{shown}", {"order": got}, {"order": order_7_5(events)}, {"order": {
        heads: order_7_5(events, heads=True),
        keyless: order_7_5(events, keys="mixed"), keyless + " ": order_7_5(events, keys="first"),
        "Blocks without a key are free as well, and taken first.": order_7_5(events, keys="only"),
        stay: order_7_5(events, stay=True), last: order_7_5(events, early=True), last + " ": order_7_5(events, early=True, stay=True),
        held: order_7_5(events, early=True, held=True), held + " ": order_7_5(events, early=True, held=True, stay=True),
        newest: order_7_5(events, newest=True), newest + " ": order_7_5(events)[::-1],
        newest + "  ": order_7_5(events, newest=True, heads=True),
        "The order is that of becoming free, not of the ids.": sorted(order_7_5(events)),
    }}  # fmt: skip


@ours
def small_events():
    yield [("start", "A", [0, 1, 2]), ("end", "A", 3)]
    yield [("start", "A", [3, 1, 2]), ("end", "A", 2)]
    yield [("start", "A", [0, 1]), ("start", "B", [2, 3]), ("end", "A", 2), ("end", "B", 1)]
    yield [("start", "A", [0, 1]), ("start", "B", [0, 2]), ("end", "A", 2)]
    yield [("start", "A", [0, 1, 2]), ("start", "B", [0, 3]), ("end", "A", 2), ("end", "B", 2)]
    yield [("start", "A", [5, 4]), ("start", "B", [3, 2]), ("end", "B", 2), ("end", "A", 2)]
    again = [("start", "A", [0, 1]), ("end", "A", 2), ("start", "B", [2]), ("end", "B", 1)]
    yield [*again, ("start", "C", [0, 3]), ("end", "C", 1)]
    yield [*again, ("start", "C", [0])]
    yield [("start", "A", [0]), ("end", "A", 0)]
    yield [("start", "A", [7])]
    yield [("start", "A", [0, 1, 2, 3]), ("end", "A", 1)]  # blocks held ahead

# %% orders-7-5-c jupyter={"source_hidden": true}
@ours
def package_events(rng, count):
    """Random requests on the package's own manager: (events, the order of its queues)."""
    B, num_blocks = 2, 200
    manager = PrefixCachingKVCacheManager(num_blocks, B)
    running, events, used = [], [], set()
    for i in range(count):
        tokens = [rng.choice([[1, 2, 3, 4, 5, 6], [1, 2, 7, 8], [9, 9, 9]]), [rng.randint(10, 99) for _ in range(rng.randint(1, 4))]]
        request = Request(f"R{i}", tokens[0][: rng.randint(1, 6)] + tokens[1], max_tokens=9)
        hit = manager.get_num_cached_tokens(request)
        options = {"num_cached_tokens": hit} if hit else {}
        table = list(manager.allocate_slots(request, request.num_tokens - hit, **options))
        request.num_computed_tokens = request.num_tokens
        manager.cache_blocks(request)
        events.append(("start", request.request_id, table))
        used.update(table)
        running.append(request)
        while len(running) > rng.choice([1, 2, 3]):
            gone = running.pop(rng.randrange(len(running)))
            table = manager.tables[gone.request_id]
            published = [manager.block_pool.blocks[block].key is not None for block in table]
            events.append(("end", gone.request_id, published.count(True)))
            if sorted(published, reverse=True) != published:  # a twin: somebody else's copy has the key
                return package_events(rng, count)
            manager.free(gone)
    free = [block.block_id for block in manager.block_pool.get_all_free_blocks()]
    return events, [block for block in free if block in used]

# %% check-7-5
@check
def exercise_7_5(eviction_order):
    rng = random.Random(75)
    plays = [package_events(rng, 3 + i // 4) for i in range(40)]
    inputs = [(events,) for events in (*small_events(), *(events for events, _ in plays))]
    examine(eviction_order, inputs, case_7_5)
    for events, order in plays:
        given = f"The package's manager has another order: {order}\n{events}"
        assert list(plain(ask(eviction_order, events))) == order, given
    print(f"{len(inputs)} courses of events right")
    print(f"{len(plays)} of them ran on the package's manager, which agrees")
    print("the picture above:", plain(ask(eviction_order, inputs[4][0])))

# %% [markdown]
# ## Exercise 7.6: six prompts, two block sizes
#
# *12 minutes, medium.*
#
# **Predict what a prefix cache finds of each prompt, and what that saves.** Paper is
# enough; code is allowed. Six prompts come one after the other, each when the one before is
# done. The pool has room for everything. Each answer has 8 tokens.
#
# | prompt | its tokens, in order | how many |
# |---|---|---|
# | 1 | header of 26, question of 6 | 32 |
# | 2 | header, another question of 9 | 35 |
# | 3 | the same as prompt 1 | 32 |
# | 4 | the time of day (1 token), header, the question of prompt 1 | 33 |
# | 5 | prompt 1, its answer of 8, a new question of 10 | 50 |
# | 6 | the first 12 tokens of the header | 12 |
#
# <!-- source: the sums of the lengths in the same rows -->
#
# Questions begin with different tokens, and no token of one thing occurs in another. Return
# four lists of six numbers:
#
# - `hits_4` and `hits_16`: hit tokens of each prompt, with blocks of 4 and with blocks of
#   16
# - `prompt_steps`: steps that compute tokens of the prompt, with blocks of 4. A step
#   computes 16 tokens at most.
# - `answer_steps`: the steps after those, up to the last token of the answer, with blocks
#   of 4. The step that ends a prompt samples the first token of its answer already.
#
# <details><summary>Hint 1: a nudge</summary>
# Which tokens have keys and values in the pool when prompt 5 comes? Is the last token of
# prompt 1's answer one of them?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Find the longest common beginning with anything that was computed before, answers
# included. Cut it to whole blocks, and to at most one token less than the prompt (exercise
# 7.4).
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# common <- for each prompt: tokens from its first on that some earlier request has computed
# hit    <- the smaller of common and prompt - 1, rounded down to whole blocks
# prompt steps <- (prompt - hit) / 16, rounded up
# answer steps <- output tokens that are sampled after the prompt's last step
# ```
# </details>

# %% ex-7-6
def predicted():
    """(hits_4, hits_16, prompt_steps, answer_steps), six numbers each."""
    ### BEGIN SOLUTION
    lengths, common = [32, 35, 32, 33, 50, 12], [0, 26, 32, 0, 39, 12]

    def hits(block_size):
        usable = [min(c, n - 1) for c, n in zip(common, lengths, strict=True)]
        return [tokens // block_size * block_size for tokens in usable]

    left = [n - hit for n, hit in zip(lengths, hits(4), strict=True)]
    return hits(4), hits(16), [cdiv(tokens, 16) for tokens in left], [7] * 6
    ### END SOLUTION

# %% measured-7-6 jupyter={"source_hidden": true}
SIX = "header + question (6)", "header + another question", "the same as prompt 1", "the time + header + question", "prompt 1 + answer + question", "12 tokens of the header"


@ours
def measured_7_6(block_size):
    """The package's manager in the real engine: (hit tokens, prompt steps, answer steps) of each prompt."""
    manager = PrefixCachingKVCacheManager(640 // block_size, block_size)
    header, questions = list(range(26)), [list(range(30, 36)), list(range(40, 49)), list(range(50, 60))]
    llm = LLM(tiny, kv_cache_manager=manager, max_num_batched_tokens=16, check_every_step=True)
    params, rows, answer = SamplingParams(max_tokens=8, ignore_eos=True), [], None
    for i in range(6):
        first = header + questions[0]
        prompt = [first, header + questions[1], first, [99, *first], [*first, *(answer or ()), *questions[2]], header[:12]][i]
        before = len(llm.metrics.steps)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        answer = answer or output.outputs[0].token_ids
        hit, num_steps = output.num_cached_tokens, len(llm.metrics.steps) - before
        prompt_steps = cdiv(len(prompt) - hit, 16)
        rows.append((hit, prompt_steps, num_steps - prompt_steps))
    return rows


@ours
def lists_7_6(value):
    said = "predicted must return four lists, (hits_4, hits_16, prompt_steps, answer_steps), of six numbers each"
    value = plain(value)
    assert isinstance(value, list | tuple) and len(value) == 4, f"{said}, not {value!r:.100}"
    return [list_of_numbers(part, said, 6) for part in value]

# %% slips-7-6 jupyter={"source_hidden": true}
@ours
def slips_of_hit(i, B, hit):
    """What to say about a wrong number of hit tokens of prompt i + 1: (what it would be, what to say)."""
    n, common = [32, 35, 32, 33, 50, 12][i], [0, 26, 32, 0, 39, 12][i]
    with_previous = [0, 26, 26, 0, 0, 12][i]
    whole = "Nothing would be left to run: a hit is at least one token less than the prompt, which costs a block."
    blocks = "A hit is made of whole blocks: what lies in a block that is only partly common is computed anew."
    if i == 0:
        yield from ((wrong, "Nothing was computed before the first prompt.") for wrong in range(1, 99))
    if i == 3:
        shifted = "A token in front moves all that follows, and is part of its history: nothing of the header is found."
        yield from ((wrong, shifted) for wrong in range(1, 99))
    if B == 16 and i == 5:
        short = "A prefix that is shorter than a block never hits, and nobody is told."
        yield from ((wrong, short) for wrong in range(1, 99))
    if common >= n:
        yield from [(n // B * B, whole), (n, whole)]
    if i == 4:
        yield 40 // B * B, "The last token of the answer was sampled, but never computed: its block is not full."
        yield 40, "The last token of the answer was sampled, but never computed: its block is not full."
        yield 32, "Answers are cached, too: full blocks of all computed tokens, sampled ones as well."
        yield 26 // B * B, "The header is not all that they have in common: prompt 5 begins with all of prompt 1."
    yield hit // B, "Those are blocks; tokens were asked for."
    yield from [(min(common, n - 1), blocks), (common, blocks), (cdiv(common, B) * B, blocks)]
    yield min(with_previous, n - 1) // B * B, "Any earlier prompt counts, not only the one just before."
    yield 0, "Something of it was computed before, by an earlier prompt: how many whole blocks?"
    yield max(0, hit - B), "One block more is found: was a block cut off although enough was left to run?"

# %% slips-7-6-b jupyter={"source_hidden": true}
@ours
def judge_hits(hits, B, wanted):
    for i, (got, hit) in enumerate(zip(hits, wanted, strict=True)):
        if got == hit:
            continue
        said = "Count again: the common beginning with anything computed before, in whole blocks."
        said = next((words for wrong, words in slips_of_hit(i, B, hit) if wrong == got and wrong != hit), said)
        raise AssertionError(f"{said}\nPrompt {i + 1} ({SIX[i]}), blocks of {B}: you predicted {got:.0f} hit tokens.")


@ours
def judge_steps(prompt_steps, answer_steps, rows):
    lengths = [32, 35, 32, 33, 50, 12]
    for i, (got, (hit, wanted, _)) in enumerate(zip(prompt_steps, rows, strict=True)):
        without = "That is without the hit: cached tokens are skipped, so fewer steps are needed."
        floor = "A last step with fewer tokens is a step all the same."
        tokens = "Those are tokens; a step computes up to 16 of them."
        slips = [(cdiv(lengths[i], 16), without), ((lengths[i] - hit) // 16, floor), (lengths[i] - hit, tokens), (0, "At least one token of the prompt has to be run.")]
        said = next((words for wrong, words in slips if wrong == got), "Count again: (prompt - hit) / 16, rounded up.")
        assert got == wanted, f"{said}\nPrompt {i + 1} ({SIX[i]}), blocks of 4: you predicted {got:.0f} prompt steps."
    rest = [(got, wanted) for got, (_, _, wanted) in zip(answer_steps, rows, strict=True)]
    shown = f"You predicted answer steps {[int(got) for got in answer_steps]}."
    misses = [got for got, (hit, _, _) in zip(answer_steps, rows, strict=True) if hit == 0]
    hits = [got for got, (hit, _, _) in zip(answer_steps, rows, strict=True) if hit > 0]
    faster = "A hit saves prefill, not decode: each token of the answer still takes a step that reads the whole context, shared or not."
    assert min(hits) >= min(misses), f"{faster}\n{shown}"
    assert all(got <= wanted for got, wanted in rest), f"The first token of the answer comes with the prompt's last step.\n{shown}"
    assert all(got == wanted for got, wanted in rest), f"How many of the 8 tokens come after the prompt's last step?\n{shown}"

# %% check-7-6
@check
def exercise_7_6(predicted):
    hits_4, hits_16, prompt_steps, answer_steps = lists_7_6(ask(predicted))
    rows_4, rows_16 = measured_7_6(4), measured_7_6(16)
    judge_hits(hits_4, 4, [hit for hit, _, _ in rows_4])
    judge_hits(hits_16, 16, [hit for hit, _, _ in rows_16])
    judge_steps(prompt_steps, answer_steps, rows_4)
    print("measured: hit tokens, blocks of 4 and of 16; prompt steps, answer steps")
    rows = zip(SIX, rows_4, rows_16, strict=True)
    for name, (hit, steps, rest), (coarse, _, _) in rows:
        print(f"{name:29} {hit:2} {coarse:3} {steps:3} {rest:3}")

# %% [markdown]
# Larger blocks lose more at the end of what is common, and all of it where it is shorter than
# a block. They also need fewer keys. The answers take as many steps as without a cache.

# %% [markdown]
# ## Exercise 7.7: what does a hit rate hide?
#
# *6 minutes, medium.*
#
# **A team makes the cache's hit rate (hit tokens over prompt tokens) its only goal. What
# would that hide?** Write five or six lines: at least two ways to raise this number that
# help nobody or do harm, what each would do to whom, and what you would measure beside it.
# A person reads this one; the check only sees whether a sentence (20 letters or more)
# stands there.
#
# Test yourself before you hand it in. Which number stands behind each claim, and where
# would you read it?
#
# | if you claim that | then name |
# |---|---|
# | the rate can rise without anybody waiting less | what is in the numerator and the denominator, and what a request waits for besides its prefill |
# | somebody pays for it | whose blocks are taken (exercise 7.5), or who queues, and the number that shows it |
# | it is unsafe | who can learn what, by which measurement, and what the remedy does to the rate |
# | another number is better | its unit, and at which percentile, for whom |
#
# A claim without a number is a guess.

# %% [markdown] written-7-7 points=2
# A hit rate counts tokens that were not computed, over tokens that came in. It can be
# raised by what comes in: a longer header, the same for all, makes the rate rise (200 of
# 264 tokens are 76%, 1,000 of 1,064 are 94%), while every request now reads 800 tokens more
# in each decode step, and holds them. A hit saves prefill only: in exercise 7.6 the answers
# took 7 steps each, hit or not; so time per output token, and with long answers most of the
# wait, does not show in it. It hides who pays: pinned headers are memory that running
# requests lack (cached blocks that are not pinned yield at once); sending everyone with the
# same header to one machine raises the rate there, and the queue. And dropping the salt
# makes tenants share: the rate rises, and an answer that starts fast tells what others have
# asked. I would put beside it: TTFT at p50 and p99 for hits and misses apart, prompt tokens
# really computed per second, time per output token, preemptions and evictions, cached
# blocks over the pool.
#
# **Rubric, 2 points.** One for *what it hides*: at least two of: it counts tokens, not time
# (decode, queue, and a prefill that was short anyway); the denominator can be fed (longer
# shared headers, repeated traffic); memory held or pinned, evictions and preemptions of
# others; isolation given up for hits (salt); averages over tenants. Each with the
# mechanism, one of them with a number. One for *what to measure beside it*, with its unit:
# TTFT of hits and misses, tokens computed, time per output token, preemptions, memory. No
# point for "a high hit rate makes decoding faster", "the answers get worse with hits" or
# "0% means that the cache is broken". Samples at three levels stand in
# `solutions/README.md`.
