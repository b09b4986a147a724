"""The Rehearse role: how the policy is asked to play the environment, and the form its answer takes.

The Rehearse conversation grows by appending, as Act's does: one system message (rules, candidate tools, recorded calls),
then for each call what happened since the last one and the pending call. It never sees a world.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from envace.chat.tools import canonical_json, signature
from envace.errors import UserError
from envace.types import Message, Reference, ToolCall, ToolSpec

STYLES = ("full", "brief")


class RehearsePrompt:
    """The prompt of the Rehearse role.

    Args:
        style: ``full`` (rules, JSON Schemas), ``brief`` (signatures only; for models that cannot afford more), or a
            folder with ``system.jinja`` (variables: ``tools`` and ``signatures``, one text a tool; ``references``, each
            with ``call`` and ``response``) and ``pending.jinja`` (``messages``, each with ``role`` and ``content``;
            ``schema``; ``call``).
        references: whether the recorded calls are shown.

    Raises:
        UserError: no such style or folder, or a template that does not parse or render.
    """

    def __init__(self, style: str = "full", *, references: bool = True) -> None:
        self._references = references
        folder: Any = resources.files("envace.roles") / "prompts" / style if style in STYLES else Path(style)
        self._system = _template(style, folder / "system.jinja")
        self._pending = _template(style, folder / "pending.jinja")
        probe = ToolCall(name="probe")
        try:
            self.system([ToolSpec(name="probe")], [Reference(call=probe, response={"ok": True})])
            for said in ([], [Message(role="user", content="Go.")]):
                self.pending(said, probe, None)
        except jinja2.TemplateError as error:
            raise UserError(f"rehearse prompt {style!r}: {error.message}") from None

    def system(self, tools: Sequence[ToolSpec], references: Sequence[Reference]) -> Message:
        """The first message: the same for every episode of a task, so engines compute it once a group."""
        shown = [
            {"call": call_text(reference.call), "response": canonical_json(reference.response)}
            for reference in references
        ]
        text = self._system.render(
            tools=[canonical_json(tool.to_openai()["function"]) for tool in tools],
            signatures=[signature(tool) for tool in tools],
            references=shown if self._references else [],
        )
        return Message(role="system", content=text)

    def pending(self, messages: Sequence[Message], call: ToolCall, spec: ToolSpec | None) -> Message:
        """The message that asks for one response. ``messages``: what was said since the last call.

        Left out are reasoning, which no environment sees, and calls and responses, which this conversation already holds.
        """
        said = [
            {"role": message.role, "content": message.content}
            for message in messages
            if message.role != "tool" and message.content
        ]
        schema = canonical_json(spec.parameters) if spec else "none: there is no tool of this name"
        return Message(role="user", content=self._pending.render(messages=said, schema=schema, call=call_text(call)))


def _template(style: str, file: Any) -> jinja2.Template:
    try:
        return jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(file.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(
            f"rehearse prompt {style!r}: neither {' nor '.join(STYLES)} nor a folder with system.jinja and pending.jinja"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: not UTF-8 text") from None
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{file}: line {error.lineno}: {error.message}") from None


def call_text(call: ToolCall) -> str:
    """The one text form of a call, the same in records and when pending, so that a match is a match of tokens."""
    return canonical_json({"name": call.name, "arguments": call.arguments})


def rehearse_message(response: Any) -> Message:
    """The assistant message that answers a pending call with ``response``."""
    return Message(role="assistant", content=f"<execution_result>\n{canonical_json(response)}\n</execution_result>")
