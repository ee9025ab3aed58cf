"""`python -m minikv COMMAND`: one table of commands, each imported only when it is called.

`lab` and `test` run before anything is installed, so nothing here may import more than the
standard library. What any command can meet (Ctrl-C, a full disk, a reader that has gone) ends here
in a line at most and an exit status; what it alone can meet, a command reports itself.
"""

import importlib
import os
import sys

# command -> (module:function taking argv and returning an exit status, one line of help)
COMMANDS = {
    "lab": ("minikv.commands.lab:main", "set everything up and open the course in JupyterLab"),
    "test": ("minikv.commands.test:main", "set everything up and run all tests"),
    "test-gpu": ("minikv.commands.gpu:main", "test on an NVIDIA GPU; says so where there is none"),
    "fresh": ("minikv.commands.fresh:main", "try both as on a machine that never saw the course"),
    "doctor": (
        "minikv.commands.doctor:main",
        "say whether this machine is ready",
    ),
    "generate": ("minikv.commands.generate:main", "answer a prompt, streaming"),
    "simulate": (
        "minikv.commands.simulate:main",
        "serve traffic on a GPU that is not here",
    ),
    "bench": ("minikv.commands.bench:main", "measure this engine beside transformers and vLLM"),
    "start": ("minikv.commands.work:main_start", "copy a chapter's exercises to work/"),
    "check": ("minikv.commands.check:main", "check your exercises, one by one"),
    "reset": ("minikv.commands.work:main_reset", "restore an exercise as shipped"),
    "progress": ("minikv.commands.work:main_progress", "show which exercises are done"),
    "build": ("minikv.commands.build:main", "build and execute notebooks from their text sources"),
}


def usage():
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m minikv COMMAND [--help] ...", "", "commands:", *lines, "",
         "python -m minikv COMMAND --help explains one of them."]
    )  # fmt: skip


def main(argv=None):
    """Runs a command and returns its exit status."""
    _tolerate_every_letter()
    argv = sys.argv[1:] if argv is None else list(argv)
    name = argv[0] if argv else "help"
    try:
        try:
            return _run(argv)
        finally:
            _flush()  # at the interpreter's own end nobody could catch what goes wrong
    except KeyboardInterrupt:
        status, message = 130, ""  # an empty line: the shell's prompt starts on its own
    except BrokenPipeError:  # whoever read the output, `head` for instance, has seen enough
        status, message = 141, None  # as a shell shows it of a program that SIGPIPE ended
    except OSError as error:
        status, message = 1, f"minikv {name}: {' '.join(str(error).split())}"
    except ModuleNotFoundError as error:
        if (error.name or "minikv").split(".")[0] == "minikv":
            raise
        environment = importlib.import_module("minikv.commands.environment")
        status, message = 1, environment.lacks(name, error.name)
    try:
        _flush()
    except OSError:  # what cannot be written must not be tried once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if message is not None:
        print(message, file=sys.stderr)
    return status


def _tolerate_every_letter():
    """A pipe may be in cp1252 or ascii: what it has no letter for is shown as \\u03c0."""
    for stream, errors in (
        (sys.stdin, "replace"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if hasattr(stream, "reconfigure"):  # it may be None, or a test's
            stream.reconfigure(errors=errors)


def _flush():
    if sys.stdout is not None:  # it is None where the shell has closed it
        sys.stdout.flush()


def _run(argv):
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    name = argv[0]
    if name not in COMMANDS:
        print(f"minikv: unknown command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    if name not in ("lab", "test", "fresh"):  # the others need what those install
        status = importlib.import_module("minikv.commands.environment").hand_over(argv)
        if status is not None:
            return status
    module, function = COMMANDS[name][0].split(":")
    return getattr(importlib.import_module(module), function)(argv[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
