"""Attention in plain torch: copy each request's K and V out of the pool, then multiply.

It runs everywhere, and what it costs is the copy: every layer of every step moves all that it then
reads. Reading unwritten slots is harmless only while they hold numbers (their weight is 0, and
0 x NaN is NaN); the pool and the runner see to that.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class QueryGroup:
    """num_seqs requests with num_queries new tokens each: all decoding requests of a step
    together (one token each), a static batch at one column, or one request's chunk.

    Rows first_row .. first_row + num_seqs * num_queries of the packed step are its tokens.
    positions: [num_seqs, num_queries], each new token's place in its request's slots.
    first_visible: [num_seqs, 1], slots before it hold padding; None where nothing is padded.
    gather_rows: [2 * num_seqs * kv_heads * blocks], the pool rows that hold its K, then its V.
    """

    first_row: int
    num_seqs: int
    num_queries: int
    num_blocks: int  # of the longest table among them; shorter ones are padded
    positions: torch.Tensor
    gather_rows: torch.Tensor
    first_visible: torch.Tensor | None = None
    biases: dict = field(default_factory=dict)  # by window: the same for all layers

    def bias(self, num_slots, window, dtype):
        """[num_seqs, 1, 1, num_queries, num_slots]: 0 where a query may look, else -inf.

        Slot j of the gathered table holds position j. The rule: see `minikv.model.backends`.
        """
        slot = torch.arange(num_slots, device=self.positions.device)
        query = self.positions[:, None, None, :, None]
        hidden = slot > query
        if window is not None:
            hidden |= slot <= query - window
        if self.first_visible is not None:
            hidden |= slot < self.first_visible[:, None, None, :, None].minimum(query)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=slot.device)
        return bias.masked_fill_(hidden, float("-inf"))

    def bias_of_scores(self, num_slots, num_kv_heads, per_kv, window, dtype):
        """The same for every head, [num_seqs * num_kv_heads, per_kv * num_queries, num_slots]:
        made once for all layers with this window."""
        if window not in self.biases:
            bias = self.bias(num_slots, window, dtype).expand(-1, num_kv_heads, per_kv, -1, -1)
            self.biases[window] = bias.reshape(self.num_seqs * num_kv_heads, -1, num_slots)
        return self.biases[window]


def query_groups(metadata, pool) -> list[QueryGroup]:
    """The step's requests in groups that one product can serve, made once per step.

    Neighbours with one new token each form a group, and so do neighbours with as many new tokens
    at the same place; any other chunk is a group of its own.
    """
    if "groups" not in metadata.cache:
        starts, ends = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        shapes = [  # (new tokens, what must agree)
            (stop - start, 0 if stop - start == 1 else end - (stop - start))
            for start, stop, end in zip(starts, starts[1:], ends, strict=False)
        ]
        groups, first = [], 0
        for i in range(1, len(shapes) + 1):
            if i == len(shapes) or shapes[i] != shapes[first]:
                groups.append(_group(metadata, pool, first, i, starts[first], ends[first:i]))
                first = i
        metadata.cache["groups"] = groups
    return metadata.cache["groups"]


def _group(metadata, pool, first, last, first_row, seq_lens):
    """Requests first to last - 1."""
    _, pool_blocks, num_kv_heads, block_size, _ = pool.shape
    num_blocks = -(-max(seq_lens) // block_size)
    tables = metadata.block_tables[first:last, :num_blocks].long()
    # [seqs, kv_heads, blocks]: the K row of each block and head; V lies one half further on.
    heads = torch.arange(num_kv_heads, device=tables.device)
    rows = (tables[:, None, :] * num_kv_heads + heads[:, None]).reshape(-1)
    first_visible = metadata.first_visible
    starts = metadata.query_start_loc[first : last + 1]
    num_queries = int(starts[1] - starts[0])
    new = torch.arange(-num_queries, 0, device=tables.device)
    return QueryGroup(
        first_row=first_row,
        num_seqs=last - first,
        num_queries=num_queries,
        num_blocks=num_blocks,
        positions=metadata.seq_lens[first:last, None] + new,
        gather_rows=torch.cat([rows, rows + pool_blocks * num_kv_heads]),
        first_visible=None if first_visible is None else first_visible[first:last, None],
    )


def attend(query, pool, metadata, *, scaling, window=None, softcap=None):
    """See `minikv.model.backends`."""
    scaled, outputs = query * scaling, []
    for group in query_groups(metadata, pool):
        rows = slice(group.first_row, group.first_row + group.num_seqs * group.num_queries)
        outputs.append(_attend(scaled[rows], pool, group, window, softcap, metadata.scratch))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend(query, pool, group, window, softcap, scratch):
    """query: [tokens, num_query_heads, head_dim], scaled. Returns the same shape.

    Query heads that share a kv head are stacked as rows of one product, so that K and V are read
    once for all of them and never repeated.
    """
    num_tokens, num_query_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = pool.shape
    B, Q, per_kv = group.num_seqs, group.num_queries, num_query_heads // num_kv_heads
    num_slots = group.num_blocks * block_size

    gathered = scratch.take("kv", (group.gather_rows.numel(), block_size * head_dim), pool)
    torch.index_select(pool.view(-1, block_size * head_dim), 0, group.gather_rows, out=gathered)
    keys, values = gathered.view(2, B * num_kv_heads, num_slots, head_dim)

    # [seqs, queries, kv_heads, per_kv, ...] -> [seqs * kv_heads, per_kv * queries, ...]
    stacked = query.view(B, Q, num_kv_heads, per_kv, head_dim).permute(0, 2, 3, 1, 4)
    stacked = stacked.reshape(B * num_kv_heads, per_kv * Q, head_dim)
    bias = group.bias_of_scores(num_slots, num_kv_heads, per_kv, window, pool.dtype)
    if softcap is None:
        scores = torch.baddbmm(bias, stacked, keys.transpose(1, 2))
    else:
        scores = torch.bmm(stacked, keys.transpose(1, 2))
        scores.div_(softcap).tanh_().mul_(softcap).add_(bias)
    mixed = torch.bmm(torch.softmax(scores, -1), values)
    mixed = mixed.view(B, num_kv_heads, per_kv, Q, head_dim).permute(0, 3, 1, 2, 4)
    return mixed.reshape(num_tokens, num_query_heads, head_dim)


def write_kv(key, value, pool, write_rows):
    """See `minikv.model.backends`."""
    head_dim = key.shape[-1]
    new_rows = torch.stack([key, value]).transpose(1, 2).reshape(-1, head_dim)
    pool.view(-1, head_dim).index_copy_(0, write_rows, new_rows)


def why_not(device, dtype):
    return None  # torch runs everywhere
