"""Role-wise GRPO (EnvACE, arXiv 2608.06197): both roles learn from the episode's reward, each against its own baseline.

Every generation of either role is a row with its episode's reward. The baseline is the mean over the rows of the same task
and role, so acting is compared with acting and rehearsing with rehearsing. Published settings are the defaults: no division
by the standard deviation, no KL, PPO clipping, token-mean loss, one optimizer step a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal

from pydantic import Field

from envace.algorithms.advantages import group_advantages
from envace.algorithms.rows import Weighted, training_rows
from envace.engines.base import TrainingRow
from envace.types import Frozen, Generation, Group, Role


class AlgorithmSettings(Frozen):
    """The published algorithm, and its options."""

    baseline: Literal["row", "episode", "leave_one_out"] = Field(
        default="row", description="what the mean runs over: rows, episodes, or the other episodes (RLOO)"
    )
    scope: Literal["role", "call", "joint"] = Field(
        default="role",
        description="a baseline per role; call: of Rehearse per call it answers; joint: one for both roles (ablation)",
    )
    normalize_std: bool = Field(default=False, description="divide advantages by the group's standard deviation")
    singleton: Literal["zero", "reward"] = Field(
        default="zero", description="advantage where a baseline has one value; reward: as the released code"
    )
    freeze: tuple[Role, ...] = Field(default=(), description="roles that are not trained (ablation)")
    act_weight: float = Field(default=1.0, ge=0, description="multiplies Act's loss, its KL apart")
    rehearse_weight: float = Field(default=1.0, ge=0, description="multiplies Rehearse's loss, its KL apart")
    drop_no_variance: bool = Field(default=False, description="leave out groups without variance (DAPO)")
    ratio: Literal["token", "sequence"] = Field(
        default="token", description="what is clipped: each token's ratio, or a whole generation's (GSPO)"
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="a ratio is clipped below 1 - clip_low")
    clip_high: float = Field(default=0.2, gt=0, description="above clip_low it is clip-higher (DAPO)")
    kl: Literal["exact", "k3"] = Field(
        default="exact", description="over the vocabulary, or estimated from the sampled tokens (GRPO): less memory"
    )
    act_kl: float = Field(default=0.0, ge=0, description="coefficient of Act's KL to the start policy")
    rehearse_kl: float = Field(default=0.0, ge=0, description="the same for Rehearse: keeps what it imagines true")


def has_variance(group: Group) -> bool:
    """Whether two scored episodes of the group differ in reward."""
    return len({episode.reward for episode in group.episodes if episode.reward is not None}) > 1


def _compared_with(generation: Generation, scope: Literal["role", "call", "joint"]) -> tuple[Hashable, ...]:
    """What the rows that a row is compared with have in common, besides the task.

    By role, an answer that every episode got alike still has a gradient: episodes that end early hold first answers and no
    later ones, so where acting fails early, first answers are pushed down, the right ones too. By call the advantages of
    one answer to one call add up to 0 (after the step-level groups of GiGPO, arXiv 2505.10978).
    """
    if scope == "joint":
        return ()
    if scope == "call" and generation.role is Role.REHEARSE:
        return generation.role, generation.prompt_ids
    return (generation.role,)


def build_rows(
    groups: Sequence[Group], settings: AlgorithmSettings, merge: bool = True
) -> tuple[list[TrainingRow], dict[str, float]]:
    """Training rows of a batch and the advantage metrics. Episodes that are not scored give no rows and enter no baseline.

    Rows whose every advantage is 0 still count in the token-mean (they are sampled tokens of the batch), as published,
    unless ``drop_no_variance`` leaves their group out. Of such a group an anchored role (a KL coefficient above 0) keeps its
    rows for the KL alone: where every episode fails because one response is wrong in all of them, nothing else would pull
    that response back. A frozen role gives no rows; with a joint scope it still counts in the baseline.
    """
    generations: list[Generation] = []
    rewards: list[float] = []
    episodes: list[tuple[int, int]] = []
    for number, group in enumerate(groups):
        for position, episode in enumerate(group.episodes):
            if episode.reward is None:
                continue
            generations += episode.generations
            rewards += [episode.reward] * len(episode.generations)
            episodes += [(number, position)] * len(episode.generations)
    advantages = group_advantages(
        rewards,
        [
            (number, *_compared_with(generation, settings.scope))
            for (number, _), generation in zip(episodes, generations, strict=True)
        ],
        episodes,
        baseline=settings.baseline,
        normalize_std=settings.normalize_std,
        singleton=settings.singleton,
    )
    dropped = {number for number, group in enumerate(groups) if settings.drop_no_variance and not has_variance(group)}
    sequences: dict[tuple[int, int, Role], list[Weighted]] = defaultdict(list)
    for (number, position), generation, advantage in zip(episodes, generations, advantages, strict=True):
        if generation.role not in settings.freeze:
            sequences[number, position, generation.role].append(Weighted(generation, advantage))
    weights = {Role.ACT: settings.act_weight, Role.REHEARSE: settings.rehearse_weight}
    kls = {Role.ACT: settings.act_kl, Role.REHEARSE: settings.rehearse_kl}
    rows: list[TrainingRow] = []
    trained: list[float] = []
    for (number, _, role), items in sequences.items():
        if number not in dropped:
            rows += training_rows(items, weights[role], kls[role], merge=merge)
            trained += [item.advantage for item in items]
        elif kls[role]:
            rows += training_rows(items, weights[role], kls[role], "anchor", merge)
    metrics = {
        "groups": float(len(groups)),
        "groups_without_variance": float(sum(not has_variance(group) for group in groups)),
        "advantage_abs_mean": sum(map(abs, trained)) / max(1, len(trained)),
    }
    return rows, metrics
