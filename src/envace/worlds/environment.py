"""A built-in world behind the environment seam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from envace.errors import UserError
from envace.rewards.state import final_state
from envace.types import Task, ToolCall, ToolSpec, WorldGoal
from envace.worlds import REGISTRY, World


class WorldEnvironment:
    """One task's own instance of its world.

    Raises:
        UserError: the task names no built-in world, or its state does not fit there.
    """

    def __init__(self, task: Task) -> None:
        if task.world is None:
            raise UserError(
                f"task {task.id!r} has no `world`, so there is nothing real to run it in; use another responder"
            )
        self._goal = task.world
        self._world = _world(task, task.world, "state")

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._world.tools

    async def call(self, call: ToolCall) -> Any:
        return self._world.call(call)

    def success(self, replies: Sequence[str]) -> bool | None:
        return final_state(self._goal, self._world.snapshot(), replies).success

    async def close(self) -> None:
        self._world.close()


def require_world(task: Task) -> None:
    """Says before anything runs that a task's world, if it has one, could not be made or its goal never reached.

    Raises:
        UserError: names task, table, row and column.
    """
    if task.world is not None:
        _world(task, task.world, "state").close()
        _world(task, task.world, "goal").close()


def _world(task: Task, world: WorldGoal, field: Literal["state", "goal"]) -> World:
    """The task's world, in the state it starts with or the one it should end with."""
    if world.name not in REGISTRY:
        raise UserError(f"task {task.id!r}: no built-in world {world.name!r}; there are {', '.join(REGISTRY)}")
    try:
        return REGISTRY[world.name](world.state if field == "state" else world.goal)
    except UserError as fault:
        raise UserError(f"task {task.id!r}: world.{field}.{fault}") from None
