"""`python -m minikv lab`: from a bare Python to an open notebook."""

import contextlib
import json
import os
import platform
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from minikv.commands import environment
from minikv.commands.steps import ROOT, SetupError, reported, run, say, setup_parser

NOTEBOOK = "notebooks/00_welcome.ipynb"
SERVER_START_SECONDS = 180


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


def main(argv):
    parser = setup_parser(
        "lab",
        "Set everything up and open chapter 00. PORT sets the port.",
        "JupyterLab, for example --no-browser",
    )
    parser.add_argument(
        "--check", action="store_true", help="start the server, see that it answers, stop it"
    )
    options, extra = parser.parse_known_args(argv)

    def steps():
        is_root = hasattr(os, "geteuid") and os.geteuid() == 0
        # Built first: a bad PORT is told before minutes of installing.
        command = jupyter_command(environment.venv_python(), extra, os.environ, is_root)
        environment.ensure_all(options.torch)
        if not (ROOT / NOTEBOOK).is_file():
            raise SetupError(f"{NOTEBOOK} is not there; `git status` shows what is missing.")
        if options.check:
            check_server(command)
            return 0
        say("starting JupyterLab; Ctrl-C here stops it")
        return run(command)

    return reported(steps)
