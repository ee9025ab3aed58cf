"""A random Llama of about a million parameters and a tokenizer of bytes: instant, and offline.

It is for tests and for looking at mechanics. Its text means nothing, but it depends on every token
before it, so a cache that returns one wrong key changes the answer.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = 256, 257, 258  # a byte's token id is the byte itself; these follow

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_config() -> LlamaConfig:
    """A shape in which no two of the numbers that a cache needs are equal by accident.

    Two query heads share a kv head, and head_dim (48) is not hidden_size / heads (32).
    """
    return LlamaConfig(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 0.15):
    """A LlamaForCausalLM on the CPU, the same for the same seed; torch's own RNG is left alone.

    Args:
        std: standard deviation of the matrices. At the usual 0.02 attention is nearly uniform and
            greedy output soon repeats one token, which hides faults; from 0.3 on, rounding alone
            moves fp32 logits by more than the 1e-4 that tests allow.

    The head's rows for the three special tokens are zero, so greedy output never ends by itself.
    """
    with torch.random.fork_rng(devices=[]):  # building the modules draws numbers we don't use
        model = LlamaForCausalLM(tiny_config())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.ndim == 1 else 0.0  # vectors are norm weights
            values = torch.empty(parameter.shape).normal_(mean, std, generator=generator)
            # Parameters alone: model.to(dtype) would round the rotary frequencies as well.
            parameter.data = values.to(dtype)
        model.lm_head.weight[BOS:] = 0
    model.config.dtype = dtype
    return model.requires_grad_(False).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and `<bos>`, `<eos>`, `<pad>`: any text becomes its UTF-8 bytes, and comes back."""
    # The ByteLevel convention writes each byte as one visible character: printable Latin-1 bytes
    # as themselves, the others as the characters from 256 on, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable}
    vocab |= {chr(256 + i): byte for i, byte in enumerate(others)}

    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=tiny_config().max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
