"""What a study found, as numbers: pure functions from run folders to the contents of ``report.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from envace.data.tasks import describe
from envace.errors import UserError
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


class _Share(BaseModel):
    share: float = Field(ge=0, le=1)


class _Measure(BaseModel):
    by: dict[str, _Share]


class _Evaluation(BaseModel):
    """What is read of an evaluation's file."""

    step: int
    seconds: FiniteFloat
    external_calls: int
    sampled: _Measure
    greedy: _Measure
    rehearsed: _Measure
    rehearsed_greedy: _Measure


class _Step(BaseModel):
    """What is read of a step's metrics, here and for the curves."""

    step: int
    seconds: FiniteFloat
    external_calls: int
    not_scored: int
    tokens_sampled: int
    tokens_trained: int
    tokens_computed: int
    reward_act: FiniteFloat | None
    reward_rehearse: FiniteFloat | None
    response_validity: FiniteFloat | None
    tokens_per_second: FiniteFloat | None


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """A run's metrics, a step once: where two runs wrote into one folder, by its last line.

    Raises:
        UserError: a line that is not a step's.
    """
    run = RunFolder(folder)
    found: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(run.read_metrics(), 1):
        try:
            found[_Step.model_validate(line).step] = line
        except ValidationError as error:
            raise UserError(f"{run.metrics}, line {number}: damaged: {describe(error)}; mend or remove it") from None
    return list(found.values())


def read_evaluation(file: Path) -> dict[str, Any]:
    """An evaluation's measures.

    Raises:
        UserError: the file is damaged.
    """
    held = file.read_bytes()
    try:
        _Evaluation.model_validate_json(held)
    except ValidationError as error:
        raise UserError(
            f"{file}: damaged: {describe(error)}; delete it, and the same command measures anew what was the run's last "
            "evaluation (an earlier one is left out)"
        ) from None
    read: dict[str, Any] = json.loads(held)
    return read


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
    """One run, from its folder.

    Raises:
        UserError: one of its files is damaged.
    """
    steps = read_steps(run.folder)
    every = [read_evaluation(file) for file in sorted((run.folder / "evaluations").glob("step-*.json"))]
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
