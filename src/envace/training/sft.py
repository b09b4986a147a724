"""Supervised warm start: trains either role, or both, on trajectories before any reinforcement learning."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from envace.chat.render import ChatRenderer
from envace.chat.settings import ChatSettings, PathOrName
from envace.config import dump_settings
from envace.data.tasks import read_values
from envace.engines.base import TrainingRow
from envace.engines.local.engine import LocalEngine, LocalEngineSettings
from envace.errors import UserError
from envace.roles.rehearse import RehearsePrompt
from envace.training.checkpoint import RunFolder, newest_checkpoint, open_run
from envace.training.running import Progress, logged, stop_after_step, teller
from envace.training.supervised import Trajectory, supervised_rows
from envace.types import Frozen

SFT_SETTINGS = "sft.yaml"


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
) -> Iterator[tuple[list[TrainingRow], dict[str, int]]]:
    """Rows for one optimizer step at a time, with counts: trajectories read so far and rows left out of them.

    The order of the file is kept but for a shuffle within ``window`` rows, so a file may hold a curriculum. Rows longer
    than ``max_tokens`` are left out.
    """
    rng = random.Random(seed)
    counts = {"trajectories": 0, "rows_left_out": 0}

    def rows() -> Iterator[TrainingRow]:
        pool: list[TrainingRow] = []
        for trajectory in trajectories:
            counts["trajectories"] += 1
            every = supervised_rows(trajectory, renderer, prompt)
            short = [row for row in every if len(row.ids) <= max_tokens]
            counts["rows_left_out"] += len(every) - len(short)
            pool += short
            while len(pool) > window:
                yield pool.pop(rng.randrange(len(pool)))
        rng.shuffle(pool)
        yield from pool

    batch: list[TrainingRow] = []
    tokens = 0
    for row in rows():
        batch.append(row)
        tokens += len(row.ids)
        if tokens >= tokens_per_step:
            yield batch, dict(counts)
            batch, tokens = [], 0
    if batch:
        yield batch, dict(counts)


def target_share(rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """How many tokens of each role carry loss, for the log."""
    share: dict[str, Any] = {}
    for row in rows:
        share[row.role] = share.get(row.role, 0) + sum(row.mask)
    return share


class SftSettings(Frozen):
    """Settings of ``envace sft``."""

    model: PathOrName
    """A Hugging Face model folder, a run, or ``tiny`` for the policy that ships with EnvACE."""
    trajectories: Annotated[Path, AfterValidator(Path.absolute)]
    rehearse_prompt: PathOrName = "full"
    tokens_per_step: int = Field(default=8192, gt=0)
    max_tokens: int = Field(default=4096, gt=0)
    """Longer rows are left out and counted."""
    shuffle_window: int = Field(default=512, ge=0)
    """The file's order is kept but for a shuffle within so many rows; 0 keeps it exactly."""
    max_steps: int | None = Field(default=None, gt=0)
    checkpoint_every: int = Field(default=100, gt=0)
    keep_checkpoints: int = Field(default=1, gt=0)
    seed: int = 0
    chat: ChatSettings = ChatSettings()
    engine: LocalEngineSettings = LocalEngineSettings()


def warm_start(settings: SftSettings, out: Path, resume: bool = False, progress: Progress = print) -> Path:
    """Runs the supervised warm start in the run folder ``out`` and returns the folder of the trained policy.

    ``metrics.jsonl`` has one line a step. With ``resume`` the newest checkpoint is continued: the trajectories already
    consumed are read again but not trained on, so the result equals that of an undisturbed run. The first Ctrl-C ends it
    after the step, with a checkpoint; a second at once.

    Raises:
        UserError: unreadable trajectories, no row short enough, another run in ``out``, or nothing to resume.
    """
    for _ in read_trajectories(settings.trajectories):  # all of it: a bad last line must not cost hours of training
        pass
    say = teller(progress)
    with (
        open_run(out, dump_settings(settings), resume, SFT_SETTINGS) as run,
        logged(run.log),
        stop_after_step() as stop,
    ):
        _steps(settings, run, resume, stop, say)
        policy = newest_checkpoint(out)
        say(f"policy: {policy}")
    return policy


def _steps(settings: SftSettings, run: RunFolder, resume: bool, stop: Callable[[], bool], say: Progress) -> None:
    engine = LocalEngine(settings.model, settings.engine)
    renderer = settings.chat.renderer(engine.tokenizer, engine.eos_ids)
    prompt = RehearsePrompt(settings.rehearse_prompt)
    done = max(run.checkpoints(), default=0) if resume else 0
    if resume:
        run.forget_after(done)
        if done:
            engine.load(run.checkpoint(done))
        say(f"resuming after step {done}")
    if settings.max_steps is not None and done >= settings.max_steps:
        return
    started = time.monotonic()
    step = saved = 0
    stream = batches(
        read_trajectories(settings.trajectories), renderer, prompt, settings.tokens_per_step,
        settings.shuffle_window, settings.seed, settings.max_tokens,
    )  # fmt: skip
    for step, (rows, counts) in enumerate(stream, 1):
        if step <= done:
            continue
        metrics = engine.update(rows).metrics
        run.write_metrics({"step": step, **counts, **target_share(rows), **metrics})
        if step % 10 == 0:
            spent = time.monotonic() - started
            say(f"step {step}: loss {metrics['loss']:.4f}, {counts['trajectories']} trajectories, {spent:.0f} s")
        last = step == settings.max_steps
        if stop() or last or step % settings.checkpoint_every == 0:
            run.write_checkpoint(step, engine.save, settings.keep_checkpoints)
            saved = step
        if stop() and not last:
            say(f"stopped after step {step}; go on with: envace sft --resume {run.path}")
        if stop() or last:
            return
    if step == 0:
        raise UserError(f"{settings.trajectories}: no row of at most {settings.max_tokens} tokens to train on")
    if step > max(done, saved):
        run.write_checkpoint(step, engine.save, settings.keep_checkpoints)
