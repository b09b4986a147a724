"""What a step says about itself: numbers from its episodes and rows, and the trackers they are sent to.

Knows no engine, no tokenizer and no file of the run but TensorBoard's.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, Literal

from envace.algorithms.rolewise_grpo import has_variance
from envace.engines.base import TrainingRow
from envace.errors import UserError
from envace.types import EndReason, Episode, Group, Role

_log = logging.getLogger(__name__)

TrackerName = Literal["wandb", "trackio"]


def step_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Of a step's episodes. A mean over nothing is ``None``, and episodes that are not scored enter no mean.

    ``response_validity`` is the share of responses asked of a model, as policy or as simulator, that could be parsed.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    generations = [generation for episode in episodes for generation in episode.generations]
    asked = sum(generation.role is Role.REHEARSE for generation in generations) + sum(
        episode.external_calls for episode in episodes if episode.responder == "simulator"
    )
    malformed = sum(
        episode.end is EndReason.RESPONSE_ERROR
        for episode in episodes
        if episode.responder in ("rehearsal", "simulator")
    )
    metrics: dict[str, Any] = {
        "episodes": len(episodes),
        "not_scored": sum(not episode.scored for episode in episodes),
        "reward": _mean_reward(episodes),
    }
    for role in Role:
        own = [episode for episode in episodes if any(one.role is role for one in episode.generations)]
        metrics[f"reward_{role.value}"] = _mean_reward(own)
        metrics[f"generations_{role.value}"] = sum(generation.role is role for generation in generations)
    return metrics | {
        "groups_with_variance": sum(map(has_variance, groups)),
        "response_validity": 1 - malformed / asked if asked else None,
        "external_calls": sum(episode.external_calls for episode in episodes),
        "tokens_sampled": sum(len(generation.completion_ids) for generation in generations),
        "ends": {
            reason.value: count for reason in EndReason if (count := sum(episode.end is reason for episode in episodes))
        },
    }


def advantage_metrics(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """Mean, standard deviation, least and greatest advantage over each role's sampled tokens, as the policy loss has them."""
    metrics: dict[str, float] = {}
    for role in Role:
        values = [
            advantage
            for row in rows
            if row.role == role.value and row.objective == "policy"
            for advantage, sampled in zip(row.advantages, row.mask, strict=True)
            if sampled
        ]
        if not values:
            continue
        mean = sum(values) / len(values)
        metrics |= {
            f"advantage_{role.value}_mean": mean,
            f"advantage_{role.value}_std": sqrt(sum((value - mean) ** 2 for value in values) / len(values)),
            f"advantage_{role.value}_min": min(values),
            f"advantage_{role.value}_max": max(values),
        }
    return metrics


def _mean_reward(episodes: Sequence[Episode]) -> float | None:
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def require_installed(names: Sequence[TrackerName]) -> None:
    """Says before anything runs that a tracker is missing.

    Raises:
        UserError: names it.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(f"trackers: {name} is not installed: pip install {name}") from None


class Trackers:
    """TensorBoard, and what else was asked for. ``first`` is the first step to come: later ones of an earlier try go.

    Raises:
        UserError: a tracker that was asked for is not installed, or does not start.
    """

    def __init__(
        self, folder: Path, names: Sequence[TrackerName], run: str, settings: Mapping[str, Any], first: int
    ) -> None:
        self._services: dict[str, Any] = {}
        require_installed(names)
        for name in names:
            service = importlib.import_module(name)
            try:
                service.init(project="envace", name=run, config=dict(settings))
            except Exception as error:  # each has errors of its own: no account, no network, a full disk
                raise UserError(
                    f"trackers: {name} does not start: {error}; set it up (as its own documentation says) or leave it out"
                ) from None
            self._services[name] = service
        self._writer: Any = None
        try:
            self._writer = importlib.import_module("tensorboardX").SummaryWriter(str(folder), purge_step=first)
        except ImportError:
            _log.warning("tensorboardX is not installed, so there will be no %s", folder)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = dict(_numbers(metrics))
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        self._each(lambda service: service.log(numbers, step=step))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._each(lambda service: service.finish())

    def _each(self, work: Callable[[Any], object]) -> None:
        """A service that fails is left out from then on: a run does not end for one, and its figures are in its folder."""
        for name, service in list(self._services.items()):
            try:
                work(service)
            except Exception as error:
                _log.warning("%s fails (%s) and is told no more; metrics.jsonl has everything", name, error)
                del self._services[name]


def _numbers(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and isfinite(value) and name != "step":
            yield prefix + name, float(value)
