"""The course's environment: which Python may make it, and .venv, made or completed.

Standard library and Python 3.8's syntax only: see steps.py.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from minikv.commands.steps import ROOT, VENV, SetupError, new_log, run, run_step, say

STAMP = VENV / "minikv.stamp"
REQUIREMENTS = ROOT / "requirements.txt"
# Run as modules; they end at once when there is nothing to do.
MODEL_FETCHER = "minikv.model.fetch"
KERNEL_COMPILER = "minikv.model.kernels.native"
OLDEST, NEWEST = (3, 11), (3, 14)  # NEWEST: the last Python that the pinned PyTorch has wheels for
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Measured on Linux with an empty pip cache: packages and model, then what they take on the disk.
DOWNLOAD = {
    "cpu": "about 450 MB are downloaded, and take 2.5 GB of disk",
    "ordinary": "about 3 GB are downloaded, and take 5.5 GB of disk",
}


def check_python(version, system, machine, is_64bit):
    """Refuse a Python that the pinned PyTorch has no build for, before anything is made for it."""
    found = ".".join(map(str, version))
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
    if not OLDEST <= tuple(version[:2]) <= NEWEST:
        names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
        better = next(
            filter(probe, names), None
        )  # one that runs: version managers leave dead shims
        what_to_do = (
            f"{better} is on this machine: make lab PYTHON={better}, or {better} -m minikv lab."
            if better
            else "Install one and call it by name, for example python3.13 -m minikv lab."
        )
        raise SetupError(
            f"this is Python {found}; the course needs Python {oldest} to {newest}. {what_to_do}"
        )
    if not is_64bit:
        raise SetupError(f"this Python {found} is a 32-bit build; PyTorch needs a 64-bit one.")
    if system == "Darwin" and machine == "x86_64":
        raise SetupError(
            "this is a Python for Intel Macs, and PyTorch has had no builds for those since 2.2. "
            "On an Apple Silicon Mac, install an arm64 Python; on an Intel Mac, use Linux in a "
            "virtual machine or another computer."
        )
    if system == "Windows" and machine.upper() == "ARM64":
        raise SetupError(
            "this is a Python for Windows on ARM, which the pinned PyTorch has no build for. "
            "Install the 64-bit Intel (x86-64) Python, which Windows runs too, or use WSL."
        )


def venv_python(venv=VENV, windows=os.name == "nt"):
    return venv / ("Scripts/python.exe" if windows else "bin/python")


_PROBE = (
    "import json, sys, sysconfig, importlib.util as u;"
    "print(json.dumps([sys.version, sys.version_info[:2], sysconfig.get_path('purelib'),"
    " u.find_spec('pip') is not None]))"
)


def probe(python):
    """[version text, (major, minor), site-packages, has pip], or None if it does not run."""
    try:
        result = subprocess.run(
            [str(python), "-c", _PROBE],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=60,
        )
        return json.loads(result.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def drop_half_installed(site_packages):
    """Forget packages whose installation was cut short.

    pip takes a package for installed once its .dist-info folder is there, and writes INSTALLER
    into it after the package's files. Without the folder pip installs over the remains.
    """
    for info in Path(site_packages).glob("*.dist-info"):
        if not (info / "INSTALLER").exists():
            shutil.rmtree(str(info))


def make_stamp(python_version, site_packages):
    """What the environment is and was installed from.

    ROOT belongs to it, as `-e .` stores the path; so do the names of the installed packages, so
    that an environment which somebody changed by hand goes through pip again.
    """
    packages = sorted(path.name for path in Path(site_packages).glob("*.dist-info"))
    parts = [REQUIREMENTS.read_text(encoding="utf-8")]
    parts.append((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts += [python_version, str(ROOT), *packages]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def write_stamp(text):
    partial = STAMP.with_suffix(".partial")
    partial.write_text(text, encoding="ascii")
    os.replace(str(partial), str(STAMP))


def pinned(name):
    """The line of requirements.txt that pins a package, e.g. "torch==2.13.0"."""
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        if line.startswith(name + "=="):
            return line.strip()
    raise SetupError(f"{REQUIREMENTS} does not pin {name}")


def torch_build(wanted, system, sees_nvidia):
    """Which build of PyTorch to take: "cpu", or "ordinary" (PyPI's, which on Linux has CUDA)."""
    if system != "Linux":
        return "ordinary"  # the small one already
    if wanted == "auto":
        return "ordinary" if sees_nvidia else "cpu"
    return "cpu" if wanted == "cpu" else "ordinary"


def install_cpu_torch(python):
    """Takes PyTorch's CPU-only build from its own index, before pip takes another. Where that
    index is not reached, it says so, and the ordinary build comes with the requirements.

    Without what it depends on, which comes from the ordinary index with everything else.
    """
    command = [python, "-m", "pip", "install", "--no-deps", pinned("torch")]
    command += ["--index-url", CPU_TORCH_INDEX, "--timeout", "15", "--retries", "1"]
    otherwise = f"not had from {CPU_TORCH_INDEX}; the ordinary one: {DOWNLOAD['ordinary']}"
    run_step(command, "installing PyTorch's CPU-only build", otherwise)


def ask_for_other_build(wanted, here):
    """Says what to do where PyTorch is installed already, and is not the build asked for."""
    if wanted != "auto" and ("+cpu" in here) != (wanted == "cpu"):
        say(f"PyTorch is installed already. For --torch {wanted} delete .venv and run this again.")


def ensure_environment(torch="auto"):
    """Make or complete .venv, unless its stamp says that it is complete. Returns its Python.

    torch: "auto", "cpu" or "cuda", see torch_build.
    """
    if not REQUIREMENTS.is_file():
        raise SetupError(f"no {REQUIREMENTS}; run this from a copy of the course's repository.")
    python = venv_python()
    state = probe(python)
    if state is None or not OLDEST <= tuple(state[1]) <= NEWEST:
        check_python(
            sys.version_info[:3], platform.system(), platform.machine(), sys.maxsize > 2**32
        )
        # pip comes in a step of its own, which also repairs an environment that lacks it.
        run_step([sys.executable, "-m", "venv", "--clear", "--without-pip", VENV], "making .venv")
        state = probe(python)
        if state is None:
            raise SetupError(f"{python} was made, but does not run. Delete {VENV} and try again.")
    version, _, site_packages, has_pip = state
    stamp = make_stamp(version, site_packages)
    complete = STAMP.is_file() and STAMP.read_text(encoding="ascii") == stamp
    if not complete:
        drop_half_installed(site_packages)
    here = [path.name for path in Path(site_packages).glob("torch-*.dist-info")]
    system = platform.system()
    if here and system == "Linux":
        ask_for_other_build(torch, here[0])
    if complete:
        return python
    with contextlib.suppress(FileNotFoundError):
        STAMP.unlink()  # from here on an interruption leaves an environment without a stamp
    build = torch_build(torch, system, shutil.which("nvidia-smi"))
    if not here:
        say(f"setting up: {DOWNLOAD[build if system == 'Linux' else 'cpu']}, once")
    say(f"what pip writes is in {new_log()}")
    if not has_pip or not any(Path(site_packages).glob("pip-*.dist-info")):
        run_step([python, "-m", "ensurepip", "--default-pip"], "installing pip")
    if build == "cpu" and not here:
        install_cpu_torch(python)
    run_step([python, "-m", "pip", "install", "-r", REQUIREMENTS], "installing packages")
    write_stamp(make_stamp(version, site_packages))
    return python


def ensure_test_packages(python):
    """Add what requirements-test.txt names, unless its stamp says that it is there.

    A machine that cannot have it still runs all other tests, so this fails with a line only.
    """
    requirements, stamp = (
        REQUIREMENTS.with_name("requirements-test.txt"),
        STAMP.with_suffix(".test"),
    )

    def state():
        return hashlib.sha256(requirements.read_bytes() + STAMP.read_bytes()).hexdigest()

    if stamp.is_file() and stamp.read_text(encoding="ascii") == state():
        return
    try:
        run_step(
            [python, "-m", "pip", "install", "-r", requirements], "installing what only tests need"
        )
    except SetupError as error:
        say(f"{error} The tests that need it are skipped.")
        return
    version, _, site_packages, _ = probe(python)
    write_stamp(make_stamp(version, site_packages))  # there may be one package more
    stamp.write_text(state(), encoding="ascii")


def ensure_model(python):
    """Fetch and convert the default model, once; the fetch knows whether there is work to do."""
    status = run([python, "-m", MODEL_FETCHER])
    if status:
        raise SetupError(
            f"the model could not be fetched (exit status {status}); the reason is above. "
            "Then run the same command again."
        )


def compile_kernel(python):
    """Compile the attention kernel for this CPU, once, so that no notebook has to wait for it.
    Where that fails, it says why, and the engine does without."""
    run([python, "-m", KERNEL_COMPILER])


def ensure_all(torch="auto", tests=False):
    """Packages, model and kernel, whatever of them is missing. Returns the environment's Python."""
    python = ensure_environment(torch)
    if tests:
        ensure_test_packages(python)
    ensure_model(python)
    compile_kernel(python)
    return python


def hand_over(argv):
    """For commands that need the environment: run them there if this Python is not it.

    Returns their exit status, or None where this Python can go on by itself.
    """
    if importlib.util.find_spec("torch"):
        return None
    is_here = os.path.realpath(sys.prefix) == os.path.realpath(VENV)
    if not is_here and probe(venv_python()):
        return run([venv_python(), "-m", "minikv", *argv])
    if argv[0] in ("doctor", "test-gpu"):
        return None  # they say themselves what is missing
    print(lacks(argv[0], "PyTorch"), file=sys.stderr)
    return 1


def lacks(command, package):
    """What to say where a command does not find a package."""
    return (
        f"minikv: {command!r} needs {package}, which {sys.executable} does not have. "
        "Run `python -m minikv lab` (or `make lab`) once; it installs everything into .venv."
    )
