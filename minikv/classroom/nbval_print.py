"""Keeps what a learner's code prints apart from what a check prints; only the latter is compared.

People print to see what their code does. That must not make a right answer wrong, nor can it be
told from the text alone: so it is told by who is running when something is printed. A check's words
are those that its own cell prints, with no code of the learner's between; whatever else appears
(from a thread, by a figure left open) is no check's.
"""

import sys


def called_from(files, but_not=()):
    """Whether code from one of these files is running, or has called what is running, and no code
    from a file of `but_not`."""
    frame, found = sys._getframe(1), False
    while frame is not None:
        if frame.f_code.co_filename in but_not:
            return False
        found = found or frame.f_code.co_filename in files
        frame = frame.f_back
    return found


class Stdout:
    """The kernel's stdout, for what the checks print; the rest goes to stderr."""

    def __init__(self, stream, checks, own):
        self._stream, self._checks, self._own = stream, checks, own

    def write(self, text):
        checks = called_from(self._checks, self._own)
        return (self._stream if checks else sys.stderr).write(text)

    def writelines(self, lines):
        for line in lines:
            self.write(line)

    def __getattr__(self, name):
        return getattr(self._stream, name)


def install(checks, own):
    """In a kernel: of stdout and of pictures only that is left which the cells with the sources
    `checks` print, without the help of those with the sources `own`. What is printed otherwise goes
    to stderr, which is never compared (but counts among what a cell may print).

    It also keeps `quit()` from ending the kernel, as nobody else's cell could run then.
    """
    from IPython import get_ipython

    shell = get_ipython()

    def files(sources):
        return {
            shell.compile.get_code_name(text, shell.transform_cell(text), 0) for text in sources
        }

    checks, own = files(checks), files(own)
    publish, stdout = shell.display_pub.publish, Stdout(sys.stdout, checks, own)

    def publish_apart(*args, **kwargs):
        if called_from(checks, own):
            publish(*args, **kwargs)

    def leave():
        raise SystemExit

    def put_stdout_back(*_):
        sys.stdout = stdout

    shell.display_pub.publish = publish_apart
    shell.ask_exit = leave
    # A learner's cell may leave another stream in its place; the next cell's request looks for it.
    shell.events.register("post_run_cell", put_stdout_back)
    put_stdout_back()
