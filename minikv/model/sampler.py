"""From logits to one token per request. Each request has a random stream of its own.

The number that decides output token i is the i-th of the request's stream, a function of its
seed, the sample's index and i alone (Philox: Salmon et al., 2011). So a request that was stepped
back and recomputed goes on where it was, and its neighbours in the batch don't matter.
"""

import numpy as np
import torch


def sample(logits, requests) -> list[int | None]:
    """logits: [len(requests), vocab_size]. None where a row holds NaN or its largest is infinite;
    what the other rows get does not depend on it."""
    largest, greedy = logits.max(-1)  # a NaN anywhere in a row is that row's maximum
    finite, tokens = largest.isfinite().tolist(), greedy.tolist()
    for i, request in enumerate(requests):
        params = request.sampling_params
        if not finite[i]:
            tokens[i] = None
        elif params is not None and params.temperature > 0:
            tokens[i] = _draw(logits[i].float(), params, uniform(request))
    return tokens


def uniform(request) -> float:
    """The number in [0, 1) that decides the request's next output token."""
    key = np.array([request.seed, request.sample_index], dtype=np.uint64)
    stream = np.random.Philox(key=key, counter=request.num_output_tokens)
    return np.random.Generator(stream).random()


def most_likely(logits, k):
    """(scores, token ids) of the k most likely tokens, the most likely first; of equal ones, as
    in greedy sampling, the lowest id. (torch.topk promises no order among equals.)"""
    token_ids = torch.arange(logits.numel(), device=logits.device)
    if k < logits.numel():
        token_ids = (logits >= logits.topk(k).values[-1]).nonzero().flatten()
    scores, order = logits[token_ids].sort(descending=True, stable=True)
    return scores[:k], token_ids[order[:k]]


def _draw(logits, params, u) -> int:
    """Inverts the cumulative distribution at u, over the tokens that top_k and top_p leave."""
    k = min(params.top_k or logits.numel(), logits.numel())
    scores, token_ids = most_likely(logits, k)
    # Subtracted before the division: a tiny temperature must not make infinity minus infinity.
    probs = torch.softmax((scores - scores[0]).double() / params.temperature, 0)
    cumulative = probs.cumsum(0)
    if params.top_p < 1:  # a token stays if those before it have not reached top_p
        cumulative = cumulative[: int((cumulative - probs < params.top_p).sum())]
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return int(token_ids[min(index, len(cumulative) - 1)])
