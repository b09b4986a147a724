"""Trajectories for a warm start: a demonstrator of settable care, and calls with the world's true answers.

The careless demonstrator gives Act examples of mixed quality, as recorded traces are, so that a policy warm-started on them
has something left to learn. The responses in its trajectories are always the world's own: Rehearse learns from true ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from envace.chat.tools import canonical_json
from envace.seeds import derive_seed
from envace.types import Message, Reference, Task, ToolCall
from envace.worlds import REGISTRY, World
from envace.worlds.tasks import SCENARIOS


@dataclass(frozen=True)
class Mistakes:
    """How often a demonstrator without care goes wrong, at each decision of the kind."""

    wrong_thing: float = 0.3
    """Takes another of the person's things."""
    wrong_argument: float = 0.15
    """Takes another of an argument's allowed values."""
    skipped_write: float = 0.2
    """Says it is done without doing it."""
    forgotten_call: float = 1.0
    """Makes only the first of several parallel calls."""
    careless_reply: float = 0.9
    """Says it is done instead of asking, declining or telling the fact."""

    def with_care(self, care: float) -> Mistakes:
        """``care`` 1 makes none, 0 makes all of them."""
        return replace(self, **{name: (1 - care) * value for name, value in self.__dict__.items()})


DONE = "Done."


def demonstrate(task: Task, seed: int, care: float = 0.0) -> tuple[Message, ...]:
    """What followed the task's first messages when the demonstrator did it in the world: assistant, tool and user messages.

    It stops where its first mistaken turn ends. With ``care`` 1 it is the reference solution.
    """
    assert task.world is not None
    rng = random.Random(derive_seed("demonstrator", task.id, seed))
    odds, of = Mistakes().with_care(care), SCENARIOS[task.world.name]
    writes = {write.tool for write in of.writes}
    world = REGISTRY[task.world.name](task.world.state)
    messages: list[Message] = []
    wrong = stop = False
    for message in task.solution:
        if message.role == "tool":
            continue
        if message.role == "user":
            if wrong:
                break
            messages.append(message)
            continue
        if stop:
            continue
        if not message.tool_calls:
            content = message.content
            if content != DONE and rng.random() < odds.careless_reply:
                content, wrong = DONE, True
            messages.append(Message(role="assistant", content=content))
            continue
        calls = list(message.tool_calls)
        if any(call.name in writes for call in calls):
            if rng.random() < odds.skipped_write:
                messages.append(Message(role="assistant", content=DONE))
                wrong = stop = True
                continue
            if len(calls) > 1 and rng.random() < odds.forgotten_call:
                calls, wrong = calls[:1], True
        varied = [_vary(call, task, rng, odds) for call in calls]
        wrong = wrong or varied != calls
        messages.append(Message(role="assistant", tool_calls=tuple(varied)))
        messages += [_answered(world, call) for call in varied]
    world.close()
    return tuple(messages)


def _vary(call: ToolCall, task: Task, rng: random.Random, odds: Mistakes) -> ToolCall:
    """The call as the demonstrator makes it."""
    assert task.world is not None
    of = SCENARIOS[task.world.name]
    write = next((write for write in of.writes if write.tool == call.name), None)
    arguments = dict(call.arguments)
    family = task.metadata["family"]
    if of.thing_id in arguments and family != "direct" and rng.random() < odds.wrong_thing:
        things = task.world.state[of.things]
        owner = next(thing[of.person_id] for thing in things if thing[of.thing_id] == arguments[of.thing_id])
        own = [thing[of.thing_id] for thing in things if thing[of.person_id] == owner]
        arguments[of.thing_id] = rng.choice([one for one in own if one != arguments[of.thing_id]])
    for name, values in (write.choices if write else {}).items():
        if rng.random() < odds.wrong_argument:
            arguments[name] = rng.choice(values)
    return ToolCall(name=call.name, arguments=arguments)


def _answered(world: World, call: ToolCall) -> Message:
    return Message(role="tool", name=call.name, content=canonical_json(world.call(call)))


def probe_calls(task: Task, seed: int, count: int = 4) -> list[Reference]:
    """A run of calls someone might make here, each with the true answer after the ones before it.

    Half are recorded or of the solution; the others are altered: another thing, an id or a name that does not exist, a
    change made twice. Every answer follows from the records, the earlier calls and the call.
    """
    assert task.world is not None
    rng = random.Random(derive_seed("probe", task.id, seed))
    of = SCENARIOS[task.world.name]
    solution = [call for message in task.solution for call in message.tool_calls]
    recorded = [reference.call for reference in task.references]
    things = [thing[of.thing_id] for thing in task.world.state[of.things]]
    world = REGISTRY[task.world.name](task.world.state)
    made: list[Reference] = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.5:
            call = rng.choice(recorded)
        elif kind < 0.7:
            call = _on(rng.choice(solution), of.thing_id, rng.choice(things))
        elif kind < 0.85:
            write = rng.choice(of.writes)
            chosen = {name: rng.choice(values) for name, values in write.choices.items()}
            call = ToolCall(name=write.tool, arguments={of.thing_id: rng.choice(things), **chosen})
        elif kind < 0.95 or not made:
            absent = (
                f"{of.thing_letter}{rng.choice([n for n in range(10, 100) if f'{of.thing_letter}{n}' not in things])}"
            )
            call = ToolCall(name=of.show, arguments={of.thing_id: absent})
        else:
            call = made[-1].call
        made.append(Reference(call=call, response=world.call(call)))
    world.close()
    return made


def _on(call: ToolCall, key: str, thing: Any) -> ToolCall:
    return ToolCall(name=call.name, arguments={**call.arguments, key: thing}) if key in call.arguments else call
