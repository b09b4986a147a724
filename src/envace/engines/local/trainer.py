"""Optimizer steps over training rows: micro-batches by token budget, one loss scale whatever their cut."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from envace.algorithms.losses import kl_k3, policy_loss, sequence_log_ratio, token_sum
from envace.engines.base import TrainingRow
from envace.engines.local.batching import Bundle, Remainder, bundles
from envace.engines.local.optimizers import OptimizerName, make_optimizer
from envace.engines.local.prefix import SharedPrefixes, can_share
from envace.types import Frozen

PADDING = {"cpu": 128, "cuda": 2048}
"""Tokens of padding that are worth another pass.

On a CPU core a pass of the 1M policy took 10 ms and 0.15 ms a token; of 16 … 512, 128 made the fastest updates. The figure for
GPUs is an estimate, not measured.
"""


class TrainerSettings(Frozen):
    """How weights are updated."""

    optimizer: OptimizerName = Field(default="adamw", description="adamw, or muon: matrices by Muon, the rest by AdamW")
    lr: float = Field(default=1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up from lr / warmup_steps")
    decay_steps: int | None = Field(
        default=None, gt=0, description="cosine to a tenth of lr at this step; none: constant"
    )
    max_grad_norm: float = Field(default=1.0, gt=0)
    micro_batch_tokens: int = Field(default=16384, gt=0, description="padded tokens of one forward and backward pass")
    share_prefixes: bool = Field(
        default=True,
        description="compute once what rows begin with in common, where the model has full attention in every layer and "
        "no gradient checkpointing",
    )


class Trainer:
    """Steps one model's trainable parameters.

    Args:
        clip_low, clip_high: of the policy loss.
        ratio: of each token, or of the generation it is in (GSPO).
        reference: a context that gives the start policy, for the KL of rows that have a coefficient.
    """

    def __init__(
        self,
        model: Any,
        settings: TrainerSettings,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        ratio: Literal["token", "sequence"] = "token",
        reference: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.steps = 0
        self._clip_low, self._clip_high = clip_low, clip_high
        self._ratio, self._reference = ratio, reference
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(model, settings.optimizer, settings.betas, settings.weight_decay)
        self._device = next(model.parameters()).device
        self._can_share = settings.share_prefixes and can_share(model)

    def learning_rate(self, step: int) -> float:
        """lr of optimizer step ``step``, counted from 0."""
        lr, warmup, decay = self.settings.lr, self.settings.warmup_steps, self.settings.decay_steps
        if step < warmup:
            return lr * (step + 1) / warmup
        if decay is None:
            return lr
        progress = min(1.0, (step - warmup) / max(1, decay - warmup))
        return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))

    def step(self, rows: Sequence[TrainingRow], kind: Literal["policy", "supervised"]) -> dict[str, float]:
        """One optimizer step over ``rows``; returns metrics. The loss is the mean over all sampled tokens of the rows.

        Raises:
            ValueError: rows have a KL coefficient and the trainer no reference.
        """
        if self._reference is None and any(row.kl for row in rows):
            raise ValueError("a KL needs the start policy: make the trainer with its reference")
        started = time.perf_counter()
        tokens = sum(sum(row.mask) for row in rows)
        sums = {"loss": 0.0, "mismatch": 0.0, "mismatch_max": 0.0, "clipped": 0.0, "kl": 0.0, "entropy": 0.0}
        computed = 0
        if tokens:
            self.model.train()
            self.optimizer.zero_grad()
            for bundle in self._bundles(rows):
                computed += bundle.tokens
                self._backward(bundle, tokens, kind, sums)
            self.model.eval()
        metrics = {
            "loss": sums["loss"],
            "tokens_trained": float(tokens),
            "tokens_computed": float(computed),
            "rows": float(len(rows)),
            "lr": self.learning_rate(self.steps),
            "skipped": 0.0,
        }
        if kind == "policy":
            count = max(1, tokens)
            metrics |= {
                "mismatch_mean": sums["mismatch"] / count,
                "mismatch_max": sums["mismatch_max"],
                "clip_share": sums["clipped"] / count,
                "kl": sums["kl"] / count,
                "entropy": sums["entropy"] / count,
            }
        if tokens:
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.max_grad_norm))
            metrics["grad_norm"] = norm
            if math.isfinite(norm):
                self.optimizer.step(metrics["lr"])
            else:
                metrics["skipped"] = 1.0
            self.optimizer.zero_grad()
        self.steps += 1
        return metrics | {"update_seconds": time.perf_counter() - started}

    def _bundles(self, rows: Sequence[TrainingRow]) -> list[Bundle]:
        share = self._can_share and not getattr(self.model, "is_gradient_checkpointing", False)
        return bundles(rows, self.settings.micro_batch_tokens, PADDING.get(self._device.type, PADDING["cuda"]), share)

    def _backward(self, bundle: Bundle, total: int, kind: str, sums: dict[str, float]) -> None:
        """Adds the bundle's part of the gradient and of the sums behind the metrics."""
        batches = [_tensors(rows, self._device) for rows in bundle.batches]
        references: list[Tensor | None] = [None] * len(batches)
        if kind == "policy" and self._reference is not None:
            with torch.no_grad(), self._reference() as model:
                shared = SharedPrefixes(model, bundle.prefixes) if bundle.prefixes else None
                references = [self._logprobs(model, batch, shared) for batch in batches]
        shared = SharedPrefixes(self.model, bundle.prefixes) if bundle.prefixes else None
        for batch, reference in zip(batches, references, strict=True):
            logprobs = self._logprobs(self.model, batch, shared)
            loss = self._loss(logprobs, reference, batch, kind, sums) / total
            sums["loss"] += float(loss.detach())
            loss.backward()
        if shared is not None:
            shared.backward()

    def _loss(
        self, logprobs: Tensor, reference: Tensor | None, batch: dict[str, Tensor], kind: str, sums: dict[str, float]
    ) -> Tensor:
        """Summed over the batch's sampled tokens."""
        mask, old = batch["mask"], batch["logprobs"]
        if kind == "supervised":
            return token_sum(-logprobs, mask, batch["weights"])
        compared = old + sequence_log_ratio(logprobs, old, mask) if self._ratio == "sequence" else logprobs
        losses = policy_loss(compared, old, batch["advantages"], self._clip_low, self._clip_high)
        with torch.no_grad():
            gap = ((logprobs - old) * mask).abs()
            ratio = torch.exp(compared - old)
            outside = (ratio < 1 - self._clip_low) | (ratio > 1 + self._clip_high)
            sums["mismatch"] += float(gap.sum())
            sums["mismatch_max"] = max(sums["mismatch_max"], float(gap.max()))
            sums["clipped"] += float((outside * mask).sum())
            # -log p of what was drawn: an unbiased estimate while the draws are the policy's own.
            sums["entropy"] -= float((logprobs * mask).sum())
        if reference is not None:
            divergence = kl_k3(logprobs, reference)
            sums["kl"] += float((divergence.detach() * mask).sum())
            return token_sum(losses, mask, batch["weights"]) + token_sum(divergence, mask, batch["kl"])
        return token_sum(losses, mask, batch["weights"])

    def _logprobs(self, model: Any, batch: dict[str, Tensor], shared: SharedPrefixes | None) -> Tensor:
        """Of each sampled token given those before it, after temperature: [rows, kept columns], 0 where none was sampled."""
        mask = batch["mask"].bool()
        columns = mask.any(dim=0).nonzero()[:, 0]
        first = batch["ids"].shape[1] - mask.shape[1]
        # No attention mask without a prefix: pads lie only on the right, where no token of a causal model sees them.
        past = {"use_cache": False} if shared is None else shared.past(batch["prefix"], batch["ids"].shape[1])
        output = model(input_ids=batch["ids"], logits_to_keep=columns + first - 1, **past)
        rows, places = mask[:, columns].nonzero(as_tuple=True)
        # Logits are the largest tensor by far, so only those of sampled tokens are widened and normalized.
        logits = output.logits[rows, places].float() / batch["temperature"][rows, None]
        targets = batch["ids"][rows, columns[places] + first]
        chosen = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
        return torch.zeros_like(batch["mask"]).index_put((rows, columns[places]), chosen)


def _tensors(rows: Sequence[TrainingRow], device: Any) -> dict[str, Tensor]:
    """Right-padded tensors. All but ids start at the first column any row has a sampled token in."""
    width = max(len(row.ids) for row in rows)
    first = max(1, min(row.mask.index(1) for row in rows))

    def padded(values: Sequence[Sequence[float]], kind: torch.dtype, begin: int) -> Tensor:
        tensor = torch.zeros(len(rows), width - begin, dtype=kind)
        for index, value in enumerate(values):
            tensor[index, : max(0, len(value) - begin)] = torch.tensor(value[begin:], dtype=kind)
        return tensor.to(device)

    return {
        "prefix": torch.tensor([row.prefix if isinstance(row, Remainder) else 0 for row in rows], device=device),
        "ids": padded([row.ids for row in rows], torch.long, 0),
        "mask": padded([row.mask for row in rows], torch.float32, first),
        "advantages": padded([row.advantages for row in rows], torch.float32, first),
        "logprobs": padded([row.logprobs for row in rows], torch.float32, first),
        "temperature": torch.tensor([row.temperature or 1.0 for row in rows], device=device),
        "weights": torch.tensor([row.weight for row in rows], device=device),
        "kl": torch.tensor([row.kl for row in rows], device=device),
    }
