"""Losses per token, and how they are averaged. Pure torch; every tensor of a call has the same shape."""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprob - old logprob) (PPO, arXiv 1707.06347).

    ``clip_high`` above ``clip_low`` is DAPO's clip-higher (arXiv 2503.14476).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """GSPO's ratio of a whole generation, as a log-ratio for each of its tokens (GSPO, arXiv 2507.18071, its token form).

    s = (1/n) sum over the generation's n tokens of (logprob - old logprob); the value at every sampled token is s, its
    gradient that token's own. ``old + sequence_log_ratio(...)`` in place of ``logprobs`` gives :func:`policy_loss` that clips
    generations instead of tokens. Tensors are [rows, tokens]; in a merged row each run of the mask is a generation.
    """
    sampled = mask.bool()
    before = torch.nn.functional.pad(sampled, (1, 0))[:, :-1]
    number = (sampled & ~before).cumsum(dim=1) * sampled
    difference = (logprobs.detach() - old_logprobs) * mask
    sums = torch.zeros(mask.shape[0], mask.shape[1] + 1, dtype=difference.dtype, device=mask.device)
    sums.scatter_add_(1, number, difference)
    counts = torch.zeros_like(sums).scatter_add_(1, number, mask.to(difference.dtype)).clamp(min=1)
    return ((sums / counts).gather(1, number) + logprobs - logprobs.detach()) * mask


def kl_exact(log_probabilities: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) of each position's whole distribution: sum over v of p(v) (log p(v) - log q(v)).

    Both are log-probabilities [..., vocabulary]. No draw is in it, so at the same coefficient it disturbs far less than
    :func:`kl_k3`, for two numbers a token and vocabulary entry.
    """
    return (log_probabilities.exp() * (log_probabilities - reference)).sum(dim=-1)


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy, an unbiased and never negative estimate of KL(policy || reference), as in
    GRPO (arXiv 2402.03300)."""
    difference = reference_logprobs - logprobs
    return torch.exp(difference) - difference - 1


def token_sum(losses: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Sum over sampled tokens of row weight times loss; ``weights`` is [rows], the others [rows, tokens].

    Divided by the sampled tokens of the *whole batch* it is the token-mean (DAPO, arXiv 2503.14476), however the batch was
    cut into micro-batches.
    """
    return (losses * mask * weights[:, None]).sum()
