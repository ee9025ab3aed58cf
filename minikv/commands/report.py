"""What commands that measure share: their errors as one line, their results as JSON."""

import json
import os
import sys
from pathlib import Path


def run_command(name, function, args, indent=2):
    """Calls function(args) and writes what it returns to args.json; returns the exit status."""
    try:
        check_json(args.json)
        result = function(args)
        if args.json is not None:
            Path(args.json).write_text(json.dumps(result, indent=indent) + "\n", encoding="utf-8")
    except (MemoryError, OverflowError) as error:
        print(f"minikv {name}: too large for this machine: {error}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, RuntimeError) as error:  # __main__ handles all others
        print(f"minikv {name}: {error}", file=sys.stderr)
        return 1
    return 0


def check_json(path):
    """What can be known to fail before the run does so now: raises ValueError."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--json {path!r}: there is no folder {folder}")
    if Path(path).is_dir() or not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise ValueError(f"--json {path!r}: that file cannot be written")
