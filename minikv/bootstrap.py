"""`python -m minikv lab` and `python -m minikv test`: from a bare Python to an open notebook.

Only the standard library is used, and only syntax that Python 3.8 can read, so that an old Python
gets as far as being told that it is old.
"""

import argparse
import collections
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "minikv.stamp"
REQUIREMENTS = ROOT / "requirements.txt"
NOTEBOOK = "notebooks/00_welcome.ipynb"
# Run as modules; they end at once when there is nothing to do.
MODEL_FETCHER = "minikv.model.fetch"
KERNEL_COMPILER = "minikv.model.kernels.native"
OLDEST, NEWEST = (3, 11), (3, 14)  # NEWEST: the last Python that the pinned PyTorch has wheels for
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SERVER_START_SECONDS = 180


class SetupError(Exception):
    """Something on this machine is in the way; the message says what, and what to do."""


def say(text):
    print(f"minikv: {text}", flush=True)  # flushed: pip and Jupyter write to the same terminal


# --- which Python ------------------------------------------------------------------------------


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


# --- the environment ---------------------------------------------------------------------------

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


# What a failed step wrote to stderr -> what it means. The first match counts: without a network
# pip also says "no matching distribution".
_CAUSES = [
    (
        ("no space left", "errno 28", "not enough space", "disk quota"),
        "the disk is full ({free}). Make room: the environment takes 2 GB, "
        "with PyTorch's CUDA build 6 GB",
    ),
    (
        (
            "retrying (retry(",
            "name resolution",
            "getaddrinfo failed",
            "newconnectionerror",
            "network is unreachable",
            "connection refused",
            "timed out",
        ),
        "the package index was not reached. Check the network; behind a proxy set HTTPS_PROXY, "
        "with a mirror set PIP_INDEX_URL",
    ),
    (
        ("certificate",),
        "the package index's certificate was not accepted. Behind an inspecting proxy, point "
        "PIP_CERT at your organisation's certificates",
    ),
    (
        ("no module named ensurepip",),
        "this Python comes without pip's installer. On Debian or Ubuntu: "
        "sudo apt install python3-venv; elsewhere install a full Python",
    ),
    (
        ("no matching distribution", "could not find a version"),
        "the package index has no build of a package for this Python and machine (named above)",
    ),
    (
        ("permission denied", "errno 13", "access is denied"),
        "a file could not be written. Close programs that use .venv, and check who owns the folder",
    ),
]


def explain(stderr):
    """One sentence on why a step failed, from what it wrote."""
    text = stderr.lower()
    for signs, meaning in _CAUSES:
        if any(sign in text for sign in signs):
            folders = [str(VENV if VENV.is_dir() else ROOT), tempfile.gettempdir()]
            free = ", ".join(
                f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free in {folder}"
                for folder in folders
            )
            return meaning.format(free=free)
    return "the reason is in the lines above"


def run_step(command, what):
    """Run one step of the set-up with its output shown; raise SetupError with a cause if it fails.

    Only stderr goes through a pipe: pip draws its progress bars on stdout, and only on a terminal.
    """
    # A user's pip may be configured to install outside of environments, which fails inside one.
    environ = dict(os.environ, PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=str(ROOT),
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    last_lines = collections.deque(maxlen=200)
    try:
        for line in process.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            last_lines.append(line)
        status = process.wait()
    except KeyboardInterrupt:
        process.wait()  # the same Ctrl-C has reached it
        raise
    if status:
        raise SetupError(
            f"{what} failed (exit status {status}): {explain(''.join(last_lines))}. "
            "Then run the same command again; what is already there is kept."
        )


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


def torch_steps(python, site_packages, cpu_torch):
    """The extra pip call, if any, that takes PyTorch's CPU-only build before pip takes another."""
    if platform.system() != "Linux":
        return []  # elsewhere the ordinary build is the small one
    here = [path.name for path in Path(site_packages).glob("torch-*.dist-info")]
    if cpu_torch and not here:
        return [
            [python, "-m", "pip", "install", pinned("torch"), "--index-url", CPU_TORCH_INDEX],
        ]
    if cpu_torch and "+cpu" not in here[0]:
        say("PyTorch is installed already. For the CPU-only build delete .venv and run this again.")
    if not cpu_torch and not here and not shutil.which("nvidia-smi"):
        say(
            "no NVIDIA GPU seen. PyTorch's ordinary build for Linux brings CUDA, several gigabytes."
            " For the small CPU-only build stop this with Ctrl-C and add --cpu-torch"
            " (with make: MINIKV_CPU_TORCH=1 make lab)."
        )
    return []


def ensure_environment(cpu_torch=False):
    """Make or complete .venv, unless its stamp says that it is complete. Returns its Python."""
    if not REQUIREMENTS.is_file():
        raise SetupError(f"no {REQUIREMENTS}; run this from a copy of the course's repository.")
    python = venv_python()
    state = probe(python)
    if state is None or not OLDEST <= tuple(state[1]) <= NEWEST:
        check_python(
            sys.version_info[:3], platform.system(), platform.machine(), sys.maxsize > 2**32
        )
        say(f"making the environment {VENV}")
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
    torch_first = torch_steps(python, site_packages, cpu_torch)
    if complete:
        return python
    with contextlib.suppress(FileNotFoundError):
        STAMP.unlink()  # from here on an interruption leaves an environment without a stamp
    if not has_pip or not any(Path(site_packages).glob("pip-*.dist-info")):
        run_step([python, "-m", "ensurepip", "--default-pip"], "installing pip")
    say("installing what requirements.txt names; the first time takes some minutes")
    for command in torch_first:
        run_step(command, "installing PyTorch's CPU-only build")
    run_step([python, "-m", "pip", "install", "-r", REQUIREMENTS], "installing the requirements")
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


# --- running something in it -------------------------------------------------------------------


def run(command, **environ):
    """Run to the end and return the exit status; Ctrl-C and SIGTERM are the child's to handle."""
    process = subprocess.Popen(
        [str(part) for part in command], cwd=str(ROOT), env=dict(os.environ, **environ)
    )
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # the terminal sent it to the child too
                return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


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


def port_option(text):
    try:
        port = int(text)
    except ValueError:
        port = 0
    if not 1 <= port <= 65535:
        raise SetupError(f"PORT is {text!r}; it must be a number from 1 to 65535.")
    # Jupyter would try the next ports; whoever asks for a port (a tunnel, a container) needs it.
    return [f"--port={port}", "--ServerApp.port_retries=0"]


def has_desktop(environ):
    """Whether a browser can be expected to open where the person sits."""
    if "SSH_CONNECTION" in environ:
        return False
    if platform.system() in ("Windows", "Darwin"):
        return True
    return bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def jupyter_command(python, extra, environ, is_root):
    """JupyterLab on the first chapter. The later of two equal options counts, so `extra` wins."""
    command = [
        python,
        "-m",
        "jupyterlab",
        "--log-level=WARN",  # leaves the block with the URL, which Jupyter prints itself
        f"--ServerApp.root_dir={ROOT}",
        "--ServerApp.contents_manager_class=minikv.classroom.contents.CourseContents",
        f"--LabApp.default_url=/lab/tree/{NOTEBOOK}",
    ]
    if environ.get("PORT"):
        command += port_option(environ["PORT"])
    if is_root:
        command.append("--allow-root")
    if is_root or not has_desktop(environ):
        command.append("--no-browser")
    return [*command, *extra]


def check_server(command):
    """Start the server, ask it for the notebook, and stop it again."""
    with tempfile.TemporaryDirectory() as runtime:
        process = subprocess.Popen(
            [str(part) for part in [*command, "--no-browser"]],
            cwd=str(ROOT),
            env=dict(os.environ, JUPYTER_RUNTIME_DIR=runtime),
        )
        try:
            info = wait_for_server(process, Path(runtime))
            page = f"{info['url']}lab/tree/{NOTEBOOK}?token={info['token']}"
            get(page, None)
            get(f"{info['url']}api/contents/{NOTEBOOK}?content=0", info["token"])
            say(f"served: {page}")
            get(f"{info['url']}api/shutdown", info["token"], method="POST")
            process.wait(timeout=60)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def wait_for_server(process, runtime):
    """The url and token of a starting server: it writes them to a file when it is up."""
    deadline = time.monotonic() + SERVER_START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SetupError(f"JupyterLab did not start (exit status {process.returncode}).")
        for path in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError):  # half written
                return json.loads(path.read_text(encoding="utf-8"))
        time.sleep(0.1)
    raise SetupError(f"JupyterLab was not up after {SERVER_START_SECONDS} s.")


def get(url, token, method="GET"):
    headers = {"Authorization": f"token {token}"} if token else {}
    request = urllib.request.Request(url, headers=headers, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    try:
        with opener.open(request, timeout=60) as response:
            response.read()
    except OSError as error:
        raise SetupError(f"JupyterLab did not answer {url.split('?')[0]}: {error}") from error


# --- the two commands --------------------------------------------------------------------------


def _parser(command, rest):
    parser = argparse.ArgumentParser(
        prog=f"python -m minikv {command}",
        allow_abbrev=False,
        epilog=f"Whatever else is given goes to {rest}.",
    )
    parser.add_argument(
        "--cpu-torch",
        action="store_true",
        default=os.environ.get("MINIKV_CPU_TORCH", "") not in ("", "0"),
        help="on Linux, install PyTorch's CPU-only build (also: MINIKV_CPU_TORCH=1)",
    )
    return parser


def _reported(steps):
    """Run a command's steps; trouble becomes one clear line and an exit status."""
    try:
        return steps()
    except SetupError as error:
        print(f"minikv: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # __main__ ends every command whose reader has gone
        raise
    except OSError as error:  # e.g. a full disk, met by this file's own writes
        print(f"minikv: {error}: {explain(str(error))}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nminikv: stopped. The same command goes on from here.", file=sys.stderr)
        return 130


def lab(argv):
    parser = _parser("lab", "JupyterLab, for example --no-browser")
    parser.description = "Set everything up and open chapter 00. PORT sets the port."
    parser.add_argument(
        "--check", action="store_true", help="start the server, see that it answers, stop it"
    )
    options, extra = parser.parse_known_args(argv)

    def steps():
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0
        # Built first: a bad PORT is told before minutes of installing.
        command = jupyter_command(venv_python(), extra, os.environ, is_root)
        python = ensure_environment(options.cpu_torch)
        ensure_model(python)
        compile_kernel(python)
        if not (ROOT / NOTEBOOK).is_file():
            raise SetupError(f"{NOTEBOOK} is not there; `git status` shows what is missing.")
        if options.check:
            check_server(command)
            return 0
        say("starting JupyterLab; Ctrl-C here stops it")
        return run(command)

    return _reported(steps)


def test(argv):
    parser = _parser("test", "pytest, for example -k scheduler")
    parser.description = "Set everything up and run the tests."
    parser.add_argument("--long", action="store_true", help="run the long tests instead")
    options, extra = parser.parse_known_args(argv)

    def steps():
        python = ensure_environment(options.cpu_torch)
        ensure_test_packages(python)
        ensure_model(python)
        compile_kernel(python)
        # One thread per worker: two workers with a thread per core each only wait for each other.
        return run(pytest_command(python, options.long, extra), OMP_NUM_THREADS="1")

    return _reported(steps)


test.__test__ = False  # pytest takes a function of this name for a test where it is imported


def pytest_command(python, long, extra):
    marker = "long" if long else "not long"
    return [python, "-m", "pytest", "-n", "2", "--dist", "loadscope", "-m", marker, *extra]
