"""Optimizer steps over training rows: micro-batches by token budget, one loss scale whatever their cut."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from envace.algorithms.losses import kl_exact, kl_k3, policy_loss, sequence_log_ratio, token_sum
from envace.engines.base import TrainingRow
from envace.engines.local.batching import Bundle, Remainder, bundles
from envace.engines.local.optimizers import OptimizerName, make_optimizer
from envace.engines.local.prefix import SharedPrefixes, can_share
from envace.types import Frozen

OBJECTIVES = ("policy", "supervised", "anchor")
PADDING = {"cpu": 128, "cuda": 2048}
"""Tokens of padding that are worth another pass.

On a CPU core a pass of the 1M policy took 10 ms and 0.15 ms a token; of 16 … 512, 128 made the fastest updates. The figure for
GPUs is an estimate, not measured.
"""


class TrainerSettings(Frozen):
    """How weights are updated."""

    optimizer: OptimizerName = Field(default="adamw", description="adamw, or muon: matrices by Muon, the rest by AdamW")
    lr: float = Field(default=1e-6, gt=0, le=10)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0, le=10)
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
        kl: of whole distributions, or estimated from the sampled tokens (less memory, more noise).
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
        kl: Literal["exact", "k3"] = "exact",
        reference: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.steps = 0
        self._clip_low, self._clip_high = clip_low, clip_high
        self._ratio, self._kl, self._reference = ratio, kl, reference
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

    def step(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """One optimizer step over ``rows``; returns metrics.

        Raises:
            ValueError: rows have a KL coefficient and the trainer no reference.
        """
        if self._reference is None and any(row.kl for row in rows):
            raise ValueError("a KL needs the start policy: make the trainer with its reference")
        started = time.perf_counter()
        tokens = {
            objective: sum(sum(row.mask) for row in rows if row.objective == objective) for objective in OBJECTIVES
        }
        tokens["kl"] = sum(sum(row.mask) for row in rows if row.kl)
        sums: dict[str, float] = defaultdict(float)
        computed = 0
        if any(tokens.values()):
            self.model.train()
            self.optimizer.zero_grad()
            for bundle in self._bundles(rows):
                computed += bundle.tokens
                self._backward(bundle, tokens, sums)
            self.model.eval()
        metrics = {
            "loss": sums["loss"],
            "tokens_trained": float(sum(tokens[objective] for objective in OBJECTIVES)),
            "tokens_computed": float(computed),
            "rows": float(len(rows)),
            "lr": self.learning_rate(self.steps),
            "skipped": 0.0,
        }
        if count := tokens["policy"]:
            metrics |= {
                "mismatch_mean": sums["mismatch"] / count,
                "mismatch_max": sums["mismatch_max"],
                "clip_share": sums["clipped"] / count,
                "entropy": sums["entropy"] / count,
            }
        if count := tokens["kl"]:
            metrics["kl"] = sums["kl"] / count
        if count := tokens["supervised"]:
            metrics["cross_entropy"] = sums["cross_entropy"] / count
        if any(tokens.values()):
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

    def _backward(self, bundle: Bundle, tokens: Mapping[str, int], sums: dict[str, float]) -> None:
        """Adds the bundle's part of the gradient and of the sums behind the metrics."""
        batches = [_tensors(rows, tokens, self._device) for rows in bundle.batches]
        references: list[Tensor | None] = [None] * len(batches)
        if self._reference is not None and any(row.kl for rows in bundle.batches for row in rows):
            with torch.no_grad(), self._reference() as model:
                shared = SharedPrefixes(model, bundle.prefixes) if bundle.prefixes else None
                references = [self._compared(self._log_softmax(model, batch, shared), batch) for batch in batches]
        shared = SharedPrefixes(self.model, bundle.prefixes) if bundle.prefixes else None
        for batch, reference in zip(batches, references, strict=True):
            loss = self._loss(self._log_softmax(self.model, batch, shared), reference, batch, sums)
            sums["loss"] += float(loss.detach())
            loss.backward()
        if shared is not None:
            shared.backward()

    def _loss(self, logs: Tensor, reference: Tensor | None, batch: dict[str, Tensor], sums: dict[str, float]) -> Tensor:
        """The batch's part of the loss, from ``logs`` of :meth:`_log_softmax`."""
        mask, old = batch["mask"], batch["logprobs"]
        policy, supervised = batch["policy"][:, None], batch["supervised"][:, None]
        chosen = _chosen(logs, batch)
        logprobs = torch.zeros_like(mask).index_put((batch["rows"], batch["columns"]), chosen)
        compared = old + sequence_log_ratio(logprobs, old, mask) if self._ratio == "sequence" else logprobs
        gained = policy_loss(compared, old, batch["advantages"], self._clip_low, self._clip_high)
        losses = torch.where(policy, gained, -logprobs * supervised)
        with torch.no_grad():
            drawn = mask * policy
            gap = ((logprobs - old) * drawn).abs()
            ratio = torch.exp(compared - old)
            outside = (ratio < 1 - self._clip_low) | (ratio > 1 + self._clip_high)
            sums["mismatch"] += float(gap.sum())
            sums["mismatch_max"] = max(sums["mismatch_max"], float(gap.max()))
            sums["clipped"] += float((outside * drawn).sum())
            # -log p of what was drawn: an unbiased estimate while the draws are the policy's own.
            sums["entropy"] -= float((logprobs * drawn).sum())
            sums["cross_entropy"] -= float((logprobs * mask * supervised).sum())
        loss = token_sum(losses, mask, batch["weights"])
        if reference is None:
            return loss
        estimate = kl_exact if self._kl == "exact" else kl_k3
        divergence, coefficients = estimate(self._compared(logs, batch), reference), batch["kl"][batch["rows"]]
        sums["kl"] += float(divergence.detach()[coefficients > 0].sum())
        return loss + (divergence * coefficients).sum()

    def _compared(self, logs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """What the KL compares: whole distributions [tokens, vocabulary], or what was drawn [tokens]."""
        return logs if self._kl == "exact" else _chosen(logs, batch)

    def _log_softmax(self, model: Any, batch: dict[str, Tensor], shared: SharedPrefixes | None) -> Tensor:
        """Log-probabilities at the batch's masked tokens, after temperature: [tokens, vocabulary]."""
        places, columns = batch["columns"].unique(return_inverse=True)
        first = batch["ids"].shape[1] - batch["mask"].shape[1]
        # No attention mask without a prefix: pads lie only on the right, where no token of a causal model sees them.
        past = {"use_cache": False} if shared is None else shared.past(batch["prefix"], batch["ids"].shape[1])
        output = model(input_ids=batch["ids"], logits_to_keep=places + first - 1, **past)
        # Logits are the largest tensor by far, so only those of masked tokens are widened and normalized.
        logits = output.logits[batch["rows"], columns].float() / batch["temperature"][batch["rows"], None]
        return torch.log_softmax(logits, dim=-1)


def _chosen(logs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Of each masked token, from its distribution: [tokens]."""
    return logs.gather(1, batch["targets"][:, None])[:, 0]


def _tensors(rows: Sequence[TrainingRow], tokens: Mapping[str, int], device: Any) -> dict[str, Tensor]:
    """Right-padded tensors. All but ids start at the first column any row has a masked token in.

    ``rows`` and ``columns`` say where those tokens are, ``targets`` which they are; ``weights`` and ``kl`` are a row's, over
    the whole step's number of ``tokens`` of its objective and with a KL.
    """
    width = max(len(row.ids) for row in rows)
    first = max(1, min(row.mask.index(1) for row in rows))

    def padded(values: Sequence[Sequence[float]], kind: torch.dtype, begin: int) -> Tensor:
        tensor = torch.zeros(len(rows), width - begin, dtype=kind)
        for index, value in enumerate(values):
            tensor[index, : max(0, len(value) - begin)] = torch.tensor(value[begin:], dtype=kind)
        return tensor.to(device)

    ids = padded([row.ids for row in rows], torch.long, 0)
    mask = padded([row.mask for row in rows], torch.float32, first)
    where, columns = mask.nonzero(as_tuple=True)
    return {
        "prefix": torch.tensor([row.prefix if isinstance(row, Remainder) else 0 for row in rows], device=device),
        "ids": ids,
        "mask": mask,
        "rows": where,
        "columns": columns,
        "targets": ids[where, columns + first],
        "policy": torch.tensor([row.objective == "policy" for row in rows], device=device),
        "supervised": torch.tensor([row.objective == "supervised" for row in rows], device=device),
        "advantages": padded([row.advantages for row in rows], torch.float32, first),
        "logprobs": padded([row.logprobs for row in rows], torch.float32, first),
        "temperature": torch.tensor([row.temperature or 1.0 for row in rows], device=device),
        "weights": torch.tensor([row.weight / tokens[row.objective] for row in rows], device=device),
        "kl": torch.tensor([row.kl / max(1, tokens["kl"]) for row in rows], device=device),
    }
