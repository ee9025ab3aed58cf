"""Trace readers: requests say what the file says, and a bad line is named, not believed."""

import json
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.kv_cache.base import cdiv
from minikv.workloads.traces import (
    FIRST_LINES,
    MOONCAKE_BLOCK_SIZE,
    NUM_REPORTS,
    MalformedRow,
    open_trace,
)

B = MOONCAKE_BLOCK_SIZE


def mooncake(timestamp=0, input_length=700, output_length=5, hash_ids=None, **other):
    ids = list(range(cdiv(input_length, B))) if hash_ids is None else hash_ids
    row = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length}
    return json.dumps(row | {"hash_ids": ids} | other)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio"
GOOD = {  # format: two lines of it, without a header
    "mooncake": [mooncake(100), mooncake(2_350, 1024, 7, [0, 9])],
    "azure": ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:48.9305900,396,109"],
    "vidur": ["3772,54,3826,69.85185185185185", "2015,156,2171,12.916666666666666"],
}
HEADER = {"mooncake": [], "azure": [AZURE], "vidur": [VIDUR]}


@pytest.fixture
def write(tmp_path):
    def write(text, newline="\n", **options):
        path = tmp_path / "trace"
        text = text if isinstance(text, str) else "".join(line + "\n" for line in text)
        path.write_bytes(text.replace("\n", newline).encode(**options))
        return path

    return write


def read(path, **options):
    """(requests, reported lines, trace)"""
    reported = []
    trace = open_trace(path, report=reported.append, **options)
    return list(trace), reported, trace


def plain(requests):
    return [(r.num_prompt_tokens, r.max_tokens, r.arrival_time, r.block_hashes) for r in requests]


# -- good files ---------------------------------------------------------------------------------

EXPECTED = {
    # 700 tokens: the second id names a block that is filled in part, which nobody can share
    "mooncake": [(700, 5, 0.0, [0]), (1024, 7, 2.25, [0, 9])],
    "azure": [(374, 44, 0.0, []), (396, 109, 2.25, [])],
    "vidur": [(3772, 54, 0.0, []), (2015, 156, 0.0, [])],
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", ""])
def test_the_format_is_told_by_content_and_the_fields_are_the_requests(
    write, name, newline, encoding, end
):
    text = "\n".join(HEADER[name] + GOOD[name]) + end
    requests, reported, trace = read(write(text, newline, encoding=encoding), strict=True)
    assert plain(requests) == EXPECTED[name] and reported == []
    assert trace.format == name and trace.block_size == (B if name == "mooncake" else None)
    first = len(HEADER[name]) + 1
    assert [r.request_id for r in requests] == [f"{name}-{first}", f"{name}-{first + 1}"]
    assert "2 requests, none bad" in trace.summary()
    assert plain(trace) == EXPECTED[name]  # and once more
    assert trace.num_requests == 2


def test_columns_may_stand_in_another_order_among_others(write):
    lines = ["id, GeneratedTokens ,TIMESTAMP,ContextTokens", '1,44,"2023-11-16 18:15:46",374']
    assert plain(read(write(lines), strict=True)[0]) == [(374, 44, 0.0, [])]


def test_times_with_a_zone_and_of_seven_digits(write):
    lines = [AZURE, "2024-05-10 00:00:00.009930+00:00,1,2", "2024-05-10 02:00:01.0099301+02:00,3,4"]
    assert [r.arrival_time for r in read(write(lines), strict=True)[0]] == [0.0, 1.0]


def test_azure_times_are_exact_to_the_microsecond(write):
    lines = [AZURE, "2023-11-16 18:17:03.979960,1,2", "2023-11-16 19:14:19.928016,3,4"]
    assert read(write(lines))[0][1].arrival_time == 3435.948056


def test_a_trace_is_read_line_by_line(write):
    path = write([mooncake(1_000), "{damaged"])
    trace = iter(open_trace(path, strict=True))
    assert next(trace).num_prompt_tokens == 700  # the second line has not been looked at
    with pytest.raises(MalformedRow, match="line 2"):
        next(trace)


# -- bad lines ----------------------------------------------------------------------------------

LATE = "2023-11-16 18:15:47"
BAD = {
    "mooncake": {
        '{"timestamp": 100, "input_len': "is no JSON",  # a file that breaks off
        "[1, 2]": r"is \[1, 2\], not an object",
        "null": "is None, not an object",
        "": "is blank",
        " \t": "is blank",
        "[" * 100_000: "recursion",
        '{"timestamp": 100}': "has no 'input_length'",
        mooncake(100).replace("hash_ids", "hashes"): "has no 'hash_ids'",
        mooncake("100"): "timestamp must be a number, not '100'",
        mooncake(float("nan")): "timestamp is nan",
        mooncake(float("inf")): "timestamp is inf",
        mooncake(10**400): "timestamp is inf",
        mooncake(-1): r"timestamp is -1.0, but must be finite and at least 0",
        mooncake(99): "comes 0.001 s before the row above it",
        mooncake(100, 0): "input_length is 0, but must be from 1",
        mooncake(100, -512): "input_length is -512",
        mooncake(100, 1 << 31): "input_length is 2147483648",
        mooncake(100, output_length=0): "output_length is 0",
        mooncake(100, output_length=5.5): "output_length must be a whole number, not 5.5",
        mooncake(100, output_length=None): "output_length must be a whole number, not None",
        mooncake(100, output_length="5" * 1_000): "output_length must be .*[.][.][.]",
        mooncake(100, output_length=True): "output_length must be a whole number, not True",
        mooncake(100).replace("700", "7" * 5_000): "digits",
        mooncake(100, 1024, hash_ids=[1]): "has 1 hash_ids, but 1024 prompt tokens fill 2 blocks",
        mooncake(100, 1024, hash_ids=[1, 2, 3]): "has 3 hash_ids",
        mooncake(100, 1025, hash_ids=[1, 2]): "fill 3 blocks of 512",
        mooncake(100, hash_ids=7): "hash_ids must be a list, not 7",
        mooncake(100, hash_ids=[1, "2"]): "a hash id must be a whole number, not '2'",
        mooncake(100, hash_ids=[1, -2]): "a hash id is -2",
        mooncake(100, hash_ids=[1, 1]): "names one hash id twice",
    },
    "azure": {
        f"{LATE},374": "has 2 fields, but the header has 3",
        f"{LATE},374,44,": "has 4 fields, but the header has 3",
        LATE[:8]: "has 1 fields",
        "": "is blank",
        f"{LATE},374,": "GeneratedTokens is '', not a whole number",
        f"{LATE},374,nan": "GeneratedTokens is 'nan', not a whole number",
        f"{LATE},3.5,44": "ContextTokens is '3.5', not a whole number",
        f"{LATE},1_000,44": "ContextTokens is '1_000', not a whole number",
        f"{LATE},٣,44": "ContextTokens is '٣', not a whole number",
        f"{LATE},{'9' * 30},44": "not a whole number",
        f"{LATE},0,44": "ContextTokens is 0, but must be from 1",
        f"{LATE},-5,44": "ContextTokens is -5",
        f"{LATE},{1 << 31},44": "ContextTokens is 2147483648",
        "2023-13-16 18:15:47,374,44": "TIMESTAMP is '2023-13-16 18:15:47', no date and time",
        ",374,44": "TIMESTAMP is '', no date",
        AZURE: "TIMESTAMP is 'TIMESTAMP', no date",  # two files put together
        "2023-11-16 18:15:45.680590,374,44": "comes 1 s before the row above it",
        f'{LATE},"374,44': "unexpected end of data",  # a stray quote takes no further line with it
        f"{LATE},374\0,44": r"'374\\x00', not a whole number",
    },
    "vidur": {
        "3772,54,3826": "has 3 fields, but the header has 4",
        "3772,0,3772,1": "num_decode_tokens is 0",
        "3772,54,382,69.85": "says 382 tokens in all, but 3772 and 54",
        "3772,54,,69.85": "num_total_tokens is ''",
        "NaN,54,3826,69.85": "num_prefill_tokens is 'NaN', not a whole number",
    },
}


@pytest.mark.parametrize(
    "name, line", [(name, line) for name, lines in BAD.items() for line in lines]
)
def test_a_bad_line_is_reported_with_its_number_and_skipped_or_refused(write, name, line):
    lines = [*HEADER[name], GOOD[name][0], line, GOOD[name][1]]
    where = len(HEADER[name]) + 2
    path = write(lines)
    requests, reported, trace = read(path)
    assert plain(requests) == EXPECTED[name]
    assert trace.num_skipped == 1 and "1 malformed rows skipped" in trace.summary()
    [text] = reported
    assert text.startswith(f"{path}, line {where}: ") and len(text) < 400
    with pytest.raises(MalformedRow, match=f"line {where}: .*{BAD[name][line]}"):
        list(open_trace(path, strict=True))


def test_bytes_that_are_no_text_spoil_their_own_line(write, tmp_path):
    path = write([AZURE, *GOOD["azure"]])
    path.write_bytes(path.read_bytes().replace(b"374", b"37\xff"))
    requests, [text], _ = read(path)
    assert len(requests) == 1 and "line 2" in text


def test_the_first_good_row_sets_the_clock(write):
    requests, _, _ = read(write([mooncake(-5), mooncake(3_000), mooncake(4_500)]))
    assert [r.arrival_time for r in requests] == [0.0, 1.5]


def test_bad_lines_before_the_header_are_bad_lines(write):
    path = write(["# Azure, 2023", "", AZURE, *GOOD["azure"]])
    requests, reported, _ = read(path)
    assert plain(requests) == EXPECTED["azure"] and len(reported) == 2
    assert f"line 1: is no header with {', '.join(AZURE.split(','))}" in reported[0]
    with pytest.raises(MalformedRow, match="line 1"):
        list(open_trace(path, strict=True))


def test_many_bad_lines_are_counted_and_the_first_reported(write):
    lines = [GOOD["mooncake"][0], *["{"] * (NUM_REPORTS + 5)]
    _, reported, trace = read(write(lines))
    assert trace.num_skipped == NUM_REPORTS + 5 and len(reported) == NUM_REPORTS + 1
    assert reported[-1] == trace.summary() and f"{NUM_REPORTS + 5} malformed" in reported[-1]


def test_by_default_a_bad_line_is_a_warning(write):
    path = write([GOOD["mooncake"][0], "{"])
    with pytest.warns(UserWarning, match="line 2: is no JSON"):
        list(open_trace(path))
    with warnings.catch_warnings(action="error"):
        list(open_trace(write(GOOD["mooncake"])))


# -- files that are none ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(GOOD["azure"]),  # a header missing
        "\n".join(GOOD["vidur"]),
        AZURE.replace("Context", "Prompt"),
        '{"prompt": "hello"}',
        "\n\n\n",
        "# a comment\n" * FIRST_LINES + AZURE,
        "\0\1\2",
    ],
)
def test_a_file_of_no_known_format_is_refused_with_those_known(write, text):
    with pytest.raises(ValueError, match=r"line 1: .*mooncake: timestamp, .*azure: .*vidur: "):
        open_trace(write(text))


def test_an_empty_file_and_none(write, tmp_path):
    with pytest.raises(ValueError, match="is empty"):
        open_trace(write(""))
    with pytest.raises(FileNotFoundError):
        open_trace(tmp_path / "nothing")


# -- any file -----------------------------------------------------------------------------------

rows = st.tuples(st.integers(0, 10_000), st.integers(1, 3_000), st.integers(1, 900))


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=20), st.sampled_from(sorted(GOOD)), st.data())
def test_what_is_written_is_read_and_damage_stays_where_it_is(tmp_path_factory, rows, name, data):
    rows.sort()
    if name == "mooncake":
        lines = [mooncake(time, prompt, output) for time, prompt, output in rows]
    elif name == "azure":
        lines = [f"2023-11-16 18:{t // 60 % 60:02}:{t % 60:02},{p},{o}" for t, p, o in rows]
        lines.sort()  # the hour is over after 3,600 s
    else:
        lines = [f"{p},{o},{p + o},1" for _, p, o in rows]
    bad = data.draw(st.sampled_from(sorted(BAD[name])).filter(lambda line: "\0" not in line))
    where = data.draw(st.integers(1, len(lines)))  # behind the first good one
    path = tmp_path_factory.mktemp("trace") / "trace"

    def write(lines):
        path.write_text("".join(line + "\n" for line in HEADER[name] + lines), encoding="utf-8")

    write(lines)
    good, reported, _ = read(path, strict=True)
    assert len(good) == len(rows) and reported == []
    assert [r.arrival_time for r in good] == sorted(r.arrival_time for r in good)
    if name != "azure":
        assert [(r.num_prompt_tokens, r.max_tokens) for r in good] == [(p, o) for _, p, o in rows]
    if "row above" not in BAD[name][bad]:
        write([*lines[:where], bad, *lines[where:]])
        kept, reported, _ = read(path)
        assert plain(kept) == plain(good) and len(reported) == 1
