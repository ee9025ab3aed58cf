"""Parameters are refused when they are made, and the message names the value and the limit."""

import math

import numpy as np
import pytest

from minikv.request import Request, SamplingParams, require_int

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "name, value, error, limit",
    [
        *[("max_tokens", value, ValueError, "at least 1") for value in (0, -1, -(10**30))],
        *[
            ("max_tokens", value, TypeError, "whole number")
            for value in (1.0, NAN, True, "3", None)
        ],
        *[("temperature", value, ValueError, "at least 0") for value in (-0.1, NAN, INF, -INF)],
        *[("temperature", value, TypeError, "a number") for value in (True, "0", None, 1j, [0.5])],
        *[("top_k", value, ValueError, "at least -1") for value in (-2, -100)],
        *[("top_k", value, TypeError, "whole number") for value in (1.5, NAN, INF, False, "1")],
        *[
            ("top_p", value, ValueError, "above 0 and at most 1")
            for value in (0, -1, 1.01, NAN, INF)
        ],
        *[("top_p", value, TypeError, "a number") for value in (True, "1", None)],
        *[("n", value, ValueError, "from 1 to 1024") for value in (0, -3, 1025)],
        *[("n", value, TypeError, "whole number") for value in (2.0, NAN, True, "2", None)],
        *[("seed", value, ValueError, f"from 0 to {2**64 - 1}") for value in (-1, 2**64)],
        *[("seed", value, TypeError, "whole number") for value in (0.5, NAN, True, "7")],
        *[("stop", value, ValueError, "non-empty string") for value in ("", [""], ["a", ""], [1])],
        ("stop", 5, TypeError, "must be a list"),
        *[("stop_token_ids", value, TypeError, "must be a list") for value in (0, 7, 1.5)],
        ("stop_token_ids", [3, -1], ValueError, "at least 0"),
        *[
            ("stop_token_ids", [value], TypeError, "whole number")
            for value in (1.0, True, "x", None)
        ],
        *[("ignore_eos", value, TypeError, "True or False") for value in (1, "yes", None)],
    ],
)
def test_sampling_params_are_refused(name, value, error, limit):
    with pytest.raises(error) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    culprit = (
        next((v for v in value if v not in (3, "a")), value) if isinstance(value, list) else value
    )
    shown = (str(culprit), repr(culprit), str(value), repr(value))
    assert name in message and limit in message and any(text in message for text in shown)


@pytest.mark.parametrize(
    "name, value, kept",
    [
        ("max_tokens", 1, 1),
        ("temperature", 0, 0.0),
        ("temperature", 2.5, 2.5),
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", 40, 40),
        ("top_p", 1, 1.0),
        ("top_p", 1e-9, 1e-9),
        ("n", 3, 3),
        ("seed", 0, 0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", None, None),
        ("stop", "end", ("end",)),
        ("stop", ["a", "bc"], ("a", "bc")),
        ("stop", None, ()),
        ("stop_token_ids", [0, 2], (0, 2)),
        ("stop_token_ids", None, ()),
        ("ignore_eos", True, True),
    ],
)
def test_sampling_params_at_their_limits(name, value, kept):
    got = getattr(SamplingParams(**{name: value}), name)
    assert got == kept and type(got) is type(kept)


def test_numpy_integers_become_pythons():
    np = pytest.importorskip("numpy")
    params = SamplingParams(max_tokens=np.int64(5), stop_token_ids=list(np.array([1, 2])))
    assert params.max_tokens == 5 and type(params.max_tokens) is int
    assert params.stop_token_ids == (1, 2) and type(params.stop_token_ids[0]) is int


def test_sampling_params_do_not_change():
    with pytest.raises(AttributeError):
        SamplingParams().n = 2


def test_the_defaults_are_greedy_and_repeatable():
    params = SamplingParams()
    assert (params.temperature, params.n, params.seed, params.max_tokens) == (0.0, 1, None, 128)


@pytest.mark.parametrize("value, at_most", [(0, None), (9, 8)])
def test_require_int_names_the_limits(value, at_most):
    limit = "at least 1" if at_most is None else "from 1 to 8"
    with pytest.raises(ValueError, match=f"rows is {value}, but must be {limit}"):
        require_int("rows", value, at_least=1, at_most=at_most)
    assert [require_int("rows", ok, at_least=1, at_most=8) for ok in (1, 8)] == [1, 8]


# -- Request -----------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused_by_name():
    with pytest.raises(
        ValueError, match="prompt tokens of request 'a' is 0, but must be at least 1"
    ):
        Request("a", [])
    with pytest.raises(TypeError, match="prompt tokens of request 'a'"):
        Request("a")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, NAN])
def test_a_request_without_output_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="max_tokens"):
        Request("a", [1], max_tokens=value)


def test_the_last_sampled_token_needs_no_slot():
    assert Request("a", [1, 2, 3], max_tokens=1).max_kv_tokens == 3
    assert Request("a", [1, 2, 3], max_tokens=5).max_kv_tokens == 7


def test_counts_follow_the_tokens():
    prompt = [1, 2, 3]
    request = Request("a", prompt)
    request.append(9)
    assert request.token_ids == [1, 2, 3, 9] and prompt == [1, 2, 3]  # the caller's list is its own
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 4, 1)
    assert request.num_computed_tokens == 0


def test_a_request_may_have_lengths_without_tokens():
    request = Request("a", num_prompt_tokens=5, max_tokens=2)
    request.append(0)
    assert request.token_ids is None
    assert (request.num_tokens, request.num_output_tokens, request.max_kv_tokens) == (6, 1, 6)


def test_requests_share_no_state():
    a, b = Request("a", [1]), Request("b", [1])
    for name in ("children", "token_runs", "block_hashes"):
        assert getattr(a, name) == [] and getattr(a, name) is not getattr(b, name)


def test_the_repr_says_where_it_stands():
    request = Request("a", [1, 2, 3])
    request.num_computed_tokens = 2
    assert repr(request) == "Request('a', computed 2 of 3 tokens, 3 of them prompt)"


@pytest.mark.parametrize("value", [np.array([1, 2]), np.array(1.0), True, "1", 1.0, None])
def test_what_is_no_whole_number_is_a_type_error(value):
    with pytest.raises(TypeError, match="rows must be a whole number, not"):
        require_int("rows", value, at_least=1)
    assert type(require_int("rows", np.int64(3), at_least=1)) is int
