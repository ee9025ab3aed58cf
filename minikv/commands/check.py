"""`python -m minikv check`: what a notebook gets right (see classroom/check.py), or the checks'
own audit."""

import argparse
import math
import sys
from pathlib import Path

from minikv.classroom import audit, work
from minikv.classroom.check import CELL_SECONDS, check_notebook, report
from minikv.classroom.files import CourseError, course_root


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m minikv check",
        description="Check the exercises of a notebook, one by one.",
    )
    parser.add_argument(
        "path", nargs="?", help="a notebook, or a chapter's number for the one in work/"
    )
    parser.add_argument("--timeout", type=float, default=CELL_SECONDS, metavar="SECONDS",
                        help=f"limit for one cell (default {CELL_SECONDS})")  # fmt: skip
    parser.add_argument("--audit", action="store_true",
                        help="run tests/answers against the checks (for authors)")  # fmt: skip
    parser.add_argument("--root", type=Path, help="the course's folder (default: this one)")
    args = parser.parse_args(argv)
    if not 0 < args.timeout < math.inf:
        parser.error(f"--timeout {args.timeout:g} must be above 0 and finite")
    try:
        root = course_root(args.root)
        if args.audit:
            return audit.main(root, args.path)
        if args.path is None:
            parser.error("name a notebook, or a chapter's number")
        path = work.find_notebook(args.path, root)
        name, verdicts, others = check_notebook(path, root, args.timeout)
        work.record(root, path, name, {v.exercise: v.status for v in verdicts})
    except CourseError as error:
        print(f"check: {error}", file=sys.stderr)
        return 1
    return 0 if report(path, name, verdicts, others) else 1
