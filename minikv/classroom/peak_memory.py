"""How much memory each notebook's kernel takes at its peak: what to plan a room of learners with.

`python -m minikv.classroom.peak_memory [NAME ...]`: executes the chapters as they are built (those
whose names begin so), one at a time, and leaves their files as they are. Linux only.
"""

import sys
from pathlib import Path

import nbformat

from minikv.classroom.execute import execute, package_root
from minikv.classroom.files import CourseError, read_notebook

# The peak counts pages of files, too (libraries, weights read in place), which the system can drop
# and kernels share; RssAnon is what is the kernel's own.
ASK = """
_lines = (_line.split() for _line in open("/proc/self/status"))
print(*(1024 * int(_line[1]) for _line in _lines if _line[0] in ("VmHWM:", "RssAnon:")))
"""


def peak_memory(path, root) -> tuple[int, int]:
    """(bytes resident at the peak, bytes at the end that no file backs)."""
    notebook = read_notebook(path)
    notebook.cells.append(nbformat.v4.new_code_cell(ASK))
    execute(notebook, root, path.stem)
    peak, own = map(int, notebook.cells[-1].outputs[0].text.split())
    return peak, own


def main(argv) -> int:
    root = package_root(Path.cwd())
    for path in sorted(root.glob("notebooks/*.ipynb")):
        if not argv or path.name.startswith(tuple(argv)):
            try:
                peak, own = peak_memory(path, root)
            except CourseError as error:
                print(f"{path.stem}: {error}", file=sys.stderr)
                return 1
            print(
                f"{path.stem}: {peak / 1e9:.2f} GB at the peak; at the end {own / 1e9:.2f} GB that "
                "no file backs",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
