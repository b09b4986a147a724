"""One episode: act, respond, act … The alternation of the two roles, and nothing else.

Pure asyncio over a sampler, a responder, a renderer and a scorer. It runs unchanged over every engine; hundreds of
episodes run at once, each in its own role at any moment.
"""

from __future__ import annotations

import asyncio
import logging
import time

from pydantic import Field

from envace.chat.parse import parse_assistant
from envace.chat.render import ChatContext, ChatRenderer
from envace.chat.tools import canonical_json, check_call, error_tool_call
from envace.engines.base import Sampler
from envace.errors import UserError
from envace.responders.base import Responder, ResponderSession
from envace.responders.rehearsal import RoleSampling
from envace.rewards.scorer import Scorer, episode_reward, turn_reply
from envace.seeds import derive_seed
from envace.types import (
    CallRecord,
    EndReason,
    Episode,
    EpisodeError,
    Frozen,
    Generation,
    Group,
    Message,
    Role,
    Task,
    ToolCall,
    TurnScore,
)

_log = logging.getLogger(__name__)


class Limits(Frozen):
    """Where an episode is cut (published defaults). Each has an end reason of its own."""

    assistant_turns: int = Field(default=30, gt=0, description="assistant messages an episode")
    parallel_calls: int = Field(default=20, gt=0, description="calls in one assistant message")
    calls: int = Field(default=200, gt=0, description="calls an episode")
    generations: int = Field(default=200, gt=0, description="generations of both roles an episode")
    context_tokens: int = Field(default=20_000, gt=0, description="prompt and completion of a generation")
    seconds: float | None = Field(
        default=None,
        gt=0,
        description="wall clock; an episode that passes it is not scored, for time is not the policy's",
    )


class _End(Exception):
    def __init__(self, reason: EndReason, code: str = "", message: str = "") -> None:
        self.reason = reason
        self.error = EpisodeError(code=code, message=message) if code else None


class EpisodeRunner:
    """Runs episodes.

    Args:
        check_calls: a call's name and arguments are checked by code before any responder is asked, for every responder
            alike. Without it the responder has to notice (the published way).
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: ChatRenderer,
        responder: Responder,
        scorer: Scorer,
        *,
        act: RoleSampling | None = None,
        limits: Limits | None = None,
        check_calls: bool = True,
    ) -> None:
        self._sampler, self._renderer, self._responder, self._scorer = sampler, renderer, responder, scorer
        self._act = act or RoleSampling()
        self._limits = limits or Limits()
        self._check_calls = check_calls

    async def run_group(self, task: Task, size: int, seed: int) -> Group:
        """``size`` concurrent episodes of ``task``; episode i has seed ``derive_seed(seed, task.id, i)``."""
        seeds = [derive_seed(seed, task.id, index) for index in range(size)]
        episodes = await asyncio.gather(*(self.run(task, index, own) for index, own in enumerate(seeds)))
        return Group(task=task, episodes=tuple(episodes))

    async def run(self, task: Task, index: int, seed: int) -> Episode:
        """One episode. A fault of sampler, judge, network or world gives ``EndReason.FAILED`` and no reward.

        Raises:
            UserError: the task or the model cannot be run at all.
        """
        return await _Run(self, task, index, seed).run()


class _Run:
    """The state of one episode in progress."""

    def __init__(self, runner: EpisodeRunner, task: Task, index: int, seed: int) -> None:
        self.of, self.task, self.index, self.seed = runner, task, index, seed
        self.messages: list[Message] = list(task.messages)
        self.generations: list[Generation] = []
        self.calls: list[CallRecord] = []
        self.turns: list[TurnScore] = []
        self.replies: list[str] = []
        self.external = 0
        self.turn = 0
        self.acted = 0

    async def run(self) -> Episode:
        started = time.monotonic()
        error: EpisodeError | None = None
        success: bool | None = None
        session: ResponderSession | None = None
        try:
            session = await self.of._responder.open(self.task)
            async with asyncio.timeout(self.of._limits.seconds):
                end = await self._converse(session)
            success = session.success(self.replies)
        except _End as cut:
            end, error = cut.reason, cut.error
            success = False if session is not None and session.success([]) is not None else None
        except TimeoutError:
            end = EndReason.TIME_LIMIT
        except UserError:
            raise
        except Exception as fault:  # whatever the infrastructure fails by must not count against the policy
            _log.warning("episode of task %s failed: %s: %s", self.task.id, type(fault).__name__, fault)
            end, error = EndReason.FAILED, EpisodeError(code=type(fault).__name__, message=str(fault))
        finally:
            if session is not None:
                await session.close()
        unscored = end in (EndReason.FAILED, EndReason.TIME_LIMIT)
        return Episode(
            id=f"{self.task.id}#{self.index}",
            task_id=self.task.id,
            index=self.index,
            seed=self.seed,
            responder=self.of._responder.name,
            messages=tuple(self.messages),
            generations=tuple(self.generations),
            calls=tuple(self.calls),
            turns=tuple(self.turns),
            end=end,
            error=error,
            reward=None if unscored else episode_reward(self.turns, self.task.turns),
            success=None if unscored else success,
            external_calls=self.external,
            seconds=time.monotonic() - started,
        )

    async def _converse(self, session: ResponderSession) -> EndReason:
        context = self.of._renderer.start(self.task.messages, self.task.tools)
        while True:
            calls = await self._act(context)
            if calls:
                context.add_messages(await self._respond(session, calls))
                continue
            score = await self._score_turn()
            if self.turn + 1 == self.task.turns:
                return EndReason.COMPLETED
            if score.reward is None or not score.may_continue:
                return EndReason.REQUIREMENT_UNMET
            said = Message(role="user", content=self.task.user_turns[self.turn])
            self.turn += 1
            self.messages.append(said)
            context.add_messages([said])

    async def _act(self, context: ChatContext) -> tuple[ToolCall, ...]:
        """The next assistant message; its calls, none at the end of a turn."""
        limits = self.of._limits
        if self.acted == limits.assistant_turns:
            raise _End(EndReason.MAX_ASSISTANT_TURNS)
        self._may_generate()
        prompt_ids = context.prompt_ids()
        if len(prompt_ids) >= limits.context_tokens:
            raise _End(EndReason.MAX_TOKENS)
        params = self.of._act.params(derive_seed(self.seed, len(self.generations)), self.of._renderer.stop_ids)
        sample = await self.of._sampler.sample(prompt_ids, params)
        self.acted += 1
        self.generations.append(
            Generation(
                role=Role.ACT,
                turn=self.turn,
                prompt_ids=prompt_ids,
                completion_ids=sample.completion_ids,
                logprobs=sample.logprobs,
                stop_reason=sample.stop_reason,
                temperature=self.of._act.temperature,
                policy_version=sample.policy_version,
            )
        )
        parsed = parse_assistant(self.of._renderer.decode(sample.completion_ids), self.of._renderer.tokenizer)
        self.messages.append(parsed.message)
        context.add_completion(sample.completion_ids, parsed.message)
        if sample.stop_reason == "length":
            raise _End(EndReason.TRUNCATED)
        if parsed.error is not None:
            raise _End(EndReason.ACT_ERROR, parsed.error.code, parsed.error.message)
        if len(parsed.message.tool_calls) > limits.parallel_calls:
            raise _End(EndReason.MAX_CALLS)
        return parsed.message.tool_calls

    async def _respond(self, session: ResponderSession, calls: tuple[ToolCall, ...]) -> list[Message]:
        """The tool messages that answer one assistant message, in order. The first refused or unanswered call ends all."""
        answers: list[Message] = []
        so_far = list(self.messages)
        for call in calls:
            if len(self.calls) == self.of._limits.calls:
                raise _End(EndReason.MAX_CALLS)
            refused = check_call(call, self.task.tools) if self.of._check_calls else None
            if refused is not None:
                self._record(call, error_tool_call(refused.code, refused.message), refused.code)
                raise _End(EndReason.CALL_ERROR, refused.code, refused.message)
            self._may_generate()
            seed = derive_seed(self.seed, len(self.generations), len(self.calls))
            response = await session.respond(call, [*so_far, *answers], self.turn, seed)
            self.external += response.external
            if response.generation is not None:
                self.generations.append(response.generation)
            self._record(call, response.content, response.error)
            if response.error is not None:
                reason = EndReason.RESPONSE_ERROR if response.malformed else EndReason.CALL_ERROR
                raise _End(reason, response.error, canonical_json(response.content)[:500])
            answers.append(self.messages[-1])
        return answers

    def _record(self, call: ToolCall, content: object, error: str | None) -> None:
        self.calls.append(
            CallRecord(turn=self.turn, call=call, response=content, responder=self.of._responder.name, error=error)
        )
        self.messages.append(
            Message(role="tool", name=call.name, tool_call_id=call.id, content=canonical_json(content))
        )

    def _may_generate(self) -> None:
        if len(self.generations) >= self.of._limits.generations:
            raise _End(EndReason.MAX_GENERATIONS)

    async def _score_turn(self) -> TurnScore:
        own = [record for record in self.calls if record.turn == self.turn]
        score = await self.of._scorer.score_turn(self.task, self.turn, self.messages, own)
        self.turns.append(score)
        self.replies.append(turn_reply(self.messages))
        return score
