"""One scheduled step on tensors: copies, then a forward pass over the packed tokens, then a
sampled token for each request.

The runner never accounts: it reads block tables after scheduling has ended, and trusts nothing
in them (a table that is too short, or names a block outside the pool, is an error, not a wrong
answer).
"""

import operator

import torch

from minikv.kv_cache.base import InvariantBroken
from minikv.model.attention import CURRENT_STEP, StepContext, new_pools
from minikv.model.backends import AttentionMetadata, Scratch, choose_backend, writer_of
from minikv.model.sampler import sample
from minikv.model.threads import new_threads


class ModelRunner:
    """model: a transformers decoder that calls minikv's attention (see `probe.adopt`).

    pools: per layer [2, num_blocks + 1, num_kv_heads, block_size, head_dim]; the last block pads
    short tables, and no manager knows of it.
    attention_backend: a name of `minikv.model.backends`, or such a function; None takes the best
        for the device.
    """

    def __init__(self, model, spec, manager, attention_backend=None):
        self.model, self.manager = model, manager
        self.num_blocks, self.block_size = manager.num_blocks, manager.block_size
        self.device = next(model.parameters()).device
        self.attention_backend, self.attend = choose_backend(
            self.device, model.dtype, attention_backend
        )
        self.write_kv = writer_of(self.attend)
        self.pools = new_pools(
            spec, self.num_blocks, self.block_size, device=self.device, dtype=model.dtype
        )
        self.num_kv_heads = spec.num_kv_heads
        self._heads = torch.arange(self.num_kv_heads)
        self._scratch = Scratch()
        self.threads = new_threads(self.device)
        self._unclean = []  # block tables of a forward pass whose logits nobody has looked at yet
        self.last_step = None  # its StepContext, for the probe and for figures

    @torch.inference_mode()
    def run(self, scheduled, copies, choose=None) -> list[int | None]:
        """choose(logits, requests): a token for each row, None where it is not finite; `sample`
        unless given."""
        if self._unclean:  # the last step was cut short
            self._clean(self._unclean)
        self._unclean = []
        if copies:
            self._copy(copies)
        if not scheduled:
            return []
        # Requests with one new token go first: gather attention takes them all as one group.
        order = sorted(range(len(scheduled)), key=lambda i: scheduled[i].num_new_tokens > 1)
        packed = [scheduled[i] for i in order]
        num_tokens = sum(entry.num_new_tokens for entry in packed)
        with self.threads.step(num_tokens):
            sampled = (choose or sample)(self.forward(packed), [e.request for e in packed])
        tokens = [None] * len(scheduled)
        for i, entry, token in zip(order, packed, sampled, strict=True):
            tokens[i] = token
            if token is None:
                self._clean([self.manager.tables[entry.request.request_id]])
        self._unclean = []
        return tokens

    def forward(self, packed):
        """Computes each entry's new tokens; returns the logits of its last: [entries, vocab]."""
        # A token's place among its request's slots is its position, unless padding precedes it.
        token_ids, places, padding, starts, ends, tables = [], [], [], [0], [], []
        for request, num_new_tokens in packed:
            if num_new_tokens < 1:
                raise InvariantBroken(f"{request} is scheduled with {num_new_tokens} new tokens")
            start, end = request.num_computed_tokens, request.num_computed_tokens + num_new_tokens
            tables.append(self._table(request, end))
            token_ids += request.token_ids[start:end]
            places += range(start, end)
            padding += [request.num_pad_tokens] * num_new_tokens
            starts.append(len(token_ids))
            ends.append(end)
        self._unclean = tables
        places = torch.tensor(places)
        positions = (places - torch.tensor(padding)).clamp_(min=0)
        self.last_step = step = StepContext(
            pools=self.pools,
            write_rows=self._write_rows(packed, tables, places).to(self.device),
            metadata=self._metadata(packed, tables, starts, ends),
            attend=self.attend,
            write_kv=self.write_kv,
        )
        before = CURRENT_STEP.set(step)
        try:
            out = self.model(
                input_ids=torch.tensor([token_ids], device=self.device),
                position_ids=positions[None].to(self.device),
                use_cache=False,
                step=step,
                logits_to_keep=torch.tensor(starts[1:], device=self.device) - 1,
            )
        finally:
            CURRENT_STEP.reset(before)
        return out.logits[0]

    def _table(self, request, end):
        """The block ids that hold positions 0 to end - 1, checked."""
        table = self.manager.tables.get(request.request_id, ())
        num_blocks = -(-end // self.block_size)
        try:
            block_ids = list(map(operator.index, table[:num_blocks]))
        except TypeError as error:
            raise InvariantBroken(
                f"the block table of request {request.request_id!r} is {table!r}, but a table "
                "lists whole numbers"
            ) from error
        if len(block_ids) < num_blocks:
            raise InvariantBroken(
                f"request {request.request_id!r} computes position {end - 1}, but its block table "
                f"has {len(table)} blocks, {len(table) * self.block_size} slots"
            )
        if min(block_ids) < 0 or max(block_ids) >= self.num_blocks:
            raise InvariantBroken(
                f"the block table of request {request.request_id!r} names blocks from "
                f"{min(block_ids)} to {max(block_ids)}, but the pool has 0 to "
                f"{self.num_blocks - 1}"
            )
        return block_ids

    def _write_rows(self, packed, tables, places):
        """[2 * T * kv_heads]: where the K of each new token goes in `pool.view(-1, head_dim)`,
        then where its V does, one half of the pool further on."""
        block_ids = [
            table[place // self.block_size]
            for (request, num_new_tokens), table in zip(packed, tables, strict=True)
            for place in range(
                request.num_computed_tokens, request.num_computed_tokens + num_new_tokens
            )
        ]
        by_head = torch.tensor(block_ids)[:, None] * self.num_kv_heads + self._heads
        rows = (by_head * self.block_size + (places % self.block_size)[:, None]).reshape(-1)
        half = (self.num_blocks + 1) * self.num_kv_heads * self.block_size
        return torch.cat([rows, rows + half])

    def _metadata(self, packed, tables, starts, ends):
        """starts: the first row of each entry, and the end; ends: its slots after this step."""
        max_blocks = max(map(len, tables))
        padded = [table + [self.num_blocks] * (max_blocks - len(table)) for table in tables]
        padding = [request.num_pad_tokens for request, _ in packed]

        def on_device(numbers):
            return torch.tensor(numbers, dtype=torch.int32).to(self.device)

        return AttentionMetadata(
            block_tables=on_device(padded),
            query_start_loc=on_device(starts),
            seq_lens=on_device(ends),
            first_visible=on_device(padding) if any(padding) else None,
            max_query_len=max(num_new_tokens for _, num_new_tokens in packed),
            max_seq_len=max(ends),
            scratch=self._scratch,
        )

    def _copy(self, copies):
        """In each layer, all sources are read before any destination is written."""
        kinds = sorted({copy.kind for copy in copies} - {"device"})
        if kinds:
            raise NotImplementedError(f"copies of kind {', '.join(kinds)}: there is no host pool")
        self._check_copies(copies)
        src = torch.cat([torch.arange(c.src, c.src + c.num_blocks) for c in copies])
        dst = torch.cat([torch.arange(c.dst, c.dst + c.num_blocks) for c in copies])
        src, dst = src.to(self.device), dst.to(self.device)
        for pool in self.pools:
            pool[:, dst] = pool[:, src]

    def _check_copies(self, copies):
        """A wrong index would wrap around, or write where nobody looks: no error, wrong answers."""
        written = set()
        for copy in copies:
            for start in (copy.src, copy.dst):
                if not (start >= 0 and 1 <= copy.num_blocks <= self.num_blocks - start):
                    raise InvariantBroken(
                        f"{copy} leaves the pool, whose blocks are 0 to {self.num_blocks - 1}"
                    )
            blocks = range(copy.dst, copy.dst + copy.num_blocks)
            if not written.isdisjoint(blocks):
                raise InvariantBroken(f"{copy} writes blocks that an earlier copy writes, too")
            written.update(blocks)

    def _clean(self, tables):
        """Whoever gets these blocks next must find numbers in them: a masked score still
        multiplies its value by 0, and 0 x NaN is NaN. Shared blocks may hold good content, so
        only what is not finite is zeroed."""
        block_ids = torch.tensor(sorted({b for table in tables for b in table}))
        block_ids = block_ids.to(self.device)
        for pool in self.pools:
            pool[:, block_ids] = pool[:, block_ids].nan_to_num_(0.0, 0.0, 0.0)
