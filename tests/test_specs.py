import pytest

from minikv.specs import DTYPE_BYTES, GPUS, MODELS, ModelSpec, find_gpu, find_model

SMOLLM2 = {
    "name": "smollm2",
    "num_layers": 30,
    "num_query_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
    "vocab_size": 49152,
    "num_parameters": 134_515_008,
    "max_model_len": 8192,
}


def test_bytes_of_a_known_model():
    spec = ModelSpec(**SMOLLM2)  # bfloat16 by default
    # By hand: K and V, 30 layers, 3 heads of 64 numbers, 2 bytes each.
    assert spec.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2 == 23_040
    assert spec.parameter_bytes == 269_030_016


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_bytes_follow_the_dtype(dtype):
    spec = ModelSpec(**SMOLLM2, dtype=dtype)
    assert spec.kv_bytes_per_token == 11_520 * DTYPE_BYTES[dtype]
    assert spec.parameter_bytes == 134_515_008 * DTYPE_BYTES[dtype]


def test_unknown_dtype_is_named():
    with pytest.raises(ValueError, match=r"int3.*float32, bfloat16, float16"):
        ModelSpec(**SMOLLM2, dtype="int3")


# The fields of each config.json that decide how many parameters there are.
CONFIGS = {
    "SmolLM2-135M": ("llama", 49_152, 576, 1_536, 30, 9, 3, True),
    "Mistral 7B v0.3": ("mistral", 32_768, 4_096, 14_336, 32, 32, 8, False),
    "Llama 3.1 8B": ("llama", 128_256, 4_096, 14_336, 32, 32, 8, False),
    "Llama 3.1 70B": ("llama", 128_256, 8_192, 28_672, 80, 64, 8, False),
    "Vicuna 13B v1.5 16K": ("llama", 32_000, 5_120, 13_824, 40, 40, 40, False),
    "Qwen3-8B": ("qwen3", 151_936, 4_096, 12_288, 36, 32, 8, False),
}
# It names them differently, and has positions among its parameters.
OPT = {
    "vocab_size": 50_272, "hidden_size": 5_120, "word_embed_proj_dim": 5_120, "ffn_dim": 20_480,
    "num_hidden_layers": 40, "num_attention_heads": 40, "max_position_embeddings": 2_048,
}  # fmt: skip
FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip


def test_presets_are_what_their_configurations_add_up_to():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from minikv.model.loader import count_parameters, spec_from_config

    assert {*CONFIGS, "OPT-13B"} == MODELS.keys()
    configs = {"OPT-13B": AutoConfig.for_model("opt", **OPT)}
    for name, (kind, *values) in CONFIGS.items():
        configs[name] = AutoConfig.for_model(
            kind,
            **dict(zip(FIELDS, values, strict=True)),
            head_dim=MODELS[name].head_dim,
            max_position_embeddings=MODELS[name].max_model_len,
            sliding_window=None,
        )
    for name, config in configs.items():
        spec = MODELS[name]
        with torch.device("meta"):  # shapes without memory
            num_parameters = count_parameters(AutoModelForCausalLM.from_config(config))
        given = {"name": name, "num_parameters": num_parameters, "dtype": spec.dtype}
        assert spec == spec_from_config(config, **given)


def test_gpus_by_hand():
    for name, gpu in GPUS.items():
        assert gpu.name == name and gpu.source
    assert {name: round(gpu.ridge) for name, gpu in GPUS.items()} == {
        "L4": 403,
        "RTX 4090": 164,
        "A100 40GB SXM": 201,
        "A100 80GB SXM": 153,
        "H100 SXM": 295,
        "H200 SXM": 206,
    }
    assert GPUS["H100 SXM"].memory_bytes == 80_000_000_000


def test_what_a_gpu_holds_beside_the_weights():
    llama = MODELS["Llama 3.1 8B"]
    assert llama.kv_bytes_per_token == 131_072
    assert llama.max_model_len * llama.kv_bytes_per_token == 16 * 2**30
    assert MODELS["Llama 3.1 70B"].parameter_bytes > GPUS["H100 SXM"].memory_bytes


@pytest.mark.parametrize("typed, name", [
    ("A100-40G", "A100 40GB SXM"), ("a100-80g", "A100 80GB SXM"), ("H100", "H100 SXM"),
    ("h200", "H200 SXM"), ("L4", "L4"), ("RTX 4090", "RTX 4090"), ("rtx4090", "RTX 4090"),
    ("rtx-4090", "RTX 4090"), *((name, name) for name in GPUS),
])  # fmt: skip
def test_a_gpu_is_found_by_what_one_types(typed, name):
    assert find_gpu(typed) is GPUS[name]


@pytest.mark.parametrize("typed, name", [
    ("opt-13b", "OPT-13B"), ("OPT", "OPT-13B"), ("llama-3.1-8b", "Llama 3.1 8B"),
    ("llama3.1-70B", "Llama 3.1 70B"), ("mistral", "Mistral 7B v0.3"), ("smollm2", "SmolLM2-135M"),
    *((name, name) for name in MODELS),
])  # fmt: skip
def test_a_model_is_found_by_what_one_types(typed, name):
    assert find_model(typed) is MODELS[name]


@pytest.mark.parametrize("find, typed, message", [
    (find_gpu, "A100", "GPU 'A100' is one of A100 40GB SXM, A100 80GB SXM"),
    (find_gpu, "tpu", "GPU 'tpu' is none of L4, RTX 4090, .*H200 SXM"),
    (find_gpu, "", "GPU '' is none of"),
    (find_gpu, "-", "GPU '-' is none of"),
    (find_model, "llama", "model 'llama' is one of Llama 3.1 8B, Llama 3.1 70B"),
    (find_model, "gpt-5", "model 'gpt-5' is none of SmolLM2-135M, .*OPT-13B"),
])  # fmt: skip
def test_a_name_that_fits_none_or_several_is_refused(find, typed, message):
    with pytest.raises(ValueError, match=message):
        find(typed)
