"""What the benchmarks measure on: a training step of the quickstart, by the shipped policy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from envace.chat.render import ChatRenderer
from envace.config import TrainSettings, load_settings
from envace.engines.local.engine import LocalEngine
from envace.episode import EpisodeRunner
from envace.responders import make_responder
from envace.rewards.scorer import RuleScorer
from envace.roles.rehearse import RehearsePrompt
from envace.training.loop import load_tasks, tasks_of_step
from envace.types import Group, Task


class Quickstart:
    """The quickstart's settings, its engine, and its episodes."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.settings = load_settings(TrainSettings, Path("quickstart"))
        self.engine = LocalEngine(self.settings.model, self.settings.engine, keep_start=True)
        self.tasks = load_tasks(self.settings.tasks)
        renderer = ChatRenderer(self.engine.tokenizer)
        prompt = RehearsePrompt(self.settings.rehearse.prompt)
        sampler, rehearse = self.engine.sampler, self.settings.rehearse_sampling
        self.runner = EpisodeRunner(
            sampler,
            renderer,
            make_responder("rehearsal", sampler, renderer, prompt, rehearse),
            RuleScorer(self.settings.reward),
            act=self.settings.act_sampling,
            limits=self.settings.limits,
        )

    def sample(self, step: int) -> list[Group]:
        groups: list[Group] = []

        async def run(tasks: list[Task]) -> None:
            size = self.settings.group_size
            groups.extend(await asyncio.gather(*(self.runner.run_group(task, size, step) for task in tasks)))

        # Nothing is returned: where asyncio sets a signal handler, it writes out the result of the task in full.
        asyncio.run(run(tasks_of_step(self.tasks, self.settings, step)))
        return groups
