"""TTFT, TPOT and ITL on steps made by hand: no clock runs here."""

import pytest

from minikv.metrics import Metrics, RequestMetrics, StepRecord
from minikv.request import Request

# ends of six steps, unevenly spaced
ENDS = [1.0, 1.5, 3.5, 3.75, 4.75, 8.75]


def metrics():
    out = Metrics()
    starts = [0.5, *ENDS[:-1]]
    out.steps += [
        StepRecord(start, end, num_seqs=1, num_tokens=1, num_blocks_in_use=1)
        for start, end in zip(starts, ENDS, strict=True)
    ]
    return out


def finished(token_runs, arrival_time=0.25):
    num_tokens = sum(last - first + 1 for first, last in token_runs)
    request = Request("a", [1, 2, 3], max_tokens=num_tokens, arrival_time=arrival_time)
    for _ in range(num_tokens):
        request.append(0)
    request.token_runs = token_runs
    request.first_scheduled_time = 0.5
    request.first_token_time = ENDS[token_runs[0][0]]
    request.finish_time = ENDS[token_runs[-1][1]]
    return request


def test_a_token_is_emitted_at_the_end_of_its_step():
    assert metrics().token_times(finished([[1, 3]])) == [1.5, 3.5, 3.75]
    assert metrics().token_times(Request("a", [1])) == []


def test_latencies_of_an_undisturbed_request():
    of = metrics().of(finished([[0, 4]]))
    assert of.queue_time == 0.25  # 0.25 to 0.5
    assert of.ttft == 0.75  # 0.25 to 1.0
    assert of.latency == 4.5  # 0.25 to 4.75
    assert of.itl == [0.5, 2.0, 0.25, 1.0]
    assert of.tpot == (4.75 - 1.0) / 4
    assert of.tpot == pytest.approx(sum(of.itl) / len(of.itl))
    assert of.num_output_tokens == 5


def test_a_preemption_shows_as_one_long_gap():
    request = finished([[0, 1], [4, 5]])
    request.num_preemptions = 1
    of = metrics().of(request)
    assert of.itl == [0.5, 3.25, 4.0] and of.num_preemptions == 1
    assert of.tpot == (8.75 - 1.0) / 3


def test_one_token_has_a_first_but_no_pace():
    of = metrics().of(finished([[2, 2]]))
    assert of.ttft == of.latency == 3.25
    assert of.tpot is None and of.itl == []


def test_what_has_not_happened_is_none():
    of = metrics().of(Request("a", [1], arrival_time=2.0))
    assert of == RequestMetrics(2.0, None, None, None, num_output_tokens=0, num_preemptions=0)
    assert of.queue_time is of.ttft is of.tpot is of.latency is None
    running = finished([[0, 2]])
    running.finish_time = None
    of = metrics().of(running)
    assert of.ttft == 0.75 and of.tpot is of.latency is None and of.itl == [0.5, 2.0]


def test_an_abort_before_the_first_token():
    request = Request("a", [1], arrival_time=1.0)
    request.finish_time = 3.0
    of = metrics().of(request)
    assert of.latency == 2.0 and of.ttft is of.tpot is None
