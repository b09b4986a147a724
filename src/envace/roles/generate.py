"""One generation of either role: from a growing conversation to sampled ids. Knows neither tools nor responders."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from envace.chat.render import ChatContext, ChatRenderer
from envace.engines.base import Sampler, SamplingParams
from envace.types import Frozen, Generation, Role


class RoleSampling(Frozen):
    """How a role's completions are drawn."""

    temperature: float = Field(default=1.0, ge=0, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="1: off")
    top_k: int = Field(default=0, ge=0, description="0: off")
    max_tokens: int = Field(default=8000, gt=0, description="tokens of one completion")

    def params(self, seed: int, stop_ids: tuple[int, ...]) -> SamplingParams:
        return SamplingParams(self.max_tokens, self.temperature, self.top_p, self.top_k, seed, stop_ids)


class TokenLimits(Frozen):
    """What one generation of either role may read and write (published defaults)."""

    prompt_tokens: int = Field(default=12_000, gt=0, description="prompt of a generation")
    context_tokens: int = Field(default=20_000, gt=0, description="prompt and completion of a generation")


class DoesNotFit(Exception):
    """The prompt leaves no room for a completion within the limits."""


async def generate(
    sampler: Sampler,
    renderer: ChatRenderer,
    context: ChatContext,
    *,
    role: Role,
    turn: int,
    sampling: RoleSampling,
    limits: TokenLimits,
    seed: int,
) -> Generation:
    """Samples ``context``'s next message, at most as long as the context's limit leaves room for.

    The caller parses the completion and adds it to ``context``.

    Raises:
        DoesNotFit: the prompt is too long already.
    """
    prompt_ids = context.prompt_ids()
    room = limits.context_tokens - len(prompt_ids)
    if len(prompt_ids) > limits.prompt_tokens or room <= 0:
        raise DoesNotFit(f"a {role.value} prompt of {len(prompt_ids)} tokens")
    params = sampling.params(seed, renderer.stop_ids)
    sample = await sampler.sample(prompt_ids, replace(params, max_tokens=min(params.max_tokens, room)))
    return Generation(
        role=role,
        turn=turn,
        prompt_ids=prompt_ids,
        completion_ids=sample.completion_ids,
        logprobs=sample.logprobs,
        stop_reason=sample.stop_reason,
        temperature=sampling.temperature,
        policy_version=sample.policy_version,
    )
