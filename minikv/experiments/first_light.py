"""README.md's figure: four questions to the default model, in a pool with room for three."""

from minikv.observe import snapshot

QUESTIONS = {
    "plants": "What is photosynthesis? Answer in one sentence.",
    "Japan": "What is the capital of Japan?",
    "gravity": "What is gravity? Answer in one sentence.",
    "week": "How many days are in a week?",
}


def first_light_run():
    """Snapshots of the pool, one after each step."""
    from minikv.engine import LLM
    from minikv.request import SamplingParams

    llm = LLM(kv_cache_manager="contiguous", max_model_len=96, num_gpu_blocks_override=18)
    for name, text in QUESTIONS.items():
        chat = [{"role": "user", "content": text}]
        llm.add_request(chat, SamplingParams(max_tokens=48), request_id=name)
    snapshots = []
    while llm.has_unfinished_requests():
        llm.step()
        snapshots.append(snapshot(llm))
    return snapshots
