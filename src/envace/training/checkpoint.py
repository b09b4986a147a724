"""Run folders: what is written is whole or not there, and a resumed run forgets what came after its checkpoint."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from envace.errors import UserError
from envace.types import Group


class RunFolder:
    """The files of one run.

    ``settings.json``, ``metrics.jsonl`` (a line a step), ``rollouts/step-N.jsonl.gz`` (every episode),
    ``checkpoints/step-N/`` (a Hugging Face model folder that also holds the optimizer), ``evaluations/step-N.json``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        for name in ("rollouts", "checkpoints", "evaluations"):
            (path / name).mkdir(parents=True, exist_ok=True)

    def write_step(self, step: int, groups: Iterable[Group], metrics: dict[str, Any]) -> None:
        """A step's episodes, then its line of metrics: a line is there only once the episodes are."""
        lines = (episode.model_dump_json() for group in groups for episode in group.episodes)
        data = gzip.compress("".join(line + "\n" for line in lines).encode(), compresslevel=3, mtime=0)
        _whole_file(self.path / "rollouts" / f"{_name(step)}.jsonl.gz", data)
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_evaluation(self, step: int, result: dict[str, Any]) -> None:
        _whole_file(self.path / "evaluations" / f"{_name(step)}.json", json.dumps(result, indent=1).encode())

    def write_checkpoint(self, step: int, save: Callable[[Path], None], keep: int) -> None:
        """Saves into a folder of another name and renames it when it is whole; keeps the newest ``keep``."""
        folder = self.path / "checkpoints" / _name(step)
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        save(partial)
        for file in partial.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(self.path / "checkpoints" / _name(old))

    def checkpoints(self) -> list[int]:
        """Steps after which there is a whole checkpoint, in order."""
        folders = (self.path / "checkpoints").iterdir()
        return sorted(int(folder.name.removeprefix("step-")) for folder in folders if not folder.suffix)

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / _name(step)

    def forget_after(self, step: int) -> None:
        """Drops metrics, rollouts and evaluations of steps after ``step``, and half-written checkpoints."""
        lines = self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.is_file() else []
        kept = []
        for line in lines:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except ValueError:
                break  # the line a kill cut off
        _whole_file(self.metrics, "".join(kept).encode())
        for folder in ("rollouts", "evaluations"):
            for file in (self.path / folder).iterdir():
                if file.name.startswith("step-") and int(file.name[5:11]) > step:
                    file.unlink()
        for partial in (self.path / "checkpoints").glob("*.partial"):
            shutil.rmtree(partial)


def open_run(path: Path, settings: str, resume: bool) -> RunFolder:
    """A new run's folder, or an earlier one's.

    Raises:
        UserError: a new run would write into an old one's folder, or there is nothing to resume.
    """
    held = path / "settings.json"
    if resume and not held.is_file():
        raise UserError(f"{path}: not a run folder (no settings.json), so there is nothing to resume")
    if not resume and held.is_file():
        raise UserError(f"{path}: there is a run in it already; resume it, or choose another folder")
    path.mkdir(parents=True, exist_ok=True)
    if not resume:
        _whole_file(held, settings.encode())
    return RunFolder(path)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _whole_file(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
