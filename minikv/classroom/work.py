"""A learner's own copies: `start`, `reset` and `progress`.

Exercises are copied to `work/`, which git ignores, so that an update of the course never conflicts
with anyone's answers. A reset keeps what was there in `work/backup/`.
"""

import json
import re
import shutil
import sys
from datetime import datetime
from pathlib import Path

import nbformat

from minikv.classroom.cells import exercise_of, role_of
from minikv.classroom.files import (
    CourseError,
    digest,
    find_chapter,
    read_notebook,
    to_bytes,
    write_if_changed,
)
from minikv.classroom.source import pristine_exercise
from minikv.classroom.submission import found_cells, merge, read_submission

PASSED, WRITTEN = "passed", "written"  # what counts as done, coded or in words
WORK = "work"
BACKUP = "backup"  # in work/: what was there before a reset
RECORD = "progress.json"  # in work/: what the last check of each chapter said


def exercise_names(root):
    """Chapters with exercises, in order."""
    folders = (Path(root, "exercises"), Path(root, "solutions"))
    return sorted({path.stem for folder in folders for path in folder.glob("*.ipynb")})


def chapter_of(path, metadata, root):
    """Which chapter a learner's notebook belongs to: by its record, its name, its number."""
    names = exercise_names(root)
    record = metadata.get("minikv")
    recorded = record.get("chapter") if isinstance(record, dict) else None
    stem = Path(path).stem
    for name in (recorded, stem):
        if name in names:
            return name
    # `01_one_token (1).ipynb`, `01_one_token-Copy1.ipynb`
    found = [name for name in names if stem.startswith(name) or stem == name.split("_")[0]]
    if len(found) == 1:
        return found[0]
    raise CourseError(
        f"{path} belongs to no chapter with exercises; there are: {', '.join(names) or 'none'}"
    )


def require_exercise(path, cells, shipped, root, name):
    """Raises CourseError for a chapter's own notebook, which has no exercises to check."""
    exercises = {cell.id for cell in shipped.cells if role_of(cell)}
    if any({cell.cell_id, cell.grade_id} & exercises for cell in cells):
        return
    chapter = Path(root, "notebooks", f"{name}.ipynb")
    ids = {c.get("id") for c in read_notebook(chapter).cells} if chapter.is_file() else set()
    mine = sum(cell.cell_id in ids for cell in cells)
    if chapter.is_file() and (Path(path).resolve() == chapter.resolve() or 2 * mine > len(cells)):
        number = name.split("_")[0]
        raise CourseError(
            f"{path} is the chapter, not its exercises; python -m minikv start {number} copies "
            f"them to {WORK}/, and check {number} checks them there"
        )


def find_notebook(wanted, root):
    """A path as given; a number or a chapter's name is its copy in `work/`."""
    path = Path(wanted)
    if path.is_file() or (path.suffix == ".ipynb" and not path.is_dir()):
        return path
    if match := re.fullmatch(r"(\d+)[.-](\d+)\w*", str(wanted)):
        raise CourseError(
            f"{wanted} is an exercise; all of its chapter are checked at once: "
            f"python -m minikv check {int(match[1]):02d}"
        )
    try:
        name = find_chapter(exercise_names(root), wanted)
    except CourseError:
        if wanted and path.is_dir():
            raise CourseError(f"{path} is a folder; name a notebook in it") from None
        raise
    return _existing_copy(root, name)


def _copy_path(root, name):
    """Where a chapter's copy lies, or will, with nothing in its way."""
    path = Path(root, WORK, f"{name}.ipynb")
    for folder in (path.parent, path.parent / BACKUP):
        if folder.exists() and not folder.is_dir():
            raise CourseError(f"{folder} is not a folder; move it away and try again")
    if path.is_dir():
        raise CourseError(f"{path} is a folder; move it away and try again")
    return path


def _existing_copy(root, name):
    path = _copy_path(root, name)
    if not path.exists():
        number = name.split("_")[0]
        raise CourseError(f"{path} does not exist; python -m minikv start {number} makes it")
    return path


def record(root, path, name, statuses):
    """Remembers a check's verdicts for `progress`, if the notebook is the one in `work/`."""
    own = Path(root, WORK, f"{name}.ipynb")
    if Path(path).resolve() != own.resolve():
        return
    records = _records(root)
    records[name] = {"statuses": statuses, "modified": own.stat().st_mtime}
    data = json.dumps(records, indent=1, sort_keys=True) + "\n"
    try:
        write_if_changed(Path(root, WORK, RECORD), data.encode())
    except OSError as error:  # the verdicts are worth more than their record
        print(f"check: progress will not know of it: {error}", file=sys.stderr)


def _records(root):
    try:
        records = json.loads(Path(root, WORK, RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: the next check writes it anew
        return {}
    if not isinstance(records, dict):
        return {}
    return {name: entry for name, entry in records.items() if _is_record(entry)}


def _is_record(entry):
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("statuses"), dict)
        and isinstance(entry.get("modified"), int | float)
    )


def start(root, wanted):
    """Copies an exercise to `work/`; returns its path and whether it is new."""
    name = find_chapter(exercise_names(root), wanted)
    path = _copy_path(root, name)
    if path.exists():
        return path, False
    write_if_changed(path, to_bytes(pristine_exercise(root, name)))
    return path, True


def reset(root, wanted, exercise=None):
    """Restores one exercise, or all, in the copy in `work/`; returns the backup's path."""
    name = find_chapter(exercise_names(root), wanted)
    path, shipped = _existing_copy(root, name), pristine_exercise(root, name)
    fresh = shipped if exercise is None else _restored(path, shipped, exercise)
    backup = path.parent / BACKUP / f"{name}-{datetime.now():%Y%m%d-%H%M%S-%f}.ipynb"
    backup.parent.mkdir(exist_ok=True)
    shutil.copy2(path, backup)
    try:
        write_if_changed(path, to_bytes(fresh))
    except nbformat.ValidationError as error:
        raise CourseError(
            f"{path} is damaged beyond {exercise}: {str(error).splitlines()[0]}; reset all of it"
        ) from error
    return backup


def _restored(path, shipped, exercise):
    """The learner's notebook with the cells of one exercise as shipped, missing ones put back."""
    wanted = [cell for cell in shipped.cells if exercise_of(cell) == exercise]
    if not wanted:
        known = sorted({exercise_of(cell) for cell in shipped.cells} - {None})
        raise CourseError(f"there is no exercise {exercise!r}; there are: {', '.join(known)}")
    cells, _ = read_submission(path)  # says in plain words what is wrong with an unreadable file
    notebook = nbformat.reads(path.read_text(encoding="utf-8-sig"), as_version=4)
    places = found_cells(shipped, cells)  # as `check` finds them, with or without ids
    order = [cell.id for cell in shipped.cells]
    for cell in reversed(wanted):
        here = [i for i, name in enumerate(places) if name == cell.id]
        for i in reversed(here[1:]):  # the parts of a cell that was split
            del notebook.cells[i], places[i]
        if here:
            notebook.cells[here[0]] = cell
            continue
        # Behind the nearest shipped cell before it that is still there.
        before = order[: order.index(cell.id)]
        place = max((i + 1 for i, name in enumerate(places) if name in before), default=0)
        notebook.cells.insert(place, cell)
        places.insert(place, cell.id)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen = set()
    for number, cell in enumerate(notebook.cells):
        # Some editors drop ids, or double them with a copied cell.
        if cell.get("id", "") in seen | {""}:
            cell.id = f"cell-{number}-{digest(cell.source)}"
        seen.add(cell.id)
    return notebook


def tally(exercises):
    """The one count of `check` and `progress`. exercises: (whether coded, status) of each."""
    counts = {True: [0, 0], False: [0, 0]}  # whether coded -> [done, all]
    for coded, status in exercises:
        counts[coded][0] += status == (PASSED if coded else WRITTEN)
        counts[coded][1] += 1
    (passed, coded), (answered, written) = counts[True], counts[False]
    text = f"{passed} of {coded} coded exercises passed"
    return text + (f", {answered} of {written} written" if written else "")


def progress(root):
    """One line for each chapter with exercises."""
    records, lines = _records(root), []
    for name in exercise_names(root):
        path = Path(root, WORK, f"{name}.ipynb")
        state = _state(path, pristine_exercise(root, name), records.get(name, {}))
        lines.append(f"  {name:<24} {state}")
    return lines or ["  no exercises yet"]


def _state(path, shipped, entry):
    if not path.exists():
        return "not started"
    number = path.stem.split("_")[0]
    try:
        touched = _touched(path, shipped)
    except CourseError:
        return f"cannot be read; python -m minikv check {number} says why"
    if touched and not entry:
        return f"started; python -m minikv check {number} counts what is done"
    roles = {}
    for cell in shipped.cells:
        if role_of(cell):
            roles.setdefault(exercise_of(cell), set()).add(role_of(cell))
    statuses = entry.get("statuses", {})
    # What has been reset since the check counts no more.
    state = tally(
        ("check" in kinds, statuses.get(exercise) if exercise in touched else None)
        for exercise, kinds in roles.items()
    )
    edited = touched and path.stat().st_mtime != entry["modified"]
    return state + (", edited since the last check" if edited else "")


def _touched(path, shipped):
    """The exercises in which an answer is no longer as shipped."""
    merged = merge(shipped, read_submission(path)[0])
    pairs = zip((c for c in merged.notebook.cells if c.id in {s.id for s in shipped.cells}),
                shipped.cells, strict=True)  # fmt: skip
    return {
        exercise_of(cell)
        for mine, cell in pairs
        if role_of(cell) in ("answer", "written")
        and (mine.source != cell.source or cell.id in merged.missing)
    }
