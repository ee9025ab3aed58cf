"""`python -m minikv check PATH`: what a learner's notebook gets right, exercise by exercise.

The answers are merged into the exercise as shipped (submission.py), in a temporary folder, and run
under nbval with limits of time and memory on each cell. An answer that ends the kernel costs the
others no verdict: they run again without it. PATH may be a number: `check 01` is `work/01_*.ipynb`.
What an answer prints does not count (nbval_print.py). The exit status is 0 when every coded
exercise passes. Nothing is sent anywhere.

`--audit` checks the checks instead: see audit.py.
"""

import copy
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nbformat

from minikv.classroom import work
from minikv.classroom.cells import exercise_of, exercise_order, role_of
from minikv.classroom.files import to_bytes
from minikv.classroom.nbval_run import run_nbval
from minikv.classroom.source import pristine_exercise
from minikv.classroom.submission import merge, read_submission

PASSED, WRITTEN = work.PASSED, work.WRITTEN
NOT_YET, WRONG = "not yet done", "not right yet"
NOT_RUN = "not checked"
CELL_SECONDS = 60
MAX_MESSAGE = 1500


@dataclass
class Verdict:
    """One exercise: its status, and what to tell the learner."""

    exercise: str
    status: str
    message: str = ""
    coded: bool = True  # else written: a person reads it


def check_notebook(path, root, cell_seconds=CELL_SECONDS):
    """(chapter's name, [Verdict], [what else went wrong]) of a learner's notebook."""
    cells, metadata = read_submission(path)
    name = work.chapter_of(path, metadata, root)
    shipped = pristine_exercise(root, name)
    merged = merge(shipped, cells)
    work.require_exercise(path, cells, shipped, root, name)
    with tempfile.TemporaryDirectory(prefix="minikv-check-") as folder:
        file = Path(folder, f"{name}.ipynb")
        results = _results(merged, shipped, file, root, cell_seconds)
    return name, _verdicts(merged, results), _other_failures(merged, results)


def _results(merged, shipped, file, root, cell_seconds):
    """{cell id: result}. Where a cell ends the kernel, the rest runs again without its answer."""
    notebook, kept = merged.notebook, {}
    while True:
        file.write_bytes(to_bytes(_quiet(notebook)))
        results = run_nbval(file, root, compare="tagged", cell_seconds=cell_seconds)
        ran = [c for c in notebook.cells if results.get(c.id, {}).get("kind") != "not run"]
        stopped = [c for c in ran if c.cell_type == "code"][-1:]
        without = _without(stopped[0], notebook, shipped) if len(ran) < len(notebook.cells) else []
        if not without or without & kept.keys():
            return results | kept
        kept |= {cell_id: results[cell_id] for cell_id in without if cell_id in results}
        notebook = copy.copy(notebook)
        originals = {cell.id: cell for cell in shipped.cells}
        notebook.cells = [
            originals.get(c.id) if c.id in without else c
            for c in notebook.cells
            if c.id not in without or c.id in originals
        ]


def _without(stopped, notebook, shipped):
    """Ids of what a cell that ended the kernel belongs to: its exercise, or itself alone."""
    if stopped.id.startswith("extra-"):
        return {stopped.id}
    exercise = exercise_of(stopped)
    return {c.id for c in notebook.cells if exercise and exercise_of(c) == exercise}


def _quiet(notebook):
    """The notebook to run: a first cell keeps apart what is printed by others than the checks."""
    parts = {"check": [], "own": []}
    for cell in notebook.cells:
        if role_of(cell) == "check":
            parts["check"].append(cell.source)
        elif role_of(cell) == "answer" or cell.id.startswith("extra-"):
            parts["own"].append(cell.source)
    source = "from minikv.classroom.nbval_print import install\n\n"
    source += f"install({parts['check']!r}, {parts['own']!r})"
    notebook = copy.copy(notebook)
    notebook.cells = [nbformat.v4.new_code_cell(source, id="keep-prints-apart"), *notebook.cells]
    return notebook


def _verdicts(merged, results):
    """One verdict for each exercise, in order."""
    exercises = {}
    for cell in merged.notebook.cells:
        if role_of(cell):
            exercises.setdefault(exercise_of(cell), []).append(cell)
    return [
        _verdict(exercise, exercises[exercise], merged, results)
        for exercise in sorted(exercises, key=exercise_order)
    ]


def _verdict(exercise, cells, merged, results):
    written = [cell for cell in cells if role_of(cell) == "written"]
    checks = [cell for cell in cells if role_of(cell) == "check"]
    if written and not checks:
        done = all(cell.id in merged.written for cell in written)
        message = "answered; a person reads it" if done else "not written yet; a sentence at least"
        return Verdict(exercise, WRITTEN if done else NOT_YET, message, coded=False)
    for cell in cells:
        if cell.id in merged.turned:
            kind = merged.turned[cell.id].capitalize()
            message = f"its answer cell is {kind} now; make it Code again (in JupyterLab: Esc, Y)"
            return Verdict(exercise, NOT_YET, message)
        if cell.id in merged.missing:
            message = f"its answer cell is gone; python -m minikv reset brings {exercise} back"
            return Verdict(exercise, NOT_YET, message)
    for cell in cells:
        result = results.get(cell.id)  # a written answer beside a check has none
        if result and result["outcome"] != "passed":
            verdict = _failed(exercise, result, merged.overwritten)
            if verdict.status == NOT_YET and not verdict.message:
                passed = [c for c in checks if results.get(c.id, {}).get("outcome") == "passed"]
                if passed:
                    verdict.message = f"{len(passed)} of its {len(checks)} parts passed"
            return verdict
    return Verdict(exercise, PASSED)


def _failed(exercise, result, overwritten=()):
    message, ename = result["message"].strip(), result.get("ename", "")
    if ename == "NotImplementedError" and message.startswith("Exercise "):
        if message.startswith(f"Exercise {exercise}:"):
            return Verdict(exercise, NOT_YET)
        return Verdict(exercise, NOT_YET, f"needs another exercise first: {message}")
    if ename == "SystemExit":
        message = "called exit(); a notebook's cell must not"
    elif ename and ename != "AssertionError":
        # A syntax error names the kernel's temporary file; the line is what helps.
        message = re.sub(r" \(\S+\.py, line (\d+)\)$", r" (line \1)", message)
        where = f"\n({result['where']})" if result.get("where") else ""
        message = f"{ename}: {message}{where}"
        if overwritten:
            names = ", ".join(sorted(overwritten))
            message += f"\nThe checks may need the name {names}; your notebook gives it a new value"
    elif result["kind"] == "timeout":
        message += "; does a loop never end?"
    elif result["kind"] == "not run":
        return Verdict(exercise, NOT_RUN, "the kernel had stopped before it")
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + " ..."
    return Verdict(exercise, WRONG, message or "a check failed without a message")


def _other_failures(merged, results):
    """Failures outside the exercises: the shipped cells around them."""
    failures = []
    for cell in merged.notebook.cells:
        result = results.get(cell.id)
        if result and result["outcome"] != "passed" and result["kind"] != "not run":
            extra = cell.id.startswith("extra-")
            if role_of(cell) is None and (
                not extra or result["kind"] in ("died", "memory", "printed")
            ):
                what = "a cell of your own" if extra else f"the notebook's cell {cell.id!r}"
                error = f"{result.get('ename', '')} {result['message']}".strip()
                failures.append(f"{what} failed: {error}")
    return failures


def report(path, name, verdicts, others):
    """Prints the verdicts; returns whether every coded exercise passes."""
    print(f"{path} (chapter {name.split('_')[0]})\n")
    for verdict in verdicts:
        first, *rest = (verdict.message or "").splitlines() or [""]
        print(f"  {verdict.exercise:<5} {verdict.status:<14} {first}".rstrip())
        for line in rest:
            print(f"{'':23}{line}".rstrip())
    for text in others:
        print(f"\n  {text}")
    print(f"\n{work.tally((verdict.coded, verdict.status) for verdict in verdicts)}")
    return all(v.status == PASSED for v in verdicts if v.coded) and not others
