"""`python -m minikv simulate paradox`: 40% of the memory is free, and a request waits."""

import argparse
from statistics import median

from minikv.kv_cache.extents import FITS
from minikv.request import require_int, require_number
from minikv.simulate import SecondsProgress, run_command
from minikv.simulator.experiments import HOUR_S, NUM_SLOTS, paradox_run, paradox_step_time
from minikv.simulator.refusals import with_much_free
from minikv.workloads import shared_header, sharegpt

DESCRIPTION = """\
A service whose prompts share a 200-token header, one in twenty of them a long document, in a pool
of 15,700 slots where each request gets one extent of exactly what it needs. Prints the requests
that were refused when they first came to the head of the queue, and what was free at that moment.
"""
MUCH, QUARTER = 0.4, 0.25
SHOWN = 8  # refusals of a run that are printed, unless --all
SHAREGPT_RATE = 1.5  # times --rate: then chats hold as much of the pool
SLOWER_GPU = "A100-40G"
HOLES_EVERY = 200  # steps between two counts of the free extents: each looks at all of them


def main(argv):
    parser = argparse.ArgumentParser(
        prog="python -m minikv simulate paradox",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="hours (default: 5)")
    parser.add_argument(
        "--fit", default=",".join(FITS), help=f"with commas between (default: {','.join(FITS)})"
    )
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s (default: 2)")
    parser.add_argument("--gpu", default="H100", help="whose step times (default: H100)")
    parser.add_argument("--duration", type=float, default=HOUR_S, metavar="S", help="default: 3600")
    parser.add_argument("--all", action="store_true", help="print every refused request")
    parser.add_argument("--json", metavar="FILE", help="write every refused request there, too")
    return run_command("simulate paradox", _paradox, parser.parse_args(argv), indent=None)


def _paradox(args):
    require_int("--seeds", args.seeds, at_least=1)
    require_number("--duration", args.duration, above=0)
    fits = [fit.strip() for fit in args.fit.split(",")]
    if set(fits) - set(FITS):
        raise ValueError(f"--fit is {args.fit!r}; known: {', '.join(FITS)}")
    seeds, first = range(args.seeds), fits[0]
    step_time = paradox_step_time(args.gpu)
    slower = paradox_step_time(SLOWER_GPU)
    headers, chats = shared_header(args.rate), sharegpt(SHAREGPT_RATE * args.rate)
    print(_setting(args, step_time), flush=True)

    with SecondsProgress(args.seeds * (len(fits) + 2), args.duration) as progress:

        def runs(fit, **options):
            return [_Run(seed, fit, options, args.duration, progress) for seed in seeds]

        by_fit = {fit: runs(fit, workload=headers, step_time=step_time) for fit in fits}
        beside = {
            f"{first} fit, {SLOWER_GPU}": runs(first, workload=headers, step_time=slower),
            f"{first} fit, ShareGPT": runs(first, workload=chats, step_time=step_time),
        }
    for run in _all(by_fit) if args.all else by_fit[first]:
        run.print_refusals(args.all)
    _print_table(by_fit, beside)
    _print_why(by_fit[first], *beside.values(), chats.arrivals.rate)
    return {
        "runs": [run.as_json() for run in _all(by_fit)],
        "beside": [run.as_json() for run in _all(beside)],
        "num_slots": NUM_SLOTS,
        "duration_s": args.duration,
        "assumptions": step_time.describe(),
    }


class _Run:
    """What is kept of a run: an hour's requests would be too many to hold for all of them."""

    def __init__(self, seed, fit, options, duration_s, on_step):
        self.num_holes = []

        def each_step(core):
            on_step(core)
            if len(core.metrics.steps) % HOLES_EVERY == 0:
                self.num_holes.append(len(core.manager.allocator.extents()))

        run = paradox_run(seed, fit, duration_s=duration_s, on_step=each_step, **options)
        self.seed, self.fit, self.refusals = seed, fit, run.refusals
        self.workload = options["workload"].name
        self.gpu = options["step_time"].gpu.name
        self.num_waiting = len(run.core.scheduler.waiting)
        metrics = run.simulation.summary()
        self.mean_batched = metrics.get("mean_num_seqs", 0.0)
        self.utilization = metrics.get("utilization", 0.0)

    def much_free(self, needed_share=1.0):
        return with_much_free(self.refusals, MUCH, needed_share)

    def print_refusals(self, all_of_them):
        chosen = self.refusals if all_of_them else self.much_free()[:SHOWN]
        what = "refused" if all_of_them else f"refused with at least {MUCH:.0%} free, and enough"
        print(f"\nseed {self.seed}, {self.fit} fit: {what}")
        print(f"  {'request':16}{'at s':>9}{'free':>9}{'largest':>9}{'needs':>9}")
        for each in chosen:
            print(
                f"  {each.request_id:16}{each.time_s:9,.1f}{each.free_share:9.1%}"
                f"{each.largest_extent_share:9.1%}{each.needed_share:9.1%}"
            )
        rest = len(self.refusals) - len(chosen)
        if rest:
            like = len(self.much_free()) - len(chosen)
            print(f"  and {rest:,} more, {like:,} of them like these (--all)")

    def as_json(self):
        return {
            "workload": self.workload,
            "gpu": self.gpu,
            "seed": self.seed,
            "fit": self.fit,
            "mean_batched": self.mean_batched,
            "utilization": self.utilization,
            "num_waiting_at_the_end": self.num_waiting,
            "refusals": [
                {name: value for name, value in each._asdict().items() if name != "request_id"}
                for each in self.refusals
            ],
        }


def _setting(args, step_time):
    return f"""\
shared-header: {args.rate:g} requests/s for {args.duration:,.0f} s. 95% are questions (a 200-token \
header and a log-normal
question, median 67), 5% documents of 2,000 to 6,000 tokens; answers are log-normal, median 200,
at most 1,500. First come, first served.
Pool: {NUM_SLOTS:,} slots, 12.9 GB: what a 13B model leaves of an A100 with 40 GB. One extent per
request of prompt + max_tokens - 1 slots (exact): the length of the answer is known beforehand.

The clock is a model, and its GPU is chosen for its pace: with faster steps than the A100's the
service keeps up with its traffic; the pool stays. OPT-13B ends at 2,048 tokens, so the model is
one of the same shape that goes further.
{step_time.describe()}"""


HEAD = """
Refused at the first attempt, all seeds together. enough: those with as many free slots as they
need, and how much of the pool was free then (median, most); then those of them with at least 40%
of the pool free, by seed. batch: requests in a step; held: share of the pool in use; both over the
time in steps. queue: requests that wait when the hour ends. These are means over the seeds.
"""


def _print_table(by_fit, beside):
    rows = {f"{fit} fit": runs for fit, runs in by_fit.items()} | beside
    columns = f"{'refused':>9}{'enough':>8}{'median':>8}{'most':>6}  {'>= 40% free':22}"
    print(f"{HEAD}\n{'':24}{columns}{'batch':>6}{'held':>6}{'queue':>7}")
    for name, runs in rows.items():
        print(
            f"{name:24}{_cells(runs)}"
            f"{_mean(run.mean_batched for run in runs):6.1f}"
            f"{_mean(run.utilization for run in runs):6.0%}"
            f"{_mean(run.num_waiting for run in runs):7,.0f}"
        )
    print(f"\nOf these, with a need of at most a quarter of the pool:\n\n{'':24}{columns}".rstrip())
    for name, runs in rows.items():
        print(f"{name:24}{_cells(runs, QUARTER)}".rstrip())


def _cells(runs, needed_share=1.0):
    refusals = [r for run in runs for r in run.refusals if r.needed_share <= needed_share]
    free = [each.free_share for each in refusals if each.had_enough_in_sum]
    middle, most = (f"{median(free):.0%}", f"{max(free):.0%}") if free else ("-", "-")
    much = " ".join(str(len(run.much_free(needed_share))) for run in runs)
    return f"{len(refusals):9,}{len(free):8,}{middle:>8}{most:>6}  {much:22}"


def _print_why(headers, slower, chats, rate):
    """Chats are refused with less free: shown by what they need and what holes there are."""
    paradox = [each for run in headers for each in run.much_free()]
    refused = [each for run in chats for each in run.refusals if each.had_enough_in_sum]
    if paradox and refused:
        holes = _mean(n for run in chats for n in run.num_holes)
        needs = [each.needed_share for each in refused]
        print(
            f"""
Chats at {rate:g} requests/s hold as much of the pool, and are refused with less free. Who is \
refused
found every hole shorter than its need: less is free than the holes' number times the need. Such a
chat needs {median(needs):.1%} of the pool (median; {max(needs):.0%} at most), and there are \
{holes:.1f} holes (mean): if all were
just too short, {holes * median(needs):.0%} would be free, and they are of all lengths. Of the \
service, those with 40%
free need {median(e.needed_share for e in paradox):.0%} (median), where the longest hole has \
{median(e.largest_extent_share for e in paradox):.0%}: two or three holes do."""
        )
    print(
        f"""
The load matters: at the pace of the {slower[0].gpu} the queue has \
{_mean(run.num_waiting for run in slower):,.0f} requests when the
hour ends, and what is free is taken at once."""
    )


def _all(runs_by_name):
    return [run for runs in runs_by_name.values() for run in runs]


def _mean(values):
    values = list(values)
    return sum(values) / len(values) if values else 0.0
