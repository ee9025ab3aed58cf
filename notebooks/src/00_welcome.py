# %% [markdown]
# # 00 Welcome
#
# A language model writes one token at a time. It does not read the whole text again for
# each of them. For every token that it has seen it keeps the token's *keys* and *values*,
# and reads those. A server with many users has to find room for these keys and values,
# and to give the room back. This is a surprisingly large part of its work. This course
# teaches it, and builds a small, real inference engine, `minikv`, on the way.
#
# In this chapter you build nothing. You check your machine, get a first answer from a
# real model, and see where its keys and values were kept. It takes about a quarter of an
# hour.
#
# The rhythm is the same in all chapters: **predict, run, explain**. Before you run a cell
# that measures something, say what you expect, aloud or on paper. A wrong prediction
# teaches more than a right one, but only if you made it.

# %% [markdown]
# ## Your machine
#
# No chapter needs a GPU. Where there is one, the engine uses it.

# %% machine tags=["nbval-ignore-output"]
from minikv.machine import facts

machine = facts()
print(f"Python {machine['python']} on {machine['system']}")
for name in ("torch", "transformers", "jupyterlab"):
    print(name, machine["packages"].get(name))

# %% what-works tags=["nbval-ignore-output"]
total, free = machine["memory_bytes"] or 0, machine["memory_free_bytes"] or 0
print(f"{machine['cores']} cores; memory: {total / 1e9:.1f} GB, {free / 1e9:.1f} GB free")
for device in machine["devices"]:
    print(f"{device['device']}: works; calculates in {device['reason']}")
print("the model:", "here" if machine["model_fetched"] else "not here yet, fetched below")

# %% [markdown]
# The engine takes the first device in the list. Two number formats appear in this course.
# bfloat16 takes half the memory of float32. It also takes much less time, if the
# processor can multiply it directly. float32 rounds far less. So an answer in float32
# hardly ever depends on what else is computed in the same step.
#
# If something is missing or looks wrong, run `python -m minikv doctor` in a terminal. It
# says, line by line, what is right, and what to do about the rest. (In this course
# `python` stands for whatever starts Python on your machine: `python3` on Linux and
# macOS, `py` on Windows.)

# %% [markdown]
# ## A first answer
#
# `LLM` loads its default model, `smollm2`. We ask for the oldest of the engine's caches,
# `contiguous`, because it is the easiest to look at. The model is small, so it answers
# quickly on a laptop, and it is often wrong. But it is a real model, a small relative of
# Llama. What you learn about its cache holds for the large ones.

# %% load
from minikv import LLM, SamplingParams

llm = LLM(kv_cache_manager="contiguous")
spec = llm.spec
print(f"{spec.name}: {spec.num_parameters:,} parameters in {spec.num_layers} layers")

# %% first-answer tags=["nbval-ignore-output"]
content = "What is photosynthesis? Answer in one sentence."
question = [{"role": "user", "content": content}]

for piece in llm.stream(question, SamplingParams(max_tokens=48)):
    print(piece, end="", flush=True)

# %% [markdown]
# `max_tokens` is a limit, not a length. The model ends its answer itself, by producing a
# special end token. With the default temperature of 0 the engine always takes the
# likeliest token, so you get the same answer in every run. On another machine bfloat16
# may round differently, and some words may change.
#
# Try a question of your own: change the text above and run the cell again.

# %% timing tags=["nbval-ignore-output"]
output = llm.generate([question], SamplingParams(max_tokens=48), use_tqdm=False)[0]
times, num_answer = output.metrics[0], len(output.outputs[0].token_ids)
print(f"prompt: {len(output.prompt_token_ids)} tokens, answer: {num_answer} tokens")
print(f"first token after {times.ttft * 1000:.0f} ms,",
      f"then {times.tpot * 1000:.0f} ms for each")

# %% [markdown]
# The prompt is longer than your question. The model's chat template adds a system
# message, and markers that say who speaks. One step computed all tokens of the prompt and
# gave the first token of the answer. Each further token took a step of its own. One step
# with many tokens costs far less than many steps with one token each. Chapter 01 shows
# why.
#
# *What this does not show:* we ran it once, on a machine that may be doing other things.
# Times from one run are an impression, not a measurement.

# %% [markdown]
# ## Where are the keys and values?
#
# In every layer each token leaves keys and values, small vectors that later tokens read.
# The engine keeps them in one **pool**, allocated once, when it starts. The pool is cut
# into **slots**. A slot has room for the keys and values of one token, in all layers. The
# engine hands out slots in **blocks**.

# %% pool-size
num_slots = llm.manager.num_blocks * llm.manager.block_size
print(f"one slot: {llm.spec.kv_bytes_per_token:,} bytes")
print(f"the pool: {num_slots:,} slots in blocks of {llm.manager.block_size}")

# %% [markdown]
# **Predict.** The prompt has 39 tokens, and its answer 22. How many slots does the engine
# hold for this one request while it runs? Put your number in place of `None`.

# %% guess
guess = None  # slots
print("Your guess?" if guess is None else f"Your guess: {guess:,} slots.")

# %% [markdown]
# The next cell queues the question, takes 21 of its 22 steps, and then looks into the
# pool. The first step computes the prompt. Each later step computes one token, the one
# that was sampled before.

# %% first-waste tags=["nbval-check-output"]
params = SamplingParams(max_tokens=22, ignore_eos=True)
llm.add_request(question, params, request_id="plants")
num_steps = 21
for _ in range(num_steps):
    llm.step()
report = llm.memory_report()
held = report.live + report.reserved + report.internal
print(f"live after {num_steps} steps: {report.live} slots hold keys and values")
print(f"held: {held:,} slots, {held / report.live:.0f} times as many")

# %% after-guess
llm.abort("plants")
print(f"your guess: {'none' if guess is None else f'{guess:,}'}, measured: {held:,}")
print(f"live: {len(output.prompt_token_ids)} tokens of the prompt",
      f"+ {num_steps - 1} of the answer = {report.live}")
print(f"held after the request was stopped: {num_slots - llm.memory_report().free}")

# %% [markdown]
# The request holds 8,192 slots, though only 59 of them contain anything: 39 tokens of the
# prompt and 20 of the answer. Nobody knows how long an answer will be, and a
# `"contiguous"` cache takes no risk. It reserves a **slab** for each request: consecutive
# slots, enough for the longest sequence that the model allows. Serving systems did just
# that until about 2023. <!-- source: Kwon et al. 2023, section 3.1 -->
#
# Slots that one request holds cannot serve another. The chapters up to 04 take this waste
# apart and remove nearly all of it. Later chapters let requests share slots.

# %% [markdown]
# ## A pool small enough to draw
#
# To see single slots, we take a tiny pool, and allow only short sequences.

# %% small-pool
small = LLM(kv_cache_manager="contiguous", max_model_len=96, num_gpu_blocks_override=18)
print(f"{small.manager.num_blocks} blocks of {small.manager.block_size} slots")
print(f"longest sequence: {small.max_model_len} tokens")

# %% [markdown]
# `stream` and `generate` run the same loop. You can also drive it by hand. `step()`
# computes what is due, samples one token for each running request, and returns what is
# new. After each step we take a snapshot of the pool.

# %% step-by-step tags=["nbval-ignore-output"]
from minikv.viz import snapshot

small.add_request(question, SamplingParams(max_tokens=48), request_id="plants")
outputs, snapshots, reports = [], [], []
while small.has_unfinished_requests():
    outputs += small.step()
    snapshots.append(snapshot(small))
    reports.append(small.memory_report())
print(f"{len(snapshots)} steps: {outputs[-1].outputs[0].text}")

# %% [markdown]
# Here is the pool just before the last step. Each cell is a slot, with the token whose
# keys and values it holds.

# %% token-map
from minikv.viz import token_map

before_last = outputs[-2]
token_ids = before_last.prompt_token_ids + before_last.outputs[0].token_ids
tokens = [small.tokenizer.decode([token_id]) for token_id in token_ids]
num_prompt = len(before_last.prompt_token_ids)
figure, drawn = token_map(snapshots[-2], "plants", tokens, num_prompt)
assert len(drawn) == reports[-2].live == len(tokens) - 1
figure

# %% [markdown]
# Three things to notice.
#
# - The tokens lie in order, and the answer goes on where the prompt ends, in the middle
#   of a block.
# - The token sampled last has no slot yet. Its keys and values do not exist yet. The
#   *next* step computes them. Keep this in mind: programs in this field are often off by
#   one at this point.
# - The striped slots are **reserved**: `max_tokens` allows the answer to become that
#   long. The dotted slots are **internal** waste: they belong to the slab, but this
#   request can never use them.

# %% [markdown]
# Now the same run over time: one row for each step, the whole pool from left to right.
#
# **Predict.** What does the first row look like, and what does the last?

# %% over-steps
from minikv.viz import pool_over_steps

figure, rows = pool_over_steps(snapshots, title="One answer in the pool")
assert [row.count("live") for row in rows] == [report.live for report in reports]
figure

# %% [markdown]
# The first step fills the slots of the whole prompt at once. Each later step adds one.
# When the answer ends, the whole slab is given back, and the last row is empty. Nothing
# is erased. The slots merely belong to no request.
#
# The next cell is a player of the single steps. Press play, or click the picture and use
# the arrow keys. The player needs no kernel, so it still works when you open the notebook
# again. (A notebook that ran on another machine is not trusted by Jupyter yet. Then you
# see four of the steps instead. Run the cell to get the player.)

# %% player
from minikv.viz import pool_player

pool_player(snapshots, blocks_per_row=6)

# %% [markdown]
# ## Many requests, one pool
#
# An engine rarely serves one person at a time. We queue four questions at once. In each
# step all running requests get their next token together.
#
# **Predict.** The pool is three slabs long. What happens to the fourth question, and
# when?

# %% four-questions
questions = {
    "plants": "What is photosynthesis? Answer in one sentence.",
    "Japan": "What is the capital of Japan?",
    "gravity": "What is gravity? Answer in one sentence.",
    "week": "How many days are in a week?",
}
for name, text in questions.items():
    chat = [{"role": "user", "content": text}]
    small.add_request(chat, SamplingParams(max_tokens=48), request_id=name)

# %% serve-four tags=["nbval-ignore-output"]
snapshots, answers = [], {}
while small.has_unfinished_requests():
    for output in small.step():
        answers[output.request_id] = output
    snapshots.append(snapshot(small, step=len(snapshots) + 1))

for name, output in answers.items():
    print(f"{name} ({len(output.prompt_token_ids)} tokens): {output.outputs[0].text}")

# %% four-over-steps
figure, rows = pool_over_steps(snapshots, title="Four questions in a pool of three slabs")
assert max(len(row.requests) for row in rows) == 3
figure

# %% most-at-once tags=["nbval-check-output"]
first = rows[0]
num_live, num_free = first.count("live"), first.count("free")
num_empty = len(first.states) - num_live - num_free
num_running = len(first.requests)
print(f"after step 1: {num_running} run, {len(questions) - num_running} waits")
print(f"slots live: {num_live}, free: {num_free}, held but empty: {num_empty}")

# %% [markdown]
# Three questions are answered side by side, each in its own slab. The fourth question
# waits, because no slot is free. Yet 173 slots are held with nothing in them, and its
# prompt would take only 38. When the shortest answer ends, its slab becomes free. The
# fourth question gets the slab in the next step, while the other two go on undisturbed.
# It does not have to wait until all three are done. This is *iteration-level scheduling*,
# which you build in chapter 02.
#
# If each request held only the blocks that it fills, the fourth could have started at
# once. This is *paging*, which you build in chapter 04.
#
# *What this does not show:* how fast any of it is, or what happens when requests keep
# coming. Chapters 06 and 08 measure that.

# %% [markdown]
# ## The map
#
# | | chapter | you build | you see | minutes | needs |
# |---|---|---|---|---|---|
# | 00 | **welcome** (you are here) | nothing | a first answer, and its place in the pool | 15 <!-- source: the authors' estimates, exercises included --> | – |
# | 01 | [one token at a time](01_one_token.ipynb) | a KV cache: growing, then preallocated | prefill and decode; why decoding is bound by memory | 75 | 00 |
# | 02 | [many requests](02_many_requests.ipynb) | slabs, padded batches, iteration-level batching | reserved and internal waste | 75 | 01 |
# | 03 | [fragmentation](03_fragmentation.ipynb) | first fit and its relatives, compaction | 40% free, and no room | 120 | 02 |
# | 04 | [paged blocks](04_paged_blocks.ipynb) | a block pool, block tables, slot mapping | chapter 03's trace again, the paradox gone | 120 | 02; 03 for the reason |
# | 05 | [paged attention](05_paged_attention.ipynb) | attention through block tables | the same logits, and what indirection costs | 120 | 01, 04 |
# | 06 | scheduling under pressure *(coming)* | admission, preemption, chunked prefill | which requests wait, and how long | 90 | 04 |
# | 07 | [prefix sharing](07_prefix_sharing.ipynb) | reference counts, copy-on-write, hashes, eviction | time and memory saved, and isolation | 90 | 04 |
# | 08 | the whole engine *(coming)* | nothing new: measurements | minikv beside other engines and the hardware's limit | 60 | 05–07 |
# | 09 | on call *(coming)* | diagnoses of six incidents | symptoms, and what each remedy does alone | 75 | 06, 07 |
# | 10 | the papers, and beyond one machine *(coming)* | predictions | published figures, reproduced | 60 | 06, 07 |
#
# The last column names the chapters that a chapter builds on. Beside them you need
# Python, and a little PyTorch.

# %% [markdown]
# ## How exercises work
#
# From chapter 01 on, each chapter has a notebook of exercises. In a terminal, in the
# course's folder:
#
# ```
# python -m minikv start 01      copies the exercises of chapter 01 to work/
# python -m minikv check 01      checks your answers, one by one
# python -m minikv reset 01      restores exercises as shipped, and keeps a backup
# python -m minikv progress      shows what is done
# ```
#
# Work in the copy in `work/`: updates of the course never touch it. Answer where a cell
# says `raise NotImplementedError`, and run the check cell below it. A check that fails
# names the mistake, and shows the smallest case in which your answer is wrong. Each
# exercise states its time and difficulty. It has three folded hints: a nudge, the idea,
# and an outline. Open them one at a time.
#
# From chapter 02 on your answers are put to use: classes of your own run inside the
# engine, under a real model.

# %% [markdown]
# ## How to use this course
#
# - Run the cells in order, from top to bottom. If something looks odd, choose *Kernel >
#   Restart Kernel and Run All Cells…*.
# - Change things. The notebooks are yours, and git brings back what you break.
# - Notebooks import the engine; they never define it. `show` prints any part of the
#   engine as it stands in the package, so text and code cannot drift apart. This property
#   says where the striped slots in our pictures end, and where the dotted ones begin:

# %% show-max-kv-tokens
from minikv import Request, show

show(Request.max_kv_tokens)

# %% [markdown]
# ## What `minikv` is made of
#
# The engine is built in floors. Each floor imports only the floors below it. These parts
# answered your questions, the lowest floor first, with their lines of code:

# %% house tags=["nbval-ignore-output"]
from minikv.viz import lines_of_minikv

parts = ("request", "kv_cache", "scheduler", "core", "model", "engine")
for part in lines_of_minikv(parts):
    print(f"{part.num_lines:5}  {part.name}")

# %% [markdown]
# - `request.py` is a request and its counters.
# - `kv_cache/` hands out slots.
# - `scheduler.py` decides which request computes how many tokens in a step.
# - `core.py` is the loop around them.
# - `model/` computes.
# - The engine turns text into tokens, and tokens into text.
#
# By the end of the course you will have taken every one of them apart.

# %% [markdown]
# Next comes chapter 01. There you write the loop that makes one token after the other,
# and find out why it needs a cache.
