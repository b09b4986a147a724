"""Responders: who answers a tool call. One name chooses among the four; nothing else in an episode changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from envace.chat.render import ChatRenderer
from envace.engines.base import Sampler
from envace.environments.base import Environment
from envace.errors import UserError
from envace.responders.base import Responder, ResponderSession, Response
from envace.responders.environment import EnvironmentResponder
from envace.responders.rehearsal import RehearsalResponder
from envace.responders.replay import ReplayResponder
from envace.roles.generate import RoleSampling
from envace.roles.rehearse import RehearsePrompt
from envace.types import Task

ResponderName = Literal["rehearsal", "simulator", "environment", "replay"]

__all__ = [
    "EnvironmentResponder",
    "RehearsalResponder",
    "ReplayResponder",
    "Responder",
    "ResponderName",
    "ResponderSession",
    "Response",
    "make_responder",
]


def make_responder(
    name: ResponderName,
    sampler: Sampler,
    renderer: ChatRenderer,
    prompt: RehearsePrompt,
    sampling: RoleSampling,
    *,
    simulator: Callable[[], tuple[Sampler, ChatRenderer]] | None = None,
    environment: Callable[[Task], Environment] | None = None,
) -> Responder:
    """The responder called ``name``.

    Args:
        sampler, renderer: the policy's.
        prompt, sampling: how a model is asked to play the environment.
        simulator: loads the second model; called only for ``simulator``.
        environment: builds a task's environment; without it, the built-in world that the task names.

    Raises:
        UserError: no such responder, or ``simulator`` without a second model.
    """
    match name:
        case "rehearsal":
            return RehearsalResponder(sampler, renderer, prompt, sampling)
        case "simulator":
            if simulator is None:
                raise UserError("responder=simulator needs a second model: set simulator_model")
            return RehearsalResponder(*simulator(), prompt, sampling, simulator=True)
        case "environment":
            if environment is None:
                # Imported here alone: an episode by rehearsal never loads a world's code to execute.
                from envace.worlds.environment import WorldEnvironment

                environment = WorldEnvironment
            return EnvironmentResponder(environment)
        case "replay":
            return ReplayResponder()
    raise UserError(f"responder={name!r}: there are {', '.join(get_args(ResponderName))}")
