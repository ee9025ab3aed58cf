"""A step without tensors: it takes as long as a simple model of the hardware says.

    step = max(compute, memory) + overhead + copies

compute: 2 FLOP per parameter and token, plus 4 x head_dim FLOP per query head, layer and pair of
    query and key (the products with K and with V), over the GPU's peak times compute_efficiency.
memory: every weight once per step, plus K and V of each request's context once (whatever the
    number of its new tokens) and of the new tokens once, over the bandwidth times
    memory_efficiency.
overhead: overhead_s per step and overhead_per_request_s per scheduled request: the host's work.
copies: each copied block is read and written, at the same bandwidth.

What it leaves out: kernels that overlap, caches, activations, the sampler, quantisation, more
than one GPU. It is the roofline (Williams et al., 2009) and not a fit; only the two efficiencies
and the overheads can be fitted to a measurement.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """Seconds that a step of `model` takes on `gpu`. The defaults are round guesses for a tuned
    engine; see the module's docstring for what they mean."""

    model: object  # a ModelSpec
    gpu: object  # a GPU
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    overhead_s: float = 0.005
    overhead_per_request_s: float = 0.0

    def __post_init__(self):
        for name in ("compute_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be above 0, at most 1")
        for name in ("overhead_s", "overhead_per_request_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 0")
        flops = self.gpu.bf16_flops * self.compute_efficiency
        bandwidth = self.gpu.bandwidth * self.memory_efficiency
        m = self.model
        pair_flop = 4 * m.num_layers * m.num_query_heads * m.head_dim
        put = object.__setattr__
        put(self, "s_per_token", 2 * m.num_parameters / flops)
        put(self, "s_per_pair", pair_flop / flops)
        put(self, "s_for_weights", m.parameter_bytes / bandwidth)
        put(self, "s_per_kv_token", m.kv_bytes_per_token / bandwidth)

    def describe(self) -> str:
        """What it assumes, in a few lines, for whoever reads a result."""
        m, gpu = self.model, self.gpu
        return (
            f"{m.name} in {m.dtype} on {gpu.name} ({gpu.source}). A step takes\n"
            "max(compute, memory) + overhead + copies:\n"
            f"  compute   2 x {m.num_parameters / 1e9:.3g}B FLOP per token, and attention's, at "
            f"{self.compute_efficiency:.0%} of {gpu.bf16_flops / 1e12:.4g} TFLOP/s\n"
            f"  memory    {m.parameter_bytes / 1e9:.3g} GB of weights once, and "
            f"{m.kv_bytes_per_token:,} bytes for each token of every context, at "
            f"{self.memory_efficiency:.0%} of {gpu.bandwidth / 1e9:.4g} GB/s\n"
            f"  overhead  {1e3 * self.overhead_s:.4g} ms, and "
            f"{1e3 * self.overhead_per_request_s:.4g} ms per request in the step\n"
            "  copies    every copied block is read and written, at the same bandwidth\n"
            "Efficiencies and overheads are assumptions, not measurements. Left out: activations, "
            "sampling,\nquantisation, kernels that overlap, more than one GPU."
        )

    def seconds(self, *, num_seqs, num_tokens, num_pairs, num_kv_tokens) -> float:
        """num_tokens: computed in the step. num_pairs: of a query and a key that it sees.
        num_kv_tokens: tokens whose K and V are read or written, each once per request."""
        compute = num_tokens * self.s_per_token + num_pairs * self.s_per_pair
        memory = self.s_for_weights + num_kv_tokens * self.s_per_kv_token
        return max(compute, memory) + self.overhead_s + num_seqs * self.overhead_per_request_s


class VirtualClock:
    """Time that passes only when somebody says so."""

    def __init__(self):
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance_to(self, t) -> None:
        self._now = max(self._now, t)

    def advance(self, seconds) -> None:
        self._now += seconds


class SimulatedRunner:
    """Runs scheduled steps on a virtual clock. Every sampled token is 0: requests end by their
    length. num_copied_blocks: blocks copied so far; seconds_in_copies: of the steps' time."""

    def __init__(self, step_time, block_size, clock):
        self.step_time, self.clock = step_time, clock
        self._s_per_block = 2 * block_size * step_time.s_per_kv_token
        self.num_copied_blocks, self.seconds_in_copies = 0, 0.0

    def run(self, scheduled, copies):
        num_tokens = num_pairs = num_kv_tokens = 0
        for request, n in scheduled:
            start = request.num_computed_tokens
            num_tokens += n
            num_kv_tokens += start + n  # the context before it is read, the new tokens written
            num_pairs += n * start + n * (n + 1) // 2  # causal: the i-th new token sees start + i
        seconds = 0.0
        if num_tokens:
            seconds = self.step_time.seconds(
                num_seqs=len(scheduled),
                num_tokens=num_tokens,
                num_pairs=num_pairs,
                num_kv_tokens=num_kv_tokens,
            )
        if copies:
            num_blocks = sum(copy.num_blocks for copy in copies)
            self.num_copied_blocks += num_blocks
            seconds += num_blocks * self._s_per_block
            self.seconds_in_copies += num_blocks * self._s_per_block
        self.clock.advance(seconds)
        return [0] * len(scheduled)
