"""The command line: one file a command. What the user can mend is one message and exit code 2, never a traceback."""

from __future__ import annotations

import sys

import typer
from pydantic import ValidationError

from envace.cli import evaluate, sft, study, tasks, train, worlds
from envace.errors import UserError

app = typer.Typer(
    name="envace",
    help="Train tool-using agents by world rehearsal: one policy acts and plays the environment, and none is built.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train.train)
app.command("study")(study.study)
app.command("eval")(evaluate.evaluate)
app.command("sft")(sft.sft)
app.add_typer(tasks.app, name="tasks")
app.add_typer(worlds.app, name="worlds")


def main() -> None:
    """Entry point of the ``envace`` command."""
    try:
        app()
    except UserError as error:
        print(f"envace: {error}", file=sys.stderr)
        sys.exit(2)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([error.title, *map(str, first["loc"])])
        print(f"envace: {where}: {first['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        # A full disk, a read-only folder, a file that is no folder: whole files only are written, so nothing is lost.
        where = f"{error.filename}: " if error.filename else ""
        print(f"envace: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("envace: stopped", file=sys.stderr)
        sys.exit(130)
