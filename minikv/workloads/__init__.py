"""Traffic: when requests come, and how long their prompts and answers are. Seeded, no tokens.

    workload = sharegpt(rate=2.0)
    requests = workload.requests(duration_s=3600, seed=0)

gives `Request`s with lengths only, in order of arrival, for the simulator.
"""

from dataclasses import dataclass

import numpy as np

from minikv.request import Request, require_int
from minikv.workloads.arrivals import Gamma, Poisson, Recorded
from minikv.workloads.lengths import Empirical, Fixed, LogNormal, Prefixed, Uniform

__all__ = [
    "PRESETS",
    "Empirical",
    "Fixed",
    "Gamma",
    "LogNormal",
    "Poisson",
    "Prefixed",
    "Recorded",
    "RequestClass",
    "Uniform",
    "Workload",
    "alpaca",
    "shared_header",
    "sharegpt",
]


@dataclass(frozen=True)
class RequestClass:
    """A kind of request: its share of the traffic, and its lengths in tokens."""

    name: str
    share: float
    prompt_lengths: object
    output_lengths: object

    @property
    def prefix(self) -> tuple:
        """(prefix_id, prefix_len) of its requests: what their prompts share."""
        lengths = self.prompt_lengths
        if not isinstance(lengths, Prefixed) or not lengths.num_prefix_tokens:
            return None, 0
        prefix_id = self.name if lengths.prefix_id is None else lengths.prefix_id
        return prefix_id, lengths.num_prefix_tokens


@dataclass(frozen=True)
class Workload:
    """A mixture of classes under one arrival process. Shares are relative: they need not add
    up to 1. Raises ValueError for a share that is not positive, or for no class at all."""

    name: str
    arrivals: object
    classes: tuple[RequestClass, ...]

    def __post_init__(self):
        if not self.classes:
            raise ValueError(f"workload {self.name!r} has no class of requests")
        for each in self.classes:
            if not each.share > 0:
                raise ValueError(f"class {each.name!r} has share {each.share}, but needs above 0")

    def requests(self, *, duration_s=None, num_requests=None, seed=0) -> list[Request]:
        """Requests "class-number" in order of arrival: those of the first duration_s seconds, or
        the first num_requests, whichever ends first; at least one of the two must be given."""
        if duration_s is None and num_requests is None:
            raise ValueError("give duration_s, num_requests or both: traffic has no end by itself")
        if duration_s is not None and not 0 < duration_s < float("inf"):
            raise ValueError(f"duration_s is {duration_s}, but must be above 0 and finite")
        if num_requests is not None:
            require_int("num_requests", num_requests, at_least=1)
        rng = np.random.default_rng(seed)
        times = self.arrivals.times(rng, duration_s, num_requests)
        shares = np.array([each.share for each in self.classes], dtype=float)
        kinds = rng.choice(len(self.classes), size=len(times), p=shares / shares.sum())
        prompts, outputs = np.zeros(len(times), int), np.zeros(len(times), int)
        for kind, each in enumerate(self.classes):
            members = np.flatnonzero(kinds == kind)
            prompts[members] = each.prompt_lengths.sample(rng, len(members))
            outputs[members] = each.output_lengths.sample(rng, len(members))
        prefixes = [each.prefix for each in self.classes]
        rows = zip(times.tolist(), kinds.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        return [
            Request(
                f"{self.classes[kind].name}-{i}",
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
                arrival_time=time,
                prefix_id=prefixes[kind][0],
                prefix_len=prefixes[kind][1],
            )
            for i, (time, kind, num_prompt_tokens, max_tokens) in enumerate(rows)
        ]


def _chat(name, mean_prompt, mean_output, rate, cv_prompt, cv_output):
    prompts = LogNormal(mean_prompt, cv_prompt, low=4, high=1024)
    outputs = LogNormal(mean_output, cv_output, low=4, high=1024)
    return Workload(name, Poisson(rate), (RequestClass(name, 1.0, prompts, outputs),))


def sharegpt(rate=1.0, cv_prompt=1.3, cv_output=1.0) -> Workload:
    """Chats of people with ChatGPT: means of 161.31 prompt and 337.99 output tokens (Kwon et al.
    2023, Fig. 11). The paper gives no more than the means and a picture; the shape (log-normal,
    these coefficients of variation, 4 to 1,024 tokens) is ours."""
    return _chat("sharegpt", 161.31, 337.99, rate, cv_prompt, cv_output)


def alpaca(rate=1.0, cv_prompt=0.8, cv_output=1.2) -> Workload:
    """Instructions: means of 19.31 prompt and 58.45 output tokens (Kwon et al. 2023, Fig. 11);
    the shape is ours, as for sharegpt."""
    return _chat("alpaca", 19.31, 58.45, rate, cv_prompt, cv_output)


def shared_header(rate=1.0) -> Workload:
    """A service whose prompts begin with one 200-token header, before a short question; one prompt
    in twenty is a long document of its own, with no header. Made up, to be unlike chats in one
    thing: needs that differ by a factor of twenty. The header is named: a prefix cache finds it."""
    answers = LogNormal.of_median(200, 0.9, high=1_500)
    questions = Prefixed(200, LogNormal.of_median(67, 0.8, high=2_000))
    return Workload(
        "shared-header",
        Poisson(rate),
        (
            RequestClass("question", 0.95, questions, answers),
            RequestClass("document", 0.05, Uniform(2_000, 6_000), answers),
        ),
    )


PRESETS = {"sharegpt": sharegpt, "alpaca": alpaca, "shared-header": shared_header}
