"""A notebook shows the last expression of a cell, and only that: what else a cell says is lost."""

import ast

# Functions of minikv whose result is there to be looked at; of minikv.viz all that return a figure.
DISPLAYED = {"show", "excerpt", "beside"}


def lost(notebook):
    """A problem for every bare name and every call of `show`, or of a function that makes a figure,
    in the middle of a code cell, in a loop or in a function."""
    problems = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for node in _lost_in(cell.source):
                what = ast.unparse(node).splitlines()[0]
                problems.append(
                    f"cell {cell.id!r} shows nothing of `{what:.60}`: a notebook displays a "
                    "cell's last expression alone"
                )
    return problems


def unseen(notebook):
    """A problem for every cell that ends with show(...) or its like, and stores no output of it."""
    problems = []
    for cell in notebook.cells:
        tree = _parsed(cell.source if cell.cell_type == "code" else "")
        last = _last(tree, cell.source) if tree.body else None
        if last is not None and _called(last.value) in DISPLAYED:
            stored = [o.get("data", {}) for o in cell.get("outputs", [])]
            if not any("text/html" in data for data in stored):
                problems.append(f"cell {cell.id!r} stores nothing of {ast.unparse(last):.60}")
    return problems


def _last(tree, source):
    """The expression that is displayed, or None."""
    hidden = source.rstrip().endswith(";")
    return tree.body[-1] if isinstance(tree.body[-1], ast.Expr) and not hidden else None


def _lost_in(source):
    tree = _parsed(source)
    last = _last(tree, source) if tree.body else None
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and node is not last:
            is_call = isinstance(node.value, ast.Call)
            # Other expressions may stand there for their time, or for the error that they raise.
            if isinstance(node.value, ast.Name | ast.Attribute) or (
                is_call and _called(node.value) in DISPLAYED | _figures()
            ):
                yield node


def _called(value):
    """The name of the function that is called, without where it is from."""
    function = getattr(value, "func", None)
    return getattr(function, "attr", getattr(function, "id", None))


def _figures():
    """Functions of minikv.viz by their names: those that make something to look at."""
    import minikv.viz

    ends = ("_map", "_maps", "_strip", "_strips", "_player", "_lab", "_figure", "_histogram")
    return {name for name in minikv.viz.__all__ if name.endswith(ends)}


def _parsed(source):
    """Without magics, which are no Python."""
    lines = source.splitlines()
    return ast.parse("\n".join("pass" if x.startswith(("%", "!")) else x for x in lines))
