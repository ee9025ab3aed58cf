"""`show(obj)`: the package's own source in a notebook, so that text and code cannot drift apart."""

import inspect
import textwrap
from pathlib import Path


class Source:
    """A piece of source: highlighted in a notebook, plain in a terminal and under nbval."""

    def __init__(self, where, text):
        self.where = where  # its file; without a line number, which any edit above it would change
        self.text = text

    def __repr__(self):
        return f"# {self.where}\n{self.text}"

    def _repr_html_(self):
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import PythonLexer

        # Colours inline, text and background both: a dark theme must not mix in its own.
        style = "background:#f8f8f8;color:#24292f;padding:0.5em 1em;overflow-x:auto;font-size:90%"
        formatter = HtmlFormatter(noclasses=True, cssstyles=style, wrapcode=True)
        return highlight(repr(self), PythonLexer(), formatter)


def show(obj):
    """The source of a function, class, method or module of `minikv`, to be a cell's last line.

    Raises TypeError for any other kind of object, and ValueError for what is not minikv's.
    """
    target = obj.fget if isinstance(obj, property) else inspect.unwrap(obj)
    if not (inspect.isroutine(target) or inspect.isclass(target) or inspect.ismodule(target)):
        given = f"{type(obj).__name__} {obj!r:.60}"
        raise TypeError(f"show() takes a function, class, method or module, not {given}")
    module = inspect.getmodule(target)
    name = getattr(module, "__name__", "unknown")
    if name.split(".")[0] != "minikv":
        called = getattr(target, "__qualname__", getattr(target, "__name__", repr(target)))
        raise ValueError(f"show() prints minikv's own source; {called} is defined in {name}")
    path = Path(inspect.getsourcefile(target)).relative_to(Path(__file__).parents[2])
    return Source(path.as_posix(), textwrap.dedent(inspect.getsource(target)).rstrip("\n"))
