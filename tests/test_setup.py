"""The two commands and the doctor, without a network and without installing anything."""

import ast
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest

from minikv import __main__, machine
from minikv.commands import doctor, environment, fresh, lab, steps, test

PACKAGE = Path(__main__.__file__).parent
SETUP = [
    "commands/__init__.py",
    *(f"commands/{x}.py" for x in ("steps", "environment", "lab", "test")),
]


# --- before anything is installed --------------------------------------------------------------


@pytest.mark.parametrize("file", ["__init__.py", "__main__.py", "commands/fresh.py", *SETUP])
def test_an_old_python_can_read_what_tells_it_that_it_is_old(file):
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"), feature_version=(3, 8))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [n.name for node in top if isinstance(node, ast.Import) for n in node.names]
    names += [node.module for node in top if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "minikv"}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (((3, 8, 18), "Linux", "x86_64", True), "this is Python 3.8.18; the course needs Python"),
        (((3, 10, 0), "Windows", "AMD64", True), "3.11 to 3.14"),
        (((3, 15, 0), "Linux", "x86_64", True), "this is Python 3.15.0"),
        (((3, 12, 1), "Windows", "x86", False), "32-bit"),
        (((3, 12, 1), "Darwin", "x86_64", True), "Intel Macs"),
        (((3, 12, 1), "Windows", "ARM64", True), "Windows on ARM"),
    ],
)
def test_a_python_without_a_pytorch_build_is_refused(found, message):
    with pytest.raises(steps.SetupError, match=message):
        environment.check_python(*found)


@pytest.mark.parametrize(
    "found",
    [
        ((3, 11, 0), "Linux", "x86_64", True),
        ((3, 14, 2), "Linux", "aarch64", True),
        ((3, 12, 0), "Darwin", "arm64", True),
        ((3, 13, 0), "Windows", "AMD64", True),
    ],
)
def test_a_python_with_one_is_accepted(found):
    environment.check_python(*found)


def test_the_interpreter_lies_elsewhere_on_windows():
    assert environment.venv_python(Path("v"), windows=True) == Path("v/Scripts/python.exe")
    assert environment.venv_python(Path("v"), windows=False) == Path("v/bin/python")


# --- the environment ---------------------------------------------------------------------------


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course folder of its own; the steps that would be run are recorded instead."""
    root = tmp_path / "a course"
    site_packages = root / ".venv/lib/site-packages"
    site_packages.mkdir(parents=True)
    (root / "requirements.txt").write_text("torch==2.13.0\n-e .\n")
    (root / "requirements-test.txt").write_text("triton==3.7.1\n")
    (root / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(environment, "ROOT", root)
    monkeypatch.setattr(environment, "VENV", root / ".venv")
    monkeypatch.setattr(environment, "STAMP", root / ".venv/minikv.stamp")
    monkeypatch.setattr(environment, "REQUIREMENTS", root / "requirements.txt")
    monkeypatch.setattr(steps, "LOG", root / "build/setup.log")
    monkeypatch.setattr(environment.platform, "system", lambda: "Linux")
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    state = {
        "steps": [],
        "fail": None,
        "no_cpu_build": False,
        "probe": ["3.12.1 (build)", [3, 12], str(site_packages)],
    }

    def install(name):
        info = site_packages / f"{name}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "INSTALLER").write_text("pip\n")

    def run_step(command, what, otherwise=None):
        state["steps"].append(" ".join(str(part) for part in command[1:4]))
        if "--index-url" in command:
            state["steps"][-1] += " of the CPU-only build"
            if state["no_cpu_build"]:
                return print(otherwise)
        if state["fail"] is not None:
            raise state["fail"]
        if "ensurepip" in command:
            install("pip-1.0")
        if "install" in command:
            install("triton-3.7.1" if "-test" in str(command[-1]) else "torch-2.13.0")

    has_pip = lambda: any(site_packages.glob("pip-*.dist-info"))  # noqa: E731
    monkeypatch.setattr(environment, "run_step", run_step)
    monkeypatch.setattr(
        environment, "probe", lambda _: state["probe"] and [*state["probe"], has_pip()]
    )
    state.update(root=root, site_packages=site_packages)
    return state


def test_the_second_time_nothing_is_installed(course):
    environment.ensure_environment()
    assert course["steps"] == ["-m ensurepip --default-pip", "-m pip install"]
    course["steps"].clear()
    environment.ensure_environment()
    assert course["steps"] == []


@pytest.mark.parametrize("change", ["requirements.txt", "pyproject.toml", "python", "package"])
def test_a_change_goes_through_pip_again(course, change):
    environment.ensure_environment()
    course["steps"].clear()
    if change == "python":
        course["probe"][0] = "3.12.2 (build)"
    elif change == "package":  # somebody uninstalled one
        for file in (course["site_packages"] / "torch-2.13.0.dist-info").iterdir():
            file.unlink()
        (course["site_packages"] / "torch-2.13.0.dist-info").rmdir()
    else:
        with (course["root"] / change).open("a") as file:
            file.write("# changed\n")
    environment.ensure_environment()
    assert course["steps"] == ["-m pip install"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), steps.SetupError("no network")])
def test_an_interrupted_install_leaves_no_stamp_and_is_resumed(course, interruption):
    environment.ensure_environment()
    (course["root"] / "requirements.txt").write_text("torch==2.13.0\nmore==1\n")
    course["fail"] = interruption
    with pytest.raises(type(interruption)):
        environment.ensure_environment()
    assert not environment.STAMP.exists()
    course["fail"] = None
    course["steps"].clear()
    environment.ensure_environment()
    assert course["steps"] == ["-m pip install"]
    assert environment.STAMP.exists()


def test_a_half_installed_package_is_forgotten(course):
    environment.ensure_environment()
    environment.STAMP.unlink()
    half = course["site_packages"] / "numpy-2.4.6.dist-info"
    half.mkdir()
    (half / "METADATA").write_text("")
    environment.ensure_environment()
    assert not half.exists()
    assert (course["site_packages"] / "torch-2.13.0.dist-info").exists()


def test_an_environment_of_another_python_is_made_anew(course, monkeypatch):
    monkeypatch.setattr(environment, "check_python", lambda *found: None)
    course["probe"][1] = [3, 9]
    environment.ensure_environment()
    assert course["steps"][0] == "-m venv --clear"


@pytest.mark.parametrize(
    ("wanted", "system", "gpu", "build"),
    [
        ("auto", "Linux", None, "cpu"),
        ("auto", "Linux", "/usr/bin/nvidia-smi", "ordinary"),
        ("cpu", "Linux", "/usr/bin/nvidia-smi", "cpu"),
        ("cuda", "Linux", None, "ordinary"),
        ("auto", "Darwin", None, "ordinary"),
        ("cpu", "Windows", None, "ordinary"),
    ],
)
def test_the_build_of_pytorch(wanted, system, gpu, build):
    assert environment.torch_build(wanted, system, gpu) == build


def test_without_a_gpu_the_cpu_build_of_pytorch_comes_first(course, monkeypatch, capsys):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    environment.ensure_environment()
    pip = "-m pip install"
    assert course["steps"] == ["-m ensurepip --default-pip", f"{pip} of the CPU-only build", pip]
    said = capsys.readouterr().out
    assert "about 450 MB are downloaded" in said and "Ctrl-C" not in said
    environment.STAMP.unlink()  # there already: not taken again
    course["steps"].clear()
    environment.ensure_environment()
    assert course["steps"] == [pip]


def test_where_its_index_is_not_reached_the_ordinary_build_follows(course, monkeypatch, capsys):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    course["no_cpu_build"] = True
    environment.ensure_environment()
    assert course["steps"][-1] == "-m pip install" and environment.STAMP.exists()
    captured = capsys.readouterr()
    assert captured.err == ""
    [line] = [line for line in captured.out.splitlines() if "the ordinary one" in line]
    assert environment.CPU_TORCH_INDEX in line and "about 3 GB" in line


@pytest.mark.parametrize(
    ("wanted", "installed", "is_said"),
    [("cpu", "2.13.0", 1), ("cpu", "2.13.0+cpu", 0), ("cuda", "2.13.0+cpu", 1),
     ("cuda", "2.13.0", 0), ("auto", "2.13.0", 0)],
)  # fmt: skip
def test_another_build_that_is_there_is_left_alone_and_said(wanted, installed, is_said, capsys):
    environment.ask_for_other_build(wanted, f"torch-{installed}.dist-info")
    assert capsys.readouterr().out.count("delete .venv") == is_said


def test_what_only_tests_need_is_installed_once_and_by_test_alone(course):
    environment.ensure_environment()
    course["steps"].clear()
    for _ in range(2):
        environment.ensure_test_packages("python")
        environment.ensure_environment()  # `lab` finds one package more, and is content
    assert course["steps"] == ["-m pip install"]
    with (course["root"] / "requirements-test.txt").open("a") as file:
        file.write("more==1\n")
    environment.ensure_test_packages("python")
    assert course["steps"] == ["-m pip install"] * 2


def test_without_what_only_tests_need_the_other_tests_run(course, capsys):
    environment.ensure_environment()
    course["fail"] = steps.SetupError("no build for this machine.")
    environment.ensure_test_packages("python")
    assert "no build for this machine. The tests that need it are skip" in capsys.readouterr().out
    course["fail"] = None
    course["steps"].clear()
    environment.ensure_test_packages("python")  # tried again
    assert course["steps"] == ["-m pip install"]


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full .*GB free in"),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "Check the network",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "no build of a package"),
        ("/usr/bin/python3: No module named ensurepip", "apt install python3-venv"),
        ("ERROR: [Errno 13] Permission denied: 'x'", "could not be written"),
        ("something else", "lines above"),
    ],
)
def test_a_failed_step_says_what_to_do(stderr, message, log):
    script = f"import sys; sys.stderr.write({stderr!r}); sys.exit(3)"
    with pytest.raises(steps.SetupError, match=f"a step failed .exit status 3.: .*{message}"):
        steps.run_step([sys.executable, "-c", script], "a step")


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "LOG", tmp_path / "build/setup.log")
    return steps.LOG


def test_a_step_is_one_line_and_the_rest_is_in_the_log(log, capsys):
    script = "import sys\nfor i in range(300): print('WARNING', i); print(i, file=sys.stderr)"
    steps.run_step([sys.executable, "-c", script], "a step")
    captured = capsys.readouterr()
    assert captured.out.startswith("minikv: a step 0:0") and captured.out.count("\n") == 1
    assert captured.err == ""
    assert log.read_text().count("\nWARNING") == 300 and "\n299\n" in log.read_text()


def test_a_failed_step_shows_the_end_of_its_log(log, capsys):
    script = "import sys\nfor i in range(300): print('line', i, flush=True)\n"
    script += "sys.exit('no space left')"
    with pytest.raises(steps.SetupError, match=r"All that it wrote is in .*setup\.log"):
        steps.run_step([sys.executable, "-c", script], "a step")
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].strip() == "no space left" and len(shown) == steps.NUM_LINES_SHOWN
    steps.run_step([sys.executable, "-c", script], "a step", "another follows")
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("\n") == 1 and captured.out.endswith("another follows\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Collecting jupyter-core>=5 (from jupyterlab==4.6.6)", "looking for jupyter-core"),
        ("  Downloading https://a/b/torch-2.13.0%2Bcpu-cp311-x.whl (191.8 MB)",
         "downloading torch, 191.8 MB"),
        ("  Downloading jupyter_core-5.9.1-py3-none-any.whl.metadata (1.6 kB)",
         "downloading jupyter_core, 1.6 kB"),
        ("Installing collected packages: a, b, c", "unpacking 3 packages"),
        ("WARNING: Location 'file:///x' is ignored", None),
        ("", None),
    ],
)  # fmt: skip
def test_what_pip_is_doing_in_few_words(line, words):
    assert steps.doing(line) == words


def test_trouble_is_one_line_and_an_exit_status(course, capsys):
    course["fail"] = steps.SetupError("the disk is full")
    assert lab.main([]) == 1
    assert capsys.readouterr().err == "minikv: the disk is full\n"
    course["fail"] = KeyboardInterrupt()
    assert test.main([]) == 130
    assert "goes on from here" in capsys.readouterr().err


# --- what is run in it -------------------------------------------------------------------------


def test_jupyter_gets_the_port_and_what_the_reader_adds():
    command = lab.jupyter_command("python", ["--no-browser"], {"PORT": "9000"}, is_root=True)
    assert "--port=9000" in command
    assert "--allow-root" in command
    assert command[-1] == "--no-browser"
    assert not any("token" in str(part) or "password" in str(part) for part in command)
    command = lab.jupyter_command("python", [], {"DISPLAY": ":0"}, is_root=False)
    assert not any(str(part).startswith(("--port", "--allow", "--no")) for part in command)


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1"])
def test_a_bad_port_is_named(port, capsys, monkeypatch):
    monkeypatch.setenv("PORT", port)
    assert lab.main([]) == 1
    assert f"PORT is {port!r}; it must be a number from 1 to 65535" in capsys.readouterr().err


def test_pytest_takes_the_short_tests_unless_asked():
    assert test.pytest_command("python", False, ["-x"])[-3:] == ["-m", "not long", "-x"]
    assert test.pytest_command("python", True, [])[-2:] == ["-m", "long"]


MEET = """
import pathlib, time, pytest
@pytest.mark.parametrize("me, other", ["ab", "ba"])
def test_meets_the_other(me, other):
    pathlib.Path(me).touch()
    for _ in range(1_000):
        if pathlib.Path(other).exists():
            return
        time.sleep(0.05)
    pytest.fail("the other runs on this worker")
"""


def test_quick_modules_run_first():
    assert all((PACKAGE.parent / "tests" / name).exists() for name in conftest.SLOW)
    names = [conftest.SLOW[1], "test_zz.py", conftest.SLOW[0], "test_aa.py", conftest.SLOW[0]]
    items = [SimpleNamespace(path=Path("tests", name), at=i) for i, name in enumerate(names)]
    conftest.pytest_collection_modifyitems(items)
    assert [item.at for item in items] == [1, 3, 2, 4, 0]


def test_slow_tests_of_one_module_run_on_both_workers(tmp_path):
    """And the slowest are printed. Without the scheduler of conftest, the two never meet."""
    shutil.copy(PACKAGE.parent / "tests" / "conftest.py", tmp_path)
    (tmp_path / conftest.SLOW[0]).write_text(MEET)
    (tmp_path / "test_aa.py").write_text("import time\ndef test_later(): time.sleep(1.1)\n")
    plugins = ["-p", "xdist", "-p", "no:cacheprovider"]
    command = test.pytest_command(sys.executable, False, [*plugins, "."])
    environ = dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout
    assert "slowest 10 durations" in done.stdout and "test_aa.py::test_later" in done.stdout


def test_a_command_is_handed_to_the_environment(course, monkeypatch, capsys):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    calls = []
    monkeypatch.setattr(environment, "run", lambda command: calls.append(command) or 7)
    assert __main__.main(["generate", "hello"]) == 7
    assert calls == [[environment.venv_python(), "-m", "minikv", "generate", "hello"]]
    course["probe"] = None  # no environment
    assert __main__.main(["generate", "hello"]) == 1
    assert "python -m minikv lab" in capsys.readouterr().err
    assert environment.hand_over(["doctor"]) is None


def test_an_unknown_command_and_help(capsys):
    assert __main__.main(["nonsense"]) == 2
    assert "unknown command 'nonsense'" in capsys.readouterr().err
    for command in ("lab", "test", "fresh", "doctor"):
        with pytest.raises(SystemExit) as stop:
            __main__.main([command, "--help"])
        assert stop.value.code == 0


# --- as on a machine that never saw the course -------------------------------------------------


def test_nothing_of_the_user_is_carried_over_but_pips_configuration(tmp_path):
    user, home = tmp_path / "user", tmp_path / "home"
    (user / ".config/pip").mkdir(parents=True)
    (user / ".config/pip/pip.conf").write_text("[global]\n")
    (user / ".cache/minikv").mkdir(parents=True)
    home.mkdir()
    mine = {
        "PATH": "/bin", "HOME": str(user), "PIP_CERT": "x", "https_proxy": "p", "PYTHONPATH": "y",
        "MINIKV_CACHE": "z", "HF_HOME": "h", "XDG_CACHE_HOME": "c", "MAKEFLAGS": "-j2",
        "OMP_NUM_THREADS": "1", "VIRTUAL_ENV": "v", "JUPYTER_CONFIG_DIR": "j",
    }  # fmt: skip
    found = fresh.bare_environment(home, mine, user)
    assert {name for name in found if name in mine} == {"PATH", "PIP_CERT", "https_proxy", "HOME"}
    assert found["HOME"] == str(home)
    left = [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()]
    assert left == [".config/pip/pip.conf"]


def test_pips_configuration_is_found_where_the_user_keeps_it(tmp_path):
    user, home, config = tmp_path / "user", tmp_path / "home", tmp_path / "config"
    for folder, text in ((user / ".config/pip", "not read"), (config / "pip", "read")):
        folder.mkdir(parents=True)
        (folder / "pip.conf").write_text(text)
    (user / "AppData/Roaming/pip").mkdir(parents=True)
    (user / "AppData/Roaming/pip/pip.ini").write_text("Windows")
    home.mkdir()
    found = fresh.bare_environment(home, {"XDG_CONFIG_HOME": str(config)}, user)
    assert "XDG_CONFIG_HOME" not in found
    assert (home / ".config/pip/pip.conf").read_text() == "read"
    assert (Path(found["APPDATA"]) / "pip/pip.ini").read_text() == "Windows"


def test_fresh_runs_both_commands_in_a_copy_and_stops_at_the_first_that_fails(
    tmp_path, monkeypatch, capsys
):
    root = tmp_path / "course"
    for file in ("README.md", ".venv/bin/python", "build/setup.log", "work/01.ipynb"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("x")
    ran, statuses = [], [0, 3]

    def run(command, folder, environ):
        files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        ran.append((command[-2:], files, os.listdir(environ["HOME"])))
        return statuses[len(ran) - 1]

    monkeypatch.setattr(fresh, "ROOT", root)
    monkeypatch.setattr(fresh, "run", run)
    monkeypatch.setattr(fresh.shutil, "which", lambda name: None)  # no make, as on Windows
    monkeypatch.setattr(fresh.Path, "home", lambda: tmp_path)
    assert fresh.main(["--long"]) == 3
    assert ran == [(["lab", "--check"], ["README.md"], []), (["minikv", "test"], ["README.md"], [])]
    statuses[:] = [0, 0, 0]
    for argv, last in (
        ([], ["minikv", "test"]),
        (["--long"], ["test", "--long"]),
        (["--long", "a or b"], ["-k", "a or b"]),
    ):
        ran.clear()
        assert fresh.main(argv) == 0 and ran[-1][0] == last


def test_make_is_given_the_expression_in_quotes(monkeypatch):
    monkeypatch.setattr(fresh.shutil, "which", lambda name: "/usr/bin/make")
    *_, last = fresh.commands("python3", "a or b")
    assert last == ["make", "PYTHON=python3", "test-long", "ARGS=-k 'a or b'"]


# --- the doctor --------------------------------------------------------------------------------


def test_the_facts_are_plain_data():
    found = machine.facts()
    assert json.loads(json.dumps(found)) == found
    assert found["cores"] >= 1
    assert found["packages"]["torch"].startswith("2.13.0")
    assert found["devices"][-1]["reason"]


def test_packages_that_are_missing_or_differ_have_a_line(monkeypatch):
    monkeypatch.setattr(doctor, "pins", lambda: {"torch": "2.13.0", "gguf": "1.0", "tqdm": "4.0"})
    found = {"packages": {"torch": "2.13.0+cpu", "gguf": None, "tqdm": "5.0"}}
    missing, other = doctor.check_packages(found)
    assert missing[:2] == ("PROBLEM", "not installed: gguf")
    assert other[:2] == ("PROBLEM", "another version: tqdm 5.0 (tested with 4.0)")
    found["packages"].update(gguf="1.0", tqdm="4.0")
    assert [row[0] for row in doctor.check_packages(found)] == ["OK"]


def test_the_attention_backend_has_a_line_with_the_reason(monkeypatch):
    found = {"devices": [{"device": "cpu", "dtype": "bfloat16"}]}
    if any(map(shutil.which, ("c++", "g++", "clang++"))) and os.name == "posix":
        assert doctor.check_attention(found) == [("OK", "attention on cpu: backend cpu", None)]
    monkeypatch.setenv("MINIKV_CPU_KERNELS", "0")
    [(status, text, why)] = doctor.check_attention(found)
    assert (status, text) == ("note", "attention on cpu: backend gather, which is slower")
    assert why == "cpu does not run: MINIKV_CPU_KERNELS is 0"


def test_the_threads_have_a_line_with_the_reason(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = {"devices": [{"device": "cpu"}]}
    [(status, text, what_to_do)] = doctor.check_threads(found)
    assert (status, what_to_do) == ("OK", None)
    assert text.startswith("threads: ") and text.endswith(" (OMP_NUM_THREADS is set)")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("minikv.model.threads.counts_here", lambda device: ([1, 2], "a reason"))
    [(_, text, _)] = doctor.check_threads(found)
    assert "chosen from 1 and 2 by time (for a few products: on 1 " in text
    assert doctor.check_threads({"devices": []}) == []  # check_devices has said it
    assert doctor.check_threads({"devices": [{"device": "cuda:0"}, *found["devices"]]}) == []


def test_a_cache_folder_that_cannot_be_is_a_line(monkeypatch):
    monkeypatch.setenv("MINIKV_CACHE", "~nosuchuser/x")
    found = machine.model_facts()
    assert (found["model_dir"], found["model_fetched"]) == (None, False)
    status, text, _ = doctor.check_model(found)
    assert status == "PROBLEM" and "MINIKV_CACHE is '~nosuchuser/x'" in text


def test_a_bare_python_gets_lines_and_no_traceback():
    # -S and -I leave out site-packages: a Python in which nothing is installed.
    script = "import sys; sys.path.insert(0, sys.argv[1]); from minikv.commands import doctor; "
    script += "sys.exit(doctor.main([]))"
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(PACKAGE.parent)],
        capture_output=True,
        text=True,
        cwd=os.sep,
    )
    assert result.returncode == 1
    assert result.stderr == ""
    assert "not installed: torch" in result.stdout
    assert "-> run: python -m minikv lab" in result.stdout


def test_the_pins_are_exact_and_pytorch_is_the_tested_one():
    lines = (PACKAGE.parent / "requirements.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    assert lines.pop() == "-e ."
    assert all(line.count("==") == 1 for line in lines)
    assert environment.pinned("torch") == "torch==2.13.0"


def test_triton_is_the_version_that_pytorch_asks_for():
    """An environment that got PyTorch's CUDA build has this triton already."""
    lines = (PACKAGE.parent / "requirements-test.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    assert [line.partition(";")[0] for line in lines] == ["triton==3.7.1"]
    asked = importlib.metadata.requires("torch") or []
    asked = [line.partition(";")[0].strip() for line in asked if line.startswith("triton")]
    assert asked in ([], ["triton==3.7.1"])  # none: the CPU-only build


def test_the_model_is_fetched_by_the_module_that_is_run(tmp_path):
    """Run as set-up runs it, with a model that is there: nothing to do, and it says where."""
    from minikv.model import fetch

    folder = tmp_path / fetch.default_model_dir().name
    folder.mkdir()
    for file in fetch.MODEL_FILES:
        (folder / file).touch()
    result = subprocess.run(
        [sys.executable, "-m", environment.MODEL_FETCHER],
        env={**os.environ, "MINIKV_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert str(folder) in result.stdout


def test_the_kernel_is_compiled_by_the_module_that_is_run(tmp_path):
    """As set-up runs it, which ignores its status: the course does without."""
    environ = os.environ | {"MINIKV_CACHE": str(tmp_path)}
    for wanted, status, said in (("1", 1, "there is no such program"), ("0", 0, "")):
        result = subprocess.run(
            [sys.executable, "-m", environment.KERNEL_COMPILER],
            env=environ | {"CXX": "no-such-compiler", "MINIKV_CPU_KERNELS": wanted},
            capture_output=True,
            text=True,
        )
        assert result.returncode == status
        assert said in result.stderr and bool(said) == bool(result.stderr)


def test_what_the_package_imports_is_pinned():
    optional = {"triton", "vllm"}  # used where they are installed
    workers = {
        file.stem for file in PACKAGE.glob("bench/vllm_*.py")
    }  # programs, each beside others
    owners = importlib.metadata.packages_distributions()
    pins = {name.lower() for name in machine.pins()}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module)
            for top in {name.split(".")[0] for name in names}:
                if top in sys.stdlib_module_names or top in {"minikv", *optional, *workers}:
                    continue
                distributions = {name.lower() for name in owners.get(top, [top])}
                assert distributions & pins, f"{file} imports {top}: pin it in requirements.txt"
