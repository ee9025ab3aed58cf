"""From a text source to a notebook: the conventions that an author writes by hand.

A source is a jupytext "percent" file without any header:

    # %% [markdown]
    # # Chapter 1: one token at a time

    # %% cache-bytes
    print(2 * 30 * 3 * 64 * 2)

* Every code cell has a title, and the title is its id (letters, digits, `-` and `_`, at most 64).
  A Markdown cell's id is a hash of its text. So an insertion renames nothing.
* Any metadata may follow the title, nested too: `# %% plot tags=["nbval-ignore-output"]`. Tags with
  a meaning here: `raises-exception` (the error is meant), `nbval-ignore-output` (the output differs
  from run to run, say a time), `solution` (the cell is left out of the exercises), `own-output` (it
  shows the learner's own answer: the exercise has the cell, without the solution's output).

In `solutions/src`, a title says what a cell is; `2-1` is exercise 2.1, and a suffix (`ex-2-1-b`)
allows several cells of one kind:

    # %% ex-2-1
    def kv_bytes(spec):
        "Bytes per token."
        ### BEGIN SOLUTION
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.bytes_per_value
        ### END SOLUTION

    # %% check-2-1 points=2
    ...                      # raises AssertionError naming the misconception; prints its values

    # %% [markdown] written-2-6 points=2
    # The whole text of this cell, model answer and rubric, is replaced in the exercise.

`points` is 1 unless given. Answers, checks and written answers get nbgrader's metadata (schema 3).
Each solution stands inside a function, so that in the exercise as shipped only its checks fail.
"""

import ast
import copy
import re
from pathlib import Path

import nbformat

from minikv.classroom.cells import (
    CELL_ID,
    ROLES,
    exercise_of,
    exercise_order,
    nbgrader_metadata,
    role_of,
)
from minikv.classroom.files import (
    NOTEBOOK_METADATA,
    CourseError,
    checks_hash,
    digest,
    outputs_hash,
    read_notebook,
)
from minikv.classroom.slides import set_slides

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
# What jupytext adds for its own round trip; nothing of it belongs in a built notebook.
JUPYTEXT_KEYS = ("title", "lines_to_next_cell", "lines_to_end_of_cell_marker", "cell_depth")


def read_source(path):
    """The notebook of one source: ids and metadata as they will be built, nothing executed."""
    import jupytext  # only authors have it; a learner's `check` does without

    path = Path(path)
    parsed = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    notebook = nbformat.v4.new_notebook(metadata=copy.deepcopy(NOTEBOOK_METADATA))
    notebook.nbformat_minor = 5
    problems = []
    for number, cell in enumerate(parsed.cells, 1):
        where = f"{path.name}, cell {number} ({_first_line(cell.source)})"
        title = cell.metadata.get("title")
        cell.id = title or _markdown_id(cell)
        if cell.cell_type == "code" and not title:
            problems.append(f"{where}: a code cell needs a title after `# %%`; it becomes its id")
        elif not CELL_ID.fullmatch(cell.id):
            problems.append(
                f"{where}: title {cell.id!r} is not an id; use 1 to 64 letters, digits, - and _"
            )
        problems += [f"{where}: {text}" for text in _set_metadata(cell, path)]
        notebook.cells.append(cell)
    problems += _duplicates(notebook, path) + _exercise_problems(notebook, path)
    if problems:
        raise CourseError("\n".join(problems))
    if path.parent.parent.name == "notebooks":
        set_slides(notebook)
    for cell in notebook.cells:
        for key in JUPYTEXT_KEYS:
            cell.metadata.pop(key, None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def _first_line(text):
    return (text.strip().splitlines() or ["empty"])[0][:40]


def _markdown_id(cell):
    return f"md-{digest(cell.source)}"


def _duplicates(notebook, path):
    first, problems = {}, []
    for number, cell in enumerate(notebook.cells, 1):
        if cell.id in first:
            what = "title" if cell.cell_type == "code" else "text"
            problems.append(
                f"{path.name}: cells {first[cell.id]} and {number} have the same {what} "
                f"({_first_line(cell.source) if what == 'text' else cell.id}); ids must differ"
            )
        first.setdefault(cell.id, number)
    return problems


def _set_metadata(cell, path):
    """Expands the short form into nbgrader's metadata, in place; returns what is wrong with it."""
    role, problems = role_of(cell), []
    tags = set(cell.metadata.get("tags", []))
    points = cell.metadata.pop("points", None)
    if role != "answer" and BEGIN in cell.source:
        problems.append(f"{BEGIN} stands in a cell whose title is not ex-CHAPTER-NUMBER")
    for tag in tags & set(ROLES.values()) - {role}:
        problems.append(f"tag {tag!r} does not fit its title {cell.id!r}")
    if role is None or role == "answer":
        if points is not None:
            problems.append("points belong to a check or a written answer")
        if role is None:
            return problems
    if points is None and role != "answer":
        points = 1
    if points is not None and (not isinstance(points, int | float) or points <= 0):
        problems.append(f"points={points!r} must be a number above 0")
        points = 1
    if (cell.cell_type == "markdown") != (role == "written"):
        problems.append(f"a cell {cell.id!r} must be {'Markdown' if role == 'written' else 'code'}")
    number = path.stem.split("_")[0]
    if path.parent.parent.name != "solutions":
        problems.append(f"exercise cells like {cell.id!r} belong in solutions/src")
    elif number.isdecimal() and int(exercise_of(cell).split(".")[0]) != int(number):
        problems.append(f"title {cell.id!r} names another chapter than the file {path.name}")
    if role == "check":
        cell.metadata["tags"] = sorted(tags | {"nbval-check-output"})
    cell.metadata["nbgrader"] = nbgrader_metadata(cell, role, points)
    return problems


def _exercise_problems(notebook, path):
    """Answers and checks come in pairs; each solution can be cut out and leaves valid Python."""
    cells = {"answer": {}, "check": {}}
    problems = []
    for cell in notebook.cells:
        if role_of(cell) in cells:
            cells[role_of(cell)].setdefault(exercise_of(cell), cell)
        if role_of(cell) == "answer":
            try:
                stub(cell)
            except CourseError as error:
                problems.append(f"{path.name}, cell {cell.id!r}: {error}")
    for exercise in sorted(cells["answer"].keys() ^ cells["check"].keys(), key=exercise_order):
        lacking = "check" if exercise in cells["answer"] else "ex"
        title = f"{lacking}-{exercise.replace('.', '-')}"
        problems.append(f"{path.name}: exercise {exercise} has no cell {title!r}")
    return problems


def stub(cell):
    """The source of an answer cell as the learner gets it: each solution becomes a raise."""
    lines, kept, inside = cell.source.splitlines(), [], False
    found = 0
    for line in lines:
        if BEGIN in line or END in line:
            if inside != (END in line):
                raise CourseError(f"{BEGIN} and {END} do not alternate, at {line.strip()!r}")
            inside = not inside
            if inside:
                found += 1
                indent = line[: len(line) - len(line.lstrip())]
                if not indent:
                    raise CourseError(
                        f"{BEGIN} stands outside a function; put the solution into one, so that "
                        "as shipped only the exercise's checks fail"
                    )
                function = _enclosing_function(kept, len(indent))
                kept.append(
                    f'{indent}raise NotImplementedError("Exercise {exercise_of(cell)}: '
                    f'write {function}")'
                )
        elif not inside:
            kept.append(line)
    if inside or not found:
        raise CourseError(f"{END if inside else BEGIN} is missing")
    source = "\n".join(kept)
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise CourseError(f"without its solution it is not valid Python: {error}") from error
    return source


def _enclosing_function(lines, indent):
    for line in reversed(lines):
        match = re.match(r"(\s*)(?:async )?def (\w+)", line)
        if match and len(match[1]) < indent:
            return match[2]
    raise CourseError(f"no function stands above {BEGIN}")


def exercise_from(solution):
    """The exercise of an executed solution: stubs, the checks with their expected outputs."""
    notebook = copy.deepcopy(solution)
    notebook.cells = [c for c in notebook.cells if "solution" not in c.metadata.get("tags", [])]
    for cell in notebook.cells:
        role = role_of(cell)
        if role == "answer":
            cell.source = stub(cell)
        if role == "answer" or "own-output" in cell.metadata.get("tags", []):
            cell.outputs, cell.execution_count = [], None
        if role == "written":
            cell.source = f"*Exercise {exercise_of(cell)}: write your answer here.*"
        if role:
            # JupyterLab honours these two: no accident removes a check or an answer cell.
            cell.metadata["deletable"] = False
            if role == "check":
                cell.metadata["editable"] = False
            points = cell.metadata["nbgrader"].get("points")
            cell.metadata["nbgrader"] = nbgrader_metadata(cell, role, points)
    record = solution.metadata["minikv"]
    notebook.metadata["minikv"] = {
        "chapter": record["chapter"],
        "source_hash": record["source_hash"],
        "checks_hash": checks_hash(notebook),
    }
    return notebook


def pristine_exercise(root, name):
    """The exercise as shipped. A learner may have worked in, and saved over, `exercises/` itself.

    So it is made from the solution. Where that has been saved over too, or is kept from learners, a
    hash tells whether the checks and expected outputs in `exercises/` are still the shipped ones.
    """
    solution_path = Path(root, "solutions", f"{name}.ipynb")
    if solution_path.exists():
        solution = read_notebook(solution_path)
        if solution.metadata.get("minikv", {}).get("outputs_hash") == outputs_hash(solution):
            return exercise_from(solution)
    path = Path(root, "exercises", f"{name}.ipynb")
    if not path.exists():
        raise CourseError(f"chapter {name} has no exercises: {path} does not exist")
    notebook = read_notebook(path)
    if notebook.metadata.get("minikv", {}).get("checks_hash") != checks_hash(notebook):
        raise CourseError(
            f"{path} has been saved over, so that its expected outputs are lost; get the file anew "
            "(for instance with git checkout) and work in a copy: python -m minikv start"
        )
    return notebook
