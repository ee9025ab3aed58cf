"""Runs vLLM for the benchmark, inside vLLM's own environment: nothing of minikv is imported here.

Lines of JSON on standard input: first the settings, then one workload per line. An answer to each
on standard output.
"""

import json
import os
import sys
import time


def main():
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever vLLM prints goes to the log, not between the answers

    def answer(message):
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    settings = json.loads(sys.stdin.readline())
    kv_bytes_per_token = settings.pop("kv_bytes_per_token")

    import vllm

    # Eager: without a compiler, as all the others. Prompts don't share prefixes, and a second
    # round must not find the first one's.
    llm = vllm.LLM(
        **settings,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    probe = Probe(llm.llm_engine, kv_bytes_per_token)
    answer({"vllm": vllm.__version__})
    for line in sys.stdin:
        workload = json.loads(line)["workload"]
        prompts = [{"prompt_token_ids": ids} for ids, _ in workload]
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in workload
        ]
        probe.reset()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answer(
            {
                "seconds": time.perf_counter() - start,
                "steps": probe.steps,
                "peak_kv_bytes": probe.peak,
                "num_tokens": [len(output.outputs[0].token_ids) for output in outputs],
            }
        )


class Probe:
    """Counts an engine's steps, and the most KV bytes in use after one."""

    def __init__(self, engine, kv_bytes_per_token):
        self._engine, self._kv_bytes_per_token = engine, kv_bytes_per_token
        self._step = engine.step
        engine.step = self.step
        self.reset()

    def reset(self):
        self.steps, self.peak = 0, None

    def step(self):
        outputs = self._step()
        self.steps += 1
        in_use = self._bytes_in_use()
        if in_use is not None:
            self.peak = max(self.peak or 0, in_use)
        return outputs

    def _bytes_in_use(self):
        try:  # vLLM's internals: where a version has others, the peak is not known
            scheduler = self._engine.engine_core.engine_core.scheduler
            pool = scheduler.kv_cache_manager.block_pool
            num_blocks = pool.num_gpu_blocks - pool.get_num_free_blocks()
            return num_blocks * scheduler.block_size * self._kv_bytes_per_token
        except AttributeError:
            return None


if __name__ == "__main__":
    main()
