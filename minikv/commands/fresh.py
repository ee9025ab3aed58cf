"""`python -m minikv fresh`: the README's two commands, as on a machine that never saw the course.

They run in a copy of this folder (changes that are not committed included), with an empty home
folder, no cache, no environment and none of the variables that a user may have set. What you have
installed hides what a newcomer lacks: a package that only the conversion of the model needs was
missing for weeks, and every machine with a converted model in its cache was content.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from minikv.commands.steps import ROOT, reported, run, say

# What an operating system, a compiler and a network need; nothing that belongs to a user's tools.
KEPT = [
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TERM", "TZ", "TMPDIR", "TEMP", "TMP", "CI"),
    *("SYSTEMROOT", "WINDIR", "COMSPEC", "PATHEXT"),
    *("CXX", "MINIKV_TORCH", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR"),
]
# Where pip's configuration may lie below a home folder.
PIP_CONFIGURATION = [
    *(".config/pip", ".pip", "Library/Application Support/pip"),
    *("pip", "AppData/Roaming/pip"),
]
NOT_COPIED = shutil.ignore_patterns(
    ".venv", "build", "work", "*.egg-info", "__pycache__", ".pytest_cache", ".ruff_cache",
    ".hypothesis", ".ipynb_checkpoints",
)  # fmt: skip


def bare_environment(home, environ, user_home):
    """The variables of somebody who has set none, and whose home folder is `home`: empty but for
    pip's own configuration, without which some machines reach no index at all."""
    kept = {
        name: value
        for name, value in environ.items()
        if name.upper() in KEPT or name.upper().startswith("PIP_")
    }
    for place in PIP_CONFIGURATION:
        if (Path(user_home) / place).is_dir():
            shutil.copytree(str(Path(user_home) / place), str(home / place))
    elsewhere = environ.get("XDG_CONFIG_HOME") or str(Path(user_home) / ".config")
    if elsewhere != str(Path(user_home) / ".config"):  # then pip reads that one
        shutil.rmtree(str(home / ".config/pip"), ignore_errors=True)
        if (Path(elsewhere) / "pip").is_dir():
            shutil.copytree(str(Path(elsewhere) / "pip"), str(home / ".config/pip"))
    for name, place in (("HOME", ""), ("USERPROFILE", ""), ("APPDATA", "AppData/Roaming"),
                        ("LOCALAPPDATA", "AppData/Local")):  # fmt: skip
        kept[name] = str(home / place)
    return kept


def pip_cache(environ, user_home):
    """The user's own, so that nothing is downloaded twice; None where there is none."""
    places = [".cache/pip", "Library/Caches/pip", "AppData/Local/pip/cache"]
    if environ.get("XDG_CACHE_HOME"):
        places.insert(0, str(Path(environ["XDG_CACHE_HOME"]) / "pip"))
    found = [Path(user_home) / place for place in places if (Path(user_home) / place).is_dir()]
    return str(found[0]) if found else None


def commands(python, long=None):
    """The README's two, without a browser; and the long tests if asked for: "" for all of them, or
    an expression, as pytest's -k takes it."""
    chosen = ["-k", long] if long else []
    if shutil.which("make"):
        make = ["make", f"PYTHON={python}"]
        run_long = [*make, "test-long", *([f"ARGS=-k '{long}'"] if long else [])]
        found = [[*make, "lab", "ARGS=--check"], [*make, "test"], run_long]
    else:
        minikv = [python, "-m", "minikv"]
        run_long = [*minikv, "test", "--long", *chosen]
        found = [[*minikv, "lab", "--check"], [*minikv, "test"], run_long]
    return found[: 2 if long is None else 3]


def main(argv):
    parser = argparse.ArgumentParser(
        prog="python -m minikv fresh",
        description="Run both README commands in a copy of this folder with an empty home, cache "
        "and environment.",
    )
    parser.add_argument(
        "--empty-pip-cache",
        action="store_true",
        help="download everything (default: what pip has cached is used)",
    )
    parser.add_argument(
        "--long",
        nargs="?",
        const="",
        metavar="EXPRESSION",
        help="run the long tests, too; with an EXPRESSION those that pytest -k finds by it",
    )
    options = parser.parse_args(argv)

    def steps():
        user_home = Path.home()
        # Not an environment's Python: its packages must not be seen.
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        with tempfile.TemporaryDirectory(prefix="minikv-fresh-") as folder:
            course, home = Path(folder, "course"), Path(folder, "home")
            home.mkdir()
            say(f"copying {ROOT} to {course}")
            shutil.copytree(str(ROOT), str(course), symlinks=True, ignore=NOT_COPIED)
            environ = bare_environment(home, os.environ, user_home)
            cache = None if options.empty_pip_cache else pip_cache(os.environ, user_home)
            if cache:
                environ.setdefault("PIP_CACHE_DIR", cache)
            for command in commands(python, options.long):
                say(f"$ {' '.join(command)}")
                status = run(command, folder=course, environ=environ)
                if status:
                    return status
        return 0

    return reported(steps)
