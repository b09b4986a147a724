"""``envace train``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from envace.errors import UserError


def train(
    config: Annotated[Path | None, typer.Argument(help="Settings (YAML). Not needed with --resume.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, key.key=value …")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/train"),
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
) -> None:
    """Trains a policy: it acts, and by default also plays the environment (responder=rehearsal).

    Example: envace train settings.yaml responder=replay engine.lr=1e-4 --out runs/replay
    """
    from envace.config import TrainSettings, checked, load_settings
    from envace.training.loop import train as run

    if resume is not None:
        held = resume / "settings.json"
        if not held.is_file():
            raise UserError(f"{resume}: not a run folder (no settings.json), so there is nothing to resume")
        run(checked(TrainSettings, json.loads(held.read_text()), str(held)), resume, resume=True, progress=typer.echo)
        return
    if config is None:
        raise UserError("train: name a settings file, or a run with --resume")
    run(load_settings(TrainSettings, config, overrides or []), out, progress=typer.echo)
