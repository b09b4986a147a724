"""Where the seconds of a training step go: inside the model, and outside it.

    python bench/step.py

Three steps of the quickstart after one to warm up. In the model are forward and backward passes and the optimizer; outside
are rendering, parsing, checking and scoring, the drawing of tokens, the sampler's caches, advantages, rows and batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from quickstart import Quickstart

from envace.algorithms.rolewise_grpo import build_rows
from envace.engines.local import trainer

STEPS = 3


def main() -> None:
    run = Quickstart()
    outside = {"seconds": 0.0}

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = work(*args, **kwargs)
            outside["seconds"] += time.perf_counter() - started
            return result

        return measured

    # All of an update that is not the model's work.
    trainer._tensors = timed(trainer._tensors)
    trainer.bundles = timed(trainer.bundles)
    seconds = dict.fromkeys(("sampling, model", "sampling, outside", "update, model", "update, outside"), 0.0)
    for step in range(STEPS + 1):
        stats, began = run.engine.sampler.stats, time.perf_counter()
        before, outside["seconds"] = stats.model_seconds, 0.0
        groups = run.sample(step + 1)
        sampled = time.perf_counter()
        rows, _ = build_rows(groups, run.settings.algorithm)
        built = time.perf_counter()
        run.engine.update(rows)
        updated = time.perf_counter()
        if step:
            model = stats.model_seconds - before
            seconds["sampling, model"] += model
            seconds["sampling, outside"] += sampled - began - model
            seconds["update, model"] += updated - built - outside["seconds"]
            seconds["update, outside"] += built - sampled + outside["seconds"]
    total = sum(seconds.values())
    for name, spent in seconds.items():
        print(f"{name}: {spent / STEPS:.2f} s a step, {spent / total:.1%}")
    print(f"outside the model: {(seconds['sampling, outside'] + seconds['update, outside']) / total:.1%} of a step")


if __name__ == "__main__":
    main()
