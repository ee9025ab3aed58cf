"""`python -m minikv simulate NAME`: an experiment from the command line, printed as it is measured.

The experiments themselves are in minikv.experiments.
"""

import argparse
import math
import re
import sys

from minikv.commands.progress import RequestsProgress, SecondsProgress
from minikv.commands.report import run_command
from minikv.experiments import fig2, fig13, fig15, hits, paradox, radix_vs_hash
from minikv.experiments.hits import POLICIES
from minikv.experiments.paper import HOUR_S, NUM_SLOTS, WARMUP_S
from minikv.kv_cache.extents import FITS
from minikv.request import require_int, require_number


def _parser(name, description, *, seeds, duration=HOUR_S, warmup=None):
    parser = argparse.ArgumentParser(
        prog=f"python -m minikv simulate {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seeds", type=int, default=seeds, metavar="N", help=f"runs of each (default: {seeds})"
    )
    parser.add_argument(
        "--duration", type=float, default=duration, metavar="S", help=f"default: {duration:g}"
    )
    if warmup is not None:
        parser.add_argument(
            "--warmup",
            type=float,
            default=warmup,
            metavar="S",
            help=f"not counted (default: {warmup:g})",
        )
    parser.add_argument("--json", metavar="FILE", help="write what is measured there, too")
    return parser


def _check(args):
    require_int("--seeds", args.seeds, at_least=1)
    require_number("--duration", args.duration, above=0)
    if "warmup" in args:
        require_number("--warmup", args.warmup, at_least=0)
        if args.warmup >= args.duration:
            raise ValueError(f"--warmup is {args.warmup:g}, but --duration only {args.duration:g}")


# -- the paradox ----------------------------------------------------------------------------------

PARADOX = """\
A service whose prompts share a 200-token header, one in twenty of them a long document, in a pool
of 15,700 slots where each request gets one extent of exactly what it needs. Prints the requests
that were refused when they first came to the head of the queue, and what was free at that moment.
"""


def paradox_main(argv):
    parser = _parser("paradox", PARADOX, seeds=5)
    parser.add_argument(
        "--fit", default=",".join(FITS), help=f"with commas between (default: {','.join(FITS)})"
    )
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s (default: 2)")
    parser.add_argument("--gpu", default="H100", help="whose step times (default: H100)")
    parser.add_argument("--all", action="store_true", help="print every refused request")
    return run_command("simulate paradox", _paradox, parser.parse_args(argv), indent=None)


def _paradox(args):
    _check(args)
    fits = [fit.strip() for fit in args.fit.split(",")]
    if set(fits) - set(FITS):
        raise ValueError(f"--fit is {args.fit!r}; known: {', '.join(FITS)}")
    step_time = paradox.paradox_step_time(args.gpu)
    print(paradox.setting(args.rate, args.duration, step_time), flush=True)
    with SecondsProgress(args.seeds * (len(fits) + 2), args.duration) as progress:
        by_fit, beside = paradox.measure(
            args.seeds,
            fits,
            rate=args.rate,
            gpu=args.gpu,
            duration_s=args.duration,
            on_step=progress,
        )
    paradox.print_result(by_fit, beside, args.all)
    return {
        "runs": [run.as_json() for runs in by_fit.values() for run in runs],
        "beside": [run.as_json() for runs in beside.values() for run in runs],
        "num_slots": NUM_SLOTS,
        "duration_s": args.duration,
        "assumptions": step_time.describe(),
    }


# -- figures 2, 13 and 15 -------------------------------------------------------------------------

FIG2 = """\
Figure 2 of Kwon et al. 2023 (PagedAttention): the average share of KV-cache memory that holds
tokens, is reserved, is wasted inside and outside of what requests hold, for the three contiguous
policies that the paper measured, and for exact reservation with first fit instead of a buddy.
"""


def fig2_main(argv):
    parser = _parser("fig2", FIG2, seeds=3, warmup=WARMUP_S)
    parser.add_argument(
        "--report-every",
        type=int,
        default=1,
        metavar="N",
        help="steps between two memory reports, each weighted with its step's time (default: 1)",
    )
    return run_command("simulate fig2", _fig2, parser.parse_args(argv))


def _fig2(args):
    _check(args)
    require_int("--report-every", args.report_every, at_least=1)
    print(fig2.setting(args.seeds, args.duration, args.warmup), flush=True)
    with SecondsProgress(args.seeds * len(fig2.POLICIES), args.duration) as progress:
        result = fig2.measure(
            args.seeds, args.duration, args.warmup, args.report_every, on_step=progress
        )
    fig2.print_result(result)
    return result


FIG13 = """\
Figure 13 of Kwon et al. 2023 (PagedAttention): the mean number of requests that run at once, in
the pool of Fig. 2, under its three contiguous policies and with blocks of 16 tokens. Numbers more
than 15% from the paper's are named, and what is held to cause them is changed and run again.
"""


def fig13_main(argv):
    parser = _parser("fig13", FIG13, seeds=1, warmup=WARMUP_S)
    return run_command("simulate fig13", _fig13, parser.parse_args(argv))


def _fig13(args):
    _check(args)
    print(fig13.setting(args.seeds, args.duration, args.warmup), flush=True)
    with SecondsProgress(fig13.num_runs() * args.seeds, args.duration) as progress:
        result = fig13.measure(args.seeds, args.duration, args.warmup, on_step=progress)
    fig13.print_result(result)
    return result


FIG15 = """\
Figure 15 of Kwon et al. 2023 (PagedAttention): the share of blocks that is saved where samples of
one prompt, or the beams of a search, share them. What a prompt's beams have in common is replayed
from searches with smollm2. Then what may move the numbers is changed, one cause at a time.
"""


def fig15_main(argv):
    parser = _parser("fig15", FIG15, seeds=3, duration=1_200.0, warmup=200.0)
    return run_command("simulate fig15", _fig15, parser.parse_args(argv))


def _fig15(args):
    _check(args)
    print(fig15.setting(args.seeds, args.duration, args.warmup), flush=True)
    with SecondsProgress(fig15.num_runs() * args.seeds, args.duration) as progress:
        result = fig15.measure(args.seeds, args.duration, args.warmup, on_step=progress)
    fig15.print_result(result)
    return result


# -- hit rates ------------------------------------------------------------------------------------

HITS = """\
Hit rate against capacity: a trace's requests, in order of arrival, through the engine's own prefix
cache. The trace has to name its prompts' blocks, as Mooncake's public ones do (JSONL with hash_ids
of 512-token blocks). Prints the published rates beside, where the trace is one of the paper's.
"""


def _capacity(text):
    digits = text.replace(",", "").replace("_", "")
    if text == "inf":
        return math.inf
    if not re.fullmatch("[0-9]{1,18}", digits):
        raise ValueError(f"--capacity-tokens is {text!r}, but must be a whole number or inf")
    return int(digits)


def hits_main(argv):
    parser = argparse.ArgumentParser(
        prog="python -m minikv simulate hits",
        description=HITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", required=True, metavar="FILE", help="see above")
    parser.add_argument(
        "--capacity-tokens",
        nargs="+",
        default=[str(capacity) for capacity in hits.CAPACITIES],
        metavar="N",
        help="token slots of the pool; inf forgets nothing (default: seven from 100,000 to inf)",
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        default=["lru"],
        metavar="NAME",
        help=f"which cached block is taken first: {', '.join(POLICIES)} (default: lru)",
    )
    parser.add_argument("--requests", type=int, metavar="N", help="the first N of the trace only")
    parser.add_argument(
        "--strict", action="store_true", help="refuse a malformed row instead of skipping it"
    )
    parser.add_argument("--json", metavar="FILE", help="write what is measured there, too")
    return run_command("simulate hits", _hits, parser.parse_args(argv))


def _hits(args):
    if args.requests is not None:
        require_int("--requests", args.requests, at_least=1)
    capacities = list(dict.fromkeys(_capacity(text) for text in args.capacity_tokens))
    policies = list(dict.fromkeys(args.policy))
    trace = hits.open_for_hits(
        args.trace, strict=args.strict, report=lambda text: print(text, file=sys.stderr)
    )
    hits.check(capacities, policies, trace.block_size)
    facts = hits.facts_of(trace, trace.block_size, num_requests=args.requests)
    if not facts.num_requests:
        raise ValueError(f"no request is left: {trace.summary()}")
    print(hits.setting(trace, facts), flush=True)
    trace.report = lambda text: None  # once is enough
    runs = hits.num_runs(capacities, policies)
    with RequestsProgress(runs * facts.num_requests) as progress:
        result = hits.measure(
            trace,
            facts,
            capacities,
            policies,
            num_requests=args.requests,
            on_request=progress,
        )
    hits.print_result(result)
    return result


RADIX = """\
A map of chained hashes and a radix tree, in the same pools on the same requests: hit tokens, blocks
copied and evicted; microseconds in the manager for each request, and for each token of its answer;
what the index takes in memory (measured, for all that is cached), and the books of the blocks.
Chats that grow turn by turn under three headers, or a trace that names its prompts' blocks.
"""


def radix_main(argv):
    parser = argparse.ArgumentParser(
        prog="python -m minikv simulate radix",
        description=RADIX,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--chats", type=int, default=60, metavar="N", help="default: 60")
    parser.add_argument("--turns", type=int, default=6, metavar="N", help="of each (default: 6)")
    parser.add_argument("--trace", metavar="FILE", help="a trace instead, as for simulate hits")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N of the trace only")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="times are the fastest of (default: 3)"
    )
    parser.add_argument("--json", metavar="FILE", help="write what is measured there, too")
    return run_command("simulate radix", _radix, parser.parse_args(argv))


def _radix(args):
    require_int("--rounds", args.rounds, at_least=1)
    if args.trace is None:
        traffic = radix_vs_hash.chats(args.chats, args.turns)
        block_sizes = radix_vs_hash.BLOCK_SIZES
    else:
        if args.requests is not None:
            require_int("--requests", args.requests, at_least=1)
        trace = hits.open_for_hits(args.trace, report=lambda text: print(text, file=sys.stderr))
        traffic, block_sizes = radix_vs_hash.traced(trace, args.requests), (trace.block_size,)
    num_runs = radix_vs_hash.num_runs(block_sizes, rounds=args.rounds)
    with RequestsProgress(num_runs * len(traffic.turns)) as progress:
        runs = radix_vs_hash.compare(traffic, block_sizes, rounds=args.rounds, on_request=progress)
    radix_vs_hash.print_result(runs)
    return {"rows": radix_vs_hash.as_json(runs)}
