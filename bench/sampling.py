"""Episodes at once against one at a time, and against lockstep, where every one of a batch waits for the slowest.

    python bench/sampling.py

The requests are those of a step of the quickstart: every generation of its episodes, each asked for when the one before it
in its episode is done. All ways draw the same tokens; the figures are ratios of seconds measured in this run.
"""

from __future__ import annotations

import asyncio
import time
from itertools import zip_longest

from quickstart import Quickstart

from envace.engines.base import SamplingParams
from envace.engines.local.sampler import LocalSampler
from envace.types import Generation

Requests = list[list[Generation]]
"""The generations of each episode, in order."""


async def ask(sampler: LocalSampler, generation: Generation, size: int) -> None:
    await sampler.sample(generation.prompt_ids, SamplingParams(max_tokens=size, temperature=0))


async def episode(sampler: LocalSampler, generations: list[Generation]) -> None:
    for generation in generations:
        await ask(sampler, generation, len(generation.completion_ids))


async def together(sampler: LocalSampler, requests: Requests) -> None:
    await asyncio.gather(*(episode(sampler, generations) for generations in requests))


async def one_by_one(sampler: LocalSampler, requests: Requests) -> None:
    for generations in requests:
        await episode(sampler, generations)


async def lockstep(sampler: LocalSampler, requests: Requests) -> None:
    """Every turn of all episodes ends when its longest completion does; what others draw past their end is waste."""
    for turn in zip_longest(*requests):
        asked = [generation for generation in turn if generation is not None]
        size = max(len(generation.completion_ids) for generation in asked)
        await asyncio.gather(*(ask(sampler, generation, size) for generation in asked))


def main() -> None:
    run = Quickstart()
    episodes = [episode for group in run.sample(1) for episode in group.episodes]
    requests, seconds = [list(episode.generations) for episode in episodes], {}
    for name, way, reuse in (
        ("together, to warm up", together, True),
        ("together", together, True),
        ("one by one", one_by_one, True),
        ("lockstep", lockstep, True),
        ("together, nothing reused", together, False),
    ):
        sampler = LocalSampler(run.engine.model, max_batch=len(requests), prefix_tokens=200_000 if reuse else 0)
        started = time.perf_counter()
        asyncio.run(way(sampler, requests))
        seconds[name] = time.perf_counter() - started
        stats = sampler.stats
        print(
            f"{name}: {seconds[name]:.2f} s, {stats.requests} requests, {stats.decode_tokens} tokens decoded in "
            f"{stats.steps} passes, {stats.prefill_tokens} of {stats.prompt_tokens} prompt tokens computed"
        )
    for name in list(seconds)[2:]:
        print(f"{name} / together: {seconds[name] / seconds['together']:.1f}")


if __name__ == "__main__":
    main()
