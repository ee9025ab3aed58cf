"""What a learner handed in: read with patience, and merged into the exercise as shipped.

Editors rewrite notebooks (ids, metadata, encodings), and people copy, delete and add cells. So an
answer is looked for by its grade_id, then by its cell id, then by the names that it defines. Checks
and expected outputs always come from the shipped exercise, never from the learner's file.
"""

import ast
import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from minikv.classroom.arc import without_magics
from minikv.classroom.source import CourseError, role_of

MAX_BYTES = 50_000_000
MIN_LETTERS = 20  # of a written answer: about a sentence
TOP_NAMES = re.compile(r"^(?:async )?(?:def|class) +(\w+)|^(\w+) *(?::[^=\n]+)?=(?!=)", re.M)


@dataclass
class Cell:
    """One cell of a submission: what is left of it that can be trusted to be there."""

    kind: str
    source: str
    cell_id: str = ""
    grade_id: str = ""


@dataclass
class Merged:
    """The exercise with the learner's answers, ready to run."""

    notebook: object
    missing: set = field(default_factory=set)  # ids of answer cells that the submission lacks
    written: set = field(default_factory=set)  # ids of written answers that hold a sentence
    overwritten: set = field(default_factory=set)  # names the checks need, given another value


def read_submission(path):
    """The cells of a learner's notebook, whatever editor saved it; (cells, its own metadata)."""
    path = Path(path)
    if not path.is_file():
        raise CourseError(f"{path} does not exist")
    data = path.read_bytes()
    if not data.strip():
        raise CourseError(f"{path} is empty; python -m minikv start makes a new copy")
    if len(data) > MAX_BYTES:
        raise CourseError(
            f"{path} has {len(data):,} bytes, over {MAX_BYTES:,}; clear its outputs and save it"
        )
    text = _decode(data)
    if re.search(r"^(<{7}|>{7}) ", text, re.M):
        raise CourseError(f"{path} holds git's merge markers (<<<<<<<); resolve the conflict first")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CourseError(f"{path} is not a whole notebook file: {error}") from error
    if isinstance(document, dict) and "worksheets" in document:
        try:
            document = nbformat.reads(text, as_version=4)
        except Exception as error:  # the converter raises whatever it stumbles over
            raise CourseError(f"{path} is an old notebook that cannot be read: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("cells"), list):
        raise CourseError(f"{path} is not a notebook: it has no list of cells")
    cells = [_cell(raw) for raw in document["cells"] if isinstance(raw, dict)]
    metadata = document.get("metadata")
    return cells, metadata if isinstance(metadata, dict) else {}


def _decode(data):
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")  # never fails; wrong letters in a comment do no harm


def _dict(value):
    return value if isinstance(value, dict) else {}


def _writable(text):
    """JSON can hold half a character (a lone surrogate), which no file can."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _cell(raw):
    source = raw.get("source", "")
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    source = source if isinstance(source, str) else ""
    metadata = _dict(raw.get("metadata"))
    return Cell(
        kind=str(raw.get("cell_type", "")),
        source=_writable(source).replace("\r\n", "\n").replace("\r", "\n"),
        cell_id=str(raw.get("id") or metadata.get("id") or ""),  # Colab keeps ids in the metadata
        grade_id=str(_dict(metadata.get("nbgrader")).get("grade_id") or ""),
    )


def merge(exercise, cells):
    """The shipped `exercise` with the answers among `cells`, and the learner's own extra cells."""
    merged = Merged(copy.deepcopy(exercise))
    ids = {cell.id for cell in exercise.cells}
    used = {}  # position in the submission -> id of the exercise's cell
    for cell in merged.notebook.cells:
        role = role_of(cell)
        if role not in ("answer", "written"):
            continue
        position = _find(cell, cells, used, ids)
        if position is None:
            if role == "answer":
                merged.missing.add(cell.id)
            continue
        used[position] = cell.id
        if role == "answer":
            cell.source = cells[position].source
            # The reference has no output here; one may stand in the solution for the reader.
            cell.outputs, cell.execution_count = [], None
        elif _answered(cells[position], cell):
            cell.source = cells[position].source
            merged.written.add(cell.id)
    _insert_extras(merged.notebook, exercise, cells, used)
    merged.overwritten = _overwritten(merged.notebook, exercise)
    return merged


def _overwritten(notebook, exercise):
    """Names of the shipped cells around the exercises that the learner's own cells bind anew."""
    shipped = {c.id: c.source for c in exercise.cells if c.cell_type == "code"}
    needed, own = {}, set()
    for cell in exercise.cells:
        if cell.id in shipped and role_of(cell) is None:
            needed |= _bound(cell.source)
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source != shipped.get(cell.id):
            own |= _bound(cell.source).items()
    # To import the same once more does no harm.
    return {
        name for name, origin in own if name in needed and (not origin or origin != needed[name])
    }


def _bound(source):
    """{name: what is imported under it, or an empty text} that a cell binds at its top level."""
    try:
        body = ast.parse(without_magics(source)).body
    except (SyntaxError, ValueError):
        return {}
    names = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = ""
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = (alias.asname or alias.name).split(".")[0]
                names[name] = f"{getattr(node, 'module', '')} {alias.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.With):
            for n in ast.walk(node):
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
                    names[n.id] = ""
    return names


def _squeezed(source):
    return re.sub(r"\s+", "", source)


def _changed(mine, shipped):
    return _squeezed(mine.source) not in ("", _squeezed(shipped.source))


def _answered(mine, shipped):
    """Whether more than a word or two stands in a written answer, the placeholder not counted."""
    own = _squeezed(mine.source).replace(_squeezed(shipped.source), "")
    return len(re.findall(r"\w", own)) >= MIN_LETTERS


def _names(source):
    return {function or variable for function, variable in TOP_NAMES.findall(source)}


def _find(shipped, cells, used, ids):
    """The position of the learner's version of a shipped cell, or None; `ids`: all shipped."""
    free = [i for i, c in enumerate(cells) if i not in used and c.kind == shipped.cell_type]
    unclaimed = [i for i in free if not {cells[i].grade_id, cells[i].cell_id} & ids]
    names = _names(shipped.source) if shipped.cell_type == "code" else set()
    ways = (
        [i for i in free if cells[i].grade_id == shipped.id],
        [i for i in free if cells[i].cell_id == shipped.id],
        [i for i in unclaimed if names & _names(cells[i].source)],
    )
    for found in ways:
        # Of a cell that was copied to try something else, the last one that is not the stub counts.
        edited = [i for i in found if _changed(cells[i], shipped)]
        if found:
            return (edited or found)[-1]
    return None


def _insert_extras(notebook, exercise, cells, used):
    """Puts the learner's own code cells where the answer beside them stands.

    A helper function written in a cell of its own must exist when the check runs: cells above the
    first answer go before it, others follow the answer that they stand below. Their own errors do
    not count.
    """
    shipped = {_squeezed(cell.source) for cell in exercise.cells}
    ids = {cell.id for cell in exercise.cells}
    before, after = [], {}
    last = None
    for position, cell in enumerate(cells):
        last = used.get(position, last) if cell.kind == "code" else last
        own = cell.kind == "code" and position not in used and _squeezed(cell.source)
        if not own or _squeezed(cell.source) in shipped or {cell.cell_id, cell.grade_id} & ids:
            continue
        extra = nbformat.v4.new_code_cell(
            cell.source, id=f"extra-{position}", metadata={"tags": ["raises-exception"]}
        )
        (before if last is None else after.setdefault(last, [])).append(extra)
    first = next((c.id for c in notebook.cells if role_of(c) == "answer"), None)
    result = []
    for cell in notebook.cells:
        result += before if cell.id == first else []
        result += [cell, *after.get(cell.id, [])]
    notebook.cells = result
