"""minikv: a small, real inference engine, built chapter by chapter in `notebooks/`.

Names are looked up when they are first used, so that `import minikv.simulator` (or any other part
that only accounts) never imports torch.
"""

import importlib
import os

# Read by gcc's OpenMP when torch is imported: a thread that waits for others sleeps after about
# 0.1 ms instead of 3. Beside another busy program it would use up the time that others wait for;
# with no spinning at all, waking up costs as much as two threads gain (42 ms a step, 35 with this).
# The commands' children, and JupyterLab's kernels if `lab` has started it, inherit it.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_HOMES = {
    "LLM": "minikv.engine",
    "SamplingParams": "minikv.request",
    "BeamSearchParams": "minikv.request",
    "Request": "minikv.request",
    "RequestOutput": "minikv.request",
    "show": "minikv.classroom.show",
    "ModelSpec": "minikv.specs",
    "OutOfKVMemory": "minikv.kv_cache.base",
    "KVCacheManager": "minikv.kv_cache.base",
    "ContiguousKVCacheManager": "minikv.kv_cache.contiguous",
    "PagedKVCacheManager": "minikv.kv_cache.paged",
    "PrefixCachingKVCacheManager": "minikv.kv_cache.prefix",
    "RadixKVCacheManager": "minikv.kv_cache.radix",
    "Scheduler": "minikv.scheduler",
}
__all__ = sorted(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"minikv has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_HOMES])
