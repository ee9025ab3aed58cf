"""Six prompts, one after the other, and what each finds of those before it: on block keys, or on a
tree of tokens. A run is a function of its prompts and a block size; minikv.viz.sharing draws it.
"""

from dataclasses import dataclass

from minikv.kv_cache.base import cdiv
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.request import Request, require_int

MAX_PROMPTS = 12


@dataclass(frozen=True)
class Piece:
    """Tokens start to end of a prompt that lie together. owner: the prompt that computed them, by
    its place in the list. holders: all prompts that have them."""

    start: int
    end: int
    owner: int
    holders: tuple


@dataclass(frozen=True)
class PromptsResult:
    """block_size: tokens of a block; None for a tree of tokens. num_tokens, num_found: of each
    prompt; the last token is always run. pieces: of each prompt, in order; a piece is the same
    object in all prompts that share it."""

    block_size: int | None
    num_tokens: tuple
    num_found: tuple
    pieces: tuple


def prompts_run(prompts, block_size=4) -> PromptsResult:
    """Each prompt runs alone, to its last token, and ends; the pool is large enough to keep all.

    prompts: lists of token ids; an empty one is passed over and finds nothing. Raises ValueError
    for none, or more than 12.
    """
    prompts = _checked(prompts)
    require_int("block_size", block_size, at_least=1)
    num_blocks = sum(cdiv(len(ids), block_size) for ids in prompts)
    manager = PrefixCachingKVCacheManager(max(1, num_blocks), block_size)
    found, tables, owners = [], [], {}
    for place, ids in enumerate(prompts):
        if not ids:
            found.append(0)
            tables.append([])
            continue
        request = Request(f"prompt {place}", ids, max_tokens=1)
        hit = manager.get_num_cached_tokens(request)
        more = {"num_cached_tokens": hit} if hit else {}
        tables.append(list(manager.allocate_slots(request, len(ids) - hit, **more)))
        request.num_computed_tokens = len(ids)
        manager.cache_blocks(request)
        manager.free(request)
        found.append(hit)
        for block_id in tables[-1][hit // block_size :]:
            owners[block_id] = place
    holders = {b: tuple(i for i, table in enumerate(tables) if b in table) for b in owners}
    made, pieces = {}, []
    for ids, table in zip(prompts, tables, strict=True):
        pieces.append([])
        for i, block_id in enumerate(table):
            ends = i * block_size, min(len(ids), (i + 1) * block_size)
            made.setdefault(block_id, Piece(*ends, owners[block_id], holders[block_id]))
            pieces[-1].append(made[block_id])
    return _result(block_size, prompts, found, pieces)


def tree_run(prompts) -> PromptsResult:
    """The same on a tree of tokens: prompts part where their first tokens differ. Its pieces are
    the nodes as they stand after the last prompt."""
    prompts = _checked(prompts)
    found = [
        max((_common(ids, earlier, len(ids) - 1) for earlier in prompts[:i]), default=0)
        for i, ids in enumerate(prompts)
    ]
    made, pieces = {}, []
    for ids in prompts:
        pieces.append([])
        with_it = [[j for j, o in enumerate(prompts) if o[: n + 1] == ids[: n + 1]]
                   for n in range(len(ids))]  # fmt: skip
        start = 0
        for n in range(1, len(ids) + 1):
            if n == len(ids) or with_it[n] != with_it[start]:
                holders = tuple(with_it[start])
                piece = Piece(start, n, holders[0], holders)
                pieces[-1].append(made.setdefault(piece, piece))
                start = n
    return _result(None, prompts, found, pieces)


def _common(ids, other, at_most):
    pairs = zip(ids[: max(0, at_most)], other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b),
                min(max(0, at_most), len(other)))  # fmt: skip


def _checked(prompts):
    prompts = [list(ids) for ids in prompts]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"{len(prompts)} prompts: there must be from 1 to {MAX_PROMPTS}")
    return prompts


def _result(block_size, prompts, found, pieces):
    lengths = tuple(len(ids) for ids in prompts)
    return PromptsResult(block_size, lengths, tuple(found), tuple(map(tuple, pieces)))
