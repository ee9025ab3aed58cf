"""Figure 15 of Kwon et al. 2023 (PagedAttention): the blocks that are saved by sharing."""

from minikv.experiments.paper import NUM_SLOTS, mean, paper_step_time
from minikv.experiments.sharing import (
    BeamScheduler,
    WholePromptScheduler,
    ancestor_ages,
    beam_survivors,
    read_survivors,
    requests_of,
    sharing_run,
    with_pauses,
)
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.scheduler import Scheduler
from minikv.workloads import alpaca, sharegpt

WIDTHS = (2, 4, 6)
FIG15_PAPER = {  # percent of blocks saved, by width; of ShareGPT section 6.3 says only the ends
    ("alpaca", "parallel"): {2: 6.09, 4: 8.53, 6: 9.79},
    ("alpaca", "beam"): {2: 37.56, 4: 53.13, 6: 55.16},
    ("sharegpt", "parallel"): {2: 16.2, 6: 30.5},
    ("sharegpt", "beam"): {2: 44.3, 6: 66.3},
}
FAR = 0.15  # from the paper's number, so that it is named
WORKLOADS = {"alpaca": alpaca, "sharegpt": sharegpt}
# Sequences that come in a second, whatever the width: Alpaca's are those of Fig. 13; of ShareGPT's
# 2 it is half, since at 2 the pool is too small for samples that step back (see _changes).
SEQUENCES_PER_S = {"alpaca": 30.0, "sharegpt": 1.0}
SHARE_OF_TIME = {"alpaca": 0.1, "sharegpt": 1.0}  # its requests are many, and short
LIMITS = {"max_num_seqs": 512, "max_num_batched_tokens": 2_560}
LATE = 64  # from this step of a recorded search on
OTHER_CV = {"alpaca": 0.5, "sharegpt": 1.0}  # of the prompts' lengths


# -- the runs -------------------------------------------------------------------------------------


def setting(seeds, duration_s, warmup_s):
    rates = ", ".join(
        f"{name} {rate:g} for {duration_s * SHARE_OF_TIME[name]:,.0f} s (the first "
        f"{warmup_s * SHARE_OF_TIME[name]:,.0f} not counted)"
        for name, rate in SEQUENCES_PER_S.items()
    )
    return (
        f"Sequences per second: {rates}; {seeds} seed{'s' * (seeds > 1)}.\n"
        f"A request of n samples, or of a search with n beams, is n sequences of one prompt.\n"
        f"Pool: {NUM_SLOTS // 16} blocks of 16 tokens. First come, first served.\n"
        f"Which beams survive: {read_survivors()['source']}\n\n"
        f"The clock is a model. {paper_step_time().describe()}\n"
    )


def num_runs():
    """For each seed, in units of the whole duration."""
    rows = [(name, method) for name, method in FIG15_PAPER for _ in WIDTHS]
    changed = [(name, method) for name, method, *_ in _changes()]
    return sum(SHARE_OF_TIME[name] for name, _ in rows + changed)


def measure(seeds, duration_s, warmup_s, on_step=None) -> dict:
    """Every row, then one cause changed at a time; means over the seeds.

    Returns {rows, experiments, ages, assumptions}; a row is {workload, method, width,
    saved_percent, by_seed, num_seqs, num_preemptions, paper (None: not given)}, an experiment has
    `changed`, too. ages: {width: the mean age in steps of the beams' last common ancestor}.
    """
    survivors = beam_survivors()

    def run(name, method, width, **change):
        share = SHARE_OF_TIME[name]
        results = [
            sharing_run(
                *_traffic(name, method, width, seed, share * duration_s, survivors, **change),
                duration_s=share * duration_s,
                warmup_s=share * warmup_s,
                on_step=on_step,
            )
            for seed in range(seeds)
        ]
        row = {"workload": name, "method": method, "width": width}
        row |= {key: mean(each[key] for each in results) for key in results[0]}
        row["by_seed"] = [each["saved_percent"] for each in results]
        return row | {"paper": FIG15_PAPER[name, method].get(width)}

    rows = [run(*key, width) for key in FIG15_PAPER for width in WIDTHS]
    experiments = [
        run(name, method, width, **change) | {"changed": changed}
        for name, method, width, changed, change in _changes()
    ]
    ages = {
        width: mean(age for each in runs for age in ancestor_ages(each)[1:])
        for width, runs in survivors.items()
    }
    return {
        "rows": rows,
        "experiments": experiments,
        "ages": ages,
        "assumptions": paper_step_time().describe(),
    }


def _traffic(name, method, width, seed, duration_s, survivors, *, rate=1.0, cv=None, replay=None,
             scheduler=WholePromptScheduler, manager=PagedKVCacheManager):  # fmt: skip
    """(requests, scheduler) of a row, or with one thing changed. rate: times as many sequences. cv:
    of the prompts' lengths. replay: what becomes of each recorded search."""
    options = {} if cv is None else {"cv_prompt": cv}
    workload = WORKLOADS[name](rate=rate * SEQUENCES_PER_S[name] / width, **options)
    manager = manager(NUM_SLOTS // 16, 16)
    if method == "beam":
        runs = survivors[width]
        if replay is not None:
            runs = list(map(replay, runs))
        scheduler = BeamScheduler(manager, runs, seed, **LIMITS)
    else:
        scheduler = scheduler(manager, **LIMITS)
    return requests_of(workload, width, seed, duration_s), scheduler


def _changes():
    """(workload, method, width, what is changed, the change): one cause at a time."""
    last = "each sample runs the prompt's last token itself"
    rows = [("alpaca", "parallel", width, last, {"scheduler": Scheduler}) for width in WIDTHS]
    for name, cv in OTHER_CV.items():
        rows.append((name, "parallel", 6, f"prompts with a CV of {cv:g}", {"cv": cv}))
        rows.append((name, "parallel", 6, "half as many requests", {"rate": 0.5}))
    twice = {"rate": 2.0}
    rows.append(("sharegpt", "parallel", 6, "twice as many: memory is short", twice))
    twice = twice | {"manager": PrefixCachingKVCacheManager}
    rows.append(("sharegpt", "parallel", 6, "twice as many, with a prefix cache", twice))
    for name in WORKLOADS:
        late = {"replay": lambda run: run[:1] + run[LATE:]}
        rows.append((name, "beam", 6, f"only recorded steps from {LATE} on", late))
        for width in WIDTHS:
            slow = {"replay": with_pauses}
            rows.append((name, "beam", width, "beams live twice as long", slow))
    return rows


# -- what is printed ------------------------------------------------------------------------------


def print_result(result):
    rows, experiments = result["rows"], result["experiments"]
    print("Percent of the blocks saved by sharing (from the paper's):\n")
    head = ("", "", "n", "paper", "ours", "", "sequences", "stepped back")
    print("{:10}{:10}{:>3}{:>8}{:>8}{:>8}{:>11}{:>14}".format(*head))
    for row in rows:
        print(f"{_name(row)}{_cells(row)}")
    print("\nWith one cause changed:\n")
    for row in experiments:
        print(f"{_name(row)}{_cells(row)}   {row['changed']}")
    print()
    for line in conclusions(rows, experiments, result["ages"]):
        print(line)


def _name(row):
    return f"{row['workload']:10}{row['method']:10}{row['width']:3d}"


def _cells(row):
    paper, off = (
        ("-", "") if row["paper"] is None else (f"{row['paper']:.2f}", f"({_off(row):+.0%})")
    )
    return (
        f"{paper:>8}{row['saved_percent']:8.2f}{off:>8}{row['num_seqs']:11.1f}"
        f"{row['num_preemptions']:14,.0f}"
    )


def _off(row):
    return row["saved_percent"] / row["paper"] - 1


def conclusions(rows, experiments, ages) -> list[str]:
    """What these rows say, each with its numbers: nothing that another run could contradict."""
    table = {(row["workload"], row["method"], row["width"]): row for row in rows}
    given = [row for row in rows if row["paper"] is not None]
    far = [row for row in given if abs(_off(row)) > FAR]
    names = "; ".join(f"{' '.join(_name(row).split())}: {_off(row):+.0%}" for row in far)
    lines = [
        f"{len(given) - len(far)} of {len(given)} numbers lie within {FAR:.0%} of the paper's; "
        f"farther: {names or 'none'}."
    ]
    by_width = ", ".join(f"{width}: {age:.1f}" for width, age in sorted(ages.items()))
    lines.append(
        f"Beams part late: steps since their last common ancestor, by width, {by_width}. A block "
        "of 16 tokens is shared by all once it lies before that."
    )
    for row in experiments:
        before = table[row["workload"], row["method"], row["width"]]
        change = row["saved_percent"] / before["saved_percent"] - 1
        lines.append(
            f"{' '.join(_name(row).split())}, {row['changed']}: {before['saved_percent']:.2f}% "
            f"becomes {row['saved_percent']:.2f}% ({change:+.0%})."
        )
    return lines
