"""Messages to token ids with a tokenizer's own chat template; sampled ids are kept as they were sampled.

A conversation grows by appending: the prompt, then the sampled completion, then the tokens that the template puts for
the new messages alone. Not every template allows this (some drop earlier thinking once the user speaks again), so the
property is checked when the renderer is built; where it fails every prompt is rendered anew, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from envace.chat.text import clean
from envace.errors import UserError
from envace.types import Message, ToolCall, ToolSpec

_log = logging.getLogger(__name__)

_TOOL = ToolSpec(
    name="look_up_probe",
    description="Looks something up.",
    parameters={
        "type": "object",
        "properties": {"key": {"type": "string", "description": "A key."}},
        "required": ["key"],
    },
)


class ChatRenderer:
    """Renders conversations for one tokenizer.

    Attributes:
        stop_ids: tokens that end a completion.
        append_only: whether appended conversations equal rendered ones (the prefix property).
        supports_tools: whether the template shows tool schemas.

    Raises:
        UserError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, *, enable_thinking: bool | None = None, stop_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"model {self._name!r} has no chat template: use an instruction-tuned model, or put a "
                "chat_template.jinja into its folder"
            )
        self._options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._ends = self._end_of_turn_ids()
        eos = (
            [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else list(tokenizer.eos_token_id or [])
        )
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*self._ends, *eos, *stop_ids]))
        self.supports_tools = self._shows_tools()
        self.append_only = self._is_append_only()
        if not self.append_only:
            _log.warning(
                "%s: its chat template rewrites earlier turns, so contexts cannot grow by appending; every generation "
                "is rendered and trained with its full prompt (slower, same result)",
                self._name,
            )

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> ChatContext:
        """A conversation that begins with ``messages`` and whose next message is the assistant's.

        Raises:
            UserError: there are tools and the template does not show them.
        """
        if tools and not self.supports_tools:
            raise UserError(
                f"model {self._name!r}: its chat template ignores tools, so it would never see them; use a model whose "
                "template renders tools, or add a chat_template.jinja that does"
            )
        return ChatContext(self, tuple(messages), tuple(tools))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(clean(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without the stop token."""
        ids = list(ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool) -> str:
        """The conversation as text; with ``prompt`` it ends where the assistant's next message begins."""
        return str(
            self.tokenizer.apply_chat_template(
                [_as_template(message) for message in messages],
                tools=[tool.to_openai() for tool in tools] or None,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._options,
            )
        )

    def completion_ids(self, message: Message) -> tuple[int, ...]:
        """The ids a perfect sampler would produce for ``message``, end-of-turn token included (for supervised rows)."""
        asked = [Message(role="user", content="go")]
        before, after = self.render(asked, prompt=True), self.render([*asked, message], prompt=False)
        if not after.startswith(before):
            # Templates that open a thinking block in the prompt do not put it before a finished message.
            before = self.render(asked, prompt=False) + self._header(asked)
            if not after.startswith(before):
                raise UserError(
                    f"model {self._name!r}: its chat template cannot render an assistant message to learn from"
                )
        ids = self.encode(after[len(before) :])
        ends = [position for position, token in enumerate(ids) if token in self._ends]
        return ids[: ends[-1] + 1] if ends else (*ids, self.stop_ids[0])

    def appended_ids(self, last: Message, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids between the end of ``last`` (an assistant message) and the next completion."""
        base = [Message(role="user", content="go"), last]
        before, after = self.render(base, prompt=False), self.render([*base, *messages], prompt=True)
        ids, end = self.encode(after), 0
        sofar = self.encode(before)
        for position, token in enumerate(sofar):
            if token in self._ends:
                end = position + 1
        if end == 0 or ids[:end] != sofar[:end]:
            raise ValueError("the chat template is not append-only here")
        return ids[end:]

    def _header(self, messages: Sequence[Message]) -> str:
        """What the template puts before an assistant message's own text."""
        bare, mark = self.render(messages, prompt=False), "\u241f"
        full = self.render([*messages, Message(role="assistant", content=mark)], prompt=False)
        return full[len(bare) : full.index(mark)]

    def _end_of_turn_ids(self) -> tuple[int, ...]:
        """Special tokens that the template puts after an assistant's text."""
        mark = "mark"
        text = self.render([Message(role="user", content="go"), Message(role="assistant", content=mark)], prompt=False)
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        tail = self.encode(text[text.rindex(mark) + len(mark) :])
        return tuple(token for token in tail if token in special)[:1]

    def _shows_tools(self) -> bool:
        try:
            return _TOOL.name in self.render([Message(role="user", content="go")], [_TOOL], prompt=True)
        except Exception:  # a template may refuse by any error of its own
            return False

    def _is_append_only(self) -> bool:
        if not self._ends:
            return False
        call = ToolCall(name=_TOOL.name, arguments={"key": "a"}, id="call00001")
        thought = "Let me think."
        tools = [_TOOL] if self.supports_tools else []
        with_tools = [
            Message(role="assistant", reasoning=thought, tool_calls=(call,)),
            Message(role="tool", content='{"value": 1}', name=call.name, tool_call_id=call.id),
        ]
        stages = [
            *(with_tools if tools else []),
            Message(role="assistant", content="It is 1.", reasoning=thought),
            Message(role="user", content="And now?"),
            Message(role="assistant", content="Still 1.", reasoning=thought),
            Message(role="user", content="Thanks."),
        ]
        messages = [Message(role="user", content="What is a?")]
        try:
            ids = self.encode(self.render(messages, tools, prompt=True))
            for message in stages:
                if message.role == "assistant":
                    ids += self._completion_in_place(messages, tools, message)
                else:
                    ids += self.appended_ids(messages[-1], [message])
                messages.append(message)
                if message.role != "assistant" and ids != self.encode(self.render(messages, tools, prompt=True)):
                    return False
        except Exception:  # a template may refuse by any error of its own; then nothing may be assumed of it
            return False
        return True

    def _completion_in_place(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], message: Message
    ) -> tuple[int, ...]:
        before = self.encode(self.render(messages, tools, prompt=True))
        after = self.encode(self.render([*messages, message], tools, prompt=False))
        if after[: len(before)] != before:
            raise ValueError("an assistant message does not extend its prompt")
        rest = after[len(before) :]
        ends = [position for position, token in enumerate(rest) if token in self._ends]
        return rest[: ends[-1] + 1]


class ChatContext:
    """One growing conversation, of either role."""

    def __init__(self, renderer: ChatRenderer, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> None:
        self._renderer = renderer
        self._messages = list(messages)
        self._tools = tools
        self._ids: tuple[int, ...] = ()
        self._last: Message | None = None
        self._new: list[Message] = []

    def prompt_ids(self) -> tuple[int, ...]:
        """What to sample the next assistant message from."""
        if not self._renderer.append_only or self._last is None:
            self._ids = self._renderer.encode(self._renderer.render(self._messages, self._tools, prompt=True))
        elif self._new:
            self._ids += self._renderer.appended_ids(self._last, self._new)
        self._new = []
        return self._ids

    def add_completion(self, ids: Sequence[int], message: Message) -> None:
        """Appends what was sampled. ``message`` is how it parses; it is rendered only where appending is not possible."""
        self._ids += tuple(ids)
        self._last = message
        self._messages.append(message)

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Appends tool results or the next user message."""
        self._messages += messages
        self._new += messages


def _as_template(message: Message) -> dict[str, Any]:
    """The dictionary chat templates read; arguments stay an object, as the templates of the field expect."""
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
    if message.tool_calls:
        data["tool_calls"] = [
            {
                "id": call.id or "call00000",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        data["tool_call_id"] = message.tool_call_id or "call00000"
        if message.name:
            data["name"] = message.name
    return data
