"""A learner's answer, run within bounds: it ends, it fits into memory, and it is the learner's own.

The answer's code is whatever comes from no library: the notebook's cells, or a file of the
learner's own. The checks' code is told by its globals (a Shelf), the package's by its folder.
"""

import contextlib
import ctypes
import functools
import inspect
import linecache
import os
import sys
import sysconfig
import threading
import time
import traceback
from itertools import islice
from pathlib import Path

from minikv.classroom.harness.namespace import Shelf, running

MOST_STEPS = 10_000_000  # instructions
MOST_MEMORY = 2 << 30  # bytes beyond what the process holds already
MOST_ITEMS = 1000  # of a generator
PACKAGE = str(Path(__file__).resolve().parents[2])
LIBRARIES = tuple(
    path + os.sep for path in {os.path.dirname(os.__file__), sysconfig.get_path("stdlib"), PACKAGE}
)


class Endless(BaseException):
    """Not an Exception, so that no `except Exception` inside a loop keeps the loop going."""


class Delegated(BaseException):
    """Somebody else's answer was called: the package's, or a check's own."""


@functools.cache
def _in_library(filename):
    installed = {"site-packages", "dist-packages"} & set(Path(filename).parts)
    return bool(installed) or filename.startswith(("<frozen ", *LIBRARIES))


def by_learner(frame):
    """Whether a frame runs code of the answer: neither a library's, nor the checks' own."""
    return not isinstance(frame.f_globals, Shelf) and not _in_library(frame.f_code.co_filename)


def name_of(function):
    """What to call an answer that may be a partial, or an object with __call__."""
    name = getattr(function, "__name__", None)
    if name is None and isinstance(function, functools.partial):
        return name_of(function.func)
    return name or type(function).__name__


def where(error):
    """`line 3: return block_sise`: the innermost line of the learner's own, even if a library
    raised the error; an empty text if there is none."""
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if by_learner(frame):
            line = linecache.getline(frame.f_code.co_filename, number).strip()
            found = f"line {number}: {line}" if line else f"line {number}"
    return found


def bounded(function, *args, steps=MOST_STEPS, memory=MOST_MEMORY, finish=None):
    """function(*args); a generator is listed. finish(value), if given, runs within the bounds, too.

    Raises Endless after so many `steps` of the learner's code; MemoryError beyond `memory` bytes
    (on Linux; None: no limit); Delegated where it calls what the chapter forbids. If `function`
    is a check's own (it runs the engine, say), only the learner's direct calls count as that.
    """
    tracer, done = sys.gettrace(), 0
    shelf = running[-1] if running else Shelf({})
    lenient = isinstance(getattr(function, "__globals__", None), Shelf)

    def count(frame, event, arg):
        nonlocal done
        if not by_learner(frame):
            if not lenient or by_learner(frame.f_back):
                _no_delegate(frame, shelf)
            return None
        frame.f_trace_opcodes = True  # `while True: pass` has no lines to count
        done += 1
        if done > steps:
            insist.start()
            raise Endless
        return count

    insist = _Insist()
    with _limited(memory), insist:
        sys.settrace(count)
        try:
            value = function(*args)
            value = list(islice(value, MOST_ITEMS)) if inspect.isgenerator(value) else value
            value = finish(value) if finish else value
            if done > steps:  # caught
                raise Endless
            return value
        except (Endless, Delegated) as error:
            error.answer = name_of(function)
            raise
        finally:
            sys.settrace(tracer)


class _Insist:
    """Raises Endless in this thread again and again until the answer has ended.

    A bare `except:` in the loop catches the first one, and a trace function that has raised is
    never called again.
    """

    def __init__(self):
        self.thread_id, self.lock = threading.get_ident(), threading.Lock()
        self.sent = self.ended = False

    def start(self):
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            time.sleep(0.05)
            with self.lock:
                if self.ended:
                    return
                self._send()

    def _send(self):
        self.sent, error = True, ctypes.py_object(Endless)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread_id), error)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        while not self.ended:
            try:
                with self.lock:
                    self.ended = True
                    if not self.sent:
                        return
                    self._send()  # in the place of one that may be on its way
                while True:
                    pass  # until it arrives
            except Endless:
                pass


def _no_delegate(frame, shelf):
    if frame.f_code in shelf.own:
        raise Delegated("the check")
    module = frame.f_globals.get("__name__") or ""
    if module in shelf.allowed:
        return
    for start, called in shelf.forbidden.items():
        if module.startswith(start):
            raise Delegated(called)


@contextlib.contextmanager
def _limited(memory):
    """Lets the process take no more than `memory` bytes beyond what it has.

    The kernel of the operating system refuses the allocation, so that it works inside C as well
    (`list(itertools.count())`). macOS ignores such a limit, and Windows has none; there `check`
    watches the process from outside (nbval_plugin.py).
    """
    if memory is None or not sys.platform.startswith("linux"):
        yield
        return
    import resource

    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = min([held + memory] + [n for n in (soft, hard) if n != resource.RLIM_INFINITY])
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
