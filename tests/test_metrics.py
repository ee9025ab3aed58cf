"""TTFT, TPOT and ITL on steps made by hand: no clock runs here."""

import math
import statistics

import pytest

from minikv.metrics import PERCENTILES, Metrics, RequestMetrics, StepRecord, summarize, timeline
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


# -- all requests together -----------------------------------------------------------------------


def served():
    """Three that finished (one preempted, one with a single token), one aborted, one refused,
    one that still runs; over the six steps above, with other counts in each."""
    out = metrics()
    out.num_blocks = 10
    counts = [(1, 3, 2), (2, 6, 5), (3, 3, 7), (2, 2, 5), (2, 9, 10), (1, 1, 1)]
    out.steps[:] = [
        StepRecord(step.start, step.end, *each)
        for step, each in zip(out.steps, counts, strict=True)
    ]
    requests = [
        finished([[0, 2]], arrival_time=0.25),
        finished([[1, 2], [4, 5]], arrival_time=0.75),
        finished([[3, 3]], arrival_time=2.0),
        finished([[1, 3]], arrival_time=0.0),
        Request("refused", [1] * 9, arrival_time=0.1),
        finished([[4, 5]], arrival_time=3.0),
    ]
    for request, reason in zip(
        requests, ("length", "stop", "length", "abort", "error", None), strict=True
    ):
        request.finish_reason = reason
    requests[1].num_preemptions = 1
    requests[3].num_preemptions, requests[5].num_preemptions = 2, 3  # they cost time, ended or not
    return requests, out


def naive_percentile(values, percent):
    """Linear interpolation between the two nearest of the sorted values."""
    values = sorted(values)
    place = percent / 100 * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def test_the_summary_against_a_plain_recomputation():
    requests, out = served()
    got = summarize(requests, out)
    of = [out.of(r) for r in requests if r.finish_reason in ("length", "stop")]
    duration = 8.75 - 0.0  # the first arrival, though it was aborted, to the last step's end
    assert got["completed"] == 3 and got["failed"] == 1 and got["num_requests"] == 6
    assert got["duration"] == duration
    assert got["total_input_tokens"] == 9 and got["total_output_tokens"] == 3 + 4 + 1
    assert got["request_throughput"] == pytest.approx(3 / duration)
    assert got["output_throughput"] == pytest.approx(8 / duration)
    assert got["total_token_throughput"] == pytest.approx(17 / duration)
    assert got["num_preemptions"] == 6 and got["num_steps"] == 6
    series = {
        "ttft": [m.ttft for m in of],
        "tpot": [m.tpot for m in of if m.tpot is not None],
        "itl": [gap for m in of for gap in m.itl],
        "e2el": [m.latency for m in of],
        "queue_time": [m.queue_time for m in of],
    }
    assert [len(values) for values in series.values()] == [3, 2, 5, 3, 3]
    for name, seconds in series.items():
        ms = [1000 * s for s in seconds]
        assert got[f"mean_{name}_ms"] == pytest.approx(statistics.mean(ms))
        assert got[f"median_{name}_ms"] == pytest.approx(statistics.median(ms))
        for percent in PERCENTILES:
            assert got[f"p{percent}_{name}_ms"] == pytest.approx(naive_percentile(ms, percent))
    assert len(got) == 15 + 5 * (2 + len(PERCENTILES))
    seconds = [0.5, 0.5, 2.0, 0.25, 1.0, 4.0]
    assert got["mean_num_seqs"] == pytest.approx(
        sum(s * n for s, n in zip(seconds, [1, 2, 3, 2, 2, 1], strict=True)) / 8.25
    )
    assert got["utilization"] == pytest.approx(
        sum(s * n for s, n in zip(seconds, [2, 5, 7, 5, 10, 1], strict=True)) / 8.25 / 10
    )


def test_the_summary_of_single_tokens_has_no_pace():
    out = metrics()
    requests = [finished([[i, i]]) for i in range(3)]
    for request in requests:
        request.finish_reason = "length"
    got = summarize(requests, out)
    assert got["completed"] == 3 and got["mean_ttft_ms"] > 0
    assert not [name for name in got if "itl" in name or "tpot" in name]
    assert "utilization" not in got  # a pool of unknown size


def test_where_nothing_finished_there_is_only_the_count():
    requests, out = served()
    counts = {"completed": 0, "failed": 0, "num_requests": 0}
    assert summarize([], Metrics()) == counts
    assert summarize(requests[3:], out) == counts | {"failed": 1, "num_requests": 3}


def test_a_clock_that_stands_still_divides_by_no_zero():
    out = Metrics(4)
    out.steps.append(StepRecord(1.0, 1.0, 1, 3, 2))
    request = finished([[0, 0]], arrival_time=1.0)
    request.finish_reason, request.first_token_time, request.finish_time = "length", 1.0, 1.0
    assert summarize([request], out)["output_throughput"] > 0


def test_a_timeline_is_a_table_for_pandas():
    import pandas  # the notebooks'; the engine needs none

    _, out = served()
    table = pandas.DataFrame(timeline(out))
    assert list(table.columns) == list(StepRecord._fields)
    assert len(table) == 6 and table.end.tolist() == ENDS
    assert table.num_tokens.sum() == 24 and table.num_seqs.dtype.kind == "i"
    assert list(pandas.DataFrame(timeline(Metrics())).columns) == list(StepRecord._fields)
