"""Task files: JSONL, one task a line (``envace tasks schema`` prints the JSON Schema)."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envace.chat.tools import validator
from envace.errors import UserError
from envace.types import Task


def describe(error: ValidationError) -> str:
    """The first thing wrong: field and reason."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    return f"{field}: {reason}" if field else reason


def read_lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a JSONL file (``.gz`` or plain) that hold something.

    Raises:
        UserError: the file is missing or is not text.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file of {what}")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise UserError(f"{path}: not a JSONL file of {what}: {error}") from None


def read_tasks(path: Path) -> Iterator[Task]:
    """Tasks of a file.

    Raises:
        UserError: a line is not a task, a tool's schema is none, or an id comes twice; names file, line and field.
    """
    seen: dict[str, int] = {}
    for number, line in read_lines(path, "tasks"):
        try:
            task = Task.model_validate_json(line)
        except ValidationError as error:
            raise UserError(f"{path}, line {number}: {describe(error)}") from None
        if task.id in seen:
            raise UserError(f"{path}, line {number}: id: {task.id!r} was used on line {seen[task.id]}")
        seen[task.id] = number
        for place, tool in enumerate(task.tools):
            for field, schema in (("parameters", tool.parameters), ("returns", tool.returns)):
                if schema is not None:
                    validator(schema, f"{path}, line {number}: tools.{place}.{field} ({tool.name})")
        yield task


def write_tasks(path: Path, tasks: Iterable[Task]) -> int:
    """Writes tasks, one a line, and returns how many. They are made first: a fault in making them costs no older file.

    Raises:
        UserError: the file cannot be written.
    """
    lines = [task.model_dump_json() + "\n" for task in tasks]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            gzip.open(path, "wt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open("w", encoding="utf-8") as file
        ):
            file.writelines(lines)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
    return len(lines)


def task_schema() -> dict[str, Any]:
    """The JSON Schema of one line of a task file."""
    return Task.model_json_schema()
