"""The seam to a real tool world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from envace.types import ToolCall, ToolSpec


class Environment(Protocol):
    """One episode's own instance of a world. A service's own error is a response, ``{"error": {...}}``; what raises is
    a fault of the infrastructure."""

    @property
    def tools(self) -> Sequence[ToolSpec]: ...

    async def call(self, call: ToolCall) -> Any: ...

    def success(self, replies: Sequence[str]) -> bool | None:
        """Whether the goal is reached, given the last assistant text of each user turn; ``None`` if it has no goal."""
        ...

    async def close(self) -> None: ...
