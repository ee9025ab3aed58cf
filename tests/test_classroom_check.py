"""`check`: each way in which a learner's notebook, or nbval, could mislead."""

import json
import time

import nbformat
import pytest
from classroom_course import built_course, copy_course, edit

from minikv.classroom import check as check_module
from minikv.classroom import work
from minikv.classroom.check import check_notebook
from minikv.classroom.files import CourseError
from minikv.classroom.submission import merge, read_submission
from minikv.commands import check as check_command
from minikv.commands import work as commands

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


LOUD = """import os, sys, threading
import matplotlib.pyplot as plt
sys.stdout.writelines(["one", "two"])
def num_blocks(num_tokens):
    thread = threading.Thread(target=print, args=["from a thread"])
    thread.start()
    thread.join()
    threading.Timer(0.01, lambda: print("later")).start()
    sys.stdout.writelines(["1 1"])
    os.write(1, b"1 1")
    os.system("echo 1 1")
    plt.plot([1, 2])
    return -(-num_tokens // BLOCK_SIZE)
"""


def test_what_an_answer_prints_does_not_count_however_it_is_made(tmp_path):
    """From a thread, by writelines, past Python, a figure left open, another stream left behind."""
    answer = "import io, sys\nsys.stdout = io.StringIO()\n" + RIGHT_2
    nb = notebook(ex_1_1=LOUD, ex_1_2=answer)
    add(nb, "setup", "undefined_name\nprint('x')")
    verdicts, _ = run(nb, tmp_path)
    assert (verdicts["1.1"], verdicts["1.2"]) == (("passed", ""), ("passed", ""))


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
    nb = notebook(ex_1_1=f"sum = 0\nfrom pprint import pprint as print\n{RIGHT_1}")
    assert merge(shipped, read(nb, tmp_path)).overwritten == {"print"}  # no check uses sum


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
    assert verdicts["1.2"] == ("passed", "")  # the others run again without it


@pytest.mark.parametrize("loop", [
    "    while True: pass",
    "    try:\n        while True: pass\n    except KeyboardInterrupt: return -(-num_tokens // 16)",
    "    while True:\n        try: pass\n        except: pass",
])  # fmt: skip
def test_after_an_endless_loop_the_other_exercises_are_still_checked(tmp_path, loop):
    answer = f"def num_blocks(num_tokens):\n{loop}"
    verdicts, _ = run(notebook(ex_1_1=answer, ex_1_2=RIGHT_2), tmp_path, cell_seconds=2)
    assert verdicts["1.1"] == ("not right yet", "ran longer than 2 s; does a loop never end?")
    assert verdicts["1.2"][0] == "passed"


@pytest.mark.parametrize("leave", ["quit()", "import sys; sys.exit()"])
def test_leaving_is_not_passing(tmp_path, leave):
    said = ("not right yet", "called exit(); a notebook's cell must not")
    nb = notebook(ex_1_1=f"{RIGHT_1}\n{leave}", ex_1_2=RIGHT_2)
    add(nb, "setup", leave)
    verdicts, others = run(nb, tmp_path)
    assert (verdicts["1.1"], verdicts["1.2"], others) == (said, ("passed", ""), [])
    inside = f"def num_blocks(num_tokens):\n    {leave}"
    verdicts, _ = run(notebook(ex_1_1=inside, ex_1_2=RIGHT_2), tmp_path)
    assert (verdicts["1.1"], verdicts["1.2"]) == (said, ("passed", ""))


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


def test_an_error_in_a_library_names_the_learners_line(tmp_path):
    library = "import json\ndef num_blocks(num_tokens):\n    return json.loads('{')"
    nested = "import functools\ndef inner(x): return x.nothing\ndef unused_slots(num_tokens):\n"
    nested += "    return functools.reduce(lambda a, b: inner(a), [1, 2])"
    verdicts, _ = run(notebook(ex_1_1=library, ex_1_2=nested), tmp_path)
    assert verdicts["1.1"][1] == (
        "JSONDecodeError: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)\n(line 3: return json.loads('{'))"
    )
    assert verdicts["1.2"][1].endswith("(line 2: def inner(x): return x.nothing)")


def test_an_answer_that_takes_gigabytes_is_stopped_and_the_others_are_checked(tmp_path):
    takes = "def num_blocks(num_tokens):\n    import itertools; return list(itertools.count())"
    verdicts, _ = run(notebook(ex_1_1=takes, ex_1_2=RIGHT_2), tmp_path, cell_seconds=200)
    assert verdicts["1.1"] == ("not right yet", "took more than 3 GiB of memory")
    assert verdicts["1.2"] == ("passed", "")


def test_a_cell_of_ones_own_that_ends_the_kernel_costs_no_verdict(tmp_path):
    nb = notebook(ex_1_1=RIGHT_1, ex_1_2=RIGHT_2)
    add(nb, "check-1-1", "import os; os._exit(1)")
    verdicts, others = run(nb, tmp_path)
    assert (verdicts["1.1"], verdicts["1.2"]) == (("passed", ""), ("passed", ""))
    assert others == ["a cell of your own failed: the kernel died"]


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


SHAPES = {  # how the answer stands in the notebook -> its cells' sources
    "split within the function": ["def num_blocks(num_tokens):", "    return -(-num_tokens // 16)"],
    "split behind a helper": ["def up(n):\n    return -(-n // 16)",
                              "def num_blocks(num_tokens):\n    return up(num_tokens)"],
    "in three parts": ["import math", "def num_blocks(num_tokens):\n    n = num_tokens / 16",
                       "    return math.ceil(n)"],
    "after an earlier try that breaks off": [f"{WRONG_1} (", RIGHT_1],
    "after a whole earlier try": [WRONG_1, RIGHT_1],
}  # fmt: skip


@pytest.mark.parametrize("keep", ["id", "grade_id", "both"])
@pytest.mark.parametrize("shape", SHAPES)
def test_of_an_answer_in_several_cells_all_count_in_order(tmp_path, shape, keep):
    nb = notebook()
    place = [cell.id for cell in nb.cells].index("ex-1-1")
    raw = json.loads(nbformat.writes(nb))
    cells = [dict(raw["cells"][place], source=source) for source in SHAPES[shape]]
    for number, cell in enumerate(cells):
        cell["metadata"] = {} if keep == "id" else cell["metadata"]
        cell["id"] = f"new-{number}" if keep == "grade_id" else cell["id"]
    raw["cells"][place : place + 1] = cells
    path = tmp_path / "01_slots.ipynb"
    path.write_text(json.dumps(raw))
    merged = merge(notebook(), read_submission(path)[0])
    ids = [cell.id for cell in merged.notebook.cells]
    check = ids.index("check-1-1")
    namespace = {"BLOCK_SIZE": 16}
    for cell in merged.notebook.cells[ids.index("setup") : check]:
        if cell.cell_type == "code":
            exec(cell.source, namespace)
    assert [namespace["num_blocks"](n) for n in (1, 16, 17)] == [1, 1, 2]
    assert not merged.missing


def test_of_copies_of_a_cell_the_last_edited_one_counts(tmp_path):
    nb = notebook()
    place = [cell.id for cell in nb.cells].index("ex-1-1")
    for number, source in enumerate((WRONG_1, RIGHT_1, nb.cells[place].source)):
        copy = nb.cells[place].copy()
        copy.update(id=f"copy{number}", source=source)
        nb.cells.append(copy)
    assert merged_sources(nb, tmp_path)[0]["ex-1-1"] == RIGHT_1


def test_a_cell_below_a_check_does_not_run_before_it_unless_it_is_a_helper(tmp_path):
    nb = notebook(ex_1_1="def num_blocks(num_tokens):\n    return up(num_tokens)", ex_1_2=RIGHT_2)
    for source in ("num_blocks = 3", "BLOCK_SIZE = 8", "num_blocks(5)", "num_blocks.x = 1",
                   "def up(n):\n    return -(-n // 16)", "def up(n):\n    return 0", "del math",
                   "for math in (1,): pass")[::-1]:  # fmt: skip
        add(nb, "check-1-1", source)
    add(nb, "ex-1-2", "num_blocks = 0")  # above the check of its own exercise
    merged = merge(notebook(), read(nb, tmp_path))
    order = [c.source.splitlines()[0] if c.id.startswith("extra") else c.id
             for c in merged.notebook.cells if c.cell_type == "code"]  # fmt: skip
    assert order == [
        "setup", "ex-1-1", "def up(n):", "check-1-1", "num_blocks = 3", "BLOCK_SIZE = 8",
        "num_blocks(5)", "num_blocks.x = 1", "def up(n):", "del math", "for math in (1,): pass",
        "ex-1-2", "num_blocks = 0", "check-1-2",
    ]  # fmt: skip
    helpers = [c.source for c in merged.notebook.cells if c.source.startswith("def up")]
    assert helpers[0].endswith("// 16)") and helpers[1].endswith("return 0")


@pytest.mark.parametrize("source", ["", "  \n", "# later", "# a\n\n  # b\n"])
def test_an_emptied_answer_is_not_yet_done(tmp_path, source):
    merged = merge(notebook(), read(notebook(ex_1_1=source), tmp_path))
    sources = {cell.id: cell.source for cell in merged.notebook.cells}
    assert "NotImplementedError" in sources["ex-1-1"] and not merged.missing
    nb = notebook(ex_1_1=source)
    add(nb, "check-1-1", RIGHT_1)  # ... unless it stands in a cell of its own
    merged = merge(notebook(), read(nb, tmp_path))
    assert {cell.id: cell.source for cell in merged.notebook.cells}["ex-1-1"] == RIGHT_1


@pytest.mark.parametrize("kind", ["markdown", "raw"])
def test_an_answer_that_is_no_code_now_is_named_so(tmp_path, kind):
    nb = notebook(ex_1_1=RIGHT_1)
    for cell in nb.cells:
        if cell.id == "ex-1-1":
            cell.cell_type = kind
            del cell["outputs"], cell["execution_count"]
    merged = merge(notebook(), read(nb, tmp_path))
    verdict = check_module._verdicts(merged, {})[0]
    assert verdict.status == "not yet done"
    assert verdict.message == (
        f"its answer cell is {kind.capitalize()} now; make it Code again (in JupyterLab: Esc, Y)"
    )


WORDS = "At most one block stands partly empty."


@pytest.mark.parametrize("where", ["below", "code below", "in its place", "two cells", "split"])
def test_a_written_answer_is_found_where_people_write_it(tmp_path, where):
    nb = notebook()
    place = [cell.id for cell in nb.cells].index("written-1-3")
    new = nbformat.v4.new_markdown_cell
    if where == "in its place":
        nb.cells[place] = new(WORDS)
    elif where == "split":
        nb.cells[place].source = WORDS[:20]
        nb.cells.insert(place + 1, new(WORDS[20:], metadata=nb.cells[place].metadata))
    elif where == "code below":
        nb.cells.insert(place + 1, nbformat.v4.new_code_cell(WORDS))
    elif where == "two cells":
        nb.cells[place + 1 : place + 1] = [new(WORDS[:10]), new(WORDS[10:])]
    else:
        nb.cells.insert(place + 1, new(WORDS))
    merged = merge(notebook(), read(nb, tmp_path))
    assert merged.written == {"written-1-3"}
    found = {cell.id: cell.source for cell in merged.notebook.cells}["written-1-3"]
    assert "".join(WORDS.split()) in "".join(found.split())


def test_a_note_elsewhere_is_no_written_answer(tmp_path):
    nb = notebook()
    nb.cells.insert(3, nbformat.v4.new_markdown_cell("A note of my own that is long enough."))
    assert merge(notebook(), read(nb, tmp_path)).written == set()


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
    assert check_command.main([str(path), "--root", str(built_course())]) == 1
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
    assert check_command.main([str(tmp_path / "no.ipynb"), "--root", str(built_course())]) == 1
    (tmp_path / "other.ipynb").write_text('{"cells": []}')
    assert check_command.main([str(tmp_path / "other.ipynb"), "--root", str(built_course())]) == 1
    assert check_command.main(["7", "--root", str(built_course())]) == 1
    error = capsys.readouterr().err
    for text in ("does not exist", "belongs to no chapter", "no chapter '7'; there are: 01_slots"):
        assert text in error


@pytest.mark.parametrize("renamed", [False, True])
def test_the_chapter_is_told_from_its_exercises_at_once(tmp_path, renamed, capsys, monkeypatch):
    monkeypatch.setattr(check_module, "run_nbval", None)  # nothing runs
    path = built_course() / "notebooks/01_slots.ipynb"
    if renamed:
        path = tmp_path / "01_slots-Copy1.ipynb"
        path.write_bytes((built_course() / "notebooks/01_slots.ipynb").read_bytes())
    assert check_command.main([str(path), "--root", str(built_course())]) == 1
    error = capsys.readouterr().err
    assert f"{path} is the chapter, not its exercises; python -m minikv start 01" in error
    for wanted in ("1.2", "1-2", "1.2b"):
        assert check_command.main([wanted, "--root", str(built_course())]) == 1
        assert f"{wanted} is an exercise; all of its chapter are checked at once: python -m " in (
            capsys.readouterr().err
        )


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
    assert check_command.main(["1", "--root", str(root)]) == 0
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
    for cell in nb.cells:
        cell.metadata = {}
    nb.nbformat_minor = 4
    path.write_text(json.dumps(nb))
    for exercise in ("1.2", "1.1"):  # found by their text and names, so nothing stands there twice
        work.reset(root, "01", exercise)
    fresh = nbformat.read(path, as_version=4)
    nbformat.validate(fresh)
    shipped = work.pristine_exercise(root, "01_slots").cells
    assert [c.source for c in fresh.cells] == [c.source for c in shipped]
    work.reset(root, "01")
    assert path.read_bytes() == (root / "exercises/01_slots.ipynb").read_bytes()
    assert len(list((root / "work/backup").iterdir())) == 5
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
        assert commands.main_reset(["1", "1.1", "--root", str(root)]) == status
    assert commands.main_reset(["1", "1.1", "--yes", "--root", str(root)]) == 0
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
