"""`python -m minikv start | reset | progress`: a learner's own copies (see classroom/work.py)."""

import argparse
import sys
from pathlib import Path

from minikv.classroom import work
from minikv.classroom.files import CourseError, course_root


def _run(name, description, argv, arguments, action):
    parser = argparse.ArgumentParser(prog=f"python -m minikv {name}", description=description)
    for flags, options in arguments:
        parser.add_argument(*flags, **options)
    parser.add_argument("--root", type=Path, help="the course's folder (default: this one)")
    args = parser.parse_args(argv)
    try:
        return action(course_root(args.root), args)
    except CourseError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


CHAPTER = (("chapter",), {"metavar": "NN", "help": "the chapter's number"})


def main_start(argv=None):
    def action(root, args):
        path, new = work.start(root, args.chapter)
        print(f"{path}" if new else f"{path} is there already; reset starts it over")
        return 0

    return _run("start", "Copy a chapter's exercises to work/.", argv, [CHAPTER], action)


def main_reset(argv=None):
    arguments = [
        CHAPTER,
        (("exercise",), {"nargs": "?", "help": "one exercise, as 2.1 (default: all of them)"}),
        (("--yes",), {"action": "store_true", "help": "do not ask"}),
    ]

    def action(root, args):
        what = f"exercise {args.exercise}" if args.exercise else "all exercises"
        if not args.yes and not _agreed(f"Restore {what} of chapter {args.chapter}? [y/N] "):
            print("nothing changed")
            return 1
        print(
            f"restored {what}; what was there is in {work.reset(root, args.chapter, args.exercise)}"
        )
        return 0

    return _run("reset", "Restore exercises in work/ as shipped.", argv, arguments, action)


def _agreed(question):
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # no one there to ask
        return False


def main_progress(argv=None):
    def action(root, args):
        print("\n".join(work.progress(root)))
        return 0

    return _run("progress", "Show what is done, chapter by chapter.", argv, [], action)
