# ruff: noqa: B905, F811, F821, RUF059
# Kept answers to the exercises of chapter 05; `python -m minikv check --audit 05` runs them.

# %% ex-5-1 right: slot by slot, then torch's own attention
def gather_attention(query, pool, block_table, seq_len, scaling):
    B = pool.shape[3]
    slots = [pool[:, block_table[j // B], :, j % B] for j in range(seq_len)]
    keys, values = torch.stack(slots, dim=2)
    return torch.nn.functional.scaled_dot_product_attention(
        query[:, None], keys, values, scale=scaling, enable_gqa=True
    )[:, 0]


# %% ex-5-1 right: hidden before the softmax, kv heads repeated
def gather_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, _, head_dim = pool.shape
    kv = torch.cat([pool[:, block] for block in block_table], dim=2)
    kv = kv.repeat_interleave(len(query) // num_kv_heads, 1)
    scores = torch.einsum("hd,hjd->hj", query, kv[0]) * scaling
    scores[:, seq_len:] = -math.inf
    return torch.einsum("hj,hjd->hd", scores.softmax(-1), kv[1])


# %% ex-5-1 right: in numpy, with nested lists at the end
def gather_attention(query, pool, block_table, seq_len, scaling):
    import numpy as np

    query, pool = query.numpy(), pool.numpy()
    keys, values = (
        pool[:, block_table]
        .swapaxes(1, 2)
        .reshape(2, pool.shape[2], -1, pool.shape[4])[:, :, :seq_len]
    )
    grouped = query.reshape(len(keys), -1, query.shape[-1])
    scores = grouped @ keys.swapaxes(1, 2) * scaling
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ values).reshape(query.shape).tolist()


# %% ex-5-1 right: a generator of rows
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    for head, row in enumerate(query):
        kv_head = head * len(keys) // len(query)
        weights = (keys[kv_head] @ row * scaling).softmax(0)
        yield (weights @ values[kv_head]).tolist()


# %% ex-5-1 delegates: the package's gather
# says: hands the work to the package
def gather_attention(query, pool, block_table, seq_len, scaling):
    from minikv.model.backends import AttentionMetadata
    from minikv.model.kernels import gather

    table, one = torch.tensor([block_table]).int(), torch.tensor([0, 1]).int()
    metadata = AttentionMetadata(table, one, torch.tensor([seq_len]).int(), None, 1, seq_len)
    return gather.attend(query[None], pool, metadata, scaling=scaling)[0]


# %% ex-5-1 wrong: the tail of the last block attended
# says: were read as if they were tokens
def gather_attention(query, pool, block_table, seq_len, scaling):
    table = block_table[: cdiv(seq_len, pool.shape[3])]
    keys, values = pool[:, table].transpose(1, 2).flatten(2, 3)
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-1 wrong: the padding block attended, too
# says: were read as if they were tokens
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-1 wrong: masked after the softmax
# says: has taken its share of the sum already
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (grouped @ keys.mT * scaling).softmax(-1)
    weights[..., seq_len:] = 0
    return (weights @ values).reshape(query.shape)


# %% ex-5-1 wrong: hidden scores set to 0
# says: A hidden score of 0 still weighs
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)
    grouped = query.view(len(keys), -1, query.shape[-1])
    scores = grouped @ keys.mT * scaling
    scores[..., seq_len:] = 0
    return (scores.softmax(-1) @ values).reshape(query.shape)


# %% ex-5-1 wrong: blocks must be in order
# says: sorting the table moves the block
def gather_attention(query, pool, block_table, seq_len, scaling):
    table = sorted(block_table[: cdiv(seq_len, pool.shape[3])])
    keys, values = pool[:, table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-1 wrong: blocks taken for neighbours
# says: not counted on from the first
def gather_attention(query, pool, block_table, seq_len, scaling):
    first, need = block_table[0], cdiv(seq_len, pool.shape[3])
    kv = pool[:, first : first + need].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    keys, values = kv
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-1 wrong: its own token left out
# says: slot seq_len - 1 is read, too
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, : seq_len - 1]
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-1 wrong: keys for values
# says: The values lie in pool[1]
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, _ = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).softmax(-1) @ keys).reshape(query.shape)


# %% ex-5-1 wrong: K and V swapped
# says: K and V are swapped
def gather_attention(query, pool, block_table, seq_len, scaling):
    values, keys = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (grouped @ keys.mT * scaling).softmax(-1)
    return (weights @ values).reshape(query.shape)


# %% ex-5-1 wrong: the last block dropped unless it is full
# says: where it is only partly full, too
def gather_attention(query, pool, block_table, seq_len, scaling):
    block_table = block_table[: seq_len // pool.shape[3]]
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (grouped @ keys.mT * scaling).softmax(-1)
    return (weights @ values).reshape(query.shape)


# %% ex-5-1 wrong: softmax over the query heads of a group
# says: Softmax goes over the slots
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (grouped @ keys.mT * scaling).softmax(-2)
    return (weights @ values).reshape(query.shape)


# %% ex-5-1 wrong: softmax over the kv heads
# says: Softmax goes over the slots
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (grouped @ keys.mT * scaling).softmax(0)
    return (weights @ values).reshape(query.shape)


# %% ex-5-1 wrong: right in small cases: eight blocks at most
# says: other tokens came out than
def gather_attention(query, pool, block_table, seq_len, scaling):
    block_table = block_table[:8]
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (grouped @ keys.mT * scaling).softmax(-1)
    return (weights @ values).reshape(query.shape)


# %% ex-5-1 wrong: right in small cases: eight numbers of each head
# says: your gather_attention is wrong, though it was right in all cases above
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (grouped[..., :8] @ keys[..., :8].mT * scaling).softmax(-1)
    return (weights @ values).reshape(query.shape)


# %% ex-5-1 wrong: reshape instead of transpose
# says: reshape does not swap axes
def gather_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, _, head_dim = pool.shape
    keys, values = pool[:, block_table].reshape(2, num_kv_heads, -1, head_dim)[:, :, :seq_len]
    grouped = query.view(num_kv_heads, -1, head_dim)
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-1 wrong: kv heads taken in turns
# says: 0 and 1 share the first
def gather_attention(query, pool, block_table, seq_len, scaling):
    kv = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    keys, values = kv.repeat(1, len(query) // kv.shape[1], 1, 1)
    return ((query[:, None] @ keys.mT * scaling).softmax(-1) @ values)[:, 0]


# %% ex-5-1 wrong: the first kv head for all
# says: Only the first kv head was read
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table, 0].flatten(1, 2)[:, :seq_len]
    return (query @ keys.mT * scaling).softmax(-1) @ values


# %% ex-5-1 wrong: not scaled
# says: multiplied by scaling
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-1 wrong: the usual scaling, not the given one
# says: a model may set it to something else
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (grouped @ keys.mT / math.sqrt(query.shape[-1])).softmax(-1)
    return (weights @ values).reshape(query.shape)


# %% ex-5-1 wrong: weights that do not add up to 1
# says: divide by their sum
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).exp() @ values).reshape(query.shape)


# %% ex-5-1 wrong: the kv heads' axis is lost
# says: must return a tensor, of shape
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    return (grouped @ keys.mT * scaling).softmax(-1) @ values


# %% ex-5-1 wrong: the pool is cleaned first
# says: changed what it was given
def gather_attention(query, pool, block_table, seq_len, scaling):
    pool[pool == 1e4] = 0
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-2 no delegate: the package's OnlineSoftmax never has two blocks' states at once


# %% ex-5-2 right: torch.where, and one block's case at a time
def of_block(scores, values):
    largest = scores.max(dim=-1).values
    seen = ~torch.isinf(largest)
    weights = torch.where(seen[:, None], torch.exp(scores - largest[:, None]), 0.0)
    return largest, weights.sum(dim=1), torch.einsum("rs,sd->rd", weights, values)


def merged(one, other):
    (la, ta, ma), (lb, tb, mb) = one, other
    gap = torch.nan_to_num(la - lb, nan=0.0, posinf=math.inf, neginf=-math.inf)
    fa, fb = torch.exp(gap.clamp(max=0)), torch.exp((-gap).clamp(max=0))
    return torch.where(la > lb, la, lb), ta * fa + tb * fb, ma * fa[:, None] + mb * fb[:, None]


# %% ex-5-2 right: row by row, in plain Python
def of_block(scores, values):
    largest, total, mixed = [], [], []
    for row in scores.tolist():
        most = max(row)
        weights = [math.exp(s - most) if most > -math.inf else 0.0 for s in row]
        largest.append(most)
        total.append(sum(weights))
        mixed.append([sum(w * v for w, v in zip(weights, column)) for column in values.T.tolist()])
    return torch.tensor(largest), torch.tensor(total), torch.tensor(mixed)


def merged(one, other):
    rows = []
    for (la, ta, ma), (lb, tb, mb) in zip(zip(*one), zip(*other)):
        if lb > la:
            (la, ta, ma), (lb, tb, mb) = (lb, tb, mb), (la, ta, ma)
        f = torch.exp(lb - la) if lb > -math.inf else 0.0
        rows.append((la, ta + f * tb, ma + f * mb))
    return tuple(torch.stack(part) for part in zip(*rows))


# %% ex-5-2 right: one is enough: both as rows of a block
def of_block(scores, values):
    largest = scores.amax(-1)
    weights = (scores - largest.clamp(min=-1e30)[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest, total, mixed = (torch.stack(pair) for pair in zip(one, other))
    new = largest.amax(0)
    shrink = (largest - new.clamp(min=-1e30)).exp()
    return new, (total * shrink).sum(0), (mixed * shrink[..., None]).sum(0)


# %% ex-5-2 right: numpy arrays
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest.numpy(), weights.sum(-1).numpy(), (weights @ values).numpy()


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    mixed = one[2] * fa[:, None] + other[2] * fb[:, None]
    return largest.tolist(), total.numpy(), mixed.tolist()


# %% ex-5-2 wrong: softmax normalised per block
# says: normalised per block: how a block's total
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    total = weights.sum(-1)
    return largest, total, weights @ values / total[:, None]


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: a total of 1
# says: normalised per block: how a block's total
def of_block(scores, values):
    weights = scores.softmax(-1)
    return scores.amax(-1), torch.ones(len(scores)), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: exp without the largest
# says: take the row's largest score off first
def of_block(scores, values):
    weights = scores.exp()
    return scores.amax(-1), weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: NaN where nothing is seen
# says: needs something else to be measured against
def of_block(scores, values):
    largest = scores.amax(-1)
    weights = (scores - largest[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: one largest for all rows
# says: Each row has its own largest
def of_block(scores, values):
    largest = scores.max()
    weights = (scores - (largest if largest > -math.inf else 0.0)).exp()
    return largest.expand(len(scores)), weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: a row that sees nothing has largest 0
# says: it would outweigh scores near
def of_block(scores, values):
    largest = scores.amax(-1)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - largest[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: total counts the slots
# says: That counts slots
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, torch.full_like(largest, scores.shape[1]), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: max forgotten when merging
# says: The max was forgotten when merging
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    return one[0].maximum(other[0]), one[1] + other[1], one[2] + other[2]


# %% ex-5-2 wrong: only the first block shrinks
# says: either side may have to shrink
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    shrink = (one[0] - other[0]).exp()
    largest = one[0].maximum(other[0])
    return largest, one[1] * shrink + other[1], one[2] * shrink[:, None] + other[2]


# %% ex-5-2 wrong: only the second block shrinks
# says: either side may have to shrink
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    shrink = (other[0] - one[0]).exp()
    largest = one[0].maximum(other[0])
    return largest, one[1] + other[1] * shrink, one[2] + other[2] * shrink[:, None]


# %% ex-5-2 wrong: only the old side shrinks, against the new largest
# says: either side may have to shrink
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa = (one[0] - reference).exp()
    total = one[1] * fa + other[1]
    return largest, total, one[2] * fa[:, None] + other[2]


# %% ex-5-2 wrong: only the new side shrinks, against the new largest
# says: either side may have to shrink
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fb = (other[0] - reference).exp()
    total = one[1] + other[1] * fb
    return largest, total, one[2] + other[2] * fb[:, None]


# %% ex-5-2 wrong: only the old side shrinks, NaN where nothing is seen
# says: either side may have to shrink
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    fa = (one[0] - largest).exp()
    total = one[1] * fa + other[1]
    return largest, total, one[2] * fa[:, None] + other[2]


# %% ex-5-2 wrong: the logarithm of the sum
# says: Keep largest apart from the sum
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, (scores.logsumexp(-1) - reference).exp(), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: exp(new - old)
# says: exp(new - old) makes the old sums grow
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (reference - one[0]).exp(), (reference - other[0]).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: mixed does not shrink
# says: mixed was made with the same weights
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] + other[2]


# %% ex-5-2 wrong: the mean of two outputs
# says: the mean of two blocks' outputs
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, (one[2] / one[1][:, None] + other[2] / other[1][:, None]) / 2


# %% ex-5-2 wrong: divided when merging
# says: the mean of two blocks' outputs
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, (one[2] * fa[:, None] + other[2] * fb[:, None]) / total[:, None]


# %% ex-5-2 wrong: NaN where both see nothing
# says: needs something else to be measured against
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: the largest of the second block
# says: The largest of both blocks was asked for
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return other[0], total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: four numbers
# says: must return three tensors
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return scores, largest, weights.sum(-1), weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * fa + other[1] * fb
    return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-3 right: with 5.2's two functions, kv head by kv head
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    outputs = []
    for head, rows in enumerate(query.view(num_kv_heads, -1, head_dim)):
        state = None
        for i in range(cdiv(seq_len, block_size)):
            keys, values = pool[:, block_table[i], head][:, : seq_len - i * block_size]
            new = of_block(rows @ keys.T * scaling, values)
            state = new if state is None else merged(state, new)
        outputs.append(state[2] / state[1][:, None])
    return torch.cat(outputs)


# %% ex-5-3 right: the output so far and the log of the sum
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim)
    output, log_sum = torch.zeros_like(grouped), torch.full_like(grouped[..., :1], -math.inf)
    for i, block in enumerate(block_table):
        here = min(block_size, seq_len - i * block_size)
        if here <= 0:
            break
        scores = torch.einsum("kgd,kjd->kgj", grouped, pool[0, block, :, :here]) * scaling
        block_sum = scores.logsumexp(-1, keepdim=True)
        both = torch.logaddexp(log_sum, block_sum)
        weights = (scores - both).exp()
        output = output * (log_sum - both).exp() + weights @ pool[1, block, :, :here]
        log_sum = both
    return output.reshape(-1, head_dim)


# %% ex-5-3 right: slot by slot
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    outputs = []
    for h in range(len(query)):
        kv_head, largest, total, mixed = h * num_kv_heads // len(query), -math.inf, 0.0, 0.0
        for j in range(seq_len):
            key, value = pool[:, block_table[j // block_size], kv_head, j % block_size]
            score = float(query[h] @ key) * scaling
            new = max(largest, score)
            total = total * math.exp(largest - new) + math.exp(score - new)
            mixed = mixed * math.exp(largest - new) + value * math.exp(score - new)
            largest = new
        outputs.append(mixed / total)
    return torch.stack(outputs)


# %% ex-5-3 right: number by number, in plain Python
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    outputs = []
    for h in range(len(query)):
        kv_head, largest, total, mixed = (
            h * num_kv_heads // len(query),
            -math.inf,
            0.0,
            [0.0] * head_dim,
        )
        for j in range(seq_len):
            key, value = pool[:, block_table[j // block_size], kv_head, j % block_size]
            score = sum(query[h, d].item() * key[d].item() for d in range(head_dim)) * scaling
            new = max(largest, score)
            shrink, weight = math.exp(largest - new), math.exp(score - new)
            total = total * shrink + weight
            mixed = [mixed[d] * shrink + value[d].item() * weight for d in range(head_dim)]
            largest = new
        outputs.append([number / total for number in mixed])
    return outputs


# %% ex-5-3 delegates: the package's own
# says: hands the work to the package
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    from minikv.model.kernels.online import OnlineSoftmax

    softmax = OnlineSoftmax(query.view(num_kv_heads, -1, head_dim) * scaling)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        softmax.add_block(keys, values, torch.ones(1, keys.shape[1]).bool())
    return softmax.result().reshape(query.shape)


# %% ex-5-3 wrong: gathered after all
# says: read one block at a time
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-3 wrong: all scores kept
# says: read one block at a time
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped, scores = query.view(num_kv_heads, -1, head_dim) * scaling, []
    for start in range(0, seq_len, block_size):
        keys = pool[0, block_table[start // block_size], :, : seq_len - start]
        scores.append(grouped @ keys.mT)
    weights, mixed = torch.cat(scores, -1).softmax(-1), 0
    for start in range(0, seq_len, block_size):
        values = pool[1, block_table[start // block_size], :, : seq_len - start]
        mixed = mixed + weights[..., start : start + block_size] @ values
    return mixed.reshape(query.shape)


# %% ex-5-3 wrong: gathered in numpy
# says: where this check cannot see what is collected
def online_attention(query, pool, block_table, seq_len, scaling):
    gathered = torch.as_tensor(pool.numpy()[:, block_table])
    keys, values = gathered.transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-3 wrong: all scores kept in a list
# says: together were kept at the same time
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped, scores = query.view(num_kv_heads, -1, head_dim) * scaling, []
    for start in range(0, seq_len, block_size):
        keys = pool[0, block_table[start // block_size], :, : seq_len - start]
        scores.append(grouped @ keys.mT)
    largest, total, mixed = scores[0].amax(-1, keepdim=True), 0, 0
    for part in scores:
        largest = largest.maximum(part.amax(-1, keepdim=True))
    for i, part in enumerate(scores):
        weights = (part - largest).exp()
        total = total + weights.sum(-1, keepdim=True)
        mixed = mixed + weights @ pool[1, block_table[i], :, : seq_len - i * block_size]
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: the tail of the last block attended
# says: were read as if they were tokens
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size]]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: masked, not sliced
# says: 0 x NaN is NaN. Slice the values
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size]]
        scores = grouped @ keys.mT
        scores[..., seq_len - start :] = -math.inf
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: softmax normalised per block, added
# says: normalised per block: the blocks' totals differ
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped, output = query.view(num_kv_heads, -1, head_dim) * scaling, 0
    starts = range(0, seq_len, block_size)
    for start in starts:
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        output = output + (grouped @ keys.mT).softmax(-1) @ values
    return output.reshape(query.shape)


# %% ex-5-3 wrong: softmax normalised per block, averaged
# says: normalised per block: the blocks' totals differ
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped, output = query.view(num_kv_heads, -1, head_dim) * scaling, 0
    starts = range(0, seq_len, block_size)
    for start in starts:
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        output = output + (grouped @ keys.mT).softmax(-1) @ values
    return output.reshape(query.shape) / len(starts)


# %% ex-5-3 wrong: max forgotten when merging
# says: The max was forgotten when merging
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total = total + weights.sum(-1, keepdim=True)
        mixed = mixed + weights @ values
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: the running max without shrinking
# says: The max was forgotten when merging
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        weights = (scores - new).exp()
        total = total + weights.sum(-1, keepdim=True)
        mixed = mixed + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: measured against this block's largest
# says: not this block's
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = scores.amax(-1, keepdim=True)
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: the first block's largest kept
# says: was never updated
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest if start else scores.amax(-1, keepdim=True)
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: a running minimum
# says: not the smaller
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = scores.amax(-1, keepdim=True)
        new = largest.minimum(new) if start else new
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: one largest for all heads
# says: Each query head has its own largest
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.max())
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: one largest for each kv head
# says: Each query head has its own largest
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax((-2, -1), keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: largest starts at 0
# says: starts at -inf, not at 0
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.zeros_like(grouped[..., :1])
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: only full blocks read
# says: where it is only partly full, too
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len - block_size + 1, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: only total shrinks
# says: The max was forgotten when merging
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: exp without the largest
# says: take the largest score so far off first
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        weights = scores.exp()
        total = total + weights.sum(-1, keepdim=True)
        mixed = mixed + weights @ values
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: the shrinking turned round
# says: exp(new - old) makes the old sums grow
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink = (new - largest).exp() if start else torch.zeros_like(new)
        weights = (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: only the last block is left
# says: Only the last block is left
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = scores.amax(-1, keepdim=True)
        weights = (scores - new).exp()
        total = weights.sum(-1, keepdim=True)
        mixed = weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: blocks must be in order
# says: sorting the table moves the block
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    block_table = sorted(block_table)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: blocks taken for neighbours
# says: not counted on from the first
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[0] + start // block_size, :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: kv heads taken in turns
# says: 0 and 1 share the first
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(-1, num_kv_heads, head_dim).transpose(0, 1) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).transpose(0, 1).reshape(query.shape)


# %% ex-5-3 wrong: its own token left out
# says: slot seq_len - 1 is read, too
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    if seq_len == 1:
        return torch.zeros_like(query)
    for start in range(0, seq_len - 1, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - 1 - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: scaled twice
# says: scaling was used twice
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT * scaling
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 wrong: not divided
# says: divide by their sum
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in range(0, seq_len, block_size):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed).reshape(query.shape)


# %% ex-5-4 right: nested lists
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return [[j <= num_computed_tokens + i for j in range(num_slots)] for i in range(num_new_tokens)]


# %% ex-5-4 right: rows of a triangle
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    whole = torch.ones(num_slots, num_slots).tril()
    return whole[num_computed_tokens : num_computed_tokens + num_new_tokens]


# %% ex-5-4 right: a generator of rows
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    for i in range(num_new_tokens):
        seen = num_computed_tokens + i + 1
        yield [True] * seen + [False] * (num_slots - seen)


# %% ex-5-4 delegates: the package's gather
# says: hands the work to the package
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    from minikv.model.kernels.gather import QueryGroup

    positions = torch.arange(num_new_tokens)[None] + num_computed_tokens
    group = QueryGroup(0, 1, num_new_tokens, 1, positions, positions)
    return group.bias(num_slots, None, torch.float32)[0, 0, 0] == 0


# %% ex-5-4 wrong: the key length is the whole prompt
# says: The key length is what has been written
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return torch.arange(num_slots).expand(num_new_tokens, -1) < num_tokens


# %% ex-5-4 wrong: the chunk taken for the prompt's end
# says: The key length is what has been written
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    mask = torch.ones(num_new_tokens, num_slots).tril(num_tokens - num_new_tokens)
    return mask.bool()


# %% ex-5-4 wrong: the triangle at the end of the slots
# says: counted back from the last slot
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return torch.ones(num_new_tokens, num_slots).tril(num_slots - num_new_tokens).bool()


# %% ex-5-4 wrong: the triangle at the left, as if the cache were empty
# says: A query's position counts from num_computed_tokens
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return torch.ones(num_new_tokens, num_slots).tril().bool()


# %% ex-5-4 wrong: the triangle of an empty cache
# says: The triangle of an empty cache
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return torch.ones(num_new_tokens, num_new_tokens).tril().bool()


# %% ex-5-4 wrong: a column for each token of the prompt
# says: The prompt's length is not the length of what was gathered
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return torch.ones(num_new_tokens, num_tokens).tril(num_computed_tokens).bool()


# %% ex-5-4 wrong: a column for each written token
# says: the slots that hold nothing yet need their False
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    written = num_computed_tokens + num_new_tokens
    return torch.ones(num_new_tokens, written).tril(num_computed_tokens).bool()


# %% ex-5-4 wrong: query position off by one, itself hidden
# says: A token sees itself
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return torch.ones(num_new_tokens, num_slots).tril(num_computed_tokens - 1).bool()


# %% ex-5-4 wrong: query position off by one, the next one seen
# says: not one further
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return torch.ones(num_new_tokens, num_slots).tril(num_computed_tokens + 1).bool()


# %% ex-5-4 wrong: all of the chunk sees all of it
# says: must not see those behind them
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    written = num_computed_tokens + num_new_tokens
    return torch.arange(num_slots).expand(num_new_tokens, -1) < written


# %% ex-5-4 wrong: everything seen
# says: behind the last token hold nothing
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return torch.ones(num_new_tokens, num_slots).bool()


# %% ex-5-4 wrong: the cache not seen
# says: and what was computed before as well
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    mask = torch.ones(num_new_tokens, num_slots).tril(num_computed_tokens).bool()
    mask[:, :num_computed_tokens] = False
    return mask


# %% ex-5-4 wrong: True where hidden
# says: True means that the query may see
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return torch.ones(num_new_tokens, num_slots).triu(num_computed_tokens + 1).bool()


# %% ex-5-4 wrong: a bias
# says: it is a mask, not a bias
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    hidden = torch.ones(num_new_tokens, num_slots).triu(num_computed_tokens + 1).bool()
    return torch.zeros(num_new_tokens, num_slots).masked_fill(hidden, -math.inf)


# %% ex-5-4-b right: nested lists
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    rows = range(num_computed_tokens, num_computed_tokens + num_new_tokens)
    return [[p - window < j <= p for j in range(num_slots)] for p in rows]


# %% ex-5-4-b right: two triangles
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    ones = torch.ones(num_new_tokens, num_slots)
    return ones.tril(num_computed_tokens).triu(num_computed_tokens - window + 1) == 1


# %% ex-5-4-b right: a generator of rows
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    for position in range(num_computed_tokens, num_computed_tokens + num_new_tokens):
        yield [position - window < j <= position for j in range(num_slots)]


# %% ex-5-4-b delegates: the package's gather
# says: hands the work to the package
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    from minikv.model.kernels.gather import QueryGroup

    positions = torch.arange(num_new_tokens)[None] + num_computed_tokens
    group = QueryGroup(0, 1, num_new_tokens, 1, positions, positions)
    return group.bias(num_slots, window, torch.float32)[0, 0, 0] == 0


# %% ex-5-4-b wrong: a slice that ends below 0
# says: a negative index counts from the end
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    mask = torch.zeros(num_new_tokens, num_slots)
    for i in range(num_new_tokens):
        position = num_computed_tokens + i
        mask[i, : position + 1] = 1
        mask[i, : position - window + 1] = 0
    return mask


# %% ex-5-4-b wrong: one too many
# says: one slot too many is seen
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot <= position) & (slot >= position - window)


# %% ex-5-4-b wrong: one too few
# says: one slot too few is seen
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot <= position) & (slot > position - window + 1)


# %% ex-5-4-b wrong: one window for all rows, the last one's
# says: the first row's window is not
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot <= position) & (slot > position[-1] - window)


# %% ex-5-4-b wrong: one window for all rows, the first one's
# says: the last row's window is not
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot <= position) & (slot > position[0] - window)


# %% ex-5-4-b wrong: the window stands at the beginning
# says: not the first of the sequence
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot <= position) & (slot < window)


# %% ex-5-4-b wrong: what lies ahead is seen
# says: what lies ahead stays hidden
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot > position - window) & (slot <= position[-1])


# %% ex-5-4-b wrong: a window to both sides
# says: what lies ahead stays hidden
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot - position).abs() < window


# %% ex-5-4-b wrong: no window
# says: The window was not used
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return slot <= position


# %% ex-5-4-b wrong: a window within the chunk
# says: was counted within the chunk
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot <= position) & (slot > position - window) & (slot >= num_computed_tokens)


# %% ex-5-4-b wrong: the chunk taken for the prompt's end
# says: The key length is what has been written
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot <= position - position[-1] + num_tokens - 1) & (slot > position - window)


# %% ex-5-4-b wrong: itself hidden
# says: A token sees itself
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot < position) & (slot > position - window)


# %% ex-5-4-b wrong: True where hidden
# says: True means that the query may see
def windowed_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[:, None]
    slot = torch.arange(num_slots)[None]
    return (slot > position) & (slot > position - window)


# %% ex-5-5 no delegate: the package measures steps, it has no such count


# %% ex-5-5 right: the spec's own properties
def step_bytes(spec, seq_lens, block_size):
    token = spec.kv_bytes_per_token
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.parameter_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 right: request by request, layer by layer
def step_bytes(spec, seq_lens, block_size):
    in_place = gathered = entries = 0
    for seq_len in seq_lens:
        blocks = -(-seq_len // block_size)
        entries += blocks
        for _layer in range(spec.num_layers):
            row = spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
            in_place += seq_len * row + seq_len * row
            gathered += 3 * (blocks * block_size * row) * 2
    return [spec.num_parameters * spec.dtype_bytes, in_place, gathered, entries * 4]


# %% ex-5-5 wrong: V's bytes forgotten
# says: V's bytes were forgotten
def step_bytes(spec, seq_lens, block_size):
    token = spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: kv heads repeated for the query heads
# says: share one reading of K and V
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_query_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: one layer
# says: Every layer has K and V of its own
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: numbers, not bytes
# says: Numbers were counted, not bytes
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: 4 bytes for every number
# says: Not every model takes 4 bytes
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * 4,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: 4 bytes for every number of K and V
# says: Not every model takes 4 bytes
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: weights for each request
# says: read once for all requests
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        len(seq_lens) * spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: weights for each layer
# says: counts the weights of all layers already
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_layers * spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: the step's own token left out
# says: is counted in seq_len
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(n - 1, block_size) for n in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(n - 1 for n in seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * sum(cdiv(n, block_size) for n in seq_lens),
    )


# %% ex-5-5 wrong: one slot for each request
# says: that query reads the whole context
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        len(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: in place reads whole blocks
# says: the tail of the last block is not read
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        num_blocks * block_size * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: as long as the longest
# says: not the longest of the batch
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        len(seq_lens) * max(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: gathered with the chapter's padding
# says: not the longest of the batch
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = len(seq_lens) * cdiv(max(seq_lens), block_size)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: tables with the chapter's padding
# says: not the longest of the batch
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * len(seq_lens) * cdiv(max(seq_lens), block_size),
    )


# %% ex-5-5 wrong: gather without the tails
# says: the tail of the last one is moved as well
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * sum(seq_lens) * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: gather reads only
# says: The copy is written, too
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: gather reads and writes
# says: After the copy is written attention reads it
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        2 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: a table per layer
# says: One table serves all layers
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks * spec.num_layers,
    )


# %% ex-5-5 wrong: an entry for each token
# says: A table has an entry for each block
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * sum(seq_lens),
    )


# %% ex-5-5 wrong: rounded down
# says: last block has an entry, too
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * sum(n // block_size for n in seq_lens),
    )


# %% ex-5-5 wrong: one more block, full or not
# says: A full last block needs no further one
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(seq_len // block_size + 1 for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


# %% ex-5-5 wrong: one more entry, full or not
# says: A full last block needs no further one
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    return (
        spec.num_parameters * spec.dtype_bytes,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * sum(n // block_size + 1 for n in seq_lens),
    )


# %% ex-5-5 wrong: entries of all contexts together
# says: each has a last block of its own
def step_bytes(spec, seq_lens, block_size):
    token = spec.kv_bytes_per_token
    held = sum(cdiv(n, block_size) for n in seq_lens) * block_size
    tables = 4 * cdiv(sum(seq_lens), block_size)
    return spec.parameter_bytes, sum(seq_lens) * token, 3 * held * token, tables


# %% ex-5-5 wrong: one sum of all
# says: must return 4 numbers
def step_bytes(spec, seq_lens, block_size):
    return spec.parameter_bytes + sum(seq_lens) * spec.kv_bytes_per_token
