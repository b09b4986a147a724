"""The optimizers: AdamW, or Muon for the hidden matrices with AdamW for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from envace.errors import UserError

OptimizerName = Literal["adamw", "muon"]


class Optimizer:
    """Several torch optimizers stepped as one, at one learning rate."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)

    def step(self, lr: float) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(saved)


def make_optimizer(model: Any, name: OptimizerName, betas: tuple[float, float], weight_decay: float) -> Optimizer:
    """The optimizer of ``model``'s trainable parameters.

    Muon orthogonalizes the momentum of matrices; its update is scaled to the root mean square of AdamW's, so that both
    parts share a learning rate. Embeddings, output layer, norms and biases go to AdamW.

    Raises:
        UserError: this torch has no Muon.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    hidden: list[Any] = []
    if name == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"engine.optimizer=muon needs torch 2.9 or newer, and this is {torch.__version__}")
        outer = [getattr(model, f"get_{side}_embeddings")() for side in ("input", "output")]
        spared = {id(module.weight) for module in outer if module is not None}
        hidden = [one for one in trained.values() if one.ndim == 2 and id(one) not in spared]
    taken = {id(one) for one in hidden}
    rest = [one for one in trained.values() if id(one) not in taken]
    parts: list[torch.optim.Optimizer] = (
        [torch.optim.AdamW(rest, betas=betas, weight_decay=weight_decay)] if rest else []
    )
    if hidden:
        parts.append(torch.optim.Muon(hidden, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    return Optimizer(parts)
