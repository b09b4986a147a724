"""From sampled text to a message or a response. Malformed text gives a typed error, never an exception."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from envace.chat.text import clean
from envace.chat.tools import ParseError
from envace.types import Message, ToolCall

INVALID_TOOL_CALL_FORMAT = "INVALID_TOOL_CALL_FORMAT"
EMPTY_RESPONSE = "EMPTY_RESPONSE"
NO_EXECUTION_RESULT_TAG_FOUND = "NO_EXECUTION_RESULT_TAG_FOUND"
EXECUTION_RESULT_TAG_MALFORMED = "EXECUTION_RESULT_TAG_MALFORMED"
JSON_DECODE_ERROR = "JSON_DECODE_ERROR"
INVALID_EXECUTION_RESULT_TYPE = "INVALID_EXECUTION_RESULT_TYPE"

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<execution_result>(.*?)</execution_result>", re.DOTALL)


@dataclass(frozen=True)
class ParsedAssistant:
    message: Message
    error: ParseError | None = None


@dataclass(frozen=True)
class ParsedResponse:
    response: Any = None
    error: ParseError | None = None


def parse_assistant(text: str, tokenizer: Any = None) -> ParsedAssistant:
    """The assistant message in ``text``: reasoning, content and tool calls.

    Reads the Hermes/Qwen form, or the form that ``tokenizer`` declares in its ``response_schema``. One bad block makes the
    whole message an error (code ``INVALID_TOOL_CALL_FORMAT``), as published.
    """
    text = clean(text)
    if tokenizer is not None and getattr(tokenizer, "response_schema", None):
        return _parse_declared(text, tokenizer)
    reasoning, body = split_reasoning(text)
    content = _CALL.sub("", body)
    if "<tool_call>" in content or "</tool_call>" in content:
        return _bad(text, "a tool_call tag without its partner")
    calls = []
    for block in _CALL.findall(body):
        try:
            data = json.loads(block)
        except (ValueError, RecursionError) as error:
            return _bad(text, f"the block is not JSON: {error}")
        call = _call(data)
        if isinstance(call, str):
            return _bad(text, call)
        calls.append(call)
    return ParsedAssistant(
        Message(role="assistant", content=content.strip(), reasoning=reasoning, tool_calls=tuple(calls))
    )


def split_reasoning(text: str) -> tuple[str | None, str]:
    """Thinking before ``</think>`` and what follows it. Some templates open the block in the prompt."""
    head, mark, tail = text.rpartition("</think>")
    if not mark:
        return None, text
    return head.removeprefix("\n").replace("<think>", "", 1).strip() or None, tail


def _call(data: Any) -> ToolCall | str:
    """A call, or what is wrong with it."""
    if not isinstance(data, dict):
        return "a call must be a JSON object"
    if not isinstance(data.get("name"), str) or not data["name"]:
        return "a call without a name"
    arguments = data.get("arguments", data.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "arguments are not JSON"
    if not isinstance(arguments, dict):
        return "a call without an arguments object"
    try:
        return ToolCall(name=data["name"], arguments=arguments)
    except ValidationError as error:
        return error.errors()[0]["msg"]


def _parse_declared(text: str, tokenizer: Any) -> ParsedAssistant:
    # transformers applies the declared regular expressions and JSON parsers; any failure of theirs is the text's.
    try:
        parsed = tokenizer.parse_response(text)
    except Exception as error:
        return _bad(text, f"does not fit the declared response form: {error}")
    if not isinstance(parsed, dict):
        return _bad(text, "does not fit the declared response form")
    calls = []
    for item in parsed.get("tool_calls") or []:
        call = _call(item.get("function", item) if isinstance(item, dict) else item)
        if isinstance(call, str):
            return _bad(text, call)
        calls.append(call)
    reasoning = parsed.get("reasoning_content") or parsed.get("thinking") or parsed.get("reasoning")
    content = parsed.get("content")
    return ParsedAssistant(
        Message(
            role="assistant",
            content=content if isinstance(content, str) else "",
            reasoning=reasoning if isinstance(reasoning, str) else None,
            tool_calls=tuple(calls),
        )
    )


def _bad(text: str, reason: str) -> ParsedAssistant:
    message = Message(role="assistant", content=text)
    return ParsedAssistant(message, ParseError(code=INVALID_TOOL_CALL_FORMAT, message=reason))


def parse_execution_result(text: str) -> ParsedResponse:
    """The JSON in the last ``<execution_result>`` block, after optional thinking: a non-empty object, or an array."""
    _, body = split_reasoning(clean(text))
    if not body.strip():
        return _no_response(EMPTY_RESPONSE, "nothing was generated")
    blocks = _RESULT.findall(body)
    if not blocks:
        if "<execution_result>" in body or "</execution_result>" in body:
            return _no_response(EXECUTION_RESULT_TAG_MALFORMED, "an execution_result tag without its partner")
        return _no_response(NO_EXECUTION_RESULT_TAG_FOUND, "no execution_result block")
    try:
        value = json.loads(blocks[-1])
    except (ValueError, RecursionError) as error:
        return _no_response(JSON_DECODE_ERROR, f"the block is not JSON: {error}")
    if not isinstance(value, list) and not (isinstance(value, dict) and value):
        return _no_response(INVALID_EXECUTION_RESULT_TYPE, "neither an array nor an object that holds something")
    return ParsedResponse(value)


def _no_response(code: str, message: str) -> ParsedResponse:
    return ParsedResponse(error=ParseError(code=code, message=message))
