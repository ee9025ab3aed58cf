"""`python -m minikv test`: set everything up and run the tests."""

import os

from minikv.commands import environment
from minikv.commands.steps import reported, run, setup_parser


def main(argv):
    parser = setup_parser(
        "test", "Set everything up and run the tests.", "pytest, for example -k scheduler"
    )
    parser.add_argument("--long", action="store_true", help="run the long tests instead")
    options, extra = parser.parse_known_args(argv)

    def steps():
        python = environment.ensure_all(options.torch, tests=True)
        # One thread per worker: two workers with a thread per core each only wait for each other.
        environ = dict(os.environ, OMP_NUM_THREADS="1")
        return run(pytest_command(python, options.long, extra), environ=environ)

    return reported(steps)


def pytest_command(python, long, extra):
    workers = ["-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]  # see tests/conftest.py
    slowest = ["--durations", "10", "--durations-min", "1"]
    marker = "long" if long else "not long"
    return [python, "-m", "pytest", *workers, *slowest, "-m", marker, *extra]
