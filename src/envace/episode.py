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
from envace.rewards.scorer import Scorer, episode_reward, turn_reply
from envace.roles.generate import DoesNotFit, RoleSampling, TokenLimits, generate
from envace.seeds import derive_seed
from envace.types import (
    CallRecord,
    EndReason,
    Episode,
    EpisodeError,
    Generation,
    Group,
    Message,
    Role,
    Task,
    ToolCall,
    TurnScore,
)

UNDECIDED = "UNDECIDED"

_log = logging.getLogger(__name__)


class Limits(TokenLimits):
    """Where an episode is cut (published defaults). Each has an end reason of its own."""

    assistant_turns: int = Field(default=30, gt=0, description="assistant messages an episode")
    user_turns: int = Field(default=30, gt=0, description="user turns an episode")
    parallel_calls: int = Field(default=20, gt=0, description="calls in one assistant message")
    calls: int = Field(default=200, gt=0, description="calls an episode")
    generations: int = Field(default=200, gt=0, description="generations of both roles an episode")
    seconds: float | None = Field(
        default=None,
        gt=0,
        description="wall clock; an episode that passes it is not scored, for a slow machine is not the policy's fault",
    )


class _End(Exception):
    """The policy's own end before the last turn was over."""

    def __init__(self, reason: EndReason, code: str = "", message: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = EpisodeError(code=code, message=message) if code else None


class _Undecided(Exception):
    """Whether the next turn may be played could not be decided."""


class EpisodeRunner:
    """Runs episodes.

    Args:
        act: how the Act role's completions are drawn; the Rehearse role's belong to the responder.
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
        """``size`` concurrent episodes of ``task``; episode i has seed ``derive_seed(seed, task.id, i)``.

        Raises:
            UserError: as ``run`` does; the group's other episodes are cancelled and closed first.
        """
        try:
            async with asyncio.TaskGroup() as running:
                own = [
                    running.create_task(self.run(task, index, derive_seed(seed, task.id, index)))
                    for index in range(size)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return Group(task=task, episodes=tuple(episode.result() for episode in own))

    async def run(self, task: Task, index: int = 0, seed: int = 0) -> Episode:
        """One episode; its k-th generation (of either role) is drawn with ``derive_seed(seed, k)``.

        An error or a limit of the policy's own gives its turn 0, whatever checks it had met. A fault of sampler, judge,
        network or world gives ``EndReason.FAILED``, and running out of time ``TIME_LIMIT``; neither has a reward.

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
        self.success: bool | None = None
        self.external = 0
        self.turn = 0
        self.acted = 0
        self.sampled = 0
        """Completions drawn so far, those of a simulator included."""

    async def run(self) -> Episode:
        started = time.monotonic()
        error: EpisodeError | None = None
        clock = asyncio.timeout(self.of._limits.seconds)
        try:
            async with clock:
                end, error = await self._in_session()
        except UserError:
            raise
        except Exception as fault:  # whatever the infrastructure fails by must not count against the policy
            if isinstance(fault, TimeoutError) and clock.expired():
                end = EndReason.TIME_LIMIT
            else:
                _log.warning("episode of task %s failed: %s: %s", self.task.id, type(fault).__name__, fault)
                code = UNDECIDED if isinstance(fault, _Undecided) else type(fault).__name__
                end, error = EndReason.FAILED, EpisodeError(code=code, message=str(fault))
        scored = end not in (EndReason.FAILED, EndReason.TIME_LIMIT)
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
            reward=episode_reward(self.turns, self.task.turns) if scored else None,
            success=self.success if scored else None,
            external_calls=self.external,
            seconds=time.monotonic() - started,
        )

    async def _in_session(self) -> tuple[EndReason, EpisodeError | None]:
        session = await self.of._responder.open(self.task, self.of._limits)
        try:
            try:
                end = await self._converse(session)
                self.success = session.success(self.replies)
                return end, None
            except _End as cut:
                score = await self._score_turn()  # for the record: what had been met
                self.turns[-1] = score.model_copy(update={"reward": 0.0})
                # Whatever the world's state, a task whose last turn was never ended is not done.
                self.success = None if session.success(self.replies) is None else False
                return cut.reason, cut.error
        finally:
            await session.close()

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
            required = [result for result in score.results if result.required_for_next_turn]
            if any(result.met is False for result in required):
                return EndReason.REQUIREMENT_UNMET
            if undecided := [result.check for result in required if result.met is None]:
                raise _Undecided(f"turn {self.turn}: check {undecided[0]!r}, required for the next, was not decided")
            if self.turn + 1 == self.of._limits.user_turns:
                return EndReason.MAX_USER_TURNS
            said = Message(role="user", content=self.task.user_turns[self.turn])
            self.turn += 1
            self.messages.append(said)
            context.add_messages([said])

    async def _act(self, context: ChatContext) -> tuple[ToolCall, ...]:
        """The next assistant message; its calls, none at the end of a turn."""
        limits, renderer = self.of._limits, self.of._renderer
        if self.acted == limits.assistant_turns:
            raise _End(EndReason.MAX_ASSISTANT_TURNS)
        seed = self._next_seed()
        try:
            generation = await generate(
                self.of._sampler,
                renderer,
                context,
                role=Role.ACT,
                turn=self.turn,
                sampling=self.of._act,
                limits=limits,
                seed=seed,
            )
        except DoesNotFit:
            raise _End(EndReason.MAX_TOKENS) from None
        self.acted += 1
        self.sampled += 1
        self.generations.append(generation)
        parsed = parse_assistant(renderer.decode(generation.completion_ids), renderer.tokenizer)
        self.messages.append(parsed.message)
        context.add_completion(generation.completion_ids, parsed.message)
        if generation.stop_reason == "length":
            size = len(generation.completion_ids)
            filled = len(generation.prompt_ids) + size >= limits.context_tokens and size < self.of._act.max_tokens
            raise _End(EndReason.MAX_TOKENS if filled else EndReason.TRUNCATED)
        if parsed.error is not None:
            raise _End(EndReason.ACT_ERROR, parsed.error.code, parsed.error.message)
        if len(parsed.message.tool_calls) > limits.parallel_calls:
            raise _End(EndReason.MAX_CALLS)
        return parsed.message.tool_calls

    async def _respond(self, session: ResponderSession, calls: tuple[ToolCall, ...]) -> list[Message]:
        """The tool messages that answer one assistant message, in order. The first refused or unanswered call ends all."""
        answers: list[Message] = []
        for call in calls:
            if len(self.calls) == self.of._limits.calls:
                raise _End(EndReason.MAX_CALLS)
            refused = check_call(call, self.task.tools) if self.of._check_calls else None
            if refused is not None:
                self._record(call, error_tool_call(refused.code, refused.message), refused.code)
                raise _End(EndReason.CALL_ERROR, refused.code, refused.message)
            seed = self._next_seed()
            try:
                response = await session.respond(call, tuple(self.messages), self.turn, seed)
            except DoesNotFit:
                raise _End(EndReason.MAX_TOKENS) from None
            self.sampled += response.sampled
            self.external += response.external
            if response.generation is not None:
                self.generations.append(response.generation)
            answers.append(self._record(call, response.content, response.error))
            if response.error is not None:
                reason = EndReason.RESPONSE_ERROR if response.malformed else EndReason.CALL_ERROR
                raise _End(reason, response.error, answers[-1].content[:500])
        return answers

    def _record(self, call: ToolCall, content: object, error: str | None) -> Message:
        self.calls.append(
            CallRecord(turn=self.turn, call=call, response=content, responder=self.of._responder.name, error=error)
        )
        self.messages.append(
            Message(role="tool", name=call.name, tool_call_id=call.id, content=canonical_json(content))
        )
        return self.messages[-1]

    def _next_seed(self) -> int:
        if self.sampled >= self.of._limits.generations:
            raise _End(EndReason.MAX_GENERATIONS)
        return derive_seed(self.seed, self.sampled)

    async def _score_turn(self) -> TurnScore:
        own = [record for record in self.calls if record.turn == self.turn]
        score = await self.of._scorer.score_turn(self.task, self.turn, self.messages, own)
        self.turns.append(score)
        self.replies.append(turn_reply(self.messages))
        return score
