"""Numbers are numbers, whoever made them: Python, numpy or torch."""

import dataclasses
import math
import numbers as kinds
import sys
from collections import deque
from collections.abc import Iterator, KeysView, ValuesView
from itertools import islice

MOST_ITEMS = 100_000  # of an iterator
LISTED = (range, deque, KeysView, ValuesView, Iterator)


def plain(value):
    """`value` in Python's own types: numpy's and torch's numbers become int, float and bool, their
    arrays nested lists; ranges, deques and iterators become lists. Deep inside, too."""
    if isinstance(value, bool | int | float | str | bytes | None):
        return value if type(value) in (bool, int, float, str, bytes) else _simple(value)
    if isinstance(value, dict):
        return {plain(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        parts = map(plain, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return {plain(part) for part in value}
    if isinstance(value, type):
        return value
    if callable(getattr(value, "tolist", None)):  # an array, a tensor, a number of theirs
        return plain(value.detach().tolist() if hasattr(value, "detach") else value.tolist())
    if isinstance(value, LISTED):
        return [plain(part) for part in islice(value, MOST_ITEMS)]
    if hasattr(value, "__index__"):
        return value.__index__()
    return value


def _simple(value):
    """An int of a class of its own, or numpy's float64, which is a float, as the plain one."""
    for kind in (bool, int, float, str, bytes):
        if isinstance(value, kind):
            return kind(value)
    return value


def number(value):
    """`value` as a float; NaN if it is no number."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def list_of_numbers(value, said, length=None):
    """`value`, a sequence of (`length`) finite numbers, as a list; else AssertionError: `said`."""
    value = plain(value)
    try:
        found = [math.nan] if isinstance(value, str) else [number(part) for part in value]
    except TypeError:
        found = [math.nan]
    right = length in (None, len(found)) and all(map(math.isfinite, found))
    assert right, f"{said}, not {value!r:.80}"
    return found


def numbers(value, names, function):
    """`value`, a sequence of as many finite numbers as there are names, as {name: number}."""
    said = f"{function} must return {len(names)} numbers, ({', '.join(names)})"
    if len(names) == 1:
        said = f"{function} must return one number"
        value = value if hasattr(plain(value), "__len__") else [value]
    return dict(zip(names, list_of_numbers(value, said, len(names)), strict=True))


def _is_array(value):
    return hasattr(value, "shape") and hasattr(value, "dtype")


def same(one, other, tolerance=1e-9):
    """Equal up to rounding: numbers, nested lists, tensors, sets, texts.

    Tensors of fewer than 64 bits are compared to 1e-4; NaN there equals NaN, as a slip may give it.
    """
    if _is_array(one) or _is_array(other):
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(one, torch.Tensor) | isinstance(other, torch.Tensor):
            return same(plain(one), plain(other), tolerance)
        try:
            one, other = torch.as_tensor(one), torch.as_tensor(other)
        except (TypeError, ValueError, RuntimeError):
            return False
        if one.shape != other.shape:
            return False
        if torch.bool in (one.dtype, other.dtype):
            return one.dtype == other.dtype and one.equal(other)
        limit = tolerance if torch.float64 in (one.dtype, other.dtype) else max(tolerance, 1e-4)
        one, other = one.detach().double(), other.detach().double()
        return torch.allclose(one, other, rtol=limit, atol=limit, equal_nan=True)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same(*pair, tolerance) for pair in pairs)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k], tolerance) for k in one)
    if isinstance(one, kinds.Real) and isinstance(other, kinds.Real):
        one, other = float(one), float(other)
        return one == other or abs(one - other) <= tolerance * max(1, abs(one), abs(other))
    return bool(one == other)


def text(value):
    """`value` for a message: all of a small one, the beginning of a large one."""
    if _is_array(value):
        return _text_of_array(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, bool) or not isinstance(value, kinds.Real):
        return f"{value!r:.200}"
    if not math.isfinite(value):
        return str(float(value))
    return f"{value:,.0f}" if value == round(value) else f"{value:,.6g}"


def _text_of_array(value):
    rows = plain(value)
    if len(value.shape) == 2 and "bool" in str(value.dtype):
        return "\n" + "\n".join("  " + " ".join(".x"[seen] for seen in row) for row in rows)
    if not value.shape:
        return text(rows)
    flat = plain(value.reshape(-1))
    more = f", ... {len(flat)} numbers" if len(flat) > 8 else ""
    return f"[{', '.join(f'{part:.4g}' for part in flat[:8])}{more}]"


class Snapshot:
    """What a value held when this was made; `==` says whether another time's is the same.

    Lists, dictionaries, tuples, sets, arrays and dataclasses are followed; other objects (a
    session, a manager) are only themselves, however they change inside.
    """

    def __init__(self, value):
        self.parts = _parts(value)

    def __eq__(self, other):
        return _equal(self.parts, other.parts)

    __hash__ = None


def snapshot(value):
    return Snapshot(value)


def _parts(value):
    if _is_array(value):
        return value.detach().clone() if hasattr(value, "detach") else value.copy()
    if isinstance(value, dict):
        return [type(value), *([_parts(key), _parts(part)] for key, part in value.items())]
    if isinstance(value, list | tuple | deque):
        return [type(value), *map(_parts, value)]
    if isinstance(value, set):
        return [set, set(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value), *(_parts(getattr(value, f.name)) for f in dataclasses.fields(value))]
    return value


def _equal(one, other):
    if _is_array(one) and _is_array(other):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is other or (type(one) is type(other) and one == other)
