"""How long prompts and answers are. `sample(rng, n)`: n whole numbers of tokens, at least 1."""

import math
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from minikv.request import require_int

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


@dataclass(frozen=True)
class LogNormal:
    """Log-normal with a coefficient of variation of cv, clipped to low..high, and scaled so that
    the clipped mean is `mean` (clipping alone would lower it).

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
            if self._clipped_mean(middle) < self.mean:
                below = middle
            else:
                above = middle
        object.__setattr__(self, "mu", middle)

    @property
    def sigma(self):
        return math.sqrt(math.log(1 + self.cv**2))

    def _clipped_mean(self, mu):
        """E[min(max(X, low), high)] for X log-normal, in closed form."""
        a = (math.log(self.low) - mu) / self.sigma
        b = (math.log(self.high) - mu) / self.sigma
        inside = _PHI(b - self.sigma) - _PHI(a - self.sigma)
        # exp(mu) overflows only where nothing is inside
        weighted = math.exp(mu + self.sigma**2 / 2) * inside if inside > 0 else 0.0
        return self.low * _PHI(a) + self.high * (1 - _PHI(b)) + weighted

    def sample(self, rng, n):
        values = np.exp(self.mu + self.sigma * rng.standard_normal(n))
        # Rounded at random, up or down by the fraction: rounding to nearest would shift the mean.
        clipped = np.clip(values, self.low, self.high)
        return np.floor(clipped + rng.random(n)).astype(int).clip(self.low, self.high)


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
