"""Environment: a real, executable world answers, one fresh instance an episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envace.environments.base import Environment
from envace.responders.base import Response
from envace.roles.generate import TokenLimits
from envace.types import Message, Task, ToolCall


class EnvironmentResponder:
    """``make`` builds the world of a task; it raises ``UserError`` for a task that has none."""

    name = "environment"

    def __init__(self, make: Callable[[Task], Environment]) -> None:
        self._make = make

    async def open(self, task: Task, limits: TokenLimits) -> EnvironmentSession:
        return EnvironmentSession(self._make(task))


class EnvironmentSession:
    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def respond(self, call: ToolCall, messages: Sequence[Message], turn: int, seed: int) -> Response:
        return Response(await self._environment.call(call), external=True)

    def success(self, replies: Sequence[str]) -> bool | None:
        return self._environment.success(replies)

    async def close(self) -> None:
        await self._environment.close()
