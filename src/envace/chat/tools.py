"""Tool calls as data: their JSON text, their validity against a schema, and the error a bad call gets.

Knows neither tokenizers nor responders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from envace.identity import Same
from envace.schemas import schema_error
from envace.types import Frozen, ToolCall, ToolSpec

TOOL_NOT_AVAILABLE = "TOOL_NOT_AVAILABLE"
INVALID_PARAMETERS = "INVALID_PARAMETERS"


class ParseError(Frozen):
    """What was wrong with a generated message or call: one of the published codes, and words for a person."""

    code: str
    message: str


def canonical_json(value: Any) -> str:
    """The one text form of a JSON value in prompts: key order kept, default separators, no escapes for non-ASCII."""
    return json.dumps(value, ensure_ascii=False)


def same_json(left: Any, right: Any) -> bool:
    """Whether two JSON values are the same: 1 equals 1.0, but True is not 1. Key order does not matter."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same_json(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def check_call(call: ToolCall, tools: Sequence[ToolSpec]) -> ParseError | None:
    """Whether ``call`` names one of ``tools`` with arguments that its schema allows; ``None`` if it does."""
    spec = next((tool for tool in tools if tool.name == call.name), None)
    if spec is None:
        names = ", ".join(tool.name for tool in tools) or "none"
        return ParseError(code=TOOL_NOT_AVAILABLE, message=f"no tool {call.name!r}; available: {names}")
    return _refusal(canonical_json(call.arguments), Same(spec))


@lru_cache(maxsize=4096)
def _refusal(arguments: str, same: Same[ToolSpec]) -> ParseError | None:
    """Kept, for a group's episodes make the same calls again and again."""
    error = schema_error(json.loads(arguments), same.value.parameters, f"tool {same.value.name!r}")
    if error is None:
        return None
    where = "/".join(str(part) for part in error.absolute_path)
    return ParseError(code=INVALID_PARAMETERS, message=f"{where}: {error.message}" if where else error.message)


def error_tool_call(code: str, message: str, details: Any = None) -> dict[str, Any]:
    """The response to a call that never reached a tool (reference format: code, message, details)."""
    return {"error_tool_call": {"code": code, "message": message, "details": details}}


def is_error_tool_call(response: Any) -> bool:
    return isinstance(response, dict) and "error_tool_call" in response


def signature(tool: ToolSpec) -> str:
    """One line a model can read at little cost: ``cancel(order_id: string, reason: late|damaged, note?: string)``."""
    required = tool.parameters.get("required")
    parts = []
    for name, schema in tool.parameters.get("properties", {}).items():
        # Draft 3 says of each property whether it is required.
        needed = name in required if isinstance(required, list) else _of(schema, "required") is True
        parts.append(f"{name}{'' if needed else '?'}: {_kind(schema)}")
    return f"{tool.name}({', '.join(parts)})"


def _kind(schema: Any) -> str:
    values = _of(schema, "enum")
    if isinstance(values, list):
        return "|".join(value if isinstance(value, str) else canonical_json(value) for value in values)
    kinds = _of(schema, "type")
    if not isinstance(kinds, list):
        kinds = [kinds]
    return "|".join(kind if isinstance(kind, str) else "any" for kind in kinds)


def _of(schema: Any, word: str) -> Any:
    return schema.get(word) if isinstance(schema, dict) else None  # a schema may also be true or false
