"""Calls that no scheduler makes but the contract allows, against a model of what each slot holds;
and bad input."""

import gc
import random

import numpy as np
import pytest
from cut_short import AtBytecode
from oracle import EMPTY, engine, mix, reference_of

from minikv import LLM, SamplingParams
from minikv.kv_cache.eviction import EVICTION, LRU
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager, contents, digest
from minikv.kv_cache.radix import RadixKVCacheManager
from minikv.model.loader import load
from minikv.request import Request
from minikv.scheduler import Scheduler
from minikv.static_batching import StaticScheduler


class Bare:
    """One random run over a bare manager. Steps as the engine's: room, copies, writes, publish;
    between them forks of anyone at any length, and ends, pins and resets at any time."""

    def __init__(self, seed, hash_fn=digest):
        rnd = self.rnd = random.Random(seed)
        self.num_blocks, self.B = rnd.randint(1, 12), rnd.choice([1, 2, 3, 4])
        self.pins = rnd.random() < 0.4
        if rnd.random() < 0.2:
            self.manager, self.pins = PagedKVCacheManager(self.num_blocks, self.B), False
        else:
            self.manager = PrefixCachingKVCacheManager(
                self.num_blocks,
                self.B,
                eviction="pinned" if self.pins else rnd.choice(list(EVICTION)),
                max_pinned_blocks=rnd.choice([None, 0, self.num_blocks]),
                hash_fn=hash_fn,
            )
        self.slots = [None] * (self.num_blocks * self.B)
        self.running, self.preempted, self.step = [], [], []  # step: [request, num_new_tokens]
        self.num_made, self.counts = 0, {}

    def run(self, num_moves=120):
        moves = [self.start] * 4 + [self.grow] * 4 + [self.end_step] * 5 + [self.fork] * 3
        moves += [self.end] * 2 + [self.preempt, self.readmit, self.rare]
        for _ in range(num_moves):
            move = self.rnd.choice(moves)
            if move():
                self.counts[move.__name__] = self.counts.get(move.__name__, 0) + 1
            self.check()
        self.end_step()
        for request in [*self.running]:
            self._free(request, "length")
            self.check()
        assert self.manager.num_free_blocks == self.num_blocks
        assert not self.manager._forked_tails and not self.manager.copies()
        return self.counts

    def records(self, request, end):
        state, records = mix(EMPTY, [None, "None", "red"].index(request.cache_salt)), []
        for token in request.token_ids[:end]:
            state = mix(state, token)
            records.append(state)
        return records

    def new(self, tokens, salt=None):
        self.num_made += 1
        return Request(f"r{self.num_made}", tokens, max_tokens=40, cache_salt=salt)

    def start(self):
        tokens = [self.rnd.randrange(2) for _ in range(self.rnd.randint(1, 14))]
        return self._admit(self.new(tokens, self.rnd.choice([None, None, "None", "red"])))

    def readmit(self):
        if not self.preempted:
            return False
        request = self.preempted.pop()
        request.append(self.rnd.randrange(2))
        return self._admit(request)

    def _admit(self, request):
        hit = self.manager.get_num_cached_tokens(request)
        assert 0 <= hit < request.num_tokens and hit % self.B == 0
        extra = {"num_cached_tokens": hit} if hit else {}
        if self._allocate(request, self.rnd.randint(1, request.num_tokens - hit), hit, **extra):
            self.running.append(request)
            return True
        self.preempted.append(request)
        return False

    def _allocate(self, request, n, hit=0, **extra):
        m, table = self.manager, list(self.manager.tables.get(request.request_id, ()))
        if self.rnd.random() < 0.2:
            extra["must_fit_tokens"] = self.rnd.randint(0, 20)
        if self.rnd.random() < 0.2:
            extra["keep_free_blocks"] = self.rnd.randint(0, 4)
        before = self.books()
        got = m.allocate_slots(request, n, **extra)
        if got is None:
            assert before == self.books(), "refused, but changed"
            end = request.num_computed_tokens + n + hit
            if not self.pins and len(extra) == (hit > 0) and not m._forked_tails:
                need = -(-max(end, 0) // self.B) - len(table)
                assert need > m.num_free_blocks - hit // self.B, "there was room"
            return False
        if extra.get("keep_free_blocks") and len(got) > len(table):
            assert m.num_free_blocks >= extra["keep_free_blocks"]
        request.num_computed_tokens += hit
        self.step.append([request, n])
        return True

    def books(self):
        m = self.manager
        blocks = [(b.ref_cnt, getattr(b, "key", None)) for b in m.block_pool.blocks]
        tables = {name: list(table) for name, table in m.tables.items()}
        free = [b.block_id for b in m.block_pool.get_all_free_blocks()]
        return tables, blocks, free, set(m._forked_tails), dict(m._origins)

    def grow(self):
        scheduled = [request for request, _ in self.step]
        able = [r for r in self.running if r not in scheduled]
        if not able:
            return False
        request = self.rnd.choice(able)
        for _ in range(self.rnd.choice([1, 1, 1, 5])):
            if request.num_computed_tokens == request.num_tokens or self.rnd.random() < 0.1:
                request.append(self.rnd.randrange(2))
        n = self.rnd.randint(1, request.num_tokens - request.num_computed_tokens)
        return self._allocate(request, n)

    def end_step(self):
        m, B = self.manager, self.B
        copies = m.copies()
        assert len({c.dst for c in copies}) == len(copies)
        moved = [(c.dst, self.slots[c.src * B : c.src * B + B]) for c in copies]
        for dst, content in moved:
            self.slots[dst * B : dst * B + B] = content
        for request, n in self.step:
            end = request.num_computed_tokens + n
            records, table = self.records(request, end), m.tables[request.request_id]
            for p in range(request.num_computed_tokens, end):
                block = m.block_pool.blocks[table[p // B]]
                assert block.ref_cnt == 1, f"{request} writes to a shared block"
                assert getattr(block, "key", None) is None, f"{request} writes to a published one"
                self.slots[table[p // B] * B + p % B] = records[p]
        for request, n in self.step:
            request.num_computed_tokens += n
            m.cache_blocks(request)
        self.step = []
        return True

    def fork(self):
        able = [] if self.step else [r for r in self.running if r.num_tokens < 40]
        if not able:
            return False
        parent = self.rnd.choice(able)
        k = self.rnd.choice(
            [self.rnd.randint(0, parent.num_computed_tokens), parent.num_computed_tokens]
        )
        own = [self.rnd.randrange(2) for _ in range(self.rnd.randint(1, 3))]
        child = self.new(parent.token_ids[:k] + own, parent.cache_salt)
        child.num_computed_tokens = k
        assert self.manager.fork(parent, child)
        self.running.append(child)
        return True

    def _free(self, request, reason):
        request.finish_reason = reason
        self.manager.free(request)
        self.running.remove(request)
        self.step = [entry for entry in self.step if entry[0] is not request]
        return True

    def end(self):
        return bool(self.running) and self._free(self.rnd.choice(self.running), "abort")

    def preempt(self):
        if not self.running:
            return False
        request = self.rnd.choice(self.running)
        self._free(request, None)
        request.num_computed_tokens = 0
        self.preempted.append(request)
        return True

    def rare(self):
        what, m = self.rnd.randrange(8), self.manager
        if what == 0:
            m.reset()
            for request in self.running:
                request.num_computed_tokens = 0
            self.preempted += self.running
            self.running, self.step = [], []
            self.slots = [None] * len(self.slots)
        elif what == 1:
            assert m.reset_prefix_cache() is (not m.tables)
        elif self.pins:
            named = self.new([self.rnd.randrange(2) for _ in range(self.rnd.randint(1, 8))])
            try:
                (m.pin if what < 6 else m.unpin)(named)
            except ValueError:
                assert what < 6
        return True

    def check(self):
        m, B = self.manager, self.B
        m.check()
        held = {b for table in m.tables.values() for b in table}
        assert m.num_free_blocks == self.num_blocks - len(held)
        live, pending = set(), set(m._origins)
        for request in self.running:
            table = m.tables[request.request_id]
            assert len(set(table)) == len(table)
            want = self.records(request, request.num_computed_tokens)
            for p, record in enumerate(want):
                live.add(table[p // B] * B + p % B)
                if table[p // B] not in pending:
                    got = self.slots[table[p // B] * B + p % B]
                    assert got == record, f"{request} reads wrong content at {p}"
        report = m.report()
        assert report.total == self.num_blocks * B and min(report) >= 0
        assert report.live == len(live), f"{report}: {len(live)} slots are live"


@pytest.mark.parametrize("kind", ["digest", "collisions", "few"])
def test_bare_calls_in_any_order(kind):
    hash_fns = {"digest": digest, "collisions": lambda d: b"same", "few": lambda d: digest(d)[:1]}
    totals = {}
    for seed in range(150):
        try:
            counts = Bare(seed, hash_fns[kind]).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        for what, count in counts.items():
            totals[what] = totals.get(what, 0) + count
    assert {"start", "grow", "fork", "end", "preempt", "readmit", "rare"} <= totals.keys(), totals


# -- bad input ------------------------------------------------------------------------------------

B = 4


def manager_of(num_blocks=16, block_size=B, **options):
    return PrefixCachingKVCacheManager(num_blocks, block_size, **options)


def serve(manager, request):
    """Looked up, computed, published and freed; returns the hit's tokens."""
    hit, num_tokens = manager.get_num_cached_tokens(request), request.num_tokens
    extra = {"num_cached_tokens": hit} if hit else {}
    manager.allocate_slots(request, num_tokens - hit, **extra)
    request.num_computed_tokens = num_tokens
    manager.cache_blocks(request)
    request.finish_reason = "length"
    manager.free(request)
    manager.check()
    return hit


@pytest.mark.parametrize("wide", [[-1], [2**40], [-1, 7], [2**70, -(2**70)]])
def test_tokens_beyond_32_bits_are_never_taken_for_others(wide):
    """The text of such a block could be the bytes of another: "[-1]" is four of them."""
    num = len(wide)
    [text] = contents(wide, num)
    for spelled in (text, repr(wide).encode(), str(wide[0]).encode()):
        token_ids = list(np.frombuffer(spelled.ljust(4 * num)[: 4 * num], dtype="<u4"))
        manager = manager_of(block_size=num)
        serve(manager, Request("a", [*wide, 1]))
        assert serve(manager, Request("b", [*token_ids, 1])) == 0
    assert serve(manager, Request("c", [*wide, 2])) == num


def test_a_block_has_one_content_whatever_stands_beside_it_and_whoever_made_its_numbers():
    for beside in ([-1, 0, 0, 0], [2**40] * 4, [-1]):
        assert contents([1, 2, 3, 4, *beside], 4)[0] == contents([1, 2, 3, 4], 4)[0]
    for token in (1, -1, 2**40):
        assert contents([np.int64(token)] * 4, 4) == contents([token] * 4, 4)


def test_a_request_has_other_keys_in_a_cache_of_other_blocks():
    """Asked about in two caches, to compare their block sizes; equal for two tokens only."""
    small, big = manager_of(64, 2), manager_of(64, 4)
    a, b = Request("a", [1, 2, 3, 4, 5]), Request("b", [1, 2, 9, 9, 9])
    for request in (a, b):
        assert small.get_num_cached_tokens(request) == 0
    serve(big, a)
    assert serve(big, b) == 0
    assert serve(small, Request("c", [1, 2, 3])) == 0 and serve(small, Request("d", [1, 2, 9])) == 2
    other = manager_of(64, 4, hash_fn=lambda data: digest(b"other" + data))
    e = Request("e", [1, 2, 3, 4, 5])
    assert other.get_num_cached_tokens(e) == 0 and big.get_num_cached_tokens(e) == 4


@pytest.mark.parametrize(
    "names, message",
    [
        ({"block_hashes": [[1], [2]]}, "block_hashes of request 'a': unhashable type: 'list'"),
        ({"block_hashes": 5}, "block_hashes of request 'a' must be a list, not int"),
        ({"block_hashes": (i for i in range(5))}, "must be a list, not generator"),
        ({"block_hashes": np.arange(5)}, "must be a list, not ndarray"),
        ({"prefix_id": [1], "prefix_len": 8}, "prefix_id of request 'a': unhashable type: 'list'"),
        ({"cache_salt": {}}, "cache_salt of request 'a': unhashable type: 'dict'"),
    ],
)
def test_a_name_that_cannot_be_looked_up_is_refused_before_it_stops_every_step(names, message):
    with pytest.raises(TypeError, match=message):
        Request("a", num_prompt_tokens=20, **names)


def test_a_shared_part_without_a_name_is_refused():
    """It was shared with all others that had none."""
    with pytest.raises(ValueError, match="'a' has prefix_len 8, but no prefix_id"):
        Request("a", num_prompt_tokens=20, prefix_len=8)


def test_a_salt_keeps_a_traces_keys_apart_too():
    def traced(name, salt=None):
        return Request(name, num_prompt_tokens=20, block_hashes=[1, 2], cache_salt=salt)

    manager = manager_of(64)
    assert [serve(manager, traced(str(salt), salt)) for salt in (None, "red", "blue")] == [0, 0, 0]
    assert [serve(manager, traced(f"{salt}2", salt)) for salt in (None, "red")] == [8, 8]


@pytest.mark.parametrize(
    "eviction, message",
    [
        (LRU(), "must be a name or a class, not"),
        (None, "must be a name or a class, not None"),
        (int, "eviction made 0, which lacks append_n"),
        (list, "which lacks append_n, get_all_free_blocks, num_free_blocks, popleft_n$"),
    ],
)
def test_an_order_that_is_none_is_refused_at_once(eviction, message):
    with pytest.raises(TypeError, match=message):
        manager_of(eviction=eviction)


def test_an_order_that_is_handed_out_twice_is_refused():
    order = LRU()
    serve(manager_of(eviction=lambda: order), Request("a", [1] * 9))
    with pytest.raises(ValueError, match="holds blocks already"):
        manager_of(eviction=lambda: order)


# -- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PrefixCachingKVCacheManager, RadixKVCacheManager])
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("how", ["tokens", "prefix_id", "no names"])
def test_a_request_that_has_ended_is_kept_by_nobody_but_its_cached_blocks(kind, how, num_samples):
    """A simulation runs without the garbage collector, and a memo names its own request."""
    tokens = {"tokens": {"prompt_token_ids": [1] * 40}}.get(how, {"num_prompt_tokens": 40})
    named = {"prefix_id": "p", "prefix_len": 8} if how == "prefix_id" else {}
    manager = kind(12, B)
    core = engine(manager)

    def num_alive():
        return sum(type(each) is Request and how in each.request_id for each in gc.get_objects())

    core.runner.run = lambda scheduled, copies: [1] * len(scheduled)
    gc.collect()
    gc.disable()
    try:
        for i in range(20):
            made = [
                Request(f"{how}-{i}-{j}", max_tokens=3, **tokens, **named)
                for j in range(num_samples)
            ]
            made[0].children = made[1:]
            core.submit(made[0])
            while core.scheduler.has_unfinished_requests:
                core.step()
            assert not any(request.block_keys for request in made)
        assert num_alive() >= num_samples
        del made
        core.scheduler.admitted.clear()
        assert num_alive() <= manager.num_blocks + 1
        manager.reset_prefix_cache()
        manager.get_num_cached_tokens(Request("other", [0]))
        assert num_alive() == 0
    finally:
        gc.enable()
    assert not manager._forked_tails


# -- a cache and its pool -------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [(Scheduler, Scheduler), (Scheduler, StaticScheduler)])
def test_what_lies_in_another_engines_pool_is_not_found(kinds):
    """A manager may serve one engine after the other; each has a pool of its own."""
    manager = manager_of(12)
    engines = [engine(manager, scheduler=kind) for kind in kinds]
    for i, core in enumerate(engines * 3):
        request = Request(f"r{i}", list(range(10)), max_tokens=4)
        core.run([request])
        assert request.token_ids == reference_of(request) and request.num_cached_tokens <= 0
    again = Request("again", list(range(10)), max_tokens=4)
    engines[0].run([again])
    assert again.num_cached_tokens == 0
    again = Request("and again", list(range(10)), max_tokens=4)
    engines[0].run([again])
    assert again.num_cached_tokens == 8


# -- LLM ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return load("tiny")


def test_a_stream_takes_a_salt_as_the_others_do(tiny):
    llm, params = LLM(tiny, num_gpu_blocks_override=32, block_size=4), SamplingParams(max_tokens=1)
    num_cached = []
    for salt in ("red", "red", "blue", None):
        assert list(llm.stream("one prompt for all of them", params, cache_salt=salt))
        num_cached.append(llm.manager.num_cached_free_blocks)
    once = num_cached[0]
    assert once > 0 and num_cached == [once, once, 2 * once, 3 * once]
    with pytest.raises(TypeError, match="cache_salt must be a string"):
        llm.stream("one prompt", params, cache_salt=5)


def test_a_reset_of_the_cache_may_be_cut_short_at_any_point(tiny):
    """Else a block that had left one queue and not come into the other was lost to all."""
    llm = LLM(tiny, num_gpu_blocks_override=4, block_size=8, check_every_step=True)
    params, at, num_cut = SamplingParams(max_tokens=1, ignore_eos=True), 0, 0
    while True:
        [output] = llm.generate([list(range(17))], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 1 and llm.manager.num_cached_free_blocks == 2
        try:
            with AtBytecode(["minikv/kv_cache"], at):
                assert llm.reset_prefix_cache()
        except KeyboardInterrupt:
            num_cut += 1
        else:
            break
        llm.manager.check()
        assert llm.manager.num_free_blocks == 4
        at += 3
    assert num_cut > 20


@pytest.mark.parametrize("shared", ["kv_cache_manager", "scheduler"])
def test_a_second_llm_over_the_same_books_has_the_same_answers(tiny, shared):
    """It found the first one's blocks, and read its own pool, in which they never were."""
    manager = manager_of(32)
    part = {shared: manager if shared == "kv_cache_manager" else Scheduler(manager)}
    prompt, params = list(range(40, 57)), SamplingParams(max_tokens=6, ignore_eos=True)
    answers, num_cached = [], []
    for _ in range(2):
        llm = LLM(tiny, **part)
        for _ in range(2):
            [output] = llm.generate([prompt], params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
            num_cached.append(output.num_cached_tokens)
    assert answers == [answers[0]] * 4 and num_cached == [0, 16, 0, 16]
