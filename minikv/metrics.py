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
    """steps: one StepRecord each. reports: (step, MemoryReport) where they were asked for."""

    def __init__(self):
        self.steps: list[StepRecord] = []
        self.reports = []

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


def _difference(later, earlier):
    return None if later is None or earlier is None else later - earlier
