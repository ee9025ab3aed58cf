"""Small random models of many families, in transformers' own code, and prompts for them."""

import random

import torch
import transformers

from minikv.model.loader import count_parameters, spec_from_config

VOCAB = 400
PROMPT_LENGTHS = (1, 7, 16, 33, 50)


def make(family, config):
    """transformers' own model of this family, every matrix and bias normal with deviation 0.5."""
    kind = {"GPT2": "LMHeadModel"}.get(family, "ForCausalLM")
    model = getattr(transformers, f"{family}{kind}")(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or name.endswith("bias"):
            parameter.data.normal_(0, 0.5, generator=generator)
    return model.requires_grad_(False).eval()


def common(**changes):
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return sizes | changes


def random_model(family, seed):
    rnd = random.Random(seed)
    num_kv_heads, per_kv = rnd.choice([1, 2, 3]), rnd.choice([2, 3])
    num_heads, head_dim, num_layers = num_kv_heads * per_kv, rnd.choice([16, 24, 32]), 2 + seed % 2
    window, scalar = rnd.choice([6, 13]), 4 * head_dim
    sizes = common(
        hidden_size=head_dim * num_heads,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
    )
    free = sizes | {"hidden_size": 12 * num_heads, "head_dim": head_dim}  # these two are unrelated
    kinds = (["sliding_attention", "full_attention"] * 2)[:num_layers]
    config = {
        "Llama": lambda: transformers.LlamaConfig(**free),
        "Qwen2": lambda: transformers.Qwen2Config(
            **sizes, use_sliding_window=True, sliding_window=window, max_window_layers=1
        ),
        "Qwen3": lambda: transformers.Qwen3Config(**free),
        "Mistral": lambda: transformers.MistralConfig(**free, sliding_window=window),
        "Gemma2": lambda: transformers.Gemma2Config(
            **free, sliding_window=window, query_pre_attn_scalar=scalar, attn_logit_softcapping=5.0
        ),
        "Gemma3": lambda: transformers.Gemma3TextConfig(
            **free, sliding_window=window, query_pre_attn_scalar=scalar, layer_types=kinds
        ),
        "Phi3": lambda: transformers.Phi3Config(**sizes, sliding_window=window),
        "Olmo2": lambda: transformers.Olmo2Config(**sizes),
        "StableLm": lambda: transformers.StableLmConfig(**sizes),
        "Nemotron": lambda: transformers.NemotronConfig(**sizes),
        "Qwen2Moe": lambda: transformers.Qwen2MoeConfig(
            **sizes, use_sliding_window=True, sliding_window=window, max_window_layers=1,
            num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        ),
        "GPT2": lambda: transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=head_dim * num_heads, n_layer=num_layers, n_head=num_heads,
            n_positions=512, bos_token_id=1, eos_token_id=2,
        ),
    }[family]()  # fmt: skip
    return make(family, config)


def spec_of(model):
    return spec_from_config(
        model.config, name="x", num_parameters=count_parameters(model), dtype=model.dtype
    )


def random_prompts(seed, lengths=PROMPT_LENGTHS):
    rnd = random.Random(seed)
    return [[rnd.randrange(3, VOCAB) for _ in range(n)] for n in lengths]
