"""Attention backends: several ways to read K and V through block tables, behind one function.

A backend is a module of `minikv.model.kernels` with two functions,

    attend(query, pool, metadata, *, scaling, window=None, softcap=None) -> Tensor
        query: [T, num_query_heads, head_dim], not scaled; head_dim lies together, the other two
            may be strided. pool: one layer's, see `minikv.model.attention`; the step's own K and
            V are in it already. Returns [T, num_query_heads, head_dim].
    why_not(device, dtype) -> str | None
        Why it cannot run there; None if it can.

and, where it has a faster way than gather's, a third:

    write_kv(key, value, pool, write_rows)
        key, value: [num_kv_heads, T, head_dim], what the step's tokens add; write_rows: [2 * T *
            num_kv_heads], the row of pool.view(-1, head_dim) for the K of each token and head, then
            for the V.

The rule that each keeps: a query at position p of its request sees positions up to p, its own
included; with a window only the last `window` of them; of a static batch's padding nothing, but a
padding query sees itself (a softmax over nothing would be NaN). So what a query sees is one run of
slots, never empty, that ends with its own.
"""

import importlib
from dataclasses import dataclass, field

import torch

from minikv.model.kernels import gather

# In this order: the first that can run is taken for a device that is named beside it.
BACKENDS = {
    "triton": "minikv.model.kernels.triton_launch",
    "cpu": "minikv.model.kernels.cpu",
    "gather": "minikv.model.kernels.gather",
    "online": "minikv.model.kernels.online",
}
PREFERRED = {"cuda": ("triton", "gather"), "cpu": ("cpu", "gather")}


class Scratch:
    """Buffers kept between layers and steps: a fresh tensor for the gathered K and V costs more
    in page faults than the attention that reads it."""

    def __init__(self):
        self._buffers = {}

    def take(self, name, shape, like):
        """An uninitialised tensor of this shape, good until the next call with the same name."""
        numel, key = torch.Size(shape).numel(), (name, like.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel * 5 // 4, dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[:numel].view(shape)


@dataclass
class AttentionMetadata:
    """What attention needs to know of one step's requests; names are vLLM's. All int32, on the
    pool's device.

    block_tables: [num_seqs, max_blocks], padded with the pool's last block, which no request owns.
    query_start_loc: [num_seqs + 1]; rows query_start_loc[i] to query_start_loc[i + 1] - 1 of the
        packed step are request i's new tokens.
    seq_lens: [num_seqs], slots that hold request i's K and V, this step's new tokens included: the
        last of its queries is at position seq_lens[i] - 1.
    first_visible: [num_seqs], slots before it hold a static batch's padding; None: there is none.
    max_query_len, max_seq_len: the largest of each, known without asking the device.
    scratch: buffers that outlive the step. cache: what a backend makes once for all layers.
    """

    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    first_visible: torch.Tensor | None
    max_query_len: int
    max_seq_len: int
    scratch: Scratch = field(default_factory=Scratch)
    cache: dict = field(default_factory=dict)


def why_not(name, device, dtype) -> str | None:
    """Why this backend cannot run on that device in that dtype; None if it can.

    Asking about "cpu" compiles its kernel if this machine has none yet.
    """
    try:
        return importlib.import_module(BACKENDS[name]).why_not(torch.device(device), dtype)
    except ImportError as error:  # an optional package
        return f"{error.name} is not installed"


def choose_backend(device, dtype, requested=None):
    """(name, attend) of the requested backend, or of the best for this device.

    requested: a name, or an `attend` function of your own; what that returns is looked at.
    Raises ValueError where `requested` is unknown or cannot run there, and says why.
    """
    device = torch.device(device)
    if callable(requested):
        return _watched(requested)
    if requested is None:
        names = PREFERRED.get(device.type, ("gather",))
        requested = next(name for name in names if why_not(name, device, dtype) is None)
    elif not isinstance(requested, str) or requested not in BACKENDS:
        raise ValueError(
            f"attention_backend is {requested!r}; known: {', '.join(sorted(BACKENDS))}"
        )
    elif reason := why_not(requested, device, dtype):
        raise ValueError(f"attention_backend {requested!r} cannot run here: {reason}")
    return requested, importlib.import_module(BACKENDS[requested]).attend


def _watched(function):
    """(its name, the function with a look at what it returns): else a model's own code would trip
    over a wrong shape, layers later, and name itself."""
    name = getattr(function, "__name__", type(function).__name__)

    def attend(query, pool, metadata, **options):
        try:
            mixed = function(query, pool, metadata, **options)
        except TypeError as error:
            raise TypeError(f"in your attention function {name}: {error}") from error
        what = getattr(mixed, "shape", None), getattr(mixed, "dtype", None)
        if what != (query.shape, query.dtype):
            said = type(mixed).__name__ if what[1] is None else f"{tuple(what[0])} in {what[1]}"
            raise ValueError(
                f"your attention function {name} returned {said}, but must return "
                f"{tuple(query.shape)} in {query.dtype}"
            )
        return mixed

    return name, attend


def writer_of(attend):
    """The function that writes K and V for this backend: gather's, unless it has its own."""
    name = getattr(attend, "__module__", None)
    if name not in BACKENDS.values():  # a function of your own
        return gather.write_kv
    return getattr(importlib.import_module(name), "write_kv", gather.write_kv)
