"""``envace worlds``."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="The built-in executable worlds.", no_args_is_help=True)


@app.command("list")
def list_worlds() -> None:
    """Lists the worlds and their tools."""
    from envace.chat.tools import signature
    from envace.worlds import HELD_OUT, REGISTRY

    for name, world in REGISTRY.items():
        typer.echo(name + (" (held out: never trained on)" if name in HELD_OUT else ""))
        for tool in world.tools:
            typer.echo(f"  {signature(tool)}  {tool.description}")


@app.command("try")
def try_world(
    name: Annotated[str, typer.Argument(help="A world, see `envace worlds list`.")],
    seed: Annotated[int, typer.Option(help="Of the data.")] = 0,
    call: Annotated[
        list[str] | None, typer.Option(help='A call to make, for example: find_customer {"name": "Ada"}')
    ] = None,
) -> None:
    """Calls a world's tools by hand: with --call, or one call a line on standard input (an empty line ends)."""
    from envace.chat.parse import read_json
    from envace.chat.text import clean
    from envace.chat.tools import canonical_json, signature
    from envace.errors import UserError
    from envace.types import ToolCall
    from envace.worlds import REGISTRY
    from envace.worlds.tasks import build_tasks

    task = next(build_tasks(name, 1, seed, "try"))
    assert task.world is not None
    world = REGISTRY[name](task.world.state)

    def answer(text: str) -> str:
        # As a policy's call is read: what no service could be sent is refused or replaced here.
        tool, *rest = clean(text).split(maxsplit=1) or [""]
        try:
            given = read_json(rest[0]) if rest else {}
        except ValueError as error:
            raise UserError(
                f'{text!r}: the arguments are not JSON ({error}); write: tool {{"name": "value"}}'
            ) from None
        if not isinstance(given, dict):
            raise UserError(f"{text!r}: the arguments must be a JSON object")
        return canonical_json(world.call(ToolCall(name=tool, arguments=given)))

    if call:
        for text in call:
            typer.echo(answer(text))
        return
    typer.echo("\n".join(signature(tool) for tool in world.tools))
    typer.echo(canonical_json(task.world.state))
    for line in typer.get_text_stream("stdin", errors="replace"):
        if not line.strip():
            break
        try:
            typer.echo(answer(line.strip()))
        except UserError as error:
            typer.echo(str(error))
