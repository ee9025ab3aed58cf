"""Exceptions at a chosen point of a run: a call of some method, or any bytecode of some files."""

import functools
import sys


class Cut(BaseException):
    """As KeyboardInterrupt is, no Exception."""


class AtBytecode:
    """`with AtBytecode(files, at):` raises KeyboardInterrupt before the at-th bytecode (from 0)
    that is run in files whose path holds one of these texts. num: bytecodes so far, over every
    time that it was entered."""

    def __init__(self, files, at, error=KeyboardInterrupt):
        self.files, self.at, self.error, self.num = files, at, error, 0
        self._known = {}

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception):
        sys.settrace(self.before)

    def _call(self, frame, event, argument):
        name = frame.f_code.co_filename
        if name not in self._known:
            self._known[name] = any(text in name for text in self.files)
        if not self._known[name]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame, event, argument):
        if event == "opcode":
            self.num += 1
            if self.num == self.at + 1:
                # No tracing while the exception is on its way: one interrupt, not two.
                raise self.error(f"in {frame.f_code.co_qualname}")
        return self._opcode


class AtCall:
    """Raises at the at-th call (from 0) of any method of these objects, before it is made or once
    it is done, while this is entered. num: twice the calls so far. A method is watched where it is
    looked up on the object."""

    def __init__(self, objects, at, error=Cut):
        self.at, self.error, self.num, self.is_on = at, error, 0, False
        self.watch(objects)

    def watch(self, objects, starts=""):
        """starts: of the methods, those whose name does."""
        for each in objects:
            for cls in type(each).__mro__[:-1]:
                for name, member in vars(cls).items():
                    if callable(member) and not name.startswith("__") and name.startswith(starts):
                        self._watch(each, name)

    def __enter__(self):
        self.is_on = True
        return self

    def __exit__(self, *exception):
        self.is_on = False

    def _watch(self, each, name):
        method = getattr(each, name)

        @functools.wraps(method)
        def watched(*args, **options):
            if not self.is_on:
                return method(*args, **options)
            now, self.num = self.num, self.num + 2
            if now == self.at:
                raise self.error(f"before {name}")
            result = method(*args, **options)
            if now + 1 == self.at:
                raise self.error(f"after {name}")
            return result

        if name not in vars(each):
            setattr(each, name, watched)
