"""``envace sft``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envace.errors import UserError


def sft(
    config: Annotated[
        Path | None, typer.Argument(help="Settings (YAML): model, trajectories, engine … Not with --resume.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, key.key=value …")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME of the settings if not given.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
) -> None:
    """Warm-starts either role, or both, on trajectories (JSONL), with any Hugging Face causal LM.

    Example: envace sft settings.yaml engine.lr=1e-5 --out runs/warm; then train with model=runs/warm
    """
    from envace.config import load_settings
    from envace.training.sft import SFT_SETTINGS, SftSettings, warm_start

    if resume is not None:
        if config is not None or out is not None:
            raise UserError("sft: a resumed run keeps its settings and its folder; give --resume RUN alone")
        held = resume / SFT_SETTINGS
        if not held.is_file():
            raise UserError(f"{resume}: not a run folder (no {SFT_SETTINGS}), so there is nothing to resume")
        settings, folder = load_settings(SftSettings, held), resume
    elif config is None:
        raise UserError("sft: name a settings file, or a run with --resume")
    else:
        settings, folder = load_settings(SftSettings, config, overrides or []), out or Path("runs") / config.stem
    warm_start(settings, folder, resume is not None, progress=typer.echo)
