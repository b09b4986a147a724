"""Who answers a tool call. One setting chooses; nothing else in an episode changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envace.roles.generate import TokenLimits
from envace.types import Generation, Message, Task, ToolCall


@dataclass(frozen=True)
class Response:
    """``content`` is any JSON value; ``error`` the code of an ``error_tool_call`` or of a malformed response."""

    content: Any
    error: str | None = None
    malformed: bool = False
    """The responder failed to answer at all, as opposed to answering that the call is bad."""
    generation: Generation | None = None
    """The policy's own generation, where it was the policy that answered: a training row."""
    sampled: bool = False
    """A model was asked, so the answer counts against the limit of generations, whether or not it is a training row."""
    external: bool = False
    """The answer came from outside the policy."""


class ResponderSession(Protocol):
    """One episode's responder."""

    async def respond(self, call: ToolCall, messages: Sequence[Message], turn: int, seed: int) -> Response:
        """Answers ``call``, which the last assistant message of ``messages`` (the whole conversation so far) made.

        Raises:
            DoesNotFit: a model would be asked more than the token limits allow.
            Exception: anything else is a fault of the infrastructure and makes the episode not scored.
        """
        ...

    def success(self, replies: Sequence[str]) -> bool | None:
        """Final-state success, from a responder that is a real world; otherwise ``None``.

        ``replies``: the last assistant text of each user turn reached.
        """
        ...

    async def close(self) -> None: ...


class Responder(Protocol):
    @property
    def name(self) -> str: ...

    async def open(self, task: Task, limits: TokenLimits) -> ResponderSession:
        """A session for one episode of ``task``; ``limits`` bind every model it asks.

        Raises:
            UserError: the task cannot be answered this way at all.
        """
        ...
