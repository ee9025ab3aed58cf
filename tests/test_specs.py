import pytest

from minikv.specs import DTYPE_BYTES, ModelSpec

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
