"""Figure 13 of Kwon et al. 2023 (PagedAttention): how many requests run at once."""

from dataclasses import replace

from minikv.experiments.paper import NUM_SLOTS, mean, paper_run, paper_step_time
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.workloads import alpaca, sharegpt

POLICIES = ("max", "pow2", "exact", "paged")
FIG13_PAPER = {  # mean number of batched requests
    "sharegpt": {"max": 7.00, "pow2": 9.81, "exact": 13.62, "paged": 30.42},
    "alpaca": {"max": 7.00, "pow2": 43.24, "exact": 72.75, "paged": 132.44},
}
FIG13_WORKLOADS = {"sharegpt": sharegpt(rate=2.0), "alpaca": alpaca(rate=30.0)}
FIG13_MODELS = {  # of the step time; the second was fitted to the paper's 30.42
    "roofline": {},
    "roofline + 0.30 ms per request": {"overhead_per_request_s": 0.0003},
}
FAR = 0.15  # from the paper's number, so that it is named
PER_REQUEST_MS = (0.1, 0.2, 0.4)  # other overheads that are tried beside those of FIG13_MODELS
KEPT_BLOCKS = 20  # 2% of the pool
OTHER_CV = 1.0  # of Alpaca's answers, instead of 1.2
QUEUE = 10  # more than so many waiting when the run ends: memory is short


class CautiousPagedManager(PagedKVCacheManager):
    """Admits a request only if num_kept_blocks stay free for those that run (vLLM's watermark)."""

    def __init__(self, num_blocks, block_size, num_kept_blocks):
        super().__init__(num_blocks, block_size)
        self.num_kept_blocks = num_kept_blocks

    def allocate_slots(self, request, num_new_tokens, **extra):
        if self.tables and request.request_id not in self.tables:
            extra["keep_free_blocks"] = self.num_kept_blocks
        return super().allocate_slots(request, num_new_tokens, **extra)


def setting(seeds, duration_s, warmup_s):
    return (
        f"ShareGPT at 2 requests/s and Alpaca at 30, for {duration_s:,.0f} s, the first "
        f"{warmup_s:,.0f} not counted; {seeds} seed{'s' * (seeds > 1)}.\n"
        f"Pool: {NUM_SLOTS:,} slots, in blocks of 1 under a buddy, or {NUM_SLOTS // 16} blocks of "
        "16. First come, first served.\n\n"
        f"The clock is a model. {paper_step_time().describe()}\n"
    )


def num_runs():
    """For each seed: the rows, then what is changed (see _changes)."""
    return len(POLICIES) * len(FIG13_PAPER) * len(FIG13_MODELS) + len(PER_REQUEST_MS) + 2 + 3


def measure(seeds, duration_s, warmup_s, on_step=None) -> dict:
    """Every policy under every step time, then one cause changed at a time; means over the seeds.

    Returns {rows, experiments, assumptions}; a row is {workload, policy, model (an experiment:
    changed), mean_batched, num_waiting_at_the_end, num_preemptions, paper}.
    """

    def run(workload, policy, manager=None, **overhead):
        rows = []
        for seed in range(seeds):
            each = paper_run(
                policy,
                seed,
                workload=workload,
                manager=manager and manager(),
                step_time=paper_step_time(**overhead),
                duration_s=duration_s,
                warmup_s=warmup_s,
                on_step=on_step,
            )
            scheduler = each.simulation.core.scheduler
            rows.append((each.mean_batched, len(scheduler.waiting), scheduler.num_preemptions))
        names = ("mean_batched", "num_waiting_at_the_end", "num_preemptions")
        return {n: mean(c) for n, c in zip(names, zip(*rows, strict=True), strict=True)}

    rows = [
        {
            "workload": workload,
            "policy": policy,
            "model": model,
            **run(FIG13_WORKLOADS[workload], policy, **overhead),
            "paper": paper,
        }
        for model, overhead in FIG13_MODELS.items()
        for workload, by_policy in FIG13_PAPER.items()
        for policy, paper in by_policy.items()
    ]
    assumptions = paper_step_time().describe()
    return {"rows": rows, "experiments": _changes(run), "assumptions": assumptions}


def print_result(result):
    _print_rows(result["rows"])
    print("\nWith one cause changed:\n")
    for row in result["experiments"]:
        print(f"{row['workload']:10}{row['policy']:7}{row['changed']:44}{_cells(row)}")
    print()
    for line in conclusions(result["rows"], result["experiments"]):
        print(line)


def conclusions(rows, experiments) -> list[str]:
    """What these rows say, each with its numbers: nothing that another run could contradict."""
    first, second = FIG13_MODELS
    table = {(row["workload"], row["policy"], row["model"]): row for row in rows}
    pairs = {
        (workload, policy): (table[workload, policy, first], table[workload, policy, second])
        for workload, policy, model in table
        if model == first
    }
    saturated = {
        key: pair
        for key, pair in pairs.items()
        if min(row["num_waiting_at_the_end"] for row in pair) > QUEUE
    }
    others = {key: pair for key, pair in pairs.items() if key not in saturated}
    lines = [
        f"More than {QUEUE} requests wait at the end under both step times ({what}): "
        f"{_names(group)}. Between the two their numbers differ by {_spread(group)}."
        if what.startswith("memory")
        else f"Not so ({what}): {_names(group)}. Their numbers differ by {_spread(group)}."
        for what, group in (
            ("memory is short and sets the number", saturated),
            ("the number is the rate times how long a request stays", others),
        )
        if group
    ]
    chats, checks = table["sharegpt", "paged", second], table["alpaca", "paged", second]
    lines.append(
        f"The step time's second form was fitted to ShareGPT, paged: {_off(chats)}. Nothing was "
        f"fitted to Alpaca, paged: {_off(checks)}; a check, but no proof of what an A100's steps "
        "took."
    )
    for row in experiments:
        if "CV" in row["changed"]:
            before = table[row["workload"], row["policy"], second]["mean_batched"]
            lines.append(
                f"{row['workload']} {row['policy']}: {before:.1f} where answers have a CV of 1.2, "
                f"{row['mean_batched']:.1f} where it is {OTHER_CV:g}. The paper, which does not "
                f"give it, has {row['paper']:.1f}."
            )
    return lines


def _names(group):
    return ", ".join(f"{workload} {policy}" for workload, policy in group)


def _spread(group):
    changes = [abs(b["mean_batched"] / a["mean_batched"] - 1) for a, b in group.values()]
    return f"{min(changes):.0%} to {max(changes):.0%}"


def _off(row):
    return (
        f"{row['mean_batched']:.1f} beside the paper's {row['paper']:.1f} "
        f"({row['mean_batched'] / row['paper'] - 1:+.0%})"
    )


def _changes(run):
    """One cause changed at a time. Each: what was changed, the workload, the policy, numbers."""
    chats, fitted = FIG13_WORKLOADS["sharegpt"], list(FIG13_MODELS.values())[-1]
    rows = []

    def add(changed, workload, policy, *options, **named):
        paper = FIG13_PAPER[workload.name][policy]
        numbers = run(workload, policy, *options, **named)
        row = {"changed": changed, "workload": workload.name, "policy": policy}
        rows.append(row | numbers | {"paper": paper})

    for ms in PER_REQUEST_MS:
        add(f"{ms:.2f} ms per request", chats, "paged", overhead_per_request_s=ms / 1e3)
    for workload in FIG13_WORKLOADS.values():
        add(
            f"0.30 ms, {KEPT_BLOCKS} blocks kept free at admission",
            workload,
            "paged",
            lambda: CautiousPagedManager(NUM_SLOTS // 16, 16, KEPT_BLOCKS),
            **fitted,
        )
    shorter = replace(alpaca(cv_output=OTHER_CV), arrivals=FIG13_WORKLOADS["alpaca"].arrivals)
    for policy in POLICIES[1:]:
        add(f"0.30 ms, answers with a CV of {OTHER_CV:g}", shorter, policy, **fitted)
    return rows


def _cells(row):
    off = round(100 * (row["mean_batched"] / row["paper"] - 1))
    return (
        f"{row['mean_batched']:9.2f} ({off:+3d}%)"
        f"{row['num_waiting_at_the_end']:8,.0f}{row['num_preemptions']:8,.0f}"
    )


def _print_rows(rows):
    print("Requests in a step (from the paper's), waiting when the run ends, preemptions:\n")
    first, second = FIG13_MODELS
    print(f"{'':18}{'paper':>8}{first:>24}{'':9}{second:>32}")
    table = {(row["workload"], row["policy"], row["model"]): row for row in rows}
    for (workload, policy, model), row in table.items():
        if model == first:
            print(
                f"{workload:10}{policy:8}{row['paper']:8.2f}  {_cells(row)}"
                f"{_cells(table[workload, policy, second])}"
            )
    far = [row for row in rows if abs(row["mean_batched"] / row["paper"] - 1) > FAR]
    names = "; ".join(f"{row['workload']} {row['policy']}, {row['model']}" for row in far)
    print(f"\nMore than {FAR:.0%} from the paper's: {names or 'none'}.", flush=True)
