"""``envace tasks``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from envace.types import Task

app = typer.Typer(help="Build, read and validate task files (JSONL, one task a line).", no_args_is_help=True)
TOLD_EVERY = 5.0  # seconds of a long work


@app.command()
def build(
    out: Annotated[Path, typer.Argument(help="File to write (.jsonl or .jsonl.gz).")],
    worlds: Annotated[
        str, typer.Option(help="Built-in worlds, separated by commas.")
    ] = "orders,bank,calendar,library,desk",
    count: Annotated[int, typer.Option(min=1, help="Tasks a world.")] = 100,
    seed: Annotated[int, typer.Option()] = 0,
    split: Annotated[str, typer.Option(help="Splits share no task.")] = "train",
) -> None:
    """Builds tasks in the built-in worlds; every reference solution is executed there."""
    import time

    from envace.data.tasks import write_tasks
    from envace.worlds import worlds_of
    from envace.worlds.tasks import build_tasks

    names = worlds_of(worlds)

    def built() -> Iterator[Task]:
        told = time.monotonic()
        for place, world in enumerate(names):
            for number, task in enumerate(build_tasks(world, count, seed, split), 1):
                yield task
                if time.monotonic() - told >= TOLD_EVERY:
                    typer.echo(f"{place * count + number} of {len(names) * count} tasks", err=True)
                    told = time.monotonic()

    typer.echo(f"{write_tasks(out, built())} tasks -> {out}")


@app.command()
def validate(file: Annotated[Path, typer.Argument(help="A task file.")]) -> None:
    """Checks every line, and that every task could be scored."""
    from envace.data.tasks import read_tasks

    count = sum(1 for _ in read_tasks(file, scorable=True))
    typer.echo(f"{file}: {count} tasks, all valid")


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A task file.")],
    task_id: Annotated[str | None, typer.Option("--id", help="Show this task; without it, the first.")] = None,
) -> None:
    """Prints a task: what is said, its tools, checks, records and reference solution."""
    from envace.chat.tools import canonical_json, signature
    from envace.data.tasks import read_tasks
    from envace.errors import UserError
    from envace.roles.rehearse import call_text
    from envace.types import Message

    found: Task | None = next((task for task in read_tasks(file) if task_id in (None, task.id)), None)
    if found is None:
        raise UserError(f"{file}: no task {task_id!r}")

    def line(message: Message) -> str:
        calls = "".join(f"\n    calls {call_text(call)}" for call in message.tool_calls)
        return f"  {message.role}: {message.content}{calls}"

    typer.echo(f"task {found.id} {canonical_json(found.metadata)}")
    typer.echo("\n".join(map(line, found.messages)))
    for later in found.user_turns:
        typer.echo(f"  user, later: {later}")
    typer.echo("tools\n" + "\n".join(f"  {signature(tool)}" for tool in found.tools))
    for turn, checks in enumerate(found.checks):
        typer.echo(f"checks of turn {turn}\n" + "\n".join(f"  {check.model_dump_json()}" for check in checks))
    typer.echo("records")
    for known in found.references:
        typer.echo(f"  {call_text(known.call)} -> {canonical_json(known.response)}")
    typer.echo("solution\n" + "\n".join(map(line, found.solution)))


@app.command()
def schema() -> None:
    """Prints the JSON Schema of one line of a task file."""
    import json

    from envace.data.tasks import task_schema

    typer.echo(json.dumps(task_schema(), indent=1))
