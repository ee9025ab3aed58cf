"""What `minikv` consists of, read from its own files."""

import ast
import io
import re
import textwrap
import tokenize
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1]
COLUMNS = 90  # as wide as code: a longer line is broken by the page, in the middle of words
# The engine's floors, lowest first (a floor imports only those below it).
ENGINE = (
    "request", "specs", "metrics", "kv_cache", "scheduler", "workloads", "static_batching", "core",
    "simulator", "model", "engine",
)  # fmt: skip


class Part(NamedTuple):
    """A module or a folder of them. num_lines: lines of code, without blank lines, comments and
    docstrings. about: the first sentence of its own docstring, or else what a folder holds.

    As text it is a row of a table, with `about` in lines of its own column."""

    name: str
    num_lines: int
    about: str

    def __str__(self):
        start = f"{self.name:23} {self.num_lines:5,} lines  "
        rest = textwrap.wrap(self.about, COLUMNS - len(start), break_on_hyphens=False) or [""]
        return ("\n" + " " * len(start)).join([start + rest[0], *rest[1:]]).rstrip()


def lines_of_minikv(parts=ENGINE, package=PACKAGE) -> list[Part]:
    """The parts of the engine that exist so far, lowest floor first."""
    found = []
    for name in parts:
        file, folder = Path(package, f"{name}.py"), Path(package, name)
        if file.is_file():
            found.append(Part(f"{name}.py", _num_lines(file), _about(file)))
        elif (folder / "__init__.py").is_file():
            num_lines = sum(map(_num_lines, folder.rglob("*.py")))
            inside = sorted({path.stem for path in folder.iterdir() if path.suffix == ".py"})
            holds = ", ".join(stem for stem in inside if stem != "__init__")
            found.append(Part(f"{name}/", num_lines, _about(folder / "__init__.py") or holds))
    return found


def _num_lines(path):
    source = path.read_text(encoding="utf-8")
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skip |= {tokenize.ENCODING, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def _about(path):
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.!?])\s", " ".join(text.split()), maxsplit=1)[0]
