"""`LLM`: prompts in, text out, with every key and value in a pool that minikv accounts for.

It joins the parts: a transformers model that attends through block tables, a KV-cache manager, a
scheduler, and core's loop on the wall clock. The interface follows vLLM's `LLM`.
"""

import contextlib
import inspect
import itertools
import threading
import time

import numpy as np
from tqdm.auto import tqdm

from minikv.core import EngineCore
from minikv.kv_cache.base import KVCacheManager, OutOfKVMemory, cdiv
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.model.backends import choose_backend
from minikv.model.job import Job, eos_token_ids, is_one_prompt, sample_ids_of, tokenize
from minikv.model.loader import Loaded, load
from minikv.model.memory import default_num_blocks, require_memory
from minikv.model.packing import pack_linears
from minikv.model.probe import adopt
from minikv.model.runner import ModelRunner
from minikv.request import Request, RequestOutput, SamplingParams, require_int, require_number
from minikv.scheduler import Scheduler
from minikv.static_batching import BATCHING

DEFAULT_BLOCK_SIZE = 16
MANAGERS = {"paged": PagedKVCacheManager, "contiguous": ContiguousKVCacheManager}


class WallClock:
    """Seconds since it was made."""

    def __init__(self):
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def advance_to(self, t) -> None:
        time.sleep(max(0.0, t - self.now()))


class LLM:
    """An inference engine for one model.

    Args:
        model: "smollm2" (the default), "tiny" (random, instant), a folder or a Hugging Face id;
            or what `minikv.model.loader.load` returned. The model is adopted: from then on its
            attention works inside this LLM only.
        kv_cache_manager: "paged" (the default) or "contiguous" (a slab for each request); an
            instance; or a factory (a class will do) that is called with those of num_blocks,
            block_size and max_model_len that it takes.
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
        self.model, self.tokenizer, self.spec = loaded
        if max_model_len is not None and max_model_len > self.spec.max_model_len:
            raise ValueError(
                f"max_model_len is {max_model_len}, but {self.spec.name} was made for "
                f"{self.spec.max_model_len} positions"
            )
        if not callable(attention_backend):
            attention_backend, _ = choose_backend(
                next(self.model.parameters()).device, self.model.dtype, attention_backend
            )
        adopt(self.model, self.spec, attention_backend)

        max_num_seqs, device = max_num_seqs or 16, next(self.model.parameters()).device
        if _is_factory(kv_cache_manager):
            block_size = block_size or DEFAULT_BLOCK_SIZE
            num_blocks = num_gpu_blocks_override
            if num_blocks is None:
                num_blocks = default_num_blocks(
                    device, self.spec, block_size, gpu_memory_utilization
                )
                longest = cdiv(max_model_len or self.spec.max_model_len, block_size)
                num_blocks = min(num_blocks, max_num_seqs * longest)
            self.max_model_len = self._fitting_len(max_model_len, num_blocks * block_size)
            require_memory(device, self.spec, num_blocks, block_size)
            manager = _call(
                kv_cache_manager or PagedKVCacheManager,
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=self.max_model_len,
            )
            _require_part("what kv_cache_manager made", manager, KVCacheManager, made=True)
        else:
            manager = kv_cache_manager
            require_memory(device, self.spec, manager.num_blocks, manager.block_size)
            if manager.tables:
                raise ValueError("kv_cache_manager already holds block tables of other requests")
            limit = getattr(manager, "max_model_len", None) or self.spec.max_model_len
            limit = min(limit, manager.max_slots_per_request)
            self.max_model_len = self._fitting_len(max_model_len, limit)
        if _is_factory(scheduler):
            scheduler = _call(
                scheduler or BATCHING[batching],
                manager,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens or 512,
            )
        _require_part("what scheduler made", scheduler, Scheduler, made=True)
        pack_linears(self.model, num_rows=scheduler.max_num_seqs)
        self.runner = ModelRunner(self.model, self.spec, manager, attention_backend)
        self.core = EngineCore(
            scheduler,
            self.runner,
            WallClock(),
            report_every=report_every,
            check_every_step=check_every_step,
        )
        self._jobs = {}  # request_id -> Job, until it has ended and its output is held
        self._samples = {}  # request_id of each of its samples -> (Job, Sample); may know more jobs
        self._held = {}  # request_id -> (Job, newest output) for the next step() to return
        self._cut_short = False  # whether the last step or abort was
        self._thread = None  # whose requests are unfinished
        self._ids, self._num_added = itertools.count(), 0
        self._eos_token_ids = eos_token_ids(self.model, self.tokenizer)

    # -- what it is made of -----------------------------------------------------------------

    @property
    def manager(self):
        return self.core.manager

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def metrics(self):
        return self.core.metrics

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend that runs."""
        return self.runner.attention_backend

    def memory_report(self):
        """Where the pool's slots are now: a MemoryReport."""
        return self.core.report()

    def _fitting_len(self, max_model_len, num_slots):
        if max_model_len is None:
            return min(self.spec.max_model_len, num_slots)
        if max_model_len > num_slots:
            raise ValueError(
                f"max_model_len is {max_model_len}, but the manager's limit is {num_slots} tokens"
            )
        return max_model_len

    # -- one request at a time --------------------------------------------------------------

    def add_request(self, prompt, sampling_params=None, request_id=None) -> str:
        """Queues a prompt (text, token ids or chat messages) and returns its id.

        Raises ValueError (TypeError for the wrong kind of thing) and OutOfKVMemory for what can
        never be served; then nothing has changed.
        """
        job = self._prepare(prompt, sampling_params, request_id)
        try:
            return self._add(job)
        except BaseException:  # an interrupt may come when it is queued already
            self._withdraw(job)
            raise

    def step(self) -> list[RequestOutput]:
        """One iteration. Returns a snapshot of every request that got a token or ended in it."""
        if self._jobs:
            self._step()
        held = self._held
        try:
            self._held = {}
            return [output for _, output in held.values()]
        except BaseException:  # nobody has got them
            self._held = held
            raise

    def abort(self, request_id) -> bool:
        """Ends a request at any moment and takes its blocks back. False: nothing ran by that id.

        Raises RuntimeError in another thread than that of the requests, whose step may be on."""
        self._require_own_thread()
        self._held.pop(request_id, None)
        job = self._jobs.get(request_id)
        if job is None:
            return False
        self._withdraw(job)
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything left to do or to tell."""
        return bool(self._jobs or self._held)

    # -- many at once -----------------------------------------------------------------------

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True) -> list[RequestOutput]:
        """Answers one prompt or a list of them; outputs come in the prompts' order.

        prompts: a string, a list of token ids, a list of chat messages ({"role", "content"}), or
            a list of any of these. A string is taken as it is; messages go through the model's
            chat template.
        sampling_params: one for all, or a list with one each.

        Every prompt is checked before the first is started. An interruption takes back whatever
        is still running. Raises as add_request does.
        """
        prompts = [prompts] if is_one_prompt(prompts) else list(prompts)
        if not isinstance(sampling_params, list | tuple):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: give one for "
                "all or one for each"
            )
        pairs = zip(prompts, sampling_params, strict=True)
        jobs = [self._prepare(prompt, params, None) for prompt, params in pairs]
        newest, num_tokens = {}, 0
        with tqdm(total=len(jobs), desc="requests", disable=not use_tqdm) as bar:
            for output in self._drive(jobs):
                before = newest.get(output.request_id)
                num_tokens += output.num_output_tokens
                num_tokens -= 0 if before is None else before.num_output_tokens
                newest[output.request_id] = output
                rate = num_tokens / max(1e-9, bar.format_dict["elapsed"])
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                bar.update(output.finished)
        return [job.snapshot(self.metrics) for job in jobs]

    def stream(self, prompt, sampling_params=None):
        """Yields the answer's text as it comes, whole characters only. Leaving the loop early
        aborts the request. Raises as add_request does (at once, not at the first piece),
        ValueError for n above 1, and RuntimeError if the request ends with an error."""
        job = self._prepare(prompt, sampling_params, None)
        if job.params.n != 1:
            raise ValueError(f"n is {job.params.n}, but a stream has one sample")
        if self.tokenizer is None:
            raise ValueError("a stream is text, and this model has no tokenizer")
        return self._pieces(job)

    def _pieces(self, job):
        request, detokenizer = job.samples[0].request, job.samples[0].detokenizer
        # Once more at the end: another caller's step() may have had the last output.
        for _ in itertools.chain(self._drive([job]), [None]):
            if request.error:
                raise RuntimeError(request.error)
            piece = detokenizer.next_piece(final=request.finish_reason is not None)
            if piece:
                yield piece

    def _drive(self, jobs):
        """Adds these requests and steps until they end, yielding their outputs. What requests of
        add_request get meanwhile is held for the next step(); another open stream reads its own.
        """
        own = {job.request_id: job for job in jobs}
        try:
            for job in jobs:
                job.driven = True
                self._add(job)
            while True:
                told = [entry for entry in self._held.values() if entry[0].driven]
                for job, _ in told:
                    del self._held[job.request_id]
                for job, output in told:
                    if own.get(job.request_id) is job:
                        yield output
                if not any(map(self._runs, jobs)):
                    return
                self._step()
        except BaseException:  # an interrupt and a caller who has heard enough included
            for job in jobs:
                with contextlib.suppress(Exception):  # a broken manager must not hide what it was
                    self._withdraw(job)
            raise

    # -- inside -----------------------------------------------------------------------------

    def _prepare(self, prompt, sampling_params, request_id):
        """Checks all about a request, and changes nothing."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, not {params!r}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none")
        request_id = self._new_id(params.n) if request_id is None else request_id
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {request_id!r}")
        sample_ids = sample_ids_of(request_id, params.n)
        taken = [sample_id for sample_id in sample_ids if self._is_taken(sample_id)]
        if taken:
            raise ValueError(
                f"request_id {taken[0]!r} is taken by a request that still runs, or whose last "
                "output step() has yet to return"
            )

        text, token_ids = tokenize(prompt, self.tokenizer, self.spec.name)
        if not token_ids:
            raise ValueError("the prompt is empty: it has no tokens")
        room = self.max_model_len - len(token_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, but max_model_len is "
                f"{self.max_model_len}, which includes at least one token of output"
            )
        unknown = [t for t in token_ids if t >= self.spec.vocab_size]
        if unknown:
            raise ValueError(
                f"the prompt holds token id {unknown[0]}, but the model has {self.spec.vocab_size}"
            )
        stop_token_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= self._eos_token_ids
        requests = [
            Request(
                sample_id,
                token_ids,
                max_tokens=min(params.max_tokens, room),
                stop_token_ids=stop_token_ids,
                sampling_params=params,
                sample_index=i,
            )
            for i, sample_id in enumerate(sample_ids)
        ]
        if not self.manager.fits_ever(requests[0]):
            name, slots = (
                type(self.manager).__name__,
                self.manager.num_blocks * self.manager.block_size,
            )
            raise OutOfKVMemory(
                f"the prompt has {len(token_ids)} tokens and max_tokens is {params.max_tokens}: "
                f"that may need {requests[0].max_kv_tokens} slots, and {name} can never give one "
                f"request so many of the pool's {slots}"
            )
        return Job(request_id, text, token_ids, params, requests, self.tokenizer)

    def _new_id(self, n):
        return next(
            request_id
            for request_id in map(str, self._ids)
            if not any(map(self._is_taken, sample_ids_of(request_id, n)))
        )

    def _is_taken(self, sample_id):
        job, _ = self._samples.get(sample_id, (None, None))
        return (job is not None and self._runs(job)) or sample_id in self._held

    def _runs(self, job):
        return self._jobs.get(job.request_id) is job

    def _add(self, job):
        self._require_own_thread()
        requests = [sample.request for sample in job.samples]
        seed = job.params.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self.seed, self._num_added]).generate_state(1)[0])
        for request in requests:
            request.seed, request.arrival_time = seed, self.core.clock.now()
        requests[0].children = requests[1:]
        self.scheduler.add(requests[0])
        self._num_added += 1
        self._samples |= {s.request.request_id: (job, s) for s in job.samples}
        self._jobs[job.request_id] = job
        return job.request_id

    def _withdraw(self, job):
        """Ends what of it runs, and forgets it. Cut short, the next step goes on with it."""
        job.withdrawn, before, self._cut_short = True, self._cut_short, True
        requests, errors = [sample.request for sample in job.samples], []
        for request in requests:
            try:
                self.scheduler.abort(request, self.core.clock.now())
            except Exception as error:  # as a rule it has ended all the same, see recover()
                errors.append(error)
        if self._held.get(job.request_id, (None, None))[0] is job:
            del self._held[job.request_id]
        if not any(map(self.scheduler.is_unfinished, requests)):
            self._forget(job)
            self._cut_short = before
        if errors:
            raise errors[0]

    def _forget(self, job):
        if self._runs(job):
            del self._jobs[job.request_id]
        for sample in job.samples:
            if self._samples.get(sample.request.request_id) == (job, sample):
                del self._samples[sample.request.request_id]

    def _step(self):
        """One iteration. Its outputs are put into _held."""
        self._require_own_thread()
        if self._cut_short:  # whoever ended or got a token then has not been told
            if self.scheduler.must_recover:
                self.core.recover()
            for job in list(self._jobs.values()):
                if job.withdrawn:
                    self._withdraw(job)
                else:
                    self._tell([(job, sample) for sample in job.samples])
        self._cut_short = True
        if self.scheduler.has_unfinished_requests:
            scheduled, finished = self.core.step()
            requests = [*(entry.request for entry in scheduled), *finished]
            known = [self._samples.get(request.request_id) for request in requests]
            self._tell([each for each in known if each and self._runs(each[0])])
        self._cut_short = False

    def _tell(self, touched):
        """Puts the outputs of those (job, sample) that have news into _held."""
        jobs = {}
        for job, sample in touched:
            request, got_token = sample.request, sample.read_new_tokens()
            if sample.end_reason and request.finish_reason is None:
                self.scheduler.finish(request, sample.end_reason, self.core.clock.now())
            if got_token or request.finish_reason:
                jobs[job.request_id] = job
        # Nothing is forgotten before its output is held: a step that is cut short loses none.
        for request_id, job in jobs.items():
            output = job.snapshot(self.metrics)
            self._held[request_id] = job, output
            if output.finished:
                self._forget(job)

    def _require_own_thread(self):
        """Two threads would take each other's outputs, so a second one is refused while requests
        of the first are unfinished."""
        if not self._jobs:
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():
            raise RuntimeError(
                "this LLM serves requests of another thread: use it from one thread at a time, or "
                "give each its own LLM (they can share one loaded model)"
            )


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
