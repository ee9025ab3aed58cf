"""The build: from text sources to notebooks and exercises, and `--check` on what was built."""

import asyncio
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
import psutil
import pytest
from classroom_course import built_course, copy_course, edit

from minikv.classroom import build, cells, shown, source
from minikv.classroom import files as course_files
from minikv.classroom.build import build_chapter, check_course
from minikv.classroom.contents import CourseContents
from minikv.classroom.execute import execute
from minikv.classroom.files import CourseError
from minikv.classroom.nbval_run import run_nbval
from minikv.classroom.source import read_source
from minikv.commands import build as build_command


def files(root):
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(root.glob("*/*.ipynb"))
    }


def read(path):
    return nbformat.read(path, as_version=4)


def cell(notebook, cell_id):
    return next(c for c in notebook.cells if c.id == cell_id)


def write_source(folder, text, name="01_slots.py", kind="solutions"):
    path = folder / kind / "src" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# --------------------------------------------------------------------------------- what is built


def test_the_fixture_builds_clean():
    root = built_course()
    assert sorted(files(root)) == [
        "exercises/01_slots.ipynb", "notebooks/00_hello.ipynb", "notebooks/01_slots.ipynb",
        "solutions/01_slots.ipynb",
    ]  # fmt: skip
    assert check_course(root) == []
    assert not list(root.rglob(".*.ipynb*")), "temporary files are left behind"


def test_notebooks_are_executed_and_keep_no_trace_of_this_machine():
    notebook = read(built_course() / "notebooks/01_slots.ipynb")
    nbformat.validate(notebook)
    assert cell(notebook, "block-size").outputs[0].text == "16\n"
    noisy = cell(notebook, "noisy")
    assert [o.output_type for o in noisy.outputs] == ["execute_result"]  # stderr is not stored
    assert list(noisy.metadata) == ["slideshow"]  # no time stamps
    record = notebook.metadata.minikv
    assert record.chapter == "01_slots" and isinstance(record.seconds, float)
    assert set(record.modules) == {"minikv.classroom", "minikv.classroom.arc"}
    assert "version" not in notebook.metadata.language_info
    hello = read(built_course() / "notebooks/00_hello.ipynb")
    assert cell(hello, "meant-error").outputs[0].ename == "ZeroDivisionError"


def test_cells_run_in_notebooks_with_static_figures_and_this_interpreter(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    text = (
        "# %% where\nimport os, sys\nprint(os.path.basename(os.getcwd()), "
        "os.environ['MINIKV_STATIC'])\nprint(sys.executable)\n\n"
        "# %% figure\nimport matplotlib.pyplot as plt\n_ = plt.plot([1, 2])\n\n"
        "# %% bar\nfrom IPython.display import display\n"
        "print(1, flush=True)\nprint('noise', file=sys.stderr, flush=True)\n"
        "display({'application/vnd.jupyter.widget-view+json': {}, 'text/plain': 'bar'}, raw=True)\n"
        "print(2)\n"
    )
    write_source(tmp_path, text, "02_env.py", "notebooks")
    build_chapter(tmp_path, "02_env")
    notebook = read(tmp_path / "notebooks/02_env.ipynb")
    import sys

    assert cell(notebook, "where").outputs[0].text == f"notebooks 1\n{sys.executable}\n"
    assert "image/png" in cell(notebook, "figure").outputs[0].data
    assert [output.text for output in cell(notebook, "bar").outputs] == ["1\n2\n"]
    results = run_nbval(tmp_path / "notebooks/02_env.ipynb", tmp_path)
    assert {result["outcome"] for result in results.values()} == {"passed"}, results


def test_a_pictures_words_are_compared_and_its_pixels_are_not(tmp_path):
    text = (
        "# %% picture\nimport time\nfrom minikv.viz import figure\n"
        "card, ax = figure(alt='Two lines' if __name__ else '')\n"
        "_ = ax.plot([0, time.time_ns() % 1000])\ncard\n"
    )
    write_source(tmp_path, text, "02_picture.py", "notebooks")
    build_chapter(tmp_path, "02_picture")
    path = tmp_path / "notebooks/02_picture.ipynb"
    data = cell(read(path), "picture").outputs[0].data
    assert 'alt="Two lines"' in data["text/html"] and "image/png" not in data
    results = run_nbval(path, tmp_path, compare="all")
    assert results["picture"]["outcome"] == "passed", results
    path.write_text(path.read_text(encoding="utf-8").replace('alt=\\"Two', 'alt=\\"Three'))
    results = run_nbval(path, tmp_path, compare="all")
    assert results["picture"]["outcome"] == "failed", results


def test_a_built_file_is_what_jupyterlab_would_write(tmp_path):
    """Else opening a chapter changes its file, and an update of the course meets a conflict."""
    from ipykernel.ipkernel import IPythonKernel

    root = built_course()
    for path in (root / "notebooks/01_slots.ipynb", root / "exercises/01_slots.ipynb"):
        text = path.read_text(encoding="utf-8")
        language = dict(IPythonKernel.language_info)
        del language["version"]
        assert json.loads(text)["metadata"]["language_info"] == language
        json.loads(text, parse_float=lambda digits: 1 // (not digits.endswith(".0")))


def test_the_contents_manager_hides_the_version_alone():
    async def opened_and_saved(text):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a.ipynb")
            path.write_bytes(text)
            manager = CourseContents(root_dir=folder)
            model = await manager.get("a.ipynb", type="notebook")
            info = dict(model["content"]["metadata"]["language_info"])
            await manager.save(model, "a.ipynb")
            return info, path.read_bytes()

    ours = (built_course() / "notebooks/01_slots.ipynb").read_bytes()
    info, saved = asyncio.run(opened_and_saved(ours))
    assert info["version"] == sys.version.split()[0] and saved == ours
    notebook = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
    other = nbformat.writes(notebook).encode() + b"\n"
    info, saved = asyncio.run(opened_and_saved(other))
    assert info == {"name": "python"} and json.loads(saved) == json.loads(other)


def test_sections_are_slides_and_what_follows_code_is_one_below(tmp_path):
    text = (
        "# %% [markdown]\n# # One\n\n# %% [markdown]\n# more\n\n# %% a\nx = 1\n\n"
        "# %% b\nx\n\n# %% [markdown]\n# ## Two\n\n# %% [markdown]\n# " + "long\n# " * 30
    )
    write_source(tmp_path, text, "02_talk.py", "notebooks")
    cells = read_source(tmp_path / "notebooks/src/02_talk.py").cells
    kinds = [cell.metadata["slideshow"]["slide_type"] for cell in cells]
    assert kinds == ["slide", "-", "-", "subslide", "slide", "subslide"]
    exercise = read(built_course() / "exercises/01_slots.ipynb")
    assert not any("slideshow" in cell.metadata for cell in exercise.cells)


@pytest.mark.parametrize(("code", "num_lost"), [
    ("show(f)", 0),
    ("show(f)\nprint(1)", 1),
    ("x = 1\nshow(f);", 1),
    ("for f in fs:\n    show(f)", 1),
    ("def f():\n    beside(a, b, [])", 1),
    ("if True:\n    card\nprint(2)", 1),
    ("viz.memory_map(moment)\nprint(1)", 1),
    ("card\n# the end", 0),
    ("print(1)\n%timeit f\nllm.step()\ncard", 0),
    ("def f():\n    'docs'\n    return show(g)\nf()", 0),
    ("card, drawn = viz.memory_map(moment)", 0),
])  # fmt: skip
def test_what_a_cell_would_show_and_does_not_is_found(code, num_lost):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    assert len(shown.lost(notebook)) == num_lost


def test_a_shown_source_that_stores_no_output_is_found():
    cell = nbformat.v4.new_code_cell("show(f)")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    assert len(shown.unseen(notebook)) == 1
    data = {"text/html": "<pre>", "text/plain": ""}
    cell.outputs = [nbformat.v4.new_output("execute_result", data=data)]
    assert shown.unseen(notebook) == []


def test_ids_are_titles_and_hashes_and_an_insertion_renames_nothing(tmp_path):
    root = built_course()
    path = root / "notebooks/src/01_slots.py"
    before = [c.id for c in read_source(path).cells]
    assert before[1:] == ["block-size", "noisy"] and re.fullmatch("md-[0-9a-f]{12}", before[0])
    text = path.read_text().replace(
        "# %% noisy", "# %% [markdown]\n# new\n\n# %% new\n1\n\n# %% noisy"
    )
    after = [c.id for c in read_source(write_source(tmp_path, text, kind="notebooks")).cells]
    assert [i for i in after if i in before] == before and len(after) == len(before) + 2


def test_metadata_are_kept_nested_and_jupytexts_own_are_not(tmp_path):
    text = '# %% a jupyter={"source_hidden": true} tags=["x"]\n1\n\n\n\n# %% b\n2\n'
    path = write_source(tmp_path, text)
    first, second = read_source(path).cells
    assert first.metadata == {"jupyter": {"source_hidden": True}, "tags": ["x"]}
    assert second.metadata == {}


def test_exercises_have_stubs_locked_checks_and_expected_outputs():
    root = built_course()
    exercise = read(root / "exercises/01_slots.ipynb")
    solution = read(root / "solutions/01_slots.ipynb")
    nbformat.validate(exercise)
    assert cell(exercise, "ex-1-1").source == (
        'def num_blocks(num_tokens):\n    """Blocks that hold `num_tokens` tokens."""\n'
        '    raise NotImplementedError("Exercise 1.1: write num_blocks")'
    )
    assert cell(exercise, "ex-1-1").execution_count is None
    check = cell(exercise, "check-1-1")
    assert check.outputs == cell(solution, "check-1-1").outputs and check.outputs[0].text
    assert check.metadata.editable is False and check.metadata.deletable is False
    assert "nbval-check-output" in check.metadata.tags
    assert cell(exercise, "written-1-3").source == "*Exercise 1.3: write your answer here.*"
    assert "Rubric" in cell(solution, "written-1-3").source
    assert "why" not in [c.id for c in exercise.cells]
    assert "SOLUTION" in cell(solution, "ex-1-1").source  # the markers nbgrader looks for


def test_what_shows_the_learners_own_answer_ships_without_the_solutions_output(tmp_path):
    root = copy_course(tmp_path)
    heading = "# %% [markdown]\n# ## Exercise 1.2"
    mine = '# %% mine tags=["own-output"]\nprint(num_blocks(33) if BLOCK_SIZE else 0)\n\n'
    edit(root / "solutions/src/01_slots.py", heading, mine + heading)
    build_chapter(root, "01_slots")
    shipped = cell(read(root / "exercises/01_slots.ipynb"), "mine")
    solved = cell(read(root / "solutions/01_slots.ipynb"), "mine")
    assert solved.outputs[0].text == "3\n" and solved.execution_count
    assert shipped.outputs == [] and shipped.execution_count is None
    assert shipped.source == solved.source and check_course(root) == []


def test_exercise_cells_have_nbgraders_metadata_and_no_other_keys():
    notebooks = [
        read(built_course() / f"{kind}/01_slots.ipynb") for kind in ("solutions", "exercises")
    ]
    kinds = {
        "ex-1-1": (False, True, False, None), "check-1-1": (True, False, True, 2),
        "check-1-2": (True, False, True, 1), "written-1-3": (True, True, False, 2),
    }  # fmt: skip
    for notebook in notebooks:
        for cell_id, (grade, solution, locked, points) in kinds.items():
            data = cell(notebook, cell_id).metadata.nbgrader
            assert set(data) == cells.NBGRADER_KEYS - (set() if grade else {"points"})
            assert (data.grade, data.solution, data.locked) == (grade, solution, locked)
            assert (data.schema_version, data.task, data.get("points")) == (3, False, points)
            assert data.grade_id == cell_id and re.fullmatch("[0-9a-f]{32}", data.checksum)
    checksums = [cell(n, "ex-1-1").metadata.nbgrader.checksum for n in notebooks]
    assert checksums[0] != checksums[1]  # a checksum is of the cell's own source


def test_the_checksum_is_nbgraders():
    # md5 over source, cell type, grade, solution, locked, grade_id and points as a float.
    import hashlib

    check = nbformat.v4.new_code_cell("print(1)", id="check-1-1")
    want = hashlib.md5(b"print(1)codeTrueFalseTruecheck-1-12.0").hexdigest()
    assert cells.nbgrader_metadata(check, "check", 2)["checksum"] == want


# ------------------------------------------------------------------------------------- rebuilding


def test_a_rebuild_touches_nothing(tmp_path):
    root = copy_course(tmp_path)
    before = files(root)
    for name in ("00_hello", "01_slots"):
        assert build_chapter(root, name) == []
    assert files(root) == before


def test_edited_prose_keeps_outputs_and_edited_code_executes(tmp_path):
    root = copy_course(tmp_path)
    path = root / "notebooks/00_hello.ipynb"
    seconds = -1.0  # a mark that only an execution replaces
    notebook = read(path)
    notebook.metadata.minikv.seconds = seconds
    path.write_bytes(course_files.to_bytes(notebook))
    edit(root / "notebooks/src/00_hello.py", "The smallest chapter", "A small chapter")
    assert build_chapter(root, "00_hello") == [path]
    assert "A small chapter" in read(path).cells[0].source
    assert read(path).metadata.minikv.seconds == seconds
    edit(root / "notebooks/src/00_hello.py", "2**10", "2**11")
    build_chapter(root, "00_hello")
    assert read(path).metadata.minikv.seconds != seconds
    assert cell(read(path), "print-numbers").outputs[0].text == "42 2048\n"


def test_a_changed_module_executes_anew_and_only_where_it_was_loaded(tmp_path):
    root = copy_course(tmp_path)
    package = root / "minikv"
    (package / "native").mkdir(parents=True)
    for file, text in (("__init__.py", ""), ("used.py", "N = 1"), ("other.py", ""),
                       ("native/__init__.py", ""), ("native/kernel.cpp", "int x;")):  # fmt: skip
        (package / file).write_text(text)
    write_source(root, "# %% a\nimport minikv.used, minikv.native\n\nprint(minikv.used.N)\n",
                 "02_own.py", "notebooks")  # fmt: skip
    built = root / "notebooks/02_own.ipynb"
    assert build_chapter(root, "02_own") == [built]
    (package / "other.py").write_text("M = 1")
    (package / "__init__.py").write_text("# names only")
    assert build_chapter(root, "02_own") == []
    # Of another length: Python takes its compiled copy for current where size and second agree.
    (package / "used.py").write_text("N = 22")
    assert build.changed_modules(root, read(built)) == ["minikv.used"]
    assert build_chapter(root, "02_own") == [built]
    assert cell(read(built), "a").outputs[0].text == "22\n"
    (package / "native/kernel.cpp").write_text("int y;")
    assert build.changed_modules(root, read(built)) == ["minikv.native"]


def test_an_edited_output_is_executed_away_and_force_executes_anew(tmp_path):
    root = copy_course(tmp_path)
    path = root / "notebooks/01_slots.ipynb"
    good = path.read_bytes()
    edit(path, '"16\\n"', '"17\\n"')
    build_chapter(root, "01_slots")
    assert cell(read(path), "block-size").outputs[0].text == "16\n"
    notebook = read(path)
    notebook.metadata.minikv.seconds = -1.0
    path.write_bytes(course_files.to_bytes(notebook))
    build_chapter(root, "01_slots", force=True)
    assert read(path).metadata.minikv.seconds != -1.0
    assert json.loads(path.read_text())["cells"] == json.loads(good)["cells"]


def test_a_failing_cell_stops_the_build_names_itself_and_leaves_the_file(tmp_path, capsys):
    root = copy_course(tmp_path)
    before = files(root)
    edit(root / "notebooks/src/01_slots.py", "print(block_size)", "print(block_sise)")
    assert build_command.main(["1", "--root", str(root)]) == 1
    error = capsys.readouterr().err
    assert "notebooks/01_slots: cell 'block-size' failed" in error
    assert "NameError: name 'block_sise' is not defined" in error and "\x1b" not in error
    assert files(root) == before
    edit(root / "notebooks/src/01_slots.py", "print(block_sise)", "import os; os._exit(1)")
    with pytest.raises(CourseError, match="the kernel died in cell 'block-size'"):
        build_chapter(root, "01_slots")
    assert files(root) == before


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.ipynb"
    path.write_bytes(b"old")

    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        course_files.write_if_changed(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_the_command_names_chapters_and_refuses_unknown_ones(tmp_path, capsys):
    root = copy_course(tmp_path)
    assert build_command.main(["0", "01_slots", "--root", str(root)]) == 0
    assert capsys.readouterr().out == "00_hello: nothing changed\n01_slots: nothing changed\n"
    assert build_command.main(["7", "--root", str(root)]) == 1
    assert "no chapter '7'; there are: 00_hello, 01_slots" in capsys.readouterr().err
    with pytest.raises(CourseError, match="no source 05_none"):
        build_chapter(root, "05_none")


# ------------------------------------------------------------------------------- sources refused

GOOD = "# %% ex-1-1\ndef f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION\n\n"
CHECK = "# %% check-1-1\nprint(f())\n"


@pytest.mark.parametrize(("text", "said"), [
    ("# %%\n1\n", "a code cell needs a title"),
    ("# %% a title\n1\n", "title 'a title' is not an id"),
    (f"# %% {'x' * 65}\n1\n", "is not an id; use 1 to 64"),
    ("# %% a\n1\n\n# %% a\n2\n", "cells 1 and 2 have the same title (a)"),
    ("# %% [markdown]\n# x\n\n# %% [markdown]\n# x\n", "cells 1 and 2 have the same text (x)"),
    (GOOD, "exercise 1.1 has no cell 'check-1-1'"),
    (CHECK, "exercise 1.1 has no cell 'ex-1-1'"),
    (GOOD + CHECK.replace("check-1-1", "check-1-1 points=0"), "points=0 must be a number above 0"),
    (GOOD.replace("ex-1-1", "ex-1-1 points=2") + CHECK, "points belong to a check"),
    (GOOD.replace("ex-1-1", "ex-2-1") + CHECK, "'ex-2-1' names another chapter"),
    (GOOD.replace("    ### END SOLUTION\n", "") + CHECK, "### END SOLUTION is missing"),
    (GOOD.replace("    ### BEGIN SOLUTION\n", "") + CHECK, "do not alternate"),
    ("# %% ex-1-1\nx = 1\n\n" + CHECK, "### BEGIN SOLUTION is missing"),
    ("# %% ex-1-1\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION\n\n" + CHECK, "outside a function"),
    (GOOD.replace("ex-1-1", "other"), "stands in a cell whose title is not ex-CHAPTER-NUMBER"),
    ('# %% other tags=["check"]\n1\n', "tag 'check' does not fit its title 'other'"),
    ("# %% written-1-1\n1\n", "a cell 'written-1-1' must be Markdown"),
    ("# %% [markdown] check-1-1\n# 1\n", "a cell 'check-1-1' must be code"),
    (GOOD.replace("    ###", "    if 1:\n        pass\n  ###", 1) + CHECK, "not valid Python"),
])  # fmt: skip
def test_bad_sources_are_refused_with_the_place(tmp_path, text, said):
    with pytest.raises(CourseError) as error:
        read_source(write_source(tmp_path, text))
    assert said in str(error.value) and "01_slots.py" in str(error.value)


def test_all_that_is_wrong_with_a_source_is_said_at_once(tmp_path):
    with pytest.raises(CourseError) as error:
        read_source(write_source(tmp_path, "# %%\n1\n\n# %% a b\n2\n" + GOOD))
    assert len(str(error.value).splitlines()) == 3


def test_exercises_belong_in_solutions(tmp_path):
    with pytest.raises(CourseError, match="belong in solutions/src"):
        read_source(write_source(tmp_path, GOOD + CHECK, kind="notebooks"))


def test_two_solutions_in_one_cell_become_two_stubs(tmp_path):
    path = write_source(tmp_path, GOOD + GOOD.split("\n", 1)[1].replace("f()", "g()") + CHECK)
    text = source.stub(read_source(path).cells[0])
    assert re.findall("write (.)", text) == ["f", "g"] and "return" not in text


# ---------------------------------------------------------------------------------------- --check


def change_output(notebook):
    cell(notebook, "block-size").outputs[0].text = "17\n"


def change_source(notebook):
    cell(notebook, "block-size").source = "block_size = 17"


def change_metadata(notebook):
    cell(notebook, "noisy").metadata["tags"] = ["x"]


def swap_cells(notebook):
    notebook.cells[1], notebook.cells[2] = notebook.cells[2], notebook.cells[1]


def drop_cell(notebook):
    del notebook.cells[2]


def forget_count(notebook):
    cell(notebook, "noisy").execution_count = None


def forget_hash(notebook):
    notebook.metadata.minikv.source_hash = "0" * 12


def store_error(notebook):
    error = nbformat.v4.new_output("error", ename="KeyError", evalue="1", traceback=[])
    cell(notebook, "noisy").outputs = [error]


@pytest.mark.parametrize(("change", "said"), [
    (change_output, "16 in 'md-"),
    (change_output, "a stored output was edited by hand"),
    (change_source, "cell 'block-size' differs from its source in its source"),
    (change_metadata, "cell 'noisy' differs from its source in its metadata"),
    (swap_cells, "differs from its source: the cells' order"),
    (drop_cell, "differs from its source: not built noisy; no longer there none"),
    (forget_count, "cell 'noisy' was not executed"),
    (forget_hash, "its code has changed since it was executed"),
    (store_error, "cell 'noisy' stores an error (KeyError) that is not tagged"),
])  # fmt: skip
def test_check_finds_what_was_changed_in_a_built_notebook(tmp_path, change, said):
    root = copy_course(tmp_path)
    path = root / "notebooks/01_slots.ipynb"
    notebook = read(path)
    change(notebook)
    path.write_bytes(course_files.to_bytes(notebook))
    problems = check_course(root)
    assert any(p.startswith(f"notebooks/01_slots: {said}") for p in problems), problems


@pytest.mark.parametrize("kind", ["notebooks/00_hello", "notebooks/01_slots", "solutions/01_slots",
                                  "exercises/01_slots"])  # fmt: skip
def test_every_digit_of_every_stored_output_is_guarded(tmp_path, kind):
    root = copy_course(tmp_path)
    path = root / f"{kind}.ipynb"
    good = path.read_text()
    for number, stored in enumerate(read(path).cells):
        for output in stored.get("outputs", []):
            if output.output_type == "stream":
                notebook = nbformat.reads(good, as_version=4)
                text = notebook.cells[number].outputs[0].text
                digit = re.search(r"\d", text)
                other = str((int(digit[0]) + 1) % 10)
                notebook.cells[number].outputs[0].text = (
                    text[: digit.start()] + other + text[digit.end() :]
                )
                path.write_bytes(course_files.to_bytes(notebook))
                assert check_course(root) != [], stored.id


def test_check_finds_what_was_changed_in_a_source(tmp_path):
    root = copy_course(tmp_path)
    chapter, solution = root / "notebooks/src/00_hello.py", root / "solutions/src/01_slots.py"
    edit(chapter, "# The smallest", "# Not the smallest")
    edit(solution, "return -(-num_tokens", "return 0 - (-num_tokens")
    problems = check_course(root)
    assert any(p.startswith("notebooks/00_hello: differs from its source") for p in problems)
    assert "solutions/01_slots: cell 'ex-1-1' differs from its source in its source" in problems


SEVEN = "\n".join(map(str, range(1, 8)))


@pytest.mark.parametrize(("num_long", "said"), [(1, 0), (2, 1)])
def test_the_median_cell_is_short(tmp_path, num_long, said):
    text = "# %% a\n1\n\n# %% b\n1\n\n# %% c\n1\n\n"
    text += "".join(f"# %% long-{i}\n\n{SEVEN}\n8\n\n" for i in range(2 + num_long))
    notebook = read_source(write_source(tmp_path, text, "02_long.py", "notebooks"))
    problems = build._chapter_sizes(notebook)
    assert problems == ["half of its code cells have 8 lines or more"] * said


def test_check_measures_cells_chapters_and_prose(tmp_path):
    root = tmp_path
    lines = "\n".join("x = 1" for _ in range(41))
    text = f"# %% [markdown]\n# {'word ' * 3601}\n\n# %% long\n{lines}\n\n"
    text += "".join(f"# %% c{i}\n{SEVEN}\n\n" for i in range(50))
    text += "".join(f"# %% d{i}\n{SEVEN}\n8\n\n" for i in range(50))
    text += f"# %% wide\n{'x' * 90}\n{'x' * 91}\n\n"
    text += f'# %% folded jupyter={{"source_hidden": true}}\n{"y" * 99}\n\n'
    text += "# %% later\nfrom minikv import PagedKVCacheManager\n\n# %% silly tags=['x']\n%time 1\n"
    text += '# %% calm tags=["raises-exception"]\n2\n'
    path = write_source(root, text, "02_big.py", "notebooks")
    notebook = read_source(path)
    for number, c in enumerate(notebook.cells):
        if c.cell_type == "code":
            c.execution_count = number
    notebook.metadata["minikv"] = {
        "source_hash": course_files.source_hash(notebook),
        "outputs_hash": course_files.outputs_hash(notebook),
    }
    (root / "notebooks/02_big.ipynb").write_bytes(course_files.to_bytes(notebook))
    said = "\n".join(check_course(root))
    for problem in (
        "cell 'long' has 41 lines, over 40",
        "cell 'wide' has 91 columns, over 90",
        "107 cells, over 100",
        "3601 words, over 3600",
        "minikv.PagedKVCacheManager belongs to chapter 04, used in chapter 02",
        "cell 'calm' is tagged raises-exception but raised nothing",
    ):
        assert f"notebooks/02_big: {problem}" in said
    assert said.count("columns, over") == 1 and "half of its code cells" not in said


def test_check_wants_checks_to_print_and_exercises_to_be_current(tmp_path):
    root = copy_course(tmp_path)
    path = root / "solutions/01_slots.ipynb"
    good = path.read_bytes()
    notebook = read(path)
    cell(notebook, "check-1-2").outputs = []
    path.write_bytes(course_files.to_bytes(notebook))
    assert any("check 'check-1-2' must print" in p for p in check_course(root))
    path.write_bytes(good)
    edit(root / "exercises/01_slots.ipynb", "write num_blocks", "write this")
    assert check_course(root) == [
        "exercises/01_slots.ipynb differs from solutions/01_slots.ipynb; build it anew"
    ]
    (root / "exercises/01_slots.ipynb").unlink()
    (root / "notebooks/00_hello.ipynb").rename(root / "notebooks/09_old.ipynb")
    assert check_course(root) == [
        "notebooks/00_hello.ipynb has not been built",
        "exercises/01_slots.ipynb has not been built",
        "notebooks/09_old.ipynb: has no source notebooks/src/09_old.py",
    ]


def test_check_reports_unreadable_notebooks_and_odd_formatting(tmp_path):
    root = copy_course(tmp_path)
    (root / "notebooks/00_hello.ipynb").write_text("{")
    path = root / "notebooks/01_slots.ipynb"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))
    first, second = check_course(root)
    assert "00_hello.ipynb is not a readable notebook" in first
    assert second.startswith("notebooks/01_slots: the file is not what the build writes")


def test_the_check_command_prints_seconds_all_problems_and_what_is_stale(tmp_path, capsys):
    root = copy_course(tmp_path)
    assert build_command.main(["--check", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\d\.\d s  notebooks/00_hello\n", out) and "0 problems in 2 chapters" in out
    for name in ("00_hello", "01_slots"):
        edit(root / f"notebooks/src/{name}.py", "# # 0", "# # Chapter 0")
    (root / "minikv").mkdir()  # a package without the module that chapter 01 had loaded
    assert build_command.main(["--check", "--root", str(root)]) == 1
    out = capsys.readouterr().out
    assert "2 problems in 2 chapters" in out
    assert (
        "notebooks/01_slots  (built before minikv.classroom, minikv.classroom.arc changed)" in out
    )
    assert build_command.main(["0", "--check", "--root", str(root)]) == 1
    assert "1 problem in 1 chapter" in capsys.readouterr().out


def test_an_empty_course_is_clean(tmp_path):
    assert check_course(tmp_path) == []


def test_no_kernel_outlives_its_notebook(tmp_path):
    """Each holds a gigabyte; all those of a build stayed to its end."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import os; os.getpid()")])
    (tmp_path / "notebooks").mkdir()
    execute(notebook, tmp_path, "any")
    assert not psutil.pid_exists(int(notebook.cells[0].outputs[0].data["text/plain"]))
