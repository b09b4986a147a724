"""A study's runs: every variant with every seed, each an ``envace train`` process of one thread in its own folder."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from envace.config import TrainSettings, dump_settings, load_settings
from envace.errors import UserError
from envace.training.checkpoint import SETTINGS, RunFolder, has_run, write_whole
from envace.training.loop import ready
from envace.training.running import Progress

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Planned:
    """One run of a study."""

    variant: tuple[str, ...]
    """The overrides that set it apart, ``responder=replay`` for instance; empty where nothing is varied."""
    seed: int
    folder: Path
    settings: TrainSettings

    @property
    def title(self) -> str:
        return " ".join([*self.variant, f"seed {self.seed}"])

    def finished(self) -> bool:
        """All steps were made, and the last evaluation, where one was asked for, is there."""
        run, last = RunFolder(self.folder), self.settings.steps
        evaluated = not self.settings.evaluation.worlds or run.evaluation(last).is_file()
        return evaluated and last in run.checkpoints()


def plan(config: Path, overrides: Sequence[str], vary: Sequence[str], seeds: Sequence[int], out: Path) -> list[Planned]:
    """The runs of a study.

    Args:
        vary: ``key=value,value…`` each; several give every combination. Commas in brackets, braces and quotes are part of
            a value.

    Raises:
        UserError: settings that are wrong in any variant, a variant twice, no seed or one twice, or a
            folder that holds a run with other settings.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError("--seeds: give different whole numbers, such as 0,1,2")
    axes: dict[str, list[str]] = {}
    for axis in vary:
        key, values = _axis(axis)
        if key in axes:
            raise UserError(f"--vary {axis!r}: {key} is varied twice; name all its values in one --vary")
        axes[key] = [f"{key}={value}" for value in values]
    if "seed" in axes or any(one.partition("=")[0] == "seed" for one in overrides):
        raise UserError("seed: a study's seeds are given by --seeds")
    runs: list[Planned] = []
    for variant in itertools.product(*axes.values()):
        for seed in seeds:
            settings = load_settings(TrainSettings, config, [*overrides, *variant, f"seed={seed}"])
            folder = out.joinpath(*map(_folder_name, variant), f"seed-{seed}")
            for other in runs:
                if other.settings == settings or other.folder == folder:
                    what = "settings" if other.settings == settings else f"folder, {folder}"
                    raise UserError(
                        f"--vary: {' '.join(other.variant)} and {' '.join(variant)} have the same {what}; leave one out"
                    )
            runs.append(Planned(variant, seed, folder, settings))
    for run in runs:
        if has_run(run.folder) and load_settings(TrainSettings, run.folder / SETTINGS) != run.settings:
            raise UserError(
                f"{run.folder}: holds a run with other settings (see its {SETTINGS}); "
                "choose another --out, or remove that folder"
            )
    return runs


def _axis(text: str) -> tuple[str, list[str]]:
    """The key and the values of a ``--vary``, cut where YAML would cut a list of them."""
    key, _, values = text.partition("=")
    try:
        node = yaml.compose(f"[{values}]", yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        node = None
    items = node.value if node is not None else []
    if not key or not items or values.rstrip().endswith(","):
        raise UserError(
            f"--vary {text!r}: write it as key=value,value; a value with a comma in it stands in brackets or quotes"
        )
    return key, [values[item.start_mark.index - 1 : item.end_mark.index - 1] for item in items]


def _folder_name(override: str) -> str:
    """``override`` without what a shell or a file system would take for something else."""
    return re.sub(r"[^\w.,=+-]", "_", override)


class Failure(UserError):
    """A run of the study did not finish."""


def execute(runs: Sequence[Planned], jobs: int, say: Progress, every: float = 15.0) -> None:
    """Makes the unfinished runs, at most ``jobs`` at once; finished ones are kept and begun ones resumed.

    The first Ctrl-C lets every run finish its step and save. No run outlives the study, not even a killed one.

    Raises:
        UserError: a variant cannot be run; nothing was started.
        Failure: a run failed (its last lines are in the message), once the others have ended, or the study was
            interrupted.
    """
    waiting = [run for run in runs if not run.finished()]
    for run in runs:
        if run not in waiting:
            say(f"{run.title}: finished before, kept")
    for run in {run.variant: run for run in waiting}.values():
        ready(run.settings)  # a last variant's fault must not show when the others have run for hours
    active: dict[subprocess.Popen[bytes], Planned] = {}
    failed: list[tuple[Planned, str]] = []
    told = time.monotonic()
    with _interruptible(active) as interrupted, _alive() as alive:
        while waiting or active:
            while waiting and len(active) < jobs and not interrupted():
                run = waiting.pop(0)
                begun = has_run(run.folder)
                active[_start(run, begun, alive)] = run
                say(f"{run.title}: {'resumed' if begun else 'started'} in {run.folder}")
            if interrupted():
                waiting = []
            for process in [one for one in active if one.poll() is not None]:
                run = active.pop(process)
                if process.returncode:
                    failed.append((run, _tail(run.folder)))
                    say(f"{run.title}: failed")
                elif run.finished():
                    say(f"{run.title}: finished")
            if active and time.monotonic() - told >= every:
                told = time.monotonic()
                say("; ".join(progress(run) for run in active.values()))
            time.sleep(POLL_SECONDS)
        if interrupted():
            raise Failure("stopped; the same command goes on from where each run was saved")
    if failed:
        run, tail = failed[0]
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise Failure(f"{run.title}{more} failed; {run.folder}/output.txt ends with:\n{tail}")


def progress(run: Planned) -> str:
    """A running run in a few words."""
    lines = RunFolder(run.folder).read_metrics()
    if not lines:
        return f"{run.title}: starting"
    metrics = lines[-1]
    reward = metrics.get("reward")
    shown = "" if reward is None else f", reward {reward:.2f}"
    return f"{run.title}: step {metrics['step']}/{run.settings.steps}{shown}"


@contextmanager
def _alive() -> Iterator[int]:
    """What the runs read from: a pipe that ends when this process does, since nobody else holds its other end."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def _start(run: Planned, begun: bool, alive: int) -> subprocess.Popen[bytes]:
    """The process; in a session of its own, so that a terminal's Ctrl-C reaches it through the study alone, and once."""
    run.folder.mkdir(parents=True, exist_ok=True)
    if begun:
        command = ["train", "--resume", str(run.folder)]
    else:
        file = run.folder / "study.yaml"
        write_whole(file, dump_settings(run.settings).encode())
        command = ["train", str(file), "--out", str(run.folder)]
    threads = str(run.settings.engine.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with (run.folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "envace.study.child", str(alive), *command],
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            pass_fds=[alive],
        )  # fmt: skip


def _tail(folder: Path, lines: int = 5) -> str:
    return "\n".join((folder / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


@contextmanager
def _interruptible(active: dict[subprocess.Popen[bytes], Planned]) -> Iterator[Callable[[], bool]]:
    """Passes the first interrupt on to the running processes, and a second one as a kill."""
    count = 0

    def stop(signum: int, frame: Any) -> None:
        nonlocal count
        count += 1
        for process in active:
            process.send_signal(signal.SIGINT if count == 1 else signal.SIGKILL)

    previous = {kind: signal.signal(kind, stop) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: count > 0
    finally:
        for process in active:  # an error here must not leave processes behind
            process.kill()
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def seeds_of(text: str) -> list[int]:
    """``0,1,2`` as numbers.

    Raises:
        UserError: it is something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds {text!r}: give whole numbers separated by commas") from None
