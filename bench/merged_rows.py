"""Merged rows against one row a generation: tokens computed and seconds of an update that gives the same gradient.

python bench/merged_rows.py
"""

from __future__ import annotations

import random
import time

import torch
from sampling import VOCABULARY, model

from envace.algorithms.rows import Weighted, training_rows
from envace.engines.base import TrainingRow
from envace.engines.local.trainer import Trainer, TrainerSettings
from envace.types import Generation, Role


def episode(seed: int) -> list[Weighted]:
    """One role's four generations of a growing context: 150 prompt tokens, 20 a completion, 25 a response."""
    rng, context, items = random.Random(seed), [], []
    context = [rng.randrange(VOCABULARY) for _ in range(150)]
    for _ in range(4):
        completion = tuple(rng.randrange(VOCABULARY) for _ in range(20))
        generation = Generation(
            role=Role.ACT, turn=0, prompt_ids=tuple(context), completion_ids=completion, logprobs=(-7.3,) * 20,
            stop_reason="stop",
        )  # fmt: skip
        items.append(Weighted(generation, rng.uniform(-1, 1)))
        context += [*completion, *(rng.randrange(VOCABULARY) for _ in range(25))]
    return items


def update(rows: list[TrainingRow]) -> tuple[float, float, float]:
    trainer = Trainer(model(), TrainerSettings(lr=1e-4))
    trainer.step(rows[:8], "policy")  # warm up
    started = time.perf_counter()
    metrics = trainer.step(rows, "policy")
    return time.perf_counter() - started, metrics["tokens_computed"], metrics["tokens_trained"]


def main() -> None:
    torch.set_num_threads(1)
    episodes = [episode(seed) for seed in range(64)]
    figures = {}
    for name, merge in (("merged", True), ("unmerged", False)):
        rows = [row for items in episodes for row in training_rows(items, merge=merge)]
        figures[name] = update(rows)
        seconds, computed, trained = figures[name]
        print(f"{name}: {len(rows)} rows, {computed:.0f} tokens computed for {trained:.0f} trained, {seconds:.2f} s")
    (slow, many, _), (fast, few, _) = figures["unmerged"], figures["merged"]
    print(f"unmerged / merged: {many / few:.2f} times the tokens, {slow / fast:.2f} times the seconds")


if __name__ == "__main__":
    main()
