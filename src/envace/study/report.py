"""What a study found, as numbers: pure functions from run folders to the contents of ``report.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import Any

from envace.study.runs import Planned
from envace.training.checkpoint import RunFolder

BEFORE_AFTER = ("success", "greedy", "held_out", "fidelity", "fidelity_greedy", "fidelity_held_out")

TOTALS = (
    "external_calls_training",
    "external_calls_evaluation",
    "not_scored",
    "tokens_sampled",
    "tokens_trained",
    "tokens_computed",
)


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean, sample standard deviation, least, greatest and every value; ``None`` stays ``None`` and enters no mean."""
    known = [value for value in values if value is not None]
    return {
        "mean": fmean(known) if known else None,
        "std": stdev(known) if len(known) > 1 else None,
        "min": min(known, default=None),
        "max": max(known, default=None),
        "per_seed": list(values),
    }


def measured(evaluation: dict[str, Any] | None) -> dict[str, float | None]:
    """An evaluation's headline figures.

    ``success`` (sampled), ``greedy``: share of unseen tasks solved in the real worlds trained on; ``held_out``: in the
    worlds never trained on, sampled; ``fidelity``, ``fidelity_greedy``, ``fidelity_held_out``: share of rehearsed
    responses equal to the real world's. ``None`` is not measured.
    """
    if evaluation is None:
        return dict.fromkeys(BEFORE_AFTER)

    def part(name: str, key: str) -> float | None:
        found = evaluation[name]["by"].get(key)
        return None if found is None else float(found["share"])

    return {
        "success": part("sampled", "in_training"),
        "greedy": part("greedy", "in_training"),
        "held_out": part("sampled", "held_out"),
        "fidelity": part("rehearsed", "in_training"),
        "fidelity_greedy": part("rehearsed_greedy", "in_training"),
        "fidelity_held_out": part("rehearsed", "held_out"),
    }


def run_report(run: Planned) -> dict[str, Any]:
    """One run, from its folder."""
    steps = RunFolder(run.folder).read_metrics()
    evaluations = sorted((run.folder / "evaluations").glob("step-*.json"))
    every = [json.loads(file.read_text(encoding="utf-8")) for file in evaluations]
    by_step = {found["step"]: found for found in every}
    before, after = by_step.get(0), by_step.get(run.settings.steps)
    return {
        "variant": list(run.variant),
        "seed": run.seed,
        "folder": str(run.folder),
        "finished": run.finished(),
        "steps": len(steps),
        "before": measured(before),
        "after": measured(after),
        "by_before": before["sampled"]["by"] if before else None,
        "by_after": after["sampled"]["by"] if after else None,
        "evaluations": [{"step": found["step"], **measured(found)} for found in every],
        "external_calls_training": sum(step["external_calls"] for step in steps),
        "external_calls_evaluation": sum(found["external_calls"] for found in every),
        "not_scored": sum(step["not_scored"] for step in steps),
        "tokens_sampled": sum(step["tokens_sampled"] for step in steps),
        "tokens_trained": sum(int(step["tokens_trained"]) for step in steps),
        "tokens_computed": sum(int(step["tokens_computed"]) for step in steps),
        "seconds": sum(step["seconds"] for step in steps) + sum(found["seconds"] for found in every),
    }


def variant_report(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The runs of one variant together: before and after, the gain in points, and what it took."""
    found: dict[str, Any] = {"variant": runs[0]["variant"], "seeds": [run["seed"] for run in runs]}
    for name in BEFORE_AFTER:
        for when in ("before", "after"):
            found[f"{name}_{when}"] = spread([run[when][name] for run in runs])["mean"]
        gains = [_difference(run["after"][name], run["before"][name]) for run in runs]
        found["gain_points" if name == "success" else f"{name}_gain_points"] = spread(gains)
    for name in TOTALS:
        found[name] = sum(run[name] for run in runs)
    return found | {"finished": all(run["finished"] for run in runs), "runs": list(runs)}


def study_report(runs: Iterable[Planned]) -> dict[str, Any]:
    """Every variant of a study. With one variant its block is the report itself; see ``variant_report`` for the keys."""
    variants: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for run in runs:
        variants.setdefault(run.variant, []).append(run_report(run))
    blocks = [variant_report(found) for found in variants.values()]
    return blocks[0] if len(blocks) == 1 else {"variants": blocks}


def blocks_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """A report's variants, be there one or several."""
    found: list[dict[str, Any]] = report.get("variants", [report])
    return found


def _difference(after: float | None, before: float | None) -> float | None:
    """In points: hundredths of a share."""
    return None if after is None or before is None else 100 * (after - before)
