"""How long prompts and answers are. `sample(rng, n)`: n whole numbers of tokens, at least 1."""

import math
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from minikv.request import require_int, require_number

_PHI = NormalDist().cdf


@dataclass(frozen=True)
class Fixed:
    num_tokens: int

    def __post_init__(self):
        require_int("num_tokens", self.num_tokens, at_least=1)

    def sample(self, rng, n):
        return np.full(n, self.num_tokens)


@dataclass(frozen=True)
class Uniform:
    """Whole numbers from low to high, both included."""

    low: int
    high: int

    def __post_init__(self):
        require_int("low", self.low, at_least=1)
        require_int("high", self.high, at_least=self.low)

    def sample(self, rng, n):
        return rng.integers(self.low, self.high + 1, n)


def _clipped_mean(mu, sigma, low, high):
    """E[min(max(X, low), high)] for X log-normal, in closed form."""
    a = (math.log(low) - mu) / sigma
    b = (math.log(high) - mu) / sigma
    inside = _PHI(b - sigma) - _PHI(a - sigma)
    # exp(mu) overflows only where nothing is inside
    weighted = math.exp(mu + sigma**2 / 2) * inside if inside > 0 else 0.0
    return low * _PHI(a) + high * (1 - _PHI(b)) + weighted


@dataclass(frozen=True)
class LogNormal:
    """Log-normal with a coefficient of variation of cv, clipped to low..high, and scaled so that
    the clipped mean is `mean` (clipping alone would lower it).

    LogNormal.of_median(median, sigma, low, high) takes the other two usual numbers, and does not
    scale: the median stays, and the mean is what clipping leaves.

    Raises ValueError where no scale reaches that mean.
    """

    mean: float
    cv: float
    low: int = 1
    high: int = 1 << 30
    mu: float = field(init=False, repr=False)

    def __post_init__(self):
        require_int("low", self.low, at_least=1)
        require_int("high", self.high, at_least=self.low)
        if not 0 < self.cv < math.inf:
            raise ValueError(f"cv is {self.cv}, but must be above 0 and finite")
        if not self.low < self.mean < self.high:
            raise ValueError(
                f"mean is {self.mean}, but must lie between low {self.low} and high {self.high}"
            )
        below, above = math.log(self.low) - 40, math.log(self.high) + 40
        for _ in range(200):  # the clipped mean grows with mu: halve the interval
            middle = (below + above) / 2
            if _clipped_mean(middle, self.sigma, self.low, self.high) < self.mean:
                below = middle
            else:
                above = middle
        object.__setattr__(self, "mu", middle)

    @classmethod
    def of_median(cls, median, sigma, low=1, high=1 << 30):
        """exp of a normal with mean log(median) and deviation sigma, clipped to low..high."""
        require_int("low", low, at_least=1)
        require_int("high", high, at_least=low)
        require_number("sigma", sigma, above=0, at_most=8)
        if not low < median < high:
            raise ValueError(f"median is {median}, but must lie between low {low} and high {high}")
        mean = _clipped_mean(math.log(median), sigma, low, high)
        return cls(mean, math.sqrt(math.expm1(sigma**2)), low, high)

    @property
    def sigma(self):
        return math.sqrt(math.log(1 + self.cv**2))

    def sample(self, rng, n):
        values = np.exp(self.mu + self.sigma * rng.standard_normal(n))
        # Rounded at random, up or down by the fraction: rounding to nearest would shift the mean.
        clipped = np.clip(values, self.low, self.high)
        return np.floor(clipped + rng.random(n)).astype(int).clip(self.low, self.high)


@dataclass(frozen=True)
class Prefixed:
    """num_prefix_tokens that every prompt begins with, then what `rest` draws.

    prefix_id: who else begins with them: all prompts of this id. None: those of its class alone."""

    num_prefix_tokens: int
    rest: object
    prefix_id: str | None = None

    def __post_init__(self):
        require_int("num_prefix_tokens", self.num_prefix_tokens, at_least=0)

    def sample(self, rng, n):
        return self.num_prefix_tokens + self.rest.sample(rng, n)


@dataclass(frozen=True)
class Empirical:
    """Drawn from observed lengths, each as likely as any other."""

    observed: tuple[int, ...]

    def __post_init__(self):
        if not len(self.observed):
            raise ValueError("there are no observed lengths to draw from")
        for num_tokens in self.observed:
            require_int("an observed length", num_tokens, at_least=1)

    def sample(self, rng, n):
        return rng.choice(np.asarray(self.observed), n)
