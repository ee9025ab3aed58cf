"""The desk: prompts come in and become requests; what the loop computed goes out as outputs."""

import contextlib
import itertools
import threading

import numpy as np

from minikv.engine.job import Job, eos_token_ids, is_one_prompt, sample_ids_of, tokenize
from minikv.kv_cache.base import OutOfKVMemory
from minikv.request import Request, SamplingParams


class Desk:
    """The jobs of one LLM, from the prompt to the last output that somebody has got.

    core: the EngineCore that serves them. loaded: its model, the tokenizer (or None) and the
    spec. max_model_len: prompt and output tokens of one request at most. seed: where requests
    without one of their own take theirs from.
    """

    def __init__(self, core, loaded, *, max_model_len, seed):
        self.core, self.max_model_len, self.seed = core, max_model_len, seed
        model, self.tokenizer, self.spec = loaded
        self.jobs = {}  # request_id -> Job, until it has ended and its output is held
        self.samples = {}  # request_id of each of its samples -> (Job, Sample); may know more jobs
        self.held = {}  # request_id -> (Job, newest output) for the next step() to return
        self._cut_short = False  # whether the last step or abort was
        self._thread = None  # whose requests are unfinished
        self._ids, self._num_added = itertools.count(), 0
        self._eos_token_ids = eos_token_ids(model, self.tokenizer)

    # -- in: a prompt becomes a job ---------------------------------------------------------

    def prepare(self, prompt, sampling_params, request_id=None, cache_salt=None) -> Job:
        """Checks all about a request, and changes nothing."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, not {params!r}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none")
        if not isinstance(cache_salt, str | None) or cache_salt == "":
            raise TypeError(f"cache_salt must be a string with at least a letter: {cache_salt!r}")
        request_id = self._new_id(params.n) if request_id is None else request_id
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, not {request_id!r}")
        sample_ids = sample_ids_of(request_id, params.n)
        taken = [sample_id for sample_id in sample_ids if self.is_taken(sample_id)]
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
                cache_salt=cache_salt,
            )
            for i, sample_id in enumerate(sample_ids)
        ]
        manager = self.core.manager
        if not manager.fits_ever(requests[0]):
            name, slots = type(manager).__name__, manager.num_blocks * manager.block_size
            raise OutOfKVMemory(
                f"the prompt has {len(token_ids)} tokens and max_tokens is {params.max_tokens}: "
                f"that may need {requests[0].max_kv_tokens} slots, and {name} can never give one "
                f"request so many of the pool's {slots}"
            )
        return Job(request_id, text, token_ids, params, requests, self.tokenizer)

    def prepare_all(self, prompts, sampling_params, cache_salt=None) -> list[Job]:
        """As prepare(), for what generate() takes."""
        prompts = [prompts] if is_one_prompt(prompts) else list(prompts)
        if not isinstance(sampling_params, list | tuple):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: give one for "
                "all or one for each"
            )
        pairs = zip(prompts, sampling_params, strict=True)
        return [self.prepare(*pair, cache_salt=cache_salt) for pair in pairs]

    def _new_id(self, n):
        return next(
            request_id
            for request_id in map(str, self._ids)
            if not any(map(self.is_taken, sample_ids_of(request_id, n)))
        )

    def is_taken(self, sample_id) -> bool:
        """Whether it runs, or its last output is still to be told."""
        job, _ = self.samples.get(sample_id, (None, None))
        return (job is not None and self._runs(job)) or sample_id in self.held

    def _runs(self, job):
        return self.jobs.get(job.request_id) is job

    def add(self, job) -> str:
        """Queues it and returns its id. Cut short, it may be in: withdraw it."""
        self.require_own_thread()
        requests = [sample.request for sample in job.samples]
        seed = job.params.seed
        if seed is None:
            seed = int(np.random.SeedSequence([self.seed, self._num_added]).generate_state(1)[0])
        for request in requests:
            request.seed, request.arrival_time = seed, self.core.clock.now()
        requests[0].children = requests[1:]
        self.core.scheduler.add(requests[0])
        self._num_added += 1
        self.samples |= {s.request.request_id: (job, s) for s in job.samples}
        self.jobs[job.request_id] = job
        return job.request_id

    def abort(self, request_id) -> bool:
        """Withdraws the request of that id. False: none ran."""
        self.require_own_thread()
        self.held.pop(request_id, None)
        job = self.jobs.get(request_id)
        if job is None:
            return False
        self.withdraw(job)
        return True

    def withdraw(self, job):
        """Ends what of it runs, and forgets it. Cut short, the next step goes on with it."""
        job.withdrawn, before, self._cut_short = True, self._cut_short, True
        requests, errors = [sample.request for sample in job.samples], []
        for request in requests:
            try:
                self.core.scheduler.abort(request, self.core.clock.now())
            except Exception as error:  # as a rule it has ended all the same, see recover()
                errors.append(error)
        if self.held.get(job.request_id, (None, None))[0] is job:
            del self.held[job.request_id]
        if not any(map(self.core.scheduler.is_unfinished, requests)):
            self._forget(job)
            self._cut_short = before
        if errors:
            raise errors[0]

    def _forget(self, job):
        if self._runs(job):
            del self.jobs[job.request_id]
        for sample in job.samples:
            if self.samples.get(sample.request.request_id) == (job, sample):
                del self.samples[sample.request.request_id]

    # -- out: what the loop computed becomes outputs ---------------------------------------

    def drive(self, jobs):
        """Adds these requests and steps until they end, yielding their outputs. What requests of
        add_request get meanwhile is held for the next step(); another open stream reads its own.
        """
        own = {job.request_id: job for job in jobs}
        try:
            for job in jobs:
                job.driven = True
                self.add(job)
            while True:
                told = [entry for entry in self.held.values() if entry[0].driven]
                for job, _ in told:
                    del self.held[job.request_id]
                for job, output in told:
                    if own.get(job.request_id) is job:
                        yield output
                if not any(map(self._runs, jobs)):
                    return
                self.step()
        except BaseException:  # an interrupt and a caller who has heard enough included
            for job in jobs:
                with contextlib.suppress(Exception):  # a broken manager must not hide what it was
                    self.withdraw(job)
            raise

    def stream(self, prompt, sampling_params, cache_salt=None):
        """See LLM.stream."""
        job = self.prepare(prompt, sampling_params, cache_salt=cache_salt)
        if job.params.n != 1:
            raise ValueError(f"n is {job.params.n}, but a stream has one sample")
        if self.tokenizer is None:
            raise ValueError("a stream is text, and this model has no tokenizer")
        return self.pieces(job)

    def pieces(self, job):
        """Adds it and yields its text as it comes. RuntimeError if it ends with an error."""
        request, detokenizer = job.samples[0].request, job.samples[0].detokenizer
        # Once more at the end: another caller's step() may have had the last output.
        for _ in itertools.chain(self.drive([job]), [None]):
            if request.error:
                raise RuntimeError(request.error)
            piece = detokenizer.next_piece(final=request.finish_reason is not None)
            if piece:
                yield piece

    def step(self):
        """One iteration. Its outputs are put into held."""
        self.require_own_thread()
        if self._cut_short:  # whoever ended or got a token then has not been told
            if self.core.scheduler.must_recover:
                self.core.recover()
            for job in list(self.jobs.values()):
                if job.withdrawn:
                    self.withdraw(job)
                else:
                    self._tell([(job, sample) for sample in job.samples])
        self._cut_short = True
        if self.core.scheduler.has_unfinished_requests:
            scheduled, finished = self.core.step()
            requests = [*(entry.request for entry in scheduled), *finished]
            known = [self.samples.get(request.request_id) for request in requests]
            self._tell([each for each in known if each and self._runs(each[0])])
        self._cut_short = False

    def _tell(self, touched):
        """Puts the outputs of those (job, sample) that have news into held."""
        jobs = {}
        for job, sample in touched:
            request, got_token = sample.request, sample.read_new_tokens()
            if sample.end_reason and request.finish_reason is None:
                self.core.scheduler.finish(request, sample.end_reason, self.core.clock.now())
            if got_token or request.finish_reason:
                jobs[job.request_id] = job
        # Nothing is forgotten before its output is held: a step that is cut short loses none.
        for request_id, job in jobs.items():
            output = job.snapshot(self.core.metrics)
            self.held[request_id] = job, output
            if output.finished:
                self._forget(job)

    def require_own_thread(self):
        """Two threads would take each other's outputs, so a second one is refused while requests
        of the first are unfinished."""
        if not self.jobs:
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():
            raise RuntimeError(
                "this LLM serves requests of another thread: use it from one thread at a time, or "
                "give each its own LLM (they can share one loaded model)"
            )
