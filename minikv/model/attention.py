"""Attention over block tables, called from inside transformers' own models.

transformers lets a program replace the function that every attention layer calls
(`AttentionInterface`). Ours writes the step's keys and values into the pool's slots, then reads
back, through each request's block table, all that the request has written so far. So no model
code is ours, and no keys or values live outside the pool.

The pool: one tensor per layer, [2 (K, V), num_blocks + 1, num_kv_heads, block_size, head_dim].
Rows of one block and head lie together, so a gather copies block_size x head_dim numbers at a
time. The last block belongs to no manager: it pads short block tables and stays zero.
"""

from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface

IMPLEMENTATION = "minikv"


class UnsupportedModel(ValueError):
    """A model whose attention this engine would not compute exactly."""


class Scratch:
    """Buffers kept between layers and steps: a fresh tensor for the gathered K and V costs more
    in page faults than the attention that reads it."""

    def __init__(self):
        self._buffers = {}

    def take(self, name, shape, like):
        """An uninitialised tensor of this shape, good until the next call with the same name."""
        numel, key = torch.Size(shape).numel(), (name, like.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel * 5 // 4, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:numel].view(shape)


@dataclass
class QueryGroup:
    """num_seqs requests with num_queries new tokens each: all decoding requests of a step
    together (one token each), or one request's chunk.

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

        Slot j of the gathered table holds position j. A query at position p sees positions up to
        p, its own included, and with a window only the last `window` of them. Padding is seen by
        nobody but itself (a softmax over nothing would be NaN).
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


@dataclass
class StepContext:
    """What every layer needs to know of one step. It travels through the model as the keyword
    `step`; nothing about it is global.

    pools: one tensor per layer, see the module's docstring.
    write_rows: [2 * T * kv_heads], the row of `pool.view(-1, head_dim)` for the K of each new
        token and head, then for the V.
    groups: cover the T packed tokens, in order.
    layers_seen: (layer, sliding_window) of each call, for the probe.
    """

    pools: list[torch.Tensor]
    write_rows: torch.Tensor
    groups: list[QueryGroup]
    scratch: Scratch
    layers_seen: list = field(default_factory=list)


# Keywords that models hand to every attention function and that change no score of a causal
# decoder. Anything else that is set may change one, and is refused.
HARMLESS = {"dropout", "position_ids", "use_cache"}  # and output_...: what to return besides


def attention(
    module,
    query,
    key,
    value,
    attention_mask,
    *,
    scaling=None,
    sliding_window=None,
    softcap=None,
    is_causal=True,
    step: StepContext | None = None,
    **keywords,
):
    """transformers' attention interface. query: [1, num_query_heads, T, head_dim]; key and value:
    [1, num_kv_heads, T, head_dim], already rotated. Returns ([1, T, num_query_heads, head_dim],
    None). Raises UnsupportedModel for anything that it would not compute exactly."""
    layer = _require_supported(module, key, value, attention_mask, is_causal, step, keywords)
    head_dim = key.shape[-1]
    pool = step.pools[layer]
    step.layers_seen.append((layer, sliding_window))

    # First write: a token attends to itself, too.
    new_rows = torch.stack([key[0], value[0]]).transpose(1, 2).reshape(-1, head_dim)
    pool.view(-1, head_dim).index_copy_(0, step.write_rows, new_rows)

    scaling = head_dim**-0.5 if scaling is None else scaling
    scaled = query[0].transpose(0, 1) * scaling
    outputs = []
    for group in step.groups:
        rows = slice(group.first_row, group.first_row + group.num_seqs * group.num_queries)
        outputs.append(_attend(scaled[rows], pool, group, sliding_window, softcap, step.scratch))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


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


def _require_supported(module, key, value, attention_mask, is_causal, step, keywords) -> int:
    """The layer's number; raises UnsupportedModel where the result would not be exact."""
    name = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if step is None:
        raise UnsupportedModel(
            f"{name} was called without this engine's step: the model drops unknown keywords, or "
            "it was called outside the LLM that it now belongs to"
        )
    unknown = sorted(
        keyword
        for keyword, value in keywords.items()
        if value is not None and keyword not in HARMLESS and not keyword.startswith("output_")
    )
    if unknown:
        raise UnsupportedModel(f"{name} passes {', '.join(unknown)} to its attention")
    if attention_mask is not None or not (is_causal or is_causal is None):
        raise UnsupportedModel(f"{name} brings an attention mask of its own")
    if not isinstance(layer, int) or not 0 <= layer < len(step.pools):
        raise UnsupportedModel(f"{name} says that it is layer {layer!r} of {len(step.pools)}")
    pool = step.pools[layer]
    expected = (1, pool.shape[2], key.shape[2], pool.shape[4])
    if key.shape != expected or value.shape != expected:
        raise UnsupportedModel(
            f"{name} (layer {layer}) has K {tuple(key.shape)} and V {tuple(value.shape)}, but the "
            f"pool was made for {expected}"
        )
    return layer


def new_pools(spec, num_blocks, block_size, *, device, dtype) -> list[torch.Tensor]:
    """The pool, zeroed: one tensor per layer. Stale NaN would survive a mask (0 x NaN is NaN), so
    unwritten memory must hold numbers."""
    shape = (2, num_blocks + 1, spec.num_kv_heads, block_size, spec.head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]


AttentionInterface.register(IMPLEMENTATION, attention)
