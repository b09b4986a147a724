"""Role-wise GRPO (EnvACE, arXiv 2608.06197): both roles learn from the episode's reward, each against its own baseline.

Every generation of either role is a row with its episode's reward. The baseline is the mean over the rows of the same task
and role, so acting is compared with acting and rehearsing with rehearsing. Published settings are the defaults: no division
by the standard deviation, no KL, PPO clipping, token-mean loss, one optimizer step a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from envace.algorithms.advantages import group_advantages
from envace.algorithms.rows import Weighted, by_role, training_rows
from envace.engines.base import TrainingRow
from envace.types import Frozen, Generation, Group, Role


class AlgorithmSettings(Frozen):
    """The published algorithm, and its options."""

    baseline: Literal["row", "episode", "leave_one_out"] = Field(
        default="row", description="what the mean runs over: rows, episodes, or the other episodes (RLOO)"
    )
    scope: Literal["role", "joint"] = Field(
        default="role", description="a baseline per role, or one for both (ablation)"
    )
    normalize_std: bool = Field(default=False, description="divide advantages by the group's standard deviation")
    singleton: Literal["zero", "reward"] = Field(
        default="zero", description="advantage where only one scored episode has rows of the role"
    )
    freeze: tuple[Role, ...] = Field(default=(), description="roles that are not trained (ablation)")
    act_weight: float = Field(default=1.0, ge=0, description="multiplies Act's loss")
    rehearse_weight: float = Field(default=1.0, ge=0, description="multiplies Rehearse's loss")
    drop_no_variance: bool = Field(
        default=False, description="leave out groups without variance and sample others (DAPO)"
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0, description="above clip_low it is clip-higher (DAPO)")
    kl: float = Field(default=0.0, ge=0, description="coefficient of the KL to the start policy")


def has_variance(group: Group) -> bool:
    """Whether two scored episodes of the group differ in reward."""
    return len({episode.reward for episode in group.episodes if episode.reward is not None}) > 1


def build_rows(
    groups: Sequence[Group], settings: AlgorithmSettings, merge: bool = True
) -> tuple[list[TrainingRow], dict[str, float]]:
    """Training rows of a batch and the advantage metrics. Episodes that are not scored give no rows and enter no baseline.

    Rows whose every advantage is 0 still count in the token-mean (they are sampled tokens of the batch), as published,
    unless ``drop_no_variance`` leaves their group out.
    """
    generations: list[Generation] = []
    rewards: list[float] = []
    keys: list[tuple[int, str]] = []
    owners: list[tuple[int, int]] = []
    kept = [group for group in groups if not settings.drop_no_variance or has_variance(group)]
    for number, group in enumerate(kept):
        for episode in group.episodes:
            if episode.reward is None:
                continue
            for generation in episode.generations:
                generations.append(generation)
                rewards.append(episode.reward)
                keys.append((number, generation.role.value if settings.scope == "role" else ""))
                owners.append((number, episode.index))
    advantages = group_advantages(
        rewards,
        keys,
        owners,
        baseline=settings.baseline,
        normalize_std=settings.normalize_std,
        singleton=settings.singleton,
    )
    advantage_of = {id(generation): advantage for generation, advantage in zip(generations, advantages, strict=True)}
    weights = {Role.ACT: settings.act_weight, Role.REHEARSE: settings.rehearse_weight}
    rows: list[TrainingRow] = []
    for group in kept:
        for episode in group.episodes:
            if episode.reward is None:
                continue
            for role, own in by_role(episode.generations).items():
                if role in settings.freeze:
                    continue
                items = [Weighted(generation, advantage_of[id(generation)]) for generation in own]
                rows += training_rows(items, weights[role], merge)
    metrics = {
        "groups": float(len(groups)),
        "groups_without_variance": float(sum(not has_variance(group) for group in groups)),
        "advantage_abs_mean": sum(map(abs, advantages)) / max(1, len(advantages)),
    }
    return rows, metrics
