"""Running the steps of the set-up: one line of progress each, the whole output in a log.

Only the standard library is used, and only syntax that Python 3.8 can read, so that an old Python
gets as far as being told that it is old. The same holds for environment.py, lab.py and test.py.
"""

import argparse
import collections
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
LOG = ROOT / "build" / "setup.log"
NUM_LINES_SHOWN = 12  # of the log, where a step fails


class SetupError(Exception):
    """Something on this machine is in the way; the message says what, and what to do."""


def say(text):
    print(f"minikv: {text}", flush=True)  # flushed: pip and Jupyter write to the same terminal


def new_log():
    """Begins the log anew; returns its path."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.write_text("", encoding="utf-8")
    return LOG


# What a failed step wrote -> what it means. The first match counts: without a network pip also
# says "no matching distribution".
_CAUSES = [
    (
        ("no space left", "errno 28", "not enough space", "disk quota"),
        "the disk is full ({free}). Make room: the environment takes 2.5 GB, "
        "with PyTorch's CUDA build 5.5 GB",
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


def explain(output):
    """One sentence on why a step failed, from what it wrote."""
    text = output.lower()
    for signs, meaning in _CAUSES:
        if any(sign in text for sign in signs):
            folders = [str(VENV if VENV.is_dir() else ROOT), tempfile.gettempdir()]
            free = ", ".join(
                f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free in {folder}"
                for folder in folders
            )
            return meaning.format(free=free)
    return "the reason is in the lines above"


def doing(line):
    """What a line of pip's output says is being done, in few words; None for any other line."""
    found = re.match(r"\s*Collecting ([\w.-]+)", line)
    if found:
        return f"looking for {found.group(1)}"
    found = re.match(r"\s*Downloading (?:\S*/)?(\w[\w.]*)-\d\S* \(([\d.]+ ?[kMG]B)\)", line)
    if found:
        return f"downloading {found.group(1)}, {found.group(2)}"
    found = re.match(r"\s*Installing collected packages: (.*)", line)
    if found:
        return f"unpacking {found.group(1).count(',') + 1} packages"
    return None


class ProgressLine:
    """On a terminal one line that counts the seconds; elsewhere a line when the stage has ended."""

    def __init__(self, what):
        self.what, self._start = what, time.monotonic()
        self._live = sys.stdout is not None and sys.stdout.isatty()

    def _text(self, detail):
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        return f"minikv: {self.what} {minutes}:{seconds:02}" + (f"  {detail}" if detail else "")

    def show(self, detail):
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + self._text(detail)[:width].ljust(width), end="", flush=True)

    def end(self, detail=""):
        self.show("")
        print(("\r" if self._live else "") + self._text(detail), flush=True)


def run_step(command, what, otherwise=None):
    """Runs one step of the set-up. What it writes goes to LOG, and one line to the terminal.

    Raises SetupError with a cause if it fails, after the log's last lines. otherwise: for a step
    that has a substitute, what its line says instead.
    """
    # A user's pip may be configured to install outside of environments, which fails inside one.
    environ = dict(os.environ, PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1")
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=str(ROOT),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    lines = queue.Queue()

    def read():  # in a thread: the seconds count on while pip is silent
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    progress, detail = ProgressLine(what), ""
    last_lines = collections.deque(maxlen=200)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with open(str(LOG), "a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(map(str, command))}\n")
        try:
            while True:
                progress.show(detail)
                try:
                    line = lines.get(timeout=0.5)
                except queue.Empty:
                    continue
                if line is None:
                    break
                log.write(line)
                last_lines.append(line)
                detail = doing(line) or detail
            status = process.wait()
        except KeyboardInterrupt:
            process.wait()  # the same Ctrl-C has reached it
            raise
    progress.end("" if not status else otherwise or "failed")
    if status and not otherwise:
        said = "".join(last_lines)
        for line in said.splitlines()[-NUM_LINES_SHOWN:]:
            print(f"    {line}", file=sys.stderr)
        raise SetupError(
            f"{what} failed (exit status {status}): {explain(said)}. "
            f"All that it wrote is in {LOG}. "
            "Then run the same command again; what is already there is kept."
        )


def run(command, folder=ROOT, environ=None):
    """Run to the end and return the exit status; Ctrl-C and SIGTERM are the child's to handle."""
    process = subprocess.Popen([str(part) for part in command], cwd=str(folder), env=environ)
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # the terminal sent it to the child too
                return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def reported(steps):
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


def setup_parser(command, description, rest):
    """The arguments that `lab` and `test` share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m minikv {command}",
        description=description,
        allow_abbrev=False,
        epilog=f"Whatever else is given goes to {rest}.",
    )
    parser.add_argument(
        "--torch",
        choices=["auto", "cpu", "cuda"],
        default=os.environ.get("MINIKV_TORCH") or "auto",
        help="which build of PyTorch to install on Linux (also: MINIKV_TORCH). auto: with CUDA "
        "where an NVIDIA GPU is seen, else the CPU-only one, which is a tenth of the size",
    )
    return parser
