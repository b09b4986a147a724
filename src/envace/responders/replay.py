"""Replay: recorded responses only. A call that was never recorded is an error."""

from __future__ import annotations

from collections.abc import Sequence

from envace.chat.tools import error_tool_call, same_json
from envace.responders.base import Response
from envace.roles.generate import TokenLimits
from envace.types import Message, Task, ToolCall

REPLAY_MISS = "REPLAY_MISS"


class ReplayResponder:
    name = "replay"

    async def open(self, task: Task, limits: TokenLimits) -> ReplaySession:
        return ReplaySession(task)


class ReplaySession:
    def __init__(self, task: Task) -> None:
        self._references = task.references

    async def respond(self, call: ToolCall, messages: Sequence[Message], turn: int, seed: int) -> Response:
        for reference in self._references:
            if reference.call.name == call.name and same_json(reference.call.arguments, call.arguments):
                return Response(reference.response)
        content = error_tool_call(REPLAY_MISS, f"no recording of this call to {call.name}")
        return Response(content, REPLAY_MISS, malformed=True)

    def success(self, replies: Sequence[str]) -> bool | None:
        return None

    async def close(self) -> None:
        return None
