"""The two roofs of this machine, measured, in the form of a GPU preset for the simulator."""

import time

import torch

from minikv.machine import memory
from minikv.model.loader import auto_dtype
from minikv.specs import GPU

SIDE = 1536  # of the square matrices: large enough for full speed, small enough for a slow CPU
NUM_BYTES = 1 << 28  # read in one go: more than any cache holds
SECONDS = 1.0  # for each of the two, at least two runs


def this_machine(dtype=None) -> GPU:
    """What this CPU reaches, with torch's number of threads, in a square product (in dtype; the
    engine's choice by default) and in reading memory: the best of a second of runs each.

    Unlike a datasheet's, these roofs are reached by software: use them with efficiencies of 1.
    """
    dtype = auto_dtype("cpu")[0] if dtype is None else dtype
    square, long = torch.randn(SIDE, SIDE).to(dtype), torch.ones(NUM_BYTES // 4)
    flops = 2 * SIDE**3 / _best(lambda: square @ square)
    bandwidth = NUM_BYTES / _best(long.sum)
    name = str(dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    return GPU(
        "this machine",
        max(1, memory()[0] // 10**9),
        bandwidth,
        flops,
        f"measured: {name} products of {SIDE} x {SIDE}, {threads} threads",
    )


def _best(function) -> float:
    """Seconds of the fastest run: anything slower is somebody else's work."""
    best, end, runs = float("inf"), time.perf_counter() + SECONDS, 0
    while runs < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
        runs += 1
    return best
