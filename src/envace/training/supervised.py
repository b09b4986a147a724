"""Training rows from trajectories, for either role.

They are the very token sequences that an episode would have, with the loss on what the role should have written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import Field, model_validator

from envace.chat.render import ChatContext, ChatRenderer
from envace.engines.base import TrainingRow
from envace.roles.rehearse import RehearseContext, RehearsePrompt, rehearse_message, response_of, with_calls
from envace.types import Frozen, Message, Role, Task, unasked


class Trajectory(Frozen):
    """A task and what followed its first messages: assistant, tool and user messages."""

    task: Task
    messages: tuple[Message, ...] = Field(min_length=1)
    roles: tuple[Role, ...] = (Role.ACT, Role.REHEARSE)
    """The roles it is an example for. Made-up calls with true answers teach Rehearse and must not teach Act."""

    @model_validator(mode="after")
    def _answers_calls(self) -> Self:
        if (position := unasked(self.messages)) is not None:
            raise ValueError(f"messages.{position}: a tool message that answers no call before it")
        return self


def supervised_rows(trajectory: Trajectory, renderer: ChatRenderer, prompt: RehearsePrompt) -> list[TrainingRow]:
    """The training rows of a trajectory: one a role where the chat template is append-only, else one a message."""
    rows: list[TrainingRow] = []
    if Role.ACT in trajectory.roles:
        rows += _act_rows(trajectory, renderer)
    if Role.REHEARSE in trajectory.roles:
        rows += _rehearse_rows(trajectory, renderer, prompt)
    return rows


def _act_rows(trajectory: Trajectory, renderer: ChatRenderer) -> list[TrainingRow]:
    context = renderer.start(trajectory.task.messages, trajectory.task.tools)
    targets = _Targets(renderer, Role.ACT)
    for message in trajectory.messages:
        if message.role == "assistant":
            targets.add(context, message)
        else:
            context.add_messages([message])
    return targets.rows


def _rehearse_rows(trajectory: Trajectory, renderer: ChatRenderer, prompt: RehearsePrompt) -> list[TrainingRow]:
    context = RehearseContext(renderer, prompt, trajectory.task)
    targets = _Targets(renderer, Role.REHEARSE)
    for message, call in with_calls(trajectory.messages):
        context.say([message])
        if call is not None:
            context.ask(call)
            targets.add(context.chat, rehearse_message(response_of(message)))
    return targets.rows


@dataclass
class _Targets:
    """Collects completions, each merged into the row whose sequence its prompt extends."""

    renderer: ChatRenderer
    role: Role

    def __post_init__(self) -> None:
        self.rows: list[TrainingRow] = []

    def add(self, context: ChatContext, message: Message) -> None:
        prompt = context.prompt_ids()
        completion = self.renderer.completion_ids(message)
        context.add_completion(completion, message)
        mask = (0,) * len(prompt)
        if self.rows and prompt[: len(self.rows[-1].ids)] == self.rows[-1].ids:
            last = self.rows.pop()
            mask = last.mask + (0,) * (len(prompt) - len(last.ids))
        ids = tuple(prompt) + tuple(completion)
        zeros = (0.0,) * len(ids)
        self.rows.append(
            TrainingRow(ids, mask + (1,) * len(completion), zeros, zeros, self.role.value, objective="supervised")
        )
