"""The experiments of chapters 3 and 4, shortened: what they count is counted again here, another
way, and the commands print and write what they measured."""

import json
import os
import subprocess
import sys

import pytest
from managers import MinimalManager

from minikv.commands.simulate import EXPERIMENTS, main
from minikv.experiments import (
    FIG2_PAPER,
    FIG13_MODELS,
    FIG13_PAPER,
    FIG13_WORKLOADS,
    NUM_SLOTS,
    fig2_run,
    fig13,
    paper,
    paper_manager,
    paper_run,
    paper_step_time,
    paradox,
    paradox_run,
    paradox_step_time,
)
from minikv.experiments.fig13 import CautiousPagedManager
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.extents import FITS
from minikv.observe.refusals import Refusal, RefusalRecorder, with_much_free
from minikv.request import Request
from minikv.workloads import Poisson, RequestClass, Uniform, Workload, shared_header, sharegpt

SHORT_S = 300.0
BUSY = shared_header(rate=4.0)


# -- who is refused -------------------------------------------------------------------------------


def free_runs(manager):
    """Lengths of the runs of blocks that no table names."""
    used = {block_id for table in manager.tables.values() for block_id in table}
    marks = "".join("u" if b in used else "f" for b in range(manager.num_blocks))
    return [len(run) for run in marks.split("u") if run]


class WatchedManager(ContiguousKVCacheManager):
    """Notes each refusal by itself, from the tables alone."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen, self.waits, self.num_refusals, self.expected = set(), set(), 0, []

    def allocate_slots(self, request, num_new_tokens, **extra):
        holds, first = request.request_id in self.tables, request.request_id not in self.seen
        self.seen.add(request.request_id)
        before = free_runs(self) if first else None
        table = super().allocate_slots(request, num_new_tokens, **extra)
        if table is None:
            self.num_refusals += 1
        if table is None and first:
            assert not holds
            need = request.num_prompt_tokens + request.max_tokens - 1
            if self.reserve == "grow":
                need = num_new_tokens
            self.expected.append((request.request_id, sum(before), max(before, default=0), need))
        return table


@pytest.mark.parametrize("fit", FITS)
def test_refusals_are_those_that_the_tables_show(fit):
    manager = WatchedManager(NUM_SLOTS, 1, max_model_len=8_192, reserve="exact", fit=fit)
    run = paradox_run(1, workload=BUSY, manager=manager, duration_s=90.0)
    counted = [
        (r.request_id, r.free_share, r.largest_extent_share, r.needed_share) for r in run.refusals
    ]
    expected = [(name, *(n / NUM_SLOTS for n in sizes)) for name, *sizes in manager.expected]
    assert len(counted) > 20
    if fit == "buddy":  # it has halves of blocks only: two free neighbours may be two extents
        for (*mine, largest, need), (*theirs, joined, their_need) in zip(
            counted, expected, strict=True
        ):
            assert mine == theirs and need == their_need and largest <= joined
            assert largest < need  # that is why
    else:
        assert counted == expected
    # whoever was refused stood at the head of the queue for longer, and is counted once
    assert manager.num_refusals > 2 * len(counted)
    assert len({name for name, *_ in counted}) == len(counted)


def test_growth_and_the_return_of_the_preempted_are_not_counted():
    """Under reserve="grow" running requests are refused, too, and step back."""
    manager = WatchedManager(600, 1, max_model_len=500, reserve="grow", fit="first")
    kind = RequestClass("r", 1.0, Uniform(20, 150), Uniform(50, 300))
    run = paradox_run(
        workload=Workload("small", Poisson(3.0), (kind,)), manager=manager, duration_s=120.0
    )
    assert run.core.scheduler.num_preemptions > 20
    assert [
        (r.request_id, r.free_share, r.largest_extent_share, r.needed_share) for r in run.refusals
    ] == [(name, *(n / 600 for n in sizes)) for name, *sizes in manager.expected]
    assert 0 < len(run.refusals) < manager.num_refusals / 2
    first = {r.request_id: r.time_s for r in run.refusals}
    for request in run.simulation.requests:
        if request.request_id in first and request.first_scheduled_time is not None:
            assert request.arrival_time <= first[request.request_id] < request.first_scheduled_time


def test_the_recorder_changes_nothing_and_goes_away():
    run = paradox_run(2, workload=BUSY, duration_s=60.0)
    manager = ContiguousKVCacheManager(NUM_SLOTS, 1, max_model_len=8_192, reserve="exact")
    alone = paper.simulation_of(manager, paradox_step_time())
    alone.run(BUSY.requests(duration_s=60.0, seed=2), until_s=60.0)
    assert alone.core.metrics.steps == run.metrics.steps
    assert "allocate_slots" not in vars(run.core.manager)

    def fail(core):
        raise RuntimeError("in the middle")

    manager = ContiguousKVCacheManager(NUM_SLOTS, 1, max_model_len=8_192, reserve="exact")
    with pytest.raises(RuntimeError, match="in the middle"):
        paradox_run(manager=manager, on_step=fail, duration_s=60.0)
    assert "allocate_slots" not in vars(manager)


def test_where_any_free_block_will_do_the_need_is_in_blocks():
    manager = MinimalManager(10, 16)
    core = paper.simulation_of(manager, paradox_step_time()).core
    recorder = RefusalRecorder(core)
    requests = [
        Request(name, num_prompt_tokens=n, max_tokens=9) for name, n in (("a", 120), ("b", 49))
    ]
    core.run(requests)
    assert [r._replace(time_s=0) for r in recorder.refusals] == [Refusal("b", 0, 0.2, 0.2, 0.4)]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_recorders_stack_and_leave_in_any_order(order):
    manager = ContiguousKVCacheManager(100, 1, max_model_len=100, reserve="exact")
    core = paper.simulation_of(manager, paradox_step_time()).core
    recorders = {name: RefusalRecorder(core) for name in "ab"}
    requests = [Request(str(i), num_prompt_tokens=90, max_tokens=5) for i in range(4)]

    def refuse(request):  # behind the first, which stays
        core.scheduler.waiting.appendleft(request)
        core.scheduler.schedule()

    core.scheduler.add(requests[0])
    core.scheduler.schedule()
    refuse(requests[1])
    recorders[order[0]].detach()
    refuse(requests[2])
    recorders[order[1]].detach()
    refuse(requests[3])
    assert core.scheduler.refusal_observers == []
    assert [r.request_id for r in recorders[order[0]].refusals] == ["1"]
    assert [r.request_id for r in recorders[order[1]].refusals] == ["1", "2"]
    assert recorders["a"].refusals[0][2:] == (0.06, 0.06, 0.94)


def test_the_paradox_appears_and_no_paged_manager_has_it():
    refusals = paradox_run(1, duration_s=1_300.0).refusals
    paradox = with_much_free(refusals)
    assert paradox and all(
        r.largest_extent_share < r.needed_share <= r.free_share >= 0.4 for r in paradox
    )
    # The same requests where any free block will do. (So few refusals that it takes more traffic.)
    paged = paradox_run(
        1, workload=BUSY, manager=MinimalManager(NUM_SLOTS // 16, 16), duration_s=100.0
    )
    assert paged.refusals and not any(r.had_enough_in_sum for r in paged.refusals)


def test_what_counts_as_the_paradox():
    def refusal(free, need):
        return Refusal("r", 0.0, free, 0.1, need)

    rows = [refusal(0.4, 0.4), refusal(0.5, 0.6), refusal(0.39, 0.2), refusal(0.6, 0.25)]
    assert [r.had_enough_in_sum for r in rows] == [True, False, True, True]
    assert with_much_free(rows) == [rows[0], rows[3]]
    assert with_much_free(rows, needed_share=0.25) == [rows[3]]
    assert with_much_free(rows, free_share=0.3) == [rows[0], rows[2], rows[3]]


def test_a_seed_decides_everything_in_any_process():
    code = (
        "from minikv.experiments import paradox_run\n"
        "print([(r.request_id, r.time_s, r.free_share) for r in paradox_run(5, duration_s=200.0)"
        ".refusals])"
    )
    texts = []
    for hash_seed in "12":
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
        )
        texts.append(done.stdout)
    assert texts[0] == texts[1] and "document" in texts[0]
    assert paradox_run(5, duration_s=200.0).refusals != paradox_run(6, duration_s=200.0).refusals


# -- figures 2 and 13 -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["max", "pow2", "exact", "first_fit_exact"])
def test_the_shares_are_those_that_the_requests_show(policy, monkeypatch):
    """Counted again from the running requests and the lengths of their tables."""
    duration_s, warmup_s, sums = 120.0, 30.0, dict.fromkeys(["token", "reserved", "held"], 0.0)

    def watched(manager, step_time, **options):
        simulation = make(manager, step_time, **options)
        core, run = simulation.core, simulation.runner.run

        def counting(scheduled, copies):
            start, running = core.clock.now(), list(core.scheduler.running)
            token = sum(r.num_computed_tokens for r in running)
            ever = sum(r.num_prompt_tokens + r.max_tokens - 1 for r in running)
            held = sum(len(manager.tables[r.request_id]) for r in running)
            tokens = run(scheduled, copies)
            if start >= warmup_s:
                for name, n in (("token", token), ("reserved", ever - token), ("held", held)):
                    sums[name] += n * (core.clock.now() - start)
            return tokens

        simulation.runner.run = counting
        return simulation

    make = paper.simulation_of
    monkeypatch.setattr(paper, "simulation_of", watched)
    run = fig2_run(policy, 1, duration_s=duration_s, warmup_s=warmup_s)
    steps = [s for s in run.simulation.core.metrics.steps if s.start >= warmup_s]
    seconds = sum(s.end - s.start for s in steps)
    shares = {name: 100 * value / seconds / NUM_SLOTS for name, value in sums.items()}
    assert run.shares["token"] == pytest.approx(shares["token"])
    assert run.shares["reserved"] == pytest.approx(shares["reserved"])
    assert sum(run.shares.values()) == pytest.approx(100)
    held = 100 - run.shares["external"] + 100 * run.report.rounding / NUM_SLOTS
    assert held == pytest.approx(shares["held"])
    assert run.mean_batched == pytest.approx(
        sum(s.num_seqs * (s.end - s.start) for s in steps) / seconds
    )


def test_paged_has_the_same_memory_in_blocks_of_16():
    manager = paper_manager("paged")
    assert manager.block_size == 16
    assert NUM_SLOTS - 16 < manager.num_blocks * manager.block_size <= NUM_SLOTS


def test_max_holds_seven_slabs_and_its_remainder_is_the_papers():
    run = fig2_run("max", duration_s=200.0, warmup_s=100.0)
    assert run.mean_batched == pytest.approx(7.0)
    assert run.shares["external"] == pytest.approx(100 * (1 - 7 * 2_048 / NUM_SLOTS))
    assert run.shares["external"] == pytest.approx(FIG2_PAPER["max"]["external"], abs=0.3)
    assert run.shares["internal"] > 40  # reserved is what will be used, internal what never will


def test_a_report_now_and_then_is_as_good():
    every, sampled = (
        fig2_run("exact", duration_s=900.0, warmup_s=100.0, report_every=n).shares for n in (1, 9)
    )
    assert every != sampled
    assert all(abs(every[name] - sampled[name]) < 0.4 for name in every)


def test_the_published_shares_are_reproduced():
    """A short hour: the token state of each policy within five points, and their order."""
    token = {}
    for policy, published in FIG2_PAPER.items():
        shares = fig2_run(policy, duration_s=900.0, warmup_s=300.0, report_every=10).shares
        token[policy] = shares["token"]
        assert abs(shares["token"] - published["token"]) < 5
    assert token["max"] < token["pow2"] < token["exact"]


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="policy is 'best'; known: max, pow2"):
        paper_manager("best")
    with pytest.raises(ValueError, match=r"warmup_s is 600.0, but the run ends at 60 s"):
        paper_run("max", duration_s=60)
    idle = Workload("idle", Poisson(1e-6), sharegpt().classes)
    with pytest.raises(ValueError, match="no step lies between warmup_s and duration_s"):
        paper_run("max", workload=idle, duration_s=60, warmup_s=10)


def test_a_run_can_stop_before_its_end():
    run = paper_run("max", duration_s=100.0, warmup_s=0.0)
    steps = run.simulation.core.metrics.steps
    assert steps[-1].start < 100.0 <= steps[-1].end
    assert run.simulation.core.scheduler.has_unfinished_requests


# -- the commands ---------------------------------------------------------------------------------


def result(tmp_path, capsys, *argv):
    path = tmp_path / "out.json"
    status = main([*argv, "--json", str(path)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert captured.err == ""
    return json.loads(path.read_text(encoding="utf-8")), captured.out


def test_the_paradox_command(tmp_path, capsys):
    argv = ["paradox", "--seeds", "2", "--duration", "200", "--fit", "first,buddy"]
    out, text = result(tmp_path, capsys, *argv)
    assert [(r["seed"], r["fit"]) for r in out["runs"]] == [
        (0, "first"), (1, "first"), (0, "buddy"), (1, "buddy"),
    ]  # fmt: skip
    assert {r["workload"] for r in out["runs"]} == {"shared-header"}
    assert {(r["workload"], r["gpu"]) for r in out["beside"]} == {
        ("shared-header", "A100 40GB SXM"), ("sharegpt", "H100 SXM"),
    }  # fmt: skip
    names = {"time_s", "free_share", "largest_extent_share", "needed_share"}
    for each in out["runs"] + out["beside"]:
        assert all(r.keys() == names for r in each["refusals"])
        assert all(r["largest_extent_share"] < r["needed_share"] for r in each["refusals"])
    run = paradox_run(0, duration_s=200.0)
    assert [r["time_s"] for r in out["runs"][0]["refusals"]] == [r.time_s for r in run.refusals]
    for part in ("first fit", "buddy fit", "ShareGPT", "The clock is a model", "Vicuna 13B"):
        assert part in text, part
    tables = text.split("Of these, with a need of at most a quarter")
    for table, most in zip(tables, (1.0, 0.25), strict=True):
        first = [r for r in out["runs"] if r["fit"] == "first"]
        rows = [r for run in first for r in run["refusals"] if r["needed_share"] <= most]
        enough = [r for r in rows if r["needed_share"] <= r["free_share"]]
        row = next(line for line in table.splitlines() if line.startswith("first fit  "))
        assert row.split()[2:4] == [f"{len(rows):,}", f"{len(enough):,}"]
        assert row.split()[5] == f"{max(r['free_share'] for r in enough):.0%}"
    much = with_much_free(run.refusals)
    assert much and much[0].request_id in text
    assert f"and {len(run.refusals) - len(much[:8]):,} more" in text


def test_all_refused_requests_are_printed_if_asked_for(tmp_path, capsys):
    argv = ["paradox", "--seeds", "1", "--duration", "200", "--fit", "best", "--all"]
    out, text = result(tmp_path, capsys, *argv)
    rows = [line for line in text.splitlines() if line.startswith(("  question-", "  document-"))]
    assert len(rows) == len(out["runs"][0]["refusals"]) > 3
    assert f"{out['runs'][0]['refusals'][0]['free_share']:.1%}" in rows[0]


def test_the_fig2_command(tmp_path, capsys):
    argv = ["fig2", "--seeds", "1", "--duration", "200", "--warmup", "50"]
    out, text = result(tmp_path, capsys, *argv)
    assert list(out["policies"]) == ["max", "pow2", "exact", "first_fit_exact"]
    for shares in out["policies"].values():
        assert list(shares) == ["token", "reserved", "internal", "external"]
        assert sum(shares.values()) == pytest.approx(100)
    run = fig2_run("pow2", duration_s=200.0, warmup_s=50.0)
    assert out["policies"]["pow2"] == pytest.approx(run.shares)
    assert sum(out["reports"]["pow2"].values()) == pytest.approx(100)
    for part in ("(57.3)", "first_fit_exact", "rounding", "More than 5 points"):
        assert part in text, part


def test_the_fig13_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fig13, "PER_REQUEST_MS", (0.2,))
    argv = ["fig13", "--duration", "40", "--warmup", "20"]
    out, text = result(tmp_path, capsys, *argv)
    assert len(out["rows"]) == 2 * 2 * 4
    for row in out["rows"]:
        assert row["paper"] == FIG13_PAPER[row["workload"]][row["policy"]]
        options = FIG13_MODELS[row["model"]]
        if row["policy"] == "paged":
            run = paper_run(
                "paged",
                workload=FIG13_WORKLOADS[row["workload"]],
                step_time=paper_step_time(**options),
                duration_s=40.0,
                warmup_s=20.0,
            )
            assert row["mean_batched"] == run.mean_batched
            assert f"{run.mean_batched:9.2f}" in text
    kept = next(r for r in out["experiments"] if "kept free" in r["changed"])
    run = paper_run(
        "paged",
        manager=CautiousPagedManager(NUM_SLOTS // 16, 16, 20),
        step_time=paper_step_time(overhead_per_request_s=0.0003),
        duration_s=40.0,
        warmup_s=20.0,
    )
    assert (kept["workload"], kept["mean_batched"]) == ("sharegpt", run.mean_batched)
    changed = {row["changed"] for row in out["experiments"]}
    assert len(changed) == 3 and all(each in text for each in changed)
    for part in ("132.44", "30.42", "More than 15% from"):
        assert part in text, part
    fitted = next(r for r in out["rows"] if r["model"] != "roofline" and r["policy"] == "paged")
    assert f"paged: {fitted['mean_batched']:.1f} beside the paper's 30.4" in text


def rows_of_fig13(queues):
    """Rows as `measure` returns them: the second step time makes each number a tenth larger."""
    return [
        {"workload": workload, "policy": policy, "model": model, "paper": paper,
         "mean_batched": paper * (1.1 if model != "roofline" else 1.0),
         "num_waiting_at_the_end": queues[policy], "num_preemptions": 0}
        for model in FIG13_MODELS
        for workload, by_policy in FIG13_PAPER.items()
        for policy, paper in by_policy.items()
    ]  # fmt: skip


def test_what_fig13_concludes_is_what_its_rows_say():
    queues = {"max": 500, "pow2": 40, "exact": 11, "paged": 0}
    said = fig13.conclusions(rows_of_fig13(queues), [])
    assert "sharegpt exact" in said[0] and "sharegpt paged" not in said[0]
    assert said[1].count("paged") == 2 and "10% to 10%" in said[1]
    assert "33.5 beside the paper's 30.4 (+10%)" in said[2]
    none = fig13.conclusions(rows_of_fig13(dict.fromkeys(queues, 0)), [])
    assert len(none) == 2 and "sharegpt max" in none[0] and none[0].startswith("Not so")
    changed = {"changed": "a CV of 1", "workload": "alpaca", "policy": "pow2",
               "mean_batched": 43.3, "paper": 43.24}  # fmt: skip
    assert "43.3 where it is 1" in fig13.conclusions(rows_of_fig13(queues), [changed])[-1]


@pytest.mark.parametrize(("waiting", "said"), [(10, "it keeps up"), (11, "it does not keep up")])
def test_what_the_paradox_concludes_is_what_its_runs_say(waiting, said):
    class Run:
        gpu, utilization, num_waiting, num_holes = "X", 0.8, waiting, [4]
        refusals = [Refusal("r", 0.0, 0.45, 0.2, 0.3)]  # noqa: RUF012

        def much_free(self):
            return self.refusals

    lines = paradox.conclusions([Run()], [Run()], [Run()])
    assert "40% free needed 30% of the pool, and the longest hole had 20%" in lines[0]
    assert "needed 30.0%" in lines[1] and "45% were free" in lines[1] and "4.0 holes" in lines[1]
    assert all(said in line and f"{waiting} wait" in line for line in lines[2:])
    Run.refusals = []
    assert len(paradox.conclusions([Run()], [Run()], [Run()])) == 2  # nothing to say of nobody


def test_a_cautious_manager_keeps_blocks_free_unless_the_pool_is_idle():
    manager = CautiousPagedManager(10, 16, num_kept_blocks=3)
    requests = [Request(name, num_prompt_tokens=16 * 6, max_tokens=64) for name in "ab"]
    assert manager.allocate_slots(requests[0], 16 * 9) is not None  # alone: all that it needs
    manager.free(requests[0])
    assert manager.allocate_slots(requests[0], 16 * 6) is not None
    assert manager.allocate_slots(requests[1], 16 * 2) is None  # 2 of 4 would stay free
    assert manager.allocate_slots(requests[1], 16) is not None
    requests[0].num_computed_tokens = 16 * 6
    assert manager.allocate_slots(requests[0], 16 * 3) is not None  # growth may take the rest


@pytest.mark.parametrize("argv, message", [
    (["fig13", "--warmup", "-1"], "--warmup is -1.0, but must be finite and at least 0"),
    (["paradox", "--fit", "tight"], "--fit is 'tight'; known: first, best, next, worst, buddy"),
    (["paradox", "--seeds", "0"], "--seeds is 0, but must be at least 1"),
    (["paradox", "--duration", "0"], "--duration is 0.0"),
    (["paradox", "--gpu", "abacus"], "abacus"),
    (["fig2", "--seeds", "-1"], "--seeds is -1"),
    (["fig2", "--duration", "100", "--warmup", "200"], "--warmup is 200, but --duration only 100"),
    (["paradox", "--fit", "first,,best"], "--fit is 'first,,best'"),
    (["fig2", "--report-every", "0"], "--report-every is 0"),
    (["fig2", "--warmup", "4000"], "--warmup is 4000, but --duration only 3600"),
    (["fig2", "--json", "/nowhere/out.json"], "there is no folder /nowhere"),
])  # fmt: skip
def test_a_command_says_what_is_wrong(argv, message, capsys):
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"minikv simulate {argv[0]}: ") and message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert f"python -m minikv simulate {name}" in capsys.readouterr().out
