"""`python -m minikv build`: notebooks from their text sources (see classroom/build.py)."""

import argparse
import sys
from pathlib import Path

from minikv.classroom.build import build_chapter, changed_modules, check_course, stored_notebook
from minikv.classroom.files import CourseError, chapter_names, course_root, find_chapter


def _report(root, names):
    """Recorded seconds of each chapter, and a note where the package has moved on since."""
    total = 0.0
    for name in names:
        for kind in ("notebooks", "solutions"):
            stored = stored_notebook(root / kind / f"{name}.ipynb")
            if stored is None:
                continue
            seconds = stored.metadata.get("minikv", {}).get("seconds", 0.0)
            total += seconds
            changed = changed_modules(root, stored)
            note = f"  (built before {', '.join(changed)} changed)" if changed else ""
            print(f"{seconds:7.1f} s  {kind}/{name}{note}")
    print(f"{total:7.1f} s  in all")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m minikv build",
        description="Build and execute notebooks and exercises from their text sources.",
    )
    parser.add_argument("chapters", nargs="*", metavar="NN", help="chapters; all if none is named")
    parser.add_argument("--check", action="store_true", help="compare and lint; execute nothing")
    parser.add_argument("--force", action="store_true", help="execute even what has not changed")
    parser.add_argument("--root", type=Path, help="the course's folder (default: this one)")
    args = parser.parse_args(argv)
    try:
        root = course_root(args.root)
        names = chapter_names(root)
        if args.chapters:
            names = sorted({find_chapter(names, wanted) for wanted in args.chapters})
        if args.check:
            return _main_check(root, names, bool(args.chapters))
        for name in names:
            changed = build_chapter(root, name, args.force)
            what = ", ".join(str(path.relative_to(root)) for path in changed) or "nothing changed"
            print(f"{name}: {what}")
    except CourseError as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    return 0


def _main_check(root, names, some):
    problems = check_course(root)
    if some:
        # A problem starts with its file's name, which holds the chapter's.
        problems = [line for line in problems if any(name in line.split(":")[0] for name in names)]
    _report(root, names)
    for problem in problems:
        print(f"  {problem}")
    print(f"{_count(problems, 'problem')} in {_count(names, 'chapter')}")
    return 1 if problems else 0


def _count(things, noun):
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
