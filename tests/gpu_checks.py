"""The checks that need a GPU; `python -m minikv test-gpu` runs this file.

Plain Python, because where a GPU is pytest may not be. Each check prints a line for what it has
compared and raises AssertionError where something differs. With --device cpu the same program runs
without a GPU (a test does that), but then it shows nothing about one.
"""

import argparse
import dataclasses
import json
import random
import sys
import time
from pathlib import Path

import torch
from attention_batches import LIMITS, SEEDS, Batch
from random_models import random_model, random_prompts, spec_of
from reference import Comparison, greedy

from minikv.engine import LLM
from minikv.kv_cache.base import cdiv
from minikv.model.backends import choose_backend, why_not
from minikv.model.loader import Loaded, load
from minikv.request import SamplingParams

POISON = {"gather": 1e4}  # 0 x NaN is NaN: the engine keeps its pool finite for it
FAMILIES = {  # and a seed with which no choice between two tokens is closer than 0.009
    "Llama": 0, "Qwen2": 2, "Qwen3": 3, "Mistral": 0, "Gemma2": 3, "Gemma3": 1, "Phi3": 5,
}  # fmt: skip
TEXTS = [
    "Why is the sky blue?",
    "def fibonacci(n):\n    ",
    "The first ten primes are",
    "Once upon a time, in a village by the sea, there lived a clockmaker who",
]
FAR = 2**31  # numbers: beyond what 32 bits can count


class NotRun(Exception):
    """Why this machine cannot show it."""


def error_of(attend, batch, device, **options):
    error = max(batch.errors(attend, device, **options))
    limit = LIMITS[batch.dtype]
    assert error < limit, f"{batch.kind}: wrong by {error:.1e} of its norm, over {limit:.0e}"
    return error


def backends(args):
    """Every backend against float64 on random batches, unwritten slots poisoned."""
    for name in args.backends:
        for dtype in LIMITS:
            _, attend = choose_backend(args.device, dtype, name)
            poison = POISON.get(name, float("nan"))
            seeds = range(0, args.seeds, 6 if name == "online" else 1)  # a Python loop, so slow
            worst = max(error_of(attend, Batch(s, dtype, poison), args.device) for s in seeds)
            print(f"{name} {dtype}: {len(seeds)} batches, wrong by {worst:.1e} at most")


def splits(args):
    """The Triton kernel with its slots split by force, and with long requests, where it splits."""
    _, attend = choose_backend(args.device, torch.float32, "triton")
    for num_splits in (1, 2, 5):
        for dtype in LIMITS:
            batches = [Batch(seed, dtype, float("nan")) for seed in range(0, args.seeds, 7)]
            worst = max(error_of(attend, b, args.device, num_splits=num_splits) for b in batches)
            print(f"{num_splits} splits, {dtype}: wrong by {worst:.1e} at most")
    for lengths in args.long:
        for dtype in LIMITS:
            batch = Batch(4, dtype, float("nan"), lengths)  # no window
            error = error_of(attend, batch, args.device)
            print(f"contexts {lengths[1]}, {dtype}: wrong by {error:.1e}")


def far_slots(args):
    """K and V that lie beyond 2^31 numbers from the start of the pool."""
    batch = Batch(18, torch.bfloat16, float("nan"))
    _, num_blocks, *block = batch.pool.shape
    offset = cdiv(args.far, block[0] * block[1] * block[2])
    num_bytes = 2 * 2 * (offset + num_blocks) * block[0] * block[1] * block[2]
    if args.device.type == "cuda" and torch.cuda.mem_get_info(args.device)[0] < 1.2 * num_bytes:
        raise NotRun(f"it takes {1.2 * num_bytes / 1e9:.0f} GB of free memory")
    far = torch.empty(2, offset + num_blocks, *block, dtype=batch.dtype, device=args.device)
    far[:, offset:] = batch.pool.to(args.device)
    _, attend = choose_backend(args.device, batch.dtype, "triton")

    def attend_far(query, pool, metadata, **options):
        tables = metadata.block_tables + offset
        return attend(query, far, dataclasses.replace(metadata, block_tables=tables), **options)

    error = error_of(attend_far, batch, args.device)
    print(f"slots from {offset * block[0] * block[1] * block[2]:,} on: wrong by {error:.1e}")


def serve(loaded, answers, comparison, what, **options):
    """Answers them all in one batch, and compares token by token."""
    slots = sum(len(a.token_ids) + 64 for a in answers)
    options["num_gpu_blocks_override"] = cdiv(slots, options["block_size"]) + len(answers)
    longest = max(len(a.token_ids) for a in answers)
    llm = LLM(loaded, max_model_len=longest, max_num_batched_tokens=24, **options)
    params = [SamplingParams(max_tokens=len(a.output), ignore_eos=True) for a in answers]
    outputs = llm.generate([a.prompt for a in answers], params, use_tqdm=False)
    for answer, output in zip(answers, outputs, strict=True):
        comparison.check(output.outputs[0].token_ids, answer, what)
    llm.manager.check()


def identity(args):
    """In float32, greedy output equals the dense cache's token for token."""
    comparison = Comparison()
    loaded = load("tiny", dtype="float32", device=str(args.device))
    rnd = random.Random(0)
    prompts = [[rnd.randrange(256) for _ in range(n)] for n in args.prompts]
    answers = [greedy(loaded.model, p, args.tokens, implementation="eager") for p in prompts]
    for name in args.backends:
        for block_size in args.block_sizes:
            serve(loaded, answers, comparison, f"tiny, {name}, {block_size}",
                  attention_backend=name, block_size=block_size)  # fmt: skip
    for family in args.families:
        seed = FAMILIES[family]
        model = random_model(family, seed).to(args.device)
        model.config.final_logit_softcapping = None  # it makes these large logits all but equal
        answers = [
            greedy(model, prompt, args.tokens, implementation="eager")
            for prompt in random_prompts(seed, args.prompts)
        ]
        loaded = Loaded(model, None, spec_of(model))
        for name in args.backends:
            serve(loaded, answers, comparison, f"{family}, {name}", attention_backend=name,
                  block_size=args.block_sizes[seed % len(args.block_sizes)])  # fmt: skip
    comparison.close()


def checkpoint(args):
    """The same with a model of the user's own, and real prompts."""
    if args.model is None:
        raise NotRun("no --model was given")
    loaded, comparison = load(args.model, dtype="float32", device=str(args.device)), Comparison()
    prompts = [loaded.tokenizer(text).input_ids for text in TEXTS]
    answers = [greedy(loaded.model, p, args.tokens, implementation="eager") for p in prompts]
    for name in args.backends:
        for block_size in args.block_sizes:
            serve(loaded, answers, comparison, f"{args.model}, {name}, {block_size}",
                  attention_backend=name, block_size=block_size)  # fmt: skip
    comparison.close()


CHECKS = {f.__name__: f for f in (backends, splits, far_slots, identity, checkpoint)}


def run(name, args) -> dict:
    """{"part", "status": passed | failed | not run, "reason", "seconds"}."""
    print(f"-- {name}: {CHECKS[name].__doc__.splitlines()[0]}", flush=True)
    start, status, reason = time.perf_counter(), "passed", None
    try:
        if name in ("splits", "far_slots") and "triton" not in args.backends:
            raise NotRun(why_not("triton", args.device, torch.float32) or "not asked for")
        CHECKS[name](args)
    except NotRun as error:
        status, reason = "not run", str(error)
    except Exception as error:  # the other checks may still say something
        status, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
    print(f"{status}{f': {reason}' if reason else ''}\n", flush=True)
    seconds = round(time.perf_counter() - start, 1)
    return {"part": name, "status": status, "reason": reason, "seconds": seconds}


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="little of each, to try the program")
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("highest")  # no TF32
    args.backends = ["triton", "gather", "online"]
    reason = why_not("triton", args.device, torch.float32)
    if reason is not None:
        args.backends.remove("triton")
        print(f"the triton backend cannot run here: {reason}\n")
    args.seeds, args.tokens, args.far = SEEDS, 24, FAR
    args.prompts, args.families, args.block_sizes = (1, 7, 16, 33, 50, 90), FAMILIES, (1, 16, 64)
    # query lengths, sequence lengths: few long requests, a ragged batch, a chunk far into a prompt
    args.long = [([1], [9000]), ([1] * 5, [3, 5000, 17, 900, 64]), ([40, 1], [3000, 2000])]
    if args.small:
        args.seeds, args.tokens, args.far = 1, 2, 1000
        args.prompts, args.families, args.block_sizes = (4, 9), ("Gemma2",), (4,)
        args.long, args.backends = [([1], [700])], args.backends[:2]
    parts = [run(name, args) for name in CHECKS]
    if reason is not None and args.device.type == "cuda":  # on a GPU it is what has to be tested
        parts.append({"part": "triton", "status": "not run", "reason": reason, "seconds": 0.0})
    if args.json is not None:
        args.json.write_text(json.dumps(parts), encoding="utf-8")
    return 1 if any(part["status"] == "failed" for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
