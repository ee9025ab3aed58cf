"""The attention hook: logits over block tables equal those of the model's own attention.

Measured in units of the reference logits' root mean square. At a weight deviation of 0.5 that is
about 4 and the largest logit about 20, where float32 alone moves transformers' own logits by up
to 3e-4 between its two attentions (eager, sdpa): 1e-4 of 1 would test the rounding. Tiny default
weights would pass with any limit: there, a dropped softcap moves logits by less than 1e-6.
"""

import functools
import random
from types import SimpleNamespace

import pytest
import torch
import transformers
from managers import MinimalManager
from random_models import VOCAB, common, make, random_model, random_prompts, spec_of
from reference import greedy, own_attention
from transformers import AttentionInterface

from minikv.engine import LLM
from minikv.kv_cache.base import BlockCopy, InvariantBroken, KVCacheManager
from minikv.model import attention as hook
from minikv.model import probe
from minikv.model.attention import IMPLEMENTATION, UnsupportedModel
from minikv.model.kernels import gather
from minikv.model.loader import Loaded, load
from minikv.model.probe import adopt
from minikv.model.runner import ModelRunner
from minikv.request import Request
from minikv.scheduler import ScheduledRequest
from minikv.specs import ModelSpec

EXACT = 1e-4  # of the logits' root mean square
# transformers' own logits move by 0.9e-4 between its whole pass and its cache.
EXACT_OF = {"Qwen2Moe": 3e-4}
VISIBLE = 1e-2  # what a fault must exceed


# -- ours, on any mixture of chunks and decodes -------------------------------------------------


def shuffled_manager(num_blocks, block_size, rnd):
    manager = MinimalManager(num_blocks, block_size)
    rnd.shuffle(manager.free_ids)
    return manager


def mixed_steps(runner, answers, rnd):
    """Teacher forced by the answers: each step takes some of the requests, each a decode, a chunk
    or all that it has left. Yields (answer, position, logits row) for each entry of each step."""
    requests = {id(a): Request(str(i), a.token_ids[:-1]) for i, a in enumerate(answers)}
    pending = list(answers)
    while pending:
        packed = []
        for answer in rnd.sample(pending, rnd.randint(1, len(pending))):
            request = requests[id(answer)]
            left = request.num_tokens - request.num_computed_tokens
            if request.num_computed_tokens >= len(answer.prompt):
                num_new_tokens = 1
            else:
                num_new_tokens = rnd.choice([1, rnd.randint(1, left), left])
            runner.manager.allocate_slots(request, num_new_tokens)
            packed.append((answer, ScheduledRequest(request, num_new_tokens)))
        packed.sort(key=lambda pair: pair[1].num_new_tokens > 1)
        with torch.inference_mode():
            logits = runner.forward([entry for _, entry in packed])
        for (answer, entry), row in zip(packed, logits, strict=True):
            entry.request.num_computed_tokens += entry.num_new_tokens
            yield answer, entry.request.num_computed_tokens - 1, row
        pending = [
            a for a in pending if requests[id(a)].num_computed_tokens < requests[id(a)].num_tokens
        ]


def measure(model, answers, block_size, seed=0, poison=None):
    """(largest error of a logit relative to the RMS, positions where greedy differs, all rows)"""
    rnd = random.Random(seed)
    num_blocks = sum(len(a.token_ids) // block_size + 1 for a in answers) + 3
    manager = shuffled_manager(num_blocks, block_size, rnd)
    runner = ModelRunner(model, spec_of(model), manager)
    if poison is not None:
        for pool in runner.pools:
            pool[:, :-1] = poison
    rms = torch.cat([a.logits for a in answers]).square().mean().sqrt()
    error, different, rows = 0.0, [], []
    for answer, position, row in mixed_steps(runner, answers, rnd):
        expected = answer.logits[position]
        error = max(error, float((row - expected).abs().max() / rms))
        if row.argmax() != expected.argmax():
            different.append(position)
        rows.append(row)
    return error, different, torch.stack(rows)


# -- deliberately broken hooks ------------------------------------------------------------------


def without(keyword):
    def broken(*args, **keywords):
        keywords[keyword] = None
        return hook.attention(*args, **keywords)

    return broken


def wrong_scaling(module, query, *args, scaling=None, **keywords):
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return hook.attention(module, query, *args, scaling=scaling * 1.2, **keywords)


def window_dropped(*args, **keywords):
    return hook.attention(*args, **keywords | {"sliding_window": 10**6})


def window_off_by_one(module, *args, sliding_window=None, **keywords):
    window = sliding_window or getattr(module, "sliding_window", None)
    return hook.attention(module, *args, sliding_window=window and window + 1, **keywords)


def wrong_grouping(module, query, key, *args, **keywords):
    """Query head h reads kv head h % num_kv_heads, not h // (heads per kv head)."""
    num_kv_heads = key.shape[1]
    order = torch.arange(query.shape[1]).view(-1, num_kv_heads).T.reshape(-1)
    out, weights = hook.attention(module, query[:, order], key, *args, **keywords)
    return out[:, :, order.argsort()], weights


FAULTS = {
    "scaling": wrong_scaling,
    "scaling dropped": without("scaling"),
    "window dropped": window_dropped,
    "window off by one": window_off_by_one,
    "softcap dropped": without("softcap"),
    "grouping": wrong_grouping,
}
WINDOW = {"window dropped", "window off by one"}
FAMILIES = {  # and the faults that each must show
    "Llama": {"scaling", "grouping"},
    "Qwen2": {"scaling", "grouping"} | WINDOW,
    "Qwen3": {"scaling", "grouping"},
    "Mistral": {"scaling", "grouping"} | WINDOW,
    "Gemma2": {"scaling", "scaling dropped", "grouping", "softcap dropped"} | WINDOW,
    "Gemma3": {"scaling", "scaling dropped", "grouping"} | WINDOW,
    "Phi3": {"scaling", "grouping"} | WINDOW,
    "Olmo2": {"scaling", "grouping"},
    "GPT2": {"scaling"},
    "StableLm": {"scaling", "grouping"},  # these two drop the keyword `step`
    "Nemotron": {"scaling", "grouping"},
    "Qwen2Moe": {"scaling", "grouping"} | WINDOW,  # leaves the window to its mask
}


@pytest.fixture
def register():
    """Registers another function in the hook's place, for this test."""
    yield functools.partial(AttentionInterface.register, IMPLEMENTATION)
    AttentionInterface.register(IMPLEMENTATION, hook.attention)


@pytest.mark.parametrize("seed", [0, 1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_models_own_and_a_broken_hook_would_not_pass(family, seed, register):
    model = random_model(family, seed)
    own = "eager" if family == "Gemma2" else "sdpa"  # sdpa has no softcap
    answers = [greedy(model, p, 12, implementation=own) for p in random_prompts(seed)]
    adopt(model, spec_of(model))
    for block_size in (1, 4, 16):
        error, different, _ = measure(model, answers, block_size, seed)
        print(f"{family} {seed} block size {block_size}: {error:.1e} of the RMS")
        assert error < EXACT_OF.get(family, EXACT)
        assert not different

    faults = FAMILIES[family]
    if spec_of(model).num_kv_heads == 1:
        faults = faults - {"grouping"}  # there is only one to read
    for fault in sorted(faults):
        register(FAULTS[fault])
        error, _, _ = measure(model, answers, 4, seed)
        assert error > VISIBLE, f"{fault}: {error:.1e}"


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_whatever_lies_in_unwritten_slots_changes_nothing(family):
    model = random_model(family, 0)
    answers = [greedy(model, p, 6, implementation="eager") for p in random_prompts(0)]
    adopt(model, spec_of(model))
    for block_size in (1, 4, 16):
        _, _, clean = measure(model, answers, block_size)
        _, _, poisoned = measure(model, answers, block_size, poison=1e4)
        assert torch.equal(clean, poisoned)


@pytest.mark.model
def test_smollm2_logits_equal_its_own_on_real_prompts(smollm2):
    texts = [
        "Why is the sky blue? Answer in one sentence.",
        "def fibonacci(n):\n    ",
        "The first ten prime numbers are",
        "Ünïcödé: 日本語の文章と絵文字 🎉🎈",
    ]
    model, tokenizer, _ = smollm2
    answers = [greedy(model, tokenizer(text)["input_ids"], 12) for text in texts]
    adopt(model, spec_of(model))
    error, different, _ = measure(model, answers, 4)
    print(f"smollm2: {error:.1e} of the RMS")
    assert error < EXACT
    assert not different


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2", dtype="float32", device="cpu")


# -- the hook alone, against plain double precision ---------------------------------------------


class Recorder:
    """Stands in for a model: keeps the StepContext it is called with."""

    def __init__(self, dtype=torch.float32):
        self.dtype = dtype

    def parameters(self):
        yield torch.zeros(1)

    def __call__(self, *, input_ids, position_ids, step, **_):
        self.input_ids, self.position_ids, self.step = input_ids[0], position_ids[0], step
        return SimpleNamespace(logits=torch.zeros(1, 1, 1))


def shape(num_kv_heads=1, head_dim=4, dtype="float32"):
    return ModelSpec("x", 1, num_kv_heads, num_kv_heads, head_dim, 8, 10, 1, 512, dtype)


def dense(query, keys, values, *, scaling, window, softcap):
    """One new token in float64. query: [heads, head_dim]; keys, values: [kv heads, n, head_dim],
    the token's own last."""
    per_kv = query.shape[0] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(per_kv, 0) for x in (keys, values))
    scores = torch.einsum("hd,hnd->hn", query.double(), keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if window is not None:
        scores[:, : max(0, scores.shape[1] - window)] = float("-inf")
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("seed", range(12))
def test_attention_over_random_ragged_batches_equals_float64(seed, dtype, limit):
    rnd, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_kv_heads, per_kv = rnd.choice([1, 2, 3]), rnd.choice([1, 2, 4])
    head_dim, block_size = rnd.choice([8, 20]), rnd.choice([1, 3, 4, 16])
    options = {
        "scaling": rnd.choice([0.1, 0.5, head_dim**-0.5]),
        "softcap": rnd.choice([None, 2.0]),
    }
    window = rnd.choice([None, 1, 5, 30])
    manager = shuffled_manager(400, block_size, rnd)
    model = Recorder(dtype)
    spec = shape(num_kv_heads, head_dim, str(dtype).removeprefix("torch."))
    runner = ModelRunner(model, spec, manager)

    requests = [Request(str(i), [0] * 60) for i in range(5)]
    history = {
        r: [torch.zeros(num_kv_heads, 0, head_dim, dtype=dtype) for _ in "kv"] for r in requests
    }
    largest = 0.0
    for _ in range(5):
        packed = [
            ScheduledRequest(r, rnd.choice([1, 1, rnd.randint(1, 12)]))
            for r in rnd.sample(requests, rnd.randint(1, 5))
        ]
        packed.sort(key=lambda entry: entry.num_new_tokens > 1)
        for request, num_new_tokens in packed:
            manager.allocate_slots(request, num_new_tokens)
        runner.forward(packed)
        num_tokens = sum(entry.num_new_tokens for entry in packed)
        query, key, value = (
            torch.randn(1, heads, num_tokens, head_dim, generator=generator).to(dtype)
            for heads in (num_kv_heads * per_kv, num_kv_heads, num_kv_heads)
        )
        got, _ = hook.attention(
            SimpleNamespace(layer_idx=0), query, key, value, None,
            sliding_window=window, step=model.step, **options,
        )  # fmt: skip
        row, expected = 0, []
        for request, num_new_tokens in packed:
            for _ in range(num_new_tokens):
                history[request] = [
                    torch.cat([old, new[0, :, row : row + 1]], 1)
                    for old, new in zip(history[request], (key, value), strict=True)
                ]
                expected.append(
                    dense(query[0, :, row], *history[request], window=window, **options)
                )
                row += 1
            request.num_computed_tokens += num_new_tokens
        expected = torch.stack(expected)
        assert got.shape == (1, *expected.shape)
        largest = max(largest, float((got[0].double() - expected).norm() / expected.norm()))
    assert largest < limit


# -- what a step tells the layers ---------------------------------------------------------------


def context(tables, entries, *, num_blocks=8, block_size=4, num_kv_heads=1, head_dim=4):
    """The StepContext for entries (name, num_computed_tokens, num_new_tokens), and the model."""
    manager, packed = KVCacheManager(num_blocks, block_size), []
    for name, num_computed_tokens, num_new_tokens in entries:
        request = Request(name, list(range(100, 100 + num_computed_tokens + num_new_tokens)))
        request.num_computed_tokens = num_computed_tokens
        manager.set_table(request, tables[name])
        packed.append(ScheduledRequest(request, num_new_tokens))
    model = Recorder()
    ModelRunner(model, shape(num_kv_heads, head_dim), manager).forward(packed)
    return model.step, model


@pytest.mark.parametrize("num_tokens, slots", [
    (3, [20, 21, 22]), (4, [20, 21, 22, 23]), (5, [20, 21, 22, 23, 8]),
])  # fmt: skip
def test_a_prompt_around_one_block_is_written_to_its_tables_slots(num_tokens, slots):
    step, model = context({"a": [5, 2]}, [("a", 0, num_tokens)])
    half = 9 * 4  # the V of a pool of 8 blocks and one of padding lies that much further on
    assert step.write_rows.tolist() == slots + [slot + half for slot in slots]
    assert model.position_ids.tolist() == list(range(num_tokens))
    assert model.input_ids.tolist() == list(range(100, 100 + num_tokens))


def test_with_two_kv_heads_a_head_of_a_block_lies_together():
    step, _ = context({"a": [5, 2]}, [("a", 3, 2)], num_kv_heads=2)
    # [block, head, offset]: position 3 is offset 3 of block 5, position 4 offset 0 of block 2
    keys = [(5 * 2 + 0) * 4 + 3, (5 * 2 + 1) * 4 + 3, (2 * 2 + 0) * 4, (2 * 2 + 1) * 4]
    assert step.write_rows.tolist() == keys + [row + 9 * 2 * 4 for row in keys]


def test_decodes_form_one_group_and_each_chunk_one_of_its_own():
    tables = {"a": [0], "b": [1, 6, 3], "c": [2, 4], "d": [7, 5]}
    entries = [("a", 2, 1), ("b", 9, 1), ("c", 3, 4), ("d", 0, 6)]
    step, model = context(tables, entries)
    shapes = [(g.first_row, g.num_seqs, g.num_queries, g.num_blocks) for g in step.groups]
    assert shapes == [(0, 2, 1, 3), (2, 1, 4, 2), (6, 1, 6, 2)]
    assert model.position_ids.tolist() == [2, 9, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]
    assert [g.positions.tolist() for g in step.groups] == [
        [[2], [9]], [[3, 4, 5, 6]], [[0, 1, 2, 3, 4, 5]],
    ]  # fmt: skip
    # K rows, then V rows 9 further on (8 blocks and the padding block, which is 8)
    assert step.groups[0].gather_rows.tolist() == [0, 8, 8, 1, 6, 3, 9, 17, 17, 10, 15, 12]
    assert step.groups[1].gather_rows.tolist() == [2, 4, 11, 13]


def test_blocks_reserved_beyond_the_tokens_are_not_read():
    step, _ = context({"a": range(8)}, [("a", 4, 1)])
    assert step.groups[0].gather_rows.tolist() == [0, 1, 9, 10]


@pytest.mark.parametrize("table, message", [
    ([3], "position 4, but its block table has 1 blocks, 4 slots"),
    ([3, 8], "names blocks from 3 to 8, but the pool has 0 to 7"),
    ([-1, 3], "names blocks from -1 to 3"),
])  # fmt: skip
def test_a_table_that_does_not_hold_the_tokens_is_an_error(table, message):
    with pytest.raises(InvariantBroken, match=message):
        context({"a": table}, [("a", 0, 5)])


# -- copies -------------------------------------------------------------------------------------


def test_all_sources_are_read_before_any_destination_is_written():
    runner = ModelRunner(Recorder(), shape(), KVCacheManager(8, 4))
    [pool] = runner.pools
    pool[:] = torch.arange(9).view(1, 9, 1, 1, 1)  # each block holds its own number
    cycle = [BlockCopy(0, 1, 1), BlockCopy(1, 0, 1), BlockCopy(2, 3, 3)]  # 2-4 to 3-5: overlap
    assert runner.run([], cycle) == []
    assert pool[0, :, 0, 0, 0].tolist() == [1, 0, 2, 2, 3, 4, 6, 7, 8]
    assert pool[1, :, 0, 3, 3].tolist() == [1, 0, 2, 2, 3, 4, 6, 7, 8]


def test_a_copy_to_a_host_pool_that_is_not_there_is_an_error():
    runner = ModelRunner(Recorder(), shape(), KVCacheManager(8, 4))
    with pytest.raises(NotImplementedError, match="out"):
        runner.run([], [BlockCopy(0, 0, 1, "out")])


@pytest.mark.parametrize("copies, said", [
    ([BlockCopy(-1, 3, 1)], "leaves the pool, whose blocks are 0 to 7"),
    ([BlockCopy(7, 0, 2)], "leaves the pool"),
    ([BlockCopy(0, 8, 1)], "leaves the pool"),  # the padding block
    ([BlockCopy(0, 3, 0)], "leaves the pool"),
    ([BlockCopy(0, 1, 2), BlockCopy(5, 2, 1)], "writes blocks that an earlier copy writes"),
], ids=["before it", "beyond it", "padding", "nothing", "twice"])  # fmt: skip
def test_a_copy_that_no_manager_may_ask_for_is_refused(copies, said):
    runner = ModelRunner(Recorder(), shape(), KVCacheManager(8, 4))
    [pool] = runner.pools
    pool[:] = torch.arange(9).view(1, 9, 1, 1, 1)
    before = pool.clone()
    with pytest.raises(InvariantBroken, match=said):
        runner.run([], copies)
    assert torch.equal(pool, before)


# -- refusals -----------------------------------------------------------------------------------


def gpt_oss():
    config = transformers.GptOssConfig(
        **common(), head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    )
    return make("GptOss", config)


def bloom():
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4)
    return make("Bloom", config)


def falcon():
    config = transformers.FalconConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        alibi=True, multi_query=False, new_decoder_architecture=False,
    )  # fmt: skip
    return make("Falcon", config)


def mpt():
    config = transformers.MptConfig(vocab_size=VOCAB, d_model=64, n_layers=2, n_heads=4)
    return make("Mpt", config)


def llama(**changes):
    model = make("Llama", transformers.LlamaConfig(**common()))
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def llama_4(**options):
    """Its layers without rotary embedding scale queries by a floor of their place in the row."""
    config = transformers.Llama4TextConfig(
        **common(), head_dim=16, num_local_experts=2, num_experts_per_tok=1,
        intermediate_size_mlp=96, layer_types=["full_attention"] * 2, no_rope_layers=[0, 0],
        **options,
    )  # fmt: skip
    return make("Llama4", config)


def both_ways(family, **options):
    sizes = common()
    if family != "Gemma":
        del sizes["num_key_value_heads"]
    kind = {"Bert": "BertLMHeadModel", "BertGeneration": "BertGenerationDecoder"}
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    torch.manual_seed(0)
    model = getattr(transformers, kind.get(family, f"{family}ForCausalLM"))(config)
    return model.requires_grad_(False).eval()


def roberta():
    sizes = common()
    del sizes["num_key_value_heads"]
    return make("Roberta", transformers.RobertaConfig(**sizes, is_decoder=True))


def longrope():
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    }  # fmt: skip
    config = transformers.Phi3Config(
        **common(), original_max_position_embeddings=32, rope_parameters=rope
    )
    return make("Phi3", config)


def llama_with_layer(change):
    """change(forward) replaces the forward of the last layer's attention."""
    model = llama()
    layer = model.model.layers[-1].self_attn
    layer.forward = change(layer.forward)
    return model


def never_calls_the_hook(forward):
    def own(hidden_states, *args, **kwargs):
        return hidden_states * 0.5, None

    return own


def calls_the_hook_twice(forward):
    def twice(*args, **kwargs):
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    return twice


def scales_by_place(forward):
    """Beyond the 32nd token of a row, as far as no lone probe comes."""

    def scaled(hidden_states, **kwargs):
        places = torch.arange(hidden_states.shape[1])
        return forward(hidden_states=hidden_states * (1 + places // 32)[:, None], **kwargs)

    return scaled


def passes_a_mask(forward):
    def masked(*args, attention_mask=None, **kwargs):
        num_tokens = kwargs["hidden_states"].shape[1]
        mask = torch.full((1, 1, num_tokens, num_tokens), float("-inf")).triu(1)
        return forward(*args, attention_mask=mask, **kwargs)

    return masked


def passes(**keywords):
    return lambda forward: functools.partial(forward, **keywords)


REFUSED = {
    "gpt_oss's sinks": (gpt_oss, "GptOssForCausalLM.*s_aux"),
    "BLOOM": (bloom, "BloomForCausalLM.*0 called"),
    "Falcon's alibi": (falcon, "FalconForCausalLM.*0 called"),
    "MPT's alibi": (mpt, "MptForCausalLM.*0 called"),
    "positions that depend on neighbours": (longrope, "Phi3ForCausalLM.*longrope"),
    "a layer without the hook": (
        lambda: llama_with_layer(never_calls_the_hook), "LlamaForCausalLM.*of its 2 layers, 1 call",
    ),
    "a layer that attends twice": (
        lambda: llama_with_layer(calls_the_hook_twice), "2 called the attention function, 3 times",
    ),
    "an unknown keyword": (
        lambda: llama_with_layer(passes(layer_temperature=2)), "LlamaAttention.*layer_temperature",
    ),
    "a mask of its own": (lambda: llama_with_layer(passes_a_mask), "attention mask of its own"),
    "attention both ways": (lambda: llama_with_layer(passes(is_causal=False)), "mask of its own"),
    "Llama 4's queries": (
        lambda: llama_4(floor_scale=32, attn_scale=0.5), "Llama4ForCausalLM.*place in the step",
    ),
    "Llama 4's queries, far away": (llama_4, "Llama4ForCausalLM.*place in the step"),
    "what depends on the place in the row": (
        lambda: llama_with_layer(scales_by_place), "LlamaForCausalLM exactly: its logits .* off",
    ),
    "attention both ways, as BERT": (
        lambda: both_ways("Bert", is_decoder=False), "BertLMHeadModel.*later tokens too",
    ),
    "attention both ways, by name": (
        lambda: both_ways("Gemma", head_dim=16, use_bidirectional_attention=True),
        "GemmaAttention attends to later tokens too: its is_causal",
    ),
    "RoBERTa's positions": (roberta, "RobertaForCausalLM exactly: its logits"),
    "a window that is not passed": (lambda: llama(sliding_window=300), "sliding_window 300"),
    "a window of a few layers": (
        lambda: llama(sliding_window=300, layer_types=["full_attention", "sliding_attention"]),
        "layer 1 is of type 'sliding_attention'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_be_exact_is_refused_by_name_and_left_as_it_was(case):
    factory, message = REFUSED[case]
    model = factory()
    before, tokens = model.config._attn_implementation, torch.tensor([[5, 6, 7, 8]])
    expected = model(tokens, use_cache=False).logits
    num_kv_heads = getattr(model.config, "num_key_value_heads", 4)
    spec = ModelSpec("odd", 2, 4, num_kv_heads, 16, 64, VOCAB, 1, 512, "float32")
    with pytest.raises(UnsupportedModel, match=message):
        LLM(Loaded(model, None, spec))
    assert model.config._attn_implementation == before
    assert torch.equal(model(tokens, use_cache=False).logits, expected)


@pytest.mark.parametrize("family, options", [
    ("Bert", {}), ("Electra", {}), ("RoCBert", {}), ("BertGeneration", {}),
    ("Gemma", {"head_dim": 16, "use_bidirectional_attention": True}),
])  # fmt: skip
def test_attention_both_ways_is_seen_in_half_precision_too(family, options):
    """Random at its own initial deviation: there the mask moves logits by less than the wide
    tolerance. Whoever looks back only is accepted."""
    model = both_ways(family, **options).to(torch.bfloat16)
    with pytest.raises(UnsupportedModel, match="attends to later tokens too"):
        adopt(model, spec_of(model))
    options |= {"use_bidirectional_attention": False} if family == "Gemma" else {"is_decoder": True}
    model = both_ways(family, **options).to(torch.bfloat16)
    adopt(model, spec_of(model))


def test_llama_4_without_its_scaling_is_exact():
    model = llama_4(attn_temperature_tuning=False)
    answers = [greedy(model, p, 6, implementation="eager") for p in random_prompts(0)]
    adopt(model, spec_of(model))
    error, different, _ = measure(model, answers, 4)
    assert error < EXACT and not different


@pytest.mark.parametrize("dtypes, heads, message", [
    ((torch.bfloat16, torch.float32, torch.float32), 4, "in torch.bfloat16, torch.float32 and"),
    ((torch.float32, torch.bfloat16, torch.float32), 4, "but the pool holds torch.float32"),
    ((torch.float32, torch.float32, torch.float32), 3, r"has Q \(1, 3, 2, 4\), which does not fit"),
], ids=["another Q", "another K", "heads"])  # fmt: skip
def test_what_a_kernel_would_read_wrongly_is_refused(dtypes, heads, message):
    step, _ = context({"a": [0]}, [("a", 0, 2)], num_kv_heads=2)
    shapes = zip((heads, 2, 2), dtypes, strict=True)
    tensors = [torch.ones(1, n, 2, 4, dtype=dtype) for n, dtype in shapes]
    with pytest.raises(UnsupportedModel, match=message):
        hook.attention(SimpleNamespace(layer_idx=0), *tensors, None, step=step)


def test_a_model_whose_logits_differ_is_refused(register):
    register(wrong_scaling)
    model = random_model("Llama", 0)
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM exactly: its logits .* off"):
        adopt(model, spec_of(model))
    with own_attention(model, "eager"):
        assert model(torch.tensor([[5, 6]])).logits.isfinite().all()


def test_a_model_is_tried_anew_where_something_has_changed(register, monkeypatch):
    """A trial takes as long as a short answer: the second engine of a model goes without."""
    trials, ours = [], probe._our_logits
    monkeypatch.setattr(probe, "_our_logits", lambda *args: trials.append(args) or ours(*args))

    def tried(model, backend="gather"):
        before = len(trials)
        adopt(model, spec_of(model), backend)
        return len(trials) > before

    model = random_model("Mistral", 0)
    assert tried(model) and not tried(model)
    assert tried(model, None) and tried(model, "gather") and not tried(model)
    assert tried(random_model("Mistral", 0))
    model.set_attn_implementation("eager")
    assert tried(model)
    model.to(torch.bfloat16)
    assert tried(model)
    model.config.rope_parameters["rope_theta"] += 1
    assert tried(model) and not tried(model)
    assert tried(model, gather.attend) and tried(model, gather.attend)  # a function may change

    register(wrong_scaling)
    model = random_model("Llama", 0)
    with pytest.raises(UnsupportedModel, match="off"):
        adopt(model, spec_of(model))
    register(hook.attention)
    adopt(model, spec_of(model))
    register(wrong_scaling)
    with pytest.raises(UnsupportedModel, match="off"):
        adopt(model, spec_of(model))
    register(hook.attention)
    adopt(model, spec_of(model))

    class Blind(type(model.model.layers[0].self_attn)):
        def forward(self, hidden_states, *args, **keywords):
            return hidden_states, None

    model.model.layers[0].self_attn.__class__ = Blind
    with pytest.raises(UnsupportedModel, match=r"of its \d layers, 1 called"):
        adopt(model, spec_of(model))


def test_an_adopted_model_outside_its_llm_says_so():
    model = random_model("Llama", 0)
    adopt(model, spec_of(model))
    with pytest.raises(UnsupportedModel, match="outside the LLM"):
        model(torch.tensor([[5, 6, 7]]))
