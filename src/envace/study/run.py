"""Runs ``envace train`` for every variant and seed, several at a time, each in a process and a run folder of its own.

Knows the command line and the run folder's files, nothing of models.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envace.errors import UserError


@dataclass(frozen=True)
class Variant:
    """Overrides that make a run differ, and the seed it runs with."""

    overrides: tuple[str, ...]
    seed: int

    @property
    def name(self) -> str:
        label = "+".join(self.overrides).replace("/", "_").replace("=", "-") or "run"
        return f"{label}/seed-{self.seed}"


@dataclass
class Finished:
    variant: Variant
    folder: Path
    code: int
    seconds: float
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)


def variants(vary: Sequence[str], seeds: Sequence[int]) -> list[Variant]:
    """Every combination of ``key=a,b,c`` items with every seed.

    Raises:
        UserError: an item is not ``key=value[,value…]``.
    """
    axes: list[list[str]] = []
    for item in vary:
        key, sign, values = item.partition("=")
        if not sign or not values:
            raise UserError(f"--vary {item!r}: write it as key=value,value")
        axes.append([f"{key}={value}" for value in values.split(",")])
    return [Variant(tuple(combination), seed) for combination in itertools.product(*axes) for seed in seeds]


def run_study(
    config: str,
    overrides: Sequence[str],
    plan: Sequence[Variant],
    out: Path,
    jobs: int,
    progress: Callable[[str], None] = print,
) -> list[Finished]:
    """Runs ``plan`` with at most ``jobs`` processes at once, one thread each, and reads what each run wrote.

    A run whose folder already holds a finished run is not run again, so an interrupted study is continued by the same
    command.

    Raises:
        UserError: a run failed; the message has its last lines and the path of its log.
    """
    waiting, running, finished = (
        list(plan),
        dict[int, tuple[Variant, subprocess.Popen[bytes], float]](),
        list[Finished](),
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                variant = waiting.pop(0)
                folder = out / variant.name
                if (folder / "finished.json").is_file():
                    seconds = json.loads((folder / "finished.json").read_text())["seconds"]
                    finished.append(_read(variant, folder, 0, seconds))
                    continue
                folder.mkdir(parents=True, exist_ok=True)
                command = [sys.executable, "-m", "envace", "train", config, *overrides, *variant.overrides]
                command += [f"seed={variant.seed}", "--out", str(folder)]
                with (folder / "console.log").open("wb") as log:
                    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
                running[process.pid] = (variant, process, time.monotonic())
                progress(f"started {variant.name}")
            for pid, (variant, process, started) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[pid]
                folder, seconds = out / variant.name, time.monotonic() - started
                if process.returncode != 0:
                    tail = (folder / "console.log").read_text(errors="replace").splitlines()[-5:]
                    raise UserError(f"{variant.name} failed; see {folder / 'console.log'}:\n" + "\n".join(tail))
                (folder / "finished.json").write_text(json.dumps({"seconds": seconds}))
                finished.append(_read(variant, folder, 0, seconds))
                progress(f"finished {variant.name} in {seconds:.0f} s")
            time.sleep(0.2)
    finally:
        for _, process, _ in running.values():
            process.terminate()
    order = {variant: position for position, variant in enumerate(plan)}
    return sorted(finished, key=lambda run: order[run.variant])


def _read(variant: Variant, folder: Path, code: int, seconds: float) -> Finished:
    evaluations = [json.loads(path.read_text()) for path in sorted((folder / "evaluations").glob("*.json"))]
    log = folder / "metrics.jsonl"
    metrics = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    return Finished(variant, folder, code, seconds, evaluations, metrics)
