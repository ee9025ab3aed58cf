"""Random steps of attention, and what plain attention in double precision makes of them."""

import math
import random

import torch

from minikv.model.backends import AttentionMetadata

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the norm of a request's output
SEEDS = 48

PER_KV = (1, 2, 3, 4, 5, 6, 7, 8)
HEAD_DIMS = (16, 20, 32, 48, 64, 80, 96, 128, 256)
BLOCK_SIZES = (1, 2, 16, 64)
WINDOWS = (None, None, 1, 5, 40)
SOFTCAPS = (None, None, 2.0, 30.0)
KINDS = ("decodes", "chunks", "prefill", "mixed", "static prefill", "static decode")


class Batch:
    """A step of random requests. Every property takes its turn, so that SEEDS seeds have each.

    lengths: given new tokens and slots written of each request; there is no padding then.
    given: values for some of block_size, num_kv_heads, per_kv, head_dim, window, softcap, scaling.
    """

    def __init__(self, seed, dtype, poison, lengths=None, **given):
        self.rnd, self.dtype = random.Random(seed), dtype
        generator = torch.Generator().manual_seed(seed)
        self.kind, self.block_size = KINDS[seed % 6], BLOCK_SIZES[seed // 2 % 4]
        self.num_kv_heads, self.per_kv = self.rnd.choice((1, 2, 3)), PER_KV[seed % 8]
        self.head_dim = HEAD_DIMS[seed % 9]
        self.window, self.softcap = WINDOWS[seed // 3 % 5], SOFTCAPS[seed // 5 % 4]
        self.scaling = self.rnd.choice((0.5, 1.0, 2.0)) * self.head_dim**-0.5
        vars(self).update(given)

        self.query_lens, self.seq_lens, self.padding = self._lengths()
        if lengths is not None:
            self.query_lens, self.seq_lens = lengths
            self.padding = [0] * len(self.seq_lens)
        self.tables, num_blocks = self._tables()
        shape = (2, num_blocks + 1, self.num_kv_heads, self.block_size, self.head_dim)
        content = torch.randn(shape, generator=generator).to(dtype)
        self.pool = torch.full(shape, poison, dtype=dtype)
        for table, seq_len in zip(self.tables, self.seq_lens, strict=True):
            for place in range(seq_len):
                slot = (slice(None), table[place // self.block_size], slice(None))
                slot += (place % self.block_size,)
                self.pool[slot] = content[slot]
        num_tokens, num_heads = sum(self.query_lens), self.num_kv_heads * self.per_kv
        # As transformers hands it over: heads and tokens in either order in memory.
        size = (num_heads, num_tokens) if self.rnd.random() < 0.5 else (num_tokens, num_heads)
        self.query = torch.randn(*size, self.head_dim, generator=generator).to(dtype)
        if size[0] == num_heads:
            self.query = self.query.transpose(0, 1)

    def _lengths(self):
        """New tokens, slots written, and slots of padding of each request."""
        rnd, n = self.rnd, self.rnd.randint(1, 6)
        if self.kind.startswith("static"):
            num_slots = rnd.randint(2, 90)
            padding = [0, *(rnd.randint(0, num_slots - 1) for _ in range(n - 1))]
            query_len = 1 if self.kind == "static decode" else num_slots
            if query_len == 1:
                num_slots += rnd.randint(1, 30)
            return [query_len] * n, [num_slots] * n, padding
        query_lens, contexts = [], []
        for _ in range(n):
            kind = rnd.choice(KINDS[:3]) if self.kind == "mixed" else self.kind
            query_lens.append(1 if kind == "decodes" else rnd.randint(2, 70))
            contexts.append(0 if kind == "prefill" else rnd.randint(0, 150))
        return query_lens, [c + q for c, q in zip(contexts, query_lens, strict=True)], [0] * n

    def _tables(self):
        """Scattered blocks; a request may begin with the full blocks of the one before it."""
        counts = [-(-seq_len // self.block_size) for seq_len in self.seq_lens]
        num_blocks = sum(counts) + 3
        free = self.rnd.sample(range(num_blocks), num_blocks)
        tables = []
        for i, count in enumerate(counts):
            shared = 0
            if i and self.rnd.random() < 0.5:
                most = min(self.seq_lens[i - 1], self.seq_lens[i]) // self.block_size
                shared = self.rnd.randint(0, most)
            head = tables[-1][:shared] if shared else []
            tables.append(head + [free.pop() for _ in range(count - shared)])
        return tables, num_blocks

    def metadata(self):
        def int32(numbers):
            return torch.tensor(numbers, dtype=torch.int32)

        width, last = max(map(len, self.tables)), self.pool.shape[1] - 1
        starts = [sum(self.query_lens[:i]) for i in range(len(self.query_lens) + 1)]
        return AttentionMetadata(
            block_tables=int32([t + [last] * (width - len(t)) for t in self.tables]),
            query_start_loc=int32(starts),
            seq_lens=int32(self.seq_lens),
            first_visible=int32(self.padding) if any(self.padding) else None,
            max_query_len=max(self.query_lens),
            max_seq_len=max(self.seq_lens),
        )

    def expected(self):
        """[T, num_query_heads, head_dim] in float64: all scores at once, one request at a time."""
        outputs, row = [], 0
        for i, (query_len, seq_len) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            written = self.pool[:, self.tables[i]].double()  # [2, blocks, kv_heads, B, head_dim]
            written = written.transpose(1, 2).flatten(2, 3)[:, :, :seq_len]
            keys, values = written.repeat_interleave(self.per_kv, 1)
            query = self.query[row : row + query_len].double()
            scores = torch.einsum("qhd,hnd->hqn", query, keys) * self.scaling
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            position = torch.arange(seq_len - query_len, seq_len)[:, None]
            slot = torch.arange(seq_len)
            visible = (slot <= position) & (slot >= self.padding[i])
            if self.window is not None:
                visible &= slot > position - self.window
            visible |= slot == position  # a padding query sees itself
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            outputs.append(torch.einsum("hqn,hnd->qhd", weights, values))
            row += query_len
        return outputs

    def errors(self, attend, device="cpu", **options):
        """Of each request: ||got - expected|| / ||expected||; infinite where NaN came out (`max`
        would pass over a NaN)."""
        metadata = self.metadata()
        for name in ("block_tables", "query_start_loc", "seq_lens", "first_visible"):
            if (tensor := getattr(metadata, name)) is not None:
                setattr(metadata, name, tensor.to(device))
        got = attend(
            self.query.to(device), self.pool.to(device), metadata,
            scaling=self.scaling, window=self.window, softcap=self.softcap, **options,
        ).cpu()  # fmt: skip
        assert (got.shape, got.dtype) == (self.query.shape, self.dtype)
        expected = self.expected()
        return [
            float((rows.double() - want).norm() / want.norm())
            if rows.isfinite().all()
            else math.inf
            for rows, want in zip(got.split(self.query_lens), expected, strict=True)
        ]
