"""What this Python sees of the machine, as plain data: for the doctor, a notebook, a benchmark.

Every package is looked up before it is imported: a missing one is None, not a traceback.
"""

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"


def facts():
    """What this Python sees of the machine; values that cannot be had are None.

    Keys: minikv, python, executable, system, cores, memory_bytes, memory_free_bytes, packages
    (name -> version or None, of everything that requirements.txt pins), devices (a list of
    {device, name, dtype, reason}), model_dir (or model_error, why it is None), model_fetched.
    """
    total, free = memory()
    return {
        "minikv": version_of("minikv"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "memory_bytes": total,
        "memory_free_bytes": free,
        "packages": {name: version_of(name) for name in pins()},
        "devices": devices(),
        **model_facts(),
    }


def pins():
    """name -> version, as requirements.txt pins them; empty where that file is not at hand."""
    if not REQUIREMENTS.is_file():
        return {}
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores():
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def memory():
    """(total, free) bytes of memory, within a container's limit; (None, None) without psutil."""
    try:
        import psutil
    except ImportError:
        return None, None
    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or no limit ("max")
        return total, free
    return min(total, limit), min(free, max(0, limit - used))


def devices():
    """Each device that PyTorch sees, and the dtype that dtype="auto" takes there, with the reason.

    The device that device="auto" takes comes first.
    """
    try:
        import torch

        from minikv.model.loader import auto_dtype
    except ImportError:
        return []
    found = [(f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    found.append(("cpu", platform.processor() or platform.machine()))
    if torch.backends.mps.is_available():
        found.append(("mps", "Apple GPU; used only when asked for"))
    rows = []
    for device, name in found:
        dtype, reason = auto_dtype(device)
        dtype = str(dtype).removeprefix("torch.")
        rows.append({"device": device, "name": name, "dtype": dtype, "reason": reason})
    return rows


def model_facts():
    facts = {"model_dir": None, "model_error": None, "model_fetched": False}
    try:
        from minikv.model.fetch import ModelFetchError, default_model_dir, is_fetched
    except ImportError as error:
        return facts | {"model_error": f"{error.name} is missing"}
    try:
        return facts | {"model_dir": str(default_model_dir()), "model_fetched": is_fetched()}
    except ModelFetchError as error:
        return facts | {"model_error": str(error)}
