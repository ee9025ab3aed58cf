# ruff: noqa: B006, E501, F811, F821
# Kept answers to the exercises of chapter 01; `python -m minikv check --audit 01` runs them.

# %% ex-1-1 right: the plain product
def kv_bytes(config, num_tokens, bits_per_value):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * num_tokens * bits_per_value // 8

# %% ex-1-1 right: the plain product, in two lines
def kv_bytes(config, num_tokens, bits_per_value):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    values = 2 * config["num_hidden_layers"] * kv_heads * head_dim
    return values * num_tokens * bits_per_value // 8

# %% ex-1-1 right: one step at a time, through get with a None
def kv_bytes(config, num_tokens, bits_per_value):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or config["hidden_size"] / heads
    per_layer = 0
    for _ in ("K", "V"):
        per_layer += kv_heads * width
    return per_layer * config["num_hidden_layers"] * num_tokens * (bits_per_value / 8)

# %% ex-1-1 right: the shape of the tensor
def kv_bytes(config, num_tokens, bits_per_value):
    import numpy as np

    num_heads = config["num_attention_heads"]
    if "num_key_value_heads" in config:
        kv_heads = config["num_key_value_heads"]
    else:
        kv_heads = num_heads
    head_dim = config["head_dim"] if "head_dim" in config else config["hidden_size"] // num_heads
    shape = (config["num_hidden_layers"], 2, num_tokens, kv_heads, head_dim, bits_per_value)
    return np.prod(shape) // 8

# %% ex-1-1 right: shows its work
def kv_bytes(config, num_tokens, bits_per_value):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    print(heads, "query heads,", kv_heads, "kv heads", end=" ")
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    numbers = 2 * config["num_hidden_layers"] * kv_heads * head_dim * num_tokens
    print(f"{numbers:,} numbers")
    return numbers * bits_per_value // 8

# %% ex-1-1 wrong: query heads counted instead of kv heads
# says: the query heads were counted
def kv_bytes(config, num_tokens, bits_per_value):
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return 2 * config["num_hidden_layers"] * heads * head_dim * num_tokens * bits_per_value // 8

# %% ex-1-1 wrong: only K counted
# says: only one of K and V
# from: the plain product
# -     return 2 * config["num_hidden_layers"] * kv_heads * head_dim * num_tokens * bits_per_value // 8
# +     return config["num_hidden_layers"] * kv_heads * head_dim * num_tokens * bits_per_value // 8

# %% ex-1-1 wrong: bits for bytes
# says: bits are not bytes
# from: the plain product
# - bits_per_value // 8
# + bits_per_value

# %% ex-1-1 wrong: head_dim is hidden_size / heads
# says: this config gives its own
# from: the plain product
# - config.get("head_dim", config["hidden_size"] // heads)
# + config["hidden_size"] // heads

# %% ex-1-1 wrong: one layer
# says: every layer keeps
# from: the plain product
# - config["num_hidden_layers"] * kv_heads
# + kv_heads

# %% ex-1-1 wrong: per token, whatever was asked
# says: whatever num_tokens says
# from: the plain product
# - num_tokens * bits_per_value
# + bits_per_value

# %% ex-1-1 wrong: the newest token is left out
# says: one token is missing
# from: the plain product, in two lines
# -     return values * num_tokens * bits_per_value // 8
# +     return values * (num_tokens - 1) * bits_per_value // 8

# %% ex-1-1 wrong: mebibytes
# says: bytes were asked for
# from: the plain product, in two lines
# -     return values * num_tokens * bits_per_value // 8
# +     return values * num_tokens * bits_per_value / 8 / 2**20

# %% ex-1-1 wrong: two bytes per value, always
# says: taken for granted
# from: the plain product
# - bits_per_value // 8
# + 2

# %% ex-1-1 wrong: every configuration has every key
# says: ended in KeyError
def kv_bytes(config, num_tokens, bits_per_value):
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return values * num_tokens * bits_per_value // 8

# %% ex-1-1 wrong: prints and returns nothing
# says: returned None
def kv_bytes(config, num_tokens, bits_per_value):
    print(2 * config["num_hidden_layers"] * num_tokens * bits_per_value // 8)

# %% ex-1-1 wrong: a text, nicely formatted
# says: must return one number
def kv_bytes(config, num_tokens, bits_per_value):
    return f"{2 * config['num_hidden_layers'] * num_tokens * bits_per_value // 8:,} bytes"

# %% ex-1-1 wrong: fills in the absent keys where they are read
# says: changed what it was given
def kv_bytes(config, num_tokens, bits_per_value):
    heads = config["num_attention_heads"]
    kv_heads = config.setdefault("num_key_value_heads", heads)
    head_dim = config.setdefault("head_dim", config["hidden_size"] // heads)
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * num_tokens * bits_per_value // 8

# %% ex-1-1 wrong: eight layers at most
# says: the answer is wrong in
# from: the plain product
# -     return 2 * config["num_hidden_layers"] * kv_heads * head_dim * num_tokens * bits_per_value // 8
# +     layers = min(8, config["num_hidden_layers"])
# +     return 2 * layers * kv_heads * head_dim * num_tokens * bits_per_value // 8

# %% ex-1-1 wrong: two tokens at least
# says: the answer is wrong in
# from: the plain product, in two lines
# -     return values * num_tokens * bits_per_value // 8
# +     return values * max(num_tokens, 2) * bits_per_value // 8

# %% ex-1-1 wrong: nine tokens at most
# says: the answer is wrong in
# from: the plain product, in two lines
# -     return values * num_tokens * bits_per_value // 8
# +     return values * min(num_tokens, 9) * bits_per_value // 8

# %% ex-1-1 wrong: one kv head where the config names none
# says: then every query head has its own
# from: the plain product
# -     kv_heads = config.get("num_key_value_heads", heads)
# +     kv_heads = config.get("num_key_value_heads", 1)

# %% ex-1-1 right: a name of the checks for something else
spec = {"layers": 30}

def kv_bytes(config, num_tokens, bits_per_value):
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * num_tokens * bits_per_value // 8

# %% ex-1-1 delegates: ModelSpec's bytes per token, at the width of the weights
# says: the width of the weights
def kv_bytes(config, num_tokens, bits_per_value):
    from minikv import ModelSpec

    heads = config["num_attention_heads"]
    spec = ModelSpec(
        name="",
        num_layers=config["num_hidden_layers"],
        num_query_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim", config["hidden_size"] // heads),
        hidden_size=config["hidden_size"],
        vocab_size=0,
        num_parameters=0,
        max_model_len=num_tokens,
        dtype=config["dtype"],
    )
    return spec.kv_bytes_per_token * num_tokens

# %% ex-1-1 wrong: the group's size for the kv heads
# says: query heads that share a kv head
# - config.get("num_key_value_heads", config["num_attention_heads"])
# + config["num_attention_heads"] // config.get("num_key_value_heads", config["num_attention_heads"])

# %% ex-1-1 wrong: head_dim by kv heads
# says: divided among the query heads
# - config["hidden_size"] // config["num_attention_heads"]
# + config["hidden_size"] // num_kv_heads

# %% ex-1-1 wrong: heads no wider than 128
# says: the answer is wrong in
# - num_kv_heads * head_dim
# + num_kv_heads * min(head_dim, 128)

# %% ex-1-1 wrong: one token at least
# says: a cache of 0 tokens
# - return values_per_token * num_tokens
# + return values_per_token * max(1, num_tokens)

# %% ex-1-2 right: all tokens in one list
def generate(session, prompt, num_output_tokens):
    tokens = list(prompt)
    logits = session(tokens, range(len(tokens)))
    tokens.append(int(logits[-1].argmax()))
    while len(tokens) < len(prompt) + num_output_tokens:
        logits = session([tokens[-1]], [len(tokens) - 1])
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]

# %% ex-1-2 right: the output in a list of its own
def generate(session, prompt, num_output_tokens):
    logits = session(prompt, range(len(prompt)))
    output = [int(logits[-1].argmax())]
    while len(output) < num_output_tokens:
        logits = session([output[-1]], [len(prompt) + len(output) - 1])
        output.append(int(logits[-1].argmax()))
    return output

# %% ex-1-2 right: two counters that catch up
def generate(session, prompt, num_output_tokens):
    tokens, num_computed = list(prompt), 0
    while len(tokens) < len(prompt) + num_output_tokens:
        new = tokens[num_computed:]
        logits = session(new, list(range(num_computed, len(tokens))))
        num_computed = len(tokens)
        tokens.append(logits[-1].argmax().item())
    return tokens[len(prompt) :]

# %% ex-1-2 right: the prompt one token at a time, tensors throughout
def generate(session, prompt, num_output_tokens):
    output = []
    for position in range(len(prompt) + num_output_tokens - 1):
        token = prompt[position] if position < len(prompt) else output[-1]
        logits = session(torch.tensor([token]), torch.tensor([position]))
        if position >= len(prompt) - 1:
            output.append(logits.argmax(dim=-1)[-1])
    return torch.stack(output)

# %% ex-1-2 right: a generator
def generate(session, prompt, num_output_tokens):
    step, position = prompt, 0
    for _ in range(num_output_tokens):
        logits = session(step, range(position, position + len(step)))
        position += len(step)
        best = max(range(logits.shape[1]), key=lambda token: logits[-1, token])
        yield best
        step = [best]

# %% ex-1-2 wrong: position is num_tokens instead of num_tokens - 1
# says: num_tokens - 1, not at num_tokens
# from: all tokens in one list
# -         logits = session([tokens[-1]], [len(tokens) - 1])
# +         logits = session([tokens[-1]], [len(tokens)])

# %% ex-1-2 wrong: the sampled token's KV is already there
# says: has no K and V yet
def generate(session, prompt, num_output_tokens):
    tokens, num_computed = list(prompt), 0
    for _ in range(num_output_tokens):
        logits = session(tokens[num_computed:], range(num_computed, len(tokens)))
        tokens.append(int(logits[-1].argmax()))
        num_computed = len(tokens)
    return tokens[len(prompt) :]

# %% ex-1-2 wrong: the whole sequence again, cache or no cache
# says: the prompt was run again
def generate(session, prompt, num_output_tokens):
    tokens = list(prompt)
    for _ in range(num_output_tokens):
        logits = session(tokens, range(len(tokens)))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]

# %% ex-1-2 wrong: one forward pass too many
# says: one forward pass too many
def generate(session, prompt, num_output_tokens):
    logits = session(prompt, range(len(prompt)))
    output = []
    for i in range(num_output_tokens):
        output.append(int(logits[-1].argmax()))
        logits = session([output[-1]], [len(prompt) + i])
    return output

# %% ex-1-2 wrong: the first row of the logits
# says: was read off row 0
# from: the output in a list of its own
# -     output = [int(logits[-1].argmax())]
# +     output = [int(logits[0].argmax())]
# -         output.append(int(logits[-1].argmax()))
# +         output.append(int(logits[0].argmax()))

# %% ex-1-2 wrong: argmax over all rows
# says: not of all rows
# from: the output in a list of its own
# -     output = [int(logits[-1].argmax())]
# +     output = [int(logits.argmax())]
# -         output.append(int(logits[-1].argmax()))
# +         output.append(int(logits.argmax()))

# %% ex-1-2 wrong: positions start over after the prompt
# says: start over at 0
# -         num_tokens = len(prompt) + len(output)
# -         logits = session([output[-1]], [num_tokens - 1])
# +         logits = session([output[-1]], [len(output) - 1])

# %% ex-1-2 wrong: the newest two tokens each time
# says: run a second time
# from: all tokens in one list
# -         logits = session([tokens[-1]], [len(tokens) - 1])
# +         logits = session(tokens[-2:], [len(tokens) - 2, len(tokens) - 1])

# %% ex-1-2 wrong: the prompt comes back too
# says: the prompt itself was returned
def generate(session, prompt, num_output_tokens):
    tokens = list(prompt)
    new = tokens
    for _ in range(num_output_tokens):
        logits = session(new, range(len(tokens) - len(new), len(tokens)))
        new = [int(logits[-1].argmax())]
        tokens = tokens + new
    return tokens

# %% ex-1-2 wrong: works in the caller's list
# says: changed what it was given
def generate(session, prompt, num_output_tokens):
    num_prompt, new = len(prompt), list(prompt)
    for _ in range(num_output_tokens):
        logits = session(new, range(len(prompt) - len(new), len(prompt)))
        new = [int(logits[-1].argmax())]
        prompt += new
    return prompt[num_prompt:]

# %% ex-1-2 wrong: the prompt's last token once more, to get going
# says: run a second time
def generate(session, prompt, num_output_tokens):
    session(prompt, range(len(prompt)))
    output, token = [], prompt[-1]
    for i in range(num_output_tokens):
        token = int(session([token], [len(prompt) - 1 + i])[-1].argmax())
        output.append(token)
    return output

# %% ex-1-2 wrong: the loop without a cache, unchanged
# says: was never called
def generate(session, prompt, num_output_tokens):
    return generate_uncached(prompt, num_output_tokens)

# %% ex-1-2 wrong: one output token short
# says: output tokens returned
def generate(session, prompt, num_output_tokens):
    logits = session(prompt, range(len(prompt)))
    output, last = [], int(logits[-1].argmax())
    for i in range(num_output_tokens - 1):
        output.append(last)
        last = int(session([last], [len(prompt) + i])[-1].argmax())
    return output

# %% ex-1-2 wrong: never stops
# says: does it ever stop
def generate(session, prompt, num_output_tokens):
    new, at = list(prompt), 0
    while new:
        logits = session(new, range(at, at + len(new)))
        at += len(new)
        new = [int(logits[-1].argmax())]

# %% ex-1-2 wrong: the loop without a cache, and one call for show
# says: needs a call of its own
def generate(session, prompt, num_output_tokens):
    output = generate_uncached(prompt, num_output_tokens)
    run = [*prompt, *output[:-1]]
    session(run, range(len(run)))
    return output

# %% ex-1-2 right: a variable named like the checks' model
model = "smollm2"

def generate(session, prompt, num_output_tokens):
    logits = session(prompt, range(len(prompt)))
    output = [int(logits[-1].argmax())]
    while len(output) < num_output_tokens:
        logits = session([output[-1]], [len(prompt) + len(output) - 1])
        output.append(int(logits[-1].argmax()))
    return output

# %% ex-1-2 delegates: the package's own engine
# says: was never called
def generate(session, prompt, num_output_tokens):
    from minikv import LLM, SamplingParams

    llm = LLM("tiny", dtype="float32", device="cpu")
    params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids

# %% ex-1-2 wrong: stops at the end-of-text token
# says: the loop stopped early
# - while len(output) < num_output_tokens:
# + while len(output) < num_output_tokens and output[-1] != model.config.eos_token_id:

# %% ex-1-2 wrong: stops at token 2
# says: the loop stopped early
# - while len(output) < num_output_tokens:
# + while len(output) < num_output_tokens and output[-1] != 2:

# %% ex-1-2 wrong: token 0 ends the loop
# says: the loop stopped early
# - while len(output) < num_output_tokens:
# + while len(output) < num_output_tokens and output[-1]:

# %% ex-1-2 wrong: the prompt's last token is left out
# says: prompt's last token was not run
# - logits = session(prompt, range(len(prompt)))
# + logits = session(prompt[:-1] or prompt, range(max(1, len(prompt) - 1)))

# %% ex-1-2 wrong: positions in 8 bits
# says: a token ran at position
# - session(prompt, range(len(prompt)))
# + session(prompt, torch.arange(len(prompt)).to(torch.int8))

# %% ex-1-2 wrong: a loop without a cache chooses, and the session is called for show
# says: did something else choose it
def generate(session, prompt, num_output_tokens):
    output = generate_uncached(prompt, num_output_tokens)
    session(prompt, range(len(prompt)))
    for i in range(num_output_tokens - 1):
        session([output[i]], [len(prompt) + i])
    return output

# %% ex-1-2 wrong: a loop without a cache beside the session, step by step
# says: did something else choose it
def generate(session, prompt, num_output_tokens):
    tokens, computed = list(prompt), 0
    while len(tokens) < len(prompt) + num_output_tokens:
        session(tokens[computed:], range(computed, len(tokens)))
        computed = len(tokens)
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]

# %% ex-1-2 wrong: a list that lives on from call to call
# says: does a list live on
def generate(session, prompt, num_output_tokens, output=[]):
    logits = session(prompt, range(len(prompt)))
    output.append(int(logits[-1].argmax()))
    while len(output) < num_output_tokens:
        logits = session([output[-1]], [len(prompt) + len(output) - 1])
        output.append(int(logits[-1].argmax()))
    return output

# %% ex-1-2 wrong: sixteen tokens at most
# says: the loop stopped early
# - while len(output) < num_output_tokens:
# + while len(output) < min(16, num_output_tokens):

# %% ex-1-2 right: the prompt in two pieces
# - logits = session(prompt, range(len(prompt)))
# + half = len(prompt) // 2
# +     if half:
# +         session(prompt[:half], range(half))
# +     logits = session(prompt[half:], range(half, len(prompt)))

# %% ex-1-2-b delegates: the chapter's figure, which counts the prefill's queries too
# says: the prefill (each token up to itself)
def tokens_read(num_prompt_tokens, num_output_tokens):
    from minikv.viz import decode

    num_tokens = num_prompt_tokens + num_output_tokens
    if num_tokens > 20:  # too many cells to draw; this is what the figure would count
        return sum(range(1, num_tokens))
    _, reads = decode.attention_reads(num_prompt_tokens, num_output_tokens)
    return sum(new + old for new, old in reads)

# %% ex-1-2-b right: a loop
def tokens_read(num_prompt_tokens, num_output_tokens):
    total, held = 0, num_prompt_tokens
    for _ in range(1, num_output_tokens):
        held += 1
        total += held
    return total

# %% ex-1-2-b right: the sum of a range, first and last
def tokens_read(num_prompt_tokens, num_output_tokens):
    first, last = num_prompt_tokens + 1, num_prompt_tokens + num_output_tokens - 1
    return (first + last) * (last - first + 1) / 2

# %% ex-1-2-b wrong: a cache makes decode O(1)
# says: made decoding O(1)
def tokens_read(num_prompt_tokens, num_output_tokens):
    return num_output_tokens - 1

# %% ex-1-2-b wrong: a cache makes decode O(1), the prefill a step like the others
# says: made decoding O(1)
def tokens_read(num_prompt_tokens, num_output_tokens):
    return num_output_tokens

# %% ex-1-2-b wrong: only the prompt is read
# says: the cache grows
def tokens_read(num_prompt_tokens, num_output_tokens):
    return (num_output_tokens - 1) * num_prompt_tokens

# %% ex-1-2-b wrong: the prompt, once for each output token
# says: reads more than the prompt
def tokens_read(num_prompt_tokens, num_output_tokens):
    return num_prompt_tokens * num_output_tokens

# %% ex-1-2-b wrong: only the answer's own tokens are read
# says: prompt's K and V are read as well
def tokens_read(num_prompt_tokens, num_output_tokens):
    return sum(range(num_output_tokens))

# %% ex-1-2-b wrong: a decode step for every output token
# says: a step too many
def tokens_read(num_prompt_tokens, num_output_tokens):
    return sum(num_prompt_tokens + i for i in range(1, num_output_tokens + 1))

# %% ex-1-2-b wrong: the new token's own K and V come too late
# says: reads its own K and V, too
def tokens_read(num_prompt_tokens, num_output_tokens):
    return sum(num_prompt_tokens + i for i in range(num_output_tokens - 1))

# %% ex-1-2-b wrong: the prefill taken for a step, or a step without its own token
# says: the prompt's length too much
def tokens_read(num_prompt_tokens, num_output_tokens):
    return sum(num_prompt_tokens + i for i in range(num_output_tokens))

# %% ex-1-2-b wrong: all layers of SmolLM2
# says: all layers of SmolLM2
def tokens_read(num_prompt_tokens, num_output_tokens):
    return 30 * sum(num_prompt_tokens + i for i in range(1, num_output_tokens))

# %% ex-1-2-b wrong: all layers of the exercise's model
# says: all layers of this model
def tokens_read(num_prompt_tokens, num_output_tokens):
    steps = range(1, num_output_tokens)
    return spec.num_layers * sum(num_prompt_tokens + i for i in steps)

# %% ex-1-2-b wrong: seventeen output tokens at most
# says: the answer is wrong in
def tokens_read(num_prompt_tokens, num_output_tokens):
    return sum(num_prompt_tokens + i for i in range(1, min(num_output_tokens, 17)))

# %% ex-1-2-b wrong: the last step alone
# says: what the last step reads
def tokens_read(num_prompt_tokens, num_output_tokens):
    return num_prompt_tokens + num_output_tokens - 1 if num_output_tokens > 1 else 0

# %% ex-1-2-b wrong: what the whole answer costs to run
# says: not tokens run
def tokens_read(num_prompt_tokens, num_output_tokens):
    return num_prompt_tokens + num_output_tokens - 1

# %% ex-1-2-b wrong: the loop without a cache
# says: the answer is wrong in
def tokens_read(num_prompt_tokens, num_output_tokens):
    total = num_prompt_tokens + num_output_tokens
    return sum(n * n for n in range(num_prompt_tokens, total))

# %% ex-1-3 right: in one line
def chunk_inputs(num_computed_tokens, num_new_tokens):
    positions = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)
    keys = torch.arange(num_computed_tokens + num_new_tokens)
    return positions, keys <= positions[:, None]

# %% ex-1-3 right: a comparison
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    positions = torch.arange(num_computed_tokens, total)
    mask = torch.arange(total) <= positions[:, None]
    return positions, mask

# %% ex-1-3 right: row by row, in lists
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    positions = list(range(num_computed_tokens, total))
    mask = [[key <= position for key in range(total)] for position in positions]
    return torch.tensor(positions), torch.tensor(mask)

# %% ex-1-3 right: a triangle with its diagonal moved, and numpy
def chunk_inputs(num_computed_tokens, num_new_tokens):
    import numpy as np

    shape = num_new_tokens, num_computed_tokens + num_new_tokens
    mask = np.tril(np.ones(shape, dtype=bool), k=num_computed_tokens)
    return num_computed_tokens + np.arange(num_new_tokens), mask

# %% ex-1-3 right: the last rows of the whole square
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    square = torch.ones(total, total).tril().bool()
    return [torch.arange(total)[None, num_computed_tokens:], square[num_computed_tokens:]]

# %% ex-1-3 wrong: the mask of an empty cache
# says: as if the cache were empty
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    mask = torch.ones(num_new_tokens, total, dtype=torch.bool).tril()
    return torch.arange(num_computed_tokens, total), mask

# %% ex-1-3 wrong: everybody sees everything
# says: also those that come after
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    mask = torch.ones(num_new_tokens, total, dtype=torch.bool)
    return torch.arange(num_computed_tokens, total), mask

# %% ex-1-3 wrong: a token does not see itself
# says: a token must see itself
# from: in one line
# -     return positions, keys <= positions[:, None]
# +     return positions, keys < positions[:, None]

# %% ex-1-3 wrong: one key too far
# says: one key too far
# from: in one line
# -     return positions, keys <= positions[:, None]
# +     return positions, keys <= positions[:, None] + 1

# %% ex-1-3 wrong: True means masked
# says: the wrong way round
# from: in one line
# -     return positions, keys <= positions[:, None]
# +     return positions, keys > positions[:, None]

# %% ex-1-3 wrong: position is num_tokens instead of num_tokens - 1
# says: stands at num_tokens - 1
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    positions = torch.arange(num_computed_tokens, total)
    return positions + 1, torch.arange(total) <= positions[:, None]

# %% ex-1-3 wrong: positions start over in each chunk
# says: start over at 0
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    positions = torch.arange(num_computed_tokens, total)
    return torch.arange(num_new_tokens), torch.arange(total) <= positions[:, None]

# %% ex-1-3 wrong: keys of the chunk alone
# says: no columns for the keys
def chunk_inputs(num_computed_tokens, num_new_tokens):
    positions = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)
    return positions, torch.ones(num_new_tokens, num_new_tokens, dtype=torch.bool).tril()

# %% ex-1-3 wrong: the whole square
# says: only new tokens ask
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    mask = torch.ones(total, total, dtype=torch.bool).tril()
    return torch.arange(num_computed_tokens, total), mask

# %% ex-1-3 wrong: keys down, queries across
# says: the other way round
# from: in one line
# - keys <= positions[:, None]
# + keys[:, None] <= positions

# %% ex-1-3 wrong: the new tokens see only the cache
# says: but not each other
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    mask = (torch.arange(total) < num_computed_tokens).expand(num_new_tokens, total)
    return torch.arange(num_computed_tokens, total), mask

# %% ex-1-3 wrong: the new tokens see only each other
# says: do not see what is in the cache
def chunk_inputs(num_computed_tokens, num_new_tokens):
    square = torch.ones(num_new_tokens, num_new_tokens, dtype=torch.bool).tril()
    blind = torch.zeros(num_new_tokens, num_computed_tokens, dtype=torch.bool)
    positions = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)
    return positions, torch.cat([blind, square], dim=1)

# %% ex-1-3 wrong: ones and zeros
# says: must hold True and False
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    mask = torch.tril(torch.ones(num_new_tokens, total), diagonal=num_computed_tokens)
    return torch.arange(num_computed_tokens, total), mask

# %% ex-1-3 wrong: the mask first
# says: positions first
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    positions = torch.arange(num_computed_tokens, total)
    return torch.arange(total) <= positions[:, None], positions

# %% ex-1-3 wrong: a position for every key
# says: one position per new token
def chunk_inputs(num_computed_tokens, num_new_tokens):
    keys = torch.arange(num_computed_tokens + num_new_tokens)
    return keys, keys <= keys[num_computed_tokens:, None]

# %% ex-1-3 wrong: the mask alone
# says: must return (positions, mask)
def chunk_inputs(num_computed_tokens, num_new_tokens):
    keys = torch.arange(num_computed_tokens + num_new_tokens)
    return keys <= keys[num_computed_tokens:, None]

# %% ex-1-3 wrong: a window of twelve
# says: the mask is wrong
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    positions = torch.arange(num_computed_tokens, total)
    keys = torch.arange(total)
    return positions, (keys <= positions[:, None]) & (keys > positions[:, None] - 12)

# %% ex-1-3 wrong: no mask once the cache is long
# says: the mask is wrong
# from: a comparison
# -     return positions, mask
# +     return positions, torch.ones_like(mask) if num_computed_tokens > 6 else mask

# %% ex-1-3 wrong: positions that are not whole
# says: of an integer type
def chunk_inputs(num_computed_tokens, num_new_tokens):
    total = num_computed_tokens + num_new_tokens
    positions = torch.linspace(num_computed_tokens, total - 1, num_new_tokens)
    return positions, torch.arange(total) <= positions[:, None]

# %% ex-1-3 delegates: the bias that the engine adds to the scores
# says: must hold True and False
def chunk_inputs(num_computed_tokens, num_new_tokens):
    from minikv.model.kernels.gather import QueryGroup

    total = num_computed_tokens + num_new_tokens
    positions = torch.arange(num_computed_tokens, total)
    group = QueryGroup(0, 1, num_new_tokens, total, positions[None], None)
    return positions, group.bias(total, None, torch.float32)[0, 0, 0]

# %% ex-1-3 wrong: positions in 8 bits
# says: holds no number over 127
# - return positions, mask
# + return positions.to(torch.int8), mask

# %% ex-1-3 wrong: no mask for the last rows of a long chunk
# says: the mask is wrong
# - return positions, mask
# + mask[32:] = True
# +     return positions, mask

# %% ex-1-3 wrong: positions in reverse
# says: the positions are in reverse order
# - return positions, mask
# + return positions.flip(0), mask

# %% ex-1-3 right: ranges and lists
# - return positions, mask
# + return range(num_computed_tokens, num_tokens), mask.tolist()

# %% ex-1-4 right: both stacked
def write_kv(slab, num_computed_tokens, k, v):
    end = num_computed_tokens + len(k)
    if end > slab.shape[2]:
        raise OutOfKVMemory(f"{end} of {slab.shape[2]}")
    slab[:, :, num_computed_tokens:end] = torch.stack([k, v]).transpose(1, 2)
    return end

# %% ex-1-4 right: one after the other
def write_kv(slab, num_computed_tokens, k, v):
    end = num_computed_tokens + len(k)
    if end > slab.shape[2]:
        raise OutOfKVMemory(f"{end} of {slab.shape[2]}")
    slab[0, :, num_computed_tokens:end] = k.transpose(0, 1)
    slab[1, :, num_computed_tokens:end] = v.transpose(0, 1)
    return end

# %% ex-1-4 no delegate: the engine's write goes to rows of a block pool, inside its attention

# %% ex-1-4 right: token by token, head by head
def write_kv(slab, num_computed_tokens, k, v):
    num_slots = slab.shape[2]
    if num_computed_tokens + k.shape[0] > num_slots:
        left = num_slots - num_computed_tokens
        raise OutOfKVMemory(f"no room for {k.shape[0]} more tokens: {left} slots are left")
    for token in range(k.shape[0]):
        for head in range(k.shape[1]):
            slab[0][head][num_computed_tokens + token] = k[token][head]
            slab[1][head][num_computed_tokens + token] = v[token][head]
    return num_computed_tokens + k.shape[0]

# %% ex-1-4 right: both at once by index
def write_kv(slab, num_computed_tokens, k, v):
    new, slots = k.size(0), slab.size(2)
    needed = num_computed_tokens + new
    if needed > slots:
        raise OutOfKVMemory(f"needs {needed} of {slots} slots")
    where = torch.arange(num_computed_tokens, needed)
    slab.index_copy_(2, where, torch.stack([k, v]).permute(0, 2, 1, 3))
    return torch.tensor(needed)

# %% ex-1-4 right: through a view of the other order
def write_kv(slab, num_computed_tokens, k, v):
    by_token = slab.transpose(1, 2)
    room = by_token[:, num_computed_tokens : num_computed_tokens + len(k)]
    if room.shape[1] < len(k):
        raise OutOfKVMemory(f"{len(k)} new tokens, {room.shape[1]} free slots")
    room.copy_(torch.stack((k, v)))
    return num_computed_tokens + len(k)

# %% ex-1-4 wrong: slot num_tokens, a hole before it
# says: one slot too far
def write_kv(slab, num_computed_tokens, k, v):
    start, end = num_computed_tokens + 1, num_computed_tokens + 1 + len(k)
    if end - 1 > slab.shape[2]:
        raise OutOfKVMemory(f"{end - 1} of {slab.shape[2]}")
    fits = slab.shape[2] - start
    slab[0, :, start:end] = k.transpose(0, 1)[:, :fits]
    slab[1, :, start:end] = v.transpose(0, 1)[:, :fits]
    return end - 1

# %% ex-1-4 wrong: always from the first slot
# says: the first slots were written over
# from: both stacked
# -     slab[:, :, num_computed_tokens:end] = torch.stack([k, v]).transpose(1, 2)
# +     slab[0, :, : len(k)] = k.transpose(0, 1)
# +     slab[1, :, : len(k)] = v.transpose(0, 1)

# %% ex-1-4 wrong: a new tensor by concatenation
# says: that was passed in did not change
# from: both stacked
# -     slab[:, :, num_computed_tokens:end] = torch.stack([k, v]).transpose(1, 2)
# +     new = torch.stack([k, v]).transpose(1, 2)
# +     slab = torch.cat([slab[:, :, :num_computed_tokens], new, slab[:, :, end:]], dim=2)

# %% ex-1-4 wrong: reshape for transpose
# says: reshape only renames
# from: both stacked
# -     slab[:, :, num_computed_tokens:end] = torch.stack([k, v]).transpose(1, 2)
# +     slab[0, :, num_computed_tokens:end] = k.reshape(slab.shape[1], len(k), -1)
# +     slab[1, :, num_computed_tokens:end] = v.reshape(slab.shape[1], len(k), -1)

# %% ex-1-4 wrong: no transpose at all
# says: compare the order of dimensions
# from: both stacked
# -     slab[:, :, num_computed_tokens:end] = torch.stack([k, v]).transpose(1, 2)
# +     slab[0, :, num_computed_tokens:end] = k
# +     slab[1, :, num_computed_tokens:end] = v

# %% ex-1-4 wrong: only K written
# says: only K was written
# from: both stacked
# -     slab[:, :, num_computed_tokens:end] = torch.stack([k, v]).transpose(1, 2)
# +     slab[0, :, num_computed_tokens:end] = k.transpose(0, 1)

# %% ex-1-4 wrong: V before K
# says: in each other's place
# from: both stacked
# -     slab[:, :, num_computed_tokens:end] = torch.stack([k, v]).transpose(1, 2)
# +     slab[:, :, num_computed_tokens:end] = torch.stack([v, k]).transpose(1, 2)

# %% ex-1-4 wrong: what lies behind is erased
# says: have changed
# from: both stacked
# -         raise OutOfKVMemory(f"{end} of {slab.shape[2]}")
# +         raise OutOfKVMemory(f"{end} of {slab.shape[2]}")
# +     slab[:, :, num_computed_tokens:] = 0

# %% ex-1-4 wrong: what does not fit is cut off
# says: without a word
def write_kv(slab, num_computed_tokens, k, v):
    end = min(num_computed_tokens + len(k), slab.shape[2])
    new = torch.stack([k, v]).transpose(1, 2)
    slab[:, :, num_computed_tokens:end] = new[:, :, : end - num_computed_tokens]
    return end

# %% ex-1-4 wrong: PyTorch is trusted to complain
# says: refuse by name
def write_kv(slab, num_computed_tokens, k, v):
    end = num_computed_tokens + len(k)
    slab[:, :, num_computed_tokens:end] = torch.stack([k, v]).transpose(1, 2)
    return end

# %% ex-1-4 wrong: refused under another name
# says: refuse by name
# from: both stacked
# -         raise OutOfKVMemory(f"{end} of {slab.shape[2]}")
# +         raise ValueError(f"{end} of {slab.shape[2]}")

# %% ex-1-4 wrong: token by token until it is full
# says: refused too late
def write_kv(slab, num_computed_tokens, k, v):
    for i in range(len(k)):
        slot = num_computed_tokens + i
        if slot >= slab.shape[2]:
            raise OutOfKVMemory(f"slot {num_computed_tokens + len(k)} of {slab.shape[2]}")
        slab[0, :, slot], slab[1, :, slot] = k[i], v[i]
    return num_computed_tokens + len(k)

# %% ex-1-4 wrong: a full slab is taken for an overfull one
# says: may be exactly full
# from: both stacked
# -     if end > slab.shape[2]:
# +     if end >= slab.shape[2]:

# %% ex-1-4 wrong: the heads taken for the slots
# says: its dimension 2 the slots
# from: both stacked
# -     if end > slab.shape[2]:
# -         raise OutOfKVMemory(f"{end} of {slab.shape[2]}")
# +     if end > slab.shape[1]:
# +         raise OutOfKVMemory(f"{end} of {slab.shape[1]}")

# %% ex-1-4 wrong: a slab half made of K
# says: does not hold what it should
# from: one after the other
# -     slab[1, :, num_computed_tokens:end] = v.transpose(0, 1)
# +     slab[1, :, num_computed_tokens:end] = -k.transpose(0, 1)

# %% ex-1-4 wrong: a message with its numbers exchanged
# says: in the wrong order
# from: both stacked
# - f"{end} of {slab.shape[2]}"
# + f"{slab.shape[2]} slots are needed, but the slab has {end}"

# %% ex-1-4 wrong: a message without numbers
# says: must name the slots needed
# from: both stacked
# - f"{end} of {slab.shape[2]}"
# + "the slab is full"

# %% ex-1-4 wrong: returns nothing
# says: returned None
# from: both stacked
# -     slab[:, :, num_computed_tokens:end] = torch.stack([k, v]).transpose(1, 2)
# -     return end
# +     slab[:, :, num_computed_tokens:end] = torch.stack([k, v]).transpose(1, 2)

# %% ex-1-4 wrong: counts the token sampled next
# says: tokens have K and V
# from: both stacked
# -     return end
# +     return end + 1

# %% ex-1-4 wrong: other memory behind the same tensor
# says: the slab was given other memory
# - slab[0, :, num_computed_tokens:end] = k.transpose(0, 1)
# -     slab[1, :, num_computed_tokens:end] = v.transpose(0, 1)
# + new = torch.stack([k, v]).transpose(1, 2)
# +     slab.data = torch.cat([slab[:, :, :num_computed_tokens], new, slab[:, :, end:]], 2)

# %% ex-1-4 wrong: the last token computed is written over
# says: one slot too early
# - end, num_slots = num_computed_tokens + len(k), slab.shape[2]
# + end, num_slots = num_computed_tokens + len(k), slab.shape[2]
# +     start = max(0, num_computed_tokens - 1)
# - slab[0, :, num_computed_tokens:end]
# + slab[0, :, start : start + len(k)]
# - slab[1, :, num_computed_tokens:end]
# + slab[1, :, start : start + len(k)]

# %% ex-1-4 wrong: the tokens in reverse
# says: new tokens are in reverse order
# - k.transpose(0, 1)
# + k.flip(0).transpose(0, 1)
# - v.transpose(0, 1)
# + v.flip(0).transpose(0, 1)

# %% ex-1-5 delegates: the ridge of the package's GPU, FLOP per byte
# says: right for one width only
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    from minikv.specs import GPU

    return math.ceil(GPU("", 0, bandwidth, peak_flops, "").ridge)

# %% ex-1-5 right: one formula
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return -int(-(peak_flops / bandwidth) * bytes_per_value / 2 // 1)

# %% ex-1-5 right: count up
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    num_weights, rows = 1_000_000, 1
    while rows * num_weights * 2 / peak_flops < num_weights * bytes_per_value / bandwidth:
        rows += 1
    return rows

# %% ex-1-5 wrong: a multiply-add is one operation
# says: are two operations
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return math.ceil(peak_flops * bytes_per_value / bandwidth)

# %% ex-1-5 wrong: bits for bytes
# says: taken for bits
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return math.ceil(peak_flops * bytes_per_value * 8 / bandwidth / 2)

# %% ex-1-5 wrong: bytes taken for bits
# says: taken for bits
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return math.ceil(peak_flops * bytes_per_value / 8 / bandwidth / 2)

# %% ex-1-5 wrong: the ridge alone, right for two bytes only
# says: right for one width only
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return math.ceil(peak_flops / bandwidth)

# %% ex-1-5 wrong: wider weights need fewer rows
# says: take longer to read
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return math.ceil(peak_flops / bandwidth / bytes_per_value)

# %% ex-1-5 wrong: upside down
# says: upside down
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return math.ceil(2 * bandwidth / (peak_flops * bytes_per_value))

# %% ex-1-5 wrong: rounded down
# says: one row short
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return int(peak_flops * bytes_per_value / bandwidth / 2)

# %% ex-1-5 wrong: rounded down and one more, as if it had to be longer
# says: one row too many
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return int(peak_flops * bytes_per_value / bandwidth / 2) + 1

# %% ex-1-5 wrong: not rounded
# says: rows are whole
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return peak_flops * bytes_per_value / bandwidth / 2

# %% ex-1-5 wrong: the two numbers that everybody quotes
# says: the answer is wrong in
def rows_to_compute_bound(peak_flops, bandwidth, bytes_per_value):
    return 201 if peak_flops < 500e12 else 296

# %% ex-1-5 right: another order of operations
# - math.ceil(seconds_to_read / seconds_per_row)
# + math.ceil(1 / bandwidth * bytes_per_value / 2 * peak_flops)

# %% ex-1-5 wrong: rounded to the nearest
# says: one row short
# - math.ceil
# + round

# %% ex-1-5-b no delegate: the package never counts floating-point operations

# %% ex-1-5-b right: only what is left after dividing
def attention_flops_per_byte(
    num_query_heads, num_kv_heads, head_dim, num_tokens, num_seqs, bytes_per_value
):
    return 2 * (num_query_heads // num_kv_heads) / bytes_per_value

# %% ex-1-5-b right: a loop over sequences and heads
def attention_flops_per_byte(
    num_query_heads, num_kv_heads, head_dim, num_tokens, num_seqs, bytes_per_value
):
    flops = num_bytes = 0
    for _ in range(num_seqs):
        for _ in range(num_kv_heads):
            num_bytes += num_tokens * head_dim * bytes_per_value  # K
            num_bytes += num_tokens * head_dim * bytes_per_value  # V
        for _ in range(num_query_heads):
            flops += num_tokens * 2 * head_dim  # scores
            flops += head_dim * 2 * num_tokens  # weighted sum
    return torch.tensor(flops, dtype=torch.float64) / num_bytes

# %% ex-1-5-b wrong: decode attention turns compute-bound with a larger batch
# says: more sequences do not help
# from: only what is left after dividing
# -     return 2 * (num_query_heads // num_kv_heads) / bytes_per_value
# +     flops = 4 * num_query_heads * head_dim * num_tokens * num_seqs
# +     return flops / (2 * num_kv_heads * head_dim * num_tokens * bytes_per_value)

# %% ex-1-5-b wrong: a longer context helps
# says: a longer sequence does not help
# from: only what is left after dividing
# -     return 2 * (num_query_heads // num_kv_heads) / bytes_per_value
# +     flops = 4 * num_query_heads * head_dim * num_tokens * num_seqs
# +     return flops / (2 * num_kv_heads * head_dim * num_seqs * bytes_per_value)

# %% ex-1-5-b wrong: query heads counted instead of kv heads
# says: as many heads
# from: only what is left after dividing
# -     return 2 * (num_query_heads // num_kv_heads) / bytes_per_value
# +     flops = 4 * num_query_heads * head_dim * num_tokens
# +     return flops / (2 * num_query_heads * head_dim * num_tokens * bytes_per_value)

# %% ex-1-5-b wrong: only K counted
# says: half of the bytes
# from: only what is left after dividing
# - 2 * (num_query_heads // num_kv_heads) / bytes_per_value
# + 4 * num_query_heads / (num_kv_heads * bytes_per_value)

# %% ex-1-5-b wrong: a multiply-add is one operation
# says: half of the operations
# from: only what is left after dividing
# - (num_query_heads // num_kv_heads) / bytes_per_value
# + num_query_heads / (2 * num_kv_heads * bytes_per_value)

# %% ex-1-5-b wrong: bits for bytes
# says: no factor of 8
# from: only what is left after dividing
# - 2 * (num_query_heads // num_kv_heads) / bytes_per_value
# + 4 * num_query_heads / (2 * num_kv_heads * bytes_per_value * 8)

# %% ex-1-5-b wrong: per value, not per byte
# says: values were counted
# from: only what is left after dividing
# - (num_query_heads // num_kv_heads) / bytes_per_value
# + num_query_heads / num_kv_heads

# %% ex-1-5-b wrong: decode attention turns compute-bound with a larger batch, like a linear layer
# says: what a linear layer does per byte
# from: only what is left after dividing
# - (num_query_heads // num_kv_heads)
# + num_seqs

# %% ex-1-5-b wrong: the number to remember, which holds for bf16
# says: for 2 bytes per value only
# from: only what is left after dividing
# - 2 * (num_query_heads // num_kv_heads) / bytes_per_value
# + num_query_heads / num_kv_heads

# %% ex-1-5-b wrong: upside down
# says: bytes per operation
# from: only what is left after dividing
# - 2 * (num_query_heads // num_kv_heads) / bytes_per_value
# + num_kv_heads * bytes_per_value / (2 * num_query_heads)

# %% ex-1-5-b wrong: groups of eight at most
# says: the answer is wrong in
# from: only what is left after dividing
# -     return 2 * (num_query_heads // num_kv_heads) / bytes_per_value
# +     return 2 * min(8, num_query_heads // num_kv_heads) / bytes_per_value

# %% ex-1-5-b wrong: rounded to one digit
# says: don't round
# - return flops / num_bytes
# + return round(flops / num_bytes, 1)
