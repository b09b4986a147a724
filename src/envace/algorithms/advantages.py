"""Advantages of rows: what each row's reward is compared with.

A row is one generation. R_j is the reward of row j's episode, e_j its episode, and a row's *peers* are the scored rows
of its baseline group: the same task and role (EnvACE, arXiv 2608.06197), or the same task alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from math import sqrt
from typing import Literal

STD_FLOOR = 1e-6


def group_advantages(
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    episodes: Sequence[Hashable],
    *,
    baseline: Literal["row", "episode", "leave_one_out"] = "row",
    normalize_std: bool = False,
    singleton: Literal["zero", "reward"] = "zero",
) -> list[float]:
    """A_j = R_j - b(group of j), one value a row; the three sequences run over the same rows.

    * ``row`` (published): b = mean of R over the group's rows, so an episode with more rows counts more.
    * ``episode``: b = mean of R over the group's episodes, each counted once.
    * ``leave_one_out``: b = mean of R over the group's *other* episodes (RLOO, arXiv 2402.14740).

    With ``normalize_std`` A is divided by the population standard deviation of the group's rewards, over rows or episodes as
    the baseline counts them (GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783, argues against it and the published
    setting has none); a deviation below 1e-6 gives 0.

    Where one episode alone has rows, nothing can be compared and A = 0. ``singleton="reward"`` is the released code's rule: a
    mean over a single value is taken as 0, so A = R (for ``row`` a single row; several rows of one episode still give 0).
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for row, group in enumerate(groups):
        members[group].append(row)
    advantages = [0.0] * len(rewards)
    for rows in members.values():
        by_episode = {episodes[row]: rewards[row] for row in rows}
        values = [rewards[row] for row in rows] if baseline == "row" else list(by_episode.values())
        if len(values) == 1 and singleton == "reward":
            for row in rows:
                advantages[row] = rewards[row]
        if len(by_episode) == 1:
            continue
        mean = sum(values) / len(values)
        scale = 1.0
        if normalize_std:
            deviation = sqrt(sum((value - mean) ** 2 for value in values) / len(values))
            scale = 1 / deviation if deviation > STD_FLOOR else 0.0
        for row in rows:
            others = mean
            if baseline == "leave_one_out":
                others = (sum(values) - rewards[row]) / (len(values) - 1)
            advantages[row] = (rewards[row] - others) * scale
    return advantages
