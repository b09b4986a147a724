import json

import pytest

from envace.chat.tools import canonical_json, check_call, error_tool_call, is_error_tool_call, same_json, signature
from envace.types import ToolCall, ToolSpec

TOOL = ToolSpec(
    name="pay",
    parameters={
        "type": "object",
        "properties": {"amount": {"type": "integer"}, "why": {"enum": ["late", "lost"]}},
        "required": ["amount"],
    },
)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ({"name": "pay", "arguments": {"amount": 3}}, None),
        ({"name": "pay", "arguments": {"amount": "3"}}, "INVALID_PARAMETERS"),
        ({"name": "pay", "arguments": {}}, "INVALID_PARAMETERS"),
        ({"name": "pay", "arguments": {"amount": 3, "why": "fun"}}, "INVALID_PARAMETERS"),
        ({"name": "play", "arguments": {"amount": 3}}, "TOOL_NOT_AVAILABLE"),
    ],
)
def test_calls_are_checked_against_the_tools(call, code):
    error = check_call(ToolCall.model_validate(call), [TOOL])
    assert (error.code if error else None) == code


def test_signature():
    assert signature(TOOL) == "pay(amount: integer, why?: late|lost)"


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("1", "1.0", True),
        ("1", "true", False),
        ("0", "false", False),
        ("[1, 2]", "[1, 2]", True),
        ("[1, 2]", "[2, 1]", False),
        ('{"a": 1, "b": [true]}', '{"b": [true], "a": 1}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 1}', '{"a": 1, "b": null}', False),
        ("null", "null", True),
    ],
)
def test_same_json(left, right, same):
    assert same_json(json.loads(left), json.loads(right)) is same


def test_a_reference_within_the_schema_is_followed():
    tool = ToolSpec(name="f", parameters={"properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "null"}}})
    assert check_call(ToolCall(name="f", arguments={"x": None}), [tool]) is None
    assert check_call(ToolCall(name="f", arguments={"x": 1}), [tool]) is not None


def test_signature_of_unusual_schemas():
    properties = {
        "a": True,
        "b": {"type": ["string", "null"]},
        "c": {"enum": ["x", 1, True, None]},
        "d": {"$ref": "#/$defs/d"},
    }
    tool = ToolSpec(
        name="f", parameters={"properties": properties, "required": ["d"], "$defs": {"d": {"type": "string"}}}
    )
    assert signature(tool) == "f(a?: any, b?: string|null, c?: x|1|true|null, d: any)"


def test_signature_of_the_third_draft():
    properties = {"a": {"type": "string", "required": True}, "b": {"type": ["null", {"type": "array"}]}}
    parameters = {"$schema": "http://json-schema.org/draft-03/schema#", "required": True, "properties": properties}
    assert signature(ToolSpec(name="f", parameters=parameters)) == "f(a: string, b?: null|any)"


def test_the_response_to_a_refused_call():
    response = error_tool_call("TOOL_NOT_AVAILABLE", "no such tool", ["find"])
    assert response == {
        "error_tool_call": {"code": "TOOL_NOT_AVAILABLE", "message": "no such tool", "details": ["find"]}
    }
    assert is_error_tool_call(response)
    assert not is_error_tool_call({"error": {"code": "NOT_FOUND"}})
    assert not is_error_tool_call(["error_tool_call"])


def test_canonical_json_keeps_key_order_and_letters():
    assert canonical_json({"b": 1.0, "a": ["Zoë", None]}) == '{"b": 1.0, "a": ["Zoë", null]}'
