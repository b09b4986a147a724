"""From sampled text to a message or a response. Malformed text gives a typed error, never an exception."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from envace.chat.text import clean
from envace.chat.tools import ParseError
from envace.errors import UserError
from envace.strict_json import DEPTH
from envace.types import Message, ToolCall

INVALID_TOOL_CALL_FORMAT = "INVALID_TOOL_CALL_FORMAT"
EMPTY_RESPONSE = "EMPTY_RESPONSE"
NO_EXECUTION_RESULT_TAG_FOUND = "NO_EXECUTION_RESULT_TAG_FOUND"
EXECUTION_RESULT_TAG_MALFORMED = "EXECUTION_RESULT_TAG_MALFORMED"
JSON_DECODE_ERROR = "JSON_DECODE_ERROR"
INVALID_EXECUTION_RESULT_TYPE = "INVALID_EXECUTION_RESULT_TYPE"

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


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

    Reads the Hermes/Qwen form, the form that ``tokenizer`` declares in its ``response_schema``, or Llama 3's bare JSON
    where its template writes that. One bad block makes the whole message an error (code ``INVALID_TOOL_CALL_FORMAT``), as
    published.

    Raises:
        UserError: the declared form needs a package that is not installed.
    """
    text = clean(text)
    if tokenizer is not None and getattr(tokenizer, "response_schema", None):
        return _parse_declared(text, tokenizer)
    reasoning, body = split_reasoning(text)
    content = _CALL.sub("", body)
    if "<tool_call>" in content or "</tool_call>" in content:
        return _bad(text, "a tool_call tag without its partner")
    blocks = _CALL.findall(body)
    bare = content.strip().removeprefix("<|python_tag|>").lstrip()
    if not blocks and re.match(r'\{\s*"(name|type)"', bare) and _writes_bare_calls(tokenizer):
        content, blocks = "", [bare]
    calls = []
    for block in blocks:
        try:
            data = read_json(block)
        except ValueError as error:
            return _bad(text, f"the block is not JSON: {error}")
        call = _call(data)
        if isinstance(call, str):
            return _bad(text, call)
        calls.append(call)
    return ParsedAssistant(
        Message(role="assistant", content=content.strip(), reasoning=reasoning, tool_calls=tuple(calls))
    )


def split_reasoning(text: str) -> tuple[str | None, str]:
    """The thinking that ``text`` begins with, and what follows it.

    Some templates open the block in the prompt, so ``</think>`` alone ends one. A block that is never closed holds all the
    rest: what was only thought of is not done.
    """
    thoughts: list[str] = []
    while text.lstrip().startswith("<think>") or (not thoughts and "</think>" in text):
        thought, _, text = text.partition("</think>")
        thoughts.append(thought.replace("<think>", "", 1).strip())
    return "\n".join(filter(None, thoughts)) or None, text


def read_json(text: str) -> Any:
    """The JSON value in ``text``, such that it can be written again: finite numbers, clean strings, no endless nesting.

    Raises:
        ValueError: there is no such value.
    """
    try:
        return _kept(json.loads(text, parse_constant=_refused), DEPTH)
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH} deep") from None


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _kept(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number out of range")
    if isinstance(value, list | dict) and not depth:
        raise ValueError(f"nested more than {DEPTH} deep")
    if isinstance(value, list):
        return [_kept(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {clean(key): _kept(item, depth - 1) for key, item in value.items()}
    return value


def _writes_bare_calls(tokenizer: Any) -> bool:
    """Whether the template writes a call as a bare ``{"name": ..., "parameters": ...}``, as Llama 3.1's does."""
    template = getattr(tokenizer, "chat_template", None)
    return isinstance(template, str) and '"parameters": ' in template and "<tool_call>" not in template


def _call(data: Any) -> ToolCall | str:
    """A call, or what is wrong with it."""
    if not isinstance(data, dict):
        return "a call must be a JSON object"
    if not isinstance(data.get("name"), str) or not data["name"]:
        return "a call without a name"
    arguments = data.get("arguments", data.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
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
        parsed = _kept(tokenizer.parse_response(text), DEPTH)
    except ImportError as error:
        raise UserError(f"the model's declared response form cannot be read: {error}") from None
    except Exception as error:
        return _bad(text, f"does not fit the declared response form: {error}")
    if not isinstance(parsed, dict) or not isinstance(parsed.get("tool_calls") or [], list):
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
    head, closed, _ = body.rpartition("</execution_result>")
    _, opened, block = head.rpartition("<execution_result>")
    if not (opened and closed):
        if "<execution_result>" in body or "</execution_result>" in body:
            return _no_response(EXECUTION_RESULT_TAG_MALFORMED, "an execution_result tag without its partner")
        return _no_response(NO_EXECUTION_RESULT_TAG_FOUND, "no execution_result block")
    try:
        value = read_json(block)
    except ValueError as error:
        return _no_response(JSON_DECODE_ERROR, f"the block is not JSON: {error}")
    if not isinstance(value, list) and not (isinstance(value, dict) and value):
        return _no_response(INVALID_EXECUTION_RESULT_TYPE, "neither an array nor an object that holds something")
    return ParsedResponse(value)


def _no_response(code: str, message: str) -> ParsedResponse:
    return ParsedResponse(error=ParseError(code=code, message=message))
