"""Messages to token ids with a tokenizer's own chat template; sampled ids are kept as they were sampled.

A conversation grows by appending: the prompt, then the sampled completion, then the tokens that the template puts for
the new messages alone. Not every template allows this (some drop earlier thinking once the user speaks again), so the
property is checked when the renderer is built; where it fails every prompt is rendered anew, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2

from envace.chat.text import clean
from envace.chat.tools import canonical_json
from envace.errors import UserError
from envace.identity import Same
from envace.types import Message, ToolCall, ToolSpec

_log = logging.getLogger(__name__)

# What the renderer tries a template with.
_TOOL = ToolSpec(
    name="look_up_probe",
    description="Looks something up.",
    parameters={
        "type": "object",
        "properties": {"key": {"type": "string", "description": "A key."}},
        "required": ["key"],
    },
)
_VALUE = "probevalue"
_GO = Message(role="user", content="go")
_CALL = Message(role="assistant", tool_calls=(ToolCall(name=_TOOL.name, arguments={"key": _VALUE}),))
_RESPONSE = Message(role="tool", content='{"value": "proberesponse"}', name=_TOOL.name)


@dataclass(frozen=True)
class _Form:
    """How a template wants calls: most take arguments as an object, some as JSON text; some need content to be absent."""

    arguments_text: bool = False
    content_none: bool = False


class ChatRenderer:
    """Renders conversations for one tokenizer.

    Attributes:
        stop_ids: tokens that end a completion: what the template puts after one, the tokenizer's own end, and those given.
        append_only: whether appended conversations equal rendered ones (the prefix property).
        supports_tools: whether the template shows tools, calls and their responses.

    Raises:
        UserError: the tokenizer has no chat template, or one that renders no assistant message or nothing to stop at.
    """

    def __init__(self, tokenizer: Any, *, enable_thinking: bool | None = None, stop_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        # A group's episodes begin alike, and many go on alike.
        self._encoded = lru_cache(maxsize=512)(self._encode)
        self._first = lru_cache(maxsize=512)(self._first_ids)
        self._appended = lru_cache(maxsize=4096)(self._appended_ids)
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"model {self._name!r} has no chat template: use an instruction-tuned model, or put a "
                "chat_template.jinja into its folder"
            )
        self._options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._form = _Form()
        forms = [_Form(text, none) for text in (False, True) for none in (False, True)]
        shown = next((form for form in forms if self._shows_tools(form)), None)
        self.supports_tools = shown is not None
        self._form = shown or _Form()
        self._ends = self._end_of_turn_ids()
        eos = (
            [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else list(tokenizer.eos_token_id or [])
        )
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*self._ends, *eos, *stop_ids]))
        if not self.stop_ids:
            raise UserError(
                f"model {self._name!r} has no token that ends a message: set eos_token in its tokenizer_config.json"
            )
        self._head = lru_cache(maxsize=1024)(self._head_ids)
        self._parallel = self.supports_tools and self._takes_parallel_calls()
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
                f"model {self._name!r}: its chat template ignores tools, calls or their responses, so it would never see "
                "them; use a model whose template renders tools, or set chat.template (chatml-tools is shipped)"
            )
        return ChatContext(self, tuple(messages), tuple(tools))

    def encode(self, text: str) -> tuple[int, ...]:
        return self._encoded(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(clean(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without the stop token."""
        ids = list(ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        # Some tokenizers tidy spaces before punctuation by default, which would change the arguments of calls.
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool) -> str:
        """The conversation as text; with ``prompt`` it ends where the assistant's next message begins."""
        return str(
            self.tokenizer.apply_chat_template(
                _as_template(messages, self._form),
                tools=[tool.to_openai() for tool in tools] or None,
                add_generation_prompt=prompt,
                tokenize=False,
                **self._options,
            )
        )

    def completion_ids(self, message: Message) -> tuple[int, ...]:
        """The ids a perfect sampler would produce for ``message``, end-of-turn token included (for supervised rows)."""
        asked = [_GO]
        before, after = self.render(asked, prompt=True), self.render([*asked, message], prompt=False)
        if not after.startswith(before):
            # Templates that open a thinking block in the prompt do not put it before a finished message.
            before = self.render(asked, prompt=False) + self._header(asked)
            if not after.startswith(before):
                raise UserError(
                    f"model {self._name!r}: its chat template cannot render an assistant message to learn from"
                )
        # Encoded in its place: some tokenizers put a space before what they encode alone.
        head, ids = self.encode(before), self.encode(after)
        ids = ids[len(head) :] if ids[: len(head)] == head else self.encode(after[len(before) :])
        ends = [position for position, token in enumerate(ids) if token in self._ends]
        return ids[: ends[-1] + 1] if ends else (*ids, self.stop_ids[0])

    def first_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        """The prompt that a conversation starts with.

        Raises:
            UserError: the template refuses it (no system role, roles that must alternate ...).
        """
        keys = (Same(message) if message.tool_calls else message for message in messages)  # arguments cannot be hashed
        return self._first(tuple(keys), tuple(map(Same, tools)))

    def _first_ids(
        self, keys: tuple[Message | Same[Message], ...], same: tuple[Same[ToolSpec], ...]
    ) -> tuple[int, ...]:
        messages = [key.value if isinstance(key, Same) else key for key in keys]
        tools = [tool.value for tool in same]
        try:
            return self.encode(self.render(messages, tools, prompt=True))
        except jinja2.TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise UserError(
                f"model {self._name!r}: its chat template refuses a conversation of {roles}: {error}; use another model, "
                "or set chat.template to one that takes it"
            ) from None

    def appended_ids(self, last: Message, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids between the end of ``last`` (an assistant message) and the next completion."""
        # Where not parallel the template would refuse the others; what it puts for the responses is the same.
        made = last.tool_calls if self._parallel else last.tool_calls[:1]
        return self._appended(tuple((call.id, call.name) for call in made), tuple(messages))

    def _appended_ids(
        self, calls: tuple[tuple[str | None, str], ...], messages: tuple[Message, ...]
    ) -> tuple[int, ...]:
        head, ids = self._head(calls), self.encode(self.render([_GO, _stand_in(calls), *messages], prompt=True))
        if not head or ids[: len(head)] != head:
            raise ValueError("the chat template is not append-only here")
        return ids[len(head) :]

    def _head_ids(self, calls: tuple[tuple[str | None, str], ...]) -> tuple[int, ...]:
        """A short conversation's ids up to the end of an assistant message with ``calls``; empty where it has no end."""
        ids = self.encode(self.render([_GO, _stand_in(calls)], prompt=False))
        return ids[: max((place + 1 for place, token in enumerate(ids) if token in self._ends), default=0)]

    def _header(self, messages: Sequence[Message]) -> str:
        """What the template puts before an assistant message's own text."""
        bare, mark = self.render(messages, prompt=False), "\u241f"
        full = self.render([*messages, Message(role="assistant", content=mark)], prompt=False)
        return full[len(bare) : full.index(mark)]

    def _end_of_turn_ids(self) -> tuple[int, ...]:
        """The token that the template puts after an assistant's text, and the one after its calls where that differs."""
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)

        def after(message: Message, mark: str) -> list[int]:
            text = self.render([_GO, message], prompt=False)
            return [token for token in self.encode(text[text.rindex(mark) + len(mark) :]) if token in special]

        try:
            ends = after(Message(role="assistant", content=_VALUE), _VALUE)[:1]
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"model {self._name!r}: its chat template renders no assistant message: {error}") from None
        if self.supports_tools:
            tail = after(_CALL, _VALUE)
            if not set(ends) & set(tail):
                ends += tail[-1:]
        return tuple(ends)

    def _shows_tools(self, form: _Form) -> bool:
        """Whether the template, given calls in ``form``, shows a tool, a call and a response."""
        self._form = form
        try:
            tools = self.render([_GO], [_TOOL], prompt=True)
            called = self.render([_GO, _CALL, _RESPONSE], [_TOOL], prompt=True)
        except Exception:  # a template may refuse by any error of its own
            return False
        arguments = _CALL.tool_calls[0].arguments
        distorted = (str(arguments), canonical_json(canonical_json(arguments)))  # written by Python; quoted twice
        return (
            _TOOL.name in tools
            and "proberesponse" in called  # the word alone: some templates quote a response once more
            and _VALUE in called
            and called.count(_TOOL.name) > tools.count(_TOOL.name)
            and not any(text in called for text in distorted)
        )

    def _takes_parallel_calls(self) -> bool:
        both = _CALL.model_copy(update={"tool_calls": _CALL.tool_calls * 2})
        try:
            self.render([_GO, both, _RESPONSE, _RESPONSE], [_TOOL], prompt=True)
        except Exception:  # a template may refuse by any error of its own
            return False
        return True

    def _is_append_only(self) -> bool:
        """Whether conversations of every kind used here, grown message by message, equal their rendering."""
        if not self._ends:
            return False
        first = [Message(role="system", content="Be brief."), Message(role="user", content="What is a?")]
        calls = _CALL.tool_calls * (2 if self._parallel else 1)
        try:
            for thought in (None, "Let me think."):
                text = [
                    [Message(role="assistant", content="It is 1.", reasoning=thought)],
                    [Message(role="user", content="And now?")],
                ]
                tools = [
                    [Message(role="assistant", reasoning=thought, tool_calls=calls)],
                    [_RESPONSE] * len(calls),
                    [Message(role="assistant", content="Again.", reasoning=thought, tool_calls=_CALL.tool_calls)],
                    [_RESPONSE],
                ]
                if not self._grows(first, [*text, *text], ()):
                    return False
                if self.supports_tools and not self._grows(first, [*tools, *text, *tools, *text], [_TOOL]):
                    return False
        except Exception:  # a template may refuse by any error of its own; then nothing may be assumed of it
            return False
        return True

    def _grows(self, first: Sequence[Message], stages: Sequence[Sequence[Message]], tools: Sequence[ToolSpec]) -> bool:
        """Whether appending ``stages`` to ``first`` gives what rendering them together gives, before every completion."""
        messages = [*first]
        ids = self.encode(self.render(messages, tools, prompt=True))
        for new in stages:
            if new[0].role == "assistant":
                ids += self._completion_in_place(messages, tools, new[0])
            else:
                ids += self.appended_ids(messages[-1], new)
            messages += new
            if new[0].role != "assistant" and ids != self.encode(self.render(messages, tools, prompt=True)):
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
        self._rendered = False

    def prompt_ids(self) -> tuple[int, ...]:
        """What to sample the next assistant message from.

        Raises:
            UserError: the template refuses the conversation's first messages.
        """
        if self._rendered:
            return self._ids
        if self._last is None:
            self._ids = self._renderer.first_ids(self._messages, self._tools)
        elif not self._renderer.append_only:
            self._ids = self._renderer.encode(self._renderer.render(self._messages, self._tools, prompt=True))
        elif self._new:
            self._ids += self._renderer.appended_ids(self._last, self._new)
        self._new, self._rendered = [], True
        return self._ids

    def add_completion(self, ids: Sequence[int], message: Message) -> None:
        """Appends what was sampled. ``message`` is how it parses; it is rendered only where appending is not possible."""
        self._ids = (*self.prompt_ids(), *ids)
        self._last, self._rendered = message, False
        self._messages.append(message)

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Appends tool results or the next user message."""
        self._messages += messages
        self._new += messages
        self._rendered = False


def _stand_in(calls: Sequence[tuple[str | None, str]]) -> Message:
    """An assistant message that is followed by the same ids as any other that made ``calls``, whatever they say."""
    made = tuple(ToolCall(id=identity, name=name, arguments={"key": _VALUE}) for identity, name in calls)
    return Message(role="assistant", content="" if made else _VALUE, tool_calls=made)


def _as_template(messages: Sequence[Message], form: _Form) -> list[dict[str, Any]]:
    """The dictionaries chat templates read. Calls without an id get one by position, and so do their responses."""
    shown: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    for message in messages:
        data: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            data["reasoning_content"] = message.reasoning
        if message.tool_calls:
            waiting = [(call.id or f"call{place:05d}", call.name) for place, call in enumerate(message.tool_calls)]
            data["content"] = message.content or (None if form.content_none else "")
            data["tool_calls"] = [
                {
                    "id": identity,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": canonical_json(call.arguments) if form.arguments_text else call.arguments,
                    },
                }
                for call, (identity, _) in zip(message.tool_calls, waiting, strict=True)
            ]
        if message.role == "tool":
            identity, name = waiting.pop(0) if waiting else ("call00000", "")
            data["tool_call_id"] = message.tool_call_id or identity
            if message.name or name:
                data["name"] = message.name or name
        shown.append(data)
    return shown
