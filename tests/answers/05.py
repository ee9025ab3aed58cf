# ruff: noqa: B905, C408, C417, E402, E741, F811, F821, F841, RUF059
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


# %% ex-5-1 right: functools.partial
from functools import partial


def _ga(causal, query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (grouped @ keys.mT * scaling).softmax(-1)
    return (weights @ values).reshape(query.shape)


gather_attention = partial(_ga, False)


# %% ex-5-1 right: an object with __call__
class Attend:
    def __call__(self, query, pool, block_table, seq_len, scaling):
        keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
        grouped = query.view(len(keys), -1, query.shape[-1])
        return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


gather_attention = Attend()


# %% ex-5-1 right: torch's own attention on collected blocks
import torch.nn.functional as F


def gather_attention(query, pool, block_table, seq_len, scaling):
    kv = torch.cat([pool[:, b] for b in block_table], dim=2)[:, :, :seq_len]
    out = F.scaled_dot_product_attention(
        query[None, :, None], kv[0][None], kv[1][None], scale=scaling, enable_gqa=True
    )
    return out[0, :, 0]


# %% ex-5-1 right: hidden by -inf
def gather_attention(query, pool, block_table, seq_len, scaling):
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)
    grouped = query.view(len(keys), -1, query.shape[-1])
    weights = (
        (grouped @ keys.mT * scaling)
        .masked_fill(torch.arange(keys.shape[1]) >= seq_len, -math.inf)
        .softmax(-1)
    )
    return (weights @ values).reshape(query.shape)


# %% ex-5-1 right: einsum
def gather_attention(query, pool, block_table, seq_len, scaling):
    H, (_, _, K, B, D) = len(query), pool.shape
    k, v = (
        torch.stack([pool[w, block_table[j // B], :, j % B] for j in range(seq_len)])
        for w in (0, 1)
    )
    k, v = (x.repeat_interleave(H // K, dim=1) for x in (k, v))
    s = torch.einsum("hd,shd->hs", query, k) * scaling
    return torch.einsum("hs,shd->hd", s.softmax(-1), v)


# %% ex-5-1 delegates: the package's gather
# says: hands the work to the package
def gather_attention(query, pool, block_table, seq_len, scaling):
    from minikv.model.backends import AttentionMetadata
    from minikv.model.kernels import gather

    table, one = torch.tensor([block_table]).int(), torch.tensor([0, 1]).int()
    metadata = AttentionMetadata(
        table, one, torch.tensor([seq_len]).int(), None, 1, seq_len
    )
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
# -     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
# +     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)
# -     weights = (grouped @ keys.mT * scaling).softmax(-1)
# +     weights = (grouped @ keys.mT * scaling).softmax(-1)
# +     weights[..., seq_len:] = 0


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
# - keys, values
# + values, keys


# %% ex-5-1 wrong: the last block dropped unless it is full
# says: where it is only partly full, too
# -     """
# -     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
# +     """
# +     block_table = block_table[: seq_len // pool.shape[3]]
# +     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]


# %% ex-5-1 wrong: softmax over the query heads of a group
# says: Softmax goes over the slots
# -     weights = (grouped @ keys.mT * scaling).softmax(-1)
# +     weights = (grouped @ keys.mT * scaling).softmax(-2)


# %% ex-5-1 wrong: softmax over the kv heads
# says: Softmax goes over the slots
# -     weights = (grouped @ keys.mT * scaling).softmax(-1)
# +     weights = (grouped @ keys.mT * scaling).softmax(0)


# %% ex-5-1 wrong: right in small cases: eight blocks at most
# says: output is wrong in
# -     """
# -     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
# +     """
# +     block_table = block_table[:8]
# +     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]


# %% ex-5-1 wrong: right in small cases: eight numbers of each head
# says: your gather_attention is wrong, though it was right in all cases above
# - grouped @ keys.mT
# + grouped[..., :8] @ keys[..., :8].mT


# %% ex-5-1 wrong: reshape instead of transpose
# says: reshape does not swap axes
def gather_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, _, head_dim = pool.shape
    keys, values = pool[:, block_table].reshape(2, num_kv_heads, -1, head_dim)[
        :, :, :seq_len
    ]
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
# -     weights = (grouped @ keys.mT * scaling).softmax(-1)
# -     return (weights @ values).reshape(query.shape)
# +     return ((grouped @ keys.mT).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-1 wrong: the usual scaling, not the given one
# says: a model may set it to something else
# - * scaling
# + / math.sqrt(query.shape[-1])


# %% ex-5-1 wrong: weights that do not add up to 1
# says: divide by their sum
# -     weights = (grouped @ keys.mT * scaling).softmax(-1)
# -     return (weights @ values).reshape(query.shape)
# +     return ((grouped @ keys.mT * scaling).exp() @ values).reshape(query.shape)


# %% ex-5-1 wrong: the kv heads' axis is lost
# says: must return a tensor, of shape
# -     weights = (grouped @ keys.mT * scaling).softmax(-1)
# -     return (weights @ values).reshape(query.shape)
# +     return (grouped @ keys.mT * scaling).softmax(-1) @ values


# %% ex-5-1 wrong: the pool is cleaned first
# says: changed what it was given
def gather_attention(query, pool, block_table, seq_len, scaling):
    pool[pool == 1e4] = 0
    keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
    grouped = query.view(len(keys), -1, query.shape[-1])
    return ((grouped @ keys.mT * scaling).softmax(-1) @ values).reshape(query.shape)


# %% ex-5-1 wrong: the table's last block is the partly full one
# says: were read as if they were tokens
# -     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
# +     keys, values = (
# +         pool[:, block_table]
# +         .transpose(1, 2)
# +         .flatten(2, 3)[
# +             :,
# +             :,
# +             : (len([b for b in block_table if b != pool.shape[1] - 1]) - 1)
# +             * pool.shape[3]
# +             + (seq_len - 1) % pool.shape[3]
# +             + 1,
# +         ]
# +     )


# %% ex-5-1 wrong: the table's last blocks
# says: counted from its front, not from its end
# -     """
# -     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
# +     """
# +     real = [b for b in block_table if b < pool.shape[1] - 1]
# +     block_table = real[-(-(-seq_len // pool.shape[3])) :]
# +     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]


# %% ex-5-1 wrong: six blocks at most
# says: output is wrong in
# -     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
# +     keys, values = pool[:, block_table[:6]].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]


# %% ex-5-1 wrong: scores in half precision
# says: output is wrong in
# -     weights = (grouped @ keys.mT * scaling).softmax(-1)
# +     grouped, keys = grouped.half(), keys.half()
# +     weights = (grouped @ keys.mT * scaling).softmax(-1).float()


# %% ex-5-1 wrong: reads one beyond
# says: output is wrong in
# -     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
# +     keys, values = pool[:, block_table].transpose(1, 2).flatten(2, 3)[:, :, : seq_len + 1]


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
    return (
        torch.where(la > lb, la, lb),
        ta * fa + tb * fb,
        ma * fa[:, None] + mb * fb[:, None],
    )


# %% ex-5-2 right: row by row, in plain Python
def of_block(scores, values):
    largest, total, mixed = [], [], []
    for row in scores.tolist():
        most = max(row)
        weights = [math.exp(s - most) if most > -math.inf else 0.0 for s in row]
        largest.append(most)
        total.append(sum(weights))
        mixed.append(
            [sum(w * v for w, v in zip(weights, column)) for column in values.T.tolist()]
        )
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


# %% ex-5-2 right: functools.partial
def _of(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def _merge(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * shrink + other[1] * shrink_other
    return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]


from functools import partial

of_block, merged = partial(_of), partial(_merge)


# %% ex-5-2 right: objects with __call__
def _of(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def _merge(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * shrink + other[1] * shrink_other
    return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]


class A:
    def __init__(self, f):
        self.f = f

    def __call__(self, *a):
        return self.f(*a)


of_block, merged = A(_of), A(_merge)


# %% ex-5-2 right: nested lists
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest.tolist(), weights.sum(-1).tolist(), (weights @ values).tolist()


def merged(one, other):
    one, other = [torch.as_tensor(x) for x in one], [torch.as_tensor(x) for x in other]
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * shrink + other[1] * shrink_other
    return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]


# %% ex-5-2 right: generators
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    yield largest
    yield weights.sum(-1)
    yield weights @ values


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * shrink + other[1] * shrink_other
    return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]


# %% ex-5-2 right: a case of its own for equal largest scores
def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return largest, weights.sum(-1), weights @ values


def merged(one, other):
    if torch.equal(one[0], other[0]):
        return one[0], one[1] + other[1], one[2] + other[2]
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * shrink + other[1] * shrink_other
    return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]


# %% ex-5-2 right: a named tuple
from collections import namedtuple

State = namedtuple("State", "largest total mixed")


def of_block(scores, values):
    largest = scores.amax(-1)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - reference[:, None]).exp()
    return State(largest, weights.sum(-1), weights @ values)


def merged(one, other):
    largest = one[0].maximum(other[0])
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
    total = one[1] * shrink + other[1] * shrink_other
    return State(
        largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
    )


# %% ex-5-2 wrong: softmax normalised per block
# says: normalised per block: how a block's total
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     return largest, weights.sum(-1), weights @ values
# +     total = weights.sum(-1)
# +     return largest, total, weights @ values / total[:, None]
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
# +     total = one[1] * fa + other[1] * fb
# +     return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


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
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# - weights.sum(-1
# + torch.full_like(largest, scores.shape[1]
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
# +     total = one[1] * fa + other[1] * fb
# +     return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: max forgotten when merging
# says: The max was forgotten when merging
# -     largest = one[0].maximum(other[0])
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     return one[0].maximum(other[0]), one[1] + other[1], one[2] + other[2]


# %% ex-5-2 wrong: only the first block shrinks
# says: either side may have to shrink
# -     """The same three of both blocks together, from those of each."""
# +     """The same three of both blocks together, from those of each."""
# +     shrink = (one[0] - other[0]).exp()
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     return largest, one[1] * shrink + other[1], one[2] * shrink[:, None] + other[2]


# %% ex-5-2 wrong: only the second block shrinks
# says: either side may have to shrink
# -     """The same three of both blocks together, from those of each."""
# +     """The same three of both blocks together, from those of each."""
# +     shrink = (other[0] - one[0]).exp()
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     return largest, one[1] + other[1] * shrink, one[2] + other[2] * shrink[:, None]


# %% ex-5-2 wrong: only the old side shrinks, against the new largest
# says: either side may have to shrink
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa = (one[0] - reference).exp()
# +     total = one[1] * fa + other[1]
# +     return largest, total, one[2] * fa[:, None] + other[2]


# %% ex-5-2 wrong: only the new side shrinks, against the new largest
# says: either side may have to shrink
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fb = (other[0] - reference).exp()
# +     total = one[1] + other[1] * fb
# +     return largest, total, one[2] + other[2] * fb[:, None]


# %% ex-5-2 wrong: only the old side shrinks, NaN where nothing is seen
# says: either side may have to shrink
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa = (one[0] - largest).exp()
# +     total = one[1] * fa + other[1]
# +     return largest, total, one[2] * fa[:, None] + other[2]


# %% ex-5-2 wrong: the logarithm of the sum
# says: Keep largest apart from the sum
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# - weights.sum(-1
# + (scores.logsumexp(-1) - reference).exp(
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
# +     total = one[1] * fa + other[1] * fb
# +     return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: exp(new - old)
# says: exp(new - old) makes the old sums grow
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa, fb = (reference - one[0]).exp(), (reference - other[0]).exp()
# +     total = one[1] * fa + other[1] * fb
# +     return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: mixed does not shrink
# says: mixed was made with the same weights
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
# +     total = one[1] * fa + other[1] * fb
# +     return largest, total, one[2] + other[2]


# %% ex-5-2 wrong: the mean of two outputs
# says: the mean of two blocks' outputs
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
# +     total = one[1] * fa + other[1] * fb
# +     return largest, total, (one[2] / one[1][:, None] + other[2] / other[1][:, None]) / 2


# %% ex-5-2 wrong: divided when merging
# says: the mean of two blocks' outputs
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
# +     total = one[1] * fa + other[1] * fb
# +     return (
# +         largest,
# +         total,
# +         (one[2] * fa[:, None] + other[2] * fb[:, None]) / total[:, None],
# +     )


# %% ex-5-2 wrong: NaN where both see nothing
# says: needs something else to be measured against
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     reference = largest
# +     fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
# +     total = one[1] * fa + other[1] * fb
# +     return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: the largest of the second block
# says: The largest of both blocks was asked for
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
# +     total = one[1] * fa + other[1] * fb
# +     return other[0], total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: four numbers
# says: must return three tensors
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     return largest, weights.sum(-1), weights @ values
# +     return scores, largest, weights.sum(-1), weights @ values
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# -     total = one[1] * shrink + other[1] * shrink_other
# -     return largest, total, one[2] * shrink[:, None] + other[2] * shrink_other[:, None]
# +     fa, fb = (one[0] - reference).exp(), (other[0] - reference).exp()
# +     total = one[1] * fa + other[1] * fb
# +     return largest, total, one[2] * fa[:, None] + other[2] * fb[:, None]


# %% ex-5-2 wrong: largest is at least -100
# says: largest is wrong in
# -     largest = scores.amax(-1)
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# +     largest = scores.amax(-1).clamp(min=-100)


# %% ex-5-2 wrong: last score for largest
# says: largest is wrong in
# -     largest = scores.amax(-1)
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# +     largest = scores[:, -1]


# %% ex-5-2 wrong: a row that sees nothing hides the others
# says: largest is wrong in
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     """The same three of both blocks together, from those of each."""
# +     """The same three of both blocks together, from those of each."""
# +     if bool((one[0] == -math.inf).any()):
# +         return other
# +     if bool((other[0] == -math.inf).any()):
# +         return one


# %% ex-5-2 wrong: equal scores once
# says: total is wrong in
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     weights = (scores - reference[:, None]).exp()
# +     weights = (scores - reference[:, None]).exp()
# +     if (
# +         scores.shape[1] > 1
# +         and bool((scores[:, 0] == scores[:, 1]).all())
# +         and bool((scores[:, 0] > -math.inf).all())
# +     ):
# +         weights[:, 1] = 0


# %% ex-5-2 wrong: the eight largest scores
# says: total is wrong in
# -     """
# -     largest = scores.amax(-1)
# +     """
# +     if scores.shape[1] > 8:
# +         scores = scores.masked_fill(scores < scores.topk(8, -1)[0][:, -1:], -math.inf)
# +     largest = scores.amax(-1)
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)


# %% ex-5-2 wrong: one case for all rows
# says: total is wrong in
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# -     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()
# +     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     if bool((one[0] > other[0]).any()):
# +         reference = one[0].masked_fill(one[0] == -math.inf, 0.0)
# +     shrink, shrink_other = (one[0] - reference).exp(), (other[0] - reference).exp()


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
    output, log_sum = (
        torch.zeros_like(grouped),
        torch.full_like(grouped[..., :1], -math.inf),
    )
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
        kv_head, largest, total, mixed = (
            h * num_kv_heads // len(query),
            -math.inf,
            0.0,
            0.0,
        )
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
            score = (
                sum(query[h, d].item() * key[d].item() for d in range(head_dim)) * scaling
            )
            new = max(largest, score)
            shrink, weight = math.exp(largest - new), math.exp(score - new)
            total = total * shrink + weight
            mixed = [
                mixed[d] * shrink + value[d].item() * weight for d in range(head_dim)
            ]
            largest = new
        outputs.append([number / total for number in mixed])
    return outputs


# %% ex-5-3 right: functools.partial
from functools import partial


def _oa(x, query, pool, block_table, seq_len, scaling):
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
    return (mixed / total).reshape(query.shape)


online_attention = partial(_oa, None)


# %% ex-5-3 right: an object with __call__
class Online:
    def __call__(self, query, pool, block_table, seq_len, scaling):
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
        return (mixed / total).reshape(query.shape)


online_attention = Online()


# %% ex-5-3 right: backwards over the blocks
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
    for start in reversed(range(0, seq_len, block_size)):
        keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
        scores = grouped @ keys.mT
        new = largest.maximum(scores.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (scores - new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        largest = new
    return (mixed / total).reshape(query.shape)


# %% ex-5-3 right: head by head
def online_attention(query, pool, block_table, seq_len, scaling):
    K, B, D = pool.shape[2:]
    out = torch.empty_like(query)
    for h in range(len(query)):
        kv = h // (len(query) // K)
        m, t, o = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(D)
        for i, block in enumerate(block_table):
            n = min(B, seq_len - i * B)
            if n <= 0:
                break
            s = pool[0, block, kv, :n] @ query[h] * scaling
            new = torch.maximum(m, s.max())
            w = torch.exp(s - new)
            t = t * torch.exp(m - new) + w.sum()
            o = o * torch.exp(m - new) + w @ pool[1, block, kv, :n]
            m = new
        out[h] = o / t
    return out


# %% ex-5-3 right: logsumexp per block
def online_attention(query, pool, block_table, seq_len, scaling):
    K, B, D = pool.shape[2:]
    q = query.view(K, -1, D) * scaling
    lse, out = None, None
    for i in range(-(-seq_len // B)):
        k, v = pool[:, block_table[i], :, : seq_len - i * B]
        s = q @ k.mT
        l, o = s.logsumexp(-1, keepdim=True), s.softmax(-1) @ v
        if lse is None:
            lse, out = l, o
        else:
            new = torch.logaddexp(lse, l)
            lse, out = new, out * (lse - new).exp() + o * (l - new).exp()
    return out.reshape(query.shape)


# %% ex-5-3 right: largest starts at the lowest float
def online_attention(query, pool, block_table, seq_len, scaling):
    _, _, num_kv_heads, block_size, head_dim = pool.shape
    grouped = query.view(num_kv_heads, -1, head_dim) * scaling
    largest = torch.full_like(grouped[..., :1], torch.finfo(torch.float32).min)
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
# -         # The tail is cut off, not masked: 0 times NaN is NaN.
# -         keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
# +         keys, values = pool[:, block_table[start // block_size]]


# %% ex-5-3 wrong: masked, not sliced
# says: 0 x NaN is NaN. Slice the values
# -         # The tail is cut off, not masked: 0 times NaN is NaN.
# -         keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
# +         keys, values = pool[:, block_table[start // block_size]]
# -         scores = grouped @ keys.mT
# +         scores = grouped @ keys.mT
# +         scores[..., seq_len - start :] = -math.inf


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
# -         new = largest.maximum(scores.amax(-1, keepdim=True))
# -         shrink, weights = (largest - new).exp(), (scores - new).exp()
# -         total = total * shrink + weights.sum(-1, keepdim=True)
# -         mixed = mixed * shrink + weights @ values
# -         largest = new
# +         weights = (scores - scores.amax(-1, keepdim=True)).exp()
# +         total = total + weights.sum(-1, keepdim=True)
# +         mixed = mixed + weights @ values


# %% ex-5-3 wrong: the running max without shrinking
# says: The max was forgotten when merging
# -         shrink, weights = (largest - new).exp(), (scores - new).exp()
# -         total = total * shrink + weights.sum(-1, keepdim=True)
# -         mixed = mixed * shrink + weights @ values
# +         weights = (scores - new).exp()
# +         total = total + weights.sum(-1, keepdim=True)
# +         mixed = mixed + weights @ values


# %% ex-5-3 wrong: measured against this block's largest
# says: not this block's
# - largest.maximum(scores.amax(-1, keepdim=True)
# + scores.amax(-1, keepdim=True


# %% ex-5-3 wrong: the first block's largest kept
# says: was never updated
# - largest.maximum(scores.amax(-1, keepdim=True)
# + largest if start else scores.amax(-1, keepdim=True


# %% ex-5-3 wrong: a running minimum
# says: not the smaller
# -         new = largest.maximum(scores.amax(-1, keepdim=True))
# +         new = scores.amax(-1, keepdim=True)
# +         new = largest.minimum(new) if start else new


# %% ex-5-3 wrong: one largest for all heads
# says: Each query head has its own largest
# - scores.amax(-1, keepdim=True
# + scores.max(


# %% ex-5-3 wrong: one largest for each kv head
# says: Each query head has its own largest
# -         new = largest.maximum(scores.amax(-1, keepdim=True))
# +         new = largest.maximum(scores.amax((-2, -1), keepdim=True))


# %% ex-5-3 wrong: largest starts at 0
# says: starts at -inf, not at 0
# - torch.full_like(grouped[..., :1], -math.inf
# + torch.zeros_like(grouped[..., :1]


# %% ex-5-3 wrong: only full blocks read
# says: where it is only partly full, too
# -     for start in range(0, seq_len, block_size):
# +     for start in range(0, seq_len - block_size + 1, block_size):


# %% ex-5-3 wrong: only total shrinks
# says: The max was forgotten when merging
# -         mixed = mixed * shrink + weights @ values
# +         mixed = mixed + weights @ values


# %% ex-5-3 wrong: exp without the largest
# says: take the largest score so far off first
# -         new = largest.maximum(scores.amax(-1, keepdim=True))
# -         shrink, weights = (largest - new).exp(), (scores - new).exp()
# -         total = total * shrink + weights.sum(-1, keepdim=True)
# -         mixed = mixed * shrink + weights @ values
# -         largest = new
# +         weights = scores.exp()
# +         total = total + weights.sum(-1, keepdim=True)
# +         mixed = mixed + weights @ values


# %% ex-5-3 wrong: the shrinking turned round
# says: exp(new - old) makes the old sums grow
# -         shrink, weights = (largest - new).exp(), (scores - new).exp()
# +         shrink = (new - largest).exp() if start else torch.zeros_like(new)
# +         weights = (scores - new).exp()


# %% ex-5-3 wrong: only the last block is left
# says: Only the last block is left
# -         new = largest.maximum(scores.amax(-1, keepdim=True))
# -         shrink, weights = (largest - new).exp(), (scores - new).exp()
# -         total = total * shrink + weights.sum(-1, keepdim=True)
# -         mixed = mixed * shrink + weights @ values
# +         new = scores.amax(-1, keepdim=True)
# +         weights = (scores - new).exp()
# +         total = weights.sum(-1, keepdim=True)
# +         mixed = weights @ values


# %% ex-5-3 wrong: blocks must be in order
# says: sorting the table moves the block
# -     total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
# +     total, mixed = torch.zeros_like(largest), torch.zeros_like(grouped)
# +     block_table = sorted(block_table)


# %% ex-5-3 wrong: blocks taken for neighbours
# says: not counted on from the first
# -         # The tail is cut off, not masked: 0 times NaN is NaN.
# -         keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
# +         keys, values = pool[:, block_table[0] + start // block_size, :, : seq_len - start]


# %% ex-5-3 wrong: kv heads taken in turns
# says: 0 and 1 share the first
# - num_kv_heads, -1, head_dim
# + -1, num_kv_heads, head_dim).transpose(0, 1
# - .reshape
# + .transpose(0, 1).reshape


# %% ex-5-3 wrong: its own token left out
# says: slot seq_len - 1 is read, too
# -     for start in range(0, seq_len, block_size):
# -         # The tail is cut off, not masked: 0 times NaN is NaN.
# -         keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
# +     if seq_len == 1:
# +         return torch.zeros_like(query)
# +     for start in range(0, seq_len - 1, block_size):
# +         keys, values = pool[:, block_table[start // block_size], :, : seq_len - 1 - start]


# %% ex-5-3 wrong: scaled twice
# says: scaling was used twice
# - keys.mT
# + keys.mT * scaling


# %% ex-5-3 wrong: not divided
# says: divide by their sum
# - mixed / total
# + mixed


# %% ex-5-3 wrong: largest starts at -100
# says: starts at -inf, not at 0
# - math.inf
# + 100.0


# %% ex-5-3 wrong: largest starts at -1000
# says: starts at -inf, not at 0
# - math.inf
# + 1000.0


# %% ex-5-3 wrong: all but the last block of the table are full
# says: were read as if they were tokens
# -     for start in range(0, seq_len, block_size):
# -         # The tail is cut off, not masked: 0 times NaN is NaN.
# -         keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
# +     real = [b for b in block_table if b != pool.shape[1] - 1]
# +     for i, block in enumerate(real):
# +         keys, values = pool[:, block]
# +         if i == len(real) - 1:
# +             n = (seq_len - 1) % block_size + 1
# +             keys, values = keys[:, :n], values[:, :n]


# %% ex-5-3 wrong: every block of the table, empty slices skipped
# says: output is wrong in
# -     for start in range(0, seq_len, block_size):
# -         # The tail is cut off, not masked: 0 times NaN is NaN.
# -         keys, values = pool[:, block_table[start // block_size], :, : seq_len - start]
# +     for i, block in enumerate(block_table):
# +         start = i * block_size
# +         keys, values = pool[:, block, :, : seq_len - start]
# +         if not keys.shape[1]:
# +             continue


# %% ex-5-3 wrong: 64 blocks at most
# says: though shorter tables are right
# -     for start in range(0, seq_len, block_size):
# +     for start in range(0, min(seq_len, 64 * block_size), block_size):


# %% ex-5-3 wrong: measured against the mean of the scores
# says: output is wrong in
# - scores.amax
# + scores.mean


# %% ex-5-3 wrong: shrinks no further than exp(-5)
# says: output is wrong in
# -         shrink, weights = (largest - new).exp(), (scores - new).exp()
# +         shrink, weights = (largest - new).clamp(min=-5).exp(), (scores - new).exp()


# %% ex-5-3 wrong: blocks of lower scores are skipped
# says: output is wrong in
# -         scores = grouped @ keys.mT
# +         scores = grouped @ keys.mT
# +         if bool((scores.amax(-1, keepdim=True) < largest).all()):
# +             continue


# %% ex-5-4 right: nested lists
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return [
        [j <= num_computed_tokens + i for j in range(num_slots)]
        for i in range(num_new_tokens)
    ]


# %% ex-5-4 right: rows of a triangle
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    whole = torch.ones(num_slots, num_slots).tril()
    return whole[num_computed_tokens : num_computed_tokens + num_new_tokens]


# %% ex-5-4 right: a generator of rows
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    for i in range(num_new_tokens):
        seen = num_computed_tokens + i + 1
        yield [True] * seen + [False] * (num_slots - seen)


# %% ex-5-4 right: functools.partial
from functools import partial


def _cm(x, num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)
    return torch.arange(num_slots)[None] <= position[:, None]


chunk_mask = partial(_cm, 0)


# %% ex-5-4 right: an object with __call__
class Mask:
    def __call__(self, t, c, n, s):
        return [[j <= c + i for j in range(s)] for i in range(n)]


chunk_mask = Mask()


# %% ex-5-4 right: a list of tensors
def chunk_mask(t, c, n, s):
    return [torch.arange(s) <= c + i for i in range(n)]


# %% ex-5-4 right: a list of arrays
import numpy as np


def chunk_mask(t, c, n, s):
    return [np.arange(s) <= c + i for i in range(n)]


# %% ex-5-4 right: an iterator of lists
def chunk_mask(t, c, n, s):
    return map(lambda i: [j <= c + i for j in range(s)], range(n))


# %% ex-5-4 right: a deque of lists
from collections import deque


def chunk_mask(t, c, n, s):
    return deque([j <= c + i for j in range(s)] for i in range(n))


# %% ex-5-4 right: numpy's triangle
import numpy as np


def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    return np.tri(num_new_tokens, num_slots, num_computed_tokens, dtype=bool)


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


# %% ex-5-4 wrong: int8 positions
# says: mask is wrong in
# -     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens).to(
# +         torch.int8
# +     )


# %% ex-5-4 wrong: half positions
# says: mask is wrong in
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    position = torch.arange(
        num_computed_tokens, num_computed_tokens + num_new_tokens
    ).half()
    return torch.arange(num_slots).half()[None] <= position[:, None]


# %% ex-5-4 wrong: bfloat16 positions
# says: mask is wrong in
def chunk_mask(num_tokens, num_computed_tokens, num_new_tokens, num_slots):
    position = torch.arange(
        num_computed_tokens, num_computed_tokens + num_new_tokens
    ).bfloat16()
    return torch.arange(num_slots).bfloat16()[None] <= position[:, None]


# %% ex-5-4 wrong: slots ahead assumed one block
# says: mask is wrong in
# -     return torch.arange(num_slots)[None] <= position[:, None]
# +     return torch.ones(num_new_tokens, num_slots, dtype=torch.bool).tril(
# +         num_slots
# +         - num_new_tokens
# +         - (num_slots - num_computed_tokens - num_new_tokens) % 4
# +     )


# %% ex-5-4 wrong: one token sees everything
# says: mask is wrong in
# -     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)
# +     if num_new_tokens == 1:
# +         return torch.ones(1, num_slots, dtype=torch.bool)


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


# %% ex-5-4-b right: functools.partial
from functools import partial


def _wm(x, num_tokens, num_computed_tokens, num_new_tokens, num_slots, window):
    position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
        :, None
    ]
    slot = torch.arange(num_slots)[None]
    return (slot <= position) & (slot > position - window)


windowed_mask = partial(_wm, 0)


# %% ex-5-4-b right: an object with __call__
class Mask:
    def __call__(self, t, c, n, s, w):
        return [[c + i - w < j <= c + i for j in range(s)] for i in range(n)]


windowed_mask = Mask()


# %% ex-5-4-b right: numpy
import numpy as np


def windowed_mask(t, c, n, s, w):
    return np.tri(n, s, c, dtype=bool) & ~np.tri(n, s, c - w, dtype=bool)


# %% ex-5-4-b right: a list of arrays
import numpy as np


def windowed_mask(t, c, n, s, w):
    return [(np.arange(s) <= c + i) & (np.arange(s) > c + i - w) for i in range(n)]


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
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# -     return (slot <= position) & (slot > position - window)
# +     return (slot <= position) & (slot >= position - window)


# %% ex-5-4-b wrong: one too few
# says: one slot too few is seen
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# -     return (slot <= position) & (slot > position - window)
# +     return (slot <= position) & (slot > position - window + 1)


# %% ex-5-4-b wrong: one window for all rows, the last one's
# says: the first row's window is not
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# -     return (slot <= position) & (slot > position - window)
# +     return (slot <= position) & (slot > position[-1] - window)


# %% ex-5-4-b wrong: one window for all rows, the first one's
# says: the last row's window is not
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# -     return (slot <= position) & (slot > position - window)
# +     return (slot <= position) & (slot > position[0] - window)


# %% ex-5-4-b wrong: the window stands at the beginning
# says: not the first of the sequence
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# - > position -
# + <


# %% ex-5-4-b wrong: what lies ahead is seen
# says: what lies ahead stays hidden
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# - <= position) & (slot > position - window
# + > position - window) & (slot <= position[-1]


# %% ex-5-4-b wrong: a window to both sides
# says: what lies ahead stays hidden
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# - <= position) & (slot > position - window)
# + - position).abs() < window


# %% ex-5-4-b wrong: no window
# says: The window was not used
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# - (slot <= position) & (slot > position - window)
# + slot <= position


# %% ex-5-4-b wrong: a window within the chunk
# says: was counted within the chunk
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# -     return (slot <= position) & (slot > position - window)
# +     return (slot <= position) & (slot > position - window) & (slot >= num_computed_tokens)


# %% ex-5-4-b wrong: the chunk taken for the prompt's end
# says: The key length is what has been written
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# -     return (slot <= position) & (slot > position - window)
# +     return (slot <= position - position[-1] + num_tokens - 1) & (slot > position - window)


# %% ex-5-4-b wrong: itself hidden
# says: A token sees itself
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# -     return (slot <= position) & (slot > position - window)
# +     return (slot < position) & (slot > position - window)


# %% ex-5-4-b wrong: True where hidden
# says: True means that the query may see
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# - <=
# + >


# %% ex-5-4-b wrong: an even window rounded down
# says: mask is wrong in
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# +     window = window if window % 2 else window - 1


# %% ex-5-4-b wrong: an even window rounded up
# says: mask is wrong in
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# +     window = window | 1


# %% ex-5-4-b wrong: window to power of two
# says: mask is wrong in
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# +     window = 1 << (window - 1).bit_length()


# %% ex-5-4-b wrong: window at most 8
# says: mask is wrong in
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# +     window = min(window, 8)


# %% ex-5-4-b wrong: a window that wraps around
# says: mask is wrong in
# -     position = num_computed_tokens + torch.arange(num_new_tokens)[:, None]
# +     position = torch.arange(num_computed_tokens, num_computed_tokens + num_new_tokens)[
# +         :, None
# +     ]
# - slot <= position) & (slot > position - window)
# + position - slot) % num_slots < window


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


# %% ex-5-5 right: functools.partial
from functools import partial


def _sb(x, spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    weights = spec.num_parameters * spec.dtype_bytes
    return (
        weights,
        sum(seq_lens) * token,
        3 * num_blocks * block_size * token,
        4 * num_blocks,
    )


step_bytes = partial(_sb, 0)


# %% ex-5-5 right: an object with __call__
class Count:
    def __call__(self, spec, seq_lens, block_size):
        token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
        num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
        weights = spec.num_parameters * spec.dtype_bytes
        return (
            weights,
            sum(seq_lens) * token,
            3 * num_blocks * block_size * token,
            4 * num_blocks,
        )


step_bytes = Count()


# %% ex-5-5 right: numpy
import numpy as np


def step_bytes(spec, seq_lens, block_size):
    n = np.array(seq_lens, dtype=np.int64)
    b = np.ceil(n / block_size).astype(int).sum()
    t = np.int64(
        2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    )
    return np.array(
        [
            np.int64(spec.num_parameters) * spec.dtype_bytes,
            n.sum() * t,
            3 * b * block_size * t,
            4 * b,
        ]
    )


# %% ex-5-5 right: torch
def step_bytes(spec, seq_lens, block_size):
    n = torch.tensor(seq_lens)
    b = ((n + block_size - 1) // block_size).sum()
    t = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    return torch.stack(
        [
            torch.tensor(spec.num_parameters * spec.dtype_bytes),
            n.sum() * t,
            3 * b * block_size * t,
            4 * b,
        ]
    )


# %% ex-5-5 right: the values of a dict
def step_bytes(spec, seq_lens, block_size):
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.dtype_bytes
    num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
    weights = spec.num_parameters * spec.dtype_bytes
    return dict(
        a=weights,
        b=sum(seq_lens) * token,
        c=3 * num_blocks * block_size * token,
        d=4 * num_blocks,
    ).values()


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
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         len(seq_lens) * spec.num_parameters * spec.dtype_bytes,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-5 wrong: weights for each layer
# says: counts the weights of all layers already
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_layers * spec.num_parameters * spec.dtype_bytes,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


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
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         len(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-5 wrong: in place reads whole blocks
# says: the tail of the last block is not read
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         num_blocks * block_size * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-5 wrong: as long as the longest
# says: not the longest of the batch
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         len(seq_lens) * max(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


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
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * len(seq_lens) * cdiv(max(seq_lens), block_size),
# +     )


# %% ex-5-5 wrong: gather without the tails
# says: the tail of the last one is moved as well
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         sum(seq_lens) * token,
# +         3 * sum(seq_lens) * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-5 wrong: gather reads only
# says: The copy is written, too
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         sum(seq_lens) * token,
# +         num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-5 wrong: gather reads and writes
# says: After the copy is written attention reads it
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         sum(seq_lens) * token,
# +         2 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-5 wrong: a table per layer
# says: One table serves all layers
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks * spec.num_layers,
# +     )


# %% ex-5-5 wrong: an entry for each token
# says: A table has an entry for each block
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * sum(seq_lens),
# +     )


# %% ex-5-5 wrong: rounded down
# says: last block has an entry, too
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * sum(n // block_size for n in seq_lens),
# +     )


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
# -     weights = spec.num_parameters * spec.dtype_bytes
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         spec.num_parameters * spec.dtype_bytes,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * sum(n // block_size + 1 for n in seq_lens),
# +     )


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


# %% ex-5-5 wrong: equal contexts once
# says: equal length are two
# -     """(weights, in_place, gathered, tables), in bytes, of one decode step."""
# +     """(weights, in_place, gathered, tables), in bytes, of one decode step."""
# +     seq_lens = set(seq_lens)
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         weights,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-5 wrong: blocks of equal contexts once
# says: equal length are two
# -     num_blocks = sum(cdiv(seq_len, block_size) for seq_len in seq_lens)
# +     num_blocks = sum(cdiv(seq_len, block_size) for seq_len in set(seq_lens))
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         weights,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-5 wrong: weights in 32 bits
# says: weights is wrong in
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     weights = int(torch.tensor(weights).to(torch.int32))
# +     return (
# +         weights,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-5 wrong: the step's own token added
# says: there is none to add
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         weights,
# +         (sum(seq_lens) + len(seq_lens)) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-5 wrong: two requests at most
# says: in_place is wrong in
# -     """(weights, in_place, gathered, tables), in bytes, of one decode step."""
# +     """(weights, in_place, gathered, tables), in bytes, of one decode step."""
# +     seq_lens = seq_lens[:2]
# -     gathered = 3 * num_blocks * block_size * token
# -     return weights, sum(seq_lens) * token, gathered, 4 * num_blocks
# +     return (
# +         weights,
# +         sum(seq_lens) * token,
# +         3 * num_blocks * block_size * token,
# +         4 * num_blocks,
# +     )


# %% ex-5-2 wrong: max gives values and places
# says: take its .values
# -     largest = scores.amax(-1)
# -     # Against -inf nothing can be measured: (-inf) - (-inf) is NaN.
# -     reference = largest.masked_fill(largest == -math.inf, 0.0)
# +     largest = scores.max(-1)
# +     reference = largest.values.masked_fill(largest.values == -math.inf, 0.0)


# %% ex-5-5 wrong: gathered of all contexts together
# says: counted one by one, not for all tokens in one
# - gathered = 3 * num_blocks * block_size * token
# + gathered = 3 * cdiv(sum(seq_lens), block_size) * block_size * token


# %% ex-5-5 wrong: gathered without the last block
# says: last block is copied, too, be it full or not
# - gathered = 3 * num_blocks * block_size * token
# + gathered = 3 * sum(s // block_size for s in seq_lens) * block_size * token
