# %% [markdown]
# # 07 Prefix sharing
#
# Chapter 04 gave each request a table that names its blocks. Nothing says that a block
# may stand in one table only. If two requests begin alike, their first blocks would hold
# the same keys and values. So they can be the same blocks. They are computed once, and
# they lie in memory once.
#
# This is the last of the four steps of this course: contiguous, fragmented, paged,
# shared. Real engines have had most of their wrong answers here. So the chapter is as
# much about being right as about being fast.
#
# What it adds to `minikv`:
#
# | file | what it is |
# |---|---|
# | `kv_cache/paged.py` | grows: forks, and copying a block before it is written |
# | `kv_cache/prefix.py` | finds the blocks of a known beginning; the default manager from now on |
# | `kv_cache/block_cache.py`, `eviction.py` | blocks that outlive their requests; which of them goes first |
# | `kv_cache/radix.py`, `radix_tree.py` | the same on a tree of tokens |
#
# **Predict, run, explain**, as before.

# %% imports
from hashlib import sha256
from statistics import median

import numpy as np
import torch

import minikv.viz as viz
from minikv import LLM, Request, SamplingParams, Scheduler, show
from minikv.experiments import NUM_SLOTS, prompts_run
from minikv.kv_cache.paged import BlockPool, PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.model.loader import load
from minikv.observe.pool import snapshot_of
from minikv.simulator import Simulation, StepTime
from minikv.specs import GPUS, MODELS

# %% load
loaded = load("smollm2", dtype="float32", device="cpu")
model, tokenizer, spec = loaded
START = tokenizer.bos_token_id

def ids_of(text):
    return tokenizer(text).input_ids


def text(token_id):
    return "<SOS>" if token_id == START else tokenizer.decode([token_id])


A = [START, *ids_of(" I think this movie is better")]
print("A of chapter 02 once more:", len(A), "tokens")

# %% [markdown]
# ## The bill
#
# A library answers questions. In front of each question stand the same instructions.

# %% instructions
INSTRUCTIONS = """\
You are the assistant of a public library. Answer the question of a visitor in at \
most three sentences. Use simple words, and write in the language of the question. \
If you do not know the answer, say so, and name the desk where the visitor can ask. \
Never give medical or legal advice; name a book instead. Do not talk about other \
visitors, about what they have borrowed, or about the people who work here. The \
library opens at nine in the morning and closes at seven in the evening. On Sundays \
it is closed. Children under ten need a card that their parents have signed. A book \
can be kept for four weeks, and it can be renewed twice, unless somebody waits for \
it. A late book costs twenty cents a day, and never more than the price of the book. \
There is a reading room on the second floor, where no one may talk, and a room for \
groups on the first floor, which has to be reserved a day before. Be friendly, even \
if the visitor is not. Question: """
HEADER = ids_of(INSTRUCTIONS)[:200]
print(len(HEADER), "tokens of instructions in front of every question")

# %% [markdown]
# > **Predict.** Two questions come each second. How many tokens of instructions does the
# > server compute in an hour? How many different ones are there?

# %% bill
vicuna, h100 = MODELS["Vicuna 13B v1.5 16K"], GPUS["H100 SXM"]
step_time = StepTime(vicuna, h100)
asked = 2 * 3600
tokens, header_bytes = asked * len(HEADER), len(HEADER) * vicuna.kv_bytes_per_token
print(f"{asked:,} questions an hour: {tokens:,} tokens, {len(HEADER)} of them different")
print(f"{tokens * step_time.s_per_token:.0f} s of an H100's hour go into them")

print(f"{vicuna.name}: {vicuna.kv_bytes_per_token:,} bytes per token, so")
print(f"the instructions are {header_bytes / 1e6:.0f} MB,",
      f"and {asked * header_bytes / 1e12:.2f} TB are written in the hour")

# %% [markdown]
# That is the work. There is a bill for the memory, too: the instructions lie in the pool
# as often as questions are being answered. The simulator counts how many are answered at
# the same time.

# %% bill-memory
from minikv import workloads as w

question = w.LogNormal.of_median(67, 0.8, high=2_000)
lengths = w.Prefixed(len(HEADER), question, "instructions")
answers = w.LogNormal.of_median(200, 0.9, high=1_500)
kinds = (w.RequestClass("question", 1.0, lengths, answers),)
library = w.Workload("library", w.Poisson(2.0), kinds)
run = Simulation(Scheduler(PagedKVCacheManager(NUM_SLOTS // 16, 16)), step_time)
running = run.run(library.requests(duration_s=300, seed=0)).summary()["mean_num_seqs"]
print(f"{running:.0f} questions are answered at once: the instructions take",
      f"{running * header_bytes / 1e9:.2f} GB,")
print(f"and {header_bytes / 1e9:.2f} GB would do")

# %% [markdown]
# There are two ways to share. A request can *fork*: it is known from the start that two
# answers have one prompt. Or a request can *find* what another has left. We begin with
# the first, which is simpler.
#
# ## 1. Two answers from one prompt
#
# Somebody asks for two answers to A. We take the pool by hand of chapter 04, with blocks
# of four. The seven tokens of A are `a` to `g`. Both answers get the same table.
#
# > **Predict.** Each answer writes its first token, `1` and `2`. What does each of them
# > read afterwards?

# %% by-hand
SIZE = 4
slots = list("abcdefg.") + ["."] * 8
tables = {"one": [0, 1], "two": [0, 1]}


def slot_of(name, position):
    return tables[name][position // SIZE] * SIZE + position % SIZE


def read(name, num_tokens=8):
    return "".join(slots[slot_of(name, p)] for p in range(num_tokens))

slots[slot_of("one", 7)] = "1"
slots[slot_of("two", 7)] = "2"
print("one reads", read("one"), "and two reads", read("two"))

# %% [markdown]
# Both read `2`. The first answer has lost its token, and nothing has crashed.
#
# The full block did no harm: nobody writes to a full block. Only the last block is
# written to again, since it is not full. So the rule is **copy-on-write**: whoever wants
# to write into a block that others hold copies it first. A request *holds* the blocks
# that its table names. `ref_cnt` of chapter 04 says how many requests hold a block.

# %% copy-on-write
slots[7] = "."
pool = BlockPool(4)
pool.touch(pool.get_new_blocks(2))  # the second table


def write(name, position, content):
    place = position // SIZE
    tail = pool.blocks[tables[name][place]]
    if tail.ref_cnt > 1:
        [own] = pool.get_new_blocks(1)
        at, to = tail.block_id * SIZE, own.block_id * SIZE
        slots[to : to + SIZE] = slots[at : at + SIZE]
        tables[name][place] = own.block_id
        pool.free_blocks([tail])
    slots[slot_of(name, position)] = content


# %% [markdown]
# > **Predict.** The answers write again. How many blocks are copied, and by whom?

# %% copied-once
write("one", 7, "1")
print(tables, "ref_cnt:", [block.ref_cnt for block in pool.blocks])
write("two", 7, "2")
print(tables, "ref_cnt:", [block.ref_cnt for block in pool.blocks])
print("one reads", read("one"), "and two reads", read("two"))

# %% [markdown]
# One block is copied, by the first to write. The second is then alone with the old block,
# so it writes in place.
#
# The package does the same. `fork` gives a second request, the child, the blocks of the
# first, the parent. (The child counts one token less than the parent. It runs the last
# token of the prompt itself, since it needs the logits there to sample its own first
# token.)

# %% fork
manager = PagedKVCacheManager(8, SIZE)
parent, *children = forks = [Request(name, A) for name in ("one", "two", "three")]
manager.allocate_slots(parent, len(A))
parent.num_computed_tokens = len(A)
for child in children:
    child.num_computed_tokens = len(A) - 1
    manager.fork(parent, child)
print(manager.tables, "copies:", manager.copies())


# %% fork-tree
def tree(title):
    labels = {r.request_id: [*map(text, A), "…"] for r in forks}
    counts = [block.ref_cnt for block in manager.block_pool.blocks]
    return viz.fork_tree(snapshot_of(manager, 0), labels, counts, title=title)


card, boxes = tree("After two forks")
assert [box.num_holders for box in boxes] == [3, 3]
card

# %% [markdown]
# Each row is a request. A block that several requests hold is one box, which spans their
# rows. The forks have copied nothing. (It is a common belief that a fork copies the
# prompt.)
#
# > **Predict.** Now each of the three computes one more token. The parent comes first.
# > How many copies are there, and who writes in place?

# %% each-writes
for request in forks:
    manager.allocate_slots(request, 1)
    request.num_computed_tokens += 1
print(*manager.copies(), sep="\n")
manager.check()

# %% fork-tree-after
card, boxes = tree("After each has written one token")
assert sorted(box.num_holders for box in boxes) == [1, 1, 1, 3]
card

# %% [markdown]
# `copies()` lists what the runner has to copy before the step writes anything. The last
# of the three found `ref_cnt` 1 and kept block 1. So *n* answers need *n* − 1 copies of
# one block, however long the prompt is.
#
# The engine forks for `n` answers. We compare it with a manager that cannot fork, so that
# each answer computes the prompt again.

# %% no-forks
class NoForks(PagedKVCacheManager):
    def fork(self, parent, child):
        return False

prompt = ids_of("The best thing about a rainy day is that you can")
four = SamplingParams(n=4, max_tokens=10, temperature=0.8, ignore_eos=True)


def four_answers(manager):
    llm = LLM(loaded, kv_cache_manager=manager, block_size=SIZE, max_model_len=40)
    [output] = llm.generate([prompt], four, use_tqdm=False)
    blocks = max(step.num_blocks_in_use for step in llm.metrics.steps)
    computed = sum(step.num_tokens for step in llm.metrics.steps)
    return [each.text for each in output.outputs], blocks, computed


# %% four-answers-run
with_forks, without = four_answers(PagedKVCacheManager), four_answers(NoForks)
assert with_forks[0] == without[0]
print("the same four answers;")
print(f"with forks    {with_forks[1]} blocks at most, {with_forks[2]} tokens computed")
print(f"without forks {without[1]} blocks at most, {without[2]} tokens computed")

# %% [markdown]
# The answers do not depend on forks, and forks save memory and work. How much they save
# depends on how long the prompt is beside the answers.
#
# ## 2. Why equal tokens are not enough
#
# Two visitors who do not know each other send the same instructions. The second should
# *find* the blocks of the first. It is tempting to look blocks up by their tokens. We
# read from the pool what this would give.
#
# > **Predict.** The same five tokens come after two different beginnings of the same
# > length, and after a shorter one. In which layers are their K and V equal?

# %% beginnings
SAME = ids_of(" It was two hours long, and there were many people."
              " In one word, I found this film very")
HATED, LOVED = (ids_of(f" I really {verb} this film.") for verb in ("hated", "loved"))
SHORT = ids_of(" I left.")
FIVE = SAME[:5]
print([text(i) for i in FIVE], "after", len(HATED), len(LOVED), len(SHORT), "tokens")

# %% kv-of
def kv_of(before, behind=()):
    "K and V of the five tokens: [layers, 2, kv heads, 5, head_dim]."
    llm = LLM(loaded, block_size=SIZE, max_model_len=40, num_gpu_blocks_override=10)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.add_request([*before, *FIVE, *behind], params, "r")
    llm.step()
    table = torch.tensor(llm.manager.tables["r"])
    rows = [pool[:, table].transpose(1, 2).flatten(2, 3) for pool in llm.runner.pools]
    return torch.stack(rows)[:, :, :, len(before) : len(before) + 5]


# %% compare-kv
def apart(kv, other):
    "Of K and V in each layer: how far apart, as a share of their length."
    return (kv - other).flatten(2).norm(dim=-1) / kv.flatten(2).norm(dim=-1)


base = kv_of(HATED)
others = {"other text behind": kv_of(HATED, SAME[5:9]), "another beginning": kv_of(LOVED),
          "a shorter beginning": kv_of(SHORT)}

for name, kv in others.items():
    (k0, v0), (k9, v9) = apart(base, kv)[[0, 9]]
    print(f"{name:20} layer 0: K {k0:.2f}, V {v0:.2f}    layer 9: K {k9:.2f}, V {v9:.2f}")

# %% compare-figure
from minikv.viz.gantt import curves

lines = {}
for name in ("another beginning", "a shorter beginning"):
    for kind, values in zip("KV", apart(base, others[name]).T.tolist(), strict=True):
        lines[f"{kind}, {name}"] = list(enumerate(values))
card, drawn = curves(lines, title="The same five tokens: how far K and V are apart",
                     xlabel="layer", ylabel="share of the length", legend="below")
assert drawn["V, another beginning"][0][1] < 1e-5 < drawn["V, another beginning"][1][1]
assert apart(base, others["other text behind"]).max() < 1e-5
card

# %% [markdown]
# The figure shows the distance of two vectors over the length of one of them. 0 means
# that they are equal.
#
# - What stands *behind* the five tokens changes nothing. Attention looks back only.
# - In layer 0, V depends on the token alone, so V is always equal. K is turned by its
#   position, so it is equal only at the same position.
# - From layer 1 on, nothing is equal any more. Each layer has mixed what stands before
#   into the tokens. **K and V carry their position and their whole history.**
#
# What would a careless cache do? This one looks blocks up by their tokens alone. A first
# visitor hated the film, and two others loved it. The first and the last also tell how
# long it was, in the same words. We ask for the verdict of the last one.

# %% careless
from functools import partial


class Careless(PrefixCachingKVCacheManager):
    def find_longest_cache_hit(self, request, num_blocks):
        known = self.block_pool.cached_blocks
        keys = [key for key, _ in self.block_keys(request, num_blocks)[:num_blocks]]
        missing = [i for i, key in enumerate(keys) if key not in known]
        return [known[key] for key in keys[: min(missing, default=len(keys))]]


def of_tokens_only(data):  # the last bytes of what is hashed are the block's tokens
    return sha256(data[-4 * len(HATED) :]).digest()


# %% careless-run
def verdict(manager):
    llm = LLM(loaded, kv_cache_manager=manager, block_size=len(HATED), max_model_len=60)
    for prompt in (HATED + SAME, LOVED, LOVED + SAME):
        [o] = llm.generate([prompt], SamplingParams(max_tokens=9), use_tqdm=False)
    return f"{o.num_cached_tokens:2} tokens found:{o.outputs[0].text!r}"


print("prefix  ", verdict(PrefixCachingKVCacheManager))
print("careless", verdict(partial(Careless, hash_fn=of_tokens_only)))

# %% [markdown]
# The prefix cache has found one block, the beginning that the second visitor left. The
# careless cache has found more, and the visitor who loved the film gets the verdict of
# the one who hated it. The text is fluent, and nothing crashes.
#
# What a block is looked up by is its **key**. The key must stand for the block's tokens
# *and* for all that comes before them. We **chain**: each key is a digest (a short
# fingerprint, here by SHA-256) of the key before it and the block's own tokens.

# %% chain
def keys(ids):
    parent, found = b"", []
    for at in range(0, len(ids) - SIZE + 1, SIZE):
        parent = sha256(parent + repr(ids[at : at + SIZE]).encode()).digest()
        found.append(parent.hex()[:6])
    return found

numbers = list(range(1, 10))
for ids in (numbers, numbers[:8], [0, *numbers[1:]]):
    print(keys(ids), "of", ids)

# %% [markdown]
# The first two prompts have the same keys. In the third prompt only the first token
# differs, and *both* keys are others. Its second block has the same tokens
# `5 6 7 8`, and it would not be found. A block that is not full has no key, since it is
# still being written.
#
# A full block is **published**: the manager enters it in a map of keys, where others find
# it. Each publication has a number. Tokens that are found and not computed are a **hit**.
# Here is how the package makes the keys, and how it searches:

# %% show-keys
show(PrefixCachingKVCacheManager._extend)

# %% show-search
show(PrefixCachingKVCacheManager.find_longest_cache_hit)

# %% [markdown]
# The search stops at the first block that is missing. It also *compares* the tokens of
# the block, and the publication of the block before it (`parent`). Equal digests are
# not taken as a proof of equal content. So a bad digest cannot make an answer wrong. We
# give the package the careless digest from above, which does not see the parent.
#
# > **Predict.** Five prompts alternate between two beginnings. Each beginning fills one
# > block, and the same tokens follow both. With which digest do the prompts find more?

# %% starts
def starts(manager, request):
    "It takes what is found, and its prompt is computed. Returns the tokens found."
    found = manager.get_num_cached_tokens(request)
    hit = {"num_cached_tokens": found} if found else {}
    manager.allocate_slots(request, request.num_tokens - found, **hit)
    request.num_computed_tokens = request.num_tokens
    manager.cache_blocks(request)
    return found


# %% blind
def five_prompts(**digest):
    manager = PrefixCachingKVCacheManager(32, 6, **digest)
    prompts = [[start] * 6 + [7] * 12 + [9] for start in (1, 2, 1, 2, 1)]
    return [starts(manager, Request(f"{i}", ids)) for i, ids in enumerate(prompts)]


print("chained:", five_prompts())
print("blind:  ", five_prompts(hash_fn=of_tokens_only))

# %% [markdown]
# The blind digest finds less. Behind both beginnings stand the same tokens, so these
# blocks get one key, and the map has one place for it. The search finds a block there
# whose parent is another, and stops. A bad digest costs hits. A test that looks at
# answers only would never notice.
#
# ## 3. The life of a block
#
# When a request ends, its blocks are free. Chapter 04 said that freed is not erased. Now
# a freed block with a key can also be *found*. So a block has three states: in use,
# cached and free, and free without a key. We follow some requests through a pool of eight
# blocks. `B` and `C` begin as `A` did. `D` and `E` are strangers.

# %% story
manager = PrefixCachingKVCacheManager(8, SIZE)
look, guests = viz.LifeRecorder(manager), {}


def comes(name, ids, how="comes"):
    r = guests[name] = Request(name, ids)
    r.num_cached_tokens = starts(manager, r)
    look(f"{name} {how}")


def ends(name):
    manager.free(guests[name])
    look(f"{name} ends")


# %% story-run
same = [1, 2, 3, 4, 5, 6, 7, 8]
comes("A", [*same, 9, 10])
comes("B", [*same, 20, 21, 22])
ends("A")
ends("B")
comes("C", [*same[:4], 30, 31])
comes("D", list(range(50, 62)))
ends("C")
free, cached = manager.num_free_blocks, manager.num_cached_free_blocks
print(f"{free} blocks are free, {cached} of them cached")

# %% [markdown]
# > **Predict.** `E` comes and needs three blocks. Which does it take? Then D ends, and E
# > needs one block more. At last C comes again, with all of A's first eight tokens. What
# > does it find?

# %% story-goes-on
comes("E", list(range(70, 82)))
ends("D")
guests["E"].append(82)
manager.allocate_slots(guests["E"], 1)
look("E goes on")
comes("C", [*same, 40], "again")
print("C finds", guests["C"].num_cached_tokens, "tokens")

# %% lives
card, spans = viz.block_lives(look.looks)
held = [s.holders for s in spans if s.block_id == 0 and s.state == "live"]
assert held == [("A",), ("A", "B"), ("B",), ("C",), ("C",)]
card

# %% [markdown]
# Each lane is a block. Read it from left to right. (*Live* in the legend is what we call
# in use. *of A* names who computed a cached block.) Block 0 is written by A, shared with
# B, and then free, but **`ref_cnt` 0 does not mean gone**: C finds it. Three rules say
# which block is taken next.
#
# - **Blocks without a key go first.** Nothing is lost with them. So E takes no cached
#   block when it comes.
# - **Then the least recently used** (LRU). When E goes on, it takes block 1, which nobody
#   has held since B ended. Block 0 was used later, by C. It is still there, and C finds
#   it again.
# - **Of one request, the last block first.** A block is of no use without those before
#   it, so the first block should stay longest. At the end C takes blocks 7 and 6 of D,
#   and D's first block stays.
#
# The player goes through the same story. The numbers at the right say in which order free
# blocks will be taken.

# %% player
viz.lives_player(look.looks)

# %% [markdown]
# ## 4. What a hit saves, and what it does not
#
# Now the real model. Two questions of the same form come behind the instructions, one
# after the other. The first finds an empty cache. The second finds the instructions.
#
# > **Predict.** By which factor does the time to the first token change? And the time
# > between two later tokens?

# %% ask
pool = {"max_model_len": 512, "num_gpu_blocks_override": 160}
llm = LLM(loaded, max_num_batched_tokens=2048, **pool)
params = SamplingParams(max_tokens=6, ignore_eos=True)


def ask(question):
    [output] = llm.generate([HEADER + ids_of(question)], params, use_tqdm=False)
    times = output.metrics[0]
    return output.num_cached_tokens, times.ttft, times.tpot


def pair(i):
    llm.reset_prefix_cache()
    return ask(f"Where is book number {i}?"), ask(f"Where is film number {i}?")


# %% ask-found tags=["nbval-check-output"]
pair(0)  # the first run of a process is slower
pairs = [pair(i) for i in range(1, 5)]
for name, found in zip(("without", "with"), zip(*pairs, strict=True), strict=True):
    print(f"found {name} the instructions in the cache:", *(each[0] for each in found))
num_tokens = len(HEADER) + len(ids_of("Where is film number 1?"))
skipped = pairs[0][1][0] / num_tokens
print(f"with them {skipped:.0%} of {num_tokens} tokens need not be computed")

# %% ask-times tags=["nbval-ignore-output"]
ratios = [[hit[i] / miss[i] for miss, hit in pairs] for i in (1, 2)]
for name, seen in zip(("the first token", "each later token"), ratios, strict=True):
    print(f"time to {name}: with the hit {median(seen):.2f} of that without",
          f"({min(seen):.2f} to {max(seen):.2f})")
saved = (1 - median(ratios[0])) / skipped
print(f"of the time to the first token {saved:.0%} of what the tokens predict is saved")

# %% [markdown]
# The first token comes several times sooner, because the skipped tokens are not computed.
# What remains are the question's own tokens, the rest of the instructions, and the fixed
# costs of a step. So a little less is saved than the share of the tokens predicts.
#
# **The later tokens come no sooner**, but for noise. A decode step reads the K and V of
# all tokens before it, whoever computed them. It is a common belief that sharing speeds
# up decoding.
#
# And the memory? Four visitors are answered at once. In the first run all of them come in
# one step. In the second run the first is one step ahead.
#
# > **Predict.** How many blocks are in use, in each run?

# %% visitors tags=["nbval-check-output"]
def four_visitors(ahead):
    llm.reset_prefix_cache()
    for i in range(4):
        question = HEADER + ids_of(f"Book {i}?")
        llm.add_request(question, SamplingParams(max_tokens=3), f"visitor {i}")
        if i == 0 and ahead:
            llm.step()
    llm.step()
    entries = sum(len(table) for table in llm.manager.tables.values())
    in_use = llm.manager.num_blocks - llm.manager.num_free_blocks
    while llm.has_unfinished_requests():
        llm.step()
    return f"{entries} entries in four tables, {in_use} blocks in use"


print("all in one step:  ", four_visitors(ahead=False))
print("one a step ahead: ", four_visitors(ahead=True))

# %% [markdown]
# A block is published when it is *written*, at the end of a step. So requests that come
# in the same step do not find each other's blocks. With the first one ahead, the others
# share.
#
# What is left when all have gone?

# %% idle tags=["nbval-check-output"]
report, manager = llm.memory_report(), llm.manager
print(f"cached: {report.cached} slots, free: {report.free}, in use: {report.live}")
print(f"blocks that can be had: {manager.num_free_blocks} of {manager.num_blocks}")

# %% [markdown]
# So sharing saves memory *while* requests share. Afterwards the cache holds blocks that
# nobody needs now. They cost nothing: all of them can be had at once. (A monitor that
# counts blocks with something in them as used will see the pool fill up, and stay full.)
#
# ## 5. Whole blocks only
#
# Only full blocks have keys.
#
# > **Predict.** The instructions have 200 tokens. How many of them are found with blocks
# > of 16? Which block size finds the most?

# %% block-sizes
print("block size   full blocks in 200   tokens found")
for size in (1, 8, 16, 32, 64, 128, 256):
    found = prompts_run([[*HEADER, 5, 6], [*HEADER, 7, 8]], size).num_found
    print(f"{size:10}{len(HEADER) / size:15.1f}{found[1]:18}")

# %% [markdown]
# With blocks of 16, 12 of 12.5 blocks are found. The half block is computed by everybody.
# A block larger than the prefix finds *nothing*, and it says nothing either. So a hit
# rate of 0% need not be a fault of the engine. Look at the length of the prefix first.
#
# The second silent fault is in the prompt. We ask ten questions in each of four ways.

# %% timestamp tags=["nbval-check-output"]
def hit_rate(prompts):
    result = prompts_run(prompts, 16)
    return f"{sum(result.num_found) / sum(result.num_tokens):.0%}"


clock = [ids_of(f"{10 + i}:{37 + i} is the time. ") for i in range(10)]
questions = [ids_of(f"{i} books: where?") for i in range(10)]
both = list(zip(clock, questions, strict=True))
print("instructions, question:      ", hit_rate([HEADER + q for q in questions]))
print("instructions, time, question:", hit_rate([HEADER + t + q for t, q in both]))
print("time, instructions, question:", hit_rate([t + HEADER + q for t, q in both]))
print("15 tokens, question:         ", hit_rate([HEADER[:15] + q for q in questions]))

# %% [markdown]
# One timestamp at the top ruins it all. The first block differs, and with the chain every
# block after it. So put what changes at the end of the prompt. In the last row the shared
# beginning is shorter than a block, and nothing is found.
#
# One more surprise. The same prompt comes twice, and all its blocks are full.

# %% whole-prompt tags=["nbval-check-output"]
for length in (32, 33):
    print(length, "tokens, found:", prompts_run([HEADER[:length]] * 2, 16).num_found[1])

# %% [markdown]
# Everything was there, but half of it is computed again. The engine needs the *logits* of
# the last token, and they are not cached. So at least the last token has to be run, and a
# hit ends with a whole block.
#
# **Write your prompts.** Six prompts come one after the other. What is found has the
# colour of the prompt that computed it.

# %% six-prompts
SIX = [
    "You are a helpful assistant. What is gravity?",
    "You are a helpful assistant. What is light?",
    "You are a helpful assistant. Why is the sky blue?",
    "You are a helpful pirate. What is gravity?",
    "What is gravity?",
    "You are a helpful pirate. What is light?",
]

six = [ids_of(prompt) for prompt in SIX]
labels = [[text(token) for token in ids] for ids in six]
card, rows = viz.prompt_hits(prompts_run(six, 4), labels)
assert [row.num_found for row in rows] == [0, 8, 4, 4, 0, 8]
card

# %% [markdown]
# E has the tokens of A's question, at another place. It finds nothing. F finds blocks of
# two others. In the next cell you can change the prompts and the block size. It starts with
# blocks of two. Which block size finds most? Which one would you choose, with chapter
# 04's table of tails in mind?

# %% lab
def encode(prompt):
    return [(token, text(token)) for token in ids_of(prompt)]


viz.prompts_lab(prompts_run, SIX, encode, block_size=2)

# %% [markdown]
# ## 6. What is thrown out
#
# Cached blocks stay until somebody needs room. Will the instructions still be there when
# the next question comes? We mix two kinds of requests. A question comes every ten
# seconds, on average. Beside the questions come documents of 2,000 to 6,000 tokens, each
# different. Nobody ever asks for a document's blocks again. <!-- source: `mixed` below -->

# %% mixed
def mixed(documents_per_minute, seed):
    a_minute, answer = (6, documents_per_minute), w.Fixed(24)
    kinds = (w.RequestClass("question", a_minute[0], lengths, answer),
             w.RequestClass("document", a_minute[1], w.Uniform(2_000, 6_000), answer))
    traffic = w.Workload("mixed", w.Poisson(sum(a_minute) / 60), kinds)
    return traffic.requests(duration_s=600, seed=seed)


# %% play
def cache(eviction="lru", **more):
    return PrefixCachingKVCacheManager(NUM_SLOTS // 16, 16, eviction=eviction, **more)


def play(manager, requests):
    scheduler = Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=2560)
    return Simulation(scheduler, step_time).run(requests)

def found_share(documents_per_minute, seed, manager):
    "The share of the questions that found the instructions."
    run = play(manager, mixed(documents_per_minute, seed))
    return np.mean([r.num_cached_tokens > 0 for r in run.requests if r.prefix_id])


# %% [markdown]
# The instructions are used at every question. The time between two questions is their
# *rest*: nobody uses them, and they move towards the front of the queue. With LRU they
# are gone once as many new tokens have come as the pool has slots, `NUM_SLOTS`.
#
# > **Predict.** How long a rest do the instructions survive, with 24 documents a minute?
# > And what share of the questions comes sooner than that? <!-- source: LOADS below -->

# %% rest
LOADS, SEEDS, predicted = (3, 6, 12, 24), range(3), []

# %% rest-table
print("documents   new tokens   a rest of    questions that")
print("a minute    per second   survives     come sooner")
for documents in LOADS:
    tokens_per_s = (documents * 4000 + 6 * 150) / 60  # the instructions are not new
    survives = NUM_SLOTS / tokens_per_s
    predicted.append(1 - np.exp(-survives / 10))  # a Poisson process: one in ten seconds
    print(f"{documents:8}{tokens_per_s:13,.0f}{survives:11.0f} s{predicted[-1]:13.0%}")

# %% washed-out
shares = [[found_share(n, seed, cache()) for seed in SEEDS] for n in LOADS]
for n, seen in zip(LOADS, shares, strict=True):
    print(f"{n:2} documents a minute: {min(seen):.0%} to {max(seen):.0%}",
          f"of the questions find the instructions, in {len(seen)} seeds")
assert sorted(map(np.mean, shares), reverse=True) == [np.mean(seen) for seen in shares]

# %% washed-out-figure
means = [np.mean(seen) for seen in shares]
lines = {name: [(n, 100 * y) for n, y in zip(LOADS, ys, strict=True)]
         for name, ys in (("predicted", predicted), ("LRU, mean of the seeds", means))}
card, drawn = curves(lines, title="Questions that find the instructions",
                     xlabel="documents a minute", ylabel="percent", legend="lower left")
assert all(abs(p - mean) < 0.1 for p, mean in zip(predicted, means, strict=True))
card

# %% [markdown]
# The estimate is close. So LRU keeps the instructions while fewer new tokens pass in a
# rest than the pool has slots. It loses them when a pool full of strangers passes in
# between. Nothing is wrong with the cache then. LRU simply cannot know that a document
# never comes back. (The prediction leaves out that running requests hold a part of the
# pool.)
#
# Do other orders know better? `fifo` gives up what was computed first. `lfu` gives up
# what was found least often. `pinned` is told: `manager.pin(request)` names the blocks
# that should stay.

# %% pinning
def header_of(name):
    return Request(name, num_prompt_tokens=201, prefix_id=name, prefix_len=200)


def pinning():
    manager = cache("pinned")
    manager.pin(header_of("instructions"))
    return manager


orders = {name: partial(cache, name) for name in ("lru", "fifo", "lfu")}
orders["pinned"] = pinning

# %% orders
print("questions that find the instructions, lowest to highest seed:")
print("documents a minute", *(f"{name:>12}" for name in orders))
for n in (6, 24):
    seen = {name: [found_share(n, seed, make()) for seed in SEEDS]
            for name, make in orders.items()}
    ends = (f"{min(x):.0%} to {max(x):.0%}" for x in seen.values())
    print(f"{n:18}", *(f"{each:>12}" for each in ends))
    pairs = zip(seen["fifo"], seen["lru"], strict=True)
    assert all(fifo < lru < min(seen["lfu"]) for fifo, lru in pairs)

# %% [markdown]
# FIFO is the worst with every seed: it forgets the instructions although everybody uses
# them. LFU and the pin keep them. (LFU keeps yesterday's instructions just as well. We
# have not measured that.)
#
# Is pinning free, then? We pin the instructions of more and more customers. Each has 200
# tokens, and none of these customers asks anything now.
#
# > **Predict.** 40 customers pin 12 blocks each. The pool has 981 blocks. Who pays?

# %% pins
def with_pins(num_customers, seed):
    manager = cache("pinned", max_pinned_blocks=600)
    customers = [header_of(f"customer {i}") for i in range(num_customers)]
    pinned = [manager.pin(customer) for customer in customers]
    run = play(manager, customers + mixed(24, seed))
    documents = [r for r in run.requests if r.request_id.startswith("document")]
    waits = [r.first_token_time - r.arrival_time for r in documents]
    preempted = sum(r.num_preemptions for r in run.requests)
    return max(pinned, default=0), np.percentile(waits, 95), preempted


# %% pins-table
print(f"{NUM_SLOTS // 16} blocks; the documents' TTFT, p95, and preemptions, by seed")
print("customers   blocks pinned      TTFT, s              preemptions")
for n in (0, 1, 20, 40):
    pinned, p95, preempted = zip(*(with_pins(n, seed) for seed in SEEDS), strict=True)
    print(f"{n:9}{pinned[0]:13}   ", *(f"{x:6.2f}" for x in p95), "   ",
          *(f"{x:4}" for x in preempted))

# %% [markdown]
# One customer's pin costs nothing that we can see. Half a pool of pins costs everybody
# else: documents are preempted and wait longer. The pinned blocks are "cached" in every
# report, and no request holds them. So a pin needs a limit (`max_pinned_blocks`), and
# somebody who takes it away again (`unpin`).
#
# ## 7. The same on a tree
#
# SGLang's RadixAttention keeps no map of keys. It keeps a tree of tokens, in which each
# path is a beginning that was seen. Prompts part where their tokens part, and not at the
# end of a block. <!-- source: Zheng et al. 2024, section 3 -->
#
# > **Predict.** With blocks of four the six prompts found 24 tokens. How many do they find
# > on a tree of tokens?

# %% two-trees
hashed = prompts_run(six, 4)
card, boxes = viz.prompt_tree(hashed, labels, title="Hashes of blocks of 4")
print("found with blocks of 4:", sum(hashed.num_found), "tokens")
card

# %% radix
from minikv.kv_cache.radix import RadixKVCacheManager

treed = prompts_run(six, 1, RadixKVCacheManager)
card, nodes = viz.prompt_tree(treed, labels, title="A radix tree of tokens")
assert [node.num_holders for node in nodes][:4] == [5, 3, 2, 1]
print("found on the tree:", sum(treed.num_found), "tokens")
card

# %% [markdown]
# Both pictures have one box for what is shared. In the tree a box ends where prompts
# part, so C shares `assistant .` too.
#
# > **Predict.** Is it the tree that finds more, or the block size? We give both managers
# > both sizes.

# %% found-by-both
print("tokens found                blocks of 4   blocks of 1")
for of in (PrefixCachingKVCacheManager, RadixKVCacheManager):
    found = [sum(prompts_run(six, size, of).num_found) for size in (4, 1)]
    print(f"{of.__name__:27}{found[0]:12}{found[1]:14}")

# %% [markdown]
# With blocks of one token, hashes find exactly what the tree finds. With blocks of four
# the tree still finds `assistant .`: its walk ends *inside* a block, and our manager
# copies that block and goes on in the copy. A key stands for a whole block, so a map of
# keys cannot do that.
#
# | | hashes of blocks | radix tree |
# |---|---|---|
# | what is found | whole blocks | tokens; a block that is found in part is copied |
# | one lookup | a digest per block | a walk over the tokens |
# | index | an entry per block, that knows no other | nodes, that split where prompts part |
# | evicted | blocks, in the order of a queue | leaves, so that no path is cut |
#
# What a lookup costs, and how much memory the index takes, is printed by `python -m
# minikv simulate radix`.
#
# ## 8. What a cache tells others
#
# A hit is fast, and time can be measured from outside. So a cache that all users share
# answers a question that nobody has asked: *has somebody sent this text before?*
#
# A patient's letter goes through an assistant. An attacker knows the form of the letter,
# and not the diagnosis. The attacker sends a letter with each guess, and takes the time
# to the first token.
#
# > **Predict.** Only the few tokens of the diagnosis differ. Will the right guess stand
# > out?

# %% letters
GUESSES = ("asthma", "diabetes", "migraine", "arthritis")


def letter(diagnosis):
    return ids_of(f"Diagnosis: {diagnosis}. Write to the patient. ") + HEADER[:72]


def spy(victims_salt=None, attackers_salt=None):
    "The victim sends one letter, the attacker all of them. Returns (found, TTFT)."
    llm.reset_prefix_cache()
    once, quiet = SamplingParams(max_tokens=1), {"use_tqdm": False}
    llm.generate([letter("migraine")], once, cache_salt=victims_salt, **quiet)
    seen = {}
    for guess in GUESSES:
        [o] = llm.generate([letter(guess)], once, cache_salt=attackers_salt, **quiet)
        seen[guess] = o.num_cached_tokens, o.metrics[0].ttft
    return seen


# %% spy tags=["nbval-ignore-output"]
spied = [spy() for _ in range(3)]
slowest = [max(ttft for _, ttft in seen.values()) for seen in spied]
print("TTFT, share of the slowest guess of its round:")
for guess in GUESSES:
    ttfts = (seen[guess][1] / slow for seen, slow in zip(spied, slowest, strict=True))
    print(f"{guess:10}" + "".join(f"{x:7.2f}" for x in ttfts))

# %% spy-found tags=["nbval-check-output"]
print({guess: found for guess, (found, _) in spied[0].items()})
assert all({g: f for g, (f, _) in seen.items()} ==
           {g: f for g, (f, _) in spied[0].items()} for seen in spied)

# %% [markdown]
# The right guess, `migraine`, stands out in every round. The chain makes it easy: a
# wrong word in the *first* block misses everything behind it, too. (Each guess can be
# asked only once, since it is cached afterwards.)
#
# The cure is a **salt**. It goes into the key of the first block, and through the chain
# into all that follow. Users with different salts never share.

# %% salted tags=["nbval-check-output"]
for salts in (("clinic", "clinic"), ("clinic", "somebody else"), ("clinic", None)):
    print(salts, {guess: found for guess, (found, _) in spy(*salts).items()})

# %% [markdown]
# With another salt, or with none, the attacker finds nothing. A user with the victim's
# salt still does. So a salt is as good as the line that it draws: one for each customer
# protects customers from each other, and each customer then pays for the instructions
# once. vLLM has the same field, `cache_salt`. <!-- source: vLLM's documentation -->
#
# ## 9. A real trace
#
# Whether a cache is worth its trouble depends on the traffic. The operators of Kimi have
# published theirs: each row has lengths, a time, and the keys of the prompt's blocks of
# 512 tokens, which are chained as ours are. We make up five rows in this format.
# <!-- source: Qin et al., FAST'25 -->

# %% made-up-trace
import json

ROWS = (  # milliseconds, tokens of the prompt, keys of its blocks
    (0, 1300, [0, 1, 2]),
    (900, 1900, [0, 1, 3, 4]),
    (1400, 2000, [5, 6, 7, 8]),
    (2000, 2100, [0, 1, 3, 9, 10]),
    (2600, 600, [11, 12]),
)
names = ("timestamp", "input_length", "hash_ids")
rows = [dict(zip(names, row, strict=True)) for row in ROWS]
lines = [json.dumps({**row, "output_length": 20}) for row in rows]
print(lines[1])

# %% read-trace
import tempfile
from pathlib import Path

from minikv.workloads.traces import open_trace

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "made_up.jsonl")
    path.write_text("\n".join(lines))
    trace = [list(open_trace(path)) for _ in range(2)]  # a run uses its requests up
for r in trace[0]:
    print(f"{r.num_prompt_tokens:5} tokens, full blocks {r.block_hashes}")

# %% made-up-hits tags=["nbval-check-output"]
from minikv.experiments import hits_run

for num_blocks, rows in zip((100, 5), trace, strict=True):
    c = hits_run(rows, PrefixCachingKVCacheManager(num_blocks, 512))
    print(f"{num_blocks:3} blocks: {c.hit_blocks} of {c.full_blocks} full blocks found,",
          f"{c.token_rate:.0f}% of all tokens")

# %% [markdown]
# The last key of each row stands for a block that is not full, so it is left out. With
# room for five blocks fewer are found: some were taken before anybody asked for them
# again.
#
# The real files are too large for this course. We have run `python -m minikv simulate
# hits --trace FILE` on two of them, and the next cell has copied its results. Beside them
# stand the paper's rates.

# %% real-traces
from minikv.experiments import MOONCAKE_PAPER
from minikv.experiments.hits import FIG9_CAPACITIES as FIG9

OURS = {  # LRU, by capacity in tokens; copied here, not computed in this chapter
    "Conversation": {10**5: 4.3, 10**6: 5.7, 10**7: 30.4, 5 * 10**7: 37.9},
    "Synthetic": {10**5: 1.8, 10**6: 15.2, 10**7: 59.6, 5 * 10**7: 65.9},
}

published = {p.name: dict(zip(FIG9, p.fig9, strict=True)) for p in MOONCAKE_PAPER}
print("percent of full blocks found            ours   paper's Fig. 9")
for name, rates in OURS.items():
    for capacity, rate in rates.items():
        theirs = published[name][capacity]
        print(f"{name:13}{capacity:14,} tokens{rate:11.1f}{theirs:13.1f}")

# %% [markdown]
# The two columns grow alike. For the chats (*Conversation*) ours is two to three points
# lower. The paper
# does not say whether its rates count blocks or tokens, nor of what block size. Smaller
# blocks would find more (section 5), so this may be the cause. We cannot know it.
#
# The chats still gain at tens of millions of tokens of capacity. One GPU's memory has
# room for far less. So such services keep cached blocks in the host's memory and on
# disks, too.
# <!-- source: Qin et al., FAST'25 -->
#
# ## What this does not show
#
# - Times were measured on one CPU with a very small model, one request at a time. On a
#   server most of the time to the first token may be the queue.
# - We searched for the verdict of section 2. With most prompts that we tried, the careless
#   cache gave a usable answer. That is what makes such a fault hard to see.
# - The traffic of section 6 is made up, and so is its contrast: documents that never
#   return, and one prefix that always does. Three seeds show the spread, not the truth.
#   The seconds of the H100 come from the simulator's model.
# - Equal answers were compared in `float32`. In `bfloat16` a hit may change the last
#   bits, because the skipped tokens were computed in another batch.
# - A hit rate says how much was found. It does not say what was saved: a hit of one block
#   in front of a long answer saves hardly anything.
# - The side channel was measured inside the process. A network adds noise, and an
#   attacker takes more samples.
#
# ## What you have now
#
# - A block may stand in several tables. `ref_cnt` counts them, and a shared block is
#   copied before somebody writes into it. A fork itself copies nothing.
# - K and V depend on position and history. So a key is a chain, and a hit is compared.
# - Only full blocks are found, and only from the first token on. The last token is always
#   run.
# - A hit saves prefill and time to the first token. It never speeds up decoding.
# - Free is not gone: a cached block is free, and it waits in an order of eviction.
# - LRU keeps a prefix if less than a pool of new tokens passes before its next use. Pins
#   cost others.
# - A shared cache tells its users about each other. A salt draws the line.
#
# For the exercises, run `python -m minikv start 07`. These are the modules of `minikv` so
# far:

# %% lines-so-far tags=["nbval-ignore-output"]
cache = ("base", "contiguous", "paged", "block_cache", "eviction", "prefix", "radix")
parts = ["request", "specs", "metrics", *(f"kv_cache/{name}" for name in cache)]
parts += ["scheduler", "workloads", "core", "simulator", "model/loader", "model/runner"]
for part in viz.lines_of_minikv(parts):
    print(f"{part.name:23} {part.num_lines:4} lines  {part.about}")
