# %% [markdown]
# # Exercises of chapter 01: one token at a time
#
# Six exercises, about 75 minutes. They can be done in any order.
#
# **How it goes.** Each exercise has a cell to fill in and, below it, a check. Replace the `raise`
# line by your code, run the cell, run the check. The last line of a check that passes says *passed*.
# One that fails says which case is wrong, the smallest it found, and what the mistake looks like to
# it. Your functions may print; nobody minds.
# `python -m minikv check 01` in a terminal checks the whole notebook.
#
# Run the setup cell first. From then on each exercise stands by itself: its own cells, from its title
# to its check, are all it needs. Among them are folded ones, which JupyterLab shows as dots: they
# serve the check. Run them, too; read them only if you are curious.
#
# **Hints** come in three steps, each folded: a nudge, the rule that decides the matter, an
# outline of the code. Open as few as you need.
#
# **Words.** A *token* is a number that stands for a piece of text. Every attention layer makes
# three kinds of vectors of each token: queries, keys (K) and values (V). A query is used once, when
# its token is run. Keys and values are read again by every later token, so they are kept: that
# store is the *KV cache*. Running the whole prompt in one forward pass is *prefill*; after it,
# each pass runs one token, and that is *decode*. Two counters say where a sequence stands:
#
# | | counts |
# |---|---|
# | `num_tokens` | all known tokens, prompt and output, the one just sampled included |
# | `num_computed_tokens` | tokens whose K and V are in the cache |

# %% setup
import math
import random
import re
from functools import partial
from itertools import combinations

import torch
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from minikv import OutOfKVMemory
from minikv.classroom.harness.bounds import Delegated, Endless, bounded
from minikv.classroom.harness.namespace import begin, lent, ours
from minikv.classroom.harness.values import numbers, same
from minikv.classroom.harness.verdicts import ask, check, explain, factors, once, told
from minikv.model.loader import load
from minikv.specs import GPUS

# A random decoder of a million parameters: its text is noise, but every token counts.
model, _, spec = load("tiny", dtype="float32", device="cpu")
begin(globals())

# %% [markdown]
# ## Exercise 1.1: what a cache weighs
#
# *8 minutes, easy.*
#
# **From a model's configuration, compute how many bytes the K and V of `num_tokens` tokens take.**
#
# Every layer keeps K and V of every token. A K (and a V) is one vector of `head_dim` numbers for
# each *kv head*. In *grouped-query attention* several query heads share one kv head:
#
# ```text
# query heads   0   1   2   3   4   5      num_attention_heads = 6
#               └─┬─┘   └─┬─┘   └─┬─┘
# kv heads        0       1       2        num_key_value_heads = 3: this is what the cache holds
# ```
#
# `config` is a dictionary with the names of a Hugging Face `config.json`:
#
# | key | |
# |---|---|
# | `num_hidden_layers` | layers |
# | `num_attention_heads` | query heads of one layer |
# | `num_key_value_heads` | kv heads of one layer; *may be absent*: then every query head has its own |
# | `head_dim` | numbers in one head's vector; *may be absent*: then `hidden_size` is divided evenly among the query heads |
# | `hidden_size` | numbers in a token's vector between layers |
# | `dtype` | how the *weights* are stored; a cache may be stored in fewer bits than the weights |
#
# Each stored number of the cache takes `bits_per_value` bits: 32, 16 or 8.
#
# <details><summary>Hint 1: a nudge</summary>
# Ask what is stored for one token in one layer, draw it, and count its numbers.
# </details>
# <details><summary>Hint 2: the rule</summary>
# Nothing about query heads is stored. They matter only where the configuration leaves something
# out.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# kv heads  <- the config's own, else the query heads
# head_dim  <- the config's own, else hidden_size / query heads
# numbers   <- K and V  x  layers  x  kv heads  x  head_dim  x  tokens
# bytes     <- numbers x bits, in bytes
# ```
# </details>

# %% ex-1-1
def kv_bytes(config, num_tokens, bits_per_value):
    """Bytes that K and V of `num_tokens` tokens take over all layers."""
    ### BEGIN SOLUTION
    num_kv_heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get(
        "head_dim", config["hidden_size"] // config["num_attention_heads"]
    )
    values_per_token = 2 * config["num_hidden_layers"] * num_kv_heads * head_dim
    return values_per_token * num_tokens * bits_per_value // 8
    ### END SOLUTION

# %% [markdown]
# The check builds each model without its weights (PyTorch's `meta` device knows shapes only), runs
# the tokens through it and counts the bytes of the tensors in transformers' own cache.

# %% cases-1-1 jupyter={"source_hidden": true}
@ours
def counted_kv_bytes(config, num_tokens, bits_per_value):
    shape = {key: value for key, value in config.items() if key != "dtype"}
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=8, intermediate_size=8, **shape))
        cache = DynamicCache(config=llama.config)
        llama(torch.zeros(1, num_tokens, dtype=torch.long), None, None, cache)
    kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    dtypes = {32: torch.float32, 16: torch.bfloat16, 8: torch.float8_e4m3fn}
    return sum(tensor.to(dtypes[bits_per_value]).nbytes for tensor in kept)


@ours
def configs_1_1():
    """(config, num_tokens, bits_per_value), smallest first; then three models by their names."""
    rng = random.Random(11)
    for size in range(1, 10):
        kv, group, dim = rng.randint(1, size), rng.randint(2, 3), 2 * rng.randint(1, size)
        config = {"hidden_size": kv * group * (dim + 2 * rng.randint(1, 3)),
                  "num_hidden_layers": size, "num_attention_heads": kv * group,
                  "num_key_value_heads": kv, "head_dim": dim,
                  "dtype": rng.choice(["float32", "bfloat16"])}  # fmt: skip
        absent = {3: ["head_dim"], 5: ["num_key_value_heads"],
                  7: ["head_dim", "num_key_value_heads"], 8: ["head_dim"]}  # fmt: skip
        for key in absent.get(size, []):
            del config[key]
        yield config, size + 1, rng.choice([8, 16, 32])
    wide = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 160}
    wide |= {"hidden_size": 4096, "num_hidden_layers": 70, "dtype": "bfloat16"}
    yield wide, 1, 32
    yield wide, 131072, 8
    for num_tokens in (1, 32768):
        for config in MODELS.values():
            yield config, num_tokens, 16

# %% models-1-1 jupyter={"source_hidden": true}
# From their config.json. head_dim is 128 in each, hidden_size / heads 128, 160, 64.
llama = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
llama |= {"hidden_size": 4096, "num_hidden_layers": 32, "dtype": "bfloat16"}
nemo = llama | {"hidden_size": 5120, "num_hidden_layers": 40}
qwen = llama | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}
MODELS = {"Llama 3.1 8B": llama, "Mistral Nemo": nemo, "Qwen3 0.6B": qwen}

# %% slips-1-1 jupyter={"source_hidden": true}
QUERY_HEADS = "The query heads were counted; K and V exist once per kv head."
ONE_HEAD = "One kv head was counted; every kv head has its K and V."


@ours
def slips_1_1(config, num_tokens, bits, wanted):
    """The usual slips, alone and in pairs, each with its answer; below, the factor of each."""
    q = config["num_attention_heads"]
    kv = config.get("num_key_value_heads", q)
    narrow, some = config["hidden_size"] / q, max(num_tokens, 1)
    slips = {
        QUERY_HEADS: q / kv,
        "Those are the query heads that share a kv head, not the kv heads.": q / kv / kv,
        "Only one of K and V was counted; a token keeps both.": 1 / 2,
        "Bits are not bytes: a byte is 8 of them.": 8,
        "head_dim was taken from hidden_size, but this config gives its own.":
            narrow / config.get("head_dim", narrow),
        "The width of the weights was used; the cache has its own.":
            {"float32": 32, "bfloat16": 16}[config["dtype"]] / bits,
        "Two bytes per value were taken for granted; bits_per_value says how many.": 16 / bits,
        "One layer was counted; every layer keeps K and V.": 1 / config["num_hidden_layers"],
        "One token was counted, whatever num_tokens says.": 1 / some,
        ONE_HEAD: 1 / kv,
        "Where num_key_value_heads is absent one kv head was taken; then every query head has its "
        "own.": 1 / kv if "num_key_value_heads" not in config else 1,
        "Where head_dim is absent, hidden_size is divided among the query heads, not the kv heads.":
            q / kv if "head_dim" not in config else 1,
        "One token is missing: all num_tokens are in the cache here.": 1 - 1 / some,
    }  # fmt: skip
    units = {"KB": 1e3, "KiB": 2**10, "MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30}
    slips |= {f"That is in {unit}; bytes were asked for.": 1 / u for unit, u in units.items()}
    found = factors(wanted, slips)
    del found[f"{QUERY_HEADS} And: {ONE_HEAD}"]  # that is the group's size
    return found

# %% check-1-1
@check
def exercise_1_1(kv_bytes):
    cases = []
    for config, num_tokens, bits in configs_1_1():
        absent = sorted({"head_dim", "num_key_value_heads"} - config.keys())
        asked = f"kv_bytes(config, num_tokens={num_tokens}, bits_per_value={bits}), "
        asked += f"where config is\n{config}"
        asked += "".join(f"\nNote: no {key}." for key in absent)
        value = ask(kv_bytes, dict(config), num_tokens, bits, asked=asked)
        got = numbers(value, ["bytes"], "kv_bytes")["bytes"]
        wanted = once(counted_kv_bytes, config, num_tokens, bits)
        cases.append((asked, got, wanted, slips_1_1(config, num_tokens, bits, wanted)))
    explain(cases)
    empty = ask(kv_bytes, dict(config), 0, 16)
    empty = numbers(empty, ["bytes"], "kv_bytes")["bytes"]
    assert empty == 0, f"A cache of 0 tokens takes no bytes; you returned {empty:,.0f}."
    each = [case[1] for case in cases[-6:]]
    for name, one, many in zip(MODELS, each[:3], each[3:], strict=True):
        print(f"{name:12}  {one:>9,.0f} bytes per token, "
              f"{many / 2**30:.1f} GiB for 32,768 tokens")  # fmt: skip
    print("Exercise 1.1: passed")

# %% [markdown]
# ## Exercise 1.2: the cached loop, and what it still costs
#
# *20 minutes, medium.*
#
# **Write the greedy decode loop with a cache: run every token exactly once, at its own position.**
#
# Here is the loop without a cache. It is right, and it runs every token again for each new one.

# %% uncached
def generate_uncached(prompt, num_output_tokens):
    token_ids = list(prompt)
    for _ in range(num_output_tokens):
        logits = model(torch.tensor([token_ids])).logits[0]  # [num_tokens, vocab]
        token_ids.append(int(logits[-1].argmax()))
    return token_ids[len(prompt) :]


generate_uncached([72, 105, 33], 4)

# %% [markdown]
# You get a `session`: the same model with a cache of its own, empty at first.
# `session(token_ids, positions)` runs these tokens at these positions, adds their K and V to the
# cache, and returns logits of shape `[len(token_ids), vocab]`. Row i scores what may follow
# `token_ids[i]`; greedy takes the highest. A token's *position* is its index in the sequence: the
# first has 0.
#
# The last output token is returned, but never run: nobody asks what comes after it. So a prompt of
# P tokens and n output tokens need P + n − 1 tokens to be run, in all. No token ends the loop early:
# `num_output_tokens` are asked for, whatever they are.
#
# ```text
# sequence     72  105   33  |  a    b    c        prompt 72 105 33; output a b c
# position      0    1    2     3    4    5
# run in        └─ prefill ─┘   │    │    never    3 + 3 − 1 tokens are run
#                             1st  2nd decode step
# ```
#
# To try your loop: run the next cell, then `generate(Session(), [72, 105, 33], 4)` gives the four
# tokens printed above.
#
# <details><summary>Hint 1: a nudge</summary>
# After the prefill you know one token more than the cache does. Which one, and where does it stand?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Before every call, <code>num_computed_tokens = num_tokens − 1</code>: only the token just sampled
# lacks K and V. So a decode step runs that one token, at position <code>num_tokens − 1</code>.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# logits <- run the prompt at positions 0 .. P-1
# repeat:
#     append the best token of the last row
#     stop when there are enough
#     logits <- run that token at the position where it stands
# ```
# </details>

# %% session jupyter={"source_hidden": true}
@lent
class Session:
    """The model with a cache of its own. It writes down what is run, for the check to read.

    forced: {position: token} makes a token the best one at a position, whatever the model says.
    """

    def __init__(self, limit=1000, forced=()):
        self.cache, self.limit, self.forced = DynamicCache(config=model.config), limit, dict(forced)
        self.token_ids, self.positions, self.calls = [], [], 0  # of all calls, in order
        self.first_rows = {}  # number of tokens run -> best token of the call's first row
        self.last_rows = {}

    def __call__(self, token_ids, positions):
        tokens, at = (
            torch.as_tensor(x if hasattr(x, "__index__") else list(x)).reshape(-1).long()
            for x in (token_ids, positions)
        )
        n, no_token = len(self.token_ids), "There is no token {}: take the argmax of the last row of "
        assert len(tokens), (
            f"The session was called without tokens, after {n} were run. A token just sampled has no K "
            "and V yet: it is the one to run next."
            if n
            else "The session was called without tokens; the prompt's run first."
        )
        assert len(tokens) == len(at), f"{len(tokens)} tokens were run at {len(at)} positions."
        assert 0 <= min(tokens) <= max(tokens) < spec.vocab_size, (
            f"{no_token.format(max(tokens))}the logits, not of all rows."
        )
        self.calls += 1
        self.token_ids += tokens.tolist()
        self.positions += at.tolist()
        assert n + len(tokens) < self.limit, f"{n} tokens were run and the loop goes on: does it ever stop?"
        logits = model(tokens[None], None, at.clamp(0, 2000)[None], self.cache).logits[0]
        for i in range(len(tokens)):
            if n + i in self.forced:
                logits.data[i, self.forced[n + i]] = 1e3
        self.first_rows[n + len(tokens)] = int(logits[0].argmax())
        self.last_rows[n + len(tokens)] = int(logits[-1].argmax())
        return logits

# %% ex-1-2
def generate(session, prompt, num_output_tokens):
    """The greedy output, a list of `num_output_tokens` token ids (at least 1)."""
    ### BEGIN SOLUTION
    logits = session(prompt, range(len(prompt)))
    output = [int(logits[-1].argmax())]
    while len(output) < num_output_tokens:
        num_tokens = len(prompt) + len(output)
        logits = session([output[-1]], [num_tokens - 1])
        output.append(int(logits[-1].argmax()))
    return output
    ### END SOLUTION

# %% cases-1-2 jupyter={"source_hidden": true}
@ours
def greedy(prompt, n, forced=()):
    """n greedy tokens without a cache, those in `forced`, (position, token), put in their places."""
    token_ids, forced = list(prompt), dict(forced)
    while len(token_ids) < len(prompt) + n:
        logits = model(torch.tensor([token_ids])).logits[0]
        token_ids.append(forced.get(len(token_ids) - 1, int(logits[-1].argmax())))
    return token_ids[len(prompt) :]


@ours
def telling_prompt(seed, P):
    """A prompt whose first row, and whose rows together, suggest another token than the last."""
    rng = random.Random(seed)
    while True:
        prompt = [rng.randrange(256) for _ in range(P)]
        logits = model(torch.tensor([prompt])).logits[0]
        first, last = logits[0].argmax(), logits[-1].argmax()
        if P == 1 or (first != last and logits.argmax() >= spec.vocab_size):
            return prompt


@ours
def games_1_2():
    """(prompt, n, forced), small ones first. Forced are tokens at which a loop might stop."""
    sizes = [(2, 1), (3, 2), (2, 4), (1, 3), (9, 5), (24, 40), (140, 3)]
    for seed, (P, n) in enumerate(sizes):
        yield once(telling_prompt, 120 + seed, P), n, ()
    eos, (a, b, c) = model.config.eos_token_id, once(telling_prompt, 130, 3)
    yield [a, b, a, c], 8, ((3, eos), (4, 2), (5, 0), (6, a), (7, eos), (8, 1), (9, 7))
    yield [a, b, c], 4, ((2, c), (3, c), (4, 258))
    yield [a, a], 6, ((1, 0), (2, 256), (3, 10), (4, 46))

# %% judge-1-2 jupyter={"source_hidden": true}
ROW_0 = "The next token was read off row 0; what follows the newest token stands in the last row."


@ours
def said_1_2(known, P, i, session):
    """What the token run at index i, or its position, looks like."""
    ran, at = session.token_ids, session.positions
    token, position = ran[i], at[i]
    if i >= P and ran[i : i + P] == known[:P] and at[i : i + P] == at[:P]:
        return "The prompt was run again, though the cache holds its K and V already."
    if token == known[i] and position == i + 1:
        return (
            f"A position is one too high: of {i + 1} tokens the newest stands at num_tokens - 1, not "
            "at num_tokens."
        )
    if i >= P and token == known[i] and position == i - P:
        return "The positions start over at 0 after the prompt; they count the whole sequence."
    if token == known[i] and position == known.index(token):
        return f"The token {token} stands at two positions; this is the second, {i}."
    if token == known[i]:
        return f"A token ran at position {position}; it stands at {i}."
    if position < i and token == known[position]:
        return "A token was run a second time: the cache now holds its K and V twice."
    if i >= P and token == session.first_rows.get(i):
        return ROW_0
    if i >= P and session.forced.get(i - 1) == known[i]:
        return (
            f"The best token of the session's last row was {known[i]} (the check sees to "
            f"that), and {token} was run. Did something else choose it, or a part of the row?"
        )
    if i == P - 1 and token == session.last_rows.get(i):
        return "The prompt's last token was not run; what follows it was read off the token before."
    if i < P and token in known[:P] and position == known.index(token):
        return "Tokens of the prompt were left out; each of them needs its K and V in the cache."
    return f"The token at index {i} of the sequence was not run as it should be."

# %% judge-1-2-b jupyter={"source_hidden": true}
@ours
def judge_run(known, P, session, case):
    """Says what is wrong with the tokens that a loop ran; known: prompt and output."""
    ran, at, needed = session.token_ids, session.positions, len(known) - 1
    assert ran, (
        "The session was never called; running on its cache is what this loop is about."
        f"\n{case}"
    )
    for i, (token, position) in enumerate(zip(ran, at, strict=True)):
        assert (i, token, position) != (needed, known[-1], i), (
            "One forward pass too many: the last output token was run too, and nobody "
            f"asks what follows it.\n{case} {len(ran)} tokens were run, {needed} are needed."
        )
        if i >= needed or (token, position) != (known[i], i):
            said = said_1_2(known, P, min(i, needed), session)
            start = max(0, i - 9)
            raise AssertionError("\n".join((
                said, case, f"From index {start} on:",
                f"  run so far    {ran[start : i + 1]}",
                f"  at positions  {at[start : i + 1]}",
                f"  should be     {known[start : i + 1]}",
                f"  at positions  {[*range(start, min(i + 1, len(known)))]}",
            )))  # fmt: skip

# %% judge-1-2-c jupyter={"source_hidden": true}
@ours
def judge_loop(prompt, wanted, got, session, before):
    """Says how a loop went wrong; before: what its last call returned."""
    known, P, n = prompt + wanted, len(prompt), len(wanted)
    case = f"Prompt {prompt}, output tokens: {n}."
    judge_run(known, P, session, case)
    said = f"{case} You returned {got}; the session's best tokens are {wanted}."
    assert got != known, (
        f"The prompt itself was returned as well; only its output counts.\n{said}"
    )
    early = got == wanted[: len(got)] and session.calls == len(got) < n
    assert not early, f"The loop stopped early: {len(got)} of {n} tokens.\n{said}"
    ran = len(session.token_ids)
    left_out = ran == P - 1 and got[:1] == [session.last_rows.get(P - 1)]
    assert not left_out, f"The prompt's last token was not run.\n{said}"
    assert not before or got == wanted or got[: len(before)] != before, (
        "The output begins with that of the call before. Does a list live on between calls, "
        f"as one does that is a parameter's default?\n{said}"
    )
    assert len(got) == n, f"Output tokens returned: {len(got)}; {n} asked for.\n{said}"
    assert max(got) < spec.vocab_size, (
        f"There is no token {max(got)}: take the argmax of the last row, not of all rows."
        f"\n{said}"
    )
    assert got[0] != session.first_rows.get(P) or got == wanted, f"{ROW_0}\n{said}"
    assert got == wanted, f"The tokens run are right, those returned are not.\n{said}"
    assert session.calls >= n, (
        "Each output token needs a call of its own, whose logits choose it. Calls of the "
        f"session: {session.calls}. Did a loop without a cache choose?\n{case}"
    )

# %% check-1-2
@check
def exercise_1_2(generate):
    got = []
    for prompt, n, forced in games_1_2():
        P = len(prompt)
        session = Session(limit=10 + (P + n) ** 2, forced=forced)
        wanted = once(greedy, prompt, n, forced)
        asked = f"Prompt {prompt}, output tokens: {n}."
        value = ask(generate, session, list(prompt), n, asked=asked)
        said = f"generate must return a list of token ids, not {value!r:.80}"
        assert isinstance(value, list | tuple), said
        before, got = got, []
        for x in value:
            got.append(x[0] if isinstance(x, list) and len(x) == 1 else x)
        assert all(isinstance(x, int | float) and x == int(x) for x in got), said
        judge_loop(prompt, wanted, got, session, before)
        without = sum(range(P, P + n))
        print(f"{P:3} prompt, {n:2} output: {len(session.token_ids):3} tokens run, "
              f"{without:3} without a cache; ends in {got[-1]:.0f}")  # fmt: skip
    print("Exercise 1.2, first part: passed")

# %% [markdown]
# **Second part: what does a decode step still read?** A query is compared with every K in the
# cache, its own included, and takes a weighted sum of as many V. So one decode step reads the K
# and V of every token that the cache holds at its end.
#
# **Count the K and V that the decode steps of one answer read, all steps together** (in tokens, for
# one layer). The prefill is not counted. In the picture above, with its prompt of 3 and output of
# 3, there are two decode steps.
#
# <details><summary>Hint 1: a nudge</summary>
# For that picture: how many tokens does the cache hold at the end of each of the two steps?
# </details>
# <details><summary>Hint 2: the rule</summary>
# The first output token comes out of the prefill. Every decode step adds one token to the cache,
# then reads them all.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# total <- 0
# for each output token but the first:
#     one more token is in the cache
#     total <- total + tokens in the cache
# ```
# </details>

# %% ex-1-2-b
def tokens_read(num_prompt_tokens, num_output_tokens):
    """Tokens whose K and V all decode steps of one answer read, with repetition."""
    ### BEGIN SOLUTION
    num_steps = num_output_tokens - 1
    return num_steps * num_prompt_tokens + num_steps * (num_steps + 1) // 2
    ### END SOLUTION

# %% [markdown]
# The check counts for itself: it runs a loop and asks the cache for its length after each step.

# %% cases-1-2-b jupyter={"source_hidden": true}
@ours
def count_reads(P, n):
    """Runs a prefill and n - 1 decode steps; what each step read, from the cache itself."""
    cache, reads = DynamicCache(config=model.config), []
    model(torch.ones(1, P, dtype=torch.long), None, None, cache)
    for _ in range(n - 1):
        at = torch.tensor([[cache.get_seq_length()]])
        model(torch.tensor([[1]]), None, at, cache)
        reads.append(cache.get_seq_length())
    return reads


@ours
def slips_1_2(P, n, reads):
    """The usual slips, each with its answer."""
    total, ends = sum(reads), (reads or [0])[-1]
    o1 = "as if a cache made decoding O(1). It saves computing K and V again, not reading them."
    return {
        f"That is one read per step, {o1}": len(reads),
        f"That is one read per output token, {o1}": n,
        "The cache grows: output tokens are read as well as the prompt's.": len(reads) * P,
        "A step reads more than the prompt, and the first output token needs no step.": n * P,
        "The prompt's K and V are read as well, in every step.": total - len(reads) * P,
        "A step too many: the first output token comes out of the prefill.": total + P + n,
        "A new token reads its own K and V, too: they are written first.": total - len(reads),
        "That is the prompt's length too much: the prefill was counted, or a step that reads the "
        "prompt alone. The first decode step reads its own token as well.": total + P,
        "The prefill (each token up to itself) is not counted here.": total + P * (P + 1) // 2,
        "That is what the last step reads; all steps together are asked for.": ends,
        "K and V of one token are one token, not two.": 2 * total,
        "Tokens read are asked for, not tokens run.": P + n - 1,
        "One layer is asked for; all layers of this model were counted.": spec.num_layers * total,
        "One layer is asked for; all layers of SmolLM2 were counted.": 30 * total,
    }

# %% check-1-2-b
@check
def exercise_1_2_b(tokens_read):
    cases = []
    shapes = [(3, 1), (1, 2), (3, 3), (5, 4), (2, 9), (11, 6), (40, 17), (60, 129)]
    for P, n in [*shapes, (700, 40)]:
        reads = once(count_reads, P, n)
        few = ", ".join(map(str, reads))
        if n >= 10:
            few = f"{reads[0]}, {reads[1]}, ... {reads[-1]}"
        asked = f"Prompt tokens: {P}; output tokens: {n}. The decode steps read [{few}]."
        value = ask(tokens_read, P, n, asked=asked)
        got = numbers(value, ["tokens"], "tokens_read")["tokens"]
        cases.append((asked, got, sum(reads), slips_1_2(P, n, reads)))
    explain(cases)
    print(*(f"{got:.0f}" for _, got, _, _ in cases))
    print("Exercise 1.2, second part: passed")

# %% [markdown]
# ## Exercise 1.3: where a chunk stands, and what it may see
#
# *12 minutes, medium.*
#
# **A sequence has `num_computed_tokens` tokens in the cache. Its next `num_new_tokens` run in one
# forward pass. Say at which positions they stand, and which keys each of them may see.**
#
# A long prompt is often cut into such chunks. A decode step is the same thing with one new token,
# a whole prefill the same thing with an empty cache.
#
# The mask has a row for each new token (it asks) and a column for every key there is once the chunk
# is written: first those in the cache, then the chunk's own. `True` means "may see". A token may see
# itself and all that stand before it in the sequence.
#
# The commonest wrong mask raises no error, and its text still reads like text. SmolLM2 was given
# "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is", its last
# four tokens as one chunk on a cache that held the other 15. It went on:
#
# ```text
# right mask   Madrid.
# wrong mask   not a country. The capital of the United States is New York City. The
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# Draw the square of a whole prompt without a cache: who sees whom? Then cover the rows of the
# tokens that have been computed already.
# </details>
# <details><summary>Hint 2: the rule</summary>
# Query and key are compared by their positions in the sequence, not by their indices in the chunk.
# The query in row i stands at position <code>num_computed_tokens + i</code>; the key in column j
# stands at position j.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# positions <- num_new_tokens numbers, counted from num_computed_tokens
# keys      <- 0 .. all tokens - 1
# mask[i, j] is True where keys[j] is not after positions[i]
# ```
# </details>

# %% ex-1-3
def chunk_inputs(num_computed_tokens, num_new_tokens):
    """positions: [num_new_tokens], int.

    mask: [num_new_tokens, num_computed_tokens + num_new_tokens], bool, True where a new
    token (row) may see a key (column). Returns (positions, mask), two tensors.
    """
    ### BEGIN SOLUTION
    num_tokens = num_computed_tokens + num_new_tokens
    positions = torch.arange(num_computed_tokens, num_tokens)
    mask = torch.arange(num_tokens) <= positions[:, None]
    return positions, mask
    ### END SOLUTION

# %% [markdown]
# What is right is found by experiment: in a whole run without a cache, PyTorch says on which tokens
# each row of the logits depends. Those it has seen.

# %% cases-1-3 jupyter={"source_hidden": true}
@ours
def who_sees_whom(num_tokens, rows):
    """[num_tokens, num_tokens] bool: does row i of the logits depend on token j? Other rows: False."""
    token_ids = torch.arange(num_tokens) * 7 % 251
    embedded = model.get_input_embeddings()(token_ids[None]).detach().requires_grad_()
    with torch.enable_grad():
        logits = model(inputs_embeds=embedded).logits[0]
    seen = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for i in rows:
        (moved,) = torch.autograd.grad(logits[i].square().sum(), embedded, retain_graph=True)
        seen[i] = moved[0].abs().amax(-1) > 0
    return seen


@ours
def rows_kept(token_ids, c, mask):
    """Rows of a chunk after c tokens whose best next token is that of a run without a cache."""
    cache, ids = DynamicCache(config=model.config), torch.tensor([token_ids])
    model(ids[:, :c], None, None, cache)
    at = torch.arange(c, len(token_ids))[None]
    logits = model(ids[:, c:], mask[None, None], at, cache).logits[0]
    return int((logits.argmax(-1) == model(ids).logits[0, c:].argmax(-1)).sum())


@ours
def shapes_1_3():
    """(computed, new), small ones first; the last are large."""
    rng = random.Random(13)
    shapes = [(1, 1), (0, 1), (1, 2), (0, 3), (2, 2), (4, 1), (3, 4), (2, 9)]
    shapes += [(rng.randint(1, 6), rng.randint(2, 5)) for _ in range(4)]
    return [*shapes, *LARGE, (33, 1), (50, 40), (130, 3), (300, 2), (299, 1)]


@ours
def empty_mask(c, new):
    """The commonest wrong one."""
    return torch.ones(new, c + new, dtype=torch.bool).tril()


LARGE = [(8, 8), (40, 12), (5, 24)]

# %% form-1-3 jupyter={"source_hidden": true}
@ours
def require_chunk(result, c, new):
    """(positions as a list, mask) if their types and shapes are right, for c computed tokens."""
    asked = f"Computed: {c}; new: {new}."
    try:
        positions, mask = (torch.as_tensor(part) for part in tuple(result))
    except (TypeError, ValueError, RuntimeError):
        said = f"chunk_inputs must return (positions, mask), two tensors, not {result!r:.80}"
        raise AssertionError(said) from None
    assert mask.ndim == 2 or positions.ndim != 2, "Return positions first, then the mask."
    assert mask.dtype == torch.bool, (
        f"The mask must hold True and False, yours is {mask.dtype}; numbers would be added to the "
        "attention scores."
    )
    shape, wanted, all_tokens = tuple(mask.shape), (new, c + new), c + new
    said = "The mask has another shape."
    if shape == (new, new):
        said = "The mask has no columns for the keys that are in the cache."
    elif shape == (all_tokens, all_tokens):
        said = "Only new tokens ask: the computed ones have no rows."
    elif shape == (all_tokens, new):
        said = "Rows are the new tokens (they ask), columns the keys; here it is the other way round."
    assert shape == wanted, f"{said}\n{asked} Mask {shape}, should be {wanted}."
    dtype, positions = positions.dtype, positions.reshape(-1).tolist()
    assert len(positions) == new, (
        f"One position per new token, please.\n{asked} You returned {positions}."
    )
    whole = all(isinstance(p, int) and not isinstance(p, bool) for p in positions)
    assert whole, f"Positions are whole numbers, of an integer type.\n{asked} Yours: {positions}."
    most = torch.iinfo(dtype).max
    assert most >= all_tokens - 1, (
        f"{dtype} holds no number over {most}.\n{asked} Positions {positions}"
    )
    return positions, mask

# %% picture-1-3 jupyter={"source_hidden": true}
@ours
def picture(c, mask, wanted):
    """The two masks side by side; # may be seen, . may not. Of a large one the first wrong row."""
    new, total = mask.shape
    if total > 16:
        i = int((mask != wanted).any(1).nonzero()[0])
        wrong = (mask[i] != wanted[i]).nonzero().flatten().tolist()
        which = f"key {wrong[0]}"
        if len(wrong) > 1:
            which = f"{len(wrong)} keys, {wrong[0]} to {wrong[-1]}"
        sees, should = ("does not see", "should") if wanted[i, wrong[0]] else ("sees", "should not")
        return f"The token at position {c + i} {sees} {which}, and {should}."
    width = max(2 * total - 1, len("yours")) + 4
    lines = [f"{'':12}{'yours':{width}}should be"]
    for i in range(new):
        yours, right = (" ".join(".#"[int(x)] for x in m[i]) for m in (mask, wanted))
        lines.append(f"position {c + i:<3}{yours:{width}}{right}")
    return "\n".join(lines)


@ours
def wrong_positions(c, new):
    return {
        "Positions are one too high: the newest of num_tokens tokens stands at num_tokens - 1.":
            [c + 1 + i for i in range(new)],
        "Positions start over at 0 in the chunk; they count the whole sequence.": [*range(new)],
        "All positions are the same; every new token has its own.": [c] * new,
        "The positions are in reverse order.": [*range(c, c + new)][::-1],
    }  # fmt: skip

# %% masks-1-3 jupyter={"source_hidden": true}
@ours
def wrong_masks(c, new, square):
    """The usual wrong masks, from the right one; square: who sees whom, without a cache."""
    right, total = square[c:], c + new
    later = torch.cat([square[c + 1 :], torch.ones(1, total, dtype=torch.bool)])
    nothing = torch.zeros(1, total, dtype=torch.bool)
    in_cache = (torch.arange(total) < c).expand(new, total)
    return {
        "The mask is drawn as if the cache were empty: the first new token stands at position "
        "num_computed_tokens, and sees as far.": square[:new],
        "Every new token sees all others of the chunk, also those that come after it.":
            torch.ones_like(right),
        "A token must see itself: its own K is written before anyone reads.":
            torch.cat([nothing, square])[c : c + new],
        "Every token sees one key too far, the one of the token after it.": later,
        "True and False are the wrong way round: True means may see.": ~right,
        "The new tokens do not see what is in the cache.": right & ~in_cache,
        "The new tokens see the cache, but not each other.": right & in_cache,
        "The triangle is turned over: a token sees itself and those that come later.":
            ~torch.cat([nothing, square])[c : c + new],
    }  # fmt: skip

# %% judge-1-3 jupyter={"source_hidden": true}
@ours
def judge_chunks(answers):
    """answers: [(computed, new, positions, mask)], smallest first; names what all of them show."""
    squares, shapes = {}, [answer[:2] for answer in answers]
    for c, new in shapes:  # of a large square only those rows that anything below needs
        total, rows = c + new, [*range(new), *range(max(c - 1, 0), c + new)]
        rows = [*range(total)] if total < 60 else rows
        squares[c, new] = once(who_sees_whom, total, rows)
    for c, new, got, _ in answers:
        wanted = [*range(c, c + new)]
        if got != wanted:
            named = [slip for slip in wrong_positions(0, 0)
                     if all(wrong_positions(a[0], a[1])[slip] == a[2] for a in answers)]  # fmt: skip
            said = "\nOr: ".join(named) or "The positions are wrong."
            asked = f"Computed: {c}; new: {new}."
            raise AssertionError(f"{said}\n{asked} Positions {got}, should be {wanted}")
    for c, new, _, mask in answers:
        wanted = squares[c, new][c:]
        if torch.equal(mask, wanted):
            continue
        found = [wrong_masks(*shape, squares[shape]) for shape in shapes]
        named = [slip for slip in found[0]
                 if all(torch.equal(a[3], masks[slip])
                        for a, masks in zip(answers, found, strict=True))]  # fmt: skip
        said = "\nOr: ".join(named) or "The mask is wrong."
        seen = picture(c, mask, wanted)
        raise AssertionError(f"{said}\nComputed: {c}; new: {new}.\n{seen}")

# %% check-1-3
@check
def exercise_1_3(chunk_inputs):
    answers = []
    for c, new in shapes_1_3():
        asked = f"Computed: {c}; new: {new}."
        value = ask(chunk_inputs, c, new, asked=asked, raw=True)
        answers.append((c, new, *require_chunk(value, c, new)))
    judge_chunks(answers)
    rng = random.Random(14)
    for c, new, _, mask in answers:
        if (c, new) in LARGE:
            token_ids = [rng.randrange(256) for _ in range(c + new)]
            masks = mask, empty_mask(c, new)
            right, wrong = (rows_kept(token_ids, c, each) for each in masks)
            print(f"{c:2} computed, {new:2} new: {right:2} rows as without a cache; "
                  f"with the wrong mask {wrong}")  # fmt: skip
    print("Exercise 1.3: passed")

# %% fluent-nonsense tags=["solution", "nbval-ignore-output"]
def continue_chunked(text, num_new, with_mask, num_output=18):
    """What SmolLM2 says after `text`, whose last num_new tokens run as one chunk."""
    llm, tokenizer, _ = load("smollm2", dtype="float32", device="cpu")
    ids = tokenizer(text, return_tensors="pt").input_ids
    c, cache = ids.shape[1] - num_new, DynamicCache(config=llm.config)
    llm(ids[:, :c], None, None, cache)
    positions, mask = chunk_inputs(c, num_new)
    mask = mask if with_mask == "right" else torch.ones_like(mask).tril()
    logits = llm(ids[:, c:], mask[None, None], positions[None], cache).logits[0]
    output = [int(logits[-1].argmax())]
    while len(output) < num_output:
        at = torch.tensor([[ids.shape[1] + len(output) - 1]])
        logits = llm(torch.tensor([output[-1:]]), None, at, cache).logits[0]
        output.append(int(logits[-1].argmax()))
    return tokenizer.decode(output)


text = "The capital of France is Paris. The capital of Italy is Rome. "
text += "The capital of Spain is"
for name in ("right", "wrong"):
    print(name, repr(continue_chunked(text, 4, name)))

# %% [markdown]
# ## Exercise 1.4: write into the slab
#
# *12 minutes, medium.*
#
# **Write the K and V of the next tokens into a preallocated slab: into their own slots, and
# nowhere else.**
#
# A *slab* is one tensor with room for a whole sequence, made once. `slab[0, h, p]` holds the K of kv
# head h of the token at position p, `slab[1, h, p]` its V. The first `num_computed_tokens` slots of
# each head are in use; the others hold whatever was there before.
#
# ```text
# one head of the slab, 6 slots, 3 tokens computed        after writing 2 more
# slot    0    1    2    3    4    5                      0    1    2    3    4    5
#        K0   K1   K2   --   --   --                     K0   K1   K2   K3   K4   --
# ```
#
# The layer hands you `k` and `v` as it computes them, one token after the other:
# `[num_new_tokens, num_kv_heads, head_dim]`. The slab is
# `[2, num_kv_heads, num_slots, head_dim]`, as the engine's own pool has it. Look at the order.
#
# What does not fit is refused *by name*, before anything is written: raise
# `OutOfKVMemory(message)`, with a message that says how many slots are needed and how many there are,
# in this order.
#
# <details><summary>Hint 1: a nudge</summary>
# Which slots are free, and which of them is the first? Then: which dimension of <code>k</code> has
# to become which dimension of the slab?
# </details>
# <details><summary>Hint 2: the rule</summary>
# The token at position p lives in slot p. New tokens stand at positions
# <code>num_computed_tokens</code> and after. A <code>reshape</code> keeps numbers in their order and
# only renames the dimensions; to exchange two dimensions, <code>transpose</code> them.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# end <- computed + new
# more than the slab has slots?  raise, naming both numbers
# slab[K, all heads, computed .. end] <- k with its first two dimensions exchanged
# the same for V
# return end
# ```
# </details>

# %% ex-1-4
def write_kv(slab, num_computed_tokens, k, v):
    """Writes k and v into the slab, in place. Returns the new num_computed_tokens.

    slab: [2, num_kv_heads, num_slots, head_dim]
    k, v: [num_new_tokens, num_kv_heads, head_dim]
    Raises OutOfKVMemory, with the slab untouched, if they do not fit.
    """
    ### BEGIN SOLUTION
    end, num_slots = num_computed_tokens + len(k), slab.shape[2]
    if end > num_slots:
        raise OutOfKVMemory(f"{end} slots are needed, but the slab has {num_slots}")
    slab[0, :, num_computed_tokens:end] = k.transpose(0, 1)
    slab[1, :, num_computed_tokens:end] = v.transpose(0, 1)
    return end
    ### END SOLUTION

# %% cases-1-4 jupyter={"source_hidden": true}
@ours
def rows_of(first, new, heads, dim):
    """k and v of the tokens from `first` on: noise, so that no two rows are alike."""
    noise = torch.rand(2, 160, 4, 8, generator=torch.Generator().manual_seed(99))
    k, v = noise[:, first : first + new, :heads, :dim].clone()
    return k, v


@ours
def read_slab(slab, empty):
    """{(kind, head, slot): 'K2' of head 0, 'K2/1' of head 1, ...}; '--' as before, '??' no row."""
    _, heads, slots, dim = slab.shape
    names = {}
    for kind, rows in zip("KV", rows_of(0, slots + 4, heads, dim).__iter__(), strict=True):
        for token, by_head in enumerate(rows.tolist()):
            for h, row in enumerate(by_head):
                names[tuple(row)] = f"{kind}{token}" + (f"/{h}" if h else "")
    found, values, before = {}, slab.tolist(), empty.tolist()
    for i in range(2):
        for h in range(heads):
            for p in range(slots):
                row = values[i][h][p]
                found[i, h, p] = names.get(tuple(row), "??") if row != before[i][h][p] else "--"
    return found


@ours
def placed(before, start, new, heads, which):
    """`before` with rows written from slot `start` on; which(i, h, k): (kind, token, head) of the
    k-th, or None."""
    slots, after = max(p for _, _, p in before) + 1, dict(before)
    for i, h, p in before:
        row = which(i, h, p - start) if start <= p < min(start + new, slots) else None
        if row:
            kind, token, head = row
            after[i, h, p] = f"{kind}{token}" + (f"/{head}" if head else "")
    return after

# %% slips-1-4 jupyter={"source_hidden": true}
@ours
def slips_1_4(before, c, new, heads):
    """{what to say: the slab that it leaves}; the right one under an empty text."""
    def put(start, kinds="KV", order=lambda k, h: (k, h)):
        def which(i, h, k):
            token, head = order(k, h)
            return None if kinds[i] == "-" else (kinds[i], c + token, head)
        return placed(before, start, new, heads, which)  # fmt: skip

    return {
        "": put(c),
        "The slab that was passed in did not change. Assign to a slice of it; neither a new tensor "
        "nor an empty slice reaches it.": before,
        f"One slot too far: the new tokens start at position {c}; a slot was left empty.": put(c + 1),
        "One slot too early: the last token computed was written over.":
            put(max(0, c - 1)),
        "The first slots were written over; new tokens go behind those computed.": put(0),
        "K and V are in each other's place.": put(c, "VK"),
        "Only K was written; V has its half of the slab.": put(c, "K-"),
        "Only V was written; K has its half of the slab.": put(c, "-V"),
        "K was written into both halves.": put(c, "KK"),
        "The new tokens are in reverse order.": put(c, order=lambda k, h: (new - 1 - k, h)),
        "The heads are in reverse order.": put(c, order=lambda k, h: (k, heads - 1 - h)),
        "Tokens and heads are mixed up: reshape only renames dimensions, transpose exchanges them.":
            put(c, order=lambda k, h: divmod(h * new + k, heads)),
    }  # fmt: skip


@ours
def draw(found, wanted):
    """A row for each head, found above wanted; at most ten slots, around the first that differs."""
    first = min(p for (i, h, p) in found if found[i, h, p] != wanted[i, h, p])
    shown, lines = range(max(0, first - 4), first + 6), []
    for i, h in sorted({key[:2] for key in found}):
        for name, slots in (("found", found), ("should be", wanted)):
            row = "".join(f"{slots[i, h, p]:6}" for p in shown if (i, h, p) in slots)
            lines.append(f"{'KV'[i]}, head {h}  {name:11}{row}")
    return "\n".join([f"From slot {shown[0]} on:", *lines])

# %% judge-1-4 jupyter={"source_hidden": true}
@ours
def judge_write(before, found, c, new, heads):
    """Compares the slab with what it should hold after `new` tokens were written behind c others."""
    slips = slips_1_4(before, c, new, heads)
    wanted = slips.pop("")
    if found == wanted:
        return
    named = [slip for slip, slab in slips.items() if slab == found]
    said = "The slab does not hold what it should."
    inside = [key for key in found if c <= key[2] < c + new]
    if named:
        said = "\nOr: ".join(named[:2])
    elif any(found[key] != before[key] for key in found.keys() - set(inside)):
        said = f"Slots outside {c} to {c + new - 1} have changed; they belong to others."
    elif sorted(found[key] for key in inside) == sorted(wanted[key] for key in inside):
        said = "The new rows are all there, but not in their places."
    raise AssertionError(f"{said}\nComputed: {c}; new: {new}.\n{draw(found, wanted)}")


@ours
def what_ended(error, slab, k, case):
    """The message for an error of PyTorch's, or any other."""
    if isinstance(error, RuntimeError | IndexError):
        return (
            f"PyTorch refused: {error}\nCompare the order of dimensions: slab[0] is "
            f"{list(slab[0].shape)} (heads, slots, head_dim), k is {list(k.shape)} (tokens, heads, "
            f"head_dim). {case}"
        )
    return told("write_kv", error, case)

# %% judge-1-4-b jupyter={"source_hidden": true}
@ours
def try_write(write_kv, slab, empty, c, new):
    """One write that fits, judged; returns the new count."""
    _, heads, slots, dim = slab.shape
    k, v = rows_of(c, new, heads, dim)
    before, memory = read_slab(slab, empty), slab.data_ptr()
    case = f"Slots: {slots}; computed: {c}; new: {new}."
    try:
        got = bounded(write_kv, slab, c, k, v)
    except NotImplementedError:  # not yet written
        raise
    except OutOfKVMemory as error:
        numbers_in_it = set(map(int, re.findall(r"\d+", str(error))))
        full = ": a slab may be exactly full" if c + new == slots else ""
        if heads in numbers_in_it and slots not in numbers_in_it:
            full = f": the slab's dimension 1 are its heads ({heads}), its dimension 2 the slots"
        raise AssertionError(f"Refused, though it fits{full}. {case}") from None
    except (Exception, Endless, Delegated) as error:
        raise AssertionError(what_ended(error, slab, k, case)) from None
    kept = all(torch.equal(a, b) for a, b in zip((k, v), rows_of(c, new, heads, dim), strict=True))
    assert kept, f"k or v was changed; they are only to be read. {case}"
    assert slab.data_ptr() == memory and list(slab.shape) == [2, heads, slots, dim], (
        "The slab was given other memory, and whoever else holds a view of the old one won't see "
        f"what is written: assign to a slice of it. {case}"
    )
    judge_write(before, read_slab(slab, empty), c, new, heads)
    assert got is not None, f"write_kv returned None: is its `return` missing? {case}"
    assert numbers(got, ["tokens"], "write_kv")["tokens"] == c + new, (
        f"write_kv returned {got}, but now {c + new} tokens have K and V. {case}"
    )
    return c + new

# %% judge-1-4-c jupyter={"source_hidden": true}
@ours
def try_overflow(write_kv, slab, c, new):
    """One write that does not fit: it must be refused by name, with the slab untouched."""
    _, heads, slots, dim = slab.shape
    before, case = slab.clone(), f"Slots: {slots}; computed: {c}; new: {new}."
    try:
        bounded(write_kv, slab, c, *rows_of(c, new, heads, dim))
    except OutOfKVMemory as error:
        found = list(map(int, re.findall(r"\d+", str(error))))
    except NotImplementedError:
        raise
    except (Exception, Endless, Delegated) as error:
        other = told("write_kv", error)
        if isinstance(error, AssertionError):
            other = f"This was AssertionError: {error}"
        raise AssertionError(f"Refuse by name, with OutOfKVMemory. {case}\n{other}") from None
    else:
        raise AssertionError(f"What does not fit was taken without a word. {case}")
    assert torch.equal(slab, before), f"Refused too late: a part had been written. {case}"
    pairs = list(combinations(found, 2))  # in the order of the message
    needed, there = f"the slots needed ({c + new})", f"those there are ({slots})"
    if (c + new, slots) not in pairs and (new, slots - c) not in pairs:
        said = f"The message must name {needed} and then {there}."
        if (slots, c + new) in pairs:
            said = f"The message names the two numbers in the wrong order: first {needed}, then {there}."
        raise AssertionError(f"{said} {case}\nIt holds: {found}")


@ours
def runs_1_4():
    """(heads, head_dim, chunks that fill a slab), small ones first."""
    rng = random.Random(14)
    yield from [(1, 2, [2, 1, 1]), (2, 2, [3, 1]), (2, 3, [2, 1, 1])]
    for size in range(3, 7):
        chunks = [rng.randint(1, size) for _ in range(size)]
        yield rng.randint(2, 4), rng.randint(1, 6), chunks
    yield 3, 3, [3, 3]
    yield 2, 2, [130, 3, 1]

# %% check-1-4
@check
def exercise_1_4(write_kv):
    for heads, dim, chunks in runs_1_4():
        slots = sum(chunks)
        generator = torch.Generator().manual_seed(slots)
        empty = torch.rand(2, heads, slots, dim, generator=generator)
        slab, computed = empty.clone(), 0
        for new in chunks:
            if new > 1:
                full = slab[:, :, : computed + new - 1].clone()
                try_overflow(write_kv, full, computed, new)
            computed = try_write(write_kv, slab, empty, computed, new)
        for new in (1, 5):
            try_overflow(write_kv, slab, computed, new)
        print(f"{heads} heads, chunks {chunks}: slots {computed}, "
              f"sum of K {slab[0].double().sum():.1f}")  # fmt: skip
    print("Exercise 1.4: passed")

# %% [markdown]
# ## Exercise 1.5: when does computing take longer than reading?
#
# *12 minutes, medium.*
#
# **From a machine's two speeds, compute the number of rows at which a linear layer turns
# compute-bound.**
#
# `peak_flops` is how many floating-point operations it does per second (FLOP/s), `bandwidth` how
# many bytes per second it reads from memory. A linear layer multiplies each *row* (the vector of one
# token) by its weight matrix: for every weight, one multiplication and one addition, which are two
# operations. The weights are read once for all rows, `bytes_per_value` bytes each. The rows
# themselves are few beside the weights; leave them out.
#
# With few rows reading takes longer: the layer is *memory-bound*, and one more row costs next to
# nothing. With many, computing takes longer: it is *compute-bound*. Return the smallest whole number
# of rows at which computing takes at least as long as reading.
#
# ```text
# time
#  |                    . computing: grows with every row
#  |                .
#  |--------------x-------- reading the weights: the same for any number of rows
#  |          .
#  |      .
#  +--------------|-------- rows
#        memory   compute
# ```
#
# <details><summary>Hint 1: a nudge</summary>
# Take a matrix of a million weights. How long does it take to read? How long to compute one row?
# </details>
# <details><summary>Hint 2: the rule</summary>
# They meet where FLOP / <code>peak_flops</code> = bytes / <code>bandwidth</code>. Both sides hold
# the number of weights, so it drops out.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# seconds to read, per weight              <- bytes of a weight / bandwidth
# seconds to compute, per weight and row   <- operations / peak
# rows                                     <- the one over the other, rounded up
# ```
# </details>

# %% ex-1-5
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    """The smallest whole number of rows at which computing takes as long as reading."""
    ### BEGIN SOLUTION
    seconds_to_read = bytes_per_value / bandwidth  # per weight
    seconds_per_row = 2 / peak_flops  # per weight: a multiplication and an addition
    return math.ceil(seconds_to_read / seconds_per_row)
    ### END SOLUTION

# %% [markdown]
# The check lets PyTorch count the operations of real layers, and their weights' bytes.

# %% cases-1-5 jupyter={"source_hidden": true}
@ours
def counted_rows(peak_flops, bandwidth, bytes_per_value, in_features, out_features):
    """Where the two times of such a layer meet, by PyTorch's own count of operations."""
    x = torch.empty(1, in_features, device="meta")
    weight = torch.empty(out_features, in_features, device="meta")
    with FlopCounterMode(display=False) as counter:
        linear(x, weight)
    num_bytes = weight.numel() * bytes_per_value
    return (num_bytes / bandwidth) / (counter.get_total_flops() / peak_flops)


@ours
def slips_1_5(wanted, peak_flops, bandwidth, size):
    """The usual slips, each with its answer."""
    flat = peak_flops / bandwidth
    wider = "Wider weights take longer to read, so they need more rows, not fewer."
    bits = "bytes_per_value is in bytes; it was taken for bits, or turned into them."
    one_width = "That ignores bytes_per_value, and is right for one width only: for "
    return {
        "A multiplication and an addition are two operations; one was counted.": 2 * wanted,
        bits: 8 * wanted, bits + " ": wanted / 8,
        one_width + "2 bytes.": flat, one_width + "1 byte.": flat / 2,
        wider: flat / size / 2, wider + " ": flat / size, wider + "  ": 2 * flat / size,
        "Hardly a row: is a quotient upside down, or a unit lost?": 1 / wanted,
    }  # fmt: skip

# %% machines-1-5 jupyter={"source_hidden": true}
@ours
def machines_1_5():
    """(peak_flops, bandwidth, bytes_per_value), smallest answers first, then the GPUs."""
    rng = random.Random(15)
    # The two times are equal at a whole number of rows, exactly so in any order of calculation.
    drawn = [(2.0**46, 2.0**40, 2), (2.0**45, 2.0**41, 4), (2e11, 4e11, 2), (3e12, 1e11, 1)]
    drawn += [
        (rng.randint(60, 2000) * 1e12, rng.randint(400, 8000) * 1e9, n) for n in (2, 4, 1, 1, 4)
    ]
    yield from sorted(drawn, key=lambda machine: machine[0] / machine[1] * machine[2])
    for name in GPU_NAMES:
        for size in (2, 1):
            yield GPUS[name].bf16_flops, GPUS[name].bandwidth, size


GPU_NAMES = ("RTX 4090", "A100 40GB SXM", "A100 80GB SXM", "H100 SXM")

# %% check-1-5
@check
def exercise_1_5(rows_to_compute_bound):
    rng, cases = random.Random(16), []
    for peak, bandwidth, size in machines_1_5():
        asked = f"{peak / 1e12:g} TFLOP/s, {bandwidth / 1e9:g} GB/s, "
        asked += f"{size} byte{'s' * (size > 1)} per value:"
        value = ask(rows_to_compute_bound, peak, bandwidth, size, asked=asked)
        got = numbers(value, ["rows"], "rows_to_compute_bound")["rows"]
        meet = counted_rows(peak, bandwidth, size, rng.randint(8, 99), rng.randint(8, 99))
        wanted = math.ceil(meet - 1e-9)
        cases.append((asked, got, wanted, slips_1_5(meet, peak, bandwidth, size)))
    explain(cases, alike=lambda got, other: abs(got - other) < 1.000001)
    for asked, got, wanted, _ in cases:
        said = f"Rows are whole: round up.\n{asked} you returned {got:.3f}"
        assert got == round(got), said
        assert got >= wanted, (
            f"One row short: with {got:.0f} rows reading still takes longer.\n{asked}"
        )
        assert got <= wanted, f"One row too many: {wanted} rows are enough.\n{asked}"
    for name, full, half in zip(GPU_NAMES, cases[-8::2], cases[-7::2], strict=True):
        print(f"{name:13}  {full[1]:.0f} rows; "
              f"with weights stored in one byte {half[1]:.0f}")  # fmt: skip
    print("Exercise 1.5, first part: passed")

# %% [markdown]
# **Second part: and attention?** A decode step has one new token in each of `num_seqs` sequences.
# Each sequence has `num_tokens` tokens in its cache, the new one included. In one layer, every query
# head multiplies its query (`head_dim` numbers) with each K, then adds up as many V, weighted. K and
# V are read once; the query heads of one group share that reading.
#
# **How many floating-point operations does a decode step's attention do per byte of K and V that it
# reads?** This is its *arithmetic intensity*. (Count the two products; leave out the softmax and the queries themselves.) Before you
# write: which of the six arguments will matter?
#
# <details><summary>Hint 1: a nudge</summary>
# Count operations for one sequence, then bytes for one sequence. What happens to each when there
# are two sequences?
# </details>
# <details><summary>Hint 2: the rule</summary>
# Sequences share weights, but no sequence reads another's K and V. So a second sequence doubles
# both counts.
# </details>
# <details><summary>Hint 3: an outline</summary>
#
# ```text
# operations  <- two products x (multiply, add) x query heads x head_dim x tokens x sequences
# bytes       <- (K, V) x kv heads x head_dim x tokens x sequences x bytes of a value
# ```
# </details>

# %% ex-1-5-b
def attention_flops_per_byte(
    num_query_heads, num_kv_heads, head_dim, num_tokens, num_seqs, bytes_per_value
):
    """Operations of one layer's decode attention per byte of K and V read."""
    ### BEGIN SOLUTION
    values = head_dim * num_tokens * num_seqs  # of one head's K
    flops = 2 * 2 * num_query_heads * values
    num_bytes = 2 * num_kv_heads * values * bytes_per_value
    return flops / num_bytes
    ### END SOLUTION

# %% cases-1-5-b jupyter={"source_hidden": true}
@ours
def counted_intensity(q, kv, dim, num_tokens, num_seqs, size):
    """By PyTorch's own count: queries of a group are stacked, so that K and V are read once."""
    queries = torch.empty(num_seqs, kv, q // kv, dim, device="meta")
    keys = torch.empty(num_seqs, kv, num_tokens, dim, device="meta")
    values = torch.empty_like(keys)
    with FlopCounterMode(display=False) as counter:
        scores = queries @ keys.mT
        scores @ values
    return counter.get_total_flops() / (keys.numel() + values.numel()) / size


@ours
def slips_1_5_b(q, kv, dim, num_tokens, num_seqs, size):
    """The usual slips, each with the factor by which its answer is off."""
    return {
        "More sequences do not help: each brings K and V of its own to read, so operations and "
        "bytes grow together.": num_seqs,
        "A longer sequence does not help: it has more K and V to read.": num_tokens,
        "As many heads were counted in the operations as in the bytes: every query head computes, "
        "but a group shares the K and V of one kv head.": kv / q,
        "Query heads and kv heads have changed places.": (kv / q) ** 2,
        "Half of the operations are missing: two products, each with multiplications and "
        "additions.": 1 / 2,
        "Half of the bytes are missing: K and V are both read.": 2,
        "Bits are not bytes: bytes_per_value needs no factor of 8.": 1 / 8,
        "A value has bytes_per_value bytes; values were counted, not bytes.": size,
        "The operations of one sequence were divided by the bytes of all.": 1 / num_seqs,
        "head_dim is in both counts, and drops out.": dim,
    }

# %% cases-1-5-c jupyter={"source_hidden": true}
MODELS_1_5 = {"SmolLM2": (9, 3, 64), "Llama 3.1 8B": (32, 8, 128), "Falcon 7B": (71, 1, 64)}


@ours
def shapes_1_5():
    """The six arguments: drawn ones, then each model with 1, 64 and 512 sequences."""
    rng = random.Random(17)
    for step in range(8):
        kv, group, dim = rng.randint(1, 4), rng.randint(2, 8), rng.choice([16, 48, 64])
        size = [2, 1, 4][step % 3]
        yield kv * group, kv, dim, rng.randint(5, 90), rng.randint(3, 40), size
    yield from [(12, 12, 64, 1, 1, 1), (9, 3, 32, 7, 2, 8)]
    yield 128, 8, 128, 100_000, 3, 4
    for heads in MODELS_1_5.values():
        for num_seqs in (1, 64, 512):
            yield *heads, 4096, num_seqs, 2

# %% check-1-5-b
@check
def exercise_1_5_b(attention_flops_per_byte):
    cases, name = [], "attention_flops_per_byte"
    words = ["query heads", "kv heads", "head_dim", "tokens", "sequences"]
    words.append("bytes per value")
    for shape in shapes_1_5():
        asked = ", ".join(f"{n} {word}" for n, word in zip(shape, words, strict=True))
        value = ask(attention_flops_per_byte, *shape, asked=asked)
        got = numbers(value, [name], name)[name]
        wanted, (*_, num_seqs, size) = counted_intensity(*shape), shape
        slips = {
            "That is what a linear layer does per byte. Its rows share the weights; "
            "sequences do not share K and V.": 2 * num_seqs / size,
            "That is right for 2 bytes per value only.": wanted * size / 2,
            "That is bytes per operation; the other way round was asked for.": 1 / wanted,
        }
        slips |= factors(wanted, slips_1_5_b(*shape), most=1)
        cases.append((asked, got, wanted, slips))
    explain(cases, alike=partial(same, tolerance=1e-6))
    each = [case[1] for case in cases[-9:]]
    by_model = zip(MODELS_1_5, each[::3], each[1::3], each[2::3], strict=True)
    for name, one, some, many in by_model:
        print(f"{name:12}  {one:.2f} with 1 sequence, {some:.2f} with 64, "
              f"{many:.2f} with 512")  # fmt: skip
    print("Exercise 1.5, second part: passed")

# %% [markdown]
# Compare the two parts. A GPU wants some 150 to 300 operations for every byte that it reads. A linear
# layer gets there with enough rows. Decode attention stays where it is, whatever the batch.

# %% [markdown]
# ## Exercise 1.6: in two lines
#
# *4 minutes, easy.*
#
# **Why is a longer prompt cheap per token, and a longer answer dear?** Write two lines for a
# colleague who pays the bill. Say what is read from memory, how often, and for how many tokens at
# once. A person reads this one; the check cannot.

# %% [markdown] written-1-6 points=2
# A prompt's tokens are known, so they all run in one pass: the weights are read once for hundreds
# of tokens, and the machine is busy computing.
# An answer's tokens come one after the other, each in a pass of its own that reads all weights and
# the whole KV cache for a single token: it waits for memory, and the longer the cache the more so.
#
# **Rubric, 2 points.** One for *why prompts are cheap*: known in advance, hence run together, hence
# one reading of the weights shared by many tokens. One for *why answers are dear*: each token needs
# the one before it, hence a pass each, hence weights (and cache) read again for one token. Give no
# point for "the cache makes it free", "the GPU is slow" or "attention is quadratic" alone. Samples
# at three levels stand in `solutions/README.md`.
