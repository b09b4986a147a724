"""``envace train``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from envace.errors import UserError


def train(
    config: Annotated[
        Path | None, typer.Argument(help="Settings: a YAML file, or the name of shipped ones. Not with --resume.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, key.key=value …")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME of the settings if not given.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
) -> None:
    """Trains a policy: it acts, and by default also plays the environment (responder=rehearsal).

    Example: envace train settings.yaml responder=replay engine.lr=1e-4 --out runs/replay
    """
    from envace.config import TrainSettings, load_settings
    from envace.training.checkpoint import SETTINGS
    from envace.training.loop import train as run

    if resume is not None:
        if config is not None or out is not None:
            raise UserError("train: a resumed run keeps its settings and its folder; give --resume RUN alone")
        held = resume / SETTINGS
        if not held.is_file():
            raise UserError(f"{resume}: not a run folder (no {SETTINGS}), so there is nothing to resume")
        settings, folder = load_settings(TrainSettings, held), resume
    elif config is None:
        raise UserError("train: name a settings file, or a run with --resume")
    else:
        settings, folder = load_settings(TrainSettings, config, overrides or []), out or Path("runs") / config.stem
    with _shown(settings.steps) as (line, on_step):
        run(settings, folder, resume=resume is not None, progress=line, on_step=on_step)


@contextmanager
def _shown(steps: int) -> Iterator[tuple[Callable[[str], None], Callable[[int, dict[str, Any]], None] | None]]:
    """On a terminal a bar with the time left below the lines; elsewhere the lines alone."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console()
    if not console.is_terminal:
        yield typer.echo, None
        return
    columns = (
        TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[reward]}"),
        TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("train", total=steps, reward="")

        def on_step(step: int, metrics: dict[str, Any]) -> None:
            reward = metrics["reward"]
            bar.update(task, completed=step, reward="" if reward is None else f"reward {reward:.3f}")

        yield lambda text: bar.console.print(text, markup=False, highlight=False), on_step
