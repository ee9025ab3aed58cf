"""`python -m minikv build [NN ...]`: text sources become executed notebooks and exercises.

    notebooks/src/NN_topic.py -> notebooks/NN_topic.ipynb                            executed
    solutions/src/NN_topic.py -> solutions/NN_topic.ipynb                            executed
                              -> exercises/NN_topic.ipynb    stubs, checks, expected outputs

How to write a source: the docstring of `minikv/classroom/source.py`. What `--check` asks of prose:
the docstring of `minikv/classroom/prose.py`.

A build executes a notebook only when its code cells, or a `minikv` module that it had loaded,
differ from the last time (`--force`: always); otherwise the stored outputs are kept, so that a file
changes only where something changed. A failing cell stops the build and leaves the file as it was.
"""

from pathlib import Path
from statistics import median

from minikv.classroom import arc, prose, shown
from minikv.classroom.cells import role_of
from minikv.classroom.files import (
    CourseError,
    chapter_names,
    outputs_hash,
    read_notebook,
    source_hash,
    to_bytes,
    write_if_changed,
)
from minikv.classroom.source import exercise_from, read_source

MAX_CODE_LINES = 40
MAX_COLUMNS = 90  # of code that a reader sees: more scrolls sideways on a laptop
MEDIAN_LINES = 8  # a chapter's median code cell is shorter
MAX_CELLS = 100
MAX_WORDS = 3600


def build_chapter(root, name, force=False):
    """Builds all files of one chapter, e.g. `01_one_token`; returns the paths that changed."""
    root = Path(root)
    if name not in chapter_names(root):
        raise CourseError(f"no source {name}.py in {root}/notebooks/src or {root}/solutions/src")
    built = {}
    for kind in ("notebooks", "solutions"):
        source = root / kind / "src" / f"{name}.py"
        if source.exists():
            notebook = _executed(root, kind, name, read_source(source), force)
            built[root / kind / f"{name}.ipynb"] = notebook
            if kind == "solutions":
                built[root / "exercises" / f"{name}.ipynb"] = exercise_from(notebook)
    return [path for path, notebook in built.items() if write_if_changed(path, to_bytes(notebook))]


def _executed(root, kind, name, notebook, force):
    from minikv.classroom.execute import execute, module_hashes

    stored = None if force else stored_notebook(root / kind / f"{name}.ipynb")
    if stored is not None and not _stale(root, notebook, stored):
        return with_outputs_of(notebook, stored)
    seconds, modules = execute(notebook, root, f"{kind}/{name}")
    notebook.metadata["minikv"] = {
        "chapter": name,
        "source_hash": source_hash(notebook),
        "outputs_hash": outputs_hash(notebook),
        "modules": module_hashes(root, modules),
        # JupyterLab would write 9.0 as 9, and so change the file.
        "seconds": int(seconds) if seconds == int(seconds) else seconds,
    }
    return notebook


def stored_notebook(path):
    """The notebook of an earlier build, or None where there is none that can be used."""
    try:
        return read_notebook(path) if path.exists() else None
    except CourseError:
        return None


def _stale(root, notebook, stored):
    """Why the stored outputs cannot be kept, or an empty string."""
    record = stored.metadata.get("minikv", {})
    if record.get("source_hash") != source_hash(notebook):
        return "its code has changed"
    if record.get("outputs_hash") != outputs_hash(stored):
        return "its outputs have been edited"
    changed = changed_modules(root, stored)
    return f"{', '.join(changed)} changed" if changed else ""


def changed_modules(root, stored):
    """The minikv modules that a built notebook used and that have been edited since."""
    from minikv.classroom.execute import module_hashes

    recorded = stored.metadata.get("minikv", {}).get("modules", {})
    now = module_hashes(root, recorded)
    return [module for module in recorded if recorded[module] != now[module]]


def with_outputs_of(notebook, stored):
    """`notebook` with the outputs and the record of an earlier build, cell by cell id."""
    cells = {cell.get("id"): cell for cell in stored.cells if cell.cell_type == "code"}
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.id in cells:
            cell.outputs = cells[cell.id].outputs
            cell.execution_count = cells[cell.id].execution_count
    notebook.metadata["minikv"] = stored.metadata.get("minikv", {})
    return notebook


# ---------------------------------------------------------------------------------------- --check


def check_course(root):
    """Everything that is wrong with the built course, as lines of text; executes nothing."""
    root = Path(root)
    problems = []
    names = chapter_names(root)
    for name in names:
        for kind in ("notebooks", "solutions"):
            if Path(root, kind, "src", f"{name}.py").exists():
                problems += check_notebook(root, kind, name)
    for kind in ("notebooks", "solutions", "exercises"):
        source_kind = "solutions" if kind == "exercises" else kind
        for path in sorted(Path(root, kind).glob("*.ipynb")):
            source = f"{source_kind}/src/{path.stem}.py"
            if not Path(root, source).exists():
                problems.append(f"{kind}/{path.name}: has no source {source}")
    return problems


def check_notebook(root, kind, name):
    """The problems of one built notebook (with kind `solutions`, also of its exercise)."""
    path = root / kind / f"{name}.ipynb"
    try:
        expected = read_source(root / kind / "src" / f"{name}.py")
        if not path.exists():
            raise CourseError(f"{kind}/{name}.ipynb has not been built")
        stored = read_notebook(path)
    except CourseError as error:
        return str(error).splitlines()
    problems = [*_differences(expected, stored), *_outputs(stored), *_sizes(stored)]
    problems += _names(stored, name) + _displayed(stored)
    if kind == "notebooks":
        problems += _chapter_sizes(stored) + prose.unsupported_numbers(stored)
    record = stored.metadata.get("minikv", {})
    if record.get("source_hash") != source_hash(expected):
        problems.append("its code has changed since it was executed")
    if record.get("outputs_hash") != outputs_hash(stored):
        problems.append("a stored output was edited by hand, or merged; build it anew")
    if not problems and to_bytes(with_outputs_of(expected, stored)) != path.read_bytes():
        problems.append("the file is not what the build writes (metadata or formatting)")
    problems = [f"{kind}/{name}: {problem}" for problem in problems]
    if kind == "solutions" and not problems:
        problems += _check_exercise(root, name, stored)
    return problems


def _differences(expected, stored):
    """Where source and notebook differ, cell by cell."""
    ids, stored_ids = ([c.get("id") for c in nb.cells] for nb in (expected, stored))
    if ids != stored_ids:
        new = [i for i in ids if i not in stored_ids]
        old = [i for i in stored_ids if i not in ids]
        if new or old:
            return [
                "differs from its source: "
                f"not built {', '.join(new) or 'none'}; no longer there {', '.join(old) or 'none'}"
            ]
        return ["differs from its source: the cells' order"]
    problems = []
    for cell, other in zip(expected.cells, stored.cells, strict=True):
        for part in ("cell_type", "source", "metadata"):
            if cell[part] != other[part]:
                problems.append(f"cell {cell.id!r} differs from its source in its {part}")
    return problems


def _outputs(stored):
    problems = []
    for cell in stored.cells:
        if cell.cell_type != "code":
            continue
        if cell.execution_count is None:
            problems.append(f"cell {cell.id!r} was not executed")
        elif role_of(cell) == "check" and not cell.outputs:
            problems.append(f"check {cell.id!r} must print the values it checked")
        errors = [o.ename for o in cell.outputs if o.output_type == "error"]
        meant = "raises-exception" in cell.metadata.get("tags", [])
        if errors and not meant:
            problems.append(f"cell {cell.id!r} stores an error ({errors[0]}) that is not tagged")
        if meant and not errors:
            problems.append(f"cell {cell.id!r} is tagged raises-exception but raised nothing")
    return problems


def _sizes(stored):
    problems = []
    for cell in stored.cells:
        lines = len(cell.source.splitlines())
        if cell.cell_type == "code" and lines > MAX_CODE_LINES:
            problems.append(f"cell {cell.id!r} has {lines} lines, over {MAX_CODE_LINES}")
        columns = max(map(len, cell.source.splitlines()), default=0)
        if cell.cell_type == "code" and not _is_folded(cell) and columns > MAX_COLUMNS:
            problems.append(f"cell {cell.id!r} has {columns} columns, over {MAX_COLUMNS}")
    return problems


def _is_folded(cell):
    return cell.metadata.get("jupyter", {}).get("source_hidden", False)


def _names(stored, name):
    number = name.split("_")[0]
    if not number.isdecimal():
        return [f"{name!r} does not start with a chapter's number, as 01_topic does"]
    try:
        return arc.violations(arc.code_of(stored), int(number))
    except SyntaxError as error:
        return [f"its code cells are not valid Python: {error}"]


def _displayed(stored):
    try:
        return shown.lost(stored) + shown.unseen(stored)
    except SyntaxError:  # _names says so
        return []


def _chapter_sizes(stored):
    problems = []
    words = prose.count_words(stored)
    if len(stored.cells) > MAX_CELLS:
        problems.append(f"{len(stored.cells)} cells, over {MAX_CELLS}")
    if words > MAX_WORDS:
        problems.append(f"{words} words, over {MAX_WORDS}")
    lengths = [
        sum(bool(line.strip()) for line in cell.source.splitlines())
        for cell in stored.cells
        if cell.cell_type == "code"
    ]
    if lengths and median(lengths) >= MEDIAN_LINES:
        problems.append(f"half of its code cells have {median(lengths):g} lines or more")
    return problems


def _check_exercise(root, name, solution):
    path = root / "exercises" / f"{name}.ipynb"
    if not path.exists():
        return [f"exercises/{name}.ipynb has not been built"]
    if path.read_bytes() != to_bytes(exercise_from(solution)):
        return [f"exercises/{name}.ipynb differs from solutions/{name}.ipynb; build it anew"]
    return []
