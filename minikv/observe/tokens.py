"""Which token of a request lies in which slot of the pool, through its block table."""

from typing import NamedTuple

from minikv.observe.pool import LIVE

PAD = "pad"  # a slot that holds keys and values of padding
PAD_LABEL = "<pad>"


class Row(NamedTuple):
    """One request's computed tokens, in the order of its slots.

    labels: what to write on each. pads: whether it is padding. positions: what the model is told;
    None for padding. end: slots from this one on can never hold a token of the request.
    """

    labels: tuple
    pads: tuple
    positions: tuple
    end: int


class Cell(NamedTuple):
    """A token of a row, and the slot that holds its keys and values. kind: LIVE or PAD."""

    request_id: str
    column: int
    label: str
    kind: str
    slot: int


class Translation(NamedTuple):
    """Where the keys and values of the token at `position` are: in slot block_id * block_size +
    offset, with block_id = table[logical_block]."""

    position: int
    logical_block: int
    offset: int
    block_id: int
    slot: int


def rows_of(engine, text) -> dict:
    """{request_id: Row} of those requests with known tokens that hold a table, in the order of
    their admission. text: token id -> label. engine: anything with .manager."""
    rows = {}
    for request_id, request in engine.manager.requests.items():
        if request.token_ids is None:
            continue
        before, computed = request.num_pad_tokens, request.num_computed_tokens
        own = range(before, before + request.num_live_tokens)
        pads = tuple(i not in own for i in range(computed))
        labels = tuple(
            PAD_LABEL if pad else _short(text(token))
            for pad, token in zip(pads, request.token_ids, strict=False)
        )
        positions = tuple(None if pad else i - before for i, pad in enumerate(pads))
        end = before + request.max_live_tokens
        rows[request_id] = Row(labels, pads, positions, end)
    return rows


def cells_of(snap, rows) -> list[Cell]:
    """Every token of every row with its slot, through the tables of a PoolSnapshot."""
    size, cells = snap.block_size, []
    for request_id, row in rows.items():
        table = snap.tables[request_id]
        for column, (label, pad) in enumerate(zip(row.labels, row.pads, strict=True)):
            slot = table[column // size] * size + column % size
            cells.append(Cell(request_id, column, label, PAD if pad else LIVE, slot))
    return cells


def labels_of(engine, text) -> dict:
    """{request_id: labels of all its known tokens} of those that hold a table; the one sampled
    last, without keys and values yet, is among them. text: token id -> label. engine: anything
    with .manager."""
    return {
        request_id: tuple(text(token) for token in request.token_ids)
        for request_id, request in engine.manager.requests.items()
        if request.token_ids is not None
    }


def translate(snap, request_id, position) -> Translation:
    """Through the table of a PoolSnapshot. Raises ValueError for a position without a slot."""
    table, size = snap.tables[request_id], snap.block_size
    if not 0 <= position < len(table) * size:
        raise ValueError(
            f"position {position} of {request_id!r} has no slot: its {len(table)} blocks of "
            f"{size} hold positions 0 to {len(table) * size - 1}"
        )
    block, offset = divmod(position, size)
    return Translation(position, block, offset, table[block], table[block] * size + offset)


def _short(token):
    text = token.replace("\n", "↵").strip(" ") or "␣"
    return text if len(text) <= 8 else text[:7] + "…"
