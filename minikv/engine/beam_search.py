"""Beam search: the most likely answers that are found by keeping the best beginnings at each step.

Beams that split share the blocks of what they have in common (Kwon et al., SOSP 2023, section
4.4): who survives with several continuations is forked, who survives with none is freed. Names are
those of vLLM's `LLM.beam_search`; which answers are found is what transformers' own
`generate(num_beams=..., do_sample=False)` finds.
"""

import copy
import itertools
from dataclasses import dataclass

import torch

from minikv.kv_cache.base import OutOfKVMemory
from minikv.model.sampler import most_likely, sample
from minikv.request import BeamSearchParams, SamplingParams
from minikv.scheduler import NOT_FINITE, ScheduledRequest, whole


@dataclass
class BeamSearchSequence:
    """tokens: the prompt's and the answer's, an end token included. cum_logprob: of the answer's
    tokens, added up. text: of all tokens, without special ones and without the end token; None
    where the model has no tokenizer. finish_reason: `stop` or `length`."""

    tokens: list[int]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None


@dataclass
class BeamSearchOutput:
    """sequences: beam_width of them, the best first; fewer where there are no more."""

    sequences: list[BeamSearchSequence]


def beam_search(desk, prompts, params, cache_salt=None) -> list[BeamSearchOutput]:
    """The params.beam_width best answers to one prompt or to each of a list; outputs come in the
    prompts' order. prompts, cache_salt: as generate() takes them. params: a BeamSearchParams.

    Requests of add_request keep their blocks and stand still meanwhile: the search has only what
    is free. A manager that cannot fork has each new beam computed from its first token.

    Raises as generate() does, for each prompt before the first is started; OutOfKVMemory, naming
    blocks needed and free, where beams no longer find room; RuntimeError for logits that are not
    finite. Then, and after an interrupt, no beam holds anything.
    """
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params must be a BeamSearchParams, not {params!r}")
    alone = SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
    jobs = desk.prepare_all(prompts, alone, cache_salt)
    desk.require_own_thread()
    outputs = []
    for job in jobs:
        search = BeamSearch(desk.core, job.samples[0].request, params)
        error = search.run()
        if error:
            raise error
        outputs.append(BeamSearchOutput([_with_text(s, desk.tokenizer) for s in search.answers]))
    return outputs


def _with_text(sequence, tokenizer):
    if tokenizer is not None:
        end = -1 if sequence.finish_reason == "stop" else None
        sequence.text = tokenizer.decode(
            sequence.tokens[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    return sequence


class BeamSearch:
    """The search for one prompt: a Request, which becomes its first beam.

    live: the beams, as Requests of equal length, the best first. scores: the log-probabilities of
    their outputs. finished: (rank, BeamSearchSequence) of the best that have ended, likewise.
    parents: for each step that was survived, of each beam the index of the one that it continues.
    """

    def __init__(self, core, request, params):
        self.core, self.scheduler, self.manager = core, core.scheduler, core.manager
        self.params, self.prompt = params, request
        self.live, self.scores, self.finished = [request], [0.0], []
        self.parents, self.error, self._ids = [], None, itertools.count(1)

    @property
    def answers(self):
        return [sequence for _, sequence in self.finished]

    def recover(self):
        """After an error or an interrupt: the manager forgets all, and whoever else has a table
        is computed again."""
        self.core.recover()

    @whole
    def run(self):
        """Returns the error that ended it, or None. Afterwards no beam holds a table."""
        self.scheduler.require_own_books(self.prompt)
        while self.live and self.error is None:
            logits = self._compute()
            if self.error is None:
                self._advance(logits)
        self._end(self.live)
        return self.error

    # -- the beams' tokens through the model ----------------------------------------------------

    def _compute(self):
        """Catches up with all known tokens: one forward pass, or several where they are more than
        a step may have. Returns the logits of each beam's last token: [beams, vocab]."""
        rows = {}
        while len(rows) < len(self.live):
            scheduled = self._schedule()
            if self.error is None:
                self._run(scheduled, rows)
            if self.error is not None:
                return None
        return torch.stack([rows[beam.request_id] for beam in self.live])

    def _schedule(self):
        budget, scheduled = self.scheduler.max_num_batched_tokens, []
        for beam in self.live:
            hit = 0
            if beam.num_computed_tokens == 0 and budget > 0:
                hit = self.manager.get_num_cached_tokens(beam)
            num_known = beam.num_computed_tokens + hit
            num_new_tokens = min(beam.num_tokens - num_known, budget)
            if num_new_tokens < 1:
                continue
            extra = {"num_cached_tokens": hit} if hit else {}
            if self.manager.allocate_slots(beam, num_new_tokens, **extra) is None:
                self.error = OutOfKVMemory(self._no_room(beam, num_known + num_new_tokens))
                return None
            beam.num_computed_tokens = num_known
            scheduled.append(ScheduledRequest(beam, num_new_tokens))
            budget -= num_new_tokens
        return scheduled

    def _no_room(self, beam, num_tokens):
        m = self.manager
        held = len(m.tables.get(beam.request_id, ()))
        needed = max(1, m.num_blocks_for(beam, num_tokens) - held)  # a shared one is copied: 1
        ours = {each.request_id for each in self.live}
        others = {b for request_id in m.tables.keys() - ours for b in m.tables[request_id]}
        return (
            f"beam search finds no room for beam {self.live.index(beam) + 1} of {len(self.live)} "
            f"at {num_tokens} tokens: blocks of {m.block_size} tokens needed {needed}, free "
            f"{m.num_free_blocks} of {m.num_blocks}, held by other requests {len(others)}"
        )

    def _run(self, scheduled, rows):
        def keep(logits, requests):
            rows.update(zip((r.request_id for r in requests), logits, strict=True))
            return sample(logits, requests)

        core, manager = self.core, self.manager
        if core.check_every_step:
            manager.check()
        tokens = core.runner.run(scheduled, list(manager.copies()), keep)
        for (beam, num_new_tokens), token in zip(scheduled, tokens, strict=True):
            beam.num_computed_tokens += num_new_tokens
            if token is None:
                self.error = RuntimeError(NOT_FINITE)
            elif beam.num_output_tokens == 0:  # what beams add is hardly ever asked for again
                manager.cache_blocks(beam)
            if beam.num_computed_tokens < beam.num_tokens:  # in the middle of a long prompt
                del rows[beam.request_id]
        if core.check_every_step:
            manager.check()

    # -- which beginnings go on ------------------------------------------------------------------

    def _advance(self, logits):
        """Takes each beam a token further. As in transformers, an end token counts if it is one of
        the beam_width best continuations of all; more are looked at so that enough can go on."""
        width, stop_token_ids = self.params.beam_width, self.prompt.stop_token_ids
        num_tokens = self.live[0].num_output_tokens + 1
        is_last = num_tokens == self.prompt.max_tokens
        survivors = []
        for rank, (score, parent, token) in enumerate(self._continuations(logits)):
            ended = "stop" if token in stop_token_ids else "length" if is_last else None
            if ended and rank < width:
                tokens = [*self.live[parent].token_ids, token]
                sequence = BeamSearchSequence(tokens, score, finish_reason=ended)
                self.finished.append((self._rank(score, num_tokens), sequence))
            elif not ended and len(survivors) < width:
                survivors.append((score, parent, token))
        self.finished.sort(key=lambda each: each[0], reverse=True)
        del self.finished[width:]
        if survivors and len(self.finished) == width:
            best = self._rank(survivors[0][0], num_tokens)
            if self.params.early_stopping or best <= self.finished[-1][0]:
                survivors = []
        self.scores = [score for score, _, _ in survivors]
        self.live = self._continue([(parent, token) for _, parent, token in survivors])
        if self.live:
            self.parents.append([parent for _, parent, _ in survivors])

    def _rank(self, score, num_tokens):
        return score / num_tokens**self.params.length_penalty

    def _continuations(self, logits):
        """(log-probability, index of its beam, token) of the most likely ones, the best first."""
        num_most = max(2, 1 + len(self.prompt.stop_token_ids)) * self.params.beam_width
        scores = torch.tensor(self.scores, device=logits.device)
        log_probs = (torch.log_softmax(logits.float(), -1) + scores[:, None]).flatten()
        values, places = most_likely(log_probs, min(num_most, log_probs.numel()))
        for score, place in zip(values.tolist(), places.tolist(), strict=True):
            if score > float("-inf"):
                yield score, *divmod(place, logits.shape[-1])

    def _continue(self, survivors):
        """survivors: (index of the parent, token). The first of a parent's goes on in its place,
        the others are forked from it before it does; a parent of none is freed."""
        beams, parents = [], set()
        for parent, _ in survivors:
            beam = self.live[parent]
            beams.append(self._fork(beam) if parent in parents else beam)
            parents.add(parent)
        self._end([beam for i, beam in enumerate(self.live) if i not in parents])
        for beam, (_, token) in zip(beams, survivors, strict=True):
            beam.append(token)
        return beams

    def _fork(self, parent):
        child = copy.copy(parent)
        names = (f"{self.prompt.request_id}.beam{i}" for i in self._ids)
        child.request_id = next(name for name in names if name not in self.scheduler.requests)
        child.token_ids, child.block_keys = list(parent.token_ids), list(parent.block_keys)
        if not self.manager.fork(parent, child):
            child.num_computed_tokens = 0
        return child

    def _end(self, beams):
        for beam in beams:
            beam.finish_reason = "abort"  # nothing of it is worth keeping
            self.manager.free(beam)
