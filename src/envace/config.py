"""Settings: YAML files with ``key=value`` overrides, checked before anything runs."""

from __future__ import annotations

import codecs
import difflib
import reprlib
from collections.abc import Hashable, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from envace.algorithms.rolewise_grpo import AlgorithmSettings
from envace.chat.settings import ChatSettings, PathOrName
from envace.engines.local.engine import LocalEngineSettings
from envace.episode import Limits
from envace.errors import UserError
from envace.roles.generate import RoleSampling
from envace.types import Frozen
from envace.worlds import known_worlds

Worlds = Annotated[tuple[str, ...], AfterValidator(known_worlds)]


class TaskSettings(Frozen):
    """Tasks from a file, or built from worlds."""

    file: Annotated[Path, AfterValidator(Path.absolute)] | None = None
    worlds: Worlds = ()
    count: int = Field(default=200, gt=0, description="tasks a world")
    seed: int = 0
    split: str = "train"


class EvaluationSettings(Frozen):
    """Evaluation in the real worlds, on tasks that are never trained on."""

    every: int = Field(default=0, ge=0, description="steps between evaluations; 0: only before and after")
    worlds: Worlds = ()
    count: int = Field(default=24, gt=0, description="tasks a world")
    samples: int = Field(default=1, gt=0, description="episodes a task at `temperature`; greedily always one")
    temperature: float = Field(default=1.0, ge=0)
    probes: int = Field(
        default=4, gt=0, description="calls a task whose rehearsed response is compared with the world's"
    )
    seed: int = 0


class RehearseSettings(Frozen):
    prompt: PathOrName = Field(
        default="full", description="full, brief, or a folder with system.jinja and pending.jinja"
    )
    references: bool = Field(default=True, description="whether the recorded calls are shown")


class TrainSettings(Frozen):
    """Settings of ``envace train``."""

    model: PathOrName
    chat: ChatSettings = ChatSettings()
    tasks: TaskSettings
    responder: Literal["rehearsal", "simulator", "environment", "replay"] = "rehearsal"
    simulator_model: PathOrName | None = None
    rehearse: RehearseSettings = RehearseSettings()
    act_sampling: RoleSampling = RoleSampling()
    rehearse_sampling: RoleSampling = RoleSampling()
    reward: Literal["fraction", "all"] = "fraction"
    group_size: int = Field(default=4, gt=1)
    tasks_per_step: int = Field(default=16, gt=0)
    refill_rounds: int = Field(
        default=0, ge=0, description="how often groups without variance are replaced by other tasks' in a step (DAPO)"
    )
    steps: int = Field(default=100, gt=0)
    seed: int = 0
    checkpoint_every: int = Field(default=10, gt=0)
    keep_checkpoints: int = Field(default=2, gt=0)
    algorithm: AlgorithmSettings = AlgorithmSettings()
    engine: LocalEngineSettings = LocalEngineSettings()
    limits: Limits = Limits()
    evaluation: EvaluationSettings = EvaluationSettings()
    trackers: tuple[Literal["wandb", "trackio"], ...] = Field(default=(), description="besides TensorBoard")

    @model_validator(mode="after")
    def _refilled_are_dropped(self) -> Self:
        if self.refill_rounds and not self.algorithm.drop_no_variance:
            raise ValueError("refill_rounds replaces dropped groups: set algorithm.drop_no_variance too")
        return self


T = TypeVar("T", bound=BaseModel)


def load_settings(kind: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """The settings of a YAML file, with ``a.b=value`` overrides (values are YAML).

    A bare name that is no file is looked up among the settings that ship with EnvACE.

    Raises:
        UserError: no such file, or one that cannot be read; broken YAML, or a key twice in it; an override that is none;
            an unknown key (with the nearest name), or a bad value.
    """
    path = _found(path)
    try:
        held = path.read_bytes()
        text = held.decode("utf-16" if held.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: not YAML: neither UTF-8 nor UTF-16 text") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        data = _yaml(text)
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{where}: not YAML: {error.problem}") from None
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise UserError(f"{path}: settings must be keys with values, not a {type(data).__name__}")
    for override in overrides:
        _override(data, override)
    return _checked(kind, data, str(path), overrides)


def dump_settings(settings: BaseModel) -> str:
    """``settings`` as YAML that ``load_settings`` reads back, every default written out."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Safe YAML whose keys are names, each given once, and that refuses every value it cannot read by its place."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not where values are made, for there keys that were merged (<<) stand beside the group's own.
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or a group of keys"
                raise yaml.MarkedYAMLError(
                    problem=f"keys are names, not {shown or 'nothing'}", problem_mark=key.start_mark
                )
            if key.value in lines:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} was given on line {lines[key.value]} too; leave one of them out",
                    problem_mark=key.start_mark,
                )
            lines[key.value] = key.start_mark.line + 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Hashable:
        try:
            made: Hashable = super().construct_object(node, deep)
            return made
        except (ArithmeticError, AttributeError, LookupError, ValueError):  # 2024-13-45, !!int x, !!bool x …
            kind = node.tag.rpartition(":")[2]
            raise yaml.MarkedYAMLError(
                problem=f"{reprlib.repr(node.value)} is no {kind}; put quotes around it if it is text",
                problem_mark=node.start_mark,
            ) from None


def _yaml(text: str) -> Any:
    """The value in ``text``; raises ``yaml.MarkedYAMLError`` alone."""
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        mark = yaml.Mark("", error.position, text.count("\n", 0, error.position), 0, text, error.position)
        raise yaml.MarkedYAMLError(
            problem=f"a character U+{ord(text[error.position]):04X}", problem_mark=mark
        ) from None
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=loader.get_mark()) from None


def _found(path: Path) -> Path:
    try:
        if path.is_file():
            return path
        exists, folder = path.exists(), path.is_dir()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    shipped = Path(str(resources.files("envace"))) / "configs"
    names = sorted(file.stem for file in shipped.glob("*.yaml"))
    if str(path) in names:
        return shipped / f"{path}.yaml"
    if folder:
        raise UserError(f"{path}: a folder; name a settings file (a run's is its settings.yaml)")
    if exists:
        raise UserError(f"{path}: a pipe or a device; settings are read more than once, so write them to a file")
    near = difflib.get_close_matches(str(path), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"shipped ones: {', '.join(names)}"
    raise UserError(f"{path}: no such settings file; {hint}")


def _checked(kind: type[T], data: dict[str, Any], file: str, overrides: Sequence[str]) -> T:
    """``data`` as settings of ``kind``; the error names where the key came from, the key, and the nearest known name."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        key = ".".join(path)
        given = [text for text in overrides if f"{key}.".startswith(text.partition("=")[0] + ".")]
        where = f"override {given[-1]!r}" if given and key else file
        if first["type"] == "extra_forbidden":
            known = _names(kind, path[:-1])
            near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise UserError(f"{where}: unknown key {key!r}{hint}") from None
        reason = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}: {key}: {reason}" if key else f"{where}: {reason}") from None


def _override(data: dict[str, Any], override: str) -> None:
    path, sign, value = override.partition("=")
    *parents, last = path.split(".")
    if not sign or not all([*parents, last]):
        raise UserError(f"override {override!r}: write it as key=value or key.key=value")
    for parent in parents:
        group = {} if data.get(parent) is None else data[parent]
        if not isinstance(group, dict):
            raise UserError(f"override {override!r}: {parent!r} is a value, not a group of keys")
        data[parent] = dict(group)  # a copy: an alias (*name) may stand for the same group elsewhere
        data = data[parent]
    try:
        data[last] = _yaml(value)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"override {override!r}: the value is not YAML: {error.problem}") from None


def _names(kind: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Field names of the model at ``path`` below ``kind``."""
    for part in path:
        annotation = kind.model_fields[part].annotation if part in kind.model_fields else None
        models = [
            one for one in (annotation, *get_args(annotation)) if isinstance(one, type) and issubclass(one, BaseModel)
        ]
        if not models:
            return []
        kind = models[0]
    return list(kind.model_fields)
