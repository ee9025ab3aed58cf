"""Traffic: published means, the right scatter, the same seed the same requests, clear refusals."""

import itertools
import math

import numpy as np
import pytest

from minikv.experiments import hits_run
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.workloads import (
    PRESETS,
    Empirical,
    Fixed,
    Gamma,
    LogNormal,
    Poisson,
    Prefixed,
    Recorded,
    RequestClass,
    Uniform,
    Workload,
    alpaca,
    shared_header,
    sharegpt,
)

MANY = 100_000
TOKENS_OF_SEED_0 = (155_007, 346_829, 511.025)  # prompt, output; seconds of the last arrival


def rng(seed=0):
    return np.random.default_rng(seed)


def cv_of(values):
    return np.std(values) / np.mean(values)


# -- lengths ------------------------------------------------------------------------------------

PUBLISHED = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}  # Kwon et al. 2023, Fig. 11


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("seed", range(3))
def test_the_presets_have_the_published_means(name, seed):
    requests = PRESETS[name]().requests(num_requests=MANY // 2, seed=seed)
    prompts = np.array([r.num_prompt_tokens for r in requests])
    outputs = np.array([r.max_tokens for r in requests])
    for lengths, mean in zip((prompts, outputs), PUBLISHED[name], strict=True):
        error = 4 * np.std(lengths) / np.sqrt(len(lengths))
        assert abs(lengths.mean() - mean) < error < 0.03 * mean
        assert lengths.min() >= 4 and lengths.max() <= 1024


@pytest.mark.parametrize("preset", [sharegpt, alpaca])
@pytest.mark.parametrize("cvs", [(0.8, 1.2), (1.3, 1.0), (0.3, 2.0)])
def test_other_coefficients_of_variation_leave_the_means(preset, cvs):
    [kind] = preset(cv_prompt=cvs[0], cv_output=cvs[1]).classes
    means = PUBLISHED[preset.__name__]
    for lengths, mean in zip((kind.prompt_lengths, kind.output_lengths), means, strict=True):
        assert lengths.sample(rng(), MANY).mean() == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize("mean, cv, low, high", [
    (100, 0.5, 1, 1 << 30), (100, 1.3, 4, 1024), (1000, 1.0, 4, 1024), (5, 3.0, 4, 1024),
    (2, 0.1, 1, 3), (67, 0.8, 1, 1500), (4.5, 1.0, 4, 6),
])  # fmt: skip
def test_a_clipped_log_normal_keeps_its_mean(mean, cv, low, high):
    values = LogNormal(mean, cv, low, high).sample(rng(), MANY)
    assert values.min() >= low and values.max() <= high and values.dtype.kind == "i"
    assert values.mean() == pytest.approx(mean, rel=0.02)


def test_unclipped_it_has_its_coefficient_of_variation():
    for cv in (0.2, 0.8, 1.3):
        assert cv_of(LogNormal(1000, cv).sample(rng(), MANY)) == pytest.approx(cv, rel=0.06)


@pytest.mark.parametrize("median, sigma, low, high", [
    (67, 0.8, 1, 1 << 30), (200, 0.9, 1, 1_500), (200, 0.9, 100, 300), (50, 0.05, 1, 99),
])  # fmt: skip
def test_a_log_normal_by_its_median(median, sigma, low, high):
    lengths = LogNormal.of_median(median, sigma, low, high)
    assert math.exp(lengths.mu) == pytest.approx(median) and lengths.sigma == pytest.approx(sigma)
    values = lengths.sample(rng(), MANY)
    assert values.min() >= low and values.max() <= high
    assert np.median(values) == pytest.approx(median, rel=0.02)
    below = np.mean(values <= median * math.exp(-sigma))  # one deviation below: 16%
    assert below == pytest.approx(0.1587 if low <= median * math.exp(-sigma) else 0, abs=0.01)
    assert values.mean() == pytest.approx(lengths.mean, rel=0.02)


def test_a_prefix_comes_before_the_rest():
    lengths = Prefixed(200, Uniform(1, 9))
    assert set(lengths.sample(rng(), 1_000)) == set(range(201, 210))


def test_one_in_twenty_of_the_shared_headers_is_a_document():
    requests = shared_header(rate=2.0).requests(num_requests=40_000, seed=0)
    questions = [r for r in requests if r.request_id.startswith("question-")]
    documents = [r.num_prompt_tokens for r in requests if r.request_id.startswith("document-")]
    assert len(documents) / 40_000 == pytest.approx(0.05, abs=0.004)
    assert min(documents) >= 2_000 and max(documents) <= 6_000
    assert np.mean(documents) == pytest.approx(4_000, rel=0.03)
    prompts = np.array([r.num_prompt_tokens for r in questions])
    assert prompts.min() > 200 and np.median(prompts) == pytest.approx(267, abs=3)
    outputs = np.array([r.max_tokens for r in requests])
    assert np.median(outputs) == pytest.approx(200, rel=0.03) and outputs.max() == 1_500


def test_prompts_name_the_prefix_that_they_share():
    requests = shared_header(rate=2.0).requests(num_requests=400, seed=0)
    named = {(r.request_id.split("-")[0], r.prefix_id, r.prefix_len) for r in requests}
    assert named == {("question", "question", 200), ("document", None, 0)}
    classes = [
        RequestClass("a", 1, Prefixed(32, Fixed(8)), Fixed(1)),
        RequestClass("b", 1, Prefixed(32, Fixed(8), prefix_id="rules"), Fixed(1)),
        RequestClass("c", 1, Prefixed(48, Fixed(8), prefix_id="rules"), Fixed(1)),
        RequestClass("d", 1, Prefixed(0, Fixed(8)), Fixed(1)),
    ]
    requests = Workload("w", Poisson(1.0), tuple(classes)).requests(num_requests=60, seed=0)
    named = {(r.request_id[0], r.prefix_id, r.prefix_len) for r in requests}
    assert named == {("a", "a", 32), ("b", "rules", 32), ("c", "rules", 48), ("d", None, 0)}


def test_a_prefix_cache_finds_the_named_prefix_and_no_more():
    requests = shared_header(rate=2.0).requests(num_requests=100, seed=0)
    counts = hits_run(requests, PrefixCachingKVCacheManager(10_000, 16))
    num_questions = sum(r.prefix_len == 200 for r in requests)
    assert counts.hit_tokens == (num_questions - 1) * 192  # 12 of the header's 12.5 blocks


def test_fixed_uniform_and_empirical_lengths():
    assert set(Fixed(7).sample(rng(), 50)) == {7}
    assert set(Uniform(3, 6).sample(rng(), 1000)) == {3, 4, 5, 6}
    assert set(Uniform(3, 3).sample(rng(), 10)) == {3}
    observed = Empirical((1, 1, 1, 9)).sample(rng(), MANY)
    assert set(observed) == {1, 9} and np.mean(observed == 1) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("make, message", [
    (lambda: Fixed(0), "num_tokens is 0, but must be at least 1"),
    (lambda: Uniform(0, 5), "low is 0, but must be at least 1"),
    (lambda: Uniform(6, 5), "high is 5, but must be at least 6"),
    (lambda: LogNormal(10, 0), "cv is 0, but must be above 0"),
    (lambda: LogNormal(10, float("nan")), "cv is nan"),
    (lambda: LogNormal(10, float("inf")), "cv is inf"),
    (lambda: LogNormal(4, 1, low=4, high=9), "mean is 4, but must lie between low 4 and high 9"),
    (lambda: LogNormal(float("nan"), 1), "mean is nan"),
    (lambda: LogNormal(2000, 1, high=1024), "mean is 2000.*high 1024"),
    (lambda: LogNormal(5, 1, low=0), "low is 0"),
    (lambda: LogNormal.of_median(4, 1, low=4), "median is 4, but must lie between low 4"),
    (lambda: LogNormal.of_median(float("nan"), 1), "median is nan"),
    (lambda: LogNormal.of_median(9, 0), "sigma is 0.0, but must be finite and above 0"),
    (lambda: LogNormal.of_median(9, 50), "sigma is 50.0.*at most 8"),
    (lambda: LogNormal.of_median(9, 1, low=0), "low is 0"),
    (lambda: Prefixed(-1, Fixed(1)), "num_prefix_tokens is -1, but must be at least 0"),
    (lambda: Empirical(()), "no observed lengths"),
    (lambda: Empirical((3, 0)), "an observed length is 0"),
    (lambda: Poisson(0), "rate is 0, but must be above 0"),
    (lambda: Poisson(float("nan")), "rate is nan"),
    (lambda: Poisson(float("inf")), "rate is inf"),
    (lambda: Gamma(-1, 1), "rate is -1"),
    (lambda: Gamma(1, 0), "cv is 0, but must be from 0.001 to 100"),
    (lambda: Gamma(1, float("nan")), "cv is nan"),
    (lambda: Gamma(1, 1e9), "cv is 1000000000.0"),
    (lambda: Recorded((1.0, 0.5)), "each at or after the last"),
    (lambda: Recorded((1.0, float("nan"))), "must be finite"),
    (lambda: Workload("w", Poisson(1), ()), "'w' has no class"),
    (lambda: Workload("w", Poisson(1), (RequestClass("c", 0, Fixed(1), Fixed(1)),)),
     "'c' has share 0"),
    (lambda: sharegpt(rate=0), "rate is 0"),
    (lambda: sharegpt().requests(), "give duration_s, num_requests or both"),
    (lambda: sharegpt().requests(duration_s=0), "duration_s is 0"),
    (lambda: sharegpt().requests(duration_s=float("nan")), "duration_s is nan"),
    (lambda: sharegpt().requests(duration_s=float("inf")), "duration_s is inf"),
    (lambda: sharegpt().requests(num_requests=0), "num_requests is 0"),
])  # fmt: skip
def test_nonsense_is_refused_with_the_value_and_the_limit(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [
    lambda: Fixed(1.5), lambda: Uniform("a", 3), lambda: sharegpt().requests(num_requests=2.5),
])  # fmt: skip
def test_what_is_no_whole_number_is_refused(make):
    with pytest.raises(TypeError, match="must be a whole number"):
        make()


# -- arrivals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arrivals, cv", [
    (Poisson(5.0), 1.0), (Gamma(5.0, 1.0), 1.0), (Gamma(5.0, 0.25), 0.25), (Gamma(5.0, 3.0), 3.0),
])  # fmt: skip
def test_gaps_have_their_mean_and_coefficient_of_variation(arrivals, cv):
    times = arrivals.times(rng(), None, MANY)
    gaps = np.diff(times, prepend=0.0)
    assert len(times) == MANY and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 5.0, rel=0.03 * max(1, cv))
    assert cv_of(gaps) == pytest.approx(cv, rel=0.05)


def test_counts_per_second_scatter_as_a_poisson_process_does():
    times = Poisson(4.0).times(rng(1), 20_000.0, None)
    counts = np.bincount(times.astype(int), minlength=20_000)
    assert counts.mean() == pytest.approx(4.0, rel=0.02)
    assert counts.var() == pytest.approx(4.0, rel=0.05)
    bursty = np.bincount(Gamma(4.0, 3.0).times(rng(1), 20_000.0, None).astype(int))
    assert bursty.var() > 3 * counts.var()


@pytest.mark.parametrize("arrivals", [Poisson(2.0), Gamma(2.0, 4.0), Gamma(2.0, 0.1)])
def test_duration_and_number_both_bound_the_traffic(arrivals):
    for seed in range(20):
        full = arrivals.times(rng(seed), 100.0, None)
        assert full.size == 0 or full[-1] < 100.0
        assert len(arrivals.times(rng(seed), None, 37)) == 37
        both = arrivals.times(rng(seed), 100.0, 37)
        assert len(both) <= 37 and (both < 100.0).all()
        assert (np.diff(full) >= 0).all()
    lengths = [len(arrivals.times(rng(seed), 100.0, None)) for seed in range(40)]
    assert np.mean(lengths) == pytest.approx(200, rel=0.25)


def test_recorded_arrivals_are_taken_as_they_are():
    recorded = Recorded((0.0, 0.5, 0.5, 7.25))
    assert recorded.times(rng(), None, None).tolist() == [0.0, 0.5, 0.5, 7.25]
    assert recorded.times(rng(), 7.25, None).tolist() == [0.0, 0.5, 0.5]
    assert recorded.times(rng(), 100, 2).tolist() == [0.0, 0.5]


# -- mixtures -----------------------------------------------------------------------------------


def mixture():
    return Workload(
        "mixed",
        Poisson(3.0),
        (
            RequestClass("chat", 3, Uniform(10, 20), Fixed(5)),
            RequestClass("report", 1, Uniform(1000, 2000), Uniform(50, 60)),
        ),
    )


def test_classes_come_in_their_shares_with_their_own_lengths():
    requests = mixture().requests(num_requests=20_000, seed=0)
    chats = [r for r in requests if r.request_id.startswith("chat-")]
    reports = [r for r in requests if r.request_id.startswith("report-")]
    assert len(chats) + len(reports) == 20_000
    assert len(chats) / 20_000 == pytest.approx(0.75, abs=0.015)
    assert {r.max_tokens for r in chats} == {5}
    assert all(10 <= r.num_prompt_tokens <= 20 for r in chats)
    assert all(1000 <= r.num_prompt_tokens <= 2000 and 50 <= r.max_tokens <= 60 for r in reports)


def test_requests_come_in_order_with_ids_and_lengths_only():
    requests = mixture().requests(duration_s=60, seed=1)
    assert all(a.arrival_time <= b.arrival_time for a, b in itertools.pairwise(requests))
    assert [r.request_id.split("-")[1] for r in requests] == [str(i) for i in range(len(requests))]
    for r in requests:
        assert r.token_ids is None and r.num_tokens == r.num_prompt_tokens >= 1
        assert isinstance(r.arrival_time, float) and isinstance(r.num_prompt_tokens, int)
        assert isinstance(r.max_tokens, int)


def facts(requests):
    return [(r.request_id, r.arrival_time, r.num_prompt_tokens, r.max_tokens) for r in requests]


@pytest.mark.parametrize(
    "workload", [sharegpt(2.0), alpaca(5.0), shared_header(), mixture()], ids=lambda w: w.name
)
def test_a_seed_decides_everything(workload):
    runs = [facts(workload.requests(num_requests=200, seed=s)) for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_the_traffic_of_seed_0_stays_what_it_is():
    """What the chapters print depends on it."""
    requests = sharegpt(2.0).requests(num_requests=1_000, seed=0)
    assert sum(r.num_prompt_tokens for r in requests) == TOKENS_OF_SEED_0[0]
    assert sum(r.max_tokens for r in requests) == TOKENS_OF_SEED_0[1]
    assert round(requests[-1].arrival_time, 3) == TOKENS_OF_SEED_0[2]
