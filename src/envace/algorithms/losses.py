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


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - policy: unbiased, never negative estimate of KL(policy || reference)."""
    difference = reference_logprobs - logprobs
    return torch.exp(difference) - difference - 1


def token_sum(losses: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Sum over sampled tokens of row weight times loss; ``weights`` is [rows], the others [rows, tokens].

    Divided by the sampled tokens of the *whole batch* it is the token-mean, however the batch was cut into micro-batches.
    """
    return (losses * mask * weights[:, None]).sum()
