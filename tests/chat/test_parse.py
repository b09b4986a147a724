from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace.chat.parse import parse_assistant, parse_execution_result
from envace.chat.text import clean
from envace.errors import UserError
from envace.types import CallRecord, Message, ToolCall
from tests import chatml

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
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 200 + "]" * 200 + "}}</tool_call>",
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


def test_unfinished_thinking_does_nothing():
    parsed = parse_assistant(f"<think>I could {ONE}")
    assert (parsed.error, parsed.message.tool_calls, parsed.message.content) == (None, (), "")
    assert parsed.message.reasoning is not None
    answer = parse_execution_result("<think><execution_result>[1]</execution_result>")
    assert answer.error is not None
    assert answer.error.code == "EMPTY_RESPONSE"


def test_thinking_ends_where_it_is_closed_first():
    say = '<tool_call>{"name": "say", "arguments": {"text": "</think>"}}</tool_call>'
    assert parse_assistant(f"<think>a</think>{say}").message.tool_calls[0].arguments == {"text": "</think>"}
    opened_in_prompt = parse_assistant("a</think>\n<think>b</think>c").message
    assert (opened_in_prompt.reasoning, opened_in_prompt.content) == ("a\nb", "c")


def test_escaped_code_points_are_cleaned_so_that_a_call_can_be_written():
    parsed = parse_assistant(
        r'<tool_call>{"name": "f", "arguments": {"k\ud800": ["\u0000", "\ud83d\ude00"]}}</tool_call>'
    )
    call = parsed.message.tool_calls[0]
    assert call.arguments == {"k\ufffd": ["\ufffd", "\U0001f600"]}
    assert ToolCall.model_validate_json(call.model_dump_json()) == call


def test_the_last_response_counts():
    one, two = "<execution_result>[1]</execution_result>", "<execution_result>[2]</execution_result>"
    assert parse_execution_result(f"{one} or rather {two}").response == [2]
    assert parse_execution_result(f"<execution_result>oh {two}").response == [2]
    quoted = '<execution_result>{"a": "</execution_result>"}</execution_result>'
    assert parse_execution_result(quoted).response == {"a": "</execution_result>"}


LLAMA = SimpleNamespace(chat_template="{{- '\"parameters\": ' }}{{- tool_call.arguments | tojson }}")


def test_bare_json_is_a_call_where_the_template_writes_calls_so():
    text = '<|python_tag|>{"name": "find", "parameters": {"name": "Ada"}}'
    parsed = parse_assistant(text, LLAMA)
    assert parsed.message == Message(role="assistant", tool_calls=(ToolCall(name="find", arguments={"name": "Ada"}),))
    assert parse_assistant('{"name": "find", "parameters": {}}').message.tool_calls == ()
    assert parse_assistant('{"id": 1}', LLAMA).message.content == '{"id": 1}'
    broken = parse_assistant('{"name": "find", "parameters": {', LLAMA)
    assert broken.error is not None
    assert broken.error.code == "INVALID_TOOL_CALL_FORMAT"


DECLARED = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string", "x-regex": r"^(.*?)(?:CALL|$)"},
        "thinking": {"type": "string", "x-regex": r"THINK(.*?)END"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"CALL(.*?)END",
            "items": {"x-parser": "json", "type": "object", "properties": {"function": {}}},
        },
    },
}


def test_a_declared_response_form_is_used():
    tokenizer = chatml.tokenizer()
    tokenizer.response_schema = DECLARED
    nested, plain = (
        '{"function": {"name": "find", "arguments": {"name": "Ada"}}}',
        '{"name": "close", "arguments": "{}"}',
    )
    text = f"On it. CALL{nested}ENDCALL{plain}END"
    parsed = parse_assistant(text, tokenizer)
    assert parsed.error is None
    assert parsed.message.tool_calls == (ToolCall(name="find", arguments={"name": "Ada"}), ToolCall(name="close"))
    for bad in ("CALL{END", "CALL[]END", "CALL{}END", 'CALL{"name": "f", "arguments": NaN}END'):
        error = parse_assistant(bad, tokenizer).error
        assert error is not None
        assert error.code == "INVALID_TOOL_CALL_FORMAT"


@pytest.mark.parametrize("parsed", [None, 5, {"tool_calls": 5}, {"tool_calls": {"name": "f"}}, {"tool_calls": ["f"]}])
def test_whatever_a_declared_form_gives_never_raises(parsed):
    odd = SimpleNamespace(response_schema={"type": "any"}, parse_response=lambda text: parsed)
    assert parse_assistant("x", odd).error is not None


def test_a_declared_form_whose_package_is_missing_is_the_users_to_mend():
    def parse_response(text):
        raise ImportError("jmespath is not installed")

    with pytest.raises(UserError, match="jmespath is not installed"):
        parse_assistant("x", SimpleNamespace(response_schema={"type": "any"}, parse_response=parse_response))


def test_responses():
    assert parse_execution_result('<think>x</think><execution_result>\n{"a": 1}\n</execution_result>').response == {
        "a": 1
    }
    assert parse_execution_result("<execution_result>[]</execution_result>").response == []


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<execution_result>", "</execution_result>"]
)
ODD = st.lists(
    st.one_of(
        PIECES,
        st.text(),
        st.sampled_from(['{"name": "f", "arguments": {}}', '"\\ud800"', "[[", "{", "NaN", "1e999", "\ud800"]),
    )
).map("".join)


@given(ODD)
def test_no_text_raises(text):
    assistant, response = parse_assistant(text), parse_execution_result(text)
    assert (assistant.error is None) or assistant.message.tool_calls == ()
    assert (response.error is None) == isinstance(response.response, dict | list)
    # What was parsed can be written, and read again as it was.
    assert Message.model_validate_json(assistant.message.model_dump_json()) == assistant.message
    record = CallRecord(turn=0, call=ToolCall(name="f"), response=response.response, responder="rehearsal")
    assert CallRecord.model_validate_json(record.model_dump_json()) == record


@given(st.text(st.characters()))
def test_clean_text_encodes(text):
    assert "\x00" not in clean(text)
    clean(text).encode()


def test_clean_replaces_each_refused_character():
    assert clean("a\ud800\udfff\x00\ufdd0\ufffe\U0001ffff\u00e9") == "a" + "\ufffd" * 6 + "\u00e9"
