"""What a cell is: its role in an exercise, told from its id, and what nbgrader is told of it."""

import hashlib
import re

CELL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
ROLE_ID = re.compile(r"(ex|check|written)-(\d+)-(\d+)(-[A-Za-z0-9_-]+)?")
ROLES = {"ex": "answer", "check": "check", "written": "written"}
NBGRADER_KEYS = {
    "schema_version", "grade", "solution", "locked", "task", "grade_id", "points", "checksum",
    "cell_type",
}  # fmt: skip


def role_of(cell):
    """`answer`, `check`, `written`, or None for a cell that belongs to no exercise."""
    match = ROLE_ID.fullmatch(cell.get("id") or "")
    return ROLES[match[1]] if match else None


def exercise_of(cell):
    """`2.1` for the cells of exercise 2.1, None for others."""
    match = ROLE_ID.fullmatch(cell.get("id") or "")
    return f"{int(match[2])}.{int(match[3])}" if match else None


def exercise_order(exercise):
    """A key that sorts `2.10` after `2.9`."""
    return [int(part) for part in exercise.split(".")]


def nbgrader_metadata(cell, role, points=None):
    """nbgrader's cell metadata, schema 3, with no other keys."""
    data = {
        "schema_version": 3,
        "grade": role in ("check", "written"),
        "solution": role in ("answer", "written"),
        "locked": role == "check",
        "task": False,
        "grade_id": cell.id,
        "cell_type": cell.cell_type,
    }
    if data["grade"]:
        data["points"] = points
    return {**data, "checksum": _nbgrader_checksum(cell.source, data)}


def _nbgrader_checksum(source, data):
    # The order is nbgrader's own, so that its validator finds the cells unchanged.
    parts = [source, data["cell_type"], data["grade"], data["solution"], data["locked"]]
    parts.append(data["grade_id"])
    if data["grade"]:
        parts.append(float(data["points"]))
    return hashlib.md5("".join(map(str, parts)).encode(), usedforsecurity=False).hexdigest()
