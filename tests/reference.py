"""What a model says by itself: transformers' own attention over its own dense cache.

Everything the engine computes is compared with this. Nothing here goes through minikv.
"""

import contextlib
from typing import NamedTuple

import torch

TOO_CLOSE = 1e-3  # logits nearer than this may swap places by rounding alone
MOST_STOPS = 0.01  # of all sequences


@contextlib.contextmanager
def own_attention(model, implementation="sdpa"):
    """Inside, the model attends in its own code, whoever has adopted it."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


class Answer(NamedTuple):
    """prompt, output: token ids. logits: [len(prompt) + len(output) - 1, vocab], one row for each
    token that was run: row p decides token p + 1."""

    prompt: list[int]
    output: list[int]
    logits: torch.Tensor

    @property
    def token_ids(self):
        return self.prompt + self.output

    @property
    def decisions(self):
        """[len(output), vocab]: row i decides output token i."""
        return self.logits[len(self.prompt) - 1 :]


@torch.inference_mode()
def greedy(model, prompt, max_tokens, *, implementation="sdpa", stop_token_ids=()):
    """The prompt in one pass, then token by token, over transformers' DynamicCache."""
    with own_attention(model, implementation):
        out = model(torch.tensor([prompt], device=model.device), use_cache=True)
        rows, output = [out.logits[0]], []
        while True:
            output.append(int(rows[-1][-1].argmax()))
            if len(output) == max_tokens or output[-1] in stop_token_ids:
                return Answer(list(prompt), output, torch.cat(rows))
            token = torch.tensor([output[-1:]], device=model.device)
            out = model(token, cache=out.cache, use_cache=True)
            rows.append(out.logits[0])


class Comparison:
    """Counts sequences that equal their reference, and those where rounding may decide.

    At a step where the reference's two largest logits lie within TOO_CLOSE either token is right,
    and what follows depends on it: the comparison of that sequence stops there.
    """

    def __init__(self):
        self.num_sequences = self.num_stopped = 0

    def check(self, got, answer, what=""):
        self.num_sequences += 1
        top = answer.decisions.topk(2).values
        close = (top[:, 0] - top[:, 1] < TOO_CLOSE).nonzero().flatten().tolist()
        end = close[0] if close else len(answer.output)
        assert got[:end] == answer.output[:end], f"{what}: differs from the dense cache"
        if end < len(answer.output):
            self.num_stopped += 1
        else:
            assert got == answer.output, f"{what}: goes on after the reference's end"

    def close(self):
        print(
            f"\n{self.num_sequences} sequences equal, {self.num_stopped} of them up to a near tie"
        )
        assert self.num_sequences > 0
        assert self.num_stopped <= MOST_STOPS * self.num_sequences, "too many near ties"
