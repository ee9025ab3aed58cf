"""What samples and beams share in the simulator: counted again another way, replayed against a
real search, and printed by `simulate fig15`."""

import itertools
import json
import random

import pytest

from minikv import BeamSearchParams
from minikv.commands.simulate import main
from minikv.engine import LLM
from minikv.engine.beam_search import BeamSearch
from minikv.experiments import fig15
from minikv.experiments.fig15 import FIG15_PAPER, WIDTHS
from minikv.experiments.sharing import (
    BeamScheduler,
    WholePromptScheduler,
    ancestor_ages,
    beam_survivors,
    blocks_of,
    read_survivors,
    record_survivors,
    requests_of,
    sharing_run,
    with_pauses,
)
from minikv.kv_cache.base import cdiv
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.model.loader import load
from minikv.request import Request
from minikv.scheduler import Scheduler
from minikv.workloads import alpaca, sharegpt

LIMITS = {"max_num_seqs": 512, "max_num_batched_tokens": 2_560}


class One:
    """The workload of one request."""

    def __init__(self, num_prompt_tokens, max_tokens):
        self.lengths = {"num_prompt_tokens": num_prompt_tokens, "max_tokens": max_tokens}

    def requests(self, duration_s, seed):
        return [Request("r", **self.lengths)]


def step_by_step(requests, scheduler):
    """(blocks named, blocks in use) in the middle of each step, with the books checked in each."""
    manager, seen = scheduler.manager, []
    copies = manager.copies

    def counted():
        manager.check()
        seen.append(blocks_of(manager))
        return copies()

    manager.copies = counted  # called once a step, between schedule and run
    result = sharing_run(requests, scheduler, duration_s=1e6)
    del manager.copies
    assert not manager.tables and manager.num_free_blocks == manager.num_blocks
    assert not scheduler.has_unfinished_requests
    mean = sum(100 * (1 - in_use / named) for named, in_use in seen) / len(seen)
    assert result["saved_percent"] == pytest.approx(mean)
    return seen


# -- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PagedKVCacheManager, PrefixCachingKVCacheManager])
@pytest.mark.parametrize("num_prompt_tokens", [5, 16, 33, 48])
@pytest.mark.parametrize("width", WIDTHS)
def test_samples_save_the_full_blocks_of_their_prompt(kind, num_prompt_tokens, width):
    for scheduler in (WholePromptScheduler, Scheduler):
        manager = kind(100, 16)
        requests = requests_of(One(num_prompt_tokens, 20), width, 0, 1.0)
        seen = step_by_step(requests, scheduler(manager, **LIMITS))
        whole = scheduler is WholePromptScheduler
        shared = (num_prompt_tokens if whole else num_prompt_tokens - 1) // 16
        for i, (named, in_use) in enumerate(seen[1:20], start=1):
            # the first sample is a step ahead where the others ran the prompt's last token anew
            others = cdiv(num_prompt_tokens + (i if whole else i - 1), 16)
            assert named == cdiv(num_prompt_tokens + i, 16) + (width - 1) * others
            assert named - in_use == (width - 1) * shared


def test_samples_name_their_prompt():
    requests = requests_of(alpaca(rate=2.0), 3, 0, 20.0)
    for request in requests:
        for each in (request, *request.children):
            assert each.prefix_id == request.request_id
            assert each.prefix_len == each.num_prompt_tokens == request.num_prompt_tokens
            assert each.max_tokens == request.max_tokens and each.token_ids is None
    assert len({each.request_id for r in requests for each in (r, *r.children)}) == 3 * len(
        requests
    )


# -- beams ----------------------------------------------------------------------------------------


def random_run(rnd, width, num_steps):
    return [[0] * width] + [
        [rnd.randrange(width) for _ in range(width)] for _ in range(num_steps - 1)
    ]


@pytest.mark.parametrize("width", [1, 2, 5])
def test_beams_hold_what_their_ancestry_says(width):
    """By paths: two beams share a block if all of it was written before their ways parted."""
    rnd = random.Random(width)
    for num_prompt_tokens in (1, 15, 16, 30):
        run = random_run(rnd, width, 40)
        scheduler = BeamScheduler(PagedKVCacheManager(200, 4), [run], **LIMITS)
        seen = step_by_step(requests_of(One(num_prompt_tokens, 40), width, 0, 1.0), scheduler)
        paths = [()] * width  # of each beam: one unlike name for each token that it wrote
        for step in range(1, 40):
            if step > 1:
                paths = [paths[parent] for parent in run[step - 1]]
            paths = [(*path, (step, i)) for i, path in enumerate(paths)]
            tokens = [("p",) * num_prompt_tokens + path for path in paths]
            blocks = {t[: at + 4] for t in tokens for at in range(0, len(t), 4)}
            assert seen[step] == (width * cdiv(num_prompt_tokens + step, 4), len(blocks)), step


def test_a_replayed_search_holds_the_blocks_of_the_real_one():
    llm = LLM(
        load("tiny", dtype="float32", device="cpu"), kv_cache_manager=PagedKVCacheManager(400, 4)
    )
    rnd, run, seen = random.Random(0), llm.runner.run, []

    def counted(*args):
        seen.append(blocks_of(llm.manager))
        return run(*args)

    llm.runner.run = counted
    for width in (2, 3, 6):
        prompt = [rnd.randrange(256) for _ in range(rnd.randint(3, 30))]
        seen.clear()
        search = BeamSearch(
            llm.core, Request("r", prompt, max_tokens=24), BeamSearchParams(width, 24)
        )
        assert search.run() is None and len(search.parents) == 23
        assert any(len(set(parents)) < width for parents in search.parents[1:])
        scheduler = BeamScheduler(PagedKVCacheManager(400, 4), [search.parents], **LIMITS)
        assert step_by_step(requests_of(One(len(prompt), 24), width, 0, 1.0), scheduler) == seen


def test_searches_among_others_end_and_leave_nothing():
    survivors = beam_survivors()[4]
    requests = requests_of(alpaca(rate=3.0), 4, 1, 20.0)
    scheduler = BeamScheduler(PagedKVCacheManager(900, 16), survivors, **LIMITS)
    seen = step_by_step(requests, scheduler)
    assert max(named for named, _ in seen) > 60 and scheduler.num_preemptions == 0
    assert all(
        r.finish_reason == "length" and r.num_output_tokens == r.max_tokens for r in requests
    )


# -- the recorded searches ------------------------------------------------------------------------


def test_the_recorded_searches_are_searches():
    recorded = read_survivors()
    assert "smollm2" in recorded["source"]
    runs = beam_survivors()
    assert set(runs) == set(WIDTHS)
    for width, of_width in runs.items():
        assert len(of_width) == len(recorded["prompts"])
        for run in of_width:
            assert run[0] == [0] * width and len(run) == recorded["num_tokens"] - 1
            assert all(len(step) == width and set(step) <= set(range(width)) for step in run)
    # a replay of beams that are neither all alike nor all apart
    assert 0.3 < sum(len(set(step)) for run in runs[6] for step in run) / sum(
        6 for run in runs[6] for _ in run
    ) < 0.95  # fmt: skip


@pytest.mark.model
def test_a_recorded_search_can_be_made_again():
    recorded, llm = read_survivors(), LLM("smollm2", dtype="float32", num_gpu_blocks_override=60)
    for width, num_tokens in ((2, 12), (6, 8)):
        run = record_survivors(llm, recorded["prompts"][0], width, num_tokens)
        assert run == beam_survivors()[width][0][: num_tokens - 1]
    assert not llm.manager.tables


@pytest.mark.parametrize("width", [2, 4])
def test_the_age_of_the_common_ancestor(width):
    run = random_run(random.Random(width), width, 60)
    paths, ages = [()] * width, []
    for step, parents in enumerate(run):
        paths = [(*(paths[parent] if step else ()), (step, i)) for i, parent in enumerate(parents)]
        common = sum(1 for column in zip(*paths, strict=True) if len(set(column)) == 1)
        ages.append(step - common)
    assert ancestor_ages(run) == ages
    slow = with_pauses(run)
    assert len(slow) == 2 * len(run) - 1 and slow[1::2] == run[1:]
    mean_age = sum(ancestor_ages(slow)) / len(slow)
    assert mean_age > 1.5 * sum(ages) / len(ages)


# -- directions, and the command ------------------------------------------------------------------


def saved(name, method, width, **change):
    seconds = {"alpaca": 30.0, "sharegpt": 300.0}[name]
    run = fig15._traffic(name, method, width, 0, seconds, beam_survivors(), **change)
    return sharing_run(*run, duration_s=seconds, warmup_s=seconds / 6)["saved_percent"]


@pytest.mark.parametrize("name", ["alpaca", "sharegpt"])
def test_beams_share_more_than_samples_and_many_more_than_few(name):
    percent = {
        (method, width): saved(name, method, width)
        for method, width in itertools.product(("parallel", "beam"), (2, 6))
    }
    assert 0 < percent["parallel", 2] < percent["parallel", 6] < percent["beam", 6] < 100
    assert percent["parallel", 2] < percent["beam", 2] < percent["beam", 6]
    for (method, width), value in percent.items():
        assert value == pytest.approx(FIG15_PAPER[name, method][width], rel=0.6)
    assert saved(name, "beam", 6, replay=with_pauses) < percent["beam", 6]
    assert saved(name, "parallel", 2, scheduler=Scheduler) < percent["parallel", 2]


def test_long_prompts_share_more():
    assert sharegpt().classes[0].prompt_lengths.mean > alpaca().classes[0].prompt_lengths.mean
    assert saved("sharegpt", "parallel", 4) > 2 * saved("alpaca", "parallel", 4)


def test_the_command_prints_and_writes_what_it_measured(tmp_path, capsys):
    path = tmp_path / "out.json"
    argv = ["fig15", "--seeds", "2", "--duration", "60", "--warmup", "20", "--json", str(path)]
    assert main(argv) == 0
    out, text = json.loads(path.read_text(encoding="utf-8")), capsys.readouterr().out
    assert [(r["workload"], r["method"], r["width"]) for r in out["rows"]] == [
        (*key, width) for key in FIG15_PAPER for width in WIDTHS
    ]
    for row in out["rows"] + out["experiments"]:
        assert row["paper"] == FIG15_PAPER[row["workload"], row["method"]].get(row["width"])
        assert row["saved_percent"] == pytest.approx(sum(row["by_seed"]) / 2)
        assert len(set(row["by_seed"])) == 2
        assert f"{row['saved_percent']:8.2f}" in text
    assert {row["changed"] for row in out["experiments"]} == {
        line.split("   ")[-1].strip()
        for line in text.split("With one cause changed:")[1].split("\n\n")[1].splitlines()
    }
    for part in ("SmolLM2", "The clock is a model", "55.16", "66.30", "within 15%"):
        assert part in text, part


def rows_of(off, method="beam"):
    return [
        {"workload": name, "method": kind, "width": width, "num_seqs": 1, "num_preemptions": 0,
         "saved_percent": (paper or 20) * (1 + (off if kind == method and width == 6 else 0)),
         "paper": paper}
        for (name, kind), by_width in FIG15_PAPER.items()
        for width in WIDTHS
        for paper in [by_width.get(width)]
    ]  # fmt: skip


def test_what_it_concludes_is_what_its_rows_say():
    ages = {2: 1.0, 4: 2.0, 6: 3.0}
    near, by_width = fig15.conclusions(rows_of(0.1), [], ages)
    assert near.startswith("10 of 10 numbers") and near.endswith("farther: none.")
    assert "2: 1.0, 4: 2.0, 6: 3.0" in by_width
    changed = rows_of(0.0)[5] | {"changed": "a cause", "saved_percent": 55.16}
    far, _, change = fig15.conclusions(rows_of(0.25), [changed], ages)
    assert far.startswith("8 of 10") and "alpaca beam 6: +25%; sharegpt beam 6: +25%" in far
    assert change == "alpaca beam 6, a cause: 68.95% becomes 55.16% (-20%)."


def test_where_nothing_is_measured_it_is_said():
    scheduler = WholePromptScheduler(PagedKVCacheManager(100, 16), **LIMITS)
    with pytest.raises(ValueError, match="nothing was measured"):
        sharing_run(requests_of(One(5, 5), 2, 0, 1.0), scheduler, duration_s=1.0, warmup_s=1.0)
