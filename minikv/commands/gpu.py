"""`python -m minikv test-gpu`: what only an NVIDIA GPU can show, on the Python that runs it.

Nothing is installed and nothing fetched. The parts: the checks of tests/gpu_checks.py (backends
against float64; in float32, output equal to the dense cache's token for token), the chapters that
run on whatever device there is, and `bench kernel`. Exit status: 0 if nothing failed, which is
also so where there is no GPU and nothing was tested (the last line and the JSON's status say it);
1 if something failed, or a GPU is there and the packages for testing it are not.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

from minikv.commands import steps

CHAPTERS = ("00", "01", "05")
JUPYTER = ("nbformat", "nbclient", "ipykernel", "jupytext")
ENGINE = ("transformers", "numpy", "psutil", "tqdm")


def why_nothing_runs():
    """Why there is nothing to test here; None where there is a GPU."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no PyTorch"
    import torch

    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no CUDA GPU"
    return None


def missing(packages):
    return [name for name in packages if importlib.util.find_spec(name) is None]


def part(name, status, reason=None, **more):
    return {"part": name, "status": status, "reason": reason, **more}


def command(arguments):
    """Runs Python with these arguments and --json, its output shown. Returns (exit status, what it
    wrote, or None)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        paths = [str(steps.ROOT), os.environ.get("PYTHONPATH", "")]
        environ = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))
        status = steps.run([sys.executable, *arguments, "--json", file], environ=environ)
        return status, json.loads(file.read_text("utf-8")) if file.is_file() else None


def checks(model):
    script = steps.ROOT / "tests" / "gpu_checks.py"
    status, parts = command([script, *(["--model", model] if model else [])])
    if parts is None:
        return [part("checks", "failed", f"ended with exit status {status}; the reason is above")]
    return parts


def chapter(number, root):
    """Executes the chapter as it is built; its file is left as it is."""
    name = f"chapter {number}"
    paths = sorted(Path(root, "notebooks").glob(f"{number}_*.ipynb"))
    if not paths:
        return part(name, "not run", "there is no such notebook yet")
    if missing(JUPYTER):
        return part(name, "not run", f"not installed: {', '.join(missing(JUPYTER))}")
    from minikv.classroom.execute import execute
    from minikv.classroom.source import CourseError, read_notebook
    from minikv.model.fetch import is_fetched

    if not is_fetched():
        return part(name, "not run", "the default model is not here (make lab fetches it)")
    try:
        seconds, _ = execute(read_notebook(paths[0]), root, paths[0].stem)
    except CourseError as error:
        print(error)
        return part(name, "failed", str(error).splitlines()[0])
    return part(name, "passed", seconds=seconds)


def kernel():
    status, result = command(["-m", "minikv", "bench", "kernel"])
    if result is None:
        return part("bench kernel", "failed", f"ended with exit status {status}")
    said = {"run": "passed"}.get(result["status"], result["status"])
    return part("bench kernel", said, result["reason"], result=result)


def main(argv):
    parser = argparse.ArgumentParser(
        prog="python -m minikv test-gpu",
        description=__doc__.partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", metavar="PATH", help="also compare this checkpoint's output with its dense cache"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there, too")
    args = parser.parse_args(argv)
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        parser.error(f"--json {args.json!r}: there is no such folder")
    result = test(args.model)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if result["status"] == "failed" else 0


def test(model=None):
    """{"status", "reason", "parts": [{"part", "status", "reason", ...}]}, where each status is
    "passed", "failed" or "not run". What passed may have parts that were not run: `reason` counts
    them."""
    reason = why_nothing_runs()
    if reason is not None:
        print(f"NOT RUN: {reason}. Nothing was tested.")
        return {"status": "not run", "reason": reason, "parts": []}
    if missing(ENGINE):
        reason = f"{sys.executable} has no {', '.join(missing(ENGINE))}"
        print(f"FAILED: {reason}. Nothing was tested.")
        return {"status": "failed", "reason": reason, "parts": []}
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    parts = checks(model)
    for number in CHAPTERS:
        print(f"-- chapter {number}", flush=True)
        parts.append(chapter(number, steps.ROOT))
    print("-- bench kernel", flush=True)
    parts.append(kernel())

    print()
    for entry in parts:
        print(f"{entry['status']:8} {entry['part']:16} {entry['reason'] or ''}")
    count = {s: sum(p["status"] == s for p in parts) for s in ("passed", "failed", "not run")}
    text = ", ".join(f"{number} {status}" for status, number in count.items() if number)
    status = "failed" if count["failed"] or not count["passed"] else "passed"
    print(f"{status.upper()}: {text}")
    return {"status": status, "reason": text, "parts": parts}


test.__test__ = False  # not one of pytest's
