"""Six prompts, one after the other, and what each finds of those before it. A run is a function of
its prompts, a block size and a manager; minikv.viz.sharing and minikv.viz.prompts draw it.
"""

from dataclasses import dataclass
from itertools import groupby

from minikv.kv_cache.base import cdiv
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.request import Request, require_int

MAX_PROMPTS = 12


@dataclass(frozen=True)
class Piece:
    """Tokens start to end of a prompt. owner: the prompt that computed them, by its place in the
    list. holders: all prompts whose table has their block."""

    block_id: int
    start: int
    end: int
    owner: int
    holders: tuple


@dataclass(frozen=True)
class PromptsResult:
    """num_tokens, num_found: of each prompt. pieces: of each prompt, in order; where prompts share
    a piece, it is the same in both. A piece is a block; with blocks of one token, a run of them
    with the same holders: a node of a tree."""

    block_size: int
    num_tokens: tuple
    num_found: tuple
    pieces: tuple


def prompts_run(prompts, block_size=4, of=PrefixCachingKVCacheManager) -> PromptsResult:
    """Each prompt runs alone, to its last token, and ends; the pool is large enough to keep all.

    prompts: lists of token ids; an empty one is passed over. of: the class of the manager. Raises
    ValueError for no prompt, or more than 12.
    """
    prompts = [list(ids) for ids in prompts]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"{len(prompts)} prompts: there must be from 1 to {MAX_PROMPTS}")
    require_int("block_size", block_size, at_least=1)
    num_blocks = sum(cdiv(len(ids), block_size) for ids in prompts)
    manager, found, tables = of(max(1, num_blocks), block_size), [], []
    for i, ids in enumerate(prompts):
        num_found, table = _serve(manager, Request(f"{i}", ids, max_tokens=1)) if ids else (0, [])
        found.append(num_found)
        tables.append(table)
    return PromptsResult(
        block_size,
        tuple(map(len, prompts)),
        tuple(found),
        tuple(_pieces(ids, table, tables, block_size)
              for ids, table in zip(prompts, tables, strict=True)),
    )  # fmt: skip


def _serve(manager, request):
    """(tokens found, the table) of a request that computes its prompt in one step and ends."""
    num_found = manager.get_num_cached_tokens(request)
    hit = {"num_cached_tokens": num_found} if num_found else {}
    manager.allocate_slots(request, request.num_prompt_tokens - num_found, **hit)
    manager.copies()
    request.num_computed_tokens = request.num_prompt_tokens
    manager.cache_blocks(request)
    table = list(manager.tables[request.request_id])
    request.finish_reason = "length"
    manager.free(request)
    return num_found, table


def _pieces(ids, table, tables, block_size):
    blocks = []
    for place, block_id in enumerate(table):
        holders = tuple(i for i, other in enumerate(tables) if block_id in other)
        end = min(len(ids), (place + 1) * block_size)
        blocks.append(Piece(block_id, place * block_size, end, holders[0], holders))
    if block_size > 1:
        return tuple(blocks)
    nodes = []
    for holders, run in groupby(blocks, lambda block: block.holders):
        run = list(run)
        nodes.append(Piece(run[0].block_id, run[0].start, run[-1].end, holders[0], holders))
    return tuple(nodes)
