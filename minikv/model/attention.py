"""Attention over block tables, called from inside transformers' own models.

transformers lets a program replace the function that every attention layer calls
(`AttentionInterface`). Ours writes the step's keys and values into the pool's slots, then has a
backend (`minikv.model.backends`) read back, through each request's block table, all that the
request has written so far. So no model code is ours, and no keys or values live outside the pool.

The pool: one tensor per layer, [2 (K, V), num_blocks + 1, num_kv_heads, block_size, head_dim].
Rows of one block and head lie together: block_size x head_dim numbers to read in one go. The last
block belongs to no manager: it pads short block tables and stays zero.

Other orders were measured (SmolLM2's shape in bf16, 16 and 32 sequences of 240 and 1,000 tokens, on
a CPU): with heads inside slots, gather takes twice as long or more; with K beside V in each block
it takes the same. Reading in place, no order is faster than another by more than the noise, 6%.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface

from minikv.model.backends import AttentionMetadata
from minikv.model.kernels.gather import query_groups
from minikv.model.memory import zeros

IMPLEMENTATION = "minikv"
# For models that drop the keyword `step` on its way (StableLM, Nemotron); one for each thread.
CURRENT_STEP = ContextVar("the step that runs", default=None)


class UnsupportedModel(ValueError):
    """A model whose attention this engine would not compute exactly."""


@dataclass
class StepContext:
    """What every layer needs to know of one step. It travels through the model as the keyword
    `step`, or around it as CURRENT_STEP.

    pools: one tensor per layer, see the module's docstring.
    write_rows: [2 * T * kv_heads], the row of `pool.view(-1, head_dim)` for the K of each new
        token and head, then for the V.
    metadata: which requests the T packed tokens belong to, and where their K and V lie.
    attend, write_kv: the backend's functions, see `minikv.model.backends`.
    layers_seen: (layer, sliding_window) of each call, for the probe.
    """

    pools: list[torch.Tensor]
    write_rows: torch.Tensor
    metadata: AttentionMetadata
    attend: Callable
    write_kv: Callable
    layers_seen: list = field(default_factory=list)

    @property
    def groups(self):
        """The step as gather attention takes it, whichever backend runs: QueryGroups, in order."""
        return query_groups(self.metadata, self.pools[0])


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
    step = CURRENT_STEP.get() if step is None else step
    if sliding_window is None:  # Qwen2-MoE's layers have one, but leave it to their mask
        sliding_window = getattr(module, "sliding_window", None)
    layer = _require_supported(module, query, key, value, attention_mask, is_causal, step, keywords)
    pool = step.pools[layer]
    step.layers_seen.append((layer, sliding_window))

    # First write: a token attends to itself, too.
    step.write_kv(key[0], value[0], pool, step.write_rows)
    mixed = step.attend(
        query[0].transpose(0, 1),
        pool,
        step.metadata,
        scaling=key.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return mixed[None], None


def _require_supported(module, query, key, value, attention_mask, is_causal, step, keywords) -> int:
    """The layer's number; raises UnsupportedModel where the result would not be exact."""
    name = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if step is None:
        raise UnsupportedModel(f"{name} was called outside the LLM that it now belongs to")
    unknown = sorted(
        keyword
        for keyword, value in keywords.items()
        if value is not None and keyword not in HARMLESS and not keyword.startswith("output_")
    )
    if unknown:
        raise UnsupportedModel(f"{name} passes {', '.join(unknown)} to its attention")
    if attention_mask is not None or not (is_causal or is_causal is None):
        raise UnsupportedModel(f"{name} brings an attention mask of its own")
    if getattr(module, "is_causal", None) is False:
        raise UnsupportedModel(f"{name} attends to later tokens too: its is_causal is False")
    if getattr(module, "attn_temperature_tuning", None) and not getattr(module, "use_rope", True):
        raise UnsupportedModel(
            f"{name} scales its queries by their place in the step instead of their position "
            "(attn_temperature_tuning in a layer without rotary embedding)"
        )
    if not isinstance(layer, int) or not 0 <= layer < len(step.pools):
        raise UnsupportedModel(f"{name} says that it is layer {layer!r} of {len(step.pools)}")
    pool = step.pools[layer]
    expected = (1, pool.shape[2], key.shape[2], pool.shape[4])
    if key.shape != expected or value.shape != expected:
        raise UnsupportedModel(
            f"{name} (layer {layer}) has K {tuple(key.shape)} and V {tuple(value.shape)}, but the "
            f"pool was made for {expected}"
        )
    # A kernel takes addresses: it would not notice.
    if not query.dtype == key.dtype == value.dtype == pool.dtype:
        raise UnsupportedModel(
            f"{name} (layer {layer}) computes Q, K and V in {query.dtype}, {key.dtype} and "
            f"{value.dtype}, but the pool holds {pool.dtype}"
        )
    if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
        raise UnsupportedModel(
            f"{name} (layer {layer}) has Q {tuple(query.shape)}, which does not fit K "
            f"{tuple(key.shape)}"
        )
    return layer


def new_pools(spec, num_blocks, block_size, *, device, dtype) -> list[torch.Tensor]:
    """The pool, zeroed: one tensor per layer. Stale NaN would survive a mask (0 x NaN is NaN), so
    unwritten memory must hold numbers. On a CPU it takes memory as it is written."""
    shape = (2, num_blocks + 1, spec.num_kv_heads, block_size, spec.head_dim)
    return [zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]


AttentionInterface.register(IMPLEMENTATION, attention)
