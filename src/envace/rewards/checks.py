"""Rule checks: pure functions from one user turn of an episode to met or not met."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envace.chat.tools import canonical_json, same_json
from envace.errors import UserError
from envace.schemas import schema_error
from envace.types import (
    AnyValue,
    ArgumentMatch,
    CallMade,
    CallNotMade,
    CallPattern,
    CallRecord,
    CallsInOrder,
    Check,
    Equals,
    JudgeCheck,
    Near,
    OneOf,
    OnlyCalls,
    Reference,
    Regex,
    ReplyContains,
    ReplyMatches,
    ResponseConsistent,
    ResponseValid,
    ToolCall,
    ToolSpec,
)


@dataclass(frozen=True)
class TurnView:
    """What happened in one user turn. ``reply`` is its last assistant text."""

    calls: Sequence[CallRecord]
    reply: str
    tools: Sequence[ToolSpec] = ()
    references: Sequence[Reference] = ()


def check_met(check: Check, turn: TurnView) -> bool:
    """Whether a rule check is met in ``turn``. A call that was refused or got a malformed response does not count as made,
    and its response is not valid; a world's own error (not found …) is a response like any other.

    Raises:
        TypeError: ``check`` is for a judge.
        UserError: ``response_valid`` for a tool that has no ``returns`` schema.
    """
    made = [record.call for record in turn.calls if record.error is None]
    match check:
        case CallMade():
            return any(matches(check.call, call) for call in made)
        case CallNotMade():
            return not any(matches(check.call, call) for call in made)
        case CallsInOrder():
            position = 0
            for call in made:
                if position < len(check.calls) and matches(check.calls[position], call):
                    position += 1
            return position == len(check.calls)
        case OnlyCalls():
            watched = [call for call in made if call.name in check.names]
            return all(any(matches(pattern, call) for pattern in check.allowed) for call in watched)
        case ReplyContains():
            return all(holds_fact(turn.reply, fact) for fact in check.facts)
        case ReplyMatches():
            return re.search(check.pattern, turn.reply) is not None
        case ResponseValid():
            return _responses_valid(check, turn)
        case ResponseConsistent():
            return all(_agrees_with_records(record, turn.references) for record in turn.calls)
        case JudgeCheck():
            raise TypeError("a judge decides this check")


def matches(pattern: CallPattern, call: ToolCall) -> bool:
    """Whether ``call`` has the pattern's name and every argument it lists."""
    return pattern.name == call.name and all(
        name in call.arguments and argument_matches(expected, call.arguments[name])
        for name, expected in pattern.arguments.items()
    )


def argument_matches(expected: ArgumentMatch, value: Any) -> bool:
    """Values compare as JSON: 1 is 1.0, true is not 1, "1" is not 1.

    ``number`` also takes a JSON number written as a string (models quote numbers), within the tolerance up to rounding.
    ``regex`` sees a value that is no string as its JSON text.
    """
    match expected:
        case Equals():
            return same_json(expected.equals, value)
        case OneOf():
            return any(same_json(choice, value) for choice in expected.one_of)
        case Near():
            number = _number(value)
            return number is not None and _near(number, expected.number, expected.tolerance)
        case Regex():
            text = value if isinstance(value, str) else canonical_json(value)
            return re.fullmatch(expected.regex, text) is not None
        case AnyValue():
            return True


_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def _number(value: Any) -> float | None:
    """A finite number, or nothing: whatever a policy writes here is an unmet check, never a fault."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and _JSON_NUMBER.fullmatch(value) is None:
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond floats
        return None
    return number if math.isfinite(number) else None


def _near(number: float, wanted: float, tolerance: float) -> bool:
    """|number - wanted| <= tolerance, forgiving the rounding of the difference: 1.1 is within 0.1 of 1.

    Without a tolerance it is equality, for the number may be a long identifier.
    """
    rounding = 4 * math.ulp(max(abs(number), abs(wanted))) if tolerance else 0.0
    return abs(number - wanted) <= tolerance + rounding


def holds_fact(text: str, fact: str) -> bool:
    """Whether ``text`` holds ``fact`` as whole words: 17 is not in O175, nor in 1.17.

    Case, the kind and amount of white space, and how accents are composed do not matter.
    """
    words = r"\s+".join(re.escape(word) for word in _folded(fact).split())
    return re.search(rf"(?<!\w)(?<!\d[.,]){words}(?!\w)(?![.,]\d)", _folded(text)) is not None


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def _responses_valid(check: ResponseValid, turn: TurnView) -> bool:
    schemas = {tool.name: tool.returns for tool in turn.tools}
    if check.tool is not None and schemas.get(check.tool) is None:
        raise UserError(f"check response_valid: tool {check.tool!r} has no `returns` schema to validate against")
    for record in turn.calls:
        if check.tool not in (None, record.call.name):
            continue
        if record.error is not None:
            return False
        schema = schemas.get(record.call.name)
        if schema is not None and schema_error(record.response, schema, f"tool {record.call.name!r}, returns"):
            return False
    return True


def _agrees_with_records(record: CallRecord, references: Sequence[Reference]) -> bool:
    recorded = [
        reference.response
        for reference in references
        if reference.call.name == record.call.name and same_json(reference.call.arguments, record.call.arguments)
    ]
    return not recorded or any(same_json(response, record.response) for response in recorded)
