"""Run folders: what is written is whole or not there, and a resumed run forgets what came after its checkpoint."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envace.errors import UserError
from envace.types import Episode, Group

SETTINGS = "settings.yaml"

_log = logging.getLogger(__name__)


class RunFolder:
    """The files of one run.

    ``settings.yaml``, ``metrics.jsonl`` (a line a step), ``rollouts/step-N.jsonl.gz`` (every episode),
    ``checkpoints/step-N/`` (a Hugging Face model folder that also holds the optimizer), ``evaluations/step-N.json`` and
    beside it a few of its episodes, ``tensorboard/`` and ``log.txt``. Every writing method raises ``UserError`` where the
    disk refuses; what was written before stays whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        self.tensorboard = path / "tensorboard"

    def write_rollouts(self, step: int, groups: Iterable[Group]) -> None:
        episodes = (episode for group in groups for episode in group.episodes)
        write_whole(self.path / "rollouts" / f"{_name(step)}.jsonl.gz", _lines(episodes))

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Appends a step's line. It comes after the step's rollouts, so a line is there only once the episodes are."""
        with _writing(self.metrics):
            self.path.mkdir(parents=True, exist_ok=True)
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_finite(metrics), allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines so far, but for a last one that a kill cut off or that is being written.

        Raises:
            UserError: another line is not the record of a step.
        """
        found: list[dict[str, Any]] = []
        lines = self.metrics.read_bytes().split(b"\n")[:-1] if self.metrics.is_file() else []
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise UserError(f"{self.metrics}, line {number}: damaged: not the record of a step; remove that line")
            found.append(record)
        return found

    def write_evaluation(self, step: int, result: Mapping[str, Any], episodes: Iterable[Episode] = ()) -> None:
        """The measures, and before them a few episodes to read."""
        write_whole(self.path / "evaluations" / f"{_name(step)}.episodes.jsonl.gz", _lines(episodes))
        write_whole(self.evaluation(step), json.dumps(_finite(result), indent=1, allow_nan=False).encode())

    def evaluation(self, step: int) -> Path:
        return self.path / "evaluations" / f"{_name(step)}.json"

    def write_checkpoint(self, step: int, save: Callable[[Path], None], keep: int) -> None:
        """Saves into a folder of another name and renames it when it is whole; keeps the newest ``keep``."""
        folder = self.checkpoint(step)
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            with _writing(partial, RuntimeError, *_safetensors_errors()):
                partial.parent.mkdir(parents=True, exist_ok=True)
                save(partial)
                for path in [*partial.rglob("*"), partial]:
                    _sync(path)
                shutil.rmtree(folder, ignore_errors=True)
                partial.rename(folder)
                _sync(folder.parent)
        except UserError:
            # The space goes back at once; the newest whole checkpoint is still there.
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(self.checkpoint(old), ignore_errors=True)

    def checkpoints(self) -> list[int]:
        """Steps after which there is a whole checkpoint, in order."""
        found = (re.fullmatch(r"step-(\d+)", folder.name) for folder in (self.path / "checkpoints").glob("step-*"))
        return sorted(int(match[1]) for match in found if match)

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / _name(step)

    def forget_after(self, step: int) -> None:
        """Drops metrics, rollouts and evaluations of steps after ``step``, and everything half-written."""
        kept = [line for line in self.read_metrics() if line["step"] <= step]
        write_whole(self.metrics, b"".join(json.dumps(line).encode() + b"\n" for line in kept))
        for folder in ("rollouts", "evaluations", "checkpoints"):
            for path in (self.path / folder).glob("step-*"):
                match = re.match(r"step-(\d+)", path.name)
                if match and (int(match[1]) > step or path.suffix == ".partial"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def has_run(path: Path) -> bool:
    """Whether there is a run in ``path``. One that ended before its first result, by a wrong model's name, is none yet."""
    results = (path / "metrics.jsonl", *(path / name for name in ("rollouts", "evaluations", "checkpoints")))
    return any(one.is_file() or any(one.glob("*")) for one in results)


@contextmanager
def open_run(path: Path, settings: str, resume: bool, name: str = SETTINGS) -> Iterator[RunFolder]:
    """A new run's folder, with ``settings`` (YAML) in it as ``name``, or an earlier one's; no other process has it meanwhile.

    Raises:
        UserError: another process has it, a new run would write into an old one's folder, there is nothing to resume, or
            nothing can be written.
    """
    held = path / name
    if resume and not held.is_file():
        raise UserError(f"{path}: not a run folder (no {name}), so there is nothing to resume")
    with locked(path):
        if not resume and has_run(path):
            raise UserError(
                f"{path}: there is a run in it already; go on with --resume {path}, or choose another folder"
            )
        if not resume:
            write_whole(held, settings.encode())
        yield RunFolder(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """``folder``, made if it is not there, for this process alone. The lock ends with the process, however that ends.

    Raises:
        UserError: another process has it, or it cannot be made.
    """
    path = folder / ".lock"
    with _writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process is at work in it; wait for its end, or stop it first") from None
        except OSError as error:
            # Some network file systems have no locks; a run is worth more there than the guard.
            _log.warning("%s: cannot be locked (%s); start no second run in it", folder, error.strerror)
        yield


def newest_checkpoint(path: Path) -> Path:
    """The newest whole checkpoint of the run in ``path``.

    Raises:
        UserError: it has none yet.
    """
    run = RunFolder(path)
    steps = run.checkpoints()
    if not steps:
        raise UserError(f"{path}: the run has no checkpoint yet")
    return run.checkpoint(steps[-1])


def _lines(episodes: Iterable[Episode]) -> bytes:
    text = "".join(episode.model_dump_json() + "\n" for episode in episodes)
    return gzip.compress(text.encode(), compresslevel=3, mtime=0)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def write_whole(path: Path, data: bytes) -> None:
    """Writes beside ``path`` and renames.

    Raises:
        UserError: the disk refuses; what was there before stays.
    """
    partial = path.with_name(path.name + ".partial")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Content of a file, or names in a folder, on the disk and not only in its cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _writing(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """An ``OSError`` (full disk, read-only folder), or what a serializer makes of one, becomes one message with the path."""
    refusals: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except refusals as error:
        refused = _refusal(error)
        if refused is None:  # a serializer's own fault, and no disk's
            raise
        advice = _ADVICE.get(refused.errno or 0, "")
        raise UserError(
            f"{path}: cannot be written: {refused.strerror or refused}; {advice}nothing written before is lost"
        ) from error


def _refusal(error: BaseException | None) -> OSError | None:
    """What the system refused beneath a serializer's error: torch's comes while it is handled, safetensors' tells the code."""
    while error is not None and not isinstance(error, OSError):
        if told := re.search(r"os error (\d+)", str(error)):
            return OSError(int(told[1]), os.strerror(int(told[1])))
        error = error.__cause__ or error.__context__
    return error


_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free the disk, "),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "mend the folder's rights, "),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "a file is where a folder should be, "),
}


def _safetensors_errors() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError

    return (SafetensorError,)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; a number that is none is ``null``."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
