"""`python -m minikv simulate`: an hour of traffic in seconds, on a GPU that is not here."""

import argparse
import dataclasses
import importlib
import sys

from minikv.commands.progress import Progress
from minikv.commands.report import run_command

DESCRIPTION = """\
Serves made-up traffic with the engine's own scheduler, KV-cache manager and loop, without a
model: a step takes as long as a simple formula of the GPU says, on a clock that is not real.
Prints the serving metrics under the names of vLLM's benchmark, and what was assumed.
"""

EPILOG = """\
examples:
  python -m minikv simulate                                  ten minutes of chats, 1 per second
  python -m minikv simulate --rate 2 --duration 3600 --batching static
  python -m minikv simulate --rate 2 --reserve grow --fit best   no slab per request
  python -m minikv simulate --gpu h100 --model llama-3.1-8b --rate 20 --cv 4
  python -m minikv simulate --closed-loop 32 --requests 500 --json out.json
"""

# Subcommands, `simulate NAME ...`: name -> (module:function taking argv, one line of help)
EXPERIMENTS = {
    "paradox": (
        "minikv.commands.experiments:paradox_main",
        "40% of the memory is free, and a request waits",
    ),
    "fig2": (
        "minikv.commands.experiments:fig2_main",
        "where the memory went before paging (PagedAttention)",
    ),
    "fig13": (
        "minikv.commands.experiments:fig13_main",
        "how many requests run at once (PagedAttention)",
    ),
    "fig15": (
        "minikv.commands.experiments:fig15_main",
        "the blocks that samples and beams save by sharing (PagedAttention)",
    ),
    "hits": (
        "minikv.commands.experiments:hits_main",
        "hit rate against capacity, on a trace (Mooncake)",
    ),
    "radix": (
        "minikv.commands.experiments:radix_main",
        "a map of hashes and a radix tree, on the same requests",
    ),
}

THIS_MACHINE = "this-machine"
MANAGERS = ("paged", "contiguous")
DEFAULT_DURATION = 600.0
DEFAULT_REQUESTS = 500  # of a closed loop, which has no clock of its own


def main(argv):
    if argv and argv[0] in EXPERIMENTS:
        module, function = EXPERIMENTS[argv[0]][0].split(":")
        return getattr(importlib.import_module(module), function)(argv[1:])
    if argv and not argv[0].startswith("-"):  # argparse would print all its options
        known = ", ".join(EXPERIMENTS)
        print(
            f"minikv simulate: no experiment {argv[0]!r}; known: {known}, each with --help, as has "
            "python -m minikv simulate",
            file=sys.stderr,
        )
        raise SystemExit(2)  # as argparse does for a wrong command line
    args = _parser().parse_args(argv)
    return run_command("simulate", _serve, args)


def _parser():
    epilog = EPILOG
    if EXPERIMENTS:
        lines = [f"  simulate {name:10} {text}" for name, (_, text) in EXPERIMENTS.items()]
        epilog += "\n".join(["\nexperiments (each with a --help of its own):", *lines]) + "\n"
    parser = argparse.ArgumentParser(
        prog="python -m minikv simulate",
        description=DESCRIPTION,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write settings and metrics there, too")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (default: 0)")

    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--workload",
        default="sharegpt",
        help="sharegpt (default: chats, 161 prompt and 338 output tokens on average), alpaca "
        "(instructions, 19 and 58) or shared-header (questions of 267, documents of 4,000)",
    )
    traffic.add_argument("--rate", type=float, help="requests per second (default: 1)")
    traffic.add_argument(
        "--cv",
        type=float,
        help="coefficient of variation of the gaps between requests; more is burstier (default: "
        "1, a Poisson process)",
    )
    traffic.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help=f"seconds in which requests come (default: {DEFAULT_DURATION:.0f}, unless --requests)",
    )
    traffic.add_argument("--requests", type=int, metavar="N", help="at most so many requests")
    traffic.add_argument(
        "--closed-loop",
        type=int,
        metavar="N",
        help="keep N requests in the engine, the next coming when one ends, instead of --rate; "
        f"--requests of them in all (default: {DEFAULT_REQUESTS})",
    )

    machine = parser.add_argument_group("model and GPU")
    machine.add_argument("--model", default="opt-13b", help="default: opt-13b")
    machine.add_argument(
        "--gpu",
        default="A100-40G",
        help=f"default: A100-40G; {THIS_MACHINE} measures this CPU (a wrong name lists all)",
    )
    machine.add_argument("--compute-efficiency", type=float, default=0.6, help="default: 0.6")
    machine.add_argument("--memory-efficiency", type=float, default=0.8, help="default: 0.8")
    machine.add_argument("--overhead-ms", type=float, default=5.0, help="per step (default: 5)")
    machine.add_argument(
        "--overhead-per-request-ms",
        type=float,
        default=0.0,
        help="and for each request in it (default: 0)",
    )

    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--manager",
        choices=MANAGERS,
        help="default: paged, but contiguous where --reserve or --fit is given",
    )
    engine.add_argument(
        "--reserve",
        help="contiguous: what a request gets when it is admitted: max (default: max_model_len), "
        "pow2, exact, double or grow",
    )
    engine.add_argument(
        "--fit",
        help="contiguous: which free extent it gets: first (default), best, next, worst or buddy",
    )
    engine.add_argument("--batching", default="continuous", help="continuous (default) or static")
    engine.add_argument("--max-num-seqs", type=int, default=256, help="default: 256")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="per step (default: 2048)"
    )
    engine.add_argument(
        "--max-model-len",
        type=int,
        help="prompt and output tokens of a request at most (default: the model's)",
    )
    engine.add_argument("--block-size", type=int, default=16, help="tokens (default: 16)")
    engine.add_argument("--num-blocks", type=int, help="default: what the GPU's memory holds")
    engine.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        help="share of the memory for weights and KV cache (default: 0.9)",
    )
    return parser


def _serve(args):
    from minikv.request import require_int
    from minikv.simulator import Simulation, StepTime, num_blocks_on
    from minikv.specs import find_model
    from minikv.static_batching import BATCHING

    if args.manager is None:
        args.manager = "paged" if args.reserve is args.fit is None else "contiguous"
    if args.batching not in BATCHING:
        raise ValueError(f"--batching is {args.batching!r}; known: {', '.join(BATCHING)}")
    requests, traffic = _traffic(args)
    model = find_model(args.model)
    gpu = _gpu(args.gpu)
    step_time = StepTime(
        model,
        gpu,
        compute_efficiency=args.compute_efficiency,
        memory_efficiency=args.memory_efficiency,
        overhead_s=args.overhead_ms / 1e3,
        overhead_per_request_s=args.overhead_per_request_ms / 1e3,
    )
    max_model_len = model.max_model_len if args.max_model_len is None else args.max_model_len
    if max_model_len > model.max_model_len:
        raise ValueError(
            f"--max-model-len is {max_model_len}, but {model.name} was made for "
            f"{model.max_model_len} positions"
        )
    num_blocks = args.num_blocks
    require_int("--block-size", args.block_size, at_least=1)
    if num_blocks is not None:
        require_int("--num-blocks", num_blocks, at_least=1)
    else:
        num_blocks = num_blocks_on(
            gpu, model, args.block_size, gpu_memory_utilization=args.gpu_memory_utilization
        )
    if args.max_model_len is None:  # a model of long contexts, in a small pool
        max_model_len = min(max_model_len, num_blocks * args.block_size)
    manager = _manager(args, num_blocks, max_model_len)
    scheduler = BATCHING[args.batching](
        manager,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    simulation = Simulation(scheduler, step_time)
    how = f" ({manager.reserve}, {manager.fit} fit)" if args.manager == "contiguous" else ""
    pool = (
        f"{type(manager).__name__}{how}: {num_blocks:,} blocks of {args.block_size} tokens "
        f"({num_blocks * args.block_size:,} slots), max_model_len {max_model_len:,}\n"
        f"{args.batching} batching: at most {args.max_num_seqs} requests, "
        f"{args.max_num_batched_tokens:,} tokens a step"
    )
    print(f"{traffic}\n{pool}\n\nThe clock is a model. {step_time.describe()}\n", flush=True)
    with Progress(len(requests), simulation.core) as progress:
        if args.closed_loop is None:
            simulation.run(requests, on_step=progress)
        else:
            simulation.run_closed_loop(requests, args.closed_loop, on_step=progress)
    metrics = simulation.summary()
    if args.manager == "contiguous":
        metrics["num_relocations"] = manager.num_relocations
        metrics["num_moved_blocks"] = manager.num_moved_blocks
    print_metrics(metrics)
    _print_refused(simulation.requests)
    settings = {
        name: value for name, value in vars(args).items() if value is not None and name != "json"
    }
    resolved = {
        "model": dataclasses.asdict(model),
        "gpu": dataclasses.asdict(gpu),
        "num_blocks": num_blocks,
        "max_model_len": max_model_len,
    }
    if args.manager == "contiguous":
        resolved |= {"reserve": manager.reserve, "fit": manager.fit}
    return {
        "settings": settings | resolved,
        "assumptions": step_time.describe(),
        "metrics": metrics,
    }


def _traffic(args):
    """(requests, what they are in a line)"""
    from minikv.workloads import PRESETS, Gamma

    if args.workload not in PRESETS:
        raise ValueError(f"--workload is {args.workload!r}; known: {', '.join(PRESETS)}")
    if args.seed < 0:
        raise ValueError(f"--seed is {args.seed}, but must be at least 0")
    if args.closed_loop is not None:
        for name in ("rate", "cv", "duration"):
            if getattr(args, name) is not None:
                raise ValueError(f"--closed-loop has no use for --{name}: it sets its own pace")
        if args.closed_loop < 1:
            raise ValueError(f"--closed-loop is {args.closed_loop}, but must be at least 1")
        count = DEFAULT_REQUESTS if args.requests is None else args.requests
        requests = PRESETS[args.workload]().requests(num_requests=count, seed=args.seed)
        how = f"{args.closed_loop} at any time"
    else:
        rate = 1.0 if args.rate is None else args.rate
        workload = PRESETS[args.workload](rate=rate)
        if args.cv is not None:
            workload = dataclasses.replace(workload, arrivals=Gamma(rate, args.cv))
        duration = args.duration
        if duration is None and args.requests is None:
            duration = DEFAULT_DURATION
        requests = workload.requests(
            duration_s=duration, num_requests=args.requests, seed=args.seed
        )
        if not requests:
            raise ValueError(f"no request comes in {duration:g} s at {rate:g} per second")
        burst = "" if args.cv is None else f", gaps with a cv of {args.cv:g}"
        how = f"{rate:g} per second{burst}, the last after {requests[-1].arrival_time:.0f} s"
    return requests, f"{args.workload}: {len(requests):,} requests, {how}, seed {args.seed}"


def _gpu(name):
    from minikv.specs import find_gpu

    if name.lower() == THIS_MACHINE:
        from minikv.bench.roofs import this_machine  # imports torch

        return this_machine()
    try:
        return find_gpu(name)
    except ValueError as error:
        raise ValueError(f"{error}, or {THIS_MACHINE}") from None


def _manager(args, num_blocks, max_model_len):
    from minikv.kv_cache.contiguous import RESERVE_POLICIES, ContiguousKVCacheManager
    from minikv.kv_cache.extents import FITS
    from minikv.kv_cache.paged import PagedKVCacheManager

    for name, known in (("reserve", RESERVE_POLICIES), ("fit", FITS)):
        value = getattr(args, name)
        if value is not None and args.manager != "contiguous":
            raise ValueError(f"--{name} is for --manager contiguous, not {args.manager}")
        if value is not None and value not in known:
            raise ValueError(f"--{name} is {value!r}; known: {', '.join(known)}")
    if args.manager == "contiguous":
        return ContiguousKVCacheManager(
            num_blocks,
            args.block_size,
            max_model_len=max_model_len,
            reserve=args.reserve or "max",
            fit=args.fit or "first",
        )
    num_slots = num_blocks * args.block_size
    if max_model_len > num_slots:
        raise ValueError(f"--max-model-len is {max_model_len}, but the pool has {num_slots} slots")
    return PagedKVCacheManager(num_blocks, args.block_size, max_model_len=max_model_len)


COUNTS = (
    ("completed", ",", "requests"),
    ("failed", ",", "requests"),
    ("duration", ",.1f", "s"),
    ("total_input_tokens", ",", ""),
    ("total_output_tokens", ",", ""),
    ("request_throughput", ".3f", "requests/s"),
    ("output_throughput", ",.1f", "tokens/s"),
    ("total_token_throughput", ",.1f", "tokens/s"),
    ("num_steps", ",", ""),
    ("num_preemptions", ",", ""),
    ("num_relocations", ",", "requests moved because they outgrew their place"),
    ("num_moved_blocks", ",", "copied for it"),
    ("mean_num_seqs", ".2f", "requests in a step, over the time in steps"),
    ("utilization", ".1%", "of the pool's blocks held, over the time in steps"),
)


def print_metrics(metrics):
    """summarize's numbers as a table; the names are those of the JSON (mean_ttft_ms, ...)."""
    from minikv.metrics import PERCENTILES

    for name, form, unit in COUNTS:
        if name in metrics:
            print(f"{name:24}{format(metrics[name], form):>14} {unit}".rstrip())
    columns = ("mean", "median", *(f"p{p}" for p in PERCENTILES if p != 50))
    print(f"\n{'':16}" + "".join(f"{column:>12}" for column in columns))
    for name in ("ttft", "tpot", "itl", "e2el", "queue_time"):
        values = [metrics.get(f"{column}_{name}_ms") for column in columns]
        cells = "".join(f"{'-' if v is None else format(v, ',.1f'):>12}" for v in values)
        print(f"{name + '_ms':16}{cells}")


def _print_refused(requests):
    refused = [r for r in requests if r.finish_reason == "error"]
    if refused:
        print(f"\n{len(refused):,} requests were refused, the first: {refused[0].error}")
