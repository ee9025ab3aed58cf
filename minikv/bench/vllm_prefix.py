"""Times the life of a prompt in a prefix cache: the loops, which are the same code for every
engine, and vLLM's manager inside vLLM's own environment, where this file is run as a program and
nothing of minikv is imported. Argument: settings as JSON. The last line of standard output:
{case: {num_blocks: [microseconds of a life, in each round]}}.

An engine here has `new_request(request_id, token_ids)` and `live(request)`, which hashes its
blocks, looks them up, allocates, publishes what was computed, frees, and returns the hit's tokens.
"""

import itertools
import json
import os
import sys
import time

import numpy as np

PROMPT_TOKENS, VOCAB_SIZE = 1_024, 49_152
BATCH = 8  # requests between two looks at the clock: half of a pool of 1,000 blocks


def us_per_life(case, make_engine, num_blocks, block_size, seconds) -> float:
    """Microseconds of CPU time per request of PROMPT_TOKENS; at least `seconds` are measured.

    miss: prompts that nobody has seen, in a pool full of cached blocks, so that each evicts what
    it needs. hit: prompts that are all there, in turns; they fill half of the pool.
    """
    engine, rng, names = make_engine(num_blocks), np.random.default_rng(0), itertools.count()
    blocks_each = PROMPT_TOKENS // block_size
    num_before = num_blocks // blocks_each + 1 if case == "miss" else num_blocks // blocks_each // 2
    seen = [_prompt(rng) for _ in range(max(1, num_before))]
    for prompt in seen:
        _live(engine, [engine.new_request(next(names), prompt)], 0)
    prompts = itertools.cycle(seen) if case == "hit" else iter(lambda: _prompt(rng), None)
    full_hit = (PROMPT_TOKENS - 1) // block_size * block_size if case == "hit" else 0
    num_lives, spent = 0, 0.0
    while spent < seconds:
        batch = [engine.new_request(next(names), next(prompts)) for _ in range(BATCH)]
        spent += _live(engine, batch, full_hit)
        num_lives += BATCH
    return spent / num_lives * 1e6


def _prompt(rng):
    return rng.integers(20, VOCAB_SIZE, PROMPT_TOKENS).tolist()


def _live(engine, requests, expected):
    """CPU seconds. An engine that finds more, or less, is not doing what is measured."""
    live, found = engine.live, []
    start = time.process_time()
    for request in requests:
        found.append(live(request))
    seconds = time.process_time() - start
    if set(found) != {expected}:
        raise RuntimeError(f"hits of {sorted(set(found))} tokens, but {expected} were expected")
    return seconds


class VLLM:
    """vLLM's KVCacheManager for full attention, with its own hash (sha256 unless it says else)."""

    def __init__(self, num_blocks, block_size):
        from vllm import SamplingParams
        from vllm.config import CacheConfig
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.request import Request
        from vllm_allocator import full_attention_manager  # its neighbour

        hash_fn = get_hash_fn_by_name(CacheConfig.prefix_caching_hash_algo)
        kv_cache_utils.init_none_hash(hash_fn)
        self.hasher = kv_cache_utils.get_request_block_hasher(block_size, hash_fn)
        # One block of vLLM's pool stands for "none", and is never handed out.
        self.manager = full_attention_manager(num_blocks + 1, block_size, enable_caching=True)
        self._params, self._request = SamplingParams(max_tokens=1_000), Request

    def new_request(self, request_id, token_ids):
        """Not hashed yet: live() does that."""
        return self._request(
            request_id=str(request_id),
            prompt_token_ids=token_ids,
            sampling_params=self._params,
            pooling_params=None,
        )

    def hash(self, request):
        request._block_hasher = self.hasher
        request.update_block_hashes()

    def live(self, request):
        manager = self.manager
        self.hash(request)
        blocks, hit, *_ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - hit, hit, blocks) is None:
            raise RuntimeError("vLLM's manager refused slots that are there")
        request.num_computed_tokens = request.num_tokens  # it published them when it allocated
        manager.free(request)
        return hit


def main():
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    settings = json.loads(sys.argv[1])
    block_size, seconds = settings["block_size"], settings["seconds"]
    times = {}
    for case in settings["cases"]:
        times[case] = {
            num_blocks: [
                us_per_life(case, lambda n: VLLM(n, block_size), num_blocks, block_size, seconds)
                for _ in range(settings["rounds"])
            ]
            for num_blocks in settings["num_blocks"]
        }
    print(json.dumps(times))


if __name__ == "__main__":
    main()
