"""The course on the disk: where it is, its notebooks read and written, and their hashes."""

import hashlib
import json
import os
import tempfile
from pathlib import Path

import nbformat

from minikv.classroom.cells import role_of

NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    # What ipykernel says, and JupyterLab therefore writes; but without the version, since another
    # Python's would change every file (classroom/contents.py).
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
    },
}


class CourseError(ValueError):
    """The course (a source, a notebook, an answer file) is not as it must be; says where."""


def course_root(given=None):
    """The folder that holds `notebooks/`, `solutions/` and `exercises/`: as given, or this one.

    It is absolute: a kernel, which works in another folder, imports minikv from it.
    """
    if given is not None:
        root = Path(given).expanduser().resolve()
        if not root.is_dir():
            raise CourseError(f"there is no folder {given}")
        if not any((root / kind).is_dir() for kind in ("notebooks", "solutions", "exercises")):
            raise CourseError(f"{given} holds no course: no notebooks, solutions or exercises")
        return root
    for folder in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (folder / "notebooks" / "src").is_dir():
            return folder
    raise CourseError(
        f"no course found: neither {Path(__file__).resolve().parents[2]} nor {Path.cwd()} has a "
        "folder notebooks/src; run this from the course's own folder"
    )


def chapter_names(root):
    """All chapters that have a source, in order: `["00_welcome", "01_one_token"]`."""
    sources = [*Path(root, "notebooks/src").glob("*.py"), *Path(root, "solutions/src").glob("*.py")]
    return sorted({path.stem for path in sources})


def find_chapter(names, wanted):
    """The one of `names` that `wanted` means: `1`, `01` or `01_one_token`."""
    number = f"{int(wanted):02d}" if wanted.isdecimal() else None
    found = [name for name in names if name == wanted or name.split("_")[0] == number]
    if len(found) != 1:
        what = "no chapter" if not found else "more than one chapter"
        raise CourseError(f"{what} {wanted!r}; there are: {', '.join(names) or 'none'}")
    return found[0]


def digest(*texts):
    """Twelve hexadecimal digits: plenty for a course, short enough to read in a diff."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def source_hash(notebook):
    """Of what is executed: editing prose, or a tag, keeps the stored outputs."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            raises = "raises-exception" in cell.metadata.get("tags", [])
            parts += [cell.id, cell.source, str(raises)]
    return digest(*parts)


def outputs_hash(notebook):
    return _hash_cells(c for c in notebook.cells if c.cell_type == "code")


def checks_hash(notebook):
    return _hash_cells(c for c in notebook.cells if role_of(c) == "check")


def _hash_cells(cells):
    parts = [[c.get("id"), c.source, c.execution_count, c.outputs] for c in cells]
    return digest(json.dumps(parts, sort_keys=True))


def to_bytes(notebook):
    """The file's bytes: the same notebook always gives the same ones."""
    nbformat.validate(notebook)
    return (nbformat.writes(notebook, version=4).rstrip("\n") + "\n").encode()


def read_notebook(path):
    try:
        return nbformat.reads(Path(path).read_text(encoding="utf-8"), as_version=4)
    except Exception as error:  # nbformat raises whatever its parser happened to meet
        raise CourseError(f"{path} is not a readable notebook: {error}") from error


def write_if_changed(path, data):
    """Writes whole or not at all, and only when the bytes differ; returns whether it wrote."""
    path = Path(path)
    if path.exists() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return True
