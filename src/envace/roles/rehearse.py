"""The Rehearse role: how the policy is asked to play the environment, and the form its answer takes.

The Rehearse conversation grows by appending, as Act's does: one system message (rules, candidate tools, recorded calls),
then for each call what happened since the last one and the pending call. It never sees a world.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from envace.chat.parse import read_json
from envace.chat.render import ChatContext, ChatRenderer
from envace.chat.tools import canonical_json, signature
from envace.errors import UserError
from envace.identity import Same
from envace.types import Message, Reference, Task, ToolCall, ToolSpec

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
        self._system_message = lru_cache(maxsize=512)(self._render_system)
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
        return self._system_message(tuple(map(Same, tools)), tuple(map(Same, references)))

    def _render_system(self, same_tools: tuple[Same[ToolSpec], ...], known: tuple[Same[Reference], ...]) -> Message:
        tools, references = [same.value for same in same_tools], [same.value for same in known]
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


class RehearseContext:
    """The Rehearse role's conversation about one task. Calls that its first messages made stand there as answered.

    Attributes:
        chat: the conversation itself, to draw the answer to the pending call from.
    """

    def __init__(self, renderer: ChatRenderer, prompt: RehearsePrompt, task: Task) -> None:
        self.chat: ChatContext = renderer.start([prompt.system(task.tools, task.references)])
        self._renderer, self._prompt = renderer, prompt
        self._specs = {tool.name: tool for tool in task.tools}
        self._unseen: list[Message] = []
        for message, call in with_calls(task.messages):
            self.say([message])
            if call is not None:
                self.ask(call)
                self.tell(response_of(message))

    def say(self, messages: Sequence[Message]) -> None:
        """What was said in the episode: shown with the next pending call."""
        self._unseen += messages

    def ask(self, call: ToolCall) -> None:
        """The pending call."""
        self.chat.add_messages([self._prompt.pending(self._unseen, call, self._specs.get(call.name))])
        self._unseen = []

    def tell(self, response: Any) -> None:
        """The pending call's answer, where the policy is not asked for one."""
        answer = rehearse_message(response)
        self.chat.add_completion(self._renderer.completion_ids(answer), answer)


def with_calls(messages: Sequence[Message]) -> Iterator[tuple[Message, ToolCall | None]]:
    """Each message, a tool's with the call that it answers: by its id, and where it has none by its place."""
    waiting: list[ToolCall] = []
    for message in messages:
        call = None
        if message.role == "assistant":
            waiting = [*message.tool_calls]
        elif message.role == "tool" and waiting:
            own = [call for call in waiting if call.id is not None and call.id == message.tool_call_id]
            call = (own or waiting)[0]
            waiting.remove(call)
        yield message, call


def response_of(message: Message) -> Any:
    """A tool message's content as a response may be: what is neither an array nor an object that holds something is put
    under ``result``."""
    try:
        value = read_json(message.content)
    except ValueError:
        value = message.content
    return value if isinstance(value, list) or (isinstance(value, dict) and value) else {"result": value}


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
