"""40% of the memory is free, and a request waits: a service whose prompts share a header, one in
twenty of them a long document, in a pool where each request gets one extent of what it needs."""

from dataclasses import dataclass
from statistics import median

from minikv.experiments.paper import HOUR_S, NUM_SLOTS, mean, simulation_of
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.observe.refusals import Refusal, RefusalRecorder, with_much_free
from minikv.simulator import Simulation, StepTime
from minikv.specs import find_gpu, find_model
from minikv.workloads import shared_header, sharegpt

MUCH, QUARTER = 0.4, 0.25
SHOWN = 8  # refusals of a run that are printed, unless all are asked for
SHAREGPT_RATE = 1.5  # times the service's: then chats hold about as much of the pool
SLOWER_GPU = "A100-40G"
HOLES_EVERY = 200  # steps between two counts of the free extents: each looks at all of them
QUEUE = 10  # requests that wait when the run ends: more, and the service did not keep up
PARADOX_MAX_MODEL_LEN = 8_192  # prompts of up to 6,000 tokens and answers of up to 1,500


def paradox_step_time(gpu="H100", model="Vicuna 13B v1.5 16K", **options) -> StepTime:
    """OPT-13B ends at 2,048 positions. This model has its shape, hence its bytes per token, and
    16,384. An A100 cannot keep up with 2 requests a second of this traffic, so that whatever is
    measured there is a queue that grows; an H100 just can."""
    return StepTime(find_model(model), find_gpu(gpu), **options)


@dataclass
class ParadoxRun:
    """simulation: with `core`, `requests` and `summary()`, as the hour left it."""

    refusals: list[Refusal]
    simulation: Simulation

    @property
    def core(self):
        return self.simulation.core

    @property
    def metrics(self):
        return self.simulation.core.metrics


def paradox_run(
    seed=0,
    fit="first",
    *,
    workload=None,
    manager=None,
    step_time=None,
    duration_s=HOUR_S,
    on_step=None,
) -> ParadoxRun:
    """Who is refused while a service with a shared prompt header runs.

    workload: default shared_header(rate=2). manager: default contiguous, block size 1, with exact
    reservation and this fit. step_time: default paradox_step_time(). on_step(core): called after
    each step. The run ends at duration_s, whoever waits.
    """
    if workload is None:
        workload = shared_header(rate=2.0)
    if manager is None:
        manager = ContiguousKVCacheManager(
            NUM_SLOTS, 1, max_model_len=PARADOX_MAX_MODEL_LEN, reserve="exact", fit=fit
        )
    simulation = simulation_of(manager, step_time or paradox_step_time())
    recorder = RefusalRecorder(simulation.core)
    try:
        requests = workload.requests(duration_s=duration_s, seed=seed)
        simulation.run(requests, on_step=on_step, until_s=duration_s)
    finally:
        recorder.detach()
    return ParadoxRun(recorder.refusals, simulation)


def setting(rate, duration_s, step_time):
    return f"""\
shared-header: {rate:g} requests/s for {duration_s:,.0f} s. 95% are questions (a 200-token \
header and a log-normal
question, median 67), 5% documents of 2,000 to 6,000 tokens; answers are log-normal, median 200,
at most 1,500. First come, first served.
Pool: {NUM_SLOTS:,} slots, 12.9 GB: what a 13B model leaves of an A100 with 40 GB. One extent per
request of prompt + max_tokens - 1 slots (exact): the length of the answer is known beforehand.

The clock is a model, and its GPU is chosen for its pace; the pool stays. OPT-13B ends at 2,048
tokens, so the model is one of the same shape that goes further.
{step_time.describe()}"""


def measure(seeds, fits, *, rate, gpu, duration_s, on_step=None):
    """Every fit on every seed; and, with the first fit, a slower GPU and ShareGPT beside it.

    Returns ({fit: [HourOfOneFit]}, {name: [HourOfOneFit]}).
    """
    step_time, slower = paradox_step_time(gpu), paradox_step_time(SLOWER_GPU)
    headers, chats = shared_header(rate), sharegpt(SHAREGPT_RATE * rate)
    first = fits[0]

    def runs(fit, **options):
        return [HourOfOneFit(seed, fit, options, duration_s, on_step) for seed in range(seeds)]

    by_fit = {fit: runs(fit, workload=headers, step_time=step_time) for fit in fits}
    return by_fit, {
        f"{first} fit, {SLOWER_GPU}": runs(first, workload=headers, step_time=slower),
        f"{first} fit, ShareGPT": runs(first, workload=chats, step_time=step_time),
    }


class HourOfOneFit:
    """What is kept of a run: an hour's requests would be too many to hold for all of them."""

    def __init__(self, seed, fit, options, duration_s, on_step):
        self.num_holes = []

        def each_step(core):
            if on_step is not None:
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


def print_result(by_fit, beside, all_of_them=False):
    first = next(iter(by_fit))
    for run in [run for runs in by_fit.values() for run in runs] if all_of_them else by_fit[first]:
        run.print_refusals(all_of_them)
    _print_table(by_fit, beside)
    print()
    for line in conclusions(by_fit[first], *beside.values()):
        print(line)


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
            f"{mean(run.mean_batched for run in runs):6.1f}"
            f"{mean(run.utilization for run in runs):6.0%}"
            f"{mean(run.num_waiting for run in runs):7,.0f}"
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


def conclusions(headers, slower, chats) -> list[str]:
    """What these runs say, each with its numbers: nothing that another run could contradict."""
    lines = []
    paradox = [each for run in headers for each in run.much_free()]
    refused = [each for run in chats for each in run.refusals if each.had_enough_in_sum]
    if paradox:
        need = median(each.needed_share for each in paradox)
        hole = median(each.largest_extent_share for each in paradox)
        lines.append(
            f"Who was refused with at least {MUCH:.0%} free needed {need:.0%} of the pool, and the "
            f"longest hole had {hole:.0%} (medians)."
        )
    if refused:
        needs = [each.needed_share for each in refused]
        free = median(each.free_share for each in refused)
        holes = mean(n for run in chats for n in run.num_holes)
        lines.append(
            f"ShareGPT holds {_held(chats)} of the pool, the service {_held(headers)}. A chat that "
            f"was refused with enough free in sum needed {median(needs):.1%} (median; "
            f"{max(needs):.0%} at most), and {free:.0%} were free (median) in {holes:.1f} holes "
            "(mean), each shorter than its need: their number times the need is more than is free."
        )
    for runs in (headers, slower):
        waiting = mean(run.num_waiting for run in runs)
        pace = "keeps up" if waiting <= QUEUE else "does not keep up, and what is free is taken"
        lines.append(f"At the pace of the {runs[0].gpu} {waiting:,.0f} wait at the end: it {pace}.")
    return lines


def _held(runs):
    return f"{mean(run.utilization for run in runs):.0%}"
