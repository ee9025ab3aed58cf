"""What a model costs in memory: facts read from its configuration, never from its weights."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelSpec:
    """The few numbers of a decoder that decide how much KV memory it needs.

    `num_query_heads` and `num_kv_heads` count heads per layer; they differ under grouped-query
    attention (Ainslie et al., 2023). `head_dim` is not always hidden_size / num_query_heads.
    `num_parameters` counts each stored parameter once (a tied output head is not counted again).
    """

    name: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    num_parameters: int
    max_model_len: int  # positions the model was made for
    dtype: str = "bfloat16"

    def __post_init__(self):
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V (hence the 2) that one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def parameter_bytes(self) -> int:
        return self.num_parameters * self.dtype_bytes
