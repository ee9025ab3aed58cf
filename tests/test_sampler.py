"""The sampler: right distribution, and a random stream that is the request's own."""

import numpy as np
import pytest
import torch

from minikv.model import sampler as module
from minikv.model.sampler import sample, uniform
from minikv.request import Request, SamplingParams

VOCAB, NUM_DRAWS = 20, 6000


def request(seed=0, i=0, sample_index=0, **params):
    """A request that has sampled i tokens."""
    made = Request(
        "x", [1, 2], sampling_params=SamplingParams(**params), seed=seed, sample_index=sample_index
    )
    for _ in range(i):
        made.append(0)
    return made


def logits_of(seed=0, rows=1, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * scale


def draw(logits, num_draws, **params):
    """How often each token came in num_draws requests with seeds 0, 1, 2, ..."""
    requests = [request(seed, **params) for seed in range(num_draws)]
    tokens = sample(logits.expand(num_draws, -1), requests)
    return np.bincount(tokens, minlength=VOCAB)


def expected_probs(logits, *, temperature=1.0, top_k=0, top_p=1.0):
    """The definition, by sorting in numpy."""
    scores = logits[0].double().numpy() / temperature
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    kept = order[: top_k or VOCAB]
    mass = np.cumsum(probs[kept] / probs[kept].sum())
    kept = kept[: int(np.searchsorted(mass, top_p)) + 1]
    out = np.zeros(VOCAB)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def test_temperature_0_takes_the_likeliest():
    logits = logits_of(rows=8)
    assert sample(logits, [request(i) for i in range(8)]) == logits.argmax(-1).tolist()


def test_a_request_without_params_is_greedy():
    logits = logits_of()
    assert sample(logits, [Request("x", [1])]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("params", [
    {"top_k": 1}, {"top_p": 1e-9}, {"top_k": 1, "top_p": 0.5}, {"temperature": 1e-9},
    {"temperature": 1e-300}, {"temperature": 5e-324},
])  # fmt: skip
def test_one_choice_or_no_heat_equals_greedy(params):
    logits = logits_of(rows=50)
    requests = [request(seed, **{"temperature": 1.0} | params) for seed in range(50)]
    assert sample(logits, requests) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", [
    {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-300, "top_k": 1}, {"top_k": 3, "top_p": 1e-9},
])  # fmt: skip
def test_one_choice_among_equals_is_the_greedy_one(params, dtype):
    """Logits of few different values, in a vocabulary as large as a real one."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 9, (40, 5000), generator=generator).to(dtype)
    requests = [request(seed, **{"temperature": 1.0} | params) for seed in range(40)]
    assert sample(logits, requests) == sample(logits, [request()] * 40)


def test_of_equals_at_the_edge_of_top_k_the_first_are_kept():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    assert set(np.nonzero(draw(logits, 500, temperature=5.0, top_k=4))[0]) == {0, 1, 2, 7}


CHI_SQUARE_999 = {  # 99.9% quantiles by degrees of freedom (any table)
    3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 9: 27.88, 19: 43.82,
}  # fmt: skip


@pytest.mark.parametrize("params", [
    {"temperature": 1.0},
    {"temperature": 2.0},
    {"temperature": 1e6},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.5, "top_k": 10},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 2.0, "top_p": 0.6},
    {"temperature": 3.0, "top_k": 8, "top_p": 0.8},
])  # fmt: skip
def test_draws_follow_the_softmax_of_what_is_kept(params):
    logits, num_draws = logits_of(scale=1.0), NUM_DRAWS
    expected = num_draws * expected_probs(logits, **params)
    counts = draw(logits, num_draws, **params)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    chi_square = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    degrees = int(kept.sum()) - 1
    limit = CHI_SQUARE_999.get(degrees, degrees + 4.5 * (2 * degrees) ** 0.5)
    assert expected[kept].min() > 5
    assert chi_square < limit, (degrees, chi_square)


def test_a_wrong_temperature_would_fail_the_distribution_test():
    logits, num_draws = logits_of(scale=1.0), NUM_DRAWS
    expected = num_draws * expected_probs(logits, temperature=1.2)
    counts = draw(logits, num_draws, temperature=1.0)
    assert float(((counts - expected) ** 2 / expected).sum()) > 43.82


def test_a_great_temperature_still_keeps_to_top_k():
    logits = logits_of()
    counts = draw(logits, 2000, temperature=1e300, top_k=3)
    assert set(np.nonzero(counts)[0]) == set(logits[0].topk(3).indices.tolist())


def test_tokens_that_cannot_come_never_come():
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, [3, 9]] = 0.0
    counts = draw(logits, 500, temperature=1.0)
    assert set(np.nonzero(counts)[0]) == {3, 9}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_full(dtype):
    logits = logits_of().to(dtype)
    counts = draw(logits, 500, temperature=1.0)
    assert counts.tolist() == draw(logits.float(), 500, temperature=1.0).tolist()


def test_differences_of_half_precision_logits_are_not_rounded(monkeypatch):
    """128 - 0.75 is 127.5 or 128 in bfloat16: at this temperature that moves the edge between the
    two tokens by 1e-3 or more. The number drawn lies between the right edge and the wrong ones."""
    logits = torch.tensor([[128.0, 0.75]]).bfloat16()
    right = 1 / (1 + np.exp(-127.25 / 100))
    for u, token in ((right - 2e-4, 0), (right + 2e-4, 1)):
        monkeypatch.setattr(module, "uniform", lambda request, u=u: u)
        assert sample(logits, [request(temperature=100.0)]) == [token]


# -- rows do not touch each other ---------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_gives_none_and_leaves_the_others(value):
    logits = logits_of(rows=5)
    requests = [request(seed, temperature=1.0 * (seed % 2)) for seed in range(5)]
    expected = sample(logits, requests)
    for bad in range(5):
        broken = logits.clone()
        broken[bad, 7] = value
        got = sample(broken, requests)
        assert got[bad] is None
        assert got[:bad] + got[bad + 1 :] == expected[:bad] + expected[bad + 1 :]


def test_a_row_of_minus_infinity_gives_none():
    logits = torch.full((1, VOCAB), float("-inf"))
    assert sample(logits, [request(temperature=1.0)]) == [None]
    assert sample(logits, [request()]) == [None]


def test_a_row_is_sampled_the_same_in_any_batch():
    logits = logits_of(rows=6)
    requests = [request(seed, temperature=1.0, top_p=0.9) for seed in range(6)]
    together = sample(logits, requests)
    assert [sample(logits[i : i + 1], requests[i : i + 1])[0] for i in range(6)] == together
    assert sample(logits.flip(0), requests[::-1]) == together[::-1]


# -- the random stream --------------------------------------------------------------------------


def test_the_number_depends_on_seed_sample_and_token_alone():
    first = request(7, i=4, sample_index=2, temperature=1.0)
    other = Request("another", [9] * 50, seed=7, sample_index=2, max_tokens=99)
    for _ in range(4):
        other.append(5)
    other.num_computed_tokens, other.num_preemptions = 13, 6
    assert uniform(first) == uniform(first) == uniform(other)


def test_each_of_seed_sample_and_token_changes_the_number():
    numbers = {
        uniform(request(seed, i=i, sample_index=index))
        for seed in (0, 1, 2**32, 2**63, 2**64 - 1)
        for i in range(10)
        for index in range(10)
    }
    assert len(numbers) == 500


def test_the_numbers_are_uniform_along_every_axis():
    axes = {
        "seed": [uniform(request(seed)) for seed in range(4000)],
        "sample": [uniform(request(3, sample_index=i)) for i in range(4000)],
        "token": [],
    }
    growing = request(3)
    for _ in range(4000):
        axes["token"].append(uniform(growing))
        growing.append(0)
    for numbers in axes.values():
        assert min(numbers) >= 0
        assert max(numbers) < 1
        counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
        assert float(((counts - 400) ** 2 / 400).sum()) < CHI_SQUARE_999[9]
        neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
        assert abs(neighbours) < 0.06


def test_the_stream_is_the_same_in_every_release():
    """A learner's saved output stays true: these are numpy's Philox, whose streams are frozen."""
    known = [uniform(request(0)), uniform(request(0, i=1)), uniform(request(1, sample_index=1))]
    assert known == [0.011546754286331562, 0.5023796042735054, 0.0751511510959112]
