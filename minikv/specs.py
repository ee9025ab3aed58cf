"""What a model costs in memory, and what a GPU has: facts of configurations and datasheets."""

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


# Fields of each model's config.json on the Hugging Face hub; num_parameters is what those fields
# add up to (tests/test_specs.py builds each model without memory and counts).
MODELS = {
    spec.name: spec
    for spec in (
        # HuggingFaceTB/SmolLM2-135M-Instruct
        ModelSpec("SmolLM2-135M", 30, 9, 3, 64, 576, 49_152, 134_515_008, 8_192),
        # mistralai/Mistral-7B-v0.3
        ModelSpec("Mistral 7B v0.3", 32, 32, 8, 128, 4_096, 32_768, 7_248_023_552, 32_768),
        # meta-llama/Llama-3.1-8B and -70B
        ModelSpec("Llama 3.1 8B", 32, 32, 8, 128, 4_096, 128_256, 8_030_261_248, 131_072),
        ModelSpec("Llama 3.1 70B", 80, 64, 8, 128, 8_192, 128_256, 70_553_706_496, 131_072),
        # Qwen/Qwen3-8B
        ModelSpec("Qwen3-8B", 36, 32, 8, 128, 4_096, 151_936, 8_190_735_360, 40_960),
        # lmsys/vicuna-13b-v1.5-16k: Llama 2 13B, its 4,096 positions stretched by 4 (rope_scaling)
        ModelSpec(
            "Vicuna 13B v1.5 16K", 40, 40, 40, 128, 5_120, 32_000, 13_015_864_320, 16_384, "float16"
        ),
        # facebook/opt-13b: the model of the PagedAttention paper's figures
        ModelSpec("OPT-13B", 40, 40, 40, 128, 5_120, 50_272, 12_853_473_280, 2_048, "float16"),
    )
}


@dataclass(frozen=True)
class GPU:
    """Three numbers of a datasheet, at face value: G is 10^9, and no software reaches them all.

    So memory is rounded down a little: of an H100 with 80 GB, nvidia-smi reports 81,559 MiB.
    """

    name: str
    memory_gb: int
    bandwidth: float  # bytes/s
    bf16_flops: float  # FLOP/s of dense products with fp32 accumulation, without sparsity
    source: str

    @property
    def memory_bytes(self) -> int:
        return self.memory_gb * 10**9

    @property
    def ridge(self) -> float:
        """FLOP per byte above which compute, not memory, sets the pace."""
        return self.bf16_flops / self.bandwidth


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("L4", 24, 300e9, 121e12, "NVIDIA L4 datasheet; 242 with sparsity"),
        GPU("RTX 4090", 24, 1_008e9, 165.2e12, "NVIDIA Ada GPU architecture whitepaper"),
        GPU("A100 40GB SXM", 40, 1_555e9, 312e12, "NVIDIA A100 datasheet, 2020"),
        GPU("A100 80GB SXM", 80, 2_039e9, 312e12, "NVIDIA A100 80GB datasheet, 2021"),
        GPU("H100 SXM", 80, 3_350e9, 989e12, "NVIDIA H100 datasheet; 1,979 with sparsity"),
        GPU("H200 SXM", 141, 4_800e9, 989e12, "NVIDIA H200 datasheet; 1,979 with sparsity"),
    )
}


def find_model(name) -> ModelSpec:
    """The model whose name is, or begins with, this one: `opt-13b`, `llama-3.1-8b`. Capitals,
    spaces and punctuation don't count. Raises ValueError, with the names there are."""
    return _find("model", MODELS, name)


def find_gpu(name) -> GPU:
    """As find_model: `A100-40G`, `h100`, `rtx4090`."""
    return _find("GPU", GPUS, name)


def _find(kind, presets, name):
    def plain(text):
        return "".join(c for c in text.lower() if c.isalnum() or c == ".")

    wanted = plain(name)
    exact = [spec for full, spec in presets.items() if plain(full) == wanted]
    found = exact or [
        spec for full, spec in presets.items() if wanted and plain(full).startswith(wanted)
    ]
    if len(found) == 1:
        return found[0]
    names = ", ".join(spec.name for spec in found) if found else ", ".join(presets)
    raise ValueError(f"{kind} {name!r} is {'one of' if found else 'none of'} {names}")
