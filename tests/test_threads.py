"""How many threads a step runs on. Times come from a clock of the tests' own."""

import contextlib
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minikv
from minikv.engine import LLM
from minikv.model import threads
from minikv.model.loader import load
from minikv.model.threads import GAIN, PAUSE, TRIAL_STEPS, Chooser, Threads, counts_here
from minikv.request import SamplingParams

ROOT = Path(minikv.__file__).parents[1]


def drive(chooser, seconds_of, num_steps):
    """seconds_of(count, step) -> what a step takes. Returns [(count, seconds, a trial?)]."""
    seen = []
    for step in range(num_steps):
        count, is_trial = chooser.count, chooser.count != chooser.choice
        seconds = seconds_of(count, step)
        chooser.tell(seconds)
        seen.append((count, seconds, is_trial))
    return seen


def total(seen):
    return sum(seconds for _, seconds, _ in seen)


# -- the choice --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 8, 16])
@pytest.mark.parametrize("best", [1, 8, 16])
def test_the_fastest_is_found_from_anywhere_and_kept(first, best):
    chooser = Chooser([1, 8, 16], first)
    seen = drive(chooser, lambda count, _: 1.0 if count == best else 1.5, 500)
    settled = 3 * (TRIAL_STEPS + 1)
    assert {count for count, _, trial in seen[settled:] if not trial} == {best}
    assert {count for count, *_ in seen[:settled]} == {1, 8, 16}
    assert total(seen[settled:]) < (500 - settled) * (1 + 1 / PAUSE)


def contended(count, rng):
    """Of smollm2 beside a niced loop: two threads are fast at times, and mostly wait."""
    if count == 1:
        return rng.uniform(0.034, 0.045)
    return rng.choice([0.025, 0.3, 0.3, 1.0, 2.0])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("first", [1, 2])
def test_beside_a_busy_program_the_cost_is_small(seed, first):
    rng = random.Random(seed)
    chooser = Chooser([1, 2], first)
    seen = drive(chooser, lambda count, _: contended(count, rng), 250)
    alone = 250 * 0.025
    assert total(seen) < 3 * alone + (first == 2) * 2.0 * (TRIAL_STEPS + 1)
    assert total(seen) > 250 * 0.034  # none of it is for nothing


@pytest.mark.parametrize("seed", range(20))
def test_it_follows_when_the_machine_becomes_busy_and_quiet_again(seed):
    rng = random.Random(seed)

    def seconds_of(count, step):
        if 300 <= step < 600:
            return contended(count, rng)
        return {1: 0.04, 2: 0.025}[count] * rng.uniform(0.9, 1.1)

    seen = drive(Chooser([1, 2], 2), seconds_of, 2500)
    # At most PAUSE times 2 s, the longest trial, pass before it looks again: 1,000 steps of 0.04 s.
    for start, end, best in [(100, 300, 2), (350, 600, 1), (1700, 2500, 2)]:
        assert [count for count, *_ in seen[start:end]].count(best) > 0.85 * (end - start)


def test_noise_does_not_move_it_between_equals():
    moves = 0
    for seed in range(20):
        rng = random.Random(seed)
        chooser = Chooser([1, 2], 1)
        seen = drive(chooser, lambda *_, rng=rng: rng.uniform(0.95, 1.05), 1000)
        choices = [count for count, _, trial in seen if not trial]
        moves += sum(a != b for a, b in itertools.pairwise(choices))
    assert moves == 0


def test_a_count_is_left_only_for_one_that_is_faster_by_a_tenth():
    for factor, choice in [(GAIN + 0.01, 1), (GAIN - 0.01, 2)]:
        chooser = Chooser([1, 2], 1)
        drive(chooser, lambda count, _, f=factor: {1: 1.0, 2: f}[count], 100)
        assert chooser.choice == choice


def test_a_trial_that_takes_too_long_ends_after_the_step_that_showed_it():
    chooser = Chooser([1, 2], 1)
    seen = drive(chooser, lambda count, _: {1: 1.0, 2: 1000.0}[count], 500)
    assert [count for count, *_ in seen].count(2) == 1 and chooser.choice == 1
    # What only the first step takes (kernels are made in it) decides nothing.
    chooser, firsts = Chooser([1, 2], 1), {1: 50.0, 2: 4.0}
    drive(chooser, lambda count, _: firsts.pop(count, {1: 1.0, 2: 0.5}[count]), 50)
    assert chooser.choice == 2


@pytest.mark.parametrize("seed", range(50))
def test_whatever_steps_take_trials_take_a_bounded_share(seed):
    rng = random.Random(seed)
    counts = [1, 8, 16][: rng.choice([2, 3])]
    chooser = Chooser(counts, rng.choice(counts))
    seen = drive(chooser, lambda *_: rng.choice([0.01, 0.1, 1.0]) * rng.random(), 3000)
    settled = len(counts) * (TRIAL_STEPS + 1)
    tried = sum(seconds for _, seconds, trial in seen[settled:] if trial)
    # One trial may have begun at the end and has its pause still before it.
    assert tried <= total(seen) / PAUSE + (TRIAL_STEPS + 1) * 1.0
    assert any(trial for *_, trial in seen[-1500:])  # and they never end


def test_one_count_is_never_tried_against_anything():
    chooser = Chooser([4], 4)
    assert {count for count, *_ in drive(chooser, lambda *_: 1.0, 100)} == {4}
    assert chooser.is_settled and chooser.mean_s == {4: 1.0}


# -- around a step -----------------------------------------------------------------------------


class Machine:
    """torch's number of threads, and a clock that a step on it moves."""

    def __init__(self, num_threads, seconds):
        self.num_threads, self.seconds, self.now, self.sets = num_threads, seconds, 0.0, 0

    def clock(self):
        return self.now

    def set(self, num_threads):
        self.num_threads, self.sets = num_threads, self.sets + 1

    def run(self, made, num_tokens=1):
        """One step; returns how many threads it ran on."""
        with made.step(num_tokens):
            self.now += self.seconds(self.num_threads, num_tokens)
            return self.num_threads


@pytest.fixture
def machine(monkeypatch):
    machine = Machine(4, lambda count, num_tokens: max(16, num_tokens) / count)
    monkeypatch.setattr(torch, "get_num_threads", lambda: machine.num_threads)
    monkeypatch.setattr(torch, "set_num_threads", machine.set)
    return machine


def new(machine, counts=(1, 2, 4), **options):
    return Threads(list(counts), "a reason", clock=machine.clock, **options)


def test_a_step_runs_on_the_choice_and_the_number_is_put_back(machine):
    machine.seconds = lambda count, _: count  # one is best
    made, ran = new(machine), []
    for _ in range(100):
        ran.append(machine.run(made))
        assert machine.num_threads == 4
    assert set(ran) == {1, 2, 4} and made.num_threads == 1 and ran.count(1) > 75
    with pytest.raises(ZeroDivisionError), made.step(1):
        assert machine.num_threads == 1
        raise ZeroDivisionError
    assert machine.num_threads == 4
    assert made.describe() == (
        "1, chosen from 1, 2 and 4 by time (for a step: on 1 1000.0 ms, on 2 2000.0 ms, "
        "on 4 4000.0 ms)"
    )


def test_where_the_default_is_best_it_is_hardly_ever_touched(machine):
    made = new(machine)
    ran = [machine.run(made) for _ in range(1000)]
    others = len(ran) - ran.count(4)
    assert machine.sets == 2 * others and others < 60


def test_who_sets_torchs_number_has_decided(machine):
    made = new(machine)
    for _ in range(30):
        machine.run(made)
    machine.num_threads = 3
    assert {machine.run(made) for _ in range(100)} == {3} and machine.num_threads == 3
    assert made.describe() == "3 (torch.set_num_threads)"
    machine.num_threads = 1
    assert {machine.run(made) for _ in range(100)} == {1}
    assert made.describe() == "1 (torch.set_num_threads)"


def test_an_interrupt_while_the_number_is_put_back_is_no_decision(machine, monkeypatch):
    machine.seconds = lambda count, _: count
    made = new(machine)
    while machine.run(made) == 4:
        pass
    interrupts = iter([False, True])  # when it is set, when it is put back

    def set_num_threads(num_threads):
        if next(interrupts, False):
            raise KeyboardInterrupt
        machine.set(num_threads)

    monkeypatch.setattr(torch, "set_num_threads", set_num_threads)
    with pytest.raises(KeyboardInterrupt):
        machine.run(made)
    assert machine.num_threads != 4
    assert len({machine.run(made) for _ in range(100)}) > 1  # goes on trying
    assert machine.num_threads == 4 and made.counts == [1, 2, 4]


def test_sizes_are_judged_apart_and_a_new_one_begins_where_the_nearest_is(machine):
    machine.seconds = lambda count, n: count if n < 16 else n / count
    made = new(machine)
    for _ in range(60):
        machine.run(made, 1)
    assert machine.run(made, 512) == 1
    ran = [machine.run(made, 512 + i % 7) for i in range(200)]
    assert made.num_threads == 4 and ran[60:].count(4) > 120
    assert "for 16 tokens" in made.describe()
    assert machine.run(made, 1) == 1
    assert machine.run(made, 300) == 4


def test_fewer_tokens_are_no_faster_threads(machine):
    """Steps of one size with 255 and 129 tokens in turn: seconds alone would favour the shorter."""
    machine.seconds = lambda count, n: n / 100
    made = new(machine, (2, 4))
    lengths = itertools.cycle([255] * 4 + [129] * 4)
    ran = [machine.run(made, next(lengths)) for _ in range(400)]
    assert ran.count(4) > 350


def test_a_container_may_use_fewer_than_torch_counts(machine, tmp_path):
    for text, share in [("200000 100000", 2), ("50000 100000", 1), ("150000 100000", 2)]:
        (tmp_path / "cpu.max").write_text(text)
        assert threads._quota(tmp_path / "cpu.max") == share
    for text in ("max 100000", "", "nonsense"):
        (tmp_path / "cpu.max").write_text(text)
        assert threads._quota(tmp_path / "cpu.max") == float("inf")
    assert threads._quota(tmp_path / "nothing") == float("inf")
    machine.seconds = lambda count, _: 1.0
    made = new(machine, [2])
    assert {machine.run(made) for _ in range(50)} == {2} and machine.num_threads == 4


def test_what_there_is_to_choose_from(machine, monkeypatch):
    monkeypatch.setattr(threads, "_quota", lambda: float("inf"))
    monkeypatch.setattr(threads, "_defaults", lambda: {4, 8})
    assert counts_here("cpu", {}) == ([1, 2, 4], "torch's own number")
    machine.num_threads = 2
    assert counts_here("cpu", {}) == ([2], "torch.set_num_threads")  # before the model came
    machine.num_threads = 8
    assert counts_here("cpu", {}) == ([1, 4, 8], "torch's own number")
    assert counts_here("cpu", {"OMP_NUM_THREADS": "8"}) == ([8], "OMP_NUM_THREADS is set")
    assert counts_here("cpu", {"MKL_NUM_THREADS": "8"}) == ([8], "MKL_NUM_THREADS is set")
    assert counts_here("cpu", {"OMP_NUM_THREADS": ""})[0] == [1, 4, 8]
    assert counts_here("cuda:1", {}) == ([8], "the steps run on cuda:1")
    monkeypatch.setattr(threads, "_quota", lambda: 2)
    assert counts_here("cpu", {}) == ([1, 2], "the container's share of CPUs")
    monkeypatch.setattr(threads, "_quota", lambda: 1)
    assert counts_here("cpu", {}) == ([1], "the container's share of CPUs")


def test_the_first_guess_is_tried_and_kept_for_a_while(machine, monkeypatch):
    worked = []

    def work():
        worked.append(machine.num_threads)
        machine.now += machine.num_threads  # one is best

    monkeypatch.setattr(threads, "_like_a_step", lambda: work)
    monkeypatch.setattr(threads, "_guess", {"at": -float("inf")})
    guess = threads.first_guess([1, 2, 4], machine.clock)
    assert guess.choice == 1 and set(worked) == {1, 2, 4} and machine.num_threads == 4
    made = new(machine, guess=guess)
    assert made.num_threads == 1 and "for a few products: on 1 1000.0 ms" in made.describe()
    machine.seconds = lambda *_: 1.0
    assert machine.run(made, 100) == 1
    before = len(worked)
    assert threads.first_guess([1, 2, 4], machine.clock) is guess and len(worked) == before
    assert threads.first_guess([4], machine.clock).choice == 4 and len(worked) == before
    machine.now += threads.GUESS_SECONDS + 1
    threads.first_guess([1, 2, 4], machine.clock)
    assert len(worked) > before


# -- in the engine -----------------------------------------------------------------------------


@contextlib.contextmanager
def torchs_number(num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engines_steps_are_chosen_for_and_say_the_same(dtype):
    """Tokens, whatever the number is; in the middle of an answer it changes."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[1, 2, 3], [4] * 40]
    answers = []
    for counts in ([1], [2], [1, 2]):
        with torchs_number(counts[-1]):
            llm, ticks = LLM(load("tiny", dtype=dtype, device="cpu")), itertools.count()
            llm.runner.threads = made = Threads(counts, "", clock=lambda t=ticks: float(next(t)))
            answers.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
            assert torch.get_num_threads() == counts[-1]
        if len(counts) > 1:
            assert made._usual.is_settled
    assert answers[0] == answers[1] == answers[2]


def test_a_user_who_set_a_number_gets_it():
    with torchs_number(3):
        llm = LLM("tiny")
        llm.generate([[1, 2]], use_tqdm=False)
        assert llm.runner.threads.counts == [3] and torch.get_num_threads() == 3


WAITING = """
import os, sys
{first}
import minikv
print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
"""


@pytest.mark.parametrize(("given", "expected"), [
    ({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None"),
])  # fmt: skip
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given, expected):
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", WAITING.format(first="")],
        env=env | given, cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [expected, "False"]  # in time: torch comes later
