"""Times a KV-cache manager alone: the loops, which are the same code for every manager, and vLLM's
manager inside vLLM's own environment, where this file is run as a program and nothing of minikv is
imported. Argument: settings as JSON. The last line of standard output: {num_blocks: [[appends per
second, requests per second] of each round]}.
"""

import json
import os
import sys
import time

NUM_RUNNING, PROMPT_TOKENS, NUM_APPENDS = 8, 100, 1_800  # 15,200 slots: they fit in 1,000 blocks
REQUEST_TOKENS, NUM_REQUESTS = 1_024, 200


def appends_per_s(manager, new_request, seconds) -> float:
    """Decode steps of NUM_RUNNING requests in turns, one token each, as the scheduler asks for
    them. Prompts and departures are not timed. At least `seconds` of CPU time are measured.

    new_request(request_id, num_prompt_tokens): a request of the manager's own kind.
    """
    allocate_slots, num_appends, spent = manager.allocate_slots, 0, 0.0
    while spent < seconds:
        requests = [new_request(f"r{i}", PROMPT_TOKENS) for i in range(NUM_RUNNING)]
        for request in requests:
            _not_refused(allocate_slots(request, PROMPT_TOKENS))
            request.num_computed_tokens = PROMPT_TOKENS
        start = time.process_time()
        for _ in range(NUM_APPENDS):
            for request in requests:
                if allocate_slots(request, 1) is None:
                    _not_refused(None)
                request.num_computed_tokens += 1
        spent += time.process_time() - start
        num_appends += NUM_APPENDS * NUM_RUNNING
        for request in requests:
            manager.free(request)
    return num_appends / spent


def requests_per_s(manager, new_request, seconds) -> float:
    """Requests that get all their slots at once and give them back, one after the other."""
    num_requests, spent = 0, 0.0
    while spent < seconds:
        requests = [new_request(f"r{i}", REQUEST_TOKENS) for i in range(NUM_REQUESTS)]
        start = time.process_time()
        for request in requests:
            if manager.allocate_slots(request, REQUEST_TOKENS) is None:
                _not_refused(None)
            manager.free(request)
        spent += time.process_time() - start
        num_requests += NUM_REQUESTS
    return num_requests / spent


def _not_refused(table):
    """A manager that refuses would look fast."""
    if table is None:
        raise RuntimeError("the manager refused slots that are there")


def measure(manager, new_request, seconds) -> list[float]:
    """[appends per second, requests per second]"""
    return [f(manager, new_request, seconds) for f in (appends_per_s, requests_per_s)]


def main():
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    settings = json.loads(sys.argv[1])
    rates = {}
    for num_blocks in settings["num_blocks"]:
        manager, new_request = vllm_manager(num_blocks, settings["block_size"])
        rates[num_blocks] = [
            measure(manager, new_request, settings["seconds"]) for _ in range(settings["rounds"])
        ]
    print(json.dumps(rates))


def vllm_manager(num_blocks, block_size):
    """vLLM's KVCacheManager for full attention, without prefix caching, and how its requests are
    made."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=NUM_APPENDS + 1)

    def new_request(request_id, num_prompt_tokens):
        return Request(
            request_id=request_id,
            prompt_token_ids=[0] * num_prompt_tokens,
            sampling_params=params,
            pooling_params=None,
        )

    return full_attention_manager(num_blocks, block_size, enable_caching=False), new_request


def full_attention_manager(num_blocks, block_size, *, enable_caching):
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return KVCacheManager(
        KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        max_model_len=num_blocks * block_size,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=enable_caching,
    )


if __name__ == "__main__":
    main()
