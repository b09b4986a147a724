"""Merged rows against one row a generation: tokens computed and seconds of an update that gives the same gradient.

    python bench/merged_rows.py

The rows are those of a step of the quickstart, both roles. What rows begin with in common is computed for each of them here,
so that merging is measured alone; bench/shared_prefixes.py measures sharing.
"""

from __future__ import annotations

import time

from quickstart import Quickstart

from envace.algorithms.rolewise_grpo import build_rows
from envace.engines.local.trainer import Trainer


def main() -> None:
    run = Quickstart()
    groups, figures = run.sample(1), {}
    apart = run.settings.engine.model_copy(update={"share_prefixes": False, "lr": 1e-9})
    for name, merge in (("merged", True), ("unmerged", False)):
        rows, _ = build_rows(
            groups, run.settings.algorithm.model_copy(update={"act_kl": 0.0, "rehearse_kl": 0.0}), merge
        )
        trainer = Trainer(run.engine.model, apart)
        trainer.step(rows[:8])  # warm up
        started = time.perf_counter()
        metrics = trainer.step(rows)
        seconds, computed = time.perf_counter() - started, metrics["tokens_computed"]
        figures[name] = computed, seconds
        trained = metrics["tokens_trained"]
        print(f"{name}: {len(rows)} rows, {computed:.0f} tokens computed for {trained:.0f} trained, {seconds:.2f} s")
    (many, slow), (few, fast) = figures["unmerged"], figures["merged"]
    print(f"unmerged / merged: {many / few:.2f} times the tokens, {slow / fast:.2f} times the seconds")


if __name__ == "__main__":
    main()
