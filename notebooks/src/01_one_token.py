# %% [markdown]
# # 01 One token at a time
#
# A language model answers one token at a time, and each token depends on all tokens before it. Done
# naively, every new token costs more than the last. This chapter measures that cost. It removes most of
# it with a **KV cache**, and finds what remains: a cache is memory, and reading memory takes time. The
# rest of the course is about that memory.
#
# For one layer we build a cache by hand, twice: as a tensor that grows, and as a tensor that is
# allocated in advance. In the exercises you write the cached loop and the slab yourself.
#
# What the chapter adds to `minikv`, of which it shows a few lines:
#
# | file | what it is |
# |---|---|
# | `specs.py` | what a token and a model weigh, and what a GPU has |
# | `kv_cache/base.py` | the words in which the engine accounts for its slots |
#
# The rhythm is always the same: a question whose answer you **predict**, a cell to run, and an
# explanation. Do write your guess down first. Times differ from machine to machine, so the text quotes
# none of them.

# %% imports
import time

import torch
from transformers import DynamicCache

import minikv.viz as viz
from minikv import LLM, Request, SamplingParams, show
from minikv.model.loader import load
from minikv.viz import decode

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
print(f"{spec.num_layers} layers, {spec.num_query_heads} query heads, "
      f"{spec.num_kv_heads} kv heads of head_dim {spec.head_dim}")
print(f"hidden size {spec.hidden_size}, a vocabulary of {spec.vocab_size:,} tokens")

# %% [markdown]
# We load the model in `float32` on the CPU, so that two ways to one answer can be compared to many
# digits. One sentence goes with us through the whole chapter.

# %% prompt
prompt = "A cache keeps what it has already computed"
prompt_ids = tokenizer(prompt).input_ids
print(len(prompt_ids), [tokenizer.decode(i) for i in prompt_ids])

# %% [markdown]
# ## 1. A function from token ids to logits
#
# Without any cache a decoder is a plain function. It takes token ids, and returns a row of **logits** for
# each of them: one score for every token of the vocabulary.

# %% forward
logits = model(torch.tensor([prompt_ids]), use_cache=False).logits
print(tuple(logits.shape), "= sequences, tokens, logits of each")
print("after the last token:", repr(tokenizer.decode(logits[0, -1].argmax())))

# %% [markdown]
# Eight rows come out, and to go on we need only the last one. The other rows answer "what would follow
# here?" for places where we know what follows.
#
# > **Predict.** We replace the last token by another one. Which of the 8 rows change?

# %% causality
other_ids = [*prompt_ids[:-1], tokenizer(" seen").input_ids[0]]
other = model(torch.tensor([other_ids]), use_cache=False).logits
for row, change in enumerate((other - logits)[0].abs().amax(-1)):
    print(row, "changed" if change > 1e-3 else "the same")

# %% [markdown]
# Only the last one. A decoder's token looks back and never ahead, so what the model computes for a token
# cannot depend on what comes later. The whole chapter rests on this property.
#
# Now the loop: run the model, take the likeliest next token (this is called greedy), append it, and run
# again.

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
# > **Predict.** For 7 new tokens, how many tokens did the model compute in all? And how does the time for
# > the next token depend on the number of tokens before it?

# %% tokens-computed
figure, computed = decode.tokens_computed(len(prompt_ids), 7)
print("tokens computed:", sum(computed["without"]), "instead of", sum(computed["with"]))
figure

# %% [markdown]
# The left side is our loop: each pass computes all the tokens again. The right side is where we are
# heading. First we measure the price, on longer texts. The time does not depend on what the tokens are,
# so we take random ones.

# %% time-without-cache tags=["nbval-ignore-output"]
def whole_pass(n):
    text = torch.randint(0, spec.vocab_size, (1, n))
    return seconds(lambda: model(text, use_cache=False, logits_to_keep=1))


lengths, title = [16, 64, 128, 256, 512], "The cost of the next token"
without = [(n, whole_pass(n)) for n in lengths]
figure, drawn = decode.cost_per_token({"without a cache": without}, title=title)
ratio = without[-1][1] / without[-3][1]
print(f"four times the text, 128 to 512 tokens: {ratio:.1f} times the time")
figure

# %% [markdown]
# Once the text is long, the time for one more token grows at least in proportion to the text, since every
# token is run again. It may grow faster, for two reasons. Each token is also compared with all tokens
# before it, and the number of these pairs grows with the square. And what no longer fits into the
# processor's own caches has to come from memory. So the time for a whole answer grows at least with the
# square of its length.
#
# ## 2. Keep what was computed
#
# What does a later token need of an earlier one? Only attention looks at other tokens. It looks at their
# **keys** and **values**, for short K and V: one vector each, per kv head and layer. `transformers` has
# an object that collects them. For now it is a black box that lets us look inside.
#
# > **Predict.** We compute the K and V of the 8 prompt tokens twice: in a pass over the prompt alone, and
# > in a pass over all 15 tokens. Are they equal?

# %% two-calls
def cache_after(ids):
    cache = DynamicCache(config=model.config)
    model(torch.tensor([ids]), cache=cache)
    return cache


short, long = cache_after(prompt_ids), cache_after(token_ids)
shapes = [tuple(kept.layers[0].keys.shape) for kept in (short, long)]
print("keys of one layer [sequences, kv heads, tokens, head_dim]:", *shapes)
for a, b in zip(short.layers, long.layers, strict=True):
    assert torch.allclose(a.keys, b.keys[:, :, :8], rtol=1e-4, atol=1e-4)
    assert torch.allclose(a.values, b.values[:, :, :8], rtol=1e-4, atol=1e-4)
print("K and V agree to 1 part in 10,000, in all", len(short.layers), "layers")

# %% [markdown]
# They are equal, as causality demands. Are they equal to the last bit? Here is token 8, once as one of 9
# rows, and once alone, on top of the cached prompt.

# %% bit-for-bit tags=["nbval-ignore-output"]
together = cache_after(token_ids[:9])
model(torch.tensor([token_ids[8:9]]), cache=short)  # one row; appends to `short`
for layer in (0, 15, 29):
    a, b = together.layers[layer].keys[0, :, 8], short.layers[layer].keys[0, :, 8]
    print(f"layer {layer:2}: same bits {torch.equal(a, b)!s:5}  "
          f"largest difference {(a - b).abs().max():.1e}")
print("(0.1 + 0.2) + 0.3 == 0.1 + (0.2 + 0.3):", (0.1 + 0.2) + 0.3 == 0.1 + (0.2 + 0.3))

# %% [markdown]
# Usually not to the last bit. The sum of floating-point numbers depends on the order in which they are
# added, as the last line shows. A matrix product over 1 row adds in another order than a product over 9
# rows. So "the same answer" will mean two things in this course: the same tokens, and logits that are
# equal to rounding.
#
# The loop with a cache differs from ours in one thing: what it feeds to the model.

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
num_cached = cache.get_seq_length()
print("the same", len(cached_ids), "tokens; K and V of", num_cached, "of them")

# %% [markdown]
# The answer is the same. The cache holds K and V of 14 tokens, not of 15. Remember that: section 3 comes
# back to it.
#
# What does a token weigh in this cache? It has K and V, in every layer, for every kv head:

# %% bytes-per-token
held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
print("held:", held, "bytes,", held // 14, "bytes per token")
layers, kv_heads, head_dim = spec.num_layers, spec.num_kv_heads, spec.head_dim
print("2 ×", layers, "×", kv_heads, "×", head_dim, "× 4 bytes =", spec.kv_bytes_per_token)

# %% show-bytes
show(type(spec).kv_bytes_per_token)

# %% [markdown]
# > **Predict.** With a cache, how does the time for the next token depend on the length?
#
# To measure a step at some length, we fill a cache with noise. Noise would change the answer, but it does
# not change the time.

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


further = [1000, 2000, 4000, 8000]  # used below
step_times = {n: step_seconds(n) for n in [*lengths, *further]}
with_cache = [(n, step_times[n]) for n in lengths]
both = {"without a cache": without, "with a cache": with_cache}
figure, drawn = decode.cost_per_token(both, title=title, log=True)
ratio = without[-1][1] / with_cache[-1][1]
print(f"at {lengths[-1]} tokens the cache makes a step {ratio:.0f} times faster")
figure

# %% [markdown]
# Beside the other line this one is nearly flat. People say "with a cache, a token costs O(1)". But the
# picture ends early. Each step still reads the K and V of every token before it. How much should that
# cost? Reading takes bytes ÷ bandwidth, so we measure how fast this machine reads memory.

# %% bandwidth tags=["nbval-ignore-output"]
block = torch.ones(1 << 27)  # far larger than the processor's caches
bandwidth = block.nbytes / seconds(lambda: block.sum(), 10)
del block
predicted_slope = spec.kv_bytes_per_token / bandwidth
print(f"{bandwidth / 1e9:.1f} GB/s: each token of context should add "
      f"{predicted_slope * 1e6:.2f} µs to a step")

# %% [markdown]
# This gives a floor: no step can be faster than it takes to read the weights and the step's K and V once.
#
# > **Predict.** As the context grows, does the measured time rise as steeply as the floor, or more
# > steeply?

# %% time-long-context tags=["nbval-ignore-output"]
measured = [(n, step_times[n]) for n in (512, *further)]
floor = [(n, spec.parameter_bytes / bandwidth + n * predicted_slope) for n in (0, 8000)]
name = "the floor: all bytes read once"
series, title = {"measured": measured, name: floor}, "Further out, the slope shows"
figure, drawn = decode.cost_per_token(series, title=title, predicted=[name])
slope = (step_times[8000] - step_times[1000]) / 7000
print(f"measured {slope * 1e6:.2f} µs per token of context: "
      f"{slope / predicted_slope:.1f} times the floor's slope")
figure

# %% [markdown]
# So a step is not O(1). Its time is linear in the context, with a small factor. As a rule the slope is
# steeper than reading everything once explains. Two things in a step touch the K and V of every token:
# attention reads them, and the cache itself copies them when it grows. To see what growing does, we leave
# the black box and do attention by hand, for the first layer of the model.
#
# ### By hand: a tensor that grows
#
# The layer gets one vector per token, `x`, and projects it to a query, a key and a value. Query and key
# are then turned by an angle that depends on the token's position (rotary embedding).

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
# There are 9 query heads, but only 3 heads for keys and values: three query heads share one kv head. This
# is **grouped-query attention** (Ainslie et al. 2023). It makes the cache three times smaller.
#
# Attention for one token has three parts. Its query is compared with all keys so far, a softmax makes
# weights of these scores, and the weights mix the values.

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
        copied += keys.nbytes + values.nbytes  # cat copies the old contents, too
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
print("15 tokens, 1 layer:", bytes_cat, "bytes copied; a token has", per_token, "bytes")
assert bytes_cat == per_token * 15 * 16 // 2
print("tokens   held, GB   copied, GB (all layers)")
for n in (1024, 2048, 4096, 8192):
    copied = spec.kv_bytes_per_token * n * (n + 1) // 2
    print(f"{n:6} {n * spec.kv_bytes_per_token / 1e9:10.2f} {copied / 1e9:12.1f}")

# %% [markdown]
# Four times: 1 + 2 + … + n grows with the square of n. The black box does the same: `DynamicCache` grows
# by `torch.cat`, in every layer, at every step. Which part of a step is due to growing, and which part to
# attention?

# %% culprits
small, full, one_token = noise_cache(16), noise_cache(8000), torch.tensor([[1]])
one_kv = torch.randn(1, spec.num_kv_heads, 1, spec.head_dim)
one_query = torch.randn(1, spec.num_query_heads, 1, spec.head_dim)
attention = torch.nn.functional.scaled_dot_product_attention


def grow_all():  # what each layer does before it attends
    for layer in range(spec.num_layers):
        full.update(one_kv, one_kv, layer)


def attend_all():
    for kept in full.layers:
        attention(one_query, kept.keys, kept.values, enable_gqa=True)

# %% time-of-a-step tags=["nbval-ignore-output"]
parts = {
    "a step at 8000 tokens": lambda: model(one_token, cache=full),
    "- a step at 16 tokens: weights, overhead": lambda: model(one_token, cache=small),
    "- growing K and V by torch.cat": grow_all,
    "- attention over 8000 tokens": attend_all,
}
rounds = [{name: seconds(part, 1) for name, part in parts.items()} for _ in range(8)]
best = {name: min(times[name] for times in rounds) for name in parts}
whole, *rest = best.values()
for name, t in [*best.items(), ("= not explained by these", whole - sum(rest))]:
    print(f"{t * 1e3:6.1f} ms {t / whole:5.0%}  {name}")
del full

# %% [markdown]
# The parts ran in turns, so that a slow moment of the machine hits all of them alike. Even so they need
# not add up, and the last line may be negative.
#
# Growing takes its part of a step, and we remove it now. Attention takes the other part. The bytes that
# it reads are in the floor already. It takes longer than the floor says because its kernel, with a single
# query, does not keep the memory busy. Chapters 05 and 08 return to that.
#
# ### By hand: a slab
#
# The copies are easy to avoid. We allocate the room once, write each token's K and V into its slot, and
# read a view of the slots in use. One **slot** is the place for one token.

# %% slab
def attention_with_slab(x, slab):
    "slab: [2, slots, 3, 64], keys and values"
    outputs, copied = [], 0
    for position in range(len(x)):
        q, k, v = project(x[position : position + 1], [position])
        slab[0, position], slab[1, position] = k[0], v[0]  # first: a token reads itself
        copied += k.nbytes + v.nbytes
        n = position + 1
        outputs.append(attend(q[0], slab[0, :n], slab[1, :n]))
    return torch.stack(outputs), copied


slab = torch.empty(2, 16, 3, 64)
written, bytes_slab = attention_with_slab(x, slab)
assert torch.allclose(written, grown, atol=1e-5)
print("equal to rounding;", bytes_slab, "bytes written instead of", bytes_cat)

# %% [markdown]
# Each token is written once, so the bytes grow in proportion to the text. Here is the whole life of our
# sentence in such a slab:

# %% cache-filling
pieces = [tokenizer.decode(i) for i in token_ids]
steps = decode.cache_steps(pieces, len(prompt_ids), capacity=16)
decode.cache_player(steps)

# %% [markdown]
# > **Predict.** What happens at the 17th token?

# %% slab-full tags=["raises-exception"]
attention_with_slab(x.repeat(2, 1), slab)

# %% [markdown]
# The slab is full, and the write fails. So how large should a slab be? The length of an answer is known
# only when the answer has ended. Room for all the positions that the model was made for is always enough:

# %% slab-size
print(f"{spec.max_model_len:,} slots × {spec.kv_bytes_per_token:,} bytes = "
      f"{spec.max_model_len * spec.kv_bytes_per_token / 1e6:.0f} MB for every request")
print(f"our sentence used {14 * spec.kv_bytes_per_token / 1e6:.1f} MB of it")

# %% [markdown]
# How much room to set aside is the question of chapter 02. Chapters 03 and 04 deal with what goes wrong
# when it is answered badly.
#
# ## 3. Positions, masks, and the mistake everybody makes
#
# The cached loop held 14 of 15 tokens. The token just sampled is *known* but has no K and V yet:

# %% two-counters
request = Request("r", prompt_ids, max_tokens=7)
cache = DynamicCache(config=model.config)
print("tokens known  computed  fed: positions")
for _ in range(7):
    start, end = request.num_computed_tokens, request.num_tokens
    print(f"{end:12}  {start:8}  {start} to {end - 1}")
    positions = torch.arange(start, end)[None]
    fed = torch.tensor([request.token_ids[start:end]])
    logits = model(fed, cache=cache, position_ids=positions).logits
    request.num_computed_tokens = end  # those fed have K and V now
    request.append(int(logits[0, -1].argmax()))  # this one has not
    assert cache.get_seq_length() == request.num_computed_tokens == request.num_tokens - 1
assert request.token_ids == token_ids
print(request)

# %% [markdown]
# One rule ran prompt and answer alike: *feed the tokens between the two counters*. The rule has no
# phases. The engine of this course schedules by this rule alone. Later chapters run a prompt in pieces,
# drop a request's K and V and compute them again, or find that another request has computed the same
# beginning. None of that needs another rule.

# %% life-cycle
steps = [("Step 1: the prompt", 8, 0), ("Step 2: a decode", 9, 8)]
figure, rows = decode.life_cycle(steps)
figure

# %% [markdown]
# At each arrow stand the tokens known, the tokens computed, and the slots that hold K and V. What has
# just moved is bold. The slots are written before attention reads them, since a token attends to itself.
# Both counters move at the end. This has two consequences:
#
# - The last token of an answer never gets K and V, since it is never fed. So a request needs
#   `num_prompt_tokens + max_tokens - 1` slots.
# - The token that is being decoded stands at position `num_tokens - 1`, not at `num_tokens`, since
#   positions start at 0.
#
# > **Predict.** Somebody gets the second point wrong, and passes `num_tokens` as the position while
# > decoding. Does that give an error, garbage, or nothing to notice?

# %% shifted
def generate_shifted(ids, num_new, shift):
    ids, cache, start = list(ids), DynamicCache(config=model.config), 0
    for _ in range(num_new):
        positions = torch.arange(start, len(ids))[None] + (shift if start else 0)
        fed = torch.tensor([ids[start:]])
        logits = model(fed, cache=cache, position_ids=positions).logits
        start = len(ids)
        ids.append(int(logits[0, -1].argmax()))
    return tokenizer.decode(ids)


for text in (prompt, "One token at a time,"):
    for shift in (0, 1):
        answer = generate_shifted(tokenizer(text).input_ids, 9, shift)
        print(f"shift {shift}: {answer!r}")

# %% [markdown]
# On our sentence there is nothing to notice. A second sentence gets another answer. A wrong position
# raises no error: the model gets slightly wrong angles and answers fluently. A wrong mask does the same.
# Such mistakes are found by comparing with a reference, token by token. Reading the text never finds
# them.
#
# What is a mask? When several tokens are fed at once, each may see itself and the tokens before it. The
# mask says which keys each query may see.

# %% triangle
figure, reads = decode.attention_reads(len(prompt_ids), 7)
print("keys read:", sum(new + old for new, old in reads), "over", len(reads), "queries")
figure

# %% [markdown]
# A decode step is a single row that sees everything so far, and needs no mask. The prompt is a triangle.
# A chunk of several tokens on top of a cache is neither. Row i of a chunk that starts at position s sees
# keys 0 to s + i. Its mask is an exercise.
#
# ## 4. Prefill against decode
#
# The pass over the prompt is called **prefill**, and a pass with one token **decode**. By our rule they
# differ in one number: how many rows are fed. For speed that number is everything.
#
# A linear layer multiplies its rows by a weight matrix. Per row each weight takes part in one
# multiplication and one addition. These are two **FLOP**, floating-point operations. And each weight has
# to be read from memory once, however many rows there are. FLOP per byte read is the **arithmetic
# intensity**:

# %% intensity-linear
def linear_intensity(rows, bytes_per_value=4):
    return 2 * rows / bytes_per_value


for rows in (1, 8, 64, 512):
    print(f"{rows:3} rows: {linear_intensity(rows):5.1f} FLOP per byte of weights")

# %% [markdown]
# > **Predict.** We feed all the linear layers of the model with 1, 8, 64 and 512 rows. How do tokens per
# > second change from one to the next?

# %% time-linear tags=["nbval-ignore-output"]
linears = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
num_weights = sum(m.weight.numel() for m in linears)


def run_linears(rows):
    inputs = {m.in_features: torch.randn(rows, m.in_features) for m in linears}
    return seconds(lambda: [m(inputs[m.in_features]) for m in linears], repeat=2)


linear_seconds = {rows: run_linears(rows) for rows in (1, 8, 64, 512)}
print("rows   tokens/s   weights read, GB/s   % of the memory's speed")
for rows, t in linear_seconds.items():
    speed = 4 * num_weights / t
    print(f"{rows:4} {rows / t:10.0f} {speed / 1e9:20.1f} {speed / bandwidth:25.0%}")

# %% [markdown]
# Tokens per second rise with the rows, steeply at first, and then hardly any more. The last two columns
# say why. With one row the weights are read nearest to memory's speed. With many rows the same weights
# are used for so much multiplying that memory has little to do. (Even one row stays below memory's speed:
# we measured that speed with a plain sum, and the kernel for a single row need not reach it.)
#
# Where is the turn? Memory delivers `bandwidth` bytes a second, and the processor does at most `peak`
# FLOP a second. Their quotient is the **ridge**. Memory limits work with fewer FLOP per byte than that,
# and the processor limits work with more. (A GFLOP/s is 10^9 FLOP in a second.)

# %% ridge tags=["nbval-ignore-output"]
square = torch.randn(1024, 1024)
peak = 2 * 1024**3 / seconds(lambda: square @ square, 30)
ridge = peak / bandwidth
print(f"{peak / 1e9:.0f} GFLOP/s ÷ {bandwidth / 1e9:.1f} GB/s = "
      f"{ridge:.1f} FLOP per byte")
print(f"predicted: linear layers turn compute-bound at {ridge * 4 / 2:.0f} rows")

# %% [markdown]
# The ridge compares two limits, and no kernel reaches either of them. So the turn is a bend, not an edge,
# and it lies near the predicted number of rows. If the machine was busy with other things, both limits
# are off.
#
# Now to attention in a decode step. For each token of context and each kv head it reads a key and a
# value: 2 × 64 numbers. Each query head of the group uses every number once, in a multiplication and an
# addition.

# %% intensity-attention
def attention_intensity(spec, batch, bytes_per_value):
    flops = batch * spec.num_query_heads * 2 * spec.head_dim * 2
    num_bytes = batch * spec.num_kv_heads * 2 * spec.head_dim * bytes_per_value
    return flops / num_bytes


print("batch   FLOP per byte: float32   bf16")
for batch in (1, 2, 4, 8):
    fp32, bf16 = (attention_intensity(spec, batch, num_bytes) for num_bytes in (4, 2))
    print(f"{batch:5} {fp32:24} {bf16:6}")

# %% [markdown]
# > **Predict.** In a batch, rows of different requests share the weights of the linear layers. At what
# > batch size does decode attention turn compute-bound?

# %% time-attention
def run_attention(batch, n=1024):
    # [kv heads of all requests, query heads of each, head_dim]
    q = torch.randn(batch * 3, 3, 64)
    kv = torch.randn(2, batch * 3, n, 64)
    layers = [kv.clone() for _ in range(spec.num_layers)]

    def all_layers():
        for k, v in layers:
            (q @ k.transpose(1, 2)).softmax(-1) @ v

    return seconds(all_layers), len(layers) * kv.nbytes

# %% points tags=["nbval-ignore-output"]
from minikv.viz import roofline

points = {"linear layers": [], "decode attention": []}
for rows, t in linear_seconds.items():
    label, flops = f"{rows} row{'s' * (rows > 1)}", 2 * rows * num_weights
    point = roofline.Point(label, linear_intensity(rows), flops / t)
    points["linear layers"].append(point)
for batch in (1, 2, 4, 8):
    t, num_bytes = run_attention(batch)
    intensity = attention_intensity(spec, batch, 4)
    point = roofline.Point(f"batch {batch}", intensity, intensity * num_bytes / t)
    points["decode attention"].append(point)

# %% roofline tags=["nbval-ignore-output"]
figure, drawn = roofline.roofline(peak, bandwidth, points)
print("FLOP per byte:")
for name, (first, *_, last) in points.items():
    print(f"{name}: {first.intensity} at {first.label}, {last.intensity} at {last.label}")
figure

# %% [markdown]
# More rows move the linear layers to the right, over the ridge. A larger batch does not move attention:
# **every request brings a cache of its own**, so FLOP and bytes grow together. In bf16 the intensity of
# decode attention is the number of query heads per kv head (in float32 half of that), whatever the batch
# and whatever the length.
#
# If you tell a colleague one thing of this chapter, let it be this: *batching makes the weights cheap,
# and never the KV cache.* This is why servers batch. It is also why memory for K and V limits the batch.
#
# The picture does not show why a mark lies below the roof. No kernel is perfect, least of all near the
# ridge, and the roof itself is only as good as two simple measurements. And this is a CPU. GPUs have
# ridges much further out:

# %% gpus
from minikv.specs import GPUS, MODELS

print("               TFLOP/s    GB/s   ridge, FLOP per byte")
for name in ("RTX 4090", "A100 40GB SXM", "A100 80GB SXM", "H100 SXM"):
    gpu = GPUS[name]
    tflops, gb_per_s = gpu.bf16_flops / 1e12, gpu.bandwidth / 1e9
    print(f"{name:13} {tflops:8.0f} {gb_per_s:7.0f} {gpu.ridge:7.0f}")
llama = MODELS["Llama 3.1 8B"]
intensity = attention_intensity(llama, 1, 2)
print(f"decode attention of {llama.name} in bf16: {intensity} FLOP per byte")

# %% [markdown]
# In bf16 a linear layer has one FLOP per byte for each row. So its ridge is also the number of rows at
# which it turns compute-bound. Decode attention has 4 FLOP per byte here, and leaves such a GPU's
# arithmetic almost idle.
#
# ## 5. What real models hold
#
# What a model holds follows from a few numbers in its public `config.json`. `minikv.specs` keeps them.

# %% models
from dataclasses import replace

names = ("SmolLM2-135M", "Mistral 7B v0.3", "Llama 3.1 8B", "Llama 3.1 70B", "Qwen3-8B")
models = [MODELS[name] for name in names]
print("                         query     kv   head  weights,    KV bytes")
print("in bf16          layers  heads  heads    dim        GB   per token")
for m in models:
    print(f"{m.name:16} {m.num_layers:6} {m.num_query_heads:6} {m.num_kv_heads:6} "
          f"{m.head_dim:6} {m.parameter_bytes / 1e9:9.1f} {m.kv_bytes_per_token:11,}")
ungrouped = replace(llama, num_kv_heads=llama.num_query_heads)
print(f"{llama.name} with as many kv as query heads: "
      f"{ungrouped.kv_bytes_per_token:,} bytes per token")

# %% [markdown]
# Count kv heads, not query heads. Count K *and* V. Count bytes, not bits. Each slip changes the result by
# a factor from 2 to 8. The last line shows what grouped-query attention saves.
#
# > **Predict.** A GPU holds the weights, and tokens beside them. How many tokens of each model fit on
# > 24 GB, and on 80 GB?

# %% tokens-that-fit
for gpu in (GPUS["RTX 4090"], GPUS["H100 SXM"]):
    for m in models:
        room, each = gpu.memory_bytes - m.parameter_bytes, m.kv_bytes_per_token
        fits = f"{room // each:9,} tokens" if room > 0 else "none: the weights do not fit"
        print(f"{gpu.memory_gb} GB  {m.name:16} {fits}")

# %% [markdown]
# A 70B model in bf16 does not fit even without a cache: two bytes for each of its parameters are more than
# 80 GB. Such a model is split over several GPUs, or its weights are stored in fewer bits.
#
# A GB is 10^9 bytes here, as in the datasheets. NVIDIA's cards hold a little more (an H100 "80 GB" reports
# 81,559 MiB, which are 85.5 × 10^9 bytes), and not all of it can be used.
# <!-- source: nvidia-smi on an H100 80GB HBM3; 81,559 × 2^20 / 10^9 = 85.5 -->
#
# How much does one long conversation hold?

# %% long-context
tokens, each = llama.max_model_len, llama.kv_bytes_per_token
print(f"{tokens:,} tokens × {each:,} bytes = {tokens * each / 2**30:.1f} GiB")
print(f"weights of {llama.name}: {llama.parameter_bytes / 2**30:.1f} GiB")

# %% [markdown]
# A single context of 128K tokens on Llama 3.1 8B weighs 16 GiB, a bit more than the model.
# <!-- source: 128K = 131,072 tokens, printed above -->
#
# These numbers leave something out. Activations, workspace and the driver want memory too, so engines
# plan with a part of it (vLLM's setting is `gpu_memory_utilization`). A cache with one byte per value
# halves the bytes of a token. And some models do not keep K and V of every token in every layer.
#
# ## 6. The same answer from the engine
#
# `LLM` keeps K and V in one **pool** of slots, cut into blocks. We give it 8 blocks of 4 slots. (It takes
# the model over: from here on, the model runs inside this engine.)

# %% engine
llm = LLM(loaded, block_size=4, num_gpu_blocks_override=8, max_model_len=16)
request_id = llm.add_request(prompt, SamplingParams(max_tokens=7))
snapshots = []
while llm.has_unfinished_requests():
    [output] = llm.step()
    snapshots.append(viz.snapshot(llm))
assert output.prompt_token_ids + output.outputs[0].token_ids == token_ids
print("the same tokens:", repr(output.outputs[0].text))
num_live = [sum(each.num_live.values()) for each in snapshots]
print("slots with K and V after each step:", num_live)

# %% [markdown]
# Eight slots hold K and V after the prompt, and one more after each step, as in our slab. With the last
# step the request ended, and its slots went back to the pool. This is how it looked one step earlier:

# %% engine-slots
figure, slots = viz.token_map(snapshots[-2], request_id, pieces[:14], len(prompt_ids))
figure

# %% [markdown]
# The striped slot is reserved for a token that may still come. The dotted slots can never be used, since
# the answer ends before them. `kv_cache/base.py` has a word for each kind of slot. `rounding`, `cached`
# and `external` wait for later chapters:

# %% show-report
from minikv.kv_cache.base import MemoryReport

show(MemoryReport)

# %% [markdown]
# > **Predict.** The slots have been given back. What is in them now?

# %% freed-not-erased
table = snapshots[-2].tables[request_id]
slots = [table[p // 4] * 4 + p % 4 for p in range(13)]  # position -> slot
pool = llm.runner.pools[0]  # layer 0: [2, blocks, kv heads, slots of a block, head_dim]
pool_keys = pool[0].transpose(1, 2).reshape(-1, 3, 64)[slots]
assert torch.allclose(pool_keys, slab[0, :13], atol=1e-4)
print("live slots:", llm.memory_report().live, "and the old keys are still there")

# %% [markdown]
# They are the very keys that we computed by hand. Freed means "may be overwritten", not "erased".
# Chapter 07 makes use of that.
#
# ## What you have now
#
# - A cache turns recomputation into reading. A step is then linear in the context. It is not O(1).
# - A cache that grows by concatenation copies a number of bytes that grows with the square of the length.
#   A slab writes each token once, but somebody must decide how large it is.
# - `num_computed_tokens` runs one behind `num_tokens` while decoding.
# - Compute limits the pass over a long prompt, and memory limits a decode step. Batching helps with the
#   weights only.
# - We measured one request, greedy, in float32, on a CPU. What happens when many requests share the
#   memory is the next chapter.
#
# The exercises: `python -m minikv start 01`. The modules of `minikv` that you know so far, with their
# lines of code:

# %% lines-so-far tags=["nbval-ignore-output"]
print(*viz.lines_of_minikv(("request", "specs", "kv_cache/base")), sep="\n")
