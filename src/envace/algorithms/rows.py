"""Generations to training sequences: consecutive generations of a role whose prompt extends the last are one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from envace.engines.base import TrainingRow
from envace.types import Generation


@dataclass(frozen=True)
class Weighted:
    """A generation with its advantage."""

    generation: Generation
    advantage: float


def training_rows(
    items: Sequence[Weighted],
    weight: float = 1.0,
    kl: float = 0.0,
    objective: Literal["policy", "anchor"] = "policy",
    merge: bool = True,
) -> list[TrainingRow]:
    """Rows of one episode and role, in order.

    With ``merge`` a generation whose prompt begins with the whole sequence of the row before it is appended to that row:
    the shared prefix is computed once, and since attention is causal the loss is the same.
    """
    rows: list[TrainingRow] = []
    for item in items:
        generation = item.generation
        prompt, completion = generation.prompt_ids, generation.completion_ids
        last = rows[-1] if rows else None
        if merge and last and last.temperature == generation.temperature and prompt[: len(last.ids)] == last.ids:
            rows.pop()
            gap = len(prompt) - len(last.ids)
            head = last
        else:
            gap, head = len(prompt), TrainingRow((), (), (), (), generation.role.value)
        size = len(completion)
        rows.append(
            TrainingRow(
                ids=prompt + completion,
                mask=head.mask + (0,) * gap + (1,) * size,
                advantages=head.advantages + (0.0,) * gap + (item.advantage,) * size,
                logprobs=head.logprobs + (0.0,) * gap + generation.logprobs,
                role=generation.role.value,
                temperature=generation.temperature,
                weight=weight,
                kl=kl,
                objective=objective,
            )
        )
    return rows
