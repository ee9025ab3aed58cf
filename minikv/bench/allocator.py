"""How fast a KV-cache manager is by itself, on one core, in a small pool and in a large one."""

import statistics

from minikv.bench.ask_vllm import ask_vllm
from minikv.bench.vllm_allocator import NUM_APPENDS, REQUEST_TOKENS, measure
from minikv.kv_cache.base import KVCacheManager, cdiv
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.request import Request

BLOCK_SIZE = 16
NUM_BLOCKS = (1_000, 100_000)
SECONDS = 0.3  # of CPU time, for each measurement
RATES = ("appends_per_s", "requests_per_s")
APPENDS_GOAL, REQUESTS_GOAL = 3_000_000, 40_000
ENGINES = {
    "minikv": "PagedKVCacheManager",
    "dict and lists": "a dictionary of tables, a stack of free ids",
    "vllm": "its KVCacheManager, prefix caching off",
}


class DictAndListsManager(KVCacheManager):
    """The least that paging needs: what all else costs is measured against it."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.free_ids = list(range(num_blocks))

    @property
    def num_free_blocks(self):
        return len(self.free_ids)

    def allocate_slots(self, request, num_new_tokens):
        table = self.tables.get(request.request_id)
        if table is None:
            table = self.set_table(request, [])
        num_missing = request.num_computed_tokens + num_new_tokens - len(table) * self.block_size
        if num_missing > 0:
            num_new_blocks = cdiv(num_missing, self.block_size)
            if num_new_blocks > len(self.free_ids):
                return None
            table += self.free_ids[-num_new_blocks:]
            del self.free_ids[-num_new_blocks:]
        return table

    def free(self, request):
        self.free_ids += self.drop_table(request)


def speed(rounds, vllm_python=None) -> list[dict]:
    """Rows {"engine", "num_blocks", "appends_per_s", "requests_per_s"} and, for both rates, the
    range over the rounds; the rates are medians. vLLM is left out where no Python has it."""
    kinds = {"minikv": PagedKVCacheManager, "dict and lists": DictAndListsManager}
    rates = {(engine, n): [] for engine in kinds for n in NUM_BLOCKS}
    for _ in range(rounds):  # in turns, so that a slow minute of the machine hits all of them
        for engine, n in rates:
            manager = kinds[engine](n, BLOCK_SIZE)
            rates[engine, n].append(measure(manager, _new_request, SECONDS))
            manager.check()
    if vllm_python:
        rates |= {("vllm", n): values for n, values in _vllm(vllm_python, rounds).items()}
    return [_row(*key, values) for key, values in rates.items()]


def _new_request(request_id, num_prompt_tokens):
    return Request(request_id, num_prompt_tokens=num_prompt_tokens, max_tokens=NUM_APPENDS + 1)


def _row(engine, num_blocks, rates):
    row = {"engine": engine, "num_blocks": num_blocks}
    for i, name in enumerate(RATES):
        values = [each[i] for each in rates]
        row |= {name: statistics.median(values), f"{name}_range": [min(values), max(values)]}
    return row


def _vllm(python, rounds):
    settings = {
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK_SIZE,
        "seconds": SECONDS,
        "rounds": rounds,
    }
    answer = ask_vllm(python, "vllm_allocator.py", "vLLM's manager", settings)
    return {int(n): values for n, values in answer.items()}


def report(rows):
    few, many = NUM_BLOCKS
    print(f"\n{'one core':15} {'blocks':>8} {'million appends/s':>20} {'thousand requests/s':>22}")
    for row in rows:
        appends, requests = _text(row, RATES[0], 1e6), _text(row, RATES[1], 1e3)
        print(f"{row['engine']:15} {row['num_blocks']:8,} {appends:>20} {requests:>22}")
    print(f"{'goal':24} {APPENDS_GOAL / 1e6:20.2f} {REQUESTS_GOAL / 1e3:22.2f}\n")
    print(f"{f'time at {many:,} blocks / at {few:,}':32} {'append':>12} {'request':>22}")
    for engine, what in ENGINES.items():
        found = {row["num_blocks"]: row for row in rows if row["engine"] == engine}
        if found:
            append, request = (found[few][name] / found[many][name] for name in RATES)
            print(f"{engine:32} {append:12.2f} {request:22.2f}   {what}")
        else:
            print(f"{engine:32} {'not measured':>12} {'':22}   {what}: --vllm-python")
    print(
        f"\nBlocks of {BLOCK_SIZE} tokens; CPU time; medians, and ranges over the rounds. An "
        f"append is\nallocate_slots(request, 1) in a decode step; a request is {REQUEST_TOKENS:,} "
        "tokens, allocated and freed."
    )


def _text(row, name, unit):
    low, high = row[f"{name}_range"]
    return f"{row[name] / unit:.2f} ({low / unit:.2f}-{high / unit:.2f})"
