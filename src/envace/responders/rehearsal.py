"""Rehearsal: the policy plays the environment. Also the simulator: a second, frozen model asked in the same words.

Nothing here imports, holds or calls a world.
"""

from __future__ import annotations

from collections.abc import Sequence

from envace.chat.parse import parse_execution_result
from envace.chat.render import ChatRenderer
from envace.chat.tools import error_tool_call, is_error_tool_call
from envace.engines.base import Sampler, SamplingParams
from envace.responders.base import Response
from envace.roles.rehearse import RehearsePrompt
from envace.types import Frozen, Generation, Message, Role, Task, ToolCall


class RoleSampling(Frozen):
    """How a role's completions are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 8000

    def params(self, seed: int, stop_ids: tuple[int, ...]) -> SamplingParams:
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.top_k, seed, stop_ids)


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

    async def open(self, task: Task) -> RehearsalSession:
        return RehearsalSession(self, task)


class RehearsalSession:
    """The Rehearse conversation of one episode; it grows with every call."""

    def __init__(self, responder: RehearsalResponder, task: Task) -> None:
        self._responder = responder
        self._specs = {tool.name: tool for tool in task.tools}
        system = responder.prompt.system(task.tools, task.references)
        self._context = responder.renderer.start([system])
        self._seen = 0

    async def respond(self, call: ToolCall, messages: Sequence[Message], turn: int, seed: int) -> Response:
        of = self._responder
        pending = of.prompt.pending(messages[self._seen :], call, self._specs.get(call.name))
        self._seen = len(messages)
        self._context.add_messages([pending])
        prompt_ids = self._context.prompt_ids()
        sample = await of.sampler.sample(prompt_ids, of.sampling.params(seed, of.renderer.stop_ids))
        text = of.renderer.decode(sample.completion_ids)
        self._context.add_completion(sample.completion_ids, Message(role="assistant", content=text))
        generation = Generation(
            role=Role.REHEARSE,
            turn=turn,
            prompt_ids=prompt_ids,
            completion_ids=sample.completion_ids,
            logprobs=sample.logprobs,
            stop_reason=sample.stop_reason,
            temperature=of.sampling.temperature,
            policy_version=sample.policy_version,
        )
        row = None if of.simulator else generation
        parsed = parse_execution_result(text)
        if parsed.error is not None:
            content = error_tool_call(parsed.error.code, parsed.error.message)
            return Response(content, parsed.error.code, malformed=True, generation=row, external=of.simulator)
        error = None
        if is_error_tool_call(parsed.response):
            inner = parsed.response["error_tool_call"]
            error = str(inner.get("code", "ERROR")) if isinstance(inner, dict) else "ERROR"
        return Response(parsed.response, error, generation=row, external=of.simulator)

    def success(self, replies: Sequence[str]) -> bool | None:
        return None

    async def close(self) -> None:
        return None
