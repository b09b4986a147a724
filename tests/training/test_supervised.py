"""Rows of hand-written trajectories, read back as text."""

import json

import pytest

from envace.roles.rehearse import RehearsePrompt
from envace.training.supervised import Trajectory, supervised_rows
from envace.types import Role
from tests.scripted import RENDERER

FIND = {"name": "find", "parameters": {"type": "object", "properties": {"name": {"type": "string"}}}}


def called(*names: str) -> dict:
    calls = [{"id": f"c-{name}", "name": "find", "arguments": {"name": name}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def answered(name: str, content: str) -> dict:
    return {"role": "tool", "name": "find", "tool_call_id": f"c-{name}", "content": content}


def row_of(role: Role, first: list[dict], then: list[dict]) -> tuple[str, list[str]]:
    """The only row of a trajectory as text, and the texts that carry loss."""
    trajectory = Trajectory.model_validate(
        {
            "task": {"id": "t", "messages": first, "tools": [FIND]},
            "messages": then,
            "roles": [role],
        }
    )
    (row,) = supervised_rows(trajectory, RENDERER, RehearsePrompt("brief"))
    targets, current = [], []
    for token, counts in zip((*row.ids, 0), (*row.mask, 0), strict=True):
        if counts:
            current.append(token)
        elif current:
            targets.append(RENDERER.decode(current))
            current = []
    return RENDERER.decode(row.ids), targets


def block(value: object) -> str:
    return f"<execution_result>\n{json.dumps(value)}\n</execution_result>"


USER = {"role": "user", "content": "Ada and Bob?"}
DONE = {"role": "assistant", "content": "C1 and C2."}


def test_rehearse_learns_every_response_of_parallel_calls_by_their_ids():
    text, targets = row_of(
        Role.REHEARSE,
        [USER],
        [called("Ada", "Bob"), answered("Bob", '{"id": "C2"}'), answered("Ada", '{"id": "C1"}'), DONE],
    )
    assert targets == [block({"id": "C2"}), block({"id": "C1"})]
    asked = [line.removesuffix("<|im_end|>") for line in text.splitlines() if line.startswith("call: ")]
    assert asked == [f'call: {{"name": "find", "arguments": {{"name": "{name}"}}}}' for name in ("Bob", "Ada")]
    assert text.count("user: Ada and Bob?") == 1 and "C1 and C2." not in text


def test_calls_answered_before_the_trajectory_begins_are_shown_and_not_learned():
    text, targets = row_of(
        Role.REHEARSE,
        [USER, called("Ada"), answered("Ada", '{"id": "C1"}'), DONE, {"role": "user", "content": "Only Bob."}],
        [called("Bob"), answered("Bob", '{"id": "C2"}')],
    )
    assert targets == [block({"id": "C2"})]
    assert text.index(block({"id": "C1"})) < text.index("user: Only Bob.") < text.index(block({"id": "C2"}))


@pytest.mark.parametrize(
    ("content", "learned"),
    [("Not found.", {"result": "Not found."}), ("{}", {"result": {}}), ("[]", []), ("3", {"result": 3})],
)
def test_a_response_that_is_no_object_or_array_is_put_under_result(content, learned):
    _, targets = row_of(Role.REHEARSE, [USER], [called("Ada"), answered("Ada", content)])
    assert targets == [block(learned)]


def test_act_learns_its_messages_and_no_response():
    _, targets = row_of(Role.ACT, [USER], [called("Ada"), answered("Ada", '{"id": "C1"}'), DONE])
    assert [target.startswith("<tool_call>") for target in targets] == [True, False]
    assert targets[1] == "C1 and C2."
