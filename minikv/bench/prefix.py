"""What prefix caching costs: the life of a prompt in the books alone, the manager's part of an
engine's steps where nothing is ever found; and what a hit saves before the first token.
"""

import statistics
import time

from minikv.bench.ask_vllm import ask_vllm
from minikv.bench.vllm_prefix import PROMPT_TOKENS, VOCAB_SIZE, us_per_life
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.request import Request, SamplingParams

BLOCK_SIZE = 16
NUM_BLOCKS = (1_000, 100_000)
CASES = {"miss": "nothing found, each block evicts another", "hit": "all found but the last block"}
SECONDS = 0.3  # of CPU time, for each measurement
US_GOAL, SHARE_GOAL, SAVING_GOAL = 100, 0.02, 0.8
SHARED_TOKENS, OWN_TOKENS = 512, 64


# -- the books alone ------------------------------------------------------------------------


class Minikv:
    """What the scheduler does with a prompt, from its arrival to its end."""

    new_request = Request

    def __init__(self, num_blocks):
        self.manager = PrefixCachingKVCacheManager(num_blocks, BLOCK_SIZE)

    def live(self, request):
        manager = self.manager
        hit = manager.get_num_cached_tokens(request)
        num_new_tokens = request.num_tokens - hit
        if manager.allocate_slots(request, num_new_tokens, num_cached_tokens=hit) is None:
            raise RuntimeError("the manager refused slots that are there")
        request.num_computed_tokens = request.num_tokens
        manager.cache_blocks(request)
        manager.free(request)
        return hit


class Transformers:
    """The block manager of transformers' continuous batching, as its scheduler calls it. Its full
    pool evicts everything that nobody holds, at once."""

    def __init__(self, num_blocks):
        import torch
        from transformers import LlamaConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
        from transformers.generation.continuous_batching.distributed import DistributedHelper
        from transformers.generation.continuous_batching.requests import RequestState

        self._state = RequestState
        one = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "hidden_size"), 1)
        self.cache = PagedAttentionCache(
            LlamaConfig(**one, head_dim=1, bos_token_id=None, eos_token_id=None),
            ContinuousBatchingConfig(
                page_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_batch_tokens=16,
                max_memory_percent=0.9,
                max_requests_per_batch=1,
                use_async_batching=False,
            ),
            "cpu",
            DistributedHelper(None, None),
            torch.float16,
        )

    def new_request(self, request_id, token_ids):
        return self._state(str(request_id), token_ids)

    def live(self, state):
        cache, prompt = self.cache, state.remaining_prefill_tokens
        hit = cache.search_prefix_match(state.request_id, prompt)
        state.position_offset = hit
        num_new_tokens = len(prompt) - hit
        if not cache.can_store_request_tokens(state, num_new_tokens):
            cache.evict_cached_blocks()
            cache.pool.try_to_free_sectors()
            if not cache.can_store_request_tokens(state, num_new_tokens):
                raise RuntimeError("transformers' manager refused slots that are there")
        complete = cache.count_new_complete_blocks(state, num_new_tokens)
        state.position_offset = len(prompt)
        cache.mark_complete_blocks(state, complete)
        cache.free_blocks(state.request_id)
        return hit


ENGINES = {"minikv": Minikv, "transformers": Transformers}


def speed(rounds, vllm_python=None) -> list[dict]:
    """Rows {"engine", "case", "num_blocks", "us_per_1024_tokens", "us_range"}: medians over the
    rounds, and the range of them. vLLM is left out where no Python has it."""
    keys = [(engine, case, n) for engine in ENGINES for case in CASES for n in NUM_BLOCKS]
    times = {key: [] for key in keys}
    for _ in range(rounds):  # in turns, so that a slow minute of the machine hits all of them
        for engine, case, n in keys:
            us = us_per_life(case, ENGINES[engine], n, BLOCK_SIZE, SECONDS)
            times[engine, case, n].append(us)
    if vllm_python:
        settings = {"cases": list(CASES), "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
        settings |= {"seconds": SECONDS, "rounds": rounds}
        answer = ask_vllm(vllm_python, "vllm_prefix.py", "vLLM's manager", settings)
        times |= {("vllm", c, int(n)): us for c in answer for n, us in answer[c].items()}
    return [
        {
            "engine": engine,
            "case": case,
            "num_blocks": n,
            "us_per_1024_tokens": statistics.median(us),
            "us_range": [min(us), max(us)],
        }
        for (engine, case, n), us in times.items()
    ]


def report(rows):
    few, many = NUM_BLOCKS
    found = {(row["engine"], row["case"], row["num_blocks"]): row for row in rows}
    print(f"\n{'us of CPU time':26} {f'{few:,} blocks':>17} {f'{many:,} blocks':>17} {'ratio':>6}")
    for case, what in CASES.items():
        print(f"{case}: {what}")
        for engine in (*ENGINES, "vllm"):
            pair = [found.get((engine, case, n)) for n in NUM_BLOCKS]
            if None in pair:
                print(f"  {engine:24} {'not measured':>17}   --vllm-python")
                continue
            ratio = pair[1]["us_per_1024_tokens"] / pair[0]["us_per_1024_tokens"]
            print(f"  {engine:24} {_text(pair[0]):>17} {_text(pair[1]):>17} {ratio:6.2f}")
    print(f"{'goal, at most':26} {US_GOAL:17} {US_GOAL:17}\n")
    print(
        f"One request of {PROMPT_TOKENS:,} tokens at block size {BLOCK_SIZE}: hashed, looked up, "
        "allocated,\npublished and freed. One core; medians, and ranges over the rounds."
    )


def _text(row):
    low, high = row["us_range"]
    return f"{row['us_per_1024_tokens']:.0f} ({low:.0f}-{high:.0f})"


# -- in the engine --------------------------------------------------------------------------


class Stopwatch:
    """Adds up the wall-clock time inside these methods of an object, until it is stopped."""

    def __init__(self, watched, names):
        self.seconds, self._watched, self._names = 0.0, watched, names
        for name in names:
            setattr(watched, name, self._timed(getattr(watched, name)))

    def _timed(self, method):
        def timed(*args, **options):
            start = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self.seconds += time.perf_counter() - start

        return timed

    def stop(self):
        for name in self._names:
            delattr(self._watched, name)


CALLED = ("get_num_cached_tokens", "allocate_slots", "cache_blocks", "free", "copies")


def make_llm(settings, **options):
    """Without a tokenizer: token ids in, token ids out."""
    from minikv.engine import LLM
    from minikv.model.loader import Loaded

    model, _, spec = settings.load()
    return LLM(Loaded(model, None, spec), kv_cache_manager=PrefixCachingKVCacheManager, **options)


def share_of_steps(llm, workload) -> dict:
    """The manager's part of the time of all steps that serve the workload, whose prompts have
    nothing in common: what the cache costs where it is of no use. One run: both are in it."""
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in workload]
    manager, steps = Stopwatch(llm.manager, CALLED), Stopwatch(llm.core, ["step"])
    try:
        outputs = llm.generate([ids for ids, _ in workload], params, use_tqdm=False)
    finally:
        manager.stop(), steps.stop()
    return {
        "requests": len(workload),
        "hit_tokens": sum(output.num_cached_tokens for output in outputs),
        "manager_s": manager.seconds,
        "steps_s": steps.seconds,
        "share": manager.seconds / steps.seconds,
    }


def ttft(llm, rounds) -> dict:
    """Two prompts with the same beginning, one after the other, in each round: the second finds
    it. The saving, and the part of it that the skipped tokens' share of the prompt predicts."""
    import numpy as np

    rng, seconds, skipped = np.random.default_rng(0), {"miss": [], "hit": []}, []
    vocab_size = min(VOCAB_SIZE, llm.spec.vocab_size)

    def tokens(n):
        return rng.integers(20, vocab_size, n).tolist()

    for _ in range(1 + rounds):  # the first warms up
        shared = tokens(SHARED_TOKENS)
        for case, times in seconds.items():
            (output,) = llm.generate(
                [shared + tokens(OWN_TOKENS)], SamplingParams(max_tokens=1), use_tqdm=False
            )
            times.append(output.metrics[0].ttft)
            if case == "hit":
                skipped.append(output.num_cached_tokens)
    miss, hit = (statistics.median(times[1:]) for times in seconds.values())
    predicted, saved = min(skipped) / (SHARED_TOKENS + OWN_TOKENS), 1 - hit / miss
    return {
        "miss_s": miss,
        "hit_s": hit,
        "skipped_tokens": min(skipped),
        "saved": saved,
        "predicted": predicted,
        "saved_of_predicted": saved / predicted,
    }


def report_engine(share, first):
    print(
        f"\n{share['requests']} requests with nothing in common, {share['hit_tokens']} hit tokens: "
        f"the manager's are\n{share['manager_s']:.3f} of the steps' {share['steps_s']:.1f} s, "
        f"{share['share']:.2%} (goal: less than {SHARE_GOAL:.0%})."
    )
    print(
        f"\nTime to the first token of {SHARED_TOKENS} shared and {OWN_TOKENS} own tokens: "
        f"{first['miss_s'] * 1e3:.0f} ms; with a hit\nof {first['skipped_tokens']}, "
        f"{first['hit_s'] * 1e3:.0f} ms. That is {first['saved']:.0%} less, where "
        f"{first['predicted']:.0%} of the tokens are skipped:\n{first['saved_of_predicted']:.0%} "
        f"of what they predict (goal: at least {SAVING_GOAL:.0%})."
    )
