"""``envace study``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, Field, ValidationError

if TYPE_CHECKING:
    from collections.abc import Sequence


def study(
    config: Annotated[Path, typer.Argument(help="Settings: a YAML file, or the name of shipped ones.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, key.key=value …")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study; runs/NAME of the settings if not given.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Each run's seed.")] = "0,1,2",
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="key=value,value: a variant for each value ([0.9,0.98] is one); several give all combinations."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once. [as many as cores, and at least 3 single-threaded ones]")
    ] = None,
) -> None:
    """Trains the same settings with several seeds, and variants of them, and reports what came out with its spread.

    Each run is a process of its own in OUT/[VARIANT/]seed-N. The same command goes on after a kill: finished runs are
    kept and begun ones resumed. Results: OUT/report.json and OUT/report.html.

    Examples:
        envace study quickstart
        envace study quickstart steps=10 --vary responder=rehearsal,simulator,environment,replay --out runs/responders
    """
    from envace.study.page import render
    from envace.study.report import blocks_of, study_report
    from envace.study.runs import Failure, execute, plan, seeds_of
    from envace.training.checkpoint import locked, write_whole
    from envace.training.running import teller

    folder = out or Path("runs") / config.stem
    runs = plan(config, overrides or [], vary or [], seeds_of(seeds), folder)
    # Three seeds on two cores end soonest when all three run: each gets two thirds of a core.
    at_once = jobs or max(3, os.cpu_count() or 1)
    say = teller(typer.echo)
    began = time.monotonic()
    failure = None
    with locked(folder):
        try:
            execute(runs, at_once, say)
        except Failure as error:
            failure = error
        report = study_report(runs)
        report |= {"settings": str(config), "model": runs[0].settings.model}
        report |= _took(folder, time.monotonic() - began, min(at_once, len(runs))) | _versions()
        write_whole(folder / "report.json", json.dumps(report, indent=1, allow_nan=False).encode() + b"\n")
        write_whole(folder / "report.html", render(report, f"EnvACE: {config.stem}").encode())
    _print(blocks_of(report))
    typer.echo(f"report: {folder}/report.html and {folder}/report.json")
    if failure is not None:
        raise failure


class _Took(BaseModel):
    """What a study took so far, as its report has it."""

    wall_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    peak_memory_mb: float = Field(default=0.0, ge=0, allow_inf_nan=False)


def _took(folder: Path, seconds: float, at_once: int) -> dict[str, Any]:
    """Wall-clock seconds over every start of this study, and a bound on its memory: its own, and so many times its largest
    run's."""
    import resource

    held = folder / "report.json"
    earlier = _Took()
    if held.is_file():
        try:
            earlier = _Took.model_validate_json(held.read_bytes())
        except ValidationError:
            typer.echo(f"{held}: damaged, so wall_seconds and peak_memory_mb are counted from this start on")
    own, largest = (
        resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return {
        "wall_seconds": earlier.wall_seconds + seconds,
        "peak_memory_mb": max(own + at_once * largest, earlier.peak_memory_mb),
    }


def _versions() -> dict[str, Any]:
    from importlib.metadata import version
    from platform import python_version

    return {
        "versions": {name: version(name) for name in ("envace", "torch", "transformers")} | {"python": python_version()}
    }


def _print(blocks: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="real worlds, unseen tasks; share solved, mean of the seeds")
    for column in ("variant", "before", "after", "gain, points (seeds)", "held out", "rehearsed = real", "calls out"):
        table.add_column(column, justify="left" if column == "variant" else "right")

    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.3f}"

    for block in blocks:
        gain = block["gain_points"]
        each = ", ".join("–" if value is None else f"{value:+.1f}" for value in gain["per_seed"])
        mean = "–" if gain["mean"] is None else f"{gain['mean']:+.1f}"
        table.add_row(
            " ".join(block["variant"]) or "all",
            share(block["success_before"]),
            share(block["success_after"]),
            f"{mean} ({each})",
            f"{share(block['held_out_before'])} → {share(block['held_out_after'])}",
            f"{share(block['fidelity_before'])} → {share(block['fidelity_after'])}",
            str(block["external_calls_training"]),
        )
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
