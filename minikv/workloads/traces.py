"""Public traces of real services, read as `Request`s: lengths and times, no tokens.

    trace = open_trace("mooncake_conversation_trace.jsonl")
    for request in trace:  # one line of the file in memory at a time
        ...
    print(trace.summary())

Formats, told by what stands in the file:

mooncake: JSONL with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id for
    each block of 512 prompt tokens (Qin et al., FAST'25, appendix; github.com/kvcache-ai/Mooncake).
    An id names its block and all before it, so the ids are keys of a prefix cache as they are. The
    last id may name a block that the prompt fills in part. Only full blocks can be shared, so a
    request gets the ids of its full blocks and no other.
azure: CSV with `TIMESTAMP` (a date and time), `ContextTokens`, `GeneratedTokens`
    (github.com/Azure/AzurePublicDataset).
vidur: CSV with `num_prefill_tokens` and `num_decode_tokens` (github.com/microsoft/vidur). It has no
    times: every request arrives at 0.
"""

import csv
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice

from minikv.kv_cache.base import cdiv
from minikv.request import Request, require_int, require_number

MOONCAKE_BLOCK_SIZE = 512  # tokens that a hash id stands for
MAX_TOKENS = 1 << 30  # of a prompt or an answer: more is a damaged number
FIRST_LINES = 100  # one of them must show the format
NUM_REPORTS = 10  # skipped rows that are reported one by one
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WHOLE = re.compile(r"\s*[+-]?\d{1,18}\s*", re.ASCII)


class MalformedRow(ValueError):
    """A line of a trace that is not a request."""


def open_trace(path, *, strict=False, report=warnings.warn) -> "Trace":
    """The trace in this file, whichever of the formats it has.

    strict: refuse a malformed row with MalformedRow instead of skipping it.
    report: called with a line of text for each of the first skipped rows, and at the file's end
        with how many they were in all.

    Raises ValueError for a file that shows no known format in its first lines, OSError for one
    that cannot be read.
    """
    first = None
    with _text(path) as file:
        for line in islice(file, FIRST_LINES):
            first = line if first is None else first
            for kind in FORMATS.values():
                if kind.is_beginning(line):
                    return Trace(path, kind, strict=strict, report=report)
    if first is None:
        raise ValueError(f"{path} is empty: a trace has at least a row")
    known = "; ".join(f"{name}: {', '.join(kind.columns)}" for name, kind in FORMATS.items())
    raise ValueError(
        f"{path}, line 1: {_short(first.rstrip())!r} begins no known format, nor does a line soon "
        f"after it. Known, with the fields that each must name: {known}"
    )


class Trace:
    """A file's requests in order of arrival; iterating again reads it again.

    A request's id is its format and its line, "azure-17". Its arrival_time is in seconds from the
    first good row. It has block_hashes where the format gives them; block_size says for blocks of
    how many tokens, and is None otherwise.

    num_requests, num_skipped: good and malformed rows of the last (or present) reading. A line is
    malformed if it is blank, no JSON or no row of the header's fields, if a field is missing, no
    number, zero, negative or beyond any limit, if it comes before the row above it, or if its hash
    ids are not one for each block of its prompt. A byte-order mark and CRLF change nothing. Where
    a file breaks off inside its last number, nobody can tell.
    """

    def __init__(self, path, kind, *, strict=False, report=warnings.warn):
        self.path, self.strict, self.report = path, strict, report
        self.format, self.block_size = kind.name, kind.block_size
        self.num_requests = self.num_skipped = 0
        self._kind = kind

    def __iter__(self) -> Iterator[Request]:
        self.num_requests = self.num_skipped = 0
        kind, header = self._kind, None
        first = last = None  # times of good rows
        with _text(self.path) as file:
            for number, line in enumerate(file, 1):
                try:
                    if not line.strip():
                        raise ValueError("is blank")
                    if kind.is_csv and header is None:
                        header = _header(kind, line)
                        continue
                    row = _csv_row(header, line) if kind.is_csv else _json_row(line)
                    time, num_prompt_tokens, max_tokens, hashes = kind.read(row)
                    if last is not None and time < last:
                        before_s = (last - time) / kind.ticks_per_s
                        raise ValueError(f"comes {before_s:g} s before the row above it")
                except KeyError as error:
                    self._skip(number, f"has no {error}")
                    continue
                except (ValueError, TypeError, OverflowError, RecursionError, csv.Error) as error:
                    self._skip(number, str(error))
                    continue
                first, last = time if first is None else first, time
                self.num_requests += 1
                yield Request(
                    f"{kind.name}-{number}",
                    num_prompt_tokens=num_prompt_tokens,
                    max_tokens=max_tokens,
                    arrival_time=(time - first) / kind.ticks_per_s,
                    block_hashes=hashes,
                )
        if self.num_skipped > NUM_REPORTS:
            self.report(self.summary())

    def _skip(self, number, reason):
        text = f"{self.path}, line {number}: {_short(reason)}"
        if self.strict:
            raise MalformedRow(text) from None
        self.num_skipped += 1
        if self.num_skipped <= NUM_REPORTS:
            self.report(f"{text}; skipped")

    def summary(self) -> str:
        """What the last reading found, in a line."""
        skipped = f"{self.num_skipped:,} malformed rows skipped" if self.num_skipped else "none bad"
        return f"{self.path} ({self.format}): {self.num_requests:,} requests, {skipped}"


# -- lines ----------------------------------------------------------------------------------------


def _text(path):
    """Bytes that are no UTF-8 become a sign that no field has: that row is malformed, not all."""
    return open(path, encoding="utf-8-sig", errors="replace")


def _short(text):
    return text if len(text) <= 200 else f"{text[:197]}..."


def _json_row(line):
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise ValueError(f"is {_short(repr(row))}, not an object with fields")
    return row


def _fields(line):
    """Each line by itself: a stray quote must not swallow the lines after it."""
    return [field.strip() for field in next(csv.reader([line.rstrip("\r\n")], strict=True), [])]


def _header(kind, line):
    if not kind.is_beginning(line):
        raise ValueError(f"is no header with {', '.join(kind.columns)}")
    return _fields(line)


def _csv_row(header, line):
    fields = _fields(line)
    if len(fields) != len(header):
        raise ValueError(f"has {len(fields)} fields, but the header has {len(header)}")
    return dict(zip(header, fields, strict=True))


def _count(name, text):
    """A field of a CSV as a number of tokens."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{name} is {text!r}, not a whole number of tokens")
    return require_int(name, int(text), at_least=1, at_most=MAX_TOKENS)


# -- rows: (time in ticks, prompt tokens, output tokens, hashes of full blocks or None) ------------


def _mooncake(row):
    time = require_number("timestamp", row["timestamp"], at_least=0)
    length, output_length, ids = row["input_length"], row["output_length"], row["hash_ids"]
    length = require_int("input_length", length, at_least=1, at_most=MAX_TOKENS)
    output_length = require_int("output_length", output_length, at_least=1, at_most=MAX_TOKENS)
    if not isinstance(ids, list):
        raise TypeError(f"hash_ids must be a list, not {ids!r}")
    if len(ids) != cdiv(length, MOONCAKE_BLOCK_SIZE):
        raise ValueError(
            f"has {len(ids)} hash_ids, but {length} prompt tokens fill "
            f"{cdiv(length, MOONCAKE_BLOCK_SIZE)} blocks of {MOONCAKE_BLOCK_SIZE}"
        )
    for each in [each for each in ids if type(each) is not int or each < 0]:
        require_int("a hash id", each, at_least=0)
    if len(set(ids)) < len(ids):
        raise ValueError("names one hash id twice, but each stands for another beginning")
    return time, length, output_length, ids[: length // MOONCAKE_BLOCK_SIZE]


def _azure(row):
    try:
        time = datetime.fromisoformat(row["TIMESTAMP"])
    except ValueError:
        raise ValueError(f"TIMESTAMP is {row['TIMESTAMP']!r}, no date and time") from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    prompt, output = (_count(name, row[name]) for name in ("ContextTokens", "GeneratedTokens"))
    return (time - _EPOCH) // timedelta(microseconds=1), prompt, output, None


def _vidur(row):
    prompt, output = (_count(name, row[name]) for name in FORMATS["vidur"].columns)
    total = _count("num_total_tokens", row.get("num_total_tokens", str(prompt + output)))
    if total != prompt + output:
        raise ValueError(f"says {total} tokens in all, but {prompt} and {output} are not that many")
    return 0, prompt, output, None


@dataclass(frozen=True)
class _Format:
    """columns: the fields that every row must have. read: a row's fields to a request's, its time
    in ticks, which a difference of two keeps exact."""

    name: str
    columns: tuple[str, ...]
    read: object
    ticks_per_s: int
    is_csv: bool = True
    block_size: int | None = None

    def is_beginning(self, line) -> bool:
        """Whether a file of this format may begin with this line, damaged ones left out."""
        try:
            return set(self.columns) <= set(_fields(line) if self.is_csv else _json_row(line))
        except (ValueError, RecursionError, csv.Error):
            return False


FORMATS = {
    kind.name: kind
    for kind in (
        _Format(
            "mooncake",
            ("timestamp", "input_length", "output_length", "hash_ids"),
            _mooncake,
            ticks_per_s=1_000,
            is_csv=False,
            block_size=MOONCAKE_BLOCK_SIZE,
        ),
        _Format("azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure, 1_000_000),
        _Format("vidur", ("num_prefill_tokens", "num_decode_tokens"), _vidur, 1),
    )
}
