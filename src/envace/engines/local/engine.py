"""The local engine: loads a policy, samples from it, updates it, saves it and goes on from where it was saved."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from envace.engines.base import TrainingRow, UpdateResult
from envace.engines.local.loading import load_policy
from envace.engines.local.sampler import LocalSampler
from envace.engines.local.trainer import Trainer, TrainerSettings
from envace.errors import UserError
from envace.types import Frozen

STATE = "trainer_state.pt"


class LoraSettings(Frozen):
    """Low-rank adapters in place of full weights (needs the ``lora`` extra)."""

    r: int = Field(default=16, gt=0)
    alpha: int = Field(default=32, gt=0)
    dropout: Literal[0] = 0
    """Sampler and trainer must see the same policy, so dropout stays off."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class LocalEngineSettings(TrainerSettings):
    """One process, one model, a CPU or one GPU."""

    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(
        default=1, ge=1, le=1024, description="CPU threads; more than idle cores make everything slower"
    )
    max_batch: int = Field(default=128, gt=0, description="rows decoded together")
    max_context: int = Field(default=20_000, gt=0)
    prefix_tokens: int = Field(default=200_000, ge=0, description="tokens of finished contexts kept for reuse")
    lora: LoraSettings | None = None


class LocalEngine:
    """Implements ``engines.base.Engine``.

    Args:
        model: a Hugging Face model folder, a GGUF file, or the name of a shipped policy.
        clip_low, clip_high, kl: of the algorithm; ``kl`` above 0 keeps the start policy in memory.

    Raises:
        UserError: the model cannot be loaded, or there is no such device.
    """

    def __init__(
        self,
        model: str,
        settings: LocalEngineSettings,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        ratio: Literal["token", "sequence"] = "token",
        kl: Literal["exact", "k3"] = "exact",
        keep_start: bool = False,
    ) -> None:
        torch.set_num_threads(settings.threads)
        device = settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        _require_device(device)
        self.settings = settings
        self._base, self.tokenizer = load_policy(model, getattr(torch, settings.dtype), device)
        self.model = self._base
        if settings.lora is not None:
            self.model = _with_adapters(self._base, settings.lora)
        self._start = copy.deepcopy(self._base).requires_grad_(False) if keep_start and settings.lora is None else None
        reference = self._reference if keep_start else None
        self.trainer = Trainer(
            self.model, settings, clip_low=clip_low, clip_high=clip_high, ratio=ratio, kl=kl, reference=reference
        )
        self._sampler = LocalSampler(
            self.model,
            max_batch=settings.max_batch,
            max_context=settings.max_context,
            prefix_tokens=settings.prefix_tokens,
        )

    @property
    def sampler(self) -> LocalSampler:
        return self._sampler

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """What the model's generation settings end a completion at."""
        ids = getattr(self._base.generation_config, "eos_token_id", None)
        return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (ids,)

    @property
    def policy_version(self) -> int:
        return self._sampler.policy_version

    def update(self, rows: Sequence[TrainingRow]) -> UpdateResult:
        # Before the step, so that the sampler's caches leave their memory to it.
        self._sampler.begin_version(self.policy_version + 1)
        _give_back_memory()
        metrics = self.trainer.step(rows)
        _give_back_memory()
        return UpdateResult(metrics)

    @contextmanager
    def _reference(self) -> Iterator[Any]:
        """The start policy: a frozen copy, or the model with its adapters off."""
        if self._start is not None:
            yield self._start
        else:
            with self.model.disable_adapter():
                yield self.model

    def save(self, folder: Path) -> None:
        """A Hugging Face model folder (adapters merged; the adapters alone in ``adapter/``) plus the optimizer's state."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.settings.lora is None:
            self.model.save_pretrained(folder)
        else:
            self.model.save_pretrained(folder / "adapter")
            # Merging into a copy: unmerging would not give back the same bits.
            copy.deepcopy(self.model).merge_and_unload().save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        state = {
            "optimizer": self.trainer.optimizer.state_dict(),
            "steps": self.trainer.steps,
            "policy_version": self.policy_version,
            "trainable": {
                name: parameter.detach().cpu()
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad and self.settings.lora is not None
            },
        }
        with (folder / STATE).open("wb") as file:  # by its name alone, torch would not say what the disk refused
            torch.save(state, file)

    def load(self, folder: Path) -> None:
        """Goes on from what ``save`` wrote, bit for bit.

        Raises:
            UserError: the folder was not written by ``save``, or is damaged.
        """
        if not (folder / STATE).is_file():
            raise UserError(f"{folder}: no {STATE}, so there is nothing to go on from")
        try:
            state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
            if self.settings.lora is None:
                saved, _ = load_policy(str(folder), getattr(torch, self.settings.dtype), str(self.model.device))
                self.model.load_state_dict(saved.state_dict())
            else:
                self.model.load_state_dict(state["trainable"], strict=False)
            self.trainer.optimizer.load_state_dict(state["optimizer"])
            self.trainer.steps = state["steps"]
            self._sampler.begin_version(state["policy_version"])
        except Exception as error:  # a file that is damaged fails by whatever its reader stumbles on
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise UserError(
                f"{folder}: a damaged checkpoint ({reason}); remove that folder to go on from the one before it"
            ) from error


def _require_device(device: str) -> None:
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise UserError(f"engine.device={device}: no such device; there are auto, cpu, cuda and cuda:N") from None
    if kind.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"engine.device={device}: this machine has no usable GPU; use device=cpu")
    try:
        torch.empty(0, device=kind)
    except (
        Exception
    ) as error:  # each backend fails in its own way: a number too high, a device that is busy or not built in
        reason = str(error).partition("\n")[0]
        raise UserError(f"engine.device={device}: cannot be used here: {reason}") from None


def _give_back_memory() -> None:
    """Tensors of sampling and of updates come in other sizes, so glibc would hold what was freed of both: a third more."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


def _with_adapters(model: Any, settings: LoraSettings) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UserError("engine.lora needs peft: pip install 'envace[lora]'") from None
    modules = settings.target_modules if isinstance(settings.target_modules, str) else list(settings.target_modules)
    config = LoraConfig(
        r=settings.r, lora_alpha=settings.alpha, lora_dropout=0.0, target_modules=modules, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)
