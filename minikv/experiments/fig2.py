"""Figure 2 of Kwon et al. 2023 (PagedAttention): where the memory went before paging."""

from minikv.experiments.paper import NUM_SLOTS, PaperRun, mean, paper_run, paper_step_time

POLICIES = ("max", "pow2", "exact", "first_fit_exact")
SHARES = ("token", "reserved", "internal", "external")
FIG2_PAPER = {  # percent; the last is the figure's "external fragmentation & others"
    "max": {"token": 20.4, "reserved": 13.3, "internal": 57.3, "external": 8.9},
    "pow2": {"token": 26.8, "reserved": 17.9, "internal": 13.6, "external": 41.6},
    "exact": {"token": 38.2, "reserved": 25.2, "internal": 0.0, "external": 36.6},
}
WIDE = 5.0  # points from the paper's figure that ask for an explanation


def fig2_run(policy, seed=0, **options) -> PaperRun:
    """paper_run with a memory report every step, for `shares`."""
    return paper_run(policy, seed, **({"report_every": 1} | options))


def setting(seeds, duration_s, warmup_s):
    return (
        f"ShareGPT lengths, 2 requests/s for {duration_s:,.0f} s, the first {warmup_s:,.0f} "
        f"not counted, {seeds} seeds.\nPool: {NUM_SLOTS:,} slots in blocks of 1; at most "
        "2,048 slots per request. First come, first served.\n\n"
        f"The clock is a model. {paper_step_time().describe()}\n"
    )


def measure(seeds, duration_s, warmup_s, report_every=1, on_step=None) -> dict:
    """All policies, means over the seeds. Returns {policies: {policy: {share: percent}}, paper,
    reports: {policy: {state of MemoryReport: percent}}, mean_batched, seeds, assumptions}."""
    policies, reports, batches = {}, {}, {}
    for policy in POLICIES:
        runs = []
        for seed in range(seeds):
            run = fig2_run(
                policy,
                seed,
                duration_s=duration_s,
                warmup_s=warmup_s,
                report_every=report_every,
                on_step=on_step,
            )
            runs.append((run.shares, run.report, run.mean_batched))
        shares, report, batch = zip(*runs, strict=True)
        policies[policy] = {name: mean(s[name] for s in shares) for name in SHARES}
        reports[policy] = {
            name: 100 * mean(getattr(r, name) for r in report) / NUM_SLOTS
            for name in report[0]._fields
        }
        batches[policy] = mean(batch)
    return {
        "policies": policies,
        "paper": FIG2_PAPER,
        "reports": reports,
        "mean_batched": batches,
        "seeds": seeds,
        "assumptions": paper_step_time().describe(),
    }


def print_result(result):
    _print_shares(result["policies"], result["mean_batched"])
    _print_reports(result["reports"])


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
