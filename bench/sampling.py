"""Episodes at once against one at a time, and against lockstep, where every one of a batch waits for the slowest.

    python bench/sampling.py

The work is the shape of an episode: a prompt that a group shares, then four completions of uneven length, each followed by
a response. All ways draw the same tokens; the figures are ratios of seconds measured in this run.
"""

from __future__ import annotations

import asyncio
import random
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from envace.engines.base import SamplingParams
from envace.engines.local.sampler import LocalSampler

EPISODES, GROUP, TURNS, PROMPT, VOCABULARY = 64, 8, 4, 220, 1500


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=4, head_dim=32, **shape)).eval()


def lengths(episode: int) -> list[int]:
    """Mostly short completions and some long ones, as tool calls and responses are."""
    rng = random.Random(episode)
    return [rng.randint(8, 24) if rng.random() < 0.8 else rng.randint(60, 90) for _ in range(TURNS)]


def prompt(number: int) -> tuple[int, ...]:
    rng = random.Random(1000 + number)
    return tuple(rng.randrange(VOCABULARY) for _ in range(PROMPT))


async def episode(sampler: LocalSampler, number: int) -> None:
    context, rng = prompt(number // GROUP), random.Random(number)
    for turn, size in enumerate(lengths(number)):
        sample = await sampler.sample(context, SamplingParams(max_tokens=size, seed=100 * number + turn))
        context = (*context, *sample.completion_ids, *(rng.randrange(VOCABULARY) for _ in range(20)))


async def together(sampler: LocalSampler) -> None:
    await asyncio.gather(*(episode(sampler, number) for number in range(EPISODES)))


async def one_by_one(sampler: LocalSampler) -> None:
    for number in range(EPISODES):
        await episode(sampler, number)


async def lockstep(sampler: LocalSampler) -> None:
    """Every turn of all episodes ends when its slowest completion does; what others would draw past their end is waste."""
    contexts = [prompt(number // GROUP) for number in range(EPISODES)]
    rngs = [random.Random(number) for number in range(EPISODES)]
    for turn in range(TURNS):
        sizes = [lengths(number)[turn] for number in range(EPISODES)]
        samples = await asyncio.gather(
            *(
                sampler.sample(context, SamplingParams(max_tokens=max(sizes), seed=100 * number + turn))
                for number, context in enumerate(contexts)
            )
        )
        contexts = [
            (*context, *sample.completion_ids[:size], *(rng.randrange(VOCABULARY) for _ in range(20)))
            for context, sample, size, rng in zip(contexts, samples, sizes, rngs, strict=True)
        ]


def main() -> None:
    torch.set_num_threads(1)
    policy, seconds = model(), {}
    for name, way, reuse in (
        ("together", together, True),
        ("one by one", one_by_one, True),
        ("lockstep", lockstep, True),
        ("together, nothing reused", together, False),
    ):
        sampler = LocalSampler(policy, max_batch=EPISODES, prefix_tokens=200_000 if reuse else 0)
        started = time.perf_counter()
        asyncio.run(way(sampler))
        seconds[name] = time.perf_counter() - started
        stats = sampler.stats
        print(
            f"{name}: {seconds[name]:.2f} s, {stats.steps} passes, {stats.prompt_tokens} prompt tokens asked for, "
            f"{stats.prefill_tokens} computed, {stats.model_seconds / seconds[name]:.0%} of the time in the model"
        )
    for name in list(seconds)[1:]:
        print(f"{name} / together: {seconds[name] / seconds['together']:.1f}")


if __name__ == "__main__":
    main()
