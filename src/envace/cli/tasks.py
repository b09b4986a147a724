"""``envace tasks``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Build, read and validate task files (JSONL, one task a line).", no_args_is_help=True)


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
    from envace.data.tasks import write_tasks
    from envace.worlds.tasks import build_tasks

    built = (task for world in worlds.split(",") for task in build_tasks(world, count, seed, split))
    typer.echo(f"{write_tasks(out, built)} tasks -> {out}")


@app.command()
def validate(file: Annotated[Path, typer.Argument(help="A task file.")]) -> None:
    """Checks every line, and that every task could be scored."""
    from envace.data.tasks import read_tasks
    from envace.rewards.scorer import require_scorable

    count = 0
    for task in read_tasks(file):
        require_scorable([task])
        count += 1
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
    from envace.types import Message, Task

    found: Task | None = next((task for task in read_tasks(file) if task_id in (None, task.id)), None)
    if found is None:
        raise UserError(f"{file}: no task {task_id!r}" if task_id else f"{file}: it holds no task")

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
