"""Task files: JSONL, one task a line (``envace tasks schema`` prints the JSON Schema)."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from envace.errors import UserError
from envace.rewards.scorer import require_scorable
from envace.strict_json import parse_json
from envace.types import Task
from envace.worlds.environment import require_world

Value = TypeVar("Value", bound=BaseModel)


def describe(error: ValidationError) -> str:
    """The first thing wrong: field and reason."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    return f"{field}: {reason}" if field else reason


def read_values(path: Path, kind: type[Value], what: str) -> Iterator[tuple[int, Value]]:
    """The values of a JSONL file (``.gz`` or plain), each with the number of its line. ``path`` may be a stream.

    Raises:
        UserError: the file cannot be read or holds nothing, or a line is no such value; names file, line and field.
    """
    number = 0
    for number, line in _lines(path, what):
        try:
            value = kind.model_validate_json(line)
            parse_json(line)  # pydantic takes the last of two equal keys
        except ValidationError as error:
            raise UserError(f"{path}, line {number}: {describe(error)}") from None
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        yield number, value
    if not number:
        raise UserError(f"{path}: it holds no {what}")


def _lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
    """Numbered lines that hold something."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
    except FileNotFoundError:
        raise UserError(f"{path}: no such file of {what}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder, not a file of {what}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number}: not a JSONL file of {what}: {error}") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: damaged after line {number}, or not gzip: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_tasks(path: Path, scorable: bool = False) -> Iterator[Task]:
    """Tasks of a file.

    Args:
        scorable: each must be one that can be scored without a judge.

    Raises:
        UserError: as ``read_values``; or an id comes twice, a task does not fit its world or cannot be scored.
    """
    seen: dict[str, int] = {}
    for number, task in read_values(path, Task, "tasks"):
        if task.id in seen:
            raise UserError(f"{path}, line {number}: id: {task.id!r} was used on line {seen[task.id]}")
        seen[task.id] = number
        try:
            require_world(task)
            if scorable:
                require_scorable([task])
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
        yield task


def write_tasks(path: Path, tasks: Iterable[Task]) -> int:
    """Writes tasks as they come, one a line, and returns how many. An older file stays until the new one is whole.

    Raises:
        UserError: the file cannot be written.
    """
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.exists() and not path.is_file()  # a pipe or a device is written to, not replaced
        whole = path if stream else path.resolve()  # a link stays one
        partial = path if stream else whole.with_name(whole.name + ".partial")
        try:
            with partial.open("wb") as raw:
                with (
                    gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else nullcontext(raw) as file
                ):
                    for task in tasks:
                        file.write(task.model_dump_json().encode() + b"\n")
                        count += 1
                raw.flush()
                if not stream:
                    os.fsync(raw.fileno())
            if not stream:
                partial.replace(whole)
        finally:
            if not stream:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
    return count


def task_schema() -> dict[str, Any]:
    """The JSON Schema of one line of a task file."""
    return Task.model_json_schema()
