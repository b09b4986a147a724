"""Supervised warm start: trains either role, or both, on trajectories before any reinforcement learning."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from envace.chat.render import ChatRenderer
from envace.chat.settings import ChatSettings
from envace.data.tasks import read_values
from envace.engines.base import TrainingRow
from envace.engines.local.engine import LocalEngine, LocalEngineSettings
from envace.errors import UserError
from envace.roles.rehearse import RehearsePrompt
from envace.training.supervised import Trajectory, supervised_rows
from envace.types import Frozen


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Trajectories of a JSONL file (``.gz`` or plain), one a line.

    Raises:
        UserError: as ``read_values``: an unreadable file, or a line that is no trajectory; names file, line and field.
    """
    return (trajectory for _, trajectory in read_values(path, Trajectory, "trajectories"))


def batches(
    trajectories: Iterator[Trajectory],
    renderer: ChatRenderer,
    prompt: RehearsePrompt,
    tokens_per_step: int,
    window: int,
    seed: int,
    max_tokens: int,
) -> Iterator[tuple[list[TrainingRow], int]]:
    """Rows for one optimizer step at a time, with how many trajectories have been read when the batch is full.

    The order of the file is kept but for a shuffle within ``window`` rows, so a file may hold a curriculum. Rows longer
    than ``max_tokens`` are left out.
    """
    rng = random.Random(seed)
    pool: list[TrainingRow] = []
    batch: list[TrainingRow] = []
    tokens = read = 0
    for trajectory in trajectories:
        read += 1
        pool += [row for row in supervised_rows(trajectory, renderer, prompt) if len(row.ids) <= max_tokens]
        while len(pool) > window:
            row = pool.pop(rng.randrange(len(pool)))
            batch.append(row)
            tokens += len(row.ids)
            if tokens >= tokens_per_step:
                yield batch, read
                batch, tokens = [], 0
    rng.shuffle(pool)
    for row in pool:
        batch.append(row)
        tokens += len(row.ids)
        if tokens >= tokens_per_step:
            yield batch, read
            batch, tokens = [], 0
    if batch:
        yield batch, read


def target_share(rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """How many tokens of each role carry loss, for the log."""
    share: dict[str, Any] = {}
    for row in rows:
        share[row.role] = share.get(row.role, 0) + sum(row.mask)
    return share


class SftSettings(Frozen):
    """Settings of ``envace sft``."""

    model: str
    """A Hugging Face model folder, or ``tiny`` for the policy that ships with EnvACE."""
    trajectories: Path
    out: Path
    rehearse_prompt: str = "full"
    tokens_per_step: int = Field(default=8192, gt=0)
    max_tokens: int = Field(default=4096, gt=0)
    """Longer rows are left out and counted."""
    shuffle_window: int = Field(default=512, ge=0)
    """The file's order is kept but for a shuffle within so many rows; 0 keeps it exactly."""
    max_steps: int | None = Field(default=None, gt=0)
    checkpoint_every: int = Field(default=100, gt=0)
    seed: int = 0
    chat: ChatSettings = ChatSettings()
    engine: LocalEngineSettings = LocalEngineSettings()


def warm_start(settings: SftSettings, resume: bool = False, progress: Any = print) -> Path:
    """Runs the supervised warm start and returns the folder of the trained policy, ``<out>/model``.

    ``<out>/metrics.jsonl`` has one line a step. With ``resume`` the newest checkpoint is continued: the trajectories
    already consumed are read again but not trained on, so the result equals that of an undisturbed run.

    Raises:
        UserError: unreadable trajectories, no row short enough, or nothing to resume.
    """
    import time

    engine = LocalEngine(settings.model, settings.engine)
    renderer = settings.chat.renderer(engine.tokenizer, engine.eos_ids)
    prompt = RehearsePrompt(settings.rehearse_prompt)
    settings.out.mkdir(parents=True, exist_ok=True)
    (settings.out / "settings.json").write_text(settings.model_dump_json(indent=1))
    log = settings.out / "metrics.jsonl"
    model = settings.out / "model"
    done = 0
    if resume:
        if not (model / "sft_step").is_file():
            raise UserError(f"{model}: no checkpoint to resume from; run without resume")
        engine.load(model)
        done = int((model / "sft_step").read_text())
        log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:done]))
    else:
        log.write_text("")

    step = 0
    stream = batches(
        read_trajectories(settings.trajectories), renderer, prompt, settings.tokens_per_step,
        settings.shuffle_window, settings.seed, settings.max_tokens,
    )  # fmt: skip
    started = time.monotonic()
    with log.open("a", encoding="utf-8") as lines:
        for rows, read in stream:
            step += 1
            if step <= done:
                continue
            metrics = engine.update(rows).metrics
            record = {"step": step, "trajectories": read, **target_share(rows), **metrics}
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            if step % 10 == 0:
                progress(
                    f"step {step}: loss {metrics['loss']:.4f}, {read} trajectories, {time.monotonic() - started:.0f} s"
                )
            if step % settings.checkpoint_every == 0:
                _save(engine, model, step)
            if settings.max_steps is not None and step >= settings.max_steps:
                break
    if step == 0:
        raise UserError(f"{settings.trajectories}: no row of at most {settings.max_tokens} tokens to train on")
    _save(engine, model, step)
    return model


def _save(engine: Any, folder: Path, step: int) -> None:
    """Writes beside the last checkpoint and swaps, so that a kill at any moment leaves a whole one."""
    import shutil

    fresh, old = folder.with_name("model.new"), folder.with_name("model.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    engine.save(fresh)
    (fresh / "sft_step").write_text(str(step))
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
