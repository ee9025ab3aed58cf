"""The linter and the formatter have nothing to say."""

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
