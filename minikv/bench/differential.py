"""One stream of requests through vLLM's KVCacheManager and ours, compared step by step: hit
tokens, evictions and free blocks. Where the two differ they do so for a reason; each reason has a
switch, and with all of them thrown nothing may be left.
"""

import random
from itertools import zip_longest

from minikv.bench.ask_vllm import ask_vllm
from minikv.bench.vllm_differential import serve
from minikv.kv_cache.block_cache import CachingBlockPool
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.request import Request

NUM_REQUESTS, NUM_BLOCKS, BLOCK_SIZE = 2_000, 200, 4
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 96}
VOCAB_SIZE, NUM_HEADERS = 50_000, 5
# reason -> what minikv does, and vLLM does not
REASONS = {
    "written": "minikv publishes a block once K and V are written, vLLM when it allocates it",
    "first": "of two equal blocks minikv's map keeps the first, vLLM's keeps both",
    "parent": "minikv asks for the very block that stood before, vLLM for its hash",
}
COLUMNS = ("hit tokens", "evictions", "free blocks", "stepped back")


def make_stream(num_requests=NUM_REQUESTS, seed=0) -> list:
    """[prompt, answer, after, delay] each, as `serve` reads them.

    Chats of one to five turns under one of a few headers, the next prompt with the last answer in
    it; every fourth chat is asked twice in the same step; every fifth request is a document that
    nobody asks about again.
    """
    rnd, stream, start = random.Random(seed), [], 0

    def tokens(low, high):
        return [rnd.randrange(VOCAB_SIZE) for _ in range(rnd.randint(low, high))]

    headers = [tokens(10, 60) for _ in range(NUM_HEADERS)]
    while len(stream) < num_requests:
        start += rnd.randint(0, 12)
        if rnd.random() < 0.2:
            stream.append([tokens(60, 300), tokens(2, 10), None, start])
            continue
        twice, history, after = rnd.random() < 0.25, rnd.choice(headers), [None, None]
        for turn in range(rnd.randint(1, 5)):
            prompt, answer = history + tokens(2, 30), tokens(1, 40)
            delay = rnd.randint(0, 30) if turn else start
            for i in range(1 + twice):
                stream.append([prompt, answer, after[i], delay])
                after[i] = len(stream) - 1
            history = prompt + answer
    return stream[:num_requests]


class Minikv:
    """Our manager behind the loop's methods. early: a block is published when it is allocated."""

    def __init__(self, manager, early=False):
        self.manager, self.early = manager, early

    def new_request(self, name, token_ids):
        return Request(name, token_ids)

    def find(self, request):
        return self.manager.get_num_cached_tokens(request)

    def allocate(self, request, num_new_tokens, hit):
        if self.manager.allocate_slots(request, num_new_tokens, num_cached_tokens=hit) is None:
            return False
        if self.early:
            before = request.num_computed_tokens
            request.num_computed_tokens = before + hit + num_new_tokens
            self.manager.cache_blocks(request)
            request.num_computed_tokens = before
        return True

    def computed(self, request):
        self.manager.cache_blocks(request)

    def append(self, request, token):
        request.append(token)

    def free(self, request):
        self.manager.free(request)
        self.manager.check()

    @property
    def num_free_blocks(self):
        return self.manager.num_free_blocks

    @property
    def num_evictions(self):
        return self.manager.num_evictions


class _WithoutNumbers(CachingBlockPool):
    def publish(self, block, key, parent):
        super().publish(block, key, 0)
        block.publication = 0


class HashIsEnough(PrefixCachingKVCacheManager):
    """Every publication has the number 0, so that no parent is another than the one before; and a
    request whose beginning was another's, and is gone, does not publish its own."""

    def _new_pool(self):
        return _WithoutNumbers(self.num_blocks, self._order())

    def cache_blocks(self, request):
        num_done, _, _ = self._published.get(request.request_id, (0, None, 0))
        self._published[request.request_id] = num_done, None, 0
        super().cache_blocks(request)


def serve_minikv(stream, removed=()):
    """The rows of our manager, with these reasons taken out of it ("first" is taken out of
    vLLM's)."""
    kind = HashIsEnough if "parent" in removed else PrefixCachingKVCacheManager
    engine = Minikv(kind(NUM_BLOCKS, BLOCK_SIZE), early="written" in removed)
    return serve(engine, stream, **LIMITS)


def compare(stream, vllm_python):
    """(vLLM's version, rows {"reasons", "steps": [minikv, vLLM], "different_steps": {column: n},
    "minikv", "vllm": {column: sum}}): all reasons in force, each alone, none."""
    settings = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "limits": LIMITS}
    settings["keep_first"] = [False, True]
    answer = ask_vllm(vllm_python, "vllm_differential.py", "vLLM's manager", settings, stdin=stream)
    both, first = answer["rows"]
    rows = []
    for reasons in (list(REASONS), *([reason] for reason in REASONS), []):
        ours = serve_minikv(stream, removed=REASONS.keys() - set(reasons))
        rows.append(_row(reasons, ours, both if "first" in reasons else first))
    return answer["version"], rows


def _row(reasons, ours, theirs):
    missing = [None] * len(COLUMNS)
    pairs = list(zip_longest(ours, theirs, fillvalue=missing))
    different = {name: sum(a[i] != b[i] for a, b in pairs) for i, name in enumerate(COLUMNS)}
    sums = [
        {name: sum(row[i] for row in rows) for i, name in enumerate(COLUMNS)}
        for rows in (ours, theirs)
    ]
    return {
        "reasons": reasons,
        "steps": [len(ours), len(theirs)],
        "different_steps": different,
        "minikv": sums[0],
        "vllm": sums[1],
    }


def num_unexplained(rows) -> int:
    """Steps that differ with every reason removed."""
    return max(rows[-1]["different_steps"].values())


def report(version, stream, rows):
    print(
        f"\n{len(stream):,} requests in {rows[-1]['steps'][0]:,} steps, {NUM_BLOCKS} blocks of "
        f"{BLOCK_SIZE} tokens, at most {LIMITS['max_num_seqs']} at once; vLLM {version}\n"
    )
    print(f"{'':19} {'steps that differ in':^39} {'minikv':>13} {'vLLM':>13}")
    heads = [("hit", "tokens"), ("evic-", "tions"), ("free", "blocks"), ("stepped", "back")]
    pairs = [("hit", "tokens"), ("evic-", "tions")] * 2
    for line in (0, 1):
        cells = "".join(f"{head[line]:>9}" for head in heads)
        print(f"{('in force', '')[line]:19} {cells}   " + "".join(f"{p[line]:>8}" for p in pairs))
    for row in rows:
        names = row["reasons"]
        name = "all three" if len(names) == len(REASONS) else names[0] if names else "none"
        cells = "".join(f"{row['different_steps'][column]:9,}" for column in COLUMNS)
        sums = [row[engine][column] for engine in ("minikv", "vllm") for column in COLUMNS[:2]]
        print(f"{name:19} {cells}   " + "".join(f"{value:8,}" for value in sums))
    print()
    for name, what in REASONS.items():
        print(f"{name:8} {what}")
    print(
        "Once a hit differs, a request gets room sooner or later: the steps after it differ, too.\n"
    )
    left = num_unexplained(rows)
    print(
        "Without these reasons the two are equal in every step."
        if left == 0
        else f"{left:,} steps differ, and no reason says why."
    )
