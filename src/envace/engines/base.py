"""The seam between EnvACE and whatever holds the weights: a few dataclasses and two protocols.

Core code imports this module and no engine. Token ids and log-probabilities cross the seam; tensors never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn. ``temperature`` 0 is greedy; ``top_p`` 1 and ``top_k`` 0 are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    """The only source of randomness: the same prompt, weights and seed give the same tokens in any batch."""
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A drawn completion. ``completion_ids`` ends with the stop token when ``stop_reason`` is ``stop``."""

    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]
    policy_version: int = 0


class Sampler(Protocol):
    """Ids in, ids and log-probabilities out. Safe to await from hundreds of tasks at once."""

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Sample: ...


@dataclass(frozen=True)
class TrainingRow:
    """One training sequence of n tokens; per-token tuples all have length n and are 0 where ``mask`` is 0.

    ``mask[i]`` is 1 if token i was sampled (it is predicted from the tokens before it, so ``mask[0]`` is 0).
    A row may hold several merged generations of one role, each with its own advantage. The loss is the sum of three means,
    each over the masked tokens of the batch's rows that have it: policy loss, cross-entropy, and KL times ``kl``.
    """

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    advantages: tuple[float, ...]
    logprobs: tuple[float, ...]
    """The sampler's, after temperature."""
    role: str
    temperature: float = 1.0
    weight: float = 1.0
    """Multiplies the row's loss (per-role loss weight); it does not change the token count the loss is averaged over."""
    kl: float = 0.0
    """Coefficient of the KL to the start policy at the row's masked tokens; ``weight`` leaves it alone."""
    objective: Literal["policy", "supervised", "anchor"] = "policy"
    """What is learned besides the KL: the policy loss, the cross-entropy of the tokens under ``mask``, which then are
    targets, not samples, or nothing."""


@dataclass(frozen=True)
class UpdateResult:
    """``metrics`` are plain floats for the log: loss, grad_norm, lr, sampler/trainer mismatch, tokens, seconds …"""

    metrics: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """Samples and updates one set of weights."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def policy_version(self) -> int: ...

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult: ...

    def save(self, folder: Path) -> None:
        """Writes a Hugging Face model folder plus what ``load`` needs to go on bit for bit (optimizer, counters)."""
        ...

    def load(self, folder: Path) -> None: ...
