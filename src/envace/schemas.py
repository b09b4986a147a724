"""JSON Schemas: whether one can be applied, and what it says of a value. Nothing is ever fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

import jsonschema
from jsonschema.protocols import Validator
from referencing.jsonschema import EMPTY_REGISTRY, specification_with

from envace.errors import UserError

LATEST = "https://json-schema.org/draft/2020-12/schema"
_UNCHECKED = (RecursionError, OverflowError)  # a schema that is kept ends, so the value is too deep or too large


def compiles(pattern: str) -> str:
    """``pattern``, if it is a regular expression.

    Raises:
        ValueError: it is none.
    """
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as fault:
        raise ValueError(f"{pattern[:80]!r} is not a regular expression: {fault}") from None
    return pattern


def validator(schema: dict[str, Any]) -> Validator:
    """A validator for ``schema``, kept for the next time. References must lie in the schema itself.

    Raises:
        ValueError: ``schema`` is of no known draft, is not a JSON Schema, has a reference that leads nowhere or back to
            itself, or a pattern that is no regular expression.
    """
    return _validator(json.dumps(schema))


@lru_cache(maxsize=4096)
def _validator(text: str) -> Validator:
    schema = json.loads(text)
    draft = schema.get("$schema", LATEST)
    try:
        kind = jsonschema.validators.validator_for({"$schema": draft}, default=None)  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError):  # what is no text, or no URI
        kind = None
    if kind is None:
        raise ValueError(f"$schema: {draft!r} is no draft of JSON Schema known here; leave it out or write {LATEST}")
    try:
        _check(kind, schema)
        root = _resource(kind, schema)
        applied: dict[int, list[int]] = {}
        _walk(kind, root, EMPTY_REGISTRY.resolver_with_root(root), applied)
        TopologicalSorter(applied).prepare()
    except CycleError:
        raise ValueError("its schema cannot be applied, mend its $ref: one leads back to itself without end") from None
    except (RecursionError, OverflowError) as fault:  # the latter by a regular expression
        raise ValueError(f"its schema cannot be applied: {fault}") from None
    return kind(schema, registry=EMPTY_REGISTRY)


def _check(kind: type[Validator], schema: Any) -> None:
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = "/".join(str(part) for part in error.absolute_path) or "the schema"
        raise ValueError(f"not a JSON Schema: {where}: {error.message[:200]}") from None


def _resource(kind: type[Validator], schema: Any) -> Any:
    return specification_with(str(kind.META_SCHEMA["$schema"])).create_resource(schema)


def _walk(kind: type[Validator], part: Any, resolver: Any, applied: dict[int, list[int]]) -> None:
    """Visits a schema, the schemas in it and those it refers to; notes which others apply to the same value as each."""
    schema = part.contents
    if not isinstance(schema, dict) or id(schema) in applied:
        return
    same_value = list(_applied_with(schema))
    applied[id(schema)] = [id(other) for other in same_value]
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        compiles(pattern)
    inner = [(one, resolver.in_subresource(one)) for one in part.subresources()]
    inner += [(_resource(kind, one), resolver) for one in same_value]  # old drafts' subresources lack some
    for one, where in inner:
        _walk(kind, one, where, applied)
    for word in ("$ref", "$dynamicRef", "$recursiveRef"):
        if not isinstance(schema.get(word), str):
            continue
        try:
            target = resolver.lookup(schema[word])
        except Exception:  # there is nothing, it leads into a string, it is no URI: each fails in its own way
            raise ValueError(f"its schema cannot be applied, mend its {word}: {schema[word]!r} leads nowhere") from None
        if id(target.contents) not in applied:
            _check(kind, target.contents)  # it may stand where no schema is looked for
        applied[id(schema)].append(id(target.contents))
        _walk(kind, _resource(kind, target.contents), target.resolver, applied)


def _applied_with(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas in ``schema`` that apply to the very value it applies to."""
    for word in ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "extends", "type", "disallow"):
        held = schema.get(word)
        yield from (one for one in (held if isinstance(held, list) else [held]) if isinstance(one, dict))
    for word in ("dependentSchemas", "dependencies"):
        yield from (one for one in schema.get(word, {}).values() if isinstance(one, dict))


def schema_error(value: Any, schema: dict[str, Any], owner: str) -> jsonschema.ValidationError | None:
    """What is most wrong with ``value`` by ``schema``; ``None`` if nothing is.

    Raises:
        UserError: as ``validator``; the message names ``owner``.
    """
    try:
        rules = validator(schema)
    except ValueError as fault:
        raise UserError(f"{owner}: {fault}") from None
    try:
        worst: jsonschema.ValidationError | None = jsonschema.exceptions.best_match(rules.iter_errors(value))
        return worst
    except (
        RecursionError,
        OverflowError,
    ) as fault:  # the schema ends, so it is the value that is too deep or too large
        return jsonschema.ValidationError(f"too deep or too large to be checked: {fault}")


def argument_refusal(name: str, values: tuple[Any, ...] | None, schema: dict[str, Any]) -> str | None:
    """Why ``schema`` allows no call whose argument ``name`` is one of ``values`` (``None``: anything), or ``None``.

    It looks at what ``schema`` says of the argument itself, whatever the others are.

    Raises:
        ValueError: as ``validator``.
    """
    rules, reasons = validator(schema), []
    for value in (None,) if values is None else values:
        try:
            errors = [
                error
                for error in rules.iter_errors({name: value})
                if error.absolute_schema_path[0] in ("properties", "patternProperties", "additionalProperties")
                and (values is not None or list(error.absolute_schema_path) == ["additionalProperties"])
            ]
        except _UNCHECKED:
            return None
        if not errors:
            return None
        reasons.append(errors[0].message[:200])
    return reasons[0]
