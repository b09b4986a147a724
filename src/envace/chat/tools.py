"""Tool calls as data: their JSON text, their validity against a schema, and the error a bad call gets.

Knows neither tokenizers nor responders.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import referencing.exceptions
from jsonschema.protocols import Validator
from referencing.jsonschema import EMPTY_REGISTRY, specification_with

from envace.errors import UserError
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


_validators: dict[str, Validator] = {}


def validator(schema: dict[str, Any], owner: str) -> Validator:
    """A validator for ``schema``, kept for the next time. It fetches nothing: references must lie in the schema itself.

    Raises:
        UserError: ``schema`` is not a JSON Schema, or refers to what is not there; the message names ``owner``.
    """
    key = canonical_json(schema)
    if key not in _validators:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            where = "/".join(str(part) for part in error.absolute_path) or "the schema"
            raise UserError(f"{owner}: not a JSON Schema: {where}: {error.message}") from None
        whole = specification_with(str(kind.META_SCHEMA["$schema"])).create_resource(schema)
        try:
            _look_up(whole, EMPTY_REGISTRY.resolver_with_root(whole))
        except (referencing.exceptions.Unresolvable, TypeError, ValueError, RecursionError) as fault:
            # The others come from a reference into a string or a number, and from a schema too deep to walk.
            raise UserError(f"{owner}: its schema cannot be applied, mend its $ref: {fault}") from None
        _validators[key] = kind(schema, registry=EMPTY_REGISTRY)
    return _validators[key]


def _look_up(part: Any, resolver: Any) -> None:
    """Every ``$ref`` of a schema resource and of the schemas in it; raises ``Unresolvable``."""
    if isinstance(part.contents, dict) and isinstance(part.contents.get("$ref"), str):
        resolver.lookup(part.contents["$ref"])
    for inner in part.subresources():
        _look_up(inner, resolver.in_subresource(inner))


def schema_error(value: Any, schema: dict[str, Any], owner: str) -> jsonschema.ValidationError | None:
    """What is most wrong with ``value`` by ``schema``; ``None`` if nothing is.

    Raises:
        UserError: as ``validator``; or ``schema`` refers to itself without end.
    """
    try:
        worst: jsonschema.ValidationError | None = jsonschema.exceptions.best_match(
            validator(schema, owner).iter_errors(value)
        )
        return worst
    except (referencing.exceptions.Unresolvable, RecursionError) as fault:
        raise UserError(f"{owner}: its schema cannot be applied, mend its $ref: {fault}") from None


def check_call(call: ToolCall, tools: Sequence[ToolSpec]) -> ParseError | None:
    """Whether ``call`` names one of ``tools`` with arguments that its schema allows; ``None`` if it does.

    Raises:
        UserError: the tool's schema cannot be applied.
    """
    spec = next((tool for tool in tools if tool.name == call.name), None)
    if spec is None:
        names = ", ".join(tool.name for tool in tools) or "none"
        return ParseError(code=TOOL_NOT_AVAILABLE, message=f"no tool {call.name!r}; available: {names}")
    error = schema_error(call.arguments, spec.parameters, f"tool {spec.name!r}")
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
    required = tool.parameters.get("required", [])
    properties = tool.parameters.get("properties", {})
    parts = [f"{name}{'' if name in required else '?'}: {_kind(schema)}" for name, schema in properties.items()]
    return f"{tool.name}({', '.join(parts)})"


def _kind(schema: Any) -> str:
    if not isinstance(schema, dict):  # a schema may also be true or false
        return "any"
    if "enum" in schema:
        return "|".join(value if isinstance(value, str) else canonical_json(value) for value in schema["enum"])
    kind = schema.get("type", "any")
    return kind if isinstance(kind, str) else "|".join(kind)
