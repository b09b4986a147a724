"""Rehearsal: the policy plays the environment. Also the simulator: a second, frozen model asked in the same words.

Nothing here imports, holds or calls a world.
"""

from __future__ import annotations

from collections.abc import Sequence

from envace.chat.parse import parse_execution_result
from envace.chat.render import ChatRenderer
from envace.chat.tools import error_tool_call, is_error_tool_call
from envace.engines.base import Sampler
from envace.responders.base import Response
from envace.roles.generate import RoleSampling, TokenLimits, generate
from envace.roles.rehearse import RehearseContext, RehearsePrompt
from envace.types import Message, Role, Task, ToolCall

__all__ = ["RehearsalResponder", "RehearsalSession", "RoleSampling"]

TRUNCATED = "TRUNCATED"


class RehearsalResponder:
    """Answers calls with generations of the policy in its Rehearse role.

    Args:
        simulator: the sampler is a second, frozen model: its answers count as external and are no training rows.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: ChatRenderer,
        prompt: RehearsePrompt,
        sampling: RoleSampling,
        *,
        simulator: bool = False,
    ) -> None:
        self.name = "simulator" if simulator else "rehearsal"
        self.sampler, self.renderer, self.prompt, self.sampling = sampler, renderer, prompt, sampling
        self.simulator = simulator

    async def open(self, task: Task, limits: TokenLimits) -> RehearsalSession:
        return RehearsalSession(self, task, limits)


class RehearsalSession:
    """The Rehearse conversation of one episode; it grows with every call."""

    def __init__(self, responder: RehearsalResponder, task: Task, limits: TokenLimits) -> None:
        self._responder, self._limits = responder, limits
        self._context = RehearseContext(responder.renderer, responder.prompt, task)
        self._seen = len(task.messages)

    async def respond(self, call: ToolCall, messages: Sequence[Message], turn: int, seed: int) -> Response:
        of = self._responder
        self._context.say(messages[self._seen :])
        self._context.ask(call)
        self._seen = len(messages)
        generation = await generate(
            of.sampler,
            of.renderer,
            self._context.chat,
            role=Role.REHEARSE,
            turn=turn,
            sampling=of.sampling,
            limits=self._limits,
            seed=seed,
        )
        text = of.renderer.decode(generation.completion_ids)
        self._context.chat.add_completion(generation.completion_ids, Message(role="assistant", content=text))
        content, error, malformed = _read(text, generation.stop_reason == "length")
        return Response(
            content,
            error,
            malformed,
            generation=None if of.simulator else generation,
            sampled=True,
            external=of.simulator,
        )

    def success(self, replies: Sequence[str]) -> bool | None:
        return None

    async def close(self) -> None:
        return None


def _read(text: str, cut: bool) -> tuple[object, str | None, bool]:
    """Content, error code and whether it is malformed, of a completion that was ``cut`` at its limit or not."""
    parsed = parse_execution_result(text)
    if parsed.error is not None:
        return error_tool_call(parsed.error.code, parsed.error.message), parsed.error.code, True
    if cut:  # a conversation cannot go on from a message that never ended
        return error_tool_call(TRUNCATED, "the response was cut at its token limit"), TRUNCATED, True
    if is_error_tool_call(parsed.response):
        inner = parsed.response["error_tool_call"]
        return parsed.response, str(inner.get("code", "ERROR")) if isinstance(inner, dict) else "ERROR", False
    return parsed.response, None, False
