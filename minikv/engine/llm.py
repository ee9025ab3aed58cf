"""`LLM`: prompts in, text out, with every key and value in a pool that minikv accounts for.

The interface follows vLLM's `LLM`. What it was given becomes its parts in `assemble`; its requests
come in and go out over a `Desk`.
"""

from tqdm.auto import tqdm

from minikv.engine.assemble import assemble
from minikv.engine.beam_search import beam_search
from minikv.engine.desk import Desk
from minikv.request import RequestOutput, require_int


class LLM:
    """An inference engine for one model.

    Args:
        model: "smollm2" (the default), "tiny" (random, instant), a folder or a Hugging Face id;
            or what `minikv.model.loader.load` returned. The model is adopted: from then on its
            attention works inside this LLM only.
        kv_cache_manager: "prefix" (the default: paged, and prompts that begin alike share blocks),
            "paged" or "contiguous" (a slab for each request); an instance; or a factory (a class
            will do) that is called with those of num_blocks, block_size and max_model_len that it
            takes.
        scheduler: an instance (its manager is used), or a factory called with the manager and
            those of max_num_seqs and max_num_batched_tokens that it takes.
        block_size: tokens per block; 16 unless a manager instance says otherwise.
        num_gpu_blocks_override: blocks in the pool. Default: 1 GiB on a CPU; on a GPU
            gpu_memory_utilization (0.9) of its memory, less what is in use once the weights are
            loaded. Never more than max_num_seqs requests of max_model_len could fill.
        max_num_seqs: requests that run at once (16). max_num_batched_tokens: tokens computed per
            step (512).
        max_model_len: prompt and output tokens of one request at most. Default: what the model
            was made for, or what the pool holds, whichever is less.
        dtype: "auto" (bfloat16 where the device multiplies it natively, else float32) or a name.
        seed: where requests without a seed of their own take their random streams from.
        batching: "continuous" (a request enters and leaves at any step) or "static" (a padded
            batch enters and leaves together).
        report_every: keep a MemoryReport every so many steps in `metrics.reports`; 0 for none.
        check_every_step: have the manager check its books after every step (slower): the way to
            find out where a manager of your own goes wrong.
        attention_backend: how attention reads K and V: "gather", "online", "cpu" or "triton", or
            a function of your own (see `minikv.model.backends`). Default: the fastest that this
            device has.

    An LLM is used from one thread at a time; several may share one loaded model.

    Raises ValueError or TypeError naming the argument, UnsupportedModel (a ValueError) for an
    architecture that would not be computed exactly, and OutOfKVMemory for a pool without room.
    """

    def __init__(
        self,
        model="smollm2",
        *,
        kv_cache_manager=None,
        scheduler=None,
        block_size=None,
        num_gpu_blocks_override=None,
        max_num_seqs=None,
        max_num_batched_tokens=None,
        max_model_len=None,
        dtype="auto",
        device="auto",
        seed=0,
        gpu_memory_utilization=0.9,
        report_every=0,
        batching="continuous",
        check_every_step=False,
        attention_backend=None,
    ):
        self.seed = require_int("seed", seed, at_least=0)
        loaded, self.core, self.max_model_len = assemble(
            model,
            kv_cache_manager=kv_cache_manager,
            scheduler=scheduler,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
            gpu_memory_utilization=gpu_memory_utilization,
            report_every=report_every,
            batching=batching,
            check_every_step=check_every_step,
            attention_backend=attention_backend,
        )
        self.model, self.tokenizer, self.spec = loaded
        self._desk = Desk(self.core, loaded, max_model_len=self.max_model_len, seed=self.seed)

    # -- what it is made of -----------------------------------------------------------------

    @property
    def manager(self):
        return self.core.manager

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def runner(self):
        return self.core.runner

    @property
    def metrics(self):
        return self.core.metrics

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend that runs."""
        return self.runner.attention_backend

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing changes, while requests hold blocks."""
        return self.core.reset_prefix_cache()

    def memory_report(self):
        """Where the pool's slots are now: a MemoryReport."""
        return self.core.report()

    # -- one request at a time --------------------------------------------------------------

    def add_request(self, prompt, sampling_params=None, request_id=None, *, cache_salt=None) -> str:
        """Queues a prompt (text, token ids or chat messages) and returns its id.

        cache_salt: it shares cached blocks only with requests of the same salt, a tenant's say.

        Raises ValueError (TypeError for the wrong kind of thing) and OutOfKVMemory for what can
        never be served; then nothing has changed.
        """
        job = self._desk.prepare(prompt, sampling_params, request_id, cache_salt)
        try:
            return self._desk.add(job)
        except BaseException:  # an interrupt may come when it is queued already
            self._desk.withdraw(job)
            raise

    def step(self) -> list[RequestOutput]:
        """One iteration. Returns a snapshot of every request that got a token or ended in it."""
        desk = self._desk
        if desk.jobs:
            desk.step()
        held = desk.held
        try:
            desk.held = {}
            return [output for _, output in held.values()]
        except BaseException:  # nobody has got them
            desk.held = held
            raise

    def abort(self, request_id) -> bool:
        """Ends a request at any moment and takes its blocks back. False: nothing ran by that id.

        Raises RuntimeError in another thread than that of the requests, whose step may be on."""
        return self._desk.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything left to do or to tell."""
        return bool(self._desk.jobs or self._desk.held)

    # -- many at once -----------------------------------------------------------------------

    def generate(
        self, prompts, sampling_params=None, *, use_tqdm=True, cache_salt=None
    ) -> list[RequestOutput]:
        """Answers one prompt or a list of them; outputs come in the prompts' order.

        prompts: a string, a list of token ids, a list of chat messages ({"role", "content"}), or
            a list of any of these. A string is taken as it is; messages go through the model's
            chat template.
        sampling_params: one for all, or a list with one each. cache_salt: one for all.

        Every prompt is checked before the first is started. An interruption takes back whatever
        is still running. Raises as add_request does.
        """
        jobs = self._desk.prepare_all(prompts, sampling_params, cache_salt)
        counts, num_tokens = {}, 0  # output tokens: by request, and of all
        with tqdm(total=len(jobs), desc="requests", disable=not use_tqdm) as bar:
            for output in self._desk.drive(jobs):
                num_tokens += output.num_output_tokens - counts.get(output.request_id, 0)
                counts[output.request_id] = output.num_output_tokens
                rate = num_tokens / max(1e-9, bar.format_dict["elapsed"])
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                bar.update(output.finished)
        return [job.snapshot(self.metrics) for job in jobs]

    def beam_search(self, prompts, params, *, cache_salt=None) -> list:
        """The most likely answers: see `minikv.engine.beam_search.beam_search`."""
        return beam_search(self._desk, prompts, params, cache_salt)

    def stream(self, prompt, sampling_params=None, *, cache_salt=None):
        """Yields the answer's text as it comes, whole characters only. Leaving the loop early
        aborts the request. Raises as add_request does (at once, not at the first piece),
        ValueError for n above 1, and RuntimeError if the request ends with an error."""
        return self._desk.stream(prompt, sampling_params, cache_salt)
