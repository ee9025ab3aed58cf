"""Arguments to parts: what `LLM(...)` was given becomes a model, a manager, a scheduler and a loop
around them."""

import inspect
import time
from typing import NamedTuple

from minikv.core import EngineCore
from minikv.kv_cache.base import KVCacheManager, cdiv
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.kv_cache.radix import RadixKVCacheManager
from minikv.model.backends import choose_backend
from minikv.model.loader import Loaded, load
from minikv.model.memory import default_num_blocks, require_memory
from minikv.model.packing import pack_linears
from minikv.model.probe import adopt
from minikv.model.runner import ModelRunner
from minikv.request import require_int, require_number
from minikv.scheduler import Scheduler
from minikv.static_batching import BATCHING

DEFAULT_BLOCK_SIZE = 16
MANAGERS = {
    "prefix": PrefixCachingKVCacheManager,
    "radix": RadixKVCacheManager,
    "paged": PagedKVCacheManager,
    "contiguous": ContiguousKVCacheManager,
}


class WallClock:
    """Seconds since it was made."""

    def __init__(self):
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def advance_to(self, t) -> None:
        time.sleep(max(0.0, t - self.now()))


class Parts(NamedTuple):
    """What an LLM is made of. max_model_len: tokens, as the model and the manager allow."""

    loaded: Loaded
    core: EngineCore
    max_model_len: int


def assemble(
    model,
    *,
    kv_cache_manager,
    scheduler,
    block_size,
    num_gpu_blocks_override,
    max_num_seqs,
    max_num_batched_tokens,
    max_model_len,
    dtype,
    device,
    gpu_memory_utilization,
    report_every,
    batching,
    check_every_step,
    attention_backend,
) -> Parts:
    """The parts for these arguments, which are LLM's. Raises as LLM does, and all that the
    arguments alone can tell it refuses before it loads a model."""
    require_int("report_every", report_every, at_least=0)
    require_number("gpu_memory_utilization", gpu_memory_utilization, above=0, at_most=1)
    if not isinstance(batching, str) or batching not in BATCHING:
        raise ValueError(f"batching is {batching!r}; known: {', '.join(BATCHING)}")
    if isinstance(kv_cache_manager, str):
        if kv_cache_manager not in MANAGERS:
            known = ", ".join(MANAGERS)
            raise ValueError(f"kv_cache_manager is {kv_cache_manager!r}; known: {known}")
        kv_cache_manager = MANAGERS[kv_cache_manager]
    _require_part("kv_cache_manager", kv_cache_manager, KVCacheManager)
    _require_part("scheduler", scheduler, Scheduler)
    if scheduler is not None and batching != "continuous":
        raise ValueError("scheduler decides the batching: don't pass both")
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    sizes = {"block_size": block_size, "num_gpu_blocks_override": num_gpu_blocks_override}
    _refuse_both("scheduler", scheduler, limits | {"kv_cache_manager": kv_cache_manager})
    if not _is_factory(scheduler):
        kv_cache_manager = scheduler.manager
    _refuse_both("kv_cache_manager", kv_cache_manager, sizes)
    if isinstance(model, Loaded) and (dtype, device) != ("auto", "auto"):
        raise ValueError("the model is loaded already: its dtype and device are what they are")
    for name, value in (limits | sizes | {"max_model_len": max_model_len}).items():
        if value is not None:
            require_int(name, value, at_least=2 if name == "max_model_len" else 1)

    loaded = model if isinstance(model, Loaded) else load(model, dtype=dtype, device=device)
    model, _, spec = loaded
    device, max_num_seqs = next(model.parameters()).device, max_num_seqs or 16
    if max_model_len is not None and max_model_len > spec.max_model_len:
        raise ValueError(
            f"max_model_len is {max_model_len}, but {spec.name} was made for "
            f"{spec.max_model_len} positions"
        )
    if not callable(attention_backend):
        attention_backend, _ = choose_backend(device, model.dtype, attention_backend)
    adopt(model, spec, attention_backend)

    manager, max_model_len = _manager_for(
        kv_cache_manager,
        spec,
        device,
        **sizes,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    if _is_factory(scheduler):
        scheduler = _call(
            scheduler or BATCHING[batching],
            manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens or 512,
        )
    _require_part("what scheduler made", scheduler, Scheduler, made=True)
    pack_linears(model, num_rows=scheduler.max_num_seqs)
    core = EngineCore(
        scheduler,
        ModelRunner(model, spec, manager, attention_backend),
        WallClock(),
        report_every=report_every,
        check_every_step=check_every_step,
    )
    return Parts(loaded, core, max_model_len)


def _manager_for(
    part,
    spec,
    device,
    *,
    block_size,
    num_gpu_blocks_override,
    max_num_seqs,
    max_model_len,
    gpu_memory_utilization,
):
    """(the manager, tokens that one request may have): part itself, or what part makes."""
    if not _is_factory(part):
        require_memory(device, spec, part.num_blocks, part.block_size)
        if part.tables:
            raise ValueError("kv_cache_manager already holds block tables of other requests")
        limit = getattr(part, "max_model_len", None) or spec.max_model_len
        return part, _fitting_len(max_model_len, spec, min(limit, part.max_slots_per_request))
    block_size, num_blocks = block_size or DEFAULT_BLOCK_SIZE, num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = default_num_blocks(device, spec, block_size, gpu_memory_utilization)
        longest = cdiv(max_model_len or spec.max_model_len, block_size)
        num_blocks = min(num_blocks, max_num_seqs * longest)
    max_model_len = _fitting_len(max_model_len, spec, num_blocks * block_size)
    require_memory(device, spec, num_blocks, block_size)
    manager = _call(
        part or PrefixCachingKVCacheManager,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
    )
    _require_part("what kv_cache_manager made", manager, KVCacheManager, made=True)
    return manager, max_model_len


def _fitting_len(max_model_len, spec, num_slots):
    if max_model_len is None:
        return min(spec.max_model_len, num_slots)
    if max_model_len > num_slots:
        raise ValueError(
            f"max_model_len is {max_model_len}, but the manager's limit is {num_slots} tokens"
        )
    return max_model_len


def _is_factory(part):
    return (
        part is None
        or isinstance(part, type)
        or (callable(part) and not isinstance(part, KVCacheManager | Scheduler))
    )


def _require_part(name, part, kind, made=False):
    """Says in words what a learner's own class, or what it made, lacks."""
    if not made and _is_factory(part):
        if isinstance(part, type) and not issubclass(part, kind):
            raise TypeError(f"{name} is the class {part.__name__}, which is no {kind.__name__}")
        return
    if not isinstance(part, kind):
        raise TypeError(f"{name} is {part!r}, which is no {kind.__name__}")
    needed = {"tables", "num_blocks"} if kind is KVCacheManager else {"running", "manager"}
    if not needed <= vars(part).keys():
        raise TypeError(f"{type(part).__name__}.__init__ must call super().__init__(...) first")


def _refuse_both(name, part, others):
    """An instance brings these values itself: giving one too would be ignored, so it is refused."""
    given = [other for other, value in others.items() if value is not None]
    if given and not _is_factory(part):
        raise ValueError(f"{name} is an instance and decides {', '.join(given)}: don't pass both")


def _call(factory, *args, **offered):
    """Calls factory with the arguments, of those offered by name, that it takes."""
    takes = factory.__init__ if isinstance(factory, type) else factory
    parameters = inspect.signature(takes).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        offered = {name: value for name, value in offered.items() if name in parameters}
    return factory(*args, **offered)
