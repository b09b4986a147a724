"""A built-in world behind the environment seam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envace.errors import UserError
from envace.rewards.state import final_state
from envace.types import Task, ToolCall, ToolSpec
from envace.worlds import REGISTRY


class WorldEnvironment:
    """One task's own instance of its world.

    Raises:
        UserError: the task names no built-in world.
    """

    def __init__(self, task: Task) -> None:
        if task.world is None:
            raise UserError(
                f"task {task.id!r} has no `world`, so there is nothing real to run it in; use another responder"
            )
        if task.world.name not in REGISTRY:
            raise UserError(f"task {task.id!r}: no built-in world {task.world.name!r}; there are {', '.join(REGISTRY)}")
        self._goal = task.world
        self._world = REGISTRY[task.world.name](task.world.state)

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._world.tools

    async def call(self, call: ToolCall) -> Any:
        return self._world.call(call)

    def success(self, replies: Sequence[str]) -> bool | None:
        return final_state(self._goal, self._world.snapshot(), replies).success

    async def close(self) -> None:
        self._world.close()
