# %% [markdown]
# # 01 One token at a time
#
# A language model answers one token at a time, and each token depends on all before it. Done
# naively, every new token costs more than the last. This chapter measures that, removes most of
# it with a **KV cache**, and finds what remains: a cache is memory, and reading memory takes time.
# The rest of the course is about that memory.
#
# For one layer we build a cache by hand, twice: as a tensor that grows, and as one allocated in
# advance. In the exercises you write the cached loop and the slab yourself. Two files of `minikv` are
# new, and a few lines of each are shown: `specs.py`, what a token and a model weigh and what a GPU
# has, and `kv_cache/base.py`, the words in which the engine accounts for its slots.
#
# The rhythm: a question to **predict** an answer to, a cell to run, an explanation. Do write your
# guess down first. Times differ from machine to machine, so the text quotes none of them.

# %% imports
import time
from dataclasses import replace

import torch
from transformers import DynamicCache

import minikv.viz as viz
from minikv import LLM, Request, SamplingParams, show
from minikv.model.loader import load
from minikv.viz import decode, roofline

_ = torch.set_grad_enabled(False)

# %% stopwatch
def seconds(function, repeat=3):
    "The best of a few runs: whatever else the machine does can only add time."
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)

# %% load
loaded = load("smollm2", dtype="float32", device="cpu")
model, tokenizer, spec = loaded
print(f"{spec.num_layers} layers, {spec.num_query_heads} query heads, {spec.num_kv_heads} kv heads")
print(f"head_dim {spec.head_dim}, hidden size {spec.hidden_size}, a vocabulary of {spec.vocab_size:,} tokens")

# %% [markdown]
# `float32` on the CPU, so that two ways to one answer can be compared to many digits. One
# sentence goes with us through the whole chapter.

# %% prompt
prompt = "A cache keeps what it has already computed"
prompt_ids = tokenizer(prompt).input_ids
print(len(prompt_ids), [tokenizer.decode(i) for i in prompt_ids])

# %% [markdown]
# ## 1. A function from token ids to logits
#
# Without any cache a decoder is a plain function: token ids in, and for each of them a row of
# **logits** out, one score for every token of the vocabulary.

# %% forward
logits = model(torch.tensor([prompt_ids]), use_cache=False).logits
print(tuple(logits.shape), "= sequences, tokens, logits of each")
print("after the last token:", repr(tokenizer.decode(logits[0, -1].argmax())))

# %% [markdown]
# Eight rows come out, and to go on we need only the last. The others answer "what would follow
# here?" for places where we know what follows.
#
# > **Predict.** We replace the last token by another. Which of the 8 rows change?

# %% causality
other_ids = [*prompt_ids[:-1], tokenizer(" seen").input_ids[0]]
other = model(torch.tensor([other_ids]), use_cache=False).logits
for row, change in enumerate((other - logits)[0].abs().amax(-1)):
    print(row, "changed" if change > 1e-3 else "the same")

# %% [markdown]
# Only the last one. A decoder's token looks back and never ahead, so what the model computes for a
# token cannot depend on what comes later. The whole chapter rests on this property.
#
# Now the loop: run, take the likeliest next token (greedy), append it, run again.

# %% loop-without-cache
def generate_without_cache(ids, num_new):
    ids = list(ids)
    for _ in range(num_new):
        logits = model(torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids


token_ids = generate_without_cache(prompt_ids, 7)
print(repr(tokenizer.decode(token_ids)), len(token_ids), "tokens")

# %% [markdown]
# > **Predict.** For 7 new tokens, how many tokens did the model compute in all? And how does the
# > time for the next token depend on how many stand before it?

# %% tokens-computed
figure, computed = decode.tokens_computed(len(prompt_ids), 7)
print("tokens computed:", sum(computed["without"]), "instead of", sum(computed["with"]))
figure

# %% [markdown]
# The left side is our loop: each pass computes all the tokens again. The right side is where we
# are heading. First the price, measured on longer texts. What the tokens are does not matter for
# the time, so any will do.

# %% time-without-cache tags=["nbval-ignore-output"]
def whole_pass(n):
    text = torch.randint(0, spec.vocab_size, (1, n))
    return seconds(lambda: model(text, use_cache=False, logits_to_keep=1))


lengths = [16, 64, 128, 256, 512]
without = [(n, whole_pass(n)) for n in lengths]
figure, drawn = decode.cost_per_token({"without a cache": without}, title="The cost of the next token")
print(f"four times the text, 128 to 512 tokens: {without[-1][1] / without[-3][1]:.1f} times the time")
figure

# %% [markdown]
# Once the text is long, one more token costs about in proportion to it, or more. In proportion, since
# every token is run again. More, since each token is also compared with all before it, which grows with
# the square, and since what no longer fits into the processor's own caches has to come from
# memory. So a whole answer costs about the square of its length, or more.
#
# ## 2. Keep what was computed
#
# What does a later token need of an earlier one? Only attention looks at other tokens, and it
# looks at their **keys** and **values**: K and V, one vector each per kv head and layer. `transformers`
# has an object that collects them; for now it is a black box that lets us look.
#
# > **Predict.** The K and V of the 8 prompt tokens, once from a pass over the prompt alone and
# > once from a pass over all 15 tokens: equal?

# %% two-calls
def cache_after(ids):
    cache = DynamicCache(config=model.config)
    model(torch.tensor([ids]), cache=cache)
    return cache


short, long = cache_after(prompt_ids), cache_after(token_ids)
print("keys of one layer:", tuple(short.layers[0].keys.shape), "and", tuple(long.layers[0].keys.shape))
for a, b in zip(short.layers, long.layers, strict=True):
    assert torch.allclose(a.keys, b.keys[:, :, :8], rtol=1e-4, atol=1e-4)
    assert torch.allclose(a.values, b.values[:, :, :8], rtol=1e-4, atol=1e-4)
print("K and V agree to 1 part in 10,000, in all", len(short.layers), "layers")

# %% [markdown]
# Equal, as causality demands. Equal to the last bit? Here is token 8, once as one of 9 rows and
# once alone, on top of the cached prompt.

# %% bit-for-bit tags=["nbval-ignore-output"]
together = cache_after(token_ids[:9])
model(torch.tensor([token_ids[8:9]]), cache=short)  # one row; appends to `short`
for layer in (0, 15, 29):
    a, b = together.layers[layer].keys[0, :, 8], short.layers[layer].keys[0, :, 8]
    print(f"layer {layer:2}: same bits {torch.equal(a, b)!s:5}  largest difference {(a - b).abs().max():.1e}")
print("is (0.1 + 0.2) + 0.3 equal to 0.1 + (0.2 + 0.3)?", (0.1 + 0.2) + 0.3 == 0.1 + (0.2 + 0.3))

# %% [markdown]
# Usually not to the last bit. The sum of floating-point numbers depends on their order, as the
# last line shows, and a matrix product over 1 row adds in another order than one over 9. So "the same answer" will mean
# two things in this course: the same tokens, and logits equal to rounding.
#
# The loop with a cache differs from ours in one thing: what it feeds.

# %% loop-with-cache
def generate_with_cache(ids, num_new):
    ids, cache = list(ids), DynamicCache(config=model.config)
    new = ids  # the tokens that have no K and V yet: at first the whole prompt
    for _ in range(num_new):
        logits = model(torch.tensor([new]), cache=cache).logits
        ids.append(int(logits[0, -1].argmax()))
        new = ids[-1:]  # from now on, just the token sampled last
    return ids, cache


cached_ids, cache = generate_with_cache(prompt_ids, 7)
assert cached_ids == token_ids
print("the same", len(cached_ids), "tokens;", "K and V of", cache.get_seq_length(), "of them")

# %% [markdown]
# The same answer. And 14, not 15: hold on to that, section 3 comes back to it.
#
# What does a token weigh in this cache? K and V, in every layer, for every kv head:

# %% bytes-per-token
held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
print("held:", held, "bytes,", held // 14, "per token")
print("2 ×", spec.num_layers, "×", spec.num_kv_heads, "×", spec.head_dim, "× 4 =", spec.kv_bytes_per_token)

# %% show-bytes
show(type(spec).kv_bytes_per_token)

# %% [markdown]
# > **Predict.** With a cache, how does the time for the next token depend on the length?
#
# To measure it at some length, we fill a cache with noise. That would change the text, and
# does not change the time.

# %% noise-cache
def noise_cache(n):
    cache = DynamicCache(config=model.config)
    noise = torch.randn(1, spec.num_kv_heads, n, spec.head_dim)
    for layer in range(spec.num_layers):
        cache.update(noise.clone(), noise.clone(), layer)
    return cache


# %% time-with-cache tags=["nbval-ignore-output"]
def step_seconds(n):
    cache, one_token = noise_cache(n), torch.tensor([[1]])
    return seconds(lambda: model(one_token, cache=cache), 8)


step_times = {n: step_seconds(n) for n in [*lengths, 1000, 2000, 4000, 8000]}  # further out: see below
with_cache = [(n, step_times[n]) for n in lengths]
figure, drawn = decode.cost_per_token(
    {"without a cache": without, "with a cache": with_cache}, title="The cost of the next token", log=True
)
print(f"at {lengths[-1]} tokens the cache makes a step {without[-1][1] / with_cache[-1][1]:.0f} times faster")
figure

# %% [markdown]
# Nearly flat beside the other, and people say "with a cache, a token costs O(1)". Let us not believe
# the picture: it ends early. Each step still reads every K and V there are. How much should that cost? Reading
# takes bytes ÷ bandwidth, so we measure how fast this machine reads memory.

# %% bandwidth tags=["nbval-ignore-output"]
block = torch.ones(1 << 27)  # far larger than the processor's caches
bandwidth = block.nbytes / seconds(lambda: block.sum(), 10)
del block
predicted_slope = spec.kv_bytes_per_token / bandwidth
print(f"{bandwidth / 1e9:.1f} GB/s; each token of context should add {predicted_slope * 1e6:.2f} µs")

# %% [markdown]
# > **Predict.** This gives a floor: no step is faster than reading the weights and its K and V
# > once. As the context grows, will the measured time rise as steeply as the floor, or more steeply?

# %% time-long-context tags=["nbval-ignore-output"]
measured = [(n, step_times[n]) for n in (512, 1000, 2000, 4000, 8000)]
floor = [(n, spec.parameter_bytes / bandwidth + n * predicted_slope) for n in (0, 8000)]
slope = (step_times[8000] - step_times[1000]) / 7000
figure, drawn = decode.cost_per_token(
    {"measured": measured, "the floor: all bytes read once": floor},
    title="Further out, the slope shows",
    predicted=["the floor: all bytes read once"],
)
print(f"measured {slope * 1e6:.2f} µs per token of context: {slope / predicted_slope:.1f} times the floor's")
figure

# %% [markdown]
# Not O(1): a step is linear in the context, with a small factor. And as a rule the slope is steeper than
# reading once explains. Two things in a step touch every K and V there are: attention, which reads
# them, and the cache itself, which grows. To see what growing does, we leave the black box and do
# attention by hand, for the first layer of the model.
#
# ### By hand: a tensor that grows
#
# The layer gets one vector per token, `x`, and projects it to a query, a key and a value. Query
# and key are then turned by an angle that depends on the token's position (rotary embedding).

# %% project
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

layer = model.model.layers[0]


def project(x, positions):
    "[n, 576] -> q [n, 9, 64], k and v [n, 3, 64]"
    attn = layer.self_attn
    q, k, v = (w(x).view(len(x), -1, 64) for w in (attn.q_proj, attn.k_proj, attn.v_proj))
    cos, sin = model.model.rotary_emb(x, torch.tensor([positions]))
    q, k = apply_rotary_pos_emb(q, k, cos[0], sin[0], unsqueeze_dim=1)
    return q, k, v


x = layer.input_layernorm(model.model.embed_tokens(torch.tensor(token_ids)))
for name, tensor in zip("qkv", project(x, range(15)), strict=True):
    print(name, tuple(tensor.shape))

# %% [markdown]
# 9 query heads, but 3 heads for keys and values: three query heads share one. This is
# **grouped-query attention** (Ainslie et al. 2023), and it makes the cache three times smaller.
#
# Attention for one token: its query against all keys so far, a softmax, a mix of the values.

# %% attend
def attend(q, k, v):
    "One query over n tokens. q [9, 64]; k and v [n, 3, 64]."
    q = q.view(3, 3, 64)  # kv head, its query heads, head_dim
    scores = torch.einsum("hgd,nhd->hgn", q, k) / 64**0.5
    return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).reshape(576)


# %% grow
def attention_with_cat(x):
    keys = values = torch.empty(0, 3, 64)
    outputs, copied = [], 0
    for position in range(len(x)):
        q, k, v = project(x[position : position + 1], [position])
        keys, values = torch.cat([keys, k]), torch.cat([values, v])
        copied += keys.nbytes + values.nbytes  # cat returns a new tensor, old contents and all
        outputs.append(attend(q[0], keys, values))
    return torch.stack(outputs), copied


# %% [markdown]
# Is it right? `transformers` computes the same layer over all 15 tokens at once.

# %% compare-layer
grown, bytes_cat = attention_with_cat(x)
angles = model.model.rotary_emb(x, torch.arange(15)[None])
reference, _ = layer.self_attn(x[None], position_embeddings=angles, attention_mask=None)
assert torch.allclose(layer.self_attn.o_proj(grown), reference[0], atol=1e-4)
print(tuple(grown.shape), "equal to rounding")

# %% [markdown]
# > **Predict.** Each `torch.cat` makes a new tensor and copies the old one into it. Twice the
# > tokens: how many times the bytes?

# %% bytes-copied
per_token = 2 * 3 * 64 * 4  # K and V of one layer, float32
print("15 tokens, 1 layer:", bytes_cat, "bytes copied; a token has", per_token)
assert bytes_cat == per_token * 15 * 16 // 2
for n in (1024, 2048, 4096, 8192):
    copied = spec.kv_bytes_per_token * n * (n + 1) // 2
    print(f"{n:5} tokens, all layers: {copied / 1e9:8.1f} GB copied to hold {n * spec.kv_bytes_per_token / 1e9:.2f} GB")

# %% [markdown]
# Four times: 1 + 2 + … + n grows with the square. The black box does the same: `DynamicCache` grows
# by `torch.cat`, in every layer, at every step. What does each of the two culprits take of a step?

# %% culprits
small, full, one_token = noise_cache(16), noise_cache(8000), torch.tensor([[1]])
one_kv = torch.randn(1, spec.num_kv_heads, 1, spec.head_dim)
one_query = torch.randn(1, spec.num_query_heads, 1, spec.head_dim)


def grow_all():  # what each layer does before it attends
    for layer in range(spec.num_layers):
        full.update(one_kv, one_kv, layer)


def attend_all():
    for kept in full.layers:
        torch.nn.functional.scaled_dot_product_attention(one_query, kept.keys, kept.values, enable_gqa=True)


# %% time-of-a-step tags=["nbval-ignore-output"]
parts = {
    "a step at 8000 tokens": lambda: model(one_token, cache=full),
    "- a step at 16 tokens: weights, overhead": lambda: model(one_token, cache=small),
    "- growing K and V by torch.cat": grow_all,
    "- attention over 8000 tokens": attend_all,
}
rounds = [{name: seconds(part, 1) for name, part in parts.items()} for _ in range(8)]  # in turns
best = {name: min(times[name] for times in rounds) for name in parts}
whole, *rest = best.values()
for name, t in [*best.items(), ("= not explained by these", whole - sum(rest))]:
    print(f"{t * 1e3:6.1f} ms {t / whole:5.0%}  {name}")
del full

# %% [markdown]
# The parts ran in turns, so that a slow moment of the machine hits all alike. Even so they need not add
# up, and the last line may be negative. Growing is
# one culprit, and we remove it now. The other is attention: not its bytes, which the floor counts,
# but kernels that for a single query do not keep the memory busy. Chapters 05 and 08 return to that.
#
# ### By hand: a slab
#
# The copies are easy to avoid. Allocate room once, write each token's K and V into its slot, read
# a view. One **slot** is the place for one token.

# %% slab
def attention_with_slab(x, slab):
    "slab: [2, slots, 3, 64], keys and values"
    outputs, copied = [], 0
    for position in range(len(x)):
        q, k, v = project(x[position : position + 1], [position])
        slab[0, position], slab[1, position] = k[0], v[0]  # first write: a token reads itself too
        copied += k.nbytes + v.nbytes
        n = position + 1
        outputs.append(attend(q[0], slab[0, :n], slab[1, :n]))
    return torch.stack(outputs), copied


slab = torch.empty(2, 16, 3, 64)
written, bytes_slab = attention_with_slab(x, slab)
assert torch.allclose(written, grown, atol=1e-5)
print("equal to rounding;", bytes_slab, "bytes written instead of", bytes_cat)

# %% [markdown]
# Each token is written once: linear. The whole life of our sentence in such a slab:

# %% cache-filling
pieces = [tokenizer.decode(i) for i in token_ids]
steps = decode.cache_steps(pieces, len(prompt_ids), capacity=16)
decode.cache_player(steps)

# %% [markdown]
# > **Predict.** What happens at the 17th token?

# %% slab-full tags=["raises-exception"]
attention_with_slab(x.repeat(2, 1), slab)

# %% [markdown]
# So how large should a slab be? The answer's length is known only when it ends. Room for all the
# positions that the model was made for is safe:

# %% slab-size
print(f"{spec.max_model_len:,} slots × {spec.kv_bytes_per_token:,} bytes = "
      f"{spec.max_model_len * spec.kv_bytes_per_token / 1e6:.0f} MB for every request")
print(f"our sentence used {14 * spec.kv_bytes_per_token / 1e6:.1f} MB of it")

# %% [markdown]
# That is the question of chapter 02, and chapters 03 and 04 come from bad answers to it.
#
# ## 3. Positions, masks, and the mistake everybody makes
#
# The cached loop held 14 of 15 tokens. The token just sampled is *known* but has no K and V:
# nothing has run on it. It gets them in the **next** forward pass, which also samples its
# successor. So a request needs two counters, and `minikv.Request` has both.

# %% two-counters
request = Request("r", prompt_ids, max_tokens=7)
cache = DynamicCache(config=model.config)
print("known  computed  feeds positions")
for _ in range(7):
    start, end = request.num_computed_tokens, request.num_tokens
    print(f"{end:5}  {start:8}  {start} to {end - 1}")
    positions = torch.arange(start, end)[None]
    fed = torch.tensor([request.token_ids[start:end]])
    logits = model(fed, cache=cache, position_ids=positions).logits
    request.num_computed_tokens = end  # those fed have K and V now
    request.append(int(logits[0, -1].argmax()))  # this one has not
    assert cache.get_seq_length() == request.num_computed_tokens == request.num_tokens - 1
assert request.token_ids == token_ids
print(request)

# %% [markdown]
# One rule ran prompt and answer alike: *feed the tokens between the two counters*. There are no
# phases in it. The engine of this course schedules by this rule alone. Later chapters run a prompt in
# pieces, drop a request's K and V and compute them again, or find that another request has computed
# the same beginning. None of that needs another rule.

# %% life-cycle
figure, rows = decode.life_cycle([("Step 1: the prompt", 8, 0), ("Step 2: a decode", 9, 8)])
figure

# %% [markdown]
# At the arrows stand the tokens known, the tokens computed, and the slots that hold K and V; bold is
# what has just moved. Slots are written before attention reads them, since a token attends to
# itself. Both counters move at the end. Two consequences:
#
# - The last token of an answer never gets K and V: it is never fed. A request needs
#   `num_prompt_tokens + max_tokens - 1` slots.
# - The token being decoded stands at position `num_tokens - 1`, since positions start at 0. Not at
#   `num_tokens`.
#
# > **Predict.** Someone gets that wrong and passes `num_tokens` while decoding. Error, garbage, or
# > nothing to notice?

# %% shifted
def generate_shifted(ids, num_new, shift):
    ids, cache, start = list(ids), DynamicCache(config=model.config), 0
    for _ in range(num_new):
        positions = torch.arange(start, len(ids))[None] + (shift if start else 0)
        logits = model(torch.tensor([ids[start:]]), cache=cache, position_ids=positions).logits
        start = len(ids)
        ids.append(int(logits[0, -1].argmax()))
    return tokenizer.decode(ids)


for text in (prompt, "One token at a time,"):
    for shift in (0, 1):
        print(f"shift {shift}: {generate_shifted(tokenizer(text).input_ids, 9, shift)!r}")

# %% [markdown]
# Nothing to notice on our sentence, and another answer on a second one. A wrong position raises
# no error; the model gets slightly wrong angles and answers fluently. A wrong mask does the same.
# Such mistakes are found by comparing with a reference, token by token, never by reading text.
#
# About masks: when several tokens are fed at once, each may see itself and what is before it.

# %% triangle
figure, reads = decode.attention_reads(len(prompt_ids), 7)
print("keys read:", sum(new + old for new, old in reads), "over", len(reads), "queries")
figure

# %% [markdown]
# A decode step is a single row that sees everything so far: it needs no mask. The prompt is a
# triangle. A chunk of several tokens on top of a cache is neither, and its mask is an exercise:
# row i of a chunk that starts at position s sees keys 0 to s + i.
#
# ## 4. Prefill against decode
#
# The pass over the prompt is called **prefill**, a pass with one token **decode**. By our rule
# they differ in one number: rows fed. For speed that number is everything.
#
# A linear layer multiplies its rows by a weight matrix. Per row each weight takes part in one multiplication and
# one addition: two **FLOP**, floating-point operations. And each weight has to be read from memory
# once, however many rows there are. FLOP per byte read is the **arithmetic intensity**:

# %% intensity-linear
def linear_intensity(rows, bytes_per_value=4):
    return 2 * rows / bytes_per_value


for rows in (1, 8, 64, 512):
    print(f"{rows:3} rows: {linear_intensity(rows)} FLOP per byte of weights")

# %% [markdown]
# > **Predict.** All the linear layers of the model, fed with 1, 8, 64 and 512 rows. How do tokens
# > per second change from one to the next?

# %% time-linear tags=["nbval-ignore-output"]
linears = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
num_weights = sum(m.weight.numel() for m in linears)


def run_linears(rows):
    inputs = {m.in_features: torch.randn(rows, m.in_features) for m in linears}
    return seconds(lambda: [m(inputs[m.in_features]) for m in linears], repeat=2)


linear_seconds = {rows: run_linears(rows) for rows in (1, 8, 64, 512)}
for rows, t in linear_seconds.items():
    speed = 4 * num_weights / t
    print(f"{rows:3} rows: {rows / t:7.0f} tokens/s; weights come at {speed / 1e9:5.1f} GB/s, "
          f"{speed / bandwidth:4.0%} of what memory can")

# %% [markdown]
# Tokens per second rise with the rows, steeply at first, and then hardly any more. The last column
# tells why: with one row the weights come nearest to memory's speed, with many the same weights last
# for so much multiplying that memory is hardly asked. (Nearest is not near: the kernel for a single
# row need not reach the speed of a plain sum, which is what we measured.)
#
# Where is the turn? Memory delivers `bandwidth` bytes a second, the processor does at most `peak`
# FLOP a second. The quotient is the **ridge**. Work with fewer FLOP per byte cannot be faster than
# memory allows, work with more not faster than the processor. (A GFLOP/s is 10^9 FLOP in a second.)

# %% ridge tags=["nbval-ignore-output"]
square = torch.randn(1024, 1024)
peak = 2 * 1024**3 / seconds(lambda: square @ square, 30)
ridge = peak / bandwidth
print(f"peak {peak / 1e9:.0f} GFLOP/s ÷ {bandwidth / 1e9:.1f} GB/s = {ridge:.1f} FLOP per byte")
print(f"predicted: linear layers turn compute-bound at {ridge * 4 / 2:.0f} rows")

# %% [markdown]
# That compares two limits, and no kernel reaches either. So the turn is a bend, not an edge, and lies
# near that number of rows, not at it. If the machine was busy with other things, both are off.
#
# Now attention in a decode step. Per token of context and kv head it reads a key and a value, 2 × 64
# numbers. Each query head of the group uses every number once, in a multiplication and an addition.

# %% intensity-attention
def attention_intensity(spec, batch, bytes_per_value):
    flops = batch * spec.num_query_heads * 2 * spec.head_dim * 2
    num_bytes = batch * spec.num_kv_heads * 2 * spec.head_dim * bytes_per_value
    return flops / num_bytes


for batch in (1, 2, 4, 8):
    print(f"batch {batch}: float32 {attention_intensity(spec, batch, 4)}, bf16 {attention_intensity(spec, batch, 2)}")

# %% [markdown]
# > **Predict.** In a batch, rows of different requests share the weights of the linear layers. At
# > what batch size does decode attention turn compute-bound?

# %% time-attention
def run_attention(batch, n=1024):
    q = torch.randn(batch * 3, 3, 64)  # [kv heads of all requests, query heads of each, head_dim]
    kv = torch.randn(2, batch * 3, n, 64)
    layers = [kv.clone() for _ in range(spec.num_layers)]

    def all_layers():
        for k, v in layers:
            (q @ k.transpose(1, 2)).softmax(-1) @ v

    return seconds(all_layers), len(layers) * kv.nbytes


# %% points tags=["nbval-ignore-output"]
points = {"linear layers": [], "decode attention": []}
for rows, t in linear_seconds.items():
    label = f"{rows} row{'s' * (rows > 1)}"
    points["linear layers"].append(roofline.Point(label, linear_intensity(rows), 2 * rows * num_weights / t))
for batch in (1, 2, 4, 8):
    t, num_bytes = run_attention(batch)
    intensity = attention_intensity(spec, batch, 4)
    points["decode attention"].append(roofline.Point(f"batch {batch}", intensity, intensity * num_bytes / t))

# %% roofline tags=["nbval-ignore-output"]
figure, drawn = roofline.roofline(peak, bandwidth, points)
for name, marks in points.items():
    first, last = marks[0], marks[-1]
    print(f"{name}: {first.intensity} FLOP per byte at {first.label}, {last.intensity} at {last.label}")
figure

# %% [markdown]
# One crossing, not two. More rows move the linear layers to the right, over the ridge. Attention
# stays where it is: **every request brings a cache of its own**, so FLOP and bytes grow together.
# Intensity is query heads per kv head in bf16 (half of that in float32), whatever the batch and
# whatever the length.
#
# If you tell a colleague one thing of this chapter, let it be this: *batching makes the weights
# cheap, and never the KV cache.* It is why servers batch, and
# why what limits the batch is memory for K and V.
#
# What the picture does not show: why a mark lies below the roof. Kernels are not perfect, near the
# ridge none is, and the roof itself is as good as two simple measurements. And this is a CPU. GPUs
# have ridges much further out:

# %% gpus
from minikv.specs import GPUS, MODELS

for gpu in [GPUS[name] for name in ("RTX 4090", "A100 40GB SXM", "A100 80GB SXM", "H100 SXM")]:
    print(f"{gpu.name:13} {gpu.bf16_flops / 1e12:5.0f} TFLOP/s ÷ {gpu.bandwidth / 1e9:4.0f} GB/s = ridge {gpu.ridge:.0f}")
llama = MODELS["Llama 3.1 8B"]
print("decode attention of", llama.name, "in bf16:", attention_intensity(llama, 1, 2), "FLOP per byte")

# %% [markdown]
# In bf16 the ridge equals the row count at which a linear layer turns compute-bound. Decode
# attention at 4 FLOP a byte leaves such a GPU's arithmetic almost idle.
#
# ## 5. What real models hold
#
# It follows from a few numbers in each model's public `config.json`; `minikv.specs` keeps them.

# %% models
names = ("SmolLM2-135M", "Mistral 7B v0.3", "Llama 3.1 8B", "Llama 3.1 70B", "Qwen3-8B")
models = [MODELS[name] for name in names]
print(f"{'in bf16':16} layers  q heads  kv heads  head_dim  weights, GB  KV bytes per token")
for m in models:
    print(f"{m.name:16} {m.num_layers:6} {m.num_query_heads:8} {m.num_kv_heads:9} {m.head_dim:9} "
          f"{m.parameter_bytes / 1e9:12.1f} {m.kv_bytes_per_token:19,}")
ungrouped = replace(llama, num_kv_heads=llama.num_query_heads)
print(f"{llama.name} with as many kv as query heads: {ungrouped.kv_bytes_per_token:,} bytes per token")

# %% [markdown]
# Count kv heads, not query heads; K *and* V; bytes, not bits. Each slip changes the result by
# a factor from 2 to 8. The last line shows what grouped-query attention saves.
#
# > **Predict.** A GPU holds weights, and tokens beside them. How many tokens of each model fit on
# > 24 GB, and on 80 GB?

# %% tokens-that-fit
for gpu in (GPUS["RTX 4090"], GPUS["H100 SXM"]):
    for m in models:
        room = gpu.memory_bytes - m.parameter_bytes
        tokens = f"{room // m.kv_bytes_per_token:9,} tokens" if room > 0 else "none: the weights do not fit"
        print(f"{gpu.memory_gb} GB  {m.name:16} {tokens}")

# %% [markdown]
# A 70B model in bf16 does not fit even without a cache: two bytes for each of its
# parameters are more than 80 GB. One splits it over GPUs, or stores its weights in fewer bits.
#
# A GB is 10^9 bytes here, as the datasheets have it. That rounds down: NVIDIA's cards hold a little
# more (an H100 "80 GB" reports 81,559 MiB, or 85.5 × 10^9 bytes), and not all of it can be used.
# <!-- source: nvidia-smi on an H100 80GB HBM3; 81,559 × 2^20 / 10^9 = 85.5 -->
#
# And one long conversation?

# %% long-context
tokens = llama.max_model_len
print(f"{tokens:,} tokens × {llama.kv_bytes_per_token:,} bytes = {tokens * llama.kv_bytes_per_token / 2**30:.1f} GiB")
print(f"weights of {llama.name}: {llama.parameter_bytes / 2**30:.1f} GiB")

# %% [markdown]
# A single context of 128K tokens on Llama 3.1 8B weighs 16 GiB, a bit more than the model.
# <!-- source: 128K = 131,072 tokens, printed above -->
#
# What this does not show: activations, workspace and the driver want memory too, so engines plan
# with a part of it (vLLM's setting is `gpu_memory_utilization`). Caches with one byte per value halve a token.
# And some models keep something other than K and V of every token in every layer.
#
# ## 6. The same answer from the engine
#
# `LLM` keeps K and V in one **pool** of slots, cut into blocks. We give it 8 blocks of 4 slots.
# (It takes the model over: from here on, the model runs inside this engine.)

# %% engine
llm = LLM(loaded, block_size=4, num_gpu_blocks_override=8, max_model_len=16)
request_id = llm.add_request(prompt, SamplingParams(max_tokens=7))
snapshots = []
while llm.has_unfinished_requests():
    [output] = llm.step()
    snapshots.append(viz.snapshot(llm))
assert output.prompt_token_ids + output.outputs[0].token_ids == token_ids
print("the same tokens:", repr(output.outputs[0].text))
print("slots with K and V after each step:", [sum(s.num_live.values()) for s in snapshots])

# %% [markdown]
# Eight slots after the prompt, then one more with each step, as in our slab. After the last step
# the request has ended and its slots went back to the pool. One step earlier:

# %% engine-slots
figure, slots = viz.token_map(snapshots[-2], request_id, pieces[:14], len(prompt_ids))
figure

# %% [markdown]
# The striped slot is reserved for a token that may come; the dotted ones can never be used, as the
# answer ends before them. For all of these `kv_cache/base.py` has words. Three of them wait for later
# chapters:

# %% show-report
from minikv.kv_cache.base import MemoryReport

show(MemoryReport)

# %% [markdown]
# > **Predict.** The slots have been given back. What is in them now?

# %% freed-not-erased
table = snapshots[-2].tables[request_id]
slots = [table[p // 4] * 4 + p % 4 for p in range(13)]  # position -> slot
pool = llm.runner.pools[0]  # layer 0: [K and V, blocks, kv heads, slots of a block, head_dim]
pool_keys = pool[0].transpose(1, 2).reshape(-1, 3, 64)[slots]
assert torch.allclose(pool_keys, slab[0, :13], atol=1e-4) and llm.memory_report().live == 0
print("live slots:", llm.memory_report().live, "and the old keys are still there")

# %% [markdown]
# The very keys that we computed by hand. Freed means "may be overwritten", not "erased". Chapter 07
# makes a living of that.
#
# ## What you have now
#
# - A cache turns recomputation into reading. A step stays linear in the context; it is not O(1).
# - Growing by concatenation copies quadratically many bytes; a slab writes each token once, but
#   somebody must decide how large it is.
# - `num_computed_tokens` runs one behind `num_tokens` while decoding.
# - A long prompt is bound by compute, a decode step by memory; batching helps the weights only.
# - One request was measured, greedy, in float32, on a CPU. What happens when many share the
#   memory is the next chapter.
#
# The exercises: `python -m minikv start 01`. The modules of `minikv` that you know so far, with their
# lines of code:

# %% lines-so-far tags=["nbval-ignore-output"]
for part in viz.lines_of_minikv(("request", "specs", "kv_cache/base")):
    print(f"{part.num_lines:5}  {part.name:16} {part.about}")
