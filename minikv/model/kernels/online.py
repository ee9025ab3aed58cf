"""Attention block by block: the readable form of what the kernels do.

Softmax needs the largest score and the sum of all exponentials, which seems to need all scores at
once. It does not (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022): keep the
largest score so far, the sum so far and the weighted values so far, and when a block brings a
larger score, shrink what is there by exp(old - new). So each block is read where it lies, once, and
nothing is gathered.

Only written slots are read: a block's tail is cut off, not masked, and may hold anything.
"""

import torch


def attend(query, pool, metadata, *, scaling, window=None, softcap=None):
    """See `minikv.model.backends`. Computes in float32 and returns the query's dtype."""
    num_tokens, num_query_heads, head_dim = query.shape
    num_kv_heads, block_size = pool.shape[2:4]
    per_kv = num_query_heads // num_kv_heads
    # [kv_heads, T * per_kv, head_dim]: the query heads that share a kv head are rows of one product
    grouped = query.reshape(num_tokens, num_kv_heads, per_kv, head_dim).transpose(0, 1)
    grouped = grouped.reshape(num_kv_heads, -1, head_dim).float() * scaling
    mixed = torch.empty_like(grouped)
    starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for i, seq_len in enumerate(seq_lens):
        # The run of slots that each query sees: first to last, its own.
        last = torch.arange(seq_len - (starts[i + 1] - starts[i]), seq_len, device=query.device)
        first = torch.zeros_like(last)
        if metadata.first_visible is not None:
            first = metadata.first_visible[i].minimum(last)
        if window is not None:
            first = first.maximum(last - window + 1)
        rows = slice(starts[i] * per_kv, starts[i + 1] * per_kv)
        softmax = OnlineSoftmax(grouped[:, rows])
        table = metadata.block_tables[i, : -(-seq_len // block_size)].tolist()
        for index, block_id in enumerate(table):
            start, end = index * block_size, min((index + 1) * block_size, seq_len)
            keys, values = pool[:, block_id, :, : end - start].float()
            slot = torch.arange(start, end, device=query.device)
            visible = (first[:, None] <= slot) & (slot <= last[:, None])
            softmax.add_block(keys, values, visible.repeat_interleave(per_kv, 0), softcap)
        mixed[:, rows] = softmax.result()
    mixed = mixed.view(num_kv_heads, num_tokens, per_kv, head_dim).transpose(0, 1)
    return mixed.reshape(query.shape).to(query.dtype)


class OnlineSoftmax:
    """The attention of some rows of queries, one block of keys and values after another.

    query: [..., rows, head_dim], scaled. What it keeps of the blocks so far: the largest score of
    each row and the sum of exp(score - largest), [..., rows]; and the sum of the values with these
    weights, [..., rows, head_dim].
    """

    def __init__(self, query):
        self.query = query
        self.largest = query.new_full(query.shape[:-1], float("-inf"))
        self.total = torch.zeros_like(self.largest)
        self.mixed = torch.zeros_like(query)

    def add_block(self, keys, values, visible, softcap=None):
        """keys, values: [..., slots, head_dim]. visible: [rows, slots], True where a row looks."""
        scores = self.query @ keys.mT
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        largest = self.largest.maximum(scores.amax(-1))
        # A row that has seen nothing yet: -inf - (-inf) is NaN, so it is measured against 0.
        reference = largest.masked_fill(largest == float("-inf"), 0.0)
        shrink = torch.exp(self.largest - reference)  # 0 at the first block: exp(-inf)
        weights = torch.exp(scores - reference[..., None])
        self.total = self.total * shrink + weights.sum(-1)
        self.mixed = self.mixed * shrink[..., None] + weights @ values
        self.largest = largest

    def result(self):
        """[..., rows, head_dim]. Every query sees at least itself, so no total is 0."""
        return self.mixed / self.total[..., None]


def why_not(device, dtype):
    return None  # torch runs everywhere
