"""What it was measured on, and whether the machine was busy with something else meanwhile."""

import os
import platform
import time
from pathlib import Path

from minikv.machine import cores, memory

BUSY_FRACTION = 0.1  # of the cores: above it, a measurement comes with a warning


def facts(device) -> dict:
    """The machine and the versions, as plain data."""
    import torch
    import transformers

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory()[0],
        "device": str(device),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Watch:
    """`with Watch(pid) as watch`: afterwards `watch.others` is how many cores other processes
    kept busy, on average; None where the system doesn't tell. pid: a process of ours besides this
    one (those that it starts itself would count as others)."""

    def __init__(self, pid=None):
        self.pid, self.others = pid, None

    def __enter__(self):
        self._start, self._others = time.perf_counter(), _others(self.pid)
        return self

    def __exit__(self, *_):
        seconds, others = time.perf_counter() - self._start, _others(self.pid)
        if others is not None and self._others is not None and seconds > 0:
            self.others = max(0.0, (others - self._others) / seconds)

    @property
    def busy(self) -> bool:
        return self.others is not None and self.others > BUSY_FRACTION * cores()


def _others(pid):
    """CPU seconds that processes other than ours have used since the system started, or None."""
    try:
        ticks = os.sysconf("SC_CLK_TCK")
        fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
        own = sum(os.times()[:4])
        if pid is not None:
            # utime and stime; the process name before them may hold spaces, but ends with ")"
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            own += (int(stat[11]) + int(stat[12])) / ticks
    except (OSError, ValueError, AttributeError):
        return None
    return (user + nice + system + irq + softirq + steal) / ticks - own
