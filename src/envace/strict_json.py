"""JSON that people write: what could not be written back as it was read is refused, not mended."""

from __future__ import annotations

import json
import math
import re
from typing import Any

DEPTH = 100  # of nesting; far more than a tool's data has, far less than serializers refuse
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str) -> Any:
    """The JSON value in ``text``, in which no object names a key twice.

    Raises:
        ValueError: there is none.
    """
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH} deep") from None


def json_value(value: Any, depth: int = DEPTH) -> Any:
    """``value``, if it can be written as JSON: finite numbers, whole characters, no endless nesting.

    Raises:
        ValueError: it cannot.
    """
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise ValueError(f"half a character (a lone surrogate) in {value[:40]!r}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a number in JSON")
    elif isinstance(value, dict | list | tuple):
        if not depth:
            raise ValueError(f"nested more than {DEPTH} deep")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise ValueError(f"the key {key!r} is not text")
                json_value(key)
        for inner in value.values() if isinstance(value, dict) else value:
            json_value(inner, depth - 1)
    elif not (value is None or isinstance(value, int)):
        raise ValueError(f"a value of type {type(value).__name__} is not JSON")
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given more than once")
    return made
