"""A pytest plugin that closes nbval's gaps; load it with `-p minikv.classroom.nbval_plugin`.

nbval alone notices a dead kernel only at the cell's time-out, calls what follows a time-out an
expected failure, takes `exit()` for success, compares progress bars, and holds whatever is printed
in memory. Here each of these is one cell's plain failure. With MINIKV_NBVAL_REPORT set, the result
of every cell is appended to that file as a line of JSON, by cell id, while the run goes on.
"""

import json
import math
import os
import re
import time
from collections import deque
from queue import Empty

import nbval.plugin
import psutil
import pytest
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError

WIDGET = "application/vnd.jupyter.widget-view+json"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
MAX_PRINTED = 2_000_000  # bytes from one cell
MAX_MEMORY = 3 << 30  # bytes by which the kernel may grow in one cell
POLL_SECONDS = 0.1


class KernelDied(Exception):
    """The kernel's process has ended."""


class PrintedTooMuch(Exception):
    """A cell went over MAX_PRINTED."""


class TookTooMuch(Exception):
    """A cell went over MAX_MEMORY."""


# ------------------------------------------------------------------------------------- the kernel


def _receive(kernel, stream, timeout):
    message = getattr(kernel.kc, f"get_{stream}_msg")(timeout=timeout)
    if stream == "iopub":
        kernel.printed = getattr(kernel, "printed", 0) + len(str(message["content"]))
        if kernel.printed > MAX_PRINTED:
            raise PrintedTooMuch
    return message


def _expired(kernel, end):
    """Called when nothing arrived: raises KernelDied, or says whether the time is up."""
    if not kernel.is_alive():
        raise KernelDied
    if _memory(kernel) > getattr(kernel, "memory", math.inf) + MAX_MEMORY:
        raise TookTooMuch
    return end is not None and time.monotonic() >= end


def _memory(kernel):
    """Bytes that the kernel's process holds; 0 if nobody knows."""
    try:
        return psutil.Process(kernel.km.provisioner.pid).memory_info().rss
    except (AttributeError, psutil.Error):
        return 0


def get_message(self, stream, timeout=None):
    if stream == "iopub" and getattr(self, "held", None):
        return self.held.popleft()
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            return _receive(self, stream, POLL_SECONDS)
        except Empty:
            if _expired(self, end):
                raise


def await_reply(self, msg_id, timeout=None):
    """Until the reply, also takes what the cell prints, so that an endless print is stopped."""
    self.held = deque()
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            while True:
                self.held.append(_receive(self, "iopub", 0))
        except Empty:
            pass
        try:
            message = _receive(self, "shell", POLL_SECONDS)
        except Empty:
            if _expired(self, end):
                raise
            continue
        if message["parent_header"].get("msg_id") == msg_id:
            self.last_reply = message["content"]
            return


# -------------------------------------------------------------------------------------- the cells

_init = IPyNbFile.__init__
_runtest = IPyNbCell.runtest
_compare = IPyNbCell.compare_outputs


def init(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    self.skip_compare += ("stderr",)  # warnings and progress bars differ from run to run


def compare_outputs(self, test, ref, skip_compare=None):
    # A progress bar drawn as a widget: the build stores none.
    test, ref = ([o for o in outputs if WIDGET not in o.get("data", {})] for outputs in (test, ref))
    return _compare(self, test, ref, skip_compare)


def runtest(self):
    """One cell; on failure `self.failure` is (kind, message) where nbval has none of its own."""
    kernel = self.parent.kernel
    self.failure = None
    if not kernel.is_alive():
        _fail(self, "not run", "not run: the kernel had already stopped")
    kernel.printed, kernel.last_reply, self.parent.timed_out = 0, None, False
    kernel.memory = _memory(kernel)
    seconds = self.config.option.nbval_cell_timeout
    try:
        _runtest(self)
    except KernelDied:
        _fail(self, "died", "the kernel died")
    except PrintedTooMuch:
        kernel.stop()
        _fail(self, "printed", f"printed more than {MAX_PRINTED:,} bytes")
    except TookTooMuch:
        kernel.stop()
        _fail(self, "memory", f"took more than {MAX_MEMORY >> 30} GiB of memory")
    except NbCellError:
        if self.parent.timed_out:
            _fail(self, "timeout", f"ran longer than {seconds:g} s")
        raise
    if self.parent.timed_out:  # the code caught the interrupt and went on
        _fail(self, "timeout", f"ran longer than {seconds:g} s")
    reply = kernel.last_reply or {}
    if any(payload.get("source") == "ask_exit" for payload in reply.get("payload", [])):
        _fail(self, "exit", "called exit(); a notebook's cell must not")
    if reply.get("status") != "ok" and not self.options["check_exception"]:
        _fail(self, "error", f"ended with status {reply.get('status')}")


def _fail(cell, kind, message):
    cell.failure = {"kind": kind, "message": message}
    cell.raise_cell_error(message)


RunningKernel.get_message = get_message
RunningKernel.await_reply = await_reply
IPyNbFile.__init__ = init
IPyNbCell.setup = lambda self: None  # nbval's would expect every cell after a time-out to fail
IPyNbCell.runtest = runtest
IPyNbCell.compare_outputs = compare_outputs
# Comments in a cell's source would let a learner switch its comparison off; tags do all we need.
nbval.plugin.find_comment_markers = lambda source: iter(())


def pytest_configure(config):
    os.environ.setdefault("MINIKV_STATIC", "1")


# ------------------------------------------------------------------------------------- the report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    path = os.environ.get("MINIKV_NBVAL_REPORT")
    if path and isinstance(item, IPyNbCell) and (report.when == "call" or report.failed):
        result = {"id": item.cell.get("id", ""), "outcome": report.outcome}
        if report.failed:
            result.update(_explain(item, str(call.excinfo.value)))
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    return report


def _explain(item, message):
    """What went wrong in a cell: a kind, a message, and for an error its name and place."""
    if getattr(item, "failure", None):
        return item.failure
    for output in item.test_outputs or []:
        if output.output_type == "error":
            traceback = ANSI.sub("", "\n".join(output.traceback))
            return {
                "kind": "error",
                "ename": output.ename,
                "message": output.evalue,
                "where": _innermost(traceback),
            }
    if getattr(item, "comparison_traceback", None):
        return {"kind": "differs", "message": _difference(item.cell.outputs, item.test_outputs)}
    return {"kind": "set-up", "message": message}


def _innermost(traceback):
    """The innermost line of the notebook's own that a traceback shows, even if a library raised the
    error: `line 2: return block_sise`."""
    found = ""
    # Each frame begins with its place: `Cell In[3], line 2, in f(x)`, or `File ...:12, in g(x)`.
    for frame in re.split(r"^(?=Cell In|File )", traceback, flags=re.M):
        arrow = re.search(r"^-+> *(\d+) (.*)$", frame, re.M)
        if arrow and not (found and frame.startswith("File ")):
            found = f"line {arrow[1]}: {arrow[2].strip()}"
    return found


def _difference(expected, printed):
    """The first line in which two lists of outputs differ."""
    lines, others = (_text(outputs).splitlines() for outputs in (expected, printed))
    for number in range(max(len(lines), len(others))):
        line, other = (part[number] if number < len(part) else None for part in (lines, others))
        if line != other:
            said = "nothing" if other is None else repr(other[:200])
            wanted = "nothing more" if line is None else repr(line[:200])
            return f"printed {said} where {wanted} was expected (line {number + 1})"
    return "its outputs differ in kind"


def _text(outputs):
    texts = []
    for output in outputs:
        if output.output_type == "stream" and output.get("name") == "stdout":
            texts.append(output.text)
        elif output.output_type in ("display_data", "execute_result"):
            texts.append(output.data.get("text/plain", "") + "\n")
        elif output.output_type == "error":
            texts.append(f"{output.ename}: {output.evalue}\n")
    return "".join(texts)
