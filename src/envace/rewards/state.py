"""Success in a real world: the goal is reached, nothing else changed, and the replies hold the facts asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envace.chat.tools import canonical_json, same_json
from envace.rewards.checks import holds_fact
from envace.types import WorldGoal, WorldState


@dataclass(frozen=True)
class StateResult:
    goal_reached: bool
    """Every row that had to change is as the goal has it."""
    nothing_else_changed: bool
    facts_told: bool

    @property
    def success(self) -> bool:
        return self.goal_reached and self.nothing_else_changed and self.facts_told


def final_state(goal: WorldGoal, state: WorldState, replies: Sequence[str]) -> StateResult:
    """Compares a world's final rows with the goal's. ``replies``: the last assistant text of each user turn reached."""
    before, wanted, after = (_rows(rows) for rows in (goal.state, goal.goal, state))
    due = {key for key in wanted.keys() | before.keys() if not same_json(wanted.get(key), before.get(key))}
    keys = wanted.keys() | before.keys() | after.keys()
    told = len(replies) >= len(goal.facts) and all(
        all(holds_fact(reply, fact) for fact in facts) for facts, reply in zip(goal.facts, replies, strict=False)
    )
    return StateResult(
        goal_reached=all(same_json(after.get(key), wanted.get(key)) for key in due),
        nothing_else_changed=all(same_json(after.get(key), before.get(key)) for key in keys - due),
        facts_told=told,
    )


def _rows(state: WorldState) -> dict[tuple[str, str], object]:
    """Rows by table and first column, which is the key in every world."""
    return {
        (table, canonical_json(next(iter(row.values())))): row for table, rows in state.items() for row in rows if row
    }
