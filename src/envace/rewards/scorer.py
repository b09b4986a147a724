"""Scores a user turn by its checks, and an episode by its turns.

"Not scored" is ``None`` all the way up: one undecided check makes its turn and its episode not scored, never failed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from envace.errors import UserError
from envace.rewards.checks import TurnView, check_met
from envace.types import CallRecord, CheckResult, JudgeCheck, Message, ResponseValid, Task, TurnScore

_log = logging.getLogger(__name__)


class Judge(Protocol):
    """Decides the checks that no rule can: ``True``, ``False``, or ``None`` where it could not."""

    async def judge(
        self,
        task: Task,
        turn: int,
        messages: Sequence[Message],
        calls: Sequence[CallRecord],
        items: Sequence[JudgeCheck],
    ) -> Sequence[bool | None]: ...


class Scorer(Protocol):
    """Scores one user turn. ``messages`` is the conversation up to the turn's end, ``calls`` the turn's own calls."""

    async def score_turn(
        self, task: Task, turn: int, messages: Sequence[Message], calls: Sequence[CallRecord]
    ) -> TurnScore: ...


class RuleScorer:
    """Scores by the task's checks.

    Args:
        reward: ``fraction``: the met checks' share of the turn's weight. ``all``: 1 if every check is met, else 0.
        judge: for tasks with judge checks.
    """

    def __init__(self, reward: Literal["fraction", "all"] = "fraction", judge: Judge | None = None) -> None:
        self._reward = reward
        self._judge = judge

    async def score_turn(
        self, task: Task, turn: int, messages: Sequence[Message], calls: Sequence[CallRecord]
    ) -> TurnScore:
        checks = task.checks[turn] if task.checks else ()
        view = TurnView(calls, turn_reply(messages), task.tools, task.references)
        items = [check for check in checks if isinstance(check, JudgeCheck)]
        verdicts = iter(await self._verdicts(task, turn, messages, calls, items))
        results = tuple(
            CheckResult(
                check=check.id or f"{check.kind}-{position}",
                met=next(verdicts) if isinstance(check, JudgeCheck) else check_met(check, view),
                weight=check.weight,
                required_for_next_turn=check.required_for_next_turn,
            )
            for position, check in enumerate(checks)
        )
        return TurnScore(results=results, reward=turn_reward(results, self._reward))

    async def _verdicts(
        self,
        task: Task,
        turn: int,
        messages: Sequence[Message],
        calls: Sequence[CallRecord],
        items: Sequence[JudgeCheck],
    ) -> Sequence[bool | None]:
        if not items:
            return []
        if self._judge is None:
            raise UserError(f"task {task.id!r} has judge checks, and no judge is set")
        try:
            verdicts = await self._judge.judge(task, turn, messages, calls, items)
            if len(verdicts) != len(items):
                raise ValueError(f"{len(verdicts)} verdicts for {len(items)} items")
        except Exception as error:  # whatever a judge fails by, it must not count against the policy
            _log.warning("task %s, turn %d: the judge failed: %s", task.id, turn, error)
            return [None] * len(items)
        return verdicts


def turn_reply(messages: Sequence[Message]) -> str:
    """The last assistant text since the last user message."""
    for message in reversed(messages):
        if message.role == "user":
            break
        if message.role == "assistant" and message.content:
            return message.content
    return ""


def turn_reward(results: Sequence[CheckResult], reward: Literal["fraction", "all"]) -> float | None:
    """r_t = sum of w_i over met checks / sum of w_i (CM2, arXiv 2602.12268); with ``all``, 1 if every check is met, else 0.

    ``None`` if any check is undecided, or if nothing weighs anything: there is no evidence to score by.
    """
    total = sum(result.weight for result in results)
    if total <= 0 or any(result.met is None for result in results):
        return None
    if reward == "all":
        return float(all(result.met for result in results))
    return sum(result.weight for result in results if result.met) / total


def episode_reward(turns: Sequence[TurnScore], total: int) -> float | None:
    """R = sum of r_t / number of the task's user turns; a turn never reached adds 0, an undecided one makes it ``None``."""
    rewards = [turn.reward for turn in turns]
    if any(reward is None for reward in rewards):
        return None
    return sum(reward for reward in rewards if reward is not None) / total


def require_scorable(tasks: Iterable[Task], judge: Judge | None = None) -> None:
    """Says before anything runs that a task could not be scored.

    Raises:
        UserError: names the task and the turn: no checks, no weight, judge checks without a judge, or a response to
            validate without a schema.
    """
    for task in tasks:
        schemas = {tool.name for tool in task.tools if tool.returns is not None}
        if not task.checks:
            raise UserError(f"task {task.id!r}: it has no checks, so nothing could reward it")
        for turn, checks in enumerate(task.checks):
            if not checks or sum(check.weight for check in checks) <= 0:
                raise UserError(f"task {task.id!r}, turn {turn}: it needs a check with a weight above 0")
            if judge is None and any(isinstance(check, JudgeCheck) for check in checks):
                raise UserError(f"task {task.id!r}, turn {turn}: it has judge checks, and no judge is set")
            for check in checks:
                if isinstance(check, ResponseValid) and (check.tool not in schemas if check.tool else not schemas):
                    what = f"tool {check.tool!r} has" if check.tool else "its tools have"
                    raise UserError(f"task {task.id!r}, turn {turn}: response_valid, but {what} no `returns` schema")
