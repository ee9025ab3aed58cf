"""`python -m minikv simulate fig2`: where the memory went before paging."""

import argparse

from minikv.request import require_int, require_number
from minikv.simulate import SecondsProgress, run_command
from minikv.simulator.experiments import (
    FIG2_PAPER,
    HOUR_S,
    NUM_SLOTS,
    WARMUP_S,
    fig2_run,
    paper_step_time,
)

DESCRIPTION = """\
Figure 2 of Kwon et al. 2023 (PagedAttention): the average share of KV-cache memory that holds
tokens, is reserved, is wasted inside and outside of what requests hold, for the three contiguous
policies that the paper measured, and for exact reservation with first fit instead of a buddy.
"""
POLICIES = ("max", "pow2", "exact", "first_fit_exact")
SHARES = ("token", "reserved", "internal", "external")
WIDE = 5.0  # points from the paper's figure that ask for an explanation


def main(argv):
    parser = argparse.ArgumentParser(
        prog="python -m minikv simulate fig2",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="hours (default: 3)")
    parser.add_argument("--duration", type=float, default=HOUR_S, metavar="S", help="default: 3600")
    parser.add_argument(
        "--warmup", type=float, default=WARMUP_S, metavar="S", help="not counted (default: 600)"
    )
    parser.add_argument(
        "--report-every",
        type=int,
        default=1,
        metavar="N",
        help="steps between two memory reports, each weighted with its step's time (default: 1)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the shares, in percent, there, too")
    return run_command("simulate fig2", _fig2, parser.parse_args(argv))


def _fig2(args):
    require_int("--seeds", args.seeds, at_least=1)
    require_int("--report-every", args.report_every, at_least=1)
    require_number("--duration", args.duration, above=0)
    require_number("--warmup", args.warmup, at_least=0)
    if args.warmup >= args.duration:
        raise ValueError(f"--warmup is {args.warmup:g}, but --duration only {args.duration:g}")
    step_time = paper_step_time()
    print(
        f"ShareGPT lengths, 2 requests/s for {args.duration:,.0f} s, the first {args.warmup:,.0f} "
        f"not counted, {args.seeds} seeds.\nPool: {NUM_SLOTS:,} slots in blocks of 1; at most "
        "2,048 slots per request. First come, first served.\n\n"
        f"The clock is a model. {step_time.describe()}\n",
        flush=True,
    )
    policies, reports, batches = {}, {}, {}
    with SecondsProgress(args.seeds * len(POLICIES), args.duration) as progress:
        for policy in POLICIES:
            runs = []
            for seed in range(args.seeds):
                run = fig2_run(
                    policy,
                    seed,
                    duration_s=args.duration,
                    warmup_s=args.warmup,
                    report_every=args.report_every,
                    on_step=progress,
                )
                runs.append((run.shares, run.report, run.mean_batched))
            shares, report, batch = zip(*runs, strict=True)
            policies[policy] = {name: _mean(s[name] for s in shares) for name in SHARES}
            reports[policy] = {
                name: 100 * _mean(getattr(r, name) for r in report) / NUM_SLOTS
                for name in report[0]._fields
            }
            batches[policy] = _mean(batch)
    _print_shares(policies, batches)
    _print_reports(reports)
    return {
        "policies": policies,
        "paper": FIG2_PAPER,
        "reports": reports,
        "mean_batched": batches,
        "seeds": args.seeds,
        "assumptions": step_time.describe(),
    }


def _print_shares(policies, batches):
    print(f"{'percent of the pool':24}" + "".join(f"{name:>20}" for name in SHARES) + "   batch")
    wide = []
    for policy, shares in policies.items():
        paper = FIG2_PAPER.get(policy, {})
        cells = ""
        for name in SHARES:
            beside = f"({paper[name]:.1f})" if paper else ""
            cells += f"{shares[name]:12.1f}{beside:>8}"
            if paper and abs(shares[name] - paper[name]) > WIDE:
                wide.append(f"{policy}: {name} {shares[name] - paper[name]:+.1f}")
        print(f"{policy:24}{cells}{batches[policy]:8.2f}")
    print(
        "In brackets: the paper. reserved: slots of tokens still to come. internal: held, never "
        "used.\nexternal: the buddy's rounding, and all that nobody holds. batch: requests in a "
        "step."
    )
    print(f"More than {WIDE:g} points from the paper: {'; '.join(wide) or 'none'}.")


def _print_reports(reports):
    print(
        "\nThe same as MemoryReport splits it (external: free, in pieces too short for the next in "
        "line):"
    )
    names = list(next(iter(reports.values())))
    print(f"{'':24}" + "".join(f"{name:>10}" for name in names))
    for policy, report in reports.items():
        print(f"{policy:24}" + "".join(f"{report[name]:10.1f}" for name in names))


def _mean(values):
    values = list(values)
    return sum(values) / len(values)
