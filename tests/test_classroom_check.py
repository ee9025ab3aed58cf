"""`check`: each way in which a learner's notebook, or nbval, could mislead."""

import json
import time

import nbformat
import pytest
from classroom_course import built_course, copy_course, edit

from minikv.classroom import check as check_module
from minikv.classroom import work
from minikv.classroom.check import check_notebook
from minikv.classroom.source import CourseError
from minikv.classroom.submission import merge, read_submission

RIGHT_1 = "def num_blocks(num_tokens):\n    return (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE"
RIGHT_2 = "def unused_slots(num_tokens):\n    return -num_tokens % BLOCK_SIZE"
WRONG_1 = "def num_blocks(num_tokens):\n    return num_tokens // BLOCK_SIZE"


def notebook(**answers):
    """The exercise with some cells' sources replaced: `ex_1_1="def ..."`."""
    nb = nbformat.read(built_course() / "exercises/01_slots.ipynb", as_version=4)
    for cell in nb.cells:
        cell.source = answers.get(cell.id.replace("-", "_"), cell.source)
    return nb


def add(nb, after, source):
    """A code cell of the learner's own, behind the cell `after`."""
    place = [cell.id for cell in nb.cells].index(after)
    nb.cells.insert(place + 1, nbformat.v4.new_code_cell(source))


def read(nb, tmp_path):
    path = tmp_path / "01_slots.ipynb"
    path.write_text(nbformat.writes(nb), encoding="utf-8")
    return read_submission(path)[0]


def run(nb, tmp_path, cell_seconds=30):
    """{exercise: (status, message)} and the other failures."""
    path = tmp_path / "01_slots.ipynb"
    path.write_text(nbformat.writes(nb), encoding="utf-8")
    _, verdicts, others = check_notebook(path, built_course(), cell_seconds)
    return {v.exercise: (v.status, v.message) for v in verdicts}, others


def test_right_answers_pass_whatever_else_the_notebook_holds(tmp_path):
    nb = notebook(ex_1_2=RIGHT_2, written_1_3="At most one block stands partly empty.")
    for cell in nb.cells:
        if cell.id == "ex-1-1":  # a helper in a cell of its own, then the answer
            cell.source = "def num_blocks(num_tokens):\n    return helper(num_tokens)"
    add(nb, "ex-1-1", "def helper(n):\n    return -(-n // BLOCK_SIZE)")
    add(nb, "check-1-1", "undefined_name  # an experiment that fails")
    verdicts, others = run(nb, tmp_path)
    assert verdicts["1.1"] == ("passed", "")
    assert verdicts["1.2"] == ("passed", "")
    assert verdicts["1.3"][0] == "written"
    assert others == []


def test_the_checks_own_message_is_shown_although_the_expected_output_was_overwritten(tmp_path):
    nb = notebook(ex_1_1=WRONG_1, ex_1_2=RIGHT_2, check_1_1="print('all good')")
    for cell in nb.cells:
        if cell.id.startswith("check"):
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text="0 0\n1 0\n")]
    verdicts, _ = run(nb, tmp_path)
    assert verdicts["1.1"][0] == "not right yet"
    assert verdicts["1.1"][1].startswith("the last block may be partly full: 1 tokens need 1")
    assert verdicts["1.2"][0] == "passed"


def test_a_check_that_only_prints_is_compared_and_shows_the_first_difference(tmp_path):
    answer = "# NBVAL_SKIP\ndef unused_slots(num_tokens):\n    return 16 - num_tokens % 16"
    verdicts, _ = run(notebook(ex_1_1=RIGHT_1, ex_1_2=answer), tmp_path)
    assert verdicts["1.2"] == (
        "not right yet", "printed '16 16' where '16 0' was expected (line 2)",
    )  # fmt: skip


def test_what_an_answer_prints_does_not_count(tmp_path):
    """On a line of its own, amid a check's line, shown, from a helper that is a generator."""
    nb = notebook(
        ex_1_1="print('now')\ndef num_blocks(num_tokens):\n"
        "    display(num_tokens)\n    [got] = helper(num_tokens)\n    return got",
        ex_1_2="def unused_slots(num_tokens):\n    print(num_tokens, 'tokens', end=' ')\n"
        "    return -num_tokens % 16",
    )
    loud = "def helper(n):\n    print('1 1')\n    yield -(-n // 16)\n    print(n)"
    add(nb, "ex-1-1", loud)
    verdicts, _ = run(nb, tmp_path)
    assert (verdicts["1.1"], verdicts["1.2"]) == (("passed", ""), ("passed", ""))
    # Nor do expected lines that it prints itself make it right.
    lines = "def unused_slots(num_tokens):\n    print('1 15\\n16 0\\n17 15')\n    return 7"
    verdicts, _ = run(notebook(ex_1_1=RIGHT_1, ex_1_2=lines), tmp_path)
    assert verdicts["1.2"][1] == "printed '1 7' where '1 15' was expected (line 1)"


@pytest.mark.parametrize(("text", "status"), [
    ("*Exercise 1.3: write your answer here.* ok", "not yet done"),
    ("ok", "not yet done"),
    ("*Exercise 1.3: write your answer here.*\n\nAt most one block is partly empty.", "written"),
])  # fmt: skip
def test_a_word_is_not_a_written_answer(tmp_path, text, status):
    merged = merge(notebook(), read(notebook(written_1_3=text), tmp_path))
    verdict = check_module._verdicts(merged, {})[-1]
    assert (verdict.status, verdict.coded) == (status, False)


def test_an_overwritten_name_is_named_where_it_may_be_the_cause(tmp_path):
    answer = "BLOCK_SIZE = '16'\ndef num_blocks(num_tokens):\n    return -(-num_tokens // 16)"
    verdicts, _ = run(notebook(ex_1_1=answer, ex_1_2=RIGHT_2), tmp_path)
    assert verdicts["1.1"][1].startswith("TypeError: unsupported operand")
    assert "need the name BLOCK_SIZE; your notebook gives it a new" in verdicts["1.1"][1]
    shipped = notebook()
    nb = notebook(ex_1_1=f"import math, os\n{RIGHT_1}")
    add(nb, "ex-1-1", "from cmath import pi as math\nunfinished =")
    add(nb, "ex-1-1", "%time BLOCK_SIZE = 8\nfor BLOCK_SIZE in (1,): pass")
    assert merge(shipped, read(nb, tmp_path)).overwritten == {"BLOCK_SIZE"}


def test_shipped_exercises_are_not_yet_done_and_say_which_other_one_they_need(tmp_path):
    verdicts, others = run(notebook(), tmp_path)
    assert {status for status, _ in verdicts.values()} == {"not yet done"}
    needs = "def unused_slots(num_tokens):\n    return num_blocks(num_tokens) * 16 - num_tokens"
    verdicts, _ = run(notebook(ex_1_2=needs), tmp_path)
    assert verdicts["1.2"][1] == "needs another exercise first: Exercise 1.1: write num_blocks"
    assert others == []


def test_a_dead_kernel_is_noticed_at_once(tmp_path):
    start = time.perf_counter()
    dies = "def num_blocks(num_tokens):\n    import os; os._exit(3)"
    verdicts, _ = run(notebook(ex_1_1=dies, ex_1_2=RIGHT_2), tmp_path, cell_seconds=300)
    assert time.perf_counter() - start < 60
    assert verdicts["1.1"] == ("not right yet", "the kernel died")
    assert verdicts["1.2"] == ("not checked", "the kernel had stopped before it")


@pytest.mark.parametrize("loop", [
    "    while True: pass",
    "    try:\n        while True: pass\n    except KeyboardInterrupt: return -(-num_tokens // 16)",
])  # fmt: skip
def test_after_an_endless_loop_the_other_exercises_are_still_checked(tmp_path, loop):
    answer = f"def num_blocks(num_tokens):\n{loop}"
    verdicts, _ = run(notebook(ex_1_1=answer, ex_1_2=RIGHT_2), tmp_path, cell_seconds=2)
    assert verdicts["1.1"] == ("not right yet", "ran longer than 2 s; does a loop never end?")
    assert verdicts["1.2"][0] == "passed"


@pytest.mark.parametrize("leave", ["exit()", "import sys; sys.exit()"])
def test_leaving_is_not_passing(tmp_path, leave):
    inside = f"def unused_slots(num_tokens):\n    {leave}"
    verdicts, _ = run(notebook(ex_1_1=f"{RIGHT_1}\n{leave}", ex_1_2=inside), tmp_path)
    assert verdicts["1.1"] == ("not right yet", "called exit(); a notebook's cell must not")
    assert verdicts["1.2"][0] == "not right yet"


def test_an_endless_print_is_stopped(tmp_path):
    answer = "def num_blocks(num_tokens):\n    while True: print('x' * 10_000)"
    verdicts, _ = run(notebook(ex_1_1=answer), tmp_path, cell_seconds=300)
    assert verdicts["1.1"] == ("not right yet", "printed more than 2,000,000 bytes")


def test_errors_in_an_answer_name_their_line(tmp_path):
    syntax = "def num_blocks(num_tokens):\n    return num_tokens num_tokens"
    name = "def unused_slots(num_tokens):\n    return block_sise"
    verdicts, _ = run(notebook(ex_1_1=syntax, ex_1_2=name), tmp_path)
    assert verdicts["1.1"][0] == "not right yet"
    assert verdicts["1.1"][1].startswith("SyntaxError: invalid syntax (line 2)")
    assert verdicts["1.2"][1] == (
        "NameError: name 'block_sise' is not defined\n(line 2: return block_sise)"
    )


def test_a_deleted_answer_cell_is_named_with_its_remedy(tmp_path):
    nb = notebook(ex_1_2=RIGHT_2)
    nb.cells = [cell for cell in nb.cells if cell.id != "ex-1-1"]
    verdicts, _ = run(nb, tmp_path)
    assert verdicts["1.1"][0] == "not yet done"
    assert "reset" in verdicts["1.1"][1]
    assert verdicts["1.2"][0] == "passed"


# ------------------------------------------------------------------ reading and merging, no kernel


def merged_sources(nb, tmp_path):
    path = tmp_path / "01_slots.ipynb"
    path.write_text(nbformat.writes(nb), encoding="utf-8")
    shipped = nbformat.read(built_course() / "exercises/01_slots.ipynb", as_version=4)
    merged = merge(shipped, read_submission(path)[0])
    return {cell.id: cell.source for cell in merged.notebook.cells}, merged.missing


def test_answers_are_found_by_grade_id_then_cell_id_then_name(tmp_path):
    for change in ("ids", "metadata", "both"):
        nb = notebook(ex_1_1=RIGHT_1, ex_1_2=RIGHT_2)
        for number, cell in enumerate(nb.cells):
            if change in ("ids", "both"):
                cell.id = f"colab{number}"
            if change in ("metadata", "both"):
                cell.metadata.clear()
        sources, missing = merged_sources(nb, tmp_path)
        assert (sources["ex-1-1"], sources["ex-1-2"], missing) == (RIGHT_1, RIGHT_2, set())
        assert not [i for i in sources if i.startswith("extra")], change


def test_of_copies_of_a_cell_the_last_edited_one_counts(tmp_path):
    nb = notebook()
    place = [cell.id for cell in nb.cells].index("ex-1-1")
    for number, source in enumerate((WRONG_1, RIGHT_1, nb.cells[place].source)):
        copy = nb.cells[place].copy()
        copy.update(id=f"copy{number}", source=source)
        nb.cells.append(copy)
    assert merged_sources(nb, tmp_path)[0]["ex-1-1"] == RIGHT_1


def test_encodings_and_old_formats_are_read(tmp_path):
    text = nbformat.writes(notebook(ex_1_1=RIGHT_1 + "  # größer"))
    text = json.dumps(json.loads(text), ensure_ascii=False)
    path = tmp_path / "01_slots.ipynb"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "latin-1"):
        path.write_text(text, encoding=encoding)
        cells, metadata = read_submission(path)
        assert "größer" in next(c.source for c in cells if c.cell_id == "ex-1-1"), encoding
        assert metadata["minikv"]["chapter"] == "01_slots"
    path.write_text(text.replace("\\n", "\\r\\n"), encoding="utf-8", newline="\r\n")
    assert all("\r" not in cell.source for cell in read_submission(path)[0])
    old = nbformat.v4.downgrade(notebook(ex_1_1=RIGHT_1))
    path.write_text(json.dumps(old), encoding="utf-8")
    assert any(cell.source == RIGHT_1 for cell in read_submission(path)[0])


@pytest.mark.parametrize(("content", "said"), [
    (b"", "is empty"),
    (b'{"cells": [', "not a whole notebook"),
    (b"<<<<<<< HEAD\n{}\n", "merge markers"),
    (b"[1, 2]", "no list of cells"),
    (b'{"cells": 3}', "no list of cells"),
    (b"print(1)", "not a whole notebook"),
    (b'{"worksheets": 1}', "cannot be read"),
])  # fmt: skip
def test_unreadable_files_are_refused_in_plain_words(tmp_path, content, said, capsys):
    path = tmp_path / "01_slots.ipynb"
    path.write_bytes(content)
    assert check_module.main([str(path), "--root", str(built_course())]) == 1
    error = capsys.readouterr().err
    assert said in error and "01_slots.ipynb" in error


def test_odd_cells_are_tolerated(tmp_path):
    path = tmp_path / "01_slots.ipynb"
    odd = [
        {"source": "'\ud83d'"},
        3,
        {},
        {"cell_type": "code", "source": 5, "metadata": []},
        {"source": ["a", 1, "b"]},
    ]
    path.write_text(json.dumps({"cells": odd, "metadata": 7}))
    cells, metadata = read_submission(path)
    assert [cell.source for cell in cells] == ["'?'", "", "", "ab"] and metadata == {}


def test_a_missing_file_or_foreign_notebook_says_so(tmp_path, capsys):
    assert check_module.main([str(tmp_path / "no.ipynb"), "--root", str(built_course())]) == 1
    (tmp_path / "other.ipynb").write_text('{"cells": []}')
    assert check_module.main([str(tmp_path / "other.ipynb"), "--root", str(built_course())]) == 1
    assert check_module.main(["7", "--root", str(built_course())]) == 1
    error = capsys.readouterr().err
    for text in ("does not exist", "belongs to no chapter", "no chapter '7'; there are: 01_slots"):
        assert text in error


def test_working_in_exercises_itself_cannot_change_what_is_expected(tmp_path):
    root = copy_course(tmp_path / "course")
    path = root / "exercises/01_slots.ipynb"
    shipped = path.read_bytes()
    nb = nbformat.reads(shipped.decode(), as_version=4)
    for cell in nb.cells:
        if cell.id == "check-1-2":
            cell.outputs[0].text = "1 1\n"
    path.write_text(nbformat.writes(nb))
    assert (
        work.pristine_exercise(root, "01_slots").cells
        == nbformat.reads(shipped.decode(), as_version=4).cells
    )
    (root / "solutions/01_slots.ipynb").unlink()  # an institution may keep these
    with pytest.raises(CourseError, match="saved over"):
        work.pristine_exercise(root, "01_slots")
    path.write_bytes(shipped)
    work.pristine_exercise(root, "01_slots")


def test_a_solution_saved_over_is_not_trusted_either(tmp_path):
    root = copy_course(tmp_path / "course")
    edit(root / "solutions/01_slots.ipynb", '"1 15\\n"', '"1 14\\n"')
    cells = {cell.id: cell for cell in work.pristine_exercise(root, "01_slots").cells}
    assert cells["check-1-2"].outputs[0].text.startswith("1 15\n")


# ------------------------------------------------------------------------- start, reset, progress


def test_start_check_reset_and_progress(tmp_path, capsys):
    root = copy_course(tmp_path)
    assert work.progress(root) == [f"  {'01_slots':<24} not started"]
    path, new = work.start(root, "1")
    assert new and path == root / "work/01_slots.ipynb"
    nb = nbformat.read(path, as_version=4)
    for cell in nb.cells:
        cell.source = {"ex-1-1": RIGHT_1, "ex-1-2": RIGHT_2}.get(cell.id, cell.source)
    nbformat.write(nb, path)
    assert work.start(root, "01") == (path, False)  # never overwrites answers
    assert check_module.main(["1", "--root", str(root)]) == 0
    line = "2 of 2 coded exercises passed, 0 of 1 written"  # the same count in both
    assert line in capsys.readouterr().out
    assert work.progress(root) == [f"  {'01_slots':<24} {line}"]

    before = path.read_bytes()
    backup = work.reset(root, "01", "1.1")
    assert backup.read_bytes() == before
    sources = {c.id: c.source for c in nbformat.read(path, as_version=4).cells}
    assert "NotImplementedError" in sources["ex-1-1"] and sources["ex-1-2"] == RIGHT_2
    line = "1 of 2 coded exercises passed, 0 of 1 written, edited since the last check"
    assert work.progress(root) == [f"  {'01_slots':<24} {line}"]

    nb = nbformat.read(path, as_version=4)
    nb.cells = [cell for cell in nb.cells if cell.id != "ex-1-2"]
    nbformat.write(nb, path)
    work.reset(root, "01", "1.2")
    order = [c.id for c in nbformat.read(path, as_version=4).cells]
    assert order.index("ex-1-2") == order.index("check-1-2") - 1  # back in its place
    for cell in nb.cells:  # as some editors save it
        cell.pop("id")
    nb.nbformat_minor = 4
    path.write_text(json.dumps(nb))
    work.reset(root, "01", "1.2")
    nbformat.validate(nbformat.read(path, as_version=4))
    work.reset(root, "01")
    assert path.read_bytes() == (root / "exercises/01_slots.ipynb").read_bytes()
    assert len(list((root / "work/backup").iterdir())) == 4
    line = "0 of 2 coded exercises passed, 0 of 1 written"  # as shipped, whatever was recorded
    assert work.progress(root) == [f"  {'01_slots':<24} {line}"]
    path.write_text("{")
    assert work.progress(root)[0].endswith("cannot be read; python -m minikv check 01 says why")


def test_reset_asks_and_names_what_it_does_not_know(tmp_path, monkeypatch, capsys):
    root = copy_course(tmp_path)
    with pytest.raises(CourseError, match="does not exist"):
        work.reset(root, "1")
    work.start(root, "1")
    with pytest.raises(CourseError, match=r"no exercise '1.9'; there are: 1.1, 1.2, 1.3"):
        work.reset(root, "1", "1.9")
    for answer, status in (("n", 1), ("", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert work.main_reset(["1", "1.1", "--root", str(root)]) == status
    assert work.main_reset(["1", "1.1", "--yes", "--root", str(root)]) == 0
    assert "backup" in capsys.readouterr().out


def test_an_exercise_in_two_parts_says_how_many_passed(tmp_path):
    nb = notebook(ex_1_1=RIGHT_1)
    for cell_id, source in (
        ("ex-1-1-b", 'def more():\n    raise NotImplementedError("Exercise 1.1: write more")'),
        ("check-1-1-b", "print(more())"),
    ):
        cell = nbformat.v4.new_code_cell(source, id=cell_id)
        nb.cells.append(cell)
    merged = merge(nb, [])
    results = {cell.id: {"outcome": "passed"} for cell in nb.cells}
    stub = {"outcome": "failed", "kind": "error", "ename": "NotImplementedError"}
    results["check-1-1-b"] = {**stub, "message": "Exercise 1.1: write more"}
    merged.missing.clear()
    first = check_module._verdicts(merged, results)[0]
    assert (first.status, first.message) == ("not yet done", "1 of its 2 parts passed")
