"""The linter and the formatter have nothing to say, and no file of the package is long."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "command", [("check", "."), ("format", "--check", "minikv", "tests")], ids=["lint", "format"]
)
def test_ruff_is_content(command):
    # Beside this interpreter, as pip installs it; its own cache would be written into the tree.
    ruff = [sys.executable, "-m", "ruff", *command, "--no-cache"]
    done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


MAX_LINES = 400
LONGER = {  # one kernel for four instruction sets
    "model/kernels/cpu.cpp": 450,
}


def test_no_file_of_the_package_is_long():
    """A module is read from top to bottom."""
    package, long = ROOT / "minikv", {}
    files = [path for path in package.rglob("*") if path.is_file()]
    for path in files:
        if "__pycache__" not in path.parts:
            name = path.relative_to(package).as_posix()
            num_lines = len(path.read_text(encoding="utf-8").splitlines())
            if num_lines > LONGER.get(name, MAX_LINES):
                long[name] = num_lines
    assert len(files) > 50
    assert not long, f"over {MAX_LINES} lines: {long}"
