"""The workload of the benchmark: the same requests for every engine, on every machine."""

from typing import NamedTuple

import numpy as np

MAX_MODEL_LEN = 600  # the longest prompt with the longest output
PROMPT_TOKENS = (20, 400)  # from, to; both included
OUTPUT_TOKENS = (20, 200)
FIRST_TOKEN_ID = 20  # the ids below are special tokens in many vocabularies


class Item(NamedTuple):
    """One request: these tokens in, exactly so many out, whatever the model would say."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def make_workload(num_requests=64, *, vocab_size, seed=0) -> list[Item]:
    """Lengths are drawn before tokens, so that they don't depend on the vocabulary. The tokens
    are random: what an engine must compute depends on their number alone."""
    rng = np.random.default_rng(seed)
    prompt_lens = rng.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, num_requests).tolist()
    output_lens = rng.integers(OUTPUT_TOKENS[0], OUTPUT_TOKENS[1] + 1, num_requests).tolist()
    return [
        Item(rng.integers(FIRST_TOKEN_ID, vocab_size, prompt_len).tolist(), output_len)
        for prompt_len, output_len in zip(prompt_lens, output_lens, strict=True)
    ]
