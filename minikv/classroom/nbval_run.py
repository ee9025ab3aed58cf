"""Runs one notebook under nbval, in a process of its own, and returns every cell's result."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from minikv.classroom.execute import kernel_environment
from minikv.classroom.files import CourseError, read_notebook


def run_nbval(path, root, compare="all", cell_seconds=60):
    """{cell id: {"outcome": "passed" | "failed", "kind", "message", ...}} for each code cell.

    `compare` is `all` (every output, as stored) or `tagged` (those of check cells). A cell that the
    run never reached is `failed` with kind `not run`.
    """
    path = Path(path).resolve()
    ids = [c.get("id") for c in read_notebook(path).cells if c.cell_type == "code"]
    with tempfile.TemporaryDirectory(prefix="minikv-nbval-") as scratch:
        report, config = Path(scratch, "report"), Path(scratch, "pytest.ini")
        config.write_text("[pytest]\n")  # whatever configuration lies around is not for this run
        command = [
            *[sys.executable, "-m", "pytest", "-q", "--color=no", "-c", str(config)],
            *["-p", "nbval.plugin", "-p", "minikv.classroom.nbval_plugin"],
            *["-p", "no:cacheprovider", "-p", "no:python"],
            *["--nbval" if compare == "all" else "--nbval-lax", "--nbval-current-env"],
            *[f"--nbval-cell-timeout={cell_seconds}", str(path)],
        ]
        env = kernel_environment(root, scratch)
        env.update(MINIKV_NBVAL_REPORT=str(report), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        # Beyond what the cells may take one by one, something hangs that nothing here foresaw.
        text = _run(command, env, limit=120 + (cell_seconds + 15) * len(ids))
        lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    results = {result["id"]: result for result in map(json.loads, lines)}
    if ids and not results:
        raise CourseError(f"pytest could not run {path}:\n{text}")
    missing = {"outcome": "failed", "kind": "not run", "message": "not run"}
    return {cell_id: results.get(cell_id, missing) for cell_id in ids}


def _run(command, env, limit):
    """The process's output; past the limit it is killed with all that it started."""
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        _kill(process)
        return process.communicate()[0]
    except BaseException:  # Ctrl-C does not reach a session of its own
        _kill(process)
        raise


def _kill(process):
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
