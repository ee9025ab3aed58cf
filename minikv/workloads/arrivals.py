"""When requests come. `times(rng, duration_s, num_requests)`: sorted seconds, a numpy array."""

from dataclasses import dataclass

import numpy as np


def _up_to(gaps, rate, duration_s, num_requests):
    """Sums of the gaps that gaps(n) draws, until there are num_requests or duration_s is over."""
    times, last = [], 0.0
    wanted = num_requests if num_requests is not None else np.inf
    while sum(map(len, times)) < wanted and (duration_s is None or last < duration_s):
        n = wanted
        if duration_s is not None:
            n = min(n, int(rate * (duration_s - last) * 1.1) + 64)
        times.append(last + np.cumsum(gaps(int(n))))
        last = times[-1][-1]
    times = np.concatenate(times)[:num_requests]
    return times if duration_s is None else times[times < duration_s]


def _require_positive(name, value):
    if not 0 < value < np.inf:
        raise ValueError(f"{name} is {value}, but must be above 0 and finite")


@dataclass(frozen=True)
class Poisson:
    """Independent users: `rate` requests per second on average, exponential gaps."""

    rate: float

    def __post_init__(self):
        _require_positive("rate", self.rate)

    def times(self, rng, duration_s, num_requests):
        return _up_to(
            lambda n: rng.exponential(1 / self.rate, n), self.rate, duration_s, num_requests
        )


@dataclass(frozen=True)
class Gamma:
    """Gaps from a gamma distribution with this coefficient of variation, from 0.001 to 100: 1 is
    Poisson, more is bursty, less is regular."""

    rate: float
    cv: float

    def __post_init__(self):
        _require_positive("rate", self.rate)
        if not 0.001 <= self.cv <= 100:
            raise ValueError(f"cv is {self.cv}, but must be from 0.001 to 100")

    def times(self, rng, duration_s, num_requests):
        shape = self.cv**-2
        return _up_to(
            lambda n: rng.gamma(shape, 1 / (self.rate * shape), n),
            self.rate,
            duration_s,
            num_requests,
        )


@dataclass(frozen=True)
class Recorded:
    """A recorded list of arrival times in seconds, sorted."""

    recorded: tuple[float, ...]

    def __post_init__(self):
        times = np.asarray(self.recorded, float)
        if times.ndim != 1 or not np.isfinite(times).all() or (np.diff(times) < 0).any():
            raise ValueError("recorded arrival times must be finite, and each at or after the last")

    def times(self, rng, duration_s, num_requests):
        times = np.asarray(self.recorded, float)[:num_requests]
        return times if duration_s is None else times[times < duration_s]
