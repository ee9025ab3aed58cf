"""Runs a notebook's cells in a fresh kernel of this very interpreter."""

import json
import os
import re
import tempfile
import time
from pathlib import Path

import nbformat
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from tqdm.auto import tqdm

from minikv.classroom.files import CourseError, digest

CELL_SECONDS = 600
WIDGET = "application/vnd.jupyter.widget-view+json"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Run after the last cell, and not stored: which parts of the package did this notebook use?
PROBE = """
import json as _json, sys as _sys
print(_json.dumps(sorted(n for n in _sys.modules if n == "minikv" or n.startswith("minikv."))))
"""


class ThisInterpreter(KernelSpecManager):
    """Whatever name is asked for: a registered `python3` may be another environment's."""

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


def package_root(root):
    """The folder from which a kernel imports `minikv`: the course's own, if it has one."""
    own = Path(root)
    return own if (own / "minikv").is_dir() else Path(__file__).resolve().parents[2]


def kernel_environment(root, scratch):
    """The kernel's environment: static figures, this package, no one's private start-up files."""
    env = dict(os.environ, MINIKV_STATIC="1", IPYTHONDIR=str(scratch))
    paths = [str(package_root(root)), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env.pop("MPLBACKEND", None)  # the kernel's own default draws into the notebook
    return env


def execute(notebook, root, name):
    """Executes in place; returns (seconds, names of the minikv modules it had loaded)."""
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisInterpreter())
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=CELL_SECONDS,
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(Path(root, "notebooks"))}},
    )
    code = [(i, c) for i, c in enumerate(notebook.cells) if c.cell_type == "code"]
    probe = nbformat.v4.new_code_cell(PROBE)
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as scratch,
        # The kernel process's own complaints (its transport, its shutdown) are nobody's output.
        open(Path(scratch, "kernel.log"), "w+") as log,
        # cleanup_kc: without it, every notebook's kernel stays, with its gigabyte, to the end.
        client.setup_kernel(
            env=kernel_environment(root, scratch), stdout=log, stderr=log, cleanup_kc=True
        ),
    ):
        for index, cell in tqdm(code, desc=name, unit="cell", disable=None):
            _run_cell(client, cell, index, name)
        seconds = round(time.perf_counter() - start, 1)
        notebook.cells.append(probe)  # nbclient runs only cells that are in the notebook
        _run_cell(client, probe, len(notebook.cells) - 1, name)
        notebook.cells.pop()
    for _, cell in code:
        cell.outputs = _joined([o for output in cell.outputs if (o := _clean(output, root))])
    return seconds, json.loads(probe.outputs[-1].text)


def _run_cell(client, cell, index, name):
    try:
        client.execute_cell(cell, index)
    except CellExecutionError as error:
        raise CourseError(
            f"{name}: cell {cell.id!r} failed\n{ANSI.sub('', error.traceback)}\n"
            "(tag it raises-exception if the error is meant)"
        ) from None
    except CellTimeoutError:
        raise CourseError(f"{name}: cell {cell.id!r} ran longer than {CELL_SECONDS} s") from None
    except DeadKernelError:
        raise CourseError(f"{name}: the kernel died in cell {cell.id!r}") from None


def _clean(output, root):
    """The output as stored, or None: no progress bars, no live widgets, nobody's home folder."""
    if output.output_type == "stream" and output.name == "stderr":
        return None
    if WIDGET in output.get("data", {}):
        return None
    if output.output_type == "error":
        prefix = f"{Path(root).resolve()}{os.sep}"
        output.traceback = [line.replace(prefix, "") for line in output.traceback]
    return output


def _joined(outputs):
    """What a progress bar had cut in two becomes one printed text again."""
    result = []
    for output in outputs:
        last = result[-1] if result else None
        if last and last.output_type == output.output_type == "stream" and last.name == output.name:
            last.text += output.text
        else:
            result.append(output)
    return result


def module_hashes(root, modules):
    """{module: hash of its file}: what a later build compares to know whether to execute anew.

    A package counts with the files beside it that are not Python (a kernel's C++, say). The table
    of names in `minikv/__init__.py` is left out: each chapter adds names, and none changes what an
    earlier one prints.
    """
    hashes = {}
    for module in modules:
        if module == "minikv":
            continue
        path = package_root(root).joinpath(*module.split("."))
        files = [path.with_suffix(".py")]
        if path.is_dir():
            others = (p for p in path.iterdir() if p.is_file() and p.suffix not in (".py", ".pyc"))
            files = [path / "__init__.py", *sorted(others)]
        texts = [file.read_bytes().hex() if file.exists() else "gone" for file in files]
        hashes[module] = digest(*texts)
    return hashes
