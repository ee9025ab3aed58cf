"""The managers that chapter 07's exercises show and teach, under the content oracle: a key that
says too much or too little costs hits, and never an answer."""

import random
from pathlib import Path

import oracle
import pytest

from minikv.classroom.cells import role_of
from minikv.classroom.source import read_source
from minikv.request import Request

SOURCE = Path(__file__).resolve().parents[1] / "solutions" / "src" / "07_prefix_sharing.py"


@pytest.fixture(scope="module")
def names():
    """What the solution's cells define; checks, and cells that run a model, are left out."""
    namespace = {"__name__": "__main__"}
    for cell in read_source(SOURCE).cells:
        runs = cell.id.startswith(("on-", "blind-"))
        if cell.cell_type == "code" and role_of(cell) != "check" and not runs:
            exec(compile(cell.source, f"<{cell.id}>", "exec"), namespace)
    return namespace


def served(manager, rng, num_samples):
    """Random requests through the oracle's engine: prompt tokens found, preemptions, forks."""
    limits = {"max_num_seqs": rng.randint(1, 5), "max_num_batched_tokens": rng.randint(2, 20)}
    core = oracle.engine(manager, **limits)
    core.check_every_step = True
    requests, samples = [], []
    for i in range(rng.randint(2, 7)):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        options = {"max_tokens": rng.randint(1, 6), "cache_salt": rng.choice([None, "x"])}
        request = Request(f"R{i}", prompt, arrival_time=float(i), **options)
        if manager.fits_ever(request):
            ids = range(1, 1 + rng.randint(0, num_samples))
            request.children = [
                Request(f"R{i}.{k}", prompt, sample_index=k, **options) for k in ids
            ]
            requests.append(request)
            samples += [request, *request.children]
    core.run(requests)
    for request in samples:
        assert request.token_ids == oracle.reference_of(request)
    assert manager.num_free_blocks == manager.num_blocks
    num_found = sum(max(0, request.num_cached_tokens) for request in samples)
    return num_found, sum(request.num_preemptions for request in samples)


def key_makers(names):
    def ends(tokens, block_size):
        return range(block_size, len(tokens) + 1, block_size)

    return {
        "right": names["block_keys"],
        "blind": lambda t, B, salt: [tuple(t[e - B : e]) for e in ends(t, B)],
        "unsalted": lambda t, B, salt: [tuple(t[:e]) for e in ends(t, B)],
        "one for all": lambda t, B, salt: [0 for _ in ends(t, B)],
    }


@pytest.mark.parametrize("kind", ["right", "blind", "unsalted", "one for all"])
def test_no_key_makes_an_answer_wrong(names, kind):
    found = preempted = 0
    for seed in range(150):
        rng = random.Random(seed)
        block_size, num_blocks = rng.choice([1, 2, 3, 4]), rng.randint(6, 20)
        functions = key_makers(names)[kind], names["find_longest_hit"], names["admit"]
        manager = names["SharingManager"](num_blocks, block_size, *functions)
        hits, preemptions = served(manager, rng, 0)
        found, preempted = found + hits, preempted + preemptions
    assert found > 0 and preempted > 0


def test_forks_that_copy_on_write_give_every_sample_its_own_answer(names):
    shared = preempted = 0
    for seed in range(150):
        rng = random.Random(seed)
        manager = names["MyForks"](rng.randint(8, 24), rng.choice([1, 2, 3, 4]))
        hits, preemptions = served(manager, rng, 3)
        shared, preempted = shared + hits, preempted + preemptions
    assert shared > 0 and preempted > 0
