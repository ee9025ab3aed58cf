"""`bench kernel`: one layer's decode attention on a GPU, against the bytes that it cannot avoid.

Each request's new token reads all K and V of its context once. Nothing that reads them can be
faster than copying at this GPU's bandwidth, which is measured here, so the share of that bandwidth
says how much is left to gain. Beside our kernel stand torch's attention on contiguous K and V (no
table to look into) and flex_attention with a page table.
"""

import statistics
import time
from typing import NamedTuple

import torch

from minikv.bench import machine
from minikv.model.backends import AttentionMetadata, why_not

BATCH = 64
CONTEXTS = (512, 4096, 32768)
GOAL = (4096, 0.8)  # at this context, of the copy bandwidth
BLOCK_SIZE = 16
PAGE = 128  # flex_attention masks by tiles of 128, so its pages are that large
COPY_BYTES = 1 << 30
FLUSH_BYTES = 256 << 20  # written before each run: more than any GPU's second-level cache holds
REPEATS = 20
LARGEST_ERROR = 2e-2  # of the output's norm, in bfloat16


class Case(NamedTuple):
    """One layer's shapes: `batch` requests that decode, each with `context` slots written."""

    model: str
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int
    context: int

    @property
    def kv_bytes(self):
        """K and V, each once, in bfloat16."""
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_dim * 2


CASES = [
    Case(*model, BATCH, context)
    for model in [("Llama-3-8B", 32, 8, 128), ("SmolLM2-135M", 9, 3, 64)]
    for context in CONTEXTS
]
DRY_CASES = [Case("dry run", 6, 2, 16, 3, 2 * PAGE)]  # for Triton's interpreter


# -- the engines: each lays K and V out in its own way and returns what is to be timed -------------
# query: [batch, num_query_heads, head_dim]; keys, values: [batch, num_kv_heads, context, head_dim].


def scattered(blocks, generator):
    """[batch, blocks of a request]: block ids in random order, as after hours of traffic."""
    order = torch.randperm(blocks.numel(), generator=generator, device=blocks.device)
    return order.view(blocks.shape).int()


def in_blocks(rows, block_size):
    """[batch, heads, context, head_dim] -> [batch, blocks, heads, block_size, head_dim]."""
    return rows.unflatten(2, (-1, block_size)).transpose(1, 2)


def minikv(query, keys, values, generator):
    from minikv.model.kernels.triton_launch import attend

    batch, num_kv_heads, context, head_dim = keys.shape
    tables = scattered(keys.new_empty(batch, context // BLOCK_SIZE), generator)
    pool = keys.new_empty(2, tables.numel() + 1, num_kv_heads, BLOCK_SIZE, head_dim)
    pool[:, -1] = float("nan")  # the padding block, which nobody may read
    for half, rows in zip(pool, (keys, values), strict=True):
        half[tables.long()] = in_blocks(rows, BLOCK_SIZE)
    metadata = AttentionMetadata(
        block_tables=tables,
        query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device=keys.device),
        seq_lens=torch.full((batch,), context, dtype=torch.int32, device=keys.device),
        first_visible=None,
        max_query_len=1,
        max_seq_len=context,
    )
    return lambda: attend(query, pool, metadata, scaling=head_dim**-0.5)


def sdpa(query, keys, values, generator):
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]


def flex(query, keys, values, generator):
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    batch, num_kv_heads, context, head_dim = keys.shape
    tables = scattered(keys.new_empty(batch, context // PAGE), generator)
    num_pages, pages_each = tables.numel(), tables.shape[1]

    def paged(rows):  # [1, num_kv_heads, num_pages * PAGE, head_dim]
        pages = rows.new_empty(num_kv_heads, num_pages, PAGE, head_dim)
        pages[:, tables.long()] = rows.unflatten(2, (-1, PAGE)).transpose(0, 1)
        return pages.flatten(1, 2)[None]

    owner = torch.empty(num_pages, dtype=torch.long, device=keys.device)
    owner[tables.long().flatten()] = torch.arange(num_pages, device=keys.device) // pages_each
    none = torch.zeros(batch, 1, 1, dtype=torch.int32, device=keys.device)
    wide = none.new_zeros(batch, 1, 1, num_pages)  # as wide as the largest id needs
    wide[:, 0, 0, :pages_each] = tables
    mask = BlockMask.from_kv_blocks(
        none, wide, none + pages_each, wide,  # no page is seen in part, all of a table's whole
        BLOCK_SIZE=(PAGE, PAGE),
        mask_mod=lambda b, h, q, kv: owner[kv // PAGE] == b,
        seq_lengths=(1, num_pages * PAGE),
        compute_q_blocks=False,
    )  # fmt: skip
    torch.compiler.reset()  # after some recompilations it would run without compiling
    # Without a GPU only the arithmetic is tried; compiling for a CPU would take a minute.
    attention = torch.compile(flex_attention, dynamic=False) if keys.is_cuda else flex_attention
    keys, values = paged(keys), paged(values)
    return lambda: attention(query[:, :, None], keys, values, block_mask=mask, enable_gqa=True)[
        :, :, 0
    ]


ENGINES = {"minikv": minikv, "sdpa, contiguous": sdpa, "flex, page table": flex}


# -- measuring ------------------------------------------------------------------------------------


def seconds(run, device) -> float:
    """The median of REPEATS runs, with the caches cold. On a GPU `run` is captured as a graph where
    it can be, so that the time to launch it from Python does not count."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    for _ in range(2):  # compiles, and warms the allocator
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def copy_bandwidth(device, num_bytes=COPY_BYTES) -> float:
    """Bytes per second, those read and those written together."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)


def error_of(got, query, keys, values) -> float:
    """Of the first and the last request, against float64: the worst distance, in norms."""
    worst, per_kv = 0.0, query.shape[1] // keys.shape[1]
    for i in (0, -1):
        k, v = (rows[i].double().repeat_interleave(per_kv, 0) for rows in (keys, values))
        scores = torch.einsum("hd,hnd->hn", query[i].double(), k) * k.shape[-1] ** -0.5
        want = torch.einsum("hn,hnd->hd", scores.softmax(-1), v)
        worst = max(worst, float((got[i].double() - want).norm() / want.norm()))
    return worst


def row(engine, case, device, bandwidth) -> dict:
    """Whatever goes wrong with an engine is its row's `error`, in one line."""
    generator = torch.Generator(device).manual_seed(0)
    result = {"engine": engine, **case._asdict(), "dtype": "bfloat16", "kv_bytes": case.kv_bytes}
    result |= {"seconds": None, "bytes_per_s": None, "share_of_copy": None, "error": None}
    try:
        options = {"dtype": torch.bfloat16, "device": device, "generator": generator}
        query = torch.randn(case.batch, case.num_query_heads, case.head_dim, **options)
        shape = (case.batch, case.num_kv_heads, case.context, case.head_dim)
        keys, values = torch.randn(shape, **options), torch.randn(shape, **options)
        run = ENGINES[engine](query, keys, values, generator)
        error = error_of(run(), query, keys, values)
        if not error <= LARGEST_ERROR:  # NaN, too
            raise ArithmeticError(f"its output is wrong by {error:.1e} of its norm")
        if engine != "sdpa, contiguous":
            del keys, values  # it has a copy in its own layout
        took = seconds(run, device)
        rate = case.kv_bytes / took
        result |= {"seconds": took, "bytes_per_s": rate, "share_of_copy": rate / bandwidth}
    except Exception as failure:  # a peer's compiler, its memory, its mask: all are findings
        text = " ".join(str(failure).split())
        result["error"] = f"{type(failure).__name__}: {text}"[:300]
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return result


def measure(dry_run=False) -> dict:
    """{"status": "run" | "not run" | "failed", "reason", "copy_bytes_per_s", "rows", "machine"}.

    dry_run: a small case on the CPU, where Triton's interpreter stands in for the GPU: it shows
    that this program works, and its times mean nothing.
    """
    device = torch.device("cpu" if dry_run else "cuda")
    result = {"status": "not run", "reason": None, "copy_bytes_per_s": None, "rows": []}
    result["machine"] = machine.facts(torch.device("cpu"))
    if not dry_run and not torch.cuda.is_available():
        result["reason"] = "torch sees no CUDA GPU"
    else:
        result["reason"] = why_not("triton", device, torch.bfloat16)
    if result["reason"] is not None:
        return result
    result["machine"] = machine.facts(device)
    bandwidth = copy_bandwidth(device, 1 << 20 if dry_run else COPY_BYTES)
    result |= {"status": "run", "copy_bytes_per_s": bandwidth}
    print_head(result)
    for case in DRY_CASES if dry_run else CASES:
        for engine in ENGINES:
            result["rows"].append(row(engine, case, device, bandwidth))
            print_row(result["rows"][-1])
    failed = [r["error"] for r in result["rows"] if r["engine"] == "minikv" and r["error"]]
    if any(not error.startswith("OutOfMemoryError") for error in failed):
        result |= {"status": "failed", "reason": "this engine's own kernel: see its rows"}
    return result


def print_head(result):
    facts = result["machine"]
    print(f"{facts['gpu'] or facts['cpu']}, torch {facts['torch']}")
    print(f"a copy moves {result['copy_bytes_per_s'] / 1e9:,.0f} GB/s, reads and writes together\n")
    print(
        f"{'model':13} {'batch':>5} {'context':>7} {'engine':17} {'ms':>8} {'GB/s':>6} of copying"
    )


def print_row(row):
    print(f"{row['model']:13} {row['batch']:5} {row['context']:7} {row['engine']:17} ", end="")
    if row["error"]:
        print(row["error"], flush=True)
        return
    print(f"{row['seconds'] * 1e3:8.3f} {row['bytes_per_s'] / 1e9:6,.0f} ", end="")
    print(f"{row['share_of_copy']:8.0%}", flush=True)


def report(result):
    """The last lines: whether anything was measured, and the goal."""
    if result["status"] != "run":
        print(f"{result['status']}: {result['reason']}")
        return
    context, goal = GOAL
    for r in result["rows"]:
        if r["engine"] == "minikv" and r["context"] == context:
            share = r["share_of_copy"]
            verdict = "reached" if share >= goal else "missed"
            print(f"goal, {goal:.0%} at {context} slots: {verdict} ({r['model']}: {share:.0%})")
