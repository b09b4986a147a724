"""``envace sft``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sft(
    config: Annotated[Path, typer.Argument(help="Settings (YAML): model, trajectories, out, engine …")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, key.key=value …")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in the output folder.")] = False,
) -> None:
    """Warm-starts either role, or both, on trajectories (JSONL), with any Hugging Face causal LM."""
    from envace.config import load_settings
    from envace.training.sft import SftSettings, warm_start

    folder = warm_start(load_settings(SftSettings, config, overrides or []), resume, progress=typer.echo)
    typer.echo(f"wrote {folder}")
