"""On how many threads a step runs: what the machine gives, judged by the steps' own times.

Threads wait for each other after each matrix product, some 200 times a step. Where another program
has one of two cores, each wait can last until that program is put aside: a step of 0.03 s on two
threads then took over 2 s, and 0.04 s on one. What the machine gives changes from minute to minute.
So other counts are tried: one after the other at first, TRIAL_STEPS + 1 steps each, then now and
then, for no more than 1/PAUSE of the time that the steps take.

Whoever sets OMP_NUM_THREADS, MKL_NUM_THREADS or torch.set_num_threads has decided, and nothing is
tried. Results don't change with the number, but for fp32's rounding (by 1e-6, in some products).
`minikv/__init__.py` lets waiting threads sleep, where torch is imported later than that.
"""

import contextlib
import functools
import itertools
import math
import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import psutil
import torch

TRIAL_STEPS = 3  # judged in a trial, after one that is not: at first kernels are made
PAUSE = 20  # after a trial, steps take this many times what it took before the next
GAIN = 0.9  # a count is left for another whose steps take less than this part
RECENT_STEPS = 8
SMALL_STEP = 16  # tokens; a smaller step takes as long: it reads the same weights
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Chooser:
    """Chooses among counts by the seconds that steps of one size take.

    `count` is what the next step should run on; `tell` takes what it took. A trial is cut short
    after the step in which it has cost twice what as many steps on the present choice would.
    """

    def __init__(self, counts, choice):
        self.counts, self.choice = list(counts), choice
        self.mean_s = {}  # count -> seconds of a step when it was last judged
        self.num_steps = 0
        self._recent = deque(maxlen=RECENT_STEPS)  # seconds of steps on `choice`
        self._others = deque(count for count in self.counts if count != choice)
        self._untried = len(self._others)
        self._seen = set()
        self._trial, self._judged, self._spent = None, [], 0.0
        self._pause = 0.0

    @property
    def count(self) -> int:
        return self.choice if self._trial is None else self._trial

    @property
    def is_settled(self) -> bool:
        """Whether each count has been tried."""
        return self._untried == 0

    def tell(self, seconds):
        count, is_first = self.count, self.count not in self._seen
        self._seen.add(count)
        self.num_steps += 1
        if self._trial is not None:
            self._spent += seconds
            if not is_first:
                self._judged.append(seconds)
            too_long = 2 * TRIAL_STEPS * _mean(self._recent)
            if len(self._judged) == TRIAL_STEPS or self._spent > too_long:
                self._end_trial()
            return
        self._pause -= seconds
        if is_first:
            return
        self._recent.append(seconds)
        self.mean_s[count] = _mean(self._recent)
        if self._others and len(self._recent) >= TRIAL_STEPS and self._pause <= 0:
            self._trial = self._others.popleft()

    def _end_trial(self):
        count, self._trial = self._trial, None
        self._untried = max(0, self._untried - 1)
        if self._judged:
            self.mean_s[count] = _mean(self._judged)
        if self._judged and self.mean_s[count] < GAIN * _mean(self._recent):
            self._others.append(self.choice)
            self.choice = count
            self._recent = deque(self._judged, maxlen=RECENT_STEPS)
        else:
            self._others.append(count)
        self._pause = PAUSE * self._spent if self.is_settled else 0.0
        self._judged, self._spent = [], 0.0


def _mean(seconds) -> float:
    return sum(seconds) / len(seconds)


class Threads:
    """Sets torch's number of threads for a step, and puts it back after it.

    counts, reason: what is chosen from, and why not from more; see `counts_here`.
    guess: a Chooser whose choice is taken before a size of step has been tried; see `first_guess`.
    clock: gives seconds.
    """

    def __init__(self, counts, reason, guess=None, clock=time.perf_counter):
        self.counts, self.reason, self._clock = list(counts), reason, clock
        self._choosers = {}  # size of a step -> Chooser
        self._guess = guess or Chooser(self.counts, self.counts[-1])
        self._default = torch.get_num_threads()
        self._is_ours = False  # a step has set torch's number and not put it back

    @contextlib.contextmanager
    def step(self, num_tokens):
        """Around a step that computes so many tokens. One that raises is not judged."""
        if self._is_ours:  # cut short by an interrupt
            torch.set_num_threads(self._default)
            self._is_ours = False
        before = torch.get_num_threads()
        if before != self._default:  # the user has called torch.set_num_threads since
            self.counts, self.reason = [before], "torch.set_num_threads"
            self._default = before
            self._choosers.clear()
        if len(self.counts) == 1 and self.counts[0] == before:
            yield
            return
        size = 0 if num_tokens < SMALL_STEP else num_tokens.bit_length()
        chooser = self._choosers.get(size) or self._new(size)
        start, self._is_ours = self._clock(), True
        try:
            with running_on(chooser.count):
                yield
        finally:
            self._is_ours = torch.get_num_threads() != before
        # As if it had SMALL_STEP tokens: within one size there are twice as many, or half.
        chooser.tell((self._clock() - start) * SMALL_STEP / max(num_tokens, SMALL_STEP))

    def _new(self, size):
        """Begins with what the nearest size has settled on."""
        settled = [s for s, chooser in self._choosers.items() if chooser.is_settled]
        nearest = min(settled, key=lambda s: abs(s - size), default=None)
        known = self._guess if nearest is None else self._choosers[nearest]
        self._choosers[size] = Chooser(self.counts, known.choice)
        return self._choosers[size]

    @property
    def num_threads(self) -> int:
        """What most steps run on now."""
        return self.counts[0] if len(self.counts) == 1 else self._usual.choice

    @property
    def _usual(self):
        """The Chooser of the size that most steps had."""
        return max(self._choosers.values(), key=lambda c: c.num_steps, default=self._guess)

    def describe(self) -> str:
        """How many threads most steps run on now, and why."""
        if len(self.counts) == 1:
            return f"{self.counts[0]} ({self.reason})"
        usual = self._usual
        if usual is self._guess:
            what = "for a few products"
        elif usual is self._choosers.get(0):
            what = "for a step"
        else:
            what = f"for {SMALL_STEP} tokens"
        means = sorted(usual.mean_s.items())
        tried = ", ".join(f"on {count} {1e3 * seconds:.1f} ms" for count, seconds in means)
        counts = f"{', '.join(map(str, self.counts[:-1]))} and {self.counts[-1]}"
        return f"{self.num_threads}, chosen from {counts} by time ({what}: {tried or 'not tried'})"


@contextlib.contextmanager
def running_on(num_threads):
    before = torch.get_num_threads()
    if num_threads == before:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- what there is to choose from -----------------------------------------------------------------


def counts_here(device="cpu", environ=os.environ):
    """(counts to choose from, ascending; the reason where there is but one, or for the largest)."""
    now = torch.get_num_threads()
    if torch.device(device).type != "cpu":
        return [now], f"the steps run on {device}"
    for name in VARIABLES:
        if environ.get(name):
            return [now], f"{name} is set"
    if now not in _defaults():
        return [now], "torch.set_num_threads"
    most, reason = min((now, "torch's own number"), (_quota(), "the container's share of CPUs"))
    return sorted({1, max(1, most // 2), most}), reason


@functools.cache
def _defaults():
    """Numbers that torch may have taken by itself: of cores, with or without hyper-threading's; of
    an Apple processor's fast ones."""
    can_use = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    numbers = {can_use, min(can_use, psutil.cpu_count(logical=False) or can_use)}
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, ValueError):
            command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
            numbers.add(int(subprocess.run(command, capture_output=True, text=True).stdout))
    return numbers


def _quota(path=Path("/sys/fs/cgroup/cpu.max")) -> float:
    """CPUs' worth of time that a container may use; torch counts cores only."""
    try:
        share, period = map(float, path.read_text().split())
    except (OSError, ValueError):  # no container, or no limit ("max 100000")
        return math.inf
    return max(1, math.ceil(share / period))


# -- the first guess ------------------------------------------------------------------------------

GUESS_SECONDS = 30  # a guess is good for as long
_guess = {"at": -math.inf}


def first_guess(counts, clock=time.perf_counter) -> Chooser:
    """The count that is best now for something like a small step (it takes a millisecond): while
    a model is loaded there are no steps yet."""
    if len(counts) == 1:
        return Chooser(counts, counts[0])
    if clock() - _guess["at"] > GUESS_SECONDS or _guess["chooser"].counts != list(counts):
        chooser = Chooser(counts, counts[0])
        work = _like_a_step()
        for _ in itertools.repeat(None, len(counts) * (TRIAL_STEPS + 1)):
            start = clock()
            with running_on(chooser.count):
                work()
            chooser.tell(clock() - start)
            if chooser.is_settled:
                break
        _guess.update(at=clock(), chooser=chooser)
    return _guess["chooser"]


@functools.cache
def _like_a_step():
    """A few products of four rows with weights, as a layer of a small model has them."""
    weights = [torch.full((1536, 576), 0.5) for _ in range(4)]
    row = torch.full((4, 576), 0.5)

    def work():
        for weight in itertools.islice(itertools.cycle(weights), 24):
            torch.nn.functional.linear(row, weight)

    return work


@contextlib.contextmanager
def while_loading():
    """Around work on a CPU that no step's time tells of: the probe, the arranging of weights."""
    counts, _ = counts_here()
    with running_on(first_guess(counts).choice):
        yield


def new_threads(device) -> Threads:
    """For a model on this device. Raises nothing: without a choice it keeps torch's number."""
    counts, reason = counts_here(device)
    return Threads(counts, reason, first_guess(counts))
