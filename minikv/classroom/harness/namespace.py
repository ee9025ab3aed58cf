"""The checks' own code runs beside the learner's names, not among them.

A notebook is one namespace. A learner who writes `sum = 0` or `from rich import print` would change
what every check below means. So the checks' functions get other globals: their own names and
Python's builtins come first there, the notebook's names last.
"""

import builtins
import contextlib
import sys
import types
import warnings

STATE = "__checks__"  # the notebook's name for its Shelf


class Shelf(dict):
    """The globals of the checks' code in one notebook.

    forbidden: {start of a module's name: what to call it}; the answers may not call it.
    allowed: modules that they may call all the same. own: code objects that hold an answer.
    """

    def __init__(self, notebook, forbidden=(), allowed=()):
        super().__init__(__name__="__main__", __builtins__=vars(builtins))
        self.notebook, self.forbidden, self.allowed = notebook, dict(forbidden), set(allowed)
        self.own = set()

    def __missing__(self, name):
        if hasattr(builtins, name):
            return getattr(builtins, name)
        return self.notebook[name]  # a KeyError becomes the NameError that it should be


running = []  # the Shelves of the checks that run now, innermost last


def begin(notebook, *, forbidden=(), allowed=()):
    """Last line of a chapter's setup cell: `begin(globals())`.

    What the cell has imported or made by then stays what it is for the checks, whatever a learner
    binds to its name later. (What is written in the notebook itself, `ours` keeps.)
    """
    shelf = shelf_of(notebook)
    shelf.forbidden, shelf.allowed = dict(forbidden), set(allowed)
    _hold(shelf, [name for name in notebook if not name.startswith("_")])


def shelf_of(notebook):
    """The one Shelf of a notebook: a cell that runs again adds to it."""
    return notebook.setdefault(STATE, Shelf(notebook))


def _hold(shelf, names):
    """Notes what the names mean now; not for what is written in the notebook, an answer perhaps.

    What is noted already stays: a learner may have bound the name anew since.
    """
    for name in names:
        value = shelf.notebook.get(name, shelf)
        written_here = getattr(value, "__module__", None) == shelf.notebook.get("__name__")
        if value is not shelf and not written_here and not hasattr(builtins, name):
            shelf.setdefault(name, value)


def ours(thing):
    """Decorates a function or class that a check needs and that holds an answer: it keeps its name
    for the checks, and a learner's answer that calls it has not solved anything (Delegated).

    It keeps the constants, too, that it reads by name. Answers it must get as arguments.
    """
    return _keep(thing, sys._getframe(1).f_globals, closed=True)


def lent(thing):
    """As `ours`, for what an answer may call (a session that it is given, say)."""
    return _keep(thing, sys._getframe(1).f_globals, closed=False)


def _keep(thing, notebook, closed):
    if isinstance(notebook, Shelf):  # inside a check: it runs there anyway
        return thing
    shelf = shelf_of(notebook)
    if isinstance(thing, type):
        for name, value in list(vars(thing).items()):
            wrapper = type(value) if isinstance(value, staticmethod | classmethod) else None
            kept = _kept(value.__func__ if wrapper else value, shelf, closed)
            if kept is not None:
                setattr(thing, name, wrapper(kept) if wrapper else kept)
    else:
        thing = _kept(thing, shelf, closed)
    shelf[thing.__name__] = thing
    return thing


def _kept(value, shelf, closed):
    """A function of the notebook's with the Shelf for its globals; None for anything else."""
    if not isinstance(value, types.FunctionType) or value.__globals__ is not shelf.notebook:
        return None
    if closed:
        shelf.own.add(value.__code__)
    _hold(shelf, _names(value.__code__) - shelf.keys())  # what `begin` held stays
    return moved(value, shelf)


def _names(code):
    inner = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return {*code.co_names}.union(*inner)


def moved(function, shelf):
    """The same function with `shelf` for its globals."""
    copy = types.FunctionType(
        function.__code__, shelf, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    copy.__doc__ = function.__doc__
    vars(copy).update(vars(function))
    return copy


@contextlib.contextmanager
def defaults():
    """Python's, numpy's and torch's settings as they are at first; afterwards the learner's again.

    `torch.set_default_dtype(torch.float64)`, `np.seterr(all="raise")` or warnings turned into
    errors change what a check computes, and are nobody's mistake.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        if numpy := sys.modules.get("numpy"):
            stack.enter_context(numpy.errstate(all="warn", under="ignore"))
        if torch := sys.modules.get("torch"):
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
            stack.enter_context(torch.set_grad_enabled(True))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
        yield
