import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace.chat.parse import parse_assistant, parse_execution_result
from envace.chat.text import clean
from envace.chat.tools import check_call, same_json, signature
from envace.errors import UserError
from envace.types import ToolCall, ToolSpec

ONE = '<tool_call>\n{"name": "find", "arguments": {"name": "Ada"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "close", "arguments": {}}\n</tool_call>'


def test_text_calls_and_reasoning():
    parsed = parse_assistant(f"<think>\nhm\n</think>\n\nOn it.\n{ONE}\n{TWO}")
    assert parsed.error is None
    assert (parsed.message.reasoning, parsed.message.content) == ("hm", "On it.")
    assert parsed.message.tool_calls == (ToolCall(name="find", arguments={"name": "Ada"}), ToolCall(name="close"))
    assert parse_assistant("Just text.").message.content == "Just text."


def test_a_call_inside_reasoning_is_not_made():
    assert parse_assistant(f"<think>{ONE}</think>done").message.tool_calls == ()


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{bad}</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        "<tool_call>[]</tool_call>",
        ONE + '<tool_call>{"name": "f", "arguments": {}}',
        ONE + "</tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_one_bad_block_makes_the_message_an_error(text):
    parsed = parse_assistant(text)
    assert parsed.error is not None
    assert parsed.error.code == "INVALID_TOOL_CALL_FORMAT"
    assert parsed.message.tool_calls == ()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "EMPTY_RESPONSE"),
        ("<think>x</think>  ", "EMPTY_RESPONSE"),
        ("hello", "NO_EXECUTION_RESULT_TAG_FOUND"),
        ("<execution_result>{}", "EXECUTION_RESULT_TAG_MALFORMED"),
        ("{}</execution_result>", "EXECUTION_RESULT_TAG_MALFORMED"),
        ("<execution_result>{bad}</execution_result>", "JSON_DECODE_ERROR"),
        ("<execution_result></execution_result>", "JSON_DECODE_ERROR"),
        ("<execution_result>{}</execution_result>", "INVALID_EXECUTION_RESULT_TYPE"),
        ("<execution_result>3</execution_result>", "INVALID_EXECUTION_RESULT_TYPE"),
        ("<execution_result>null</execution_result>", "INVALID_EXECUTION_RESULT_TYPE"),
    ],
)
def test_malformed_responses_have_the_published_codes(text, code):
    parsed = parse_execution_result(text)
    assert parsed.error is not None
    assert parsed.error.code == code


def test_responses():
    assert parse_execution_result('<think>x</think><execution_result>\n{"a": 1}\n</execution_result>').response == {
        "a": 1
    }
    assert parse_execution_result("<execution_result>[]</execution_result>").response == []


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<execution_result>", "</execution_result>"]
)
ODD = st.lists(
    st.one_of(PIECES, st.text(), st.sampled_from(['{"name": "f", "arguments": {}}', "{", "NaN", "\ud800"]))
).map("".join)


@given(ODD)
def test_no_text_raises(text):
    assistant, response = parse_assistant(text), parse_execution_result(text)
    assert (assistant.error is None) or assistant.message.tool_calls == ()
    assert (response.error is None) == isinstance(response.response, dict | list)


@given(st.text(st.characters()))
def test_clean_text_encodes(text):
    assert "\x00" not in clean(text)
    clean(text).encode()


def test_clean_replaces_each_refused_character():
    assert clean("a\ud800\udfff\x00\ufdd0\ufffe\U0001ffff\u00e9") == "a" + "\ufffd" * 6 + "\u00e9"


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


def test_a_schema_that_is_none_is_named():
    with pytest.raises(UserError, match="tool 'bad': not a JSON Schema"):
        check_call(ToolCall(name="bad"), [ToolSpec(name="bad", parameters={"type": "objekt"})])


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
