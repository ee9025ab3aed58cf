"""`python -m minikv`: what any command can meet ends in a line at most, and an exit status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minikv import __main__
from minikv.commands import environment

ROOT = Path(__main__.__file__).parents[1]
TINY = ["generate", "Hello", "--model", "tiny", "--raw", "--max-tokens", "8"]


def minikv(*argv, **options):
    options = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT, **options}
    return subprocess.run([sys.executable, "-m", "minikv", *argv], **options)


@pytest.fixture
def command(monkeypatch):
    """Gives `python -m minikv x` a function of the test's own."""
    monkeypatch.setattr(environment, "hand_over", lambda argv: None)
    monkeypatch.setitem(__main__.COMMANDS, "x", ("minikv.commands.environment:x", "a test's"))

    def run(function):
        monkeypatch.setattr(environment, "x", function, raising=False)
        return __main__.main(["x"])

    return run


def raiser(error):
    def function(argv):
        print("said before")
        raise error

    return function


@pytest.mark.parametrize(("error", "status", "message"), [
    (KeyboardInterrupt(), 130, "\n"),
    (BrokenPipeError(32, "Broken pipe"), 141, ""),
    (OSError(28, "No space left on device"), 1, "[Errno 28] No space left on device\n"),
    (PermissionError(13, "Permission denied", "a/b"), 1, "Permission denied: 'a/b'\n"),
    (OSError("a line\nand advice"), 1, "minikv x: a line and advice\n"),
    (ModuleNotFoundError("No module", name="nbval.plugin"), 1, "'x' needs nbval.plugin, which"),
])  # fmt: skip
def test_what_any_command_can_meet(command, capsys, error, status, message):
    assert command(raiser(error)) == status
    captured = capsys.readouterr()
    assert captured.out == "said before\n"
    assert message in captured.err and captured.err.count("\n") == bool(message)


@pytest.mark.parametrize("error", [
    ValueError("a bug"), ModuleNotFoundError("a bug", name="minikv.nothing"), SystemExit(2),
])  # fmt: skip
def test_a_bug_keeps_its_traceback(command, error):
    with pytest.raises(type(error)):
        command(raiser(error))


def test_a_command_without_a_status_has_status_0(command):
    assert command(lambda argv: None) == 0
    assert command(lambda argv: 3) == 3


@pytest.mark.parametrize("argv", [["help"], [], ["lab", "--help"], TINY], ids=lambda a: " ".join(a))
def test_a_reader_that_has_gone_is_no_news(argv):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = minikv(*argv, stdout=writer)
    finally:
        os.close(writer)
    assert result.stderr == ""
    if "--help" not in argv:  # argparse itself passes over it
        assert result.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
@pytest.mark.parametrize("argv", [["help"], TINY], ids=lambda argv: argv[0])
def test_a_full_disk_is_one_line(argv):
    with open("/dev/full", "w") as full:
        result = minikv(*argv, stdout=full)
    assert result.returncode == 1
    assert result.stderr == f"minikv {argv[0]}: [Errno 28] No space left on device\n"


@pytest.mark.skipif(os.name == "nt", reason="closes descriptors as a POSIX shell does")
def test_closed_streams():
    script = f'"{sys.executable}" -m minikv'
    shell = {"shell": True, "cwd": ROOT, "capture_output": True, "text": True}
    result = subprocess.run(f"{script} help >&-", **shell)
    assert (result.returncode, result.stderr) == (0, "")
    result = subprocess.run(f"{script} generate - --model tiny <&-", **shell)
    assert result.returncode == 1
    assert result.stderr.startswith("minikv generate: standard input is closed")
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_is_quiet_from_the_start_and_while_reading():
    command = [sys.executable, "-m", "minikv", "generate", "-", "--model", "tiny"]
    for seconds in (0.7, 6):  # while PyTorch is imported; while the prompt is being read
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out.strip(), err.strip()) == (130, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_no_output_dies_of_an_encoding(encoding):
    env = dict(os.environ, PYTHONIOENCODING=encoding)
    options = {"env": env, "stdout": subprocess.PIPE, "encoding": encoding}
    result = minikv("check", "π \udc80.ipynb", **options)
    assert (result.returncode, result.stderr) == (
        1, "check: \\u03c0 \\udc80.ipynb does not exist\n",
    )  # fmt: skip
    code = (
        "import sys; from minikv import __main__ as m; sys.modules['it'] = m\n"
        "m.it = lambda argv: print('passed: π', sys.stdin.read())\n"
        "m.COMMANDS['it'] = ('it:it', ''); sys.argv[1:] = ['it']; raise SystemExit(m.main())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], input="ε".encode(), env=env, cwd=ROOT, capture_output=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.decode(encoding).startswith("passed: \\u03c0 ")
