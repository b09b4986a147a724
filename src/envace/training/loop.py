"""The training loop: the order of things, and nothing else.

Tasks -> episodes -> rewards -> advantages -> one update -> the next step. No random state is carried from step to step:
every draw is seeded by what it is for, so a run resumed from a checkpoint equals an undisturbed one bit for bit.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envace.algorithms.rolewise_grpo import build_rows, has_variance
from envace.chat.render import ChatRenderer
from envace.config import TaskSettings, TrainSettings
from envace.data.tasks import read_tasks
from envace.engines.local.engine import LocalEngine
from envace.episode import EpisodeRunner
from envace.errors import UserError
from envace.evaluation.evaluate import fidelity, real_success
from envace.responders.base import Responder
from envace.responders.environment import EnvironmentResponder
from envace.responders.rehearsal import RehearsalResponder
from envace.responders.replay import ReplayResponder
from envace.rewards.scorer import RuleScorer, require_scorable
from envace.roles.rehearse import RehearsePrompt
from envace.seeds import derive_seed
from envace.training.checkpoint import RunFolder, open_run
from envace.types import EndReason, Group, Role, Task
from envace.worlds import HELD_OUT
from envace.worlds.tasks import build_tasks

Progress = Callable[[str], None]


def load_tasks(settings: TaskSettings) -> list[Task]:
    """Training tasks.

    Raises:
        UserError: none are named, or they are of a world that is held out.
    """
    if settings.file is not None:
        tasks = list(read_tasks(settings.file))
    else:
        tasks = [
            task
            for world in settings.worlds
            for task in build_tasks(world, settings.count, settings.seed, settings.split)
        ]
    if not tasks:
        raise UserError("tasks: name a file or worlds")
    for task in tasks:
        if task.world is not None and task.world.name in HELD_OUT:
            raise UserError(
                f"task {task.id!r}: world {task.world.name!r} is held out to measure transfer; train on others"
            )
    return tasks


def make_responder(settings: TrainSettings, engine: LocalEngine, renderer: ChatRenderer) -> Responder:
    """Who answers calls in training; the one setting in which the four ways differ."""
    prompt = RehearsePrompt(settings.rehearse.prompt, references=settings.rehearse.references)
    match settings.responder:
        case "rehearsal":
            return RehearsalResponder(engine.sampler, renderer, prompt, settings.rehearse_sampling)
        case "simulator":
            second = LocalEngine(settings.simulator_model or settings.model, settings.engine)
            own = ChatRenderer(second.tokenizer)
            return RehearsalResponder(second.sampler, own, prompt, settings.rehearse_sampling, simulator=True)
        case "environment":
            # Imported here alone: a run by rehearsal never loads a world's code to execute.
            from envace.worlds.environment import WorldEnvironment

            return EnvironmentResponder(WorldEnvironment)
        case "replay":
            return ReplayResponder()


def train(settings: TrainSettings, out: Path, resume: bool = False, progress: Progress = print) -> RunFolder:
    """Trains, and returns the run's folder. The first Ctrl-C ends it after the step, with a checkpoint.

    Raises:
        UserError: settings, tasks or model that cannot be trained on.
    """
    tasks = load_tasks(settings.tasks)
    require_scorable(tasks)
    run = open_run(out, settings.model_dump_json(indent=1), resume)
    algorithm = settings.algorithm
    engine = LocalEngine(
        settings.model, settings.engine, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, kl=algorithm.kl
    )
    renderer = ChatRenderer(engine.tokenizer)
    done = max(run.checkpoints(), default=0) if resume else 0
    if resume:
        run.forget_after(done)
        if done:
            engine.load(run.checkpoint(done))
        progress(f"resuming after step {done}")
    if done == 0:
        _evaluate(settings, engine, renderer, run, 0, progress)
    runner = EpisodeRunner(
        engine.sampler,
        renderer,
        make_responder(settings, engine, renderer),
        RuleScorer(settings.reward),
        act=settings.act_sampling,
        limits=settings.limits,
    )
    started = time.monotonic()
    with _stop_after_step() as stop:
        for step in range(done + 1, settings.steps + 1):
            began = time.monotonic()
            chosen = tasks_of_step(tasks, settings, step)
            groups = asyncio.run(_sample(runner, chosen, settings, step))
            sampled = time.monotonic()
            rows, metrics = build_rows(groups, algorithm)
            metrics |= engine.update(rows).metrics
            metrics |= step_metrics(groups) | {
                "step": step,
                "sampling_seconds": sampled - began,
                "seconds": time.monotonic() - began,
            }
            run.write_step(step, groups, metrics)
            left = (time.monotonic() - started) / (step - done) * (settings.steps - step)
            progress(
                f"step {step}/{settings.steps}: reward {metrics['reward']:.3f}, responses valid "
                f"{metrics['response_validity']:.2f}, {metrics['seconds']:.1f} s, {left:.0f} s to go"
            )
            last = step == settings.steps or stop()
            if last or step % settings.checkpoint_every == 0:
                run.write_checkpoint(step, engine.save, settings.keep_checkpoints)
            every = settings.evaluation.every
            if step == settings.steps or (every and step % every == 0):
                _evaluate(settings, engine, renderer, run, step, progress)
            if last:
                break
    return run


def tasks_of_step(tasks: Sequence[Task], settings: TrainSettings, step: int) -> list[Task]:
    """The step's tasks: each epoch is a permutation that depends on the seed and the epoch alone."""
    chosen = []
    first = (step - 1) * settings.tasks_per_step
    for position in range(first, first + settings.tasks_per_step):
        epoch, place = divmod(position, len(tasks))
        order = list(range(len(tasks)))
        random.Random(derive_seed("epoch", settings.seed, epoch)).shuffle(order)
        chosen.append(tasks[order[place]])
    return chosen


def step_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """What a step's episodes say, without an engine."""
    episodes = [episode for group in groups for episode in group.episodes]
    scored = [episode.reward for episode in episodes if episode.reward is not None]
    generations = [generation for episode in episodes for generation in episode.generations]
    calls = [record for episode in episodes for record in episode.calls]
    malformed = sum(episode.end is EndReason.RESPONSE_ERROR for episode in episodes)
    by_role = {
        role: [episode for episode in episodes if any(g.role is role for g in episode.generations)] for role in Role
    }
    return {
        "episodes": len(episodes),
        "not_scored": len(episodes) - len(scored),
        "reward": sum(scored) / max(1, len(scored)),
        **{
            f"reward_{role.value}": sum(e.reward or 0.0 for e in own if e.scored) / max(1, sum(e.scored for e in own))
            for role, own in by_role.items()
        },
        "groups_with_variance": sum(map(has_variance, groups)),
        "response_validity": 1 - malformed / max(1, len(calls)),
        "external_calls": sum(episode.external_calls for episode in episodes),
        "tokens_sampled": sum(len(generation.completion_ids) for generation in generations),
        "ends": {
            reason.value: count for reason in EndReason if (count := sum(episode.end is reason for episode in episodes))
        },
    }


async def _sample(runner: EpisodeRunner, tasks: Sequence[Task], settings: TrainSettings, step: int) -> list[Group]:
    seed = derive_seed("step", settings.seed, step)
    return await asyncio.gather(
        *(runner.run_group(task, settings.group_size, derive_seed(seed, slot)) for slot, task in enumerate(tasks))
    )


def _evaluate(
    settings: TrainSettings, engine: LocalEngine, renderer: ChatRenderer, run: RunFolder, step: int, progress: Progress
) -> None:
    wanted = settings.evaluation
    if not wanted.worlds:
        return
    tasks = [task for world in wanted.worlds for task in build_tasks(world, wanted.count, wanted.seed, "test")]
    act = settings.act_sampling.model_copy(update={"temperature": wanted.temperature})
    prompt = RehearsePrompt(settings.rehearse.prompt, references=settings.rehearse.references)

    async def measure() -> dict[str, Any]:
        return {
            "step": step,
            "sampled": await real_success(engine.sampler, renderer, tasks, act, settings.limits, wanted.seed),
            "greedy": await real_success(
                engine.sampler,
                renderer,
                tasks,
                act.model_copy(update={"temperature": 0.0}),
                settings.limits,
                wanted.seed,
            ),
            "rehearsed": await fidelity(
                engine.sampler, renderer, tasks, prompt, settings.rehearse_sampling, wanted.seed
            ),
        }

    result = asyncio.run(measure())
    run.write_evaluation(step, result)
    progress(
        f"evaluation after step {step}: real success {result['sampled']['success']:.3f} sampled, "
        f"{result['greedy']['success']:.3f} greedy; rehearsed = real {result['rehearsed']['fidelity']:.3f}"
    )


@contextmanager
def _stop_after_step() -> Iterator[Callable[[], bool]]:
    """The first interrupt asks for a stop after the step; a second one stops at once."""
    asked = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
