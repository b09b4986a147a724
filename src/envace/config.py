"""Settings: YAML files with ``key=value`` overrides, checked before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from envace.algorithms.rolewise_grpo import AlgorithmSettings
from envace.engines.local.engine import LocalEngineSettings
from envace.episode import Limits
from envace.errors import UserError
from envace.responders.rehearsal import RoleSampling
from envace.types import Frozen


class TaskSettings(Frozen):
    """Tasks from a file, or built from worlds."""

    file: Path | None = None
    worlds: tuple[str, ...] = ()
    count: int = Field(default=200, gt=0, description="tasks a world")
    seed: int = 0
    split: str = "train"


class EvaluationSettings(Frozen):
    """Evaluation in the real worlds, on tasks that are never trained on."""

    every: int = Field(default=0, ge=0, description="steps between evaluations; 0: only before and after")
    worlds: tuple[str, ...] = ()
    count: int = Field(default=24, gt=0, description="tasks a world")
    temperature: float = Field(default=1.0, ge=0)
    seed: int = 0


class RehearseSettings(Frozen):
    prompt: str = Field(default="full", description="full, brief, or a folder with system.jinja and pending.jinja")
    references: bool = Field(default=True, description="whether the recorded calls are shown")


class TrainSettings(Frozen):
    """Settings of ``envace train``."""

    model: str
    tasks: TaskSettings
    responder: Literal["rehearsal", "simulator", "environment", "replay"] = "rehearsal"
    simulator_model: str | None = None
    rehearse: RehearseSettings = RehearseSettings()
    act_sampling: RoleSampling = RoleSampling()
    rehearse_sampling: RoleSampling = RoleSampling()
    reward: Literal["fraction", "all"] = "fraction"
    group_size: int = Field(default=4, gt=1)
    tasks_per_step: int = Field(default=16, gt=0)
    steps: int = Field(default=100, gt=0)
    seed: int = 0
    checkpoint_every: int = Field(default=10, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)
    algorithm: AlgorithmSettings = AlgorithmSettings()
    engine: LocalEngineSettings = LocalEngineSettings()
    limits: Limits = Limits()
    evaluation: EvaluationSettings = EvaluationSettings()


T = TypeVar("T", bound=BaseModel)


def load_settings(kind: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """The settings of a YAML file, with ``a.b=value`` overrides (values are YAML).

    Raises:
        UserError: no such file, broken YAML, an override that is none, an unknown key (with the nearest name), a bad value.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such settings file")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: settings must be keys with values, not a {type(data).__name__}")
    for override in overrides:
        _override(data, override)
    return checked(kind, data, str(path))


def checked(kind: type[T], data: dict[str, Any], where: str) -> T:
    """``data`` as settings of ``kind``.

    Raises:
        UserError: names the key, and for an unknown one the nearest known name.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _names(kind, [str(part) for part in first["loc"][:-1]])
            near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise UserError(f"{where}: unknown key {key!r}{hint}") from None
        raise UserError(f"{where}: {key}: {first['msg'].removeprefix('Value error, ')}") from None


def _override(data: dict[str, Any], override: str) -> None:
    path, sign, value = override.partition("=")
    if not sign or not path:
        raise UserError(f"override {override!r}: write it as key=value or key.key=value")
    *parents, last = path.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise UserError(f"override {override!r}: {parent!r} is a value, not a group of keys")
    try:
        data[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not YAML") from None


def _names(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Field names of the model at ``path`` below ``kind``."""
    for part in path:
        annotation = kind.model_fields[part].annotation if part in kind.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        kind = annotation
    return list(kind.model_fields)
