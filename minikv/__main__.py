"""`python -m minikv COMMAND`: one table of commands, each imported only when it is called.

`lab` and `test` run before anything is installed, so nothing here may import more than the
standard library.
"""

import importlib
import sys

# command -> (module:function taking argv and returning an exit status, one line of help)
COMMANDS = {
    "lab": ("minikv.bootstrap:lab", "set everything up and open the course in JupyterLab"),
    "test": ("minikv.bootstrap:test", "set everything up and run all tests"),
    "doctor": ("minikv.doctor:main", "say whether this machine is ready, and what works on it"),
    "generate": ("minikv.generate:main", "answer a prompt, streaming"),
    "simulate": ("minikv.simulate:main", "serve simulated traffic on a GPU that is not here"),
    "bench": ("minikv.bench:main", "measure this engine beside transformers and vLLM"),
    "start": ("minikv.classroom.work:main_start", "copy a chapter's exercises to work/"),
    "check": ("minikv.classroom.check:main", "check your exercises, one by one"),
    "reset": ("minikv.classroom.work:main_reset", "restore an exercise as shipped"),
    "progress": ("minikv.classroom.work:main_progress", "show which exercises are done"),
    "build": ("minikv.classroom.build:main", "build and execute notebooks from their text sources"),
}


def usage():
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: python -m minikv COMMAND [--help] ...", "", "commands:", *lines, "",
         "python -m minikv COMMAND --help explains one of them."]
    )  # fmt: skip


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    name = argv[0]
    if name not in COMMANDS:
        print(f"minikv: unknown command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    if name not in ("lab", "test"):  # the others need what those two install
        status = importlib.import_module("minikv.bootstrap").hand_over(argv)
        if status is not None:
            return status
    module, function = COMMANDS[name][0].split(":")
    return getattr(importlib.import_module(module), function)(argv[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
