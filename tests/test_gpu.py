"""`python -m minikv test-gpu`, without a GPU: what it says then, and that its program works."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import gpu_checks
import nbformat
import pytest
import torch

from minikv import __main__
from minikv.commands import gpu, steps

HAS_TRITON = importlib.util.find_spec("triton") is not None


def test_without_a_gpu_nothing_is_tested_and_that_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "gpu.json"
    assert __main__.main(["test-gpu", "--json", str(file)]) == 0
    assert "NOT RUN: PyTorch" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["status"] == "not run" and "sees no CUDA GPU" in result["reason"]
    assert result["parts"] == []


def test_a_python_without_pytorch_says_so_and_installs_nothing():
    script = "import sys; sys.path.insert(0, sys.argv[1]); from minikv.commands import gpu; "
    script += "sys.exit(gpu.main([]))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(steps.ROOT)],
        capture_output=True, text=True, cwd=os.sep,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "NOT RUN" in done.stdout and "has no PyTorch. Nothing was tested." in done.stdout


@pytest.fixture
def with_gpu(monkeypatch):
    """As if a GPU were there; what the commands would write is given."""
    monkeypatch.setattr(gpu, "why_nothing_runs", lambda: None)
    monkeypatch.setattr(gpu, "chapter", lambda number, root: gpu.part(number, "not run", "no"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # restored afterwards
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    writes = {"gpu_checks.py": [gpu.part("identity", "passed")], "bench": {"status": "run"}}
    writes["bench"]["reason"] = None

    def run(command, **environ):
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        text = " ".join(map(str, command))
        name = "bench" if "bench kernel" in text else "gpu_checks.py"
        assert name in text
        if writes[name] is None:
            return 139
        command[-1].write_text(json.dumps(writes[name]))
        return 0

    monkeypatch.setattr(steps, "run", run)
    return writes


def test_all_parts_are_gathered(with_gpu, capsys):
    result = gpu.test()
    assert result["status"] == "passed" and result["reason"] == "2 passed, 3 not run"
    assert [p["part"] for p in result["parts"]] == ["identity", "00", "01", "05", "bench kernel"]
    assert "PASSED: 2 passed, 3 not run" in capsys.readouterr().out


@pytest.mark.parametrize("which", ["gpu_checks.py", "bench"])
@pytest.mark.parametrize("how", ["it fails", "it dies"])
def test_a_part_that_fails_or_dies_is_a_failure(with_gpu, which, how):
    failure = {"status": "failed", "reason": "wrong"}
    failure = [gpu.part("identity", **failure)] if which == "gpu_checks.py" else failure
    with_gpu[which] = failure if how == "it fails" else None
    assert gpu.main([]) == 1


def test_a_gpu_without_the_packages_is_a_failure(with_gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "missing", lambda packages: ["transformers"])
    assert gpu.main([]) == 1
    assert "has no transformers. Nothing was tested." in capsys.readouterr().out


def test_chapters_are_executed_and_left_as_they_are(monkeypatch, tmp_path, capsys):
    from minikv.model import fetch

    monkeypatch.setattr(fetch, "is_fetched", lambda: True)
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name, code in (("00_good", "assert 1 + 1 == 2"), ("01_bad", "assert 1 + 1 == 3")):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
        nbformat.write(notebook, folder / f"{name}.ipynb")
    before = [path.read_bytes() for path in sorted(folder.iterdir())]
    assert gpu.chapter("00", tmp_path)["status"] == "passed"
    bad = gpu.chapter("01", tmp_path)
    assert bad["status"] == "failed" and "01_bad: cell" in bad["reason"]
    assert "assert 1 + 1 == 3" in capsys.readouterr().out
    assert [path.read_bytes() for path in sorted(folder.iterdir())] == before
    assert gpu.chapter("05", tmp_path)["status"] == "not run"
    monkeypatch.setattr(fetch, "is_fetched", lambda: False)
    assert "default model is not here" in gpu.chapter("00", tmp_path)["reason"]


# -- the checks -----------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_the_checks_in_small(tmp_path):
    """The whole program on the CPU, the kernel interpreted, little of each."""
    file = tmp_path / "checks.json"
    done = subprocess.run(
        [sys.executable, "tests/gpu_checks.py", "--device", "cpu", "--small", "--json", file],
        cwd=steps.ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(steps.ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = {part["part"]: part["status"] for part in json.loads(file.read_text())}
    assert parts.pop("checkpoint") == "not run"
    assert parts == dict.fromkeys(("backends", "splits", "far_slots", "identity"), "passed")
    assert "8 sequences equal, 0 of them up to a near tie" in done.stdout


SMALL = SimpleNamespace(
    device=torch.device("cpu"), backends=["gather"], seeds=1, tokens=8, prompts=(4,),
    families=("Llama",), block_sizes=(4,), model="tiny",
)  # fmt: skip


def spoiled(attend):
    def wrong(query, pool, metadata, **options):
        return attend(query, pool, metadata, **options | {"scaling": options["scaling"] * 1.5})

    return wrong


@pytest.mark.parametrize("name", ["backends", "identity", "checkpoint"])
def test_a_check_sees_a_wrong_backend(monkeypatch, name):
    from minikv.model import probe
    from minikv.model.kernels import gather

    assert gpu_checks.run(name, SMALL)["status"] == "passed"
    monkeypatch.setattr(gather, "attend", spoiled(gather.attend))
    monkeypatch.setattr(probe, "TOLERANCE", dict.fromkeys(probe.TOLERANCE, 1e9))
    failed = gpu_checks.run(name, SMALL)
    assert failed["status"] == "failed" and failed["reason"]


def test_what_cannot_run_is_no_pass():
    for name in ("splits", "far_slots"):
        assert gpu_checks.run(name, SMALL)["status"] == "not run"
    without = SimpleNamespace(**{**vars(SMALL), "model": None})
    assert gpu_checks.run("checkpoint", without)["reason"] == "no --model was given"
