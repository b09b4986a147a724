"""The training loop: the order of things, and nothing else.

Tasks -> episodes -> rewards -> advantages -> one update -> the next step. No random state is carried from step to step:
every draw is seeded by what it is for, so a run resumed from a checkpoint equals an undisturbed one bit for bit.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from envace.algorithms.rolewise_grpo import build_rows, has_variance
from envace.chat.render import ChatRenderer
from envace.chat.settings import ChatSettings
from envace.config import TaskSettings, TrainSettings, dump_settings
from envace.data.tasks import read_tasks
from envace.engines.base import Sampler
from envace.engines.local.engine import LocalEngine
from envace.engines.local.loading import resolve
from envace.episode import EpisodeRunner
from envace.errors import UserError
from envace.evaluation.evaluate import EvaluationPlan, evaluate
from envace.responders import make_responder
from envace.rewards.scorer import RuleScorer, require_scorable
from envace.roles.rehearse import RehearsePrompt
from envace.seeds import derive_seed
from envace.training.checkpoint import RunFolder, open_run
from envace.training.metrics import Trackers, advantage_metrics, require_installed, step_metrics
from envace.training.running import Progress, logged, stop_after_step, teller
from envace.types import Group, Task
from envace.worlds import HELD_OUT
from envace.worlds.tasks import build_tasks

OnStep = Callable[[int, dict[str, Any]], None]


def load_tasks(settings: TaskSettings) -> list[Task]:
    """Training tasks.

    Raises:
        UserError: none are named, or they are of a world that is held out.
    """
    if settings.file is not None:
        tasks = list(read_tasks(settings.file, scorable=True))
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


def ready(settings: TrainSettings) -> list[Task]:
    """The tasks to train on, once all is checked that can be without loading a model.

    Raises:
        UserError: tasks that cannot be trained on, or a model, a prompt or a tracker that is not there.
    """
    tasks = load_tasks(settings.tasks)
    require_scorable(tasks)
    for model in (settings.model, settings.simulator_model):
        if model is not None:
            resolve(model)
    RehearsePrompt(settings.rehearse.prompt)
    require_installed(settings.trackers)
    return tasks


def train(
    settings: TrainSettings, out: Path, resume: bool = False, progress: Progress = print, on_step: OnStep | None = None
) -> RunFolder:
    """Trains, and returns the run's folder. The first Ctrl-C ends it after the step, with a checkpoint; a second at once.

    Args:
        progress: is told, a line at a time, what happens; the same lines go to the run's ``log.txt``.
        on_step: is called with each step and its metrics once they are on disk.

    Raises:
        UserError: settings, tasks or model that cannot be trained on, or a disk that cannot be written to.
    """
    tasks = ready(settings)
    say = teller(progress)
    with open_run(out, dump_settings(settings), resume) as run, logged(run.log), stop_after_step() as stop:
        _steps(settings, tasks, run, resume, stop, say, on_step)
        say(f"run: {run.path}")
    return run


def _steps(
    settings: TrainSettings,
    tasks: Sequence[Task],
    run: RunFolder,
    resume: bool,
    stop: Callable[[], bool],
    say: Progress,
    on_step: OnStep | None,
) -> None:
    algorithm, every = settings.algorithm, settings.evaluation.every
    engine = LocalEngine(
        settings.model,
        settings.engine,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        ratio=algorithm.ratio,
        kl=algorithm.kl,
        keep_start=algorithm.act_kl > 0 or algorithm.rehearse_kl > 0,
    )
    renderer = settings.chat.renderer(engine.tokenizer, engine.eos_ids)

    def second_model() -> tuple[Sampler, ChatRenderer]:
        second = LocalEngine(settings.simulator_model or settings.model, settings.engine)
        chat = ChatSettings() if settings.simulator_model else settings.chat
        return second.sampler, chat.renderer(second.tokenizer, second.eos_ids)

    prompt = RehearsePrompt(settings.rehearse.prompt, references=settings.rehearse.references)
    sampling, model = settings.rehearse_sampling, engine.sampler
    runner = EpisodeRunner(
        model,
        renderer,
        make_responder(settings.responder, model, renderer, prompt, sampling, simulator=second_model),
        RuleScorer(settings.reward),
        act=settings.act_sampling,
        limits=settings.limits,
    )
    done = max(run.checkpoints(), default=0) if resume else 0

    def evaluate_if_due(step: int) -> None:
        due = step in (0, settings.steps) or (every and step % every == 0)
        if settings.evaluation.worlds and due and not run.evaluation(step).is_file():
            _evaluate(settings, engine, renderer, run, step, say)

    with closing(
        Trackers(run.tensorboard, settings.trackers, run.path.name, settings.model_dump(mode="json"), first=done + 1)
    ) as trackers:
        # All that could refuse these settings has had its say; from here on there are results to keep.
        if resume:
            run.forget_after(done)
            if done:
                engine.load(run.checkpoint(done))
            say(f"resuming after step {done}")
        evaluate_if_due(done)  # a run may have been stopped between its checkpoint and its evaluation
        started = time.monotonic()
        for step in range(done + 1, settings.steps + 1):
            began, prefilled = time.monotonic(), engine.sampler.stats.prefill_tokens
            groups = asyncio.run(_sample(runner, tasks, settings, step))
            require_evidence(groups, step)
            sampled = time.monotonic()
            rows, metrics = build_rows(groups, algorithm)
            metrics |= advantage_metrics(rows)
            ready = time.monotonic()
            metrics |= engine.update(rows).metrics
            updated = time.monotonic()
            run.write_rollouts(step, groups)
            seconds = time.monotonic() - began
            record: dict[str, Any] = {"step": step, **step_metrics(groups), **metrics}
            record |= {
                "tokens_prefilled": engine.sampler.stats.prefill_tokens - prefilled,
                "tokens_per_second": record["tokens_sampled"] / (sampled - began),
                "sampling_seconds": sampled - began,
                "update_seconds": updated - ready,
                "other_seconds": seconds - (sampled - began) - (updated - ready),
                "seconds": seconds,
            }
            run.write_metrics(record)
            trackers.log(step, record)
            left = (time.monotonic() - started) / (step - done) * (settings.steps - step)
            say(f"step {step}/{settings.steps}: {_line(record)}; {seconds:.1f} s, {left:.0f} s to go")
            if on_step is not None:
                on_step(step, record)
            saved = stop() or step == settings.steps or step % settings.checkpoint_every == 0
            if saved:
                run.write_checkpoint(step, engine.save, settings.keep_checkpoints)
            if not stop():
                evaluate_if_due(step)
            if stop():
                if not saved:  # the interrupt came during the evaluation
                    run.write_checkpoint(step, engine.save, settings.keep_checkpoints)
                say(f"stopped after step {step}; go on with: envace train --resume {run.path}")
                break


def tasks_of_step(tasks: Sequence[Task], settings: TrainSettings, step: int) -> list[Task]:
    """The step's tasks: each epoch is a permutation that depends on the seed and the epoch alone."""
    chosen = []
    first = (step - 1) * settings.tasks_per_step
    orders: dict[int, list[int]] = {}
    for position in range(first, first + settings.tasks_per_step):
        epoch, place = divmod(position, len(tasks))
        if epoch not in orders:
            orders[epoch] = list(range(len(tasks)))
            random.Random(derive_seed("epoch", settings.seed, epoch)).shuffle(orders[epoch])
        chosen.append(tasks[orders[epoch][place]])
    return chosen


def require_evidence(groups: Sequence[Group], step: int) -> None:
    """Says that a step has nothing to learn from, which the next one would not mend.

    Raises:
        UserError: no episode could be scored, or none could sample anything; names a task and why.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    first = episodes[0]
    why = f"{first.end.value}: {first.error.code}: {first.error.message}" if first.error else first.end.value
    if not any(episode.scored for episode in episodes):
        raise UserError(
            f"step {step}: none of its {len(episodes)} episodes could be scored, so there is nothing to learn from; "
            f"the first is of task {first.task_id!r} ({why})"
        )
    if not any(generation.completion_ids for episode in episodes for generation in episode.generations):
        raise UserError(
            f"step {step}: none of its {len(episodes)} episodes had room for a single token ({why}); the limits "
            f"(limits.prompt_tokens, limits.context_tokens, engine.max_context) are too small for task {first.task_id!r}"
        )


async def _sample(runner: EpisodeRunner, tasks: Sequence[Task], settings: TrainSettings, step: int) -> list[Group]:
    """The step's groups; in each refill round, as many groups of tasks not tried yet as had no variance so far."""
    seed = derive_seed("step", settings.seed, step)
    chosen = tasks_of_step(tasks, settings, step)
    groups = await _groups(runner, chosen, settings.group_size, seed)
    tried = {task.id for task in chosen}
    for number in range(1, settings.refill_rounds + 1):
        missing = settings.tasks_per_step - sum(map(has_variance, groups))
        fresh = [task for task in tasks if task.id not in tried]
        if missing <= 0 or not fresh:
            break
        rng = random.Random(derive_seed("refill", settings.seed, step, number))
        chosen = rng.sample(fresh, min(missing, len(fresh)))
        tried |= {task.id for task in chosen}
        groups += await _groups(runner, chosen, settings.group_size, derive_seed(seed, "refill", number))
    return groups


async def _groups(runner: EpisodeRunner, tasks: Sequence[Task], size: int, seed: int) -> list[Group]:
    return list(
        await asyncio.gather(
            *(runner.run_group(task, size, derive_seed(seed, slot)) for slot, task in enumerate(tasks))
        )
    )


def _evaluate(
    settings: TrainSettings, engine: LocalEngine, renderer: ChatRenderer, run: RunFolder, step: int, say: Progress
) -> None:
    wanted = settings.evaluation
    began = time.monotonic()
    tasks = [task for world in wanted.worlds for task in build_tasks(world, wanted.count, wanted.seed, "test")]
    plan = EvaluationPlan(
        act=settings.act_sampling.model_copy(update={"temperature": wanted.temperature}),
        rehearse=settings.rehearse_sampling,
        prompt=RehearsePrompt(settings.rehearse.prompt, references=settings.rehearse.references),
        limits=settings.limits,
        samples=wanted.samples,
        probes=wanted.probes,
        seed=wanted.seed,
    )
    result = asyncio.run(evaluate(engine.sampler, renderer, tasks, plan))
    seconds = time.monotonic() - began
    run.write_evaluation(step, {"step": step, **result.model_dump(), "seconds": seconds}, result.greedy.shown)
    say(
        f"evaluation after step {step}: real success {result.sampled.success:.3f} sampled, "
        f"{result.greedy.success:.3f} greedy; rehearsed = real {result.rehearsed.fidelity:.3f} sampled, "
        f"{result.rehearsed_greedy.fidelity:.3f} greedy; {seconds:.1f} s"
    )


def _line(record: dict[str, Any]) -> str:
    """A step in a few words; what there was none of is a dash."""

    def shown(name: str) -> str:
        return "-" if record[name] is None else f"{record[name]:.3f}"

    return (
        f"reward {shown('reward')} (act {shown('reward_act')}, rehearse {shown('reward_rehearse')}), "
        f"responses valid {shown('response_validity')}, {record['not_scored']} not scored, "
        f"{record['external_calls']} external calls, {record['tokens_per_second']:.0f} tokens/s"
    )
