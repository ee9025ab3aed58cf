"""Where the time of a decode step goes.

PyTorch's profiler times every operation on the CPU; what an operation is for, it gets from the
module that calls it. The wall time around the runner's parts is measured beside it, and what no
operation accounts for is Python: so the rows add up to the step.
"""

import contextlib
import time
from collections import Counter

import torch
from transformers import AttentionInterface

from minikv.model import attention as attention_module
from minikv.request import SamplingParams

try:  # of PyTorch's internals, but a tenth of the public one's cost, and there are 400 in a step
    from torch._C._profiler import _RecordFunctionFast as record_function
except ImportError:
    from torch.autograd.profiler import record_function

NUM_STEPS = 20  # profiled; as many without, half before and half after
NUM_WARM_STEPS = 3

LINEARS, HEAD, NORMS, ROPE, ACTIVATION = "linears", "output head", "norms", "rope", "activation"
ATTENTION, EMBEDDING = "attention", "embedding, residual sums, other operations"
METADATA, SAMPLING, PYTHON = "metadata building", "sampling", "Python between the operations"
SERVING = "scheduling and outputs"
# Inside our attention function the operation itself tells its purpose.
ATTENTION_PARTS = {
    "aten::index_copy_": "attention: write K and V",
    "aten::index_select": "attention: gather K and V",
    "aten::bmm": "attention: scores and mixing",
    "aten::baddbmm": "attention: scores and mixing",
    "aten::softmax": "attention: softmax",
    "aten::_softmax": "attention: softmax",
}
ATTENTION_REST = "attention: bias, copies, rest"
# The C++ kernel's two functions are no operations of torch, so they are marked one by one.
ATTENTION_KERNEL = {
    "attend": "attention: K and V read in place",
    "write_kv": ATTENTION_PARTS["aten::index_copy_"],
}


def profile_decode(llm, workload) -> dict:
    """Runs the workload's prompts together until all of them decode, then times NUM_STEPS steps.
    Times are means over the faster half of the steps. Returns
    {"rows": [{"part", "ms", "percent"}], "step_ms", "unprofiled_step_ms", "context"}."""
    # The steps below, and those in which the last prompts are still computed.
    prompt_tokens = sum(len(ids) for ids, _ in workload)
    num_steps = 2 * NUM_STEPS + NUM_WARM_STEPS + 2
    params = SamplingParams(max_tokens=num_steps + prompt_tokens, ignore_eos=True)
    llm_ids = [llm.add_request(ids, params) for ids, _ in workload]
    try:
        while any(r.num_output_tokens == 0 for r in llm.scheduler.running) or llm.scheduler.waiting:
            llm.step()
        for _ in range(NUM_WARM_STEPS):
            llm.step()
        plain = [_timed(llm.step) for _ in range(NUM_STEPS // 2)]
        running = llm.scheduler.running
        context = sum(r.num_tokens for r in running) / len(running) + NUM_STEPS / 2
        with _instrumented(llm) as clock:
            steps = [_profiled_step(llm, clock) for _ in range(NUM_STEPS)]
        plain += [_timed(llm.step) for _ in range(NUM_STEPS // 2)]
    finally:
        for request_id in llm_ids:
            llm.abort(request_id)

    steps = sorted(steps, key=Counter.total)[: len(steps) // 2]
    plain = sorted(plain)[: len(plain) // 2]
    parts = Counter()
    for step in steps:
        parts.update(step)
    step_seconds = parts.total() / len(steps)
    rows = [
        {
            "part": part,
            "ms": 1e3 * seconds / len(steps),
            "percent": 100 * seconds / len(steps) / step_seconds,
        }
        for part, seconds in parts.most_common()
    ]
    return {
        "rows": rows,
        "step_ms": 1e3 * step_seconds,
        "unprofiled_step_ms": 1e3 * sum(plain) / len(plain),
        "context": context,
    }


def _timed(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _profiled_step(llm, clock) -> Counter:
    """part -> seconds of one step."""
    clock.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        total = _timed(llm.step)
    parts = Counter()
    for event in profiler.events():
        # Outermost operations only: their times hold those of the operations that they call.
        parent = event.cpu_parent
        name = event.name.removeprefix("minikv:")
        if name in ATTENTION_KERNEL.values():
            parts[name] += event.time_range.elapsed_us() / 1e6
        if event.name.startswith("minikv:") or parent is None:
            continue
        if parent.name.removeprefix("minikv:") in ATTENTION_KERNEL.values():
            continue  # it is in there
        if parent.name.startswith("minikv:"):
            parts[_part(parent.name.removeprefix("minikv:"), event.name)] += (
                event.time_range.elapsed_us() / 1e6
            )
    parts[PYTHON] = clock["model"] - parts.total()
    parts[METADATA] = clock["forward"] - clock["model"]
    parts[SAMPLING] = clock["run"] - clock["forward"]
    parts[SERVING] = total - clock["run"]
    return parts


def _part(where, operation) -> str:
    if where == ATTENTION:
        return ATTENTION_PARTS.get(operation, ATTENTION_REST)
    return where


@contextlib.contextmanager
def _instrumented(llm):
    """While it is open, every module of the model marks its operations with its purpose, and the
    Counter that it gives holds the wall time of the runner's parts."""
    clock, runner, model = Counter(), llm.runner, llm.model

    def clocked(name, function):
        def wrapper(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                clock[name] += time.perf_counter() - start

        return wrapper

    def marked(where, function):
        def wrapper(*args, **kwargs):
            with record_function(f"minikv:{where}"):
                return function(*args, **kwargs)

        return wrapper

    with contextlib.ExitStack() as stack:
        marks = []  # the open ones: modules are nested

        def enter(where, *_):
            marks.append(record_function(f"minikv:{where}"))
            marks[-1].__enter__()

        def leave(*_):
            marks.pop().__exit__(None, None, None)

        head = model.get_output_embeddings()
        for name, module in model.named_modules():
            where = HEAD if module is head else _purpose(name, module)
            if where is None:
                continue
            before = module.register_forward_pre_hook(lambda *_, where=where: enter(where))
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(leave).remove)
        for owner, attribute, name in (
            (runner, "run", "run"),
            (runner, "forward", "forward"),
            (model, "forward", "model"),
        ):
            setattr(owner, attribute, clocked(name, getattr(owner, attribute)))
            stack.callback(delattr, owner, attribute)
        if runner.attention_backend == "cpu":
            for attribute, where in ATTENTION_KERNEL.items():
                function = getattr(runner, attribute)
                setattr(runner, attribute, marked(where, function))
                stack.callback(setattr, runner, attribute, function)
        name = attention_module.IMPLEMENTATION
        AttentionInterface.register(name, marked(ATTENTION, attention_module.attention))
        stack.callback(AttentionInterface.register, name, attention_module.attention)
        yield clock


def _purpose(name, module) -> str | None:
    """What the operations are for that a module itself calls (its children have marks of their
    own), judged by its class's name; None: the same as its parent's."""
    kind = type(module).__name__
    if name == "":
        return EMBEDDING
    for mark, where in (
        ("Norm", NORMS),
        ("Linear", LINEARS),
        ("Conv1D", LINEARS),
        ("Rotary", ROPE),
        ("Attention", ROPE),  # its linears and our function apart, attention modules only rotate
        ("MLP", ACTIVATION),
    ):
        if mark in kind:
            return where
    return None


def report(result, num_seqs):
    step_ms, plain_ms = result["step_ms"], result["unprofiled_step_ms"]
    print(
        f"\na decode step of {num_seqs} sequences, {result['context']:.0f} tokens each, "
        f"attention backend {result['attention_backend']}:\n"
    )
    for row in result["rows"]:
        print(f"{row['part']:44} {row['ms']:8.2f} ms {row['percent']:6.1f}%")
    print(f"{'the step':44} {step_ms:8.2f} ms  100.0%")
    print(
        f"\nunprofiled, the steps before and after took {plain_ms:.2f} ms: measuring adds "
        f"{step_ms / plain_ms - 1:.0%}, most of it to the rows of Python"
    )
