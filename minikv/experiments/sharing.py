"""What samples of one prompt and the beams of a search share, over simulated traffic.

Samples are forked by the scheduler. Beams are, too; which of them survive a step is replayed from
real searches (`beam_survivors.json`), since only a model can say.
"""

import json
import random
from pathlib import Path

from minikv.experiments.paper import mean, paper_step_time
from minikv.request import BeamSearchParams, Request
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation

SURVIVORS_FILE = Path(__file__).with_name("beam_survivors.json")


# -- which beams survive ---------------------------------------------------------------------------


def read_survivors() -> dict:
    """The file: {source, prompts, num_tokens, survivors}."""
    return json.loads(SURVIVORS_FILE.read_text(encoding="utf-8"))


def beam_survivors() -> dict:
    """{width: [run, ...]} as measured, by a search for a prompt each. A run has a list for every
    step: of each surviving beam, the best first, whose continuation it is (0 is the best)."""
    return {
        int(width): [[list(map(int, step)) for step in run.split()] for run in runs]
        for width, runs in read_survivors()["survivors"].items()
    }


def record_survivors(llm, prompt, width, num_tokens) -> list:
    """A run as in beam_survivors(), from a real search that no end token ends."""
    from minikv.engine.beam_search import BeamSearch  # imports torch

    token_ids = llm.tokenizer(prompt)["input_ids"]
    request = Request("recorded", token_ids, max_tokens=num_tokens)
    search = BeamSearch(llm.core, request, BeamSearchParams(width, num_tokens))
    error = search.run()
    if error:
        raise error
    return search.parents


def with_pauses(run):
    """The run at half the speed: after every step but the first comes one in which nobody dies."""
    calm = list(range(len(run[0])))
    return [run[0], *(each for parents in run[1:] for each in (parents, calm))]


def ancestor_ages(run) -> list[int]:
    """For each step of a recorded search: how many steps ago all its beams had one ancestor."""
    ages, since = [], []  # since[i]: for each pair, the step in which their ways parted
    for step, parents in enumerate(run):
        since = [
            [step if a == b else since[a][b] for b in parents] if step else [step] * len(parents)
            for a in parents
        ]
        ages.append(step - min(map(min, since)))
    return ages


# -- who shares -----------------------------------------------------------------------------------


class WholePromptScheduler(Scheduler):
    """Samples share all of their prompt, its last token included, as in the paper's engine: the
    one forward pass of the prompt gives each its first token. (Ours runs the last token anew for
    each sample, so that any of them can be stepped back and recomputed by the one rule.)"""

    def _fan_out(self, parent):
        for child in parent.children:
            child.num_computed_tokens = parent.num_prompt_tokens
            child.num_tokens = parent.num_prompt_tokens + 1
            child.first_scheduled_time = parent.first_scheduled_time
            self.manager.fork(parent, child)
            self.running.append(child)
        parent.children = []


class BeamScheduler(WholePromptScheduler):
    """The samples of a request are its beams: after each step those that do not survive give
    their place to a fork of one that does. All have one length, and end together.

    survivors: runs to be replayed, as beam_survivors() gives them; one is drawn for each request.
    A search that outlasts its run goes on with another's, from the second step. For pools with
    room: a beam that has to step back falls behind, and its search shares nothing more from then.
    """

    def __init__(self, manager, survivors, seed=0, **limits):
        super().__init__(manager, **limits)
        self._survivors, self._random = survivors, random.Random(seed)
        self._searches = []  # [beams, the best first; iterator over the run]

    def _fan_out(self, parent):
        beams = [parent, *parent.children]
        super()._fan_out(parent)
        self._searches.append([beams, self._replay()])

    def _replay(self):
        while True:
            yield from self._random.choice(self._survivors)[1:]

    def update(self, scheduled, tokens, now, step):
        searches, self._searches = self._searches, []  # new ones wait for their first common step
        ended = super().update(scheduled, tokens, now, step)
        for search in searches:
            beams, replay = search
            lengths = {beam.num_computed_tokens for beam in beams}
            if len(lengths) == 1 and 0 not in lengths and not beams[0].finish_reason:
                search[0] = self._replace(beams, next(replay))
        self._searches += [each for each in searches if not each[0][0].finish_reason]
        return ended

    def _replace(self, beams, parents):
        """The first continuation of a parent goes on in its place, as in the engine."""
        dead = [beam for i, beam in enumerate(beams) if i not in parents]
        following, taken = [], set()
        for parent in parents:
            beam = beams[parent]
            if parent in taken:
                beam = dead.pop()
                self.manager.free(beam)
                self.manager.fork(beams[parent], beam)
            following.append(beam)
            taken.add(parent)
        return following


def requests_of(workload, width, seed, duration_s):
    """The workload's requests, each with width - 1 children of its lengths. All name their prompt,
    so that a prefix cache could find it."""
    requests = workload.requests(duration_s=duration_s, seed=seed)
    for request in requests:
        request.prefix_id, request.prefix_len = request.request_id, request.num_prompt_tokens
        request.children = [
            Request(
                f"{request.request_id}.{i}",
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                arrival_time=request.arrival_time,
                sample_index=i,
                prefix_id=request.prefix_id,
                prefix_len=request.prefix_len,
            )
            for i in range(1, width)
        ]
    return requests


def blocks_of(manager):
    """(blocks that the tables name, each as often as it is named; blocks in use)"""
    return sum(map(len, manager.tables.values())), manager.num_blocks - manager.num_free_blocks


def sharing_run(requests, scheduler, *, duration_s, warmup_s=0.0, on_step=None):
    """Serves requests; returns {saved_percent, num_seqs, num_preemptions}.

    saved_percent: of the blocks that sequences would hold without sharing, those that they don't,
    in the middle of each step (the new tokens have their slots, nobody has ended yet); the mean
    over the steps between warmup_s and duration_s in which a token is computed.
    """
    simulation = Simulation(scheduler, paper_step_time())
    saved, num_seqs, run = [], [], simulation.runner.run

    def counted(scheduled, copies):
        if scheduled and simulation.clock.now() >= warmup_s:
            named, in_use = blocks_of(scheduler.manager)
            saved.append(100 * (1 - in_use / named))
            num_seqs.append(len(scheduled))
        return run(scheduled, copies)

    simulation.runner.run = counted
    simulation.run(requests, on_step=on_step, until_s=duration_s)
    if not saved:
        raise ValueError("nothing was measured: no step lies between warmup_s and duration_s")
    return {
        "saved_percent": mean(saved),
        "num_seqs": mean(num_seqs),
        "num_preemptions": scheduler.num_preemptions,
    }
