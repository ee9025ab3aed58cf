"""What runs inside vLLM's own environment, asked from here."""

import json
import subprocess
from pathlib import Path


def ask_vllm(python, program, what, settings, stdin=None):
    """Runs a file of this folder in vLLM's Python, with settings as JSON (and stdin, where they
    are too long for an argument); returns the last line of its standard output, parsed. Raises
    RuntimeError with its last word where it fails."""
    worker = str(Path(__file__).with_name(program))
    done = subprocess.run(
        [python, worker, json.dumps(settings)],
        input=json.dumps(stdin),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{what} failed: {(done.stderr.splitlines() or ['?'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
