"""The real course: built files fit their sources, notebooks run, exercises fail where they should.

Works with any number of chapters, also none.
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter

from minikv.classroom import audit
from minikv.classroom.build import check_course
from minikv.classroom.cells import exercise_of, role_of
from minikv.classroom.files import chapter_names
from minikv.classroom.nbval_run import run_nbval

ROOT = Path(__file__).resolve().parents[1]
CELL_SECONDS = 300


def notebooks(*kinds):
    """The course's built notebooks of these kinds, as test parameters named like their files."""
    paths = [path for kind in kinds for path in sorted((ROOT / kind).glob("*.ipynb"))]
    return [pytest.param(path, id=f"{path.parent.name}/{path.stem}") for path in paths]


def failures(results):
    return {key: result for key, result in results.items() if result["outcome"] != "passed"}


def test_built_files_fit_their_sources():
    assert "\n".join(check_course(ROOT)) == ""


@pytest.mark.parametrize("path", notebooks("notebooks", "solutions"))
def test_notebooks_run_and_print_what_they_show(path):
    assert failures(run_nbval(path, ROOT, compare="all", cell_seconds=CELL_SECONDS)) == {}


@pytest.mark.parametrize("path", notebooks("notebooks"))
def test_a_page_made_of_a_chapter_shows_every_figure_with_its_alt_text(path):
    notebook = nbformat.read(path, as_version=4)
    stored = [out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", [])]
    assert not any("image/png" in data for data in stored)  # no viewer gives it an alt text
    figures = sum("<img " in data.get("text/html", "") for data in stored)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    assert figures > 0 and "No description has been provided" not in page
    images = re.findall(r'<img[^>]*src="data:image/png;base64', page)
    assert len(images) >= figures and all(re.search(r'alt="[^"]{40,}"', i) for i in images)


@pytest.mark.parametrize("path", notebooks("exercises"))
def test_exercises_as_shipped_fail_exactly_at_their_checks(path):
    cells = {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}
    failed = failures(run_nbval(path, ROOT, compare="tagged", cell_seconds=CELL_SECONDS))
    assert set(failed) == {key for key, cell in cells.items() if role_of(cell) == "check"}
    for key, result in failed.items():
        assert result.get("ename") == "NotImplementedError", (key, result)
        assert result["message"].startswith(f"Exercise {exercise_of(cells[key])}: "), key


def _run_by_checks(cell):
    """What a cell of the checks defines and does not keep: it would see the learner's names."""
    for node in ast.parse(cell.source).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            if any(isinstance(part, ast.Lambda) for part in ast.walk(node)):
                yield ast.unparse(node)[:60]
            continue
        if not {"ours", "lent", "check"} & {ast.unparse(d) for d in node.decorator_list}:
            yield node.name
        for method in node.body if isinstance(node, ast.ClassDef) else [node]:
            # A default is computed at once, among the learner's names; a lambda's body is not.
            args = getattr(method, "args", None)
            for default in filter(None, (*args.defaults, *args.kw_defaults) if args else ()):
                names = any(isinstance(part, ast.Name) for part in ast.walk(default))
                if names and not isinstance(default, ast.Lambda):
                    yield ast.unparse(default)


@pytest.mark.parametrize("path", notebooks("exercises"))
def test_all_that_a_check_runs_is_kept_from_the_learners_names(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.metadata.get("jupyter", {}).get("source_hidden") or role_of(cell) == "check":
            assert not list(_run_by_checks(cell)), cell.id


@pytest.mark.long  # .ci/run runs it all the same
@pytest.mark.parametrize("name", chapter_names(ROOT))
def test_checks_catch_wrong_answers_and_pass_right_ones(name):
    assert "\n".join(audit.audit_chapter(ROOT, name)[1]) == ""


def chapters_table(path):
    """{number: (topic, whether it is coming, minutes, needs)} of a file's table of chapters."""
    rows = {}
    for line in re.sub(r"<!--.*?-->|[*]", "", path.read_text(encoding="utf-8")).splitlines():
        cells = [cell.strip() for cell in line.lstrip("# ").split("|")[1:-1]]
        if cells and re.fullmatch(r"\d\d", cells[0]):
            topic, minutes, needs = cells[1], int(cells[-2]), cells[-1]
            coming = "(coming)" in topic
            topic = re.sub(r"\[(.*)\]\(.*\)|\((coming|you are here)\)", r"\1", topic).strip()
            rows[cells[0]] = (topic, coming, minutes, needs)
    return rows


def test_the_readmes_chapters_are_those_of_chapter_00s_map():
    rows = chapters_table(ROOT / "README.md")
    assert rows == chapters_table(ROOT / "notebooks/src/00_welcome.py") and len(rows) == 11
    sources = {path.stem.split("_")[0] for path in (ROOT / "notebooks/src").glob("*.py")}
    assert {number for number, row in rows.items() if not row[1]} == sources
