"""What an executable world is: a SQLite database in memory, and tools that read and write it.

A world's own errors (not found, already shipped) are responses, as a service gives them. One instance an episode.
"""

from __future__ import annotations

import sqlite3
from typing import Any, ClassVar

from envace.chat.tools import canonical_json, check_call
from envace.errors import UserError
from envace.types import ToolCall, ToolSpec, WorldState


class ServiceError(Exception):
    """A refusal by the service, with the code and words its callers see."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


_COLUMNS = {"TEXT": (str, "text"), "INTEGER": (int, "a whole number"), "REAL": (float, "a number with a point")}


class World:
    """Base of the built-in worlds. A tool named ``x`` is the method ``x``, whose keyword arguments are the tool's.

    Raises:
        UserError: the state does not fit the schema; names table, row and column.
    """

    name: ClassVar[str]
    schema: ClassVar[str]
    tools: ClassVar[tuple[ToolSpec, ...]]

    def __init__(self, state: WorldState) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.row_factory = sqlite3.Row
        self._database.executescript(self.schema)
        tables = {row["name"] for row in self.all("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table, rows in state.items():
            if table not in tables:
                raise UserError(f"{table}: world {self.name!r} has no such table; it has {', '.join(sorted(tables))}")
            kinds = {column["name"]: column["type"] for column in self.all(f"PRAGMA table_info({table})")}
            for position, row in enumerate(rows):
                self._fill(table, kinds, row, f"{table}.{position}")
        # A refused call rolls back to here at most.
        self._database.commit()

    def _fill(self, table: str, kinds: dict[str, str], row: dict[str, Any], where: str) -> None:
        """Adds a row. It must be what a snapshot gives back: success is decided by comparing them."""
        if row.keys() != kinds.keys():
            raise UserError(f"{where}: it has the columns {', '.join(row) or 'none'}, and needs {', '.join(kinds)}")
        for column, value in row.items():
            wanted, said = _COLUMNS[kinds[column]]
            if type(value) is not wanted:
                raise UserError(f"{where}.{column}: it must be {said}, not {canonical_json(value)[:80]}")
        columns, places = ", ".join(row), ", ".join("?" * len(row))
        try:
            self._database.execute(f"INSERT INTO {table} ({columns}) VALUES ({places})", list(row.values()))
        except (sqlite3.Error, OverflowError) as fault:  # a key of another row, a number of more than 64 bits
            raise UserError(f"{where}: {fault}") from None

    def call(self, call: ToolCall) -> dict[str, Any]:
        """The response to a call; a bad call or a refusal is ``{"error": {"code", "message"}}``, and changes nothing."""
        refused = check_call(call, self.tools)
        if refused is not None:
            return {"error": {"code": refused.code, "message": refused.message}}
        try:
            answer: dict[str, Any] = getattr(self, call.name)(**call.arguments)
        except ServiceError as error:
            self._database.rollback()
            return {"error": {"code": error.code, "message": str(error)}}
        self._database.commit()
        return answer

    def snapshot(self) -> WorldState:
        """Every row of every table, ordered by its columns."""
        tables = self.all("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        return {table["name"]: self.all(f"SELECT * FROM {table['name']} ORDER BY 1") for table in tables}

    def close(self) -> None:
        self._database.close()

    def all(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in self._database.execute(sql, values)]

    def one(self, what: str, sql: str, *values: Any) -> dict[str, Any]:
        """The only row; ``what`` names it in the error when there is none, or several."""
        rows = self.all(sql, *values)
        if not rows:
            raise ServiceError("NOT_FOUND", f"no {what} {values[0]}")
        if len(rows) > 1:
            raise ServiceError("AMBIGUOUS", f"{len(rows)} of {what} {values[0]}")
        return rows[0]

    def write(self, sql: str, *values: Any) -> None:
        self._database.execute(sql, values)


def tool(name: str, description: str, returns: tuple[str, ...], /, **parameters: dict[str, Any]) -> ToolSpec:
    """A tool whose parameters are all required. ``returns`` names the fields of a successful response."""
    return ToolSpec(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": parameters,
            "required": list(parameters),
            "additionalProperties": False,
        },
        returns={
            "type": "object",
            "oneOf": [{"required": list(returns)}, {"required": ["error"]}],
            "properties": {"error": {"type": "object", "required": ["code", "message"]}},
        },
    )


def text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def whole(description: str, low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "description": description, "minimum": low, "maximum": high}


def choice(description: str, *values: str) -> dict[str, Any]:
    return {"type": "string", "description": description, "enum": list(values)}
