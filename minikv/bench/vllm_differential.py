"""Serves one stream of requests over a prefix cache's books, without a model: the loop, which is
the same code for every engine, and vLLM's manager inside vLLM's own environment, where this file is
run as a program and nothing of minikv is imported. Argument: settings as JSON; on standard input
the stream. The last line of standard output: {"version", "rows": for each of
settings["keep_first"] what serve() returns}.
"""

import json
import os
import sys
from collections import deque

MAX_STEPS_PER_REQUEST = 200  # a request needs about ten: beyond this it hangs


def serve(engine, stream, *, max_num_seqs, max_num_batched_tokens) -> list[list[int]]:
    """One row a step: hit tokens, evictions in the step, free blocks after it, and requests that
    stepped back.

    stream: [prompt, answer, after, delay] each; it arrives `delay` steps after number `after` of
    the stream has ended, or after the beginning where `after` is None. The answer's tokens are
    "sampled", one a step, as soon as all before them are computed.

    engine: new_request(name, token_ids), find(request) -> hit tokens, allocate(request,
    num_new_tokens, hit) -> bool, computed(request), append(request, token), free(request),
    num_free_blocks, num_evictions. Its requests count num_tokens and num_computed_tokens.
    """
    due, followers, answers, rows = {}, {}, {}, []
    for number, (_, _, after, delay) in enumerate(stream):
        if after is None:
            due.setdefault(delay, []).append(number)
        else:
            followers.setdefault(after, []).append((number, delay))
    waiting, running, num_ended = deque(), [], 0
    while num_ended < len(stream):
        step = len(rows)
        if step > MAX_STEPS_PER_REQUEST * len(stream):
            raise RuntimeError(f"{num_ended} of {len(stream)} requests ended in {step} steps")
        for number in due.pop(step, ()):
            prompt, answer = stream[number][:2]
            request = engine.new_request(number, prompt)
            answers[request.request_id] = number, iter(answer)
            waiting.append(request)
        evictions_before, hit_tokens = engine.num_evictions, 0
        budget = max_num_batched_tokens
        scheduled, num_preempted = _schedule_running(engine, running, waiting, budget)
        budget -= sum(num_new_tokens for _, num_new_tokens in scheduled)
        while waiting and budget and len(running) < max_num_seqs and not num_preempted:
            request = waiting[0]
            hit = engine.find(request)
            num_new_tokens = min(request.num_tokens - hit, budget)
            if not engine.allocate(request, num_new_tokens, hit):
                break
            running.append(waiting.popleft())
            request.num_computed_tokens = hit
            scheduled.append((request, num_new_tokens))
            budget, hit_tokens = budget - num_new_tokens, hit_tokens + hit
        for request, num_new_tokens in scheduled:
            request.num_computed_tokens += num_new_tokens
            engine.computed(request)
            if request.num_computed_tokens < request.num_tokens:
                continue
            number, answer = answers[request.request_id]
            token = next(answer, None)
            if token is not None:
                engine.append(request, token)
                continue
            running.remove(request)
            engine.free(request)
            num_ended += 1
            for follower, delay in followers.get(number, ()):
                due.setdefault(step + 1 + delay, []).append(follower)
        num_evicted = engine.num_evictions - evictions_before
        rows.append([hit_tokens, num_evicted, engine.num_free_blocks, num_preempted])
    return rows


def _schedule_running(engine, running, waiting, budget):
    """As every scheduler does: those that run first; without room the last of them steps back."""
    scheduled, num_preempted, i = [], 0, 0
    while i < len(running) and budget:
        request = running[i]
        num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
        while not engine.allocate(request, num_new_tokens, 0):
            victim = running.pop()
            engine.free(victim)
            victim.num_computed_tokens = 0
            waiting.appendleft(victim)
            num_preempted += 1
            if victim is request:
                break
        else:
            scheduled.append((request, num_new_tokens))
            budget -= num_new_tokens
            i += 1
    return scheduled, num_preempted


def vllm_engine(num_blocks, block_size, keep_first):
    """vLLM's manager behind the loop's methods. keep_first: of blocks with equal content only the
    first gets into its map; left alone, it keeps all."""
    from vllm_prefix import VLLM  # its neighbour

    class Engine(VLLM):
        num_evictions = 0

        def new_request(self, name, token_ids):
            request = super().new_request(name, token_ids)
            self.hash(request)
            return request

        def find(self, request):
            self._found, hit, *_ = self.manager.get_computed_blocks(request)
            return hit

        def allocate(self, request, num_new_tokens, hit):
            found = (hit, self._found) if hit else ()
            return self.manager.allocate_slots(request, num_new_tokens, *found) is not None

        def computed(self, request):
            """Published already, by allocate_slots."""

        def append(self, request, token):
            request.append_output_token_ids(token)

        def free(self, request):
            self.manager.free(request)

        @property
        def num_free_blocks(self):
            return self.manager.block_pool.get_num_free_blocks()

    engine = Engine(num_blocks, block_size)
    pool = engine.manager.block_pool
    evict, insert = pool._maybe_evict_cached_block, pool._insert_block_hash

    def counted(block):
        evicted = evict(block)
        engine.num_evictions += evicted
        return evicted

    def insert_first(block_hash, block, num_tokens):
        if pool.cached_block_hash_to_block.get_one_block(block_hash) is None:
            insert(block_hash, block, num_tokens)

    pool._maybe_evict_cached_block = counted
    if keep_first:
        pool._insert_block_hash = insert_first
    return engine


def main():
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    settings, stream = json.loads(sys.argv[1]), json.load(sys.stdin)
    import vllm

    sizes = settings["num_blocks"], settings["block_size"]
    rows = [
        serve(vllm_engine(*sizes, keep_first), stream, **settings["limits"])
        for keep_first in settings["keep_first"]
    ]
    print(json.dumps({"version": vllm.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
