"""The engines side by side, each behind one method: `run(workload) -> Run`.

All get token ids and give token ids, run greedily in the same dtype with the same number of threads
(ours on fewer where that is faster: see `minikv.model.threads`), and never stop before the length
asked for. Each has a model of its own, loaded and, where that is its way, rearranged before
anything is timed.
"""

import contextlib
import functools
import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from minikv.bench.workload import MAX_MODEL_LEN
from minikv.model.fetch import default_model_dir
from minikv.model.loader import Loaded, load
from minikv.request import SamplingParams

TOKENS_PER_STEP = 512  # prompt and decode tokens computed in one step: ours, generate_batch, vLLM


class Run(NamedTuple):
    """steps: forward passes. num_tokens: output tokens of each request, in the workload's order.
    peak_kv_bytes: None where the engine doesn't tell."""

    seconds: float
    steps: int
    peak_kv_bytes: int | None
    num_tokens: list[int]


class Minikv:
    """Ours, as `LLM.generate` serves it."""

    kv_means = "blocks in use, at the peak"

    def __init__(self, settings, max_num_seqs):
        from minikv.engine import LLM

        model, _, spec = settings.load()
        # Without a tokenizer no text is made: the others return token ids only, too.
        self.llm = LLM(
            Loaded(model, None, spec),
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=TOKENS_PER_STEP,
        )

    @property
    def attention_backend(self):
        return self.llm.attention_backend

    @property
    def threads(self):
        return self.llm.runner.threads.describe()

    def run(self, workload):
        llm, first_step = self.llm, len(self.llm.metrics.steps)
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for _, n in workload]
        start = time.perf_counter()
        outputs = llm.generate([ids for ids, _ in workload], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        steps = llm.metrics.steps[first_step:]
        block_bytes = llm.manager.block_size * llm.spec.kv_bytes_per_token
        peak = max(step.num_blocks_in_use for step in steps) * block_bytes
        num_tokens = [len(output.outputs[0].token_ids) for output in outputs]
        return Run(seconds, len(steps), peak, num_tokens)

    def close(self):
        pass


class Generate:
    """transformers' `generate` on static batches: max_num_seqs requests in order of arrival,
    padded on the left to the longest prompt, run to the longest output.

    Chosen for it: sdpa, its fastest attention without another package, and the default cache,
    which grows (a static one gained 2% on a CPU, in ranges that overlap: 9.7-10.0 s against
    9.9-10.3).
    """

    kv_means = "its cache's tensors, at the longest"

    def __init__(self, settings, max_num_seqs):
        from transformers import GenerationConfig

        self.model = settings.load().model
        self.model.set_attn_implementation("sdpa")
        self.max_num_seqs = max_num_seqs
        # No end token: rows would only leave by it, and every length is forced.
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    @torch.inference_mode()
    def run(self, workload):
        steps, peak, num_tokens = 0, 0, []
        start = time.perf_counter()
        for first in range(0, len(workload), self.max_num_seqs):
            batch = workload[first : first + self.max_num_seqs]
            longest = max(n for _, n in batch)
            width = max(len(ids) for ids, _ in batch)
            padded = [[0] * (width - len(ids)) + ids for ids, _ in batch]
            mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in batch]
            out = self.model.generate(
                torch.tensor(padded, device=self.model.device),
                attention_mask=torch.tensor(mask, device=self.model.device),
                max_new_tokens=longest,
                return_dict_in_generate=True,
            )
            rows = out.sequences[:, width:].tolist()
            # A row runs on to the batch's longest output; what it was not asked for isn't counted.
            num_tokens += [len(row[:n]) for row, (_, n) in zip(rows, batch, strict=True)]
            steps += longest
            peak = max(peak, _cache_bytes(out.past_key_values))
            del out  # or the next batch would hold two caches
        return Run(time.perf_counter() - start, steps, peak, num_tokens)

    def close(self):
        pass


class GenerateBatch:
    """transformers' continuous batching. `generate_batch` takes one length for all requests, so
    this uses the manager underneath it, whose requests have lengths of their own.

    Chosen for it: room for max_num_seqs requests of the greatest length, and the 15% that its
    scheduler keeps free (left alone, it would take 60% of the machine's memory); no sharing of
    prefixes (there are none, and a second round would only find the first's); sdpa, since its
    faster kernels need a GPU; the step's budget of tokens that ours has (128 and 256 were within
    5% of it).
    """

    kv_means = "its pool, as allocated"
    page_size = 32

    def __init__(self, settings, max_num_seqs):
        from transformers import ContinuousBatchingConfig, GenerationConfig

        model = settings.load().model
        model.set_attn_implementation("sdpa")
        num_blocks = -(-MAX_MODEL_LEN // self.page_size) * max_num_seqs
        with torch.inference_mode():  # its thread takes over the mode in which it is started
            self.manager = model.init_continuous_batching(
                GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
                ContinuousBatchingConfig(
                    page_size=self.page_size,
                    num_blocks=int(num_blocks / 0.85) + 1,
                    max_batch_tokens=TOKENS_PER_STEP,
                    max_requests_per_batch=max_num_seqs,
                    allow_block_sharing=False,
                ),
            )
            self.manager.start()

    def run(self, workload):
        manager = self.manager
        first_step, results = getattr(manager, "current_batch", 0), {}
        start = time.perf_counter()
        request_ids = [
            manager.add_request(ids, max_new_tokens=n, eos_token_id=-1) for ids, n in workload
        ]
        while len(results) < len(workload):
            result = manager.get_result(timeout=1)
            if result is not None:
                results[result.request_id] = result
            elif not manager.is_running():
                raise RuntimeError("transformers' generation thread ended before its requests")
        seconds = time.perf_counter() - start
        errors = [result.error for result in results.values() if result.error]
        if errors:
            raise RuntimeError(f"generate_batch: {errors[0]}")
        pool = manager.batch_processor.cache.cache_tensor
        return Run(
            seconds,
            manager.current_batch - first_step,
            pool.numel() * pool.element_size(),
            [len(results[request_id].generated_tokens) for request_id in request_ids],
        )

    def close(self):
        self.manager.stop(block=True, timeout=10)


class Vllm:
    """vLLM in its own environment: a process that loads once, then waits for workloads."""

    kv_means = "blocks in use, at the peak"

    def __init__(self, settings, max_num_seqs):
        if settings.model == "tiny":
            raise ValueError("vllm reads a model from a folder, but tiny is made in memory")
        folder = default_model_dir() if settings.model == "smollm2" else settings.model
        spec = settings.spec
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # -I: this folder must not be on its path. One process, because two would compete for the
        # cores that the arithmetic needs; threads as many as here.
        env = os.environ | {
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self._process = subprocess.Popen(
            [settings.vllm_python, "-I", str(Path(__file__).with_name("vllm_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=env,
        )
        self.pid = self._process.pid
        self._ask(
            model=str(folder),
            dtype=spec.dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=TOKENS_PER_STEP,
            kv_bytes_per_token=spec.kv_bytes_per_token,
        )

    def run(self, workload):
        return Run(**self._ask(workload=workload))

    def _ask(self, **message):
        """One line of JSON there, one back."""
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            self.close()
            self._log.seek(0)
            lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
            raise RuntimeError(f"vllm ended: {lines[-1] if lines else 'it said nothing'}")
        return json.loads(answer)

    def close(self):
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # its loop ends with its input
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


KINDS = {"minikv": Minikv, "generate": Generate, "generate_batch": GenerateBatch, "vllm": Vllm}
DEFAULT = ("minikv-16", "minikv-32", "generate-16", "generate_batch-16", "vllm-16", "vllm-32")


@dataclass
class Settings:
    model: str = "smollm2"
    dtype: str = "auto"
    device: str = "auto"
    vllm_python: str | None = None

    def load(self):
        """A model of its own for whoever asks: an engine may rearrange it."""
        return load(self.model, dtype=self.dtype, device=self.device)

    @functools.cached_property
    def spec(self):
        return self.load().spec


def parse(name) -> tuple[str, int]:
    """From "minikv-16" to ("minikv", 16); without a number it is 16. Raises ValueError."""
    kind, _, seqs = name.rpartition("-") if "-" in name else (name, "", "16")
    if kind not in KINDS or not seqs.isdecimal() or int(seqs) < 1:
        raise ValueError(
            f"engine {name!r} is not known: an engine is one of {', '.join(KINDS)}, then a dash "
            "and how many sequences it runs at once, as in minikv-16"
        )
    return kind, int(seqs)


def _cache_bytes(cache):
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
