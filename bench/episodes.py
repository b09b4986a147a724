"""Episodes by world rehearsal at once against one at a time, and where the seconds go.

    python bench/episodes.py MODEL

MODEL is a policy that can play both roles (what ``envace sft`` writes). All ways run the same episodes with the same seeds;
the figures are of this run. The third way answers every request from a record: what is left is the episodes' own work
(rendering, parsing, checking, scoring).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence

import torch

from envace.chat.render import ChatRenderer
from envace.engines.base import Sample, Sampler, SamplingParams
from envace.engines.local.engine import LocalEngine, LocalEngineSettings
from envace.engines.local.sampler import LocalSampler
from envace.episode import EpisodeRunner, Limits
from envace.responders import make_responder
from envace.rewards.scorer import RuleScorer
from envace.roles.generate import RoleSampling
from envace.roles.rehearse import RehearsePrompt
from envace.seeds import derive_seed
from envace.types import Episode, Task
from envace.worlds.tasks import build_tasks

Way = Callable[[EpisodeRunner, Sequence[Task]], Coroutine[None, None, list[Episode]]]
WORLDS, TASKS, GROUP = ("orders", "bank", "calendar", "library"), 4, 4


class Recorded:
    """Asks ``sampler`` once for what is asked again later."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._samples: dict[tuple[int, tuple[int, ...]], Sample] = {}

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Sample:
        key = (params.seed, tuple(prompt_ids))
        if key not in self._samples:
            self._samples[key] = await self._sampler.sample(prompt_ids, params)
        return self._samples[key]


async def at_once(runner: EpisodeRunner, tasks: Sequence[Task]) -> list[Episode]:
    groups = await asyncio.gather(*(runner.run_group(task, GROUP, 0) for task in tasks))
    return [episode for group in groups for episode in group.episodes]


async def one_by_one(runner: EpisodeRunner, tasks: Sequence[Task]) -> list[Episode]:
    return [await runner.run(task, index, derive_seed(0, task.id, index)) for task in tasks for index in range(GROUP)]


def main() -> None:
    torch.set_num_threads(1)
    engine = LocalEngine(sys.argv[1], LocalEngineSettings(device="cpu"))
    renderer = ChatRenderer(engine.tokenizer)
    tasks = [task for world in WORLDS for task in build_tasks(world, TASKS, 0, "train")]
    act, rehearse = RoleSampling(max_tokens=96), RoleSampling(max_tokens=160)

    def measure(name: str, way: Way, sampler: Sampler) -> float:
        responder = make_responder("rehearsal", sampler, renderer, RehearsePrompt("brief"), rehearse)
        limits = Limits(assistant_turns=10)
        runner = EpisodeRunner(sampler, renderer, responder, RuleScorer(), act=act, limits=limits)
        started = time.perf_counter()
        episodes = asyncio.run(way(runner, tasks))
        seconds = time.perf_counter() - started
        generations = [generation for episode in episodes for generation in episode.generations]
        tokens = sum(len(generation.completion_ids) for generation in generations)
        ends = ", ".join(f"{end} {count}" for end, count in Counter(episode.end.value for episode in episodes).items())
        print(
            f"{name}: {len(episodes)} episodes ({ends}), {len(generations)} generations, {tokens} tokens, {seconds:.2f} s"
        )
        return seconds

    local = LocalSampler(engine.model, max_batch=len(tasks) * GROUP)
    recorded = Recorded(local)
    together = measure("at once", at_once, recorded)
    model = local.stats.model_seconds
    own = measure("from the record", at_once, recorded)
    alone = measure("one by one", one_by_one, LocalSampler(engine.model))
    print(f"one by one / at once: {alone / together:.1f}")
    print(
        f"at once, outside the model: {1 - model / together:.1%} (the sampler's drawing and caches "
        f"{(together - model - own) / together:.1%}, the episodes' own work {own / together:.1%})"
    )


if __name__ == "__main__":
    main()
