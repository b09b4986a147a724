"""Prompts computed once a group against once a row: tokens and seconds of an update that gives the same gradient.

    python bench/shared_prefixes.py MODEL

MODEL is a policy's folder (its start, as recipes/tiny/make_policy.py writes it, will do). Rows are those of episodes in the
built-in worlds, eight a task and both roles; each ends after one of its completions, as episodes of a policy do.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace

import torch

from envace.chat.render import ChatRenderer
from envace.engines.base import TrainingRow
from envace.engines.local.loading import load_policy
from envace.engines.local.trainer import Trainer, TrainerSettings
from envace.roles.rehearse import RehearsePrompt
from envace.training.supervised import Trajectory, supervised_rows
from envace.worlds.demonstrator import demonstrate
from envace.worlds.tasks import build_tasks

WORLDS, TASKS, GROUP = ("orders", "bank", "calendar", "library"), 4, 8


def sampled(row: TrainingRow, rng: random.Random) -> TrainingRow:
    """``row`` up to the end of one of its completions, with an advantage."""
    ends = [end for end, (now, then) in enumerate(zip(row.mask, (*row.mask[1:], 0), strict=True), 1) if now > then]
    end, advantage = rng.choice(ends), rng.uniform(-1, 1)
    mask = row.mask[:end]
    advantages, logprobs = tuple(advantage * one for one in mask), tuple(-7.0 * one for one in mask)
    return replace(row, ids=row.ids[:end], mask=mask, advantages=advantages, logprobs=logprobs)


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_policy(sys.argv[1], torch.float32, "cpu")
    renderer, prompt, rng = ChatRenderer(tokenizer), RehearsePrompt("brief"), random.Random(0)
    rows = [
        sampled(row, rng)
        for world in WORLDS
        for task in build_tasks(world, TASKS, 0, "train")
        for episode in range(GROUP)
        for row in supervised_rows(Trajectory(task=task, messages=demonstrate(task, episode, 0.5)), renderer, prompt)
    ]
    for name, some in (
        ("act", [row for row in rows if row.role == "act"]),
        ("rehearse", [row for row in rows if row.role == "rehearse"]),
        ("both roles", rows),
    ):
        figures = []
        for share in (False, True):
            trainer = Trainer(model, TrainerSettings(lr=1e-9, share_prefixes=share))
            trainer.step(
                some[:GROUP],
            )  # warm up
            started = time.process_time()
            metrics = trainer.step(
                some,
            )
            figures.append((metrics["tokens_computed"], time.process_time() - started))
        (many, slow), (few, fast) = figures
        print(
            f"{name}: {len(some)} rows, {metrics['tokens_trained']:.0f} tokens trained; unshared {many:.0f} tokens in "
            f"{slow:.2f} s, shared {few:.0f} in {fast:.2f} s: {many / few:.2f} times the tokens, {slow / fast:.2f} times "
            "the seconds"
        )


if __name__ == "__main__":
    main()
