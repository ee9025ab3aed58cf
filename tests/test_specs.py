import pytest

from minikv.specs import DTYPE_BYTES, GPUS, MODELS, ModelSpec

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
    "Qwen3-8B": ("qwen3", 151_936, 4_096, 12_288, 36, 32, 8, False),
}
FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "tie_word_embeddings",
)  # fmt: skip


def test_presets_are_what_their_configurations_add_up_to():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from minikv.model.loader import count_parameters, spec_from_config

    assert CONFIGS.keys() == MODELS.keys()
    for name, (kind, *values) in CONFIGS.items():
        spec = MODELS[name]
        config = AutoConfig.for_model(
            kind,
            **dict(zip(FIELDS, values, strict=True)),
            head_dim=spec.head_dim,
            max_position_embeddings=spec.max_model_len,
            sliding_window=None,
        )
        with torch.device("meta"):  # shapes without memory
            num_parameters = count_parameters(AutoModelForCausalLM.from_config(config))
        given = {"name": name, "num_parameters": num_parameters, "dtype": "bfloat16"}
        assert spec == spec_from_config(config, **given)


def test_gpus_by_hand():
    for name, gpu in GPUS.items():
        assert gpu.name == name and gpu.source
    assert {name: round(gpu.ridge) for name, gpu in GPUS.items()} == {
        "RTX 4090": 164,
        "A100 40GB SXM": 201,
        "A100 80GB SXM": 153,
        "H100 SXM": 295,
    }
    assert GPUS["H100 SXM"].memory_bytes == 80_000_000_000


def test_what_a_gpu_holds_beside_the_weights():
    llama = MODELS["Llama 3.1 8B"]
    assert llama.kv_bytes_per_token == 131_072
    assert llama.max_model_len * llama.kv_bytes_per_token == 16 * 2**30
    assert MODELS["Llama 3.1 70B"].parameter_bytes > GPUS["H100 SXM"].memory_bytes
