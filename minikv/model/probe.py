"""Hands a transformers model over to the engine, or refuses it by name.

An architecture is supported when its attention, computed over block tables, gives the logits that
its own code gives. That is not looked up in a list but tried: a few tokens, in uneven chunks,
through scattered blocks, behind a neighbour in the same step, before the first request.
"""

from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface

from minikv.kv_cache.base import KVCacheManager
from minikv.model.attention import IMPLEMENTATION, UnsupportedModel
from minikv.model.runner import ModelRunner
from minikv.model.threads import while_loading
from minikv.request import Request
from minikv.scheduler import ScheduledRequest

CHUNKS = (5, 1, 11, 1)  # new tokens per step: a chunk, a decode, a chunk on a filled cache, ...
NEIGHBOUR = 32  # tokens of another request in the first step; one in each step after it
BLOCK_SIZE = 4
# ||ours - theirs|| / ||theirs||, over the logits of the last token of every chunk.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
# What another last token may move of the logits before it. Models that see it move theirs by 4e-3
# and more (BERT's kind, random at its own initial deviation, in bf16), those that don't by 0.
CAUSAL = 2e-3
_tried = WeakKeyDictionary()  # model -> its makeup when it gave its own logits


@while_loading()
def adopt(model, spec, attention_backend=None):
    """From here on the model attends through block tables, inside minikv only. It is tried with
    this backend (None: the best for its device), and not again while it is made as it was then.

    Raises UnsupportedModel, naming the architecture and the reason; the model is then as it was.
    """
    name = type(model).__name__
    before = model.config._attn_implementation
    known = _tried.get(model) if before == IMPLEMENTATION else None
    if known is not None and known == _makeup(model, spec, attention_backend):
        return
    try:
        _check_rotation(model.config.get_text_config(decoder=True))
        expected = _own_logits(model)
        _check_causal(model)
        model.set_attn_implementation(IMPLEMENTATION)
        got = _our_logits(model, spec, attention_backend)
        error = float((got - expected).norm() / expected.norm())
        if not error <= TOLERANCE[model.dtype]:
            raise UnsupportedModel(
                f"its logits over block tables are {error:.1%} off its own (limit "
                f"{TOLERANCE[model.dtype]:.1%})"
            )
    except Exception as error:
        model.set_attn_implementation(before)
        if isinstance(error, UnsupportedModel | TypeError | ValueError):
            if callable(attention_backend):  # more likely at fault than the model
                what = f"your attention function does not compute what {name} does: {error}"
            else:
                what = f"minikv cannot run {name} exactly: {error}"
            raise UnsupportedModel(what) from error
        raise
    # What a function of one's own computes may change from call to call.
    if not callable(attention_backend) and not any("forward" in vars(m) for m in model.modules()):
        _tried[model] = _makeup(model, spec, attention_backend)


def _makeup(model, spec, attention_backend):
    """What the outcome of a trial depends on, but for the weights' values."""
    settings = model.config.to_json_string(use_diff=False), spec, attention_backend
    code = [type(module).forward for module in model.modules()]
    return settings, model.dtype, model.device, AttentionInterface()[IMPLEMENTATION], code


def _check_rotation(config):
    """longrope turns a whole step by the longest position in it: neighbours would change logits,
    and no probe shorter than the original context would show it."""
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # one for all layers, or one for each kind
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            raise UnsupportedModel("its rotary embedding, longrope, depends on the longest request")


def _check_layers(layers_seen, config, spec):
    """layers_seen: (layer, window) of every call of one forward pass. A window longer than the
    probe would not show in its logits, so it is compared with the configuration's."""
    called = sorted(layer for layer, _ in layers_seen)
    if called != list(range(spec.num_layers)):
        raise UnsupportedModel(
            f"of its {spec.num_layers} layers, {len(set(called))} called the attention function, "
            f"{len(called)} times: the others attend in code of their own"
        )
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * spec.num_layers
    window = getattr(config, "sliding_window", None)
    for layer, seen in layers_seen:
        expected = window if kinds[layer] == "sliding_attention" else None
        if kinds[layer] not in ("sliding_attention", "full_attention") or seen != expected:
            raise UnsupportedModel(
                f"layer {layer} is of type {kinds[layer]!r} with sliding_window {window}, but its "
                f"attention was called with sliding_window {seen}"
            )


def _probe_tokens(model):
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return [(17 + 101 * i) % vocab_size for i in range(sum(CHUNKS))]


def _last_rows():
    ends = torch.tensor(CHUNKS).cumsum(0)
    return ends - 1


def _own_logits(model):
    """[chunks, vocab]: the model's own attention over all tokens at once, without any cache."""
    model.set_attn_implementation("eager")
    return _all_own_logits(model, _probe_tokens(model))[_last_rows()]


@torch.inference_mode()
def _all_own_logits(model, tokens):
    device = next(model.parameters()).device
    out = model(input_ids=torch.tensor([tokens], device=device), use_cache=False)
    return out.logits[0].float()


def _check_causal(model):
    """In half precision the tolerance is too wide to tell a model that looks ahead."""
    *tokens, last = _probe_tokens(model)
    one = _all_own_logits(model, [*tokens, last])[:-1]
    other = _all_own_logits(model, [*tokens, tokens[0]])[:-1]
    error = float((one - other).norm() / one.norm())
    if not error <= CAUSAL:
        raise UnsupportedModel(
            f"it attends to later tokens too: the last moves the logits before it by {error:.1%}"
        )


class _Scattered(KVCacheManager):
    """Hands out blocks in an order in which no two neighbours are consecutive."""

    num_given = 0

    def allocate_slots(self, request, num_new_tokens, **_):
        table = self.tables.get(request.request_id) or self.set_table(request, [])
        num_tokens = request.num_computed_tokens + num_new_tokens
        while len(table) * self.block_size < num_tokens:
            table.append(self.num_given * 3 % self.num_blocks)  # 3 divides no power of two
            self.num_given += 1
        return table


def _our_logits(model, spec, attention_backend):
    tokens = _probe_tokens(model)
    ahead = (tokens * NEIGHBOUR)[: NEIGHBOUR + len(CHUNKS) - 1]
    manager = _Scattered(num_blocks=NEIGHBOUR, block_size=BLOCK_SIZE)
    runner = ModelRunner(model, spec, manager, attention_backend)
    request, neighbour, rows = Request("probe", tokens), Request("neighbour", ahead[::-1]), []
    for i, num_new_tokens in enumerate(CHUNKS):
        packed = [
            ScheduledRequest(neighbour, NEIGHBOUR if i == 0 else 1),
            ScheduledRequest(request, num_new_tokens),
        ]
        for entry in packed:
            manager.allocate_slots(*entry)
        with torch.inference_mode():
            rows.append(runner.forward(packed)[1])
        for entry in packed:
            entry.request.num_computed_tokens += entry.num_new_tokens
    _check_layers(runner.last_step.layers_seen, model.config.get_text_config(decoder=True), spec)
    return torch.stack(rows).float()
