"""`python -m minikv doctor`: is this machine ready for the course, and what works on it?

Every package is looked up before it is imported: a missing one gives a line, not a traceback.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from minikv.commands.environment import NEWEST, OLDEST
from minikv.commands.lab import NOTEBOOK
from minikv.commands.steps import ROOT
from minikv.machine import facts, pins, version_of

INSTALL = "run: python -m minikv lab (it installs what is missing into .venv)"
ROOM_TO_WORK = 3_000_000_000  # bytes: PyTorch, the default model and its 1 GiB pool, and a kernel
KERNEL_SECONDS = 120


# --- the checks: each gives (status, what was found, what to do) -------------------------------

OK, PROBLEM, NOTE = "OK", "PROBLEM", "note"  # a note is worth knowing and stops nothing


def check_python(found):
    text = f"Python {found['python']} at {found['executable']}"
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return OK, text, None
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return PROBLEM, text, f"the course needs Python {oldest} to {newest}"


def check_packages(found):
    """Missing and other versions than the pinned ones, in one line each; else one line in all."""
    pinned, rows = pins(), []
    if not pinned:
        return [(NOTE, "requirements.txt is not at hand; package versions were not compared", None)]
    installed = found["packages"]
    missing = [name for name, version in installed.items() if version is None]
    other = [
        f"{name} {version} (tested with {pinned[name]})"
        for name, version in installed.items()
        # The part after + names a build (2.13.0+cpu), not another version.
        if version is not None and version.split("+")[0] != pinned[name]
    ]
    if missing:
        rows.append((PROBLEM, f"not installed: {', '.join(missing)}", INSTALL))
    if other:
        rows.append((PROBLEM, f"another version: {', '.join(other)}", INSTALL))
    if not rows:
        main = ("torch", "transformers", "jupyterlab")
        named = ", ".join(f"{name} {installed[name]}" for name in main if name in installed)
        rows.append((OK, f"{len(pinned)} packages as pinned, among them {named}", None))
    return rows


def check_machine(found):
    total, free = found["memory_bytes"], found["memory_free_bytes"]
    if total is None:
        return NOTE, f"{found['cores']} cores; memory unknown without psutil", None
    text = f"{found['cores']} cores, {total / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB free"
    if free < ROOM_TO_WORK:
        return NOTE, text, f"under {ROOM_TO_WORK / 1e9:.0f} GB free: close other programs first"
    return OK, text, None


def check_devices(found):
    if not found["devices"]:
        return [(PROBLEM, "no device: PyTorch or the engine does not import here", INSTALL)]
    return [
        (OK, f"{d['device']} ({d['name']}): dtype auto is {d['reason']}", None)
        for d in found["devices"]
    ]


def check_attention(found):
    """The attention backend that each device gets, and why not a faster one. Compiles the CPU's."""
    try:
        import torch

        from minikv.model.backends import PREFERRED, choose_backend, why_not
    except ImportError:
        return []  # check_devices has said it
    rows = []
    for row in found["devices"]:
        device, dtype = torch.device(row["device"]), getattr(torch, row["dtype"])
        chosen, _ = choose_backend(device, dtype)
        text = f"attention on {row['device']}: backend {chosen}"
        faster = PREFERRED.get(device.type, (chosen,))
        faster = faster[: faster.index(chosen)]
        if faster:
            reasons = [f"{name} does not run: {why_not(name, device, dtype)}" for name in faster]
            rows.append((NOTE, f"{text}, which is slower", "; ".join(reasons)))
        else:
            rows.append((OK, text, None))
    return rows


def check_model(found):
    if found["model_fetched"]:
        return OK, f"the model smollm2 is in {found['model_dir']}", None
    if found["model_dir"] is None:
        return PROBLEM, f"no folder for the model smollm2: {found['model_error']}", None
    return (
        PROBLEM,
        f"the model smollm2 is not on this machine (its folder: {found['model_dir']})",
        "run: python -m minikv lab (with a network; once)",
    )


def check_kernel():
    """Start the kernel that a notebook here would get, and see that it is this Python."""
    try:
        from jupyter_client.manager import start_new_kernel
    except ImportError:
        return PROBLEM, "no notebook kernel: jupyter_client is not installed", INSTALL
    said = []
    with tempfile.TemporaryFile() as errors:  # a kernel's warnings are of no use here
        try:
            manager, client = start_new_kernel(
                kernel_name="python3", startup_timeout=KERNEL_SECONDS, stderr=errors
            )
            try:
                client.execute_interactive(
                    "import sys, minikv; print(sys.prefix)",
                    timeout=KERNEL_SECONDS,
                    output_hook=lambda message: said.append(message["content"]),
                )
            finally:
                client.stop_channels()
                manager.shutdown_kernel(now=True)
        except Exception as error:  # whatever a kernel can die of, the reader needs a line
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip() or str(error)
            return PROBLEM, f"the notebook kernel does not start: {_last_line(reason)}", INSTALL
    failed = next((content for content in said if "ename" in content), None)
    if failed:
        reason = f"{failed['ename']}: {failed['evalue']}"
        return PROBLEM, f"a notebook cannot import minikv: {reason}", INSTALL
    prefix = "".join(content.get("text", "") for content in said).strip()
    if Path(prefix) != Path(sys.prefix):
        return (
            PROBLEM,
            f"the kernel `python3` is of another environment: {prefix}",
            "run: python -m ipykernel install --sys-prefix (in this environment)",
        )
    return OK, "the notebook kernel starts and imports minikv", None


def _last_line(text):
    return text.splitlines()[-1] if text else "it gave no reason"


def check_widgets():
    """The Python half of a widget is ipywidgets; JupyterLab draws it with an extension of its own.

    The two halves come as two packages, and a mismatch shows only as an empty cell.
    """
    extension = "share/jupyter/labextensions/@jupyter-widgets/jupyterlab-manager/package.json"
    if version_of("ipywidgets") is None:
        return PROBLEM, "no widgets: ipywidgets is not installed", INSTALL
    if not (Path(sys.prefix) / extension).is_file():
        return (
            PROBLEM,
            "JupyterLab's half of the widgets is not in this environment",
            "run: python -m pip install --force-reinstall --no-deps jupyterlab_widgets",
        )
    return OK, "widgets: ipywidgets and its JupyterLab extension are there", None


def check_notebook():
    if (ROOT / NOTEBOOK).is_file():
        return OK, f"the course is in {ROOT}", None
    return NOTE, f"{NOTEBOOK} is not in {ROOT}", "use a clone of the repository for the notebooks"


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m minikv doctor", description=__doc__)
    parser.parse_args(argv)
    found = facts()
    rows = [check_python(found), *check_packages(found), check_kernel(), check_widgets()]
    rows += [check_machine(found), *check_devices(found), *check_attention(found)]
    rows += [check_model(found), check_notebook()]
    for status, text, what_to_do in rows:
        print(f"{status:8} {text}")
        if what_to_do:
            print(f"{'':8} -> {what_to_do}")
    problems = sum(status == PROBLEM for status, _, _ in rows)
    if problems:
        print(f"\n{problems} of {len(rows)} checks found a problem; each says what to do.")
        return 1
    print("\nReady. No chapter needs a GPU.")
    return 0
