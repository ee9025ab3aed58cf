"""`show(obj)`: the package's own source in a notebook, so that text and code cannot drift apart."""

import html
import inspect
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1]
# Text and background both, inline, on each element that JupyterLab gives colours of its own (pre,
# code, tr, th, td): a dark theme must not mix one of its own with one of ours.
COLOURS = "background:#f8f8f8;color:#24292f"
STYLE = f"{COLOURS};padding:0.5em 1em;overflow-x:auto;font-size:90%"


class Source:
    """A piece of source: highlighted in a notebook, plain in a terminal and under nbval."""

    def __init__(self, where, text):
        self.where = where  # its file; without a line number, which any edit above it would change
        self.text = text

    def __repr__(self):
        return f"{'//' if self.where.endswith('.cpp') else '#'} {self.where}\n{self.text}"

    def _repr_html_(self):
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import CppLexer, PythonLexer

        pre = f"{COLOURS};margin:0;line-height:125%"
        formatter = HtmlFormatter(noclasses=True, cssstyles=STYLE, prestyles=pre)
        lexer = CppLexer() if self.where.endswith(".cpp") else PythonLexer()
        return highlight(repr(self), lexer, formatter)


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
    path = Path(inspect.getsourcefile(target)).relative_to(PACKAGE.parent)
    return Source(path.as_posix(), textwrap.dedent(inspect.getsource(target)).rstrip("\n"))


def excerpt(path, first, last=None):
    """Lines of one of the package's files, which need not be importable here, nor Python.

    path: within `minikv`, as "model/kernels/cpu.cpp". first: a piece of the first line, which no
    other line has. last: a piece of the last one, looked for from there on; None: that line alone.

    Raises ValueError where the file, or such a line, is not there, or `first` is in several.
    """
    file = (PACKAGE / path).resolve()
    if not file.is_relative_to(PACKAGE.resolve()) or not file.is_file():
        raise ValueError(f"minikv has no file {path!r}")
    lines = file.read_text(encoding="utf-8").splitlines()
    starts = [number for number, line in enumerate(lines) if first in line]
    if len(starts) != 1:
        raise ValueError(f"{len(starts)} lines of {path} contain {first!r}; it must be 1")
    end = start = starts[0]
    if last is not None:
        while end < len(lines) and last not in lines[end]:
            end += 1
        if end == len(lines):
            raise ValueError(f"no line of {path} contains {last!r} after {first!r}")
    text = textwrap.dedent("\n".join(lines[start : end + 1]))
    return Source(file.relative_to(PACKAGE.resolve().parent).as_posix(), text)


class Pair(NamedTuple):
    """What two excerpts do, in words, and the excerpts; "" where a file has nothing to say."""

    what: str
    left: str
    right: str


class Beside:
    """Two files, line by line: a table in a notebook, plain text elsewhere."""

    def __init__(self, names, pairs):
        self.names, self.pairs = names, pairs

    def __repr__(self):
        texts = []
        for pair in self.pairs:
            lines = [f"-- {pair.what}"]
            for name, text in zip(self.names, pair[1:], strict=True):
                lines += [f"{name:>{max(map(len, self.names))}} | {x}" for x in text.splitlines()]
            texts.append("\n".join(lines))
        return "\n".join(texts)

    def _repr_html_(self):
        cell = f"{COLOURS};vertical-align:top;text-align:left;padding:0.3em 0.8em"
        rule = "border-top:1px solid #d0d7de"
        # Lines break at blanks alone. JupyterLab would break them anywhere.
        code = f"{COLOURS};margin:0;white-space:pre-wrap;word-break:normal;overflow-wrap:normal"

        def row(*cells):
            return f'<tr style="{COLOURS}">{"".join(cells)}</tr>'

        rows = [row(*(f'<th style="{cell}">{html.escape(name)}</th>' for name in self.names))]
        for what, *texts in self.pairs:
            rows.append(row(f'<td colspan="2" style="{cell};{rule}">{html.escape(what)}</td>'))
            shown = (f'<pre style="{code}">{_unbroken(html.escape(text))}</pre>' for text in texts)
            rows.append(row(*(f'<td style="{cell};width:50%">{text}</td>' for text in shown)))
        table = f"{COLOURS};border-collapse:collapse;table-layout:fixed;width:100%;margin:0"
        return f'<div style="{STYLE}"><table style="{table}">{"".join(rows)}</table></div>'


def _unbroken(text):
    """Browsers break a line at a hyphen, too: not in "-inf"."""
    return re.sub(r"\S*-\S+", r'<span style="white-space:nowrap">\g<0></span>', text)


def beside(left, right, rows):
    """Two files of the package beside each other. rows: (what it does, lines of left, lines of
    right); lines are what `excerpt` takes, a piece of one line or (first, last), or None.

    Raises ValueError as `excerpt` does: so no row can outlive the code that it quotes.
    """
    pairs = []
    for what, *asked in rows:
        texts = []
        for path, lines in zip((left, right), asked, strict=True):
            bounds = (lines,) if isinstance(lines, str) else lines
            texts.append("" if lines is None else excerpt(path, *bounds).text)
        pairs.append(Pair(what, *texts))
    return Beside((Path(left).name, Path(right).name), pairs)
