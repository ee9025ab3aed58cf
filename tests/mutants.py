"""One-line faults in what hands out blocks and schedules: does anything notice?

A test that no fault can fail proves nothing, so the fuzz of test_fuzz.py is tested here as code is
(mutation testing: DeMillo, Lipton, Sayward, Computer 1978). TARGETS names functions. From each,
mechanically and with nothing left out: every comparison turned (to its negation, and to the
neighbour that differs only at the boundary), every condition without one negated, every whole
number one more and one less, True for False, every statement deleted. PLANTED adds faults that no
such rule would find. Each runs in place of the original, in this process, against random traces.

    python tests/mutants.py                 every mutant; prints those that survive
    python tests/mutants.py PART            only those with PART in their id
    python tests/mutants.py PART --tests    also says which of the other tests kill them
"""

import ast
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

import test_fuzz
from managers import MANAGERS

from minikv.scheduler import Scheduler, whole
from minikv.static_batching import StaticScheduler

MAX_TRACES = 2_000
LOOP_LIMIT = 50_000  # passes through the targets' loops in one trace; the longest needs 5,000

PAGED, CONTIGUOUS = "minikv.kv_cache.paged", "minikv.kv_cache.contiguous"
BASE, SCHEDULER, CORE = "minikv.kv_cache.base", "minikv.scheduler", "minikv.core"
STATIC = "minikv.static_batching"
PREFIX, CACHE = "minikv.kv_cache.prefix", "minikv.kv_cache.block_cache"
TARGETS = {  # function -> its module
    "FreeKVCacheBlockQueue.popleft_n": PAGED,
    "FreeKVCacheBlockQueue.append_n": PAGED,
    "BlockPool.get_new_blocks": PAGED,
    "BlockPool.touch": PAGED,
    "BlockPool.free_blocks": PAGED,
    "PagedKVCacheManager.num_free_blocks": PAGED,
    "PagedKVCacheManager.allocate_slots": PAGED,
    "PagedKVCacheManager.free": PAGED,
    "PagedKVCacheManager.fork": PAGED,
    "PagedKVCacheManager._forked_tail": PAGED,
    "PagedKVCacheManager._make_own": PAGED,
    "PagedKVCacheManager.copies": PAGED,
    "ContiguousKVCacheManager.num_blocks_for": CONTIGUOUS,
    "ContiguousKVCacheManager.allocate_slots": CONTIGUOUS,
    "ContiguousKVCacheManager._refuse": CONTIGUOUS,
    "ContiguousKVCacheManager._place": CONTIGUOUS,
    "ContiguousKVCacheManager._moves": CONTIGUOUS,
    "ContiguousKVCacheManager.free": CONTIGUOUS,
    "ContiguousKVCacheManager.copies": CONTIGUOUS,
    "KVCacheManager.set_table": BASE,
    "KVCacheManager.drop_table": BASE,
    "Scheduler.schedule": SCHEDULER,
    "Scheduler._admit": SCHEDULER,
    "Scheduler._preempt_last": SCHEDULER,
    "Scheduler._check_progress": SCHEDULER,
    "Scheduler.update": SCHEDULER,
    "Scheduler._fan_out": SCHEDULER,
    "Scheduler.finish": SCHEDULER,
    "Scheduler.recover": SCHEDULER,
    "Scheduler._mark": SCHEDULER,
    "Scheduler._forget": SCHEDULER,
    "StaticScheduler.schedule": STATIC,
    "StaticScheduler._form_batch": STATIC,
    "StaticScheduler.update": STATIC,
    "StaticScheduler._fan_out": STATIC,
    "StaticScheduler.finish": STATIC,
    "StaticScheduler._leave": STATIC,
    "StaticScheduler.recover": STATIC,
    "EngineCore.step": CORE,
    "PrefixCachingKVCacheManager._extend": PREFIX,
    "PrefixCachingKVCacheManager.find_longest_cache_hit": PREFIX,
    "PrefixCachingKVCacheManager.get_num_cached_tokens": PREFIX,
    "PrefixCachingKVCacheManager._find_again": PREFIX,
    "PrefixCachingKVCacheManager._admit_with_hit": PREFIX,
    "PrefixCachingKVCacheManager.cache_blocks": PREFIX,
    "PrefixCachingKVCacheManager._make_own": PREFIX,
    "PrefixCachingKVCacheManager.free": PREFIX,
    "CachingBlockPool.get_new_blocks": CACHE,
    "CachingBlockPool.touch": CACHE,
    "CachingBlockPool.queue_free": CACHE,
    "CachingBlockPool.publish": CACHE,
    "CachingBlockPool.unpublish": CACHE,
}
PLANTED_ONLY = (PREFIX, CACHE)  # nothing is generated from the functions of these modules yet
UNIT_TESTS = {  # the tests of a module that need no more than minikv's accounting
    PAGED: ("test_paged", "test_prefix"),
    PREFIX: ("test_prefix",),
    CACHE: ("test_prefix",),
    CONTIGUOUS: ("test_contiguous", "test_relocation"),
    BASE: ("test_contiguous", "test_relocation", "test_paged"),
    SCHEDULER: ("test_scheduler", "test_core", "test_interrupts"),
    CORE: ("test_core", "test_relocation", "test_interrupts"),
    STATIC: ("test_static", "test_interrupts"),
}
MANAGERS_OF = {  # those that run the code of the module; the others cannot tell
    PAGED: [name for name in MANAGERS if name.startswith("paged")],
    PREFIX: ["prefix", "prefix-collisions"],
    CACHE: ["prefix", "prefix-collisions"],
    CONTIGUOUS: [name for name in MANAGERS if name.startswith("contiguous")],
}


@dataclass(frozen=True)
class Mutant:
    """id: function: what was changed. It names text, not lines, so that it outlives edits
    elsewhere. tree: the mutated function's definition."""

    id: str
    target: str
    tree: ast.FunctionDef


class Planted(NamedTuple):
    """A fault by hand: `old`, which stands once in the target's source, becomes `new`."""

    name: str
    target: str
    old: str
    new: str


PLANTED = [
    # Paged: the table, the order, the counts.
    Planted("stale table", "PagedKVCacheManager.allocate_slots",
            "table += [block.block_id for block in blocks]",
            "table = table + [block.block_id for block in blocks]"),
    Planted("blocks in front", "PagedKVCacheManager.allocate_slots",
            "table += [", "table[:0] = ["),
    Planted("new blocks in the wrong order", "PagedKVCacheManager.allocate_slots",
            "for block in blocks]", "for block in blocks[::-1]]"),
    Planted("rounds down", "PagedKVCacheManager.allocate_slots",
            "cdiv(num_tokens, self.block_size)", "num_tokens // self.block_size"),
    Planted("counts the sampled token", "PagedKVCacheManager.allocate_slots",
            "num_tokens = request.num_computed_tokens + num_new_tokens",
            "num_tokens = request.num_computed_tokens + num_new_tokens + 1"),
    Planted("allocates at num_tokens % B == 0", "PagedKVCacheManager.allocate_slots",
            "if num_tokens <= num_slots and must_fit_tokens <= num_slots and not "
            "self._forked_tails:",
            "if table and request.num_tokens % self.block_size:"),
    Planted("refusal after a change", "PagedKVCacheManager.allocate_slots",
            "        if num_needed +",
            "        table = table or self.set_table(request, [])\n"
            "        if num_needed +"),
    Planted("freed head first", "PagedKVCacheManager.free", "blocks[::-1]", "blocks"),
    Planted("double free", "PagedKVCacheManager.free", "blocks[::-1]",
            "blocks[::-1] * 2"),
    Planted("freed, but still in the table", "PagedKVCacheManager.free",
            "self.drop_table(request)", "self.tables.get(request.request_id, ())"),
    Planted("the last block leaks", "PagedKVCacheManager.free",
            "blocks[::-1]", "blocks[:-1][::-1]"),
    Planted("freed at the first release though shared", "BlockPool.free_blocks",
            "block.ref_cnt -= 1", "block.ref_cnt = 0"),
    Planted("free while others hold it", "BlockPool.free_blocks",
            "            if block.ref_cnt == 0:\n                unheld.append(block)",
            "            unheld.append(block)"),
    Planted("taken without being unlinked", "BlockPool.get_new_blocks",
            "self.free_block_queue.popleft_n(num_blocks)",
            "list(self.free_block_queue.get_all_free_blocks()[:num_blocks])"),
    Planted("last in, first out", "FreeKVCacheBlockQueue.append_n",
            "for block in blocks:", "for block in list(blocks)[::-1]:"),
    # Forks, and who writes to a tail that others hold.
    Planted("a shared tail is written to", "PagedKVCacheManager._make_own",
            "if tail.ref_cnt > 1:", "if False:"),
    Planted("the tail's copy is not made", "PagedKVCacheManager._make_own",
            "self._origins[own.block_id] =", "nobody ="),
    Planted("the copied tail keeps its holder", "PagedKVCacheManager._make_own",
            "self.block_pool.free_blocks([tail])", "pass"),
    Planted("the copy is of itself", "PagedKVCacheManager._make_own",
            "self._origins.get(tail.block_id, tail.block_id)", "own.block_id"),
    Planted("a fork counts no holder", "PagedKVCacheManager.fork",
            "self.block_pool.touch(", "list("),
    Planted("a fork takes all of its parent's blocks", "PagedKVCacheManager.fork",
            "of_parent[: cdiv(child.num_computed_tokens, self.block_size)]", "of_parent"),
    Planted("a fork leaves out the tail", "PagedKVCacheManager.fork",
            "cdiv(child.num_computed_tokens, self.block_size)",
            "child.num_computed_tokens // self.block_size"),
    Planted("a fork's tail is not noted", "PagedKVCacheManager.fork",
            "self._forked_tails.add(table[-1])", "pass"),
    Planted("a copy into a block that was left", "PagedKVCacheManager.free",
            "del self._origins[block_id]", "pass"),
    # The prefix cache: keys, hits, publications.
    Planted("a key of its own tokens alone", "PrefixCachingKVCacheManager._extend",
            "parent = hash_fn(parent + content)", "parent = hash_fn(content)"),
    Planted("no salt", "PrefixCachingKVCacheManager._extend",
            "salt = None if keys else request.cache_salt", "salt = None"),
    Planted("tokens are not compared", "PrefixCachingKVCacheManager.find_longest_cache_hit",
            " or block.key != key", ""),
    Planted("parents are not compared", "PrefixCachingKVCacheManager.find_longest_cache_hit",
            "block.parent != parent or ", ""),
    Planted("goes on behind a gap", "PrefixCachingKVCacheManager.find_longest_cache_hit",
            "                break", "                continue"),
    Planted("nothing left to run", "PrefixCachingKVCacheManager.get_num_cached_tokens",
            "(request.num_tokens - 1)", "request.num_tokens"),
    Planted("an answer outlives an eviction", "PrefixCachingKVCacheManager._find_again",
            "num_unpublished == self.block_pool.num_unpublished", "True"),
    Planted("another's answer", "PrefixCachingKVCacheManager._find_again",
            "last_request is request and ", ""),
    Planted("a hit counts no holder", "PrefixCachingKVCacheManager._admit_with_hit",
            "self.block_pool.touch(hit)", "pass"),
    Planted("idle hit blocks are counted as free", "PrefixCachingKVCacheManager._admit_with_hit",
            "self.num_obtainable_blocks(request, hit)", "self.num_obtainable_blocks(request)"),
    Planted("a tail that is not full is published", "PrefixCachingKVCacheManager.cache_blocks",
            "num_full_blocks = request.num_computed_tokens // self.block_size",
            "num_full_blocks = min(len(self.tables[request.request_id]),\n"
            "            -(-request.num_computed_tokens // self.block_size),\n"
            "            request.num_tokens // self.block_size)"),
    Planted("a block that is not computed is published", "PrefixCachingKVCacheManager.cache_blocks",
            "request.num_computed_tokens // self.block_size",
            "request.num_tokens // self.block_size"),
    Planted("another's tokens under the same key stay", "PrefixCachingKVCacheManager.cache_blocks",
            "if block is None or block.parent != parent or block.key != key:",
            "if block is None:"),
    Planted("a stale parent is believed", "PrefixCachingKVCacheManager.cache_blocks",
            "            num_done = 0  # another's", "            pass  # another's"),
    Planted("a published tail is written to", "PrefixCachingKVCacheManager._make_own",
            "            self.block_pool.unpublish(tail)", "            pass"),
    Planted("published blocks are counted for who left", "PrefixCachingKVCacheManager.free",
            "self._published.pop(request.request_id, None)", "pass"),
    Planted("evicted, but still found", "CachingBlockPool.get_new_blocks",
            "self.forget(evicted)", "pass"),
    Planted("evicts before it takes what nobody can find", "CachingBlockPool.get_new_blocks",
            "if num_blocks <= self.free_block_queue.num_free_blocks:",
            "if num_blocks > self.cached_free.num_free_blocks and "
            "num_blocks <= self.free_block_queue.num_free_blocks:"),
    Planted("found, but still in the queue", "CachingBlockPool.touch",
            "if block.ref_cnt == 0:", "if block.ref_cnt == 0 and not block.key:"),
    Planted("freed means forgotten", "CachingBlockPool.queue_free",
            "without_key = [block for block in blocks if block.key is None]",
            "[self.cached_blocks.pop(block.key[0]) for block in blocks if block.key]\n"
            "        for block in blocks:\n            block.key = None\n"
            "        without_key = list(blocks)"),
    Planted("heads go before tails", "CachingBlockPool.queue_free",
            "self.cached_free.append_n(blocks)", "self.cached_free.append_n(blocks[::-1])"),
    Planted("a publication's number is used again", "CachingBlockPool.publish",
            "self.num_publications += 1", "self.num_publications = 1"),
    Planted("unpublished, but waits among the cached", "CachingBlockPool.unpublish",
            "            self.cached_free.remove(block)", "            pass"),
    # Contiguous: moves and their copies.
    Planted("copy dropped", "ContiguousKVCacheManager.copies",
            "return copies", "return copies[1:]"),
    Planted("copies never drained", "ContiguousKVCacheManager.copies",
            "self._origins.clear()", "pass"),
    Planted("copies drained one by one", "ContiguousKVCacheManager.copies",
            "self._origins.clear()", "self._origins.popitem() if self._origins else None"),
    Planted("source and destination exchanged", "ContiguousKVCacheManager.copies",
            "BlockCopy(src, dst, num_blocks)", "BlockCopy(dst, src, num_blocks)"),
    Planted("chain of copies not composed", "ContiguousKVCacheManager._moves",
            "self._origins.setdefault(request.request_id, (table.start, num_blocks))",
            "self._origins[request.request_id] = (table.start, num_blocks)"),
    Planted("only full blocks are copied", "ContiguousKVCacheManager._moves",
            "cdiv(request.num_computed_tokens, self.block_size)",
            "request.num_computed_tokens // self.block_size"),
    Planted("all that is held is copied", "ContiguousKVCacheManager._moves",
            "cdiv(request.num_computed_tokens, self.block_size)", "len(table)"),
    Planted("put-back forgotten", "ContiguousKVCacheManager._place",
            "allocator.allocate_at(table.start, num_held_blocks)", "pass"),
    Planted("moved without its old room", "ContiguousKVCacheManager._place",
            "allocator.free(table.start, num_held_blocks)",
            "allocator.free(table.start, num_held_blocks)\n"
            "        allocator.allocate_at(table.start, 1)"),
    Planted("rounding leaks", "ContiguousKVCacheManager.free",
            "len(table)", "self._asked[request.request_id]"),
    Planted("copies into a place that was left", "ContiguousKVCacheManager.free",
            "self._origins.pop(request.request_id, None)", "pass"),
    # Scheduler.
    Planted("preempts the first", "Scheduler._preempt_last",
            "self.running.pop()", "self.running.pop(0)"),
    Planted("back to the tail of the queue", "Scheduler._preempt_last",
            "self.waiting.appendleft(victim)", "self.waiting.append(victim)"),
    Planted("preempted, but not freed", "Scheduler._preempt_last",
            "self.manager.free(victim)", "pass"),
    Planted("freed after its count is reset", "Scheduler._preempt_last",
            "        self.manager.free(victim)\n        victim.num_computed_tokens = 0",
            "        victim.num_computed_tokens = 0\n        self.manager.free(victim)"),
    Planted("preempted, and goes on where it was", "Scheduler._preempt_last",
            "victim.num_computed_tokens = 0", "pass"),
    Planted("admits in a step that preempted", "Scheduler.schedule",
            "if not preempted:", "if True:"),
    Planted("budget not decreased", "Scheduler.schedule", "budget -= num_new_tokens", "pass"),
    Planted("only the newest token", "Scheduler.schedule",
            "request.num_tokens - request.num_computed_tokens", "1"),
    Planted("the victim is scheduled as well", "Scheduler.schedule",
            "                if victim is request:\n                    break\n", ""),
    Planted("who gets no room goes to the tail", "Scheduler._admit",
            "                break",
            "                self.waiting.rotate(-1)\n                break"),
    Planted("admits the last in line", "Scheduler._admit",
            "request, extra = self.waiting[0], {}",
            "self.waiting.rotate(1)\n            request, extra = self.waiting[0], {}"),
    Planted("the budget is each one's own", "Scheduler._admit",
            "budget -= num_new_tokens", "pass"),
    # The loop.
    Planted("copies drained before the schedule", "EngineCore.step",
            "        scheduled, _ = scheduler.schedule()\n",
            "        early = list(manager.copies())\n"
            "        manager_copies = manager.copies\n"
            "        scheduled, _ = scheduler.schedule()\n"
            "        manager_copies()\n"
            "        manager = type('Early', (), {'copies': lambda self: early})()\n"),
    Planted("copies after the writes", "EngineCore.step",
            "tokens = self.runner.run(scheduled, copies)",
            "tokens = self.runner.run(scheduled, [])\n        self.runner.run([], copies)"),
    # Ends, samples, and steps that are cut short.
    Planted("stops at the first that ends", "Scheduler.update",
            "            ended += self.finish(request, reason, now)",
            "            ended += self.finish(request, reason, now)\n            break"),
    Planted("errors at the end are swallowed", "Scheduler.update",
            "            ended += self.finish(request, reason, now)",
            "            with __import__('contextlib').suppress(Exception):\n"
            "                ended += self.finish(request, reason, now)"),
    Planted("static samples at the tail", "StaticScheduler._fan_out",
            "self.waiting.extendleft(reversed(alive))", "self.waiting.extend(alive)"),
    Planted("the manager is not reset", "Scheduler.recover",
            "            self.manager.reset()", "            pass"),
    Planted("whoever ran is lost", "Scheduler.recover",
            "self.running, self.waiting, self.admitted = [], deque(), []",
            "lost = self.running\n"
            "        self.running, self.waiting, self.admitted = [], deque(), []\n"
            "        [self.requests.pop(request.request_id) for request in lost]"),
    Planted("goes on where it was", "Scheduler.recover",
            "            request.recount()\n",
            "            before = request.num_computed_tokens\n            request.recount()\n"
            "            request.num_computed_tokens = before\n"),
    Planted("tokens go to others", "EngineCore.step",
            "scheduler.update(scheduled, tokens,", "scheduler.update(scheduled, tokens[::-1],"),
]  # fmt: skip


# -- making them ---------------------------------------------------------------------------------

NEGATION = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SIGN = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
BLOCKS = ("body", "orelse", "finalbody")


@functools.cache
def find(target):
    """(module, class, source text, definition) of a target."""
    module = importlib.import_module(TARGETS[target])
    class_name, name = target.split(".")
    source = inspect.getsource(module)
    owner = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    tree = next(
        node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    lines = source.splitlines()[tree.lineno - 1 : tree.end_lineno]
    return module, getattr(module, class_name), "\n".join(lines), tree


def mutants() -> dict[str, Mutant]:
    """All, by id, in the order of TARGETS and of the text; then the planted ones."""
    found = {}
    for target in (name for name, module in TARGETS.items() if module not in PLANTED_ONLY):
        for text, tree in _mutations(find(target)[-1]):
            _put(found, f"{target}: {text}", target, tree)
    for name, target, old, new in PLANTED:
        _, _, source, original = find(target)
        if source.count(old) != 1:
            raise LookupError(f"{name!r}: {old!r} stands {source.count(old)} times in {target}")
        (tree,) = ast.parse(textwrap.dedent(source.replace(old, new))).body
        tree.decorator_list = original.decorator_list
        _put(found, f"planted: {name}", target, tree)
    return found


def _put(found, mutant_id, target, tree):
    same = (f"{mutant_id} #{n}" for n in itertools.count(2))
    key = mutant_id if mutant_id not in found else next(each for each in same if each not in found)
    found[key] = Mutant(key, target, tree)


def _mutations(function):
    """(what was changed, the changed definition) for every single change."""
    parents = {
        child: parent for parent in ast.walk(function) for child in ast.iter_child_nodes(parent)
    }
    docstring = function.body[0] if ast.get_docstring(function) else None
    for index, node in enumerate(ast.walk(function)):

        def changed(change, index=index):
            tree = copy.deepcopy(function)
            change(next(itertools.islice(ast.walk(tree), index, None)))
            return tree

        if isinstance(node, ast.Compare):
            for i, op in enumerate(node.ops):
                for turned in (NEGATION, BOUNDARY):
                    if type(op) in turned:
                        new = turned[type(op)]
                        tree = changed(lambda n, i=i, new=new: n.ops.__setitem__(i, new()))
                        yield f"{_text(node)}: {SIGN[type(op)]} => {SIGN[new]}", tree
        if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            values = [not node.value]
            if type(node.value) is int:
                values = [node.value + 1, node.value - 1]
            for value in values:
                tree = changed(lambda n, value=value: setattr(n, "value", value))
                yield f"{_around(node, parents)}: {node.value} => {value}", tree
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            for path, test in _conditions(node.test, "test"):
                tree = changed(lambda n, path=path: _negate(n, path))
                yield f"{_text(test)}: negated", tree
        for field in BLOCKS:
            block = getattr(node, field, None)
            for i, statement in enumerate(block if isinstance(block, list) else ()):
                if statement is docstring or isinstance(statement, ast.Pass):
                    continue
                tree = changed(lambda n, f=field, i=i: getattr(n, f).__setitem__(i, ast.Pass()))
                yield f"without {_text(statement)}", tree


def _conditions(test, path):
    """The parts of a condition that are no comparison: (path to it, part)."""
    if isinstance(test, ast.BoolOp):
        for i, value in enumerate(test.values):
            yield from _conditions(value, f"{path}.{i}")
    elif not isinstance(test, ast.Compare):
        yield path, test


def _negate(node, path):
    """path: `test`, or `test.1` for the second part of an `and`."""
    *way, last = path.split(".")
    for step in way:
        node = getattr(node, step) if step == "test" else node.values[int(step)]
    old = node.test if last == "test" else node.values[int(last)]
    is_not = isinstance(old, ast.UnaryOp) and isinstance(old.op, ast.Not)
    new = old.operand if is_not else ast.UnaryOp(ast.Not(), old)
    if last == "test":
        node.test = new
    else:
        node.values[int(last)] = new


def _around(node, parents):
    """The nearest text around a constant that says where it stands."""
    parent = parents[node]
    if isinstance(parent, ast.arguments):
        positional = (parent.posonlyargs + parent.args)[-len(parent.defaults) :]
        names = [argument.arg for argument in positional * bool(parent.defaults)]
        names += [argument.arg for argument in parent.kwonlyargs]
        return f"{names[[*parent.defaults, *parent.kw_defaults].index(node)]}={node.value}"
    while isinstance(parent, ast.UnaryOp | ast.Slice | ast.keyword):
        parent = parents[parent]
    return _text(parent)


def _text(node, width=40):
    text = ast.unparse(node).splitlines()[0]
    return text if len(text) <= width else text[: width - 3] + "..."


# -- running them --------------------------------------------------------------------------------


class Endless(Exception):
    """A loop of the mutant goes round and round."""


class Ticks:
    """Counts passes through loops: a bound that depends on no clock."""

    def __init__(self):
        self.left = LOOP_LIMIT

    def __call__(self):
        self.left -= 1
        if self.left < 0:
            self.left = 0
            raise Endless(f"more than {LOOP_LIMIT} passes through loops")


TICKS = Ticks()


def build(target, tree):
    """The function of a definition, as it would stand in its class, with its loops counted."""
    module, cls, _, _ = find(target)
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.While | ast.For):
            node.body.insert(0, ast.parse("__tick__()").body[0])
    (make,) = ast.parse("def make(__class__, __tick__):\n    return None").body
    make.body = [tree, ast.parse(f"def f():\n    return {tree.name}").body[0].body[0]]
    code = compile(ast.fix_missing_locations(ast.Module([make], [])), f"<{target}>", "exec")
    names = {}
    exec(code, vars(module), names)
    function = names["make"](cls, TICKS)
    # EngineCore.step is made whole after its class, where no decorator shows it.
    is_whole = hasattr(vars(cls)[tree.name], "__wrapped__") and not tree.decorator_list
    return whole(function) if is_whole else function


_counted = {}  # the originals, their loops counted: a mutant may leave a ring for them to run in


@contextlib.contextmanager
def planted(mutant=None):
    """The targets' loops are counted, and the mutant stands in for its original."""
    if not _counted:
        _counted.update({target: build(target, find(target)[-1]) for target in TARGETS})
    functions = dict(_counted)
    if mutant is not None:
        functions[mutant.target] = build(mutant.target, mutant.tree)
    owners = {target: find(target)[1] for target in TARGETS}
    before = {target: vars(owners[target])[target.split(".")[1]] for target in TARGETS}
    try:
        for target, function in functions.items():
            setattr(owners[target], target.split(".")[1], function)
        TICKS.left = LOOP_LIMIT
        yield
    finally:
        for target, function in before.items():
            setattr(owners[target], target.split(".")[1], function)


def fuzz(mutant, max_traces=MAX_TRACES):
    """(number of traces until the first failure, its message); (None, "") for a survivor.

    Each manager that runs the code in turn; every fourth trace is one of static batches, and
    where the code is theirs every one.
    """
    is_static = mutant is not None and TARGETS[mutant.target] == STATIC
    names = MANAGERS_OF.get(TARGETS[mutant.target] if mutant else None, list(MANAGERS))
    totals = {}
    with planted(mutant):
        for i in range(max_traces):
            name, seed = names[i % len(names)], i // len(names)
            scheduler = StaticScheduler if is_static or seed % 4 == 3 else Scheduler
            TICKS.left = LOOP_LIMIT
            try:
                counts = test_fuzz.Trace(name, seed, scheduler).run()
            except Exception as error:
                return i + 1, f"{name}:{seed} {type(error).__name__}: {error}"
            if scheduler is Scheduler:
                test_fuzz.add_up(totals.setdefault(name, {}), counts)
        for name in totals if max_traces >= MAX_TRACES else ():
            try:
                test_fuzz.check_what_happened(name, totals[name])
            except AssertionError as error:
                return max_traces, f"{name}: {error}"
    return None, ""


def fails(mutant, test):
    """The message with which a test function fails on the mutant, over all its parameters; None
    if it passes."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    with planted(mutant):
        for arguments in _arguments(marks):
            TICKS.left = LOOP_LIMIT * 100
            try:
                test(**arguments)
            except BaseException as error:  # pytest.fail is no Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                return f"{type(error).__name__}: {error}"
    return None


def _arguments(marks):
    """The keyword arguments of each case of stacked parametrize marks."""
    columns = []
    for mark in marks:
        names, values = mark.args[:2]
        names = names.replace(",", " ").split() if isinstance(names, str) else list(names)
        rows = [
            getattr(value, "values", (value,) if len(names) == 1 else value) for value in values
        ]
        columns.append([dict(zip(names, row, strict=True)) for row in rows])
    for parts in itertools.product(*columns):
        yield {key: value for part in parts for key, value in part.items()}


def test_functions(module_names):
    """Tests that ask for nothing but parameters, as "module.name" -> function."""
    found = {}
    for module_name in module_names:
        module = importlib.import_module(module_name)
        for name, test in vars(module).items():
            if name.startswith("test_") and inspect.isfunction(test):
                with contextlib.suppress(TypeError):
                    marks = [m for m in getattr(test, "pytestmark", ()) if m.name == "parametrize"]
                    inspect.signature(test).bind(**next(_arguments(marks)))
                    found[f"{module_name}.{name}"] = test
    return found


def main(arguments):
    parts = [each for each in arguments if not each.startswith("--")]
    chosen = [m for key, m in mutants().items() if all(part in key for part in parts)]
    killed_at = []
    for mutant in chosen:
        num_traces, message = fuzz(mutant)
        if num_traces is not None:
            killed_at.append(num_traces)
            if "--all" in arguments:
                print(f"{num_traces:5} {mutant.id}\n      {message[:150]}")
            continue
        print(f" lives {mutant.id}", flush=True)
        tests = UNIT_TESTS[TARGETS[mutant.target]] if "--tests" in arguments else ()
        for name, test in test_functions(tests).items():
            why = fails(mutant, test)
            if why:
                print(f"       killed by {name}: {why.splitlines()[0][:100]}", flush=True)
                break
    late = sorted(killed_at)[-10:]
    print(f"{len(chosen)} mutants, {len(killed_at)} killed, the last ten at traces {late}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
