"""`start`, `check`, `reset`, `progress`, `build` where something is in the way: one line each."""

import json

import pytest
from classroom_course import built_course, copy_course

from minikv.classroom import work
from minikv.classroom.files import CourseError, course_root
from minikv.commands import build as build_command
from minikv.commands import work as commands


@pytest.fixture
def root(tmp_path):
    return copy_course(tmp_path)


def one_line(capsys, main, *argv):
    assert main(list(argv)) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_a_file_where_a_folder_belongs(root, capsys):
    (root / "work").write_text("")
    where = ["--root", str(root)]
    for main, argv in ((commands.main_start, ["1"]), (commands.main_reset, ["1", "--yes"])):
        assert f"{root / 'work'} is not a folder" in one_line(capsys, main, *argv, *where)
    (root / "work").unlink()
    work.start(root, "1")
    (root / "work" / "backup").write_text("")
    text = one_line(capsys, commands.main_reset, "1", "--yes", *where)
    assert f"{root / 'work' / 'backup'} is not a folder" in text


def test_a_folder_where_the_notebook_belongs(root, capsys):
    path = root / "work" / "01_slots.ipynb"
    path.mkdir(parents=True)
    where = ["--root", str(root)]
    for main, argv in ((commands.main_start, ["1"]), (commands.main_reset, ["1", "--yes"])):
        assert f"{path} is a folder" in one_line(capsys, main, *argv, *where)
    with pytest.raises(CourseError, match="is a folder"):
        work.find_notebook("01", root)
    assert "cannot be read" in work.progress(root)[0]


@pytest.mark.parametrize("content", [
    "{", "[]", '{"01_slots": 5}', '{"01_slots": {"statuses": 3}}', '{"01_slots": {"statuses": {}}}',
    '{"01_slots": {"statuses": {}, "modified": "now"}}',
])  # fmt: skip
def test_a_damaged_record_is_none(root, content):
    path, _ = work.start(root, "1")
    (root / "work" / work.RECORD).write_text(content)
    assert work._records(root) == {}
    assert "01_slots" in work.progress(root)[0]
    work.record(root, path, "01_slots", {"1.1": "passed"})
    assert json.loads((root / "work" / work.RECORD).read_text()).keys() == {"01_slots"}


def test_a_record_that_cannot_be_written_costs_no_verdicts(root, capsys):
    path, _ = work.start(root, "1")
    (root / "work" / work.RECORD).mkdir()
    work.record(root, path, "01_slots", {"1.1": "passed"})
    assert "progress will not know of it" in capsys.readouterr().err


def test_what_check_is_given(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CourseError, match="is a folder; name a notebook in it"):
        work.find_notebook(str(tmp_path), root)
    with pytest.raises(CourseError, match="no chapter ''; there are: 01_slots"):
        work.find_notebook("", root)
    (tmp_path / "x.ipynb").mkdir()
    with pytest.raises(CourseError, match=r"x\.ipynb is a folder"):
        work.find_notebook("x.ipynb", root)
    path, _ = work.start(root, "1")
    (tmp_path / "01").mkdir()  # of that name, but no notebook
    assert work.find_notebook("01", root) == path


# --- --root ------------------------------------------------------------------------------------


@pytest.mark.parametrize("main", [commands.main_progress, build_command.main])
def test_a_root_that_is_no_course(tmp_path, capsys, main):
    assert "there is no folder /nope" in one_line(capsys, main, "--root", "/nope")
    assert "holds no course" in one_line(capsys, main, "--root", str(tmp_path))


def test_a_root_is_absolute(monkeypatch):
    """A kernel works in another folder, and finds minikv by it."""
    monkeypatch.chdir(built_course().parent)
    assert course_root(built_course().name) == built_course().resolve()
