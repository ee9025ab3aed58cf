"""What a learner handed in: read with patience, and merged into the exercise as shipped.

Editors rewrite notebooks (ids, metadata, encodings), and people copy, split, delete and add cells.
So an answer is looked for by its grade_id, then by its cell id, then by the names that it defines;
of several cells that carry its id all count, in order. Checks and expected outputs always come from
the shipped exercise, never from the learner's file.
"""

import ast
import builtins
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
    turned: dict = field(default_factory=dict)  # id of an answer that is no code now -> its kind
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
    shipped = _Shipped(exercise)
    used = {}  # position in the submission -> id of the exercise's cell
    pieces = {}  # id of an answer -> positions of cells that run before it
    for cell in merged.notebook.cells:
        role = role_of(cell)
        if role == "answer":
            found = _find(cell, cells, used, shipped)
            used |= dict.fromkeys(found, cell.id)
            if not found:
                _note_missing(cell, cells, merged)
                continue
            pieces[cell.id], source = _joined([(i, cells[i].source) for i in found])
            if not _empty(source):  # else it stays as shipped: not yet done
                cell.source = source
            # The reference has no output here; one may stand in the solution for the reader.
            cell.outputs, cell.execution_count = [], None
        elif role == "written":
            found = _words(cell, cells, used, shipped)
            used |= dict.fromkeys(found, cell.id)
            text = "\n\n".join(cells[i].source for i in found)
            if _answered(text, cell):
                cell.source = text
                merged.written.add(cell.id)
    _insert_extras(merged.notebook, shipped, cells, used, pieces)
    merged.overwritten = _overwritten(merged.notebook, exercise)
    return merged


def found_cells(exercise, cells):
    """For each cell of a submission the id of the shipped cell that it holds; None: the learner's
    own."""
    shipped, used = _Shipped(exercise), {}
    for cell in exercise.cells:
        if role_of(cell) == "answer":
            used |= dict.fromkeys(_find(cell, cells, used, shipped), cell.id)
        elif role_of(cell) == "written":
            used |= dict.fromkeys(_words(cell, cells, used, shipped), cell.id)
    return [used.get(i) or shipped.claims(cell) for i, cell in enumerate(cells)]


class _Shipped:
    """How to tell a shipped cell in a submission: by its ids, or by its text."""

    def __init__(self, exercise):
        self.ids = {cell.id for cell in exercise.cells}
        self.texts = {_squeezed(c.source): c.id for c in exercise.cells if _squeezed(c.source)}
        self.order = [cell.id for cell in exercise.cells]
        self.bound = set().union(
            *(_bound(c.source) for c in exercise.cells if c.cell_type == "code")
        )

    def claims(self, cell):
        """The id of the shipped cell that this one was made from; None: the learner's own."""
        for name in (cell.grade_id, cell.cell_id):
            if name in self.ids:
                return name
        return self.texts.get(_squeezed(cell.source))


def _note_missing(cell, cells, merged):
    merged.missing.add(cell.id)
    for mine in cells:
        if cell.id in (mine.grade_id, mine.cell_id) and mine.kind != "code":
            merged.turned[cell.id] = mine.kind


def _parses(source):
    try:
        _tree(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _empty(source):
    """Nothing but spaces and comments."""
    return not re.sub(r"^\s*#.*$", "", source, flags=re.M).strip()


def _joined(found):
    """([positions that run before], source) of an answer's cells: (position, source) in order.

    A cell that was split within a function makes sense only as a whole; of whole cells (one with a
    helper, or an earlier try) each runs by itself, the last one as the answer.
    """
    sources = [source for _, source in found]
    whole = "\n".join(sources)
    if len(found) > 1 and not all(map(_parses, sources)) and _parses(whole):
        return [], whole
    return [position for position, source in found[:-1] if _parses(source)], sources[-1]


def _overwritten(notebook, exercise):
    """Names that the learner's own cells bind anew: those of the shipped cells around the
    exercises, and Python's own (`sum = 0`) that shipped cells use."""
    shipped = {c.id: c.source for c in exercise.cells if c.cell_type == "code"}
    needed, own = _builtins_in(shipped.values()), set()
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


def _builtins_in(sources):
    nodes = [n for source in sources if _parses(source) for n in ast.walk(_tree(source))]
    return {n.id: "" for n in nodes if isinstance(n, ast.Name) and hasattr(builtins, n.id)}


def _tree(source):
    return ast.parse(without_magics(source))


def _bound(source):
    """{name: what is imported under it, or an empty text} that a cell binds at its top level."""
    try:
        body = _tree(source).body
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
    return not _empty(mine.source) and _squeezed(mine.source) != _squeezed(shipped.source)


def _answered(text, shipped):
    """Whether more than a word or two stands in a written answer, the placeholder not counted."""
    own = _squeezed(text).replace(_squeezed(shipped.source), "")
    return len(re.findall(r"\w", own)) >= MIN_LETTERS


def _names(source):
    return {function or variable for function, variable in TOP_NAMES.findall(source)}


def _find(answer, cells, used, shipped):
    """The positions of the learner's version of an answer cell, in order."""
    free = [i for i, c in enumerate(cells) if i not in used and c.kind == "code"]
    names = _names(answer.source)
    named = [
        i
        for i in free
        if names & _names(cells[i].source) and shipped.claims(cells[i]) in (None, answer.id)
    ]
    ways = [
        [i for i in free if cells[i].grade_id == answer.id],
        [i for i in free if cells[i].cell_id == answer.id],
        [i for i in named if _changed(cells[i], answer)][-1:] or named[-1:],
    ]
    # Of a cell that was copied to try something else the untouched ones do not count, nor does an
    # emptied one if the answer stands elsewhere.
    edited = [[i for i in found if _changed(cells[i], answer)] for found in ways]
    return next(filter(None, [*edited, *(found[-1:] for found in ways)]), [])


def _words(written, cells, used, shipped):
    """The positions of a written answer: its cell, and the learner's own words that follow it."""
    claimed = [shipped.claims(cell) for cell in cells]
    mine = [i for i, name in enumerate(claimed) if name == written.id]
    before = shipped.order[: shipped.order.index(written.id)]
    start = (
        mine[-1]
        if mine
        else max((i for i, name in enumerate(claimed) if name in before), default=-1)
    )
    for i in range(start + 1, len(cells)):
        if claimed[i] is not None or i in used:
            break
        if cells[i].kind != "code" or not _parses(cells[i].source):  # a sentence in a code cell
            mine.append(i)
    return mine


def _insert_extras(notebook, shipped, cells, used, pieces):
    """Puts the learner's own code cells where they stand; their own errors do not count.

    A helper function written in a cell of its own must exist when the check runs, even if it stands
    below it (its cell was run before): a cell of definitions that binds no name anew goes up to the
    answer. Any other cell below a check, an experiment, must not run before it.
    """
    answers = [c.id for c in notebook.cells if role_of(c) == "answer"]
    before, after, seen = [], {}, set(shipped.bound)
    for cell in notebook.cells:
        if cell.id in answers:
            seen |= _bound(cell.source).keys()
    anchor = answer = None  # the shipped cell, the answer that the learner's cell stands below
    for position, cell in enumerate(cells):
        name = used.get(position) or shipped.claims(cell)
        if cell.kind != "code" or name:
            anchor = name if cell.kind == "code" else anchor
            answer = name if name in answers else answer
        if cell.kind != "code" or _empty(cell.source):
            continue
        if name and position not in pieces.get(name, ()):
            continue
        extra = nbformat.v4.new_code_cell(
            cell.source, id=f"extra-{position}", metadata={"tags": ["raises-exception"]}
        )
        if name:  # an answer's first part
            pieces[name][pieces[name].index(position)] = extra
            continue
        helper = _only_defines(cell.source) and not _bound(cell.source).keys() & seen
        seen |= _bound(cell.source).keys()
        place = answer if helper else anchor
        (before if answer is None else after.setdefault(place, [])).append(extra)
    result = []
    for cell in notebook.cells:
        result += before if answers and cell.id == answers[0] else []
        result += [*pieces.get(cell.id, ()), cell, *after.get(cell.id, [])]
    notebook.cells = result


def _only_defines(source):
    """Whether a cell does no more than define functions, classes and constants."""
    if not _parses(source):
        return False
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom,
             ast.Assign, ast.AnnAssign)  # fmt: skip
    tree = _tree(source)
    stored = (n for n in ast.walk(tree) if isinstance(getattr(n, "ctx", None), ast.Store))
    return all(
        isinstance(node, kinds) or isinstance(getattr(node, "value", None), ast.Constant)
        for node in tree.body
    ) and not any(isinstance(n, ast.Attribute | ast.Subscript) for n in stored)
