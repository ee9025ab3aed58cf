"""The small course under tests/data/course, built once and copied for each test that changes it."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from minikv.classroom.build import build_chapter
from minikv.classroom.source import chapter_names

SOURCES = Path(__file__).parent / "data" / "course"


@functools.cache
def built_course():
    """The built course's folder; read-only for tests."""
    root = Path(tempfile.mkdtemp(prefix="minikv-course-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    shutil.copytree(SOURCES, root, dirs_exist_ok=True)
    for name in chapter_names(root):
        build_chapter(root, name)
    return root


def copy_course(folder):
    """A built course of one's own."""
    shutil.copytree(built_course(), folder, dirs_exist_ok=True)
    return Path(folder)


def edit(path, old, new):
    """Replaces a text that must be there."""
    text = path.read_text(encoding="utf-8")
    if old not in text:
        raise AssertionError(f"{old!r} is not in {path}")
    path.write_text(text.replace(old, new), encoding="utf-8")


@functools.cache
def harness_course():
    """As built_course, for the chapter whose checks use minikv.classroom.harness; read-only."""
    root = Path(tempfile.mkdtemp(prefix="minikv-harness-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    shutil.copytree(SOURCES.parent / "course_harness", root, dirs_exist_ok=True)
    (root / "notebooks" / "src").mkdir(parents=True, exist_ok=True)
    build_chapter(root, "02_blocks")
    return root
