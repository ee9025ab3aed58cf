"""Times vLLM's own scheduler without a model, inside vLLM's own environment: nothing of minikv is
imported here. Argument: settings as JSON. The last line of standard output: {running: [steps per
second of each round]}.
"""

import json
import os
import sys
import time


def main():
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    settings = json.loads(sys.argv[1])
    rates = {}
    for running, num_steps in settings["running"].items():
        rates[running] = [
            steps_per_s(settings, int(running), num_steps) for _ in range(settings["rounds"])
        ]
    print(json.dumps(rates))


def steps_per_s(settings, running, num_steps):
    import torch
    from vllm import SamplingParams
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    block_size, prompt_tokens = settings["block_size"], settings["prompt_tokens"]
    length = prompt_tokens + num_steps
    num_blocks = running * (length // block_size + 2)
    # Room for all prompts in one step, and contexts longer than the model's, which nobody runs.
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=max(length, running * prompt_tokens),
            max_model_len=length,
            is_encoder_decoder=False,
        ),
        model_config=ModelConfig(model=settings["model"], skip_tokenizer_init=True),
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=False),
    )
    config.model_config.max_model_len = length
    config.cache_config.num_gpu_blocks = num_blocks
    attention = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
    )
    params = SamplingParams(max_tokens=num_steps, ignore_eos=True)
    for i in range(running):
        scheduler.add_request(
            Request(
                request_id=str(i),
                prompt_token_ids=[i % 1000] * prompt_tokens,
                sampling_params=params,
                pooling_params=None,
            )
        )
    made = 0
    start = time.process_time()
    while scheduler.get_num_unfinished_requests():
        scheduled = scheduler.schedule()
        ids = list(scheduled.num_scheduled_tokens)
        scheduler.update_from_output(
            scheduled,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={name: i for i, name in enumerate(ids)},
                sampled_token_ids=[[0] for _ in ids],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        made += 1
    return made / (time.process_time() - start)


if __name__ == "__main__":
    main()
