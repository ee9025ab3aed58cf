"""What was measured: steps are stored once, a request stores only the steps that gave it a token.

TTFT (time to first token), TPOT (time per output token, the first excluded) and ITL (inter-token
latency) are defined as in vLLM's benchmarks. All times are seconds on the engine's clock.
"""

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple


class StepRecord(NamedTuple):
    """One pass through the loop. num_tokens: tokens computed in it, over num_seqs requests."""

    start: float
    end: float
    num_seqs: int
    num_tokens: int
    num_blocks_in_use: int


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request; None where it has not come that far."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finish_time: float | None
    num_output_tokens: int
    num_preemptions: int
    itl: list[float] = field(default_factory=list)

    @property
    def queue_time(self) -> float | None:
        return _difference(self.first_scheduled_time, self.arrival_time)

    @property
    def ttft(self) -> float | None:
        return _difference(self.first_token_time, self.arrival_time)

    @property
    def latency(self) -> float | None:
        return _difference(self.finish_time, self.arrival_time)

    @property
    def tpot(self) -> float | None:
        """(latency - TTFT) / (output tokens - 1); None for a single token."""
        if self.finish_time is None or self.num_output_tokens < 2:
            return None
        return (self.finish_time - self.first_token_time) / (self.num_output_tokens - 1)


class Metrics:
    """steps: one StepRecord each. reports: (step, MemoryReport) where they were asked for.
    num_blocks: of the pool that the steps ran in."""

    def __init__(self, num_blocks=0):
        self.num_blocks = num_blocks
        self.steps: list[StepRecord] = []
        self.reports = []

    def note_starts(self, admitted, start):
        """admitted: the requests that left the queue in the step that began at `start`."""
        for request in admitted:
            if request.first_scheduled_time is None:
                request.first_scheduled_time = start

    def token_times(self, request) -> list[float]:
        """When each output token was emitted: the end of its step."""
        return [self.steps[i].end for a, b in request.token_runs for i in range(a, b + 1)]

    def of(self, request) -> RequestMetrics:
        times = self.token_times(request)
        return RequestMetrics(
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            finish_time=request.finish_time,
            num_output_tokens=request.num_output_tokens,
            num_preemptions=request.num_preemptions,
            itl=[b - a for a, b in itertools.pairwise(times)],
        )


PERCENTILES = (50, 90, 95, 99)
NO_TIME = 1e-12  # seconds: on a clock that stood still, rates are huge and not an error


def summarize(requests, metrics) -> dict:
    """What was served, in the names of vLLM's benchmark JSON; times in ms, rates per second.

    Counts finished requests only (`completed`; `num_preemptions` is of all), over `duration`
    seconds: the first arrival to the last step's end. For each of ttft, tpot, itl, e2el (end to
    end) and queue_time: mean, median and percentiles. TPOT leaves out requests with a single output
    token.
    total_cached_tokens: found in a prefix cache, counted once a request, at its first admission;
    prefix_cache_hit_rate is their share of the prompts of all that were admitted.
    `mean_num_seqs` and `utilization` (share of the pool's blocks in use) are means over the time
    that was spent in steps: idle time is left out.
    """
    import numpy as np

    done = [r for r in requests if r.finish_reason in ("stop", "length")]
    out = {
        "completed": len(done),
        "failed": sum(r.finish_reason == "error" for r in requests),
        "num_requests": len(requests),
    }
    if not done:
        return out
    start = min(r.arrival_time for r in requests)
    duration = max(metrics.steps[-1].end - start, NO_TIME)
    num_input = sum(r.num_prompt_tokens for r in done)
    num_output = sum(r.num_output_tokens for r in done)
    admitted = [r for r in requests if r.num_cached_tokens >= 0]
    num_cached = sum(r.num_cached_tokens for r in admitted)
    out |= {
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "num_preemptions": sum(r.num_preemptions for r in requests),
        "total_cached_tokens": num_cached,
        "prefix_cache_hit_rate": num_cached / max(1, sum(r.num_prompt_tokens for r in admitted)),
        "num_steps": len(metrics.steps),
    }
    ends = np.array([step.end for step in metrics.steps])
    gaps = [np.diff(np.concatenate([ends[a : b + 1] for a, b in r.token_runs])) for r in done]
    series = {
        "ttft": [r.first_token_time - r.arrival_time for r in done],
        "tpot": [
            (r.finish_time - r.first_token_time) / (r.num_output_tokens - 1)
            for r in done
            if r.num_output_tokens > 1
        ],
        "itl": np.concatenate(gaps),
        "e2el": [r.finish_time - r.arrival_time for r in done],
        "queue_time": [r.first_scheduled_time - r.arrival_time for r in done],
    }
    for name, seconds in series.items():
        if len(seconds):
            ms = 1000 * np.asarray(seconds)
            out |= {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms))}
            values = np.percentile(ms, PERCENTILES)
            pairs = zip(PERCENTILES, values.tolist(), strict=True)
            out |= {f"p{percent}_{name}_ms": value for percent, value in pairs}
    seconds = np.array([step.end - step.start for step in metrics.steps])
    busy = max(float(seconds.sum()), NO_TIME)
    num_seqs = np.array([step.num_seqs for step in metrics.steps])
    out["mean_num_seqs"] = float((num_seqs * seconds).sum()) / busy
    if metrics.num_blocks:
        in_use = np.array([step.num_blocks_in_use for step in metrics.steps])
        out["utilization"] = float((in_use * seconds).sum()) / busy / metrics.num_blocks
    return out


def timeline(metrics) -> dict[str, list]:
    """The steps as columns: `pandas.DataFrame(timeline(metrics))`."""
    columns = zip(*metrics.steps, strict=True) if metrics.steps else [()] * len(StepRecord._fields)
    return {name: list(column) for name, column in zip(StepRecord._fields, columns, strict=True)}


def _difference(later, earlier):
    return None if later is None or earlier is None else later - earlier
